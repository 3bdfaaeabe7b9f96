"""
Pages: in whose tables they are, what is in them, and their names. Outputs never change, only
waiting times (test_scheduler.py).
"""
import sys
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from itertools import chain, repeat

import common
import pytest
import torch
from common import POOLED, STAGES, checked, examples, queue, smallest_pool, toy, workloads
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import KV
from generate_paged import Paged
from generate_prefix import PrefixScheduler, page_hash
from lab.server.engine import ThreadedEngine
from model import GPTConfig, causal, sample
from paging import PagedScheduler, PagePool
from request import Request, indices_due, prepare

MODEL = toy()


def test_a_context_may_be_shorter_than_a_default_page():
    model, requests = toy(block_size=8), [Request([1, 2], 2), Request([3])]
    common.assert_contract(model, STAGES["paged"], requests)
    assert ThreadedEngine(model).pool.page_size == 16


@pytest.mark.parametrize("stage", POOLED)
@pytest.mark.parametrize("max_batch, pages, made_of", [
    (2, None, 6 + 2), (8, None, 6 + 2 + 1),   # all that can run together have their longest answers
    (1, 6, 6), (1, 8, 8), (1, 10**12, 6 + 2 + 1),   # no more than all requests can fill
])
def test_the_size_of_the_pool(stage, max_batch, pages, made_of):
    def made(*limits):   # in place of a scheduler, and before there is a pool: it might be huge
        raise InterruptedError(limits)

    requests = [Request([1, 2], 2), Request([1] * 20, 9), Request([1] * 5, 3)]
    with pytest.raises(InterruptedError) as stopped:
        STAGES[stage](MODEL, requests, max_batch, 7, pages, page_size=4, scheduler_class=made)
    assert stopped.value.args == ((max_batch, 7, made_of, 4),)


# --- what a kernel is given -----------------------------------------------------------------------

def test_the_four_tensors_of_the_docstring():
    A, B = Request([1] * 9, 5), Request([2] * 3)
    A.generated, A.computed, A.block_table, B.block_table = [3], 9, [0, 2, 3], [1]
    batch = Paged([(A, 1), (B, 3)], KV(20), PagePool(5, 4))
    assert batch.query_start_loc.tolist() == [0, 1, 4] and batch.seq_lens.tolist() == [10, 3]
    assert batch.block_table.tolist() == [[0, 2, 3], [1, 0, 0]]
    assert batch.slot_mapping.tolist() == [13, 4, 5, 6]


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


