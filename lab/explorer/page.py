"""
The explorer: one HTML file in which a reader walks through a run that happened, step by step.

    trace = record(generate, model, requests, max_batch=8)        # lab/explorer/recorder.py
    write("run.html", data_of({"interleaved": trace}, tokenizer))

The page is page.html, with page.css, the scripts and the data, as JSON, in their places. It loads
nothing from anywhere. Prompts and texts are data: the JSON holds no "<", so none of them can end
the script element that carries it, and the page shows them as text only.
"""
import inspect
import json
import sys
from pathlib import Path

import torch

from lab.checks.check import summary
from lab.flags import first_paragraph
from lab.loading.load import word
from lab.simulate.hardware import GPUS, MODELS, TILE, constants
from lab.views.plots import COLORS, KEYS, NAMES

FOLDER = Path(__file__).parent
CLOCK = "calculated for Llama 2 7B on an A100"
MODEL, GPU = MODELS["llama-2-7b"], GPUS["a100"]
SCRIPTS = "runs.js", "panels.js", "own.js", "page.js"
COUNTS = ("useful", "recomputed", "pad_slots", "finished_slots", "padded_keys", "score_entries",
          "useful_scores", "copied_bytes")   # of a ForwardPass
FRAME = ("owner", "position", "past", "sees", "shift", "room", "at_once", "reserved", "cached",
         "columns")
STYLE = "".join(f"--{kind}: {color}; " for kind, color in (COLORS | KEYS).items())


def write(path, data):
    """Writes the page of data_of's data."""
    Path(path).write_text(filled(data), encoding="utf-8", newline="\n")


def read(name):
    return (FOLDER / name).read_text(encoding="utf-8")


def twin():
    """schedule.js, a module, as a script that keeps all names but `simulate` to itself."""
    text = read("schedule.js").replace("export function", "return function")
    return f"const simulate = (() => {{\n{text}}})();\n"


def filled(data):
    """The page's text, with data in it."""
    json_text = json.dumps(data, separators=(",", ":"))
    parts = {
        "colors": f":root {{ {STYLE}}}",
        "css": read("page.css"),
        "js": twin() + "".join(map(read, SCRIPTS)),
        "data": json_text.replace("<", "\\u003c")}
    text = read("page.html")
    for name, part in parts.items():   # data last: whatever is in it stays as it is
        text = text.replace("{{" + name + "}}", part)
    return text


def gpu_data(shape=MODEL, gpu=GPU):
    """
    The constants of simulate's `seconds` in plain numbers, for schedule.js. For one GPU: all are
    seconds, but the tile and bytes.
    """
    of = constants(shape, gpu)
    return {
        "tile": TILE,
        "row": of.row,
        "sample": of.sample,
        "score": of.score,
        "weights": of.weights,
        "key": of.key,
        "vocabulary": of.vocabulary,
        "kv_bytes": shape.kv_bytes,
        "copy": 2 * shape.kv_bytes * of.byte,   # of a key and value: read once, written once
        "overhead": of.overhead,
        "per_request": of.per_request}


# --- the data -------------------------------------------------------------------------------------

def data_of(traces, tokenizer, calculated=""):
    """
    All that the page knows of recorded runs, {name: trace}. Times are in milliseconds from a run's
    start. calculated: of which GPU, if they are; then they are the same on every machine
    """
    return {
        "runs": [run_data(name, trace, calculated) for name, trace in traces.items()],
        "names": NAMES, "calculated": calculated, "walk": [], "clock": CLOCK,
        "gpu": gpu_data(), "vocabulary": vocabulary(traces, tokenizer)}


def ms(seconds):
    return round(1e3 * seconds, 2)


def run_data(name, trace, calculated):
    recorder = trace.recording
    return {
        "name": name,
        "stage": trace.stage.removesuffix(", varlen"),   # as in schedule.js
        "idea": idea(recorder.generate),
        "knobs": recorder.knobs,
        "place": calculated or place(recorder.model),
        "pool": recorder.pool,
        "check": check_data(recorder, calculated),
        "xray": {name: getattr(recorder, name) for name in ("left_out", "wrong", "sentences")},
        "requests": [request_data(request, trace) for request in recorder.requests],
        "passes": passes_data(trace)}


def passes_data(trace):
    """{column: its values, one for each pass}: what the trace and the recorder know of them."""
    passes, frames = trace.passes, trace.recording.frames
    number = {request.name: i for i, request in enumerate(trace.recording.requests)}
    columns = {
        "step": [p.step for p in passes],
        "ms": [ms(p.seconds) for p in passes],
        "shape": [p.shape for p in passes],
        "work": [work_data(p, number) for p in passes],
        "finished": [[number[name] for name in p.finished] for p in passes],
        "start": [ms(trace.step_times[p.step] - trace.started) for p in passes]}
    for count in COUNTS:
        columns[count] = [getattr(p, count) for p in passes]
    for column in FRAME:
        columns[column] = [frame[column] for frame in frames]
    return columns


def work_data(p, number):
    """A pass's work without brackets: request, first position, tokens, and so on."""
    values = []
    for name, first, n in p.work:
        values += [number[name], first, n]
    return values


def request_data(request, trace):
    return {
        "name": request.name,
        "prompt": request.prompt,
        "generated": request.generated,
        "arrival": request.arrival,
        "arrived": ms(trace.arrived(request) - trace.started),
        "reason": request.finish_reason,
        "steps": request.token_steps,
        "limit": request.kv_capacity + 1 - len(request.prompt),   # of its answer
        "ms": [ms(time - trace.started) for time in request.token_times]}


def check_data(recorder, calculated):
    """The verdict on the outputs: a line, and {request: what is wrong with it}."""
    if recorder.check is None:
        return {"summary": "outputs were not checked", "wrong": None}
    verdicts = recorder.check()
    line = summary(verdicts).splitlines()[0]
    if calculated:   # from machine to machine the rounding differs
        line = line.partition(", max")[0]
    wrong = {v.name: v.detail for v in verdicts if v.verdict == "WRONG"}
    return {"summary": line, "wrong": wrong}


def idea(generate):
    """The first line of a stage's docstring, e.g. "Stage 6: paged memory. ..."."""
    function = getattr(generate, "func", generate)   # of a partial
    module = sys.modules[inspect.unwrap(function).__module__]
    return first_paragraph(module.__doc__ or "").partition("\n")[0]


def place(model):
    """Device, threads and type of numbers."""
    dtype = str(next(model.parameters(), torch.zeros(0)).dtype).removeprefix("torch.")
    threads = torch.get_num_threads()
    plural = "s" if threads > 1 else ""
    return f"{model.device}, {threads} thread{plural}, torch {torch.__version__}, {dtype}"


def vocabulary(traces, tokenizer):
    """{token id: its text}; a token that is not whole characters is a list of its bytes."""
    used = set()
    for trace in traces.values():
        for request in trace.requests:
            used.update(request.tokens)
    return {token: word(tokenizer, token) for token in sorted(used)}
