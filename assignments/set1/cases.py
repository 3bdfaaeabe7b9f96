"""Set 1, head and cache: points and cases."""
from itertools import product

FILES = "model.py request.py cache.py generate_unbatched.py"
PARTS = {   # points, what it is about, {function: its calls}
    "a": (4, "attention", {"model.py:Head.forward": "forward head_on_a_device"}),
    "b": (3, "the KV cache", {"cache.py:KV.write": "cache", "cache.py:KV.read": "cache"}),
    "c": (2, "one request alone", {
        "generate_unbatched.py:Alone.lay_out": "lay_out alone_on_a_device",
        "generate_unbatched.py:Alone.attend": "attend"})}


# --- attention ------------------------------------------------------------------------------------

def attention(rng):
    for i, (T, S) in enumerate(sizes_of(rng)):
        lead = ((), (2,), (2, 3), (2, 1, 2))[i % 4]
        masks = masks_of(rng, T, S, lead)
        # S - T may be 0: an empty past
        for mask, past in product(masks, (None, S - T)):
            yield {
                "call": "forward",
                "T": T,
                "S": S,
                "hs": (4, 1, 5)[i % 3],
                "lead": lead,
                "past": past,
                "mask": mask,
                "scale": (1, 30)[i % 2],
                "seed": i,
            }
    yield {"call": "forward", "T": 2, "S": 4, "hs": 3, "dtype": "float32"}
    # the keys that are seen have scores far below -10,000, and a hidden one has not
    yield {"call": "forward", "T": 1, "S": 3, "hs": 1, "mask": [True, True, False], "scale": 200,
           "seed": 67}
    yield {"call": "head_on_a_device"}
    for mask in None, [False, False, True]:
        yield {"call": "forward", "T": 2, "S": 3, "hs": 4, "past": 1, "mask": mask}


def sizes_of(rng):
    """Pairs of T and S."""
    sizes = [(1, 1), (2, 2), (1, 3), (2, 5), (3, 3), (3, 7)]
    larger = [(rng.randint(2, 6), rng.randint(6, 12)) for _ in range(3)]
    return sizes + sorted(larger)


def masks_of(rng, T, S, lead):
    """No mask, one that hides all keys, and random ones of every shape that fits."""
    axes_of_1 = [1] * len(lead)
    shapes = [
        (S,),
        (T, S),
        (*lead[:1], *axes_of_1, S),
        (*lead, T, S),
        # one column for all keys
        (T, 1),
        (*lead, T, 1),
    ]
    all_hidden = [[False] * S] * T
    return [None, all_hidden, *(random_mask(rng, shape) for shape in shapes)]


def random_mask(rng, shape):
    if not shape:
        return rng.random() < 0.6
    length, *rest = shape
    return [random_mask(rng, rest) for _ in range(length)]


# --- the cache ------------------------------------------------------------------------------------

def write(layer, start, n):
    return ["write", layer, start, n]


def read(layer, end):
    return ["read", layer, end]


def caches(rng):
    yield {"call": "cache", "capacity": 2, "calls": [write(0, 0, 1), read(0, 1)]}
    too_many = [write(0, 0, 1), write(0, 1, 1), read(0, 1)]
    yield {"call": "cache", "capacity": 1, "calls": too_many}
    for capacity, lead, dtype in ((3, (), "float64"), (5, (2,), "float32"), (8, (2, 3), "float64")):
        yield {
            "call": "cache",
            "capacity": capacity,
            "calls": random_calls(rng, capacity),
            "lead": lead,
            "dtype": dtype,
        }
    by_hand = [
        write(0, 0, 2),
        write(0, 2, 1),
        read(0, 3),
        read(0, 1),
        write(0, 1, 2),
        read(0, 3),
        write(0, 3, 2),
        write(0, 0, 1),
        read(0, 3),
    ]
    yield {"call": "cache", "capacity": 4, "calls": by_hand}


def random_calls(rng, capacity):
    """Fills three layers piece by piece; then writes over what is there, and beyond the end."""
    calls = []
    end = 0
    while end < capacity:
        n = rng.randint(1, capacity - end)
        calls += [write(layer, end, n) for layer in (0, 1, "x")]
        end += n
        calls.append(read(0, end))
    start = rng.randint(0, capacity - 2)
    calls.append(write(0, start, 2))
    calls.append(write(0, capacity, 1))
    calls.append(write(0, start, capacity))
    calls.append(read(0, capacity))
    calls.append(read(1, capacity))
    calls.append(read("x", rng.randint(1, capacity)))
    return calls


# --- one request ----------------------------------------------------------------------------------

def singles(rng):
    rows = [
        {"prompt": 1},
        {"prompt": 3},
        {"prompt": 3, "generated": 1, "computed": 3},
        {"prompt": 2, "generated": 4, "computed": 5},
        {"prompt": 4, "computed": 2},
        {"prompt": 2, "generated": 3},
    ]
    rows += random_rows(rng)
    yield {"call": "alone_on_a_device"}
    for row in rows:
        for has_cache in with_and_without(row):
            yield {"call": "lay_out", "requests": [row], "caches": has_cache}
    for (heads, size), row in product(((2, 3), (3, 1)), rows):
        for has_cache in with_and_without(row):
            yield {
                "call": "attend",
                "requests": [row],
                "caches": has_cache,
                "heads": heads,
                "size": size,
            }
    by_hand = {"prompt": [5, 6, 7], "generated": [6, 9], "computed": 4}
    yield {"call": "lay_out", "caches": True, "requests": [by_hand]}


def random_rows(rng):
    prompts = sorted(rng.randint(3, 14) for _ in range(5))
    rows = []
    for prompt in prompts:
        computed = rng.randint(0, prompt - 1)
        rows.append({"prompt": prompt, "generated": prompt % 4, "computed": computed})
    return rows


def with_and_without(row):
    """Whether the request has a cache yet. One with computed tokens has."""
    return [True] if row.get("computed") else [True, False]


def cases(rng):
    return {"a": [*attention(rng)], "b": [*caches(rng)], "c": [*singles(rng)]}
