"""
The experiments of the prepacking paper (source P), run live on this machine.

Prefill only: each prompt yields one token. The ways to batch are the paper's (claim P5), and ragged beside them:

    full batching          k prompts as they come, padded to the longest
    length-ordered         all prompts sorted by length first, then as above
    prepacking, batch      k prompts as they come, packed into r <= k rows
    prepacking, dataset    all prompts packed first, then k rows at a time
    ragged                 k prompts as they come, no rows

The lengths are synthetic, shaped like the paper's kinds of data; `--prompts FILE` takes the lengths of real ones. Weights are random,
times are medians of runs that took turns, and memory is counted: bytes of all tensors alive at the same time, weights aside.

    python -m toolbox.prepacking --quick
    python -m toolbox.prepacking --json prepacking.json --plot prepacking.png
"""
import json
import math
import random
import statistics
import sys
import time
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cache import Flat
from generate_naive import StaticBatch
from generate_prepacked import Packed, first_fit_decreasing
from model import GPT, GPTConfig, sample
from scheduler import Request, prepare
from toolbox import plots
from toolbox.cli import guarded, measuring_parser, measuring_place
from toolbox.load import load
from toolbox.report import aligned
from toolbox.workload import read_prompts

CONTEXT = 512
KINDS = {   # what the paper took its prompts from, as distributions of lengths
    "dialogue": lambda rng: rng.lognormvariate(math.log(25), 0.7),
    "instructions": lambda rng: rng.lognormvariate(math.log(40), 1.0),
    "few-shot questions": lambda rng: rng.choice((120, 150, 190, 230, 280, 330, 390, 450)) + rng.lognormvariate(math.log(40), 0.5),
    "articles": lambda rng: rng.lognormvariate(math.log(350), 0.5),
    "uniform": lambda rng: rng.randint(1, CONTEXT),
}


def lengths_of(kind, n, seed=0):
    """n prompt lengths of a kind, 1..CONTEXT, the same every time."""
    rng = random.Random(f"{kind} {seed}")
    return [min(max(round(KINDS[kind](rng)), 1), CONTEXT) for _ in range(n)]


def requests_of(lengths, vocab_size=97):
    """Prompts of these lengths that ask for one token."""
    return [Request([(7 * i + 3 * j) % vocab_size for j in range(n)], 1, name=f"r{i}") for i, n in enumerate(lengths)]


# --- the ways to batch: each turns requests into a list of groups, a forward pass each, and a layout for them --------------

def in_turn(requests, k):
    return [requests[i:i + k] for i in range(0, len(requests), k)]


def by_length(requests, k):
    return in_turn(sorted(requests, key=lambda request: len(request.prompt)), k)


def by_row(requests, k):
    lengths = [len(request.prompt) for request in requests]
    rows = first_fit_decreasing(lengths, max(lengths))
    return [[requests[i] for row in rows[j:j + k] for i in row] for j in range(0, len(rows), k)]


def whole(requests):
    return [(request, len(request.prompt)) for request in requests]


METHODS = {
    "full batching": (in_turn, StaticBatch),
    "length-ordered": (by_length, StaticBatch),
    "prepacking, batch": (in_turn, lambda requests, device: Packed(whole(requests), device)),
    "prepacking, dataset": (by_row, lambda requests, device: Packed(whole(requests), device)),
    "ragged": (in_turn, lambda requests, device: Flat(whole(requests), device)),
}


@torch.inference_mode()
def prefill(model, method, lengths, k):
    """
    Prefills prompts of these lengths. Returns a list with a dict for each forward pass: its prompts, its slots, seconds of the pass itself
    (unpacking included) and seconds from laying it out to its prompts' first tokens.
    """
    group, layout = METHODS[method]
    passes = []
    for requests in group(prepare(requests_of(lengths), model.config), k):
        start = time.perf_counter()
        batch = layout(requests, model.device)
        before = time.perf_counter()
        logits = model(batch.tokens, batch.positions, batch.attend, batch.rows)
        if logits.is_cuda:
            torch.cuda.synchronize()
        after = time.perf_counter()
        sample(logits, batch.sampled)
        passes.append({"prompts": len(requests), "slots": batch.tokens.numel(), "prefill": after - before, "ttft": time.perf_counter() - start})
    return passes


