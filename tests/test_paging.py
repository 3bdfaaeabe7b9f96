"""Stage 7: pages, sharing, growth, preemption. Outputs never change, only waiting times."""
import gc
import random
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from types import FunctionType, ModuleType

import common
import pytest
import torch
from common import BLOCK_SIZE, STAGES, cancel_now, examples, queue, run, toy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from beyond.fairness import MAX_OVERTAKEN, POLICIES, SCHEDULERS, FairScheduler
from cache import KV
from generate_paged import Paged
from model import causal, sample
from paging import PagedScheduler, Pages
from request import Request, prepare
from scheduler import Scheduler

MODEL = toy()
PAGED = STAGES["paged"]


# --- the books: what must hold of every pool at every moment --------------------------------------

def assert_books(scheduler):
    """Each page is free or held, and all tables, keys and names agree."""
    pages, running, waiting = scheduler.pages, scheduler.running, scheduler.waiting
    held = Counter(page for request in running for page in request.block_table)
    assert [held[page] for page in range(pages.number)] == pages.holders
    assert sorted([*pages.free, *held]) == list(range(pages.number))
    assert all(len(set(r.block_table)) == len(r.block_table) for r in running)
    assert all(r.block_table is None and r.computed == 0 for r in waiting)
    assert {page: key for key, page in pages.published.items()} == pages.key_of
    assert len(pages.published) == len(pages.key_of)
    assert_names(scheduler)
    if isinstance(scheduler, FairScheduler):
        assert list(waiting) == sorted(waiting, key=scheduler.rank.get)
        assert {*running, *waiting} <= {*scheduler.rank}
    else:
        arrivals = [request.arrival for request in [*running, *waiting]]
        assert arrivals == sorted(arrivals)


def assert_names(scheduler):
    """A name stands for one beginning, for ever. `pages.beginnings` is what this test has seen."""
    pages = scheduler.pages
    beginnings = vars(pages).setdefault("beginnings", {0: ()})
    for page in sorted(pages.key_of, key=pages.name_of.__getitem__):   # parents first
        parent, tokens = pages.key_of[page]
        beginning = beginnings[parent] + tokens
        assert beginnings.setdefault(pages.name_of[page], beginning) == beginning
    names = [pages.name_of[page] for page in pages.key_of]
    assert len(set(names)) == len(names)
    for request in scheduler.running if scheduler.share_prefixes else ():
        for end in range(pages.size, request.computed + 1, pages.size):   # its full pages
            page = request.block_table[end // pages.size - 1]
            assert beginnings[pages.name_of[page]] == tuple(request.tokens[:end])


def assert_writes(pages, batch):
    """The pass writes each new token to its own slot, in pages that no other request can read."""
    size = pages.size
    slots = [request.block_table[p // size] * size + p % size for request, n in batch.plan
             for p in range(request.computed, request.computed + n)]
    assert batch.slot_mapping.tolist() == slots and len(set(slots)) == len(slots)
    for page in {slot // size for slot in slots}:
        assert pages.holders[page] == 1 and page not in pages.key_of
    buffers = [*batch.pool.k.values(), *batch.pool.v.values()]
    assert {buffer.size(-2) for buffer in buffers} <= {batch.pool.capacity}
    assert batch.pool.capacity == pages.number * size


class Watched:
    """Of a scheduler: asserts all of the above at every step."""

    def schedule(self, step):
        plan = super().schedule(step)
        assert not any(request.finished for request, _ in plan)
        assert_books(self)
        for request in self.running:   # pages for the tokens it has; if due, for all it can need
            due = isinstance(self, FairScheduler) and self.is_due(request)
            tokens = request.kv_tokens if due else len(request.tokens)
            assert len(request.block_table) == self.pages.needed(tokens)
        return plan

    def update(self, plan, tokens):
        super().update(plan, tokens)
        assert_books(self)


class WatchedPaged(Watched, PagedScheduler):
    pass


class WatchedFair(Watched, FairScheduler):
    pass


# --- knobs ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("knobs, named", [
    (dict(pages=2.5), "pages .* at least 1"), (dict(page_size="4"), "page_size .* at least 1"),
    (dict(page_size=25), "page_size 25 exceeds block_size 24"), (dict(policy="lifo"), "'lifo'"),
    (dict(pages=1, page_size=16), "request 'large': .* KV tokens, there are 16"),
])
def test_bad_knobs_are_refused_before_anything_ran(knobs, named):
    requests = [Request([1, 2, 3], 1, name="small"), Request([4] * 9, name="large")]
    with pytest.raises(ValueError, match=named):
        PAGED(MODEL, requests, **knobs)
    assert requests[0].generated == []


@pytest.mark.parametrize("max_batch, pages, made_of", [
    (2, None, 6 + 2), (8, None, 6 + 2 + 1),   # all that can run together have their longest answers
    (1, 6, 6), (1, 8, 8), (1, 10**12, 6 + 2 + 1),   # no more than all requests can fill
])
def test_the_size_of_the_pool(max_batch, pages, made_of, monkeypatch):
    made = []
    monkeypatch.setattr("generate_paged.Pages", lambda *sizes: made.append(sizes) or Pages(*sizes))
    requests = [Request([1, 2], 2), Request([1] * 20, 9), Request([1] * 5, 3)]
    PAGED(MODEL, requests, max_batch, pages=pages, page_size=4)
    assert made == [(made_of, 4)]


# --- a scheduler alone, without a model -----------------------------------------------------------

@st.composite
def streams(draw):
    """Requests for a scheduler alone: their tokens are 0 and 1, so that many prefixes are equal."""
    prompt = st.one_of(st.lists(st.integers(0, 1), min_size=1, max_size=30),
                       st.integers(1, 30).map(lambda n: [0] * n))
    return [Request(draw(prompt), draw(st.integers(1, 20)), priority=draw(st.integers(0, 3)),
                    arrival=draw(st.integers(0, 20)))
            for _ in range(draw(st.integers(1, 9)))]


CANCELS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), max_size=3)


