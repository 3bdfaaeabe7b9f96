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

import generate_paged
from experiments import figures, results, tables
from loading.load import load
from loading.stages import STAGES
from model import GPT, GPTConfig
from request import Request
from toolbox.flags import measuring_parser, measuring_place
from views.report import latencies, mean, percentile, totals

# --- storm: what happens when memory runs out -----------------------------------------------------

def storm(model):
    """Memory for 128 tokens, reserved or in pages: {"reserve": trace, "pages": trace}."""
    vocab = model.config.vocab_size
    requests = [Request([(5 * i + 3 * j) % vocab for j in range(6)], 26, name=name, priority=i // 4)
                for i, name in enumerate("ABCDEFGH")]

    knobs = {"max_kv_tokens": 128, "pages": 16, "page_size": 8}
    traces = {name: results.run(STAGES[stage], model, requests, knobs)
              for name, stage in (("reserve", "ragged, varlen"), ("pages", "paged"))}
    for name, trace in traces.items():
        trace.stage = f"{name}, {trace.counts.get('preemptions', 0)} preemptions"
    return traces


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
        seen.append({"tables": {request.name: list(request.block_table)
                                for request, _ in batch.plan},
                     "kept": batch.pages.free.keys() & batch.pages.key_of.keys(),
                     "number": batch.pages.number})

    with model.register_forward_pre_hook(hook):
        yield seen


def sharing(model, repeats):
    """{True: figures with shared prefixes, False: without}; seconds are medians of runs in turn."""
    def run(share):
        with watch(model) as seen:
            trace = generate_paged.generate(model, alike(model.config.vocab_size), max_batch=16,
                                            token_budget=64, pages=160, share_prefixes=share)
        held, t = [set().union(*pool["tables"].values()) for pool in seen], totals(trace)
        return {"pages": max(map(len, held)), "passes": len(trace.passes), "tokens": t["slots"],
                **trace.counts, "seconds": t["seconds"]}

    return {share: {**runs[0], "seconds": statistics.median(run["seconds"] for run in runs)}
            for share, runs in results.in_turn((True, False), run, repeats).items()}


# --- pages: what it costs to gather them ----------------------------------------------------------

def gathered(model, requests, repeats):
    """Of stage 7: {"seconds", "copied_bytes", "ratio" to stage 6's time and its "spread"}."""
    def run(name):
        start = time.perf_counter()
        trace = results.run(STAGES[name], model, requests,
                            {"max_batch": 16, "token_budget": 64, "pages": 2048})
        return time.perf_counter() - start, totals(trace)["copied_bytes"]

    ragged, paged = results.in_turn(("ragged, varlen", "paged"), run, repeats).values()
    seconds = [[seconds for seconds, _ in runs] for runs in (paged, ragged)]
    return {"seconds": statistics.median(seconds[0]), "copied_bytes": paged[0][1],
            **results.ratio(zip(*seconds))}


def mixed_lengths(vocab_size, requests=24):
    stream = random.Random(0)
    return [Request([stream.randrange(vocab_size) for _ in range(stream.randint(8, 120))],
                    stream.randint(8, 64), name=f"r{i}") for i in range(requests)]


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
    tables.show("eight requests, memory for 128 tokens: reserved, or 16 pages of 8",
                ("", "steps", "preemptions", "recomputed", "TTFT mean steps", "ITL p99 steps"),
                [(name, trace.passes[-1].step + 1, trace.counts.get("preemptions", 0),
                  f"{totals(trace)['recomputed'] / totals(trace)['slots']:.0%}",
                  f"{mean(latencies(trace)['ttft_steps']):.1f}",
                  f"{percentile(latencies(trace)['itl_steps'], 99):.0f}")
                 for name, trace in storm(model).items()])
    repeats, ratios, models = 1 if args.quick else 5, {}, {"built-in model": model}
    shared = sharing(model, repeats)
    if not args.quick:
        models["6 layers, 384 wide"] = GPT(GPTConfig(n_layer=6, n_head=6, n_embd=384)).to(
            device, dtype).requires_grad_(False)
    for name, measured in models.items():
        requests = mixed_lengths(measured.config.vocab_size)
        ratios[name] = gathered(measured, requests, repeats)
        ratios[f"{name}, optimize()"] = gathered(measured.optimize(), requests, repeats)
    found = results.keep(args.json, "python -m experiments.memory", where, repeats=repeats,
                         sharing=shared, gathered=ratios)
    tables.show("sixteen prompts of 144 tokens that begin with the same 128",
                *tables.sharing(found))
    tables.show("stage 7 against stage 6, 24 requests of mixed lengths", *tables.gathered(found))
    if args.plot:
        figures.pool(filling_pool(load()[0]), args.plot)
        print(f"drawn in {args.plot}")
    return 0


def main(argv=None):
    p = measuring_parser("python -m experiments.memory", __doc__,
                         quick="one run each, the built-in model only")
    return p.run(measure, argv)


if __name__ == "__main__":
    sys.exit(main())
