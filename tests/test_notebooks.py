"""
Every notebook runs from scratch, prints what is committed, and proves the answers of its questions.
It is committed executed, small, and without a trace of the machine it ran on. A guess is judged as
a person would, an exercise accepts our code and knows the usual mistakes.
"""
import linecache
import os
import re
import subprocess
import sys
from unittest.mock import Mock, patch

import pytest
import torch
from common import ROOT

from lab.simulate.calculated import simulate
from lab.simulate.hardware import GPUS, MODELS
from lab.views.plots import pyplot

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
jupytext = pytest.importorskip("jupytext")
pytest.importorskip("ipykernel")
from IPython.core.interactiveshell import InteractiveShell  # noqa: E402 (as they are there)
from IPython.utils.capture import capture_output  # noqa: E402
from traitlets.config import Config  # noqa: E402

FOLDER, PATH = ROOT / "notebooks", os.environ["PATH"]
NAMES = sorted(path.stem for path in FOLDER.glob("[0-9]*.py"))
MACHINES = ("/home/", "/Users/", "/root/", "/tmp/", str(ROOT))

sys.path.insert(0, str(FOLDER))
import build  # noqa: E402 (they lie beside the notebooks)
import exercises  # noqa: E402
import lesson  # noqa: E402

ASKED = {number: it for number, it in lesson.QUESTIONS.items() if "answer" in it}
TAUGHT = {name: it for name, it in lesson.QUESTIONS.items() if "code" in it}
NUMBER = re.compile(r'ask\(\s*"(\d\.\d): ')
SOURCES = {name: jupytext.read(FOLDER / f"{name}.py").cells for name in NAMES}


def read(name):
    """The cells of a committed notebook: those that build.py puts in front, and its own."""
    cells = nbformat.read(FOLDER / f"{name}.ipynb", 4).cells
    own = len(cells) - len(SOURCES[name])
    return cells[:own], cells[own:]


def code(cells):
    return [cell for cell in cells if cell.cell_type == "code"]


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


def with_proofs(name):
    """The code of a committed notebook; behind each question, its answer is computed by `proof`."""
    cells = [nbformat.v4.new_code_cell(PROOFS)]
    for cell in code(read(name)[1]):
        cells.append(nbformat.v4.new_code_cell(cell.source, metadata={"committed": cell}))
        if found := NUMBER.search(cell.source):
            it = ASKED[found[1]]
            cells.append(nbformat.v4.new_code_cell(
                f"proved = {it['proof']}\nassert lesson.means(proved, {it['answer']!r}, "
                f"{it.get('within', 0)}), ({found[1]!r}, proved)"))
    return nbformat.v4.new_notebook(cells=cells)


def run_here(notebook):
    """As in a kernel, which takes as long to start as a notebook takes to run."""
    shell = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
    try:
        for cell in notebook.cells:
            with capture_output() as said:
                shell.run_cell(cell.source, store_history=True).raise_error()
            printed = [nbformat.v4.new_output("stream", text=said.stdout)] if said.stdout else []
            shown = [*(each.data.get("text/plain", "") for each in said.outputs),
                     *(repr(pyplot().figure(number)) for number in pyplot().get_fignums())]
            cell.outputs = printed + [nbformat.v4.new_output("display_data", {"text/plain": text})
                                      for text in shown]
            pyplot().close("all")
    finally:
        InteractiveShell.clear_instance()


def run_in_a_kernel(notebook):
    nbclient.NotebookClient(notebook, timeout=3000, startup_timeout=600, kernel_name="python3",
                            resources={"metadata": {"path": str(FOLDER)}}).execute()


@pytest.mark.parametrize("run, name", [
    (run_here, NAMES[3]),
    *(pytest.param(run_in_a_kernel, name, marks=pytest.mark.thorough) for name in NAMES)])
def test_it_runs_from_scratch_prints_what_is_committed_and_proves_its_answers(run, name):
    run(fresh := with_proofs(name))
    for cell in fresh.cells:   # but those that depend on where they run
        committed = cell.metadata.get("committed")
        if committed and "machine" not in committed.metadata.get("tags", []):
            assert text_of(cell) == text_of(committed), f"{name}: {cell.source}"


@pytest.mark.parametrize("name", NAMES)
def test_it_is_built_from_its_source_knows_no_machine_and_leads_to_files(name):
    """`python notebooks/build.py` writes an .ipynb from the .py beside it."""
    first, cells = read(name)
    home = re.search(r"https://github\.com/([^\"]+)", first[-1].source)[1]
    expected = build.front(name, None if home == "OWNER/NAME" else home) + SOURCES[name]
    assert [(cell.cell_type, cell.source) for cell in first + cells] == \
        [(cell.cell_type, cell.source) for cell in expected]
    for cell in code(cells):
        assert cell.execution_count, f"was not run: {cell.source}"
        assert not [output for output in cell.outputs if output.output_type == "error"
                    or output.get("name") == "stderr"]
    raw = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert len(raw) < 500_000 and not [place for place in MACHINES if place in raw]
    links = re.findall(r"\]\(((?!http)[^)#:]+)\)", "".join(
        cell.source for cell in cells if cell.cell_type == "markdown"))
    assert all((FOLDER / target).exists() for target in links)
    assert name == NAMES[-1] or f"{NAMES[NAMES.index(name) + 1]}.ipynb" in links


