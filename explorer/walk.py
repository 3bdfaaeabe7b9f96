"""
The guided walk of the explorer, up the ladder. Each stop is a sentence or two, and a scene: a step
of one or two runs, and the panels that show what the sentence speaks of. Some ask first.

Each stop finds its step in the runs themselves, and counts its figures there. Milliseconds are
those of a calculated GPU.
"""
import statistics

MASK = "interleaved, published mask"   # a run of stage 4 under the trap of that name
FLAT, SAME = "ragged, varlen", "ragged, 416 tokens"   # SAME: in as much memory as stage 7 has
GUESS, TWO = "speculative", "two requests"


def walk(traces, scores):
    """The stops for runs {name: trace}, as the page takes them; see `stop`."""
    return [one_request(traces), padding(traces), finished_rows(traces), stall(traces),
            chunk(traces), fused(traces), published_mask(traces), flat_stream(traces),
            sharing(traces), preemption(traces), guessing(traces), scoreboard(traces, scores)]


def stop(title, text, panels, runs, step, clock="step", look=0, slot=None, ask=None, change=None):
    """
    panels: those of the scene; the first is the one to look at
    runs:   the run that is shown, and if there are two, the one beside it
    look:   0 or 1, which of them to look at
    slot:   (pass, row, column) to point at, in that run
    ask:    (question, choices, number of the right one[, step and slot while it asks])
    change: (from, to), of the shapes of one step: passes of stage 3, rectangle, no pads, stream
    """
    def scene(step, slot):
        show = {"run": runs[0], "beside": runs[1] if len(runs) > 1 else "", "clock": clock,
                "step": step}
        return show | ({"slot": ".".join(map(str, (look, *slot)))} if slot else {})

    found = {"title": title, "text": text, "panels": panels, "look": look,
             "show": scene(step, slot)}
    if ask:
        question, choices, right, *before = ask
        found["ask"] = {"question": question, "choices": choices, "right": right,
                        "show": scene(*before) if before else found["show"]}
    if change:
        found["change"] = {"runs": ["chunked", "interleaved", FLAT], "shapes": change}
    return found


def one_request(traces):
    first, both = (next((i, p) for i, p in enumerate(traces[TWO].passes) if p.shape == shape)
                   for shape in ((1, 1), (2, 1)))
    one, two = (1e3 * p.seconds for _, p in (first, both))
    question = (f"One request, A. Step 0 computed its whole prompt (blue). Step {first[1].step} "
                "computes one slot, its latest token (green), and the token after it comes out. For "
                f"this one slot a GPU reads all weights: {one:.1f} ms. Soon B arrives. How long "
                "does a step take that computes a slot of each?")
    text = (f"Step {both[1].step} computes a slot of A and one of B in {two:.1f} ms: the weights "
            "are read once for both. That is why one batches. But the two have unequal lengths, "
            "and arrive and end at different times. What to do about that is the rest of this walk.")
    choices = [f"{one / 2:.1f} ms", f"{two:.1f} ms", f"{2 * one:.1f} ms"]
    return stop("one request", text, ["tensor", "sees", "timeline"], [TWO], both[1].step,
                slot=(both[0], 1, 0), ask=(question, choices, 1, first[1].step, (first[0], 0, 0)))


