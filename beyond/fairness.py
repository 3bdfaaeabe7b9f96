"""
Fairness: other orders than first come, first served, and a bound on what they may cost a request.

    one place, shortest job first, a bound of 3; L is long, a to d are short, all arrive together

    admitted              a   b   c   L   d
    L was overtaken       1   2   3           L is due: d is shorter, and has to wait

A *policy* is a sort key: of the waiting requests, the one with the smallest key goes first. The
shortest job first makes the mean wait short; but a long job may wait for ever, if short ones keep
arriving. So there is a bound: the n-th request to arrive is admitted as the (n + MAX_OVERTAKEN)-th
at the latest, and no request is preempted more than MAX_OVERTAKEN times. At either bound it is
*due*: it goes before all that are not, is given room for its longest answer, and is not preempted.

One order serves the queue and the memory, the *rank*: due or not, then the key, then the arrival.
The first in rank is admitted first; the last is preempted, by one that stands before it. So the
first in rank keeps its pages and goes on at every step: no live-lock. (vLLM ranks by arrival or by
priority, too. It has no bound.)

    python generate_paged.py --policy sjf      stage 7 with a policy
"""
from bisect import bisect_left, insort
from collections import OrderedDict
from functools import partial
from weakref import WeakKeyDictionary

from paging import PagedScheduler

POLICIES = {
    "fcfs": lambda request: 0,                                             # first come first served
    "sjf": lambda request: len(request.prompt) + request.max_new_tokens,   # shortest job first
    "priority": lambda request: request.priority,                          # 0 is the most urgent
}
MAX_OVERTAKEN = 16


class FairScheduler(PagedScheduler):
    """
    A PagedScheduler that keeps `waiting` in rank order, and sorts `running` to choose a victim. In
    `waiting`, requests that have not arrived stand behind all that have, by arrival.

    policy: one of POLICIES
    bound:  how often a request may be overtaken, and how often preempted
    """

    def __init__(self, max_batch, token_budget, pages, policy, share_prefixes=True,
                 bound=MAX_OVERTAKEN):
        super().__init__(max_batch, token_budget, pages, share_prefixes)
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {policy!r}")
        self.key, self.bound = POLICIES[policy], bound
        # Weak: what has ended, and is held by nobody, leaves nothing behind.
        self.rank = WeakKeyDictionary()   # (has not arrived, is not due, its key, its number)
        self.times_preempted = WeakKeyDictionary()
        self.line = OrderedDict()         # requests that were never admitted, by arrival
        self.added = 0                    # requests so far; the next one's number

    def add(self, request):
        super().add(request)
        self.rank[request] = True, True, 0, self.added
        self.line[request] = None
        self.added += 1

    def enqueue(self, request, due):
        """An arrived request takes its place among the waiting."""
        self.rank[request] = False, not due, self.key(request), self.rank[request][-1]
        insort(self.waiting, request, key=self.rank.get)

    def is_due(self, request):
        return not self.rank[request][1]

    def schedule(self, step):
        """As PagedScheduler.schedule; but first, those that have arrived take their ranks."""
        first = bisect_left(self.waiting, (True,), key=self.rank.get)
        while first < len(self.waiting) and self.waiting[first].arrival <= step:
            request = self.waiting[first]
            del self.waiting[first]
            self.enqueue(request, due=False)
            first += 1
        self.running.sort(key=self.rank.get)   # the last is preempted; new ones go behind
        return super().schedule(step)

    def arrived(self, step):
        """As Scheduler.arrived; but first, the one that has waited longest may become due."""
        while self.line and next(iter(self.line)).finished:   # cancelled: it overtook no other
            self.line.popitem(last=False)
        oldest = next(iter(self.line), None)
        if oldest and oldest.arrival <= step and self.times_overtaken(oldest) >= self.bound:
            if not self.is_due(oldest):
                del self.waiting[bisect_left(self.waiting, self.rank[oldest], key=self.rank.get)]
                self.enqueue(oldest, due=True)
        return super().arrived(step)

    def times_overtaken(self, oldest):
        """How many that arrived later have left the line. All that arrived earlier have."""
        return self.added - len(self.line) - self.rank[oldest][-1]

    def grant_room(self, request):
        """As PagedScheduler.grant_room; a request that is due needs room for its longest answer."""
        need = self.pages.needed(request.kv_tokens)
        if self.is_due(request) and need > len(self.pages.free):
            return False
        if not super().grant_room(request):
            return False
        if self.is_due(request):
            self.pages.allocate(request.block_table, need - len(request.block_table))
        self.line.pop(request, None)
        return True

    def preempt(self, request):
        super().preempt(request)
        self.waiting.popleft()   # not to the front: to its rank
        times = self.times_preempted[request] = self.times_preempted.get(request, 0) + 1
        self.enqueue(request, self.is_due(request) or times >= self.bound)


SCHEDULERS = {   # by policy, for stage 7: generate(model, requests, policy=SCHEDULERS["sjf"])
    "fcfs": PagedScheduler,
    **{policy: partial(FairScheduler, policy=policy) for policy in POLICIES if policy != "fcfs"}}
