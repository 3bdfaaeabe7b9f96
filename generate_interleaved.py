"""
Stage 4: prefill and decode interleaved. One forward pass a step, for decodes and chunks together.

The model does not care whether a row decodes or prefills: it sees tokens and positions. So both go
into the same left-padded rectangle, and the weights are read once a step. The field calls this a
*mixed batch*. (In Sarathi's words, the decodes piggyback on a chunk.) A, B and C decode, D brings a
chunk of 8:

    A   .  .  .  .  .  .  .  22         positions
    B   .  .  .  .  .  .  .  15         11 tokens, 21 pad slots
    C   .  .  .  .  .  .  .   9
    D   0  1  2  3  4  5  6   7

Trap: the pads of a decode row stand among the *new* keys, where a mask of the past does not hide
them. That is the bug of a published tutorial (source I in docs/sources.md): A sees seven pads.

    mask[b, ..., P + T - n:] = True      Rectangle, in generate_dynamic.py
    mask[b, ..., P:] = True              published

Nothing raises an error. Only a comparison with the same request, run alone, reveals it.

Better than chunked: one forward pass where a step with decodes and chunks took two.
Wasted: copies, as before; and many more pads. One chunk of n tokens and d decodes make d x (n - 1)
pad slots: 3 x 7 = 21 above. Pads are computed, too: with long prompts beside decodes, interleaved
is slower than chunked (W1 in docs/measurements.md, on two CPU cores).
Next: ragged keeps the one pass and drops the rows.
"""
import torch

from generate_dynamic import Rectangle
from model import sample
from request import prepare
from scheduler import Scheduler
from toolbox.trace import Trace


@torch.inference_mode()
def generate(model, requests, max_batch=8, token_budget=64, max_kv_tokens=None, on_token=None):
    """Runs `requests` as chunked does, with the same limits. Returns the trace."""
    requests = prepare(requests, model.config)
    scheduler = Scheduler(max_batch, token_budget, max_kv_tokens)
    trace = Trace("interleaved", requests, model)
    for request in requests:
        scheduler.add(request)
    step = 0
    while scheduler.busy:
        # 1. which requests compute how many tokens in this step
        step = scheduler.next_step(step)
        plan = scheduler.schedule(step)
        # 2. one forward pass for decodes and chunks together
        batch = Rectangle(plan, model.device)
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
