"""Set 5: runs one function on a case, and returns what it gives and changes."""
import torch
from kit.probes import attended, devices_of, fill, layout_of, operations, plan_of

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


def flat(rows, attention="mask"):
    mask = ["mask"] if attention == "mask" else []
    batch = Flat(plan_of(rows), None, attention)
    return layout_of(batch, "tokens", "positions", "wanted", *mask)


def layout_on_a_device(name):
    plan = plan_of([{"prompt": 3}, {"prompt": 4}])
    return devices_of((lambda device: Packed(plan, device)) if name == "Packed" else (
        lambda device: Flat(plan, device, "mask")), "tokens", "positions", "mask", "wanted")


def attend(rows, attention, mask):
    """Also how many operations it takes."""
    class LaidOut(Flat):   # as part c has to set it
        def lay_out(self, device):
            self.tokens = self.positions = torch.zeros(self.cu_seqlens[-1], dtype=torch.long)
            self.mask = torch.tensor(mask)

    plan, found = plan_of(rows), {}
    fill(plan)
    batch = LaidOut(plan, None, attention)
    number = operations(lambda: found.update(attended(batch)))
    return {**found, "operations": number}
