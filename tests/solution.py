"""
An engine for the last notebook, one of many that are right, for tests/test_capstone.py. The
notebook shows none of it. RIGHT are other styles and WRONG mistakes, as edits.
"""
import inspect
import re
import sys

import numpy as np
import torch

from model import head

STEPS = {1: ("schedule",), 2: ("lay_out", "attend", "after_pass"),
         3: ("slots", "admit", "make_room", "free"), 4: ("admit_shared", "keep", "free_shared")}


def schedule(waiting, running, step, max_batch, token_budget, admit, make_room):
    plan, left, before = [], token_budget, len(running)
    for request in running:
        n = min(request.todo, left)
        if n and make_room(request, n):
            plan.append((request, n))
            left -= n
    preempted = len(running) < before
    while left and len(running) < max_batch and not preempted:
        if not waiting or waiting[0].arrival > step or not admit(waiting[0]):
            break
        request = waiting.popleft()
        running.append(request)
        n = min(request.todo, left)
        make_room(request, n)
        plan.append((request, n))
        left -= n
    return plan


def lay_out(plan):
    tokens, positions, cu_seqlens, due = [], [], [0], []
    for i, (request, n) in enumerate(plan):
        start, end = request.computed, request.computed + n
        tokens += request.tokens[start:end]
        positions += range(start, end)
        cu_seqlens.append(len(tokens))
        if n == request.todo:
            due.append(i)
    return tokens, positions, cu_seqlens, due


def attend(plan, cu_seqlens, layer, q, k, v):
    for (request, n), a, b in zip(plan, cu_seqlens, cu_seqlens[1:]):
        request.kv.write(layer, request.computed, k[:, a:b], v[:, a:b])
    out = []
    for i, (request, n) in enumerate(plan):
        keys, values = request.kv.read(layer, request.computed + n)
        out.append(head(q[:, cu_seqlens[i]:cu_seqlens[i + 1]], keys, values))
    return torch.cat(out, dim=1)


def after_pass(plan, due, tokens, running):
    for request, n in plan:
        request.computed += n
    for i, token in zip(due, tokens):
        plan[i][0].append(token)
    finished = [request for request in running if request.finished]
    for request in finished:
        running.remove(request)
    return finished


