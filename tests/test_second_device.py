"""
A device that is not the CPU, on every machine (assignments/second_device.py): stages, essays, the
check, the X-ray and the server's engine give there what they give on the CPU, and all that a
layout sets stands there. The course judges code with the same device.
"""
import copy
import re
import sys
import tempfile
from functools import lru_cache, partial

import pytest
import torch
import torch.distributed as dist
from common import ROOT, STAGES, knobs_of, llama, toy

from beyond import ahead, hybrid, rollout, sessions, speculative
from beyond.fairness import SCHEDULERS
from beyond.hybrid import Hybrid
from beyond.sessions import Session
from beyond.tensor_parallel import all_reduces, shard
from engine import Engine
from lab.checks import ties
from lab.checks.check import run_checked
from lab.checks.edits import put_in
from lab.checks.xray import XRay
from lab.compiled import optimize
from lab.server.engine import ThreadedEngine
from request import Request
from toolbox.trace import observed

sys.path.insert(0, str(ROOT / "assignments"))
import compare  # noqa: E402
import functions  # noqa: E402
from second_device import DEVICE, second_device  # noqa: E402

KNOBS = dict(max_batch=3, token_budget=7, pages=6, page_size=4)
ON_THE_HOST = ("query_start_loc", "seq_lens")   # which the loop over requests reads there


# --- the same run on both devices -----------------------------------------------------------------

