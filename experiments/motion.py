"""
The README's first two pictures. The published mask beside the right one, as the X-ray saw them; and
one that moves: a long prompt arrives while others decode, in stages 2, 3 and 6.

The stages run for real, on the clock of a calculated GPU (beyond/calculated.py). A tick is a token
that a request gets, a bar is a piece of a prompt. The picture is an SVG whose only animation is a
veil that slides off it, several times slower than the GPU. Without motion it is unveiled.
"""
import statistics

from beyond.calculated import simulate
from beyond.hardware import GPUS, MODELS
from checks.traps import broken
from experiments.ladder import one_step
from loading.load import load
from loading.stages import STAGES
from request import Request
from views import sights
from views.plots import COLORS

SLOWER, HOLD = 6, 2.5             # than the calculated clock; seconds for which the whole stands
ARRIVAL = 0.2                     # seconds, in every panel
PROMPT, BUDGET = 3500, 256
LEFT, ROW = 46, 13
PANELS = {   # title; why a token takes so long afterwards, and in a word
    "dynamic": ("Stage 2: the prompt in one piece", "every row copied, padded to 3,500 keys",
                "padded"),
    "chunked": (f"Stage 3: in chunks, {BUDGET} tokens a step", "the same padding", "padded"),
    "ragged, varlen": ("Stage 6: and no padding", "each reads its own keys", "not padded")}
BETWEEN = "interleaved"           # its figures are told, too
THEMES = {   # the colours of views/plots.py, lighter on a dark page
    "light": {"paper": "#ffffff", "ink": "#1f2328", "soft": "#59636e", "line": "#d0d7de",
              **{kind: COLORS[kind] for kind in ("prefill", "decode", "finished")}},
    "dark": {"paper": "#0d1117", "ink": "#e6edf3", "soft": "#9198a1", "line": "#30363d",
             "prefill": "#4ba3e3", "decode": "#2fc89b", "finished": "#ff7b6b"}}


def run(stage):
    """The trace of six requests that decode, and of a prompt that the step after ARRIVAL sees."""
    knobs = {} if stage == "dynamic" else {"token_budget": BUDGET}

    def simulated(arrival=None):
        requests = [Request([i] * 60, 66 - 3 * i, name="ABCDEF"[i]) for i in range(6)]
        if arrival:
            requests.append(Request([9] * PROMPT, 24, name="long", arrival=arrival))
        return simulate(MODELS["llama-2-7b"], GPUS["a100"], STAGES[stage], requests, max_batch=8,
                        **knobs)

    starts = simulated().step_times
    return simulated(next(step for step, time in starts.items() if time >= ARRIVAL))


def gaps(trace):
    """(seconds, from, to) between two tokens of a request, for all but the long one."""
    return [(b - a, a, b) for request in trace.requests if request.name != "long"
            for a, b in zip(request.token_times, request.token_times[1:])]


def figures(trace):
    """Worst wait for a next token in ms, seconds until all is done, ms a token afterwards."""
    times = trace.requests[-1].token_times
    after = statistics.median(b - a for a, b in zip(times, times[1:]))
    done = max(request.token_times[-1] for request in trace.requests)
    return 1e3 * max(gaps(trace))[0], done, 1e3 * after


def text(x, y, words, kind="", anchor="start"):
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def panel(trace, words, x_of, right, top, theme, narrow):
    worst, done, after = figures(trace)
    y_of = {r.name: top + (45 if narrow else 24) + i * ROW for i, r in enumerate(trace.requests)}
    below, high = y_of["A"], len(y_of) * ROW
    result = f"worst wait {worst:.0f} ms, done after {done:.2f} s"
    parts = [text(LEFT, top + 14, words[0], "title"),
             text(LEFT, top + 35, result, "result") if narrow else
             text(right, top + 15, result, "result", "end")]
    for name, y in y_of.items():
        parts += [text(LEFT - 8, y + 10, name, anchor="end"),
                  f'<path d="M{LEFT} {y + 12}H{right}" stroke="{theme["line"]}"/>']
    _, start, end = max(gaps(trace))
    if worst > 100:   # nobody gets a token meanwhile
        x, wide = x_of(start), x_of(end) - x_of(start)
        parts += [f'<rect x="{x:.1f}" y="{below}" width="{wide:.1f}" height="{6 * ROW}" '
                  f'fill="{theme["finished"]}" opacity="0.15"/>',
                  text(x + wide / 2, below + 3.3 * ROW, f"{'' if narrow else 'all wait '}"
                       f"{worst:.0f} ms", "frozen", "middle")]
    begin, step = 0.0, None
    for p in trace.passes:   # the second pass of a step follows its first
        begin, step = begin if p.step == step else trace.step_times[p.step], p.step
        for name, _, n in p.work:
            if n > 1:
                wide = max(x_of(begin + p.seconds) - x_of(begin) - 0.8, 1)
                parts.append(f'<rect x="{x_of(begin):.1f}" y="{y_of[name] + 2}" height="8" rx="1.5"'
                             f' width="{wide:.1f}" fill="{theme["prefill"]}"/>')
        begin += p.seconds
    for request in trace.requests:
        ticks = "".join(f"M{x_of(time):.1f} {y_of[request.name] + 2}v8"
                        for time in request.token_times)
        parts.append(f'<path d="{ticks}" stroke="{theme["decode"]}" stroke-width="1.5"/>')
    x, first = x_of(ARRIVAL), x_of(trace.requests[-1].token_times[0])
    return "".join(parts) + (   # the phase after the prompt, its arrival, and the veil
        text(first + 4, below + high + 12, f"{after:.0f} ms a token: {words[1 + narrow]}", "soft")
        + text(x, below + high + 12, "arrives" if narrow else "prompt arrives", "soft", "end")
        + f'<path d="M{x:.1f} {below - 2}v{high + 4}" stroke="{theme["ink"]}" '
        'stroke-dasharray="3 2"/>'
        f'<g class="veil"><rect x="{LEFT}" y="{below - 3}" width="{right}" height="{high + 4}" '
        f'fill="{theme["paper"]}" opacity="0.8"/><path d="M{LEFT} {below - 3}v{high + 4}" '
        f'stroke="{theme["soft"]}" stroke-width="2"/></g>')


