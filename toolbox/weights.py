"""
Reads weights in Hugging Face's layout: config.json beside model.safetensors or its shards. Writes
those of a GPT-2. What a model is made of, the caller says.

GPT-2's layout differs from model.py in two ways, that of Llama from loading/llama.py in names only:

- linear layers are `Conv1D`, whose weight is the transpose of nn.Linear's;
- query, key and value are one layer, `c_attn`, 3 * n_embd wide.
"""
import json
import os
import re
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from toolbox.tokenizer import BUILTIN
from toolbox.tokenizer import FILES as TOKENIZER_FILES
from toolbox.validate import one_of

NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Our names for a model's sizes and theirs; and settings that change the arithmetic, with the only
# values supported, their default first
GPT2 = {name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")} | {
    "block_size": "n_positions"}
GPT2_FIXED = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "layer_norm_epsilon": (1e-5,),
    "tie_word_embeddings": (True,), "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)}
LLAMA = {"block_size": "max_position_embeddings", "vocab_size": "vocab_size",
         "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size",
         "ffn": "intermediate_size", "norm_eps": "rms_norm_eps"}
LLAMA_FIXED = {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,),
               "use_sliding_window": (False,), "quantization_config": (None,)}
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


@contextmanager
def named(name):
    """Errors say which model it was."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"model '{name}': {error}") from None


def read_gpt2(name, make):
    """
    name: "builtin", one of NAMES, a local folder or weights file (its config.json beside it), or
          "owner/name" on huggingface.co
    make: a function of GPTConfig's arguments that makes a GPT, whose weights these have to be

    Returns (config, weights): GPTConfig's arguments and a float32 state dict for GPT.
    Raises ValueError with one line that names what is missing or wrong.
    """
    files = locate(name)
    with named(name):
        theirs = read_config(files[0].parent)
        if theirs["model_type"] != "gpt2":
            raise ValueError(f"its architecture is {theirs['model_type']!r}, not 'gpt2'; "
                             "loading.load.load_model reads both")
        config, ours = config_of(theirs), {}
        for key, tensor in read_tensors(files, torch.float32):
            key = key.removeprefix("transformer.")
            if key.endswith(CONV1D) and tensor.dim() == 2:
                tensor = tensor.t()
            if "attn.c_attn" in key and tensor.dim():
                for part, piece in zip(("query", "key", "value"), tensor.chunk(3)):
                    ours[key.replace("c_attn", part)] = piece.contiguous()
            elif not key.endswith((".attn.bias", ".attn.masked_bias")):   # masks
                ours[key] = tensor.contiguous()
        check_weights(ours, config, make, "GPT-2", tied=True)
    return config, ours


def read_llama(name, dtype, make):
    """
    As read_gpt2, for the architectures of loading/llama.py: LlamaConfig's arguments and a state
    dict in `dtype`. Where a file has that dtype, its tensors are the memory-mapped file.
    """
    files = locate(name)
    with named(name):
        theirs = read_config(files[0].parent)
        config, ours = config_of(theirs), {}
        for key, tensor in read_tensors(files, dtype):
            for old, new in LLAMA_NAMES.items():
                key = key.replace(old, new)
            if not key.endswith(".inv_freq"):   # old files hold what frequencies() computes
                ours[key] = tensor
        check_weights(ours, config, make, theirs["model_type"], config["tied"])
    return config, ours


def check_weights(ours, config, make, kind, tied):
    """
    ValueError unless `ours` has the names and shapes of the weights of this configuration. Of an
    output that is tied to the embedding, a file may hold a copy, which is removed.
    """
    if tied and (head := ours.pop("lm_head.weight", None)) is not None:
        wte = ours.get("wte.weight", head)
        if head.dtype != wte.dtype or not torch.equal(head, wte):
            raise ValueError("tie_word_embeddings is true, but lm_head.weight is not the embedding")
    try:
        with torch.device("meta"):   # shapes only: allocates nothing
            weights = make(config).state_dict()
    except (ValueError, RuntimeError, TypeError, ArithmeticError) as error:
        raise ValueError(f"its config.json: {str(error).splitlines()[0]}") from None
    if odd := sorted(ours.keys() ^ weights.keys()):
        raise ValueError(f"not a {kind} of {config['n_layer']} layers: {len(odd)} weights missing "
                         f"or unknown, first '{odd[0]}'")
    for key, tensor in ours.items():
        if tensor.shape != weights[key].shape:
            raise ValueError(f"weight '{key}' has shape {tuple(tensor.shape)}, its config.json "
                             f"says {tuple(weights[key].shape)}")
        if tensor.dtype not in FLOATS:
            raise ValueError(f"weight '{key}' is {tensor.dtype}, not one of "
                             f"{', '.join(map(str, FLOATS))}")


# --- files ----------------------------------------------------------------------------------------

def kind_of(name):
    """The model_type of a model, one of KINDS. ValueError for any other."""
    files = locate(name)
    with named(name):
        return read_config(files[0].parent)["model_type"]


def locate(name):
    """The weights files for a name, one or several shards, downloaded if necessary."""
    with named(name):
        if name == "builtin":
            return [BUILTIN / FILE]
        if name in NAMES:
            return download(f"openai-community/{name}")
        if os.path.isdir(name):   # unlike Path's, for a name that no file can have, too
            return files_in(Path(name))
        if os.path.isfile(name):
            if Path(name).suffix != ".safetensors":
                raise ValueError(f"{Path(name).name} is not .safetensors")
            return [Path(name)]
        if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(name)):
            return download(str(name))
        raise ValueError(f"no such file or folder, and none of the names builtin, "
                         f"{', '.join(NAMES)}, or owner/name on huggingface.co")


def files_in(folder):
    """The weights files of a folder: one, or those that an index names, in order."""
    if (folder / FILE).is_file():
        return [folder / FILE]
    if not (folder / INDEX).is_file():
        raise ValueError(f"the folder does not hold {FILE}")
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        paths = [folder / Path(shard).name for shard in sorted({*index["weight_map"].values()})]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        paths = []
    if not paths:
        raise ValueError(f"{INDEX} has no weight_map")
    return paths


def download(repository):
    """Of owner/name, once, into Hugging Face's cache: its weights and its tokenizer."""
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
    except ImportError:
        raise ValueError("downloading needs huggingface_hub; pip install it, or use a local folder "
                         "or the built-in model") from None

    def get(what, function, *arguments, **more):
        try:
            return Path(function(repository, *arguments, **more))
        except Exception as error:   # of many kinds: no network, no such repository, none cached
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(f"downloading {what} failed ({said[0]:.200}); connect once, or use a "
                             "local folder or the built-in model") from None

    config = get("config.json", hf_hub_download, "config.json")
    config_of(read_config(config.parent))   # refused before its weights are here
    return files_in(get("its weights", snapshot_download, allow_patterns=[
        "config.json", "*.safetensors", INDEX, *TOKENIZER_FILES]))


