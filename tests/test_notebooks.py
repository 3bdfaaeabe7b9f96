"""
Every notebook runs from scratch, prints what is committed, and proves the answers of its questions.
It is committed executed, small, and without a trace of the machine it ran on. A guess is a value of
Python, and known misses are named; an exercise accepts our code and knows the usual mistakes.
"""
import linecache
import math
import os
import re
import subprocess
import sys
import tomllib
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from common import ROOT

from lab.checks.edits import edited, put_in
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
import answers  # noqa: E402
import build  # noqa: E402
import capstone  # noqa: E402
import exercises  # noqa: E402
import lesson  # noqa: E402

ASKED = {number: it for number, it in lesson.QUESTIONS.items() if "answer" in it}
KNOBS, HOLDS = lesson.QUESTIONS["knobs"], lesson.QUESTIONS["holds"]
TAUGHT = {name: it for name, it in lesson.QUESTIONS.items() if "code" in it}
BEGINNERS = tomllib.loads((ROOT / "tests" / "wrong_answers.toml").read_text("utf-8"))
NUMBER = re.compile(r'ask\(\s*"(\d\.\d): ')
SOURCES = {name: jupytext.read(FOLDER / f"{name}.py").cells for name in NAMES}


def read(name):
    """The cells of a committed notebook: those that build.py puts in front; its own."""
    cells = nbformat.read(FOLDER / f"{name}.ipynb", 4).cells
    own = len(cells) - len(SOURCES[name])
    return cells[:own], cells[own:]


def code(cells):
    return [cell for cell in cells if cell.cell_type == "code"]


def text_of(cell):
    """What a cell printed, and the text of its results; pictures are text like <Figure ...>."""
    return "".join(output.get("text") or output.get("data", {}).get("text/plain", "") + "\n"
                   for output in cell.outputs)


def with_proofs(name):
    """
    The code of a committed notebook; behind each question, its answer is computed by `proof`, and
    at the end the figures that its text and the answer to its knob name. Exercises of 08 are handed
    in.
    """
    cells = [nbformat.v4.new_code_cell(
        f"import sys\nsys.path += [{str(ROOT / 'tests')!r}]\nimport answers\nfrom proofs import *")]
    for cell in code(read(name)[1]):
        handed_in = re.search(r"^judge\((\d)", cell.source, re.MULTILINE)
        source = "\n\n".join([
            "from itertools import pairwise\nfrom torch.nn.utils.rnn import pad_sequence\n"
            "from generate_paged import Paged", *map(capstone.ours, [
                place for _, place in capstone.STEPS[int(handed_in[1])][1].values()]),
            cell.source[handed_in.start():]]) if handed_in else cell.source
        same = {} if handed_in or "race()" in source else {"committed": cell}
        cells.append(nbformat.v4.new_code_cell(source, metadata=same))
        if found := NUMBER.search(cell.source):
            it = ASKED[found[1]]
            cells.append(nbformat.v4.new_code_cell(
                f"proved = {it['proof']}\nsaid = answers.reply(answers.QUESTIONS[{found[1]!r}], "
                "proved, set())\nassert said.startswith('Right.'), (proved, said)"))
    if name in KNOBS:
        knob, figures = KNOBS[name]
        cells.append(nbformat.v4.new_code_cell(f"shown = {knob}\nassert shown == {figures}, shown"))
    if name in HOLDS:
        cells.append(nbformat.v4.new_code_cell(f"assert {HOLDS[name]}"))
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
    home = re.search(r"https://github\.com/([^\"]+)", first[-1].source)
    expected = build.front(name, home and home[1]) + SOURCES[name]
    assert [(cell.cell_type, cell.source, cell.metadata) for cell in first + cells] == \
        [(cell.cell_type, cell.source, cell.metadata) for cell in expected]   # folded, too
    for cell in code(cells):
        assert cell.execution_count, f"was not run: {cell.source}"
        assert not [output for output in cell.outputs if output.output_type == "error"
                    or output.get("name") == "stderr"]
    raw = (FOLDER / f"{name}.ipynb").read_text("utf-8")
    assert len(raw) < 500_000 and not [place for place in MACHINES if place in raw]
    links = re.findall(r"\]\(((?!http)[^)#:]+)\)", "".join(
        cell.source for cell in cells if cell.cell_type == "markdown"))
    assert all((FOLDER / target).exists() for target in links)
    assert name == NAMES[-1] or f"{NAMES[NAMES.index(name) + 1]}.ipynb" in links


