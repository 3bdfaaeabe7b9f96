"""
Grading one folder that was handed in.

Each part runs alone, in a child process: the student's files with the part's functions, with our
source of all other functions behind them, and our copy of every other file. The parent runs ours on
the same cases, and compares.
"""
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from functools import cache
from hashlib import sha256
from pathlib import Path

from compare import ask, fault
from functions import ROOT, answers_to, drawn, module_of, parts_of, record
from source import blanked, files_of, functions_of, pasted, write

from lab.checks.edits import put_in

IGNORED = shutil.ignore_patterns(
    "kit", ".git", ".venv", "venv", "__pycache__", "*.pyc", "*.so", "*.pyd")
NOBODY = 65534


def limits(number):
    """Of a part: seconds of CPU time, and gigabytes. Torch takes two of each."""
    return (20, 6) if "model.py" in module_of(number, "cases").FILES else (10, 2)


# --- what cannot be graded ------------------------------------------------------------------------

def refusal(number, path):
    """Why there is nothing to grade, in a line; None if there is."""
    if path.is_symlink():
        return "is a link; links are not followed"
    if not path.is_dir():
        return "is not a folder; an archive is unpacked first, into a folder named after the id"
    asked = {function.split(":")[0] for function in functions_of(number)}
    if any(os.path.lexists(path / file) for file in asked):
        return None
    for nested in sorted(path.iterdir()):
        if nested.is_dir() and any((nested / file).exists() for file in asked):
            return f"has its files in a folder of their own, {nested.name}/; move them up"
    return f"has none of the files of set {number}: {', '.join(sorted(asked))}"


# --- a part ---------------------------------------------------------------------------------------

class Unreadable(Exception):
    """A student's file that cannot be read; the message says which and why."""


def graded(number, folder, secret):
    """{part: what is wrong with it, or None} of a student's folder."""
    faults = {}
    for part, cases in drawn(number, f"{secret} {number} {folder.name}").items():
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
            work = Path(place).resolve() / "work"
            try:
                message = fault_in(number, part, cases, folder, work)
            except Unreadable as error:
                message = str(error)
            except (RecursionError, OverflowError):
                message = "what it gives is too deep or too large to be compared"
        faults[part] = message and one_line(message)
    return faults


def fault_in(number, part, cases, folder, work):
    """What is wrong with a part; None if it is right. The child runs in `work`."""
    student_lines = lay_out(number, part, folder, work)
    ours = files_of(number)

    def name_of(file, line):
        """How a place in the student's code is called. Of our code behind it, nothing is said."""
        inside = work in Path(file).parents
        name = Path(file).relative_to(work).as_posix() if inside else ""
        if name in student_lines:
            return name if line <= student_lines[name] else None
        return None if name in ours else name

    user = child_user()
    if user:
        give_to(user, work)
    answers, ended = ask(work, cases, *limits(number), user=user)   # no right answer exists yet
    return fault(record(number, part, cases), answers, ended, name_of)


def lay_out(number, part, folder, work):
    """
    Copies a student's folder to `work`, completed by ours for one part. Returns {file: how many
    lines of it are the student's} of the files that hold the part's functions.
    """
    try:
        shutil.copytree(folder, work, ignore=left_out)
    except (OSError, ValueError) as error:
        raise unreadable("the folder", error) from None
    functions_of_part = [name.split(":") for name in parts_of(number)[part][2]]
    files, student_lines = files_for(number, part), {}
    for file in {file for file, _ in functions_of_part}:
        asked = [name for where, name in functions_of_part if where == file]
        others = names_in(file, number) - {*asked}
        text = student_text(folder, work, file)
        student_lines[file] = text.count("\n") + 1
        try:
            files[file] = pasted(text, files[file], others, asked)
        except (ValueError, RecursionError, MemoryError) as error:
            raise unreadable(file, error) from None
    try:
        write(work, files)
    except (OSError, ValueError) as error:
        raise unreadable("the folder", error) from None
    return student_lines


