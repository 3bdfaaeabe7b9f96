"""
The pictures, all drawn from traces and live layouts, in one visual language:

    blue    prefill               grey, hatched    padding
    green   decode                red, hatched     finished, computed all the same
    purple  computed again        thin grey line   waiting

Colours are Okabe and Ito's, which colour-blind readers can tell apart; hatching says it once more.
Each function draws into the Axes it is given; `save` checks a path before any work is done.
"""
import os
from pathlib import Path

import matplotlib
import numpy as np

from toolbox.peers import PEERS

SUFFIXES = (".png", ".pdf", ".svg")
COLORS = {"prefill": "#0072B2", "decode": "#009E73", "recomputed": "#CC79A7", "pad": "#E4E4E4", "finished": "#D55E00", "waiting": "#999999"}
NAMES = {"prefill": "prefill", "decode": "decode", "recomputed": "computed again", "pad": "padding",
         "finished": "finished, still computed", "waiting": "waiting, perhaps preempted"}


def pyplot():
    """pyplot without a display, unless a notebook has chosen a backend already."""
    if "inline" not in matplotlib.get_backend():
        matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 0.4,
                         "figure.dpi": 110, "savefig.dpi": 140, "legend.frameon": False})
    return plt


def check_path(path, flag, suffixes=None):
    """ValueError if a file cannot be written there; found out before the work, not after it."""
    path = Path(path)
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{flag} {path}: the name must end in {', '.join(suffixes)}")
    if path.is_dir():
        raise ValueError(f"{flag} {path}: is a folder")
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {path.parent}")
    existed = path.exists()
    try:
        open(path, "ab").close()
    except OSError as error:
        raise ValueError(f"{flag} {path}: {error.strerror}") from None
    if not existed:
        os.remove(path)


def patch(kind):
    """A legend entry."""
    from matplotlib.patches import Patch
    return Patch(facecolor=COLORS[kind], hatch=hatch(kind), edgecolor=edge(kind), linewidth=0, label=NAMES[kind])


def hatch(kind):
    return {"pad": "////", "finished": "xxxx"}.get(kind)


def edge(kind):
    return {"pad": "#999999", "finished": "white"}.get(kind, "none")   # the colour of the hatching


def legend(figure, kinds):
    figure.legend(handles=[patch(kind) for kind in kinds], loc="lower center", ncols=len(kinds), handlelength=1.4, columnspacing=1.6)


# --- requests x steps ---------------------------------------------------------------------------------------------------

def timeline(ax, trace, last_step=None):
    """
    One row per request, one column per step. A cell is as high as the request's row in the tensor was wide; its
    coloured part holds tokens, the grey part padding: a decode beside a chunk of 16 is 1/16 green.
    """
    order = {request.name: i for i, request in enumerate(trace.requests)}
    prompt = {request.name: len(request.prompt) for request in trace.requests}
    for request in trace.requests:
        since = request.arrival
        for p in trace.passes:
            if request.name in [name for name, _, _ in p.work]:
                if p.step > since:
                    ax.plot([since, p.step], [order[request.name]] * 2, color=COLORS["waiting"], linewidth=1)
                since = p.step + 1
    reached = {}
    for p in trace.passes:
        for name, first, n in p.work:
            width = p.shape[1] if len(p.shape) == 2 else n
            bottom = order[name] - 0.42
            again = max(0, min(reached.get(name, 0), first + n) - first)
            reached[name] = max(reached.get(name, 0), first + n)
            new = "decode" if first + again >= prompt[name] else "prefill"
            for kind, count in ("recomputed", again), (new, n - again), ("pad", width - n):
                if count:
                    ax.bar(p.step + 0.5, 0.84 * count / width, 0.92, bottom=bottom, color=COLORS[kind], hatch=hatch(kind),
                           edgecolor=edge(kind), linewidth=0)
                    bottom += 0.84 * count / width
        for name in p.finished:
            ax.bar(p.step + 0.5, 0.84, 0.92, bottom=order[name] - 0.42, color=COLORS["finished"], hatch=hatch("finished"),
                   edgecolor=edge("finished"), linewidth=0)
    ax.set_ylim(len(order) - 0.4, -0.6)
    ax.set_yticks(range(len(order)), order, fontsize=8)
    ax.set_xlim(0, last_step or trace.passes[-1].step + 1)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_xlabel("step")
    slots, useful = sum(p.slots for p in trace.passes), sum(p.useful for p in trace.passes)
    ax.set_title(f"{trace.stage}: {len(trace.passes)} passes, {useful / slots:.0%} of {slots:,} slots useful", loc="left", fontsize=10)


