"""
The pictures of the docs, drawn from traces, X-rays and measured results, in the visual language
of lab/views/plots.py. Without a path, a function returns its figure for a notebook to show.
"""
import numpy as np
from matplotlib.patches import Patch

from lab.experiments import bench as benchmark
from lab.experiments import rows as measured
from lab.views import sights
from lab.views.plots import COLORS, COUNTED, INK, LINE, NAMES, WIDTH, box, pyplot, save, style

# None of these means anything in a timeline or a mask.
CYCLE = "#2E94CC", "#A5703F", "#8F8F2E", "#858585", "#6B7FB3", "#D14B8F", "#0072B2"
STAGES = "unbatched", "naive", "dynamic", "chunked", "interleaved", "ragged, varlen", "paged"
LOOKS = {   # of a bar: what computes a system's passes is told apart without colour, too
    look: dict(facecolor=color, hatch=hatch, edgecolor="white", linewidth=0)
    for look, color, hatch in (
        ("plain PyTorch", "#2E94CC", ""), ("compiled step", "#A5703F", "////"),
        ("another engine", "#858585", "...."))}
PAGES = {"held by one request": "#CCBB44", "shared by several": "#6B6B6B",
         "free, but cached": "#CCBB4444", "free": "none"}


def finished(figure, path, below="", rect=(0, 0, 1, 1), **layout):
    """below: what was measured, and where, as small print"""
    low = rect[1] + 0.16 / figure.get_figheight() * bool(below)
    figure.tight_layout(rect=(rect[0], low, *rect[2:]), **layout)
    figure.text(0.01, 0.06 / figure.get_figheight(), below, fontsize=9)
    return save(figure, path)


def origin(result):
    """The small print of a measured result."""
    return f"{result['measured']['machine']}; {result['where']}"


# --- curves and bars ------------------------------------------------------------------------------

def lines(curves, path=None, log=False, below="", notes=(), **labels):
    """
    A curve with markers for each {label: [(x, y), ...]}; a stage looks the same in all pictures.

    notes: (text, the point it speaks of, dx and dy of the text in font points)
    """
    figure, ax = pyplot().subplots(figsize=(WIDTH, 3.8))
    for i, (label, points) in enumerate(curves.items()):
        name = label.split(":")[0]
        i = STAGES.index(name) if name in STAGES else i
        ax.plot(*zip(*points), color=CYCLE[i], marker="os^DvX."[i], markersize=10 - i, label=label)
    if log:
        ax.loglog(base=2)
        for axis in ax.xaxis, ax.yaxis:
            axis.set_major_formatter("{x:g}")
    for text, point, offset in notes:
        ax.annotate(text, point, offset, textcoords="offset points", fontsize=9, va="center",
                    arrowprops={"arrowstyle": "-", "color": INK})
    ax.set(**labels)
    ax.grid(True)
    ax.legend(fontsize=9)
    return finished(figure, path, below)


def rows(*results, path=None):
    """What a batch gains, against its number of rows. results: of `rows`, of one or several"""
    gains = measured.gains(*results)
    notes = [("two rows take twice as long as one: for a single row\nthere is another, quicker "
              "kernel", points[1], (72, 3))
             for points in gains.values() if points[1][1] < 1]
    return lines(gains, path, log=True, below=origin(results[-1]), notes=notes,
                 title="Why one batches: reading weights and calling kernels costs once a pass",
                 ylabel="tokens a second, × those of one row",
                 xlabel="rows in one forward pass (tokens of different requests)")


