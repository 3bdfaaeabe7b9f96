"""
The contract: whatever the stage, the knobs and the other requests, each request gets exactly what
it would have got alone.
"""
import threading
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from common import (
    BATCHED,
    BLOCK_SIZE,
    RAGGED,
    SCHEDULED,
    STAGES,
    VOCAB,
    alone,
    assert_contract,
    examples,
    mixed,
    toy,
    workloads,
)
from hypothesis import HealthCheck, given, settings

from cache import KV
from request import Request

MODEL = toy()


def buffer_lengths(kv):
    """Tokens that the buffers of a cache really have room for."""
    return {buffer.shape[-2] for buffer in [*kv.k.values(), *kv.v.values()]}


@pytest.mark.parametrize("stage", STAGES)
@settings(max_examples=examples(200), deadline=None, derandomize=True,
          suppress_health_check=list(HealthCheck))
@given(workload=workloads())
def test_contract(stage, workload):
    requests = [replace(request) for request in workload.requests]

    def memory_is_as_accounted(*_):
        caches = [(r, r.kv) for r in requests if isinstance(r.kv, KV)]
        for request, kv in caches:
            assert kv.capacity == request.kv_tokens and buffer_lengths(kv) <= {kv.capacity}
        if stage in SCHEDULED and workload.max_kv_tokens:
            assert sum(kv.capacity for _, kv in caches) <= workload.max_kv_tokens

    handle = MODEL.register_forward_pre_hook(memory_is_as_accounted)
    try:
        trace = assert_contract(MODEL, STAGES[stage], requests, workload.cancels,
                                **workload.knobs(stage))
    finally:
        handle.remove()
    for p in trace.passes:
        if stage in SCHEDULED:
            assert p.useful + p.recomputed <= workload.token_budget
        if stage in (*RAGGED, "paged"):
            assert p.pad_slots == p.padded_keys == 0
        if stage != "no_cache" and not trace.counts.get("preemptions"):
            assert p.recomputed == 0
        if stage in ("unbatched", "naive", "ragged_varlen"):
            assert p.copied_bytes == 0   # caches are written in place and read as views
        assert stage == "naive" or p.finished_slots == 0


@pytest.mark.parametrize("stage", STAGES)
def test_float32(stage):
    """In float32 the tokens of this workload are the same too, and the logits to 1e-4."""
    model = toy(dtype=torch.float32)
    assert_contract(model, STAGES[stage], mixed(), tolerance=1e-4)


