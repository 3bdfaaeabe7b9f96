"""Set 1: head and cache."""
import copy
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from kit import Example, answers, drawn, given, tensor

import cache
import generate_unbatched
import model

FILES = "model.py request.py cache.py generate_unbatched.py"
points = pytest.mark.points


class Stage(Example):
    """Each part runs the stage as a whole, too."""

    def test_the_stage(self, part):
        for use_cache in True, False:
            part.serve("generate_unbatched", given((1, 3), (4, 1), (21, 6), (3, 5)),
                       use_cache=use_cache)
            for most in (3, 6) if part.hidden else (3,):
                part.serve("generate_unbatched", drawn(part.rng, most=most, prompt=18),
                           use_cache=use_cache)


def attention(rng, cases):
    """First which keys are seen, then the numbers. Cases: (T, P, split, mask)."""
    torch.manual_seed(rng.randrange(99))
    for i, (T, P, split, masked) in enumerate(cases):
        S, hs, lead = P + T, (5, 1, 4)[i % 3], ((2, 3), (), (3,), (2, 1, 3), (9, 2))[i % 5]
        dtype = torch.float32 if i % 7 == 4 else torch.float64   # of the first, numbers differ
        shape = {"keys": (S,), "rows": (*lead[:1], *[1] * len(lead), S)[-len(lead) - 2:],
                 "all": (*lead, T, S), "nothing": (T, S)}.get(masked)
        mask = shape and torch.rand(*shape) < (-1 if masked == "nothing" else 0.7)
        split = split and P > 0
        arguments = [10 ** (i % 3) * torch.randn(*lead, n, hs).to(dtype) for n in (T, S, S)]
        before = copy.deepcopy((*arguments, mask))
        where = (f"Head, T = {T}, S = {S}, hs = {hs}" + (f", {P} keys in past_k" if split else "")
                 + (f", a mask {shape}" + " of False" * (masked == "nothing") if masked else ""))

        def call(q, k, v):
            past = (k[..., :P, :], v[..., :P, :]) if split else (None, None)
            new = (k[..., P:, :], v[..., P:, :]) if split else (k, v)
            return model.Head()(q, *new, *past, mask)

        # Scores of 0 and one-hot values: the output is the weights, equal for all keys seen.
        zeros, eye = torch.zeros(*lead, S, S).double(), torch.eye(S).double().expand(*lead, S, S)
        weights = call(zeros[..., :T, :], zeros, eye).reshape(-1, T, S)
        yield where, [sentence(t, row) for rows in weights[:20] for t, row in enumerate(rows)]
        out = call(*arguments)
        call(*map(torch.ones_like, arguments))   # it must not write into what came before
        yield where, {
            "the output": tensor(out, dtype == torch.float64), "arguments that it has changed": [
                name for name, a, b in zip((*"qkv", "mask"), before, (*arguments, mask))
                if a is not None and not torch.equal(a, b)]}


def sentence(t, weights):
    weights = [round(w, 8) for w in weights.tolist()]
    keys = [j for j, w in enumerate(weights) if w]
    seen = {w for w in weights if w}
    if len(seen) > 1 or any(w != w for w in seen):
        return (f"new token {t}, whose scores are equal, has the weights "
                f"{[round(w, 3) for w in weights]}")
    return f"new token {t} sees the keys {keys} with the weight {max(seen, default=0):.3g}"


@points(4, "model.py:Head.forward", title="attention")
class Test1a(Stage):
    def test_attention(self, part):
        masks = None, "keys", "rows", "all", "nothing"
        part.compare(attention, part.rng, [(*sizes, split, mask) for sizes, split, mask in product(
            ((1, 0), (4, 0), (1, 5), (3, 4)), (True, False), masks)])
        most = 40 if part.hidden else 12
        part.compare(attention, part.rng, [
            (part.rng.randint(7, most), part.rng.choice([0, 1, most]), part.rng.random() < 0.5,
             part.rng.choice(masks)) for _ in range(10)])

    def test_device(self, part):
        part.on_device(lambda _, device: SimpleNamespace(the_output=model.Head()(
            *torch.randn(3, 2, 4, 3, device=device))), "the_output")


