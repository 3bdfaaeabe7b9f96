"""
The course kit: a template for a class, and its grading.

    python assignments/kit.py 3 template out                           a repository to hand out
    python assignments/kit.py 3 grade handed_in/* --secret FILE        a line for each folder

A folder's name is its id. Cases are drawn from the secret, the first line of a file, and the id.
The exit status is 0 unless the grading itself failed.
"""
import argparse
import json
import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"   # before torch is imported: its tensors are small here
from functions import HERE, SETS, KitError, drawn, parts_of, record  # noqa: E402
from grading import limits, line_of  # noqa: E402
from source import blanked, files_of, functions_of, write  # noqa: E402

from lab.checks.edits import EditError  # noqa: E402

PACKAGES = {False: "pytest==9.2.0\n", True: "pytest==9.2.0\nnumpy==2.4.6\ntorch==2.13.0\n"}
SMALL = 6000   # letters of a case and its answer; larger ones are for grading


# --- a template -----------------------------------------------------------------------------------

def template(number):
    """{file: its text} of a set's template. KitError if a mistake fails no case."""
    files = files_of(number)
    seconds, gigabytes = limits(number)
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


def small(part):
    """A part as it is shipped: without its large cases, and without lines of the solution."""
    kept = []
    for i, case_and_answer in enumerate(zip(part["cases"], part["right"])):
        if len(json.dumps(case_and_answer)) < SMALL:
            kept.append(i)
    mistakes = {}
    for sentence, gives in part["mistakes"].items():
        gives.give(range(len(gives)))   # all at once, which is quicker
        if not any(gives):
            raise KitError(f"no case shows the mistake {sentence!r}")
        mistakes[sentence] = [gives[i] for i in kept]
        for answer in mistakes[sentence]:
            if answer and "error" in answer:   # the way to it is lines of the solution
                answer["error"]["way"] = []
    return {"cases": [part["cases"][i] for i in kept], "right": [part["right"][i] for i in kept],
            "mistakes": mistakes}


# --- grading --------------------------------------------------------------------------------------

def secret_in(file):
    """The first line of a file, or of what is piped in."""
    text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8")
    secret = text.partition("\n")[0].strip()
    if not secret:
        raise KitError(f"{file} holds no secret")
    return secret


def in_words(line):
    """The line for a submission, as it is read."""
    says = "; ".join(f"{part}: {message}" for part, message in line["says"].items())
    if line["total"] is None:
        return f"{line['id']:16} not graded  {says}"
    points = " ".join(f"{part} {points}" for part, points in line["points"].items())
    return f"{line['id']:16} {line['total']:2} of {line['of']}  {points}  {says}"


def table(number, lines):
    """Of a class: for each part, how many have it right."""
    graded = [line for line in lines if line["total"] is not None]
    rows = [f"{len(graded)} graded, {len(lines) - len(graded)} not; right:"]
    for part, (_, title, _) in parts_of(number).items():
        right = sum(line["points"][part] > 0 for line in graded)
        rows.append(f"  {part}  {right:3} of {len(graded)}  {title}")
    return "\n".join(rows)


def grade(number, folders, secret, as_json):
    lines = []
    for folder in folders:
        line = line_of(number, Path(os.path.abspath(folder)), secret)
        lines.append(line)
        print(json.dumps(line) if as_json else in_words(line), flush=True)
    if len(lines) > 1 and not as_json:
        print(table(number, lines))


# --- the command ----------------------------------------------------------------------------------

def parsed(argv):
    p = argparse.ArgumentParser(description="A template for a class, and its grading.",
                                allow_abbrev=False)
    p.add_argument("set", type=int, choices=SETS)
    p.add_argument("what", choices=("template", "grade"))
    p.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    p.add_argument("--secret", metavar="FILE", help="its first line is the course's secret, from "
                   "which cases are drawn, with the id; - for what is piped in")
    p.add_argument("--json", action="store_true", help="a line of JSON for each folder")
    args = p.parse_args(argv)
    if args.what == "template":
        [folder, *more] = args.folders
        if more or folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            p.error(f"{folder} is not an empty folder")
        return args
    if not args.secret:
        p.error("grade needs --secret, a file")
    for folder in args.folders:
        if not os.path.lexists(folder):
            p.error(f"there is no {folder}")
    return args


def main(argv=None):
    args = parsed(argv)
    try:
        if args.what == "template":
            write(args.folders[0], template(args.set))
        else:
            grade(args.set, args.folders, secret_in(args.secret), args.json)
    except (KitError, EditError, OSError) as error:
        print(f"kit.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
