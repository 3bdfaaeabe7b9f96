"""Set 5: no rows."""
import copy

import pytest
import torch
from answers import answers
from kit import LATE, MIX, Checks, drawn, given, left_in_caches, tensor

from beyond import prepacked
from beyond.prepacked import Packed
from cache import KV
from generate_ragged import Flat
from model import Head

FILES = ("model.py request.py cache.py scheduler.py generate_dynamic.py generate_ragged.py "
         "beyond/prepacked.py")
TENSORS = "tokens", "positions", "mask", "wanted"
points = pytest.mark.points
# Each tells first-fit decreasing from another rule: without sorting, without an exact fit, best fit
# (1, 3, 3, 5), last fit and next fit (1, 2, 3)
LENGTHS = (([], 5), ([5], 5), ([1, 1, 3, 2, 2], 5), ([2, 3, 6], 8), ([1, 3, 3, 5], 7),
           ([1, 2, 3], 4), ([2, 6, 3, 5, 1, 4], 7), ([4, 4, 4, 4], 8))


def packings(cases):
    for lengths, size in cases:
        argument = list(lengths)
        rows = prepacked.first_fit_decreasing(argument, size)
        yield f"first_fit_decreasing({lengths}, {size})", {
            "its argument afterwards": argument,
            "all indices": sorted(i for row in rows for i in row),
            "lengths in rows": [[lengths[i] for i in row] for row in rows]}


@points(2, "beyond/prepacked.py:first_fit_decreasing", title="bin packing")
class Test5a(Checks):
    def test_packing(self, part):
        part.compare(packings, LENGTHS)
        part.compare(packings, [([part.rng.randint(1, size) for _ in range(n)], size)
                                for n, size in ((5, 9), (9, 20), (40, 50), (80, 60))])


@points(4, "beyond/prepacked.py:Packed.lay_out", title="packed rows")
class Test5b(Checks):
    on_device = (lambda requests, device: Packed([(r, r.todo) for r in requests], device)), *TENSORS

    def test_the_stage(self, part):
        part.serve("beyond.prepacked", given(*MIX), max_batch=6)
        part.serve("beyond.prepacked", given((2, 2), (5, 2), (3, 3), (1, 2)))
        for sizes in part.sizes:
            part.serve("beyond.prepacked", drawn(part.rng, **sizes), max_batch=40)

    def test_rows(self, part):
        part.compare(left_in_caches, Packed, part.rng, 1)


class Stream(Checks):
    def test_the_stage(self, part):
        for attention in "mask", "varlen":
            part.serve("generate_ragged", given(*MIX, (21, 6, 3)),
                       token_budget=5, attention=attention)
            part.serve("generate_ragged", given(*LATE), attention=attention)
            for sizes in part.sizes:
                many = sizes.get("least", 3)
                part.serve("generate_ragged", drawn(part.rng, prompt=21, **sizes),
                           max_batch=many + 1, attention=attention,
                           token_budget=part.rng.choice([4, 6, 9]) if many < 5 else 6 * many)


@points(3, "generate_ragged.py:Flat.lay_out", "generate_ragged.py:Flat.block_diagonal",
        title="the stream and its mask")
class Test5c(Stream):
    on_device = (lambda requests, device: Flat(
        [(r, r.todo) for r in requests], device, "mask")), *TENSORS

    def test_stream(self, part):
        part.compare(left_in_caches, Flat, part.rng, 2)


def attending(rng, sizes):
    """`attend` alone, with random queries, keys and values; the scores that `head` computes."""
    torch.manual_seed(rng.randrange(99))
    calls, forward = [], Head.forward

    def counting(head, q, k, v, *arguments, **named):
        calls.append(q.size(-2) * k.size(-2))
        return forward(head, q, k, v, *arguments, **named)

    for attention in "varlen", "mask":
        requests = given(*sizes, computed=2)
        for request in requests:
            request.kv = KV(request.kv_tokens)
        batch = Flat([(r, r.todo) for r in requests], None, attention)
        twin = copy.deepcopy(batch)   # it alone has the caches: write and read are the way to them
        batch.write, batch.read = twin.write, twin.read
        for request in requests:
            request.kv = None
        q, k, v = torch.randn(3, 2, batch.cu_seqlens[-1], 3).double()
        calls.clear()
        Head.forward = counting
        try:
            out = batch.attend("random", q, k, v)
        finally:
            Head.forward = forward
        yield f"attend, {attention!r}, random q, k, v, cu_seqlens {batch.cu_seqlens}", {
            "the output": tensor(out), "score entries that `head` computes": sum(calls)}


@points(3, "generate_ragged.py:Flat.attend", title="the varlen loop")
class Test5d(Stream):
    def test_attend(self, part):
        part.compare(attending, part.rng, ((4, 1), (3, 1), (6, 1)))
        part.compare(attending, part.rng, [(part.rng.randint(3, 20), 1) for _ in range(
            40 if part.hidden else 12)])


test_5_numbers, test_5_break = answers(5, 3)
