"""
The course kit: every mistake of every set fails a case and is named, right code in any style gets
full marks, what is no solution gets nothing, and a template gives no solution away.
"""
import ast
import json
import os
import re
import subprocess
import sys
import time
from functools import cache

import pytest
from common import ROOT, THOROUGH

from lab.checks.edits import EditError, body_of, edited, put_in
from lab.checks.mistakes import Mistake

KIT = ROOT / "assignments"
sys.path.insert(0, str(KIT))
import compare  # noqa: E402
import functions  # noqa: E402
import grading  # noqa: E402
import kit  # noqa: E402
import source  # noqa: E402

SETS = functions.SETS if THOROUGH else [3]   # which needs no torch
SCHEDULE = "scheduler.py:Scheduler.schedule"
FORWARD = "model.py:Head.forward"
STATIC = "generate_naive.py:StaticBatch.lay_out"
template = cache(kit.template)
drawn = cache(lambda number: functions.drawn(number, "s"))
record = cache(lambda number, part: functions.record(number, part, drawn(number)[part]))


def handed_in(folder, number, edits=()):
    """Our files of a set. edits: (function, what it does first), (file, what becomes of it)."""
    files = source.files_of(number)
    for where, new in edits:
        file, _, name = where.partition(":")
        old = files.get(file, "")
        if name:
            node, lines = source.node_of(old, name), old.splitlines()
            function = "\n".join(lines[node.lineno - 1:node.end_lineno])
            files[file] = old.replace(function, edited(function, [("", new.strip())]))
        else:
            files[file] = new(old)
    source.write(folder, {name: text for name, text in files.items() if "kit/" not in name})
    return folder


def run(folder, *command):
    return subprocess.run(command, cwd=folder, capture_output=True, text=True,
                          env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})


# --- cases, mistakes, handouts --------------------------------------------------------------------

@pytest.mark.parametrize("number", functions.SETS)
def test_each_mistake_can_be_put_in(number):
    for mistake in functions.mistakes_of(number):
        with put_in(mistake.edits):
            pass


@pytest.mark.parametrize("number", SETS)
def test_each_mistake_fails_a_case_and_is_named(number):
    for part in functions.parts_of(number):
        made = record(number, part)
        for gives in made["mistakes"].values():
            gives.give(range(len(gives)))   # all at once, which is quicker
        for gives in made["mistakes"].values():
            said = compare.fault(made, [mine or right for mine, right in zip(gives, made["right"])])
            twins = [each.strip() for each, theirs in made["mistakes"].items()
                     if [*theirs] == [*gives]]
            assert said and said.startswith(tuple(map(compare.opening, twins))), said
            assert "\n" not in said
            if sides := re.search(r"(?:gives|:) (.*), expected (.*)$", said):
                assert sides[1] != sides[2].partition(" (is a `return`")[0], said


def test_a_mistake_that_does_not_apply_or_fails_no_case_stops_the_kit(monkeypatch, tmp_path):
    for old, error, said in (("used = 1", EditError, "occurs 0 times"),
                             ("", functions.KitError, "no case shows the mistake")):
        mistake = Mistake("a", SCHEDULE, "as if", [(SCHEDULE, old, "pass")])
        monkeypatch.setattr(functions, "mistakes_of", lambda _, all=(mistake,): all)
        with pytest.raises(error, match=said):
            kit.template(3)
        assert kit.main(["3", "template", str(tmp_path / "out")]) == 1


@pytest.mark.parametrize("number", functions.SETS)
def test_handouts_are_short_and_their_points_add_up(number):
    text, parts = (KIT / f"set{number}/HANDOUT.md").read_text(), functions.parts_of(number)
    worth = dict(re.findall(r"^\| *([a-g]?) *\|.*\| (\d+) \|$", text, re.M))
    assert {part: int(points) for part, points in worth.items() if part} == {
        part: points for part, (points, *_) in parts.items()}
    assert len(text.splitlines()) <= (150 if number in (2, 5) else 105)   # these have two halves
    row = re.search(rf"^\| {number} .*$", (KIT / "README.md").read_text(), re.M)[0]
    assert f"| {sum(map(int, worth.values()))} |" in row
    assert all(name.rpartition(".")[2].rpartition(":")[2] in text
               for _, _, names in parts.values() for name in names)


# --- what is handed in ----------------------------------------------------------------------------

