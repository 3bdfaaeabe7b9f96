"""
The pictures of the docs, drawn from traces, X-rays and measured results, in the visual language
of lab/views/plots.py. Without a path, a function returns its figure for a notebook to show.
"""
from textwrap import fill

import numpy as np
from matplotlib.patches import Patch

from lab.experiments import bench as benchmark
from lab.experiments import rows as measured
from lab.views import sights
from lab.views.plots import COLORS, COUNTED, LINE, LOOK, NAMES, box, pyplot, save, style

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
    below = wrapped(below)
    high = 0.16 * len(below.splitlines()) / figure.get_figheight()
    figure.tight_layout(rect=(rect[0], rect[1] + high, *rect[2:]), **layout)
    figure.text(0.01, 0.06 / figure.get_figheight(), below, fontsize=9)
    return save(figure, path)


def legend(ax, **place):
    """Within the axes, or on a phone below them."""
    if LOOK.narrow:
        axes_high = ax.figure.get_figheight() - 2   # in inches, about
        place = {"loc": "upper right", "bbox_to_anchor": (1, -0.75 / axes_high)}
    ax.legend(fontsize=9, **place)


def wrapped(text, letters=52):
    """A phone's picture has several short lines."""
    return fill(text, letters) if LOOK.narrow else text


def origin(result):
    """The small print of a measured result."""
    return f"{result['measured']['machine']}; {result['where']}"


# --- curves and bars ------------------------------------------------------------------------------

def lines(curves, path=None, log=False, below="", notes=(), **labels):
    """
    A curve with markers for each {label: [(x, y), ...]}; a stage looks the same in all pictures.

    notes: (text, the point it speaks of, dx and dy of the text in font points)
    """
    figure, ax = pyplot().subplots(figsize=(LOOK.width, 5.4 if LOOK.narrow else 3.8))
    for i, (label, points) in enumerate(curves.items()):
        name = label.split(":")[0]
        i = STAGES.index(name) if name in STAGES else i
        ax.plot(*zip(*points), color=CYCLE[i], marker="os^DvX."[i], markersize=10 - i, label=label)
    if log:
        ax.loglog(base=2)
        for axis in ax.xaxis, ax.yaxis:
            axis.set_major_formatter("{x:g}")
    for text, point, offset in () if LOOK.narrow else notes:   # on a phone they would not fit
        ax.annotate(text, point, offset, textcoords="offset points", fontsize=9, va="center",
                    arrowprops={"arrowstyle": "-", "color": LOOK.ink})
    ax.set(**{what: wrapped(words, 40) for what, words in labels.items()})
    ax.grid(True)
    legend(ax)
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
    rows, columns = (len(results), 1) if LOOK.narrow else (1, len(results))
    height = rows * (0.25 * len(systems) + 1) + 0.7
    figure, axes = pyplot().subplots(rows, columns, figsize=(LOOK.width, height), squeeze=False)
    for number, (ax, result) in enumerate(zip(axes.flat, results)):
        bars = ax.barh(systems, [benchmark.speed(result, name) for name in systems], height=0.75)
        for bar, name in zip(bars, systems):
            bar.set(**LOOKS[benchmark.kind_of(name)])
        ax.bar_label(bars, fmt="{:,.0f}", padding=2, fontsize=9)
        roofline(ax, result)
        name = result["workload"]
        ax.set(title="\n".join([f"{result['model']}, {name} {benchmark.WORKLOADS[name]}",
                                *benchmark.SIZES[name]]))
        ax.locator_params(axis="x", nbins=3)
        ax.tick_params("y", labelsize=9)
        ax.invert_yaxis()
        if number and not LOOK.narrow:
            ax.set_yticklabels([])
    small_print = wrapped(f"random weights; {origin(results[0])}")
    figure.supxlabel(f"tokens/s\n{small_print}", fontsize=9)
    handles = [Patch(label=look, **how) for look, how in LOOKS.items()]
    figure.legend(handles=handles, loc="upper center", ncols=2 if LOOK.narrow else 3, fontsize=9)
    legend_high = 0.5 if LOOK.narrow else 0.3
    return finished(figure, path, rect=(0, 0, 1, 1 - legend_high / height))


def roofline(ax, result):
    """A row of its own below the bars: as much as memory and arithmetic allow."""
    most = result["tokens"] / result["roofline"]
    bar = ax.barh(["roofline"], [most], height=0.75, facecolor="none", edgecolor=LOOK.ink,
                  linestyle="--")
    ax.bar_label(bar, fmt="{:,.0f}", padding=2, fontsize=9)
    ax.set_xlim(0, 1.22 * most)


