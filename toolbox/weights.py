"""
Reads weights in Hugging Face's layout: config.json beside model.safetensors or its shards. Writes
those of a GPT-2. The files are memory mapped, and converted tensor by tensor; what has been
converted leaves the memory. What a model is made of, the caller says.

GPT-2's layout differs from model.py in two ways, that of Llama from loading/llama.py in names only:

- linear layers are `Conv1D`, whose weight is the transpose of nn.Linear's;
- query, key and value are one layer, `c_attn`, 3 * n_embd wide.
"""
import json
import os
import re
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from toolbox.tokenizer import BUILTIN
from toolbox.tokenizer import FILES as TOKENIZER_FILES
from toolbox.validate import one_of

NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")   # "owner/name" on the hub
FILE = "model.safetensors"
CONFIG = {   # our names: theirs
    "block_size": ("n_positions", "n_ctx"), "vocab_size": ("vocab_size",),
    "n_layer": ("n_layer",), "n_head": ("n_head",), "n_embd": ("n_embd",),
}
FIXED = {   # settings that change the arithmetic: GPT-2's values, the only ones supported
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "layer_norm_epsilon": (1e-5,),
    "tie_word_embeddings": (True,), "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
}
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
LLAMA_CONFIG = {
    "block_size": ("max_position_embeddings",), "vocab_size": ("vocab_size",),
    "n_layer": ("num_hidden_layers",), "n_head": ("num_attention_heads",),
    "n_embd": ("hidden_size",), "ffn": ("intermediate_size",), "norm_eps": ("rms_norm_eps",),
}
LLAMA_FIXED = {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,),
               "use_sliding_window": (False,), "quantization_config": (None,)}
ROPE_SCALING = ("factor", "low_freq_factor", "high_freq_factor",
                "original_max_position_embeddings")
LLAMAS = {   # model_type: LlamaConfig's arguments, and more settings that change the arithmetic
    "llama": ({}, {}),
    "mistral": ({}, {"sliding_window": (None,)}),
    "qwen2": ({"qkv_bias": True}, {}),
    "qwen3": ({"qk_norm": True}, {}),
}
LLAMA_NAMES = {
    "model.embed_tokens.": "wte.", "model.layers.": "h.", "model.norm.": "ln_f.",
    "input_layernorm.": "ln_1.", "post_attention_layernorm.": "ln_2.", "self_attn.": "attn.",
    "q_proj.": "query.", "k_proj.": "key.", "v_proj.": "value.", "o_proj.": "c_proj.",
    "gate_proj.": "c_gate.", "up_proj.": "c_fc.", "down_proj.": "c_proj.",
}
KINDS = ("gpt2", *LLAMAS)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def read_gpt2(name, make):
    """
    name: "builtin", one of NAMES, or a local folder or weights file (its config.json beside it).
    make: a function of GPTConfig's arguments that makes a GPT, whose weights these have to be

    Returns (config, weights): GPTConfig's arguments and a float32 state dict for GPT.
    Raises ValueError with one line that names what is missing or wrong.
    """
    files = locate(name)
    folder = files[0].parent
    if (kind := kind_of(folder, name)) in LLAMAS:
        raise ValueError(f"model '{name}': its architecture is {kind!r}, not 'gpt2'; "
                         "loading.load.load_model reads both")
    config = select(read_config(folder, name), CONFIG, FIXED, "GPT-2", name)
    weights = from_hugging_face(read_tensors(files, torch.float32, name))
    drop_tied_head(weights, name)
    check_weights(weights, config, name, make, "GPT-2")
    return config, weights


def read_llama(name, dtype, make):
    """
    As read_gpt2, for the architectures of loading/llama.py: LlamaConfig's arguments and a state
    dict in `dtype`. Where a file has that dtype, its tensors are the memory-mapped file.
    """
    files = locate(name)
    theirs = read_config(files[0].parent, name)
    config, weights = llama_config(theirs, name), {}
    for key, tensor in read_tensors(files, dtype, name):
        if key.endswith(".inv_freq"):   # old files hold what frequencies() computes
            continue
        for old, new in LLAMA_NAMES.items():
            key = key.replace(old, new)
        weights[key] = tensor
    if config["tied"]:
        drop_tied_head(weights, name)
    check_weights(weights, config, name, make, theirs["model_type"])
    return config, weights


