"""
The list of functions that students write, each with its cases, its usual mistakes and its calls.

    setN/cases.py       points; {function: the calls that run it}; the cases, the smallest first
    setN/calls.py       what a case runs, and which plain values it gives
    setN/mistakes.txt   edits of our source, each with a sentence (lab/checks/mistakes.py)

A function is named "file.py:Class.method" or "file.py:function". The kit runs the parts of a set in
a child (kit.py). A notebook judges one function in its own process: `fault_of(number, name, mine)`.
"""
import importlib.util
import inspect
import io
import json
import random
import sys
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# Ahead of installed packages of the same names. calls.py imports probes.py, as in a student's copy
sys.path[:0] = [str(HERE), str(ROOT)]
from child import answer  # noqa: E402
from compare import alike, cut, fault, first_wrong  # noqa: E402

from lab.checks.edits import function_named, put_in, swapped  # noqa: E402
from lab.checks.mistakes import mistakes_in  # noqa: E402
from lab.checks.traps import edits_of  # noqa: E402

SETS = sorted(int(path.name[3:]) for path in HERE.glob("set?"))


class KitError(Exception):
    """The list itself is wrong: our code raises an error, or a mistake that no case shows."""


@cache
def module_of(number, name):
    """A set's cases.py or calls.py."""
    path = HERE / f"set{number}/{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_of_set{number}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parts_of(number):
    """{part: (points, title, {function: names of its calls})}"""
    return module_of(number, "cases").PARTS


def drawn(number, seed):
    """{part: cases}, drawn from a seed, as a child reads them."""
    cases = module_of(number, "cases").cases(random.Random(seed))
    return through_json(cases)


def through_json(value):
    """A copy of a value, as it is when it has been written and read."""
    return json.loads(json.dumps(value))


@cache
def mistakes_of(number):
    """The mistakes of a set, as lab/checks/mistakes.py reads them."""
    return mistakes_in(HERE / f"set{number}/mistakes.txt", edits_of)


def answers_to(number, cases):
    """What the code in this process gives, up to what a caller's alarm has stopped."""
    calls = module_of(number, "calls")
    answers = []
    for case in through_json(cases):   # a call may change what it gets
        call = getattr(calls, case.pop("call"))
        answers.append(answer_and_prints(call, **case))
        if was_stopped(answers[-1]):
            break
    return answers


def was_stopped(answer):
    """Whether an alarm has ended the call."""
    return "error" in answer and answer["error"]["type"] == "TimeoutError"


class Held(io.StringIO):
    """Takes what code prints, and keeps the beginning: a loop may print for ever."""

    def write(self, text):
        if self.tell() < 4000:
            super().write(text)
        return len(text)


def prints_held():
    """For a `with` block: what is printed in it is not shown. Its value is a Held."""
    return redirect_stdout(Held())


def answer_and_prints(call, **arguments):
    """What a call gives, as child.answer says it; and what it prints, if it does: "printed"."""
    with prints_held() as held:
        result = answer(call, **arguments)
    printed = held.getvalue()
    if printed:
        result["printed"] = printed
    return result


def with_prints(message, part, answers, most=10):
    """What is wrong with code, and the first lines that it prints in the case that shows it."""
    message = message.rstrip(".") + "."
    i = first_wrong(part, answers)
    lines = answers[i].get("printed", "").splitlines()
    if not lines:
        return message
    shown = [cut(line) for line in lines[:most]]
    if len(lines) > most:
        shown.append("...")
    return "\n  ".join([f"{message} In this case your code prints:", *shown])


class Mistaken(Sequence):
    """For each case what our code gives with a mistake, None where that is right; as asked for."""

    def __init__(self, number, edits, cases, right):
        self.number = number
        self.edits = edits
        self.cases = cases
        self.right = right
        self.known = {}

    def __len__(self):
        return len(self.cases)

    def __getitem__(self, i):
        if i not in self.known:
            self.give([i])
        return self.known[i]

    def give(self, numbers):
        """Runs our code with the mistake on the cases of these numbers."""
        cases = [self.cases[i] for i in numbers]
        with put_in(self.edits, kept={}):   # a mistake may keep something between calls
            answers = answers_to(self.number, cases)
        for i, mistaken in zip(numbers, answers):
            self.known[i] = None if alike(mistaken, self.right[i]) else mistaken


def record(number, part, cases, function=None):
    """What compare.fault needs of these cases of a part, or of one of its functions."""
    right = answers_to(number, cases)
    for result in right:
        if "error" in result:
            raise KitError(f"set {number}, part {part}: our code raises {result['error']}")
    mistakes = [mistake for mistake in mistakes_of(number) if mistake.part == part]
    if function is not None:
        mistakes = [mistake for mistake in mistakes if mistake.function == function]
    sentences = [mistake.sentence for mistake in mistakes]
    gives = [Mistaken(number, mistake.edits, cases, right) for mistake in mistakes]
    return {"cases": cases, "right": right, "mistakes": named_once(sentences, gives)}


def named_once(sentences, gives):
    """
    {sentence: what this mistake gives}. Several may have the same sentence: blanks behind it tell
    them apart, which compare.fault takes off.
    """
    mistakes = {}
    for sentence, answers in zip(sentences, gives):
        while sentence in mistakes:
            sentence += " "
        mistakes[sentence] = answers
    return mistakes


# --- in this process ------------------------------------------------------------------------------

@contextmanager
def placed(name, function):
    """For the `with` block, a function takes the place of one of ours."""
    ours = function_named(name)
    arguments = ", ".join(inspect.signature(ours).parameters)
    alias = "my_" + name.rpartition(":")[2].replace(".", "_")
    with swapped(ours, [("", f"return {alias}({arguments})")], **{alias: function}):
        yield


def wrong_parameters(function, wanted):
    """What is wrong with a function's parameters, in a sentence; None if it takes those wanted."""
    signature = inspect.signature(function)
    try:
        signature.bind(*wanted)
    except TypeError:
        head = f"def {function.__name__}({', '.join(wanted)})"
        few = len(signature.parameters) < len(wanted)
        if wanted[0] == "self" and few:
            return f"A method's first parameter is `self`: {head}"
        return f"It is called with {len(wanted)} arguments: {head}"
    return None


def part_with(number, name):
    """The part of a set that asks for a function, and the names of the function's calls."""
    for part, (_, _, functions) in parts_of(number).items():
        if name in functions:
            return part, functions[name].split()
    raise KeyError(f"no part of set {number} asks for {name}")


def fault_of(number, name, function, file, around=None):
    """
    What is wrong with a function in the place of ours, and what it prints then; None if it is
    right. around: a context in which it runs; ours does not
    """
    parameters = [*inspect.signature(function_named(name)).parameters]
    message = wrong_parameters(function, parameters)
    if message:
        return f"{message}."
    part, calls = part_with(number, name)
    cases = [case for case in drawn(number, "notebook")[part] if case["call"] in calls]
    reference = record(number, part, cases, name)
    with around or nullcontext(), placed(name, function):
        answers = answers_to(number, cases)
    called = function.__name__   # as a reader calls it
    reference["cases"] = [{**case, "call": called} for case in cases]

    def name_of(path, line):
        return "this cell" if path == file else None

    message = fault(reference, answers, name_of=name_of)
    if message is None:
        return None
    if "super(): " in message:   # what Python says of it helps nobody
        message = ("`super()` works only inside a class, so name the class that you mean. "
                   f"{message}")
    return with_prints(message, reference, answers)
