"""
Grades a student's functions, and says in sentences what is wrong.

    python assignments/grade.py 4 STUDENT_DIR                       one student
    python assignments/grade.py 4 --all DIR --jobs 2 --csv 4.csv    a folder of students

In a student copy, made by make.py, `python grade.py` grades the copy itself on the visible
workloads. Instructors also grade on hidden ones, which depend on --salt and the student's id.

A student's functions are grafted into a clean checkout, part by part. So other changes have no
effect, and a fault in one part cannot affect another. A child process with limits on time, memory
and output runs them and reports what it observes (observe.py). This process judges, and never runs
a student's code. That stops mistakes, not attacks: grade hostile code in a container.
"""
import argparse
import ast
import csv
import difflib
import hashlib
import itertools
import json
import math
import multiprocessing
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))   # the files beside this one, whoever imports it

import graft  # noqa: E402
import observe  # noqa: E402
from sets import CAUSES, SETS, TOOLS  # noqa: E402

EXPECTED = HERE / "expected.json"   # in a student copy only: what the reference gives
CLEAN = HERE if EXPECTED.exists() else HERE.parent
LATE = "does not finish within"
SENTENCES = ("crash", "tokens", "positions", "sees", "sampled")
VISIBLE = [f"visible {i}" for i in range(4)]
HIDDEN = 6             # workloads
VISIBLE_SHARE = 0.4    # of a part's points
# A part may take so many times the CPU time that the reference has just taken, and at least the
# FLOOR, in seconds. CPU time, because a busy machine must not cost points. A child that waits for
# ever uses none: it is stopped when the clock shows PATIENCE times its CPU limit.
TIMES, FLOOR, PATIENCE = 10, 10, 10
TOLERANCE = 1e-8       # relative; the models run in float64


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


# --- running --------------------------------------------------------------------------------------

def seeds_of(student, number, salt):
    """Seeds of a student's hidden workloads: always the same, and different for each student."""
    digest = hashlib.sha256(f"{salt}/{student}/{number}".encode()).hexdigest()
    return [f"{digest} {i}" for i in range(HIDDEN)]


def modules_of(number):
    """The files that the parts of a set run with."""
    return [*SETS[number].needs, *TOOLS]


def checkout(folder, number, edits=()):
    """A clean copy of what a set needs. edits: {file: its text}."""
    for name in modules_of(number):
        if (CLEAN / name).exists():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text((CLEAN / name).read_text(encoding="utf-8"), encoding="utf-8")
    for name, text in dict(edits).items():
        (Path(folder) / name).write_text(text, encoding="utf-8")


def run(number, names, seeds, edits=()):
    """Observes parts in a child process: {"4a": [(seed, cause, where, value), ...]}."""
    return timed_run(number, names, seeds, edits)[0]


def timed_run(number, names, seeds, edits=(), needed=()):
    """
    What `run` gives, and {"4a": CPU seconds, ...} of the parts that ended. If the child stops
    early, the part that it was at counts as crashed, and so do those after it.

    needed: the CPU seconds of the reference, from which the limits follow
    """
    limit = max(FLOOR, *(TIMES * dict(needed).get(name, 0) for name in names))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        place, report = Path(folder, "checkout").resolve(), Path(folder, "report").resolve()
        place.mkdir()
        report.touch()
        checkout(place, number, edits)
        late, status = finish(observe.child, (place, names, seeds, report), limit)
        seen, seconds = {name: [] for name in names}, {}
        for line in report.read_text().splitlines():
            try:
                name, *observation = json.loads(line)
            except ValueError:   # the process ended in the middle of it
                continue
            if observation[1] == "done":
                seconds[name] = observation[-1]
            else:
                seen[name].append(tuple(observation))
        printed = Path(str(report) + ".out")
        flood = printed.exists() and printed.stat().st_size >= 4 << 20
    why = "prints more than 4 MB" if flood else late or f"ends the process (status {status})"
    for name in names:
        if name not in seconds:
            seen[name].append((seeds[0], "crash", "", [why]))
    return seen, seconds


