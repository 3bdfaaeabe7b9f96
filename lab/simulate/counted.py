"""
A scheduler's plans, counted. What all decodes have in common is one sum, and only requests that
come, that are prefilled or that end are looked at: a pass costs the same whatever its size.

Each decode computes one token a pass, so the pass in which it ends is known when it begins. It
needs another page every page_size passes, so decodes are counted by the pass, modulo page_size, in
which they do.
"""
from collections import Counter, defaultdict, deque
from types import SimpleNamespace

from lab.simulate.hardware import seconds


class Short(Exception):
    """A request would be preempted, or would find pages that may be gone: this must be planned."""


class Counted:
    """
    As Planned, in numbers. Raises Short where it cannot.

    room:   pages of page_size tokens; without a page_size, tokens that requests reserve
    prefix: whether equal prompts are found in pages
    """

    def __init__(self, max_batch, token_budget, room, page_size=None, prefix=False):
        self.max_batch, self.budget, self.room = max_batch, token_budget, room
        self.size, self.paged, self.prefix = page_size or 1, page_size is not None, prefix
        self.waiting, self.prefills, self.times = deque(), [], []   # times: when passes ended
        self.decodes = self.keys = 0        # requests that decode, and the tokens that they have
        self.ends = defaultdict(list)       # number of a pass: decodes that end with it
        self.fills = Counter()              # the same modulo size: decodes that need a page
        self.used = self.taken = 0          # of the room: now, and in all
        self.prefixes, self.home = {}, {}   # of a first page, of a request: who holds its pages
        self.counts = Counter()

    running = property(lambda self: range(self.decodes + len(self.prefills)))
    held = property(lambda self: self.used * self.size)   # tokens of memory

    def add(self, request):
        if self.pages(request.kv_tokens) > self.room:
            raise Short
        self.waiting.append(request)

    def pages(self, tokens):
        return -(-tokens // self.size)

    def take(self, number):
        self.used, self.taken = self.used + number, self.taken + number
        if self.used > self.room:
            raise Short

    def admit(self):
        todo = self.decodes + sum(request.todo for request in self.prefills)
        while self.waiting and len(self.running) < self.max_batch and todo < self.budget:
            request = self.waiting[0]
            found, held = self.find(request)
            need = self.pages(request.todo if self.paged else request.kv_tokens) - held
            if need > self.room - self.used:
                break
            self.take(need)
            if request in self.home:
                self.home[request].holders += 1
            request.computed = found * self.size
            self.counts["saved_tokens"] += request.computed
            self.prefills.append(self.waiting.popleft())
            todo += request.todo

    def shared(self, request):   # pages of a prompt that another can find
        return (len(request.prompt) - 1) // self.size

    def find(self, request):
        """(its pages that are cached, how many of these are in a block table)."""
        if not self.prefix or not self.shared(request):
            return 0, 0
        prompt, number = tuple(request.prompt), self.shared(request)
        home = self.home[request] = self.prefixes.setdefault(
            hash(prompt[:self.size]),
            SimpleNamespace(prompt=hash(prompt), holders=0, cached=False, safe=0))
        gone = not home.holders and self.taken >= home.safe   # perhaps
        if home.prompt != hash(prompt) or (gone if home.cached else home.holders):
            raise Short   # it would find a part of it, perhaps
        return (number, number * bool(home.holders)) if home.cached else (0, 0)

    def run(self, start, price):
        """As Planned.run."""
        self.take(self.fills[len(self.times) % self.size])
        self.admit()
        if not self.running:   # the first in the queue never fits
            raise Short
        slots, scores, keys, first = self.decodes, self.keys, self.keys, []
        budget = self.budget - slots - sum(request.todo == 1 for request in self.prefills)
        for request in self.prefills:
            n = 1 if request.todo == 1 else min(request.todo, budget)
            budget -= n if request.todo > 1 else 0
            first += [request] if n == request.todo else []
            request.computed += n
            slots += n
            scores += n * request.computed
            keys += request.computed if n else 0
        now = start + seconds(price, slots, self.decodes + len(first), scores, keys)
        self.keys += self.decodes
        self.prefills = [request for request in self.prefills if request.todo]
        ended = self.ends.pop(len(self.times), [])
        for request in ended:
            self.decode(request, len(self.times), -1)
        for request in first:
            last = len(self.times) + request.kv_tokens - len(request.prompt)
            if request in self.home:
                self.home[request].cached = True
            if last > len(self.times):
                self.decode(request, last, 1)
            (self.ends[last] if last > len(self.times) else ended).append(request)
        self.times.append(now)
        for request in ended:
            request.token_times = self.times[len(request.prompt) - request.kv_tokens - 1:]
            self.free(request)
        return now, slots, ended

    def decode(self, request, last, sign):
        """Counts a decode that ends with the pass `last`; sign: -1 when it does."""
        self.decodes += sign
        self.keys += len(request.prompt) + 1 if sign > 0 else -request.kv_tokens - 1
        self.fills[(last + 1 - request.kv_tokens) % self.size] += sign * self.paged

    def free(self, request):
        pages, home = self.pages(request.kv_tokens), self.home.pop(request, None)
        if home:
            home.holders -= 1
            home.safe = self.taken + self.room - self.used   # all that is free now goes before it
            pages -= self.shared(request) * bool(home.holders)
        self.used -= pages
