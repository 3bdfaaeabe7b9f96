"""
The experiments of the prepacking paper (source P), run live on this machine.

Prefill only: each prompt yields one token. The ways to batch are the paper's (claim P5), with
ragged beside them.

The lengths are synthetic, shaped like the paper's datasets; `--prompts FILE` takes the lengths of
real prompts. Weights are random. Times are medians of runs in turn. Memory is counted: the bytes of
all tensors alive at the same time, except the weights.
"""
import bisect
import math
import random
import statistics
import time
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from experiments import results
from experiments.results import Table
from generate_naive import StaticBatch
from generate_prepacked import Packed, first_fit_decreasing
from generate_ragged import Flat
from loading.load import load
from loading.workload import read_prompts
from model import GPT, GPTConfig, sample
from request import Request, prepare
from toolbox.trace import synchronize

FLAGS = {
    "--prompts": dict(metavar="FILE", help="take the lengths of these prompts in the first table, "
                                           "instead of synthetic ones"),
    "--model": dict(default="builtin", help="the model whose tokenizer counts them"),
    "--memory": dict(type=float, default=1.0, metavar="GB",
                     help="the limit of the largest batches")}
CONTEXT = 512
SHOTS = (120, 150, 190, 230, 280, 330, 390, 450)   # lengths of a few-shot question's examples
KINDS = {   # the paper's kinds of prompts, as distributions of lengths
    "dialogue": lambda rng: rng.lognormvariate(math.log(25), 0.7),
    "instructions": lambda rng: rng.lognormvariate(math.log(40), 1.0),
    "few-shot questions": lambda rng: rng.choice(SHOTS) + rng.lognormvariate(math.log(40), 0.5),
    "articles": lambda rng: rng.lognormvariate(math.log(350), 0.5),
    "uniform": lambda rng: rng.randint(1, CONTEXT),
}


def lengths_of(kind, n, seed=0):
    """n prompt lengths of a kind, 1..CONTEXT, the same every time."""
    rng = random.Random(f"{kind} {seed}")
    return [min(max(round(KINDS[kind](rng)), 1), CONTEXT) for _ in range(n)]


def requests_of(lengths, vocab_size=97):
    """Requests for one token, with prompts of these lengths."""
    return [Request([(7 * i + 3 * j) % vocab_size for j in range(n)], 1, name=f"r{i}")
            for i, n in enumerate(lengths)]


# --- the ways to batch: requests -> groups, one forward pass each, and the layout of a group ------

def in_order(requests, k):
    return [requests[i:i + k] for i in range(0, len(requests), k)]


def by_length(requests, k):
    return in_order(sorted(requests, key=lambda request: len(request.prompt)), k)


def by_row(requests, k):
    lengths = [len(request.prompt) for request in requests]
    rows = first_fit_decreasing(lengths, max(lengths))
    return [[requests[i] for row in rows[j:j + k] for i in row] for j in range(0, len(rows), k)]


def whole(layout):
    """A layout of whole prompts, made from requests instead of a plan."""
    return lambda requests, device: layout([(r, len(r.prompt)) for r in requests], device)


METHODS = {
    "full batching": (in_order, StaticBatch),           # k prompts, padded to the longest
    "length-ordered": (by_length, StaticBatch),         # all prompts sorted first, then the same
    "prepacking, batch": (in_order, whole(Packed)),     # k prompts, packed into r <= k rows
    "prepacking, dataset": (by_row, whole(Packed)),     # all prompts packed first, then k rows
    "ragged": (in_order, whole(Flat)),                  # k prompts, no rows
}


@torch.inference_mode()
def prefill(model, method, lengths, k):
    """
    Prefills prompts of these lengths. Returns the seconds of all forward passes (unpacking
    included), the sum of all prompts' TTFT, each from the layout of its batch on, and the slots.
    """
    group, layout = METHODS[method]
    seconds, ttft, slots = 0.0, 0.0, 0
    for requests in group(prepare(requests_of(lengths), model.config), k):
        start = time.perf_counter()
        batch = layout(requests, model.device)
        before = time.perf_counter()
        logits = model(batch.tokens, batch.positions, batch.attend, batch.wanted)
        synchronize(model.device)
        seconds += time.perf_counter() - before
        sample(logits, batch.sampled)
        ttft += (time.perf_counter() - start) * len(requests)
        slots += batch.tokens.numel()
    return seconds, ttft, slots


