"""
Grades a class.

    python assignments/grade.py 3 handed_in/* --secret S --csv 3.csv
    python assignments/grade.py 3 . --secret S --id ada --result result.json     one, elsewhere

A submission is a folder or a zip archive; its name is the id. Cases are drawn from secret and id.
Each part runs alone, in a child: the student's file with our source of all other parts. The parent
runs ours on the same cases, and compares. The exit status is 0 unless the grading itself failed.
"""
import argparse
import csv
import datetime
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from compare import alike, ask, fault
from source import (
    SETS,
    drawn,
    edited,
    files_of,
    functions_of,
    limits,
    mistakes_of,
    parameters,
    pasted,
    write,
)

IGNORED = shutil.ignore_patterns(".git", ".venv", "venv", "__pycache__", "*.pyc", "*.so", "*.pyd")


class KitError(Exception):
    """The kit itself is wrong: an edit that does not apply, a mistake that no case shows."""


# --- what is right --------------------------------------------------------------------------------

def reference(number, rng):
    """
    {part: what compare.fault needs of it}, for cases drawn from rng. Ours and ours with each
    mistake run in one child. KitError if a mistake fails no case.
    """
    made, variants = files_of(number), mistakes_of(number)
    cases = json.loads(json.dumps(drawn(number).cases(rng)))   # as the child reads them
    light = {part: [case for case in cases[part] if case["call"] not in getattr(
        drawn(number), "HEAVY", ())] for part in cases}
    with tempfile.TemporaryDirectory() as place:
        write(place, made)
        jobs = [(place, [case for part in cases for case in cases[part]], {})]
        for part, sentence, function, old, new in variants:
            try:
                changed = edited(made, function, old, new)
            except ValueError as error:
                raise KitError(f"set {number}, {sentence!r}: {error}") from None
            file = function.split(":")[0]
            jobs.append((place, light[part], {file: changed[file]}))
        answers, ended = ask(jobs, 60, 16)
    if len(answers) < sum(len(asked) for _, asked, _ in jobs):
        raise KitError(f"set {number}: the reference {ended}")
    parts, answers = {}, iter(answers)
    for part, (points, title, *functions) in drawn(number).PARTS.items():
        right = [next(answers) for _ in cases[part]]
        if broken := next((each for each in right if "value" not in each), None):
            raise KitError(f"set {number}, part {part}: the reference raises {broken['error']}")
        parts[part] = {"points": points, "title": title, "functions": functions, "mistakes": {},
                       "cases": cases[part], "right": [each["value"] for each in right]}
    for part, sentence, *_ in variants:
        gives = {str(i): without_lines(next(answers)) for i, case in enumerate(cases[part])
                 if case in light[part]}
        wrong = {i: gives[i] for i in gives if not alike(gives[i], {"value": parts[part]["right"][int(i)]})}
        if not wrong:
            raise KitError(f"set {number}, part {part}: the mistake {sentence!r} fails no case")
        parts[part]["mistakes"][sentence] = wrong
    return parts


def without_lines(answer):
    """An answer for a template: the lines on an error's way are lines of the solution."""
    return {"error": {**answer["error"], "frames": []}} if "error" in answer else answer


# --- one submission -------------------------------------------------------------------------------

def unpacked(path, place, number):
    """A copy of a submission; the student's folder is where the first of the set's files lies."""
    if path.is_file():
        shutil.unpack_archive(path, place, "zip")
    else:
        shutil.copytree(path, place, symlinks=True, ignore=IGNORED)
    for each in [each for each in place.rglob("*") if each.is_symlink()]:
        each.unlink()
    for file in dict.fromkeys(function.split(":")[0] for function in functions_of(number)):
        for depth in "", "*/", "*/*/":
            for found in sorted(place.glob(depth + file)):
                if "__MACOSX" not in found.parts:
                    return found.parents[file.count("/")]
    raise ValueError("no file of the set is in it")


