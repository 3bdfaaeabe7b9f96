"""
pytest for the sets: points as a marker, their table at the end, and a results file.

    pytest set3                                  in a student's copy; all that pytest has works
    pytest set3 -k 3a -s --pdb                   one part, with prints, a debugger at the fault
    pytest assignments/set3 --submission handed_in/ada --hidden SECRET     as an instructor

A class of tests is a part, worth its points if all of it passes. A function outside of a class is
worth the share of its cases that pass.
"""
import errno
import json
import random
import traceback
from pathlib import Path

import pytest
from breaks import bugs_of, exposed, handed_in, in_repository
from isolate import Fault, Submission
from kit import HERE, PACKED, ROOT, Part

SCORES = pytest.StashKey()


def pytest_addoption(parser):
    group = parser.getgroup("course kit")
    group.addoption("--submission", metavar="DIR", help="a student's folder; else the copy's own")
    group.addoption("--hidden", metavar="SECRET", help="larger workloads, drawn from this secret "
                    "and the student's id")
    group.addoption("--student", metavar="ID", help="else the one in student.json")
    group.addoption("--results", metavar="FILE", help="write Gradescope's results.json")


def pytest_configure(config):
    config.addinivalue_line("markers", "points(number, *functions, title=...): what a part is "
                            "worth, and what students write for it, as file.py:Class.method")
    config.stash[SCORES] = {}


def option(config, name):
    return config.getoption(name, None)   # None: the whole repository's tests run


@pytest.fixture(scope="session")
def submission(pytestconfig):
    folder = option(pytestconfig, "--submission") or ROOT   # in a copy, ROOT is the copy
    return Submission(folder, *([HERE] if Path(folder) == ROOT and not PACKED.exists() else []))


@pytest.fixture(scope="session")
def student(pytestconfig, submission):
    """The student's id, which decides hidden workloads, numbers, and the bug of set 7."""
    file = submission.folder / "student.json"
    known = json.loads(file.read_text("utf-8"))["student"] if file.is_file() else "nobody"
    return option(pytestconfig, "--student") or known


@pytest.fixture
def part(request, submission, student):
    """The part that a test belongs to: see kit.py."""
    secret, marker = option(request.config, "--hidden"), points_of(request.node)
    rng = random.Random(f"{secret} {student if secret else ''} {request.node.name}")
    part = Part(submission, marker.args[1:], rng, secret is not None)
    part.name = name_of(request.node)
    return part


def points_of(item):
    return item.get_closest_marker("points")


def name_of(item):
    """"3a" of the class Test3a, "3 numbers" of the function test_3_numbers."""
    return item.cls.__name__.removeprefix("Test") if item.cls else (
        item.originalname.removeprefix("test_").replace("_", " "))


@pytest.fixture(params="1234")
def number(request, submission, student):
    """Judges one predicted number. The copy has no answers."""
    def judge(set_number):
        if in_repository(submission):
            pytest.skip("the repository hands nothing in")
        answer = handed_in(submission, "numbers.json", set_number, request.param)
        if PACKED.exists():
            pytest.skip("your instructor has the answers" if type(answer) is int else
                        f"there is no whole number for question {request.param} yet")
        from predict import questions
        if answer != questions(set_number, student)[request.param][1]:
            raise Fault(f"{request.param}: {answer!r} is wrong")
    return judge


@pytest.fixture(params="12345")
def bug(request, submission, record_property):
    """Judges the workload for one bug, and says what the bug does with it."""
    def judge(set_number):
        if in_repository(submission):
            pytest.skip("the repository hands nothing in")
        asked = handed_in(submission, "break.json", set_number, request.param)
        try:
            said = exposed(bugs_of(set_number)[int(request.param) - 1], asked)
        except Fault as fault:
            raise Fault(f"bug {request.param}: {fault}") from None
        record_property("says", f"bug {request.param}: {said}")
    return judge


# --- the table at the end -------------------------------------------------------------------------

def say(error, folder):
    """An exception in a line, with the last line of the student's own code that it passed."""
    if isinstance(error, Fault):
        return str(error)
    if isinstance(error, NotImplementedError) and "is not written yet" in str(error):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return "prints or writes more than the limit of 4 MB"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if Path(frame.filename).is_relative_to(folder)
              and Path(frame.filename).parent != PACKED.parent]
    place = f" (line {frames[-1].lineno} of {Path(frames[-1].filename).name}, in " \
            f"{frames[-1].name}: {frames[-1].line})" if frames else ""
    message = str(error).strip().partition("\n")[0]
    if isinstance(error, KeyError) and message == "'xray'":
        message += ", since nothing was written under this layer"
    where = f"\n{error.where}" if hasattr(error, "where") else ""
    moment = getattr(error, "moment", "")
    return f"raises {type(error).__name__}{moment}: {message:.150}{place}{where}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    marker = points_of(item)
    if marker is None or (report.when != "call" and report.passed):
        return report
    score = item.config.stash[SCORES].setdefault(name_of(item), {
        "of": marker.args[0], "title": marker.kwargs.get("title", ""), "passed": 0, "cases": 0,
        "whole": item.cls is not None, "messages": []})
    if report.skipped:
        return report
    score["cases"] += 1
    score["passed"] += report.passed
    if call.excinfo:
        folder = item.funcargs["submission"].folder if "submission" in item.funcargs else Path("-")
        sentence = say(call.excinfo.value, folder)
        if sentence not in score["messages"]:
            score["messages"].append(sentence)
        if isinstance(call.excinfo.value, (Fault, NotImplementedError)):
            report.longrepr = sentence   # the sentence says more than our stack does
    elif text := dict(item.user_properties).get("says"):
        score["messages"].append(text)
    return report


def points(score):
    share = score["passed"] / score["cases"] if score["cases"] else 0
    return round(score["of"] * (int(share) if score["whole"] else share), 2)


def pytest_terminal_summary(terminalreporter, config):
    scores = {name: score for name, score in config.stash[SCORES].items() if score["cases"]}
    if not scores:
        return
    terminalreporter.section("points")
    for name, score in scores.items():
        head = f"{name} {score['title']}".ljust(44)
        terminalreporter.line(f"{head}{points(score):g}/{score['of']:g}")
        for message in score["messages"][:1 if score["whole"] else None]:
            for line in message.splitlines():
                terminalreporter.line(f"   {line}")
    total, of = sum(map(points, scores.values())), sum(score["of"] for score in scores.values())
    terminalreporter.line(f"{total:g} of {of:g} points" + (
        "" if option(config, "--hidden") else "; the final grade also has larger workloads"))


def pytest_sessionfinish(session):
    """Gradescope's results.json; `exitstatus` of pytest is 0 only if all is right."""
    if file := option(session.config, "--results"):
        Path(file).write_text(json.dumps({"tests": [
            {"name": f"{name} {score['title']}".strip(), "score": points(score),
             "max_score": score["of"], "output": "\n".join(score["messages"][:5])[:4000],
             "status": "passed" if points(score) == score["of"] else "failed"}
            for name, score in session.config.stash[SCORES].items() if score["cases"]]}, indent=1),
            encoding="utf-8", errors="backslashreplace")
