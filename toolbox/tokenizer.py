"""
Tokenizers, all as `tiktoken.Encoding` or with its methods.

The built-in model has its own byte-level BPE of 1,024 tokens, in a local ranks file in tiktoken's
format (one line per token: base64 of its bytes, and its rank). GPT-2's comes with tiktoken, which
downloads it once. Other models bring a tokenizer.json, which needs the package transformers.
"""
import base64
from functools import cached_property
from pathlib import Path

import tiktoken

from toolbox.validate import one_line

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
    with one_line(f"tokenizer '{path}': not a ranks file in tiktoken's format"):
        lines = [line.split() for line in Path(path).read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        return from_ranks(ranks, Path(path).stem)


def byte_of():
    """
    {character: byte}. GPT-2's files write each byte as one printable character: printable Latin-1
    as itself, the others from 256 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1),
                 *range(ord("®"), ord("ÿ") + 1)]
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
        path = Path(folder) / "tokenizer.json"
        self.name, self.chats = f"tokenizer '{path}'", False
        try:
            from transformers import PreTrainedTokenizerFast
        except ImportError:
            raise ValueError(f"{self.name}: it needs the package transformers: "
                             "pip install transformers") from None
        if not path.is_file():
            raise ValueError(f"{self.name}: there is no such file")
        with one_line(f"{self.name}: it cannot be read"):
            self.inner = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
            self.n_vocab = 1 + max(self.inner.get_vocab().values())
        self.eot_token, self.chat_template = self.inner.eos_token_id, self.inner.chat_template
        self.special = {token: text.content
                        for token, text in self.inner.added_tokens_decoder.items()}

    def encode(self, text, **_):
        """Token ids; with what the tokenizer puts in front of a text, or in the chat template."""
        if self.chats:
            return self.encode_chat([{"role": "user", "content": text}])
        return self.inner.encode(text, verbose=False)   # silent about texts beyond its context

    def encode_chat(self, messages):
        """Token ids of [{"role": ..., "content": text}, ...] and the beginning of an answer."""
        with one_line(f"{self.name}: its chat template fails"):   # it is a program
            text = self.inner.apply_chat_template(messages, add_generation_prompt=True,
                                                  tokenize=False)
        return self.inner.encode(text, add_special_tokens=False, verbose=False)

    @cached_property
    def bytes_of(self):   # a byte-level piece -> its bytes; or else it is text, as in sentencepiece
        table = byte_of()
        if "ByteLevel" in repr(self.inner.backend_tokenizer.decoder):
            return lambda piece: bytes(table[c] for c in piece)
        return lambda piece: (bytes.fromhex(piece[3:5]) if piece.startswith("<0x")
                              else piece.replace("▁", " ").encode())

    def decode_single_token_bytes(self, token):
        if token in self.special:
            return self.special[token].encode()
        piece = self.inner.convert_ids_to_tokens(token)
        return "\ufffd".encode() if piece is None else self.bytes_of(piece)

    def decode(self, tokens):
        pieces = b"".join(map(self.decode_single_token_bytes, tokens))
        return pieces.decode("utf-8", errors="replace")


def use_chat_template(tokenizer):
    """From now on, `encode` takes a text as a user's message in the model's own template."""
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("--chat: this model has no chat template")
    tokenizer.chats = True