NEWCOMERS = """
while left and not gone and len(self.running) < self.max_batch and self.arrived(step):
    if not self.admit(self.waiting[0]):
        break
    self.running.append(self.waiting.popleft())
    plan.append((self.running[-1], min(self.running[-1].todo, left)))
    self.make_room(*plan[-1])
    left -= plan[-1][1]
if not plan and (self.running or self.arrived(step)):
    raise RuntimeError(f"{[*self.running, *self.waiting][0]} cannot go on")
return plan"""
RIGHT = {   # of set 3: the part, and what is handed in
    "recursion, and a print": ("a", [(SCHEDULE, """
def shares(rest, left):
    if not rest or not left:
        return []
    n = min(rest[0].todo, left)
    granted = rest[0] in self.running and self.make_room(rest[0], n)
    return [(rest[0], n)] * granted + shares(rest[1:], left - n * granted)
print("a line")
before = list(self.running)
plan = shares(before, self.token_budget)
gone, left = before != self.running, self.token_budget - sum(n for _, n in plan)
""" + NEWCOMERS)]),
    "a helper of one's own, a data file": ("a", [
        ("one.txt", lambda _: "1"), ("helper.py", lambda _: "ONE = int(open('one.txt').read())\n"
                                     "def share(request, left):\n"
                                     "    return min(request.todo, left) * ONE\n"), (
            SCHEDULE, """from helper import share
left, plan, many = self.token_budget, [], len(self.running)
for request in self.running:
    if left and self.make_room(request, share(request, left)):
        plan.append((request, share(request, left)))
        left -= plan[-1][1]
gone = len(self.running) < many
""" + NEWCOMERS)]),
    "tabs": ("b", [("scheduler.py", lambda text: text.replace("    ", "\t"))]),
    "another file that cannot be read": ("a", [("request.py", lambda _: "def broken(:\n")]),
    "another part that is missing": ("a", [
        ("scheduler.py", lambda text: text.replace("def release(self", "def releases(self"))])}
# of the body of `schedule`, which has a docstring of one line
FIRST = (ROOT / "scheduler.py").read_text().splitlines().index("    def schedule(self, step):") + 3
WRONG = {   # the body of schedule: what is said
    "import pytest; pytest.skip('later')": "raises Skipped: later",
    "import os; os._exit(0)": "ends the process (status 0)",
    "return type('L', (list,), {'__eq__': lambda *_: True})()": "it returns: [], expected A",
    "return": "it returns: None, expected [] (is a `return` missing?)",
    "self = self\nreturn 1 / 0": f"(scheduler.py, line {FIRST + 1}: return 1 / 0)",
    "import os; os.fork(); return []": "it returns: [], expected A",
    "while True: pass": "takes more than 10 seconds of CPU time",
    "import time; time.sleep(600)": "waits for more than 8 seconds",
    "x = [0] * 10**12": "raises MemoryError",
    "import os; [os.write(i, b'{\"error\": 3}\\n{\"value\": []}\\n' * 999) for i in range(1, 9)]":
        ", expected ",
    "return ['A\\nbob 9 of 9']": "it returns: [A bob 9 of 9], expected [",
    "import os\nwhile True: os.write(3, b'x' * 10**6)": "ends the process (status 1)",
    "import os; os.write(3, b'{\"value\": {\"it returns\": ' + b'[' * 900 + b']' * 900 + b'}}\\n')":
        "is too deep or too large",
    "import json; json.dumps = lambda *_: '{\"value\": true}'; return []": ", expected "}


def said_of(number, folder, part, monkeypatch):
    monkeypatch.setattr(grading, "drawn", lambda *_: {part: drawn(number)[part]})
    return grading.graded(number, folder, "s")[part]


@pytest.mark.parametrize("name", RIGHT)
def test_right_code_in_any_style_gets_full_marks(name, tmp_path, monkeypatch):
    part, edits = RIGHT[name]
    assert said_of(3, handed_in(tmp_path, 3, edits), part, monkeypatch) is None


@pytest.mark.parametrize("body", WRONG if THOROUGH else [*WRONG][:6])
def test_what_is_no_solution_gets_nothing_and_costs_no_other_part(body, tmp_path, monkeypatch):
    folder = handed_in(tmp_path, 3, [(SCHEDULE, body)])
    said = said_of(3, folder, "a", monkeypatch)
    assert said and WRONG[body] in said and "\n" not in said, said
    assert said_of(3, folder, "b", monkeypatch) is None


