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
from collections import defaultdict
from functools import partial

import numpy as np
import torch

from experiments import figures, results, tables
from loading.load import load
from loading.stages import STAGES
from model import GPT, GPTConfig
from request import Request
from toolbox.flags import measuring_parser, measuring_place

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
    points, started = [], time.perf_counter()
    for n in rows:
        tokens = torch.zeros(n, dtype=torch.long, device=model.device)
        # each token sees only itself: the cost is that of the other layers
        points.append((n, results.median_seconds(
            lambda: model(tokens, tokens, lambda layer, q, k, v: v), model.device, repeats)))
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
    knobs, gaps = {"max_batch": running + 1, "token_budget": budget}, {}

    def run(name):
        return results.run(stages[name], model, [*short, long], knobs).requests[:-1]

    for name, runs in results.in_turn(stages, run, repeats).items():
        steps = defaultdict(list)
        for request in sum(runs, []):
            for step, gap in zip(request.token_steps[1:], np.diff(request.token_times).tolist()):
                steps[step].append(gap)
        gaps[name] = sorted((step, statistics.median(taken)) for step, taken in steps.items())
    return gaps


def measure(args):
    device, dtype, where = measuring_place(args)
    # random weights run as fast as trained ones
    model = GPT(GPTConfig()) if args.model == "random" else load(args.model)[0]
    model.requires_grad_(False).to(device, dtype)
    print(f"{args.model} on {where}")
    keep = partial(results.keep, args.json, "python -m experiments.rows", where, model=args.model)
    if args.gaps:
        prompt_tokens, repeats = 3 * model.config.block_size // 4, 1 if args.quick else 3
        print(f"a prompt of {prompt_tokens} tokens arrives while four requests decode")
        points = decode_gaps(model, prompt_tokens, repeats=repeats)
        found = keep(repeats=repeats, points=points, prompt_tokens=prompt_tokens)
        tables.show("", *tables.gaps(found, form=".1f"))
        draw = partial(figures.itl, points, ARRIVAL, prompt_tokens)
    else:
        points = forward_times(model, ROWS[:5] if args.quick else ROWS)
        keep(repeats=7, points=points)
        tables.show("", ("rows", "ms per forward pass", "ms per row"), [
            (n, f"{seconds * 1e3:.2f}", f"{seconds / n * 1e3:.3f}") for n, seconds in points])
        draw = partial(figures.rows, {f"{args.model}, {args.dtype}, {device}": points})
    if args.plot:
        print(f"drawn in {draw(args.plot)}")
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