def finish(target, arguments, limit):
    """
    Runs a function in a child process, which limits its CPU seconds to its last argument. Returns
    the limit that it has hit, in words, or None; and its exit status.
    """
    process = context().Process(target=target, args=(*arguments, limit))
    process.start()
    process.join(PATIENCE * limit)
    late = f"{LATE} {PATIENCE * limit:.0f} seconds" if process.is_alive() else None
    if late:
        process.kill()
        process.join()
    elif process.exitcode == -24:   # SIGXCPU
        late = f"{LATE} {limit:.0f} seconds of CPU time"
    return late, process.exitcode


def context():
    """Processes that begin with torch already imported, where the system can do that."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torch"])
    return server


# --- judging --------------------------------------------------------------------------------------

def judge(part, seen, expected):
    """
    None if what was seen is right, else a message: the first cause, its effect, and the smallest
    workload that shows it.
    """
    rest, right = index(seen), index(expected)
    causes = ("crash", *(cause for cause in CAUSES if cause in part.causes and cause != "crash"))
    crashed = {seed for seed, kind, _ in rest if kind == "crash"}
    for cause in ("before the crash", *causes):
        faults = []
        for (seed, kind, number), (where, value) in rest.items():
            # What single functions did before a run crashed says more than the crash.
            early = seed in crashed and kind in causes[1:] and not where.startswith("Workload: ")
            if kind == cause or cause == "before the crash" and early:
                fault = difference(kind, value, right.get((seed, kind, number), ("", []))[1])
                if fault:
                    faults.append((len(where), where, fault, seed))
        if faults:
            _, where, fault, seed = min(faults)
            workload = where if where.startswith("Workload: ") else ""
            if fault.startswith("is not written yet"):
                return fault + "."
            if where and not workload:
                fault = f"{where}: {fault}"
            lines = [fault, effect(cause, seed, rest, right), workload]
            return "\n".join(line.rstrip(".") + "." for line in lines if line)
    missing = [key for key in right if key not in rest and key[1] in causes]
    return "it does not get as far as the reference" if missing else None


def index(observations):
    """{(seed, cause, its number): (where, value)}."""
    found, numbers = {}, {}
    for seed, cause, where, value in observations:
        number = numbers[seed, cause] = numbers.get((seed, cause), -1) + 1
        found[seed, cause, number] = where, value
    return found


def effect(cause, seed, rest, right):
    """The first token that has come out wrong, if one has."""
    if cause in ("crash", "result"):
        return ""
    for (other, kind, number), (where, value) in rest.items():
        if (other, kind) == (seed, "result") and isinstance(value, dict):
            fault = difference(kind, value, right.get((other, kind, number), ("", {}))[1])
            if fault:
                return f"Effect: {fault}"
    return ""


def difference(cause, value, expected):
    """None, or what is wrong with a value, in a phrase."""
    if cause in SENTENCES:
        return value[0] if value else None
    if isinstance(expected, dict) and isinstance(value, dict):
        for key in expected:
            if key not in value:
                return f"{key}: nothing, expected {short(expected[key])}"
            if fault := difference(cause, value[key], expected[key]):
                return f"{key}: {fault}"
        extra = [key for key in value if key not in expected]
        return f"{extra[0]}: {short(value[extra[0]])}, expected nothing" if extra else None
    mine, theirs = flat(value), flat(expected)
    if any(isinstance(x, float) for x in theirs):
        if len(mine) != len(theirs):
            return f"{len(mine)} numbers, expected {len(theirs)}"
        scale = max(map(abs, theirs), default=1) or 1
        gaps = [gap if math.isfinite(gap := abs(a - b) / scale) else math.inf
                for a, b in zip(mine, theirs)]
        worst = max(gaps, default=0)
        return (None if worst <= TOLERANCE else "holds NaN or infinity" if worst == math.inf
                else f"differs by up to {worst:.1g} of the largest number")
    if value == expected:
        return None
    if isinstance(value, list) and isinstance(expected, list) and all(
            isinstance(x, int) for x in value + expected):
        for i, (a, b) in enumerate(zip(value, expected)):
            if a != b:
                return f"first difference at {i}: {a}, expected {b}"
        return f"{len(value)} of them, expected {len(expected)}"
    return f"{short(value)}, expected {short(expected)}"


def flat(value):
    """All numbers of nested lists."""
    if isinstance(value, list):
        return [number for inner in value for number in flat(inner)]
    return [value] if isinstance(value, (int, float)) else []


def short(value):
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- grading --------------------------------------------------------------------------------------

def reference_of(number, seeds):
    """
    What the reference gives, and its CPU seconds. In a student copy, what it gave when the copy was
    made, and no CPU seconds, since those were another machine's.
    """
    if EXPECTED.exists():
        stored = json.loads(EXPECTED.read_text(encoding="utf-8"))
        return {name: [tuple(found) for found in stored[name]] for name in stored}, {}
    names = part_names(number)
    return timed_run(number, names, seeds, needed=dict.fromkeys(names, FLOOR))


def part_names(number):
    return [f"{number}{part.letter}" for part in SETS[number].parts]


def grafts(number, folder):
    """
    For each group of parts with the same functions: (parts, edits, a fault in the files or None).
    In a student copy all functions are grafted together, since there is no reference beside them.
    """
    groups = {}
    for part in SETS[number].parts:
        names = SETS[number].functions if EXPECTED.exists() else part.functions
        groups.setdefault(tuple(names), []).append(part)
    for names, parts in groups.items():
        edits, fault = {}, None
        for file in dict.fromkeys(name.split(":")[0] for name in names):
            try:
                edits[file] = graft.grafted(
                    (CLEAN / file).read_text(encoding="utf-8"), read(folder, file),
                    [name.split(":")[1] for name in names if name.startswith(file + ":")])
            except SyntaxError as error:
                fault = f"{file} cannot be read: line {error.lineno}: {error.msg}"
            except KeyError as error:
                fault = f"{file} no longer has {error.args[0]}"
            except (OSError, UnicodeDecodeError) as error:
                fault = f"{file} cannot be read: {error}"
        yield parts, edits, fault


def read(folder, file):
    """The text of a student's file."""
    return (Path(folder) / file).read_text(encoding="utf-8")


