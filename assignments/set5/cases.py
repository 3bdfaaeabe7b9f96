"""Set 5, no rows: points, parameters, and the cases of each part."""
from draw import plans

FILES = ("model.py request.py cache.py scheduler.py generate_dynamic.py generate_ragged.py "
         "beyond/prepacked.py")
PARTS = {   # points, what it is about, the functions
    "a": (2, "bin packing", "beyond/prepacked.py:first_fit_decreasing"),
    "b": (4, "packed rows", "beyond/prepacked.py:Packed.lay_out"),
    "c": (3, "the stream and its mask", "generate_ragged.py:Flat.lay_out",
          "generate_ragged.py:Flat.block_diagonal"),
    "d": (3, "attention", *(f"generate_ragged.py:Flat.{name}" for name in (
        "attend", "hide", "skip")))}
WRITTEN = {"1": 3, "2": 3, "3": 2}
PARAMETERS = {name: range(5, 20) for name in "abc"}
VALUES = {"scores of mask": "(a + b + c) ** 2", "scores of varlen": "a * a + b * b + c * c",
          "scores of a padded rectangle": "3 * max(a, b, c) ** 2"}
# Each tells first-fit decreasing from another rule: without sorting, without an exact fit, best fit
# (1, 3, 3, 5), last fit and next fit (1, 2, 3)
LENGTHS = (([], 5), ([5], 5), ([1, 2, 3], 4), ([2, 3, 6], 8), ([1, 3, 3, 5], 7),
           ([1, 1, 3, 2, 2], 5), ([4, 4, 4, 4], 8))
STREAM = [{"prompt": [5, 7], "generated": [9], "computed": 2, "n": 1},
          {"prompt": [4, 8, 6], "n": 2}, {"prompt": [1, 6, 3], "computed": 1, "n": 2}]


def packings(rng):
    drawn = [([rng.randint(1, size) for _ in range(n)], size)
             for n, size in ((5, 9), (9, 20), (12, 15), (40, 50), (80, 60))]
    for lengths, size in (*LENGTHS, *drawn, ([2, 6, 3, 5, 1, 4], 7)):
        yield {"call": "first_fit_decreasing", "lengths": lengths, "size": size}


def rows(rng):
    lists = [(1,), (3,), (2, 2), (1, 3), (3, 1, 2), (2, 5, 3, 1), (1, 1, 1, 4)]
    lists += [[rng.randint(1, 9) for _ in range(size)] for size in (5, 6, 8, 12)]
    yield {"call": "layout_on_a_device", "name": "Packed"}
    for prompts in *lists, ([5, 7, 2, 9], [4], [1, 6]):
        yield {"call": "packed", "prompts": [{"prompt": prompt} for prompt in prompts]}


def block_diagonal(rows):
    ends = [row.get("computed", 0) + row["n"] for row in rows]
    return [[sum(ends[:i]) <= key <= sum(ends[:i]) + own for key in range(sum(ends))]
            for i, row in enumerate(rows) for own in range(ends[i] - row["n"], ends[i])]


def cases(rng):
    drawn, ways = plans(rng, STREAM), ("varlen", "mask")
    return {"a": [*packings(rng)], "b": [*rows(rng)],
            "c": [{"call": "layout_on_a_device", "name": "Flat"}, *(
                {"call": "flat", "rows": each, "attention": way}
                for each in drawn for way in ways)],
            "d": [{"call": "attend", "rows": each, "attention": way, "mask": block_diagonal(each)}
                  for each in drawn for way in ways]}
