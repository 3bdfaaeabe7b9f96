"""
What can be seen of requests, pools, layouts and runs, as plain values. The judges of the notebooks
(judge.py, engine.py) and the course kit look at the same. Torch is imported where it is needed: the
scheduler needs none.
"""
import random
from collections import deque

from cache import KV
from request import Request

# --- what goes in ---------------------------------------------------------------------------------

def requests_of(rows, context_length=24):
    """
    Requests A, B, ... in the middle of a run. Each row is a dict: prompt and generated, a number
    of tokens or their ids, and whatever else a Request knows: new (max_new_tokens), computed, ...
    """
    requests = []
    for i, row in enumerate(rows):
        row = {name: value for name, value in row.items() if name not in ("n", "pages")}
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
    return list(tokens) if isinstance(tokens, list) else [
        (7 * i + 3 * j * j + j) % 12 + 1 for j in range(tokens)]


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


def fill(plan, *lead):
    """Gives each request a cache, with made-up keys and values of what it has computed."""
    for i, (request, _) in enumerate(plan):
        request.kv = KV(request.kv_tokens)
        if request.computed:
            request.kv.write("a", 0, *numbers(i, 2, *lead, 2, request.computed, 3))


# --- what becomes of requests and pools -----------------------------------------------------------

def facts_of(requests):
    """What is known of requests, [{name: value}, ...]; of a cache its size, of pages how many."""
    return [{"prompt": [*request.prompt], "generated": [*request.generated],
             "computed": request.computed, "max_new_tokens": request.max_new_tokens,
             "finish_reason": request.finish_reason, "arrival": request.arrival,
             "cache": cache_of(request), "page_hashes": len(request.page_hashes),
             "pages": "none" if request.block_table is None else len(request.block_table)}
            for request in requests]


def changes_of(requests, before):
    """What is no longer as it was when facts_of gave `before`."""
    return {f"{request.name}'s {name} becomes": new[name]
            for request, old, new in zip(requests, before, facts_of(requests))
            for name in old if new[name] != old[name]}


def in_queue(queue, running, waiting, call):
    """
    What a call returns and changes in the middle of a scheduler's run. It gets all requests, which
    are made of such rows and hold their memory.
    """
    requests = requests_of([*running, *waiting])
    queue.running, queue.waiting = requests[:len(running)], deque(requests[len(running):])
    for request, row in zip(queue.running, running):
        if hasattr(queue, "pool"):
            request.block_table = []
            queue.pool.allocate(request.block_table, row["pages"])
        else:
            request.kv = KV(request.kv_tokens)
    before = facts_of(requests)
    found = {"it returns": call(requests), "running": queue.running, "waiting": queue.waiting,
             "waiting is a": type(queue.waiting).__name__, **changes_of(requests, before)}
    if hasattr(queue, "pool"):
        found["preemptions"] = queue.pool.counts["preemptions"]
        found["free pages"] = len(queue.pool.free_queue)
        found["the pool"] = [*page_faults(
            {each: each.block_table for each in requests if each.block_table is not None},
            [*queue.pool.free_queue], queue.pool.number)]
    return found


def cache_of(request):
    return getattr(request.kv, "capacity", "none" if request.kv is None else "no KV")


def page_faults(tables, free, number, ref_count=None):
    """
    What is wrong with a pool of pages before a pass. Sentences. tables: {request: its block table},
    of those that run; free: the free pages, in order. ref_count: None where no page may be shared.
    """
    holders = {page: [r for r, table in tables.items() if page in table] for page in range(number)}
    for page, names in holders.items():
        where = " and ".join(map(str, names))
        if free.count(page) > 1:
            yield f"page {page} is in the free queue {free.count(page)} times"
        if page in free and names:
            yield f"page {page} is free, and in the block table of {where}"
        if page not in free and not names:
            yield f"page {page} is lost: it is neither free nor in a block table"
        if ref_count is None and len(names) > 1:
            yield f"page {page} is in the block tables of {where}"
        if ref_count is not None and ref_count[page] != len(names):
            yield f"ref_count of page {page} is {ref_count[page]}, and {len(names)} tables hold it"


