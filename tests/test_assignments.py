"""
The course kit: nothing leaks into a student copy, each mutant loses its own part, each right
solution gets full marks from both graders, and nothing that a student hands in stops the grader.
"""
import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from common import ROOT, quick

sys.path.insert(0, str(ROOT / "assignments"))
import grade  # noqa: E402
import graft  # noqa: E402
import leaderboard  # noqa: E402
import make  # noqa: E402
import predict  # noqa: E402
from mutants import BUGS, MUTANTS, NASTY, SAYS, bugs_of  # noqa: E402
from sets import MOST_LINES, SETS  # noqa: E402
from variants import VARIANTS, files_of  # noqa: E402

SMALLEST = {bug: {key: known[key] for key in ("requests", "knobs")} for bug, known in BUGS.items()}
EACH_SET = pytest.mark.parametrize("number", SETS)
SALTS = ("", "a", "b") if os.environ.get("THOROUGH") else ("",)
OF_PARTS = {name: mutant for name, mutant in MUTANTS.items()
            if {edit[0] for edit in mutant.edits} <= set(SETS[int(mutant.part[0])].functions)}
TIMED_RUN, SEEN = grade.timed_run, {}


def one_a_set(set_of):
    """Parameters from {name: its set}: the first of each set, and the others with --thorough."""
    return quick(set_of, {number: name for name, number in reversed(set_of.items())}.values())


def run_once(number, names, seeds, edits=(), needed=()):
    """grade.timed_run, once for the same code: most parts of a mutant are the reference's."""
    key = number, *names, *seeds, *sorted(dict(edits).items())
    if key not in SEEN:
        SEEN[key] = TIMED_RUN(number, names, seeds, edits, needed)
    return SEEN[key]


def graded(folder, number, edits=None, salt=""):
    """{part: Score}, and what was ignored. edits: {file: text}; None: those of the folder."""
    if edits is not None:
        grade.checkout(folder, number, edits)
    with mock.patch.object(grade, "timed_run", run_once):
        scores, ignored = grade.grade(number, folder, salt, "ada")
    return {score.name: score for score in scores}, ignored


def lost(scores):
    return [score for score in scores.values() if score.points < score.of or score.message]


# --- the manifest and the student copy ------------------------------------------------------------

@EACH_SET
def test_the_copy_is_the_repository_without_the_solutions(number, tmp_path):
    chosen, files = SETS[number], make.student_copy(number)
    haystack = "\n".join(ast.unparse(ast.parse(text)) if name.endswith(".py") else text
                         for name, text in files.items())
    assert set(files) == {*chosen.modules, *grade.KIT, "README.md", "HANDOUT.md", "BREAK.md",
                          "break.json", "written.md"} and len(bugs_of(number)) == 5
    for function in chosen.functions:
        file, name = function.split(":")
        node, blank = (graft.functions_in(text)[name] for text in (grade.clean(file), files[file]))
        assert graft.size_of(node) <= MOST_LINES, function
        assert graft.is_blank(blank) and ast.get_docstring(blank) == ast.get_docstring(node)
        for inner in graft.body_of(node):
            for statement in map(str.strip, ast.unparse(inner).splitlines()):
                assert len(statement) < 30 or statement not in haystack, (function, statement)
    scores, ignored = graded(tmp_path, number, files)
    assert not ignored and len(scores) == len(chosen.parts)
    assert all(score.points == 0 and score.message.endswith(" is not written yet.")
               for score in scores.values())


def test_a_copy_is_the_same_every_time_and_goes_into_an_empty_folder(tmp_path):
    for folder in "ab":
        make.main(["3", str(tmp_path / folder), "--student", "ada", "--nbgrader"])
    copies = [{path.relative_to(tmp_path / folder): path.read_bytes()
               for path in (tmp_path / folder).rglob("*") if path.is_file()} for folder in "ab"]
    assert copies[0] and copies[0] == copies[1]
    with pytest.raises(ValueError, match="a is not an empty folder"):
        make.make(3, tmp_path / "a")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(tmp_path / "a" / "set3.ipynb", 4)
    nbformat.validate(notebook)
    assert [cell.metadata.nbgrader.points for cell in notebook.cells
            if cell.metadata.nbgrader.grade] == [part.points for part in SETS[3].parts]


