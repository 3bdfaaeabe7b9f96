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
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import source
from compare import alike, ask, fault
from source import EditError, KitError, drawn

IGNORED = shutil.ignore_patterns(".git", ".venv", "venv", "__pycache__", "*.pyc", "*.so", "*.pyd")


# --- what is right --------------------------------------------------------------------------------

def reference(number, rng):
    """
    {part: what compare.fault needs of it}, for cases drawn from rng. Ours and ours with each
    mistake run in one child. KitError if a mistake fails no case.
    """
    made, variants = source.files_of(number), source.mistakes_of(number)
    cases = json.loads(json.dumps(drawn(number).cases(rng)))   # as the child reads them
    with tempfile.TemporaryDirectory() as place:
        folder = source.write(Path(place, "ours"), made)
        jobs = [(folder, cases[part]) for part in drawn(number).PARTS]
        for i, (part, _, edits) in enumerate(variants):
            wrong = source.changed(made, edits)
            jobs.append((source.write(Path(place, str(i)), wrong), cases[part]))
        answers, ended = ask(jobs, 100, 16)
    if len(answers) < sum(len(asked) for _, asked in jobs):
        raise KitError(f"set {number}: the reference {ended}")
    answers = iter(answers)
    parts = {part: {"points": points, "title": title, "functions": functions, "cases": cases[part],
                    "right": [next(answers) for _ in cases[part]], "mistakes": {}}
             for part, (points, title, *functions) in drawn(number).PARTS.items()}
    for part, record in parts.items():
        if broken := [each["error"] for each in record["right"] if "error" in each]:
            raise KitError(f"set {number}, part {part}: the reference raises {broken[0]}")
    for part, sentence, *_ in variants:
        gives = [None if alike(mine := next(answers), right) else mine
                 for right in parts[part]["right"]]
        if not any(gives):
            raise KitError(f"set {number}, part {part}: the mistake {sentence!r} fails no case")
        for each in gives:
            if each and "error" in each:   # the lines on its way are lines of the solution
                each["error"]["frames"] = []
        parts[part]["mistakes"][sentence] = gives
    return parts


# --- one submission -------------------------------------------------------------------------------

def unpacked(path, place, number):
    """A copy of a submission; the student's folder is where the first of the set's files lies."""
    if path.is_file():
        shutil.unpack_archive(path, place, "zip")
    else:
        shutil.copytree(path, place, symlinks=True, ignore=IGNORED)
    for each in [each for each in place.rglob("*") if each.is_symlink()]:
        each.unlink()
    for file in source.files_to_write(number):
        if found := [*place.rglob(file)]:
            return min(found, key=lambda path: len(path.parts)).parents[file.count("/")]
    raise ValueError("no file of the set is in it")


def text_of(folder, file):
    """A file that Python can read; ValueError, in a sentence, if it cannot."""
    if not (folder / file).exists():
        raise ValueError(f"{file} is not there")
    try:
        text = (folder / file).read_text("utf-8-sig")
        compile(text, file, "exec")
        return text
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        said = str(error) or type(error).__name__
        raise ValueError(f"{file} cannot be read: {said}") from None


def joined(number, record, folder, theirs_elsewhere):
    """
    ({file: text} for the child, {file of the student's: its lines}) for one part. The set's files
    are the student's, with our source of all other parts. Files without a function of this part are
    ours if Python cannot read them, or without `theirs_elsewhere`. ValueError if it cannot read one
    of this part's.
    """
    made, lines = source.files_of(number), {}
    for file in source.files_to_write(number):
        mine = any(each.startswith(f"{file}:") for each in record["functions"])
        if not mine and not theirs_elsewhere:
            continue
        try:
            text = text_of(folder, file)
        except ValueError:
            if mine:
                raise
            continue
        others = [each.split(":")[1] for each in source.functions_of(number)
                  if each.startswith(f"{file}:") and each not in record["functions"]]
        made[file], lines[file] = source.pasted(text, made[file], others), text.count("\n") + 1
    return made, lines


def tried(number, record, folder, theirs_elsewhere=True):
    """What is wrong with one part of the student's folder, or None."""
    try:
        made, lines = joined(number, record, folder, theirs_elsewhere)
    except ValueError as error:
        return str(error)

    def of_student(frame):
        file, line, _ = frame
        return line <= lines[file] if file in lines else file not in made

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        copy = Path(place, "work")
        shutil.copytree(folder, copy, ignore=IGNORED)   # of an archive, too
        source.write(copy, made)
        answers, ended = ask([(copy, record["cases"])], *source.limits(number))
    if answers and answers[0].get("error", {}).get("loading") and theirs_elsewhere:
        return tried(number, record, folder, False)   # perhaps by a file that another part is about
    return fault(record, answers, ended, of_student)


def graded(number, path, secret, student=None):
    """What is wrong with each part of one submission (None: nothing), and its points."""
    student = student or path.resolve().name.removesuffix(".zip")
    parts = reference(number, source.drawn_for(number, secret, student))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        try:
            folder = unpacked(path, Path(place, "in"), number)
            said = {part: tried(number, record, folder) for part, record in parts.items()}
        except (OSError, ValueError, shutil.ReadError) as error:
            said = dict.fromkeys(parts, f"cannot be read: {error}")
    return {"id": student, "said": said, "points": {
        part: 0 if said[part] else record["points"] for part, record in parts.items()}}


