"""Figures from a trace: totals over its forward passes, and waiting times in seconds and steps."""
import json
import math
from collections import Counter

import numpy as np

from toolbox.trace import Trace

SUMS = ("useful", "recomputed", "pad_slots", "finished_slots", "padded_keys", "score_entries",
        "useful_scores", "copied_bytes", "rejected", "slots")


def totals(trace):
    """
    Sums over all forward passes, as a dict. `key_slots` counts padded and real keys; `seconds` is
    the time from the start of the run to its last token.
    """
    total = {name: sum(getattr(p, name) for p in trace.passes) for name in SUMS}
    total["forward_passes"] = len(trace.passes)
    keys = sum(first + n for p in trace.passes for _, first, n in p.work)
    total["key_slots"] = total["padded_keys"] + keys
    total["generated"] = sum(len(request.generated) for request in trace.requests)
    times = [time for request in trace.requests for time in request.token_times]
    total["seconds"] = max(times, default=trace.started) - trace.started
    total["tokens_per_second"] = total["generated"] / total["seconds"] if total["seconds"] else 0.0
    return total


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
        result["itl_steps"] += np.diff(request.token_steps).tolist()
        result["itl_seconds"] += np.diff(request.token_times).tolist()
    return result


def figures(log, ttft=None, itl=None):
    """
    Of a calculated run, a trace or what `runner` of lab/simulate/ returns: speed, waits in ms, and
    goodput: requests/s within both limits, in ms, on TTFT and on a request's mean time per token.
    """
    times = [request.token_times for request in log.requests]
    arrived = np.array([request.arrived for request in log.requests])
    first, last, tokens = (np.array([of(each) for each in times]) for of in (
        lambda each: each[0], lambda each: each[-1], len))
    between = (last - first) / np.maximum(tokens - 1, 1)
    good = (first - arrived <= (ttft or math.inf) / 1e3) & (between <= (itl or math.inf) / 1e3)
    took = float(last.max())
    return {"calculated": True, "requests": len(times), "seconds": took,
             "tokens_per_s": float(tokens.sum()) / took, "requests_per_s": len(times) / took,
             "goodput": float(good.sum()) / took,
             "passes": len(log.passes), "ttft_ms": spread(first - arrived),
             "tpot_ms": spread(between[tokens > 1]), "e2e_ms": spread(last - arrived),
             "itl_ms": spread(np.concatenate([np.diff(each) for each in times])),
             "useful": useful(log) if isinstance(log, Trace) else log.useful,
             **{name: log.counts.get(name, 0) for name in ("preemptions", "saved_tokens")}}


def useful(trace):
    """The share of the slots that hold a token which is computed for the first time."""
    return sum(p.useful for p in trace.passes) / sum(p.slots for p in trace.passes)


def spread(waits):
    """Of waits in seconds, in ms; NaN if there are none."""
    waits = waits if len(waits) else [math.nan]
    return {"mean": 1e3 * float(np.mean(waits)),
            **{f"p{q}": 1e3 * float(np.percentile(waits, q)) for q in (50, 90, 99)}}


def percentile(values, q):
    return float(np.percentile(values, q)) if values else float("nan")


def mean(values):
    return float(np.mean(values)) if values else float("nan")


def report(trace):
    """The table that every script prints."""
    t, waits, counts = totals(trace), latencies(trace), Counter(trace.counts)

    def share(name, whole, unit):
        n, of = t[name], t[whole]
        return f"{n:,}  ({n / max(of, 1):.0%} of {of:,} {unit})"

    ttft, itl = waits["ttft_steps"], waits["itl_steps"]
    ttft_ms = [seconds * 1e3 for seconds in waits["ttft_seconds"]]
    itl_ms = [seconds * 1e3 for seconds in waits["itl_seconds"]]
    rows = [
        ("forward passes", f"{t['forward_passes']:,}"),
        ("useful tokens", share("useful", "slots", "slots")),
        ("pad slots", share("pad_slots", "slots", "slots")),
        ("finished slots", share("finished_slots", "slots", "slots")),
        ("recomputed", share("recomputed", "slots", "slots: computed before")),
        ("padded keys", share("padded_keys", "key_slots", "keys that attention reads")),
        ("useful scores", share("useful_scores", "score_entries",
                                "query-key pairs, per head and layer")),
        ("copied K/V", f"{t['copied_bytes'] / 1e6:,.1f} MB of keys and values, gathered for "
                       "attention"),
        ("throughput", f"{t['generated']:,} tokens in {t['seconds']:.2f} s"
                       f" = {t['tokens_per_second']:,.0f} tokens/s"),
        ("TTFT", f"mean {mean(ttft):.1f}, p95 {percentile(ttft, 95):.1f} steps; "
                 f"mean {mean(ttft_ms):.0f}, p95 {percentile(ttft_ms, 95):.0f} ms to a first token"
                 if ttft else "none: no request has a token"),
        ("ITL", f"p50 {percentile(itl, 50):.1f}, p99 {percentile(itl, 99):.1f} steps; "
                f"p50 {percentile(itl_ms, 50):.1f}, p99 {percentile(itl_ms, 99):.1f} ms between two"
                if itl else "none: no request has two tokens"),
    ]
    accepted = sum(len(r.token_steps) - len(set(r.token_steps)) for r in trace.requests)
    if accepted or t["rejected"]:
        rows.append(("rejected", share("rejected", "slots", "slots")))
        rows.append(("accepted", f"{accepted:,} guesses, "
                                 f"{accepted / t['forward_passes']:.2f} per pass"))
    if counts["preemptions"]:
        rows.append(("preemptions", f"{counts['preemptions']:,}"))
    if counts["shared_pages"] or counts["evicted_pages"]:
        rows.append(("prefix cache", f"{counts['shared_pages']:,} pages hit, "
                                     f"{counts['saved_tokens']:,} tokens not computed, "
                                     f"{counts['evicted_pages']:,} pages evicted"))
    return "\n".join([f"stage: {trace.stage}", *(f"  {name:15} {text}" for name, text in rows)])


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
    first, *widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(row[0].ljust(first)
                     + "".join(f"  {cell:>{w}}" for cell, w in zip(row[1:], widths))
                     for row in rows)
