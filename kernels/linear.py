"""
Linear layers with their weights in the order in which a kernel multiplies.

A forward pass of a few tokens, which is what decoding is, does little else than read the weights.
`nn.Linear` takes them in the order in which they are trained, and on a CPU reads them slowly. Two
kernels want them reordered once: ours (native.cpp), and where that cannot be built oneDNN's, which
torch has under two private names. With 2 to 64 rows they are up to twice as fast, with the same
multiplications. Where both are missing, or the model is not in float32 on a CPU, everything runs
as before.
"""
from collections import Counter
from functools import cache

import torch
from torch import nn
from torch.nn import functional as F

from kernels import native
from kernels.served import Modules, Watch, touched
from model import MLP


@cache
def has_onednn():
    """Whether this torch, on this processor, has oneDNN's two kernels, and they multiply right."""
    try:
        x, weight, bias = (torch.arange(n, dtype=torch.float32, device="cpu") for n in (6, 12, 4))
        x, weight = x.view(2, 3) - 3, weight.view(4, 3) / 6
        reordered = torch.ops.mkldnn._reorder_linear_weight(weight)
        y = torch.ops.mkldnn._linear_pointwise(x, reordered, bias, "gelu", [], "tanh")
        expected = F.gelu(F.linear(x, weight, bias), approximate="tanh")
        return torch.allclose(y, expected, atol=1e-5)
    except (AttributeError, RuntimeError, TypeError):   # no such op, no oneDNN, another signature
        return False


def version_of(weight):
    """Differs after every change of a weight that torch counts."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def vocabulary(model):
    """The module whose weight makes logits: the embedding where the two are tied."""
    return getattr(model, "lm_head", None) or model.wte


class ReorderedWeight:
    """
    A weight matrix in a kernel's order: reordered(weight) -> an opaque tensor. It follows its
    weight: after a change or a move the weight is reordered again at its next use, and so is that
    of a copied model. torch counts changes, but not those made through weight.data or to an
    inference tensor: after one of these, call optimize() again.
    """

    def __init__(self, compiled):
        self.compiled = compiled         # whether it may be for native.cpp's kernel
        self.forget()

    def forget(self):
        self.packed = None, None, None, None   # the weight, its memory, version, the reordered one

    @property
    def is_native(self):
        return self.compiled and native.works()

    def serves(self, weight):
        """Whether there is a kernel for this weight: in float32 on a CPU."""
        if weight.dtype == torch.float32 and weight.device.type == "cpu":
            return self.is_native or has_onednn()
        self.forget()
        return False

    def __call__(self, weight):
        of, _, version, packed = self.packed
        if of is not weight or version != version_of(weight):
            reorder = native.pack if self.is_native else torch.ops.mkldnn._reorder_linear_weight
            # As long as its memory is kept, no weight that was moved here can have its address
            memory, version = weight.detach(), version_of(weight)
            packed = reorder(memory)
            self.packed = weight, memory, version, packed   # at once: other threads may read it
        return packed

    def __reduce__(self):
        return ReorderedWeight, (self.compiled,)   # opaque tensors can be neither copied nor saved


def fused_linear(module, x, bias=None, gelu=False):
    """x (..., in) @ module.weight (out, in)^T + bias; with GELU while the result is still hot."""
    weight = module.weight
    reordered = getattr(module, "reordered", None)   # a shard that came later has none
    learning = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    plain = (reordered is None or not reordered.serves(weight)
             or (x.dtype, x.device, x.size(-1)) != (weight.dtype, weight.device, weight.size(1))
             or learning or autocast())   # the kernels have no backward
    if not plain and reordered.is_native:
        return native.multiply(x, reordered(weight), weight.size(0), bias, gelu)
    if plain or x.numel() == x.size(-1):             # one row: oneDNN is slower than torch
        y = F.linear(x, weight, bias)
        return F.gelu(y, approximate="tanh") if gelu else y
    after = "gelu" if gelu else "none"
    return torch.ops.mkldnn._linear_pointwise(x, reordered(weight), bias, after, [], "tanh")


def autocast():
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda", "mps")))


LINEAR = Watch((nn.Linear, "forward"))
ACTIVATION = Watch((MLP, "forward"), (nn.Linear, "forward"))   # it does not call a FastLinear


class FastLinear(nn.Linear):
    def forward(self, x):
        if LINEAR.first_changed():
            return super().forward(x)
        return fused_linear(self, x, self.bias)


class FastMLP(MLP):
    def forward(self, x):
        if ACTIVATION.first_changed() or type(self.c_fc) is not FastLinear or touched(self.c_fc):
            return super().forward(x)
        return self.c_proj(fused_linear(self.c_fc, x, self.c_fc.bias, gelu=True))


class Parts:
    """
    What is known about one optimized model: its modules, as served.py sees them, and where the
    compiled step finds its weights. Each is found out again when it changes.
    """

    def __init__(self):
        self.modules = self.versions = self.weights = self.refused = None
        self.passes = Counter()   # of its forward passes: threads of a compiled step, or why none

    def __reduce__(self):
        return Parts, ()   # a copied model has parts of its own

    def changed(self, model):
        """Why the kernels cannot serve the model, in words; None if they can."""
        modules = self.modules
        if modules is None or not modules.are_as_before():
            modules = self.modules = Modules(model, {nn.Linear: FastLinear, MLP: FastMLP})
        if torch.is_grad_enabled() and any(p.requires_grad for p in modules.parameters):
            return "it has no gradients"
        return modules.changed(model) or ("it has no autocast" if autocast() else None)

    def why_not_compiled(self, model):
        """None if native.step can compute the unchanged model by self.weights, or else why not."""
        if reason := native.why_not_now(vocabulary(model)):
            return reason
        frequencies = getattr(model, "frequencies", ())
        versions = [frequencies, *map(version_of, self.modules.parameters)]
        if versions != self.versions:
            self.versions, self.refused, named = versions, None, dict(
                model.named_parameters(remove_duplicate=False))   # shared ones, too
            try:
                self.weights = native.Weights(
                    named, model.h[0].attn.head_size, lambda name: model.get_submodule(
                        name.removesuffix(".weight")).reordered(named[name]),
                    model.ln_f.eps, frequencies)
            except ValueError as error:   # a weight that is not contiguous, for instance
                self.refused = str(error)
        return self.refused
