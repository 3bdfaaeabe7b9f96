"""
Makes a student copy of one assignment, cut from the repository as it stands.

    python assignments/make.py 4 out/                     the copy
    python assignments/make.py 4 out/ --student ada       with the numbers that ada has to predict
    python assignments/make.py 4 out/ --nbgrader          and a notebook in nbgrader's convention

Signature and docstring of each function stay; its body becomes a hint and an error. Only what the
set needs is copied: no tests, no notebooks. Our code is packed in reference.bin, for the grader,
which is the same as the instructor's: so both give the same marks. Same input, same bytes. The
texts are templates in handouts/.
"""
import argparse
import json
import zlib
from pathlib import Path

import grade
import graft
import observe
from mutants import BUGS, MUTANTS, bugs_of
from predict import questions
from sets import SETS

HERE = Path(__file__).resolve().parent


def student_copy(number, student=None, nbgrader=False):
    """{file: text} of a set's student copy, but for what make packs."""
    chosen = SETS[number]
    files = {name: grade.clean(name) for name in chosen.modules}
    blanks = [(function, f"set {number}, part {part.name}: {function.split(':')[1]}")
              for part in chosen.parts for function in part.functions]
    for function, message in [*blanks, *((name, "not part of this set") for name in chosen.hidden)]:
        file, name = function.split(":")
        if not graft.is_blank(graft.functions_in(files[file])[name]):   # it may be in two parts
            files[file] = graft.blanked(files[file], name, message)
    for name in grade.KIT:
        files[name] = (HERE / name).read_text(encoding="utf-8")
    install, knobs = ("pip install torch numpy\n    ", "those of `generate`") if (
        "model.py" in chosen.needs) else ("", "`max_batch` (8 if you give none), `token_budget` "
                                          "(64) and `max_kv_tokens` (no limit)")
    bugs = ""
    for i, bug in enumerate(bugs_of(number), 1):
        module, fixed = observe.stage_of(MUTANTS[bug].part)
        fixed = "".join(f" with {name}={value!r}" for name, value in fixed.items())
        bugs += f"{i}. {BUGS[bug]['says']} Runs {module}.py{fixed}.\n"
    for name, template in (("README.md", "copy_readme.md"), ("HANDOUT.md", f"{number}.md"),
                           ("BREAK.md", "copy_break.md")):
        text = (HERE / "handouts" / template).read_text(encoding="utf-8")
        files[name] = text.format(number=number, title=chosen.title, install=install, knobs=knobs,
                                  bugs=bugs) if template.startswith("copy") else text
    files["break.json"] = json.dumps(dict.fromkeys("12345"), indent=1) + "\n"
    files["written.md"] = f"# Set {number}: written answers\n\n## 1\n\n## 2\n\n## AI assistants\n"
    if student:
        asked = questions(number, student)
        files["numbers.json"] = json.dumps(dict.fromkeys(asked), indent=1) + "\n"
        files["NUMBERS.md"] = (
            f"# Numbers for {student}\n\nPredict them by hand, before you run anything. The "
            "answers go into numbers.json.\n\n"
            + "".join(f"{key}. {question}\n" for key, (question, _) in asked.items()))
    if nbgrader:
        files[f"set{number}.ipynb"] = notebook(number)
    return files


def notebook(number):
    """A notebook in nbgrader's convention: a cell of text and one of points for each part."""
    def cell(kind, source, grade_id, **more):
        flags = {"grade": False, "solution": False, "locked": True, "schema_version": 3,
                 "grade_id": grade_id, **more}
        return {"cell_type": kind, "id": grade_id, "metadata": {"nbgrader": flags},
                "source": source,
                **({"outputs": [], "execution_count": None} if kind == "code" else {})}

    cells = [cell("markdown", f"# Set {number}: {SETS[number].title}\n\nWrite the functions in the "
                  "files beside this notebook, then run its cells.", "intro"),
             cell("code", f"import grade\nscores, _ = grade.grade({number}, '.')\n"
                  "points = {score.name: score.points for score in scores}", "run")]
    for part in SETS[number].parts:
        cells += [cell("markdown", f"## {part.name}: {part.title}\n\n" + "\n".join(
            f"- `{function}`" for function in part.functions), f"text-{part.name}"),
            cell("code", f"print(next(score for score in scores if score.name == '{part.name}'))\n"
                 f"points['{part.name}']", f"points-{part.name}", grade=True, points=part.points)]
    return json.dumps({"cells": cells, "metadata": {"kernelspec": {
        "name": "python3", "display_name": "Python 3", "language": "python"}},
        "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def make(number, folder, student=None, nbgrader=False):
    """Writes the copy. ValueError if the folder is not empty."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder")
    files = student_copy(number, student, nbgrader)
    grade.write_files(folder, files)
    # What the grader in the copy runs. Packed, so that nobody reads it unawares
    (folder / grade.PACKED.name).write_bytes(zlib.compress(json.dumps({
        "set": number, "files": {name: grade.clean(name) for name in SETS[number].modules},
        "bugs": [grade.bug(number, i) for i in range(1, 6)]}).encode(), 9))
    return len(files) + 1


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    p.add_argument("set", type=int, choices=SETS)
    p.add_argument("folder", help="a new or empty folder")
    p.add_argument("--student", help="the id that decides the numbers to predict")
    p.add_argument("--nbgrader", action="store_true", help="add a notebook for nbgrader")
    args = p.parse_args(argv)
    try:
        print(f"{make(args.set, args.folder, args.student, args.nbgrader)} files in {args.folder}")
    except ValueError as error:
        p.error(str(error))


if __name__ == "__main__":
    main()
