"""Set 1: runs one function on a case, and returns what it gives and changes."""
from types import SimpleNamespace

import torch

from cache import KV
from generate_unbatched import Alone
from lab.checks.probes import (
    attended,
    devices_of,
    fill,
    kind_of,
    layout_of,
    numbers,
    plan_of,
    requests_of,
)
from model import Head


def forward(show, T, S, hs, lead=(), past=0, mask=None, seed=0, scale=1, dtype="float64"):
    """show: "sees", by scores of 0 and one-hot values; or "output", of made-up numbers."""
    mask = mask if mask is None else torch.tensor(mask, dtype=torch.bool)
    q, k, v = (scale * numbers(seed + i, *lead, n, hs).to(getattr(torch, dtype))
               for i, n in enumerate((T, S, S)))
    if show == "sees":
        q, k, v = 0 * q, 0 * k, torch.eye(S).double().expand(*lead, S, S)
    arguments = [q, k[..., past:, :], v[..., past:, :], *(
        (k[..., :past, :], v[..., :past, :]) if past else (None, None)), mask]
    before = [each if each is None else each.clone() for each in arguments]
    out = Head()(*arguments)
    found = {"shape and dtype": kind_of(out)}
    if torch.is_tensor(out) and dtype == "float64":
        Head()(*[each if each is None else torch.ones_like(each) for each in arguments])
        rows = out.reshape(-1, S).tolist() if show == "sees" else ()
        found |= {f"row {i // T}, new token {i % T} sees the keys": [
            j for j, weight in enumerate(row) if weight] for i, row in enumerate(rows)}
        found |= {} if show == "sees" else {"the output": out}
    return {**found, "arguments that it changes": [
        name for name, a, b in zip(("q", "k", "v", "past_k", "past_v", "mask"), before, arguments)
        if a is not None and not torch.equal(a, b)]}


def head_on_a_device():
    return devices_of(lambda device: SimpleNamespace(output=Head()(
        *(numbers(i, 2, 4, 3).to(device) for i in range(3)))), "output")


def cache(capacity, calls, lead=(), dtype="float64"):
    """calls: ["write", layer, start, n] or ["read", layer, end]. What each of them gives."""
    kv, other, said, made = KV(capacity), KV(capacity), {}, {}
    for i, (name, layer, *sizes) in enumerate(calls):
        call = f"call {i}, {name}({layer!r}, {', '.join(map(str, sizes))})"
        if name == "write":
            n = sizes[1]
            new = 100 * i + torch.arange(2 * n).view(n, 2).expand(*lead, n, 2)
            new = new.to(getattr(torch, dtype))
            k, v = new.clone(), new + 0.5
            try:
                said[call] = kv.write(layer, sizes[0], k, v) or "stored"
            except ValueError:
                said[call] = "raises ValueError"
            if not torch.equal(k, new) or not torch.equal(v, new + 0.5):
                said[call] = "k or v is changed"
            if layer in kv.k and kv.k[layer] is not made.setdefault(layer, kv.k[layer]):
                said[call] = "stored in another buffer than before"
            other.write(layer, 0, new[..., :1, :] * 0 + 9, new[..., :1, :] * 0 + 9)
            continue
        found = kv.read(layer, *sizes)
        said[call] = kind_of(found)
        if isinstance(found, (tuple, list)) and [*map(torch.is_tensor, found)] == [True, True]:
            said[call] = {
                "shapes and dtypes": [*map(kind_of, found)],
                "keys": found[0].tolist(), "values": found[1].tolist(),
                "views of the buffers": [each.data_ptr() == buffer[layer].data_ptr()
                                         for each, buffer in zip(found, (kv.k, kv.v))]}
    return said


def alone(requests, caches, show):
    """One request: what lay_out sets, or what attend gives."""
    plan = plan_of(requests)
    if caches:
        fill(plan, 1)
    batch = Alone(plan[0][0])
    return attended(batch) if show == "attend" else layout_of(
        batch, "tokens", "positions", "start", "end", "wanted")


def alone_on_a_device():
    request, = requests_of([{"prompt": 3}])
    return devices_of(lambda device: Alone(request, device), "tokens", "positions")
