"""Stage 7: pages, sharing, growth, preemption. Outputs never change, only waiting times."""
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from unittest.mock import patch

import common
import pytest
import torch
from common import BLOCK_SIZE, STAGES, VOCAB, Engine, alone, assert_contract, examples, toy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

import generate_paged
from beyond import fairness
from beyond.fairness import MAX_OVERTAKEN, POLICIES, FairScheduler
from cache import KV
from experiments import overhead
from generate_paged import Paged
from model import GPTConfig, causal
from paging import PagedScheduler, Pages
from request import Request, prepare
from scheduler import Scheduler

MODEL = toy()
CONFIG = GPTConfig(block_size=64, vocab_size=10, n_layer=1, n_head=1, n_embd=2)
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


def assert_tables(scheduler):
    """After `schedule`: pages for the tokens that a request has; a due one has all it can need."""
    for request in scheduler.running:
        due = isinstance(scheduler, FairScheduler) and scheduler.is_due(request)
        tokens = request.kv_tokens if due else len(request.tokens)
        assert len(request.kv) == scheduler.pages.needed(tokens)


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


def watching(base, made):
    """A scheduler class that asserts all of the above at every step, and notes its instances."""
    class WatchedScheduler(base):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
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

    return WatchedScheduler


@contextmanager
def watched():
    """At every step of `generate`, too. Yields the schedulers that were made."""
    made = []

    class WatchedLayout(Paged):
        def lay_out(self, device):
            super().lay_out(device)
            assert_writes(made[-1].pages, self)

    with (patch.object(generate_paged, "PagedScheduler", watching(PagedScheduler, made)),
          patch.object(fairness, "FairScheduler", watching(FairScheduler, made)),
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
    index, need = st.integers(0, len(requests) - 1), common.smallest_pool(requests, size)
    cancels = draw(st.lists(st.tuples(index, index, st.integers(0, 3)), max_size=2))
    pages = st.one_of(st.none(), st.just(need), st.integers(need, 2 * need))
    knobs = dict(max_batch=draw(st.integers(1, 6)), token_budget=draw(st.integers(1, 30)),
                 pages=draw(pages), page_size=size,
                 policy=draw(st.sampled_from(list(POLICIES))),
                 share_prefixes=draw(st.booleans()))
    return requests, cancels, knobs


@settings(max_examples=examples(300), **THOROUGH)
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


@pytest.mark.parametrize("knobs, message", [
    (dict(pages=2.5), "pages must be a whole number of at least 1, not 2.5"),
    (dict(pages=9, page_size="4"), "page_size must be a whole number of at least 1, not '4'"),
    (dict(page_size=25), "page_size 25 exceeds block_size 24"),
    (dict(max_batch=0), "max_batch must be"),
    (dict(token_budget=0), "token_budget must be"),
    (dict(policy="lifo"), "policy must be one of fcfs, sjf, priority, not 'lifo'"),
])
def test_bad_knobs_are_refused(knobs, message):
    with pytest.raises(ValueError, match=message):
        PAGED(MODEL, [Request([1, 2, 3])], **knobs)


@pytest.mark.parametrize("prompt, new, need", [(9, 8, 1), (9, 9, 2), (16, 1, 1), (16, 2, 2)])
def test_room_is_exact_because_the_last_token_is_never_computed(prompt, new, need):
    def requests():
        return [Request([1, 2] * 8, 1, name="small"), Request([3] * prompt, new, name="large")]

    assert_contract(MODEL, PAGED, requests(), pages=need, page_size=16)
    if need == 2:
        message = (f"request 'large': prompt of {prompt} \\+ max_new_tokens {new} needs 2 pages of "
                   "16 tokens, pages is 1")
        with pytest.raises(ValueError, match=message):
            PAGED(MODEL, refused := requests(), pages=1, page_size=16)
        assert refused[0].generated == []   # refused before anything ran
    # no answer goes beyond the context
    assert_contract(MODEL, PAGED, [Request([1] * prompt, 10**9)], pages=2, page_size=16)


@pytest.mark.parametrize("max_batch, pages, made_of", [
    (2, None, 6 + 2),     # all that can run together have their longest answers
    (8, None, 6 + 2 + 1),
    (1, 6, 6), (1, 8, 8),
    (1, 10**12, 6 + 2 + 1),   # no more than all requests can fill
])
def test_the_size_of_the_pool(max_batch, pages, made_of):
    requests = [Request([1, 2], 2), Request([1] * 20, 9), Request([1] * 5, 3)]
    with watched() as made:
        assert_contract(MODEL, PAGED, requests, max_batch=max_batch, pages=pages, page_size=4)
    assert made[-1].pages.number == made_of


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


def test_the_victim_is_the_last_to_arrive_and_returns_to_its_place_in_the_queue():
    scheduler, names = PagedScheduler(3, 64, Pages(3, 2), share_prefixes=False), []
    scheduler.preempt = lambda request: (names.append(request.name),
                                         PagedScheduler.preempt(scheduler, request))
    requests = queue(scheduler, [Request([0] * 2, 4, name=name, arrival=arrival)
                                 for name, arrival in [("a", 0), ("b", 0), ("c", 0), ("d", 1),
                                                       ("e", 99)]])
    finish(scheduler, scheduler.schedule(0))
    scheduler.schedule(1)   # a takes c's page; then b is the last, and makes room for itself
    assert names == ["c", "b"] and scheduler.pages.available() == 1
    assert "".join(request.name for request in scheduler.waiting) == "bcde"
    run(scheduler, step=1)
    assert max(request.token_steps[-1] for request in requests[:-1]) < 99


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


def run(scheduler, step=0, token=lambda request: 0, between=lambda step: None):
    """To the end, with the books checked at every step; returns all plans, like ["A4 B1", ...]."""
    plans = []
    while between(step) or scheduler.busy:
        step = scheduler.next_step(step)
        plan = scheduler.schedule(step)
        plans.append(" ".join(f"{request.name}{n}" for request, n in plan))
        assert 0 < sum(n for _, n in plan) <= scheduler.token_budget
        assert {request for request, _ in plan} == {*scheduler.running}   # all of them go on
        if isinstance(scheduler, PagedScheduler):
            assert_books(scheduler)
            assert_tables(scheduler)
        finish(scheduler, plan, step, token)
        if isinstance(scheduler, PagedScheduler):
            assert_books(scheduler)
        step += 1
    return plans


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
    scheduler = PagedScheduler(2, 8, Pages(6, 2))
    a, b = queue(scheduler, [Request([1, 2, 3], 3, name="a"), Request([4, 5], 3, name="b")])
    assert scheduler.busy
    plan = scheduler.schedule(0)
    a.cancel()
    finish(scheduler, plan)
    assert a.generated == [0] and a.finish_reason is None and len(a.kv) == 2
    assert scheduler.busy and a.finish_reason == "cancelled" and a.kv is None
    assert_books(scheduler)
    assert {tokens for _, tokens in scheduler.pages.published} == {(1, 2), (4, 5)}
    run(scheduler, step=1)
    assert len(b.generated) == 3


def test_pages_that_no_request_gives_back_are_an_error_and_no_endless_loop():
    pages, lost = Pages(4, 4), []
    pages.allocate(lost, 2)
    scheduler = PagedScheduler(1, 8, pages)
    request, = queue(scheduler, [Request([7] * 10, 6, name="r")])
    with pytest.raises(RuntimeError, match="request 'r' has arrived at step 0, but nothing can go"):
        scheduler.schedule(0)
    pages.give_back(lost)
    run(scheduler)
    assert request.finish_reason == "length"


@settings(max_examples=examples(300), **THOROUGH)
@given(requests=streams(), max_batch=st.integers(1, 9), budget=st.integers(1, 30),
       size=st.integers(1, 6), eos=st.sampled_from([None, 0, 1]), cancels=CANCELS)
def test_with_pages_enough_it_hands_out_the_plans_of_the_scheduler(requests, max_batch, budget,
                                                                   size, eos, cancels):
    pages = sum(common.smallest_pool([request], size, block_size=64) for request in requests)
    assert (plans_of(Scheduler(max_batch, budget), requests, cancels, eos)
            == plans_of(PagedScheduler(max_batch, budget, Pages(pages, size), share_prefixes=False),
                        requests, cancels, eos))


# --- the first in the queue, when there is no room ------------------------------------------------

class Searching(PagedScheduler):
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
             for kind in (Searching, PagedScheduler)]
    assert plans[0] == plans[1]