def test_its_first_cell_finds_the_repository_wherever_the_kernel_starts(tmp_path):
    badges, find = (cell.source for cell in build.front("00_tour", "ann/repo"))
    assert "ann/repo/blob/HEAD/notebooks/00_tour.ipynb" in badges
    git = tmp_path / "git"   # stands for git: there is no network
    git.write_text("#!/bin/sh\necho $3; mkdir -p $4/notebooks; touch $4/notebooks/lesson.py\n")
    git.chmod(0o755)
    cell = find.replace('sys.executable, "-m", "pip"', '"true"') + "\nprint(root.resolve())"
    for place, said in ((ROOT, f"{ROOT}\n"), (FOLDER, f"{ROOT}\n"), (ROOT / "docs", f"{ROOT}\n"),
                        (tmp_path, f"https://github.com/ann/repo\n{tmp_path / 'nanoBatch'}\n")):
        done = subprocess.run([sys.executable, "-c", cell], cwd=place, capture_output=True,
                              text=True, env={**os.environ, "PATH": f"{tmp_path}:{PATH}"})
        assert done.stdout == said, done.stderr


def test_a_reader_who_misspells_a_stage_or_skips_a_cell_reads_what_to_do(capsys):
    with pytest.raises(ValueError, match="'interleavd'.*'interleaved'"):
        lesson.run("interleavd", [])
    lesson.not_yet_defined(Mock(), NameError, NameError(name="four"), None)
    assert "Is 'four' defined in a cell above?" in capsys.readouterr().out


# --- questions ------------------------------------------------------------------------------------

ALSO = {   # what a person may type, beside the `spellings` of an answer
    "1.1": [range(3, 7), "3-6", "rows 3, 4, 5 and 6", "three to six"], "1.2": ["4.9k", "4_900"],
    "1.3": ["last", "only the last row"], "1.4": [69, "68.7GB", 68.719476736, 68.7e9, "~69"],
    "2.1": ["just request A"], "2.3": ["13 of 30", "8+5", "8 + 5 = 13"], "2.4": ["D & F", "d/f"],
    "3.1": ["3, then 6, then 3"], "3.2": ["after step 6"], "4.3": ["60 * 60"], "4.5": ["50k"],
    "3.3": ["none", "0 of 3", None, "nothing", "0 out of 3", "no one"], "5.5": ["only page 2"],
    "5.6": ["4 -> 5 -> 2 -> 3 -> 1 -> 0"], "6.1": [150, 155, 312e12 / 2039e9], "6.4": [8],
    "6.2": [17, 16.8e9, 16.777216, 16.4], "6.3": ["No, longer"], "7.5": ["a batch of 64"]}


def spellings(answer):
    """The same in Python and in words."""
    if isinstance(answer, bool):
        return [answer, *{True: ("yes", "Yes", "y"), False: ("no", "No", "n")}[answer]]
    if isinstance(answer, str):
        names = answer.split(", ")
        return [answer, names, {*names}, "".join(names).lower(), " and ".join(names)]
    if isinstance(answer, list):
        words = [*map(str, answer)]
        return [answer, torch.tensor(answer), f"{answer}", " ".join(words), " and ".join(words)]
    words = [lesson.WORDS[answer]] if answer in range(13) else []
    return [answer, float(answer), f"{answer:,}", f"{answer} rows", f"2 x 3 = {answer}", *words]


def test_the_notebooks_ask_all_questions_in_order_and_give_no_answer_away():
    asked = []
    for name in NAMES:
        _, cells = read(name)
        text = " ".join(cell.source + str(cell.get("outputs", "")) for cell in cells)
        assert not [number for number, it in ASKED.items() if it["why"] in text]
        for cell in code(cells):
            if found := NUMBER.search(cell.source):
                asked.append(found[1])
                assert "guess=...)" in cell.source
                assert text_of(cell).endswith("Replace ... by your answer, then run the cell.\n")
            if "folded()" in cell.source or "@exercise" in cell.source:   # closed, and last
                *said, output = cell.outputs
                assert output.data["text/html"].startswith("<details><summary>")
                assert len(said) == ("@exercise" in cell.source)
    assert asked == [*ASKED]


