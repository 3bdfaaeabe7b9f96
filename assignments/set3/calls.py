"""Set 3: runs one function on a case, and returns what it gives and changes."""
import math

from probes import changes_of, facts_of, in_queue, plan_of, requests_of

import request
from scheduler import Scheduler


class Hooked(Scheduler):
    """
    What schedule asks. There is memory for `room` new tokens in a step. `admit` refuses those that
    are `refused` or too long for it; the others find `finds` tokens computed already.
    """

    def __init__(self, max_batch, token_budget, room=math.inf):
        super().__init__(max_batch, token_budget)
        self.room, self.asked = room, []

    def admit(self, request):
        self.asked.append(f"admit {request.name}")
        finds = getattr(request, "finds", 0)
        if getattr(request, "refused", False) or request.todo - finds > self.room:
            return False
        request.computed = finds
        return True

    def make_room(self, request, n):
        if n > 0:   # for nothing there is room
            self.asked.append(f"make_room {request.name} {n}")
        while n > self.room:
            victim = self.running[-1]
            self.running.remove(victim)
            self.waiting.appendleft(victim)
            self.room += 2   # of what it had
            if victim is request:
                return False
        self.room -= n
        return True


def schedule(step, running, waiting, **limits):
    queue = Hooked(**limits)

    def call(requests):
        try:
            return queue.schedule(step)
        except (NotImplementedError, RecursionError):   # are RuntimeErrors, too
            raise
        except RuntimeError as error:
            return "a RuntimeError that names " + (" and ".join(
                each.name for each in requests if str(each) in str(error)) or f"nobody ({error})")

    found = in_queue(queue, running, waiting, call)
    return {**found, "in turn it calls": queue.asked, "token_budget": queue.token_budget}


def run(requests, **limits):
    """The plan of each step until all have finished. Each finishes with its last token."""
    queue, plans = Hooked(**limits), {}
    queue.waiting.extend(requests_of(requests))
    for step in range(200):
        if not queue.waiting and not queue.running:
            return plans
        plans[f"the plan of step {step}"] = queue.schedule(step)
        for each, n in plans[f"the plan of step {step}"]:
            each.computed += n
            each.generated += [1] * int(each.todo == 0)
        queue.running = [each for each in queue.running if not (
            each.generated and each.is_last(len(each.generated)))]
    return "it does not end"


def admit(max_kv_tokens, running, waiting, times=1):
    """times: so often the first is admitted, after those that ran have left."""
    queue, found = Scheduler(40, 64, max_kv_tokens), []
    for _ in range(times):
        found.append(in_queue(queue, running, waiting, lambda _: queue.admit(queue.waiting[0])))
    return found[0] if times == 1 else found


def release(running, waiting):
    queue, freed = Scheduler(40, 64), []
    free = queue.free
    queue.free = lambda each: freed.append(each.name) or free(each)
    found = in_queue(queue, running, waiting, lambda _: queue.release())
    return {**found, "free is called for": sorted(freed)}


def advance(plan, tokens):
    pairs, given = plan_of(plan), list(tokens)
    requests, copy = [each for each, _ in pairs], list(pairs)
    before = facts_of(requests)
    return {"it returns": request.advance(pairs, given), **changes_of(requests, before),
            "plan and tokens are unchanged": (pairs, given) == (copy, tokens)}
