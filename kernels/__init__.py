"""
What `model.optimize()` puts in place: the same arithmetic through the fastest kernels available.

Nothing here is a lesson about batching. It is here so that the ladder's top rungs can be compared
with other programs. Classes become a faster subclass in place, so that weights, their names and the
state_dict stay as they are:

    Linear, MLP   weights in the order in which the kernel multiplies (linear.py)
    GPT, Llama    for a Flat or Paged batch, caches in pools (attention.py), and a whole step in one
                  call of a compiled library (native.py); the same step for one request alone, whose
                  logits then are the same bit for bit (docs/bits.md). Without the library, GPT's
                  attention is torch's fused one, and its last block computes only what is wanted

The layouts know nothing of this. The one seam is Fast.forward: it looks at whose method `attend`
is, and takes its place. It does so only for what it was written for, and steps aside for anything
else (served.py). docs/kernels.md says what optimize() promises.
"""
import ctypes
import sys
from functools import partial

import torch
from torch import nn

from beyond.llama import Llama
from kernels import native, served
from kernels.attention import Pools, Step, alone, is_alone, pieces_of
from kernels.linear import FastLinear, FastMLP, Parts, ReorderedWeight, fused_linear, vocabulary
from kernels.threads import threads_of
from model import GPT, MLP, causal


class Fast:
    """What the two models have in common."""

    def forward(self, tokens, positions=None, attend=causal, wanted=None):
        """As GPT.forward or Llama.forward."""
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters()):
            self._parts.versions = None   # training: torch does not count what fused optimizers do
            for module in self.modules():
                if hasattr(module, "reordered"):
                    module.reordered.forget()
        if positions is None:   # whole sequences: a bare call, or training
            return self.whole(tokens, attend, wanted)
        why = self._parts.changed(self)
        if why:
            self.note(why)
            return super().forward(tokens, positions, attend, wanted)
        why, layout = served.why_not(attend), getattr(attend, "__self__", None)
        if not why and (tokens.shape != positions.shape or not is_alone(layout)
                        and layout.cu_seqlens[-1] != tokens.numel()):
            why = "the tokens are not those of the plan"
        try:
            if not why:
                batch = alone(tokens, layout) if is_alone(layout) else layout
                try:
                    return self.compiled_step(batch, tokens, positions, wanted)
                except ValueError as error:
                    why = str(error)
                if batch is not layout:
                    layout.kv = layout.plan[0][0].kv   # it may have moved into a pool
                elif isinstance(self, GPT):
                    self.pools.take_in(layout)   # ValueError: these caches are others
                    attend = Step(layout)
        except ValueError as error:
            why = str(error)
        self.note(why)
        return self.by_torch(tokens, positions, attend, wanted)

    def whole(self, tokens, attend, wanted):
        """A bare call, which uses() does not count. Of one sequence, it is a compiled step, too."""
        n = tokens.size(-1)
        if (attend is causal and 0 < n == tokens.numel() <= self.config.block_size
                and not self._parts.changed(self) and served.name_of(causal.__code__) == "causal"
                and not served.watch((causal.__globals__["Head"], "forward")).first_changed()):
            positions = torch.arange(n, device=tokens.device).view(tokens.shape)
            try:
                return self.compiled_step(alone(tokens), tokens, positions, wanted, counts=False)
            except ValueError:
                pass
        return super().forward(tokens, None, attend, wanted)

    def compiled_step(self, batch, tokens, positions, wanted, counts=True):
        """batch: the layout, or what `alone` makes of it. ValueError: no step can compute it."""
        with native.LOCK:
            if why := self._parts.why_not_compiled(self):
                raise ValueError(why)
            self.pools.take_in(batch)
            places = torch.arange(tokens.numel(), device=tokens.device).view(tokens.shape)
            places = places if wanted is None else places[wanted]
            logits = native.step(self._parts.weights, tokens.flatten(), positions.flatten(),
                                 *pieces_of(batch, places.flatten().tolist()))
            if counts:
                self.note(threads_of(tokens.numel()).used)
        return logits.view(*places.shape, logits.size(-1))

    def by_torch(self, tokens, positions, attend, wanted):
        return super().forward(tokens, positions, attend, wanted)

    @property
    def pools(self):
        """The pools for its caches, made at first use, and again if the model was moved."""
        attn = self.h[0].attn
        weight = attn.key.weight   # a tensor parallel rank has some of the heads
        heads = weight.size(0) // attn.head_size
        shape = len(self.h), heads, attn.head_size, weight.dtype, weight.device
        if self._pools is None or self._pools.shape != shape:
            self._pools = Pools(min(4 * self.config.block_size, 4096), *shape)
        return self._pools

    def note(self, how):
        with native.LOCK:
            self._parts.passes[how] += 1

    def uses(self):
        """In one line: whether its passes since optimize() were compiled steps, or why not."""
        would = self._parts.changed(self) or self._parts.why_not_compiled(self)
        passes = self._parts.passes or {would or torch.get_num_threads(): 1}
        whys, counts = ([how for how in passes if isinstance(how, kind)] for kind in (str, int))
        why = max(whys, key=passes.get, default=None)
        if not counts:
            return f"compiled step: no, {why}"
        compiled = sum(map(passes.get, counts))
        much = f"in {compiled} of {sum(passes.values())} passes" if why else "yes"
        each = " to ".join(map(str, sorted({min(counts), max(counts)})))
        line = f"compiled step: {much}, {each} thread{'s' * (max(counts) > 1)}"
        return f"{line}; in the others not: {why}" if why else line


