"""optimize(): the same results through other kernels, in every stage; and what it promises."""
import contextlib
import copy
import ctypes
import gc
import io
import os
import pickle
import platform
import runpy
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common import (
    BLOCK_SIZE,
    STAGES,
    VOCAB,
    alone,
    assert_contract,
    examples,
    mixed,
    toy,
    workloads,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import generate_paged
import generate_ragged
import kernels.attention as attention
import kernels.linear as linear
import kernels.native as native
from cache import KV
from generate_paged import Paged
from generate_ragged import Flat
from kernels import FastGPT, optimize, served
from kernels.attention import Pool, Pools
from kernels.threads import FIRST_PAUSE, LONGEST_PAUSE, Threads
from model import GPT, MLP, Block, GPTConfig, Head, MultiHeadAttention
from request import Request, prepare
from toolbox.check import Check
from toolbox.traps import swapped
from toolbox.xray import XRay

PLAIN = toy(dtype=torch.float32)
FAST = toy(dtype=torch.float32).optimize()
TORCH = optimize(toy(dtype=torch.float32), compiled=False)
TOKENS = torch.tensor([[i % VOCAB for i in range(BLOCK_SIZE)]])
STREAMS = ("ragged_varlen", "paged")   # the stages whose attention optimize() replaces
ROOT = Path(__file__).parent.parent
CHECKS = list(HealthCheck)

has_native = native.works()
needs_native = pytest.mark.skipif(not has_native, reason="native.cpp is not in use here")


def test_native_works_where_there_is_a_compiler():
    """The tests of native.cpp are skipped where it cannot be used. This one says why it cannot."""
    if shutil.which(native.COMPILER) is None:
        pytest.skip(f"there is no {native.COMPILER} here")
    assert native.problem() is None


@pytest.fixture
def without_native(monkeypatch):
    """As on a machine without a compiler."""
    monkeypatch.setattr(native, "problem", lambda: "there is no g++ here")


@pytest.mark.parametrize("stage", STAGES)
@settings(max_examples=examples(250), deadline=None, derandomize=True,
          suppress_health_check=CHECKS)
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


def test_its_kernels_are_really_in_use(without_native, monkeypatch):
    if platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available():
        pytest.skip("oneDNN's kernels are there on x86-64")
    assert linear.has_onednn()
    model = toy(dtype=torch.float32).optimize()
    packed = [m.reordered.packed[-1] for m in model.modules() if hasattr(m, "reordered")]
    assert not any(each is None for each in packed)
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
        monkeypatch.setattr(native, "problem", lambda: "there is no g++ here")
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
    roomy = dict(max_batch=1, pages=400, share_prefixes=False)   # nothing between its pages
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
def test_the_last_block_computes_only_what_is_wanted(monkeypatch):
    seen, real = [], linear.fused_linear
    monkeypatch.setattr(linear, "fused_linear", lambda module, x, *rest, **more: (
        seen.append((module, x.shape[:-1].numel())), real(module, x, *rest, **more))[1])
    rows, tokens = (torch.tensor([0, 1]), torch.tensor([5, -1])), TOKENS.view(2, -1)
    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    torch.testing.assert_close(FAST(tokens, positions, rows=rows), PLAIN(tokens, positions)[rows],
                               rtol=1e-4, atol=1e-4)
    counts = [{n for module, n in seen if module is block.mlp.c_fc} for block in FAST.h]
    assert counts == [{tokens.numel()}, {tokens.numel()}, {2}]


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


# --- nothing is silently replaced -----------------------------------------------------------------

RIGHT = [alone(PLAIN, request)[0] for request in mixed()]
CROWDED = {"page_size": 2, "pages": 24}   # or no page would be scattered


def test_the_digests_are_those_of_the_functions_as_they_stand():
    known = served.known()
    changed = [name for name, digest in served.digests().items() if known.get(digest) != name]
    assert not changed, (
        f"{', '.join(changed)} changed, and kernels/ replace it. Make sure that the kernels still "
        "compute the same; then run: python kernels/served.py")


def outcome(model, stage, temperature=None):
    """The generated tokens of all requests, or the error."""
    requests = mixed() if temperature is None else [replace(r, temperature=0.0) for r in mixed()]
    try:
        STAGES[stage](model, requests, **(CROWDED if stage == "paged" else {}))
    except Exception as error:
        return repr(error)
    return [request.generated for request in requests]


def assert_shows(stage, plain=PLAIN, fast=FAST, *others):
    """What was broken shows on the optimized models just as on the plain one."""
    expected = outcome(plain, stage)
    assert expected != RIGHT, "it breaks nothing"
    for model in fast, *others:
        model._parts.passes.clear()
        assert outcome(model, stage) == expected
    return fast.uses()


BREAKS = [   # a function, its code as it stands, what stands there instead, and where it shows
    (Flat.attend, "keys, values)[0])", "keys, values)[0] * 0)", STREAMS),
    (Flat.write, "v[:, a:b]", "k[:, a:b]", STREAMS[:1]),
    (Flat.read, "self.ends[i])", "self.ends[i])[::-1]", STREAMS[:1]),
    (Flat.lay_out, "range(start, end)\n", "range(end - start)\n", STREAMS),
    (Paged.write, "= k, v", "= v, k", STREAMS[1:]),
    (Paged.read, "self.pool.v[layer]", "self.pool.k[layer]", STREAMS[1:]),
    (Paged.lay_out, "all(b == a + 1 for a, b in pairwise(table))", "True", STREAMS[1:]),
    (Paged.slots, "table[p // size]", "table[0]", STREAMS[1:]),
    (KV.write, "all_v[..., start:end, :] = v", "all_v[..., start:end, :] = k", STREAMS[:1]),
    (KV.read, "self.v[layer]", "self.k[layer]", STREAMS[:1]),
    (KV.buffers, "return self.k[layer], self.v[layer]", "return (self.k[layer],) * 2", STREAMS),
    (Head.forward, ".tril(diagonal=S - T)", ".tril(diagonal=0)", STREAMS),
    (MLP.forward, 'F.gelu(self.c_fc(x), approximate="tanh")', "F.relu(self.c_fc(x))",
     (*STREAMS, "interleaved")),
    (Block.forward, "x + self.mlp", "x - self.mlp", (*STREAMS, "interleaved")),
    (MultiHeadAttention.forward, "self.layer, q, k, v", "self.layer, k, q, v", STREAMS),
    (MultiHeadAttention.split_heads, "unflatten(-1, ", "flip(-1).unflatten(-1, ",
     (*STREAMS, "interleaved")),
    (GPT.forward, "self.wpe(positions)", "self.wpe(positions) * 0.5", (*STREAMS, "interleaved")),
]


@pytest.mark.parametrize("function, right, wrong, stages", BREAKS,
                         ids=lambda value: getattr(value, "__qualname__", ""))
def test_a_broken_function_is_not_replaced(function, right, wrong, stages):
    """Put in as toolbox/traps.py does it, with the code of the function swapped in place."""
    with swapped(function, [(right, wrong)]):
        for stage in stages:
            uses = assert_shows(stage, PLAIN, FAST, TORCH)
        if stage in STREAMS and has_native:
            assert uses == f"compiled step: no, {function.__qualname__} has been replaced"
    FAST._parts.passes.clear()
    assert outcome(FAST, stages[0]) == RIGHT
    assert not has_native or FAST.uses() == "compiled step: yes, 1 thread"


class Zeros(Flat):
    def attend(self, layer, q, k, v):
        return q * 0


class OwnWrite(Flat):
    def __init__(self, *args):
        super().__init__(*args)
        self.write = lambda layer, k, v: Flat.write(self, layer, v, k)


class OwnKV(KV):
    def write(self, layer, start, k, v):
        super().write(layer, start, v, k)


class OwnCaches(Flat):
    def find_room(self):
        for request, _ in self.plan:
            request.kv = request.kv or OwnKV(request.kv_tokens)


class LastKeyIsHidden(Head):
    def forward(self, q, k, v):
        return super().forward(q, k, v, mask=torch.arange(k.size(-2)) != k.size(-2) - 2)


@pytest.mark.parametrize("name, change", [
    ("Flat", Zeros), ("Flat", OwnWrite), ("Flat", OwnCaches), ("head", LastKeyIsHidden())])
def test_a_layout_of_ones_own_is_not_replaced(name, change, monkeypatch):
    monkeypatch.setattr(generate_ragged, name, change)
    assert "yes" not in assert_shows("ragged_varlen", PLAIN, FAST, TORCH)


@pytest.mark.parametrize("owner, name", [
    (Flat, "attend"), (KV, "read"), (torch.nn.LayerNorm, "forward"), (torch.nn.Linear, "forward")])
def test_a_function_assigned_to_a_class_is_not_replaced(owner, name, monkeypatch):
    """As a student does in a notebook. What cannot be read counts as changed."""
    space = {"real": getattr(owner, name), "torch": torch}
    exec("def changed(self, *args):\n out = real(self, *args)\n"
         " return out.flip(-1) if torch.is_tensor(out) else out[::-1]", space)
    monkeypatch.setattr(owner, name, space["changed"])
    uses = assert_shows("ragged_varlen", PLAIN, FAST, TORCH)
    assert uses == f"compiled step: no, {owner.__name__}.{name} has been replaced"


class Norm(torch.nn.LayerNorm):
    def forward(self, x):
        return x


def half(module, args, out=None):
    return out * 0.5 if out is not None else (args[0] * 0.5, *args[1:])


def relu(mlp):
    mlp.forward = lambda x: mlp.c_proj(mlp.c_fc(x).relu())


CHANGES = {   # what is done to a model
    "an activation": lambda m: relu(m.h[1].mlp),
    "a norm": lambda m: setattr(m.h[1], "ln_2", Norm(15)),
    "an eps": lambda m: setattr(m.h[1].ln_2, "eps", 10.0),
    "a layer's number": lambda m: setattr(m.h[1].attn, "layer", 0),
    "an embedding": lambda m: setattr(m.wpe, "max_norm", 0.1),
    "a hook on a block": lambda m: m.h[1].register_forward_hook(half),
    "a hook on a linear": lambda m: m.h[0].mlp.c_fc.register_forward_hook(half),
    "a pre-hook on a norm": lambda m: m.ln_f.register_forward_pre_hook(
        lambda module, args: (args[0] * torch.arange(15),)),
    "a forward of the model": lambda m: setattr(m, "forward", lambda *args: PLAIN(*args).flip(-1)),
    "an embedding's hook": lambda m: m.wte.register_forward_hook(half),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("stage", [*STREAMS, "interleaved"])
def test_a_changed_model_is_not_replaced(name, stage):
    """Changed between two runs: the first one has shown the model as it was."""
    models = [copy.deepcopy(model) for model in (PLAIN, FAST, TORCH)]
    for model in models:
        assert outcome(model, stage) == RIGHT
        CHANGES[name](model)
    assert "no, " in assert_shows(stage, *models)


def test_a_hook_on_all_modules():
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out * 0.5 if isinstance(module, torch.nn.LayerNorm) else None)
    try:
        assert "a hook on all modules" in assert_shows("ragged_varlen", PLAIN, FAST, TORCH)
    finally:
        handle.remove()


def test_errors_are_those_of_the_plain_model():
    """A token or a position beyond the embeddings, a cache that is too small, a short table."""
    def told(model, change, stage):
        request, = prepare(Request([1, 2, 3], 4), model.config)
        request.kv, pages = ([0, 1], generate_paged.Pages(3, 2)) if stage is Paged else (None, None)
        args = [KV(6), pages] if stage is Paged else []
        batch = stage([(request, 3)], *args)
        change(batch)
        try:
            return model(batch.tokens, batch.positions, batch.attend, batch.rows).argmax().item()
        except Exception as error:
            return type(error)

    changes = [(lambda b: b.tokens.fill_(VOCAB), IndexError),
               (lambda b: b.tokens.neg_(), IndexError),
               (lambda b: b.positions.add_(BLOCK_SIZE - 2), IndexError),
               (lambda b: setattr(b.plan[0][0], "kv", KV(2)), ValueError),
               (lambda b: setattr(b, "tokens", b.tokens.int()), None),
               (lambda b: setattr(b, "rows", torch.tensor([1])), None),
               (lambda b: setattr(b, "rows", None), None)]
    with torch.inference_mode():
        for change, error in changes:
            expected = told(PLAIN, change, Flat)
            assert expected is error or error is None and isinstance(expected, int)
            assert told(FAST, change, Flat) == told(TORCH, change, Flat) == expected
        for table in [0, 7], [0]:   # a page that the pool does not have; one too few
            def change(batch, table=table):
                batch.plan[0][0].kv[:] = table
            assert told(PLAIN, change, Paged) == told(FAST, change, Paged)


@torch.inference_mode()
def test_a_cache_of_another_model_is_not_taken_for_ones_own():
    """Five heads of three features are as many numbers as three of five."""
    request, = prepare(Request([1, 2, 3], 4), FAST.config)
    FAST.pools.take_in(Flat([(request, 1)]))
    request.kv.write(0, 0, *torch.ones(2, 3, 1, 5))
    other, batch = toy(dtype=torch.float32, n_head=5).optimize(), Flat([(request, 1)])
    with pytest.raises(RuntimeError, match="must match the existing size"):   # of the plain model
        other(batch.tokens, batch.positions, batch.attend, batch.rows)


def test_an_observer_does_not_cost_the_compiled_step():
    """What no kernel replaces may be overridden, and hooks of the whole model run anyway."""
    model, calls = copy.deepcopy(FAST), []
    model.register_forward_pre_hook(lambda module, args: calls.append(args[0].shape))

    class Watched(Flat):
        def cost(self):
            calls.append("cost")
            return super().cost()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate_ragged, "Flat", Watched)
        trace = generate_ragged.generate(model, mixed())
    assert len(calls) == 2 * len(trace.passes)
    assert model.uses() == ("compiled step: yes, 1 thread" if has_native else
                            f"compiled step: no, {native.problem()}")


