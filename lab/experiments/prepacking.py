"""
The experiments of the prepacking paper (source P), run live on this machine.

Prefill only: each prompt yields one token. The ways to batch are the paper's (claim P5), with
ragged beside them. The lengths are synthetic, shaped like the paper's datasets. Weights are random.
Times are medians of runs in turn.
"""
import math
import random
import statistics

import torch

from beyond.prepacked import Packed, first_fit_decreasing
from cache import KV
from generate_naive import StaticBatch, cache_for
from generate_ragged import Flat
from lab.experiments import results
from lab.experiments.results import Table
from lab.views.report import totals
from model import GPT, GPTConfig
from request import Request, prepare
from toolbox.trace import Trace

CONTEXT = 512
CONFIG = GPTConfig(block_size=CONTEXT, n_layer=2, n_head=6, n_embd=384)
MODEL = f"{CONFIG.n_layer} layers, {CONFIG.n_embd} wide, random weights"
SHOTS = (120, 150, 190, 230, 280, 330, 390, 450)   # lengths of a few-shot question's examples
KINDS = {   # the paper's kinds of prompts, as distributions of lengths
    "dialogue": lambda rng: rng.lognormvariate(math.log(25), 0.7),
    "instructions": lambda rng: rng.lognormvariate(math.log(40), 1.0),
    "few-shot questions": lambda rng: rng.choice(SHOTS) + rng.lognormvariate(math.log(40), 0.5),
    "articles": lambda rng: rng.lognormvariate(math.log(350), 0.5),
    "uniform": lambda rng: rng.randint(1, CONTEXT),
}


def lengths_of(kind, n):
    """n prompt lengths of a kind, 1..CONTEXT, the same every time."""
    rng = random.Random(f"{kind} 0")
    return [min(max(round(KINDS[kind](rng)), 1), CONTEXT) for _ in range(n)]


# --- the ways to batch: requests -> groups, one forward pass each, and the layout of a group ------

def in_order(requests, k):
    return [requests[i:i + k] for i in range(0, len(requests), k)]


def by_length(requests, k):
    return in_order(sorted(requests, key=lambda request: len(request.prompt)), k)


def by_row(requests, k):
    lengths = [len(request.prompt) for request in requests]
    rows = in_order(first_fit_decreasing(lengths, max(lengths)), k)
    return [[requests[i] for row in group for i in row] for group in rows]


def whole(layout):
    """A layout of whole prompts, made from requests instead of a plan."""
    def lay_out(requests, device):
        for request in requests:
            request.kv = KV(request.kv_tokens)
        return layout([(request, len(request.prompt)) for request in requests], device)

    return lay_out


def static(requests, device):
    return StaticBatch(requests, cache_for(requests), device)


METHODS = {
    "full batching": (in_order, static),                # k prompts, padded to the longest
    "length-ordered": (by_length, static),              # all prompts sorted first, then the same
    "prepacking, batch": (in_order, whole(Packed)),     # k prompts, packed into r <= k rows
    "prepacking, dataset": (by_row, whole(Packed)),     # all prompts packed first, then k rows
    "ragged": (in_order, whole(Flat)),                  # k prompts, no rows
}


# --- the experiment -------------------------------------------------------------------------------

@torch.inference_mode()
def prefill(model, method, lengths, k):
    """Prefills prompts of these lengths. Returns the trace."""
    group, layout = METHODS[method]
    prompts = [Request([(7 * i + 3 * j) % 97 for j in range(n)], 1, name=f"r{i}")
               for i, n in enumerate(lengths)]
    trace = Trace(method, prepare(prompts, model.config), model)
    for step, requests in enumerate(group(trace.requests, k)):
        batch = layout(requests, model.device)
        with trace.forward_pass(step, batch):
            model(batch.tokens, batch.positions, batch.attend, batch.wanted)
    return trace


def measure(args, device, dtype):
    """The prepacking paper's experiments (source P), and ragged batching beside its methods."""
    torch.manual_seed(0)
    model = GPT(CONFIG).to(device, dtype)
    kinds = {kind: lengths_of(kind, 32 if args.quick else 64) for kind in KINDS}
    found = {}
    for kind, lengths in kinds.items():
        runs = results.in_turn(METHODS, lambda method: prefill(model, method, lengths, k=16),
                               1 if args.quick else 3)
        found[kind] = {method: {   # milliseconds per prompt, share of useful slots
            "prefill_ms": 1e3 / len(lengths) * statistics.median(
                sum(p.seconds for p in trace.passes) for trace in taken),
            "useful": sum(lengths) / totals(taken[0])["slots"]} for method, taken in runs.items()}
    return {"lengths": kinds, "kinds": found}


def speedups(result):
    """{kind: {method: times as fast as full batching}}"""
    return {kind: {method: by["full batching"]["prefill_ms"] / by[method]["prefill_ms"]
                   for method in METHODS if method != "full batching"}
            for kind, by in result["kinds"].items()}


def table(result):
    rows = []
    for kind, times in speedups(result).items():
        lengths, padded = result["lengths"][kind], result["kinds"][kind]["full batching"]
        rows.append([kind, f"{statistics.mean(lengths):.0f} / {max(lengths)}",
                     f"{padded['useful']:.0%}", *(f"{by:.2f}×" for by in times.values())])
    head = ["", "tokens, mean / longest", "useful slots, padded", *[*METHODS][1:]]
    return Table(head, rows, "prefill, k = 16, times as fast as padding to the longest")