def test_a_submission_that_waits_costs_at_most_a_minute():
    for number in functions.SETS:
        assert len(functions.parts_of(number)) * compare.IDLE < 60


@pytest.mark.parametrize("body, said", [
    ("import time; time.sleep(600)", "waits for more than 3 seconds"),
    ("import time\nwhile True: time.sleep(0.01)", "waits for more than 3 seconds"),
    ("while True: pass", "takes more than 10 seconds of CPU time")])
def test_what_waits_is_stopped_soon_and_what_computes_is_not(body, said, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "IDLE", 3)
    if not os.path.exists("/proc/self/stat"):
        pytest.skip("only Linux says how much a child has computed")
    folder = handed_in(tmp_path, 3, [(SCHEDULE, body)])
    assert re.search(said, said_of(3, folder, "a", monkeypatch))


def test_links_in_what_is_handed_in_are_not_followed(tmp_path, monkeypatch):
    ours = tmp_path / "ours.py"
    for file, says in ("cache.py", None), ("request.py", "request.py cannot be read: it is a link"):
        folder = handed_in(tmp_path / file, 3)
        ours.write_text("of the instructor")
        (folder / file).unlink()
        (folder / file).symlink_to(ours)
        said = said_of(3, folder, "c", monkeypatch)
        assert said == says or says and said.startswith(says), said
        assert ours.read_text() == "of the instructor"


@pytest.mark.parametrize("number, part, function, old, new", [   # what handouts leave open
    (1, "a", FORWARD, "return weights @ v", "return (weights @ v).view_as(q)"),
    (1, "a", FORWARD, "bool, device=q.device).tril(", "bool).to(q).bool().tril("),
    (1, "c", "generate_unbatched.py:Alone.lay_out", "(slice(None), -1)", "(..., -1, slice(None))"),
    (1, "c", "generate_unbatched.py:Alone.attend", "return head(q, k, v)",
     "past = k.size(-2) - q.size(-2)\n        return torch.cat([head(new, k[..., :i, :], "
     "v[..., :i, :]) for i, new in enumerate(q.split(1, -2), past + 1)], -2)"),
    (3, "a", SCHEDULE, "self.make_room(request, n)      #", "assert self.make_room(request, n)  #"),
    (3, "a", SCHEDULE, "raise RuntimeError(", "raise type('Stuck', (RuntimeError,), {})("),
    (1, "c", "generate_unbatched.py:Alone.attend", "self.kv.write(layer, self.start, k, v)\n"
     "            k, v = self.kv.read(layer, self.end)",
     "self.kv.write(layer, self.start, k[0], v[0])\n"
     "            k, v = (each[None] for each in self.kv.read(layer, self.end))"),
    (2, "a", STATIC, "(torch.tensor(due, device=device), -1)",
     "(torch.tensor(due, dtype=torch.long, device=device), columns[self.end - 1 - self.start])"),
    (2, "a", STATIC, "(torch.tensor(due, device=device), -1)", "(due, [T - 1] * len(due))"),
    (2, "g", "generate_dynamic.py:Rectangle.lay_out",
     "(torch.tensor(due, dtype=torch.long, device=device), -1)", "(due, [T - 1] * len(due))"),
    (4, "d", "generate_ragged.py:Flat.attend_varlen", "return torch.cat(out, dim=-2)",
     "return torch.stack([t for each in out for t in each.unbind(1)], 1)"),
    (4, "d", "generate_ragged.py:Flat.attend_varlen", "head(q[..., a:b, :], keys, values)",
     "torch.nn.functional.scaled_dot_product_attention(q[None, :, a:b], keys[None], values[None], "
     "torch.ones(b - a, keys.size(1)).tril(keys.size(1) - b + a).bool())[0]"),
    (4, "c", "generate_ragged.py:Flat.lay_out", "self.block_diagonal().to(device)",
     "(self.block_diagonal() & (self.positions.cpu() >= 0)[:, None]).to(device)"),
    (5, "a", "generate_paged.py:Paged.lay_out", "pages * page_size",
     "torch.tensor([int(page) for page in pages], device=device) * page_size"),
    (5, "d", "generate_prefix.py:PrefixScheduler.hash_of_page", "while len(hashes) <= i:",
     "while len(hashes) < request.num_tokens // size:"),
    (6, "b", "beyond/speculative.py:draft", ".guess(request, room)",
     ".guess(request, room + 9)[:room]"),
])
def test_what_a_handout_leaves_open_is_right(number, part, function, old, new):
    with put_in([(function, old, new)]):
        answers = functions.answers_to(number, drawn(number)[part])
    assert compare.fault(record(number, part), answers) is None