def slots(memory, request, start, end):
    size = memory.size
    return [request.block_table[p // size] * size + p % size for p in range(start, end)]


def admit(memory, request):
    if -(-request.todo // memory.size) > len(memory.free):
        return False
    request.block_table = []
    return True


def make_room(memory, running, waiting, request, n):
    need = -(-(request.computed + n) // memory.size)
    while need - len(request.block_table) > len(memory.free):
        last = running.pop()
        free(memory, last)
        last.computed = 0
        waiting.appendleft(last)
        if last is request:
            return False
    while len(request.block_table) < need:
        request.block_table.append(memory.take())
    return True


def free(memory, request):
    memory.free.extend(request.block_table)
    request.block_table = None


# --- step 4: these take the places of the two above ---

def admit_shared(memory, request):
    size, found = memory.size, []
    while (len(found) + 1) * size < len(request.tokens):
        page = memory.find(tuple(request.tokens[:(len(found) + 1) * size]))
        if page is None:
            break
        found.append(page)
    need = -(-len(request.tokens) // size) - len(found)
    if need > len(memory.free) - sum(page in memory.free for page in found):
        return False
    for page in found:
        if memory.ref_count[page] == 0:
            memory.free.remove(page)
        memory.ref_count[page] += 1
    request.block_table = found
    request.computed = len(found) * size
    return True


def keep(memory, request, n):
    for i in range(request.computed // memory.size, (request.computed + n) // memory.size):
        key = tuple(request.tokens[:(i + 1) * memory.size])
        memory.cached[request.block_table[i]] = key


def free_shared(memory, request):
    for page in reversed(request.block_table):
        memory.ref_count[page] -= 1
        if memory.ref_count[page] == 0 and page in memory.cached:
            memory.free.append(page)
        elif memory.ref_count[page] == 0:
            memory.free.appendleft(page)
    request.block_table = None


# --- for the tests --------------------------------------------------------------------------------

SCOPE = {"torch": torch, "head": head, "np": np}   # of the cells
LINES = [line.strip() for line in inspect.getsource(sys.modules[__name__]).split("# --- for the")[0]
            .splitlines() if re.match(r"    +\w.{30}", line)]


def cell(step):
    """The notebook's cell of a step, filled in."""
    code = "\n\n".join(inspect.getsource(globals()[name]) for name in STEPS[step])
    names = ", ".join(STEPS[step])
    return f"{code}\njudge({step}, {names})\n".replace("_shared", "")


def edits(old, new):
    """What puts a mistake in. A page's key is made in two functions: both get the same one."""
    places = ("find(", "key = ") if old == "tuple(" else ("",)
    return [(place + old, place + new) for place in places]


RIGHT = [   # step, old, new: the same in other styles
    (1, "return plan", "return tuple(plan[::-1])"),
    (1, "n = min(request.todo, left)\n        if",
     "n = np.int64(min(request.todo, left))\n        if"),
    (1, "for request in running:\n        n", "for request in [*running]:\n"
     "        if request not in running:\n            continue\n        n"),
    (2, "return tokens,", "tokens = torch.tensor(tokens)\n    return tokens,"),
    (2, "return finished", "return {*finished}"),
    (2, "head(q[:, cu_seqlens[i]:cu_seqlens[i + 1]], keys, values)", """\
torch.nn.functional.scaled_dot_product_attention(
            q[:, cu_seqlens[i]:cu_seqlens[i + 1]], keys, values,
            attn_mask=torch.ones(n, keys.size(1)).bool().tril(request.computed))"""),
    (3, "range(start, end)", "torch.arange(start, end)"),
    (4, "tuple(", "str("),
]

WRONG = [   # step, old, new, what the judge says
    (1, "len(running) < max_batch", "len(running) < 1", "waits, although 1 of 8 requests run"),
    (1, " and len(running) < max_batch", "", "3 requests run, at most 2 may"),
    (1, "while left and", "while", "admitted, although nothing is left of the budget"),
    (1, " or not admit(waiting[0])", "", "admit has not returned True"),
    (1, "if not waiting or waiting[0].arrival > step or not admit(waiting[0]):",
     "if not waiting or not admit(waiting[0]) or waiting[0].arrival > step:",
     "waits, though admit has returned True"),
    (1, "waiting.popleft()", "waiting[0]", "times in waiting and running"),
    (1, "request = waiting.popleft()\n        running.append(request)", "continue",
     "it does not end"),
    (1, "            break\n", """\
            for late in [r for r in list(waiting)[1:2] if r.arrival <= step and admit(r)]:
                waiting.remove(late)
                running.append(late)
            break\n""", "not in order of arrival"),
    (1, "for request in running:", "for request in sorted(running, key=lambda r: -r.todo):",
     "'A' decodes and gets 0 tokens of the budget, not 1"),
    (1, "if n and make_room(request, n):", "if n == request.todo and make_room(request, n):",
     "'D' is admitted, although nothing is left of the budget"),
    (1, "n and make_room(request, n)", "n", "make_room was not asked"),
    (1, "n and make_room(request, n)", "n and make_room(request, request.todo)",
     "is to compute 6 tokens, and make_room was asked for 9"),
    (1, " and not preempted", "", "although make_room has just preempted"),
    (1, "        if n and make_room(request, n):\n",
     "        make_room(request, n)\n        if n:\n", "is in the plan 1 times, and runs 0 times"),
    (1, "        n = min(request.todo, left)\n        make_room(request, n)\n",
     "        n = min(request.todo, left)\n", "make_room was not asked"),
    (2, "cu_seqlens.append(len(tokens))", "cu_seqlens.append(n)", "cu_seqlens: [0, 1, 3, 5]"),
    (2, "if n == request.todo", "if n > 0", "due: [0, 1, 2], expected [0, 2]"),
    (2, "layer, request.computed, k", "layer, 0, k", "does not hold the keys and values"),
    (2, "request.kv.write(layer, request.computed, k[:, a:b], v[:, a:b])", "request.kv.write("
     "layer, request.computed, k[:, a:b], v[:, a:b]) if layer == 0 or a == 0 else "
     "request.kv.write(layer, 0, k[:, a:b], v[:, a:b])", "empty key slot"),
    (2, """\
        request.kv.write(layer, request.computed, k[:, a:b], v[:, a:b])
    out = []
    for i, (request, n) in enumerate(plan):
        keys""", """\
        pass
    out = []
    for i, (request, n) in enumerate(plan):
        a, b = cu_seqlens[i:i + 2]
        request.kv.write(layer, request.computed, k[:, a:b], v[:, a:b])
        keys""", "so store all of them first"),
    (2, "due.append(i)", "due.append(request)", "due: [Request("),
    (2, "request.computed += n", "request.computed += 1", ": [4, 4, 3, 1], expected [4, 4, 5, 5]"),
    (2, "    finished = [request for request in running if request.finished]\n"
     "    for request in finished:\n        running.remove(request)\n",
     "    finished = [request for request in running if request.finished]\n"
     "    for request in running:\n        request.finished and running.remove(request)\n",
     "running: ['D', 'B', 'C'], expected ['B', 'C']"),
    (2, "return finished", "return []", "the result: [], expected ['A', 'D']"),
    (2, "    return torch.cat(out, dim=1)", """\
    read = (r.kv.read(layer, r.computed + n) for r, n in plan)
    keys, values = (torch.cat(t, dim=1) for t in zip(*read))
    see = torch.block_diag(*(torch.ones(n, r.computed + n).tril(r.computed) for r, n in plan))
    return head(q, keys, values, mask=see.bool())""", "so do not hide, skip"),
    (2, "head(q[:, cu_seqlens[i]:cu_seqlens[i + 1]], keys, values)", "head(torch.cat((keys[:, n:], "
     "q[:, cu_seqlens[i]:cu_seqlens[i + 1]]), 1), keys, values)[:, -n:]", "so do not hide, skip"),
    (3, "request.block_table[p // size] * size + p % size", "p", ": [2, 3, 4, 5, 6, 7, 8, 9]"),
    (3, "-(-request.todo //", "-(-request.kv_tokens //", "expected (True, [], 2)"),
    (3, "-(-request.todo // memory.size)", "request.todo // memory.size + 1",
     "for a prompt of 8 tokens, 4 to a page"),
    (3, "memory.free.extend(", "memory.free.extendleft(", "B's block table: (4, None), expected"),
    (3, "> len(memory.free):\n        return False", ">= len(memory.free):\n        return False",
     "(False, None, 3), expected (True, [], 3)"),
    (3, "    request.block_table = []\n", "    request.block_table = [memory.take() for _ in "
     "range(-(-request.todo // memory.size))]\n", "(True, [0, 1, 2], 0), expected (True, [], 3)"),
    (3, "(request.computed + n)", "(request.computed + n + 1)", "has computed 3 tokens, and is to "
     "compute 1 more"),
    (3, "(request.computed + n)", "len(request.tokens)", "has computed 0 tokens, and is to compute "
     "3 more"),
    (3, "last = running.pop()", "last = running.pop(running.index(request))",
     "False; running B; waiting A, C"),
    (3, "waiting.appendleft(last)", "waiting.append(last)", "waiting C, B; B has"),
    (3, "        last.computed = 0\n", "", "B has 4 computed and 1 generated, expected"),
    (3, "        free(memory, last)\n", "", "False; running none; waiting A, B, C"),
    (3, "    memory.free.extend(request.block_table)",
     "    memory.free.extend(request.block_table[:2])", "is lost: it is neither free nor in"),
    (3, "        last = running.pop()\n", """\
        while len(running) > 2 and running[-1] is not request:
            free(memory, running[-1])
            running[-1].computed = 0
            waiting.appendleft(running.pop())
        last = running.pop()\n""", " would do"),
    (3, "    request.block_table = None", "    pass", "[3, 4]), expected (5, None)"),
    (3, "        if last is request:\n            return False\n", "",
     "Who has just been preempted has no block table"),
    (3, "            return False\n    while len", "            return True\n    while len",
     "True; running A; waiting B, C"),
    (4, "request.tokens[:(i", "request.tokens[i * memory.size:(i", "what admit returns"),
    (4, "size < len(request", "size <= len(request", "its last one has to be computed"),
    (4, "if need > len(", "if len(request.tokens) > 20 or need > len(", "nothing goes on"),
    (4, "            memory.free.remove(page)\n", "            pass\n", "the free queue"),
    (4, "tuple(", "(lambda t: (len(t), *t[-4:]))(", "after another beginning"),
    (4, "tuple(", "(lambda t: tuple(t[-8:]))(", "after another beginning"),
    (4, "tuple(", "(lambda t: (t[0], len(t), *t[-4:]))(", "after another beginning"),
    (4, "tuple(", "(lambda t: tuple(sorted(t)))(", "in another order"),
    (4, "size < len(request.tokens):", "size <= min(len(request.tokens) - 1, len(request.prompt)):",
     "was preempted, and returns"),
    (4, " - sum(page in memory.free for page in found)", "", "is free no longer"),
    (4, """\
    while (len(found) + 1) * size < len(request.tokens):
        page = memory.find(tuple(request.tokens[:(len(found) + 1) * size]))
        if page is None:
            break
        found.append(page)
""", """\
    pages = (memory.find(tuple(request.tokens[:end]))
             for end in range(size, len(request.tokens), size))
    found = [page for page in pages if page is not None]
""", "the first and the second can no longer be found"),
    (4, "(request.computed + n) // memory.size):",
     "min(request.computed + n, len(request.prompt)) // memory.size):", "fill pages 1 and 2: "),
    (4, "    request.computed = len(found) * size\n", "", "(True, 0, [2, 3])"),
    (4, "reversed(request.block_table)", "request.block_table", "expected [2, 1, 0]"),
    (4, " and page in memory.cached", "", "nobody can find goes to its front"),
    (4, "memory.cached[request.block_table[i]] = key", "if memory.find(key) is None:\n"
     "            memory.cached[request.block_table[i]] = key",
     "All pages that can be found: [0, 1], expected [0, 1, 2]"),
    (4, "(request.computed + n) // memory.size)", "len(request.block_table))",
     "the free queue"),
]