def gaps(result, path=None):
    """Time between tokens while a long prompt arrives. result: of `gaps`"""
    points = {name: [(step, 1e3 * gap) for step, gap in found]
              for name, found in result["points"].items()}
    last_chunk = measured.ARRIVAL + -(-result["prompt_tokens"] // (measured.BUDGET - 4))
    notes = [(text, (step, dict(points[name])[step]), offset) for name, step, text, offset in (
        ("dynamic", measured.ARRIVAL + 1, "the whole prompt in one pass", (14, -8)),
        ("interleaved", measured.ARRIVAL + 6, "each decode padded to the chunk beside it",
         (-60, 34)),
        ("chunked", last_chunk, "the last chunk, then the\nfirst decode beside\nthe long row",
         (18, 40)))]
    return lines({f"{name}: worst {max(ms for _, ms in found):,.0f} ms": found
                  for name, found in points.items()}, path, notes=notes,
                 below=f"{measured.NAMES[result['model']]}; {origin(result)}",
                 ylabel="ms since their last token",
                 title=f"Four requests decode. At step {measured.ARRIVAL} a prompt of "
                       f"{result['prompt_tokens']} tokens arrives: how long do they wait?",
                 xlabel="step")


def bench(*results, path=None):
    """Useful tokens per second of all systems, and the roofline: a panel for each result."""
    systems = [*results[0]["systems"]]
    height = 0.25 * len(systems) + 1.7
    figure, axes = pyplot().subplots(1, len(results), figsize=(WIDTH, height), sharey=True,
                                     squeeze=False)
    for ax, result in zip(axes.flat, results):
        bars = ax.barh(systems, [benchmark.speed(result, name) for name in systems], height=0.75)
        for bar, name in zip(bars, systems):
            bar.set(**LOOKS[benchmark.kind_of(name)])
        ax.bar_label(bars, fmt="{:,.0f}", padding=2, fontsize=9)
        most = result["tokens"] / result["roofline"]
        limit = ax.axvline(most, color=INK, linestyle="--", linewidth=1,
                           label="roofline: all that memory and arithmetic allow")
        ax.text(most, 1, f"{most:,.0f}", fontsize=9, ha="center", va="bottom",
                transform=ax.get_xaxis_transform())
        name = result["workload"]
        ax.set(title="\n".join([f"{result['model']}, {name} {benchmark.WORKLOADS[name]}",
                                *benchmark.SIZES[name]]))
        ax.margins(x=0.1)
        ax.locator_params(axis="x", nbins=3)
        ax.tick_params("y", labelsize=9)
    axes.flat[0].invert_yaxis()
    figure.supxlabel(f"tokens/s\nrandom weights; {origin(results[0])}", fontsize=9)
    figure.legend(handles=[*(Patch(label=look, **how) for look, how in LOOKS.items()), limit],
                  loc="upper center", ncols=4, fontsize=9)
    return finished(figure, path, rect=(0, 0, 1, 1 - 0.3 / height))


def slots(result, path=None):
    """Useful, padded and finished slots of each stage, as bars. result: of `stages`"""
    stages = {name: row for name, row in result["stages"].items() if "no cache" not in name}
    figure, ax = pyplot().subplots(figsize=(8, 0.9 + 0.42 * len(stages)))
    left = np.zeros(len(stages))
    for kind, name in COUNTED.items():
        values = np.array([row[name] for row in stages.values()])
        if values.any():
            ax.barh(list(stages), values, left=left, height=0.72, **style(kind),
                    label="useful" if name == "useful" else NAMES[kind])
            left += values
    for i, (row, total) in enumerate(zip(stages.values(), left)):
        ax.text(total, i, f"  {row['useful'] / total:.0%} useful, {row['forward_passes']} passes",
                va="center", fontsize=9)
    ax.set(ylim=(len(stages) - 0.5, -0.5), xlim=(0, left.max() * 1.36),
           title=f"What each stage computes for the same {result['requests']} requests "
                 "(slots, not seconds)",
           xlabel="slots computed: places in all tensors")
    ax.legend(loc="lower right")
    return finished(figure, path)


# --- prompts in rows ------------------------------------------------------------------------------

def packing(sight, path=None):
    """
    A batch's prompts padded to one length, and packed into rows; and which token sees which in the
    row that holds the most prompts. sight: of prepacked (lab/checks/xray.py)
    """
    panels, m = sights.panels(sight), sight.ids.shape[1]
    padded = [["·"] * (m - n) + [f"{request.name}{j}" for j in range(n)]
              for request, n in sight.batch.plan]
    packed = [panel.queries for panel in panels]
    figure, axes = pyplot().subplots(1, 3, figsize=(WIDTH, 0.8 + 0.29 * max(len(padded), m)))
    for ax, how, slots in zip(axes, ("padded", "packed"), (padded, packed)):
        draw_prompts(ax, slots)
        ax.set(xlim=(-0.04, m + 0.04), ylim=(len(padded) + 0.04, -0.04), aspect="equal",
               title=f"{how} ({len(slots)}, {m}): {sum(slots, []).count('·')} pad slots")
        ax.axis("off")
    shared = max(panels, key=lambda panel: len(panel.name.split()))
    sights.draw_panel(axes[2], shared)
    axes[2].set_aspect("equal")
    axes[2].set_title(f"what {' and '.join(shared.name.split())} see in their row", pad=18)
    return finished(figure, path, pad=0.4, w_pad=1)


def draw_prompts(ax, slots):
    """Rows of slots, each with its token's label; "·" is a pad."""
    for (i, j), label in np.ndenumerate(slots):
        if label == "·":
            box(ax, j, i, facecolor=COLORS["pad"], edgecolor=LINE, hatch="////")
            continue
        behind = label[1:] == "0" and j and slots[i][j - 1] != "·"   # another prompt: a gap
        box(ax, j + 0.14 * behind, i, label, "white", facecolor=COLORS["prefill"])


# --- a pool of pages ------------------------------------------------------------------------------

def pool(seen, path=None):
    """A pool over the steps of a run, seen by memory.watch; and its fullest step's block tables."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(WIDTH, 6.2), width_ratios=[2, 1])
    one, several, cached, _ = PAGES.values()
    holders = [{page: [name for name, table in at["tables"].items() if page in table]
                for page in range(at["number"])} for at in seen]

    for step, at in enumerate(seen):
        for page, names in holders[step].items():
            begins = step == 0 or names != holders[step - 1][page]
            if len(names) > 1:
                box(left, step, page, facecolor=several)
            elif names:
                box(left, step, page, names[0] if begins else "", facecolor=one)
            elif page in at["cached"]:
                box(left, step, page, facecolor=cached)
    left.set(xlim=(0, len(seen)), ylim=(seen[0]["number"], 0), xlabel="step", ylabel="page",
             title="the pool, step by step")

    fullest = max(range(len(seen)), key=lambda i: len(seen[i]["tables"]))
    tables = seen[fullest]["tables"]
    for row, (name, table) in enumerate(tables.items()):
        right.text(-0.3, row + 0.5, name, ha="right", va="center", fontsize=10)
        for column, page in enumerate(table):
            alone = len(holders[fullest][page]) == 1
            color, ink = (one, "black") if alone else (several, "white")
            box(right, column, row, page, ink, facecolor=color)
    right.set(xlim=(-1, max(map(len, tables.values()))), ylim=(max(len(tables), 8), 0),
              title=f"the block tables at step {fullest}")
    right.axis("off")
    handles = [Patch(facecolor=color, edgecolor=LINE, label=label)
               for label, color in PAGES.items()]
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), handlelength=1.2)
    return finished(figure, path, rect=(0, 0.06, 1, 1))
