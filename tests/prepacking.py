"""The prepacking paper's ways to batch (source P), and prompts as long as its datasets'."""
import math
import random

from beyond.prepacked import Packed, first_fit_decreasing
from cache import KV
from generate_naive import StaticBatch, columns_for
from generate_ragged import Flat

CONTEXT = 512
SHOTS = (120, 150, 190, 230, 280, 330, 390, 450)   # lengths of a few-shot question's examples
KINDS = {   # the paper's kinds of prompts, as distributions of lengths
    "dialogue": lambda rng: rng.lognormvariate(math.log(25), 0.7),
    "instructions": lambda rng: rng.lognormvariate(math.log(40), 1.0),
    "few-shot questions": lambda rng: rng.choice(SHOTS) + rng.lognormvariate(math.log(40), 0.5),
    "articles": lambda rng: rng.lognormvariate(math.log(350), 0.5),
    "uniform": lambda rng: rng.randint(1, CONTEXT),
}


def lengths_of(kind, n):
    """n prompt lengths of a kind, 1..CONTEXT, the same every time."""
    rng = random.Random(f"{kind} 0")
    return [min(max(round(KINDS[kind](rng)), 1), CONTEXT) for _ in range(n)]


# --- the ways to batch: requests -> groups, one forward pass each, and the layout of a group ------

def in_order(requests, k):
    return [requests[i:i + k] for i in range(0, len(requests), k)]


def by_length(requests, k):
    return in_order(sorted(requests, key=lambda request: len(request.prompt)), k)


def by_row(requests, k):
    lengths = [len(request.prompt) for request in requests]
    rows = in_order(first_fit_decreasing(lengths, max(lengths)), k)
    return [[requests[i] for row in group for i in row] for group in rows]


def whole(layout):
    """A layout of whole prompts, made from requests instead of a plan."""
    def lay_out(requests, device):
        for request in requests:
            request.kv = KV(request.kv_capacity)
        return layout([(request, len(request.prompt)) for request in requests], device)

    return lay_out


def static(requests, device):
    return StaticBatch(requests, KV(columns_for(requests)), device)


METHODS = {
    "full batching": (in_order, static),                # k prompts, padded to the longest
    "length-ordered": (by_length, static),              # all prompts sorted first, then the same
    "prepacking, batch": (in_order, whole(Packed)),     # k prompts, packed into r <= k rows
    "prepacking, dataset": (by_row, whole(Packed)),     # all prompts packed first, then k rows
    "ragged": (in_order, whole(Flat)),                  # k prompts, no rows
}
