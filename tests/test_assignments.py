"""
The course kit. Every mistake of every set must fail a case, right code in any style gets full marks,
what is no solution gets nothing, and a template gives no solution away.
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
from pathlib import Path

import pytest
from common import ROOT, THOROUGH

KIT = ROOT / "assignments"
sys.path.insert(0, str(KIT))
import compare  # noqa: E402
import grade  # noqa: E402
import make  # noqa: E402
import source  # noqa: E402

SETS = source.SETS if THOROUGH else [3, 7]   # these two need no torch
SHARE, ADVANCE = "scheduler.py:Scheduler.share_budget", "request.py:advance"


@pytest.fixture(scope="session")
def reference():
    return cache(lambda number: grade.reference(number, random.Random("s")))


def put(files, function, body):
    """The files with another definition of a function. body: its lines, without the first."""
    file, name = function.split(":")
    lines, start, end = source.source_of(files[file], name)
    node = source.node_of(files[file], name)
    head = next(i for i in range(node.lineno - 1, end) if lines[i].rstrip().endswith(":")) + 1
    indent = " " * (node.col_offset + 4)
    new = [indent + line for line in body.strip("\n").split("\n")]
    return {**files, file: "\n".join([*lines[:head], *new, *lines[end:]]) + "\n"}


def handed_in(folder, number, edits=()):
    files = source.files_of(number)
    for edit in edits:
        files = put(files, *edit) if ":" in edit[0] else {**files, edit[0]: edit[1](files.get(edit[0], ""))}
    source.write(folder, {name: text for name, text in files.items() if not name.startswith(
        ("kit/", "lab/", "toolbox/"))})
    return folder


# --- cases and mistakes ---------------------------------------------------------------------------

@pytest.mark.parametrize("number", SETS)
def test_each_mistake_fails_a_case_and_its_sentence_is_said(number, reference):
    for part, record in reference(number).items():
        assert record["mistakes"] and len(record["cases"]) == len(record["right"])
        for sentence, gives in record["mistakes"].items():
            answers = [gives.get(str(i), {"value": right}) for i, right in enumerate(record["right"])]
            said = compare.fault(record, answers, "ends")
            twins = [each for each, theirs in record["mistakes"].items() if theirs == gives]
            assert any(said.endswith(each) for each in twins) and "\n" not in said, said
            if got := re.search(r"(?:gives|: )(.*), expected (.*?)(?:, as if .*)?$", said):
                assert got[1] != got[2], said


def test_a_mistake_that_does_not_apply_or_fails_no_case_stops_the_kit(monkeypatch):
    mistakes = source.mistakes_of(7)
    for edit, said in (("used = 1", "occurs 0 times"), ("", "fails no case")):
        monkeypatch.setattr(grade, "mistakes_of", lambda _, edit=edit: [(*mistakes[0][:3], edit, "pass")])
        with pytest.raises(grade.KitError, match=said):
            grade.reference(7, random.Random(0))
    assert grade.main(["7", str(KIT), "--secret", "s"]) == 1


@pytest.mark.parametrize("number", source.SETS)
def test_handouts_are_short_and_their_points_add_up(number):
    text, drawn = (KIT / f"set{number}/HANDOUT.md").read_text(), source.drawn(number)
    assert len(text.splitlines()) <= 100   # two pages
    worth = {row[0].strip(): int(row[1]) for row in re.findall(r"^\| *([a-d]?) *\|.*\| (\d+) \|$", text, re.M)}
    assert worth == {**{part: points for part, (points, *_) in drawn.PARTS.items()},
                     "": sum(drawn.WRITTEN.values())}
    assert f"| {sum(worth.values())} |" in re.search(rf"^\| {number} .*$", (KIT / "README.md").read_text(), re.M)[0]
    numbers = source.parameters(number, random.Random(1))
    assert all(isinstance(each, (int, float)) for each in source.values(number, numbers).values())
    assert all(name in text for name in numbers)


# --- what is handed in ----------------------------------------------------------------------------

RECURSIVE = """
def shares(rest, budget):
    return [] if not rest or not budget else [(rest[0], min(rest[0].todo, budget))] + shares(
        rest[1:], budget - min(rest[0].todo, budget))
print("a line")
return shares(sorted(self.running, key=lambda r: r.todo > 1), self.token_budget)"""
RIGHT = {
    "recursion": (3, "a", [(SHARE, RECURSIVE)]),
    "a helper of one's own, called queue, and a data file": (3, "a", [
        (SHARE, "from queue import shares\nreturn shares(self)"), ("one.txt", lambda _: "1"),
        ("queue.py", lambda _: "ONE = int(open('one.txt').read())\ndef shares(queue):\n"
         "    plan = [(r, 1) for r in queue.running if r.todo == ONE]\n    left = queue.token_budget - len(plan)\n"
         "    for r in queue.running:\n        if r.todo > 1 and left:\n"
         "            plan.append((r, min(r.todo, left)))\n            left -= plan[-1][1]\n    return plan\n")]),
    "tabs": (3, "b", [("scheduler.py", lambda text: text.replace("    ", "\t"))]),
    "a fault in another part, and a broken file of another": (3, "a", [
        ("scheduler.py", lambda text: text.replace("def admit(self", "def admits(self")),
        ("request.py", lambda _: "def broken(:\n")]),
    "torch's attention": (1, "a", [("model.py:Head.forward", """
if past_k is not None:
    k, v = torch.cat((past_k, k), -2), torch.cat((past_v, v), -2)
S, T = k.size(-2), q.size(-2)
see = torch.arange(S, device=q.device) <= torch.arange(S - T, S, device=q.device)[:, None]
see = see if mask is None else see & mask
out = F.scaled_dot_product_attention(q, k, v, attn_mask=see)
return torch.where(see.any(-1, keepdim=True), out, torch.zeros_like(out))""")]),
    "row by row": (4, "c", [("generate_dynamic.py:Rectangle.attend", """
