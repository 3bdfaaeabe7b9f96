"""Set 2: runs one function on a case, and returns what it gives and changes."""
from types import SimpleNamespace

import torch
from probes import (
    attended,
    cache_for,
    changes_of,
    facts_of,
    fill,
    layout_of,
    numbers,
    on_second_device,
    plan_of,
    requests_of,
)

import generate_dynamic
import request
from generate_dynamic import Rectangle
from generate_naive import StaticBatch

TENSORS = "tokens", "positions", "mask"


def static_batch(requests, context_length=24):
    """What lay_out sets in each pass until all have finished. The generated tokens are 1, 2, ..."""
    everybody, seen = requests_of(requests, context_length), {}
    batch = StaticBatch(everybody, None)
    for number in range(max(each.max_new_tokens for each in everybody)):
        found = layout_of(batch, *TENSORS, "wanted", "starts", context_length=context_length)
        seen |= {f"pass {number}, {what}": value for what, value in found.items()}
        for each, n in batch.plan:
            each.computed += n
            each.generated += [len(each.generated) + 1][:n]
            if each.is_last(len(each.generated)):
                each.finish_reason = "length"
        if all(each.finished for each in everybody):
            break
        batch.add_columns()
    return seen


def static_batch_on_a_device():
    requests = requests_of([{"prompt": 3}, {"prompt": 4}])
    return on_second_device(lambda device: StaticBatch(requests, None, device), *TENSORS, "wanted")


def append(prompt, new, context_length, tokens, eos_token=None):
    """With one token after the other, until it is finished."""
    one, = requests_of([{"prompt": prompt, "new": new, "eos_token": eos_token}], context_length)
    before, returned = facts_of([one]), None
    for token in tokens:
        if not one.finished:
            one.computed = len(one.tokens)
            returned = one.append(token) or returned
    return {"it returns": returned, **changes_of([one], before)}


def admit(waiting, running, step, max_batch):
    everybody = requests_of(running + waiting)
    now, later = everybody[:len(running)], everybody[len(running):]
    fill([(each, 0) for each in now])
    before = facts_of(everybody)
    found = generate_dynamic.admit(list(later), list(now), step, max_batch)
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        return found
    return {"waiting": found[0], "running": found[1], **changes_of(everybody, before)}


def still_running(running):
    requests = requests_of(running)
    fill([(each, 0) for each in requests])
    before = facts_of(requests)
    others = generate_dynamic.still_running(list(requests))
    return others if others is None else {"the others": others, **changes_of(requests, before)}


def lay_out(names, rows):
    plan = plan_of(rows)
    requests = [each for each, _ in plan]
    before = facts_of(requests)
    return {**layout_of(Rectangle(plan), *names), **changes_of(requests, before)}


def layout_on_a_device(names):
    plan = plan_of([{"prompt": 3}, {"prompt": 4}])
    names = [name for name in names if name != "P"]   # a number
    return on_second_device(lambda device: Rectangle(plan, device), *names)


class LaidOut(Rectangle):
    """As parts d, e and g have to set it."""

    def __init__(self, plan, P, T, mask, device=None):
        self.plan, self.starts, self.P = plan, [request.computed for request, _ in plan], P
        self.tokens = self.positions = torch.zeros(len(plan), T, dtype=torch.long)
        self.mask = torch.tensor(mask, device=device)[:, None, None]


def attend(rows, P, T, mask, heads, size):
    plan = plan_of(rows)
    fill(plan, heads, size)
    least = 4 * len(rows) * heads * size * T * (P + T)   # of the rectangle; less will do
    return attended(LaidOut(plan, P, T, mask), heads, size, least)


def attend_on_a_device():
    """After a pass for what is computed."""
    def made(device):
        request, = requests_of([{"prompt": 3}])
        cache_for(request)
        for request.computed in 0, 2:
            n = 2 - request.computed // 2
            batch = LaidOut([(request, n)], request.computed, n, [[True] * (n + request.computed)],
                            device)
            out = batch.attend(0, *(numbers(i, 1, 2, n, 3).to(device) for i in range(3)))
        return SimpleNamespace(output=out)

    return on_second_device(made, "output")


def indices_due(plan):
    pairs = plan_of(plan)
    requests = [each for each, _ in pairs]
    before = facts_of(requests)
    return {"it returns": request.indices_due(pairs), **changes_of(requests, before)}
