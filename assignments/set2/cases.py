"""Set 2, rectangles: points, parameters, and the cases of each part."""
from itertools import product

FILES = "model.py request.py cache.py generate_naive.py generate_dynamic.py"
PARTS = {   # points, what it is about, the functions
    "a": (4, "the static batch", "generate_naive.py:StaticBatch.lay_out"),
    "b": (2, "the end of a request", "request.py:Request.append"),
    "c": (3, "dynamic admission", "generate_dynamic.py:admit", "generate_dynamic.py:leave")}
# not asked for, but the solutions of set 4
HIDDEN = "generate_dynamic.py:Rectangle.lay_out", "generate_dynamic.py:Rectangle.attend"
WRITTEN = {"1": 2, "2": 2, "3": 2}
PARAMETERS = {name: range(2, 25) for name in "abcxyz"}
VALUES = {"pads of the first pass": "3 * max(a, b, c) - a - b - c",
          "slots of finished requests": "3 * max(x, y, z) - x - y - z",
          "slots of all passes": "3 * max(a, b, c) + 3 * max(x, y, z) - 3"}


def batches(rng):
    sizes = [(((1, 1),), 1, 24), (((2, 1),), 1, 24), (((2, 1), (1, 2)), 2, 24),
             (((1, 3), (3, 1)), 3, 24), (((3, 2), (1, 9)), 9, 8)]   # this goes beyond position 7
    sizes += [([(rng.randint(1, 9), rng.randint(1, 6)) for _ in range(many)], rng.randint(3, 6), 24)
              for many in (3, 4, 5, 8)]
    yield {"call": "static_batch_on_a_device"}
    for requests, passes, room in sizes:
        yield {"call": "static_batch", "passes": passes, "context_length": room, "requests": [
            {"prompt": prompt, "new": new} for prompt, new in requests]}
    yield {"call": "static_batch", "passes": 4, "requests": [
        {"prompt": [5, 6, 7], "new": 2}, {"prompt": [8], "new": 4}]}


def appends(rng):
    grid = [*product((1, 2, 4), (1, 2, 3), (4, 5, 9), (None, 7, 8, 9, 3))]
    grid += [(rng.randint(1, 20), rng.randint(1, 30), 24, rng.choice([None, 30]))
             for _ in range(15)]
    for prompt, new, room, eos_token in grid:
        yield {"call": "append", "prompt": prompt, "new": new, "context_length": room,
               "eos_token": eos_token, "tokens": [*range(7, new + 9)]}
    yield {"call": "append", "prompt": 2, "new": 3, "context_length": 9, "eos_token": 0,
           "tokens": [0, 1]}
    yield {"call": "append", "prompt": 6, "new": 5, "context_length": 8, "tokens": [1, 1, 1, 1]}


def queues(rng):
    lists = (), (0,), (1,), (0, 0), (0, 1), (1, 1, 2), (0, 0, 0, 1)
    states = [*product(lists, range(3), range(3), (2, 3))]
    states += [(sorted(rng.randint(0, 6) for _ in range(rng.randint(5, 30))), rng.randint(0, 8),
                rng.randint(0, 6), rng.choice([8, 13, 40])) for _ in range(10)]
    for arrivals, running, step, most in states:
        yield {"call": "admit", "step": step, "max_batch": most, "running": [
            {"prompt": 2, "generated": 1, "computed": 2}] * running, "waiting": [
            {"prompt": 1 + i % 3, "arrival": arrival} for i, arrival in enumerate(arrivals)]}
    ends = None, "stop", "length", "cancelled"
    lists = [each for size in range(4) for each in product(ends, repeat=size)]
    for each in [*lists, [rng.choice(ends) for _ in range(30)]]:
        yield {"call": "leave", "running": [{"prompt": 2, "finish_reason": why} for why in each]}
    yield {"call": "admit", "step": 2, "max_batch": 3, "running": [{"prompt": 1, "computed": 1}],
           "waiting": [{"prompt": 1, "arrival": arrival} for arrival in (0, 1, 1, 4)]}


def cases(rng):
    return {"a": [*batches(rng)], "b": [*appends(rng)], "c": [*queues(rng)]}
