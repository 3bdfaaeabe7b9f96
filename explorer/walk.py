"""
The guided walk of the explorer: ten stops up the ladder. Each is a sentence or two, and a scene: a
step of one or two runs, and the panels that show what the sentence speaks of.

Each stop finds its step in the runs themselves, and counts its figures there. Milliseconds are
those of `twins`, the same runs on a calculated GPU.
"""
import statistics

MASK = "interleaved, published mask"   # a run of stage 4 under the trap of that name
FLAT = "ragged, varlen"


def walk(traces, twins):
    """The stops for runs {name: trace}, as the page takes them; see `stop`."""
    return [found(traces, twins) for found in (
        padding, finished_rows, stall, chunk, fused, published_mask, flat_stream, sharing,
        preemption, scoreboard)]


def stop(title, text, panels, runs, step, clock="step", look=0, slot=None):
    """
    panels: those of the scene; the first is the one to look at
    runs:   the run that is shown, and if there are two, the one beside it
    look:   0 or 1, which of them to look at
    slot:   (pass, row, column) to point at, in that run
    """
    show = {"run": runs[0], "beside": runs[1] if len(runs) > 1 else "", "clock": clock,
            "step": step}
    if slot:
        show["slot"] = ".".join(map(str, (look, *slot)))
    return {"title": title, "text": text, "panels": panels, "look": look, "show": show}


def padding(traces, twins):
    i, p = most(traces["naive"], lambda p: p.pad_slots)
    row, (name, _, n) = min(enumerate(p.work), key=lambda entry: entry[1][2])
    text = (f"Stage 1 puts all prompts into one rectangle, as wide as the longest of them. {name} "
            f"has {n} tokens in a row of {p.shape[1]} slots. {p.pad_slots:,} of all {p.slots:,} "
            "slots are pads, like the framed one: computed for nothing.")
    panels = ["tensor", "sees", "timeline"]
    return stop("padding", text, panels, ["naive"], p.step, slot=(i, row, 0))


def finished_rows(traces, twins):
    _, p = most(traces["naive"], lambda p: p.finished_slots * any(
        request.arrival <= p.step < request.token_steps[0]
        for request in traces["naive"].requests))
    text = (f"A static batch runs until its longest request is done. In step {p.step}, "
            f"{p.finished_slots} of its {p.shape[0]} rows belong to requests that have finished "
            "(red), while others wait for a place (the thin grey lines).")
    return stop("finished rows", text, ["timeline", "tensor", "sees"], ["naive"], p.step)


def stall(traces, twins):
    wait, step = worst_wait(twins["dynamic"])
    every = statistics.median_high(wait for wait, _ in waits(twins["dynamic"]))
    decodes, prefill = passes_of(traces["dynamic"], step)
    names = " and ".join(name for name, _, _ in prefill.work)
    text = (f"Stage 2 lets newcomers in at once, but computes their prompts in one piece. In step "
            f"{step}, a second pass computes the {prefill.useful} prompt tokens of {names}. The "
            f"{len(decodes.work)} requests that decode get no token for {wait:.0f} ms; otherwise "
            f"they get one every {every:.0f} ms.")
    return stop("stall", text, ["timeline", "tensor", "sees"], ["dynamic"], step, "gpu")


def chunk(traces, twins):
    _, step = worst_wait(twins["dynamic"])
    decodes, prefill = passes_of(traces["chunked"], step)
    name, first, n = prefill.work[0]
    whole = len(request_of(traces["chunked"], name).prompt)
    waits = [worst_wait(twins[run])[0] for run in ("dynamic", "chunked")]
    twin = [request_of(twins[run], name) for run in ("dynamic", "chunked")]
    late = [1e3 * (request.token_times[0] - request.arrived) for request in twin]
    tokens = traces["chunked"].recording.knobs["token_budget"]
    text = (f"Stage 3 gives each step a budget of {tokens} tokens, decodes first. In step {step} "
            f"that leaves {n} for a chunk of {name}, which has {whole}. The longest wait for a "
            f"next token falls from {waits[0]:.0f} to {waits[1]:.0f} ms. The price: {name} waits "
            f"{late[1]:.0f} ms for its first token, not {late[0]:.0f}.")
    return stop("chunk", text, ["timeline", "plan"], ["chunked", "dynamic"], step, "gpu")


def fused(traces, twins):
    _, step = worst_wait(twins["dynamic"])
    i, p = most(traces["interleaved"], lambda p: p.step == step)
    row = next(row for row, (_, _, n) in enumerate(p.work) if n == 1)
    ms = [milliseconds(twins[run], p.step) for run in ("chunked", "interleaved")]
    text = (f"Stage 4 fuses the two passes into one, so it reads the weights once: step {p.step} "
            f"takes {ms[1]:.0f} ms, not {ms[0]:.0f}. But every decode is padded to the width of "
            f"the chunk: {p.useful + p.recomputed} tokens in {p.slots:,} slots.")
    return stop("fused rectangle", text, ["tensor", "sees", "timeline"], ["interleaved", "chunked"],
                p.step, slot=(i, row, 0))