def run_copy(copy, code, **environment):
    """What Python prints that runs in a student copy."""
    return subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True,
                          check=True, env={**os.environ, **environment}).stdout


def test_set_3_from_the_blank_copy_to_full_marks_without_torch(tmp_path):
    make.make(3, copy := tmp_path / "copy")
    (tmp_path / "torch.py").write_text("raise ImportError('there is no torch here')")
    (copy / "break.json").write_text(json.dumps({"1": SMALLEST["prompts before decodes"],
                                                 "2": {"requests": [[1, 1]]}}))

    def run(*flags, text=None):
        (copy / "request.py").write_text(text) if text else None
        return run_copy(copy, f"import grade; grade.main({list(flags)})", PYTHONPATH=str(tmp_path))

    assert "Scheduler.share_budget is not written yet.\n" in run()
    ours = graft.source_of(grade.clean("request.py"), "advance")   # one function alone can be tried
    text = graft.replaced((copy / "request.py").read_text(), "advance", ours)
    right = "Scheduler.release is not written yet; what is written is right so far.\n"
    assert right in run(text=text)
    said = run(text=text.replace("computed += n", "computed = n"))
    assert "advance, with the plan A: 1 of 1 tokens to do: then computed: A: 1, expected 4." in said
    assert "Scheduler.release is not written yet." in said
    grade.checkout(copy, 3)
    assert "9 of 9 points on the visible workloads" in run()
    for bug, sentence in (
            ("1", "exposes bug 1, with 5 tokens\nYour own code:\n  step 0: "),
            ("2", "does not expose bug 2: right and wrong code give the same"),
            ("3", "workload 3: there is no workload\n")):
        assert run("--try", bug).startswith(sentence)
    said = run("--try", "1", text="def broken(:")
    assert "Your own code:\n  cannot be read: invalid syntax" in said


# --- right solutions ------------------------------------------------------------------------------

@pytest.mark.parametrize("name", one_a_set({name: of for name, (of, _) in VARIANTS.items()}))
def test_a_right_but_different_solution_gets_full_marks(name, tmp_path):
    number, edits = VARIANTS[name]
    for salt in SALTS:
        scores, ignored = graded(tmp_path, number, files_of(edits, grade.clean), salt)
        assert not lost(scores) and not ignored, [*map(str, scores.values())]


@pytest.mark.parametrize("number", quick(SETS, [3]))
def test_a_copy_gives_every_right_solution_full_marks_as_well(number, tmp_path):
    variants = [edits for of, edits in VARIANTS.values() if of == number]
    make.make(number, tmp_path / "copy")
    for i, edits in enumerate(variants):
        grade.checkout(tmp_path / str(i), number, files_of(edits, grade.clean))
    said = run_copy(tmp_path / "copy", f"""
import grade
known = grade.reference_of({number}, grade.VISIBLE)
for i in range({len(variants)}):
    scores, ignored = grade.grade({number}, f"../{{i}}", reference=known)
    print(i, *ignored, *(score for score in scores if score.points < score.of))
""")
    assert said.split() == [str(i) for i in range(len(variants))]


def test_what_is_added_comes_along_and_changes_elsewhere_do_not(tmp_path):
    edits = files_of({"request.py:indices_due": """
def indices_due(plan):
    return [i for i, (request, n) in enumerate(plan) if sub(n, request.todo) == 0]


from operator import sub
Request.kv_tokens = 1
if sub: advance = None
raise SystemExit('never run')
""", "cache.py": lambda text: text.replace("end = start + k.size(-2)", "end = start")}, grade.clean)
    scores, ignored = graded(tmp_path, 4, edits)
    line = edits["request.py"].count("\n") + 1
    assert not lost(scores) and ignored == [
        "request.py: Request.kv_tokens", "request.py: advance",
        f"request.py: line {line}, which is outside of all functions", "cache.py: KV.write"]


