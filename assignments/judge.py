"""
The judge of the notebooks: what is wrong with a run, in sentences.

    for cause, sentence in faults(generate, model, requests, token_budget=8): ...

The X-ray says what tokens see, the check compares tokens and logits with the request alone. What
stands here is the rest: which tokens are in a pass, and which requests it gives a token. And what
right tokens do not show: whether a scheduler keeps its rules (`plan_faults`), and what a run wastes
(`waste`).
"""
from collections import Counter

import torch

from assignments.probes import kind_of, places_of, spent
from lab.checks.check import Check
from lab.checks.xray import XRay
from toolbox.trace import observed


def faults(generate, model, requests, **knobs):
    """
    Runs a stage on these very requests. Yields (cause, sentence) for all that is wrong. Causes come
    in this order, for a wrong token makes everything after it wrong, too: "tokens", "positions",
    "sees", "sampled", "contract".

    If the run raises an error, so does this, after what was seen before it. The error then has an
    attribute `moment`, " in pass 3".
    """
    requests, records, error = list(requests), [], None
    xray, check = XRay(model, requests), Check(model, requests)
    try:   # the record before the X-ray, which runs the layout: if that fails, the record is there
        with observed(model, lambda step, batch: records.append(record(batch))), xray:
            generate(model, requests, on_token=check.on_token, **knobs)
    except Exception as raised:
        error, raised.moment = raised, f" in pass {len(records) - 1}" if records else ""
    yield from wrong_types(records)
    yield from (("tokens", each) for each in wrong_tokens(records, xray))
    seen = sorted(xray.faults(), key=lambda each: "as if at position" not in each)
    yield from (("positions" if "as if at position" in each else "sees", each) for each in seen)
    yield from (("sampled", each) for each in wrong_samples(records, xray))
    if error:
        raise error
    yield from (("contract", f"request '{v.name}': {v.detail}") for v in check()
                if v.verdict == "WRONG")


def record(batch):
    """What goes into a forward pass."""
    tokens, positions, wanted = batch.tokens, batch.positions, places_of(batch, batch.wanted)
    if isinstance(wanted, str):
        raise IndexError(f"wanted is {wanted}")
    plan = [(request, start, n, request.todo)
            for (request, n), start in zip(batch.plan, batch.starts)]
    return {"tokens": tokens, "positions": positions, "mask": getattr(batch, "mask", None),
            "plan": plan, "ids": tokens.flatten().tolist(), "sampled": list(batch.sampled),
            "wanted": wanted}


def wrong_types(records):
    for number, seen in enumerate(records):
        right = f"{tuple(seen['tokens'].shape)} int64"
        for name in "tokens", "positions":
            if (kind := kind_of(seen[name])) != right:
                yield name, f"pass {number}: {name} is {kind}, expected {right}"
        kind = kind_of(seen["mask"])
        if isinstance(seen["mask"], torch.Tensor) and not kind.endswith(" bool"):
            yield "sees", f"pass {number}: mask is {kind}, expected bool"


def wrong_tokens(records, xray):
    for number, (seen, sight) in enumerate(zip(records, xray.passes)):
        expected = Counter((request, position) for request, start, n, _ in seen["plan"]
                           for position in range(start, start + n))
        owners = [xray.token_of[id] for id in sight.ids.flatten().tolist()]
        found = Counter(owner for owner in owners if owner)
        for request, position in expected - found:
            yield f"pass {number}: no slot holds position {position} of {request}"
        for request, position in found - expected:
            yield f"pass {number}: a slot too many holds position {position} of {request}"
        for slot, (owner, token) in enumerate(zip(owners, seen["ids"])):
            if owner and token != owner[0].tokens[owner[1]]:
                yield (f"pass {number}, {xray.place(sight, slot)} holds token {token}; position "
                       f"{owner[1]} of {owner[0]} is token {owner[0].tokens[owner[1]]}")


def wrong_samples(records, xray):
    for number, (seen, sight) in enumerate(zip(records, xray.passes)):
        due = {request: start + n - 1 for request, start, n, todo in seen["plan"] if n == todo > 0}
        works = {request for request, _, n, _ in seen["plan"] if n}
        for request in seen["sampled"]:
            if request not in due:
                does = "its prompt is not complete" if request in works else "it computes nothing"
                yield f"pass {number} gives {request} a token, but {does}"
        for request in due:
            if request not in seen["sampled"]:
                yield f"pass {number} gives {request} no token, although its prompt is complete"
        if set(seen["sampled"]) == set(due) and seen["sampled"] != list(due):
            order, right = (", ".join(r.name for r in each) for each in (seen["sampled"], due))
            yield f"pass {number}: sampled is {order}, expected {right}, the order of the plan"
        if len(seen["wanted"]) != len(seen["sampled"]):
            yield (f"pass {number} reads {len(seen['wanted'])} rows of logits for "
                   f"{len(seen['sampled'])} requests")
        ids = sight.ids.flatten().tolist()
        for request, slot in zip(seen["sampled"], seen["wanted"]):
            if request in due and xray.token_of[ids[slot]] != (request, due[request]):
                yield (f"pass {number} reads the logits of {xray.place(sight, slot)} for "
                       f"{request}; its last token is elsewhere")


def plan_faults(plan, running, waiting, new, max_batch, token_budget):
    """
    What is wrong with one step of a scheduler: at most `token_budget` tokens; each request gets all
    that it has to do, or what is left, in order. Sentences. plan: [(request, n), ...]; running: the
    requests that have been admitted; waiting: those that might have been; new: who was, just now
    """
    entries, left = Counter(request for request, _ in plan), token_budget
    if len(running) > max_batch:
        yield f"{len(running)} requests run, at most {max_batch} may"
    for request, times in entries.items():
        if request not in running or times > 1:
            yield f"{request} is in the plan {times} times, and runs {running.count(request)} times"
    todo = 0   # of those before it
    for request in running:
        if request in new and todo >= token_budget:
            yield f"{request} is admitted, although nothing is left of the budget"
        todo += request.todo
    for request, n in plan:
        if not 1 <= n <= request.todo:
            yield f"{request} is to compute {n} tokens, and has {request.todo} to do"
    if (total := sum(n for _, n in plan)) > token_budget:
        yield f"the plan has {total} tokens, the budget is {token_budget}"
    given = dict(plan)
    for request in running:
        n = min(request.todo, left)
        left -= n
        if given.get(request, 0) != n:
            kind = "decodes" if request.todo == 1 else f"has {request.todo} tokens to do"
            yield f"{request} {kind} and gets {given.get(request, 0)} tokens of the budget, not {n}"
    if waiting and len(running) < max_batch and left:
        yield (f"{waiting[0]} waits, although {len(running)} of {max_batch} requests run, and "
               f"{left} tokens of the budget are left")


def waste(trace, ours):
    """What a run wastes whose tokens are right, beside ours of the same requests. Sentences."""
    for (what, mine), needed in zip(spent(trace).items(), spent(ours).values()):
        if mine > needed:
            most = [max(len(p.work) for p in each.passes) for each in (trace, ours)]
            alone = ": it serves one request at a time" if most[0] == 1 < most[1] else ""
            yield (f"all tokens are right, but it takes {mine:,} {what}, and {needed:,} would "
                   f"do{alone}")
