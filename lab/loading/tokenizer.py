"""
Tokenizers, all with those methods of `tiktoken.Encoding` that this repository calls.

The built-in model has its own byte-level BPE of 1,024 tokens, in a local ranks file in tiktoken's
format (one line per token: base64 of its bytes, and its rank). GPT-2's comes with tiktoken, which
downloads it once. Hugging Face's package tokenizers reads those of other models.
"""
import base64
import json
import re
import secrets
from datetime import datetime
from functools import cache, cached_property, partial
from pathlib import Path

import tiktoken

from toolbox.validate import is_whole, one_line
from toolbox.weights import read_object

END_OF_TEXT = "<|endoftext|>"
# GPT-2's own pattern: text is first cut into these pieces, and no token crosses a cut
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
FILES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "spiece.model",
         "tokenizer.model", "sentencepiece.bpe.model")   # a folder with one of them has a tokenizer
NOISE = secrets.token_hex(8)   # nobody can type it


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

    def has(self, token):
        return token < self.n_vocab


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


def said(file):
    """The object in a .json file; an empty one if there is no such file."""
    return read_object(file) if file.is_file() else {}


def end_of(folder, usual):
    """
    What ends an answer of a folder's model: a token, a tuple of several, or None. As transformers
    has it: generation_config.json says so, or else config.json, or else the tokenizer, `usual`.
    """
    for file in "generation_config.json", "config.json":
        given = said(folder / file).get("eos_token_id")
        if given is not None:
            ends = given if isinstance(given, list) else [given]
            if not all(is_whole(token, 0) for token in ends):
                raise ValueError(f"{file}: eos_token_id must be a token id, or a list of them, "
                                 f"not {given!r:.60}")
            return ends[0] if len(ends) == 1 else tuple(ends)
    return usual


# --- tokenizers that others have made -------------------------------------------------------------

@cache
def templates():
    """Where chat templates, which are programs by anybody, run: as transformers does it."""
    from jinja2 import TemplateError  # it comes with torch
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def fail(message):
        raise TemplateError(message)

    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                            extensions=["jinja2.ext.loopcontrols"])
    sandbox.filters["tojson"] = partial(json.dumps, ensure_ascii=False)   # its own is for HTML
    sandbox.globals |= {"raise_exception": fail,
                        "strftime_now": lambda form: datetime.now().strftime(form)}
    return sandbox


