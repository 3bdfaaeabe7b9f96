"""optimize(): the same results through other kernels, in every stage; pools; what it keeps."""
import copy
import ctypes
import pickle
import platform
import runpy
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common import BLOCK_SIZE, STAGES, VOCAB, alone, assert_contract, mixed, toy, workloads
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn as real_varlen_attn

import generate_paged
import generate_ragged
import kernels.attention as attention
import kernels.linear as linear
import kernels.native as native
from cache import KV
from generate_ragged import Flat
from kernels import FastGPT
from kernels.attention import Pool, Pools, pieces_of
from kernels.threads import FIRST_PAUSE, LONGEST_PAUSE, Threads
from model import GPT, GPTConfig, Head
from request import Request, prepare
from toolbox.check import Check

PLAIN = toy(dtype=torch.float32)
FAST = toy(dtype=torch.float32).optimize()
TOKENS = torch.tensor([[i % VOCAB for i in range(BLOCK_SIZE)]])
STREAMS = ("ragged_varlen", "paged")   # the stages whose attention optimize() replaces


@pytest.mark.parametrize("stage", STAGES)
@settings(max_examples=25, deadline=None, derandomize=True,
          suppress_health_check=list(HealthCheck))
@given(workload=workloads())
def test_contract_of_the_optimized_model(stage, workload):
    """Against the plain model: logits to 1e-4, and only a near-tie may change a token."""
    asked = [replace(request) for request in workload.requests]
    check = Check(PLAIN, asked)
    trace = STAGES[stage](FAST, asked, on_token=check.on_token, **workload.knobs(stage))
    assert [v.verdict for v in check() if v.verdict not in ("identical", "near-tie")] == []
    if stage.startswith("ragged"):
        assert all(p.pad_slots == p.padded_keys == 0 for p in trace.passes)
    if stage == "ragged_varlen":
        assert all(p.copied_bytes == 0 for p in trace.passes)


@pytest.fixture
def without_native(monkeypatch):
    """As on a machine without a compiler."""
    monkeypatch.setattr(native, "works", lambda: False)


needs_native = pytest.mark.skipif(not native.works(), reason="there is no g++ here")


def test_its_kernels_are_really_in_use(without_native, monkeypatch):
    if platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available():
        pytest.skip("oneDNN's kernels are there on x86-64")
    assert linear.has_onednn()
    model = toy(dtype=torch.float32).optimize()
    assert all(m.reordered.tensor is not None for m in model.modules() if hasattr(m, "reordered"))
    used = []
    plain, reorder = F.linear, torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(linear.F, "linear", lambda *args: used.append("plain") or plain(*args))
    assert type(model.h[0].attn.query) is linear.FastLinear and type(model) is FastGPT
    monkeypatch.setattr(linear.ReorderedWeight, "__call__",
                        lambda self, weight: used.append("reordered") or reorder(weight))
    positions = torch.arange(BLOCK_SIZE)[None]
    with torch.no_grad():
        model(TOKENS, positions, rows=(0, slice(-3, None)))
    assert used == ["reordered"] * (6 * 3 + 1)


