"""`model.optimize()`: the same results from other kernels, and a way back wherever they do not apply."""
import copy
import pickle
import platform
from dataclasses import replace

import pytest
import torch
from common import BLOCK_SIZE, STAGES, VOCAB, alone, assert_contract, mixed, toy, workloads
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn as real_varlen_attn

import cache
import toolbox.kernels as kernels
from model import Head
from scheduler import prepare
from toolbox.check import Check

PLAIN = toy(dtype=torch.float32)
FAST = toy(dtype=torch.float32).optimize()
TOKENS = torch.tensor([[i % VOCAB for i in range(BLOCK_SIZE)]])


@pytest.mark.parametrize("stage", STAGES)
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(workload=workloads())
def test_contract_of_the_optimized_model(stage, workload):
    """Against the model that is not optimized: logits to 1e-4, tokens those of its own logits, a near-tie alone may differ."""
    asked = [replace(request) for request in workload.requests]
    check = Check(PLAIN, asked)
    trace = STAGES[stage](FAST, asked, on_token=check.on_token, **workload.knobs(stage))
    assert [v.verdict for v in check() if v.verdict not in ("identical", "near-tie")] == []
    if stage.startswith("ragged"):
        assert all(p.pad_slots == p.padded_keys == 0 for p in trace.passes)
    if stage == "ragged_varlen":
        assert all(p.copied_bytes == 0 for p in trace.passes)


def test_its_kernels_are_really_in_use(monkeypatch):
    if platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available():
        pytest.skip("oneDNN's kernels are there on x86-64")
    assert kernels.can_pack()
    assert all(module.packed.tensor is not None for module in toy(dtype=torch.float32).optimize().modules() if hasattr(module, "packed"))
    used = []
    monkeypatch.setattr(kernels.F, "linear", lambda *args: used.append("plain") or torch.nn.functional.linear(*args))
    assert type(FAST.h[0].attn.query) is kernels.FastLinear and type(FAST) is kernels.FastGPT
    monkeypatch.setattr(kernels.Packed, "__call__", lambda self, weight: used.append("packed") or torch.ops.mkldnn._reorder_linear_weight(weight))
    with torch.no_grad():
        FAST(TOKENS)
    assert used == ["packed"] * (6 * 3 + 1)


@pytest.mark.parametrize("model", [PLAIN, FAST])
def test_no_step_copies_the_past(model, monkeypatch):
    """The keys and values that attention gets lie where the requests' caches lie."""
    seen = []
    if model is FAST:
        real = F.scaled_dot_product_attention
        monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **rest: seen.append((k, v)) or real(q, k, v, **rest))
    else:
        real = cache.head
        monkeypatch.setattr(cache, "head", lambda q, k, v, *rest: seen.append((k, v)) or real(q, k, v, *rest))

    class Watching(cache.Flat):
        def attend(self, layer, q, k, v):
            seen.clear()
            out = super().attend(layer, q, k, v)
            assert len(seen) == len(self.plan)
            for (request, _), end, (keys, values) in zip(self.plan, self.ends, seen):
                assert keys.data_ptr() == request.kv.k[layer].data_ptr() and values.data_ptr() == request.kv.v[layer].data_ptr()
                assert keys.size(-2) == values.size(-2) == end
            return out

    import generate_ragged
    monkeypatch.setattr(generate_ragged, "Flat", Watching)
    trace = generate_ragged.generate(model, mixed())
    assert sum(p.copied_bytes for p in trace.passes) == 0 and len(trace.passes) > 10


def test_returns_self_and_changes_nothing_that_is_saved():
    model = toy(dtype=torch.float32)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    assert model.optimize() is model and model.optimize() is model
    after = model.state_dict()
    assert list(before) == list(after) and all(torch.equal(before[name], after[name]) for name in before)


