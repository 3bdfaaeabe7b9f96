"""
Grades a folder of submissions with the set's tests and larger, hidden workloads.

    python assignments/grade_class.py 3 handed_in --hidden SECRET --csv 3.csv
    python assignments/grade_class.py 3 submission --hidden SECRET --gradescope results.json

A submission is a folder or a zip archive. The student's folder may lie one or two folders down; the
id comes from the student.json that make.py wrote. Each part of each student runs in a process of
its own, in a copy of the folder, with limits on CPU time, memory and output. That stops mistakes,
not attacks: grade unknown code in a container (Dockerfile). What waits for ever is stopped by the
clock, and tried once more at the end, alone: a busy machine costs no points.

The exit status is 0 only if all that was graded is right.
"""
import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from make import HERE, SETS, functions_of, parts_of

from lab import flags

CPU = 600   # seconds, a hard limit for a part; kit.py has those that count
LATE = "does not finish within"


# --- what was handed in ---------------------------------------------------------------------------

def unpacked(path, folder):
    """A copy of a submission in `folder`. ValueError for a link that leads out of it."""
    if path.is_file():
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder)
        return
    for each in path.rglob("*"):
        if each.is_symlink() and not each.resolve().is_relative_to(path.resolve()):
            raise ValueError(f"{each.relative_to(path)} is a link that leads out of the folder")
    shutil.copytree(path, folder, ignore=shutil.ignore_patterns(
        "__pycache__", ".git", ".venv", "venv"))


def found_in(folder, number):
    """The student's own folder: the first, at most two folders down, with student.json or code."""
    for name in ["student.json", *(name.split(":")[0] for name in functions_of(number))]:
        for depth in "", "*/", "*/*/":
            for each in sorted(folder.glob(depth + name)):
                if "__MACOSX" not in each.parts:
                    return each.parents[name.count("/")]
    raise ValueError("no file of the set is in it")


def id_of(folder, otherwise):
    try:
        return str(json.loads((folder / "student.json").read_text("utf-8-sig"))["student"])
    except (OSError, ValueError, TypeError, KeyError):
        return otherwise


# --- grading --------------------------------------------------------------------------------------

def graded(number, path, secret, patience, only=None):
    """{"student": id, "tests": {part: a test as in Gradescope's results.json}}."""
    result, parts = {"student": path.stem, "tests": {}}, only or parts_of(number)
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            unpacked(path, Path(folder, "copy"))
            place = found_in(Path(folder, "copy"), number)
            result["student"] = id_of(place, path.stem)
            for part in parts:
                work = Path(folder, part)   # a fresh one: what a part breaks stays its own
                shutil.copytree(place, work / "work")
                result["tests"][part] = test_of(
                    number, part, work, result["student"], secret, patience)
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
        for part in parts:
            result["tests"].setdefault(part, failed(number, part, f"cannot be graded: {error}"))
    return result


def failed(number, part, output):
    mark = parts_of(number)[part]
    return {"name": f"{part} {mark.kwargs.get('title', '')}".strip(), "score": 0,
            "max_score": mark.args[0], "status": "failed", "output": output}


