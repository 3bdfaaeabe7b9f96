"""
Grades a student's functions, and says in sentences what is wrong.

    python assignments/grade.py 4 STUDENT_DIR                       one student
    python assignments/grade.py 4 --all DIR --jobs 2 --csv 4.csv    a folder of students

In a student copy, made by make.py, `python grade.py` grades the copy itself on the visible
workloads. Instructors also grade on hidden ones, which depend on --salt and the student's id.

A student's functions are grafted into our files, part by part. So other changes have no effect, and
a fault in one part cannot affect another. A child process with limits on time, memory and output
runs them and reports what it observes (observe.py). This process judges, and never runs a student's
code. That stops mistakes, not attacks: grade hostile code in a container.
"""
import argparse
import ast
import csv
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import os
import sys
import tempfile
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path

import graft
import observe
from sets import CAUSES, SETS

HERE = Path(__file__).resolve().parent
KIT = ("grade.py", "observe.py", "graft.py", "sets.py")   # what a student copy grades with
PACKED = HERE / "reference.bin"   # in a student copy only: our files, and those with a bug
if not PACKED.exists():
    sys.path.insert(0, str(HERE.parent))   # the repository's modules
LATE = "does not finish within"
SENTENCES = ("tokens", "positions", "sees", "sampled", "crash", "contract")
VISIBLE = [observe.EDGES, *(f"visible {i}" for i in range(4))]
HIDDEN = 6             # workloads
VISIBLE_SHARE = 0.4    # of a part's points
# A part may take so many times the CPU time that the reference has just taken, and at least the
# FLOOR, in seconds. CPU time, because a busy machine must not cost points. A child that waits for
# ever uses none: it is stopped when the clock shows PATIENCE times its CPU limit.
TIMES, FLOOR, PATIENCE = 10, 10, 10
TOLERANCE = 1e-8       # relative; what is compared is in float64
LARGEST = 1 << 20      # bytes of a file that is read
ALIKE = 0.8            # share of two functions' code from which on they are listed
UNREADABLE = (OSError, SyntaxError, ValueError, RecursionError, MemoryError)   # files of students


@dataclass
class Score:
    """What one part got, and why."""
    name: str
    title: str
    points: float
    of: float
    message: str = ""

    def __str__(self):
        head = f"{self.name} {self.title}".ljust(44) + f"{self.points:g}/{self.of:g}"
        return "\n".join([head, *(f"   {line}" for line in self.message.splitlines())])


# --- files ----------------------------------------------------------------------------------------

@lru_cache
def packed():
    """What make.py has packed: {"set": 4, "files": {name: text}, "bugs": what `bug` returns}."""
    return json.loads(zlib.decompress(PACKED.read_bytes())) if PACKED.exists() else None


def clean(file):
    """The text of our file."""
    return packed()["files"][file] if packed() else (HERE.parent / file).read_text("utf-8")


def read(folder, file):
    """The bytes of a student's file. OSError for what is no file, or too large to be one."""
    path = Path(folder, file)
    if not path.is_file() or path.stat().st_size > LARGEST:
        raise OSError("it is not a file of at most 1 MB" if path.exists() else "it is not there")
    return path.read_bytes()


def read_json(folder, file):
    """A student's JSON file: (its object, "") or ({}, what is wrong with it)."""
    try:
        found = json.loads(read(folder, file).decode("utf-8-sig"))
    except UNREADABLE as error:
        return {}, f"{file} cannot be read: {error}"
    return (found, "") if isinstance(found, dict) else ({}, f"{file} is not a JSON object")


def checkout(folder, number, edits=()):
    """Our files of what a set needs. edits: {file: its text}."""
    write_files(folder, {**{name: clean(name) for name in SETS[number].modules}, **dict(edits)})


def write_files(folder, files):
    """Writes {name: text}, with line ends as they are."""
    for name, text in files.items():
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="")


