"""
The tables of docs/vllm.md, which pair each name of this repository with one of vLLM's.

The first cell of a row lists our names, a later one vLLM's, in the same order, after the file:

    | `Request.page_hashes`, `append` | `v1/request.py`: `block_hashes`, `append_output_token_ids` |

Both names of a pair must exist and be of the same kind: a class, a function, or an attribute. So a
row in which two names have changed places is found whenever the two are of different kinds.
"""
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
DOCUMENT = ROOT / "docs" / "vllm.md"

KINDS = {   # how a name is defined in a file; %s is the name
    "class": r"^ *class %s\b",
    "function": r"^ *(async )?def %s\b",
    "attribute": r"\bself\.%s( =|:)|^    %s: .*="}


class Pair(NamedTuple):
    ours: str     # "Class.name", "name", or a file
    file: str     # in vLLM's folder
    theirs: str


# --- reading the document -------------------------------------------------------------------------

def pairs(text):
    """All pairs of the document's tables. ValueError for a row whose names cannot be paired."""
    found = []
    for line in text.splitlines():
        if line.startswith("| `"):
            found += pairs_of_row(line)
    return found


def pairs_of_row(line):
    cells = [cell.strip() for cell in line.strip(" |").split(" | ")]
    ours = full_names(quoted(cells[0]))
    found = []
    for cell in cells[1:]:
        theirs = names_of_cell(cell)
        if not theirs:
            continue   # prose
        if len(theirs) != len(ours):
            raise ValueError(f"docs/vllm.md: {len(ours)} names beside {len(theirs)} in {line}")
        for our_name, (file, their_name) in zip(ours, theirs):
            found.append(Pair(our_name, file, their_name))
    return found


def names_of_cell(cell):
    """[(file, name), ...] of a cell with vLLM's names; empty for any other cell."""
    found = []
    for part in cell.split("; "):
        match = re.fullmatch(r"`([\w/]+\.py)`: (.*)", part)
        if match is None:
            return []
        file, names = match.groups()
        found += [(file, name) for name in quoted(names)]
    return found


def quoted(text):
    return re.findall(r"`([^`]+)`", text)


def full_names(names):
    """Of `Request.computed`, `todo`: the second is Request's, too."""
    full = []
    owner = ""
    for name in names:
        if "." in name:
            owner = name.split(".")[0]
        is_method = owner and "." not in name
        full.append(f"{owner}.{name}" if is_method else name)
    return full


# --- looking the names up -------------------------------------------------------------------------

def kinds_in(text, name):
    """How a file defines a name: some of KINDS."""
    return {kind for kind, pattern in KINDS.items()
            if re.search(pattern.replace("%s", name), text, re.MULTILINE)}


def our_kinds(name):
    """The kinds of one of our names. Of a file, whatever it may be: all of them."""
    if name.endswith(".py"):
        return set(KINDS) if (ROOT / name).exists() else set()
    owner, _, member = name.rpartition(".")
    kinds = set()
    for path in [*ROOT.glob("*.py"), *ROOT.glob("beyond/*.py"), *ROOT.glob("lab/server/*.py")]:
        text = path.read_text(encoding="utf-8")
        if owner:
            text = class_body(text, owner)
        kinds |= kinds_in(text, member)
    return kinds


def class_body(text, name):
    """The lines of a class; empty if the file has no such class."""
    match = re.search(rf"^class {name}\b.*\n((?: .*\n|\n)*)", text, re.MULTILINE)
    return match.group(1) if match else ""


def unknown_names(vllm, text=None):
    """What is wrong with the pairs of docs/vllm.md, for a vLLM in this folder: in words."""
    if text is None:
        text = DOCUMENT.read_text(encoding="utf-8")
    for pair in pairs(text):
        ours = our_kinds(pair.ours)
        path = vllm / pair.file
        source = path.read_text(encoding="utf-8") if path.exists() else ""
        theirs = kinds_in(source, pair.theirs)
        if not ours:
            yield f"{pair.ours}, which is not here"
        elif not theirs:
            yield f"{pair.theirs} in {pair.file}, which is not there"
        elif not ours & theirs:
            yield (f"{pair.ours} beside {pair.theirs}, but one is {' or '.join(sorted(ours))}, "
                   f"the other {' or '.join(sorted(theirs))}")
