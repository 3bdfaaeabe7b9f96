"""Requests from prompts on the command line or in a file. Errors name the flag, file and line."""
import json
import math
import random
from pathlib import Path

from request import Request
from toolbox.tokenizer import BUILTIN
from toolbox.validate import one_line

PROMPTS = BUILTIN / "prompts.txt"
# the keys that a line of a .jsonl file may have
KEYS = ("prompt", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "priority", "arrival",
        "name")


def read_prompts(path):
    """
    A list of dicts with "prompt" and possibly other keys of KEYS. A text file holds prompts
    separated by blank lines; in a file whose name ends in .jsonl, each line is a JSON object.
    """
    with one_line(f"--prompts {path}"):
        text = Path(path).read_text(encoding="utf-8-sig")   # -sig drops a byte order mark
    if str(path).endswith(".jsonl"):
        prompts = [parse_line(line, f"--prompts {path}, line {i}")
                   for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    else:
        lines = [line if line.strip() else "" for line in text.splitlines()]
        prompts = [{"prompt": paragraph.strip("\n")}
                   for paragraph in "\n".join(lines).split("\n\n") if paragraph.strip()]
    if not prompts:
        raise ValueError(f"--prompts {path}: there is no prompt in it")
    return prompts


def parse_line(line, where):
    with one_line(f"{where}: not JSON"):
        entry = json.loads(line)
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise ValueError(f"{where}: not an object whose \"prompt\" is a string")
    if unknown := sorted(entry.keys() - set(KEYS)):
        raise ValueError(f"{where}: unknown key \"{unknown[0]}\"; allowed: {', '.join(KEYS)}")
    return entry | {"where": where}


def make_requests(prompts, tokenizer, arrival_rate=None, **defaults):
    """
    One Request per prompt. What an entry does not specify comes from `defaults`; the default seed
    goes up by one from request to request.

    arrival_rate: requests per step, a Poisson process that depends on the seed alone. Arrivals are
                  steps, so they are the same on every machine.
    """
    if arrival_rate is not None and not 0 < arrival_rate < math.inf:
        raise ValueError(f"--arrival_rate must be above 0, not {arrival_rate}")
    try:
        Request([0], **defaults)
    except ValueError as error:   # of a flag, not of one request
        raise ValueError(str(error).replace("request: ", "--", 1)) from None
    stream, time, requests = random.Random(f"arrivals {defaults['seed']}"), 0.0, []
    for i, entry in enumerate(prompts):
        arrival = int(min(time, 1e9))
        entry = {**defaults, "seed": defaults["seed"] + i, "name": f"r{i}", "arrival": arrival,
                 **entry}
        if arrival_rate:
            time += stream.expovariate(arrival_rate)
        where, text = entry.pop("where", None), entry.pop("prompt")
        try:
            tokens = tokenizer.encode(text, allowed_special="all")
            requests.append(Request(tokens, eos_token=tokenizer.eot_token, **entry))
        except ValueError as error:
            raise ValueError(f"{where}: {error}" if where else str(error)) from None
    return requests
