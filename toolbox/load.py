"""One function for a model and its tokenizer, by name."""
from pathlib import Path

from tiktoken.load import data_gym_to_mergeable_bpe_ranks

from model import GPT
from toolbox.tokenizer import BUILTIN, from_ranks, from_ranks_file, gpt2


def load(name="builtin"):
    """
    (model, tokenizer) for "builtin", a GPT-2 name, or a local folder or weights file. The model is in
    float32 on the CPU, the tokenizer a tiktoken.Encoding. Raises ValueError with one line that says what is wrong.

    A local folder's tokenizer is its ranks.tiktoken, or its vocab.json with merges.txt; with neither it is GPT-2's.
    """
    path = Path(name)
    folder = BUILTIN if name == "builtin" else path if path.is_dir() else path.parent
    model = GPT.from_pretrained(name)
    if (folder / "ranks.tiktoken").is_file():
        tokenizer = from_ranks_file(folder / "ranks.tiktoken")
    elif path.exists() and (folder / "merges.txt").is_file() and (folder / "vocab.json").is_file():
        try:
            tokenizer = from_ranks(data_gym_to_mergeable_bpe_ranks(str(folder / "merges.txt"), str(folder / "vocab.json")), folder.name)
        except (ValueError, KeyError, AssertionError) as error:
            raise ValueError(f"tokenizer '{folder}': vocab.json and merges.txt are not a byte-level BPE like GPT-2's ({error})") from None
    else:
        tokenizer = gpt2()
    if tokenizer.n_vocab > model.config.vocab_size:
        raise ValueError(f"model '{name}': its vocabulary of {model.config.vocab_size} is smaller than its tokenizer's {tokenizer.n_vocab}")
    return model, tokenizer
