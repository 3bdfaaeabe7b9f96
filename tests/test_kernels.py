"""optimize(): the same results through other kernels, in every stage; and what it promises."""
import contextlib
import copy
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
from unittest.mock import patch

import pytest
import torch
from common import BLOCK_SIZE, STAGES, VOCAB, alone, assert_contract, examples, mixed, workloads
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
from kernels import optimize, served
from kernels.attention import Pool, Pools
from kernels.threads import Threads
from model import GPT, MLP, Block, GPTConfig, Head, MultiHeadAttention
from request import Request, prepare
from toolbox.check import Check
from toolbox.toy import toy
from toolbox.traps import swapped
from toolbox.xray import XRay

PLAIN = toy(dtype=torch.float32)
FAST = toy(dtype=torch.float32).optimize()
TORCH = optimize(toy(dtype=torch.float32), compiled=False)
DOUBLE = toy().optimize()
TOKENS = torch.tensor([[i % VOCAB for i in range(BLOCK_SIZE)]])
STREAMS = ("ragged_varlen", "paged")   # the stages whose attention optimize() replaces
ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")

has_native = native.works()
needs_native = pytest.mark.skipif(not has_native, reason="native.cpp is not in use here")
both_kernels = pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_native), False])
thorough = pytest.mark.thorough
YES = "compiled step: yes, 1 thread" if has_native else f"compiled step: no, {native.problem()}"


def generated(**strategies):
    """hypothesis, as all tests here use it; examples: their number in the thorough size."""
    number = examples(strategies.pop("examples"))
    options = settings(max_examples=number, deadline=None, derandomize=True,
                       suppress_health_check=[*HealthCheck])
    return lambda test: options(given(**strategies)(test))


def without(what="problem", value=lambda: "there is no g++ here"):
    """As on a machine without a compiler."""
    return patch.object(native, what, value)


def assert_close(found, expected, tolerance=1e-4):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_native_works_where_there_is_a_compiler():
    """The tests of native.cpp are skipped where it cannot be used. This one says why it cannot."""
    if shutil.which(native.COMPILER) is None:
        pytest.skip(f"there is no {native.COMPILER} here")
    assert native.problem() is None


# --- the same results -----------------------------------------------------------------------------

@pytest.mark.parametrize("stage", STAGES)
@generated(examples=100, workload=workloads())
def test_contract_of_the_optimized_model(stage, workload):
    """Against the plain model: logits to 1e-4, and only a near-tie may change a token."""
    asked = [replace(request) for request in workload.requests]
    check = Check(PLAIN, asked)
    trace = STAGES[stage](FAST, asked, on_token=check.on_token, **workload.knobs(stage))
    assert [v.verdict for v in check() if v.verdict not in ("identical", "near-tie")] == []
    if stage == "ragged_varlen":
        assert all(p.pad_slots == p.padded_keys == p.copied_bytes == 0 for p in trace.passes)


@both_kernels
@pytest.mark.parametrize("script", ["generate_ragged", "generate_paged"])
def test_it_serves_a_script_that_is_run(script, compiled, monkeypatch):
    """Run as a program, a stage has layout classes of its own: those of __main__."""
    calls, step, torchs = [], native.step, attention.Step.__call__
    monkeypatch.setattr(native, "step", lambda *args: calls.append("step") or step(*args))
    monkeypatch.setattr(attention.Step, "__call__", lambda self, layer, *qkv: (
        calls.append(layer), torchs(self, layer, *qkv))[-1])
    fast = optimize(toy(dtype=torch.float32), compiled)
    generate = runpy.run_path(str(ROOT / f"{script}.py"), run_name="another")["generate"]
    trace = assert_contract(fast, generate, mixed(), whole=PLAIN, tolerance=1e-4)
    assert calls == (["step"] if compiled else [0, 1, 2]) * len(trace.passes)


@pytest.mark.parametrize("stage, knobs", [
    ("ragged_varlen", {}), ("paged", {"max_batch": 1, "pages": 400, "share_prefixes": False}),
    ("paged", {"pages": 24})], ids=["ragged", "neighbours", "scattered"])
def test_no_step_copies_the_past(stage, knobs, monkeypatch):
    """Attention gets views of the pool, of the right length; copies where pages are scattered."""
    seen, expected, pools = [], [], DOUBLE.pools
    attend, cost = F.scaled_dot_product_attention, Flat.cost

    def watched(q, k, v, **rest):
        memory = {t.untyped_storage().data_ptr() for p in pools.pools for t in (p.all_k, p.all_v)}
        seen.append((k.size(-2), {k.untyped_storage().data_ptr() in memory,
                                  v.untyped_storage().data_ptr() in memory}))
        return attend(q, k, v, **rest)

    def watched_cost(batch):   # called after the pass: `seen` is layer by layer
        spans = getattr(batch, "spans", [slice(0)] * len(batch.plan))
        expected.extend(3 * [(n, {isinstance(s, slice)}) for n, s in zip(batch.ends, spans)])
        return cost(batch)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr(Flat, "cost", watched_cost)
    trace = STAGES[stage](DOUBLE, mixed(), **(knobs and {"page_size": 2, **knobs}))
    assert seen == expected and len(seen) > 100
    assert (sum(p.copied_bytes for p in trace.passes) > 0) == (knobs == {"pages": 24})


