"""Set 5, pages and prefixes: points and cases."""
from itertools import product

from draw import plans, pools_of_pages

FILES = ("model.py request.py cache.py scheduler.py generate_ragged.py paging.py generate_paged.py "
         "generate_prefix.py audit.py")
PAGED, SCHEDULER = "generate_paged.py:", "paging.py:PagedScheduler."
POOL, PREFIX = "generate_prefix.py:PrefixPool.", "generate_prefix.py:PrefixScheduler."
PARTS = {   # points, what it is about, {function: its calls}; a and b are the first half
    "a": (2, "what a kernel is given", {f"{PAGED}Paged.lay_out": "lay_out lay_out_on_a_device",
                                        f"{PAGED}paged_attention": "paged_attention"}),
    "b": (3, "growth and preemption", {f"{SCHEDULER}{name}": name for name in (
        "admit", "make_room", "preempt")}),
    "c": (3, "pages that are shared", {f"{POOL}{name}": name for name in (
        "share", "allocate", "free", "forget")}),
    "d": (3, "pages that are found", {f"{PREFIX}hash_of_page": "hash_of_page",
                                      f"{POOL}find": "find", f"{POOL}register": "register"}),
    "e": (3, "a request finds its beginning", {f"{PREFIX}admit": "admit_after_look_up",
                                               f"{PREFIX}cache_filled": "cache_filled"}),
    "f": (3, "an auditor of counts and the free queue", {"audit.py:audit": "audit"}),
    "g": (3, "an auditor of the prefix cache", {"audit.py:audit": "audit"})}


