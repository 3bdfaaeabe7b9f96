"""
Fairness: other orders than first come, first served, and a bound on what they may cost a request.

A *policy* is a sort key: of the waiting requests, the one with the smallest key goes first. The
shortest job first makes the mean wait short; but a long job may wait for ever, if short ones keep
arriving. So there is a *bound*:

    shortest job first, one place, a bound of 3; L is long, a to d are short, all arrive together

    step               0   1   2   3   4
    admitted           a   b   c   L   d
    L was overtaken    1   2   3          so L is *due* at step 3: d is shorter, and has to wait

In the *line* are the requests that were never admitted. Its oldest is due once `bound` others have
overtaken it; any request, once it has been preempted `bound` times. It then goes before all that
are not due, gets pages for its longest answer at once, and is not preempted any more. So the n-th
request to arrive is admitted as the (n + bound)-th at the latest.

The *rank* is one order for the queue and the memory: due or not, then the key, then the arrival.
The first in rank is admitted first. When no page is free, a request takes one from the last in
rank, perhaps itself. So of those that run, the first in rank keeps its pages and goes on at every
step: no live-lock. (vLLM ranks by arrival or by priority, too. It has no bound.)

    python generate_prefix.py --policy sjf     prefix caching with a policy
"""
from bisect import bisect_left, insort
from collections import OrderedDict
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

from generate_prefix import PrefixScheduler

POLICIES = {
    "fcfs": lambda request: 0,                                             # first come first served
    "sjf": lambda request: len(request.prompt) + request.max_new_tokens,   # shortest job first
    "priority": lambda request: request.priority,                          # 0 is the most urgent
}
MAX_OVERTAKEN = 16


class Rank(NamedTuple):
    """Ranks compare from the top: False before True, then small numbers before large ones."""
    to_come: bool    # it has not arrived
    can_wait: bool   # it is not due
    key: int         # the policy's
    number: int      # of those that arrived before it


class FairScheduler(PrefixScheduler):
    """
    A PrefixScheduler that keeps `waiting` in order of rank, and sorts `running` to choose a victim.

    policy: one of POLICIES
    bound:  how often a request may be overtaken, and how often preempted
    """

    def __init__(self, max_batch, token_budget, pages, page_size, policy, bound=MAX_OVERTAKEN):
        super().__init__(max_batch, token_budget, pages, page_size)
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {policy!r}")
        self.key, self.bound, self.added = POLICIES[policy], bound, 0
        self.line = OrderedDict()   # requests that were never admitted, by arrival
        # weak: what has ended, and is held by nobody, leaves nothing behind
        self.rank, self.times_preempted = WeakKeyDictionary(), WeakKeyDictionary()

    def add(self, request):
        super().add(request)
        self.rank[request] = Rank(to_come=True, can_wait=True, key=0, number=self.added)
        self.line[request] = None
        self.added += 1

    # --- the queue, in order of rank ---

    def schedule(self, step):
        """As PagedScheduler.schedule; but first, requests that have arrived take their places."""
        # Those to come are last in the queue, by arrival. (True,) is below each of their ranks.
        i = bisect_left(self.waiting, (True,), key=self.rank.get)
        while i < len(self.waiting) and self.waiting[i].arrival <= step:
            self.move(self.waiting[i], due=False)   # to a place <= i: the next one is at i + 1
            i += 1
        self.running.sort(key=self.rank.get)   # the last is preempted; new ones go behind
        return super().schedule(step)

    def move(self, request, due):
        """A waiting request gets another rank, and the place that belongs to it."""
        del self.waiting[bisect_left(self.waiting, self.rank[request], key=self.rank.get)]
        self.insert(request, due)

    def insert(self, request, due):
        self.rank[request] = Rank(False, not due, self.key(request), self.rank[request].number)
        insort(self.waiting, request, key=self.rank.get)

    # --- the bound ---

    def is_due(self, request):
        return not self.rank[request].can_wait

    def arrived(self, step):
        """As Scheduler.arrived, which is asked before each admission: so what is due now, moves."""
        while self.line and next(iter(self.line)).finished:   # cancelled: it overtook no other
            self.line.popitem(last=False)
        oldest = next(iter(self.line), None)
        if oldest and oldest.arrival <= step and not self.is_due(oldest):
            if self.times_overtaken(oldest) >= self.bound:
                self.move(oldest, due=True)
        return super().arrived(step)

    def times_overtaken(self, oldest):
        """How many have left the line, less those that arrived before it: all of these have."""
        return self.added - len(self.line) - self.rank[oldest].number

    # --- the memory ---

    def grant_room(self, request):
        """As PagedScheduler.grant_room; a request that is due needs room for its longest answer."""
        need = self.pages.needed(request.kv_tokens) if self.is_due(request) else 0
        if need > len(self.pages.free_queue) or not super().grant_room(request):
            return False
        self.pages.allocate(request.block_table, need - len(request.block_table))   # if above 0
        self.line.pop(request, None)
        return True

    def preempt(self, request):
        """As PagedScheduler.preempt; but it returns to its rank, not the front. It is not due."""
        super().preempt(request)
        self.waiting.popleft()   # where super() has put it
        times = self.times_preempted[request] = self.times_preempted.get(request, 0) + 1
        self.insert(request, due=times >= self.bound)


# by policy: generate_prefix.generate(model, requests, scheduler=SCHEDULERS["sjf"])
SCHEDULERS = {policy: partial(FairScheduler, policy=policy) for policy in POLICIES}
SCHEDULERS["fcfs"] = PrefixScheduler   # without a bound: by arrival, none is overtaken
