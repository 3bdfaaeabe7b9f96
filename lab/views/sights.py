"""
Draws which keys each token sees, as the X-ray measured it: queries down, keys across.

    purple  a key from the cache          grey, hatched   padding, seen by no token
    orange  a new key                     red             seen, and should not be
    empty   not seen                      red outline     not seen, and should be

The X-ray counts pads of one kind, but cannot tell them apart. Where a query sees three of seven,
the three on the right are drawn.
"""
from typing import NamedTuple

import torch
from matplotlib.patches import Patch

from lab.checks.xray import PAD, keys_of
from lab.views.plots import COLORS, KEYS, LINE, LOOK, NAMES, box, pyplot, save

RED = COLORS["finished"]
CELL, TOP = 0.24, 0.5   # inches


class Panel(NamedTuple):
    """What the queries of one row see; of a flat stream, what all queries see."""
    name: str       # of the requests in it
    queries: list   # labels; "·" is a pad
    keys: list      # labels
    cells: list     # for each query, for each key "past", "new", "pad", "wrong", "missing" or ""


def panels(sight, label=None):
    """
    A Panel for each row of a rectangle, or one for a flat stream.

    label: label(request, position) names a token; by default A0, A1, ...
    """
    rows = torch.atleast_2d(sight.ids).tolist()
    looks = {look.id: look for look in sight.xray.looks(sight)}
    return [panel(sight, row, looks, label or short_label) for row in rows]


def short_label(request, position):
    return f"{request.name}{position}"


def panel(sight, ids, looks, label):
    """
    ids:   of the row's slots
    looks: {id: Look} of the pass's tokens
    """
    token_of = sight.xray.token_of
    queries = [id for id in ids if id != PAD]
    past = past_ids(sight)
    columns, past_pads = key_columns(sight, ids, past)
    columns += strangers(columns, [looks[id] for id in queries], blank=len(token_of))
    cells = []
    for id in ids:
        if id == PAD:
            cells.append(["pad"] * len(columns))
        else:
            cells.append(cells_of(sight, looks[id], columns, past_pads, past))

    def names(ids):
        return ["·" if id == PAD else label(*token_of[id]) for id in ids]

    owners = dict.fromkeys(token_of[id][0].name for id in queries)
    return Panel(" ".join(owners), names(ids), names(columns), cells)


def past_ids(sight):
    """{request: ids of its tokens that the pass finds in the cache}"""
    past = {}
    for (request, _), start in zip(sight.batch.plan, sight.batch.starts):
        first = sight.xray.first[request]
        past[request] = range(first, first + start)
    return past


def strangers(columns, looks, blank):
    """The keys that are seen, and are of no request in this row."""
    seen = set()
    for look in looks:
        seen |= look.seen.keys()
    return sorted(seen - {*columns, PAD, blank})


def cells_of(sight, look, columns, past_pads, past):
    """What one query sees: a kind for each key."""
    token_of = sight.xray.token_of
    pads = seen_pads(columns, past_pads, look.seen[PAD], look.seen[len(token_of)])
    kinds = []
    for i, key in enumerate(columns):
        if key == PAD:
            kinds.append("wrong" if i in pads else "pad")
            continue
        owner, _ = token_of[key]
        kinds.append(cell(may_see=key in look.expected, sees=key in look.seen,
                          is_past=key in past.get(owner, ())))
    return kinds


def key_columns(sight, ids, past):
    """The keys of a panel: [id, ...], and how many pads of the past are among them, in front."""
    token_of = sight.xray.token_of
    owners = list(dict.fromkeys(token_of[id][0] for id in ids if id != PAD))
    columns = []
    if sight.ids.dim() == 1:   # request by request, its past and then its new tokens
        for request in owners:
            columns += past[request]
            columns += [id for id in ids if token_of[id][0] is request]
        return columns, 0
    for request in owners:
        columns += past[request]
    pads = keys_of(sight.batch) - len(columns) - len(ids)
    return [PAD] * pads + columns + ids, pads


def seen_pads(columns, past_pads, pads, blanks):
    """Which pad columns a query sees, from their counts: blanks are past, others mostly new."""
    new = [i for i, key in enumerate(columns) if key == PAD and i >= past_pads]
    past = range(past_pads)
    blanks += max(0, pads - len(new))   # pads that the new ones do not explain
    rightmost_new, rightmost_past = new[::-1], past[::-1]
    return {*rightmost_new[:pads], *rightmost_past[:blanks]}


def cell(may_see, sees, is_past):
    if sees and not may_see:
        return "wrong"
    if may_see and not sees:
        return "missing"
    if not sees:
        return ""
    return "past" if is_past else "new"


# --- drawing --------------------------------------------------------------------------------------

