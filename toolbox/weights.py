"""
Reads and writes GPT-2 weights in Hugging Face's layout: config.json beside model.safetensors or
pytorch_model.bin. The layout differs from model.py in two ways:

- linear layers are `Conv1D`, whose weight is the transpose of nn.Linear's;
- query, key and value are one layer, `c_attn`, 3 * n_embd wide.
"""
import json
import pickle
from pathlib import Path
from urllib.error import URLError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from toolbox.tokenizer import BUILTIN

NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
HUB = "https://huggingface.co/openai-community/{name}/resolve/main/{file}"
FILES = ("model.safetensors", "pytorch_model.bin")
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
READ_ERRORS = (SafetensorError, pickle.UnpicklingError, RuntimeError, OSError, EOFError,
               AttributeError)


def read_gpt2(name):
    """
    name: "builtin", one of NAMES, or a local folder or weights file (its config.json beside it).
    Returns (config, weights): GPTConfig's arguments and a float32 state dict for GPT.
    Raises ValueError with one line that names what is missing or wrong.
    """
    path = locate(name)
    if path.suffix not in (".safetensors", ".bin"):
        raise ValueError(f"model '{name}': {path.name} is neither .safetensors nor .bin")
    config = read_config(path.parent / "config.json", name)
    try:
        if path.suffix == ".safetensors":
            theirs = load_file(path)
        else:
            theirs = torch.load(path, map_location="cpu", weights_only=True)
        theirs = {key.removeprefix("transformer."): tensor.to_dense().float()
                  for key, tensor in theirs.items()}
    except READ_ERRORS as error:
        raise ValueError(f"model '{name}': {path.name} cannot be read: it is corrupt, cut short or "
                         f"of another kind ({type(error).__name__})") from None
    return config, from_hugging_face(theirs, config, name)


def locate(name):
    """The weights file for a name, downloaded if necessary."""
    if name == "builtin":
        return BUILTIN / FILES[0]
    if name in NAMES:
        return download(name)
    path = Path(name)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError):   # a name that no file can have
        is_folder = is_file = False
    if is_folder:
        found = [path / file for file in FILES if (path / file).is_file()]
        if not found:
            raise ValueError(f"model '{name}': the folder holds neither {FILES[0]} "
                             f"nor {FILES[1]}")
        return found[0]
    if not is_file:
        raise ValueError(f"model '{name}': no such file or folder, and none of the names "
                         f"builtin, {', '.join(NAMES)}")
    return path


def download(name):
    """Downloads weights and configuration once, with torch's own loader, into torch's own cache."""
    folder = Path(torch.hub.get_dir()) / "checkpoints" / name
    for file in ("config.json", FILES[0]):
        if not (folder / file).is_file():
            folder.mkdir(parents=True, exist_ok=True)
            try:
                # writes the whole file or nothing
                torch.hub.download_url_to_file(HUB.format(name=name, file=file), str(folder / file))
            except (URLError, OSError) as error:
                raise ValueError(f"model '{name}': downloading {file} failed ({error}); connect "
                                 "once, or use a local folder or the built-in model") from None
    return folder / FILES[0]


def read_config(path, name):
    try:
        theirs = json.loads(path.read_text(encoding="utf-8"))
        config = {ours: next(theirs[key] for key in keys if key in theirs)
                  for ours, keys in CONFIG.items()}
    except OSError:
        raise ValueError(f"model '{name}': there is no config.json beside its weights") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, StopIteration, TypeError):
        raise ValueError(f"model '{name}': its config.json is not that of a GPT-2, which has "
                         f"{', '.join(keys[0] for keys in CONFIG.values())}") from None
    for key, allowed in FIXED.items():
        if theirs.get(key, allowed[0]) not in allowed:
            raise ValueError(f"model '{name}': {key} {theirs[key]!r} is not GPT-2's "
                             f"{' or '.join(map(repr, allowed))}")
    return config


def from_hugging_face(theirs, config, name):
    """Their state dict as ours, without buffers (their causal masks) and the tied lm_head."""
    ours = {}
    expected = shapes(config, name)
    for key, tensor in theirs.items():
        if key.endswith((".attn.bias", ".attn.masked_bias")) or key == "lm_head.weight":
            continue
        if key.endswith(CONV1D) and tensor.dim() == 2:
            tensor = tensor.t()
        if "attn.c_attn" in key and tensor.dim():
            for part, piece in zip(("query", "key", "value"), tensor.chunk(3)):
                ours[key.replace("c_attn", part)] = piece.contiguous()
        else:
            ours[key] = tensor.contiguous()
    if ours.keys() != expected.keys():
        odd = sorted(ours.keys() ^ expected.keys())
        raise ValueError(f"model '{name}': not a GPT-2 of {config['n_layer']} layers: "
                         f"{len(odd)} weights missing or unknown, first '{odd[0]}'")
    for key, tensor in ours.items():
        if tuple(tensor.shape) != expected[key]:
            raise ValueError(f"model '{name}': weight '{key}' has shape {tuple(tensor.shape)}, "
                             f"its config.json says {expected[key]}")
    return ours


def shapes(config, name):
    """The shape of each weight in a GPT of this configuration."""
    from model import GPT, GPTConfig
    try:
        with torch.device("meta"):   # shapes only: allocates nothing
            weights = GPT(GPTConfig(**config)).state_dict()
        return {key: tuple(tensor.shape) for key, tensor in weights.items()}
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"model '{name}': its config.json: {str(error).splitlines()[0]}") from None


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
    save_file(theirs, folder / FILES[0], metadata={"format": "pt"})
