"""
Builds the executed notebooks from their sources: notebooks/NN_name.py -> notebooks/NN_name.ipynb.

    python notebooks/build.py            all of them
    python notebooks/build.py 00_tour    some of them
    python notebooks/build.py --links    prints links to open them in Colab and Binder

A source is a Python file in jupytext's percent format. The tests run every notebook again and
compare what it prints, except in cells tagged "machine", which depends on where they run.
"""
import re
import subprocess
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


def links(remote, branch):
    """
    Markdown that opens the notebooks of a repository on GitHub in Colab and Binder.

    remote: its address, as git knows it. ValueError if it is not on GitHub
    """
    found = re.fullmatch(r"(?:\w+://)?(?:[^/@]+@)?github\.com[:/]([^/]+/[^/]+?)(?:\.git)?/?",
                         remote)
    if not found:
        raise ValueError(f"the remote {remote!r} is not on GitHub, which Colab and Binder open")
    home = found.group(1)
    colab = f"https://colab.research.google.com/github/{home}/blob/{branch}/notebooks"
    return f"""Binder clones the repository and installs what it needs:
[all notebooks](https://mybinder.org/v2/gh/{home}/{branch}?urlpath=lab/tree/notebooks)

Colab opens one notebook, without the repository. Clone it in a new first cell, then go on:

```
!git clone --branch {branch} https://github.com/{home} repository
%cd repository/notebooks
%pip install -q tiktoken
```

""" + "\n".join(f"- [{name}]({colab}/{name}.ipynb)" for name in names())


def git(*words):
    """What a git command prints."""
    done = subprocess.run(["git", *words], cwd=FOLDER, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"git {' '.join(words)}: {done.stderr.strip()} (the address comes from "
                         "git remote add origin https://github.com/OWNER/NAME)")
    return done.stdout.strip()


def names():
    return sorted(path.stem for path in FOLDER.glob("[0-9]*.py"))


if __name__ == "__main__":
    if sys.argv[1:] == ["--links"]:
        try:
            print(links(git("remote", "get-url", "origin"), git("branch", "--show-current")))
            sys.exit()
        except ValueError as error:
            sys.exit(f"notebooks/build.py --links: {error}")
    for name in sys.argv[1:] or names():
        nbformat.write(execute(notebook_of(FOLDER / f"{name}.py")), FOLDER / f"{name}.ipynb")
        print(f"built {name}.ipynb")
