"""
Memory in pages: a request holds what its tokens need now, not what its answer might need one day.

All memory is one pool of pages of `page_size` tokens. A request's *block table* lists its pages in
the order of its tokens. Equal beginnings share their pages:

    pool         page 0   page 1   page 2   page 3   page 4   page 5
                 S S S S  A A a .  S S S S  B b . .  free     free         page_size 4

    A's table    0, 2, 1       S: the 8 tokens of a common system prompt, computed and kept once
    B's table    0, 2, 3       A, B: the rest of the prompts;  a, b: generated

Only full pages are shared, also those of answers; a prompt's last token is always computed. So a
newcomer first writes to a page of its own, after the shared ones, which never change. Requests that
are admitted in the same step cannot share what they are about to compute. (Claim I7.)

When no page is left, the running request that arrived last is *preempted*, as in vLLM: it gives its
pages back and returns to the front of the queue with its tokens. Later it computes again what it
cannot find any more, but it draws no random number twice.
"""
from collections import Counter, OrderedDict
from heapq import heappop, heappush
from itertools import count

from scheduler import Scheduler
from toolbox.validate import at_least_1, refuse


class Pages:
    """
    The books of a pool. Each page is free, held by block tables, or kept.

    free:      a heap: the lowest is taken first, so a table's pages tend to be neighbours
    holders:   how many block tables a page is in; a request writes only pages it alone holds
    kept:      published pages in no block table, least recently used first: evicted when needed
    published: full pages that others may find: (name of the page before, its tokens) -> page. The
               page before counts, because K and V depend on all that came before. It goes by a name
               that is never reused; with page numbers, an old key would find wrong tokens.
    """

    def __init__(self, number, size):
        at_least_1(pages=number, page_size=size)
        self.number, self.size = number, size
        self.free, self.holders, self.kept = list(range(number)), [0] * number, OrderedDict()
        self.published, self.key_of = {}, {}                # key -> page, page -> key
        self.name_of, self.names = [0] * number, count(1)   # of full pages; 0: the beginning
        self.counts = Counter()                             # for the report

    def needed(self, tokens):   # pages for this many tokens
        return -(-tokens // self.size)

    def available(self):
        return len(self.free) + len(self.kept)

    def find(self, tokens):
        """The published pages that hold the longest possible beginning of these tokens."""
        pages, name = [], 0
        for start in range(0, len(tokens) - self.size + 1, self.size):
            page = self.published.get((name, tuple(tokens[start:start + self.size])))
            if page is None:
                break
            pages.append(page)
            name = self.name_of[page]
        return pages

    def hold(self, pages):   # published pages go into one more block table
        for page in pages:
            self.holders[page] += 1
            self.kept.pop(page, None)

    def allocate(self, table, number):
        """Appends `number` pages to a block table; at most as many as are available."""
        for _ in range(number):
            if not self.free:
                self.evict()
            table.append(heappop(self.free))
            self.holders[table[-1]] = 1

    def evict(self):   # of the pages that are kept, the least recently used
        page, _ = self.kept.popitem(last=False)
        del self.published[self.key_of.pop(page)]
        heappush(self.free, page)
        self.counts["evicted_pages"] += 1

    def publish(self, table, i, tokens):
        """The i-th page of a block table is full: from now on others may find it."""
        page, key = table[i], (self.name_of[table[i - 1]] if i else 0, tuple(tokens))
        if key not in self.published:   # another request may have computed the same tokens
            self.published[key], self.key_of[page], self.name_of[page] = page, key, next(self.names)
        self.name_of[page] = self.name_of[self.published[key]]   # a copy has the same name

    def give_back(self, table):
        """Dissolves a block table, last page first: evicted before the pages that lead to it."""
        for page in reversed(table):
            self.holders[page] -= 1
            if not self.holders[page]:
                if page in self.key_of:
                    self.kept[page] = None
                else:
                    heappush(self.free, page)


class PagedScheduler(Scheduler):
    """
    A Scheduler whose memory limit is a pool of pages; `request.kv` is the request's block table.
    All running requests arrived before all waiting ones. One that lacks a page takes it from the
    last running one. So the first makes progress at every step. (Other orders: beyond/fairness.py.)
    """

    def __init__(self, max_batch, token_budget, pages, share_prefixes=True):
        super().__init__(max_batch, token_budget)
        self.pages, self.share_prefixes, self.counts = pages, share_prefixes, pages.counts

    def add(self, request):
        need, most = self.pages.needed(request.kv_tokens), self.pages.number
        if need > most:
            refuse(request, f"{need} pages of {self.pages.size} tokens, pages is {most}")
        super().add(request)

    def schedule(self, step):
        """As Scheduler.schedule; but first, a decode that has filled its pages gets another one."""
        for request in list(self.running):
            while request in self.running and self.missing(request) > 0:
                if self.pages.available():
                    self.pages.allocate(request.kv, 1)
                else:
                    self.preempt(self.running[-1])   # perhaps itself
        return super().schedule(step)

    def missing(self, request):   # pages, for all tokens that it knows
        return self.pages.needed(request.computed + request.todo) - len(request.kv)

    def preempt(self, request):
        """Back to the queue. Its tokens stay; its published pages stay until they are evicted."""
        self.running.remove(request)
        self.free(request)
        request.computed = 0
        self.waiting.appendleft(request)
        self.counts["preemptions"] += 1

    def grant_room(self, request):
        """Gives it pages for the tokens it has, shared ones first; False if there are too few."""
        shared = self.pages.find(request.tokens[:-1])   # not the last: its logits are needed
        new = self.pages.needed(len(request.tokens)) - len(shared)
        kept = sum(page in self.pages.kept for page in shared)   # available, but not after `hold`
        if new + kept > self.pages.available():
            return False
        self.pages.hold(shared)
        request.kv, request.computed = list(shared), len(shared) * self.pages.size
        self.counts.update(shared_pages=len(shared), saved_tokens=request.computed)
        self.pages.allocate(request.kv, new)
        return True

    def update(self, plan, tokens):
        """As Scheduler.update; but first, pages that this pass has filled are published."""
        size = self.pages.size
        for request, n in plan if self.share_prefixes else ():   # unpublished pages are never found
            for i in range(request.computed // size, (request.computed + n) // size):
                self.pages.publish(request.kv, i, request.slice(i * size, (i + 1) * size))
        super().update(plan, tokens)

    def free(self, request):
        self.pages.give_back(request.kv)
        request.kv = None
