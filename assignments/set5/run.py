"""Set 5: runs one function on a case, and returns what it gives and changes."""
import copy

import torch

import generate_ragged
from beyond import prepacked
from beyond.prepacked import Packed
from generate_ragged import Flat
from lab.checks.probes import devices_of, fill, kind_of, numbers, plan_of, requests_of, slots_of


def first_fit_decreasing(lengths, size):
    argument = list(lengths)
    rows = prepacked.first_fit_decreasing(argument, size)
    if not isinstance(rows, (list, tuple)) or not all(
            isinstance(i, int) or hasattr(i, "__index__") for row in rows for i in row):
        return rows
    inside = all(0 <= i < len(lengths) for row in rows for i in row)
    return {"each index is in one row": sorted(int(i) for row in rows for i in row),
            "lengths in rows": [[lengths[i] for i in row] for row in rows] if inside else rows,
            "lengths is unchanged": argument == lengths}


def packed(prompts):
    """What lay_out sets, request by request: which row it is in, equal ones may choose."""
    plan = plan_of(prompts)
    batch = Packed(plan)
    found = {f"shape and dtype of {name}": kind_of(getattr(batch, name, None))
             for name in ("tokens", "positions", "mask")}
    places = getattr(batch, "places", "not set")
    if len(places) != len(plan) or not all(torch.is_tensor(each) for each in (
            batch.tokens, batch.positions, batch.mask)):
        return {**found, "places": places}
    (r, m), pads = batch.tokens.shape, torch.ones(batch.tokens.shape, dtype=torch.bool)
    if batch.mask.shape != (r, 1, m, m):
        return found
    see = batch.mask & torch.ones(m, m, dtype=torch.bool).tril()   # as Head combines them
    slots = slots_of(batch, batch.wanted)
    for i, ((request, n), (row, first, end)) in enumerate(zip(plan, places)):
        pads[row, first:end] = False
        seen = [[int(j) - first for j in see[row, 0, first + t].nonzero().flatten()]
                for t in range(end - first)]
        found[request.name] = {
            "tokens": batch.tokens[row, first:end], "positions": batch.positions[row, first:end],
            "its tokens see, counted from its first": seen, "sampled": batch.sampled[i:i + 1],
            "wanted reads its token number": slots[i] - row * m - first if i < len(slots) else "none"}
    return {**found, "tokens and positions of pads": sorted(
        {*batch.tokens[pads].tolist(), *batch.positions[pads].tolist()}), "sampled": batch.sampled}


def packed_on_a_device():
    plan = [(each, each.todo) for each in requests_of([{"prompt": 3}, {"prompt": 4}])]
    return devices_of(lambda device: Packed(plan, device), ["tokens", "positions", "mask", "wanted"])


def flat(rows, attention="mask"):
    """What lay_out sets for a stream."""
    batch = Flat(plan_of(rows), None, attention)
    found = {name: getattr(batch, name, "not set") for name in ("tokens", "positions", "sampled")}
    for name in "tokens", "positions":
        found[f"shape and dtype of {name}"] = kind_of(found[name])
    found["slots that wanted reads"] = slots_of(batch, batch.wanted)
    if attention == "mask":
        mask = getattr(batch, "mask", None)
        found["shape and dtype of the mask"] = kind_of(mask)
        if torch.is_tensor(mask) and mask.dim() == 2:
            found |= {f"token {i} of the stream sees the keys": row.nonzero().flatten()
                      for i, row in enumerate(mask)}
    return found


def flat_on_a_device():
    plan = [(each, each.todo) for each in requests_of([{"prompt": 3}, {"prompt": 4}])]
    return devices_of(lambda device: Flat(plan, device, "mask"), ["tokens", "positions", "mask", "wanted"])


def attend(rows, attention, mask):
    """
    With random q, k, v: the output, and how many scores `head` computes. The caches are reached
    through write and read only.
    """
    class LaidOut(Flat):   # as part c has to set it
        def lay_out(self, device):
            self.mask = torch.tensor(mask)

        def write(self, layer, k, v):
            written.append(layer)
            Flat.write(twin, layer, k, v)

        def read(self, layer, i):
            if not written:
                return tuple(each[..., :0, :] for each in (k, v))
            return Flat.read(twin, layer, i)

    plan, written, scores, head = plan_of(rows), [], [], generate_ragged.head
    for i, (each, _) in enumerate(plan):
        fill(each, i)
    twin, batch = LaidOut(plan, None, attention), LaidOut(plan, None, attention)
    twin.plan = [(copy.copy(each), n) for each, n in plan]
    for each, _ in plan:
        each.kv = None

    def counting(q, k, v, *arguments, **named):
        scores.append(q.size(-2) * k.size(-2))
        return head(q, k, v, *arguments, **named)

    q, k, v = numbers(9, 3, 2, batch.cu_seqlens[-1], 3)
    generate_ragged.head = counting
    try:
        out = batch.attend("a", q, k, v)
    finally:
        generate_ragged.head = head
    return {"shape and dtype": kind_of(out), "the output": out, "layers written": written,
            "scores that head computes": sum(scores)}