def test_its_first_cell_finds_the_repository_wherever_the_kernel_starts(tmp_path):
    assert "sys.exit" in build.front("00_tour", None)[0].source
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
    for error, said in [(NameError(name="four"), "Is 'four' defined in a cell above?"),
                        (NameError(name="AC"), "need quotes"),
                        (error_of("guess = 47,063"), "without commas"),
                        (error_of("0.9 * 40 * 2^30"), "^ is not a power"),
                        (error_of("1 +"), ""), (error_of("1 + 'a'"), "")]:
        lesson.explained(shell := Mock(), type(error), error, None)
        shell.showtraceback.assert_called_once()
        printed = capsys.readouterr().out
        assert said in printed and bool(said) == bool(printed)


def error_of(code):
    try:
        exec(code)
    except Exception as error:
        return error


# --- questions ------------------------------------------------------------------------------------

UNREADABLE = "", ", ", (), None, "who knows", "13", {}, max, lesson, math.nan, math.inf, True, 1j


def test_the_notebooks_ask_all_questions_in_order_and_give_no_answer_away():
    asked = []
    for name in NAMES:
        _, cells = read(name)
        text = " ".join(cell.source + str(cell.get("outputs", "")) for cell in cells)
        assert not [number for number, it in ASKED.items() if it["why"] in text]
        for cell in code(cells):
            if found := NUMBER.search(cell.source):
                asked.append(found[1])
                assert "guess=...)" in cell.source and "def " not in cell.source
                assert text_of(cell).endswith("Replace ... by your answer, then run the cell.\n")
            if "folded()" in cell.source or "@exercise" in cell.source:   # closed, and last
                *said, output = cell.outputs
                assert output.data["text/html"].startswith("<details><summary>")
                assert len(said) == ("@exercise" in cell.source)
    assert asked == [*ASKED]


def replies(it, *guesses):
    missed = set()
    return [answers.reply(it, guess, missed) for guess in guesses]


def misses(it):
    return [(wrong, sentence) for *wrongs, sentence in it["wrong"] for wrong in wrongs]


def test_two_misses_get_a_hint_each_and_the_third_gets_the_answer():
    it = ASKED["2.4"]
    first, second = it["hints"]
    assert replies(it, 98, 98.0, 97, 98, 96, 13) == [
        f"{first} Try again."] * 2 + [f"{second} Try again."] * 2 + [
        f"No. The answer is 13. {it['why']}", f"Right. {it['why']}"]


def in_other_units(number, it):
    """A size in each unit, a large count in thousands: a small one in them is another count."""
    if "unit" in it:
        return [number * answers.SIZES[it["unit"]] / size for size in answers.SIZES.values()]
    return [number / 1e3] if number >= 10_000 else []


def is_right(number, it):
    """Whether a size is right in some unit."""
    sizes = [number * size / answers.SIZES[it["unit"]] for size in answers.SIZES.values()]
    return any(abs(size / it["answer"] - 1) <= it["within"] for size in sizes)


