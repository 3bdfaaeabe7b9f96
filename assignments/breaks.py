"""
Workloads that students hand in to expose bugs, in setN/break.json. The reference runs each with and
without the bug. bugs.json has the bugs, and for each the smallest workload known.
"""
import json
from contextlib import ExitStack, contextmanager
from importlib import import_module
from zipfile import ZipFile

from isolate import Fault
from kit import HERE, PACKED, ROOT, counts_of, difference, given, plans_of, short

from checks.traps import TRAPS, function_named, swapped


def bugs_of(number):
    """The bugs of a set, in their order: what bugs.json says of them, with "edits" and "most"."""
    if PACKED.exists():
        with ZipFile(PACKED) as archive:
            return json.loads(archive.read("bugs.json"))
    text = (HERE / "bugs.json").read_text(encoding="utf-8")
    bugs = {name: bug for name, bug in json.loads(text).items() if bug["set"] == number}
    return [{**bug, "edits": bug.get("edits") or TRAPS[name], "most": (
        size_of(bug) * 3 // 2 if "requests" in bug else len(bug["calls"] or ()))}
        for name, bug in bugs.items()]


@contextmanager
def inserted(bug):
    """Ours with the bug, for the `with` block."""
    with ExitStack() as edits:
        changes = {}
        for function, old, new in bug["edits"]:
            changes.setdefault(function, []).append((old, new))
        for function, each in changes.items():
            edits.enter_context(swapped(function_named(function), each))
        yield


def in_repository(submission):
    """Whether our own files are tested: nothing is handed in there."""
    return not PACKED.exists() and submission.folder == ROOT


def handed_in(submission, name, number, key):
    """One answer of setN/numbers.json and the like. Fault, in a sentence, if it cannot be read."""
    file = submission.folder / f"set{number}" / name
    try:
        return json.loads(file.read_text("utf-8-sig"))[key]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        why = "it is not there" if isinstance(error, OSError) else error
        raise Fault(f"{name} has no answer {key}: {why}") from None


def fixed_knobs(bug):
    return {"attention": "mask"} if bug["runs"] == "generate_ragged" else {}


def size_of(asked):
    """Prompt tokens and new tokens of all requests."""
    return sum((len(prompt) if isinstance(prompt, list) else prompt) + new
               for prompt, new, *_ in asked["requests"])


def exposed(bug, asked):
    """What the bug does on a workload, in a sentence. Fault if the workload does not show it."""
    if asked is None or not well_formed(asked):
        raise Fault("there is no workload" if asked is None else FORMAT)
    try:
        right = run(bug, asked)
    except Exception as error:
        raise Fault(f"the right code raises {type(error).__name__}: {error}") from None
    try:
        with inserted(bug):
            wrong = run(bug, asked)
    except Exception as error:
        wrong = {"the run": f"raises {type(error).__name__}: {error}"}
        right["the run"] = "ends"
    shown = [key for key in wrong if difference(wrong[key], right.get(key))]
    if not shown:
        raise Fault("right and wrong code both give " + ", ".join(
            f"{key}: {short(value)}" for key, value in right.items() if "logits" not in key))
    key, size = shown[0], size_of(asked)
    says = f"with the bug, {key}: {difference(wrong[key], right.get(key))}"
    if size > bug["most"]:
        raise Fault(f"{says}; but the workload has {size} tokens, at most {bug['most']} are "
                    "allowed")
    return f"{size} tokens; {says}"


def run(bug, asked):
    """What is observed on a workload of break.json."""
    requests, knobs, logits = given(*asked["requests"]), asked.get("knobs", {}), {}
    if bug["runs"] == "scheduler":
        plans, after = plans_of(requests, **knobs)
        return {"plans": plans, **after}
    from checks.toy import toy
    trace = import_module(bug["runs"]).generate(
        toy(), requests, **fixed_knobs(bug), **knobs, on_token=lambda request, token, row:
        logits.setdefault(f"logits of {request.name}", []).append(row.tolist()))
    return {**{f"tokens of {r.name}": r.generated for r in requests}, **counts_of(trace), **logits}


FORMAT = ('a workload is {"requests": [...], "knobs": {...}}, with 1 to 8 requests; a request is '
          "[prompt, new tokens] or [prompt, new tokens, arrival, priority, eos_token], in whole "
          "numbers below 1000; only a prompt may be a list, and only eos_token null")


def well_formed(asked):
    """Whether this is a workload as break.json holds them."""
    try:
        requests, values = asked["requests"], [*asked.get("knobs", {}).values()]
        for prompt, new, *others in requests:
            values += [*(prompt if isinstance(prompt, list) else [prompt]), new, *others[:2]]
            values += [each for each in others[2:] if each is not None]
        return (1 <= len(requests) <= 8 and max(map(len, requests)) <= 5
                and not set(asked) - {"requests", "knobs"}
                and all(type(value) is int and 0 <= value < 1000 for value in values))
    except (TypeError, ValueError, KeyError, AttributeError):
        return False
