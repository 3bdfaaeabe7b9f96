"""
The engine: stage 7's loop, opened, for requests that come while it runs.

`generate` takes a list and returns when all of it is done. A server has no list: people ask at any
time, read each token as it appears, and some leave in the middle. Scheduler, pages and forward pass
stay as they are. What changes is how requests get in and how tokens get out:

    other threads              the engine's thread                       other threads
    add(request)    --> inbox --> schedule -> forward pass -> sample --> events: tokens, ends
    cancel(request) --> left  -'  `----------- one step() -----------'

    stage 7's generate()                    here
    a list, known at the start              an inbox, emptied before every step
    on_token(request, token, logits)        step() returns what happened: [Event, ...]
    a queue of any length                   a queue of max_waiting requests, then `Full`
    an error ends the run                   an error ends the requests of its pass

One thread owns scheduler, pages, pool and model. Other threads change only the inbox, so only the
inbox needs a lock. `while engine.busy: engine.step()` is stage 7's `generate`: the same passes.
"""
import json
import math
import time
from collections import deque
from itertools import count
from threading import Condition
from typing import NamedTuple

import torch
import torch.distributed as dist

from cache import KV
from generate_paged import Paged
from model import sample
from paging import PagedScheduler, Pages
from request import Request, prepare
from toolbox.trace import Trace
from toolbox.validate import at_least_1


class Full(Exception):
    """The queue is full. seconds: when to try again"""

    def __init__(self, waiting, seconds):
        super().__init__(f"the queue is full, with {waiting} waiting: try again in {seconds} s")
        self.seconds = seconds


class Event(NamedTuple):
    """A request's next token; or, if token is None, its end: see request.finish_reason."""
    request: Request
    token: int | None
    error: str = ""


class Engine:
    """
    pages, page_size, max_batch, token_budget, share_prefixes: as in stage 7
    max_waiting: requests that may wait; the next one is refused
    """

    def __init__(self, model, pages=256, page_size=16, max_batch=8, token_budget=64,
                 share_prefixes=True, max_waiting=256):
        at_least_1(max_waiting=max_waiting)
        self.model, self.max_waiting = model, max_waiting
        self.pages = Pages(pages, page_size)
        self.pool = KV(pages * page_size)
        self.scheduler = PagedScheduler(max_batch, token_budget, self.pages, share_prefixes)
        # An endless run must not remember all that happened: of the passes, only the last.
        self.trace = Trace("paged", [], self.scheduler.counts, deque(maxlen=1))
        self.number, self.names, self.unfinished = 0, count(), {}   # unfinished: name -> request
        self.finish_times = deque([time.perf_counter()], maxlen=32)
        self.changed = Condition()   # guards the inbox:
        self.inbox, self.left, self.woken, self.stopping = [], [], False, False
        self.pace, self.watch, self.held = None, None, 0   # of the live page, explorer/live.py

    # --- for any thread ---

    def add(self, request):
        """Hands in a request. ValueError if it could never run, Full if too many wait."""
        prepare(request, self.model.config)
        max_batch, budget = self.scheduler.max_batch, self.scheduler.token_budget
        PagedScheduler(max_batch, budget, self.pages).add(request)   # refuses what never fits
        with self.changed:
            waiting = len(self.inbox) + len(self.scheduler.waiting)
            if waiting >= self.max_waiting:
                raise Full(waiting, self.seconds_until_room())
            if not self.busy:   # the time before was idle, and no pace
                self.finish_times = deque([time.perf_counter()], maxlen=32)
            request.name, request.asked = f"r{next(self.names)}", time.perf_counter()
            self.inbox.append(request)
            self.changed.notify()

    def cancel(self, request):
        """Its client has left: before the next pass it ends, and frees its pages."""
        with self.changed:
            self.left.append(request)
            self.changed.notify()

    def stop(self):
        self.stopping = True
        self.wake()

    def wake(self):
        """Ends the sleep of `run`: it may go on."""
        with self.changed:
            self.woken = True
            self.changed.notify()

    def seconds_until_room(self):
        """Until a request finishes and the next is admitted, at the pace of the last 32."""
        times = list(self.finish_times)
        return min(60, max(1, math.ceil((time.perf_counter() - times[0]) / len(times))))

    @property
    def busy(self):
        return bool(self.unfinished or self.inbox or self.left)

    # --- for the engine's thread ---

    @torch.inference_mode()
    def step(self):
        """Stage 7's loop, once. Returns what happened, [Event, ...]."""
        self.take_in()
        events, batch, why = [], None, ""
        if self.scheduler.busy and not self.held:
            # 1. which requests compute how many tokens in this step
            plan = self.scheduler.schedule(self.number)
            try:
                # 2. one forward pass for decodes and chunks together
                batch = Paged(plan, self.pool, self.pages, self.model.device)
                with self.trace.forward_pass(self.number, batch):
                    logits = self.model(batch.tokens, batch.positions, batch.attend, batch.wanted)
                # 3. one token for each request that has nothing more to compute
                tokens = sample(logits, batch.sampled)
            except Exception as error:
                batch, why = None, self.fail(plan, error)
            else:
                self.scheduler.update(plan, tokens)
                self.trace.record_tokens(self.number, batch.sampled, tokens, logits)
                events += map(Event, batch.sampled, tokens)
            self.trace.step_times.clear()
            self.number += 1
        events += self.ends(why)
        if self.watch:
            self.watch(batch)
        return events

    def take_in(self):
        """What has come since the last step: new requests, and requests whose clients left."""
        new, left, self.held = self.news()
        for request in new:
            request.arrival = self.number
            self.unfinished[request.name] = request
            self.scheduler.add(request)
        for request in left:
            if not request.finished:
                request.finish_reason = "cancelled"
                if request in self.scheduler.waiting:
                    self.scheduler.waiting.remove(request)
        self.scheduler.release()

    def news(self):
        """(new requests, requests to cancel, seconds to hold the loop: 0 at full speed)."""
        with self.changed:
            new, left, self.inbox, self.left = self.inbox, self.left, [], []
        return new, left, self.pace() if self.pace else 0

    def fail(self, plan, error):
        """A pass has failed: its requests end and free their pages. All others go on."""
        for request, _ in plan:
            request.finish_reason = "error"
        self.scheduler.release()
        return f"the forward pass of this request failed: {type(error).__name__}: {error}"

    def ends(self, why):
        """Events of the requests that have finished. From now on nothing remembers them."""
        ended = [request for request in self.unfinished.values() if request.finished]
        for request in ended:
            del self.unfinished[request.name]
            self.trace.reached.pop(request.name, None)
            self.finish_times.append(time.perf_counter())
        return [Event(request, None, why if request.finish_reason == "error" else "")
                for request in ended]

    def run(self, deliver, rest=5.0):
        """
        The engine's thread, until `stop`: steps, and sleeps while there is nothing to do.

        deliver: called with the events of each step
        rest:    the longest sleep, in seconds
        """
        while not self.stopping:
            if events := self.step():
                deliver(events)
            with self.changed:
                wait = self.held or (0 if self.unfinished else rest)
                if wait and not (self.inbox or self.left or self.woken):
                    self.changed.wait(min(wait, rest))
                self.woken = False


