"""
The course kit: nothing leaks into a student copy, each mutant loses its own part, each right
solution gets full marks from both graders, and nothing that a student hands in stops the grader.
"""
import ast
import json
import os
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
from mutants import BUGS, MUTANTS  # noqa: E402
from sets import MOST_LINES, SETS  # noqa: E402
from variants import VARIANTS, solution  # noqa: E402

SMALLEST = {bug: {"requests": requests, "knobs": knobs}
            for bug, (_, requests, knobs) in BUGS.items()}
EACH_SET = pytest.mark.parametrize("number", SETS)
OF_PARTS = {name: mutant for name, mutant in MUTANTS.items()
            if {edit[0] for edit in mutant.edits} <= set(SETS[int(mutant.part[0])].functions)}
TIMED_RUN, SEEN = grade.timed_run, {}


def one_a_set(set_of):
    """Parameters from {name: its set}: the first of each set, and the others with --thorough."""
    first = {number: name for name, number in reversed(set_of.items())}
    return [name if first[number] == name else pytest.param(name, marks=pytest.mark.thorough)
            for name, number in set_of.items()]


@lru_cache
def reference(number, salt=""):
    return grade.reference_of(number, [*grade.VISIBLE, *grade.seeds_of("ada", number, salt)])


def run_once(number, names, seeds, edits=(), needed=()):
    """grade.timed_run, once for the same code: most parts of a mutant are the reference's."""
    key = number, *names, *seeds, *sorted(dict(edits).items())
    if key not in SEEN:
        SEEN[key] = TIMED_RUN(number, names, seeds, edits, needed)
    return SEEN[key]


def hand_in(folder, number, edits=()):
    """A student's folder: the reference, with some files changed."""
    for name, text in {**{name: grade.clean(name) for name in SETS[number].modules},
                       **dict(edits)}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")
    return folder


def with_function(function, source):
    """{file: text} of the reference with another definition."""
    file, name = function.split(":")
    return {file: graft.replaced(grade.clean(file), name, source.strip("\n"))}


def graded(folder, number, salt=""):
    """{part: Score}, and what was ignored."""
    with mock.patch.object(grade, "timed_run", run_once):
        scores, ignored = grade.grade(number, folder, salt, "ada", reference(number, salt))
    return {score.name: score for score in scores}, ignored


def full(scores):
    return all(score.points == score.of and not score.message for score in scores.values())


# --- the manifest and the student copy ------------------------------------------------------------

@EACH_SET
def test_the_manifest_matches_the_repository(number):
    chosen = SETS[number]
    code = sum(part.points for part in chosen.parts)
    assert chosen.points in (15, 20) and 0.55 <= code / chosen.points <= 0.65
    assert [MUTANTS[bug].part for bug in chosen.bugs] == [
        f"{number}{part}" for part in chosen.bug_parts] and len(chosen.bugs) == 5
    for function in [*chosen.functions, *chosen.hidden]:
        file, name = function.split(":")
        assert file in chosen.needs
        assert graft.size_of(graft.functions_in(grade.clean(file))[name]) <= MOST_LINES, function


@lru_cache
def copy_of(number):
    return make.student_copy(number)


@EACH_SET
def test_no_solution_leaks_into_the_copy(number):
    files = copy_of(number)
    haystack = "\n".join(ast.unparse(ast.parse(text)) if name.endswith(".py") else text
                         for name, text in files.items())
    assert set(files) == {*SETS[number].modules, *grade.KIT, "README.md", "HANDOUT.md",
                          "BREAK.md", "break.json", "written.md"}
    for function in SETS[number].functions:
        file, name = function.split(":")
        node, blank = (graft.functions_in(text)[name] for text in (grade.clean(file), files[file]))
        assert graft.is_blank(blank) and ast.get_docstring(blank) == ast.get_docstring(node)
        for inner in graft.body_of(node):
            for statement in map(str.strip, ast.unparse(inner).splitlines()):
                assert len(statement) < 30 or statement not in haystack, (function, statement)


