"""Set 4: runs one function on a case, and returns what it gives and changes."""
import torch

import request
from generate_dynamic import Rectangle
from lab.checks.probes import devices_of, fill, kept, kind_of, numbers, plan_of, requests_of, slots_of


def lay_out(show, rows):
    """show: "tokens" and positions, the "mask", or who is "sampled"."""
    plan = plan_of(rows)
    before = [(dict(vars(each)), n) for each, n in plan]
    batch = Rectangle(plan)
    found = {"requests and plan are unchanged": before == [
        (vars(each), n) for each, n in plan]}
    if show == "tokens":
        for name in "tokens", "positions":
            value = getattr(batch, name, "not set")
            found |= {name: value, f"shape and dtype of {name}": kind_of(value)}
        return {**found, "P": getattr(batch, "P", "not set")}
    if show == "sampled":
        return {**found, "sampled": batch.sampled,
                "slots that wanted reads": slots_of(batch, batch.wanted)}
    mask, (B, T) = getattr(batch, "mask", None), batch.tokens.shape
    fits = torch.is_tensor(mask) and mask.dtype == torch.bool and mask.dim() == 4 and (
        mask.size(0) in (1, B) and mask.size(1) == 1 and mask.size(2) in (1, T))
    found["shape and dtype of the mask"] = "(B, 1, 1, S) bool" if fits else kind_of(mask)
    if not fits:
        return found
    S = mask.size(-1)
    see = torch.ones(T, S, dtype=torch.bool).tril(S - T) & mask.expand(B, 1, T, S)   # as Head does
    for b, (each, n) in enumerate(plan):
        for t in range(T - n, T):
            found[f"{each.name}'s new token {t - T + n} sees the columns"] = see[b, 0, t].nonzero().flatten()
    return found


def layout_on_a_device(names):
    requests = requests_of([{"prompt": 3}, {"prompt": 4}])
    return devices_of(lambda device: Rectangle([(each, each.todo) for each in requests], device), names)


def attend(rows, P, T, mask):
    """With random q, k, v: the output in slots with a token, and what is in the caches then."""
    class LaidOut(Rectangle):   # as parts a, b and d have to set it
        def lay_out(self, device):
            self.tokens = self.positions = torch.zeros(len(rows), T, dtype=torch.long)
            self.P, self.mask = P, torch.tensor(mask)[:, None, None]

    plan = plan_of(rows)
    for i, (each, _) in enumerate(plan):
        fill(each, i)
    batch = LaidOut(plan)
    q, k, v = numbers(9, 3, len(plan), 2, T, 3)
    before = q.clone(), k.clone(), v.clone()
    torch.use_deterministic_algorithms(True, warn_only=True)   # then empty tensors hold NaN
    out = batch.attend("a", q, k, v)
    found = {"shape and dtype": kind_of(out), "q, k and v are unchanged": all(
        torch.equal(a, b) for a, b in zip(before, (q, k, v)))}
    if torch.is_tensor(out) and out.shape == q.shape:
        found |= {f"the output for {each.name}": out[b, :, T - n:] for b, (each, n) in enumerate(plan)}
    return {**found, **{f"the cache of {each.name}": kept(each) for each, _ in plan}}


def indices_due(plan):
    pairs = plan_of(plan)
    before = [(each, each.computed, list(each.generated), n) for each, n in pairs]
    due = request.indices_due(pairs)
    unchanged = before == [(each, each.computed, each.generated, n) for each, n in pairs]
    return due if unchanged else "it changes the plan or its requests"
