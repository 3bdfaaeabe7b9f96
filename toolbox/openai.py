"""What goes in and out of beyond/serve.py in OpenAI's form. openapi.json says what bodies hold."""
import codecs
import json
import random
import time
from functools import cache
from pathlib import Path

from loading.load import bytes_of
from request import Request


def spec_of(block_size):
    """openapi.json, for a model with this limit: no list in a body may be longer."""
    text = Path(__file__).with_name("openapi.json").read_text(encoding="utf-8")
    return json.loads(text.replace('"block_size"', str(block_size)))


def request_of(body, tokenizer, config, room):
    """The Request that a body asks for. ValueError if it is bad. room: tokens that can be kept"""
    chat = "messages" in body
    prompt = (chat_prompt(body["messages"], tokenizer, config) if chat
              else body["prompt"] if isinstance(body["prompt"], list)
              else encode(body["prompt"], tokenizer, config))
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    return Request(prompt, limit or (max(1, room + 1 - len(prompt)) if chat else 16),
                   temperature=body.get("temperature", 1.0), top_k=body.get("top_k"),
                   seed=body.get("seed", random.getrandbits(32)),
                   eos_token=None if body.get("ignore_eos") else tokenizer.eot_token)


def chat_prompt(messages, tokenizer, config):
    """As the tokenizer's chat template has it; without one, a line for each message."""
    messages = [{**message, "content": "".join(part["text"] for part in message["content"])}
                if isinstance(message["content"], list) else message for message in messages]
    if getattr(tokenizer, "chat_template", None):
        check_size("".join(message["content"] for message in messages), tokenizer, config)
        return tokenizer.encode_chat(messages)
    lines = [f"{message['role']}: {message['content']}" for message in messages]
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

    def __init__(self, tokenizer, body):
        stops = body.get("stop", [])
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
    """The answers to one request: whole, or in parts."""

    def __init__(self, body, request, text, model):
        self.chat, self.request, self.text = "messages" in body, request, text
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{request.name}"
        self.model, self.created = model, int(time.time())
        self.options, self.role = body.get("stream_options", {}), {"role": "assistant"}

    def whole(self, text, reason):
        return {**self.part(text, reason, "message", ""), **self.usage()}

    def part(self, text, reason, place="delta", kind=".chunk"):
        choice = {"index": 0, "finish_reason": reason, "logprobs": None}
        choice |= {place: {**self.role, "content": text}} if self.chat else {"text": text}
        self.role = {}   # only the first part has it
        return {"id": self.id, "model": self.model, "created": self.created, "choices": [choice],
                "object": "chat.completion" + kind if self.chat else "text_completion",
                **(self.usage() if self.options.get("continuous_usage_stats") else {})}

    def last(self):   # of a stream, if its client wants to know the usage
        return {**self.part("", None), "choices": [], **self.usage()}

    def usage(self):
        n, m = len(self.request.prompt), self.text.tokens
        return {"usage": {"prompt_tokens": n, "completion_tokens": m, "total_tokens": n + m}}
