"""The check that every script ends with: it finds what is wrong, and raises no false alarm."""
import math
import random
from dataclasses import replace

import pytest
import torch
from common import RIGHT, STAGES, VOCAB, examples, fixed, toy
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.checks import ties
from lab.checks.check import TOLERANCE, Check, Verdict, summary
from model import cdf, sample
from request import Request

MODEL = toy(dtype=torch.float32)
# of the half precisions, one is enough for the quick size
DTYPES = [torch.float64, torch.float32, torch.bfloat16,
          pytest.param(torch.float16, marks=pytest.mark.thorough)]


def ran(model, stage, requests):
    """A run: (the requests, their Check)."""
    check = Check(model, requests)
    STAGES[stage](model, requests, on_token=check.on_token)
    return requests, check


def five(temperature=0.0, **limits):
    """The last one has positions for 3 tokens only."""
    return [Request([i + 1] * n, 6, temperature, seed=i, **limits)
            for i, n in enumerate([1, 3, 5, 7, 22])]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_is_well(stage, dtype):
    requests, check = ran(toy(dtype=dtype, loud=TOLERANCE[dtype] < 1e-3), stage,
                          [*five(eos_token=7), *five(1.0, eos_token=7)])
    kinds = {v.verdict for v in check()}
    assert kinds <= {"identical", "near-tie"}, summary(check())
    if TOLERANCE[dtype] < 1e-3:   # half precision may have near-ties
        assert kinds == {"identical"}
        assert summary(check()).startswith(f"10/10 {RIGHT}, max |Δlogit| ")
        assert {r.finish_reason for r in requests} == {"stop", "length"}
        assert len(requests[4].generated) == 3


# --- what it sees -------------------------------------------------------------------------------

def put(request, told, i, token=None, factor=1.0):
    """Token i becomes another one, and its logits a multiple."""
    (before, logits), = told[i:i + 1] or told[:1]
    told[i:i + 1] = [(before if token is None else token, logits.double() * factor)]
    request.generated[i:i + 1] = [told[i][0]]


def cut(request, told, reason):
    del request.generated[-1], told[-1]
    request.finish_reason = reason


def cut_and_wrong(request, told):
    cut(request, told, "cancelled")
    put(request, told, 1, request.generated[1] ^ 1)


def stops_late(request, told):
    request.eos_token = request.generated[1]
    request.finish_reason = "stop"


FAULTS = {   # name: (what is done to the request, what the check says)
    "a wrong token": (lambda r, told: put(r, told, 2, r.generated[2] ^ 1),
                      "token 2 is not what its own logits and random number give"),
    "NaN": (lambda r, told: put(r, told, 0, factor=math.nan), "logits of token 0 differ by nan"),
    "a token short": (lambda r, told: cut(r, told, "length"), "after 5 tokens with 'length'"),
    "too many": (lambda r, told: put(r, told, 6), "after 7 tokens with 'length'"),
    "cancelled by nobody": (lambda r, told: setattr(r, "finish_reason", "cancelled"),
                            "after 6 tokens with 'cancelled'"),
    "cancelled, and wrong": (cut_and_wrong, "token 1 is not what its own logits"),
    "stops late": (stops_late, "after 6 tokens with 'stop', not after "),
    "other reason": (lambda r, told: setattr(r, "finish_reason", "stop"), "'stop', not after 6"),
    "untold": (lambda r, told: told.pop(), "on_token was not told its 6 tokens"),
    "told another": (lambda r, told: told.append((told[5][0] ^ 1, told.pop()[1])),
                     "on_token was not told its 6 tokens"),
    "cropped prompt": (lambda r, told: setattr(r, "prompt", r.prompt[:2]), "its prompt has"),
    "lower limit": (lambda r, told: setattr(r, "max_new_tokens", 2), "its max_new_tokens has"),
    "other eos_token": (lambda r, told: setattr(r, "eos_token", 12), "its eos_token has changed"),
}


@pytest.mark.parametrize("dtype, tolerance", [
    (torch.float64, 1e-10), (torch.float32, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)])
def test_how_far_logits_may_be_apart(dtype, tolerance):
    """Relative to the largest logit, at any token."""
    for share, verdict in (0.9, "identical"), (1.1, "WRONG"):
        (request,), check = ran(toy(dtype=dtype, loud=tolerance < 1e-3), "unbatched", five()[:1])
        put(request, check.told[request], 1, factor=1 + share * tolerance)
        found, = check()
        assert found.verdict == verdict
        assert found.difference == pytest.approx(share * tolerance, rel=0.05)   # the largest


@pytest.mark.parametrize("fault", [*FAULTS, None])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_sees(fault, temperature):
    """None: a request that was cancelled is right as far as it came, and counted by itself."""
    requests, check = ran(MODEL, "interleaved", five(temperature))
    doctor, words = FAULTS[fault] if fault else (lambda r, told: cut(r, told, "cancelled"), "")
    doctor(requests[3], check.told[requests[3]])
    if fault == "stops late":
        check.asked[requests[3]].eos_token = requests[3].eos_token
    assert [v.verdict for v in check()] == [
        *["identical"] * 3, "WRONG" if fault else "aborted", "identical"]
    assert words in check()[3].detail
    assert summary(check()).startswith(f"4/5 {RIGHT}" if fault else
                                       f"4/4 {RIGHT}, 1 aborted")


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
GAPS = {torch.float64: (2e-14, 1e-12), torch.float32: (2e-7, 5e-5),
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

def test_the_summary_counts_each_kind_by_itself_and_says_bit_for_bit_if_it_holds_for_all():
    kinds = ["identical"] * 3 + ["near-tie"] * 2 + ["aborted", "WRONG"]
    verdicts = [Verdict(f"r{i}", kind, i / 100, "why") for i, kind in enumerate(kinds)]
    assert summary(verdicts) == (
        f"3/6 {RIGHT}, 2 near-ties, 1 aborted, "
        "max |Δlogit| 6.0e-02 relative\nWRONG: request 'r6': why")
    assert summary(verdicts[:4]).startswith(f"3/4 {RIGHT}, 1 near-tie, max ")
    assert summary([]).startswith("0/0 requests") and "bit for bit" not in summary([])
    right, aborted = Verdict("a", equal=True), Verdict("b", "aborted", equal=True)
    assert summary([right, aborted]).endswith(", 1 aborted, bit for bit")
    for other in Verdict("b"), Verdict("b", "WRONG"), Verdict("b", "near-tie", equal=True):
        assert "bit for bit" not in summary([right, other])


def test_bit_for_bit_is_said_of_every_token():
    model, request = toy(), Request([1, 2], 3)
    STAGES["unbatched"](model, request)
    for changed, said in (None, True), (0, False):
        check = Check(model, [request])
        rows = ties.run_alone(model, request.prompt, request.generated)
        for i, (token, row) in enumerate(zip(request.generated, rows)):
            check.on_token(request, token, row * (1 + 1e-13 * (i == changed)))
        assert ("bit for bit" in summary(check())) == said
