"""
Memory in pages: a request holds what its tokens need now, not what its answer might need one day.

Stage 6 reserves room for the longest answer, and keeps a common prompt once per request. Here all
memory is one pool of pages, each for `page_size` tokens. A request holds a *block table*, the list
of its page numbers in the order of its tokens. Equal beginnings of prompts share their pages:

    pool         page 0   page 1   page 2   page 3   page 4   page 5
                 S S S S  A A a .  S S S S  B b . .  free     free         page_size 4

    A's table    0, 2, 1       S: the 8 tokens of a common system prompt, computed and kept once
    B's table    0, 2, 3       A, B: the rest of the prompts;  a, b: generated

Only full pages are shared, and the last token of a prompt is always computed. So a page that others
may read is never written again: no copy-on-write. When no page is left, the least urgent request is
*preempted*: it gives its pages back, returns to the queue with the tokens it has, and later
computes again what was evicted. It draws no random number twice.

This is PagedAttention's memory manager (vLLM calls a page a block), and claim I7 of the sources.
Like the Scheduler it is pure bookkeeping; generate_paged.py has the tensors.
"""
from bisect import bisect, bisect_left, insort
from collections import Counter, deque
from heapq import heappop, heappush
from itertools import pairwise, takewhile

from request import at_least_1
from scheduler import Scheduler