class RankEngine(Engine):
    """
    The same engine on every rank of beyond/tensor_parallel.py. Rank 0 has the inbox, and broadcasts
    what came: 8 bytes a step, and more only if something did. All the rest follows from it, as all
    ranks run the same scheduler and draw the same random numbers. If a pass fails, the ranks may
    have parted, so the run ends. ConnectionError if a rank is lost.
    """
    FIELDS = "prompt", "max_new_tokens", "temperature", "top_k", "seed", "eos_token", "name"

    def news(self):
        words = None
        if not dist.get_rank():
            new, left, held = super().news()
            words = ([[getattr(request, field) for field in self.FIELDS] for request in new],
                     [request.name for request in left], held, self.stopping)
        sent, names, held, stopping = self.broadcast(words)
        if dist.get_rank():
            self.stopping = stopping
            new = [Request(**dict(zip(self.FIELDS, values))) for values in sent]
            if new:
                prepare(new, self.model.config)
            known = self.unfinished | {request.name: request for request in new}
            left = [known[name] for name in names if name in known]
        return new, left, held

    def broadcast(self, words):
        """Rank 0's words, on every rank; JSON, and nothing at all if there is no news."""
        data = json.dumps(words).encode() if words and any(words) else b""
        try:
            length = torch.tensor([len(data)])
            dist.broadcast(length, 0)
            if not length:
                return [], [], 0, False
            text = torch.empty(int(length), dtype=torch.uint8)
            if words:
                text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            dist.broadcast(text, 0)
        except RuntimeError as error:
            raise ConnectionError(f"rank {dist.get_rank()}: a broadcast failed; another rank has "
                                  f"stopped or hangs ({str(error).splitlines()[0]:.120})") from None
        return json.loads(text.numpy().tobytes())

    def fail(self, plan, error):
        raise error

    def run(self, deliver, rest=5.0):
        """As Engine.run. Rank 0 sends something every `rest` seconds, or the others give up."""
        super().run(deliver, 0 if dist.get_rank() else rest)
        if not dist.get_rank():
            self.broadcast(([], [], 1, True))   # the others hold, and stop
