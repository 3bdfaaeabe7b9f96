"""
What the calls of the sets look at, as plain values: requests, pools, layouts. Torch is imported
where it is needed: the scheduler needs none.
"""
import random
from collections import deque

from cache import KV
from request import Request

LAYERS = 3, 0   # of attention: numbers that are no places in a list of two

# --- what goes in ---------------------------------------------------------------------------------

def requests_of(rows, context_length=24):
    """
    Requests A, B, ... in the middle of a run. Each row is a dict: prompt and generated, a number
    of tokens or their ids, and whatever else a Request knows: new (max_new_tokens), computed, ...
    """
    requests = []
    for i, row in enumerate(rows):
        row = {name: value for name, value in row.items() if name not in ("n", "pages", "shares")}
        prompt, generated = (tokens_of(row.pop(name, 0), i + 3 * (name == "generated"))
                             for name in ("prompt", "generated"))
        request = Request(prompt, row.pop("new", len(generated) + 8), seed=i,
                          name=chr(65 + i) if i < 26 else f"r{i}")
        request.generated, request.context_length = generated, context_length
        vars(request).update(row)
        requests.append(request)
    return requests


def tokens_of(tokens, i):
    """So many token ids from 1 to 12, or those that are given."""
    if isinstance(tokens, list):
        return list(tokens)
    return [(7 * i + 3 * j * j + j) % 12 + 1 for j in range(tokens)]


def plan_of(rows, context_length=24):
    """[(request, n), ...] of such rows; n is theirs, or all that is to do."""
    requests = requests_of(rows, context_length)
    return [(request, row.get("n", request.todo)) for request, row in zip(requests, rows)]


def numbers(seed, *shape):
    """A float64 tensor of numbers from -1 to 1, the same on every machine."""
    import torch
    rng = random.Random(seed)
    size = torch.Size(shape).numel()
    return torch.tensor([rng.uniform(-1, 1) for _ in range(size)], dtype=torch.float64).view(shape)


def cache_for(request):
    """A cache that is known to be the request's own."""
    request.kv = KV(request.kv_capacity)
    request.kv.its = f"{request.name}'s own"


def fill(plan, heads=2, size=3):
    """Gives each request a cache, with made-up keys and values of what it has computed."""
    for i, (request, _) in enumerate(plan):
        cache_for(request)
        for j, layer in enumerate(LAYERS if request.computed else ()):
            shape = 2, heads, request.computed, size
            request.kv.write(layer, 0, *numbers(2 * i + j, *shape))


# --- what becomes of requests and pools -----------------------------------------------------------

def facts_of(requests):
    """What is known of requests, [{name: value}, ...]; of a cache its size, of pages how many."""
    return [facts_of_one(request, requests) for request in requests]


def facts_of_one(request, requests):
    table = request.block_table
    return {
        "prompt": [*request.prompt],
        "generated": [*request.generated],
        "computed": request.computed,
        "max_new_tokens": request.max_new_tokens,
        "finish_reason": request.finish_reason,
        "arrival": request.arrival,
        "cache": cache_of(request, requests),
        "page_hashes": len(request.page_hashes),
        "pages": len(table) if isinstance(table, list) else str(table),
    }


def changes_of(requests, before):
    """What is no longer as it was when facts_of gave `before`."""
    changes = {}
    for request, old, new in zip(requests, before, facts_of(requests)):
        for name in old:
            if new[name] != old[name]:
                changes[f"{request.name}'s {name} becomes"] = new[name]
    return changes


def in_queue(queue, running, waiting, call):
    """
    What a call returns and changes in the middle of a scheduler's run. It gets all requests, which
    are made of such rows and hold their memory. The first pages of a row may be those of the first
    request: so many as it `shares`.
    """
    requests = requests_of([*running, *waiting])
    queue.running, queue.waiting = requests[:len(running)], deque(requests[len(running):])
    for request, row in zip(queue.running, running):
        if hasattr(queue, "pool"):
            shares = row.get("shares", 0)
            request.block_table = []
            if shares:
                queue.pool.share(request.block_table, requests[0].block_table[:shares])
            queue.pool.allocate(request.block_table, row["pages"] - shares)
        else:
            cache_for(request)
    before, tables = facts_of(requests), [[*(each.block_table or [])] for each in requests]
    found = {"it returns": call(requests), "running": queue.running, "waiting": queue.waiting,
             "types": [type(each).__name__ for each in (queue.running, queue.waiting)],
             **changes_of(requests, before)}
    if hasattr(queue, "pool"):
        found["preemptions"] = queue.pool.counts["preemptions"]
        found["free pages"] = len(queue.pool.free_queue)
        found["pages stay where they are in their tables"] = all(
            not each.block_table or [*each.block_table[:len(table)]] == table
            for each, table in zip(requests, tables))
        found["free_queue is a"] = type(queue.pool.free_queue).__name__
        found["the pool"] = pool_faults(
            queue.pool, [each.block_table for each in requests if each.block_table is not None])
        for each in requests:
            if isinstance(each.block_table, list):
                each.block_table.append("a page")   # shows in a table that serves several requests
    return found


