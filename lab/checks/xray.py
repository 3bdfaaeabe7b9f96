"""
The X-ray: which keys each query really sees, measured inside a layout while a stage runs.

    with XRay(model, requests) as xray:
        trace = generate(model, requests, ...)
    xray.faults()      []: every token saw exactly its own request's tokens up to itself

At every forward pass `attend` is called again, on a copy of the layout that has caches of its own,
with queries and keys of zero, and with values that are one-hot: a slot's value says which token of
which request it holds. Zero scores give uniform weights, so the output of a query *is* the set of
keys that it sees: past, pages and pads included, whatever the layout does inside.

             a0 a1 c0 c1 pad      output of the query c1        reads as
    a0       1  0  0  0  0        0  0  1/2  1/2  0             c1 sees c0 and c1: right
    a1       0  1  0  0  0        0  0  1/3  1/3  1/3           c1 sees c0, c1 and a pad slot
    c0       0  0  1  0  0        0  0  1/3  1/3  0             c1 sees c0, c1 and a blank: a key
    c1       0  0  0  1  0                                      that nothing was written to
    pad      0  0  0  0  1

It also reports tokens that are computed at a wrong position. It is a second witness beside the
check, not a replacement: its own keys are zero, so it does not notice wrong keys, and it knows
nothing about sampling.
"""
import copy
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from cache import KV
from request import Request
from toolbox.trace import observed

PAD = 0   # the id of every slot that holds no token


class StandIn(Request):
    """A request whose pads have an id of their own."""
    pad = PAD


@dataclass
class Sight:
    """What one forward pass saw."""
    xray: object              # the XRay, which knows whose token an id is
    batch: object             # the layout
    ids: torch.Tensor         # of the slots, in the shape of batch.tokens
    positions: torch.Tensor   # that the model was given for them
    seen: torch.Tensor        # (..., D + 1): for each slot how many keys of each id, blanks last
    record: object = None     # the trace's record of the pass; set by sights_at


class Look(NamedTuple):
    """
    The one judgement of what a token should see, and sees. A key in a page that equal beginnings
    share counts as the request's own.
    """
    slot: int         # its number in the tensor
    id: int           # of the token
    expected: range   # ids of the keys that it should see: its request's, up to itself
    seen: Counter     # id -> number of such keys that it sees; -1 each if its output is not finite

    @property
    def is_right(self):
        return self.seen == dict.fromkeys(self.expected, 1)

    @property
    def is_finite(self):
        return max(self.seen.values(), default=0) >= 0