def grade(number, folder, salt="", student=None, reference=None):
    """
    The Scores of all code parts, and the changes that were ignored.

    reference: what reference_of gives for this student, if it is known already
    """
    hidden = [] if EXPECTED.exists() else seeds_of(student or Path(folder).name, number, salt)
    seeds = [*VISIBLE, *hidden]
    expected, needed = reference or reference_of(number, seeds)
    if crash := next((found for each in expected.values() for found in each
                      if found[1] in SENTENCES and found[3]), None):
        raise RuntimeError(f"the reference itself is wrong: {crash}")
    scores = {}
    for parts, edits, fault in grafts(number, folder):
        names = [f"{number}{part.letter}" for part in parts]
        seen = {} if fault else timed_run(number, names, seeds, edits, needed)[0]
        for part, name in zip(parts, names):
            scores[name] = score(part, name, fault, seen.get(name), expected[name], hidden)
    return [scores[name] for name in part_names(number)], ignored(number, folder)


# --- what is not code: numbers, bugs to expose ----------------------------------------------------

def read_json(folder, file):
    """A student's JSON file: (its object, None) or (None, what is wrong with it)."""
    try:
        found = json.loads(read(folder, file))
    except FileNotFoundError:
        return None, f"there is no {file}"
    except (OSError, ValueError) as error:
        return None, f"{file} cannot be read: {error}"
    return (found, None) if isinstance(found, dict) else (None, f"{file} is not a JSON object")


