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
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode

from toolbox.validate import at_least_1, check_config, one_line, one_of

BUILTIN = Path(__file__).parent / "builtin"   # the built-in model
NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FILES = (WEIGHTS, INDEX, "model-*.safetensors", "config.json", "generation_config.json",
         "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
         "vocab.json", "merges.txt", "chat_template.jinja")

# Our names for a model's sizes and theirs
SIZES = {name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")} | {
    "block_size": "n_positions"}
# Settings that change the arithmetic, with the only values supported, their default first
FIXED = {"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "layer_norm_epsilon": (1e-5,),
         "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
         "add_cross_attention": (False,), "tie_word_embeddings": (True,),
         "quantization_config": (None,)}
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


class Found(NamedTuple):
    """Where a model is, and what its config.json says."""
    name: str
    folder: Path
    files: list    # paths of its weights
    kind: str      # model_type
    config: dict   # arguments of GPTConfig or LlamaConfig


def find(name, kinds):
    """
    The Found of a model; what is not here is downloaded.

    name:  "builtin", one of NAMES, a local folder or weights file (its config.json beside it), or
           "owner/name" on huggingface.co
    kinds: {model_type: function of what a config.json says -> the arguments of a config}

    ValueError with one line that says what is missing or not supported.
    """
    with one_line(f"model '{name}'"):
        file = None
        if name == "builtin":
            folder = BUILTIN
        elif name in NAMES:
            folder = download(f"openai-community/{name}", kinds)
        elif os.path.isdir(name):   # unlike Path's, for a name that no file can have, too
            folder = Path(name)
        elif os.path.isfile(name):
            file, folder = Path(name), Path(name).parent
        elif re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(name)):
            folder = download(str(name), kinds)
        else:
            raise ValueError(f"no such file or folder, and none of the names builtin, "
                             f"{', '.join(NAMES)}, or owner/name on huggingface.co")
        config = read_config(folder / "config.json", kinds)
        return Found(name, folder, [file] if file else files_in(folder), *config)


def files_in(folder):
    """The weights files of a folder: those that its index names; without one, WEIGHTS."""
    if not (folder / INDEX).is_file():
        if (folder / WEIGHTS).is_file():
            return [folder / WEIGHTS]
        raise ValueError(f"the folder does not hold {WEIGHTS}, or {INDEX} with its shards; to "
                         "convert a pytorch_model.bin: transformers.AutoModelForCausalLM."
                         "from_pretrained(folder).save_pretrained(folder)")
    shard_of = read_object(folder / INDEX).get("weight_map")
    if not isinstance(shard_of, dict) or {*map(type, shard_of.values())} != {str}:
        raise ValueError(f"{INDEX}: weight_map must be an object, the shard of each weight")
    files = {shard: folder / shard for shard in sorted({*shard_of.values()})}
    for shard, file in files.items():
        if not file.is_file() or Path(shard).is_absolute() or ".." in Path(shard).parts:
            raise ValueError(f"{INDEX} names {shard!r:.99}, which is no file in this folder")
    return [*files.values()]


def download(repository, kinds):
    """Downloads owner/name, once: its weights and its tokenizer. Returns the folder."""
    failed = ("downloading failed; connect once, with huggingface_hub installed, or use a local "
              "folder or the built-in model")
    with one_line(failed, Exception):   # those of its HTTP client, whichever it is
        from huggingface_hub import hf_hub_download, snapshot_download
        config = Path(hf_hub_download(repository, "config.json"))
    read_config(config, kinds)   # refused before its weights are here
    with one_line(failed, Exception):
        return Path(snapshot_download(repository, allow_patterns=[*FILES]))


def read_object(path):
    """The object in a .json file. ValueError with its name if there is none."""
    with one_line(path.name, RecursionError):   # [[[[[[...
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it must be an object, not {found!r:.60}")
        return found


def read_config(path, kinds):
    """(model_type, arguments of a config) as a config.json has them."""
    theirs = read_object(path)
    with one_line(path.name, KeyError):   # a key is missing
        kind = theirs.setdefault("model_type", "gpt2")
        if not isinstance(kind, str) or kind not in kinds:
            also = "" if len(kinds) > 1 else " (lab.loading.load.load_model reads others)"
            raise ValueError(f"its architecture is {kind!r:.60}, not one of "
                             f"{', '.join(kinds)}{also}")
        return kind, kinds[kind](theirs)


def read(found, make, names, dtype):
    """
    The model make(found.config), on the CPU, with the weights of found.files in `dtype`. Where a
    file has that dtype, its tensors are the memory-mapped file.

    names: function of a file's (key, tensor) -> the same under our names, {key: tensor, ...}

    ValueError with one line that says what is missing or wrong.
    """
    with one_line(f"model '{found.name}'", RuntimeError):   # torch's, where names or shapes differ
        tensors = {}
        for path in found.files:
            with one_line(path.name, SafetensorError):
                theirs = load_file(path)
            for key, tensor in theirs.items():
                new = names(key, tensor.to(dtype))
                if not new.keys().isdisjoint(tensors):
                    raise ValueError(f"{path.name}: the weight {key!r} is there twice")
                tensors |= new
        if found.config.get("tied", True):   # some files hold the embedding once more
            head = tensors.pop("lm_head.weight", None)
            if head is not None and not torch.equal(head, tensors.setdefault("wte.weight", head)):
                raise ValueError("lm_head.weight is not the embedding, as config.json says by "
                                 "tie_word_embeddings")
        # no memory and no random numbers: `assign` puts the tensors that were read in place
        with torch.device("meta"), Uninitialised():
            model = make(found.config)
        model.load_state_dict(tensors, assign=True)
    return model


class Uninitialised(TorchFunctionMode):
    """No random numbers for weights. On "meta" they would import torch's compiler, for seconds."""
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__module__", None) != "torch.nn.init":
            return func(*args, **(kwargs or {}))


def check_fixed(theirs, fixed):
    """ValueError for a setting that is not one of the values supported."""
    for key, allowed in fixed.items():
        one_of(key, theirs.get(key, allowed[0]), *allowed)


# --- GPT-2 ----------------------------------------------------------------------------------------

def read_gpt2(name, make):
    """The model `name`, made by `make` of GPTConfig's arguments, in float32. Or ValueError."""
    return read(find(name, {"gpt2": gpt2_config}), make, gpt2_names, torch.float32)


def gpt2_config(theirs):
    """GPTConfig's arguments. ValueError or KeyError for what is missing or not supported."""
    at_least_1(**{key: theirs[key] for key in SIZES.values()})
    check_fixed(theirs, FIXED | {"n_inner": (None, 4 * theirs["n_embd"])})
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
