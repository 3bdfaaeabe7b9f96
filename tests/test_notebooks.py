"""
Every notebook runs from scratch and prints what is committed. It is committed executed, small, and
without a trace of the machine it ran on. Its questions have the answers that its text gives, and
its exercises accept ours. Each claim of the sources is met once.
"""
import difflib
import inspect
import re
import sys
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
jupytext = pytest.importorskip("jupytext")
pytest.importorskip("ipykernel")
ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("[0-9]*.py"))
EACH = pytest.mark.parametrize("name", NAMES)


def some_quick(*quick):
    """Each notebook: these always, and the others with --thorough."""
    return pytest.mark.parametrize("name", [name if name[:2] in quick else pytest.param(
        name, marks=pytest.mark.thorough) for name in NAMES])


MACHINES = ("/home/", "/Users/", "/root/", "/tmp/", str(ROOT))
CLAIMS = ([f"H{i}" for i in range(1, 13)] + [f"R{i}" for i in range(1, 8)]
          + [f"P{i}" for i in range(1, 11)] + [f"I{i}" for i in range(1, 9)])
CLAIM = re.compile(r"\*\*Claim ([HRPI]\d+)\.\*\*")

sys.path.insert(0, str(FOLDER))
import lesson  # noqa: E402 (it lies beside the notebooks)

from toolbox.plots import pyplot  # noqa: E402


def source(name):
    return jupytext.read(FOLDER / f"{name}.py")


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", 4)


def run(name):
    """The notebook as a new kernel leaves it."""
    client = nbclient.NotebookClient(read(name), timeout=3000, startup_timeout=600,
                                     kernel_name="python3",
                                     resources={"metadata": {"path": str(FOLDER)}})
    return client.execute()


def code_cells(notebook, tag=None):
    """{number in the notebook: cell}, of all code or of cells with a tag."""
    return {i: cell for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"
            and (tag is None or tag in cell.metadata.get("tags", []))}


def text_of(cell):
    """What a cell printed, and the text of its results; pictures are text like <Figure ...>."""
    return "".join(output.get("text") or output.get("data", {}).get("text/plain", "") + "\n"
                   for output in cell.outputs)


@some_quick("00")
def test_it_runs_from_scratch_and_prints_what_is_committed(name):
    committed, fresh = code_cells(read(name)), code_cells(run(name))
    assert committed.keys() == fresh.keys()
    assert_clean(committed)
    assert_clean(fresh)
    for i, cell in committed.items():
        if "seconds" in cell.metadata.get("tags", []):   # times differ from run to run
            continue
        before, after = text_of(cell), text_of(fresh[i])
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "committed",
                                     "this run", lineterm="")
        assert before == after, "\n".join([f"cell {i} of {name}:", cell.source, "", *lines])


def assert_clean(cells):
    for i, cell in cells.items():
        assert cell.execution_count, f"cell {i} was not run: {cell.source}"
        for output in cell.outputs:
            assert output.output_type != "error", f"cell {i}: {output}"
            assert output.get("name") != "stderr", f"cell {i}: {output.text}"


@EACH
def test_it_is_built_from_its_source(name):
    """`python notebooks/build.py` writes an .ipynb from the .py beside it."""
    assert [(cell.cell_type, cell.source) for cell in read(name).cells] == \
        [(cell.cell_type, cell.source) for cell in source(name).cells]


@EACH
def test_it_is_small_and_knows_no_machine(name):
    path = FOLDER / f"{name}.ipynb"
    assert path.stat().st_size < 500_000
    raw = path.read_text(encoding="utf-8")
    assert [place for place in MACHINES if place in raw] == []


# --- questions ------------------------------------------------------------------------------------

ANSWERS = {   # of every `ask`, in order; the explanations beside them rely on these
    "00_tour": ["H"],
    "01_one_request": [[3, 4, 5, 6], 4900, [6], 68.7],
    "02_rectangles": ["A", "A", 13, "D, F"],
    "03_chunks_and_fusion": [["A3 B2 C3", "A1 B1 C6", "A1 B1 C3"], 6, 0, 21, 1393],
    "04_no_rows": [3, "A, C, E", 1600, 1000, 50_000],
    "05_memory": [4, 5, 16, 16],
    "06_cost": [19, 707.8, "no", [8, 8]],
}


