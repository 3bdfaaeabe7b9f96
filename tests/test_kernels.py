"""
optimize(): its snapshot computes what the model computes, and bit for bit the same for a request in
a batch as for the request alone (docs/kernels.md). It does so for exactly what it was written for.
Mistakes put into native.cpp show that these tests would find them.
"""
import copy
import json
import os
import platform
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from common import (
    ROOT,
    STAGES,
    alone,
    assert_contract,
    examples,
    knobs_of,
    llama,
    mixed,
    quick,
    smallest_pool,
    toy,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import generate_ragged
import model as model_py
from beyond.fairness import SCHEDULERS
from cache import KV
from generate_paged import Paged
from generate_ragged import Flat
from lab import compiled as kernels
from lab.checks.check import Check
from lab.checks.traps import TRAPS, broken, function_named
from lab.checks.xray import XRay
from lab.compiled import check as checking
from lab.compiled import native
from model import GPT, Block
from request import Request

pytestmark = pytest.mark.skipif(shutil.which(native.COMPILER.split()[0]) is None,
                                reason=f"there is no {native.COMPILER} here")
thorough = pytest.mark.thorough
EXACT = ("no_cache", "unbatched", "ragged_varlen", "paged")   # the stages with compiled steps


@cache
def models(n_head, n_embd, n_kv_head=None):
    """A GPT; or with n_kv_head a Llama in which each head of keys is normed and serves a group."""
    sizes = dict(block_size=120, vocab_size=53, n_layer=2, n_head=n_head, n_embd=n_embd)
    if n_kv_head is None:
        return toy(dtype=torch.float32, **sizes)
    return llama(n_kv_head=n_kv_head, head_size=10, ffn=3 * n_embd, qk_norm=True, **sizes).float()


def faults(size, stage, requests, threads=1, **knobs):
    """
    The verdicts on those requests whose logits are not the plain model's to rounding, or not the
    snapshot's own, for the request alone and on one thread, bit for bit.
    """
    plain = models(*size)
    asked, fast = [*map(replace, requests)], plain.optimize()
    check, before = Check(plain, asked, exact=fast), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        STAGES[stage](fast, asked, on_token=check.on_token, **knobs)
    finally:
        torch.set_num_threads(before)
    assert fast.uses().startswith("compiled step: yes")
    return [verdict for verdict in check() if verdict.verdict == "WRONG" or not verdict.equal
            or verdict.difference > 2e-5]


STEM = [7 * i % 53 for i in range(100)]   # with pages, they share it
REQUESTS = [Request(STEM[:length] + [i], 4, temperature=i % 2, seed=i, name=f"r{i}",
                    priority=i % 3, arrival=i % 4)
            for i, length in enumerate((0, 1, 14, 15, 16, 47, 59, 96))]


@settings(max_examples=examples(400))
@given(data=st.data(), stage=st.sampled_from(EXACT), threads=st.integers(1, 3),
       requests=st.lists(st.sampled_from(REQUESTS), min_size=1, unique_by=id),
       size=st.sampled_from([(1, 1), (2, 10), (3, 48), (2, 64), (1, 100), (4, 200), (6, 20, 2),
                             (4, 30, 1)]))
def test_batched_equals_unbatched(data, stage, requests, threads, size):
    """Whatever the knobs, the neighbours, the pages and the threads; for heads of 1 to 100."""
    page_size = data.draw(st.sampled_from([1, 3, 16, 50]))
    least = smallest_pool(requests, page_size, block_size=120)
    knobs = knobs_of(
        stage, max_batch=data.draw(st.integers(1, 6)), token_budget=data.draw(st.integers(1, 200)),
        pages=data.draw(st.sampled_from([None, least, 2 * least])), page_size=page_size,
        policy=data.draw(st.sampled_from(list(SCHEDULERS.values()))),
        share_prefixes=data.draw(st.booleans()))
    assert faults(size, stage, requests, threads, **knobs) == []


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
    weight, model = torch.ones(3, 2), toy(dtype=torch.float32)
    expected = F.gelu(F.linear(x, weight), approximate="tanh")
    found = native.multiply(x, native.pack(weight), 3, gelu=True)
    torch.testing.assert_close(found, expected, equal_nan=True)
    model.wpe.weight[5] = torch.nan   # every later token sees this one's key
    with pytest.raises(ValueError, match="not finite"):
        generate_ragged.generate(model.optimize(), [Request([1, 2, 3, 4, 5, 6, 7])])


# --- what is wrong in native.cpp, or compiled in another way --------------------------------------

WAYS = [("ragged_varlen", {"token_budget": 23}),
        ("ragged_varlen", {"token_budget": 1000, "threads": 2}),
        ("paged", {"page_size": 7, "token_budget": 61, "threads": 3}), ("no_cache", {})]


def all_faults():
    """Of steps that hold decodes and chunks of 1 to 97 tokens, with and without a past."""
    return (fault for size in ((3, 48), (2, 10), (1, 64), (6, 20, 2)) for stage, knobs in WAYS
            for fault in faults(size, stage, REQUESTS, **knobs))


def fresh(monkeypatch):
    """Until the test ends, nothing has been loaded or tried yet."""
    for owner, name in (native, "library"), (native, "problem"), (checking, "fault"):
        monkeypatch.setattr(owner, name, cache(getattr(owner, name).__wrapped__))


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
    "another head's keys": ("head = h / group;", "head = h % (heads / group);"),
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
    """By the trial that optimize() makes: nobody uses such a step, whatever is wrong with g++."""
    rebuilt(monkeypatch, tmp_path, *{**WRONG, **REORDERED}[name])
    model = toy(dtype=torch.float32)
    assert model.optimize() is model
    assert capsys.readouterr().err.startswith("compiled step: no, " + (
        "native.cpp computes something else" if name in WRONG else "a request gets other bits"))


AVX2 = ["-mno-avx512f"]
ARM = [*AVX2, "-mno-avx2", "-D__ARM_NEON"]   # vectors of ARM's size
X86_64 = [["-mprefer-vector-width=256"], AVX2, ARM] if platform.machine() == "x86_64" else []


@thorough
@pytest.mark.parametrize("flags", [
    ["-O1"], ["-funroll-all-loops", "-fno-tree-vectorize"], ["-ffp-contract=fast"], *X86_64],
    ids=" ".join)
def test_other_compilations_are_equal_to_themselves(flags, monkeypatch, tmp_path):
    """Other sizes of vectors, and what another compiler may do: no order is left to it."""
    rebuilt(monkeypatch, tmp_path, flags=flags)
    assert native.problem() is None and [*all_faults()] == []
    assert flags not in (AVX2, ARM) or native.library().panel_width() == 16


SANITIZED = """
import sys
import pytest
import test_kernels
test_kernels.rebuilt(pytest.MonkeyPatch(), sys.argv[1], flags=[
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"])
test_kernels.test_a_multiplication_of_any_size()
test_kernels.test_nan_and_infinity_stay()
assert [*test_kernels.all_faults()] == []
"""


@thorough
@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")
def test_native_under_sanitizers(tmp_path):
    """In a build that stops at the first fault."""
    libraries = [subprocess.run([*native.COMPILER.split(), f"-print-file-name={name}"],
                                capture_output=True, text=True, check=True).stdout.strip()
                 for name in ("libasan.so", "libubsan.so")]
    if not all(map(os.path.isabs, libraries)):
        pytest.skip(f"{native.COMPILER} has no sanitizers here")
    tests = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", SANITIZED, tmp_path], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": f"{tests}:{tests.parent}",
             "LD_PRELOAD": ":".join(libraries),
             "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0"})
    assert done.returncode == 0, done.stderr[-3000:]