@pytest.mark.parametrize("optimized", [False, True])
def test_no_step_copies_the_past(optimized, without_native, monkeypatch):
    """The keys and values that attention gets lie where the requests' caches lie."""
    model, seen, batches = toy(dtype=torch.float32), [], []
    if optimized:
        model.optimize()
        real = F.scaled_dot_product_attention
        monkeypatch.setattr(F, "scaled_dot_product_attention",
                            lambda q, k, v, **rest: seen.append((k, v)) or real(q, k, v, **rest))
    else:
        real = generate_ragged.head
        monkeypatch.setattr(generate_ragged, "head",
                            lambda q, k, v, *rest: seen.append((k, v)) or real(q, k, v, *rest))

    class Watched(Flat):
        def __init__(self, *args):
            super().__init__(*args)
            batches.append(self)
            seen.clear()

        def cost(self):   # asked after the pass: `seen` is layer by layer, request by request
            assert len(seen) == 3 * len(self.plan)
            for layer in range(3):
                for i, ((request, _), end) in enumerate(zip(self.plan, self.ends)):
                    k, v = seen[layer * len(self.plan) + i]
                    assert k.data_ptr() == request.kv.k[layer].data_ptr()
                    assert v.data_ptr() == request.kv.v[layer].data_ptr()
                    assert k.size(-2) == v.size(-2) == end
            return super().cost()

    monkeypatch.setattr(generate_ragged, "Flat", Watched)
    trace = generate_ragged.generate(model, mixed())
    assert sum(p.copied_bytes for p in trace.passes) == 0 and len(batches) > 10


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_native), False])
@pytest.mark.parametrize("script", ["generate_ragged", "generate_paged"])
def test_it_serves_a_script_that_is_run(script, compiled, monkeypatch):
    """Run as a program, a stage has layout classes of its own: those of __main__."""
    calls, real = [], native.step
    monkeypatch.setattr(native, "step", lambda *args: calls.extend("abc") or real(*args))
    if not compiled:
        monkeypatch.setattr(native, "works", lambda: False)
        monkeypatch.setattr(attention.Step, "__call__", lambda self, layer, q, k, v: (
            calls.append(layer), self.write(layer, k, v), self.one_by_one(layer, q))[-1])
    path = Path(__file__).parent.parent / f"{script}.py"
    generate = runpy.run_path(str(path), run_name="another")["generate"]
    fast = toy(dtype=torch.float32).optimize()
    trace = assert_contract(fast, generate, mixed(), whole=PLAIN, tolerance=1e-4)
    assert len(calls) == 3 * len(trace.passes)


def test_paged_keys_are_views_where_pages_are_neighbours(without_native, monkeypatch):
    fast, seen, real = toy(dtype=torch.float32).optimize(), [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention",
                        lambda q, k, v, **rest: seen.append((k, v)) or real(q, k, v, **rest))

    class Watched(generate_paged.Paged):
        def cost(self):
            piece = self.pool.in_pool
            for i, span in enumerate(self.spans * 3):
                layer = i // len(self.spans)
                for part, t in zip((piece.pool.k, piece.pool.v), seen[i]):
                    is_view = t.untyped_storage().data_ptr() == (
                        part[layer].untyped_storage().data_ptr())
                    assert is_view == isinstance(span, slice)
            seen.clear()
            return super().cost()

    monkeypatch.setattr(generate_paged, "Paged", Watched)
    roomy = dict(max_batch=2, pages=400, share_prefixes=False)   # no kept pages between the free
    trace = generate_paged.generate(fast, mixed(), page_size=2, **roomy)
    assert sum(p.copied_bytes for p in trace.passes) == 0 and len(trace.passes) > 10
    trace = generate_paged.generate(fast, mixed(), page_size=2, pages=24)   # crowded: scattered
    assert sum(p.copied_bytes for p in trace.passes) > 0


def test_returns_self_and_changes_nothing_that_is_saved():
    model = toy(dtype=torch.float32)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    assert model.optimize() is model and model.optimize() is model
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_other_dtypes_run_as_before():
    model, plain = toy(dtype=torch.float32).optimize().double(), toy()
    model.load_state_dict(plain.state_dict())
    for stage in STREAMS:
        assert_contract(model, STAGES[stage], mixed())
    tokens, logits, reason = alone(plain, mixed()[4])
    torch.testing.assert_close(alone(model, mixed()[4])[1], logits, rtol=0,
                               atol=1e-10 * float(logits.abs().max()))
    model.bfloat16()(TOKENS)