def new_files(number, folder):
    """{name: text} of Python files that a student has added beside ours."""
    found = {}
    for name in sorted({path.name for path in Path(folder).glob("*.py")}
                       - {*SETS[number].modules, *KIT}):
        try:
            found[name] = ast.unparse(ast.parse(read(folder, name)))
        except UNREADABLE as error:   # whatever imports it says so
            found[name] = f"raise SyntaxError({f'{name} cannot be read: {error}'!r})\n"
    return found


def grafts(number, folder):
    """
    Our files with a student's functions in them, for each part: (part, {file: text}, what a student
    has changed in vain: "cache.py: KV.write", a fault in the files or None).
    """
    new = new_files(number, folder)
    for part in SETS[number].parts:
        edits, vain, fault = dict(new), [], None
        for file in SETS[number].needs:   # helpers may be in any of them
            names = [name.split(":")[1] for name in part.functions if name.startswith(file + ":")]
            try:
                student = read(folder, file)
                gone = sorted({*names} - {*graft.functions_in(student)})
                edits[file], left_out = graft.grafted(clean(file), student, names)
                vain += [f"{file}: {what}" for what in left_out]
                fault = fault or (f"{file} no longer has {gone[0]} as a def" if gone else None)
            except UNREADABLE as error:
                at = f"line {error.lineno}: " if isinstance(error, SyntaxError) else ""
                why = getattr(error, "msg", str(error)) or type(error).__name__
                fault = fault or (f"{file} cannot be read: {at}{why}" if names else None)
        yield part, edits, vain, fault


# --- running --------------------------------------------------------------------------------------

def seeds_of(student, number, salt):
    """Seeds of a student's hidden workloads: always the same, and different for each student."""
    digest = hashlib.sha256(os.fsencode(f"{salt}/{student}/{number}")).hexdigest()
    return [f"{digest} {i}" for i in range(HIDDEN)]


def timed_run(number, names, seeds, edits=(), needed=()):
    """
    Observes parts in a child process: {"4a": [(seed, probe, cause, where, value), ...]}, and {"4a":
    CPU seconds} of the parts that ended. If the child stops early, the part that it was at counts
    as crashed, and so do those after it.

    needed: the CPU seconds of the reference, from which the limits follow
    """
    limit = max(FLOOR, *(TIMES * dict(needed).get(name, 0) for name in names))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        place, report = Path(folder, "checkout").resolve(), Path(folder, "report").resolve()
        checkout(place, number, edits)
        late, status = finish(observe.child, (place, names, seeds, report), limit)
        seen, seconds = {name: [] for name in names}, {}
        for line in report.read_text().splitlines() if report.is_file() else ():
            with suppress(ValueError, RecursionError):   # the process ended in the middle of it
                name, *observation = json.loads(line)
                if observation[2] == "done":
                    seconds[name] = observation[-1]
                else:
                    seen[name].append(tuple(observation))
        printed = Path(f"{report}.out")
        flood = printed.exists() and printed.stat().st_size >= 4 << 20
    why = "prints more than 4 MB" if flood else late or f"ends the process (status {status})"
    for name in names:
        if name not in seconds:
            seen[name].append((seeds[0], 0, "crash", "", [why]))
    return seen, seconds


def finish(target, arguments, limit):
    """
    Runs a function in a child process, which limits its CPU seconds to its last argument. Returns
    the limit that it has hit, in words, or None; and its exit status.
    """
    fork = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if fork else "spawn")
    if fork:   # children begin with torch already imported; that there is none is no fault: set 3
        context.set_forkserver_preload(["torch"])
    process = context.Process(target=target, args=(*arguments, limit))
    process.start()
    process.join(PATIENCE * limit)
    late = process.is_alive()
    if late:
        process.kill()
        process.join()
    # One sentence for both limits: which one it hits depends on how busy the machine is.
    words = f"{LATE} {limit:.0f} seconds of CPU time, or {PATIENCE * limit:.0f} seconds in all"
    return words if late or process.exitcode == -24 else None, process.exitcode   # -24: SIGXCPU


