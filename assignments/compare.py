"""
What a part's code gives, compared with what is right: in a student's copy, and in grading.

    said = fault(part, *ask([(folder, part["cases"])], seconds, gigabytes))     None: right

A part is a dict: points, title, functions, cases; for each case the right answer; and mistakes,
{sentence: for each case what this mistake gives, None where that is right}. An answer is a line of
the child: {"value": ...} or {"error": ...}.
"""
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path

# Of the largest number in a value. All is computed in float64: another order of sums changes it by
# 1e-13 or less, a detour over float32 by 1e-8 or more.
TOLERANCE = 1e-10
CHILD = Path(__file__).resolve().with_name("child.py")
NAME = re.compile("[A-Z]|r[0-9]+")   # of a request


def ask(jobs, seconds, gigabytes, quiet=True):
    """
    Runs child.py on [(folder, cases), ...]. Returns its answers, and how it ended, in words. The
    clock stops what waits for ever, long after the limit of CPU time.
    """
    folder = str(jobs[0][0])
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "SYSTEMROOT") if name in os.environ}
    to = subprocess.DEVNULL if quiet else None
    with tempfile.TemporaryDirectory() as place:
        given, out = Path(place, "jobs.json"), Path(place, "out.jsonl")
        given.write_text(json.dumps(jobs, default=str), "utf-8")
        try:
            status = subprocess.run(
                [sys.executable, "-E", "-P", "-B", CHILD, given, out, str(seconds), str(gigabytes)],
                cwd=folder, stdin=to, stdout=to, stderr=to, timeout=20 * seconds,
                env={**kept, "OMP_NUM_THREADS": "1", "TMPDIR": folder}).returncode
            ended = (f"takes more than {seconds} seconds of CPU time"
                     if status == -getattr(signal, "SIGXCPU", 0) != 0 else
                     f"ends the process (status {status})")
        except subprocess.TimeoutExpired:
            ended = f"waits for more than {20 * seconds} seconds"
        lines = out.read_text("utf-8", errors="replace").splitlines() if out.exists() else []
    return [*map(read, lines)], ended


def read(line):
    """An answer. Code may write lines of its own, too: what is none becomes the value "nothing"."""
    try:
        said = json.loads(line)
        if "value" in said:
            return {"value": said["value"]}
        error = said["error"]
        return {"error": {"type": str(error["type"]), "says": str(error["says"]),
                          "frames": [(str(file), int(line), str(text))
                                     for file, line, text in error["frames"]],
                          "loading": "loading" in error}}
    except (ValueError, TypeError, KeyError, RecursionError):
        return {"value": "nothing"}


# --- equal, or not --------------------------------------------------------------------------------

def size_of(value):
    """The largest finite float in a value; 0 if there is none."""
    if isinstance(value, (list, dict)):
        parts = value.values() if isinstance(value, dict) else value
        return max(map(size_of, parts), default=0.0)
    return abs(value) if isinstance(value, float) and math.isfinite(value) else 0.0


def same(a, b, size):
    """Whether `a` equals what is right: floats up to rounding, yes and no in any form."""
    if isinstance(b, bool):
        return type(a) in (bool, int, type(None)) and bool(a) == b
    if isinstance(a, bool):
        return int(a) == b
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= TOLERANCE * size or a == b or math.isnan(a) and math.isnan(b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key], size) for key in b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y, size) for x, y in zip(a, b))
    return type(a) is type(b) and a == b


def alike(a, b):
    """Whether two answers are equal: values, or errors."""
    if "error" in a and "error" in b:
        return all(a["error"][key] == b["error"][key] for key in ("type", "says"))
    return "value" in a and "value" in b and same(a["value"], b["value"], size_of(b["value"]))


