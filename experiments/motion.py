"""
The README's first two pictures. The published mask beside the right one, as the X-ray saw them; and
one that moves: a long prompt arrives while others decode, in stage 2 and in stage 6.

Both stages run for real, on the clock of a calculated GPU (beyond/simulate.py). A tick is a token
that a request gets, a bar is a piece of a prompt. The picture is an SVG whose only animation is a
cover that slides off it, several times slower than the GPU. Without motion it is uncovered.

    python -m experiments.motion      writes bug.png, motion-light.svg and motion-dark.svg
"""
from pathlib import Path

from beyond.hardware import GPUS, MODELS
from beyond.simulate import simulate
from checks.traps import broken
from experiments.ladder import one_step
from loading.load import load
from loading.stages import STAGES
from request import Request
from views import sights
from views.plots import COLORS

FOLDER = Path(__file__).parent / "pictures"
SLOWER = 6                        # than the calculated clock
HOLD = 2.5                        # seconds for which the whole picture stands
WIDTH, LEFT, ROW, PANEL = 840, 52, 17, 172
PANELS = {"dynamic": "Stage 2, dynamic batching: everybody waits for the long prompt",
          "ragged, varlen": "Stage 6, ragged batching: the prompt comes in chunks, everybody flows"}
THEMES = {   # the colours of views/plots.py, lighter on a dark page
    "light": {"paper": "#ffffff", "ink": "#1f2328", "soft": "#59636e", "line": "#d0d7de",
              **{kind: COLORS[kind] for kind in ("prefill", "decode", "finished")}},
    "dark": {"paper": "#0d1117", "ink": "#e6edf3", "soft": "#9198a1", "line": "#30363d",
             "prefill": "#4ba3e3", "decode": "#2fc89b", "finished": "#ff7b6b"}}


def workload():
    """Six requests that decode, and one with a prompt of 3,500 tokens that arrives at step 20."""
    return [*(Request([i] * 60, 66 - 3 * i, name="ABCDEF"[i]) for i in range(6)),
            Request([9] * 3500, 24, name="long", arrival=20)]


def run(stage):
    """The trace of a stage. simulate.py says what its times mean."""
    knobs = {} if stage == "dynamic" else {"token_budget": 256}
    return simulate(MODELS["llama-2-7b"], GPUS["a100"], STAGES[stage], workload(), max_batch=8,
                    **knobs)


def gaps(trace):
    """(seconds, from, to) between two tokens of a request, for all but the long one."""
    return [(b - a, a, b) for request in trace.requests if request.name != "long"
            for a, b in zip(request.token_times, request.token_times[1:])]


def panel(trace, title, x_of, top, theme):
    parts = [f'<text x="{LEFT}" y="{top + 14}" class="title">{title}</text>']
    row_of = {request.name: top + 28 + i * ROW for i, request in enumerate(trace.requests)}
    for name, y in row_of.items():
        parts.append(f'<text x="{LEFT - 10}" y="{y + 11}" text-anchor="end">{name}</text>'
                     f'<path d="M{LEFT} {y + 14.5}H{WIDTH - 12}" stroke="{theme["line"]}"/>')
    worst, start, end = max(gaps(trace))
    if worst > 0.1:   # nobody gets a token meanwhile
        x, y = x_of(start), top + 28
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{x_of(end) - x:.1f}" height="{6 * ROW}" '
                     f'fill="{theme["finished"]}" opacity="0.15"/><text class="frozen" '
                     f'x="{(x + x_of(end)) / 2:.1f}" y="{y + 3.3 * ROW:.1f}" '
                     f'text-anchor="middle">no token: {1e3 * worst:.0f} ms</text>')
    for p, (begin, _, _) in zip(trace.passes, trace.model.passes):
        for name, _, n in p.work:
            if n > 1:
                x = x_of(begin)
                parts.append(f'<rect x="{x:.1f}" y="{row_of[name] + 3}" height="10" rx="1.5" '
                             f'width="{max(x_of(begin + p.seconds) - x - 0.8, 1):.1f}" '
                             f'fill="{theme["prefill"]}"/>')
    for request in trace.requests:
        ticks = "".join(f"M{x_of(time):.1f} {row_of[request.name] + 3}v10"
                        for time in request.token_times)
        parts.append(f'<path d="{ticks}" stroke="{theme["decode"]}" stroke-width="2"/>')
    return "".join(parts) + (   # the cover, which slides to the right
        f'<g class="cover"><rect x="{LEFT}" y="{top + 24}" width="{WIDTH}" height="{PANEL - 48}" '
        f'fill="{theme["paper"]}"/><path d="M{LEFT} {top + 24}v{PANEL - 48}" '
        f'stroke="{theme["soft"]}" stroke-width="2"/></g>')


