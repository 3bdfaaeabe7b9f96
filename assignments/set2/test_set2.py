"""Set 2: rectangles."""
from itertools import product

import pytest
from answers import answers
from kit import MIX, Checks, cache_of, drawn, given, names, sequences

import generate_dynamic
from generate_naive import StaticBatch

FILES = "model.py request.py cache.py generate_naive.py generate_dynamic.py"
HIDDEN = "generate_dynamic.py:Rectangle.lay_out", "generate_dynamic.py:Rectangle.attend"
points = pytest.mark.points


@points(4, "generate_naive.py:StaticBatch.lay_out", title="the static batch")
class Test2a(Checks):
    on_device = (lambda requests, device: StaticBatch(requests, None, device)), *(
        "tokens", "positions", "mask", "wanted")

    def test_the_stage(self, part):   # in the last, a row goes on beyond the last position
        for sizes, most in (MIX, 3), (((2, 1), (2, 2)), 8), (((20, 2), (2, 20)), 8):
            part.serve("generate_naive", given(*sizes), max_batch=most)
        for sizes in part.sizes:
            part.serve("generate_naive", drawn(part.rng, **sizes),
                       max_batch=part.rng.choice([2, 3, 4]) if not sizes else 40)


def appends(cases):
    for prompt, new, room, at in cases:
        ends = "no eos_token" if at is None else f"token {at} is the eos_token"
        request, = given((prompt, new, 0, 0, None if at is None else 0), context_length=room)
        request.kv = "cache"
        for i in range(room):
            if not request.finished:
                request.computed = prompt + i
                request.append(0 if i == at or at is None else 5 + i)
        yield (f"append, a prompt of {prompt}, max_new_tokens {new}, context_length {room}, {ends}",
               {name: getattr(request, name) for name in (
                   "generated", "finish_reason", "prompt", "max_new_tokens", "computed", "kv")})


@points(2, "request.py:Request.append", title="the end of a request")
class Test2b(Checks):
    in_time = [("append, 3,000 times", lambda: given((1, 9000), context_length=10**4)[0],
                lambda request: [request.append(1) for _ in range(3000)])]

    def test_append(self, part):
        part.compare(appends, list(product((1, 2, 4), (1, 2, 3), (4, 5, 9), (None, 0, 1, 2, 3))))
        rng = part.rng
        part.compare(appends, [(rng.randint(1, 60), rng.randint(1, 80), 64, rng.choice(
            [None, rng.randint(0, 60)])) for _ in range(40)])


def admissions(cases):
    for arrivals, busy, step, most in cases:
        waiting = given(*[(1, 16, arrival) for arrival in arrivals], name="W")
        running = given(*[(1, 16)] * busy, name="R")
        left, now = generate_dynamic.admit(waiting, running, step, most)
        yield (f"admit at step {step}, max_batch {most}, {busy} running, waiting with arrivals "
               f"{arrivals}", {"types": [type(each).__name__ for each in (left, now)],
                               "waiting": names(left), "running": names(now),
                              "caches": [cache_of(request) for request in now]})


def leaves(cases):
    for ends in cases:
        running = given(*[(1, 16)] * len(ends), name="R")
        for request, end in zip(running, ends):
            request.kv, request.finish_reason = "cache", None if end == "goes on" else end
        where = "leave, with " + (", ".join(map("{0.name} {1}".format, running, ends)) or "nobody")
        others = generate_dynamic.leave(list(running))
        yield where, {"type": type(others).__name__, "the others": names(others),
                      "kv and finish_reason": {r.name: [r.kv, r.finish_reason] for r in running}}


def finished(requests):
    for request in requests[::2]:
        request.finish_reason = "stop"
    return requests


@points(3, "generate_dynamic.py:admit", "generate_dynamic.py:leave", title="dynamic admission")
class Test2c(Checks):
    in_time = [("admit of 3,000 requests", lambda: given(*[(1, 1)] * 3000),
                lambda waiting: generate_dynamic.admit(waiting, [], 0, 3000)),
               ("leave of 3,000 requests", lambda: finished(given(*[(1, 1)] * 3000)),
                lambda running: generate_dynamic.leave(running))]

    def test_admit(self, part):
        part.compare(admissions, list(product(
            ([], [0], [1], [0, 0], [0, 1], [1, 1, 2, 3], [0, 0, 0, 1, 1, 1]), range(4), range(3),
            (3, 4, 6))))
        rng = part.rng
        part.compare(admissions, [(sorted(rng.randint(0, 9) for _ in range(rng.randint(5, 40))),
                                   rng.randint(0, 8), rng.randint(0, 9), rng.choice([8, 13, 40]))
                                  for _ in range(40)])

    def test_leave(self, part):
        ends = "goes on", "stop", "length", "cancelled"
        part.compare(leaves, sequences(ends, 3))
        part.compare(leaves, [[part.rng.choice(ends) for _ in range(30)] for _ in range(10)])


test_2_numbers, test_2_break = answers(2, 2)
