"""
What others measured, beside what is calculated.

    python -m lab.simulate --published   published.json: papers, blogs and repositories
    python -m lab.simulate --real        real_runs.json: runs of vLLM under random arrivals, and
                                         what other simulators say of them

The files say where the runs come from, and why others were left out. A published run is there if
its source says which model and GPU, in 16 bits, and how requests come. The constants of hardware.py
were chosen on the runs marked "chosen"; all others test them.
"""
import json
import random
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from generate_prefix import generate
from lab.loading.arrivals import drawn, poisson, staged, workload
from lab.loading.stages import STAGES
from lab.simulate.calculated import log_of
from lab.simulate.hardware import ENGINES, GPUS, MODELS
from lab.views.report import aligned, figures


def read(name):
    """What a file says of its runs, and the runs: [{column: value}, ...]"""
    data = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return data, [dict(zip(data["columns"], run)) for run in data["runs"]]


(ABOUT, RUNS), (ABOUT_REAL, REAL) = read("published.json"), read("real_runs.json")
PREDICTED = [run for run in REAL if run["others"]]
FRONT_END = 3e-3   # of vLLM 0.8.5 and a Triton server; today's vLLM: hardware.py
OVER_HTTP = ("rahman", "IOG", "TensorRT-LLM 0.14")
BUDGETS = {"LMDeploy": 8192, "nano-vllm": 16384}


# --- published figures ----------------------------------------------------------------------------

def nano_vllm():
    """The lengths that nano-vllm's bench.py draws with seed 0: 133,966 tokens of answers."""
    stream = random.Random(0)
    prompts = [len([stream.randint(0, 10000) for _ in range(stream.randint(100, 1024))])
               for _ in range(256)]
    return [(prompt, stream.randint(100, 1024)) for prompt in prompts]


def rahman():
    """Answers of 128 tokens, but 22% of them end after 1 to 4: 100 on average."""
    stream = random.Random(0)
    return [(256, 128 if stream.random() < 0.78 else stream.randint(1, 4)) for _ in range(300)]


