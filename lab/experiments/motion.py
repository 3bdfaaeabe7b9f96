"""
The README's picture that moves: a long prompt arrives while others decode, in dynamic, chunked and
ragged.

The stages run for real, on the clock of a calculated GPU (lab/simulate/). A tick is a token that a
request gets, a bar is a piece of a prompt. The picture is an SVG that shows all of it faintly from
the start. Its only animation is a mask that slides along and brings it out, several times slower
than the GPU. The picture is transparent: one file serves light and dark pages.
"""
import statistics
from itertools import pairwise
from pathlib import Path
from string import Template

from lab.flags import knobs_of
from lab.loading.stages import STAGES
from lab.simulate.calculated import simulate
from lab.simulate.hardware import GPUS, MODELS
from lab.views.plots import COLORS, INK
from lab.views.report import gaps
from request import Request

TEMPLATE = Path(__file__).with_suffix(".svg")
SLOWER, HOLD = 6, 2.5             # than the calculated clock; seconds for which the whole stands
ARRIVAL = 0.2                     # seconds, in every panel
PROMPT, BUDGET = 3500, 256
LEFT, ROW, HIGH = 46, 13, 164     # pixels: the panels' left edge, a request, a panel
PANELS = {   # title; why a token takes so long afterwards
    "dynamic": ("dynamic: the prompt in one piece", "padded to 3,500 keys"),
    "chunked": (f"chunked: {BUDGET} tokens a step", "padded to 3,500 keys"),
    "ragged, varlen": ("ragged: and no padding", "its own keys alone")}
UNDRAWN = "interleaved"           # its figures are told, too


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
    """Worst wait for a next token in ms, seconds until all is done, ms a token afterwards."""
    times = trace.requests[-1].token_times
    after = statistics.median(gaps(times))
    done = max(request.token_times[-1] for request in trace.requests)
    return 1e3 * max(waits(trace))[0], done, 1e3 * after


def text(x, y, words, kind="", anchor="start"):
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def rect(x, y, wide, high, kind):
    return (f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{high:.1f}" '
            f'class="{kind}"/>')


def path(line, kind):
    return f'<path d="{line}" class="{kind}"/>'


def panel(trace, title, why, x_of, right, top):
    worst, done, after = figures(trace)
    below = top + 45   # title and result
    y_of = {request.name: below + i * ROW for i, request in enumerate(trace.requests)}
    high = len(y_of) * ROW
    masked, parts = [], [text(LEFT, top + 14, title, "title"),
             text(LEFT, top + 35, f"worst wait {worst:.0f} ms, done after {done:.2f} s", "result")]
    for name, y in y_of.items():
        parts += [text(LEFT - 8, y + 10, name, anchor="end"),
                  path(f"M{LEFT} {y + 12}H{right}", "row")]
    _, start, end = max(waits(trace))
    if worst > 100:   # nobody gets a token meanwhile
        x, wide = x_of(start), x_of(end) - x_of(start)
        parts += [rect(x, below, wide, 6 * ROW, "stall"),
                  text(x + wide / 2, below + 3.3 * ROW, f"{worst:.0f} ms", "frozen", "middle")]
    begin, step = 0.0, None
    for p in trace.passes:   # the second pass of a step follows its first
        begin, step = begin if p.step == step else trace.step_times[p.step], p.step
        end = begin + p.seconds
        masked += [rect(x_of(begin), y_of[name] + 2, max(x_of(end) - x_of(begin) - 0.8, 1), 8,
                        "prefill") for name, _, n in p.work if n > 1]
        begin = end
    for request in trace.requests:
        y = y_of[request.name] + 2
        masked.append(path("".join(f"M{x_of(t):.1f} {y}v8" for t in request.token_times), "token"))
    x, y = x_of(ARRIVAL), below + high + 12
    parts += [text(right, y, f"{after:.0f} ms a token: {why}", anchor="end"),
              text(x, y, "arrives", anchor="end"),
              path(f"M{x:.1f} {below - 2}v{high + 4}", "arrival"),
              '<g mask="url(#seen)">', *masked, "</g>",
              path(f"M{right} {below - 3}v{high + 4}", "edge slide")]
    return "".join(parts)


def picture(traces, width):
    """The SVG text for {stage: trace} and UNDRAWN's, all on one axis of seconds."""
    last = max(figures(traces[stage])[1] for stage in PANELS)
    right, total = width - 12, last * SLOWER + HOLD

    def x_of(time):
        return LEFT + (right - LEFT) * time / last

    panels = [panel(traces[stage], *PANELS[stage], x_of, right, 38 + HIGH * i)
              for i, stage in enumerate(PANELS)]
    panels += [text(x_of(tick / 5), 540, f"{tick / 5:.1f} s", anchor="middle")
               for tick in range(int(last * 5) + 1)]
    worst, done, _ = figures(traces[UNDRAWN])
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        COLORS, ink=INK, width=width, height=590, left=LEFT, away=right - LEFT,
        prompt=f"{PROMPT:,}", slower=SLOWER,
        panels="\n".join(panels), undrawn=f"{worst:.0f} ms, done after {done:.2f} s",
        seconds=f"{total:.1f}s", done=f"{100 * last * SLOWER / total:.1f}%")


def traces():
    """{stage: trace}, of all whose figures are told."""
    return {stage: run(stage) for stage in (*PANELS, UNDRAWN)}


def pictures(traces):
    """{file: SVG text}, for a page and for a phone."""
    return {"motion.svg": picture(traces, 830), "motion-narrow.svg": picture(traces, 380)}
