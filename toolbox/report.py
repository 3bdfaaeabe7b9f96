"""Figures from a trace: totals over its forward passes, and how long requests waited, in seconds and in steps."""
import bisect
import json
from collections import Counter

import numpy as np

SUMS = ("useful", "recomputed", "pad_slots", "finished_slots", "padded_keys", "score_entries", "useful_scores", "copied_bytes", "slots")


def totals(trace):
    """Sums over all forward passes, as a dict; `key_slots` counts padded and real keys, `seconds` is from start to last token."""
    total = {name: sum(getattr(p, name) for p in trace.passes) for name in SUMS}
    total["forward_passes"] = len(trace.passes)
    total["key_slots"] = total["padded_keys"] + sum(first + n for p in trace.passes for _, first, n in p.work)
    total["generated"] = sum(len(request.generated) for request in trace.requests)
    total["seconds"] = max((time for request in trace.requests for time in request.token_times), default=trace.started) - trace.started
    total["tokens_per_second"] = total["generated"] / total["seconds"] if total["seconds"] else 0.0
    return total


def latencies(trace):
    """
    Times to first token (one for each request that got one) and between tokens, as four flat lists: ttft_steps,
    itl_steps, ttft_seconds, itl_seconds. A request that is served in the step of its arrival has a TTFT of 1 step.
    """
    steps = sorted(trace.step_times)
    result = {"ttft_steps": [], "itl_steps": [], "ttft_seconds": [], "itl_seconds": []}
    for request in trace.requests:
        if request.token_steps:
            arrived = trace.step_times[steps[bisect.bisect_left(steps, request.arrival)]] if request.arrival else trace.started
            result["ttft_steps"].append(request.token_steps[0] - request.arrival + 1)
            result["ttft_seconds"].append(request.token_times[0] - arrived)
            result["itl_steps"] += np.diff(request.token_steps).tolist()
            result["itl_seconds"] += np.diff(request.token_times).tolist()
    return result


def percentile(values, q):
    return float(np.percentile(values, q)) if values else float("nan")


def report(trace):
    """The table that every script prints."""
    t, waits = totals(trace), latencies(trace)

    def share(n, whole, of):
        return f"{n:,}  ({n / max(whole, 1):.0%} of {whole:,} {of})"

    rows = [("forward passes", f"{t['forward_passes']:,}"),
            ("useful tokens", share(t["useful"], t["slots"], "slots")),
            ("pad slots", share(t["pad_slots"], t["slots"], "slots")),
            ("finished slots", share(t["finished_slots"], t["slots"], "slots")),
            ("recomputed", share(t["recomputed"], t["slots"], "slots")),
            ("padded keys", share(t["padded_keys"], t["key_slots"], "key slots")),
            ("useful scores", share(t["useful_scores"], t["score_entries"], "a head and layer")),
            ("copied K/V", f"{t['copied_bytes'] / 1e6:,.1f} MB"),
            ("throughput", f"{t['generated']:,} tokens in {t['seconds']:.2f} s = {t['tokens_per_second']:,.0f} tokens/s"),
            ("TTFT", f"mean {np.mean(waits['ttft_steps'] or [np.nan]):.1f}, p95 {percentile(waits['ttft_steps'], 95):.1f} steps; "
                     f"mean {np.mean(waits['ttft_seconds'] or [np.nan]) * 1e3:.0f}, p95 {percentile(waits['ttft_seconds'], 95) * 1e3:.0f} ms"),
            ("ITL", f"p50 {percentile(waits['itl_steps'], 50):.1f}, p99 {percentile(waits['itl_steps'], 99):.1f} steps; "
                    f"p50 {percentile(waits['itl_seconds'], 50) * 1e3:.1f}, p99 {percentile(waits['itl_seconds'], 99) * 1e3:.1f} ms")]
    counts = Counter(trace.counts)
    if counts["preemptions"]:
        rows.append(("preemptions", f"{counts['preemptions']:,}"))
    if counts["prefix_hits"] or counts["evicted_pages"]:
        rows.append(("prefix cache", f"{counts['prefix_hits']:,} hits, {counts['saved_tokens']:,} tokens saved, {counts['evicted_pages']:,} pages evicted"))
    return "\n".join([f"stage: {trace.stage}", *(f"  {name:15} {text}" for name, text in rows)])


def write_trace(trace, path):
    """The trace as JSON: {"stage", "requests": [...], "passes": [...], "counts": {...}, "totals": {...}}; times in seconds from the start."""
    requests = [{"name": r.name, "arrival": r.arrival, "prompt_tokens": len(r.prompt), "generated": r.generated,
                 "finish_reason": r.finish_reason, "token_steps": r.token_steps, "token_times": [t - trace.started for t in r.token_times]}
                for r in trace.requests]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"stage": trace.stage, "requests": requests, "passes": [vars(p) for p in trace.passes], "counts": dict(trace.counts), "totals": totals(trace)}, file, indent=1)


def aligned(rows):
    """Rows of cells as lines of text: the first column to the left, the others to the right."""
    rows = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [row[0].ljust(widths[0]) + "".join("  " + cell.rjust(width) for cell, width in zip(row[1:], widths[1:])) for row in rows]
