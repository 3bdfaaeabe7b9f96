"""What cases are drawn from: rows that probes.py makes requests of, and pools."""
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


def pool_of_pages(rng, number, moves):
    """After random moves: block tables come and go, full pages are cached."""
    tables, free, names = [], list(range(number)), {}
    for move in range(moves):
        if tables and rng.random() < 0.4:
            for page in reversed(tables.pop(rng.randrange(len(tables)))):
                if not any(page in each for each in tables):
                    free.insert(len(free) if page in names else 0, page)
            continue
        shared = [page for page in names if rng.random() < 0.4][:2]
        free = [page for page in free if page not in shared]
        many = rng.randint(0, 3)
        taken, free = free[:many], free[many:]
        names = {page: name for page, name in names.items() if page not in taken}
        tables.append(shared + taken)
        for page in taken:
            if rng.random() < 0.6:   # equal pages have one name
                names[page] = rng.choice([f"h{move}.{page}"] * 3 + [*names.values()][:1])
    tables = [table for table in tables if table]
    return {"tables": tables, "free_queue": free, "ref_count": [
        sum(page in table for table in tables) for page in range(number)],
        "cached": [[name, [page for page in names if names[page] == name]]
                   for name in dict.fromkeys(names.values())],
        "hash_of": [[page, name] for page, name in names.items()]}


def pools_of_pages(rng):
    sizes = ((1, 0), (2, 1), (2, 2), (3, 2), (3, 4), (4, 4), (5, 6), (6, 8), (8, 12), (12, 20),
             (30, 40))
    return [pool_of_pages(rng, *size) for size in sizes for _ in range(3)]
