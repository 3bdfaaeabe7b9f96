"""Golden plans: what the Scheduler hands out, step by step, and what a Request refuses."""
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model import GPTConfig
from scheduler import Request, Scheduler, prepare

CONFIG = GPTConfig(block_size=64, vocab_size=10, n_layer=1, n_head=1, n_embd=2)


def plans(sizes, arrivals=None, cancel=(), **limits):
    """
    The plans of all steps, written like "A1 B1 C4". sizes: (prompt, new tokens) for A, B, C, ...
    cancel: (step, name) pairs, before that step is scheduled.
    """
    scheduler = Scheduler(**limits)
    requests = [Request([0] * prompt, new, name="ABCDEFGH"[i], arrival=arrivals[i] if arrivals else 0)
                for i, (prompt, new) in enumerate(sizes)]
    for request in prepare(requests, CONFIG):
        scheduler.add(request)
    result, step = [], 0
    while scheduler.busy:
        for when, name in cancel:
            if when == step:
                scheduler.cancel(next(request for request in requests if request.name == name))
        plan = scheduler.schedule(step)
        result.append(" ".join(f"{request.name}{n}" for request, n in plan))
        scheduler.report(plan, [0 for request, n in plan if n == request.todo])
        step += 1
    return result


def test_decodes_first_then_chunks_of_several_prompts():
    assert plans([(3, 4), (2, 3), (9, 2)], max_batch=4, token_budget=6) == [
        "A3 B2 C1",   # three prompts share the budget
        "A1 B1 C4",
        "A1 B1 C4",   # C is complete: its first token
        "A1 C1"]      # B has its three tokens and is gone


def test_a_finished_request_is_replaced_in_the_next_step():
    assert plans([(2, 1), (2, 3), (3, 2)], max_batch=2, token_budget=8) == ["A2 B2", "B1 C3", "B1 C1"]


def test_first_come_first_served_nobody_overtakes():
    assert plans([(5, 1), (6, 1), (2, 1)], max_batch=8, token_budget=4) == ["A4", "A1 B3", "B3 C1", "C1"]
    # B does not fit beside A; C would, but it came after B
    assert plans([(6, 2), (8, 2), (2, 2)], max_batch=8, token_budget=8, max_kv_tokens=12) == ["A6", "A1", "B8", "B1", "C2", "C1"]


def test_arrivals():
    assert plans([(2, 2), (3, 2)], arrivals=[3, 1], max_batch=8, token_budget=8) == ["", "B3", "B1", "A2", "A1"]
    scheduler = Scheduler(1, 1)
    scheduler.add(prepare([Request([0], arrival=10**9)], CONFIG)[0])
    assert scheduler.schedule(5) == [] and scheduler.next_step(5) == 10**9


def test_budget_of_one():
    assert plans([(3, 2), (1, 2)], max_batch=8, token_budget=1) == ["A1", "A1", "A1", "A1", "B1", "B1"]


def test_max_batch_of_one():
    assert plans([(3, 2), (1, 2)], max_batch=1, token_budget=2) == ["A2", "A1", "A1", "B1", "B1"]


def test_cancel_frees_the_place_and_the_reservation_in_any_state():
    limits = dict(max_batch=2, token_budget=4, max_kv_tokens=20)
    assert plans([(6, 4), (2, 4), (4, 1)], cancel=[(1, "A")], **limits) == ["A4", "B2 C2", "B1 C2", "B1", "B1"]    # prefilling
    assert plans([(6, 4), (2, 4), (4, 1)], cancel=[(3, "A")], **limits)[3] == "B1 C3"                              # decoding
    assert plans([(6, 4), (2, 4), (4, 1)], cancel=[(0, "A"), (0, "C")], **limits) == ["B2", "B1", "B1", "B1"]      # waiting


def test_a_prompt_remainder_of_one_token_is_handed_out_like_a_decode():
    assert plans([(5, 2), (4, 2)], max_batch=8, token_budget=4) == ["A4", "A1 B3", "A1 B1", "B1"]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(sizes=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 12)), min_size=1, max_size=8),
       max_batch=st.integers(1, 9), token_budget=st.integers(1, 30), slack=st.one_of(st.none(), st.integers(0, 100)))
