"""Set 3, the scheduler: points and cases. Needs no torch."""
from random_rows import DECODE, lists, todo

FILES = "request.py cache.py scheduler.py"
PARTS = {   # points, what it is about, {function: its calls}
    "a": (4, "one step", {"scheduler.py:Scheduler.schedule": "schedule run"}),
    "b": (2, "reserving memory", {"scheduler.py:Scheduler.admit": "admit"}),
    "c": (3, "after a step", {"request.py:advance": "advance",
                              "scheduler.py:Scheduler.release": "release"})}


# --- one step -------------------------------------------------------------------------------------

def schedules(rng):
    for state in sorted(states(rng), key=complexity):
        yield {"call": "schedule", **state}
    for arrival in 0, 1:   # it never fits; nobody has arrived
        refused = {"prompt": 9, "new": 9, "arrival": arrival, "refused": True}
        yield {
            "call": "schedule",
            "step": 0,
            "running": [],
            "waiting": [refused],
            "max_batch": 2,
            "token_budget": 8,
        }
    for most in 2, 4, 8:
        yield whole_run(rng, most)
    # the example of the handout
    b = {"prompt": 8, "new": 3, "generated": 1, "computed": 8}
    c = {"prompt": 4, "new": 4}
    d = {"prompt": 1, "new": 2}
    c_refused = {**c, "refused": True}
    yield {
        "call": "schedule",
        "step": 2,
        "running": [b],
        "max_batch": 3,
        "token_budget": 6,
        "waiting": [c_refused, d],
    }
    yield {
        "call": "schedule",
        "step": 0,
        "running": [],
        "max_batch": 3,
        "token_budget": 6,
        "waiting": [{"prompt": 3, "new": 2}, {"prompt": 8, "new": 3}, c],
    }


def states(rng):
    """Random states of a queue; then again those in which several run, with too little memory."""
    drawn = []
    for most in 1, 2, 3:
        drawn += [random_state(rng, most) for _ in range(60)]
    drawn += [random_state(rng, 12) for _ in range(8)]
    several_run = [state for state in drawn if len(state["running"]) > 1]
    return drawn + [short_of_memory(rng, state) for state in several_run]


def random_state(rng, most):
    """Of a queue. The budget ends at the last that runs, or just before it."""
    kinds = [
        DECODE,
        {"prompt": 4, "computed": 3},
        {"prompt": 5, "computed": 3},
        {"prompt": 5},
    ]
    running = [rng.choice(kinds) for _ in range(rng.randint(0, most))]
    step = rng.randint(0, 2)
    waiting = newcomers(rng, most)
    max_batch = max(len(running), 1) + rng.randint(0, 2)
    before_the_last = sum(todo(row) for row in running[:-1])
    budget = before_the_last + rng.randint(0, 3 * most)
    return {
        "step": step,
        "running": running,
        "waiting": waiting,
        "max_batch": max_batch,
        "token_budget": max(budget, 1),
    }


def newcomers(rng, most):
    """Some find tokens that are computed already, some find no room."""
    many = rng.randint(0, most)
    arrivals = sorted(rng.choice([0, 0, 1, 2]) for _ in range(many))
    return [newcomer(rng, most, arrival) for arrival in arrivals]


def newcomer(rng, most, arrival):
    row = {"prompt": rng.randint(3, most + 5), "new": rng.randint(1, 4)}
    if arrival:
        row["arrival"] = arrival
    return row | rng.choice([{}, {}, {}, {"finds": 2}, {"refused": True}])


def short_of_memory(rng, state):
    first = min(todo(state["running"][0]), state["token_budget"])
    return {**state, "room": rng.randint(0, first + 4)}


def complexity(state):
    """Of two states, the simpler one comes first: fewer requests, then fewer of them refused."""
    requests = len(state["running"]) + len(state["waiting"])
    return requests, str(state).count("refused")


def whole_run(rng, most):
    waiting = [{**row, "refused": False} for row in newcomers(rng, most)]
    waiting.append({"prompt": 9})
    return {
        "call": "run",
        "requests": sorted(waiting, key=lambda row: row.get("arrival", 0)),
        "max_batch": most,
        "token_budget": rng.randint(most, 3 * most),
    }


# --- reserving memory -----------------------------------------------------------------------------

def admissions(rng):
    for prompts in lists(rng, (2, 3)):
        yield admission(rng, prompts)
    b = {"prompt": 8, "new": 3, "generated": 1, "computed": 8}
    d = {"prompt": 1, "new": 2}
    for most in 9, 11, 12, 16:   # b may take 10 tokens, and d 2
        yield {"call": "admit", "max_kv_tokens": most, "running": [b], "waiting": [d]}
    long = {"prompt": 8, "new": 30, "generated": 3, "computed": 10}   # it may take 24: the context
    for most in 25, 26:
        yield {"call": "admit", "max_kv_tokens": most, "running": [long], "waiting": [d]}
    yield {"call": "admit", "max_kv_tokens": 12, "running": [], "waiting": [b], "times": 3}


def admission(rng, prompts):
    """prompts: lengths of those that run"""
    new = rng.choice((4, 4, 30))
    reserved = sum(prompt + 1 for prompt in prompts)
    own = min(3 + new, 24)   # for 30 there are no positions: it may take up to 24
    if rng.random() < 0.6:   # it just fits, or just not
        most = reserved + own + rng.randint(-1, 1)
    else:
        most = rng.randint(own, reserved + own)
    return {
        "call": "admit",
        "max_kv_tokens": most,
        "running": [{"prompt": prompt, "new": 2, "computed": 1} for prompt in prompts],
        "waiting": [{"prompt": 4, "new": new}, {"prompt": 3, "new": 1}],
    }


# --- after a step ---------------------------------------------------------------------------------

def steps(rng):
    for reasons in lists(rng, (None, None, "stop", "length", "cancelled")):
        running = [{**DECODE, "finish_reason": reason} for reason in reasons]
        yield {"call": "release", "running": running, "waiting": [{"prompt": 2}]}
    rows = [
        {**DECODE, "n": 1},
        {**DECODE, "n": 0},
        {"prompt": 3, "n": 1},
        {"prompt": 3, "n": 3},
        {"prompt": 3, "n": 0},
        {**DECODE, "new": 2, "n": 1},
        {**DECODE, "eos_token": 7, "n": 1},
    ]
    for plan in lists(rng, rows):
        yield advance(plan)
    yield advance([{"prompt": 5, "n": 2}, {"prompt": 1, "n": 1}, {"prompt": 3, "n": 3}])


def advance(plan):
    """There is a token for each request with nothing left to compute."""
    due = sum(row["n"] == todo(row) for row in plan)
    tokens = [7, 9, *range(due)]
    return {"call": "advance", "plan": plan, "tokens": tokens[:due]}


def cases(rng):
    return {"a": [*schedules(rng)], "b": [*admissions(rng)], "c": [*steps(rng)]}
