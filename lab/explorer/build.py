"""
Builds docs/explorer.html: all stages on requests.jsonl, the guided walk, and "Try it".

Every stage runs on the built-in model, under the X-ray and the check. All times are those of a
calculated GPU (lab/simulate/): so the page is the same on every machine. "Try it" has a run
on that GPU for each setting of the knobs, and the verdict on a run of the model with the published
mask.

    python -m lab.explorer.build
"""
import itertools
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from beyond import speculative
from lab.checks.check import Check
from lab.checks.traps import broken
from lab.explorer import page
from lab.explorer.recorder import record
from lab.explorer.walk import FLAT, GUESS, MASK, SAME, TWO, most_held, waits, walk
from lab.flags import knobs_of
from lab.loading.load import load
from lab.loading.stages import STAGES
from lab.loading.workload import make_requests, read_prompts
from lab.simulate.calculated import figures, simulate

PAGE = Path(__file__).parent.parent.parent / "docs" / "explorer.html"
WORKLOAD = page.FOLDER / "requests.jsonl"
KNOBS = dict(max_batch=8, token_budget=32, pages=26, page_size=16)
RUNS = {   # name: (stage, further knobs)
    **{name: (generate, {}) for name, generate in STAGES.items()},
    SAME: (STAGES[FLAT], {"max_kv_tokens": KNOBS["pages"] * KNOBS["page_size"]}),
    MASK: (STAGES["interleaved"], {}), GUESS: (speculative.generate, {"pages": None}),
    TWO: (STAGES["dynamic"], {})}
# "Try it"
TRIED = "naive", "dynamic", "chunked", "interleaved", FLAT, "prefix"
RECTANGLES = "dynamic", "chunked", "interleaved"   # the published mask is a mask of these
GRID = {"max_batch": (2, 4, 8), "token_budget": (8, 16, 32, 64, 128), "page_size": (4, 16, 64),
        "memory": (320, 640, 2048), "long": (False, True)}
FIRST = 1, 4, 1, 2, 1, 1, 1, 0   # at first: two of TRIED, a value of each knob, the mask not broken
CHUNKED = "max_batch", "token_budget", "memory", "long"
APPLIES = {   # the knobs that a stage has
    **dict.fromkeys(("naive", "dynamic"), ("max_batch", "long")),
    **dict.fromkeys(("chunked", "interleaved", FLAT), CHUNKED), "prefix": tuple(GRID)}
GOALS = [   # limits of figures, with the long prompts; and values of knobs
    {"text": "no wait for a next token over 15 ms, and over 500 tokens/s",
     "next": [0, 15], "speed": [500, 1e9]},
    {"text": "first tokens within 180 ms, no later wait over 20 ms", "first": [0, 180],
     "next": [0, 20]},
    {"text": "over 340 tokens/s in 320 tokens of memory", "speed": [340, 1e9], "memory": 320}]


def workload(tokenizer):
    """Eleven requests: two with long prompts; four share their beginning. Few answers end early."""
    return make_requests(read_prompts(WORKLOAD), tokenizer, temperature=0.7, top_k=None, seed=100)


# --- the runs -------------------------------------------------------------------------------------

def runs(model, requests):
    """({name: recorded run}, {name: what the scoreboard says of it})."""
    traces, scores = {}, {}
    for name, (generate, more) in RUNS.items():
        some = requests if name != TWO else [
            replace(requests[0], max_new_tokens=16), replace(requests[1], arrival=4)]
        with broken("published mask", show=False) if name == MASK else nullcontext():
            trace = record(generate, model, some, model, **knobs_of(generate, KNOBS | more)[0])
        traces[name] = on_gpu(trace)
        scores[name] = {**score_of(trace), "memory": most_held(trace),
                        "wrong": wrong(trace.recording.check)}
    return traces, scores


