"""
Builds docs/explorer.html: all stages on requests.jsonl, for the guided walk.

Every stage runs on the built-in model, under the X-ray and the check. All times are those of a
calculated GPU (lab/simulate/), so the page is the same on every machine. A visitor's own requests
are computed in the browser, by schedule.js.

    python -m lab.explorer.build
"""
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from lab import flags
from lab.checks.traps import broken
from lab.explorer import page
from lab.explorer.recorder import record, take_times
from lab.explorer.walk import MASK, SAME, TWO, walk
from lab.flags import knobs_of
from lab.loading.load import load
from lab.loading.stages import SCRIPTS
from lab.loading.workload import make_requests, read_prompts
from lab.simulate.calculated import simulate
from lab.views.stage_table import known

PAGE = Path(__file__).parent.parent.parent / "docs" / "explorer.html"
KNOBS = dict(max_batch=8, token_budget=32, pages=26, page_size=16)
MEMORY = KNOBS["pages"] * KNOBS["page_size"]   # tokens
RUNS = SCRIPTS | {   # name: its stage; the others are explained in walk.py
    SAME: SCRIPTS["ragged"],
    MASK: SCRIPTS["interleaved"],
    TWO: SCRIPTS["dynamic"]}


def workload(tokenizer):
    """Eleven requests: two with long prompts; four share their beginning. Few answers end early."""
    prompts = read_prompts(page.FOLDER / "requests.jsonl")
    return make_requests(prompts, tokenizer, temperature=0.7, top_k=None, seed=100)


def two_of(requests):
    """One alone, and a second one that arrives while it decodes."""
    return [replace(requests[0], max_new_tokens=16), replace(requests[1], arrival=4)]


def run(name, model, requests):
    """The recorded run of that name, with the times of the calculated GPU."""
    generate = RUNS[name]
    knobs, _ = knobs_of(generate, KNOBS)
    if name == SAME:
        knobs["max_kv_tokens"] = MEMORY
    if name == TWO:
        requests = two_of(requests)
    bug = broken("published mask", show=False) if name == MASK else nullcontext()
    with bug:
        return on_gpu(record(generate, model, requests, model, **knobs))


def on_gpu(trace):
    """The recorded run with the times of the calculated GPU, which does the same once more."""
    recorder = trace.recording
    # The calculated model's answers may end where the recorded one's do.
    shape = replace(page.MODEL, block_size=recorder.model.config.block_size)
    answered = [known(request) for request in recorder.requests]
    timed = simulate(shape, page.GPU, recorder.generate, answered, **recorder.knobs)
    return take_times(trace, timed)


def data():
    model, tokenizer = load()
    requests = workload(tokenizer)
    traces = {name: run(name, model, requests) for name in RUNS}
    return page.data_of(traces, tokenizer, page.CLOCK) | {"walk": walk(traces)}


def main():
    flags.check_path(PAGE, "the page")   # it takes minutes
    page.write(PAGE, data())
    print(f"{PAGE.name}: {PAGE.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(flags.guarded("lab.explorer.build", main))
