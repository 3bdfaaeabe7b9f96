"""
All stages on the same workloads: the ladder's tables. And the small workloads of the pictures.

    twelve     the built-in prompts: passes, slots and speed
    gap        six requests decode when a long prompt arrives, as in motion.py: the worst wait
    common     the twelve behind a common beginning, in little memory: how many run at once, and
               how many tokens are computed

Counts are the same on every machine, and so is what is calculated. Measured seconds are not.
"""
import statistics
from dataclasses import replace

from lab.checks.check import Check
from lab.checks.traps import broken
from lab.checks.xray import sights_at
from lab.experiments import motion, results
from lab.experiments.results import Table
from lab.flags import knobs_of
from lab.loading.arrivals import workload
from lab.loading.load import load
from lab.loading.stages import STAGES
from lab.loading.workload import BEGINNING, PROMPTS, make_requests, read_prompts
from lab.simulate.calculated import figures, simulate
from lab.simulate.hardware import GPUS, MODELS
from request import Request

IDEAS = {   # of the README's table
    "unbatched": "one request, with a KV cache",
    "naive": "static batching: prompts padded to one length",
    "dynamic": "a new batch every step (*continuous batching*)",
    "chunked": "a token budget: decodes first, prompts in chunks",
    "interleaved": "decodes and chunks in one pass",
    "ragged, varlen": "no rows: a stream of tokens",
    "paged": "memory in pages, as answers grow",
    "prefix": "equal beginnings are computed and kept once"}
COMMON, ROOM = 96, 1024   # tokens of it that are used; and in the memory of all keys and values


def twelve(tokenizer):
    """The built-in prompts, as a stage's script has them."""
    return make_requests(read_prompts(PROMPTS), tokenizer, max_new_tokens=64, temperature=0.7,
                         top_k=None, seed=0)


def calculated(requests):
    """{stage: figures} of requests as long as these on an A100 with Llama 2 7B."""
    lengths = [(len(r.prompt), len(r.generated)) for r in requests]
    return {name: figures(simulate(MODELS["llama-2-7b"], GPUS["a100"], generate, workload(lengths)))
            for name, generate in STAGES.items()}


def behind_a_beginning(requests, tokenizer):
    """The requests' prompts behind a common beginning, as behind one system prompt."""
    beginning = tokenizer.encode(BEGINNING)[:COMMON]
    return [replace(request, prompt=beginning + request.prompt) for request in requests]


