"""
What the machine can do, and the least time that a schedule needs on it.

    seconds  =  sum over passes of  max(floating point operations / peak,
                                        bytes of weights, keys and values / bandwidth)

An operation counts if a token's logits need it. In the last block, tokens that are not sampled from
need only their keys and values. Claim R7 says which of the two takes longer.
"""
from functools import partial

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
    ways = [partial(F.linear, weight=layer.weight, bias=layer.bias)]
    if hasattr(fast, "uses"):
        packed = native.pack(layer.weight)
        ways.append(partial(native.multiply, packed=packed, n=layer.out_features, bias=layer.bias))
    speeds = []
    for rows in (256, 512, 1024, 2048):
        x = torch.randn(rows, layer.in_features, device=device).to(layer.weight.dtype)
        for multiply in ways:
            seconds = median_seconds(partial(multiply, x), device)
            speeds.append(2 * rows * layer.weight.numel() / seconds)
    x = torch.ones(2**27, device=device)
    return {"peak": max(speeds), "bandwidth": x.nbytes / median_seconds(x.sum, device)}


def roofline(model, trace, peak, bandwidth):
    """The least seconds for the passes of a ragged trace."""
    sampled = set()   # (step, name) of the requests that get a token
    for request in trace.requests:
        sampled.update((step, request.name) for step in request.token_steps)
    total = 0.0
    for p in trace.passes:
        seen = [first + n for name, first, n in p.work if (p.step, name) in sampled]
        operations, memory = needs(model, p, seen)
        total += max(operations / peak, memory / bandwidth)
    return total


def needs(model, p, seen):
    """
    (operations, bytes) of a pass.

    seen: of each token that is sampled from, the keys that it sees
    """
    layers, attention = len(model.h), model.h[0].attn
    query_size, key_size = len(attention.query.weight), len(attention.key.weight)   # features
    block = sum(weight.numel() for weight in model.h[0].parameters() if weight.dim() == 2)
    keys_and_values = 2 * attention.key.weight.numel()
    vocabulary = model.wte.weight.numel()

    tokens = sum(n for _, _, n in p.work)
    multiplied = ((layers - 1) * block + keys_and_values) * tokens
    multiplied += (block - keys_and_values + vocabulary) * len(seen)   # of the last block
    scores = (layers - 1) * p.useful_scores + sum(seen)
    operations = 2 * multiplied + 4 * query_size * scores

    numbers = layers * block
    if seen:
        numbers += vocabulary
    keys = sum(first + 2 * n for _, first, n in p.work)   # all are read, the new ones written
    numbers += 2 * layers * key_size * keys
    return operations, numbers * model.wte.weight.element_size()
