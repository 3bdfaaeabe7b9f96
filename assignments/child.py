"""
Runs somebody's code on cases, in a process of its own, and writes down what it gives.

    python -E -P -B child.py JOBS OUT SECONDS GIGABYTES

JOBS: [[folder, cases], ...]; a case is {"call": a function of the folder's kit/run.py, and its
arguments}. OUT gets a line of JSON for each: {"value": ...}, or {"error": ...}, with the lines on
its way.

No answer is known here: code that ends the process, patches it, reads its frames or writes into OUT
gains nothing. What it may touch is limited, too: its own folder, and Python's packages to read.
"""
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Collection, Set

FORBIDDEN = ("os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "os.link",
             "os.symlink", "pty.", "subprocess.", "socket.")
READS = "open", "os.listdir", "os.scandir"
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.truncate",
           "shutil.")
WRITE = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def limit(seconds, gigabytes):
    """Of CPU time and memory. Windows has none: the clock of the parent is the only limit."""
    try:
        import resource
    except ImportError:
        return
    for name, most in ("CPU", seconds), ("AS", gigabytes << 30), ("FSIZE", 1 << 26), ("CORE", 0):
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most + (name == "CPU")))
        except (ValueError, OSError):   # macOS does not limit memory
            pass


def guard(folder, realpath=os.path.realpath, decode=os.fsdecode):
    """Python's audit hook: PermissionError for other files, processes and sockets."""
    mine = tuple(f"{realpath(place)}{os.sep}" for place in (folder, os.devnull))
    readable = mine + tuple(f"{realpath(place)}{os.sep}" for place in sys.path)
    forbidden, reading, changing, write = FORBIDDEN, READS, CHANGES, WRITE   # nobody exchanges them

    def check(event, args):
        reads, changes = event in reading, event.startswith(changing)
        if event.startswith(forbidden):
            raise PermissionError(f"{event} is not allowed here")
        if (reads or changes) and args[0] is not None and not isinstance(args[0], int):
            changes = changes or event == "open" and (args[2] or 0) & write
            if not f"{realpath(decode(args[0]))}{os.sep}".startswith(mine if changes else readable):
                raise PermissionError(f"{decode(args[0])} is not a file of this folder")

    if not hasattr(sys, "getwindowsversion"):   # Python's own files are anywhere there
        sys.addaudithook(check)


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
    """What was raised, and the lines of the folder's code on the way to it."""
    frames = [[os.path.relpath(frame.filename), frame.lineno, frame.line]
              for frame in traceback.extract_tb(error.__traceback__)
              if os.path.realpath(frame.filename).startswith(os.getcwd() + os.sep)]
    if isinstance(error, SyntaxError):
        frames = [[os.path.relpath(error.filename or ""), error.lineno, (error.text or "").strip()]]
    return {"type": type(error).__name__, "says": " ".join(str(error).split())[:150],
            "frames": frames[-20:]}


def load(folder):
    """The folder's kit/run.py, and anew what it imports from the folder."""
    before = os.getcwd() + os.sep
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(before):
            del sys.modules[name]
    os.chdir(folder)
    sys.path[0] = folder
    spec = importlib.util.spec_from_file_location("run", os.path.join(folder, "kit", "run.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(run, call, **arguments):
    try:
        value = plain(getattr(run, call)(**arguments))
        json.dumps(value)
        return {"value": value}
    except BaseException as error:   # SystemExit and pytest's Skipped, too
        return {"error": error_of(error)}


def main(jobs, out, seconds, gigabytes):
    with open(jobs, encoding="utf-8") as file:
        jobs = [(os.path.realpath(folder), cases) for folder, cases in json.load(file)]
    out = open(out, "w", encoding="utf-8")
    ours = tuple(os.path.realpath(place) + os.sep for place in (sys.prefix, sys.base_prefix))
    sys.path[:] = [place for place in sys.path   # and no folder that a .pth file has added
                   if os.path.realpath(place).startswith(ours)
                   or place.endswith(("site-packages", "dist-packages"))]
    if os.path.exists(os.path.join(jobs[0][0], "model.py")):
        importlib.import_module("torch")   # it looks around on the machine, so it comes first
    sys.path.insert(0, jobs[0][0])
    limit(int(seconds), int(gigabytes))
    if len(jobs) == 1:   # somebody's own; several are ours
        guard(jobs[0][0])
    for folder, cases in jobs:
        try:
            run, failed = load(folder), None
        except BaseException as error:
            failed = {"error": {**error_of(error), "loading": True}}
        for case in cases:
            said = failed or answer(run, **case)
            out.write(json.dumps(said) + "\n")
            out.flush()
            if said.get("error", {}).get("type") == "MemoryError":   # it would be so in each case
                break
    sys.__stdout__.flush()
    os._exit(0)   # whatever threads it has left behind


if __name__ == "__main__":
    main(*sys.argv[1:])
