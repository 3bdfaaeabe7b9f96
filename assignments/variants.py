"""
Right solutions that differ from ours. Both graders must give each full marks.

A variant belongs to a set, and changes files by these keys:

    "file.py:function"   another definition, and perhaps helpers that go to the end of the file
    "file.py:"           lines after the docstring
    "file.py"            a new file; or a function, from the text of ours to theirs
"""
import ast
import re

import graft


def solution(name, clean):
    """(number of the set, {file: text}) of a variant. clean: a function, from file to our text."""
    number, edits = VARIANTS[name]
    files = {}
    for key, change in edits.items():
        file, colon, function = key.partition(":")
        if callable(change):
            files[file] = change(files.get(file) or clean(file))
        elif function:
            first, *helpers = change.strip("\n").split("\n\n\n")
            text = graft.replaced(files.get(file) or clean(file), function, first)
            files[file] = "\n\n\n".join([text, *helpers])
        elif colon:
            lines = (files.get(file) or clean(file)).splitlines()
            lines.insert(ast.parse("\n".join(lines)).body[1].lineno - 1, change)
            files[file] = "\n".join(lines) + "\n"
        else:
            files[file] = change
    return number, files


def indented(by):
    """Re-indents a file, as an editor does that is set to two spaces or to tabs."""
    return lambda text: re.sub(r"(?m)^( {4})+", lambda found: by * (len(found[0]) // 4), text)


VARIANTS = {
    # set 1
    "torch's own attention": (1, {"model.py:Head.forward": '''
    def forward(self, q, k, v, past_k=None, past_v=None, mask=None):
        if past_k is not None:
            k, v = torch.cat((past_k, k), -2), torch.cat((past_v, v), -2)
        see = allowed(q.size(-2), k.size(-2), mask)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=see)
        nothing = ~see.any(-1, keepdim=True)
        return torch.where(nothing, torch.zeros_like(out), out), k, v


def allowed(T, S, mask):
    rule = torch.arange(S)[None, :] <= torch.arange(S - T, S)[:, None]
    return rule if mask is None else rule & mask
'''}),
    # set 2
    "a static batch, slot by slot": (2, {"generate_naive.py:StaticBatch.lay_out": '''
    def lay_out(self, device):
        width = self.end - self.start
        tokens, positions, mask, rows = [], [], [], []
        for b, (request, n) in enumerate(self.plan):
            known = request.prompt + request.generated
            line = [0] * (width - n) + known[request.computed:request.computed + n]
            tokens.append(line)
            pads = int(self.pads[b])
            positions.append([min(max(column - pads, 0), request.block_size - 1)
                              for column in range(self.start, self.end)])
            mask.append([column >= pads for column in range(self.end)])
            if n and n == request.todo:
                rows.append(b)
        self.tokens = torch.tensor(tokens, device=device)
        self.positions = torch.tensor(positions, device=device)
        self.mask = torch.tensor(mask, device=device).view(len(self.plan), 1, 1, self.end)
        self.sampled = [self.plan[b][0] for b in rows]
        last = torch.full((len(rows),), width - 1, device=device)
        self.rows = (torch.tensor(rows, dtype=torch.long, device=device), last)
'''}),
    # set 3
    "sharing by sorting": (3, {"scheduler.py:Scheduler.share_budget": '''
    def share_budget(self):
        plan, left = [], self.token_budget
        for request in sorted(self.running, key=lambda request: request.todo != 1):
            n = 1 if request.todo == 1 else min(request.todo, left)
            if n > 0:
                plan.append((request, n))
            left -= max(n, 0)
        return plan
'''}),
    # set 4
    "attention row by row": (4, {"generate_dynamic.py:Rectangle.attend": '''
    def attend(self, layer, q, k, v):
        outputs = []
        for b, ((request, n), start) in enumerate(zip(self.plan, self.starts)):
            new = slice(q.size(-2) - n, None)
            request.kv.write(layer, start, k[b][:, new], v[b][:, new])
            own = head(q[b][:, new], *request.kv.read(layer, start + n))[0]
            row = v.new_zeros(q.size(1), q.size(2), v.size(-1))
            row[:, new] = own
            outputs.append(row)
        return torch.stack(outputs)
'''}),
    "complete by a loop": (4, {"request.py:complete": '''
def complete(plan):
    found = []
    for i in range(len(plan)):
        request, n = plan[i]
        known = len(request.prompt) + len(request.generated)
        if request.computed + n == known:
            found.append(i)
    return found
'''}),
    # set 5
    "packed rows from lists": (5, {"generate_prepacked.py:Packed.lay_out": '''
    def lay_out(self, device):
        sizes = [n for _, n in self.plan]
        m = max(sizes)
        rows = first_fit_decreasing(sizes, m)
        self.tokens = torch.zeros(len(rows), m, dtype=torch.long, device=device)
        self.positions = self.tokens.clone()
        self.mask = torch.zeros(len(rows), 1, m, m, dtype=torch.bool, device=device)
        self.places = {}
        for row, members in enumerate(rows):
            at = 0
            for i in members:
                piece = slice(at, at + sizes[i])
                self.tokens[row, piece] = torch.tensor(self.plan[i][0].prompt)
                self.positions[row, piece] = torch.arange(sizes[i])
                self.mask[row, 0, piece, piece] = True
                self.places[i] = (row, at, at + sizes[i])
                at += sizes[i]
        self.places = [self.places[i] for i in range(len(sizes))]
        self.sampled = [request for request, n in self.plan]
        self.rows = (torch.tensor([row for row, _, _ in self.places], device=device),
                     torch.tensor([end - 1 for _, _, end in self.places], device=device))
'''}),
    # set 6
    "books with sorted lists": (6, {"paging.py:Pages.give_back": '''
    def give_back(self, table):
        for page in table[::-1]:
            self.holders[page] -= 1
            if self.holders[page] > 0:
                continue
            self.gains = self.gains + 1
            if self.key_of.get(page) is None:
                self.free = sorted(self.free + [page])
            else:
                self.kept.update({page: None})
''', "paging.py:Pages.evict": '''
    def evict(self):
        oldest = list(self.kept)[0]
        self.kept.pop(oldest)
        self.published.pop(self.key_of.pop(oldest))
        self.free = sorted([*self.free, oldest])
        self.counts.update(["evicted_pages"])
'''}),
    "slots by a loop, writes one by one": (6, {"generate_paged.py:Paged.slots": '''
    def slots(self, table, start, end):
        found = []
        for position in range(start, end):
            page, offset = divmod(position, self.pages.size)
            found.append(table[page] * self.pages.size + offset)
        return found
''', "generate_paged.py:Paged.write": '''
    def write(self, layer, k, v):
        pool_k, pool_v = self.pool.buffers(layer, k, v)
        for i, slot in enumerate(self.slot_mapping.tolist()):
            pool_k[:, slot] = k[:, i]
            pool_v[:, slot] = v[:, i]
'''}),
    "prefixes by a loop, names with gaps": (6, {"paging.py:Pages.find": '''
    def find(self, tokens):
        found, name, rest = [], 0, list(tokens)
        while len(rest) >= self.size:
            key = name, tuple(rest[:self.size])
            if key not in self.published:
                return found
            found.append(self.published[key])
            name, rest = self.name_of[found[-1]], rest[self.size:]
        return found
''', "paging.py:Pages.publish": '''
    def publish(self, table, i, tokens):
        new = next(self.names)
        before = self.name_of[table[i - 1]] if i > 0 else 0
        first = self.published.setdefault((before, (*tokens,)), table[i])
        if first != table[i]:
            self.name_of[table[i]] = self.name_of[first]
            return
        self.name_of[first], self.key_of[first] = new, (before, (*tokens,))
        self.gains += 1
''', "paging.py:PagedScheduler.preempt": '''
    def preempt(self, request):
        self.free(request)
        self.running = [other for other in self.running if other is not request]
        self.waiting.insert(0, request)
        request.computed = 0
        self.counts.update(preemptions=1)
''', "paging.py:PagedScheduler.missing": '''
    def missing(self, request):
        known = len(request.prompt) + len(request.generated)
        return -(-known // self.pages.size) - len(request.kv)
'''}),
    # how a file may look
    "two spaces": (4, {"generate_dynamic.py": indented("  ")}),
    "tabs": (4, {"generate_dynamic.py": indented("\t"), "request.py": indented("\t")}),
    "a byte order mark": (5, {"generate_ragged.py": "\ufeff".__add__}),
    "Windows line ends": (1, {"model.py": lambda text: text.replace("\n", "\r\n")}),
    # what may be added
    "annotations from typing": (3, {"scheduler.py:": "from typing import List, Tuple",
                                    "scheduler.py:Scheduler.share_budget": '''
    def share_budget(self) -> List[Tuple[Request, int]]:
        plan: List[Tuple[Request, int]] = [(r, 1) for r in self.running if r.todo == 1]
        for r in self.running:
            left = self.token_budget - sum(n for _, n in plan)
            if r.todo > 1 and left > 0:
                plan.append((r, min(r.todo, left)))
        return plan
'''}),
    "annotations that are not evaluated": (2, {
        "generate_dynamic.py:": "from __future__ import annotations",
        "generate_dynamic.py:admit": '''
def admit(waiting: list[Nobody], running, step, max_batch) -> tuple[list, list]:
    ready = sum(r.arrival <= step for r in waiting)
    n = min(ready, max_batch - len(running))
    return waiting[n:], [*running, *waiting[:n]]
'''}),
    "a decorator, a constant and a default": (5, {
        "generate_prepacked.py:": '''
from functools import wraps

LONGEST_FIRST = True


def on_a_copy(function):
    @wraps(function)
    def call(lengths, *rest):
        return function(list(lengths), *rest)
    return call

''', "generate_prepacked.py:first_fit_decreasing": '''
@on_a_copy
def first_fit_decreasing(lengths, size, order=LONGEST_FIRST):
    rows, room = [], []
    for length, i in sorted(((n, i) for i, n in enumerate(lengths)), reverse=order):
        row = next((b for b, left in enumerate(room) if left >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(size)
        rows[row].append(i)
        room[row] -= length
    return rows
'''}),
    "a helper in another file of the set": (4, {
        "cache.py": lambda text: text + '''

def row_of(width, *pieces):
    line = [0] * width
    for at, values in pieces:
        line[at:at + len(values)] = values
    return line
''', "generate_dynamic.py:": "from cache import row_of",
        "generate_dynamic.py:Rectangle.lay_out": '''
    def lay_out(self, device):
        T, P = max(n for _, n in self.plan), max(self.starts)
        tokens, positions, mask = [], [], []
        for (request, n), start in zip(self.plan, self.starts):
            new = range(start, start + n)
            tokens.append(row_of(T, (T - n, request.slice(start, start + n))))
            positions.append(row_of(T, (T - n, new)))
            mask.append(row_of(P + T, (P - start, [1] * start), (P + T - n, [1] * n)))
        self.P, self.tokens = P, torch.tensor(tokens, device=device)
        self.positions = torch.tensor(positions, device=device)
        self.mask = torch.tensor(mask, device=device).bool()[:, None, None]
        due = complete(self.plan)
        self.sampled = [request for i, (request, _) in enumerate(self.plan) if i in due]
        self.rows = torch.tensor(due, dtype=torch.long, device=device), T - 1
'''}),
    "a new file": (6, {"arithmetic.py": '''
def ceiling(a, b):
    return (a + b - 1) // b
''', "paging.py:": "from arithmetic import ceiling", "paging.py:PagedScheduler.missing": '''
    def missing(self, request):
        return ceiling(request.computed + request.todo, self.pages.size) - len(request.kv)
'''}),
    "a property and a class attribute": (2, {"request.py:Request.append": '''
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
'''}),
    "an attribute that __post_init__ sets": (3, {
        "request.py": lambda text: text.replace(
            "check_request(self)\n", "check_request(self)\n        self.history = []\n"),
        "request.py:advance": '''
def advance(plan, tokens):
    tokens = iter(tokens)
    for i in range(len(plan)):
        request, n = plan[i]
        request.history.append(n)
        due = request.todo <= n
        request.computed += n
        if due:
            request.append(next(tokens))
'''}),
    "an attribute that __init__ sets": (6, {
        "paging.py": lambda text: text.replace(
            "        self.published, self.key_of", "        self.log = []\n"
            "        self.published, self.key_of"),
        "paging.py:Pages.hold": '''
    def hold(self, pages):
        for page in pages:
            self.log.append(page)
            if page in self.kept:
                del self.kept[page]
            self.holders[page] = self.holders[page] + 1
'''}),
    "an import for type checkers": (5, {"generate_ragged.py:": '''
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable
''', "generate_ragged.py:Flat.attend": '''
    def attend(self, layer: Hashable, q, k, v):
        self.write(layer, k, v)
        pairs = [self.read(layer, i) for i, _ in enumerate(self.plan)]
        if self.attention == "mask":
            return head(q, *(torch.cat(part, -2) for part in zip(*pairs)), mask=self.mask)[0]
        pieces = q.split([n for _, n in self.plan], dim=-2)
        return torch.cat([head(piece, *pair)[0] for piece, pair in zip(pieces, pairs)], -2)
'''}),
    # other ways
    "attention by einsum": (1, {"model.py:Head.forward": '''
    def forward(self, q, k, v, past_k=None, past_v=None, mask=None):
        if past_k is not None:
            k, v = torch.cat((past_k, k), -2), torch.cat((past_v, v), -2)
        n, s = q.shape[-2], k.shape[-2]
        rule = ~torch.ones(n, s, dtype=torch.bool).triu(s - n + 1)
        mask = rule if mask is None else torch.logical_and(rule, mask)
        w = torch.einsum("...td,...sd->...ts", q, k).mul(q.shape[-1] ** -0.5).exp() * mask
        return torch.einsum("...ts,...sd->...td", w / w.sum(-1, True).clamp(min=1e-300), v), k, v
'''}),
    "writing by index": (1, {"cache.py:KV.write": '''
    def write(self, layer, start, k, v):
        where = torch.arange(start, start + k.size(-2))
        if start + len(where) > self.capacity:
            raise ValueError
        all_k, all_v = self.buffers(layer, k, v)
        all_k.index_copy_(-2, where, k)
        all_v.index_copy_(-2, where, v)
''', "cache.py:": "import torch"}),
    "one request, by all of its tokens": (1, {"generate_unbatched.py:Alone.lay_out": '''
    def lay_out(self, device):
        request = self.plan[0][0]
        self.start, self.end = request.computed, len(request.tokens)
        self.tokens = torch.tensor(request.tokens, device=device)[None, self.start:]
        self.positions = torch.arange(self.end, device=device)[None, self.start:]
        self.sampled, self.rows = [request], (torch.tensor([0]), torch.tensor([-1]))
''', "generate_unbatched.py:Alone.attend": '''
    def attend(self, layer, q, k, v):
        if self.kv is None:
            return head(q, k, v)[0]
        self.kv.write(layer, self.start, k, v)
        past_k, past_v = (t[..., :self.start, :] for t in self.kv.read(layer, self.end))
        return head(q, k, v, past_k, past_v)[0]
'''}),
    "leaving in two passes": (2, {"generate_dynamic.py:leave": '''
def leave(running):
    stay = [r for r in unfinished(running) if not r.finished]
    for r in set(running) - set(stay):
        r.kv = None
    return list(stay)
'''}),
    "a scheduler by rounds": (3, {"scheduler.py:Scheduler.admit": '''
    def admit(self, step):
        def allowed():
            busy = sum(r.todo for r in self.running)
            return (self.arrived(step) and len(self.running) < self.max_batch
                    and busy < self.token_budget and self.grant_room(self.waiting[0]))
        if allowed():
            self.running.append(self.waiting.popleft())
            self.admit(step)
''', "scheduler.py:Scheduler.release": '''
    def release(self):
        gone, self.running = ([r for r in self.running if r.finished],
                              [r for r in self.running if not r.finished])
        for request in gone:
            self.free(request)
'''}),
    "the stream by comparison": (5, {"generate_ragged.py:Flat.block_diagonal": '''
    def block_diagonal(self):
        keys = [(i, p) for i, end in enumerate(self.ends) for p in range(end)]
        new = [(i, p) for i, start in enumerate(self.starts) for p in range(start, self.ends[i])]
        return torch.tensor([[a == b and p <= now for b, p in keys] for a, now in new])
'''}),
}
