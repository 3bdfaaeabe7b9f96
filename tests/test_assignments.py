"""
The course kit: nothing leaks into a student copy, each mutant loses its own part, each right
solution gets full marks, and nothing that a student hands in stops the grader.
"""
import ast
import json
import os
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "assignments"))
import grade  # noqa: E402
import graft  # noqa: E402
import leaderboard  # noqa: E402
import make  # noqa: E402
import predict  # noqa: E402
from mutants import MUTANTS, SMALLEST  # noqa: E402
from sets import MOST_LINES, SETS  # noqa: E402
from variants import VARIANTS  # noqa: E402

EACH_SET = pytest.mark.parametrize("number", SETS)
OF_PARTS = {name: mutant for name, mutant in MUTANTS.items()
            if {edit[0] for edit in mutant.edits} <= set(SETS[int(mutant.part[0])].functions)}
TIMED_RUN, SEEN = grade.timed_run, {}


def one_a_set(set_of):
    """Parameters from {name: its set}: the first of each set, and the others with --thorough."""
    first = {number: name for name, number in reversed(set_of.items())}
    return [name if first[number] == name else pytest.param(name, marks=pytest.mark.thorough)
            for name, number in set_of.items()]


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


@lru_cache
def reference(number):
    return grade.reference_of(number, [*grade.VISIBLE, *grade.seeds_of("ada", number, "")])


def run_once(number, names, seeds, edits=(), needed=()):
    """grade.timed_run, once for the same code: most parts of a mutant are the reference's."""
    key = number, *names, *seeds, *sorted(dict(edits).items())
    if key not in SEEN:
        SEEN[key] = TIMED_RUN(number, names, seeds, edits, needed)
    return SEEN[key]


def hand_in(folder, number, edits=()):
    """A student's folder: the reference, with some files changed."""
    for name in grade.modules_of(number):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dict(edits).get(name) or text_of(name), encoding="utf-8")
    return folder


def graded(folder, number):
    """{part: Score}, and what was ignored."""
    with mock.patch.object(grade, "timed_run", run_once):
        scores, ignored = grade.grade(number, folder, student="ada", reference=reference(number))
    return {score.name: score for score in scores}, ignored


def full(scores):
    return all(score.points == score.of and not score.message for score in scores.values())


# --- the manifest and the student copy ------------------------------------------------------------

@EACH_SET
def test_the_manifest_matches_the_repository(number):
    chosen = SETS[number]
    code = sum(part.points for part in chosen.parts)
    assert chosen.points in (15, 20) and 0.55 <= code / chosen.points <= 0.65
    assert len(chosen.bugs) == 5
    assert [MUTANTS[bug].part for bug in chosen.bugs] == [
        f"{number}{part}" for part in chosen.bug_parts]
    for function in [*chosen.functions, *chosen.hidden]:
        file, name = function.split(":")
        assert file in chosen.needs
        node = graft.functions_in(text_of(file))[name]
        assert graft.size_of(node) <= MOST_LINES, function


@lru_cache
def copy_of(number):
    return make.student_copy(number)


@EACH_SET
def test_no_solution_leaks_into_the_copy(number):
    files = copy_of(number)
    haystack = "\n".join(ast.unparse(ast.parse(text)) if name.endswith(".py") else text
                         for name, text in files.items())
    for function in SETS[number].functions:
        file, name = function.split(":")
        node = graft.functions_in(text_of(file))[name]
        assert "raise NotImplementedError(" in graft.source_of(files[file], name)
        assert ast.get_docstring(graft.functions_in(files[file])[name]) == ast.get_docstring(node)
        for statement in graft.statements(node):
            assert len(statement) < 30 or statement not in haystack, (function, statement)


@EACH_SET
def test_the_copy_holds_what_the_set_needs_and_no_more(number):
    allowed = {*grade.modules_of(number), *make.KIT, "README.md", "HANDOUT.md", "BREAK.md",
               "break.json", "written.md"}
    assert set(copy_of(number)) == allowed
    assert not {"mutants.py", "variants.py", "predict.py", "make.py"} & allowed
    for name, text in copy_of(number).items():
        if name.endswith(".py"):
            ast.parse(text)


