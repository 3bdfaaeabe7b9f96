"""
The form in which known bugs and usual mistakes are listed, and its only reader. Three lists have
it: lab/checks/traps.txt, assignments/setN/mistakes.txt and notebooks/mistakes.txt.

    # A line that begins with "#" is a comment: why this is a mistake, say.

    @@ a scheduler.py:Scheduler.schedule

    as if the budget did not matter
    -budget = self.token_budget
    +budget = 10**6

    as if the last came first
    trap: prompts before decodes

A paragraph is a sentence, which names the mistake, and its edits. An edit is written as in a diff:
what goes (-) and what comes in its place (+), character by character, so that a part of a line will
do. What goes must occur exactly once. Where nothing goes, what comes are the function's first
statements. Instead of edits there may be the name of a known bug (lab/checks/traps.py).

A paragraph of one line "@@ ..." says of which function those below it are mistakes, and before
that, in a set of the course, of which part. Within a paragraph such a line says whose the edits
below it are: a mistake may change several functions.

lab/checks/edits.py puts the edits in.
"""
from pathlib import Path
from typing import NamedTuple


class Mistake(NamedTuple):
    part: str        # of a set; or ""
    function: str    # "file.py:Class.method", or the name of an exercise
    sentence: str
    edits: list      # [(function, old, new), ...]


def mistakes_in(file, edits_of=None):
    """The mistakes of a list, in its order. edits_of(name): those of a known bug."""
    mistakes, part, function = [], "", ""
    for paragraph in Path(file).read_text(encoding="utf-8").split("\n\n"):
        lines = [line for line in paragraph.splitlines() if line and not line.startswith("#")]
        if not lines:
            continue
        sentence, *edits = lines
        if sentence.startswith("@@ "):
            part, function = head_of(sentence)
            continue
        if not edits:
            raise ValueError(f"{file}: no edit stands below {sentence!r}")
        if edits[0].startswith("trap: "):
            edits = edits_of(edits[0].removeprefix("trap: "))
        else:
            edits = edits_in(edits, function)
        mistakes.append(Mistake(part, function, sentence, edits))
    return mistakes


def head_of(line):
    """(part, function) of a line "@@ part function" or "@@ function"."""
    *part, function = line.removeprefix("@@ ").split()
    return "".join(part), function


def edits_in(lines, function):
    """[(function, old, new), ...] of lines as in a diff."""
    edits = []   # (function, lines that go, lines that come)
    before = "@"
    for line in lines:
        sign, text = line[0], line[1:]
        if sign not in "@-+":
            raise ValueError(f"{line!r} is no line of an edit: these begin with -, + or @@")
        if sign == "@":
            function = head_of(line)[1]
        else:
            an_edit_begins = before == "@" or (before == "+" and sign == "-")
            if an_edit_begins:
                edits.append((function, [], []))
            _, old, new = edits[-1]
            (old if sign == "-" else new).append(text)
        before = sign
    return [(function, "\n".join(old), "\n".join(new)) for function, old, new in edits]
