"""
optimize(): its snapshot computes what the model computes, and bit for bit the same for a request in
a batch as for the request alone (docs/kernels.md). It does so for exactly what it was written for.
Mistakes put into native.cpp show that these tests would find them.
"""
import copy
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from unittest.mock import patch
from weakref import ref

import common
import pytest
import torch
from common import (
    RIGHT,
    ROOT,
    STAGES,
    alone,
    as_program,
    assert_contract,
    captured,
    examples,
    mixed,
    toy,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import generate_ragged
from beyond.fairness import SCHEDULERS
from cache import KV
from generate_paged import paged_attention
from generate_ragged import Flat
from lab.checks.check import Check
from lab.checks.edits import swapped
from lab.checks.traps import broken
from lab.checks.xray import XRay
from lab.compiled import Snapshot, native, optimize
from model import GPT, Block
from request import Request
from scheduler import Scheduler
from toolbox.trace import observed

pytestmark = pytest.mark.skipif(shutil.which(native.COMPILER.split()[0]) is None,
                                reason=f"there is no {native.COMPILER} here")
thorough = pytest.mark.thorough
EXACT = ("no_cache", "unbatched", "ragged_varlen", "paged", "prefix")   # have compiled steps


@cache
def models(n_head, n_embd, n_kv_head=None):
    """A GPT; or with n_kv_head a Llama in which each head of keys is normed and serves a group."""
    sizes = dict(block_size=120, vocab_size=53, n_layer=2, n_head=n_head, n_embd=n_embd)
    if n_kv_head is None:
        return toy(dtype=torch.float32, **sizes)
    sizes |= dict(n_kv_head=n_kv_head, head_size=10, ffn=3 * n_embd, qk_norm=True)
    return common.llama(**sizes).float()


def faults(size, stage, requests, threads=1, **knobs):
    """
    The verdicts on those requests whose logits are not the plain model's to rounding, or not the
    snapshot's own, for the request alone and on one thread, bit for bit.
    """
    plain = models(*size)
    asked, fast = [*map(replace, requests)], Snapshot(plain)   # untried: native.cpp may be wrong
    check, before = Check(plain, asked, exact=fast), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        STAGES[stage](fast, asked, on_token=check.on_token, **knobs)
    finally:
        torch.set_num_threads(before)
    assert fast.uses().startswith("compiled step: yes")
    return [verdict for verdict in check() if verdict.verdict == "WRONG" or not verdict.equal
            or verdict.difference > 2e-5]


STEM = [7 * i % 53 for i in range(100)]   # with a prefix cache, they share it
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
    least = common.smallest_pool(requests, page_size, block_size=120)
    knobs = common.knobs_of(
        stage, max_batch=data.draw(st.integers(1, 6)), token_budget=data.draw(st.integers(1, 200)),
        pages=data.draw(st.sampled_from([None, least, 2 * least])), page_size=page_size,
        **({"scheduler_class": data.draw(st.sampled_from(list(SCHEDULERS.values())))}
           if stage == "prefix" else {}))
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
    model.wpe.weight[5] = torch.nan   # every later token sees this one's key, and no earlier one
    fast, tokens = optimize(model), torch.arange(1, 8)
    torch.testing.assert_close(fast(tokens)[:5], model(tokens[:5]))
    assert fast(tokens)[5:].isnan().all() and fast.model is model
    with pytest.raises(ValueError, match="not finite"):
        generate_ragged.generate(fast, [Request(tokens)])
    model.h[0].attn.value.bias[0] = torch.inf
    assert not Snapshot(model)(tokens).isfinite().any()


# --- what is wrong in native.cpp, or compiled in another way --------------------------------------

WAYS = [("ragged_varlen", {"token_budget": 23}),
        ("ragged_varlen", {"token_budget": 1000, "threads": 2}),
        ("paged", {"page_size": 7, "token_budget": 61, "threads": 3}), ("no_cache", {})]


def all_faults():
    """Of steps that hold decodes and chunks of 1 to 97 tokens, with and without a past."""
    return (fault for size in ((3, 48), (2, 10), (1, 64), (6, 20, 2)) for stage, knobs in WAYS
            for fault in faults(size, stage, REQUESTS, **knobs))


def fresh(monkeypatch):
    """Until the test ends, nothing has been loaded yet."""
    monkeypatch.setattr(native, "library", cache(native.library.__wrapped__))


def rebuilt(monkeypatch, folder, right="", wrong="", flags=()):
    """native.cpp with something else in it, until the test ends."""
    source = native.SOURCE.read_text()
    assert not right or source.count(right) == 1
    fresh(monkeypatch)
    monkeypatch.setattr(native, "SOURCE", Path(folder, "native.cpp"))
    monkeypatch.setattr(native, "FLAGS", [*native.FLAGS, *flags])
    native.SOURCE.write_text(source.replace(right, wrong) if right else source)


WRONG = {   # what stands in native.cpp, and what gives other numbers
    "a chunk has no past": (
        "seen = start + 1 + (i + rows - 1) * grows;", "seen = i + rows, start = 0;"),
    "all pages are the first one": ("table[s / page]", "table[0]"),
    "positions in the stream": ("M.wpe[positions[r] * C", "M.wpe[r % 120 * C"),
    "another activation": ("part[j] = gelu(part[j])", "part[j] *= gelu(1)"),
    "another head's keys": ("head = h / group;", "head = h % (heads / group);"),
    "angles of places in the stream": ("float(positions[r]) * M", "float(r) * M")}
REORDERED = {   # another order of additions, or another rounding
    "softmax adds up from the chunk's end": (
        "float total = sum(scores, seen, [](vec x) { return x; });",
        "float total = 0; for (i64 s = all; s-- > 0;) if (s < seen) total += scores[s]; "
        "if (all > seen) total = sum(scores, seen, [](vec x) { return x; });"),
    "a multiplication of a few rows rounds before it adds": (
        "sum[r][c] = multiply_add(a, b[c], sum[r][c]);",
        "sum[r][c] = R < 4 ? sum[r][c] + a * b[c] : multiply_add(a, b[c], sum[r][c]);")}

REFUSED = {   # and by optimize(), which says so
    "a chunk has no past": "it computes something else than the model",
    "a multiplication of a few rows rounds before it adds": "a batch changes a request's bits"}


@thorough
@pytest.mark.parametrize("name", [*WRONG, *REORDERED])
def test_a_mistake_in_the_source_is_found(name, monkeypatch, tmp_path, capsys):
    """...by the tests above: other numbers, or only other bits. A few tokens may show it."""
    rebuilt(monkeypatch, tmp_path, *{**WRONG, **REORDERED}[name])
    large = (each.verdict == "WRONG" or each.difference > 2e-5 for each in all_faults())
    assert any(large) if name in WRONG else next(large) is False
    if name in REFUSED:
        assert optimize(PLAIN) is PLAIN and not_used(capsys, REFUSED[name])


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
    assert [*all_faults()] == []
    assert flags not in (AVX2, ARM) or native.library().panel_width() == 16


SANITIZED = """
import sys
import pytest
import test_compiled
test_compiled.rebuilt(pytest.MonkeyPatch(), sys.argv[1], flags=[
    "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"])
test_compiled.test_a_multiplication_of_any_size()
test_compiled.test_nan_and_infinity_stay()
assert [*test_compiled.all_faults()] == []
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


def not_used(capsys, why):
    """Whether one line on stderr, and no more, has said why."""
    said = capsys.readouterr().err
    return said.startswith(f"compiled step: no, {why}") and said.count("\n") == 1


def test_a_model_that_it_cannot_serve_comes_back(capsys):
    changed, short = toy(dtype=torch.float32), toy(dtype=torch.float32, block_size=3)
    changed.h[1].ln_1.eps = 1.0
    unfinished = toy(dtype=torch.float32)
    unfinished.wte.weight[1] = torch.nan
    for model, why in ((toy(), "it is for float32 on a CPU, not torch.float64 on cpu"),
                       (toy(dtype=torch.float32).to("meta"),
                        "it is for float32 on a CPU, not torch.float32 on meta"),
                       (torch.nn.Linear(2, 2), "Linear is neither GPT nor Llama"),
                       (changed, "its modules are not those of its config"),
                       (short, "request 'r0': prompt of 4 tokens does not fit"),
                       (unfinished, "request 'r0': the model's logits are not finite")):
        assert optimize(model) is model and not_used(capsys, why)


@pytest.mark.parametrize("change, said", [
    (broken("no causal rule in a chunk", show=False), "ragged"),   # Head.forward
    (patch.object(Block, "forward", lambda self, x, _: x), "unbatched"),
    (swapped(Flat.attend, [("request.kv.read(", "self.plan[0][0].kv.read(")]), "ragged"),
    (swapped(paged_attention, [("= block_table[i,", "= 0 * block_table[i,")]), "paged")],
    ids=["Head", "Block", "Flat", "Paged"])
def test_an_edited_model_is_not_served(change, said, capsys):
    with change:
        assert optimize(PLAIN) is PLAIN
    assert not_used(capsys, f"it computes something else than the model (generate_{said}.py)\n")
    assert optimize(PLAIN) is not PLAIN


def test_it_changes_nothing_about_the_model():
    model = copy.deepcopy(PLAIN)
    fast = optimize(model)
    assert str(model) == str(PLAIN) and vars(model).keys() == vars(PLAIN).keys()
    for p, q in zip(model.parameters(), PLAIN.parameters(), strict=True):
        assert torch.equal(p, q)
        p.add_(1.0)   # later changes are the model's
    assert_contract(fast, STAGES["paged"], mixed(), whole=PLAIN, tolerance=1e-4)
    assert fast.wpe.weight is model.wpe.weight   # and so is all else
    assert type(copy.deepcopy(fast)) is type(fast.double()) is GPT
    gone = ref(fast)
    del fast
    assert gone() is None   # at once, with all its weights


class Ungranted(Scheduler):
    def admit(self, request):
        return True


def wrapping(self, *arguments, make=Flat.__init__):
    make(self, *arguments)
    self.attend = lambda *qkv: Flat.attend(self, *qkv)


@pytest.mark.parametrize("owner, name, new, why", [
    (generate_ragged, "Flat", type("Own", (Flat,), {}), "for Alone, Flat and Paged, not Own"),
    (generate_ragged, "Flat", type("Flat", (Flat,), {}), "for Alone, Flat and Paged, not Flat"),
    (Flat, "__init__", wrapping, "for the attend of the batch that a trace has announced"),
    (generate_ragged.Trace, "__post_init__", lambda *_: None, "the batch that a trace has"),
    (generate_ragged, "Scheduler", Ungranted, "its keys are in no KV")],
    ids=["subclass", "of the same name", "wrapped", "not announced", "no memory"])
def test_whatever_else_is_passed_is_the_models(owner, name, new, why, monkeypatch):
    """To the last bit; and so are its errors."""
    fast, outcomes = optimize(PLAIN), []
    monkeypatch.setattr(owner, name, new)
    for model in PLAIN, fast:
        outcomes.append([])
        try:
            generate_ragged.generate(model, mixed(),
                                     on_token=lambda *told: outcomes[-1].append(told[2].tolist()))
        except AttributeError as error:
            outcomes[-1].append(str(error))
    assert outcomes[0] == outcomes[1] != [] and fast.passes[None] == 0
    assert fast.uses().startswith("compiled step: no, ") and why in fast.uses()


def test_other_layouts_are_the_models():
    for stage, why in (("naive", "Alone, Flat and Paged, not StaticBatch"),
                       ("ragged_mask", "attention \"varlen\", not \"mask\"")):
        fast = optimize(PLAIN)
        assert_contract(fast, STAGES[stage], mixed(), whole=PLAIN, tolerance=1e-4)
        assert fast.uses() == f"compiled step: no, it is for {why}"


def test_a_batch_is_for_one_pass():
    fast, batches = optimize(PLAIN), []
    with observed(fast, lambda step, batch: batches.append(batch)):
        STAGES["no_cache"](fast, [Request([1, 2, 3], 2)])
    batch = batches[-1]
    call = batch.tokens, batch.positions, batch.attend, batch.wanted
    again = fast(*call)
    assert fast.passes.total() - fast.passes[None] == 1   # it came with no announcement
    for see in fast.observers:
        see(0, batch)
    fast(batch.tokens)   # a pass of another kind
    assert torch.equal(fast(*call), again) and torch.equal(again, PLAIN(*call))
    assert fast.uses() == ("compiled step: in 2 of 4 passes; in the others not: it is for the "
                           "attend of the batch that a trace has announced")


def test_the_reason_that_is_told_is_that_of_most_passes():
    fast = optimize(PLAIN)
    fast.passes = Counter({"rare": 1, "frequent": 3, None: 2})
    assert fast.uses() == "compiled step: in 2 of 6 passes; in the others not: frequent"
    del fast.passes[None]
    assert fast.uses() == "compiled step: no, frequent"


def test_observers_and_hooks_see_compiled_passes():
    fast, seen = optimize(PLAIN), Counter()
    with observed(PLAIN, lambda *_: seen.update(["model's"])):
        with observed(fast, lambda *_: seen.update(["its own"])):
            handle = fast.register_forward_pre_hook(lambda *_: seen.update(["hook"]))
            trace = STAGES["ragged_varlen"](fast, mixed())
            handle.remove()
    assert {*seen.values()} == {len(trace.passes)} and len(seen) == 3
    requests = mixed()
    with XRay(fast, requests) as xray:
        STAGES["paged"](fast, requests)
    assert len(xray.passes) > 10 and xray.faults() == []
    assert fast.uses() == "compiled step: yes"


@pytest.mark.parametrize("script", ["unbatched", "ragged", "paged"])
def test_it_serves_a_script_that_is_run(script):
    """Run as a program, a stage has a layout of its own: that of __main__."""
    flags = "--optimize --quiet --max_new_tokens 3".split()
    code, out, _ = captured(as_program, str(ROOT / f"generate_{script}.py"), *flags)
    assert code == 0 and f"12/12 {RIGHT}, bit for bit" in out
    assert "\ncompiled step: yes\n" in out


def test_a_bare_call():
    """Of one sequence it is compiled; all else is the model's, and so are its errors."""
    tokens, fast = torch.arange(20) % 13, optimize(PLAIN)
    for some in tokens[:9], tokens[None, :9], tokens[::2], tokens.int(), tokens.view(2, 10):
        torch.testing.assert_close(fast(some), PLAIN(some), rtol=0, atol=2e-4)
    assert torch.equal(fast(tokens[:9]), fast(tokens)[:9])
    assert not torch.equal(PLAIN(tokens[:9]), fast(tokens[:9]))   # other kernels
    middle = torch.tensor([2, 5])   # the logits of others than the last tokens
    torch.testing.assert_close(fast(tokens, wanted=middle), PLAIN(tokens)[middle])
    for model in PLAIN, fast:
        with pytest.raises(IndexError, match="index out of range"):
            model(torch.tensor([[1, 13]]))


@pytest.mark.parametrize("dtype, shape, change", [
    (torch.float64, (4, 6), lambda t: t), (torch.float32, (6, 4), lambda t: t),
    (torch.float32, (6, 4), lambda t: t.T), (torch.float32, (4, 6), lambda t: t.to("meta")),
    (torch.float32, (4, 6), torch.nn.Parameter)])
def test_no_address_of_anything_else(dtype, shape, change):
    good = torch.zeros(4, 6)
    assert native.address(good, torch.float32, (4, 6)) == good.data_ptr()
    with pytest.raises(ValueError, match="it is for a contiguous"):
        native.address(change(good), dtype, shape)


@pytest.mark.parametrize("table, tokens, said", [
    ([0, 1], 8, None), ([1, 0], 5, None), ([1], 4, None),
    ([0, 1], 9, "its cache has no room for 9 tokens"), ([0], 5, "its cache has no room for 5"),
    ([0, 2], 5, "names a page that the pool does not have"), ([-1, 0], 5, "names a page")])
def test_no_page_beyond_the_pool_and_no_token_beyond_its_pages(table, tokens, said):
    """A pool of 2 pages of 4 slots, and one slot that is in no page."""
    fast, request = optimize(PLAIN), Request([1] * tokens, 1, name="r")
    request.block_table = table
    batch = SimpleNamespace(plan=[(request, tokens)], starts=[0], kv=KV(9),
                            pool=SimpleNamespace(page_size=4))
    if said is None:
        piece, = fast.pieces_of(batch, [tokens - 1], ())
        assert (*piece.table,) == (*table,) and piece[:4] == (0, tokens, 0, 1)
        return
    with pytest.raises(ValueError, match=f"request 'r': .*{said}"):
        fast.pieces_of(batch, [tokens - 1], ())


def test_the_addresses_of_a_cache_are_those_of_its_buffers():
    """Also of a copy, and after it was emptied."""
    fast, kv = optimize(PLAIN), KV(8)

    def are_right(kv):
        keys, values = fast.addresses(kv, ())
        return (*keys,) == tuple(kv.k[i].data_ptr() for i in range(len(PLAIN.h))) and (
            *values,) == tuple(kv.v[i].data_ptr() for i in range(len(PLAIN.h)))

    assert are_right(kv) and fast.addresses(kv, ())[0] is fast.addresses(kv, ())[0]
    twin = copy.deepcopy(kv)
    assert twin.k[0].data_ptr() != kv.k[0].data_ptr() and are_right(twin) and are_right(kv)
    kept = dict(kv.k)   # so that no new buffer gets their place
    kv.k.clear()
    kv.v.clear()
    assert are_right(kv) and kept


def test_a_cache_that_was_begun_by_the_model_is_continued():
    fast, requests = optimize(PLAIN), mixed()
    aside = fast.register_forward_pre_hook(lambda _, args: (
        *args[:2], lambda *qkv: args[2](*qkv), args[3]))   # plain, until it is removed
    STAGES["ragged_varlen"](fast, requests, on_token=lambda *_: aside.remove())
    assert [r.generated for r in requests] == [alone(PLAIN, r)[0] for r in mixed()]
    assert fast.uses().startswith("compiled step: in ")


def test_defaults_make_no_difference(monkeypatch):
    tokens = torch.arange(9)[None]
    expected = optimize(PLAIN)(tokens)
    fresh(monkeypatch)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.autocast("cpu"):
            found = optimize(PLAIN)(tokens)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("stage", ["ragged_varlen", "paged"])
def test_threads_on_one_snapshot(stage):
    fast, runs = optimize(PLAIN), [mixed() for _ in range(4)]
    all_announced = Barrier(4)   # before any of them is computed
    with ThreadPoolExecutor(4) as threads, observed(fast, lambda *_: all_announced.wait(60)):
        [*threads.map(lambda run: STAGES[stage](fast, run), runs)]
    right = [alone(PLAIN, request)[0] for request in mixed()]
    assert all([request.generated for request in run] == right for run in runs)
    assert fast.uses() == "compiled step: yes"   # each thread has found its own batch


def test_one_step_at_a_time():
    """They share their working memory. (These are long enough to meet in it.)"""
    fast, texts = Snapshot(models(4, 200)), [(torch.arange(110) * n % 53) for n in (1, 2, 3, 5)]
    expected = [fast(text) for text in texts]
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(fast, 5 * texts)]
    assert all(map(torch.equal, found, 5 * expected))


@pytest.mark.parametrize("compiler, message", [
    ("no-such-compiler", "there is no no-such-compiler (apt install g++)"),
    ("false", "false cannot build native.cpp: no message")])
def test_a_failed_build_says_so_in_a_line(compiler, message, monkeypatch, capsys):
    fresh(monkeypatch)
    monkeypatch.setattr(native, "COMPILER", compiler)
    for _ in range(2):
        assert optimize(PLAIN) is PLAIN and not_used(capsys, f"{message}\n")
