"""The inverse CDF, and the random streams. (Who draws when: an extra draw breaks the contract.)"""
import math

import numpy as np
import pytest
import torch
from common import fixed
from hypothesis import given, settings
from hypothesis import strategies as st

from model import cdf, keep_top, sample
from request import Request

LOGITS = torch.tensor([2.0, -1.0, 0.5, 3.0, 2.9, -4.0], dtype=torch.float64)


@pytest.mark.parametrize("temperature, top_k, top_p", [
    (0.3, None, 1.0), (2.0, 3, 1.0), (1.0, 1, 1.0), (1.0, 100, 1.0), (1.0, None, 0.5),
    (1.0, None, 0.45), (2.0, None, 0.75), (2.0, 3, 0.6), (0.3, 100, 1e-9)])
def test_each_token_has_an_interval_as_wide_as_its_probability(temperature, top_k, top_p):
    x = LOGITS.numpy() / temperature
    if top_k and top_k < len(x):
        x = np.where(x >= np.sort(x)[-top_k], x, -np.inf)
    p = np.exp(x - x.max())
    more_likely = np.array([p[p > each].sum() for each in p]) / p.sum()
    p[more_likely >= top_p] = 0   # the tokens before it add up to top_p already
    edges = cdf(LOGITS, temperature, top_k, top_p)
    assert edges[-1] == 1
    np.testing.assert_allclose(np.diff(edges.numpy(), prepend=0), p / p.sum(), atol=1e-15)


def test_top_p_keeps_all_that_tie_with_the_last_and_stops_where_the_sum_is_exact():
    x = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64).log()
    for top_p, number in ((0.5, 1), (0.50001, 2), (0.75, 2), (0.7500001, 4), (0.9, 4), (1, 4)):
        assert int((keep_top(x, 1.0, None, top_p) > -math.inf).sum()) == number, top_p
    assert (keep_top(x[2:], 1.0, None, 1e-300) > -math.inf).tolist() == [True, True]
    flat = torch.zeros(7, dtype=torch.float64)   # adds up to less than 1, by rounding
    assert (keep_top(flat, 1.0, None, math.nextafter(1, 0)) == 0).all()


def test_top_p_is_reached_by_a_sum_that_only_rounding_keeps_below_it():
    x = torch.tensor([0.6, 0.2, 0.1, 0.1], dtype=torch.float64).log()
    for top_p, number in ((0.6, 1), (0.8, 2), (0.8 + 1e-9, 4)):
        assert int((keep_top(x, 1.0, None, top_p) > -math.inf).sum()) == number, top_p


@settings(max_examples=300, deadline=None, derandomize=True)
@given(logits=st.lists(st.floats(-50, 50), min_size=1, max_size=20),
       u=st.floats(0, 1, exclude_max=True),
       temperature=st.sampled_from([1e-300, 1e-3, 0.7, 1.0, 100.0]),
       top_k=st.one_of(st.none(), st.integers(1, 25)),
       top_p=st.one_of(st.just(1.0), st.floats(0, 1, exclude_min=True)))
def test_any_logits_any_number_give_a_token_of_positive_probability(
        logits, u, temperature, top_k, top_p):
    request = fixed(Request([0], temperature=temperature, top_k=top_k, top_p=top_p), u)
    x = torch.tensor([logits], dtype=torch.float64)
    token, = sample(x, [request])
    assert 0 <= token < len(logits)
    edges = cdf(x[0], temperature, top_k, top_p)
    low = edges[token - 1] if token else 0.0
    assert low <= u < edges[token]
    assert top_k is None or sum(value > logits[token] for value in logits) < top_k


@pytest.mark.parametrize("logits", [[1.0, math.nan], [1.0, math.inf], [-math.inf, -math.inf]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused_by_name(logits, temperature):
    request, other = (Request([1], temperature=temperature, name=name) for name in ("r3", "r2"))
    stream = other.random_stream.getstate()
    with pytest.raises(ValueError, match="request 'r3': the model's logits are not finite") as bad:
        sample(torch.tensor([[1.0, 2.0], logits]), [other, request])
    assert bad.value.request is request and other.random_stream.getstate() == stream
    assert sample(torch.tensor([[-math.inf, 0.0]]), [request]) == [1]   # one may be impossible


def test_tokens_are_chosen_in_float64_whatever_the_dtype_of_the_logits():
    x, request = torch.arange(300.0).sin(), Request([1], temperature=1.0)
    rough, exact = (float(cdf(each, 1.0)[150]) for each in (x, x.double()))
    u = (rough + exact) / 2
    assert rough != exact and sample(x[None], [fixed(request, u)]) == [150 + (u >= exact)]


def test_requests_with_the_same_seed_draw_the_same_numbers_and_others_do_not():
    a, b, c = Request([1], seed=5), Request([2, 3], seed=5), Request([1], seed=6)
    drawn = [[r.draw() for _ in range(4)] for r in (a, b, c)]
    assert drawn[0] == drawn[1] != drawn[2] and len(set(drawn[0])) == 4
