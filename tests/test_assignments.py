"""
The course kit: the reference passes its own tests, each mutant loses its own part, each right
solution gets full marks, nothing leaks into a copy, and nothing that is handed in stops the grader.
"""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from common import ROOT, quick

KIT = ROOT / "assignments"
sys.path.insert(0, str(KIT))
import breaks  # noqa: E402
import grade_class  # noqa: E402
import leaderboard  # noqa: E402
import make  # noqa: E402
import predict  # noqa: E402
from handed_in import RIGHT, WRONG  # noqa: E402
from mutants import MUTANTS  # noqa: E402
from variants import VARIANTS  # noqa: E402

SETS = make.SETS


def marks(number, folder, *flags, only=None):
    """(exit status, {part: (score, output)}) of the set's tests on a folder, in this process."""
    results = Path(folder).parent / "results.json"
    results.unlink(missing_ok=True)
    test = KIT / f"set{number}" / f"test_set{number}.py"
    tests = [f"{test}::{name}" for name in only or ()] or [test, "-k", "not _numbers and not _break"]
    status = pytest.main([*map(str, tests), "-q", "--tb=no", "-p", "no:cacheprovider",
                          "--rootdir", str(KIT), "--submission", str(folder),
                          "--results", str(results), *flags])
    return status, {test["name"].split()[0]: (test["score"] == test["max_score"], test["output"])
                    for test in json.loads(results.read_text())["tests"]}


def submission(number, folder, edits=()):
    """Our files of a set, with {file: text} changed."""
    for file in make.tests_of(number).FILES.split():
        path = folder / "work" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((ROOT / file).read_text())
    for file, text in dict(edits).items():
        path = folder / "work" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / "work"


def mutated(mutant):
    """{file: its text with the mutant in it}."""
    edits = {}
    for name, old, new in mutant.edits:
        file, function = name.split(":")
        text = edits.get(file) or (ROOT / file).read_text()
        node = make.node_of(text, function)
        lines = text.splitlines(keepends=True)
        source = "".join(lines[node.lineno - 1:node.end_lineno])
        assert source.count(old) == 1, (name, old)
        lines[node.lineno - 1:node.end_lineno] = source.replace(old, new)
        edits[file] = "".join(lines)
    return edits


def one_a_set(set_of):
    """Parameters from {name: its set}: the first of each set, and the others with --thorough."""
    return quick(set_of, {number: name for name, number in reversed(set_of.items())}.values())


OF_PARTS = {name: mutant for name, mutant in MUTANTS.items() if {
    edit[0] for edit in mutant.edits} <= set(make.functions_of(int(mutant.part[0])))}


@pytest.mark.parametrize("name", one_a_set({name: mutant.part[0] for name, mutant in
                                            OF_PARTS.items()}))
def test_a_mutant_loses_its_own_part_and_no_other(name, tmp_path):
    mutant = OF_PARTS[name]
    number = int(mutant.part[0])
    folder = submission(number, tmp_path, mutated(mutant))
    for flags in (), ("--hidden", "s"):
        status, found = marks(number, folder, *flags)
        lost = [part for part, (right, _) in found.items() if not right]
        assert status == 1 and lost[:1] == [mutant.part], {part: found[part][1] for part in lost}
        # others may suffer only where they are asked for the same function
        assert all(set(make.parts_of(number)[part].args) & {edit[0] for edit in mutant.edits}
                   for part in lost)
        sentence = found[mutant.part][1]
        assert sentence and "Traceback" not in sentence


# --- what people have handed in -------------------------------------------------------------------

def edited(edits):
    """{file: text} of edits in handed_in.py."""
    files = {}
    for file, old, new in edits:
        text = files[file] if file in files else (ROOT / file).read_text() if old else ""
        assert old is None or text.count(old) == 1, (file, old, text.count(old))
        files[file] = text.replace(old, new) if old else new
    return files


@pytest.mark.parametrize("name", quick(RIGHT, [name for name, (number, *_) in RIGHT.items()
                                               if number == 3]))
def test_ordinary_python_gets_full_marks(name, tmp_path):
    number, *edits = RIGHT[name]
    status, found = marks(number, submission(number, tmp_path, edited(edits)), "--hidden", "s")
    assert status == 0 and all(right for right, _ in found.values()), found


@pytest.mark.parametrize("name", quick(WRONG, [name for name in WRONG if name[0] == "3"]))
def test_what_had_full_marks_is_seen(name, tmp_path):
    part = name.split()[0]
    folder = submission(int(part[0]), tmp_path, edited(WRONG[name]))
    for flags in (), ("--hidden", "s"):
        status, found = marks(int(part[0]), folder, *flags, only=[f"Test{part}"])
        assert status == 1 and not found[part][0], found
    print(name, found[part][1])


# --- the open tasks -------------------------------------------------------------------------------

@pytest.mark.parametrize("task, texts, table", [
    ("policy", {"greedy": "def share(running, budget):\n    return [(running[0], 10**6)]\n",
                "one each": "def share(running, budget):\n    return [(r, 1) for r in running]\n",
                "stuck": "def share(running, budget):\n    return []\n"},
     ["ours mean TTFT 9", "one each mean TTFT", "greedy raises ValueError: request 'r0' cannot "
      "compute 1000000 of its", "none there is no policy.py",
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
