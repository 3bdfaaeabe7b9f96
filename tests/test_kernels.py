"""optimize(): the same results through other kernels, in every stage; and what it promises."""
import contextlib
import copy
import gc
import pickle
import platform
import runpy
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from unittest.mock import patch

import common
import pytest
import torch
from common import BLOCK_SIZE, ROOT, STAGES, VOCAB, alone, assert_contract, examples, mixed
from hypothesis import given, settings
from hypothesis import strategies as st
from test_bits import EXACT, fresh
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
from model import GPT, MLP, Head, MultiHeadAttention
from request import Request, prepare
from toolbox.check import Check
from toolbox.toy import toy
from toolbox.traps import swapped
from toolbox.xray import XRay

PLAIN = toy(dtype=torch.float32)
FAST = toy(dtype=torch.float32).optimize()
TORCH = optimize(toy(dtype=torch.float32), compiled=False)
DOUBLE, KNOWN = toy().optimize(), {}
TOKENS = torch.tensor([[i % VOCAB for i in range(BLOCK_SIZE)]])
STREAMS = ("ragged_varlen", "paged")   # the stages whose attention optimize() replaces

has_native = native.works()
needs_native = pytest.mark.skipif(not has_native, reason="native.cpp is not in use here")
needs_compiler = pytest.mark.skipif(shutil.which(native.COMPILER.split()[0]) is None,
                                    reason=f"there is no {native.COMPILER} here")
both_kernels = pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_native), False])


def assert_close(found, expected, tolerance=1e-4):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@needs_compiler
def test_native_works_where_there_is_a_compiler():
    """The tests of native.cpp are skipped where it cannot be used. This one says why it cannot."""
    assert native.problem() is None


# --- the same results -----------------------------------------------------------------------------

@pytest.mark.parametrize("stage", STAGES)
@settings(max_examples=examples(100))
@given(workload=common.workloads())
def test_contract_of_the_optimized_model(stage, workload):
    """Against the plain model to 1e-4, and only a near-tie may change a token; or bit for bit."""
    asked = [*map(replace, workload.requests)]
    check = Check(PLAIN, asked, exact=FAST if stage in EXACT else None)
    STAGES[stage](FAST, asked, on_token=check.on_token, **common.knobs_of(stage, **workload.knobs))
    for verdict in check():
        assert verdict.verdict in ("identical", "near-tie"), verdict
        assert verdict.equal or stage not in EXACT or not has_native


@both_kernels
@pytest.mark.parametrize("script", ["generate_ragged", "generate_paged"])
def test_it_serves_a_script_that_is_run(script, compiled):
    """Run as a program, a stage has layout classes of its own: those of __main__."""
    generate = runpy.run_path(str(ROOT / f"{script}.py"), run_name="another")["generate"]
    fast = optimize(toy(dtype=torch.float32), compiled)
    with (patch.object(native, "step", wraps=native.step) as ours,
          patch("kernels.Step", wraps=attention.Step) as torchs):
        trace = assert_contract(fast, generate, mixed(), whole=PLAIN, tolerance=1e-4)
    passes = len(trace.passes)
    assert (ours.call_count, torchs.call_count) == ((passes, 0) if compiled else (0, passes))


@pytest.mark.parametrize("stage, knobs", [
    ("ragged_varlen", {}), ("paged", {"page_size": 2, "pages": 400, "max_batch": 1}),
    ("paged", {"page_size": 2, "pages": 24})], ids=["ragged", "neighbours", "scattered"])
def test_no_step_copies_the_past(stage, knobs):
    """Attention gets views of the pool, and copies of scattered pages only."""
    DOUBLE.pools.size, DOUBLE.pools.pools = 900, []   # room for all of them in one pool
    with patch.object(F, "scaled_dot_product_attention",
                      wraps=F.scaled_dot_product_attention) as attend:
        trace = STAGES[stage](DOUBLE, mixed(), **knobs)
    pool, = DOUBLE.pools.pools
    memory = {t.untyped_storage().data_ptr() for t in (pool.all_k, pool.all_v)}
    copied = sum(t.nbytes for call in attend.call_args_list for t in call.args[1:]
                 if t.untyped_storage().data_ptr() not in memory)
    assert copied == sum(p.copied_bytes for p in trace.passes)
    assert bool(copied) == (knobs.get("pages") == 24)


