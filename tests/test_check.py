"""The check that every script ends with: it finds what is wrong, and raises no false alarm."""
import math
import random
from dataclasses import replace

import pytest
import torch
from common import STAGES, VOCAB, examples, fixed, toy
from hypothesis import given, settings
from hypothesis import strategies as st

from checks import ties
from checks.check import TOLERANCE, Check, Verdict, summary
from model import cdf, sample
from request import Request

MODEL = toy(dtype=torch.float32)
# of the half precisions, one is enough for the quick size
DTYPES = [torch.float64, torch.float32, torch.bfloat16,
          pytest.param(torch.float16, marks=pytest.mark.thorough)]


def ran(model, stage, requests):
    """The Check of a run."""
    check = Check(model, requests)
    STAGES[stage](model, requests, on_token=check.on_token)
    return check


def five(temperature=0.0, **limits):
    """The last one has positions for 3 tokens only."""
    return [Request([i + 1] * n, 6, temperature, seed=i, **limits)
            for i, n in enumerate([1, 3, 5, 7, 22])]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_is_well(stage, dtype):
    requests = [*five(eos_token=7), *five(1.0, eos_token=7)]
    check = ran(toy(dtype=dtype, loud=TOLERANCE[dtype] < 1e-3), stage, requests)
    kinds = {v.verdict for v in check()}
    assert kinds <= {"identical", "near-tie"}, summary(check())
    if TOLERANCE[dtype] < 1e-3:   # half precision may have near-ties
        assert kinds == {"identical"}
        assert summary(check()).startswith("10/10 requests identical to unbatched, max |Δlogit| ")
        assert {r.finish_reason for r in requests} == {"stop", "length"}
        assert len(requests[4].generated) == 3


# --- what it sees -------------------------------------------------------------------------------

def put(request, told, i, token=None, factor=1.0):
    """Token i becomes another one, and its logits a multiple."""
    (before, logits), = told[i:i + 1] or told[:1]
    told[i:i + 1] = [(before if token is None else token, logits * factor)]
    request.generated[i:i + 1] = [told[i][0]]


def cut(request, told, reason):
    del request.generated[-1], told[-1]
    request.finish_reason = reason


def stops_late(request, told, check):
    request.eos_token = check.asked[request].eos_token = request.generated[1]
    request.finish_reason = "stop"


