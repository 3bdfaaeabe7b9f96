"""
What `fast = model.optimize()` makes: a snapshot that computes a whole pass in one compiled call.

Nothing here is a lesson about batching. It is here so that the ladder's top rungs can be compared
with other programs. The snapshot holds packed copies of the weights (native.py) and the model that
they came from, and changes nothing about that model. It is called like it:

    logits = fast(batch.tokens, batch.positions, batch.attend, batch.wanted)

The layouts know nothing of this. The snapshot looks at whose method `attend` is. It takes the place
of exactly three layouts, those of stages 0, 6 and 7, and of a bare call for one sequence; anything
else is computed by the model. docs/kernels.md says what is promised.
"""
import copy
import hashlib
import json
import sys
from bisect import bisect_left
from collections import Counter
from functools import cache
from inspect import isfunction
from itertools import accumulate, chain, pairwise
from pathlib import Path

import torch

from kernels import native

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).with_name("checked.json")   # {file: digest}, written by kernels/check.py
STAGES = {"Alone": "generate_unbatched.py", "Flat": "generate_ragged.py",
          "Paged": "generate_paged.py"}
FILES = "model.py", "cache.py", *STAGES.values(), "loading/llama.py"   # what a step stands for
METHODS = "__init__", "lay_out", "attend", "find_room", "slots", "write", "read"   # of a layout


def optimize(model):
    """
    A snapshot of the model, or the model itself and one line on stderr that says why not.

    Hooks inside the model, gradients, autocast and later changes of its weights are the model's: a
    compiled pass knows nothing of them. After such a change, call optimize() again. Hooks before
    the model as a whole see every pass, and may change what goes into it.
    """
    if why := why_not(model):
        print(f"compiled step: no, {why}", file=sys.stderr)
        return model
    native.keep_memory()
    return Snapshot(model)


def why_not(model):
    """Why no snapshot can serve this model, in words; None if one can."""
    kind = type(model)
    if f"{kind.__module__}.{kind.__name__}" not in ("model.GPT", "loading.llama.Llama"):
        return f"{kind.__name__} is neither GPT nor Llama"
    if changed := next((file for file, now in digests().items() if now != checked().get(file)), 0):
        return f"{changed} has changed since it was checked (python -m kernels.check)"
    for p in model.parameters():
        if p.dtype != torch.float32 or p.device.type != "cpu":
            return f"it is for float32 on a CPU, not {p.dtype} on {p.device.type}"
    with torch.device("meta"):
        as_made = kind(model.config)
    if str(as_made) != str(model):   # this shows all classes and sizes
        return "its modules are not those of its config (a tensor parallel rank's, for instance)"
    return native.problem()


def digests():
    """{file: digest} of the files as they are, line ends aside."""
    return {file: hashlib.sha256((ROOT / file).read_bytes().replace(b"\r\n", b"\n")).hexdigest()
            for file in FILES}


def checked():
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


# --- whether a function is the one in the repository's file ---------------------------------------

@cache
def in_repository(file):
    path = Path(file).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else file


def is_original(function, file, name):
    """A script that is run has classes of its own, so it is known by its code: file and name."""
    code = getattr(function, "__code__", None)
    return code and code.co_qualname == name and in_repository(code.co_filename) == file


def kind_of(attend):
    """The name of a layout whose methods are all original. ValueError for any other `attend`."""
    layout = getattr(attend, "__self__", None)
    kind, name = type(layout), type(layout).__name__
    if name not in STAGES:
        raise ValueError(f"it is for the layouts of stages 0, 6 and 7, not {name}")
    for method in METHODS:
        function = getattr(kind, method, None)
        owner = "Flat" if name == "Paged" and method not in vars(kind) else name
        if function and not is_original(function, STAGES[owner], f"{owner}.{method}"):
            raise ValueError(f"{name}.{method} has been replaced")
    if attend.__func__ is not kind.attend or vars(layout).keys() & METHODS:
        raise ValueError("a method of this layout has been replaced")
    if getattr(layout, "attention", "varlen") != "varlen":
        raise ValueError(f"it has no attention={layout.attention!r}")
    return name


