"""Set 7, the audit: points, parameters, and the cases of each part. Needs no torch."""
import copy

FILES = "audit.py"
PARTS = {   # points, what it is about, the function
    "a": (3, "counts and the free queue", "audit.py:audit"),
    "b": (3, "the prefix cache", "audit.py:audit")}
WRITTEN = {"1": 3, "2": 2}
PARAMETERS = {"pages": [4000, 6000, 9000], "steps": [20, 40, 50], "every": [100, 250, 400]}
VALUES = {"seconds between two audits": "every / steps",
          "pages per second": "pages * steps / every"}


def pool(rng, number, moves):
    """A pool of pages after random moves: block tables come and go, full pages are cached."""
    tables, free, names = [], list(range(number)), {}
    for move in range(moves):
        if tables and rng.random() < 0.4:
            table = tables.pop(rng.randrange(len(tables)))
            free += [page for page in reversed(table) if not any(page in each for each in tables)]
            continue
        shared = [page for page in names if rng.random() < 0.4][:2]
        free = [page for page in free if page not in shared]
        many = rng.randint(0, 2)
        taken, free = free[:many], free[many:]
        names = {page: name for page, name in names.items() if page not in taken}
        tables.append(shared + taken)
        names |= {page: f"h{move}.{page}" for page in taken if rng.random() < 0.7}
    tables = [table for table in tables if table]
    return {"tables": tables, "free_queue": free, "ref_count": [
        sum(page in table for table in tables) for page in range(number)],
        "cached": [[name, page] for page, name in names.items()],
        "hash_of": [[page, name] for page, name in names.items()]}


def corrupted(rng, state, part):
    """Yields the pool with one thing wrong, in each way that it has."""
    used = [page for page, count in enumerate(state["ref_count"]) if count]
    free, cached = state["free_queue"], state["cached"]

    def change(do):
        made = copy.deepcopy(state)
        do(made)
        return made

    if part == "a":
        for more in (1, -1, 2) if used else (1,):
            page = rng.choice(used) if used else 0
            count = state["ref_count"][page] + more
            yield change(lambda made: made["ref_count"].__setitem__(page, count))
        if free:
            yield change(lambda made: made["ref_count"].__setitem__(rng.choice(free), 1))
            yield change(lambda made: made["free_queue"].remove(rng.choice(free)))
            yield change(lambda made: made["tables"].append([rng.choice(free)]))
        if used:
            yield change(lambda made: made["free_queue"].append(rng.choice(used)))
            yield change(lambda made: made["tables"].remove(rng.choice(made["tables"])))
        return
    fresh = {*range(len(state["ref_count"]))} - {page for _, page in cached}
    if fresh:
        yield change(lambda made: made["cached"].append(["new", min(fresh)]))
        yield change(lambda made: made["hash_of"].append([min(fresh), "new"]))
    if cached:
        at = rng.randrange(len(cached))
        yield change(lambda made: made["cached"].pop(at))
        yield change(lambda made: made["hash_of"].pop(at))
        yield change(lambda made: made["hash_of"][at].__setitem__(1, "other"))
        yield change(lambda made: made["cached"].append(["second", cached[at][1]]))
    if len(cached) > 1:
        yield change(lambda made: made["cached"][0].__setitem__(1, cached[1][1]))
        yield change(lambda made: (made["hash_of"][0].__setitem__(1, cached[1][0]),
                                   made["hash_of"][1].__setitem__(1, cached[0][0])))


def audits(rng, part):
    states = [pool(rng, number, moves) for number, moves in (
        (1, 0), (2, 1), (2, 2), (3, 2), (3, 4), (4, 4), (5, 6), (6, 8), (8, 12), (12, 20), (30, 40))
        for _ in range(3)]
    for state in states:
        yield {"call": "audit", **state}
        for wrong in corrupted(rng, state, part):
            yield {"call": "audit", **wrong}
    example = {"tables": [[0, 2]], "free_queue": [1], "ref_count": [1, 0, 1],
               "cached": [["x", 0], ["y", 1]], "hash_of": [[0, "x"], [1, "y"]]}
    yield {"call": "audit", **example, **(
        {"ref_count": [2, 0, 1]} if part == "a" else {"hash_of": [[0, "x"]]})}
    yield {"call": "audit", **example}


def cases(rng):
    return {part: [*audits(rng, part)] for part in "ab"}
