"""Figures from a trace: totals over its forward passes, and waiting times in seconds and steps."""
import json
import math
from collections import Counter
from itertools import pairwise

import numpy as np

from toolbox.trace import Trace

SUMS = ("useful", "recomputed", "pad_slots", "finished_slots", "padded_keys", "score_entries",
        "useful_scores", "copied_bytes", "rejected", "slots")


def totals(trace):
    """
    Sums over all forward passes, as a dict. `key_slots` counts padded and real keys; `seconds` is
    the time from the start of the run to its last token.
    """
    total = {}
    for name in SUMS:
        total[name] = sum(getattr(p, name) for p in trace.passes)
    total["forward_passes"] = len(trace.passes)
    total["key_slots"] = total["padded_keys"]
    for p in trace.passes:
        total["key_slots"] += sum(first + n for _, first, n in p.work)
    total["generated"] = sum(len(request.generated) for request in trace.requests)
    last_times = [request.token_times[-1] for request in trace.requests if request.token_times]
    seconds = max(last_times, default=trace.started) - trace.started
    total["seconds"] = seconds
    total["tokens_per_second"] = total["generated"] / seconds if seconds else 0.0
    return total


def gaps(times):
    """The gaps between neighbours in a list: [a, b, c] -> [b - a, c - b]."""
    return [later - earlier for earlier, later in pairwise(times)]


def latencies(trace):
    """
    Times to first token (one per request that has a token) and times between tokens, as four flat
    lists: ttft_steps, itl_steps, ttft_seconds, itl_seconds. A request that gets its first token in
    the step of its arrival has a TTFT of 1 step.
    """
    result = {"ttft_steps": [], "itl_steps": [], "ttft_seconds": [], "itl_seconds": []}
    for request in trace.requests:
        if not request.token_steps:
            continue
        result["ttft_steps"].append(request.token_steps[0] - request.arrival + 1)
        result["ttft_seconds"].append(request.token_times[0] - trace.arrived(request))
        result["itl_steps"] += gaps(request.token_steps)
        result["itl_seconds"] += gaps(request.token_times)
    return result


# --- calculated runs ------------------------------------------------------------------------------

def figures(log, ttft=None, itl=None):
    """
    Of a calculated run, a trace or what `runner` of lab/simulate/ returns: speed, waits in ms, and
    goodput: requests/s within both limits, in ms, on TTFT and on a request's mean time per token.
    """
    ttft_limit = math.inf if ttft is None else ttft / 1e3   # seconds
    tpot_limit = math.inf if itl is None else itl / 1e3
    first_waits, totals_of_requests, per_token, between = [], [], [], []   # seconds
    good = tokens = 0
    took = 0.0
    for request in log.requests:
        times = request.token_times
        first_wait = times[0] - request.arrived
        mean_gap = (times[-1] - times[0]) / max(len(times) - 1, 1)
        first_waits.append(first_wait)
        totals_of_requests.append(times[-1] - request.arrived)
        if len(times) > 1:
            per_token.append(mean_gap)
        between += gaps(times)
        good += first_wait <= ttft_limit and mean_gap <= tpot_limit
        tokens += len(times)
        took = max(took, times[-1])
    return {
        "calculated": True,
        "requests": len(log.requests),
        "seconds": float(took),
        "tokens_per_s": tokens / took,
        "requests_per_s": len(log.requests) / took,
        "goodput": good / took,
        "passes": len(log.passes),
        "ttft_ms": spread(first_waits),
        "tpot_ms": spread(per_token),
        "e2e_ms": spread(totals_of_requests),
        "itl_ms": spread(between),
        "useful": useful(log) if isinstance(log, Trace) else log.useful,
        "preemptions": log.counts.get("preemptions", 0),
        "saved_tokens": log.counts.get("saved_tokens", 0)}


def useful(trace):
    """The share of the slots that hold a token which is computed for the first time."""
    slots = sum(p.slots for p in trace.passes)
    return sum(p.useful for p in trace.passes) / slots


def spread(waits):
    """Of waits in seconds, in ms; NaN if there are none."""
    waits = waits or [math.nan]
    in_ms = {"mean": 1e3 * float(np.mean(waits))}
    for q in 50, 90, 99:
        in_ms[f"p{q}"] = 1e3 * float(np.percentile(waits, q))
    return in_ms


def percentile(values, q):
    return float(np.percentile(values, q)) if values else float("nan")


def mean(values):
    return float(np.mean(values)) if values else float("nan")


# --- the table that every script prints -----------------------------------------------------------

