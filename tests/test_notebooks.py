"""
Every notebook runs from scratch, prints what is committed, and proves the answers of its questions.
It is committed executed, small, and without a trace of the machine it ran on. A guess is judged as
a person would, an exercise accepts our code and knows the usual mistakes.
"""
import os
import re
import subprocess
import sys

import pytest
import torch
from common import ROOT, quick

from beyond.calculated import simulate
from beyond.hardware import GPUS, MODELS

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
jupytext = pytest.importorskip("jupytext")
pytest.importorskip("ipykernel")
FOLDER, PATH = ROOT / "notebooks", os.environ["PATH"]
NAMES = sorted(path.stem for path in FOLDER.glob("[0-9]*.py"))
EACH = pytest.mark.parametrize("name", NAMES)
MACHINES = ("/home/", "/Users/", "/root/", "/tmp/", str(ROOT))

sys.path.insert(0, str(FOLDER))
import build  # noqa: E402 (they lie beside the notebooks)
import exercises  # noqa: E402
import lesson  # noqa: E402

ASKED = {number: it for number, it in lesson.QUESTIONS.items() if "answer" in it}
TAUGHT = {name: it for name, it in lesson.QUESTIONS.items() if "code" in it}
NUMBER = re.compile(r'ask\(\s*"(\d\.\d): ')


def source(name):
    return jupytext.read(FOLDER / f"{name}.py")


def read(name):
    """A committed notebook, without the cells that build.py puts in front."""
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", 4)
    del notebook.cells[:len(notebook.cells) - len(source(name).cells)]
    return notebook


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text_of(cell):
    """What a cell printed, and the text of its results; pictures are text like <Figure ...>."""
    return "".join(output.get("text") or output.get("data", {}).get("text/plain", "") + "\n"
                   for output in cell.outputs)


PROOFS = """
import io, lesson
from contextlib import redirect_stdout

def survivors(trap, stage, requests, **knobs):
    with lesson.broken(trap, show=False), redirect_stdout(io.StringIO()) as said:
        lesson.check(stage, requests, **knobs)
    return ", ".join(r.name for r in requests
                     if f"WRONG: request {r.name!r}" not in said.getvalue())
"""


@pytest.mark.parametrize("name", quick(NAMES, [NAMES[0], NAMES[3]]))
def test_it_runs_from_scratch_prints_what_is_committed_and_proves_its_answers(name):
    """A new kernel runs it; behind each question it computes the answer, by its `proof`."""
    def proof(code):
        return nbformat.v4.new_code_cell(code, metadata={"tags": ["proof"]})

    fresh = nbformat.v4.new_notebook(cells=[proof(PROOFS), *read(name).cells])
    for cell in code_cells(fresh):
        if found := NUMBER.search(cell.source):
            number, it = found[1], ASKED[found[1]]
            fresh.cells.insert(fresh.cells.index(cell) + 1, proof(
                f"proved = {it['proof']}\nassert lesson.means(proved, {it['answer']!r}, "
                f"{it.get('within', 0)}), ({number!r}, proved)"))
    nbclient.NotebookClient(fresh, timeout=3000, startup_timeout=600, kernel_name="python3",
                            resources={"metadata": {"path": str(FOLDER)}}).execute()
    again = [cell for cell in code_cells(fresh) if "proof" not in cell.metadata.get("tags", [])]
    for cell, new in zip(code_cells(read(name)), again, strict=True):
        if "machine" not in cell.metadata.get("tags", []):   # it depends on where it runs
            assert text_of(cell) == text_of(new), f"{name}: {cell.source}"


@EACH
def test_it_is_built_from_its_source_knows_no_machine_and_leads_to_files(name):
    """`python notebooks/build.py` writes an .ipynb from the .py beside it."""
    notebook = read(name)
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == \
        [(cell.cell_type, cell.source) for cell in source(name).cells]
    first = nbformat.read(FOLDER / f"{name}.ipynb", 4).cells[:-len(notebook.cells)]
    home = re.search(r"https://github\.com/([^\"]+)", first[-1].source)[1]
    home = None if home == "OWNER/NAME" else home
    assert [cell.source for cell in first] == [cell.source for cell in build.front(name, home)]
    for cell in code_cells(notebook):
        assert cell.execution_count, f"was not run: {cell.source}"
        assert not [output for output in cell.outputs if output.output_type == "error"
                    or output.get("name") == "stderr"]
    raw = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert len(raw) < 500_000 and not [place for place in MACHINES if place in raw]
    links = re.findall(r"\]\(((?!http)[^)#:]+)\)", "".join(
        cell.source for cell in notebook.cells if cell.cell_type == "markdown"))
    assert all((FOLDER / target).exists() for target in links)
    assert name == NAMES[-1] or f"{NAMES[NAMES.index(name) + 1]}.ipynb" in links


