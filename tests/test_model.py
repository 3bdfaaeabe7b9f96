"""
The model against a third party's: Hugging Face's GPT2LMHeadModel with the same, loud weights. And
each stage on the "meta" device, where tensors have a shape and no numbers: whatever reads one
(.item(), a mask in an `if`) fails there, as a layout would stall on a GPU.
"""
from dataclasses import replace

import pytest
import torch
from common import STAGES, VOCAB, knobs_of, mixed, toy

from cache import KV
from model import GPT, GPTConfig, sample
from request import Request
from toolbox.trace import observed


@torch.inference_mode()
def test_logits_and_tokens_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=37, n_positions=32, n_embd=20, n_layer=3, n_head=5, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, bos_token_id=None, eos_token_id=None, attn_implementation="eager")
    theirs = transformers.GPT2LMHeadModel(config).eval()
    for name, p in theirs.named_parameters():   # as loud as lab/checks/toy.py
        if name.endswith("bias"):
            p.normal_(std=0.1)
        elif ".h." in name and p.dim() == 2:
            p.mul_(20)
        elif "wpe" in name:
            p.mul_(3)
    theirs.save_pretrained(tmp_path)
    ours, tokens = GPT.from_pretrained(tmp_path), torch.randint(37, (4, 32))
    for dtype, tolerance in (torch.float32, 1e-5), (torch.float64, 1e-10):
        ours.to(dtype), theirs.to(dtype)
        expected = theirs(tokens).logits
        for logits, part in (
                (ours(tokens), expected),
                (ours(tokens, wanted=(slice(None), -1)), expected[:, -1]),
                (ours(tokens[0], positions=torch.arange(32)), expected[0])):   # (N,), not (B, T)
            assert (logits - part).abs().max() <= tolerance * part.abs().max()

    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(37, (n,), generator=generator).tolist() for n in (1, 5, 20, 9)]
    answers = [theirs.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=12, do_sample=False, pad_token_id=0)[0, len(prompt):].tolist()
        for prompt in prompts]
    assert all(len(set(answer)) > 3 for answer in answers)
    for stage in STAGES:
        requests = [Request(prompt, 12) for prompt in prompts]
        STAGES[stage](ours, requests)
        assert [request.generated for request in requests] == answers, stage


@pytest.mark.parametrize("refused, named", [
    (lambda: toy()(torch.zeros(1, 25, dtype=torch.long)), "25 tokens do not fit block_size 24"),
    (lambda: GPTConfig(n_layer=0), "n_layer .* at least 1, not 0"),
    (lambda: GPTConfig(n_head=5, n_embd=12), "n_head 5 .* n_embd 12"),
    (lambda: KV(2).write(0, 1, *torch.zeros(2, 1, 2, 3)), "KV of 2 tokens .* take tokens 1 to 2")])
def test_what_is_refused(refused, named):
    with pytest.raises(ValueError, match=named):
        refused()


# --- a device without numbers ---------------------------------------------------------------------

def tensors(thing):
    if isinstance(thing, (list, tuple)):
        for part in thing:
            yield from tensors(part)
    elif isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, KV):
        yield from (*thing.k.values(), *thing.v.values())


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_stays_on_its_device_and_in_its_dtype(stage, monkeypatch):
    """Without numbers there is nothing to sample: all tokens are 1."""
    batches = []

    def look(model, arguments, logits):
        batch = batches[-1]
        caches = [request.kv for request, _ in batch.plan if request.kv]
        assert [kv.capacity for kv in caches] == [request.kv_capacity for request, _ in batch.plan
                                                  if request.kv]
        laid_out = {name: value for name, value in vars(batch).items()
                    if name not in ("query_start_loc", "seq_lens")}   # read on the host
        for tensor in tensors([*laid_out.values(), *caches, logits]):
            assert tensor.device.type == "meta"
            assert tensor.dtype in (torch.long, torch.bool, torch.float16)
        assert logits.shape == (len(batch.sampled), VOCAB)
        assert all(isinstance(number, int) for number in batch.cost().values())

    model = toy(n_layer=2).to("meta", torch.float16)
    few = [replace(request, max_new_tokens=3) for request in mixed()[2:5]]   # meta is slow
    model.register_forward_hook(look)
    monkeypatch.setattr(sample, "__code__", (lambda logits, requests: [1] * len(requests)).__code__)
    with observed(model, lambda step, batch: batches.append(batch)):
        STAGES[stage](model, few, **knobs_of(stage, max_batch=4, token_budget=5, page_size=4))


@pytest.mark.parametrize("depth", [1, 8])
def test_a_new_model_has_the_weights_that_gpt2_began_with(depth):
    """Two projections a layer go into the residual stream. They are smaller by the root of that."""
    torch.manual_seed(0)
    config = GPTConfig(block_size=64, vocab_size=100, n_layer=depth, n_head=2, n_embd=64)
    model = GPT(config).requires_grad_(False)
    for name, p in model.named_parameters():
        if p.dim() == 2:
            expected = 0.02 / (2 * depth) ** 0.5 if "c_proj" in name else 0.02
            assert float(p.std()) == pytest.approx(expected, rel=0.1), name
            assert abs(float(p.mean())) < expected / 10, name
        else:
            norm = name.endswith("weight")   # of a LayerNorm; the others are biases
            assert torch.equal(p, torch.full_like(p, float(norm))), name