@some_quick("01", "02", "03", "04")
def test_its_questions_have_the_answers_that_it_explains(name, monkeypatch, capsys):
    """Every question is asked twice in a row: with the right guess, and with a wrong one."""
    right, plain, asked = iter(ANSWERS[name]), lesson.ask, []

    def ask(question, guess=..., answer=None, why=""):
        assert guess is ..., f"{question}: committed with a guess"
        assert why.endswith((".", ".)")), question
        expected = next(right)
        capsys.readouterr()
        plain(question, guess=expected, answer=answer, why=why)
        assert capsys.readouterr().out.splitlines()[1].startswith("Right. It is "), question
        plain(question, guess="something else", answer=answer, why=why)
        assert "You say something else. It is " in capsys.readouterr().out
        asked.append(question)

    monkeypatch.setattr(lesson, "ask", ask)
    monkeypatch.chdir(FOLDER)
    names = {"__name__": "__main__"}
    for i, cell in code_cells(source(name)).items():
        exec(compile(cell.source, f"cell {i} of {name}", "exec"), names)
        pyplot().close("all")
    assert len(asked) == len(ANSWERS[name])


# --- exercises ------------------------------------------------------------------------------------

def exercises():
    """{function's name: (our answer, its cell)} from the notebooks themselves."""
    found = {}
    for name in NAMES:
        cells = source(name).cells
        for i, cell in enumerate(cells):
            if "exercise" in cell.metadata.get("tags", []):
                answer = re.search(r"```python\n(.*?)```", cells[i + 1].source, re.S).group(1)
                found[re.search(r"def (\w+)", cell.source).group(1)] = answer, cell.source
    return found


EXERCISES = exercises()
WRONG = {   # function: (how our answer is changed, what the sentence says)
    "causal_rule": ("torch.arange(S - T, S)", "torch.arange(T)",
                    "position 4) does not see positions 1, 2, 3, 4 of request 'A'"),
    "own_positions": ("- pads[:, None]", "+ 0 * pads[:, None]", "as if at position 4"),
    "row_mask": ("mask[P + T - n:] = True", "mask[P:] = True", "sees 3 pad slots"),
    "varlen": ("torch.cat(out, ", "torch.cat(out[::-1], ", "sees position 0 of request 'D'"),
    "victim": ("request.priority, ", "", "it preempts D (priority 1, arrival 1) while A"),
    "useless": ("9]", "3]", "prompts of 13 and 3 tokens share a row"),
}


def tried(code, capsys):
    """What an exercise prints about this code."""
    import torch
    exec(code, {"torch": torch, "exercise": lesson.exercise})
    return capsys.readouterr().out


@pytest.mark.parametrize("function", EXERCISES)
def test_an_exercise_accepts_our_answer_and_says_nothing_of_a_blank_one(function, capsys):
    answer, blank = EXERCISES[function]
    assert tried(answer, capsys) == f"{function}: right.\n"
    assert tried(blank, capsys) == ""


@pytest.mark.parametrize("function", EXERCISES)
def test_an_exercise_names_what_is_wrong(function, capsys):
    answer, _ = EXERCISES[function]
    old, new, sentence = WRONG[function]
    assert answer.count(old) == 1
    said = tried(answer.replace(old, new), capsys)
    assert said.startswith(f"{function}: not yet. ") and sentence in said


@pytest.mark.parametrize("function", EXERCISES)
def test_an_exercise_survives_an_answer_that_fails(function, capsys):
    signature = re.search(rf"def {function}\(.*\):", EXERCISES[function][0]).group(0)
    for body, sentence in ("raise KeyError('x')", "KeyError"), ("return 'nothing'", ""):
        said = tried(f"@exercise\n{signature}\n    {body}\n", capsys)
        assert said.startswith(f"{function}: not yet. ") and sentence in said
        assert "Traceback" not in said


# --- claims ---------------------------------------------------------------------------------------

def test_a_reader_meets_every_claim_once():
    met = [claim for name in NAMES for cell in source(name).cells if cell.cell_type == "markdown"
           for claim in CLAIM.findall(cell.source)]
    assert sorted(met) == sorted(CLAIMS)


def test_the_table_of_claims_says_where_each_is_met_and_tested():
    import test_claims
    rows = re.findall(r"^\| ([HRPI]\d+) \| (.+) \| (.+) \| `(\w+)` \| `(\w+)` \|$",
                      (FOLDER / "README.md").read_text(encoding="utf-8"), re.M)
    assert [row[0] for row in rows] == CLAIMS
    for claim, _, verdict, where, test in rows:
        text = "\n\n".join(cell.source.replace("\n> ", " ") for cell in source(where).cells)
        statement, = re.findall(rf"\*\*Claim {claim}\.\*\*.*", text)
        assert ("wrong as published" in verdict) == ("rong as published" in statement), claim
        assert test.startswith(f"test_{claim}_")
        assert inspect.isfunction(getattr(test_claims, test))
