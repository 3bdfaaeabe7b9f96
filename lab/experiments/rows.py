"""
Two measurements that explain the stages: a pass over more rows, and a long prompt that arrives.

A forward pass reads all weights once, however many rows it computes. So a pass over 32 rows takes
much less than 32 times as long as one over a single row, until arithmetic is the limit.
"""
import numpy as np
import torch

from lab.checks.check import run
from lab.experiments import results
from lab.experiments.results import Table
from lab.loading.load import load
from lab.loading.stages import STAGES
from lab.views.report import gaps
from model import GPT, GPTConfig
from request import Request

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
GAP_STAGES = "dynamic", "chunked", "interleaved", "ragged, varlen"
BUDGET = 64   # tokens a step
ARRIVAL = 8   # the step at which the long prompt arrives
NAMES = {"builtin": "built-in model", "random": "GPT-2, 124M"}
FLAGS = {"--model": dict(
    default="builtin", help="builtin, a GPT-2 name, a local folder or file; or random: of the "
                            "size of GPT-2 small, with random weights")}


def model_of(args, device, dtype):
    # random weights run as fast as trained ones
    model = GPT(GPTConfig()) if args.model == "random" else load(args.model)[0]
    return model.requires_grad_(False).to(device, dtype)


@torch.inference_mode()
def measure_rows(args, device, dtype):
    """The time of a forward pass against its number of rows: why batching pays."""
    model, points = model_of(args, device, dtype), []
    for n in ROWS[:5] if args.quick else ROWS:
        tokens = torch.zeros(n, dtype=torch.long, device=device)
        # each token sees only itself: the cost is that of the other layers
        points.append((n, results.median_seconds(
            lambda: model(tokens, tokens, lambda layer, q, k, v: v), device)))
    return {"model": args.model, "points": points}


def measure_gaps(args, device, dtype):
    """The time between tokens while a long prompt arrives: why prompts are cut into chunks."""
    model, repeats = model_of(args, device, dtype), 1 if args.quick else 3
    vocab, prompt_tokens = model.config.vocab_size, 3 * model.config.block_size // 4
    print(f"a prompt of {prompt_tokens} tokens arrives while four requests decode")
    short = [Request([(7 * i + j) % vocab for j in range(4)], ARRIVAL + 20, name=f"short{i}")
             for i in range(4)]
    long = Request([11 * j % vocab for j in range(prompt_tokens)], 8, name="long", arrival=ARRIVAL)

    def run_stage(name):
        trace = run(STAGES[name], model, [*short, long], max_batch=5, token_budget=BUDGET)
        return trace.requests[:-1]

    points = {}   # of the short requests: [(step, median of seconds), ...]
    for name, runs in results.in_turn(GAP_STAGES, run_stage, repeats).items():
        requests = sum(runs, [])   # they get their tokens in the same steps
        medians = np.median([gaps(request.token_times) for request in requests], axis=0)
        points[name] = [*zip(requests[0].token_steps[1:], medians.tolist())]
    return {"model": args.model, "repeats": repeats, "prompt_tokens": prompt_tokens,
            "points": points}


def curves(*models):
    """{name of a model: [(rows, ms), ...]}"""
    points = {}
    for result in models:
        name = NAMES.get(result["model"], result["model"])
        points[name] = [(n, 1e3 * seconds) for n, seconds in result["points"]]
    return points


def gains(*models):
    """{name of a model: [(rows, tokens a second as a multiple of one row's), ...]}"""
    multiples = {}
    for name, points in curves(*models).items():
        _, one_row = points[0]
        multiples[name] = [(n, n * one_row / ms) for n, ms in points]
    return multiples


def rows_table(*models):
    """Of one model or several."""
    times, multiples = curves(*models), gains(*models)
    rows = []
    for i, (n, _) in enumerate(next(iter(times.values()))):
        cells = [f"{times[name][i][1]:,.2f} ms, ×{multiples[name][i][1]:.1f}" for name in times]
        rows.append([n, *cells])
    return Table(["rows", *times], rows, "one forward pass, medians of 7; ×: tokens a second, "
                                         "as a multiple of one row's")


def gaps_table(result):
    rows = []
    for name, points in result["points"].items():
        ms = np.percentile([1e3 * gap for _, gap in points], [50, 99, 100])
        rows.append([name, *(f"{t:,.0f} ms" if t > 10 else f"{t:.1f} ms" for t in ms)])
    return Table(["time between tokens of four requests", "p50", "p99", "worst"], rows,
                 f"medians of {result['repeats']}")
