"""Set 1: runs one function on a case, and returns what it gives and changes."""
from types import SimpleNamespace

import torch

from cache import KV
from generate_unbatched import Alone
from lab.checks.probes import devices_of, fill, kept, kind_of, numbers, requests_of, slots_of
from model import Head


def forward(T, S, hs, lead=(), past=0, mask=None, seed=0, scale=1, dtype="float64", show="output"):
    """show: "sees", by scores of 0 and values that are one-hot; or "output", of random numbers."""
    mask = mask if mask is None else torch.tensor(mask, dtype=torch.bool)
    if show == "sees":
        q, k = torch.zeros(*lead, T, hs).double(), torch.zeros(*lead, S, hs).double()
        v = torch.eye(S).double().expand(*lead, S, S)
    else:
        q, k, v = (scale * numbers(seed + i, *lead, n, hs).to(getattr(torch, dtype))
                   for i, n in enumerate((T, S, S)))
    arguments = [q, k[..., past:, :], v[..., past:, :], *(
        (k[..., :past, :], v[..., :past, :]) if past else (None, None)), mask]
    before = [each if each is None else each.clone() for each in arguments]
    out = Head()(*arguments)
    seen = {"the shape and dtype": kind_of(out)}
    if torch.is_tensor(out):
        Head()(*[each if each is None else torch.ones_like(each) for each in arguments])
        rows = [[i for i, weight in enumerate(row) if weight] for row in out.reshape(-1, S).tolist()
                ] if show == "sees" else ()
        seen |= {f"row {i // T}, new token {i % T} sees the keys": row for i, row in enumerate(rows)}
        if show == "output" and dtype == "float64":
            seen["the output"] = out
    return {**seen, "arguments that it changes": [
        name for name, a, b in zip(("q", "k", "v", "past_k", "past_v", "mask"), before, arguments)
        if a is not None and not torch.equal(a, b)]}


def head_on_a_device():
    def make(device):
        return SimpleNamespace(output=Head()(*(numbers(i, 2, 4, 3).to(device) for i in range(3))))
    return devices_of(make, ["output"])


def cache(capacity, calls, lead=(), dtype="float64"):
    """calls: ["write", layer, start, n] or ["read", layer, end]. What each of them gives."""
    kv, other, said, made = KV(capacity), KV(capacity), [], {}
    for i, (name, layer, *sizes) in enumerate(calls):
        if name == "write":
            start, n = sizes
            new = (100 * i + torch.arange(n * 2).view(n, 2).expand(*lead, n, 2)).to(getattr(torch, dtype))
            k, v = new.clone(), -new
            try:
                returned = kv.write(layer, start, k, v)
                said.append("stored" if returned is None else {"it returns": returned})
            except ValueError:
                said.append("raises ValueError")
            if not torch.equal(k, new) or not torch.equal(v, -new):
                said[-1] = "k or v is changed"
            if layer in kv.k and made.setdefault(layer, kv.k[layer].data_ptr()) != kv.k[layer].data_ptr():
                said[-1] = "stored in another buffer than before"
            other.write(layer, 0, new[..., :1, :] * 0 + 9, new[..., :1, :] * 0 + 9)
            continue
        found = kv.read(layer, *sizes)
        if not isinstance(found, (tuple, list)) or len(found) != 2:
            said.append(kind_of(found))
            continue
        views = [torch.is_tensor(each) and each.data_ptr() == buffer[layer].data_ptr()
                 for each, buffer in zip(found, (kv.k, kv.v))]
        said.append({"shapes and dtypes": [*map(kind_of, found)], "keys": found[0],
                     "values": found[1], "views of the buffers": views})
    return said


def alone(requests, caches, show="layout"):
    """lay_out, and attend with random q, k, v, for one request."""
    request, = requests_of(requests)
    if caches:
        fill(request, 5, lead=(1, 2))
    batch = Alone(request)
    if show == "attend":
        q, k, v = numbers(7, 3, 1, 2, request.todo, 3)
        out = batch.attend("a", q, k, v)
        return {"the output": out, "the cache": kept(request) if caches else "none"}
    found = {name: getattr(batch, name, "is not set") for name in (
        "start", "end", "tokens", "positions", "sampled")}
    return {**found, "shapes and dtypes": [kind_of(found[name]) for name in ("tokens", "positions")],
            "slots that wanted reads": slots_of(batch, batch.wanted)}


def layout_on_a_device():
    return devices_of(lambda device: Alone(requests_of([{"prompt": 3}])[0], device),
                      ["tokens", "positions"])
