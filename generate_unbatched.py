"""
Stage 0: one request at a time. Every other stage must give exactly its tokens.

Without a cache, each new token runs the whole sequence through the model again. With a cache
(cache.py) only the new token runs through the model, and reads the keys and values of the others.

    without        with
    # . . .
    # # . .                        rows: tokens computed in this step
    # # # .                        columns: keys (# seen; . computed, then masked)
    # # # #        # # # #

Wasted: all weights are read from memory to compute a single token. This is why engines batch. A
step of GPT-2 reads 124 million weights once. Each row (a token) takes one multiply-add per weight:

                                                     read      multiply, 1 row      32 rows
    two CPU cores    20 GB/s, 0.15 TFLOP/s, fp32    25 ms             1.7 ms         53 ms
    an A100         2039 GB/s, 312 TFLOP/s, fp16     0.12 ms          0.001 ms        0.03 ms

A pass takes at least the longer of the two. By this bound 32 rows take 2.1 times as long as one on
the CPU, and no longer than one on the GPU, where reading dominates up to 150 rows. (Real passes are
slower than the bound: measured on such a CPU, one row took 53 ms and 32 rows 183 ms, 3.4 times as
long. The benchmark in docs/measurements.md ran on a faster CPU: 44 GB/s and 0.467 TFLOP/s.)

The bound counts weights only. Each row also reads its own keys and values, which a batch cannot
share. If each row has 210 tokens in its cache, 32 rows take 1.9 times as long as one on the A100;
with 1,000 tokens, 5.0 times. The last two stages, paged and prefix, are about keys and values.
Next: static batching computes a token for many requests from one read of the weights.

Every script checks its answers at the end (lab/checks/check.py). For each request, one forward pass
without a cache computes the prompt and the answer. By the causal rule, it yields the logits before
each token of the answer. With the request's own random numbers, sampling from these logits must
give the same token, unless rounding decides between two (a *near-tie*, counted apart). The stage's
logits must agree with them, in float32 to 1e-4 of the largest.
"""
import torch

from cache import KV
from model import head, sample
from request import advance, prepare
from toolbox.trace import Trace


class Alone:
    """
    (1, T): the new tokens of one request; without a cache, all of its tokens every time.

    This is the first *layout*. All layouts have the same parts:

    plan, starts       which requests compute how many tokens, and from which position on
    tokens, positions  for the model: ids and places, in the shape of this layout
    wanted             for the model: an index, the tokens whose logits are wanted
    sampled            for `sample`: the requests that those logits belong to, in the same order
    lay_out            sets tokens, positions, wanted and sampled from the plan
    attend             for the model, once in each layer: which keys a token sees, from which cache
    cost               for the trace, after the pass: what attention computed and copied

    The *trace* is the record of a run, pass by pass: report, pictures and tests are made from it.
    """

    def __init__(self, request, device=None):
        self.kv = request.kv                                        # None without a cache
        self.plan = [(request, request.todo)]
        self.starts = [request.computed]
        self.lay_out(device)

    def lay_out(self, device):
        """Sets start, end, tokens and positions (1, T), and which logits are wanted."""
        [(request, n)] = self.plan
        self.start = request.computed
        self.end = request.computed + n
        tokens = request.slice(self.start, self.end)
        positions = range(self.start, self.end)
        self.tokens = torch.tensor([tokens], device=device)         # (1, T)
        self.positions = torch.tensor([positions], device=device)   # (1, T)
        self.sampled = [request]                                    # all its todo: it is due
        self.wanted = (slice(None), -1)                             # the last token's logits

    def attend(self, layer, q, k, v):                               # (1, nh, T, hs)
        if self.kv is not None:
            self.kv.write(layer, self.start, k, v)
            k, v = self.kv.read(layer, self.end)                    # (1, nh, S, hs)
        return head(q, k, v)

    def cost(self):
        return {"score_entries": self.tokens.numel() * self.end}


@torch.inference_mode()
def generate(model, requests, use_cache=True, on_token=None):
    """
    Runs `requests` one after another, by arrival, and fills them in place. Returns the trace.

    use_cache: False computes every token again at every step; the result is the same
    on_token:  on_token(request, token, logits) is called as each token appears
    """
    requests = prepare(requests, model.config)
    trace = Trace("unbatched" if use_cache else "unbatched, no cache", requests, model)
    step = 0
    for request in requests:
        step = max(step, request.arrival)
        request.kv = KV(request.kv_capacity) if use_cache else None
        while not request.finished:
            # 1. the batch is this one request
            batch = Alone(request, model.device)
            # 2. one forward pass
            with trace.forward_pass(step, batch):
                logits = model(batch.tokens, batch.positions, batch.attend, batch.wanted)   # (1, V)
            # 3. one token; without a cache, the next step computes all tokens again
            tokens = sample(logits, batch.sampled)
            advance(batch.plan, tokens)
            if not use_cache:
                request.computed = 0
            trace.record_tokens(step, batch.sampled, tokens, logits, on_token)
            step += 1
        request.kv = None
    return trace


if __name__ == "__main__":
    from lab.run import main
    main(generate, __doc__)
