"""Set 1, head and cache: points, parameters, and the cases of each part."""
from itertools import product

FILES = "model.py request.py cache.py generate_unbatched.py"
PARTS = {   # points, what it is about, the functions
    "a": (4, "attention", "model.py:Head.forward"),
    "b": (3, "the KV cache", "cache.py:KV.write", "cache.py:KV.read"),
    "c": (2, "one request alone", "generate_unbatched.py:Alone.lay_out",
          "generate_unbatched.py:Alone.attend")}
WRITTEN = {"1": 2, "2": 2, "3": 2}
PARAMETERS = {"n": range(5, 10), "g": range(4, 9), "layers": [24, 32, 40], "heads": [16, 32],
              "size": [64, 128]}
VALUES = {"scores with a cache": "n * n + sum(range(n + 1, n + g))",
          "tokens computed without": "sum(range(n, n + g))",
          "bytes of a token in float16": "2 * layers * heads * size * 2"}


def mask_of(rng, shape):
    return [mask_of(rng, shape[1:]) for _ in range(shape[0])] if shape else rng.random() < 0.6


def attention(rng):
    sizes = [(1, 1), (2, 2), (1, 3), (2, 5), (3, 3), (3, 7)]
    sizes += sorted((rng.randint(2, 6), rng.randint(6, 12)) for _ in range(3))
    for i, (T, S) in enumerate(sizes):
        lead = ((), (2,), (2, 3), (2, 1, 2))[i % 4]
        shapes = (S,), (T, S), (*lead[:1], *(1 for _ in lead), S), (*lead, T, S)
        masks = [None, [[False] * S] * T, *(mask_of(rng, shape) for shape in shapes)]
        for mask, past, show in product(masks, {0, S - T}, ("sees", "output")):
            yield {"call": "forward", "show": show, "T": T, "S": S, "hs": (4, 1, 5)[i % 3],
                   "lead": lead, "past": past, "mask": mask, "scale": (1, 30)[i % 2], "seed": i}
    yield {"call": "forward", "show": "output", "T": 2, "S": 4, "hs": 3, "dtype": "float32"}
    yield {"call": "head_on_a_device"}
    for mask in None, [False, False, True]:
        yield {"call": "forward", "show": "sees", "T": 2, "S": 3, "hs": 4, "past": 1, "mask": mask}


def caches(rng):
    def calls(capacity):
        end, made = 0, []
        while end < capacity:
            n = rng.randint(1, capacity - end)
            made += [["write", 0, end, n], ["write", "x", end, n], ["read", 0, end + n]]
            end += n
        at = rng.randint(0, capacity - 2)
        return [*made, ["write", 0, at, 2], ["write", 0, capacity, 1], ["write", 0, at, capacity],
                ["read", 0, capacity], ["read", "x", rng.randint(1, capacity)]]

    yield {"call": "cache", "capacity": 2, "calls": [["write", 0, 0, 1], ["read", 0, 1]]}
    yield {"call": "cache", "capacity": 1, "calls": [
        ["write", 0, 0, 1], ["write", 0, 1, 1], ["read", 0, 1]]}
    for capacity, lead, dtype in ((3, (), "float64"), (5, (2,), "float32"), (8, (2, 3), "float64")):
        yield {"call": "cache", "capacity": capacity, "calls": calls(capacity), "lead": lead,
               "dtype": dtype}
    yield {"call": "cache", "capacity": 4, "calls": [
        ["write", 0, 0, 2], ["write", 0, 2, 1], ["read", 0, 3], ["read", 0, 1], ["write", 0, 1, 2],
        ["read", 0, 3], ["write", 0, 3, 2]]}


def singles(rng):
    rows = [{"prompt": 1}, {"prompt": 3}, {"prompt": 3, "generated": 1, "computed": 3},
            {"prompt": 2, "generated": 4, "computed": 5}, {"prompt": 4, "computed": 2},
            {"prompt": 2, "generated": 3}]
    rows += [{"prompt": prompt, "generated": prompt % 4, "computed": rng.randint(0, prompt - 1)}
             for prompt in sorted(rng.randint(3, 14) for _ in range(5))]
    yield {"call": "alone_on_a_device"}
    for show, row in product(("layout", "attend"), rows):
        for kept in (True, False)[:1 if row.get("computed") else 2]:
            yield {"call": "alone", "show": show, "requests": [row], "caches": kept}
    yield {"call": "alone", "show": "layout", "caches": True, "requests": [
        {"prompt": [5, 6, 7], "generated": [6, 9], "computed": 4}]}


def cases(rng):
    return {"a": [*attention(rng)], "b": [*caches(rng)], "c": [*singles(rng)]}
