"""Set 5, no rows: parameters, points, and the cases of each part."""
FILES = "model.py request.py cache.py generate_dynamic.py scheduler.py generate_ragged.py beyond/prepacked.py"
PARTS = {   # points, what it is about, the functions
    "a": (2, "bin packing", "beyond/prepacked.py:first_fit_decreasing"),
    "b": (4, "packed rows", "beyond/prepacked.py:Packed.lay_out"),
    "c": (3, "the stream and its mask", "generate_ragged.py:Flat.lay_out",
          "generate_ragged.py:Flat.block_diagonal"),
    "d": (3, "the varlen loop", "generate_ragged.py:Flat.attend")}
WRITTEN = {"1": 3, "2": 3, "3": 2}
SECONDS, GIGABYTES = 20, 6   # for one part

# Each tells first-fit decreasing from another rule: without sorting, without an exact fit, best fit
# (1, 3, 3, 5), last fit and next fit (1, 2, 3)
LENGTHS = (([], 5), ([5], 5), ([1, 2, 3], 4), ([2, 3, 6], 8), ([1, 3, 3, 5], 7), ([1, 1, 3, 2, 2], 5),
           ([4, 4, 4, 4], 8))
STREAM = [{"prompt": [5, 7], "generated": [9], "computed": 2, "n": 1},
          {"prompt": [4, 8, 6], "n": 2}, {"prompt": [1, 6, 3], "computed": 1, "n": 2}]


def packings(rng):
    drawn = [([rng.randint(1, size) for _ in range(n)], size)
             for n, size in ((5, 9), (9, 20), (12, 15), (40, 50), (80, 60))]
    for lengths, size in (*LENGTHS, *drawn, ([2, 6, 3, 5, 1, 4], 7)):
        yield {"call": "first_fit_decreasing", "lengths": lengths, "size": size}


def rows(rng):
    yield {"call": "packed_on_a_device"}
    lists = [(1,), (3,), (2, 2), (1, 3), (3, 1, 2), (2, 5, 3, 1), (1, 1, 1, 4)]
    lists += [[rng.randint(1, 9) for _ in range(size)] for size in (5, 6, 8, 12)]
    for lengths in lists:
        yield {"call": "packed", "prompts": [{"prompt": length} for length in lengths]}
    yield {"call": "packed", "prompts": [{"prompt": prompt} for prompt in ([5, 7, 2, 9], [4], [1, 6])]}


def streams(rng):
    """Newcomers, chunks, decodes; and some as after a preemption."""
    new, part, chunk = {"prompt": 3, "n": 3}, {"prompt": 4, "n": 2}, {"prompt": 6, "computed": 2, "n": 3}
    decode, again = {"prompt": 2, "generated": 2, "computed": 3, "n": 1}, {
        "prompt": 2, "generated": 2, "n": 4}
    half, one = {"prompt": 2, "generated": 3, "computed": 1, "n": 2}, {"prompt": 1, "n": 1}
    yield from ([each] for each in (one, new, part, chunk, decode, again, half))
    yield from ([one, decode], [decode, part], [part, new], [chunk, decode], [decode, again],
                [half, new, decode], [part, chunk, half])
    for size in (4, 7, 9):
        drawn = []
        for _ in range(size):
            prompt, generated = rng.randint(1, 8), rng.choice([0, 0, 1, 4])
            computed = rng.choice([0, prompt + generated - 1, rng.randint(0, prompt + generated - 1)])
            todo = prompt + generated - computed
            drawn.append({"prompt": prompt, "generated": generated, "computed": computed,
                          "n": rng.choice([todo, rng.randint(1, todo)])})
        yield drawn
    yield STREAM


def block_diagonal(rows):
    mask, before = [], 0
    ends = [row.get("computed", 0) + row["n"] for row in rows]
    for row, end in zip(rows, ends):
        mask += [[before <= key <= before + own for key in range(sum(ends))]
                 for own in range(end - row["n"], end)]
        before += end
    return mask


def cases(rng):
    drawn = [*streams(rng)]
    return {"a": [*packings(rng)], "b": [*rows(rng)],
            "c": [{"call": "flat_on_a_device"}, *(
                {"call": "flat", "rows": each, "attention": way} for each in drawn
                for way in ("varlen", "mask"))],
            "d": [{"call": "attend", "rows": each, "attention": way, "mask": block_diagonal(each)}
                  for each in drawn for way in ("mask", "varlen")]}


def parameters(rng):
    """The numbers of written question 1."""
    return dict(zip("abc", rng.sample(range(5, 20), 3)))


def values(a, b, c):
    return {"scores of mask": (a + b + c) ** 2, "scores of varlen": a * a + b * b + c * c,
            "scores of a padded rectangle": 3 * max(a, b, c) ** 2}
