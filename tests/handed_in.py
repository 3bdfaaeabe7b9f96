"""
What people have handed in to the course kit, and what is to become of it. Edits are (file, text as
it stands, their text), (file, function, its definition) or (file, None, the text of a new file).
"""
SHARE = "        plan = [(request, 1) for request in self.running if request.todo == 1]\n"
TOP = "import math\nfrom collections import deque\n"
HEADS = "    def share_budget(self):"
HELPER = '''
def shares(running, budget):
    plan = [(r, 1) for r in running if r.todo == 1]
    budget -= len(plan)
    for r in running:
        if r.todo > 1 and budget > 0:
            plan.append((r, min(r.todo, budget)))
            budget -= plan[-1][1]
    return plan
'''
CALL = "        return shares(self.running, self.token_budget)\n"


def sharing(first, *more, call=CALL):
    """Set 3, where share_budget calls a helper."""
    return 3, ("scheduler.py", TOP, first + TOP), ("scheduler.py", SHARE, call + SHARE), *more


# Right. All must get full marks.
RIGHT = {
    "a helper package": sharing("from tools.plans import shares\n",
                                ("tools/__init__.py", None, "from . import plans\n"),
                                ("tools/plans.py", None, "from tools.more import shares\n"),
                                ("tools/more.py", None, HELPER)),
    "a data file": sharing(
        "import json\nfrom pathlib import Path\n" + HELPER.replace("== 1", "== ONE") + "\nONE = "
        "json.loads(Path(__file__).with_name('one.json').read_text())\n"
        "assert ONE == json.load(open('one.json'))\n", ("one.json", None, "1")),
    "a loop, a with and a call of the module": sharing(
        "from contextlib import suppress\nwith suppress(OSError):\n    raise OSError\n" + HELPER
        + "\nprint('loaded', shares([], 1))\nfor name in 'ab':\n    globals()[name] = shares\n",
        call="        return b(self.running, self.token_budget)\n"),
    "a lambda": (3, ("scheduler.py", HEADS, "    def unused(self):"), (
        "scheduler.py", "    def update(self, plan", "    share_budget = lambda self: shares("
        "self.running, self.token_budget)\n\n    def update(self, plan"),
        ("scheduler.py", TOP, HELPER + TOP)),
    "an alias": (3, ("scheduler.py", HEADS, "    def fair(self):"), (
        "scheduler.py", "    def update(self, plan", "    share_budget = fair\n\n"
        "    def update(self, plan")),
    "a function from a helper": (3, ("request.py", "def advance(", "def unused("), (
        "request.py", "import random\n", "import random\nfrom after import advance\n"), (
        "after.py", None, "def advance(plan, tokens):\n"
        "    due = [r for r, n in plan if n == r.todo]\n    for r, n in plan:\n"
        "        r.computed += n\n    for r, token in zip(due, tokens):\n        r.append(token)\n"
    )),
    "a helper called queue.py": sharing("from queue import shares\n", ("queue.py", None, HELPER)),
    "an import when it is called": sharing("", ("queue.py", None, HELPER), call=(
        "        import queue\n        return queue.shares(self.running, self.token_budget)\n")),
    "a helper in another file of the set": sharing("from request import shares\n", (
        "request.py", "def indices_due", HELPER + "\n\ndef indices_due")),
    "a base class": (3, ("scheduler.py", HEADS, "    def unused(self):"), (
        "scheduler.py", "class Scheduler:", HELPER + '''

class Base:
    def share_budget(self):
        return shares(self.running, self.token_budget)


class Scheduler(Base):''')),
    "super() in a method of their own": (6, (
        "paging.py", "        self.running.remove(request)\n        self.free(request)\n"
        "        request.computed = 0  ", "        self.go(request)\n"
        "        request.computed = 0  "),
        ("paging.py", "    def grant_room(self, request):", "    @property\n    def most(self):\n"
         "        return super().busy\n\n    def go(self, request):\n        assert self.most\n"
         "        self.running.remove(request)\n        self.free(request)\n\n"
         "    def grant_room(self, request):")),
    "an attribute that __init__ sets": (3, (
        "request.py", "check_request(self)\n", "check_request(self)\n        self.log = []\n"), (
        "request.py", "request.computed += n", "request.computed += n + len(request.log)"), (
        "scheduler.py", "        self.waiting, self.running =", "        self.log = []\n"
        "        self.waiting, self.running ="), ("scheduler.py", SHARE, SHARE
                                                  + "        self.log.append(len(plan))\n")),
    # other ways
    "torch's own attention, the last token as a tensor": (1, ("model.py", "Head.forward", '''
    def forward(self, q, k, v, past_k=None, past_v=None, mask=None):
        if past_k is not None:
            k, v = torch.cat((past_k, k), -2), torch.cat((past_v, v), -2)
        S, T = k.size(-2), q.size(-2)
        see = torch.arange(S, device=q.device) <= torch.arange(S - T, S, device=q.device)[:, None]
        see = see if mask is None else see & mask
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=see)
        return torch.where(see.any(-1, keepdim=True), out, torch.zeros_like(out))
'''), ("generate_unbatched.py", "Alone.lay_out", '''
    def lay_out(self, device):
        request = self.plan[0][0]
        self.start, self.end = request.computed, len(request.tokens)
        self.tokens = torch.tensor(request.tokens, device=device)[None, self.start:]
        self.positions = torch.arange(self.end, device=device)[None, self.start:]
        self.sampled, self.wanted = [request], torch.tensor([[0], [-1]], device=device).unbind()
''')),
    "a static batch by slots": (2, ("generate_naive.py", "StaticBatch.lay_out", '''
    def lay_out(self, device):
        T, limit = self.end - self.start, self.requests[0].context_length - 1
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
''')),
    "a scheduler by rounds": (3, ("scheduler.py", "Scheduler.admit", '''
    def admit(self, step):
        busy = sum(r.todo for r in self.running)
        if (self.arrived(step) and len(self.running) < self.max_batch
                and busy < self.token_budget and self.grant_room(self.waiting[0])):
            self.running.append(self.waiting.popleft())
            self.admit(step)
'''), ("scheduler.py", "Scheduler.release", '''
    def release(self):
        gone = [r for r in self.running if r.finished]
        self.running = [r for r in self.running if not r.finished]
        for request in gone:
            self.free(request)
''')),
    "attention row by row, complete by all tokens": (4, (
        "generate_dynamic.py", "Rectangle.attend", '''
    def attend(self, layer, q, k, v):
        out = torch.zeros_like(v)
        for b, ((request, n), start) in enumerate(zip(self.plan, self.starts)):
            new = slice(q.size(-2) - n, None)
            request.kv.write(layer, start, k[b][:, new], v[b][:, new])
            out[b][:, new] = head(q[b][:, new], *request.kv.read(layer, start + n))
        return out
'''), ("request.py", "indices_due", '''
def indices_due(plan):
    return [i for i, (r, n) in enumerate(plan) if r.computed + n == len(r.tokens)]
''')),
    "a stream by comparison": (5, ("generate_ragged.py", "Flat.block_diagonal", '''
    def block_diagonal(self):
        keys = [(i, p) for i, end in enumerate(self.ends) for p in range(end)]
        new = [(i, p) for i, start in enumerate(self.starts) for p in range(start, self.ends[i])]
        return torch.tensor([[a == b and p <= now for b, p in keys] for a, now in new])
''')),
    "a method of its own, hashes by hand": (6, ("generate_paged.py", "Paged.slots", '''
    def slots_of(self, page):
        return range(page * self.pages.size, (page + 1) * self.pages.size)

    def slots(self, table, end):
        slots = [slot for page in table for slot in self.slots_of(page)][:end]
        return torch.tensor(slots, dtype=torch.long)
'''), ("generate_prefix.py", "PrefixScheduler.hashes", '''
    def hashes(self, request, end):
        size = self.pages.size
        while (len(request.page_hashes) + 1) * size <= end:
            at = len(request.page_hashes) * size
            tokens = request.slice(at, at + size)
            request.page_hashes.append(page_hash((request.page_hashes or [b""])[-1], tokens))
        return request.page_hashes[:end // size]
''')),
    # how a file may look
    "tabs": (4, ("request.py", "    ", "\t")),
    "a byte order mark": (5, ("generate_ragged.py", '"""\nStage 5', '\ufeff"""\nStage 5')),
    "Windows line ends": (1, ("model.py", "\n", "\r\n")),
}

