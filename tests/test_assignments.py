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
import make  # noqa: E402
import predict  # noqa: E402
from mutants import MUTANTS  # noqa: E402
from variants import VARIANTS  # noqa: E402

SETS = make.SETS


def marks(number, folder, *flags, only=None):
    """(exit status, {part: (score, output)}) of the set's tests on a folder, in this process."""
    results = Path(folder).parent / "results.json"
    results.unlink(missing_ok=True)
    test = KIT / f"set{number}" / f"test_set{number}.py"
    tests = [f"{test}::{name}" for name in only or ()] or [test]
    status = pytest.main([*map(str, tests), "-q", "--tb=no", "-p", "no:cacheprovider",
                          "--rootdir", str(KIT), "--submission", str(folder),
                          "--results", str(results), *flags])
    return status, {test["name"].split()[0]: (test["score"] == test["max_score"], test["output"])
                    for test in json.loads(results.read_text())["tests"]
                    if test["name"].split()[1:2] not in (["numbers"], ["break"])}


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
        assert status == 1 and lost == [mutant.part], {part: found[part][1] for part in lost}
        sentence = found[mutant.part][1]
        assert sentence and "Traceback" not in sentence