def timelines(traces, path=None, columns=2):
    """All stages on one workload, one step axis, so that who is done first shows."""
    plt = pyplot()
    rows = -(-len(traces) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(11, 0.6 + rows * (0.75 + 0.2 * len(traces[0].requests))), squeeze=False)
    last = max(trace.passes[-1].step for trace in traces) + 1
    for ax, trace in zip(axes.flat, traces):
        timeline(ax, trace, last_step=last)
    for ax in list(axes.flat)[len(traces):]:
        ax.axis("off")
        ax.text(0.06, 0.5, "A cell is one request in one step. It is as high as\nits row in the tensor was wide: grey is the share of\n"
                "that row that was padding. All stages serve the\nsame requests, and give them the same tokens.", va="center", fontsize=10, linespacing=1.5)
    figure.tight_layout(rect=(0, 0.38 / figure.get_figheight(), 1, 1), h_pad=1.4, w_pad=2)
    passes = [p for trace in traces for p in trace.passes]
    seen = {"recomputed": any(p.recomputed for p in passes), "pad": any(p.pad_slots for p in passes), "finished": any(p.finished_slots for p in passes)}
    legend(figure, ["prefill", "decode", *(kind for kind in seen if seen[kind]), "waiting"])
    return save(figure, path)


# --- one step's mask ----------------------------------------------------------------------------------------------------

def effective_mask(batch, row=None):
    """Who sees whom in a layout, causal rule included: (T, S) of one row of a Rectangle, (N, S) of a Flat with attention="mask"."""
    import torch
    T, S = batch.tokens.size(-1), batch.mask.size(-1)
    causal = torch.ones(T, S, dtype=torch.bool).tril(S - T)
    return (causal & (batch.mask if row is None else batch.mask[row, 0])).numpy()


def cells(ax, see, is_pad_query, is_pad_key, is_past, queries, keys):
    """A grid: coloured where a query sees a key, hatched where the slot is padding."""
    from matplotlib.patches import Rectangle as Box
    for i, j in np.ndindex(see.shape):
        pad = is_pad_query[i] or is_pad_key[j]
        color = "#FFFFFF" if not see[i, j] or pad else COLORS["decode"] if is_past[j] else COLORS["prefill"]
        ax.add_patch(Box((j, i), 1, 1, facecolor=COLORS["pad"] if pad else color, edgecolor="#BBBBBB", linewidth=0.5, hatch="////" if pad else None))
    ax.set_xlim(-0.04, see.shape[1] + 0.04)
    ax.set_ylim(see.shape[0] + 0.04, -0.04)
    ax.set_xticks(np.arange(see.shape[1]) + 0.5, keys, fontsize=7)
    ax.set_yticks(np.arange(see.shape[0]) + 0.5, queries, fontsize=7)
    ax.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    ax.set_aspect("equal")
    for side in ax.spines.values():
        side.set_visible(False)