@pytest.mark.parametrize("number", ASKED)
def test_a_known_miss_is_named_unrounded_and_in_other_units_too(number):
    it = ASKED[number]
    assert replies(it, it["answer"]) == [f"Right. {it['why']}"]
    assert len({str(answers.value_of(wrong, it)) for wrong, _ in misses(it)}) >= 4
    sentences = [sentence for _, sentence in misses(it)]
    for wrong, sentence in misses(it):
        others = [each for each, _ in misses(it) if each != wrong][:2]
        assert replies(it, wrong, wrong) == [f"{sentence} Try again."] * 2   # the same: one miss
        said = replies(it, *others, wrong)[2]
        assert said.startswith(f"{sentence} The answer is ") and said.endswith(it["why"])
        if isinstance(wrong, (int, float)):
            assert replies(it, 1.0004 * wrong) == [f"{sentence} Try again."]
            for each in in_other_units(wrong, it):   # it may be another miss, or right in MiB
                reply = replies(it, each)[0].removesuffix(" Try again.")
                assert reply in sentences or reply.startswith("Right in") and is_right(each, it)


@pytest.mark.parametrize("number", ASKED)
def test_what_cannot_be_read_costs_no_attempt_and_the_form_wanted_is_no_hint(number):
    it = ASKED[number]
    for guess in *UNREADABLE, *(["A", [13, 14]] if isinstance(it["answer"], (int, float)) else
                                ["X", [1, "3"], [[1]], *[[1]] * it.get("ordered", False)]):
        assert re.fullmatch("Write .*, such as .* That was no attempt.", *replies(it, guess)), guess
    example = eval(re.search(r'such as ("X Y"|\[[^]]*]|99)', answers.form(it))[1])
    assert example not in (it["answer"], *(wrong for wrong, _ in misses(it)))


@pytest.mark.parametrize("number, guess, said", [
    ("2.5", "D, F", "Right."), ("2.5", "fd", "Right."), ("2.5", ["D", "F"], "Right."),
    ("1.3", [], "Right."), ("1.3", "none", "Right."), ("3.3", np.array([10, 0]), "Right."),
    ("6.1", [0.98, 2.05], "Right."),
    ("1.1", [6, 5, 4, 3, 3], "Right."), ("1.1", range(3, 7), "Right."), ("5.7", [2.0], "Right."),
    ("2.4", torch.tensor(13), "Right."), ("2.4", np.float32(13), "Right."),
    ("7.5", torch.tensor([8, 8]), "Right."), ("1.4", 69, "Right."), ("6.2", 17, "Right."),
    ("1.4", 64, "Right in GiB, but the question asks for GB."), ("1.4", 2**36, "Right in bytes"),
    ("7.1", 131, "Right in KB"), ("7.1", 0.125, "Right in MiB"), ("7.2", 47, "Right in thousands"),
    ("1.4", 34, "That is one of the two"), ("1.4", 32, "That is one of the two"),   # of GiB
    ("6.2", 524, "That is one request"), ("7.3", 11.7687, "That rounds up, or not at all"),
])
def test_a_guess_is_a_value_of_python_in_any_unit(number, guess, said):
    reply = answers.reply(ASKED[number], guess, missed := set())
    assert reply.startswith(said)
    assert reply.endswith("That was no attempt.") == said.startswith("Right in")
    assert bool(missed) == said.startswith("That")


def test_each_question_has_answers_of_beginners():
    assert [*BEGINNERS] == [*ASKED]   # in order


@pytest.mark.parametrize("number", BEGINNERS)
def test_what_beginners_answer_is_named_and_named_rightly(number):
    for guess, words in BEGINNERS[number]:
        reply = answers.reply(ASKED[number], guess, missed := set())
        if words:
            assert words in reply, guess
        else:
            assert reply == f"{ASKED[number]['hints'][0]} Try again.", guess
        assert bool(missed) == ("no attempt" not in reply), guess


@pytest.mark.parametrize("number", [number for number, it in ASKED.items()
                                    if isinstance(it["answer"], (int, float))])
