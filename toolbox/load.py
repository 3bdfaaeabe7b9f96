"""A model and its tokenizer, by name."""
from pathlib import Path

from model import GPT
from toolbox.tokenizer import BUILTIN, from_ranks_file, from_vocab_file, gpt2


def load(name="builtin"):
    """
    (model, tokenizer) for "builtin", a GPT-2 name, or a local folder or weights file. The model is
    in float32 on the CPU; the tokenizer is a tiktoken.Encoding. Raises ValueError with one line
    that says what is wrong.

    A local folder's tokenizer is its ranks.tiktoken or its vocab.json; with neither it is GPT-2's.
    """
    model = GPT.from_pretrained(name)
    path = Path(name)
    folder = BUILTIN if name == "builtin" else path if path.is_dir() else path.parent
    if (folder / "ranks.tiktoken").is_file():
        tokenizer = from_ranks_file(folder / "ranks.tiktoken")
    elif path.exists() and (folder / "vocab.json").is_file():
        tokenizer = from_vocab_file(folder / "vocab.json")
    else:
        tokenizer = gpt2()
    if tokenizer.n_vocab > model.config.vocab_size:
        raise ValueError(f"model '{name}': its vocabulary of {model.config.vocab_size} is smaller "
                         f"than its tokenizer's {tokenizer.n_vocab}")
    return model, tokenizer


def decode(tokenizer, tokens):
    """
    Tokens as text. A model's vocabulary may be padded: a token id that the tokenizer does not have
    becomes U+FFFD.
    """
    pieces = [tokenizer.decode_single_token_bytes(token) if token < tokenizer.n_vocab
              else "\ufffd".encode() for token in tokens]
    return b"".join(pieces).decode("utf-8", errors="replace")
