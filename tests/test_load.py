"""Tokenizer and weights: round trips, and one clear line for every way that a file can be wrong."""
import json
import shutil
import sys

import huggingface_hub
import pytest
import requests
import safetensors.torch as safetensors
import tiktoken
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import toolbox.tokenizer
from loading.load import decode, load
from model import GPT, GPTConfig
from toolbox.tokenizer import BUILTIN, END_OF_TEXT, byte_of

MODEL, TOKENIZER = load()


def test_the_built_in_model_is_small_and_its_own():
    assert (BUILTIN / "model.safetensors").stat().st_size <= 4e6
    config = GPTConfig(block_size=256, vocab_size=1024, n_layer=4, n_head=4, n_embd=128)
    assert MODEL.config == config
    assert TOKENIZER.n_vocab == 1024 and TOKENIZER.eot_token == 1023
    assert next(MODEL.parameters()).dtype == torch.float32


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text())
def test_every_string_round_trips(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text, disallowed_special=())) == text


@pytest.fixture
def folder(tmp_path):
    for file in "config.json", "model.safetensors", "ranks.tiktoken":
        shutil.copy(BUILTIN / file, tmp_path / file)
    return tmp_path


def test_a_local_folder_and_a_file_in_it(folder):
    for name in folder, folder / "model.safetensors", str(folder):
        model, tokenizer = load(name)
        assert torch.equal(model.wte.weight, MODEL.wte.weight) and tokenizer.n_vocab == 1024
        add_weight("lm_head.weight", MODEL.wte.weight.half())(folder)   # once more, as some have it


def edit(file, change):
    """change: its bytes -> new bytes"""
    def do(folder):
        (folder / file).write_bytes(change((folder / file).read_bytes()))
    return do


def write(file, content):
    return edit(file, lambda old: content.encode())


def edit_config(**change):
    return edit("config.json", lambda old: json.dumps({**json.loads(old), **change}).encode())


def add_weight(name, tensor):
    return edit("model.safetensors",
                lambda old: safetensors.save({**safetensors.load(old), name: tensor}))


