"""Loads: when requests come, in seconds, and what they ask for. Prompts are made up."""
import heapq
import math
import random
from itertools import accumulate, islice

from request import Request


def poisson(number, rate, seed):
    """When so many requests come at random; the first at 0."""
    stream = random.Random(f"arrivals {seed}")
    return accumulate((stream.expovariate(rate) for _ in range(number - 1)), initial=0.0)


def staged(stages, seed):
    """When requests come at random, for [(requests/s, seconds), ...]."""
    stream, start = random.Random(f"arrivals {seed}"), 0.0
    for rate, length in stages:
        time, start = start + stream.expovariate(rate), start + length
        while time < start:
            yield time
            time += stream.expovariate(rate)


class Source:
    """
    Requests, and when they come: at `times`, which ascend, or from so many clients, each of which
    waits for its answer. delay: seconds until the engine has a request. Sets `arrived` on each.
    """

    def __init__(self, requests, times=(), clients=0, delay=0.0):
        self.requests, self.clients, self.delay = iter(requests), clients, delay
        self.times = (time + delay for time in times)
        self.request = next(self.requests, None)
        self.due = [delay] * clients or [*islice(self.times, 1)]   # a heap

    @property
    def time(self):
        """When the engine gets the next one; math.inf if that depends on an answer, or none is."""
        return self.due[0] if self.due and self.request else math.inf

    def pop(self):
        """The next request."""
        request, self.request = self.request, next(self.requests, None)
        request.arrived = heapq.heappop(self.due) - self.delay
        self.due += [] if self.clients else islice(self.times, 1)
        return request

    def answered(self, time):
        """A client has its answer, and sends its next request."""
        if self.clients:
            heapq.heappush(self.due, time + self.delay)


# --- what they ask for ----------------------------------------------------------------------------

def made_up(number, length):
    """A prompt that begins with its number, as two token ids."""
    return [number % 1000, number // 1000 % 1000, *[0] * length][:length]


def workload(lengths):
    """Requests for [(tokens of the prompt, of the answer), ...]."""
    return [Request(made_up(i, prompt), answer, name=f"r{i}")
            for i, (prompt, answer) in enumerate(lengths)]


def drawn(number, seed, prompt, answer, prompts=None, prefix=0):
    """
    So many requests, one after another; lengths are drawn between two bounds.

    prompts: only so many differ, and come in turn; prefix: tokens with which all begin
    """
    stream = random.Random(seed)
    lengths = [stream.randint(*prompt) for _ in range(prompts or 0)]
    for i in range(number):
        length = lengths[i % prompts] if prompts else stream.randint(*prompt)
        yield Request([0] * prefix + made_up(i % (prompts or number), length),
                      stream.randint(*answer), name=f"r{i}")


def check_lengths(prompt, answer, shape):
    """ValueError if they do not fit: before a list of so many tokens is made."""
    need = prompt + answer - 1   # the last token is never computed
    if need > shape.block_size:
        raise ValueError(f"--input and --output: a prompt of {prompt} tokens and an answer of "
                         f"{answer} need {need} positions, block_size is {shape.block_size}")