def tried(number, part, record, folder, ours_elsewhere=False):
    """What is wrong with one part of the student's folder, or None. All other parts are ours."""
    made, functions, origins = files_of(number), functions_of(number), {}
    theirs = {function.split(":")[0] for function in functions}
    asked = {function.split(":")[0] for function in record["functions"]}
    for file in theirs:
        names = [function.split(":")[1] for function, of in functions.items()
                 if function.split(":")[0] == file and of != part
                 and function not in record["functions"]]
        try:
            text = (folder / file).read_text("utf-8-sig")
            text, origins[file] = pasted(text, made[file], names)
            compile(text, file, "exec")
        except (OSError, ValueError, AttributeError, SyntaxError, RecursionError, MemoryError) as error:
            if file in asked and isinstance(error, OSError):
                return f"{file} is not there"
            if file in asked and isinstance(error, (SyntaxError, UnicodeError)):
                at = f" line {error.lineno}: {error.msg}" if hasattr(error, "lineno") else f" {error}"
                return f"{file} cannot be read:{at}"
            if file in asked and not isinstance(error, AttributeError):
                return f"{file} cannot be read: {error or type(error).__name__}"
            text = made[file]   # its own part says what is wrong
        if ours_elsewhere and file not in asked:
            text = made[file]
        made[file] = text

    def origin(frame):
        file, line, text = frame
        if file in origins:
            line = origins[file][line - 1] if line and line <= len(origins[file]) else None
        return [file, line, text] if file in origins or file not in made else None

    with tempfile.TemporaryDirectory() as place:
        copy = Path(place, "work")
        shutil.copytree(folder, copy)
        write(copy, made)
        answers, ended = ask([(copy, record["cases"], {})], *limits(number))
    broken = answers and "error" in answers[0] and answers[0]["error"].get("loading")
    if broken and not ours_elsewhere and theirs - asked:
        return tried(number, part, record, folder, ours_elsewhere=True)
    return fault(record, answers, ended, lambda frame: (frame := origin(frame)) and frame[1] and frame)


def graded(number, path, secret, student=None):
    """What is wrong with each part of one submission (None: nothing), and its points."""
    student = student or path.resolve().name.removesuffix(".zip")
    parts = reference(number, random.Random(f"{secret} {number} {student}"))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        try:
            folder = unpacked(path, Path(place, "in"), number)
            said = {part: tried(number, part, record, folder) for part, record in parts.items()}
        except (OSError, ValueError, shutil.ReadError) as error:
            said = dict.fromkeys(parts, f"cannot be read: {error}")
    return {"id": student, "said": said, "points": {
        part: 0 if said[part] else record["points"] for part, record in parts.items()}}


def hours_late(path, due):
    """Of the last commit; without one, of the newest file. Both dates are the student's to set."""
    git = ["git", "-c", "core.fsmonitor=false", "-c", "log.showSignature=false", "-C", str(path)]
    ran = (Path(path, ".git").exists() and subprocess.run(
        [*git, "--no-pager", "log", "-1", "--format=%ct"], capture_output=True, text=True).stdout)
    files = [each for each in [path, *path.rglob("*")] if each.is_file()]
    when = float(ran) if ran else max((each.stat().st_mtime for each in files), default=0)
    return max(0, math.ceil((when - due.timestamp()) / 3600))


# --- a class --------------------------------------------------------------------------------------

def table(number, results, before, late):
    """The rows of the CSV. before: {id: row} of an older one, whose written points stay."""
    asked = drawn(number).WRITTEN
    of = sum(points for points, *_ in drawn(number).PARTS.values()) + sum(asked.values())
    for result in results:
        written = {name: before.get(result["id"], {}).get(name, "") for name in asked}
        points = sum(result["points"].values()) + sum(float(each) for each in written.values() if each)
        yield {"id": result["id"], **result["points"], **written, "points": f"{points:g}", "of": of,
               "late": late.get(result["id"], ""), "says": "; ".join(
                   f"{part}: {said}" for part, said in result["said"].items() if said)}