@pytest.mark.parametrize("number", SETS)
def test_a_child_holds_no_solution_of_later_parts_that_it_does_without(number, tmp_path):
    ours = source.files_of(number)
    first, *later = functions.parts_of(number)
    grading.lay_out(number, first, handed_in(tmp_path / "in", number, [
        (function.split(":")[0], lambda text: "") for function in source.functions_of(number)]),
        tmp_path / "work")
    left_out = 0
    for function, part in source.functions_of(number).items():
        file, name = function.split(":")
        body = body_of(source.node_of(ours[file], name))
        lines = ours[file].splitlines()[body[0].lineno - 1:body[-1].end_lineno]
        longest = max(map(str.strip, lines), key=len)
        held = (tmp_path / "work" / file).read_text()
        if part in later and function not in grading.called_by(number, first):
            left_out += 1
            assert f"{name} is of part {part}" in held and longest not in held, function
    assert left_out


def test_our_source_of_other_parts_counts_and_brings_its_imports():
    theirs = "class A:\n\tdef f(self):\n\t\treturn 1\n\ndef f():\n    return A().f()"
    ours = "import math\nclass A:\n    def f(self):\n        return super() and math.pi\n"
    exec(source.pasted(theirs, ours, ["A.f"]), made := {})
    assert made["f"]() == 3.141592653589793


OWN_LOOKUP = """class Lookup:
    def __init__(self):
        self.seen = {}

    def guess(self, request, most):
        known = list(request.tokens)
        for end in range(1, len(known)):
            for n in (1, 2, 3):
                self.seen[tuple(known[max(end - n, 0):end])] = end
        for n in (3, 2, 1):
            place = self.seen.get(tuple(known[-n:]))
            if place and len(known) >= n:
                return known[place:place + most]
        return []
"""


@pytest.mark.parametrize("part", ["b", "c"])
def test_our_methods_bring_the_state_that_they_need(part, tmp_path, monkeypatch):
    """A Lookup with an `__init__` of its own may not cost the parts that use ours."""
    def own_lookup(text):
        node = source.node_of(text, "Lookup")
        lines = text.splitlines()
        return "\n".join([*lines[:node.lineno - 1], OWN_LOOKUP, *lines[node.end_lineno:]])

    folder = handed_in(tmp_path, 6, [("beyond/speculative.py", own_lookup)])
    assert said_of(6, folder, part, monkeypatch) is None


def test_a_class_that_the_part_asks_for_keeps_its_own_state():
    ours = ("class A:\n    size = 3\n    def __init__(self):\n        self.x = 1\n"
            "    def f(self):\n        return self.x\n    def g(self):\n        return self.x\n")
    student = ("class A:\n    def __init__(self):\n        self.x, self.own = 1, 2\n"
               "    def f(self):\n        return self.own\n")
    exec(source.pasted(student, ours, ["A.g"], ["A.f"]), names := {})
    assert (names["A"]().f(), names["A"]().g()) == (2, 1)
    exec(source.pasted(student, ours, ["A.f", "A.g"]), names := {})
    assert (names["A"]().f(), names["A"].size) == (1, 3)
    exec(source.pasted("", ours, ["A.f"]), names := {})
    assert names["A"]().f() == 1   # a class that is not there


# --- a class --------------------------------------------------------------------------------------

@pytest.mark.parametrize("number", SETS)
def test_a_template_gives_no_solution_away(number, tmp_path):
    made, ours = template(number), source.files_of(number)
    for function in source.functions_of(number):
        file, name = function.split(":")
        lines = "\n".join(map(ast.unparse, body_of(source.node_of(ours[file], name))))
        for line in [line.strip() for line in lines.splitlines() if len(line) > 40]:
            elsewhere = sum(text.count(line) for text in ours.values()) > 1   # in what is given
            assert elsewhere or not any(line in text for text in made.values()), line
    for files, status in (made, 1), ({name: ours[name] for name in ours}, 0):
        source.write(tmp_path, files)
        ran = run(tmp_path, sys.executable, "-m", "pytest", "-q")
        assert ran.returncode == status, ran.stdout
        assert ran.stdout.count(" is not written yet (part ") >= 2 * status, ran.stdout