def test_a_copy_is_the_same_every_time_and_goes_into_an_empty_folder(tmp_path):
    for folder in "ab":
        assert make.main(["3", str(tmp_path / folder), "--student", "ada", "--nbgrader"]) == 0
    files = {path.relative_to(tmp_path / "a"): path.read_bytes()
             for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert files and files == {path.relative_to(tmp_path / "b"): path.read_bytes()
                               for path in (tmp_path / "b").rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="a is not an empty folder"):
        make.make(3, tmp_path / "a")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(tmp_path / "a" / "set3.ipynb", 4)
    nbformat.validate(notebook)
    points = [cell.metadata.nbgrader.points for cell in notebook.cells
              if cell.metadata.nbgrader.grade]
    assert points == [part.points for part in SETS[3].parts]


def test_a_finished_copy_gets_full_marks_from_its_own_grader(tmp_path):
    make.make(4, tmp_path / "copy")
    blank = run_grader(tmp_path / "copy", [])
    assert blank.count("is not written yet") == 4 and "0 of 12 points on the visible" in blank
    for name in grade.modules_of(4):
        (tmp_path / "copy" / name).write_text(text_of(name), encoding="utf-8")
    (tmp_path / "copy" / "break.json").write_text(json.dumps({"1": SMALLEST["published mask"]}))
    graded, tried = run_grader(tmp_path / "copy", [], ["--try", "1"], ["--try", "2"]).split("\n\n")
    assert "12 of 12 points on the visible workloads" in graded
    assert tried.startswith("5 tokens\n") and "\nforward passes: 1\n" in tried
    assert tried.endswith("\nbreak.json has no workload 2\n")


def run_grader(folder, *calls):
    """What the copy's own grader prints, called with these flags, one call after another."""
    code = f"import grade\nfor flags in {calls}: grade.main(flags)"
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True,
                          check=True).stdout


# --- right solutions ------------------------------------------------------------------------------

@EACH_SET
def test_the_reference_gets_full_marks_and_the_blank_copy_none(number, tmp_path):
    scores, ignored = graded(hand_in(tmp_path / "ours", number), number)
    assert full(scores) and not ignored and len(scores) == len(SETS[number].parts)
    scores, ignored = graded(hand_in(tmp_path / "blank", number, copy_of(number)), number)
    assert not ignored
    assert all(score.points == 0 and score.message.startswith("is not written yet (set ")
               for score in scores.values())


@pytest.mark.parametrize("name", one_a_set({name: of for name, (of, _) in VARIANTS.items()}))
def test_a_right_but_different_solution_gets_full_marks(name, tmp_path):
    number, functions = VARIANTS[name]
    edits = {}
    for function, source in functions.items():
        file, short = function.split(":")
        first, *helpers = source.strip("\n").split("\n\n\n")
        text = graft.replaced(edits.get(file) or text_of(file), short, first)
        edits[file] = "\n\n\n".join([text, *helpers])
    scores, ignored = graded(hand_in(tmp_path, number, edits), number)
    assert full(scores), [str(score) for score in scores.values()]
    assert not ignored


def test_there_are_three_variants_and_eight_mutants_a_set():
    for number in SETS:
        assert sum(of == number for of, _ in VARIANTS.values()) >= 3
        assert sum(mutant.part[0] == str(number) for mutant in OF_PARTS.values()) >= 8


# --- wrong solutions ------------------------------------------------------------------------------

@pytest.mark.parametrize("name", one_a_set({name: mutant.part[0] for name, mutant in
                                            OF_PARTS.items()}))
def test_a_mutant_loses_its_own_part_and_is_named_there_first(name, tmp_path):
    mutant = OF_PARTS[name]
    number = int(mutant.part[0])
    scores, _ = graded(hand_in(tmp_path, number, grade.mutated(mutant)), number)
    lost = [score for score in scores.values() if score.points < score.of]
    assert lost and lost[0].name == mutant.part, [str(score) for score in lost]
    assert lost[0].message and "Traceback" not in lost[0].message


