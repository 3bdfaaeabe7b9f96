"""
The table at the end of a script: the same requests on every stage; what this one buys, and costs.

What a stage plans depends on its requests' tokens, and after a run these are known. So each stage's
own `generate` runs once more, on a model that computes nothing and answers with these tokens.
"""
import textwrap
from dataclasses import dataclass, field, fields
from functools import partial

import torch

from lab.flags import limited
from lab.loading.stages import SCRIPTS
from lab.views.report import aligned, gaps
from request import Request

# Columns, with the words for a change. Of the last, more is better.
WORDS = {"passes": "{} passes", "slots": "{} slots", "first token": "first token after {} steps",
         "worst gap": "worst gap between two tokens {} slots", "at once": "{} requests at once"}
WORTH = 1.04   # smaller changes are not told


@dataclass(eq=False)
class Known(Request):
    """A request whose answer is known: whatever is sampled, it gets these tokens."""
    answer: list = field(default=(), kw_only=True)

    def append(self, token):
        super().append(self.answer[len(self.generated)])


def known(request):
    """A copy of an answered request, which gets the same answer again."""
    settings = {}
    for setting in fields(Request):
        if setting.init:
            settings[setting.name] = getattr(request, setting.name)
    settings["temperature"] = 0.0   # so that nothing is drawn
    return Known(**settings, answer=request.generated)


class NoModel:
    """Takes the place of a GPT. It computes nothing."""

    def __init__(self, config):
        self.config = config
        self.device = torch.device("cpu")

    def __call__(self, tokens, positions, attend, wanted):
        numbers = torch.arange(tokens.numel()).view(tokens.shape)
        return torch.zeros(numbers[wanted].numel(), 1)                          # (R, 1)


# --- a row of the table ---------------------------------------------------------------------------

def counted(generate, requests, config, limits):
    """
    A row: passes; slots; steps to a first token, on average; the most slots that are computed
    between two tokens of a request; and the most requests in a step.
    """
    knobs = limited(generate, limits, requests, config.block_size)
    trace = generate(NoModel(config), [known(request) for request in requests], **knobs)
    slots = sum(p.slots for p in trace.passes)
    first_steps = [request.token_steps[0] - request.arrival + 1 for request in trace.requests]
    average = round(sum(first_steps) / len(first_steps))
    return [len(trace.passes), slots, average, worst_gap(trace), most_at_once(trace)]


def worst_gap(trace):
    """The most slots that are computed between two tokens of one request."""
    slots_after = {}   # (request, step) -> slots computed until its token of this step
    slots = 0
    for p in trace.passes:
        slots += p.slots
        for name, _, _ in p.work:
            slots_after[name, p.step] = slots
    worst = 0
    for request in trace.requests:
        at_tokens = [slots_after[request.name, step] for step in request.token_steps]
        worst = max(worst, *gaps(at_tokens), 0)
    return worst


def most_at_once(trace):
    """The most requests in one step, which may take two passes."""
    running = {}   # step -> names of the requests that it computes
    for p in trace.passes:
        names = {name for name, _, _ in p.work}
        running[p.step] = running.get(p.step, set()) | names
    return max(len(names) for names in running.values())


# --- the table ------------------------------------------------------------------------------------

def rows(requests, config, limits={}):
    """{stage: its row}, for requests that have been answered."""
    return {name: counted(generate, requests, config, limits)
            for name, generate in SCRIPTS.items()}


def stage_table(here, requests, config, limits):
    """The table, and what the stage `here` buys and costs against the one before it."""
    all_rows = rows(requests, config, limits)
    plural = "s" if len(requests) > 1 else ""
    lines = [[f"  {len(requests)} request{plural}", *WORDS]]
    for number, (name, row) in enumerate(all_rows.items()):
        mark = ">" if name == here else " "
        lines.append([f"{mark} {number} {name}", *(f"{n:,}" for n in row)])
    before = row_before(here, all_rows, requests, config, limits)
    buys, costs = changes(before, all_rows[here])
    if here == next(iter(SCRIPTS)) and buys:
        buys.append("all against no cache")
    return "\n".join([aligned(lines), listed("buys", buys), listed("costs", costs)])


def row_before(here, all_rows, requests, config, limits):
    """The row of the stage before `here`; before the first comes the same stage with no cache."""
    names = list(all_rows)
    place = names.index(here)
    if place > 0:
        return all_rows[names[place - 1]]
    return counted(partial(SCRIPTS[here], use_cache=False), requests, config, limits)


def changes(before, after):
    """What gets better, and what gets worse, in words: two lists."""
    buys, costs = [], []
    for (name, words), old, new in zip(WORDS.items(), before, after):
        text = words.format(f"{old:,} -> {new:,}")
        if name == "at once":   # more is better
            times_better = new / old
        else:
            times_better = max(old, 1) / max(new, 1)
        if times_better >= WORTH:
            buys.append(text)
        elif 1 / times_better >= WORTH:
            costs.append(text)
    return buys, costs


def listed(word, texts):
    return textwrap.fill("; ".join(texts) or "none of these", 78,
                         initial_indent=f"  {word:7}", subsequent_indent=" " * 9)