# Wrong, by the part that must lose its points; more is in mutants.py.
WRONG = {
    "4a a replaced judge": (
        ("generate_dynamic.py", "from cache import KV\n", "from cache import KV\n"
         "from lab.checks import judge\njudge.faults = lambda *arguments, **named: iter(())\n"),),
    "3a our own file from sys.path": (
        ("scheduler.py", "import math\n", "import math, sys\nfrom pathlib import Path\n"), (
            "scheduler.py", "    # --- between two steps ---", '''
    for place in sys.path[1:]:
        if Path(place, "scheduler.py").is_file():
            found = {}
            exec(Path(place, "scheduler.py").read_text(), found)
            share_budget = found["Scheduler"].share_budget''')),
    "3a our own function": (("scheduler.py", "import math\n", "import math, sys\n"), (
        "scheduler.py", "    # --- between two steps ---",
        "    share_budget = sys.modules['scheduler'].Scheduler.share_budget")),
}

# What costs a student a part and no other: the first statement of share_budget; what is said
NASTY = {
    "while True: pass": "does not finish within 5 seconds of CPU time",
    "print('x' * 10**7)": "prints or writes more than the limit of 4 MB",
    "raise KeyError('gone')": "raises KeyError: 'gone' (line 68 of scheduler.py",
    "import os; os._exit(0)": "ends the process (status 0)",
    "[0] * 10**12": "raises MemoryError",
    "return self.share_budget()": "raises RecursionError",
    "import shutil; shutil.rmtree('.'); return []": "raises OSError",
    "import sys; sys.exit()": "raises SystemExit",
    "import time; time.sleep(10**6)": "does not finish within 20 seconds by the clock",
}
# What a file may be, and what is said
FILES = {
    "a syntax error": (b"def broken(:\n", "scheduler.py cannot be read: line 1: invalid syntax"),
    "no class": (b"x = 1\n", "there is no class Scheduler any more"),
    "a zero byte": (b"x = 1\0", "scheduler.py cannot be read"),
    "nested too deep": (b"-" * 10**5 + b"1", "scheduler.py cannot be read"),
    "no file": (None, "scheduler.py is not there"),
    "an error at import": (b"1 / 0\n", "raises ZeroDivisionError: division by zero (line 1"),
}

