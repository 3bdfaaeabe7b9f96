"""Set 2: runs one function on a case, and returns what it gives and changes."""
import torch

import generate_dynamic
from generate_naive import StaticBatch
from lab.checks.probes import devices_of, fill, kind_of, requests_of, slots_of


def static_batch(requests, passes, context_length=24):
    """Of each pass: what lay_out sets. Every token that is generated is 1, 2, 3, ..."""
    news, requests = [row["new"] for row in requests], requests_of(requests, context_length)
    batch, seen = StaticBatch(requests, None), {}
    for number in range(passes):
        seen[f"pass {number}"] = laid_out(batch, context_length)
        for (request, n), new in zip(batch.plan, news):
            request.computed += n
            if n:
                request.generated.append(len(request.generated) + 1)
            if len(request.generated) == new:
                request.finish_reason = "length"
        batch.add_columns()
    return seen


def laid_out(batch, context_length):
    found = {"tokens": getattr(batch, "tokens", "not set")}
    for name in "tokens", "positions", "mask":
        found[f"shape and dtype of {name}"] = kind_of(getattr(batch, name, None))
    positions = torch.as_tensor(batch.positions)
    if positions.dim() == 2:
        found["all positions are the model's"] = bool(
            positions.min() >= 0 and positions.max() < context_length)
    for b, (request, n) in enumerate(batch.plan):
        if n:   # what stands in the rows of finished requests is not read
            found[f"positions of {request.name}'s tokens"] = batch.positions[b, -n:]
            found[f"columns that {request.name} may see"] = torch.as_tensor(
                batch.mask[b]).flatten().nonzero().flatten()
    return {**found, "sampled": batch.sampled, "slots that wanted reads": slots_of(
        batch, batch.wanted)}


def static_batch_on_a_device():
    requests = requests_of([{"prompt": 3}, {"prompt": 4}])
    return devices_of(lambda device: StaticBatch(requests, None, device),
                      ["tokens", "positions", "mask"])


def append(prompt, new, context_length, tokens, eos_token=None):
    request, = requests_of([{"prompt": prompt, "new": new, "eos_token": eos_token}], context_length)
    prompt, returned = list(request.prompt), None
    for token in tokens:
        if not request.finished:
            request.computed = len(request.prompt) + len(request.generated)
            computed, returned = request.computed, request.append(token) or returned
    return {"generated": request.generated, "finish_reason": request.finish_reason or "none",
            "it returns": returned, "all else is unchanged": (prompt, new, computed) == (
                request.prompt, request.max_new_tokens, request.computed)}


def admit(waiting, running, step, max_batch):
    everybody = requests_of(waiting + running)
    now, later = everybody[len(waiting):], everybody[:len(waiting)]
    for request in now:
        fill(request, 1)
    found = generate_dynamic.admit(list(later), list(now), step, max_batch)
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        return found
    return {"waiting": found[0], "running": found[1],
            "caches": {request.name: cache_of(request) for request in everybody}}


def leave(running):
    requests = requests_of(running)
    for request in requests:
        fill(request, 1)
    others = generate_dynamic.leave(list(requests))
    return others if others is None else {"the others": others, "caches": {
        request.name: cache_of(request) for request in requests}}


def cache_of(request):
    return getattr(request.kv, "capacity", "none" if request.kv is None else "no KV")
