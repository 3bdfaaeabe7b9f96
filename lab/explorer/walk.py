"""
The guided walk of the explorer: the point of it all, a stop for each stage, and the scoreboard.
Each stop is a sentence or two, in walk.toml, and a scene: a step of one or two runs,
and the panels that show what the sentence speaks of. Some ask first.

Each stop finds its step in the runs themselves, and counts its figures there. Milliseconds are
those of a calculated GPU.
"""
import statistics
import tomllib
from itertools import pairwise
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
    return [stop(scene.__name__, scene(traces), words[scene.__name__]) for scene in scenes]


def stop(name, figures, words):
    """
    A stop as the page takes it.

    figures: what the words count; and of the scene its step, the slot to point at in the run to
    look at, (pass, row, column), and before, (step, slot) while it asks, if they differ
    words: of the stop's table in walk.toml
    """
    look = words.get("look", 0)
    slot = named(look, figures.get("slot"))
    page_stop = {
        "title": name.replace("_", " "),
        "text": words["text"].format(**figures),
        "panels": words["panels"],
        "look": look,
        "show": show(words["runs"], words, figures["step"], slot)}
    if "question" in words:
        page_stop["ask"] = ask(figures, words, slot)
    if "rows" in words:
        page_stop["rows"] = words["rows"]
    return page_stop


def ask(figures, words, slot):
    """The question of a stop. What is shown beside it does not give the answer away."""
    step = figures["step"]
    if "change" in words["panels"]:   # the slot is of the shape that is asked for
        slot = None
    if "before" in figures:
        step, place = figures["before"]
        slot = named(words.get("look", 0), place)
    run = words["runs"][words.get("asks", 0)]
    return {
        "question": words["question"].format(**figures),
        "show": show([run], words, step, slot),
        "choices": [choice.format(**figures) for choice in words["choices"]],
        "right": words["right"]}


def show(runs, words, step, slot):
    """What the page shows: one or two runs at a step. slot: its name there, or None"""
    scene = {
        "run": runs[0],
        "beside": runs[1] if len(runs) > 1 else "",
        "clock": words.get("clock", "step"),
        "step": step}
    if slot:
        scene["slot"] = slot
    return scene


def named(view, place):
    """The page's name for a slot, "view.pass.row.column"; None without a place."""
    return ".".join(map(str, (view, *place))) if place else None


# --- the scenes: each counts the figures of its words ---------------------------------------------

def the_point(traces):
    stalled = stall(traces)
    compared = [traces["dynamic"], traces["ragged"]]
    return dict(
        step=stalled["step"],
        tokens=stalled["tokens"],
        number=len(traces["dynamic"].requests),
        waits=[worst_wait(trace)[0] for trace in compared],
        first=[latest_first_token(trace) for trace in compared])


def one_request(traces):
    alone, pass_alone = first_pass_of_shape(traces[TWO], (1, 1))
    together, pass_together = first_pass_of_shape(traces[TWO], (2, 1))
    one, two = 1e3 * pass_alone.seconds, 1e3 * pass_together.seconds
    return dict(
        step=pass_together.step,
        slot=(together, 1, 0),
        before=(pass_alone.step, (alone, 0, 0)),
        first=pass_alone.step,
        both=pass_together.step,
        one=one,
        two=two,
        half=one / 2,
        twice=2 * one)


def padding(traces):
    """The row with the fewest tokens, of the pass with the most pads."""
    i, p = most(traces["naive"], lambda p: p.pad_slots)
    tokens = [n for _, _, n in p.work]
    row = tokens.index(min(tokens))
    name, _, n = p.work[row]
    return dict(
        step=p.step,
        slot=(i, row, 0),
        slots=p.slots,
        useful=p.useful,
        quarter=p.slots // 4,
        pads=p.pad_slots,
        name=name,
        n=n,
        wide=p.shape[1])


def stall(traces):
    dynamic = traces["dynamic"]
    wait, step = worst_wait(dynamic)
    usual = statistics.median_high(wait for wait, *_ in waits(dynamic))
    decodes, prefill = passes_of(dynamic, step)
    return dict(
        step=step,
        wait=wait,
        every=usual,
        thrice=3 * wait,
        tokens=prefill.useful,
        names=" and ".join(name for name, _, _ in prefill.work),
        decodes=len(decodes.work))


def chunk(traces):
    dynamic, chunked = traces["dynamic"], traces["chunked"]
    _, step = worst_wait(dynamic)
    _, prefill = passes_of(chunked, step)
    name, _, n = prefill.work[0]
    return dict(
        step=step,
        budget=chunked.recording.knobs["token_budget"],
        n=n,
        name=name,
        whole=len(request_of(chunked, name).prompt),
        late=[first_token_after(trace, request_of(trace, name)) for trace in (dynamic, chunked)],
        passes=[len(trace.passes) for trace in (dynamic, chunked)],
        waits=[worst_wait(trace)[0] for trace in (dynamic, chunked)])


def fused_rectangle(traces):
    """The decode that sees the most pads under the published mask."""
    run = traces[MASK]
    pads, i, row = max(decodes_that_see_pads(run))
    p = run.passes[i]
    name, last_column = p.work[row][0], p.shape[1] - 1
    alone = {request.name: request.generated for request in traces["unbatched"].requests}
    requests = run.recording.requests
    ruined = [request for request in requests if alone[request.name] != request.generated]
    return dict(
        step=p.step,
        slot=(i, row, last_column),
        name=name,
        pads=pads,
        other=len(ruined),
        all=len(requests),
        ms=[milliseconds(traces[stage], p.step) for stage in ("chunked", "interleaved")])


