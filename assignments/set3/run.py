"""Set 3: runs one function on a case, and returns what it gives and changes."""
from collections import deque

import request
from cache import KV
from lab.checks.probes import plan_of, requests_of
from scheduler import Scheduler


def share_budget(token_budget, running):
    queue = Scheduler(40, token_budget)
    queue.running = requests_of(running)
    before, todo = list(queue.running), [each.todo for each in queue.running]
    plan = queue.share_budget()
    untouched = queue.running == before and todo == [each.todo for each in before]
    return plan if untouched else {"the plan": plan, "running and todo afterwards": [
        queue.running, [each.todo for each in before]]}


def queue_of(max_batch, token_budget, max_kv_tokens, running, waiting):
    queue = Scheduler(max_batch, token_budget, max_kv_tokens)
    everybody = requests_of(running + waiting)
    queue.running = everybody[:len(running)]
    queue.waiting = deque(everybody[len(running):])
    for each in queue.running:
        each.kv = KV(each.kv_tokens)
    return queue, everybody


def admit(step, running, waiting, max_batch=8, token_budget=64, max_kv_tokens=None):
    queue, everybody = queue_of(max_batch, token_budget, max_kv_tokens, running, waiting)
    returned = queue.admit(step)
    return {"it returns": returned, "running": queue.running, "waiting": queue.waiting,
            "caches": {each.name: cache_of(each) for each in everybody}}


def grant_room(max_kv_tokens, running, newcomer):
    queue, everybody = queue_of(8, 64, max_kv_tokens, running, [newcomer])
    granted = queue.grant_room(everybody[-1])
    return {"it returns": granted, "the newcomer's cache": cache_of(everybody[-1]),
            "running": queue.running}


def cache_of(each):
    return each.kv.capacity if isinstance(each.kv, KV) else "none" if each.kv is None else each.kv


def advance(plan, tokens):
    pairs, given = plan_of(plan), list(tokens)
    before = list(pairs)
    returned = request.advance(pairs, given)
    return {"it returns": returned, "plan and tokens unchanged": pairs == before and given == tokens,
            **{each.name: {"computed": each.computed, "generated": each.generated,
                           "finish_reason": each.finish_reason or "none"} for each, _ in before}}


def release(running):
    queue, everybody = queue_of(8, 64, None, running, [])
    freed, free = [], queue.free
    queue.free = lambda each: (freed.append(each.name), free(each))
    returned = queue.release()
    return {"it returns": returned, "running": queue.running, "free was called for": sorted(freed),
            "caches": {each.name: cache_of(each) for each in everybody}}
