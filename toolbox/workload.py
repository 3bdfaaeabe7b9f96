"""Prompts from the command line or a file -> requests. Every error names its flag, file and line."""
import json
import math
import random

from scheduler import Request
from toolbox.tokenizer import BUILTIN

PROMPTS = BUILTIN / "prompts.txt"
KEYS = ("prompt", "max_new_tokens", "temperature", "top_k", "seed", "priority", "arrival", "name")   # of a JSON line


def read_prompts(path):
    """
    A list of dicts with "prompt" and perhaps others of KEYS. A text file holds prompts with blank lines between
    them; if its name ends in .jsonl, each line is a JSON object.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:   # universal newlines; a byte order mark is no text
            text = file.read()
    except OSError as error:
        raise ValueError(f"--prompts {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--prompts {path}: not a text file in UTF-8") from None
    if str(path).endswith(".jsonl"):
        prompts = [parse_line(line, f"--prompts {path}, line {i}") for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    else:
        paragraphs = "\n".join(line if line.strip() else "" for line in text.splitlines()).split("\n\n")
        prompts = [{"prompt": paragraph.strip("\n")} for paragraph in paragraphs if paragraph.strip()]
    if not prompts:
        raise ValueError(f"--prompts {path}: there is no prompt in it")
    return prompts


def parse_line(line, where):
    try:
        entry = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({getattr(error, 'msg', 'nested too deeply')})") from None
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise ValueError(f"{where}: not an object with a \"prompt\" that is a text")
    unknown = sorted(entry.keys() - set(KEYS))
    if unknown:
        raise ValueError(f"{where}: unknown key \"{unknown[0]}\", allowed are {', '.join(KEYS)}")
    return entry | {"where": where}


def make_requests(prompts, tokenizer, arrival_rate=None, **defaults):
    """
    One Request per prompt; what a prompt does not say comes from `defaults`, with seeds counted up.

    arrival_rate: requests per step, as a Poisson process of the seed; in steps, so that every machine sees the same
    """
    if arrival_rate is not None and not 0 < arrival_rate < math.inf:
        raise ValueError(f"--arrival_rate must be above 0, not {arrival_rate}")
    stream, time, requests = random.Random(f"arrivals {defaults['seed']}"), 0.0, []
    for i, entry in enumerate(prompts):
        entry = {**defaults, "seed": defaults["seed"] + i, "name": f"r{i}", "arrival": min(int(time), 10**9), **entry}
        if arrival_rate:
            time += stream.expovariate(arrival_rate)
        where, text = entry.pop("where", None), entry.pop("prompt")
        try:
            requests.append(Request(tokenizer.encode(text, allowed_special="all"), eos_token=tokenizer.eot_token, **entry))
        except ValueError as error:
            raise ValueError(f"{where}: {error}" if where else str(error)) from None
    return requests