# --- wrong solutions ------------------------------------------------------------------------------

@pytest.mark.parametrize("name", one_a_set({name: mutant.part[0] for name, mutant in
                                            OF_PARTS.items()}))
def test_a_mutant_loses_its_own_part_and_is_named_there_first(name, tmp_path):
    mutant, marks = OF_PARTS[name], set()
    for salt in SALTS:   # the marks are the same for every salt
        scores, _ = graded(tmp_path, int(mutant.part[0]), grade.mutated(mutant), salt)
        first = lost(scores)[0]
        assert first.name == mutant.part and first.points == 0, [*map(str, scores.values())]
        cause, *rest = first.message.splitlines()
        assert SAYS.get(name, "") in cause and len(rest) <= 2 and "Traceback" not in first.message
        marks.add(tuple(score.points for score in scores.values()))
    assert len(marks) == 1, marks


@pytest.mark.parametrize("name", quick(NASTY, [*NASTY][3:4] + [*NASTY][6:]))
def test_what_a_student_does_stops_nobody_elses_part(name, tmp_path, monkeypatch):
    text, sentence = NASTY[name]
    assert not lost(graded(tmp_path, 4, ())[0])   # from now on, what the reference gives is known
    for limit, value in ("FLOOR", 1), ("TIMES", 1), ("PATIENCE", 100):   # CPU time is tested here
        monkeypatch.setattr(grade, limit, value)
    file, body = tmp_path / "generate_dynamic.py", f"    def lay_out(self, device):\n        {text}"
    file.write_bytes(text if isinstance(text, bytes) else graft.replaced(
        grade.clean(file.name), "Rectangle.lay_out", body).encode()) if text else file.unlink()
    scores, _ = graded(tmp_path, 4)
    failed = set(scores) - ({"4c"} if isinstance(text, str) else set())
    assert {score.name for score in lost(scores)} == failed and sentence in scores["4a"].message
    assert not any(scores[part].points for part in failed)


def test_limits_follow_what_the_reference_takes_and_a_child_that_waits_is_stopped(monkeypatch):
    limits, finish = [], grade.finish
    monkeypatch.setattr(grade, "finish", lambda target, arguments, limit: (limits.append(limit), 0))
    for needed in {}, {"3a": 0.1}, {"3a": 4.0, "3b": 7.0, "3c": 9.0}:
        grade.timed_run(3, ["3a", "3b"], ["a"], needed=needed)
    assert limits == [10, 10, 70]
    for name, value in ("finish", finish), ("FLOOR", 1), ("PATIENCE", 2):
        monkeypatch.setattr(grade, name, value)
    edits = files_of({"scheduler.py:Scheduler.share_budget":
                      "    def share_budget(self): __import__('time').sleep(10**6)"}, grade.clean)
    assert grade.timed_run(3, ["3a"], ["a"], edits) == (
        {"3a": [("a", 0, "crash", "", [   # the same sentence as for an endless loop
            "does not finish within 1 seconds of CPU time, or 2 seconds in all"])]}, {})


@pytest.mark.parametrize("times, points, runs", [(1, 3, 3), (9, 0, 2)])
def test_a_part_that_hits_a_limit_is_tried_once_more(times, points, runs, tmp_path, monkeypatch):
    """A machine may have been too busy in that moment, so the second time counts."""
    finish, ran = grade.finish, []

    def late(target, arguments, limit):
        ran.append(*arguments[1]) if len(arguments[1]) == 1 else None   # else the reference
        return ("does not finish within x", -9) if ran[-1:] == ["3b"] and (
            ran.count("3b") <= times) else finish(target, arguments, limit)

    monkeypatch.setattr(grade, "finish", late)
    grade.checkout(tmp_path, 3)
    *_, (_, scores, _) = grade.grade_class(3, [tmp_path])
    assert scores[1].points == points and ran.count("3b") == runs
    assert ran.count("3a") == 2   # what was in time is not run again