def read_config(folder):
    """What config.json says. ValueError if it is missing, no JSON object, or not one of KINDS."""
    path, theirs = folder / "config.json", None
    try:
        theirs = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ValueError("there is no config.json beside its weights") from None
    except (ValueError, RecursionError):
        pass
    if not isinstance(theirs, dict):
        raise ValueError(f"{path} is not a JSON object")
    kind = theirs.setdefault("model_type", "gpt2")
    if kind not in KINDS:   # it may be a list
        raise ValueError(f"its architecture is {kind!r:.60}, not one of {', '.join(KINDS)}")
    return theirs


def read_tensors(files, dtype):
    """Yields (key, tensor) of all files, those with one of FLOATS in `dtype`."""
    for path in files:
        try:
            file = safe_open(path, "pt")   # memory mapped
            for key in file.keys():
                tensor = file.get_tensor(key)
                if tensor.dtype in FLOATS and tensor.dtype != dtype:
                    tensor = tensor.to(dtype)
                    file = safe_open(path, "pt")   # the old mapping goes, and its pages with it
                yield key, tensor
        except Exception as error:   # of a kind of its own, by what the bytes happen to say
            raise ValueError(f"{path.name} cannot be read: it is corrupt, cut short or of another "
                             f"kind ({type(error).__name__})") from None


# --- configurations -------------------------------------------------------------------------------

def config_of(theirs):
    """GPTConfig's or LlamaConfig's arguments. ValueError for what is missing or not supported."""
    kind = theirs["model_type"]
    names, fixed = (GPT2, GPT2_FIXED) if kind == "gpt2" else (LLAMA, LLAMA_FIXED)
    title = "GPT-2" if kind == "gpt2" else kind
    if not theirs.keys() >= {*names.values()}:
        raise ValueError(f"its config.json is not that of a {title}, which has "
                         f"{', '.join(names.values())}")
    if kind == "mistral":
        fixed, theirs = fixed | {"sliding_window": (None,)}, {"sliding_window": 4096, **theirs}
    for key, allowed in fixed.items():
        if theirs.get(key, allowed[0]) not in allowed:
            raise ValueError(f"{key} {theirs[key]!r:.60} is not {title}'s "
                             f"{' or '.join(map(repr, allowed))}")
    config = {ours: theirs[key] for ours, key in names.items()}
    if kind == "gpt2":
        return config
    try:
        return config | rope(theirs) | {
            "n_kv_head": theirs.get("num_key_value_heads") or config["n_head"],
            "head_size": theirs.get("head_dim") or config["n_embd"] // config["n_head"],
            "norm_eps": float(config["norm_eps"]), "qkv_bias": kind == "qwen2",
            "qk_norm": kind == "qwen3", "tied": bool(theirs.get("tie_word_embeddings", False))}
    except (TypeError, AttributeError, KeyError, ArithmeticError, ValueError) as error:
        raise ValueError(f"its config.json is not that of a supported {kind} "
                         f"({type(error).__name__}: {error})") from None


def rope(theirs):
    """rope_theta, and rope_scaling if there is one. It may stand in either of two places."""
    given = [theirs.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    for each in given:   # also the second of two, which transformers ignores
        kind = each.get("rope_type", each.get("type", "default"))   # "type": its old name
        one_of("rope_type", kind, "default", "llama3")
        one_of("type beside rope_type", each.get("type", kind), kind)
    settings = {"rope_theta": theirs.get("rope_theta", 10000.0), **(given[0] or given[1])}
    found = {"rope_theta": float(settings["rope_theta"])}
    if settings.get("rope_type", settings.get("type")) == "llama3":
        found["rope_scaling"] = tuple(float(settings[key]) for key in ROPE_SCALING)
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
    save_file(theirs, folder / FILE, metadata={"format": "pt"})
