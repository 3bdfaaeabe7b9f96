"""
Tokenizers, all as `tiktoken.Encoding` or with its methods.

The built-in model has its own byte-level BPE of 1,024 tokens, in a local ranks file in tiktoken's
format (one line per token: base64 of its bytes, and its rank). GPT-2's comes with tiktoken, which
downloads it once. Other models bring a tokenizer.json, which needs the package transformers.
"""
import base64
from pathlib import Path

import tiktoken

from toolbox.validate import one_line

END_OF_TEXT = "<|endoftext|>"
# GPT-2's own pattern: text is first cut into these pieces, and no token crosses a cut
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


def from_ranks(ranks, name):
    """An Encoding of `ranks` (bytes -> rank), followed by the one token <|endoftext|>."""
    return tiktoken.Encoding(
        name, pat_str=PATTERN, mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: len(ranks)}, explicit_n_vocab=len(ranks) + 1)


def from_ranks_file(path):
    """Reads a ranks file. Raises ValueError for any other file."""
    with one_line(f"tokenizer '{path}': not a ranks file in tiktoken's format"):
        lines = [line.split() for line in Path(path).read_bytes().splitlines()]
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        if sorted(ranks.values()) != [*range(len(lines))]:   # tiktoken would panic
            raise ValueError("its ranks are not 0, 1, 2, ..., each of another token")
        if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
            raise ValueError(f"byte {missing[0]} has no token of its own")
    return from_ranks(ranks, "builtin")


def byte_of():
    """
    {character: byte}. GPT-2's files write each byte as one printable character: printable Latin-1
    as itself, the others from 256 on.
    """
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def gpt2():
    """GPT-2's tokenizer. ValueError without a network, if tiktoken has not downloaded it before."""
    with one_line("tokenizer 'gpt2': tiktoken downloads it at its first use; connect once, or use "
                  "the built-in model"):
        return tiktoken.get_encoding("gpt2")


class FromJson:
    """
    A folder's tokenizer.json as transformers reads it, with the methods of tiktoken.Encoding that
    this repository calls. ValueError if it cannot be read, or transformers is missing.
    """

    def __init__(self, folder):
        self.name = f"tokenizer '{Path(folder) / 'tokenizer.json'}'"
        with one_line(f"{self.name}: transformers (pip install transformers) cannot read it",
                      Exception):   # tokenizers has no exceptions of its own
            from transformers import PreTrainedTokenizerFast
            self.inner = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        pieces = {token: piece for piece, token in self.inner.get_vocab().items()}
        special = self.inner.added_tokens_decoder
        self.n_vocab, self.eot_token = 1 + max(pieces), self.inner.eos_token_id
        self.chat_template = self.inner.chat_template
        # a piece is byte-level, or else text as in sentencepiece
        table = byte_of() if "ByteLevel" in repr(self.inner.backend_tokenizer.decoder) else None
        with one_line(f"{self.name}: a piece is not byte-level", KeyError):
            self.bytes_of = {token: special[token].content.encode() if token in special else
                             bytes_of_piece(piece, table) for token, piece in pieces.items()}

    def encode(self, text, **_):
        """Token ids; with what the tokenizer puts in front of a text."""
        return self.ids(text)

    encode_ordinary = encode

    def ids(self, text, **settings):
        with one_line(f"{self.name} cannot encode {text!r:.60}", Exception):   # half a character
            # verbose: silent about texts beyond its context
            return self.inner.encode(text, verbose=False, **settings)

    def encode_chat(self, messages):
        """Token ids of [{"role": ..., "content": text}, ...] and the beginning of an answer."""
        with one_line(f"{self.name}: its chat template fails", Exception):   # it is a program
            text = self.inner.apply_chat_template(messages, add_generation_prompt=True,
                                                  tokenize=False)
        return self.ids(text, add_special_tokens=False)

    def decode_single_token_bytes(self, token):
        return self.bytes_of[token]

    def decode(self, tokens):
        return b"".join(self.bytes_of[token] for token in tokens).decode("utf-8", "replace")


def bytes_of_piece(piece, table):
    """table: of `byte_of`; None: the piece is text, or a byte such as <0x0A>."""
    if table:
        return bytes(table[c] for c in piece)
    return (bytes.fromhex(piece[3:5]) if piece.startswith("<0x")
            else piece.replace("▁", " ").encode())
