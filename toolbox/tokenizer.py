"""
Tokenizers, all as `tiktoken.Encoding` or with its methods.

The built-in model has its own byte-level BPE of 1,024 tokens, in a local ranks file in tiktoken's
format (one line per token: base64 of its bytes, and its rank). GPT-2's comes with tiktoken, which
downloads it once. Other models bring a tokenizer.json, which needs the package tokenizers.
"""
import base64
import json
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path

import tiktoken

from toolbox.validate import is_whole

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


FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
           "mask_token")   # that a chat template may name


class FromJson:
    """
    A folder's tokenizer.json, with the methods of tiktoken.Encoding that this repository calls.
    ValueError if it cannot be read, or the package tokenizers is missing.
    """

    def __init__(self, folder):
        self.folder, self.chats = Path(folder), False
        path = self.folder / FILES[0]
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ValueError(f"tokenizer '{path}': it needs the package tokenizers: "
                             "pip install tokenizers") from None
        if not path.is_file():
            raise ValueError(f"tokenizer '{path}': there is no such file")
        try:
            self.inner = Tokenizer.from_file(str(path))
            self.inner.no_truncation()   # a file may ask to cut or to pad every text
            self.inner.no_padding()
            self.settings = {}
            for file in "config.json", FILES[1]:
                if (self.folder / file).is_file():
                    self.settings |= json.loads((self.folder / file).read_text(encoding="utf-8"))
        except Exception as error:   # tokenizers raises nothing more special
            raise ValueError(f"tokenizer '{path}': it cannot be read "
                             f"({str(error).splitlines()[0]:.100})") from None
        self.special = {token: text.content
                        for token, text in self.inner.get_added_tokens_decoder().items()}
        vocab = self.inner.get_vocab(with_added_tokens=True)
        if not vocab:
            raise ValueError(f"tokenizer '{path}': its vocabulary is empty")
        self.n_vocab, ids = 1 + max(vocab.values()), self.settings.get("eos_token_id")
        self.eot_token = vocab.get(self.text_of("eos_token"))
        if self.eot_token is None and ids is not None:   # then the first of config.json's
            self.eot_token = ids[0] if isinstance(ids, list) and ids else ids
            if not is_whole(self.eot_token, 0):
                raise ValueError(f"tokenizer '{folder}': eos_token_id must be a token id or a "
                                 f"list of them, not {ids!r:.60}")

    def text_of(self, key):   # of a special token; None if there is none
        value = self.settings.get(key) or None
        text = value.get("content") if isinstance(value, dict) else value
        if value is not None and not isinstance(text, str):
            raise ValueError(f"tokenizer '{self.folder}': {key} must be a string or an object "
                             f"with its content, not {value!r:.60}")
        return text

    def encode(self, text, **_):
        """Token ids; with what the tokenizer puts in front of a text, or in the chat template."""
        if self.chats:
            return self.encode_chat([{"role": "user", "content": text}])
        return self.inner.encode(text).ids

    @cached_property
    def bytes_of(self):   # a byte-level piece -> its bytes; or else it is text, as in sentencepiece
        table, level = byte_of(), json.loads(self.inner.to_str())["decoder"] or {}
        if "ByteLevel" in json.dumps(level):
            return lambda piece: bytes(table[c] for c in piece)
        return lambda piece: (bytes.fromhex(piece[3:5]) if piece.startswith("<0x")
                              else piece.replace("▁", " ").encode())

    def decode_single_token_bytes(self, token):
        if token in self.special:
            return self.special[token].encode()
        piece = self.inner.id_to_token(token)
        return "\ufffd".encode() if piece is None else self.bytes_of(piece)

    def decode(self, tokens):
        pieces = b"".join(map(self.decode_single_token_bytes, tokens))
        return pieces.decode("utf-8", errors="replace")

    @cached_property
    def chat_template(self):
        """messages -> text, in the model's own form; None if it has no template."""
        from jinja2 import TemplateError  # torch brings it
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):   # a block around answers to train on: it changes no text
            tags = {"generation"}

            def parse(self, parser):
                next(parser.stream)
                return parser.parse_statements(["name:endgeneration"], drop_needle=True)

        def refuse(message):
            raise TemplateError(message)

        @contextmanager
        def one_line():   # a template is a program, which can fail in any way
            try:
                yield
            except Exception as error:
                raise ValueError(f"tokenizer '{self.folder}': its chat template fails: " +
                                 f"{type(error).__name__}: {error}".splitlines()[0]) from None

        environment = ImmutableSandboxedEnvironment(   # all as in transformers
            trim_blocks=True, lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", Generation])
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals.update(
            {key: text for key in SPECIAL if (text := self.text_of(key)) is not None},
            raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form),
            tools=None, documents=None)
        with one_line():
            path, source = self.folder / FILES[2], self.settings.get("chat_template")
            if path.is_file():
                source = path.read_text(encoding="utf-8")
            if isinstance(source, list):   # several, by name
                source = {each["name"]: each["template"] for each in source}
            if isinstance(source, dict):
                source = source.get("default")
            template = environment.from_string(source) if source else None

        def render(messages):
            with one_line():
                return template.render(messages=messages, add_generation_prompt=True)

        return template and render

    def encode_chat(self, messages):
        """Token ids of [{"role": ..., "content": text}, ...] and the beginning of an answer."""
        return self.inner.encode(self.chat_template(messages), add_special_tokens=False).ids


def use_chat_template(tokenizer):
    """From now on, `encode` takes a text as a user's message in the model's own template."""
    if not isinstance(tokenizer, FromJson):
        raise ValueError("--chat: this model has no chat template")
    if not tokenizer.chat_template:
        raise ValueError(f"tokenizer '{tokenizer.folder}': it has no chat template")
    tokenizer.chats = True