def slots(result, path=None):
    """Useful, padded and finished slots of each stage, as bars. result: of `stages`"""
    stages = {name: row for name, row in result["stages"].items() if "no cache" not in name}
    row_high = 0.5 if LOOK.narrow else 0.42
    figure, ax = pyplot().subplots(figsize=(LOOK.width, 0.9 + row_high * len(stages) + LOOK.narrow))
    left = np.zeros(len(stages))
    for kind, name in COUNTED.items():
        values = np.array([row[name] for row in stages.values()])
        if values.any():
            ax.barh(list(stages), values, left=left, height=0.72, **style(kind),
                    label="useful" if name == "useful" else NAMES[kind])
            left += values
    for i, (row, total) in enumerate(zip(stages.values(), left)):
        text = f"{row['useful'] / total:.0%} useful, {row['forward_passes']} passes"
        if LOOK.narrow:
            text = text.replace(", ", "\n")
        ax.text(total + 0.01 * left.max(), i, text, va="center", fontsize=9)
    room = 1.42 if LOOK.narrow else 1.3
    title = (f"What each stage computes for the same {result['requests']} requests "
             "(slots, not seconds)")
    ax.set(ylim=(len(stages) - 0.5, -0.5), xlim=(0, left.max() * room), title=wrapped(title, 29),
           xlabel=wrapped("slots computed: places in all tensors", 24))
    legend(ax, loc="lower right")
    return finished(figure, path)


# --- prompts in rows ------------------------------------------------------------------------------

CELL, GAP = 0.36, 0.6   # inches: a slot; a panel's title


def packing(sight, path=None):
    """
    A batch's prompts padded to one length, and packed into rows; and which token sees which in the
    row that holds the most prompts. sight: of prepacked (lab/checks/xray.py)
    """
    panels, m = sights.panels(sight), sight.ids.shape[1]
    padded = [padded_row(request.name, n, m) for request, n in sight.batch.plan]
    packed = [panel.queries for panel in panels]
    shared = max(panels, key=lambda panel: len(panel.name.split()))
    below_padded = GAP + CELL * len(padded)
    below_packed = below_padded + GAP + CELL * len(packed)
    places = [(0.1, 0, len(padded)), (0.1, below_padded, len(packed))]   # left, top, rows of slots
    if LOOK.narrow:
        places.append((0.3, below_packed, m))
    else:
        places.append((CELL * m + 0.85, 0, m))
    height = 0.1 + max(top + GAP + CELL * rows for _, top, rows in places)
    figure = pyplot().figure(figsize=(LOOK.width, height))
    axes = [add_cells(figure, left, top + GAP, rows, m) for left, top, rows in places]
    for ax, how, rows in zip(axes, ("padded", "packed"), (padded, packed)):
        draw_prompts(ax, rows)
        pads = sum(row.count("·") for row in rows)
        ax.set(xlim=(0, m), ylim=(len(rows), 0),
               title=f"{how} ({len(rows)}, {m}): {pads} pad slots")
        ax.axis("off")
    sights.draw_panel(axes[2], shared)
    axes[2].set_title(f"what {' and '.join(shared.name.split())} see in their row", pad=18)
    return save(figure, path)


def padded_row(name, n, wide):
    """Labels of a row's slots: pads, then the n tokens of a request."""
    return ["·"] * (wide - n) + [f"{name}{i}" for i in range(n)]


def add_cells(figure, left, top, rows, columns):
    """Axes of rows x columns square cells. left, top: in inches, from the top left corner"""
    width, height = figure.get_size_inches()
    wide, high = CELL * columns, CELL * rows
    return figure.add_axes((left / width, 1 - (top + high) / height, wide / width, high / height))


def draw_prompts(ax, slots):
    """Rows of slots, each with its token's label; "·" is a pad."""
    for (i, j), label in np.ndenumerate(slots):
        if label == "·":
            box(ax, j, i, facecolor=COLORS["pad"], edgecolor=LINE, hatch="////")
            continue
        box(ax, j, i, label, "white", facecolor=COLORS["prefill"])
        if label[1:] == "0" and j and slots[i][j - 1] != "·":   # another prompt begins
            ax.plot([j, j], [i, i + 1], color="white", linewidth=3, zorder=3)


# --- a pool of pages ------------------------------------------------------------------------------

def pool(seen, path=None):
    """A pool over the steps of a run, seen by memory.watch; and its fullest step's block tables."""
    if LOOK.narrow:
        figure, (left, right) = pyplot().subplots(
            2, 1, figsize=(LOOK.width, 7.8), height_ratios=[2.4, 1])
    else:
        figure, (left, right) = pyplot().subplots(
            1, 2, figsize=(LOOK.width, 6.2), width_ratios=[2, 1])
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
    in_a_line = 2 if LOOK.narrow else len(handles)
    figure.legend(handles=handles, loc="lower center", ncols=in_a_line, handlelength=1.2)
    return finished(figure, path, rect=(0, 0.06, 1, 1))
