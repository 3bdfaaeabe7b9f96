"""
Exercises: what a reader's function gets wrong, in a sentence.

The function is called with arguments whose results are known, and compared as the course kit does
(assignments/compare.py). questions.toml has our code and the calls, mistakes.txt the usual mistakes
as edits of our code. Three exercises are parts of functions that the course kit asks for: they have
its mistakes.
"""
import ast
import copy
import inspect
import math  # noqa: F401 (our code uses it)
import signal
import sys
import textwrap
from collections import OrderedDict, deque  # noqa: F401 (for questions.toml)
from contextlib import contextmanager

import torch
from lesson import BANDWIDTH, FOLDER, PARAMETERS, PEAK  # noqa: F401 (our code uses them)
from lesson import QUESTIONS, folded

sys.path.insert(0, str(FOLDER.parent / "assignments"))
from child import plain
from compare import fault as compared
from functions import (
    answer_and_prints,
    mistakes_of,
    named_once,
    prints_held,
    with_prints,
    wrong_parameters,
)
from probes import kind_of, operations, plan_of

from generate_dynamic import Rectangle
from generate_prefix import PrefixPool
from generate_ragged import Flat
from lab.checks.edits import body_of, edited, put_in
from lab.checks.mistakes import mistakes_in
from model import Head

OWN_MISTAKES = mistakes_in(FOLDER / "mistakes.txt")


def exercise(function):
    """
    Judges a function of a notebook's reader, in a sentence, and returns it as it is. Ours stands
    below, behind a line to click.
    """
    name = function.__name__
    function.__globals__[name] = function   # it may call itself
    if name not in QUESTIONS:
        print(f"There is no exercise {name!r}. Keep the name that the function had here.")
        return function
    if still := unfinished(function):
        print(f"{name}: {still}, then run the cell.")
    else:
        fault = fault_of(function, **QUESTIONS[name])
        print(f"{name}: not yet. {fault}" if fault else f"{name}: right.")
    with folded():
        print(QUESTIONS[name]["code"].strip())
    return function