def test_the_sentence_of_the_published_mask(tmp_path):
    scores, _ = graded(hand_in(tmp_path, 4, grade.mutated(MUTANTS["published mask"])), 4)
    head, cause, effect, workload = str(scores["4b"]).splitlines()
    assert head == "4b the mask over past and new slots         0/4"
    assert re.fullmatch(r"   pass \d+, row \d, column \d = request '\w' \((prefill|decode), "
                        r"position \d+\) sees \d pad slots?\.", cause)
    assert effect.startswith("   Effect: ")
    assert re.fullmatch(r"   Workload: A = \d+\+\d+ tokens.*, token_budget \d\.", workload)
    assert all(scores[part].points == scores[part].of for part in ("4a", "4c", "4d"))


def test_running_every_request_alone_passes_the_contract_and_loses_points(tmp_path):
    """The plan's requests, one by one: right tokens, and no batch."""
    text = text_of("scheduler.py")
    text = graft.replaced(text, "Scheduler.share_budget", '''
    def share_budget(self):
        request = self.running[0] if self.running else None
        return [(request, min(request.todo, self.token_budget))] if request else []
'''.strip("\n"))
    scores, _ = graded(hand_in(tmp_path, 3, {"scheduler.py": text}), 3)
    assert scores["3a"].points == 0 and scores["3a"].message.startswith("plan for token_budget ")


def test_changes_elsewhere_are_ignored_and_said(tmp_path):
    text = text_of("cache.py").replace("end = start + k.size(-2)", "end = start + 0")
    scores, ignored = graded(hand_in(tmp_path, 4, {"cache.py": text}), 4)
    assert full(scores) and ignored == ["cache.py: KV.write"]


NASTY = {
    "an endless loop": ("        while True: pass", "does not finish within 1 seconds of CPU"),
    "it ends the process": ("        import os; os._exit(3)", "ends the process (status 3)"),
    "ten megabytes of output": ("        print('x' * 10**7)", "File too large"),
    "a deleted folder": ("        import os, shutil; shutil.rmtree(os.getcwd())\n"
                         "        raise KeyError('gone')", "raises KeyError"),
    "an import that fails": ("        import no_such_module", "No module named 'no_such_module'"),
    "too much memory": ("        torch.empty(10**12).fill_(1)", "raises RuntimeError"),
    "recursion": ("        return self.lay_out(device)", "raises RecursionError"),
}


@pytest.mark.parametrize("name", NASTY)
def test_what_a_student_does_stops_nobody_elses_part(name, tmp_path, monkeypatch):
    body, sentence = NASTY[name]
    reference(4)
    monkeypatch.setattr(grade, "FLOOR", 1)
    monkeypatch.setattr(grade, "TIMES", 1)
    monkeypatch.setattr(grade, "PATIENCE", 100)   # CPU time is the limit that is tested here
    text = graft.replaced(text_of("generate_dynamic.py"), "Rectangle.lay_out",
                          f"    def lay_out(self, device):\n{body}")
    scores, _ = graded(hand_in(tmp_path, 4, {"generate_dynamic.py": text}), 4)
    assert all(scores[part].points == 0 for part in ("4a", "4b", "4d"))
    assert sentence in scores["4a"].message and scores["4c"].points == 3
    assert len(scores["4a"].message.splitlines()) <= 2


def test_a_child_that_waits_for_ever_is_stopped(monkeypatch):
    monkeypatch.setattr(grade, "FLOOR", 1)
    monkeypatch.setattr(grade, "PATIENCE", 2)
    text = graft.replaced(text_of("scheduler.py"), "Scheduler.share_budget", """
    def share_budget(self):
        import time
        time.sleep(10**6)
""".strip("\n"))
    seen, seconds = grade.timed_run(3, ["3a"], ["a"], {"scheduler.py": text})
    assert seen["3a"] == [("a", "crash", "", ["does not finish within 2 seconds"])] and not seconds


def test_a_limit_follows_what_the_reference_takes(monkeypatch):
    limits = []
    monkeypatch.setattr(grade, "finish", lambda target, arguments, limit: (limits.append(limit), 0))
    for needed in {}, {"3a": 0.1}, {"3a": 4.0, "3b": 7.0, "3c": 9.0}:
        grade.timed_run(3, ["3a", "3b"], ["a"], needed=needed)
    assert limits == [10, 10, 70]