@torch.no_grad()
def test_onednn_multiplies_where_native_does_not(monkeypatch):
    if platform.machine() != "x86_64" or not torch.backends.mkldnn.is_available():
        pytest.skip("oneDNN's kernels are there on x86-64")
    model, used, real = copy.deepcopy(TORCH), [], linear.ReorderedWeight.__call__
    positions, plain = torch.arange(BLOCK_SIZE)[None], F.linear
    assert linear.has_onednn()
    monkeypatch.setattr(F, "linear", lambda *args: used.append("plain") or plain(*args))
    monkeypatch.setattr(linear.ReorderedWeight, "__call__", lambda self, weight: (
        used.append("reordered"), real(self, weight))[1])
    model(TOKENS, positions, rows=(0, slice(-3, None)))
    assert used == ["reordered"] * (6 * 3 + 1)


def test_where_all_kernels_are_missing(monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    monkeypatch.setattr(linear, "has_onednn", linear.has_onednn.__wrapped__)
    assert not linear.has_onednn()
    model = optimize(toy(dtype=torch.float32), compiled=False)
    assert_contract(model, STAGES["ragged_varlen"], mixed(), whole=PLAIN, tolerance=1e-4)


@torch.no_grad()
def test_the_last_block_computes_only_what_is_wanted(monkeypatch):
    """None wanted (a step that is all partial prefill), some, and all in another order."""
    seen, real = [], linear.fused_linear
    monkeypatch.setattr(linear, "fused_linear", lambda module, x, *rest, **more: (
        seen.append((module, x.shape[:-1].numel())), real(module, x, *rest, **more))[1])
    positions, all_of_it = torch.arange(BLOCK_SIZE)[None], torch.arange(BLOCK_SIZE - 1, -1, -1)
    for wanted in torch.tensor([], dtype=torch.long), torch.tensor([5, -1]), all_of_it, None:
        rows = None if wanted is None else (0, wanted)
        seen.clear()
        assert_close(FAST(TOKENS, positions, rows=rows), PLAIN(TOKENS, positions, rows=rows))
        counts = [n for module, n in seen if any(module is b.mlp.c_fc for b in FAST.h)]
        assert counts == [BLOCK_SIZE] * 2 + [BLOCK_SIZE if wanted is None else len(wanted)]


# --- one model: saved, moved, changed, copied, trained --------------------------------------------

def test_returns_self_and_changes_nothing_that_is_saved():
    model, before = toy(dtype=torch.float32), toy(dtype=torch.float32).state_dict()
    assert model.optimize() is model and model.optimize() is model
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert list(model.state_dict()) == list(before)


def test_a_model_that_was_moved_gets_other_pools():
    model = toy(dtype=torch.float32).optimize()
    before = model.pools
    assert model.pools is before and copy.deepcopy(model).pools is not before
    assert model.double().pools is not before and model.pools.shape[3] == torch.float64
    model.load_state_dict(toy().state_dict())   # in float64 it runs through torch, to 1e-10
    for stage in STREAMS:
        assert_contract(model, STAGES[stage], mixed(), whole=toy())
    model.bfloat16()(TOKENS)


@torch.no_grad()
@pytest.mark.parametrize("how", [
    lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["itself", "deepcopy", "pickle"])
def test_changed_weights_are_seen_by_this_model_alone(how):
    model, other = toy(dtype=torch.float32).optimize(), toy(dtype=torch.float32, seed=1)
    again = how(model)
    torch.testing.assert_close(again(TOKENS), model(TOKENS), rtol=0, atol=0)
    again.load_state_dict(other.state_dict())
    assert_close(again(TOKENS), other(TOKENS))
    for m in again, other:
        m.h[1].mlp.c_fc.weight.mul_(2)
        m.wte.weight.mul_(2)
    assert_close(again(TOKENS), other(TOKENS))
    assert again is model or torch.equal(model(TOKENS), FAST(TOKENS))


def test_it_can_still_be_trained():
    grads, batch = [], Flat([(request, 1) for request in prepare(mixed(), FAST.config)])
    for model in copy.deepcopy(PLAIN), copy.deepcopy(FAST):
        model.requires_grad_(True)
        F.cross_entropy(model(TOKENS[:, :-1]).flatten(0, 1), TOKENS[0, 1:]).backward()
        grads.append((model.h[0].mlp.c_fc.weight.grad, model.wte.weight.grad))
    assert_close(*grads)
    assert model(batch.tokens, batch.positions, batch.attend, batch.rows).requires_grad


def test_autocast_is_honoured():
    dtypes = []
    for stage in "interleaved", "ragged_varlen":
        for model in FAST, TORCH:
            with torch.autocast("cpu", torch.bfloat16):
                STAGES[stage](model, mixed()[:3], on_token=lambda *of: dtypes.append(of[-1].dtype))
    assert set(dtypes) == {torch.bfloat16}


# --- nothing is silently replaced -----------------------------------------------------------------

FEW = mixed()[2::3]
RIGHT = [alone(PLAIN, request)[0] for request in FEW]
ALL = (*STREAMS, "interleaved")


def test_the_digests_are_those_of_the_functions_as_they_stand():
    now = served.new_record()
    changed = [name for file in now for name in now[file] if served.KNOWN[name] != now[file][name]]
    assert not changed, (
        f"{', '.join(changed)} changed, and kernels/ replace it. Make sure that the kernels still "
        "compute the same; then run: python kernels/served.py")


@pytest.mark.parametrize("new, same", [
    ("y = [i + 1 for i in f(x)]   # why", True), ("other = [j + 1 for j in f(x)]", True),
    ("y = [i + 2 for i in f(x)]", False), ("y = [i + 1 for i in g(x)]", False),
    ("y = [i + 1 for i in f(y)]", False), ("y = [y + 1 for i in f(x)]", False)])
def test_what_counts_as_a_change(new, same):
    digests = {served.digest(served.functions_in(f"class C:\n def m(self, x):\n  {line}")["C.m"])
               for line in (new, "y = [i + 1 for i in f(x)]")}
    assert (len(digests) == 1) == same


def outcome(model, stage, asked=FEW):
    """The generated tokens of all requests, or the error."""
    requests = [replace(request) for request in asked]
    knobs = {"page_size": 2, "pages": 12} if stage == "paged" else {}   # scattered pages
    try:
        STAGES[stage](model, requests, **knobs)
    except Exception as error:
        return repr(error)
    return [request.generated for request in requests]


def code(function, old, new, stages=STREAMS):
    """The function with other code, put in as toolbox/traps.py does."""
    name = function.__qualname__
    return name, stages, lambda models: swapped(function, [(old, new)]), f"{name} has been replaced"


def put(owner, name, value, said):
    """Another value for a name of a class or a module, as a student assigns it in a notebook."""
    return f"{owner.__name__}.{name}", STREAMS[:1], lambda models: (
        patch.object(owner, name, value)), said


def each(name, change, said, stages=ALL):
    """A change of the model itself."""
    return name, stages, lambda models: contextlib.nullcontext([*map(change, models)]), said


def flipped(function):
    def changed(self, *args):
        out = function(self, *args)
        return out.flip(-1) if torch.is_tensor(out) else out[::-1]
    return changed


def own(base, **functions):
    """A class that a user derives."""
    return type("Own", (base,), functions)


def find_room(layout, Own=own(KV, write=lambda self, layer, start, k, v: (
        KV.write(self, layer, start, v, k)))):
    for request, _ in layout.plan:
        request.kv = request.kv or Own(request.kv_tokens)


def replace_write(layout):
    Flat.find_room(layout)
    layout.write = lambda layer, k, v: Flat.write(layout, layer, v, k)


def other_linear(model, name):
    size = model.h[1].get_submodule(name).weight.shape
    torch.manual_seed(0)
    model.h[1].set_submodule(name, torch.nn.Linear(*reversed(size)).requires_grad_(False))


def half(module, args, out):
    return out * 0.5


CHANGES = [   # what is changed, in which stages it shows, and what model.uses() says of it
    code(Flat.attend, "self.write(layer, k, v)", "self.write(layer, k, -v)"),
    code(Flat.write, "v[:, a:b]", "k[:, a:b]", STREAMS[:1]),
    code(Flat.read, "self.ends[i])", "self.ends[i])[::-1]", STREAMS[:1]),
    code(Flat.lay_out, "range(start, end)\n", "range(end - start)\n"),
    code(Paged.write, "= k, v", "= v, k", STREAMS[1:]),
    code(Paged.read, "self.pool.v[layer]", "self.pool.k[layer]", STREAMS[1:]),
    code(Paged.lay_out, "all(b == a + 1 for a, b in pairwise(table))", "True", STREAMS[1:]),
    code(Paged.slots, "table[p // size]", "table[0]", STREAMS[1:]),
    code(KV.write, "all_v[..., start:end, :] = v", "all_v[..., start:end, :] = k", STREAMS[:1]),
    code(KV.read, "self.v[layer]", "self.k[layer]", STREAMS[:1]),
    code(KV.buffers, "return self.k[layer], self.v[layer]", "return (self.k[layer],) * 2"),
    code(Head.forward, ".tril(diagonal=S - T)", ".tril(diagonal=0)"),
    code(MLP.forward, 'F.gelu(self.c_fc(x), approximate="tanh")', "F.relu(self.c_fc(x))", ALL),
    code(Block.forward, "x + self.mlp", "x - self.mlp", ALL),
    code(MultiHeadAttention.forward, "self.layer, q, k, v", "self.layer, k, q, v"),
    code(MultiHeadAttention.split_heads, "unflatten(-1, ", "flip(-1).unflatten(-1, ", ALL),
    code(GPT.forward, "self.wpe(positions)", "self.wpe(positions) * 0.5", ALL),
    *[put(owner, name, flipped(getattr(owner, name)), f"{owner.__name__}.{name} has been replaced")
      for owner, name in [(Flat, "attend"), (KV, "read"), (torch.nn.LayerNorm, "forward"),
                          (torch.nn.Linear, "forward")]],
    put(generate_ragged, "Flat", own(Flat, attend=lambda self, layer, q, k, v: q * 0),
        "Own.attend has been replaced"),
    put(generate_ragged, "Flat", own(Flat, find_room=replace_write), "write of this layout has"),
    put(generate_ragged, "Flat", own(Flat, find_room=find_room), "a cache is not a KV"),
    put(generate_ragged, "head", own(Head, forward=lambda self, q, k, v: (
        Head.forward(self, q, k, v.flip(-1))))(), "Own.forward has been replaced"),
    ("a hook on head", STREAMS, lambda models: generate_ragged.head.register_forward_hook(
        lambda module, args, out: (half(module, args, out[0]), *out[1:])), "a hook on head"),
    ("a hook on all modules", STREAMS, lambda models: (
        torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: (
            half(module, args, out) if isinstance(module, torch.nn.LayerNorm) else None))),
     "a hook on all modules"),
    each("activation", lambda m: setattr(m.h[1].mlp, "forward", lambda x: (
        m.h[1].mlp.c_proj(m.h[1].mlp.c_fc(x).relu()))), "h.1.mlp has a hook, or a forward of its"),
    each("norm", lambda m: setattr(m.h[1], "ln_2", own(
        torch.nn.LayerNorm, forward=lambda self, x: x)(15)), "h.1.ln_2 is another module"),
    each("eps", lambda m: setattr(m.h[1].ln_2, "eps", 10.0), "h.1.ln_2 has another eps"),
    each("number", lambda m: setattr(m.h[1].attn, "layer", 0), "h.1.attn has other heads, or an"),
    each("heads", lambda m: setattr(m.h[1].attn, "head_size", 3), "h.1.attn has other", STREAMS),
    each("splitting", lambda m: setattr(m.h[1].attn, "split_heads", lambda x: (
        MultiHeadAttention.split_heads(m.h[1].attn, x.flip(-1)))), "h.1.attn has a hook, or"),
    each("embedding", lambda m: setattr(m.wpe, "max_norm", 0.1), "wpe has another eps, or a max"),
    each("forward", lambda m: setattr(m, "forward", lambda *args: PLAIN(*args).flip(-1)),
         "the model's forward has been replaced"),
    *[each(f"hook on {name}", lambda m, name=name: m.get_submodule(name).register_forward_hook(
        half), f"{name} has a hook") for name in ("h.1", "h.0.mlp.c_fc", "wte")],
    each("hook before ln_f", lambda m: m.ln_f.register_forward_pre_hook(
        lambda module, args: args[0] * torch.arange(15)), "ln_f has a hook"),
    *[each(f"another {name}", lambda m, name=name: other_linear(m, name),
           f"h.1.{name} is another module") for name in ("attn.c_proj", "attn.key", "mlp.c_fc")],
]


@pytest.mark.parametrize("change, stage, said", [
    pytest.param(change, stage, said, id=f"{name}, {stage}",
                 marks=[thorough] if stage != stages[0] else ())
    for name, stages, change, said in CHANGES for stage in stages])
def test_what_was_changed_shows_with_the_kernels_as_without(change, stage, said):
    """Changed between two runs: the first one has shown everything as it was."""
    models = [copy.deepcopy(model) for model in (PLAIN, FAST, TORCH)]
    assert outcome(models[1], stage) == outcome(models[2], stage) == RIGHT
    with change(models):
        expected = outcome(models[0], stage)
        assert expected != RIGHT, "it breaks nothing"
        for model in models[1:]:
            model._parts.passes.clear()
            assert outcome(model, stage) == expected
        if has_native:
            assert models[1].uses().startswith(f"compiled step: no, {said}") or (
                stage == "interleaved")   # which the compiled step does not serve anyway
    assert outcome(FAST, stage) == RIGHT


def table(*pages):
    return lambda batch: batch.plan[0][0].kv.__setitem__(slice(None), pages)


@pytest.mark.parametrize("change, error, stage", [
    (lambda b: b.tokens.fill_(VOCAB), "IndexError", Flat),
    (lambda b: b.tokens.neg_(), "IndexError", Flat),
    (lambda b: b.positions.add_(BLOCK_SIZE - 2), "IndexError", Flat),
    (lambda b: setattr(b.plan[0][0], "kv", KV(2)), "ValueError", Flat),
    (lambda b: setattr(b, "tokens", b.tokens.int()), "", Flat),
    (lambda b: setattr(b, "rows", torch.tensor([1])), "", Flat),
    (lambda b: setattr(b, "rows", None), "", Flat),
    (table(0, 7), "", Paged), (table(0), "", Paged)])   # no such page; one too few
@torch.inference_mode()
def test_errors_are_those_of_the_plain_model(change, error, stage):
    found = []
    for model in PLAIN, FAST, TORCH:
        request, = prepare(Request([1, 2, 3], 4), model.config)
        request.kv = [0, 1] if stage is Paged else None
        batch = stage([(request, 3)], *([KV(6), generate_paged.Pages(3, 2)] * (stage is Paged)))
        change(batch)
        try:
            logits = model(batch.tokens, batch.positions, batch.attend, batch.rows)
            found.append(str(logits.argmax().item()))
        except Exception as told:
            found.append(type(told).__name__)
    assert found == [found[0]] * 3 and found[0].endswith(error)


@torch.inference_mode()
def test_a_cache_of_another_model_is_not_taken_for_ones_own():
    """Five heads of three features are as many numbers as three of five."""
    request, = prepare(Request([1, 2, 3], 4), FAST.config)
    FAST.pools.take_in(Flat([(request, 1)]))
    request.kv.write(0, 0, *torch.ones(2, 3, 1, 5))
    other, batch = toy(dtype=torch.float32, n_head=5).optimize(), Flat([(request, 1)])
    with pytest.raises(RuntimeError, match="must match the existing size"):   # of the plain model
        other(batch.tokens, batch.positions, batch.attend, batch.rows)


def test_an_observer_does_not_cost_the_compiled_step(monkeypatch):
    """What no kernel replaces may be overridden, and hooks of the whole model run anyway."""
    model, calls, cost = copy.deepcopy(FAST), [], Flat.cost
    model.register_forward_pre_hook(lambda module, args: calls.append(args[0].shape))
    monkeypatch.setattr(generate_ragged, "Flat", type("Watched", (Flat,), {
        "cost": lambda batch: (calls.append("cost"), cost(batch))[1]}))
    trace = generate_ragged.generate(model, mixed())
    assert len(calls) == 2 * len(trace.passes) and model.uses() == YES


@needs_native
def test_the_x_ray_shows_what_really_ran(monkeypatch):
    """On a kernel that is wrong, it must not say that all is right while the tokens are not."""
    model, requests = copy.deepcopy(FAST), [*map(replace, FEW)]
    monkeypatch.setattr(native, "step", lambda *args: torch.zeros(len(args[3]), VOCAB))
    with XRay(model, requests) as xray:
        generate_ragged.generate(model, requests)
    assert xray.faults() == [] and [r.generated for r in requests] == RIGHT
    assert model.uses() == "compiled step: no, Flat.attend is wrapped"


def test_what_it_uses_in_one_line():
    model, own = copy.deepcopy(FAST), type("Own", (GPT,), {})
    assert model.uses() == YES
    if has_native:
        outcome(model, "ragged_varlen")
        compiled = model._parts.passes[1]
        outcome(model, "interleaved")
        total = sum(model._parts.passes.values())
        assert model.uses() == (
            f"compiled step: in {compiled} of {total} passes, 1 thread; "
            "in the others not: it is for the layouts of stages 0, 6 and 7, not Rectangle")
        assert "not torch.bfloat16" in copy.deepcopy(FAST).bfloat16().uses()
        assert "called without it" in copy.deepcopy(TORCH).uses()
    with without():
        assert copy.deepcopy(FAST).uses() == "compiled step: no, there is no g++ here"
    assert own(PLAIN.config).optimize().uses() == "compiled step: no, Own is not GPT"


# --- whatever else the program does ---------------------------------------------------------------

@pytest.fixture
def new_here(monkeypatch):
    """native with nothing loaded or tried yet, until the test ends."""
    for name in "library", "problem":
        monkeypatch.setattr(native, name, cache(getattr(native, name).__wrapped__))
    linear.has_onednn.cache_clear()


@both_kernels
@pytest.mark.parametrize("change, value, back", [
    (torch.set_default_dtype, torch.bfloat16, torch.float32),
    (torch.set_default_dtype, torch.float64, torch.float32),
    (torch.set_default_device, "meta", None), (torch.use_deterministic_algorithms, True, False)])
def test_defaults_make_no_difference(change, value, back, compiled, new_here):
    """A default dtype or device, even while the library is tried out; and no random number."""
    model, stream = toy(dtype=torch.float32), torch.get_rng_state()
    asked = [replace(request, temperature=0.0) for request in FEW]
    greedy = [alone(PLAIN, request)[0] for request in asked]
    try:
        change(value)
        optimize(model, compiled)
        found = [outcome(model, stage, asked) for stage in STREAMS]
    finally:
        change(back)
    assert found == [greedy, greedy] and torch.equal(torch.get_rng_state(), stream)
    assert ("yes" in model.uses()) == compiled


@pytest.mark.parametrize("wrong, message", [
    (torch.zeros(3, 4, dtype=torch.float64), "the x is torch.float64 (3, 4) on cpu, not torch.fl"),
    (torch.zeros(3, 4, device="meta"), "the x is torch.float32 (3, 4) on meta, not"),
    (torch.zeros(4, 3), "the x is torch.float32 (4, 3) on cpu, not torch.float32 (3, 4) on the"),
    (torch.zeros(4, 3).T, "the x is not contiguous, torch.float32 (3, 4)"),
    (torch.zeros(3, 4).to_sparse(), "the x is torch.float32 (3, 4) on cpu"),
    (None, "the x is a NoneType, not a tensor")])
def test_no_other_tensor_comes_through_the_door(wrong, message):
    right = torch.zeros(3, 4)
    assert native.address(right, torch.float32, (3, 4)) == right.data_ptr()
    with pytest.raises(ValueError) as error:
        native.address(wrong, torch.float32, (3, 4), "the x")
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_there_is_one_door():
    """Addresses are asked for there; else only to compare them, and by huge_pages."""
    counts = {path.name: path.read_text().count("data_ptr(") for path in ROOT.glob("kernels/*.py")}
    assert {name: n for name, n in counts.items() if n} == {"native.py": 3, "linear.py": 1}


def test_a_weight_that_is_not_contiguous_goes_through_torch():
    model = copy.deepcopy(FAST)
    model.wpe.weight = torch.nn.Parameter(model.wpe.weight.T.contiguous().T, requires_grad=False)
    assert outcome(model, "ragged_varlen") == RIGHT
    assert not has_native or "wpe.weight is not contiguous" in model.uses()


# --- threads --------------------------------------------------------------------------------------

def in_threads(work, count):
    threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "they wait for each other"


@both_kernels
@pytest.mark.parametrize("stage", STREAMS)
def test_threads_on_one_model(compiled, stage):
    """Each gets what it would have got alone."""
    model, found = copy.deepcopy(FAST if compiled else TORCH), []
    interval, times = sys.getswitchinterval(), examples(50)
    sys.setswitchinterval(1e-6)   # they take turns within every line
    try:
        in_threads(lambda: found.extend(outcome(model, stage) for _ in range(times // 5)), 5)
    finally:
        sys.setswitchinterval(interval)
    assert found == [RIGHT] * (times // 5 * 5)
    assert not any(pool.taken for pool in model.pools.pools)


def new_pools(size):
    return Pools(size, 1, 2, 3, torch.float32, CPU)


def test_threads_that_take_caches_at_once(monkeypatch):
    """Between finding a gap and taking it, the others get their turn."""
    pools, held, real = new_pools(100), [], attention.insort
    monkeypatch.setattr(attention, "insort", lambda *args: (time.sleep(0.001), real(*args)))
    in_threads(lambda: held.extend(pools.kv(3) for _ in range(5)), 4)
    assert sorted(kv.first for kv in held) == list(range(0, 60, 3))


def test_a_cache_that_is_found_dead_in_the_middle(monkeypatch):
    """The garbage collector may run while the pools' lock is taken, and give a cache back."""
    pools, real = new_pools(16), attention.insort
    dead, done = [pools.kv(5)], []
    dead[0].itself = dead[0]   # only the garbage collector finds it

    def insort(*args):
        dead.clear()
        real(*args)
        gc.collect()

    monkeypatch.setattr(attention, "insort", insort)
    in_threads(lambda: done.extend([pools.kv(4), pools.kv(4)]), 1)
    pieces = sorted((kv.first, kv.first + 4) for kv in done)
    pools.kv(1)   # whoever comes next settles
    assert [pool.taken for pool in pools.pools] == [pieces]


# --- the compiler ---------------------------------------------------------------------------------

def said_by_optimize(*models):
    """What it writes to stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as err:
        for model in models or [toy(dtype=torch.float32)]:
            model.optimize()
    return err.getvalue()


def test_without_a_compiler(new_here, monkeypatch, tmp_path):
    """One line, once; and everything runs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    models = [toy(dtype=torch.float32) for _ in "ab"]
    said = said_by_optimize(*models)
    assert said.startswith("optimize(): there is no ") and said.count("\n") == 1
    assert outcome(models[0], "ragged_varlen") == RIGHT
    assert "compiled step: no, there is no " in models[0].uses()


@pytest.mark.skipif(shutil.which(native.COMPILER) is None, reason="it needs a compiler that fails")
def test_a_source_that_does_not_compile_is_compiled_once(new_here, monkeypatch, tmp_path):
    """The next process reads why, in one line, and calls no compiler."""
    monkeypatch.setattr(native, "SOURCE", tmp_path / "native.cpp")
    native.SOURCE.write_text("#error too old\n")
    calls, real = [], subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda args, **rest: (
        calls.extend("c" * ("-c" in args)), real(args, **rest))[1])
    for process in range(3):
        native.library.cache_clear()
        native.problem.cache_clear()
        said = said_by_optimize()
        assert "error too old" in said and said.count("\n") == 1 and len(calls) == 1
        assert ("to try again" in said) == (process > 0)


@pytest.mark.parametrize("how", [torch.float64, torch.bfloat16, "meta", "sharded"])
def test_nothing_is_compiled_for_a_model_that_cannot_use_it(how, new_here, monkeypatch):
    monkeypatch.setattr(native, "build", lambda: 1 / 0)
    model = toy(dtype=torch.float32)
    if how == "sharded":   # a layer with weights that is none of torch's
        model.h[0].attn.c_proj = torch.nn.Sequential(model.h[0].attn.c_proj, torch.nn.PReLU())
    model = (model if how == "sharded" else model.to(how)).optimize()
    if how != "meta":
        outcome(model, "ragged_varlen")
        assert "compiled step: no, " in model.uses()


# --- native.cpp: a whole step in one call ---------------------------------------------------------

@needs_native
@generated(examples=400, m=st.integers(1, 40), k=st.integers(1, 1700), n=st.integers(1, 130),
           gelu=st.booleans(), bias=st.booleans(), seed=st.integers(0, 99))
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


@cache
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
def largest_difference(n_head, n_embd, budget):
    """
    Between the logits of a plain and an optimized model in stages 6 and 7, relative. The steps hold
    decodes and chunks of 1 to 60 tokens, with and without a past.
    """
    plain, fast = plain_and_fast(n_head, n_embd)
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
@pytest.mark.parametrize("n_head, n_embd", [
    (1, 1), (2, 10), (3, 48), (4, 128), (1, 100), pytest.param(12, 768, marks=thorough)])
@pytest.mark.parametrize("budget", [1000, 61, 23])
def test_a_step_of_any_head_size(n_head, n_embd, budget):
    assert largest_difference(n_head, n_embd, budget) <= 2e-5


def rewritten(monkeypatch, folder, right="", wrong=""):
    """native.cpp with a fault put in; what is built of it lies in `folder`."""
    source = native.SOURCE.read_text()
    assert not right or source.count(right) == 1
    monkeypatch.setattr(native, "SOURCE", folder / "native.cpp")
    native.SOURCE.write_text(source.replace(right, wrong) if right else source)
    native.library.cache_clear()
    native.problem.cache_clear()


@needs_native
@thorough
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86-64")
@pytest.mark.parametrize("flags", [
    ["-mno-avx512f"], ["-mno-avx512f", "-mno-avx2", "-D__ARM_NEON"]], ids=["AVX2", "as on ARM"])
def test_the_sizes_for_other_processors(flags, new_here, monkeypatch, tmp_path):
    rewritten(monkeypatch, tmp_path)
    monkeypatch.setattr(native, "FLAGS", [*native.FLAGS, *flags])
    assert native.works() and native.library().panel_width() == 16
    plain_and_fast.cache_clear()   # its weights are packed in another width
    for n_head, n_embd in (3, 48), (2, 10):
        assert largest_difference(n_head, n_embd, 61) <= 2e-5
    plain_and_fast.cache_clear()


SEEN = "softmax(scores + r * all, {}, seen, scale)"


@needs_native
@pytest.mark.parametrize("right, wrong", [
    (SEEN.format("start + i + r + 1"), SEEN.format("std::max<i64>(start + i + r, 1)")),
    *[pytest.param(*fault, marks=thorough) for fault in [
        ("part[j] = gelu(part[j])", "part[j] *= gelu(1)"),
        (SEEN.format("start + i + r + 1"), SEEN.format("min(start + i + r + 2, seen)")),
        ("seen = start + i + rows;", "seen = i + rows, start = 0;"),
        ("keys[p.start + i]", "keys[i]"), ("table[s / page]", "table[0]"),
        ("M.wpe[positions[r] * C", "M.wpe[r % 120 * C"),
        ("pieces[p].first + pieces[p].n - n;", "pieces[p].first;"),
        ("sum = after == ADD ? sum + bias : bias;", "sum = bias;"),
        ("scale = 1 / std::sqrt(float(size));", "scale = 1;")]]])
def test_a_fault_put_into_the_source_is_found(right, wrong, new_here, monkeypatch, tmp_path):
    """By these tests; and by the library's trial, so that this suite fails and nobody uses it."""
    plain_and_fast(3, 48)   # its weights are packed as they are in the faulty library
    rewritten(monkeypatch, tmp_path, right, wrong)
    said = said_by_optimize()
    assert said.startswith("optimize(): native.cpp computes something else than torch; ")
    assert said.count("\n") == 1 and not native.works()
    with without(value=lambda: None):
        try:
            assert not largest_difference(3, 48, 61) <= 1e-3   # or NaN
        except ValueError as error:   # keys that were never written may be anything
            assert "not finite" in str(error)


@needs_native
def test_nan_and_infinity_stay():
    x = torch.tensor([[torch.nan, 1.0], [torch.inf, 0.0], [1e30, 1e30], [1.0, 2.0]])
    weight, model = torch.ones(3, 2), copy.deepcopy(FAST)
    found = native.multiply(x, native.pack(weight), 3, gelu=True)
    torch.testing.assert_close(found, F.gelu(F.linear(x, weight), approximate="tanh"),
                               equal_nan=True)
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
@thorough
@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")
@pytest.mark.parametrize("right, wrong, message", [
    ("int32_t bits", "int32_t bits", "passed"),
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
                               right=right, wrong=wrong, tests=__file__)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                          cwd=ROOT, env={**os.environ, "LD_PRELOAD": ":".join(libraries),
                                         "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0"})
    said = done.stdout + done.stderr
    assert message in said and (done.returncode == 0) == (right == wrong), said[-3000:]


@needs_native
def test_a_step_is_the_same_with_any_number_of_threads():
    logits, before = {1: [], 2: [], 3: []}, torch.get_num_threads()
    for count, found in logits.items():
        torch.set_num_threads(count)
        try:
            STAGES["ragged_varlen"](FAST, mixed(), on_token=lambda *of: found.append(of[2].clone()))
        finally:
            torch.set_num_threads(before)
    assert all(map(torch.equal, logits[1] + logits[1], logits[2] + logits[3]))


@pytest.mark.parametrize("cores, most, seconds, expected", [
    (lambda step: 2, 2, 0.01, {2: range(600)}),                                       # quiet
    (lambda step: 1.2 if step % 10 == 0 else 2, 2, 0.01, {2: range(600)}),            # no evidence
    (lambda step: 1.2 if step in (10, 11) else 2, 2, 0.01, {1: range(12, 22)}),       # a pause
    (lambda step: 1.3, 2, 0.01, {2: [0, 1, 12, 33, 74, 155, 316, 517]}),   # an endless loop
    (lambda step: 1.3 if step < 100 else 2, 2, 0.01, {2: [0, 1, 12, 33, 74, *range(155, 600)]}),
    (lambda step: 1.3, 2, 0.3, {2: [0, 1, 3, 5, 8, 12, *range(19, 600, 8)]}),   # long steps
    (lambda step: 6.5, 8, 0.01, {8: [0, 1, 12, 33, 74, 155, 316, 517], 1: []}),
    (lambda step: 0.5, 1, 0.01, {1: range(600)})])
def test_threads_give_way_while_the_machine_is_busy(cores, most, seconds, expected):
    threads, used, now = Threads(), [], 100.0
    for step in range(600):
        used.append(threads.number(most, now))
        now += seconds
        threads.record(used[-1], most, min(used[-1], cores(step)), now)
    assert {n: [i for i in range(600) if used[i] == n] for n in expected} == {
        n: [*steps] for n, steps in expected.items()}


# --- caches in a pool, and attention in one call --------------------------------------------------

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
    return each_alone(Head())(query, key, value, cu_seq_q, cu_seq_k)


def each_alone(attend):
    """attend(q, k, v) of one sequence (H, T, D), for all sequences of a varlen_attn."""
    def attend_all(query, key, value, cu_seq_q, cu_seq_k, *rest, **more):
        out = torch.empty_like(query)
        for a, b, c, d in zip(cu_seq_q, cu_seq_q[1:], cu_seq_k, cu_seq_k[1:]):
            if b > a:
                parts = (t.transpose(0, 1) for t in (query[a:b], key[c:d], value[c:d]))
                out[a:b] = attend(*parts)[0].transpose(0, 1)
        return out
    return attend_all


@pytest.fixture(params=["one by one", "in one call"])
def way(request, monkeypatch):
    """
    Attention as on a CPU, and as on a GPU with a stand-in for its kernel. Room that was never
    written is NaN, so that reading it shows.
    """
    def init(pool, *args, real=Pool.__init__):
        real(pool, *args)
        pool.all_k.fill_(torch.nan)
        pool.all_v.fill_(torch.nan)

    monkeypatch.setattr(Pool, "__init__", init)
    if request.param == "in one call":
        monkeypatch.setattr(attention, "varlen_attn", varlen_attn)
        monkeypatch.setattr(attention, "has_varlen", lambda q: True)


@pytest.mark.parametrize("stage", STREAMS)
@pytest.mark.parametrize("several_pools", [False, True])
@generated(examples=100, workload=workloads())
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
    STAGES["ragged_varlen"](DOUBLE, mixed(), on_token=lambda *_: most.append(
        len(DOUBLE.pools.pools)))
    assert max(most) > 2   # or the test of the contract has not seen any


@generated(examples=400, sizes=st.lists(st.integers(1, 30), min_size=1, max_size=30),
           drops=st.lists(st.integers(0, 29), max_size=30))
def test_pieces_never_overlap_and_all_come_back(sizes, drops):
    pools, held = new_pools(16), []
    for size, drop in zip(sizes, drops + [99] * 30):
        held.append(pools.kv(size))
        if drop < len(held):
            del held[drop]
        for pool in pools.pools:
            pieces = sorted((kv.first, kv.first + kv.capacity) for kv in held if kv.pool is pool)
            assert pool.taken == pieces and all(0 <= a < b <= pool.size for a, b in pieces)
            assert all(b <= c for (_, b), (c, _) in zip(pieces, pieces[1:]))
    size = sum(pool.size for pool in pools.pools)
    assert size <= 4 * (16 + sum(sizes))
    held.clear()
    held.append(pools.kv(1))
    assert [(pool.size, pool.taken) for pool in pools.pools] == [(size, [(0, 1)])]   # one again


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_cache_that_was_begun_without_optimize_moves_into_the_pool(mode):
    model, fast = toy(), toy().optimize()
    STAGES["ragged_varlen"](fast, mixed()[:1])   # in inference mode: its pool serves every mode
    request, = prepare(mixed()[8:9], model.config)
    for m, n in (model, 5), (fast, len(request.prompt) - 5):
        batch = Flat([(request, n)])
        assert type(request.kv) is KV
        with mode():
            logits = m(batch.tokens, batch.positions, batch.attend, batch.rows)
        request.computed += n
    assert request.kv.pool in fast.pools.pools
    torch.testing.assert_close(logits, alone(model, request)[1][:1], rtol=0, atol=1e-9)


def refuses(*args, **more):
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer")


@pytest.mark.parametrize("function, agrees", [
    (varlen_attn, True),
    (each_alone(lambda *qkv: [F.scaled_dot_product_attention(*qkv, is_causal=True)]), False),
    (lambda q, *rest, **more: torch.zeros_like(q), False),
    (lambda q, *rest, **more: torch.full_like(q, torch.nan), False),   # it reads between the keys
    (refuses, False), (lambda q, k: q, False)],
    ids=["right", "triangle from the top left", "zeros", "NaN", "refuses", "another signature"])
def test_varlen_attn_is_taken_only_where_it_agrees(function, agrees, monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", function)
    assert attention.varlen_agrees.__wrapped__(CPU, torch.bfloat16, 8) == agrees
    x = torch.zeros(1, 1, 8)
    assert not attention.has_varlen(x) and not attention.has_varlen(x.bfloat16())   # on a CPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="varlen_attn needs a CUDA device")
@pytest.mark.parametrize("stage", STREAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_contract_on_a_gpu(dtype, stage):
    model, asked = toy(dtype=dtype, n_head=2, n_embd=64).cuda(), mixed()
    check, fast = Check(model, asked), copy.deepcopy(model).optimize()
    query = torch.zeros(2, 1, 32, dtype=dtype, device="cuda")
    assert dtype == torch.float32 or attention.has_varlen(query)
    STAGES[stage](fast, asked, on_token=check.on_token)
    assert [v.verdict for v in check() if v.verdict not in ("identical", "near-tie")] == []