def test_the_x_ray_shows_what_really_ran():
    """On a kernel that is wrong, it must not say that all is right while the tokens are not."""
    if not has_native:
        pytest.skip("there is no compiled step to look behind")
    model, requests = copy.deepcopy(FAST), mixed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "step", lambda *args: torch.zeros(len(args[3]), VOCAB))
        with XRay(model, requests) as xray:
            generate_ragged.generate(model, requests)
    assert xray.faults() == [] and [r.generated for r in requests] == RIGHT
    assert model.uses() == "compiled step: no, Flat.attend is wrapped"


def test_what_it_uses_in_one_line(monkeypatch):
    model = copy.deepcopy(FAST)
    if has_native:
        assert model.uses() == "compiled step: yes, 1 thread"
        outcome(model, "ragged_varlen")
        compiled = sum(model._parts.passes.values())
        outcome(model, "interleaved")
        total = sum(model._parts.passes.values())
        assert model.uses() == (
            f"compiled step: in {compiled} of {total} passes, 1 thread; in the others not: it is "
            "for the layouts of stages 6 and 7, not Rectangle")
        assert "not torch.bfloat16" in copy.deepcopy(FAST).bfloat16().uses()
        assert "called without it" in copy.deepcopy(TORCH).uses()
        monkeypatch.setattr(native, "problem", lambda: "there is no g++ here")
    assert "there is no" in toy(dtype=torch.float32).optimize().uses()

    class Own(GPT):
        pass

    assert Own(PLAIN.config).optimize().uses() == "compiled step: no, Own is not GPT"


