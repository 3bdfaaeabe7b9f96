"""
All stages on one workload: as a table, as a page to step through, as the docs' pictures.

Steps and counts are the same on every machine, seconds are not. Every stage is checked against the
unbatched run.

    python -m experiments.ladder
    python -m experiments.ladder --pictures experiments/pictures
    python -m experiments.ladder --page all.html
"""
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

import command_line
from beyond import arrivals, simulate
from beyond.fairness import SCHEDULERS
from beyond.hardware import GPUS, MODELS
from checks.check import Check
from checks.xray import sights_at
from experiments import figures, memory, results, tables
from experiments.rows import ARRIVAL
from explorer import page
from explorer.recorder import record
from loading.stages import STAGES
from request import Request
from toolbox import flags
from views import sights
from views.report import latencies, mean, percentile, totals


def run_stages(model, requests, stages=STAGES, repeats=1, **knobs):
    """
    Runs each stage on copies of `requests`, `repeats` times in turn. Returns {stage: trace}, with
    the median of each duration.
    """
    runs = results.in_turn(
        stages, lambda name: results.run(stages[name], model, requests, knobs), repeats, warm_up=0)
    return {name: with_medians(taken) for name, taken in runs.items()}


def with_medians(runs):
    """
    The first of several runs that did the same work. The time between any two successive events,
    which are steps and tokens, becomes the median over all runs; so does that of each pass.
    """
    trace = runs[0]
    events = [sorted([run.started, *run.step_times.values(),
                      *(time for request in run.requests for time in request.token_times)])
              for run in runs]
    median = np.cumsum([events[0][0], *np.median(np.diff(events), axis=0)])
    new = dict(zip(events[0], median.tolist()))
    trace.step_times = {step: new[time] for step, time in trace.step_times.items()}
    for request in trace.requests:
        request.token_times = [new[time] for time in request.token_times]
    for same in zip(*(run.passes for run in runs)):
        same[0].seconds = statistics.median(p.seconds for p in same)
    return trace


def wrong_lines(model, plain, requests, **knobs):
    """
    Runs each stage once more and checks it against the unbatched run of `plain`, the model before
    optimize(). Returns a line for each request that is WRONG.
    """
    lines = []
    for name, generate in STAGES.items():
        copies = [replace(request) for request in requests]
        check = Check(plain, copies)
        generate(model, copies, on_token=check.on_token, **flags.knobs_of(generate, knobs)[0])
        lines += [f"WRONG: {name}: request '{v.name}': {v.detail}"
                  for v in check() if v.verdict == "WRONG"]
    return lines


def row_of(trace):
    """What the table of all stages says of one."""
    t, waits = totals(trace), latencies(trace)
    counts = ("forward_passes", "slots", "useful", "score_entries", "copied_bytes",
              "tokens_per_second")
    return {**{what: t[what] for what in counts}, "ttft_mean": mean(waits["ttft_seconds"]),
            "itl_p99": percentile(waits["itl_seconds"], 99)}


def calculated(requests, **knobs):
    """{stage: figures} of requests as long as these on an A100 with Llama 2 7B."""
    lengths = [(len(r.prompt), len(r.generated)) for r in requests]
    return {name: simulate.figures(simulate.simulate(
        MODELS["llama-2-7b"], GPUS["a100"], generate, arrivals.workload(lengths),
        **flags.knobs_of(generate, knobs)[0])) for name, generate in STAGES.items()}


# --- workloads small enough for a picture ---------------------------------------------------------

def small_workload(config):
    """Eight requests, short and long prompts and answers; the longest prompt arrives late."""
    sizes = [(4, 9, 0), (9, 4, 0), (3, 14, 0), (12, 6, 0), (5, 7, 0), (40, 5, 3), (6, 8, 5),
             (3, 5, 6)]
    return [Request([(5 * i + 3 * j) % config.vocab_size for j in range(prompt)], new, name=name,
                    arrival=arrival)
            for i, (name, (prompt, new, arrival)) in enumerate(zip("ABCDEFGH", sizes))]


def one_step(model):
    """Three decodes and a prefill chunk, as a rectangle and as a flat stream: {title: Sight}."""
    requests = [Request([(5 * i + 3 * j) % 64 for j in range(n)], 4, name=name)
                for i, (name, n) in enumerate(zip("ABCD", (4, 2, 1, 6)))]
    stages = {"stage 4: rectangle": "interleaved", "stage 6: flat stream": "ragged, mask"}
    return {title: sights_at(STAGES[stage], model, requests, step=1, token_budget=7)[0]
            for title, stage in stages.items()}


