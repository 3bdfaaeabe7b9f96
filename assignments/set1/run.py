"""Set 1: runs one function on a case, and returns what it gives and changes."""
from types import SimpleNamespace

import torch
from kit.probes import (
    attended,
    devices_of,
    fill,
    kind_of,
    layout_of,
    numbers,
    plan_of,
    requests_of,
)

from cache import KV
from generate_unbatched import Alone
from model import Head


def forward(show, T, S, hs, lead=(), past=0, mask=None, seed=0, scale=1, dtype="float64"):
    """show: "sees", by scores of 0 and one-hot values; or "output", of made-up numbers."""
    q, k, v = (scale * numbers(seed + i, *lead, n, hs).to(getattr(torch, dtype))
               for i, n in enumerate((T, S, S)))
    if show == "sees":
        q, k, v = 0 * q, 0 * k, torch.eye(S).double().expand(*lead, S, S)
    given = {"q": q, "k": k[..., past:, :], "v": v[..., past:, :]}
    if past:
        given |= {"past_k": k[..., :past, :], "past_v": v[..., :past, :]}
    if mask is not None:
        given["mask"] = torch.tensor(mask)
    before = {name: each.clone() for name, each in given.items()}
    out = Head()(**given)
    found = {"shape and dtype": kind_of(out), "arguments that it changes": [
        name for name in given if not torch.equal(given[name], before[name])]}
    if not torch.is_tensor(out) or dtype == "float32":   # which is no matter of 1e-10
        return found
    Head()(**{name: torch.ones_like(each) for name, each in given.items()})   # it leaves `out`
    if show == "output":
        return {**found, "the output": out}
    return found | {f"row {i // T}, new token {i % T} sees the keys": [
        j for j, weight in enumerate(row) if weight]
        for i, row in enumerate(out.reshape(-1, S).tolist())}


def head_on_a_device():
    return devices_of(lambda device: SimpleNamespace(output=Head()(
        *(numbers(i, 2, 4, 3).to(device) for i in range(3)))), "output")


def cache(capacity, calls, lead=(), dtype="float64"):
    """calls: ["write", layer, start, n] or ["read", layer, end]. What each of them gives."""
    kv, other, said = KV(capacity), KV(capacity), {}
    for i, (name, layer, *sizes) in enumerate(calls):
        call = f"call {i}, {name}({layer!r}, {', '.join(map(str, sizes))})"
        if name == "read":
            found = kv.read(layer, *sizes)
            said[call] = {"shapes and dtypes": kind_of(found)}
            if isinstance(found, tuple) and all(map(torch.is_tensor, found)):
                said[call] |= {"keys and values": found, "views of the buffers": [
                    each.data_ptr() == buffer[layer].data_ptr()
                    for each, buffer in zip(found, (kv.k, kv.v))]}
            continue
        start, n = sizes
        new = (100 * i + torch.arange(2 * n).view(n, 2)).to(getattr(torch, dtype))
        k, v = (each.expand(*lead, n, 2).clone() for each in (new, new + 0.5))
        buffer = kv.k.get(layer)
        try:
            returned = kv.write(layer, start, k, v)
        except ValueError:
            returned = "ValueError"
        other.write(layer, 0, 0 * k[..., :1, :], 0 * v[..., :1, :])   # which changes nothing in kv
        said[call] = {"it returns": returned, "it changes k or v": bool((k != new).any()) or bool(
            (v != new + 0.5).any()), "new buffer": buffer is not None and buffer is not kv.k[layer]}
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