def knobs_for_room(name, requests):
    """
    The stage's knobs for memory of ROOM tokens. A stage without a limit on memory gets one on its
    batch: as many requests as fit if each had the longest prompt and the longest answer.
    """
    longest = (max(len(request.prompt) for request in requests)
               + max(request.max_new_tokens for request in requests) - 1)
    limits = {"max_kv_tokens": ROOM, "pages": ROOM // 16, "page_size": 16}
    if mine := knobs_of(STAGES[name], limits)[0]:
        return {"max_batch": len(requests), **mine}
    return knobs_of(STAGES[name], {"max_batch": max(ROOM // longest, 1)})[0]


def held_and_computed(trace):
    """The most requests that are in one step, and how many tokens are computed in all."""
    steps = {}
    for p in trace.passes:
        steps.setdefault(p.step, set()).update(name for name, _, _ in p.work)
    return {"at_once": max(map(len, steps.values())),
            "computed": sum(n for p in trace.passes for _, _, n in p.work)}


# --- workloads small enough for a picture ---------------------------------------------------------

def one_step(model):
    """Three decodes and a prefill chunk, as a rectangle and as a flat stream: {title: Sight}."""
    requests = [Request([(5 * i + 3 * j) % 64 for j in range(n)], 4, name=name)
                for i, (name, n) in enumerate(zip("ABCD", (4, 2, 1, 6)))]
    stages = {"interleaved: rectangle": "interleaved", "ragged, mask: flat stream": "ragged, mask"}
    return {title: sights_at(STAGES[stage], model, requests, step=1, token_budget=7)[0]
            for title, stage in stages.items()}


def some_prompts(model):
    """Five prompts of different lengths in packed rows: a Sight."""
    requests = [Request([1] * n, 1, name=name) for name, n in zip("ABCDE", (9, 3, 5, 1, 6))]
    return sights_at(STAGES["prepacked"], model, requests, step=0)[0]


def ruined(model, tokenizer, requests):
    """{name: [prompt, answer, answer under the published mask]} of requests that get another."""
    answers = [results.run(STAGES["interleaved"], model, requests).requests]
    with broken("published mask", show=False):
        answers += [results.run(STAGES["interleaved"], model, requests).requests]
    return {right.name: [tokenizer.decode(tokens) for tokens in (
        right.prompt, right.generated, wrong.generated)]
        for right, wrong in zip(*answers) if right.generated != wrong.generated}


# --- the experiment -------------------------------------------------------------------------------

def measure(args, device, dtype):
    """Runs all stages on the same prompts, and checks each against the unbatched run."""
    model, tokenizer = load()
    model, requests = model.to(device, dtype), twelve(tokenizer)

    def run(name, requests=requests, knobs={}):
        copies = [replace(request) for request in requests]
        check = Check(model, copies)
        return STAGES[name](model, copies, on_token=check.on_token, **knobs), check

    def wrong_in(name, check):
        return [f"WRONG: {name}: request '{v.name}': {v.detail}"
                for v in check() if v.verdict == "WRONG"]

    repeats, stages, common, wrong = 1 if args.quick else 3, {}, {}, []
    runs = results.in_turn(STAGES, run, repeats)
    for name, taken in runs.items():
        rows = [results.row_of(trace) for trace, _ in taken]   # counts are the same in all
        stages[name] = {what: statistics.median_low(row[what] for row in rows) for what in rows[0]}
        wrong += wrong_in(name, taken[0][1])
    begun = behind_a_beginning(requests, tokenizer)
    for name in STAGES:
        trace, check = run(name, begun, knobs_for_room(name, begun))
        common[name] = held_and_computed(trace)
        wrong += wrong_in(name, check)
    print(*wrong or [f"{len(requests)} requests in {len(stages)} stages: none is WRONG"], sep="\n")
    return {"repeats": repeats, "stages": stages, "wrong": wrong, "requests": len(requests),
            "calculated": calculated(runs["naive"][0][0].requests),
            "gap_ms": {name: motion.figures(motion.run(name))[0] for name in IDEAS},
            "ruined": ruined(model, tokenizer, requests), "common": common,
            "beginning": COMMON, "room": ROOM,
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
    """The README's ladder: figures that show what each stage is for."""
    rows = []
    for number, (name, idea) in enumerate(IDEAS.items()):
        here, common = result["stages"][name], result["common"][name]
        script = name.split(",")[0]
        rows.append([f"{number} [{script}](generate_{script}.py)", idea,
                     f"{here['useful'] / here['slots']:.0%}",
                     f"{result['calculated'][name]['tokens_per_s']:,.0f}",
                     f"{result['gap_ms'][name]:,.0f} ms", f"{common['at_once']}",
                     f"{common['computed']:,}"])
    n, begun, prompts = result["requests"], result["beginning"], result["prompt_tokens"]
    computed = result["common"]["unbatched"]["computed"]
    head = ["stage", "the idea", f"{n} prompts: useful", f"{n} prompts: tokens/s *",
            "long prompt: gap *", "same start: at once", "same start: tokens"]
    how = (f"{n} prompts: eight at a time. Long prompt: {motion.PROMPT:,} tokens arrive while "
           "six requests decode; the gap is the longest time between two of their tokens. Same "
           f"start: {begun} common tokens before each of the {n} prompts, and memory for "
           f"{result['room']:,}: requests that run at once, and tokens computed. "
           "Naive and dynamic then run as many as fit if each were the "
           f"longest. {computed:,} is {n} × {begun} and {prompts} of the prompts and "
           f"{computed - n * begun - prompts} of the answers. * Calculated for Llama 2 7B on an "
           "A100, where reading weights takes the time.")
    return Table(head, rows, how, words=2, small_print="{how}")


def bug(result):
    """What the published mask does to answers: the README's example."""
    def line(text, most=72):
        text = " ".join(text.removesuffix("<|endoftext|>").split())
        return f"{text[:most]}{'…' * (len(text) > most)}"

    rows = [[f"…{line(prompt)[-29:]}", line(right), line(wrong)] for prompt, right, wrong in (
        result["ruined"][name] for name in ("r5", "r6"))]
    how = (f"In *interleaved* the mask changes {len(result['ruined'])} of {result['requests']} "
           "answers. Here are two, from the same random numbers. Right is what the request gets "
           "alone, character by character: that it is nonsense, too, does not matter.")
    return Table(["prompt", "right", "with the published mask"], rows, how, words=3,
                 small_print="{how}")
