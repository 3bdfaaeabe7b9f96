"""Set 6, pages and prefixes: points, parameters, and the cases of each part."""
from itertools import product

from draw import pools_of_pages

FILES = ("model.py request.py cache.py scheduler.py generate_ragged.py paging.py generate_paged.py "
         "generate_prefix.py")
PREFIX = "generate_prefix.py:Prefix"
PARTS = {   # points, what it is about, the functions; a and b are the first half
    "a": (2, "block tables and slots", "generate_paged.py:Paged.slots",
          "generate_paged.py:Paged.write"),
    "b": (3, "growth and preemption", "paging.py:PagedScheduler.schedule",
          "paging.py:PagedScheduler.preempt"),
    "c": (3, "pages that are shared", *(f"{PREFIX}Pages.{name}" for name in (
        "share", "allocate", "free"))),
    "d": (3, "pages that are found", f"{PREFIX}Scheduler.hashes", f"{PREFIX}Pages.find",
          f"{PREFIX}Pages.cache")}
WRITTEN = {"1": 2, "2": 2, "3": 2}
PARAMETERS = {"size": range(3, 10), "p": range(10, 40), "prompt": range(6, 31), "new": range(6, 31),
              "common": range(9, 61)}
VALUES = {"entry of the table of position p": "p // size", "offset in that page": "p % size",
          "pages by reservation": "-(-(prompt + new - 1) // size)",
          "pages at admission": "-(-prompt // size)",
          "tokens that need not be computed": "common // size * size"}


def places(rng):
    drawn = rng.sample(range(30), 14)
    for slot_mapping, number in ([2], 4), ([3, 0], 4), ([8, 1, 5], 12), (drawn, 30):
        yield {"call": "write", "slot_mapping": slot_mapping, "number": number}
    yield {"call": "slots", "table": [3, 1, 4], "end": 8, "page_size": 3}
    for size, table in (1, [0]), (2, [1]), (2, [2, 0]), (3, [4, 0, 1]), (16, [1, 0]):
        for end in 1, size, len(table) * size:
            yield {"call": "slots", "table": table, "end": end, "page_size": size}
    for size in 2, 3, 7:
        yield {"call": "slots", "table": rng.sample(range(40), 9), "page_size": size,
               "end": rng.randint(5 * size, 9 * size)}


def between_steps(rng, size):
    """A request that runs, with pages for all its tokens, or for all but the last."""
    prompt, generated = rng.randint(1, 2 * size + 1), rng.choice([0, 1, 1, 2, size])
    known = prompt + generated
    computed = known - 1 if generated else rng.choice([0, rng.randint(0, prompt - 1)])
    return {"prompt": prompt, "generated": generated, "computed": computed,
            "pages": -(-(known - (generated > 0)) // size)}


def states(rng):
    made = []
    for many, size in [*product((1, 1, 2, 2, 2, 3, 3, 3), (1, 2, 3)), (9, 2), (12, 4)]:
        running = [between_steps(rng, size) for _ in range(many)]
        waiting = [{"prompt": rng.randint(1, 4)} for _ in range(rng.randint(0, 2))]
        held = sum(row["pages"] for row in running)
        longest = max(-(-(row["prompt"] + row["generated"]) // size) for row in running)
        made += [{"pages": max(held, longest) + spare, "page_size": size, "running": running,
                  "waiting": waiting, "token_budget": many + 5 * size}
                 for spare in (0, rng.choice([1, 2, many]))]
    made.sort(key=lambda state: (len(state["running"]), state["pages"]))
    abc = {"prompt": 3, "generated": 2, "computed": 4, "pages": 2}
    made.append({"pages": 6, "page_size": 2, "running": [abc] * 3, "waiting": [{"prompt": 3}]})
    for state in made:
        yield {"call": "schedule", **state}
    for state in made[::3]:
        yield {"call": "preempt", "victim": rng.randrange(len(state["running"])), **state}


def sharing(rng):
    yield {"call": "free", "table": 0, "free_queue": [4, 5], "tables": [[0, 1, 2], [0, 1, 3]],
           "ref_count": [2, 2, 1, 1, 0, 0], "cached": [["x", 0], ["y", 1], ["z", 3]],
           "hash_of": [[0, "x"], [1, "y"], [3, "z"]]}
    for state in pools_of_pages(rng):
        tables, free = [*state["tables"], []], len(state["free_queue"])
        state = {**state, "tables": tables, "table": rng.randrange(len(tables))}
        others = [page for _, page in state["cached"] if page not in tables[state["table"]]]
        yield {"call": "free", **state}
        yield {"call": "allocate", "number": rng.randint(min(1, free), free), **state}
        yield {"call": "share", "found": rng.sample(others, min(2, len(others))), **state}


def finding(rng):
    for state in pools_of_pages(rng):
        names = [name for name, _ in state["cached"]]
        asked = [["x"], names, [*names, "x", *names], rng.sample(names, len(names))]
        for hashes in asked:
            yield {"call": "find", "hashes": hashes, **state}
        for page in {*range(len(state["ref_count"]))} - {page for page, _ in state["hash_of"]}:
            yield {"call": "cache", "page": page, "name": rng.choice([*names, "x"]), **state}
    yield {"call": "hashes", "tokens": [5, 7, 2, 9, 6, 1], "page_size": 2, "ends": [0, 1, 2, 5]}
    for tokens, size, ends in ([5, 5], 1, [1]), ([5, 5], 1, [2, 2]), (
            [5, 7, 5, 7, 2], 2, [0, 1, 2, 3, 5, 4]):
        yield {"call": "hashes", "tokens": tokens, "page_size": size, "ends": ends}
    for size in 1, 2, 3, 5:
        yield {"call": "hashes", "tokens": [rng.randrange(3) for _ in range(15)], "page_size": size,
               "ends": sorted(rng.randint(0, 15) for _ in range(5))}


def cases(rng):
    return {"a": [*places(rng)], "b": [*states(rng)], "c": [*sharing(rng)], "d": [*finding(rng)]}
