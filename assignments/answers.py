"""
What students hand in beside code: numbers that they predicted (setN/numbers.json), and workloads
that expose bugs (setN/break.json). The reference runs each workload with and without the bug.
bugs.json has the bugs, and for each the smallest workload known.
"""
import json
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path

import pytest
from isolate import HERE, OURS, PACKED, Fault
from kit import counts_of, difference, given, scheduled, short

from lab.checks.traps import TRAPS, function_named, swapped


def answers(of_set, worth):
    """The tests of predicted numbers, and of workloads that expose bugs."""
    @pytest.mark.points(worth, title="predicted numbers")
    @pytest.mark.parametrize("key", "1234")
    def numbers(key, submission, student):
        answer = handed_in(submission, "numbers.json", of_set, key)
        if PACKED.exists():
            pytest.skip("your instructor has the answers" if type(answer) is int else
                        f"there is no whole number for question {key} yet")
        from predict import questions
        if answer != questions(of_set, student)[key][1]:
            raise Fault(f"{key}: {answer!r} is wrong")

    @pytest.mark.points(worth, title="bugs exposed")
    @pytest.mark.parametrize("key", "12345")
    def bugs(key, submission, record_property):
        asked = handed_in(submission, "break.json", of_set, key)
        try:
            record_property("says", f"bug {key}: {exposed(bugs_of(of_set)[int(key) - 1], asked)}")
        except Fault as fault:
            raise Fault(f"bug {key}: {fault}") from None

    return numbers, bugs


def handed_in(submission, name, number, key):
    """One answer of setN/numbers.json and the like. Fault, in a sentence, if it cannot be read."""
    if submission is None:
        pytest.skip("the repository hands nothing in")
    try:
        return json.loads((submission / f"set{number}" / name).read_text("utf-8-sig"))[key]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise Fault(f"{name} has no answer {key}: {error}") from None


# --- bugs -----------------------------------------------------------------------------------------

def bugs_of(number):
    """The bugs of a set, in their order: what bugs.json says of them, with "edits" and "most"."""
    known = json.loads(Path(OURS if PACKED.exists() else HERE, "bugs.json").read_text("utf-8"))
    if PACKED.exists():   # make.py has written this list
        return known
    bugs = {name: bug for name, bug in known.items() if bug["set"] == number}
    return [{**bug, "edits": bug.get("edits") or TRAPS[name], "most": (
        size_of(bug) * 3 // 2 if "requests" in bug else len(bug["calls"] or ()))}
        for name, bug in bugs.items()]


@contextmanager
def inserted(bug):
    """Ours with the bug, for the `with` block."""
    changes = {}
    for function, old, new in bug["edits"]:
        changes.setdefault(function, []).append((old, new))
    with ExitStack() as edits:
        for function, each in changes.items():
            edits.enter_context(swapped(function_named(function), each))
        yield


def fixed_knobs(bug):
    return {"attention": "mask"} if bug["runs"] == "generate_ragged" else {}


def size_of(asked):
    """Prompt tokens and new tokens of all requests."""
    return sum((len(prompt) if isinstance(prompt, list) else prompt) + new
               for prompt, new, *_ in asked["requests"])


def run(bug, asked):
    """What is observed on a workload of break.json."""
    requests, knobs, logits = given(*asked["requests"]), asked.get("knobs", {}), {}
    if bug["runs"] == "scheduler":
        return {key: value for seen in scheduled(requests, **knobs) for key, value in seen.items()}
    from lab.checks.toy import toy
    trace = import_module(bug["runs"]).generate(
        toy(), requests, **fixed_knobs(bug), **knobs, on_token=lambda request, token, row:
        logits.setdefault(f"logits of {request.name}", []).append(row.tolist()))
    return {**{f"tokens of {r.name}": r.generated for r in requests}, **counts_of(trace), **logits}


def exposed(bug, asked):
    """What the bug does on a workload, in a sentence. Fault if the workload does not show it."""
    if asked is None:
        raise Fault("there is no workload")
    try:
        right, size = run(bug, asked), size_of(asked)
    except Exception as error:
        raise Fault(f"with this workload (see BREAK.md for its format), the right code raises "
                    f"{type(error).__name__}: {error}") from None
    try:
        with inserted(bug):
            wrong = run(bug, asked)
    except Exception as error:
        wrong = {"the run": f"raises {type(error).__name__}: {error}"}
        right["the run"] = "ends"
    shown = {key: fault for key in wrong if (fault := difference(wrong[key], right.get(key)))}
    if not shown:
        raise Fault("right and wrong code both give " + ", ".join(
            f"{key}: {short(value)}" for key, value in right.items() if "logits" not in key))
    says = "with the bug, {}: {}".format(*next(iter(shown.items())))
    if size > bug["most"]:
        raise Fault(f"{says}; but the workload has {size} tokens, at most {bug['most']} are "
                    "allowed")
    return f"{size} tokens; {says}"
