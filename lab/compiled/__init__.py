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
from typing import NamedTuple

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
    if modules_of(model) != modules_of(as_made):   # a tensor parallel rank's, for instance
        raise ValueError("its modules are not those of its config")


def modules_of(model):
    return str(model), [p.shape for p in model.parameters()]


@torch.autocast("cpu", enabled=False)
def try_out(fast):
    """
    ValueError, in words, if the logits of two requests of 4 tokens are not the model's, or not the
    same bits in each stage; or if there are none. A budget of 3 tokens makes chunks.
    """
    alone = None
    chunks = dict(token_budget=3)
    for stage, knobs in ((generate_unbatched, {}), (generate_ragged, chunks),
                         (generate_paged, dict(chunks, page_size=2))):
        compiled = trial_logits(stage, fast, knobs)                                # (2, V)
        expected = trial_logits(stage, fast.model, knobs)
        close = TOLERANCE[torch.float32] * float(expected.abs().max())
        if not torch.allclose(compiled, expected, rtol=0, atol=close):
            raise ValueError(f"it computes something else than the model ({stage.__name__}.py)")
        if alone is None:
            alone = compiled
        if not torch.equal(compiled, alone):
            raise ValueError(f"a batch changes a request's bits ({stage.__name__}.py)")
    fast.passes.clear()


def trial_logits(stage, model, knobs):
    """The logits of a first token for each of two requests: (2, V)."""
    requests = []
    for distance in 5, 7:
        prompt = [(1 + distance * i) % model.config.vocab_size for i in range(4)]
        requests.append(Request(prompt, 1))
    rows = []
    stage.generate(model, requests, **knobs,
                   on_token=lambda request, token, logits: rows.append(logits))
    return torch.stack(rows)


@cache
def origin(layout):
    """What tells a class: not `is`, because the file of a script that runs is loaded twice."""
    file = getattr(sys.modules.get(layout.__module__), "__file__", None)
    return layout.__qualname__, file and os.path.realpath(file)


LAYOUTS = [origin(layout) for layout in (
    generate_unbatched.Alone, generate_ragged.Flat, generate_paged.Paged)]


# --- what a pass must be --------------------------------------------------------------------------

def copies_nothing(batch):
    """A compiled pass reads keys where they lie."""
    cost = batch.cost
    batch.cost = lambda: cost() | {"copied_bytes": 0}


class Piece(NamedTuple):
    """A request's part of a pass. The arrays and the KV live until the call returns."""
    first: int       # the place of its first token in the stream
    n: int           # tokens
    start: int       # its keys that are in the cache
    wanted: int      # of its last tokens' logits
    table: object    # array: its pages
    keys: object     # arrays: where those of each layer are
    values: object
    slots: int       # of the cache
    page_size: int
    kv: object

    def numbers(self):
        """As native.cpp's Piece has them."""
        arrays = map(ctypes.addressof, (self.table, self.keys, self.values))
        return self.first, self.n, self.start, self.wanted, *arrays, self.slots, self.page_size


def refuse_batch(batch, attend):
    """ValueError, in words, unless it is a layout that is compiled, and `attend` is its own."""
    if batch is not None and origin(type(batch)) not in LAYOUTS:
        raise ValueError(f"it is for Alone, Flat and Paged, not {type(batch).__name__}")
    if batch is None or attend != MethodType(type(batch).attend, batch):
        raise ValueError("it is for the attend of the batch that a trace has announced")
    attention = getattr(batch, "attention", "varlen")
    if attention != "varlen":
        raise ValueError(f"it is for attention \"varlen\", not \"{attention}\"")


def refuse_tokens(tokens, positions, pieces, asked):
    """ValueError unless the pieces are the whole stream, and the last of each are asked for."""
    planned, lasts = 0, []
    for piece in pieces:
        planned += piece.n
        lasts += range(planned - piece.wanted, planned)
    if planned != tokens.numel() or tokens.shape != positions.shape or asked != lasts:
        raise ValueError("it is for the tokens of the plan, and the logits of the last of them")


def cache_of(batch, request, n):
    """The KV of the batch, which may be a pool's, or the request's own."""
    kv = getattr(batch, "kv", request.kv)
    if kv is None and hasattr(batch, "kv"):   # Alone, without a cache
        return KV(n)
    if type(kv) is not KV:
        raise ValueError(f"{request}: its keys are in no KV")
    return kv


def pages_of(batch, request, kv):
    """(block table, page size) of a request. A cache in one piece is a single page."""
    if hasattr(batch, "pool"):
        return request.block_table, batch.pool.page_size
    return [0], kv.capacity


