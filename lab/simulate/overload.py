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

MOST_TRIED = 5000


def most_served(run, made, number, many=1, least=1):
    """
    (requests/s that are served while others always wait, the number of requests that showed it)

    run: see `runner`; made(n) makes n requests of the load, which has `number`; many: that run at
    the same time; least: requests to try

    All come at once. A full batch admits one for each that leaves, so first tokens are counted,
    after twice as many as may run. The first answers are shortened at random: else requests of one
    length would stay in step.
    """
    tried = max(min(number, MOST_TRIED), 4 * many, least)

    def shortened():
        stream = random.Random(0)
        for i, request in enumerate(made(tried)):
            if i < many:
                request.max_new_tokens = stream.randint(1, request.max_new_tokens)
            yield request

    log = run(shortened)
    first = sorted(request.token_times[0] for request in log.requests)
    return (tried - 2 * many) / (first[-1] - first[2 * many - 1]), tried


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
