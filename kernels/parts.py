"""
The parts of an optimized model: whether they are those that the kernels were written for.

A kernel computes several modules at once and calls none of them. A hook, another activation, an
instance with a `forward` of its own: each shows only if the model then runs module by module.
"""
from collections import Counter
from itertools import chain
from operator import is_

import torch
from torch import nn

from kernels import native
from kernels.linear import FastLinear, FastMLP, autocast, version_of
from kernels.served import Watch, touched
from model import GPT, MLP, Block, MultiHeadAttention

FUNCTIONS = Watch(
    (GPT, "forward"), (Block, "forward"), (MultiHeadAttention, "forward"),
    (MultiHeadAttention, "split_heads"), (MLP, "forward"), (nn.Linear, "forward"),
    (nn.LayerNorm, "forward"), (nn.Embedding, "forward"), (FastLinear, "forward"),
    (FastMLP, "forward"))
BLOCK = {"": Block, "ln_1": nn.LayerNorm, "attn": MultiHeadAttention, "attn.query": FastLinear,
         "attn.key": FastLinear, "attn.value": FastLinear, "attn.c_proj": FastLinear,
         "ln_2": nn.LayerNorm, "mlp": FastMLP, "mlp.c_fc": FastLinear, "mlp.c_proj": FastLinear}
EVERYWHERE = (torch.nn.modules.module._global_forward_hooks,
              torch.nn.modules.module._global_forward_pre_hooks)


class Parts:
    """What has been found out about one model. It is found out again when a part changes."""

    def __init__(self):
        self.found = self.versions = self.weights = self.refused = None
        self.passes = Counter()   # of its forward passes: threads of a compiled step, or why none

    def __reduce__(self):
        return Parts, ()   # a copied model has parts of its own

    def changed(self, model):
        """What is not as the kernels know it, in words; None if all is."""
        found = self.found
        if found is None or not found.holds(model):
            found = self.found = Found(model)
        if found.wrong:
            return found.wrong
        if "forward" in vars(model):
            return "the model's forward has been replaced"
        if any(EVERYWHERE):
            return "a hook on all modules"
        if torch.is_grad_enabled() and any(p.requires_grad for p in found.parameters):
            return "it has no gradients"
        if autocast():
            return "it has no autocast"
        changed = FUNCTIONS.first_changed()
        return f"{changed} has been replaced" if changed else None

    def why_not_compiled(self, model):
        """None if native.step can compute the unchanged model by self.weights, or else why not."""
        reason = native.why_not_now(model.wte)
        if reason:
            return reason
        versions = [version_of(p) for p in self.found.parameters]
        if versions != self.versions:
            self.versions, self.weights, self.refused = versions, None, None
            named = dict(model.named_parameters())
            packs = {f"{name}.weight": module.reordered for name, module in model.named_modules()
                     if hasattr(module, "reordered")}
            try:
                self.weights = native.Weights(named, model.h[0].attn.head_size,
                                              lambda name: packs[name](named[name]))
            except ValueError as error:   # a weight that is not contiguous, for instance
                self.refused = str(error)
        return self.refused


class Found:
    """
    A look at all modules of a model. wrong: as wrong_with. A step takes a millisecond, so that
    `holds` must not take more than a few microseconds: it compares what can change, all at once.
    """

    def __init__(self, model):
        self.modules = [*model.modules()][1:]
        tables = self.tables = [*map(vars, self.modules)]
        self.children = [table["_modules"] for table in (vars(model), *tables) if table["_modules"]]
        self.weights = [table["_parameters"] for table in tables if table["_parameters"]]
        self.hooks = [table[name] for table in tables
                      for name in ("_forward_hooks", "_forward_pre_hooks")]
        self.settings = [(table, name) for table in tables
                         for name in ("eps", "max_norm", "layer", "head_size") if name in table]
        self.before, self.parameters = self.look()
        self.wrong, self.hooked = wrong_with(model), any(self.hooks)

    def look(self):
        parameters = [*chain.from_iterable(map(dict.values, self.weights))]
        return [*map(type, self.modules), *map(len, self.tables), *parameters,
                *chain.from_iterable(map(dict.values, self.children)),
                *[table[name] for table, name in self.settings]], parameters

    def holds(self, model):
        """Whether all is as it was, but for the numbers in the weights. Hooks: never."""
        now, _ = self.look()
        return (len(now) == len(self.before) and all(map(is_, now, self.before))
                and not self.hooked and not any(self.hooks))


def wrong_with(model):
    """The first module that is not as GPT and optimize() have made it, in words; or None."""
    expected = {"wte": nn.Embedding, "wpe": nn.Embedding, "h": nn.ModuleList, "ln_f": nn.LayerNorm}
    for i in range(len(model.h)):
        expected |= {f"h.{i}.{name}".rstrip("."): kind for name, kind in BLOCK.items()}
    modules = dict([*model.named_modules()][1:])
    for name in [*modules, *expected]:
        module = modules.get(name)
        if type(module) is not expected.get(name):
            return f"{name} is another module"
        if touched(module):
            return f"{name} has a hook, or a forward of its own"
        if any(p is None for p in module._parameters.values()):
            return f"{name} has no weight, or no bias"
    for i, block in enumerate(model.h):
        attn = block.attn
        heads = attn.query.weight.size(0) / attn.head_size
        if attn.layer != i or heads != model.config.n_head or "split_heads" in vars(attn):
            return f"h.{i}.attn has other heads, or another number"
    for name, module in modules.items():
        if type(module) is nn.LayerNorm and module.eps != 1e-5:
            return f"{name} has another eps"
        if type(module) is nn.Embedding and module.max_norm is not None:
            return f"{name} has a max_norm"
    return None
