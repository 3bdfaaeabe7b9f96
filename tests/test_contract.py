"""
The contract: whatever the stage, the knobs and the other requests, each request gets exactly what
it would have got alone.
"""
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace

import common
import pytest
import torch
from common import BATCHED, SCHEDULED, STAGES, alone, assert_contract, knobs_of, llama, mixed, toy
from hypothesis import given, settings

from cache import KV
from request import Request

MODEL = toy()
COMPILED = ("unbatched", "ragged_varlen", "paged")   # what the compiled step serves
BACKENDS = {   # name: (model, the model to compare with, tolerance)
    "float64": lambda: (MODEL, MODEL, 1e-10),
    "float32": lambda: (toy(dtype=torch.float32),) * 2 + (1e-4,),
    "Llama": lambda: (llama(),) * 2 + (1e-10,),
    "compiled": lambda: (toy(dtype=torch.float32).optimize(), toy(dtype=torch.float32), 1e-4),
    "cuda": lambda: (toy(dtype=torch.float32).to("cuda"),) * 2 + (1e-4,)}
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@lru_cache(maxsize=None)
def backend(name):
    model, whole, tolerance = BACKENDS[name]()
    return SimpleNamespace(model=model, whole=whole, tolerance=tolerance, known={})


def contract(stage, name, requests, **knobs):
    """Each of (copies of) these requests gets what it would have got alone. Returns the trace."""
    b = backend(name)
    return assert_contract(b.model, STAGES[stage], [*map(replace, requests)], b.tolerance, b.whole,
                           b.known, **knobs_of(stage, **knobs))


@pytest.mark.parametrize("stage", STAGES)
@settings(max_examples=common.examples(200))
@given(workload=common.workloads())
def test_contract(stage, workload):
    knobs = workload.knobs
    trace = contract(stage, "float64", workload.requests, **knobs)
    if knobs["pages"] is None:   # enough for all that can run at the same time
        assert not trace.counts.get("preemptions")
    assert knobs["share_prefixes"] or not trace.counts.get("shared_pages")
    for p in trace.passes:
        if stage in SCHEDULED:
            assert p.useful + p.recomputed <= knobs["token_budget"]
        if stage in (*common.RAGGED, "paged"):
            assert p.pad_slots == p.padded_keys == 0
        if stage != "no_cache" and not trace.counts.get("preemptions"):
            assert p.recomputed == 0
        if stage in ("unbatched", "naive", "ragged_varlen"):
            assert p.copied_bytes == 0   # caches are written in place and read as views
        assert stage == "naive" or p.finished_slots == 0


@pytest.mark.parametrize("stage, name", [
    *((stage, name) for name in ("float32", "Llama") for stage in STAGES),
    *((stage, "compiled") for stage in COMPILED),
    *(pytest.param(stage, "cuda", marks=no_gpu) for stage in STAGES)])
@settings(max_examples=common.examples(50))
@given(workload=common.workloads())
def test_contract_of_other_models_and_numbers(stage, name, workload):
    contract(stage, name, workload.requests, **workload.knobs)


@pytest.mark.parametrize("stage", STAGES)
@settings(max_examples=common.examples(30))
@given(workload=common.workloads())
def test_memory_is_as_accounted(stage, workload):
    requests, most = [*map(replace, workload.requests)], workload.knobs["max_kv_tokens"]

    def look(*_):
        caches = [(r, r.kv) for r in requests if isinstance(r.kv, KV)]
        for request, kv in caches:
            lengths = {buffer.size(-2) for buffer in [*kv.k.values(), *kv.v.values()]}
            assert kv.capacity == request.kv_tokens and lengths <= {kv.capacity}
        if stage in SCHEDULED and most:
            assert sum(kv.capacity for _, kv in caches) <= most

    handle = MODEL.register_forward_pre_hook(look)
    try:
        STAGES[stage](MODEL, requests, **knobs_of(stage, **workload.knobs))
    finally:
        handle.remove()


EDGES = [   # trap 10, and the ends of every range; 8 is the token budget
    *(Request([i % common.VOCAB for i in range(n)], new)
      for n in (1, 7, 8, 9, common.BLOCK_SIZE - 1, common.BLOCK_SIZE) for new in (1, 5, 1000)),
    *(Request([1, 2, 3], 8, 1.5, seed=seed) for seed in (0, 1, 1)),
    Request([3], 3, arrival=10**12)]


@pytest.mark.parametrize("stage", STAGES)
def test_edges(stage):
    contract(stage, "float64", EDGES, token_budget=8)


@pytest.mark.parametrize("stage", STAGES)
def test_requests_are_served_in_the_order_of_their_arrival(stage):
    """Not earlier, and not later than necessary; with room for one at a time."""
    requests = [Request([i + 1] * 3, 2, arrival=arrival)
                for i, arrival in enumerate([30, 0, 9, 9, 4])]
    STAGES[stage](MODEL, requests, **knobs_of(stage, max_batch=1))
    assert [r.token_steps for r in requests] == [[30, 31], [0, 1], [9, 10], [11, 12], [4, 5]]


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


@pytest.mark.parametrize("stage", STAGES)
def test_any_iterable_of_requests_will_do(stage):
    for requests in (Request([i], 2) for i in range(3)), Request([5], 2):
        trace = STAGES[stage](MODEL, requests)
        assert all(len(request.generated) == 2 for request in trace.requests)


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


@pytest.mark.parametrize("stage", STAGES)
def test_the_vocabulary_projection_touches_no_token_whose_logits_are_not_wanted(stage):
    requests = [Request([1, 2], 4, 1.0, name="a"), Request([3], 9, name="b")]
    model, asked = toy(), []
    model.ln_f.register_forward_pre_hook(
        lambda module, args: asked.append(args[0].numel() // args[0].size(-1)))
    STAGES[stage](model, requests)
    assert sum(asked) == 4 + 9


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
        assert request.generated == alone(MODEL, request)[0][:len(request.generated)]
        known = len(request.tokens) - 1 if stage != "no_cache" else 0   # none stays computed there
        assert len(request.generated) == 0 or request.computed == known
