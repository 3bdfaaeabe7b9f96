"""Stage 7: pages, sharing, growth, preemption. Outputs never change, only waiting times."""
import gc
import random
from dataclasses import replace
from functools import lru_cache
from itertools import chain, repeat
from types import FunctionType, ModuleType

import pytest
import torch
from common import (
    STAGES,
    alone,
    assert_books,
    cancel_now,
    checked,
    examples,
    queue,
    run,
    smallest_pool,
    toy,
    workloads,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from beyond.fairness import SCHEDULERS
from cache import KV
from generate_paged import Paged
from model import causal, sample
from paging import PagedScheduler, Pages
from request import Request

MODEL = toy()
PAGED = STAGES["paged"]


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


# --- golden plans ---------------------------------------------------------------------------------

@pytest.mark.parametrize("limits, pages, requests, expected, counts", [
    # in step 0 b lacks seven pages, and in that step a publishes seven that b can share
    ((2, 64), (9, 2), {"a": (15, 2), "b": ([0] * 14 + [1], 2)}, ["a15", "a1 b1", "b1"],
     dict(shared_pages=7, saved_tokens=14)),
    # generated pages are found too: a has generated two of the four tokens that b finds
    ((1, 8), (8, 2), {"a": ([1, 2], 4), "b": ([1, 2, 7, 7, 7], 1)}, ["a2", "a1", "a1", "a1", "b1"],
     dict(shared_pages=2, saved_tokens=4)),
    # a published prompt leaves a query: two full pages of four hold it
    ((1, 8), (8, 4), {"a": (8, 2), "b": (8, 2)}, ["a8", "a1", "b4", "b1"],
     dict(shared_pages=1, saved_tokens=4)),
    ((2, 16), (4, 2), {"a": ([1, 1], 5), "b": ([2, 2], 5)},
     ["a2 b2", "a1 b1", "a1 b1",   # two pages each, and all are full
      "a1",                        # b makes room; its second page is taken at once
      "a1",                        # 7 tokens, 6 of them computed: a is done
      "b3",                        # 5 tokens, of which b finds the first page again
      "b1"], dict(preemptions=1, shared_pages=1, saved_tokens=2, evicted_pages=3))])
def test_plans_and_counts(limits, pages, requests, expected, counts):
    scheduler = PagedScheduler(*limits, Pages(*pages))
    assert run(scheduler, requests, lambda request: 7) == expected
    assert {name: n for name, n in scheduler.counts.items() if n} == counts


# --- Pages by themselves --------------------------------------------------------------------------

def written(pages, tokens):
    """A block table with these tokens, whose full pages are published; it has been given back."""
    table = []
    pages.hold(table, pages.find(tokens))
    pages.allocate(table, pages.needed(len(tokens)) - len(table))
    for i in range(len(tokens) // pages.size):
        pages.publish(table, i, tokens[i * pages.size:(i + 1) * pages.size])
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


@pytest.mark.parametrize("policy", SCHEDULERS)
def test_what_has_finished_leaves_nothing_behind(policy):
    """Of 100 requests, and of 1,000; but the pages that can be found may be others."""
    scheduler, rng, counts = SCHEDULERS[policy](16, 96, Pages(24, 6)), random.Random(0), []
    stems = [[rng.randrange(10) for _ in range(n)] for n in (0, 0, 6, 14)]
    for number in 100, 900:   # some share a prefix, some are cancelled
        requests = [Request(rng.choice(stems) + [rng.randrange(10) for _ in range(
            rng.randint(1, 9))], rng.randint(1, 12)) for _ in range(number)]
        cancel = [(rng.randrange(number // 3), n) for n in range(0, number, 9)]
        run(scheduler, requests, lambda request: rng.randrange(10), cancel)
        del requests
        vars(scheduler.pages).pop("beginnings")   # what `assert_books` has seen
        gc.collect()
        counts.append(reachable(scheduler))
    assert counts[1] <= counts[0] + 3 * 24
    assert scheduler.counts["preemptions"] and scheduler.counts["evicted_pages"] > 300


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


def assert_writes(batch):
    """The pass writes each new token to its own slot, in pages that no other request can read."""
    pages, size = batch.pages, batch.pages.size
    slots = [request.block_table[p // size] * size + p % size for request, n in batch.plan
             for p in range(request.computed, request.computed + n)]
    assert batch.slot_mapping.tolist() == slots and len(set(slots)) == len(slots)
    for page in {slot // size for slot in slots}:
        assert pages.holders[page] == 1 and page not in pages.key_of
    for buffer in (*batch.pool.k.values(), *batch.pool.v.values()):
        assert buffer.size(-2) == batch.pool.capacity == pages.number * size


def assert_published(batch):
    """A published page holds the keys and values of the tokens that its name stands for."""
    pages, pool, size = batch.pages, batch.pool, batch.pages.size
    if pages.published:
        slots = [page * size + i for page in pages.key_of for i in range(size)]
        beginnings = [pages.beginnings[pages.name_of[page]] for page in pages.key_of]
        expected = torch.cat([keys_and_values(b)[:, -size:] for b in beginnings], dim=1)
        held = torch.cat([b for layer in range(3) for b in (pool.k[layer], pool.v[layer])])
        assert (held[:, slots] - expected).abs().max() <= 1e-10 * expected.abs().max()


NONE = st.none()


@settings(max_examples=examples(400))
@given(case=workloads(), events=st.lists(max_size=30, elements=st.tuples(
    st.one_of(NONE, NONE, st.integers(0, 3)), st.one_of(NONE, NONE, st.integers(0, 6)))))
@torch.inference_mode()
def test_every_step_even_if_some_fail_and_requests_are_cancelled(case, events):
    """
    Stage 7's loop. The books balance at every step, and each request gets what it would have got
    alone, as far as it comes.

    events: for each step, the block before which its pass fails, when those before it have
            written; and the request that is cancelled after it
    """
    (requests, pressure), step = case, 0
    size = pressure["page_size"]
    pages = Pages(pressure["pages"] or smallest_pool(requests, size) + 3, size)
    scheduler = pressure["policy"](pressure["max_batch"], pressure["token_budget"], pages,
                                   share_prefixes=pressure["share_prefixes"])
    pool, requests = KV(pages.number * size), queue(scheduler, [*map(replace, requests)])
    for fails_at, cancelled in chain(events, repeat((None, None))):
        if not scheduler.busy:
            break
        step = scheduler.next_step(step)
        plan = checked(scheduler, step)
        batch = Paged(plan, pool, pages)
        assert_writes(batch)
        arguments = batch.tokens, batch.positions, batch.attend, batch.wanted
        if fails_at is None:
            scheduler.update(plan, sample(MODEL(*arguments), batch.sampled))
        else:
            block = [*MODEL.h, MODEL.ln_f][fails_at]
            with (block.register_forward_pre_hook(lambda *_: 1 / 0),
                  pytest.raises(ZeroDivisionError)):
                MODEL(*arguments)
        for request in requests[cancelled:cancelled + 1] if cancelled is not None else ():
            cancel_now(scheduler, request)
        assert_books(scheduler)
        assert_published(batch)
        step += 1
    for request in requests:
        tokens, _, reason = alone(MODEL, request)
        assert request.block_table is None
        assert request.generated == tokens[:len(request.generated)]
        assert request.finish_reason in (reason, "cancelled")
        assert request.finish_reason == "cancelled" or request.generated == tokens
    assert len(pages.free) == pages.number and not any(pages.holders)