def places(rng):
    """Plans, each request with pages drawn from a pool for the keys that it has after the pass."""
    example = [{"prompt": 5, "generated": 3, "computed": 7, "n": 1}, {"prompt": 4, "n": 2}]
    for plan in plans(rng, example):
        for size in (3,) if plan == example else (1, 2, 3, 5):
            rows = []
            for row in plan:
                ends = row.get("computed", 0) + row["n"]
                rows.append({**row, "pages": -(-ends // size)})
            number = sum(row["pages"] for row in rows) + rng.randint(0, 2)
            yield {"call": "lay_out", "plan": rows, "page_size": size,
                   "pool": rng.sample(range(number), number)}
    yield {"call": "lay_out_on_a_device"}
    for lengths in ([(1, 1)], [(1, 3)], [(3, 3)], [(2, 5)], [(1, 4), (2, 2)], [(3, 7), (1, 2)], [
            (rng.randint(1, 4), rng.randint(4, 12)) for _ in range(5)]):
        for size in 1, 2, 4:
            number = sum(-(-keys // size) for _, keys in lengths) + 2
            yield {"call": "paged_attention", "lengths": lengths, "page_size": size,
                   "heads": 2 + size % 2, "size": 3 - size % 2,
                   "pool": rng.sample(range(number), number)}


def between_steps(rng, size):
    """A request that runs, with pages for the tokens that are computed."""
    prompt, generated = rng.randint(1, 2 * size + 1), rng.choice([0, 1, 1, 2, size])
    known = prompt + generated
    computed = known - 1 if generated else rng.choice([0, rng.randint(0, prompt - 1)])
    return {"prompt": prompt, "generated": generated, "computed": computed,
            "pages": -(-computed // size)}


def with_counts(rng, state):
    """The same requests in a pool that counts: others' tables may begin with A's full pages."""
    size, rows = state["page_size"], [dict(row) for row in state["running"]]
    held = sum(row["pages"] for row in rows)
    for row in rows[1:]:
        full = min(rows[0]["computed"], row["computed"]) // size
        shares = rng.randint(0, full)
        if shares:
            row["shares"] = shares
            held -= shares
    longest = max(-(-(row["prompt"] + row["generated"]) // size) for row in rows)
    return {**state, "running": rows, "counted": True,
            "pages": max(held, longest) + rng.randint(0, 1)}


def asked_of(rng, states):
    """Calls of `preempt` and `make_room` in such states."""
    for state in states[::3]:
        yield {"call": "preempt", "request": chr(65 + rng.randrange(len(state["running"]))),
               **state}
    for number, state in enumerate(states):
        i = rng.randrange(len(state["running"])) if state is not states[-1] else 0
        row = state["running"][i]
        todo = row["prompt"] + row["generated"] - row["computed"]
        n = todo if number % 2 else rng.randint(1, todo)
        yield {"call": "make_room", "request": chr(65 + i), "n": n, **state}


def states(rng):
    """A pool in which the first that run can go on, and not always all of them."""
    made = []
    for many, size in [*product((1, 1, 2, 2, 2, 3, 3, 3), (1, 2, 3)), (9, 2), (12, 4)]:
        running = [between_steps(rng, size) for _ in range(many)]
        waiting = [{"prompt": rng.randint(1, 4)} for _ in range(rng.randint(0, 2))]
        held = sum(row["pages"] for row in running)
        longest = max(-(-(row["prompt"] + row["generated"]) // size) for row in running)
        made += [{"pages": max(held, longest) + spare, "page_size": size, "running": running,
                  "waiting": waiting} for spare in (0, rng.choice([1, 2, many]))]
    made.sort(key=lambda state: (len(state["running"]), state["pages"]))
    abc = {"prompt": 3, "generated": 2, "computed": 4, "pages": 2}
    made.append({"pages": 6, "page_size": 2, "running": [abc] * 3, "waiting": [{"prompt": 3}]})
    yield from asked_of(rng, made)
    few = [{"prompt": 5, "computed": 2, "pages": 1}, *[
        {"prompt": 2, "generated": 1, "computed": 2, "pages": 1}] * 2]
    for i, n, pages in (0, 3, 3), (0, 2, 6), (1, 1, 3), (2, 1, 3):
        yield {"call": "make_room", "request": "ABC"[i], "n": n, "pages": pages, "page_size": 2,
               "running": few, "waiting": []}
    # A newcomer without a page is preempted itself: its pages would help nobody, A stays
    newcomer = [{"prompt": 3, "generated": 1, "computed": 3, "pages": 3}, {"prompt": 2, "pages": 0}]
    yield {"call": "make_room", "request": "B", "n": 2, "pages": 4, "page_size": 1,
           "running": newcomer, "waiting": []}
    for size, spare, prompt, generated in product((2, 3, 4), range(4), (1, 4, 5), (0, 3)):
        row = {"prompt": 6, "computed": 6, "generated": 1, "pages": -(-6 // size)}
        yield {"call": "admit", "pages": 2 * row["pages"] + spare, "page_size": size,
               "running": [row] * 2, "waiting": [
                   {"prompt": prompt, "generated": generated}, {"prompt": 1}]}
    yield from asked_of(rng, [with_counts(rng, state) for state in made])
    a = {"prompt": 4, "generated": 1, "computed": 4, "pages": 2}
    b = {"prompt": 3, "generated": 1, "computed": 3, "pages": 2, "shares": 1}
    state = {"pages": 3, "page_size": 2, "running": [a, b, {**a, "shares": 2}], "waiting": [],
             "counted": True}
    yield {"call": "make_room", "request": "A", "n": 1, **state}   # C's pages are A's, too
    yield {"call": "preempt", "request": "C", **state}


def sharing(rng):
    made = []
    yield {"call": "free", "table": 0, "free_queue": [4, 5], "tables": [[0, 1, 2], [0, 1, 3]],
           "ref_count": [2, 2, 1, 1, 0, 0], "cached": [["x", [0]], ["y", [1]], ["z", [3]]],
           "hash_of": [[0, "x"], [1, "y"], [3, "z"]]}
    yield {"call": "free", "table": 0, "free_queue": [3], "tables": [[0, 1, 2]], "ref_count": [
        1, 1, 1, 0], "cached": [["x", [0]]], "hash_of": [[0, "x"]]}   # two cannot be found
    for state in pools_of_pages(rng):
        tables, free = [*state["tables"], []], len(state["free_queue"])
        state = {**state, "tables": tables, "table": rng.randrange(len(tables))}
        others = [page for page, _ in state["hash_of"] if page not in tables[state["table"]]]
        longest = max(range(len(tables)), key=lambda i: len(tables[i]))
        yield {"call": "share", "found": rng.sample(others, min(2, len(others))), **state}
        yield {"call": "free", **state, "table": longest}
        made.append({"call": "allocate", "number": rng.randint(min(1, free), free), **state})
        made.append({"call": "allocate", "number": 0, **state})
        del state["table"]
        yield {"call": "forget", "page": rng.randrange(len(state["ref_count"])), **state}
    yield from made   # it calls share and forget


def finding(rng):
    yield {"call": "find", "hashes": ["x"], "tables": [[0]], "free_queue": [1, 2], "ref_count": [
        1, 0, 0], "cached": [["x", [2, 0]]], "hash_of": [[2, "x"], [0, "x"]]}
    for state in pools_of_pages(rng):
        names = [name for name, _ in state["cached"]]
        asked = [["x"], names, [*names, "x", *names], rng.sample(names, len(names))]
        for hashes in asked:
            yield {"call": "find", "hashes": hashes, **state}
        for page in {*range(len(state["ref_count"]))} - {page for page, _ in state["hash_of"]}:
            yield {"call": "register", "page": page, "digest": rng.choice([*names, "x"]), **state}
    yield {"call": "hash_of_page", "tokens": [5, 7, 2, 9, 6, 1], "page_size": 2, "pages": [0, 1, 2]}
    for tokens, size, pages in ([5, 5], 1, [1]), ([5, 5], 1, [0, 0]), (
            [5, 7, 5, 7, 2, 1], 2, [0, 1, 2, 1, 0]):
        yield {"call": "hash_of_page", "tokens": tokens, "page_size": size, "pages": pages}
    for size in 1, 2, 3, 5:
        tokens = [rng.randrange(3) for _ in range(15)]
        yield {"call": "hash_of_page", "tokens": tokens, "page_size": size,
               "pages": sorted(rng.randrange(15 // size) for _ in range(5)),
               "prompt": rng.randint(1, 15)}


def beginnings(rng):
    """Requests of which some first pages are found, in use by others or free."""
    yield {"call": "admit_after_look_up", "prompt": 9, "page_size": 4, "used": [], "free": [
        0, 1, 2], "cached": [2, 1]}
    for size, prompt, generated in product((1, 2, 4), (1, 4, 5, 8), (0, 3)):
        full = (prompt + generated - 1) // size
        for found in {0, min(1, full), full}:
            pages = rng.sample(range(20), found)
            used = [page for page in pages if rng.random() < 0.5]
            revived = [page for page in pages if page not in used]
            need = -(-(prompt + generated) // size) - found
            for spare in need - 1, need, need + 2:
                free = revived + [*range(20, 20 + max(spare, 0))]
                yield {"call": "admit_after_look_up", "prompt": prompt, "generated": generated,
                       "page_size": size, "used": used, "free": rng.sample(free, len(free)),
                       "cached": pages}
    for size in 1, 2, 3:
        for _ in range(8):
            row = {"prompt": rng.randint(1, 9), "generated": rng.randint(0, 4)}
            start = rng.randint(0, row["prompt"] + row["generated"] - 1)
            yield {"call": "cache_filled", **row, "page_size": size, "start": start,
                   "end": rng.randint(start + 1, row["prompt"] + row["generated"])}
    for known in [0], [1], [0, 1, 2]:   # equal prompts that were computed side by side
        yield {"call": "cache_filled", "prompt": 7, "generated": 0, "page_size": 2, "start": 0,
               "end": 6, "known": known}


def corrupted(rng, state, part):
    """The pool with one thing changed, in each of many ways."""
    def put(name, at, *entries):
        """In the place of entry `at`, or behind the last."""
        return {**state, name: [*state[name][:at], *entries, *state[name][at + 1:]]}

    counts, tables, free = state["ref_count"], state["tables"], state["free_queue"]
    cached, hash_of = state["cached"], state["hash_of"]
    page, used = rng.randrange(len(counts)), [i for i, many in enumerate(counts) if many]
    if part == "f":
        for more in 1, -1, 2:
            yield put("ref_count", page, counts[page] + more)
        if len(counts) > 1:   # their sum is right
            other = (page + 1) % len(counts)
            changed = [each + (i == page) - (i == other) for i, each in enumerate(counts)]
            yield {**state, "ref_count": changed}
        yield put("free_queue", rng.randint(0, len(free)))
        yield put("free_queue", len(free), page)
        if free and used:   # their number is right
            yield put("free_queue", rng.randrange(len(free)), rng.choice(used))
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
        yield {"call": "audit", **state, **{   # in another order it is as right
            name: state[name][::-1] for name in ("free_queue", "hash_of")}}
        for changed in corrupted(rng, state, part):
            yield {"call": "audit", **changed}


def cases(rng):
    return {"a": [*places(rng)], "b": [*states(rng)], "c": [*sharing(rng)], "d": [*finding(rng)],
            "e": [*beginnings(rng)], "f": [*audits(rng, "f")], "g": [*audits(rng, "g")]}
