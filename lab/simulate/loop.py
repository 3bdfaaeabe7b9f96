"""
The loop: requests come, a stage's own scheduler plans passes, and a clock moves on by their prices.

    while anything is left:
        all that have come are queued; if nothing is there to do, the clock waits for the next one
        the scheduler plans a pass; the clock moves on by its price, and tokens get their time

A source is any load: at a rate, from clients that wait for answers, or all at once.

An engine may plan *ahead* (beyond/ahead.py; vLLM since 0.14): while a pass is computed, the next
one is planned. So a plan sees what had come when the pass before it began, unless nothing ran:

    pass      | 1          | 2          | 3              A comes during pass 1. Pass 2 is planned
    A              comes                  first token    when 1 begins, pass 3 when 2 begins
"""
import math
from types import SimpleNamespace

from lab.simulate.hardware import constants, seconds
from request import indices_due


def serve(scheduler, source, shape, gpu, engine):
    """
    Runs all that the source sends. Returns

    requests: in the order in which they ended, with their token_times
    passes:   how many requests run in each
    counts:   of preemptions and the like
    useful:   the share of the slots; None after a preemption, as it computes tokens again
    """
    price, now, before = constants(shape, gpu, engine), 0.0, 0.0   # before: the last pass began
    passes, ended = [], []

    def queue(until):
        while source.time <= until:
            request = source.pop()
            request.context_length = shape.block_size
            scheduler.add(request)

    while True:
        queue(before if engine.ahead else now)
        if not scheduler.busy:   # nothing ran, so the plan sees all that have come by now
            now = max(now, source.time)
            if now == math.inf:   # nothing is left
                break
            queue(now)
        plan = scheduler.schedule(len(passes))
        passes.append(len(scheduler.running))
        slots, keys, scores = 0, 0, 0
        for request, n in plan:
            end = request.computed + n
            slots += n
            keys += end
            scores += n * end
        sampled = [plan[i][0] for i in indices_due(plan)]
        before = now
        now += seconds(price, slots, len(sampled), scores, keys)
        scheduler.update(plan, [0] * len(sampled))
        for request in sampled:
            request.token_times.append(now)
            if request.finished:
                source.answered(now)
                ended.append(request)
    counts = scheduler.pool.counts if hasattr(scheduler, "pool") else {}
    return SimpleNamespace(requests=ended, passes=passes, counts=counts,
                           useful=None if counts.get("preemptions") else 1.0)
