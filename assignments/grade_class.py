"""
Grades a folder of submissions with the set's tests and larger, hidden workloads.

    python assignments/grade_class.py 3 handed_in --hidden SECRET --csv 3.csv
    python assignments/grade_class.py 3 submission --one --hidden SECRET --gradescope results.json

A submission is a folder or a zip archive. The student's folder may lie one or two folders down; the
id comes from the student.json that make.py wrote. Each part of each student runs in a process of
its own, in a copy of the folder, with limits on CPU time, memory and output. That stops mistakes,
not attacks: grade unknown code in a container (Dockerfile). What waits for ever is stopped by the
clock, and tried once more at the end, alone: a busy machine costs no points.

The exit status is 0 only if all that was graded is right.
"""
import argparse
import csv
import io
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

CPU, MEGABYTES, LARGEST = 600, 6000, 64 << 20   # hard limits; kit.py has the ones that count
PATIENCE = 900                                  # seconds by the clock
LATE = "does not finish within"
# Before pytest: the limits, and no module of the student's in the way of Python's own.
LIMITS = """
import sys
sys.path.pop(0)
try:
    import resource
    for name, most in ("CPU", {cpu}), ("AS", {megabytes} << 20), ("FSIZE", 4 << 20), ("CORE", 0):
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
except ImportError:
    pass   # Windows: the clock is the only limit
""".format(cpu=CPU, megabytes=MEGABYTES)
CHILD = f"{LIMITS}\nimport pytest\nsys.exit(pytest.main(sys.argv[1:]))"


# --- what was handed in ---------------------------------------------------------------------------

def unpacked(path, folder):
    """A copy of a submission in `folder`. ValueError for what leads out of it, or is too large."""
    if path.is_file():
        with zipfile.ZipFile(path) as archive:
            refuse_large(each.file_size for each in archive.infolist())
            archive.extractall(folder)
        return
    for each in path.rglob("*"):
        if each.is_symlink() and not each.resolve().is_relative_to(path.resolve()):
            raise ValueError(f"{each.relative_to(path)} is a link that leads out of the folder")
    refuse_large(each.stat().st_size for each in path.rglob("*") if each.is_file())
    shutil.copytree(path, folder, ignore=shutil.ignore_patterns(
        "__MACOSX", "__pycache__", ".git"))


def refuse_large(sizes):
    if sum(sizes) > LARGEST:
        raise ValueError(f"it is larger than {LARGEST >> 20} MB")


def found_in(folder, number):
    """The student's own folder: the first, at most two folders down, with student.json or code."""
    for names in ["student.json"], [name.split(":")[0] for name in functions_of(number)]:
        for depth in "", "*/", "*/*/":
            for name in names:
                for each in sorted(folder.glob(depth + name)):
                    if not any(part.startswith((".", "__MACOSX"))
                               for part in each.relative_to(folder).parts):
                        return each.parents[name.count("/")]
    raise ValueError("no file of the set is in it")


def id_of(folder, otherwise):
    try:
        return str(json.loads((folder / "student.json").read_text("utf-8-sig"))["student"])
    except (OSError, ValueError, TypeError, KeyError):
        return otherwise


# --- grading --------------------------------------------------------------------------------------

def graded(number, path, secret, patience, only=None):
    """{"student": id, "tests": as in Gradescope's results.json}; one test for each part."""
    result = {"student": path.stem, "tests": []}
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            unpacked(path, Path(folder, "copy"))
            place = found_in(Path(folder, "copy"), number)
            result["student"] = id_of(place, path.stem)
            for name, mark in parts_of(number).items():
                if only is None or name in only:
                    copy = Path(folder, "work")   # a fresh one: what a part breaks stays its own
                    shutil.rmtree(copy, ignore_errors=True)
                    shutil.copytree(place, copy)
                    result["tests"].append(test_of(number, name, mark, copy, Path(
                        folder, "results.json"), result["student"], secret, patience))
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
        done = {test["part"] for test in result["tests"]}
        result["tests"] += [outcome(name, mark, 0, f"cannot be graded: {error}")
                            for name, mark in parts_of(number).items() if name not in done]
    return result


def outcome(name, mark, score, output):
    return {"part": name, "name": f"{name} {mark.kwargs.get('title', '')}".strip(), "score": score,
            "max_score": mark.args[0], "output": output}


def test_of(number, name, mark, folder, results, student, secret, patience):
    """What one part of one student gets, in a process of its own."""
    test = "Test" + name if " " not in name else "test_" + name.replace(" ", "_")
    file = HERE / f"set{number}" / f"test_set{number}.py"
    command = [CHILD, f"{file}::{test}", "-q", "--tb=no", "--show-capture=no",
               "-p", "no:cacheprovider", "--rootdir", HERE, "--submission", folder,
               "--student", student, "--results", results,
               *(["-x"] if " " not in name else []), *(["--hidden", secret] if secret else [])]
    found = written_by(command, folder, results, patience)
    if isinstance(found, str):
        return outcome(name, mark, 0, found)
    return outcome(name, mark, *(found["tests"][0][key] for key in ("score", "output")))


