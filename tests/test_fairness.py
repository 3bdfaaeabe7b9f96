"""beyond/fairness.py: policies, and bounds on what they may cost a request."""
from collections import Counter
from dataclasses import replace

import common
import pytest
from common import cancel_now, examples, queue, run
from hypothesis import given, settings
from hypothesis import strategies as st
from test_paging import WatchedFair, streams

from beyond.fairness import MAX_OVERTAKEN, POLICIES, FairScheduler
from paging import Pages
from request import Request

POLICY = st.sampled_from(list(POLICIES))


# --- policies -------------------------------------------------------------------------------------

@pytest.mark.parametrize("policy, expected", [
    ("fcfs", "ABCDE"), ("sjf", "BEDCA"), ("priority", "CEBDA"),
])
def test_policies_are_sort_keys(policy, expected):
    scheduler = WatchedFair(1, 64, Pages(64, 1), policy)
    queue(scheduler, [Request([0] * n, 1, name=name, priority=priority, arrival=arrival)
                      for name, n, priority, arrival in [("A", 9, 2, 0), ("B", 3, 1, 0),
                                                         ("C", 5, 0, 0), ("D", 3, 1, 0),
                                                         ("E", 1, 0, 1)]])
    assert "".join(plan[0] for plan in run(scheduler)) == expected


def test_the_victim_is_the_last_in_rank_and_may_be_the_one_that_grows():
    scheduler = WatchedFair(8, 64, Pages(3, 4), "priority", share_prefixes=False)
    queue(scheduler, [Request([0] * 3, 9, name=name, priority=priority, arrival=arrival)
                      for name, priority, arrival in [("a", 1, 0), ("c", 1, 0), ("b", 0, 1)]])
    # a grows, and c makes room; then b, which is urgent, though the last to arrive; and a does
    assert run(scheduler)[:4] == ["a3 c3", "a1 c1 b3", "b1 a1", "b1"]
    scheduler = WatchedFair(2, 64, Pages(3, 2), "priority", share_prefixes=False)
    queue(scheduler, [Request([0] * 2, 3, name="a", priority=1), Request([0] * 3, 3, name="b")])
    assert run(scheduler) == ["b3 a2", "b1", "b1", "a3", "a1"]   # a grows, and makes room itself


# --- the bound: no request starves ----------------------------------------------------------------

def test_the_example_of_the_docstring():
    scheduler = WatchedFair(1, 64, Pages(64, 16), "sjf", share_prefixes=False, bound=3)
    queue(scheduler, [Request([0] * 20, 1, name="L"),
                      *(Request([0] * 9, 1, name=name) for name in "abcd")])
    assert run(scheduler) == ["a9", "b9", "c9", "L20", "d9"]


def test_no_stream_of_short_prompts_stops_a_longer_one_in_the_middle():
    """One arrives every step; with the decode of the one before it, it could take all four."""
    scheduler = WatchedFair(3, 4, Pages(64, 4), "sjf")
    queue(scheduler, [Request([1, 2], 2, name="a"), Request([3] * 4, 9, name="L"),
                      *(Request([4, 5, i % 9], 2, name=f"s{i}-", arrival=i) for i in range(1, 9))])
    assert run(scheduler)[:3] == ["a2 L2", "a1 L2 s1-1", "L1 s1-2 s2-1"]


def test_a_request_that_was_cancelled_while_it_waited_has_overtaken_no_other():
    scheduler = WatchedFair(1, 64, Pages(64, 1), "sjf", bound=3)
    _, *others = queue(scheduler, [Request([0] * 9, 1, name="L"),
                                   *(Request([0], 1, name=name) for name in "abcdefg")])
    for request in others[3:]:
        cancel_now(scheduler, request)
    assert run(scheduler) == ["a1", "b1", "c1", "L8"]   # its first page is shared
    assert not scheduler.line or all(request.finished for request in scheduler.line)


def test_the_oldest_that_was_cancelled_while_it_waited_is_never_due():
    scheduler = WatchedFair(1, 64, Pages(64, 1), "sjf", bound=1)
    oldest, *_ = queue(scheduler, [Request([0] * 9, 1, name="L"),
                                   *(Request([0], 1, name=name) for name in "abcd")])
    cancel_now(scheduler, oldest)
    assert run(scheduler) == ["a1", "b1", "c1", "d1"]


@settings(max_examples=examples(400))
@given(data=st.data(), requests=streams(), bound=st.sampled_from([0, 1, 2, MAX_OVERTAKEN]),
       size=st.integers(1, 6), policy=POLICY, max_batch=st.integers(1, 8),
       budget=st.integers(1, 30), share=st.booleans())
def test_no_live_lock_from_the_smallest_pool_up(data, requests, bound, size, policy, max_batch,
                                                budget, share):
    """
    Every step computes something, no request is overtaken or preempted more often than the bound
    says, and all are done within as many steps as that allows.
    """
    need = common.smallest_pool(requests, size, block_size=64)
    pages = Pages(need + data.draw(st.integers(0, need)), size)
    admitted, preempted = [], Counter()

    class Noting(WatchedFair):
        def preempt(self, request):
            preempted[request] += 1
            super().preempt(request)

        def grant_room(self, request):
            granted = super().grant_room(request)
            if granted and request not in admitted:
                n = number[request]
                assert sum(number[other] > n for other in admitted) <= bound
                assert len(admitted) <= n + bound
                admitted.append(request)
            return granted

    scheduler = Noting(max_batch, budget, pages, policy, share, bound)
    mine = queue(scheduler, [replace(request) for request in requests])
    number = {request: n for n, request in enumerate(mine)}
    plans = run(scheduler, token=lambda request: len(request.generated) % 2)
    assert len(plans) <= (bound + 1) * sum(len(r.prompt) + r.max_new_tokens for r in requests)
    assert max(preempted.values(), default=0) <= bound
    assert len(pages.free) == pages.number


@pytest.mark.parametrize("bound, most", [(10**9, 5), (1, 1), (0, 0)])
def test_no_request_is_preempted_without_end(bound, most):
    """All arrive together, so that none is overtaken: what counts here is preemption alone."""
    sizes = [(3, 20), (3, 3), (4, 5), (3, 9), (4, 20), (2, 12), (5, 19)]
    scheduler, times = WatchedFair(8, 64, Pages(30, 1), "fcfs", False, bound), Counter()
    scheduler.preempt = lambda request: (times.update([request.name]),
                                         FairScheduler.preempt(scheduler, request))
    queue(scheduler, [Request([0] * prompt, new) for prompt, new in sizes])
    run(scheduler)
    assert max(times.values(), default=0) == most
