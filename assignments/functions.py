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
    spec = importlib.util.spec_from_file_location(f"{name}_of_set{number}",
                                                  HERE / f"set{number}/{name}.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def parts_of(number):
    """{part: (points, title, {function: names of its calls})}"""
    return module_of(number, "cases").PARTS


def drawn(number, seed):
    """{part: cases}, drawn from a seed, as a child reads them."""
    return json.loads(json.dumps(module_of(number, "cases").cases(random.Random(seed))))


@cache
def mistakes_of(number):
    """The mistakes of a set, as lab/checks/mistakes.py reads them."""
    return mistakes_in(HERE / f"set{number}/mistakes.txt", edits_of)


def answers_to(number, cases):
    """What the code in this process gives, up to what a caller's alarm has stopped."""
    calls, found = module_of(number, "calls"), []
    for case in json.loads(json.dumps(cases)):   # a call may change what it gets
        found.append(answer_and_prints(getattr(calls, case.pop("call")), **case))
        if found[-1].get("error", {}).get("type") == "TimeoutError":
            break
    return found


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
    with prints_held() as printed:
        given = answer(call, **arguments)
    if text := printed.getvalue():
        given["printed"] = text
    return given


def with_prints(said, part, answers, most=10):
    """What is wrong with code, and the first lines that it prints in the case that shows it."""
    said = said.rstrip(".") + "."
    i = first_wrong(part, answers)
    lines = [cut(line) for line in answers[i].get("printed", "").splitlines()]
    if not lines:
        return said
    more = ["..."] * (len(lines) > most)
    return "\n  ".join([f"{said} In this case your code prints:", *lines[:most], *more])


class Mistaken(Sequence):
    """For each case what our code gives with a mistake, None where that is right; as asked for."""

    def __init__(self, number, edits, cases, right):
        self.number, self.edits, self.cases, self.right = number, edits, cases, right
        self.known = {}

    def __len__(self):
        return len(self.cases)

    def __getitem__(self, i):
        if i not in self.known:
            self.give([i])
        return self.known[i]

    def give(self, asked):
        with put_in(self.edits, kept={}):   # a mistake may keep something between calls
            given = answers_to(self.number, [self.cases[i] for i in asked])
        for i, said in zip(asked, given):
            self.known[i] = None if alike(said, self.right[i]) else said


def record(number, part, cases, function=None):
    """What compare.fault needs of these cases of a part, or of one of its functions."""
    right = answers_to(number, cases)
    if broken := [each["error"] for each in right if "error" in each]:
        raise KitError(f"set {number}, part {part}: our code raises {broken[0]}")
    mistakes = [mistake for mistake in mistakes_of(number)
                if mistake.part == part and function in (None, mistake.function)]
    return {"cases": cases, "right": right, "mistakes": named_once(
        [mistake.sentence for mistake in mistakes],
        [Mistaken(number, mistake.edits, cases, right) for mistake in mistakes])}


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
def placed(name, mine):
    """For the `with` block, `mine` takes the place of one of our functions."""
    function = function_named(name)
    given = ", ".join(inspect.signature(function).parameters)
    called = "my_" + name.rpartition(":")[2].replace(".", "_")
    with swapped(function, [("", f"return {called}({given})")], **{called: mine}):
        yield


def wrong_parameters(mine, wanted):
    """What is wrong with a function's parameters, in a sentence; None if it takes those wanted."""
    try:
        inspect.signature(mine).bind(*wanted)
    except TypeError:
        head = f"def {mine.__name__}({', '.join(wanted)})"
        few = len(inspect.signature(mine).parameters) < len(wanted)
        if wanted[0] == "self" and few:
            return f"A method's first parameter is `self`: {head}"
        return f"It is called with {len(wanted)} arguments: {head}"
    return None


def fault_of(number, name, mine, file, around=None):
    """
    What is wrong with `mine` in the place of one of our functions, and what it prints then; None if
    it is right. around: a context in which it runs; ours does not
    """
    if said := wrong_parameters(mine, [*inspect.signature(function_named(name)).parameters]):
        return f"{said}."
    part = next(part for part, (_, _, functions) in parts_of(number).items() if name in functions)
    calls = parts_of(number)[part][2][name].split()
    cases = [case for case in drawn(number, "notebook")[part] if case["call"] in calls]
    made = record(number, part, cases, name)
    with around or nullcontext(), placed(name, mine):
        answers = answers_to(number, cases)
    made["cases"] = [{**case, "call": mine.__name__} for case in cases]   # as a reader calls it
    said = fault(made, answers, mine=lambda where, line: "this cell" if where == file else None)
    if said is None:
        return None
    if "super(): " in said:   # what Python says of it helps nobody
        said = f"`super()` works only inside a class, so name the class that you mean. {said}"
    return with_prints(said, made, answers)