@torch.no_grad()
@both_kernels
@pytest.mark.parametrize("wanted", [[], [5, -1], [*range(BLOCK_SIZE)][::-1]])
def test_no_multiplication_is_torchs_and_the_last_block_computes_only_what_is_wanted(
        wanted, compiled):
    """None wanted (a step that is all partial prefill), some, and all in another order."""
    model = FAST if compiled else TORCH
    asked = dict(positions=torch.arange(BLOCK_SIZE)[None],
                 rows=(0, torch.tensor(wanted, dtype=torch.long)))
    expected = PLAIN(TOKENS, **asked)
    with (patch.object(F, "linear", wraps=F.linear) as torchs,
          patch.object(linear, "fused_linear", wraps=linear.fused_linear) as ours):
        assert_close(model(TOKENS, **asked), expected)
    tokens = [call.args[1].shape[:-1].numel() for call in ours.call_args_list
              if call.args[0] is model.h[-1].mlp.c_fc]
    assert tokens == [len(wanted)]
    assert not torchs.called or not (compiled or linear.has_onednn())


def test_where_all_kernels_are_missing(monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    monkeypatch.setattr(linear, "has_onednn", linear.has_onednn.__wrapped__)
    model = optimize(toy(dtype=torch.float32), compiled=False)
    assert_contract(model, STAGES["ragged_varlen"], mixed(), whole=PLAIN, tolerance=1e-4)


# --- one model: saved, moved, changed, copied, trained --------------------------------------------

def test_a_model_that_was_moved_gets_other_pools():
    model = toy(dtype=torch.float32).optimize()
    before = model.pools
    assert model.pools is before and copy.deepcopy(model).pools is not before
    assert model.double().pools is not before and model.pools.shape[3] == torch.float64
    model.load_state_dict(toy().state_dict())   # in float64 it runs through torch, to 1e-10
    for stage in STREAMS:
        assert_contract(model, STAGES[stage], mixed(), whole=toy())


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
    for m in again, other:
        m.h[1].mlp.c_fc.weight.data.mul_(2)   # torch does not count this change
    assert again.optimize() is again
    assert_close(again(TOKENS), other(TOKENS))
    assert again is model or torch.equal(model(TOKENS), FAST(TOKENS))


def test_it_can_still_be_trained():
    def logits(model):
        batch = Flat([(request, 1) for request in prepare(mixed(), FAST.config)])
        return model(batch.tokens, batch.positions, batch.attend, batch.wanted)

    grads = []
    for model in copy.deepcopy(PLAIN), copy.deepcopy(FAST):
        model.requires_grad_(True)
        F.cross_entropy(model(TOKENS[:, :-1]).flatten(0, 1), TOKENS[0, 1:]).backward()
        grads.append((model.h[0].mlp.c_fc.weight.grad, model.wte.weight.grad))
    assert_close(*grads)
    for how in {}, {"fused": True}:   # torch does not count what a fused optimizer changes
        torch.optim.SGD(model.parameters(), lr=1.0, **how).step()
        again = copy.deepcopy(PLAIN)
        again.load_state_dict(model.state_dict())
        with torch.inference_mode():
            assert_close(*map(logits, (again, model)))
        assert logits(model).requires_grad   # the next step of the training


def test_autocast_is_honoured():
    dtypes = []
    for stage in "interleaved", "ragged_varlen":
        for model in FAST, TORCH:
            with torch.autocast("cpu", torch.bfloat16):
                STAGES[stage](model, mixed()[:3], on_token=lambda *of: dtypes.append(of[-1].dtype))
    assert set(dtypes) == {torch.bfloat16}


# --- nothing is silently replaced -----------------------------------------------------------------

FEW = [replace(request, max_new_tokens=3) for request in mixed()[2::3]]
RIGHT = [alone(PLAIN, request)[0] for request in FEW]


def test_the_digests_are_those_of_the_functions_as_they_stand():
    now, known = served.new_record(), served.RECORD
    changed = [name for file in now for name in now[file] if known[file][name] != now[file][name]]
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
    requests = [*map(replace, asked)]
    knobs = {"page_size": 2, "pages": 12} if stage == "paged" else {}   # scattered pages
    try:
        STAGES[stage](model, requests, **knobs)
    except Exception as error:
        return repr(error)
    return [request.generated for request in requests]


def outcomes(model):
    """In each stage that the kernels serve, and in one that they serve in part; of a bare call."""
    return [*(outcome(model, stage) for stage in ("unbatched", *STREAMS, "interleaved")),
            model(TOKENS).argmax(-1).tolist()]


@pytest.mark.parametrize("owner, name", [
    *((getattr(import_module(file.removesuffix(".py")), owner), name)
      for file in served.RECORD if "/" not in file
      for owner, _, name in (full.partition(".") for full in served.RECORD[file]) if name),
    (torch.nn.LayerNorm, "forward"), (torch.nn.Linear, "forward")])
def test_a_function_that_was_replaced_is_called_as_often_as_without_kernels(owner, name):
    """Any function that the kernels stand in for; here by one that only calls it."""
    right, counts, real = outcomes(PLAIN), [], getattr(owner, name)
    for model in map(copy.deepcopy, (PLAIN, FAST, TORCH)):
        assert outcomes(model) == right
        with patch.object(owner, name, autospec=True, side_effect=real) as spy:
            assert outcomes(model) == right
        counts.append(spy.call_count)
    assert counts == [counts[0]] * 3 and counts[0] > 0


def put(owner, name, value, said):
    """Another value for a name of a class or a module, as a student assigns it in a notebook."""
    return said, lambda models: patch.object(owner, name, value)


def each(said, change):
    """A change of the model itself."""
    return said, lambda models: contextlib.nullcontext([*map(change, models)])


def own(base, **functions):
    """A class that a user derives."""
    return type("Own", (base,), functions)


def replace_write(layout):
    Flat.find_room(layout)
    layout.write = lambda layer, k, v: Flat.write(layout, layer, v, k)


OTHER = torch.nn.Linear(15, 60).requires_grad_(False)


def half(module, args, out):
    return out * 0.5


def turned(layout, *args):
    super(type(layout), layout).__init__(*args)
    layout.slot_mapping = layout.slot_mapping * 0 + 5


CHANGES = [   # what the model says of it, and what is changed
    ("Flat.attend has been replaced", lambda models: swapped(Flat.attend, [
        ("self.write(layer, k, v)", "self.write(layer, k, -v)")])),
    put(generate_ragged, "Flat", own(Flat, attend=lambda self, layer, q, k, v: q * 0),
        "Own.attend has been replaced"),
    put(generate_ragged, "Flat", own(Flat, find_room=replace_write), "write of this layout has"),
    put(generate_ragged, "KV", own(KV, write=lambda self, layer, start, k, v: KV.write(
        self, layer, start, v, k)), "a cache is not a KV"),
    put(generate_ragged, "head", own(Head, forward=lambda self, q, k, v: (
        Head.forward(self, q, k, v.flip(-1))))(), "Own.forward has been replaced"),
    ("a hook on head", lambda models: generate_ragged.head.register_forward_hook(
        lambda module, args, out: (half(module, args, out[0]), *out[1:]))),
    ("a hook on all modules", lambda models: torch.nn.modules.module.register_module_forward_hook(
        lambda module, *rest: half(module, *rest) if isinstance(module, MLP) else None)),
    each("h.1.mlp has a hook, or a forward of its own", lambda m: setattr(
        m.h[1].mlp, "forward", lambda x: m.h[1].mlp.c_proj(m.h[1].mlp.c_fc(x).relu()))),
    each("h.1.ln_2 is another module", lambda m: setattr(m.h[1], "ln_2", own(
        torch.nn.LayerNorm, forward=lambda self, x: x)(15))),
    each("h.1.ln_2 has another eps", lambda m: setattr(m.h[1].ln_2, "eps", 10.0)),
    *[each("h.1.attn has other heads, or another number", lambda m, name=name, value=value: setattr(
        m.h[1].attn, name, value)) for name, value in (("layer", 0), ("head_size", 3))],
    each("h.1.attn has a hook, or", lambda m: setattr(m.h[1].attn, "split_heads", lambda x: (
        MultiHeadAttention.split_heads(m.h[1].attn, x.flip(-1))))),
    each("wpe has another eps, or a max_norm", lambda m: setattr(m.wpe, "max_norm", 0.1)),
    each("the model's forward has been replaced", lambda m: setattr(
        m, "forward", lambda *args: PLAIN(*args).flip(-1))),
    *[each(f"{name} has a hook", lambda m, name=name: m.get_submodule(name).register_forward_hook(
        half)) for name in ("h.1", "h.0.mlp.c_fc", "wte")],
    each("ln_f has a hook", lambda m: m.ln_f.register_forward_pre_hook(
        lambda module, args: args[0] * torch.arange(15))),
    each("h.1.mlp.c_fc is another module", lambda m: setattr(m.h[1].mlp, "c_fc", OTHER)),
    each("the module that makes logits came after optimize()", lambda m: setattr(
        m, "wte", torch.nn.Embedding(VOCAB, 15, _weight=PLAIN.wte.weight.flip(0)))),
    *[each("compiled step: in 21", lambda m, part=part: setattr(   # two modules share a parameter
        m.h[1].get_submodule(part), name, getattr(m.h[0].get_submodule(part), name)))
      for part, name in (("mlp.c_fc", "weight"), ("attn.value", "bias"), ("ln_1", "bias"))],
    each("compiled step: in 21", lambda m: (   # one block more than config.n_layer
        m.h.append(copy.deepcopy(m.h[1])), setattr(m.h[-1].attn, "layer", len(m.h) - 1))),
    put(generate_paged, "Paged", own(generate_paged.Paged, __init__=turned), "Own.__init__")]


@pytest.mark.parametrize("said, change", CHANGES, ids=[said for said, _ in CHANGES])
def test_what_was_changed_shows_with_the_kernels_as_without(said, change):
    """Changed between two runs: the first one has shown everything as it was."""
    right, models = outcomes(PLAIN), [copy.deepcopy(model) for model in (PLAIN, FAST, TORCH)]
    assert [*map(outcomes, models[1:])] == [right, right] and right[0] == RIGHT
    models[1]._parts.passes.clear()
    with change(models):
        expected, *found = map(outcomes, models)
        told = [models[1].uses(), *map(str, models[1]._parts.passes)]
    assert expected != right, "it breaks nothing"
    assert found == [expected, expected] and any(said in line for line in told)
    assert outcome(FAST, "ragged_varlen") == RIGHT


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
    (lambda b: setattr(b, "positions", b.positions[:, None]), "", Flat),
    (lambda b: vars(b).update(tokens=b.tokens[:1], positions=b.positions[:1],
                              rows=torch.tensor([0])), "", Flat),
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
            logits = model(batch.tokens, batch.positions, batch.attend, batch.wanted)
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
        other(batch.tokens, batch.positions, batch.attend, batch.wanted)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that is told to")
def test_a_large_temporary_is_not_new_memory_each_time():
    import resource  # not on Windows

    def faults():   # pages that the system had to provide
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(2**24)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    toy(dtype=torch.float32).optimize()
    assert min(faults() for _ in range(9)) < 2**24 * 4 / 4096 / 10   # at first, the heap grows


# --- it says what it does -------------------------------------------------------------------------

@needs_native
def test_what_it_uses_in_one_line():
    model = copy.deepcopy(FAST)
    assert model.uses() == "compiled step: yes, 1 thread"
    outcome(model, "ragged_varlen")
    compiled = model._parts.passes[1]
    outcome(model, "interleaved")
    assert model.uses() == (
        f"compiled step: in {compiled} of {model._parts.passes.total()} passes, 1 thread; "
        "in the others not: it is for the layouts of stages 0, 6 and 7, not Rectangle")
    assert "called without it" in copy.deepcopy(TORCH).uses()
    assert own(GPT)(PLAIN.config).optimize().uses() == (
        "compiled step: no, Own is neither GPT nor Llama")


@needs_native
def test_an_observer_does_not_cost_the_compiled_step(monkeypatch):
    """What no kernel replaces may be overridden, and hooks of the whole model run anyway."""
    model, calls = copy.deepcopy(FAST), []
    model.register_forward_pre_hook(lambda module, args: calls.append(args[0].shape))
    monkeypatch.setattr(generate_ragged, "Flat", own(Flat, cost=lambda batch: (
        calls.append("cost"), Flat.cost(batch))[1]))
    trace = generate_ragged.generate(model, mixed())
    assert len(calls) == 2 * len(trace.passes)
    assert model.uses() == "compiled step: yes, 1 thread"


@needs_native
def test_the_x_ray_shows_what_really_ran(monkeypatch):
    """On a kernel that is wrong, it must not say that all is right while the tokens are not."""
    model, requests = copy.deepcopy(FAST), [*map(replace, FEW)]
    monkeypatch.setattr(native, "step", lambda *args: torch.zeros(len(args[3]), VOCAB))
    with XRay(model, requests) as xray:
        generate_ragged.generate(model, requests)
    assert xray.faults() == [] and [r.generated for r in requests] == RIGHT
    assert model.uses() == "compiled step: no, Flat.attend is wrapped"


# --- the program's settings, and the compiler -----------------------------------------------------

@both_kernels
@pytest.mark.parametrize("change, value, back", [
    (torch.set_default_dtype, torch.bfloat16, torch.float32),
    (torch.set_default_dtype, torch.float64, torch.float32),
    (torch.set_default_device, "meta", None), (torch.use_deterministic_algorithms, True, False)])
def test_defaults_make_no_difference(change, value, back, compiled, monkeypatch):
    """A default dtype or device, even while the library is tried out; and no random number."""
    fresh(monkeypatch)
    linear.has_onednn.cache_clear()
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


def test_without_a_compiler(monkeypatch, tmp_path, capsys):
    """One line, once; and everything runs."""
    fresh(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    models = [toy(dtype=torch.float32).optimize() for _ in "ab"]
    said = capsys.readouterr().err
    assert said.startswith("optimize(): there is no ") and said.count("\n") == 1
    assert outcome(models[0], "ragged_varlen") == RIGHT
    assert "compiled step: no, there is no " in models[0].uses()


@needs_compiler
def test_a_source_that_does_not_compile_is_compiled_once(monkeypatch, tmp_path, capsys):
    """The next process reads why, in one line, and calls no compiler."""
    monkeypatch.setattr(native, "SOURCE", tmp_path / "native.cpp")
    native.SOURCE.write_text("#error too old\n")
    with patch.object(subprocess, "run", wraps=subprocess.run) as runs:
        for again in False, True:
            fresh(monkeypatch)
            toy(dtype=torch.float32).optimize()
            said = capsys.readouterr().err
            assert "error too old" in said and said.count("\n") == 1
            assert ("to try again" in said) == again
    assert sum("-c" in call.args[0] for call in runs.call_args_list) == 1


@pytest.mark.parametrize("change", [
    GPT.double, GPT.bfloat16, lambda model: model.to("meta"),
    # as in a shard: a layer with weights that is none of torch's
    lambda model: setattr(model.h[0].mlp, "act", torch.nn.PReLU()) or model],
    ids=["float64", "bfloat16", "meta", "sharded"])
def test_nothing_is_compiled_for_a_model_that_cannot_use_it(change, monkeypatch):
    fresh(monkeypatch)
    with patch.object(native, "build", side_effect=OSError) as build:
        model = change(toy(dtype=torch.float32)).optimize()
        outcome(model, "ragged_varlen")
        assert model.uses().startswith("compiled step: no, ")
    assert not build.called


# --- the one door for addresses -------------------------------------------------------------------

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


def new_pools(size):
    return Pools(size, 1, 2, 3, torch.float32, torch.device("cpu"))


@both_kernels
@pytest.mark.parametrize("stage", STREAMS)
def test_threads_on_one_model(compiled, stage):
    """Each gets what it would have got alone."""
    model, found, times = copy.deepcopy(FAST if compiled else TORCH), [], examples(50) // 5
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)   # they take turns within every line
    try:
        in_threads(lambda: found.extend(outcome(model, stage) for _ in range(times)), 5)
    finally:
        sys.setswitchinterval(interval)
    assert found == [RIGHT] * (times * 5)
    assert not any(pool.taken for pool in model.pools.pools)


def test_threads_that_take_caches_at_once(monkeypatch):
    """Between finding a gap and taking it, the others get their turn."""
    pools, held, real = new_pools(100), [], attention.insort
    monkeypatch.setattr(attention, "insort", lambda *args: (time.sleep(0.001), real(*args)))
    in_threads(lambda: held.extend(pools.kv(3) for _ in range(5)), 4)
    assert sorted(kv.first for kv in held) == [*range(0, 60, 3)]


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


@pytest.mark.parametrize("cores, most, seconds, expected", [
    (lambda step: 1.2 if step % 10 == 0 else 2, 2, 0.01, {2: range(600)}),            # no evidence
    (lambda step: 1.2 if step in (10, 11) else 2, 2, 0.01, {1: range(12, 22)}),       # a pause
    (lambda step: 1.3 if step < 100 else 2, 2, 0.01,      # an endless loop, which ends
     {2: [0, 1, 12, 33, 74, *range(155, 600)]}),
    (lambda step: 1.3, 2, 0.3, {2: [0, 1, 3, 5, 8, 12, *range(19, 600, 8)]}),   # long steps
    (lambda step: 6.5, 8, 0.01, {8: [0, 1, 12, 33, 74, 155, 316, 517], 1: []}),
    (lambda step: 0.5, 1, 0.01, {1: range(600)})])
def test_threads_give_way_while_the_machine_is_busy(cores, most, seconds, expected):
    threads, used, now = Threads(), [], 100.0
    for step in range(600):
        used.append(threads.number(most, now))
        now += seconds
        threads.record(used[-1], most, min(used[-1], cores(step)), now)
    for n, steps in expected.items():
        assert [i for i in range(600) if used[i] == n] == [*steps]


# --- caches in a pool, and attention in one call --------------------------------------------------

def stand_in(attend):
    """
    What torch.nn.attention.varlen.varlen_attn documents, for a machine without its kernel: sequence
    i has the queries cu_seq_q[i] to cu_seq_q[i + 1] of (T_q, H, D) and likewise its keys; a window
    of (-1, 0) is causal, and its triangle ends bottom right. attend(q, k, v) of one, (H, T, D).
    """
    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size):
        assert window_size == (-1, 0) and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        assert cu_seq_q[0] == cu_seq_k[0] == 0 and len(cu_seq_q) == len(cu_seq_k)
        assert cu_seq_q[-1] == len(query) and cu_seq_k[-1] == len(key) == len(value)
        assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1   # its own condition
        assert max_q == cu_seq_q.diff().max() and max_k == cu_seq_k.diff().max()
        assert cu_seq_k.diff().min() >= 0
        out = torch.empty_like(query)
        for a, b, c, d in zip(cu_seq_q, cu_seq_q[1:], cu_seq_k, cu_seq_k[1:]):
            if b > a:
                parts = (t.transpose(0, 1) for t in (query[a:b], key[c:d], value[c:d]))
                out[a:b] = attend(*parts)[0].transpose(0, 1)
        return out
    return varlen_attn


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
        monkeypatch.setattr(attention, "varlen_attn", stand_in(Head()))
        monkeypatch.setattr(attention, "has_varlen", lambda q: True)


