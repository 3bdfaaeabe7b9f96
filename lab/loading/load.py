"""
A model and its tokenizer, by name. In Python a stage is a function:

    from generate_ragged import generate          # every stage has a `generate`
    from lab.loading.load import load
    from request import Request

    model, tokenizer = load("builtin")            # or gpt2, ..., or a folder
    prompts = ["# json\\n", "Return the value of"]
    requests = [Request(tokenizer.encode(prompt), max_new_tokens=8) for prompt in prompts]
    trace = generate(model, requests, max_batch=8, token_budget=64)
    for request in requests:
        print(tokenizer.decode(request.tokens), request.finish_reason)

trace.passes has what each forward pass computed (toolbox/trace.py).
"""
import os

import torch

from lab.loading import llama_files
from lab.loading.llama import Llama, LlamaConfig
from lab.loading.tokenizer import FromJson, from_ranks_file, gpt2
from model import GPT, GPTConfig
from toolbox import weights

KINDS = {"gpt2": weights.gpt2_config, **dict.fromkeys(llama_files.KINDS, llama_files.llama_config)}
SMALL = 30_000_000   # parameters; below that, threads wait for each other longer than they compute


def load_model(name="builtin", dtype=torch.float32):
    """
    The model that a config.json asks for, a GPT or a Llama, on the CPU in `dtype`. name: "builtin",
    a GPT-2 name, a local folder or weights file in Hugging Face's layout, or "owner/name" on
    huggingface.co, downloaded once. ValueError with one line that says what is wrong.
    """
    return read(weights.find(name, KINDS), dtype)


def load(name="builtin", dtype=torch.float32):
    """
    (model, tokenizer) as load_model; the tokenizer is a tiktoken.Encoding or has its methods.

    A folder's tokenizer is its ranks.tiktoken or tokenizer.json; a GPT-2 without has GPT-2's.
    """
    found = weights.find(name, KINDS)
    model, folder = read(found, dtype), found.files[0].parent
    if (folder / "ranks.tiktoken").is_file():
        tokenizer = from_ranks_file(folder / "ranks.tiktoken")
    elif found.kind != "gpt2" or (
            name not in weights.NAMES and (folder / "tokenizer.json").is_file()):
        tokenizer = FromJson(folder)
    else:
        tokenizer = gpt2()
    if tokenizer.n_vocab > model.config.vocab_size:
        raise ValueError(f"model '{name}': its vocabulary of {model.config.vocab_size} is smaller "
                         f"than its tokenizer's {tokenizer.n_vocab}")
    return model, tokenizer


def read(found, dtype):
    """The model whose files were found."""
    if found.kind == "gpt2":
        return weights.read(found, lambda config: GPT(GPTConfig(**config)),
                            weights.gpt2_names, dtype)
    return weights.read(found, lambda config: Llama(LlamaConfig(**config)),
                        llama_files.llama_names, dtype)


def set_threads(model, threads=None):
    """
    How many threads compute `model` on a CPU: `threads`, or OMP_NUM_THREADS of the environment, or
    one for fewer than SMALL parameters, or as many as torch chooses. Call it before the model runs.
    """
    small = model.device.type == "cpu" and sum(p.numel() for p in model.parameters()) < SMALL
    if threads is None and small and not os.environ.get("OMP_NUM_THREADS"):
        threads = 1
    if threads:
        torch.set_num_threads(threads)


def bytes_of(tokenizer, token):
    """A token's bytes. A model's vocabulary may be padded beyond its tokenizer's: then U+FFFD."""
    try:
        return tokenizer.decode_single_token_bytes(token)
    except KeyError:
        return "\ufffd".encode()


def decode(tokenizer, tokens):
    """Tokens as text; an id that the tokenizer does not have becomes U+FFFD."""
    return b"".join(bytes_of(tokenizer, token) for token in tokens).decode("utf-8", "replace")


def word(tokenizer, token):
    """A token's text; or the list of its bytes, if these are not whole characters."""
    piece = bytes_of(tokenizer, token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