out = torch.zeros_like(v)
for b, ((request, n), start) in enumerate(zip(self.plan, self.starts)):
    request.kv.write(layer, start, k[b, :, -n:], v[b, :, -n:])
    out[b, :, -n:] = head(q[b, :, -n:], *request.kv.read(layer, start + n))
return out""")]),
}
WRONG = {   # what is said
    "raise pytest.skip.Exception('later')": "raises Skipped: later",
    "import sys; sys.exit(0)": "raises SystemExit: 0",
    "import os; os._exit(0)": "ends the process (status 0)",
    "while True: pass": "takes more than 10 seconds of CPU time",
    "x = [0] * 10**12": "raises MemoryError",
    "return open('/proc/self/environ').read()": "is not a file of this folder",
    f"exec(open({str(ROOT / 'scheduler.py')!r}).read())": "is not a file of this folder",
    "import os; os.fork(); return []": "os.fork is not allowed here",
    "[os.write(i, b'{\"value\": []}\\n' * 999) for i in range(3, 9)]": "",
    "return type('L', (list,), {'__eq__': lambda *_: True})()": "gives [], expected A1",
    "import json; json.dumps = lambda *_: '{\"value\": true}'; return []": ", expected ",
    "return self.running and [(self.running[0], float('nan'))]": "gives [[A, nan]], expected A1",
    "self.share_budget()": "raises RecursionError",
    "pass": "gives None, expected []: is a `return` missing?",
    "return 1 / 0": "(scheduler.py, line 67: return 1 / 0)",
}


@pytest.mark.parametrize("name", RIGHT if THOROUGH else [*RIGHT][:4])
def test_right_code_in_any_style_gets_full_marks(name, tmp_path, reference):
    number, part, edits = RIGHT[name]
    assert grade.tried(number, part, reference(number)[part], handed_in(tmp_path, number, edits)) is None


@pytest.mark.parametrize("body", WRONG if THOROUGH else [each for each in WRONG if "while" not in each][::2])
def test_what_is_no_solution_gets_nothing_and_costs_no_other_part(body, tmp_path, reference):
    folder = handed_in(tmp_path, 3, [(SHARE, body.replace("pytest.skip.Exception", "__import__("
                                      "'pytest').skip.Exception").replace("[os", "import os; [os"))])
    said = grade.tried(3, "a", reference(3)["a"], folder)
    assert said and WRONG[body] in said and "\n" not in said, said
    assert grade.tried(3, "b", reference(3)["b"], folder) is None


# --- a class --------------------------------------------------------------------------------------

def test_a_template_gives_no_solution_away_and_says_what_is_missing(tmp_path):
    for number in SETS:
        folder, ours = tmp_path / str(number), source.files_of(number)
        source.write(folder, made := make.template(number))
        assert made == make.template(number)
        for function in source.functions_of(number):
            for statement in source.body_of(source.node_of(ours[function.split(":")[0]], function.split(":")[1])):
                for line in ast.unparse(statement).splitlines():
                    assert len(line) < 40 or not any(line.strip() in text for text in made.values()), line
        ran = subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=folder, capture_output=True, text=True,
                             env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
        assert ran.stdout.count(" is not written yet (part ") >= len(source.drawn(number).PARTS), ran.stdout
        source.write(folder, {name: ours[name] for name in ours if name in made})
        ran = subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=folder, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout


def test_an_instructors_first_ten_minutes(tmp_path):
    commands = "\n".join((KIT / "README.md").read_text().split("```")[1::2])
    for name in "assignments", "scheduler.py":
        os.symlink(ROOT / name, tmp_path / name)
    ran = subprocess.run(["bash", "-e", "-c", commands.replace("python ", f"{sys.executable} ")], cwd=tmp_path,
                         text=True, capture_output=True)
    assert ran.returncode == 0 and "share_budget is not written yet" in ran.stdout, ran.stderr
    rows = [*csv.DictReader(open(tmp_path / "3.csv"))]
    assert [(row["id"], row["points"], row["of"]) for row in rows] == [
        ("ada", "6", "15"), ("bob", "0", "15"), ("eve", "0", "15")]
    assert {path.name for path in (tmp_path / "private").iterdir()} == {
        "solutions", "parameters.csv", "values.csv"}


def test_tables_keep_written_points_and_results_have_their_shapes(tmp_path):
    with zipfile.ZipFile(tmp_path / "ada.zip", "w") as archive:
        for path in handed_in(tmp_path / "in", 3).glob("*.py"):
            archive.write(path, f"a/b/{path.name}")
    flags = ["3", str(tmp_path / "ada.zip"), "--secret", "s", "--csv", str(tmp_path / "3.csv")]
    assert grade.main([*flags, "--result", str(tmp_path / "r.json"), "--due", "2020-01-01"]) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["score"], result["max-score"], len(result["tests"])) == (9, 9, 3)
    table = (tmp_path / "3.csv").read_text().replace("ada,3,3,3,,,,9,15", "ada,3,3,3,1.5,,2,9,15")
    (tmp_path / "3.csv").write_text(table)
    assert grade.main([*flags, "--gradescope", str(tmp_path / "g.json")]) == 0
    row, = csv.DictReader(open(tmp_path / "3.csv"))
    assert (row["1"], row["3"], row["points"]) == ("1.5", "2", "12.5")
    assert {test["status"] for test in json.loads((tmp_path / "g.json").read_text())["tests"]} == {"passed"}
    with pytest.raises(SystemExit):
        grade.main(["3", str(tmp_path / "nobody"), "--secret", "s"])