def drop_tied_head(weights, name):
    """Of outputs tied to the embedding, a file may hold a copy. ValueError if it differs."""
    head = weights.pop("lm_head.weight", None)
    wte = weights.get("wte.weight", head)
    if head is not None and not (head.dtype == wte.dtype and torch.equal(head, wte)):
        raise ValueError(f"model '{name}': tie_word_embeddings is true, but lm_head.weight is not "
                         "the embedding")


def kind_of(folder, name):
    """Its model_type, one of KINDS. ValueError for any other."""
    kind = read_config(folder, name).get("model_type", "gpt2")
    if kind not in KINDS:   # it may be a list
        raise ValueError(f"model '{name}': its architecture is {kind!r:.60}, "
                         f"not one of {', '.join(KINDS)}")
    return kind


# --- files ----------------------------------------------------------------------------------------

def locate(name):
    """The weights files for a name, one or several shards, downloaded if necessary."""
    if name == "builtin":
        return [BUILTIN / FILE]
    if name in NAMES:
        return download(name, f"openai-community/{name}")
    path = Path(name)
    if os.path.isdir(name):   # unlike Path's, for a name that no file can have, too
        return files_in(path, name)
    if os.path.isfile(name):
        if path.suffix != ".safetensors":
            raise ValueError(f"model '{name}': {path.name} is not .safetensors")
        return [path]
    if REPOSITORY.fullmatch(str(name)):
        return download(name, str(name))
    raise ValueError(f"model '{name}': no such file or folder, and none of the names "
                     f"builtin, {', '.join(NAMES)}, or owner/name on huggingface.co")


def files_in(folder, name):
    """The weights files of a folder: one, or those that an index names, in order."""
    if (folder / FILE).is_file():
        return [folder / FILE]
    index = folder / f"{FILE}.index.json"
    if not index.is_file():
        raise ValueError(f"model '{name}': the folder does not hold {FILE}")
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        paths = [index.parent / Path(file).name for file in sorted(files)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        paths = []
    if not paths:
        raise ValueError(f"model '{name}': {index.name} has no weight_map")
    return paths


def download(name, repository):
    """Of owner/name, once, into Hugging Face's cache: its weights and its tokenizer."""
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
    except ImportError:
        raise ValueError(f"model '{name}': downloading needs huggingface_hub; pip install it, or "
                         "use a local folder or the built-in model") from None
    try:
        config = hf_hub_download(repository, "config.json")
    except Exception as error:   # of many kinds: no network, no such repository, none in the cache
        raise failed(name, "config.json", error) from None
    if kind_of(Path(config).parent, name) in LLAMAS:   # refused before its weights are here
        llama_config(read_config(Path(config).parent, name), name)
    try:
        folder = snapshot_download(repository, allow_patterns=[
            "config.json", "*.safetensors", f"{FILE}.index.json", *TOKENIZER_FILES])
    except Exception as error:
        raise failed(name, "its weights", error) from None
    return files_in(Path(folder), name)


def failed(name, what, error):
    said = str(error).strip().splitlines() or [type(error).__name__]
    return ValueError(f"model '{name}': downloading {what} failed ({said[0]:.200}); connect once, "
                      "or use a local folder or the built-in model")


def read_config(folder, name):
    """What config.json says. ValueError if it is missing or no JSON object."""
    path, theirs = folder / "config.json", None
    try:
        theirs = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"model '{name}': there is no config.json beside its weights") from None
    except (ValueError, RecursionError):
        pass
    if not isinstance(theirs, dict):
        raise ValueError(f"model '{name}': {path} is not a JSON object")
    return theirs


def read_tensors(files, dtype, name):
    """Yields (key, tensor) of all files, those with one of FLOATS in `dtype`."""
    for path in files:
        try:
            file = safe_open(path, "pt")
            for key in file.keys():
                tensor = file.get_tensor(key)
                if tensor.dtype in FLOATS and tensor.dtype != dtype:
                    tensor = tensor.to(dtype)
                    file = safe_open(path, "pt")   # the old mapping goes, and its pages with it
                yield key, tensor
        except Exception as error:   # of a kind of its own, by what the bytes happen to say
            raise ValueError(
                f"model '{name}': {path.name} cannot be read: it is corrupt, cut short or "
                f"of another kind ({type(error).__name__})") from None


