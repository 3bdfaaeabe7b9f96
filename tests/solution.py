"""
An engine for the last notebook, one of many that are right: tests/test_notebooks.py hands it in. The
notebook shows none of it. WRONG has mistakes as edits: [old, new, what the judge says].
"""
import torch

from model import head


def admit(waiting, running, step, max_batch, token_budget, grant):
    todo = sum(request.todo for request in running)
    while waiting and waiting[0].arrival <= step and len(running) < max_batch:
        if todo >= token_budget or not grant(waiting[0]):
            break
        running.append(waiting.popleft())
        todo += running[-1].todo


def share_budget(running, token_budget):
    plan = [(request, 1) for request in running if request.todo == 1]
    left = token_budget - len(plan)
    for request in running:
        if request.todo > 1 and left > 0:
            plan.append((request, min(request.todo, left)))
            left -= plan[-1][1]
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
    out = []
    for i, (request, n) in enumerate(plan):
        a, b = cu_seqlens[i], cu_seqlens[i + 1]
        request.kv.write(layer, request.computed, k[:, a:b], v[:, a:b])
        keys, values = request.kv.read(layer, request.computed + n)
        out.append(head(q[:, a:b], keys, values))
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


def grant(memory, request):
    need = -(-request.todo // memory.size)
    if need > len(memory.free):
        return False
    request.block_table = [memory.take() for _ in range(need)]
    return True


def grow(memory, running, waiting):
    for request in list(running):
        while request in running and len(request.block_table) * memory.size < len(request.tokens):
            if memory.free:
                request.block_table.append(memory.take())
            else:
                last = running.pop()
                free(memory, last)
                last.computed = 0
                waiting.appendleft(last)


def free(memory, request):
    memory.free.extend(request.block_table)
    request.block_table = None


# --- step 4: these take the places of the two above ---

def grant_shared(memory, request):
    size, found = memory.size, []
    while (len(found) + 1) * size < len(request.tokens):
        page = memory.cached.get(tuple(request.tokens[:(len(found) + 1) * size]))
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
    request.block_table = found + [memory.take() for _ in range(need)]
    request.computed = len(found) * size
    return True


def keep(memory, plan):
    for request, n in plan:
        for i in range(request.computed // memory.size, (request.computed + n) // memory.size):
            key = tuple(request.tokens[:(i + 1) * memory.size])
            memory.cached.setdefault(key, request.block_table[i])


def free_shared(memory, request):
    for page in reversed(request.block_table):
        memory.ref_count[page] -= 1
        if memory.ref_count[page] == 0:
            memory.free.append(page)
    request.block_table = None
