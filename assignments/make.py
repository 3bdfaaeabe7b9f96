"""
Makes a student copy of one assignment, cut from the repository as it stands.

    python assignments/make.py 4 out/                     the copy
    python assignments/make.py 4 out/ --student ada       with the numbers that ada has to predict
    python assignments/make.py 4 out/ --nbgrader          and a notebook in nbgrader's convention

Signature and docstring of each function stay; its body becomes a hint and an error. Only what the
set needs is copied: no tests, no notebooks. Our code is packed in reference.bin, for the grader,
which is the same as the instructor's: so both give the same marks. Same input, same bytes.
"""
import argparse
import json
import sys
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import grade  # noqa: E402
import graft  # noqa: E402
import observe  # noqa: E402
from mutants import BUGS  # noqa: E402
from predict import questions  # noqa: E402
from sets import SETS  # noqa: E402

README = """# Set {number}: {title}

Read HANDOUT.md. Write the functions that raise NotImplementedError, and grade yourself:

    {install}python grade.py

It prints the points of each part of the code on the visible workloads, and a sentence about the
first thing that is wrong. It grades each part alone, with our code for all others, as in the final
grade. So begin with any part. It does not grade the numbers or the written answers. What your code
prints is not shown. The instructor grades with hidden workloads as well. Rows, columns, tokens,
steps and passes are counted from 0. In a workload, "A = 5+3 tokens" is a request with a prompt of 5
tokens, and 3 to generate.

The handout names a notebook to read first: your instructor has it.

Hand in this folder: the code, numbers.json (NUMBERS.md), break.json (BREAK.md), written.md.

You may add what you like to the files of the set: imports, constants, functions, classes; methods,
properties and attributes in our classes; lines in an `__init__` of ours; new .py files beside ours.
Changes to other functions have no effect, nor has code outside of all functions. The grader lists
what it ignores. You may use an AI assistant to explain the handout, an error or PyTorch. Do not let
it write the functions, the workloads or the written answers, and say in written.md what you used it
for. The solutions are public (and packed in reference.bin, for the grader), and finding them
teaches nothing. The numbers, the workloads and the answers are yours to explain.
"""
BREAK = """# Break it

Here are five bugs. For each, hand in the smallest workload that exposes it: the right code and the
code with the bug must give different tokens, logits, steps, plans or numbers of passes or slots.
The size of a workload is the number of its prompt tokens and new tokens. A workload more than one
and a half times as large as the smallest known one gets half of the points.

{bugs}

Put a workload for each number into break.json, like this one:

    {{"1": {{"requests": [[3, 2], [[4, 8, 1], 2, 1]], "knobs": {{"max_batch": 2}}}}, "2": ...}}

A request is [prompt, new tokens], or [prompt, new tokens, arrival, priority, eos_token]. A prompt
is a number of tokens, whose ids are then fixed, or a list of token ids from 0 to 12. The knobs are
whole numbers: {knobs}. There are 1 to 8 requests, with at least one new token
each. The model is toolbox/toy.py's; no sequence may have more than 24 tokens. Some bugs are in code
that the set does not ask you to write.

    python grade.py --try 1

says whether workload 1 exposes bug 1, and what your own code does with it.
"""


def student_copy(number):
    """{file: text} of a set's student copy, but for what make packs."""
    chosen = SETS[number]
    files = {name: grade.clean(name) for name in chosen.modules}
    blanks = [(function, f"set {number}, part {part.letter}: {function.split(':')[1]}")
              for part in chosen.parts for function in part.functions]
    for function, message in [*blanks, *((name, "not part of this set") for name in chosen.hidden)]:
        file, name = function.split(":")
        if not graft.is_blank(graft.functions_in(files[file])[name]):   # it may be in two parts
            files[file] = graft.blanked(files[file], name, message)
    for name in grade.KIT:
        files[name] = (HERE / name).read_text(encoding="utf-8")
    install = "pip install torch numpy\n    " if "model.py" in chosen.needs else ""
    files["README.md"] = README.format(number=number, title=chosen.title, install=install)
    files["HANDOUT.md"] = (HERE / "handouts" / f"{number}.md").read_text(encoding="utf-8")
    knobs = "those of `generate`" if "model.py" in chosen.needs else (
        "`max_batch` (8 if you give none), `token_budget` (64) and `max_kv_tokens` (no limit)")
    files["BREAK.md"] = BREAK.format(knobs=knobs, bugs="\n".join(
        f"{i}. {BUGS[bug][0]} Runs {runs_of(f'{number}{part}')}."
        for i, (bug, part) in enumerate(zip(chosen.bugs, chosen.bug_parts), 1)))
    files["break.json"] = json.dumps(dict.fromkeys("12345"), indent=1) + "\n"
    files["written.md"] = f"# Set {number}: written answers\n\n## 1\n\n## 2\n\n## AI assistants\n"
    return files


