"""Set 3: runs one function on a case, and returns what it gives and changes."""
from kit.probes import changes_of, facts_of, in_queue, plan_of

import request
from scheduler import Scheduler


def share_budget(token_budget, running):
    queue = Scheduler(40, token_budget)
    return in_queue(queue, running, [], lambda _: queue.share_budget())


def admit(step, running, waiting, **limits):
    queue = Scheduler(**limits)
    return in_queue(queue, running, waiting, lambda _: queue.admit(step))


def grant_room(max_kv_tokens, running, newcomer):
    queue = Scheduler(40, 64, max_kv_tokens)
    return in_queue(queue, running, [newcomer], lambda all: queue.grant_room(all[-1]))


def release(running):
    queue, freed = Scheduler(40, 64), []
    free = queue.free
    queue.free = lambda each: freed.append(each.name) or free(each)
    found = in_queue(queue, running, [], lambda _: queue.release())
    return {**found, "free is called for": sorted(freed)}


def advance(plan, tokens):
    pairs, given = plan_of(plan), list(tokens)
    requests, copy = [each for each, _ in pairs], list(pairs)
    before = facts_of(requests)
    return {"it returns": request.advance(pairs, given), **changes_of(requests, before),
            "plan and tokens are unchanged": (pairs, given) == (copy, tokens)}
