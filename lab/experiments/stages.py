"""
All stages on the twelve built-in prompts, and the small workloads of the pictures.

Counts are the same on every machine. Seconds are not.
"""
import statistics

from lab.checks.check import run, run_checked
from lab.checks.traps import broken
from lab.checks.xray import sights_at
from lab.experiments import results
from lab.experiments.results import Table
from lab.flags import limited
from lab.loading.load import load, set_threads
from lab.loading.stages import SCRIPTS, STAGES
from lab.loading.workload import builtin_prompts, make_requests
from lab.views import stage_table
from request import Request

IDEAS = {   # of the README's table
    "unbatched": "one request, with a KV cache",
    "naive": "static batching: prompts padded to one length",
    "dynamic": "a new batch every step (*continuous batching*)",
    "chunked": "a token budget: long prompts come in chunks",
    "interleaved": "decodes and chunks in one pass",
    "ragged": "no rows: a stream of tokens",
    "paged": "memory in pages, as answers grow",
    "prefix": "equal beginnings are computed and kept once"}


def twelve(tokenizer):
    """The built-in prompts, as a stage's script has them."""
    return make_requests(builtin_prompts(), tokenizer, max_new_tokens=128, temperature=0.7,
                         top_k=None, seed=0)


def limits(name, model, requests):
    """The limits of a stage, as its script has them."""
    return limited(STAGES[name], {}, requests, model.config.block_size)


# --- workloads small enough for a picture ---------------------------------------------------------

def one_step(model):
    """Three decodes and a prefill chunk, as a rectangle and as a flat stream: {title: Sight}."""
    requests = []
    for i, (name, length) in enumerate({"A": 4, "B": 2, "C": 1, "D": 6}.items()):
        prompt = [(5 * i + 3 * j) % 64 for j in range(length)]
        requests.append(Request(prompt, 4, name=name))
    stages = {"interleaved: rectangle": "interleaved", "ragged, mask: flat stream": "ragged, mask"}
    return {title: sights_at(STAGES[stage], model, requests, step=1, token_budget=7)[0]
            for title, stage in stages.items()}


def some_prompts(model):
    """Five prompts of different lengths in packed rows: a Sight."""
    lengths = {"A": 9, "B": 3, "C": 5, "D": 1, "E": 6}
    requests = [Request([1] * length, 1, name=name) for name, length in lengths.items()]
    return sights_at(STAGES["prepacked"], model, requests, step=0)[0]


def ruined(model, tokenizer, requests):
    """{name: [prompt, answer, answer under the published mask]} of requests that get another."""
    knobs = limits("interleaved", model, requests)

    def answers():
        return run(STAGES["interleaved"], model, requests, **knobs).requests

    right = answers()
    with broken("published mask", show=False):
        wrong = answers()
    changed = {}
    for request, other in zip(right, wrong):
        if request.generated != other.generated:
            texts = request.prompt, request.generated, other.generated
            changed[request.name] = [tokenizer.decode(tokens) for tokens in texts]
    return changed


# --- the experiment -------------------------------------------------------------------------------

def measure(args, device, dtype):
    """Runs all stages on the same prompts, and checks each against the unbatched run."""
    model, tokenizer = load()
    model, requests = model.to(device, dtype), twelve(tokenizer)
    set_threads(model)   # as a script does

    def run_stage(name):
        return run_checked(STAGES[name], model, requests, **limits(name, model, requests))

    repeats, stages, wrong = 1 if args.quick else 3, {}, []
    runs = results.in_turn(STAGES, run_stage, repeats)
    for name, runs_of_stage in runs.items():
        rows = [results.row_of(trace) for trace, _ in runs_of_stage]   # counts are the same in all
        stages[name] = medians(rows)
        _, check = runs_of_stage[0]
        for verdict in check():
            if verdict.verdict == "WRONG":
                wrong.append(f"WRONG: {name}: request '{verdict.name}': {verdict.detail}")
    print(*wrong or [f"{len(requests)} requests in {len(stages)} stages: none is WRONG"], sep="\n")
    trace, _ = next(iter(runs.values()))[0]   # all have the same answers
    return {"repeats": repeats, "stages": stages, "wrong": wrong, "requests": len(requests),
            "stage_table": stage_table.rows(trace.requests, model.config),
            "ruined": ruined(model, tokenizer, requests),
            "prompt_tokens": sum(len(request.prompt) for request in requests),
            "generated": stages["naive"]["generated"],
            "useful_scores": stages["naive"]["useful_scores"]}


def medians(rows):
    """Of the figures of several runs: {name: median}"""
    return {name: statistics.median_low(row[name] for row in rows) for name in rows[0]}


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
    """
    The README's table: what each stage is for, as its script's last table says it. It has four
    columns, so that it fits a phone.
    """
    rows, at_once = [], {}
    for number, name in enumerate(SCRIPTS):
        passes, slots, _, gap, most = result["stage_table"][name]
        stage = f"{number} [{name}](generate_{name}.py)<br>{IDEAS[name]}"
        rows.append([stage, f"{passes:,}", f"{slots:,}", f"{gap:,}"])
        at_once.setdefault(most, []).append(name)
    together = "; ".join(f"{', '.join(names)} {most}" for most, names in at_once.items())
    how = (f"Each script runs the same {result['requests']} prompts in the same memory, and prints "
           f"this table at its end. The most requests in a step: {together}.")
    return Table(["stage", "passes", "slots", "worst gap"], rows, how, small_print="{how}")


def bug(result):
    """What the published mask does to answers: the README's example."""
    def line(text):
        return " ".join(text.removesuffix("<|endoftext|>").split())

    def beginning(text, most=72):
        return f"{line(text)[:most]}{'…' * (len(line(text)) > most)}"

    prompt, right, wrong = result["ruined"]["r8"]
    rows = [["prompt", f"…{line(prompt)[-36:]}"], ["right", beginning(right)],
            ["**published mask**", beginning(wrong)]]
    how = (f"In *interleaved* the mask changes {len(result['ruined'])} of {result['requests']} "
           "answers. Here is one, drawn with the same random numbers. *Right* is what the request "
           "gets alone, character by character; that it is nonsense as well does not matter.")
    return Table(["", "text"], rows, how, words=2,
                 small_print="{how}")
