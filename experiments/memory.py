"""
What pages are worth: the same requests with reserved memory (stage 6) and with pages (stage 7).

Three experiments:

    storm      eight requests in half the memory that they may need
    sharing    sixteen requests whose prompts begin alike, with and without shared prefixes
    scatter    the time of stage 7 against stage 6: with neighbouring pages, with scattered pages

    python -m experiments.memory
    python -m experiments.memory --json experiments/results/memory.json
"""
import random
import statistics
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from heapq import heapify
from itertools import pairwise

import generate_paged
import generate_ragged
from experiments import figures, results
from model import GPT, GPTConfig
from paging import Pages
from request import Request
from toolbox.cli import guarded, measuring_parser, measuring_place
from toolbox.load import load
from toolbox.report import aligned, latencies, mean, percentile, totals

# --- storm: what happens when memory runs out -----------------------------------------------------

def storm(model):
    """Memory for 128 tokens, reserved or in pages: {"reserve": trace, "pages": trace}."""
    vocab = model.config.vocab_size
    requests = [Request([(5 * i + 3 * j) % vocab for j in range(6)], 26, name=name, priority=i // 4)
                for i, name in enumerate("ABCDEFGH")]

    def copies():
        return [replace(request) for request in requests]

    traces = {"reserve": generate_ragged.generate(model, copies(), max_kv_tokens=128),
              "pages": generate_paged.generate(model, copies(), pages=16, page_size=8)}
    for name, trace in traces.items():
        trace.stage = f"{name}, {trace.counts.get('preemptions', 0)} preemptions"
    return traces


def storm_table(traces):
    rows = [("", "steps", "preemptions", "recomputed", "TTFT mean steps", "ITL p99 steps")]
    for name, trace in traces.items():
        t, waits = totals(trace), latencies(trace)
        rows.append((name, trace.passes[-1].step + 1, trace.counts.get("preemptions", 0),
                     f"{t['recomputed'] / t['slots']:.0%}", f"{mean(waits['ttft_steps']):.1f}",
                     f"{percentile(waits['itl_steps'], 99):.0f}"))
    return "\n".join(aligned(rows))


# --- sharing: equal beginnings are computed and kept once -----------------------------------------

def alike(vocab_size, requests=16, prefix=128, tail=16, new=16):
    """Requests whose prompts begin with the same tokens, as with one system prompt."""
    stream = random.Random(0)
    common = [stream.randrange(vocab_size) for _ in range(prefix)]
    return [Request(common + [stream.randrange(vocab_size) for _ in range(tail)], new, name=f"r{i}")
            for i in range(requests)]


@contextmanager
def watch(model):
    """Collects the pool before every forward pass: [{"tables", "kept", "number"}, ...]."""
    seen = []

    def hook(module, arguments):
        batch = arguments[2].__self__   # attend is a method of the layout
        seen.append({"tables": {request.name: list(request.kv) for request, _ in batch.plan},
                     "kept": set(batch.pages.kept), "number": batch.pages.number})

    handle = model.register_forward_pre_hook(hook)
    try:
        yield seen
    finally:
        handle.remove()


def sharing(model, repeats):
    """{True: figures with shared prefixes, False: without}; seconds are medians of runs in turn."""
    requests, found, seconds = alike(model.config.vocab_size), {}, {True: [], False: []}
    for repeat in range(repeats + 1):
        for share in seconds:
            with watch(model) as seen:
                trace = generate_paged.generate(
                    model, [replace(request) for request in requests], max_batch=16,
                    token_budget=64, pages=160, share_prefixes=share)
            if repeat:   # the first one warms up
                seconds[share].append(totals(trace)["seconds"])
            held = [{page for table in pool["tables"].values() for page in table} for pool in seen]
            found[share] = {"pages": max(map(len, held)), "passes": len(trace.passes),
                            "tokens": totals(trace)["slots"], **trace.counts}
    for share, taken in seconds.items():
        found[share]["seconds"] = statistics.median(taken)
    return found


def sharing_table(found):
    rows = [("", "pages held at most", "passes", "tokens computed", "seconds")]
    for share, f in found.items():
        rows.append((f"{'with' if share else 'without'} sharing", f["pages"], f["passes"],
                     f"{f['tokens']:,}", f"{f['seconds']:.2f}"))
    return "\n".join(aligned(rows))


# --- scatter: what it costs to read pages ---------------------------------------------------------

class ScatteredPages(Pages):
    """Hands out pages in random order, the worst case for reading them."""
    order = random.Random(0)

    def allocate(self, table, number):
        for _ in range(number):
            self.take(table, self.order.choice(self.free))

    def take(self, table, page):
        self.free.remove(page)
        heapify(self.free)
        self.holders[page] = 1
        table.append(page)


class NeighbouringPages(ScatteredPages):
    """
    The best case: the next page if it is free; a newcomer starts where it can grow most, in a pool
    with four times the room.
    """

    def __init__(self, number, size):
        super().__init__(4 * number, size)

    def allocate(self, table, number):
        for left in range(number, 0, -1):
            beside = table[-1] + 1 if table else None
            self.take(table, beside if beside in self.free else self.roomiest(left))

    def roomiest(self, number):
        """The first of `number` pages in the middle of the longest free stretch."""
        pages = sorted(self.free)
        edges = [i for i, (a, b) in enumerate(pairwise(pages), start=1) if b > a + 1]
        first, end = max(pairwise([0, *edges, len(pages)]), key=lambda part: part[1] - part[0])
        return pages[first] + max(end - first - number, 0) // 2


def paged(model, requests, books=Pages, **knobs):
    """Stage 7, with another class that keeps the pool's books."""
    before, generate_paged.Pages = generate_paged.Pages, books
    try:
        return generate_paged.generate(model, requests, **knobs)
    finally:
        generate_paged.Pages = before


WAYS = {
    "stage 6": lambda model, requests, **knobs: generate_ragged.generate(model, requests, **knobs),
    "neighbours": lambda model, requests, **knobs: paged(model, requests, NeighbouringPages,
                                                         pages=2048, **knobs),
    "scattered": lambda model, requests, **knobs: paged(model, requests, ScatteredPages,
                                                        pages=2048, **knobs)}


def scatter(model, requests, repeats):
    """{way: figures}: median seconds of runs in turn, and the median ratio to stage 6's."""
    seconds, copied = {way: [] for way in WAYS}, {}
    for repeat in range(repeats + 1):
        for way, generate in WAYS.items():
            copies, start = [replace(request) for request in requests], time.perf_counter()
            trace = generate(model, copies, max_batch=16, token_budget=64)
            if repeat:   # the first one warms up
                seconds[way].append(time.perf_counter() - start)
            copied[way] = totals(trace)["copied_bytes"]
    ratios = {way: [a / b for a, b in zip(taken, seconds["stage 6"])]
              for way, taken in seconds.items()}
    return {way: {"seconds": statistics.median(taken), "copied_bytes": copied[way],
                  "ratio": statistics.median(ratios[way]),
                  "spread": (max(ratios[way]) - min(ratios[way])) / 2}
            for way, taken in seconds.items()}


def mixed_lengths(vocab_size, requests=24):
    stream = random.Random(0)
    return [Request([stream.randrange(vocab_size) for _ in range(stream.randint(8, 120))],
                    stream.randint(8, 64), name=f"r{i}") for i in range(requests)]


def scatter_table(ratios):
    rows = [("", "stage 6", "neighbours", "scattered", "copied, neighbours", "copied, scattered")]
    for name, ways in ratios.items():
        rows.append((name, f"{ways['stage 6']['seconds']:.2f} s",
                     *(f"{ways[way]['ratio']:.2f}x" for way in ("neighbours", "scattered")),
                     *(f"{ways[way]['copied_bytes'] / 1e6:,.0f} MB"
                       for way in ("neighbours", "scattered"))))
    return "\n".join(aligned(rows))


# --- the command ----------------------------------------------------------------------------------

def filling_pool(model):
    """What the picture of a pool shows: eight prompts that begin alike, in a small pool."""
    requests = alike(model.config.vocab_size, 8, prefix=20, tail=7, new=14)
    requests = [replace(request, name=name, arrival=i)
                for i, (request, name) in enumerate(zip(requests, "ABCDEFGH"))]
    with watch(model) as seen:
        generate_paged.generate(model, requests, max_batch=5, token_budget=32, pages=32,
                                page_size=4)
    return seen


def measure(args):
    device, dtype, where = measuring_place(args)
    model, _ = load()
    model.to(device, dtype)
    print(where)
    print("\neight requests, memory for 128 tokens: reserved, or 16 pages of 8\n"
          + storm_table(storm(model)))
    repeats = 1 if args.quick else 5
    shared = sharing(model, repeats)
    print("\nsixteen prompts of 144 tokens that begin with the same 128\n" + sharing_table(shared))
    ratios = {}
    small = GPT(GPTConfig(n_layer=6, n_head=6, n_embd=384)).to(device, dtype).requires_grad_(False)
    models = {"built-in model": model} if args.quick else {"built-in model": model,
                                                           "6 layers, 384 wide": small}
    for name, measured in models.items():
        requests = mixed_lengths(measured.config.vocab_size)
        ratios[name] = scatter(measured, requests, repeats)
        ratios[f"{name}, optimize()"] = scatter(measured.optimize(), requests, repeats)
    print("\nstage 7 against stage 6, 24 requests of mixed lengths\n" + scatter_table(ratios))
    if args.json:
        results.save(args.json, "python -m experiments.memory", where, repeats=repeats,
                     sharing=shared, scatter=ratios)
    if args.plot:
        figures.pool(filling_pool(load()[0]), args.plot)
        print(f"drawn in {args.plot}")
    return 0


def main(argv=None):
    p = measuring_parser("python -m experiments.memory", __doc__,
                         quick="one run each, the built-in model only")
    args = p.parse_args(argv)
    return guarded(p.prog, lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