def masks(plan, path=None):
    """One step's attention, the same plan as a Rectangle and as a Flat: what a score may be, and what is padding."""
    from cache import Flat, Rectangle
    plt = pyplot()
    rectangle, flat = Rectangle(plan), Flat(plan, attention="mask")
    B, T = rectangle.tokens.shape
    letters = [request.name for request, _ in plan]
    labels = [[f"{letter}{i}" for i in range(request.computed + n)] for letter, (request, n) in zip(letters, plan)]
    P = rectangle.P
    figure = plt.figure(figsize=(11, 6.6))
    left = figure.add_gridspec(B, 1, left=0.045, right=0.4, top=0.86, bottom=0.08, hspace=0.4)
    for b, ((request, n), label) in enumerate(zip(plan, labels)):
        past = request.computed
        keys = ["·"] * (P - past) + label[:past] + ["·"] * (T - n) + label[past:]
        queries = ["·"] * (T - n) + label[past:]
        ax = figure.add_subplot(left[b], anchor="NW")
        cells(ax, effective_mask(rectangle, b), [q == "·" for q in queries], [k == "·" for k in keys], [j < P for j in range(P + T)], queries, keys)
    right = figure.add_subplot(figure.add_gridspec(1, 1, left=0.36, right=0.985, top=0.86, bottom=0.08)[0], anchor="NW")
    keys = [key for label in labels for key in label]
    past = [i < request.computed for (request, _), label in zip(plan, labels) for i in range(len(label))]
    queries = [key for (request, _), label in zip(plan, labels) for key in label[request.computed:]]
    cells(right, effective_mask(flat), [False] * len(queries), [False] * len(keys), past, queries, keys)
    new = sum(n for _, n in plan)
    useful = int(flat.mask.sum())
    figure.text(0.045, 0.955, f"Rectangle (B, T) = ({B}, {T})", fontsize=12, weight="bold")
    figure.text(0.045, 0.925, f"{B * T - new} of {B * T} slots are padding; {rectangle.score_entries} scores, {useful} useful", fontsize=10)
    figure.text(0.36, 0.955, f"Ragged (N,) = ({new},)", fontsize=12, weight="bold")
    figure.text(0.36, 0.925, f"no padding; {flat.score_entries} scores masked, or {Flat(plan).score_entries} by skipping, {useful} useful", fontsize=10)
    from matplotlib.patches import Patch
    figure.legend(handles=[Patch(color=COLORS["decode"], label="sees a key from the cache"), Patch(color=COLORS["prefill"], label="sees a new key"),
                           patch("pad"), Patch(facecolor="white", edgecolor="#BBBBBB", label="may not see")], loc="lower center", ncols=4)
    return save(figure, path)


OWNERS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")


def packed(plan, path=None):
    """The prompts of a plan padded to one length and packed into rows, and who sees whom in the row that most of them share."""
    from matplotlib.patches import Rectangle as Box

    from generate_prepacked import Packed
    plt = pyplot()
    batch = Packed(plan)
    rows, m = batch.tokens.shape
    lengths = [n for _, n in plan]
    padded = [(b, m - n, m) for b, n in enumerate(lengths)]
    shared = max(range(rows), key=lambda row: sum(place[0] == row for place in batch.places))
    figure, axes = plt.subplots(1, 3, figsize=(12, 0.6 + 0.34 * max(len(plan), m)), width_ratios=[m, m, m])
    for ax, places, title in ((axes[0], padded, f"padded ({len(plan)}, {m}): {len(plan) * m - sum(lengths)} pad slots"),
                              (axes[1], batch.places, f"packed ({rows}, {m}): {rows * m - sum(lengths)} pad slots")):
        height = max(row for row, _, _ in places) + 1
        for i, j in np.ndindex(height, m):
            ax.add_patch(Box((j, i), 1, 1, facecolor=COLORS["pad"], edgecolor="#BBBBBB", linewidth=0.5, hatch="////"))
        for (request, _), (row, first, end), color in zip(plan, places, OWNERS * len(plan)):
            for position, j in enumerate(range(first, end)):
                ax.add_patch(Box((j, row), 1, 1, facecolor=color, edgecolor="white", linewidth=0.5))
                ax.text(j + 0.5, row + 0.5, f"{request.name}{position}", ha="center", va="center", fontsize=7, color="white")
        ax.set_xlim(-0.04, m + 0.04)
        ax.set_ylim(len(plan) + 0.04, -0.04)
        ax.set_title(title, fontsize=10, loc="left")
        ax.set_aspect("equal")
        ax.axis("off")
    labels = ["·"] * m
    for (request, _), (row, first, end) in zip(plan, batch.places):
        if row == shared:
            labels[first:end] = [f"{request.name}{position}" for position in range(end - first)]
    pads = [label == "·" for label in labels]
    cells(axes[2], effective_mask(batch, shared), pads, pads, [False] * m, labels, labels)
    axes[2].set_title(f"who sees whom in row {shared + 1}", fontsize=10, loc="left", pad=16)
    figure.tight_layout()
    return save(figure, path)


