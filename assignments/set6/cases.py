"""Set 6, pages and prefixes: points, parameters, and the cases of each part."""
from itertools import product

from draw import plans, pools_of_pages

FILES = ("model.py request.py cache.py scheduler.py generate_ragged.py paging.py generate_paged.py "
         "generate_prefix.py")
PREFIX = "generate_prefix.py:Prefix"
PARTS = {   # points, what it is about, the functions; a and b are the first half
    "a": (2, "what a kernel is given", "generate_paged.py:Paged.lay_out",
          "generate_paged.py:paged_attention"),
    "b": (3, "growth and preemption", *(f"paging.py:PagedScheduler.{name}" for name in (
        "admit", "make_room", "preempt"))),
    "c": (3, "pages that are shared", *(f"{PREFIX}Pool.{name}" for name in (
        "share", "allocate", "free", "forget"))),
    "d": (3, "pages that are found", f"{PREFIX}Scheduler.hash_of_page", f"{PREFIX}Pool.find",
          f"{PREFIX}Pool.cache")}
WRITTEN = {"1": 2, "2": 2, "3": 2}
PARAMETERS = {"size": range(3, 10), "p": range(10, 40), "prompt": range(6, 31), "new": range(6, 31),
              "common": range(9, 61)}
VALUES = {"entry of the table of position p": "p // size", "offset in that page": "p % size",
          "pages by reservation": "-(-(prompt + new - 1) // size)",
          "pages when its prompt is computed": "-(-prompt // size)",
          "tokens that need not be computed": "common // size * size"}


def places(rng):
    """Plans, each request with pages drawn from a pool for the keys that it has after the pass."""
    example = [{"prompt": 5, "generated": 3, "computed": 7, "n": 1}, {"prompt": 4, "n": 2}]
    yield {"call": "lay_out_on_a_device"}
    for plan in plans(rng, example):
        for size in (3,) if plan == example else (1, 2, 3, 5):
            rows = []
            for row in plan:
                ends = row.get("computed", 0) + row["n"]
                rows.append({**row, "pages": -(-ends // size)})
            number = sum(row["pages"] for row in rows) + rng.randint(0, 2)
            yield {"call": "lay_out", "plan": rows, "page_size": size,
                   "pool": rng.sample(range(number), number)}
    for lengths in ([(1, 1)], [(1, 3)], [(3, 3)], [(2, 5)], [(1, 4), (2, 2)], [(3, 7), (1, 2)], [
            (rng.randint(1, 4), rng.randint(4, 12)) for _ in range(5)]):
        for size in 1, 2, 4:
            number = sum(-(-keys // size) for _, keys in lengths) + 2
            yield {"call": "paged_attention", "lengths": lengths, "page_size": size,
                   "pool": rng.sample(range(number), number)}


def between_steps(rng, size):
    """A request that runs, with pages for the tokens that are computed."""
    prompt, generated = rng.randint(1, 2 * size + 1), rng.choice([0, 1, 1, 2, size])
    known = prompt + generated
    computed = known - 1 if generated else rng.choice([0, rng.randint(0, prompt - 1)])
    return {"prompt": prompt, "generated": generated, "computed": computed,
            "pages": -(-computed // size)}


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
    few = [{"prompt": 5, "computed": 2, "pages": 1}, *[
        {"prompt": 2, "generated": 1, "computed": 2, "pages": 1}] * 2]
    for i, n, pages in (0, 3, 3), (0, 2, 6), (1, 1, 3), (2, 1, 3):
        yield {"call": "make_room", "of": i, "n": n, "pages": pages, "page_size": 2,
               "running": few, "waiting": []}
    for number, state in enumerate(made):
        i = rng.randrange(len(state["running"])) if state is not made[-1] else 0
        row = state["running"][i]
        todo = row["prompt"] + row["generated"] - row["computed"]
        n = todo if number % 2 else rng.randint(1, todo)
        yield {"call": "make_room", "of": i, "n": n, **state}
    for state in made[::3]:
        yield {"call": "preempt", "victim": rng.randrange(len(state["running"])), **state}
    for pages in range(5):
        for prompt in 1, 4, 5, 8:
            yield {"call": "admit", "pages": 2 + pages, "page_size": 4, "running": [
                {"prompt": 6, "computed": 6, "generated": 1, "pages": 2}],
                "waiting": [{"prompt": prompt}, {"prompt": 1}]}


def sharing(rng):
    yield {"call": "free", "table": 0, "free_queue": [4, 5], "tables": [[0, 1, 2], [0, 1, 3]],
           "ref_count": [2, 2, 1, 1, 0, 0], "cached": [["x", [0]], ["y", [1]], ["z", [3]]],
           "hash_of": [[0, "x"], [1, "y"], [3, "z"]]}
    for state in pools_of_pages(rng):
        tables, free = [*state["tables"], []], len(state["free_queue"])
        state = {**state, "tables": tables, "table": rng.randrange(len(tables))}
        others = [page for page, _ in state["hash_of"] if page not in tables[state["table"]]]
        yield {"call": "free", **state}
        yield {"call": "allocate", "number": rng.randint(min(1, free), free), **state}
        yield {"call": "share", "found": rng.sample(others, min(2, len(others))), **state}
        del state["table"]
        yield {"call": "forget", "page": rng.randrange(len(state["ref_count"])), **state}


def finding(rng):
    for state in pools_of_pages(rng):
        names = [name for name, _ in state["cached"]]
        asked = [["x"], names, [*names, "x", *names], rng.sample(names, len(names))]
        for hashes in asked:
            yield {"call": "find", "hashes": hashes, **state}
        for page in {*range(len(state["ref_count"]))} - {page for page, _ in state["hash_of"]}:
            yield {"call": "cache", "page": page, "name": rng.choice([*names, "x"]), **state}
    yield {"call": "hashes", "tokens": [5, 7, 2, 9, 6, 1], "page_size": 2, "pages": [0, 1, 2]}
    for tokens, size, pages in ([5, 5], 1, [1]), ([5, 5], 1, [0, 0]), (
            [5, 7, 5, 7, 2, 1], 2, [0, 1, 2, 1, 0]):
        yield {"call": "hashes", "tokens": tokens, "page_size": size, "pages": pages}
    for size in 1, 2, 3, 5:
        yield {"call": "hashes", "tokens": [rng.randrange(3) for _ in range(15)], "page_size": size,
               "pages": sorted(rng.randrange(15 // size) for _ in range(5))}


def cases(rng):
    return {"a": [*places(rng)], "b": [*states(rng)], "c": [*sharing(rng)], "d": [*finding(rng)]}