def report(trace):
    total = totals(trace)
    rows = work_rows(total) + speed_rows(total, latencies(trace))
    rows += guess_rows(trace, total) + memory_rows(Counter(trace.counts))
    lines = [f"stage: {trace.stage}"]
    lines += [f"  {name:15} {text}" for name, text in rows]
    return "\n".join(lines)


def share(total, name, whole, unit):
    part, of = total[name], total[whole]
    return f"{part:,}  ({part / max(of, 1):.0%} of {of:,} {unit})"


def work_rows(total):
    """What was computed, read and copied: [(name, text), ...]"""
    megabytes = total["copied_bytes"] / 1e6
    return [
        ("forward passes", f"{total['forward_passes']:,}"),
        ("useful tokens", share(total, "useful", "slots", "slots")),
        ("pad slots", share(total, "pad_slots", "slots", "slots")),
        ("finished slots", share(total, "finished_slots", "slots", "slots")),
        ("recomputed", share(total, "recomputed", "slots", "slots: computed before")),
        ("padded keys", share(total, "padded_keys", "key_slots", "keys that attention reads")),
        ("useful scores", share(total, "useful_scores", "score_entries",
                                "query-key pairs, per head and layer")),
        ("copied K/V", f"{megabytes:,.1f} MB of keys and values, gathered for attention")]


def speed_rows(total, waits):
    """How fast, and how long requests waited, in steps and in ms: [(name, text), ...]"""
    ttft_steps, itl_steps = waits["ttft_steps"], waits["itl_steps"]
    ttft_ms = [1e3 * seconds for seconds in waits["ttft_seconds"]]
    itl_ms = [1e3 * seconds for seconds in waits["itl_seconds"]]
    ttft, itl = "none: no request has a token", "none: no request has two tokens"
    if ttft_steps:
        ttft = (f"mean {mean(ttft_steps):.1f}, p95 {percentile(ttft_steps, 95):.1f} steps; mean "
                f"{mean(ttft_ms):.0f}, p95 {percentile(ttft_ms, 95):.0f} ms to a first token")
    if itl_steps:
        itl = (f"p50 {percentile(itl_steps, 50):.1f}, p99 {percentile(itl_steps, 99):.1f} steps; "
               f"p50 {percentile(itl_ms, 50):.1f}, p99 {percentile(itl_ms, 99):.1f} ms between two")
    throughput = (f"{total['generated']:,} tokens in {total['seconds']:.2f} s"
                  f" = {total['tokens_per_second']:,.0f} tokens/s")
    return [("throughput", throughput), ("TTFT", ttft), ("ITL", itl)]


def guess_rows(trace, total):
    """Of guessed tokens, if there are any: [(name, text), ...]"""
    accepted = 0   # each comes in the same step as a token before it
    for request in trace.requests:
        accepted += len(request.token_steps) - len(set(request.token_steps))
    if not accepted and not total["rejected"]:
        return []
    per_pass = accepted / total["forward_passes"]
    return [("rejected", share(total, "rejected", "slots", "slots")),
            ("accepted", f"{accepted:,} guesses, {per_pass:.2f} per pass")]


def memory_rows(counts):
    """Of paged memory, what happened: [(name, text), ...]"""
    rows = []
    if counts["preemptions"]:
        rows.append(("preemptions", f"{counts['preemptions']:,}"))
    if counts["shared_pages"] or counts["evicted_pages"]:
        rows.append(("prefix cache", f"{counts['shared_pages']:,} pages hit, "
                                     f"{counts['saved_tokens']:,} tokens not computed, "
                                     f"{counts['evicted_pages']:,} pages evicted"))
    return rows


# --- files and tables -----------------------------------------------------------------------------

def write_trace(trace, path):
    """
    Writes the trace as JSON: {"stage", "requests": [...], "passes": [...], "counts": {...},
    "totals": {...}}. Times are in seconds from the start.
    """
    requests = [{
        "name": r.name, "arrival": r.arrival, "prompt_tokens": len(r.prompt),
        "generated": r.generated, "finish_reason": r.finish_reason, "token_steps": r.token_steps,
        "token_times": [time - trace.started for time in r.token_times],
    } for r in trace.requests]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"stage": trace.stage, "requests": requests,
                   "passes": [vars(p) for p in trace.passes],
                   "counts": dict(trace.counts), "totals": totals(trace)}, file, indent=1)


def aligned(rows):
    """Rows of cells as text: the first column left-aligned, the others right-aligned."""
    rows = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        line = row[0].ljust(widths[0])
        for cell, width in zip(row[1:], widths[1:]):
            line += f"  {cell:>{width}}"
        lines.append(line)
    return "\n".join(lines)
