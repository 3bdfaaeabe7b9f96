"""
The Scheduler: which requests compute how many tokens in the next step.

That is the first of the two questions in model.py. It is pure bookkeeping: no tensors, no clock.
Every step has a budget of tokens, which is shared out in this order:

    token_budget 8     A d                1. each decode gets its one token
                       B d
                       C c c c c          2. prefill chunks, in order of arrival, get the rest;
                       D c c                 D's prompt continues in the next step

Finished requests leave at once. Waiting requests take their places in order of arrival, while fewer
than `max_batch` run, the budget has something left, and their keys and values fit.
"""
import math
from collections import deque

from cache import KV
from request import advance
from toolbox.validate import at_least_1, check_order, refuse


class Scheduler:
    """
    max_batch:     requests that run at the same time
    token_budget:  tokens computed in a step
    max_kv_tokens: tokens that all caches together can ever hold; None: no limit. An admitted
                   request *reserves* room for its prompt and its longest answer: it can always
                   finish, but much of that room stays empty.
    """

    def __init__(self, max_batch, token_budget, max_kv_tokens=None):
        at_least_1(max_batch=max_batch, token_budget=token_budget)
        if max_kv_tokens is not None:
            at_least_1(max_kv_tokens=max_kv_tokens)
        self.max_batch, self.token_budget = max_batch, token_budget
        self.max_kv_tokens = math.inf if max_kv_tokens is None else max_kv_tokens
        self.waiting, self.running = deque(), []   # both in order of arrival

    def add(self, request):
        """Queues a prepared request. ValueError if it could never run, or arrives out of order."""
        if request.kv_tokens > self.max_kv_tokens:
            refuse(request, f"{request.kv_tokens} KV tokens, there are {self.max_kv_tokens}")
        check_order(request, self.waiting)
        self.waiting.append(request)

    # --- one step: admit requests, share the budget, record what was computed ---

    def schedule(self, step):
        """The plan of this step, [(request, number of tokens), ...]; empty if none has arrived."""
        self.admit(step)
        plan = self.share_budget()
        if not plan and (self.running or self.arrived(step)):   # it would be so for ever
            stuck = (self.running or self.waiting)[0]
            raise RuntimeError(f"{stuck} has arrived at step {step}, but nothing can go on")
        return plan

    def admit(self, step):
        """Arrived requests take free places, in order: none overtakes the first in the queue."""
        todo = sum(request.todo for request in self.running)
        while len(self.running) < self.max_batch and todo < self.token_budget:
            if not self.arrived(step) or not self.grant_room(self.waiting[0]):
                break
            self.running.append(self.waiting.popleft())
            todo += self.running[-1].todo   # only now: grant_room may change it

    def share_budget(self):
        """Each decode gets its token first, whatever prompts need. The rest goes to chunks."""
        plan = [(request, 1) for request in self.running if request.todo == 1]
        budget = self.token_budget - len(plan)   # >= 0: at most token_budget run, see `admit`
        for request in self.running:
            if request.todo > 1 and budget > 0:
                n = min(request.todo, budget)
                plan.append((request, n))
                budget -= n
        return plan

    def update(self, plan, tokens):
        """Records a computed pass. Never before it: a pass that fails must change nothing."""
        advance(plan, tokens)
        self.release()

    # --- between two steps ---

    @property
    def busy(self):
        """Whether anything is left to do."""
        return bool(self.waiting or self.running)

    def next_step(self, step):
        """`step`, or the first arrival if there is nothing to do before it."""
        return step if self.running or not self.waiting else max(step, self.waiting[0].arrival)

    def release(self):
        """Finished requests leave and let go of their caches."""
        for request in [request for request in self.running if request.finished]:
            self.running.remove(request)
            self.free(request)

    # --- the queue and the memory ---

    def arrived(self, step):
        """Whether the first in the queue has arrived."""
        return bool(self.waiting) and self.waiting[0].arrival <= step

    def grant_room(self, request):
        """Gives it a cache, if there is room beside what the running ones have reserved."""
        reserved = sum(other.kv_tokens for other in self.running)
        if reserved + request.kv_tokens > self.max_kv_tokens:
            return False
        request.kv = KV(request.kv_tokens)   # its tensors are made when it is first written
        return True

    def free(self, request):
        request.kv = None
