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
import codecs
import os

import torch

from lab.loading.llama import Llama, LlamaConfig
from lab.loading.llama_files import MODEL_TYPES, llama_config, llama_names
from lab.loading.tokenizer import FILES, FromFolder, end_of, from_ranks_file, gpt2
from model import GPT, GPTConfig
from toolbox.validate import one_line
from toolbox.weights import NAMES, Kind, find, gpt2_config, gpt2_names, read

GPT2 = Kind(gpt2_config, gpt2_names, lambda config: GPT(GPTConfig(**config)))
LLAMA = Kind(llama_config, llama_names, lambda config: Llama(LlamaConfig(**config)))
KINDS = {"gpt2": GPT2, **dict.fromkeys(MODEL_TYPES, LLAMA)}
# Parameters. A model with fewer is faster on one thread of a CPU: several threads wait for each
# other longer than they compute, and a GPU is done before its next kernel is launched.
SMALL = 30_000_000


def load_model(name="builtin", dtype=torch.float32):
    """
    The model that a config.json asks for, a GPT or a Llama, on the CPU in `dtype`. name: "builtin",
    a GPT-2 name, a local folder or weights file in Hugging Face's layout, or "owner/name" on
    huggingface.co, downloaded once. ValueError with one line that says what is wrong.
    """
    return read(find(name, KINDS), dtype)


def load(name="builtin", dtype=torch.float32):
    """
    (model, tokenizer) as load_model; the tokenizer has the methods of a tiktoken.Encoding.

    A folder's tokenizer is its ranks.tiktoken, or what transformers makes of its files. A GPT-2
    without has GPT-2's. Its `eot_token`, one or several, is what ends an answer.
    """
    found = find(name, KINDS)
    ranks, files = found.folder / "ranks.tiktoken", [found.folder / file for file in FILES]
    with one_line(f"model '{name}'"):
        if ranks.is_file():
            tokenizer = from_ranks_file(ranks)
        elif name in NAMES or found.kind is GPT2 and not any(file.is_file() for file in files):
            tokenizer = gpt2()
        else:
            tokenizer = FromFolder(found.folder)
        tokenizer.eot_token = end_of(found.folder, tokenizer.eot_token)
        vocabulary = found.config["vocab_size"]
        if tokenizer.n_vocab > vocabulary:
            raise ValueError(f"its vocabulary of {vocabulary} is smaller than its tokenizer's "
                             f"{tokenizer.n_vocab}")
    return read(found, dtype), tokenizer


def is_small(model):
    return sum(p.numel() for p in model.parameters()) < SMALL


def set_threads(model, threads=None):
    """
    How many threads compute `model` on a CPU: `threads`, or OMP_NUM_THREADS of the environment, or
    one for a small model, or as many as torch chooses. Call it before the model runs.
    """
    small = model.device.type == "cpu" and is_small(model)
    if threads is None and small and not os.environ.get("OMP_NUM_THREADS"):
        threads = 1
    if threads:
        torch.set_num_threads(threads)


def word(tokenizer, token):
    """A token's text; or the list of its bytes, if these are not whole characters."""
    piece = tokenizer.decode_single_token_bytes(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


class Stream:
    """
    Tokens become text one after another: whole characters, and no special tokens. Bytes wait only
    while they may still become a character, so at most three; what never will is U+FFFD at once.

    Tokens that are single bytes by name (<0xE4>) wait until another kind of token comes. For their
    tokenizers replace the whole run by U+FFFD, its right characters too, if one byte in it is
    wrong. A text must not depend on whether it was streamed.
    """

    def __init__(self, tokenizer):
        self.tokenizer, self.shown, self.new = tokenizer, [], []

    def add(self, token):
        """The text that is certain now. token None: the end, so all is."""
        if token is not None and token not in self.tokenizer.hidden:
            self.new.append(token)
        certain = self.new if token is None else self.new[:len(self.new) - self.waiting()]
        decode = self.tokenizer.decode
        # what comes before counts
        text = decode(self.shown + certain)[len(decode(self.shown)):]
        if text:
            self.shown, self.new = certain, self.new[len(certain):]
        return text

    def waiting(self):
        """How many of the last tokens the next one may still change."""
        if not self.new:
            return 0
        if self.new[-1] in self.tokenizer.unsure:
            return len(self.new)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = [self.tokenizer.decode_single_token_bytes(token) for token in self.new]
        decoder.decode(b"".join(pieces))
        begun, _ = decoder.getstate()   # the bytes of a character that is not complete
        number, size = 0, 0
        while size < len(begun):
            number += 1
            size += len(pieces[-number])
        return number
