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
from isolate import HERE, PACKED, ROOT, Fault
from kit import Part, limit_process

SCORES = pytest.StashKey()


def pytest_addoption(parser):
    group = parser.getgroup("course kit")
    group.addoption("--submission", metavar="DIR", help="a student's folder; else the copy's own")
    group.addoption("--hidden", metavar="SECRET", help="larger workloads, drawn from this secret "
                    "and the student's id")
    group.addoption("--student", metavar="ID", help="else the one in student.json")
    group.addoption("--results", metavar="FILE", help="write Gradescope's results.json")
    group.addoption("--limited", metavar="SECONDS", type=int, help="limit CPU time and memory")


def pytest_configure(config):
    config.addinivalue_line("markers", "points(number, *functions, title=...): what a part is "
                            "worth, and what students write for it, as file.py:Class.method")
    config.stash[SCORES] = {}
    if seconds := option(config, "--limited"):
        limit_process(seconds)


def option(config, name):
    return config.getoption(name, None)   # None: the whole repository's tests run


@pytest.fixture(scope="session")
def submission(pytestconfig):
    """A student's folder. None: the repository's own functions are tested."""
    folder = option(pytestconfig, "--submission") or (ROOT if PACKED.exists() else None)
    return folder and Path(folder).resolve()


@pytest.fixture(scope="session")
def student(pytestconfig, submission):
    """The student's id, which decides hidden workloads, numbers, and the bug of set 7."""
    file = Path(submission or "", "student.json")
    known = json.loads(file.read_text("utf-8"))["student"] if file.is_file() else "nobody"
    return option(pytestconfig, "--student") or known


@pytest.fixture
def part(request, submission, student):
    """The part that a test belongs to: see kit.py."""
    secret, marker = option(request.config, "--hidden"), request.node.get_closest_marker("points")
    rng = random.Random(f"{secret} {student if secret else ''} {request.node.name}")
    return Part(name_of(request.node), submission, marker.args[1:], rng, secret is not None)


def name_of(item):
    """"3a" of the class Test3a, "3 numbers" of the function test_3_numbers."""
    return item.cls.__name__.removeprefix("Test") if item.cls else (
        item.originalname.removeprefix("test_").replace("_", " "))


# --- the table at the end -------------------------------------------------------------------------

def say(error, folder):
    """An exception in a line, with the last line of the student's own code that it passed."""
    if isinstance(error, Fault) or "is not written yet" in str(error):
        return str(error)
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        return "prints or writes more than the limit of 4 MB"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if folder in Path(
        frame.filename).parents and HERE not in Path(frame.filename).parents]
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
    marker = item.get_closest_marker("points")
    if marker is None or report.skipped or (report.when != "call" and report.passed):
        return report
    score = item.config.stash[SCORES].setdefault(name_of(item), {
        "of": marker.args[0], "title": marker.kwargs.get("title", ""), "passed": 0, "cases": 0,
        "whole": item.cls is not None, "messages": []})
    score["cases"] += 1
    score["passed"] += report.passed
    said = dict(item.user_properties).get("says")
    if call.excinfo:
        said = say(call.excinfo.value, item.funcargs.get("submission"))
        if isinstance(call.excinfo.value, (Fault, NotImplementedError)):
            report.longrepr = said   # the sentence says more than our stack does
    if said and said not in score["messages"]:
        score["messages"].append(said)
    return report


def results(config):
    """The parts that were tested, as in Gradescope's results.json."""
    for name, score in config.stash[SCORES].items():
        share = score["passed"] / score["cases"]
        points = round(score["of"] * (int(share) if score["whole"] else share), 2)
        yield {"name": f"{name} {score['title']}".strip(), "score": points,
               "max_score": score["of"], "status": "passed" if share == 1 else "failed",
               "output": "\n".join(score["messages"][:1 if score["whole"] else None])[:4000]}


def pytest_terminal_summary(terminalreporter, config):
    tests = [*results(config)]
    if not tests:
        return
    terminalreporter.section("points")
    for test in tests:
        terminalreporter.line(f"{test['name']:44}{test['score']:g}/{test['max_score']:g}")
        for line in test["output"].splitlines():
            terminalreporter.line(f"   {line}")
    total, of = (sum(test[key] for test in tests) for key in ("score", "max_score"))
    terminalreporter.line(f"{total:g} of {of:g} points" + (
        "" if option(config, "--hidden") else "; the final grade also has larger workloads"))


def pytest_sessionfinish(session):
    """Gradescope's results.json; `exitstatus` of pytest is 0 only if all is right."""
    if file := option(session.config, "--results"):
        Path(file).write_text(json.dumps({"tests": [*results(session.config)]}, indent=1),
                              encoding="utf-8", errors="backslashreplace")
