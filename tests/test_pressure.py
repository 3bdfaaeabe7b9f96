"""Scheduling under pressure: policies, KV budget, preemption, prefix cache. Outputs never change; only who waits does."""
from collections import Counter
from dataclasses import replace

import pytest
import torch
from common import BLOCK_SIZE, SCHEDULED, STAGES, VOCAB, alone, assert_contract, toy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import scheduler as scheduler_module
from cache import Flat, PrefixCache
from model import GPTConfig, sample
from scheduler import MAX_PASSED, Request, Scheduler, prepare

MODEL = toy()
CONFIG = GPTConfig(block_size=64, vocab_size=10, n_layer=1, n_head=1, n_embd=2)


def allocated(requests, prefix_cache=None):
    """Tokens that caches really hold room for, read off the tensors."""
    tokens = 0
    for kv in [r.kv for r in requests if r.kv is not None] + [page.kv for page in (prefix_cache.pages.values() if prefix_cache else [])]:
        assert {t.shape[-2] for t in [*kv.k.values(), *kv.v.values()]} <= {kv.capacity}
        tokens += kv.capacity
    return tokens


# --- the contract, with all knobs -------------------------------------------------------------------------------------

@st.composite
def pressed(draw):
    """Requests with shared beginnings, and a KV budget from the smallest legal one up."""
    page = draw(st.integers(1, 5))
    token = st.integers(0, VOCAB - 1)
    stems = draw(st.lists(st.lists(token, min_size=1, max_size=14), min_size=1, max_size=2))
    requests = [Request((draw(st.sampled_from(stems)) + draw(st.lists(token, max_size=8)))[:BLOCK_SIZE], draw(st.integers(1, 14)),
                        draw(st.sampled_from([0.0, 1.0])), seed=i, name=f"r{i}", priority=draw(st.integers(0, 2)), arrival=draw(st.integers(0, 9)))
                for i in range(draw(st.integers(1, 7)))]
    admission = draw(st.sampled_from(["reserve", "grow"]))
    need = max(min(len(r.prompt) + r.max_new_tokens, BLOCK_SIZE) for r in requests)
    need = need if admission == "reserve" else -(-need // page) * page
    return requests, dict(max_batch=draw(st.integers(1, 6)), token_budget=draw(st.integers(1, 20)), policy=draw(st.sampled_from(["fcfs", "sjf", "priority"])),
                          admission=admission, page_size=page, max_kv_tokens=draw(st.one_of(st.none(), st.integers(need, 2 * need)))), draw(st.booleans())


@pytest.mark.parametrize("stage", SCHEDULED)
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(workload=pressed())
def test_contract(stage, workload):
    requests, knobs, with_prefix = workload
    prefix_cache = PrefixCache(knobs["page_size"]) if with_prefix else None
    for run in range(2 if with_prefix else 1):   # the second time it finds what the first has left
        mine = [replace(request) for request in requests]

        def within_budget(module, args):
            if knobs["max_kv_tokens"]:
                assert allocated(mine, prefix_cache) <= knobs["max_kv_tokens"]

        handle = MODEL.register_forward_pre_hook(within_budget)
        try:
            trace = assert_contract(MODEL, STAGES[stage], mine, prefix_cache=prefix_cache, **knobs)
        finally:
            handle.remove()
        assert sum(p.useful for p in trace.passes) + trace.counts["saved_tokens"] >= sum(len(r.tokens) - 1 for r in mine)
        assert bool(sum(p.recomputed for p in trace.passes)) <= bool(trace.counts["preemptions"])
        if knobs["admission"] == "reserve":
            assert not trace.counts["preemptions"]
    if prefix_cache:
        parents = [page.key[0] for page in prefix_cache.pages.values()]
        assert all(page.holders == parents.count(page) for page in prefix_cache.pages.values())   # by pages behind it, by no request


def storm(**knobs):
    """Six requests that together need twice what there is."""
    requests = [Request([i + 1] * 4, 12, 1.0, seed=i, name=f"r{i}") for i in range(6)]
    return assert_contract(MODEL, STAGES["ragged_varlen"], requests, max_kv_tokens=48, page_size=4, **knobs)


def test_grow_admits_more_and_preempts_where_reserve_waits():
    reserve, grow = storm(admission="reserve"), storm(admission="grow")
    assert not reserve.counts["preemptions"] and grow.counts["preemptions"] > 0
    assert max(len(p.work) for p in grow.passes) > max(len(p.work) for p in reserve.passes)
    assert sum(p.recomputed for p in grow.passes) > 0 == sum(p.recomputed for p in reserve.passes)


def test_the_victim_is_the_lowest_priority_and_of_those_the_latest_arrival(monkeypatch):
    preempted = []
    monkeypatch.setattr(Scheduler, "preempt", lambda self, request, original=Scheduler.preempt: (preempted.append(request.name), original(self, request)))
    scheduler = Scheduler(8, 64, max_kv_tokens=12, admission="grow", page_size=4)
    a, b, c = prepare([Request([0] * 3, 9, name="a", priority=1), Request([0] * 3, 9, name="b", priority=0), Request([0] * 3, 9, name="c", priority=1)], CONFIG)
    for request in a, b, c:
        scheduler.add(request)
    for step in range(60):
        plan = scheduler.schedule(step)
        scheduler.report(plan, [0 for r, n in plan if n == r.todo])
    assert preempted[:2] == ["c", "a"] and not scheduler.busy and "b" not in preempted


# --- policies: golden orders, and nobody starves ----------------------------------------------------------------------

def order(policy, requests, max_batch=1):
    """In which order are they admitted?"""
    scheduler, admitted, step = Scheduler(max_batch, 64, policy=policy), [], 0
    for request in prepare(requests, CONFIG):
        scheduler.add(request)
    while scheduler.busy:
        step = scheduler.next_step(step)
        plan = scheduler.schedule(step)
        admitted += [r.name for r, _ in plan if r.name not in admitted]
        scheduler.report(plan, [0 for r, n in plan if n == r.todo])
        step += 1
    return "".join(admitted)


def test_policies_are_sort_keys():
    def requests():
        return [Request([0] * n, new, name=name, priority=priority, arrival=arrival) for name, n, new, priority, arrival in
                [("A", 9, 1, 2, 0), ("B", 3, 1, 1, 0), ("C", 5, 1, 0, 0), ("D", 3, 1, 1, 0), ("E", 1, 1, 0, 1)]]
    assert order("fcfs", requests()) == "ABCDE"
    assert order("sjf", requests()) == "BEDCA"
    assert order("priority", requests()) == "CEBDA"
    with pytest.raises(ValueError, match="policy must be one of fcfs, sjf, priority, not 'lifo'"):
        Scheduler(1, 1, policy="lifo")
    with pytest.raises(ValueError, match="admission must be 'reserve' or 'grow'"):
        Scheduler(1, 1, admission="hope")


@pytest.mark.parametrize("policy", ["sjf", "priority"])
def test_nobody_starves(policy, monkeypatch):
    """A long, unimportant request among an endless stream of short, urgent ones is overtaken MAX_PASSED times, no more."""
    def wait():
        stream = [Request([0], 1, name=f"s{i}", arrival=i, priority=0) for i in range(100)]
        return order(policy, [Request([0] * 40, 1, name="L", priority=9), *stream]).count("s", 0) and order_index(policy, stream)

    def order_index(policy, stream):
        scheduler = Scheduler(1, 64, policy=policy)
        long = Request([0] * 40, 1, name="L", priority=9)
        for request in prepare([long, *[replace(r) for r in stream]], CONFIG):
            scheduler.add(request)
        for step in range(200):
            plan = scheduler.schedule(step)
            if long in [r for r, _ in plan]:
                return step
            scheduler.report(plan, [0 for r, n in plan if n == r.todo])

    assert wait() == MAX_PASSED
    monkeypatch.setattr(scheduler_module, "MAX_PASSED", 10**9)   # the bound taken away: it waits for all of them
    assert wait() == 100


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data(), limit=st.sampled_from([0, 1, 2, MAX_PASSED]), page=st.integers(1, 6), policy=st.sampled_from(["fcfs", "sjf", "priority"]), max_batch=st.integers(1, 8), budget=st.integers(1, 30))
def test_no_live_lock_from_the_smallest_legal_budget_up(data, limit, page, policy, max_batch, budget):
    """Every step computes something, nobody is preempted more often than allowed, all are done within the stated bound."""
    scheduler_module.MAX_PASSED, before = limit, MAX_PASSED
    try:
        run_to_the_end(data, limit, page, policy, max_batch, budget)
    finally:
        scheduler_module.MAX_PASSED = before


