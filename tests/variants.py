"""
Right solutions that differ from ours: each must get full marks.

A variant belongs to a set, and changes files by these keys:

    "file.py:function"   another definition, and perhaps helpers that go to the end of the file
    "file.py:"           lines after the docstring
    "file.py"            a new file; or a function, from the text of ours to theirs
"""
import ast
import re

from make import node_of


def replaced(text, name, new):
    """The file with another definition in place of a function."""
    lines, node = text.splitlines(), node_of(text, name)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines[first - 1:node.end_lineno] = new.splitlines()
    return "\n".join(lines) + "\n"


def files_of(edits, clean):
    """{file: text} of a variant. clean: a function, from file to our text."""
    files = {}
    for key, change in edits.items():
        file, colon, function = key.partition(":")
        if callable(change):
            files[file] = change(files.get(file) or clean(file))
        elif function:
            first, *helpers = change.strip("\n").split("\n\n\n")
            text = replaced(files.get(file) or clean(file), function, first)
            files[file] = "\n\n\n".join([text, *helpers])
        elif colon:
            lines = (files.get(file) or clean(file)).splitlines()
            lines.insert(ast.parse("\n".join(lines)).body[1].lineno - 1, change)
            files[file] = "\n".join(lines) + "\n"
        else:
            files[file] = change
    return files


