"""
Finds and reads a model's files in Hugging Face's layout: config.json beside model.safetensors, or
beside an index and the shards that it names. Writes those of a GPT-2. (What is special about
Llama's: lab/loading/llama_files.py.)

GPT-2's layout differs from model.py in two ways:

- linear layers are `Conv1D`, whose weight is the transpose of nn.Linear's;
- query, key and value are one layer, `c_attn`, 3 * n_embd wide.
"""
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

from toolbox.validate import at_least_1, check_config, one_line, one_of, silent

BUILTIN = Path(__file__).parent / "builtin"   # the built-in model
NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Weights in this format alone, configs and tokenizers
DOWNLOADED = ("model*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")

# Our names for a model's sizes and theirs
SIZES = {name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")} | {
    "block_size": "n_positions"}
# Settings that change the arithmetic, with the only values supported, their default first
FIXED = {"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "layer_norm_epsilon": (1e-5,),
         "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
         "add_cross_attention": (False,), "tie_word_embeddings": (True,)}
# The same for each model_type
ALWAYS = {"is_causal": (True,), "per_layer_config": (None,), "quantization_config": (None,)}
# Other names of GPT-2's sizes, which transformers would prefer: they must say the same
OTHER_NAMES = {"max_position_embeddings": "n_positions", "num_hidden_layers": "n_layer",
               "num_attention_heads": "n_head", "hidden_size": "n_embd"}
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


class Kind(NamedTuple):
    """How the files of a model_type become a model of ours."""
    config: Callable   # what its config.json says -> the arguments of our config
    names: Callable    # a tensor of its files, (key, tensor) -> the same under our names, a dict
    make: Callable     # the arguments of our config -> the model


class Found(NamedTuple):
    """Where a model is, and what its config.json says."""
    name: str
    folder: Path
    files: dict    # path of each weights file -> which of its keys are read; None: all
    kind: Kind
    config: dict   # arguments of GPTConfig or LlamaConfig


def find(name, kinds):
    """
    The Found of a model; what is not here is downloaded.

    name:  "builtin", one of NAMES, a local folder or weights file (its config.json beside it), or
           "owner/name" on huggingface.co
    kinds: {model_type: Kind}

    ValueError with one line that says what is missing or not supported.
    """
    with one_line(f"model '{name}'"):
        repository = f"openai-community/{name}" if name in NAMES else str(name)
        if name == "builtin":
            path = BUILTIN
        elif name not in NAMES and os.path.exists(name):
            path = Path(name)
        elif re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repository):
            path = download(repository, kinds)
        else:
            raise ValueError(f"no such file or folder, and none of the names builtin, "
                             f"{', '.join(NAMES)}, or owner/name on huggingface.co")
        folder = path.parent if path.is_file() else path
        known = read_config(folder / "config.json", kinds)
        return Found(name, folder, {path: None} if path.is_file() else files_in(path), *known)


def files_in(folder):
    """
    {path: keys or None} of a folder: WEIGHTS, or the shards that its index names. Of a shard, the
    keys are read for which the index names it.
    """
    if (folder / WEIGHTS).is_file():
        return {folder / WEIGHTS: None}
    if not (folder / INDEX).is_file():
        raise ValueError(f"the folder does not hold {WEIGHTS}, or {INDEX} with its shards; to "
                         "convert a pytorch_model.bin: transformers.AutoModelForCausalLM."
                         "from_pretrained(folder).save_pretrained(folder)")
    shard_of = read_object(folder / INDEX).get("weight_map")
    if not isinstance(shard_of, dict) or {*map(type, shard_of.values())} != {str}:
        raise ValueError(f"{INDEX}: weight_map must be an object, the shard of each weight")
    shards = sorted({*shard_of.values()})
    for shard in shards:
        if not (folder / shard).is_file() or Path(shard).name != shard:
            raise ValueError(f"{INDEX} names {shard!r:.99}, which is no file in this folder")
    keys_of = {folder / shard: set() for shard in shards}
    for key, shard in shard_of.items():
        keys_of[folder / shard].add(key)
    return keys_of


def download(repository, kinds):
    """Downloads owner/name, once: its weights and its tokenizer. Returns the folder."""
    with one_line("downloading needs a package: pip install huggingface_hub", ImportError):
        from huggingface_hub import hf_hub_download, snapshot_download
    failed = "downloading failed; connect once, or use a local folder or the built-in model"
    # Exceptions of its HTTP client, whichever it is; and it logs each of five attempts.
    with one_line(failed, Exception), silent("huggingface_hub"):
        config = Path(hf_hub_download(repository, "config.json"))
    read_config(config, kinds)   # refused before its weights are here
    with one_line(failed, Exception), silent("huggingface_hub"):
        return Path(snapshot_download(repository, allow_patterns=[*DOWNLOADED]))


