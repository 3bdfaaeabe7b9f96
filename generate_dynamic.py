"""
Stage 2: dynamic batching. The field calls it *continuous batching*: requests come and go each step.

A finished request leaves at once, and a waiting one takes its place: iteration-level scheduling, in
Orca's words. (NVIDIA's Triton Inference Server calls another thing "dynamic batching": it groups
queued requests.)

The batch is rebuilt at every step, so the cache can no longer belong to the batch: each request has
its own, and the layout `Rectangle` gathers them. Prompts and decodes differ in width, so a step has
up to two forward passes: one rectangle for the decodes and one for the newcomers' prompts.

    max_batch 2, C arrives at step 1:

    step      0   1   2   3   4   5   6
    A         P   d   d
    B         P   d   d   d   d   d   d       P prefill, d decode
    C             .   .   P   d   d           . waiting

Better than static batching: no finished rows, and no request waits for a whole batch.
Wasted: padding, as before. Copies: each layer copies all pasts into a rectangle, and Head copies
them once more, in front of the new keys. And a long prompt is prefilled in one piece, while every
running decode waits for it.
Next: chunked prefill cuts long prompts into chunks.
"""
import torch

from cache import KV
from model import head, sample
from request import advance, indices_due, prepare
from toolbox.trace import Trace
from toolbox.validate import at_least_1


class Rectangle:
    """
    Left-padded (B, T): one row per request, as wide as the one with the most new tokens. Each
    request keeps its own cache. These caches differ in length, too. So past keys are copied into a
    second rectangle, in front of the new keys. It is as wide as the longest past, P. In each layer,
    a request with p past and n new tokens has this row of keys,

        | . . . past past past | . . new new |
          P - p pads, p past     T - n pads, n new      S = P + T keys

    and the mask must hide the pads of *both* parts.
    """

    def __init__(self, plan, device=None):
        self.plan = plan
        self.starts = [request.computed for request, _ in plan]
        self.lay_out(device)

    def lay_out(self, device):
        """Sets tokens and positions (B, T), mask (B, 1, 1, P + T), P, and which logits to take."""
        B = len(self.plan)
        T = max(n for _, n in self.plan)
        P = max(self.starts)
        tokens, positions = [], []
        mask = torch.zeros(B, 1, 1, P + T, dtype=torch.bool)        # for all heads and queries
        for b, ((request, n), start) in enumerate(zip(self.plan, self.starts)):
            tokens.append([request.pad] * (T - n) + request.slice(start, start + n))
            positions.append([0] * (T - n) + [*range(start, start + n)])   # in its own sequence
            mask[b, ..., P - start:P] = True                        # its past
            mask[b, ..., P + T - n:] = True                         # its new tokens, not their pads
        self.tokens = torch.tensor(tokens, device=device)           # (B, T)
        self.positions = torch.tensor(positions, device=device)     # (B, T)
        self.mask = mask.to(device)
        self.P = P

        # In this stage all rows are due; from chunked on, an incomplete prompt is not.
        due = indices_due(self.plan)
        self.sampled = [self.plan[b][0] for b in due]
        # The last column of these rows. dtype: without it, an empty list makes floats.
        self.wanted = (torch.tensor(due, dtype=torch.long, device=device), -1)

    def attend(self, layer, q, k, v):                               # (B, nh, T, hs)
        """Gathers the pasts, attends, and puts the new keys and values into their caches."""
        T, P = k.size(-2), self.P
        # Zeros, for pads: their weight is 0, but 0 times an uninitialised NaN is NaN.
        past_k = k.new_zeros(*k.shape[:-2], P, k.size(-1))          # (B, nh, P, hs)
        past_v = v.new_zeros(*v.shape[:-2], P, v.size(-1))
        for b, ((request, _), start) in enumerate(zip(self.plan, self.starts)):
            if start > 0:                                           # a newcomer has no past
                own_k, own_v = request.kv.read(layer, start)        # (nh, start, hs)
                past_k[b, :, P - start:] = own_k
                past_v[b, :, P - start:] = own_v
        # The same holds for the new columns' pads: their values may have overflowed.
        hidden = ~self.mask[..., P:].transpose(-2, -1)              # (B, 1, T, 1)
        out = head(q, k, v.masked_fill(hidden, 0.0), past_k, past_v, self.mask)
        for b, ((request, n), start) in enumerate(zip(self.plan, self.starts)):
            # each row without its padding
            request.kv.write(layer, start, k[b, :, T - n:], v[b, :, T - n:])
        return out

    def cost(self):
        B, T = self.tokens.shape
        P = self.P
        keys = sum(start + n for (_, n), start in zip(self.plan, self.starts))
        # Copied: the pasts into their rectangle; then, by Head's torch.cat, pasts and new keys.
        copied = B * P + B * (P + T)
        return {"score_entries": B * T * (P + T), "padded_keys": B * (P + T) - keys,
                "copied_bytes": copied * self.plan[0][0].kv.bytes_per_token}


def admit(waiting, running, step, max_batch):
    """Arrived requests get a cache and take free places, in order. Returns (waiting, running)."""
    # `waiting` is sorted by arrival, so those that have arrived are its first ones.
    arrived = [request for request in waiting if request.arrival <= step]
    admitted = arrived[:max_batch - len(running)]
    for request in admitted:
        request.kv = KV(request.kv_capacity)
    return waiting[len(admitted):], running + admitted


def still_running(running):
    """Finished requests let go of their caches. Returns the others."""
    for request in running:
        if request.finished:
            request.kv = None
    return [request for request in running if not request.finished]


@torch.inference_mode()
def generate(model, requests, max_batch=8, on_token=None):
    """Runs `requests` as unbatched does, at most max_batch at a time. Returns the trace."""
    at_least_1(max_batch=max_batch)
    requests = prepare(requests, model.config)
    trace = Trace("dynamic", requests, model)
    waiting, running, step = requests, [], 0
    while waiting or running:
        # 1. requests that have arrived take free places
        if not running:
            step = max(step, waiting[0].arrival)
        waiting, running = admit(waiting, running, step, max_batch)
        # 2. up to two forward passes: one for the decodes, one for whole prompts
        decodes = [(request, 1) for request in running if request.generated]
        prompts = [(request, request.todo) for request in running if not request.generated]
        for part in decodes, prompts:
            if not part:
                continue
            batch = Rectangle(part, model.device)
            with trace.forward_pass(step, batch):
                logits = model(batch.tokens, batch.positions, batch.attend, batch.wanted)   # (R, V)
            # 3. one token for each row
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