def grade_numbers(number, folder, student):
    """The predicted numbers. The reference computes the keys, so not in a student copy."""
    import predict  # it imports the reference, which a student copy lacks
    answers, fault = read_json(folder, "numbers.json")
    asked = predict.questions(number, student)
    wrong = [key for key, (_, answer) in asked.items()
             if fault or answers.get(key) != answer()]
    points = SETS[number].numbers * (1 - len(wrong) / len(asked))
    message = fault or (f"wrong: {', '.join(wrong)}" if wrong else "")
    return Score(f"{number} numbers", "predicted numbers", round(points, 1), SETS[number].numbers,
                 message)


def grade_breaks(number, folder):
    """The workloads that should expose bugs. The reference runs them, with and without each bug."""
    from mutants import MUTANTS, SMALLEST
    workloads, fault = read_json(folder, "break.json")
    bugs, points, lines = SETS[number].bugs, 0.0, [fault] if fault else []
    for i, bug in enumerate(bugs if workloads is not None else [], 1):
        asked = workloads.get(str(i))
        if asked is None:
            lines.append(f"{i}: no workload")
            continue
        wrong = ill_formed(asked)
        exposed = None if wrong else exposes(number, MUTANTS[bug], asked)
        best = size_of(SMALLEST[bug])
        if wrong or exposed is not True:
            lines.append(f"{i}: " + (
                wrong or exposed or "right and wrong code give the same results"))
        elif size_of(asked) > best + best // 2:
            points += 0.5
            lines.append(f"{i}: exposes it with {size_of(asked)} tokens; half of the points, "
                         "since fewer are enough")
        else:
            points += 1
    return Score(f"{number} break it", "bugs exposed",
                 round(points * SETS[number].breaks / len(bugs), 1), SETS[number].breaks,
                 "\n".join(lines))


def ill_formed(asked):
    """None, or what is wrong with a workload of break.json."""
    if not isinstance(asked, dict) or set(asked) - {"requests", "knobs"}:
        return 'a workload is {"requests": [...], "knobs": {...}}'
    requests, knobs = asked.get("requests"), asked.get("knobs", {})
    if not isinstance(requests, list) or not 1 <= len(requests) <= 8:
        return "a workload has 1 to 8 requests"
    for request in requests:
        if not isinstance(request, list) or len(request) not in (2, 3, 4, 5):
            return "a request is [prompt, new tokens] or [prompt, new, arrival, priority, eos]"
    if not isinstance(knobs, dict) or not all(type(value) is int for value in knobs.values()):
        return "knobs are whole numbers"
    return None


def padded(asked):
    """The workload with all five fields of each request."""
    return {"requests": [[*request, *[0, 0, None][len(request) - 2:]]
                         for request in asked["requests"]], "knobs": asked.get("knobs", {})}


def size_of(asked):
    """Prompt tokens and new tokens of all requests."""
    return sum((len(prompt) if isinstance(prompt, list) else prompt) + new
               for prompt, new, *_ in asked["requests"])


def exposes(number, mutant, asked):
    """Whether right and wrong code differ on a workload: True, False or why it does not run."""
    workload, seen, needed = {"workload.json": json.dumps(padded(asked))}, [], {}
    name = f"break {mutant.part}"
    for edits in workload, {**workload, **mutated(mutant)}:
        found, needed = timed_run(number, [name], ["it"], edits, needed)
        found = found[name]
        seen.append(index(found))
        crash = next((value[0] for _, cause, _, value in found if cause == "crash"), None)
        if crash and len(seen) == 1:
            return f"the right code {crash}"
    right, wrong = ({key: value for key, (_, value) in each.items()
                     if key[1] in ("crash", "result", "counts")} for each in seen)
    return right.keys() != wrong.keys() or any(
        difference(key[1], wrong[key], right[key]) for key in right)


def mutated(mutant):
    """{file: its text with the mutant in it}."""
    edits = {}
    for name, old, new in mutant.edits:
        file, function = name.split(":")
        text = edits.get(file) or (CLEAN / file).read_text(encoding="utf-8")
        source = graft.source_of(text, function)
        if source.count(old) != 1:
            raise ValueError(f"{name}: {old!r} occurs {source.count(old)} times")
        edits[file] = graft.replaced(text, function, source.replace(old, new))
    return edits


