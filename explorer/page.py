"""
The explorer: one HTML file in which a reader walks through a run that happened, step by step.

    trace = record(generate, model, requests, max_batch=8)        # explorer/recorder.py
    write("run.html", {"interleaved": trace}, tokenizer)

The page is page.html, with page.css, the scripts and the data, as JSON, in their places. It loads
nothing from anywhere. Prompts and texts are data: the JSON holds no "<", so none of them can end
the script element that carries it, and the page shows them as text only.
"""
import html
import inspect
import json
import sys
from pathlib import Path

import torch

from toolbox.plots import COLORS, KEYS, NAMES
from toolbox.verdict import summary

FOLDER = Path(__file__).parent
COUNTS = ("useful", "recomputed", "pad_slots", "finished_slots", "padded_keys", "score_entries",
          "useful_scores", "copied_bytes")   # of a ForwardPass


def write(path, traces, tokenizer=None):
    """Writes the page of one or several recorded runs, {name: trace}. See `page`."""
    Path(path).write_text(page(traces, tokenizer), encoding="utf-8", newline="\n")


def page(traces, tokenizer=None):
    """
    The HTML text of recorded runs, {name: trace}.

    tokenizer: a tiktoken.Encoding; None: tokens are shown as their request's name and position
    """
    return filled(data_of(traces, tokenizer))


def filled(data):
    """The page's text, with data in it."""
    names = [run["name"] for run in data["runs"]]
    title = f"nanoBatch: {', '.join(names) if len(names) < 4 else f'{len(names)} stages'}"
    colors = "".join(f"--{kind}: {color}; " for kind, color in {**COLORS, **KEYS}.items())
    parts = {"title": html.escape(title), "colors": f":root {{ {colors}}}",
             "css": (FOLDER / "page.css").read_text(encoding="utf-8"),
             "js": "".join((FOLDER / name).read_text(encoding="utf-8")
                           for name in ("runs.js", "panels.js", "page.js")), "data": embedded(data)}
    text = (FOLDER / "page.html").read_text(encoding="utf-8")
    for name, part in parts.items():   # data last: whatever is in it stays as it is
        text = text.replace("{{" + name + "}}", part)
    return text


