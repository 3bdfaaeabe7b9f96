"""
The engine: stage 7's loop, opened, for requests that come while it runs.

`generate` takes a list and returns when all of it is done. A server has no list: clients ask at any
time, read each token as it appears, and some leave in the middle. Scheduler, pages and forward pass
stay as they are. What changes is how requests get in and how tokens get out:

    other threads              the engine's thread                       other threads
    add(request)    --> inbox --> schedule -> forward pass -> sample --> events: tokens, ends
    cancel(request) --> left  -'  `----------- one step() -----------'

One thread owns scheduler, pages, pool and model, and all requests that it has taken in. The others
change the inbox only, so only the inbox has a lock. They learn what became of a request from its
events. What they read besides is single numbers: how many wait, and for /metrics how many run and
how many pages are free. Such a number may be one step old.

The scheduler is that of beyond/fork.py: several answers to one prompt are asked for together, and
share its pages from the first step on. `while engine.busy: engine.step()` makes the same passes as
stage 7's `generate` with the policy ForkScheduler.
"""
import time
from collections import deque
from itertools import count
from threading import Condition
from typing import NamedTuple

import torch

from beyond.fork import ForkScheduler
from cache import KV
from generate_paged import Paged
from model import sample
from paging import Pages
from request import Request, prepare
from toolbox.trace import Trace


class Full(Exception):
    """Too many requests wait."""


class Event(NamedTuple):
    """A request's next token; or, if token is None, its end."""
    request: Request
    token: int | None
    reason: str | None = None   # of the end: "stop", "length", "cancelled" or "error"
    error: str = ""


class Observer:
    """Sees what each step computed, and may hold the next one. This one lets all pass."""

    def hold(self):
        """Seconds until the next pass may run: 0 lets it run now. Called before each step."""
        return 0

    def see(self, batch):
        """After each step. batch: the Paged that was computed; None: nothing was."""


class Engine:
    """
    pages, page_size, max_batch, token_budget, share_prefixes: as in stage 7
    max_waiting: requests that may wait; the next one is refused
    """

    def __init__(self, model, pages=256, page_size=16, max_batch=8, token_budget=64,
                 share_prefixes=True, max_waiting=256):
        self.model, self.max_waiting = model, max_waiting
        self.pages = Pages(pages, page_size)
        self.pool = KV(pages * page_size)
        self.scheduler = ForkScheduler(max_batch, token_budget, self.pages, share_prefixes)
        # An endless run must not remember all that happened: of the passes, only the last.
        self.trace = Trace("paged", [], self.scheduler.counts, deque(maxlen=1))
        self.number, self.names, self.unfinished = 0, count(), {}   # unfinished: name -> request
        self.observer = Observer()
        self.changed = Condition()   # guards the inbox:
        self.inbox, self.left, self.woken, self.stopping = [], [], False, False

    # --- for any thread ---

    @property
    def waiting(self):   # how many requests
        return len(self.inbox) + len(self.scheduler.waiting)

    @property
    def busy(self):
        return bool(self.unfinished or self.inbox or self.left)

    def add(self, *requests):
        """Hands in requests, all or none. ValueError for one that could never run, or Full."""
        prepare(requests, self.model.config)
        trial = ForkScheduler(len(requests), 1, self.pages)
        for request in requests:
            trial.add(request)   # refuses what never fits
        if len(requests) > self.max_waiting:
            raise ValueError(f"{len(requests)} requests at once: at most {self.max_waiting} may "
                             "wait, max_waiting")
        with self.changed:
            if self.waiting + len(requests) > self.max_waiting:
                raise Full(f"the queue is full, with {self.waiting} of {self.max_waiting} waiting")
            for request in requests:
                request.name, request.asked = f"r{next(self.names)}", time.perf_counter()
            self.inbox += requests
            self.changed.notify()

    def cancel(self, request, reason="cancelled"):
        """Before the next pass it ends, and frees its pages. No effect on one that has ended."""
        with self.changed:
            self.left.append((request, reason))
            self.changed.notify()

    def stop(self):
        self.stopping = True
        self.wake()

    def wake(self):
        """Ends the sleep of `run`: the observer may hold no longer."""
        with self.changed:
            self.woken = True
            self.changed.notify()

    # --- for the engine's thread ---

    @torch.inference_mode()
    def step(self, held=False):
        """Stage 7's loop, once. Returns what happened, [Event, ...]. held: without a pass."""
        self.take_in()
        events, batch, error = [], None, ""
        if self.scheduler.busy and not held:
            # 1. which requests compute how many tokens in this step
            plan = self.scheduler.schedule(self.number)
            try:
                # 2. one forward pass for decodes and chunks together
                batch = Paged(plan, self.pool, self.pages, self.model.device)
                with self.trace.forward_pass(self.number, batch):
                    logits = self.model(batch.tokens, batch.positions, batch.attend, batch.wanted)
                # 3. one token for each request that has nothing more to compute
                tokens = sample(logits, batch.sampled)
            except Exception as failure:   # its requests end, and all others go on
                batch, error = None, f"{type(failure).__name__}: {failure}"
                self.end((request, "error") for request, _ in plan)
            else:
                self.scheduler.update(plan, tokens)
                self.trace.record_tokens(self.number, batch.sampled, tokens, logits)
                events = [*map(Event, batch.sampled, tokens)]
            self.trace.step_times.clear()
            self.number += 1
        events += self.ends(error)
        self.observer.see(batch)
        return events

    def take_in(self):
        """What has come since the last step: new requests, and requests to cancel."""
        with self.changed:
            new, left, self.inbox, self.left = self.inbox, self.left, [], []
        for request in new:
            request.arrival = self.number
            self.unfinished[request.name] = request
            self.scheduler.add(request)
        self.end(left)

    def end(self, requests):
        """Ends requests, [(request, finish reason), ...], wherever they are."""
        for request, reason in requests:
            request.finish_reason = request.finish_reason or reason
            if request in self.scheduler.waiting:
                self.scheduler.waiting.remove(request)
        self.scheduler.release()

    def ends(self, error):
        """Events of the requests that have finished. From now on nothing remembers them."""
        ended = [request for request in self.unfinished.values() if request.finished]
        for request in ended:
            del self.unfinished[request.name]
            self.trace.reached.pop(request.name, None)
        return [Event(request, None, request.finish_reason,
                      error if request.finish_reason == "error" else "") for request in ended]

    def run(self, deliver):
        """
        The engine's thread, until `stop`: steps, and sleeps while there is nothing to do.

        deliver: called with the events of each step
        """
        while not self.stopping:
            hold = self.observer.hold()
            if events := self.step(held=hold > 0):
                deliver(events)
            with self.changed:
                sleep = hold or (0 if self.unfinished else 5)
                if sleep and not (self.inbox or self.left or self.woken):
                    self.changed.wait(min(sleep, 5))
                self.woken = False
