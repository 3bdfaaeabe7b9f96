"""
Stage 6: paged memory. Keys and values live in a pool of pages, wherever there is room.

The batch stays ragged's flat stream. What changes is where the keys are. A request's block table
lists its pages (paging.py), and a *slot mapping* says which slot of the pool takes each new token's
keys and values. (A *cache slot*; elsewhere a slot is a place in a tensor of tokens.)

    block table of A = [0, 2, 3], page_size 4

    position        0  1  2  3    4  5  6  7     8  9
    cache slot      0  1  2  3    8  9 10 11    12 13          slot = table[p // 4] * 4 + p % 4

Attention must look up every key in that table. vLLM's kernels do so on a GPU, ours on a CPU with
--optimize. Here a request's keys and values are first gathered into a copy.

Better than ragged: more requests fit into the same memory, because none reserves room for an answer
that may never come.
Wasted: the work of a request that is preempted when memory runs out; the gathered copies; and equal
prompts are computed and kept once for each request.
Next: prefix caching finds what has been computed before. (This is vLLM's PagedAttention, which
calls a page a block.)
"""
import torch

from cache import KV
from generate_ragged import Flat
from model import sample
from paging import PagedScheduler
from request import prepare
from toolbox.trace import Trace
from toolbox.validate import check_pool


class Paged(Flat):
    """
    Flat, but with keys and values in a pool: one KV whose "sequence" is all the pages. It replaces
    write and read. lay_out adds where keys are in the pool; cost counts the copies.
    """

    def __init__(self, plan, pool, pages, device=None):
        self.pool, self.pages = pool, pages   # the tensors; and the bookkeeping, see paging.py
        super().__init__(plan, device)

    def lay_out(self, device):
        super().lay_out(device)
        # All keys' slots, anew at each step. A kernel reads block tables itself, and the host only
        # adds the new tokens' slots.
        self.key_slots = [self.slots(request.block_table, end).to(device)       # (S_i,) each
                          for (request, _), end in zip(self.plan, self.ends)]
        self.slot_mapping = torch.cat([slots[start:] for slots, start in        # (N,)
                                       zip(self.key_slots, self.starts)])

    def slots(self, table, end):
        """The cache slots (end,) of the positions before `end`."""
        p, size = torch.arange(end), self.pages.size
        return torch.tensor(table)[p // size] * size + p % size

    def write(self, layer, k, v):
        """Puts the new keys and values (nh, N, hs) of all requests into their slots."""
        pool_k, pool_v = self.pool.buffers(layer, k, v)                         # (nh, slots, hs)
        pool_k[:, self.slot_mapping], pool_v[:, self.slot_mapping] = k, v

    def read(self, layer, i):
        """Keys and values (nh, S_i, hs) of the plan's i-th request, gathered into a copy."""
        slots = self.key_slots[i]
        return self.pool.k[layer][:, slots], self.pool.v[layer][:, slots]

    def cost(self):
        return {**super().cost(), "copied_bytes": sum(self.ends) * self.pool.bytes_per_token}


def pool_size(requests, max_batch, page_size, pages=None):
    """
    `pages`, but no more than all requests together can fill. None: enough for the max_batch largest
    requests at once; then no request is ever preempted.
    """
    needed = sorted(-(-request.kv_tokens // page_size) for request in requests)
    return sum(needed[-max_batch:]) if pages is None else min(pages, sum(needed))


@torch.inference_mode()
def generate(model, requests, max_batch=8, token_budget=64, pages=None, page_size=None,
             scheduler=PagedScheduler, on_token=None):
    """
    Runs `requests` as ragged does, with another limit on memory. Returns the trace.

    pages:     how many pages the pool has, at most as many as all requests can fill; None: enough
               for the max_batch largest requests
    page_size: tokens in a page; None: 16, or the context if that is shorter
    scheduler: a class like PagedScheduler
    """
    requests = prepare(requests, model.config)
    page_size = check_pool(max_batch, pages, page_size, scheduler, model.config.block_size)
    number = pool_size(requests, max_batch, page_size, pages)
    scheduler = scheduler(max_batch, token_budget, number, page_size)
    pool = KV(number * page_size)
    trace = Trace("paged", requests, model, scheduler.pages.counts)
    for request in requests:
        scheduler.add(request)
    step = 0
    while scheduler.busy:
        # 1. which requests compute how many tokens in this step
        step = scheduler.next_step(step)
        plan = scheduler.schedule(step)
        # 2. one forward pass for decodes and chunks together
        batch = Paged(plan, pool, scheduler.pages, model.device)
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
