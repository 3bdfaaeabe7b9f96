"""
Hybrid models: most layers look back over a window only, and free the pages that it has passed.

Gemma 3 and gpt-oss mix two kinds of layers. A *global* layer sees all keys. A *window* layer sees
the last `window` keys, a token's own included, and never an older one again:

    position                      0 1   2 3   4 5   6 7   8 .       window 4, page_size 2
    table of the global layers     5     2     0     7     8        token 8 is the next:
    table of the window layers     -     -     3     4     6        it looks back to token 5

So the layers are divided into *groups*, and a request has a block table for each group. One pool
serves all groups (as in vLLM's hybrid KV cache manager). A page belongs to one group at a time, and
holds the keys and values of all its layers. Pages are of one size and go from group to group, so
all groups must have equally many layers.

With 4 layers, 3 of which have a window of 32, 8 requests of 192 + 32 tokens hold at most 185 pages
of 16 tokens. Without windows they hold 436, counted. (14 pages for each request in each group would
be 448. But prompts are computed in chunks, so requests reach their last page at different times.)

A beginning of a request can be shared if all its pages of the global group are found, and from each
window group the pages to which the next token looks back. If not, a shorter one may be.

What windows save while requests run, they do not save in the cache. Passed pages go through the
free queue like any others, and push out pages that other requests could still find. If these were
the last window of a beginning, its global pages are worth nothing. 12 sessions come back in turn:

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
from generate_paged import Paged, pool_size
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

    def group(self, layer):   # 0: the global layers; 1: the first of each period, and so on
        return (layer + 1) % len(self.windows)

    def attend(self, layer, q, k, v):                                           # (..., T, hs)
        """Attention of the last T of S tokens, the i-th of which is the (S - T + i)-th of all."""
        T, S = q.size(-2), k.size(-2)
        window = self.windows[self.group(layer)]
        first = S - T - window + 1   # the first key that the first of the T tokens sees
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(first)
        return head(q, k, v, mask=mask)   # head adds the causal rule

    def forward(self, tokens, positions=None, attend=None, wanted=None):
        """As GPT.forward. ValueError for an `attend` of another layout: it knows no windows."""
        if attend is None:
            attend = self.attend
        elif not isinstance(getattr(attend, "__self__", None), HybridPaged):
            raise ValueError("a Hybrid runs in beyond.hybrid only: no other layout has its windows")
        return super().forward(tokens, positions, attend, wanted)


def held(table):   # its pages, without those that the window has passed
    return [page for page in table if page is not None]


class HybridScheduler(PrefixScheduler):
    """
    A PrefixScheduler with a block table for each group of layers. windows: of the Hybrid

    tables: request -> its tables by group; the first, of the global layers, is its block_table. In
            the others, None stands for a page that the window has passed
    """

    def __init__(self, max_batch, token_budget, pages, page_size, windows, passed_first):
        super().__init__(max_batch, token_budget, pages, page_size)
        self.windows = windows
        self.passed_first = passed_first
        self.tables = {}

    def add(self, request):
        """ValueError if the pool is too small. A group holds a window and a step, or all tokens."""
        all_tokens = self.pool.needed(request.kv_capacity)
        most = 0
        for window in self.windows:
            # The first token of a pass looks back to window - 1 others. If only one of all these
            # tokens is in the first page, the others may fill as many pages as they can.
            others = window - 1 + self.token_budget - 1
            most += min(all_tokens, 1 + self.pool.needed(others))
        if most > self.pool.number:
            refuse(request, f"{most} pages in all groups, there are {self.pool.number}")
        super().add(request)

    def first(self, window, position):   # the first page to which a token looks back
        return max(0, position - window + 1) // self.pool.page_size

    def schedule(self, step):
        """As PrefixScheduler.schedule; but first, pages that a window has passed go."""
        for request in self.running:
            for window, table in zip(self.windows, self.tables[request]):
                self.give_back(table, self.first(window, request.computed))
        return super().schedule(step)

    def give_back(self, table, end):
        """The window has passed the pages before `end`."""
        passed = held(table[:end])
        table[:end] = [None] * end
        self.pool.free(passed)
        for page in passed if self.passed_first else ():
            if page in self.pool.free_queue:   # in no other request's table
                self.pool.free_queue.move_to_end(page, last=False)

    def find(self, hashes):
        """The tables of the longest beginning of which each group has all that is needed."""
        global_pages = self.pool.find([(0, digest) for digest in hashes])
        for n in range(len(global_pages), -1, -1):
            tables = []
            for group, window in enumerate(self.windows):
                first = self.first(window, n * self.pool.page_size)
                digests = [(group, digest) for digest in hashes[first:n]]
                tables.append([None] * first + self.pool.find(digests))
            if all(len(table) == n for table in tables):   # at the latest without any page
                return tables

    def admit(self, request):
        """
        As PrefixScheduler.admit, for all tables. The global layers need room for all its tokens.
        The others need room for what the next pass computes: before the pass after that, pages that
        the windows have passed become free.
        """
        pool = self.pool
        full = (request.todo - 1) // pool.page_size   # pages before its last token
        tables = self.find([self.hash_of_page(request, i) for i in range(full)])
        found = held(sum(tables, []))
        n = len(tables[0])
        next_end = min(request.todo, n * pool.page_size + self.token_budget)   # of the next pass
        new_global = pool.needed(request.todo) - n
        new_window = pool.needed(next_end) - n                                 # in each other group
        new = new_global + (len(tables) - 1) * new_window
        revived = sum(page in pool.free_queue for page in found)   # they will leave it, too
        if new + revived > len(pool.free_queue):
            return False
        pool.share([], found)
        self.tables[request] = tables
        request.block_table = tables[0]
        request.computed = n * pool.page_size
        pool.counts.update(shared_pages=len(found), saved_tokens=request.computed)
        return True

    def make_room(self, request, n):
        """As PrefixScheduler.make_room, for all tables."""
        tables = self.tables[request]
        more = [self.pool.needed(request.computed + n) - len(table) for table in tables]
        while sum(more) > len(self.pool.free_queue):
            victim = self.victim()
            self.preempt(victim)
            if victim is request:
                return False
        for table, number in zip(tables, more):
            self.pool.allocate(table, number)
        self.cache_filled(request, request.computed, request.computed + n)
        return True

    def cache_filled(self, request, start, end):
        """As PrefixScheduler.cache_filled. A page is found by its group and the hash of tokens."""
        for i in range(start // self.pool.page_size, end // self.pool.page_size):
            digest = self.hash_of_page(request, i)
            for group, table in enumerate(self.tables[request]):
                self.pool.register(table[i], (group, digest))

    def undo(self, plan):
        """As PrefixScheduler.undo, for all tables."""
        for request, _ in plan:
            for table in self.tables[request]:
                for page in held(table[request.computed // self.pool.page_size:]):
                    self.pool.forget(page)
        super().undo(plan)

    def free(self, request):
        for table in self.tables.pop(request):
            self.pool.free(held(table))
        request.block_table = None


class HybridPaged(Paged):
    """Paged, with slots for each group. The j-th layers of all groups share the j-th buffers."""

    def __init__(self, plan, kv, scheduler, model):
        self.model = model
        self.tables = scheduler.tables
        super().__init__(plan, kv, scheduler.pool, model.device)

    def lay_out(self, device):
        super().lay_out(device)
        groups = range(len(self.model.windows))
        self.of_group = [self.slots_of(group, device) for group in groups]

    def slots_of(self, group, device):
        """
        Of a group, the cache slots of each request's keys, from the first that its window reaches;
        and those of the new tokens, the slot mapping.
        """
        page_size = self.pool.page_size
        window = self.model.windows[group]
        keys, new = [], []
        for (request, n), start, end in zip(self.plan, self.starts, self.ends):
            # None, which becomes 0 here, stands before the first page that is read.
            table = torch.tensor([page or 0 for page in self.tables[request][group]])
            positions = torch.arange(max(0, start - window + 1), end)
            slots = table[positions // page_size] * page_size + positions % page_size
            slots = slots.to(device)
            keys.append(slots)
            new.append(slots[-n:])
        return keys, torch.cat(new)

    def attend(self, layer, q, k, v):                                           # (nh, N, hs)
        """As Paged.attend, in the pages of the layer's group and with its window."""
        key_slots, slot_mapping = self.of_group[self.model.group(layer)]
        k_slots, v_slots = self.kv.buffers(layer // len(self.of_group), k, v)   # (nh, slots, hs)
        k_slots[:, slot_mapping] = k
        v_slots[:, slot_mapping] = v
        out = []
        for slots, (a, b) in zip(key_slots, pairwise(self.cu_seqlens)):
            keys, values = k_slots[:, slots], v_slots[:, slots]                 # (nh, S_i, hs)
            out.append(self.model.attend(layer, q[:, a:b], keys, values))       # (nh, n, hs)
        return torch.cat(out, dim=-2)

    def cost(self):
        keys = 0
        for key_slots, _ in self.of_group:
            keys += sum(len(slots) for slots in key_slots)
        return {**super().cost(), "copied_bytes": keys * self.kv.bytes_per_token}


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
    # Each group keeps all tokens of a request at most.
    one_group = pool_size(requests, len(requests), page_size)
    number = min(pages, one_group * len(model.windows))
    scheduler = HybridScheduler(max_batch, token_budget, number, page_size, model.windows,
                                passed_first)
    kv = KV(number * page_size)
    trace = Trace("hybrid", requests, model, scheduler.pool.counts)
    for request in requests:
        scheduler.add(request)
    step = 0
    while scheduler.busy:
        # 1. which requests compute how many tokens in this step
        step = scheduler.next_step(step)
        plan = scheduler.schedule(step)
        # 2. one forward pass for decodes and chunks together
        batch = HybridPaged(plan, kv, scheduler, model)
        with trace.forward_pass(step, batch):
            logits = model(batch.tokens, batch.positions, batch.attend, batch.wanted)   # (R, V)
        # 3. one token for each request that has nothing more to compute
        tokens = sample(logits, batch.sampled)
        scheduler.update(plan, tokens)
        trace.record_tokens(step, batch.sampled, tokens, logits, on_token)
        step += 1
    return trace


if __name__ == "__main__":
    from lab.essays import hybrid, main
    main(hybrid, __doc__)
