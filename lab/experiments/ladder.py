"""
All stages on one workload: the ladder's table. And the small workloads that the pictures show.

Steps and counts are the same on every machine, seconds are not.
"""
import statistics
from dataclasses import replace

from lab.checks.check import Check
from lab.checks.xray import sights_at
from lab.experiments import results
from lab.experiments.results import Table
from lab.loading.load import load
from lab.loading.stages import STAGES
from lab.loading.workload import PROMPTS, make_requests, read_prompts
from lab.simulate.arrivals import workload
from lab.simulate.calculated import figures, simulate
from lab.simulate.hardware import GPUS, MODELS
from request import Request

IDEAS = {   # of the README's table
    "unbatched": "one request, with a KV cache",
    "naive": "static batching: prompts padded to one length",
    "dynamic": "a new batch every step (*continuous batching*)",
    "chunked": "a token budget: decodes first, prompts in chunks",
    "interleaved": "decodes and chunks in one pass",
    "prepacked": "*off stage 2:* several prompts share a row",
    "ragged, varlen": "no rows: a stream of tokens",
    "paged": "memory in pages, shared beginnings"}


def twelve(tokenizer):
    """The built-in prompts, as a stage's script has them."""
    return make_requests(read_prompts(PROMPTS), tokenizer, max_new_tokens=64, temperature=0.7,
                         top_k=None, seed=0)


def calculated(requests):
    """{stage: figures} of requests as long as these on an A100 with Llama 2 7B."""
    lengths = [(len(r.prompt), len(r.generated)) for r in requests]
    return {name: figures(simulate(MODELS["llama-2-7b"], GPUS["a100"], generate, workload(lengths)))
            for name, generate in STAGES.items()}


# --- workloads small enough for a picture ---------------------------------------------------------

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
    model, tokenizer = load()
    model, requests = model.to(device, dtype), twelve(tokenizer)

    def run(name):
        copies = [replace(request) for request in requests]
        check = Check(model, copies)
        return STAGES[name](model, copies, on_token=check.on_token), check

    repeats, stages, wrong = 1 if args.quick else 3, {}, []
    runs = results.in_turn(STAGES, run, repeats)
    for name, taken in runs.items():
        rows = [results.row_of(trace) for trace, _ in taken]   # counts are the same in all
        stages[name] = {what: statistics.median_low(row[what] for row in rows) for what in rows[0]}
        check = taken[0][1]
        wrong += [f"WRONG: {name}: request '{v.name}': {v.detail}"
                  for v in check() if v.verdict == "WRONG"]
    print(*wrong or [f"{len(requests)} requests in {len(stages)} stages: none is WRONG"], sep="\n")
    return {"repeats": repeats, "stages": stages, "wrong": wrong, "requests": len(requests),
            "calculated": calculated(runs["naive"][0][0].requests),
            "prompt_tokens": sum(len(request.prompt) for request in requests),
            "generated": stages["naive"]["generated"],
            "useful_scores": stages["naive"]["useful_scores"]}


def table(result):
    head = ["stage", "passes", "slots", "useful", f"scores ({result['useful_scores']:,} useful)",
            "K/V copied", "tokens/s", "TTFT mean", "ITL p99"]
    rows = [[name, f"{row['forward_passes']:,}", f"{row['slots']:,}",
             f"{row['useful'] / row['slots']:.0%}", f"{row['score_entries']:,}",
             f"{row['copied_bytes'] / 1e6:,.0f} MB", f"{row['tokens_per_second']:,.0f}",
             f"{row['ttft_mean'] * 1e3:,.0f} ms", f"{row['itl_p99'] * 1e3:.1f} ms"]
            for name, row in result["stages"].items()]
    how = (f"{result['requests']} prompts ({result['prompt_tokens']} prompt tokens, "
           f"{result['generated']} generated), medians of {result['repeats']} runs")
    return Table(head, rows, how)


def ideas(result):
    """The README's ladder. Each column has one unit and one machine."""
    rows = []
    for number, (name, idea) in enumerate(IDEAS.items()):
        here, there = result["stages"][name], result["calculated"][name]
        script = name.split(",")[0]
        rows.append([f"{number} [{script}](generate_{script}.py)", idea,
                     f"{here['forward_passes']}", f"{here['useful'] / here['slots']:.0%}",
                     f"{there['tokens_per_s']:,.0f}"])
    head = ["stage", "the idea", "passes", "useful slots", "tokens/s, calculated, A100"]
    return Table(head, rows, words=2, small_print="")
