"""
Real runs, beside what this and other simulators say of them: `python -m lab.simulate --real`.

real_runs.json has the runs, and where they come from. Of the constants of --engine vllm, three were
fitted on them (docs/gpu.md): on either half, and judged on the other.
"""
import json
import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from generate_prefix import generate
from lab.loading.arrivals import drawn, staged
from lab.simulate.calculated import runner
from lab.simulate.hardware import ENGINES, GPUS, MODELS
from lab.views.report import aligned, figures

DATA = json.loads(Path(__file__).with_name("real_runs.json").read_text(encoding="utf-8"))
RUNS = [dict(zip(DATA["columns"], run)) for run in DATA["runs"]]
PREDICTED = [run for run in RUNS if run["others"]]
FIGURES, HERE = ("ttft_ms", "e2e_ms", "between_ms"), "lab.simulate"


def calculate(run, engine=ENGINES["vllm"]):
    """[mean TTFT, E2E, time between tokens] of a run, in ms."""
    shape, gpu = replace(MODELS[run["model"]], tp=run["tp"]), GPUS[run["gpu"]]
    times = [*staged(run["stages"], seed=0)]
    log = runner(shape, gpu, generate, engine, max_batch=DATA["max_batch"],
                 token_budget=run["token_budget"], pages=shape.room(gpu, run["memory"]) // 16)(
        lambda: drawn(len(times), 0, [run["prompt"]] * 2, [run["output"]] * 2, 100), times)
    f = figures(log)
    return [f[name]["mean"] for name in ("ttft_ms", "e2e_ms", "tpot_ms")]


def compare(runs=RUNS):
    """[(run, {simulator: [error of each of FIGURES]}), ...]"""
    rows = []
    for run in runs:
        said = {HERE: calculate(run), **run["others"]}
        rows.append((run, {who: [value / run[name] - 1 for name, value in zip(FIGURES, values)]
                           for who, values in said.items()}))
    return rows


def table(rows):
    """A head, and a line for each simulator: median errors by GPU and tensor parallel ranks."""
    found = defaultdict(lambda: defaultdict(list))
    for run, errors in rows:
        for who, values in errors.items():
            for group in "all", f"{run['gpu']} x {run['tp']}":
                found[who][group].append([*map(abs, values)])
    groups = sorted({group for of in found.values() for group in of})
    yield ["median errors of TTFT, E2E, between tokens"] + [
        f"{group} ({len(found[HERE][group])} runs)" for group in groups]
    for who, of in found.items():
        yield [who, *(" ".join(f"{statistics.median(column):.0%}" for column in zip(*of[group]))
                      if of[group] else "–" for group in groups)]


def show():
    rows = compare([run for run in RUNS if run["half"] != "overloaded"])
    print(aligned([["run", "", "", "requests/s", *FIGURES], *(
        [f"{run['model']}, {run['prompt']} + {run['output']}", f"{run['tp']} x {run['gpu']}",
         run["half"], "/".join(f"{rate:g}" for rate, _ in run["stages"]),
         *(f"{run[name]:,.1f} {error:+.0%}" for name, error in zip(FIGURES, errors[HERE]))]
        for run, errors in rows)]), "", aligned([*table(rows)]), sep="\n")
    return 0
