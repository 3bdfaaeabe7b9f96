"""The check that every script ends with: it finds what is wrong, and raises no false alarm."""
from dataclasses import replace

import pytest
import torch
from common import STAGES, VOCAB, alone, toy

import generate_interleaved
import generate_ragged
from generate_dynamic import Rectangle
from model import cdf, sample
from request import Request
from toolbox.check import TOLERANCE, Check, Verdict, summary

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


def one_call_more(requests, check):
    check.on_token(requests[3], 5, logits_of(requests[3], check)[0])


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


@pytest.mark.parametrize("change", [
    wrong_token, one_token_short, one_token_unannounced, one_call_more, one_token_more,
    other_logits, nan_logits, cropped_prompt, lower_limit, cancelled_beyond_its_limits,
    other_reason])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_sees(change, temperature):
    verdicts = checked(change=change, temperature=temperature)
    assert [v.verdict for v in verdicts] == ["identical"] * 3 + ["WRONG", "identical"]
    assert "WRONG: request 'r3'" in summary(verdicts) and "4/5 requests" in summary(verdicts)


def test_it_sees_the_published_mask(monkeypatch):
    class Published(Rectangle):
        def lay_out(self, device):
            super().lay_out(device)
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
    "one random stream for all": lambda logits, requests, shared=Request([1], seed=99): sample(
        logits, [fixed(request, shared.draw()) for request in requests]),
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
    requests = [Request([i + 1] * (2 * i + 1), 12, temperature, top_k, i) for i in range(5)]
    check = Check(model, requests)
    monkeypatch.setattr(generate_ragged, "sample", SAMPLERS[sampler])
    STAGES["ragged_varlen"](model, requests, on_token=check.on_token)
    assert "WRONG" in [v.verdict for v in check()]


# Relative to the largest logit: a difference that rounding makes, and one that it does not make
# although rule 1 lets it pass
GAPS = {torch.float64: (2e-14, 5e-11), torch.float32: (1e-7, 5e-5),
        torch.float16: (1e-3, 8e-3), torch.bfloat16: (4e-3, 3.5e-2)}
DTYPES = pytest.mark.parametrize("dtype", GAPS)


def flip(model, request, change, u=0.5, later=0):
    """The verdict on a request whose first token the stage made of the logits change(logits)."""
    request = replace(request, max_new_tokens=3, name="r0")
    check = Check(model, [request])

    def on_token(request, token, logits):
        if len(request.generated) == 1:
            logits = change(logits.clone())
            [request.generated[0]] = sample(logits[None], [fixed(request, u)])
        check.on_token(request, token, logits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Request, "draw", lambda request: u)
        STAGES["interleaved"](model, [request], on_token=on_token)
        request.generated[2] ^= later
        return check()[0]


def almost_tied(dtype, gap, rank=0):
    """
    A model whose logits of `rank` and the next one are almost tied after the prompt [1, 2, 3], as
    the two embeddings differ by a factor only; and a function that swaps these two logits.
    """
    model = toy(dtype=dtype, loud=False)
    logits = alone(model, Request([1, 2, 3], 1))[1][0].double()
    one = int(logits.sort(descending=True).indices[rank])
    two = next(token for token in range(4, VOCAB) if logits[token] < logits[one])
    size = float(logits.abs().max() / logits[one])
    model.wte.weight[two] = (model.wte.weight[one].double() * (1 - gap * size)).to(dtype)

    def swap(logits):
        logits[[one, two]] = logits[[two, one]]
        return logits
    return model, swap


@DTYPES
def test_a_greedy_token_may_flip_at_a_near_tie_only(dtype):
    model, swap = almost_tied(dtype, GAPS[dtype][0])
    verdict = flip(model, Request([1, 2, 3]), swap)
    assert verdict.verdict == "near-tie", verdict
    assert summary([verdict]).startswith("0/1 requests identical to unbatched, 1 near-tie, max ")
    assert flip(model, Request([1, 2, 3]), swap, later=1).verdict == "WRONG"   # checked as well
    assert flip(model.optimize(), Request([1, 2, 3]), swap).verdict == "near-tie"

    for gap, why in ((GAPS[dtype][1], "token 0 has flipped: margin "),
                     (3 * TOLERANCE[dtype], "logits of token 0 differ by ")):
        model, swap = almost_tied(dtype, gap)
        verdict = flip(model, Request([1, 2, 3]), swap)
        assert verdict.verdict == "WRONG" and why in verdict.detail


