"""
Speculative decoding: guess several tokens, and check all of them in one pass.

A decode reads all weights to compute one token. A chunk of 1 + K tokens reads them once, too. So a
request guesses its next K tokens, and the ragged pass computes them as a chunk, all of whose logits
are wanted. Each row says what really comes after its token:

    in the pass   ... the | json  module  is       known: "the"; guessed: "json module is"
    its logits        json  module  loads  a       two were right; "loads" is the third token

An accepted guess is a decode whose pass has already been made. So what follows every pass, sample
and update and record, now takes rounds, and a request is in the next one while its guess was right.
A rejected row draws no random number. Keys beyond `computed` are never read: no roll-back.

Papers accept a guess x with probability min(1, p(x) / q(x)) (Leviathan 2023, Chen 2023). A looked-up
guess has q(x) = 1, and the request's own draw gives x with probability p(x): comparing the two loses
nothing, and gives the very tokens that the request would have got alone.

A guess is what followed the latest tokens when they last occurred (prompt lookup decoding, Saxena
2023). Guesses take what is left of the token budget, and no page that is not held.

    python -m beyond.speculative [MODEL PROMPTS]    passes against K, and the calculated price
"""
import sys

import torch

from beyond.ahead import memory_of
from beyond.hardware import gpu_of, shape_of
from model import sample
from request import indices_due, prepare
from toolbox.load import load
from toolbox.trace import Trace
from toolbox.workload import PROMPTS, make_requests, read_prompts

KS = 0, 2, 4, 8


class Lookup:
    """One request's tokens, found by the n-grams before them. Each token is entered once."""

    def __init__(self, longest=3):
        self.sizes, self.after, self.entered = range(longest, 0, -1), {}, 0

    def guess(self, request, most):
        """At most `most` tokens: what followed the last n-gram when it last occurred."""
        end = request.computed + request.todo
        for i in range(self.entered + 1, end):   # not the end itself: nothing follows it yet
            self.after.update((tuple(request.slice(i - n, i)), i) for n in self.sizes if n <= i)
        self.entered = end - 1
        for n in self.sizes:
            if n <= end and (i := self.after.get(tuple(request.slice(end - n, end)))):
                return request.slice(i, i + most)
        return []


def draft(plan, scheduler, lookups, most):
    """{request: guesses}: for decodes, as far as budget, length limit and pages leave room."""
    drafts, budget = {}, scheduler.token_budget - sum(n for _, n in plan)
    for request, n in plan:
        room = request.kv_tokens   # the last token is never computed
        if request.block_table is not None:
            room = min(room, len(request.block_table) * scheduler.pages.size)
        room, drafts[request] = min(most, budget, room - request.computed - 1), []
        if request.todo == 1 and room > 0:
            drafts[request] = lookups.setdefault(request, Lookup()).guess(request, room)
            budget -= len(drafts[request])
    return drafts


@torch.inference_mode()
def generate(model, requests, max_batch=8, token_budget=64, max_kv_tokens=None, pages=None,
             page_size=16, guesses=4, on_token=None):
    """Runs `requests` as stage 6 or 7, with at most `guesses` for each decode."""
    requests = prepare(requests, model.config)
    scheduler, lay_out = memory_of(model, max_batch, token_budget, max_kv_tokens, pages, page_size)
    trace, lookups = Trace(f"speculative, {guesses} guesses", requests), {}
    for request in requests:
        scheduler.add(request)
    step = 0
    while scheduler.busy:
        # 1. which requests compute how many tokens in this step, and guess how many more
        step = scheduler.next_step(step)
        plan = scheduler.schedule(step)
        drafts = draft(plan, scheduler, lookups, guesses)
        # 2. one forward pass; while it is laid out, guesses are tokens like any others
        for request, guessed in drafts.items():
            request.generated += guessed
        batch = lay_out([(request, n + len(drafts[request])) for request, n in plan])
        first, wanted = {}, []   # request -> its first row of the logits; their places in the batch
        for request, guessed in drafts.items():
            del request.generated[len(request.generated) - len(guessed):]
        for request, last in zip(batch.sampled, batch.wanted.tolist()):
            first[request] = len(wanted)
            wanted += range(last - len(drafts[request]), last + 1)
        batch.wanted = torch.tensor(wanted, dtype=torch.long, device=model.device)       # (R,)
        with trace.forward_pass(step, batch):
            logits = model(batch.tokens, batch.positions, batch.attend, batch.wanted)    # (R, V)
        # 3. in rounds, one token for each request whose guesses so far were right
        number = 0
        while plan:
            sampled = [plan[i][0] for i in indices_due(plan)]
            rows = logits[[first[request] + number for request in sampled]]
            tokens = sample(rows, sampled)
            scheduler.update(plan, tokens)
            trace.record_tokens(step, sampled, tokens, rows, on_token)
            plan = [(request, 1) for request, token in zip(sampled, tokens)
                    if not request.finished and drafts[request][number:number + 1] == [token]]
            number += 1
        for (request, _), end in zip(batch.plan, batch.ends):
            trace.record_rejected(request, request.computed, end)
        step += 1
    return trace


def price(batch, guesses, gpu=gpu_of("a100"), shape=shape_of("llama-2-7b"), keys=512):
    """Calculated time of a pass with so many guesses for each request, over one with none."""
    def seconds(rows):
        return shape.seconds(gpu, shape.parts(rows, rows, rows * keys, batch * keys), rows)
    return seconds(batch * (1 + guesses)) / seconds(batch)


def main(name="builtin", prompts=PROMPTS):
    model, tokenizer = load(name)
    print("passes with K =", *KS)
    for batch, t in (8, 0.0), (8, 0.7), (1, 0.0):
        runs = [generate(model, make_requests(read_prompts(prompts), tokenizer, seed=0,
                                              max_new_tokens=64, temperature=t), batch, guesses=k)
                for k in KS]
        print(f"  batch {batch}, temperature {t}:", *[len(run.passes) for run in runs])
    print("a pass with K = 4 over one with 0: Llama 2 7B, 512 keys each, A100, calculated")
    print(*[f"  batch {batch}: x {price(batch, 4):.2f}" for batch in (1, 8, 32, 64, 256)], sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:3])
