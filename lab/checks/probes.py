"""
What can be seen of a request and of a layout, as plain values. The judge of the notebooks (judge.py)
and the course kit look at the same. Torch is imported where it is needed: the scheduler needs none.
"""
import random

from cache import KV
from request import Request


def requests_of(rows, context_length=24):
    """
    Requests A, B, ... in the middle of a run. Each row is a dict: prompt and generated, a number
    of tokens or their ids, and whatever else Request knows: new (max_new_tokens), computed, ...
    """
    requests = []
    for i, row in enumerate(rows):
        row = dict(row)
        prompt, generated = (tokens_of(row.pop(name, 0), i + 3 * (name == "generated"))
                             for name in ("prompt", "generated"))
        eos_token, new = row.pop("eos_token", None), row.pop("new", len(generated) + 8)
        request = Request(prompt, new, eos_token=eos_token, name=chr(65 + i) if i < 26 else f"r{i}")
        request.generated, request.context_length = generated, context_length
        row.pop("n", None)
        vars(request).update(row)
        requests.append(request)
    return requests


def tokens_of(tokens, i):
    """So many token ids from 1 to 12, or those that are given."""
    return tokens if isinstance(tokens, list) else [(7 * i + 3 * j * j + j) % 12 + 1
                                                    for j in range(tokens)]


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


def fill(request, seed, layer="a", lead=(2,), size=3):
    """Gives a request a cache with made-up keys and values of what it has computed."""
    request.kv = KV(request.kv_tokens)
    if request.computed:
        request.kv.write(layer, 0, *numbers(seed, 2, *lead, request.computed, size))


def kept(request, layer="a"):
    """The keys and values that a request's cache holds, as lists; all of the buffers."""
    buffers = request.kv.k.get(layer), request.kv.v.get(layer)
    return ["nothing is written" if each is None else each.tolist() for each in buffers]


def slots_of(batch, index):
    """The places in the flattened batch.tokens that an index like batch.wanted points to."""
    import torch
    shape = batch.tokens.shape
    try:
        return torch.arange(shape.numel()).view(shape)[index].flatten().tolist()
    except (IndexError, TypeError, RuntimeError):
        return f"{kind_of(index)}, which is no index of tokens of shape {tuple(shape)}"


def kind_of(value):
    """Shape and dtype of a tensor, in words; or what else it is."""
    if isinstance(value, tuple):
        return f"({', '.join(map(kind_of, value))})"
    if not hasattr(value, "dtype"):
        return f"a {type(value).__name__}"
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"


def devices_of(make, names):
    """
    Where the tensors are that a layout makes on the device "meta", which has no data: only their
    creation is tried. An error that names meta tensors is excused, since other devices have data.
    """
    import torch
    try:
        batch = make(torch.device("meta"))
    except (RuntimeError, NotImplementedError, TypeError) as error:
        if not any(words in str(error) for words in (
                "meta tensor", "meta device type", "register_meta", "no data")):
            raise
        return dict.fromkeys(names, "meta")
    found = {}
    for name in names:
        value = getattr(batch, name, None)
        parts = [each for each in (value if isinstance(value, tuple) else (value,))
                 if torch.is_tensor(each)]
        found[name] = " ".join(sorted({each.device.type for each in parts})) or "no tensor"
    return found
