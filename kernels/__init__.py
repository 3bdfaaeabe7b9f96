"""
What `model.optimize()` puts in place: the same arithmetic through the fastest kernels available.

Nothing here is a lesson about batching. It is here so that the ladder's top rungs can be compared
with other programs. Three classes become a faster subclass in place, so that weights, their names
and the state_dict stay as they are:

    Linear, MLP   weights in the order in which the kernel multiplies (linear.py)
    GPT           for a Flat or Paged batch, caches in pools (attention.py), and a whole step in one
                  call of a compiled library (native.py) or, without one, torch's fused attention;
                  for any batch, a last block that computes only the tokens whose logits are wanted

The layouts know nothing of this. The one seam is FastGPT.forward: it looks at whose method `attend`
is, and takes its place.
"""
import torch
from torch import nn

from kernels import native
from kernels.attention import Pools, Step, pieces_of
from kernels.linear import FastLinear, FastMLP, ReorderedWeight, fused_linear
from model import GPT, MLP, causal


class FastGPT(GPT):
    def forward(self, tokens, positions=None, attend=causal, rows=None):
        """As GPT.forward."""
        if positions is None:   # whole sequences: a bare call, or training
            return super().forward(tokens, positions, attend, rows)
        layout = getattr(attend, "__self__", None)
        if getattr(layout, "attention", None) == "varlen":   # a Flat or a Paged batch
            self.pools.take_in(layout)
            if rows is layout.rows and native.can_step(self):
                return native.step(self, tokens, positions, *pieces_of(layout))
            attend = Step(layout)
        *blocks, last = self.h
        x = self.wte(tokens) + self.wpe(positions)                                # (..., T, C)
        for block in blocks:
            x = block(x, attend)
        if rows is None:
            x = last(x, attend)
        elif tokens[rows].numel() == tokens.numel():
            x = last(x, attend)[rows]                                             # (R, C)
        else:
            x = self.last_block(x, attend, rows)                                  # (R, C)
        return fused_linear(self.wte, self.ln_f(x))

    def last_block(self, x, attend, rows):
        """
        Block.forward for the tokens of `rows` alone, (R, C): after the last block nothing reads
        what the other tokens are, only their keys and values.
        """
        block, attn = self.h[-1], self.h[-1].attn
        y = block.ln_1(x)
        k, v, of_rows = attn.key(y), attn.value(y), attn.query(y[rows])
        q = of_rows.new_zeros(k.shape)
        q[rows] = of_rows
        y = attend(attn.layer, *(attn.split_heads(part) for part in (q, k, v)))
        x = x[rows] + attn.c_proj(y.transpose(-3, -2).flatten(-2)[rows])
        return x + block.mlp(block.ln_2(x))

    @property
    def pools(self):
        """The pools for its caches, made at first use, and again if the model was moved."""
        attn = self.h[0].attn
        weight = attn.key.weight   # a tensor parallel rank has some of the heads
        heads = weight.size(0) // attn.head_size
        shape = self.config.n_layer, heads, attn.head_size, weight.dtype, weight.device
        if self._pools is None or self._pools.shape != shape:
            self._pools = Pools(4 * self.config.block_size, *shape)
        return self._pools

    def room(self, size):
        """Working memory for so many numbers, kept for the next step."""
        if self._room is None or self._room.numel() < size:
            self._room = torch.empty(size)
        return self._room


FAST = {nn.Linear: FastLinear, MLP: FastMLP, GPT: FastGPT}


def optimize(model, compiled=True):
    """
    Turns a GPT into a FastGPT in place, and reorders its weights now. Returns the model.

    compiled: whether to use kernels of our own where they can be compiled, or only torch's
    """
    compiled = compiled and native.works()
    model._pools = model._room = None
    for module in model.modules():
        if isinstance(module, nn.Linear) or module is model.wte:
            module.reordered = ReorderedWeight(compiled)
            if module.reordered.serves(module.weight):
                module.reordered(module.weight)
        module.__class__ = FAST.get(type(module), type(module))
    return model
