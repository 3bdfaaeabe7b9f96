"""
Tokenizers, all with those methods of `tiktoken.Encoding` that this repository calls.

The built-in model has its own byte-level BPE of 1,024 tokens, in a local ranks file in tiktoken's
format (one line per token: base64 of its bytes, and its rank). GPT-2's comes with tiktoken, which
downloads it once. Hugging Face's transformers reads those of other models.
"""
import base64
import re
from functools import cache
from pathlib import Path

import tiktoken

from toolbox.validate import is_whole, one_line, silent
from toolbox.weights import read_object

END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "\ufffd"   # an id without a token: a model may have more ids than its tokenizer
# GPT-2's own pattern: text is first cut into these pieces, and no token crosses a cut
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt",
         "merges.txt")   # a folder with one of them has a tokenizer


class Encoding(tiktoken.Encoding):
    """
    tiktoken's, with what else this repository asks of a tokenizer.

    eot_token: the token that ends an answer, or a tuple of several, or None
    hidden:    special tokens: no client is shown their text
    unsure:    tokens whose text the next token may still change
    """
    eot_token, unsure = None, frozenset()

    @property
    def hidden(self):
        return {*self._special_tokens.values()}

    def decode(self, tokens, errors="replace"):
        """As tiktoken's, but an id that there is not becomes UNKNOWN."""
        return b"".join(map(self.decode_single_token_bytes, tokens)).decode(errors=errors)

    def decode_single_token_bytes(self, token):
        if token >= self.n_vocab:
            return UNKNOWN.encode()
        return super().decode_single_token_bytes(token)


def from_ranks(ranks, name):
    """An Encoding of `ranks` (bytes -> rank), followed by the one token <|endoftext|>."""
    encoding = Encoding(
        name, pat_str=PATTERN, mergeable_ranks=ranks,
        special_tokens={END_OF_TEXT: len(ranks)}, explicit_n_vocab=len(ranks) + 1)
    encoding.eot_token = len(ranks)
    return encoding


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


def gpt2():
    """GPT-2's tokenizer. ValueError without a network, if tiktoken has not downloaded it before."""
    with one_line("tokenizer 'gpt2': tiktoken downloads it at its first use; connect once, or use "
                  "the built-in model"):
        return from_ranks(tiktoken.get_encoding("gpt2")._mergeable_ranks, "gpt2")


@cache
def byte_of():
    """
    {character: byte}. GPT-2's files write each byte as one printable character: printable Latin-1
    as itself, the others from 256 on.
    """
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def end_of(folder, usual):
    """
    What ends an answer of a folder's model: a token, a tuple of several, or None. As transformers
    has it: generation_config.json says so, or else config.json, or else the tokenizer, `usual`.
    """
    for file in "generation_config.json", "config.json":
        path = folder / file
        given = read_object(path).get("eos_token_id") if path.is_file() else None
        if given is not None:
            ends = given if isinstance(given, list) else [given]
            if not all(is_whole(token, 0) for token in ends):
                raise ValueError(f"{file}: eos_token_id must be a token id, or a list of them, "
                                 f"not {given!r:.60}")
            return ends[0] if len(ends) == 1 else tuple(ends)
    return usual


class FromFolder:
    """
    A folder's tokenizer as transformers reads it, with the methods and attributes of Encoding.
    ValueError if it cannot be read, or transformers is missing.
    """

    def __init__(self, folder):
        self.name = f"tokenizer '{folder}'"
        with one_line(f"{self.name} needs transformers: pip install -r "
                      "lab/loading/requirements.txt", ImportError):
            from transformers import AutoTokenizer  # it takes a second
        with one_line(f"{self.name}: transformers cannot read it", Exception):   # of any kind
            with silent("transformers"):   # it warns of settings that nobody uses here
                self.inner = AutoTokenizer.from_pretrained(folder, local_files_only=True,
                                                           trust_remote_code=False)
        pieces, added = self.inner.get_vocab(), self.inner.added_tokens_decoder
        if len(pieces) <= len(added):   # transformers makes an empty one of missing files
            raise ValueError(f"{self.name}: transformers finds no vocabulary in its files")
        self.n_vocab, self.eot_token = 1 + max(pieces.values()), self.inner.eos_token_id
        self.chat_template = self.inner.chat_template
        self.hidden = {i for i, token in added.items() if token.special}
        self.unsure = {i for piece, i in pieces.items() if re.fullmatch("<0x..>", piece)}   # bytes

    def encode(self, text, begin=True, **_):
        """Token ids, also of special tokens that stand in it; with what begins every text."""
        with one_line(f"{self.name} cannot encode {text!r:.60}", Exception):   # half a character
            # verbose: it would warn of a long prompt. Whether it fits is a Request's question.
            return self.inner.encode(text, add_special_tokens=begin, verbose=False)

    encode_ordinary = encode   # special tokens that stand in it are tokens here, too

    def encode_chat(self, messages):
        """Token ids of [{"role": ..., "content": text}, ...] and the beginning of an answer."""
        with one_line(f"{self.name}: its chat template fails", Exception):   # it is a program
            text = self.inner.apply_chat_template(messages, tokenize=False,
                                                  add_generation_prompt=True)
        return self.encode(text, begin=False)

    def decode(self, tokens):
        pieces = self.inner.convert_ids_to_tokens(tokens)
        return self.inner.convert_tokens_to_string([
            UNKNOWN if piece is None else piece for piece in pieces])

    def decode_single_token_bytes(self, token):
        """Of a token within a text: at its beginning, some lack their blank."""
        text = self.decode([token, token]).removeprefix(self.decode([token]))
        piece = self.inner.convert_ids_to_tokens(token) or UNKNOWN
        if token in self.unsure:
            return bytes.fromhex(piece[3:5])
        part = UNKNOWN in text and byte_of().keys() >= {*piece}   # of a character
        return bytes(byte_of()[c] for c in piece) if part else text.encode()