def refuse_pages(request, table, page_size, slots, tokens):
    """ValueError unless its pages hold so many tokens, and lie in the pool: C++ does not look."""
    if tokens > len(table) * page_size:
        raise ValueError(f"{request}: its cache has no room for {tokens} tokens")
    if min(table) < 0 or max(table) >= slots // page_size:
        raise ValueError(f"{request}: its block table names a page that the pool does not have")


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
        logits, why = None, None
        try:
            logits = self.compiled(tokens, positions, attend, wanted, batch)
        except ValueError as error:
            why = str(error)
        if attend is None:   # a bare call, which does not count
            if why is None:
                return logits
            return self.model(tokens, positions, wanted=wanted)
        self.passes[why] += 1
        if why is None:
            copies_nothing(batch)
            return logits
        return self.model(tokens, positions, attend, wanted)

    def compiled(self, tokens, positions, attend, wanted, batch):
        """The pass in one compiled call. ValueError: it cannot be, and why."""
        if attend is None:
            batch, positions = self.bare_call(tokens, positions)
        else:
            refuse_batch(batch, attend)
        # `wanted`, applied to the tokens' numbers, says which of them are asked for
        numbers = torch.arange(tokens.numel(), device="cpu").view(tokens.shape)
        places = numbers if wanted is None else numbers[wanted]
        asked = places.flatten().tolist()
        pieces = self.pieces_of(batch, asked, tokens.shape[:-1])
        refuse_tokens(tokens, positions, pieces, asked)
        logits = self.step(tokens.flatten(), positions.flatten(), pieces, len(asked))
        return logits.view(*places.shape, self.weights.vocabulary)

    def bare_call(self, tokens, positions):
        """A batch and positions for a call of the model alone: a request without a cache."""
        length = tokens.size(-1)
        is_one_sequence = 0 < length == tokens.numel() and length <= self.config.block_size
        if positions is not None or not is_one_sequence:
            raise ValueError("it is not one sequence")
        request = SimpleNamespace(kv=None)
        batch = SimpleNamespace(plan=[(request, length)], starts=[0], kv=None)
        return batch, torch.arange(length, device="cpu").view(tokens.shape)

    def pieces_of(self, batch, asked, lead):
        """A Piece for each request of the plan. asked: places of the logits that are wanted."""
        pieces, first = [], 0
        for (request, n), start in zip(batch.plan, batch.starts):
            kv = cache_of(batch, request, n)
            table, page_size = pages_of(batch, request, kv)
            refuse_pages(request, table, page_size, kv.capacity, start + n)
            wanted = bisect_left(asked, first + n) - bisect_left(asked, first)
            keys, values = self.addresses(kv, lead)
            pieces.append(Piece(first, n, start, wanted, native.numbers(table), keys, values,
                                kv.capacity, page_size, kv))
            first += n
        return pieces

    def addresses(self, kv, lead):
        """
        Where its keys of each layer are, and its values: two arrays, which are kept with the KV.
        All layers get their buffers here at once. So while the first one's keys are where they
        were, the others are, too; those of a copy, or of a KV that was emptied, are not.
        """
        kept = vars(kv).get("addresses")
        if kept and 0 in kv.k and kept[0] == kv.k[0].data_ptr():
            return kept[1:]
        shape = *lead, self.weights.heads, kv.capacity, self.weights.head_size
        new = torch.empty((), **native.FLOAT).expand(shape)
        keys, values = [], []
        for layer in range(self.weights.layers):
            k, v = kv.buffers(layer, new, new)
            keys.append(native.address(k, torch.float32, shape))
            values.append(native.address(v, torch.float32, shape))
        kv.addresses = keys[0], native.numbers(keys), native.numbers(values)
        return kv.addresses[1:]

    def step(self, tokens, positions, pieces, wanted):
        """The compiled call: logits (wanted, V)."""
        N, V = len(tokens), self.weights.vocabulary
        logits = torch.empty(wanted, V, **native.FLOAT)
        in_order = []
        for piece in pieces:
            in_order += piece.numbers()
        with native.LOCK:
            done = native.library().step(
                self.weights.of_model, self.weights.of_layers,
                native.address(tokens, torch.int64, (N,)),
                native.address(positions, torch.int64, (N,)), N,
                native.numbers(in_order), len(pieces),
                native.address(logits, torch.float32, (wanted, V)), torch.get_num_threads())
        if done < N:   # the model says so in torch's words
            raise ValueError("the model does not have these tokens or positions")
        return logits

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
