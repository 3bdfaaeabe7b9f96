"""
The judge of guesses. A guess is a value of Python, of the kind that its question wants:

    a number   99    9 * 11
    letters    "X Y"    "X, Y"    "XY"    ["X", "Y"]    "none"
    a list     [10, 11]

What cannot be read costs no attempt, nor does a right number in another unit.
"""
import math
import re
import tomllib
from pathlib import Path

QUESTIONS = tomllib.loads(Path(__file__).with_name("questions.toml").read_text(encoding="utf-8"))
MISSED = {}   # number of a question -> the wrong guesses so far
SIZES = {"bytes": 1, "KB": 1e3, "KiB": 2**10, "MB": 1e6, "MiB": 2**20, "GB": 1e9, "GiB": 2**30}


def ask(question, guess=...):
    """Prints a question, and judges a guess: two misses get a hint each, the third the answer."""
    print(f"Question {question}")
    number = question.partition(":")[0]
    print("Replace ... by your answer, then run the cell." if guess is ... else
          reply(QUESTIONS[number], guess, MISSED.setdefault(number, set())))


def value_of(said, it):
    """A guess, or a value of questions.toml, as a str, tuple or float; None: it cannot be read."""
    said = said.tolist() if hasattr(said, "tolist") else said   # numpy's and torch's
    several = isinstance(said, (list, tuple, set, range))
    none = isinstance(said, str) and said.strip().lower() == "none"
    if isinstance(it["answer"], str):
        text = "".join(map(str, said)) if several else str(said)
        names = sorted({*re.findall(r"\w", text.upper())})
        return "none" if none else "".join(names) if names and {*names} <= {*it["of"]} else None
    if isinstance(it["answer"], list):
        values = [*map(number_of, [] if none else said if several else [said])]
        if None in values or said == () or "ordered" in it and len(values) != len(it["answer"]):
            return None
        return tuple(values if "ordered" in it else sorted({*values}))
    return number_of(said)


def number_of(said):
    is_number = isinstance(said, (int, float)) and not isinstance(said, bool)
    return float(said) if is_number and abs(said) < 1e300 else None   # NaN and infinity are none


def off(said, value):
    """How far a guess is from a value, as a share of it."""
    if isinstance(said, float) and value:
        return abs(said / value - 1)
    return 0 if said == value else math.inf


def in_units(said, asked):
    """{unit: what a guess means in it}, the unit that is asked for first."""
    one = SIZES.get(asked, 1)
    units = {asked: one, "thousands": 1e3 * one, "thousandths": 1e-3 * one}
    units |= SIZES if asked in SIZES else {}
    is_number = isinstance(said, float)
    return {unit: said * size / one if is_number else said for unit, size in units.items()}


def form(it):
    """What a guess looks like."""
    if isinstance(it["answer"], str):
        return 'letters in quotes, such as "X Y", or "none"'
    if isinstance(it["answer"], list):
        n = len(it["answer"])
        return f"a list of {n} numbers, such as {[*range(10, 10 + n)]}" if "ordered" in it else \
            'a list of numbers, such as [10, 11], or "none"'
    return f"a number{' of ' + it['unit'] if 'unit' in it else ''}, such as 99 or 9 * 11"


def reply(it, guess, missed):
    """What to say of a guess. missed: the wrong ones before it, to which it is added."""
    said, right, within = value_of(guess, it), value_of(it["answer"], it), it.get("within", 1e-9)
    if said is None:
        return f"Write {form(it)}. That was no attempt."
    if off(said, right) <= within:
        return f"Right. {it['why']}"
    values = in_units(said, it.get("unit", "ones"))
    distance, unit = min((off(value, right), unit) for unit, value in values.items())
    if distance <= within:
        return f"Right in {unit}, but the question asks for {[*values][0]}. That was no attempt."
    missed.add(said)
    distance, _, known = min((off(value, value_of(wrong, it)), i, sentence)
                             for i, value in enumerate(values.values())
                             for *wrongs, sentence in it["wrong"] for wrong in wrongs)
    known = known if distance <= max(2.5 * within, 0.01) else ""
    if len(missed) < 3:
        hint = it["hints"][len(missed) - 1] if len(missed) == 2 or not known else ""
        return " ".join(filter(None, (known, hint, "Try again.")))
    return f"{known or 'No.'} The answer is {it['answer']}. {it['why']}"
