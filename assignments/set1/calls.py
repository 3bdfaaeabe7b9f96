"""Set 1: runs one function on a case, and returns what it gives and changes."""
from types import SimpleNamespace

import torch
from probes import (
    attended,
    cache_for,
    kind_of,
    layout_of,
    numbers,
    on_second_device,
    requests_of,
)

from cache import KV
from generate_unbatched import Alone
from model import Head


def forward(T, S, hs, lead=(), past=None, mask=None, seed=0, scale=1, dtype="float64"):
    """What each token sees, by scores of 0 and one-hot values; and an output of made-up numbers."""
    head = Head()
    heads = len(lead[:-1])   # where the model has the axis of tokens, before it splits the heads
    q, k, v = (scale * numbers(seed + i, *lead[:-1], n, *lead[-1:], hs).movedim(heads, -2).to(
        getattr(torch, dtype)) for i, n in enumerate((T, S, S)))

    def given(q, k, v):
        made = {"q": q, "k": k[..., past:, :], "v": v[..., past:, :]}
        if past is not None:
            made |= {"past_k": k[..., :past, :], "past_v": v[..., :past, :]}
        return made if mask is None else made | {"mask": torch.tensor(mask)}

    arguments = given(q, k, v)
    # It remembers nothing, neither of this call nor of the next one with other shapes.
    head(**{name: ~each if name == "mask" else each for name, each in arguments.items()})
    found, eye = {}, torch.eye(S).double().expand(*lead, S, S)
    if dtype != "float32":   # which is no matter of 1e-10
        seen = head(**given(0 * eye[..., :T, :], 0 * eye, eye))
        found = {"shape and dtype": kind_of(seen)}
        if torch.is_tensor(seen):
            found |= {f"row {i // T}, new token {i % T} sees the keys": [
                j for j, weight in enumerate(row) if weight]
                for i, row in enumerate(seen.reshape(-1, S).tolist())}
    before = {name: each.clone() for name, each in arguments.items()}
    head(*[torch.ones_like(q)] * 5)
    out = head(**arguments)
    found |= {"shape and dtype of the output": kind_of(out), "arguments that it changes": [
        name for name in before if not torch.equal(arguments[name], before[name])]}
    if torch.is_tensor(out) and dtype != "float32":
        head(**{name: torch.ones_like(each) for name, each in arguments.items()})   # it leaves out
        found["the output"] = out
    return found


def head_on_a_device():
    return on_second_device(lambda device: SimpleNamespace(output=Head()(
        *(numbers(i, 2, 4, 3).to(device) for i in range(3)))), "output")


def cache(capacity, calls, lead=(), dtype="float64"):
    """calls: ["write", layer, start, n] or ["read", layer, end]. What each of them gives."""
    kv, other = KV(capacity), KV(capacity)
    answers = {}
    for i, (name, layer, *sizes) in enumerate(calls):
        call = f"call {i}, {name}({layer!r}, {', '.join(map(str, sizes))})"
        if name == "read":
            answers[call] = read(kv, layer, *sizes)
        else:
            start, n = sizes
            keys = 100 * i + keys_of((*lead, n, 2 + len(lead)), dtype)
            answers[call] = write(kv, other, layer, start, keys)
    return {**answers, "the capacity becomes": kv.capacity}


def keys_of(shape, dtype):
    numel = torch.Size(shape).numel()
    return torch.arange(0.1, numel, dtype=getattr(torch, dtype)).view(shape)


def read(kv, layer, end):
    pair = kv.read(layer, end)
    answer = {"shapes and dtypes": kind_of(pair)}
    if isinstance(pair, tuple) and all(map(torch.is_tensor, pair)):
        answer["keys and values"] = [tensor.tolist() for tensor in pair]
        answer["views"] = [
            tensor.data_ptr() == buffers[layer].data_ptr()
            for tensor, buffers in zip(pair, (kv.k, kv.v))]
    return answer


def write(kv, other, layer, start, keys):
    """Writes to kv; then one token to another cache, which changes nothing in kv."""
    k = keys.clone()
    v = keys + 0.5
    old_buffer = kv.k.get(layer)
    try:
        returned = kv.write(layer, start, k, v)
    except ValueError:
        returned = "ValueError"
    other.write(layer, 0, 0 * k[..., :1, :], 0 * v[..., :1, :])
    k_changed = bool((k != keys).any())
    v_changed = bool((v != keys + 0.5).any())
    answer = {
        "it returns": returned,
        "it changes k or v": k_changed or v_changed,
        "new buffer": old_buffer is not None and old_buffer is not kv.k[layer],
    }
    k.zero_(), v.zero_()   # kv has its own
    return answer


def lay_out(requests, caches):
    request, = requests_of(requests)
    if caches:
        cache_for(request)
    return layout_of(Alone(request), "tokens", "positions", "start", "end", "wanted")


class LaidOut(Alone):
    """As lay_out has to set it."""

    def __init__(self, request, start, end):
        self.kv, self.plan = request.kv, [(request, end - start)]
        self.start, self.end = start, end
        self.tokens = self.positions = torch.zeros(1, end - start, dtype=torch.long)


def attend(requests, caches, heads, size):
    """In a pass. If there is a past, it was attended in a pass before; then another request was."""
    request, other = requests_of(requests * 2)
    if caches:
        cache_for(request)
        cache_for(other)
    if past := request.computed:
        attended(LaidOut(request, 0, past), heads, size)
        attended(LaidOut(other, 0, 1), heads, size)
    found = attended(LaidOut(request, past, past + request.todo), heads, size)
    del found["operations"]   # in a student's copy those of a Head of theirs, a fused one perhaps
    return found


def alone_on_a_device():
    request, = requests_of([{"prompt": 3}])
    return on_second_device(lambda device: Alone(request, device), "tokens", "positions")
