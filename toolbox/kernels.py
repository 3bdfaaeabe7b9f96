"""
What `model.optimize()` puts in place: the same arithmetic through the fastest kernels at hand. Nothing here is a lesson
about batching; it is here so that the ladder's top rung can be held against other programs.

A forward pass of a few tokens, which is what decoding is, does little else than read the weights. The kernel behind
`nn.Linear` takes them in the order in which they are trained, and on a CPU reads them slowly. oneDNN can bring them
into the order in which it multiplies, once; with 2 to 64 rows that is up to twice as fast, the same multiplications. torch
has it under two private names, which its own compiler uses when it freezes a model (torch.compile reaches them too, for
seconds of compiling). Where they are missing, or the model is not in float32 on a CPU, everything runs as before.

Three classes turn into a faster sister in place, so that weights, their names and the state_dict stay as they are.
"""
from functools import cache

import torch
from torch import nn
from torch.nn import functional as F

from model import GPT, MLP


@cache
def can_pack():
    """Whether this torch, on this processor, has oneDNN's two kernels, and they multiply right."""
    try:
        x, weight = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3)
        y = torch.ops.mkldnn._linear_pointwise(x, torch.ops.mkldnn._reorder_linear_weight(weight), None, "none", [], "")
        return torch.allclose(y, x @ weight.T)
    except (AttributeError, RuntimeError, TypeError):   # no such op, no oneDNN, another signature
        return False


def packable(weight):
    return can_pack() and weight.dtype == torch.float32 and weight.device.type == "cpu"


class Packed:
    """
    A weight matrix in oneDNN's order: packed(weight) -> an opaque tensor. It follows its weight: one that was changed
    or moved is packed again at its next use, and so is that of a copied model.
    """

    def __init__(self):
        self.tensor, self.of = None, None

    def __call__(self, weight):
        now = weight.data_ptr(), 0 if weight.is_inference() else weight._version
        if self.of != now:
            self.tensor, self.of = torch.ops.mkldnn._reorder_linear_weight(weight.detach()), now
        return self.tensor

    def __reduce__(self):
        return Packed, ()   # opaque tensors can be neither copied nor saved


def linear(module, x, bias=None, gelu=False):
    """x (..., in) @ module.weight (out, in)^T + bias, then perhaps GELU while the numbers are still in the cache."""
    weight, packed = module.weight, getattr(module, "packed", None)   # a layer that came later, a shard say, has none
    learning = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)   # these kernels have no backward
    several = x.numel() > x.size(-1)   # one row is a matrix times a vector, for which the plain kernel is the faster one
    if packed and packable(weight) and x.dtype == weight.dtype and several and not learning:
        return torch.ops.mkldnn._linear_pointwise(x, packed(weight), bias, "gelu" if gelu else "none", [], "tanh")
    y = F.linear(x, weight, bias)
    return F.gelu(y, approximate="tanh") if gelu else y


class FastLinear(nn.Linear):
    def forward(self, x):
        return linear(self, x, self.bias)


class FastMLP(MLP):
    def forward(self, x):
        return self.c_proj(linear(self.c_fc, x, self.c_fc.bias, gelu=True))


class FastGPT(GPT):
    def unembed(self, x):
        return linear(self.wte, x)

    def varlen(self, flat, layer, q, k, v):
        """
        Flat's loop over requests, attention="varlen", with torch's fused attention in place of Head and with fewer
        calls from Python. flat: the layout; q, k, v (nh, N, hs) -> (nh, N, hs). Nothing of the past is copied.
        """
        sizes = [n for _, n in flat.plan]
        kvs = [request.kv for request, _ in flat.plan]
        new_k, new_v = k.split(sizes, dim=1), v.split(sizes, dim=1)
        slots_k, slots_v, outs = [], [], []
        for kv, start, n, one_k, one_v in zip(kvs, flat.starts, sizes, new_k, new_v):
            if layer not in kv.k:   # its first write
                kv.write(layer, start, one_k, one_v)
            slots_k.append(kv.k[layer].narrow(1, start, n))
            slots_v.append(kv.v[layer].narrow(1, start, n))
        torch._foreach_copy_(slots_k, new_k)
        torch._foreach_copy_(slots_v, new_v)
        for kv, start, end, one_q in zip(kvs, flat.starts, flat.ends, q.unsqueeze(0).split(sizes, dim=2)):
            n, mask = end - start, None
            if n > 1 and start:   # a chunk behind a past; is_causal would align its triangle to the top left
                mask = torch.ones(n, end, dtype=torch.bool, device=q.device).tril(start)
            keys, values = kv.k[layer].narrow(1, 0, end).unsqueeze(0), kv.v[layer].narrow(1, 0, end).unsqueeze(0)
            outs.append(F.scaled_dot_product_attention(one_q, keys, values, attn_mask=mask, is_causal=n > 1 and not start))
        return torch.cat(outs, dim=2).squeeze(0)


FAST = {nn.Linear: FastLinear, MLP: FastMLP, GPT: FastGPT}


def optimize(model):
    """Turns a GPT into a FastGPT in place, and packs its weights now rather than at their first use."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.packed = Packed()
            if packable(module.weight) and module is not model.wpe:
                module.packed(module.weight)
        module.__class__ = FAST.get(type(module), type(module))
