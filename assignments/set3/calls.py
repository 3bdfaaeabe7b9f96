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
            return f"a RuntimeError that names {named_in(error, requests)}"

    changes = in_queue(queue, running, waiting, call)
    return {**changes, "in turn it calls": queue.asked, "token_budget": queue.token_budget}


def named_in(error, requests):
    """The requests whose names are in an error's message, in words."""
    names = [request.name for request in requests if str(request) in str(error)]
    return " and ".join(names) or f"nobody ({error})"


def run(requests, **limits):
    """The plan of each step until all have finished. Each finishes with its last token."""
    queue = Hooked(**limits)
    queue.waiting.extend(requests_of(requests))
    plans = {}
    for step in range(200):
        if not queue.waiting and not queue.running:
            return plans
        plan = queue.schedule(step)
        plans[f"the plan of step {step}"] = plan
        for one, n in plan:
            compute(one, n)
        queue.running = [one for one in queue.running if not has_its_last(one)]
    return "it does not end"


def compute(one, n):
    """A pass for n of a request's tokens, without a model."""
    one.computed += n
    if one.todo == 0:
        one.generated += [1]


def has_its_last(one):
    number = len(one.generated)
    return number > 0 and one.is_last(number)


def admit(max_kv_tokens, running, waiting, times=1):
    """times: so often the first is admitted, after those that ran have left."""
    queue = Scheduler(40, 64, max_kv_tokens)

    def call(requests):
        return queue.admit(queue.waiting[0])

    changes = [in_queue(queue, running, waiting, call) for _ in range(times)]
    return changes[0] if times == 1 else changes


def release(running, waiting):
    queue = Scheduler(40, 64)
    original_free = queue.free
    freed = []

    def noted_free(request):
        freed.append(request.name)
        return original_free(request)

    queue.free = noted_free
    changes = in_queue(queue, running, waiting, lambda _: queue.release())
    return {**changes, "free is called for": sorted(freed)}


def advance(plan, tokens):
    pairs = plan_of(plan)
    pairs_before = list(pairs)
    new_tokens = list(tokens)
    requests = [one for one, _ in pairs]
    facts_before = facts_of(requests)
    returned = request.advance(pairs, new_tokens)
    return {
        "it returns": returned,
        **changes_of(requests, facts_before),
        "plan and tokens are unchanged": pairs == pairs_before and new_tokens == tokens,
    }
