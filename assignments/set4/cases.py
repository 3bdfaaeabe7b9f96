"""Set 4, no rows: points and cases."""
from random_rows import plans

FILES = ("model.py request.py cache.py scheduler.py generate_dynamic.py generate_ragged.py "
         "beyond/prepacked.py")
PACKED, FLAT = "beyond/prepacked.py:", "generate_ragged.py:Flat."
PARTS = {   # points, what it is about, {function: its calls, those for "mask" with the mask's}
    "a": (2, "bin packing", {f"{PACKED}first_fit_decreasing": "first_fit_decreasing"}),
    "b": (4, "packed rows", {f"{PACKED}Packed.lay_out": "packed packed_on_a_device"}),
    "c": (3, "the stream and its mask", {f"{FLAT}lay_out": "flat flat_on_a_device",
                                         f"{FLAT}block_diagonal": "flat_mask mask_on_a_device"}),
    "d": (3, "attention", {f"{FLAT}attend": "varlen", f"{FLAT}attend_varlen": "varlen",
                           f"{FLAT}attend_masked": "masked"})}
# Each tells first-fit decreasing from another rule: without sorting, without an exact fit, best fit
# (1, 3, 3, 5), last fit and next fit (1, 2, 3), the best of several ways (2, 2, 3, 2, 2, 3)
LENGTHS = (([], 5), ([1, 2], 5), ([1, 2, 3], 4), ([2, 3, 6], 8), ([1, 3, 3, 5], 7),
           ([1, 1, 3, 2, 2], 5), ([4, 4, 4, 4], 8), ([2, 2, 3, 2, 2, 3], 7))
STREAM = [{"prompt": [5, 7], "generated": [9], "computed": 2, "n": 1},
          {"prompt": [4, 8, 6], "n": 2}, {"prompt": [1, 6, 3], "computed": 1, "n": 2}]


def packings(rng):
    drawn = [([rng.randint(1, size) for _ in range(n)], size)
             for n, size in ((5, 9), (9, 20), (12, 15), (40, 50), (80, 60))]
    drawn.append(([rng.randint(1, 9) for _ in range(60)], 60))
    for lengths, size in (*LENGTHS, *drawn, ([2, 6, 3, 5, 1, 4], 7)):
        yield {"call": "first_fit_decreasing", "lengths": lengths, "size": size}


def rows(rng):
    lists = [(1,), (3,), (2, 2), (1, 3), (3, 1, 2), (2, 5, 3, 1), (1, 1, 1, 4)]
    lists += [[rng.randint(1, 9) for _ in range(size)] for size in (5, 6, 8, 12)]
    yield {"call": "packed_on_a_device"}
    for prompts in *lists, ([5, 7, 2, 9], [4], [1, 6]):
        yield {"call": "packed", "prompts": [{"prompt": prompt} for prompt in prompts]}


def block_diagonal(rows):
    ends = [row.get("computed", 0) + row["n"] for row in rows]
    return [[sum(ends[:i]) <= key <= sum(ends[:i]) + own for key in range(sum(ends))]
            for i, row in enumerate(rows) for own in range(ends[i] - row["n"], ends[i])]


def cases(rng):
    drawn, attend = plans(rng, STREAM), []
    for i, each in enumerate(drawn):
        sizes = {"rows": each, "heads": 2 + i % 2, "size": 3 - i % 2}
        attend += [{"call": "varlen", **sizes},
                   {"call": "masked", **sizes, "mask": block_diagonal(each)}]
    two = [{"prompt": 2, "generated": 1, "computed": 2, "n": 1}] * 2
    attend.append({"call": "masked", "rows": two, "heads": 2, "size": 3, "lost": True,
                   "mask": block_diagonal(two)})
    streams = [{"call": call, "rows": each} for each in drawn for call in ("flat", "flat_mask")]
    return {"a": [*packings(rng)], "b": [*rows(rng)],
            "c": [*streams, {"call": "flat_on_a_device"}, {"call": "mask_on_a_device"}],
            "d": attend}
