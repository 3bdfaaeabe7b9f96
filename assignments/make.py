"""
Makes the template of a set, for the whole class; or, with --key, the instructor's private folder.

    python assignments/make.py 3 out                                  a template repository
    python assignments/make.py 3 private --key --secret S --ids ids   solutions, parameters, values

Signature and docstring of each function to write stay; its body becomes an error that says what is
missing. The template has cases and right answers of small ones, but no solution. --ids: a file with
an id in each line, or in the first column of a CSV file.
"""
import argparse
import csv
import json
import random
import sys
from pathlib import Path

import source
from grade import EditError, KitError, reference
from source import HERE, drawn

PACKAGES = {False: "pytest==9.2.0\n", True: "pytest==9.2.0\nnumpy==2.4.6\ntorch==2.13.0\n"}
SMALL = 3000   # letters of a case and its answer; larger ones are for grading


def template(number):
    """{file: its text} of a set's template."""
    files, (seconds, gigabytes) = source.files_of(number), source.limits(number)
    for function, part in source.functions_of(number).items():
        file, name = function.split(":")
        files[file] = source.blanked(files[file], name, f"{name} is not written yet (part {part})")
    for function in getattr(drawn(number), "HIDDEN", ()):
        file, name = function.split(":")
        files[file] = source.blanked(files[file], name, f"{name} is not part of this set")
    parts = reference(number, random.Random("public"))
    parts = {part: small(record) for part, record in parts.items()}
    torch = "model.py" in files
    names = {"number": number, "first": f"{number}{min(parts)}", "packages": (
        "-r requirements.txt" if not torch else
        "-r requirements.txt --extra-index-url https://download.pytorch.org/whl/cpu")}
    texts = {path.name: path.read_text("utf-8") for path in (HERE / "template").iterdir()}
    return files | {
        "README.md": (HERE / f"set{number}/HANDOUT.md").read_text("utf-8") + "\n"
        + texts["run.md"].format(**names),
        "AGENTS.md": texts["AGENTS.md"], "test_parts.py": texts["parts.py"],
        "written.md": f"# Set {number}: written answers\n" + "".join(
            f"\n## {name}\n" for name in (*drawn(number).WRITTEN, "AI assistants")),
        "requirements.txt": PACKAGES[torch],
        ".github/workflows/check.yml": texts["check.yml"].format(**names),
        **{f"kit/{name}": (HERE / name).read_text("utf-8") for name in ("child.py", "compare.py")},
        "kit/cases.json": json.dumps({
            "set": number, "seconds": seconds, "gigabytes": gigabytes, "parts": parts,
            "theirs": source.files_to_write(number)}) + "\n"}


def small(record):
    """A part without its large cases."""
    def kept(each):
        return [it for it, *pair in zip(each, record["cases"], record["right"])
                if len(json.dumps(pair)) < SMALL]

    return {**record, "cases": kept(record["cases"]), "right": kept(record["right"]),
            "mistakes": {name: kept(gives) for name, gives in record["mistakes"].items()}}


def private(number, secret, ids):
    """{file: its text} of the instructor's folder. Its parameters.csv may be published."""
    files = source.files_of(number)
    own = {each: source.parameters(number, secret, each) for each in ids}
    values = {each: {**mine, **source.values(number, mine)} for each, mine in own.items()}
    return {"parameters.csv": table(own), "values.csv": table(values), **{
        f"solutions/{file}": files[file] for file in source.files_to_write(number)}}


def table(rows):
    """{id: {column: value}} as CSV."""
    lines = [["id", *next(iter(rows.values()), {})]]
    lines += [[each, *row.values()] for each, row in rows.items()]
    return "".join(",".join(map(str, line)) + "\n" for line in lines)


def ids_of(file):
    with open(file, newline="", encoding="utf-8-sig") as lines:
        ids = [row[0].strip() for row in csv.reader(lines) if row and row[0].strip()]
    return ids[1:] if ids and ids[0].lower() in ("id", "student", "name", "username") else ids


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[1], allow_abbrev=False)
    p.add_argument("set", type=int, choices=source.SETS)
    p.add_argument("folder", type=Path, help="is made")
    p.add_argument("--key", action="store_true", help="the instructor's private folder")
    p.add_argument("--secret", help="the same as for grading")
    p.add_argument("--ids", type=Path, metavar="FILE", help="the class")
    args = p.parse_args(argv)
    if args.folder.exists() and (not args.folder.is_dir() or any(args.folder.iterdir())):
        p.error(f"{args.folder} is not an empty folder")
    if args.key != bool(args.secret and args.ids):
        p.error("--key, --secret and --ids go together")
    try:
        made = (private(args.set, args.secret, ids_of(args.ids)) if args.key
                else template(args.set))
        source.write(args.folder, made)
    except (KitError, EditError, OSError, ValueError, csv.Error) as error:
        print(f"make.py: {error}", file=sys.stderr)
        return 1
    print(args.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
