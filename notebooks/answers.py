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


def value_of(guess, question):
    """A guess, or a value of questions.toml, as a str, tuple or float; None: it cannot be read."""
    if hasattr(guess, "tolist"):   # numpy's and torch's
        guess = guess.tolist()
    if isinstance(question["answer"], str):
        return letters_of(guess, question["of"])
    if isinstance(question["answer"], list):
        return numbers_of(guess, question)
    return number_of(guess)


def letters_of(guess, known):
    """The letters of a guess, in order and each once, as a str; None if it has others."""
    if says_none(guess):
        return "none"
    text = "".join(map(str, guess)) if is_list(guess) else str(guess)
    letters = sorted({*re.findall(r"\w", text.upper())})
    return "".join(letters) if letters and {*letters} <= {*known} else None


def numbers_of(guess, question):
    """The numbers of a list, as a tuple; in order and each once, unless their order counts."""
    if says_none(guess):
        guess = []
    if not is_list(guess) or guess == ():
        return None
    numbers = [number_of(number) for number in guess]
    if None in numbers:
        return None
    if "ordered" not in question:
        return tuple(sorted({*numbers}))
    return tuple(numbers) if len(numbers) == len(question["answer"]) else None


def number_of(guess):
    """A number as a float; None: it is none, or NaN or infinity."""
    is_number = isinstance(guess, (int, float)) and not isinstance(guess, bool)
    return float(guess) if is_number and abs(guess) < 1e300 else None


def is_list(guess):
    return isinstance(guess, (list, tuple, set, range))


def says_none(guess):
    return isinstance(guess, str) and guess.strip().lower() == "none"


def off(guess, value):
    """How far a guess is from a value, as a share of it. Of a list: its farthest number."""
    if isinstance(guess, tuple) and len(guess) == len(value):
        return max(map(off, guess, value), default=0)
    if isinstance(guess, float) and value:
        return abs(guess / value - 1)
    return 0 if guess == value else math.inf


def in_units(guess, asked):
    """{unit: what a guess means in it}, the unit that is asked for first."""
    if not isinstance(guess, float):
        return {asked: guess}
    one = SIZES.get(asked, 1)
    units = {asked: one, "thousands": 1e3 * one, "thousandths": 1e-3 * one}
    if asked in SIZES:
        units |= SIZES
    return {unit: guess * size / one for unit, size in units.items()}


def form(question):
    """What a guess looks like."""
    if isinstance(question["answer"], str):
        return 'letters in quotes, such as "X Y", or "none"'
    if isinstance(question["answer"], list) and "ordered" in question:
        example = [*range(10, 10 + len(question["answer"]))]
        return f"a list of {len(example)} numbers, such as {example}"
    if isinstance(question["answer"], list):
        return 'a list of numbers, such as [10, 11], or "none"'
    of_unit = f" of {question['unit']}" if "unit" in question else ""
    return f"a number{of_unit}, such as 99 or 9 * 11"


def misread(guess, question):
    """What is said first of a guess that cannot be read, if it is clear what it means."""
    asks_which = isinstance(question["answer"], list) and "ordered" not in question
    if asks_which and number_of(guess) is not None:
        return "Is that a count? "
    if isinstance(question["answer"], (int, float)) and isinstance(guess, tuple) and guess:
        return "A comma makes two numbers of one. "
    return ""


def known_reason(guess, question):
    """
    The sentence for the known miss that a guess is, or "".

    A number may be another miss in each unit, and the unit that is asked for comes first. Only in
    that unit may a guess be rounded, or calculated from rounded numbers. A small count in thousands
    is none: nobody writes 2 for 2,000.
    """
    for unit, value in in_units(guess, question.get("unit", "ones")).items():
        distance, _, sentence = nearest_miss(value, question)
        likely = value == guess or unit in SIZES or value >= 10_000
        if distance <= EXACT and likely:
            return sentence
    distance, miss, sentence = nearest_miss(guess, question)
    if distance <= 1.5 * question.get("within", 0) or is_rounded(guess, miss):
        return sentence
    return of_a_letter(guess, question) if isinstance(question["answer"], str) else ""


def nearest_miss(value, question):
    """(how far it is, its value, its sentence)"""
    misses = []
    for *wrongs, sentence in question["wrong"]:
        for wrong in wrongs:
            miss = value_of(wrong, question)
            misses.append((off(value, miss), miss, sentence))
    return min(misses, key=lambda miss: miss[0])


def is_rounded(guess, number):
    """Whether a guess is a number that is rounded to two or three digits, by no more than 1%."""
    if not isinstance(number, float):
        return False
    roundings = [float(f"{number:.{digits}g}") for digits in (2, 3)]
    return guess in roundings and off(guess, number) <= 0.01


def of_a_letter(letters, question):
    """The sentence for the first wrong one of some letters. If none is wrong, for the first."""
    wrong = [letter for letter in letters if letter not in value_of(question["answer"], question)]
    distance, _, sentence = nearest_miss((wrong or letters)[0], question)
    return sentence if distance == 0 else ""


def right_unit(guess, question):
    """The unit in which a guess is nearest to right, if it is right in it; else None."""
    right = value_of(question["answer"], question)
    values = in_units(guess, question.get("unit", "ones"))
    distance, unit = min((off(value, right), unit) for unit, value in values.items())
    return unit if distance <= question.get("within", 1e-9) else None


def reply(question, guess, missed):
    """What to say of a guess. missed: the wrong ones before it, to which it is added."""
    value = value_of(guess, question)
    if value is None:
        return f"{misread(guess, question)}Write {form(question)}. That was no attempt."
    if off(value, value_of(question["answer"], question)) <= question.get("within", 1e-9):
        return f"Right. {question['why']}"
    if unit := right_unit(value, question):
        asked = question.get("unit", "ones")
        return f"Right in {unit}, but the question asks for {asked}. That was no attempt."
    missed.add(value)
    reason = known_reason(value, question)
    if len(missed) >= 3:
        return f"{reason or 'No.'} The answer is {question['answer']}. {question['why']}"
    if len(missed) == 2 or not reason:
        return " ".join(filter(None, (reason, question["hints"][len(missed) - 1], "Try again.")))
    return f"{reason} Try again."
