"""
Prepacking: a row need not be a request. Pack several prompts into one row.

A branch off dynamic batching, which pads every prompt to the longest. What keeps requests apart is
the mask, not the row, so short prompts can share a row: each sees only itself, and counts its
positions from 0.

    padded (4, 6)        packed (2, 6)          mask of the second row
    a a a a a a          a a a a a a               b b b c c d
    . . . b b b          b b b c c d            b  x . . . . .
    . . . . c c                                 b  x x . . . .
    . . . . . d                                 b  x x x . . .
                                                c  . . . x . .
                                                c  . . . x x .
                                                d  . . . . . x

Choosing a row for each prompt is bin packing, with bins as large as the longest prompt. First fit
decreasing: take the prompts from the longest to the shortest, and put each into the first row that
has room. Attention unpacks the keys and values into each request's own cache, and decoding goes on
as in dynamic.

Better than dynamic: prefill has hardly any padding, if there are short prompts to fill the rows.
Wasted: decodes still copy and pad their pasts; and in a packed row, attention scores every prompt
against its neighbours, only to hide the result.
Ragged drops the rows, for decodes too; its varlen scores no neighbours.

    python -m beyond.prepacked [--pack dataset]      the same flags and the same check as a stage
"""
if __spec__ is None:
    raise SystemExit("start it in the folder above: python -m beyond.prepacked")

import torch

from generate_dynamic import Rectangle, admit, still_running
from generate_ragged import contained
from model import head, sample
from request import advance, prepare
from toolbox.trace import Trace
from toolbox.validate import at_least_1, one_of


def first_fit_decreasing(lengths, size):
    """Bins [[index, ...], ...], each with a total length of at most `size`."""
    bins = []
    room = []   # in each bin
    longest_first = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for i in longest_first:
        fits = [b for b in range(len(bins)) if lengths[i] <= room[b]]
        if fits:
            first = fits[0]
        else:
            first = len(bins)
            bins.append([])
            room.append(size)
        bins[first].append(i)
        room[first] -= lengths[i]
    return bins


class Packed:
    """
    Whole prompts in r rows of m slots, (r, m): m is the longest prompt's length, and r at most the
    number of prompts. Logits come in the plan's order.
    """

    def __init__(self, plan, device=None):
        self.plan = plan
        self.starts = [0] * len(plan)
        self.lay_out(device)

    def lay_out(self, device):
        """Sets tokens and positions (r, m), mask (r, 1, m, m), places, and which logits to take."""
        lengths = [n for _, n in self.plan]
        m = max(lengths)
        bins = first_fit_decreasing(lengths, m)
        tokens = torch.zeros(len(bins), m, dtype=torch.long)        # (r, m)
        positions = torch.zeros(len(bins), m, dtype=torch.long)
        owner = torch.full((len(bins), m), -1)                      # -1: a pad slot
        self.places = [None] * len(self.plan)                       # (row, first column, end)
        for row, members in enumerate(bins):
            first_request, _ = self.plan[members[0]]
            tokens[row] = first_request.pad
            end = 0
            for i in members:
                request, n = self.plan[i]
                first, end = end, end + n
                tokens[row, first:end] = torch.tensor(request.slice(0, n))
                positions[row, first:end] = torch.arange(n)
                owner[row, first:end] = i
                self.places[i] = (row, first, end)
        same = owner[:, :, None] == owner[:, None, :]               # (r, m, m): of one request
        no_pad = owner[:, None, :] >= 0                             # (r, 1, m)
        mask = same & no_pad
        self.tokens = tokens.to(device)                             # (r, m)
        self.positions = positions.to(device)                       # (r, m)
        self.mask = mask[:, None].to(device)   # (r, 1, m, m), not yet causal: Head adds that rule

        self.sampled = [request for request, _ in self.plan]        # whole prompts: all of them
        rows, _, ends = zip(*self.places)
        last = [end - 1 for end in ends]                            # the column of its last token
        self.wanted = (torch.tensor(rows, device=device), torch.tensor(last, device=device))

    def attend(self, layer, q, k, v):                               # (r, nh, m, hs)
        out = head(q, *contained(k, v), mask=self.mask)
        for (request, _), (row, first, end) in zip(self.plan, self.places):
            # each prompt into its own cache
            request.kv.write(layer, 0, k[row, :, first:end], v[row, :, first:end])
        return out

    def cost(self):
        r, m = self.tokens.shape
        keys = sum(n for _, n in self.plan)
        return {"score_entries": r * m * m, "padded_keys": r * m - keys}


def in_packing_order(waiting, step):
    """
    Requests that have arrived, in packing order; then the others. A short prompt may wait for ever
    if longer ones keep arriving: beyond/fairness.py has a bound against that.
    """
    arrived = [request for request in waiting if request.arrival <= step]
    lengths = [len(request.prompt) for request in arrived]
    bins = first_fit_decreasing(lengths, max(lengths, default=0))
    ordered = []
    for members in bins:
        ordered += [arrived[i] for i in members]
    return ordered + waiting[len(arrived):]


@torch.inference_mode()
def generate(model, requests, max_batch=8, pack="batch", on_token=None):
    """
    Runs `requests` as dynamic does. Returns the trace.

    pack: "batch" packs the prompts that have just been admitted. "dataset" also decides which to
          admit together: all arrived prompts are packed first, and admitted in the order of rows.
    """
    at_least_1(max_batch=max_batch)
    one_of("pack", pack, "batch", "dataset")
    requests = prepare(requests, model.config)
    trace = Trace(f"prepacked, {pack}", requests, model)
    waiting, running, step = requests, [], 0
    while waiting or running:
        # 1. requests that have arrived take free places
        if not running:
            step = max(step, waiting[0].arrival)
        if pack == "dataset":
            waiting = in_packing_order(waiting, step)
        waiting, running = admit(waiting, running, step, max_batch)
        # 2. up to two forward passes: one for the decodes, one for whole prompts
        decodes = [(request, 1) for request in running if request.generated]
        prompts = [(request, request.todo) for request in running if not request.generated]
        for layout, part in (Rectangle, decodes), (Packed, prompts):
            if not part:
                continue
            batch = layout(part, model.device)
            with trace.forward_pass(step, batch):
                logits = model(batch.tokens, batch.positions, batch.attend, batch.wanted)   # (R, V)
            # 3. one token for each request
            tokens = sample(logits, batch.sampled)
            advance(batch.plan, tokens)
            trace.record_tokens(step, batch.sampled, tokens, logits, on_token)
        # 4. finished requests leave, and their caches with them
        running = still_running(running)
        step += 1
    return trace


if __name__ == "__main__":
    from lab.run import main
    main(generate, __doc__)
