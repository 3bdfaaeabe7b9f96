"""Requests from prompts on the command line or in a file. Errors name the flag, file and line."""
import json
import math
import re
from itertools import repeat
from pathlib import Path

from lab.loading.arrivals import poisson
from request import Request
from toolbox.validate import check_run, one_line
from toolbox.weights import BUILTIN

PROMPTS = BUILTIN / "prompts.txt"
# what may stand before each of them, as a system prompt does
BEGINNING = """You write the documentation of a library. Say in one or two sentences what each
function returns, which arguments it takes, and which exceptions it raises. Do not repeat the name
of the function. If a value is optional, say what happens without it. Use the words of the standard
library. Write plain text. """
# before each of the built-in prompts: 48 tokens, three pages of 16
START = """You write the documentation of a library. Say in one or two sentences what each
function returns, which arguments it takes, and which exceptions it raises.
"""
# the keys that a line of a .jsonl file may have
KEYS = ("prompt", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "priority", "arrival",
        "name")


def read_prompts(path):
    """
    A list of dicts: "prompt", "where" it stands, and possibly other KEYS. A text file holds prompts
    separated by blank lines; where its name ends in .jsonl or .JSONL, each line is a JSON object.
    """
    where = f"--prompts {path}"
    with one_line(where):
        text = Path(path).read_text(encoding="utf-8-sig")   # -sig drops a byte order mark
    if str(path).lower().endswith(".jsonl"):
        prompts = [parse_line(line, f"{where}, line {i}")
                   for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    else:
        prompts = [{"prompt": paragraph.strip("\n"), "where": where}
                   for paragraph in re.split(r"(?:^|\n)\s*\n", text) if paragraph.strip()]
    if not prompts:
        raise ValueError(f"{where}: there is no prompt in it")
    return prompts


def builtin_prompts():
    """A script's own prompts: twelve that begin alike, as after a system prompt."""
    return [entry | {"prompt": START + entry["prompt"]} for entry in read_prompts(PROMPTS)]


def parse_line(line, where):
    with one_line(f"{where}: not JSON", RecursionError):   # [[[[[[...
        entry = json.loads(line)
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise ValueError(f"{where}: not an object whose \"prompt\" is a string")
    if unknown := sorted(entry.keys() - set(KEYS)):
        raise ValueError(f"{where}: unknown key \"{unknown[0]}\"; allowed: {', '.join(KEYS)}")
    return entry | {"where": where}


def make_requests(prompts, tokenizer, arrival_rate=None, chat=False, config=None, **defaults):
    """
    One Request per prompt. What an entry does not specify, or as null, comes from `defaults`; the
    default seed goes up by one from request to request.

    arrival_rate: requests per step, a Poisson process that depends on the seed alone. Arrivals are
                  steps, so they are the same on every machine.
    chat:         puts each prompt into the tokenizer's chat template, as a user's message
    config:       of the model that they must fit
    """
    refuse_flags(arrival_rate, chat, tokenizer, defaults)
    times = repeat(0)
    if arrival_rate:
        times = poisson(len(prompts), arrival_rate, defaults["seed"])
    given_names = {str(entry.get("name")) for entry in prompts}
    requests, names = [], set()
    for i, (entry, time) in enumerate(zip(prompts, times)):
        settings = {**defaults, "seed": defaults["seed"] + i, "name": free_name(i, given_names),
                    "arrival": int(min(time, 1e9)),
                    **{key: value for key, value in entry.items() if value is not None}}
        with one_line(settings.pop("where", "--prompt")):
            tokens = encode(settings.pop("prompt"), tokenizer, chat)
            request = Request(tokens, eos_token=tokenizer.eot_token, **settings)
            if request.name in names:
                raise ValueError(f"{request}: another one has this name")
            if config:
                check_run([request], config)
        names.add(request.name)
        requests.append(request)
    return requests


def refuse_flags(arrival_rate, chat, tokenizer, defaults):
    """ValueError for what is wrong with all requests, and so with a flag."""
    if arrival_rate is not None and not 0 < arrival_rate < math.inf:
        raise ValueError(f"--arrival_rate must be above 0, not {arrival_rate}")
    if chat and not getattr(tokenizer, "chat_template", None):
        raise ValueError("--chat: this model has no chat template")
    try:
        Request([0], **defaults)
    except ValueError as error:
        raise ValueError(str(error).replace("request: ", "--", 1)) from None


def free_name(number, taken):
    """r0, r1, ...: by default the request's number, or the next one that no entry gives itself."""
    while f"r{number}" in taken:
        number += 1
    return f"r{number}"


def encode(text, tokenizer, chat):
    if chat:
        return tokenizer.encode_chat([{"role": "user", "content": text}])
    return tokenizer.encode(text, allowed_special="all")