# --- judging --------------------------------------------------------------------------------------

def judge(part, seen, expected):
    """
    None if what was seen is right, else a message: the first cause of the first probe that found
    anything, its effect, and the smallest workload that shows it.
    """
    rest, right = index(seen), index(expected)
    blank = next((value[0] for _, _, cause, _, value in seen if cause == "blank"), "")
    for probe, cause in itertools.product(sorted({key[1] for key in right}), CAUSES):
        faults = []
        for key, (where, value) in rest.items():
            if key[1:3] == (probe, cause) and cause in (*part.causes, "crash"):
                fault = difference(cause, value, right.get(key, ("", []))[1])
                if fault:   # the smallest workload; else the first: easy cases come first
                    size = len(where) if where.startswith("Workload: ") else 0
                    faults.append((size, len(faults), where, fault, key[0]))
        if faults:
            size, _, where, fault, seed = min(faults)
            fault = f"{where}: {fault}" if where and not size else fault
            effect = "" if cause in ("sampled", "contract") else next(
                (f"Effect: {value[0]}" for key, (_, value) in rest.items()
                 if key[0] == seed and key[2] == "contract" and value), "")
            lines = [fault, effect, where if size else "", blank]
            return "\n".join(line.rstrip(".") + "." for line in lines if line)
    if blank:
        tried = any(key[2] == "result" for key in rest)
        return f"{blank}{'; what is written is right so far' if tried else ''}."
    missing = [key for key in right if key not in rest and key[2] in part.causes]
    return "it does not get as far as the reference" if missing else None


def index(observations):
    """{(seed, probe, cause, its number): (where, value)}."""
    found, numbers = {}, Counter()
    for seed, probe, cause, where, value in observations:
        found[seed, probe, cause, numbers[seed, probe, cause]] = where, value
        numbers[seed, probe, cause] += 1
    return found


def difference(cause, value, expected):
    """None, or what is wrong with a value, in a phrase."""
    if cause in SENTENCES:
        return value[0] if value else None
    if isinstance(expected, dict) and isinstance(value, dict):
        for key in {**expected, **value}:
            pair = (each.get(key, "nothing") for each in (value, expected))
            if fault := difference(cause, *pair):
                return f"{key}: {fault}"
        return None
    mine, theirs = flat(value), flat(expected)
    if mine and any(isinstance(x, float) for x in theirs.values()):
        scale = max(map(abs, theirs.values())) or 1
        gaps = {at: abs(mine.get(at, math.nan) - theirs[at]) / scale for at in theirs}
        if not all(map(math.isfinite, gaps.values())):
            return "holds NaN or infinity"
        at, gap = max(gaps.items(), key=lambda pair: pair[1])
        if gap > 1e-6:
            return f"{mine[at]:.6g} at {list(at)}, expected {theirs[at]:.6g}"
        return None if gap <= TOLERANCE else (
            f"off by {gap:.1g} of the largest number: as if some of it were computed in float32")
    if value == expected:
        return None
    if isinstance(value, list) and isinstance(expected, list) and (
            any(isinstance(x, str) and " " in x for x in expected) or len(str(expected)) > 60):
        pairs = itertools.zip_longest(value, expected, fillvalue="the end")
        at, (a, b) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        place = "" if isinstance(b, str) else f"first difference at {at}: "
        return f"{place}{short(a)}, expected {short(b)}"
    return f"{short(value)}, expected {short(expected)}"


def flat(value, at=()):
    """{place: number} of nested lists."""
    if isinstance(value, list):
        return {place: x for i, inner in enumerate(value)
                for place, x in flat(inner, (*at, i)).items()}
    return {at: value} if isinstance(value, (int, float)) else {}


def short(value):
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- grading --------------------------------------------------------------------------------------