def cache_of(request, requests):
    if request.kv is None:
        return "none"
    shared = ", shared" * ([each.kv for each in requests].count(request.kv) > 1)
    its, capacity = getattr(request.kv, "its", "a new one"), getattr(request.kv, "capacity", "no")
    return f"{its}, of {capacity}{shared}"


def pool_faults(pool, tables):
    """What is wrong with a pool, in sentences. tables: all block tables"""
    free = [*pool.free_queue]
    if hasattr(pool, "ref_count"):
        return [*count_faults(tables, free, pool.ref_count)]
    return [*page_faults(tables, free, pool.number)]


def count_faults(tables, free, ref_count):
    """What is wrong with a pool whose pages may be in several block tables. Sentences."""
    for page, count in enumerate(ref_count):
        holders = sum(page in table for table in tables)
        if count != holders:
            yield f"page {page} is in {holders} block tables, and its ref_count is {count}"
        if free.count(page) != (holders == 0):
            yield f"page {page} is in {holders} block tables, {free.count(page)} times free"


def page_faults(tables, free, number):
    """What is wrong with a pool of pages that nobody shares. Sentences. tables: block tables"""
    for page in range(number):
        holders = sum(page in table for table in tables)
        if free.count(page) > 1:
            yield f"page {page} is in the free queue {free.count(page)} times"
        if free.count(page) + holders > 1:
            yield f"page {page} is {'free, and ' * (page in free)}in {holders} block tables"
        if not free.count(page) + holders:
            yield f"page {page} is lost: it is neither free nor in a block table"


# --- layouts --------------------------------------------------------------------------------------

def kind_of(value):
    """Shape and dtype of a tensor, in words; or what else it is."""
    if isinstance(value, tuple):
        return f"({', '.join(map(kind_of, value))})"
    import torch
    if value is None:
        return "nothing"
    if not torch.is_tensor(value):
        return f"a {type(value).__name__}"
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def slots_of(batch, b):
    """The places in the flattened batch.tokens that hold the tokens of the plan's b-th request."""
    n, T = batch.plan[b][1], batch.tokens.size(-1)
    if hasattr(batch, "cu_seqlens"):
        return [*range(batch.cu_seqlens[b], batch.cu_seqlens[b + 1])]
    row, end = (batch.places[b][0], batch.places[b][2]) if hasattr(batch, "places") else (b, T)
    return [*range(row * T + end - n, row * T + end)]


def places_of(batch, index):
    """The places in the flattened batch.tokens that an index like batch.wanted points to."""
    import torch
    shape = batch.tokens.shape
    try:
        found = torch.arange(shape.numel()).view(*shape, 1).expand(*shape, 2)[index]
    except (IndexError, TypeError, RuntimeError):
        return f"{kind_of(index)}, which is no index of tokens of shape {tuple(shape)}"
    if found.dim() == 2 and found.size(1) == 2:
        return found[:, 0].tolist()
    return f"x{(*shape, 2)}[wanted] is {tuple(found.shape)}, where R tokens are (R, 2)"


def seen_of(batch):
    """(slots, S) boolean: the keys that each slot sees by mask and causal rule. None: no mask."""
    import torch
    mask = getattr(batch, "mask", None)
    if not torch.is_tensor(mask) or mask.dtype != torch.bool:
        return None
    *rows, T = batch.tokens.shape
    see = torch.ones(T, mask.size(-1), dtype=torch.bool).tril(mask.size(-1) - T) & mask
    shape = (*rows, *[1] * len(rows), T, mask.size(-1))
    fits = see.dim() == len(shape) and all(a in (1, b) for a, b in zip(see.shape, shape))
    return see.expand(shape).flatten(0, -2) if fits else None


def plan_in(batch):
    """The plan, and how far its requests have come: a pass that is laid out changes neither."""
    facts = {"the plan": [[request, n] for request, n in batch.plan]}
    for request, _ in batch.plan:
        progress = [len(request.prompt), len(request.generated), request.computed]
        facts[f"{request.name}'s lengths of prompt and answer, and computed"] = progress
    return facts


