"""
What a body may hold, in OpenAI's names, and which requests it asks for. FastAPI checks each body,
and makes /docs from this.
"""
import random
from math import inf
from typing import Annotated, ClassVar, Literal

import pydantic
from pydantic import BaseModel, Field

from request import Request

# They ask for what is done anyway. Any other value is refused.
NO_EFFECT = {"presence_penalty": [0], "frequency_penalty": [0], "repetition_penalty": [1],
             "best_of": [1], "echo": [False], "suffix": [""], "logit_bias": [{}], "tools": [[]],
             "tool_choice": ["none", "auto"], "response_format": [{"type": "text"}],
             "logprobs": [False]}


def must_be(forms):
    """For a field that may have several forms: pydantic would complain about each of them."""
    def check(value, usual):
        try:
            return usual(value)
        except pydantic.ValidationError:
            raise ValueError(f"it must be {forms}") from None
    return pydantic.WrapValidator(check)


# With a limit pydantic looks at the characters: JSON can say half of one, a lone surrogate. And
# tiktoken's stack overflows at a million spaces.
Text = Annotated[str, Field(max_length=2**17)]
Words = Annotated[str, Field(min_length=1, max_length=2**17)]
Stop = Annotated[str, Field(min_length=1, max_length=200)]
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class Strict(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """Unknown fields and other types are refused; null is as good as nothing."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def without_effect(cls, fields):
        if not isinstance(fields, dict):
            return fields   # pydantic refuses it
        return {name: value for name, value in fields.items()
                if value is not None and value not in NO_EFFECT.get(name, ())}


class Sampling(Strict):
    """Of completions and chats."""
    model: Text | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_k: int | None = Field(None, ge=1)
    top_p: float = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1, le=128, description="answers to each prompt; the i-th has seed + i")
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: Annotated[Stop | Annotated[list[Stop], Field(max_length=4)],
                    must_be("a text or at most 4 texts, of 1 to 200 characters")] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] = {}
    user: Text = ""

    def requests(self, tokenizer, room):
        """n for each prompt. ValueError for a prompt without room for so many tokens."""
        seed, requests = random.getrandbits(32) if self.seed is None else self.seed, []
        for i, tokens in enumerate(self.prompts(tokenizer)):
            most = room + 1 - len(tokens)   # the last token is never computed, and needs no room
            asked = self.max_tokens or max(1, min(self.usual, most))
            if asked > most:
                raise ValueError(f"prompt {i} has {len(tokens)} tokens, there is room for {room}: "
                                 f"max_tokens can be at most {max(most, 0)}, not {asked}")
            eos_token = None if self.ignore_eos else tokenizer.eot_token
            requests += [Request(tokens, asked, self.temperature, self.top_k, top_p=self.top_p,
                                 seed=seed + j, eos_token=eos_token) for j in range(self.n)]
        return requests


class Completion(Sampling):
    usual: ClassVar = 16   # max_tokens, if there is room
    # of a whole answer, and of a piece of a stream: (where a choice's text is, "object")
    forms: ClassVar = ("text", "text_completion"), ("text", "text_completion")
    prompt: Annotated[
        Words | Tokens | Annotated[list[Words] | list[Tokens], Field(min_length=1)],
        must_be("a text of 1 to 131072 characters, a list of token ids, or several of these")]

    def prompts(self, tokenizer):
        """The tokens of each."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        # as the tokenizer's own `encode`: special tokens in it are text to tiktoken, not to others
        return [tokenizer.encode(prompt, disallowed_special=()) if isinstance(prompt, str)
                else prompt for prompt in ([self.prompt] if one else self.prompt)]


class Part(Strict):
    type: Literal["text"]
    text: Text


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text | list[Part], must_be('a text, or [{"type": "text", ...}]')]
    name: Text | None = None


class Chat(Sampling):
    usual: ClassVar = inf
    forms: ClassVar = ("message", "chat.completion"), ("delta", "chat.completion.chunk")
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(
        None, ge=1, validation_alias=pydantic.AliasChoices("max_completion_tokens", "max_tokens"))

    def prompts(self, tokenizer):
        """One, as the tokenizer's chat template has it; without one, a line a message."""
        messages = [message.model_dump(exclude_none=True) for message in self.messages]
        for message in messages:
            if isinstance(message["content"], list):
                message["content"] = "".join(part["text"] for part in message["content"])
        if getattr(tokenizer, "chat_template", None):
            return [tokenizer.encode_chat(messages)]
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        return [tokenizer.encode_ordinary("\n".join([*lines, "assistant:"]))]


def error_of(status, message):
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def sentence(error):
    """What is wrong with a body, in words, from one of pydantic's errors."""
    field, text = ".".join(map(str, error["loc"][1:])), error["msg"].removeprefix("Value error, ")
    if error["type"] == "json_invalid":
        return f"the body is not JSON: {error['ctx']['error']}"
    if not field:
        return "the body must be a JSON object, sent with Content-Type: application/json"
    return f"{field!a:.99}: {text}"