def test_a_copy_is_the_same_every_time_and_goes_into_an_empty_folder(tmp_path):
    for folder in "ab":
        assert make.main(["3", str(tmp_path / folder), "--student", "ada", "--nbgrader"]) == 0
    files = {path.relative_to(tmp_path / "a"): path.read_bytes()
             for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert files and files == {path.relative_to(tmp_path / "b"): path.read_bytes()
                               for path in (tmp_path / "b").rglob("*") if path.is_file()}
    assert not any(b"budget -= n" in text for text in files.values())
    with pytest.raises(ValueError, match="a is not an empty folder"):
        make.make(3, tmp_path / "a")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(tmp_path / "a" / "set3.ipynb", 4)
    nbformat.validate(notebook)
    points = [cell.metadata.nbgrader.points for cell in notebook.cells
              if cell.metadata.nbgrader.grade]
    assert points == [part.points for part in SETS[3].parts]


def run_copy(copy, code, **more):
    """What Python prints that runs in a student copy."""
    return subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True,
                          check=True, **more).stdout


def test_set_3_from_the_blank_copy_to_full_marks_without_torch(tmp_path):
    make.make(3, tmp_path / "copy")
    (tmp_path / "torch.py").write_text("raise ImportError('there is no torch here')")
    (tmp_path / "copy" / "break.json").write_text(json.dumps(
        {"1": SMALLEST["prompts before decodes"], "5": {"requests": [[1, 1]], "knobs": {}}}))

    def run(*flags):
        return run_copy(tmp_path / "copy", f"import grade; grade.main({list(flags)})",
                        env={**os.environ, "PYTHONPATH": str(tmp_path)})

    assert "Scheduler.share_budget is not written yet.\n" in run()
    ours = graft.source_of(grade.clean("request.py"), "advance")
    text = graft.replaced(copy_of(3)["request.py"], "advance", ours)
    (tmp_path / "copy" / "request.py").write_text(text)   # one function alone can be tried
    assert "Scheduler.release is not written yet; what is written is right so far.\n" in run()
    text = text.replace("request.computed += n", "request.computed = n")
    (tmp_path / "copy" / "request.py").write_text(text)
    assert "advance, with the plan A: 1 of 1 tokens to do; then computed: A: 1, expected 4." in (
        said := run()) and "Scheduler.release is not written yet." in said
    hand_in(tmp_path / "copy", 3)
    assert "9 of 9 points on the visible workloads" in run()
    assert run("--try", "1").startswith("exposes bug 1, with 5 tokens\nYour own code:\n  step 0: ")
    text = json.loads((tmp_path / "copy" / "break.json").read_text())
    (tmp_path / "copy" / "break.json").write_text(json.dumps({**text, "2": text["5"]}))
    assert run("--try", "2").startswith("does not expose bug 2: right and wrong code give the same")
    assert run("--try", "3") == "break.json has no workload 3\n"
    (tmp_path / "copy" / "request.py").write_text("def broken(:")
    assert "Your own code:\n  cannot be read: invalid syntax" in run("--try", "1")


# --- right solutions ------------------------------------------------------------------------------

@EACH_SET
def test_the_blank_copy_gets_nothing(number, tmp_path):
    scores, ignored = graded(hand_in(tmp_path, number, copy_of(number)), number)
    assert not ignored and len(scores) == len(SETS[number].parts)
    assert all(score.points == 0 and score.message.endswith(" is not written yet.")
               for score in scores.values())


@pytest.mark.parametrize("name", one_a_set({name: of for name, (of, _) in VARIANTS.items()}))
def test_a_right_but_different_solution_gets_full_marks(name, tmp_path):
    number, edits = solution(name, grade.clean)
    scores, ignored = graded(hand_in(tmp_path, number, edits), number)
    assert full(scores) and not ignored, [*map(str, scores.values()), *ignored]


@pytest.mark.parametrize("number", [n if n == 3 else pytest.param(n, marks=pytest.mark.thorough)
                                    for n in SETS])
def test_a_copy_gives_every_right_solution_full_marks_as_well(number, tmp_path):
    names = [name for name, (of, _) in VARIANTS.items() if of == number]
    make.make(number, tmp_path / "copy")
    for i, name in enumerate(names):
        hand_in(tmp_path / str(i), number, solution(name, grade.clean)[1])
    said = run_copy(tmp_path / "copy", f"""
import grade
for i in range({len(names)}):
    scores, ignored = grade.grade({number}, f"../{{i}}")
    print(i, *ignored, *(score for score in scores if score.points < score.of))
""")
    assert said.split() == [str(i) for i in range(len(names))]