# --- whatever else the program does ---------------------------------------------------------------

@pytest.fixture
def new_here(monkeypatch):
    """native with nothing loaded or tried yet, until the test ends."""
    for name in "library", "problem":
        monkeypatch.setattr(native, name, cache(getattr(native, name).__wrapped__))
    linear.has_onednn.cache_clear()
    return native


SETTINGS = {
    "bfloat16": lambda: torch.set_default_dtype(torch.bfloat16),
    "float64": lambda: torch.set_default_dtype(torch.float64),
    "meta": lambda: torch.set_default_device("meta"),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
}


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("setting", SETTINGS)
def test_defaults_make_no_difference(setting, compiled, new_here):
    """A default dtype or device, even while the library is tried out; and no random number."""
    model, stream = toy(dtype=torch.float32), torch.get_rng_state()
    greedy = [alone(PLAIN, replace(request, temperature=0.0))[0] for request in mixed()]
    try:
        SETTINGS[setting]()
        optimize(model, compiled)
        found = [outcome(model, stage, temperature=0.0) for stage in STREAMS]
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.use_deterministic_algorithms(False)
    assert found == [greedy, greedy] and torch.equal(torch.get_rng_state(), stream)
    assert ("yes" in model.uses()) == (compiled and has_native)


def test_autocast_is_honoured():
    for stage in "interleaved", "ragged_varlen":
        dtypes = []
        for model in PLAIN, FAST, TORCH:
            with torch.autocast("cpu", torch.bfloat16):
                STAGES[stage](model, mixed(), on_token=lambda r, t, row: dtypes.append(row.dtype))
        assert set(dtypes) == {torch.bfloat16}