FAULTS = {   # name: (what is done to the request, what the check says)
    "a wrong token": (lambda r, told, _: put(r, told, 2, r.generated[2] ^ 1),
                      "token 2 is not what its own logits and random number give"),
    "other logits": (lambda r, told, _: put(r, told, 4, factor=1.001), "logits of token 4 differ"),
    "NaN": (lambda r, told, _: put(r, told, 0, factor=math.nan), "logits of token 0 differ by nan"),
    "a token short": (lambda r, told, _: cut(r, told, "length"), "after 5 tokens with 'length'"),
    "too many": (lambda r, told, _: put(r, told, 6), "after 7 tokens with 'length'"),
    "cancelled by nobody": (lambda r, told, _: setattr(r, "finish_reason", "cancelled"),
                            "after 6 tokens with 'cancelled'"),
    "stops late": (stops_late, "after 6 tokens with 'stop', not after "),
    "other reason": (lambda r, *_: setattr(r, "finish_reason", "stop"), "with 'stop', not after 6"),
    "untold": (lambda r, told, _: told.pop(), "on_token was not told its 6 tokens"),
    "told another": (lambda r, told, _: told.append((told[5][0] ^ 1, told.pop()[1])),
                     "on_token was not told its 6 tokens"),
    "cropped prompt": (lambda r, *_: setattr(r, "prompt", r.prompt[:2]), "its prompt has changed"),
    "lower limit": (lambda r, *_: setattr(r, "max_new_tokens", 2), "its max_new_tokens has"),
    "other eos_token": (lambda r, *_: setattr(r, "eos_token", 12), "its eos_token has changed"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_sees(fault, temperature):
    requests, (doctor, words) = five(temperature), FAULTS[fault]
    check = ran(MODEL, "interleaved", requests)
    doctor(requests[3], check.told[requests[3]], check)
    assert [v.verdict for v in check()] == ["identical"] * 3 + ["WRONG", "identical"]
    assert words in check()[3].detail and "4/5 requests" in summary(check())


@pytest.mark.parametrize("wrong, kind", [(False, "cancelled"), (True, "WRONG")])
def test_a_cancelled_request_is_right_as_far_as_it_came_and_counted_by_itself(wrong, kind):
    requests = five()
    check = Check(MODEL, requests)

    def on_token(request, token, logits):
        check.on_token(request, token, logits)
        if request is requests[3] and len(request.generated) == 2:
            requests[3].finish_reason = "cancelled"

    STAGES["dynamic"](MODEL, requests, on_token=on_token)   # it lets go of what has finished
    assert len(requests[3].generated) == 2
    if wrong:
        put(requests[3], check.told[requests[3]], 1, requests[3].generated[1] ^ 1)
    assert check()[3].verdict == kind
    assert summary(check()).startswith(f"4/{4 + wrong} requests identical to unbatched"
                                       + ", 1 cancelled" * (not wrong))


# --- near-ties ----------------------------------------------------------------------------------

def test_the_worked_example():
    """The figures at the head of ties.py."""
    reference, again = torch.tensor([[5.00, 4.98, 4.95], [5.01, 4.98, 4.94]], dtype=torch.float64)
    one = torch.stack([reference, reference]), torch.stack([reference, again])
    assert ties.rounding(*one) == [0, pytest.approx(0.04)]   # each token has its own
    assert float(cdf(reference, 1.0, top_k=2)[0]) == pytest.approx(0.505, abs=5e-4)
    greedy, sampled = Request([1]), Request([1], temperature=1.0, top_k=2)
    nucleus = Request([1], temperature=1.0, top_p=0.68)
    for request, u, stage, token, expected in [
            (greedy, None, [4.98, 5.00, 4.95], 1, 0.02),
            (greedy, None, [5.00, 4.98, 5.05], 2, 0.05),
            (sampled, 0.51, [5.01, 4.96, 4.94], 0, 0.02),
            (sampled, 0.60, [5.50, 4.90, 4.80], 0, 0.39),
            (sampled, 0.51, [4.99, 4.95, 4.96], 2, 0.03),
            (replace(sampled, temperature=2.0), 0.51, [5.05, 4.95, 4.94], 0, 0.06),
            (nucleus, 0.48, [5.02, 4.99, 4.93], 0, 0.02),     # c cut: a and b had to reach 0.68
            (nucleus, 0.60, [5.06, 4.92, 4.97], 2, 0.065),    # b cut: a and c had to
            (nucleus, 0.49, [4.80, 4.79, 5.50], 2, 0.09),     # and the edge had to get down to u
            (replace(nucleus, top_p=0.500), 0.80, [5.06, 4.92, 4.97], 2, 0.03),    # c got past b
            (replace(nucleus, top_p=0.671), 0.80, [4.98, 4.975, 4.97], 2, 0.02),   # c kept,
            (replace(nucleus, top_p=0.660), 0.40, [4.98, 4.98, 4.98], 1, 0.05)]:   # as it ties
        stage = torch.tensor(stage, dtype=torch.float64)
        assert sample(stage[None], [fixed(request, u)]) == [token]
        assert ties.margin(token, stage, reference, request, u) == pytest.approx(expected, abs=5e-3)


@settings(max_examples=examples(2000))
@given(seed=st.integers(0, 2**32), top_k=st.sampled_from([None, 6]), top_p=st.floats(0.01, 0.999),
       temperature=st.sampled_from([0.3, 1.0]), step=st.sampled_from([0.0, 0.01]))
def test_what_moves_each_logit_by_at_most_d_has_a_margin_of_at_most_2_d(
        seed, top_k, top_p, temperature, step):
    numbers, d = torch.Generator().manual_seed(seed), 0.01
    reference, moved = torch.rand(2, 9, generator=numbers, dtype=torch.float64)
    stage = reference + d * (2 * moved - 1)
    if step:   # many ties, as in low precision
        reference, d = (reference / step).round() * step, d + step
        stage = (stage / step).round() * step
    u = random.Random(seed).random()
    request = Request([1], temperature=temperature, top_k=top_k, top_p=top_p)
    token, = sample(stage[None], [fixed(request, u)])
    assert ties.margin(token, stage, reference, request, u) <= 2 * d + 1e-9


# Relative to the largest logit: a difference that rounding makes, and one that it does not make
# although TOLERANCE lets it pass
GAPS = {torch.float64: (2e-14, 5e-11), torch.float32: (2e-7, 5e-5),
        torch.float16: (1e-3, 8e-3), torch.bfloat16: (4e-3, 3.5e-2)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature, top_k, top_p", [
    (0.1, None, 1.0), (0.7, 5, 1.0), (1.5, None, 0.8), (1.5, 5, 1.0)])
def test_a_token_may_flip_at_a_near_tie_only(dtype, temperature, top_k, top_p, monkeypatch):
    """
    For token i, the stage raises the logits from some entry on by gaps[i], relative to the largest,
    and lowers those before it. The number falls between its CDF and the reference's.
    """
    def draw(request):   # in place of its random stream: each copy draws `numbers`
        request.drawn = getattr(request, "drawn", -1) + 1
        return numbers[request.drawn]

    (near, far), model = GAPS[dtype], toy(dtype=dtype, loud=False)
    if top_k:
        model.optimize()   # it has a wider copy as well
    for gaps, kind in {(near,): "near-tie", (-near,): "near-tie", (far,): "WRONG", (-far,): "WRONG",
                       (near, -near): "near-tie", (near, far): "WRONG",
                       (0.0, near): "near-tie"}.items():
        request, numbers = Request([1, 2, 3], len(gaps), temperature, top_k, top_p=top_p), []
        check = Check(model, [request])
        for i, gap in enumerate(gaps):
            row = model(torch.tensor([request.tokens]))[0, -1].double()
            edges = cdf(row, temperature, top_k, top_p)
            entry = int((edges - 0.5).abs().argmin())
            shift = torch.full((VOCAB,), gap * float(row.abs().max()), dtype=torch.float64)
            shift[:entry + 1] *= -1
            stage = (row + shift).to(dtype)
            moved = cdf(stage.double(), temperature, top_k, top_p)
            numbers.append(float(edges[entry] + moved[entry]) / 2)
            request.generated += sample(stage[None], [fixed(request, numbers[i])])
            check.on_token(request, request.generated[i], stage)
        request.finish_reason = "length"
        with monkeypatch.context() as patch:
            patch.setattr(Request, "draw", draw)
            verdict, = check()
        assert verdict.verdict == kind and f"token {len(gaps) - 1} has flipped" in verdict.detail


# --- the summary --------------------------------------------------------------------------------

def test_the_summary_counts_each_kind_by_itself():
    kinds = ["identical"] * 3 + ["near-tie"] * 2 + ["cancelled", "WRONG"]
    verdicts = [Verdict(f"r{i}", kind, i / 100, "why") for i, kind in enumerate(kinds)]
    assert summary(verdicts) == (
        "3/6 requests identical to unbatched, 2 near-ties, 1 cancelled, "
        "max |Δlogit| 6.0e-02 relative\nWRONG: request 'r6': why")
    assert summary(verdicts[:4]).startswith("3/4 requests identical to unbatched, 1 near-tie, max ")
    assert summary(Check(MODEL, [])()).startswith("0/0 requests")


def test_bit_for_bit_is_said_if_it_holds_for_all():
    right, cancelled = Verdict("a", equal=True), Verdict("b", "cancelled", equal=True)
    assert summary([right, cancelled]).endswith(", 1 cancelled, bit for bit")
    for other in Verdict("b"), Verdict("b", "WRONG"), Verdict("b", "near-tie", equal=True):
        assert "bit for bit" not in summary([right, other])
    assert "bit for bit" not in summary([])
