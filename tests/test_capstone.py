"""
The engine of the last notebook: its judge accepts what is right in several styles, names what is
wrong, and the notebook gives no solution away.
"""
import linecache
import re
import sys
from unittest.mock import patch

import pytest
import solution
from common import ROOT

from lab.checks.edits import edited

pytest.importorskip("IPython")
FOLDER = ROOT / "notebooks"
sys.path.insert(0, str(FOLDER))
import capstone  # noqa: E402 (it lies beside the notebooks)


def handed_in(step, *edits):
    """Runs a step's cell with the solution, edited."""
    run(step, edited(solution.cell(step), edits))


def run(step, text):
    name = f"<step {step}>"
    linecache.cache[name] = len(text), None, text.splitlines(True), name
    exec(compile(text, name, "exec"), solution.SCOPE)


@pytest.fixture
def built(capsys):
    """The steps, as far as a test needs them."""
    solution.SCOPE.update(judge=capstone.judge)

    def up_to(last):
        for step in range(1, last + 1):
            if step not in capstone.BUILT:
                handed_in(step)
        return capsys.readouterr().out
    return up_to


@pytest.mark.parametrize("step, old, new, sentence", [
    case if i % 7 == 0 else pytest.param(*case, marks=pytest.mark.thorough)
    for i, case in enumerate(solution.WRONG)])
def test_the_judge_names_what_is_wrong(step, old, new, sentence, built, capsys):
    built(step - 1)
    handed_in(step, *solution.edits(old, new))
    said = capsys.readouterr().out
    assert said.startswith(f"Step {step}: not yet. ") and sentence in said, said


@pytest.mark.parametrize("step, old, new", [
    case if case[0] < 3 else pytest.param(*case, marks=pytest.mark.thorough)
    for case in solution.RIGHT])
def test_the_judge_accepts_another_style(step, old, new, built, capsys):
    built(step - 1)
    handed_in(step, *solution.edits(old, new))
    assert capsys.readouterr().out == f"Step {step}: right.\n"
    capstone.BUILT.pop(step)


def test_a_step_waits_for_the_one_before_it_and_for_code(built, capsys):
    built(0)
    capstone.BUILT.clear()
    handed_in(2)
    run(1, re.sub(r"    plan, left.*(?=\njudge)", "    ...\n", solution.cell(1), flags=re.DOTALL))
    capstone.race()
    assert capsys.readouterr().out == (
        "Step 2 needs step 1: get that one right first, or run its cell.\n"
        "Step 1: replace ... by your code, then run the cell.\nThe race needs step 1.\n")


TEXT = (FOLDER / "08_your_engine.ipynb").read_text(encoding="utf-8")


def test_the_notebook_shows_no_solution():
    assert solution.LINES and not [line for line in solution.LINES if line in TEXT]


@pytest.mark.thorough
def test_the_race_says_whose_tokens_are_wrong(built, capsys):
    built(4)
    with patch.object(capstone, "timelines"), patch.dict(
            capstone.BUILT[2], attend=lambda plan, cu_seqlens, layer, q, k, v: v):
        capstone.race(pages=64)
    assert " got wrong tokens, and no judge of a step has seen why" in capsys.readouterr().out


@pytest.mark.parametrize("pages", [64, pytest.param(40, marks=pytest.mark.thorough)])
def test_the_race_is_a_tie_and_the_notebook_has_its_figures(pages, built, capsys):
    built(4)
    with patch.object(capstone, "timelines"):
        capstone.race(pages=pages)
    yours, ours = (line.split() for line in capsys.readouterr().out.splitlines() if "12/12" in line)
    assert yours[1:] == ours[1:] and all(figure in TEXT for figure in yours[1:3])
