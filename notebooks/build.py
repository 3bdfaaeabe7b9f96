"""
Builds the executed notebooks from their sources: notebooks/NN_name.py -> notebooks/NN_name.ipynb.

    python notebooks/build.py            all of them
    python notebooks/build.py 00_tour    some of them

A source is a Python file in jupytext's percent format. The tests run every notebook again and
compare what it prints, except in cells tagged "seconds", whose times differ from run to run.
"""
import sys
from pathlib import Path

import jupytext
import nbclient
import nbformat

FOLDER = Path(__file__).parent


def notebook_of(source):
    """The notebook of a .py source, not yet executed; cells have the same ids every time."""
    notebook = jupytext.read(source)
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python",
                                        "name": "python3"}}
    return notebook


def execute(notebook):
    """Runs it from scratch, in its folder; raises an error if a cell does."""
    where = {"metadata": {"path": str(FOLDER)}}
    nbclient.NotebookClient(notebook, kernel_name="python3", resources=where).execute()
    notebook.metadata.pop("language_info", None)   # the Python version it ran on
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)       # the times at which it ran
    return notebook


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("[0-9]*.py")):
        nbformat.write(execute(notebook_of(FOLDER / f"{name}.py")), FOLDER / f"{name}.ipynb")
        print(f"built {name}.ipynb")
