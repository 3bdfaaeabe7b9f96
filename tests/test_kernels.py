"""`model.optimize()`: the same results from other kernels, and a way back wherever they do not apply."""
import copy
import pickle
from dataclasses import replace

import pytest
import torch
from common import BLOCK_SIZE, STAGES, VOCAB, alone, assert_contract, toy, workloads
from hypothesis import HealthCheck, given, settings
from torch.nn import functional as F

import cache
import toolbox.kernels as kernels
from scheduler import Request
from toolbox.check import Check

PLAIN = toy(dtype=torch.float32)
FAST = toy(dtype=torch.float32).optimize()
TOKENS = torch.tensor([[i % VOCAB for i in range(BLOCK_SIZE)]])


def requests():
    return [Request([i % VOCAB for i in range(3 * n, 5 * n)], max_new_tokens=3 + n % 7, temperature=n % 2, seed=n, name=f"r{n}", arrival=n // 3)
            for n in range(1, 12)]


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
    if not kernels.can_pack():
        pytest.skip("this torch has no oneDNN kernels")
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
    trace = generate_ragged.generate(model, requests())
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
    assert_contract(model, STAGES["ragged_varlen"], requests())
    tokens, logits, reason = alone(plain, requests()[4])
    torch.testing.assert_close(alone(model, requests()[4])[1], logits, rtol=0, atol=1e-10 * float(logits.abs().max()))
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
        assert_contract(model, STAGES["ragged_varlen"], requests(), tolerance=1e-4)
    finally:
        kernels.can_pack.cache_clear()


@torch.no_grad()
def test_no_rows_wanted():
    """A step that is all partial prefill asks for the logits of nobody."""
    assert FAST(TOKENS, rows=(torch.tensor([], dtype=torch.long), -1)).shape == (0, VOCAB)
