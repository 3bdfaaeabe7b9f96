"""
Every lesson about time on GPUs, calculated by beyond/simulate.py: nothing here is measured.

    python -m experiments gpu --json experiments/results/gpu.json     ten minutes
"""
import bisect
import inspect
import random
import sys
import time
from dataclasses import replace
from statistics import mean, median

from beyond import published
from beyond import simulate as s
from beyond.arrivals import workload as requests_from
from beyond.capacity import Load, serve
from beyond.hardware import BANDWIDTH_SHARE, GPU, GPUS, MODELS, GiB
from experiments import results
from experiments.bench import KNOBS, workload
from experiments.figures import finished, grouped_bars, lines
from loading.stages import STAGES
from toolbox import flags
from views import plots

CURVES = ("unbatched", "naive", "dynamic", "chunked", "interleaved", "ragged, varlen", "paged")


def run(stage, shape, gpu, requests, rate=None, **knobs):
    """A stage's trace on a calculated GPU. shape, gpu: or their names"""
    shape, gpu = MODELS.get(shape, shape), GPUS.get(gpu, gpu)
    knobs, _ = s.with_memory(shape, gpu, STAGES[stage], requests, knobs, rate=rate)
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


def budgets():
    """[{budget, ttft_ms, itl_ms}, ...]: stage 7 under the same load."""
    return [{"budget": budget, **s.figures(run("paged", "llama-2-7b", "a100", mixed(240),
                                               rate=5, token_budget=budget))}
            for budget in (64, 128, 256, 512, 1024, 2048, 8192)]


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


def capacity(limit, budget):
    """The most requests a second with an ITL p99 of at most `limit` ms: 1,730 in, 256 out."""
    def bad(quarters):
        load = Load(quarters / 4, "1730", "256", 200)
        f = serve(MODELS["mistral-7b"], GPUS["a100"], load, 1, "least-loaded", token_budget=budget)
        return f["itl_ms"].percentile(99) > limit or f["verdict"] != "keeps up"

    return bisect.bisect_left(range(1, 64), True, key=bad) / 4   # below 16 a second, by halving


def this_machine():
    """
    Every stage of results/bench.json with the peaks that were measured with it: medians over its
    workloads, and of the bandwidth, which differs most, the lowest. Where model.Head computes
    attention, and no compiled step, its scores take time of their own.
    """
    rows = []
    measurements = [each for each in results.load("bench") if each["model"] == "gpt2"]
    peak, scores = (median(each[name] for each in measurements) for name in ("peak", "scores"))
    bandwidth = min(each["bandwidth"] for each in measurements)
    # what was measured is attained: only of a data sheet do the shares apply
    gpu = GPU(0, peak, bandwidth / BANDWIDTH_SHARE, 64 * GiB, share=1, tile=0, overhead=1e-3,
              per_request=0, overlaps=False)
    shape = replace(MODELS["gpt2"], size=4)
    for measured in measurements:
        for stage in [stage for stage in STAGES if stage in measured["systems"]]:
            trace = run(stage, shape, gpu, workload(measured["workload"], 50257), **KNOBS)
            seconds = s.figures(trace)["seconds"]
            if stage not in ("unbatched", "ragged, varlen", "paged"):
                entries = sum(p.score_entries for p in trace.passes)
                seconds += entries * shape.n_layer * shape.n_head / scores
            rows.append({"workload": measured["workload"], "stage": stage,
                         "measured": measured["tokens"] / measured["systems"][stage]["seconds"],
                         "calculated": measured["tokens"] / seconds})
    return rows


PARTS = {"ladder": ladder, "curve": curve, "budgets": budgets, "fitting": fitting,
         "this_machine": this_machine,
         "capacity": lambda: {f"{limit} ms": {budget: capacity(limit, budget)
                                              for budget in (512, 2048, 10**6)}
                              for limit in (100, 500)},
         "published": lambda: published.compare(s.figures_of)}
FLAGS = {"--json": dict(metavar="FILE.json", help="write the figures"),
         "--parts": dict(nargs="+", choices=PARTS, help="calculate these only, keep the rest")}


def calculate(args):
    """Every lesson about time on GPUs, calculated: ten minutes."""
    flags.check_path(args.json, "--json")
    found = {}
    if args.parts and args.json:
        found = {name: part for name, part in results.load("gpu").items() if name in PARTS}
    for name in args.parts or PARTS:
        start = time.perf_counter()
        found[name] = PARTS[name]()
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)
        if args.json:
            results.keep(args.json, " ".join(["python -m experiments", *sys.argv[1:]]),
                         "calculated", found)
    return 0


# --- the pictures ---------------------------------------------------------------------------------

def draw(found, folder):
    """The pictures of docs/gpu.md."""
    lines(found["curve"], folder / "gpu-curve.png", "xy", xlabel="requests a second",
          ylabel="ms a token, arrival to end", ylim=(8, 1000),
          title="Calculated: Llama 2 7B on an A100 40 GB, 120 requests of mixed lengths")
    lines({f"{name.upper()} {q}": [(f["budget"], f[f"{name}_ms"][q]) for f in found["budgets"]]
           for q in ("p99", "p50") for name in ("ttft", "itl")},
          folder / "gpu-budget.png", "xy", xlabel="token budget", ylabel="ms",
          title="Calculated: Llama 2 7B on an A100, stage 7, 5 requests a second")
    figure, ax = plots.pyplot().subplots(figsize=(8, 4))
    colors = {"the longest answer for each": "#CC3311", "own answer reserved": "#E69F00",
              "pages": "#0072B2"}
    grouped_bars(ax, [f"{model}, {MODELS[model].n_kv_head} key/value heads"
                      for model in found["fitting"]],
                 {how: [most[how] for most in found["fitting"].values()] for how in colors}, colors)
    ax.set(ylabel="most requests at once",
           title="Calculated: 400 mixed requests in the memory of an A100 40 GB")
    ax.legend(loc="upper left")
    finished(figure, folder / "gpu-memory.png")