def check_head(function):
    """ValueError unless the `head` that a function calls is model.py's."""
    head = function.__globals__["head"]
    if (not is_original(getattr(type(head), "forward", None), "model.py", "Head.forward")
            or head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head)):
        raise ValueError("Head.forward has been replaced")


# --- the snapshot ---------------------------------------------------------------------------------

class Snapshot:
    """A model's weights, packed, and the model, which answers all else that is asked of it."""

    def __init__(self, model):
        self.model, self.passes = model, Counter()   # reasons; None: compiled
        attn, config = model.h[0].attn, model.config
        self.weights = native.Weights(
            dict(model.named_parameters(remove_duplicate=False)), attn.head_size, model.ln_f.eps,
            getattr(model, "frequencies", ()))
        self.heads = len(attn.key.weight) // attn.head_size, attn.head_size
        self.layers = config.n_layer
        # What a step computes without calling it: functions of the model's module, and its methods.
        module = sys.modules[type(model).__module__]
        owners = [module, *{each for m in model.modules() for each in type(m).__mro__
                            if each.__module__ in ("model", "loading.llama")}]
        self.functions = [(owner, name) for owner in owners for name, each in vars(owner).items()
                          if isfunction(each) and each.__module__ in ("model", "loading.llama")]
        self.codes = self.current_codes()

    def current_codes(self):
        return [getattr(getattr(*each), "__code__", None) for each in self.functions]

    def __call__(self, tokens, positions=None, attend=None, wanted=None):
        """As GPT.forward or Llama.forward."""
        if attend is None:   # a bare call is not counted
            try:
                return self.compiled(tokens, positions, attend, wanted)
            except ValueError:
                return self.model(tokens, positions, wanted=wanted)
        arguments = tokens, positions, attend, wanted
        for hook in self.model._forward_pre_hooks.values():
            arguments = hook(self.model, arguments) or arguments
        try:
            logits = self.compiled(*arguments)
        except ValueError as error:
            self.passes[str(error)] += 1
            return self.model.forward(*arguments)   # its hooks have been called
        self.passes[None] += 1
        return logits

    def compiled(self, tokens, positions, attend, wanted):
        """The pass in one compiled call. ValueError: it cannot be, and why."""
        if self.current_codes() != self.codes:
            raise ValueError("a function of the model has been replaced")
        if self.model._forward_hooks or "forward" in vars(self.model):
            raise ValueError("a hook after the model, or a forward of its own")
        if positions is None and attend is None:
            page, requests = self.one_sequence(tokens)
            positions = torch.arange(tokens.numel(), device="cpu").view(tokens.shape)
        else:
            page, requests = self.requests_of(kind_of(attend), attend.__self__)
            check_head(attend.__func__)
        ends = [0, *accumulate(n for n, *_ in requests)]
        if tokens.numel() != ends[-1] or tokens.shape != positions.shape:
            raise ValueError("the tokens are not those of the plan")
        places = torch.arange(ends[-1], device="cpu").view(tokens.shape)
        places = places if wanted is None else places[wanted]
        counts = last_of_each(places.flatten().tolist(), ends)
        pieces = [(first, n, start, count, *rest) for first, count, (n, start, *rest)
                  in zip(ends, counts, requests)]
        with native.LOCK:
            logits = native.step(self.weights, tokens.flatten(), positions.flatten(), pieces, page)
        return logits.view(*places.shape, logits.size(-1))

    def one_sequence(self, tokens):
        """For a bare call: one request, whose keys and values are kept for this pass only."""
        n = tokens.numel()
        if not 0 < n == tokens.size(-1) <= self.config.block_size:
            raise ValueError("it is not one sequence")
        check_head(type(self.model).forward.__globals__["causal"])
        return n, [(n, 0, [0], *self.room(n))]

    def room(self, n):
        """New keys and values of n slots, as `addresses` gives them."""
        both = torch.empty(2, self.layers, self.heads[0], n, self.heads[1], **native.FLOAT)
        keys, values = (native.numbers(layer.data_ptr() for layer in part) for part in both)
        keys.tensor = values.tensor = both   # it lives as long as they do
        return keys, values, n

    def requests_of(self, kind, batch):
        """Of a layout: (page size, [(n, start, table, where keys are, values, slots), ...])."""
        if kind == "Alone":
            n = batch.tokens.numel()
            where = self.room(n) if batch.kv is None else self.addresses(batch.kv, (1,), batch.end)
            return 2**40, [(n, batch.start, [0], *where)]
        if kind == "Flat":   # a cache in one piece is a single page
            return 2**40, [
                (n, start, [0], *self.addresses(request.kv, (), start + n))
                for (request, n), start in zip(batch.plan, batch.starts)]
        size = batch.pages.size
        where = self.addresses(batch.pool, (), batch.pages.number * size)
        requests = []
        for (request, n), start in zip(batch.plan, batch.starts):
            table = request.block_table
            if (len(table) * size < start + n
                    or not 0 <= min(table) <= max(table) < batch.pages.number):
                raise ValueError(f"{request}: its block table has no room for {start + n} tokens")
            requests.append((n, start, [page * size for page in table], *where))
        return size, requests

    def addresses(self, kv, lead, end):
        """
        Where a KV's keys and values are, in each layer, and how many slots it has. Kept with it.

        lead: its axes before the heads
        end:  slots that it must have
        """
        kept = vars(kv).get("addresses")
        if kept is None or kept[0] is not kv.k.get(0):
            for name in "write", "read", "buffers":
                if name in vars(kv) or not is_original(
                        getattr(type(kv), name, None), "cache.py", f"KV.{name}"):
                    raise ValueError("a cache is not a KV")
            heads, size = self.heads
            new = torch.empty(*lead, heads, 1, size, **native.FLOAT)
            shape = *lead, heads, kv.capacity, size
            buffers = [kv.buffers(layer, new, new) for layer in range(self.layers)]
            keys, values = (native.numbers(
                native.address(t, torch.float32, shape, "a cache") for t in part)
                for part in zip(*buffers))
            kept = kv.addresses = kv.k[0], keys, values
        if end > kv.capacity:
            raise ValueError(f"a cache of {kv.capacity} tokens has no room for {end}")
        return *kept[1:], kv.capacity

    def uses(self):
        """In one line: whether its passes so far were compiled steps, or why not."""
        whys = self.passes.copy()
        compiled = whys.pop(None, 0)
        if not whys:
            return "compiled step: yes"
        why = max(whys, key=whys.get)
        if not compiled:
            return f"compiled step: no, {why}"
        return (f"compiled step: in {compiled} of {self.passes.total()} passes; in the others not: "
                f"{why}")

    def __getattr__(self, name):
        if name == "model" or name.startswith("__"):   # it is being made, or copied
            raise AttributeError(name)
        return getattr(self.model, name)

    def __deepcopy__(self, memo):
        """A copy of the model, since that is what can be moved and changed."""
        return copy.deepcopy(self.model, memo)


def last_of_each(wanted, ends):
    """
    Of how many last tokens of each request the logits are wanted. ValueError unless `wanted`,
    places in the stream, are those tokens in their order.
    """
    counts = [bisect_left(wanted, end) - bisect_left(wanted, start)
              for start, end in pairwise(ends)]
    lasts = (range(end - n, end) for end, n in zip(ends[1:], counts))
    if wanted != [*chain.from_iterable(lasts)]:
        raise ValueError("the logits wanted are not those of the last tokens")
    return counts
