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
    return layout_of(Packed(plan_of(prompts)), "tokens", "positions", "mask", "wanted")


def packed_on_a_device():
    return on_a_device(Packed, "tokens", "positions", "mask", "wanted")


def flat(rows):
    batch = Flat(plan_of(rows))
    return {**layout_of(batch, *STREAM), "a mask, which is not needed": getattr(
        batch, "mask", None) is not None}


def flat_mask(rows):
    return layout_of(Flat(plan_of(rows), None, "mask"), *STREAM, "mask")


def flat_on_a_device():
    return on_a_device(Flat, "tokens", "positions", "wanted")


def mask_on_a_device():
    return on_a_device(lambda plan, device: Flat(plan, device, "mask"), "mask")


def on_a_device(layout, *names):
    plan = plan_of([{"prompt": 3}, {"prompt": 4}])
    return on_second_device(lambda device: layout(plan, device), *names)


def varlen(rows, heads, size, attention="varlen", mask=(), lost=False):
    """lost: a value in the first request's cache is NaN, which is that request's alone."""
    class LaidOut(Flat):   # as part c has to set it
        def lay_out(self, device):
            self.tokens = self.positions = torch.zeros(self.cu_seqlens[-1], dtype=torch.long)
            self.mask = torch.tensor(mask)

    plan = plan_of(rows)
    fill(plan, heads, size)
    if lost:
        plan[0][0].kv.v[LAYERS[0]][0, 0, 0] = torch.nan
    batch = LaidOut(plan, None, attention)
    least = sum(n * end for (_, n), end in zip(plan, batch.ends)) if attention == "varlen" else 0
    return attended(batch, heads, size, 4 * heads * size * least)


def masked(**case):
    return varlen(**case, attention="mask")