def test_other_dtypes_run_as_before():
    model, plain = toy(dtype=torch.float32).optimize().double(), toy()
    model.load_state_dict(plain.state_dict())
    assert_contract(model, STAGES["ragged_varlen"], mixed())
    tokens, logits, reason = alone(plain, mixed()[4])
    torch.testing.assert_close(alone(model, mixed()[4])[1], logits, rtol=0, atol=1e-10 * float(logits.abs().max()))
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
@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
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
def test_where_the_kernels_are_missing(monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    kernels.can_pack.cache_clear()
    try:
        assert not kernels.can_pack()
        model = toy(dtype=torch.float32).optimize()
        torch.testing.assert_close(model(TOKENS), PLAIN(TOKENS), rtol=1e-5, atol=1e-5)
        assert_contract(model, STAGES["ragged_varlen"], mixed(), tolerance=1e-4)
    finally:
        kernels.can_pack.cache_clear()


@torch.no_grad()
def test_the_last_block_computes_only_what_is_wanted():
    seen = {"first": [], "last": []}
    model, rows = copy.deepcopy(FAST), (torch.tensor([0, 1]), torch.tensor([5, -1]))
    for name, block in ("first", model.h[0]), ("last", model.h[-1]):
        block.mlp.register_forward_hook(lambda module, args, out, name=name: seen[name].append(out.shape[:-1].numel()))
    tokens = TOKENS.view(2, -1)
    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    torch.testing.assert_close(model(tokens, positions, rows=rows), PLAIN(tokens, positions)[rows], rtol=1e-4, atol=1e-4)
    assert seen == {"first": [tokens.numel()], "last": [2]}


@torch.no_grad()
def test_no_rows_wanted():
    """A step that is all partial prefill asks for the logits of nobody."""
    assert FAST(TOKENS, rows=(torch.tensor([], dtype=torch.long), -1)).shape == (0, VOCAB)


# --- caches in a pool, and attention in one call --------------------------------------------------------------------------

DOUBLE = toy().optimize()


def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size):
    """
    What torch.nn.attention.varlen.varlen_attn says of itself, for a machine without its kernel: sequence i has the queries
    cu_seq_q[i] to cu_seq_q[i + 1] of (T_q, H, D) and likewise its keys; (-1, 0) is causal, its triangle ends bottom right.
    """
    assert window_size == (-1, 0) and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and len(cu_seq_q) == len(cu_seq_k)
    assert cu_seq_q[0] == cu_seq_k[0] == 0 and cu_seq_q[-1] == len(query) and cu_seq_k[-1] == len(key) == len(value)
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1   # FlashAttention's own condition
    assert max_q == cu_seq_q.diff().max() and max_k == cu_seq_k.diff().max() and cu_seq_k.diff().min() >= 0
    out = torch.empty_like(query)
    for q0, q1, k0, k1 in zip(cu_seq_q, cu_seq_q[1:], cu_seq_k, cu_seq_k[1:]):
        y, _, _ = Head()(*(t.transpose(0, 1) for t in (query[q0:q1], key[k0:k1], value[k0:k1])))
        out[q0:q1] = y.transpose(0, 1)
    return out


@pytest.fixture(params=["one by one", "in one call"])
def way(request, monkeypatch):
    """Attention as on a CPU, and as on a GPU with a stand-in for its kernel. Room that nobody has written is NaN, so that reading it shows."""
    real = kernels.Pool.__init__

    def init(pool, *args):
        real(pool, *args)
        for part in *pool.k, *pool.v:
            part.fill_(torch.nan)

    monkeypatch.setattr(kernels.Pool, "__init__", init)
    if request.param == "in one call":
        monkeypatch.setattr(kernels, "varlen_attn", varlen_attn)
        monkeypatch.setattr(kernels, "has_varlen", lambda q: True)
    return request.param


@pytest.mark.parametrize("several_pools", [False, True])
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(workload=workloads(), admission=st.sampled_from(["reserve", "grow"]), cached=st.booleans())
def test_contract_of_attention_in_a_pool(way, several_pools, workload, admission, cached):
    """In float64, to 1e-10 and exact tokens; with preemption and a prefix cache. Afterwards nothing is taken, and several pools are one."""
    prefix_cache = cache.PrefixCache(4) if cached else None
    knobs = {**workload.knobs("ragged_varlen"), "admission": admission, "page_size": 4, "prefix_cache": prefix_cache}
    if knobs["max_kv_tokens"]:
        knobs["max_kv_tokens"] += 4   # grow grants whole pages
    pools = DOUBLE.varlen
    pools.size, pools.pools = 1 if several_pools else 4 * BLOCK_SIZE, []
    assert_contract(DOUBLE, STAGES["ragged_varlen"], [replace(request) for request in workload.requests], workload.cancels, whole=toy(), **knobs)
    assert DOUBLE.varlen is pools and len(pools.pools) <= 1 and not any(pool.taken for pool in pools.pools)


def test_a_step_with_several_pools(way):
    DOUBLE.varlen.size, DOUBLE.varlen.pools = 1, []
    most = []
    logits = lambda *_: most.append(len(DOUBLE.varlen.pools))
    STAGES["ragged_varlen"](DOUBLE, mixed(), on_token=logits)
    assert max(most) > 2   # or the test above has not seen any


