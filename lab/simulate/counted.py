"""
A scheduler's plans, counted: what all decodes have in common is one sum, and only requests that
come, that are prefilled or that end are looked at. So a pass costs the same whatever its size.

Each decode computes one token a pass, so the pass in which it ends is known when it begins. A
decode's table needs a page whenever its tokens have filled one, every page_size passes: so decodes
are counted by the pass, modulo page_size, in which they do.
"""
from collections import Counter, defaultdict, deque


class Short(Exception):
    """A request would be preempted, or would find pages that may be gone: this must be planned."""


class Prefix:
    """A prompt that may be found: who holds its pages, and until when they surely stay cached."""

    def __init__(self, prompt):
        self.prompt, self.holders, self.cached, self.safe = hash(prompt), 0, False, 0


class Counted:
    """
    Plans as those of Planned, in numbers. Raises Short where it cannot.

    room: pages of page_size tokens; without a page_size, tokens that requests reserve
    prefix: equal prompts are found in pages
    """

    def __init__(self, max_batch, token_budget, room, page_size=None, prefix=False):
        self.max_batch, self.budget, self.room = max_batch, token_budget, room
        self.size, self.paged, self.prefix = page_size or 1, page_size is not None, prefix
        self.waiting, self.prefills, self.number, self.saved = deque(), [], 0, 0
        self.decodes = self.keys = 0    # requests that decode, and the tokens that they have
        self.ends = defaultdict(list)   # number of a pass: decodes that end with it
        self.fills = Counter()          # the same modulo size: decodes that need a page
        self.used = self.taken = 0      # of the room: now, and ever
        self.prefixes, self.mine = {}, {}   # by the first page, and by request: a Prefix

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
        begin, todo = [], self.decodes + sum(request.todo for request in self.prefills)
        while self.waiting and len(self.running) < self.max_batch and todo < self.budget:
            request = self.waiting[0]
            found, held = self.find(request)
            need = self.pages(request.todo if self.paged else request.kv_tokens) - held
            if need > self.room - self.used:
                break
            self.take(need)
            request.computed = found * self.size
            if request in self.mine:
                self.mine[request].holders += 1
            self.saved += request.computed
            self.prefills.append(self.waiting.popleft())
            begin.append(request)
            todo += request.todo
        return begin

    def find(self, request):
        """(pages of it that are cached, and how many of these are in a block table already)."""
        shared = (len(request.prompt) - 1) // self.size   # that can be found by others
        if not self.prefix or not shared:
            return 0, 0
        prompt = tuple(request.prompt)
        mine = self.prefixes.setdefault(hash(prompt[:self.size]), Prefix(prompt))
        if mine.prompt != hash(prompt) or (mine.holders and not mine.cached):
            raise Short   # only a part of it is found
        if mine.cached and not mine.holders and self.taken >= mine.safe:
            raise Short
        self.mine[request] = mine
        return (shared, shared * bool(mine.holders)) if mine.cached else (0, 0)

    def run(self):
        """As Planned.run."""
        self.take(self.fills[self.number % self.size])
        begin, first = self.admit(), []
        slots, scores, keys = self.decodes, self.keys, self.keys
        budget = self.budget - slots - sum(request.todo == 1 for request in self.prefills)
        for request in self.prefills:
            n = min(request.todo, budget) if request.todo > 1 else 1
            budget -= n if request.todo > 1 else 0
            first += [request] if n == request.todo else []
            request.computed += n
            slots += n
            scores += n * request.computed
            keys += request.computed if n else 0
        counts, again = (slots, self.decodes + len(first), scores, keys), {1: self.decodes}
        self.keys += self.decodes
        self.prefills = [request for request in self.prefills if request.todo]
        end = self.ends.pop(self.number, [])
        for request in end:
            self.decodes -= 1
            self.keys -= request.kv_tokens + 1
            self.fills[(self.number + 1 - request.kv_tokens) % self.size] -= self.paged
        for request in first:
            if request in self.mine:
                self.mine[request].cached = True
            last = self.number + request.kv_tokens - len(request.prompt)
            if last > self.number:
                self.decodes += 1
                self.keys += len(request.prompt) + 1
                self.fills[(last + 1 - request.kv_tokens) % self.size] += self.paged
            (self.ends[last] if last > self.number else end).append(request)
        for request in end:
            self.free(request)
        self.number += 1
        return counts, begin, first, again, end

    def free(self, request):
        mine, pages = self.mine.pop(request, None), self.pages(request.kv_tokens)
        if mine:
            mine.holders -= 1
            mine.safe = self.taken + self.room - self.used   # what is free now goes before it
            pages -= (len(request.prompt) - 1) // self.size * bool(mine.holders)
        self.used -= pages