def reference_of(number, seeds):
    """What the reference gives, and its CPU seconds. RuntimeError if a probe finds it wrong."""
    names = [part.name for part in SETS[number].parts]
    expected, needed = timed_run(number, names, seeds, needed=dict.fromkeys(names, FLOOR))
    if fault := next((found for each in expected.values() for found in each
                      if found[2] in SENTENCES and found[4]), None):
        raise RuntimeError(f"the reference itself is wrong: {fault}")
    return expected, needed


def grade(number, folder, salt="", student=None, reference=None, only=None):
    """
    The Scores of the code parts, and the changes that were ignored.

    reference: what reference_of gives for this student, if it is known already
    only:      names of parts; None: all
    """
    hidden = [] if packed() else seeds_of(student or Path(folder).name, number, salt)
    expected, needed = reference or reference_of(number, [*VISIBLE, *hidden])
    scores, ignored = [], None
    for part, edits, vain, fault in grafts(number, folder):
        ignored = vain if ignored is None else [name for name in ignored if name in vain]
        if only and part.name not in only:
            continue
        share = 0
        for chosen in filter(None, (VISIBLE, hidden)):
            if not fault:   # what is wrong on the visible workloads has no more to lose
                share = 0 if chosen is VISIBLE else VISIBLE_SHARE
                seen, _ = timed_run(number, [part.name], chosen, edits, needed)
                fault = judge(part, seen[part.name], [
                    found for found in expected[part.name] if found[0] in chosen])
        scores.append(Score(part.name, part.title, round((share if fault else 1) * part.points, 1),
                            part.points, fault or ""))
    return scores, ignored


def grade_numbers(number, folder, student):
    """The predicted numbers. The reference computes the keys, so not in a student copy."""
    import predict  # it imports the reference, which a student copy lacks
    answers, fault = read_json(folder, "numbers.json")
    asked, of = predict.questions(number, student), SETS[number].numbers
    wrong = [key for key, (_, answer) in asked.items() if answers.get(key) != answer]
    points = round(of * (1 - len(wrong) / len(asked)), 1)
    return Score(f"{number} numbers", "predicted numbers", points, of,
                 fault or (f"wrong: {', '.join(wrong)}" if wrong else ""))


def grade_all(number, folder, salt="", student=None, only=None):
    """
    All that a machine can grade of a student's work: (scores, ignored changes). Whatever a folder
    does to the grader costs this student's points, and no other's.
    """
    student = student or Path(folder).name
    try:
        scores, vain = grade(number, folder, salt, student, only=only)
        if not packed() and not only:
            scores += [grade_numbers(number, folder, student), grade_breaks(number, folder)]
        return scores, vain
    except Exception as error:
        scores = [Score(name, "not graded", 0, of) for name, of in columns(number)]
        scores[0].message = f"cannot be graded: the grader {observe.say(error)}"
        return scores, []


def columns(number):
    """[(name, points), ...] of all that grade_all grades."""
    chosen = SETS[number]
    rest = [] if packed() else [(f"{number} numbers", chosen.numbers),
                                (f"{number} break it", chosen.breaks)]
    return [*((part.name, part.points) for part in chosen.parts), *rest]


def grade_class(number, folders, salt="", student=None, jobs=2):
    """
    Yields (folder, scores, ignored changes) as students are graded, some at a time. A part that has
    hit a limit is tried once more, alone, and its student is yielded again.
    """
    late = []
    with ThreadPoolExecutor(jobs) as pool:
        tasks = {pool.submit(grade_all, number, folder, salt, student): folder
                 for folder in folders}
        for task in as_completed(tasks):
            scores, vain = task.result()
            yield tasks[task], scores, vain
            if names := {score.name for score in scores if LATE in score.message}:
                late.append((tasks[task], scores, vain, names))
    for folder, scores, vain, names in late:
        again = {score.name: score for score in grade_all(number, folder, salt, student, names)[0]}
        yield folder, [again.get(score.name, score) for score in scores], vain


# --- bugs to expose -------------------------------------------------------------------------------