def hours_late(path, due):
    """Of the last commit; without one, of the newest file. Both dates are the student's to set."""
    git = ["git", "-c", "core.fsmonitor=false", "-c", "log.showSignature=false", "-C", str(path)]
    said = Path(path, ".git").exists() and subprocess.run(
        [*git, "--no-pager", "log", "-1", "--format=%ct"], capture_output=True, text=True).stdout
    files = [each for each in (path, *path.rglob("*")) if each.is_file()]
    when = float(said) if said else max((each.stat().st_mtime for each in files), default=0)
    return max(0, math.ceil((when - due.timestamp()) / 3600))


# --- a class --------------------------------------------------------------------------------------

def table(number, results, before, late):
    """The rows of the CSV. before: {id: row} of an older one, whose written points stay."""
    asked, parts = drawn(number).WRITTEN, drawn(number).PARTS
    of = sum(points for points, *_ in parts.values()) + sum(asked.values())
    for result in results:
        written = {name: before.get(result["id"], {}).get(name) or "" for name in asked}
        points = sum(result["points"].values()) + sum(map(float, filter(None, written.values())))
        says = "; ".join(f"{part}: {said}" for part, said in result["said"].items() if said)
        yield {"id": result["id"], **result["points"], **written, "points": f"{points:g}",
               "of": of, "late": late.get(result["id"], ""), "says": says}


def feedback(number, result, secret):
    """What a student reads: the points of each part, a sentence, and the numbers of question 1."""
    own = source.parameters(number, secret, result["id"])
    return "\n".join([
        f"# Set {number}: {result['id']}", "",
        *(f"- {part}, {title}: {result['points'][part]} of {points}. "
          f"{result['said'][part] or 'All is right.'}"
          for part, (points, title, *_) in drawn(number).PARTS.items()), "",
        "Written questions are graded by hand. Your numbers: "
        + ", ".join(f"{name} = {value}" for name, value in own.items()) + ".", ""])


def for_gradescope(number, result):
    said = result["said"]
    return {"tests": [{
        "name": f"{number}{part} {title}", "score": result["points"][part], "max_score": points,
        "output": said[part] or "", "status": "failed" if said[part] else "passed"}
        for part, (points, title, *_) in drawn(number).PARTS.items()]}


def for_classroom50(number, result):
    """result.json of foundation50's Classroom 50; its runner's environment says whose it is."""
    tests = [{"test-name": test["name"], "passed": test["status"] == "passed",
              "score": test["score"], "max-score": test["max_score"]}
             for test in for_gradescope(number, result)["tests"]]
    names = {"classroom": "CLASSROOM", "assignment": "ASSIGNMENT", "owner": "USERNAME",
             "assignment_type": "ASSIGNMENT_TYPE", "submission": "SUBMISSION_TAG",
             "commit": "COMMIT_URL", "release": "RELEASE_URL", "review": "REVIEW_URL"}
    now = datetime.datetime.now(datetime.timezone.utc)
    return {"schema": "classroom50/result/v1", "datetime": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            **{key: os.environ.get(name, "") for key, name in names.items()},
            **{key: sum(test[key] for test in tests) for key in ("score", "max-score")},
            "tests": tests}


def parser():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[1], allow_abbrev=False)
    p.add_argument("set", type=int, choices=source.SETS)
    p.add_argument("submissions", type=Path, nargs="+", metavar="DIR", help="folders, zip archives")
    p.add_argument("--secret", required=True, help="the cases are drawn from it and from the id")
    p.add_argument("--id", help="of one submission, if not its name")
    p.add_argument("--csv", type=Path, metavar="FILE", help="a table; written points in it stay")
    p.add_argument("--feedback", type=Path, metavar="DIR", help="ID.md for each; beside --csv")
    p.add_argument("--due", type=datetime.datetime.fromisoformat, metavar="TIME",
                   help="for the column of hours late, e.g. 2026-11-30T23:59")
    p.add_argument("--result", type=Path, metavar="FILE", help="Classroom 50's result.json, of one")
    p.add_argument("--gradescope", type=Path, metavar="FILE", help="results.json, of one")
    return p


def main(argv=None):
    p = parser()
    args = p.parse_args(argv)
    if missing := [each for each in args.submissions if not each.exists()]:
        p.error(f"{missing[0]} is not there")
    if len(args.submissions) > 1 and (args.id or args.result or args.gradescope):
        p.error("--id, --result and --gradescope are for one submission")
    try:
        return grade(args)
    except (KitError, EditError, OSError) as error:
        print(f"grade.py: {error}", file=sys.stderr)
        return 1


def grade(args):
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = [*pool.map(partial(graded, args.set, secret=args.secret, student=args.id),
                             args.submissions)]
    late = {result["id"]: hours_late(path, args.due)
            for result, path in zip(results, args.submissions) if args.due}
    before = {}
    if args.csv and args.csv.exists():
        with open(args.csv, newline="", encoding="utf-8") as file:
            before = {row["id"]: row for row in csv.DictReader(file)}
    rows = [*table(args.set, results, before, late)]
    if args.csv:
        with open(args.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    if folder := args.feedback or args.csv and args.csv.parent / "feedback":
        source.write(folder, {f"{result['id']}.md": feedback(args.set, result, args.secret)
                              for result in results})
    for file, shape in (args.result, for_classroom50), (args.gradescope, for_gradescope):
        if file:
            file.write_text(json.dumps(shape(args.set, results[0]), indent=1) + "\n", "utf-8")
    for row in rows:
        print(f"{row['id']:20} {row['points']:>4} of {row['of']}   {row['says']:.300}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