# --- the snapshot ---------------------------------------------------------------------------------

PLAIN = toy(dtype=torch.float32)


def test_whoever_edits_a_file_runs_what_is_written(monkeypatch, tmp_path, capsys):
    record = json.loads(kernels.RECORD.read_text())
    assert record == kernels.digests(), "stale: run python -m lab.compiled.check"
    monkeypatch.setattr(kernels, "RECORD", tmp_path / "checked.json")
    for file in kernels.FILES:
        kernels.RECORD.write_text(json.dumps(record | {file: "another"}))
        assert PLAIN.optimize() is PLAIN
        assert f"{file} has changed since it was checked" in capsys.readouterr().err


def test_the_command_records_only_what_agrees(monkeypatch, tmp_path):
    monkeypatch.setattr(checking, "RECORD", tmp_path / "checked.json")
    for name in ("no causal rule in a chunk", "pages read in one piece",
                 "a chunk reads to the end of its prompt"):
        fresh(monkeypatch)
        function = function_named(TRAPS[name][0][0])
        file = function.__code__.co_filename
        with broken(name, show=False):
            function.__code__ = function.__code__.replace(co_filename=file)   # as if it stood there
            with pytest.raises(SystemExit, match="not recorded: native.cpp computes"):
                checking.main()
        assert not checking.RECORD.exists()
    fresh(monkeypatch)
    checking.main()
    assert json.loads(checking.RECORD.read_text()) == kernels.digests()