@pytest.mark.thorough
def test_a_child_computes_on_one_thread():
    """A thread for each core, in each child, would spin and need 40 times as much CPU time."""
    edits = files_of({"generate_dynamic.py:Rectangle.lay_out":
                      "    def lay_out(*_): raise KeyError(torch.get_num_threads())"}, grade.clean)
    assert "raises KeyError: 1" in run_copy(ROOT / "assignments", "import grade; print("
                                            f"grade.timed_run(4, ['4a'], ['a'], {edits}))",
                                            OMP_NUM_THREADS="")


# --- numbers, bugs to expose, reports -------------------------------------------------------------

@EACH_SET
def test_numbers_and_bugs_to_expose_are_judged(number, tmp_path):
    assert 4 == len({tuple(grade.seeds_of(student, number, salt)) for student in ("ada", "bob")
                     for salt in ("", "s")})   # hidden workloads depend on both, and nothing else
    assert grade.seeds_of("ada", number, "s") == grade.seeds_of("ada", number, "s")
    asked, others = (predict.questions(number, student) for student in ("ada", "bob"))
    answers = {key: answer for key, (_, answer) in asked.items()}
    assert len(answers) == 4 and all(type(answer) is int for answer in answers.values())
    assert [text for text, _ in asked.values()] != [text for text, _ in others.values()]
    for given, share, message in (answers, 1, ""), ({**answers, "2": -1}, 0.75, "wrong: 2"):
        (tmp_path / "numbers.json").write_text(json.dumps(given))
        score = grade.grade_numbers(number, tmp_path, "ada")
        assert score.message == message and score.points == round(share * SETS[number].numbers, 1)
    workloads = {str(i): SMALLEST[bug] for i, bug in enumerate(bugs_of(number), 1)}
    (tmp_path / "break.json").write_text(json.dumps(workloads))
    score = grade.grade_breaks(number, tmp_path)
    assert score.points == SETS[number].breaks and not score.message


def test_workloads_that_expose_nothing_or_are_no_workloads(tmp_path):
    large = {"requests": [*SMALLEST["published mask"]["requests"], [9, 5]], "knobs": {}}
    (tmp_path / "break.json").write_text(json.dumps({
        "1": large, "2": {"requests": [[3, 1]]}, "3": {"requests": [[1]]},
        "4": {"requests": [[99, 1]]}, "5": "no"}))
    score = grade.grade_breaks(4, tmp_path)
    assert score.points == 0.3   # half of the first
    for line, start in zip(score.message.splitlines(), (
            "1: exposes it with 19 tokens; half of the points",
            "2: right and wrong code give the same results",
            "3: a request is [prompt, new tokens]", "4: the right code raises ValueError",
            "5: a workload is "), strict=True):
        assert line.startswith(start)