def test_of(number, part, folder, student, secret, patience):
    """What one part of one student gets, in a limited process of its own."""
    name = "Test" + part if " " not in part else "test_" + part.replace(" ", "_")
    results, status = folder / "results.json", None
    command = [sys.executable, "-m", "pytest", HERE / f"set{number}/test_set{number}.py::{name}",
               "-q", "--tb=no", "--show-capture=no", "-p", "no:cacheprovider", "--rootdir", HERE,
               "--limited", CPU, "--submission", folder / "work", "--student", student,
               "--results", results, *(["-x"] if " " not in part else []),
               *(["--hidden", secret] if secret else [])]
    try:   # in our folder, where no module of the student's is in the way of Python's own
        with open(folder / "printed", "wb") as printed:
            status = subprocess.run(
                map(str, command), cwd=HERE, timeout=patience, stdin=subprocess.DEVNULL,
                stdout=printed, stderr=subprocess.STDOUT, env={
                    **os.environ, "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                    "PYTHONDONTWRITEBYTECODE": "1"}).returncode
        return json.loads(results.read_text("utf-8"))["tests"][0]
    except subprocess.TimeoutExpired:
        return failed(number, part, f"{LATE} {patience:g} seconds by the clock")
    except (OSError, ValueError, IndexError):
        return failed(number, part, f"{LATE} {CPU} seconds of CPU time" if status == -24 else
                      f"ends the process (status {status})")


def grade_class(number, paths, secret, jobs=2, patience=900):
    """Yields (path, result) as students are graded; then again those who hit a limit of time."""
    late = []
    with ThreadPoolExecutor(jobs) as pool:
        tasks = {pool.submit(graded, number, path, secret, patience): path for path in paths}
        for task in as_completed(tasks):
            late.append((tasks[task], task.result()))
            yield late[-1]
    for path, result in late:
        if parts := [part for part, test in result["tests"].items() if LATE in test["output"]]:
            result["tests"] |= graded(number, path, secret, patience, parts)["tests"]
            yield path, result


# --- the command ----------------------------------------------------------------------------------

def row_of(name, result):
    """A line of the CSV file."""
    tests = result["tests"]
    return {"student": result["student"], "folder": name,
            **{part: test["score"] for part, test in tests.items()},
            "total": round(sum(test["score"] for test in tests.values()), 2),
            "sentences": "; ".join(f"{part}: {test['output']}" for part, test in tests.items()
                                   if test["output"]).replace("\n", " ")}


def save(file, rows):
    """Writes the rows. A file is never left half written."""
    with open(f"{file}.new", "w", newline="", encoding="utf-8", errors="replace") as table:
        writer = csv.DictWriter(table, [*rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: row["folder"]))
    os.replace(f"{file}.new", file)


def main(argv=None):
    p = flags.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("set", type=int, choices=SETS)
    p.add_argument("folder", type=Path, help="with a folder or zip archive for each student")
    p.add_argument("--hidden", metavar="SECRET", help="on which the hidden workloads depend")
    p.add_argument("--csv", metavar="FILE", help="a line for each student")
    p.add_argument("--resume", action="store_true", help="skip those in the --csv file")
    p.add_argument("--gradescope", metavar="FILE", help="Gradescope's results.json: FOLDER is one "
                   "student's")
    p.add_argument("--jobs", type=int, default=2, help="students at a time")
    p.add_argument("--patience", type=float, default=900, help="seconds by the clock for a part")
    return p.run(grade, argv)


def grade(args):
    """Prints what each student gets. Returns the exit status."""
    flags.check_path(args.csv, "--csv")
    flags.check_path(args.gradescope, "--gradescope")
    if not args.folder.is_dir():
        raise ValueError(f"{args.folder} is not a folder")
    paths = [args.folder.absolute()] if args.gradescope else sorted(
        path for path in args.folder.iterdir() if not path.name.startswith((".", "__MACOSX"))
        and (path.is_dir() or path.suffix == ".zip"))
    if not paths:
        raise ValueError(f"there is no submission in {args.folder}")
    rows = {}
    if args.resume and args.csv and Path(args.csv).exists():
        with open(args.csv, newline="", encoding="utf-8") as table:
            rows = {row["folder"]: row for row in csv.DictReader(table)}
        print(f"{len(rows)} are in {args.csv} already")
    todo = [path for path in paths if path.name not in rows]
    for path, result in grade_class(args.set, todo, args.hidden, args.jobs, args.patience):
        row = rows[path.name] = row_of(path.name, result)
        print(f"{path.name}: {row['student']}")
        for test in result["tests"].values():
            print(f"  {test['name']:42}{test['score']:g}/{test['max_score']:g}")
            print("".join(f"     {line}\n" for line in test["output"].splitlines()), end="")
        print(f"  {row['total']:g} points", flush=True)
        if args.csv:
            save(args.csv, [*rows.values()])
        if args.gradescope:
            Path(args.gradescope).write_text(json.dumps({"tests": [*result["tests"].values()]}),
                                             encoding="utf-8", errors="backslashreplace")
    for student, times in Counter(row["student"] for row in rows.values()).items():
        if times > 1:
            print(f"{student}: {times} submissions have this id", file=sys.stderr)
    most = sum(mark.args[0] for mark in parts_of(args.set).values())
    return int(any(float(row["total"]) != most for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
