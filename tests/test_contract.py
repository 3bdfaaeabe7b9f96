"""
The contract: whatever the stage, the backend, the workload and the pressure, each request gets
exactly what it would have got alone.
"""
import math
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from inspect import signature
from unittest.mock import patch

import common
import pytest
import torch
from common import BATCHED, SCHEDULED, STAGES, assert_contract, contract, knobs_of, mixed
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tensor_parallel import assert_right

from beyond.tensor_parallel import shard
from lab.checks.check import Check
from lab.checks.toy import toy
from lab.checks.xray import XRay
from model import Head
from request import Request
from toolbox.trace import observed

MODEL, WATCHED = common.backend("float64").model, toy()   # equal; hooks only on the second
COMPILED = ("unbatched", "ragged_varlen", *common.POOLED)   # what the compiled step serves
LAYOUTS = ("naive", "interleaved", "prepacked", "ragged_mask", *COMPILED)   # one of each
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@contextmanager
def seam(model):
    """
    Yields a list that gets a Counter for each forward pass: the tokens whose logits it computes,
    and the scores and key slots of a layer, counted where attention is called.
    """
    counts, current, forward = [], Counter(), Head.forward

    def head(self, q, k, v, past_k=None, past_v=None, mask=None):
        rows, S = math.prod(q.shape[:-3]), k.size(-2) + (0 if past_k is None else past_k.size(-2))
        current.update(scores=rows * q.size(-2) * S, keys=rows * S)
        return forward(self, q, k, v, past_k, past_v, mask)

    def project(module, arguments):
        each = {name: number // model.config.n_layer for name, number in current.items()}
        counts.append(each | {"logits": arguments[0].numel() // arguments[0].size(-1)})

    # cleared when the pass begins: the X-ray, too, calls attention, before it
    handles = (model.register_forward_pre_hook(lambda *_: current.clear()),
               model.ln_f.register_forward_pre_hook(project))
    try:
        with patch.object(Head, "forward", head):
            yield counts
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("stage", STAGES)
@settings(max_examples=common.examples(200))
@given(case=common.workloads())
def test_contract(stage, case):
    """...and each token sees its own request up to itself, and a pass costs what its trace says."""
    (requests, pressure), known = case, common.backend("float64").known
    requests = [*map(replace, requests)]
    with XRay(WATCHED, requests) as xray, seam(WATCHED) as counts:
        trace = assert_contract(WATCHED, STAGES[stage], requests, whole=MODEL, known=known,
                                **knobs_of(stage, **pressure))
    assert xray.faults() == [] and len(xray.passes) == len(trace.passes)
    assert sum(count["logits"] for count in counts) == sum(len(r.generated) for r in requests)
    preempted = trace.counts.get("preemptions")
    assert not preempted or pressure["pages"]   # else there are enough for all that can run at once
    assert stage == "prefix" or not trace.counts.get("shared_pages")
    for p, count in zip(trace.passes, counts, strict=True):
        held = sum(first + n for _, first, n in p.work)
        assert p.score_entries == count["scores"] and p.padded_keys == count["keys"] - held
        if stage in SCHEDULED:
            assert p.useful + p.recomputed <= pressure["token_budget"]
        if stage in ("chunked", "interleaved", *common.RAGGED) and pressure["max_kv_tokens"]:
            running = {name for name, *_ in p.work}
            reserved = sum(r.kv_capacity for r in requests if r.name in running)
            assert reserved <= pressure["max_kv_tokens"]
        if stage in (*common.RAGGED, *common.POOLED):
            assert p.pad_slots == p.padded_keys == 0
        assert stage == "no_cache" or preempted or p.recomputed == 0
        assert stage == "naive" or p.finished_slots == 0


@pytest.mark.parametrize("stage, backend", [
    *(pytest.param(stage, backend, marks=() if stage in LAYOUTS else pytest.mark.thorough)
      for backend in ("float32", "Llama") for stage in STAGES),
    *((stage, "compiled") for stage in COMPILED),
    *(pytest.param(stage, "cuda", marks=no_gpu) for stage in STAGES)])
@settings(max_examples=common.examples(50))
@given(case=common.workloads())
def test_contract_of_other_models_and_numbers(stage, backend, case):
    contract(stage, backend, *case)


def on_two_ranks():
    @settings(max_examples=300)
    @given(stage=st.sampled_from([*STAGES]), case=common.workloads())
    def any_stage(stage, case):
        contract(stage, "rank", *case)

    few = mixed()[2:6], dict(max_batch=3, token_budget=8, page_size=3)
    for stage, backend in (*((stage, "rank") for stage in LAYOUTS), ("naive", "Llama rank"),
                           ("interleaved", "Llama rank"), ("prefix", "Llama rank")):
        contract(stage, backend, *few)
    if common.THOROUGH:
        any_stage()   # both ranks draw the same
    for change, what in (dict(n_kv_head=1), "n_kv_head 1"), (dict(ffn=21), "FFN width 21"):
        with pytest.raises(ValueError, match=f"2 ranks: {what} is not a multiple"):
            shard(common.llama(**change))


def test_contract_on_two_ranks():
    assert_right(2, on_two_ranks)


@pytest.mark.parametrize("stage", STAGES)
def test_requests_are_served_in_the_order_of_their_arrival(stage):
    """
    Not earlier, and not later than necessary; with room for one at a time; from any iterable. Those
    that arrive together in the order given, whatever their names, lengths, priorities and seeds.
    """
    requests = [Request([i + 1] * (5 - i), 2, 0.0, None, 9 - i, None, "edcba"[i], 9 - i, arrival)
                for i, arrival in enumerate([30, 0, 9, 9, 4])]
    STAGES[stage](MODEL, iter(requests), **knobs_of(stage, max_batch=1))
    assert [r.token_steps for r in requests] == [[30, 31], [0, 1], [9, 10], [11, 12], [4, 5]]
    STAGES[stage](MODEL, single := Request([5], 2))
    assert single.finish_reason == "length"


ONE_PASS = "0: A2 B3, 1: A1 C4 D1, 2: A1 C1 D4, 3: A1 D1, 4: D1"
PASSES = {   # step: what each request computes
    "naive": "0: A2 B3, 1: A1, 2: A1, 3: A1, 4: C4 D6, 5: C1 D1",   # no waiting for a third
    "dynamic": "0: A2 B3, 1: A1, 1: C4 D6, 2: A1 C1 D1, 3: A1",     # decodes come first
    "chunked": "0: A2 B3, 1: A1, 1: C4 D1, 2: A1 C1, 2: D4, 3: A1 D1, 4: D1",
    "prepacked": "0: A2 B3, 1: A1, 1: C4 D6, 2: A1 C1 D1, 3: A1",
    "prepacked_dataset": "0: B3 A2, 1: A1, 1: D6 C4, 2: A1 D1 C1, 3: A1",   # also while A runs
    **dict.fromkeys(("interleaved", *common.RAGGED, *common.POOLED), ONE_PASS)}


@pytest.mark.parametrize("stage", BATCHED)
def test_which_passes_a_run_makes(stage):
    requests = [Request([i] * prompt, new, name="ABCD"[i], arrival=arrival)
                for i, (prompt, new, arrival) in enumerate(
                    [(2, 4, 0), (3, 1, 0), (4, 2, 1), (6, 2, 1)])]
    trace = STAGES[stage](MODEL, requests, **knobs_of(stage, max_batch=3, token_budget=6))
    passes = [f"{p.step}: " + " ".join(f"{name}{n}" for name, _, n in p.work)
              for p in trace.passes]
    assert ", ".join(passes) == PASSES[stage]
    assert trace.stage.replace(", ", "_").startswith(stage)


REFUSED = [   # knob, bad values, what the error says
    *((name, bad, f"{name} must be a whole number of at least 1") for name, bad in (
        ("max_batch", (1.5, 0)), ("token_budget", ("8",)), ("max_kv_tokens", (0,)),
        ("pages", (2.5,)), ("page_size", (0,)))),
    ("page_size", (25,), "page_size 25 exceeds block_size 24"),
    ("pages", (1,), "request 'large': .* KV tokens, there are 16"),
    ("scheduler_class", ("lifo",), "a class like PagedScheduler, .* 'lifo'"),
    ("pack", ("rows",), "pack .* 'batch' or 'dataset'"),
    ("attention", ("x",), "attention .* 'mask' or 'varlen'")]


@pytest.mark.parametrize("stage", BATCHED)
def test_bad_knobs_are_refused_before_anything_ran(stage):
    """A batch of none would wait for ever."""
    requests = [Request([1, 2, 3], 1, name="small"), Request([4] * 9, 9, name="large")]
    for name, values, said in REFUSED:
        if name in signature(STAGES[stage]).parameters:
            for value in values:
                with pytest.raises(ValueError, match=said):
                    STAGES[stage](MODEL, requests, **{name: value})
    assert requests[0].generated == []


# --- numbers that are not finite ------------------------------------------------------------------

@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("number, dtype", [(math.nan, torch.float64), (6e4, torch.float16)])
def test_a_pad_may_hold_anything(stage, number, dtype):
    """NaN; or, with weights that are large for float16, what overflows. No pad may be a token 0."""
    model = common.looks_up(0, number, toy(dtype=dtype))
    for block in model.h if dtype == torch.float16 else ():
        block.attn.c_proj.weight *= 5000
        block.mlp.c_proj.weight *= 5000
    requests = [Request([i + 1] * n, 6, i % 2, seed=i, eos_token=0)
                for i, n in enumerate([1, 3, 5, 7, 20])]
    check = Check(model, requests)
    STAGES[stage](model, requests, on_token=check.on_token,
                  **knobs_of(stage, max_batch=3, token_budget=6, page_size=3))
    assert {verdict.verdict for verdict in check()} <= {"identical", "near-tie"}


@pytest.mark.parametrize("stage", ["naive", "dynamic", "chunked", "interleaved", "prepacked",
                                   "prepacked_dataset"])
def test_a_pad_is_the_first_token_of_its_own_row(stage):
    """So it computes nothing that its request would not."""
    model, pads = toy(), []

    def look(step, batch):
        if batch.tokens.dim() == 2:
            T = batch.tokens.size(1)
            places = [(row, T - n, T) for row, (_, n) in enumerate(batch.plan)]
            owner, left = {}, batch.tokens.clone()
            for (row, first, end), (request, _) in sorted(
                    zip(getattr(batch, "places", places), batch.plan), key=lambda each: each[0]):
                owner.setdefault(row, request)   # the first of several prompts in a row
                left[row, first:end] = -1
            pads.extend((owner[row].pad, token) for row, tokens in enumerate(left.tolist())
                        for token in tokens if token >= 0)

    requests = [Request([i, *range(6, 6 + n)], 4, arrival=i // 4)
                for i, n in enumerate([0, 3, 5, 1, 6, 2])]
    with observed(model, look):
        STAGES[stage](model, requests, **knobs_of(stage, max_batch=4, token_budget=6))
    assert len({*pads}) > 1 and all(pad == token for pad, token in pads)


@pytest.mark.parametrize("stage", STAGES)
def test_a_pad_may_overflow_where_every_token_is_finite(stage):
    """A pad sees no key, so its state is no token's. Its value must not reach a sum."""
    common.assert_a_pad_may_overflow(
        STAGES[stage], **knobs_of(stage, max_batch=3, token_budget=20))


def test_what_overflows():
    """16 x 100 x 100 does, in float16; a quarter of it, the score, does not. No value is lost."""
    q, v = torch.full((1, 16), 100.0).half(), torch.eye(2, 16).half()
    assert torch.equal(Head()(q, torch.cat([-q, q]), v), v[1:])
    model = toy()
    model.h[1].attn.value.bias[0] = math.inf
    assert not model(torch.tensor([1, 2])).isfinite().any()


@pytest.mark.parametrize("stage", STAGES)
def test_one_bad_request_is_named_and_the_others_keep_what_they_have(stage):
    common.assert_names_the_bad_one(STAGES[stage], **knobs_of(stage, token_budget=9))


# --- a step that fails ----------------------------------------------------------------------------

def failing(number, dtype=torch.float64):
    """A model whose forward pass of this number fails in the second block."""
    model, calls = toy(dtype=dtype), []

    def fail(*_):
        calls.append(1)
        if len(calls) == number:
            raise ZeroDivisionError

    model.h[1].register_forward_pre_hook(fail)
    return model


RIGHT = lru_cache(lambda: [common.alone(MODEL, request)[0] for request in mixed()])


@pytest.mark.parametrize("stage", STAGES)
def test_a_failed_step_does_no_harm(stage):
    """Its error reaches the caller, and no token is counted that was not computed."""
    for model, on_token in ((failing(5), None),
                            (MODEL, lambda request, *_: 1 / (len(request.generated) - 3))):
        with pytest.raises(ZeroDivisionError):
            STAGES[stage](model, requests := mixed(), on_token=on_token)
        for request, right in zip(requests, RIGHT()):
            number = len(request.generated)   # these are whole
            assert request.generated == right[:number]
            assert len(request.token_times) == len(request.token_steps) == number
            known = len(request.tokens) - 1 if stage != "no_cache" else 0   # none stays there
            assert number == 0 or request.computed == known
    with pytest.raises(ZeroDivisionError):
        STAGES[stage](failing(1, torch.float32), requests := mixed())
    # no cache of the failed run is used again
    assert_contract(MODEL, STAGES[stage], requests, known=common.backend("float64").known)
