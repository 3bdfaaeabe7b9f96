"""
The guided walk of the explorer: six stops on the ladder's page, each a sentence and a place.

Each stop finds its step in the runs themselves and counts its figures there. It is left out if what
it is about does not occur, say because no prompt was long enough to be chunked.
"""


def walk(traces):
    """The stops for runs {name: trace}, as the page takes them; see `stop`."""
    stops = (padding, finished_rows, stalled_decode, chunk, fused_pads, flat_stream)
    return [found for found in (find(traces) for find in stops) if found]


def stop(traces, title, text, runs, step, look, slot=None):
    """
    runs: the names of the run on the left and the one beside it
    look: the panel to look at, and 0 or 1, for the run on the left or beside it
    slot: (pass, row, column) to point at, in that run
    """
    run, beside = runs
    show = {"run": run, "beside": beside if beside in traces else "", "step": step}
    if slot:
        show["slot"] = ".".join(map(str, (look[1], *slot)))
    return {"title": title, "text": text, "look": look, "show": show}


def padding(traces):
    i, p = most(traces, "naive", lambda p: p.pad_slots)
    if p:
        row, (name, _, n) = min(enumerate(p.work), key=lambda entry: entry[1][2])
        text = (f"Stage 1 puts all prompts into one rectangle, as wide as the longest of them: "
                f"{name} has {n} tokens in its row of {p.shape[1]} slots, and {p.pad_slots:,} of "
                f"all {p.slots:,} slots are pads, like the framed one, computed for nothing.")
        return stop(traces, "padding", text, ("naive", "dynamic"), p.step, ("tensor", 0),
                    (i, row, 0))


def finished_rows(traces):
    _, p = most(traces, "naive", lambda p: p.finished_slots)
    if p:
        text = (f"A static batch runs until its longest request is done: in step {p.step}, "
                f"{p.finished_slots} of its {p.shape[0]} rows belong to requests that are finished "
                "(red), while others wait for a place (the thin lines).")
        return stop(traces, "finished rows", text, ("naive", "dynamic"), p.step, ("timeline", 0))


def stalled_decode(traces):
    decodes = decodes_of(traces, "dynamic")
    _, p = most(traces, "dynamic", lambda p: p.useful * (
        p.step in decodes and not is_decode(p, traces["dynamic"])))
    if p:
        text = (f"Stage 2 lets newcomers in at once, but computes their prompts in one piece: in "
                f"step {p.step} a second pass computes {p.useful} prompt tokens, and before it "
                f"ends, none of the {decodes[p.step]} running requests can go on.")
        return stop(traces, "the stalled decode", text, ("dynamic", "chunked"), p.step,
                    ("tensor", 0))


def chunk(traces):
    decodes = decodes_of(traces, "chunked")
    lengths = prompt_lengths(traces.get("chunked"))

    def has_chunk(p):   # of a prompt that does not end in this pass
        return any(first + n < lengths[name] for name, first, n in p.work)

    _, p = most(traces, "chunked", lambda p: has_chunk(p) * decodes.get(p.step, 0))
    if p:
        name, first, n = next(work for work in p.work if sum(work[1:]) < lengths[work[0]])
        text = (f"Stage 3 shares out a token budget, decodes first: what is left of it in step "
                f"{p.step} holds {n} of the {lengths[name]} prompt tokens of {name}, and no "
                "prompt, however long, can make a step longer than the budget.")
        return stop(traces, "the chunk", text, ("chunked", "dynamic"), p.step, ("plan", 0))


def fused_pads(traces):
    i, p = fused(traces)
    if p:
        row, first = next((row, first) for row, (_, first, n) in enumerate(p.work) if n == 1)
        text = ("Stage 4 needs one pass where stage 3 needs two, but pads every decode to the "
                f"width of the widest chunk, {p.useful} tokens in {p.slots:,} slots; the framed "
                f"decode must see the {first + 1} keys of its request and none of the pads.")
        return stop(traces, "the pads of the fused rectangle", text, ("interleaved", "chunked"),
                    p.step, ("sees", 0), (i, row, p.shape[1] - 1))


def flat_stream(traces):
    name, (_, wide) = "ragged, varlen", fused(traces)
    i, p = most(traces, name, lambda p: wide and p.step == wide.step)
    if p:
        text = (f"Stage 6 drops the rows: the same plan takes {p.slots} slots where the rectangle "
                f"takes {wide.slots:,}, and every slot, like the framed one, holds a token.")
        return stop(traces, "the flat stream", text, ("interleaved", name), p.step, ("tensor", 1),
                    (i, 0, 0))


def fused(traces):
    """The pass of stage 4 with the most pads among those that hold a decode."""
    lengths = prompt_lengths(traces.get("interleaved"))
    return most(traces, "interleaved", lambda p: p.pad_slots * any(
        first >= lengths[name] for name, first, _ in p.work))


def prompt_lengths(trace):
    return {request.name: len(request.prompt) for request in trace.requests} if trace else {}


def is_decode(p, trace):
    """Whether all of a pass is decodes."""
    lengths = prompt_lengths(trace)
    return all(first >= lengths[name] for name, first, _ in p.work)


def decodes_of(traces, name):
    """{step: number of decodes} of a run with two passes a step."""
    return {p.step: len(p.work) for p in traces[name].passes
            if is_decode(p, traces[name])} if name in traces else {}


def most(traces, name, what):
    """(index, pass) of the run's pass with the most `what`; (None, None) if no pass has any."""
    passes = traces[name].passes if name in traces else []
    i = max(range(len(passes)), key=lambda i: what(passes[i]), default=None)
    return (i, passes[i]) if passes and what(passes[i]) else (None, None)