def test_a_model_that_it_cannot_serve_comes_back(capsys):
    changed = toy(dtype=torch.float32)
    changed.h[1].ln_1.eps = 1.0
    for model, why in ((toy(), "it is for float32 on a CPU, not torch.float64 on cpu"),
                       (toy(dtype=torch.float32).to("meta"), "not torch.float32 on meta"),
                       (torch.nn.Linear(2, 2), "Linear is neither GPT nor Llama"),
                       (changed, "its modules are not those of its config")):
        assert kernels.optimize(model) is model
        said = capsys.readouterr().err
        assert said.startswith("compiled step: no, ") and why in said and said.count("\n") == 1


def test_it_changes_nothing_about_the_model():
    model = copy.deepcopy(PLAIN)
    fast = model.optimize()
    assert str(model) == str(PLAIN)
    for p, q in zip(model.parameters(), PLAIN.parameters(), strict=True):
        assert torch.equal(p, q)
        p.add_(1.0)   # later changes are the model's
    assert_contract(fast, STAGES["paged"], mixed(), whole=PLAIN, tolerance=1e-4)
    assert fast.wpe.weight is model.wpe.weight   # and so is all else
    assert type(copy.deepcopy(fast)) is type(fast.double()) is GPT


def wrapped(function):
    return wraps(function)(lambda *arguments: function(*arguments))


@pytest.mark.parametrize("change, stage, why", [
    (patch.object(Flat, "read", wrapped(Flat.read)), "ragged_varlen", "Flat.read"),
    (patch.object(Paged, "read", Flat.read), "paged", "Paged.read"),   # another layout's
    (patch.object(generate_ragged, "Flat", type("Own", (Flat,), {})), "ragged_varlen", "not Own"),
    (patch.object(generate_ragged, "head", lambda q, k, v, mask=None: q), "ragged_varlen", "Head"),
    (patch.object(KV, "write", lambda *_: None), "ragged_varlen", "KV.write"),
    (patch.object(Block, "forward", lambda self, x, _: x), "ragged_varlen", "Block.forward"),
    (patch.object(model_py, "causal", wrapped(model_py.causal)), "no_cache", "causal"),
    (broken("no causal rule in a chunk", show=False), "unbatched", "Head.forward"),
])
def test_what_was_changed_shows_as_without_it(change, stage, why, monkeypatch, capsys):
    fast, outcomes = PLAIN.optimize(), []
    fresh(monkeypatch)
    with change:
        for model in PLAIN, fast:
            requests = mixed()
            try:
                STAGES[stage](model, requests)
                outcomes.append([request.generated for request in requests])
            except Exception as error:
                outcomes.append(repr(error))
        if "forward" in why:   # whoever calls optimize() now hears of it
            assert PLAIN.optimize() is PLAIN and capsys.readouterr().err == fast.uses() + "\n"
    assert outcomes[0] == outcomes[1]
    assert fast.uses().startswith("compiled step: no, ") and why in fast.uses()