def test_its_first_cell_finds_the_repository_wherever_the_kernel_starts(tmp_path):
    badges, find = (cell.source for cell in build.front("00_tour", "ann/repo"))
    assert "ann/repo/blob/HEAD/notebooks/00_tour.ipynb" in badges
    git = tmp_path / "git"   # stands for git: there is no network
    git.write_text("#!/bin/sh\necho $3; mkdir -p $4/notebooks; touch $4/notebooks/lesson.py\n")
    git.chmod(0o755)
    code = find.replace('sys.executable, "-m", "pip"', '"true"') + "\nprint(root.resolve())"
    for place, said in ((ROOT, f"{ROOT}\n"), (FOLDER, f"{ROOT}\n"), (ROOT / "docs", f"{ROOT}\n"),
                        (tmp_path, f"https://github.com/ann/repo\n{tmp_path / 'nanoBatch'}\n")):
        done = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True,
                              text=True, env={**os.environ, "PATH": f"{tmp_path}:{PATH}"})
        assert done.stdout == said, done.stderr


# --- questions ------------------------------------------------------------------------------------

RIGHT = {   # what a person may type
    "0.1": ["H", "h", "only H", ["H"], {"H"}, "request H"],
    "1.1": [[3, 4, 5, 6], {6, 5, 4, 3}, range(3, 7), "3-6", "3 4 5 6", "rows 3, 4, 5 and 6",
            torch.arange(3, 7), "[3,4,5,6]", "three to six"],
    "1.2": [4900, 4900.0, "4,900", "4 900", "4900 scores", "4.9k", "4_900"],
    "1.3": [[6], 6, "row 6", "only 6", "six", "last", "only the last row"],
    "1.4": [68.7, 69, "68.7 GB", "68.7GB", 68.719476736, 68.7e9, "about 68.7", "~69"],
    "2.1": ["A", "just request A"], "2.2": ["A", "row A", {"A"}],
    "2.3": [13, "13 slots", "8+5", "13 of 30", "8 + 5 = 13"],
    "2.4": ["D, F", "DF", "df", "F and D", ["D", "F"], "D F", "D & F", "d/f"],
    "3.1": [[3, 6, 3], (3, 6, 3), "3, 6, 3", "3 6 3", "3, then 6, then 3"],
    "3.2": [6, "step 6", "after step 6", "six"],
    "3.3": [0, "none", "zero", "0 of 3", None, "nothing", "0 out of 3", "no one"],
    "3.4": ["C", "only C"], "3.5": [45, "45 slots"], "3.6": [1393, "1,393"],
    "4.1": [4, "four", "4 rows"], "4.2": ["A, C, E", "ACE", "ace", "A and C and E", list("ECA")],
    "4.3": [3600, "3,600", "60 * 60", "3.6k"], "4.4": [1400, "1,400"],
    "4.5": [50_000, "50,000", "50k", "50 000", "5e4"],
    "5.1": [4, "four"], "5.2": [22, "slot 22"], "5.3": [16, "16 tokens"],
    "5.4": [[2], 2, "page 2", {2}, "only page 2", "two"],
    "5.5": [[4, 5, 2, 3, 1, 0], "4-5-2-3-1-0", "4 -> 5 -> 2 -> 3 -> 1 -> 0"],
    "5.6": [16, "16 pages"], "6.1": [153, 150, 155, "about 153 rows", 312e12 / 2039e9],
    "6.2": [16.8, 17, "16.8 GB", 16.8e9, 16.777216, 16.4], "6.3": [False, "no", "No, longer"],
    "6.4": [[8, 8], "8 and 8", 8], "6.5": [0, 0.0, "zero"],
    "7.1": ["A, B", "AB", ["B", "A"]], "7.2": ["A and C", "ac"], "7.3": ["ABC", "a, b, c"],
    "7.4": [4, "4 tokens"], "7.5": [64, "64 requests", "a batch of 64", "from 64 on"],
}


def test_the_notebooks_ask_all_questions_in_order_and_give_no_answer_away():
    asked = []
    for name in NAMES:
        notebook = read(name)
        text = " ".join(cell.source + str(cell.get("outputs", "")) for cell in notebook.cells)
        assert not [number for number, it in ASKED.items() if it["why"] in text]
        for cell in code_cells(notebook):
            if found := NUMBER.search(cell.source):
                asked.append(found[1])
                assert "guess=...)" in cell.source
                assert text_of(cell).endswith("Replace ... by your answer, then run the cell.\n")
            if "folded()" in cell.source:   # closed, and nothing beside it
                output, = cell.outputs
                assert output.data["text/html"].startswith("<details><summary>")
    assert asked == list(ASKED) == list(RIGHT) and sum(map(len, RIGHT.values())) > 100


