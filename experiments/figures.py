"""
The pictures of the docs, drawn from traces, X-rays and measured results, in the visual
language of views/plots.py. Without a path, a function returns its figure for a notebook to show.
"""
import numpy as np
from matplotlib.patches import Patch
from matplotlib.patches import Rectangle as Box

from experiments.bench import OURS
from experiments.prepacking import METHODS, speedup
from experiments.results import WORKLOADS
from experiments.rows import ARRIVAL
from experiments.rows import NAMES as MODEL_NAMES
from views import sights
from views.plots import COLORS, COUNTED, NAMES, WIDTH, pyplot, save, style

# None of these means anything in a timeline or a mask.
CYCLE = "#56B4E9", "#882255", "#999933", "#999999", "#8C6239", "#222222", "#0072B2"
OURS_COLOR, PEER_COLOR, RAGGED_COLOR = "#56B4E9", "#999999", "#8C6239"


def finished(figure, path, **layout):
    figure.tight_layout(**layout)
    return save(figure, path)


def lines(measured, path=None, log=False, **labels):
    """A curve with markers for each {label: [(x, y), ...]}; the first has the largest markers."""
    figure, ax = pyplot().subplots(figsize=(WIDTH, 3.8))
    for i, (label, points) in enumerate(measured.items()):
        ax.plot(*zip(*points), color=CYCLE[i], marker="os^DvX."[i], markersize=10 - i, label=label)
    if log:
        ax.loglog(base=2)
        for axis in ax.xaxis, ax.yaxis:
            axis.set_major_formatter("{x:g}")
    ax.set(**labels)
    ax.grid(True)
    ax.legend(fontsize=9)
    return finished(figure, path)


def bars(ax, values, colors, form):
    drawn = ax.barh(list(values), list(values.values()), color=colors, height=0.75)
    ax.bar_label(drawn, fmt=form, fontsize=9)
    ax.tick_params("y", labelsize=9)


# --- prompts in rows ------------------------------------------------------------------------------

def packing(sight, path=None):
    """
    A batch's prompts padded to one length, and packed into rows; and which token sees which in the
    row that holds the most prompts. sight: of stage 5 (checks/xray.py)
    """
    plan, places, (rows, m) = sight.batch.plan, sight.batch.places, sight.ids.shape
    lengths = [n for _, n in plan]
    figure, axes = pyplot().subplots(1, 3, figsize=(WIDTH, 0.8 + 0.29 * max(len(plan), m)))
    padded = [(b, m - n, m) for b, n in enumerate(lengths)]
    for ax, how, B, of in zip(axes, ("padded", "packed"), (len(plan), rows), (padded, places)):
        draw_places(ax, plan, of, m)
        ax.set_title(f"{how} ({B}, {m}): {B * m - sum(lengths)} pad slots")
    shared = max(range(rows), key=lambda row: sum(place[0] == row for place in places))
    panel = sights.panels(sight)[shared]
    sights.draw_panel(axes[2], panel)
    axes[2].set_aspect("equal")
    axes[2].set_title(f"what {' and '.join(panel.name.split())} see in their row", pad=18)
    return finished(figure, path, pad=0.4, w_pad=1)


def draw_places(ax, plan, places, m):
    """Prompts in rows of m slots: places holds (row, first column, end) for each of them."""
    for i, j in np.ndindex(max(row for row, _, _ in places) + 1, m):
        box(ax, j, i, COLORS["pad"], line="#BBBBBB", hatch="////")
    for (request, _), (row, first, end) in zip(plan, places):
        for j in range(first, end):
            box(ax, j, row, COLORS["prefill"])
            ax.text(j + 0.5, row + 0.5, f"{request.name}{j - first}", ha="center", va="center",
                    fontsize=9, color="white")
        if any(place[::2] == (row, first) for place in places):   # behind another prompt
            ax.plot([first, first], [row, row + 1], "w", linewidth=5, solid_capstyle="butt")
    ax.set(xlim=(-0.04, m + 0.04), ylim=(len(plan) + 0.04, -0.04), aspect="equal")
    ax.axis("off")


def box(ax, x, y, color, line="white", hatch=None):
    ax.add_patch(Box((x, y), 1, 1, facecolor=color, edgecolor=line, linewidth=0.5, hatch=hatch,
                     clip_on=False))


# --- a pool of pages ------------------------------------------------------------------------------

