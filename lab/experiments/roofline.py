"""
What the machine can do, and the least time that a schedule needs on it.

    seconds  =  sum over passes of  max(floating point operations / peak,
                                        bytes of weights, keys and values / bandwidth)

An operation counts if a token's logits need it. In the last block, tokens that are not sampled from
need only their keys and values. Claim R7 says which of the two takes longer.
"""
import torch
from torch.nn import functional as F

from lab.compiled import native
from lab.experiments.results import median_seconds


@torch.inference_mode()
def machine_peaks(fast):
    """
    {"peak", "bandwidth"}: operations and bytes per second. The first is that of the fastest of
    several large multiplications, torch's and those of a snapshot.
    """
    layer, device = fast.h[0].mlp.c_fc, fast.device
    ways = [lambda x: F.linear(x, layer.weight, layer.bias)]
    if hasattr(fast, "uses"):
        packed = native.pack(layer.weight)
        ways.append(lambda x: native.multiply(x, packed, layer.out_features, layer.bias))
    speeds = []
    for rows in (256, 512, 1024, 2048):
        x = torch.randn(rows, layer.in_features, device=device).to(layer.weight.dtype)
        speeds += [2 * rows * layer.weight.numel() / median_seconds(lambda: multiply(x), device)
                   for multiply in ways]
    x = torch.ones(2**27, device=device)
    return {"peak": max(speeds), "bandwidth": x.nbytes / median_seconds(x.sum, device)}


def roofline(model, trace, peak, bandwidth):
    """The least seconds for the passes of a ragged trace."""
    L, attn, size = len(model.h), model.h[0].attn, model.wte.weight.element_size()
    Q, K = len(attn.query.weight), len(attn.key.weight)   # features of a query; of a key
    block = sum(p.numel() for p in model.h[0].parameters() if p.dim() == 2)
    kv, vocabulary = 2 * attn.key.weight.numel(), model.wte.weight.numel()
    sampled = {(step, request.name) for request in trace.requests for step in request.token_steps}
    total = 0.0
    for p in trace.passes:
        tokens = sum(n for _, _, n in p.work)
        # keys that each sampled token sees
        seen = [first + n for name, first, n in p.work if (p.step, name) in sampled]
        keys = sum(first + 2 * n for _, first, n in p.work)   # all are read, the new ones written
        multiplied = ((L - 1) * block + kv) * tokens + (block - kv + vocabulary) * len(seen)
        operations = 2 * multiplied + 4 * Q * ((L - 1) * p.useful_scores + sum(seen))
        memory = size * (L * block + vocabulary * bool(seen) + 2 * L * K * keys)
        total += max(operations / peak, memory / bandwidth)
    return total
