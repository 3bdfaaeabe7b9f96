"""
Builds the executed notebooks from their sources: notebooks/NN_name.py -> notebooks/NN_name.ipynb.

    python notebooks/build.py            all of them
    python notebooks/build.py 00_tour    some of them
    python notebooks/build.py --badges   only renews the first cells, and runs nothing

A source is a Python file in jupytext's percent format. In front of it come badges that open it in
Colab and Binder, if the git remote `origin` is on GitHub, and a cell that finds the repository.
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
BADGES = """\
[![Colab](https://colab.research.google.com/assets/colab-badge.svg)]\
(https://colab.research.google.com/github/{home}/blob/HEAD/notebooks/{name}.ipynb) \
[![Binder](https://mybinder.org/badge_logo.svg)]\
(https://mybinder.org/v2/gh/{home}/HEAD?urlpath=lab/tree/notebooks/{name}.ipynb)"""
FIND = """\
# Run this cell first: it finds the repository, or fetches it if it is not here.
import subprocess
import sys
from pathlib import Path

near = [Path.cwd(), *Path.cwd().parents, *Path.cwd().glob("*/"), Path("nanoBatch")]
root = next((path for path in near if (path / "notebooks" / "lesson.py").exists()), near[-1])
if not root.exists():
    subprocess.run(["git", "clone", "-q", "--depth", "1", "{address}", root], check=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "tiktoken"], check=True)
sys.path.insert(0, str(root / "notebooks"))"""


def home():
    """OWNER/NAME of the remote `origin`, if it is on GitHub; else None."""
    remote = subprocess.run(["git", "remote", "get-url", "origin"], cwd=FOLDER,
                            capture_output=True, text=True).stdout.strip()
    found = re.fullmatch(r".*github\.com[:/]([^/]+/[^/]+?)(?:\.git)?/?", remote)
    return found and found[1]


def front(name, home):
    """The cells in front of a notebook's own. home: see above"""
    find = new_code_cell(FIND.format(address=f"https://github.com/{home or 'OWNER/NAME'}"))
    find.metadata["jupyter"] = {"source_hidden": True}
    return [*([new_markdown_cell(BADGES.format(home=home, name=name))] if home else []), find]


def notebook_of(name, home=None):
    """The notebook of a source, not yet executed; cells have the same ids every time."""
    notebook = jupytext.read(FOLDER / f"{name}.py")
    notebook.cells = front(name, home) + notebook.cells
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


def names():
    return sorted(path.stem for path in FOLDER.glob("[0-9]*.py"))


if __name__ == "__main__":
    for name in names() if sys.argv[1:] == ["--badges"] else sys.argv[1:] or names():
        target, built = FOLDER / f"{name}.ipynb", notebook_of(name, home())
        if sys.argv[1:] == ["--badges"]:
            old = nbformat.read(target, 4)
            built.cells[-len(old.cells):] = old.cells
        nbformat.write(execute(built) if sys.argv[1:] != ["--badges"] else built, target)
        print(f"built {name}.ipynb")
