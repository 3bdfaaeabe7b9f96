"""
Speculative decoding: guess several tokens, and check all of them in one pass.

A decode reads all weights for one token. A chunk of 1 + K tokens reads them once, too. So a request
guesses K tokens, and the ragged pass computes them in one chunk, all of whose logits are wanted:

    in the pass   ... the | json  module  is       known: "the"; guessed: "json module is"
    its logits        json  module  loads  a       two were right; "loads" is the third token

A guess is what followed the latest tokens when they last occurred (prompt lookup, Saxena 2023). An
accepted guess is a decode whose pass has already been made. So tokens are sampled and recorded in
rounds, one token for each request, and a request takes part while its guesses are right.

A rejected row draws no random number. Keys beyond `computed` are never read, and are overwritten
later, so nothing is rolled back.

A draft model proposes a token with probability q, and rejection sampling accepts it with
probability min(1, p/q), where p is the model's own. A looked-up guess has q = 1, so it would be
accepted with probability p. The request's own draw equals the guess just as often. If it does not,
the draw is already the right token. No draft distribution, no second random number is needed.

    python -m beyond.speculative [MODEL PROMPTS]    docs/beyond.md: passes saved, and their price
"""
if __spec__ is None:
    raise SystemExit("start it in the folder above: python -m beyond.speculative")

import torch

from cache import KV
from generate_paged import Paged, pool_size
from generate_prefix import PrefixScheduler
from model import sample
from request import indices_due, prepare
from toolbox.trace import Trace
from toolbox.validate import check_pool, check_whole


class Lookup:
    """
    One request's tokens, found by the n-grams before them. Each token is entered once.

    sizes:   of n-grams, the longest first
    after:   {n-gram: where the token stands that last followed it}
    entered: the n-grams that end at this token or before it are in `after`
    """

    def __init__(self):
        self.sizes = (3, 2, 1)
        self.after = {}
        self.entered = 0

    def guess(self, request, most):
        """At most `most` tokens: what last followed the longest n-gram seen before."""
        end = request.computed + request.todo
        for i in range(self.entered + 1, end):   # not the end itself: nothing follows it yet
            for n in self.sizes:
                if n <= i:
                    self.after[tuple(request.slice(i - n, i))] = i
        self.entered = end - 1
        for n in self.sizes:
            latest = tuple(request.slice(max(end - n, 0), end))
            if latest in self.after:
                start = self.after[latest]
                return request.slice(start, start + most)
        return []


def draft(plan, scheduler, lookups, most):
    """{request: guesses}: for decodes, as far as budget, length and pages held leave room."""
    drafts = {}
    budget = scheduler.token_budget - sum(n for _, n in plan)
    for request, _ in plan:
        drafts[request] = []
        if request.todo > 1:   # not a decode
            continue
        # The last token is never computed; and a guess must fit into the pages that are held.
        in_pages = len(request.block_table) * scheduler.pool.page_size
        places = min(request.kv_capacity, in_pages) - request.computed - 1
        room = min(most, budget, places)
        if room > 0:
            lookup = lookups.setdefault(request, Lookup())
            drafts[request] = lookup.guess(request, room)
            budget -= len(drafts[request])
    return drafts


def lay_out(plan, drafts, kv, pool, device):
    """
    The batch of a plan and its guesses, and {request: the rows of its logits}: first the row of its
    last known token, then one for each guess.
    """
    for request, _ in plan:
        request.assumed = drafts[request]   # here, guesses are tokens like any others
    longer = [(request, n + len(drafts[request])) for request, n in plan]
    batch = Paged(longer, kv, pool, device)
    for request, _ in plan:
        request.assumed = []
    rows = {}
    wanted = []   # places in the batch
    for request, last in zip(batch.sampled, batch.wanted.tolist(), strict=True):
        number = 1 + len(drafts[request])
        rows[request] = range(len(wanted), len(wanted) + number)
        wanted += range(last + 1 - number, last + 1)
    batch.wanted = torch.tensor(wanted, dtype=torch.long, device=device)      # (R,)
    return batch, rows


def next_round(sampled, tokens, drafts, number):
    """The plan of those whose token is guess `number`: a decode each, which the pass has made."""
    plan = []
    for request, token in zip(sampled, tokens):
        guess = drafts[request][number:number + 1]   # empty if there are no more
        if not request.finished and guess == [token]:
            plan.append((request, 1))
    return plan


@torch.inference_mode()
def generate(model, requests, max_batch=8, token_budget=64, pages=None, page_size=16, guesses=4,
             on_token=None):
    """Runs `requests` as prefix does, with at most `guesses` for each decode. Returns the trace."""
    check_whole("guesses", guesses, 0)
    requests = prepare(requests, model.config)
    check_pool(max_batch, pages, page_size, PrefixScheduler, model.config.block_size)
    number = pool_size(requests, max_batch, page_size, pages)
    scheduler = PrefixScheduler(max_batch, token_budget, number, page_size)
    kv = KV(number * page_size)
    lookups = {}   # of each request that has guessed
    trace = Trace(f"speculative, {guesses} guesses", requests, model, scheduler.pool.counts)
    for request in requests:
        scheduler.add(request)
    step = 0
    while scheduler.busy:
        # 1. which requests compute how many tokens in this step, and guess how many more
        step = scheduler.next_step(step)
        plan = scheduler.schedule(step)
        drafts = draft(plan, scheduler, lookups, guesses)
        # 2. one forward pass for all of them
        batch, rows = lay_out(plan, drafts, kv, scheduler.pool, model.device)
        with trace.forward_pass(step, batch):
            logits = model(batch.tokens, batch.positions, batch.attend, batch.wanted)   # (R, V)
        # 3. in rounds, one token for each request whose guesses so far were right
        number = 0
        while plan:
            sampled = [plan[i][0] for i in indices_due(plan)]
            logits_due = logits[[rows[request][number] for request in sampled]]
            tokens = sample(logits_due, sampled)
            for request, n in plan:   # an accepted guess fills pages, too
                scheduler.cache_filled(request, request.computed, request.computed + n)
            scheduler.update(plan, tokens)
            trace.record_tokens(step, sampled, tokens, logits_due, on_token)
            plan = next_round(sampled, tokens, drafts, number)
            number += 1
        # 4. wrong guesses were computed in vain
        for (request, _), end in zip(batch.plan, batch.ends):
            trace.record_rejected(request, request.computed, end)
        step += 1
    return trace


if __name__ == "__main__":
    from lab.essays import main, speculative
    main(speculative, __doc__)
