"""Set 3: the scheduler. No tensors and no model: made-up tokens."""
from collections import deque
from itertools import product

import kit
import pytest
from kit import describe, drawn, given, names, plan_of, plans_of, sequences

import request
import scheduler
from scheduler import Scheduler

FILES = "request.py scheduler.py"
points = pytest.mark.points


def running(queue, todos):
    """Lets requests run that have so many tokens to do."""
    queue.running = given(*[(6, 3)] * len(todos))
    for each, todo in zip(queue.running, todos):
        each.computed, each.kv = max(6 - todo, 0), "cache"
        each.prompt = [1] * max(6, todo)
    for each in queue.running[1::2]:   # as after a preemption: an answer is computed again
        each.generated, each.max_new_tokens = [1] * 4, 7
        each.prompt = each.prompt[4:]
    return ", ".join(f"{r.name} {r.todo}" for r in queue.running) or "nothing"


def plans(cases):
    for todos, budget in cases:
        queue = Scheduler(max(len(todos), 1), budget)
        where = f"plan for token_budget {budget}, to do: {running(queue, todos)}"
        plan = queue.share_budget()
        yield where, plan_of(plan)
        yield f"{where}: running, with todo", [f"{r.name} {r.todo}" for r in queue.running]


def runs(workloads):
    for requests, *knobs in workloads:
        knobs = dict(zip(("max_batch", "token_budget", "max_kv_tokens"), knobs))
        where = describe(requests, **knobs)
        for seen in plans_of(requests, **knobs):
            yield where, seen


class Whole(kit.Example):
    """Each part runs the scheduler as a whole, too."""

    def test_runs(self, part):
        part.compare(runs, [(given(*kit.MIX, (21, 6, 3)), 3, 5, None),
                            (given((1, 3), (1, 1), (1, 1), (2, 2)), 4, 2, 5)])
        for sizes in part.sizes:
            rng, many = part.rng, sizes.get("least", 2)
            for prompt, room in (14, None), (6, rng.choice([13, 16, 20, 8 * many])):
                part.compare(runs, [(drawn(rng, prompt=prompt, **sizes),
                                     rng.choice([2, 3, 5, many, 40]),
                                     rng.choice([3, 5, 8, 2 * many]), room)])


@points(3, "scheduler.py:Scheduler.share_budget", title="sharing the budget")
class Test3a(Whole):
    def test_plans(self, part):
        part.compare(plans, list(product(sequences((1, 2, 5), 3), (3, 4, 8, 20))))

    def test_plans_of_many(self, part):
        rng = part.rng
        cases = [[rng.choice([1, 1, 1, 2, 7, rng.randint(9, 300)]) for _ in range(rng.randint(
            5, 40))] for _ in range(40)]
        part.compare(plans, [(todos, sum(n == 1 for n in todos) + rng.choice([1, 8, 50, 900]))
                             for todos in cases])

    def test_time(self, part):
        def prepare():
            queue = Scheduler(4000, 10**6)
            queue.running = given((1, 3), (2, 3)) * 10_000
            return queue
        part.fast("share_budget for 20,000 requests", prepare, lambda queue: queue.share_budget())


def rooms(cases):
    for todos, sizes, most, budget, room in cases:
        queue = Scheduler(most, budget, room)
        words = running(queue, todos)
        queue.waiting = deque(given(*sizes, names=kit.WAITING))
        for each in queue.waiting:
            yield (f"grant_room({each.name}), max_kv_tokens {room}, kv_tokens {each.kv_tokens}, "
                   f"running: {[r.kv_tokens for r in queue.running]}",
                   bool(queue.grant_room(each)))
        where = (f"admit at step 1, max_batch {most}, token_budget {budget}, max_kv_tokens {room}, "
                 f"to do: {words}, waiting: " + (", ".join(
                     f"{r.name} (todo {r.todo}, kv_tokens {r.kv_tokens}, arrival {r.arrival})"
                     for r in queue.waiting) or "nothing"))
        queue.admit(1)
        yield where, {"then running": names(queue.running), "then waiting": names(queue.waiting)}


