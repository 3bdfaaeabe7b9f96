"""
The course kit: the reference passes its own tests, each mutant loses its own part, each right
solution gets full marks, nothing leaks into a copy, and nothing that is handed in stops the grader.
"""
import ast
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from common import ROOT, THOROUGH, quick

KIT = ROOT / "assignments"
sys.path.insert(0, str(KIT))
import answers  # noqa: E402
import grade_class  # noqa: E402
import isolate  # noqa: E402
import kit  # noqa: E402
import leaderboard  # noqa: E402
import make  # noqa: E402
import predict  # noqa: E402
from handed_in import FILES, NASTY, OPEN, RIGHT, SHARE, WRONG  # noqa: E402
from mutants import MUTANTS  # noqa: E402

import scheduler  # noqa: E402

SETS = make.SETS
LEFT_OUT = "not _numbers and not _break and not _calls" + " and not test_time" * (not THOROUGH)


@pytest.fixture(autouse=True)
def no_flags_from_outside(monkeypatch):
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)   # such as --thorough


def marks(number, folder, *flags, only=None):
    """(exit status, {part: (score, output)}) of the set's tests on a folder, in this process."""
    results = Path(folder).parent / "results.json"
    results.unlink(missing_ok=True)
    test = KIT / f"set{number}" / f"test_set{number}.py"
    tests = [f"{test}::{name}" for name in only or ()] or [test]
    status = pytest.main([*map(str, tests), "-k", LEFT_OUT, "-q", "--tb=no", "-p",
                          "no:cacheprovider",
                          "--rootdir", str(KIT), "--submission", str(folder),
                          "--results", str(results), *flags])
    tests = json.loads(results.read_text())["tests"]
    assert all(test["score"] in (0, test["max_score"]) for test in tests)
    return status, {test["name"].split()[0]: (test["score"] > 0, test["output"]) for test in tests}


def edited(edits):
    """{file: text} of the edits of a mutant, or of handed_in.py."""
    files = {}
    for where, old, new in edits:
        file = where.partition(":")[0]
        text = files[file] if file in files else make.text_of(file) if old else ""
        if file != where:
            files[file] = make.edited(text, [(where, old, new)])
            continue
        if old and re.fullmatch(r"[\w.]+", old):
            node = make.node_of(text, old)
            old = "\n".join(text.splitlines()[node.lineno - 1:node.end_lineno])
            new = new.strip("\n")
        assert not old or old in text, (file, old)
        files[file] = text.replace(old, new) if old else new
    return files


def submission(number, folder, edits=()):
    """Our files of a set, with {file: text} changed."""
    for file in make.tests_of(number).FILES.split():
        path = folder / "work" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((ROOT / file).read_text())
    for file, text in dict(edits).items():
        path = folder / "work" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / "work"


# some of the bugs that students are to expose are in code which their set does not ask for
OF_PARTS = {name: mutant for name, mutant in MUTANTS.items() if {
    edit[0] for edit in mutant.edits} <= set(make.functions_of(int(mutant.part[0])))}


@pytest.mark.parametrize("name", quick(OF_PARTS, ["the budget exceeded by one", "published mask"]))
def test_a_mutant_loses_its_own_part_and_no_other(name, tmp_path):
    part, edits = OF_PARTS[name]
    number, functions = int(part[0]), {edit[0] for edit in edits}
    folder = submission(number, tmp_path, edited(edits))
    only = None if THOROUGH or number == 3 else [f"Test{part}"]   # a set of layouts takes longer
    for flags in (), ("--hidden", "s"):
        status, found = marks(number, folder, *flags, only=only)
        lost = [part for part, (right, _) in found.items() if not right]
        assert status == 1 and lost and lost[0].startswith(part), {
            part: found[part][1] for part in lost}
        # others may suffer only where they are asked for the same function
        assert all(functions & set(make.parts_of(number)[part].args) for part in lost)
        assert found[lost[0]][1] and "Traceback" not in found[lost[0]][1]


@pytest.mark.parametrize("value, right", [(1 + 1e-12, True), (1 + 1e-6, False),
                                          (float("nan"), False)])
def test_numbers_agree_to_rounding(value, right):
    assert (kit.difference({"a": [value, 0.0]}, {"a": [1.0, 0.0]}) is None) == right


