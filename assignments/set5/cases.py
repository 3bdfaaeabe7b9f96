"""Set 5, pages and prefixes: points and cases."""
from itertools import product

from random_pools import (
    OF_COUNTS_AND_QUEUE,
    OF_THE_CACHE,
    pools_of_pages,
    pools_to_audit,
)
from random_rows import plans

FILES = ("model.py request.py cache.py scheduler.py generate_ragged.py paging.py generate_paged.py "
         "generate_prefix.py audit.py")
PAGED, SCHEDULER = "generate_paged.py:", "paging.py:PagedScheduler."
POOL, PREFIX = "generate_prefix.py:PrefixPool.", "generate_prefix.py:PrefixScheduler."
PARTS = {   # points, what it is about, {function: its calls}; a and b are the first half
    "a": (2, "what a kernel is given", {
        f"{PAGED}Paged.lay_out": "lay_out lay_out_on_a_device",
        f"{PAGED}paged_attention": "paged_attention"}),
    "b": (3, "growth and preemption", {
        f"{SCHEDULER}admit": "admit",
        f"{SCHEDULER}make_room": "make_room",
        f"{SCHEDULER}preempt": "preempt"}),
    "c": (3, "pages that are shared", {
        f"{POOL}share": "share",
        f"{POOL}allocate": "allocate",
        f"{POOL}free": "free",
        f"{POOL}forget": "forget"}),
    "d": (3, "pages that are found", {
        f"{PREFIX}hash_of_page": "hash_of_page",
        f"{POOL}find": "find",
        f"{POOL}register": "register"}),
    "e": (3, "a request finds its beginning", {
        f"{PREFIX}admit": "admit_after_look_up",
        f"{PREFIX}cache_filled": "cache_filled"}),
    "f": (3, "an auditor of counts and the free queue", {"audit.py:audit": "audit"}),
    "g": (3, "an auditor of the prefix cache", {"audit.py:audit": "audit"})}