def dicts_in(value):
    """All dicts in plain data, however deep."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from dicts_in(each)


@pytest.mark.parametrize("number", SETS)
def test_what_a_mistake_raises_is_shipped_without_its_way_through_our_code(number):
    """The way has lines of the solution, and paths of the instructor's machine."""
    cases = template(number)["kit/cases.json"]
    ways = [each["way"] for each in dicts_in(json.loads(cases)) if "way" in each]
    assert ways and not any(ways)
    assert str(ROOT) not in cases and sys.prefix not in cases


def test_an_instructors_first_ten_minutes(tmp_path):
    for name in "assignments", "scheduler.py":
        os.symlink(ROOT / name, tmp_path / name)
    commands = "\n".join((KIT / "README.md").read_text().split("```")[1:4:2])
    ran = run(tmp_path, "bash", "-ec", commands.replace("python ", f"{sys.executable} "))
    assert ran.returncode == 0 and "schedule is not written yet" in ran.stdout, ran.stderr
    lines = [line.split()[:4] for line in ran.stdout.splitlines() if " of 9 " in line]
    assert lines[:2] == [["ada", "6", "of", "9"], ["bob", "0", "of", "9"]]


def test_a_line_of_json_for_each_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(grading, "graded", lambda *_: {"a": None, "b": "no", "c": None})
    (tmp_path / "secret").write_text("s\n")
    handed_in(tmp_path / "ada", 3)
    command = ["3", "grade", str(tmp_path / "ada"), "--secret", str(tmp_path / "secret"), "--json"]
    assert kit.main(command) == 0
    line = json.loads(capsys.readouterr().out)
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
    assert line.pop("seconds") >= 0
    assert head.stdout.startswith(line.pop("commit").rstrip("+"))
    assert line == {
        "id": "ada", "points": {"a": 4, "b": 0, "c": 3}, "total": 7, "of": 9, "says": {"b": "no"},
        "secret": "043a718774c5"}   # of sha256("s")


def test_what_cannot_be_graded_is_a_line_and_the_others_are_graded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(grading, "graded", lambda *_: {"a": None, "b": "no", "c": None})
    (tmp_path / "secret").write_text("s\n")
    handed_in(tmp_path / "ada", 3)
    (tmp_path / "bob.zip").write_bytes(b"PK")
    handed_in(tmp_path / "cy" / "work", 3)
    (tmp_path / "dan").symlink_to(tmp_path / "ada")
    (tmp_path / "eve").mkdir()
    names = "ada", "bob.zip", "cy", "dan", "eve"
    command = ["3", "grade", *(str(tmp_path / name) for name in names)]
    assert kit.main([*command, "--secret", str(tmp_path / "secret")]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[:5]] == [*names]
    assert "7 of 9" in printed[0]
    for line, said in zip(printed[1:], ("an archive is unpacked first", "work/; move them up",
                                        "is a link", "has none of the files")):
        assert "not graded" in line and said in line
    assert printed[5] == "1 graded, 4 not; right:"
    assert [line.split()[:4] for line in printed[6:]] == [
        ["a", "1", "of", "1"], ["b", "0", "of", "1"], ["c", "1", "of", "1"]]


# --- the child ------------------------------------------------------------------------------------

def test_prints_by_any_name_are_no_answers(tmp_path, monkeypatch):
    body = "import os, sys\nprint(1)\nprint(2, file=sys.__stdout__)\nos.write(1, b'3\\n')"
    folder = handed_in(tmp_path, 3, [(SCHEDULE, body)])
    assert said_of(3, folder, "a", monkeypatch) is None


def test_the_child_knows_no_secret_and_leaves_no_process(tmp_path, monkeypatch):
    """It has a session of its own, whose processes end with it; and a user, where we are root."""
    monkeypatch.setenv("SECRET", "s3cret")
    body = """
import json, os, subprocess, sys
process = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
raise ValueError(json.dumps([process.pid, os.getsid(0) == os.getpid(), os.geteuid(),
                             's3cret' in str(dict(os.environ))]))"""
    said = said_of(3, handed_in(tmp_path, 3, [(SCHEDULE, body)]), "a", monkeypatch)
    process, own_session, user, knows = json.loads(re.search(r"ValueError: (\[.*?\])", said)[1])
    assert own_session and not knows
    assert user == (grading.NOBODY if grading.child_user() else os.geteuid())
    for _ in range(100):   # its parent is gone; it may be a zombie for a moment
        status = run(tmp_path, "ps", "-o", "stat=", "-p", str(process)).stdout.strip()
        if status in ("", "Z", "Z+", "Zs", "ZN"):
            break
        time.sleep(0.1)
    assert status[:1] in ("", "Z")


