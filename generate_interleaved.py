"""
Stage 4: prefill and decode interleaved. One forward pass a step, decodes and chunks in one rectangle.

The model does not care whether a row decodes or prefills: it sees tokens and positions. So both go into the
same left-padded rectangle, and the weights are read once a step (claim I3). The example of the source:
A, B and C decode, D brings a chunk of 8 (claim I1):

    A   .  .  .  .  .  .  .  22         positions
    B   .  .  .  .  .  .  .  15         11 tokens, 21 pad slots
    C   .  .  .  .  .  .  .   9
    D   0  1  2  3  4  5  6   7

Trap: the pads of a decode row are *new* slots. Whoever masks only the padding of the past lets A attend to
seven of them. The source does (claim I8); the outputs are wrong and nothing else tells.

Better than stage 3: one forward pass where a step with decodes and chunks took two.
Wasted: the right pass in the wrong shape. One chunk of n among B rows makes (B - 1)(n - 1) pad slots (claim H9).
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
    trace = Trace("interleaved", requests, scheduler.counts)
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
            batch = Rectangle(plan, model.device)
            with trace.forward_pass(step, batch):
                logits = model(batch.tokens, batch.positions, batch.attend, batch.rows)               # (R, V)
            # 3. one token for each row that has nothing more to compute
            tokens = sample(logits, batch.sampled)
            scheduler.report(plan, tokens)
            trace.record_tokens(step, batch.sampled, tokens, logits, on_token)
        step += 1
    return trace


if __name__ == "__main__":
    from toolbox.cli import main
    main(generate, __doc__)
