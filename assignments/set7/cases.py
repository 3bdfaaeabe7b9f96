"""Set 7, the audit: points, parameters, and the cases of each part. Needs no torch."""
from draw import pools_of_pages

FILES = "audit.py"
PARTS = {   # points, what it is about, the function
    "a": (3, "counts and the free queue", "audit.py:audit"),
    "b": (3, "the prefix cache", "audit.py:audit")}
WRITTEN = {"1": 3, "2": 2}
PARAMETERS = {"pages": [4000, 6000, 9000], "steps": [20, 40, 50], "every": [100, 250, 400]}
VALUES = {"seconds between two audits": "every / steps",
          "pages per second": "pages * steps / every"}


def corrupted(rng, state, part):
    """The pool with one thing changed, in each of many ways."""
    def put(name, at, *entries):
        """In the place of entry `at`, or behind the last."""
        return {**state, name: [*state[name][:at], *entries, *state[name][at + 1:]]}

    counts, tables, free = state["ref_count"], state["tables"], state["free_queue"]
    cached, hash_of = state["cached"], state["hash_of"]
    page = rng.randrange(len(counts))
    if part == "a":
        for more in 1, -1, 2:
            yield put("ref_count", page, counts[page] + more)
        yield put("free_queue", rng.randint(0, len(free)))
        yield put("free_queue", len(free), page)
        yield put("tables", rng.randint(0, len(tables)))
        yield put("tables", len(tables), [page])
        return
    yield put("cached", len(cached), ["new", [page]])
    yield put("cached", len(cached), ["empty", []])
    yield put("hash_of", len(hash_of), [page, "new"])
    if cached:
        at, other = rng.randrange(len(cached)), rng.randrange(len(hash_of))
        (name, pages), (page, _) = cached[at], hash_of[other]
        names = [name for _, name in hash_of]
        yield put("cached", at)
        yield put("cached", at, [name, pages[:-1]])
        yield put("cached", at, [name, [*pages, page]])
        yield put("cached", at, [name, [*pages[:-1], page]])
        yield put("cached", len(cached), ["second", [page]])
        yield put("hash_of", other)
        yield put("hash_of", other, [page, "other"])
        yield {**state, "hash_of": [[page, name] for (page, _), name in zip(
            hash_of, names[1:] + names[:1])]}


def audits(rng, part):
    example = {"tables": [[0, 2]], "free_queue": [1], "ref_count": [1, 0, 1],
               "cached": [["x", [0]], ["y", [1]]], "hash_of": [[0, "x"], [1, "y"]]}
    for state in [*pools_of_pages(rng), example]:
        yield {"call": "audit", **state}
        for changed in corrupted(rng, state, part):
            yield {"call": "audit", **changed}


def cases(rng):
    return {part: [*audits(rng, part)] for part in "ab"}
