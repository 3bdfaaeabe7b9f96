"""
What code gives, beside what is right: in a student's copy, in grading, and in the notebooks.

    said = fault(part, *ask(folder, part["cases"], seconds, gigabytes))     None: right

A part is a dict: cases; for each case the right answer; and mistakes, {sentence: for each case what
this mistake gives, or None where that is right}. An answer is what child.py writes: {"value": ...}
or {"error": ...}.
"""
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

# Of the largest number in a value. All is computed in float64: another order of sums changes it by
# 1e-13 or less, a detour over float32 by 1e-8 or more.
TOLERANCE = 1e-10
IDLE = 8       # seconds asleep, in all; for the seven parts of a set less than a minute
PATIENCE = 3   # where nobody says who sleeps: seconds by the clock for each second of CPU time
FEW = 9   # cases, of which one is enough for the name of a mistake
NAME = re.compile("[A-Z]|r[0-9]+")   # of a request


def ask(folder, cases, seconds, gigabytes, quiet=True, user=None):
    """
    Runs a folder's kit/child.py on cases. Returns its answers, and how it ended, in words.

    user: keywords of Popen that say as which user the child runs; None: as this process's
    """
    child = Path(folder, "kit", "child.py").resolve()
    command = [sys.executable, "-E", "-P", "-B", child, folder, str(seconds), str(gigabytes)]
    # What it writes to a file has a limit of size; a pipe has none.
    with tempfile.TemporaryFile() as questions, tempfile.TemporaryFile() as out:
        questions.write(json.dumps(cases).encode())
        questions.seek(0)
        process = subprocess.Popen(
            command, stdin=questions, stdout=out, stderr=subprocess.DEVNULL if quiet else None,
            cwd=folder, env=environment(), start_new_session=True, **(user or {}))
        try:
            ended = wait_for(process, seconds)
        finally:
            end_session(process)
        out.seek(0)
        lines = out.read().split(b"\n", len(cases))[:-1]
    return [read(line.decode("utf-8", "replace")) for line in lines], ended


def wait_for(process, seconds):
    """
    Waits until the child ends, or has slept too long. Returns how it ended, in words. Its limit of
    CPU time ends what computes. A child that is only slow, as others compute beside it, is not
    asleep: it is ready to run.
    """
    patience = PATIENCE * seconds
    latest = time.monotonic() + patience
    asleep = 0
    before = progress(process.pid)
    while True:
        with suppress(subprocess.TimeoutExpired):
            return how_it_ended(process.wait(timeout=1), seconds)
        now = progress(process.pid)
        if now is None:   # this system does not say: the clock has to do
            if time.monotonic() > latest:
                return f"waits for more than {patience} seconds"
            continue
        if now.asleep and now.seconds - before.seconds < 0.05:
            asleep += 1
        if asleep == IDLE:
            return f"waits for more than {IDLE} seconds"
        before = now


class Progress(NamedTuple):
    asleep: bool     # whether it waits for something that is not the processor
    seconds: float   # of CPU time, so far


def progress(pid):
    """How far a process is; None where the system has no such file: Linux has."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    state, user, system = fields[0], int(fields[11]), int(fields[12])
    return Progress(state == "S", (user + system) / os.sysconf("SC_CLK_TCK"))


def environment():
    """What the child gets of this process's environment: no secret is in it."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "SYSTEMROOT") if name in os.environ}
    return {**kept, "OMP_NUM_THREADS": "1"}


def how_it_ended(status, seconds):
    if hasattr(signal, "SIGXCPU") and status == -signal.SIGXCPU:
        return f"takes more than {seconds} seconds of CPU time"
    return f"ends the process (status {status})"


def end_session(process):
    """Ends the child, and the processes that it has started and left behind."""
    if hasattr(os, "killpg"):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):   # nobody is left (macOS: only zombies)
            pass
    process.kill()
    process.wait()


def read(line):
    """An answer. Code may write lines of its own, too: what is none becomes the value "nothing"."""
    try:
        answer = json.loads(line)
        if "value" in answer:
            return {"value": answer["value"]}
        error = answer["error"]
        return {"error": {"type": str(error["type"]), "says": str(error["says"]),
                          "way": [[str(file), int(line), str(text)]
                                  for file, line, text in error["way"]],
                          "loading": "loading" in error}}
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return {"value": "nothing"}


# --- equal, or not --------------------------------------------------------------------------------

def size_of(value):
    """The largest finite float in a value; 0 if there is none."""
    if isinstance(value, (list, dict)):
        return max(map(size_of, value.values() if isinstance(value, dict) else value), default=0.0)
    return abs(value) if isinstance(value, float) and math.isfinite(value) else 0.0


