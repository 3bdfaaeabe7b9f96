"""
Builds docs/explorer.html: all stages on a workload made for it, the guided walk, and "Try it".

Every stage runs on the built-in model, under the X-ray and the check, and once more on a calculated
GPU (beyond/simulate.py), which gives the clock in its milliseconds. "Try it" has a run on that GPU
for each setting of the knobs, and, with the published mask, the verdict on a run of the model.

    python -m explorer.build
"""
import itertools
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from beyond.hardware import GPUS, MODELS
from beyond.simulate import figures, simulate
from checks.check import Check
from checks.traps import broken
from explorer import page
from explorer.recorder import record
from explorer.walk import MASK, waits, walk
from loading.load import load
from loading.stages import STAGES
from loading.workload import PROMPTS, make_requests, read_prompts
from toolbox.flags import knobs_of

PAGE = Path(__file__).parent.parent / "docs" / "explorer.html"
CLOCK = "calculated for Llama 2 7B on an A100"
KNOBS = dict(max_batch=8, token_budget=32, pages=26, page_size=16)
SEED = 100   # with it, few answers end early
SHARED = """# reading files
Files are opened with the built-in function open, which returns a file object. The mode says how \
the file is used: for reading, for writing, or for appending at its end. Text is decoded when it \
is read and encoded when it is written, and if no encoding is given, the default depends on the \
platform. """
LONG = SHARED + """It is good practice to use the with statement when dealing with file objects: \
the file is closed when its block ends, even if an exception is raised at some point. If the block \
is not used, call the method close, which frees the resources at once. A file object that was \
closed cannot be used again: all attempts raise an error. After closing it, """
# name: (text, or number of a built-in prompt; the longest answer; arrival)
REQUESTS = {"A": (6, 44, 0), "B": (0, 12, 0), "C": (2, 48, 0), "D": (4, 24, 0), "E": (11, 36, 0),
            "long 1": (LONG + "reading from it", 20, 8), "long 2": (LONG + "writing to it", 16, 8),
            "F": (8, 24, 10), "G": (SHARED + "In binary mode", 18, 30),
            "H": (SHARED + "A line", 14, 34), "I": (9, 12, 36)}

# "Try it"
TRIED = "naive", "dynamic", "chunked", "interleaved", "ragged, varlen", "paged"
RECTANGLES = "dynamic", "chunked", "interleaved"   # the published mask is a mask of these
GRID = {"max_batch": (2, 4, 8), "token_budget": (16, 32, 128), "page_size": (4, 16, 64),
        "memory": (320, 640, 2048), "long": (False, True)}
FIRST = 1, 4, 2, 1, 1, 2, 1, 0   # at first: two of TRIED, a value of each knob, the mask not broken
APPLIES = {   # the knobs that a stage has
    "naive": ("max_batch", "long"), "dynamic": ("max_batch", "memory", "long"),
    **dict.fromkeys(("chunked", "interleaved", "ragged, varlen"),
                    ("max_batch", "token_budget", "memory", "long")), "paged": tuple(GRID)}


def workload(tokenizer):
    """Eleven requests: two with long prompts; four share their beginning."""
    prompts = read_prompts(PROMPTS)
    entries = [{"prompt": prompts[text]["prompt"] if isinstance(text, int) else text, "name": name,
                "max_new_tokens": answer, "arrival": arrival}
               for name, (text, answer, arrival) in REQUESTS.items()]
    return make_requests(entries, tokenizer, temperature=0.7, top_k=None, seed=SEED)


# --- the runs -------------------------------------------------------------------------------------

def runs(model, requests):
    """All stages, and stage 4 under the published mask: ({name: trace}, {name: its twin})."""
    traces, twins = {}, {}
    for name, generate in {**STAGES, MASK: STAGES["interleaved"]}.items():
        knobs = knobs_of(generate, KNOBS)[0]
        with broken("published mask", show=False) if name == MASK else nullcontext():
            timed = generate(model, [replace(request) for request in requests], **knobs)
            traces[name] = record(generate, model, requests, timed, model, **knobs)
        twins[name] = twin(traces[name], generate, knobs)
    return traces, twins


def twin(trace, generate, knobs):
    """The same run on the calculated GPU: passes and tokens at the same steps, other times."""
    requests = [fixed(request, request) for request in trace.recording.requests]
    same = calculated(generate, requests, knobs)
    if [p.work for p in same.passes] != [p.work for p in trace.passes]:
        raise RuntimeError(f"stage '{trace.stage}' makes other plans on the calculated GPU")
    return same