def time_methods(model, lengths, k, repeats, methods=METHODS):
    """
    {method: milliseconds of prefill per prompt, mean TTFT within a batch, share of useful slots},
    medians over `repeats` runs in turn.
    """
    runs = results.in_turn(methods, lambda method: prefill(model, method, lengths, k), repeats)
    found = {}
    for method, taken in runs.items():
        seconds, ttft, slots = map(statistics.median, zip(*taken))
        found[method] = {"prefill_ms": seconds / len(lengths) * 1e3,
                         "ttft_ms": ttft / len(lengths) * 1e3, "useful": sum(lengths) / slots}
    return found


# --- memory ---------------------------------------------------------------------------------------

class Bytes(TorchDispatchMode):
    """Counts the bytes of all tensors made inside that are still alive: `now`, and their `peak`."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.alive = 0, 0, weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in filter(torch.is_tensor, tree_leaves(out)):
            storage = tensor.untyped_storage()   # views share it
            if storage not in self.alive:
                self.alive.add(storage)
                self.add(storage.nbytes())
                weakref.finalize(storage, self.add, -storage.nbytes())
        return out

    def add(self, size):
        self.now += size
        self.peak = max(self.peak, self.now)


@torch.inference_mode()
def peak_bytes(model, method, lengths):
    """The peak of memory while one batch of these prompts prefills, weights excluded."""
    group, layout = METHODS[method]
    one_batch, = group(prepare(requests_of(lengths), model.config), len(lengths))
    with Bytes() as counted:
        batch = layout(one_batch, model.device)
        model(batch.tokens, batch.positions, batch.attend, batch.wanted)
    return counted.peak


def largest_batch(config, method, kind, limit, most=1024):
    """The largest k, up to `most`, whose prefill stays within `limit` bytes, by bisection."""
    with torch.device("meta"):   # tensors with sizes but no contents
        model = GPT(config)
    lengths = lengths_of(kind, most)
    return bisect.bisect_right(range(1, most + 1), limit,
                               key=lambda k: peak_bytes(model, method, lengths[:k]))


# --- the experiments ------------------------------------------------------------------------------

def packing_speedup(model, lengths, k, repeats):
    """The speedup of packing a batch over padding it: (prefill, ttft)."""
    f = time_methods(model, lengths, k, repeats, ("full batching", "prepacking, batch"))
    padded, packed = f["full batching"], f["prepacking, batch"]
    return padded["prefill_ms"] / packed["prefill_ms"], padded["ttft_ms"] / packed["ttft_ms"]


def by_batch_size(model, sizes, repeats):
    """The speedup of packing a batch of k, for each k: {kind: [(k, prefill, ttft), ...]}."""
    return {kind: [(k, *packing_speedup(model, lengths_of(kind, max(2 * k, 16)), k, repeats))
                   for k in sizes] for kind in ("uniform", "instructions")}


def predictors(model, prompts, repeats):
    """
    {k: [(r / k, m - L / k, speedup of prefill), ...]} for every fourth batch of k out of `prompts`
    prompts. r rows, m the longest prompt, L all tokens of the batch.
    """
    lengths, found = lengths_of("uniform", prompts), {16: [], 32: []}
    for k, points in found.items():
        for i in range(0, prompts - k + 1, 4 * k):
            batch = lengths[i:i + k]
            r = len(first_fit_decreasing(batch, max(batch)))
            points.append((r / k, max(batch) - sum(batch) / k,
                           packing_speedup(model, batch, k, repeats)[0]))
    return found


def by_rows(model, sizes, repeats):
    """Seconds of a prefill of k prompts of one length, for each k: [(k, seconds), ...]."""
    points = []
    for k in sizes:
        f = time_methods(model, [min(128, CONTEXT)] * k, k, repeats, ["full batching"])
        points.append((k, f["full batching"]["prefill_ms"] * k / 1e3))
    return points


def by_memory(gigabytes, most):
    """The largest batch that fits: {kind: {method: k}}. 4 layers as wide as GPT-2's, float32."""
    config = GPTConfig(block_size=CONTEXT, n_layer=4)
    return {kind: {method: largest_batch(config, method, kind, gigabytes * 1e9, most)
                   for method in [*METHODS][::2]}
            for kind in ("dialogue", "instructions", "articles", "uniform")}