class Pages:
    """
    The books of a pool: each page is free, held by block tables, or kept.

    free:       hold nothing that a request could find
    holders:    how many block tables a page is in; a request writes only pages it alone holds
    published:  full pages that others may find: the tokens from the sequence's beginning to the
                page's end -> page. The whole beginning, because keys and values depend on it: the
                same tokens after another beginning are another page.
    kept:       published pages in no block table, least recently used first. They are taken back
                when no page is free.
    """

    def __init__(self, number, size):
        at_least_1(pages=number, page_size=size)
        self.number, self.size = number, size
        self.free, self.holders = set(range(number)), [0] * number
        self.published, self.prefix_of = {}, {}   # tokens -> page, and back
        self.kept = {}                            # in order of last use
        self.evictions = 0

    def needed(self, tokens):
        """How many pages hold this many tokens."""
        return -(-tokens // self.size)

    def available(self):
        return len(self.free) + len(self.kept)

    def find(self, tokens):
        """The published pages that hold the longest possible beginning of these tokens."""
        ends = range(self.size, len(tokens) + 1, self.size)
        pages = (self.published.get(tuple(tokens[:end])) for end in ends)
        return list(takewhile(lambda page: page is not None, pages))

    def hold(self, pages):
        """Published pages go into one more block table, and so are not merely kept any more."""
        for page in pages:
            self.holders[page] += 1
            self.kept.pop(page, None)

    def allocate(self, number, after=None):
        """`number` pages for a block table whose last page so far is `after`."""
        pages = []
        for left in range(number, 0, -1):
            if not self.free:
                self.evict()
            last = pages[-1] if pages else after
            page = last + 1 if last is not None and last + 1 in self.free else self.place_for(left)
            self.free.remove(page)
            self.holders[page] = 1
            pages.append(page)
        return pages

    def place_for(self, number):
        """
        The first of `number` free pages in the middle of the longest free stretch. Pages of one
        request that are neighbours can be read in one piece; the middle leaves room to grow.
        """
        pages = sorted(self.free)
        edges = [i for i, (a, b) in enumerate(pairwise(pages), start=1) if b > a + 1]
        first, end = max(pairwise([0, *edges, len(pages)]), key=lambda part: part[1] - part[0])
        return pages[first] + max(end - first - number, 0) // 2

    def evict(self):
        """Forgets the published page that was used least recently among those not held."""
        page = next(iter(self.kept))
        del self.kept[page], self.published[self.prefix_of.pop(page)]
        self.free.add(page)
        self.evictions += 1

    def publish(self, table, tokens, start):
        """Others may find the pages of a table that these computed tokens fill, from `start` on."""
        for i in range(start // self.size, len(tokens) // self.size):
            prefix = tuple(tokens[:(i + 1) * self.size])
            if prefix not in self.published:   # another request may have computed the same tokens
                self.published[prefix] = table[i]
                self.prefix_of[table[i]] = prefix

    def give_back(self, table):
        """
        A block table is dissolved. Its last pages are the first to be evicted: a page without the
        pages before it would never be found.
        """
        for page in reversed(table):
            self.holders[page] -= 1
            if not self.holders[page]:
                if page in self.prefix_of:
                    self.kept[page] = None
                else:
                    self.free.add(page)


POLICIES = {   # a policy is a sort key: the waiting request with the smallest goes first
    "fcfs": lambda request: 0,                                             # first come first served
    "sjf": lambda request: len(request.prompt) + request.max_new_tokens,   # shortest job first
    "priority": lambda request: request.priority,                          # 0 is the most urgent
}
MAX_OVERTAKEN = 16


class PagedScheduler(Scheduler):
    """
    A Scheduler whose memory limit is a pool of pages. `request.kv` is the request's block table.

    No request starves. The n-th to arrive is admitted as the (n + MAX_OVERTAKEN)-th at the latest,
    so at most MAX_OVERTAKEN later ones overtake it; and it is preempted at most that often. At
    either bound a request is *due*: it goes first, is given room for its longest answer, and is not
    preempted any more. There is no live-lock: a request that preempts ranks before its victim, so
    the first in rank keeps its pages and goes on at every step.
    """

    def __init__(self, max_batch, token_budget, pages, policy="fcfs", share_prefixes=True):
        super().__init__(max_batch, token_budget)
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {policy!r}")
        self.pages, self.policy, self.share_prefixes = pages, POLICIES[policy], share_prefixes
        self.number_of = {}                # request -> its place in the order of arrival
        self.in_order = []                 # the other way round
        self.now, self.coming = 0, deque()   # the last step, and those that arrive after it
        self.admitted = []                 # sorted: numbers of those that have ever been admitted
        self.ranked = []                   # heap: ranks of the waiting that have arrived
        self.times_preempted = Counter()   # request -> times
        self.due = set()                   # requests that have reached a bound
        self.counts = Counter()            # preemptions, shared_pages, saved_tokens, evicted_pages

    def add(self, request):
        need = self.pages.needed(request.kv_tokens)
        if need > self.pages.number:
            raise ValueError(f"{request}: prompt of {len(request.prompt)} + max_new_tokens "
                             f"{request.max_new_tokens} needs {need} pages of {self.pages.size} "
                             f"tokens, pages is {self.pages.number}")
        super().add(request)
        self.number_of[request] = len(self.in_order)
        self.in_order.append(request)
        if request.arrival > self.now:
            self.coming.append(request)
        else:
            self.enter_ranks(request)

    # --- which request goes first ---

    def next_waiting(self, step):
        """The first by policy among the arrived; but the oldest one when its turn is overdue."""
        self.now = step
        while self.coming and self.coming[0].arrival <= step:
            self.enter_ranks(self.coming.popleft())
        oldest = super().next_waiting(step)
        if oldest and oldest not in self.due and self.times_overtaken(oldest) >= MAX_OVERTAKEN:
            self.due.add(oldest)
            self.enter_ranks(oldest)   # once more, now among the first
        while self.ranked:
            first = self.in_order[self.ranked[0][-1]]
            if first.kv is None and not first.finished:
                return first
            heappop(self.ranked)       # runs already, or was cancelled

    def times_overtaken(self, request):
        return len(self.admitted) - bisect(self.admitted, self.number_of[request])

    def rank(self, request, key=lambda request: request.priority):
        """Sort key. By priority, the last of the running requests is the one to preempt."""
        return request not in self.due, key(request), self.number_of[request]

    def enter_ranks(self, request):
        """It has arrived, and waits. Its entry stays until it comes first and no longer holds."""
        heappush(self.ranked, self.rank(request, self.policy))

    def leave_queue(self, request):
        del self.waiting[self.place_in_queue(request)]

    def place_in_queue(self, request):
        """`waiting` stays in order of arrival."""
        return bisect_left(self.waiting, self.number_of[request], key=self.number_of.get)

    # --- memory: page by page ---

    def schedule(self, step):
        """As Scheduler.schedule; but first, a decode that has filled its pages gets another one."""
        self.release()
        for request in sorted(self.running, key=self.rank):
            while request in self.running and self.missing(request) > 0:
                if self.pages.available():
                    request.kv += self.pages.allocate(1, after=request.kv[-1])
                else:
                    victim = max(self.running, key=self.rank)   # perhaps itself
                    self.preempt(victim)
                    self.enter_ranks(victim)
        return super().schedule(step)

    def missing(self, request):
        """How many pages it lacks for all tokens that it knows."""
        return self.pages.needed(request.computed + request.todo) - len(request.kv)

    def preempt(self, request):
        """Back to the queue. What it generated stays, and its published pages, until evicted."""
        self.running.remove(request)
        self.free(request)
        request.computed = 0
        place = self.place_in_queue(request)
        self.waiting.insert(place, request)   # where it stood
        self.counts["preemptions"] += 1
        self.times_preempted[request] += 1
        if self.times_preempted[request] >= MAX_OVERTAKEN:
            self.due.add(request)

    def grant_room(self, request):
        """Pages for the tokens it has, shared ones first; False if there are too few."""
        # The last token is always computed: the next one needs its logits.
        shared = self.pages.find(request.tokens[:-1]) if self.share_prefixes else []
        tokens = request.kv_tokens if request in self.due else request.todo
        new = self.pages.needed(tokens) - len(shared)
        kept = sum(page in self.pages.kept for page in shared)   # not available any more
        if new > self.pages.available() - kept:
            return False
        if not self.times_preempted[request]:   # the first time
            insort(self.admitted, self.number_of[request])
        self.pages.hold(shared)
        request.kv = shared + self.pages.allocate(new, after=shared[-1] if shared else None)
        request.computed = len(shared) * self.pages.size
        self.counts["shared_pages"] += len(shared)
        self.counts["saved_tokens"] += request.computed
        return True

    def update(self, plan, tokens):
        """As Scheduler.update; but first, pages that this pass has filled are published."""
        for request, n in plan:
            if self.share_prefixes and not request.finished:
                end = request.computed + n
                self.pages.publish(request.kv, request.slice(0, end), request.computed)
        super().update(plan, tokens)
        self.counts["evicted_pages"] = self.pages.evictions

    def free(self, request):
        self.pages.give_back(request.kv)
        request.kv = None
