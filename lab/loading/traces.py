"""
Traces of services: when each request came, and how many tokens it had and got. One a line:

    seconds,prompt,answer,group      prompts of a group begin alike; without a group, a prompt is
    0.0,1024,128,chat                like no other

as CSV, or as JSON lines. The columns of public traces are understood: Azure 2023 and 2024,
BurstGPT, and Mooncake, whose hash_ids name blocks of 512 tokens.
"""
import csv
import json
import math
from datetime import datetime, timezone
from itertools import islice

from toolbox.validate import one_line

COLUMNS = {   # in small letters
    "seconds": ("seconds", "timestamp"),
    "prompt": ("prompt", "contexttokens", "request tokens", "input_length"),
    "answer": ("answer", "generatedtokens", "response tokens", "output_length")}
BLOCK = 512   # tokens


def read_trace(path, check, most=None):
    """
    [(seconds from the first, tokens of the prompt, of the answer, [(name, tokens) of blocks with
    which the prompt begins]), ...]. ValueError for a bad line.

    check(prompt, answer): raises one, if lengths cannot be served. most: lines to read
    """
    rows, is_json, where = [], str(path).endswith(".jsonl"), f"--trace {path}"
    with one_line(where, csv.Error), open(path, encoding="utf-8-sig", newline="") as file:
        if not is_json and not str(path).endswith(".csv"):
            raise ValueError("the name must end in .csv or .jsonl")
        lines = enumerate(file, 1) if is_json else enumerate(csv.DictReader(file), 2)
        for number, line in islice(((n, line) for n, line in lines if line != "\n"), most):
            with one_line(f"line {number}", RecursionError):   # [[[[[[...
                row = row_of(json.loads(line) if is_json else line)
                check(*row[1:3])
                if rows and row[0] < rows[-1][0]:
                    raise ValueError(f"comes {rows[-1][0] - row[0]:g} s before the line above it")
            rows.append(row)
        if not rows:
            raise ValueError("there is no request in it")
    return [(seconds - rows[0][0], *rest) for seconds, *rest in rows]


def row_of(line):
    """As in read_trace, but with seconds as they stand there."""
    if not isinstance(line, dict):
        raise ValueError("not an object with columns")
    line = {str(name).strip().lower(): value for name, value in line.items()}
    found = []
    for column, names in COLUMNS.items():
        values = [line[name] for name in names if line.get(name) not in (None, "")]
        if not values:
            raise ValueError(f"no {column}; its column is one of {', '.join(names)}")
        found.append(str(values[0]))
    if not all(text.isdecimal() and int(text) for text in found[1:]):
        raise ValueError("prompt and answer must be at least 1 token, not "
                         f"{' and '.join(found[1:])}")
    seconds, prompt, answer = seconds_of(found[0]), int(found[1]), int(found[2])
    if "input_length" in line:   # Mooncake counts milliseconds
        seconds /= 1e3
    blocks = [(f"group {line['group']}", prompt)] if line.get("group") else []
    if isinstance(line.get("hash_ids"), list):
        blocks = [(f"hash {name}", BLOCK) for name in line["hash_ids"]]
    return seconds, prompt, answer, blocks


def seconds_of(text):
    """Of a number, or of a date and a time."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = datetime.fromisoformat(text[:26]).replace(tzinfo=timezone.utc).timestamp()
    if not math.isfinite(seconds):
        raise ValueError(f"seconds must be a finite number, not {text}")
    return seconds