@pytest.mark.parametrize("wrong, message", [
    (torch.zeros(3, 4, dtype=torch.float64), "the x is torch.float64 (3, 4) on cpu, not torch.fl"),
    (torch.zeros(3, 4, device="meta"), "the x is torch.float32 (3, 4) on meta, not"),
    (torch.zeros(4, 3), "the x is torch.float32 (4, 3) on cpu, not torch.float32 (3, 4) on the"),
    (torch.zeros(4, 3).T, "the x is not contiguous, torch.float32 (3, 4)"),
    (torch.zeros(3, 4).to_sparse(), "the x is torch.float32 (3, 4) on cpu"),
    (None, "the x is a NoneType, not a tensor"),
])
def test_no_other_tensor_comes_through_the_door(wrong, message):
    right = torch.zeros(3, 4)
    assert native.address(right, torch.float32, (3, 4)) == right.data_ptr()
    with pytest.raises(ValueError) as error:
        native.address(wrong, torch.float32, (3, 4), "the x")
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_there_is_one_door():
    """Addresses are asked for there; else only to compare them, and by huge_pages."""
    text = {path.name: path.read_text() for path in Path(native.__file__).parent.glob("*.py")}
    counts = {name: source.count("data_ptr(") for name, source in text.items()}
    assert {name: n for name, n in counts.items() if n} == {"native.py": 3, "linear.py": 1}


