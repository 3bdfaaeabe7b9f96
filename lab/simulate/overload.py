"""
Can it keep up? The requests that come in a second, against those that can be served in one.

    come             8.0 a second   --rate
    served at most   6.4 a second   from a second run, in which all requests come at once
    8.0 / 6.4        1.25 times     overloaded: each second, 1.6 requests more are owed

The number of those that wait says nothing: with many places, all are admitted and all are slow. The
second run is a sample of the load. So what it finds has an error, and near 1 the verdict is open.
"""
import math
import random

from lab.simulate.calculated import LAYOUTS, simulate
from lab.views.report import mean

MOST_TRIED = 5000


def most_served(shape, gpu, generate, number, made, **knobs):
    """
    (requests/s that a stage serves while others always wait, how many requests found it out).

    number: requests of the load. As many are tried, up to MOST_TRIED; more where that costs little
    made:   made(n) makes n such requests

    All come at once. A full batch admits one for each that leaves, so admissions are counted, after
    twice as many as may run. The first answers are shortened at random: else requests of one length
    would stay in step.
    """
    stream, many = random.Random(0), knobs.get("max_batch", 1)
    tried = max(min(number, MOST_TRIED), 4 * many, 1000 if generate in LAYOUTS else 250)
    requests = [*made(tried)]
    for request in requests[:many]:
        request.max_new_tokens = stream.randint(1, request.max_new_tokens)
    trace = simulate(shape, gpu, generate, requests, **knobs)
    admitted = {}   # name -> when its first pass began
    for record, (start, _, _) in zip(trace.passes, trace.clock.passes):
        for name, _, _ in record.work:
            admitted.setdefault(name, start)
    times = sorted(admitted.values())
    return (tried - 2 * many) / (times[-1] - times[2 * many - 1]), tried


def verdict(times, tried):
    """
    "keeps up", "overloaded", or "too short to tell" and what to do about it.

    times: the rate, in multiples of what can be served
    tried: how many requests found out what can be: within about 1.5 / sqrt(tried), 5% for 1,000
    """
    if abs(times - 1) * math.sqrt(tried) >= 1.5:
        return "overloaded" if times > 1 else "keeps up"
    needed = math.ceil((1.5 / max(abs(times - 1), 1e-3)) ** 2) + 1
    return "too short to tell: " + (f"use --requests {needed}" if needed <= MOST_TRIED else
                                    "the rate is that of the limit, within 2%")


def judged(requests, rate, served, tried):
    """{"verdict", ...} of such requests at `rate` a second, where at most `served` a second end."""
    tokens = mean([request.kv_tokens for request in requests])   # of its prompt and its answer
    return {"verdict": verdict(rate / served, tried), "times": rate / served,
            "served_at_most": served, "offered_tokens_per_s": rate * tokens,
            "served_tokens_per_s": min(rate, served) * tokens,
            "owed_tokens_per_s": max(rate - served, 0.0) * tokens}