def test_what_is_added_comes_along_and_changes_elsewhere_do_not(tmp_path):
    edits = {"cache.py": grade.clean("cache.py").replace("end = start + k.size(-2)", "end = start"),
             "request.py": graft.replaced(grade.clean("request.py"), "complete", """
def complete(plan):
    return list(islice((i for i, pair in enumerate(plan) if due(*pair)), 99))
""".strip()) + "\nfrom itertools import islice\nBOUND = 0\n\n\ndef due(request, n):\n"
             "    return n == request.todo > BOUND\n\n\nraise SystemExit('never run')\n"}
    scores, ignored = graded(hand_in(tmp_path, 4, edits), 4)
    line = edits["request.py"].count("\n")
    assert full(scores) and ignored == [
        "request.py: " + f"line {line}, which is outside of all functions", "cache.py: KV.write"]


# --- wrong solutions ------------------------------------------------------------------------------

@pytest.mark.parametrize("name", one_a_set({name: mutant.part[0] for name, mutant in
                                            OF_PARTS.items()}))
def test_a_mutant_loses_its_own_part_and_is_named_there_first(name, tmp_path):
    mutant = OF_PARTS[name]
    number = int(mutant.part[0])
    scores, _ = graded(hand_in(tmp_path, number, grade.mutated(mutant)), number)
    lost = [score for score in scores.values() if score.points < score.of]
    assert lost[0].name == mutant.part and lost[0].points == 0, [str(score) for score in lost]
    assert lost[0].message and "Traceback" not in lost[0].message


@pytest.mark.thorough
@EACH_SET
def test_marks_do_not_depend_on_the_salt(number, tmp_path):
    solutions = {name: solution(name, grade.clean)[1] for name, (of, _) in VARIANTS.items()
                 if of == number}
    solutions |= {name: grade.mutated(mutant) for name, mutant in OF_PARTS.items()
                  if int(mutant.part[0]) == number}
    for name, edits in solutions.items():
        folder = hand_in(tmp_path / name, number, edits)
        marks = {tuple(score.points for score in graded(folder, number, salt)[0].values())
                 for salt in "abc"}
        assert len(marks) == 1, (name, marks)


SAYS = {   # mutant: what the first line of its message says
    "published mask": "row 0, column 8 = request 'A' (decode, position 2) sees 8 pad slots.",
    "no causal rule": "new token 0 sees the keys [0, 1, 2, 3], expected [0].",
    "softmax over the queries": "weights are [0.25, 0.0, 0.0, 0.0], expected equal ones with",
    "attention in float64": "torch.float64, expected (2, 3, 1, 1) torch.float32.",
    "attention in float32": "as if some of it were computed in float32.",
    "an exact fit is refused": "write('a', 6, ...) of 1 tokens into KV(7): raises ValueError",
    "sampled backwards": "pass 0: sampled is B, A, expected A, B, the order of the plan.",
    "tokens in int32": "pass 0: tokens has dtype torch.int32, expected torch.int64.",
    "no branch without a cache": "raises AttributeError in pass 0: 'NoneType' object has no",
}


@pytest.mark.parametrize("name", [name if name == "published mask" else pytest.param(
    name, marks=pytest.mark.thorough) for name in SAYS])
def test_a_message_says_what_is_wrong_where(name, tmp_path):
    part = OF_PARTS[name].part
    scores, _ = graded(hand_in(tmp_path, int(part[0]), grade.mutated(OF_PARTS[name])), int(part[0]))
    cause, *rest = scores[part].message.splitlines()
    assert SAYS[name] in cause and len(rest) <= 2, scores[part].message


def test_the_end_of_a_plan_that_goes_on_is_said():
    assert grade.difference("result", ["step 0: A1", "step 1: nothing"], ["step 0: A1"]) == (
        "step 1: nothing, expected the end")


NASTY = {
    "an endless loop": ("while True: pass", "does not finish within 1 seconds of CPU"),
    "it ends the process": ("import os; os._exit(3)", "ends the process (status 3)"),
    "ten megabytes of output": ("print('x' * 10**7)", "File too large"),
    "a deleted folder": ("import os, shutil; shutil.rmtree(os.getcwd()); raise KeyError('gone')",
                         "raises FileNotFoundError"),   # in the smaller workload, which came later
    "a deleted report": ("import os; os.remove('../report'); os._exit(0)", "ends the process"),
    "an import that fails": ("import no_such_module", "No module named 'no_such_module'"),
    "too much memory": ("torch.empty(10**12).fill_(1)", "raises RuntimeError"),
    "recursion": ("return self.lay_out(device)", "raises RecursionError"),
}