def test_limits_hold_and_the_budget_is_used(sizes, max_batch, token_budget, slack):
    need = max(min(prompt + new, 64) for prompt, new in sizes)
    scheduler = Scheduler(max_batch, token_budget, None if slack is None else need + slack)
    for request in prepare([Request([0] * prompt, new) for prompt, new in sizes], CONFIG):
        scheduler.add(request)
    bound = sum(prompt + new for prompt, new in sizes)
    for step in range(bound):
        if not scheduler.busy:
            return
        plan = scheduler.schedule(step)
        decoding = [request for request in scheduler.running if request.todo == 1]
        assert plan[:len(decoding)] == [(request, 1) for request in decoding]                   # all decodes, and first
        total, left = sum(n for _, n in plan), sum(request.todo for request in scheduler.running)
        assert total == min(token_budget, left) > 0                                             # as much as there is to do
        assert len(scheduler.running) <= min(max_batch, token_budget)
        assert scheduler.kv_tokens <= scheduler.max_kv_tokens
        scheduler.report(plan, [0 for request, n in plan if n == request.todo])
    assert not scheduler.busy, "not done although each step computes at least one token"


@pytest.mark.parametrize("arguments, message", [
    (dict(prompt=[]), "request 'r7': the prompt is empty"),
    (dict(max_new_tokens=0), "max_new_tokens must be a whole number of at least 1, not 0"),
    (dict(max_new_tokens=2.5), "max_new_tokens"),
    (dict(max_new_tokens=True), "max_new_tokens"),
    (dict(temperature=-0.1), "temperature must be a number of at least 0, not -0.1"),
    (dict(temperature=math.nan), "temperature"),
    (dict(temperature=math.inf), "temperature"),
    (dict(temperature="hot"), "temperature"),
    (dict(top_k=0), "top_k"),
    (dict(arrival=-1), "arrival"),
    (dict(arrival=1.5), "arrival"),
    (dict(priority=-1), "priority"),
    (dict(prompt=[1.5]), "prompt must be a list of token ids"),
    (dict(prompt=None), "prompt must be a list of token ids"),
    (dict(prompt="text"), "prompt must be a list of token ids"),
    (dict(seed="x"), "seed must be a whole number of at least 0, not 'x'"),
    (dict(seed=-1), "seed must be a whole number of at least 0"),
    (dict(eos_token=1.0), "eos_token must be a whole number"),
])
def test_a_request_refuses_bad_values(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        Request(**{"prompt": [1], "name": "r7", **arguments})
    assert "request 'r7'" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("requests, message", [
    ([], "there are no requests"),
    ([Request([1] * 65, name="long")], "request 'long': prompt of 65 tokens does not fit block_size 64"),
    ([Request([1, 10], name="odd")], "request 'odd': token id 10 is not in the vocabulary, 0 to 9"),
    ([Request([-1])], "request 'r0': token id -1"),
    ([Request([1], name="x"), Request([2], name="x")], "request 'x' is there 2 times"),
])
def test_prepare_refuses_what_the_model_cannot_run_before_anything_ran(requests, message):
    with pytest.raises(ValueError, match=message):
        prepare(requests, CONFIG)


def test_token_ids_of_any_library():
    import numpy
    import torch
    for prompt in torch.tensor([1, 2]), numpy.array([1, 2]), (1, 2), range(1, 3):
        assert Request(prompt).prompt == [1, 2] and all(type(token) is int for token in Request(prompt).prompt)


def test_automatic_names_keep_clear_of_given_ones():
    requests = [Request([1], name="r1"), Request([1]), Request([1]), Request([1], name="r2")]
    prepare(requests, CONFIG)
    assert [request.name for request in requests] == ["r1", "r3", "r4", "r2"]
    same = Request([1])
    with pytest.raises(ValueError, match="is there 2 times"):
        prepare([same, same], CONFIG)


def test_a_request_runs_once():
    request = prepare([Request([1, 2])], CONFIG)[0]
    request.computed = 1
    with pytest.raises(ValueError, match="request 'r0' has already run"):
        prepare([request], CONFIG)
    prepare([replace(request)], CONFIG)   # a copy is a new request


@pytest.mark.parametrize("limits", [dict(max_batch=0), dict(token_budget=0), dict(max_kv_tokens=0), dict(max_batch=1.5), dict(token_budget="8")])
def test_the_scheduler_refuses_bad_limits(limits):
    with pytest.raises(ValueError, match=f"{next(iter(limits))} must be a whole number of at least 1"):
        Scheduler(**{"max_batch": 1, "token_budget": 1, **limits})


def test_the_scheduler_knows_no_tensors():
    import subprocess
    import sys
    from pathlib import Path
    code = "import sys, scheduler; assert not {'torch', 'numpy', 'time'} & set(vars(scheduler)) and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)