def plans_of(scheduler, requests, cancels=(), eos=None):
    """Of copies of these requests. cancels: (request, step)."""
    mine = queue(scheduler, [replace(request, eos_token=eos) for request in requests])

    def cancel(step):
        for i, when in cancels:
            if when == step and i < len(mine):
                cancel_now(scheduler, mine[i])

    return run(scheduler, 0, lambda request: len(request.tokens) // 7 % 2, cancel)


@settings(max_examples=examples(300))
@given(data=st.data(), requests=streams(), max_batch=st.integers(1, 9), budget=st.integers(1, 30),
       size=st.integers(1, 6), eos=st.sampled_from([None, 0, 1]), cancels=CANCELS,
       share=st.booleans())
def test_schedulers_that_are_first_come_first_served_hand_out_the_same_plans(
        data, requests, max_batch, budget, size, eos, cancels, share):
    """Stage 6's, if there are pages enough and none is shared; and a fair one that is not bound."""
    enough = sum(common.smallest_pool([request], size, block_size=64) for request in requests)
    least = common.smallest_pool(requests, size, block_size=64)
    few, how = data.draw(st.integers(least, 2 * least)), (requests, cancels, eos)
    assert (plans_of(Scheduler(max_batch, budget), *how)
            == plans_of(WatchedPaged(max_batch, budget, Pages(enough, size), False), *how))
    fair = WatchedFair(max_batch, budget, Pages(few, size), "fcfs", share, bound=10**9)
    assert (plans_of(WatchedPaged(max_batch, budget, Pages(few, size), share), *how)
            == plans_of(fair, *how))


def test_pages_that_are_published_meanwhile_make_room_too():
    """In step 0 b lacks seven pages, and in that step a publishes seven that b can share."""
    scheduler = WatchedPaged(2, 64, Pages(9, 2))
    queue(scheduler, [Request([0] * 15, 2, name="a"), Request([0] * 14 + [1], 2, name="b")])
    assert run(scheduler) == ["a15", "a1 b1", "b1"]


# --- Pages: the allocator, publishing, finding, evicting ------------------------------------------

def fill(pages, tokens):
    """A block table with these tokens, whose full pages are published."""
    table = []
    pages.hold(table, pages.find(tokens))
    pages.allocate(table, pages.needed(len(tokens)) - len(table))
    for i in range(len(tokens) // pages.size):
        pages.publish(table, i, tokens[i * pages.size:(i + 1) * pages.size])
    return table


def written(pages, tokens):
    table = fill(pages, tokens)
    pages.give_back(table)
    return table


def test_the_least_recently_used_page_goes_first_and_children_before_their_parents():
    pages = Pages(4, 1)
    chain, other, last = written(pages, [1, 2]), written(pages, [8]), written(pages, [9])
    assert written(pages, [1]) == chain[:1]                # used again: now it is the youngest
    assert list(pages.free) == [chain[1], other[0], last[0], chain[0]]
    for prefix, found in ([1, 2], chain[:1]), ([8], []), ([9], []), ([1], []):
        pages.allocate([], 1)
        assert pages.find(prefix) == found                 # what is gone is not found again
    assert pages.counts["evicted_pages"] == 4 and not pages.free


def test_full_pages_are_found_from_the_beginning_until_they_are_evicted_because_none_is_free():
    pages = Pages(5, 2)
    table = written(pages, [1, 2, 3, 4, 5])
    assert pages.find([1, 2, 3, 4, 5]) == table[:2] and pages.find([1, 2, 9, 4]) == table[:1]
    assert pages.find([1]) == pages.find([3, 4]) == pages.find([2, 3, 4, 5]) == []
    other = fill(pages, [7, 7])
    assert len(pages.free) == 4
    pages.allocate(other, 2)
    assert pages.find([1, 2, 3, 4]) == table[:2] and not pages.counts["evicted_pages"]
    pages.allocate(other, 1)
    assert other[-1] == table[1] and pages.find([1, 2, 3, 4]) == table[:1]
    pages.hold([], table[:1])   # what is held is never taken
    assert not pages.free and pages.find([7, 7]) == other[:1]


class Counted(list):
    """Counts the tokens that are read by slices."""
    read = 0

    def __getitem__(self, index):
        self.read += index.stop - index.start
        return super().__getitem__(index)


def test_time_and_memory_of_a_prefix_are_linear_in_its_tokens():
    pages, tokens = Pages(625, 16), Counted(range(10_000))
    assert written(pages, tokens) == pages.find(tokens)
    assert sum(len(tokens) for _, tokens in pages.published) == 10_000
    assert tokens.read == 2 * 10_000 + 16   # published once, found once, and looked for in vain


# --- nothing is left behind -----------------------------------------------------------------------

def reachable(thing):
    """The number of objects that it holds, however deep."""
    seen, found = {}, [thing]
    while found:
        each = found.pop()
        if id(each) not in seen and not isinstance(each, (type, ModuleType, FunctionType)):
            seen[id(each)] = each
            found += gc.get_referents(each)
    return len(seen)


def serve(scheduler, number):
    """So many requests; some share a prefix, some are cancelled."""
    rng = random.Random(0)
    stems = [[rng.randrange(10) for _ in range(n)] for n in (0, 0, 16, 40)]
    queue(scheduler, [Request(rng.choice(stems) + [rng.randrange(10) for _ in range(
        rng.randint(1, 20))], rng.randint(1, 12)) for _ in range(number)])

    def cancel(step):
        for line in scheduler.waiting, scheduler.running:
            if line and rng.random() < 0.2:
                cancel_now(scheduler, rng.choice(line))

    run(scheduler, token=lambda request: rng.randrange(10), between=cancel)


@pytest.mark.parametrize("policy", SCHEDULERS)
def test_what_has_finished_leaves_nothing_behind(policy):
    """Of 300 requests, and of 3,000; but the pages that can be found may be others."""
    scheduler, counts = SCHEDULERS[policy](16, 256, Pages(24, 16)), []
    for number in 300, 2_700:
        serve(scheduler, number)
        gc.collect()
        counts.append(reachable(scheduler))
    assert counts[1] <= counts[0] + 3 * 24
    assert scheduler.counts["preemptions"] and scheduler.counts["evicted_pages"] > 1000


# --- sharing --------------------------------------------------------------------------------------

def test_generated_pages_are_found_too():
    scheduler = WatchedPaged(1, 8, Pages(8, 2))
    a, b = queue(scheduler, [Request([1, 2], 4, name="a"), Request([1, 2, 7, 7, 7], 1, name="b")])
    assert run(scheduler, token=lambda request: 7) == ["a2", "a1", "a1", "a1", "b1"]
    assert scheduler.counts["saved_tokens"] == 4   # of which a has generated the last two


def test_counts_of_preemption_by_hand():
    scheduler = WatchedPaged(2, 16, Pages(4, 2))
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


@pytest.mark.parametrize("share", [True, False])
def test_requests_that_arrive_together_share_a_common_prefix(share):
    """
    16 prompts, 32 common tokens and 5 of their own, answers of 20, 4 tokens to a page. The first
    one's prefix fills the budget of 16 twice, so the others still wait; then they find 8 pages.
    """
    scheduler = WatchedPaged(16, 16, Pages(16 * 14, 4), share)
    queue(scheduler, [Request([1] * 32 + [i % 9, i // 9, 2, 2, 2], 20, name=f"{i}:")
                      for i in range(16)])
    computed = sum(int(part.split(":")[1]) for plan in run(scheduler) for part in plan.split())
    assert computed == 32 * (1 if share else 16) + 16 * (5 + 19)
    assert scheduler.counts["shared_pages"] == 15 * 8 * share


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


class PagedEngine(RuleBasedStateMachine):
    """
    add, step, cancel and failing steps in any order. Each request gets what it would have got
    alone. The books balance at every moment, and a published page holds the keys and values of the
    tokens that its name stands for.
    """
    scheduler = None

    @initialize(size=st.integers(1, 5), policy=st.sampled_from([None, *POLICIES]),
                share=st.booleans(), max_batch=st.integers(1, 6), budget=st.integers(1, 24),
                more=st.integers(0, 6), bound=st.sampled_from([1, 2, MAX_OVERTAKEN]))
    def begin(self, size, policy, share, max_batch, budget, more, bound):
        self.requests, self.number = [], 0
        self.pages = Pages(-(-BLOCK_SIZE // size) + more, size)
        self.pool = KV(self.pages.number * size)
        self.scheduler = (WatchedFair(max_batch, budget, self.pages, policy, share, bound) if policy
                          else WatchedPaged(max_batch, budget, self.pages, share))

    @rule(stem=st.sampled_from([[], [1, 2, 3, 4, 5], [1, 2, 3, 9, 9, 9], [8, 7] * 6]),
          tails=st.lists(st.lists(st.integers(0, common.VOCAB - 1), min_size=1, max_size=8),
                         min_size=1, max_size=4),
          new=st.integers(1, 14), temperature=st.sampled_from([0.0, 1.0]),
          priority=st.integers(0, 2), delay=st.integers(0, 3))
    def add(self, stem, tails, new, temperature, priority, delay):
        """Requests with a common prefix, which arrive together."""
        arrival = max([self.number + delay, *(request.arrival for request in self.requests[-1:])])
        for n, tail in enumerate(tails[:12 - len(self.requests)], len(self.requests)):
            request, = prepare(Request(stem + tail, new, temperature, seed=n, name=f"r{n}",
                                       priority=priority, arrival=arrival), MODEL.config)
            self.requests.append(request)
            self.scheduler.add(request)

    @rule(times=st.integers(1, 4), fails_at=st.sampled_from([None, None, None, 0, 1, 2, 3]),
          cancel=st.one_of(st.none(), st.integers(0, 11)))
    @torch.inference_mode()
    def step(self, times=1, fails_at=None, cancel=None):
        """
        fails_at: the forward pass fails before this block, when those before it have written
        cancel:   this request is cancelled after each pass
        """
        to_cancel = self.requests[cancel:cancel + 1] if cancel is not None else []
        for _ in range(times):
            if not self.scheduler.busy:
                return
            plan = self.scheduler.schedule(self.number)
            self.number += 1
            if not plan:
                continue
            batch = Paged(plan, self.pool, self.pages)
            assert_writes(self.pages, batch)
            arguments = batch.tokens, batch.positions, batch.attend, batch.wanted
            if fails_at is not None:
                block = [*MODEL.h, MODEL.ln_f][fails_at]
                with (block.register_forward_pre_hook(lambda *_: 1 / 0),
                      pytest.raises(ZeroDivisionError)):
                    MODEL(*arguments)
                continue
            logits = MODEL(*arguments)
            self.scheduler.update(plan, sample(logits, batch.sampled))
            for request in to_cancel:
                cancel_now(self.scheduler, request)

    @rule(i=st.integers(0, 11))
    def cancel(self, i):
        for request in self.requests[i:i + 1]:
            cancel_now(self.scheduler, request)
            assert request.block_table is None
            assert request not in [*self.scheduler.running, *self.scheduler.waiting]

    @invariant()
    @torch.inference_mode()
    def books_are_right(self):
        assert_books(self.scheduler)
        pages = self.pages
        if pages.published:
            size = pages.size
            slots = [page * size + i for page in pages.key_of for i in range(size)]
            beginnings = [pages.beginnings[pages.name_of[page]] for page in pages.key_of]
            expected = torch.cat([keys_and_values(b)[:, -size:] for b in beginnings], dim=1)
            buffers = [b for layer in range(3) for b in (self.pool.k[layer], self.pool.v[layer])]
            held = torch.cat(buffers)[:, slots]
            assert (held - expected).abs().max() <= 1e-10 * expected.abs().max()

    def teardown(self):
        if self.scheduler is None:
            return
        work = sum(len(r.prompt) + r.max_new_tokens for r in self.requests)
        bound = self.number + 20 + (MAX_OVERTAKEN + 1) * work
        while self.scheduler.busy:
            self.step()
            self.books_are_right()
            assert self.number <= bound
        for request in self.requests:
            tokens, _, reason = common.alone(MODEL, request)
            assert request.block_table is None
            assert request.generated == tokens[:len(request.generated)]
            if request.finish_reason != "cancelled":
                assert (request.generated, request.finish_reason) == (tokens, reason)
        assert len(self.pages.free) == self.pages.number and not any(self.pages.holders)


PagedEngine.TestCase.settings = settings(max_examples=examples(120), stateful_step_count=25)
TestPagedEngine = PagedEngine.TestCase
