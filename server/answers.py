"""From a body to requests, and from their tokens to an answer in OpenAI's form."""
import codecs
import random
import time
from functools import cache
from uuid import uuid4

from loading.load import bytes_of
from request import Request
from server.schemas import Chat


def requests_of(body, tokenizer, config, room):
    """
    The requests that a Completion or a Chat asks for: n for each prompt. ValueError if one is bad.

    room: tokens of one request that can be kept
    """
    if isinstance(body, Chat):
        prompts, default = [chat_prompt(body.messages, tokenizer, config)], room
        asked = body.max_completion_tokens or body.max_tokens
    else:
        prompts, default, asked = body.prompts, 16, body.max_tokens
    seed, requests = random.getrandbits(32) if body.seed is None else body.seed, []
    for i, prompt in enumerate(prompts):
        name = f"prompt[{i}]" if len(prompts) > 1 else "the prompt"
        tokens = encode(prompt, tokenizer, config) if isinstance(prompt, str) else prompt
        most = room + 1 - len(tokens)   # the last token is never computed, and needs no room
        if (asked or 1) > most:
            why = f"max_tokens must be at most {most}, not {asked}" if most > 0 else "too long"
            raise ValueError(f"{name} has {len(tokens)} tokens, there is room for {room}: {why}")
        requests += [Request(
            tokens, asked or min(default, most), body.temperature, body.top_k, top_p=body.top_p,
            seed=seed + j, eos_token=None if body.ignore_eos else tokenizer.eot_token)
            for j in range(body.n)]
    return requests


def chat_prompt(messages, tokenizer, config):
    """Its tokens, as the tokenizer's chat template has it; without one, a line a message."""
    texts = [message.content if isinstance(message.content, str)
             else "".join(part.text for part in message.content) for message in messages]
    if getattr(tokenizer, "chat_template", None):
        check_size("".join(texts), tokenizer, config)
        return tokenizer.encode_chat([message.model_dump(exclude_none=True) | {"content": text}
                                      for message, text in zip(messages, texts)])
    lines = [f"{message.role}: {text}" for message, text in zip(messages, texts)]
    return encode("\n".join([*lines, "assistant:"]), tokenizer, config)


def encode(text, tokenizer, config):
    """Its tokens. ValueError if they are too many."""
    check_size(text, tokenizer, config)
    # tiktoken's `encode` refuses texts that contain the name of a special token
    return getattr(tokenizer, "encode_ordinary", tokenizer.encode)(text)


def check_size(text, tokenizer, config):
    """ValueError, before any work, if it is too long whatever its tokens are."""
    size, longest = len(text.encode()), max_token_bytes(tokenizer)
    if size > config.block_size * longest:
        raise ValueError(f"prompt of {size} bytes: even {config.block_size} tokens, as many as "
                         f"the model takes, have at most {config.block_size * longest}")


@cache
def max_token_bytes(tokenizer):
    return max(len(bytes_of(tokenizer, token)) for token in range(tokenizer.n_vocab))


class Text:
    """Tokens become text: whole characters only, and nothing that may yet be a stop string."""

    def __init__(self, tokenizer, stops):
        self.tokenizer, self.stops = tokenizer, [stops] if isinstance(stops, str) else stops
        self.decoder, self.held = codecs.getincrementaldecoder("utf-8")("replace"), ""
        self.tokens, self.stopped = 0, False

    def add(self, token):
        """The text that is certain now. token None: the end, so what was held is, too."""
        self.tokens += token is not None
        hidden = token in (None, self.tokenizer.eot_token)
        new = b"" if hidden else bytes_of(self.tokenizer, token)
        text = self.held + self.decoder.decode(new, token is None)
        found = [text.index(stop) for stop in self.stops if stop in text]
        self.stopped = bool(found)
        begun = [n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        hold = max(begun, default=0) if token is not None else 0
        end = min(found, default=len(text) - hold)
        self.held = text[end:]
        return text[:end]


class Form:
    """The answer to one body: whole, or a stream's parts. model: its name"""

    def __init__(self, body, requests, model):
        self.chat, self.stream = isinstance(body, Chat), body.stream
        self.same = {"id": f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid4().hex}", "model": model,
                     "created": int(time.time())}
        self.begun = set()   # indices of choices that have a role
        self.prompt_tokens = sum(len(request.prompt) for request in requests) // body.n

    def fill(self, choices, tokens=None):
        """choices: [(index, text, finish reason), ...]; tokens: how many were generated"""
        kind, place = ("chat.completion.chunk", "delta") if self.stream else (
            "chat.completion", "message")
        body = {**self.same, "object": kind if self.chat else "text_completion", "choices": []}
        for i, text, reason in choices:
            role = {} if i in self.begun else {"role": "assistant"}   # only the first part has it
            self.begun.add(i)
            content = {place: {**role, "content": text}} if self.chat else {"text": text}
            body["choices"].append(
                {"index": i, "finish_reason": reason, "logprobs": None, **content})
        if tokens is not None:
            n = self.prompt_tokens
            body["usage"] = {"prompt_tokens": n, "completion_tokens": tokens,
                             "total_tokens": n + tokens}
        return body