def run_to_the_end(data, limit, page, policy, max_batch, budget):
    requests = [Request([0] * data.draw(st.integers(1, 30)), data.draw(st.integers(1, 20)), priority=data.draw(st.integers(0, 3)), arrival=data.draw(st.integers(0, 20)))
                for _ in range(data.draw(st.integers(1, 8)))]
    need = max(-(-min(len(r.prompt) + r.max_new_tokens, 64) // page) * page for r in requests)
    scheduler = Scheduler(max_batch, budget, need + data.draw(st.integers(0, need)), policy, "grow", page)
    for request in prepare(requests, CONFIG):
        scheduler.add(request)
    preempted = Counter()
    preempt = scheduler.preempt
    scheduler.preempt = lambda request: (preempted.update([request.name]), preempt(request))
    bound, step, taken = (limit + 1) * sum(len(r.prompt) + r.max_new_tokens for r in requests), 0, 0
    while scheduler.busy:
        step = scheduler.next_step(step)
        plan = scheduler.schedule(step)
        assert plan and 0 < sum(n for _, n in plan) <= budget
        assert scheduler.kv_tokens <= scheduler.max_kv_tokens
        scheduler.report(plan, [0 for r, n in plan if n == r.todo])
        step, taken = step + 1, taken + 1
        assert taken <= bound
        assert max(preempted.values(), default=0) <= limit
    assert scheduler.kv_tokens == 0


@pytest.mark.parametrize("limit, most", [(10**9, 5), (1, 1), (0, 0)])
def test_nobody_is_preempted_without_end(limit, most, monkeypatch):
    """All arrive together, so that nobody is overtaken: what counts here is preemption alone."""
    monkeypatch.setattr(scheduler_module, "MAX_PASSED", limit)
    sizes = [(3, 20), (3, 3), (4, 5), (3, 9), (4, 20), (2, 12), (5, 19)]
    scheduler, preempted = Scheduler(8, 64, max_kv_tokens=30, admission="grow", page_size=1), Counter()
    preempt = scheduler.preempt
    scheduler.preempt = lambda request: (preempted.update([request.name]), preempt(request))
    for request in prepare([Request([0] * prompt, new) for prompt, new in sizes], CONFIG):
        scheduler.add(request)
    step = 0
    while scheduler.busy:
        plan = scheduler.schedule(step)
        scheduler.report(plan, [0 for r, n in plan if n == r.todo])
        step += 1
    assert max(preempted.values(), default=0) == most


# --- prefix cache -----------------------------------------------------------------------------------------------------

def test_pages_are_committed_after_the_step_that_computed_them():
    prefix_cache, (a, b) = PrefixCache(2), prepare([Request([1, 2, 3, 4], 2, name="a"), Request([1, 2, 3, 4], 2, name="b")], CONFIG)
    scheduler = Scheduler(4, 8, prefix_cache=prefix_cache)
    scheduler.add(a), scheduler.add(b)
    assert [(r.name, n) for r, n in scheduler.schedule(0)] == [("a", 4), ("b", 4)] and not prefix_cache.pages   # in the same step: no hit
    scheduler.report([(a, 4), (b, 4)], [0, 0])
    assert len(prefix_cache.pages) == 2 and [page.holders for page in a.pages] == [3, 2]   # a, b and the page behind; a and b
    assert a.pages == b.pages


def test_trap_9_a_fully_cached_prompt_still_computes_its_last_token(monkeypatch):
    def run():
        prefix_cache = PrefixCache(page_size=4)
        for i in range(2):
            trace = assert_contract(MODEL, STAGES["ragged_varlen"], [Request([1, 2, 3, 4, 5, 6, 7, 8], 3)], prefix_cache=prefix_cache)
        return trace
    assert run().counts["saved_tokens"] == 4   # of 8: the last page would leave nothing to sample from
    take = PrefixCache.take
    monkeypatch.setattr(PrefixCache, "take", lambda self, tokens: take(self, [*tokens, 8]))   # the whole prompt is taken
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        run()


def test_trap_9_a_preempted_request_that_hits_the_prefix_cache_keeps_no_stale_count(monkeypatch):
    def run():
        requests = [Request([1, 2, 3, 4, 5, i], 10, 1.0, seed=i, name=f"r{i}") for i in range(4)]
        trace = assert_contract(MODEL, STAGES["ragged_varlen"], requests, max_kv_tokens=44, page_size=2, admission="grow", prefix_cache=PrefixCache(2))
        assert trace.counts["preemptions"] and trace.counts["prefix_hits"]
    run()

    def preempt(self, request, original=Scheduler.preempt):   # the count stays, the cache is gone
        computed = request.computed
        original(self, request)
        request.computed = computed
    admit = Scheduler.admit

    def stale(self, request, arrived):
        before = request.computed
        done = admit(self, request, arrived)
        request.computed = max(request.computed, before)
        return done
    monkeypatch.setattr(Scheduler, "preempt", preempt)
    monkeypatch.setattr(Scheduler, "admit", stale)
    with pytest.raises((AssertionError, KeyError)):
        run()


def test_a_preempted_request_draws_no_token_twice(monkeypatch):
    """The storm of above samples; a mutant that forgets what was generated is caught."""
    storm(admission="grow")

    def preempt(self, request, original=Scheduler.preempt):
        original(self, request)
        request.generated.clear()
        request.token_times.clear()
        request.token_steps.clear()
    monkeypatch.setattr(Scheduler, "preempt", preempt)
    with pytest.raises(AssertionError):
        storm(admission="grow")


def test_the_least_recently_used_page_goes_first_and_never_one_with_a_page_behind_it():
    prefix_cache = PrefixCache(1)
    chains = [prefix_cache.add([], [i], None, 1) for i in range(3)]
    behind = prefix_cache.add([chains[0]], [9], None, 2)
    prefix_cache.hold(chains[1]), prefix_cache.give_back([chains[1]])          # 1 was used last
    gone = []
    while prefix_cache.evict():
        gone += [page for page in (*chains, behind) if page.key not in prefix_cache.pages and page not in gone]
    assert gone.index(behind) < gone.index(chains[0]) and gone[-1] is chains[1] and prefix_cache.tokens == 0


def test_a_request_that_needs_all_the_room_gets_it_from_the_prefix_cache():
    """Even when its own first page is there: it must not wait for ever for room that it holds itself."""
    prefix_cache = PrefixCache(4)
    for _ in range(2):
        assert_contract(MODEL, STAGES["ragged_varlen"], [Request([1, 2, 3, 4, 5, 6], 10)], max_kv_tokens=16, prefix_cache=prefix_cache)
    assert prefix_cache.tokens <= 16


def test_pages_that_somebody_else_holds_are_no_reason_to_wait_for_ever():
    """What a failed run holds is let go at the beginning of the next one; until then it is no room, and no endless loop."""
    prefix_cache = PrefixCache(4)

    def fail(*_):
        raise RuntimeError("injected")

    with pytest.raises(RuntimeError, match="injected"):
        STAGES["chunked"](MODEL, [Request([1, 2, 3, 4, 5, 6], 4)], max_kv_tokens=16, prefix_cache=prefix_cache, on_token=fail)
    assert [page.holders for page in prefix_cache.pages.values()] == [1]
    scheduler = Scheduler(1, 8, max_kv_tokens=16, prefix_cache=prefix_cache)
    scheduler.add(*prepare([Request([7] * 10, 6)], CONFIG))
    with pytest.raises(RuntimeError, match="nothing can go on"):
        scheduler.schedule(0)
    assert_contract(MODEL, STAGES["chunked"], [Request([7] * 10, 6)], max_kv_tokens=16, prefix_cache=prefix_cache)
    assert all(page.holders == 0 or page.key[0] is None for page in prefix_cache.pages.values())


def test_a_prefix_cache_is_of_one_model():
    prefix_cache = PrefixCache(2)
    STAGES["chunked"](MODEL, [Request([1, 2, 3], 2)], prefix_cache=prefix_cache)
    with pytest.raises(ValueError, match="prefix_cache: it holds keys and values of another model"):
        STAGES["chunked"](toy(dtype=torch.float32), [Request([1, 2, 3], 2)], prefix_cache=prefix_cache)
    with pytest.raises(ValueError, match="page_size must be"):
        PrefixCache(0)


# --- everything at once, step by step -----------------------------------------------------------------------------------

class Engine(RuleBasedStateMachine):
    """add, step, cancel and failing steps in any order; the books are right at every moment."""

    @initialize(page=st.integers(1, 4), policy=st.sampled_from(["fcfs", "sjf", "priority"]), admission=st.sampled_from(["reserve", "grow"]),
                max_batch=st.integers(1, 5), budget=st.integers(1, 12), room=st.integers(BLOCK_SIZE + 4, 80), prefix=st.booleans())
    def begin(self, page, policy, admission, max_batch, budget, room, prefix):
        self.prefix_cache = PrefixCache(page) if prefix else None
        self.scheduler = Scheduler(max_batch, budget, room, policy, admission, page, self.prefix_cache)
        self.requests, self.step_number, self.logits = [], 0, {}

    @rule(stem=st.sampled_from([[], [1, 2, 3, 4, 5], [1, 2, 3, 9, 9, 9]]), tail=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
          new=st.integers(1, 10), temperature=st.sampled_from([0.0, 1.0]), priority=st.integers(0, 2), delay=st.integers(0, 3))
    def add(self, stem, tail, new, temperature, priority, delay):
        if len(self.requests) < 10:
            n = len(self.requests)
            request, = prepare([Request(stem + tail, new, temperature, seed=n, name=f"r{n}", priority=priority, arrival=self.step_number + delay)], MODEL.config)
            self.requests.append(request)
            self.scheduler.add(request)

    @rule(fail=st.booleans(), times=st.integers(1, 4))
    @torch.inference_mode()
    def step(self, fail, times):
        for _ in range(times):
            plan = self.scheduler.schedule(self.step_number)
            self.step_number += 1
            if plan:
                batch, before = Flat(plan), [(r.computed, list(r.generated)) for r in self.requests]
                logits = MODEL(batch.tokens, batch.positions, batch.attend, batch.rows)
                if fail:   # the step is lost after the caches were written
                    assert before == [(r.computed, list(r.generated)) for r in self.requests]
                    return
                self.scheduler.report(plan, sample(logits, batch.sampled))

    @rule(i=st.integers(0, 9))
    def cancel(self, i):
        if i < len(self.requests):
            self.scheduler.cancel(self.requests[i])
            assert self.requests[i].kv is None and self.requests[i] not in self.scheduler.running + self.scheduler.waiting

    @invariant()
    def books_are_right(self):
        if hasattr(self, "scheduler"):
            s = self.scheduler
            assert allocated(self.requests, self.prefix_cache) <= s.kv_tokens <= s.max_kv_tokens
            assert sum(r.granted for r in self.requests if r not in s.running and not r.finished and r not in s.waiting) == 0
            assert all(r.computed == 0 and r.kv is None and not r.pages for r in s.waiting)
            held = [page for r in s.running for page in r.pages]
            for page in self.prefix_cache.pages.values() if self.prefix_cache else []:
                assert page.holders == held.count(page) + sum(other.key[0] is page for other in self.prefix_cache.pages.values())

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        bound = self.step_number + 20 + (MAX_PASSED + 1) * sum(len(r.prompt) + r.max_new_tokens for r in self.requests)
        while self.scheduler.busy:
            self.step(False, 1)
            self.books_are_right()
            assert self.step_number <= bound
        for request in self.requests:
            tokens, _, reason = alone(MODEL, request)
            assert request.generated == tokens[:len(request.generated)]
            assert request.finish_reason == "cancelled" or (request.generated, request.finish_reason) == (tokens, reason)
        assert self.scheduler.kv_tokens == (self.prefix_cache.tokens if self.prefix_cache else 0)


Engine.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
TestEngine = Engine.TestCase