def grade_breaks(number, folder):
    """The workloads that should expose bugs. The reference runs them, with and without each bug."""
    from mutants import BUGS, bugs_of
    workloads, fault = read_json(folder, "break.json")
    bugs, of = bugs_of(number), SETS[number].breaks
    points, lines = 0.0, [fault] if fault else []
    for i, bug in enumerate(() if fault else bugs, 1):
        asked = workloads.get(str(i))
        verdict, best = exposes(number, i, asked), size_of(BUGS[bug])
        if verdict:
            lines.append(f"{i}: {verdict}")
        elif size_of(asked) > best + best // 2:
            points += 0.5
            lines.append(f"{i}: exposes it with {size_of(asked)} tokens; half of the points, since "
                         "fewer are enough")
        else:
            points += 1
    return Score(f"{number} break it", "bugs exposed", round(points * of / len(bugs), 1), of,
                 "\n".join(lines))


def exposes(number, i, asked):
    """None if right and wrong code differ on a workload for bug i, else a sentence."""
    if wrong := ill_formed(asked):
        return wrong
    part, edits = bug(number, i)
    right, needed = run_workload(part, asked)
    if crash := next((value[0] for _, _, cause, _, value in right if cause == "crash"), None):
        return f"the right code {crash}"
    right, wrong = index(right), index(run_workload(part, asked, edits, needed)[0])
    same = right.keys() == wrong.keys() and not any(
        difference(key[2], wrong[key][1], right[key][1]) for key in right)
    return "right and wrong code give the same results" if same else None


def run_workload(part, asked, edits=(), needed=()):
    """What is observed on a workload of break.json, and the CPU seconds by part."""
    name, files = f"break {part}", {"workload.json": json.dumps({"knobs": {}, **asked})}
    seen, seconds = timed_run(int(part[0]), [name], ["it"], {**dict(edits), **files}, needed)
    return seen[name], seconds


def bug(number, i):
    """The part of the i-th bug of the set, and {file: its text with the bug in it}."""
    if packed():
        return packed()["bugs"][i - 1]
    from mutants import MUTANTS, bugs_of
    mutant = MUTANTS[bugs_of(number)[i - 1]]
    return mutant.part, mutated(mutant)


def mutated(mutant):
    """{file: its text with the mutant in it}."""
    edits = {}
    for name, old, new in mutant.edits:
        file, function = name.split(":")
        text = edits.get(file) or clean(file)
        source = graft.source_of(text, function)
        if source.count(old) != 1:
            raise ValueError(f"{name}: {old!r} occurs {source.count(old)} times")
        edits[file] = graft.replaced(text, function, source.replace(old, new))
    return edits


def ill_formed(asked):
    """None, or what is wrong with a workload of break.json."""
    if asked is None:
        return "there is no workload"
    if not isinstance(asked, dict) or set(asked) - {"requests", "knobs"}:
        return 'a workload is {"requests": [...], "knobs": {...}}'
    requests, knobs = asked.get("requests"), asked.get("knobs", {})
    if not isinstance(requests, list) or not 1 <= len(requests) <= 8:
        return "a workload has 1 to 8 requests"
    for request in requests:
        if not isinstance(request, list) or not 2 <= len(request) <= 5:
            return "a request is [prompt, new tokens] or [prompt, new, arrival, priority, eos]"
        prompt, *others = request[:4 if request[-1] is None else 5]   # no eos_token is null
        if not whole(*(prompt if isinstance(prompt, list) else [prompt]), *others):
            return ("a prompt is a number of tokens or a list of token ids, and the rest of a "
                    "request are numbers")
    right = isinstance(knobs, dict) and whole(*knobs.values())
    return None if right else "knobs are whole numbers"


def whole(*values):
    return all(type(value) is int and 0 <= value < 1000 for value in values)


def size_of(asked):
    """Prompt tokens and new tokens of all requests."""
    return sum((len(prompt) if isinstance(prompt, list) else prompt) + new
               for prompt, new, *_ in asked["requests"])


