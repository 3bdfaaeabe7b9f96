"""Figures from a trace: totals over its forward passes, and how long requests waited, in seconds and in steps."""
import bisect

import numpy as np


def totals(trace):
    """Sums over all forward passes, and what they are worth."""
    total = {name: sum(getattr(p, name) for p in trace.passes)
             for name in ("useful", "recomputed", "pad_slots", "finished_slots", "padded_keys", "score_entries",
                          "useful_scores", "copied_bytes", "seconds")}
    total["forward_passes"] = len(trace.passes)
    total["slots"] = sum(p.slots for p in trace.passes)
    total["generated"] = sum(len(request.generated) for request in trace.requests)
    return total


def latencies(trace):
    """
    Time to first token of each request and the times between its tokens, as four flat lists:
    ttft_steps, itl_steps, ttft_seconds, itl_seconds. A request served in the step it arrives has a TTFT of 1 step.
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


def report(trace):
    """A short table as text."""
    t, waits = totals(trace), latencies(trace)
    elapsed = max([time for request in trace.requests for time in request.token_times], default=trace.started) - trace.started

    def line(name, text):
        return f"  {name:16}{text}"

    def of_slots(n):
        return f"{n:,} ({n / max(t['slots'], 1):.1%} of {t['slots']:,} slots)"

    def spread(steps, seconds):
        if not steps:
            return "none"
        return (f"p50 {np.percentile(steps, 50):.0f}, p99 {np.percentile(steps, 99):.0f} steps; "
                f"p50 {np.percentile(seconds, 50) * 1e3:.1f}, p99 {np.percentile(seconds, 99) * 1e3:.1f} ms")

    lines = [f"stage: {trace.stage}",
             line("forward passes", f"{t['forward_passes']:,}"),
             line("useful tokens", of_slots(t["useful"])),
             line("pad slots", of_slots(t["pad_slots"]))]
    if t["finished_slots"]:
        lines.append(line("finished slots", of_slots(t["finished_slots"])))
    if t["recomputed"]:
        lines.append(line("recomputed", of_slots(t["recomputed"])))
    lines += [line("padded keys", f"{t['padded_keys']:,}"),
              line("scores", f"{t['score_entries']:,} computed, {t['useful_scores']:,} useful"),
              line("copied K/V", f"{t['copied_bytes'] / 1e6:,.1f} MB"),
              line("throughput", f"{t['generated']:,} tokens in {elapsed:.2f} s = {t['generated'] / max(elapsed, 1e-9):,.0f} tokens/s"),
              line("TTFT", spread(waits["ttft_steps"], waits["ttft_seconds"])),
              line("ITL", spread(waits["itl_steps"], waits["itl_seconds"]))]
    return "\n".join(lines)