def padding(traces):
    i, p = most(traces["naive"], lambda p: p.pad_slots)
    row, (name, _, n) = min(enumerate(p.work), key=lambda entry: entry[1][2])
    question = (f"Stage 1 puts the prompts of a batch into one rectangle, as wide as the longest. "
                f"Step {p.step} computes its second batch. How many of these {p.slots:,} slots are "
                "useful, that is, hold a token?")
    text = (f"{p.useful:,} of {p.slots:,}. {name} has {n} tokens in a row of {p.shape[1]} slots. "
            f"{p.pad_slots:,} slots are pads, like the framed one: computed for nothing.")
    choices = sorted({p.useful, p.slots // 4, p.slots})
    return stop("padding", text, ["tensor", "sees", "timeline"], ["naive"], p.step,
                slot=(i, row, 0), ask=(question, [f"{n:,}" for n in choices],
                                       choices.index(p.useful)))


def finished_rows(traces):
    _, p = most(traces["naive"], lambda p: p.finished_slots * any(
        request.arrival <= p.step < request.token_steps[0]
        for request in traces["naive"].requests))
    text = (f"A static batch runs until its longest request is done. In step {p.step}, "
            f"{p.finished_slots} of its {p.shape[0]} rows belong to requests that have finished "
            "(red), while others wait for a place (the thin grey lines).")
    return stop("finished rows", text, ["timeline", "tensor", "sees"], ["naive"], p.step)


def stall(traces):
    wait, step = worst_wait(traces["dynamic"])
    every = statistics.median_high(wait for wait, *_ in waits(traces["dynamic"]))
    decodes, prefill = passes_of(traces["dynamic"], step)
    names = " and ".join(name for name, _, _ in prefill.work)
    question = (f"Stage 2 lets newcomers in at once, but computes their prompts in one piece. In "
                f"step {step}, a second pass computes the {prefill.useful} prompt tokens of "
                f"{names}. The {len(decodes.work)} requests that decode usually get a token every "
                f"{every:.0f} ms. How long do they wait for this one?")
    text = (f"They get no token for {wait:.0f} ms (red frames), instead of {every:.0f}: in step "
            f"{step} everyone waits for the prompt of {names}.")
    return stop("stall", text, ["timeline", "tensor", "sees"], ["dynamic"], step, "ms",
                ask=(question, [f"{ms:.0f} ms" for ms in (every, wait, 3 * wait)], 1))


def chunk(traces):
    _, step = worst_wait(traces["dynamic"])
    decodes, prefill = passes_of(traces["chunked"], step)
    name, first, n = prefill.work[0]
    whole = len(request_of(traces["chunked"], name).prompt)
    both = [traces[run] for run in ("dynamic", "chunked")]
    longest = [worst_wait(trace)[0] for trace in both]
    late = [1e3 * (request.token_times[0] - trace.arrived(request))
            for trace, request in ((trace, request_of(trace, name)) for trace in both)]
    ends = [1e3 * max(request.token_times[-1] for request in trace.requests) for trace in both]
    tokens = traces["chunked"].recording.knobs["token_budget"]
    text = (f"Stage 3 gives each step a budget of {tokens} tokens, decodes first. In step {step} "
            f"that leaves {n} for a chunk of {name}, which has {whole}. The longest wait falls from "
            f"{longest[0]:.0f} to {longest[1]:.0f} ms. It has two prices: {name} waits "
            f"{late[1]:.0f} ms for its first token, not {late[0]:.0f}; and with so small a budget, "
            f"which reads the weights more often, the whole run takes {ends[1]:.0f} ms, not {ends[0]:.0f}.")
    return stop("chunk", text, ["timeline", "plan"], ["chunked", "dynamic"], step, "ms")


def fused(traces):
    _, step = worst_wait(traces["dynamic"])
    i, p = most(traces["interleaved"], lambda p: p.step == step)
    row = next(row for row, (_, _, n) in enumerate(p.work) if n == 1)
    ms = [milliseconds(traces[run], p.step) for run in ("chunked", "interleaved")]
    text = (f"Stage 4 fuses the two passes into one, so it reads the weights once: step {p.step} "
            f"takes {ms[1]:.0f} ms, not {ms[0]:.0f}. But every decode is padded to the width of "
            f"the chunk: {p.useful + p.recomputed} tokens in {p.slots:,} slots.")
    return stop("fused rectangle", text, ["change", "tensor", "sees"], ["chunked", "interleaved"],
                p.step, look=1, slot=(i, row, 0), change=(0, 1))


def published_mask(traces):
    recorder, found = traces[MASK].recording, []
    for i, (p, frame) in enumerate(zip(traces[MASK].passes, recorder.frames)):
        for slot, (_, pads, _) in frame["sees"].items():
            row, column = divmod(slot, p.shape[-1])
            if frame["owner"][row][column] >= 0 and p.work[row][2] == 1:
                found.append((pads, i, row))
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


def flat_stream(traces):
    _, step = worst_wait(traces["dynamic"])
    wide, = passes_of(traces["interleaved"], step)
    i, p = most(traces[FLAT], lambda p: p.step == step)
    ms = [milliseconds(traces[run], p.step) for run in ("interleaved", FLAT)]
    question = (f"Stage 6 has no rows. The tokens of all requests are one stream, and its "
                f"boundaries say which keys each may see. Stage 4 needs {wide.slots:,} slots for "
                f"step {step}. How many does stage 6 need for the same plan?")
    text = (f"{p.slots} slots, not {wide.slots:,}, and {ms[1]:.0f} ms, not {ms[0]:.0f}: the pads "
            "fall out, the rows join into a stream, and each token still sees its own request "
            "alone. No slot is a pad.")
    choices = [f"{n:,}" for n in (p.slots, wide.slots // 2, wide.slots)]
    return stop("flat stream", text, ["change", "tensor", "sees"], ["interleaved", FLAT], p.step,
                look=1, slot=(i, 0, 0), ask=(question, choices, 0), change=(1, 3))


def sharing(traces):
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


def preemption(traces):
    """Of the longest wait, whose frame the timeline shows."""
    trace = traces["paged"]
    wait, end, name = max(waits(trace))
    steps = request_of(trace, name).token_steps
    start = steps[steps.index(end) - 1]
    inside = [i for i, p in enumerate(trace.passes) if start < p.step <= end]
    lost = next(i for i in inside if name not in tables(trace, i))
    again, p = next((n, trace.passes[i]) for i in inside for who, first, n in trace.passes[i].work
                    if who == name and first < reached(trace, i, name))
    text = (f"Memory is scarce here: {trace.recording.pool['pages']} pages. Before step "
            f"{trace.passes[lost].step} no page is left, and {name}, the last of those that run, "
            f"is preempted: it gives its pages back, and waits {wait:.0f} ms for its next token "
            f"(red frame). In step {p.step} it computes {again} of its tokens again (purple). It "
            "draws no random number twice, so its text stays the same.")
    return stop("preemption", text, ["timeline", "memory"], ["paged"], p.step, "ms")


def guessing(traces):
    trace, found = traces[GUESS], []
    for i, p in enumerate(trace.passes):
        kept = [request_of(trace, name).token_steps.count(p.step) for name, _, _ in p.work]
        found.append((sum(max(n - 1, 0) for n in kept), p.rejected, i))
    right, vain, i = max(found, key=lambda entry: (min(entry[:2]), entry))
    p = trace.passes[i]
    work = next(k for k, (name, _, _) in enumerate(p.work)
                if request_of(trace, name).token_steps.count(p.step) > 1)
    guesses = [sum(each) for each in zip(*((a, b) for a, b, _ in found))]
    text = ("A question after the ladder (beyond/speculative.py): why compute one token of a "
            "request if the pass has room? Each guesses what followed its latest tokens when they "
            f"last occurred. In step {p.step}, {right} guesses are right (light blue), tokens "
            f"without a pass of their own; {vain} are wrong (brown), computed in vain. In all, "
            f"{guesses[0]} of {sum(guesses)}: {len(trace.passes)} passes, not "
            f"{len(traces[FLAT].passes)}. Texts that repeat themselves, like code, gain more.")
    return stop("guessing", text, ["tensor", "sees", "timeline"], [GUESS], p.step,
                slot=(i, 0, sum(n for _, _, n in p.work[:work]) + 1))


def scoreboard(traces, scores):
    limit = traces[SAME].recording.knobs["max_kv_tokens"]
    text = ("All stages, the same requests, the same tokens. Stage 3 ends the stall, and reads the "
            "weights twice a step; stage 4 reads them once, and pays for pads; stage 6 does "
            f"neither. Memory is not equal: stage 6 came to reserve {scores[FLAT]['memory']:,} "
            f"tokens, stage 7 {scores['paged']['memory']}. With {limit} at most, "
            f"stage 6 makes {scores[SAME]['speed']} tokens/s, stage 7 {scores['paged']['speed']}. "
            "A click on a name shows its run.")
    return stop("scoreboard", text, ["score"], [FLAT], traces[FLAT].passes[-1].step, "ms")


# --- what the stops count -------------------------------------------------------------------------

def most(trace, what):
    """(index, pass) of the run's pass with the most `what`."""
    return max(enumerate(trace.passes), key=lambda entry: what(entry[1]))


def passes_of(trace, step):
    return [p for p in trace.passes if p.step == step]


def request_of(trace, name):
    return next(request for request in trace.requests if request.name == name)


def waits(trace):
    """[(ms, step, name), ...]: each request's waits for its next tokens, and when they end."""
    return [(1e3 * (b - a), step, request.name) for request in trace.requests for a, b, step in zip(
        request.token_times, request.token_times[1:], request.token_steps[1:])]


def worst_wait(trace):
    """
    (milliseconds, step) of the longest wait, and of the step that made others wait: a wait ends
    with the step after the one whose second pass is long.
    """
    longest, end, _ = max(waits(trace))
    return longest, max(p.step for p in trace.passes if p.step < end)


def milliseconds(trace, step):
    return sum(1e3 * p.seconds for p in passes_of(trace, step))


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


def most_held(trace):
    """The most tokens of memory that a run had reserved at one time, pads included."""
    held, largest, size = {}, 0, (trace.recording.pool or {}).get("page_size")
    for frame in trace.recording.frames:
        held.update({number: room or 0 for number, room in frame["room"].items()})
        pages = {page for room in held.values() if size and room for page in room}
        largest = max(largest, size * len(pages) if size else sum(held.values()))
    return largest
