"""
Every lesson about time on GPUs, calculated by beyond/calculated.py: nothing here is measured.

    python -m experiments gpu --json experiments/results/gpu.json     some minutes
"""
import inspect
import random
import sys
import time
from functools import partial
from statistics import mean

from beyond import calculated as s
from beyond import published
from beyond.arrivals import workload as requests_from
from beyond.hardware import GPUS, MODELS
from experiments import results
from experiments.bench import KNOBS, workload
from experiments.results import Table
from loading.stages import STAGES
from toolbox import flags

CURVES = ("unbatched", "naive", "dynamic", "chunked", "interleaved", "ragged, varlen", "paged")


def run(stage, shape, gpu, requests, rate=None, **knobs):
    """A stage's trace on a calculated GPU. shape, gpu: or their names"""
    shape, gpu = MODELS.get(shape, shape), GPUS.get(gpu, gpu)
    knobs, _ = s.with_memory(shape, gpu, STAGES[stage], requests, knobs)
    return s.simulate(shape, gpu, STAGES[stage], requests, rate=rate, **knobs)


def ladder():
    """{gpu: {stage: figures}} of Llama 2 7B on W1, and the same for W3 on an A100."""
    machines = {"rtx-4090": "W1", "a100": "W1", "h100": "W1", "a100, W3": "W3"}
    return {name: {stage: s.figures(run(stage, "llama-2-7b", name.split(",")[0],
                                        workload(requests, 32000), **KNOBS)) for stage in STAGES}
            for name, requests in machines.items()}


def mixed(number, seed=0):
    """Prompts of 32 to 1,024 tokens and answers of 16 to 512, most of them short."""
    stream = random.Random(seed)
    return requests_from([(round(2 ** stream.uniform(5, 10)), round(2 ** stream.uniform(4, 9)))
                          for _ in range(number)])


def curve():
    """{stage: [(rate, ms a token), ...]}: Llama 2 7B, A100 40 GB"""
    found = {}
    for stage in CURVES:
        found[stage] = points = []
        has_budget = "token_budget" in inspect.signature(STAGES[stage]).parameters
        for rate in (0.25, 0.5, 1, 2, 4, 8, 16):
            trace = run(stage, "llama-2-7b", "a100-40gb", mixed(120), rate,
                        max_batch=256 if has_budget else 30)
            points.append((rate, 1e3 * mean((r.token_times[-1] - r.arrived) / len(r.generated)
                                            for r in trace.requests)))
            if points[-1][1] > 1000:
                break
    return found


def fitting():
    """{model: {how: most requests that ran at once}} of 400 mixed requests, on an A100 40 GB."""
    found = {}
    for model in "llama-2-7b", "mistral-7b", "llama-3.1-8b":
        room = MODELS[model].room(GPUS["a100-40gb"])
        found[model] = {"the longest answer for each": room // 1536}
        for how, stage in (("own answer reserved", "ragged, varlen"), ("pages", "paged")):
            trace = run(stage, model, "a100-40gb", mixed(400), max_batch=400, token_budget=8192)
            found[model][how] = max(len(p.work) for p in trace.passes)
    return found


PARTS = {"ladder": ladder, "curve": curve, "fitting": fitting,
         "published": published.compare}
FLAGS = {"--json": dict(metavar="FILE.json", help="write the figures")}


def calculate(args):
    """Every lesson about time on GPUs, calculated: some minutes."""
    flags.check_path(args.json, "--json")
    found = {}
    for name, part in PARTS.items():
        start = time.perf_counter()
        found[name] = part()
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
    results.keep(args.json, " ".join(["python -m experiments", *sys.argv[1:]]), "calculated", found)
    return 0


# --- the tables of docs/gpu.md --------------------------------------------------------------------

table = partial(Table, small_print="calculated; `python -m experiments gpu`")


def ladder_table(found):
    gpus = found["ladder"]
    head = ["tokens/s, llama-2-7b", *gpus, "a100: TTFT", "ITL p99", "W1: passes", "useful"]
    return table(head, [
        [stage, *(f"{stages[stage]['tokens_per_s']:,.0f}" for stages in gpus.values()),
         f"{f['ttft_ms']['mean']:,.0f} ms", f"{f['itl_ms']['p99']:,.0f} ms",
         f"{f['passes']:,}", f"{f['useful']:.0%}"] for stage, f in gpus["a100"].items()])


def memory_table(found):
    head = ["requests at once, at most", *next(iter(found["fitting"].values()))]
    return table(head, [[f"{model}, {MODELS[model].n_kv_head} key/value heads", *most.values()]
                        for model, most in found["fitting"].items()])


def published_table(found):
    head, *rows = published.summary(found["published"])
    return table(head, rows)