# --- slots, rows, waiting --------------------------------------------------------------------------------------------------

def slots(traces, path=None):
    """Useful, padded and finished slots of each stage, as bars."""
    plt = pyplot()
    figure, ax = plt.subplots(figsize=(8, 0.9 + 0.42 * len(traces)))
    kinds = {"useful": ("decode", "useful"), "recomputed": ("recomputed", "computed again"), "pad_slots": ("pad", "padding"),
             "finished_slots": ("finished", "finished, still computed")}
    left = np.zeros(len(traces))
    for name, (kind, label) in kinds.items():
        values = np.array([sum(getattr(p, name) for p in trace.passes) for trace in traces])
        if values.any():
            ax.barh(range(len(traces)), values, left=left, height=0.72, color=COLORS[kind], hatch=hatch(kind),
                    edgecolor=edge(kind), linewidth=0, label=label)
            left += values
    for i, (trace, total) in enumerate(zip(traces, left)):
        useful = sum(p.useful for p in trace.passes)
        ax.text(total, i, f"  {useful / total:.0%} useful, {len(trace.passes)} passes", va="center", fontsize=9)
    ax.set_yticks(range(len(traces)), [trace.stage for trace in traces])
    ax.set_ylim(len(traces) - 0.5, -0.5)
    ax.set_xlim(0, left.max() * 1.32)
    ax.set_xlabel("slots computed for the same workload")
    ax.legend(loc="lower right")
    figure.tight_layout()
    return save(figure, path)


def rows(measured, path=None):
    """
    Forward time against the number of rows: why one batches at all.

    measured: {label: [(rows, seconds), ...]}
    """
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    for (label, points), color, marker in zip(measured.items(), ("#0072B2", "#D55E00", "#009E73"), "os^"):
        n, seconds = np.array(points).T
        left.plot(n, seconds * 1e3, color=color, marker=marker, markersize=4, label=label)
        right.plot(n, seconds / n * 1e3, color=color, marker=marker, markersize=4, label=label)
    for ax, title in (left, "one forward pass, ms"), (right, "the same, ms per row"):
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        ax.set_xlabel("rows (tokens of different requests)")
        ax.set_title(title, loc="left", fontsize=10)
        ax.grid(True, color="#EEEEEE")
    left.legend()
    figure.tight_layout()
    return save(figure, path)


def itl(gaps, arrival, prompt_tokens, path=None):
    """
    Time between tokens of the running decodes, step by step, when a long prompt arrives.

    gaps: {stage: [(step, seconds), ...]}
    """
    plt = pyplot()
    figure, ax = plt.subplots(figsize=(9, 3.8))
    for (stage, points), color, marker in zip(gaps.items(), ("#D55E00", "#0072B2", "#E69F00", "#009E73"), "osD^"):
        step, seconds = np.array(points).T
        ax.plot(step, seconds * 1e3, color=color, marker=marker, markersize=4, linewidth=1.4, label=f"{stage}: worst {seconds.max() * 1e3:.1f} ms")
    ax.axvline(arrival, color="#444444", linewidth=0.8, linestyle="--")
    ax.annotate(f"a prompt of {prompt_tokens} tokens arrives", (arrival, 1), (-6, -2), xycoords=("data", "axes fraction"), textcoords="offset points",
                ha="right", va="top", fontsize=9)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("step")
    ax.set_ylabel("time since the last token, ms")
    ax.grid(True, axis="y", color="#EEEEEE")
    ax.legend()
    figure.tight_layout()
    return save(figure, path)