@pytest.mark.parametrize("number", ASKED)
def test_no_right_answer_is_refused_and_a_wrong_one_hears_of_its_mistake(number):
    it = ASKED[number]
    for guess in spellings(it["answer"]) + ALSO.get(number, []):
        assert lesson.reply(it, guess, set()) == f"Right. {it['why']}", guess
    for value, sentence in it["wrong"]:
        missed, shown = set(), value if value != "" else "none"
        for _ in range(2):   # the same miss is no second one
            assert lesson.reply(it, shown, missed) == f"You say {shown}. {sentence} Try once more."
        second = lesson.reply(it, "something else", missed)
        assert second.endswith(it["why"]) and "The answer is " in second
    assert len(it["wrong"]) >= 2 or it["answer"] in (True, False)
    for guess in "who knows", "17 to 4321":
        assert lesson.reply(it, guess, set()) == f"You say {guess}. {it['hint']} Try once more."


# --- exercises ------------------------------------------------------------------------------------

def tried(name, answer, capsys):
    """What an exercise prints about this code, in its notebook after the first cell; then ours."""
    cells = next(cells for cells in map(code, SOURCES.values())
                 if any(f"def {name}(" in cell.source for cell in cells))
    scope = {}
    exec(cells[0].source, scope)
    capsys.readouterr()
    text = f"@exercise\n{answer.lstrip()}"
    linecache.cache["<a cell>"] = len(text), None, text.splitlines(True), "<a cell>"
    with patch.object(lesson, "display") as display:   # there is no notebook to show it in
        exec(compile(text, "<a cell>", "exec"), scope)
    assert display.call_args[0][0]["text/plain"] == TAUGHT[name]["code"].lstrip()
    assert scope[name].__code__.co_filename == "<a cell>"   # the reader may go on to call it
    return capsys.readouterr().out


@pytest.mark.parametrize("name", TAUGHT)
def test_an_exercise_accepts_our_answer_and_names_the_usual_mistakes(name, capsys):
    ours = TAUGHT[name]["code"]
    head = re.search(rf"def {name}\(.*\):\n    ", ours).group(0)
    assert tried(name, ours, capsys) == f"{name}: right.\n"
    for blank in "...", "x = 1\n    y = ...   # a comment":
        said = tried(name, head + blank, capsys)
        assert said == f"{name}: replace ... by your code, then run the cell.\n"
    assert tried(name, head + "pass", capsys).startswith(f"{name}: not yet. ")
    fails = "x = torch.ones(5)\n    torch.nn.Linear(2, 3)(x)"   # torch raises the error
    said = tried(name, head + fails, capsys)
    assert said.startswith(f"{name}: not yet. line 4, torch.nn.Linear(2, 3)(x): RuntimeError: ")
    for old, new, sentence in TAUGHT[name]["mistakes"]:
        assert old in ours
        said = tried(name, ours.replace(old, new), capsys)
        assert said.startswith(f"{name}: not yet. ") and said.endswith(f" {sentence}\n"), said


@pytest.mark.parametrize("name, old, new, sentence", [
    ("causal_rule", "torch.arange(S - T, S)", "torch.arange(T)",
     "position 4) does not see positions 1, 2, 3, 4 of request 'A'. Your triangle"),
    ("varlen", "q[:, cu_seqlens[i]:cu_seqlens[i + 1]]",   # its `...` is no blank
     "q[..., cu_seqlens[i]:cu_seqlens[i + 1], :]", "right."),
    ("varlen", "head(mine, keys, values)",   # without `head`, it is judged by what it returns
     "(mine @ keys.mT / mine.size(2) ** 0.5).masked_fill(~torch.ones(mine.size(1), keys.size(1))."
     "bool().tril(keys.size(1) - mine.size(1)), -torch.inf).softmax(-1) @ values", "right."),
    ("serve", "batch.attend, batch.wanted)", "batch.attend, wanted=batch.wanted)", "right."),
    ("serve", "sample(logits, batch.sampled)", "logits.argmax(-1).tolist()",
     "request 'A': token 0 is not what its own logits and random number give"),
    ("serve", "scheduler.schedule(step)", "[(r, 1) for r in requests[:1]]", "line 12"),
])
def test_an_exercise_says_what_goes_wrong_in_a_run(name, old, new, sentence, capsys):
    ours = TAUGHT[name]["code"]
    assert ours.count(old) == 1 and sentence in tried(name, ours.replace(old, new), capsys)


def test_our_time_of_a_step_is_the_simulators():
    """To 1%, for decode steps of ragged, Llama 2 7B on an A100."""
    it = TAUGHT["step_time"]
    for rows, keys in eval(it["calls"]):
        requests = lesson.letters(2, **{f"r{i}": keys // rows - 1 for i in range(rows)})
        trace = simulate(MODELS["llama-2-7b"], GPUS["a100"], lesson.STAGES["ragged, varlen"],
                         requests, max_batch=rows, token_budget=keys)
        ours = exercises.defined("step_time", it["code"])(rows, keys)
        assert ours == pytest.approx(trace.passes[-1].seconds, rel=0.01)