def read_object(path):
    """The object in a .json file. ValueError with its name if there is none."""
    with one_line(path.name, RecursionError):   # [[[[[[...
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it must be an object, not {found!r:.60}")
        return found


def read_config(path, kinds):
    """(its model_type's Kind, the arguments of our config) as a config.json has them."""
    theirs = read_object(path)
    with one_line(path.name, KeyError):   # a key is missing
        model_type = theirs.setdefault("model_type", "gpt2")
        if not isinstance(model_type, str) or model_type not in kinds:
            also = "" if len(kinds) > 1 else " (lab.loading.load.load_model reads others)"
            raise ValueError(f"its architecture is {model_type!r:.60}, not one of "
                             f"{', '.join(kinds)}{also}")
        return kinds[model_type], kinds[model_type].config(theirs)


def read(found, dtype):
    """
    The model that was found, on the CPU, with its weights in `dtype`. Where a file has that dtype,
    its tensors are the memory-mapped file. ValueError with one line that says what is missing or
    wrong.
    """
    with one_line(f"model '{found.name}'", RuntimeError):   # torch's, where names or shapes differ
        tensors = {}
        for path, keys in found.files.items():
            with one_line(path.name, SafetensorError):
                theirs = load_file(path)
            if keys is not None:
                theirs = only(theirs, keys, path.name)
            for key, tensor in theirs.items():
                new = found.kind.names(key, tensor.to(dtype))
                if not new.keys().isdisjoint(tensors):
                    raise ValueError(f"{path.name}: the weight {key!r} is there twice")
                tensors |= new
        if found.config.get("tied", True):   # some files hold the embedding once more
            head = tensors.pop("lm_head.weight", None)
            if head is not None and not torch.equal(head, tensors.setdefault("wte.weight", head)):
                raise ValueError("lm_head.weight is not the embedding, as config.json says by "
                                 "tie_word_embeddings")
        layers = len({key.split(".")[1] for key in tensors if key.startswith("h.")})
        if layers != found.config["n_layer"]:   # before anything is built: it may say 100,000
            raise ValueError(f"config.json says {found.config['n_layer']} layers, the weights have "
                             f"{layers}")
        # no memory and no random numbers: `assign` puts the tensors that were read in place
        with torch.device("meta"), Uninitialised():
            model = found.kind.make(found.config)
        model.load_state_dict(tensors, assign=True)
    return model


def only(tensors, keys, file):
    """The tensors of a file with these keys. ValueError for a key that is not there."""
    missing = sorted(keys - tensors.keys())
    if missing:
        raise ValueError(f"{file} lacks the weight {missing[0]!r}, which {INDEX} says it holds")
    return {key: tensor for key, tensor in tensors.items() if key in keys}


class Uninitialised(TorchFunctionMode):
    """No random numbers for weights. On "meta" they would import torch's compiler, for seconds."""
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__module__", None) != "torch.nn.init":
            return func(*args, **(kwargs or {}))


def check_fixed(theirs, fixed):
    """ValueError for a setting that is not one of the values supported."""
    for key, allowed in (ALWAYS | fixed).items():
        one_of(key, theirs.get(key, allowed[0]), *allowed)


# --- GPT-2 ----------------------------------------------------------------------------------------

def read_gpt2(name, make):
    """The model `name`, made by `make` of GPTConfig's arguments, in float32. Or ValueError."""
    return read(find(name, {"gpt2": Kind(gpt2_config, gpt2_names, make)}), torch.float32)


def gpt2_config(theirs):
    """GPTConfig's arguments. ValueError or KeyError for what is missing or not supported."""
    at_least_1(**{key: theirs[key] for key in SIZES.values()})
    check_fixed(theirs, FIXED | {"n_inner": (None, 4 * theirs["n_embd"])} | {
        other: (theirs[name],) for other, name in OTHER_NAMES.items()})
    sizes = {ours: theirs[key] for ours, key in SIZES.items()}
    check_config(SimpleNamespace(**sizes))
    return sizes


def gpt2_names(key, tensor):
    """A tensor of a file under our names: three for `c_attn`, none for masks in old files."""
    key = key.removeprefix("transformer.")
    if key.endswith((".attn.bias", ".attn.masked_bias")):
        return {}
    if key.endswith(CONV1D):
        tensor = tensor.t().contiguous()
    if "c_attn" not in key:
        return {key: tensor}
    parts = zip(("query", "key", "value"), tensor.chunk(3))
    return {key.replace("c_attn", part): piece.contiguous() for part, piece in parts}


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
              **{theirs: getattr(model.config, name) for name, theirs in SIZES.items()}}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(theirs, folder / "model.safetensors", metadata={"format": "pt"})
