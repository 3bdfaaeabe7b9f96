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
    everybody = requests_of(requests, context_length)
    batch = StaticBatch(everybody, None)
    layouts = {}
    for number in range(max(one.max_new_tokens for one in everybody)):
        layout = layout_of(batch, *TENSORS, "wanted", "starts", context_length=context_length)
        for name, value in layout.items():
            layouts[f"pass {number}, {name}"] = value
        for one, n in batch.plan:
            compute(one, n)
        if all(one.finished for one in everybody):
            break
        batch.add_columns()
    return layouts


def compute(one, n):
    """A pass for n of a request's tokens, without a model."""
    one.computed += n
    if n > 0:
        one.generated += [len(one.generated) + 1]
    if one.is_last(len(one.generated)):
        one.finish_reason = "length"


def static_batch_on_a_device():
    requests = requests_of([{"prompt": 3}, {"prompt": 4}])
    return on_second_device(lambda device: StaticBatch(requests, None, device), *TENSORS, "wanted")


def append(prompt, new, context_length, tokens, eos_token=None):
    """With one token after the other, until it is finished."""
    row = {"prompt": prompt, "new": new, "eos_token": eos_token}
    one, = requests_of([row], context_length)
    before = facts_of([one])
    returned = None
    for token in tokens:
        if not one.finished:
            one.computed = len(one.tokens)
            returned = one.append(token) or returned
    return {"it returns": returned, **changes_of([one], before)}


def admit(waiting, running, step, max_batch):
    everybody = requests_of(running + waiting)
    now = everybody[:len(running)]
    later = everybody[len(running):]
    fill([(one, 0) for one in now])
    before = facts_of(everybody)
    returned = generate_dynamic.admit(list(later), list(now), step, max_batch)
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        return returned
    return {"waiting": returned[0], "running": returned[1], **changes_of(everybody, before)}


def still_running(running):
    requests = requests_of(running)
    fill([(one, 0) for one in requests])
    before = facts_of(requests)
    others = generate_dynamic.still_running(list(requests))
    if others is None:
        return None
    return {"the others": others, **changes_of(requests, before)}


def lay_out(names, rows):
    plan = plan_of(rows)
    requests = [one for one, _ in plan]
    before = facts_of(requests)
    return {**layout_of(Rectangle(plan), *names), **changes_of(requests, before)}


def layout_on_a_device(names):
    plan = plan_of([{"prompt": 3}, {"prompt": 4}])
    names = [name for name in names if name != "P"]   # a number
    return on_second_device(lambda device: Rectangle(plan, device), *names)


class LaidOut(Rectangle):
    """As parts d, e and g have to set it."""

    def __init__(self, plan, P, T, mask, device=None):
        self.plan = plan
        self.starts = [request.computed for request, _ in plan]
        self.P = P
        self.tokens = self.positions = torch.zeros(len(plan), T, dtype=torch.long)
        self.mask = torch.tensor(mask, device=device)[:, None, None]


def attend(rows, P, T, mask, heads, size):
    plan = plan_of(rows)
    fill(plan, heads, size)
    least = 4 * len(rows) * heads * size * T * (P + T)   # of the rectangle; less will do
    return attended(LaidOut(plan, P, T, mask), heads, size, least)


def attend_on_a_device():
    """After a pass for what is computed."""
    def attend_twice(device):
        one, = requests_of([{"prompt": 3}])
        cache_for(one)
        for computed, n in (0, 2), (2, 1):
            one.computed = computed
            mask = [[True] * (computed + n)]
            batch = LaidOut([(one, n)], computed, n, mask, device)
            q, k, v = (numbers(i, 1, 2, n, 3).to(device) for i in range(3))
            out = batch.attend(0, q, k, v)
        return SimpleNamespace(output=out)

    return on_second_device(attend_twice, "output")


def indices_due(plan):
    pairs = plan_of(plan)
    requests = [one for one, _ in pairs]
    before = facts_of(requests)
    returned = request.indices_due(pairs)
    return {"it returns": returned, **changes_of(requests, before)}