@pytest.mark.parametrize("stage", STREAMS)
@pytest.mark.parametrize("several_pools", [False, True])
@settings(max_examples=examples(100))
@given(workload=common.workloads())
def test_contract_of_attention_in_a_pool(way, several_pools, stage, workload):
    """In float64, to 1e-10 and exact tokens; afterwards nothing is taken, and pools are one."""
    pools = DOUBLE.pools
    pools.size, pools.pools = 1 if several_pools else 4 * BLOCK_SIZE, []
    assert_contract(DOUBLE, STAGES[stage], [*map(replace, workload.requests)], workload.cancels,
                    whole=toy(), known=KNOWN, **common.knobs_of(stage, **workload.knobs))
    assert DOUBLE.pools is pools and len(pools.pools) <= 1
    assert not any(pool.taken for pool in pools.pools)


@pytest.mark.parametrize("pages", [None, 24])
def test_preemption_and_shared_pages_in_a_pool(way, pages):
    """Crowded pages are scattered and shared ones overlap, so their keys cannot be one piece."""
    requests = [replace(r, prompt=[1, 2, 3, 4, *r.prompt][:BLOCK_SIZE], arrival=0) for r in mixed()]
    trace = assert_contract(DOUBLE, STAGES["paged"], requests, whole=toy(), page_size=2,
                            pages=pages, token_budget=20)
    assert trace.counts["shared_pages"] > 0
    assert bool(trace.counts["preemptions"]) == (pages == 24)


