"""Set 4: runs one function on a case, and returns what it gives and changes."""
import torch
from probes import LAYERS, attended, fill, layout_of, on_second_device, plan_of

from beyond import prepacked
from beyond.prepacked import Packed
from generate_ragged import Flat

STREAM = "tokens", "positions", "wanted", "starts", "ends", "cu_seqlens"


def first_fit_decreasing(lengths, size):
    argument = list(lengths)
    rows = prepacked.first_fit_decreasing(argument, size)
    if argument != lengths:
        return "it changes `lengths`"
    return rows


def packed(prompts):
    batch = Packed(plan_of(prompts))
    return layout_of(batch, "tokens", "positions", "mask", "wanted")


def packed_on_a_device():
    return on_a_device(Packed, "tokens", "positions", "mask", "wanted")


def flat(rows):
    batch = Flat(plan_of(rows))
    layout = layout_of(batch, *STREAM)
    layout["a mask, which is not needed"] = getattr(batch, "mask", None) is not None
    return layout


def flat_mask(rows):
    batch = with_mask(plan_of(rows), device=None)
    return layout_of(batch, *STREAM, "mask")


def with_mask(plan, device):
    return Flat(plan, device, attention="mask")


def flat_on_a_device():
    return on_a_device(Flat, "tokens", "positions", "wanted")


def mask_on_a_device():
    return on_a_device(with_mask, "mask")


def on_a_device(layout, *names):
    plan = plan_of([{"prompt": 3}, {"prompt": 4}])
    return on_second_device(lambda device: layout(plan, device), *names)


def varlen(rows, heads, size, lost=False):
    plan = plan_with_caches(rows, heads, size, lost)
    batch = laid_out(plan, attention="varlen")
    pairs = 0   # of a new token and a key of the same request
    for (_, new_tokens), keys in zip(plan, batch.ends):
        pairs += new_tokens * keys
    return attended(batch, heads, size, least=4 * heads * size * pairs)


def masked(rows, heads, size, mask, lost=False):
    plan = plan_with_caches(rows, heads, size, lost)
    batch = laid_out(plan, attention="mask", mask=mask)
    return attended(batch, heads, size)


def plan_with_caches(rows, heads, size, lost):
    """lost: a value in the first request's cache is NaN, which is that request's alone."""
    plan = plan_of(rows)
    fill(plan, heads, size)
    if lost:
        first_request, _ = plan[0]
        values = first_request.kv.v[LAYERS[0]]
        values[0, 0, 0] = torch.nan
    return plan


def laid_out(plan, attention, mask=()):
    """A layout whose tensors are set as part c has to set them."""
    class LaidOut(Flat):
        def lay_out(self, device):
            number = self.cu_seqlens[-1]
            self.tokens = self.positions = torch.zeros(number, dtype=torch.long)
            self.mask = torch.tensor(mask)

    return LaidOut(plan, None, attention)