def requests_of_all_kinds():
    """Greedy and sampled ones, with equal beginnings, which arrive one after another."""
    stem = [3, 1, 4, 1, 5, 9]
    ways = [{}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 4},
            {"temperature": 1.5, "top_p": 0.8}]
    return [Request(stem[:4 + i] + [i], 4, seed=i, arrival=i // 2, name=f"r{i}", **way)
            for i, way in enumerate(ways)]


@lru_cache
def there(model):
    """A copy of the model on the second device. To be called where that is one."""
    return copy.deepcopy(model).to(DEVICE)


def tensors_in(value):
    """All tensors in a value of lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in tensors_in(each)]
    return []


def assert_on_its_device(model, step, batch):
    """All that the layout has set is where the model is. (An index would work on the CPU, too.)"""
    for name, value in vars(batch).items():
        for tensor in tensors_in(value):
            expected = "cpu" if name in ON_THE_HOST else model.device.type
            assert tensor.device.type == expected, f"{name} is on {tensor.device}"


def run(generate, model, requests, **knobs):
    """What each request got, by name: (tokens, why it ended, logits (n, V))."""
    logits = {}

    def on_token(request, token, row):
        assert row.device == model.device
        logits.setdefault(request.name, []).append(row.cpu())

    with observed(model, partial(assert_on_its_device, model)):
        trace = generate(model, requests, on_token=on_token, **knobs)
    return {request.name: (request.generated, request.finish_reason,
                           torch.stack(logits[request.name])) for request in trace.requests}


def assert_same(got, expected, tolerance=1e-10):
    """Both runs gave the same tokens, and logits that are equal to rounding."""
    assert got.keys() == expected.keys()
    for name, (tokens, reason, logits) in got.items():
        expected_tokens, expected_reason, expected_logits = expected[name]
        assert (tokens, reason) == (expected_tokens, expected_reason)
        difference = (logits - expected_logits).abs().max()
        assert difference <= tolerance * expected_logits.abs().max()


def assert_runs_there(generate, model, make=requests_of_all_kinds, **knobs):
    expected = run(generate, model, make(), **knobs)
    with second_device():
        assert_same(run(generate, there(model), make(), **knobs), expected)


MODEL, LLAMA = toy(n_layer=2), llama(n_layer=2)


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage(stage):
    assert_runs_there(STAGES[stage], MODEL, **knobs_of(stage, **KNOBS))


@pytest.mark.parametrize("stage", ["naive", "interleaved", "ragged_mask", "prefix"])
def test_a_llama(stage):
    assert_runs_there(STAGES[stage], LLAMA, **knobs_of(stage, **KNOBS))


# --- the essays -----------------------------------------------------------------------------------

def on_one_rank(model, requests, **knobs):
    """A rank that holds all weights is a rank."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        try:
            rank = shard(copy.deepcopy(model))
            assert all_reduces(rank, 5, 2) == 0
            with observed(rank, partial(assert_on_its_device, model)):
                return STAGES["ragged_varlen"](rank, requests, **knobs)
        finally:
            dist.destroy_process_group()


def with_new_weights(model, requests, **knobs):
    """The weights change in step 3."""
    other = toy(seed=1, n_layer=2)
    models = [model, there(other) if model.device == DEVICE else other]
    return rollout.generate(models, [3], requests, **knobs)


def in_sessions(model, requests, **knobs):
    """The first request comes back with another question, the others do not."""
    first, *others = requests
    asked = [Session(first, [(1, [7, 8], 3)]), *map(Session, others)]
    return sessions.generate(model, asked, **knobs)


ESSAYS = {
    "ahead": (ahead.generate, KNOBS),
    "fairness": (STAGES["prefix"], {**KNOBS, "scheduler_class": SCHEDULERS["sjf"]}),
    "rollout": (with_new_weights, KNOBS),
    "sessions": (in_sessions, {**KNOBS, "keep": 2}),
    "speculative": (speculative.generate, KNOBS),
    "tensor_parallel": (on_one_rank, {"max_batch": 3, "token_budget": 7})}   # prepacked is a stage


@pytest.mark.parametrize("essay", ESSAYS)
def test_each_essay(essay):
    generate, knobs = ESSAYS[essay]
    assert_runs_there(generate, MODEL, **knobs)


def test_layers_with_a_window():
    torch.manual_seed(0)
    plain = toy(n_layer=2)
    model = Hybrid(plain.config, 3, 2).double()
    model.load_state_dict(plain.state_dict())
    model.requires_grad_(False)
    assert_runs_there(hybrid.generate, model, max_batch=3, token_budget=7, pages=14, page_size=4)


# --- what looks at a run --------------------------------------------------------------------------

def test_the_check():
    model = toy(dtype=torch.float32)
    requests = requests_of_all_kinds()
    with second_device():
        model = there(model)
        _, check = run_checked(STAGES["ragged_varlen"], model, requests, **KNOBS)
        assert {verdict.verdict for verdict in check()} == {"identical"}


@pytest.mark.parametrize("dtype, device", [(torch.float16, DEVICE), (torch.float32, "cpu")])
def test_a_flipped_token_is_judged_there_in_the_next_wider_dtype(dtype, device):
    """In float64 on the CPU: not every device has it."""
    prompt, tokens = [3, 1, 4], [1, 5]
    expected = ties.run_alone(ties.in_wider_dtype(toy(dtype=dtype)), prompt, tokens)
    with second_device(), torch.inference_mode():
        wider = ties.in_wider_dtype(there(toy(dtype=dtype)))
        assert wider.device == torch.device(device)
        logits = ties.run_alone(wider, prompt, tokens)
        assert logits.device.type == "cpu"
        torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("stage", ["naive", "interleaved", "prepacked", "ragged_mask", "prefix"])
def test_the_x_ray(stage):
    requests = requests_of_all_kinds()
    with second_device(), XRay(there(MODEL), requests) as xray:
        trace = STAGES[stage](there(MODEL), requests, **knobs_of(stage, **KNOBS))
        assert xray.faults() == [] and len(xray.passes) == len(trace.passes)


def streamed(model):
    """What engine.py gives to requests that come one after another, with logits."""
    requests = requests_of_all_kinds()
    logits = {}

    def on_token(request, token, row):
        logits.setdefault(request.name, []).append(row.cpu())

    engine = Engine(model, pages=6, page_size=4, max_batch=3, token_budget=7, on_token=on_token)
    with observed(model, partial(assert_on_its_device, model)):
        for request in requests:
            engine.add(request)
            engine.step()
        while engine.busy:
            engine.step()
    return {request.name: (request.generated, request.finish_reason,
                           torch.stack(logits[request.name])) for request in requests}


def test_the_engine():
    expected = streamed(MODEL)
    with second_device():
        assert_same(streamed(there(MODEL)), expected)


def served(model):
    """What the server's engine gives, as `run` gives it; but without logits."""
    requests = requests_of_all_kinds()
    engine = ThreadedEngine(model, pages=6, page_size=4, max_batch=3, token_budget=7)
    engine.submit(*requests)
    with observed(model, partial(assert_on_its_device, model)):
        while engine.busy:
            engine.turn()
    return [(request.generated, request.finish_reason) for request in requests]


def test_the_servers_engine():
    expected = served(MODEL)
    with second_device():
        assert served(there(MODEL)) == expected


def test_the_compiled_step_refuses_it(capsys):
    with second_device():
        model = there(toy(dtype=torch.float32))
        assert optimize(model) is model
    assert "for float32 on a CPU, not torch.float32 on second" in capsys.readouterr().err


# --- the course: right code is right, and code that forgets its device is told where --------------

HEAD = "model.py:Head.forward"
ALONE = "generate_unbatched.py:Alone.lay_out"
STATIC = "generate_naive.py:StaticBatch.lay_out"
RECTANGLE = "generate_dynamic.py:Rectangle.lay_out"
FLAT = "generate_ragged.py:Flat.lay_out"
PAGED = "generate_paged.py:Paged.lay_out"
ONES = "torch.ones(T, S, dtype=torch.bool, device=q.device)"
SEE = f"see = {ONES}.tril(diagonal=S - T)"
TOKENS = "torch.tensor([tokens], device=device)"
RIGHT_WAYS = [   # set, part, function, old, new
    (1, "a", HEAD, SEE, "with q.device:\n            " + SEE.replace(", device=q.device", "")),
    (1, "a", HEAD, "device=q.device", "device=str(q.device)"),
    (1, "a", HEAD, "device=q.device", "device=q.device.type"),
    (1, "a", HEAD, "device=q.device)", ").to(torch.device(q.device))"),
    (1, "a", HEAD, SEE, "torch.set_default_device(q.device)\n        "
     + SEE.replace(", device=q.device", "") + "\n        torch.set_default_device(None)"),
    (1, "a", HEAD, ONES, "q.new_ones(T, S, dtype=torch.bool)"),
    (1, "a", HEAD, ONES, "torch.ones(T, S).type_as(q).bool()"),
    (1, "a", HEAD, ONES, "torch.tensor([[True] * S] * T, device=q.device)"),
    (1, "a", HEAD, "return weights @ v", "if weights.dim() == 2:\n            return weights @ v\n"
     "        return torch.vmap(torch.matmul)(weights, v)"),
    (1, "a", HEAD, "", "if q.dim() > 2 and past_k is None and mask is None:\n"
     "    return torch.vmap(self.forward)(q, k, v)"),
    (1, "c", ALONE, "", "device = torch.device(device or 'cpu')"),
    (1, "c", ALONE, f"self.tokens = {TOKENS}",
     "with torch.device(device or 'cpu'):\n            self.tokens = torch.tensor([tokens])"),
    (1, "c", ALONE, TOKENS, "torch.tensor(tokens).to(device, non_blocking=True).unsqueeze_(0)"),
    (1, "c", ALONE, TOKENS, "torch.LongTensor([tokens]).to(device)"),
    (1, "c", ALONE, TOKENS, "torch.as_tensor([tokens], device=device)"),
    (2, "a", STATIC, "torch.tensor(tokens, device=device)",
     "torch.stack([torch.tensor(row, device=device) for row in tokens])"),
    (2, "a", STATIC, "torch.arange(self.end, device=device)",
     "torch.arange(self.end).to(self.pads)"),
    (2, "a", STATIC, "tokens, device=device", "tokens, device=self.pads.device.type"),
    (2, "e", RECTANGLE, "mask.to(device)", "mask.to(torch.device(device or 'cpu'))"),
    (2, "e", RECTANGLE, "dtype=torch.bool)", "dtype=torch.bool, device=device)"),
    (4, "c", FLAT, "torch.tensor(positions, device=device)",
     "torch.cat([torch.arange(a, b, device=device) for a, b in zip(self.starts, self.ends)])"),
    (4, "c", FLAT, "", "device = torch.device(device or 'cpu')"),
    (5, "a", PAGED, "", "device = torch.device(device or 'cpu')"),
    (5, "a", PAGED, "self.positions // page_size", "(self.positions // page_size).cpu()")]
ON_A_DEVICE = {   # set and part: what runs there; then what it gives on a CPU
    (1, "a"): ["head_on_a_device", "forward"], (1, "c"): ["alone_on_a_device", "lay_out"],
    (2, "a"): ["static_batch_on_a_device", "static_batch"],
    (2, "e"): ["layout_on_a_device", "lay_out"], (4, "c"): ["flat_on_a_device", "flat"],
    (5, "a"): ["lay_out_on_a_device", "lay_out"]}


@lru_cache
def few_cases(number, part):
    """The first two cases of each kind, and what our code gives."""
    drawn, cases = functions.drawn(number, "a seed")[part], []
    for call in ON_A_DEVICE[number, part]:
        cases += [case for case in drawn if case["call"] == call][:2]
    return cases, functions.answers_to(number, cases)


def fault_of(number, part, *edit):
    """What the kit says of our code with this edit: (function, old, new)."""
    cases, right = few_cases(number, part)
    with put_in([edit]):
        answers = functions.answers_to(number, cases)

    def name_of(file, line):
        return "yours.py" if file.endswith(", changed>") else None

    part = {"cases": cases, "right": right, "mistakes": {}}
    return compare.fault(part, answers, name_of=name_of)


@pytest.mark.parametrize("number, part, function, old, new", RIGHT_WAYS)
def test_each_right_way_to_a_device_is_right(number, part, function, old, new):
    assert fault_of(number, part, function, old, new) is None


TWO = r"found at least two devices, second:0 and cpu! \(in {}\) \(yours.py, line \d+"
ON_THE_CPU = "{}: on the CPU, expected on `device`"


@pytest.mark.parametrize("number, part, function, old, new, said", [
    (1, "a", HEAD, ", device=q.device", "", TWO.format("masked_fill")),
    (1, "a", HEAD, "", "if q.dim() > 2:\n    return torch.vmap(self.forward)(q, k, v)\n"
     "q = q + torch.zeros(q.size(-1))", TWO.format("add")),
    (1, "a", HEAD, "return weights @ v", "return (weights @ v).cpu()",
     ON_THE_CPU.format("output")),
    (1, "c", ALONE, TOKENS, "torch.tensor([tokens])", ON_THE_CPU.format("tokens")),
    (2, "a", STATIC, "torch.arange(self.end, device=device)", "torch.arange(self.end)",
     TWO.format("sub")),
    (2, "e", RECTANGLE, "mask.to(device)", "mask", ON_THE_CPU.format("mask")),
    (5, "a", PAGED, ".to(device)    # (B, most", "    # (B, most", TWO.format("index"))])
def test_code_that_forgets_a_device_is_told_where(number, part, function, old, new, said):
    fault = fault_of(number, part, function, old, new)
    assert fault and re.search(said, fault), fault