@points(3, "scheduler.py:Scheduler.admit", "scheduler.py:Scheduler.grant_room", title="admission")
class Test3b(Whole):
    def test_edges(self, part):
        queues = ((), ((21, 9),), ((2, 1), (1, 1), (1, 1)), ((5, 2), (1, 1)),
                  ((2, 3, 1), (1, 1, 2)))
        part.compare(rooms, [case for case in product(
            ((), (1,), (2,), (3,), (4,), (1, 2)), queues, (1, 2, 4), (3, 4),
            (None, 9, 10, 17, 24)) if len(case[0]) <= case[2]])

    def test_many(self, part):
        rng = part.rng
        part.compare(rooms, [(
            [rng.choice([1, 1, 5]) for _ in range(rng.randint(4, 30))],
            [(rng.randint(1, 5), rng.randint(1, 5)) for _ in range(rng.randint(4, 30))],
            rng.choice([31, 45, 60]), rng.choice([40, 120]), rng.choice([None, 150, 300]))
            for _ in range(30)])

    def test_time(self, part):
        def prepare():
            queue = Scheduler(40, 10**6)
            queue.waiting = deque(given((1, 1)) * 40_000)
            return queue
        part.fast("admit of 40 of 40,000 requests", prepare, lambda queue: queue.admit(0))


def advances(cases):
    """rows: (todo, n) of each request."""
    for rows in cases:
        plan = list(zip(given(*[(4, 2 - i % 2) for i in range(len(rows))]), (n for _, n in rows)))
        for i, ((each, _), (todo, _)) in enumerate(zip(plan, rows)):
            each.computed, each.block_size = 4 - todo, (4, 24)[i % 2]
            if i % 3 == 1:   # as after a preemption
                each.prompt, each.generated, each.max_new_tokens = [1], [1] * 3, 4
        words = ", ".join(f"{r.name}: {n} of {r.todo} tokens to do" for r, n in plan) or "[]"
        tokens = [10 + i for i in range(sum(todo == n for todo, n in rows))]
        request.advance(plan, tokens)
        yield f"advance, with the plan {words}", {
            "its arguments afterwards": [[n for _, n in plan], tokens],
            "then the new tokens": {r.name: r.generated for r, _ in plan},
            "then computed": {r.name: r.computed for r, _ in plan},
            "then finish_reason": {r.name: r.finish_reason for r, _ in plan}}


def releases(cases):
    for ends in cases:
        queue, freed = Scheduler(99, 99), []
        running(queue, (1,) * len(ends))
        queue.waiting.extend(given((1, 1)))
        for each, end in zip(queue.running, ends):
            each.finish_reason = end
        where = (f"release, running: {', '.join(names(queue.running)) or 'nothing'}, finished: "
                 + (", ".join(names(r for r in queue.running if r.finished)) or "none"))
        queue.free = lambda each, freed=freed: freed.append(f"{each.name}, {each.kv}")
        queue.release()
        yield where, {"then running": names(queue.running), "then waiting": len(queue.waiting),
                      "free was called for": sorted(freed)}


@points(3, "request.py:advance", "scheduler.py:Scheduler.release", title="after a step")
class Test3c(Whole):
    def test_advance(self, part):
        rows = (1, 1), (1, 0), (3, 1), (3, 3), (3, 0)
        part.compare(advances, sequences(rows, 3))
        part.compare(advances, [[part.rng.choice(rows) for _ in range(25)] for _ in range(20)])

    def test_release(self, part):
        part.compare(releases, sequences((None, "length", "cancelled"), 4))
        part.compare(releases, [[part.rng.choice([None, None, "stop"]) for _ in range(30)]
                                for _ in range(20)])

    def test_time(self, part):
        def prepare():
            return [(each, 1) for each in given(*[(1, 9)] * 1000)]
        part.fast("advance of 1,000 requests", prepare,
                  lambda plan: scheduler.advance(plan, [0] * 1000))


test_3_numbers, test_3_break = kit.answers(3, 2)
