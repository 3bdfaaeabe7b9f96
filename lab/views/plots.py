"""
What every script can draw with --plot, in one visual language:

    blue    prefill               grey, hatched    padding
    green   decode                red, hatched     finished, still computed
    purple  computed again        thin grey line   waiting

Colour-blind readers can tell the colours apart (Okabe and Ito's palette, with Tol's red); hatching
repeats the distinction. The docs' figures, in lab/experiments/figures.py, use the same language.

A picture has no background: its colours can be read on a white and on a dark page. Its text is
grey; a document's pictures come in an ink for either page, and in two widths (see `look`).
"""
from contextlib import contextmanager
from dataclasses import dataclass

COLORS = {"prefill": "#0072B2", "decode": "#009E73", "recomputed": "#CC79A7", "pad": "#8888883A",
          "finished": "#CC3311", "waiting": "#8C8C8C"}
KEYS = {"past": "#6B5CB8", "new": "#E69F00"}   # what a token sees: cached keys, this pass's
NAMES = {"prefill": "prefill", "decode": "decode", "recomputed": "computed again", "pad": "padding",
         "finished": "finished, still computed", "waiting": "waiting"}

COUNTED = {   # a colour -> what a forward pass counts of it
    "decode": "useful", "recomputed": "recomputed", "pad": "pad_slots",
    "finished": "finished_slots"}
WIDTH, NARROW = 8.75, 3.9   # inches, at which a page, or a phone, shows a font in its own size
INK = "#777B80"    # of text: as far from white as from a dark page
INKS = {"light": "#59636E", "dark": "#9DA7B3"}   # of text on one of them: easier to read
LINE = "#88888866"   # around cells


@dataclass
class Look:
    """For whom a picture is drawn."""
    ink: str = INK
    width: float = WIDTH

    @property
    def narrow(self):
        return self.width < WIDTH


LOOK = Look()


@contextmanager
def look(ink=INK, width=WIDTH):
    """Pictures drawn meanwhile have text in this ink, and this width in inches."""
    before = LOOK.ink, LOOK.width
    LOOK.ink, LOOK.width = ink, width
    try:
        yield
    finally:
        LOOK.ink, LOOK.width = before


def pyplot():
    """pyplot without a display, unless a notebook has already chosen a backend."""
    # Imported where it is needed: the explorer and the server only want the colours.
    import matplotlib
    if "inline" not in matplotlib.get_backend():
        matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    plt.rcParams.update({
        "font.size": 10, "axes.spines.top": False, "axes.spines.right": False,
        "axes.titlelocation": "left", "axes.titlesize": 10, "grid.color": "#88888838",
        "hatch.linewidth": 0.4, "figure.dpi": 110, "savefig.dpi": 140, "legend.frameon": False,
        "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
        **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color",
                         "ytick.color"), LOOK.ink)})
    return plt


def style(kind):
    """Its colour and hatching, as keywords of bars and patches."""
    hatch = {"pad": "////", "finished": "xxxx"}.get(kind)
    edge = {"pad": "#999999", "finished": "white"}.get(kind, "none")
    return {"facecolor": COLORS[kind], "hatch": hatch, "edgecolor": edge, "linewidth": 0}


def box(ax, x, y, label="", ink="black", **looks):
    """A cell of a grid with a label in it."""
    from matplotlib.patches import Rectangle
    looks = {"edgecolor": LINE, "linewidth": 0.5, "clip_on": False, **looks}
    ax.add_patch(Rectangle((x, y), 1, 1, **looks))
    ax.text(x + 0.5, y + 0.5, label, ha="center", va="center", fontsize=9, color=ink)