def fixed(request, finished):
    """The request with an answer as long as that of one that has finished, whatever its tokens."""
    return replace(request, max_new_tokens=len(finished.generated), eos_token=None)


def calculated(generate, requests, knobs):
    copies = [replace(request) for request in requests]
    return simulate(MODELS["llama-2-7b"], GPUS["a100"], generate, copies, **knobs)


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

def grid(model, requests, answers):
    """
    The runs of all settings: {"runs": [...], "of": {setting: number of its run}, ...}. A setting is
    the stage and the index of each knob's value, and comes without the knobs that its stage lacks.

    answers: the requests when they have finished; here, too, their answers are that long
    """
    fixed_requests = [fixed(*pair) for pair in zip(requests, answers)]
    found, kinds, verdicts, outcomes = {}, {}, {}, {}
    for stage in TRIED:
        names = [name for name in GRID if name in APPLIES[stage]]
        for values in itertools.product(*(enumerate(GRID[name]) for name in names)):
            setting = {name: value for name, (_, value) in zip(names, values)}
            key = ".".join([stage, *(str(i) for i, _ in values)])
            size, memory = setting.get("page_size", 16), setting.get("memory", 0)
            knobs, _ = knobs_of(STAGES[stage], {**setting, "max_kv_tokens": memory,
                                                "pages": memory // size})
            some = [request for request in fixed_requests
                    if setting["long"] or not request.name.startswith("long")]
            same = calculated(STAGES[stage], some, knobs)
            text = json.dumps(compact(same, fixed_requests))
            kinds[key] = found.setdefault(text, len(found))
            if stage in RECTANGLES:
                if text not in outcomes:   # equal passes have the same outcome
                    outcomes[text] = under_the_mask(model, STAGES[stage], some, knobs, same)
                verdicts[key] = outcomes[text]
    return {"stages": TRIED, "first": FIRST, "knobs": GRID, "applies": APPLIES, "of": kinds,
            "runs": [json.loads(text) for text in found], "wrong": verdicts}


def under_the_mask(model, generate, requests, knobs, same):
    """How many requests get wrong tokens from the built-in model under the published mask."""
    requests = [replace(request) for request in requests]
    check = Check(model, requests)
    with broken("published mask", show=False):
        trace = generate(model, requests, on_token=check.on_token, **knobs)
    if [p.work for p in trace.passes] != [p.work for p in same.passes]:
        raise RuntimeError("the published mask changes a plan")
    return [wrong(check), len(requests)]


def compact(same, requests):
    """
    A run for the timeline: {"figures", "ms" of each pass, "passes"}. Passes of the same requests
    that go on with as many tokens each are one entry, [how many, from which step, shape,
    [request, first, tokens, ...], finished requests].
    """
    number = {request.name: i for i, request in enumerate(requests)}
    entries, expected = [], None
    for p in same.passes:
        if (p.step, p.shape, p.finished, p.work) == expected:
            entries[-1][0] += 1
        else:
            rows = [[number[who] for who in p.finished]] if p.finished else []
            entries.append([1, p.step, p.shape, page.flat(p.work, number), *rows])
        expected = (p.step + 1, p.shape, p.finished,
                    [(who, first + n, n) for who, first, n in p.work])
    return {"figures": score_of(same), "passes": entries,
            "ms": [round(1e3 * p.seconds, 1) for p in same.passes],
            "requests": [number[request.name] for request in same.requests],
            "arrived": [round(1e3 * request.arrived, 1) for request in same.requests]}


# --- the page -------------------------------------------------------------------------------------

def data():
    model, tokenizer = load()
    requests = workload(tokenizer)
    traces, twins = runs(model, requests)
    answers = traces["unbatched"].recording.requests
    return {**page.data_of(traces, tokenizer, twins), "clock": CLOCK,
            "walk": walk(traces, twins),
            "score": {name: {**score_of(same), "wrong": wrong(traces[name].recording.check)}
                      for name, same in twins.items()},
            "grid": grid(model, requests, answers)}


def main():
    text = page.filled(data())
    PAGE.write_text(text, encoding="utf-8", newline="\n")
    print(f"{PAGE.name}: {len(text) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