def published_mask(traces, twins):
    recorder, found = traces[MASK].recording, []
    for i, frame in enumerate(recorder.frames):
        for row, slots in enumerate(frame["rows"]):
            owner, position, n, *rest = slots[-1]
            if owner >= 0 and n == 1 and len(rest) > 2 and rest[2]:
                found.append((rest[2], i, row))
    pads, i, row = max(found)
    alone = {request.name: request.generated for request in traces["unbatched"].requests}
    other = sum(alone[request.name] != request.generated for request in recorder.requests)
    p = traces[MASK].passes[i]
    text = ("A published tutorial marks all new slots of this rectangle as valid. So the framed "
            f"decode of {p.work[row][0]} sees {pads} pads (red). Nothing raises an error. Only the "
            f"check tells: {other} of {len(recorder.requests)} requests get other tokens than they "
            "would have got alone.")
    return stop("published mask", text, ["tensor", "sees"], [MASK], p.step,
                slot=(i, row, p.shape[1] - 1))


def flat_stream(traces, twins):
    _, step = worst_wait(twins["dynamic"])
    wide, = passes_of(traces["interleaved"], step)
    i, p = most(traces[FLAT], lambda p: p.step == step)
    ms = [milliseconds(twins[run], p.step) for run in ("interleaved", FLAT)]
    text = ("Stage 6 has no rows. The tokens of all requests are one stream, and its boundaries "
            f"say which keys each may see. The same plan takes {p.slots} slots, not {wide.slots:,},"
            f" and {ms[1]:.0f} ms, not {ms[0]:.0f}. No slot is a pad.")
    return stop("flat stream", text, ["tensor", "sees", "timeline"], ["interleaved", FLAT], p.step,
                look=1, slot=(i, 0, 0))


def sharing(traces, twins):
    trace, first_of, found = traces["paged"], {}, []
    for i, p in enumerate(trace.passes):
        for name, first, _ in p.work:
            if name not in first_of:
                found.append((first, i, name))
                first_of[name] = first
    first, i, name = max(found)
    size = trace.recording.pool["page_size"]
    table = tables(trace, i)[name][:first // size]
    others = [other for other, pages in tables(trace, i).items()
              if other != name and pages[:len(table)] == table]
    p, slot = trace.passes[i], sum(n for _, _, n in trace.passes[i].work[:-1])
    text = (f"Stage 7 keeps all keys and values in pages of {size} tokens. Each "
            f"request has a list of them. {name} begins like {' and '.join(others)}: it takes "
            f"the same {len(table)} pages (double frames), which are kept once, and its first "
            f"{first} tokens are not computed.")
    return stop("sharing", text, ["memory", "timeline"], ["paged"], p.step, slot=(i, 0, slot))


def preemption(traces, twins):
    trace = traces["paged"]
    i, p = most(trace, lambda p: p.recomputed)
    again = sum(p.recomputed for p in trace.passes)
    name = next(name for name, first, _ in p.work if first < reached(trace, i, name))
    lost = max(j for j in range(i) if name in tables(trace, j))
    text = (f"Memory is scarce here: {trace.recording.pool['pages']} pages. After step "
            f"{trace.passes[lost].step} no page is left, and {name}, the last of those that run, "
            f"is preempted: it gives its pages back and waits (shaded). In step {p.step} it "
            f"computes tokens again (purple), {again} in the whole run. It draws no random number "
            "twice, so its text stays the same.")
    return stop("preemption", text, ["timeline", "memory"], ["paged"], p.step, "gpu")


def scoreboard(traces, twins):
    text = ("All stages, the same requests, the same tokens. Stage 3 ends the stall, and reads the "
            "weights twice a step; stage 4 reads them once, and pays for pads; stage 6 does "
            "neither. Stage 7 serves them in less memory, and computes shared beginnings once. A "
            "click on a name shows its run.")
    last = traces[FLAT].passes[-1].step
    return stop("scoreboard", text, ["score"], [FLAT], last, "gpu")


# --- what the stops count -------------------------------------------------------------------------

def most(trace, what):
    """(index, pass) of the run's pass with the most `what`."""
    return max(enumerate(trace.passes), key=lambda entry: what(entry[1]))


def passes_of(trace, step):
    return [p for p in trace.passes if p.step == step]


def request_of(trace, name):
    return next(request for request in trace.requests if request.name == name)


def waits(twin):
    """[(milliseconds, step), ...]: each request's waits for its next tokens, and when they end."""
    return [(1e3 * (b - a), step) for request in twin.requests for a, b, step in zip(
        request.token_times, request.token_times[1:], request.token_steps[1:])]


def worst_wait(twin):
    """
    (milliseconds, step) of the longest wait, and of the step that made others wait: a wait ends
    with the step after the one whose second pass is long.
    """
    longest, end = max(waits(twin))
    return longest, max(p.step for p in twin.passes if p.step < end)


def milliseconds(twin, step):
    return sum(1e3 * p.seconds for p in passes_of(twin, step))


def reached(trace, i, name):
    """How many tokens of a request had been computed before pass i."""
    return max((first + n for p in trace.passes[:i] for who, first, n in p.work if who == name),
               default=0)


def tables(trace, i):
    """{request: its block table} in pass i of stage 7."""
    held = {}
    for frame in trace.recording.frames[:i + 1]:
        held.update(frame["room"])
    names = [request.name for request in trace.recording.requests]
    return {names[number]: table for number, table in held.items() if table}