def kinds_of(args):
    """{kind: prompt lengths}, synthetic or of a file's prompts."""
    if not args.prompts:
        return {kind: lengths_of(kind, 32 if args.quick else 64) for kind in KINDS}
    _, tokenizer = load(args.model)
    texts = [prompt["prompt"] for prompt in read_prompts(args.prompts)]
    tokens = [len(tokenizer.encode(text, disallowed_special=())) for text in texts]
    return {args.prompts: [min(max(n, 1), CONTEXT) for n in tokens]}


def measure(args, device, dtype):
    """The prepacking paper's experiments (source P), and ragged batching beside its methods."""
    if not args.memory > 0:
        raise ValueError(f"--memory must be above 0 GB, not {args.memory}")
    kinds, quick, repeats = kinds_of(args), args.quick, 1 if args.quick else 3
    torch.manual_seed(0)
    model, small = (GPT(GPTConfig(block_size=CONTEXT, **sizes)).to(device, dtype)
                    for sizes in (dict(n_layer=2, n_head=6, n_embd=384),
                                  dict(vocab_size=1024, n_layer=1, n_head=4, n_embd=256)))
    sizes = (1, 4, 16) if quick else (1, 2, 4, 8, 16, 32, 64)
    return {"lengths": kinds, "repeats": repeats, "memory": args.memory,
            "model": f"{model.config.n_layer} layers, {model.config.n_embd} wide",
            "kinds": {kind: time_methods(model, lengths, 16, repeats)
                      for kind, lengths in kinds.items()},
            "batch_size": by_batch_size(model, sizes, repeats),
            "predictors": predictors(small, 640 if quick else 5000, repeats),
            "latency": by_rows(model, sizes, repeats),
            "largest": by_memory(args.memory, 64 if quick else 1024)}


def kinds_table(result):
    names, rows = [*METHODS][1:], []
    for kind, by in result["kinds"].items():
        lengths, full = result["lengths"][kind], by["full batching"]
        rows.append([kind, f"{statistics.mean(lengths):.0f} / {max(lengths)}",
                     f"{full['useful']:.0%}",
                     *(f"{full['prefill_ms'] / by[name]['prefill_ms']:.2f}×" for name in names)])
    how = "prefill, k = 16, times as fast as padding to the longest"
    return Table(["", "tokens, mean / longest", "useful slots, padded", *names], rows, how, how)


def tables(result):
    k = [k for k, _ in result["latency"]]
    yield kinds_table(result)
    yield Table(["k", *k], [[kind, *(f"{prefill:.2f}×" for _, prefill, _ in points)]
                            for kind, points in result["batch_size"].items()],
                title="speedup of prefill by prepacking a batch of k")
    rows = []
    for size, points in result["predictors"].items():
        *causes, speedups = zip(*points)
        rows.append([size, len(points), f"{statistics.mean(speedups):.2f}×",
                     *(f"{statistics.correlation(cause, speedups):+.2f}" for cause in causes)])
    yield Table(["k", "batches", "mean speedup", "correlation with r/k", "with m - L/k"], rows,
                title="what predicts the speedup: uniform lengths, 1 layer, 256 wide")
    yield Table(["k", *k], [["s", *(f"{seconds:.3f}" for _, seconds in result["latency"])]],
                title="seconds of a prefill of k prompts of 128 tokens")
    yield Table(["", *next(iter(result["largest"].values()))],
                [[kind, *(f"{n} ({n / by['full batching']:.1f}×)" for n in by.values())]
                 for kind, by in result["largest"].items()],
                title=f"the largest k whose prefill fits in {result['memory']:g} GB, weights "
                      "excluded; 4 layers as wide as GPT-2's (768), float32")