def picture(traces, theme):
    """The SVG text for {stage: trace}, all on one axis of milliseconds."""
    last = max(time for trace in traces.values() for r in trace.requests for time in r.token_times)
    seconds = last * SLOWER
    total, height = seconds + HOLD, 30 + PANEL * len(traces) + 34

    def x_of(time):
        return LEFT + (WIDTH - LEFT - 14) * time / last

    body = [f'<text x="{LEFT}" y="20" class="soft">Six requests decode. Then a prompt of 3,500 '
            'tokens arrives. '
            f'<tspan fill="{theme["decode"]}" font-weight="600">Green: a token.</tspan> '
            f'<tspan fill="{theme["prefill"]}" font-weight="600">Blue: a prompt.</tspan></text>']
    for i, (stage, trace) in enumerate(traces.items()):
        body.append(panel(trace, PANELS[stage], x_of, 30 + i * PANEL, theme))
    bottom = 30 + PANEL * len(traces)
    for tick in range(int(last * 5) + 1):
        body.append(f'<text x="{x_of(tick / 5):.1f}" y="{bottom + 6}" text-anchor="middle" '
                    f'class="soft">{tick / 5:.1f} s</text>')
    worst = [1e3 * max(gaps(trace))[0] for trace in traces.values()]
    body.append(f'<text x="{LEFT}" y="{bottom + 26}" class="soft">Calculated for Llama 2 7B on an '
                f'A100, and shown {SLOWER} times slower. Longest wait for a token: '
                f'{worst[0]:.0f} ms and {worst[1]:.0f} ms.</text>')
    end, far = 100 * seconds / total, WIDTH - LEFT
    return f'''<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"
 aria-label="A long prompt stops all requests in stage 2, and none in stage 6">
<style>
text {{ font: 12px system-ui, sans-serif; fill: {theme["ink"]} }}
.title {{ font-weight: 600; font-size: 13px }} .soft {{ fill: {theme["soft"]} }}
.frozen {{ font-weight: 700; fill: {theme["finished"]} }}
.cover {{ animation: slide {total:.1f}s linear infinite }}
@keyframes slide {{ 0% {{ transform: none }}
 {end:.1f}%, 100% {{ transform: translateX({far}px) }} }}
@media (prefers-reduced-motion) {{ .cover {{ display: none }} }}
</style>
<rect width="{WIDTH}" height="{height}" fill="{theme["paper"]}"/>
{"".join(body)}
</svg>
'''


def bug(path):
    """A step of stage 4, three decodes and a chunk, under the published mask and the right one."""
    model, _ = load()
    with broken("published mask", show=False):
        published = one_step(model)["stage 4: rectangle"]
    sights.draw({"published: new slots are all valid": published,
                 "right": one_step(model)["stage 4: rectangle"]}, path)


def main():
    bug(FOLDER / "bug.png")
    traces = {stage: run(stage) for stage in PANELS}
    for name, theme in THEMES.items():
        path = FOLDER / f"motion-{name}.svg"
        path.write_text(picture(traces, theme), encoding="utf-8", newline="\n")
        print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
