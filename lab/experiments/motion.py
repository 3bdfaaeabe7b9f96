"""
The README's picture that moves: a long prompt arrives while others decode, in dynamic, chunked and
ragged.

The stages run for real, on the clock of a calculated GPU (lab/simulate/). A tick is a token that a
request gets, a bar is a piece of a prompt. The picture is an SVG that shows all of it faintly from
the start. Its only animation is a mask that slides along and brings it out, several times slower
than the GPU. The picture is transparent. It comes in two widths, for a page and for a phone, and in
two inks, for a light page and for a dark one.
"""
from itertools import pairwise
from pathlib import Path
from string import Template

from lab.flags import knobs_of
from lab.loading.stages import STAGES
from lab.simulate.calculated import simulate
from lab.simulate.hardware import GPUS, MODELS
from lab.views.plots import COLORS, INKS
from request import Request

TEMPLATE = Path(__file__).with_suffix(".svg")
SLOWER, HOLD = 6, 2.5             # than the calculated clock; seconds for which the whole stands
ARRIVAL = 0.2                     # seconds, in every panel
PROMPT, BUDGET = 3500, 256
LEFT, ROW = 50, 6.5               # pixels: the panels' left edge, and a request
LINE = 16                         # pixels: a line of text
PANELS = {
    "dynamic": "dynamic: the prompt in one piece",
    "chunked": f"chunked: at most {BUDGET} tokens a step",
    "ragged, varlen": "ragged: the same, without padding"}
UNDRAWN = "interleaved"           # its figures are told, too
SIZES = {"motion": 830, "motion-narrow": 360}   # file: pixels it is shown in
ALARM = {"light": COLORS["finished"], "dark": "#FF8A73"}   # of words


def run(stage):
    """The trace of six requests that decode, and of a prompt that the step after ARRIVAL sees."""
    knobs, _ = knobs_of(STAGES[stage], {"max_batch": 8, "token_budget": BUDGET})

    def simulated(arrival=None):
        requests = [Request([i] * 60, 66 - 3 * i, name="ABCDEF"[i]) for i in range(6)]
        if arrival:
            requests.append(Request([9] * PROMPT, 24, name="long", arrival=arrival))
        return simulate(MODELS["llama-2-7b"], GPUS["a100"], STAGES[stage], requests, **knobs)

    starts = simulated().step_times
    return simulated(next(step for step, time in starts.items() if time >= ARRIVAL))


def waits(trace):
    """(seconds, from, to) between two tokens of a request, for all but the long one."""
    found = []
    for request in trace.requests:
        if request.name != "long":
            found += [(end - start, start, end) for start, end in pairwise(request.token_times)]
    return found


def figures(trace):
    """The longest wait for a next token, in ms, and the seconds until all is done."""
    done = max(request.token_times[-1] for request in trace.requests)
    return 1e3 * max(waits(trace))[0], done


def said(trace):
    worst, done = figures(trace)
    return f"worst wait {worst:.0f} ms, done after {done:.2f} s"


def text(x, y, words, kind="", anchor="start"):
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def rect(x, y, wide, high, kind):
    return (f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" '
            f'class="{kind}"/>')


def path(line, kind):
    return f'<path d="{line}" class="{kind}"/>'


class Frame:
    """Where things stand in a picture of this width, on an axis of `seconds`."""

    def __init__(self, width, seconds):
        self.width, self.right = width, width - 14
        self.seconds = seconds
        self.narrow = width < 600
        self.title_lines = 2 if self.narrow else 1   # the result stands below, or beside
        self.rows_high = ROW * 7

    def x_of(self, time):
        return LEFT + (self.right - LEFT) * time / self.seconds


def panel(frame, trace, title, top):
    """One stage. Returns its SVG text and the y below it."""
    below = top + LINE * frame.title_lines + 4
    parts = heading(frame, trace, title, top)
    parts.append(text(LEFT - 6, below + 3 * ROW + 4, "six", anchor="end"))
    parts.append(text(LEFT - 6, below + 6.5 * ROW + 4, "new", anchor="end"))
    y_of = {request.name: below + i * ROW for i, request in enumerate(trace.requests)}
    for y in y_of.values():
        parts.append(path(f"M{LEFT} {y + ROW}H{frame.right}", "row"))
    parts += stall(frame, trace, below)
    arrival = frame.x_of(ARRIVAL)
    parts.append(path(f"M{arrival:.1f} {below - 2}v{frame.rows_high + 4}", "arrival"))
    parts.append('<g mask="url(#seen)">')
    parts += prompt_pieces(frame, trace, y_of) + tokens(frame, trace, y_of)
    parts.append("</g>")
    parts.append(path(f"M{frame.right} {below - 2}v{frame.rows_high + 4}", "edge slide"))
    return "".join(parts), below + frame.rows_high + 4


