"""
The loop: requests come, a router sends each to a server, and every server has a clock of its own.

    source -> router -> servers: a scheduler, the price of a pass, and `now` in seconds

    while anything is left:
        the next request comes before the earliest busy server's `now`: it goes to a server
        else: that server plans a pass, its clock moves on by the price, and tokens get their time

A source is any load: at a rate, from a file, from clients that wait for answers, or all at once. A
scheduler is the stage's own, in `Planned`; or its plans are counted (counted.py).

An engine may plan *ahead* (beyond/ahead.py; vLLM since 0.14): while a pass is computed, the next
one is planned. So a plan sees what had come when the pass before it began, unless nothing ran:

    pass      | 1          | 2          | 3              A comes during pass 1. Pass 2 is planned
    A              comes                  first token    when 1 begins, pass 3 when 2 begins
"""
import math
from collections import deque

from lab.simulate.hardware import seconds
from request import indices_due


class Planned:
    """The plans of a stage's scheduler. Requests are added to it once they have arrived."""

    def __init__(self, scheduler):
        self.scheduler, self.number, self.add = scheduler, 0, scheduler.add
        self.pages = getattr(scheduler, "pages", None)
        self.counts = self.pages.counts if self.pages else {}

    running = property(lambda self: self.scheduler.running)
    waiting = property(lambda self: self.scheduler.waiting)

    @property
    def held(self):   # tokens of memory
        if self.pages:
            return (self.pages.number - len(self.pages.free_queue)) * self.pages.size
        return sum(request.kv_tokens for request in self.running)

    def run(self, start, price):
        """A pass that begins at `start`. Returns (its end, its slots, requests that end)."""
        plan = self.scheduler.schedule(self.number)
        spans = [(n, request.computed + n) for request, n in plan]
        sampled = [plan[i][0] for i in indices_due(plan)]
        slots = sum(n for n, _ in spans)
        now = start + seconds(price, slots, len(sampled), sum(n * end for n, end in spans),
                              sum(end for _, end in spans))
        self.scheduler.update(plan, [0] * len(sampled))
        self.number += 1
        for request in sampled:
            request.token_times.append(now)
        return now, slots, [request for request in sampled if request.finished]


class Server:
    """
    One engine: `planner` is Planned or Counted, `now` its clock, price the `constants` of a pass.

    requests: those that have ended, with their token_times
    passes:   (start, end, slots, requests that run, tokens of memory)
    """

    def __init__(self, planner, price, shape, ahead=False):
        self.planner, self.price, self.shape, self.ahead = planner, price, shape, ahead
        self.now = self.before = 0.0         # before: when the last pass began
        self.inbox, self.load = deque(), 0   # not seen by a plan yet; and all that are here
        self.requests, self.passes = [], []

    def deliver(self, time, request):
        request.context_length = self.shape.block_size
        self.now = max(self.now, time)   # it was idle, or is there already
        self.inbox.append((time, request))
        self.load += 1

    def run(self):
        """One pass. Returns the requests that end with it."""
        start, planner = self.now, self.planner
        seen = self.before if self.ahead and (planner.running or planner.waiting) else start
        while self.inbox and self.inbox[0][0] <= seen:
            planner.add(self.inbox.popleft()[1])
        self.before, (self.now, slots, ended) = start, planner.run(start, self.price)
        running = len(planner.running) + len(ended)
        self.passes.append((start, self.now, slots, running, planner.held))
        for request in ended:
            request.prompt = []   # memory: there may be many
        self.load -= len(ended)
        self.requests += ended
        return ended


def serve(source, servers, route=None):
    """Runs all that the source sends. route(servers, request): which server gets it."""
    while True:
        server = min((each for each in servers if each.load), key=lambda each: each.now,
                     default=None)
        if source.time < math.inf and (not server or source.time <= server.now):
            time, request = source.pop()
            (route(servers, request) if route else servers[0]).deliver(time, request)
        elif server:
            for _ in server.run():
                source.answered(server.now)
        else:
            return
