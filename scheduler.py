"""
The Scheduler: which requests compute how many tokens in the next step.

That is the first of the two questions in model.py. It is pure bookkeeping: no tensors, no clock.
Each step has a budget of tokens, given out in this order:

    token_budget 8     A d                1. requests that run go on, in their order,
                       B d                   each with all it needs or what is left
                       C c c c c
                       D c c              2. newcomers get the rest; D's prompt continues next step

A *decode* (d) needs one token; a prompt needs many, and may get them in chunks (c). No rule puts
decodes first, yet no decode ever waits for a prompt. Above, step by step:

    D gets tokens, so A, B and C left some: each got all it needs, and from now on needs one a step;
    D gets fewer than the 6 it needs, so it uses up the budget, and nobody is admitted after it;
    until D is complete, each step repeats this: D stays the last, and A, B and C are served first;
    a request is admitted only if the others that run leave it a token. So at most 8 requests run,
    and the budget of 8 always has one token for each.

(vLLM V1 has this loop, too.)

A finished request leaves at once. A waiting one is admitted while fewer than `max_batch` run, some
of the budget is left, and there is room in memory.
"""
import math
from collections import deque

from cache import KV
from request import advance
from toolbox.validate import at_least_1, check_order, refuse


class Scheduler:
    """
    max_batch:     the most requests that run at the same time
    token_budget:  the most tokens that a step computes
    max_kv_tokens: the most tokens that all caches together can hold; None: no limit. A request
                   *reserves* room for its prompt and its longest answer when it is admitted: it can
                   always finish, but much of that room stays empty.
    """

    def __init__(self, max_batch, token_budget, max_kv_tokens=None):
        at_least_1(max_batch=max_batch, token_budget=token_budget)
        if max_kv_tokens is not None:
            at_least_1(max_kv_tokens=max_kv_tokens)
        self.max_batch = max_batch
        self.token_budget = token_budget
        self.max_kv_tokens = math.inf if max_kv_tokens is None else max_kv_tokens
        self.waiting = deque()   # in order of arrival
        self.running = []        # in the order in which they were admitted

    def add(self, request):
        """Queues a prepared request. ValueError if it could never run, or arrives out of order."""
        if request.kv_capacity > self.max_kv_tokens:
            refuse(request, f"{request.kv_capacity} KV tokens, there are {self.max_kv_tokens}")
        check_order(request, self.waiting)
        self.waiting.append(request)

    def schedule(self, step):
        """The plan of this step, [(request, number of tokens), ...]; empty if none has arrived."""
        plan = []
        budget = self.token_budget
        before = len(self.running)
        # 1. Requests that run go on. Here `make_room` always succeeds. From paging.py on, it may
        #    *preempt* requests: take their memory, and move them back to the queue. It removes them
        #    from the end of the list that this loop reads, so the loop never skips a request. If
        #    even the current one must go, it is the last of the list by then, and the loop ends.
        for request in self.running:
            # In the stages, n is at least 1 (see above). In beyond/ahead.py it may be 0.
            n = min(request.todo, budget)
            if n and self.make_room(request, n):
                plan.append((request, n))
                budget -= n
        # 2. Newcomers, unless memory was so short that a request had to leave.
        preempted = len(self.running) < before
        while budget and not preempted and len(self.running) < self.max_batch:
            if not self.arrived(step) or not self.admit(self.waiting[0]):
                break   # no request overtakes the first in the queue
            request = self.waiting.popleft()
            self.running.append(request)
            n = min(request.todo, budget)   # only now: `admit` may have found computed tokens
            self.make_room(request, n)      # succeeds: `admit` has checked
            plan.append((request, n))
            budget -= n
        # A guard. If requests are there and none can compute, nothing would change in later steps.
        if not plan and (self.running or self.arrived(step)):
            stuck = (self.running or self.waiting)[0]
            raise RuntimeError(f"{stuck} has arrived at step {step}, but nothing can go on")
        return plan

    def update(self, plan, tokens):
        """Records a computed pass. After a failed pass it is not called: no request advances."""
        advance(plan, tokens)
        self.release()

    def release(self):
        """Finished requests leave and free their memory."""
        for request in list(self.running):   # a copy, because the list shrinks
            if request.finished:
                self.running.remove(request)
                self.free(request)

    @property
    def busy(self):
        return bool(self.waiting or self.running)

    def arrived(self, step):
        """Whether the first request in the queue has arrived."""
        return bool(self.waiting) and self.waiting[0].arrival <= step

    def next_step(self, step):
        """`step`, or the first arrival if there is nothing to do before it."""
        if self.running or not self.waiting:
            return step
        return max(step, self.waiting[0].arrival)

    # --- memory: PagedScheduler replaces these three ---

    def admit(self, request):
        """Whether prompt and longest answer fit beside the others'. If so, it gets its cache."""
        reserved = sum(other.kv_capacity for other in self.running)
        if reserved + request.kv_capacity > self.max_kv_tokens:
            return False
        request.kv = KV(request.kv_capacity)   # its tensors are made when it is first written
        return True

    def make_room(self, request, n):
        """Whether its next n tokens have room in memory. Here it is reserved."""
        return True

    def free(self, request):
        request.kv = None
