"""
Stage 3: chunked prefill. No step computes more than `token_budget` tokens; no decode waits.

A prompt need not be prefilled in one piece. The keys and values of its first chunk stay in the
cache, so the next chunk goes on from there, with the same logits (Sarathi's idea). At each step the
Scheduler shares out a budget of tokens: one for each decode, and the rest for prompts, in chunks.

    token_budget 4, A and B decode, C brings a prompt of 7:

    step      0      1      2      3      4
    A         d      d      d      d      d
    B         d      d      d      d      d
    C         c0 c1  c2 c3  c4 c5  c6     d        no token for C before step 3: a partial
                                                   prefill yields none

Better than dynamic: a long prompt slows several steps a little instead of stalling one step.
Wasted: padding and copies, as before; and two forward passes in a step with decodes and chunks, so
the weights are read twice.
Next: interleaved makes one pass of the two.
"""
import torch

from generate_dynamic import Rectangle
from model import sample
from request import prepare
from scheduler import Scheduler
from toolbox.trace import Trace


@torch.inference_mode()
def generate(model, requests, max_batch=8, token_budget=64, max_kv_tokens=None, on_token=None):
    """
    Runs `requests` as dynamic does, with two more limits. Returns the trace.

    token_budget:  tokens computed in a step; a rectangle's pads are not counted
    max_kv_tokens: cache room that running requests may reserve, in tokens; None: no limit
    """
    requests = prepare(requests, model.config)
    scheduler = Scheduler(max_batch, token_budget, max_kv_tokens)
    trace = Trace("chunked", requests, model)
    for request in requests:
        scheduler.add(request)
    step = 0
    while scheduler.busy:
        # 1. which requests compute how many tokens in this step
        step = scheduler.next_step(step)
        plan = scheduler.schedule(step)
        # 2. up to two passes: one for requests with a single token to do (decodes, or the end of a
        #    prompt: c6 above), one for the chunks. `update` changes todo, so both lists come first
        decodes = [(request, n) for request, n in plan if request.todo == 1]
        chunks = [(request, n) for request, n in plan if request.todo > 1]
        for part in decodes, chunks:
            if not part:
                continue
            batch = Rectangle(part, model.device)
            with trace.forward_pass(step, batch):
                logits = model(batch.tokens, batch.positions, batch.attend, batch.wanted)   # (R, V)
            # 3. one token for each request that has nothing more to compute
            tokens = sample(logits, batch.sampled)
            scheduler.update(part, tokens)
            trace.record_tokens(step, batch.sampled, tokens, logits, on_token)
        step += 1
    return trace


if __name__ == "__main__":
    from lab.run import main
    main(generate, __doc__)
