"""What cases are drawn from: rows that probes.py makes requests of."""
DECODE = {"prompt": 3, "generated": 1, "computed": 3}


def todo(row):
    return row["prompt"] + row.get("generated", 0) - row.get("computed", 0)


def lists(rng, kinds):
    """Lists of such things, the shortest first."""
    sizes = [0, *[1] * 8, *[2] * 24, *[3] * 40, 5, 5, 8, 8, 12, 20]
    return [[rng.choice(kinds) for _ in range(size)] for size in sizes]


def row(rng, most):
    """Of a plan: a newcomer, a chunk, a decode, or a request that was preempted."""
    made = {"prompt": rng.randint(1, most), "generated": rng.choice([0, 0, 1, 4])}
    last = made["prompt"] + made["generated"] - 1
    made["computed"] = rng.choice([0, last, rng.randint(0, last)])
    return {**made, "n": rng.choice([todo(made), rng.randint(1, todo(made))])}


def plans(rng, example):
    """Plans of layouts, the smallest first."""
    kinds = [{"prompt": 1, "n": 1}, {"prompt": 3, "n": 3}, {"prompt": 4, "n": 2},
             {"prompt": 6, "computed": 2, "n": 2}, {"prompt": 4, "computed": 2, "n": 2},
             {"prompt": 2, "generated": 2, "computed": 3, "n": 1},
             {"prompt": 2, "generated": 2, "n": 4},                     # preempted, computed again
             {"prompt": 2, "generated": 3, "computed": 1, "n": 2}]
    one, new, part, chunk, end, decode, again, half = kinds
    few = [[one, new], [decode, one], [decode, part], [new, chunk], [chunk, decode],
           [again, decode], [end, decode, chunk], [half, new, decode], [part, chunk, half]]
    drawn = [[row(rng, 9) for _ in range(size)] for size in (3, 7, 14)]
    drawn[0].append({"prompt": 20, "computed": 15, "n": 5})
    return [*([each] for each in kinds), *few, *drawn, example]
