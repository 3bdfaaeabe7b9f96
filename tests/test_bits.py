"""Bit for bit: with optimize(), batched output equals the unbatched one exactly (docs/bits.md)."""
import copy
import sys
from dataclasses import replace
from functools import cache

import pytest
import torch
from common import STAGES, Workload, examples, smallest_pool, toy, workloads
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import native
from model import GPT, GPTConfig
from request import Request
from toolbox.check import Check
from toolbox.verdict import Verdict, summary

pytestmark = pytest.mark.skipif(not native.works(), reason="native.cpp is not in use here")
LOUD, FAST = toy(dtype=torch.float32), toy(dtype=torch.float32).optimize()
EXACT = ("no_cache", "unbatched", "ragged_varlen", "paged")


@cache
def model_of(n_head, n_embd):
    torch.manual_seed(n_embd)
    model = GPT(GPTConfig(120, 53, n_layer=2, n_head=n_head, n_embd=n_embd)).requires_grad_(False)
    for p in model.parameters():
        p.copy_(torch.randn(p.shape) / p.size(-1) ** 0.5)
    return model.optimize()


def outputs(model, stage, requests, threads=1, cancels=(), **knobs):
    """{name: (tokens, logits (n, V))} of a run in which some requests are cancelled on the way."""
    asked, logits = [replace(request) for request in requests], {r.name: [] for r in requests}

    def on_token(request, token, row):
        logits[request.name].append(row.clone())
        for i, j, k in cancels:
            if asked[j] is request and len(request.generated) == k:
                asked[i].cancel()

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        STAGES[stage](model, asked, on_token=on_token, **knobs)
    finally:
        torch.set_num_threads(before)
    return {r.name: (r.generated, logits[r.name], r.finish_reason) for r in asked}


def differences(model, stage, requests, **knobs):
    """What differs from stage 0 with a cache, in words. A cancelled request may end early."""
    assert model.uses().startswith("compiled step: yes")
    alone, found = outputs(model, "unbatched", requests), []
    for name, (tokens, rows, reason) in outputs(model, stage, requests, **knobs).items():
        expected, expected_rows, expected_reason = alone[name]
        n = len(tokens) if reason == "cancelled" else len(expected)
        if tokens != expected[:n] or reason not in ("cancelled", expected_reason):
            found.append(f"{name}: tokens")
        if not all(map(torch.equal, rows, expected_rows)):
            found.append(f"{name}: logits")
    assert model.uses().startswith("compiled step: yes")
    return found


@st.composite
def long_workloads(draw):
    """Prompts of up to 100 tokens with common beginnings: chunks of a few and of many queries."""
    stem, requests = draw(st.lists(st.integers(0, 52), max_size=70)), []
    for i in range(draw(st.integers(1, 6))):
        own = draw(st.lists(st.integers(0, 52), min_size=1, max_size=30))
        requests.append(Request(stem[:draw(st.sampled_from([0, 16, 48, 70]))] + own,
                                draw(st.integers(1, 8)), draw(st.sampled_from([0.0, 1.0])),
                                seed=draw(st.integers(0, 99)), name=f"r{i}",
                                priority=draw(st.integers(0, 2)),
                                arrival=draw(st.sampled_from([0, 0, 1, 4]))))
    size, index = draw(st.sampled_from([1, 3, 16, 50])), st.integers(0, len(requests) - 1)
    least = smallest_pool(requests, size, block_size=120)
    cancels = draw(st.lists(st.tuples(index, index, st.integers(1, 3)), max_size=2))
    return Workload(requests, cancels, draw(st.integers(1, 6)), draw(st.integers(1, 200)), None,
                    draw(st.one_of(st.none(), st.integers(least, 2 * least))), size,
                    draw(st.sampled_from(["fcfs", "sjf", "priority"])), draw(st.booleans()))


@pytest.mark.parametrize("stage", EXACT)
@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(workload=long_workloads(), threads=st.integers(1, 2),
       size=st.sampled_from([(1, 1), (2, 10), (3, 48), (2, 64), (1, 100)]))
def test_batched_equals_unbatched(stage, workload, threads, size):
    """Whatever the knobs, the neighbours, the pages and the threads; for heads of 1 to 100."""
    cancels = workload.cancels if stage in ("ragged_varlen", "paged") else ()
    assert differences(model_of(*size), stage, workload.requests, threads=threads, cancels=cancels,
                       **workload.knobs(stage)) == []


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(workload=workloads(), stage=st.sampled_from(EXACT[2:]))
def test_a_loud_model_too(workload, stage):
    assert differences(FAST, stage, workload.requests, cancels=workload.cancels,
                       **workload.knobs(stage)) == []


# --- each ingredient ------------------------------------------------------------------------------

REQUESTS = [Request([(7 * i + j) % 53 for j in range(length)], 4, temperature=i % 2, seed=i,
                    name=f"r{i}") for i, length in enumerate((1, 2, 15, 16, 17, 48, 60, 97))]
WAYS = [("ragged_varlen", {"token_budget": 23}), ("ragged_varlen", {"token_budget": 1000}),
        ("paged", {"page_size": 7, "token_budget": 61}), ("no_cache", {})]


