"""
The guided walk of the explorer: the point of it all, a stop for each stage of the ladder, and the
scoreboard. Each stop is a sentence or two, in walk.toml, and a scene: a step of one or two runs,
and the panels that show what the sentence speaks of. Some ask first.

Each stop finds its step in the runs themselves, and counts its figures there. Milliseconds are
those of a calculated GPU.
"""
import statistics
import tomllib
from pathlib import Path

from lab.loading.recorded import recorded
from lab.views.report import totals

WORDS = Path(__file__).with_suffix(".toml")
MASK = "interleaved, published mask"   # a run of interleaved under the trap of that name
SAME = "ragged, 416 tokens"            # in as much memory as paged has
TWO = "two requests"


def walk(traces):
    """The stops for runs {name: trace}, as the page takes them."""
    words = tomllib.loads(WORDS.read_text(encoding="utf-8"))
    scenes = (the_point, one_request, padding, stall, chunk, fused_rectangle, flat_stream, pages,
              sharing, scoreboard)
    found = {scene.__name__: scene(traces) for scene in scenes}
    return [stop(name.replace("_", " "), figures, **words[name]) for name, figures in found.items()]


def stop(title, figures, text, panels, runs, clock="step", look=0, question=None, choices=(),
         right=None, rows=None, asks=0):
    """
    figures: what the words count; and of the scene its step, the slot to point at in the run to
    look at, (pass, row, column), and (step, slot) while it asks, if they differ. The rest is said
    in walk.toml.
    """
    def scene(runs, step, slot=None):
        show = {"run": runs[0], "beside": "".join(runs[1:]), "clock": clock, "step": step}
        return show | ({"slot": ".".join(map(str, (look, *slot)))} if slot else {})

    step, slot = figures["step"], figures.get("slot")
    found = {"title": title, "text": text.format(**figures), "panels": panels, "look": look,
             "show": scene(runs, step, slot)}
    if question:   # nothing that is shown then gives the answer away
        asked = figures.get("before") or (step, None if "change" in panels else slot)
        found["ask"] = {"question": question.format(**figures), "show": scene([runs[asks]], *asked),
                        "choices": [text.format(**figures) for text in choices], "right": right}
    if rows:
        found["rows"] = rows
    return found


def the_point(traces):
    found, both = stall(traces), [traces[run] for run in ("dynamic", "ragged")]
    return dict(step=found["step"], tokens=found["tokens"], number=len(both[0].requests),
                waits=[worst_wait(trace)[0] for trace in both],
                first=[max(1e3 * (request.token_times[0] - trace.arrived(request))
                           for request in trace.requests) for trace in both])


def one_request(traces):
    first, both = (next((i, p) for i, p in enumerate(traces[TWO].passes) if p.shape == shape)
                   for shape in ((1, 1), (2, 1)))
    one, two = (1e3 * p.seconds for _, p in (first, both))
    return dict(step=both[1].step, slot=(both[0], 1, 0), before=(first[1].step, (first[0], 0, 0)),
                first=first[1].step, both=both[1].step, one=one, two=two, half=one / 2,
                twice=2 * one)


