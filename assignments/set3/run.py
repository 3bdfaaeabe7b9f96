"""Set 3: runs one function on a case, and returns what it gives and changes."""
from kit.probes import changes_of, facts_of, in_queue, plan_of

import request
from scheduler import Scheduler


class Short(Scheduler):
    """Its memory has room for so many new tokens in a step. None: for all."""
    room, given = None, ()

    def make_room(self, request, n):
        if n > 0:   # who asks for nothing gets it
            self.given = [*self.given, [request.name, n]]
        while self.room is not None and n > self.room:
            victim = self.running[-1]
            self.running.remove(victim)
            self.waiting.appendleft(victim)
            self.room += 2   # of what it had
            if victim is request:
                return False
        if self.room is not None:
            self.room -= n
        return True


def schedule(step, running, waiting, room=None, **limits):
    queue = Short(**limits)
    queue.room = room

    def call(requests):
        try:
            return queue.schedule(step)
        except RuntimeError as error:
            if type(error) is not RuntimeError:   # NotImplementedError is one, too
                raise
            return "a RuntimeError that names " + (" and ".join(
                each.name for each in requests if str(each) in str(error)) or "nobody")

    found = in_queue(queue, running, waiting, call)
    return {**found, "make_room is called for": [*queue.given]}


def admit(max_kv_tokens, running, newcomer):
    queue = Scheduler(40, 64, max_kv_tokens)
    return in_queue(queue, running, [newcomer], lambda all: queue.admit(all[-1]))


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
