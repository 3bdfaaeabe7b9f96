"""Set 1: head and cache."""
import copy
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from answers import answers
from kit import Checks, drawn, given, left_in_caches, tensor

from cache import KV
from generate_unbatched import Alone
from model import Head

FILES = "model.py request.py cache.py generate_unbatched.py"
points = pytest.mark.points


class Stage(Checks):
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
            return Head()(q, *new, *past, mask)

        # Scores of 0 and one-hot values: the output shows which keys are seen.
        zeros, eye = torch.zeros(*lead, S, S).double(), torch.eye(S).double().expand(*lead, S, S)
        seen = call(zeros[..., :T, :], zeros, eye).reshape(-1, T, S)
        yield where, {f"row {row}, new token {t} sees the keys": seen[row, t].nonzero().tolist()
                      for row in range(len(seen)) for t in range(T)}
        out = call(*arguments)
        call(*map(torch.ones_like, arguments))   # it must not write into what came before
        yield where, {
            "the output": tensor(out, dtype == torch.float64), "arguments that it has changed": [
                name for name, a, b in zip((*"qkv", "mask"), before, (*arguments, mask))
                if a is not None and not torch.equal(a, b)]}


@points(4, "model.py:Head.forward", title="attention")
class Test1a(Stage):
    on_device = (lambda _, device: SimpleNamespace(the_output=Head()(
        *torch.randn(3, 2, 4, 3, device=device)))), "the_output"

    def test_attention(self, part):
        masks = None, "keys", "rows", "all", "nothing"
        part.compare(attention, part.rng, [(*sizes, split, mask) for sizes, split, mask in product(
            ((1, 0), (4, 0), (1, 5), (3, 4)), (True, False), masks)])
        most = 40 if part.hidden else 12
        part.compare(attention, part.rng, [
            (part.rng.randint(7, most), part.rng.choice([0, 1, most]), part.rng.random() < 0.5,
             part.rng.choice(masks)) for _ in range(10)])


def cached(rng, capacity, writes):
    """Writes into two caches and two layers at once, and reads; some writes do not fit."""
    torch.manual_seed(rng.randrange(99))
    misfits = (capacity - 2, 3), (capacity, 1), (0, capacity + 1)
    for lead, dtype in ((2,), torch.float64), ((), torch.float32), ((2, 3), torch.float64):
        caches, end = (KV(capacity), KV(capacity)), 0
        for start, n in *writes, (1, 2), *misfits:
            end = min(max(end, start + n), capacity)
            where = f"write(layer, {start}, ...) of {n} tokens into KV({capacity})"
            for kv, layer in product(caches, ("a", 0)):
                new = torch.randn(2, *lead, n, 3).to(dtype)
                before, buffers = new.clone(), (kv.k.get(layer), kv.v.get(layer))
                try:
                    kv.write(layer, start, *new)
                    said = "is accepted"
                except NotImplementedError:
                    raise
                except Exception as error:   # perhaps PyTorch's, of tensors that do not fit
                    said = f"raises {type(error).__name__}"
                yield where, {"it": said, "its arguments are unchanged": torch.equal(before, new),
                              "in place": [a is None or a is b for a, b in zip(
                                  buffers, (kv.k.get(layer), kv.v.get(layer)))]}
            for (i, kv), layer in product(enumerate(caches), ("a", 0)):
                found = kv.read(layer, end)
                yield f"{where}, then read({layer!r}, {end}) of cache {i}", {
                    **dict(zip(("keys", "values"), map(tensor, found))), "views": [
                        torch.is_tensor(a) and a.data_ptr() == b.data_ptr()
                        for a, b in zip(found, kv.buffers(layer, *found))]}


@points(3, "cache.py:KV.write", "cache.py:KV.read", title="the KV cache")
class Test1b(Stage):
    def test_writes_and_reads(self, part):
        part.compare(cached, part.rng, 7, ((0, 2), (2, 1), (3, 3), (6, 1)))
        part.compare(cached, part.rng, 60, ((0, 30), (30, 17), (47, 1), (48, 12)))


def alone(rng, lengths):
    """What a run does not show: tokens and positions of each pass, what is left in the cache."""
    for n in lengths:
        yield from left_in_caches(lambda plan: Alone(plan[0][0]), rng, 2, [n])


@points(2, "generate_unbatched.py:Alone.lay_out", "generate_unbatched.py:Alone.attend",
        title="one request alone")
class Test1c(Stage):
    on_device = (lambda requests, device: Alone(requests[0], device)), *(
        "tokens", "positions", "wanted")

    def test_layout(self, part):
        part.compare(alone, part.rng, (2, 11, 4, 5, 8, 1))


test_1_numbers, test_1_break = answers(1, 2)