@settings(max_examples=examples(100))
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=30),
       drops=st.lists(st.integers(0, 29), min_size=30, max_size=30))
def test_pieces_never_overlap_and_all_come_back(sizes, drops):
    pools, held = new_pools(16), []
    for size, drop in zip(sizes, drops):
        held.append(pools.kv(size))
        del held[drop:drop + 1]   # if there are so many
        for pool in pools.pools:
            pieces = sorted((kv.first, kv.first + kv.capacity) for kv in held if kv.pool is pool)
            assert pool.taken == pieces and all(0 <= a < b <= pool.size for a, b in pieces)
            assert all(b <= c for (_, b), (c, _) in pairwise(pieces))
    assert sum(pool.size for pool in pools.pools) <= 4 * (16 + sum(sizes))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_cache_that_was_begun_without_optimize_moves_into_the_pool(mode):
    model, fast = toy(), toy().optimize()
    STAGES["ragged_varlen"](fast, mixed()[:1])   # in inference mode: its pool serves every mode
    request, = prepare(mixed()[8:9], model.config)
    for m, n in (model, 5), (fast, len(request.prompt) - 5):
        batch = Flat([(request, n)])
        assert type(request.kv) is KV
        with mode():
            logits = m(batch.tokens, batch.positions, batch.attend, batch.wanted)
        request.computed += n
    assert request.kv.pool in fast.pools.pools
    torch.testing.assert_close(logits, alone(model, request)[1][:1], rtol=0, atol=1e-9)


def refuses(*args, **more):
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer")


@pytest.mark.parametrize("function, agrees", [
    (stand_in(Head()), True),
    (stand_in(lambda *qkv: [F.scaled_dot_product_attention(*qkv, is_causal=True)]), False),
    (lambda q, *rest, **more: torch.full_like(q, torch.nan), False),   # it reads between the keys
    (refuses, False), (lambda q, k: q, False)],
    ids=["right", "triangle from the top left", "NaN", "refuses", "another signature"])
def test_varlen_attn_is_taken_only_where_it_agrees(function, agrees, monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", function)
    assert attention.varlen_agrees.__wrapped__(torch.device("cpu"), torch.bfloat16, 8) == agrees
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
