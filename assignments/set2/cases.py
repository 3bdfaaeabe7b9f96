"""Set 2, rectangles: points and cases."""
from random_rows import DECODE, lists, plans

FILES = "model.py request.py cache.py generate_naive.py generate_dynamic.py"
LAY_OUT = "generate_dynamic.py:Rectangle.lay_out"
PARTS = {   # points, what it is about, {function: its calls}
    "a": (3, "the static batch", {
        "generate_naive.py:StaticBatch.lay_out": "static_batch static_batch_on_a_device"}),
    "b": (2, "the end of a request", {"request.py:Request.append": "append"}),
    "c": (3, "dynamic admission", {"generate_dynamic.py:admit": "admit",
                                   "generate_dynamic.py:still_running": "still_running"}),
    "d": (3, "tokens and positions", {LAY_OUT: "lay_out layout_on_a_device"}),
    "e": (4, "the mask over past and new slots", {LAY_OUT: "lay_out layout_on_a_device"}),
    "f": (3, "gathering and writing back", {
        "generate_dynamic.py:Rectangle.attend": "attend attend_on_a_device"}),
    "g": (2, "which requests get a token", {LAY_OUT: "lay_out layout_on_a_device",
                                            "request.py:indices_due": "indices_due"})}
EXAMPLE = [{"prompt": [5, 7, 2], "generated": [9], "computed": 3, "n": 1},
           {"prompt": [4, 8, 6, 1, 3], "computed": 2, "n": 2}, {"prompt": [1, 6, 8], "n": 3}]


def batches(rng):
    sizes = [(((1, 1),), 24), (((2, 1),), 24), (((2, 1), (1, 2)), 24), (((1, 3), (3, 1)), 24),
             (((3, 2), (1, 9)), 8)]   # this goes beyond column 7
    sizes += [([(rng.randint(1, 9), rng.randint(1, 6)) for _ in range(many)], 24)
              for many in (3, 4, 5, 8)]
    yield {"call": "static_batch_on_a_device"}
    for requests, room in sizes:
        yield {"call": "static_batch", "context_length": room, "requests": [
            {"prompt": prompt, "new": new} for prompt, new in requests]}
    yield {"call": "static_batch", "requests": [
        {"prompt": [5, 6, 7], "new": 2}, {"prompt": [8], "new": 4}]}


def appends(rng):
    drawn = sorted((rng.choice((1, 2, 4)), rng.randint(1, 3), rng.choice((4, 5, 9)))
                   for _ in range(120))
    drawn += [(rng.randint(1, 20), rng.randint(1, 30), 24) for _ in range(15)]
    for prompt, new, room in drawn:
        yield {"call": "append", "prompt": prompt, "new": new, "context_length": room,
               "eos_token": rng.choice((None, 1, 7, 8, 9)), "tokens": [*range(7, new + 9)]}
    yield {"call": "append", "prompt": 2, "new": 3, "context_length": 9, "eos_token": 0,
           "tokens": [0, 1]}
    yield {"call": "append", "prompt": 6, "new": 5, "context_length": 8, "tokens": [1, 1, 1, 1]}


def queues(rng):
    for arrivals in lists(rng, range(4)):
        yield {"call": "admit", "step": rng.randint(0, 3), "max_batch": rng.randint(2, 6),
               "running": [{"prompt": 2, "generated": 1, "computed": 2}] * rng.randint(0, 2),
               "waiting": [{"prompt": 1 + i % 3, "new": (2, 40)[i % 2], "arrival": arrival}
                           for i, arrival in enumerate(sorted(arrivals))]}
    for ends in lists(rng, (None, None, "stop", "length", "cancelled")):
        running = [{**DECODE, "finish_reason": why} for why in ends]
        yield {"call": "still_running", "running": running}
    yield {"call": "admit", "step": 2, "max_batch": 3, "running": [{"prompt": 1, "computed": 1}],
           "waiting": [{"prompt": 1, "arrival": arrival} for arrival in (0, 1, 1, 4)]}


def layout(rows):
    """What attend finds: P, T, and the mask (B, P + T)."""
    P, T = max(row.get("computed", 0) for row in rows), max(row["n"] for row in rows)
    return {"P": P, "T": T, "mask": [
        [P - row.get("computed", 0) <= column < P or column >= P + T - row["n"]
         for column in range(P + T)] for row in rows]}


def cases(rng):
    rows = [{**DECODE, "n": n} for n in (0, 1)] + [{"prompt": 3, "n": n} for n in (0, 1, 3)]
    rows += [{"prompt": 2, "generated": 2, "n": n} for n in (2, 4)] + [{"prompt": 12, "n": 12}]
    made = {"a": [*batches(rng)], "b": [*appends(rng)], "c": [*queues(rng)]}
    for part, names in ("d", ["tokens", "positions", "P"]), ("e", ["mask"]), ("g", ["wanted"]):
        made[part] = [{"call": "layout_on_a_device", "names": names}, *(
            {"call": "lay_out", "names": names, "rows": rows} for rows in plans(rng, EXAMPLE))]
    made["f"] = [{"call": "attend", "rows": rows, "heads": 2 + i % 2, "size": 3 - i % 2,
                  **layout(rows)} for i, rows in enumerate(plans(rng, EXAMPLE))]
    made["f"].append({"call": "attend_on_a_device"})
    made["g"][:0] = [{"call": "indices_due", "plan": plan} for plan in [*lists(rng, rows), EXAMPLE]]
    return dict(sorted(made.items()))
