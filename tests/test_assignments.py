"""
The course kit: every mistake of every set fails a case and is named, right code in any style gets
full marks, what is no solution gets nothing, and a template gives no solution away.
"""
import ast
import csv
import json
import os
import random
import re
import subprocess
import sys
import zipfile
from functools import cache

import pytest
from common import ROOT, THOROUGH

from lab.checks.edits import body_of

KIT = ROOT / "assignments"
sys.path.insert(0, str(KIT))
import compare  # noqa: E402
import grade  # noqa: E402
import make  # noqa: E402
import source  # noqa: E402

SETS = source.SETS if THOROUGH else [3, 7]   # these two need no torch
SCHEDULE = "scheduler.py:Scheduler.schedule"
reference = cache(lambda number: grade.reference(number, random.Random("s")))


def handed_in(folder, number, edits=()):
    """Our files of a set. edits: (function, what it does first), (file, what becomes of it)."""
    files = source.files_of(number)
    for where, new in edits:
        if ":" in where:
            files = source.changed(files, [(where, "", new.strip())])
        else:
            files[where] = new(files.get(where, ""))
    source.write(folder, {name: text for name, text in files.items() if "kit/" not in name})
    return folder


def run(folder, *command):
    return subprocess.run(command, cwd=folder, capture_output=True, text=True,
                          env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})


# --- cases, mistakes, handouts --------------------------------------------------------------------

@pytest.mark.parametrize("number", SETS)
def test_each_mistake_fails_a_case_and_is_named(number):
    for record in reference(number).values():
        for sentence, gives in record["mistakes"].items():
            said = compare.fault(record, [mine or right for mine, right
                                          in zip(gives, record["right"])], "ends")
            twins = [each for each, theirs in record["mistakes"].items() if theirs == gives]
            assert any(said.endswith(each) for each in twins) and "\n" not in said, (sentence, said)
            if sides := re.search(r"(?:gives|:) (.*), expected (.*?)(?:, as if .*)?$", said):
                assert sides[1] != sides[2], said


def test_a_mistake_that_does_not_apply_or_fails_no_case_stops_the_kit(monkeypatch):
    part, sentence, [(function, *_)] = source.mistakes_of(7)[0]
    for old, error, said in (("used = 1", source.EditError, "occurs 0 times"),
                             ("", source.KitError, "fails no case")):
        monkeypatch.setattr(source, "mistakes_of", lambda _, edit=(function, old, "pass"): [
            (part, sentence, [edit])])
        with pytest.raises(error, match=said):
            grade.reference(7, random.Random(0))
        assert grade.main(["7", str(KIT), "--secret", "s"]) == 1


@pytest.mark.parametrize("number", source.SETS)
def test_handouts_are_short_and_their_points_add_up(number):
    text, drawn = (KIT / f"set{number}/HANDOUT.md").read_text(), source.drawn(number)
    worth = dict(re.findall(r"^\| *([a-d]?) *\|.*\| (\d+) \|$", text, re.M))
    assert worth == {part: str(points) for part, (points, *_) in drawn.PARTS.items()} | {
        "": str(sum(drawn.WRITTEN.values()))} and len(text.splitlines()) <= 100   # two pages
    row = re.search(rf"^\| {number} .*$", (KIT / "README.md").read_text(), re.M)[0]
    assert f"| {sum(map(int, worth.values()))} |" in row
    numbers = source.parameters(number, "s", "ada")
    assert all(type(value) in (int, float) for value in source.values(number, numbers).values())
    assert all(re.search(rf"\b{name}\b", text) for name in numbers)


# --- what is handed in ----------------------------------------------------------------------------

NEWCOMERS = """
while left and not gone and len(self.running) < self.max_batch and self.arrived(step):
    if not self.admit(self.waiting[0]):
        break
    self.running.append(self.waiting.popleft())
    plan.append((self.running[-1], min(self.running[-1].todo, left)))
    self.make_room(*plan[-1])
    left -= plan[-1][1]
if not plan and (self.running or self.arrived(step)):
    raise RuntimeError(f"{[*self.running, *self.waiting][0]} cannot go on")
return plan"""
RIGHT = {
    "recursion, and a print": ("a", [(SCHEDULE, """
def shares(rest, left):
    if not rest or not left:
        return []
    n = min(rest[0].todo, left)
    granted = rest[0] in self.running and self.make_room(rest[0], n)
    return [(rest[0], n)] * granted + shares(rest[1:], left - n * granted)
print("a line")
before = list(self.running)
plan = shares(before, self.token_budget)
gone, left = before != self.running, self.token_budget - sum(n for _, n in plan)
""" + NEWCOMERS)]),
    "a helper called queue, a data file": ("a", [
        ("one.txt", lambda _: "1"), ("queue.py", lambda _: "ONE = int(open('one.txt').read())\n"
                                     "def share(request, left):\n"
                                     "    return min(request.todo, left) * ONE\n"), (
            SCHEDULE, """from queue import share
left, plan, many = self.token_budget, [], len(self.running)
for request in self.running:
    if self.make_room(request, share(request, left)):
        plan.append((request, share(request, left)))
        left -= plan[-1][1]
gone = len(self.running) < many
""" + NEWCOMERS)]),
    "tabs": ("b", [("scheduler.py", lambda text: text.replace("    ", "\t"))]),
    "another file that cannot be read": ("a", [("request.py", lambda _: "def broken(:\n")]),
    "another file that raises, and another part": ("a", [
        ("request.py", lambda text: text + "broken()\n"),
        ("scheduler.py", lambda text: text.replace("def release(self", "def releases(self"))])}
