"""
The guided walk of the explorer: six stops on the ladder's page, each a sentence and a place to look.

Every stop looks for its step in the runs themselves, and its figures are counted there. A stop whose
subject does not occur in these runs (say, no prompt was long enough to be chunked) is left out.
"""


def walk(traces):
    """[{title, text, show}, ...] for runs {name: trace}. show: what the page's address would say."""
    stops = (padding, finished_rows, stalled_decode, chunk, fused_pads, flat_stream)
    return [stop for stop in (find(traces) for find in stops) if stop]


def stop(title, text, run, beside, step, look, slot=None):
    """
    look: the panel to look at, and 0 or 1, for the run on the left or on the right
    slot: (pass, row, column) of that run to point at
    """
    show = {"run": run, "beside": beside, "step": step}
    if slot:
        show["slot"] = ".".join(map(str, (look[1], *slot)))
    return {"title": title, "text": text, "look": list(look), "show": show}


def padding(traces):
    best = most(traces.get("naive"), lambda p: p.pad_slots)
    if best:
        i, p = best
        row, (name, _, n) = min(enumerate(p.work), key=lambda entry: entry[1][2])
        return stop("padding", f"Stage 1 puts all prompts into one rectangle, as wide as the longest: "
                    f"{name} has {n} tokens in its row of {p.shape[1]} slots, and {p.pad_slots} of "
                    f"all {p.slots} slots are pads, computed for nothing.",
                    "naive", "dynamic" if "dynamic" in traces else None, p.step, ("tensor", 0),
                    (i, row, 0))


def finished_rows(traces):
    best = most(traces.get("naive"), lambda p: p.finished_slots)
    if best:
        i, p = best
        return stop("finished rows", f"A static batch runs until its longest request is done: in step "
                    f"{p.step}, {p.finished_slots} of {p.shape[0]} rows belong to requests that are "
                    "finished, and no waiting request may take their places.",
                    "naive", "dynamic" if "dynamic" in traces else None, p.step, ("timeline", 0))


def stalled_decode(traces):
    trace = traces.get("dynamic")
    decoding = {p.step for p in trace.passes if is_decode(p, trace)} if trace else ()
    best = most(trace, lambda p: p.useful * (p.step in decoding and not is_decode(p, trace)))
    if best:
        _, p = best
        n = sum(len(q.work) for q in trace.passes if q.step == p.step) - len(p.work)
        return stop("the stalled decode", f"Stage 2 lets newcomers in at once, but computes their prompts "
                    f"in one piece: in step {p.step} the next tokens of {n} running requests have to "
                    f"wait for {p.useful} prompt tokens.",
                    "dynamic", "chunked" if "chunked" in traces else None, p.step, ("plan", 0))


def chunk(traces):
    trace = traces.get("chunked")
    lengths = {r.name: len(r.prompt) for r in trace.requests} if trace else {}
    decoding = {p.step for p in trace.passes if is_decode(p, trace)} if trace else ()
    best = most(trace, lambda p: (p.step in decoding) * sum(
        n for name, first, n in p.work if first + n < lengths[name]))
    if best:
        _, p = best
        name, first, n = next(work for work in p.work if sum(work[1:]) < lengths[work[0]])
        return stop("the chunk", f"Stage 3 shares out a token budget, decodes first: what is left in step "
                    f"{p.step} holds only {n} of the {lengths[name]} prompt tokens of {name}, and the "
                    "rest follows in the next step.",
                    "chunked", "dynamic" if "dynamic" in traces else None, p.step, ("plan", 0))


def fused_pads(traces):
    best = fused(traces)
    if best:
        i, p = best
        row = next(row for row, (_, _, n) in enumerate(p.work) if n == 1)
        return stop("the pads of the fused rectangle", f"Stage 4 needs one pass instead of two, but every "
                    f"decode is padded to the width of the chunk: {p.useful} tokens in {p.slots} slots. "
                    "No token may see these pads: point at the last slot of the row.",
                    "interleaved", "chunked" if "chunked" in traces else None, p.step, ("tensor", 0),
                    (i, row, 0))


def flat_stream(traces):
    best, flat = fused(traces), traces.get("ragged, varlen")
    if best and flat:
        i = next((i for i, q in enumerate(flat.passes) if q.step == best[1].step), None)
        if i is not None:
            p = flat.passes[i]
            return stop("the flat stream", f"Stage 6 drops the rows: the same plan takes {p.slots} slots "
                        f"instead of {best[1].slots}, and every slot holds a token.",
                        "interleaved", "ragged, varlen", p.step, ("tensor", 1), (i, 0, 0))


def fused(traces):
    """The pass of stage 4 with the most pads, among those that have a decode."""
    trace = traces.get("interleaved")
    return most(trace, lambda p: p.pad_slots * any(
        n == 1 and first for _, first, n in p.work))


def is_decode(p, trace):
    """Whether a pass of a stage with two passes a step holds its decodes."""
    lengths = {r.name: len(r.prompt) for r in trace.requests}
    return all(first >= lengths[name] for name, first, _ in p.work)


def most(trace, what):
    """(index, pass) of the pass with the largest `what`, the first of equals; None if it is 0."""
    i, p = max(enumerate(trace.passes if trace else ()), key=lambda entry: what(entry[1]),
               default=(None, None))
    return (i, p) if p and what(p) else None
