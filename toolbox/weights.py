"""
Reads weights in Hugging Face's layout: config.json beside model.safetensors or its shards. Writes
those of a GPT-2. What a model is made of, the caller says.

GPT-2's layout differs from model.py in two ways, that of lab/loading/llama.py in names only:

- linear layers are `Conv1D`, whose weight is the transpose of nn.Linear's;
- query, key and value are one layer, `c_attn`, 3 * n_embd wide.
"""
import json
import os
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from toolbox.validate import one_line, one_of

BUILTIN = Path(__file__).parent / "builtin"   # the built-in model
NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
WEIGHTS = ("model.safetensors", "model-*.safetensors")   # in one file, or in shards
FILES = ("config.json", *WEIGHTS, "tokenizer.json", "tokenizer_config.json",
         "special_tokens_map.json", "chat_template.jinja")

# Our names for a model's sizes and theirs
GPT2 = {name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")} | {
    "block_size": "n_positions"}
LLAMA = {"block_size": "max_position_embeddings", "vocab_size": "vocab_size",
         "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size",
         "ffn": "intermediate_size", "norm_eps": "rms_norm_eps"}
# Settings that change the arithmetic, with the only values supported, their default first
FIXED = {"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "layer_norm_epsilon": (1e-5,),
         "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
         "add_cross_attention": (False,), "hidden_act": ("silu",), "attention_bias": (False,),
         "mlp_bias": (False,), "use_sliding_window": (False,), "quantization_config": (None,)}
KINDS = ("gpt2", "llama", "mistral", "qwen2", "qwen3")   # model_type in config.json
ROPE_SCALING = ("factor", "low_freq_factor", "high_freq_factor",
                "original_max_position_embeddings")
LLAMA_NAMES = {
    "model.embed_tokens.": "wte.", "model.layers.": "h.", "model.norm.": "ln_f.",
    "input_layernorm.": "ln_1.", "post_attention_layernorm.": "ln_2.", "self_attn.": "attn.",
    "q_proj.": "query.", "k_proj.": "key.", "v_proj.": "value.", "o_proj.": "c_proj.",
    "gate_proj.": "c_gate.", "up_proj.": "c_fc.", "down_proj.": "c_proj.",
}
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
COMPUTED = (".attn.bias", ".attn.masked_bias", ".inv_freq")   # masks and angles in old files


def read_gpt2(name, make):
    """As `read`, for model.py: in float32. ValueError for an architecture other than GPT-2's."""
    kind = locate(name)[1]["model_type"]
    if kind != "gpt2":
        raise ValueError(f"model '{name}': its architecture is {kind!r}, not 'gpt2'; "
                         "lab.loading.load.load_model reads both")
    return read(name, torch.float32, make)


def read(name, dtype, make):
    """
    name: "builtin", one of NAMES, a local folder or weights file (its config.json beside it), or
          "owner/name" on huggingface.co
    make: a function of the config that makes a model, whose weights these have to be

    Returns (config, weights): arguments of GPTConfig or LlamaConfig, and a state dict in `dtype`.
    Where a file has that dtype, its tensors are the memory-mapped file. Raises ValueError with one
    line that names what is missing or wrong.
    """
    files, theirs = locate(name)
    with one_line(f"model '{name}'"):
        config, ours = config_of(theirs), {}
        for path in files:
            with one_line(path.name):
                tensors = load_file(path)
            for key, tensor in tensors.items():
                if not key.endswith(COMPUTED):
                    ours |= renamed(key, tensor.to(dtype), theirs["model_type"])
        if config.get("tied", True):   # some files hold the embedding once more
            ours.pop("lm_head.weight", None)
        with torch.device("meta"):   # allocates nothing
            make(config).load_state_dict(ours, assign=True)
    return config, ours


def renamed(key, tensor, kind):
    """A tensor of a file under our names: {key: tensor}, or three for `c_attn`."""
    if kind != "gpt2":
        for theirs, ours in LLAMA_NAMES.items():
            key = key.replace(theirs, ours)
        return {key: tensor}
    key = key.removeprefix("transformer.")
    if key.endswith(CONV1D):
        tensor = tensor.t().contiguous()
    if "c_attn" not in key:
        return {key: tensor}
    parts = zip(("query", "key", "value"), tensor.chunk(3))
    return {key.replace("c_attn", part): piece.contiguous() for part, piece in parts}


# --- files ----------------------------------------------------------------------------------------

