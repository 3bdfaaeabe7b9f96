"""
Runs somebody's code on cases, in a process of its own, and writes down what it gives.

    python -E -P -B child.py FOLDER SECONDS GIGABYTES < cases > answers

Cases are a JSON list of {"call": a function of calls.py beside this file, and its arguments}. There
is a line of JSON for each of them: {"value": ...}, or {"error": ...} with the lines on its way.

No answer is known here. So code that ends the process, patches it, reads its frames or writes lines
of its own gains nothing. The limits are for accidents. This is no sandbox: see README.md.
"""
import importlib
import json
import os
import sys
import traceback
from collections.abc import Collection, Set


def limit(seconds, gigabytes):
    """Of CPU time, memory and output, where the system has such limits."""
    try:
        import resource
    except ImportError:   # Windows: the parent's clock is the only limit
        return
    limits = {"CPU": (seconds, seconds + 1), "AS": (gigabytes << 30,) * 2,
              "FSIZE": (1 << 26,) * 2, "CORE": (0, 0)}
    for name, soft_and_hard in limits.items():
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), soft_and_hard)
        except (ValueError, OSError):   # macOS does not limit memory
            pass


def answers_only():
    """A file for answers. All that code prints, by whatever name of stdout, goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.__stdout__ = sys.stderr
    return answers


def plain(value):
    """A value in JSON's own types: nothing of the student's classes crosses to the parent."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if hasattr(value, "tolist"):   # numbers, arrays and tensors of NumPy and PyTorch
        return plain(value.tolist())
    for kind in int, float, str:
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, dict):
        return {str(plain(key)): plain(each) for key, each in value.items()}
    if isinstance(value, Collection):
        each = [plain(each) for each in value]
        return sorted(each) if isinstance(value, Set) else each
    return str(getattr(value, "name", f"a {type(value).__name__}"))   # a request is its name


def error_of(error):
    """What was raised, and its way through files, as [[file, line, text], ...]."""
    way = [[frame.filename, frame.lineno, frame.line]
           for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        way = [[error.filename or "", error.lineno or 0, (error.text or "").strip()]]
    return {"type": type(error).__name__, "says": " ".join(str(error).split())[:150],
            "way": way[-30:]}


def answer(call, **arguments):
    """What a call gives: {"value": ...} or {"error": ...}."""
    try:
        value = plain(call(**arguments))
        json.dumps(value)
        return {"value": value}
    except BaseException as error:   # SystemExit and pytest's Skipped, too
        return {"error": error_of(error)}


def prepare(folder):
    """The folder joins sys.path after torch is imported: it may have a torch.py of its own."""
    kit = os.path.dirname(os.path.abspath(__file__))
    os.chdir(folder)
    sys.path.insert(0, kit)
    if os.path.exists("model.py"):
        importlib.import_module("torch")
    sys.path.insert(1, os.getcwd())


def import_calls():
    """(the module calls.py, None), or (None, the error that importing it has raised)."""
    try:
        return importlib.import_module("calls"), None
    except BaseException as error:
        return None, {"error": {**error_of(error), "loading": True}}


def main(folder, seconds, gigabytes):
    cases = json.load(sys.stdin)
    out = answers_only()
    # A fork of this process would go on with the case: each call of the code doubles their number.
    os.register_at_fork(after_in_child=lambda: os._exit(0))
    prepare(folder)
    limit(int(seconds), int(gigabytes))   # after torch, which asks for a lot of addresses
    calls, failed = import_calls()
    for case in cases:
        result = failed or answer(getattr(calls, case.pop("call")), **case)
        print(json.dumps(result), file=out, flush=True)
        if result.get("error", {}).get("type") == "MemoryError":   # it would be so in each case
            break
    os._exit(0)   # whatever threads it has left behind


if __name__ == "__main__":
    main(*sys.argv[1:])
