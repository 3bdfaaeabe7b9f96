"""The model against a third party's: Hugging Face's GPT2LMHeadModel with the same, loud weights."""
import ast

import pytest
import torch
from common import ROOT, STAGES, toy

from model import GPT, Head
from request import Request

transformers = pytest.importorskip("transformers")

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


@pytest.fixture(scope="module")
def ours(theirs, tmp_path_factory):
    """Read from a folder that Hugging Face's save_pretrained wrote."""
    folder = tmp_path_factory.mktemp("gpt2")
    theirs.save_pretrained(folder)
    return GPT.from_pretrained(folder)


@torch.inference_mode()
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_full_prompts(ours, theirs, dtype, tolerance):
    def close(a, b):
        return (a - b).abs().max() <= tolerance * b.abs().max()

    ours.to(dtype), theirs.to(dtype)
    tokens = torch.randint(37, (4, 32))
    expected = theirs(tokens).logits
    assert close(ours(tokens), expected)
    assert close(ours(tokens, wanted=(slice(None), -1)), expected[:, -1])
    # (N,) as well as (B, T)
    assert close(ours(tokens[0], positions=torch.arange(32)), expected[0])


def test_greedy_tokens_equal_their_generate_one_prompt_at_a_time(ours, theirs):
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(37, (n,), generator=generator).tolist() for n in (1, 5, 20, 9)]
    ours.double(), theirs.double()
    expected = [theirs.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=12, do_sample=False, pad_token_id=0)[0, len(prompt):].tolist()
        for prompt in prompts]
    assert all(len(set(tokens)) > 3 for tokens in expected)
    for stage, generate in STAGES.items():
        requests = [Request(prompt, 12) for prompt in prompts]
        generate(ours, requests)
        assert [request.generated for request in requests] == expected, stage


# --- Head by itself -------------------------------------------------------------------------------

def test_head_is_stateless():
    head, (q, k, v) = Head(), torch.randn(3, 2, 5, 4)
    first = head.train()(q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(first, head.eval()(q, k, v)))
    assert not [*head.parameters(), *head.buffers()] and vars(head).keys() == vars(Head()).keys()


def test_too_long_a_row_is_refused():
    with pytest.raises(ValueError, match="25 tokens do not fit block_size 24"):
        toy()(torch.zeros(1, 25, dtype=torch.long))


# --- the rooms of the house -----------------------------------------------------------------------

def imported(path):
    """The modules that a file imports when it is imported itself."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("files, higher", [
    ("model.py request.py cache.py scheduler.py paging.py", "toolbox beyond kernels experiments"),
    ("generate_*.py toolbox/**/*.py kernels/**/*.py", "experiments"),
    # the scheduler knows no tensors and no clock
    ("request.py scheduler.py paging.py toolbox/validate.py", "torch numpy time"),
])
def test_no_room_imports_a_higher_one(files, higher):
    for pattern in files.split():
        assert (paths := [*ROOT.glob(pattern)]), pattern
        for path in paths:
            names = {*imported(path)} - {"toolbox.validate"}   # it refuses bad values
            assert not {name.split(".")[0] for name in names} & {*higher.split()}, path