def shifted(model, request, gaps):
    """
    The verdict on a sampled request whose stage shifts the CDF. For token i, it raises the logits
    from some entry on by gaps[i], relative to the largest, and lowers those before it by as much.
    The random number falls between the reference's CDF at this entry and the stage's.
    """
    request = replace(request, max_new_tokens=len(gaps))
    check, numbers = Check(model, [request]), []

    def edges(row):
        return cdf(row.double(), request.temperature, request.top_k)

    def on_token(request, token, logits):
        i = len(request.generated) - 1
        row = model(torch.tensor([request.tokens[:-1]]))[0, -1]
        entry = int((edges(row) - 0.5).abs().argmin())
        shift = torch.full((VOCAB,), gaps[i] * float(row.abs().max()), dtype=torch.float64)
        shift[:entry + 1] *= -1
        stage = (row.double() + shift).to(row.dtype)
        numbers.append(float(edges(row)[entry] + edges(stage)[entry]) / 2)
        [request.generated[i]] = sample(stage[None], [fixed(request, numbers[i])])
        check.on_token(request, token, stage)

    def draw(request):
        request.drawn = getattr(request, "drawn", -1) + 1
        return numbers[request.drawn]

    STAGES["interleaved"](model, [request], on_token=on_token)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Request, "draw", draw)
        return check()[0]


@DTYPES
@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.5])
@pytest.mark.parametrize("top_k", [None, 5])
def test_a_sampled_token_may_flip_at_a_near_tie_only(dtype, temperature, top_k):
    model, (near, far) = toy(dtype=dtype, loud=False), GAPS[dtype]
    for gaps, expected in {(near,): ("near-tie", 0), (-near,): ("near-tie", 0),
                           (far,): ("WRONG", 0), (-far,): ("WRONG", 0),
                           (near, -near): ("near-tie", 1), (near, far): ("WRONG", 1)}.items():
        verdict = shifted(model, Request([1, 2, 3], 1, temperature, top_k), gaps)
        kind, place = expected
        assert verdict.verdict == kind and f"token {place} has flipped" in verdict.detail, verdict


@DTYPES
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_the_kth_token_may_give_way_at_a_near_tie_only(dtype, top_k):
    for gap, expected in zip(GAPS[dtype], ("near-tie", "WRONG")):
        model, swap = almost_tied(dtype, gap, rank=top_k - 1)
        verdicts = [flip(model, Request([1, 2, 3], 1, 1.0, top_k), swap, u=i / 20)
                    for i in range(20)]
        kinds = {v.verdict for v in verdicts}
        assert expected in kinds <= {"identical", expected}
        assert all("has flipped" in v.detail for v in verdicts if v.verdict != "identical")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_stage_that_is_slightly_wrong(dtype, temperature, monkeypatch):
    """It favours tokens with large ids. Rule 1 lets its logits pass; rule 3 does not."""
    def slanted(logits, requests):
        slant = torch.linspace(-1, 1, logits.size(-1), dtype=dtype)
        logits += GAPS[dtype][1] * logits.abs().amax(-1, keepdim=True) * slant
        return sample(logits, requests)

    model = toy(dtype=dtype, loud=False, vocab_size=200)
    requests = [Request([7 * i] * (i % 9 + 1), 12, temperature, seed=i) for i in range(25)]
    check = Check(model, requests)
    monkeypatch.setattr(generate_ragged, "sample", slanted)
    STAGES["ragged_varlen"](model, requests, on_token=check.on_token)
    wrong = [v.detail for v in check() if v.verdict == "WRONG"]
    assert wrong and all("has flipped" in detail for detail in wrong)


def test_each_token_has_a_rounding_of_its_own():
    check, tokens = Check(MODEL, []), [1, 2, 3, 4]
    logits = check.alone(MODEL, tokens, 3)
    logits[0, 5] += 1
    first, *others = check.rounding(tokens, logits)
    assert first == pytest.approx(4, rel=1e-3) and all(0 < other < 1e-3 for other in others)


@DTYPES
def test_the_wider_model_is_made_only_when_a_token_flips(dtype):
    model = toy(dtype=dtype, loud=False)
    requests = [Request([1, 2, 3], 6)]
    check = Check(model, requests)
    STAGES["unbatched"](model, requests, on_token=check.on_token)
    assert check()[0].verdict == "identical" and "wider" not in vars(check)


def test_the_summary_counts_each_kind_by_itself():
    kinds = ["identical"] * 3 + ["near-tie"] * 2 + ["cancelled", "WRONG"]
    verdicts = [Verdict(f"r{i}", kind, i / 100, "why") for i, kind in enumerate(kinds)]
    assert summary(verdicts) == (
        "3/6 requests identical to unbatched, 2 near-ties, 1 cancelled, "
        "max |Δlogit| 6.0e-02 relative\nWRONG: request 'r6': why")
    assert summary(verdicts[:4]).startswith("3/4 requests identical to unbatched, 1 near-tie, max ")


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
