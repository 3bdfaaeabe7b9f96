"""
The engine of the server: engine.py in a thread of its own, with an inbox and events.

The loop is that of engine.py. What a server adds is how requests get in, and how tokens get out:

    other threads              the engine's thread                       other threads
    submit(request) --> inbox --> add, abort, step ----------------------> events: tokens, ends
    cancel(request) --'        `---- one turn() ----'

One thread owns scheduler, pool, KV and model, and all requests that it has taken in. The others
change the inbox only, and set `stopping`; so only the inbox has a lock. They learn what became of a
request from its events. What they read besides are counts, which may be one step old, and a
request's name.

A pass may fail, by one request's fault. That request ends with an error, and the others go on.
"""
import time
from itertools import count
from threading import Condition
from typing import NamedTuple

from engine import Engine
from generate_paged import Paged
from generate_prefix import PrefixScheduler
from request import Request, prepare


class Full(Exception):
    """Too many requests wait."""


class Event(NamedTuple):
    """A request's next token; with a reason, its last one. Or, if token is None, its end."""
    request: Request
    token: int | None
    reason: str | None = None   # of the end: "stop", "length", "error", or what `cancel` was given
    error: str = ""


class ThreadedEngine(Engine):
    """
    pages, page_size, max_batch, token_budget: as in engine.py
    max_waiting: requests that may wait, beyond those that fill max_batch; the next one is refused
    """

    def __init__(self, model, pages=256, page_size=16, max_batch=8, token_budget=64,
                 max_waiting=256):
        super().__init__(model, pages, page_size, max_batch, token_budget, layout=self.new_batch)
        self.max_waiting = max_waiting
        self.pool = self.scheduler.pool
        self.names = count()   # of the requests
        self.batch = None      # the Paged that the last turn computed; None if it computed nothing
        # An observer's. Before each turn: seconds until its pass may run. And after it: the batch.
        self.hold = lambda: 0
        self.see = lambda batch: None
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

    def submit(self, *requests):
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
                request.name = f"r{next(self.names)}"
                request.asked = time.perf_counter()
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

    def new_batch(self, *parts):
        """The layout of the pass; kept, for the observer."""
        self.batch = Paged(*parts)
        return self.batch

    def turn(self, held=False):
        """Does what has been asked for, and a step unless `held`. Returns [Event, ...]."""
        events = self.take_in()
        self.batch = None
        if self.scheduler.busy and not held:
            events += self.events_of_step()
        self.see(self.batch)
        return events

    def events_of_step(self):
        try:
            tokens = self.step()
        except Exception as failure:   # the others are computed again
            if not self.plan:   # it is the scheduler's, and no request's fault
                raise
            self.batch = None
            error = f"{type(failure).__name__}: {failure}"
            at_fault = getattr(failure, "request", None)   # if that is known
            planned = [request for request, _ in self.plan]
            return self.end([at_fault] if at_fault in planned else planned, "error", error)
        return [Event(request, token, request.finish_reason) for request, token in tokens]

    def take_in(self):
        """Does what has been asked for since the last turn. Returns the events."""
        with self.changed:
            inbox, self.inbox = self.inbox, []
        events = []
        for requests, reason in inbox:
            if reason:
                going = [request for request in requests if not request.finished]
                events += self.end(going, reason)
            else:
                for request in requests:
                    self.add(request)
        return events

    def end(self, requests, reason, error=""):
        """They end, wherever they are. Returns the events."""
        for request in requests:
            self.abort(request, reason)
        return [Event(request, None, request.finish_reason, error) for request in requests]

    def run(self, deliver):
        """
        The engine's thread, until `stop`: turns, and sleeps while there is nothing to do.

        deliver: called with the events of each turn
        """
        while not self.stopping:
            hold = self.hold()
            events = self.turn(held=hold > 0)
            if events:
                deliver(events)
            with self.changed:
                if not self.inbox and (hold or not self.scheduler.busy):
                    self.changed.wait(hold or None)
        self.take_in()   # what was cancelled before the stop frees its pages