def difference(got, right, size, where=""):
    """(where, got, right) at the smallest place in which two values differ."""
    if isinstance(got, dict) and isinstance(right, dict):
        for key in [*right, *got]:
            a, b = got.get(key, "nothing"), right.get(key, "nothing")
            if not same(a, b, size):
                return difference(a, b, size, f"{where}, {key}" if where else key)
    if isinstance(got, list) and isinstance(right, list) and len(words(right)) > 60:
        if len(got) != len(right):
            return f"{where}, entries".removeprefix(", "), len(got), len(right)
        for i, (a, b) in enumerate(zip(got, right)):
            if not same(a, b, size):
                return difference(a, b, size, f"{where}[{i}]")
    return where, got, right


# --- in words -------------------------------------------------------------------------------------

def told(case):
    """A case as it is read. Requests have their letters through all of it, as in what it gives."""
    said, letter = [], 65
    for key, value in case.items():
        rows = [value] if isinstance(value, dict) else value
        if rows and isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
            value = ", ".join(f"{chr(letter + i)} ({words(row)})" for i, row in enumerate(rows))
            letter += len(rows)
        if value is not None and key != "seed":
            said.append(f"{key} {value if isinstance(value, str) else words(value)}")
    return cut(", ".join(said))


def words(value):
    """A value as it is read: a plan as A1 B2."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {words(each)}" for key, each in value.items()) or "{}"
    if isinstance(value, list):
        if value and all(isinstance(each, list) and len(each) == 2 and type(each[1]) is int
                         and NAME.fullmatch(str(each[0])) for each in value):
            return " ".join(f"{name}{n}" for name, n in value)
        return "[" + ", ".join(map(words, value)) + "]"
    return str(float(f"{value:.10g}") if isinstance(value, float) else value)


def cut(text, most=200):
    return text if len(text) <= most else text[:most - 3] + "..."


def fault(part, answers, ended, origin=lambda frame: frame):
    """
    None, or in one line what is wrong with a part, by its smallest case that fails.

    origin: frame -> whether the line is in a file of the student's
    """
    answers = answers[:len(part["right"])]
    i, got, right = next((
        (i, got, right) for i, (got, right) in enumerate(zip_longest(answers, part["right"]))
        if not (got and alike(got, right))), (None, None, None))
    if i is None:
        return None
    call, *given = part["cases"][i].items()
    name, case = call[1], told(dict(given))
    what = f"{name}, with {case}" if case else name
    if got is None:
        return f"{what}: {ended}"
    because = named(part, answers, i)
    if "error" in got:
        return error(name, what, got["error"], origin) + because
    value, right = got["value"], right["value"]
    where, value, right = difference(value, right, size_of(right))
    verb = f"{where}: " if where else "" if isinstance(value, str) else "gives "
    if value is None and where in ("", "it returns"):
        because = ": is a `return` missing?"
    said, expected = cut(words(value)), cut(words(right))
    if said == expected:   # 1 and "1"
        said, expected = (f"{each!r:.150} ({type(each).__name__})" for each in (value, right))
    return f"{what}: {verb}{said}, expected {expected}{because}"


def named(part, answers, i):
    """The mistake that gives the same in case i; of several, the one that does so most often."""
    def agrees(gives, j):
        return alike(answers[j], gives[j] or part["right"][j])

    counts = {sentence: sum(agrees(gives, j) for j in range(len(answers)))
              for sentence, gives in part["mistakes"].items() if gives[i] and agrees(gives, i)}
    return f", {max(counts, key=counts.get)}" if counts else ""


def error(name, what, raised, origin):
    """An error in a line, with the last line of the student's own code on its way."""
    if raised["type"] == "NotImplementedError" and "is not written yet" in raised["says"]:
        return raised["says"]
    said, theirs = f"{raised['type']}: {raised['says']}", [*filter(origin, raised["frames"])]
    file, line, text = theirs[-1] if theirs else ("the code", 0, "")
    place = f" ({file}, line {line}: {text.strip():.80})" if theirs else ""
    if raised.get("loading"):
        return f"{file} cannot be imported: {said}{place}"
    if not theirs:
        return f"{what}: what it gives cannot be used: {said}"
    return f"{what}: raises {said}{place}"