def files_for(number, part):
    """
    Our files, without the solutions of later parts, as far as this part does without them: code
    that is judged can read what lies beside it.
    """
    files = files_of(number)
    for function, first_part in functions_of(number).items():
        if first_part > part and function not in called_by(number, part):
            file, name = function.split(":")
            files[file] = blanked(files[file], name, f"{name} is of part {first_part}")
    return files


@cache
def called_by(number, part):
    """The functions of a set that our code calls in the cases of a part."""
    called = set()
    edits = [(name, "", f"called.add({name!r})") for name in functions_of(number)]
    with put_in(edits, called=called):
        answers_to(number, drawn(number, "public")[part])
    return called


def names_in(file, number):
    """The functions of a file that any part asks for."""
    return {name for where, name in (function.split(":") for function in functions_of(number))
            if where == file}


def student_text(folder, work, file):
    """A student's file, which Python can compile."""
    if (folder / file).is_symlink():
        raise Unreadable(f"{file} cannot be read: it is a link, and links are not followed")
    try:
        text = (work / file).read_text("utf-8-sig")
        compile(text, file, "exec")
        return text
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise unreadable(file, error) from None


def unreadable(file, error):
    return Unreadable(f"{file} cannot be read: {getattr(error, 'strerror', '') or error}")


def left_out(folder, names):
    """What is not copied: a link would let a student's file be one of ours, or ours replace it."""
    special = set()
    for name in names:
        path = Path(folder, name)
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            special.add(name)
    return special | IGNORED(folder, names)


def one_line(text):
    """Whatever code gives, a message stays in its line."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


# --- the child's user -----------------------------------------------------------------------------

@cache
def child_user():
    """
    Where the kit is root, the child is nobody: it can read neither the secret nor the results. None
    elsewhere, and where nobody cannot start this Python.
    """
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return None
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    command = [sys.executable, "-E", "-P", "-c", "import json"]
    try:
        started = subprocess.run(command, cwd="/", capture_output=True, **user).returncode == 0
    except OSError:
        started = False
    if not started:
        print("kit.py: the user nobody cannot start this Python, so code that is graded runs as "
              "root", file=sys.stderr)
    return user if started else None


def give_to(user, work):
    """The child's user reads and writes its copy, and finds the way to it."""
    os.chmod(work.parent, 0o711)
    for path in (work, *work.rglob("*")):
        os.chown(path, user["user"], user["group"])
        mode = stat.S_IRUSR | stat.S_IWUSR | (stat.S_IXUSR if path.is_dir() else 0)
        os.chmod(path, stat.S_IMODE(path.stat().st_mode) | mode)


# --- a line ---------------------------------------------------------------------------------------

def line_of(number, folder, secret):
    """
    What is printed of a submission: the points, and what a regrade is compared by: the commit of
    the kit, and a hash of the secret.
    """
    started = time.monotonic()
    parts = parts_of(number)
    message, points, says = refusal(number, folder), {}, {}
    if message:
        says["folder"] = message
    else:
        for part, wrong in graded(number, folder, secret).items():
            points[part] = 0 if wrong else parts[part][0]
            if wrong:
                says[part] = wrong
    return {"id": folder.name, "points": points, "total": None if message else sum(points.values()),
            "of": sum(worth for worth, *_ in parts.values()), "says": says, "commit": commit(),
            "secret": sha256(secret.encode()).hexdigest()[:12],
            "seconds": round(time.monotonic() - started, 1)}


@cache
def commit():
    """The clone's commit, with a + if files differ from it; "" where there is none."""
    def git(*command):
        return subprocess.run(["git", "-c", f"safe.directory={ROOT}", "-C", ROOT, *command],
                              capture_output=True, text=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + "+" * bool(git("status", "--porcelain"))
    except OSError:   # no git
        return ""
