"""Every lesson about time on GPUs, calculated by lab/simulate: nothing here is measured."""
import math
import random
import re
import statistics
from functools import partial

from lab.experiments.bench import KNOBS, workload
from lab.experiments.results import Table
from lab.loading.arrivals import poisson
from lab.loading.arrivals import workload as requests_from
from lab.loading.stages import STAGES
from lab.simulate import published
from lab.simulate.calculated import runner, with_memory
from lab.simulate.hardware import GPUS, MODELS
from lab.simulate.overload import most_served
from lab.views.report import figures

MACHINES = {"rtx-4090": "W1", "a100": "W1", "h100": "W1", "a100, W3": "W3"}
RATES = (0.25, 0.5, 1, 2, 4, 8, 16)   # requests a second
CURVES = ("unbatched", "naive", "dynamic", "chunked", "interleaved", "ragged, varlen", "paged")
NEAR = 0.9   # of what a stage can serve: there its curve ends


def server(stage, model, gpu, longest, **knobs):
    """(a function that runs a load on a calculated GPU: see `runner`; the most that run at once)"""
    shape, gpu = MODELS[model], GPUS[gpu]
    knobs, _ = with_memory(shape, gpu, STAGES[stage], longest, knobs)
    return runner(shape, gpu, STAGES[stage], **knobs), knobs.get("max_batch", 1)


def ladder(stage, gpu, requests):
    """Figures of Llama 2 7B; `requests` makes them."""
    some = requests()
    longest = max(len(r.prompt) for r in some) + max(r.max_new_tokens for r in some) - 1
    run, _ = server(stage, "llama-2-7b", gpu, longest, **KNOBS)
    return figures(run(requests))


def mixed(number):
    """Prompts of 32 to 1,024 tokens and answers of 16 to 512, most of them short."""
    stream = random.Random(0)
    return requests_from([(round(2 ** stream.uniform(5, 10)), round(2 ** stream.uniform(4, 9)))
                          for _ in range(number)])


def curve(stage, number, rates):
    """
    {"points": [(rate, ms a token), ...], "served": requests/s} of Llama 2 7B on an A100 40 GB, up
    to NEAR of what the stage can serve.
    """
    run, many = server(stage, "llama-2-7b", "a100-40gb", 1535)
    (served, _), points = most_served(run, mixed, number, many), []
    for rate in [*(rate for rate in rates if rate < NEAR * served), NEAR * served]:
        log = run(partial(mixed, number), [*poisson(number, rate, seed=0)])
        points.append((rate, 1e3 * statistics.mean(
            (r.token_times[-1] - r.arrived) / len(r.token_times) for r in log.requests)))
    return {"points": points, "served": served}


def fitting(model, number):
    """{how: most of `number` mixed requests that run at once} on an A100 40 GB."""
    found = {"the longest answer for each": MODELS[model].room(GPUS["a100-40gb"]) // 1536}
    for how, stage in (("own answer reserved", "ragged, varlen"), ("pages", "paged")):
        run, _ = server(stage, model, "a100-40gb", 1535, max_batch=400, token_budget=8192)
        found[how] = max(p[3] for p in run(partial(mixed, number)).passes)
    return found


def measure(args, device, dtype):
    """Every lesson about time on GPUs, calculated on the CPU: some minutes."""
    quick = args.quick
    return {
        "ladder": {name: {stage: ladder(stage, name.split(",")[0], partial(
            workload, requests, 32000, quick)) for stage in STAGES}
            for name, requests in MACHINES.items()},
        "curve": {stage: curve(stage, 12 if quick else 160, RATES[:2] if quick else RATES)
                  for stage in CURVES},
        "fitting": {model: fitting(model, 12 if quick else 400)
                    for model in ("llama-2-7b", "mistral-7b", "llama-3.1-8b")},
        "real": [*published.real_table(published.compare_real(
            published.PREDICTED[5:7] if quick else published.PREDICTED))],
        "published": published.compare(["ANL"] if quick else published.ABOUT["sources"])}


# --- the tables of docs/gpu.md --------------------------------------------------------------------

FIGURES = {"tokens_per_s": "throughput", "ttft_ms": "first token", "itl_ms": "between tokens"}
GROUPS = (   # name, and who belongs to it
    ("one GPU", lambda row: row["tp"] == 1), ("several GPUs", lambda row: row["tp"] > 1),
    *((f"{tp} GPUs", lambda row, tp=tp: row["tp"] == tp) for tp in (2, 4, 8)),
    ("A100, one", lambda row: row["gpu"][:4] == "a100" and row["tp"] == 1),
    ("Hopper, one", lambda row: row["gpu"][0] in "gh" and row["tp"] == 1),
    ("other GPUs, one", lambda row: row["tp"] == 1 and (row["gpu"][0] in "rlt"
                                                        or row["gpu"] == "a10g")),
    ("one request", lambda row: row["requests"] == 1),
    ("static batch", lambda row: row["kind"] == "static" and row["requests"] > 1),
    ("all at once", lambda row: row["kind"] == "in-flight"),
    ("clients that wait", lambda row: row["kind"] == "clients" and row["requests"] > 1))


def summary(rows):
    """A head, and a line for each group: errors on the tested runs, and last on the chosen."""
    yield ["calculated against published", "runs", "median error", "90% within", "largest",
           "on the chosen half"]
    for figure, what in FIGURES.items():
        for name, belongs in GROUPS if figure == "tokens_per_s" else GROUPS[:2]:
            tested, chosen = (sorted(abs(row["error"]) for row in rows if row["half"] == half
                                     and row["figure"] == figure and belongs(row))
                              for half in ("tested", "chosen"))
            if tested:
                yield [f"{what}, {name}", len(tested), f"{statistics.median(tested):.0%}",
                       f"{tested[math.ceil(0.9 * len(tested)) - 1]:.0%}", f"{tested[-1]:.0%}",
                       f"{statistics.median(chosen):.0%} of {len(chosen)}" if chosen else "–"]

made = partial(Table, how="calculated", small_print="calculated; {commands}")


def table(found):
    """Of the ladder."""
    gpus = found["ladder"]
    head = ["tokens/s, llama-2-7b", *gpus, "a100: TTFT", "ITL p99", "W1: passes", "useful"]
    return made(head, [
        [stage, *(f"{stages[stage]['tokens_per_s']:,.0f}" for stages in gpus.values()),
         f"{f['ttft_ms']['mean']:,.0f} ms", f"{f['itl_ms']['p99']:,.0f} ms",
         f"{f['passes']:,}", f"{f['useful']:.0%}"] for stage, f in gpus["a100"].items()])


def memory_table(found):
    head = ["requests at once, at most", *next(iter(found["fitting"].values()))]
    return made(head, [[f"{model}, {MODELS[model].n_kv_head} key/value heads", *most.values()]
                       for model, most in found["fitting"].items()])


def published_table(found):
    head, *rows = summary(found["published"])
    return made(head, rows)


def real_table(found):
    """Groups of several runs, the largest first; a single run says little."""
    head, *rows = found["real"]
    runs = {i: int(re.search(r"(\d+) runs", group)[1]) for i, group in enumerate(head[1:], 1)}
    kept = [0, *(i for i in sorted(runs, key=runs.get, reverse=True) if runs[i] > 1)]
    return made([head[i] for i in kept], [[row[i] for i in kept] for row in rows])
