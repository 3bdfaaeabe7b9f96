"""
Every lesson about time on GPUs, calculated by beyond/simulate.py: nothing here is measured but the
seconds that the calculation itself takes.

    python -m experiments gpu --json experiments/results/gpu.json     ten minutes
    python -m experiments gpu --draw                                  the pictures, from that file
"""
import bisect
import inspect
import random
import resource
import sys
import time
from dataclasses import replace
from statistics import median
from types import SimpleNamespace

from beyond import published
from beyond import simulate as s
from beyond.arrivals import workload as requests_from
from beyond.hardware import BANDWIDTH_SHARE, GPU, GPUS, MODELS, PEAK_SHARE, GiB
from beyond.replicas import serve
from experiments import results
from experiments.bench import KNOBS, workload
from experiments.figures import curves, finished, grouped_bars, log_axis
from loading.stages import STAGES
from toolbox import flags
from views import plots

PICTURES = results.FOLDER.parent / "pictures"
LADDER = {"gpt2-xl": ("t4", "rtx-4090", "a100", "h100"), "llama-2-7b": ("rtx-4090", "a100", "h100")}
CURVES = ("unbatched", "naive", "dynamic", "chunked", "interleaved", "ragged, varlen", "paged")
COLORS = dict(zip(CURVES, ("#999999", "#CC3311", "#E69F00", "#56B4E9", "#CC79A7", "#009E73",
                           "#0072B2")))


def run(stage, shape, gpu, requests, rate=None, **knobs):
    """A stage's trace on a calculated GPU. shape, gpu: or their names"""
    shape, gpu = MODELS.get(shape, shape), GPUS.get(gpu, gpu)
    knobs, _ = s.with_memory(shape, gpu, STAGES[stage], requests, knobs, rate=rate)
    return s.simulate(shape, gpu, STAGES[stage], requests, rate=rate, **knobs)


def ladder():
    """{model: {gpu: {stage: figures}}} on W1, and the same for W3 on an A100."""
    def stages(model, gpu, name="W1"):
        return {stage: s.figures(run(stage, model, gpu, workload(name, 32000), **KNOBS))
                for stage in STAGES}

    found = {model: {gpu: stages(model, gpu) for gpu in gpus} for model, gpus in LADDER.items()}
    found["llama-2-7b"]["a100, W3"] = stages("llama-2-7b", "a100", "W3")
    return found


def mixed(number, seed=0):
    """Prompts of 32 to 1,024 tokens and answers of 16 to 512, most of them short."""
    stream = random.Random(seed)
    return requests_from([(round(2 ** stream.uniform(5, 10)), round(2 ** stream.uniform(4, 9)))
                          for _ in range(number)])


def curve():
    """{stage: [{rate, latency in s a token, tokens_per_s, grows}, ...]}: Llama 2 7B, A100 40 GB"""
    found = {}
    for stage in CURVES:
        found[stage] = points = []
        has_budget = "token_budget" in inspect.signature(STAGES[stage]).parameters
        for rate in (0.25, 0.5, 1, 2, 4, 8, 16):
            trace = run(stage, "llama-2-7b", "a100-40gb", mixed(120), rate,
                        max_batch=256 if has_budget else 30)
            waits = [(r.token_times[-1] - r.arrived) / len(r.generated) for r in trace.requests]
            figures = s.figures(trace)
            points.append({"rate": rate, "latency": s.mean(waits), "grows": figures["grows"],
                           "tokens_per_s": figures["tokens_per_s"]})
            if points[-1]["latency"] > 1:
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


def roofline():
    """{gpu: {stage: [operations a byte, operations a second] of all passes of W1}}"""
    found = {}
    for gpu in "rtx-4090", "a100", "h100":
        found[gpu] = {}
        for stage in CURVES:
            passes = run(stage, "llama-2-7b", gpu, workload("W1", 32000), **KNOBS).model.passes
            done, moved = (sum(part[i] for *_, parts in passes for part in parts.values())
                           for i in (0, 1))
            found[gpu][stage] = [done / moved, done / sum(seconds for _, seconds, _ in passes)]
    return found


def served(model, replicas, knobs={}, **load):
    """The figures of beyond/replicas.py on A100s. load: input, output, requests, rate"""
    args = SimpleNamespace(seed=0, groups=1, prefix=0, **load)
    return serve(MODELS[model], GPUS["a100"], args, replicas, "least-loaded", **knobs)


def capacity(limit, budget):
    """The most requests a second with an ITL p99 of at most `limit` ms: 1,730 in, 256 out."""
    def bad(quarters):
        f = served("mistral-7b", 1, {"token_budget": budget}, input="1730", output="256",
                   requests=200, rate=quarters / 4)
        return f["itl_ms"].percentile(99) > limit or f["grows"]

    return bisect.bisect_left(range(1, 64), True, key=bad) / 4   # below 16 a second, by halving


