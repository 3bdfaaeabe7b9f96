"""
Arrivals in seconds, by a trick: where a stage expects a step, an object compares by another clock.

A stage sorts by a request's arrival, a step's number, and asks two things. At 0.35 s it answers:

    arrival <= step      has it arrived?     whether the calculated model's clock has reached 0.35 s
    max(step, arrival)   what comes next?    `step`; and the clock moves on to 0.35 s

The second is asked when nothing is left to do. So the stage waits, without a step for it.
"""
import math
import random
from functools import partial
from itertools import accumulate

from request import Request


class Arrival:
    """seconds: a function, because a client sends its next request when its last one has ended."""

    def __init__(self, model, number, seconds):
        self.model, self.number, self.seconds = model, number, seconds

    def __le__(self, step):
        return self.seconds() <= self.model.now

    def __gt__(self, step):   # asked by max(step, arrival)
        self.model.now = max(self.model.now, self.seconds())
        return False

    def __lt__(self, other):   # for sorting
        return self.number < other.number


def poisson(number, rate, seed):
    """Seconds at which so many requests come at random; the first at 0."""
    stream = random.Random(f"arrivals {seed}")
    return accumulate((stream.expovariate(rate) for _ in range(number - 1)), initial=0.0)


def arrivals(model, number, clients=None, rate=None, seed=0):
    """An Arrival for each request: at random at a rate, or from `clients` in a closed loop."""
    if rate:
        return [Arrival(model, i, partial(float, time))
                for i, time in enumerate(poisson(number, rate, seed))]

    def after(i):   # when the i-th answer ended, counted from 0, whoever's it was; below 0: at once
        return 0.0 if i < 0 else model.ends[i] if i < len(model.ends) else math.inf

    return [Arrival(model, i, partial(after, i - clients)) for i in range(number)]


# --- requests that are made up --------------------------------------------------------------------

def made_up(number, length):
    """A prompt that begins with its number, as two token ids."""
    return [number % 1000, number // 1000, *[0] * length][:length]


def workload(lengths):
    """Requests for [(tokens of the prompt, of the answer), ...]."""
    return [Request(made_up(i, prompt), answer, name=f"r{i}")
            for i, (prompt, answer) in enumerate(lengths)]


def check_lengths(prompt, answer, shape):
    """ValueError if they do not fit: before a list of so many tokens is made."""
    need = prompt + answer - 1   # the last token is never computed
    if need > shape.block_size:
        raise ValueError(f"--input and --output: a prompt of {prompt} tokens and an answer of "
                         f"{answer} need {need} positions, block_size is {shape.block_size}")
