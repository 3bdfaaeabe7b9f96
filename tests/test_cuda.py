"""
A rehearsal of the CUDA path on a machine without a GPU.

Fake tensors have a shape, a dtype and a device, but no numbers. Here the repository's own code runs
a model of fake tensors on "cuda:0", and `Watch` checks every operation.
"""
import ctypes
import inspect
import os
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import toolbox.trace
from beyond.tensor_parallel import shard
from cache import KV
from generate_dynamic import Rectangle
from generate_naive import StaticBatch
from generate_paged import Paged
from generate_prepacked import Packed
from generate_ragged import Flat
from generate_unbatched import Alone
from kernels import attention
from model import GPT, Head
from request import Request
from tests.common import STAGES, VOCAB, toy

CUDA, HALF = "cuda:0", (torch.float16, torch.bfloat16)
RUNS = {**{name: (name, {}) for name in STAGES},
        "few pages": ("paged", dict(pages=10, page_size=4, token_budget=16))}
CASES = [*product(RUNS, HALF), *product(["naive", "interleaved", "few pages"], [torch.float32])]
READ = {getattr(torch.ops.aten, name).default
        for name in ("item", "is_nonzero", "_local_scalar_dense")}
pytestmark = pytest.mark.skipif(os.name == "nt", reason="C++ symbols have other names on Windows")


def tensors(nested):
    return [x for x in tree_leaves(nested) if isinstance(x, torch.Tensor)]


class Watch(TorchDispatchMode):
    """
    Sees every operation, and holds it to rules that are stricter than PyTorch's own:

    - while the model runs, no operation takes or makes a tensor on the CPU;
    - no operation takes tensors of two devices;
    - floating-point numbers on the GPU are in the model's dtype;
    - only `sample` reads from the GPU. What it reads arrives as real, random numbers.

    uploads_in_model: allows the model to make indices on the CPU and to upload them
    """

    def __init__(self, dtype, uploads_in_model):
        super().__init__()
        self.dtype, self.uploads_in_model = dtype, uploads_in_model
        self.in_model = self.in_sample = False
        self.uploads, self.reads, self.waits, self.functions = 0, 0, [], set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = tensors((args, kwargs))
        if inputs and not any(isinstance(x, FakeTensor) for x in inputs):
            if function is torch.ops.aten.lift_fresh.default:    # torch.tensor([...])
                return torch.empty(inputs[0].shape, dtype=inputs[0].dtype)
            with unset_fake_temporarily():                       # what `sample` has read
                return function(*args, **kwargs)
        self.functions.add(str(function))
        before = {x.device.type for x in inputs}
        assert len(before) < 2, f"{function}: tensors of two devices"
        assert not (self.in_model and "cpu" in before), f"{function}: a CPU tensor in the model"
        if function in READ:
            return self.read(function, inputs[0], "item")
        output = function(*args, **kwargs)
        after = {x.device.type for x in tensors(output)}
        assert not (self.in_model and "cpu" in after), f"{function}: a CPU tensor in the model"
        for x in tensors(output)[:1]:   # the others are statistics, such as a logsumexp
            if x.is_cuda and x.is_floating_point():
                assert x.dtype == self.dtype, f"{function}: {x.dtype} on the GPU"
        self.uploads += before == {"cpu"} and after == {"cuda"}
        read = (before, after) == ({"cuda"}, {"cpu"})
        return self.read(function, output, "clone") if read else output

    def read(self, function, x, method):
        assert self.in_sample, f"{function}: the CPU reads from the GPU"
        self.reads += 1
        with unset_fake_temporarily():
            x = (torch.randn(x.shape).to(x.dtype) if x.is_floating_point()
                 else torch.randint(VOCAB, x.shape, dtype=x.dtype))
            return getattr(x, method)()

    def sample(self, sample, logits, requests):
        self.in_sample = True
        tokens = sample(logits, requests)
        self.in_sample = False
        return tokens

    def enter(self, model, args):
        tokens, positions, _, rows = args
        for x in tokens, positions, *tensors(rows):
            assert x.is_cuda and x.dtype == torch.long, "the model was given a CPU tensor"
        self.in_model = not self.uploads_in_model

    def leave(self, model, args, logits):
        self.in_model = False
        assert logits.is_cuda and logits.dtype == self.dtype
        assert logits.shape == (len(args[2].__self__.sampled), VOCAB)


