"""Set 4, the fused rectangle: parameters, points, and the cases of each part."""
from itertools import product

FILES = "model.py request.py cache.py generate_dynamic.py"
LAY_OUT = "generate_dynamic.py:Rectangle.lay_out"
PARTS = {   # points, what it is about, the functions
    "a": (3, "tokens and positions", LAY_OUT),
    "b": (4, "the mask over past and new slots", LAY_OUT),
    "c": (3, "gathering and writing back", "generate_dynamic.py:Rectangle.attend"),
    "d": (2, "which requests get a token", LAY_OUT, "request.py:indices_due")}
WRITTEN = {"1": 3, "2": 2, "3": 3}
SECONDS, GIGABYTES = 20, 6   # for one part

EXAMPLE = [{"prompt": [5, 7, 2], "generated": [9], "computed": 3, "n": 1},
           {"prompt": [4, 8, 6, 1, 3], "computed": 2, "n": 2}, {"prompt": [1, 6, 8], "n": 3}]


def batches(rng):
    """Rows of a plan: newcomers, chunks, decodes; and some as after a preemption."""
    row = {"one": {"prompt": 1, "n": 1}, "new": {"prompt": 3, "n": 3}, "part": {"prompt": 4, "n": 2},
           "chunk": {"prompt": 6, "computed": 2, "n": 2}, "end": {"prompt": 4, "computed": 2, "n": 2},
           "decode": {"prompt": 2, "generated": 2, "computed": 3, "n": 1},
           "again": {"prompt": 2, "generated": 2, "n": 4},          # preempted, computed once more
           "half": {"prompt": 2, "generated": 3, "computed": 1, "n": 2}}
    yield from ([each] for each in row.values())
    for names in ("one", "new"), ("decode", "one"), ("decode", "part"), ("new", "chunk"), (
            "end", "decode", "chunk"), ("again", "decode"), ("half", "new", "decode"), (
            "part", "chunk", "half"):
        yield [row[name] for name in names]
    for size in (4, 6, 9):
        drawn = []
        for _ in range(size):
            prompt, generated = rng.randint(1, 9), rng.choice([0, 0, 1, 4])
            computed = rng.choice([0, prompt + generated - 1, rng.randint(0, prompt + generated - 1)])
            todo = prompt + generated - computed
            drawn.append({"prompt": prompt, "generated": generated, "computed": computed,
                          "n": rng.choice([todo, rng.randint(1, todo)])})
        yield drawn
    yield EXAMPLE


def layout(rows):
    """What attend finds: P, T, and the mask (B, P + T)."""
    P, T = max(row.get("computed", 0) for row in rows), max(row["n"] for row in rows)
    return {"P": P, "T": T, "mask": [
        [P - row.get("computed", 0) <= column < P or column >= P + T - row["n"]
         for column in range(P + T)] for row in rows]}


def plans(rng):
    rows = [{"prompt": 2, "generated": 1, "computed": 2, "n": n} for n in (0, 1)]
    rows += [{"prompt": 3, "computed": 0, "n": n} for n in (0, 1, 3)]
    rows += [{"prompt": 2, "generated": 2, "n": n} for n in (2, 4)]
    lists = [list(each) for size in range(3) for each in product(rows, repeat=size)]
    for each in [*lists, [rng.choice(rows) for _ in range(25)], EXAMPLE]:
        yield {"call": "indices_due", "plan": each}


def cases(rng):
    drawn = [*batches(rng)]
    made = {part: [{"call": "layout_on_a_device", "names": names}] + [
        {"call": "lay_out", "show": show, "rows": rows} for rows in drawn]
        for part, show, names in (("a", "tokens", ["tokens", "positions"]), ("b", "mask", ["mask"]),
                                  ("d", "sampled", ["wanted"]))}
    made["c"] = [{"call": "attend", "rows": rows, **layout(rows)} for rows in drawn]
    made["d"] = [*plans(rng), *made["d"]]
    return dict(sorted(made.items()))


def parameters(rng):
    """The numbers of written question 1."""
    return dict(zip("abck", [*rng.sample(range(4, 15), 3), rng.randint(5, 8)]))


def values(a, b, c, k):
    P = max(a, b, c)
    return {"pad slots": 3 * (k - 1), "scores": 4 * k * (P + k),
            "empty key slots": 4 * (P + k) - (a + b + c + 3 + k)}