def room_faults(tables, plan, size):
    """Who has another number of pages than its keys need after the pass of this plan. Sentences."""
    given = dict(plan)
    for request, table in tables.items():
        tokens = request.computed + given.get(request, 0)
        if len(table) != (needed := -(-tokens // size)):
            yield (f"{request} has {len(table)} pages; after the pass {tokens} of its tokens have "
                   f"keys, {size} to a page: it needs {needed}")


# --- layouts --------------------------------------------------------------------------------------

def kind_of(value):
    """Shape and dtype of a tensor, in words; or what else it is."""
    if isinstance(value, tuple):
        return f"({', '.join(map(kind_of, value))})"
    if not hasattr(value, "dtype"):
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
        return torch.arange(shape.numel()).view(shape)[index].flatten().tolist()
    except (IndexError, TypeError, RuntimeError):
        return f"{kind_of(index)}, which is no index of tokens of shape {tuple(shape)}"


def seen_of(batch):
    """(slots, S) boolean: the keys that each slot sees by mask and causal rule. None: no mask."""
    import torch
    mask = getattr(batch, "mask", None)
    if not torch.is_tensor(mask) or mask.dtype != torch.bool:
        return None
    *rows, T = batch.tokens.shape
    see = torch.ones(T, mask.size(-1), dtype=torch.bool).tril(mask.size(-1) - T) & mask
    shape = (*rows, *[1] * len(rows), T, mask.size(-1))
    return see.expand(shape).flatten(0, -2) if see.dim() == len(shape) else None


def layout_of(batch, *names, context_length=24):
    """
    What lay_out has set, token by token. names: which of "tokens", "positions", "mask", "wanted"
    and of further attributes. Pads: which tokens a row has there; positions that the model has.
    """
    found = {f"shape and dtype of {name}": kind_of(getattr(batch, name, None))
             for name in names if name in ("tokens", "positions")}
    tokens, positions = batch.tokens.flatten(), batch.positions.flatten()
    if "mask" in names and (see := seen_of(batch)) is None:
        return {**found, "the mask": kind_of(getattr(batch, "mask", None))}
    pads, owner = {*range(len(tokens))}, {}
    for b, (request, n) in enumerate(batch.plan):
        slots = slots_of(batch, b)
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
        found["sampled"] = [*sampled] if isinstance(sampled, list) else sampled
        found["wanted reads"] = reads if isinstance(reads, str) else [
            owner.get(place, "a slot without a token") for place in reads]
    return found | {name: getattr(batch, name, "not set") for name in names if name not in (
        "tokens", "positions", "mask", "wanted")}


def attended(batch):
    """
    What `attend` gives for made-up queries, keys and values of two heads, and what is in the caches
    then. Empty memory is NaN, which nothing may read.
    """
    import torch
    torch.use_deterministic_algorithms(True, warn_only=True)   # fills empty tensors with NaN
    *rows, T = batch.tokens.shape
    given = numbers(9, 3, *rows, 2, T, 3)
    before = given.clone()
    out = batch.attend("a", *given)
    unchanged = torch.equal(given, before)
    found = {"shape and dtype": kind_of(out), "q, k and v are unchanged": unchanged}
    if torch.is_tensor(out) and out.shape == given.shape[1:]:
        flat = out.transpose(-3, -2).reshape(-1, 2, 3)
        found |= {f"the output for {request.name}": flat[slots_of(batch, b)]
                  for b, (request, _) in enumerate(batch.plan)}
    for request, _ in batch.plan:
        buffers = request.kv and (request.kv.k.get("a"), request.kv.v.get("a"))
        found[f"the cache of {request.name}"] = buffers and [
            "nothing is written" if each is None else each.tolist() for each in buffers]
    return found


# --- what it takes --------------------------------------------------------------------------------

def operations(call, *arguments):
    """How many operations of matrix products a call makes, as torch counts them."""
    from torch.utils.flop_counter import FlopCounterMode
    with FlopCounterMode(display=False) as counter:
        call(*arguments)
    return counter.get_total_flops()


def spent(trace):
    """What a run takes, {what: number}."""
    waits = [b - a for request in trace.requests for a, b in zip(
        [request.arrival - 1, *request.token_steps], request.token_steps)]
    return {"forward passes": len(trace.passes), "slots": sum(p.slots for p in trace.passes),
            "scores": sum(p.score_entries for p in trace.passes),
            "preemptions": trace.counts.get("preemptions", 0),
            "steps is the longest wait for a token:": max(waits, default=0)}


def devices_of(make, *names):
    """
    Where the tensors are that a layout makes on the device "meta", which has no data: only their
    creation is tried. An error that names meta tensors is excused, since other devices have data.
    """
    import torch
    try:
        batch = make(torch.device("meta"))
    except (RuntimeError, NotImplementedError, TypeError) as error:
        excused = "meta tensor", "meta device type", "register_meta", "no data"
        if not any(words in str(error) for words in excused):
            raise
        return dict.fromkeys(names, "meta")
    found = {}
    for name in names:
        value = getattr(batch, name, None)
        parts = [each for each in (value if isinstance(value, tuple) else (value,))
                 if torch.is_tensor(each)]
        found[name] = " ".join(sorted({each.device.type for each in parts})) or "no tensor"
    return found
