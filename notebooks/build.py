"""
Builds the executed notebooks from their sources: notebooks/NN_name.py -> notebooks/NN_name.ipynb.

    python notebooks/build.py            all of them
    python notebooks/build.py 00_tour    some of them

A source is a Python file in jupytext's percent format. In front of it comes a cell that finds the
repository; if the git remote `origin` is on GitHub, it can fetch it, and Colab gets a badge.
"""
import re
import subprocess
import sys
from pathlib import Path

import jupytext
import nbclient
import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell

FOLDER = Path(__file__).parent
BADGE = """\
[![Colab](https://colab.research.google.com/assets/colab-badge.svg)]\
(https://colab.research.google.com/github/{home}/blob/HEAD/notebooks/{name}.ipynb)"""
FIND = """\
# Run this first. It finds the repository from wherever you are.
import subprocess, sys
from pathlib import Path

near = [Path.cwd(), *Path.cwd().parents, *Path.cwd().glob("*/")]
root = next((path for path in near if (path / "notebooks" / "lesson.py").exists()), None)
if root is None:
    {fetch}
sys.path.insert(0, str(root.resolve() / "notebooks"))"""
FETCH = """\
root = Path("nanoBatch")
    subprocess.run(["git", "clone", "-q", "https://github.com/{home}", root], check=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "tiktoken"], check=True)"""
MISSING = 'sys.exit("Open this notebook in a copy of the repository it belongs to.")'


def front(name, home):
    """The cells in front of a notebook's own. home: OWNER/NAME on GitHub, or None"""
    badge = [new_markdown_cell(BADGE.format(home=home, name=name))] if home else []
    fetch = FETCH.format(home=home) if home else MISSING
    return [*badge, new_code_cell(FIND.format(fetch=fetch))]


def build(name, home):
    """Runs the notebook of a source from scratch, in its folder. An error if a cell raises one."""
    notebook = jupytext.read(FOLDER / f"{name}.py")
    notebook.cells = front(name, home) + notebook.cells
    nbclient.execute(notebook, cwd=FOLDER, record_timing=False, coalesce_streams=True)
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python",
                                        "name": "python3"}}   # not the Python that it ran on
    for i, cell in enumerate(notebook.cells):
        cell.id = f"cell-{i}"   # the same every time
    nbformat.write(notebook, FOLDER / f"{name}.ipynb")
    print(f"built {name}.ipynb")


def home_of_repository():
    """OWNER/NAME of the git remote `origin`, if it is on GitHub; else None."""
    command = ["git", "remote", "get-url", "origin"]
    origin = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True).stdout.strip()
    match = re.fullmatch(r".*github\.com[:/]([^/]+/[^/]+?)(?:\.git)?/?", origin)
    return match and match[1]


if __name__ == "__main__":
    all_names = sorted(path.stem for path in FOLDER.glob("[0-9]*.py"))
    for name in sys.argv[1:] or all_names:
        build(name, home_of_repository())
