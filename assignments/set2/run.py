"""Set 2: runs one function on a case, and returns what it gives and changes."""
from kit.probes import changes_of, devices_of, facts_of, fill, layout_of, requests_of

import generate_dynamic
from generate_naive import StaticBatch

TENSORS = "tokens", "positions", "mask"


def static_batch(requests, passes, context_length=24):
    """What lay_out sets in each pass. The tokens that are generated are 1, 2, 3, ..."""
    everybody, seen = requests_of(requests, context_length), {}
    batch = StaticBatch(everybody, None)
    for number in range(passes):
        found = layout_of(batch, *TENSORS, "wanted", context_length=context_length)
        seen |= {f"pass {number}, {what}": value for what, value in found.items()}
        for request, n in batch.plan:
            request.computed += n
            request.generated += [len(request.generated) + 1][:n]
            if len(request.generated) == request.max_new_tokens:
                request.finish_reason = "length"
        batch.add_columns()
    return seen


def static_batch_on_a_device():
    requests = requests_of([{"prompt": 3}, {"prompt": 4}])
    return devices_of(lambda device: StaticBatch(requests, None, device), *TENSORS)


def append(prompt, new, context_length, tokens, eos_token=None):
    """With one token after the other, until it is finished."""
    request, = requests_of([{"prompt": prompt, "new": new, "eos_token": eos_token}], context_length)
    before, returned = facts_of([request]), None
    for token in tokens:
        if not request.finished:
            request.computed = len(request.tokens)
            returned = request.append(token) or returned
    return {"it returns": returned, **changes_of([request], before)}


def admit(waiting, running, step, max_batch):
    everybody = requests_of(running + waiting)
    now, later = everybody[:len(running)], everybody[len(running):]
    fill([(request, 0) for request in now])
    before = facts_of(everybody)
    found = generate_dynamic.admit(list(later), list(now), step, max_batch)
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        return found
    return {"waiting": found[0], "running": found[1], **changes_of(everybody, before)}


def leave(running):
    requests = requests_of(running)
    fill([(request, 0) for request in requests])
    before = facts_of(requests)
    others = generate_dynamic.leave(list(requests))
    return others if others is None else {"the others": others, **changes_of(requests, before)}
