"""
Stage 7: pages, sharing, growth, preemption and policies. Outputs never change, only waiting times.
"""
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from unittest.mock import patch

import pytest
import torch
from common import BLOCK_SIZE, STAGES, VOCAB, Engine, alone, assert_contract, smallest_pool, toy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

import generate_paged
import paging
from cache import KV
from generate_paged import Paged
from model import GPTConfig, causal
from paging import MAX_OVERTAKEN, POLICIES, PagedScheduler, Pages
from request import Request, prepare
from scheduler import Scheduler

MODEL = toy()
CONFIG = GPTConfig(block_size=64, vocab_size=10, n_layer=1, n_head=1, n_embd=2)
PAGED = STAGES["paged"]
THOROUGH = dict(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


# --- the books: what must hold of every pool at every moment --------------------------------------

def assert_books(scheduler):
    """Each page is free, held or kept, exactly once, and all tables and names agree with that."""
    pages, running = scheduler.pages, scheduler.running
    held = Counter(page for request in running for page in request.kv)
    assert [held[page] for page in range(pages.number)] == pages.holders
    assert sorted([*pages.free, *held, *pages.kept]) == list(range(pages.number))
    assert all(len(set(request.kv)) == len(request.kv) for request in running)
    assert all(request.kv is None and request.computed == 0 for request in scheduler.waiting)
    assert {page: prefix for prefix, page in pages.published.items()} == pages.prefix_of
    assert len(pages.published) == len(pages.prefix_of)
    assert pages.kept.keys() <= pages.prefix_of.keys() <= {*held, *pages.kept}
    numbers = [scheduler.number_of[request] for request in scheduler.waiting]
    assert numbers == sorted(numbers)
    for request in running:   # each page of a table that is published is so under its own tokens
        for i, page in enumerate(request.kv):
            prefix = tuple(request.slice(0, (i + 1) * pages.size))
            assert pages.prefix_of.get(page, prefix) == prefix


def assert_tables(scheduler):
    """After `schedule`: pages for the tokens that a request has; a due one has all it can need."""
    for request in scheduler.running:
        tokens = request.kv_tokens if request in scheduler.due else len(request.tokens)
        assert len(request.kv) == scheduler.pages.needed(tokens)


def assert_writes(pages, batch):
    """The pass writes each new token to its own slot, in pages that no other request can read."""
    size = pages.size
    slots = [request.kv[p // size] * size + p % size for request, n in batch.plan
             for p in range(request.computed, request.computed + n)]
    assert batch.slot_mapping.tolist() == slots and len(set(slots)) == len(slots)
    for page in {slot // size for slot in slots}:
        assert pages.holders[page] == 1 and page not in pages.prefix_of
    buffers = [*batch.pool.k.values(), *batch.pool.v.values()]
    assert {buffer.size(-2) for buffer in buffers} <= {batch.pool.capacity}
    assert batch.pool.capacity == pages.number * size


@contextmanager
def watched():
    """All of the above, at every step of `generate`. Yields the schedulers that were made."""
    made = []

    class WatchedScheduler(PagedScheduler):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

        def schedule(self, step):
            plan = super().schedule(step)
            assert not any(request.finished for request, _ in plan)
            assert_books(self)
            assert_tables(self)
            return plan

        def update(self, plan, tokens):
            super().update(plan, tokens)
            assert_books(self)

    class WatchedLayout(Paged):
        def lay_out(self, device):
            super().lay_out(device)
            assert_writes(made[-1].pages, self)

    with (patch.object(generate_paged, "PagedScheduler", WatchedScheduler),
          patch.object(generate_paged, "Paged", WatchedLayout)):
        yield made
    assert made[-1].running == [] and not any(made[-1].pages.holders)


# --- the contract, with all knobs -----------------------------------------------------------------

@st.composite
def pressed(draw):
    """Requests with common prefixes, and a pool from the smallest legal one up."""
    size, token = draw(st.integers(1, 5)), st.integers(0, VOCAB - 1)
    stems = draw(st.lists(st.lists(token, min_size=1, max_size=14), min_size=1, max_size=2))
    requests = []
    for i in range(draw(st.integers(1, 7))):
        prompt = draw(st.sampled_from(stems)) + draw(st.lists(token, max_size=8))
        requests.append(Request(prompt[:BLOCK_SIZE], draw(st.integers(1, 14)),
                                draw(st.sampled_from([0.0, 1.0])), seed=i, name=f"r{i}",
                                priority=draw(st.integers(0, 2)),
                                arrival=draw(st.integers(0, 9))))
    index, need = st.integers(0, len(requests) - 1), smallest_pool(requests, size)
    cancels = draw(st.lists(st.tuples(index, index, st.integers(0, 3)), max_size=2))
    pages = st.one_of(st.none(), st.just(need), st.integers(need, 2 * need))
    knobs = dict(max_batch=draw(st.integers(1, 6)), token_budget=draw(st.integers(1, 30)),
                 pages=draw(pages), page_size=size,
                 policy=draw(st.sampled_from(list(POLICIES))),
                 share_prefixes=draw(st.booleans()))
    return requests, cancels, knobs


@settings(max_examples=300, **THOROUGH)
@given(workload=pressed())
def test_contract(workload):
    requests, cancels, knobs = workload
    requests = [replace(request) for request in requests]
    with watched() as made:
        trace = assert_contract(MODEL, PAGED, requests, cancels, **knobs)
    assert trace.counts is made[-1].counts
    computed = sum(p.useful for p in trace.passes)
    assert computed + trace.counts["saved_tokens"] >= sum(
        len(r.tokens) - 1 for r in requests if r.generated)
    assert bool(sum(p.recomputed for p in trace.passes)) <= bool(trace.counts["preemptions"])
    if knobs["pages"] is None:   # enough for all that can run at the same time
        assert not trace.counts["preemptions"]
    if not knobs["share_prefixes"]:
        assert not made[-1].pages.published and not trace.counts["shared_pages"]


@pytest.mark.parametrize("pages, page_size", [(None, 16), (6, 4), (8, 3), (24, 1)])
def test_float32(pages, page_size):
    requests = [Request([5, 6, 7, 8, 9, 1][:2 + i % 5], 9, i % 2, seed=i, arrival=i // 2)
                for i in range(9)]
    assert_contract(toy(dtype=torch.float32), PAGED, requests, tolerance=1e-4, pages=pages,
                    page_size=page_size)


@pytest.mark.parametrize("knobs, message", [
    (dict(pages=0), "pages must be a whole number of at least 1, not 0"),
    (dict(pages=2.5), "pages must be a whole number of at least 1, not 2.5"),
    (dict(page_size=0), "page_size must be a whole number of at least 1, not 0"),
    (dict(pages=9, page_size="4"), "page_size must be a whole number of at least 1, not '4'"),
    (dict(page_size=25), "page_size 25 exceeds block_size 24"),
    (dict(pages=1, page_size=25), "page_size 25 exceeds block_size 24"),
    (dict(max_batch=0), "max_batch must be"),
    (dict(pages=9, max_batch=0), "max_batch must be"),
    (dict(token_budget=0), "token_budget must be"),
    (dict(policy="lifo"), "policy must be one of fcfs, sjf, priority, not 'lifo'"),
])
def test_bad_knobs_are_refused(knobs, message):
    with pytest.raises(ValueError, match=message):
        PAGED(MODEL, [Request([1, 2, 3])], **knobs)


def test_a_request_that_can_never_fit_is_refused_in_pages_with_the_numbers():
    requests = [Request([1] * 3, 3, name="small"), Request([1] * 9, 7, name="large")]
    message = ("request 'large': prompt of 9 \\+ max_new_tokens 7 needs 4 pages of 4 tokens, "
               "pages is 3")
    with pytest.raises(ValueError, match=message):
        PAGED(MODEL, requests, pages=3, page_size=4)
    assert requests[0].generated == []   # refused before anything ran
    assert_contract(MODEL, PAGED, requests, pages=4, page_size=4)
    assert_contract(MODEL, PAGED, [Request([1] * 9, 10**9)], pages=6, page_size=4)   # the context


@pytest.mark.parametrize("max_batch, pages, made_of", [
    (2, None, 6 + 2),     # all that can run together have their longest answers
    (8, None, 6 + 2 + 1),
    (1, 6, 6), (1, 8, 8),
    (1, 10**12, 3 * 6),   # no request ever holds more pages than fill its context
])
def test_the_size_of_the_pool(max_batch, pages, made_of):
    requests = [Request([1, 2], 2), Request([1] * 20, 9), Request([1] * 5, 3)]
    with watched() as made:
        assert_contract(MODEL, PAGED, requests, max_batch=max_batch, pages=pages, page_size=4)
    assert made[0].pages.number == made_of


# --- storms: more work than memory ----------------------------------------------------------------

def storm(stage, **knobs):
    """Six requests that together need twice what there is."""
    requests = [Request([i + 1] * 4, 12, 1.0, seed=i, name=f"r{i}") for i in range(6)]
    return assert_contract(MODEL, STAGES[stage], requests, **knobs)


def test_pages_admit_more_and_preempt_where_reserved_room_waits():
    reserved, paged = storm("ragged_varlen", max_kv_tokens=48), storm("paged", pages=12,
                                                                      page_size=4)
    assert not reserved.counts.get("preemptions") and paged.counts["preemptions"] > 0
    assert max(len(p.work) for p in reserved.passes) == 3   # 16 tokens each
    assert max(len(p.work) for p in paged.passes) == 6
    assert not sum(p.recomputed for p in reserved.passes)
    assert sum(p.recomputed for p in storm("paged", pages=12, page_size=4,
                                           share_prefixes=False).passes) > 0


def test_the_victim_is_the_least_urgent_and_of_those_the_latest_to_arrive(monkeypatch):
    preempted = []

    def preempt(self, request, original=PagedScheduler.preempt):
        preempted.append(request.name)
        original(self, request)

    monkeypatch.setattr(PagedScheduler, "preempt", preempt)
    scheduler = PagedScheduler(8, 64, Pages(3, 4), share_prefixes=False)
    queue(scheduler, [Request([0] * 3, 9, name=name, priority=priority)
                      for name, priority in [("a", 1), ("b", 0), ("c", 1)]])
    run(scheduler)
    assert preempted[:2] == ["c", "a"] and "b" not in preempted


def test_a_request_may_have_to_preempt_itself():
    """The least urgent one grows, and there is no other that ranks behind it."""
    scheduler = PagedScheduler(2, 64, Pages(3, 2), "priority", share_prefixes=False)
    urgent, other = queue(scheduler, [Request([0] * 3, 3, name="urgent"),
                                      Request([0] * 2, 3, name="other", priority=1)])
    finish(scheduler, scheduler.schedule(0))
    assert [len(request.kv) for request in (urgent, other)] == [2, 1]
    assert [request.name for request, _ in scheduler.schedule(1)] == ["urgent"]
    assert list(scheduler.waiting) == [other] and other.kv is None and other.computed == 0
    assert scheduler.pages.available() == 1   # the only page it had; it needs two
    run(scheduler, step=1)
    assert len(other.generated) == 3 and scheduler.counts["preemptions"] == 1


def test_a_preempted_request_returns_to_its_place_in_the_queue():
    scheduler = PagedScheduler(3, 64, Pages(3, 2), share_prefixes=False)
    requests = queue(scheduler, [Request([0] * 2, 4, name=name, arrival=arrival)
                                 for name, arrival in [("a", 0), ("b", 0), ("c", 0), ("d", 1),
                                                       ("e", 99)]])
    finish(scheduler, scheduler.schedule(0))
    scheduler.schedule(1)   # a takes c's page; then b is the last, and makes room for itself
    assert "".join(request.name for request in scheduler.waiting) == "bcde"
    run(scheduler, step=1)
    assert max(request.token_steps[-1] for request in requests[:-1]) < 99


def test_a_preempted_request_draws_no_token_twice(monkeypatch):
    """The storm of above samples; a mutant that forgets what was generated is seen."""
    knobs = dict(pages=12, page_size=4)
    assert storm("paged", **knobs).counts["preemptions"]

    def preempt(self, request, original=PagedScheduler.preempt):
        original(self, request)
        request.generated.clear()
        request.token_times.clear()
        request.token_steps.clear()

    monkeypatch.setattr(PagedScheduler, "preempt", preempt)
    with pytest.raises(AssertionError):
        storm("paged", **knobs)


# --- a scheduler alone, without a model -----------------------------------------------------------

def queue(scheduler, requests):
    """Adds them in order of arrival, and returns them in that order."""
    for request in (prepared := prepare(requests, CONFIG)):
        scheduler.add(request)
    return prepared


def finish(scheduler, plan, step=0, token=lambda request: 0):
    """The step has been computed."""
    sampled = [request for request, n in plan if n == request.todo]
    scheduler.update(plan, [token(request) for request in sampled])
    for request in sampled:
        request.token_steps.append(step)


def run(scheduler, step=0, token=lambda request: 0):
    """To the end, with the books checked at every step; returns all plans, like ["A4 B1", ...]."""
    plans = []
    while scheduler.busy:
        step = scheduler.next_step(step)
        plan = scheduler.schedule(step)
        if not scheduler.busy:   # those that were left had been cancelled
            break
        assert 0 < sum(n for _, n in plan) <= scheduler.token_budget
        assert {request for request, _ in plan} == {*scheduler.running}   # all of them go on
        assert_books(scheduler)
        assert_tables(scheduler)
        finish(scheduler, plan, step, token)
        assert_books(scheduler)
        plans.append(" ".join(f"{request.name}{n}" for request, n in plan))
        step += 1
    return plans


# --- policies: golden orders, and no request starves ----------------------------------------------

def order(policy, requests, max_batch=1):
    """The order in which they are admitted."""
    scheduler = PagedScheduler(max_batch, 64, Pages(64, 1), policy)
    queue(scheduler, requests)
    return "".join(dict.fromkeys(entry[0] for plan in run(scheduler) for entry in plan.split()))


@pytest.mark.parametrize("policy, expected", [
    ("fcfs", "ABCDE"), ("sjf", "BEDCA"), ("priority", "CEBDA"),
])
def test_policies_are_sort_keys(policy, expected):
    requests = [Request([0] * n, 1, name=name, priority=priority, arrival=arrival)
                for name, n, priority, arrival in [("A", 9, 2, 0), ("B", 3, 1, 0), ("C", 5, 0, 0),
                                                   ("D", 3, 1, 0), ("E", 1, 0, 1)]]
    assert order(policy, requests) == expected


@pytest.mark.parametrize("policy", ["fcfs", "sjf", "priority"])
def test_a_request_cancelled_while_it_waits_is_never_admitted(policy):
    """Request.cancel leaves it in the queue, where it may well rank first."""
    scheduler = PagedScheduler(1, 64, Pages(64, 4), policy)
    requests = queue(scheduler, [Request([0] * 2, 2, name="A"), Request([0] * 9, 2, name="B"),
                                 Request([0] * 3, 2, name="C"), Request([0] * 4, 2, name="D")])
    for request, priority in zip(requests, (0, 2, 1, 1)):
        request.priority = priority
    plan = scheduler.schedule(0)
    requests[2].cancel()
    finish(scheduler, plan)
    later = run(scheduler, step=1)
    assert "C" not in "".join(later) and len(later) == 5 and requests[2].generated == []


def test_a_request_cancelled_in_the_middle_of_a_step_gives_its_pages_back():
    """Nothing that the step computes for it counts, and nothing of it is published."""
    scheduler = PagedScheduler(2, 64, Pages(4, 2))
    a, b = queue(scheduler, [Request([1, 2, 3], 3, name="a"), Request([4, 5], 3, name="b")])
    plan = scheduler.schedule(0)
    scheduler.cancel(a)
    finish(scheduler, plan)
    assert_books(scheduler)
    assert [*scheduler.pages.published] == [(4, 5)] and a.generated == [] and a.kv is None
    run(scheduler, step=1)
    assert len(b.generated) == 3


def waits(policy):
    """Steps until a long, unimportant request is admitted, one of an endless stream at a time."""
    scheduler = PagedScheduler(1, 64, Pages(64, 1), policy)
    long = Request([0] * 40, 1, name="long", priority=9)
    queue(scheduler, [long, *(Request([0], 1, name=f"s{i}", arrival=i) for i in range(100))])
    run(scheduler)
    return long.token_steps[0]


@pytest.mark.parametrize("policy", ["sjf", "priority"])
def test_no_request_starves(policy, monkeypatch):
    """A long, unimportant request is overtaken MAX_OVERTAKEN times, no more."""
    assert waits(policy) == MAX_OVERTAKEN
    monkeypatch.setattr(paging, "MAX_OVERTAKEN", 10**9)   # without the bound it waits for all
    assert waits(policy) == 100


@st.composite
def streams(draw):
    """Requests for a scheduler alone: their tokens are 0 and 1, so that some prefixes are equal."""
    return [Request(draw(st.lists(st.integers(0, 1), min_size=1, max_size=30)),
                    draw(st.integers(1, 20)), priority=draw(st.integers(0, 3)),
                    arrival=draw(st.integers(0, 20)))
            for _ in range(draw(st.integers(1, 9)))]


@settings(max_examples=400, **THOROUGH)
@given(data=st.data(), requests=streams(), limit=st.sampled_from([0, 1, 2, MAX_OVERTAKEN]),
       size=st.integers(1, 6), policy=st.sampled_from(list(POLICIES)),
       max_batch=st.integers(1, 8), budget=st.integers(1, 30), share=st.booleans())
def test_no_live_lock_from_the_smallest_pool_up(data, requests, limit, size, policy, max_batch,
                                                budget, share):
    """
    Every step computes something, no request is overtaken or preempted more often than the bound
    says, and all are done within as many steps as that allows.
    """
    need = smallest_pool(requests, size, block_size=64)
    pages = Pages(need + data.draw(st.integers(0, need)), size)
    with patch.object(paging, "MAX_OVERTAKEN", limit):
        scheduler = PagedScheduler(max_batch, budget, pages, policy, share)
        bound = (limit + 1) * sum(len(r.prompt) + r.max_new_tokens for r in requests)
        queue(scheduler, [replace(request) for request in requests])
        number, admitted, preempted = scheduler.number_of, [], Counter()

        def preempt(request):
            preempted[request] += 1
            PagedScheduler.preempt(scheduler, request)

        def grant_room(request):
            granted = PagedScheduler.grant_room(scheduler, request)
            if granted and request not in admitted:   # it has been overtaken by:
                later = [other for other in admitted if number[other] > number[request]]
                assert len(later) <= limit
                assert len(admitted) <= number[request] + limit
                admitted.append(request)
            return granted

        scheduler.preempt, scheduler.grant_room = preempt, grant_room
        plans = run(scheduler, token=lambda request: len(request.generated) % 2)
    assert len(plans) <= bound and max(preempted.values(), default=0) <= limit
    assert scheduler.pages.available() == pages.number


@pytest.mark.parametrize("limit, most", [(10**9, 5), (1, 1), (0, 0)])
def test_no_request_is_preempted_without_end(limit, most, monkeypatch):
    """All arrive together, so that none is overtaken: what counts here is preemption alone."""
    monkeypatch.setattr(paging, "MAX_OVERTAKEN", limit)
    sizes = [(3, 20), (3, 3), (4, 5), (3, 9), (4, 20), (2, 12), (5, 19)]
    scheduler = PagedScheduler(8, 64, Pages(30, 1), share_prefixes=False)
    queue(scheduler, [Request([0] * prompt, new) for prompt, new in sizes])
    run(scheduler)
    assert max(scheduler.times_preempted.values(), default=0) == most


def test_a_due_request_has_room_for_its_longest_answer(monkeypatch):
    """It never has to ask for a page again, so it is never preempted again either."""
    monkeypatch.setattr(paging, "MAX_OVERTAKEN", 1)
    scheduler = PagedScheduler(2, 64, Pages(6, 1), share_prefixes=False)
    first, second = queue(scheduler, [Request([0], 5, name="first"), Request([0], 5, name="b")])
    for step in range(3):
        finish(scheduler, scheduler.schedule(step))
    assert [len(request.kv) for request in (first, second)] == [3, 3]
    finish(scheduler, scheduler.schedule(3))
    assert list(scheduler.waiting) == [second] and scheduler.due == {second}
    for step in range(4, 6):
        finish(scheduler, scheduler.schedule(step))
    assert first.finished and scheduler.running == [second] and len(second.kv) == 6


def test_pages_that_no_request_gives_back_are_an_error_and_no_endless_loop():
    pages = Pages(4, 4)
    lost = pages.allocate(2)
    scheduler = PagedScheduler(1, 8, pages)
    request, = queue(scheduler, [Request([7] * 10, 6, name="r")])
    with pytest.raises(RuntimeError, match="request 'r' has arrived at step 0, but nothing can go"):
        scheduler.schedule(0)
    pages.give_back(lost)
    run(scheduler)
    assert request.finish_reason == "length"


# --- without any pressure it is the Scheduler -----------------------------------------------------

@settings(max_examples=300, **THOROUGH)
@given(requests=streams(), max_batch=st.integers(1, 9), budget=st.integers(1, 30),
       size=st.integers(1, 6), eos=st.sampled_from([None, 0, 1]),
       cancels=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), max_size=3))
def test_with_pages_enough_it_hands_out_the_plans_of_the_scheduler(requests, max_batch, budget,
                                                                   size, eos, cancels):
    pages = sum(smallest_pool([request], size, block_size=64) for request in requests)
    plans = []
    for scheduler in (Scheduler(max_batch, budget),
                      PagedScheduler(max_batch, budget, Pages(pages, size), share_prefixes=False)):
        mine = queue(scheduler, [replace(request, eos_token=eos) for request in requests])
        plans.append([])
        for step in range(1000):
            for i, when in cancels:
                if when == step and i < len(mine):
                    scheduler.cancel(mine[i])
            plan = scheduler.schedule(step)
            plans[-1].append([(request.name, n) for request, n in plan])
            finish(scheduler, plan, step, lambda r: len(r.tokens) // 7 % 2)
        assert not scheduler.busy
    assert plans[0] == plans[1]


def test_with_pages_enough_its_passes_are_those_of_stage_6():
    traces = []
    for stage, knobs in ("ragged_varlen", {}), ("paged", dict(share_prefixes=False)):
        requests = [Request([1, 2, 3] * (1 + i % 5), 5 + i, i % 2, seed=i, arrival=i)
                    for i in range(9)]
        traces.append(STAGES[stage](MODEL, requests, max_batch=3, token_budget=7, **knobs))
    ragged, paged = ([(p.step, p.work, p.score_entries) for p in trace.passes]
                     for trace in traces)
    assert ragged == paged


# --- Pages: the allocator, by hand ----------------------------------------------------------------

def test_the_next_page_if_it_is_free_and_else_the_middle_of_the_longest_free_stretch():
    pages = Pages(8, 4)                            # . free, a letter: held
    assert pages.allocate(3) == [2, 3, 4]          # . . a a a . . .   5 left: 2 before, 3 after
    assert pages.allocate(1, after=4) == [5]       # . . a a a a . .   the next one
    assert pages.allocate(1) == [0]                # b . a a a a . .   0-1 and 6-7: the first
    assert pages.allocate(2, after=0) == [1, 6]    # b b a a a a b .   2 is not free: elsewhere
    assert pages.allocate(1, after=6) == [7]       # b b a a a a b b
    pages.give_back([2, 3, 4, 5])                  # b b . . . . b b
    assert pages.allocate(1) == [3]                # b b . c . . b b
    assert pages.allocate(2) == [4, 5]             # b b . c d d b b   fills the stretch
    assert pages.allocate(1, after=7) == [2]       # b b e c d d b b   the last page has no next one
    assert not pages.free and pages.holders == [1] * 8


def test_more_pages_than_any_stretch_has():
    pages = Pages(6, 1)
    pages.allocate(6)
    pages.give_back([0, 1, 3, 5])                  # . . x . x .
    assert pages.allocate(4) == [0, 1, 3, 5]


@settings(max_examples=300, **THOROUGH)
@given(free=st.sets(st.integers(0, 14), min_size=1), number=st.integers(1, 15))
def test_the_place_is_in_the_middle_of_the_first_of_the_longest_stretches(free, number):
    pages = Pages(15, 1)
    pages.free = set(free)
    stretches = [(start, end) for start in range(15) for end in range(start + 1, 16)
                 if set(range(start, end)) <= free]
    start, end = max(stretches, key=lambda stretch: (stretch[1] - stretch[0], -stretch[0]))
    place = pages.place_for(number)
    before, behind = place - start, end - place - number
    assert place == start if number >= end - start else 0 <= behind - before <= 1


def test_pages_needed():
    assert [Pages(9, 4).needed(tokens) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


# --- Pages: publishing, finding, evicting ---------------------------------------------------------

def written(pages, tokens):
    """A block table with these tokens, published and given back."""
    shared = pages.find(tokens)
    pages.hold(shared)
    table = shared + pages.allocate(pages.needed(len(tokens)) - len(shared))
    pages.publish(table, tokens, 0)
    pages.give_back(table)
    return table


def test_only_full_pages_are_found_and_only_from_the_beginning():
    pages = Pages(8, 2)
    table = written(pages, [1, 2, 3, 4, 5])
    assert pages.find([1, 2, 3, 4, 5]) == table[:2] and pages.find([1, 2, 3]) == table[:1]
    assert pages.find([1]) == pages.find([3, 4]) == pages.find([2, 3, 4, 5]) == []
    assert pages.find([1, 2, 9, 4]) == table[:1]
    assert table[2] in pages.free and list(pages.kept) == [table[1], table[0]]


def test_the_least_recently_used_page_goes_first_and_children_before_their_parents():
    pages = Pages(4, 1)
    chain = written(pages, [1, 2])
    other = written(pages, [8])
    last = written(pages, [9])
    assert written(pages, [1]) == chain[:1]                # used again: now it is the youngest
    assert list(pages.kept) == [chain[1], other[0], last[0], chain[0]]
    for prefix, found in ([1, 2], chain[:1]), ([8], []), ([9], []), ([1], []):
        pages.evict()
        assert pages.find(prefix) == found                 # what is gone is not found again
    assert len(pages.free) == 4 and not pages.published and not pages.prefix_of
    assert pages.evictions == 4


def test_pages_are_evicted_only_when_none_is_free():
    pages = Pages(3, 2)
    table = written(pages, [1, 2, 3, 4])
    assert len(pages.free) == 1 and pages.available() == 3
    third, = pages.allocate(1)
    assert third not in table and pages.find([1, 2, 3, 4]) == table and not pages.evictions
    assert pages.allocate(1) == [table[1]] and pages.find([1, 2, 3, 4]) == table[:1]
    assert pages.evictions == 1 and pages.available() == 1


def test_held_pages_are_not_evicted():
    pages = Pages(2, 2)
    table = written(pages, [1, 2])
    pages.hold(table)
    pages.allocate(1)
    assert pages.available() == 0 and pages.find([1, 2]) == table


def test_equal_tokens_computed_twice_are_published_once():
    pages = Pages(4, 2)
    tables = [pages.allocate(2), pages.allocate(2)]
    for table in tables:
        pages.publish(table, [1, 2, 3, 4], 0)
    assert pages.find([1, 2, 3, 4]) == tables[0] and len(pages.published) == 2
    pages.give_back(tables[1])
    assert pages.free == {*tables[1]}
    pages.give_back(tables[0])
    assert list(pages.kept) == tables[0][::-1]


# --- sharing --------------------------------------------------------------------------------------

def test_pages_are_published_after_the_step_that_computed_them():
    scheduler = PagedScheduler(4, 8, Pages(8, 2))
    a, b, c = queue(scheduler, [Request([1, 2, 3, 4], 3, name=name, arrival=arrival)
                                for name, arrival in [("a", 0), ("b", 0), ("c", 1)]])
    plan = scheduler.schedule(0)
    assert plan == [(a, 4), (b, 4)] and not scheduler.pages.published   # the same step: nothing yet
    assert not {*a.kv} & {*b.kv}
    finish(scheduler, plan)
    plan = scheduler.schedule(1)
    assert plan == [(a, 1), (b, 1), (c, 2)]
    assert c.kv[0] == a.kv[0] and scheduler.pages.holders[a.kv[0]] == 2   # the same page, no copy
    assert c.kv[1] != a.kv[1]   # the last page of a prompt is never shared
    assert scheduler.counts["shared_pages"] == 1 and scheduler.counts["saved_tokens"] == 2


def test_generated_pages_are_found_too():
    scheduler = PagedScheduler(1, 8, Pages(8, 2))
    a, b = queue(scheduler, [Request([1, 2], 4, name="a"), Request([1, 2, 7, 7, 7], 1, name="b")])
    assert run(scheduler, token=lambda request: 7) == ["a2", "a1", "a1", "a1", "b1"]
    assert scheduler.counts["saved_tokens"] == 4   # of which a has generated the last two


@pytest.mark.parametrize("length, saved", [(3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8)])
def test_the_last_token_of_a_prompt_is_always_computed(length, saved):
    """Also if all of it is published: the next token needs its logits."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9][:length]
    requests = [Request(prompt, 3, name="a"), Request(prompt, 3, name="b")]
    with watched():
        trace = assert_contract(MODEL, PAGED, requests, max_batch=1, page_size=4)
    assert trace.counts["saved_tokens"] == saved
    assert trace.passes[3].work == [("b", saved, length - saved)]   # after a's three tokens


def test_counts_of_sharing_and_eviction_by_hand():
    scheduler = PagedScheduler(1, 16, Pages(6, 2))
    queue(scheduler, [Request([1, 2, 3, 4, 5], 1, name="a"),       # leaves 1 2 and 3 4
                      Request([1, 2, 3, 4, 6], 1, name="b"),       # finds both
                      Request([1, 2, 9], 1, name="c"),             # finds the first
                      Request([7] * 11, 1, name="d"),              # needs all six pages
                      Request([1, 2, 3], 1, name="e")])            # finds nothing any more
    assert run(scheduler) == ["a5", "b1", "c1", "d11", "e3"]
    # d leaves five full pages and a free one; e needs two
    assert dict(scheduler.counts) == dict(shared_pages=3, saved_tokens=6, evicted_pages=3)


def test_counts_of_preemption_by_hand():
    scheduler = PagedScheduler(2, 16, Pages(4, 2))
    a, b = queue(scheduler, [Request([1, 1], 5, name="a"), Request([2, 2], 5, name="b")])
    assert run(scheduler) == [
        "a2 b2", "a1 b1", "a1 b1",   # two pages each, and all are full
        "a1",                        # b makes room; its second page is taken at once
        "a1",                        # 7 tokens, 6 of them computed: a is done
        "b3",                        # 5 tokens, of which b finds the first page again
        "b1"]
    assert dict(scheduler.counts) == dict(preemptions=1, shared_pages=1, saved_tokens=2,
                                          evicted_pages=3)
    assert a.token_steps == [0, 1, 2, 3, 4] and b.token_steps == [0, 1, 2, 5, 6]


def test_a_request_that_needs_all_the_room_gets_it_from_the_kept_pages():
    """Even if its own first page is among them: it does not wait for room that it holds itself."""
    requests = [Request([1, 2, 3, 4, 5, 6], 10, name=name) for name in ("a", "b")]
    with watched():
        trace = assert_contract(MODEL, PAGED, requests, max_batch=1, pages=4, page_size=4)
    assert trace.counts["shared_pages"] == 1 and not trace.counts["preemptions"]


def test_requests_that_arrive_together_share_a_common_prefix():
    """
    16 prompts, 128 common tokens and 5 of their own, answers of 20, 16 tokens to a page. The first
    is prefilled in steps 0 to 2. In step 1 its last 69 tokens fill the budget of 64, so the others
    are still waiting; from step 2 on they find 8 pages. Each then needs two pages of its own, for
    5 + 20 tokens of which the last is never computed.
    """
    model, peak = toy(block_size=256), {}
    common = [(7 * i + i * i) % VOCAB for i in range(128)]
    for share in True, False:
        requests = [Request(common + [(3 * i + j) % VOCAB for j in range(5)], 20, seed=i)
                    for i in range(16)]
        held = []

        def in_use(module, args):
            if made:
                held.append(sum(holders > 0 for holders in made[-1].pages.holders))

        handle = model.register_forward_pre_hook(in_use)
        with watched() as made:
            trace = PAGED(model, requests, max_batch=16, share_prefixes=share)
        handle.remove()
        peak[share] = max(held), len(trace.passes)
        assert all(request.generated == alone(model, request)[0] for request in requests)
        if share:
            assert trace.counts["shared_pages"] == 15 * 8         # 15 of 16 find all of it
            assert trace.counts["saved_tokens"] == 15 * 128
            assert sum(p.useful for p in trace.passes) == 16 * (5 + 19) + 128
        else:
            assert trace.counts["shared_pages"] == 0
            assert sum(p.useful for p in trace.passes) == 16 * (128 + 5 + 19)
        assert not trace.counts["preemptions"]
    assert peak == {True: (8 + 16 * 2, 23), False: (94, 56)}


# --- where keys are read and written --------------------------------------------------------------

def prefill(prompt, table, pool, pages):
    """Prefills a prompt into these pages in two chunks and returns the layouts and the logits."""
    request, = prepare(Request(prompt, 4), MODEL.config)
    request.kv, batches = table, []
    for n in 3, len(prompt) - 3:
        batch = Paged([(request, n)], pool, pages)
        logits = MODEL(batch.tokens, batch.positions, batch.attend, batch.rows)
        batches.append(batch)
        request.computed += n
    return batches, logits


BYTES_PER_TOKEN = 2 * 3 * 15 * 8   # k and v, 3 layers, 15 wide, float64


@pytest.mark.parametrize("table, slots, copied", [
    ([1, 2, 3], [2, 3, 4, 5, 6], [0, 0]),       # neighbours: a view
    ([4, 0, 2], [8, 9, 0, 1, 4], [3, 5]),       # scattered: all three, then five keys are gathered
    ([1, 2, 4], [2, 3, 4, 5, 8], [0, 5]),       # neighbours as far as the first chunk goes
    ([3, 2, 1], [6, 7, 4, 5, 2], [3, 5]),       # neighbours, but in the wrong order
])
@torch.inference_mode()
def test_scattered_pages_are_gathered_and_neighbours_are_not(table, slots, copied):
    pages, pool, prompt = Pages(5, 2), KV(5 * 2), [5, 1, 7, 7, 2]
    batches, logits = prefill(prompt, table, pool, pages)
    assert batches[0].slot_mapping.tolist() + batches[1].slot_mapping.tolist() == slots
    reference = MODEL(torch.tensor([prompt]))[0, -1]
    assert (logits[0] - reference).abs().max() <= 1e-10 * reference.abs().max()
    assert [batch.cost()["copied_bytes"] for batch in batches] == [
        keys * BYTES_PER_TOKEN for keys in copied]
    assert pool.bytes_per_token == BYTES_PER_TOKEN
    for layer in range(3):
        keys, values = batches[-1].read(layer, 0)
        shares = keys.untyped_storage().data_ptr() == pool.k[layer].untyped_storage().data_ptr()
        assert shares == (copied[-1] == 0) and keys.shape == values.shape == (3, 5, 5)


def test_a_shared_page_is_not_copied():
    """The second request reads the first one's page where it is, and goes on right after it."""
    requests = [Request([1, 2, 3, 4, 5, 6], 2, name=name) for name in ("a", "b")]
    requests.append(Request([9] * 20, 4, name="later", arrival=50))   # the pool may be larger
    tables = []
    with watched() as made:
        trace = PAGED(MODEL, requests, max_batch=1, pages=8, page_size=4,
                      on_token=lambda request, *_: tables.append(list(request.kv or [])))
    a, b = (next(table for table in half if table) for half in (tables[:2], tables[2:4]))
    assert a == b == [3, 4] and made[0].counts["shared_pages"] == 1
    assert all(p.copied_bytes == 0 for p in trace.passes if p.step < 50)


def test_the_trace_counts_what_is_gathered():
    """b's first page is a's; its second one lies elsewhere, because a's second is still held."""
    requests = [Request([1, 2, 3, 4, 5, 6], 4, name="a"),
                Request([1, 2, 3, 4, 7], 2, name="b", arrival=1)]
    with watched():
        trace = assert_contract(MODEL, PAGED, requests, pages=8, page_size=4)
    work = [(p.step, [name for name, _, _ in p.work]) for p in trace.passes]
    assert work == [(0, ["a"]), (1, ["a", "b"]), (2, ["a", "b"]), (3, ["a"])]
    assert [p.copied_bytes for p in trace.passes] == [
        0, 5 * BYTES_PER_TOKEN, 6 * BYTES_PER_TOKEN, 0]


# --- everything at once, step by step -------------------------------------------------------------

@lru_cache(maxsize=None)
def keys_and_values(prefix):
    """Of these tokens alone, without a cache: (2 x layers x nh, S, hs)."""
    found = []

    def attend(layer, q, k, v):
        found.extend([k[0], v[0]])
        return causal(layer, q, k, v)

    MODEL(torch.tensor([prefix]), attend=attend)
    return torch.cat(found)


class PagedEngine(Engine):
    """
    add, step, cancel and failing steps in any order. The books balance at every moment, and a
    published page holds the keys and values of the tokens it is published under.
    """
    model = MODEL

    @initialize(size=st.integers(1, 5), policy=st.sampled_from(list(POLICIES)),
                share=st.booleans(), max_batch=st.integers(1, 6), budget=st.integers(1, 24),
                more=st.integers(0, 6), limit=st.sampled_from([1, 2, MAX_OVERTAKEN]))
    def begin(self, size, policy, share, max_batch, budget, more, limit):
        paging.MAX_OVERTAKEN = self.limit = limit
        pages = Pages(-(-BLOCK_SIZE // size) + more, size)
        self.pool = KV(pages.number * size)
        self.scheduler = PagedScheduler(max_batch, budget, pages, policy, share)

    def lay_out(self, plan):
        assert not any(request.finished for request, _ in plan)
        assert_books(self.scheduler)
        assert_tables(self.scheduler)
        batch = Paged(plan, self.pool, self.scheduler.pages)
        assert_writes(self.scheduler.pages, batch)
        return batch

    @invariant()
    def books_are_right(self):
        assert_books(self.scheduler)
        self.published_pages_hold_their_tokens()

    @torch.inference_mode()
    def published_pages_hold_their_tokens(self):
        pages = self.scheduler.pages
        if not pages.published:
            return
        size = pages.size
        slots = [slot for page in pages.prefix_of for slot in range(page * size, (page + 1) * size)]
        expected = torch.cat([keys_and_values(prefix)[:, -size:]
                              for prefix in pages.prefix_of.values()], dim=1)
        buffers = [b for layer in range(3) for b in (self.pool.k[layer], self.pool.v[layer])]
        held = torch.cat(buffers)[:, slots]
        assert (held - expected).abs().max() <= 1e-10 * expected.abs().max()

    def teardown(self):
        try:
            super().teardown()
        finally:
            paging.MAX_OVERTAKEN = MAX_OVERTAKEN
        if self.scheduler:
            pages = self.scheduler.pages
            assert pages.available() == pages.number and not any(pages.holders)
            assert max(self.scheduler.times_preempted.values(), default=0) <= self.limit


PagedEngine.TestCase.settings = settings(max_examples=120, stateful_step_count=25, **THOROUGH)
TestPagedEngine = PagedEngine.TestCase