def reference(number):
    """reference.bin: what the grader in the copy runs. Packed, so that nobody reads it unawares."""
    chosen = SETS[number]
    return zlib.compress(json.dumps({
        "set": number, "files": {name: grade.clean(name) for name in chosen.modules},
        "bugs": [grade.bug(number, i + 1) for i in range(len(chosen.bugs))]}).encode(), 9)


def runs_of(part):
    """What runs a workload for a bug in this part."""
    if part[0] == "3":
        return "the scheduler alone"
    module, fixed = observe.STAGES.get(part) or observe.STAGES[part[0]]
    return f"{module}.py" + "".join(f" with {name}={value!r}" for name, value in fixed.items())


def number_files(number, student):
    asked = questions(number, student)
    text = [f"# Numbers for {student}", "",
            "Predict them by hand, before you run anything. The answers go into numbers.json.", ""]
    text += [f"{key}. {question}" for key, (question, _) in asked.items()]
    return {"NUMBERS.md": "\n".join(text) + "\n",
            "numbers.json": json.dumps(dict.fromkeys(asked, None), indent=1) + "\n"}


def notebook(number):
    """A notebook in nbgrader's convention: a cell of text and one of points for each part."""
    def cell(kind, source, grade_id, **more):
        flags = {"grade": False, "solution": False, "locked": True, "schema_version": 3,
                 "grade_id": grade_id, **more}
        made = {"cell_type": kind, "id": grade_id, "metadata": {"nbgrader": flags},
                "source": source}
        return made if kind == "markdown" else {**made, "outputs": [], "execution_count": None}

    cells = [cell("markdown", f"# Set {number}: {SETS[number].title}\n\nWrite the functions in the "
                  "files beside this notebook, then run its cells.", "intro"),
             cell("code", f"import grade\nscores, _ = grade.grade({number}, '.')\n"
                  "points = {score.name: score.points for score in scores}", "run")]
    for part in SETS[number].parts:
        name = f"{number}{part.letter}"
        cells += [cell("markdown", f"## {name}: {part.title}\n\n" + "\n".join(
            f"- `{function}`" for function in part.functions), f"text-{name}"),
            cell("code", f"print(next(score for score in scores if score.name == '{name}'))\n"
                 f"points['{name}']", f"points-{name}", grade=True, points=part.points)]
    return json.dumps({"cells": cells, "metadata": {"kernelspec": {
        "name": "python3", "display_name": "Python 3", "language": "python"}},
        "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def make(number, folder, student=None, nbgrader=False):
    """Writes the copy. ValueError if the folder is not empty."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder")
    files = student_copy(number)
    if student:
        files |= number_files(number, student)
    if nbgrader:
        files[f"set{number}.ipynb"] = notebook(number)
    for name, text in sorted(files.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / grade.PACKED.name).write_bytes(reference(number))
    return len(files) + 1


def main(argv=None):
    p = argparse.ArgumentParser(prog="make.py", description=__doc__.split("\n")[1])
    p.add_argument("set", type=int, choices=SETS)
    p.add_argument("folder", help="a new or empty folder")
    p.add_argument("--student", help="the id that decides the numbers to predict")
    p.add_argument("--nbgrader", action="store_true", help="add a notebook for nbgrader")
    args = p.parse_args(argv)
    try:
        count = make(args.set, args.folder, args.student, args.nbgrader)
    except ValueError as error:
        p.error(str(error))
    print(f"{count} files in {args.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