def layout_of(batch, *names, context_length=24):
    """
    What lay_out has set, token by token. names: which of "tokens", "positions", "mask", "wanted"
    and of further attributes. Pads: which tokens a row has there; positions that the model has.
    """
    found = {f"shape and dtype of {name}": kind_of(getattr(batch, name, None))
             for name in names if name in ("tokens", "positions")} | plan_in(batch)
    if len({*map(kind_of, (batch.tokens, batch.positions))}) > 1:
        return found   # which says it
    tokens, positions = batch.tokens.flatten(), batch.positions.flatten()
    if "mask" in names:
        see = seen_of(batch)
        found["the mask"] = f"boolean, for {see.size(-1)} keys" if see is not None else kind_of(
            getattr(batch, "mask", None))
        if see is None:
            return found
    pads, owner = {*range(len(tokens))}, {}
    for b, (request, n) in enumerate(batch.plan):
        slots = slots_of(batch, b)
        if not pads.issuperset(slots):
            return found   # whose shapes are wrong
        pads -= {*slots}
        owner |= {slot: f"token {t} of {request.name}" for t, slot in enumerate(slots)}
        if n and "tokens" in names:
            found[f"tokens of {request.name}"] = tokens[slots]
        if n and "positions" in names:
            found[f"positions of {request.name}"] = positions[slots]
        first = batch.places[b][1] if hasattr(batch, "places") else 0
        for t, slot in enumerate(slots if "mask" in names else ()):
            found[f"{request.name}'s new token {t} sees the keys"] = [
                int(key) - first for key in see[slot].nonzero().flatten()]
    if "tokens" in names:
        T, padded = batch.tokens.size(-1), {}
        for slot in sorted(pads):
            padded.setdefault(f"the pads of row {slot // T}", set()).add(int(tokens[slot]))
        found |= padded
    if "positions" in names:
        found["all positions are the model's"] = bool(
            positions.min() >= 0 and positions.max() < context_length)
    if "wanted" in names:
        reads = places_of(batch, batch.wanted)
        sampled = getattr(batch, "sampled", "not set")
        found["sampled"] = "a set: in no order" if isinstance(sampled, set) else sampled
        if isinstance(sampled, list):   # names are no requests
            found["sampled"] = [repr(each) if isinstance(each, str) else each for each in sampled]
        found["wanted reads"] = reads if isinstance(reads, str) else [
            owner.get(place, "a slot without a token") for place in reads]
    return found | {name: getattr(batch, name, "not set") for name in names if name not in (
        "tokens", "positions", "mask", "wanted")}


def written(buffer):
    """What is in a cache's buffer, token by token, and how long it is."""
    if buffer is None:
        return {}
    buffer = buffer.reshape(-1, *buffer.shape[-2:])   # a batch axis of 1 is as good as none
    last = buffer.ne(0).any(dim=-1).any(dim=0).nonzero().flatten().tolist()[-1:]
    tokens = by_token(buffer[:, :1 + max(last, default=-1)].transpose(0, 1))
    return {**tokens, "room, in tokens": buffer.size(-2)}


def by_token(values):
    """A tensor (tokens, heads, features) as it is read: {"token 0": {"head 0": features, ...}}"""
    return {f"token {t}": {f"head {h}": features for h, features in enumerate(heads)}
            for t, heads in enumerate(values)}


def attended(batch, heads=2, size=3, least=0):
    """
    What `attend` gives in two layers, for made-up queries, keys and values, what is in the caches
    then, and how many operations it takes, or `least`. Empty memory is NaN, which nothing may read.
    """
    import torch
    torch.use_deterministic_algorithms(True, warn_only=True)   # fills empty tensors with NaN
    *rows, T = batch.tokens.shape
    found = {}
    for i, layer in enumerate(LAYERS):
        given = numbers(9 + i, 3, *rows, T, heads, size).transpose(-3, -2)   # as the model gives it
        before, out = given.clone(), []
        spent = operations(lambda: out.append(batch.attend(layer, *given)))
        found |= {"shape and dtype": kind_of(out[0]), "operations": max(spent, least),
                  "q, k and v are unchanged": torch.equal(given, before)}
        if torch.is_tensor(out[0]) and out[0].shape == given.shape[1:]:
            flat = out[0].transpose(-3, -2).reshape(-1, heads, size)
            for b, (request, _) in enumerate(batch.plan):
                output = by_token(flat[slots_of(batch, b)])
                found[f"layer {layer}, the output for {request.name}"] = output
            found["all of the output is finite"] = bool(out[0].isfinite().all())   # of pads, too
        for request, _ in batch.plan:
            if request.kv is None:
                found[f"{request.name}'s cache"] = "none"
                continue
            for name, buffers in ("keys", request.kv.k), ("values", request.kv.v):
                found[f"layer {layer}, the {name} in {request.name}'s cache"] = written(
                    buffers.get(layer))
    return found | plan_in(batch)


# --- what it takes --------------------------------------------------------------------------------

def operations(call, *arguments):
    """How many operations of matrix products a call makes, as torch counts them."""
    from torch.utils.flop_counter import FlopCounterMode
    with FlopCounterMode(display=False) as counter:
        call(*arguments)
    return counter.get_total_flops()


def on_second_device(make, *names):
    """Where the tensors are that `make(device)` sets, on a device which is not the CPU."""
    from second_device import DEVICE, second_device
    with second_device():
        batch = make(DEVICE)
    return {name: where(name, getattr(batch, name, None)) for name in names}


def where(name, value):
    """Where the tensors in a value are, in words."""
    import torch
    from torch.utils._pytree import tree_leaves
    tensors = [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
    if not tensors:   # lists of numbers are an index anywhere
        return "on `device`" if name == "wanted" else "no tensor"
    on_cpu = {each.device.type == "cpu" for each in tensors}
    if len(on_cpu) == 2:
        return "partly on the CPU"
    return "on the CPU" if True in on_cpu else "on `device`"
