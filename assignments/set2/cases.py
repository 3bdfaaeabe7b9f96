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
EXAMPLE = [
    {"prompt": [5, 7, 2], "generated": [9], "computed": 3, "n": 1},
    {"prompt": [4, 8, 6, 1, 3], "computed": 2, "n": 2},
    {"prompt": [1, 6, 8], "n": 3},
]


# --- the static batch -----------------------------------------------------------------------------

def batches(rng):
    yield {"call": "static_batch_on_a_device"}
    for sizes in [[(1, 1)], [(2, 1)], [(2, 1), (1, 2)], [(1, 3), (3, 1)]]:
        yield static_batch(sizes, 24)
    yield static_batch([(3, 2), (1, 9)], 8)   # this goes beyond column 7
    for many in 3, 4, 5, 8:
        sizes = [(rng.randint(1, 9), rng.randint(1, 6)) for _ in range(many)]
        yield static_batch(sizes, 24)
    by_hand = [{"prompt": [5, 6, 7], "new": 2}, {"prompt": [8], "new": 4}]
    yield {"call": "static_batch", "requests": by_hand}


def static_batch(sizes, context_length):
    """sizes: of each request, those of its prompt and its answer"""
    requests = [{"prompt": prompt, "new": new} for prompt, new in sizes]
    return {"call": "static_batch", "context_length": context_length, "requests": requests}


# --- the end of a request -------------------------------------------------------------------------

def appends(rng):
    limits = sorted(close_limits(rng) for _ in range(120))
    limits += [wide_limits(rng) for _ in range(15)]
    for prompt, new, context_length in limits:
        yield {
            "call": "append",
            "prompt": prompt,
            "new": new,
            "context_length": context_length,
            "eos_token": rng.choice((None, 1, 7, 8, 9)),
            "tokens": [*range(7, new + 9)],
        }
    yield {
        "call": "append",
        "prompt": 2,
        "new": 3,
        "context_length": 9,
        "eos_token": 0,
        "tokens": [0, 1],
    }
    yield {"call": "append", "prompt": 6, "new": 5, "context_length": 8, "tokens": [1, 1, 1, 1]}


def close_limits(rng):
    """Prompt, new tokens and context length: either of the last two may end the request."""
    return rng.choice((1, 2, 4)), rng.randint(1, 3), rng.choice((4, 5, 9))


def wide_limits(rng):
    return rng.randint(1, 20), rng.randint(1, 30), 24


# --- dynamic admission ----------------------------------------------------------------------------

def queues(rng):
    decode = {"prompt": 2, "generated": 1, "computed": 2}
    for arrivals in lists(rng, range(4)):
        yield {
            "call": "admit",
            "step": rng.randint(0, 3),
            "max_batch": rng.randint(2, 6),
            "running": [decode] * rng.randint(0, 2),
            "waiting": [newcomer(i, arrival) for i, arrival in enumerate(sorted(arrivals))],
        }
    for reasons in lists(rng, (None, None, "stop", "length", "cancelled")):
        running = [{**DECODE, "finish_reason": reason} for reason in reasons]
        yield {"call": "still_running", "running": running}
    yield {
        "call": "admit",
        "step": 2,
        "max_batch": 3,
        "running": [{"prompt": 1, "computed": 1}],
        "waiting": [{"prompt": 1, "arrival": arrival} for arrival in (0, 1, 1, 4)],
    }


def newcomer(i, arrival):
    return {"prompt": 1 + i % 3, "new": (2, 40)[i % 2], "arrival": arrival}


# --- rectangles -----------------------------------------------------------------------------------

def layouts(rng, names):
    """names: which attributes of the layout are compared"""
    yield {"call": "layout_on_a_device", "names": names}
    for rows in plans(rng, EXAMPLE):
        yield {"call": "lay_out", "names": names, "rows": rows}
    # together wider than the context
    long = [{"prompt": 18, "generated": 2, "computed": 19, "n": 1}, {"prompt": 20, "n": 20}]
    yield {"call": "lay_out", "names": names, "rows": long}


def attentions(rng):
    for i, rows in enumerate(plans(rng, EXAMPLE)):
        yield {
            "call": "attend",
            "rows": rows,
            "heads": 2 + i % 2,
            "size": 3 - i % 2,
            **layout(rows),
        }
    yield {"call": "attend_on_a_device"}


def layout(rows):
    """What attend finds: P, T, and the mask (B, P + T)."""
    P = max(row.get("computed", 0) for row in rows)
    T = max(row["n"] for row in rows)
    return {"P": P, "T": T, "mask": [mask_row(row, P, T) for row in rows]}


def mask_row(row, P, T):
    """The past ends at column P, and the new tokens end at column P + T."""
    computed = row.get("computed", 0)
    past = [column >= P - computed for column in range(P)]
    new = [column >= T - row["n"] for column in range(T)]
    return past + new


def due(rng):
    for plan in lists(rng, rows_by_progress()):
        yield {"call": "indices_due", "plan": plan}
    yield {"call": "indices_due", "plan": EXAMPLE}


def rows_by_progress():
    """Rows of plans: some compute nothing, some a part of what is to do, some all of it."""
    rows = [{**DECODE, "n": n} for n in (0, 1)]
    rows += [{"prompt": 3, "n": n} for n in (0, 1, 3)]
    rows += [{"prompt": 2, "generated": 2, "n": n} for n in (2, 4)]
    rows.append({"prompt": 12, "n": 12})
    return rows


def cases(rng):
    a = [*batches(rng)]
    b = [*appends(rng)]
    c = [*queues(rng)]
    d = [*layouts(rng, ["tokens", "positions", "P"])]
    e = [*layouts(rng, ["mask"])]
    # drawn before f, so that an id keeps its cases
    wanted = [*layouts(rng, ["wanted"])]
    f = [*attentions(rng)]
    g = [*due(rng), *wanted]
    return {"a": a, "b": b, "c": c, "d": d, "e": e, "f": f, "g": g}
