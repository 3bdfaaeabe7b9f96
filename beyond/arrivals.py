"""
Requests that arrive in seconds: all at once, at random, or from clients that wait for their answer.

Stages count steps, and know no clock. An `Arrival` stands where a stage expects a step, and answers
by the clock of a calculated model (beyond/simulate.py).
"""
import math
import random
from functools import partial
from itertools import accumulate

from request import Request
from toolbox.validate import at_least_1


class Arrival:
    """
    A time in seconds where a stage expects a step. Stages ask two things: `arrival <= step`, has it
    arrived? And max(step, arrival), when nothing is left to do: then the clock moves on to it.
    """

    def __init__(self, model, number, seconds):
        self.model, self.number, self.seconds = model, number, seconds   # seconds: a function

    def __le__(self, step):
        return self.seconds() <= self.model.now

    def __gt__(self, step):   # asked by max(step, arrival)
        self.model.now = max(self.model.now, self.seconds())
        return False

    def __lt__(self, other):
        return self.number < other.number


def digits(number, base):
    """Token ids below `base`, others for each number; the lowest comes first."""
    return [number % base, *digits(number // base, base)] if number else []


def workload(lengths, vocabulary=1000):
    """Requests for [(tokens of the prompt, of the answer), ...]. No two begin alike."""
    base = max(2, min(vocabulary, 1000))
    return [Request((digits(i, base) + [0] * prompt)[:prompt], answer, name=f"r{i}")
            for i, (prompt, answer) in enumerate(lengths)]


def check_prompt(length, shape):
    """ValueError if it does not fit: before a list of so many tokens is made."""
    if length > shape.block_size:
        raise ValueError(f"a prompt of {length} tokens does not fit block_size {shape.block_size}, "
                         "the model's limit")


def arrivals(model, number, clients=None, rate=None, seed=0):
    """An Arrival for each request: Poisson at a rate, or from `clients` in a closed loop."""
    if rate:
        stream = random.Random(f"arrivals {seed}")
        times = accumulate((stream.expovariate(rate) for _ in range(number - 1)), initial=0.0)
        return [Arrival(model, i, partial(float, time)) for i, time in enumerate(times)]

    def after(i):   # a client sends its next request when its last one has finished
        return 0.0 if i < 0 else model.ends[i] if i < len(model.ends) else math.inf

    return [Arrival(model, i, partial(after, i - clients)) for i in range(number)]


def cut_short(requests, shape):
    """A line that says how many answers the model's context ends early; None if it ends none."""
    cut = [len(r.prompt) + r.max_new_tokens - 1 for r in requests
           if len(r.prompt) + r.max_new_tokens - 1 > shape.block_size]
    if cut:
        return (f"{len(cut):,} of {len(requests):,} answers are cut short: their requests need up "
                f"to {max(cut):,} tokens, and block_size is {shape.block_size:,}")


def bounds(flag, text):
    """(low, high) of N or LOW:HIGH. ValueError for anything else."""
    low, _, high = text.partition(":")
    if not (low.isdecimal() and (high or low).isdecimal() and 0 < int(low) <= int(high or low)):
        raise ValueError(f"--{flag} {text}: use N or LOW:HIGH, whole numbers of at least 1")
    return int(low), int(high or low)


def lengths_of(args):
    """[(prompt, answer), ...] from --input and --output."""
    at_least_1(**{"--requests": args.requests})
    pair = bounds("input", args.input), bounds("output", args.output)
    stream = random.Random(args.seed)
    return [tuple(stream.randint(*each) for each in pair) for _ in range(args.requests)]