def test_a_number_that_is_near_to_no_known_miss_gets_a_hint_and_no_reason(number):
    """A reason reaches as far as rounding does, 1%, or one and a half times what is asked for."""
    it = ASKED[number]
    reach, known = max(0.01, 1.5 * it.get("within", 0)), [it["answer"], *(w for w, _ in misses(it))]
    units = [size / answers.SIZES.get(it.get("unit"), 1) for size in answers.SIZES.values()]
    factors = [1, 1e3, 1e-3, *(units if it.get("unit") in answers.SIZES else [])]
    tried = 0
    for wrong in filter(None, known):
        for guess in (1 - 1.2 * reach) * wrong, (1 + 1.2 * reach) * wrong:
            is_near = any(abs(guess * factor / value - 1) <= reach
                          for factor in factors for value in known if value)
            if not is_near:
                tried += 1
                assert replies(it, guess) == [f"{it['hints'][0]} Try again."], guess
    assert tried


@pytest.mark.parametrize("number, guess, first", [
    ("1.1", 4, "Is that a count? Write a list"), ("1.3", 0, "Is that a count? Write a list"),
    ("5.7", 2, "Is that a count? Write a list"), ("7.5", 8, "Write a list of 2 numbers"),
    ("1.2", (4, 900), "A comma makes two numbers of one. Write a number")])
def test_what_cannot_be_read_is_told_what_it_may_mean(number, guess, first):
    reply = answers.reply(ASKED[number], guess, missed := set())
    assert reply.startswith(first) and reply.endswith("That was no attempt.") and not missed


@pytest.mark.parametrize("call, said", [
    ("guess=70^2)", f"{answers.NO_POWER} That was no attempt.\n"),
    ("\n    guess=7 * (70^2))", f"{answers.NO_POWER} That was no attempt.\n"),
    ("guess=70**2)   # 70^2", "Right."), ("guess=68); 70^2", "In Python, 70^2 is 68"),
    ("guess=...)", "Replace ... by your answer")])
def test_a_power_with_a_caret_costs_no_attempt(call, said, capsys):
    text = f"answers.ask('1.2: How many?', {call}\n"
    linecache.cache["<a cell>"] = len(text), None, text.splitlines(True), "<a cell>"
    with patch.dict(answers.MISSED, clear=True):
        exec(compile(text, "<a cell>", "exec"))
        assert bool(answers.MISSED.get("1.2")) == ("68" in call)
    assert capsys.readouterr().out.startswith(f"Question 1.2: How many?\n{said}")


@pytest.mark.parametrize("name", KNOBS)
def test_the_answer_to_a_knob_is_folded_and_names_its_figures(name):
    text = "\n".join(cell.source for cell in SOURCES[name] if cell.cell_type == "markdown")
    answer = re.search(r"Turn this knob.*?<details>(.*?)</details>", text, re.DOTALL)[1]
    assert [n for n in KNOBS[name][1] if not re.search(rf"(?<![\d.,]){n:,}(?![\d])", answer)] == []


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
    assert "raises RuntimeError: " in said
    assert "(this cell, line 4: torch.nn.Linear(2, 3)(x))" in said
    for mistake in exercises.OWN_MISTAKES:
        if mistake.function == name:   # the sentence comes first
            said = tried(name, edited(ours, [(old, new) for _, old, new in mistake.edits]), capsys)
            assert said.startswith(f"{name}: not yet. {mistake.sentence} {name}, with "), said


def test_a_list_of_mistakes_names_exercises_that_there_are():
    assert {mistake.function for mistake in exercises.OWN_MISTAKES} <= {*TAUGHT}
    assert {mistake.function for mistake in exercises.OWN_MISTAKES} | {*exercises.IN_THE_KIT} == {
        *TAUGHT}


@pytest.mark.parametrize("name, not_seen", [
    ("free", []), ("row_mask", ["as if the mask were on the CPU"]),   # it is always there
    ("varlen", ["as if all scores were computed, and most of them hidden"])])   # see below
