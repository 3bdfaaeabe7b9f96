"""
Runs somebody's code on cases, in a process of its own, and writes down what it gives.

    python -E -P -B child.py FOLDER SECONDS GIGABYTES < cases > answers

Cases are a JSON list of {"call": a function of calls.py beside this file, and its arguments}. There
is a line of JSON for each of them: {"value": ...}, or {"error": ...} with the lines on its way.

No answer is known here. So code that ends the process, patches it, reads its frames or writes lines
of its own gains nothing. But this is no sandbox: see README.md.
"""
import importlib
import json
import os
import sys
import traceback
from collections.abc import Collection, Set

FORBIDDEN = ("os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "pty.",
             "subprocess.", "socket.")   # an os.fork in a loop of cases is a fork bomb


def limit(seconds, gigabytes, forbidden=FORBIDDEN):
    """Of CPU time and memory, where the system has them; and no other processes or sockets."""
    def check(event, args):
        if event.startswith(forbidden):
            raise PermissionError(f"{event} is not allowed here")

    sys.addaudithook(check)
    try:
        import resource
    except ImportError:   # Windows: the parent's clock is the only limit
        return
    for name, most in ("CPU", seconds), ("AS", gigabytes << 30), ("FSIZE", 1 << 26), ("CORE", 0):
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most + (name == "CPU")))
        except (ValueError, OSError):   # macOS does not limit memory
            pass


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


def main(folder, seconds, gigabytes):
    kit = os.path.dirname(os.path.abspath(__file__))
    os.chdir(folder)
    sys.path[:0] = [kit, os.getcwd()]
    cases, out = json.load(sys.stdin), sys.stdout
    sys.stdout = sys.stderr   # what code prints is no answer
    if os.path.exists("model.py"):
        importlib.import_module("torch")   # before the limits: it asks for a lot of addresses
    limit(int(seconds), int(gigabytes))
    calls, failed = None, None
    try:
        calls = importlib.import_module("calls")
    except BaseException as error:
        failed = {"error": {**error_of(error), "loading": True}}
    for case in cases:
        said = failed or answer(getattr(calls, case.pop("call")), **case)
        print(json.dumps(said), file=out, flush=True)
        if said.get("error", {}).get("type") == "MemoryError":   # it would be so in each case
            break
    os._exit(0)   # whatever threads it has left behind


if __name__ == "__main__":
    main(*sys.argv[1:])