def calculate(run):
    """{figure: value} of a published run. Whichever engine it was, "plain" stands for it."""
    # some ran beyond the context that the model was trained on
    shape = replace(MODELS[run["model"]], tp=run["tp"], block_size=10**6)
    gpu, engine = GPUS[run["gpu"]], ENGINES["plain"]
    kind, number, prompt, answer = (run[name] for name in ("kind", "requests", "input", "output"))
    if run["source"] in OVER_HTTP:
        engine = replace(engine, front_end=FRONT_END)
    clients = number if kind == "clients" else 0
    many = {"clients": 3 * number, "rate": 120}.get(kind, number)
    lengths = ([(prompt, answer or 1)] * many if isinstance(prompt, int) else
               {"nano_vllm": nano_vllm, "rahman": rahman}[prompt]())
    times = [*poisson(many, number, 0)] if kind == "rate" else None
    room = shape.room(gpu)
    if clients or kind == "rate" or not answer:
        stage, make, knobs = "prefix", workload, dict(
            max_batch=512, pages=room // 16, token_budget=BUDGETS.get(run["source"], 2048))
    else:   # an engine that reserves room; a static batch was one batch, if it nearly fits
        fits = kind == "static" and number * (prompt + answer) < 1.2 * room
        stage, make, knobs = "ragged, varlen", by_length, dict(
            max_batch=2048 if kind == "in-flight" else number, token_budget=8192,
            max_kv_tokens=10**9 if fits else room)
    f = figures(log_of(shape, gpu, STAGES[stage], make(lengths), times, clients, engine, **knobs))
    return {"tokens_per_s": f["tokens_per_s"], "itl_ms": f["itl_ms"]["p50"],
            "ttft_ms": f["ttft_ms"]["mean"]}


def by_length(lengths):
    """Requests for [(tokens of the prompt, of the answer), ...], without a list of each prompt."""
    for (prompt, _), request in zip(lengths, workload((1, answer) for _, answer in lengths)):
        request.prompt = range(prompt)
        yield request


def compare(sources):
    """The runs of these sources, each with what is "calculated", and the "error"."""
    rows = [{**run, "calculated": calculate(run)[run["figure"]]}
            for run in RUNS if run["source"] in sources]
    return [{**row, "error": row["calculated"] / row["published"] - 1} for row in rows]


def show_published():
    """The table of all published runs."""
    def line(r):
        size = f"{r['input']:,} in, {r['output']:,} out" if r["output"] else "mixed"
        return [r["source"] + "*" * (r["half"] == "chosen"),
                f"{r['kind']} {r['requests']:,}, {size}", f"{r['tp']} x {r['gpu']}", r["model"],
                r["figure"], f"{r['published']:,.1f}", f"{r['calculated']:,.1f}",
                f"{r['error']:+.0%}".replace("-0%", "+0%")]

    head = ["source", "run", "GPU", "model", "figure", "published", "calculated", "error"]
    rows = aligned([head, *map(line, compare(ABOUT["sources"]))])
    return f"{rows}\n\n* the constants were chosen on these"


# --- real runs, and other simulators --------------------------------------------------------------

FIGURES, HERE = ("ttft_ms", "e2e_ms", "between_ms"), "lab.simulate"


def calculate_real(run):
    """[mean TTFT, E2E, time between tokens] of a real run, in ms."""
    shape, gpu = replace(MODELS[run["model"]], tp=run["tp"]), GPUS[run["gpu"]]
    times = [*staged(run["stages"], seed=0)]
    requests = drawn(len(times), 0, [run["prompt"]] * 2, [run["output"]] * 2, prompts=100)
    f = figures(log_of(shape, gpu, generate, requests, times, engine=ENGINES["vllm"],
                       max_batch=ABOUT_REAL["max_batch"], token_budget=run["token_budget"],
                       pages=shape.room(gpu, run["memory"]) // 16))
    return [f[name]["mean"] for name in ("ttft_ms", "e2e_ms", "tpot_ms")]


def compare_real(runs):
    """[(run, {simulator: [error of each of FIGURES]}), ...]"""
    return [(run, {who: [value / run[name] - 1 for name, value in zip(FIGURES, values)]
                   for who, values in {HERE: calculate_real(run), **run["others"]}.items()})
            for run in runs]


def real_table(rows):
    """A head, and a line for each simulator: median errors of all runs and of groups of several."""
    found = defaultdict(lambda: defaultdict(list))   # group -> simulator -> [errors, ...]
    for run, errors in rows:
        kept_back = ["kept back"] * (run["half"] == "kept back")
        for group in ("all", f"{run['gpu']} x {run['tp']}", *kept_back):
            for who, values in errors.items():
                found[group][who].append([*map(abs, values)])
    groups = sorted((group for group in found if len(found[group][HERE]) > 1),
                    key=lambda group: -len(found[group][HERE]))
    yield ["median errors of TTFT, E2E, between tokens"] + [
        f"{group} ({len(found[group][HERE])} runs)" for group in groups]
    for who in found["all"]:
        yield [who, *(" ".join(f"{statistics.median(column):.0%}" for column in zip(*errors))
                      if (errors := found[group].get(who)) else "–" for group in groups)]


def show_real():
    """Every real run that was not overloaded, and the table of those that others predicted."""
    rows = compare_real([run for run in REAL if run["half"] != "overloaded"])
    runs = [["run", "", "", "requests/s", *FIGURES], *(
        [f"{run['model']}, {run['prompt']} + {run['output']}", f"{run['tp']} x {run['gpu']}",
         run["half"], "/".join(f"{rate:g}" for rate, _ in run["stages"]),
         *(f"{run[name]:,.1f} {error:+.0%}" for name, error in zip(FIGURES, errors[HERE]))]
        for run, errors in rows)]
    table = real_table((run, errors) for run, errors in rows if run["others"])
    return f"{aligned(runs)}\n\n{aligned([*table])}"
