"""
Every notebook runs from scratch and prints what is committed. It is committed executed, small, and
without a trace of the machine it ran on. Its questions have the answers that answers.py explains,
which it does not give away, and its exercises accept ours. Each claim of the sources is met once.
"""
import inspect
import re
import sys

import pytest
import torch
from common import ROOT, quick

from experiments import results

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
jupytext = pytest.importorskip("jupytext")
pytest.importorskip("ipykernel")
FOLDER = ROOT / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("[0-9]*.py"))
EACH = pytest.mark.parametrize("name", NAMES)
MACHINES = ("/home/", "/Users/", "/root/", "/tmp/", str(ROOT))
CLAIMS = ([f"H{i}" for i in range(1, 13)] + [f"R{i}" for i in range(1, 8)]
          + [f"P{i}" for i in range(1, 11)] + [f"I{i}" for i in range(1, 9)])
CLAIM = re.compile(r"\*\*Claim ([HRPI]\d+)\.\*\*")

sys.path.insert(0, str(FOLDER))
import answers  # noqa: E402 (they lie beside the notebooks)
import build  # noqa: E402
import lesson  # noqa: E402


def source(name):
    return jupytext.read(FOLDER / f"{name}.py")


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", 4)


def run(name):
    """
    The notebook as a new kernel leaves it. In it each question is asked again, with the right guess
    and with a wrong one, in cells that know what must be said.
    """
    notebook = read(name)
    for i, cell in reversed(code_cells(notebook).items()):
        for number in NUMBER.findall(cell.source):
            asked = cell.source[cell.source.index("ask("):]
            for guess, said in (("something else", "You say something else. It is "),
                                (RIGHT[number], "Right. It is ")):
                notebook.cells.insert(i + 1, nbformat.v4.new_code_cell(
                    asked.replace("guess=...", f"guess={guess!r}"), metadata={"said": said}))
    return nbclient.NotebookClient(
        notebook, timeout=3000, startup_timeout=600, kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}}).execute()


def code_cells(notebook):
    """{number in the notebook: cell}"""
    return {i: cell for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"}


def text_of(cell):
    """What a cell printed, and the text of its results; pictures are text like <Figure ...>."""
    return "".join(output.get("text") or output.get("data", {}).get("text/plain", "") + "\n"
                   for output in cell.outputs)


@pytest.mark.parametrize("name", quick(NAMES, [NAMES[0], NAMES[3]]))
def test_it_runs_from_scratch_prints_what_is_committed_and_knows_the_answers(name):
    committed, fresh = code_cells(read(name)).values(), code_cells(run(name)).values()
    for cell, new in zip(committed, [cell for cell in fresh if "said" not in cell.metadata],
                         strict=True):
        if "machine" not in cell.metadata.get("tags", []):   # it depends on where it runs
            assert text_of(cell) == text_of(new), f"{name}: {cell.source}"
    for cell in fresh:
        if said := cell.metadata.get("said"):
            last = text_of(cell).strip().splitlines()[-1]
            assert last.startswith(said) and last.endswith((".", ".)")), cell.source


@EACH
def test_it_is_built_from_its_source_knows_no_machine_and_leads_to_files(name):
    """`python notebooks/build.py` writes an .ipynb from the .py beside it."""
    notebook = read(name)
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == \
        [(cell.cell_type, cell.source) for cell in source(name).cells]
    for cell in code_cells(notebook).values():
        assert cell.execution_count, f"was not run: {cell.source}"
        assert not [output for output in cell.outputs if output.output_type == "error"
                    or output.get("name") == "stderr"]
    raw = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert len(raw) < 500_000 and not [place for place in MACHINES if place in raw]
    links = re.findall(r"\]\(([^)#:]+)\)", "".join(
        cell.source for cell in notebook.cells if cell.cell_type == "markdown"))
    assert all((FOLDER / target).exists() for target in links)
    assert name == NAMES[-1] or f"{NAMES[NAMES.index(name) + 1]}.ipynb" in links


# --- questions ------------------------------------------------------------------------------------

MEASURED = results.load("bench")[0]
RIGHT = {
    "0.1": "H",
    "1.1": [3, 4, 5, 6], "1.2": 4900, "1.3": [6], "1.4": 68.7,
    "2.1": "A", "2.2": "A", "2.3": 13, "2.4": "D, F",
    "3.1": ["A3 B2 C3", "A1 B1 C6", "A1 B1 C3"], "3.2": 6, "3.3": 0, "3.4": 45, "3.5": 1393,
    "4.1": 4, "4.2": "A, C, E", "4.3": 3600, "4.4": 1400, "4.5": 50_000,
    "5.1": 4, "5.2": 22, "5.3": 16, "5.4": 16,
    "6.1": int(2 * MEASURED["peak"] / MEASURED["bandwidth"]) + 1,
    "6.2": 707.8, "6.3": "no", "6.4": [8, 8], "6.5": 0,
}
NUMBER = re.compile(r'ask\(\s*"(\d\.\d): ')


def test_the_notebooks_ask_all_questions_in_order():
    asked = [number for name in NAMES for cell in source(name).cells
             for number in NUMBER.findall(cell.source)]
    assert asked == list(RIGHT) == list(answers.ANSWERS)


@EACH
def test_no_answer_stands_in_it_before_the_reader_has_answered(name):
    """Answers and reasons are in answers.py; what shows one in another way is folded."""
    notebook = read(name)
    text = " ".join(cell.source + str(cell.get("outputs", "")) for cell in notebook.cells)
    assert not [number for number, (_, why) in answers.ANSWERS.items() if why in text]
    for cell in code_cells(notebook).values():
        if NUMBER.search(cell.source):
            assert "guess=...)" in cell.source
            assert text_of(cell).endswith("Replace ... by your answer, then run the cell.\n")
        if "folded()" in cell.source:   # closed, and nothing beside it
            output, = cell.outputs
            assert set(output.data) == {"text/html", "text/plain"}
            assert output.data["text/html"].startswith("<details><summary>")


def test_folded_keeps_what_is_printed_and_drawn(monkeypatch, capsys):
    import IPython.display
    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda data, raw: shown.append(data))
    with lesson.folded():
        print("a < b")
        lesson.pyplot().plot([1, 2])
    assert capsys.readouterr().out == "" and not lesson.pyplot().get_fignums()
    assert shown[0]["text/plain"] == "a < b\n"
    html = shown[0]["text/html"]
    assert "<pre>a &lt; b\n</pre>" in html and "data:image/png;base64," in html