@settings(max_examples=200, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=30), drops=st.lists(st.integers(0, 29), max_size=30))
def test_slots_never_overlap_and_all_come_back(sizes, drops):
    pools, slots = kernels.Varlen(16, 1, 2, 3, torch.float32, torch.device("cpu")), []
    for size, drop in zip(sizes, drops + [99] * 30):
        slots.append(pools.kv(size))
        if drop < len(slots):
            del slots[drop]
        for pool in pools.pools:
            pieces = sorted((slot.first, slot.first + slot.capacity) for slot in slots if slot.pool is pool)
            assert pool.taken == pieces and all(0 <= a < b <= pool.size for a, b in pieces)
            assert all(b <= c for (_, b), (c, _) in zip(pieces, pieces[1:]))
    assert sum(pool.size for pool in pools.pools) <= 4 * (16 + sum(sizes))
    size = sum(pool.size for pool in pools.pools)
    slots.clear()
    assert len(pools.pools) <= 1 and not any(pool.taken for pool in pools.pools)
    slots.append(pools.kv(1))
    assert [(pool.size, pool.taken) for pool in pools.pools] == [(size, [(0, 1)])]   # several have become one


def test_pools_serve_runs_in_any_mode():
    model = toy().optimize()
    STAGES["ragged_varlen"](model, mixed()[:1])       # in inference mode
    assert len(model.varlen.pools) == 1               # which the next ones will use
    plan = [(request, len(request.prompt)) for request in prepare(mixed(), model.config)]
    for mode in torch.no_grad, torch.inference_mode:
        with mode():
            batch = cache.Flat(plan, model.device, "varlen", model.varlen)
            model(batch.tokens, batch.positions, batch.attend, batch.rows)


def test_a_model_that_was_moved_gets_other_pools():
    model = toy().optimize()
    before = model.varlen
    assert model.varlen is before and model.float().varlen is not before and model.varlen.shape[3] == torch.float32
    assert copy.deepcopy(model).varlen is not model.varlen


def test_the_real_varlen_attn_takes_what_it_is_given(monkeypatch):
    """Its kernel needs a GPU; its names, types and shapes show on meta tensors, which hold no numbers."""
    shapes = []

    def both(*args, **rest):
        out = varlen_attn(*args, **rest)
        shapes.append((out.shape, real_varlen_attn(*(arg.to("meta") if torch.is_tensor(arg) else arg for arg in args), **rest).shape))
        return out

    monkeypatch.setattr(kernels, "varlen_attn", both)
    monkeypatch.setattr(kernels, "has_varlen", lambda q: True)
    STAGES["ragged_varlen"](DOUBLE, mixed())
    assert shapes and all(mine == real for mine, real in shapes)


def wrong(change):
    return lambda q, k, v, cu_q, cu_k, max_q, max_k, **rest: change(q, k, v, cu_q, cu_k)


def top_left(q, k, v, cu_q, cu_k):
    outs = [F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q[a:b], k[c:d], v[c:d])), is_causal=True).transpose(0, 1)
            for a, b, c, d in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]) if b > a]
    return torch.cat(outs)


def refuses(*args):
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer")


def test_varlen_attn_is_taken_only_where_it_agrees(monkeypatch):
    def agrees(function):
        monkeypatch.setattr(kernels, "varlen_attn", function)
        kernels.varlen_agrees.cache_clear()
        return kernels.varlen_agrees(torch.device("cpu"), torch.bfloat16, 8)

    try:
        assert agrees(varlen_attn)
        assert not agrees(wrong(top_left))                                       # another triangle
        assert not agrees(wrong(lambda q, k, v, cu_q, cu_k: torch.zeros_like(q)))
        assert not agrees(wrong(lambda q, *rest: torch.full_like(q, torch.nan)))   # it read between the requests
        assert not agrees(wrong(refuses)) and not agrees(lambda q, k: q)           # not on this GPU; another signature
    finally:
        kernels.varlen_agrees.cache_clear()
    x = torch.zeros(1, 1, 8)
    assert not kernels.has_varlen(x) and not kernels.has_varlen(x.bfloat16())     # not on a CPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="varlen_attn needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contract_on_a_gpu(dtype):
    model, asked = toy(dtype=dtype, n_head=2, n_embd=64).cuda(), mixed()
    check = Check(model, asked)
    fast = copy.deepcopy(model).optimize()
    assert dtype == torch.float32 or kernels.has_varlen(torch.zeros(2, 1, 32, dtype=dtype, device="cuda"))
    STAGES["ragged_varlen"](fast, asked, on_token=check.on_token)
    assert [v.verdict for v in check() if v.verdict not in ("identical", "near-tie")] == []
