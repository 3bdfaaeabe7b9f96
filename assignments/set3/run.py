"""Set 3: runs one function on a case, and returns what it gives and changes."""
from collections import deque

import request
from cache import KV
from lab.checks.probes import cache_of, plan_of, requests_of
from scheduler import Scheduler


def queue_of(running, waiting, max_batch=40, token_budget=64, max_kv_tokens=None):
    queue = Scheduler(max_batch, token_budget, max_kv_tokens)
    everybody = requests_of(running + waiting)
    queue.running, queue.waiting = everybody[:len(running)], deque(everybody[len(running):])
    for each in queue.running:
        each.kv = KV(each.kv_tokens)
    return queue, everybody


def state_of(queue, everybody):
    return {"running": queue.running, "waiting": queue.waiting,
            "caches": {each.name: cache_of(each) for each in everybody}}


def share_budget(token_budget, running):
    queue, everybody = queue_of(running, [], token_budget=token_budget)
    todo = [each.todo for each in everybody]
    plan = queue.share_budget()
    unchanged = queue.running == everybody and todo == [each.todo for each in everybody]
    return plan if unchanged else "it changes `running` or a request"


def admit(step, running, waiting, **limits):
    queue, everybody = queue_of(running, waiting, **limits)
    return {"it returns": queue.admit(step), **state_of(queue, everybody)}


def grant_room(max_kv_tokens, running, newcomer):
    queue, everybody = queue_of(running, [newcomer], max_kv_tokens=max_kv_tokens)
    return {"it returns": queue.grant_room(everybody[-1]), **state_of(queue, everybody)}


def advance(plan, tokens):
    pairs, given = plan_of(plan), list(tokens)
    before = list(pairs)
    returned = request.advance(pairs, given)
    unchanged = (pairs, given) == (before, tokens)
    return {"it returns": returned, "plan and tokens are unchanged": unchanged,
            **{each.name: {"computed": each.computed, "generated": each.generated,
                           "finish_reason": each.finish_reason or "none"} for each, _ in before}}


def release(running):
    queue, everybody = queue_of(running, [])
    freed, free = [], queue.free

    def noting(each):
        freed.append(f"{each.name}, cache {cache_of(each)}")
        free(each)

    queue.free = noting
    returned = queue.release()
    return {"it returns": returned, "free is called for": sorted(freed),
            **state_of(queue, everybody)}