class FastGPT(Fast, GPT):
    def by_torch(self, tokens, positions, attend, wanted):
        *blocks, last = self.h
        x = self.wte(tokens) + self.wpe(positions)                                # (..., T, C)
        for block in blocks:
            x = block(x, attend)
        if wanted is None:
            x = last(x, attend)
        elif tokens[wanted].numel() == tokens.numel():
            x = last(x, attend)[wanted]                                             # (R, C)
        else:
            x = self.last_block(x, attend, wanted)                                  # (R, C)
        return fused_linear(self.wte, self.ln_f(x))

    def last_block(self, x, attend, wanted):
        """
        Block.forward for the tokens of `wanted` alone, (R, C): after the last block nothing reads
        what the other tokens are, only their keys and values.
        """
        block, attn = self.h[-1], self.h[-1].attn
        y = block.ln_1(x)
        k, v, of_rows = attn.key(y), attn.value(y), attn.query(y[wanted])
        q = of_rows.new_zeros(k.shape)
        q[wanted] = of_rows
        y = attend(attn.layer, *(attn.split_heads(part) for part in (q, k, v)))
        x = x[wanted] + attn.c_proj(y.transpose(-3, -2).flatten(-2)[wanted])
        return x + block.mlp(block.ln_2(x))


class FastLlama(Fast, Llama):
    pass


FAST = {nn.Linear: FastLinear, MLP: FastMLP, GPT: FastGPT, Llama: FastLlama}


def keep_memory():
    """
    Has glibc keep what it got from the system: it would give large temporaries back, and the system
    clears the memory of each new one. That is a quarter of stage 1's time at GPT-2's size. Threads
    that began before this have heaps of their own, which cannot hold large ones.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:   # never trim; no mappings of their own; one heap for all threads
        for parameter, value in (-1, -1), (-4, 0), (-8, 1):
            mallopt(parameter, value)


def optimize(model, compiled=True):
    """
    Makes a GPT or a Llama its fast subclass in place, and reorders its weights now. Returns it.

    compiled: whether to use kernels of our own where they can be compiled, or only torch's
    """
    # Not for tensor parallel ranks, which add up in the middle of a block
    whole = all(isinstance(module, (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding))
                for module in model.modules() if module._parameters)
    keep_memory()
    model._pools, model._parts = None, Parts()
    for module in model.modules():
        if isinstance(module, nn.Linear) or module is vocabulary(model):
            module.reordered = ReorderedWeight(compiled and whole)
            if module.reordered.serves(module.weight):
                module.reordered(module.weight)
        module.__class__ = FAST.get(type(module), type(module))
    if not isinstance(model, Fast):
        model.uses = partial(
            str, f"compiled step: no, {type(model).__name__} is neither GPT nor Llama")
    return model
