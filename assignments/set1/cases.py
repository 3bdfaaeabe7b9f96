"""Set 1, head and cache: points and cases."""
from itertools import product

FILES = "model.py request.py cache.py generate_unbatched.py"
PARTS = {   # points, what it is about, {function: its calls}
    "a": (4, "attention", {"model.py:Head.forward": "forward head_on_a_device"}),
    "b": (3, "the KV cache", {"cache.py:KV.write": "cache", "cache.py:KV.read": "cache"}),
    "c": (2, "one request alone", {
        "generate_unbatched.py:Alone.lay_out": "lay_out alone_on_a_device",
        "generate_unbatched.py:Alone.attend": "attend"})}


def mask_of(rng, shape):
    return [mask_of(rng, shape[1:]) for _ in range(shape[0])] if shape else rng.random() < 0.6


def attention(rng):
    sizes = [(1, 1), (2, 2), (1, 3), (2, 5), (3, 3), (3, 7)]
    sizes += sorted((rng.randint(2, 6), rng.randint(6, 12)) for _ in range(3))
    for i, (T, S) in enumerate(sizes):
        lead = ((), (2,), (2, 3), (2, 1, 2))[i % 4]
        # The last two have one column for all keys.
        shapes = ((S,), (T, S), (*lead[:1], *(1 for _ in lead), S), (*lead, T, S),
                  (T, 1), (*lead, T, 1))
        masks = [None, [[False] * S] * T, *(mask_of(rng, shape) for shape in shapes)]
        for mask, past in product(masks, (None, S - T)):   # S - T may be 0: an empty past
            yield {"call": "forward", "T": T, "S": S, "hs": (4, 1, 5)[i % 3], "lead": lead,
                   "past": past, "mask": mask, "scale": (1, 30)[i % 2], "seed": i}
    yield {"call": "forward", "T": 2, "S": 4, "hs": 3, "dtype": "float32"}
    yield {"call": "head_on_a_device"}
    for mask in None, [False, False, True]:
        yield {"call": "forward", "T": 2, "S": 3, "hs": 4, "past": 1, "mask": mask}


def caches(rng):
    def calls(capacity):
        end, made = 0, []
        while end < capacity:
            n = rng.randint(1, capacity - end)
            for layer in 0, 1, "x":
                made.append(["write", layer, end, n])
            made.append(["read", 0, end + n])
            end += n
        at = rng.randint(0, capacity - 2)
        return [*made, ["write", 0, at, 2], ["write", 0, capacity, 1], ["write", 0, at, capacity],
                ["read", 0, capacity], ["read", 1, capacity],
                ["read", "x", rng.randint(1, capacity)]]

    yield {"call": "cache", "capacity": 2, "calls": [["write", 0, 0, 1], ["read", 0, 1]]}
    yield {"call": "cache", "capacity": 1, "calls": [
        ["write", 0, 0, 1], ["write", 0, 1, 1], ["read", 0, 1]]}
    for capacity, lead, dtype in ((3, (), "float64"), (5, (2,), "float32"), (8, (2, 3), "float64")):
        yield {"call": "cache", "capacity": capacity, "calls": calls(capacity), "lead": lead,
               "dtype": dtype}
    yield {"call": "cache", "capacity": 4, "calls": [
        ["write", 0, 0, 2], ["write", 0, 2, 1], ["read", 0, 3], ["read", 0, 1], ["write", 0, 1, 2],
        ["read", 0, 3], ["write", 0, 3, 2], ["write", 0, 0, 1], ["read", 0, 3]]}


def singles(rng):
    rows = [{"prompt": 1}, {"prompt": 3}, {"prompt": 3, "generated": 1, "computed": 3},
            {"prompt": 2, "generated": 4, "computed": 5}, {"prompt": 4, "computed": 2},
            {"prompt": 2, "generated": 3}]
    rows += [{"prompt": prompt, "generated": prompt % 4, "computed": rng.randint(0, prompt - 1)}
             for prompt in sorted(rng.randint(3, 14) for _ in range(5))]
    yield {"call": "alone_on_a_device"}
    for row in rows:
        for kept in (True, False)[:1 if row.get("computed") else 2]:
            yield {"call": "lay_out", "requests": [row], "caches": kept}
    for (heads, size), row in product(((2, 3), (3, 1)), rows):
        for kept in (True, False)[:1 if row.get("computed") else 2]:
            yield {"call": "attend", "requests": [row], "caches": kept, "heads": heads,
                   "size": size}
    yield {"call": "lay_out", "caches": True, "requests": [
        {"prompt": [5, 6, 7], "generated": [6, 9], "computed": 4}]}


def cases(rng):
    return {"a": [*attention(rng)], "b": [*caches(rng)], "c": [*singles(rng)]}
