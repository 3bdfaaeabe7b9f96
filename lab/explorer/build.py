"""
Builds docs/explorer.html: all stages on requests.jsonl, for the guided walk.

Every stage runs on the built-in model, under the X-ray and the check. All times are those of a
calculated GPU (lab/simulate/), so the page is the same on every machine. A visitor's own requests
are computed in the browser, by schedule.js.

    python -m lab.explorer.build
"""
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from beyond import speculative
from lab.checks.traps import broken
from lab.explorer import page
from lab.explorer.recorder import record
from lab.explorer.walk import FLAT, GUESS, MASK, SAME, TWO, walk
from lab.flags import knobs_of
from lab.loading.load import load
from lab.loading.stages import STAGES
from lab.loading.workload import make_requests, read_prompts

PAGE = Path(__file__).parent.parent.parent / "docs" / "explorer.html"
KNOBS = dict(max_batch=8, token_budget=32, pages=26, page_size=16)
RUNS = {   # name: (stage, further knobs)
    **{name: (generate, {}) for name, generate in STAGES.items()},
    SAME: (STAGES[FLAT], {"max_kv_tokens": KNOBS["pages"] * KNOBS["page_size"]}),
    MASK: (STAGES["interleaved"], {}), GUESS: (speculative.generate, {"pages": None}),
    TWO: (STAGES["dynamic"], {})}


def workload(tokenizer):
    """Eleven requests: two with long prompts; four share their beginning. Few answers end early."""
    prompts = read_prompts(page.FOLDER / "requests.jsonl")
    return make_requests(prompts, tokenizer, temperature=0.7, top_k=None, seed=100)


def runs(model, requests):
    """{name: recorded run}."""
    traces = {}
    for name, (generate, more) in RUNS.items():
        some = requests if name != TWO else [
            replace(requests[0], max_new_tokens=16), replace(requests[1], arrival=4)]
        with broken("published mask", show=False) if name == MASK else nullcontext():
            traces[name] = on_gpu(record(generate, model, some, model,
                                         **knobs_of(generate, KNOBS | more)[0]))
    return traces


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


def data():
    model, tokenizer = load()
    traces = runs(model, workload(tokenizer))
    return page.data_of(traces, tokenizer, page.CLOCK) | {"walk": walk(traces)}


def main():
    page.write(PAGE, data())
    print(f"{PAGE.name}: {PAGE.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
