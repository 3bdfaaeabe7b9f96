"""
What people have handed in to the course kit, and what is to become of it. Edits are (file, text as
it stands, their text), or (file, None, the text of a new file).
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
    "a module-level loop": sharing(HELPER + "\nfor name in 'ab':\n    globals()[name] = shares\n",
                                   call="        return b(self.running, self.token_budget)\n"),
    "a module-level with": sharing(
        "from contextlib import suppress\nwith suppress(OSError):\n    raise OSError\n" + HELPER),
    "a module-level call": sharing(HELPER + "\nprint('loaded', shares([], 1))\n"),
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
    "super() and a base class": (3, (
        "scheduler.py", SHARE, "        return super().share_budget()\n" + SHARE), (
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
        "scheduler.py", "        self.waiting, self.running =", "        self.log = []\n"
        "        self.waiting, self.running ="), ("scheduler.py", SHARE, SHARE
                                                  + "        self.log.append(len(plan))\n")),
}

MASK = "        self.tokens, self.positions, self.mask = (t.to(device) for t in"
OUT = "        out = head(q, k, v, past_k, past_v, self.mask)\n"
# Wrong, by the part that must lose its points.
WRONG = {
    "3a the budget exceeded by one": (("scheduler.py", "- len(plan)  ", "- len(plan) + 1  "),),
    "3a exceeded by one if many decode": (
        ("scheduler.py", "- len(plan)  ", "- len(plan) + (len(plan) > 6)  "),),
    "3a plan[:8]": (("scheduler.py", "        return plan\n\n    def update",
                     "        return plan[:8]\n\n    def update"),),
    "3a a chunk of at most 16": (("scheduler.py", "min(request.todo, budget)",
                                  "min(request.todo, budget, 16)"),),
    "3b max_batch capped at 6": (("scheduler.py", "len(self.running) < self.max_batch",
                                  "len(self.running) < min(self.max_batch, 6)"),),
    "3a quadratic time": (("scheduler.py", "if request.todo == 1]",
                           "if request.todo == 1 and self.running.count(request)]"),),
    "3c quadratic time": (("request.py", "for i in indices_due(plan)]",
                           "for i in indices_due(plan) if i in indices_due(plan)]"),),
    "6c quadratic time": (("paging.py", "        pages, name = [], 0\n",
                           "        pages, name = [], 0\n"
                           "        [sum(tokens[:i]) for i in range(len(tokens))]\n"),),
    "5c the handout's example: a partial prompt in the middle": (
        ("generate_ragged.py", "for i in due]\n        self.wanted",
         "for i in range(len(due))]\n        self.wanted"),),
    "4d the handout's example: arange": (
        ("generate_dynamic.py", "torch.tensor(due, dtype=torch.long, device=device)",
         "torch.arange(len(due), device=device)"),),
    "4c the fifth request zeroed": (("generate_dynamic.py", OUT, OUT + "        out[4:5] = 0\n"),),
    "4c the fifth request NaN": (
        ("generate_dynamic.py", OUT, OUT + "        out[4:5] = float('nan')\n"),),
    "5d the fifth request zeroed": (
        ("generate_ragged.py", "out.append(head(q[..., new, :], keys, values))",
         "out.append(head(q[..., new, :], keys, values) * (i != 4))"),),
    "5d a stream of at most 40": (("generate_ragged.py", "        return torch.cat(out, dim=-2)",
                                   "        out = torch.cat(out, dim=-2)\n        out[:, 40:] = 0\n"
                                   "        return out"),),
    "4b all-visible from the seventh request on": (
        ("generate_dynamic.py", MASK, "        mask[6:] = True\n" + MASK),),
    "5c all-visible from the seventh request on": (
        ("generate_ragged.py", "        return torch.block_diag(*see).bool()",
         "        see = torch.block_diag(*see).bool()\n        see[self.cu_seqlens[6:7][0] if "
         "len(self.plan) > 6 else len(see):] = True\n        return see"),),
    "1a device ignored": (("model.py", "dtype=torch.bool, device=q.device)", "dtype=torch.bool)"),),
    "1c device ignored": (
        ("generate_unbatched.py", "[positions], device=device)", "[positions])"),),
    "2a device ignored": (("generate_naive.py", "tokens.to(device) ", "tokens "),),
    "4a device ignored": (
        ("generate_dynamic.py", "(t.to(device) for t in (tokens, positions, mask))",
         "(tokens, positions, mask.to(device))"),),
    "4b device ignored": (
        ("generate_dynamic.py", "(t.to(device) for t in (tokens, positions, mask))",
         "(tokens.to(device), positions.to(device), mask)"),),
    "4d device ignored": (("generate_dynamic.py", "dtype=torch.long, device=device), -1)",
                           "dtype=torch.long), -1)"),),
    "5b device ignored": (("generate_prepacked.py", "mask[:, None].to(device)", "mask[:, None]"),),
    "5c device ignored": (("generate_ragged.py", "torch.tensor(positions, device=device)",
                           "torch.tensor(positions)"),),
    "4a a replaced judge": (
        ("generate_dynamic.py", MASK, "        positions += 1\n" + MASK),
        ("generate_dynamic.py", "from cache import KV\n", "from cache import KV\n"
         "import checks.judge\nchecks.judge.faults = lambda *arguments, **named: iter(())\n")),
    "4c a replaced judge, when it is called": (
        ("generate_dynamic.py", OUT, "        import checks.judge\n"
         "        checks.judge.wrong_tokens = lambda *_: ()\n" + OUT),),
    "3a our own file from sys.path": (
        ("scheduler.py", "import math\n", "import math, sys\nfrom pathlib import Path\n"), (
            "scheduler.py", "    # --- between two steps ---", '''
    for place in sys.path:
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
    "print('x' * 10**8)": "prints or writes more than the limit of 4 MB",
    "raise KeyError('gone')": "raises KeyError: 'gone' (line 68 of scheduler.py",
    "import os; os._exit(0)": "ends the process (status 0)",
    "[0] * 10**12": "raises MemoryError",
    "return self.share_budget()": "raises RecursionError",
    "import shutil; shutil.rmtree('.'); return []": "expected A1",
    "import sys; sys.exit()": "raises SystemExit",
    "import time; time.sleep(10**6)": "does not finish within 20 seconds by the clock",
}
# What a file may be, and what is said
FILES = {
    "a syntax error": (b"def broken(:\n", "scheduler.py cannot be read: line 1: invalid syntax"),
    "no class": (b"x = 1\n", "there is no class Scheduler any more"),
    "no function": (b"class Scheduler:\n    pass\n", " any more"),
    "a zero byte": (b"x = 1\0", "scheduler.py cannot be read"),
    "nested too deep": (b"-" * 10**5 + b"1", "scheduler.py cannot be read"),
    "no file": (None, "scheduler.py is not there"),
    "an error at import": (b"1 / 0\n", "raises ZeroDivisionError: division by zero (line 1"),
}