@pytest.mark.parametrize("name", [name if name == "a deleted report" else pytest.param(
    name, marks=pytest.mark.thorough) for name in NASTY])
def test_what_a_student_does_stops_nobody_elses_part(name, tmp_path, monkeypatch):
    body, sentence = NASTY[name]
    reference(4)
    monkeypatch.setattr(grade, "FLOOR", 1)
    monkeypatch.setattr(grade, "TIMES", 1)
    monkeypatch.setattr(grade, "PATIENCE", 100)   # CPU time is the limit that is tested here
    scores, _ = graded(hand_in(tmp_path, 4, with_function(
        "generate_dynamic.py:Rectangle.lay_out", f"    def lay_out(self, device):\n        {body}")
    ), 4)
    assert all(scores[part].points == 0 for part in ("4a", "4b", "4d"))
    assert sentence in scores["4a"].message and scores["4c"].points == 3
    assert len(scores["4a"].message.splitlines()) <= 2


def test_a_child_that_waits_for_ever_is_stopped(monkeypatch):
    monkeypatch.setattr(grade, "FLOOR", 1)
    monkeypatch.setattr(grade, "PATIENCE", 2)
    seen, seconds = grade.timed_run(3, ["3a"], ["a"], with_function(
        "scheduler.py:Scheduler.share_budget", """
    def share_budget(self):
        import time
        time.sleep(10**6)
"""))
    assert seen["3a"] == [("a", 0, "crash", "", ["does not finish within 2 seconds"])]
    assert not seconds


def test_a_limit_follows_what_the_reference_takes(monkeypatch):
    limits = []
    monkeypatch.setattr(grade, "finish", lambda target, arguments, limit: (limits.append(limit), 0))
    for needed in {}, {"3a": 0.1}, {"3a": 4.0, "3b": 7.0, "3c": 9.0}:
        grade.timed_run(3, ["3a", "3b"], ["a"], needed=needed)
    assert limits == [10, 10, 70]


def test_a_part_that_hits_a_limit_is_tried_once_more(tmp_path, monkeypatch):
    """A machine may have been too busy in that moment, so the second time counts."""
    finish, ran = grade.finish, []

    def late(target, arguments, limit):
        ran.append(arguments[1])
        return ("does not finish within x", -9) if ran.count(["3b"]) <= times and (
            arguments[1] == ["3b"]) else finish(target, arguments, limit)

    monkeypatch.setattr(grade, "finish", late)
    for times, points in (1, 3), (9, 0):
        ran.clear()
        *_, (folder, scores, _) = grade.grade_class(3, [hand_in(tmp_path, 3)])
        assert scores[1].points == points and ran.count(["3b"]) == (3 if points else 2)
        assert ran.count(["3a"]) == 2   # what was in time is not run again


@pytest.mark.thorough
def test_a_child_computes_on_one_thread():
    """A thread for each core, in each child, would spin and need 40 times as much CPU time."""
    said = subprocess.run([sys.executable, "-c", """if True:
        import sys
        sys.path.insert(0, "assignments")
        import grade, graft
        text = graft.replaced(grade.clean("generate_dynamic.py"), "Rectangle.lay_out",
                              "    def lay_out(*_): raise KeyError(torch.get_num_threads())")
        print(grade.timed_run(4, ["4a"], ["a"], {"generate_dynamic.py": text})[0])
        """], cwd=ROOT, env={name: os.environ[name] for name in os.environ if name !=
                             "OMP_NUM_THREADS"}, check=True, capture_output=True, text=True).stdout
    assert "raises KeyError: 1" in said


@pytest.mark.parametrize("text, sentence", [
    (b"def broken(:", "generate_dynamic.py cannot be read: line 1"),
    (b"x = 1\n", "generate_dynamic.py no longer has Rectangle."),
    (b"\0", "generate_dynamic.py cannot be read"),
    (b"(" * 10**5, "generate_dynamic.py cannot be read"),
    (b"#" * (1 << 21), "generate_dynamic.py cannot be read: it is not a file of at most 1 MB"),
    (None, "generate_dynamic.py cannot be read: it is not there"),
])
def test_a_file_that_cannot_be_grafted(text, sentence, tmp_path):
    hand_in(tmp_path, 4)
    (tmp_path / "generate_dynamic.py").unlink()
    if text:
        (tmp_path / "generate_dynamic.py").write_bytes(text)
    scores, _ = graded(tmp_path, 4)
    assert all(sentence in scores[part].message and scores[part].points == 0 for part in
               ("4a", "4b", "4c"))


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