def on_gpu(trace):
    """The recorded run with the times of the calculated GPU, from what its passes counted."""
    (shape, gpu), config = page.GPU, trace.recording.model.config
    kv_bytes = 8 * config.n_layer * config.n_embd   # of a token of the model that ran
    trace.started, trace.step_times, now, ends = 0.0, {}, 0.0, {}
    steps = {request.name: request.token_steps for request in trace.requests}
    for p in trace.passes:
        sampled = [name for name, _, _ in p.work if p.step in steps[name]]
        keys = p.padded_keys + sum(first + n for _, first, n in p.work)
        # On a GPU attention reads through the block table, and copies no pages.
        copied = 0 if trace.recording.pool else p.copied_bytes // kv_bytes * shape.kv_bytes
        p.seconds = shape.seconds(gpu, p.slots, len(sampled), p.score_entries, keys, copied)
        trace.step_times.setdefault(p.step, now)
        now += p.seconds
        ends.update({(name, p.step): now for name in sampled})
    for request in trace.requests:
        request.token_times = [ends[request.name, step] for step in request.token_steps]
    return trace


def score_of(trace):
    """What the scoreboard says of a run on the calculated GPU. Waits in milliseconds."""
    f = figures(trace)
    first = max(request.token_times[0] - trace.arrived(request) for request in trace.requests)
    return {"passes": f["passes"], "useful": round(f["useful"], 3),
            "speed": round(f["tokens_per_s"]), "first": round(1e3 * first, 1),
            "next": round(max(waits(trace))[0], 1), "preemptions": f["preemptions"]}


def wrong(check):
    return sum(v.verdict == "WRONG" for v in check())


# --- "Try it" -------------------------------------------------------------------------------------

def grid(model, answers):
    """
    The runs of all settings: {"runs": [...], "of": {setting: number of its run}, ...}.

    answers: the requests, whose answers are as long as they may be
    """
    found, kinds, verdicts, outcomes = {}, {}, {}, {}
    for stage in TRIED:
        for indices in itertools.product(*(range(len(GRID[name])) for name in APPLIES[stage])):
            setting = ".".join(map(str, (stage, *indices)))
            generate, some, knobs = meaning(stage, indices, answers)
            run = simulate(*page.GPU, generate, [*map(replace, some)], **knobs)
            text = json.dumps(plain(run, answers))
            kinds[setting] = found.setdefault(text, len(found))
            if stage in RECTANGLES:
                if text not in outcomes:   # equal passes have the same outcome
                    outcomes[text] = under_the_mask(model, generate, some, knobs)
                verdicts[setting] = outcomes[text]
    return {"stages": TRIED, "first": FIRST, "knobs": GRID, "applies": APPLIES, "goals": GOALS,
            "of": kinds, "runs": [json.loads(text) for text in found], "wrong": verdicts}


def meaning(stage, indices, answers):
    """(the stage's function, requests, knobs), given the index of each of its knobs' values."""
    values = {name: GRID[name][i] for name, i in zip(APPLIES[stage], indices)}
    memory = values.get("memory", 0)
    knobs, _ = knobs_of(STAGES[stage], {
        **values, "max_kv_tokens": memory, "pages": memory // values.get("page_size", 1)})
    some = [replace(request) for request in answers
            if values["long"] or not request.name.startswith("long")]
    return STAGES[stage], some, knobs


def under_the_mask(model, generate, requests, knobs):
    """How many requests get wrong tokens from the built-in model under the published mask."""
    check = Check(model, requests)
    with broken("published mask", show=False):
        generate(model, requests, on_token=check.on_token, **knobs)
    return [wrong(check), len(requests)]


def plain(trace, requests):
    """A run for the timeline; `expanded` in runs.js makes of it what page.run_data returns."""
    number = {request.name: i for i, request in enumerate(requests)}
    return {**page.passes_data(trace, number), "figures": score_of(trace),
            "requests": [number[request.name] for request in trace.requests],
            "arrived": [page.ms(request.arrived) for request in trace.requests]}


# --- the page -------------------------------------------------------------------------------------

def data():
    model, tokenizer = load()
    traces, scores = runs(model, workload(tokenizer))
    answers = [replace(request, max_new_tokens=len(request.generated), eos_token=None)
               for request in traces["unbatched"].recording.requests]
    return {**page.data_of(traces, tokenizer, page.CLOCK), "walk": walk(traces, scores),
            "score": scores, "grid": grid(model, answers)}


def main():
    page.write(PAGE, data())
    print(f"{PAGE.name}: {PAGE.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