def assert_writes(batch, running):
    """
    The pass writes each new token to its own slot. The pages that it fills can be found, and no
    other page that it writes to is in another table.
    """
    size = batch.pool.page_size
    slots = [request.block_table[p // size] * size + p % size for request, n in batch.plan
             for p in range(request.computed, request.computed + n)]
    assert batch.slot_mapping.tolist() == slots and len(set(slots)) == len(slots)
    tables = Counter(page for request in running for page in request.block_table)
    for page in {slot // size for slot in slots}:
        filled = (page + 1) * size - 1 in slots
        assert tables[page] == 1 or filled
        assert not hasattr(batch.pool, "hash_of") or (page in batch.pool.hash_of) == filled


def assert_held(batch, running):
    """The pages of a request hold the keys and values of the tokens that it has computed."""
    kv, size = batch.kv, batch.pool.page_size
    for request in running:
        if n := request.computed:
            slots = [request.block_table[p // size] * size + p % size for p in range(n)]
            kept = torch.cat([b[:, slots] for layer in range(3)
                              for b in (kv.k[layer], kv.v[layer])])
            expected = keys_and_values(tuple(request.slice(0, n)))
            assert (kept - expected).abs().max() <= 1e-10 * expected.abs().max()


NONE = st.none()
EVENTS = st.lists(max_size=30, elements=st.tuples(
    st.one_of(NONE, NONE, st.integers(0, 3)), st.one_of(NONE, NONE, st.integers(0, 6))))


@settings(max_examples=examples(400))
@given(case=workloads(), share=st.sampled_from([True, True, False]), events=EVENTS)
@torch.inference_mode()
def test_every_step_even_if_some_fail_and_requests_are_cancelled(case, share, events):
    every_step(case, share, events)


def every_step(case, share, events):
    """
    The loop of paged and prefix. What holds of the pages holds at every step, and each request gets
    what it would have got alone, as far as it comes.

    events: for each step, the block before which its pass fails, when those before it have
            written; and the request that is cancelled after it
    """
    (requests, pressure), step = case, 0
    size = pressure["page_size"]
    number = pressure["pages"] or smallest_pool(requests, size) + 3
    kind = pressure["scheduler_class"] if share else PagedScheduler
    scheduler = kind(pressure["max_batch"], pressure["token_budget"], number, size)
    kv, requests = KV(number * size), queue(scheduler, [*map(replace, requests)])
    for fails_at, cancelled in chain(events, repeat((None, None))):
        if not scheduler.busy:
            break
        step = scheduler.next_step(step)
        plan = checked(scheduler, step)
        batch = Paged(plan, kv, scheduler.pool)
        assert_writes(batch, scheduler.running)
        arguments = batch.tokens, batch.positions, batch.attend, batch.wanted
        if fails_at is None:
            common.update(scheduler, plan, sample(MODEL(*arguments), batch.sampled))
        else:
            block = [*MODEL.h, MODEL.ln_f][fails_at]
            with (block.register_forward_pre_hook(lambda *_: 1 / 0),
                  pytest.raises(ZeroDivisionError)):
                MODEL(*arguments)
            if share:
                scheduler.undo(plan)
        for request in requests[cancelled:cancelled + 1] if cancelled is not None else ():
            common.cancel_now(scheduler, request)
        common.assert_pages(scheduler)
        assert_held(batch, scheduler.running)
        step += 1
    for request in requests:
        tokens, _, reason = common.alone(MODEL, request)
        assert request.block_table is None
        assert request.generated == tokens[:len(request.generated)]
        assert request.finish_reason in (reason, "cancelled")
        assert request.finish_reason == "cancelled" or request.generated == tokens
    assert len(scheduler.pool.free_queue) == number
    assert not any(getattr(scheduler.pool, "ref_count", ()))


# --- page hashes ----------------------------------------------------------------------------------

def test_a_page_hash_is_a_chained_sha256():
    """Not a number, which can be used again; not Python's hash, which anybody can predict."""
    first = page_hash(b"", [1, 2])
    assert first == sha256(b"".join(n.to_bytes(8, sys.byteorder) for n in (1, 2))).digest()
    assert page_hash(first, [3]) == sha256(first + (3).to_bytes(8, sys.byteorder)).digest()


class Counted(list):
    """Counts the tokens that are read by slices."""
    read = 0

    def __getitem__(self, index):
        self.read += index.stop - index.start
        return super().__getitem__(index)


def test_finding_and_caching_are_linear_in_the_prompt(monkeypatch):
    """Each full page is hashed once, also of a request that is preempted and looks for them."""
    hashed = []
    monkeypatch.setattr("generate_prefix.page_hash", lambda before, tokens: (
        hashed.append(len(tokens)) or page_hash(before, tokens)))
    requests = prepare([Request([0], 1), Request([0], 1)], GPTConfig(block_size=10_000))
    scheduler, steps = PrefixScheduler(1, 50, 625, 16), 0
    for request in requests:
        request.prompt = Counted(range(10_000))
        scheduler.add(request)
        while not request.finished:
            plan = scheduler.schedule(0)
            scheduler.update(plan, [0] * len(indices_due(plan)))
            steps += 1
            if steps == 100:   # it has 5,000 tokens
                scheduler.preempt(request)
        assert request.prompt.read == 10_000
    assert scheduler.pool.counts["shared_pages"] == 5_000 // 16 + 624
    assert steps == 100 + 101 + 1 and hashed == [16] * 2 * 625
