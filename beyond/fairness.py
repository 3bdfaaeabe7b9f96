"""
Fairness: orders other than first come, first served, and a bound on what they cost a request.

1. A *policy* is a sort key. Of the requests that wait, the one with the smallest key is admitted
   next. Shortest job first (sjf) makes the mean wait short. Its key is what the client allows,
   prompt + max_new_tokens, because nobody knows what the answer will need.
2. Short jobs that keep arriving could make a long one wait for ever, so there is a *bound*.
   Consider the oldest request that has never been admitted. Once `bound` later ones have been
   admitted before it, it is *due* and goes first. So the n-th to arrive is at the latest the
   (n + bound)-th to be admitted.

    sjf, max_batch 1, a bound of 3; L is long, a to d are short; all arrive together, L first

    step               0   1   2   3   4
    admitted           a   b   c   L   d
    L was overtaken    1   2   3           in step 3, L is due: d is shorter, and has to wait

3. *Rank* is one order for queue and memory: due or not, then the key, then the arrival. It chooses
   the next newcomer. When pages run out, it also chooses the *victim*: the running request that is
   last in rank is preempted, and waits at its rank. So the first in rank keeps its pages, and goes
   on in every step that preempts nobody: there is no live-lock.
4. A request that was preempted `bound` times is due, too. A due request gets pages for its longest
   answer when it is admitted, and never needs another one. Each request that does need a page ranks
   behind it. So it is not preempted any more.

Rank does not choose everything. Running requests go on in the order in which they were admitted. If
they were sorted by rank, an incomplete prompt could stand before decodes, and use up their budget.
Nor does rank take a place in the batch from anybody: as in vLLM, even a request of the first
priority waits while `max_batch` others run.

This is fair to requests, not to users: a user with a thousand requests gets a thousand turns. To be
fair to users, serve next the user who has received the fewest tokens (Virtual Token Counter: Sheng
et al., "Fairness in Serving Large Language Models", 2024). vLLM knows fcfs and priority. Without a
bound, `priority` here makes vLLM's own plans, but for one thing (`empty_steps`).

    python -m beyond.fairness                   the example
    python generate_prefix.py --policy sjf      or generate(..., scheduler_class=SCHEDULERS["sjf"])
"""
if __spec__ is None:
    raise SystemExit("start it in the folder above: python -m beyond.fairness")

from bisect import bisect_left, insort
from collections import OrderedDict
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

from generate_prefix import PrefixScheduler
from toolbox.validate import check, is_number, one_of

POLICIES = {
    "fcfs": lambda request: 0,                                             # first come first served
    "sjf": lambda request: len(request.prompt) + request.max_new_tokens,   # shortest job first
    "priority": lambda request: request.priority,                          # 0 is the most urgent
}
MAX_OVERTAKEN = 16

DUE = 0       # no other request may overtake it any more
ARRIVED = 1   # the policy ranks it
TO_COME = 2   # it is in the queue, but the step of its arrival has not come


class Rank(NamedTuple):
    """Ranks are compared like tuples; the smallest goes first."""
    level: int    # DUE, ARRIVED or TO_COME
    key: object   # the policy's; 0 for requests that are still to come
    number: int   # so many requests were added before it


