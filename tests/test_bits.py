"""
kernels/native.cpp computes what torch computes, and bit for bit the same for a request in a batch
as for the request alone (docs/bits.md). Mistakes put into it show that these tests would find them.
"""
import copy
import os
import platform
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from common import STAGES, examples, knobs_of, quick, smallest_pool, toy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import generate_ragged
from beyond.llama import Llama, LlamaConfig
from kernels import native
from model import GPT, GPTConfig
from request import Request
from toolbox.check import Check
from toolbox.verdict import summary

pytestmark = pytest.mark.skipif(not native.works(), reason="native.cpp is not in use here")
thorough = pytest.mark.thorough
EXACT = ("no_cache", "unbatched", "ragged_varlen", "paged")   # the stages with compiled steps


@cache
def models(n_head, n_embd, n_kv_head=None):
    """
    A GPT, or with n_kv_head a Llama in which each head of keys is normed and serves a group, with
    large random weights; and its optimized copy.
    """
    torch.manual_seed(n_embd)
    plain = GPT(GPTConfig(120, 53, 2, n_head, n_embd)) if n_kv_head is None else Llama(LlamaConfig(
        120, 53, 2, n_head, n_kv_head, n_embd, head_size=10, ffn=3 * n_embd, qk_norm=True))
    for p in plain.requires_grad_(False).parameters():
        p.copy_(torch.randn(p.shape) / p.size(-1) ** 0.5)
    return plain, copy.deepcopy(plain).optimize()


def faults(size, stage, requests, threads=1, cancels=False, **knobs):
    """
    The verdicts on those requests whose logits are not the plain model's to rounding, or not the
    optimized model's own, for the request alone and on one thread, bit for bit. cancels: the first
    token cancels the last request.
    """
    plain, fast = models(*size)
    asked, fast = [*map(replace, requests)], copy.deepcopy(fast)   # which packs its weights anew
    check, before = Check(plain, asked, exact=fast), torch.get_num_threads()

    def on_token(*told):
        check.on_token(*told)
        if cancels:
            asked[-1].cancel()

    torch.set_num_threads(threads)
    try:
        STAGES[stage](fast, asked, on_token=on_token, **knobs)
    finally:
        torch.set_num_threads(before)
    assert fast.uses().startswith("compiled step: yes")
    return [verdict for verdict in check() if verdict.verdict == "WRONG" or not verdict.equal
            or verdict.difference > 2e-5]


STEM = [7 * i % 53 for i in range(100)]   # with pages, they share it
REQUESTS = [Request(STEM[:length] + [i], 4, temperature=i % 2, seed=i, name=f"r{i}",
                    priority=i % 3, arrival=i % 4)
            for i, length in enumerate((0, 1, 14, 15, 16, 47, 59, 96))]


@pytest.mark.parametrize("stage", EXACT)
@settings(max_examples=examples(200))
@given(data=st.data(), requests=st.lists(st.sampled_from(REQUESTS), min_size=1, unique_by=id),
       threads=st.integers(1, 3), cancels=st.booleans(),
       size=st.sampled_from([(1, 1), (2, 10), (3, 48), (2, 64), (1, 100), (4, 200), (6, 20, 2),
                             (4, 30, 1)]))
def test_batched_equals_unbatched(stage, data, requests, threads, cancels, size):
    """Whatever the knobs, the neighbours, the pages and the threads; for heads of 1 to 100."""
    page_size = data.draw(st.sampled_from([1, 3, 16, 50]))
    least = smallest_pool(requests, page_size, block_size=120)
    knobs = knobs_of(
        stage, max_batch=data.draw(st.integers(1, 6)), token_budget=data.draw(st.integers(1, 200)),
        pages=data.draw(st.sampled_from([None, least, 2 * least])), page_size=page_size,
        policy=data.draw(st.sampled_from(["fcfs", "sjf", "priority"])),
        share_prefixes=data.draw(st.booleans()))
    assert faults(size, stage, requests, threads, cancels, **knobs) == []


@settings(max_examples=examples(400))
@given(m=st.integers(1, 40), k=st.integers(1, 1700), n=st.integers(1, 130), gelu=st.booleans(),
       bias=st.booleans(), seed=st.integers(0, 99))
