"""Every lesson about time on GPUs, calculated by lab/simulate: nothing here is measured."""
import random
from functools import partial

from lab.experiments.bench import KNOBS, workload
from lab.experiments.results import Table
from lab.loading.arrivals import workload as requests_from
from lab.loading.stages import STAGES
from lab.simulate import real_runs
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
    longest = 1024 + 512
    most = {"the longest answer for each": MODELS[model].room(GPUS["a100-40gb"]) // longest}
    for how, stage in (("own answer reserved", "ragged, varlen"), ("pages", "paged")):
        log = served(stage, model, "a100-40gb", mixed_lengths(number), longest - 1,
                     max_batch=400, token_budget=8192)
        most[how] = max(log.passes)
    return most


def mixed_lengths(number):
    """Requests whose lengths are drawn evenly on a logarithmic scale: most are short."""
    stream = random.Random(0)
    lengths = []
    for _ in range(number):
        prompt = round(2 ** stream.uniform(5, 10))
        answer = round(2 ** stream.uniform(4, 9))
        lengths.append((prompt, answer))
    return requests_from(lengths)


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
        "real": [*real_runs.table(real_runs.compare(
            real_runs.PREDICTED[5:7] if quick else real_runs.PREDICTED))]}


# --- the tables of docs/gpu.md --------------------------------------------------------------------

calculated = partial(Table, how="calculated", small_print="calculated; {commands}")


def table(result):
    """All stages on each GPU."""
    gpus = result["stages"]
    head = ["tokens/s, llama-2-7b", *gpus, "a100: TTFT", "ITL p99", "W1: passes", "useful"]
    rows = []
    for stage, on_a100 in gpus["a100"].items():
        speeds = [f"{stages[stage]['tokens_per_s']:,.0f}" for stages in gpus.values()]
        rows.append([stage, *speeds, f"{on_a100['ttft_mean_ms']:,.0f} ms",
                     f"{on_a100['itl_p99_ms']:,.0f} ms", f"{on_a100['passes']:,}",
                     f"{on_a100['useful']:.0%}"])
    return calculated(head, rows)


def memory_table(result):
    fitting = result["fitting"]
    head = ["requests at once, at most", *next(iter(fitting.values()))]
    rows = [[f"{model}, {MODELS[model].n_kv_head} key/value heads", *most.values()]
            for model, most in fitting.items()]
    return calculated(head, rows)


def real_table(result):
    head, *rows = result["real"]
    return calculated(head, rows)
