"""
Linear layers with their weights in the order in which a kernel multiplies.

A forward pass of a few tokens, which is what decoding is, does little else than read the weights.
`nn.Linear` takes them in the order in which they are trained, and on a CPU reads them slowly. Two
kernels want them reordered once: ours (native.cpp), and where that cannot be built oneDNN's, which
torch has under two private names. With 2 to 64 rows they are up to twice as fast, with the same
multiplications. Where both are missing, or the model is not in float32 on a CPU, everything runs
as before.
"""
from functools import cache

import torch
from torch import nn
from torch.nn import functional as F

from kernels import native
from model import MLP


@cache
def has_onednn():
    """Whether this torch, on this processor, has oneDNN's two kernels, and they multiply right."""
    try:
        x, bias = torch.arange(6.0).view(2, 3) - 3, torch.arange(4.0)
        weight = torch.arange(12.0).view(4, 3) / 6
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight)
        y = torch.ops.mkldnn._linear_pointwise(x, reordered, bias, "gelu", [], "tanh")
        expected = F.gelu(F.linear(x, weight, bias), approximate="tanh")
        return torch.allclose(y, expected, atol=1e-5)
    except (AttributeError, RuntimeError, TypeError):   # no such op, no oneDNN, another signature
        return False


class ReorderedWeight:
    """
    A weight matrix in a kernel's order: reordered(weight) -> an opaque tensor. It follows its
    weight: after a change or a move the weight is reordered again at its next use, and so is that
    of a copied model. torch counts changes, but not those made through weight.data or to an
    inference tensor: after one of these, call optimize() again.
    """

    def __init__(self, compiled):
        self.tensor, self.version = None, None
        self.compiled = compiled   # for native.cpp's kernel, else for oneDNN's

    def serves(self, weight):
        """Whether there is a kernel for this weight: in float32 on a CPU."""
        return (weight.dtype == torch.float32 and weight.device.type == "cpu"
                and (self.compiled or has_onednn()))

    def __call__(self, weight):
        version = weight.data_ptr(), 0 if weight.is_inference() else weight._version
        if self.version != version:
            reorder = native.pack if self.compiled else torch.ops.mkldnn._reorder_linear_weight
            self.tensor = reorder(weight.detach())
            self.version = version
        return self.tensor

    def __reduce__(self):
        return ReorderedWeight, (self.compiled,)   # opaque tensors can be neither copied nor saved


def fused_linear(module, x, bias=None, gelu=False):
    """x (..., in) @ module.weight (out, in)^T + bias; with GELU while the result is still hot."""
    weight = module.weight
    reordered = getattr(module, "reordered", None)   # a shard that came later has none
    learning = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    plain = (reordered is None or not reordered.serves(weight) or x.dtype != weight.dtype
             or learning)                            # the kernels have no backward
    if not plain and reordered.compiled:
        return native.multiply(x, reordered(weight), weight.size(0), bias, gelu)
    if plain or x.numel() == x.size(-1):             # one row: oneDNN is slower than torch
        y = F.linear(x, weight, bias)
        return F.gelu(y, approximate="tanh") if gelu else y
    after = "gelu" if gelu else "none"
    return torch.ops.mkldnn._linear_pointwise(x, reordered(weight), bias, after, [], "tanh")


class FastLinear(nn.Linear):
    def forward(self, x):
        return fused_linear(self, x, self.bias)


class FastMLP(MLP):
    def forward(self, x):
        return self.c_proj(fused_linear(self.c_fc, x, self.c_fc.bias, gelu=True))