def test_other_layouts_and_observers_run_the_model():
    fast = PLAIN.optimize()
    for stage in "naive", "ragged_mask":
        assert_contract(fast, STAGES[stage], mixed(), whole=PLAIN, tolerance=1e-4)
    assert fast.uses().startswith("compiled step: no, it ")
    requests = mixed()
    with XRay(fast, requests) as xray:
        STAGES["ragged_varlen"](fast, requests)
    assert len(xray.passes) > 10 and xray.faults() == []
    assert fast.passes[None] == 0   # what ran is what was looked at
    seen = []
    handle = fast.register_forward_pre_hook(lambda *_: seen.append(1))   # one that only looks
    trace = STAGES["ragged_varlen"](fast, mixed())
    handle.remove()
    assert len(seen) == len(trace.passes) == fast.passes[None]
    assert fast.uses().startswith("compiled step: in ")


def test_it_serves_a_script_that_is_run():
    """Run as a program, a stage has layout classes of its own: those of __main__."""
    for script in kernels.LAYOUTS.values():
        generate = runpy.run_path(str(ROOT / script), run_name="another")["generate"]
        fast = PLAIN.optimize()
        assert_contract(fast, generate, mixed(), whole=PLAIN, tolerance=1e-4)
        assert fast.uses() == "compiled step: yes"


def test_a_bare_call():
    """Of one sequence it is compiled; all else is the model's, and so are its errors."""
    tokens, fast = torch.arange(20) % 13, PLAIN.optimize()
    for some in tokens[:9], tokens[None, :9], tokens[::2], tokens.int(), tokens.view(2, 10):
        torch.testing.assert_close(fast(some), PLAIN(some), rtol=0, atol=2e-4)
    assert torch.equal(fast(tokens[:9]), fast(tokens)[:9])
    middle = torch.tensor([2, 5])   # the logits of others than the last tokens
    torch.testing.assert_close(fast(tokens, wanted=middle), PLAIN(tokens)[middle])
    for model in PLAIN, fast:
        with pytest.raises(IndexError, match="index out of range"):
            model(torch.tensor([[1, 13]]))


def test_a_cache_that_was_begun_by_the_model_is_continued():
    fast, requests = PLAIN.optimize(), mixed()
    aside = fast.register_forward_pre_hook(lambda _, args: (
        *args[:2], lambda *qkv: args[2](*qkv), args[3]))   # plain, until it is removed
    STAGES["ragged_varlen"](fast, requests, on_token=lambda *_: aside.remove())
    assert [r.generated for r in requests] == [alone(PLAIN, r)[0] for r in mixed()]
    assert fast.uses().startswith("compiled step: in ")


def test_defaults_make_no_difference(monkeypatch):
    tokens = torch.arange(9)[None]
    expected = PLAIN.optimize()(tokens)
    fresh(monkeypatch)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = PLAIN.optimize()(tokens)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("stage", ["ragged_varlen", "paged"])
def test_threads_on_one_snapshot(stage):
    fast, runs = PLAIN.optimize(), [mixed() for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        [*threads.map(lambda run: STAGES[stage](fast, run), runs)]
    right = [alone(PLAIN, request)[0] for request in mixed()]
    assert all([request.generated for request in run] == right for run in runs)


@pytest.mark.parametrize("compiler, message", [
    ("no-such-compiler", "there is no no-such-compiler (apt install g++)"),
    ("false", "false cannot build native.cpp: no message")])
def test_a_failed_build_says_so_in_a_line(compiler, message, monkeypatch, capsys):
    fresh(monkeypatch)
    monkeypatch.setattr(native, "COMPILER", compiler)
    for _ in range(2):
        assert PLAIN.optimize() is PLAIN
        assert capsys.readouterr().err == f"compiled step: no, {message}\n"
