"""
Stage 6: ragged continuous batching. Drop the rows altogether: one flat stream of tokens.

All padding comes from the batch axis, so it goes. The tokens of all requests stand in one line, (N,), and
`cu_seqlens` says where each request's begin. Every token-wise layer is content with that; only attention must
know the boundaries, and it does so in one of two ways (claims H11, R3, R4):

    "mask":    scores between all tokens and all keys, with a block-diagonal mask: (sum of n) x (sum of S)
    "varlen":  each request's tokens against its own keys, other requests' are never computed: sum of (n x S)

    cu_seqlens = [0, 1, 2, 3, 11]       A  B  C  D  D  D  D  D  D  D  D      11 tokens, 0 pad slots

Better than stage 4: every slot computed is a token somebody needs.
Wasted: nothing but attention's own cost (within a chunk, scores above the diagonal are computed and masked).
"""
import torch

from cache import Flat
from model import sample
from scheduler import Scheduler, prepare
from toolbox.trace import Trace


@torch.inference_mode()
def generate(model, requests, max_batch=8, token_budget=64, max_kv_tokens=None, policy="fcfs", admission="reserve", page_size=16, prefix_cache=None,
             attention="varlen", on_token=None):
    """
    Runs `requests` and fills them in place. Returns the trace.

    max_batch:     requests that run at the same time
    token_budget:  tokens of a step
    max_kv_tokens: tokens that all caches together may hold; None: no limit
    policy:        who of the waiting goes first: "fcfs", "sjf" or "priority"
    admission:     "reserve" all that a request can need, or "grow" by pages of page_size tokens and preempt
    prefix_cache:  a cache.PrefixCache, to reuse what prompts have in common; None: no reuse
    attention:     "varlen" skips the keys of other requests, "mask" computes and hides them
    on_token:      on_token(request, token, logits) is called as each token appears
    """
    requests = prepare(requests, model.config)
    scheduler = Scheduler(max_batch, token_budget, max_kv_tokens, policy, admission, page_size, prefix_cache)
    trace = Trace(f"ragged, {attention}", requests, scheduler.counts)
    if prefix_cache is not None:
        prefix_cache.bind(model)
    for request in requests:
        scheduler.add(request)
    step = 0
    while scheduler.busy:
        # 1. who has arrived may get a share of this step
        step = scheduler.next_step(step)
        plan = scheduler.schedule(step)
        # 2. one forward pass for decodes and chunks together
        if plan:   # all may have been cancelled
            batch = Flat(plan, model.device, attention, model.varlen)
            with trace.forward_pass(step, batch):
                logits = model(batch.tokens, batch.positions, batch.attend, batch.rows)               # (R, V)
            # 3. one token for each request that has nothing more to compute
            tokens = sample(logits, batch.sampled)
            scheduler.report(plan, tokens)
            trace.record_tokens(step, batch.sampled, tokens, logits, on_token)
        step += 1
    return trace


if __name__ == "__main__":
    from toolbox.cli import main
    main(generate, __doc__)