def all_differences():
    return [each for size in ((3, 48), (2, 10), (1, 64)) for stage, knobs in WAYS
            for each in differences(copy.deepcopy(model_of(*size)), stage, REQUESTS, **knobs)]


def rebuilt(monkeypatch, folder, right="", wrong="", flags=()):
    """native.cpp with something else in it, until the test ends. torch's results to rounding."""
    source = native.SOURCE.read_text()
    assert not right or source.count(right) == 1
    for name in "library", "problem":
        monkeypatch.setattr(native, name, cache(getattr(native, name).__wrapped__))
    monkeypatch.setattr(native, "SOURCE", folder / "native.cpp")
    monkeypatch.setattr(native, "FLAGS", [*native.FLAGS, *flags])
    native.SOURCE.write_text(source.replace(right, wrong) if right else source)
    assert native.problem() is None


MUTANTS = {   # what stands in native.cpp, and another order of additions, or another rounding
    "a single query adds one feature after the other": (
        "*(vec*)(scores + r * all + s) = dots<1>(a + r * row, row, key + s, size);",
        "for (i64 j = 0; j < W; j++) { float sum = 0; for (i64 d = 0; d < size; d++)"
        " sum = std::fma(a[r * row + d], key[s + j][d], sum); scores[r * all + s + j] = sum; }"),
    "softmax adds up from the chunk's end": (
        "float total = sum(scores, seen, [](vec x) { return x; });",
        "float total = 0; for (i64 s = all; s-- > 0;) if (s < seen) total += scores[s]; "
        "if (all > seen) total = sum(scores, seen, [](vec x) { return x; });"),
    "the norms' sums depend on the row": (
        "float mean = sum(in, C, [](vec x) { return x; }) / C;",
        "i64 cut = r % 8 * C / 8; auto same = [](vec x) { return x; };"
        " float mean = (sum(in, cut, same) + sum(in + cut, C - cut, same)) / C;"),
    "a value is rounded before it is added, for a few queries": (
        "*o = multiply_add(weight - vec{}, *(const vec*)(value + d), *o);",
        "*o += (weight - vec{}) * *(const vec*)(value + d);"),
    "and so is a feature beyond the last vector": (
        "out[d] = std::fma(weight, value[d], out[d]);", "out[d] += weight * value[d];"),
    "a multiplication of a few rows rounds before it adds": (
        "sum[r][c] = multiply_add(a, b[c], sum[r][c]);",
        "sum[r][c] = R < 4 ? sum[r][c] + a * b[c] : multiply_add(a, b[c], sum[r][c]);"),
    "values are added up page by page": (
        "add(o + r * row, scores[r * all + s], value[s], size);",
        "{ static thread_local std::vector<float> part[ROWS]; part[r].resize(size);"
        " if (s % keys.page == 0) std::fill(part[r].begin(), part[r].end(), 0.f);"
        " add(part[r].data(), scores[r * all + s], value[s], size);"
        " if (s + 1 == seen || (s + 1) % keys.page == 0)"
        " for (i64 d = 0; d < size; d++) o[r * row + d] += part[r][d]; }"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("mutant", MUTANTS)
def test_another_order_is_found(mutant, monkeypatch, tmp_path):
    rebuilt(monkeypatch, tmp_path, *MUTANTS[mutant])
    assert all_differences()


X86 = ["-mno-avx512f"], ["-mno-avx512f", "-mno-avx2", "-D__ARM_NEON"]   # AVX2; vectors like ARM's


@pytest.mark.thorough
@pytest.mark.parametrize("flags", [
    ["-O1"], ["-funroll-all-loops", "-fno-tree-vectorize"], ["-ffp-contract=fast"],
    ["-mprefer-vector-width=256"], *([] if sys.platform == "darwin" else X86)], ids=" ".join)
def test_other_compilations_are_equal_to_themselves(flags, monkeypatch, tmp_path):
    """Other sizes of vectors, and what another compiler may do: no order is left to it."""
    rebuilt(monkeypatch, tmp_path, flags=flags)
    assert all_differences() == []


@pytest.mark.parametrize("stage, exact", [("paged", True), ("interleaved", False)])
def test_the_check_says_bit_for_bit(stage, exact):
    for model, other, says in (LOUD, None, False), (FAST, None, exact), (LOUD, FAST, exact):
        requests = [replace(request, prompt=[1, 2, 3]) for request in REQUESTS]
        check = Check(model, requests, exact=other)
        STAGES[stage](FAST, requests, on_token=check.on_token)
        assert summary(check()).endswith("8/8 requests identical to unbatched, bit for bit") == says
        assert ("max |Δlogit| " in summary(check())) != says
    (token, row), *_ = told = check.told[requests[3]]
    told[0] = token, row.clone()
    told[0][1][0] = row[0].nextafter(torch.tensor(9.0))   # the next number
    assert "bit for bit" not in summary(check())


def test_only_what_was_compared_is_bit_for_bit():
    right, cancelled = Verdict("a", equal=True), Verdict("b", "cancelled", equal=True)
    assert summary([right, cancelled]).endswith("1/1 requests identical to unbatched, 1 cancelled, "
                                                "bit for bit")
    for other in Verdict("b"), Verdict("b", "WRONG"), Verdict("b", "near-tie", equal=True):
        assert "bit for bit" not in summary([right, other])
    assert "bit for bit" not in summary([])
