"""
Fairness: orders other than first come, first served, and a bound on what they cost a request.

1. A *policy* is a sort key. Of the requests that wait, the one with the smallest key is admitted
   next. Shortest job first (sjf) makes the mean wait short. Its key is what the client allows,
   prompt + max_new_tokens; what the answer will need, nobody knows.
2. Short jobs that keep arriving could make a long one wait for ever. So there is a *bound*. Once
   `bound` later requests were admitted before the oldest that has never run, that one is *due*, and
   goes before all that are not. The n-th to arrive is admitted as the (n + bound)-th at the latest.

    sjf, max_batch 1, a bound of 3; L is long, a to d are short; all arrive together, L first

    step               0   1   2   3   4
    admitted           a   b   c   L   d
    L was overtaken    1   2   3           in step 3, L is due: d is shorter, and has to wait

3. *Rank* is one order for queue and memory: due or not, then the key, then the arrival. When pages
   run out, the running request that is last in rank is preempted, and waits at its rank. So the
   first in rank keeps its pages and goes on at every step: no live-lock.
4. A request that was preempted `bound` times is due, too. A due request gets pages for its longest
   answer at once. All that still need pages rank behind it, so it is not preempted any more.

This is fair to requests, not to users: one who sends a thousand gets a thousand turns. A service
with many users serves next the user with the fewest tokens so far (Virtual Token Counter, VTC:
Sheng et al., "Fairness in Serving Large Language Models", 2024). vLLM ranks by fcfs or priority.

    python -m beyond.fairness                   the example
    python generate_prefix.py --policy sjf      or generate(..., scheduler=SCHEDULERS["sjf"])
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
    A PrefixScheduler that keeps `waiting` and `running` by rank. policy: a name in POLICIES.
    bound: how often a request may be overtaken before it is admitted, and how often preempted
    """

    def __init__(self, max_batch, token_budget, pages, page_size, policy, bound=MAX_OVERTAKEN):
        one_of("policy", policy, *POLICIES)
        check("bound", bound, lambda n: is_number(n) and n >= 0, "a number of at least 0")
        super().__init__(max_batch, token_budget, pages, page_size)
        self.key, self.bound, self.added = POLICIES[policy], bound, 0
        self.new = OrderedDict()   # its keys: requests that were never admitted, by arrival
        # weak: requests that have ended leave nothing behind
        self.rank, self.times_preempted = WeakKeyDictionary(), WeakKeyDictionary()

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

    def arrived(self, step):
        """As Scheduler.arrived, which is asked before each admission; but first, ranks change."""
        i = bisect_left(self.waiting, (TO_COME,), key=self.rank.get)
        while i < len(self.waiting) and self.waiting[i].arrival <= step:
            self.move(i, ARRIVED)   # to a place <= i: the next one is at i + 1
            i += 1
        while self.new and next(iter(self.new)).finished:   # cancelled: it has overtaken nobody
            self.new.popitem(last=False)
        if self.new:
            rank = self.rank[next(iter(self.new))]   # of the oldest: all before it have left
            times_overtaken = self.added - len(self.new) - rank.number
            if rank.level == ARRIVED and times_overtaken >= self.bound:
                self.move(bisect_left(self.waiting, rank, key=self.rank.get), DUE)
        return super().arrived(step)

    def schedule(self, step):
        self.running.sort(key=self.rank.get)   # the last is preempted; new ones are put behind it
        return super().schedule(step)

    def preempt(self, request):
        """As PagedScheduler.preempt; but from the front of the queue it moves to its rank."""
        super().preempt(request)
        times = self.times_preempted[request] = self.times_preempted.get(request, 0) + 1
        self.move(0, DUE if times >= self.bound else ARRIVED)

    def grant_room(self, request):
        """As PrefixScheduler.grant_room; what is due needs room for its longest answer."""
        need = self.pages.needed(request.kv_tokens) if self.is_due(request) else 0
        if need > len(self.pages.free_queue) or not super().grant_room(request):
            return False
        self.pages.allocate(request.block_table, need - len(request.block_table))   # if above 0
        self.new.pop(request, None)
        return True


SCHEDULERS = {policy: partial(FairScheduler, policy=policy) for policy in POLICIES}
SCHEDULERS["fcfs"] = PrefixScheduler   # without a bound: nobody is overtaken


if __name__ == "__main__":
    from lab.essays import fairness, main
    main(fairness, __doc__)
