"""
The table at the end of a script: the same requests on every stage; what this one buys, and costs.

What a stage plans depends on its requests' tokens, and after a run these are known. So each stage's
own `generate` runs once more, on a model that computes nothing and answers with these tokens.
"""
import textwrap
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import accumulate, pairwise

import torch

from lab.flags import limited
from lab.loading.stages import SCRIPTS
from lab.views.report import aligned
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
    asked = {each.name: getattr(request, each.name) for each in fields(Request) if each.init}
    return Known(**asked | {"temperature": 0.0}, answer=request.generated)


class NoModel:
    """Takes the place of a GPT. It computes nothing."""

    def __init__(self, config):
        self.config = config
        self.device = torch.device("cpu")

    def __call__(self, tokens, positions, attend, wanted):
        numbers = torch.arange(tokens.numel()).view(tokens.shape)
        return torch.zeros(numbers[wanted].numel(), 1)                          # (R, 1)


def counted(generate, requests, config, given):
    """
    A row: passes; slots; steps to a first token, on average; the most slots that are computed
    between two tokens of a request; and the most requests in a step.
    """
    knobs = limited(generate, given, config.block_size)
    trace = generate(NoModel(config), [*map(known, requests)], **knobs)
    running = {}   # step -> the requests that it computes
    after = {}     # (request, step) -> slots computed until its token of this step
    for each, slots in zip(trace.passes, accumulate(each.slots for each in trace.passes)):
        names = {name for name, *_ in each.work}
        running[each.step] = running.get(each.step, set()) | names
        after |= {(name, each.step): slots for name in names}
    firsts = [each.token_steps[0] - each.arrival + 1 for each in trace.requests]
    gaps = [after[each.name, late] - after[each.name, early]
            for each in trace.requests for early, late in pairwise(each.token_steps)]
    return [len(trace.passes), slots, round(sum(firsts) / len(firsts)), max(gaps, default=0),
            max(map(len, running.values()))]


def rows(requests, config, given={}):
    """{stage: its row}, for requests that have been answered."""
    return {name: counted(generate, requests, config, given)
            for name, generate in SCRIPTS.items()}


def rungs(here, requests, config, given):
    """The table, and what the stage `here` buys and costs against the one before it."""
    all_rows = rows(requests, config, given)
    names = [*all_rows]
    asked = f"{len(requests)} request{'s' * (len(requests) > 1)}"
    lines = aligned([[f"  {asked}", *WORDS], *(
        [f"{'>' if name == here else ' '} {i} {name}", *(f"{n:,}" for n in row)]
        for i, (name, row) in enumerate(all_rows.items()))])
    before = (all_rows[names[names.index(here) - 1]] if here != names[0] else
              counted(partial(SCRIPTS[here], use_cache=False), requests, config, given))
    changes = []   # (how many times better, in words)
    for (name, words), a, b in zip(WORDS.items(), before, all_rows[here]):
        better = b / a if name == "at once" else max(a, 1) / max(b, 1)
        changes.append((better, words.format(f"{a:,} -> {b:,}")))
    buys = [text for better, text in changes if better >= WORTH]
    costs = [text for better, text in changes if 1 / better >= WORTH]
    for word, texts in ("buys", buys), ("costs", costs):
        lines += "\n" + textwrap.fill("; ".join(texts) or "none of these", 78,
                                      initial_indent=f"  {word:7}", subsequent_indent=" " * 9)
    return lines
