"""
Fairness: orders other than first come, first served, and a bound on what they cost a request.

1. A *policy* is a sort key. Of the requests that wait, the one with the smallest key is admitted
   next. Shortest job first (sjf) makes the mean wait short. Its key is what the client allows,
   prompt + max_new_tokens; what the answer will need, nobody knows.
2. Short jobs that keep arriving could make a long one wait for ever. So there is a *bound*. Take
   the oldest request that has never been admitted. When `bound` later ones have been admitted ahead
   of it, it is *due* and goes first. So the n-th to arrive is at the latest the (n + bound)-th to
   be admitted.

    sjf, max_batch 1, a bound of 3; L is long, a to d are short; all arrive together, L first

    step               0   1   2   3   4
    admitted           a   b   c   L   d
    L was overtaken    1   2   3           in step 3, L is due: d is shorter, and has to wait

3. *Rank* is one order for queue and memory: due or not, then the key, then the arrival. It chooses
   the next newcomer. When pages run out, it chooses the *victim*, too: the running request that is
   last in rank is preempted, and waits at its rank. So the first in rank keeps its pages, and goes
   on at every step that preempts none: no live-lock. A victim that this step's plan already holds
   gives its tokens back to the budget. Running requests keep the order in which they were admitted:
   sorted by rank, an incomplete prompt could stand before decodes, which would then stall.
4. A request that was preempted `bound` times is due, too. A due request gets pages for its longest
   answer at once. All that still need pages rank behind it, so it is not preempted any more.

This is fair to requests, not to users: a user with a thousand requests gets a thousand turns. To be
fair to users, serve next the user who has got the fewest tokens (Virtual Token Counter, VTC: Sheng
et al., "Fairness in Serving Large Language Models", 2024). vLLM ranks by fcfs or priority;
without a bound, the plans of `priority` here are those of vLLM's own.

    python -m beyond.fairness                   the example
    python generate_prefix.py --policy sjf      or generate(..., scheduler_class=SCHEDULERS["sjf"])
"""
if __spec__ is None:
    raise SystemExit("start it in the folder above: python -m beyond.fairness")

from bisect import bisect_left, insort
from collections import OrderedDict, namedtuple
from functools import partial
from weakref import WeakKeyDictionary

from generate_prefix import PrefixScheduler
from toolbox.validate import check, is_number, one_of

POLICIES = {
    "fcfs": lambda request: 0,                                             # first come first served
    "sjf": lambda request: len(request.prompt) + request.max_new_tokens,   # shortest job first
    "priority": lambda request: request.priority,                          # 0 is the most urgent
}
MAX_OVERTAKEN = 16
DUE, ARRIVED, TO_COME = range(3)   # the queue also holds requests that have not arrived yet
Rank = namedtuple("Rank", "level key number")   # the smallest first; number: added as the n-th


class FairScheduler(PrefixScheduler):
    """
    A PrefixScheduler that keeps `waiting` by rank and preempts by rank. policy: a name in POLICIES.
    bound: how often a request may be overtaken before it is admitted, and how often preempted
    """
    empty_steps = False   # True: as vLLM, whose first request, if it preempts itself, ends the step

    def __init__(self, max_batch, token_budget, pages, page_size, policy, bound=MAX_OVERTAKEN):
        one_of("policy", policy, *POLICIES)
        check("bound", bound, lambda n: is_number(n) and n >= 0, "a number of at least 0")
        super().__init__(max_batch, token_budget, pages, page_size)
        self.key = POLICIES[policy]
        self.bound = bound
        self.added = 0
        self.new = OrderedDict()   # its keys: requests that were never admitted, by arrival
        # weak: requests that have ended leave nothing behind
        self.rank = WeakKeyDictionary()
        self.times_preempted = WeakKeyDictionary()

    def add(self, request):
        super().add(request)   # to the end of the queue
        self.new[request] = self.rank[request] = Rank(TO_COME, 0, self.added)
        self.added += 1

    def move(self, i, level):
        """Gives the i-th in the queue another rank, and the place that belongs to it."""
        request = self.waiting[i]
        del self.waiting[i]
        self.rank[request] = Rank(level, self.key(request), self.rank[request].number)
        insort(self.waiting, request, key=self.rank.get)

    def is_due(self, request):
        return self.rank[request].level == DUE

    def rank_newcomers(self, step):
        """Requests that have arrived get their rank."""
        i = bisect_left(self.waiting, (TO_COME,), key=self.rank.get)
        while i < len(self.waiting) and self.waiting[i].arrival <= step:
            self.move(i, ARRIVED)   # to a place <= i: the next one is at i + 1
            i += 1

    def rank_overtaken(self):
        """The oldest request that was never admitted may be due now."""
        while self.new and next(iter(self.new)).finished:   # cancelled: it has overtaken nobody
            self.new.popitem(last=False)
        if self.new:
            rank = self.rank[next(iter(self.new))]   # of the oldest: all before it have left
            times_overtaken = self.added - len(self.new) - rank.number
            if rank.level == ARRIVED and times_overtaken >= self.bound:
                self.move(bisect_left(self.waiting, rank, key=self.rank.get), DUE)

    def schedule(self, step):
        """As Scheduler.schedule; but ranks choose, and a victim may stand anywhere in the plan."""
        self.plan = {}   # request -> number of tokens
        running = list(self.running)
        for request in running:
            if request in self.running:   # no victim yet
                n = min(request.todo, self.budget)
                if n and self.make_room(request, n):
                    self.plan[request] = n
                elif self.plan or self.empty_steps:
                    break
        preempted = len(self.running) < len(running)
        self.rank_newcomers(step)
        self.rank_overtaken()
        while self.budget and not preempted and len(self.running) < self.max_batch:
            if not self.arrived(step) or not self.admit(self.waiting[0]):
                break
            request = self.waiting.popleft()
            self.running.append(request)
            n = min(request.todo, self.budget)
            self.make_room(request, n)
            self.plan[request] = n
            self.rank_overtaken()
        plan = [*self.plan.items()]
        self.plan.clear()   # so that no request is kept after its end
        return plan

    @property
    def budget(self):   # what the plan leaves of it
        return self.token_budget - sum(self.plan.values())

    def victim(self):
        return max(self.running, key=self.rank.get)

    def preempt(self, request):
        """As PagedScheduler.preempt; but it leaves the plan, and moves to its rank in the queue."""
        self.plan.pop(request, None)
        super().preempt(request)
        times = self.times_preempted[request] = self.times_preempted.get(request, 0) + 1
        self.move(0, DUE if times >= self.bound else ARRIVED)

    def admit(self, request):
        """As PrefixScheduler.admit; what is due needs room for its longest answer."""
        need = self.pool.needed(request.kv_capacity) if self.is_due(request) else 0
        if need > len(self.pool.free_queue) or not super().admit(request):
            return False
        self.pool.allocate(request.block_table, need - len(request.block_table))   # if above 0
        self.new.pop(request, None)
        return True


SCHEDULERS = {policy: partial(FairScheduler, policy=policy) for policy in POLICIES}
SCHEDULERS["fcfs"] = PrefixScheduler   # without a bound: nobody is overtaken


if __name__ == "__main__":
    from lab.essays import fairness, main
    main(fairness, __doc__)
