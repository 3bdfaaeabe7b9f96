"""The model against a third party's: Hugging Face's GPT2LMHeadModel with the same, loud weights."""
import ast
import re
from pathlib import Path

import pytest
import torch
from common import STAGES

from model import GPT, Head
from request import Request

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).parent.parent
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=37, n_positions=32, n_embd=20, n_layer=3, n_head=5, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, bos_token_id=None, eos_token_id=None, attn_implementation="eager")
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_(std=0.1)
            elif ".h." in name and p.dim() == 2:
                p.mul_(20)
            elif "wpe" in name:
                p.mul_(3)
    return model


@pytest.fixture(scope="module", params=["safetensors", "bin"])
def ours(theirs, request, tmp_path_factory):
    """Read from a folder that Hugging Face's save_pretrained wrote, or from an old .bin."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    if request.param == "bin":
        (folder / "model.safetensors").unlink()
        torch.save(theirs.state_dict(), folder / "pytorch_model.bin")
    return GPT.from_pretrained(folder)


def close(a, b, dtype):
    difference = (a - b).abs().max() / b.abs().max()
    assert difference <= TOLERANCE[dtype], f"{difference:.1e}"


@pytest.fixture(params=TOLERANCE, ids=str)
def both(ours, theirs, request):
    yield ours.to(request.param), theirs.to(request.param), request.param
    ours.float(), theirs.float()


@torch.inference_mode()
def test_full_prompts(both):
    ours, theirs, dtype = both
    tokens = torch.randint(37, (4, 32))
    expected = theirs(tokens).logits
    close(ours(tokens), expected, dtype)
    close(ours(tokens, rows=(slice(None), -1)), expected[:, -1], dtype)
    # (N,) as well as (B, T)
    close(ours(tokens[0], positions=torch.arange(32)), theirs(tokens[:1]).logits[0], dtype)


@torch.inference_mode()
def test_left_padded_batch_with_a_cache(both):
    """
    A padded prefill and three decode steps, through our Head with past_k, past_v and a padding
    mask, and through their cache.
    """
    ours, theirs, dtype = both
    lengths, T = [3, 11, 7, 1], 11
    tokens = torch.randint(37, (4, T + 3), generator=torch.Generator().manual_seed(0))
    pads = torch.tensor([T - n for n in lengths])
    valid = torch.arange(T + 3) >= pads[:, None]                       # (B, T + 3)
    positions = (valid.cumsum(dim=1) - 1).clamp(min=0)
    head, past, cache = Head(), {}, None
    for start, end in (0, T), (T, T + 1), (T + 1, T + 3):

        def attend(layer, q, k, v):
            mask = valid[:, None, None, :end]
            out, *past[layer] = head(q, k, v, *past.get(layer, (None, None)), mask=mask)
            return out

        new = slice(start, end)
        mine = ours(tokens[:, new], positions[:, new], attend)
        output = theirs(tokens[:, new], attention_mask=valid[:, :end].long(),
                        position_ids=positions[:, new], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        for b in range(4):   # what pads compute does not matter
            row = valid[b, new]
            close(mine[b][row], output.logits[b][row], dtype)


@pytest.mark.parametrize("stage", STAGES)
def test_greedy_tokens_equal_their_generate_one_prompt_at_a_time(ours, theirs, stage):
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(37, (n,), generator=generator).tolist() for n in (1, 5, 20, 9)]
    ours.double(), theirs.double()
    requests = [Request(prompt, 12) for prompt in prompts]
    STAGES[stage](ours, requests)
    for prompt, request in zip(prompts, requests):
        expected = theirs.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert request.generated == expected[0, len(prompt):].tolist()
        assert len(set(request.generated)) > 3
    ours.float(), theirs.float()


# --- Head by itself -------------------------------------------------------------------------------

def textbook(q, k, v, past_k, past_v, mask):
    """Attention for one head, one query at a time, in plain loops."""
    k, v = torch.cat([past_k, k]), torch.cat([past_v, v])
    out = torch.zeros_like(q)
    for i in range(len(q)):
        seen = [j for j in range(len(k)) if j <= len(past_k) + i and mask[i, j]]
        if seen:
            scores = [float(q[i] @ k[j]) / q.size(1) ** 0.5 for j in seen]
            w = torch.tensor(scores, dtype=q.dtype).softmax(0)
            out[i] = sum(w[n] * v[j] for n, j in enumerate(seen))
    return out


@pytest.mark.parametrize("T, P", [(1, 0), (1, 7), (5, 0), (5, 7), (3, 1)])
def test_head_is_textbook_attention(T, P):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, T, 6, dtype=torch.float64)          # (B, nh, T, hs)
    past_k, past_v = torch.randn(2, 2, 4, P, 6, dtype=torch.float64)
    mask = torch.rand(2, 1, T, P + T) < 0.7
    mask[0, 0, 0] = False                                              # a query without any key
    out, all_k, all_v = Head()(q, k, v, past_k, past_v, mask)
    for b in range(2):
        for h in range(4):
            expected = textbook(q[b, h], k[b, h], v[b, h], past_k[b, h], past_v[b, h], mask[b, 0])
            torch.testing.assert_close(out[b, h], expected, rtol=1e-12, atol=1e-12)
    assert (out[0, :, 0] == 0).all()
    assert all_k.shape == all_v.shape == (2, 4, P + T, 6)
    in_place, _, _ = Head()(q, all_k, all_v, mask=mask)                # the past already in k and v
    assert torch.equal(in_place, out)


def test_head_is_stateless():
    head = Head()
    assert not list(head.parameters()) and not list(head.buffers())
    before = dict(vars(head))
    q, k, v = torch.randn(3, 2, 5, 4)
    first = head.train()(q, k, v)
    second = head.eval()(q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert vars(head).keys() == before.keys()


def test_too_long_a_row_is_refused():
    model = GPT.from_pretrained("builtin")
    with pytest.raises(ValueError, match="257 tokens do not fit block_size 256"):
        model(torch.zeros(1, 257, dtype=torch.long))


# --- the rooms of the house -----------------------------------------------------------------------

def imported(path):
    """First words of what a file imports at module level."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)


@pytest.mark.parametrize("name", ["model", "request", "cache", "scheduler", "paging"])
def test_the_core_imports_no_helper_but_the_refusals_of_bad_values(name):
    text = (ROOT / f"{name}.py").read_text().replace("from toolbox.validate import", "")
    assert not re.search(r"^(from|import) (toolbox|experiments|kernels|beyond)", text, re.M)


def test_no_room_imports_a_higher_one():
    stages = sorted(ROOT.glob("generate_*.py"))
    assert len(stages) == 8
    for path in [*stages, *(ROOT / "toolbox").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        assert "experiments" not in imported(path), path