def cached(rng, capacity, writes):
    """Writes and reads, in two caches at once; then writes that do not fit."""
    torch.manual_seed(rng.randrange(99))
    for lead, dtype in ((2,), torch.float64), ((), torch.float32), ((2, 3), torch.float64):
        caches = {which: cache.KV(capacity) for which in ("first", "second")}

        def write(which, layer, start, n):
            where = f"write({layer!r}, {start}, ...) of {n} tokens into KV({capacity})"
            new, kv = torch.randn(2, *lead, n, 3).to(dtype), caches[which]
            before, buffers = new.clone(), (kv.k.get(layer), kv.v.get(layer))
            try:
                kv.write(layer, start, *new)
                said = "is accepted"
            except NotImplementedError:
                raise
            except Exception as error:   # perhaps PyTorch's, of tensors that do not fit
                said = f"raises {type(error).__name__}"
            return where, {"it": said, "its arguments are unchanged": torch.equal(before, new),
                           "in place": [a is None or a is b for a, b in zip(buffers, (
                               kv.k.get(layer), kv.v.get(layer)))],
                           "stored": [bool(t.any()) for t in kv.k.values()]}

        def read(which, layer, end, when):
            keys, values = caches[which].read(layer, end)
            return f"read({layer!r}, {end}), {when}", {
                "keys": tensor(keys), "values": tensor(values), "views": [
                    torch.is_tensor(a) and a.data_ptr() == b.data_ptr() for a, b in zip(
                        (keys, values), caches[which].buffers(layer, keys, values))]}

        said = "after"
        for start, n in writes:   # exactly full in the end
            for which, layer in product(caches, ("a", 0)):
                yield write(which, layer, start, n)
            said += f" write(layer, {start}, ...) of {n},"
            for which, layer in product(caches, ("a", 0)):
                yield read(which, layer, start + n,
                           f"in the {which} of two KV({capacity}), {said[:-1]}")
        yield write("first", "a", 1, 2)   # a chunk that is written again
        yield read("first", "a", capacity, "after a second write of 2 at 1")
        yield read("first", "a", 4, f"with {capacity} tokens written")
        for start, n, layer in ((capacity - 2, 3, "new"), (capacity - 1, 2, "a"),
                                (capacity, 1, "a"), (0, capacity + 1, "a")):
            yield write("first", layer, start, n)
            yield read("first", "a", capacity, f"after a write of {n} at {start}, which raises "
                       "ValueError and stores nothing")


@points(3, "cache.py:KV.write", "cache.py:KV.read", title="the KV cache")
class Test1b(Stage):
    def test_writes_and_reads(self, part):
        part.compare(cached, part.rng, 7, ((0, 2), (2, 1), (3, 3), (6, 1)))
        part.compare(cached, part.rng, 60, ((0, 30), (30, 17), (47, 1), (48, 12)))


def alone(rng, requests):
    """What a run does not show: tokens and positions of each pass, what is left in the cache."""
    torch.manual_seed(rng.randrange(99))
    for step in range(2):
        for i, request in enumerate(requests):
            where = f"Alone, pass {step}, new tokens {request.name}{request.todo}"
            batch = generate_unbatched.Alone(request, True)
            n, T = request.todo, batch.tokens.shape[-1]
            batch.attend("random", *torch.randn(3, 1, 2, T, 3).double())
            yield where, {"start and end": [batch.start, batch.end],
                          "tokens": batch.tokens.tolist(), "positions": batch.positions.tolist()}
            yield where, {f"the cache of {request.name}": {
                name: tensor(getattr(request.kv, name).get("random")) for name in "kv"}}
            request.computed, request.generated = n, [*range(i % 12 + 1)]


@points(2, "generate_unbatched.py:Alone.lay_out", "generate_unbatched.py:Alone.attend",
        title="one request alone")
class Test1c(Stage):
    def test_layout(self, part):
        part.compare(alone, part.rng, given(*[(n, 13) for n in (2, 11, 4, 5, 8, 1)]))

    def test_device(self, part):
        part.on_device(lambda requests, device: generate_unbatched.Alone(
            requests[0], False, device), "tokens", "positions", "wanted")


test_1_numbers, test_1_break = answers(1, 2)
