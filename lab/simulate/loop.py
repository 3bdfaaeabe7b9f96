"""
The loop: requests come, a router sends each to a server, and every server has a clock of its own.

    source -> router -> servers: a scheduler, the price of a pass, and `now` in seconds

    while anything is left:
        the next request comes before the earliest busy server's `now`: it goes to a server
        else: that server plans a pass, its clock moves on by the price, and tokens are recorded

A source is any load: at a rate, from clients that wait for their answers, from a file, or all at
once. A scheduler is the stage's own, in `Planned`; or its plans are counted (counted.py).

An engine may plan *ahead* (beyond/ahead.py; vLLM since 0.14): while a pass is computed, the next
one is planned. So a plan sees what had come when the pass before it began, unless nothing ran:

    pass      | 1          | 2          | 3              A comes during pass 1. Pass 2 is planned
    A              comes                  first token    when 1 begins, pass 3 when 2 begins
"""
import heapq
import math
from collections import Counter, deque
from itertools import islice

from request import indices_due, prepare


class Source:
    """
    Requests, and when they come: at `times`, which ascend, or from so many clients, each of which
    waits for its answer. delay: seconds until the engine has a request. Sets `arrived` on each.
    """

    def __init__(self, requests, times=(), clients=0, delay=0.0):
        self.requests, self.clients, self.delay = iter(requests), clients, delay
        self.times = (time + delay for time in times)
        self.request = next(self.requests, None)
        self.due = [delay] * clients or [*islice(self.times, 1)]   # a heap

    @property
    def time(self):
        """When the engine gets the next one; math.inf if that depends on an answer, or none is."""
        return self.due[0] if self.due and self.request else math.inf

    def pop(self):
        """(time, request) of the next one."""
        time, request = heapq.heappop(self.due), self.request
        request.arrived, self.request = time - self.delay, next(self.requests, None)
        self.due += [] if self.clients else islice(self.times, 1)
        return time, request

    def answered(self, time):
        """A client has its answer, and sends its next request."""
        if self.clients:
            heapq.heappush(self.due, time + self.delay)


class Planned:
    """The plans of a stage's scheduler, as counts. Requests are added once they have arrived."""

    def __init__(self, scheduler):
        self.scheduler, self.number, self.last = scheduler, 0, {}   # last: number of a pass
        self.add, self.waiting, self.running = scheduler.add, scheduler.waiting, scheduler.running

    @property
    def held(self):   # tokens of memory
        if pages := getattr(self.scheduler, "pages", None):
            return (pages.number - len(pages.free_queue)) * pages.size
        return sum(request.kv_tokens for request in self.running)

    def run(self):
        """
        One pass. Returns (slots, sampled tokens, scores, keys), the requests that begin, those that
        get their first token, {passes since the last token: number of those that get another}, and
        those that end.
        """
        plan = self.scheduler.schedule(0)
        spans = [(n, request.computed + n) for request, n in plan]
        sampled = [plan[i][0] for i in indices_due(plan)]
        counts = (sum(n for n, _ in spans), len(sampled), sum(n * end for n, end in spans),
                  sum(end for _, end in spans))
        self.scheduler.update(plan, [0] * len(sampled))
        self.number += 1
        begin = [request for request, _ in plan if request not in self.last]
        self.last.update(dict.fromkeys(begin))
        first = [request for request in sampled if self.last[request] is None]
        again = Counter(self.number - self.last[request] for request in sampled
                        if self.last[request] is not None)
        self.last.update(dict.fromkeys(sampled, self.number))
        end = [request for request in sampled if request.finished]
        for request in end:
            del self.last[request]
        return counts, begin, first, again, end


class Server:
    """
    One engine: `planner` is Planned or Counted, `now` its clock.

    requests: (arrived, begun, first token, last token, number of tokens) of each that has ended
    gaps:     (seconds between two tokens, how many times)
    passes:   (start, end, slots, running, waiting, tokens of memory)
    """

    def __init__(self, planner, price, shape, ahead=False):
        self.planner, self.price, self.shape, self.ahead = planner, price, shape, ahead
        self.now = self.before = 0.0     # before: when the last pass began
        self.inbox, self.load = deque(), 0   # not seen by a plan yet; and all that are here
        self.requests, self.gaps, self.passes = [], [], []

    def deliver(self, time, request):
        prepare([request], self.shape)
        self.now = self.now if self.load else max(self.now, time)   # it was idle
        self.inbox.append((time, request))
        self.load += 1

    def run(self):
        """One pass. Returns the requests that end with it."""
        planner, start = self.planner, self.now
        seen = self.before if self.ahead and (planner.running or planner.waiting) else start
        while self.inbox and self.inbox[0][0] <= seen:
            planner.add(self.inbox.popleft()[1])
        counts, begin, first, again, end = planner.run()
        self.before, self.now = start, start + self.price.seconds(*counts)
        for request in begin:
            request.begun = start
        for request in first:
            request.first = self.now
        self.gaps += [(self.now - (start if ago == 1 else self.passes[-ago][1]), number)
                      for ago, number in again.items() if number]
        for r in end:
            tokens = r.kv_tokens - len(r.prompt) + 1
            self.requests.append((r.arrived, r.begun, r.first, self.now, tokens))
        self.load -= len(end)
        self.passes.append((start, self.now, counts[0], len(planner.running),
                            len(planner.waiting) + len(self.inbox), planner.held))
        return end


def serve(source, servers, route=lambda servers, request: servers[0]):
    """Runs all that the source sends. Returns the servers."""
    while True:
        server = min((each for each in servers if each.load), key=lambda each: each.now,
                     default=None)
        if source.time <= (server.now if server else math.inf) and source.time < math.inf:
            time, request = source.pop()
            route(servers, request).deliver(time, request)
        elif server:
            for _ in server.run():
                source.answered(server.now)
        else:
            return servers