def pool(seen, path=None):
    """A pool over the steps of a run, seen by memory.watch; and its fullest step's block tables."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(WIDTH, 6.2), width_ratios=[2, 1])
    before = {}
    for step, at in enumerate(seen):
        holders = {page: [name for name, table in at["tables"].items() if page in table]
                   for page in range(at["number"])}
        for page, held_by in holders.items():
            draw_page(left, step, page, held_by, page in at["kept"])
            if len(held_by) == 1 and held_by != before.get(page):   # it begins to hold it
                left.text(step + 0.5, page + 0.53, *held_by, ha="center", va="center", fontsize=8)
        before = holders
    left.set(xlim=(0, len(seen)), ylim=(seen[0]["number"], 0), xlabel="step", ylabel="page",
             title="the pool, step by step")

    fullest = max(range(len(seen)), key=lambda i: len(seen[i]["tables"]))
    tables = seen[fullest]["tables"]
    for row, (name, table) in enumerate(tables.items()):
        right.text(-0.3, row + 0.5, name, ha="right", va="center", fontsize=10)
        for column, page in enumerate(table):
            held_by = [other for other, pages in tables.items() if page in pages]
            draw_page(right, column, row, held_by, False)
            right.text(column + 0.5, row + 0.5, page, ha="center", va="center", fontsize=9,
                       color="white" if len(held_by) > 1 else "black")
    right.set(xlim=(-1, max(map(len, tables.values()))), ylim=(max(len(tables), 8), 0),
              title=f"the block tables at step {fullest}")
    right.axis("off")
    handles = [Patch(facecolor=color, edgecolor="#BBBBBB", label=label)
               for label, color in PAGES.items()]
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), handlelength=1.2)
    return finished(figure, path, rect=(0, 0.06, 1, 1))


PAGES = {"held by one request": "#CCBB44", "shared by several": "#444444",
         "kept, not in use": "#F0EBCF", "free": "white"}


def draw_page(ax, x, y, held_by, kept):
    """One page as a box, by whether several requests, one or none hold it."""
    one, several, none, _ = PAGES.values()
    if held_by or kept:
        box(ax, x, y, [none, one, several][min(len(held_by), 2)])


# --- slots, rows, time between tokens -------------------------------------------------------------

def slots(result, path=None):
    """Useful, padded and finished slots of each stage, as bars. result: of `ladder`"""
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
    ax.set(ylim=(len(stages) - 0.5, -0.5), xlim=(0, left.max() * 1.32),
           xlabel="slots computed for the same workload")
    ax.legend(loc="lower right")
    return finished(figure, path)


def rows(results, path=None):
    """Forward time against the number of rows. results: of `rows`, of one model or several"""
    return lines({MODEL_NAMES.get(result["model"], result["model"]): [
        (n, 1e3 * seconds) for n, seconds in result["points"]] for result in results}, path, True,
        xlabel="rows (tokens of different requests)", ylabel="one forward pass, ms")


def itl(result, path=None):
    """Time between tokens while a long prompt arrives. result: of `gaps`"""
    ms = {name: [(step, 1e3 * gap) for step, gap in points]
          for name, points in result["points"].items()}
    return lines({f"{name}: worst {max(gap for _, gap in points):.1f} ms": points
                  for name, points in ms.items()}, path, ylabel="time since the last token, ms",
                 xlabel=f"step; at step {ARRIVAL} a prompt of {result['prompt_tokens']} tokens "
                        "arrives")


def curve(result, path=None):
    """Latency against the rate of arrivals, calculated. result: of `gpu`"""
    return lines(result["curve"], path, True, xlabel="requests a second",
                 ylabel="ms a token, arrival to end", ylim=(8, 1000),
                 title="Calculated: Llama 2 7B on an A100 40 GB, 120 requests of mixed lengths")


def bench(results, path=None):
    """Useful tokens per second of all systems, and the roofline: a panel for each result."""
    height = 0.25 * len(results[0]["systems"]) + 1.1
    figure, axes = pyplot().subplots(len(results), figsize=(WIDTH, height * len(results)),
                                     squeeze=False)
    for ax, result in zip(axes.flat, results):
        shown, most = result["systems"], result["tokens"] / result["roofline"]
        bars(ax, {name: result["tokens"] / f["seconds"] for name, f in shown.items()},
             [PEER_COLOR if name not in OURS else
              RAGGED_COLOR if name == "ragged, varlen" else OURS_COLOR for name in shown],
             " {:,.0f}")
        ax.axvline(most, color="black", linestyle="--", linewidth=1)
        ax.text(most, -0.9, f"roofline {most:,.0f} ", ha="right", va="center", fontsize=9)
        ax.set(ylim=(len(shown) - 0.4, -1.4), xlim=(0, 1.08 * most),
               title=f"{result['workload']}, {WORKLOADS[result['workload']]}: {result['model']}",
               xlabel="prompt tokens/s" if result["workload"] == "W2" else "tokens/s")
    return finished(figure, path)


def kinds(result, path=None):
    """Speedups by kind of prompts: a panel for each. result: of `prepacking`"""
    figure, axes = pyplot().subplots(1, len(result["kinds"]), figsize=(WIDTH, 1.9), sharey=True)
    for ax, (kind, by) in zip(axes, result["kinds"].items()):
        times = {method: speedup(by, method) for method in METHODS if method != "full batching"}
        bars(ax, times, [RAGGED_COLOR if method == "ragged" else OURS_COLOR for method in times],
             " {:.1f}")
        ax.axvline(1, color="black", linestyle="--", linewidth=1)
        ax.set(title=kind, xlim=(0, 5), xticks=(0, 2, 4), ylim=(3.5, -0.5))
    figure.supxlabel("prefill, k = 16: times as fast as full batching", fontsize=9)
    return finished(figure, path)
