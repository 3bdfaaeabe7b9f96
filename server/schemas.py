"""What a body may hold, in OpenAI's names. FastAPI checks each body, and makes /docs from this."""
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

# of the fields that may have several forms; pydantic would complain about each of them
FORMS = {
    "prompt": "a text, a list of token ids, or a list of several such prompts; none may be empty",
    "stop": "a text or at most 4 texts, of 1 to 200 characters",
    "content": 'a text, or a list of {"type": "text", "text": ...}'}
# They ask for what is done anyway. Any other value is refused.
NO_EFFECT = {"presence_penalty": [0], "frequency_penalty": [0], "repetition_penalty": [1],
             "best_of": [1], "echo": [False], "suffix": [""], "logit_bias": [{}], "tools": [[]],
             "tool_choice": ["none", "auto"], "response_format": [{"type": "text"}],
             "logprobs": [False]}


def whole(text):
    text.encode()   # JSON can say half a character, a lone surrogate: this is a ValueError
    return text


class Strict(BaseModel):
    """Unknown fields and other types are refused; null is as good as nothing."""
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def known(cls, fields):
        if not isinstance(fields, dict):
            return fields   # pydantic refuses it
        given = {name: value for name, value in fields.items()
                 if value is not None and value not in NO_EFFECT.get(name, ())}
        if unknown := given.keys() - cls.model_fields.keys():
            raise ValueError(f"unsupported field {min(unknown)!a:.60}; supported are "
                             f"{', '.join(cls.model_fields)}")
        return given


Text = Annotated[str, AfterValidator(whole)]
Stop = Annotated[Text, Field(min_length=1, max_length=200)]
Words = Annotated[Text, Field(min_length=1)]
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class StreamOptions(Strict):
    include_usage: bool = False


class Sampling(Strict):
    """Of completions and chats."""
    model: Text | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_k: int | None = Field(None, ge=1)
    top_p: float = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1, le=128, description="answers to each prompt; the i-th has seed + i")
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    user: Text = ""


class Completion(Sampling):
    prompt: Words | Tokens | Annotated[list[Words] | list[Tokens], Field(min_length=1)]

    @property
    def prompts(self):
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if one else self.prompt


class Part(Strict):
    type: Literal["text"]
    text: Text


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[Part]
    name: Text | None = None


class Chat(Sampling):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)


class Ask(Completion):
    """Of the live page: tab is the number of the page that asks."""
    tab: int = Field(ge=0)


class Control(Strict):
    """Of the live page's buttons. speed: steps a second, 0 for all."""
    paused: bool | None = None
    speed: float | None = Field(None, ge=0, le=1000)
    steps: int = Field(0, ge=0, le=1000)


def error_of(status, message):
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def sentence(errors):
    """What is wrong with a body, in words, from pydantic's errors."""
    error = next((each for each in errors if each["type"] == "value_error"), errors[0])
    kind, path = error["type"], error["loc"][1:]
    text = error["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        return f"the body is not JSON: {error['ctx']['error']}"
    if not path and kind != "value_error":
        return "the body must be a JSON object, sent with Content-Type: application/json"
    if field := next((part for part in path if part in FORMS), None):
        path = path[:path.index(field) + 1]
        text = text if kind == "value_error" else f"it must be {FORMS[field]}"
    name = ".".join(map(str, path))
    return f"{name}: {text}" if name else text