def embedded(data):
    """JSON for a script element: ASCII only, and no character that HTML could understand."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def inline(traces, tokenizer=None, height=900):
    """For a notebook: the page in a frame of its own, so that pages do not disturb each other."""
    return Frame(page(traces, tokenizer), height)


class Frame:
    """A page that a notebook shows inline."""

    def __init__(self, text, height):
        self.text, self.height = text, height

    def _repr_html_(self):
        return (f'<iframe srcdoc="{html.escape(self.text)}" width="100%" height="{self.height}" '
                'style="border: 1px solid #999"></iframe>')


# --- the data -------------------------------------------------------------------------------------

def data_of(traces, tokenizer=None, twins=None):
    """
    All that the page knows of runs. Times are in milliseconds from the start of a run.

    twins: {name: trace} of the same runs on a calculated GPU, for a further clock
    """
    for trace in traces.values():
        if trace.recording is None:
            raise ValueError(f"the run of stage '{trace.stage}' was not recorded: "
                             "explorer.recorder.record runs a stage and records it")
    texts = []   # prompts and answers, each once: the stages of a ladder have the same
    runs = [run_data(name, trace, texts) for name, trace in traces.items()]
    for run in runs if twins else ():
        run["gpu"] = times_of(twins[run["name"]], [request["name"] for request in run["requests"]])
    return {"runs": runs, "texts": texts, "names": NAMES,
            "vocabulary": tokenizer and vocabulary(traces, tokenizer), "walk": []}


def times_of(twin, names):
    """The times of a run on a calculated GPU, in milliseconds, as run_data has those of a run."""
    requests = {request.name: request for request in twin.requests}

    def ms(seconds):
        return round(1e3 * seconds, 2)

    return {"passes": {"start": [ms(twin.step_times[p.step]) for p in twin.passes],
                       "ms": [ms(p.seconds) for p in twin.passes]},
            "requests": [{"arrived": ms(requests[name].arrived),
                          "ms": [ms(time) for time in requests[name].token_times]}
                         for name in names]}


def run_data(name, trace, texts):
    recorder = trace.recording
    number = {request.name: i for i, request in enumerate(recorder.requests)}
    started = trace.started

    def ms(seconds):
        return round(1e3 * seconds, 2)

    passes = {
        "step": [p.step for p in trace.passes],
        "start": [ms(trace.step_times[p.step] - started) for p in trace.passes],   # of its step
        "ms": [ms(p.seconds) for p in trace.passes],
        "shape": [p.shape for p in trace.passes],
        "work": [[value for who, *n in p.work for value in (number[who], *n)]
                 for p in trace.passes],
        # 0: they are all 0
        **{count: values if any(values) else 0 for count, values in
           ((count, [getattr(p, count) for p in trace.passes]) for count in COUNTS)},
        **{column: [frame[column] for frame in recorder.frames]
           for column in ("rows", "past")},
        "finished": {i: [number[who] for who in p.finished] for i, p in enumerate(trace.passes)
                     if p.finished},
        # only the passes in which they change: {pass: ...}
        **{column: {i: frame[column] for i, frame in enumerate(recorder.frames)
                    if frame[column] not in ({}, None, 0)}
           for column in ("room", "computed", "kept", "columns")},
    }
    return {
        "name": name, "idea": idea(recorder.generate), "place": place(recorder.model),
        "knobs": recorder.knobs, "pool": recorder.pool, "check": check_data(recorder),
        "xray": {"left_out": recorder.left_out, "wrong": recorder.wrong,
                 "sentences": recorder.sentences},
        "requests": [request_data(request, trace, texts) for request in recorder.requests],
        "passes": passes,
    }


def request_data(request, trace, texts):
    for text in request.prompt, request.generated:
        if text not in texts:
            texts.append(text)
    # As in the report, the clock of a request starts with the first step at or after its arrival.
    arrived = trace.started
    if request.arrival:
        arrived = min((time for step, time in trace.step_times.items() if step >= request.arrival),
                      default=trace.started)
    return {
        "name": request.name, "prompt": texts.index(request.prompt),
        "generated": texts.index(request.generated), "arrival": request.arrival,
        "arrived": round(1e3 * (arrived - trace.started), 2), "reason": request.finish_reason,
        "limit": request.max_new_tokens, "steps": request.token_steps,
        "ms": [round(1e3 * (time - trace.started), 2) for time in request.token_times],
    }


def check_data(recorder):
    """The verdict on the outputs: a line, and {request: what is wrong with it}."""
    if recorder.check is None:
        return {"summary": "outputs were not checked", "wrong": None}
    verdicts = recorder.check()
    return {"summary": summary(verdicts).splitlines()[0],
            "wrong": {v.name: v.detail for v in verdicts if v.verdict == "WRONG"}}


def idea(generate):
    """The first line of a stage's docstring, e.g. "Stage 2: dynamic batching. ..."."""
    module = sys.modules[inspect.unwrap(getattr(generate, "func", generate)).__module__]
    return (module.__doc__ or "").strip().partition("\n")[0].replace("`", "")


def place(model):
    dtype = str(next(model.parameters(), torch.zeros(0)).dtype).removeprefix("torch.")
    threads = torch.get_num_threads()
    return (f"{model.device}, {threads} thread{'s' * (threads > 1)}, torch {torch.__version__}, "
            f"{dtype}")


def vocabulary(traces, tokenizer):
    """{token id: its text}; a token that is not whole characters is a list of its bytes."""
    used = {token for trace in traces.values() for r in trace.requests for token in r.tokens}
    words = {}
    for token in sorted(used):
        if token >= tokenizer.n_vocab:   # a model's vocabulary may be padded
            words[token] = "\ufffd"
            continue
        piece = tokenizer.decode_single_token_bytes(token)
        try:
            words[token] = piece.decode("utf-8")
        except UnicodeDecodeError:
            words[token] = list(piece)
    return words
