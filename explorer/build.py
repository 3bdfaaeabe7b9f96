"""
Builds docs/explorer.html: all stages on requests.jsonl, the guided walk, and "Try it".

Every stage runs on the built-in model, under the X-ray and the check, and once more on a calculated
GPU (beyond/calculated.py), which gives all times: so the page is the same on every machine. "Try
it" has a run on that GPU for each setting of the knobs, and the verdict on a run of the model with
the published mask.

    python -m explorer.build
"""
import itertools
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from beyond import speculative
from beyond.calculated import figures, simulate
from beyond.hardware import GPUS, MODELS
from checks.check import Check
from checks.traps import broken
from explorer import page
from explorer.recorder import record, take_times
from explorer.walk import FLAT, GUESS, MASK, SAME, TWO, most_held, waits, walk
from loading.load import load
from loading.stages import STAGES
from loading.workload import make_requests, read_prompts
from toolbox.flags import knobs_of

PAGE = Path(__file__).parent.parent / "docs" / "explorer.html"
WORKLOAD = page.FOLDER / "requests.jsonl"
CLOCK, GPU = "calculated for Llama 2 7B on an A100", (MODELS["llama-2-7b"], GPUS["a100"])
KNOBS = dict(max_batch=8, token_budget=32, pages=26, page_size=16)
FURTHER = {   # name of a run: (stage, further knobs)
    SAME: (STAGES[FLAT], {"max_kv_tokens": KNOBS["pages"] * KNOBS["page_size"]}),
    MASK: (STAGES["interleaved"], {}), GUESS: (speculative.generate, {"pages": None}),
    TWO: (STAGES["dynamic"], {})}
# "Try it"
TRIED = "naive", "dynamic", "chunked", "interleaved", FLAT, "paged"
RECTANGLES = "dynamic", "chunked", "interleaved"   # the published mask is a mask of these
GRID = {"max_batch": (2, 4, 8), "token_budget": (8, 16, 32, 64, 128), "page_size": (4, 16, 64),
        "memory": (320, 640, 2048), "long": (False, True)}
FIRST = 1, 4, 1, 2, 1, 1, 1, 0   # at first: two of TRIED, a value of each knob, the mask not broken
CHUNKED = "max_batch", "token_budget", "memory", "long"
APPLIES = {   # the knobs that a stage has
    **dict.fromkeys(("naive", "dynamic"), ("max_batch", "long")),
    **dict.fromkeys(("chunked", "interleaved", FLAT), CHUNKED), "paged": tuple(GRID)}
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
    for name, (generate, more) in {**{name: (STAGES[name], {}) for name in STAGES},
                                   **FURTHER}.items():
        some = requests if name != TWO else [
            replace(requests[0], max_new_tokens=16), replace(requests[1], arrival=4)]
        knobs = knobs_of(generate, KNOBS | more)[0]
        with broken("published mask", show=False) if name == MASK else nullcontext():
            trace = traces[name] = record(generate, model, some, model, **knobs)
            done, stage = fixed(trace.requests), generate
            if name == GUESS:   # which takes other guesses near a fixed end
                done, stage = [*map(replace, some)], computing(generate, model)
            timed = simulate(*GPU, stage, done, **knobs)
        if take_times(trace, timed).step_times != timed.step_times:
            raise RuntimeError(f"stage '{trace.stage}' makes other plans on the calculated GPU")
        scores[name] = {**score_of(timed), "memory": most_held(trace),
                        "wrong": wrong(trace.recording.check)}
    return traces, scores


def fixed(requests):
    """Requests whose answers have the same lengths as those of these, which have finished."""
    return [replace(request, max_new_tokens=len(request.generated), eos_token=None)
            for request in requests]


def computing(generate, model):
    """For `simulate`: `generate` with the logits of `model`, on a clock that is moved on."""
    def run(clock, requests, **knobs):
        def forward(ids, positions, attend, wanted):
            clock.compute(attend.__self__)
            return model(ids, positions, attend, wanted)

        forward.config, forward.device = model.config, model.device
        return generate(forward, requests, **knobs)
    return run


def score_of(same):
    """What the scoreboard says of a run on the calculated GPU. Waits in milliseconds."""
    f = figures(same)
    first = max(request.token_times[0] - request.arrived for request in same.requests)
    return {"passes": f["passes"], "useful": round(f["useful"], 3),
            "speed": round(f["tokens_per_s"]), "first": round(1e3 * first, 1),
            "next": round(max(waits(same))[0], 1), "preemptions": f["preemptions"]}


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
            text = json.dumps(tried(setting, answers))
            kinds[setting] = found.setdefault(text, len(found))
            if stage in RECTANGLES:
                if text not in outcomes:   # equal passes have the same outcome
                    outcomes[text] = under_the_mask(model, *meaning(setting, answers))
                verdicts[setting] = outcomes[text]
    return {"stages": TRIED, "first": FIRST, "knobs": GRID, "applies": APPLIES, "goals": GOALS,
            "of": kinds, "runs": [json.loads(text) for text in found], "wrong": verdicts}


def meaning(setting, answers):
    """
    (the stage's function, requests, knobs) of a setting, which is the stage and the index of each
    knob's value: "chunked.0.2.1.0". It comes without the knobs that its stage lacks.
    """
    stage, *indices = setting.split(".")
    values = {name: GRID[name][int(i)] for name, i in zip(APPLIES[stage], indices, strict=True)}
    memory = values.get("memory", 0)
    knobs, _ = knobs_of(STAGES[stage], {
        **values, "max_kv_tokens": memory, "pages": memory // values.get("page_size", 1)})
    some = [replace(request) for request in answers
            if values["long"] or not request.name.startswith("long")]
    return STAGES[stage], some, knobs


def tried(setting, answers):
    """A setting's run, for the page."""
    generate, some, knobs = meaning(setting, answers)
    return plain(simulate(*GPU, generate, some, **knobs), answers)


def under_the_mask(model, generate, requests, knobs):
    """How many requests get wrong tokens from the built-in model under the published mask."""
    check = Check(model, requests)
    with broken("published mask", show=False):
        generate(model, requests, on_token=check.on_token, **knobs)
    return [wrong(check), len(requests)]


def plain(same, requests):
    """A run for the timeline; `expanded` in runs.js makes of it what page.run_data returns."""
    number = {request.name: i for i, request in enumerate(requests)}
    return {"figures": score_of(same), "ms": [round(1e3 * p.seconds, 1) for p in same.passes],
            "step": [p.step for p in same.passes], "shape": [p.shape for p in same.passes],
            "work": [page.flat(p.work, number) for p in same.passes],
            "finished": {i: [number[who] for who in p.finished]
                         for i, p in enumerate(same.passes) if p.finished},
            "requests": [number[request.name] for request in same.requests],
            "arrived": [round(1e3 * request.arrived, 1) for request in same.requests]}


# --- the page -------------------------------------------------------------------------------------

def data():
    model, tokenizer = load()
    traces, scores = runs(model, workload(tokenizer))
    answers = fixed(traces["unbatched"].recording.requests)
    return {**page.data_of(traces, tokenizer, CLOCK), "walk": walk(traces, scores),
            "score": scores, "grid": grid(model, answers)}


def main():
    page.write(PAGE, data())
    print(f"{PAGE.name}: {PAGE.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
