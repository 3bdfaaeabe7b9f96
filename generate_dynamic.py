"""
Stage 2: dynamic batching. A finished request leaves at once, a waiting one takes its place.

The batch is put together anew at each step, so caches can no longer belong to it: each request has its own,
and the layout `Rectangle` gathers them. A newcomer's prompt and the others' decodes differ in width, so a
step has up to two forward passes, one rectangle for the decodes and one for the newcomers' prompts.

    max_batch 2, C arrives at step 1:

    step      0   1   2   3   4   5   6
    A         P   d   d
    B         P   d   d   d   d   d   d       P prefill, d decode
    C             .   .   P   d   d           . waiting

Better than stage 1: no finished rows, and nobody waits for a whole batch.
Wasted: padding still; the pasts are copied into a new rectangle at every step; and a long prompt is prefilled in
one piece, while every running decode waits for it.

Names: Hugging Face calls this dynamic scheduling or dynamic batching, others call it continuous batching
(Orca: iteration-level scheduling). Servers such as Triton mean by dynamic batching that queued
requests are grouped, which is stage 1.
"""
import torch

from cache import Rectangle
from model import sample
from scheduler import at_least_1, prepare
from toolbox.trace import Trace


@torch.inference_mode()
def generate(model, requests, max_batch=8, on_token=None):
    """
    Runs `requests` and fills them in place. Returns the trace.

    max_batch: requests that run at the same time
    on_token:  on_token(request, token, logits) is called as each token appears
    """
    at_least_1(max_batch=max_batch)
    requests = prepare(requests, model.config)
    trace = Trace("dynamic", requests)
    waiting, running, step = requests, [], 0
    while running or (waiting := [request for request in waiting if not request.finished]):
        # 1. who has arrived takes a free place
        if not running:
            step = max(step, waiting[0].arrival)
        while waiting and waiting[0].arrival <= step and len(running) < max_batch:
            running.append(waiting.pop(0))
        # 2. two forward passes, one for the decodes, one for whole prompts
        decodes = [(request, 1) for request in running if request.generated]
        prompts = [(request, len(request.prompt)) for request in running if not request.generated]
        for part in decodes, prompts:
            part = [(request, n) for request, n in part if not request.finished]   # cancelled during the first pass
            if not part:
                continue
            batch = Rectangle(part, model.device)
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
