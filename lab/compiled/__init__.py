"""
What `fast = optimize(model)` makes: a snapshot, which computes a whole pass in one compiled call.

It is no lesson about batching: it lets the last stages be compared with other programs. A snapshot
is called like the model. It holds packed copies of the weights, and the model itself, unchanged.
Passes of `Alone`, `Flat` and `Paged` (unbatched, ragged, paged, prefix) and bare calls for one
sequence are compiled; all others are the model's. docs/kernels.md says what is promised.
"""
import copy
import ctypes
import os
import sys
from bisect import bisect_left
from collections import Counter
from functools import cache
from threading import local
from types import MethodType, SimpleNamespace

import torch
from torch import nn

import generate_paged
import generate_ragged
import generate_unbatched
from cache import KV
from lab.checks.check import TOLERANCE
from lab.compiled import native
from lab.loading.llama import Llama
from model import GPT
from request import Request
from toolbox.weights import Uninitialised


def optimize(model):
    """
    A snapshot of the model, or the model itself and one line on stderr that says why not.

    A snapshot computes what the repository's *unedited* model computes: at its making it runs two
    short requests, and is not used if the model gives something else. A compiled pass runs no hooks
    of the model, has no gradients and no autocast, and does not see later changes of the weights:
    after one, call optimize() again. Hooks on the snapshot, which is a Module, run at every pass.
    """
    try:
        with torch.device("cpu"):   # programs may set another default
            refuse_others(model)
            fast = Snapshot(model)
            try_out(fast)
    except ValueError as why:
        print(f"compiled step: no, {why}", file=sys.stderr)
        return model
    native.keep_memory()
    return fast


def refuse_others(model):
    """ValueError, in words, for a model whose weights are not those of a GPT or Llama here."""
    if type(model) not in (GPT, Llama):
        raise ValueError(f"{type(model).__name__} is neither GPT nor Llama")
    for p in model.parameters():
        if p.dtype != torch.float32 or p.device.type != "cpu":
            raise ValueError(f"it is for float32 on a CPU, not {p.dtype} on {p.device.type}")
    with torch.device("meta"), Uninitialised():
        as_made = type(model)(model.config)
    looks = [(str(m), [p.shape for p in m.parameters()]) for m in (model, as_made)]
    if looks[0] != looks[1]:   # a tensor parallel rank's, for instance
        raise ValueError("its modules are not those of its config")


@torch.autocast("cpu", enabled=False)
def try_out(fast):
    """
    ValueError, in words, if the logits of two requests of 4 tokens are not the model's, or not the
    same bits in each stage; or if there are none. A budget of 3 tokens makes chunks.
    """
    found, chunks = {}, dict(token_budget=3)
    for stage, knobs in ((generate_unbatched, {}), (generate_ragged, chunks),
                         (generate_paged, dict(chunks, page_size=2))):
        for model in fast, fast.model:
            rows = found[model] = []
            requests = [Request([(1 + step * i) % fast.config.vocab_size for i in range(4)], 1)
                        for step in (5, 7)]
            stage.generate(model, requests, **knobs,
                           on_token=lambda request, token, row: rows.append(row))
        mine, theirs = (torch.stack(found[model]) for model in (fast, fast.model))    # (2, V)
        close = TOLERANCE[torch.float32] * float(theirs.abs().max())
        if not torch.allclose(mine, theirs, rtol=0, atol=close):
            raise ValueError(f"it computes something else than the model ({stage.__name__}.py)")
        if not torch.equal(mine, found.setdefault("alone", mine)):
            raise ValueError(f"a batch changes a request's bits ({stage.__name__}.py)")
    fast.passes.clear()


@cache
def origin(layout):
    """What tells a class: not `is`, because the file of a script that runs is loaded twice."""
    file = getattr(sys.modules.get(layout.__module__), "__file__", None)
    return layout.__qualname__, file and os.path.realpath(file)


LAYOUTS = [origin(layout) for layout in (
    generate_unbatched.Alone, generate_ragged.Flat, generate_paged.Paged)]


