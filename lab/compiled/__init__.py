"""
What `fast = model.optimize()` makes: a snapshot, which computes a whole pass in one compiled call.

It is no lesson about batching: it lets stages 6 and 7 be compared with other programs. A snapshot
is called like the model. It holds packed copies of the weights, and the model itself, unchanged.
Passes of `Alone`, `Flat` and `Paged` (stages 0, 6 and 7) and bare calls for one sequence are
compiled; all others are the model's. docs/kernels.md says what is promised.
"""
import copy
import ctypes
import hashlib
import json
import sys
from bisect import bisect_left
from collections import Counter
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from cache import KV
from lab.compiled import native

ROOT = Path(__file__).resolve().parent.parent.parent
RECORD = Path(__file__).with_name("checked.json")   # {file: digest}, written by check.py
LAYOUTS = {"Alone": "generate_unbatched.py", "Flat": "generate_ragged.py",
           "Paged": "generate_paged.py"}
FILES = "model.py", "lab/loading/llama.py", "cache.py", *LAYOUTS.values()   # what a step stands for


def optimize(model):
    """
    A snapshot of the model, or the model itself and one line on stderr that says why not.

    A compiled pass runs no hooks of the model, has no gradients and no autocast, and does not see
    later changes of the weights: after one, call optimize() again. Hooks on the snapshot, which is
    a Module, run at every pass.
    """
    if why := why_not(model):
        print(f"compiled step: no, {why}", file=sys.stderr)
        return model
    native.keep_memory()
    return Snapshot(model)


def why_not(model):
    """Why no snapshot can serve this model, in words; None if one can."""
    kind = type(model)
    if kind.__name__ not in ("GPT", "Llama"):
        return f"{kind.__name__} is neither GPT nor Llama"
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if changed := [file for file, now in digests().items() if now != recorded.get(file)]:
        return f"{changed[0]} has changed since it was checked (python -m lab.compiled.check)"
    for p in model.parameters():
        if p.dtype != torch.float32 or p.device.type != "cpu":
            return f"it is for float32 on a CPU, not {p.dtype} on {p.device.type}"
    with torch.device("meta"):
        as_made = kind(model.config)
    looks = [(str(m), [p.shape for p in m.parameters()]) for m in (model, as_made)]
    if looks[0] != looks[1]:
        return "its modules are not those of its config (a tensor parallel rank's, for instance)"
    from lab.compiled.check import fault  # it needs the stages, which nothing else here imports
    try:
        with torch.device("cpu"):
            return native.problem() or fault(examples=1)
    except ValueError as error:   # a method has been replaced
        return str(error)


def digests():   # of the files as they are, line ends aside
    return {file: hashlib.sha256((ROOT / file).read_bytes().replace(b"\r\n", b"\n")).hexdigest()
            for file in FILES}


@cache
def in_repository(file):
    path = Path(file).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else file


def is_original(function, name, files=FILES):
    """Told by its file, not by `is`: a script that is run as __main__ may be loaded twice."""
    code = getattr(function, "__code__", None)
    return code and code.co_name == name and in_repository(code.co_filename) in files


def check_methods(thing, *names):
    """ValueError for a class of another name, or with a method that is not in the files."""
    kind = type(thing)
    if names and kind.__name__ not in names:
        raise ValueError(f"it is for {' and '.join(names)}, not {kind.__name__}")
    own = [each for each in kind.__mro__ if not each.__module__.startswith(("torch.", "builtins"))]
    for owner in own:
        files = [LAYOUTS[owner.__name__]] if owner.__name__ in LAYOUTS else FILES
        for name, each in vars(owner).items():
            if callable(each) and (name in vars(thing) or not is_original(each, name, files)):
                raise ValueError(f"{owner.__name__}.{name} has been replaced")


class Snapshot(nn.Module):
    """A model's weights, packed, and the model, which answers all else that is asked of it."""

    def __init__(self, model):
        super().__init__()
        self.model, self.weights = model, native.Weights(model)
        self.parts = {type(part): part for part in model.modules()}.values()
        self.passes = Counter()   # why they were the model's; None: compiled

    def forward(self, tokens, positions=None, attend=None, wanted=None):
        """As GPT.forward or Llama.forward."""
        try:
            logits, why = self.compiled(tokens, positions, attend, wanted), None
        except ValueError as error:
            logits, why = None, str(error)
        if attend:   # a bare call does not count
            self.passes[why] += 1
        if why is None:
            return logits
        given = {"attend": attend} if attend else {}
        return self.model(tokens, positions, wanted=wanted, **given)

    def compiled(self, tokens, positions, attend, wanted):
        """The pass in one compiled call. ValueError: it cannot be, and why."""
        # 1. Is the code that the step stands for still what was checked?
        for part in self.parts:
            check_methods(part)
        space, N, V = type(self.model).forward.__globals__, tokens.numel(), self.weights.vocabulary
        if not all(is_original(space[name], name) for name in space.keys() & {"causal", "rotate"}):
            raise ValueError("causal or rotate has been replaced")
        # 2. The layout. A bare call is like a request without a cache.
        if attend is None:
            if positions is not None or not 0 < N == tokens.size(-1) <= self.config.block_size:
                raise ValueError("it is not one sequence")
            positions = torch.arange(N, device="cpu").view(tokens.shape)
            layout = SimpleNamespace(plan=[(SimpleNamespace(kv=None), N)], starts=[0])
        else:
            layout = getattr(attend, "__self__", None)
            check_methods(layout, *LAYOUTS)
            if attend != layout.attend or getattr(layout, "attention", "varlen") != "varlen":
                raise ValueError(f"it is for the attend of {type(layout).__name__}, \"varlen\"")
        check_methods((attend or space["causal"]).__globals__["head"], "Head")
        # 3. Which logits, and where each request's keys are. `wanted`, applied to the tokens'
        # numbers, says which of them are asked for: they must be the last ones of each request.
        places = torch.arange(N, device="cpu").view(tokens.shape)[... if wanted is None else wanted]
        asked = places.flatten().tolist()
        lasts, pieces, alive, first = [], [], [], 0   # first: the request's first token
        for (request, n), start in zip(layout.plan, layout.starts):
            kv = getattr(layout, "pool", request.kv) or KV(n)
            table, page, slots = [0], kv.capacity, kv.capacity   # in one piece: a single page
            if hasattr(layout, "pages"):
                table, page = request.block_table, layout.pages.size
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
        # 4. The compiled call.
        tokens, positions = tokens.flatten(), positions.flatten()
        stream = [native.address(t, torch.int64, (N,)) for t in (tokens, positions)]
        logits = torch.empty(len(asked), V, **native.FLOAT)
        with native.LOCK:
            done = native.library().step(
                self.weights.of_model, self.weights.of_layers, *stream, N, native.numbers(pieces),
                len(layout.plan), logits.data_ptr(), torch.get_num_threads())
        if done < N:   # the model says so in torch's words
            raise ValueError("the model does not have these tokens or positions")
        return logits.view(*places.shape, V)

    def addresses(self, kv, lead):
        """The addresses of its keys in each layer, and of its values; kept with the KV."""
        kept = vars(kv).get("addresses")
        if kept is None or kept[0] is not kv.k.get(0):
            check_methods(kv, "KV")
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