def test_who_hits_a_limit_is_graded_once_more(tmp_path, monkeypatch):
    """A machine may have been too busy in that moment, so the second time counts."""
    finish, ran = grade.finish, []

    def late(target, arguments, limit):
        ran.append(arguments[1])
        return ("does not finish within x", -9) if ran.count(["3b"]) <= times and (
            arguments[1] == ["3b"]) else finish(target, arguments, limit)

    monkeypatch.setattr(grade, "finish", late)
    for times, points, runs in (0, 3, 1), (1, 3, 2), (9, 0, 2):
        ran.clear()
        (scores, _), = grade.grade_class(3, [hand_in(tmp_path, 3)])
        assert scores[1].points == points and ran.count(["3b"]) == runs


AT_ONCE = """
import sys
from concurrent.futures import ThreadPoolExecutor
sys.path.insert(0, "assignments")
import grade

def seconds(_):
    return sum(grade.timed_run(4, ["4a", "4c"], grade.VISIBLE)[1].values())

with ThreadPoolExecutor(2) as pool:
    print(sum(pool.map(seconds, range(2))))
"""


@pytest.mark.thorough
def test_children_at_once_use_one_thread_each():
    """A thread for each core, in each child, would spin and need 40 times as much CPU time."""
    plain = {name: os.environ[name] for name in os.environ.keys() - {"OMP_NUM_THREADS"}}
    default, single = (float(subprocess.run(
        [sys.executable, "-c", AT_ONCE], cwd=ROOT, env=environment, check=True,
        capture_output=True, text=True).stdout) for environment in
        (plain, {**plain, "OMP_NUM_THREADS": "1"}))
    assert default < 4 * single


@pytest.mark.parametrize("text, sentence", [
    ("def broken(:", "generate_dynamic.py cannot be read: line 1"),
    ("x = 1\n", "generate_dynamic.py no longer has Rectangle.lay_out"),
])
def test_a_file_that_cannot_be_grafted(text, sentence, tmp_path):
    scores, _ = graded(hand_in(tmp_path, 4, {"generate_dynamic.py": text}), 4)
    assert all(sentence.split(" any")[0].split("lay_out")[0] in score.message
               and score.points == 0 for score in scores.values())
    (tmp_path / "generate_dynamic.py").unlink()
    scores, _ = graded(tmp_path, 4)
    assert "generate_dynamic.py cannot be read" in scores["4c"].message


def test_helpers_and_imports_come_along_but_code_at_top_level_does_not(tmp_path):
    text = graft.replaced(text_of("request.py"), "complete", '''
def complete(plan):
    return list(islice((i for i, pair in enumerate(plan) if due(*pair)), 99))
'''.strip("\n"))
    text += ("\n\nfrom itertools import islice\nBOUND = 0\n\n\ndef due(request, n):\n"
             "    return n == request.todo > BOUND\n\n\nraise SystemExit('never run')\n")
    scores, ignored = graded(hand_in(tmp_path, 4, {"request.py": text}), 4)
    assert full(scores) and not ignored


# --- numbers, bugs to expose, reports -------------------------------------------------------------

@EACH_SET
def test_numbers_depend_on_the_student_and_are_judged(number, tmp_path):
    answers = {key: answer() for key, (_, answer) in predict.questions(number, "ada").items()}
    assert len(answers) == 4 and all(type(answer) is int for answer in answers.values())
    assert [text for text, _ in predict.questions(number, "ada").values()] != \
        [text for text, _ in predict.questions(number, "bob").values()]
    (tmp_path / "numbers.json").write_text(json.dumps(answers))
    assert grade.grade_numbers(number, tmp_path, "ada").points == SETS[number].numbers
    (tmp_path / "numbers.json").write_text(json.dumps({**answers, "2": -1}))
    score = grade.grade_numbers(number, tmp_path, "ada")
    assert score.message == "wrong: 2" and score.points == round(0.75 * SETS[number].numbers, 1)


@EACH_SET
def test_the_smallest_workloads_known_expose_the_bugs(number, tmp_path):
    workloads = {str(i): SMALLEST[bug] for i, bug in enumerate(SETS[number].bugs, 1)}
    (tmp_path / "break.json").write_text(json.dumps(workloads))
    score = grade.grade_breaks(number, tmp_path)
    assert score.points == SETS[number].breaks and not score.message