def test_an_exercise_that_the_kit_has_too_knows_the_kits_mistakes(name, not_seen):
    ours, unseen = exercises.IN_THE_KIT[name][-1], []
    assert exercises.fault_of(ours, **TAUGHT[name]) is None   # as its code in questions.toml
    for mistake in exercises.mistakes_of_the_kit(name):
        wrong = put_in(mistake.edits, kept={})(ours)   # a decorator
        said = exercises.fault_of(wrong, **TAUGHT[name])
        if said is None or not said.startswith("It is as if "):
            unseen.append(mistake.sentence)
        else:
            assert said.startswith(f"It is {mistake.sentence}. {name}, with "), said
    assert unseen == not_seen


@pytest.mark.parametrize("name, old, new, sentence", [
    ("causal_rule", "key <= query", "1 / 0", "ZeroDivisionError: division by zero (this cell,"),
    ("causal_rule", "    query", "    while True:\n        pass\n    query", "it does not end"),
    ("step_time", "0.00075 + 0.000025 * rows", "0.000775", "25 µs besides: one for each row."),
    ("step_time", "(2 * PARAMETERS + kv_tokens * 512 * 1024) / (0.85 * BANDWIDTH)",
     "0.007616 + kv_tokens * 512 * 1024 / (0.85 * BANDWIDTH)", "right."),   # as the text rounds
    ("step_time", "(2 * PARAMETERS + kv_tokens * 512 * 1024) / (0.85 * BANDWIDTH)",
     "0.007616 + kv_tokens * 0.302e-6", "not yet. step_time, with rows 16"),   # has no known reason
    ("varlen", "q[:, cu_seqlens[i]:cu_seqlens[i + 1]]",   # its `...` is no blank
     "q[..., cu_seqlens[i]:cu_seqlens[i + 1], :]", "right."),
    ("varlen", "head(mine, keys, values)",   # without `head`, it is judged by what it returns
     "(mine @ keys.mT / mine.size(2) ** 0.5).masked_fill(~torch.ones(mine.size(1), keys.size(1))."
     "bool().tril(keys.size(1) - mine.size(1)), -torch.inf).softmax(-1) @ values", "right."),
    ("varlen", "    out = []", """    keys, values = (torch.cat(t, 1) for t in zip(*caches))
    see = torch.block_diag(*(torch.ones(b - a, c[0].size(1)).tril(c[0].size(1) - b + a)
                             for a, b, c in zip(cu_seqlens, cu_seqlens[1:], caches))).bool()
    return (q @ keys.mT / q.size(2)**.5).masked_fill(~see, -torch.inf).softmax(-1) @ values
    out = []""", "times our multiplications"),
    ("own_positions", "columns - pads[:, None]", "(columns - pads[:, None]).clamp(0)", "right."),
    ("own_positions", "columns - pads[:, None]", "columns.numpy() - pads.numpy()[:, None]",
     "right."),
    ("step_time", "math.hypot(arithmetic, reading)",
     "torch.tensor([arithmetic, reading]).norm()", "right."),
    ("step_time", "512 * 1024", "512 * 1000", "expected"),
    ("causal_rule", "return", "see =", "a `return` missing"),
    ("causal_rule", "(T, S)", "(T)", "It is called with 2 arguments: def causal_rule(T, S)."),
    ("causal_rule", "key <= query", "torch.ones(T, S).bool().tril(T - S)", "The diagonal is S - T"),
    ("own_positions", "return", "positions =", "It returns nothing. own_positions, with "),
    ("requests_that_fit", "max((pages - common) // own, 0)",   # -9 for 8B in 16 GiB
     "(pages - common) // own if memory > 2 * parameters else 0", "it returns: -9.0, expected 0"),
    ("requests_that_fit", "max((pages - common) // own, 0)",   # fewer pages than common ones
     "(pages - common) // own if room > 0 else 0", "it returns: -6.0, expected 0"),
    ("row_mask", "return mask", "return mask and mask", "took tensors: write &, | and ~"),
    ("causal_rule", "return key <= query", "return torch.ones(T, S).tril()", "holds booleans"),
    ("free", "    for page in reversed(table):", """    if table[1:]:
        free(table[1:], ref_count, free_queue, hash_of)
    for page in table[:1]:""", "right."),
    ("requests_that_fit", "(pages - common) // own", "int((pages - common) // own)", "right."),
    ("causal_rule", "torch.arange(S - T, S)", "torch.arange(T).add(min(S - T, 4))", "T 5, S 12"),
    ("own_positions", "pads[:, None]", "pads.view(3, 1)", "columns [4, 5]"),   # other sizes
    ("row_mask", "P - start:P", "4 - start:4", "P 6"),
    ("row_mask", "mask[P - start:P]", "mask[:P][-start:]", "-0 is 0, so it is all of the past"),
    ("row_mask", "return mask", "return ~mask", "as if True meant hidden"),
    ("row_mask", "mask[P + T - n:]", "mask[P:P + T]", "the published mask"),
    ("varlen", "dim=-2", "dim=0", "as if outputs were joined along the heads"),
    ("varlen", "head(mine, keys, values)", "head(q, keys, values)", "given the queries of all"),
    ("varlen", "cu_seqlens[i]:cu_seqlens[i + 1]", "sum(cu_seqlens[:i + 1]):sum(cu_seqlens[:i + 2])",
     "it is cumulative already"),
    ("varlen", "    out = []", "    return head(q, *(torch.cat(t, dim=-2) for t in zip(*caches)))",
     "one call would do for all"),
    ("free", "ref_count[page] -= 1", "ref_count[page] = 0", "count down by one"),
    ("free", "        ref_count[page] -= 1\n", "", "as if a page were still counted"),
    ("free", "reversed(table)", "table", "as if the first page of a table were freed first"),
    ("varlen", "enumerate(caches)", "enumerate(caches[:2])", "cu_seqlens [0, 1, 3, 8]"),
    ("free", "reversed(table)", "sorted(reversed(table), key=lambda page: page not in hash_of and "
     "page + 1)", "becomes: [2, 0, 5, 1, 3], expected [0, 2, 5, 1, 3]"),
    ("step_time", "rows + 85", "rows + 86", "expected"),
    ("requests_that_fit", "head_size * 2)", "128 * 2)", "head_size 64"),
])
def test_an_exercise_accepts_other_styles_and_says_what_is_wrong(name, old, new, sentence, capsys):
    assert sentence in tried(name, edited(TAUGHT[name]["code"], [(old, new)]), capsys)