class FromFolder:
    """
    A folder's tokenizer, with the methods and attributes of Encoding. ValueError if it cannot be
    read, or the package tokenizers is missing.
    """

    def __init__(self, folder, kind):
        self.name = f"tokenizer '{folder / 'tokenizer.json'}'"
        with one_line(f"{self.name}: tokenizers (pip install tokenizers) cannot read it",
                      Exception):   # the package has no exceptions of its own
            self.inner, self.named, self.chat_template = read(folder, kind)
        added, pieces = self.inner.get_added_tokens_decoder(), self.inner.get_vocab()
        special = {i: token.content for i, token in added.items() if token.special}
        self.hidden, self.disguise = {*special}, {text: text + NOISE for text in special.values()}
        self.n_vocab = 1 + max(pieces.values())
        self.eot_token = pieces.get(self.named.get("eos_token"))
        self.unsure = {i for piece, i in pieces.items() if re.fullmatch("<0x..>", piece)}   # bytes

    def has(self, token):
        return self.inner.id_to_token(token) is not None

    def ids(self, inner, text, begin=False):
        with one_line(f"{self.name} cannot encode {text!r:.60}", Exception):   # half a character
            return inner.encode(text, add_special_tokens=begin).ids

    def encode(self, text, **_):
        """Token ids, those of special tokens that stand in it, too; with what begins every text."""
        return self.ids(self.inner, text, True)

    def encode_ordinary(self, text):
        """The same, but special tokens that stand in it are text."""
        return self.ids(self.disguised, text, True)

    def encode_chat(self, messages):
        """
        Token ids of [{"role": ..., "content": text}, ...] and the beginning of an answer. Special
        tokens are the template's alone; in a message they are text.
        """
        values = [value for message in messages for value in message.values()]
        if self.hidden.isdisjoint(i for value in values for i in self.ids(self.inner, str(value))):
            return self.ids(self.inner, self.render(messages))
        # Those of the messages are elsewhere while the template's get their disguise.
        away = {text: f"{NOISE}{i}." for i, text in enumerate(self.disguise)}
        back = {place: text for text, place in away.items()}
        text = self.render([{key: renamed(value, away) if isinstance(value, str) else value
                             for key, value in message.items()} for message in messages])
        return self.ids(self.disguised, renamed(text, self.disguise | back))

    def render(self, messages):
        with one_line(f"{self.name}: its chat template fails", Exception):   # it is a program
            return templates().from_string(self.chat_template).render(
                self.named, messages=messages, add_generation_prompt=True)

    @cached_property
    def disguised(self):
        """A tokenizer whose special tokens have other names."""
        names = [(json.dumps(name, ensure_ascii=False) for name in names)
                 for names in self.disguise.items()]
        return type(self.inner).from_str(renamed(self.inner.to_str(), dict(names)))

    def decode(self, tokens):
        return self.inner.decode(tokens, skip_special_tokens=False)

    def decode_single_token_bytes(self, token):
        """Of a token within a text: at its beginning, some lack their blank."""
        text, piece = self.decode([token, token]), self.inner.id_to_token(token)
        text = text.removeprefix(self.decode([token]))
        if token in self.unsure:
            return bytes.fromhex(piece[3:5])
        part = "\ufffd" in text and byte_of().keys() >= {*piece}   # of a character
        return bytes(byte_of()[c] for c in piece) if part else text.encode()


def renamed(text, names):
    """A text with new names, {old: new}; of two that begin alike, the longer one is meant."""
    old = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    return re.sub(old, lambda found: names[found[0]], text) if names else text


def read(folder, kind):
    """A folder's tokenizers.Tokenizer, {"eos_token": text, ...}, and its chat template or None."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    config = {"eos_token": END_OF_TEXT} if kind == "gpt2" else {}
    config |= said(folder / "special_tokens_map.json") | said(folder / "tokenizer_config.json")
    if kind != "gpt2" or (folder / "tokenizer.json").is_file():
        inner = Tokenizer.from_file(str(folder / "tokenizer.json"))
    else:   # the two files that GPT-2 came with
        inner = Tokenizer(models.BPE.from_file(str(folder / "vocab.json"),
                                               str(folder / "merges.txt")))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(config.get("add_prefix_space", False))
        inner.decoder = decoders.ByteLevel()
    inner.no_truncation()   # a file may ask to cut and to pad every text
    inner.no_padding()
    # the other files may add tokens, or call some special
    named = {key: value["content"] if isinstance(value, dict) else value for key, value in
             config.items() if key.endswith("_token") and isinstance(value, dict | str)}
    more = {inner.token_to_id(text): {"content": text, "special": True} for text in named.values()}
    more |= {i: {"content": text} for text, i in said(folder / "added_tokens.json").items()}
    more |= {int(i): token for i, token in config.get("added_tokens_decoder", {}).items()}
    there = {token.content for token in inner.get_added_tokens_decoder().values()}
    for i in sorted(more.keys() - {None}):
        token = AddedToken(**{key: value for key, value in more[i].items() if key != "__type"})
        if token.content not in there:
            inner.add_tokens([token])
            if inner.token_to_id(token.content) != i:
                raise ValueError(f"its added token {token.content!r} cannot have the number {i}")
    template = config.get("chat_template")
    if isinstance(template, list):   # several, by name
        template = {each["name"]: each["template"] for each in template}["default"]
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return inner, named, template
