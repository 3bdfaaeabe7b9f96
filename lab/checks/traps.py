"""
Known bugs of batching code: traps.txt is the repository's only list of them. `broken` inserts one
while a program runs, and removes it again.

    with broken("published mask"):
        generate(model, requests)

A trap changes a few lines of the repository's own code, and nothing around them. So the reader sees
exactly what is wrong. The tests put in each of them (tests/test_traps.py), and notebooks show some.
The course kit names those that are usual mistakes of students, too (setN/mistakes.txt), and
docs/sources.md says where some were met in the open.
"""
from contextlib import contextmanager
from pathlib import Path

from lab.checks.edits import EditError, put_in
from lab.checks.mistakes import mistakes_in

TRAPS = {trap.sentence: trap.edits   # name: [(function, code as it stands, code of the trap), ...]
         for trap in mistakes_in(Path(__file__).with_name("traps.txt"))}


@contextmanager
def broken(name, show=True):
    """Inserts a trap for the `with` block, and prints the lines that it changes."""
    with put_in(edits_of(name), show):
        yield


def edits_of(name):
    """A trap's edits: [(function, old, new), ...]"""
    if name not in TRAPS:
        raise EditError(f"there is no trap {name!r}, only {', '.join(map(repr, TRAPS))}")
    return TRAPS[name]