def test_workloads_that_expose_nothing_or_are_no_workloads(tmp_path):
    small = SMALLEST["published mask"]
    large = {"requests": [*small["requests"], [9, 5]], "knobs": {}}
    workloads = {"1": large, "2": {"requests": [[3, 1]]}, "3": {"requests": [[1]]},
                 "4": {"requests": [[99, 1]]}, "5": "no"}
    (tmp_path / "break.json").write_text(json.dumps(workloads))
    score = grade.grade_breaks(4, tmp_path)
    lines = score.message.splitlines()
    assert score.points == 0.3   # half of the first
    assert lines[0].startswith("1: exposes it with 19 tokens; half of the points")
    assert lines[1] == "2: right and wrong code give the same results"
    assert lines[2].startswith("3: a request is [prompt, new tokens]")
    assert "prompt of 99 tokens does not fit block_size 24" in lines[3]
    assert lines[4].startswith("5: a workload is ")
    (tmp_path / "break.json").write_text("{")
    assert "break.json cannot be read" in grade.grade_breaks(4, tmp_path).message


def test_the_command_grades_a_class(tmp_path, capsys):
    for name in "ada", "bob":
        hand_in(tmp_path / "class" / name, 3)
    files = {flag: tmp_path / f"out.{flag}" for flag in ("json", "csv", "gradescope")}
    flags = [text for flag, path in files.items() for text in (f"--{flag}", str(path))]
    assert grade.main(["3", "--all", str(tmp_path / "class"), "--salt", "s", "--similarity",
                       *flags]) == 0
    printed = capsys.readouterr().out
    assert printed.count("9 of 13 points; written answers (2) by hand") == 2
    assert "ada and bob: share_budget" in printed and "100%" in printed
    assert set(json.loads(files["json"].read_text())) == {"ada", "bob"}
    assert files["csv"].read_text().splitlines()[0] == (
        "student,3a,3b,3c,3 numbers,3 break it,total")
    tests = json.loads(files["gradescope"].read_text())["tests"]
    assert [test["score"] for test in tests] == [3, 3, 3, 0, 0]


def test_hidden_workloads_depend_on_salt_and_student():
    seeds = {tuple(grade.seeds_of(student, 4, salt)) for student in "ab" for salt in ("", "s")}
    assert len(seeds) == 4 and grade.seeds_of("a", 4, "s") == grade.seeds_of("a", 4, "s")


# --- the open tasks -------------------------------------------------------------------------------

POLICIES = {
    "shortest": "def share(running, budget):\n"
                "    plan = [(r, 1) for r in running if r.todo == 1]\n"
                "    left = budget - len(plan)\n"
                "    for r in sorted((r for r in running if r.todo > 1), key=lambda r: r.todo):\n"
                "        n = min(r.todo, left)\n"
                "        if n:\n"
                "            plan.append((r, n))\n"
                "            left -= n\n"
                "    return plan\n",
    "greedy": "def share(running, budget):\n    return [(running[0], 10**6)]\n",
    "stuck": "def share(running, budget):\n    return []\n",
}


def test_policies_are_ranked_by_steps(tmp_path):
    for name, text in POLICIES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "policy.py").write_text(text)
    (tmp_path / "absent").mkdir()
    found = {path.name: leaderboard.result_of(path, "policy", "") for path in tmp_path.iterdir()}
    found |= leaderboard.baselines("policy", "")
    lines = leaderboard.rank("policy", found)
    assert [line.split()[1] for line in lines[:2]] == ["shortest", "ours"]
    assert found["shortest"]["ttft"] < 0.7 * found["ours"]["ttft"]
    assert "cannot compute 1000000 of its" in found["greedy"]["fault"]
    assert "nothing can go on" in found["stuck"]["fault"]
    assert found["absent"] == {"fault": "there is no policy.py that can be read"}


def test_packings_are_ranked_by_rows(tmp_path):
    (tmp_path / "packing.py").write_text(
        "def pack(lengths, size):\n    return [[i] for i in range(len(lengths))]\n")
    found = {"ada": leaderboard.result_of(tmp_path, "packing", ""),
             **leaderboard.baselines("packing", "")}
    assert [line.split()[1] for line in leaderboard.rank("packing", found)] == ["lower", "ours",
                                                                                "ada"]
    (tmp_path / "packing.py").write_text("def pack(lengths, size):\n    return [[0, 0]]\n")
    assert "each prompt must be in exactly one row" in leaderboard.result_of(
        tmp_path, "packing", "")["fault"]