def indented(by):
    """Re-indents a file, as an editor does that is set to two spaces or to tabs."""
    return lambda text: re.sub(r"(?m)^( {4})+", lambda found: by * (len(found[0]) // 4), text)


VARIANTS = {
    # other ways
    "torch's own attention, writing by index, by all tokens": (1, {"model.py:Head.forward": '''
    def forward(self, q, k, v, past_k=None, past_v=None, mask=None):
        if past_k is not None:
            k, v = torch.cat((past_k, k), -2), torch.cat((past_v, v), -2)
        see = allowed(q.size(-2), k.size(-2), mask, q.device)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=see)
        return torch.where(see.any(-1, keepdim=True), out, torch.zeros_like(out))


def allowed(T, S, mask, device):
    rule = torch.arange(S, device=device) <= torch.arange(S - T, S, device=device)[:, None]
    return rule if mask is None else rule & mask
''', "cache.py:": "import torch", "cache.py:KV.write": '''
    def write(self, layer, start, k, v):
        where = torch.arange(start, start + k.size(-2))
        if start + len(where) > self.capacity:
            raise ValueError
        for buffer, new in zip(self.buffers(layer, k, v), (k, v)):
            buffer.index_copy_(-2, where, new)
''', "generate_unbatched.py:Alone.lay_out": '''
    def lay_out(self, device):
        request = self.plan[0][0]
        self.start, self.end = request.computed, len(request.tokens)
        self.tokens = torch.tensor(request.tokens, device=device)[None, self.start:]
        self.positions = torch.arange(self.end, device=device)[None, self.start:]
        self.sampled, self.wanted = [request], torch.tensor([[0], [-1]], device=device).unbind()
''', "generate_unbatched.py:Alone.attend": '''
    def attend(self, layer, q, k, v):
        if self.kv is None:
            return head(q, k, v)
        self.kv.write(layer, self.start, k, v)
        past_k, past_v = (t[..., :self.start, :] for t in self.kv.read(layer, self.end))
        return head(q, k, v, past_k, past_v)
'''}),
    "a static batch by slots, leaving twice": (2, {"generate_naive.py:StaticBatch.lay_out": '''
    def lay_out(self, device):
        T, limit = self.end - self.start, self.requests[0].block_size - 1
        tokens, positions, mask = [], [], []
        for pads, (request, n) in zip(self.pads.tolist(), self.plan):
            tokens.append([0] * (T - n) + request.tokens[request.computed:][:n])
            positions.append([sorted((0, c - pads, limit))[1] for c in range(self.start, self.end)])
            mask.append([column >= pads for column in range(self.end)])
        self.tokens, self.positions = torch.tensor(tokens), torch.tensor(positions)
        self.mask = torch.tensor(mask)[:, None, None]
        rows = [b for b, (request, n) in enumerate(self.plan) if n == request.todo]
        self.sampled = [self.plan[b][0] for b in rows]
        self.wanted = torch.tensor(rows, dtype=torch.long), torch.full((len(rows),), T - 1)
''', "generate_dynamic.py:leave": '''
def leave(running):
    stay = unfinished(running)
    for r in set(running) - set(stay):
        r.kv = None
    return stay
'''}),
    "a scheduler by rounds": (3, {"scheduler.py:Scheduler.admit": '''
    def admit(self, step):
        busy = sum(r.todo for r in self.running)
        if (self.arrived(step) and len(self.running) < self.max_batch
                and busy < self.token_budget and self.grant_room(self.waiting[0])):
            self.running.append(self.waiting.popleft())
            self.admit(step)
''', "scheduler.py:Scheduler.release": '''
    def release(self):
        gone = [r for r in self.running if r.finished]
        self.running = [r for r in self.running if not r.finished]
        for request in gone:
            self.free(request)
'''}),
    "attention row by row, complete by all tokens": (4, {"generate_dynamic.py:Rectangle.attend": '''
    def attend(self, layer, q, k, v):
        out = torch.zeros_like(v)
        for b, ((request, n), start) in enumerate(zip(self.plan, self.starts)):
            new = slice(q.size(-2) - n, None)
            request.kv.write(layer, start, k[b][:, new], v[b][:, new])
            out[b][:, new] = head(q[b][:, new], *request.kv.read(layer, start + n))
        return out
''', "request.py:indices_due": '''
def indices_due(plan):
    return [i for i, (r, n) in enumerate(plan) if r.computed + n == len(r.tokens)]
'''}),
    "rows from lists, a stream by comparison": (5, {"generate_prepacked.py:Packed.lay_out": '''
    def lay_out(self, device):
        sizes = [n for _, n in self.plan]
        rows = first_fit_decreasing(sizes, max(sizes))
        self.tokens = torch.zeros(len(rows), max(sizes), dtype=torch.long, device=device)
        self.positions = self.tokens.clone()
        self.mask = torch.zeros(len(rows), 1, max(sizes), max(sizes), dtype=torch.bool,
                                device=device)
        self.places = [None] * len(sizes)
        for row, members in enumerate(rows):
            for i, before in zip(members, (members[:place] for place in range(len(members)))):
                at = sum(sizes[j] for j in before)
                piece = slice(at, at + sizes[i])
                self.tokens[row, piece] = torch.tensor(self.plan[i][0].prompt)
                self.positions[row, piece] = torch.arange(sizes[i])
                self.mask[row, 0, piece, piece] = True
                self.places[i] = (row, at, at + sizes[i])
        self.sampled = [request for request, n in self.plan]
        self.wanted = tuple(torch.tensor(each, device=device) for each in zip(
            *((row, end - 1) for row, _, end in self.places)))
''', "generate_ragged.py:Flat.block_diagonal": '''
    def block_diagonal(self):
        keys = [(i, p) for i, end in enumerate(self.ends) for p in range(end)]
        new = [(i, p) for i, start in enumerate(self.starts) for p in range(start, self.ends[i])]
        return torch.tensor([[a == b and p <= now for b, p in keys] for a, now in new])
'''}),
    "sorted lists, a method of its own, names with gaps": (6, {"paging.py:Pages.give_back": '''
    def give_back(self, table):
        for page in table[::-1]:
            self.holders[page] -= 1
            if self.holders[page] == 0:
                self.free.update({page: None})
''', "paging.py:Pages.allocate": '''
    def allocate(self, table, number):
        for oldest in list(self.free)[:number]:
            self.free.pop(oldest)
            key = self.key_of.pop(oldest, None)
            if key is not None:
                self.published.pop(key)
                self.counts.update(["evicted_pages"])
            self.holders[oldest] += 1
            table.extend([oldest])
''', "generate_paged.py:Paged.slots": '''
    def slots_of(self, page):
        return range(page * self.pages.size, (page + 1) * self.pages.size)

    def slots(self, table, end):
        slots = [slot for page in table for slot in self.slots_of(page)][:end]
        return torch.tensor(slots, dtype=torch.long)
''', "generate_paged.py:Paged.write": '''
    def write(self, layer, k, v):
        pool_k, pool_v = self.pool.buffers(layer, k, v)
        for i, slot in enumerate(self.slot_mapping.tolist()):
            pool_k[:, slot] = k[:, i]
            pool_v[:, slot] = v[:, i]
''', "paging.py:Pages.find": '''
    def find(self, tokens):
        found, name, rest = [], 0, list(tokens)
        while (key := (name, tuple(rest[:self.size]))) in self.published:
            found.append(self.published[key])
            name, rest = self.name_of[found[-1]], rest[self.size:]
        return found
''', "paging.py:Pages.publish": '''
    def publish(self, table, i, tokens):
        new, page = next(self.names), table[i]
        key = self.name_of[table[i - 1]] if i > 0 else 0, (*tokens,)
        if self.published.setdefault(key, page) != page:
            self.name_of[page] = self.name_of[self.published[key]]
            return
        self.name_of[page], self.key_of[page] = new, key
''', "paging.py:PagedScheduler.preempt": '''
    def preempt(self, request):
        self.free(request)
        self.running = [other for other in self.running if other is not request]
        self.waiting.insert(0, request)
        request.computed = 0
        self.counts.update(preemptions=1)
'''}),
    # how a file may look
    "two spaces, tabs": (4, {"generate_dynamic.py": indented("  "), "request.py": indented("\t")}),
    "a byte order mark": (5, {"generate_ragged.py": "\ufeff".__add__}),
    "Windows line ends": (1, {"model.py": lambda text: text.replace("\n", "\r\n")}),
    # what may be added
    "a decorator, a default, numbers of numpy, an import for type checkers": (5, {
        "generate_prepacked.py:": '''
from functools import singledispatch

import numpy as np

LONGEST_FIRST = True
''', "generate_prepacked.py:first_fit_decreasing": '''
@singledispatch
def first_fit_decreasing(lengths, size, order=LONGEST_FIRST):
    rows, room = [], []
    for i in np.argsort(np.array(lengths, int))[::-1 if order else 1]:
        length = lengths[i]
        row = next((b for b, left in enumerate(room) if left >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(size)
        rows[row].append(i)
        room[row] -= length
    return rows
''', "generate_ragged.py:": '''
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable
''', "generate_ragged.py:Flat.attend": '''
    def attend(self, layer: Hashable, q, k, v):
        self.write(layer, k, v)
        pairs = [self.read(layer, i) for i, _ in enumerate(self.plan)]
        if self.attention == "mask":
            return head(q, *(torch.cat(part, -2) for part in zip(*pairs)), mask=self.mask)
        pieces = q.split([n for _, n in self.plan], dim=-2)
        return torch.cat([head(piece, *pair) for piece, pair in zip(pieces, pairs)], -2)
'''}),
    "a helper in another file of the set": (4, {
        "cache.py": lambda text: text + '''

def padded(width, values):
    return [0] * (width - len(values)) + [*values]
''', "generate_dynamic.py:": "from cache import padded",
        "generate_dynamic.py:Rectangle.lay_out": '''
    def lay_out(self, device):
        T, self.P = max(n for _, n in self.plan), max(self.starts)
        tokens, positions, mask = [], [], []
        for (request, n), start in zip(self.plan, self.starts):
            tokens.append(padded(T, request.slice(start, start + n)))
            positions.append(padded(T, range(start, start + n)))
            mask.append(padded(self.P, [1] * start) + padded(T, [1] * n))
        self.tokens, self.positions = (torch.tensor(t, device=device) for t in (tokens, positions))
        self.mask = torch.tensor(mask, device=device).bool()[:, None, None]
        due = indices_due(self.plan)
        self.sampled = [request for i, (request, _) in enumerate(self.plan) if i in due]
        self.wanted = torch.tensor(due, dtype=torch.long, device=device), T - 1
'''}),
    "a new file, an attribute that __init__ sets": (6, {
        "arithmetic.py": "def ceiling(a, b):\n    return (a + b - 1) // b\n",
        "paging.py:": "from arithmetic import ceiling", "paging.py:PagedScheduler.preempt": '''
    def preempt(self, request):
        self.free(request)
        self.running = [other for other in self.running if other is not request]
        self.waiting.insert(0, request)
        self.counts.update(preemptions=ceiling(1, 1))
        request.computed = 0
''', "paging.py": lambda text: text.replace(
            "        self.published, self.key_of", "        self.log = []\n"
            "        self.published, self.key_of"),
        "paging.py:Pages.hold": '''
    def hold(self, table, pages):
        for page in pages:
            self.log.append(page)
            if page in self.free:
                del self.free[page]
            self.holders[page] = self.holders[page] + 1
            table.append(page)
'''}),
    "a property, a class attribute, annotations": (2, {"request.py:Request.append": '''
    stops = ("stop", "length")

    @property
    def room(self):
        return min(self.max_new_tokens - len(self.generated), self.block_size - self.computed)

    @room.setter
    def room(self, value):
        raise AttributeError("room follows from the request")

    def append(self, token):
        self.generated += [token]
        if token == self.eos_token or self.room <= 0:
            self.finish_reason = self.stops[token != self.eos_token]
''',
        "generate_dynamic.py:": "from __future__ import annotations",
        "generate_dynamic.py:admit": '''
def admit(waiting: list[Nobody], running, step, max_batch) -> tuple[list, list]:
    ready = sum(r.arrival <= step for r in waiting)
    n = min(ready, max_batch - len(running))
    return waiting[n:], [*running, *waiting[:n]]
'''}),
    "an import that is repeated, a base class, an attribute that __post_init__ sets": (3, {
        "scheduler.py": lambda text: text.replace("class Scheduler:", (
            "class Sums:\n    total = lambda self: sum(r.kv_tokens for r in self.running)\n\n\n"
            "@lambda it: it\nclass Scheduler(Sums):")).replace("reserved +", "self.total() +"),
        "request.py": lambda text: text.replace(
            "check_request(self)\n", "check_request(self)\n        self.history = []\n"),
        "request.py:advance": '''
def advance(plan, tokens):
    tokens = iter(tokens)
    for request, n in plan:
        request.history.append(n)
        request.computed += n
        if request.todo == 0:
            request.append(next(tokens))
''', "scheduler.py:": '''
import math
from typing import List, Tuple

MOST = math.inf
MOST -= 1
''', "scheduler.py:Scheduler.share_budget": '''
    def share_budget(self) -> List[Tuple[Request, int]]:
        plan: List[Tuple[Request, int]] = [(r, 1) for r in self.running if r.todo == 1]
        left = self.token_budget - sum(n for _, n in plan)
        for r in self.running:
            if MOST > r.todo > 1 and left > 0:
                plan.append((r, min(r.todo, left)))
                left -= plan[-1][1]
        return plan
'''}),
}