def test_prints_in_an_exercise_are_held_back_but_for_the_call_that_goes_wrong(capsys):
    ours = TAUGHT["varlen"]["code"]
    talks = edited(ours, [("    out = []", "    print('caches:', len(caches))\n    out = []")])
    assert tried("varlen", talks, capsys) == "varlen: right.\n"
    wrong = edited(talks, [("torch.cat(out, dim=-2)", "torch.cat(out[::-1], dim=-2)")])
    said = tried("varlen", wrong, capsys)
    assert re.search(r"In this case your code prints:\n  caches: \d\n$", said), said


def test_our_calculations_are_the_simulators():
    """A step's time to 1%, for decode steps of ragged; and the memory's room."""
    it = TAUGHT["step_time"]
    for rows, keys in eval(it["calls"]):
        requests = lesson.letters(2, **{f"r{i}": keys // rows - 1 for i in range(rows)})
        if keys // rows < MODELS["llama-2-7b"].block_size:
            trace = lesson.on_a100("ragged, varlen", requests, max_batch=rows, token_budget=keys)
            ours = exercises.solution("step_time")(rows, keys)
            assert ours == pytest.approx(trace.passes[-1].seconds, rel=0.01)
    fit = exercises.solution("requests_that_fit")(80 * 2**30, 6.74e9, 32, 32, 128, 16, 0)
    assert fit * 16 == pytest.approx(MODELS["llama-2-7b"].room(GPUS["a100"]), rel=0.005)