def timeline(ax, trace, last_step):
    """
    One row per request, one column per step. A cell is the request's row in the tensor, whatever
    its width: coloured for tokens, grey for padding. So a decode in the same rectangle as a chunk
    of 16 is 1/16 green. Where several prompts share a row, its pads belong to no request, and are
    not drawn.
    """
    row_of = {request.name: i for i, request in enumerate(trace.requests)}
    next_step = {request.name: request.arrival for request in trace.requests}
    kinds_of = kinds_by_request(trace)
    wide = 0.92 if last_step <= 45 else 1   # gaps of a pixel or none would look like a pattern
    for p, kinds in zip(trace.passes, kinds_of):
        for name, shares in kinds.items():
            cell(ax, p.step, row_of[name], shares, wide)
            if p.step > next_step[name]:   # it had come, and was in no pass
                draw_waiting(ax, row_of[name], next_step[name], p.step)
            next_step[name] = p.step + 1
        for name in p.finished:
            cell(ax, p.step, row_of[name], {"finished": 1}, wide)
    ax.set_ylim(len(row_of) - 0.4, -0.6)
    ax.set_yticks(range(len(row_of)), row_of, fontsize=9)
    ax.set_xlim(-0.5, last_step - 0.5)
    ax.tick_params(axis="y", length=0)
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_xlabel("step")
    ax.set_title(title(trace), fontsize=9, wrap=LOOK.narrow)


def title(trace):
    slots = sum(p.slots for p in trace.passes)
    useful = sum(p.useful for p in trace.passes)
    useful_share = f"{useful / slots:.0%} of {slots:,} slots useful"
    return f"{trace.stage}: {len(trace.passes)} passes, {useful_share}"


def kinds_by_request(trace):
    """For each pass {request: {kind: its share of the request's row}}."""
    prompt_of = {request.name: len(request.prompt) for request in trace.requests}
    reached = dict.fromkeys(prompt_of, 0)   # tokens computed so far
    passes = []
    for p in trace.passes:
        has_rows = len(p.shape) == 2 and p.shape[0] == len(p.work) + len(p.finished)
        kinds = {}
        for name, first, n in p.work:
            end = first + n
            again = max(0, min(reached[name], end) - first)
            prefill = max(0, min(prompt_of[name], end) - first - again)
            reached[name] = max(reached[name], end)
            counts = {"recomputed": again, "prefill": prefill, "decode": n - again - prefill}
            slots = n
            if has_rows:
                slots = p.shape[1]
                counts["pad"] = slots - n
            kinds[name] = {kind: count / slots for kind, count in counts.items()}
        passes.append(kinds)
    return passes


def draw_waiting(ax, row, since, until):
    ax.plot([since - 0.5, until - 0.5], [row, row], color=COLORS["waiting"], linewidth=1,
            label=NAMES["waiting"])


def cell(ax, step, row, shares, wide):
    """A request in a step, its parts one above the other."""
    top = row - 0.42
    for kind, share in shares.items():
        if share:
            ax.bar(step, 0.84 * share, wide, top, label=NAMES[kind], **style(kind))
            top += 0.84 * share


def timelines(traces, path=None, columns=2):
    """All stages on one workload, with one axis of steps, so that their ends can be compared."""
    columns = 1 if LOOK.narrow else columns
    rows = -(-len(traces) // columns)
    height = 0.6 + rows * (0.75 + 0.2 * len(traces[0].requests))
    figure, axes = pyplot().subplots(rows, columns, figsize=(LOOK.width, height), squeeze=False)
    last = max(trace.passes[-1].step for trace in traces) + 1
    handles = {}   # one of each kind that is drawn
    for ax, trace in zip(axes.flat, traces):
        timeline(ax, trace, last)
        drawn, names = ax.get_legend_handles_labels()
        handles |= dict(zip(names, drawn))
    for ax in axes.flat[len(traces):]:
        ax.axis("off")
    in_a_line = 2 if LOOK.narrow else len(handles)
    figure.legend(handles=[handles[name] for name in NAMES.values() if name in handles],
                  loc="lower center", ncols=in_a_line, handlelength=1.4, columnspacing=1.6)
    below = 0.18 + 0.2 * -(-len(handles) // in_a_line)   # inches
    figure.tight_layout(rect=(0, below / height, 1, 1), h_pad=1.4, w_pad=2)
    return save(figure, path)


def save(figure, path):
    """Writes the figure and closes it; without a path returns it, for a notebook to show."""
    if path is None:
        return figure
    figure.savefig(path)
    pyplot().close(figure)
    return path
