"""
Real runs of vLLM under random arrivals, beside what is calculated.

    python -m lab.simulate --real

real_runs.json has the runs, where they come from, and what other simulators say of them. The
constants of hardware.py were chosen on other figures, which stand in published.json. Two come from
these runs; docs/gpu.md names them.
"""
import json
import statistics
from dataclasses import replace
from pathlib import Path

from generate_prefix import generate
from lab.loading.arrivals import drawn, staged
from lab.simulate.calculated import log_of
from lab.simulate.hardware import ENGINES, GPUS, MODELS
from lab.views.report import aligned, figures

ABOUT = json.loads(Path(__file__).with_name("real_runs.json").read_text(encoding="utf-8"))
RUNS = [dict(zip(ABOUT["columns"], run)) for run in ABOUT["runs"]]
PREDICTED = [run for run in RUNS if run["others"]]   # by other simulators

HERE = "lab.simulate"   # among the simulators
FIGURES = ("ttft_ms", "e2e_ms", "between_ms")   # of a run, in the order of every list of errors


def calculate(run):
    """[mean TTFT, E2E, time between tokens] of a real run, in ms."""
    shape = replace(MODELS[run["model"]], tp=run["tp"])
    gpu = GPUS[run["gpu"]]
    times = [*staged(run["stages"], seed=0)]
    prompt = run["prompt"], run["prompt"]   # bounds: all have this length
    answer = run["output"], run["output"]
    requests = drawn(len(times), 0, prompt, answer, prompts=100)
    log = log_of(shape, gpu, generate, requests, times, engine=ENGINES["vllm"],
                 max_batch=ABOUT["max_batch"], token_budget=run["token_budget"],
                 pages=shape.room(gpu, run["memory"]) // 16)
    waits = figures(log)
    return [waits[name]["mean"] for name in ("ttft_ms", "e2e_ms", "tpot_ms")]


def compare(runs):
    """[(run, {simulator: [error of each of FIGURES]}), ...]"""
    compared = []
    for run in runs:
        predictions = {HERE: calculate(run), **run["others"]}
        errors = {name: errors_of(run, values) for name, values in predictions.items()}
        compared.append((run, errors))
    return compared


def errors_of(run, values):
    """Relative ones: 0.1 is 10% too much."""
    return [value / run[name] - 1 for name, value in zip(FIGURES, values)]


# --- tables ---------------------------------------------------------------------------------------

def table(compared):
    """A head, and a line for each simulator: median errors of all runs and of groups of several."""
    groups = groups_of(compared)
    yield ["median errors of TTFT, E2E, between tokens",
           *(f"{group} ({len(runs)} runs)" for group, runs in groups.items())]
    simulators = {}   # in the order in which they appear; a dict has no doubles
    for _, errors in compared:
        simulators.update(dict.fromkeys(errors))
    for simulator in simulators:
        yield [simulator, *(median_errors(runs, simulator) for runs in groups.values())]


def groups_of(compared):
    """{group: its runs' errors}, the largest first. A group of one run says nothing."""
    groups = {"all": []}
    for run, errors in compared:
        names = ["all", f"{run['gpu']} x {run['tp']}"]
        if run["half"] == "kept back":
            names.append("kept back")
        for name in names:
            groups.setdefault(name, []).append(errors)
    several = [(name, runs) for name, runs in groups.items() if len(runs) > 1]
    return dict(sorted(several, key=lambda group: -len(group[1])))


def median_errors(runs, simulator):
    """The medians in one cell, over those of the runs that this simulator predicted."""
    predicted = [errors[simulator] for errors in runs if simulator in errors]
    if not predicted:
        return "–"
    medians = []
    for errors in zip(*predicted):
        medians.append(statistics.median(abs(error) for error in errors))
    return " ".join(f"{median:.0%}" for median in medians)


def show():
    """Every real run that was not overloaded, and the table of those that others predicted."""
    compared = compare([run for run in RUNS if run["half"] != "overloaded"])
    lines = [["run", "", "", "requests/s", *FIGURES]]
    for run, errors in compared:
        lines.append(line_of(run, errors[HERE]))
    predicted = [(run, errors) for run, errors in compared if run["others"]]
    return f"{aligned(lines)}\n\n{aligned([*table(predicted)])}"


def line_of(run, errors):
    rates = "/".join(f"{rate:g}" for rate, _ in run["stages"])
    cells = [f"{run[name]:,.1f} {error:+.0%}" for name, error in zip(FIGURES, errors)]
    return [f"{run['model']}, {run['prompt']} + {run['output']}", f"{run['tp']} x {run['gpu']}",
            run["half"], rates, *cells]
