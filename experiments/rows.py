"""
Forward time against the number of rows: why batching pays.

A forward pass reads all weights once, however many rows it computes. So a pass over 32 rows takes
much less than 32 times as long as one over a single row, until arithmetic is the limit.

With --gaps the command measures something else, why long prompts are cut into chunks: the time
between the tokens of running requests while a long prompt arrives.

    python -m experiments.rows
    python -m experiments.rows --plot rows.png
    python -m experiments.rows --gaps --plot gaps.png
"""
import statistics
import sys
import time
from dataclasses import replace

import torch

from experiments import figures, results, tables
from model import GPT, GPTConfig
from request import Request
from toolbox.cli import knobs_of, measuring_parser, measuring_place
from toolbox.load import load
from toolbox.stages import STAGES

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GAP_STAGES = {name: STAGES[name]
              for name in ("dynamic", "chunked", "interleaved", "ragged, varlen")}
ARRIVAL = 8   # the step at which the long prompt arrives


@torch.inference_mode()
def forward_times(model, rows=ROWS, repeats=7, seconds=8.0):
    """
    Median seconds of one forward pass over N tokens of N requests, without a past, for each N in
    `rows`: [(N, seconds), ...]. After `seconds`, no further N is started.
    """
    def attend(layer, q, k, v):
        return v   # each token sees only itself: the cost is that of the other layers

    points, started = [], time.perf_counter()
    for n in rows:
        tokens = torch.zeros(n, dtype=torch.long, device=model.device)
        points.append((n, results.median_seconds(lambda: model(tokens, tokens, attend),
                                                 model.device, repeats)))
        if time.perf_counter() - started > seconds:
            break
    return points


def decode_gaps(model, prompt_tokens, stages=GAP_STAGES, running=4, budget=64, repeats=3):
    """
    Some short requests decode, and at step ARRIVAL a long prompt arrives. For each of `stages`,
    {name: generate}: the time between tokens of the short ones, [(step, seconds), ...]. Medians
    over `repeats` runs, for which the stages take turns.
    """
    vocab = model.config.vocab_size
    short = [Request([(7 * i + j) % vocab for j in range(4)], ARRIVAL + 20, name=f"short{i}")
             for i in range(running)]
    long = Request([(11 * j) % vocab for j in range(prompt_tokens)], 8, name="long",
                   arrival=ARRIVAL)
    knobs = {"max_batch": running + 1, "token_budget": budget}

    def run(name):
        requests = [replace(request) for request in [*short, long]]
        stages[name](model, requests, **knobs_of(stages[name], knobs)[0])
        return requests[:-1]

    gaps = {}
    for name, runs in results.in_turn(stages, run, repeats).items():
        steps = {}
        for request in sum(runs, []):
            times = request.token_times
            for step, before, now in zip(request.token_steps[1:], times, times[1:]):
                steps.setdefault(step, []).append(now - before)
        gaps[name] = sorted((step, statistics.median(taken)) for step, taken in steps.items())
    return gaps


def measure(args):
    device, dtype, where = measuring_place(args)
    if args.model == "random":   # as fast as trained weights
        model = GPT(GPTConfig()).requires_grad_(False)
    else:
        model, _ = load(args.model)
    model.to(device, dtype)
    print(f"{args.model} on {where}")
    if args.gaps:
        prompt_tokens, repeats = 3 * model.config.block_size // 4, 1 if args.quick else 3
        print(f"a prompt of {prompt_tokens} tokens arrives while four requests decode")
        points, more = decode_gaps(model, prompt_tokens, repeats=repeats), {
            "prompt_tokens": prompt_tokens}
    else:
        points, repeats, more = forward_times(model, ROWS[:5] if args.quick else ROWS), 7, {}
    found = results.keep(args.json, "python -m experiments.rows", where, model=args.model,
                         repeats=repeats, points=points, **more)
    if args.gaps:
        tables.show("", *tables.gaps(found, form=".1f"))
    else:
        tables.show("", ("rows", "ms per forward pass", "ms per row"), [
            (n, f"{seconds * 1e3:.2f}", f"{seconds / n * 1e3:.3f}") for n, seconds in points])
    if args.plot:
        if args.gaps:
            figures.itl(points, ARRIVAL, prompt_tokens, args.plot)
        else:
            figures.rows({f"{args.model}, {args.dtype}, {device}": points}, args.plot)
        print(f"drawn in {args.plot}")
    return 0


def main(argv=None):
    p = measuring_parser("python -m experiments.rows", __doc__,
                         quick="at most 16 rows; with --gaps, one run of each stage")
    p.add_argument("--model", default="builtin",
                   help="builtin, a GPT-2 name, a local folder or file; or random: of the size of "
                        "GPT-2 small, with random weights")
    p.add_argument("--gaps", action="store_true",
                   help="measure the time between tokens while a long prompt arrives, instead")
    return p.run(measure, argv)


if __name__ == "__main__":
    sys.exit(main())
