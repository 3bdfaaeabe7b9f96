"""
The Scheduler: which requests compute how many tokens in the next step.

That is the first of the two questions in model.py. It is pure bookkeeping: no tensors, no clock.
Every step has a budget of tokens, which is shared out in this order (claim H12):

    token_budget 8     A d                1. each decode gets its one token
                       B d
                       C c c c c          2. prefill chunks, in order of arrival, get the rest;
                       D c c                 D's prompt continues in the next step

Finished requests leave at once. Waiting requests take their places in order of arrival, as long as
fewer than `max_batch` run, the budget has something left for them, and their keys and values fit.
"""
import math
from collections import deque

from request import Request as Request  # also importable from here
from request import advance, at_least_1


class Scheduler:
    """
    max_batch:     requests that run at the same time
    token_budget:  tokens computed in a step
    max_kv_tokens: tokens that all caches together may come to hold; None: no limit. An admitted
                   request *reserves* room for its prompt and its longest answer: it can always
                   finish, and much of that room stays empty.
    """

    def __init__(self, max_batch, token_budget, max_kv_tokens=None):
        at_least_1(max_batch=max_batch, token_budget=token_budget)
        if max_kv_tokens is not None:
            at_least_1(max_kv_tokens=max_kv_tokens)
        self.max_batch, self.token_budget = max_batch, token_budget
        self.max_kv_tokens = math.inf if max_kv_tokens is None else max_kv_tokens
        self.waiting, self.running = deque(), []   # waiting: in order of arrival

    def add(self, request):
        """Queues a prepared request. ValueError if it could never run, or arrives out of order."""
        if request.kv_tokens > self.max_kv_tokens:
            raise ValueError(f"{request}: prompt of {len(request.prompt)} + max_new_tokens "
                             f"{request.max_new_tokens} needs {request.kv_tokens} KV tokens, "
                             f"max_kv_tokens is {self.max_kv_tokens}")
        if self.waiting and request.arrival < self.waiting[-1].arrival:
            raise ValueError(f"{request} arrives before {self.waiting[-1]}: add it first")
        self.waiting.append(request)

    def schedule(self, step):
        """The plan of this step, [(request, number of tokens), ...]; empty if none has arrived."""
        self.release()
        self.admit(step)
        plan = self.share_budget()
        if not plan and (stuck := [*self.running, self.next_waiting(step)][0]):
            raise RuntimeError(f"{stuck} has arrived at step {step}, but nothing can go on")
        return plan

    def admit(self, step):
        """Arrived requests take free places, in order: none overtakes the first in the queue."""
        todo = sum(request.todo for request in self.running)
        while len(self.running) < self.max_batch and todo < self.token_budget:
            request = self.next_waiting(step)
            if request is None or not self.grant_room(request):
                break
            self.leave_queue(request)
            self.running.append(request)
            todo += request.todo

    def share_budget(self):
        """One token for each decode first, so that no prompt delays them; then prefill chunks."""
        plan = [(request, 1) for request in self.running if request.todo == 1]
        budget = self.token_budget - len(plan)
        for request in self.running:
            if request.todo > 1 and budget > 0:
                n = min(request.todo, budget)
                plan.append((request, n))
                budget -= n
        return plan

    def update(self, plan, tokens):
        """After a pass. Not before: a pass that fails changes nothing."""
        advance(plan, tokens)
        self.release()

    def cancel(self, request):
        """Ends a request and frees what it holds. Between steps; Request.cancel works any time."""
        request.cancel()
        if request in self.waiting:
            self.waiting.remove(request)
        self.release()

    def release(self):
        """Finished requests leave and let go of their caches."""
        finished = [request for request in self.running if request.finished]
        for request in finished:
            self.running.remove(request)
            self.free(request)

    @property
    def busy(self):
        return bool(self.waiting or self.running)

    def next_step(self, step):
        """`step`, or the first arrival if there is nothing to do before it."""
        return step if self.running or not self.waiting else max(step, self.waiting[0].arrival)

    def next_waiting(self, step):
        """The request to admit next; None if none has arrived. Cancelled ones are dropped."""
        while self.waiting and self.waiting[0].finished:
            self.waiting.popleft()
        return self.waiting[0] if self.waiting and self.waiting[0].arrival <= step else None

    def leave_queue(self, request):
        """Takes it out of the queue."""
        self.waiting.remove(request)   # found at once: it is the first one

    def grant_room(self, request):
        """Whether there is room for it beside what the running requests have reserved."""
        reserved = sum(other.kv_tokens for other in self.running)
        return reserved + request.kv_tokens <= self.max_kv_tokens

    def free(self, request):
        request.kv = None
