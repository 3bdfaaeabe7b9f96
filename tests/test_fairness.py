"""beyond/fairness.py: policies, and bounds on what they may cost a request."""
from collections import Counter
from dataclasses import replace

import pytest
from common import examples, run, smallest_pool, workloads
from hypothesis import given, settings
from hypothesis import strategies as st

from beyond.fairness import MAX_OVERTAKEN, POLICIES, FairScheduler
from request import Request

SHORT = dict.fromkeys("abcd", (1, 1))   # requests with a prompt of 1 and an answer of 1


def asked(*rows):
    """No prompt begins like another: nothing is shared, but by a request that was preempted."""
    return [Request([i] * prompt, new, name=name, priority=priority, arrival=arrival)
            for i, (name, prompt, new, priority, arrival) in enumerate(rows)]


FIVE = asked(("A", 6, 1, 2, 0), ("B", 3, 1, 1, 0), ("C", 5, 3, 0, 0), ("D", 3, 1, 1, 0),
             ("E", 1, 1, 0, 1))   # E arrives at step 1


@pytest.mark.parametrize("limits, pages, policy, bound, requests, cancel, expected", [
    # policies are sort keys
    ((1, 64), (64, 1), "fcfs", 16, FIVE, [], ["A6", "B3", "C5", "C1", "C1", "D3", "E1"]),
    ((1, 64), (64, 1), "sjf", 16, FIVE, [], ["B3", "E1", "D3", "A6", "C5"]),
    ((1, 64), (64, 1), "priority", 16, FIVE, [], ["C5", "C1", "C1", "E1", "B3", "D3", "A6"]),
    # a grows, and c makes room; then b, which is urgent, though the last to arrive; and a does
    ((8, 64), (3, 4), "priority", 16,
     asked(("a", 3, 9, 1, 0), ("c", 3, 9, 1, 0), ("b", 3, 9, 0, 1)), [],
     ["a3 c3", "a1 c1 b3", "b1 a1", "b1"]),
    # a grows, and makes room itself
    ((2, 64), (3, 2), "priority", 16, asked(("a", 2, 3, 1, 0), ("b", 3, 3, 0, 0)), [],
     ["b3 a2", "b1", "b1", "a3", "a1"]),
    # a job's rank does not change: J, by then a short one, makes room for K, and waits behind L
    ((8, 64), (10, 1), "sjf", 16, asked(("J", 2, 9, 0, 0), ("K", 2, 7, 0, 3), ("L", 4, 6, 0, 5)),
     [], ["J2", "J1", "J1", "J1 K2", "K1 J1", "K1 L4"]),
    # the example of the docstring
    ((1, 64), (64, 16), "sjf", 3, {"L": (20, 1), **SHORT}, [], ["a1", "b1", "c1", "L20", "d1"]),
    # a request that was cancelled while it waited has overtaken no other, and is never due
    ((1, 64), (64, 16), "sjf", 3, {"L": (20, 1), **SHORT, "e": (1, 1)}, [(0, 4), (0, 5)],
     ["a1", "b1", "c1", "L20"]),
    ((1, 64), (64, 16), "sjf", 1, {"L": (20, 1), **SHORT}, [(0, 0)], ["a1", "b1", "c1", "d1"]),
    # no stream of short prompts stops a longer one in the middle: each takes what L leaves
    ((3, 4), (64, 4), "sjf", 16,
     asked(("a", 2, 2, 0, 0), ("L", 4, 9, 0, 0), *((f"s{i}-", 3, 2, 0, i) for i in (1, 2))), [],
     ["a2 L2", "a1 L2 s1-1", "L1 s1-2 s2-1"])])
def test_plans(limits, pages, policy, bound, requests, cancel, expected):
    scheduler = FairScheduler(*limits, *pages, policy, bound)
    requests = requests if isinstance(requests, dict) else [*map(replace, requests)]
    assert run(scheduler, requests, cancel=cancel)[:len(expected)] == expected


@settings(max_examples=examples(400))
@given(case=workloads(), bound=st.sampled_from([0, 1, 2, MAX_OVERTAKEN]),
       policy=st.sampled_from(list(POLICIES)), more=st.integers(0, 20),
       cancel=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=2))
def test_no_request_starves(case, bound, policy, more, cancel):
    """
    None is overtaken or preempted more often than the bound says, from the smallest pool up, and
    all are done within as many steps as that allows. (Every step computes something: see `run`.)
    What makes room is the last in rank, by the rank with which it was admitted.
    """
    requests, pressure = case
    size, admitted, preempted, rank = pressure["page_size"], [], Counter(), {}

    class Noting(FairScheduler):
        def preempt(self, request):
            assert self.rank[request] == max(rank[other.name] for other in self.running)
            preempted[request.name] += 1
            super().preempt(request)

        def grant_room(self, request):
            rank[request.name], n = self.rank[request], number[request.name]
            granted = super().grant_room(request)
            if granted and request.name not in admitted:
                assert sum(number[other] > n for other in admitted) <= bound
                assert len(admitted) <= n + bound
                admitted.append(request.name)
            return granted

        def release(self):
            assert all(self.rank[request] == rank[request.name] for request in self.running)
            super().release()

    pages = smallest_pool(requests, size) + more
    scheduler = Noting(pressure["max_batch"], pressure["token_budget"], pages, size, policy, bound)
    number = {r.name: n for n, r in enumerate(sorted(requests, key=lambda r: r.arrival))}
    plans = run(scheduler, [*map(replace, requests)], lambda request: len(request.generated) % 2,
                cancel)
    assert len(plans) <= (bound + 1) * sum(len(r.prompt) + r.max_new_tokens for r in requests)
    assert max(preempted.values(), default=0) <= bound
    assert len(scheduler.pages.free_queue) == pages
    left = {*scheduler.rank, *scheduler.times_preempted, *scheduler.new}
    assert all(r.finish_reason == "cancelled" and r in scheduler.new for r in left)