def try_workload(number, folder, i):
    """Lines that say whether a student's workload exposes bug i, and what their own code does."""
    workloads, fault = read_json(folder, "break.json")
    asked = workloads.get(str(i))
    if fault := fault or ill_formed(asked):
        return [f"workload {i}: {fault}"]
    verdict = exposes(number, i, asked)
    lines = [f"does not expose bug {i}: {verdict}" if verdict else
             f"exposes bug {i}, with {size_of(asked)} tokens", "Your own code:"]
    try:
        texts = {file: ast.unparse(ast.parse(read(folder, file))) for file in SETS[number].needs}
    except UNREADABLE as error:
        return [*lines, f"  cannot be read: {error}"]
    part, _ = bug(number, i)
    for *_, value in run_workload(part, asked, {**new_files(number, folder), **texts})[0]:
        if isinstance(value, list):
            lines += [f"  {line}" for line in value]
        else:
            lines += [f"  {key}: {value[key]}" for key in value if "logits" not in key]
    return lines


# --- the command ----------------------------------------------------------------------------------

def report(number, scores, vain, where):
    """What is printed for one student."""
    of, got = sum(score.of for score in scores), sum(score.points for score in scores)
    lines = [f"set {number}, {SETS[number].title}: {where}", *map(str, scores)]
    lines += [f"ignored: {name} (not part of this set)" for name in vain]
    total = f"{got:g} of {of:g} points"
    total += " on the visible workloads" if packed() else (
        f"; written answers ({SETS[number].written}) by hand")
    return "\n".join([*lines, total])