def same(a, b, room):
    """Whether `a` equals what is right: floats up to `room`, yes and no in any form."""
    if isinstance(b, bool):
        return type(a) in (bool, int, type(None)) and bool(a) == b
    if isinstance(a, bool):
        return int(a) == b
    if isinstance(a, (int, float)) and isinstance(b, float):
        return abs(a - b) <= room or a == b or math.isnan(a) and math.isnan(b)
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return False
        return all(same(a[key], b[key], room) for key in b)
    if isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return False
        return all(same(x, y, room) for x, y in zip(a, b))
    return type(a) is type(b) and a == b


def alike(a, b, within=TOLERANCE):
    """Whether two answers are equal: values, or errors."""
    if "error" in a and "error" in b:
        return all(a["error"][key] == b["error"][key] for key in ("type", "says"))
    return "value" in a and "value" in b and same(
        a["value"], b["value"], within * size_of(b["value"]))


def difference(got, right, room, where=""):
    """(where, got, right) at the smallest place in which two values differ."""
    if isinstance(got, dict) and isinstance(right, dict):
        for key in [*right, *got]:
            none = "what it was" if key.endswith(" becomes") else "nothing"
            a, b = got.get(key, none), right.get(key, none)
            if not same(a, b, room):
                return difference(a, b, room, f"{where}, {key}" if where else key)
    if isinstance(got, list) and isinstance(right, list) and len(words(right)) > 60:
        if len(got) != len(right):
            return f"{where}, entries".removeprefix(", "), len(got), len(right)
        for i, (a, b) in enumerate(zip(got, right)):
            if not same(a, b, room):
                return difference(a, b, room, f"{where}[{i}]")
    return where, got, right


# --- in words -------------------------------------------------------------------------------------

def case_in_words(case):
    """A case as it is read. Requests have their letters through all of it, as in what it gives."""
    parts, letter = [], ord("A")
    for key, value in case.items():
        if value is None or key == "seed":
            continue
        rows = rows_in(value)
        if rows:
            value = rows_in_words(rows, letter)
            letter += len(rows)
        elif not isinstance(value, str):
            value = words(value)
        parts.append(f"{key} {value}")
    return cut(", ".join(parts))


def rows_in(value):
    """The rows of requests that a value is; none if it is something else."""
    if isinstance(value, dict):
        return [value]
    if isinstance(value, list) and all(isinstance(row, dict) for row in value):
        return value
    return []


def rows_in_words(rows, letter):
    """Rows of requests, whose names begin with this letter's number."""
    return ", ".join(f"{chr(letter + i)} ({words(row)})" for i, row in enumerate(rows))


def words(value, digits=10):
    """A value as it is read: a plan as A1 B2, and floats with so many digits."""
    if isinstance(value, dict):
        entries = [f"{key} {words(entry, digits)}" for key, entry in value.items()]
        return ", ".join(entries) or "{}"
    if isinstance(value, list):
        if value and all(map(is_planned, value)):
            return " ".join(f"{name}{n}" for name, n in value)
        entries = [words(entry, digits) for entry in value]
        return "[" + ", ".join(entries) + "]"
    if isinstance(value, float):
        return str(rounded(value, digits))
    return str(value)


