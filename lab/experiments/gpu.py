"""Every lesson about time on GPUs, calculated by lab/simulate: nothing here is measured."""
import random
from functools import partial
from statistics import mean

from lab.experiments.bench import KNOBS, workload
from lab.experiments.results import Table
from lab.loading.stages import STAGES
from lab.simulate import calculated as s
from lab.simulate import published
from lab.simulate.arrivals import workload as requests_from
from lab.simulate.hardware import GPUS, MODELS

MACHINES = {"rtx-4090": "W1", "a100": "W1", "h100": "W1", "a100, W3": "W3"}
RATES = (0.25, 0.5, 1, 2, 4, 8, 16)   # requests a second
CURVES = ("unbatched", "naive", "dynamic", "chunked", "interleaved", "ragged, varlen", "paged")


def run(stage, model, gpu, requests, rate=None, **knobs):
    """A stage's trace on a calculated GPU."""
    shape, gpu = MODELS[model], GPUS[gpu]
    knobs, _ = s.with_memory(shape, gpu, STAGES[stage], requests, knobs)
    return s.simulate(shape, gpu, STAGES[stage], requests, rate=rate, **knobs)


def mixed(number):
    """Prompts of 32 to 1,024 tokens and answers of 16 to 512, most of them short."""
    stream = random.Random(0)
    return requests_from([(round(2 ** stream.uniform(5, 10)), round(2 ** stream.uniform(4, 9)))
                          for _ in range(number)])


def curve(stage, number, rates):
    """[(rate, ms a token), ...] of Llama 2 7B on an A100 40 GB, up to a second a token."""
    points = []
    for rate in rates:
        trace = run(stage, "llama-2-7b", "a100-40gb", mixed(number), rate)
        points.append((rate, 1e3 * mean((r.token_times[-1] - r.arrived) / len(r.generated)
                                        for r in trace.requests)))
        if points[-1][1] > 1000:
            break
    return points


def fitting(model, number):
    """{how: most of `number` mixed requests that run at once} on an A100 40 GB."""
    found = {"the longest answer for each": MODELS[model].room(GPUS["a100-40gb"]) // 1536}
    for how, stage in (("own answer reserved", "ragged, varlen"), ("pages", "paged")):
        trace = run(stage, model, "a100-40gb", mixed(number), max_batch=400, token_budget=8192)
        found[how] = max(len(p.work) for p in trace.passes)
    return found


def measure(args, device, dtype):
    """Every lesson about time on GPUs, calculated on the CPU: some minutes."""
    quick = args.quick
    return {
        "ladder": {name: {stage: s.figures(run(
            stage, "llama-2-7b", name.split(",")[0], workload(requests, 32000, quick), **KNOBS))
            for stage in STAGES} for name, requests in MACHINES.items()},
        "curve": {stage: curve(stage, 12 if quick else 120, RATES[:2] if quick else RATES)
                  for stage in CURVES},
        "fitting": {model: fitting(model, 12 if quick else 400)
                    for model in ("llama-2-7b", "mistral-7b", "llama-3.1-8b")},
        "published": published.compare(published.SOURCES if not quick else ["ANL"])}


# --- the tables of docs/gpu.md --------------------------------------------------------------------

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
    head, *rows = published.summary(found["published"])
    return made(head, rows)