def feedback(number, result, secret):
    """What a student reads: the points of each part, a sentence, and the numbers of question 1."""
    lines = [f"# Set {number}: {result['id']}", ""]
    for part, (points, title, *_) in drawn(number).PARTS.items():
        lines += [f"- {part}, {title}: {result['points'][part]} of {points}. "
                  f"{result['said'][part] or 'All is right.'}"]
    own = parameters(number, random.Random(f"{secret} {number} {result['id']}"))
    lines += ["", "Written questions are graded by hand. Your numbers: "
              + ", ".join(f"{name} = {value}" for name, value in own.items()) + "."]
    return "\n".join(lines) + "\n"


def for_gradescope(number, result):
    return {"tests": [{"name": f"{number}{part} {title}", "score": result["points"][part],
                       "max_score": points, "output": result["said"][part] or "",
                       "status": "failed" if result["said"][part] else "passed"}
                      for part, (points, title, *_) in drawn(number).PARTS.items()]}


def for_classroom50(number, result):
    """result.json of foundation50's Classroom 50, whose runner says in its environment who it is."""
    tests = [{"test-name": test["name"], "passed": test["status"] == "passed", "score": test["score"],
              "max-score": test["max_score"]} for test in for_gradescope(number, result)["tests"]]
    names = {"classroom": "CLASSROOM", "assignment": "ASSIGNMENT", "owner": "USERNAME",
             "assignment_type": "ASSIGNMENT_TYPE", "submission": "SUBMISSION_TAG",
             "commit": "COMMIT_URL", "release": "RELEASE_URL", "review": "REVIEW_URL"}
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"schema": "classroom50/result/v1", **{
        key: os.environ.get(name, "") for key, name in names.items()}, "datetime": now,
        "score": sum(test["score"] for test in tests),
        "max-score": sum(test["max-score"] for test in tests), "tests": tests}


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[1], allow_abbrev=False)
    p.add_argument("set", type=int, choices=SETS)
    p.add_argument("submissions", type=Path, nargs="+", metavar="DIR", help="folders or zip archives")
    p.add_argument("--secret", required=True, help="the cases are drawn from it and from the id")
    p.add_argument("--id", help="of one submission, if not its name")
    p.add_argument("--csv", type=Path, metavar="FILE", help="a table; written points in it stay")
    p.add_argument("--feedback", type=Path, metavar="DIR", help="ID.md for each (default: beside --csv)")
    p.add_argument("--due", type=datetime.datetime.fromisoformat, metavar="TIME",
                   help="for the column of hours late, e.g. 2026-11-30T23:59")
    p.add_argument("--result", type=Path, metavar="FILE", help="Classroom 50's result.json, of one")
    p.add_argument("--gradescope", type=Path, metavar="FILE", help="results.json, of one")
    args = p.parse_args(argv)
    if missing := [each for each in args.submissions if not each.exists()]:
        p.error(f"{missing[0]} is not there")
    if len(args.submissions) > 1 and (args.id or args.result or args.gradescope):
        p.error("--id, --result and --gradescope are for one submission")
    try:
        return grade(args)
    except (KitError, OSError) as error:
        print(f"grade.py: {error}", file=sys.stderr)
        return 1


def grade(args):
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = [*pool.map(lambda path: graded(args.set, path, args.secret, args.id), args.submissions)]
    late = args.due and {result["id"]: hours_late(path, args.due)
                         for result, path in zip(results, args.submissions)}
    before = {}
    if args.csv and args.csv.exists():
        with open(args.csv, newline="", encoding="utf-8") as file:
            before = {row["id"]: row for row in csv.DictReader(file)}
    rows = [*table(args.set, results, before, late or {})]
    if args.csv:
        with open(args.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    if folder := args.feedback or args.csv and args.csv.parent / "feedback":
        folder.mkdir(parents=True, exist_ok=True)
        for result in results:
            (folder / f"{result['id']}.md").write_text(feedback(args.set, result, args.secret), "utf-8")
    for flag, shape in (args.result, for_classroom50), (args.gradescope, for_gradescope):
        if flag:
            flag.write_text(json.dumps(shape(args.set, results[0]), indent=1) + "\n", "utf-8")
    for row in rows:
        print(f"{row['id']:20} {row['points']:>4} of {row['of']}   {row['says']:.300}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
