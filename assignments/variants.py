"""
Right solutions that differ from ours. The grader must give each full marks. A variant belongs to a
set and replaces whole functions; the imports that it needs are inside them.
"""

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
    "attention query by query": (1, {"model.py:Head.forward": '''
    def forward(self, q, k, v, past_k=None, past_v=None, mask=None):
        if past_k is not None:
            k, v = torch.cat([past_k, k], dim=-2), torch.cat([past_v, v], dim=-2)
        T, S, out = q.size(-2), k.size(-2), []
        for i in range(T):
            end = S - T + i + 1
            w = (q[..., i:i + 1, :] * k[..., :end, :]).sum(-1) * q.size(-1) ** -0.5
            if mask is not None:
                part = mask.expand(*mask.shape[:-2], T, S)[..., i, :end]
                w = w.masked_fill(~part, -1e300)
                w = w.softmax(-1) * part
                total = w.sum(-1, keepdim=True)
                w = w / total.masked_fill(total == 0, 1)
            else:
                w = w.softmax(-1)
            out.append((w[..., None] * v[..., :end, :]).sum(-2))
        return torch.stack(out, dim=-2), k, v
'''}),
    "a cache that is read as copies": (1, {"cache.py:KV.write": '''
    def write(self, layer, start, k, v):
        if start + k.shape[-2] > self.capacity:
            raise ValueError("does not fit")
        for buffer, new in zip(self.buffers(layer, k, v), (k, v)):
            for i in range(new.shape[-2]):
                buffer.select(-2, start + i).copy_(new.select(-2, i))
''', "cache.py:KV.read": '''
    def read(self, layer, end):
        return tuple(kind[layer].narrow(-2, 0, end).clone() for kind in (self.k, self.v))
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
    "the end of a request by cases": (2, {"request.py:Request.append": '''
    def append(self, token):
        self.generated = self.generated + [token]
        if self.eos_token is not None and token == self.eos_token:
            self.finish_reason = "stop"
            return
        full = len(self.prompt) + len(self.generated) == self.block_size + 1
        if full or len(self.generated) == self.max_new_tokens:
            self.finish_reason = "length"
'''}),
    "admission with a loop": (2, {"generate_dynamic.py:admit": '''
def admit(waiting, running, step, max_batch):
    left, now = [], list(running)
    for request in waiting:
        if request.arrival <= step and len(now) < max_batch:
            now.append(request)
        else:
            left.append(request)
    return left, now
''', "generate_dynamic.py:leave": '''
def leave(running):
    others = []
    for request in running:
        if request.cancelled and request.finish_reason is None:
            request.finish_reason = "cancelled"
        if request.finish_reason is None:
            others.append(request)
        else:
            request.kv = None
    return others
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
    "admission by counting down": (3, {"scheduler.py:Scheduler.admit": '''
    def admit(self, step):
        while len(self.running) != self.max_batch:
            if sum(r.todo for r in self.running) >= self.token_budget:
                return
            if not self.waiting or self.waiting[0].arrival > step:
                return
            first = self.waiting.popleft()
            if not self.grant_room(first):
                self.waiting.appendleft(first)
                return
            self.running += [first]
''', "scheduler.py:Scheduler.grant_room": '''
    def grant_room(self, request):
        room = self.max_kv_tokens
        for other in self.running:
            room -= other.kv_tokens
        return room >= request.kv_tokens
'''}),
    "after a step, request by request": (3, {"request.py:advance": '''
def advance(plan, tokens):
    new = list(tokens)
    for request, n in plan:
        complete_now = request.todo == n
        request.computed = request.computed + n
        if complete_now:
            request.append(new.pop(0))
''', "scheduler.py:Scheduler.release": '''
    def release(self):
        for request in list(self.running):
            if request.finished:
                self.free(request)
                self.running.remove(request)
'''}),
    # set 4
    "a rectangle from lists": (4, {"generate_dynamic.py:Rectangle.lay_out": '''
    def lay_out(self, device):
        starts = [request.computed for request, _ in self.plan]
        T, self.P = max(n for _, n in self.plan), max(starts)
        tokens, positions, mask, last = [], [], [], []
        for (request, n), start in zip(self.plan, starts):
            pads = T - n
            tokens.append([0] * pads + request.tokens[start:start + n])
            positions.append([0] * pads + list(range(start, start + n)))
            mask.append([False] * (self.P - start) + [True] * start + [False] * pads + [True] * n)
        self.tokens = torch.tensor(tokens, device=device)
        self.positions = torch.tensor(positions, device=device)
        self.mask = torch.tensor(mask, device=device)[:, None, None, :]
        due = [b for b, (request, n) in enumerate(self.plan) if n == request.todo]
        self.sampled = [self.plan[b][0] for b in due]
        self.rows = (torch.tensor(due, dtype=torch.long, device=device),
                     torch.full((len(due),), T - 1, dtype=torch.long, device=device))
'''}),
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
    "packing with one list": (5, {"generate_prepacked.py:first_fit_decreasing": '''
def first_fit_decreasing(lengths, size):
    rows = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        for row in rows:
            if sum(lengths[j] for j in row) + lengths[i] <= size:
                row.append(i)
                break
        else:
            rows.append([i])
    return rows
'''}),
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
    "varlen, masked by hand": (5, {"generate_ragged.py:Flat.attend": '''
    def attend(self, layer, q, k, v):
        self.write(layer, k, v)
        parts = [self.read(layer, i) for i in range(len(self.plan))]
        if self.attention == "mask":
            scores = q @ torch.cat([key for key, _ in parts], 1).transpose(1, 2)
            scores = scores / q.size(-1) ** 0.5
            weights = scores.masked_fill(~self.mask, float("-inf")).softmax(-1)
            return weights @ torch.cat([value for _, value in parts], 1)
        out = q.new_empty(q.size(0), q.size(1), v.size(-1))
        for (key, value), a, b in zip(parts, self.cu_seqlens, self.cu_seqlens[1:]):
            out[:, a:b] = head(q[:, a:b], key, value)[0]
        return out
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
}
