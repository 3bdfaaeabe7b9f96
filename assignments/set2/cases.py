"""Set 2, rectangles: points, parameters, and the cases of each part."""
from draw import lists

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
    drawn = sorted((rng.choice((1, 2, 4)), rng.randint(1, 3), rng.choice((4, 5, 9)))
                   for _ in range(120))
    drawn += [(rng.randint(1, 20), rng.randint(1, 30), 24) for _ in range(15)]
    for prompt, new, room in drawn:
        yield {"call": "append", "prompt": prompt, "new": new, "context_length": room,
               "eos_token": rng.choice((None, 3, 7, 8, 9)), "tokens": [*range(7, new + 9)]}
    yield {"call": "append", "prompt": 2, "new": 3, "context_length": 9, "eos_token": 0,
           "tokens": [0, 1]}
    yield {"call": "append", "prompt": 6, "new": 5, "context_length": 8, "tokens": [1, 1, 1, 1]}


def queues(rng):
    for arrivals in lists(rng, range(4)):
        yield {"call": "admit", "step": rng.randint(0, 3), "max_batch": rng.randint(2, 6),
               "running": [{"prompt": 2, "generated": 1, "computed": 2}] * rng.randint(0, 2),
               "waiting": [{"prompt": 1 + i % 3, "arrival": arrival}
                           for i, arrival in enumerate(sorted(arrivals))]}
    for ends in lists(rng, (None, None, "stop", "length", "cancelled")):
        yield {"call": "leave", "running": [{"prompt": 2, "finish_reason": why} for why in ends]}
    yield {"call": "admit", "step": 2, "max_batch": 3, "running": [{"prompt": 1, "computed": 1}],
           "waiting": [{"prompt": 1, "arrival": arrival} for arrival in (0, 1, 1, 4)]}


def cases(rng):
    return {"a": [*batches(rng)], "b": [*appends(rng)], "c": [*queues(rng)]}