def pages_for(tokens, page_size):
    return -(-tokens // page_size)


def shuffled(rng, number):
    """The numbers of this many pages, in any order."""
    return rng.sample(range(number), number)


# --- a --------------------------------------------------------------------------------------------

def layouts(rng):
    """Plans, each request with pages for the keys that it has after the pass."""
    by_hand = [{"prompt": 5, "generated": 3, "computed": 7, "n": 1}, {"prompt": 4, "n": 2}]
    for plan in plans(rng, by_hand):
        sizes = (3,) if plan == by_hand else (1, 2, 3, 5)
        for page_size in sizes:
            yield layout(rng, plan, page_size)
    yield {"call": "lay_out_on_a_device"}


def layout(rng, plan, page_size):
    rows, number = [], rng.randint(0, 2)   # of pages that nobody has
    for row in plan:
        pages = pages_for(row.get("computed", 0) + row["n"], page_size)
        rows.append({**row, "pages": pages})
        number += pages
    return {"call": "lay_out", "plan": rows, "page_size": page_size, "pool": shuffled(rng, number)}


BATCHES = (   # of requests, (new tokens, keys) each
    [(1, 1)],
    [(1, 3)],
    [(3, 3)],
    [(2, 5)],
    [(1, 4), (2, 2)],
    [(3, 7), (1, 2)])


def attentions(rng):
    drawn = [(rng.randint(1, 4), rng.randint(4, 12)) for _ in range(5)]
    for lengths in *BATCHES, drawn:
        for page_size in 1, 2, 4:
            pages = sum(pages_for(keys, page_size) for _, keys in lengths)
            yield {"call": "paged_attention",
                   "lengths": lengths,
                   "page_size": page_size,
                   "heads": 2 + page_size % 2,
                   "size": 3 - page_size % 2,
                   "pool": shuffled(rng, pages + 2)}


# --- b --------------------------------------------------------------------------------------------

def between_steps(rng, page_size):
    """A request that runs, with pages for the tokens that are computed."""
    prompt = rng.randint(1, 2 * page_size + 1)
    generated = rng.choice([0, 1, 1, 2, page_size])
    if generated:
        computed = prompt + generated - 1
    else:
        computed = rng.choice([0, rng.randint(0, prompt - 1)])
    return {"prompt": prompt, "generated": generated, "computed": computed,
            "pages": pages_for(computed, page_size)}


def tokens_in(row):
    return row["prompt"] + row["generated"]


def states(rng):
    """Pools in which the first that run can go on, and not always all of them."""
    sizes = [*product((1, 1, 2, 2, 2, 3, 3, 3), (1, 2, 3))]
    sizes += [(9, 2), (12, 4)]
    drawn = []
    for number, page_size in sizes:
        running = [between_steps(rng, page_size) for _ in range(number)]
        waiting = [{"prompt": rng.randint(1, 4)} for _ in range(rng.randint(0, 2))]
        held = sum(row["pages"] for row in running)
        longest = max(pages_for(tokens_in(row), page_size) for row in running)
        for spare in 0, rng.choice([1, 2, number]):
            pages = max(held, longest) + spare
            drawn.append({"pages": pages, "page_size": page_size,
                          "running": running, "waiting": waiting})
    return sorted(drawn, key=how_large)


def how_large(state):
    return len(state["running"]), state["pages"]


def with_counts(rng, state):
    """The same requests in a pool that counts: others' tables may begin with A's full pages."""
    page_size, rows = state["page_size"], [dict(row) for row in state["running"]]
    held = sum(row["pages"] for row in rows)
    for row in rows[1:]:
        full = min(rows[0]["computed"], row["computed"]) // page_size
        shares = rng.randint(0, full)
        if shares:
            row["shares"] = shares
            held -= shares
    longest = max(pages_for(tokens_in(row), page_size) for row in rows)
    return {**state, "running": rows, "counted": True,
            "pages": max(held, longest) + rng.randint(0, 1)}


def growth(rng):
    """Calls of `preempt` and `make_room`, in pools that count their pages and in others."""
    abc = {"prompt": 3, "generated": 2, "computed": 4, "pages": 2}
    by_hand = {"pages": 6, "page_size": 2, "running": [abc] * 3, "waiting": [{"prompt": 3}]}
    drawn = [*states(rng), by_hand]
    counted = [with_counts(rng, state) for state in drawn]
    for some in drawn, counted:
        yield from preemptions(rng, some[::3])
        yield from rooms(rng, some)
    yield from growth_by_hand()


def growth_by_hand():
    decode = {"prompt": 2, "generated": 1, "computed": 2, "pages": 1}
    running = [{"prompt": 5, "computed": 2, "pages": 1}, decode, decode]
    for request, n, pages in ("A", 3, 3), ("A", 2, 6), ("B", 1, 3), ("C", 1, 3):
        yield {"call": "make_room", "request": request, "n": n, "pages": pages, "page_size": 2,
               "running": running, "waiting": []}
    # C's pages are A's, too.
    a = {"prompt": 4, "generated": 1, "computed": 4, "pages": 2}
    b = {"prompt": 3, "generated": 1, "computed": 3, "pages": 2, "shares": 1}
    c = {**a, "shares": 2}
    state = {"pages": 3, "page_size": 2, "running": [a, b, c], "waiting": [], "counted": True}
    yield {"call": "make_room", "request": "A", "n": 1, **state}
    yield {"call": "preempt", "request": "C", **state}
    # A newcomer without a page is preempted itself: its pages would help nobody, A stays.
    a = {"prompt": 3, "generated": 1, "computed": 3, "pages": 3}
    newcomer = {"prompt": 2, "pages": 0}
    yield {"call": "make_room", "request": "B", "n": 2, "pages": 4, "page_size": 1,
           "running": [a, newcomer], "waiting": []}


def preemptions(rng, states):
    for state in states:
        request = letter(rng.randrange(len(state["running"])))
        yield {"call": "preempt", "request": request, **state}


def rooms(rng, states):
    """The last of the states is the one made by hand, in which A asks."""
    for number, state in enumerate(states):
        running = state["running"]
        i = 0 if state is states[-1] else rng.randrange(len(running))
        todo = tokens_in(running[i]) - running[i]["computed"]
        n = todo if number % 2 else rng.randint(1, todo)
        yield {"call": "make_room", "request": letter(i), "n": n, **state}


def letter(i):
    """The name of the i-th request."""
    return chr(65 + i)


def admissions():
    sizes, spares = (2, 3, 4), range(4)
    prompts, answers = (1, 4, 5), (0, 3)
    for page_size, spare, prompt, generated in product(sizes, spares, prompts, answers):
        pages = pages_for(6, page_size)
        row = {"prompt": 6, "computed": 6, "generated": 1, "pages": pages}
        first = {"prompt": prompt, "generated": generated}
        yield {"call": "admit", "pages": 2 * pages + spare, "page_size": page_size,
               "running": [row, row],
               "waiting": [first, {"prompt": 1}]}


# --- c --------------------------------------------------------------------------------------------

def sharing(rng):
    yield from sharing_by_hand()
    allocations = []   # these call share and forget, so they come behind them
    for pool in pools_of_pages(rng):
        free = len(pool["free_queue"])
        tables = [*pool["tables"], []]
        pool = {**pool, "tables": tables}
        table = rng.randrange(len(tables))
        longest = max(range(len(tables)), key=lambda i: len(tables[i]))
        others = [page for page, _ in pool["hash_of"] if page not in tables[table]]
        found = rng.sample(others, min(2, len(others)))
        page = rng.randrange(len(pool["ref_count"]))
        yield {"call": "share", "found": found, **pool, "table": table}
        yield {"call": "free", **pool, "table": longest}
        yield {"call": "forget", "page": page, **pool}
        for number in rng.randint(min(1, free), free), 0:
            allocations.append({"call": "allocate", "number": number, **pool, "table": table})
    yield from allocations


def sharing_by_hand():
    yield {"call": "free", "table": 0,
           "free_queue": [4, 5],
           "tables": [[0, 1, 2], [0, 1, 3]],
           "ref_count": [2, 2, 1, 1, 0, 0],
           "cached": [["x", [0]], ["y", [1]], ["z", [3]]],
           "hash_of": [[0, "x"], [1, "y"], [3, "z"]]}
    # Two pages cannot be found.
    yield {"call": "free", "table": 0,
           "free_queue": [3],
           "tables": [[0, 1, 2]],
           "ref_count": [1, 1, 1, 0],
           "cached": [["x", [0]]],
           "hash_of": [[0, "x"]]}
    # The table is not in the order of the pages' numbers; then two pages hold the same tokens.
    in_use = {"free_queue": [3], "tables": [[1, 2, 0]], "ref_count": [1, 1, 1, 0]}
    yield {"call": "free", "table": 0, **in_use,
           "cached": [["x", [1]], ["y", [2]], ["z", [0]]],
           "hash_of": [[1, "x"], [2, "y"], [0, "z"]]}
    yield {"call": "forget", "page": 1, **in_use,
           "cached": [["x", [2, 1]]],
           "hash_of": [[2, "x"], [1, "x"]]}


# --- d --------------------------------------------------------------------------------------------

def finding(rng):
    yield {"call": "find", "hashes": ["x"],
           "tables": [[0]],
           "free_queue": [1, 2],
           "ref_count": [1, 0, 0],
           "cached": [["x", [2, 0]]],
           "hash_of": [[2, "x"], [0, "x"]]}
    for pool in pools_of_pages(rng):
        names = [name for name, _ in pool["cached"]]
        for hashes in ["x"], names, [*names, "x", *names], rng.sample(names, len(names)):
            yield {"call": "find", "hashes": hashes, **pool}
        pages = {*range(len(pool["ref_count"]))}
        cached_pages = {page for page, _ in pool["hash_of"]}
        for page in pages - cached_pages:
            digest = rng.choice([*names, "x"])
            yield {"call": "register", "page": page, "digest": digest, **pool}


SEQUENCES = (   # tokens, page size, pages
    ([5, 5], 1, [1]),
    ([5, 5], 1, [0, 0]),
    ([5, 7, 5, 7, 2, 1], 2, [0, 1, 2, 1, 0]))


def hashes(rng):
    by_hand = {"call": "hash_of_page", "tokens": [5, 7, 2, 9, 6, 1], "page_size": 2}
    yield {**by_hand, "pages": [0, 1, 2]}
    yield {**by_hand, "pages": [2, 0]}
    yield {**by_hand, "pages": [0, 1, 2], "prompt": 1}   # page after page is filled
    for tokens, page_size, pages in SEQUENCES:
        yield {"call": "hash_of_page", "tokens": tokens, "page_size": page_size, "pages": pages}
    for page_size in 1, 2, 3, 5:
        tokens = [rng.randrange(3) for _ in range(15)]
        prompt = rng.randint(1, 15)
        pages = sorted(rng.randrange(15 // page_size) for _ in range(5))
        yield {"call": "hash_of_page", "tokens": tokens, "page_size": page_size,
               "prompt": prompt, "pages": pages}


# --- e --------------------------------------------------------------------------------------------

def beginnings(rng):
    """Requests of which some first pages are found, in use by others or free."""
    yield {"call": "admit_after_look_up", "prompt": 9, "page_size": 4, "used": [],
           "free": [0, 1, 2], "cached": [2, 1]}
    sizes, prompts, answers = (1, 2, 4), (1, 4, 5, 8), (0, 3)
    for page_size, prompt, generated in product(sizes, prompts, answers):
        request = {"prompt": prompt, "generated": generated, "page_size": page_size}
        full = (prompt + generated - 1) // page_size
        for number in {0, min(1, full), full}:
            found = rng.sample(range(20), number)
            used = [page for page in found if rng.random() < 0.5]
            found_free = [page for page in found if page not in used]
            new = pages_for(prompt + generated, page_size) - number
            for spare in new - 1, new, new + 2:
                others = range(20, 20 + max(spare, 0))
                free = [*found_free, *others]
                yield {"call": "admit_after_look_up", **request, "used": used,
                       "free": rng.sample(free, len(free)), "cached": found}


def passes(rng):
    """A pass computes tokens of a request, and fills some of its pages or none."""
    for page_size in 1, 2, 3:
        for _ in range(8):
            prompt, generated = rng.randint(1, 9), rng.randint(0, 4)
            tokens = prompt + generated
            start = rng.randint(0, tokens - 1)
            end = rng.randint(start + 1, tokens)
            yield {"call": "cache_filled", "prompt": prompt, "generated": generated,
                   "page_size": page_size, "start": start, "end": end}
    for known in [0], [1], [0, 1, 2]:   # equal prompts that were computed side by side
        yield {"call": "cache_filled", "prompt": 7, "generated": 0, "page_size": 2, "start": 0,
               "end": 6, "known": known}


# --- f and g --------------------------------------------------------------------------------------

def audits(rng, ways):
    """Pools that are right, and pools that are wrong in one of these ways."""
    for pool in pools_to_audit(rng, ways):
        yield {"call": "audit", **pool}
    cached = {"cached": [["x", [0]], ["y", [1]]], "hash_of": [[0, "x"], [1, "y"]]}
    yield {"call": "audit", "tables": [[0, 2]], "free_queue": [1], "ref_count": [1, 0, 1], **cached}
    # Page 2 is in two tables and not cached; a request that is admitted has no page yet.
    yield {"call": "audit", "tables": [[0, 2], [2]], "free_queue": [1], "ref_count": [1, 0, 2],
           **cached}
    yield {"call": "audit", "tables": [[], [0, 2]], "free_queue": [1], "ref_count": [1, 0, 1],
           **cached}


def cases(rng):
    return {"a": [*layouts(rng), *attentions(rng)],
            "b": [*growth(rng), *admissions()],
            "c": [*sharing(rng)],
            "d": [*finding(rng), *hashes(rng)],
            "e": [*beginnings(rng), *passes(rng)],
            "f": [*audits(rng, OF_COUNTS_AND_QUEUE)],
            "g": [*audits(rng, OF_THE_CACHE)]}