class Snapshot(nn.Module):
    """A model's weights, packed, and the model, which answers all else that is asked of it."""

    def __init__(self, model):
        super().__init__()
        self.model, self.weights = model, native.Weights(model)
        self.passes = Counter()   # why they were the model's; None: compiled
        self.announced = announced = local()   # each thread's next batch

        def see(step, batch):   # not a method, which would keep the snapshot alive
            announced.batch = batch
            for observer in getattr(model, "observers", ()):
                observer(step, batch)

        self.observers = [see]

    def forward(self, tokens, positions=None, attend=None, wanted=None):
        """As GPT.forward or Llama.forward."""
        batch = vars(self.announced).pop("batch", None)   # it is for one pass
        try:
            logits, why = self.compiled(tokens, positions, attend, wanted, batch), None
        except ValueError as error:
            logits, why = None, str(error)
        if attend:   # a bare call does not count
            self.passes[why] += 1
            if why is None:   # it reads keys where they lie
                cost = batch.cost
                batch.cost = lambda: cost() | {"copied_bytes": 0}
        if why is None:
            return logits
        given = {"attend": attend} if attend else {}
        return self.model(tokens, positions, wanted=wanted, **given)

    def compiled(self, tokens, positions, attend, wanted, batch):
        """The pass in one compiled call. ValueError: it cannot be, and why."""
        N, V = tokens.numel(), self.weights.vocabulary
        # 1. The layout. A bare call is like a request without a cache.
        if attend is None:
            if positions is not None or not 0 < N == tokens.size(-1) <= self.config.block_size:
                raise ValueError("it is not one sequence")
            positions = torch.arange(N, device="cpu").view(tokens.shape)
            batch = SimpleNamespace(plan=[(SimpleNamespace(kv=None), N)], starts=[0], kv=None)
        elif batch is not None and origin(type(batch)) not in LAYOUTS:
            raise ValueError(f"it is for Alone, Flat and Paged, not {type(batch).__name__}")
        elif batch is None or attend != MethodType(type(batch).attend, batch):
            raise ValueError("it is for the attend of the batch that a trace has announced")
        elif getattr(batch, "attention", "varlen") != "varlen":
            raise ValueError(f"it is for attention \"varlen\", not \"{batch.attention}\"")
        # 2. Which logits, and where each request's keys are. `wanted`, applied to the tokens'
        # numbers, says which of them are asked for: they must be the last ones of each request.
        places = torch.arange(N, device="cpu").view(tokens.shape)[... if wanted is None else wanted]
        asked = places.flatten().tolist()
        lasts, pieces, alive, first = [], [], [], 0   # first: the request's first token
        for (request, n), start in zip(batch.plan, batch.starts):
            kv = getattr(batch, "kv", request.kv)     # of a pool, or its own
            if kv is None and hasattr(batch, "kv"):   # Alone, without a cache
                kv = KV(n)
            if type(kv) is not KV:
                raise ValueError(f"{request}: its keys are in no KV")
            table, page, slots = [0], kv.capacity, kv.capacity   # in one piece: a single page
            if hasattr(batch, "pool"):
                table, page = request.block_table, batch.pool.page_size
            if start + n > len(table) * page or not 0 <= min(table) <= max(table) < slots // page:
                raise ValueError(f"{request}: its cache has no room for {start + n} tokens")
            count = bisect_left(asked, first + n) - bisect_left(asked, first)
            arrays = native.numbers(table), *self.addresses(kv, tokens.shape[:-1])
            pieces += first, n, start, count, *map(ctypes.addressof, arrays), slots, page
            alive += kv, *arrays   # until the call returns
            first += n
            lasts += range(first - count, first)
        if first != N or tokens.shape != positions.shape or asked != lasts:
            raise ValueError("it is for the tokens of the plan, and the logits of the last of them")
        # 3. The compiled call.
        tokens, positions = tokens.flatten(), positions.flatten()
        stream = [native.address(t, torch.int64, (N,)) for t in (tokens, positions)]
        logits = torch.empty(len(asked), V, **native.FLOAT)
        with native.LOCK:
            done = native.library().step(
                self.weights.of_model, self.weights.of_layers, *stream, N, native.numbers(pieces),
                len(batch.plan), native.address(logits, torch.float32, (len(asked), V)),
                torch.get_num_threads())
        if done < N:   # the model says so in torch's words
            raise ValueError("the model does not have these tokens or positions")
        return logits.view(*places.shape, V)

    def addresses(self, kv, lead):
        """The addresses of its keys in each layer, and of its values; kept with the KV."""
        kept = vars(kv).get("addresses")
        if kept is None or kept[0] is not kv.k.get(0):
            shape = *lead, self.weights.heads, kv.capacity, self.weights.head_size
            new = torch.empty((), **native.FLOAT).expand(shape)
            both = zip(*(kv.buffers(layer, new, new) for layer in range(self.weights.layers)))
            kept = kv.addresses = kv.k[0], *(native.numbers(
                native.address(t, torch.float32, shape) for t in part) for part in both)
        return kept[1:]

    def uses(self):
        """In one line: whether its passes so far were compiled steps, or why not."""
        compiled, total = self.passes[None], self.passes.total()
        if compiled == total:
            return "compiled step: yes"
        why = max(filter(None, self.passes), key=self.passes.get)
        some = f"in {compiled} of {total} passes; in the others not:" if compiled else "no,"
        return f"compiled step: {some} {why}"

    def __getattr__(self, name):
        model = super().__getattr__("model")
        return model if name == "model" else getattr(model, name)

    def _apply(self, *arguments):   # of to() and the like: what can be moved is the model
        return self.model._apply(*arguments)

    def __deepcopy__(self, memo):
        return copy.deepcopy(self.model, memo)