# --- its devices ----------------------------------------------------------------------------------

@pytest.mark.parametrize("remote", ["https://github.com/ann/some.repo/",
                                    "git@github.com:ann/some.repo.git"])
def test_links_open_every_notebook_in_colab_and_binder(remote):
    text = build.links(remote, "main")
    assert "https://mybinder.org/v2/gh/ann/some.repo/main?urlpath=lab/tree/notebooks" in text
    colab = "https://colab.research.google.com/github/ann/some.repo/blob/main/notebooks"
    assert all(f"({colab}/{name}.ipynb)" in text for name in NAMES)
    with pytest.raises(ValueError, match="the remote 'https://example.org/a/b' is not on GitHub"):
        build.links("https://example.org/a/b", "main")


@pytest.mark.parametrize("right, guesses, wrong", [
    (12, [12, 12.0, "12"], [11, "twelve", None, [12]]),
    (1600, ["1,600"], [160]),
    (68.72, [68.7, 69, "68.7"], [72, "?"]),
    ("A, C", ["A, C", "C A", ["C", "A"], "a,c"], ["A", "A, B, C"]),
    ([3, 4], [[3, 4], (3, 4), ["3", "4"]], [[4, 3], [3], 3]),
])
def test_a_guess_is_judged_by_what_it_says(right, guesses, wrong):
    assert all(lesson.same(guess, right) for guess in guesses)
    assert not any(lesson.same(guess, right) for guess in wrong)


def test_source_prints_a_whole_short_function_without_its_docstring(capsys):
    lesson.source(lesson.Rectangle.attend)
    printed = capsys.readouterr().out
    assert printed.startswith("# generate_dynamic.py\ndef attend(self, layer, q, k, v):")
    assert printed.endswith("return out\n") and '"""' not in printed
    with pytest.raises(ValueError, match="Head.forward has .* at most 12"):
        lesson.source(lesson.Head.forward)


def test_show_draws_a_run_as_a_page():
    requests = lesson.letters(A=4, B=2)
    trace = lesson.run("interleaved", requests, token_budget=4)
    frame = lesson.show(trace)._repr_html_()
    assert frame.startswith("<iframe srcdoc=") and "&quot;token_budget&quot;:4" in frame
    assert trace.recording.wrong == 0 and not requests[0].generated
    with lesson.broken("published mask", show=False):
        wrong = lesson.run("interleaved", requests, token_budget=4)
    both = lesson.show({"right": trace, "wrong": wrong})._repr_html_()   # after the bug has gone
    assert wrong.recording.wrong > 0 and both.count("&quot;idea&quot;") == 2
    with pytest.raises(ValueError, match="was not recorded"):
        lesson.show(lesson.STAGES["naive"](lesson.model, requests))


# --- exercises ------------------------------------------------------------------------------------

def exercises():
    """{function's name: (our answer, its cell)} from the notebooks themselves."""
    found = {}
    for name in NAMES:
        cells = source(name).cells
        for cell, solution in zip(cells, cells[1:]):
            if "exercise" in cell.metadata.get("tags", []):
                answer = re.search(r"```python\n(.*?)```", solution.source, re.S).group(1)
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
    exec(code, {"torch": torch, "exercise": lesson.exercise})
    return capsys.readouterr().out


@pytest.mark.parametrize("function", EXERCISES)
def test_an_exercise_accepts_our_answer_and_names_what_is_wrong_with_others(function, capsys):
    answer, blank = EXERCISES[function]
    assert tried(answer, capsys) == f"{function}: right.\n"
    assert tried(blank, capsys) == ""
    old, new, fault = WRONG[function]
    assert answer.count(old) == 1
    signature = re.search(rf"def {function}\(.*\):", answer).group(0)
    for code, sentence in ((answer.replace(old, new), fault),
                           (f"@exercise\n{signature}\n    raise KeyError('x')", "KeyError"),
                           (f"@exercise\n{signature}\n    return 'nothing'", "")):
        said = tried(code, capsys)
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
