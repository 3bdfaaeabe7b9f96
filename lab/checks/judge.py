"""
The judge of the notebooks: what is wrong with a run, in sentences.

    for cause, sentence in faults(generate, model, requests, token_budget=8): ...

The X-ray says what tokens see, the check compares tokens and logits with the request alone. What
stands here is the rest: which tokens are in a pass, and which requests it gives a token.
"""
from collections import Counter

import torch

from lab.checks.check import Check
from lab.checks.probes import places_of
from lab.checks.xray import XRay
from toolbox.trace import observed

# In this order: a wrong token makes everything after it wrong, too.
CAUSES = ("tokens", "positions", "sees", "sampled", "contract")


def faults(generate, model, requests, **knobs):
    """
    Runs a stage on these very requests. Yields (one of CAUSES, a sentence) for all that is wrong.
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
        for cause, name, dtype in (("tokens", "tokens", torch.long),
                                   ("positions", "positions", torch.long),
                                   ("sees", "mask", torch.bool)):
            tensor = seen[name]
            if isinstance(tensor, torch.Tensor) and tensor.dtype != dtype:
                yield cause, f"pass {number}: {name} has dtype {tensor.dtype}, expected {dtype}"
        shape, tokens = (tuple(seen[name].shape) for name in ("positions", "tokens"))
        if shape != tokens:
            yield "positions", f"pass {number}: positions has shape {shape}, tokens {tokens}"


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