EDGES = {   # trap 10, and the ends of every range
    "one-token prompt": [Request([3], 6), Request(range(9), 6)],
    "one new token": [Request([3, 4], 1), Request([5] * 7, 1), Request([6], 1)],
    "prompt fills the context": [Request([i % VOCAB for i in range(BLOCK_SIZE)], 5),
                                 Request([2, 2], 5)],
    "one position left": [Request([i % VOCAB for i in range(BLOCK_SIZE - 1)], 5),
                          Request([2, 2], 40)],
    "runs into the context limit": [Request([1], 1000), Request([7, 8, 9], 1000, 1.0)],
    "a request in the far future": [Request([1, 2], 3), Request([3], 3, arrival=10**12)],
    "chunk - 1, chunk, chunk + 1": [Request([4] * n, 3) for n in (7, 8, 9)],
    "same prompt, different seeds": [Request([1, 2, 3], 8, 1.5, seed=seed) for seed in range(5)],
    "same prompt, same seed": [Request([1, 2, 3], 8, 1.5, seed=7) for _ in range(5)],
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("edge", EDGES)
def test_edges(stage, edge):
    assert_contract(MODEL, STAGES[stage], [replace(request) for request in EDGES[edge]],
                    **({"token_budget": 8} if stage in SCHEDULED else {}))


def one_at_a_time(stage):
    return {} if stage in ("no_cache", "unbatched") else {"max_batch": 1}


@pytest.mark.parametrize("stage", STAGES)
def test_requests_are_served_in_the_order_of_their_arrival(stage):
    """Whatever the order in which they are given, with room for one at a time."""
    requests = [Request([i + 1] * 3, 2, name=f"r{i}", arrival=arrival)
                for i, arrival in enumerate([30, 0, 9, 9, 4])]
    STAGES[stage](MODEL, requests, **one_at_a_time(stage))
    assert sorted(range(5), key=lambda i: requests[i].token_steps[0]) == [1, 4, 2, 3, 0]
    assert all(request.token_steps[0] >= request.arrival for request in requests)
    assert requests[1].token_steps == [0, 1]     # not before its arrival,
    assert requests[0].token_steps == [30, 31]   # and not later than necessary


@pytest.mark.parametrize("stage", STAGES)
def test_a_request_cancelled_while_it_waits_is_never_computed_and_takes_no_place(stage):
    requests = [Request([1] * 5, 3, name="a"), Request([3] * 5, 3, name="b"),
                Request([4, 5], 2, name="c")]   # dataset packing takes the longest first
    trace = STAGES[stage](MODEL, requests, on_token=lambda *_: requests[1].cancel(),
                          **one_at_a_time(stage))
    assert "b" not in [name for p in trace.passes for name, _, _ in p.work]
    assert requests[1].generated == [] and requests[2].token_steps == [3, 4]


@pytest.mark.parametrize("stage", STAGES)
def test_a_request_cancelled_in_the_middle_of_a_step_leaves_at_its_end(stage):
    requests = [Request([1, 2], 9, name="a"), Request([3] * 20, 9, name="b")]
    trace = STAGES[stage](MODEL, requests, on_token=lambda *_: requests[1].cancel(),
                          **({"token_budget": 4} if stage in SCHEDULED else {}))
    first = requests[0].token_steps[0]
    assert all(p.step <= first for p in trace.passes if "b" in [name for name, _, _ in p.work])
    assert requests[1].finish_reason == "cancelled"


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_allocated_is_what_is_accounted(stage, monkeypatch):
    made, seen = [], {}

    def init(self, capacity, original=KV.__init__):
        original(self, capacity)
        made.append(self)

    def on_token(request, token, logits):
        for r in requests:
            if isinstance(r.kv, KV):
                seen[r.name] = buffer_lengths(r.kv) | {r.kv.capacity, r.kv_tokens}
            elif r.kv:
                seen[r.name] = len(r.kv)

    monkeypatch.setattr(KV, "__init__", init)
    requests = [Request([1, 2, 3], 4, name="a"), Request([1] * 20, 100, name="b")]
    STAGES[stage](MODEL, requests, on_token=on_token,
                  **({"pages": 7, "page_size": 4} if stage == "paged" else {}))
    if stage == "no_cache":
        assert made == []
    elif stage == "naive":   # one cache for the batch: the longest prompt and the longest answer
        assert [buffer_lengths(kv) | {kv.capacity} for kv in made] == [{20 + 4}]
    elif stage == "paged":   # one pool, no larger and no smaller than its pages; then block tables
        assert [buffer_lengths(kv) | {kv.capacity} for kv in made] == [{7 * 4}]
        assert seen == {"a": 2, "b": 6}
    else:
        assert seen == {"a": {3 + 4 - 1}, "b": {BLOCK_SIZE}} and len(made) == 2


def test_a_cache_left_from_a_failed_run_is_not_used_again():
    request = Request([1, 2, 3], 4)
    single = toy(dtype=torch.float32)
    handle = single.h[2].register_forward_pre_hook(lambda *_: 1 / 0)
    for stage in BATCHED:
        with pytest.raises(ZeroDivisionError):
            STAGES[stage](single, [request])
        assert request.computed == 0
        assert_contract(MODEL, STAGES[stage], [request])
        request = replace(request)
    handle.remove()


def test_any_iterable_of_requests_will_do():
    for stage in STAGES:
        trace = STAGES[stage](MODEL, (Request([i], 2) for i in range(3)))
        assert [len(request.generated) for request in trace.requests] == [2, 2, 2]
        assert STAGES[stage](MODEL, Request([5], 2)).requests[0].generated


@pytest.mark.parametrize("stage", STAGES)
def test_a_callback_that_raises_leaves_whole_tokens(stage):
    requests = [Request([i, i + 1], 5) for i in range(4)]
    with pytest.raises(ZeroDivisionError):
        STAGES[stage](MODEL, requests, on_token=lambda r, *_: 1 / (len(r.generated) - 3))
    for request in requests:
        assert len(request.generated) == len(request.token_times) == len(request.token_steps)


@pytest.mark.parametrize("stage", BATCHED)
def test_batching_saves_forward_passes(stage):
    """The contract would hold for a stage that runs one request after the other, too."""
    requests = [Request([i, i + 1, i + 2], 10, name=f"r{i}") for i in range(8)]
    trace = STAGES[stage](MODEL, requests)
    assert len(trace.passes) == 10 and sum(p.useful for p in trace.passes) == 8 * 12


@pytest.mark.parametrize("limit, reason", [(9, "cancelled"), (4, "length")])
@pytest.mark.parametrize("stage", STAGES)
def test_a_token_that_was_being_computed_when_its_request_was_cancelled_still_counts(
        stage, limit, reason):
    """
    Another thread may cancel at any time. The request ends between two steps, and only there: if
    the pass finishes it, it was not cancelled.
    """
    requests = [Request([1, 2], limit, 1.0, name="a"), Request([3], 9, name="b")]
    model, asked, told = toy(), [], []

    def cancel(module, args):
        if len(requests[0].generated) == 3:
            requests[0].cancel()

    model.h[1].register_forward_pre_hook(cancel)
    model.ln_f.register_forward_pre_hook(
        lambda module, args: asked.append(args[0].numel() // args[0].size(-1)))
    STAGES[stage](model, requests, on_token=lambda request, *_: told.append(request.name))
    assert [request.finish_reason for request in requests] == [reason, "length"]
    assert requests[0].generated == alone(MODEL, requests[0])[0][:4]
    assert requests[1].generated == alone(MODEL, requests[1])[0]
    assert told.count("a") == 4 and told.count("b") == 9
    assert sum(asked) == 4 + 9   # the vocabulary projection touches no other token


@pytest.mark.parametrize("stage", STAGES)
def test_requests_cancelled_from_another_thread_at_any_moment(stage):
    """A thread cancels requests while the loop runs: each ends with a beginning of its answer."""
    for delay in 0, 0.0005, 0.002:
        requests, stop = mixed(), threading.Event()

        def cancel():
            for request in requests:
                stop.wait(delay)
                request.cancel()

        thread = threading.Thread(target=cancel)
        thread.start()
        STAGES[stage](MODEL, requests)
        thread.join()
        for request in requests:
            tokens = whole_answers()[request.name]
            assert request.generated == tokens[:len(request.generated)]
            assert request.finish_reason == "cancelled" or request.generated == tokens
            assert request.kv is None


@lru_cache(maxsize=None)
def whole_answers():
    return {request.name: alone(MODEL, request)[0] for request in mixed()}


@pytest.mark.parametrize("stage", STAGES)
def test_a_failed_step_does_no_harm(stage):
    """
    An exception in the middle of a forward pass reaches the caller, and no token is counted that
    was not computed.
    """
    model, calls, requests = toy(), [], mixed()

    def fail(module, args):
        calls.append(1)
        if len(calls) == 5:
            raise ZeroDivisionError

    model.h[1].register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        STAGES[stage](model, requests)
    for request in requests:
        assert request.generated == whole_answers()[request.name][:len(request.generated)]
        known = len(request.tokens) - 1 if stage != "no_cache" else 0   # none stays computed there
        assert len(request.generated) == 0 or request.computed == known
