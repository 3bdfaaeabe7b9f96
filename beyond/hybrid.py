"""
Hybrid models: most layers look back over a window only, and free the pages that it has passed.

Gemma, Mistral's models and gpt-oss mix two kinds of layers. A *full* layer sees all keys. A
*window* layer sees the last `window` keys, a token's own included, and never an older one again:

    position                      0 1   2 3   4 5   6 7   8 .       window 4, page_size 2
    table of the full layers       5     2     0     7     8        token 8 is the next:
    table of the window layers     -     -     3     4     6        it looks back to token 5

So each *group* of equally many layers has a block table, and one free queue serves all groups (as
in vLLM's hybrid KV cache manager). With 4 layers, 3 of which have a window of 32, 8 requests of 192
+ 32 tokens hold at most 189 pages; without windows they would hold 436.

A beginning can be shared if all its full pages are found, and of each window group those to which
the next token looks back; if not, a shorter one may be. But what is saved while requests run is not
saved in the cache. Passed pages go through the free queue like any others, and push out the last
windows of others, without which their full pages are worth nothing. 12 sessions come back in turn:

    tokens found again      of a session's earlier turns     of a common system prompt
    least recently used                0%                             100%
    `passed_first`                   100%                               0%

`passed_first` takes passed pages before all others. The price: no session stops where the system
prompt ends, so its last window is always passed. (vLLM met the first row, #48435; it now takes such
pages first, except some at intervals: #43447, --prefix-cache-retention-interval. See also #57610.)

    python -m beyond.hybrid     both, counted
"""
if __spec__ is None:
    raise SystemExit("start it in the folder above: python -m beyond.hybrid")

from itertools import pairwise

import torch

from cache import KV
from generate_paged import Paged
from generate_prefix import PrefixScheduler
from model import GPT, head, sample
from request import prepare
from toolbox.trace import Trace
from toolbox.validate import at_least_1, check, check_pool, is_whole, one_of, refuse


class Hybrid(GPT):
    """A GPT whose layers see `window` keys only, but for the last of each `period` layers."""

    def __init__(self, config, window=32, period=4):
        super().__init__(config)
        at_least_1(window=window)
        check("period", period, lambda n: is_whole(n, 2) and config.n_layer % n == 0,
              f"a whole number of at least 2 that divides n_layer {config.n_layer}")
        self.windows = [config.block_size] + [window] * (period - 1)   # of each group of layers

    def group(self, layer):   # 0: the full layers; 1: the first of each period, and so on
        return (layer + 1) % len(self.windows)

    def attend(self, layer, q, k, v):                                           # (..., T, hs)
        """Attention of the last T of S tokens, the i-th of which is the (S - T + i)-th of all."""
        T, S = q.size(-2), k.size(-2)
        see = torch.ones(T, S, dtype=torch.bool, device=q.device)
        return head(q, k, v, mask=see.triu(S - T - self.windows[self.group(layer)] + 1))

    def forward(self, tokens, positions=None, attend=None, wanted=None):
        return super().forward(tokens, positions, attend or self.attend, wanted)


def held(table):   # its pages, without those that the window has passed
    return [page for page in table if page is not None]