def written_by(command, folder, results, patience):
    """What a limited process writes into the JSON file `results`; else a sentence, why not."""
    results.unlink(missing_ok=True)
    try:
        with open(results.with_suffix(".out"), "wb") as printed:
            status = subprocess.run(
                [sys.executable, "-c", *map(str, command)], cwd=folder, timeout=patience,
                stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT,
                env={**os.environ, "PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                     "PYTHONDONTWRITEBYTECODE": "1"}).returncode
        return json.loads(results.read_text("utf-8"))
    except subprocess.TimeoutExpired:
        return f"{LATE} {patience:g} seconds by the clock"
    except (OSError, ValueError):
        return f"{LATE} {CPU} seconds of CPU time" if status == -24 else (
            f"ends the process (status {status})")


def grade_class(number, paths, secret, jobs=2, patience=900):
    """Yields (name, result) as students are graded; then again those who hit a limit of time."""
    late = {}
    with ThreadPoolExecutor(jobs) as pool:
        tasks = {pool.submit(graded, number, path, secret, patience): path for path in paths}
        for task in as_completed(tasks):
            path, result = tasks[task], task.result()
            yield path.name, result
            if names := [test["part"] for test in result["tests"] if LATE in test["output"]]:
                late[path] = result, names
    for path, (result, names) in late.items():
        again = {test["part"]: test for test in graded(number, path, secret, patience,
                                                       names)["tests"]}
        result["tests"] = [again.get(test["part"], test) for test in result["tests"]]
        yield path.name, result


# --- the command ----------------------------------------------------------------------------------

def report(name, result):
    """What is printed for one student."""
    lines = [f"{name}: {result['student']}"]
    for test in result["tests"]:
        lines.append(f"  {test['name']:42}{test['score']:g}/{test['max_score']:g}")
        lines += [f"     {line}" for line in test["output"].splitlines()]
    return "\n".join([*lines, f"  {total(result):g} points"])


def total(result):
    return round(sum(test["score"] for test in result["tests"]), 2)


def write(path, text):
    """A file is never left half written."""
    Path(f"{path}.new").write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(f"{path}.new", path)


def save(args, results):
    if args.json:
        write(args.json, json.dumps(results, indent=1))
    if args.csv:
        table = io.StringIO()
        rows = csv.writer(table, lineterminator="\n")
        rows.writerow(["student", "folder", *parts_of(args.set), "total"])
        for name, result in sorted(results.items()):
            rows.writerow([result["student"], name, *(
                test["score"] for test in result["tests"]), total(result)])
        write(args.csv, table.getvalue())
    if args.gradescope and args.one:
        result, = results.values()
        write(args.gradescope, json.dumps({"tests": result["tests"]}, indent=1))


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("set", type=int, choices=SETS)
    p.add_argument("folder", type=Path, help="with a folder or zip archive for each student")
    p.add_argument("--one", action="store_true", help="FOLDER is one student's")
    p.add_argument("--hidden", metavar="SECRET", help="on which the hidden workloads depend")
    p.add_argument("--csv", metavar="FILE", help="a line for each student")
    p.add_argument("--json", metavar="FILE", help="all that is known; needed to --resume")
    p.add_argument("--gradescope", metavar="FILE", help="Gradescope's results.json, with --one")
    p.add_argument("--resume", action="store_true", help="skip those in the --json file")
    p.add_argument("--jobs", type=int, default=2, help="students at a time")
    p.add_argument("--patience", type=float, default=PATIENCE,
                   help="seconds by the clock for a part")
    args = p.parse_args(argv)
    if not args.folder.is_dir():
        p.error(f"{args.folder} is not a folder")
    if args.resume and not args.json:
        p.error("--resume needs --json FILE, where the results are")
    for file in filter(None, (args.csv, args.json, args.gradescope)):
        if not Path(file).absolute().parent.is_dir():
            p.error(f"{file}: there is no such folder")
    paths = [args.folder.absolute()] if args.one else sorted(
        path for path in args.folder.iterdir() if not path.name.startswith((".", "__MACOSX"))
        and (path.is_dir() or path.suffix == ".zip"))
    if not paths:
        p.error(f"there is no submission in {args.folder}")
    done = args.resume and Path(args.json).exists()
    results = json.loads(Path(args.json).read_text("utf-8")) if done else {}
    todo = [path for path in paths if path.name not in results]
    for name, result in grade_class(args.set, todo, args.hidden, args.jobs, args.patience):
        results[name] = result
        print(report(name, result), flush=True)
        save(args, results)
    for student, times in Counter(each["student"] for each in results.values()).items():
        if times > 1:
            print(f"{student}: {times} submissions have this id", file=sys.stderr)
    return all(test["score"] == test["max_score"] for each in results.values()
               for test in each["tests"])


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
