"""
All stages on one workload, as a table, and with --pictures as the pictures of the README.

Steps and counts are the same on every machine, seconds are not. Each stage is checked against the unbatched run.

    python -m toolbox.ladder
    python -m toolbox.ladder --pictures toolbox/pictures
"""
import sys
from dataclasses import replace

from model import GPT, GPTConfig
from scheduler import Request, prepare
from toolbox import plots
from toolbox.check import Check
from toolbox.measure import decode_gaps, forward_times
from toolbox.report import aligned, latencies, percentile, totals
from toolbox.stages import STAGES, knobs_of


def run(model, requests, stages=STAGES, repeats=1, **knobs):
    """
    Runs each stage on copies of `requests`, `repeats` times in turn, and keeps of each the run that was faster
    than half of them. Returns {stage: trace}.
    """
    traces = {name: [] for name in stages}
    for _ in range(repeats):
        for name, generate in stages.items():
            traces[name].append(generate(model, [replace(request) for request in requests], **knobs_of(generate, knobs)[0]))
    return {name: sorted(runs, key=lambda trace: totals(trace)["seconds"])[len(runs) // 2] for name, runs in traces.items()}


def wrong(model, plain, requests, stages=STAGES, **knobs):
    """Runs each stage once more and checks it against `plain`, the model before optimize(), unbatched; a line for each request that is WRONG."""
    lines = []
    for name, generate in stages.items():
        copies = [replace(request) for request in requests]
        check = Check(plain, copies)
        generate(model, copies, on_token=check.on_token, **knobs_of(generate, knobs)[0])
        lines += [f"WRONG: {name}: request '{v.name}': {v.detail}" for v in check() if v.verdict == "WRONG"]
    return lines


def table(traces):
    """The ladder as text. Steps and counts are the same on every machine, seconds are not."""
    head = ("stage", "passes", "slots", "useful", "scores", "copied MB", "tokens/s", "TTFT mean", "ITL p99 steps", "ITL p50 ms", "ITL p99 ms")
    rows = [head]
    for name, trace in traces.items():
        t, waits = totals(trace), latencies(trace)
        rows.append((name, f"{t['forward_passes']:,}", f"{t['slots']:,}", f"{t['useful'] / t['slots']:.0%}", f"{t['score_entries']:,}",
                     f"{t['copied_bytes'] / 1e6:,.0f}", f"{t['tokens_per_second']:,.0f}", f"{sum(waits['ttft_seconds']) / len(waits['ttft_seconds']) * 1e3:,.0f} ms",
                     f"{percentile(waits['itl_steps'], 99):.0f}", f"{percentile(waits['itl_seconds'], 50) * 1e3:.1f}", f"{percentile(waits['itl_seconds'], 99) * 1e3:.1f}"))
    return "\n".join(aligned(rows))


def small_workload(config):
    """Eight requests that fit on a picture: short and long prompts and answers, a long prompt that comes late."""
    sizes = [(4, 9, 0), (9, 4, 0), (3, 14, 0), (12, 6, 0), (5, 7, 0), (40, 5, 3), (6, 8, 5), (3, 5, 6)]
    return [Request([(5 * i + 3 * j) % config.vocab_size for j in range(prompt)], new, name=chr(ord("A") + i), arrival=arrival)
            for i, (prompt, new, arrival) in enumerate(sizes)]


def storm(model):
    """Eight requests that need twice the room there is, with the two kinds of admission: {title: trace}."""
    requests = [Request([(5 * i + 3 * j) % model.config.vocab_size for j in range(6)], 26, name=chr(ord("A") + i), priority=i // 4) for i in range(8)]
    traces = {}
    for admission in "reserve", "grow":
        trace = STAGES["ragged, varlen"](model, [replace(request) for request in requests], max_kv_tokens=128, admission=admission, page_size=8)
        trace.stage = f"{admission}, {trace.counts['preemptions']} preemptions"
        traces[admission] = trace
    return traces


def one_step(model):
    """A plan of three decodes and a prefill chunk, as they stand after some steps: what the mask picture shows."""
    requests = [Request([(5 * i + 3 * j) % 64 for j in range(n)], 4, name=name) for i, (name, n) in enumerate(zip("ABCD", (5, 3, 2, 6)))]
    prepare(requests, model.config)
    for request in requests[:3]:
        request.computed = len(request.prompt) - 1
    requests[3].computed = 2
    return [(request, request.todo) for request in requests]


def some_prompts():
    """Five prompts of different lengths: what the picture of prepacking shows."""
    requests = [Request([1] * n, 1, name=name) for name, n in zip("ABCDE", (9, 3, 5, 1, 6))]
    return [(request, len(request.prompt)) for request in prepare(requests, GPTConfig())]


def pictures(model, folder, traces):
    """Draws all pictures into a folder."""
    small = run(model, small_workload(model.config), max_batch=4, token_budget=16)
    plots.timelines([trace for name, trace in small.items() if name in ("naive", "dynamic", "chunked", "interleaved", "ragged, varlen")], folder / "timelines.png")
    plots.timelines(list(storm(model).values()), folder / "storm.png")
    plots.masks(one_step(model), folder / "mask.png")
    plots.packed(some_prompts(), folder / "packed.png")
    plots.slots([trace for name, trace in traces.items() if "no cache" not in name], folder / "slots.png")
    large = GPT(GPTConfig()).to(model.device, model.wte.weight.dtype)   # random weights: as fast as trained ones
    plots.rows({"the built-in model, 0.9M parameters": forward_times(model), "GPT-2 small, 124M parameters": forward_times(large, seconds=30)},
               folder / "rows.png")
    gaps = decode_gaps(large, {name: STAGES[name] for name in ("dynamic", "chunked", "interleaved", "ragged, varlen")}, prompt_tokens=768)
    plots.itl(gaps, 8, 768, folder / "itl.png")
    print("time between tokens of four decodes of GPT-2 small while a prompt of 768 tokens comes in")
    for name, points in gaps.items():
        seconds = [gap for _, gap in points]
        print(f"{name:15} p50 {percentile(seconds, 50) * 1e3:5.0f}  p99 {percentile(seconds, 99) * 1e3:5.0f}  worst {max(seconds) * 1e3:5.0f} ms")


if __name__ == "__main__":
    from toolbox.cli import compare
    sys.exit(compare(__doc__))