def compare(model, lengths, k, repeats, methods=METHODS):
    """{method: milliseconds of prefill for each prompt, mean TTFT in its batch, share of slots that are useful}, medians over repeats in turn."""
    runs = {method: [] for method in methods}
    for _ in range(repeats + 1):
        for method in methods:
            runs[method].append(prefill(model, method, lengths, k))
    figures = {}
    for method, (_, *taken) in runs.items():   # the first one warms up
        figures[method] = {
            "prefill_ms": statistics.median(sum(p["prefill"] for p in passes) for passes in taken) / len(lengths) * 1e3,
            "ttft_ms": statistics.median(sum(p["ttft"] * p["prompts"] for p in passes) for passes in taken) / len(lengths) * 1e3,
            "useful": sum(lengths) / sum(p["slots"] for p in taken[0])}
    return figures


# --- memory -----------------------------------------------------------------------------------------------------------

class Bytes(TorchDispatchMode):
    """Counts the bytes of all tensors that are made inside and somebody still holds: `now`, and `peak`, the most there were."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.alive = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.count(tensor.untyped_storage())
        return out

    def count(self, storage):
        key, size = storage._cdata, storage.nbytes()   # views share a storage
        if key not in self.alive:
            self.alive.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.forget, key, size)

    def forget(self, key, size):
        self.alive.discard(key)
        self.now -= size


@torch.inference_mode()
def peak_bytes(model, method, lengths):
    """The most that is alive during the prefill of these prompts in one batch, caches and activations, weights aside."""
    requests = prepare(requests_of(lengths), model.config)
    group, layout = METHODS[method]
    with Bytes() as counted:
        for requests in group(requests, len(requests)):
            batch = layout(requests, model.device)
            model(batch.tokens, batch.positions, batch.attend, batch.rows)
    return counted.peak


def largest_batch(config, method, kind, limit, most=1024):
    """The largest k whose prefill stays within `limit` bytes. On the meta device, whose tensors have sizes and no contents."""
    with torch.device("meta"):
        model = GPT(config)
    lengths = lengths_of(kind, most)
    low, high = 0, 1
    while high <= most and peak_bytes(model, method, lengths[:high]) <= limit:
        low, high = high, 2 * high
    while high - low > max(1, low // 16):   # to 6%
        middle = (low + high) // 2
        if middle <= most and peak_bytes(model, method, lengths[:middle]) <= limit:
            low = middle
        else:
            high = middle
    return low


# --- the experiments ----------------------------------------------------------------------------------------------------

def by_kind(model, kinds, k, repeats):
    """Each method on each kind of prompts; `kinds`: {name: lengths}."""
    return {kind: compare(model, lengths, k, repeats) for kind, lengths in kinds.items()}


def by_batch_size(model, sizes, repeats, kinds=("uniform", "instructions")):
    """Speedup of packing a batch over padding it, for k = 1, 2, 4, ...: {kind: [(k, prefill, ttft), ...]}."""
    found = {}
    for kind in kinds:
        found[kind] = []
        for k in sizes:
            figures = compare(model, lengths_of(kind, max(2 * k, 16)), k, repeats, ("full batching", "prepacking, batch"))
            full, packed = figures["full batching"], figures["prepacking, batch"]
            found[kind].append((k, full["prefill_ms"] / packed["prefill_ms"], full["ttft_ms"] / packed["ttft_ms"]))
    return found


def predictors(model, k, prompts, repeats, every=4, kind="uniform"):
    """For every fourth batch of k out of `prompts` lengths: (r / k, m - L / k, speedup of its prefill)."""
    lengths, points = lengths_of(kind, prompts), []
    for i in range(0, prompts - k + 1, k * every):
        batch = lengths[i:i + k]
        figures = compare(model, batch, k, repeats, ("full batching", "prepacking, batch"))
        rows = len(first_fit_decreasing(batch, max(batch)))
        points.append((rows / k, max(batch) - sum(batch) / k, figures["full batching"]["prefill_ms"] / figures["prepacking, batch"]["prefill_ms"]))
    return points


def by_rows(model, sizes, length, repeats):
    """Seconds of a prefill of k prompts of one length, for each k."""
    return [(k, compare(model, [length] * k, k, repeats, ("full batching",))["full batching"]["prefill_ms"] * k / 1e3) for k in sizes]


# --- the command --------------------------------------------------------------------------------------------------------

def show(title, head, rows):
    print(f"\n{title}")
    for line in aligned([head, *rows]):
        print(f"  {line}", flush=True)


def run(args):
    if not args.memory > 0:
        raise ValueError(f"--memory must be above 0 GB, not {args.memory}")
    if args.prompts:
        _, tokenizer = load(args.model)
        texts = [prompt["prompt"] for prompt in read_prompts(args.prompts)]
        kinds = {args.prompts: [min(max(len(tokenizer.encode(text, disallowed_special=())), 1), CONTEXT) for text in texts]}
    else:
        kinds = {kind: lengths_of(kind, 32 if args.quick else 64) for kind in KINDS}
    (device, dtype, where), quick = measuring_place(args), args.quick
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=CONTEXT, n_layer=2, n_head=6, n_embd=384)).to(device, dtype).requires_grad_(False)
    small = GPT(GPTConfig(block_size=CONTEXT, vocab_size=1024, n_layer=1, n_head=4, n_embd=256)).to(device, dtype).requires_grad_(False)
    repeats = 1 if quick else 3
    result = {"where": where, "lengths": kinds, "model": f"{model.config.n_layer} layers, {model.config.n_embd} wide"}
    print(f"{result['where']}; {result['model']}, random weights" + ("" if args.prompts else "; synthetic lengths"))

    result["kinds"] = by_kind(model, kinds, 16, repeats)
    for kind, figures in result["kinds"].items():
        full = figures["full batching"]
        show(f"{kind}, {len(kinds[kind])} prompts, mean length {statistics.mean(kinds[kind]):.0f}, longest {max(kinds[kind])}, k = 16",
             ("", "slots useful", "prefill ms/prompt", "speedup", "TTFT ms", "speedup"),
             [(method, f"{f['useful']:.0%}", f"{f['prefill_ms']:.1f}", f"{full['prefill_ms'] / f['prefill_ms']:.2f}x", f"{f['ttft_ms']:.0f}",
               f"{full['ttft_ms'] / f['ttft_ms']:.2f}x") for method, f in figures.items()])
    print("  the paper: prepacking 1.6x to 3.5x at k = 16 (prefill and TTFT)")

    sizes = (1, 4, 16) if quick else (1, 2, 4, 8, 16, 32, 64)
    result["batch_size"] = by_batch_size(model, sizes, repeats)
    show("speedup of prefill by prepacking a batch of k", ("k", *map(str, sizes)),
         [(kind, *(f"{speedup:.2f}x" for _, speedup, _ in points)) for kind, points in result["batch_size"].items()])
    print("  the paper: up to 4.5x (prefill) and 6x (TTFT) at larger k; k = 1 is r = k, the same runtime")

    result["predictors"], rows = {}, []
    for k in (16, 32):
        points = predictors(small, k, 640 if quick else 5000, repeats)
        result["predictors"][k] = points
        x, y, speedup = zip(*points)
        rows.append((k, len(points), f"{statistics.mean(x):.2f}", f"{statistics.mean(speedup):.2f}x", f"{statistics.correlation(x, speedup):+.2f}", f"{statistics.correlation(y, speedup):+.2f}"))
    show("what predicts the speedup: lengths uniform in 1..512, a small model (1 layer, 256 wide)",
         ("k", "batches", "mean r/k", "mean speedup", "correlation with r/k", "with m - L/k"), rows)
    print("  the paper: both predict it, about linearly")

    result["latency"] = by_rows(model, sizes, min(128, CONTEXT), repeats)
    show("seconds of a prefill of k prompts of 128 tokens", ("k", *map(str, sizes)), [("s", *(f"{s:.3f}" for _, s in result["latency"]))])
    print("  the paper: latency grows with k, hardware does not parallelise a batch for free")

    limit, result["largest"] = args.memory * 1e9, {}
    for kind in ("dialogue", "instructions", "articles", "uniform"):
        result["largest"][kind] = {method: largest_batch(GPTConfig(block_size=CONTEXT, n_layer=4), method, kind, limit, 64 if quick else 1024)
                                   for method in ("full batching", "prepacking, batch", "ragged")}
    show(f"the largest k whose prefill fits in {args.memory:g} GB, 4 layers as wide as GPT-2's (768) in float32, weights aside", ("", "full batching", "prepacking, batch", "ragged"),
         [(kind, *(f"{k} ({k / found['full batching']:.1f}x)" for k in found.values())) for kind, found in result["largest"].items()])
    print("  the paper: up to 16x larger batches")

    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file)
    if args.plot:
        plots.prepacking(result, args.plot)
        print(f"drawn in {args.plot}")
    return 0


def main(argv=None):
    p = measuring_parser("python -m toolbox.prepacking", __doc__, quick="fewer prompts and batches: about a minute")
    p.add_argument("--prompts", metavar="FILE", help="take the lengths of these prompts in the first table, instead of synthetic ones")
    p.add_argument("--model", default="builtin", help="whose tokenizer counts them")
    p.add_argument("--memory", type=float, default=1.0, metavar="GB", help="the limit of the last table")
    args = p.parse_args(argv)
    return guarded(p.prog, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