def padding(traces):
    i, p = most(traces["naive"], lambda p: p.pad_slots)
    row, (name, _, n) = min(enumerate(p.work), key=lambda entry: entry[1][2])
    return dict(step=p.step, slot=(i, row, 0), slots=p.slots, useful=p.useful,
                quarter=p.slots // 4, pads=p.pad_slots, name=name, n=n, wide=p.shape[1])


def stall(traces):
    wait, step = worst_wait(traces["dynamic"])
    every = statistics.median_high(wait for wait, *_ in waits(traces["dynamic"]))
    decodes, prefill = passes_of(traces["dynamic"], step)
    return dict(step=step, wait=wait, every=every, thrice=3 * wait, tokens=prefill.useful,
                names=" and ".join(name for name, _, _ in prefill.work), decodes=len(decodes.work))


def chunk(traces):
    _, step = worst_wait(traces["dynamic"])
    _, prefill = passes_of(traces["chunked"], step)
    name, _, n = prefill.work[0]
    both = [traces[run] for run in ("dynamic", "chunked")]
    late = [1e3 * (request.token_times[0] - trace.arrived(request))
            for trace, request in ((trace, request_of(trace, name)) for trace in both)]
    return dict(step=step, budget=both[1].recording.knobs["token_budget"], n=n, name=name,
                late=late, whole=len(request_of(both[1], name).prompt),
                passes=[len(trace.passes) for trace in both],
                waits=[worst_wait(trace)[0] for trace in both])


def fused_rectangle(traces):
    recorder, found = traces[MASK].recording, []
    for i, (p, frame) in enumerate(zip(traces[MASK].passes, recorder.frames)):
        for slot, (_, pads, _) in frame["sees"].items():
            row = slot // p.shape[-1]
            if p.work[row][2] == 1:
                found.append((pads, i, row))
    pads, i, row = max(found)
    alone = {request.name: request.generated for request in traces["unbatched"].requests}
    other = sum(alone[request.name] != request.generated for request in recorder.requests)
    p = traces[MASK].passes[i]
    return dict(step=p.step, slot=(i, row, p.shape[1] - 1), name=p.work[row][0], pads=pads,
                other=other, all=len(recorder.requests),
                ms=[milliseconds(traces[run], p.step) for run in ("chunked", "interleaved")])


def flat_stream(traces):
    _, step = worst_wait(traces["dynamic"])
    wide, = passes_of(traces["interleaved"], step)
    i, p = most(traces["ragged"], lambda p: p.step == step)
    return dict(step=step, slot=(i, 0, 0), wide=wide.slots, half=wide.slots // 2, slots=p.slots,
                ms=[milliseconds(traces[run], step) for run in ("interleaved", "ragged")])


def pages(traces):
    """The step in which paged runs the most requests, and ragged fewer in as much memory."""
    paged, same = traces["paged"], traces[SAME]
    running = [{p.step: len(p.work) for p in trace.passes} for trace in (paged, same)]
    many, step = max((many, -step) for step, many in running[0].items()
                     if many > running[1].get(step, 0))
    few = running[1].get(-step, 0)
    return dict(step=-step, size=paged.recording.pool["page_size"], many=many, few=few,
                twice=2 * few, limit=same.recording.knobs["max_kv_tokens"])


def sharing(traces):
    trace, first_of = traces["prefix"], {}   # request -> (first position that is computed, pass)
    for i, p in enumerate(trace.passes):
        for name, first, _ in p.work:
            first_of.setdefault(name, (first, i))
    (first, i), name = max((found, name) for name, found in first_of.items())
    size, p = trace.recording.pool["page_size"], trace.passes[i]
    table = tables(trace, i)[name][:first // size]
    others = [other for other, pages in tables(trace, i).items()
              if other != name and pages[:len(table)] == table]
    return dict(step=p.step, slot=(i, 0, sum(n for _, _, n in p.work[:-1])), size=size, name=name,
                others=" and ".join(others), pages=len(table), tokens=first,
                refs=len(others) + 1, computed=[
                    sum(p.useful + p.recomputed for p in traces[run].passes)
                    for run in ("paged", "prefix")])


def scoreboard(traces):
    same, paged, prefix = (round(totals(traces[name])["tokens_per_second"])
                           for name in (SAME, "paged", "prefix"))
    gap, _, name = max(waits(traces["prefix"]))
    version, works = recorded()   # tests hold ours equal to all of them
    return dict(step=traces["ragged"].passes[-1].step, same=same, paged=paged, prefix=prefix,
                gap=gap, name=name, version=version,
                equal=f"{len(works):,}",
                flat=max(frame["reserved"] for frame in traces["ragged"].recording.frames),
                limit=traces[SAME].recording.knobs["max_kv_tokens"])


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


def tables(trace, i):
    """{request: its block table} in pass i of a run with pages."""
    held = {}
    for frame in trace.recording.frames[:i + 1]:
        held |= frame["room"]
    return {trace.recording.requests[number].name: table
            for number, table in held.items() if table}