def test_the_command_grades_a_class_whatever_a_folder_holds(tmp_path, capsys):
    for name in "ada", "bob", "eve", "mal":
        hand_in(tmp_path / "class" / name, 3)
    (tmp_path / "class" / "eve" / "numbers.json").write_text("[" * 10**5)
    (tmp_path / "class" / "eve" / "break.json").write_text(json.dumps(
        {"1": {"requests": [["x", None]]}, "2": {"requests": [[10**9, 1]]}, "3": 7}))
    (tmp_path / "class" / "mal" / "scheduler.py").unlink()
    os.mkfifo(tmp_path / "class" / "mal" / "scheduler.py")
    files = {flag: tmp_path / f"out.{flag}" for flag in ("json", "csv", "gradescope")}
    flags = ["3", "--all", str(tmp_path / "class"), "--salt", "s", "--similarity",
             *(text for flag, path in files.items() for text in (f"--{flag}", str(path)))]
    grade_all, numbers = grade.grade_all, grade.grade_numbers
    with mock.patch.object(grade, "grade_numbers", side_effect=lambda number, folder, student:
                           1 / (student != "bob") and numbers(number, folder, student)):
        assert grade.main(flags) == 0
    said = capsys.readouterr()
    assert "cannot be graded: ZeroDivisionError" in said.out   # bob, and nobody else
    assert said.out.count("9 of 13 points; written answers (2) by hand") == 2   # ada and eve
    assert "scheduler.py cannot be read: it is not a file" in said.out and "4 of 4" in said.err
    assert said.out.count("numbers.json cannot be read: it is not there") == 2   # ada and mal
    alike = [line for line in said.out.splitlines() if " alike" in line or "%" in line]
    assert 1 <= len(alike) <= 4 and "100%" in alike[0]
    results = json.loads(files["json"].read_text())
    assert set(results) == {"ada", "bob", "eve", "mal"}
    assert files["csv"].read_text().splitlines()[0] == (
        "student,3a,3b,3c,3 numbers,3 break it,total")
    tests = {name: json.loads((files["gradescope"] / f"{name}.json").read_text())["tests"]
             for name in results}
    assert [test["score"] for test in tests["ada"]] == [3, 3, 3, 0, 0]
    assert sum(test["score"] for test in tests["bob"]) == 0
    del results["ada"]
    files["json"].write_text(json.dumps(results))
    with mock.patch.object(grade, "grade_all", side_effect=grade_all) as again:
        grade.main([*flags, "--resume"])
    assert [call.args[1].name for call in again.call_args_list] == ["ada"]
    assert json.loads(files["json"].read_text())["ada"][0]["points"] == 3


def test_what_is_graded_is_written_before_the_next_is(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / "class" / name).mkdir(parents=True)
    seen = []

    def one_by_one(number, folders, *_):
        for folder in folders:
            yield folder, [grade.Score(name, "", 0, of) for name, of in grade.columns(3)], []
            seen.append(set(json.loads((tmp_path / "out.json").read_text())))

    monkeypatch.setattr(grade, "grade_class", one_by_one)
    grade.main(["3", "--all", str(tmp_path / "class"), "--json", str(tmp_path / "out.json")])
    assert seen == [{"a"}, {"a", "b"}]


@pytest.mark.parametrize("flags, sentence", [
    (["3", "--all", "nowhere"], "nowhere is not a folder"),
    (["3", "--all", "."], "--all .: there is no folder in it"),
    (["3", "here", "--jobs", "0"], "--jobs must be at least 1, not 0"),
    (["3", "--all", "..", "--student", "ada"], "--student names one student"),
    (["3", "here", "--resume"], "--resume needs --json FILE"),
    (["3", "here", "--resume", "--json", "bad.json"], "--json bad.json holds no results"),
    (["3", "here", "--csv", "nowhere/3.csv"], "nowhere/3.csv: there is no folder"),
])
def test_flags_that_cannot_work_are_refused_in_a_line(flags, sentence, tmp_path, monkeypatch,
                                                      capsys):
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "bad.json").write_text("[1]")
    monkeypatch.chdir(folder)
    if "here" in flags:
        (folder / "here").mkdir()
    with pytest.raises(SystemExit):
        grade.main(flags)
    assert sentence in capsys.readouterr().err.splitlines()[-1]


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
