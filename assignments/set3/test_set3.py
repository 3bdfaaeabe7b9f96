"""Set 3: the scheduler. No tensors and no model: made-up tokens."""
from collections import deque

import pytest
from answers import answers
from kit import Checks, describe, drawn, given, plan_for, plan_of, scheduled, sequences

import request
from scheduler import Scheduler, advance

FILES = "request.py cache.py scheduler.py"
points = pytest.mark.points


def runs(rng, number, batches, budgets, sizes):
    """Random requests and knobs, the smallest first. Some requests are as after a preemption."""
    workloads = []
    for _ in range(number):
        requests = drawn(rng, **sizes)
        for each in requests:
            each.context_length = 24 if len(each.prompt) < 24 else 64
            each.generated = [0] * rng.choice([0, 0, 0, min(2, each.max_new_tokens - 1)])
        needs = [each.kv_tokens for each in requests]
        workloads.append((requests, {
            "max_batch": rng.choice(batches), "token_budget": rng.choice(budgets),
            "max_kv_tokens": rng.choice([None, rng.randint(max(needs), sum(needs))])}))
    for requests, knobs in sorted(workloads, key=lambda each: sum(r.kv_tokens for r in each[0])):
        where = describe(requests, **knobs)
        for seen in scheduled(requests, **knobs):
            yield where, seen


def queue_of(**lists):
    """For 40 running requests."""
    queue = Scheduler(40, 10**6)
    vars(queue).update(lists)
    return queue


class Whole(Checks):
    """Each part runs the scheduler as a whole."""

    def test_runs(self, part):
        part.compare(runs, part.rng, 150, (1, 2, 3, 8), (3, 5, 8, 80),
                     {"least": 1, "most": 4, "prompt": 6, "new": 4})
        part.compare(runs, part.rng, 30, (8, 40), (12, 20, 80),
                     {"prompt": 40, "new": 20, **part.sizes[-1]})


@points(3, "scheduler.py:Scheduler.share_budget", title="sharing the budget")
class Test3a(Whole):
    in_time = [("share_budget for 20,000 requests", lambda: queue_of(running=given(
        (1, 3), (2, 3)) * 10_000), lambda queue: queue.share_budget())]


@points(3, "scheduler.py:Scheduler.admit", "scheduler.py:Scheduler.grant_room", title="admission")
class Test3b(Whole):
    in_time = [("admit of 40 of 40,000 requests", lambda: queue_of(waiting=deque(given(
        (1, 1)) * 40_000)), lambda queue: queue.admit(0))]


def advances(cases):
    """rows: (todo, n) of each request."""
    for rows in cases:
        plan = plan_for(rows)
        where = f"advance, with the plan {plan_of(plan)}, to do: {[todo for todo, _ in rows]}"
        request.advance(plan, [7] * sum(todo == n for todo, n in rows))
        yield where, {f"{r.name}, computed and generated": [r.computed, r.generated]
                      for r, _ in plan}


@points(3, "request.py:advance", "scheduler.py:Scheduler.release", title="after a step")
class Test3c(Whole):
    in_time = [("advance of 1,000 requests", lambda: [
        (each, 1) for each in given(*[(1, 9)] * 1000)], lambda plan: advance(plan, [0] * 1000))]

    def test_plans_with_nothing_to_compute(self, part):
        part.compare(advances, sequences(((1, 1), (1, 0), (3, 1), (3, 3), (3, 0)), 3))


test_3_numbers, test_3_break = answers(3, 2)