@pytest.mark.parametrize("number", ASKED)
def test_no_right_answer_is_refused_and_a_wrong_one_hears_of_its_mistake(number):
    it, others = ASKED[number], [guess for n, guesses in RIGHT.items() if n != number
                                 for guess in guesses if n[0] == number[0]]
    for guess in RIGHT[number]:
        assert lesson.reply(it, guess, set()) == f"Right. {it['why']}", guess
    for value, sentence in it["wrong"]:
        missed, shown = set(), value if value != "" else "none"
        for _ in range(2):   # the same miss is no second one
            assert lesson.reply(it, shown, missed) == f"You say {shown}. {sentence} Try once more."
        second = lesson.reply(it, "something else", missed)
        assert second.endswith(it["why"]) and "The answer is " in second
    assert len(it["wrong"]) >= 2 or it["answer"] in (True, False)
    assert lesson.reply(it, "who knows", set()).endswith(f"{it['hint']} Try once more.")
    for guess in others:
        if str(guess) not in map(str, RIGHT[number]) and not lesson.means(guess, it["answer"], .05):
            assert not lesson.reply(it, guess, set()).startswith("Right"), guess


# --- exercises ------------------------------------------------------------------------------------

def tried(name, code, capsys):
    """What an exercise prints about this code, in its notebook after the first cell."""
    cells = next(cells for cells in (code_cells(source(name)) for name in NAMES)
                 if any(f"def {name}(" in cell.source for cell in cells))
    scope = {}
    exec(cells[0].source, scope)
    capsys.readouterr()
    exec(compile(code, "<a cell>", "exec"), scope)
    return capsys.readouterr().out


@pytest.mark.parametrize("name", TAUGHT)
def test_an_exercise_accepts_our_answer_and_names_the_usual_mistakes(name, capsys):
    code = "@exercise\n" + TAUGHT[name]["code"].lstrip()
    signature = re.search(rf"def {name}\(.*\):", code).group(0)
    assert tried(name, code, capsys) == f"{name}: right.\n"
    for blank in "...", "pass", "x = ...":
        said = tried(name, f"@exercise\n{signature}\n    {blank}", capsys)
        assert said == f"{name}: replace ... by your code, then run the cell.\n"
    fails = "x = torch.ones(5)\n    torch.nn.Linear(2, 3)(x)"   # torch raises the error
    said = tried(name, f"@exercise\n{signature}\n    {fails}", capsys)
    assert said.startswith(f"{name}: not yet. line 4: RuntimeError: ")
    for old, new, sentence in TAUGHT[name]["mistakes"]:
        assert old in code
        said = tried(name, code.replace(old, new), capsys)
        assert said.startswith(f"{name}: not yet. ") and said.endswith(f" {sentence}\n"), said


@pytest.mark.parametrize("name, old, new, sentence", [
    ("causal_rule", "torch.arange(S - T, S)", "torch.arange(T)",
     "position 4) does not see positions 1, 2, 3, 4 of request 'A'. Your triangle"),
    ("varlen", "head(mine, keys, values)",   # without `head`, it is judged by what it returns
     "(mine @ keys.mT / mine.size(2) ** 0.5).masked_fill(~torch.ones(mine.size(1), keys.size(1))."
     "bool().tril(keys.size(1) - mine.size(1)), -torch.inf).softmax(-1) @ values", "right."),
    ("serve", "batch.attend, batch.wanted)", "batch.attend, wanted=batch.wanted)", "right."),
    ("serve", "batch.attend, batch.wanted)", "batch.attend)", "reads 8 rows of logits for 3"),
    ("serve", "sample(logits, batch.sampled)", "logits.argmax(-1).tolist()",
     "request 'A': token 0 is not what its own logits and random number give"),
    ("serve", "scheduler.schedule(step)", "[(r, 1) for r in requests[:1]]", "line 12"),
])
def test_an_exercise_says_what_goes_wrong_in_a_run(name, old, new, sentence, capsys):
    code = "@exercise\n" + TAUGHT[name]["code"].lstrip()
    assert code.count(old) == 1 and sentence in tried(name, code.replace(old, new), capsys)


def test_our_time_of_a_step_is_the_simulators():
    """To 1%, for decode steps of stage 6, Llama 2 7B on an A100."""
    it = TAUGHT["step_time"]
    for rows, keys in eval(it["calls"]):
        requests = lesson.letters(2, **{f"r{i}": keys // rows - 1 for i in range(rows)})
        trace = simulate(MODELS["llama-2-7b"], GPUS["a100"], lesson.STAGES["ragged, varlen"],
                         requests, max_batch=rows, token_budget=keys)
        ours = exercises.defined("step_time", it["code"])(rows, keys)
        assert ours == pytest.approx(trace.passes[-1].seconds, rel=0.01)
