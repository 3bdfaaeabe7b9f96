"""Set 6, pages and prefixes: points, parameters, and the cases of each part."""
from itertools import product

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
    for size, table in (1, [0]), (2, [1]), (2, [2, 0]), (3, [4, 0, 1]), (16, [1, 0]):
        for end in sorted({1, size, size + 1, len(table) * size}):
            if end <= len(table) * size:
                yield {"call": "slots", "table": table, "end": end, "page_size": size}
    for size in 2, 3, 7:
        yield {"call": "slots", "table": rng.sample(range(40), 9), "page_size": size,
               "end": rng.randint(5 * size, 9 * size)}
    yield {"call": "slots", "table": [3, 1, 4], "end": 8, "page_size": 3}


def pools(rng):
    """States between two steps: a request has pages for all its tokens, or for all but the last."""
    states = []
    for many, size in [*product((1, 1, 2, 2, 2, 3, 3, 3), (1, 2, 3)), (9, 2), (12, 4)]:
        running = []
        for _ in range(many):
            prompt, generated = rng.randint(1, 2 * size + 1), rng.choice([0, 1, 1, 2, size])
            known = prompt + generated
            computed = known - 1 if generated else rng.choice([0, rng.randint(0, prompt - 1)])
            running.append({"prompt": prompt, "generated": generated, "computed": computed,
                            "pages": -(-(known - (generated > 0)) // size)})
        held, longest = sum(row["pages"] for row in running), max(
            -(-(row["prompt"] + row["generated"]) // size) for row in running)
        waiting = [{"prompt": rng.randint(1, 4)} for _ in range(rng.randint(0, 2))]
        states += [{"pages": max(held, longest) + spare, "page_size": size, "running": running,
                    "waiting": waiting, "token_budget": many + 5 * size}
                   for spare in (0, rng.choice([1, 2, many]))]
    states.sort(key=lambda state: (len(state["running"]), state["pages"]))
    for state in states:
        yield {"call": "schedule", **state}
    for state in states[::3]:
        yield {"call": "preempt", "victim": rng.randrange(len(state["running"])), **state}
    abc = {"prompt": 3, "generated": 2, "computed": 4, "pages": 2}
    yield {"call": "preempt", "victim": 2, "pages": 7, "page_size": 2, "running": [abc, abc, abc],
           "waiting": [{"prompt": 3}]}
    yield {"call": "schedule", "pages": 6, "page_size": 2, "running": [abc, abc, abc],
           "waiting": [{"prompt": 3}]}


def sharing(rng):
    yield {"call": "pool", "number": 2, "calls": [["allocate", "A", 1], ["free", "A"]]}
    yield {"call": "pool", "number": 3, "calls": [
        ["allocate", "A", 2], ["free", "A"], ["allocate", "B", 3]]}
    yield {"call": "pool", "number": 2, "calls": [
        ["allocate", "A", 1], ["cached", "A", 0, "x"], ["share", "B", "x"], ["free", "A"],
        ["free", "B"], ["share", "C", "x"], ["free", "C"], ["allocate", "D", 2]]}
    for number in 3, 4, 5, 6, 8, 12:
        calls = []
        for _ in range(3 * number):
            table = rng.choice("ABCDE")
            calls.append(rng.choice([
                ["allocate", table, rng.randint(1, 3)], ["share", table, *rng.sample("vwxyz", 2)],
                ["free", table], ["cached", table, rng.randint(0, 2), rng.choice("vwxyz")]]))
        yield {"call": "pool", "number": number, "calls": calls}
    yield {"call": "pool", "number": 6, "calls": [
        ["allocate", "A", 3], ["cached", "A", 0, "x"], ["cached", "A", 1, "y"],
        ["share", "B", "x", "y"], ["allocate", "B", 1], ["cached", "B", 2, "z"], ["free", "A"],
        ["free", "B"], ["allocate", "C", 5]]}


def finding(rng):
    for cached, asked in ([], []), ([], ["x"]), ([[3, "x"]], ["x"]), ([[3, "x"]], ["y", "x"]), (
            [[4, "x"], [2, "y"]], ["x", "y"]), ([[0, "x"], [1, "z"]], ["x", "y", "z"]), (
            [[0, "x"], [1, "x"], [2, "y"]], ["x", "y"]):
        yield {"call": "find", "cached": cached, "asked": asked}
    for _ in range(4):
        pages = rng.sample(range(9), 6)
        yield {"call": "find", "cached": [[page, rng.choice("uvwxyz")] for page in pages],
               "asked": rng.sample("uvwxyz", 5)}
    for tokens, size, ends in ([5, 5], 1, [1]), ([5, 5], 1, [2, 2]), (
            [5, 7, 5, 7, 2], 2, [0, 1, 2, 3, 5, 4]):
        yield {"call": "hashes", "tokens": tokens, "page_size": size, "ends": ends}
    for size in 1, 2, 3, 5:
        yield {"call": "hashes", "tokens": [rng.randrange(3) for _ in range(15)], "page_size": size,
               "ends": sorted(rng.randint(0, 15) for _ in range(5))}
    yield {"call": "hashes", "tokens": [5, 7, 2, 9, 6, 1], "page_size": 2, "ends": [0, 1, 2, 5]}


def cases(rng):
    return {"a": [*places(rng)], "b": [*pools(rng)], "c": [*sharing(rng)], "d": [*finding(rng)]}