def unfinished(function):
    """What a function that still has its `...` asks for; "" if it has none."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    blanks = [line for line in ast.walk(definition)
              if isinstance(line, (ast.Assign, ast.Expr)) and is_blank(line.value)]
    if not blanks:
        return ""
    code = [line for line in body_of(definition) if line not in blanks]
    alone = all(isinstance(line, ast.Expr) and line in definition.body for line in blanks)
    if code and alone:   # a whole line, beside code
        line = function.__code__.co_firstlineno + blanks[0].lineno - 1
        return f"your code still has the line `...` (line {line} of the cell): delete it"
    return "replace ... by your code"


def is_blank(value):
    return isinstance(value, ast.Constant) and value.value is ...


def fault_of(function, calls, code, view="lambda result, *arguments: result", within=1e-5):
    """None, or what is wrong with a function, in a sentence. For the rest see questions.toml."""
    name, calls, view = function.__name__, eval(calls), eval(view)
    ours = defined(name, code)
    if fault := wrong_parameters(function, [*inspect.signature(ours).parameters]):
        return f"{fault}."
    names = [*inspect.signature(function).parameters]
    is_tensor = torch.is_tensor(ours(*copy.deepcopy(calls[0])))

    def answers(function):
        return answers_of(function, calls, names, view, is_tensor)

    right, students = answers(ours), answers(function)
    part = {
        "within": within,
        "right": right,
        "cases": [case_of(name, names, arguments) for arguments in calls],
        "mistakes": mistaken(name, code, answers, right) if students != right else {}}
    file = function.__code__.co_filename

    def name_of(path, line):
        return "this cell" if path == file else None

    fault = compared(part, students, name_of=name_of)
    if fault is None and "head" in names:
        return wasted(function, ours, calls[0])
    return fault and with_prints(fault, part, students)


def answers_of(function, calls, names, view, is_tensor):
    """
    Of each call: what it returns, and its arguments afterwards.

    names: of the arguments; view: what of a result is compared; is_tensor: whether ours returns one
    """
    answers = []
    for arguments in copy.deepcopy(calls):
        def call(arguments=arguments):
            result = view(function(*arguments), *arguments)
            value = {"the kind of what it returns": kind_of(result)} if is_tensor else {}
            value["it returns"] = result
            for name, argument in zip(names, arguments):
                if not isinstance(argument, (int, float)):   # which cannot change
                    value[f"{name} becomes"] = argument
            return value

        with limited(5):
            answers.append(answer_and_prints(call))
        if answers[-1].get("error", {}).get("type") == "TimeoutError":
            break   # so would the next
    return answers


def case_of(name, names, arguments):
    """A call as compare.py names it in a sentence."""
    return {"call": name, **dict(zip(names, map(shown, arguments)))}


def wasted(function, ours, arguments):
    """A sentence if a function multiplies more than ours: masks, where nothing is to be hidden."""
    with prints_held():
        students = operations(function, *copy.deepcopy(arguments))
        least = operations(ours, *copy.deepcopy(arguments))
    if students <= 1.01 * least:
        return None
    times = students / least
    return f"The result is right, but it takes {times:.1f} times our multiplications."


def mistaken(name, code, answers, right):
    """{sentence: the answers of our function with this mistake}"""
    sentences, gives = [], []
    for mistake in OWN_MISTAKES:
        if mistake.function == name:
            changes = [(old, new) for _, old, new in mistake.edits]
            sentences.append(mistake.sentence)
            gives.append(answers(defined(name, edited(code, changes, name))))
    for mistake in mistakes_of_the_kit(name):
        with put_in(mistake.edits, kept={}):
            sentences.append(mistake.sentence)
            gives.append(answers(IN_THE_KIT[name][-1]))
    if right[0]["value"]["it returns"] is not None:
        sentences.append("It returns nothing.")
        gives.append(answers(lambda *arguments: None))
    return named_once(sentences, gives)


def mistakes_of_the_kit(name):
    """Those of the function that has an exercise for a part."""
    if name not in IN_THE_KIT:
        return []
    number, part, function, _ = IN_THE_KIT[name]
    return [mistake for mistake in mistakes_of(number)
            if mistake.part == part and mistake.function == function]


def defined(name, code):
    """The function of that name in a piece of code."""
    scope = dict(globals())
    exec(code, scope)
    return scope[name]


def solution(name):
    """Our function of an exercise, for the cells after it."""
    return defined(name, QUESTIONS[name]["code"])


def shown(value):
    """An argument in a sentence: of a large tensor its shape, of a function nothing."""
    if inspect.isfunction(value):
        return None
    if isinstance(value, dict):
        return str(value)
    if torch.is_tensor(value) and value.numel() >= 12:
        return f"of shape {tuple(value.shape)}"
    is_sequence = isinstance(value, (list, tuple)) and len(value) > 0
    if is_sequence and not isinstance(value[0], (int, float)):
        return [*map(shown, value)]
    return plain(value)


@contextmanager
def limited(seconds):
    """TimeoutError after so many seconds of computing, where the system has such an alarm."""
    def stop(*_):
        raise TimeoutError(f"it does not end: {seconds} seconds of computing are over")
    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


# --- for questions.toml ---------------------------------------------------------------------------

def stream(*cu_seqlens):
    """Of varlen: random queries, caches of some older tokens and the new ones, and a head."""
    generator = torch.Generator().manual_seed(0)
    caches = []
    for end in cu_seqlens[1:]:
        k = torch.randn(2, 3 + end, 4, generator=generator)
        v = torch.randn(2, 3 + end, 4, generator=generator)
        caches.append((k, v))
    q = torch.randn(2, cu_seqlens[-1], 4, generator=generator)
    return q, caches, [*cu_seqlens], lambda q, k, v: Head()(q, k, v)


# --- for mistakes of the course kit: its functions, called as an exercise calls the reader's ------

def free(table, ref_count, free_queue, hash_of):
    """PrefixPool.free."""
    pool = PrefixPool(len(ref_count), 16)
    pool.ref_count, pool.hash_of = ref_count, hash_of
    pool.cached = {digest: {page: None} for page, digest in hash_of.items()}
    pool.free_queue = OrderedDict.fromkeys(free_queue)
    returned = pool.free(table)
    free_queue.clear()
    free_queue.extend(pool.free_queue)
    return returned


def row_mask(start, n, P, T):
    """The first row of Rectangle's mask. The others make it as wide as it is."""
    rows = [(start, n), (P, 1), (0, T)]   # of each request: what is computed, what is new
    plan = plan_of([{"prompt": start + n, "computed": start, "n": n} for start, n in rows])
    return Rectangle(plan).mask[0].flatten()


def varlen(q, caches, cu_seqlens, head):
    """Flat.attend_varlen, of a stream of such lengths."""
    rows = []
    for i, (keys, _) in enumerate(caches):
        end = keys.size(1)
        n = cu_seqlens[i + 1] - cu_seqlens[i]
        rows.append({"prompt": end, "computed": end - n, "n": n})
    return Flat(plan_of(rows)).attend_varlen(q, caches)


IN_THE_KIT = {   # name of an exercise: (set, part, function, the call above)
    "free": (5, "c", "generate_prefix.py:PrefixPool.free", free),
    "row_mask": (2, "e", "generate_dynamic.py:Rectangle.lay_out", row_mask),
    "varlen": (4, "d", "generate_ragged.py:Flat.attend_varlen", varlen)}
