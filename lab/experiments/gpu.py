"""Every lesson about time on GPUs, calculated by lab/simulate: nothing here is measured."""
import math
import random
import statistics
from functools import partial

from lab.experiments.bench import KNOBS, workload
from lab.experiments.results import Table
from lab.loading.arrivals import workload as requests_from
from lab.loading.stages import STAGES
from lab.simulate import published
from lab.simulate.calculated import log_of, with_memory
from lab.simulate.hardware import GPUS, MODELS
from lab.views.report import figures

MACHINES = {"rtx-4090": "W1", "a100": "W1", "h100": "W1", "a100, W3": "W3"}


def served(stage, model, gpu, requests, longest, **knobs):
    """The log of a stage that serves these requests, with all the memory that there is."""
    shape, gpu = MODELS[model], GPUS[gpu]
    knobs, _ = with_memory(shape, gpu, STAGES[stage], longest, knobs)
    return log_of(shape, gpu, STAGES[stage], requests, **knobs)


def stage_on_gpu(stage, gpu, requests):
    """What the table says of Llama 2 7B."""
    longest = (max(len(r.prompt) for r in requests)
               + max(r.max_new_tokens for r in requests) - 1)
    f = figures(served(stage, "llama-2-7b", gpu, requests, longest, **KNOBS))
    return {"tokens_per_s": f["tokens_per_s"], "ttft_mean_ms": f["ttft_ms"]["mean"],
            "itl_p99_ms": f["itl_ms"]["p99"], "passes": f["passes"], "useful": f["useful"]}


def fitting(model, number):
    """
    {how: most requests that run at once} on an A100 40 GB, of `number` with prompts of 32 to 1,024
    tokens and answers of 16 to 512, most of them short.
    """
    found = {"the longest answer for each": MODELS[model].room(GPUS["a100-40gb"]) // 1536}
    for how, stage in (("own answer reserved", "ragged, varlen"), ("pages", "paged")):
        stream = random.Random(0)
        mixed = requests_from(
            [(round(2 ** stream.uniform(5, 10)), round(2 ** stream.uniform(4, 9)))
             for _ in range(number)])
        log = served(stage, model, "a100-40gb", mixed, 1535, max_batch=400, token_budget=8192)
        found[how] = max(log.passes)
    return found


def measure(args, device, dtype):
    """Every lesson about time on GPUs, calculated on the CPU: half an hour."""
    quick = args.quick
    on_machines = {}
    for name, work in MACHINES.items():
        gpu = name.split(",")[0]
        on_machines[name] = {
            stage: stage_on_gpu(stage, gpu, workload(work, 32000, quick)) for stage in STAGES}
    return {
        "stages": on_machines,
        "fitting": {model: fitting(model, 12 if quick else 400)
                    for model in ("llama-2-7b", "mistral-7b", "llama-3.1-8b")},
        "real": [*published.real_table(published.compare_real(
            published.PREDICTED[5:7] if quick else published.PREDICTED))],
        "published": [*summary(published.compare(
            ["ANL"] if quick else published.ABOUT["sources"]))]}


# --- the tables of docs/gpu.md --------------------------------------------------------------------

FIGURES = {"tokens_per_s": "throughput", "ttft_ms": "first token", "itl_ms": "between tokens"}
GROUPS = (   # name, and who belongs to it
    ("one GPU", lambda row: row["tp"] == 1), ("several GPUs", lambda row: row["tp"] > 1),
    ("TensorRT-LLM", lambda row: row["engine"] == "tensorrt-llm"),
    ("vLLM of 2023 and 2024", lambda row: row["engine"] == "vllm-2024"),
    ("other engines", lambda row: row["engine"] not in ("tensorrt-llm", "vllm-2024")))


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
    """All stages on each GPU."""
    gpus = found["stages"]
    head = ["tokens/s, llama-2-7b", *gpus, "a100: TTFT", "ITL p99", "W1: passes", "useful"]
    return made(head, [
        [stage, *(f"{stages[stage]['tokens_per_s']:,.0f}" for stages in gpus.values()),
         f"{f['ttft_mean_ms']:,.0f} ms", f"{f['itl_p99_ms']:,.0f} ms",
         f"{f['passes']:,}", f"{f['useful']:.0%}"] for stage, f in gpus["a100"].items()])


def memory_table(found):
    head = ["requests at once, at most", *next(iter(found["fitting"].values()))]
    return made(head, [[f"{model}, {MODELS[model].n_kv_head} key/value heads", *most.values()]
                       for model, most in found["fitting"].items()])


def published_table(found):
    head, *rows = found["published"]
    return made(head, rows)


def real_table(found):
    head, *rows = found["real"]
    return made(head, rows)