def bench(results, path):
    """bench.py's figures: useful tokens a second of every system, a panel for each model and workload, and the roofline."""
    plt = pyplot()
    models = list(dict.fromkeys(result["model"] for result in results))
    per_model = [[result for result in results if result["model"] == model] for model in models]
    columns = max(map(len, per_model))
    systems = list(dict.fromkeys(name for result in sorted(results, key=lambda result: -len(result["systems"])) for name in result["systems"]))
    figure, axes = plt.subplots(len(models), columns, figsize=(4 * columns + 2.2, len(models) * (0.22 * len(systems) + 1.1)), sharey=True, squeeze=False)
    for line, row in zip(per_model, axes):
        for ax in row[len(line):]:
            ax.axis("off")
        for result, ax in zip(line, row):
            for y, name in enumerate(systems):
                if name in result["systems"]:
                    speed = result["tokens"] / result["systems"][name]["seconds"]
                    kind = "waiting" if name.startswith(PEERS) else "decode" if name == "ragged, varlen" else "prefill"
                    ax.barh(y, speed, color=COLORS[kind], height=0.75)
                    ax.text(speed, y, f" {speed:,.0f}", va="center", fontsize=8)
            least = result["tokens"] / result["roofline"]
            ax.axvline(least, color="black", linestyle="--", linewidth=1)
            ax.text(least, -0.9, f"roofline {least:,.0f} ", ha="right", va="center", fontsize=8)
            ax.set_ylim(len(systems) - 0.4, -1.4)
            ax.set_xlim(0, 1.08 * least)
            ax.locator_params(axis="x", nbins=5)
            ax.set_yticks(range(len(systems)), systems, fontsize=9)
            ax.set_title({"W1": "W1, mixed", "W2": "W2, prefill", "W3": "W3, decode"}[result["workload"]] + f": {result['model']}", fontsize=10, loc="left")
            ax.set_xlabel("prompt tokens/s" if result["workload"] == "W2" else "tokens/s")
    figure.tight_layout()
    save(figure, path)


METHOD_COLORS = {"full batching": "#999999", "length-ordered": "#E69F00", "prepacking, batch": "#56B4E9", "prepacking, dataset": "#0072B2", "ragged": "#009E73"}


