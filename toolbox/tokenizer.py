"""
Tokenizers, all as `tiktoken.Encoding`: byte-level BPE, so every Unicode string round-trips.

The built-in model has its own tokenizer of 1,024 tokens, in a local ranks file in tiktoken's format
(one line per token: base64 of its bytes, and its rank). GPT-2's comes with tiktoken, which
downloads it once.
"""
import base64
import json
from pathlib import Path

import tiktoken

BUILTIN = Path(__file__).parent / "builtin"
END_OF_TEXT = "<|endoftext|>"
# GPT-2's own pattern: text is first cut into these pieces, and no token crosses a cut
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def from_ranks(ranks, name):
    """
    An Encoding of `ranks` (bytes -> rank), followed by the one token <|endoftext|>. Raises
    ValueError if a rank or a byte is missing.
    """
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError("its ranks are not 0, 1, 2, ... without gaps and duplicates")
    if not all(bytes([b]) in ranks for b in range(256)):
        raise ValueError("it does not have all 256 bytes")
    return tiktoken.Encoding(
        name, pat_str=PATTERN, mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: len(ranks)}, explicit_n_vocab=len(ranks) + 1)


def from_ranks_file(path):
    """Reads a ranks file. Raises ValueError for any other file."""
    try:
        lines = [line.split() for line in Path(path).read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        return from_ranks(ranks, Path(path).stem)
    except (OSError, ValueError, AssertionError) as error:
        raise ValueError(f"tokenizer '{path}': not a ranks file in tiktoken's format "
                         f"({error})") from None


def byte_of():
    """
    {character: byte}. GPT-2's files write each byte as one printable character: printable Latin-1
    as itself, the others from 256 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1),
                 *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def from_vocab_file(path):
    """
    Reads GPT-2's vocab.json, whose ids are in the order of the merges. Raises ValueError for any
    other file.
    """
    try:
        table = byte_of()
        vocab = json.loads(Path(path).read_text(encoding="utf-8"))
        ranks = {bytes(table[c] for c in token): rank
                 for token, rank in vocab.items() if token != END_OF_TEXT}
        return from_ranks(ranks, Path(path).parent.name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"tokenizer '{path}': not a byte-level vocabulary like GPT-2's "
                         f"({type(error).__name__}: {error})") from None


def gpt2():
    """
    GPT-2's tokenizer. tiktoken downloads it at its first use; without a network that is a
    ValueError.
    """
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:   # ConnectionError, HTTPError and others of requests, one cause
        raise ValueError("tokenizer 'gpt2': tiktoken downloads it at its first use and cannot "
                         f"reach the network ({type(error).__name__}); connect once, or use the "
                         "built-in model") from None


def train_ranks(texts, n_tokens):
    """
    Trains a byte-level BPE of `n_tokens` tokens on `texts`, with Hugging Face's tokenizers (a
    development requirement), and returns it as tiktoken's ranks, bytes -> rank.
    """
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    except ImportError:
        raise ValueError("training a tokenizer needs the package tokenizers: "
                         "pip install -r requirements-dev.txt") from None
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)   # same as PATTERN
    trainer = trainers.BpeTrainer(vocab_size=n_tokens, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    bpe.train_from_iterator(texts, trainer)
    table, ranks = byte_of(), {bytes([b]): b for b in range(256)}
    in_order = sorted(bpe.get_vocab().items(), key=lambda item: item[1])   # of the merges
    for token, _ in in_order:
        ranks.setdefault(bytes(table[c] for c in token), len(ranks))
    return ranks


def write_ranks_file(ranks, path):
    with open(path, "wb") as f:
        for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
            f.write(base64.b64encode(token) + b" " + str(rank).encode() + b"\n")