@torch.no_grad()
def test_changed_weights_are_seen():
    model, plain = toy(dtype=torch.float32).optimize(), toy(dtype=torch.float32, seed=1)
    model(TOKENS)
    model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(model(TOKENS), plain(TOKENS), rtol=1e-4, atol=1e-4)
    model.h[1].mlp.c_fc.weight.mul_(2)
    assert not torch.allclose(model(TOKENS), plain(TOKENS), rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
                         ids=["deepcopy", "pickle"])
def test_copies_are_models_of_their_own(how):
    again = how(FAST)
    torch.testing.assert_close(again(TOKENS), FAST(TOKENS), rtol=0, atol=0)
    again.wte.weight.mul_(2)
    assert not torch.allclose(again(TOKENS), FAST(TOKENS))
    torch.testing.assert_close(FAST(TOKENS), PLAIN(TOKENS), rtol=1e-4, atol=1e-4)


def test_it_can_still_be_trained():
    losses = []
    for model in toy(dtype=torch.float32), toy(dtype=torch.float32).optimize():
        model.requires_grad_(True)
        loss = F.cross_entropy(model(TOKENS[:, :-1]).flatten(0, 1), TOKENS[0, 1:])
        loss.backward()
        losses.append((loss.detach(), model.h[0].mlp.c_fc.weight.grad, model.wte.weight.grad))
    for mine, theirs in zip(*losses):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_where_the_kernels_are_missing(without_native, monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    linear.has_onednn.cache_clear()
    try:
        assert not linear.has_onednn()
        model = toy(dtype=torch.float32).optimize()
        torch.testing.assert_close(model(TOKENS), PLAIN(TOKENS), rtol=1e-5, atol=1e-5)
        assert_contract(model, STAGES["ragged_varlen"], mixed(), tolerance=1e-4)
    finally:
        linear.has_onednn.cache_clear()


@torch.no_grad()
def test_the_last_block_computes_only_what_is_wanted():
    seen = {"first": [], "last": []}
    model, rows = copy.deepcopy(FAST), (torch.tensor([0, 1]), torch.tensor([5, -1]))
    for name, block in ("first", model.h[0]), ("last", model.h[-1]):
        block.mlp.register_forward_hook(
            lambda module, args, out, name=name: seen[name].append(out.shape[:-1].numel()))
    tokens = TOKENS.view(2, -1)
    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    torch.testing.assert_close(model(tokens, positions, rows=rows), PLAIN(tokens, positions)[rows],
                               rtol=1e-4, atol=1e-4)
    assert seen == {"first": [tokens.numel()], "last": [2]}


@torch.no_grad()
def test_rows_in_any_number_and_order():
    """None wanted (a step that is all partial prefill), all in another order, all as they are."""
    positions = torch.arange(BLOCK_SIZE)[None]
    none = (torch.tensor([], dtype=torch.long), -1)
    assert FAST(TOKENS, positions, rows=none).shape == (0, VOCAB)
    backwards = (0, torch.arange(BLOCK_SIZE - 1, -1, -1))
    for rows in backwards, None:
        torch.testing.assert_close(FAST(TOKENS, positions, rows=rows),
                                   PLAIN(TOKENS, positions, rows=rows), rtol=1e-4, atol=1e-4)


# --- native.cpp: a whole step in one call ---------------------------------------------------------

@needs_native
@settings(max_examples=150, deadline=None, derandomize=True)
@given(m=st.integers(1, 40), k=st.integers(1, 1700), n=st.integers(1, 130), gelu=st.booleans(),
       bias=st.booleans(), seed=st.integers(0, 99))
def test_a_multiplication_of_any_size(m, k, n, gelu, bias, seed):
    random = torch.Generator().manual_seed(seed)
    x, weight, b = (torch.randn(s, generator=random) for s in ((m, k), (n, k), (n,)))
    b = b if bias else None
    y = native.multiply(x, native.pack(weight), n, b, gelu)
    expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
    size = float(expected.abs().max()) + k**0.5
    expected = F.gelu(expected, approximate="tanh") if gelu else expected
    assert (y - expected).abs().max() <= 2e-6 * size
    # a row's result does not depend on the rows beside it, to the last bit
    assert torch.equal(native.multiply(x[m // 2:], native.pack(weight), n, b, gelu), y[m // 2:])


@needs_native
def test_rows_of_any_stride():
    weight, x = torch.randn(50, 6), torch.randn(4, 3, 12)
    for part in x[..., :6], x[..., ::2], x[:, 1:, :6], x.transpose(0, 1)[..., 6:]:
        torch.testing.assert_close(native.multiply(part, native.pack(weight), 50),
                                   F.linear(part, weight), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def plain_and_fast(n_head, n_embd):
    """A model with large random weights in float64, and the same in float32, optimized."""
    torch.manual_seed(1)
    config = GPTConfig(block_size=120, vocab_size=53, n_layer=2, n_head=n_head, n_embd=n_embd)
    plain = GPT(config)
    for p in plain.parameters():
        p.copy_(torch.randn(p.shape) / p.size(-1) ** 0.5)
    fast = copy.deepcopy(plain).optimize()
    return plain.double(), fast


@torch.no_grad()
def largest_difference(plain, fast, budget):
    """
    Between the logits of `plain` and of `fast` in stages 6 and 7, relative. The steps hold decodes
    and chunks of 1 to 60 tokens, with and without a past.
    """
    prompts = [[(7 * i + j) % 53 for j in range(length)] for i, length in
               enumerate((1, 2, 15, 16, 17, 48, 60, 97))]
    differences = []

    def on_token(request, token, logits):
        expected = plain(torch.tensor(request.tokens[:-1]))[-1]
        differences.append((logits - expected).abs().max() / expected.abs().max())

    for stage, knobs in ("ragged_varlen", {}), ("paged", {"page_size": 7}):
        asked = [Request(prompt, 3, name=f"r{i}") for i, prompt in enumerate(prompts)]
        STAGES[stage](fast, asked, token_budget=budget, on_token=on_token, **knobs)
    return float(torch.stack(differences).max())   # NaN if one of them is


@needs_native
@pytest.mark.parametrize("n_head, n_embd",
                         [(1, 1), (2, 10), (3, 48), (4, 128), (1, 100), (12, 768)])
@pytest.mark.parametrize("budget", [1000, 61, 23])
def test_a_step_of_any_head_size(n_head, n_embd, budget):
    assert largest_difference(*plain_and_fast(n_head, n_embd), budget) <= 2e-5


@needs_native
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86-64")
@pytest.mark.parametrize("flags, width", [
    (["-mno-avx512f"], 16),                                    # as on a processor with AVX2
    (["-mno-avx512f", "-mno-avx2", "-D__ARM_NEON"], 16),       # vectors as short as on ARM
])
def test_the_sizes_for_other_processors(flags, width, monkeypatch, tmp_path):
    monkeypatch.setattr(native, "FLAGS", [*native.FLAGS, *flags])
    monkeypatch.setattr(native, "SOURCE", tmp_path / "native.cpp")
    native.SOURCE.write_text(Path(native.__file__).with_name("native.cpp").read_text())
    module = fresh(monkeypatch)
    assert module.works() and module.library().panel_width() == width
    for n_head, n_embd in (3, 48), (2, 10):
        assert largest_difference(*plain_and_fast(n_head, n_embd), 61) <= 2e-5


FAULTS = {   # what stands in native.cpp, and what is wrong instead
    "a query of a few sees the next key": (
        "softmax(scores + i * end, start + i + 1, end, scale)",
        "softmax(scores + i * end, min(start + i + 2, end), end, scale)"),
    "a query of many sees the next key": (
        "softmax(scores + r * all, start + i + r + 1, seen, scale)",
        "softmax(scores + r * all, min(start + i + r + 2, seen), seen, scale)"),
    "a chunk forgets its past": ("seen = start + i + rows;", "seen = i + rows, start = 0;"),
    "keys are written from the beginning on": ("keys[p.start + i]", "keys[i]"),
    "all pages are taken for the first": ("table[s / page]", "table[0]"),
    "positions are taken for places in the stream": ("M.wpe[positions[r] * C", "M.wpe[r % 120 * C"),
    "the logits are those of the first new token": (
        "i64 from = pieces[p].first + pieces[p].n - 1;", "i64 from = pieces[p].first;"),
    "what was added up is lost": ("sum = after == ADD ? sum + bias : bias;", "sum = bias;"),
    "the scores' scale is left out": ("scale = 1 / std::sqrt(float(size));", "scale = 1;"),
}


@needs_native
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_put_into_the_source_is_found(fault, monkeypatch, tmp_path):
    models, (right, wrong) = plain_and_fast(3, 48), FAULTS[fault]
    source = native.SOURCE.read_text()
    assert source.count(right) == 1
    monkeypatch.setattr(native, "SOURCE", tmp_path / "native.cpp")
    native.SOURCE.write_text(source.replace(right, wrong))
    assert fresh(monkeypatch).library() is not None
    try:
        difference = largest_difference(*models, 61)
    except ValueError as error:   # keys that were never written may be anything
        assert "not finite" in str(error)
    else:
        assert not difference <= 1e-3   # or NaN


@needs_native
def test_a_step_is_the_same_with_any_number_of_threads():
    logits = {}
    for count in 1, 2, 3:
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        try:
            logits[count] = []
            STAGES["ragged_varlen"](FAST, mixed(),
                                    on_token=lambda r, t, row: logits[count].append(row.clone()))
        finally:
            torch.set_num_threads(before)
    assert all(torch.equal(a, b) for n in (2, 3) for a, b in zip(logits[1], logits[n]))


@needs_native
def test_it_reads_the_keys_where_they_lie():
    """The addresses that the library gets are those of the requests' own caches."""
    plan = [(request, len(request.prompt)) for request in prepare(mixed(), FAST.config)]
    batch = Flat(plan)
    FAST.pools.take_in(batch)
    pieces, _ = pieces_of(batch)
    size = FAST.config.n_embd // FAST.config.n_head
    for (request, _), (*_, table, keys, values, slots) in zip(plan, pieces):
        for address, buffers in (keys, request.kv.k), (values, request.kv.v):
            for layer, heads in buffers.items():
                first = (layer * FAST.config.n_head * slots + table[0]) * size
                assert heads.data_ptr() == address + 4 * first


@needs_native
def test_what_a_step_cannot_run_goes_through_torch(monkeypatch):
    monkeypatch.setattr(native, "step", None)   # a call would raise
    torch.testing.assert_close(
        alone(toy(dtype=torch.float32).optimize().double(), mixed()[4])[1],
        alone(toy(dtype=torch.float32).double(), mixed()[4])[1], rtol=0, atol=1e-8)
    for module in "attn.c_proj", "attn.key", "mlp.c_fc":   # a layer of somebody else's
        model, plain = copy.deepcopy(FAST), copy.deepcopy(PLAIN)
        other = torch.nn.Linear(*reversed(plain.h[1].get_submodule(module).weight.shape))
        for m in model, plain:
            m.h[1].set_submodule(module, other)
        assert not native.can_step(model)
    with torch.enable_grad():
        assert not native.can_step(FAST.requires_grad_(True))
    FAST.requires_grad_(False)


def test_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fresh(monkeypatch).works() is False


@needs_native
def test_a_library_that_computes_something_else_is_not_used(monkeypatch):
    module, right = fresh(monkeypatch), native.library()
    wrong = SimpleNamespace(panel_width=right.panel_width)
    monkeypatch.setattr(module, "library", lambda: wrong)
    nothing = {"multiply": lambda *args: ctypes.memset(args[4], 0, 8),
               "step": lambda *args: ctypes.memset(args[9], 0, 8)}
    for part in nothing:   # each of the two is looked at
        wrong.multiply, wrong.step = right.multiply, right.step
        module.works.cache_clear()
        assert module.works() is True
        setattr(wrong, part, nothing[part])
        module.works.cache_clear()
        assert module.works() is False, part


def fresh(monkeypatch):
    """native with nothing loaded yet, until the test ends."""
    for name in "library", "works":
        monkeypatch.setattr(native, name, cache(getattr(native, name).__wrapped__))
    return native


def steps_on(machine, count, most=2, seconds=0.01):
    """Numbers of threads of `count` steps. machine(step, used): the cores that a step gets."""
    threads, used, now = Threads(), [], 100.0
    for step in range(count):
        used.append(threads.number(most, now))
        now += seconds
        threads.record(used[-1], most, machine(step, used[-1]), now)
    return used


def test_threads_give_way_while_the_machine_is_busy():
    def beside_a_loop(step, used):
        return min(used, 1.3)

    first, longest = round(FIRST_PAUSE / 0.01), round(LONGEST_PAUSE / 0.01)   # in steps
    assert set(steps_on(lambda step, used: used, 50)) == {2}                # quiet
    busy = steps_on(beside_a_loop, 2000)
    assert busy[:2] == [2, 2] and set(busy[2:2 + first - 1]) == {1}
    assert busy.count(2) < 20 and 1 <= busy[-longest:].count(2) <= 2        # tried now and then
    later = steps_on(lambda step, used: min(used, 1.3 if step < 100 else 2), 500)
    assert set(later[100 + longest + 1:]) == {2}                            # quiet again
    blips = steps_on(lambda step, used: 1.2 if step % 10 == 0 else used, 100)
    assert set(blips) == {2}                             # one step is no evidence
    longer = steps_on(lambda step, used: 1.2 if step in (10, 11) else used, 100)
    assert first - 1 <= longer.count(1) <= first + 1
    prefill = steps_on(beside_a_loop, 9, seconds=3 * FIRST_PAUSE)           # pauses are in seconds
    assert prefill == [2, 2, 1, 2, 1, 2, 1, 1, 2]
    eight = steps_on(lambda step, used: min(used, 6.5), 10, most=8)
    assert set(eight[2:]) == {6}                                            # as many as it got
    assert set(steps_on(lambda step, used: 0.5, 20, most=1)) == {1}


# --- caches in a pool, and attention in one call --------------------------------------------------

DOUBLE = toy().optimize()


def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size):
    """
    What torch.nn.attention.varlen.varlen_attn documents, for a machine without its kernel: sequence
    i has the queries cu_seq_q[i] to cu_seq_q[i + 1] of (T_q, H, D) and likewise its keys; a window
    of (-1, 0) is causal, and its triangle ends bottom right.
    """
    assert window_size == (-1, 0) and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert cu_seq_q[0] == cu_seq_k[0] == 0 and len(cu_seq_q) == len(cu_seq_k)
    assert cu_seq_q[-1] == len(query) and cu_seq_k[-1] == len(key) == len(value)
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1   # its own condition
    assert max_q == cu_seq_q.diff().max() and max_k == cu_seq_k.diff().max()
    assert cu_seq_k.diff().min() >= 0
    out = torch.empty_like(query)
    for q0, q1, k0, k1 in zip(cu_seq_q, cu_seq_q[1:], cu_seq_k, cu_seq_k[1:]):
        parts = (t.transpose(0, 1) for t in (query[q0:q1], key[k0:k1], value[k0:k1]))
        out[q0:q1] = Head()(*parts)[0].transpose(0, 1)
    return out


@pytest.fixture(params=["one by one", "in one call"])
def way(request, monkeypatch):
    """
    Attention as on a CPU, and as on a GPU with a stand-in for its kernel. Room that was never
    written is NaN, so that reading it shows.
    """
    real = Pool.__init__

    def init(pool, *args):
        real(pool, *args)
        pool.all_k.fill_(torch.nan)
        pool.all_v.fill_(torch.nan)

    monkeypatch.setattr(Pool, "__init__", init)
    if request.param == "in one call":
        monkeypatch.setattr(attention, "varlen_attn", varlen_attn)
        monkeypatch.setattr(attention, "has_varlen", lambda q: True)
    return request.param


@pytest.mark.parametrize("stage", STREAMS)
@pytest.mark.parametrize("several_pools", [False, True])
@settings(max_examples=40, deadline=None, derandomize=True,
          suppress_health_check=list(HealthCheck))
@given(workload=workloads())
def test_contract_of_attention_in_a_pool(way, several_pools, stage, workload):
    """In float64, to 1e-10 and exact tokens; afterwards nothing is taken, and pools are one."""
    pools = DOUBLE.pools
    pools.size, pools.pools = 1 if several_pools else 4 * BLOCK_SIZE, []
    assert_contract(DOUBLE, STAGES[stage], [replace(request) for request in workload.requests],
                    workload.cancels, whole=toy(), **workload.knobs(stage))
    assert DOUBLE.pools is pools and len(pools.pools) <= 1
    assert not any(pool.taken for pool in pools.pools)


@pytest.mark.parametrize("pages", [None, 24, 400])
def test_preemption_and_shared_pages_in_a_pool(way, pages):
    """Crowded pages are scattered and shared ones overlap, so their keys cannot be one piece."""
    requests = [replace(r, prompt=[1, 2, 3, 4, *r.prompt][:BLOCK_SIZE], arrival=0) for r in mixed()]
    trace = assert_contract(DOUBLE, STAGES["paged"], requests, whole=toy(), page_size=2,
                            pages=pages, token_budget=20)
    assert trace.counts["shared_pages"] > 0
    assert bool(trace.counts["preemptions"]) == (pages == 24)


def test_a_step_with_several_pools(way):
    DOUBLE.pools.size, DOUBLE.pools.pools = 1, []
    most = []
    STAGES["ragged_varlen"](DOUBLE, mixed(),
                            on_token=lambda *_: most.append(len(DOUBLE.pools.pools)))
    assert max(most) > 2   # or the test above has not seen any


@settings(max_examples=200, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=30),
       drops=st.lists(st.integers(0, 29), max_size=30))
def test_pieces_never_overlap_and_all_come_back(sizes, drops):
    pools, held = Pools(16, 1, 2, 3, torch.float32, torch.device("cpu")), []
    for size, drop in zip(sizes, drops + [99] * 30):
        held.append(pools.kv(size))
        if drop < len(held):
            del held[drop]
        for pool in pools.pools:
            pieces = sorted((kv.first, kv.first + kv.capacity) for kv in held if kv.pool is pool)
            assert pool.taken == pieces and all(0 <= a < b <= pool.size for a, b in pieces)
            assert all(b <= c for (_, b), (c, _) in zip(pieces, pieces[1:]))
    assert sum(pool.size for pool in pools.pools) <= 4 * (16 + sum(sizes))
    size = sum(pool.size for pool in pools.pools)
    held.clear()
    assert len(pools.pools) <= 1 and not any(pool.taken for pool in pools.pools)
    held.append(pools.kv(1))
    assert [(pool.size, pool.taken) for pool in pools.pools] == [(size, [(0, 1)])]   # one again


def test_pools_serve_runs_in_any_mode():
    model = toy().optimize()
    STAGES["ragged_varlen"](model, mixed()[:1])       # in inference mode
    assert len(model.pools.pools) == 1                # which the next ones will use
    plan = [(request, len(request.prompt)) for request in prepare(mixed(), model.config)]
    for mode in torch.no_grad, torch.inference_mode:
        with mode():
            batch = Flat(plan, model.device)
            model(batch.tokens, batch.positions, batch.attend, batch.rows)


def test_a_cache_that_was_begun_without_optimize_moves_into_the_pool():
    model, fast = toy(), toy().optimize()
    request, = prepare(mixed()[8:9], model.config)
    for m, n in (model, 5), (fast, len(request.prompt) - 5):
        batch = Flat([(request, n)])
        assert type(request.kv) is KV
        with torch.inference_mode():
            logits = m(batch.tokens, batch.positions, batch.attend, batch.rows)
        request.computed += n
    expected = alone(model, request)[1][0]
    assert (logits[0] - expected).abs().max() <= 1e-10 * expected.abs().max()


def test_a_model_that_was_moved_gets_other_pools():
    model = toy().optimize()
    before = model.pools
    assert model.pools is before and model.float().pools is not before
    assert model.pools.shape[3] == torch.float32
    assert copy.deepcopy(model).pools is not model.pools


@pytest.mark.parametrize("stage", STREAMS)
def test_the_real_varlen_attn_takes_what_it_is_given(stage, monkeypatch):
    """Its kernel needs a GPU; names, types and shapes show on meta tensors, without numbers."""
    shapes = []

    def both(*args, **rest):
        out = varlen_attn(*args, **rest)
        meta = (arg.to("meta") if torch.is_tensor(arg) else arg for arg in args)
        shapes.append((out.shape, real_varlen_attn(*meta, **rest).shape))
        return out

    monkeypatch.setattr(attention, "varlen_attn", both)
    monkeypatch.setattr(attention, "has_varlen", lambda q: True)
    STAGES[stage](DOUBLE, mixed())
    assert shapes and all(mine == real for mine, real in shapes)


def wrong(change):
    return lambda q, k, v, cu_q, cu_k, max_q, max_k, **rest: change(q, k, v, cu_q, cu_k)


def top_left(q, k, v, cu_q, cu_k):
    """Its causal triangle ends top left."""
    outs = []
    for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
        if b > a:
            parts = (t.transpose(0, 1) for t in (q[a:b], k[c:d], v[c:d]))
            outs.append(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(0, 1))
    return torch.cat(outs)


def reads_between(q, *rest):
    return torch.full_like(q, torch.nan)


def refuses(*args):
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer")


def test_varlen_attn_is_taken_only_where_it_agrees(monkeypatch):
    def agrees(function):
        monkeypatch.setattr(attention, "varlen_attn", function)
        attention.varlen_agrees.cache_clear()
        return attention.varlen_agrees(torch.device("cpu"), torch.bfloat16, 8)

    try:
        assert agrees(varlen_attn)
        assert not agrees(wrong(top_left))
        assert not agrees(wrong(lambda q, k, v, cu_q, cu_k: torch.zeros_like(q)))
        assert not agrees(wrong(reads_between))
        assert not agrees(wrong(refuses))
        assert not agrees(lambda q, k: q)   # another signature
    finally:
        attention.varlen_agrees.cache_clear()
    x = torch.zeros(1, 1, 8)
    assert not attention.has_varlen(x) and not attention.has_varlen(x.bfloat16())   # on a CPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="varlen_attn needs a CUDA device")
@pytest.mark.parametrize("stage", STREAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contract_on_a_gpu(dtype, stage):
    model, asked = toy(dtype=dtype, n_head=2, n_embd=64).cuda(), mixed()
    check = Check(model, asked)
    fast = copy.deepcopy(model).optimize()
    query = torch.zeros(2, 1, 32, dtype=dtype, device="cuda")
    assert dtype == torch.float32 or attention.has_varlen(query)
    STAGES[stage](fast, asked, on_token=check.on_token)
    assert [v.verdict for v in check() if v.verdict not in ("identical", "near-tie")] == []