def prepacking(result, path):
    """The figures of toolbox.prepacking: six panels, one for each of its tables."""
    plt = pyplot()
    figure, ((kinds, sizes, memory), (ratio, gap, latency)) = plt.subplots(2, 3, figsize=(15, 8.4))

    methods = [method for method in METHOD_COLORS if method != "full batching"]
    for i, method in enumerate(methods):
        speedups = [figures["full batching"]["prefill_ms"] / figures[method]["prefill_ms"] for figures in result["kinds"].values()]
        x = np.arange(len(speedups)) + 0.2 * (i - 1.5)
        kinds.bar(x, speedups, width=0.19, color=METHOD_COLORS[method], label=method)
        for at, speedup in zip(x, speedups):
            kinds.text(at, speedup, f"{speedup:.1f}", ha="center", va="bottom", fontsize=7)
    kinds.axhline(1, color=METHOD_COLORS["full batching"], linestyle="--", linewidth=1)
    kinds.set_xticks(range(len(result["kinds"])), [str(kind).replace(" ", "\n") for kind in result["kinds"]], fontsize=8)
    kinds.set_ylim(top=1.35 * kinds.get_ylim()[1])
    kinds.legend(fontsize=8, ncols=2, loc="upper left")
    kinds.set_title("prefill, times as fast as full batching, k = 16", loc="left", fontsize=10)

    for (kind, points), color, marker in zip(result["batch_size"].items(), ("#0072B2", "#D55E00"), "os"):
        k, speedup, _ = np.array(points).T
        sizes.plot(k, speedup, color=color, marker=marker, markersize=4, label=f"{kind} lengths")
    sizes.axhline(1, color="#999999", linestyle="--", linewidth=1)
    sizes.set_xscale("log", base=2)
    sizes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    sizes.set_xlabel("k, prompts in a batch")
    sizes.set_title("the same for other k, prepacking a batch", loc="left", fontsize=10)
    sizes.legend(fontsize=8)

    for i, method in enumerate(("full batching", "prepacking, batch", "ragged")):
        k = [largest[method] for largest in result["largest"].values()]
        x = np.arange(len(k)) + 0.27 * (i - 1)
        memory.bar(x, k, width=0.25, color=METHOD_COLORS[method], label=method)
        for at, size in zip(x, k):
            memory.text(at, size, f"{size}", ha="center", va="bottom", fontsize=7)
    memory.set_xticks(range(len(result["largest"])), result["largest"], fontsize=8)
    memory.set_yscale("log")
    memory.set_ylim(top=6 * memory.get_ylim()[1])
    memory.legend(fontsize=8, loc="upper right")
    memory.set_title("largest k whose prefill fits in memory", loc="left", fontsize=10)

    for (k, points), color, marker in zip(result["predictors"].items(), ("#0072B2", "#D55E00"), "os"):
        rows, tokens, speedup = np.array(points).T
        ratio.scatter(rows, speedup, s=8, color=color, marker=marker, alpha=0.5, linewidths=0, label=f"k = {k}")
        gap.scatter(tokens, speedup, s=8, color=color, marker=marker, alpha=0.5, linewidths=0, label=f"k = {k}")
    x = np.linspace(*ratio.get_xlim(), 50)
    ratio.plot(x, 1 / x, color="black", linewidth=1, linestyle="--", label="1 / (r/k)")
    ratio.set_xlabel("r / k, rows for each prompt")
    gap.set_xlabel("m - L/k, tokens: longest minus mean length")
    for ax in ratio, gap:
        ax.set_title("speedup of single batches, uniform lengths", loc="left", fontsize=10)
        ax.legend(fontsize=8)

    k, seconds = np.array(result["latency"]).T
    latency.plot(k, seconds, color="#0072B2", marker="o", markersize=4)
    latency.plot(k, seconds[0] * k / k[0], color="#999999", linewidth=1, linestyle="--", label="k times one prompt")
    latency.set_xscale("log", base=2)
    latency.set_yscale("log")
    for axis in latency.xaxis, latency.yaxis:
        axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    latency.set_xlabel("k, prompts of 128 tokens")
    latency.set_title("seconds of one prefill", loc="left", fontsize=10)
    latency.legend(fontsize=8)
    for ax in (sizes, ratio, gap, latency):
        ax.grid(True, color="#EEEEEE")
    figure.tight_layout()
    save(figure, path)


def stage(trace, path):
    """What --plot draws: this run's timeline, and below it what each forward pass computed."""
    plt = pyplot()
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(11, 2.6 + 0.22 * len(trace.requests)), height_ratios=[len(trace.requests) + 2, 8])
    timeline(top, trace)
    base = np.zeros(len(trace.passes))
    for name, kind in ("useful", "decode"), ("recomputed", "recomputed"), ("pad_slots", "pad"), ("finished_slots", "finished"):
        values = np.array([getattr(p, name) for p in trace.passes])
        bottom.bar(range(len(values)), values, 0.92, bottom=base, color=COLORS[kind], hatch=hatch(kind), edgecolor=edge(kind),
                   linewidth=0, align="edge")
        base += values
    bottom.set_xlim(0, len(trace.passes))
    bottom.set_xlabel("forward pass (green: useful slots)")
    bottom.set_ylabel("slots")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    legend(figure, ["prefill", "decode", "recomputed", "pad", "finished", "waiting"])
    return save(figure, path)


def save(figure, path):
    """Writes the figure and closes it; without a path returns it, for a notebook to show."""
    if path is None:
        return figure
    figure.savefig(path)
    pyplot().close(figure)
    return path