def some_prompts(model):
    """Five prompts of different lengths in stage 5: a Sight."""
    requests = [Request([1] * n, 1, name=name) for name, n in zip("ABCDE", (9, 3, 5, 1, 6))]
    return sights_at(STAGES["prepacked"], model, requests, step=0)[0]


def draw_pictures(model, folder, traces):
    """Draws the pictures into a folder. Seconds come from the committed results."""
    small = run_stages(model, small_workload(model.config), max_batch=4, token_budget=16)
    shown = ("naive", "dynamic", "chunked", "interleaved", "ragged, varlen")
    figures.timelines([small[name] for name in shown], folder / "timelines.png")
    figures.timelines(list(memory.storm(model).values()), folder / "storm.png")
    figures.pool(memory.filling_pool(model), folder / "pool.png")
    sights.draw(one_step(model), folder / "mask.png")
    figures.packing(some_prompts(model), folder / "packing.png")
    figures.slots([trace for name, trace in traces.items() if "no cache" not in name],
                  folder / "slots.png")
    times = {"the built-in model, 1.0M parameters": results.load("rows_builtin")["points"],
             "GPT-2 small, 124M parameters": results.load("rows")["points"]}
    figures.rows(times, folder / "rows.png")
    gaps = results.load("gaps")
    figures.itl(gaps["points"], ARRIVAL, gaps["prompt_tokens"], folder / "itl.png")
    figures.prepacking(results.load("prepacking"), folder / "prepacking.png")
    large = [result for result in results.load("bench") if result["model"] == "gpt2"]
    figures.bench(large, folder / "bench.png")


# --- the command ----------------------------------------------------------------------------------

def compare(args):
    if args.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, not {args.repeats}")
    folder = args.pictures and Path(args.pictures)
    if folder:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--pictures {folder}: {error.strerror}") from None
        flags.check_path(folder / "mask.png", "--pictures")
    *_, where = flags.measuring_place(args)
    plain, tokenizer, requests = command_line.load_inputs(args)
    model = plain.optimize() if args.optimize else plain
    knobs = flags.given_knobs(args, SCHEDULERS)
    of_variants = [knob for knob in ("pack", "attention", "use_cache") if knob in knobs]
    for knob in of_variants:   # STAGES itself sets these
        del knobs[knob]
    of_one_run = [name for name in ("plot", "trace", "quiet") if getattr(args, name)]
    flags.say_ignored(args, of_variants + of_one_run, "where all stages run")

    prompt_tokens = sum(len(request.prompt) for request in requests)
    print(f"{len(requests)} requests, {prompt_tokens} prompt tokens, {where}")
    traces = run_stages(model, requests, repeats=args.repeats, **knobs)
    naive = traces["naive"]
    found = results.keep(
        args.json, "python -m experiments.ladder", where, repeats=args.repeats,
        stages={name: row_of(trace) for name, trace in traces.items()},
        calculated=calculated(naive.requests, **knobs),
        requests=len(requests), prompt_tokens=prompt_tokens,
        generated=sum(len(r.generated) for r in naive.requests),
        useful_scores=sum(p.useful_scores for p in naive.passes))
    tables.show("", *tables.ladder(found))
    if folder:
        draw_pictures(model, folder, traces)
    if args.page:
        reference = None if args.no_check else plain
        page.write(args.page, {   # each stage once more, under the X-ray and the check
            name: record(STAGES[name], model, trace.requests, trace, reference,
                         **flags.knobs_of(STAGES[name], knobs)[0])
            for name, trace in traces.items()}, tokenizer)
    if args.no_check:
        return 0
    wrong = wrong_lines(model, plain, requests, **knobs)
    print("\n".join(wrong) or f"{len(traces)} stages: each of {len(requests)} requests identical "
          "to unbatched")
    return int(bool(wrong))


def main(argv=None):
    p = command_line.parser(__doc__)
    p.prog = "python -m experiments.ladder"
    p.add_argument("--pictures", metavar="DIR", help="draw the docs' pictures into this folder")
    p.add_argument("--json", metavar="FILE.json", help="write the figures of the table")
    p.add_argument("--repeats", type=int, default=3,
                   help="runs of each stage, in turn; the median of each duration counts")
    return p.run(compare, argv)


if __name__ == "__main__":
    sys.exit(main())
