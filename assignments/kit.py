"""
The course kit: a template for a class, and its grading.

    python assignments/kit.py 3 template out                      a repository to hand out
    python assignments/kit.py 3 grade handed_in/* --secret S      a line for each folder

A folder's name is its id. Cases are drawn from the secret and the id. Each part runs alone, in a
child process: the student's file with our source of all other parts behind it. The parent runs ours
on the same cases, and compares. The exit status is 0 unless the grading itself failed.
"""
import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"   # before torch is imported: its tensors are small here
from compare import ask, fault  # noqa: E402
from functions import (  # noqa: E402
    HERE,
    SETS,
    KitError,
    drawn,
    module_of,
    parts_of,
    record,
)
from source import blanked, files_of, functions_of, pasted, write  # noqa: E402

from lab.checks.edits import EditError  # noqa: E402

IGNORED = shutil.ignore_patterns(
    "kit", ".git", ".venv", "venv", "__pycache__", "*.pyc", "*.so", "*.pyd")
PACKAGES = {False: "pytest==9.2.0\n", True: "pytest==9.2.0\nnumpy==2.4.6\ntorch==2.13.0\n"}
SMALL = 6000   # letters of a case and its answer; larger ones are for grading



def limits(number):
    """Of a part: seconds of CPU time, and gigabytes. Torch takes two of each."""
    return (20, 6) if "model.py" in module_of(number, "cases").FILES else (10, 2)


# --- a template, a submission ---------------------------------------------------------------------

def template(number):
    """{file: its text} of a set's template. KitError if a mistake fails no case."""
    files, (seconds, gigabytes) = files_of(number), limits(number)
    torch = "model.py" in files
    for function, part in functions_of(number).items():
        file, name = function.split(":")
        files[file] = blanked(files[file], name, f"{name} is not written yet (part {part})")
    parts = {part: small(record(number, part, cases))
             for part, cases in drawn(number, "public").items()}
    names = {"number": number, "first": f"{number}{min(parts)}", "packages": (
        "-r requirements.txt" if not torch else
        "-r requirements.txt --extra-index-url https://download.pytorch.org/whl/cpu")}
    texts = {path.name: path.read_text("utf-8") for path in (HERE / "template").iterdir()}
    return files | {
        "README.md": (HERE / f"set{number}/HANDOUT.md").read_text("utf-8") + "\n"
        + texts["run.md"].format(**names),
        "AGENTS.md": texts["AGENTS.md"], "test_parts.py": texts["parts.py"],
        "written.md": f"# Set {number}: written answers\n",
        "requirements.txt": PACKAGES[torch],
        ".github/workflows/check.yml": texts["check.yml"].format(**names),
        "kit/cases.json": json.dumps({
            "set": number, "seconds": seconds, "gigabytes": gigabytes, "parts": parts}) + "\n"}


def small(made):
    """A part as it is shipped: without its large cases, and without lines of the solution."""
    kept = [i for i, pair in enumerate(zip(made["cases"], made["right"]))
            if len(json.dumps(pair)) < SMALL]
    mistakes = {}
    for sentence, gives in made["mistakes"].items():
        gives.give(range(len(gives)))   # all at once, which is quicker
        mistakes[sentence] = [gives[i] for i in kept]
        for each in mistakes[sentence]:
            if each and "error" in each:   # the way to it is lines of the solution
                each["error"]["way"] = []
        if not any(mistakes[sentence]) and not any(gives):
            raise KitError(f"no case shows the mistake {sentence!r}")
    return {"cases": [made["cases"][i] for i in kept], "right": [made["right"][i] for i in kept],
            "mistakes": mistakes}


def left_out(folder, names):
    """What is not copied: a link would let a student's file be one of ours, or ours replace it."""
    paths = [Path(folder, name) for name in names]
    return {*IGNORED(folder, names), *(path.name for path in paths if path.is_symlink() or not (
        path.is_file() or path.is_dir()))}


def graded(number, folder, secret):
    """{part: what is wrong with it, or None} of a student's folder."""
    said = {}
    for part, cases in drawn(number, f"{secret} {number} {folder.name}").items():
        mine, made, lines = parts_of(number)[part][2], files_of(number), {}
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
            work, file = Path(place).resolve() / "work", "the folder"
            try:
                shutil.copytree(folder, work, ignore=left_out)
                for file in {function.split(":")[0] for function in mine}:
                    others = [each.split(":")[1] for each in functions_of(number)
                              if each.startswith(f"{file}:") and each not in mine]
                    names = [each.split(":")[1] for each in mine if each.startswith(f"{file}:")]
                    theirs = (work / file).read_text("utf-8-sig")
                    compile(theirs, file, "exec")
                    made[file] = pasted(theirs, made[file], others, names)
                    lines[file] = theirs.count("\n") + 1
                file = "the folder"
                write(work, made)
            except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
                said[part] = f"{file} cannot be read: {getattr(error, 'strerror', '') or error}"
                continue

            def theirs(file, line):   # of ours that stands behind theirs, nothing is said
                name = Path(file).relative_to(work).as_posix() if work in Path(file).parents else ""
                return name if line <= lines.get(name, 0) or name not in made else None

            given = ask(work, cases, *limits(number))   # before there is any right answer
            try:
                said[part] = fault(record(number, part, cases), *given, theirs)
            except (RecursionError, OverflowError):
                said[part] = "what it gives is too deep or too large to be compared"
    return {part: each and "".join(letter if letter.isprintable() else " " for letter in each)
            for part, each in said.items()}   # in a line, whatever code gives


def line_of(number, folder, said):
    """What is printed of a submission."""
    points = {part: 0 if said[part] else worth for part, (worth, *_) in parts_of(number).items()}
    return {"id": folder.name, "points": points, "total": sum(points.values()),
            "of": sum(worth for worth, *_ in parts_of(number).values()),
            "says": {part: each for part, each in said.items() if each}}


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[1], allow_abbrev=False)
    p.add_argument("set", type=int, choices=SETS)
    p.add_argument("what", choices=("template", "grade"))
    p.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    p.add_argument("--secret", help="of the course: cases are drawn from it and from the id")
    p.add_argument("--json", action="store_true", help="a line of JSON for each folder")
    args = p.parse_args(argv)
    if args.what == "grade" and not args.secret:
        p.error("grade needs --secret")
    for folder in args.folders:
        if args.what == "grade" and not folder.is_dir():
            p.error(f"{folder} is not a folder")
        if args.what == "template" and folder.exists() and (
                len(args.folders) > 1 or not folder.is_dir() or any(folder.iterdir())):
            p.error(f"{folder} is not an empty folder")
    try:
        for folder in map(Path.resolve, args.folders):
            if args.what == "template":
                write(folder, template(args.set))
                continue
            made = line_of(args.set, folder, graded(args.set, folder, args.secret))
            says = "; ".join(f"{part}: {each}" for part, each in made["says"].items())
            points = " ".join(f"{part} {each}" for part, each in made["points"].items())
            line = f"{made['id']:16} {made['total']:2} of {made['of']}  {points}  {says}"
            print(json.dumps(made) if args.json else line, flush=True)
    except (KitError, EditError, OSError) as error:
        print(f"kit.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
