"""What cases are drawn from: random rows, of which probes.py makes requests, and plans of them."""
DECODE = {"prompt": 3, "generated": 1, "computed": 3}


def todo(row):
    """How many tokens of a row's request are not computed yet."""
    return row["prompt"] + row.get("generated", 0) - row.get("computed", 0)


def lists(rng, kinds):
    """Lists of such things, the shortest first: many short ones, some longer."""
    sizes = [0]
    sizes += [1] * 8
    sizes += [2] * 24
    sizes += [3] * 40
    sizes += [5, 5, 8, 8, 12, 20]
    return [[rng.choice(kinds) for _ in range(size)] for size in sizes]


def row(rng, longest_prompt):
    """Of a plan: a newcomer, a chunk, a decode, or a request that was preempted."""
    prompt, generated = rng.randint(1, longest_prompt), rng.choice([0, 0, 1, 4])
    last = prompt + generated - 1
    computed = rng.choice([0, last, rng.randint(0, last)])
    request = {"prompt": prompt, "generated": generated, "computed": computed}
    n = rng.choice([todo(request), rng.randint(1, todo(request))])
    return {**request, "n": n}


def plans(rng, by_hand):
    """Plans of layouts, the smallest first, and one made by hand."""
    one = {"prompt": 1, "n": 1}
    new = {"prompt": 3, "n": 3}
    part = {"prompt": 4, "n": 2}
    chunk = {"prompt": 6, "computed": 2, "n": 2}
    end = {"prompt": 4, "computed": 2, "n": 2}
    decode = {"prompt": 2, "generated": 2, "computed": 3, "n": 1}
    again = {"prompt": 2, "generated": 2, "n": 4}   # preempted, computed again
    half = {"prompt": 2, "generated": 3, "computed": 1, "n": 2}
    alone = [[one], [new], [part], [chunk], [end], [decode], [again], [half]]
    few = [[one, new], [decode, one], [decode, part], [new, chunk], [chunk, decode],
           [again, decode], [end, decode, chunk], [half, new, decode], [part, chunk, half]]
    drawn = [[row(rng, 9) for _ in range(size)] for size in (3, 7, 14)]
    drawn[0].append({"prompt": 20, "computed": 15, "n": 5})
    return [*alone, *few, *drawn, by_hand]
