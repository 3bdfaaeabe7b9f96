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
from lab.views.plots import COLORS, KEYS, LINE, NAMES, WIDTH, box, pyplot, save

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
    label = label or (lambda request, position: f"{request.name}{position}")
    rows = torch.atleast_2d(sight.ids)
    seen = sight.seen.reshape(*rows.shape, -1)
    return [panel(sight, *row, label) for row in zip(rows.tolist(), seen.tolist())]


def panel(sight, ids, seen, label):
    token_of, shared = sight.xray.token_of, sight.xray.shared_keys(sight.batch)
    past = {request: range(sight.xray.first[request], sight.xray.first[request] + start)
            for (request, _), start in zip(sight.batch.plan, sight.batch.starts)}
    queries = [(id, counts) for id, counts in zip(ids, seen) if id != PAD]
    keys_seen, mine = {}, {}   # of each query
    for id, counts in queries:
        mine[id] = {shared[key]: key for key in range(id - token_of[id][1], id + 1)}
        # A page that equal beginnings share counts as the request's own.
        keys_seen[id] = {mine[id].get(shared[key], key)
                         for key, n in enumerate(counts[1:-1], 1) if n}
    columns, past_pads = key_columns(sight, ids, past)
    columns += sorted(set().union(*keys_seen.values()) - {*columns})   # of no request in this row
    cells = []
    for id, counts in zip(ids, seen):
        if id == PAD:
            cells.append(["pad"] * len(columns))
            continue
        pads = seen_pads(columns, past_pads, counts[PAD], counts[-1])
        cells.append([("wrong" if i in pads else "pad") if key == PAD else
                      cell(key in mine[id].values(), key in keys_seen[id],
                           key in past.get(token_of[key][0], ()))
                      for i, key in enumerate(columns)])
    owners = dict.fromkeys(token_of[id][0].name for id, _ in queries)
    names = [["·" if id == PAD else label(*token_of[id]) for id in each] for each in (ids, columns)]
    return Panel(" ".join(owners), *names, cells)


def key_columns(sight, ids, past):
    """The keys of a panel: [id, ...], and how many pads of the past are among them, in front."""
    token_of = sight.xray.token_of
    owners = list(dict.fromkeys(token_of[id][0] for id in ids if id != PAD))
    if sight.ids.dim() == 1:   # request by request, its past and then its new tokens
        return [key for request in owners
                for key in [*past[request], *(id for id in ids if token_of[id][0] is request)]], 0
    own = [key for request in owners for key in past[request]]
    pads = keys_of(sight.batch) - len(own) - len(ids)
    return [PAD] * pads + own + ids, pads


def seen_pads(columns, past_pads, pads, blanks):
    """Which pad columns a query sees, from their counts: blanks are past, others mostly new."""
    new = [i for i, key in enumerate(columns) if key == PAD and i >= past_pads]
    past = range(past_pads)
    blanks += max(0, pads - len(new))
    return {*new[::-1][:pads], *past[::-1][:blanks]}


def cell(may_see, sees, is_past):
    if sees != may_see:
        return "wrong" if sees else "missing"
    return ("past" if is_past else "new") if sees else ""


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
    One or several forward passes, side by side.

    sights: {title: Sight}
    label:  label(request, position) names a token on the axes
    """
    groups = [panels(sight, label) for sight in sights.values()]
    longest = max(len(key) for group in groups for part in group for key in part.keys)
    margin, gap = max(0.5, 0.095 * longest + 0.1), max(0.32, 0.09 * longest + 0.1)
    places, lefts, left, bottom = [], [], 0.0, 0.0   # (panel, left, top) in inches from top left
    for group in groups:
        wide = margin + 0.15 + CELL * max(len(part.keys) for part in group)
        tall = gap + CELL * max(len(part.queries) for part in group)
        columns = len(group) if len(groups) == 1 and wide * len(group) < WIDTH else 1
        for k, part in enumerate(group):
            row, column = divmod(k, columns)
            places.append((part, left + margin + wide * column, TOP + gap + tall * row))
        lefts.append(left)
        left += max(3.2, wide * columns)
        bottom = max(bottom, TOP + tall * (row + 1))

    kinds = {kind for part, _, _ in places for row in part.cells for kind in row}
    handles = [Patch(**{"edgecolor": LINE, **looks}, label=name)
               for kind, (looks, name) in LOOKS.items() if kind in kinds]
    width = max(6.4, left)
    in_a_line = int(width / 1.65)
    height = bottom + 0.45 + 0.2 * -(-len(handles) // in_a_line)
    figure = pyplot().figure(figsize=(width, height))
    for (title, sight), left in zip(sights.items(), lefts):
        for down, text, weight in (0.08, title, "bold"), (0.3, bill(sight), "normal"):
            figure.text((left + 0.1) / width, 1 - down / height, text, weight=weight, va="top")
    for part, left, top in places:
        w, h = CELL * len(part.keys), CELL * len(part.queries)
        ax = figure.add_axes((left / width, 1 - (top + h) / height, w / width, h / height))
        draw_panel(ax, part)
        if label:   # else each token carries its request's name
            ax.text(-0.3, -0.4, part.name, ha="right", va="bottom", weight="bold")
    figure.legend(handles=handles, loc="lower center", ncols=in_a_line, fontsize=9,
                  handlelength=1.2, columnspacing=1.2, title_fontsize=9,
                  title="down: the pass's tokens, as queries; across: the keys that each may see")
    return save(figure, path)


def bill(sight):
    """A pass's cost in words."""
    slots, tokens = sight.ids.numel(), int((sight.ids != PAD).sum())
    padding = f"{slots - tokens} of {slots} slots padding" if slots > tokens else f"{slots} slots"
    return f"{padding}; {sight.record.score_entries:,} scores"


def draw_panel(ax, part):
    for i, row in enumerate(part.cells):
        for j, kind in enumerate(row):
            box(ax, j, i, **{"edgecolor": LINE, **LOOKS[kind][0]}, zorder=1 + (kind == "missing"))
    turned = 90 if max(map(len, part.keys)) > 2 else 0
    ax.set(xlim=(-0.04, len(part.keys) + 0.04), ylim=(len(part.queries) + 0.04, -0.04))
    ax.set_xticks([j + 0.5 for j in range(len(part.keys))], part.keys, fontsize=9, rotation=turned)
    ax.set_yticks([i + 0.5 for i in range(len(part.queries))], part.queries, fontsize=9)
    ax.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False, pad=1.5)
    ax.spines[:].set_visible(False)
