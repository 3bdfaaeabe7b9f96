"""Set 4: runs one function on a case, and returns what it gives and changes."""
import torch
from kit.probes import (
    attended,
    changes_of,
    devices_of,
    facts_of,
    fill,
    layout_of,
    plan_of,
)

import request
from generate_dynamic import Rectangle


def lay_out(show, rows):
    """show: "tokens" and positions, the "mask", or which logits are "wanted"."""
    plan = plan_of(rows)
    requests = [each for each, _ in plan]
    before = facts_of(requests)
    names = ("tokens", "positions", "P") if show == "tokens" else (show,)
    return {**layout_of(Rectangle(plan), *names), **changes_of(requests, before)}


def layout_on_a_device(names):
    plan = plan_of([{"prompt": 3}, {"prompt": 4}])
    return devices_of(lambda device: Rectangle(plan, device), *names)


def attend(rows, P, T, mask):
    class LaidOut(Rectangle):   # as parts a, b and d have to set it
        def lay_out(self, device):
            self.tokens = self.positions = torch.zeros(len(rows), T, dtype=torch.long)
            self.P, self.mask = P, torch.tensor(mask)[:, None, None]

    plan = plan_of(rows)
    fill(plan)
    return attended(LaidOut(plan))


def indices_due(plan):
    pairs = plan_of(plan)
    requests = [each for each, _ in pairs]
    before = facts_of(requests)
    return {"it returns": request.indices_due(pairs), **changes_of(requests, before)}