def test_pages_that_are_published_meanwhile_make_room_too():
    """In step 0 b lacks seven pages, and in that step a publishes seven that b can share."""
    scheduler = PagedScheduler(2, 64, Pages(9, 2))
    queue(scheduler, [Request([0] * 15, 2, name="a"), Request([0] * 14 + [1], 2, name="b")])
    assert run(scheduler) == ["a15", "a1 b1", "b1"]


def test_a_request_that_found_no_room_is_searched_again_a_few_times_only():
    searches = {}
    for kind in Searching, PagedScheduler:
        scheduler = kind(4, 64, Pages(17, 4))
        a, b = queue(scheduler, [Request([1] * 8, 54, name="a"), Request([2] * 63, 1, name="b")])
        with patch.object(Pages, "find", autospec=True, side_effect=Pages.find) as find:
            plans = run(scheduler)
        assert plans[:51] == ["a8"] + ["a1"] * 50 and b.finished
        searches[kind] = find.call_count
    assert searches[Searching] > 50 and searches[PagedScheduler] <= 8


# --- Pages: the allocator, publishing, finding, evicting ------------------------------------------

@settings(max_examples=examples(300), **THOROUGH)
@given(free=st.permutations(range(12)), number=st.integers(0, 12))
def test_the_lowest_free_pages_are_taken_first(free, number):
    pages, table = Pages(12, 4), []
    assert [pages.needed(tokens) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    pages.allocate(table, 12)
    assert table == list(range(12)) and not pages.free
    pages.give_back(free[:8])   # in any order
    pages.allocate(taken := [99], min(number, 8))
    assert taken == [99, *sorted(free[:8])[:number]]   # at the end of the table


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


def test_only_full_pages_are_found_and_only_from_the_beginning():
    pages = Pages(8, 2)
    table = written(pages, [1, 2, 3, 4, 5])
    assert pages.find([1, 2, 3, 4, 5]) == table[:2] and pages.find([1, 2, 3]) == table[:1]
    assert pages.find([1]) == pages.find([3, 4]) == pages.find([2, 3, 4, 5]) == []
    assert pages.find([1, 2, 9, 4]) == table[:1]
    assert table[2] in pages.free and list(pages.kept) == [table[1], table[0]]


def test_the_least_recently_used_page_goes_first_and_children_before_their_parents():
    pages = Pages(4, 1)
    chain, other, last = written(pages, [1, 2]), written(pages, [8]), written(pages, [9])
    assert written(pages, [1]) == chain[:1]                # used again: now it is the youngest
    assert list(pages.kept) == [chain[1], other[0], last[0], chain[0]]
    for prefix, found in ([1, 2], chain[:1]), ([8], []), ([9], []), ([1], []):
        pages.evict()
        assert pages.find(prefix) == found                 # what is gone is not found again
    assert len(pages.free) == 4 and not pages.published and not pages.key_of
    assert pages.counts["evicted_pages"] == 4


def test_pages_are_evicted_only_when_none_is_free_and_held_ones_never():
    pages = Pages(4, 2)
    table, other = written(pages, [1, 2, 3, 4]), fill(pages, [7, 7])
    assert len(pages.free) == 1 and pages.available() == 3
    pages.allocate(other, 1)
    assert pages.find([1, 2, 3, 4]) == table and not pages.counts["evicted_pages"]
    pages.allocate(other, 1)
    assert other[-1] == table[1] and pages.find([1, 2, 3, 4]) == table[:1]
    assert pages.counts["evicted_pages"] == 1 and pages.available() == 1
    pages.hold(table[:1])
    assert pages.available() == 0 and pages.find([7, 7]) == other[:1]


def test_equal_tokens_computed_twice_are_published_once_and_their_chain_goes_on():
    """By two requests in one step. The second goes on behind pages that are not found."""
    pages = Pages(7, 2)
    tables = [fill(pages, [1, 2, 3, 4], share=False) for _ in range(2)]
    assert pages.find([1, 2, 3, 4]) == tables[0] and len(pages.published) == 2
    pages.allocate(tables[1], 1)
    pages.publish(tables[1], 2, [5, 6])
    assert pages.find([1, 2, 3, 4, 5, 6]) == [*tables[0], tables[1][2]]
    pages.give_back(tables[1])
    assert {*tables[1][:2]} < {*pages.free} and list(pages.kept) == tables[1][2:]
    pages.give_back(tables[0])
    assert list(pages.kept) == [tables[1][2], *tables[0][::-1]]


class Numbers(list):
    """What `name_of` must not be: the pages' numbers, plus 1."""
    def __setitem__(self, page, name):
        pass


def twins(pages):
    """The published twin of a page is evicted and its number used again, but not its child."""
    twin, table = fill(pages, [1, 2], share=False), fill(pages, [1, 2, 4, 5], share=False)
    pages.give_back(twin)
    pages.evict()
    assert pages.find([1, 2, 4, 5]) == []   # the child cannot be found without its parent
    assert fill(pages, [9, 9]) == twin
    pages.give_back(table)
    again = fill(pages, [9, 8])             # on the page that had the twin's tokens, too
    assert again == table[:1]
    return [pages.find(tokens + [4, 5]) for tokens in ([1, 2], [9, 9], [9, 8])], twin, again


def test_a_page_is_not_known_by_the_number_of_the_page_before_it():
    found, twin, again = twins(pages := Pages(4, 2))
    assert found == [[], twin, again]
    new = fill(pages, [1, 2])                                     # computed once more
    assert pages.find([1, 2, 4, 5]) == new and new not in (twin, again)
    mutant = Pages(4, 2)
    mutant.name_of = Numbers(range(1, 5))
    found, *_ = twins(mutant)
    assert max(map(len, found)) == 2   # the page with 4, 5 is found after another beginning


class Counted(list):
    """Counts the tokens that are read by slices."""
    read = 0

    def __getitem__(self, index):
        found = super().__getitem__(index)
        Counted.read += len(found)
        return found


def test_time_and_memory_of_a_prefix_are_linear_in_its_tokens():
    kept = []
    for tokens in 1_000, 10_000:
        Counted.read = 0
        pages = overhead.publish_and_find(Counted(range(tokens)))
        full = tokens // 16 * 16
        assert sum(len(tokens) for _, tokens in pages.published) == full
        assert Counted.read == 2 * full   # published once, found once
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


def test_a_leak_is_found():
    scheduler, tables = PagedScheduler(16, 256, Pages(24, 16)), []
    scheduler.pages.tables = tables
    scheduler.free = lambda request: (tables.append(request.kv),
                                      PagedScheduler.free(scheduler, request))
    assert grown(scheduler) == {"scheduler.pages.tables"}


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
    16 prompts, 128 common tokens and 5 of their own, answers of 20, 16 tokens to a page. In step 1
    the first one's last 69 tokens fill the budget of 64, so the others still wait; in step 2 they
    find 8 pages. Each needs two more, for 5 + 20 tokens of which the last is never computed.
    """
    model, found = toy(block_size=256), {}
    common = [(7 * i + i * i) % VOCAB for i in range(128)]
    for share in True, False:
        requests = [Request(common + [(3 * i + j) % VOCAB for j in range(5)], 20, seed=i)
                    for i in range(16)]
        held = []
        with watched() as made:
            trace = PAGED(model, requests, max_batch=16, share_prefixes=share,
                          on_token=lambda *_: held.append(sum(map(bool, made[-1].pages.holders))))
        assert all(request.generated == alone(model, request)[0] for request in requests)
        found[share] = (max(held), len(trace.passes), sum(p.useful for p in trace.passes),
                        trace.counts["shared_pages"], trace.counts["preemptions"])
    # 15 of 16 find all of it
    assert found[True] == (8 + 16 * 2, 23, 16 * (5 + 19) + 128, 15 * 8, 0)
    assert found[False] == (94, 56, 16 * (128 + 5 + 19), 0, 0)


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
            self.scheduler = watching(FairScheduler, [])(max_batch, budget, pages, policy, share,
                                                         bound)
        else:
            self.scheduler = watching(PagedScheduler, [])(max_batch, budget, pages, share)

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
