"""
The engine: the prefix stage's loop, opened, for requests that come while it runs.

`generate` takes a list and returns when all of it is done. A server has no list: clients ask at any
time, read each token as it appears, and some leave in the middle. Scheduler, pages and forward pass
stay as they are. What changes is how requests get in and how tokens get out:

    other threads              the engine's thread                       other threads
    add(request)    --> inbox --> schedule -> forward pass -> sample --> events: tokens, ends
    cancel(request) --'        `----------- one step() -----------'

One thread owns scheduler, pool, KV and model, and all requests that it has taken in. The others
change the inbox only, and set `stopping`; so only the inbox has a lock. They learn what became of a
request from its events. What they read besides are counts, which may be one step old, and a
request's name.

`while engine.busy: engine.step()` makes the same passes as the prefix stage's `generate`. One thing
is new: a pass may fail, by one request's fault. What its plan made findable is taken back (`undo`).
"""
import time
from collections import deque
from itertools import count
from threading import Condition
from typing import NamedTuple

import torch

from cache import KV
from generate_paged import Paged
from generate_prefix import PrefixScheduler
from model import sample
from request import Request, prepare
from toolbox.trace import Trace
from toolbox.validate import check_pool


class Full(Exception):
    """Too many requests wait."""


class Event(NamedTuple):
    """A request's next token; with a reason, its last one. Or, if token is None, its end."""
    request: Request
    token: int | None
    reason: str | None = None   # of the end: "stop", "length", "error", or what `cancel` was given
    error: str = ""


class Engine:
    """
    pages, page_size, max_batch, token_budget: as in the prefix stage
    max_waiting: requests that may wait, beyond those that fill max_batch; the next one is refused
    """

    def __init__(self, model, pages=256, page_size=16, max_batch=8, token_budget=64,
                 max_waiting=256):
        self.model, self.max_waiting = model, max_waiting
        check_pool(max_batch, pages, page_size, PrefixScheduler, model.config.block_size)
        self.scheduler = PrefixScheduler(max_batch, token_budget, pages, page_size)
        self.pool, self.kv = self.scheduler.pool, KV(pages * page_size)
        # An endless run must not remember all that happened: of the passes, only the last.
        self.trace = Trace("prefix", [], model, self.pool.counts, deque(maxlen=1))
        self.number, self.names = 0, count()   # the next step; the next request
        # An observer's. Before each step: seconds until its pass may run. And after it: the Paged
        # that was computed; None if nothing was.
        self.hold, self.see = lambda: 0, lambda batch: None
        self.stopping = False
        self.inbox = []   # (requests, None): new ones; (requests, finish reason): they shall end
        self.changed = Condition()   # guards it

    # --- for any thread ---

    @property
    def waiting(self):   # how many requests
        return len(self.scheduler.waiting) + sum(
            len(requests) for requests, reason in self.inbox if reason is None)

    @property
    def busy(self):
        return bool(self.inbox or self.scheduler.busy)

    def add(self, *requests):
        """Hands in requests, all or none. ValueError for one that could never run, or Full."""
        prepare(requests, self.model.config)
        trial = PrefixScheduler(len(requests), 1, self.pool.number, self.pool.page_size)
        for request in requests:
            trial.add(request)   # refuses what never fits
        with self.changed:
            there = len(self.scheduler.running) + self.waiting
            places = self.scheduler.max_batch + self.max_waiting
            if there + len(requests) > places:
                kind = Full if len(requests) <= places else ValueError   # it never fits
                raise kind(f"{len(requests)} more requests, {there} are there: the limit is "
                           f"{places}, of which {self.max_waiting} wait (max_waiting)")
            for request in requests:
                request.name, request.asked = f"r{next(self.names)}", time.perf_counter()
            self.tell(requests)

    def cancel(self, *requests, reason="cancelled"):
        """Before the next pass they end, and free their pages. No effect on one that has ended."""
        self.tell(requests, reason)

    def stop(self):
        self.stopping = True
        self.tell()

    def tell(self, requests=(), reason=None):
        """Puts it into the inbox, and ends the sleep of `run`."""
        with self.changed:
            self.inbox.append((requests, reason))
            self.changed.notify()

    # --- for the engine's thread ---

    @torch.inference_mode()
    def step(self, held=False):
        """The loop, once. Returns what happened, [Event, ...]. held: without a pass."""
        events, batch = self.take_in(), None
        if self.scheduler.busy and not held:
            # 1. which requests compute how many tokens in this step
            plan = self.scheduler.schedule(self.number)
            self.trace.step_times.clear()
            try:
                # 2. one forward pass for decodes and chunks together
                batch = Paged(plan, self.kv, self.pool, self.model.device)
                with self.trace.forward_pass(self.number, batch):
                    logits = self.model(batch.tokens, batch.positions, batch.attend, batch.wanted)
                # 3. one token for each request that has nothing more to compute
                tokens = sample(logits, batch.sampled)
            except Exception as failure:   # the others are computed again
                self.scheduler.undo(plan)
                batch, error = None, f"{type(failure).__name__}: {failure}"
                named = getattr(failure, "request", None)   # whose fault it is, if that is known
                lost = [request for request, _ in plan if named in (None, request)]
                events += self.end(lost, "error", error)
            else:
                self.scheduler.update(plan, tokens)
                self.trace.record_tokens(self.number, batch.sampled, tokens, logits)
                self.end([each for each in batch.sampled if each.finished])
                events += [Event(each, token, each.finish_reason)
                           for each, token in zip(batch.sampled, tokens)]
            self.number += 1
        self.see(batch)
        return events

    def take_in(self):
        """Does what has been asked for since the last step. Returns the events."""
        with self.changed:
            inbox, self.inbox = self.inbox, []
        events = []
        for requests, reason in inbox:
            if reason:
                events += self.end([each for each in requests if not each.finished], reason)
            else:
                for request in requests:
                    request.arrival = self.number
                    self.scheduler.add(request)
        return events

    def end(self, requests, reason=None, error=""):
        """They end if they have not, wherever they are, and are forgotten. Returns the events."""
        for request in requests:
            request.finish_reason = request.finish_reason or reason
            if request in self.scheduler.waiting:
                self.scheduler.waiting.remove(request)
            self.trace.reached.pop(request.name, None)
        self.scheduler.release()
        return [Event(request, None, request.finish_reason, error) for request in requests]

    def run(self, deliver):
        """
        The engine's thread, until `stop`: steps, and sleeps while there is nothing to do.

        deliver: called with the events of each step
        """
        while not self.stopping:
            hold = self.hold()
            if events := self.step(held=hold > 0):
                deliver(events)
            with self.changed:
                if not self.inbox and (hold or not self.scheduler.busy):
                    self.changed.wait(hold or None)
        self.take_in()   # what was cancelled before the stop frees its pages
