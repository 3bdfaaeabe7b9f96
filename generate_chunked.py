"""
Stage 3: chunked prefill. No step computes more than `token_budget` tokens, and decodes come first.

A prompt need not be prefilled in one piece: its keys and values are in the cache, so the next piece can go
on where the last one stopped (claim H6: the same logits for any split). The Scheduler hands out a budget of
tokens a step: one for each decode, and what is left to the prompts in chunks.

    token_budget 4, A and B decode, C brings a prompt of 7:

    step      0      1      2      3      4
    A         d      d      d      d      d
    B         d      d      d      d      d
    C         c0 c1  c2 c3  c4 c5  c6     d        no token for C before step 3: a partial prefill has none

Better than stage 2: a long prompt no longer stalls the decodes; time between tokens stays even.
Wasted: two forward passes in a step that has both decodes and chunks, so the weights are read twice.
"""
import torch

from cache import Rectangle
from model import sample
from scheduler import Scheduler, prepare
from toolbox.trace import Trace


@torch.inference_mode()
def generate(model, requests, max_batch=8, token_budget=64, max_kv_tokens=None, policy="fcfs", admission="reserve", page_size=16, prefix_cache=None,
             on_token=None):
    """
    Runs `requests` and fills them in place. Returns the trace.

    max_batch:     requests that run at the same time
    token_budget:  useful tokens of a step; a rectangle adds its pads
    max_kv_tokens: tokens that all caches together may hold; None: no limit
    policy:        who of the waiting goes first: "fcfs", "sjf" or "priority"
    admission:     "reserve" all that a request can need, or "grow" by pages of page_size tokens and preempt
    prefix_cache:  a cache.PrefixCache, to reuse what prompts have in common; None: no reuse
    on_token:      on_token(request, token, logits) is called as each token appears
    """
    requests = prepare(requests, model.config)
    scheduler = Scheduler(max_batch, token_budget, max_kv_tokens, policy, admission, page_size, prefix_cache)
    trace = Trace("chunked", requests, scheduler.counts)
    if prefix_cache is not None:
        prefix_cache.bind(model)
    for request in requests:
        scheduler.add(request)
    step = 0
    while scheduler.busy:
        # 1. who has arrived may get a share of this step
        step = scheduler.next_step(step)
        plan = scheduler.schedule(step)
        # 2. two forward passes, one for the decodes, one for the chunks
        decodes = [(request, n) for request, n in plan if request.todo == 1]
        chunks = [(request, n) for request, n in plan if request.todo > 1]
        for part in decodes, chunks:
            part = [(request, n) for request, n in part if not request.finished]   # cancelled during the first pass
            if not part:
                continue
            batch = Rectangle(part, model.device)
            with trace.forward_pass(step, batch):
                logits = model(batch.tokens, batch.positions, batch.attend, batch.rows)               # (R, V)
            # 3. one token for each row that has nothing more to compute
            tokens = sample(logits, batch.sampled)
            scheduler.report(part, tokens)
            trace.record_tokens(step, batch.sampled, tokens, logits, on_token)
        step += 1
    return trace


if __name__ == "__main__":
    from toolbox.cli import main
    main(generate, __doc__)