def test_a_weight_that_is_not_contiguous_goes_through_torch():
    model = copy.deepcopy(FAST)
    model.wpe.weight = torch.nn.Parameter(model.wpe.weight.T.contiguous().T, requires_grad=False)
    assert outcome(model, "ragged_varlen") == RIGHT
    assert not has_native or "wpe.weight is not contiguous" in model.uses()


# --- threads --------------------------------------------------------------------------------------

@pytest.mark.parametrize("stage", STREAMS)
@pytest.mark.parametrize("model", [pytest.param(FAST, marks=needs_native, id="compiled"),
                                   pytest.param(TORCH, id="not compiled")])
def test_threads_on_one_model(model, stage):
    """Each gets what it would have got alone."""
    model, found = copy.deepcopy(model), []

    def work():
        for _ in range(5):
            found.append(outcome(model, stage))

    threads, interval = [threading.Thread(target=work) for _ in range(5)], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)   # they take turns within every line
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert found == [RIGHT] * 25
    assert not any(pool.taken for pool in model.pools.pools)


def test_threads_that_take_caches_at_once(monkeypatch):
    """Between finding a gap and taking it, the others get their turn."""
    pools, held = Pools(100, 1, 2, 3, torch.float32, torch.device("cpu")), []
    real = attention.insort
    monkeypatch.setattr(attention, "insort", lambda *args: (time.sleep(0.001), real(*args)))
    threads = [threading.Thread(target=lambda: held.extend(pools.kv(3) for _ in range(5)))
               for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(kv.first for kv in held) == list(range(0, 60, 3))


def test_a_cache_that_is_found_dead_in_the_middle(monkeypatch):
    """The garbage collector may run while the pools' lock is taken, and give a cache back."""
    pools, done = Pools(16, 1, 2, 3, torch.float32, torch.device("cpu")), []

    def collect(*args):
        kv = pools_kv()
        kv.itself = kv   # only the garbage collector finds it
        del kv
        real(*args)
        gc.collect()

    def work():
        done.append(pools.kv(4))
        done.append(pools.kv(4))

    dead, real = [pools.kv(5)], attention.insort
    dead[0].itself = dead[0]
    pools_kv = dead.pop
    monkeypatch.setattr(attention, "insort", lambda *args: collect(*args) if dead else real(*args))
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "it waits for itself"
    pieces = sorted((kv.first, kv.first + 4) for kv in done)
    pools.kv(1)   # whoever comes next settles
    assert [pool.taken for pool in pools.pools] == [pieces]


# --- the compiler ---------------------------------------------------------------------------------

def said_by(work):
    with contextlib.redirect_stderr(io.StringIO()) as err:
        work()
    return err.getvalue()


def test_without_a_compiler(new_here, monkeypatch, tmp_path):
    """One line, once; and everything runs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    models = [toy(dtype=torch.float32) for _ in "ab"]
    said = said_by(lambda: [model.optimize() for model in models])
    assert said.startswith("optimize(): there is no ") and said.count("\n") == 1
    assert outcome(models[0], "ragged_varlen") == RIGHT
    assert "compiled step: no, there is no " in models[0].uses()


@pytest.mark.skipif(shutil.which(native.COMPILER) is None, reason="it needs a compiler that fails")
def test_a_source_that_does_not_compile_is_compiled_once(new_here, monkeypatch, tmp_path):
    """The next process reads why, in one line, and calls no compiler."""
    source = tmp_path / "native.cpp"
    source.write_text("#error too old\n")
    monkeypatch.setattr(native, "SOURCE", source)
    calls, real = [], subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda args, **rest: (
        calls.extend("c" * ("-c" in args)), real(args, **rest))[1])
    for process in range(3):
        native.library.cache_clear()
        native.problem.cache_clear()
        said = said_by(lambda: toy(dtype=torch.float32).optimize())
        assert "error too old" in said and said.count("\n") == 1 and len(calls) == 1
        assert ("to try again" in said) == (process > 0)


@needs_native
def test_a_library_that_computes_something_else_is_not_used(new_here, monkeypatch):
    right = native.library()
    wrong = SimpleNamespace(panel_width=right.panel_width)
    monkeypatch.setattr(native, "library", lambda: wrong)
    nothing = {"multiply": lambda *args: ctypes.memset(args[3], 0, 8),
               "step": lambda *args: (ctypes.memset(args[9], 0, 8), args[4])[1]}
    for part in nothing:   # each of the two is looked at
        wrong.multiply, wrong.step = right.multiply, right.step
        native.problem.cache_clear()
        assert native.works()
        setattr(wrong, part, nothing[part])
        native.problem.cache_clear()
        said = said_by(lambda: toy(dtype=torch.float32).optimize())
        assert said.startswith("optimize(): native.cpp computes something else than torch; ")
        assert said.count("\n") == 1


class Sharded(torch.nn.Module):
    """As tensor_parallel.RowParallel on one rank."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x):
        return F.linear(x, self.weight) + self.bias


@pytest.mark.parametrize("kind", ["float64", "bfloat16", "meta", "sharded"])
def test_nothing_is_compiled_for_a_model_that_cannot_use_it(kind, new_here, monkeypatch):
    monkeypatch.setattr(native, "build", lambda: 1 / 0)
    model = toy(dtype=torch.float32)
    if kind == "sharded":
        for block in model.h:
            block.attn.c_proj = Sharded(block.attn.c_proj)
    else:
        model = model.to(**{"device" if kind == "meta" else "dtype": getattr(torch, kind, kind)})
    model.optimize()
    if kind != "meta":
        outcome(model, "ragged_varlen")
        assert "compiled step: no, " in model.uses()


# --- native.cpp: a whole step in one call ---------------------------------------------------------

@needs_native
@settings(max_examples=examples(400), deadline=None, derandomize=True)
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
def test_the_sizes_for_other_processors(flags, width, new_here, monkeypatch, tmp_path):
    monkeypatch.setattr(native, "FLAGS", [*native.FLAGS, *flags])
    rewritten(monkeypatch, tmp_path)
    assert native.works() and native.library().panel_width() == width
    for n_head, n_embd in (3, 48), (2, 10):
        assert largest_difference(*plain_and_fast(n_head, n_embd), 61) <= 2e-5


def rewritten(monkeypatch, folder, right="", wrong=""):
    """native.cpp with a fault put in; what is built of it lies in `folder`."""
    source = native.SOURCE.read_text()
    assert not right or source.count(right) == 1
    monkeypatch.setattr(native, "SOURCE", folder / "native.cpp")
    native.SOURCE.write_text(source.replace(right, wrong) if right else source)
    native.library.cache_clear()
    native.problem.cache_clear()


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
    "a decode misses its own key": (
        "softmax(scores + i * end, start + i + 1, end, scale)",
        "softmax(scores + i * end, std::max<i64>(start + i, 1), end, scale)"),
    "the scores' scale is left out": ("scale = 1 / std::sqrt(float(size));", "scale = 1;"),
}