NOT_GPT2, NOT_JSON = "config.json is not that of a GPT-2", "/config.json is not a JSON object"
BROKEN = {   # what is done to a folder, and what is said about it
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(),
                   "does not hold model.safetensors"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "there is no config.json"),
    "config is cut short": (write("config.json", "{"), NOT_JSON),
    "config is a list": (write("config.json", "[1]"), NOT_JSON),
    "config begins with a BOM": (edit("config.json", lambda old: b"\xef\xbb\xbf" + old), NOT_JSON),
    "config is of no kind": (edit_config(model_type=["llama"]), "architecture is ['llama']"),
    "config of another model": (write("config.json", '{"hidden_size": 8}'), NOT_GPT2),
    "nested too deeply": (write("config.json", "[" * 100_000), NOT_JSON),
    "layers missing": (edit_config(n_layer=5), "not a GPT-2 of 5 layers"),
    "another width": (edit_config(n_embd=64), "has shape"),
    "heads do not divide": (edit_config(n_head=3), "n_head 3"),
    "a truth for a number": (edit_config(n_head=True), "n_head must be"),
    "absurdly large": (edit_config(vocab_size=10**18), "its config.json: "),
    "another epsilon": (edit_config(layer_norm_epsilon=1e-2),
                        "layer_norm_epsilon 0.01 is not GPT-2's"),
    "c_attn of three axes": (
        add_weight("transformer.h.0.attn.c_attn.weight", torch.zeros(2, 3, 3)),
        "missing or unknown"),
    "an output of its own": (add_weight("lm_head.weight", torch.zeros(1024, 128)),
                             "lm_head.weight is not the embedding"),
    "a weight too many": (add_weight("odd", torch.zeros(1)), "'odd'"),
    "truncated": (edit("model.safetensors", lambda old: old[:1000]), "cannot be read"),
    "whole numbers for weights": (
        add_weight("transformer.ln_f.bias", torch.zeros(128, dtype=torch.int8)),
        "'ln_f.bias' is torch.int8, not one of torch.float16, torch.bfloat16, torch.float32"),
    "ranks are no ranks": (write("ranks.tiktoken", "hello world\n"), "not a ranks file"),
    "ranks are doubled": (write("ranks.tiktoken", "YQ== 0\nYg== 0\n"),
                          "without gaps and duplicates"),
    "bytes are missing": (write("ranks.tiktoken", "YQ== 0\nYg== 1\n"),
                          "does not have all 256 bytes"),
    "ranks file of a larger vocabulary": (
        edit("ranks.tiktoken", lambda old: old + b"enp6eno= 1023\n"),
        "smaller than its tokenizer's 1025"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused_in_one_line(folder, case):
    break_it, message = BROKEN[case]
    break_it(folder)
    with pytest.raises(ValueError) as error:
        load(folder)
    assert message in str(error.value) and "\n" not in str(error.value), error.value


@pytest.mark.parametrize("name", ["no/such/folder", "README.md", "x" * 300, "a\0b"])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(ValueError, match="model '"):
        load(name)


def test_a_name_is_downloaded_by_huggingface_hub(folder, monkeypatch):
    """No test can download: what that library is asked for, and what is made of its answer."""
    asked = []
    monkeypatch.setattr(huggingface_hub, "hf_hub_download",
                        lambda repository, file: str(folder / file))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repository, allow_patterns: (
        asked.append((repository, allow_patterns)), str(folder))[1])
    assert torch.equal(GPT.from_pretrained("gpt2").wte.weight, MODEL.wte.weight)
    assert load("owner/name")[1].n_vocab == 1024
    assert {repository for repository, _ in asked} == {"openai-community/gpt2", "owner/name"}
    assert all({"config.json", "*.safetensors"} <= {*patterns} for _, patterns in asked)
    edit_config(model_type="mistral", sliding_window=4096)(folder)
    asked.clear()
    with pytest.raises(ValueError, match="model 'owner/name': its config.json"):
        load("owner/name")
    assert not asked   # refused before its weights are here


def test_no_network_is_one_clear_line(monkeypatch):
    def offline(*args, **kwargs):
        raise requests.exceptions.ConnectionError("Max retries exceeded\nwith url")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(ValueError, match="model 'gpt2-xl': downloading config.json failed "
                                         ".*local folder or the built-in model") as error:
        GPT.from_pretrained("gpt2-xl")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="tokenizer 'gpt2': .*cannot reach the network "
                                         ".*ConnectionError"):
        toolbox.tokenizer.gpt2()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)   # it is not installed
    with pytest.raises(ValueError, match="model 'gpt2': downloading needs huggingface_hub"):
        GPT.from_pretrained("gpt2")


def test_a_token_that_the_tokenizer_does_not_have_is_shown_as_a_replacement():
    """A model's vocabulary may be padded beyond its tokenizer's."""
    assert decode(TOKENIZER, TOKENIZER.encode("été ☕") + [5000]) == "été ☕\ufffd"


def test_a_vocab_json_is_read(folder):
    """Hugging Face writes the tokenizer as vocab.json, bytes spelled as printable characters."""
    char_of = {b: c for c, b in byte_of().items()}
    vocab = {"".join(char_of[b] for b in TOKENIZER.decode_single_token_bytes(i)): i
             for i in range(1023)}
    vocab[END_OF_TEXT] = 1023
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "ranks.tiktoken").unlink()
    _, tokenizer = load(folder)
    text = "# été\nReturn the ☕ of 12 things.<|endoftext|>"
    expected = TOKENIZER.encode(text, allowed_special="all")
    assert tokenizer.encode(text, allowed_special="all") == expected
    for broken in '{"a": 5}', '["a"]', "{", '{"\u4e2d": 0}':
        (folder / "vocab.json").write_text(broken)
        with pytest.raises(ValueError, match="not a byte-level vocabulary like GPT-2's"):
            load(folder)
