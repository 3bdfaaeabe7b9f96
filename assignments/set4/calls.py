"""Set 4: runs one function on a case, and returns what it gives and changes."""
import torch
from probes import LAYERS, attended, devices_of, fill, layout_of, plan_of

from beyond import prepacked
from beyond.prepacked import Packed
from generate_ragged import Flat


def first_fit_decreasing(lengths, size):
    argument = list(lengths)
    rows = prepacked.first_fit_decreasing(argument, size)
    if rows is None or argument != lengths:
        return rows if rows is None else "it changes `lengths`"
    numbers = sorted(int(i) for row in rows for i in row)   # of equal lengths, any may come first
    return {"indices in rows": numbers, "lengths in rows": [
        [lengths[i] for i in row] for row in rows] if numbers == [*range(len(lengths))] else rows}


def packed(prompts):
    return layout_of(Packed(plan_of(prompts)), "tokens", "positions", "mask", "wanted")


def packed_on_a_device():
    return on_a_device(Packed, "tokens", "positions", "mask", "wanted")


def flat(rows):
    return layout_of(Flat(plan_of(rows)), "tokens", "positions", "wanted")


def flat_mask(rows):
    return layout_of(Flat(plan_of(rows), None, "mask"), "tokens", "positions", "wanted", "mask")


def flat_on_a_device():
    return on_a_device(Flat, "tokens", "positions", "wanted")


def mask_on_a_device():
    return on_a_device(lambda plan, device: Flat(plan, device, "mask"), "mask")


def on_a_device(layout, *names):
    plan = plan_of([{"prompt": 3}, {"prompt": 4}])
    return devices_of(lambda device: layout(plan, device), *names)


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
    return attended(LaidOut(plan, None, attention), heads, size)


def masked(**case):
    return varlen(**case, attention="mask")