def test_the_command_grades_a_class_whatever_a_folder_holds(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load(file):
        return json.loads(Path(file).read_text()) if Path(file).exists() else ()

    for name in "ada", "bob", "eve", "mal":
        grade.checkout(tmp_path / "class" / name, 3)
    Path("class/eve/numbers.json").write_text("[" * 10**5)
    Path("class/eve/break.json").write_text(json.dumps(
        {"1": {"requests": [["x", None]]}, "2": {"requests": [[10**9, 1]]}, "3": 7}))
    Path("class/mal/scheduler.py").unlink()
    os.mkfifo("class/mal/scheduler.py")
    Path("class/.hidden").mkdir()
    flags = ("3 --all class --salt s --similarity --json out.json --csv out.csv "
             "--gradescope out").split()
    report, grade_all, numbers, saved = grade.report, grade.grade_all, grade.grade_numbers, []
    monkeypatch.setattr(grade, "grade_numbers", lambda number, folder, student: 1 / (
        student != "bob") and numbers(number, folder, student))
    monkeypatch.setattr(grade, "report", lambda *arguments: saved.append(
        len(load("out.json"))) or report(*arguments))
    grade.main(flags)
    assert saved == [0, 1, 2, 3]   # what is graded is written before the next is
    said = capsys.readouterr()
    assert "cannot be graded: the grader raises ZeroDivisionError" in said.out   # bob, nobody else
    assert said.out.count("9 of 13 points; written answers (2) by hand") == 2   # ada and eve
    assert "scheduler.py cannot be read: it is not a file" in said.out and "4 of 4" in said.err
    assert said.out.count("numbers.json cannot be read: it is not there") == 2   # ada and mal
    alike = [line for line in said.out.splitlines() if "%" in line]
    assert 1 <= len(alike) <= 4 and "100%" in alike[0]
    assert Path("out.csv").read_text().startswith("student,3a,3b,3c,3 numbers,3 break it,total\n")
    results = load("out.json")
    marks = {name: [test["score"] for test in load(f"out/{name}.json")["tests"]]
             for name in results}
    assert len(marks) == 4 and marks["ada"] == [3, 3, 3, 0, 0] and sum(marks["bob"]) == 0
    del results["ada"]
    Path("out.json").write_text(json.dumps(results))
    with mock.patch.object(grade, "grade_all", side_effect=grade_all) as again:
        grade.main([*flags, "--resume"])
    assert [call.args[1].name for call in again.call_args_list] == ["ada"]
    assert load("out.json")["ada"][0]["points"] == 3
    grade.save(mock.Mock(json="", csv="", gradescope="out"), {"m" * 250: [], "zoe": []})
    assert load("out/zoe.json") and "File name too long" in capsys.readouterr().err


@pytest.mark.parametrize("flags, sentence", [
    ("nowhere", "nowhere is not a folder"),
    ("--all here", "--all here: there is no folder in it"),
    ("here --jobs 0", "--jobs must be at least 1, not 0"),
    ("--all . --student ada", "--student names one student"),
    ("here --resume", "--resume needs --json FILE"),
    ("here --resume --json bad.json", "--json bad.json holds no results"),
    ("here --csv nowhere/3.csv", "nowhere/3.csv: there is no folder"),
    ("here --json here", "here is a folder"), ("--all . --gradescope bad.json", "is no folder"),
])
def test_flags_that_cannot_work_are_refused(flags, sentence, tmp_path, monkeypatch, capsys):
    (tmp_path / "here").mkdir()
    (tmp_path / "bad.json").write_text("[1]")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        grade.main(["3", *flags.split()])
    assert sentence in capsys.readouterr().err.splitlines()[-1]


# --- the open tasks -------------------------------------------------------------------------------

@pytest.mark.parametrize("task, texts, table", [
    ("policy", {"greedy": "def share(running, budget):\n    return [(running[0], 10**6)]\n",
                "one each": "def share(running, budget):\n    return [(r, 1) for r in running]\n",
                "stuck": "def share(running, budget):\n    return []\n"},
     ["ours mean TTFT 9", "one each mean TTFT", "greedy raises ValueError: request 'r0' cannot "
      "compute 1000000 of its", "none there is no policy.py that can be read",
      "stuck raises RuntimeError: request 'r0' has arrived at step 0, but nothing can go on"]),
    ("packing", {"ada": "def pack(lengths, size):\n    return [[i] for i in range(len(lengths))]\n",
                 "bob": "def pack(lengths, size):\n    return [[0, 0]]\n"},
     ["lower bound 703 rows", "ours 737 rows", "ada 1704 rows",
      "bob raises ValueError: each prompt must be in exactly one row", "none there is no packing"]),
])
def test_open_tasks_are_ranked_by_counts(task, texts, table, tmp_path, capsys):
    for name, text in {**texts, "none": ""}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / (f"{task}.py" if text else "other.py")).write_text(text)
    leaderboard.main([task, str(tmp_path)])
    for line, start in zip(capsys.readouterr().out.splitlines(), table, strict=True):
        assert " ".join(line.split()[1:]).startswith(start)
