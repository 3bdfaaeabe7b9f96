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
    (1, "min(request.todo, left)", "np.int64(min(request.todo, left))"),
    (2, "return tokens,", "tokens = torch.tensor(tokens)\n    return tokens,"),
    (2, "return finished", "return {*finished}"),
    (2, "head(q[:, a:b], keys, values)", """torch.nn.functional.scaled_dot_product_attention(
            q[:, a:b], keys, values,
            attn_mask=torch.ones(n, keys.size(1)).bool().tril(request.computed))"""),
    (3, "range(start, end)", "torch.arange(start, end)"),
    (4, "tuple(", "str("),
]

WRONG = [   # step, old, new, what the judge says
    (1, "len(running) < max_batch", "len(running) < 1", "waits, although 1 of 8 requests run"),
    (1, " and len(running) < max_batch", "", "3 requests run, at most 2 may"),
    (1, "todo >= token_budget or ", "", "is admitted, although those before it have 18"),
    (1, " or not grant(waiting[0])", "", "grant has not returned True"),
    (1, "todo >= token_budget or not grant(waiting[0])",
     "not grant(waiting[0]) or todo >= token_budget", "waits, though grant has returned True"),
    (1, "waiting.popleft()", "waiting[0]", "request 'A' is 4 times in waiting and running"),
    (1, "running.append(waiting.popleft())", "continue", "it does not end"),
    (1, "            break\n        running.append(waiting.popleft())", """\
            for late in [r for r in list(waiting)[1:2] if todo < token_budget
                         and r.arrival <= step and grant(r)]:
                waiting.remove(late)
                running.append(late)
            break
        running.append(waiting.popleft())""", "not in order of arrival"),
    (1, "request.todo == 1]", "request.todo == 1][:1]", "'B' decodes and gets 0 tokens"),
    (1, "token_budget - len(plan)", "token_budget", "the plan has 9 tokens, the budget is 8"),
    (1, "left > 0", "left >= request.todo", "gets 0 tokens of the budget, not 7"),
    (2, "cu_seqlens.append(len(tokens))", "cu_seqlens.append(n)", "cu_seqlens: [0, 1, 3, 5]"),
    (2, "if n == request.todo", "if n > 0", "due: [0, 1, 2], expected [0, 2]"),
    (2, "layer, request.computed, k", "layer, 0, k", "does not hold the keys and values"),
    (2, "request.kv.write(layer, request.computed, k[:, a:b], v[:, a:b])", "request.kv.write("
     "layer, request.computed, k[:, a:b], v[:, a:b]) if layer == 0 or a == 0 else "
     "request.kv.write(layer, 0, k[:, a:b], v[:, a:b])", "empty key slot"),
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
    (2, "head(q[:, a:b], keys, values)", "head(torch.cat((keys[:, n:], q[:, a:b]), 1), keys, "
     "values)[:, -n:]", "so do not hide, skip"),
    (3, "request.block_table[p // size] * size + p % size", "p", ": [2, 3, 4, 5, 6, 7, 8, 9]"),
    (3, "-(-request.todo //", "-(-request.kv_tokens //", "expected (True, [0, 1], 1)"),
    (3, "-(-request.todo // memory.size)", "request.todo // memory.size + 1",
     "for a prompt of 8 tokens, 4 to a page"),
    (3, "memory.free.extend(", "memory.free.extendleft(", "B's block table: (1, None), expected"),
    (3, "need > len(", "need >= len(", "(False, None, 3), expected (True, [0, 1, 2], 0)"),
    (3, "* memory.size < len(request.tokens)", "* memory.size <= len(request.tokens)",
     "has 3 pages for 8 tokens, 4 to a page: not 2"),
    (3, "running.pop()", "running.pop(running.index(request))", "grow: running B; waiting A, C"),
    (3, "waiting.appendleft(last)", "waiting.append(last)", "waiting C, B; B has"),
    (3, "                last.computed = 0\n", "", "B has 3 computed and 1 generated, expected"),
    (3, "                free(memory, last)\n", "",
     "running none; waiting A, B, C"),
    (3, "    memory.free.extend(request.block_table)",
     "    memory.free.extend(request.block_table[:2])", "is lost: it is neither free nor in"),
    (3, "                last = running.pop()\n", """\
                while len(running) > 2:
                    free(memory, running[-1])
                    running[-1].computed = 0
                    waiting.appendleft(running.pop())
                last = running.pop()\n""", "forward passes, and 27 would do"),
    (3, "    request.block_table = None", "    pass", "[0, 1]), expected (2, None)"),
    (3, "while request in running and", "if", "line 16, if len(request.block_table)"),
    (3, "while request in running and", "while", "preempted in this loop has no block table"),
    (4, "request.tokens[:(i", "request.tokens[i * memory.size:(i", "what grant returns"),
    (4, "size < len(request", "size <= len(request", "its last one has to be computed"),
    (4, "if need > len(", "if len(request.tokens) > 20 or need > len(", "nothing goes on"),
    (4, """\
    for page in found:
        if memory.ref_count[page] == 0:
            memory.free.remove(page)
        memory.ref_count[page] += 1
    request.block_table = found + [memory.take() for _ in range(need)]
""", """\
    request.block_table = found + [memory.take() for _ in range(need)]
    for page in found:
        if page in memory.free:
            memory.free.remove(page)
        memory.ref_count[page] += 1
""", "must not be taken for its other tokens"),
    (4, "tuple(", "(lambda t: (len(t), *t[-4:]))(", "after another beginning"),
    (4, "tuple(", "(lambda t: tuple(t[-8:]))(", "after another beginning"),
    (4, "tuple(", "(lambda t: (t[0], len(t), *t[-4:]))(", "after another beginning"),
    (4, "tuple(", "(lambda t: tuple(sorted(t)))(", "in another order"),
    (4, "size < len(request.tokens):", "size <= min(len(request.tokens) - 1, len(request.prompt)):",
     "was preempted, and returns"),
    (4, " - sum(page in memory.free for page in found)", "", "is free no longer"),
    (4, """\
    while (len(found) + 1) * size < len(request.tokens):
        page = memory.cached.get(tuple(request.tokens[:(len(found) + 1) * size]))
        if page is None:
            break
        found.append(page)
""", """\
    pages = (memory.cached.get(tuple(request.tokens[:end]))
             for end in range(size, len(request.tokens), size))
    found = [page for page in pages if page is not None]
""", "the first and the second can no longer be found"),
    (4, "(request.computed + n) // memory.size):",
     "min(request.computed + n, len(request.prompt)) // memory.size):", "fill pages 1 and 2: "),
    (4, "    request.computed = len(found) * size\n", "", "(True, 0, [])"),
    (4, "reversed(request.block_table)", "request.block_table", "[0, 1, 2], expected [2, 1, 0]"),
    (4, "memory.cached.setdefault(key, request.block_table[i])",
     "memory.cached[key] = request.block_table[i]", "the pages in memory.cached: [2, 3, 4, 5]"),
    (4, "(request.computed + n) // memory.size)", "len(request.block_table))", "computed 5 of 9"),
]
