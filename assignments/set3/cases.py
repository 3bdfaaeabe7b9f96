"""Set 3, the scheduler: points and cases. Needs no torch."""
from random_rows import DECODE, lists, todo

FILES = "request.py cache.py scheduler.py"
PARTS = {   # points, what it is about, {function: its calls}
    "a": (4, "one step", {"scheduler.py:Scheduler.schedule": "schedule run"}),
    "b": (2, "reserving memory", {"scheduler.py:Scheduler.admit": "admit"}),
    "c": (3, "after a step", {"request.py:advance": "advance",
                              "scheduler.py:Scheduler.release": "release"})}


def newcomers(rng, most):
    """Some find tokens that are computed already, some find no room."""
    arrivals = sorted(rng.choice([0, 0, 1, 2]) for _ in range(rng.randint(0, most)))
    return [{"prompt": rng.randint(3, most + 5), "new": rng.randint(1, 4),
             **({"arrival": arrival} if arrival else {}),
             **rng.choice([{}, {}, {}, {"finds": 2}, {"refused": True}])} for arrival in arrivals]


def queue(rng, most):
    """A random state of a queue. The budget ends at the last that runs, or just before it."""
    kinds = DECODE, {"prompt": 4, "computed": 3}, {"prompt": 5, "computed": 3}, {"prompt": 5}
    running = [rng.choice(kinds) for _ in range(rng.randint(0, most))]
    return {"step": rng.randint(0, 2), "running": running, "waiting": newcomers(rng, most),
            "max_batch": max(len(running), 1) + rng.randint(0, 2),
            "token_budget": max(sum(map(todo, running[:-1])) + rng.randint(0, 3 * most), 1)}


def schedules(rng):
    states = [queue(rng, most) for most in (1, 2, 3) for _ in range(60)]
    states += [queue(rng, 12) for _ in range(8)]
    for state in [*states]:
        if len(state["running"]) > 1:   # with too little memory
            first = min(todo(state["running"][0]), state["token_budget"])
            states.append({**state, "room": rng.randint(0, first + 4)})
    for state in sorted(states, key=lambda state: (
            len(state["running"]) + len(state["waiting"]), str(state).count("refused"))):
        yield {"call": "schedule", **state}
    for arrival in 0, 1:   # it never fits; nobody has arrived
        yield {"call": "schedule", "step": 0, "running": [], "waiting": [
            {"prompt": 9, "new": 9, "arrival": arrival, "refused": True}], "max_batch": 2,
            "token_budget": 8}
    for most in 2, 4, 8:
        waiting = [{**row, "refused": False} for row in newcomers(rng, most)] + [{"prompt": 9}]
        yield {"call": "run", "requests": sorted(waiting, key=lambda row: row.get("arrival", 0)),
               "max_batch": most, "token_budget": rng.randint(most, 3 * most)}
    b, d = {"prompt": 8, "new": 3, "generated": 1, "computed": 8}, {"prompt": 1, "new": 2}
    c = {"prompt": 4, "new": 4}
    yield {"call": "schedule", "step": 2, "running": [b], "max_batch": 3, "token_budget": 6,
           "waiting": [{**c, "refused": True}, d]}
    yield {"call": "schedule", "step": 0, "running": [], "max_batch": 3, "token_budget": 6,
           "waiting": [{"prompt": 3, "new": 2}, {"prompt": 8, "new": 3}, c]}


def admissions(rng):
    for prompts in lists(rng, (2, 3)):
        new = rng.choice((4, 4, 30))   # for 30 there are no positions: it may take up to 24
        reserved, own = sum(prompt + 1 for prompt in prompts), min(3 + new, 24)
        if rng.random() < 0.6:   # it just fits, or just not
            most = reserved + own + rng.randint(-1, 1)
        else:
            most = rng.randint(own, reserved + own)
        yield {"call": "admit", "max_kv_tokens": most,
               "running": [{"prompt": prompt, "new": 2, "computed": 1} for prompt in prompts],
               "waiting": [{"prompt": 4, "new": new}, {"prompt": 3, "new": 1}]}
    b = {"prompt": 8, "new": 3, "generated": 1, "computed": 8}
    for most in 9, 16:
        yield {"call": "admit", "max_kv_tokens": most, "running": [b], "waiting": [
            {"prompt": 1, "new": 2}]}
    yield {"call": "admit", "max_kv_tokens": 12, "running": [], "waiting": [b], "times": 3}


def steps(rng):
    for ends in lists(rng, (None, None, "stop", "length", "cancelled")):
        yield {"call": "release", "running": [{**DECODE, "finish_reason": why} for why in ends],
               "waiting": [{"prompt": 2}]}
    rows = [{**DECODE, "n": 1}, {**DECODE, "n": 0}, {"prompt": 3, "n": 1}, {"prompt": 3, "n": 3},
            {"prompt": 3, "n": 0}, {**DECODE, "new": 2, "n": 1}, {**DECODE, "eos_token": 7, "n": 1}]
    example = [{"prompt": 5, "n": 2}, {"prompt": 1, "n": 1}, {"prompt": 3, "n": 3}]
    for plan in [*lists(rng, rows), example]:
        due = sum(each["n"] == todo(each) for each in plan)
        yield {"call": "advance", "plan": plan, "tokens": [7, 9, *range(due)][:due]}


def cases(rng):
    return {"a": [*schedules(rng)], "b": [*admissions(rng)], "c": [*steps(rng)]}