def is_planned(value):
    """Whether a value is an entry of a plan: [a request's name, a number of tokens]."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    name, n = value
    return type(n) is int and NAME.fullmatch(str(name)) is not None


def rounded(value, digits):
    """A float with so many digits, or more if there are more before its point."""
    if not math.isfinite(value):
        return value
    return float(f"{value:.{max(digits, len(str(int(abs(value)))))}g}")


def both_in_words(value, right):
    """A value and what is right, with as few digits as tell them apart; of 1 and "1" the types."""
    for digits in 3, 10:
        both = cut(words(value, digits)), cut(words(right, digits))
        if both[0] != both[1]:
            return both
    return with_type(value), with_type(right)


def with_type(value):
    return f"{value!r:.150} ({type(value).__name__})"


def cut(text, most=200):
    return text if len(text) <= most else text[:most - 3] + "..."


def first_wrong(part, answers):
    """Which of the cases is the first that is wrong, or has no answer; None if all are right."""
    within = part.get("within", TOLERANCE)
    for i, (got, right) in enumerate(zip_longest(answers, part["right"])):
        if not (got and right and alike(got, right, within)):
            return i
    return None


def fault(part, answers, ended="", name_of=lambda file, line: file):
    """
    None, or in one line what is wrong with a part, by its smallest case that fails: first the usual
    mistake that gives the same, if there is one.

    name_of: (file, line) -> how to call the file, if code that is judged stands there; else None
    """
    i = first_wrong(part, answers)
    if i is None:
        return None
    what = call_in_words(part["cases"][i])
    if i >= len(answers):
        return f"{what}: {ended}"
    mistake = name_of_mistake(part, answers, i)
    if "error" in answers[i]:
        return mistake + error(what, answers[i]["error"], name_of)
    values = both_values(part, answers[i]["value"], part["right"][i]["value"])
    return f"{mistake}{what}: {values}"


def call_in_words(case):
    """The call of a case, which is its first entry, and its arguments."""
    (_, call), *arguments = case.items()
    arguments = case_in_words(dict(arguments))
    return f"{call}, with {arguments}" if arguments else call


RESULTS = "", "it returns", "shape and dtype", "the kind of what it returns"


def both_values(part, value, right):
    """What code gives and what is right, where they differ."""
    within = part.get("within", TOLERANCE)
    where, value, right = difference(value, right, within * size_of(right))
    if where:
        verb = f"{where}: "
    else:
        verb = "" if isinstance(value, str) else "gives "
    no_return = value in (None, "nothing") and where in RESULTS
    hint = " (is a `return` missing?)" if no_return else ""
    value, right = both_in_words(value, right)
    return f"{verb}{value}, expected {right}{hint}"


def name_of_mistake(part, answers, i):
    """
    The name of the usual mistake which gives the same in case i, if it explains most of what is
    wrong, and no other explains more. If there are a few cases only, as in a notebook's exercise,
    case i will do: a second mistake must not hide the first.
    """
    within = part.get("within", TOLERANCE)
    unexplained = {}   # mistake: in how many cases the answers differ from what it gives
    few = len(answers) <= FEW
    for sentence, gives in part["mistakes"].items():
        if few and is_refuted(gives, answers, part["right"], within):
            continue
        if explains(gives, answers, i, within):
            unexplained[sentence] = differences(answers, gives, part["right"], within)
    if not unexplained:
        return ""
    best = min(unexplained, key=unexplained.get)
    least = unexplained[best]
    if not few:
        wrong = differences(answers, part["right"], part["right"], within)
        if 2 * least >= wrong or (least and another_is_better(part, answers, unexplained, least)):
            return ""
    return opening(best.strip())


def is_refuted(gives, answers, right, within):
    """Whether the code is right in a case in which this mistake would be seen."""
    for mistaken, answer, expected in zip(gives, answers, right):
        fails = mistaken is not None and not alike(mistaken, expected, within)
        if fails and alike(answer, expected, within):
            return True
    return False


def explains(gives, answers, i, within):
    """Whether a mistake gives the same in case i."""
    return gives[i] is not None and alike(answers[i], gives[i], within)


def another_is_better(part, answers, known, least):
    """
    Whether a mistake that is not in `known` leaves fewer than `least` cases unexplained. Trying it
    on all cases takes time, so it must explain most of the first that are wrong.
    """
    within, first = part.get("within", TOLERANCE), []
    for i, (got, right) in enumerate(zip(answers, part["right"])):
        if len(first) < 5 and not alike(got, right, within):
            first.append(i)
    for sentence, gives in part["mistakes"].items():
        if sentence in known:
            continue
        explained = [i for i in first if explains(gives, answers, i, within)]
        if 2 * len(explained) > len(first) and differences(
                answers, gives, part["right"], within) < least:
            return True
    return False


def differences(answers, gives, right, within):
    """In how many cases answers differ from what a mistake gives; None says that it is right."""
    number = 0
    for got, mistaken, expected in zip(answers, gives, right):
        number += not alike(got, mistaken or expected, within)
    return number


def opening(sentence):
    """How a message begins that has this name of a mistake."""
    if sentence.startswith("as if"):
        sentence = f"It is {sentence}"
    return sentence.removesuffix(".") + ". "


def error(what, raised, name_of):
    """An error in a line, with the last line of the judged code on its way."""
    message = f"{raised['type']}: {raised['says']}"
    if raised["type"] == "NotImplementedError" and "is not written yet" in raised["says"]:
        return raised["says"]
    way = []
    for file, line, text in raised["way"]:
        name = name_of(file, line)
        if name:
            way.append((name, line, text))
    file, line, text = way[-1] if way else ("the code", 0, "")
    place = f" ({file}, line {line}: {text.strip():.80})" if way else ""
    if raised.get("loading"):
        return f"{file} cannot be imported: {message}{place}"
    if not way:
        return f"{what}: what it gives cannot be used: {message}"
    return f"{what}: raises {message}{place}"