def growth():
    """[{requests, seconds, peak MB}, ...]: what 16 replicas cost to calculate. Measured."""
    rows = []
    for number in 1000, 10000, 100000:
        start = time.process_time()
        f = served("llama-3.1-8b", 16, input="512", output="128", requests=number, rate=100.0)
        rows.append({"requests": number, "seconds": time.process_time() - start,
                     "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                     "ttft_p99": f["ttft_ms"].percentile(99)})
    return rows


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
    gpu = GPU(0, peak / PEAK_SHARE, bandwidth / BANDWIDTH_SHARE, 64 * GiB, overlaps=False)
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
         "roofline": roofline, "this_machine": this_machine,
         "capacity": lambda: {f"{limit} ms": {budget: capacity(limit, budget)
                                              for budget in (512, 2048, 10**6)}
                              for limit in (100, 500)},
         "published": lambda: published.compare(published.runs(), s.figures_of), "growth": growth}


# --- the pictures ---------------------------------------------------------------------------------

def draw(found):
    plt = plots.pyplot()
    figure, ax = plt.subplots(figsize=(8, 4.4))
    for stage, points in found["curve"].items():
        ax.plot([p["rate"] for p in points], [p["latency"] * 1e3 for p in points], "o-",
                markersize=9 if "ragged" in stage else 4, color=COLORS[stage], label=stage)
    log_axis(ax.xaxis, base=2)
    log_axis(ax.yaxis)
    ax.set(xlabel="requests a second", ylim=(8, 1000), ylabel="ms a token, arrival to end",
           title="Calculated: Llama 2 7B on an A100 40 GB, 120 requests of mixed lengths")
    ax.legend()
    finished(figure, PICTURES / "gpu-curve.png")

    figure, ax = plt.subplots(figsize=(8, 4))
    curves(ax, {f"{name} {q}": [(b["budget"], b[f"{name.lower()}_ms"][q])
                                for b in found["budgets"]]
                for q in ("p99", "p50") for name in ("TTFT", "ITL")},
           ("#0072B2", "#009E73", "#56B4E9", "#999999"), "oooo")
    log_axis(ax.xaxis, base=2)
    log_axis(ax.yaxis)
    ax.set(xlabel="token budget", ylabel="ms",
           title="Calculated: Llama 2 7B on an A100, stage 7, 5 requests a second")
    ax.legend()
    finished(figure, PICTURES / "gpu-budget.png")

    figure, ax = plt.subplots(figsize=(8, 4))
    colors = {"the longest answer for each": "#CC3311", "own answer reserved": "#E69F00",
              "pages": "#0072B2"}
    grouped_bars(ax, [f"{model}, {MODELS[model].n_kv_head} key/value heads"
                      for model in found["fitting"]],
                 {how: [most[how] for most in found["fitting"].values()] for how in colors}, colors)
    ax.set(ylabel="most requests at once",
           title="Calculated: 400 mixed requests in the memory of an A100 40 GB")
    ax.legend(loc="upper left")
    finished(figure, PICTURES / "gpu-memory.png")

    figure, axes = plt.subplots(1, 3, figsize=(11, 4.2), sharey=True)
    for ax, (gpu, stages) in zip(axes, found["roofline"].items()):
        sheet, xs = GPUS[gpu], [2 ** (i / 4) for i in range(-2, 46)]
        ax.plot(xs, [min(sheet.peak, x * sheet.bandwidth) / 1e12 for x in xs], "k", linewidth=1)
        for stage, (intensity, speed) in stages.items():
            ax.plot(intensity, speed / 1e12, "o", markersize=11 if "ragged" in stage else 6,
                    color=COLORS[stage], label=stage)
        ax.set(xscale="log", yscale="log", xlabel="operations a byte", title=gpu)
    axes[0].set_ylabel("10¹² operations a second, calculated")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=len(CURVES))
    finished(figure, PICTURES / "gpu-roofline.png", rect=(0, 0.07, 1, 1))


FLAGS = {"--json": dict(metavar="FILE.json", help="write the figures"),
         "--parts": dict(nargs="+", choices=PARTS, help="calculate these only, keep the rest"),
         "--draw": dict(action="store_true", help="draw what results/gpu.json holds")}


def calculate(args):
    """Every lesson about time on GPUs, calculated: ten minutes."""
    flags.check_path(args.json, "--json")
    if args.draw:
        draw(results.load("gpu"))
        return 0
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