def heading(frame, trace, title, top):
    if frame.narrow:
        return [text(4, top + 13, title, "title"), text(4, top + 13 + LINE, said(trace), "result")]
    return [text(LEFT, top + 13, title, "title"),
            text(frame.right, top + 13, said(trace), "result", "end")]


def stall(frame, trace, below):
    """A frame around a long wait: nobody gets a token meanwhile."""
    worst, start, end = max(waits(trace))
    if worst < 0.1:
        return []
    x, wide = frame.x_of(start), frame.x_of(end) - frame.x_of(start)
    words = f"{1e3 * worst:.0f} ms"
    return [rect(x, below, wide, 6 * ROW, "stall"),
            text(x + wide / 2, below + 3 * ROW + 4, words, "frozen", "middle")]


def prompt_pieces(frame, trace, y_of):
    parts, begin, step = [], 0.0, None
    for p in trace.passes:
        if p.step != step:   # else it is the second pass of a step, and follows the first
            begin, step = trace.step_times[p.step], p.step
        end = begin + p.seconds
        x, wide = frame.x_of(begin), frame.x_of(end) - frame.x_of(begin) - 0.8
        for name, _, n in p.work:
            if n > 1:
                parts.append(rect(x, y_of[name] + 0.5, max(wide, 1), ROW - 1, "prefill"))
        begin = end
    return parts


def tokens(frame, trace, y_of):
    """A tick for each token of each request."""
    parts = []
    for request in trace.requests:
        y = y_of[request.name] + 0.5
        ticks = [f"M{frame.x_of(time):.1f} {y}v{ROW - 1}" for time in request.token_times]
        parts.append(path("".join(ticks), "token"))
    return parts


def legend(frame):
    """What happens, and what the marks mean: one line, or two on a phone."""
    x, y = frame.right - 230, 14
    story = f"Six requests get token after token. A new one has a prompt of {PROMPT:,} tokens."
    if frame.narrow:
        x, y = 4, 14 + LINE
        story = f"Six requests get tokens. A prompt of {PROMPT:,} arrives."
    return [text(4, 14, story), path(f"M{x + 3} {y - 9}v10", "token"), text(x + 10, y, "a token"),
            rect(x + 70, y - 8, 20, 8, "prefill"), text(x + 96, y, "a piece of a prompt")]


def picture(traces, width, ink):
    """The SVG text for {stage: trace} and UNDRAWN's, all on one axis. ink: a key of INKS"""
    frame = Frame(width, max(figures(traces[stage])[1] for stage in PANELS))
    y = 2 * LINE + 6 if frame.narrow else LINE + 4
    parts = legend(frame)
    for stage, title in PANELS.items():
        panel_text, y = panel(frame, traces[stage], title, y)
        parts.append(panel_text)
    for tick in range(0, int(frame.seconds * 5) + 1, 2 if frame.narrow else 1):
        parts.append(text(frame.x_of(tick / 5), y + 8, f"{tick / 5:.1f} s", anchor="middle"))
    worst, done = figures(traces[UNDRAWN])
    notes = [f"Calculated for Llama 2 7B on an A100; shown {SLOWER}x slower.",
             f"(interleaved: worst wait {worst:.0f} ms, {done:.2f} s)"]
    for note in notes if frame.narrow else [" ".join(notes)]:
        y += LINE
        parts.append(text(4, y + 8, note))
    total = frame.seconds * SLOWER + HOLD
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        COLORS, ink=INKS[ink], alarm=ALARM[ink], width=width, height=round(y + LINE - 4),
        left=LEFT, away=frame.right - LEFT, panels="\n".join(parts), seconds=f"{total:.1f}s",
        done=f"{100 * frame.seconds * SLOWER / total:.1f}%")


def traces():
    """{stage: trace}, of all whose figures are told."""
    return {stage: run(stage) for stage in (*PANELS, UNDRAWN)}


def pictures(traces):
    """{file: SVG text}, for a page and for a phone, light and dark."""
    files = {}
    for name, width in SIZES.items():
        files[f"{name}.svg"] = picture(traces, width, "light")
        files[f"{name}-dark.svg"] = picture(traces, width, "dark")
    return files