def main(argv=None):
    own = packed()["set"] if packed() else None
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("set", type=int, choices=SETS, nargs="?" if own else None, default=own)
    p.add_argument("folder", nargs="?", help="a student's folder; by default the copy itself")
    p.add_argument("--all", metavar="DIR", help="grade every folder in this one")
    p.add_argument("--jobs", type=int, default=2, help="students at a time, with --all")
    p.add_argument("--salt", default="", help="a secret on which the hidden workloads depend")
    p.add_argument("--student", help="the id; by default the folder's name")
    p.add_argument("--json", metavar="FILE", help="write all scores as JSON")
    p.add_argument("--csv", metavar="FILE", help="write a line for each student")
    p.add_argument("--gradescope", metavar="FILE", help="write Gradescope's results.json; with "
                   "--all a folder, in which each student gets a file")
    p.add_argument("--resume", action="store_true", help="skip the students that are in the "
                   "--json file already")
    p.add_argument("--try", dest="bug", type=int, choices=range(1, 6), help="say whether the "
                   "folder's break.json exposes this bug")
    p.add_argument("--similarity", action="store_true", help="list the students with the most "
                   "similar functions")
    args = p.parse_args(argv)
    sys.stdout.reconfigure(errors="backslashreplace")   # a folder may have any name
    folder = args.all or args.folder or (HERE if own else p.error("name a folder, or --all"))
    if not Path(folder).is_dir():
        p.error(f"{folder} is not a folder")
    folder = Path(os.path.abspath(folder))   # a link is known by its own name
    folders = [folder] if not args.all else sorted(
        each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    refuse(p, args, folders)
    if args.bug:
        print("\n".join(try_workload(args.set, folders[0], args.bug)))
        return
    results = resumed(p, args) if args.resume else {}
    todo = [folder for folder in folders if folder.name not in results]
    for folder, scores, vain in grade_class(args.set, todo, args.salt, args.student, args.jobs):
        results[folder.name] = scores
        print(report(args.set, scores, vain, folder.name), end="\n\n", flush=True)
        save(args, results)
        if args.all:
            print(f"{len(results)} of {len(folders)} students", file=sys.stderr)
    if args.similarity:
        print("\n".join(similarities(args.set, folders)))


def refuse(p, args, folders):
    """Ends the program for flags that cannot work, before hours of work are lost to them."""
    if not folders:
        p.error(f"--all {args.all}: there is no folder in it")
    if args.jobs < 1:
        p.error(f"--jobs must be at least 1, not {args.jobs}")
    if args.all and args.student:
        p.error("--student names one student: use it without --all")
    if args.resume and not args.json:
        p.error("--resume needs --json FILE, where the results are")
    for file in filter(None, (args.json, args.csv, args.gradescope)):
        path = Path(file).absolute()
        if not path.parent.is_dir():
            p.error(f"{file}: there is no folder {path.parent}")
        if path.exists() and path.is_dir() != bool(args.all and file == args.gradescope):
            p.error(f"{file} is {'a' if path.is_dir() else 'no'} folder")


def resumed(p, args):
    """{student: scores} of an earlier run."""
    try:
        found = json.loads(Path(args.json).read_text("utf-8")) if Path(args.json).exists() else {}
        results = {name: [Score(**each) for each in scores] for name, scores in found.items()}
        for name, scores in results.items():
            if [(score.name, score.of) for score in scores] != columns(args.set):
                raise ValueError(f"{name} was graded in another set")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        p.error(f"--json {args.json} holds no results of set {args.set}: {error}")
    return results


def save(args, results):
    """Writes what there is so far; a file is never left half written."""
    results, texts = dict(sorted(results.items())), {}
    if args.json:
        texts[args.json] = json.dumps({name: list(map(asdict, scores))
                                       for name, scores in results.items()}, indent=1)
    if args.csv:
        table = io.StringIO()
        csv.writer(table, lineterminator="\n").writerows([
            ["student", *(name for name, _ in columns(args.set)), "total"],
            *([name, *(score.points for score in scores),
               round(sum(score.points for score in scores), 1)]
              for name, scores in results.items())])
        texts[args.csv] = table.getvalue()
    for name, scores in results.items() if args.gradescope else ():
        path = Path(args.gradescope, f"{name}.json") if args.all else args.gradescope
        texts[path] = json.dumps({"tests": [
            {"name": f"{score.name} {score.title}", "score": score.points, "max_score": score.of,
             "output": score.message} for score in scores]}, indent=1)
    for path, text in texts.items():
        try:   # what cannot be written, such as a name that is too long, must not stop the others
            Path(path).parent.mkdir(exist_ok=True)   # of --gradescope
            Path(f"{path}.new").write_text(text, encoding="utf-8", errors="backslashreplace")
            os.replace(f"{path}.new", path)
        except OSError as error:
            print(f"not written: {error}", file=sys.stderr)


def similarities(number, folders):
    """
    Lines for pairs of students, or a student and the reference, whose functions are alike; the most
    alike first, at most as many as there are students. A hint and no proof (README.md).
    """
    shapes = {"the reference": shapes_of(number, clean)}
    shapes |= {folder.name: shapes_of(number, partial(read, folder)) for folder in folders}
    found = []
    for (a, left), (b, right) in itertools.combinations(shapes.items(), 2):
        alike = {name: 2 * (left[name] & right[name]).total() / (left[name] + right[name]).total()
                 for name in left.keys() & right.keys() if left[name] or right[name]}
        most = sorted(((share, name) for name, share in alike.items() if share >= ALIKE),
                      reverse=True)
        size = sum(left[name].total() for _, name in most)   # ten long functions say more than one
        words = ", ".join(f"{name} {share:.0%}" for share, name in most)
        if most:
            found.append((size * sum(share for share, _ in most), f"{a} and {b}: {words}"))
    return [line for _, line in sorted(found, reverse=True)[:len(folders)]]


def shapes_of(number, read_file):
    """{function: Counter of the code of its statements and expressions}."""
    found = {}
    for function in SETS[number].functions:
        file, name = function.split(":")
        with suppress(*UNREADABLE, KeyError):
            node = graft.functions_in(read_file(file))[name]
            if not graft.is_blank(node):
                found[name] = Counter(ast.dump(inner) for statement in graft.body_of(node)
                                      for inner in ast.walk(statement)
                                      if isinstance(inner, (ast.stmt, ast.expr)))
    return found


if __name__ == "__main__":
    main()
