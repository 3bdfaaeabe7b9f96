"""
Every notebook runs from scratch and prints what is committed. It is committed executed, small, and
without a trace of the machine it ran on.
"""
import difflib
from functools import lru_cache
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
MACHINES = ("/home/", "/Users/", "/root/", "/tmp/", str(FOLDER.parent))
TOUR = FOLDER / "00_tour.ipynb"


def read(path):
    return nbformat.read(path, 4)


@lru_cache
def run(path):
    """The notebook as a new kernel leaves it."""
    notebook = read(path)
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3",
                                     resources={"metadata": {"path": str(FOLDER)}})
    return client.execute()


def code_cells(notebook):
    """{number in the notebook: cell}"""
    return {i: cell for i, cell in enumerate(notebook.cells) if cell.cell_type == "code"}


def text_of(cell):
    """What a cell printed, and the text of its results; pictures are text like <Figure ...>."""
    return "".join(output.get("text") or output.get("data", {}).get("text/plain", "") + "\n"
                   for output in cell.outputs)


def holds_seconds(cell):
    """Such cells are tagged: their outputs differ from run to run."""
    return "seconds" in cell.metadata.get("tags", [])


@EACH
def test_it_runs_from_scratch_and_prints_what_is_committed(path):
    committed, fresh = code_cells(read(path)), code_cells(run(path))
    assert committed.keys() == fresh.keys()
    for i, cell in committed.items():
        if holds_seconds(cell):
            continue
        before, after = text_of(cell), text_of(fresh[i])
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "committed",
                                     "this run", lineterm="")
        assert before == after, "\n".join([f"cell {i} of {path.name}:", cell.source, "", *lines])


@EACH
@pytest.mark.parametrize("which", [read, run], ids=["committed", "fresh"])
def test_it_is_executed_and_clean(path, which):
    for i, cell in code_cells(which(path)).items():
        assert cell.execution_count, f"cell {i} was not run: {cell.source}"
        for output in cell.outputs:
            assert output.output_type != "error", f"cell {i}: {output}"
            assert output.get("name") != "stderr", f"cell {i}: {output.text}"


@EACH
def test_it_is_built_from_its_source(path):
    """notebooks/build.py writes an .ipynb from the .py beside it."""
    jupytext = pytest.importorskip("jupytext")
    source = jupytext.read(path.with_suffix(".py"))
    assert [(cell.cell_type, cell.source) for cell in read(path).cells] == \
        [(cell.cell_type, cell.source) for cell in source.cells]


@EACH
def test_it_is_small_and_knows_no_machine(path):
    assert path.stat().st_size < 1_000_000
    raw = path.read_text(encoding="utf-8")
    assert [place for place in MACHINES if place in raw] == []


def test_the_tour_shows_that_all_is_well_and_that_the_broken_one_is_caught():
    for notebook in read(TOUR), run(TOUR):
        text = "".join(text_of(cell) for cell in code_cells(notebook).values())
        assert "8/8 requests identical to unbatched" in text and "WRONG: request 'A'" in text