def picture(traces, theme, narrow=False):
    """The SVG text for {stage: trace} and BETWEEN's, all on one axis of seconds."""
    last = max(figures(traces[stage])[1] for stage in PANELS)
    width, each, margin = (400, 164, 4) if narrow else (840, 142, LEFT)
    right, bottom, total = width - 12, 44 + each * len(PANELS), last * SLOWER + HOLD

    def x_of(time):
        return LEFT + (right - LEFT) * time / last

    worst, done, _ = figures(traces[BETWEEN])
    lines = [f'Six requests decode; a prompt of {PROMPT:,} tokens arrives.',
             f'<tspan fill="{theme["decode"]}" font-weight="600">Green: a token.</tspan> '
             f'<tspan fill="{theme["prefill"]}" font-weight="600">Blue: a prompt.</tspan>']
    feet = [f"Stage 4, between them: one padded pass a step, {worst:.0f} ms, {done:.2f} s.",
            f"Calculated for Llama 2 7B on an A100; shown {SLOWER}x slower."]
    body = [text(margin, y, line, "soft") for line, y in zip(
        lines + feet, (16, 33, bottom + 34, bottom + 51))]
    body += [panel(traces[stage], PANELS[stage], x_of, right, 38 + each * i, theme, narrow)
             for i, stage in enumerate(PANELS)]
    body += [text(x_of(tick / 5), bottom + 10, f"{tick / 5:.1f} s", "soft", "middle")
             for tick in range(0, int(last * 5) + 1, 1 + narrow)]
    return f'''<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 60}"
 role="img"
 aria-label="A long prompt stops all requests in stage 2, less in stage 3, and least in stage 6">
<style>
text {{ font: 12px system-ui, sans-serif; fill: {theme["ink"]} }}
.title {{ font-weight: 600; font-size: 14px }} .soft {{ fill: {theme["soft"]} }}
.result {{ font-weight: 700; font-size: {15 if narrow else 19}px }}
.frozen {{ font-weight: 700; fill: {theme["finished"]} }}
.veil {{ animation: slide {total:.1f}s linear infinite }}
@keyframes slide {{ 0% {{ transform: none }}
 {100 * last * SLOWER / total:.1f}%, 100% {{ transform: translateX({width - LEFT}px) }} }}
@media (prefers-reduced-motion) {{ .veil {{ display: none }} }}
</style>
<rect width="{width}" height="{bottom + 60}" fill="{theme["paper"]}"/>
{"".join(body)}
</svg>
'''


def traces():
    """{stage: trace}, of all whose figures are told."""
    return {stage: run(stage) for stage in (*PANELS, BETWEEN)}


def pictures(traces):
    """{file: SVG text}: wide and narrow, light and dark."""
    return {f"motion-{name}{'-narrow' * narrow}.svg": picture(traces, theme, narrow)
            for name, theme in THEMES.items() for narrow in (False, True)}


def bug(path):
    """A step of stage 4, three decodes and a chunk, under the published mask and the right one."""
    model, _ = load()
    with broken("published mask", show=False):
        published = one_step(model)["stage 4: rectangle"]
    sights.draw({"published: new slots are all valid": published,
                 "right": one_step(model)["stage 4: rectangle"]}, path)