@needs_native
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_put_into_the_source_is_found(fault, new_here, monkeypatch, tmp_path):
    """By these tests; and by the library's trial, so that this suite fails and nobody uses it."""
    models = plain_and_fast(3, 48)
    rewritten(monkeypatch, tmp_path, *FAULTS[fault])
    assert native.problem() == "native.cpp computes something else than torch"
    monkeypatch.setattr(native, "problem", lambda: None)
    try:
        difference = largest_difference(*models, 61)
    except ValueError as error:   # keys that were never written may be anything
        assert "not finite" in str(error)
    else:
        assert not difference <= 1e-3   # or NaN


@needs_native
def test_nan_and_infinity_stay():
    x = torch.tensor([[torch.nan, 1.0], [torch.inf, 0.0], [1e30, 1e30], [1.0, 2.0]])
    weight = torch.ones(3, 2)
    found = native.multiply(x, native.pack(weight), 3, gelu=True)
    torch.testing.assert_close(found, F.gelu(F.linear(x, weight), approximate="tanh"),
                               equal_nan=True)
    model = copy.deepcopy(FAST)
    model.wpe.weight[5] = torch.nan   # every later token sees this one's key
    with pytest.raises(ValueError, match="not finite"):
        generate_ragged.generate(model, [Request([1, 2, 3, 4, 5, 6, 7])])