class FairScheduler(PrefixScheduler):
    """
    A PrefixScheduler that keeps `waiting` in order of rank, and preempts by rank.

    policy: a name in POLICIES
    bound:  how often a request may be overtaken before it is admitted, and how often preempted
    """
    # Where a request makes room by leaving itself, vLLM ends the step, even if nothing is planned.
    # By default the next request gets its turn instead: a step is never empty.
    empty_steps = False

    def __init__(self, max_batch, token_budget, pages, page_size, policy, bound=MAX_OVERTAKEN):
        one_of("policy", policy, *POLICIES)
        check("bound", bound, lambda n: is_number(n) and n >= 0, "a number of at least 0")
        super().__init__(max_batch, token_budget, pages, page_size)
        self.key = POLICIES[policy]
        self.bound = bound
        self.plan = {}                       # of the step that is being planned: {request: n}
        self.added = 0                       # requests so far
        self.never_admitted = OrderedDict()  # {request: None}, the oldest first
        # These are weak, so that requests that have ended leave nothing behind.
        self.rank = WeakKeyDictionary()
        self.times_preempted = WeakKeyDictionary()

    def add(self, request):
        super().add(request)   # to the end of the queue
        self.rank[request] = Rank(TO_COME, 0, self.added)
        self.never_admitted[request] = None
        self.added += 1

    # --- ranks ---

    def change_rank(self, i, level):
        """Moves the i-th request of the queue to another level, and to its place in the queue."""
        request = self.waiting[i]
        del self.waiting[i]
        self.rank[request] = Rank(level, self.key(request), self.rank[request].number)
        insort(self.waiting, request, key=self.rank.get)

    def place_of(self, rank):
        """Where the first request stands in the queue that has this rank, or a later one."""
        return bisect_left(self.waiting, rank, key=self.rank.get)

    def is_due(self, request):
        return self.rank[request].level == DUE

    def rank_newcomers(self, step):
        """The policy ranks requests that have arrived."""
        i = self.place_of((TO_COME,))
        while i < len(self.waiting) and self.waiting[i].arrival <= step:
            self.change_rank(i, ARRIVED)   # it moves forward, so the next one is at i + 1
            i += 1

    def rank_oldest(self):
        """The oldest request that was never admitted is due once `bound` others overtook it."""
        while self.never_admitted and next(iter(self.never_admitted)).finished:   # cancelled
            self.never_admitted.popitem(last=False)
        if not self.never_admitted:
            return
        rank = self.rank[next(iter(self.never_admitted))]
        # `rank.number` of those that have left `never_admitted` were added before the oldest. The
        # others were admitted before it, and so overtook it.
        have_left = self.added - len(self.never_admitted)
        times_overtaken = have_left - rank.number
        if rank.level == ARRIVED and times_overtaken >= self.bound:
            self.change_rank(self.place_of(rank), DUE)

    # --- one step ---

    def schedule(self, step):
        """As Scheduler.schedule; but ranks choose, and a victim may stand anywhere in the plan."""
        before = len(self.running)
        # 1. Requests that run go on.
        self.go_on()
        # 2. Newcomers, unless memory was so short that a request had to leave.
        preempted = len(self.running) < before
        self.rank_newcomers(step)
        self.rank_oldest()
        if not preempted:
            self.admit_newcomers(step)
        plan = list(self.plan.items())
        self.plan = {}   # it would keep requests that have ended
        return plan

    def go_on(self):
        """Plans what runs, in the order in which it was admitted."""
        for request in list(self.running):
            if request not in self.running:   # a victim of one before it
                continue
            n = min(request.todo, self.budget)
            if n == 0:
                continue
            if self.make_room(request, n):
                self.plan[request] = n
            elif self.plan or self.empty_steps:   # it was last in rank, and has left
                break

    def admit_newcomers(self, step):
        """Plans newcomers by rank, while places, budget and memory last."""
        while self.budget and len(self.running) < self.max_batch:
            if not self.arrived(step) or not self.admit(self.waiting[0]):
                break
            request = self.waiting.popleft()
            self.running.append(request)
            n = min(request.todo, self.budget)
            self.make_room(request, n)
            self.plan[request] = n
            self.rank_oldest()   # it may have been overtaken just now

    @property
    def budget(self):
        """What the plan leaves of it. A victim's tokens are returned, as it leaves the plan."""
        return self.token_budget - sum(self.plan.values())

    # --- memory ---

    def victim(self):
        """The running request that is last in rank: `make_room` preempts it."""
        return max(self.running, key=self.rank.get)

    def preempt(self, request):
        """As PagedScheduler.preempt; but it leaves the plan, and moves to its rank in the queue."""
        self.plan.pop(request, None)
        super().preempt(request)   # to the front of the queue
        times = self.times_preempted.get(request, 0) + 1
        self.times_preempted[request] = times
        self.change_rank(0, DUE if times >= self.bound else ARRIVED)

    def admit(self, request):
        """As PrefixScheduler.admit; a request that is due needs, and gets, all its pages now."""
        pages = self.pool.needed(request.kv_capacity) if self.is_due(request) else 0
        if pages > len(self.pool.free_queue) or not super().admit(request):
            return False
        self.pool.allocate(request.block_table, pages - len(request.block_table))   # if above 0
        self.never_admitted.pop(request, None)
        return True


SCHEDULERS = {policy: partial(FairScheduler, policy=policy) for policy in POLICIES}
SCHEDULERS["fcfs"] = PrefixScheduler   # it needs no bound: nobody is overtaken


if __name__ == "__main__":
    from lab.essays import fairness, main
    main(fairness, __doc__)
