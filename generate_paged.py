"""
Stage 6: paged memory. Keys and values live in a pool of pages, wherever there is room.

This is vLLM's PagedAttention. The batch is still ragged's flat stream; only the place of the keys
changes. Four tensors tell a kernel where tokens and keys are. Here A has 9 tokens in its cache and
decodes one more, and B computes a prompt of 3:

    query_start_loc   0, 1, 4          ragged's cu_seqlens: A's token is number 0, B's are 1 to 3
    seq_lens          10, 3            how many keys each has after this pass
    block_table       0  2  3          A's pages, of 4 tokens each
                      1  .  .          B's
    slot_mapping      13, 4, 5, 6      the *cache slot* that takes each new token's key and value

    A's positions     0  1  2  3    4  5  6  7     8  9
    A's cache slots   0  1  2  3    8  9 10 11    12 13          slot = table[p // 4] * 4 + p % 4

The names are vLLM's. (Elsewhere in this repository, a slot is a place in a tensor of tokens.) A
kernel reads each page where it lies; the code below first gathers a request's pages into a copy.

Better than ragged: more requests fit into the same memory, because none reserves room for an answer
that may never come.
Wasted: the work of a request that is preempted when memory runs out; the gathered copies; and equal
prompts are computed and kept once for each request.
Next: prefix caching finds what has been computed before.
"""
import math
from itertools import pairwise

import torch
from torch.nn.utils.rnn import pad_sequence

from cache import KV
from generate_ragged import Flat
from model import head, sample
from paging import PagedScheduler
from request import prepare
from toolbox.trace import Trace
from toolbox.validate import check_pool


def paged_attention(q, k_pages, v_pages, query_start_loc, seq_lens, block_table):
    """
    What a kernel computes for all requests in one launch, without this loop (beyond/kernel.py).
    Returns q's shape.

    q:                (..., nh, N, hs)  queries of the new tokens. `...` is empty here; in
                      a Llama (docs/llama.md) it is one axis: the query heads that share keys
    k_pages, v_pages: (nh, pages, page_size, hs)  the pool; the new keys are in it already
    query_start_loc:  (B + 1,)  request i owns new tokens query_start_loc[i] to [i + 1] - 1
    seq_lens:         (B,)  keys of each request
    block_table:      (B, most pages of a request)
    """
    page_size = k_pages.size(2)
    out = []
    for i, (start, end) in enumerate(pairwise(query_start_loc.tolist())):
        S = int(seq_lens[i])
        table = block_table[i, :math.ceil(S / page_size)]       # without its padding
        k = k_pages[:, table].flatten(1, 2)[:, :S]              # (nh, S, hs), copied
        v = v_pages[:, table].flatten(1, 2)[:, :S]
        out.append(head(q[..., start:end, :], k, v))            # (nh, end - start, hs)
    return torch.cat(out, dim=-2)


class Paged(Flat):
    """
    Flat, but with keys and values in pages.

    kv:   the tensors, one KV whose "sequence" is all the pages
    pool: the bookkeeping, a PagePool
    """

    def __init__(self, plan, kv, pool, device=None):
        self.kv = kv
        self.pool = pool
        super().__init__(plan, device)

    def lay_out(self, device):
        """As Flat.lay_out; and the four tensors."""
        super().lay_out(device)
        # A kernel takes these two on the device, too; the loop above reads them on the host.
        self.query_start_loc = torch.tensor(self.cu_seqlens)                    # (B + 1,)
        self.seq_lens = torch.tensor(self.ends)                                 # (B,)
        tables = [torch.tensor(request.block_table) for request, _ in self.plan]
        self.block_table = pad_sequence(tables, batch_first=True).to(device)    # (B, most pages)
        page_size = self.pool.page_size
        row = []   # for each new token, the row of block_table that belongs to its request
        for i, (_, n) in enumerate(self.plan):
            row += [i] * n
        pages = self.block_table[row, self.positions // page_size]              # (N,)
        self.slot_mapping = pages * page_size + self.positions % page_size      # (N,)

    def attend(self, layer, q, k, v):                                           # (nh, N, hs)
        """Writes all new keys before it reads any: from prefix on, a request may read another's."""
        k_slots, v_slots = self.kv.buffers(layer, k, v)                         # (nh, slots, hs)
        k_slots[:, self.slot_mapping] = k
        v_slots[:, self.slot_mapping] = v
        sizes = (self.pool.number, self.pool.page_size)
        k_pages = k_slots.unflatten(1, sizes)                       # (nh, pages, page_size, hs)
        v_pages = v_slots.unflatten(1, sizes)
        return self.read_pages(q, k_pages, v_pages)

    def read_pages(self, q, k_pages, v_pages):
        """Attention of the new tokens. (beyond/kernel.py has one launch for it.)"""
        return paged_attention(q, k_pages, v_pages, self.query_start_loc, self.seq_lens,
                               self.block_table)

    def cost(self):
        return {**super().cost(), "copied_bytes": sum(self.ends) * self.kv.bytes_per_token}


def pool_size(requests, max_batch, page_size, pages=None):
    """
    How many pages the pool gets. pages None: enough for the max_batch largest requests at once;
    never more of them run, so none is ever preempted. Else `pages`, or as many as all requests
    together can fill, if that is fewer.
    """
    needed = sorted(-(-request.kv_capacity // page_size) for request in requests)   # rounded up
    if pages is None:
        return sum(needed[-max_batch:])
    return min(pages, sum(needed))


@torch.inference_mode()
def generate(model, requests, max_batch=8, token_budget=64, pages=None, page_size=16,
             scheduler_class=PagedScheduler, layout=Paged, on_token=None):
    """
    Runs `requests` as ragged does, in a pool of `pages` pages (see pool_size) of page_size tokens.
    scheduler_class: a class like PagedScheduler; layout: a class like Paged. Returns the trace.
    """
    requests = prepare(requests, model.config)
    check_pool(max_batch, pages, page_size, scheduler_class, model.config.block_size)
    number = pool_size(requests, max_batch, page_size, pages)
    scheduler = scheduler_class(max_batch, token_budget, number, page_size)
    kv = KV(number * page_size)
    trace = Trace("paged", requests, model, scheduler.pool.counts)
    for request in requests:
        scheduler.add(request)
    step = 0
    while scheduler.busy:
        # 1. which requests compute how many tokens in this step
        step = scheduler.next_step(step)
        plan = scheduler.schedule(step)
        # 2. one forward pass for decodes and chunks together
        batch = layout(plan, kv, scheduler.pool, model.device)
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