def score(part, name, fault, seen, expected, hidden):
    if fault:
        return Score(name, part.title, 0, part.points, fault)
    points, message = 0.0, ""
    shares = [(VISIBLE, VISIBLE_SHARE if hidden else 1.0), (hidden, 1 - VISIBLE_SHARE)]
    for seeds, share in shares:
        if seeds:
            of_seeds = [[found for found in each if found[0] in seeds] for each in (seen, expected)]
            wrong = judge(part, *of_seeds)
            points += 0 if wrong else share * part.points
            message = message or wrong or ""
    return Score(name, part.title, round(points, 1), part.points, message)


def ignored(number, folder):
    """Functions that were changed although the set does not ask for them: "cache.py: KV.write"."""
    found = []
    for file in SETS[number].needs:
        names = [name.split(":")[1] for name in SETS[number].functions
                 if name.startswith(file + ":")]
        try:
            found += [f"{file}: {name}" for name in graft.changed_elsewhere(
                (CLEAN / file).read_text(encoding="utf-8"), read(folder, file), names)]
        except (SyntaxError, OSError, UnicodeDecodeError):
            continue
    return found


def try_workload(number, folder, bug):
    """Lines that say what a student's own code does with the workload for a bug, "1" to "5"."""
    workloads, fault = read_json(folder, "break.json")
    asked = workloads.get(bug) if workloads else None
    if wrong := fault or (ill_formed(asked) if asked else f"break.json has no workload {bug}"):
        return [wrong]
    edits = {"workload.json": json.dumps(padded(asked))}
    edits |= {file: read(folder, file) for file in SETS[number].needs}
    name = f"break {number}{SETS[number].bug_parts[int(bug) - 1]}"
    lines = [f"{size_of(asked)} tokens"]
    for _, cause, where, value in run(number, [name], ["it"], edits)[name]:
        if cause == "crash":
            lines.append(f"your code {value[0]}")
        elif cause in ("result", "counts") and not any("logits" in key for key in value):
            lines += [f"{key}: {value[key]}" for key in value]
    return lines


def grade_all(number, folder, salt="", student=None):
    """All that a machine can grade of a student's work: (scores, ignored changes)."""
    student = student or Path(folder).name
    scores, vain = grade(number, folder, salt, student)
    if not EXPECTED.exists():
        scores += [grade_numbers(number, folder, student), grade_breaks(number, folder)]
    return scores, vain


def grade_class(number, folders, salt="", student=None, jobs=2):
    """
    grade_all of every folder, some at a time. Where a part has hit a limit, the student is graded
    once more, alone: the limits are for endless loops, and never for a machine that is busy.
    """
    def one(folder):
        return grade_all(number, folder, salt, student)

    with ThreadPoolExecutor(max(jobs, 1)) as pool:
        graded = list(pool.map(one, folders))
    return [one(folder) if any(LATE in score.message for score in scores) else (scores, vain)
            for folder, (scores, vain) in zip(folders, graded)]


# --- the command ----------------------------------------------------------------------------------

def report(number, scores, vain, where):
    """What is printed for one student."""
    of, got = sum(score.of for score in scores), sum(score.points for score in scores)
    lines = [f"set {number}, {SETS[number].title}: {where}", *map(str, scores)]
    lines += [f"ignored: {name} (not part of this set)" for name in vain]
    total = f"{got:g} of {of:g} points"
    total += " on the visible workloads" if EXPECTED.exists() else (
        f"; written answers ({SETS[number].written}) by hand")
    return "\n".join([*lines, total])


def gradescope(number, scores, path):
    """Gradescope's results.json."""
    tests = [{"name": f"{score.name} {score.title}", "score": score.points, "max_score": score.of,
              "output": score.message} for score in scores]
    Path(path).write_text(json.dumps({"tests": tests}, indent=1), encoding="utf-8")


