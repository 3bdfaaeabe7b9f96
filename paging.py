"""
Memory in pages: a request holds what its tokens need now, not what its answer might need one day.

All memory is one pool of pages of `page_size` tokens. A request's *block table* lists its pages in
the order of its tokens. Equal beginnings share their pages:

    pool         page 0   page 1   page 2   page 3   page 4   page 5
                 S S S S  A A a .  S S S S  B b . .  free     free         page_size 4

    A's table    0, 2, 1       S: the 8 tokens of a common system prompt, computed and kept once
    B's table    0, 2, 3       A, B: the rest of the prompts;  a, b: generated

Only full pages are shared, and a prompt's last token is always computed. So a newcomer writes to a
page of its own, and shared pages never change. Requests admitted in one step cannot share what each
of them computes: it is published after the pass.
"""
from collections import Counter, OrderedDict
from itertools import count

from scheduler import Scheduler


class Pages:
    """
    The books of a pool: which pages are free, and which can be found by the tokens they hold.

    free:      pages in no block table, least recently used first. Whoever needs a page takes the
               first. A page given back goes to the end; until it is taken, it can still be found
    holders:   how many block tables a page is in; a request writes only pages that it alone holds
    published: full pages that others may find: (name of the page before, its tokens) -> page. The
               page before counts, because keys and values depend on all that came before.

    A *name* is a serial number, never used again. A copy of a published page gets that page's name.
    Page numbers will not do. A and B compute "the cat" in one step, in pages 0 and 1: page 0 is
    published, page 1 is its copy. B's next page, 2, holds "sat down", and is published as what
    follows page 0. A ends, and page 0 is taken for "a dog". A search for "a dog sat down" would now
    find page 0 and then page 2, whose keys and values were computed after "the cat".
    """

    def __init__(self, number, size):
        self.number, self.size = number, size
        self.free, self.holders = OrderedDict.fromkeys(range(number)), [0] * number
        self.published, self.key_of = {}, {}                # key -> page, page -> key
        self.name_of, self.names = [0] * number, count(1)   # page -> name; 0: none before
        self.counts = Counter()                             # for the report

    def needed(self, tokens):   # pages for this many tokens, rounded up
        return -(-tokens // self.size)

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

    def hold(self, table, pages):
        """Appends these pages to a block table: they are free no longer."""
        for page in pages:
            self.free.pop(page, None)
            self.holders[page] += 1
        table += pages

    def allocate(self, table, number):
        """Appends the first `number` free pages. Nobody can find them any more."""
        for _ in range(number):
            page, _ = self.free.popitem(last=False)
            if page in self.key_of:
                del self.published[self.key_of.pop(page)]
                self.counts["evicted_pages"] += 1
            self.hold(table, [page])

    def publish(self, table, i, tokens):
        """The i-th page of a block table is full. Others may find it, or what it is a copy of."""
        page, before = table[i], self.name_of[table[i - 1]] if i else 0
        key = before, tuple(tokens)
        if key in self.published:   # another request has computed the same: a copy, the same name
            self.name_of[page] = self.name_of[self.published[key]]
        else:
            self.published[key], self.key_of[page], self.name_of[page] = page, key, next(self.names)

    def give_back(self, table):
        """Dissolves a block table. Last page first: it is taken before those that lead to it."""
        for page in reversed(table):
            self.holders[page] -= 1
            if not self.holders[page]:
                self.free[page] = None


class PagedScheduler(Scheduler):
    """
    A Scheduler whose memory is a pool of pages: a request holds a block table, not a cache. When no
    page is left, the running request that arrived last is *preempted*, as in vLLM. So the first
    makes progress at every step. (Other orders: beyond/fairness.py.)
    """

    def __init__(self, max_batch, token_budget, pages, share_prefixes=True):
        super().__init__(max_batch, token_budget, pages.number * pages.size)
        self.pages, self.share_prefixes, self.counts = pages, share_prefixes, pages.counts

    def schedule(self, step):
        """As Scheduler.schedule; but first, a request that has filled its pages gets another."""
        for request in list(self.running):
            need = self.pages.needed(request.computed + request.todo)   # for all its tokens
            while request in self.running and len(request.block_table) < need:
                if self.pages.free:
                    self.pages.allocate(request.block_table, 1)
                else:
                    self.preempt(self.running[-1])   # perhaps itself
        return super().schedule(step)

    def preempt(self, request):
        """It gives its pages back and returns to the front of the queue, with its tokens."""
        self.running.remove(request)
        self.free(request)
        request.computed = 0   # computed again, as far as it is not found; nothing is drawn again
        self.waiting.appendleft(request)
        self.counts["preemptions"] += 1

    def grant_room(self, request):
        """Gives it pages for the tokens it has, shared ones first; False if there are too few."""
        shared = self.pages.find(request.tokens[:-1])   # not the last: its logits are needed
        new = self.pages.needed(len(request.tokens)) - len(shared)
        # Shared pages that nobody holds are counted in free, and will be taken out of it.
        if new + sum(page in self.pages.free for page in shared) > len(self.pages.free):
            return False
        request.block_table, request.computed = [], len(shared) * self.pages.size
        self.pages.hold(request.block_table, shared)
        self.pages.allocate(request.block_table, new)
        self.counts.update(shared_pages=len(shared), saved_tokens=request.computed)   # adds
        return True

    def update(self, plan, tokens):
        """As Scheduler.update; but first, pages that this pass has filled are published."""
        size = self.pages.size
        filled = plan if self.share_prefixes else []   # what is not published is never found
        for request, n in filled:
            for i in range(request.computed // size, (request.computed + n) // size):
                self.pages.publish(request.block_table, i, request.slice(i * size, (i + 1) * size))
        super().update(plan, tokens)

    def free(self, request):
        self.pages.give_back(request.block_table)
        request.block_table = None