# --- what people have handed in -------------------------------------------------------------------

@pytest.mark.parametrize("name", quick(RIGHT, ["a helper package", "a base class"]))
def test_what_is_right_gets_full_marks(name, tmp_path):
    number, *edits = RIGHT[name]
    before = set(vars(scheduler.Scheduler))
    status, found = marks(number, submission(number, tmp_path, edited(edits)), "--hidden", "s")
    assert status == 0 and all(right for right, _ in found.values()), found
    assert set(vars(scheduler.Scheduler)) == before   # what they add is taken off again


@pytest.mark.parametrize("name", quick(WRONG, [
    "4a a replaced judge", "3a our own file from sys.path"]))
def test_what_had_full_marks_is_seen(name, tmp_path):
    part = name.split()[0]
    folder = submission(int(part[0]), tmp_path, edited(WRONG[name]))
    for flags in (), ("--hidden", "s"):
        status, found = marks(int(part[0]), folder, *flags, only=[f"Test{part}"])
        assert status == 1 and not found[part][0], found
    print(name, found[part][1])


# --- the open tasks -------------------------------------------------------------------------------

@pytest.mark.parametrize("task", OPEN)
def test_open_tasks_are_ranked_by_counts(task, tmp_path, capsys):
    for name, (text, _) in OPEN[task].items():
        if text is not None:
            (tmp_path / name).mkdir()
            (tmp_path / name / (f"{task}.py" if text else "other.py")).write_text(text)
    leaderboard.main([task, str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    for line, (name, (_, said)) in zip(lines, OPEN[task].items(), strict=True):
        assert re.match(rf" +\d+ {name} +{said}", line), line


# --- copies ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("number", quick(SETS, [3]))
def test_a_copy_is_the_repository_without_the_solutions(number, tmp_path):
    for folder in "ab":
        make.make(number, tmp_path / folder, "ada")
    with pytest.raises(ValueError, match="a is not an empty folder"):
        make.make(number, tmp_path / "a", "ada")
    first, second = ({str(path.relative_to(tmp_path / folder)): path.read_bytes()
                      for path in (tmp_path / folder).rglob("*") if path.is_file()}
                     for folder in "ab")
    assert first and first == second
    texts = {name: content.decode() for name, content in first.items() if ".bin" not in name}
    functions = make.functions_of(number)
    assert not any("KEY" in name for name in texts)
    for function in functions:
        file, name = function.split(":")
        blank, = make.body_of(make.node_of(texts[file], name))
        assert ast.unparse(blank).startswith("raise NotImplementedError(")
        for inner in make.body_of(make.node_of(make.text_of(file), name)):
            for line in map(str.strip, ast.unparse(inner).splitlines()):
                assert len(line) < 30 or line not in texts[file], (function, line)
    for function in {each for earlier in range(1, number) for each in make.functions_of(earlier)}:
        file, name = function.split(":")   # what earlier sets asked for is there; 7 has a bug in it
        if file in texts and function not in functions and number != 7:
            assert ast.dump(make.node_of(texts[file], name)) == ast.dump(
                make.node_of(make.text_of(file), name))
    # without torch, where the set needs none; each blank names itself
    (tmp_path / "torch.py").write_text("raise ImportError('there is no torch here')")
    ran = subprocess.run([sys.executable, "-m", "pytest", "-q", f"set{number}"], text=True,
                         cwd=tmp_path / "a", capture_output=True, env={
                             **os.environ, "PYTHONPATH": str(tmp_path) * (number in (3, 7)),
                             "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    assert ran.returncode == 1 and "Traceback" not in ran.stdout, ran.stdout
    first_function = next(filter(functions.get, functions)).split(":")[1]
    assert f"{first_function} is not written yet (part " in ran.stdout


def test_a_roster_is_refused_in_a_line(tmp_path, capsys):
    for text, said in (("student\nada\nada\n", "'ada' stands there twice"), ("id\n../x\n", "'../x' "
                       "cannot be a folder's name"), ("id\n", "there is no id"),
                       ("a" * 200_000, "Error: field larger")):
        (tmp_path / "roster.csv").write_text(text)
        assert make.main(["3", str(tmp_path), "--roster", str(tmp_path / "roster.csv")]) == 2
        error = capsys.readouterr().err
        assert f"roster.csv: {said}" in error and error.count("\n") == 1


# --- numbers and bugs to expose -------------------------------------------------------------------

@pytest.mark.parametrize("number", quick(range(1, 7), [3]))
def test_numbers_are_of_no_use_to_a_neighbour(number):
    found = [[answer for _, answer in predict.questions(number, f"s{i}").values()]
             for i in range(8)]
    assert all(type(answer) is int for each in found for answer in each)
    same = [a == b for i, mine in enumerate(found) for theirs in found[:i]
            for a, b in zip(mine, theirs)]
    assert len(found[0]) == 4 and sum(same) / len(same) < 0.1


@pytest.mark.parametrize("student", quick(["ada", "bob"], ["ada"]))
def test_the_answers_are_what_one_works_out_by_hand(student):
    def asked(number, key):
        question, answer = predict.questions(number, student)[key]
        return [*map(int, re.findall(r"\d+", question))], answer

    (n, new), scores = asked(1, "1")
    assert scores == n * n + sum(range(n + 1, n + new))
    (a, b, c, *_), pads = asked(2, "1")
    assert pads == 3 * max(a, b, c) - a - b - c
    assert asked(3, "3")[1] >= asked(3, "1")[1]   # with a limit on memory, C waits longer
    (others, n), pads = asked(4, "4")
    assert pads == others * (n - 1)
    lengths, varlen = asked(5, "4")
    assert varlen == sum(n * n for n in lengths) and asked(5, "3") == (lengths, sum(lengths) ** 2)
    (size, *cached), empty = asked(6, "4")
    assert empty == sum(-n % size for n in cached)


@pytest.mark.parametrize("number", quick(range(1, 7), [3, 4]))
def test_the_smallest_workloads_expose_the_bugs_and_say_how(number):
    for bug in answers.bugs_of(number):   # each has its smallest workload
        assert "with the bug, " in answers.exposed(bug, bug)


def test_workloads_that_expose_nothing_or_are_no_workloads():
    bug = answers.bugs_of(4)[0]   # the published mask
    for asked, said in (({"requests": [[2, 1], [1, 1], [9, 5]]}, "tokens, at most 7 are allowed"),
                        ({"requests": [[1]]}, "with this workload (see BREAK.md"),
                        ({"requests": [[99, 1]]}, "the right code raises ValueError"),
                        ({"requests": [[1, 1]]}, "right and wrong code both give tokens of A"),
                        (None, "there is no workload"), ("no", "the right code raises TypeError")):
        with pytest.raises(isolate.Fault, match=re.escape(said)):
            answers.exposed(bug, asked)


# --- a class --------------------------------------------------------------------------------------

@pytest.mark.thorough
def test_an_instructors_first_ten_minutes(tmp_path):
    """The commands of the README, from roster to grades."""
    text = (KIT / "README.md").read_text().split("## The first ten minutes")[1]
    commands = text.split("```")[1].replace("python ", f"{sys.executable} ").replace(
        "pytest set3", f"{sys.executable} -m pytest set3")
    for name in "assignments", "scheduler.py", "request.py":
        os.symlink(ROOT / name, tmp_path / name)
    ran = subprocess.run(["bash", "-e", "-c", commands], cwd=tmp_path, text=True,
                         capture_output=True)
    assert ran.returncode == 0, ran.stderr
    assert "0 of 11 points" in ran.stdout
    ada, bob = ran.stdout.splitlines()[-2:]
    assert ada.startswith("ada,ada,3,3,3,0.0,0.0,9.0,") and bob.startswith("bob,bob,0,0,0,0.0,0")


@pytest.mark.parametrize("statement", quick(NASTY, [*NASTY][1:2]))
def test_what_a_student_does_costs_their_part_and_no_other(statement, tmp_path):
    said = NASTY[statement]
    text = (ROOT / "scheduler.py").read_text().replace(SHARE, f"        {statement}\n" + SHARE)
    folder = submission(3, tmp_path, {"scheduler.py": text})
    patience = 20 if "clock" in said else 600
    tests = grade_class.graded(3, folder, "s", patience, ["3a", "3c"])["tests"]
    assert tests["3a"]["score"] == 0 and tests["3c"]["score"] == 3, tests
    assert said in tests["3a"]["output"]


@pytest.mark.parametrize("name", quick(FILES, [*FILES][:3]))
def test_whatever_a_file_is_names_itself(name, tmp_path):
    content, said = FILES[name]
    folder = submission(3, tmp_path, {"scheduler.py": content or b""})
    if content is None:
        (folder / "scheduler.py").unlink()
    status, found = marks(3, folder, only=["Test3a", "Test3b"])
    assert status == 1 and not found["3a"][0] and not found["3b"][0]
    assert said in found["3a"][1] and said in found["3b"][1]


def test_a_file_that_another_part_is_about_costs_nothing(tmp_path):
    _, found = marks(3, submission(3, tmp_path, {"request.py": "def broken(:\n"}))
    assert [right for right, _ in found.values()] == [True, True, False]
    assert found["3c"][1].startswith("request.py cannot be read: line 1")


@pytest.mark.thorough
def test_our_modules_never_import_theirs(tmp_path):
    """They import our toy model, which must not use their broken model from then on."""
    folder = submission(1, tmp_path, edited([
        ("model.py", "        T, S = q.size(-2), k.size(-2)", "        T, S = 1 / 0"),
        ("generate_unbatched.py", "import torch\n", "import torch\n\nimport lab.checks.toy\n")]))
    tests = grade_class.graded(1, folder, None, 600, ["1a", "1c"])["tests"]
    assert [test["score"] for test in tests.values()] == [0, 2], tests


def test_submissions_are_found_and_links_refused(tmp_path):
    place = submission(3, tmp_path / "deep" / "one")
    (place / "student.json").write_text('{"student": "ada"}')
    with zipfile.ZipFile(tmp_path / "zipped.zip", "w") as archive:
        for path in place.glob("*.py"):
            archive.write(path, f"a/b/{path.name}")
        archive.writestr("__MACOSX/request.py", "x")
    linked = submission(3, tmp_path / "linked")
    os.symlink("/etc/passwd", linked / "passwd")
    for path, student, points in (("deep", "ada", 3), ("zipped.zip", "zipped", 3),
                                  ("linked", "linked", 0)):
        result = grade_class.graded(3, tmp_path / path, None, 600, ["3a"])
        assert result["student"] == student and result["tests"]["3a"]["score"] == points, result
    assert "work/passwd is a link that leads out" in result["tests"]["3a"]["output"]


def test_a_class_is_resumed_and_what_was_late_is_tried_again(tmp_path, monkeypatch, capsys):
    calls = []

    def graded(number, path, secret, patience, only=None):
        calls.append((path.name, only))
        tests = {part: {**grade_class.failed(3, part, ""), "score": mark.args[0]}
                 for part, mark in make.parts_of(3).items() if only is None or part in only}
        if path.name == "bob" and only is None:
            tests["3a"] = grade_class.failed(3, "3a", "does not finish within 9 seconds")
        if path.name == "eve":
            tests["3b"]["score"] = 0
        return {"student": "ada", "tests": tests}

    monkeypatch.setattr(grade_class, "graded", graded)
    for name in "ada", "bob":
        (tmp_path / "class" / name).mkdir(parents=True)
    flags = ["3", str(tmp_path / "class"), "--csv", str(tmp_path / "3.csv")]
    assert grade_class.main(flags) == 0 and sorted(calls, key=str) == [
        ("ada", None), ("bob", None), ("bob", ["3a"])]
    assert "ada: 2 submissions have this id" in capsys.readouterr().err
    (tmp_path / "class" / "eve").mkdir()
    assert grade_class.main([*flags, "--resume"]) == 1 and calls[3:] == [("eve", None)]
    assert len((tmp_path / "3.csv").read_text().splitlines()) == 4
    results = tmp_path / "results.json"
    assert grade_class.main(["3", f"{tmp_path}/class/bob", "--gradescope", str(results)]) == 0
    assert len(json.loads(results.read_text())["tests"]) == len(make.parts_of(3))
    assert grade_class.main([*flags[:2], "--csv", str(tmp_path)]) == 2 and len(calls) == 6