def main(argv=None):
    p = argparse.ArgumentParser(prog="grade.py", description=__doc__.split("\n")[1],
                                formatter_class=argparse.RawDescriptionHelpFormatter,
                                epilog="\n".join(__doc__.split("\n")[3:]))
    p.add_argument("set", type=int, choices=SETS, nargs="?" if EXPECTED.exists() else None,
                   default=own_set())
    p.add_argument("folder", nargs="?", help="a student's folder; by default the copy itself")
    p.add_argument("--all", metavar="DIR", help="grade every folder in this one")
    p.add_argument("--jobs", type=int, default=2, help="students at a time, with --all")
    p.add_argument("--salt", default="", help="a secret on which the hidden workloads depend")
    p.add_argument("--student", help="the id; by default the folder's name")
    p.add_argument("--json", metavar="FILE", help="write all scores as JSON")
    p.add_argument("--csv", metavar="FILE", help="write a line for each student")
    p.add_argument("--gradescope", metavar="FILE", help="write Gradescope's results.json")
    p.add_argument("--try", dest="bug", choices="12345", help="run the folder's code on a workload "
                   "of its break.json")
    p.add_argument("--similarity", action="store_true", help="list the functions that are alike")
    args = p.parse_args(argv)
    folders = sorted(path for path in Path(args.all).iterdir() if path.is_dir()) if args.all else [
        Path(args.folder or (HERE if EXPECTED.exists() else p.error("name a folder, or --all")))]
    for folder in folders:
        if not folder.is_dir():
            p.error(f"{folder} is not a folder")
    if args.bug:
        print("\n".join(try_workload(args.set, folders[0], args.bug)))
        return 0
    graded = grade_class(args.set, folders, args.salt, args.student, args.jobs)
    for folder, (scores, vain) in zip(folders, graded):
        print(report(args.set, scores, vain, folder.resolve().name), end="\n\n")
    if args.similarity:
        print("\n".join(similarities(args.set, folders)))
    write(args, folders, graded)
    return 0


def similarities(number, folders):
    """
    Lines for functions of two students, or of one and the reference, that are alike; the most alike
    first. This is a hint and no proof: short functions are often alike.
    """
    found = []
    for function in SETS[number].functions:
        file, name = function.split(":")
        shapes = {}
        for place in [CLEAN, *folders]:
            try:
                node = graft.functions_in(read(place, file))[name]
            except (OSError, SyntaxError, KeyError, UnicodeDecodeError):
                continue
            label = "the reference" if place == CLEAN else place.resolve().name
            shapes[label] = [ast.dump(inner) for inner in graft.body_of(node)]
        for (a, left), (b, right) in itertools.combinations(shapes.items(), 2):
            ratio = difflib.SequenceMatcher(None, "".join(left), "".join(right)).ratio()
            if ratio > 0.9:
                found.append((ratio, f"{a} and {b}: {name.split('.')[-1]} {ratio:.0%} alike"))
    return [line for _, line in sorted(found, key=lambda pair: -pair[0])]


def own_set():
    """In a student copy, the set that it was made for."""
    if EXPECTED.exists():
        return int(next(iter(json.loads(EXPECTED.read_text(encoding="utf-8"))))[0])


def write(args, folders, graded):
    if args.json:
        Path(args.json).write_text(json.dumps(
            {folder.resolve().name: [asdict(score) for score in scores]
             for folder, (scores, _) in zip(folders, graded)}, indent=1), encoding="utf-8")
    if args.csv:
        with open(args.csv, "w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["student", *(score.name for score in graded[0][0]), "total"])
            for folder, (scores, _) in zip(folders, graded):
                rows.writerow([folder.resolve().name, *(score.points for score in scores),
                               round(sum(score.points for score in scores), 1)])
    if args.gradescope:
        gradescope(args.set, graded[0][0], args.gradescope)


if __name__ == "__main__":
    sys.exit(main())
