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

# With a limit pydantic looks at the characters: JSON can say half of one, a lone surrogate. And
# tiktoken's stack overflows at a million spaces.
Text = Annotated[str, Field(max_length=2**17)]


def must_be(forms):
    """For a field that may have several forms: pydantic would complain about each of them."""
    def check(value, usual):
        try:
            return usual(value)
        except pydantic.ValidationError:
            raise ValueError(f"it must be {forms}") from None
    return pydantic.WrapValidator(check)


Words = Annotated[str, Field(min_length=1, max_length=2**17)]
Stop = Annotated[str, Field(min_length=1, max_length=200)]
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]

# Of a field that is not served: the value that asks for what is done anyway. Any other is refused.
Off, Empty = Literal[False], Annotated[list, Field(max_length=0)]
Nothing, NoText = Annotated[dict, Field(max_length=0)], Annotated[str, Field(max_length=0)]
Zero, One = Annotated[float, Field(ge=0, le=0)], Annotated[float, Field(ge=1, le=1)]


class Strict(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """Unknown fields and other types are refused; null is as good as nothing."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def without_null(cls, fields):
        if not isinstance(fields, dict):
            return fields   # pydantic refuses it
        return {name: value for name, value in fields.items() if value is not None}


class StreamOptions(Strict):
    include_usage: bool = False            # a whole answer always has it
    continuous_usage_stats: bool = False   # so far, in each piece
    include_obfuscation: Off = False


class Sampling(Strict):
    """Of completions and chats."""
    model: Text | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1, description="the newer max_tokens")
    temperature: float = Field(1.0, ge=0, le=2)
    top_k: int = Field(-1, ge=-1, description="0, -1: of all tokens")
    top_p: float = Field(1.0, ge=0, le=1, description="0: the most likely token only")
    n: int = Field(1, ge=1, le=128, description="answers to each prompt; the i-th has seed + i")
    best_of: int | None = Field(None, description="as many as n")
    seed: int | None = Field(None, ge=-2**63, lt=2**63,
                             description="null: each answer has its own")
    stop: Annotated[Stop | Annotated[list[Stop], Field(max_length=4)],
                    must_be("a text or at most 4 texts, of 1 to 200 characters")] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: Text = ""   # not served, like the next ones
    presence_penalty: Zero = 0
    frequency_penalty: Zero = 0
    repetition_penalty: One = 1
    min_p: Zero = 0
    min_tokens: Zero = 0
    logit_bias: Nothing = {}
    metadata: Nothing = {}
    store: Off = False

    def requests(self, tokenizer, room):
        """n for each prompt. ValueError for fields that contradict each other, or lack of room."""
        for one, other in ("best_of", "n"), ("max_completion_tokens", "max_tokens"):
            found = getattr(self, one), getattr(self, other)
            if None not in found and found[0] != found[1]:
                raise ValueError(f"'{one}': it must be {other}, {found[1]}, not {found[0]}")
        if "stream_options" in self.model_fields_set and not self.stream:
            raise ValueError("'stream_options': it needs \"stream\": true")
        limit, requests = self.max_tokens or self.max_completion_tokens, []
        prompts = self.prompts(tokenizer)
        for i, tokens in enumerate(prompts):
            most = room + 1 - len(tokens)   # the last token is never computed, and needs no room
            asked = limit or max(1, min(self.usual, most))
            if asked > most:
                limits = f": max_tokens can be at most {most}, not {asked}" if most > 0 else ""
                which = f"prompt {i}" if len(prompts) > 1 else "the prompt"
                raise ValueError(f"{which} has {len(tokens)} tokens, there is room for {room}"
                                 f"{limits}")
            eos_token = None if self.ignore_eos else tokenizer.eot_token
            temperature = self.temperature if self.top_p else 0
            for j in range(self.n):
                seed = random.getrandbits(63) if self.seed is None else self.seed + j
                seed %= 2**64   # to Python, -1 and 1 are the same seed
                requests.append(Request(tokens, asked, temperature, max(self.top_k, 0) or None,
                                        top_p=self.top_p or 1, seed=seed, eos_token=eos_token))
        return requests


class Completion(Sampling):
    usual: ClassVar = 16   # max_tokens, if there is room
    # of a whole answer, and of a piece of a stream: (where a choice's text is, "object")
    forms: ClassVar = ("text", "text_completion"), ("text", "text_completion")
    prompt: Annotated[
        Words | Tokens | Annotated[list[Words] | list[Tokens], Field(min_length=1)],
        must_be("a text of 1 to 131072 characters, a list of token ids, or several of these")]
    echo: Off = False
    suffix: NoText = ""
    logprobs: Zero | None = Field(None, description="0: null is all that an answer has")

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
    tool_calls: Empty = []    # as clients send an answer back
    annotations: Empty = []


class Chat(Sampling):
    usual: ClassVar = inf
    forms: ClassVar = ("message", "chat.completion"), ("delta", "chat.completion.chunk")
    messages: list[Message] = Field(min_length=1)
    tools: Empty = []
    tool_choice: Literal["none"] = "none"
    parallel_tool_calls: bool = True   # without tools there are no calls
    functions: Empty = []              # the older tools, and tool_choice
    function_call: Literal["none"] = "none"
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] = ["text"]
    logprobs: Off = False
    top_logprobs: Zero = 0
    response_format: dict[Literal["type"], Literal["text"]] = {}

    def prompts(self, tokenizer):
        """One, as the tokenizer's chat template has it; without one, a line a message."""
        messages = [message.model_dump(include={"role", "content", "name"}, exclude_none=True)
                    for message in self.messages]
        for message in messages:
            if isinstance(message["content"], list):
                message["content"] = "".join(part["text"] for part in message["content"])
        if getattr(tokenizer, "chat_template", None):
            return [tokenizer.encode_chat(messages)]
        lines = [f"{message['role']}: {message['content']}" for message in messages]
        return [tokenizer.encode_ordinary("\n".join([*lines, "assistant:"]))]


def error_of(status, message):
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": str(status)}}


def sentence(error):
    """What is wrong with a body, in words, from one of pydantic's errors."""
    field, text = ".".join(map(str, error["loc"][1:])), error["msg"].removeprefix("Value error, ")
    if error["type"] == "json_invalid":
        return f"the body is not JSON: {error['ctx']['error']}"
    if not field:
        return "the body must be a JSON object, sent with Content-Type: application/json"
    return f"{field!a:.99}: {text}"