def test_a_multiplication_of_any_size(m, k, n, gelu, bias, seed):
    random = torch.Generator().manual_seed(seed)
    x, weight, b = (torch.randn(s, generator=random) for s in ((m, 2 * k), (n, k), (n,)))
    x, b = x[:, ::2], b if bias else None   # of any stride
    y = native.multiply(x, native.pack(weight), n, b, gelu)
    expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
    size = float(expected.abs().max()) + k**0.5
    expected = F.gelu(expected, approximate="tanh") if gelu else expected
    assert (y - expected).abs().max() <= 2e-6 * size
    # a row's result does not depend on the rows beside it, to the last bit
    assert torch.equal(native.multiply(x[m // 2:], native.pack(weight), n, b, gelu), y[m // 2:])


def test_nan_and_infinity_stay():
    x = torch.tensor([[torch.nan, 1.0], [torch.inf, 0.0], [1e30, 1e30], [1.0, 2.0]])
    weight, model = torch.ones(3, 2), toy(dtype=torch.float32).optimize()
    expected = F.gelu(F.linear(x, weight), approximate="tanh")
    found = native.multiply(x, native.pack(weight), 3, gelu=True)
    torch.testing.assert_close(found, expected, equal_nan=True)
    model.wpe.weight[5] = torch.nan   # every later token sees this one's key
    with pytest.raises(ValueError, match="not finite"):
        generate_ragged.generate(model, [Request([1, 2, 3, 4, 5, 6, 7])])


# --- what is wrong in native.cpp, or compiled in another way --------------------------------------

WAYS = [("ragged_varlen", {"token_budget": 23}),
        ("ragged_varlen", {"token_budget": 1000, "threads": 2}),
        ("paged", {"page_size": 7, "token_budget": 61, "threads": 3}), ("no_cache", {})]


def all_faults():
    """Of steps that hold decodes and chunks of 1 to 97 tokens, with and without a past."""
    return (fault for size in ((3, 48), (2, 10), (1, 64), (6, 20, 2)) for stage, knobs in WAYS
            for fault in faults(size, stage, REQUESTS, **knobs))


def fresh(monkeypatch):
    """Until the test ends, native has not loaded or tried anything yet."""
    for name in "library", "problem":
        monkeypatch.setattr(native, name, cache(getattr(native, name).__wrapped__))


def rebuilt(monkeypatch, folder, right="", wrong="", flags=()):
    """native.cpp with something else in it, until the test ends."""
    source = native.SOURCE.read_text()
    assert not right or source.count(right) == 1
    fresh(monkeypatch)
    monkeypatch.setattr(native, "SOURCE", Path(folder, "native.cpp"))
    monkeypatch.setattr(native, "FLAGS", [*native.FLAGS, *flags])
    native.SOURCE.write_text(source.replace(right, wrong) if right else source)


SEES = "softmax(scores + r * all, {}, seen, scale)"
OWN = "start + 1 + (i + r) * grows"
WRONG = {   # what stands in native.cpp, and what gives other numbers
    "a query misses its own key": (
        SEES.format(OWN), SEES.format(f"std::max<i64>({OWN} - 1, 1)")),
    "a query sees the next key": (
        SEES.format(OWN), SEES.format(f"min({OWN} + 1, seen)")),
    "a chunk has no past": (
        "seen = start + 1 + (i + rows - 1) * grows;", "seen = i + rows, start = 0;"),
    "keys overwrite the past": ("keys[p.start + i]", "keys[i]"),
    "all pages are the first one": ("table[s / page]", "table[0]"),
    "positions in the stream": ("M.wpe[positions[r] * C", "M.wpe[r % 120 * C"),
    "the logits of the first tokens": (
        "pieces[p].first + pieces[p].n - n;", "pieces[p].first;"),
    "no residual": ("sum = after == ADD ? sum + bias : bias;", "sum = bias;"),
    "unscaled scores": ("scale = 1 / std::sqrt(float(size));", "scale = 1;"),
    "another activation": ("part[j] = gelu(part[j])", "part[j] *= gelu(1)"),
    "no gate": ("part[j] *= silu(by[j]);", "part[j] += silu(by[j]);"),
    "another head's keys": ("item % heads / group;", "item % (heads / group);"),
    "angles of places in the stream": ("float(positions[r]) * M", "float(r) * M"),
    "turned the other way": ("b[i] * cos[i] + from * sin[i]", "b[i] * cos[i] - from * sin[i]"),
    "no norm of a head": ("if (norm.weight) normalise(a, a", "if (false) normalise(a, a")}
REORDERED = {   # another order of additions, or another rounding
    "a single query adds one feature after the other": (
        "*(vec*)(scores + r * all + s) = dots<1>(a + r * row, row, key + s, size);",
        "for (i64 j = 0; j < W; j++) { float sum = 0; for (i64 d = 0; d < size; d++)"
        " sum = std::fma(a[r * row + d], key[s + j][d], sum); scores[r * all + s + j] = sum; }"),
    "softmax adds up from the chunk's end": (
        "float total = sum(scores, seen, [](vec x) { return x; });",
        "float total = 0; for (i64 s = all; s-- > 0;) if (s < seen) total += scores[s]; "
        "if (all > seen) total = sum(scores, seen, [](vec x) { return x; });"),
    "the norms' sums depend on the row's place": (
        "float mean = norm.bias ? sum(in, C, [](vec x) { return x; }) / C : 0;",
        "i64 cut = i64(in) / 4 / C % 8 * C / 8; auto same = [](vec x) { return x; };"
        " float mean = norm.bias ? (sum(in, cut, same) + sum(in + cut, C - cut, same)) / C : 0;"),
    "a value is rounded before it is added, for a few queries": (
        "*o = multiply_add(weight - vec{}, *(const vec*)(value + d), *o);",
        "*o += (weight - vec{}) * *(const vec*)(value + d);"),
    "a multiplication of a few rows rounds before it adds": (
        "sum[r][c] = multiply_add(a, b[c], sum[r][c]);",
        "sum[r][c] = R < 4 ? sum[r][c] + a * b[c] : multiply_add(a, b[c], sum[r][c]);"),
    "values are added up page by page": (
        "add(o + r * row, scores[r * all + s], value[s], size);",
        "{ static thread_local std::vector<float> part[ROWS]; part[r].resize(size);"
        " if (s % keys.page == 0) std::fill(part[r].begin(), part[r].end(), 0.f);"
        " add(part[r].data(), scores[r * all + s], value[s], size);"
        " if (s + 1 == seen || (s + 1) % keys.page == 0)"
        " for (i64 d = 0; d < size; d++) o[r * row + d] += part[r][d]; }")}


@pytest.mark.parametrize("name", quick([*WRONG, *REORDERED], ["a query misses its own key"]))
def test_a_mistake_in_the_source_is_found(name, monkeypatch, tmp_path, capsys):
    """Above; and wrong numbers by the library's trial, too, so that nobody uses it."""
    rebuilt(monkeypatch, tmp_path, *{**WRONG, **REORDERED}[name])
    assert native.works() == (name in REORDERED)
    said = "optimize(): native.cpp computes something else than torch; using torch's kernels\n"
    assert capsys.readouterr().err == (said if name in WRONG else "")
    monkeypatch.setattr(native, "problem", lambda: None)
    try:
        assert any(all_faults())
    except ValueError as error:   # keys that were never written may be anything
        assert "not finite" in str(error)


AVX2 = ["-mno-avx512f"]
ARM = [*AVX2, "-mno-avx2", "-D__ARM_NEON"]   # vectors of ARM's size


@thorough
@pytest.mark.parametrize("flags", [
    ["-O1"], ["-funroll-all-loops", "-fno-tree-vectorize"], ["-ffp-contract=fast"],
    *[pytest.param(flags, marks=pytest.mark.skipif(
        platform.machine() != "x86_64", reason="these flags are for x86-64"))
      for flags in (["-mprefer-vector-width=256"], AVX2, ARM)]], ids=" ".join)
def test_other_compilations_are_equal_to_themselves(flags, monkeypatch, tmp_path):
    """Other sizes of vectors, and what another compiler may do: no order is left to it."""
    rebuilt(monkeypatch, tmp_path, flags=flags)
    assert native.works() and [*all_faults()] == []
    assert flags not in (AVX2, ARM) or native.library().panel_width() == 16


SANITIZED = """
import sys
import pytest
import test_bits
test_bits.rebuilt(pytest.MonkeyPatch(), *sys.argv[1:], flags=[
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"])
test_bits.test_a_multiplication_of_any_size()
test_bits.test_nan_and_infinity_stay()
assert [*test_bits.all_faults()] == []
"""


@thorough
@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")
@pytest.mark.parametrize("right, wrong, message", [
    ("", "", ""),
    ("x = x > -87.f ? x < 88.f ? x : 88.f : -87.f;", "x = x < -87.f ? -87.f : x > 88.f ? 88.f : x;",
     "runtime error"),
    ("j < cols; j++) part[j] = gelu", "j <= cols; j++) part[j] = gelu", "AddressSanitizer")],
    ids=["as it is", "undefined", "out of bounds"])
def test_native_under_sanitizers(right, wrong, message, tmp_path):
    """In a build that stops at the first fault."""
    libraries = [subprocess.run([*native.COMPILER.split(), f"-print-file-name={name}"],
                                capture_output=True, text=True, check=True).stdout.strip()
                 for name in ("libasan.so", "libubsan.so")]
    if not all(map(os.path.isabs, libraries)):
        pytest.skip(f"{native.COMPILER} has no sanitizers here")
    tests = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", SANITIZED, tmp_path, right, wrong], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": f"{tests}:{tests.parent}",
             "LD_PRELOAD": ":".join(libraries),
             "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0"})
    assert message in done.stderr and (done.returncode == 0) == (not wrong), done.stderr[-3000:]


# --- what the check says --------------------------------------------------------------------------

@pytest.mark.parametrize("stage, exact", [("paged", True), ("interleaved", False)])
def test_the_check_says_bit_for_bit(stage, exact):
    loud, fast = toy(dtype=torch.float32), toy(dtype=torch.float32).optimize()
    for model, other, says in (loud, None, False), (fast, None, exact), (loud, fast, exact):
        requests = [replace(request, prompt=[1, 2, 3]) for request in REQUESTS]
        check = Check(model, requests, exact=other)
        STAGES[stage](fast, requests, on_token=check.on_token)
        assert summary(check()).endswith("8/8 requests identical to unbatched, bit for bit") == says
        assert ("max |Δlogit| " in summary(check())) != says
    (token, row), *rest = check.told[requests[3]]
    row = torch.cat([row[:1].nextafter(torch.tensor([9.0])), row[1:]])   # the next number
    check.told[requests[3]] = [(token, row), *rest]
    assert "bit for bit" not in summary(check())
