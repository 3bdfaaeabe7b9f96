"""
Stage 5: ragged continuous batching. Drop the rows altogether: one flat stream of tokens.

All padding comes from the batch axis, so that axis goes. The tokens of all requests form one stream
(N,). `cu_seqlens`, the cumulative sequence lengths, says where each request's tokens begin. Every
token-wise layer takes a stream as it is. Only attention must know the boundaries, in one of two
ways:

    "varlen":  the n tokens of request i attend to its own S_i keys, past and new: n x S_i scores
    "mask":    all N tokens attend to the keys of all requests. Here S is the sum of all S_i, and
               N x S scores are computed. A block-diagonal mask hides those between two requests

    cu_seqlens = [0, 1, 2, 3, 11]       A  B  C  D  D  D  D  D  D  D  D      11 tokens, no pads

This is Orca's *selective batching* (docs/sources.md).

Better than interleaved: every slot computed is a token that some request needs.
Wasted: Python calls attention once for each request and layer (on a GPU, one kernel does it); and
room in memory is reserved for answers that may never come.
Next: paged keeps keys and values in pages.
"""
from itertools import accumulate, pairwise

import torch

from model import head, sample
from request import indices_due, prepare
from scheduler import Scheduler
from toolbox.trace import Trace
from toolbox.validate import one_of


class Flat:
    """
    Ragged (N,): all new tokens of all requests in one stream, with no batch axis and so no padding.
    Request i owns tokens cu_seqlens[i] to cu_seqlens[i + 1] - 1. A and B decode, D computes 3
    tokens after the 2 in its cache:

                keys   A A A A   B B   D D D D D
            A          x x x x   . .   . . . . .       "mask" computes every entry and
            B          . . . .   x x   . . . . .       hides the dots; "varlen" computes
            D          . . . .   . .   x x x . .       only the three blocks; on a GPU,
            D          . . . .   . .   x x x x .       FlashAttention's kernel does.
            D          . . . .   . .   x x x x x
    """

    def __init__(self, plan, device=None, attention="varlen"):
        one_of("attention", attention, "mask", "varlen")
        self.plan = plan
        self.attention = attention
        self.starts = [request.computed for request, _ in plan]
        self.ends = [start + n for (_, n), start in zip(plan, self.starts)]   # of its keys
        self.cu_seqlens = [0, *accumulate(n for _, n in plan)]
        self.lay_out(device)

    def lay_out(self, device):
        """Sets tokens and positions (N,), the mask if needed, and which logits to take."""
        tokens, positions = [], []
        for (request, _), start, end in zip(self.plan, self.starts, self.ends):
            tokens += request.slice(start, end)
            positions += range(start, end)
        self.tokens = torch.tensor(tokens, device=device)                       # (N,)
        self.positions = torch.tensor(positions, device=device)                 # (N,)
        if self.attention == "mask":
            self.mask = self.block_diagonal().to(device)                        # (N, S)
        due = indices_due(self.plan)
        self.sampled = [self.plan[i][0] for i in due]
        last = [self.cu_seqlens[i + 1] - 1 for i in due]
        self.wanted = torch.tensor(last, dtype=torch.long, device=device)       # (R,)

    def block_diagonal(self):
        """(N, S): a token sees the keys of its own request, up to its own position."""
        blocks = []
        for (_, n), start, end in zip(self.plan, self.starts, self.ends):
            blocks.append(torch.ones(n, end, dtype=torch.bool).tril(start))     # (n, S_i)
        return torch.block_diag(*blocks).bool()

    def attend(self, layer, q, k, v):                                           # (nh, N, hs)
        """Each request's new keys and values go into its own cache; then one of the two ways."""
        caches = []
        own_tokens = pairwise(self.cu_seqlens)   # of each request: from a to b - 1
        for (request, _), start, end, (a, b) in zip(self.plan, self.starts, self.ends, own_tokens):
            request.kv.write(layer, start, k[:, a:b], v[:, a:b])
            caches.append(request.kv.read(layer, end))                          # (nh, S_i, hs)
        if self.attention == "mask":
            return self.attend_masked(q, caches)
        return self.attend_varlen(q, caches)

    def attend_masked(self, q, caches):
        """The way of "mask": computes all N x S scores, and hides most of them."""
        keys = torch.cat([k for k, _ in caches], dim=-2)                        # (nh, S, hs)
        values = torch.cat([v for _, v in caches], dim=-2)
        # Head also applies its causal rule, to the whole stream as if it were one sequence: token t
        # sees the keys 0 to t + P, where P counts the past keys of all requests. That hides none
        # that it needs. Before its own key stand the keys of t new tokens and at most P past ones,
        # so its own key is at t + P or before.
        return head(q, *contained(keys, values), mask=self.mask)

    def attend_varlen(self, q, caches):
        """The way of "varlen": computes only the diagonal blocks."""
        out = []
        for (keys, values), (a, b) in zip(caches, pairwise(self.cu_seqlens)):
            out.append(head(q[..., a:b, :], keys, values))                      # (nh, n, hs)
        return torch.cat(out, dim=-2)

    def cost(self):
        if self.attention == "varlen":
            return {"score_entries": sum(n * end for (_, n), end in zip(self.plan, self.ends))}
        request, _ = self.plan[0]
        copied = sum(self.ends) * request.kv.bytes_per_token   # all keys are concatenated
        return {"score_entries": self.mask.numel(), "copied_bytes": copied}


def contained(k, v):
    """
    Keys and values, changed so that one request's NaN stays its own. A hidden value has weight 0,
    but 0 times NaN is NaN. So a value that is not finite becomes zeros, and its key becomes NaN.
    Head sets hidden scores to -inf, even a NaN. So the NaN reaches only tokens that see the key.
    """
    lost = ~v.isfinite().all(dim=-1, keepdim=True)                              # (..., S, 1)
    return k.masked_fill(lost, torch.nan), v.masked_fill(lost, 0.0)


@torch.inference_mode()
def generate(model, requests, max_batch=8, token_budget=64, max_kv_tokens=None,
             attention="varlen", on_token=None):
    """Runs `requests` as interleaved does; attention: "varlen" or "mask". Returns the trace."""
    requests = prepare(requests, model.config)
    scheduler = Scheduler(max_batch, token_budget, max_kv_tokens)
    trace = Trace(f"ragged, {attention}", requests, model)
    for request in requests:
        scheduler.add(request)
    step = 0
    while scheduler.busy:
        # 1. which requests compute how many tokens in this step
        step = scheduler.next_step(step)
        plan = scheduler.schedule(step)
        # 2. one forward pass for decodes and chunks together
        batch = Flat(plan, model.device, attention)
        with trace.forward_pass(step, batch):
            logits = model(batch.tokens, batch.positions, batch.attend, batch.wanted)   # (R, V)
        # 3. one token for each request that has nothing more to compute
        tokens = sample(logits, batch.sampled)
        scheduler.update(plan, tokens)
        trace.record_tokens(step, batch.sampled, tokens, logits, on_token)
        step += 1
    return trace


if __name__ == "__main__":
    from lab.run import main
    main(generate, __doc__)