# --- configurations -------------------------------------------------------------------------------

def llama_config(theirs, name):
    """LlamaConfig's arguments, which it checks itself."""
    kind = theirs["model_type"]
    settings, fixed = LLAMAS[kind]
    theirs = {"sliding_window": 4096, **theirs} if kind == "mistral" else theirs   # its default
    config = select(theirs, LLAMA_CONFIG, LLAMA_FIXED | fixed, kind, name) | settings
    try:
        given = [theirs.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
        for each in given:   # also the second of two, which transformers ignores
            rope_type = each.get("rope_type", each.get("type", "default"))   # "type": its old name
            one_of("rope_type", rope_type, "default", "llama3")
            one_of("type beside rope_type", each.get("type", rope_type), rope_type)
        rope = {"rope_theta": theirs.get("rope_theta", 10000.0), **(given[0] or given[1])}
        if rope.get("rope_type", rope.get("type")) == "llama3":
            config["rope_scaling"] = tuple(float(rope[key]) for key in ROPE_SCALING)
        return config | {
            "n_kv_head": theirs.get("num_key_value_heads") or config["n_head"],
            "head_size": theirs.get("head_dim") or config["n_embd"] // config["n_head"],
            "norm_eps": float(config["norm_eps"]), "rope_theta": float(rope["rope_theta"]),
            "tied": bool(theirs.get("tie_word_embeddings", False))}
    except (TypeError, AttributeError, KeyError, ArithmeticError, ValueError) as error:
        raise ValueError(f"model '{name}': its config.json is not that of a supported {kind} "
                         f"({type(error).__name__}: {error})") from None


def select(theirs, names, fixed, kind, name):
    """Our configuration from theirs. ValueError for what is missing or not supported."""
    try:
        config = {ours: next(theirs[key] for key in keys if key in theirs)
                  for ours, keys in names.items()}
    except StopIteration:
        raise ValueError(f"model '{name}': its config.json is not that of a {kind}, which has "
                         f"{', '.join(keys[0] for keys in names.values())}") from None
    for key, allowed in fixed.items():
        if theirs.get(key, allowed[0]) not in allowed:
            raise ValueError(f"model '{name}': {key} {theirs[key]!r:.60} is not {kind}'s "
                             f"{' or '.join(map(repr, allowed))}")
    return config


# --- weights --------------------------------------------------------------------------------------

def from_hugging_face(theirs):
    """GPT-2's tensors [(key, tensor), ...] as our state dict, without their masks."""
    ours = {}
    for key, tensor in theirs:
        key = key.removeprefix("transformer.")
        if key.endswith((".attn.bias", ".attn.masked_bias")):
            continue
        if key.endswith(CONV1D) and tensor.dim() == 2:
            tensor = tensor.t()
        if "attn.c_attn" in key and tensor.dim():
            for part, piece in zip(("query", "key", "value"), tensor.chunk(3)):
                ours[key.replace("c_attn", part)] = piece.contiguous()
        else:
            ours[key] = tensor.contiguous()
    return ours


def check_weights(ours, config, name, make, kind):
    """ValueError unless `ours` has the names and shapes of the weights of this configuration."""
    try:
        with torch.device("meta"):   # shapes only: allocates nothing
            weights = make(config).state_dict()
    except (ValueError, RuntimeError, TypeError, ArithmeticError) as error:
        raise ValueError(f"model '{name}': its config.json: {str(error).splitlines()[0]}") from None
    if odd := sorted(ours.keys() ^ weights.keys()):
        raise ValueError(f"model '{name}': not a {kind} of {config['n_layer']} layers: "
                         f"{len(odd)} weights missing or unknown, first '{odd[0]}'")
    for key, tensor in ours.items():
        if tensor.shape != weights[key].shape:
            raise ValueError(f"model '{name}': weight '{key}' has shape {tuple(tensor.shape)}, "
                             f"its config.json says {tuple(weights[key].shape)}")
        if tensor.dtype not in FLOATS:
            raise ValueError(f"model '{name}': weight '{key}' is {tensor.dtype}, not one of "
                             f"{', '.join(map(str, FLOATS))}")


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
              **{keys[0]: getattr(model.config, name) for name, keys in CONFIG.items()}}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(theirs, folder / FILE, metadata={"format": "pt"})
