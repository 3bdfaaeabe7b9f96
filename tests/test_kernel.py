"""
beyond/kernel.py, interpreted by Triton on a CPU: what the plain loop computes, and equal tokens.
"""
import importlib.util
import os
import random
import subprocess
import sys
import tempfile
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from common import ROOT, alone, captured

import generate_paged
import generate_prefix
from beyond import kernel
from engine import Engine
from lab import essays
from lab.loading.load import load
from request import Request

needs_triton = pytest.mark.skipif(kernel.triton is None, reason=kernel.MISSING)
ROUNDING = 1e-5   # float32, sums of up to 60 terms


def pass_of(seed, page_size, head_size, groups=1, heads=2):
    """A pass of several requests, decodes and chunks, whose pages lie anywhere in the pool."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    lengths = [rng.randint(1, 50) for _ in range(rng.randint(1, 4))]
    new = [1 if rng.random() < 0.5 else rng.randint(1, length) for length in lengths]
    needed = [-(-length // page_size) for length in lengths]
    pages = list(range(sum(needed) + 3))
    rng.shuffle(pages)
    table = torch.full((len(lengths), max(needed) + 1), pages.pop())   # behind a table: anything
    for row, number in enumerate(needed):
        table[row, :number] = torch.tensor([pages.pop() for _ in range(number)])
    pool = heads, sum(needed) + 3, page_size, head_size
    k, v = torch.randn(pool), 3 * torch.randn(pool)
    for pages_of_request, length in zip(table, lengths):   # behind its last key: anything, NaN too
        last = pages_of_request[(length - 1) // page_size]
        used = (length - 1) % page_size + 1
        k[:, last, used:] = torch.nan
        v[:, last, used:] = torch.nan
    q = torch.randn(groups, heads, sum(new), head_size)
    if groups == 1:
        q = q[0]
    starts = torch.tensor([0, *accumulate(new)])
    return q, k, v, starts, torch.tensor(lengths), table


def by_kernel(parts, module=kernel):
    """The kernel's output. Where there is a GPU, Triton compiles, and takes tensors of the GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return module.paged_attention(*(part.to(device) for part in parts)).cpu()


def assert_equal(parts):
    expected = generate_paged.paged_attention(*parts)
    got = by_kernel(parts)
    assert got.shape == expected.shape and got.dtype == expected.dtype
    assert (got - expected).abs().max() <= ROUNDING * expected.abs().max()


@needs_triton
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("head_size", [6, 32])
def test_it_computes_what_the_loop_computes(page_size, head_size):
    for seed in range(2):
        assert_equal(pass_of(seed, page_size, head_size))


@needs_triton
def test_groups_of_a_llama_share_key_heads():
    assert_equal(pass_of(3, 4, 8, groups=3))


@needs_triton
def test_a_chunk_of_several_blocks_and_scores_that_grow():
    """40 new tokens are three blocks; each page's scores are larger than those before."""
    q, k, v, _, _, _ = pass_of(0, 4, 8)
    q = torch.ones(2, 40, 8)
    k = torch.arange(12.0)[None, :, None, None].expand(2, 12, 4, 8).contiguous()
    v = torch.randn(2, 12, 4, 8)
    table = torch.arange(12)[None]
    assert_equal((q, k, v, torch.tensor([0, 40]), torch.tensor([47]), table))


@needs_triton
@pytest.mark.parametrize("old, new", [
    ("shrink = tl.exp(best - new_best)", "shrink = tl.exp(new_best - new_best)"),
    ("request * table_row + i", "i"),
    ("(slots < page_size) & (keys < S)", "keys < S"),   # the last slots of a rounded page
    ("(slots < page_size) & (keys < S)", "slots < page_size"),   # behind the last key
    ("keys[None, :] <= positions[:, None]", "keys[None, :] <= S"),
    ("head % kv_heads", "0")])
def test_a_mistake_is_seen(old, new):
    source = (ROOT / "beyond" / "kernel.py").read_text(encoding="utf-8")
    assert source.count(old) == 1
    wrong = mistaken(source.replace(old, new))
    seen = 0
    for seed in range(4):
        parts = pass_of(seed, 3, 6)
        expected = generate_paged.paged_attention(*parts)
        difference = (by_kernel(parts, wrong) - expected).abs().max()
        seen += not difference <= ROUNDING * expected.abs().max()
    assert seen


def mistaken(source):
    """The module of this source; Triton reads a kernel's code from a file."""
    folder = tempfile.mkdtemp()
    file = Path(folder, "mistaken_kernel.py")
    file.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("mistaken_kernel", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_triton
def test_paged_prefix_and_the_engine_take_it_as_a_layout():
    model, _ = load()

    def asked():
        return [Request([7, 8, 9, 10, 11] * 4 + [i], 2, temperature=i, seed=i) for i in range(2)]
    expected = [alone(model, request)[0] for request in asked()]
    if torch.cuda.is_available():
        model.to("cuda")
    for stage in generate_paged, generate_prefix:
        requests = asked()
        trace = stage.generate(model, requests, page_size=3, layout=kernel.PagedByKernel)
        assert [request.generated for request in requests] == expected
        assert sum(p.copied_bytes for p in trace.passes) == 0
    engine, requests = Engine(model, page_size=16, layout=kernel.PagedByKernel), asked()
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()
    assert [request.generated for request in requests] == expected


@needs_triton
def test_the_command_prints_equal_tokens_and_what_is_copied():
    _, out, _ = captured(lambda: essays.main(essays.kernel, kernel.__doc__, []))
    assert "2 of 2 requests got equal tokens" in out
    assert "kernel  4 passes, 0 bytes" in out and "loop    4 passes, 0 bytes" not in out


@needs_triton
def test_where_triton_came_first_it_says_what_to_set():
    """Its own functions were made for a GPU then."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", """if True:
        import triton
        from beyond import kernel
        from lab import essays
        essays.main(essays.kernel, kernel.__doc__, [])
        """], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and "set TRITON_INTERPRET=1 first" in done.stderr


def test_without_triton_it_can_be_imported_and_says_what_to_install():
    done = subprocess.run([sys.executable, "-c", """if True:
        import sys
        sys.modules["triton"] = None   # as if it were not installed
        from beyond import kernel
        from lab import essays
        essays.main(essays.kernel, kernel.__doc__, [])
        """], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "Triton is not installed: pip install triton" in done.stderr