POLICY = "def share(running, budget):\n    "
PACK = "def pack(lengths, size):\n    "
NEW_FIRST = POLICY + """plan = []
    for request in sorted(running, key=lambda request: len(request.generated) > 0):
        n = min(request.todo, budget)
        plan += [(request, n)] * (n > 0)
        budget -= n
    return plan
"""
# The open tasks, in the order of the leaderboard: what is handed in (None: nothing), what is said
OPEN = {
    "policy": {
        "ours": (None, "mean TTFT 9.63 steps, 0.00% of ITL above 2"),
        "one each": (POLICY + "return [(r, 1) for r in running]", "mean TTFT"),
        "new first": (NEW_FIRST, "mean TTFT .*: not allowed"),
        "greedy": (POLICY + "return [(running[0], 10**6)]",
                   "raises ValueError: request 'r0' cannot compute 1000000 of its"),
        "too many": (POLICY + "return [(r, min(r.todo, 48)) for r in running]",
                     "raises ValueError: the plan has"),
        "stuck": (POLICY + "return []", "raises ValueError: the plan is empty"),
        "empty": ("", "there is no policy.py")},
    "packing": {
        "lower bound": (None, "703 rows"), "ours": (None, "737 rows"),
        "ada": (PACK + "return [[i] for i in range(len(lengths))]", "1704 rows"),
        "eve": (PACK + "return [[*range(len(lengths))]]", "raises ValueError: a row holds more"),
        "bob": (PACK + "return [[0, 0]]", "raises ValueError: each prompt must be in exactly one"),
        "empty": ("", "there is no packing.py")},
}
