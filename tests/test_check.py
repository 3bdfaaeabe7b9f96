"""The check that every script ends with: it must see what is wrong, and must not cry wolf at a near-tie."""
from dataclasses import replace

import pytest
import torch
from common import STAGES, VOCAB, alone, toy

import generate_interleaved
import generate_ragged
from cache import Rectangle
from model import sample
from scheduler import Request
from toolbox.check import Check, summary

MODEL = toy(dtype=torch.float32)


def checked(stage="interleaved", change=lambda requests, check: None, **arguments):
    requests = [Request([i + 1] * (2 * i + 1), 6, seed=i, **arguments) for i in range(5)]
    check = Check(MODEL, requests)
    STAGES[stage](MODEL, requests, on_token=check.on_token)
    change(requests, check)
    return check()


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
    logits_of(requests[3], check).pop()


def logits_of(request, check):
    return check.logits[id(request)]


def one_token_unannounced(requests, check):
    logits_of(requests[3], check).pop()


def one_token_more(requests, check):
    requests[3].generated.append(5)
    logits_of(requests[3], check).append(logits_of(requests[3], check)[0])


def other_logits(requests, check):
    logits_of(requests[3], check)[4] = logits_of(requests[3], check)[4] * 1.001


def nan_logits(requests, check):
    logits_of(requests[3], check)[0] = logits_of(requests[3], check)[0] * float("nan")


def cropped_prompt(requests, check):
    requests[3].prompt = requests[3].prompt[:2]


def lower_limit(requests, check):
    requests[3].max_new_tokens = 2


def cancelled_beyond_its_limits(requests, check):
    one_token_more(requests, check)
    requests[3].finish_reason = "cancelled"


def other_reason(requests, check):
    requests[3].finish_reason = "stop"


@pytest.mark.parametrize("change", [wrong_token, one_token_short, one_token_unannounced, one_token_more, other_logits, nan_logits,
                                    cropped_prompt, lower_limit, cancelled_beyond_its_limits, other_reason])
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


def test_a_cancelled_request_is_right_as_far_as_it_came_and_counted_by_itself():
    def change(requests, check):
        one_token_short(requests, check)
        requests[3].finish_reason = "cancelled"
    verdicts = checked(change=change)
    assert [v.verdict for v in verdicts] == ["identical"] * 3 + ["cancelled", "identical"]
    assert summary(verdicts).startswith("4/4 requests identical to unbatched, 1 cancelled")

    def change(requests, check):
        wrong_token(requests, check)
        requests[3].finish_reason = "cancelled"
    assert checked(change=change)[3].verdict == "WRONG"


SAMPLERS = {   # right logits, wrong tokens
    "always the same token": lambda logits, requests: [0] * len(requests),
    "the second best": lambda logits, requests: logits.topk(2).indices[:, 1].tolist(),
    "one random stream for all": lambda logits, requests, shared=Request([1], seed=99): [
        token for row, r in zip(logits, requests) for token in sample(row[None], [fixed(r, shared.draw())])],
}


def fixed(request, u):
    twin = replace(request)
    twin.draw = lambda: u
    return twin


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("temperature, top_k", [(0.01, None), (0.7, None), (1.0, 2)])
def test_no_rounding_excuses_a_wrong_sampler(dtype, sampler, temperature, top_k, monkeypatch):
    model = toy(dtype=dtype)
    requests = [Request([i + 1] * (2 * i + 1), 12, temperature, top_k, seed=i) for i in range(5)]
    check = Check(model, requests)
    monkeypatch.setattr(generate_ragged, "sample", SAMPLERS[sampler])
    STAGES["ragged_varlen"](model, requests, on_token=check.on_token)
    assert "WRONG" in [v.verdict for v in check()]


def test_a_flipped_near_tie_is_no_error():
    """Two vocabulary entries with the same embedding but for a rounding: any order of summation may choose either."""
    model = toy(dtype=torch.float32)
    best = alone(model, Request([1, 2, 3], 1))[0][0]
    other = next(token for token in range(VOCAB) if token not in (1, 2, 3, best))
    model.wte.weight[other] = model.wte.weight[best] * (1 - 1e-6)

    def run(change, later=0):
        request = Request([1, 2, 3], 3, name="r0")
        check = Check(model, [request])

        def on_token(request, token, logits):
            if len(request.generated) == 1:
                logits = logits.clone()
                change(request, logits)
            check.on_token(request, token, logits)

        STAGES["interleaved"](model, [request], on_token=on_token)
        request.generated[2] ^= later
        return check()[0]

    def rounding(request, row):   # of 1e-6 turns them round
        row[best], row[other] = row[other].clone(), row[best].clone()
        request.generated[0] = int(row.argmax())

    verdict = run(rounding)
    assert verdict.verdict == "near-tie" and "(1 near-tie)" in summary([verdict])

    def more_than_rounding(request, row):
        row[other] += 0.01 * row.abs().max()
        request.generated[0] = int(row.argmax())

    assert run(more_than_rounding).verdict == "WRONG"
    assert run(rounding, later=1).verdict == "WRONG"   # what comes after a near-tie is checked as well


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_half_precision_differs_by_no_more_than_its_rounding(dtype, stage, temperature):
    model = toy(dtype=dtype, loud=False)
    requests = [Request([i + 1] * (2 * i + 1), 6, temperature, seed=i) for i in range(5)]
    check = Check(model, requests)
    STAGES[stage](model, requests, on_token=check.on_token)
    assert all(v.verdict != "WRONG" for v in check()), summary(check())


def test_one_check_for_nothing():
    assert summary(Check(MODEL, [])()).startswith("0/0 requests")