class HybridScheduler(PrefixScheduler):
    """
    A PrefixScheduler with a block table for each group of layers. windows: of the Hybrid

    tables: request -> its tables by group; the first is its block_table. In the others, None stands
            for a page that the window has passed
    """

    def __init__(self, max_batch, token_budget, pages, page_size, windows, passed_first):
        super().__init__(max_batch, token_budget, pages, page_size)
        self.windows, self.passed_first, self.tables = windows, passed_first, {}

    def add(self, request):
        """ValueError if the pool is too small. A group holds a window and a step, or all tokens."""
        full, more = self.pages.needed(request.kv_tokens), self.token_budget - 2
        most = sum(min(full, self.pages.needed(window + more) + 1) for window in self.windows)
        if most > self.pages.number:
            refuse(request, f"{most} pages in all groups, there are {self.pages.number}")
        super().add(request)

    def lengths(self, request, computed):
        """How long its tables must be: for all its tokens; of windows, for the next pass."""
        known = request.computed + request.todo
        near = self.pages.needed(min(known, computed + self.token_budget))
        return [self.pages.needed(known)] + [near] * (len(self.windows) - 1)

    def first(self, window, position):   # the first page to which a token looks back
        return max(0, position - window + 1) // self.pages.size

    def schedule(self, step):
        """As PrefixScheduler.schedule; but first, passed pages go, and all tables grow."""
        for request in self.running:
            for window, table in zip(self.windows, self.tables[request]):
                self.give_back(table, self.first(window, request.computed))
        for request in list(self.running):   # in order of arrival: the first can always go on
            lengths = self.lengths(request, request.computed)
            for table, length in zip(self.tables.get(request, ()), lengths):
                while request in self.running and len(table) < length:
                    if self.pages.free_queue:
                        self.pages.allocate(table, 1)
                    else:
                        self.preempt(self.running[-1])
        return super().schedule(step)

    def give_back(self, table, end):
        """The window has passed the pages before `end`."""
        passed, table[:end] = held(table[:end]), [None] * end
        self.pages.free(passed)
        for page in passed if self.passed_first else ():
            if page in self.pages.free_queue:   # in no other request's table
                self.pages.free_queue.move_to_end(page, last=False)

    def find(self, hashes):
        """The tables of the longest beginning of which each group has all that is needed."""
        for n in range(len(self.pages.find([(0, each) for each in hashes])), -1, -1):
            tables = []
            for group, window in enumerate(self.windows):
                first = self.first(window, n * self.pages.size)
                names = [(group, each) for each in hashes[first:n]]
                tables.append([None] * first + self.pages.find(names))
            if all(len(table) == n for table in tables):   # at the latest without any page
                return tables

    def grant_room(self, request):
        """As PrefixScheduler.grant_room, for all tables."""
        pages, last = self.pages, request.todo - 1
        tables = self.find(self.hashes(request, last)[:last // pages.size])
        found, n = held(sum(tables, [])), len(tables[0])
        new = [length - n for length in self.lengths(request, n * pages.size)]
        if sum(new) + sum(page in pages.free_queue for page in found) > len(pages.free_queue):
            return False
        pages.share([], found)
        for table, number in zip(tables, new):
            pages.allocate(table, number)
        self.tables[request], request.block_table = tables, tables[0]
        request.computed = n * pages.size
        pages.counts.update(shared_pages=len(found), saved_tokens=request.computed)
        return True

    def cache_filled(self, request, start, end):
        """As PrefixScheduler.cache_filled; a page's name is its group, and the hash of tokens."""
        size, hashes = self.pages.size, self.hashes(request, end)
        for i in range(start // size, end // size):
            for group, table in enumerate(self.tables[request]):
                self.pages.cache(table[i], (group, hashes[i]))

    def free(self, request):
        for table in self.tables.pop(request):
            self.pages.free(held(table))
        request.block_table = None


class HybridPaged(Paged):
    """Paged, with slots for each group. The j-th layers of all groups share the j-th buffers."""

    def __init__(self, plan, pool, scheduler, model):
        self.model, self.tables = model, scheduler.tables
        super().__init__(plan, pool, scheduler.pages, model.device)

    def lay_out(self, device):
        super().lay_out(device)
        self.of_group = []   # (key_slots, slot_mapping): see Paged; from a window's first key on
        for group, window in enumerate(self.model.windows):
            keys, new = [], []
            for (request, n), start, end in zip(self.plan, self.starts, self.ends):
                table = [page or 0 for page in self.tables[request][group]]   # None is cut off
                keys.append(self.slots(table, end)[max(0, start - window + 1):].to(device))
                new.append(keys[-1][-n:])
            self.of_group.append((keys, torch.cat(new)))

    def attend(self, layer, q, k, v):                                           # (nh, N, hs)
        """As Flat.attend, in the pages of the layer's group and with its window."""
        self.key_slots, self.slot_mapping = self.of_group[self.model.group(layer)]
        buffers = layer // len(self.of_group)
        self.write(buffers, k, v)
        out = []
        for i, (a, b) in enumerate(pairwise(self.cu_seqlens)):
            keys, values = self.read(buffers, i)                                # (nh, S_i, hs)
            out.append(self.model.attend(layer, q[:, a:b], keys, values))       # (nh, n, hs)
        return torch.cat(out, dim=-2)

    def cost(self):
        keys = sum(len(slots) for key_slots, _ in self.of_group for slots in key_slots)
        return {**super().cost(), "copied_bytes": keys * self.pool.bytes_per_token}


@torch.inference_mode()
def generate(model, requests, max_batch=8, token_budget=64, pages=256, page_size=16,
             passed_first=True, on_token=None):
    """
    Runs `requests` on a Hybrid as prefix does. Returns the trace. A page serves one group's layers.

    passed_first: whether pages that a window has passed are taken before all others
    """
    if not isinstance(model, Hybrid):
        raise ValueError(f"model must be a Hybrid, not {type(model).__name__}")
    requests = prepare(requests, model.config)
    at_least_1(pages=pages)
    check_pool(max_batch, pages, page_size, HybridScheduler, model.config.block_size)
    one_of("passed_first", passed_first, False, True)
    scheduler = HybridScheduler(max_batch, token_budget, pages, page_size, model.windows,
                                passed_first)
    pool, trace = KV(pages * page_size), Trace("hybrid", requests, model, scheduler.pages.counts)
    for request in requests:
        scheduler.add(request)
    step = 0
    while scheduler.busy:
        # as in paged, with another layout
        step = scheduler.next_step(step)
        plan = scheduler.schedule(step)
        batch = HybridPaged(plan, pool, scheduler, model)
        with trace.forward_pass(step, batch):
            logits = model(batch.tokens, batch.positions, batch.attend, batch.wanted)   # (R, V)
        tokens = sample(logits, batch.sampled)
        scheduler.update(plan, tokens)
        trace.record_tokens(step, batch.sampled, tokens, logits, on_token)
        step += 1
    return trace


if __name__ == "__main__":
    from lab.essays import hybrid, main
    main(hybrid, __doc__)
