"""The check that every script ends with: it must see what is wrong, and must not cry wolf at a near-tie."""
import pytest
import torch
from common import STAGES, VOCAB, alone, toy

import generate_interleaved
from cache import Rectangle
from scheduler import Request
from toolbox.check import Check, near_tie, summary

MODEL = toy(dtype=torch.float32)


def checked(stage="interleaved", change=lambda requests, check: None, **arguments):
    requests = [Request([i + 1] * (2 * i + 1), 6, seed=i, **arguments) for i in range(5)]
    check = Check(MODEL, use_cache=False)
    STAGES[stage](MODEL, requests, on_token=check.on_token)
    change(requests, check)
    return check(requests)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_is_well(stage, temperature):
    verdicts = checked(stage, temperature=temperature)
    assert [v.verdict for v in verdicts] == ["identical"] * 5
    assert summary(verdicts).startswith("5/5 requests identical to unbatched, max |Δlogit| ")


def wrong_token(requests, check):
    requests[3].generated[2] ^= 1


def one_token_short(requests, check):
    requests[3].generated.pop()
    check.logits["r3"].pop()


def one_token_unannounced(requests, check):
    check.logits["r3"].pop()


def other_logits(requests, check):
    check.logits["r3"][4] = check.logits["r3"][4] * 1.001


def nan_logits(requests, check):
    check.logits["r3"][0] = check.logits["r3"][0] * float("nan")


def other_reason(requests, check):
    requests[3].finish_reason = "stop"


@pytest.mark.parametrize("change", [wrong_token, one_token_short, one_token_unannounced, other_logits, nan_logits, other_reason])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_sees(change, temperature):
    verdicts = checked(change=change, temperature=temperature)
    assert [v.verdict for v in verdicts] == ["identical"] * 3 + ["WRONG", "identical"]
    assert "WRONG: request 'r3'" in summary(verdicts) and "4/5 requests" in summary(verdicts)


def test_it_sees_the_published_mask(monkeypatch):
    class Published(Rectangle):
        def __init__(self, *args):
            super().__init__(*args)
            self.mask[..., self.P:] = True
    monkeypatch.setattr(generate_interleaved, "Rectangle", Published)
    assert "WRONG" in [v.verdict for v in checked()]


def test_it_sees_a_shared_random_stream():
    """Right logits and wrong numbers drawn: the tokens differ by no rounding."""
    def change(requests, check):
        requests[2].seed = 77
    assert checked(change=change, temperature=1.0)[2].verdict == "WRONG"


def test_a_cancelled_request_is_right_as_far_as_it_came():
    def change(requests, check):
        one_token_short(requests, check)
        requests[3].finish_reason = "cancelled"
    assert [v.verdict for v in checked(change=change)] == ["identical"] * 5


def test_near_ties():
    def tie(logits, token, rounding, **arguments):
        request = Request([1], **arguments)
        return near_tie(torch.tensor(logits), token, rounding, request, 0)
    assert tie([1.0, 1.0 - 1e-6, 0.0], 1, 1e-6)                                   # greedy: the gap to the top is within the rounding
    assert not tie([1.0, 1.0 - 1e-3, 0.0], 1, 1e-6)
    u = Request([1], seed=4).draw()
    edge = [torch.tensor(p).log().item() for p in (u, 1 - u)]                     # the number falls on the edge between two tokens
    assert tie(edge, 0, 1e-6, temperature=1.0, seed=4) and tie(edge, 1, 1e-6, temperature=1.0, seed=4)
    apart = [torch.tensor(p).log().item() for p in (u + 0.1, 0.9 - u)]            # it falls well into the first
    assert tie(apart, 0, 1e-6, temperature=1.0, seed=4) and not tie(apart, 1, 1e-6, temperature=1.0, seed=4)
    assert tie([5.0, 5.0 - 1e-6, -3.0], 1, 1e-6, temperature=1.0, top_k=1)        # which token is the first of one
    assert not tie([5.0, 5.0 - 1e-6, -3.0], 2, 1e-6, temperature=1.0, top_k=1)


def test_a_flipped_near_tie_is_no_error():
    """Two vocabulary entries with the same embedding but for a rounding: any order of summation may choose either."""
    model = toy(dtype=torch.float32)
    best = alone(model, Request([1, 2, 3], 1))[0][0]
    other = next(token for token in range(VOCAB) if token not in (1, 2, 3, best))
    model.wte.weight[other] = model.wte.weight[best] * (1 - 1e-6)
    request = Request([1, 2, 3], 1, name="r0")
    check = Check(model)
    STAGES["interleaved"](model, [request], on_token=check.on_token)
    row = check.logits["r0"][0] = check.logits["r0"][0].clone()
    row[best], row[other] = row[other].clone(), row[best].clone()                  # a rounding of 1e-6 turns them round
    request.generated = [int(row.argmax())]
    verdict, = check([request])
    assert verdict.verdict == "near-tie" and "(1 near-tie)" in summary([verdict])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_coarse_rounding_is_no_excuse_for_a_wrong_random_stream(dtype):
    """What counts is the rounding that happened, not the largest that the dtype allows."""
    model = toy(dtype=dtype, loud=False)
    requests = [Request([i + 1] * (2 * i + 1), 12, 1.0, seed=i) for i in range(5)]
    check = Check(model)
    STAGES["ragged_varlen"](model, requests, on_token=check.on_token)
    for request in requests:
        request.seed += 100
    assert all(v.verdict == "WRONG" for v in check(requests))


def test_bfloat16_differs_by_no_more_than_its_rounding():
    model = toy(dtype=torch.bfloat16, loud=False)
    requests = [Request([i + 1] * (2 * i + 1), 6, 1.0, seed=i) for i in range(5)]
    check = Check(model)
    STAGES["ragged_varlen"](model, requests, on_token=check.on_token)
    assert all(v.verdict != "WRONG" for v in check(requests))
