"""
The judge of exercises: what a reader's function gets wrong, in a sentence.

It is called with arguments whose results are known, and takes the place of the repository's own
code in a run. questions.toml has our code, the arguments, and the usual mistakes as edits of it.
"""
import copy
import inspect
import math  # noqa: F401 (our code uses it)
import re
import traceback
from collections import deque
from itertools import pairwise

import torch
from lesson import BANDWIDTH, PARAMETERS, PEAK  # noqa: F401 (our code uses them)
from lesson import QUESTIONS, STAGES, folded, letters, model  # noqa: F401

from assignments.judge import faults
from assignments.probes import operations
from lab.checks.edits import edited, function_named, swapped
from model import Head


def exercise(function):
    """
    Judges a function of a notebook's reader, in a sentence, and returns it as it is. Ours stands
    below, behind a line to click.
    """
    name = function.__name__
    function.__globals__[name] = function   # it may call itself
    if blank(function):
        print(f"{name}: replace ... by your code, then run the cell.")
    else:
        fault = said_by(lambda: fault_of(function, **QUESTIONS[name]), function)
        print(f"{name}: " + (f"not yet. {fault}" if fault else "right."))
    with folded():
        print(QUESTIONS[name]["code"].strip())
    return function


def blank(function):
    """Whether a function still has its `...`."""
    return re.search(r"^ +(\w+ = )?\.\.\.", inspect.getsource(function), re.MULTILINE)


def said_by(call, *functions):
    """What a call returns; or its error, with the line of these functions that raised it."""
    try:
        return call()
    except Exception as error:   # of the reader's code, whatever it is
        files = {function.__code__.co_filename for function in functions}
        lines = [f"line {frame.lineno}, {frame.line}: "
                 for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
        kind = "" if type(error).__name__ == "Fault" else f"{type(error).__name__}: "
        said = f"{''.join(lines[-1:])}{kind}{error}".rstrip(".")
        return ". ".join([said, *getattr(error, "__notes__", ())])


def fault_of(function, calls, code, mistakes, run=None, view="lambda result, *given: result"):
    """None, or what is wrong with a function, in a sentence. For the rest see questions.toml."""
    name, calls, view = function.__name__, eval(calls), eval(view)

    def results(function):   # for each call, what it returns, and its arguments afterwards
        return [[view(function(*given), *given), *given] for given in copy.deepcopy(calls)]

    def explained(theirs):   # what to say of the first usual mistake with these results: [sentence]
        for old, new, why in mistakes:
            wrong = edited(code, [(old, new)], name)
            try:
                other = results(defined(name, wrong))
            except Exception as error:
                other = str(error)
            if same(theirs, other):
                return [why]
        return []

    try:
        theirs = results(function)
    except Exception as error:
        for why in explained(str(error)):
            error.add_note(why)
        raise
    fault, alike = difference(function, calls, theirs, results(defined(name, code)))
    if run and alike:
        fault = fault_in_run(function, **run) or fault
    if fault:
        return " ".join([fault, *explained(theirs)])
    if "head" in inspect.signature(function).parameters:
        mine, ours = (operations(each, *copy.deepcopy(calls[0])) for each in
                      (function, defined(name, code)))
        if mine > 1.01 * ours:   # a mask, where there is nothing to hide
            return f"The result is right, but it takes {mine / ours:.1f} times our multiplications."


def defined(name, code):
    """The function of that name in a piece of code."""
    scope = dict(globals())
    exec(code, scope)
    return scope[name]


def solution(name):
    """Our function of an exercise, for the cells after it."""
    return defined(name, QUESTIONS[name]["code"])


def difference(function, calls, theirs, right):
    """The first result that differs, in a sentence, or None; and whether it looks right."""
    names = [*inspect.signature(function).parameters]
    for call, *both in zip(calls, theirs, right):
        for what, before, mine, our in zip(["returns", *names], [None, *call], *both):
            if not same(mine, our):
                given = ", ".join(f"{n} = {shown(v)}" for n, v in zip(names, call)
                                  if not inspect.isfunction(v))
                what = "it returns" if what == "returns" else f"{what} becomes"
                got, expected = shown(mine), shown(our)
                if alike := got == expected:   # so what is in them differs
                    got, expected = f"{mine}".replace("\n", ""), f"{our}".replace("\n", "")
                return f"For {given}: {what} {got}, expected {expected}.", alike
    return None, True


def same(a, b):
    """Whether two results agree: times to 1%, tensors to rounding. Arrays do for tensors."""
    if isinstance(b, torch.Tensor):
        a = torch.as_tensor(a) if hasattr(a, "__array__") else a
        return shown(a) == shown(b) and torch.allclose(a.double(), b.double(), atol=1e-5)
    if isinstance(b, (list, tuple, deque)):
        return isinstance(a, (list, tuple, deque)) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(b, (int, float)) and hasattr(a, "__float__"):   # numpy's numbers do as well
        return abs(float(a) - b) <= 0.01 * abs(b) * isinstance(b, float)
    return type(a) is type(b) and a == b


def shown(value):
    """A value in a sentence."""
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype)[6:]} tensor of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple, deque)):
        return f"[{', '.join(map(shown, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else f"{value!r:.60}"


def fault_in_run(function, stage, requests, knobs, edit):
    """
    The first thing that goes wrong in a run with the reader's function, in a sentence. edit: whose
    code it takes a place in, the old text, and the new, in which it is `reader`.
    """
    with swapped(function_named(edit[0]), [edit[1:]], reader=function):
        found = faults(STAGES[stage], model, eval(requests), **knobs)
        return next((f"{sentence}." for _, sentence in found), None)


# --- for questions.toml ---------------------------------------------------------------------------

def stream(*cu_seqlens):
    """Of varlen: random queries, caches of 3 older tokens and the new ones, and a head."""
    g = torch.Generator().manual_seed(0)
    caches = [tuple(torch.randn(2, 3 + b - a, 4, generator=g) for _ in "kv")
              for a, b in pairwise(cu_seqlens)]
    q = torch.randn(2, cu_seqlens[-1], 4, generator=g)
    return q, caches, [*cu_seqlens], lambda q, k, v: Head()(q, k, v)