def locate(name):
    """(weights files, what config.json says) for a name; both are downloaded if necessary."""
    with one_line(f"model '{name}'"):
        if name == "builtin":
            files = files_in(BUILTIN)
        elif name in NAMES:
            files = download(f"openai-community/{name}")
        elif os.path.isdir(name):   # unlike Path's, for a name that no file can have, too
            files = files_in(Path(name))
        elif os.path.isfile(name):
            files = [Path(name)]
        elif re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(name)):
            files = download(str(name))
        else:
            raise ValueError(f"no such file or folder, and none of the names builtin, "
                             f"{', '.join(NAMES)}, or owner/name on huggingface.co")
        return files, read_config(files[0].with_name("config.json"))


def files_in(folder):
    """The weights files of a folder: one, or its shards."""
    for pattern in WEIGHTS:
        if files := sorted(folder.glob(pattern)):
            return files
    raise ValueError(f"the folder does not hold {' or '.join(WEIGHTS)}")


def download(repository):
    """Of owner/name, once, into Hugging Face's cache: its weights and its tokenizer."""
    failed = ("downloading failed; connect once, with huggingface_hub installed, or use a local "
              "folder or the built-in model")
    with one_line(failed):
        from huggingface_hub import hf_hub_download, snapshot_download
        config = Path(hf_hub_download(repository, "config.json"))
    config_of(read_config(config))   # refused before its weights are here
    with one_line(failed):
        return files_in(Path(snapshot_download(repository, allow_patterns=[*FILES])))


# --- configurations -------------------------------------------------------------------------------

def read_config(path):
    """What a config.json says. ValueError if it is none, or not of one of KINDS."""
    with one_line("config.json"):
        theirs = json.loads(path.read_text(encoding="utf-8"))
        kind = theirs.setdefault("model_type", "gpt2")
        if kind not in KINDS:   # it may be a list
            raise ValueError(f"its architecture is {kind!r:.60}, not one of {', '.join(KINDS)}")
    return theirs


def config_of(theirs):
    """GPTConfig's or LlamaConfig's arguments. ValueError for what is missing or not supported."""
    kind = theirs["model_type"]
    with one_line("config.json"):
        for key, allowed in FIXED.items():
            one_of(key, theirs.get(key, allowed[0]), *allowed)
        if kind == "gpt2":
            one_of("tie_word_embeddings", theirs.get("tie_word_embeddings", True), True)
            return {ours: theirs[key] for ours, key in GPT2.items()}
        if kind == "mistral":
            one_of("sliding_window", theirs.get("sliding_window", 4096), None)
        config = {ours: theirs[key] for ours, key in LLAMA.items()}
        heads = config["n_head"]
        size = theirs.get("head_dim") or config["n_embd"] // heads
        groups = theirs.get("num_key_value_heads") or heads
        if size % 2:   # features turn in pairs
            raise ValueError(f"head_dim {size} must be even; by default it is "
                             "hidden_size / num_attention_heads")
        if heads % groups:
            raise ValueError(f"num_key_value_heads {groups} must divide "
                             f"num_attention_heads {heads}")
        return config | rope(theirs) | {
            "n_kv_head": groups, "head_size": size,
            "qkv_bias": kind == "qwen2", "qk_norm": kind == "qwen3",
            "tied": theirs.get("tie_word_embeddings", False)}


def rope(theirs):
    """rope_theta, and rope_scaling if there is one. It may stand in either of two places."""
    given = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    kind = given.get("rope_type", given.get("type", "default"))   # "type": its old name
    one_of("rope_type", kind, "default", "llama3")
    found = {"rope_theta": given.get("rope_theta", theirs.get("rope_theta", 10000.0))}
    if kind == "llama3":
        found["rope_scaling"] = tuple(given[key] for key in ROPE_SCALING)
    return found


def write_gpt2(model, folder, dtype=torch.float16):
    """Writes config.json and model.safetensors, which Hugging Face's GPT2LMHeadModel reads too."""
    ours, theirs = model.state_dict(), {}
    for key, tensor in ours.items():
        if ".attn.key" in key or ".attn.value" in key:
            continue
        if ".attn.query" in key:
            parts = [ours[key.replace("query", part)] for part in ("query", "key", "value")]
            tensor, key = torch.cat(parts), key.replace("query", "c_attn")
        if key.endswith(CONV1D):
            tensor = tensor.t()
        theirs["transformer." + key] = tensor.to(dtype).contiguous()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
              "activation_function": "gelu_new",
              **{theirs: getattr(model.config, name) for name, theirs in GPT2.items()}}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(theirs, folder / "model.safetensors", metadata={"format": "pt"})