LOOKS = {   # a cell's kind: its looks, and its name in the legend
    "past": (dict(facecolor=KEYS["past"]), "sees a cached key"),
    "new": (dict(facecolor=KEYS["new"]), "sees a new key"),
    "": (dict(facecolor="none"), "does not see"),
    "pad": (dict(facecolor=COLORS["pad"], hatch="////"), NAMES["pad"]),
    "wrong": (dict(facecolor=RED), "sees, and must not"),
    "missing": (dict(facecolor="none", edgecolor=RED, linewidth=1.5),
                "must see, and does not")}


def draw(sights, path=None, label=None):
    """
    One or several forward passes, side by side; on a phone, one below the other.

    sights: {title: Sight}
    label:  label(request, position) names a token on the axes
    """
    groups = [panels(sight, label) for sight in sights.values()]
    places, corners, right, bottom = arranged(groups)
    handles = legend_handles(groups)
    width = max(min(6.4, LOOK.width), right)
    in_a_line = int(width / 1.65)
    lines = -(-len(handles) // in_a_line)
    if LOOK.narrow:
        lines += 1   # the legend's title takes two
    height = bottom + 0.45 + 0.2 * lines
    figure = pyplot().figure(figsize=(width, height))
    for (title, sight), (left, top) in zip(sights.items(), corners):
        x = (left + 0.1) / width
        figure.text(x, 1 - (top + 0.08) / height, title, weight="bold", va="top")
        figure.text(x, 1 - (top + 0.3) / height, bill(sight), va="top")
    for place in places:
        ax = axes_at(figure, place, width, height)
        draw_panel(ax, place.panel)
        if label:   # else each token carries its request's name
            ax.text(-0.3, -0.4, place.panel.name, ha="right", va="bottom", weight="bold")
    down, across = "down: the pass's tokens, as queries;", "across: the keys that each may see"
    figure.legend(handles=handles, loc="lower center", ncols=in_a_line, fontsize=9,
                  handlelength=1.2, columnspacing=1.2, title_fontsize=9,
                  title=f"{down}\n{across}" if LOOK.narrow else f"{down} {across}")
    return save(figure, path)


class Place(NamedTuple):
    """Where a panel is drawn, in inches from the top left."""
    panel: Panel
    left: float
    top: float


def arranged(groups):
    """(a Place for each panel, each group's (left, top), the right edge, the bottom) in inches."""
    longest = longest_label(groups)
    margin, gap = max(0.5, 0.095 * longest + 0.1), max(0.32, 0.09 * longest + 0.1)
    places, corners = [], []
    left = top = right = bottom = 0.0
    for group in groups:
        wide = margin + 0.15 + CELL * max(len(panel.keys) for panel in group)
        tall = gap + CELL * max(len(panel.queries) for panel in group)
        fits_in_a_line = len(groups) == 1 and wide * len(group) < LOOK.width
        columns = len(group) if fits_in_a_line else 1
        for number, panel in enumerate(group):
            row, column = divmod(number, columns)
            places.append(
                Place(panel, left + margin + wide * column, top + TOP + gap + tall * row))
        corners.append((left, top))
        right = max(right, left + max(3.2, wide * columns))
        bottom = max(bottom, top + TOP + tall * (row + 1))
        if LOOK.narrow:
            top = bottom + 0.2
        else:
            left = right
    return places, corners, right, bottom


def longest_label(groups):
    longest = 0
    for group in groups:
        for panel in group:
            longest = max(longest, *map(len, panel.keys))
    return longest


def legend_handles(groups):
    """A patch for each kind of cell that is drawn."""
    kinds = set()
    for group in groups:
        for panel in group:
            kinds.update(*panel.cells)
    handles = []
    for kind, (looks, name) in LOOKS.items():
        if kind in kinds:
            handles.append(Patch(**{"edgecolor": LINE, **looks}, label=name))
    return handles


def axes_at(figure, place, width, height):
    """width, height: of the figure, in inches"""
    wide, high = CELL * len(place.panel.keys), CELL * len(place.panel.queries)
    below = height - place.top - high
    return figure.add_axes((place.left / width, below / height, wide / width, high / height))


def bill(sight):
    """A pass's cost in words."""
    slots, pads = sight.ids.numel(), int((sight.ids == PAD).sum())
    padding = f"{pads} of {slots} slots padding" if pads else f"{slots} slots"
    return f"{padding}; {sight.record.score_entries:,} scores"


def draw_panel(ax, panel):
    for i, row in enumerate(panel.cells):
        for j, kind in enumerate(row):
            looks, _ = LOOKS[kind]
            above = 2 if kind == "missing" else 1   # its outline lies over its neighbours'
            box(ax, j, i, **{"edgecolor": LINE, **looks}, zorder=above)
    across, down = len(panel.keys), len(panel.queries)
    turned = 90 if max(map(len, panel.keys)) > 2 else 0
    ax.set(xlim=(-0.04, across + 0.04), ylim=(down + 0.04, -0.04))
    ax.set_xticks([j + 0.5 for j in range(across)], panel.keys, fontsize=9, rotation=turned)
    ax.set_yticks([i + 0.5 for i in range(down)], panel.queries, fontsize=9)
    ax.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False, pad=1.5)
    ax.spines[:].set_visible(False)
