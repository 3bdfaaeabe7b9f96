"""
The X-ray: which keys each query really sees, measured inside a layout while a stage runs.

    with XRay(model, requests) as xray:
        trace = generate(model, requests, ...)
    xray.faults()      []: every token saw exactly its own request's tokens up to itself

At every forward pass the layout's `attend` is called again, under a layer name of its own, with
queries and keys of zero, and with values that are one-hot: a slot's value says which token of which
request it holds. Zero scores give uniform weights, so the output of a query *is* the set of keys
that it sees: past, pages and pads included, whatever the layout does inside.

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
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MethodType

import torch

from cache import KV
from model import GPTConfig

PAD = 0   # the id of every slot that holds no token


class ScriptedModel(torch.nn.Module):
    """
    Called like a GPT, but without weights: the logits always favour the token's id + 1. So every
    right answer is known beforehand, and a wrong token shows which request it belongs to.

    Token p of request r must have the id r * stride + p + 1.
    """

    def __init__(self, requests, stride=64):
        super().__init__()
        self.config = GPTConfig(block_size=stride - 1, vocab_size=requests * stride + 1, n_layer=1,
                                n_head=1, n_embd=1)
        self.device = torch.device("cpu")

    def forward(self, tokens, positions, attend, rows):
        blank = torch.zeros(*tokens.shape, 1).unsqueeze(-3)          # one head of one feature
        attend(0, blank, blank, blank)
        following = (tokens[rows] + 1) % self.config.vocab_size
        return torch.nn.functional.one_hot(following, self.config.vocab_size).float()


@dataclass
class Sight:
    """
    What one forward pass saw.

    xray:      the XRay, which knows whose token an id is
    batch:     the layout
    ids:       of the slots, in the shape of batch.tokens
    positions: the positions that the model was given for them
    seen:      (..., D) for each slot how many keys of each id it sees, blanks last
    record:    the trace's record of the pass; set by sights_at
    """
    xray: object
    batch: object
    ids: torch.Tensor
    positions: torch.Tensor
    seen: torch.Tensor
    record: object = None


class StandIn:
    """A request as the layout sees it, but its tokens are the X-ray's ids."""

    def __init__(self, request, first):
        self.request, self.first = request, first

    def slice(self, start, end):
        return list(range(self.first + start, self.first + end))

    @property
    def prompt(self):
        return self.slice(0, len(self.request.prompt))

    @property
    def generated(self):
        return self.slice(len(self.request.prompt), len(self.request.tokens))

    @property
    def tokens(self):
        return self.slice(0, len(self.request.tokens))

    def __getattr__(self, name):
        return getattr(self.request, name)


class XRay:
    """A hook on any model that the stages run: a GPT or a ScriptedModel."""

    def __init__(self, model, requests):
        self.model, self.requests, self.passes = model, list(requests), []
        self.first, self.token_of = {}, [None]   # request -> its first id; id -> its token
        for request in self.requests:
            self.first[request] = len(self.token_of)
            length = len(request.prompt) + request.max_new_tokens
            self.token_of += [(request, position) for position in range(length)]
        self.buffers = {}                        # of the X-ray's own layer, for each cache

    def __enter__(self):
        self.handle = self.model.register_forward_pre_hook(self.look)
        return self

    def __exit__(self, *error):
        self.handle.remove()

    @torch.inference_mode()
    def look(self, model, arguments):
        """Called with the model's arguments: (tokens, positions, attend, rows)."""
        tokens, positions, attend, rows = arguments
        batch = attend.__self__
        ids = self.ids_of(batch)
        v = torch.nn.functional.one_hot(ids, len(self.token_of)).double().unsqueeze(-3)
        blank = torch.zeros_like(v)
        with self.own_layer(batch):
            out = batch.attend("xray", blank, blank, v).squeeze(-3)  # (..., D)
        seen = copy.copy(batch)   # a static batch is the same object in the next pass
        self.passes.append(Sight(self, seen, ids, positions, counts_of(out)))
        # The pass must run what was looked at. A kernel (kernels/) takes the place of the layout's
        # own method only: for this one, which does the same, it steps aside.
        same = MethodType(lambda batch, *args: attend(*args), batch)
        return tokens, positions, same, rows

    def ids_of(self, batch):
        """The tokens of a layout, in their shape, but named by the X-ray's ids. PAD: no token."""
        twin = copy.copy(batch)
        twin.plan = [(StandIn(request, self.first[request]), n) for request, n in batch.plan]
        twin.lay_out(batch.tokens.device)
        return twin.tokens.long()

    @contextmanager
    def own_layer(self, batch):
        """Puts the X-ray's layer into the caches, and takes it out again: no stage notices it."""
        caches = {request: request.kv for request, _ in batch.plan}
        caches |= {kv: kv for kv in (getattr(batch, "kv", None), getattr(batch, "pool", None))}
        caches = {owner: kv for owner, kv in caches.items() if isinstance(kv, KV)}
        for owner, kv in caches.items():
            if owner in self.buffers:
                kv.k["xray"], kv.v["xray"] = self.buffers[owner]
        yield
        for owner, kv in caches.items():
            if "xray" in kv.k:
                self.buffers[owner] = kv.k.pop("xray"), kv.v.pop("xray")

    def faults(self):
        """A sentence for everything that was seen and should not have been, or the reverse."""
        return [sentence for number, sight in enumerate(self.passes)
                for sentence in self.faults_of(number, sight, self.shared_keys(sight.batch))]

    def shared_keys(self, batch):
        """
        id -> the id whose keys it may share. In stage 7 that is the first one with the same tokens
        up to it; elsewhere no request shares any.
        """
        first_of, shared = {}, {}
        for request in self.requests:
            for position in range(len(request.tokens)):
                id = self.first[request] + position
                prefix = tuple(request.tokens[:position + 1]) if hasattr(batch, "pages") else id
                shared[id] = first_of.setdefault(prefix, id)
        return shared

    def faults_of(self, number, sight, shared):
        slots = zip(sight.ids.flatten().tolist(), sight.positions.flatten().tolist(),
                    sight.seen.flatten(0, -2).tolist())
        for slot, (id, given, row) in enumerate(slots):
            if id == PAD:
                continue
            request, position = self.token_of[id]
            kind = "prefill" if position < len(request.prompt) else "decode"
            token = (f"pass {number}, {self.place(sight, slot)} = {request} "
                     f"({kind}, position {position})")
            if given != position:
                yield f"{token} is computed as if at position {given}"
            expected = Counter(shared[key] for key in range(id - position, id + 1))
            seen = Counter({shared.get(key, key): n for key, n in enumerate(row) if n})
            for wrong, verb in (seen - expected, "sees"), (expected - seen, "does not see"):
                if wrong:
                    yield f"{token} {verb} {self.describe(wrong)}"

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


def counts_of(out):
    """Numbers of keys (..., D + 1) from uniform weights (..., D); the smallest is one key's."""
    each = out.masked_fill(out < 1e-9, 1).amin(dim=-1, keepdim=True)
    whole = out.sum(dim=-1, keepdim=True)
    blanks = ((1 - whole) / each).masked_fill(whole == 0, 0)   # it sees no key at all
    return torch.cat([out / each, blanks], dim=-1).round().long()