# of the body of `schedule`, which has a docstring of one line
FIRST = (ROOT / "scheduler.py").read_text().splitlines().index("    def schedule(self, step):") + 3
WRONG = {   # the body of schedule: what is said
    "import pytest; pytest.skip('later')": "raises Skipped: later",
    "import os; os._exit(0)": "ends the process (status 0)",
    "return open('/proc/self/environ').read()": "is not a file of this folder",
    "return type('L', (list,), {'__eq__': lambda *_: True})()": "it returns: [], expected A1",
    "return": "it returns: None, expected []: is a `return` missing?",
    "self = self\nreturn 1 / 0": f"(scheduler.py, line {FIRST + 1}: return 1 / 0)",
    "while True: pass": "takes more than 10 seconds of CPU time",
    "x = [0] * 10**12": "raises MemoryError",
    "import os; os.fork(); return []": "os.fork is not allowed here",
    "import os; [os.write(i, b'{\"error\": 3}\\n{\"value\": []}\\n' * 999) for i in range(3, 9)]":
        ", expected ",
    "import json; json.dumps = lambda *_: '{\"value\": true}'; return []": ", expected "}


@pytest.mark.parametrize("name", RIGHT)
def test_right_code_in_any_style_gets_full_marks(name, tmp_path):
    part, edits = RIGHT[name]
    assert grade.tried(3, reference(3)[part], handed_in(tmp_path, 3, edits)) is None


@pytest.mark.parametrize("body", WRONG if THOROUGH else [*WRONG][:6])
def test_what_is_no_solution_gets_nothing_and_costs_no_other_part(body, tmp_path):
    folder = handed_in(tmp_path, 3, [(SCHEDULE, body)])
    said = grade.tried(3, reference(3)["a"], folder)
    assert said and WRONG[body] in said and "\n" not in said, said
    assert grade.tried(3, reference(3)["b"], folder) is None


def test_our_source_of_other_parts_counts_and_brings_its_imports():
    theirs = "class A:\n\tdef f(self):\n\t\treturn 1\n\ndef f():\n    return A().f()"
    ours = "import math\nclass A:\n    def f(self):\n        return super() and math.pi\n"
    exec(source.pasted(theirs, ours, ["A.f"]), made := {})
    assert made["f"]() == 3.141592653589793


# --- a class --------------------------------------------------------------------------------------

@pytest.mark.parametrize("number", SETS)
def test_a_template_gives_no_solution_away(number, tmp_path, monkeypatch):
    monkeypatch.setattr(make, "reference", lambda number, rng: reference(number))   # made once
    made, ours = make.template(number), source.files_of(number)
    for function in source.functions_of(number):
        file, name = function.split(":")
        lines = "\n".join(map(ast.unparse, body_of(source.node_of(ours[file], name))))
        for line in [line.strip() for line in lines.splitlines() if len(line) > 40]:
            elsewhere = sum(text.count(line) for text in ours.values()) > 1   # in what is given
            assert elsewhere or not any(line in text for text in made.values()), line
    for files, status in [(made, 1), (ours, 0)][:2 if THOROUGH else 1]:   # ours: they are graded
        source.write(tmp_path, files)
        ran = run(tmp_path, sys.executable, "-m", "pytest", "-q")
        assert ran.returncode == status, ran.stdout
        assert ran.stdout.count(" is not written yet (part ") >= 2 * status, ran.stdout


@pytest.mark.thorough
def test_an_instructors_first_ten_minutes(tmp_path):
    for name in "assignments", "scheduler.py":
        os.symlink(ROOT / name, tmp_path / name)
    commands = "\n".join((KIT / "README.md").read_text().split("```")[1::2])
    ran = run(tmp_path, "bash", "-ec", commands.replace("python ", f"{sys.executable} "))
    assert ran.returncode == 0 and "schedule is not written yet" in ran.stdout, ran.stderr
    rows = [*csv.DictReader(open(tmp_path / "3.csv"))]
    assert [(row["id"], row["points"], row["of"]) for row in rows] == [
        ("ada", "6", "15"), ("bob", "0", "15"), ("eve", "0", "15")]
    assert (tmp_path / "private/values.csv").read_text().count("\n") == 4


def test_tables_keep_written_points_and_results_have_their_shapes(tmp_path, monkeypatch):
    monkeypatch.setattr(grade, "reference", lambda number, secret: reference(number))
    with zipfile.ZipFile(tmp_path / "ada.zip", "w") as archive:
        for path in handed_in(tmp_path / "in", 3).glob("*.py"):
            archive.write(path, f"a/b/{path.name}")
    flags = ["3", str(tmp_path / "ada.zip"), "--secret", "s", "--csv", str(tmp_path / "3.csv")]
    assert grade.main([*flags, "--result", str(tmp_path / "r.json"), "--due", "2020-01-01"]) == 0
    result, text = json.loads((tmp_path / "r.json").read_text()), (tmp_path / "3.csv").read_text()
    assert [result[name] for name in ("score", "max-score")] == [9, 9] and len(result["tests"]) == 3
    (tmp_path / "3.csv").write_text(text.replace("ada,4,2,3,,,,9,15", "ada,4,2,3,1.5,,2,9,15"))
    assert grade.main([*flags, "--gradescope", str(tmp_path / "g.json")]) == 0
    row, = csv.DictReader(open(tmp_path / "3.csv"))
    assert (row["1"], row["3"], row["points"]) == ("1.5", "2", "12.5")
    tests = json.loads((tmp_path / "g.json").read_text())["tests"]
    assert [test["status"] for test in tests] == ["passed"] * 3
