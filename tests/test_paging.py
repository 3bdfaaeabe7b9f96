"""Stage 7: pages, sharing, growth, preemption. Outputs never change, only waiting times."""
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from unittest.mock import patch

import common
import pytest
import torch
from common import BLOCK_SIZE, STAGES, Engine, assert_contract, examples, finish, queue, run, toy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

import generate_paged
from beyond import fairness
from beyond.fairness import MAX_OVERTAKEN, POLICIES, FairScheduler
from cache import KV
from experiments import overhead
from generate_paged import Paged
from model import causal
from paging import PagedScheduler, Pages
from request import Request, prepare
from scheduler import Scheduler

MODEL = toy()
PAGED = STAGES["paged"]
THOROUGH = dict(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


# --- the books: what must hold of every pool at every moment --------------------------------------

def assert_books(scheduler):
    """Each page is free, held or kept, exactly once, and all tables, keys and names agree."""
    pages, running, waiting = scheduler.pages, scheduler.running, scheduler.waiting
    held = Counter(page for request in running for page in request.kv)
    assert [held[page] for page in range(pages.number)] == pages.holders
    assert sorted([*pages.free, *held, *pages.kept]) == list(range(pages.number))
    assert all(pages.free[(i - 1) // 2] < pages.free[i] for i in range(1, len(pages.free)))
    assert all(len(set(request.kv)) == len(request.kv) for request in running)
    assert all(request.kv is None and request.computed == 0 for request in waiting)
    assert {page: key for key, page in pages.published.items()} == pages.key_of
    assert len(pages.published) == len(pages.key_of)
    assert pages.kept.keys() <= pages.key_of.keys() <= {*held, *pages.kept}
    assert_names(scheduler)
    if isinstance(scheduler, FairScheduler):
        assert list(waiting) == sorted(waiting, key=scheduler.rank.get)
        assert scheduler.rank.keys() == {*running, *waiting}
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
            page = request.kv[end // pages.size - 1]
            assert beginnings[pages.name_of[page]] == tuple(request.tokens[:end])


def assert_writes(pages, batch):
    """The pass writes each new token to its own slot, in pages that no other request can read."""
    size = pages.size
    slots = [request.kv[p // size] * size + p % size for request, n in batch.plan
             for p in range(request.computed, request.computed + n)]
    assert batch.slot_mapping.tolist() == slots and len(set(slots)) == len(slots)
    for page in {slot // size for slot in slots}:
        assert pages.holders[page] == 1 and page not in pages.key_of
    buffers = [*batch.pool.k.values(), *batch.pool.v.values()]
    assert {buffer.size(-2) for buffer in buffers} <= {batch.pool.capacity}
    assert batch.pool.capacity == pages.number * size


class Watched:
    """Of a scheduler: asserts all of the above at every step. `last` is the one made last."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        Watched.last = self

    def schedule(self, step):
        plan = super().schedule(step)
        assert not any(request.finished for request, _ in plan)
        assert_books(self)
        for request in self.running:   # pages for the tokens it has; if due, for all it can need
            due = isinstance(self, FairScheduler) and self.is_due(request)
            tokens = request.kv_tokens if due else len(request.tokens)
            assert len(request.kv) == self.pages.needed(tokens)
        return plan

    def update(self, plan, tokens):
        super().update(plan, tokens)
        assert_books(self)


class WatchedPaged(Watched, PagedScheduler):
    pass


class WatchedFair(Watched, FairScheduler):
    pass


@contextmanager
def watched():
    """The same within `generate`."""
    class WatchedLayout(Paged):
        def lay_out(self, device):
            super().lay_out(device)
            assert_writes(Watched.last.pages, self)

    with (patch.object(generate_paged, "PagedScheduler", WatchedPaged),
          patch.object(fairness, "FairScheduler", WatchedFair),
          patch.object(generate_paged, "Paged", WatchedLayout)):
        yield
    assert Watched.last.running == [] and not any(Watched.last.pages.holders)


# --- the contract, with all knobs -----------------------------------------------------------------

@settings(max_examples=examples(300), **THOROUGH)
@given(workload=common.workloads())
def test_contract(workload):
    requests = [replace(request) for request in workload.requests]
    with watched():
        trace = assert_contract(MODEL, PAGED, requests, workload.cancels,
                                **workload.knobs("paged"))
    assert trace.counts is Watched.last.counts
    computed = sum(p.useful for p in trace.passes)
    assert computed + trace.counts["saved_tokens"] >= sum(
        len(r.tokens) - 1 for r in requests if r.generated)
    assert bool(sum(p.recomputed for p in trace.passes)) <= bool(trace.counts["preemptions"])
    if workload.pages is None:   # enough for all that can run at the same time
        assert not trace.counts["preemptions"]
    if not workload.share_prefixes:
        assert not Watched.last.pages.published and not trace.counts["shared_pages"]


@pytest.mark.parametrize("knobs, message", [
    (dict(pages=2.5), "pages must be a whole number of at least 1, not 2.5"),
    (dict(pages=9, page_size="4"), "page_size must be a whole number of at least 1, not '4'"),
    (dict(page_size=25), "page_size 25 exceeds block_size 24"),
    (dict(policy="lifo"), "policy must be one of fcfs, sjf, priority, not 'lifo'"),
])
def test_bad_knobs_are_refused(knobs, message):
    with pytest.raises(ValueError, match=message):
        PAGED(MODEL, [Request([1, 2, 3])], **knobs)


@pytest.mark.parametrize("prompt, new, need", [(9, 8, 1), (9, 9, 2), (16, 1, 1), (16, 2, 2)])
def test_room_is_exact_because_the_last_token_is_never_computed(prompt, new, need):
    requests = [Request([1, 2] * 8, 1, name="small"), Request([3] * prompt, new, name="large")]
    if need == 2:
        message = (f"request 'large': prompt of {prompt} \\+ max_new_tokens {new} needs 2 pages of "
                   "16 tokens, pages is 1")
        with pytest.raises(ValueError, match=message):
            PAGED(MODEL, requests, pages=1, page_size=16)
        assert requests[0].generated == []   # refused before anything ran
    requests[1].max_new_tokens = 10**9 if need == 2 else new   # no answer exceeds the context
    assert_contract(MODEL, PAGED, requests, pages=need, page_size=16)


@pytest.mark.parametrize("max_batch, pages, made_of", [
    (2, None, 6 + 2), (8, None, 6 + 2 + 1),   # all that can run together have their longest answers
    (1, 6, 6), (1, 8, 8), (1, 10**12, 6 + 2 + 1),   # no more than all requests can fill
])
def test_the_size_of_the_pool(max_batch, pages, made_of):
    requests = [Request([1, 2], 2), Request([1] * 20, 9), Request([1] * 5, 3)]
    with watched():
        assert_contract(MODEL, PAGED, requests, max_batch=max_batch, pages=pages, page_size=4)
    assert Watched.last.pages.number == made_of


# --- storms: more work than memory ----------------------------------------------------------------

def test_pages_admit_more_and_preempt_where_reserved_room_waits():
    """Six requests that together need twice what there is."""
    for stage, together, knobs in (("ragged_varlen", 3, dict(max_kv_tokens=48)),   # 15 each
                                   ("paged", 6, dict(pages=12, page_size=4))):
        requests = [Request([i + 1] * 4, 12, 1.0, seed=i) for i in range(6)]
        trace = assert_contract(MODEL, STAGES[stage], requests, **knobs)
        assert max(len(p.work) for p in trace.passes) == together
        assert bool(trace.counts.get("preemptions")) == (stage == "paged")
        assert bool(sum(p.recomputed for p in trace.passes)) == (stage == "paged")


# --- a scheduler alone, without a model -----------------------------------------------------------

@st.composite
def streams(draw):
    """Requests for a scheduler alone: their tokens are 0 and 1, so that many prefixes are equal."""
    prompt = st.one_of(st.lists(st.integers(0, 1), min_size=1, max_size=30),
                       st.integers(1, 30).map(lambda n: [0] * n))
    return [Request(draw(prompt), draw(st.integers(1, 20)), priority=draw(st.integers(0, 3)),
                    arrival=draw(st.integers(0, 20)))
            for _ in range(draw(st.integers(1, 9)))]


CANCELS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.booleans()), max_size=3)


def plans_of(scheduler, requests, cancels=(), eos=None):
    """Of copies of these requests. cancels: (request, step, at once: if not, it gets a mark)."""
    mine = queue(scheduler, [replace(request, eos_token=eos) for request in requests])

    def cancel(step):
        for i, when, at_once in cancels:
            if when == step and i < len(mine) and not mine[i].finished:
                scheduler.cancel(mine[i]) if at_once else mine[i].cancel()

    return run(scheduler, 0, lambda request: len(request.tokens) // 7 % 2, cancel)


def test_what_a_pass_computed_for_a_cancelled_request_counts():
    """A mark that is set in the middle of a step: it leaves afterwards, and its pages are found."""
    scheduler = WatchedPaged(2, 8, Pages(6, 2))
    a, b = queue(scheduler, [Request([1, 2, 3], 3, name="a"), Request([4, 5], 3, name="b")])
    plan = scheduler.schedule(0)
    a.cancel()
    finish(scheduler, plan)
    assert a.generated == [0] and a.finish_reason is None and len(a.kv) == 2
    assert scheduler.busy and a.finish_reason == "cancelled" and a.kv is None
    assert {tokens for _, tokens in scheduler.pages.published} == {(1, 2), (4, 5)}
    assert run(scheduler, step=1) == ["b1", "b1"]


@settings(max_examples=examples(300), **THOROUGH)
@given(requests=streams(), max_batch=st.integers(1, 9), budget=st.integers(1, 30),
       size=st.integers(1, 6), eos=st.sampled_from([None, 0, 1]), cancels=CANCELS)
def test_with_pages_enough_it_hands_out_the_plans_of_the_scheduler(requests, max_batch, budget,
                                                                   size, eos, cancels):
    pages = sum(common.smallest_pool([request], size, block_size=64) for request in requests)
    assert (plans_of(Scheduler(max_batch, budget), requests, cancels, eos)
            == plans_of(WatchedPaged(max_batch, budget, Pages(pages, size), share_prefixes=False),
                        requests, cancels, eos))


# --- the first in the queue, when there is no room ------------------------------------------------

class Searching(WatchedPaged):
    """A scheduler that searches the published pages again in every step."""
    refused = property(lambda self: (None, 0), lambda self, refused: None)


@settings(max_examples=examples(600), **THOROUGH)
@given(data=st.data(), requests=streams(), max_batch=st.integers(1, 8), budget=st.integers(1, 30),
       size=st.integers(1, 4), cancels=CANCELS)
def test_a_request_that_found_no_room_is_admitted_as_soon_as_it_fits(data, requests, max_batch,
                                                                     budget, size, cancels):
    need = common.smallest_pool(requests, size, block_size=64)
    number = need + data.draw(st.integers(0, need))
    plans = [plans_of(kind(max_batch, budget, Pages(number, size)), requests, cancels)
             for kind in (Searching, WatchedPaged)]
    assert plans[0] == plans[1]


def test_pages_that_are_published_meanwhile_make_room_too():
    """In step 0 b lacks seven pages, and in that step a publishes seven that b can share."""
    scheduler = WatchedPaged(2, 64, Pages(9, 2))
    queue(scheduler, [Request([0] * 15, 2, name="a"), Request([0] * 14 + [1], 2, name="b")])
    assert run(scheduler) == ["a15", "a1 b1", "b1"]


@pytest.mark.parametrize("kind, least, most", [(Searching, 51, 99), (WatchedPaged, 1, 8)])
def test_a_request_that_found_no_room_is_searched_again_a_few_times_only(kind, least, most):
    scheduler = kind(4, 64, Pages(17, 4))
    queue(scheduler, [Request([1] * 8, 54, name="a"), Request([2] * 63, 1, name="b")])
    with patch.object(Pages, "find", autospec=True, side_effect=Pages.find) as find:
        assert run(scheduler)[:51] == ["a8"] + ["a1"] * 50
    assert least <= find.call_count <= most


# --- Pages: the allocator, publishing, finding, evicting ------------------------------------------

def test_the_lowest_free_pages_are_taken_first():
    pages, table = Pages(8, 4), []
    pages.allocate(table, 8)
    assert table == list(range(8)) and not pages.free
    pages.give_back([4, 1, 7, 2, 5])
    pages.allocate(taken := [99], 4)
    assert taken == [99, 1, 2, 4, 5]   # at the end of the table


def fill(pages, tokens, share=True):
    """A block table with these tokens, whose full pages are published."""
    table = pages.find(tokens) if share else []
    pages.hold(table)
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
    assert list(pages.kept) == [chain[1], other[0], last[0], chain[0]]
    for prefix, found in ([1, 2], chain[:1]), ([8], []), ([9], []), ([1], []):
        pages.evict()
        assert pages.find(prefix) == found                 # what is gone is not found again
    assert pages.counts["evicted_pages"] == len(pages.free) == 4


def test_full_pages_are_found_from_the_beginning_until_they_are_evicted_because_none_is_free():
    pages = Pages(5, 2)
    table = written(pages, [1, 2, 3, 4, 5])
    assert pages.find([1, 2, 3, 4, 5]) == table[:2] and pages.find([1, 2, 3]) == table[:1]
    assert pages.find([1]) == pages.find([3, 4]) == pages.find([2, 3, 4, 5]) == []
    assert pages.find([1, 2, 9, 4]) == table[:1]
    other = fill(pages, [7, 7])
    assert len(pages.free) == 2 and pages.available() == 4
    pages.allocate(other, 2)
    assert pages.find([1, 2, 3, 4]) == table[:2] and not pages.counts["evicted_pages"]
    pages.allocate(other, 1)
    assert other[-1] == table[1] and pages.find([1, 2, 3, 4]) == table[:1]
    assert pages.counts["evicted_pages"] == 1 and pages.available() == 1
    pages.hold(table[:1])   # what is held is never evicted
    assert pages.available() == 0 and pages.find([7, 7]) == other[:1]


def test_equal_tokens_computed_twice_are_published_once_and_their_chain_goes_on():
    """By two requests in one step. The second goes on behind pages that are not found."""
    pages = Pages(7, 2)
    tables = [fill(pages, tokens, share=False) for tokens in ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6])]
    assert pages.find([1, 2, 3, 4]) == tables[0] and len(pages.published) == 3
    assert pages.find([1, 2, 3, 4, 5, 6]) == [*tables[0], tables[1][2]]
    pages.give_back(tables[1])
    assert {*tables[1][:2]} < {*pages.free} and list(pages.kept) == tables[1][2:]
    pages.give_back(tables[0])
    assert list(pages.kept) == [tables[1][2], *tables[0][::-1]]


class Counted(list):
    """Counts the tokens that are read by slices."""
    read = 0

    def __getitem__(self, index):
        self.read += index.stop - index.start
        return super().__getitem__(index)


def test_time_and_memory_of_a_prefix_are_linear_in_its_tokens():
    kept = []
    for number in 1_000, 10_000:
        pages = overhead.publish_and_find(tokens := Counted(range(number)))
        full = number // 16 * 16
        assert sum(len(tokens) for _, tokens in pages.published) == full
        assert tokens.read == 2 * full   # published once, found once
        kept.append(overhead.size(pages))
    assert 8 < kept[1] / kept[0] < 12


# --- nothing is left behind -----------------------------------------------------------------------

def grown(scheduler):
    """Containers that hold more after 3,000 requests than after 300; twice, all have finished."""
    sizes = []
    for number in 300, 2_700:
        for _ in overhead.serve(scheduler, number):
            pass
        sizes.append(overhead.held(scheduler))
    few, many = sizes
    pool = scheduler.pages.number * (scheduler.pages.size + 3)   # each page's key
    bounded = "scheduler.pages.", "scheduler.refused."           # one refused request may remain
    return {path for path, n in many.items()
            if n > (pool if path.startswith(bounded) else few[path])}


def test_what_has_finished_leaves_nothing_behind():
    scheduler = PagedScheduler(16, 256, Pages(24, 16))
    assert grown(scheduler) == set()
    assert scheduler.counts["preemptions"] > 20 and scheduler.counts["evicted_pages"] > 1000


# --- sharing --------------------------------------------------------------------------------------

def test_pages_are_published_after_the_step_that_computed_them():
    scheduler = WatchedPaged(4, 8, Pages(8, 2))
    a, b, c = queue(scheduler, [Request([1, 2, 3, 4], 3, name=name, arrival=arrival)
                                for name, arrival in [("a", 0), ("b", 0), ("c", 1)]])
    plan = scheduler.schedule(0)
    assert plan == [(a, 4), (b, 4)] and not scheduler.pages.published   # the same step: nothing yet
    finish(scheduler, plan)
    assert scheduler.schedule(1) == [(a, 1), (b, 1), (c, 2)]
    assert c.kv[0] == a.kv[0] and scheduler.pages.holders[a.kv[0]] == 2   # the same page, no copy
    assert not {*c.kv[1:]} & {*a.kv, *b.kv}   # the last page of a prompt is never shared
    assert scheduler.counts["shared_pages"] == 1 and scheduler.counts["saved_tokens"] == 2


def test_generated_pages_are_found_too():
    scheduler = WatchedPaged(1, 8, Pages(8, 2))
    a, b = queue(scheduler, [Request([1, 2], 4, name="a"), Request([1, 2, 7, 7, 7], 1, name="b")])
    assert run(scheduler, token=lambda request: 7) == ["a2", "a1", "a1", "a1", "b1"]
    assert scheduler.counts["saved_tokens"] == 4   # of which a has generated the last two


def test_counts_of_sharing_and_eviction_by_hand():
    scheduler = WatchedPaged(1, 16, Pages(6, 2))
    queue(scheduler, [Request([1, 2, 3, 4, 5], 1, name="a"),       # leaves 1 2 and 3 4
                      Request([1, 2, 3, 4, 6], 1, name="b"),       # finds both
                      Request([1, 2, 9], 1, name="c"),             # finds the first
                      Request([7] * 11, 1, name="d"),              # needs all six pages
                      Request([1, 2, 3], 1, name="e")])            # finds nothing any more
    assert run(scheduler) == ["a5", "b1", "c1", "d11", "e3"]
    # d leaves five full pages and a free one; e needs two
    assert dict(scheduler.counts) == dict(shared_pages=3, saved_tokens=6, evicted_pages=3)


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


# --- where keys are read and written --------------------------------------------------------------

@pytest.mark.parametrize("table, slots, copied", [
    ([1, 2, 3], [2, 3, 4, 5, 6], [0, 0]),       # neighbours: a view
    ([4, 0, 2], [8, 9, 0, 1, 4], [3, 5]),       # scattered: all three, then five keys are gathered
    ([1, 2, 4], [2, 3, 4, 5, 8], [0, 5]),       # neighbours as far as the first chunk goes
    ([3, 2, 1], [6, 7, 4, 5, 2], [3, 5]),       # neighbours, but in the wrong order
])
@torch.inference_mode()
def test_scattered_pages_are_gathered_and_neighbours_are_not(table, slots, copied):
    pages, pool, prompt, written = Pages(5, 2), KV(5 * 2), [5, 1, 7, 7, 2], []
    request, = prepare(Request(prompt, 4), MODEL.config)
    request.kv = table
    for n, keys in zip((3, 2), copied):   # two chunks
        batch = Paged([(request, n)], pool, pages)
        logits = MODEL(batch.tokens, batch.positions, batch.attend, batch.rows)
        request.computed += n
        written += batch.slot_mapping.tolist()
        # k and v, 3 layers, 15 wide, float64
        assert batch.cost()["copied_bytes"] == keys * 2 * 3 * 15 * 8
    assert written == slots
    reference = MODEL(torch.tensor([prompt]))[0, -1]
    assert (logits[0] - reference).abs().max() <= 1e-10 * reference.abs().max()
    keys, values = batch.read(0, 0)
    shares = keys.untyped_storage().data_ptr() == pool.k[0].untyped_storage().data_ptr()
    assert shares == (copied[-1] == 0) and keys.shape == values.shape == (3, 5, 5)


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
    published page holds the keys and values of the tokens that its name stands for.
    """
    model = MODEL

    @initialize(size=st.integers(1, 5), policy=st.sampled_from([None, *POLICIES]),
                share=st.booleans(), max_batch=st.integers(1, 6), budget=st.integers(1, 24),
                more=st.integers(0, 6), bound=st.sampled_from([1, 2, MAX_OVERTAKEN]))
    def begin(self, size, policy, share, max_batch, budget, more, bound):
        pages = Pages(-(-BLOCK_SIZE // size) + more, size)
        self.pool, self.bound = KV(pages.number * size), bound
        if policy:
            self.scheduler = WatchedFair(max_batch, budget, pages, policy, share, bound)
        else:
            self.scheduler = WatchedPaged(max_batch, budget, pages, share)

    def lay_out(self, plan):
        batch = Paged(plan, self.pool, self.scheduler.pages)
        assert_writes(self.scheduler.pages, batch)
        return batch

    @invariant()
    @torch.inference_mode()
    def books_are_right(self):
        self.scheduler.busy   # cancelled requests leave
        assert_books(self.scheduler)
        pages = self.scheduler.pages
        if pages.published:
            size = pages.size
            slots = [page * size + i for page in pages.key_of for i in range(size)]
            beginnings = [pages.beginnings[pages.name_of[page]] for page in pages.key_of]
            expected = torch.cat([keys_and_values(b)[:, -size:] for b in beginnings], dim=1)
            buffers = [b for layer in range(3) for b in (self.pool.k[layer], self.pool.v[layer])]
            held = torch.cat(buffers)[:, slots]
            assert (held - expected).abs().max() <= 1e-10 * expected.abs().max()

    def teardown(self):
        super().teardown()
        if self.scheduler:
            pages = self.scheduler.pages
            assert pages.available() == pages.number and not any(pages.holders)


PagedEngine.TestCase.settings = settings(max_examples=examples(120), stateful_step_count=25,
                                         **THOROUGH)
TestPagedEngine = PagedEngine.TestCase