class XRay:
    """An observer of any model. It sees what a layout does, not what a compiled step does."""

    def __init__(self, model, requests):
        self.model, self.requests, self.passes = model, list(requests), []
        self.first, self.token_of = {}, [None]   # request -> its first id; id -> its token
        for request in self.requests:
            self.first[request] = len(self.token_of)
            length = min(len(request.prompt) + request.max_new_tokens,
                         model.config.block_size + 1)   # the last token needs no position
            self.token_of += [(request, position) for position in range(length)]
        self.own_caches = WeakKeyDictionary()    # a stage's cache -> the X-ray's own beside it

    def __enter__(self):
        self.watch = observed(self.model, self.look)
        self.watch.__enter__()
        return self

    def __exit__(self, *error):
        self.watch.__exit__(*error)

    @torch.inference_mode()
    def look(self, step, batch):
        """Called before each forward pass."""
        twin = self.twin_of(batch)
        ids = twin.tokens.long()
        v = torch.nn.functional.one_hot(ids, len(self.token_of)).double().unsqueeze(-3)
        blank = torch.zeros_like(v)
        out = twin.attend("xray", blank, blank, v).squeeze(-3)       # (..., D)
        seen = copy.copy(batch)   # a static batch is the same object in the next pass
        self.passes.append(Sight(self, seen, ids, batch.positions, counts_of(out)))

    def twin_of(self, batch):
        """The layout again, of the X-ray's ids (PAD: no token) and with the X-ray's caches."""
        twin = copy.copy(batch)
        twin.plan = [(self.stand_in(request), n) for request, n in batch.plan]
        if hasattr(batch, "kv"):   # of a whole batch or pool; else each request has its own
            twin.kv = self.own(batch.kv)
        twin.lay_out(batch.tokens.device)
        return twin

    def stand_in(self, request):
        """The request as the layout sees it, but tokens and cache are the X-ray's."""
        ids = [*range(self.first[request], self.first[request] + len(request.tokens))]
        twin, n = copy.copy(request), len(request.prompt)
        twin.__class__ = StandIn
        twin.prompt, twin.generated, twin.kv = ids[:n], ids[n:], self.own(request.kv)
        return twin

    def own(self, kv):
        """The X-ray's cache beside one of the stage's. What is none stays as it is."""
        return self.own_caches.setdefault(kv, KV(kv.capacity)) if isinstance(kv, KV) else kv

    def faults(self):
        """A sentence for everything that was seen and should not have been, or the reverse."""
        return [sentence for number, sight in enumerate(self.passes)
                for sentence in self.faults_of(number, sight)]

    def shared_keys(self, batch):
        """
        List: id -> the id whose keys it may share. With a prefix cache that is the first one with
        the same tokens up to it; elsewhere no request shares any.
        """
        same_as = [*range(len(self.token_of) + 1)]
        if hasattr(getattr(batch, "pool", None), "cached"):
            tokens, named = {request: request.tokens for request in self.requests}, {}
            for id, (request, position) in enumerate(self.token_of[1:], 1):
                if position < len(tokens[request]):
                    before = same_as[id - 1] if position else None
                    same_as[id] = named.setdefault((before, tokens[request][position]), id)
        return same_as

    def looks(self, sight):
        """A Look for each token of the pass. A slot without a token has none."""
        shared = self.shared_keys(sight.batch)
        rows = zip(sight.ids.flatten().tolist(), sight.seen.flatten(0, -2))
        for slot, (id, counts) in enumerate(rows):
            if id == PAD:
                continue
            _, position = self.token_of[id]
            expected = range(id - position, id + 1)   # a request's ids follow one another
            own_of = {shared[key]: key for key in expected}
            seen = Counter()
            for key in counts.nonzero().flatten().tolist():
                seen[own_of.get(shared[key], key)] += int(counts[key])
            yield Look(slot, id, expected, seen)

    def faults_of(self, number, sight):
        positions = sight.positions.flatten().tolist()
        for look in self.looks(sight):
            request, position = self.token_of[look.id]
            kind = "prefill" if position < len(request.prompt) else "decode"
            token = (f"pass {number}, {self.place(sight, look.slot)} = {request} "
                     f"({kind}, position {position})")
            if positions[look.slot] != position:
                yield f"{token} is computed as if at position {positions[look.slot]}"
            if look.is_finite:
                yield from self.wrong_keys(token, look)
            else:
                yield f"{token} has an output of NaN or infinity"

    def wrong_keys(self, token, look):
        """A sentence for what the token sees too much, and one for what it does not see."""
        expected = Counter(look.expected)
        for keys, verb in (look.seen - expected, "sees"), (expected - look.seen, "does not see"):
            if keys:
                yield f"{token} {verb} {self.describe(keys)}"

    def place(self, sight, slot):
        """Where a slot is: "row 2, column 5" or "token 7"."""
        if sight.ids.dim() == 1:
            return f"token {slot}"
        row, column = divmod(slot, sight.ids.size(1))
        return f"row {row}, column {column}"

    def describe(self, keys):
        """{id: number} in words: "7 pad slots, 2 empty key slots, position 3 of request 'B'"."""
        blank, words, positions = len(self.token_of), [], {}
        for id, n in keys.items():
            if id in (PAD, blank):
                words.append(f"{n} {'pad' if id == PAD else 'empty key'} slot{'s' * (n > 1)}")
            else:
                request, position = self.token_of[id]
                positions.setdefault(request, []).append(position)
        words += [f"position{'s' * (len(at) > 1)} {', '.join(map(str, sorted(at)))} of {request}"
                  for request, at in positions.items()]
        return ", ".join(words)


def sights_at(generate, model, requests, step, **knobs):
    """
    What the forward passes of one step saw, in a run of copies of `requests`: [Sight, ...].
    generate: a stage's. ValueError if that step has no forward pass.
    """
    copies = [replace(request) for request in requests]
    with XRay(model, copies) as xray:
        trace = generate(model, copies, **knobs)
    for sight, p in zip(xray.passes, trace.passes):
        sight.record = p
    sights = [sight for sight in xray.passes if sight.record.step == step]
    if not sights:
        raise ValueError(f"{trace.stage}: no forward pass in step {step}, the last step is "
                         f"{trace.passes[-1].step}")
    return sights


def keys_of(batch):
    """The number of key columns in each row of a rectangle: past and new."""
    return batch.mask.size(-1) if hasattr(batch, "mask") else batch.end


def counts_of(out):
    """
    Numbers of keys (..., D + 1) from uniform weights (..., D); the smallest is one key's. All are
    -1 where the weights are not finite.
    """
    each = out.masked_fill(out < 1e-9, 1).amin(dim=-1, keepdim=True)
    whole = out.sum(dim=-1, keepdim=True)
    blanks = ((1 - whole) / each).masked_fill(whole == 0, 0)   # it sees no key at all
    counts = torch.cat([out / each, blanks], dim=-1).round()
    return counts.masked_fill(~counts.isfinite().all(dim=-1, keepdim=True), -1).long()
