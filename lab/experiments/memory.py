"""
What pages are worth.

    storm      eight requests in half the memory that they may need, reserved or in pages
    sharing    sixteen requests whose prompts begin alike: paged, and prefix, which shares pages
"""
import random
import statistics
from contextlib import contextmanager

import generate_prefix
from lab.checks.check import run
from lab.experiments import results
from lab.experiments.results import Table
from lab.loading.load import load, set_threads
from lab.loading.stages import STAGES
from lab.views.report import totals
from request import Request
from toolbox.trace import observed


def storm(model):
    """Memory for 128 tokens, reserved or in pages: {"reserve": trace, "pages": trace}."""
    vocab = model.config.vocab_size
    requests = []
    for i, name in enumerate("ABCDEFGH"):
        prompt = [(5 * i + 3 * j) % vocab for j in range(6)]
        requests.append(Request(prompt, 26, name=name, priority=i // 4))

    knobs = {"max_kv_tokens": 128, "pages": 16, "page_size": 8}
    traces = {}
    for name, stage in ("reserve", "ragged, varlen"), ("pages", "paged"):
        trace = traces[name] = run(STAGES[stage], model, requests, **knobs)
        trace.stage = f"{name}, {trace.counts.get('preemptions', 0)} preemptions"
    return traces


def alike(vocab_size, requests=16, prefix=128, tail=16, new=16):
    """Requests whose prompts begin with the same tokens, as with one system prompt."""
    stream = random.Random(0)

    def tokens(number):
        return [stream.randrange(vocab_size) for _ in range(number)]

    common = tokens(prefix)
    return [Request(common + tokens(tail), new, name=f"r{i}") for i in range(requests)]


@contextmanager
def watch(model):
    """Collects the pool before every forward pass: [{"tables", "cached", "number"}, ...]."""
    seen = []

    def look(step, batch):
        tables = {request.name: list(request.block_table) for request, _ in batch.plan}
        cached = getattr(batch.pool, "hash_of", {})   # of paged: none can be found again
        free = {*batch.pool.free_queue}
        seen.append({"tables": tables, "cached": cached.keys() & free,
                     "number": batch.pool.number})

    with observed(model, look):
        yield seen


def filling_pool(model):
    """What the picture of a pool shows: eight prompts that begin alike, in a small pool."""
    requests = alike(model.config.vocab_size, 8, prefix=20, tail=7, new=14)
    for i, (request, name) in enumerate(zip(requests, "ABCDEFGH")):
        request.name, request.arrival = name, i
    with watch(model) as seen:
        generate_prefix.generate(model, requests, max_batch=5, token_budget=32, pages=32,
                                 page_size=4)
    return seen


def measure(args, device, dtype):
    """What prefix caching saves: sixteen prompts that begin alike."""
    model, repeats = load()[0].to(device, dtype), 1 if args.quick else 5
    set_threads(model)   # as a script does

    def run_stage(name):
        with watch(model) as seen:
            trace = STAGES[name](model, alike(model.config.vocab_size), max_batch=16,
                                 token_budget=64, pages=160)
        pages_held = [set().union(*pool["tables"].values()) for pool in seen]
        total = totals(trace)
        return {"pages": max(map(len, pages_held)), "passes": len(trace.passes),
                "tokens": total["slots"], "seconds": total["seconds"]}

    sharing = {}
    for name, runs in results.in_turn(("paged", "prefix"), run_stage, repeats).items():
        seconds = statistics.median(figures["seconds"] for figures in runs)
        sharing[name] = {**runs[0], "seconds": seconds}   # the rest is the same in all
    return {"repeats": repeats, "sharing": sharing}


def table(result):
    rows = [[name, f["pages"], f["passes"], f"{f['tokens']:,}", f"{f['seconds']:.2f}"]
            for name, f in result["sharing"].items()]
    return Table(["stage", "pages held at most", "passes", "tokens computed", "seconds"], rows,
                 f"prompts that begin alike, medians of {result['repeats']}")