SANITIZED = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from kernels import native
native.FLAGS += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g"]
text = native.SOURCE.read_text()
native.SOURCE = Path({folder!r}, "native.cpp")
native.SOURCE.write_text(text.replace({right!r}, {wrong!r}))
import pytest
sys.exit(pytest.main(["-qsx", "-p", "no:cacheprovider", "-p", "no:faulthandler", {tests!r},
                      "-k", "multiplication or any_head or nan_and or compiled and threads"]))
"""


@needs_native
@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")
@pytest.mark.parametrize("right, wrong, message", [
    ("int32_t bits", "int32_t bits", None),
    ("x = x > -87.f ? x < 88.f ? x : 88.f : -87.f;", "x = x < -87.f ? -87.f : x > 88.f ? 88.f : x;",
     "runtime error"),
    ("j < cols; j++) part[j] = gelu", "j <= cols; j++) part[j] = gelu", "AddressSanitizer")],
    ids=["as it is", "undefined", "out of bounds"])
def test_native_under_sanitizers(right, wrong, message, tmp_path):
    """The tests of native.cpp again, in a build that stops at the first fault."""
    assert right in native.SOURCE.read_text()
    libraries = [subprocess.run([native.COMPILER, f"-print-file-name={name}"], capture_output=True,
                                text=True, check=True).stdout.strip()
                 for name in ("libasan.so", "libubsan.so")]
    if not all(map(os.path.isabs, libraries)):
        pytest.skip(f"{native.COMPILER} has no sanitizers here")
    program = SANITIZED.format(path=[str(ROOT), str(ROOT / "tests")], folder=str(tmp_path),
                               right=right, wrong=wrong, tests=str(ROOT / "tests/test_kernels.py"))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          cwd=ROOT, env={**os.environ, "LD_PRELOAD": ":".join(libraries),
                                         "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0"})
    said = done.stdout + done.stderr
    if message is None:
        assert done.returncode == 0 and "passed" in said and "skipped" not in said, said[-3000:]
    else:
        assert done.returncode != 0 and message in said, said[-3000:]


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
        with torch.no_grad():
            assert_shows("ragged_varlen", plain, model)
        assert model.uses() == f"compiled step: no, h.1.{module} is another module"
    batch = Flat([(request, 1) for request in prepare(mixed(), FAST.config)])
    learning = copy.deepcopy(FAST).requires_grad_(True)
    assert learning(batch.tokens, batch.positions, batch.attend, batch.rows).requires_grad


def steps_on(machine, count, most=2, seconds=0.01):
    """Numbers of threads of `count` steps. machine(step, used): the cores that a step gets."""
    threads, used, now = Threads(), [], 100.0
    for step in range(count):
        used.append(threads.number(most, now))
        now += seconds
        threads.record(used[-1], most, machine(step, used[-1]), now)
    return used


def test_threads_give_way_while_the_machine_is_busy():
    first, longest = round(FIRST_PAUSE / 0.01), round(LONGEST_PAUSE / 0.01)   # in steps
    assert set(steps_on(lambda step, used: used, 50)) == {2}                # quiet
    busy = steps_on(lambda step, used: min(used, 1.3), 2000)                # beside an endless loop
    assert busy[:2] == [2, 2] and set(busy[2:1 + first]) == {1}
    assert busy.count(2) < 20 and 1 <= busy[-longest:].count(2) <= 2        # tried now and then
    later = steps_on(lambda step, used: min(used, 1.3 if step < 100 else 2), 500)
    assert set(later[101 + longest:]) == {2}                                # quiet again
    blips = steps_on(lambda step, used: 1.2 if step % 10 == 0 else used, 100)
    assert set(blips) == {2}                                                # no evidence
    longer = steps_on(lambda step, used: 1.2 if step in (10, 11) else used, 100)
    assert first - 1 <= longer.count(1) <= first + 1
    prefill = steps_on(lambda step, used: min(used, 1.3), 9, seconds=3 * FIRST_PAUSE)
    assert prefill == [2, 2, 1, 2, 1, 2, 1, 1, 2]                           # pauses are in seconds
    assert set(steps_on(lambda step, used: min(used, 6.5), 10, most=8)[2:]) == {6}
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
@settings(max_examples=examples(100), deadline=None, derandomize=True,
          suppress_health_check=CHECKS)
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


@settings(max_examples=examples(400), deadline=None, derandomize=True)
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
