"""
Stage 5: prepacking. A row need not be a request: pack several prompts into one row.

Stage 2 pads every prompt to the longest. But what keeps requests apart is the mask, not the row. So short
prompts share a row: each sees itself alone, and counts its positions from 0 (claims P2, P3).

    padded (4, 6)        packed (2, 6)          mask of the second row
    a a a a a a          a a a a a a            b  x . . . . .
    . . . b b b          b b b c c d            b  x x . . . .
    . . . . c c                                 b  x x x . . .
    . . . . . d                                 c  . . . x . .
                                                c  . . . x x .
                                                d  . . . . . x

Which prompt goes into which row is bin packing, for bins as large as the longest prompt (claim P1). First fit decreasing:
take the prompts from the longest to the shortest, and put each into the first row that has room. Afterwards the keys
and values are unpacked into each request's own cache (claim P4), and decoding goes on as in stage 2.

Better than stage 2: prefill has hardly any padding, if lengths differ.
Wasted: decode is still padded; and attention within a packed row scores every prompt against its neighbours, to hide it.
"""
import torch

from cache import Rectangle, allocate
from model import Head, sample
from scheduler import at_least_1, prepare
from toolbox.trace import Trace

head = Head()


def first_fit_decreasing(lengths, size):
    """Bins [[index, ...], ...], each of a total length of at most `size`. The plain loop; a search tree over the rooms makes it O(k log k)."""
    bins, room = [], []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for b in range(len(bins)):
            if lengths[i] <= room[b]:
                break
        else:
            b = len(bins)
            bins.append([])
            room.append(size)
        bins[b].append(i)
        room[b] -= lengths[i]
    return bins


class Packed:
    """Whole prompts in rows of the longest one's length, (r, m), r rows for k >= r prompts. The results come back in the plan's order."""

    def __init__(self, plan, device=None):
        self.copied_bytes = allocate(plan)
        self.plan, self.starts, self.finished = plan, [0] * len(plan), []
        lengths = [n for _, n in plan]
        m = max(lengths)
        bins = first_fit_decreasing(lengths, m)

        tokens = torch.zeros(len(bins), m, dtype=torch.long)
        positions = torch.zeros(len(bins), m, dtype=torch.long)
        owner = torch.full((len(bins), m), -1)                     # whose slot is this? -1: nobody's
        self.places = [None] * len(plan)                           # (row, first column, end), for each of the plan
        for row, members in enumerate(bins):
            first = 0
            for i in members:
                request, end = plan[i][0], first + lengths[i]
                tokens[row, first:end] = torch.tensor(request.prompt)
                positions[row, first:end] = torch.arange(lengths[i])
                owner[row, first:end] = i
                self.places[i] = (row, first, end)
                first = end
        mask = (owner[:, :, None] == owner[:, None, :]) & (owner[:, None, :] >= 0)
        self.tokens, self.positions, self.mask = tokens.to(device), positions.to(device), mask[:, None].to(device)   # mask (r, 1, m, m)

        self.sampled = [request for request, _ in plan]
        self.rows = (torch.tensor([row for row, _, _ in self.places], device=device),
                     torch.tensor([end - 1 for _, _, end in self.places], device=device))
        self.padded_keys = tokens.numel() - sum(lengths)
        self.score_entries = len(bins) * m * m

    def attend(self, layer, q, k, v):                                                                 # (r, nh, m, hs)
        out, _, _ = head(q, k, v, mask=self.mask)
        for (request, _), (row, first, end) in zip(self.plan, self.places):
            request.kv.write(layer, 0, k[row, :, first:end], v[row, :, first:end])                    # unpack
        return out


@torch.inference_mode()
def generate(model, requests, max_batch=8, pack="batch", on_token=None):
    """
    Runs `requests` and fills them in place. Returns the trace.

    max_batch: requests that run at the same time
    pack:      "batch" packs the prompts that have just been admitted; "dataset" also chooses whom to admit together: all who
               wait are packed first, and come in row by row
    on_token:  on_token(request, token, logits) is called as each token appears
    """
    at_least_1(max_batch=max_batch)
    if pack not in ("batch", "dataset"):
        raise ValueError(f"pack must be 'batch' or 'dataset', not {pack!r}")
    requests = prepare(requests, model.config)
    trace = Trace(f"prepacked, {pack}", requests)
    waiting, running, step = requests, [], 0
    while running or (waiting := [request for request in waiting if not request.finished]):
        # 1. who has arrived takes a free place
        if not running:
            step = max(step, waiting[0].arrival)
        arrived = [request for request in waiting if request.arrival <= step]
        if pack == "dataset" and arrived and len(running) < max_batch:
            lengths = [len(request.prompt) for request in arrived]
            arrived = [arrived[i] for members in first_fit_decreasing(lengths, max(lengths)) for i in members]
        admitted = arrived[:max_batch - len(running)]
        running += admitted
        waiting = [request for request in waiting if request not in admitted]
        # 2. two forward passes, one for the decodes, one for whole prompts
        decodes = [(request, 1) for request in running if request.generated]
        prompts = [(request, len(request.prompt)) for request in running if not request.generated]
        for layout, part in (Rectangle, decodes), (Packed, prompts):
            part = [(request, n) for request, n in part if not request.finished]   # cancelled during the first pass
            if not part:
                continue
            batch = layout(part, model.device)
            with trace.forward_pass(step, batch):
                logits = model(batch.tokens, batch.positions, batch.attend, batch.rows)               # (R, V)
            # 3. one token for each row
            tokens = sample(logits, batch.sampled)
            for (request, n), token in zip(batch.plan, tokens):
                request.computed += n
                request.append(token)
            trace.record_tokens(step, batch.sampled, tokens, logits, on_token)
        # 4. who is finished leaves, and takes its cache along
        finished = [request for request in running if request.finished]
        for request in finished:
            request.kv = None
        running = [request for request in running if request not in finished]
        step += 1
    return trace


if __name__ == "__main__":
    from toolbox.cli import main
    main(generate, __doc__)
