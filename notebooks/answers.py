"""
The judge of guesses. A guess is a value of Python, of the kind that its question wants:

    a number   99    9 * 11
    letters    "X Y"    "X, Y"    "XY"    ["X", "Y"]    "none"
    a list     [10, 11]

What cannot be read costs no attempt, nor does a right number in another unit, or a power with ^.
"""
import ast
import inspect
import linecache
import math
import re
import tomllib
from pathlib import Path

QUESTIONS = tomllib.loads(Path(__file__).with_name("questions.toml").read_text(encoding="utf-8"))
MISSED = {}   # number of a question -> the wrong guesses so far
SIZES = {   # the likely ones of a known miss first
    "bytes": 1, "MB": 1e6, "MiB": 2**20, "GB": 1e9, "GiB": 2**30, "KB": 1e3, "KiB": 2**10}
EXACT = 0.001   # how far a number may be off that is written with three digits or more
NO_POWER = "In Python, ^ is not a power: write 3**2 for 3²."


def ask(question, guess=...):
    """Prints a question, and judges a guess: two misses get a hint each, the third the answer."""
    print(f"Question {question}")
    number = question.partition(":")[0]
    if guess is ...:
        print("Replace ... by your answer, then run the cell.")
    elif has_a_caret(inspect.currentframe().f_back):
        print(f"{NO_POWER} That was no attempt.")
    else:
        print(reply(QUESTIONS[number], guess, MISSED.setdefault(number, set())))


def has_a_caret(frame):
    """Whether the call in the line where a frame stands has a ^, which changes bits in Python."""
    source = "".join(linecache.getlines(frame.f_code.co_filename))
    for node in ast.walk(ast.parse(source)):
        is_the_call = (isinstance(node, ast.Call)
                       and node.lineno <= frame.f_lineno <= node.end_lineno)
        if is_the_call and any(isinstance(part, ast.BitXor) for part in ast.walk(node)):
            return True
    return False


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
        if not several and not none:
            return None
        values = [*map(number_of, [] if none else said)]
        if None in values or said == () or "ordered" in it and len(values) != len(it["answer"]):
            return None
        return tuple(values if "ordered" in it else sorted({*values}))
    return number_of(said)


def number_of(said):
    is_number = isinstance(said, (int, float)) and not isinstance(said, bool)
    return float(said) if is_number and abs(said) < 1e300 else None   # NaN and infinity are none


def off(said, value):
    """How far a guess is from a value, as a share of it. Of a list: its farthest number."""
    if isinstance(said, tuple) and len(said) == len(value):
        return max(map(off, said, value), default=0)
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


def misread(guess, it):
    """What is said first of a guess that cannot be read, if it is clear what it means."""
    asks_which = isinstance(it["answer"], list) and "ordered" not in it
    if asks_which and number_of(guess) is not None:
        return "Is that a count? "
    if isinstance(it["answer"], (int, float)) and isinstance(guess, tuple) and guess:
        return "A comma makes two numbers of one. "
    return ""


def known_reason(said, it):
    """
    The sentence for the known miss that a guess is, or "".

    A number may be another miss in each unit, and the unit that is asked for comes first. Only in
    that unit may a guess be rounded, or calculated from rounded numbers. A small count in thousands
    is none: nobody writes 2 for 2,000.
    """
    for unit, value in in_units(said, it.get("unit", "ones")).items():
        distance, _, sentence = nearest_miss(value, it)
        likely = value == said or unit in SIZES or value >= 10_000
        if distance <= EXACT and likely:
            return sentence
    distance, miss, sentence = nearest_miss(said, it)
    if distance <= 1.5 * it.get("within", 0) or is_rounded(said, miss):
        return sentence
    return of_a_letter(said, it) if isinstance(it["answer"], str) else ""


def nearest_miss(value, it):
    """(how far it is, its value, its sentence)"""
    misses = []
    for *wrongs, sentence in it["wrong"]:
        for wrong in wrongs:
            miss = value_of(wrong, it)
            misses.append((off(value, miss), miss, sentence))
    return min(misses, key=lambda miss: miss[0])


def is_rounded(guess, number):
    """Whether a guess is a number that is rounded to two or three digits, by no more than 1%."""
    if not isinstance(number, float):
        return False
    roundings = [float(f"{number:.{digits}g}") for digits in (2, 3)]
    return guess in roundings and off(guess, number) <= 0.01


def of_a_letter(letters, it):
    """The sentence for the first wrong one of some letters. If none is wrong, for the first."""
    wrong = [letter for letter in letters if letter not in value_of(it["answer"], it)]
    distance, _, sentence = nearest_miss((wrong or letters)[0], it)
    return sentence if distance == 0 else ""


def reply(it, guess, missed):
    """What to say of a guess. missed: the wrong ones before it, to which it is added."""
    said, right, within = value_of(guess, it), value_of(it["answer"], it), it.get("within", 1e-9)
    if said is None:
        return f"{misread(guess, it)}Write {form(it)}. That was no attempt."
    if off(said, right) <= within:
        return f"Right. {it['why']}"
    values = in_units(said, it.get("unit", "ones"))
    distance, unit = min((off(value, right), unit) for unit, value in values.items())
    if distance <= within:
        return f"Right in {unit}, but the question asks for {[*values][0]}. That was no attempt."
    missed.add(said)
    reason = known_reason(said, it)
    if len(missed) < 3:
        hint = it["hints"][len(missed) - 1] if len(missed) == 2 or not reason else ""
        return " ".join(filter(None, (reason, hint, "Try again.")))
    return f"{reason or 'No.'} The answer is {it['answer']}. {it['why']}"