@pytest.fixture(autouse=True)
def fake_gpu(monkeypatch):
    """
    Indexing asks for a device guard, which a torch built without CUDA lacks: lend it that of
    "meta". And a GPU's tensor is read once by tolist(), not number by number as a fake one is.
    """
    library = next(Path(torch.__file__).parent.glob("lib/libc10.*"))
    guards = (ctypes.c_void_p * 15).in_dll(
        ctypes.CDLL(str(library)), "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta, own = 1, 14, guards[1]   # c10::DeviceType
    guards[cuda] = own or guards[meta]
    monkeypatch.setattr(FakeTensor, "tolist", lambda x: x.to("cpu").tolist())
    yield
    guards[cuda] = own


def workload():
    """Greedy and sampled; late arrivals, equal beginnings, and a full context."""
    stem = [7, 7, 8, 8, 9, 9, 10, 10, 11]
    return [Request(stem, 5), Request([*range(13)] + stem, 9, temperature=1.0, arrival=1),
            Request(stem + [2, 3], 3, temperature=0.8, top_k=3, seed=1, arrival=2)]


def rehearse(run, dtype, monkeypatch, change=lambda model: model):
    """Runs a stage under a Watch, on a fake copy of `change(model)`. Returns trace and Watch."""
    (stage, knobs), optimized = RUNS[run], change is GPT.optimize
    model, requests = change(toy(n_layer=1 + optimized)), workload()
    shapes = {name: p.shape for name, p in model.state_dict().items()}
    watch, generate = Watch(dtype, uploads_in_model=optimized), STAGES[stage]
    names = inspect.unwrap(getattr(generate, "func", generate)).__globals__
    monkeypatch.setitem(names, "sample", partial(watch.sample, names["sample"]))
    monkeypatch.setattr(torch.cuda, "synchronize", watch.waits.append)
    with FakeTensorMode(), watch:
        model.load_state_dict({name: torch.empty(shape, dtype=dtype, device=CUDA)
                               for name, shape in shapes.items()}, assign=True)
        model.register_forward_pre_hook(watch.enter)
        model.register_forward_hook(watch.leave)
        trace = generate(model, requests, **knobs)
    assert {request.finish_reason for request in requests} == {"length"}
    passes, sampled = len(trace.passes), sum(len(r.generated) for r in requests if r.temperature)
    assert watch.waits == [torch.device(CUDA)] * passes, "a pass was not waited for"
    assert passes <= watch.reads <= 2 * passes + sampled, "too many reads"
    # Tokens, positions, mask or slots, one or two for the rows; in stage 7 an index for each
    # scattered cache. The kernels add four, whatever the number of layers.
    most = 5 + (stage == "paged") * len(requests) + 4 * optimized
    assert 2 * passes <= watch.uploads <= most * passes, "too many uploads"
    return trace, watch


@pytest.mark.parametrize("run, dtype", CASES, ids=str)
def test_a_stage_stays_on_the_gpu(run, dtype, monkeypatch):
    trace, _ = rehearse(run, dtype, monkeypatch)
    if run == "few pages":
        assert trace.counts["preemptions"] and trace.counts["shared_pages"]
        assert any(p.copied_bytes for p in trace.passes), "no request has scattered pages"


@pytest.mark.parametrize("run, dtype, kernel", [
    *product(["ragged_varlen", "few pages"], HALF, ["_varlen_attn"]),
    ("ragged_varlen", torch.float32, "scaled_dot_product_attention"),
    ("dynamic", HALF[0], "softmax")], ids=str)
def test_an_optimized_model_stays_on_the_gpu(run, dtype, kernel, monkeypatch):
    monkeypatch.setattr(attention, "varlen_agrees", lambda *_: True)        # compares numbers
    monkeypatch.setattr(attention.native, "huge_pages", lambda x: x)        # wants addresses
    _, watch = rehearse(run, dtype, monkeypatch, GPT.optimize)
    assert kernel in str(watch.functions)


def test_a_tensor_parallel_rank_stays_on_the_gpu(monkeypatch):
    dist.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
    try:
        _, watch = rehearse("ragged_varlen", HALF[0], monkeypatch, shard)
    finally:
        dist.destroy_process_group()
    assert "allreduce" in str(watch.functions)


# --- mistakes that are easily made on a GPU, and that a CPU never shows ---------------------------

def left_behind(layout, name):
    return after(layout, "lay_out", lambda batch: setattr(batch, name, tree_map_only(
        torch.Tensor, lambda x: torch.empty(x.shape, dtype=x.dtype), vars(batch)[name])))


def after(layout, method, mistake):
    """What to replace so that `mistake(batch)` is made after one of a layout's methods."""
    def both(self, *args, **keywords):
        result = original(self, *args, **keywords)
        mistake(self)
        return result
    original = getattr(layout, method)
    return layout, method, both


LEFT_BEHIND = {("unbatched", Alone): "tokens positions",
               ("naive", StaticBatch): "tokens positions mask rows",
               ("interleaved", Rectangle): "tokens positions mask rows",
               ("prepacked", Packed): "tokens positions mask rows",
               ("ragged_mask", Flat): "tokens positions mask rows",
               ("few pages", Paged): "tokens positions rows slot_mapping spans"}
MIXED, READS = "tensors of two devices|a CPU tensor", "the CPU reads from the GPU"
MISTAKES = {   # name: (run, what is replaced: (owner, name, by what), message)
    # PyTorch refuses these itself, except for an index (rows, slot_mapping, spans, a list), which
    # it copies to the GPU at each use.
    **{f"{layout.__name__}.{name} on the CPU": (run, left_behind(layout, name), MIXED)
       for (run, layout), names in LEFT_BEHIND.items() for name in names.split()},
    "a list as index": ("ragged_varlen", after(
        Flat, "lay_out", lambda batch: setattr(batch, "rows", [0] * len(batch.sampled))), MIXED),
    "a cache in float32": ("paged", after(
        KV, "buffers", lambda kv: [k.float() for k in kv.k.values()]), "float32 on the GPU"),
    "a float64 constant": ("dynamic", after(Head, "forward", lambda head: torch.ones(
        1, dtype=torch.float64, device=CUDA)), "float64 on the GPU"),
    # PyTorch accepts these: they only cost time, or make the measured time meaningless.
    ".item()": ("dynamic", after(Rectangle, "lay_out", lambda batch: batch.tokens.max().item()),
                READS),
    "if mask.any()": ("dynamic", after(Rectangle, "lay_out", lambda batch: bool(batch.mask.any())),
                      READS),
    ".tolist()": ("naive", after(StaticBatch, "cost", lambda batch: batch.pads.tolist()), READS),
    "logits read one by one": ("naive", (FakeTensor, "tolist", lambda x: [y.item() for y in x]),
                               "many reads"),
    "a CDF on the GPU": ("chunked", (torch.Tensor, "cpu", lambda x: x), "float64 on the GPU"),
    "an upload for each request": ("ragged_mask", after(Flat, "lay_out", lambda batch: [
        torch.tensor(request.prompt, device=CUDA) for request, _ in batch.plan]), "many uploads"),
    "no wait for the clock": ("chunked", (toolbox.trace, "synchronize", id), "not waited for")}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_caught(name, monkeypatch):
    run, replacement, message = MISTAKES[name]
    monkeypatch.setattr(*replacement)
    with pytest.raises(Exception, match=message):
        rehearse(run, HALF[0], monkeypatch)


def test_uploads_in_each_layer_of_an_optimized_model_are_caught(monkeypatch):
    monkeypatch.setattr(attention.Share, "sequences", property(attention.Share.sequences.func))
    with pytest.raises(AssertionError, match="many uploads"):
        test_an_optimized_model_stays_on_the_gpu("ragged_varlen", HALF[0], "", monkeypatch)