def flat_stream(traces):
    _, step = worst_wait(traces["dynamic"])
    wide, = passes_of(traces["interleaved"], step)
    i, p = most(traces["ragged"], lambda p: p.step == step)
    return dict(
        step=step,
        slot=(i, 0, 0),
        wide=wide.slots,
        half=wide.slots // 2,
        slots=p.slots,
        ms=[milliseconds(traces[stage], step) for stage in ("interleaved", "ragged")])


def pages(traces):
    """The first step in which paged runs the most requests, and ragged fewer in as much memory."""
    paged, same = traces["paged"], traces[SAME]
    in_paged, in_same = requests_by_step(paged), requests_by_step(same)
    more = [step for step, number in in_paged.items() if number > in_same.get(step, 0)]
    step = max(more, key=lambda step: (in_paged[step], -step))
    few = in_same.get(step, 0)
    return dict(
        step=step,
        size=paged.recording.pool["page_size"],
        many=in_paged[step],
        few=few,
        twice=2 * few,
        limit=same.recording.knobs["max_kv_tokens"])


def sharing(traces):
    """The request that finds the most tokens computed already."""
    trace = traces["prefix"]
    first, i, name = max(first_passes(trace))
    p, size = trace.passes[i], trace.recording.pool["page_size"]
    tables = tables_in(trace, i)
    shared = tables[name][:first // size]
    others = [other for other, table in tables.items()
              if other != name and table[:len(shared)] == shared]
    before_it = sum(n for _, _, n in p.work[:-1])   # it is the last of the stream
    return dict(
        step=p.step,
        slot=(i, 0, before_it),
        size=size,
        name=name,
        others=" and ".join(others),
        pages=len(shared),
        tokens=first,
        refs=len(others) + 1,
        computed=[tokens_computed(traces[stage]) for stage in ("paged", "prefix")])


def scoreboard(traces):
    gap, _, name = max(waits(traces["prefix"]))
    version, works = recorded()   # tests hold ours equal to all of them
    ragged = traces["ragged"]
    return dict(
        step=ragged.passes[-1].step,
        same=speed(traces[SAME]),
        paged=speed(traces["paged"]),
        prefix=speed(traces["prefix"]),
        gap=gap,
        name=name,
        version=version,
        equal=f"{len(works):,}",
        flat=max(frame["reserved"] for frame in ragged.recording.frames),
        limit=traces[SAME].recording.knobs["max_kv_tokens"])


# --- what the stops count -------------------------------------------------------------------------

def most(trace, count):
    """(index, pass) of the run's pass with the highest count(pass)."""
    return max(enumerate(trace.passes), key=lambda entry: count(entry[1]))


def first_passes(trace):
    """[(first position that is computed, index of its pass, name), ...] of all requests."""
    entries = {}
    for i, p in enumerate(trace.passes):
        for name, first, _ in p.work:
            if name not in entries:
                entries[name] = first, i, name
    return entries.values()


def passes_of(trace, step):
    return [p for p in trace.passes if p.step == step]


def request_of(trace, name):
    return next(request for request in trace.requests if request.name == name)


def waits(trace):
    """[(ms, step, name), ...]: each request's waits for its next tokens, and when they end."""
    entries = []
    for request in trace.requests:
        steps = request.token_steps[1:]   # a wait ends with the second of two tokens
        for (before, after), step in zip(pairwise(request.token_times), steps):
            entries.append((1e3 * (after - before), step, request.name))
    return entries


def worst_wait(trace):
    """
    (milliseconds, step) of the longest wait, and of the step that made others wait: a wait ends
    with the step after the one whose second pass is long.
    """
    longest, end, _ = max(waits(trace))
    return longest, max(p.step for p in trace.passes if p.step < end)


def first_token_after(trace, request):
    """Milliseconds from its arrival."""
    return 1e3 * (request.token_times[0] - trace.arrived(request))


def latest_first_token(trace):
    return max(first_token_after(trace, request) for request in trace.requests)


def first_pass_of_shape(trace, shape):
    """(index, pass)"""
    return next((i, p) for i, p in enumerate(trace.passes) if p.shape == shape)


def decodes_that_see_pads(trace):
    """[(pads, index of the pass, row), ...]"""
    decodes = []
    for i, (p, frame) in enumerate(zip(trace.passes, trace.recording.frames)):
        for slot, (_, pads, _) in frame["sees"].items():
            row = slot // p.shape[-1]
            _, _, n = p.work[row]
            if n == 1:
                decodes.append((pads, i, row))
    return decodes


def requests_by_step(trace):
    return {p.step: len(p.work) for p in trace.passes}


def tokens_computed(trace):
    return sum(p.useful + p.recomputed for p in trace.passes)


def speed(trace):
    """Tokens a second, as a whole number."""
    return round(totals(trace)["tokens_per_second"])


def milliseconds(trace, step):
    return sum(1e3 * p.seconds for p in passes_of(trace, step))


def tables_in(trace, i):
    """{request: its block table} in pass i of a run with pages."""
    table_of = {}   # by the request's number
    for frame in trace.recording.frames[:i + 1]:
        table_of |= frame["room"]
    requests = trace.recording.requests
    return {requests[number].name: table for number, table in table_of.items() if table}