def test_a_torch_of_ones_own_is_nobodys_torch(tmp_path, monkeypatch):
    folder = handed_in(tmp_path, 1, [("torch.py", lambda _: "raise ImportError('mine')")])
    assert said_of(1, folder, "b", monkeypatch) is None


@pytest.mark.parametrize("value", ["yes", [1], {"a": 1}, 1.0, "nothing"])
def test_only_a_yes_is_true(value):
    """A count, 1 and None are a yes and a no in other forms; a list, a text or a float are not."""
    assert not compare.alike({"value": value}, {"value": True})
    assert not compare.alike({"value": [] if value == [1] else value}, {"value": False})
    assert compare.alike({"value": 1}, {"value": True})
    assert compare.alike({"value": None}, {"value": False})


COMPARES = """
pools, right = kept.setdefault("pools", []), []
pool_now = {"tables": tables, "free": {*pool.free_queue}, "counts": pool.ref_count,
            "cached": pool.cached, "hash_of": pool.hash_of}
for before in pools:
    changed = [name for name in pool_now if pool_now[name] != before[name]]
    if len(changed) == 1:
        return ["differs in one thing from a pool that was right"]
pools.append(pool_now)
return []"""


@pytest.mark.parametrize("part", ["f", "g"])
def test_an_auditor_that_only_compares_pools_earns_nothing(part):
    """So wrong pools do not come with the right ones that they were made of."""
    cases = drawn(5)[part]
    with put_in([("audit.py:audit", "", COMPARES)], kept={}):
        answers = functions.answers_to(5, cases)
    right = functions.answers_to(5, cases)
    seen = sum(answer == expected for answer, expected in zip(answers, right)
               if expected["value"] != "all is right")
    wrong = sum(answer["value"] != "all is right" for answer in right)
    assert seen < wrong / 5, f"it knows {seen} of {wrong}"


def answers_of(*values):
    return [{"value": value} for value in values]


def part_with(mistakes, cases=12):
    """A part whose right answers are 0. mistakes: {sentence: in which cases this gives 1}"""
    gives = {sentence: [{"value": 1} if i in ones else None for i in range(cases)]
             for sentence, ones in mistakes.items()}
    return {"cases": [{"call": "f", "x": i} for i in range(cases)],
            "right": answers_of(*[0] * cases), "mistakes": gives}


@pytest.mark.parametrize("wrong, mistakes, name", [
    ({0, 1, 2, 3}, {"as if all": {0, 1, 2, 3}}, "as if all"),
    ({0, 1, 2, 3}, {"as if three": {0, 1, 2}}, "as if three"),
    ({0, 1, 2, 3}, {"as if half": {0, 1}}, None),                       # this is not most
    ({0, 1, 2, 3}, {"as if more": {0, 1, 2, 3, 5, 6}}, None),           # it is wrong elsewhere
    ({0, 1, 2, 3}, {"as if less": {0, 1, 2}, "as if all": {0, 1, 2, 3}}, "as if all"),
    ({0, 1, 2, 3, 4, 5}, {"as if first": {0, 1, 2, 3}, "as if later": {1, 2, 3, 4, 5}}, None),
])
def test_a_mistake_is_named_if_it_explains_most_and_none_explains_more(wrong, mistakes, name):
    answers = answers_of(*[int(i in wrong) for i in range(12)])
    said = compare.fault(part_with(mistakes), answers)
    assert said.startswith(f"It is {name}. " if name else "f, with x 0"), said


@pytest.mark.parametrize("ones, name", [
    ({0, 1}, "as if two"),
    ({0, 1, 2}, "as if two"),   # a second mistake does not hide the first
    ({0, 2}, None)])            # case 1 is right, where the mistake would be seen
def test_of_a_few_cases_none_that_is_right_may_refute_a_mistake(ones, name):
    answers = answers_of(*[int(i in ones) for i in range(4)])
    said = compare.fault(part_with({"as if two": {0, 1}}, cases=4), answers)
    assert said.startswith(f"It is {name}. " if name else "f, with x 0"), said
