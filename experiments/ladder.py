"""
All stages on one workload: the ladder's table. And the small workloads that the pictures show.

Steps and counts are the same on every machine, seconds are not.
"""
import statistics
from dataclasses import replace

import numpy as np

import command_line
from beyond import arrivals, simulate
from beyond.fairness import SCHEDULERS
from beyond.hardware import GPUS, MODELS
from checks.check import Check
from checks.xray import sights_at
from experiments import results
from experiments.results import Table
from explorer import page
from explorer.recorder import record
from loading.stages import STAGES
from request import Request
from toolbox import flags
from views.plots import COUNTED
from views.report import latencies, mean, percentile, totals

IDEAS = {   # of the README's table
    "unbatched": "one request, with a KV cache",
    "naive": "static batching: prompts padded to one length",
    "dynamic": "a new batch every step (*continuous batching*)",
    "chunked": "a token budget: decodes first, prompts in chunks",
    "interleaved": "decodes and chunks in one pass",
    "prepacked": "*off stage 2:* several prompts share a row",
    "ragged, varlen": "no rows: a stream of tokens",
    "paged": "memory in pages, shared beginnings"}


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
    counts = ("forward_passes", "slots", *COUNTED.values(), "score_entries", "copied_bytes",
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


# --- the experiment -------------------------------------------------------------------------------

def measure(args, device, dtype):
    """Runs all stages on the same prompts, and checks each against the unbatched run."""
    plain, tokenizer, requests = command_line.load_inputs(args)
    model = plain.optimize() if args.optimize else plain
    knobs = flags.given_knobs(args, SCHEDULERS)
    of_variants = [knob for knob in ("pack", "attention", "use_cache") if knob in knobs]
    for knob in of_variants:   # STAGES itself sets these
        del knobs[knob]
    of_one_run = [name for name in ("trace", "quiet") if getattr(args, name)]
    flags.say_ignored(args, of_variants + of_one_run, "where all stages run")

    repeats = 1 if args.quick else args.repeats
    traces = run_stages(model, requests, repeats=repeats, **knobs)
    naive = traces["naive"]
    if args.page:
        reference = None if args.no_check else plain
        page.write(args.page, {   # each stage once more, under the X-ray and the check
            name: record(STAGES[name], model, trace.requests, trace, reference,
                         **flags.knobs_of(STAGES[name], knobs)[0])
            for name, trace in traces.items()}, tokenizer)
    wrong = None if args.no_check else wrong_lines(model, plain, requests, **knobs)
    if wrong == []:
        print(f"{len(traces)} stages: each of {len(requests)} requests identical to unbatched")
    return {"repeats": repeats, "stages": {name: row_of(t) for name, t in traces.items()},
            "calculated": calculated(naive.requests, **knobs), "requests": len(requests),
            "prompt_tokens": sum(len(request.prompt) for request in requests),
            "generated": sum(len(request.generated) for request in naive.requests),
            "useful_scores": sum(p.useful_scores for p in naive.passes), "wrong": wrong}


def table(result):
    head = ["stage", "passes", "slots", "useful", f"scores ({result['useful_scores']:,} useful)",
            "K/V copied", "tokens/s", "TTFT mean", "ITL p99"]
    rows = [[name, f"{row['forward_passes']:,}", f"{row['slots']:,}",
             f"{row['useful'] / row['slots']:.0%}", f"{row['score_entries']:,}",
             f"{row['copied_bytes'] / 1e6:,.0f} MB", f"{row['tokens_per_second']:,.0f}",
             f"{row['ttft_mean'] * 1e3:,.0f} ms", f"{row['itl_p99'] * 1e3:.1f} ms"]
            for name, row in result["stages"].items()]
    how = (f"{result['requests']} prompts ({result['prompt_tokens']} prompt tokens, "
           f"{result['generated']} generated), each duration the median of {result['repeats']} "
           "runs")
    return Table(head, rows, how, title=how)


def ideas(result):
    """The README's ladder. Each column has one unit and one machine."""
    rows = []
    for number, (name, idea) in enumerate(IDEAS.items()):
        here, there, script = result["stages"][name], result["calculated"][name], name.split(",")[0]
        rows.append([f"{number} [{script}](generate_{script}.py)", idea,
                     f"{here['forward_passes']}", f"{here['useful'] / here['slots']:.0%}",
                     f"{there['tokens_per_s']:,.0f}"])
    head = ["stage", "the idea", "passes", "useful slots", "tokens/s, calculated, A100"]
    return Table(head, rows)
