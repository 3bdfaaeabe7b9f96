"""
What a part's code gives, compared with what is right: in a student's copy, and in grading.

    said = fault(part, *ask([(folder, part["cases"], {})], seconds, gigabytes))     None: right

A part is a dict: points, title, functions, cases, the right value of each case, and mistakes,
{sentence: {number of a case: what this mistake gives}}.
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
GONE = {"value": "nothing"}
NAME = re.compile("[A-Z]|r[0-9]+")   # of a request


def ask(jobs, seconds, gigabytes, quiet=True):
    """
    Runs child.py on [(folder, cases, {file: text}), ...]. Returns its answers, and how it ended, in
    words. The clock stops what waits for ever, long after the limit of CPU time.
    """
    with tempfile.TemporaryDirectory() as place:
        given, out = Path(place, "jobs.json"), Path(place, "out.jsonl")
        given.write_text(json.dumps([(str(folder), *job) for folder, *job in jobs]), "utf-8")
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "SYSTEMROOT")
                if name in os.environ}
        to = subprocess.DEVNULL if quiet else None
        with subprocess.Popen(
                [sys.executable, "-E", "-P", "-B", str(CHILD), str(given), str(out), str(seconds),
                 str(gigabytes)], cwd=jobs[0][0], stdin=to, stdout=to, stderr=to,
                env={**kept, "OMP_NUM_THREADS": "1", "TMPDIR": str(jobs[0][0])}) as child:
            try:
                status = child.wait(20 * seconds)
                ended = (f"takes more than {seconds} seconds of CPU time"
                         if status == -getattr(signal, "SIGXCPU", 0) != 0 else
                         f"ends the process (status {status})")
            except subprocess.TimeoutExpired:
                child.kill()
                ended = f"waits for more than {20 * seconds} seconds"
        lines = out.read_text("utf-8", errors="replace").splitlines() if out.exists() else []
    return [*map(read, lines)], ended


def read(line):
    """A line of the child. Code may write lines of its own, too."""
    try:
        said = json.loads(line)
        return said if isinstance(said, dict) and said.keys() & {"value", "error"} else GONE
    except (ValueError, RecursionError):
        return GONE


# --- equal, or not --------------------------------------------------------------------------------

def numbers(value):
    """All floats in a value that are finite."""
    if isinstance(value, (list, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers(each)
    elif isinstance(value, float) and math.isfinite(value):
        yield value


def same(a, b, scale=None):
    """Whether `a` equals what is right: floats up to rounding, yes and no in any form."""
    scale = max(map(abs, numbers(b)), default=0.0) if scale is None else scale
    if isinstance(b, bool):
        return type(a) in (bool, int, type(None)) and bool(a) == b
    if isinstance(a, bool):
        return int(a) == b
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= TOLERANCE * scale or a == b or math.isnan(a) and math.isnan(b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key], scale) for key in b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y, scale) for x, y in zip(a, b))
    return type(a) is type(b) and a == b


def alike(a, b):
    """Whether two answers are equal: values, or errors."""
    if "error" in a or "error" in b:
        return [a.get("error", {}).get(key) for key in ("type", "says")] == [
            b.get("error", {}).get(key) for key in ("type", "says")]
    return same(a["value"], b["value"])


def difference(got, right, scale, where=""):
    """(where, got, right) at the smallest place in which two values differ."""
    if isinstance(got, dict) and isinstance(right, dict):
        for key in [*right, *(got.keys() - right.keys())]:
            if key not in got or key not in right or not same(got[key], right[key], scale):
                return difference(got.get(key, "nothing"), right.get(key, "nothing"), scale,
                                  f"{where}, {key}" if where else key)
    if (isinstance(got, list) and isinstance(right, list) and len(got) == len(right)
            and len(words(right)) > 60):
        for i, (a, b) in enumerate(zip(got, right)):
            if not same(a, b, scale):
                return difference(a, b, scale, f"{where}[{i}]")
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
    text = f"{value:.10g}" if isinstance(value, float) else str(value)
    return f"{text}.0" if isinstance(value, float) and text.lstrip("-").isdigit() else text


def cut(text, most=200):
    return text if len(text) <= most else text[:most - 3] + "..."


def sides(got, right):
    """Both sides in words, and never alike."""
    pair = [cut(words(got)), cut(words(right))]
    if pair[0] == pair[1]:
        pair = [f"{each!r:.150} ({type(each).__name__})" for each in (got, right)]
    return pair if pair[0] != pair[1] else [f"{pair[0]}, of another length", pair[1]]


def fault(part, answers, ended, origin=lambda frame: frame):
    """
    None, or in one line what is wrong with a part, by its smallest case that fails.

    origin: frame -> the same in the student's file, or None if the line is not theirs
    """
    rights = [{"value": value} for value in part["right"]]
    wrong = {i: answer for i, (answer, right) in enumerate(
        zip_longest(answers[:len(rights)], rights)) if answer is None or not alike(answer, right)}
    if not wrong:
        return None
    i, got = next(iter(wrong.items()))
    call, *given = part["cases"][i].items()
    name, case = call[1], told(dict(given))
    what = f"{name}, with {case}" if case else name
    matches = {sentence: sum(alike(wrong[j] or GONE, gives.get(str(j), GONE)) for j in wrong)
               - len(gives.keys() - {str(j) for j in wrong})   # what it would break, and is right
               for sentence, gives in part["mistakes"].items()
               if got and str(i) in gives and alike(got, gives[str(i)])}
    because = f", {max(matches, key=matches.get)}" if matches else ""
    if got is None:
        return f"{what}: {ended}"
    if "error" in got:
        return error(name, what, got["error"], origin) + because
    value, right = got["value"], part["right"][i]
    if value is None:
        return f"{what}: gives None, expected {cut(words(right))}: is a `return` missing?"
    scale = max(map(abs, numbers(right)), default=0.0)
    where, value, right = difference(value, right, scale)
    verb = f"{where}: " if where else "" if isinstance(value, str) else "gives "
    value, right = sides(value, right)
    return f"{what}: {verb}{value}, expected {right}{because}"


def error(name, what, raised, origin):
    """An error in a line, with the last line of the student's own code on its way."""
    frames = [place for place in map(origin, raised["frames"]) if place]
    if raised["type"] == "NotImplementedError" and "is not written yet" in raised["says"]:
        return raised["says"]
    file, line, text = frames[-1] if frames else ("", 0, "")
    place = f" ({file}, line {line}: {str(text).strip():.80})" if frames else ""
    if raised.get("loading"):
        return f"{file or 'the code'} cannot be imported: {raised['type']}: {raised['says']}{place}"
    if not frames:
        return f"{what}: what it gives cannot be used: {raised['type']}: {raised['says']}"
    return f"{what}: raises {raised['type']}: {raised['says']}{place}"
