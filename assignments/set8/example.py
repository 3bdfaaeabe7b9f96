"""The handout's worked examples. A part prints its docstring: `pytest set8 -k example -s`."""
from types import SimpleNamespace

from beyond import speculative
from checks.toy import toy
from request import Request


def request(prompt, new, name="A"):
    made = Request(prompt, new, name=name)
    made.block_size = 24
    return made


def part_a():
    """
    5 7 2 9 5 7: guess [2, 9, 5]
    5 7 2 9 5 7 2: guess [9, 5, 7]
    5 7 2 9 5 7 2 4: guess []
    5 7 2 9 5 7 2 4 7: guess [2, 4, 7]
    """
    made, lookup = request([5, 7, 2, 9, 5, 7], 9), speculative.Lookup()
    for token in None, 2, 4, 7:
        made.generated += [] if token is None else [token]
        print(*made.tokens, end=": ")
        print("guess", list(lookup.guess(made, 3)))


def part_b():
    """
    A [3, 1, 2]  B []  C [3]
    """
    a, b, c = (request([1, 2, 3, 1, 2], 9, name) for name in "ABC")
    a.computed = c.computed = 4
    found = speculative.draft([(a, 1), (c, 1), (b, 2)], SimpleNamespace(token_budget=8), {}, 3)
    print("  ".join(f"{r.name} {list(found[r])}" for r in (a, b, c)))


def part_c():
    """
    0 guesses: 9 passes
    4 guesses: 6 passes
    the same tokens: True
    """
    tokens = []
    for guesses in 0, 4:
        made = request([1, 2, 3, 1, 2, 3], 9)
        trace = speculative.generate(toy(loud=False), [made], guesses=guesses)
        print(f"{guesses} guesses: {len(trace.passes)} passes")
        tokens.append(made.generated)
    print("the same tokens:", tokens[0] == tokens[1])
