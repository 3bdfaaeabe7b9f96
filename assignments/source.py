"""
A set's source code, by the names of functions: blanked, with a mistake in it, or pasted behind a
student's. A function is named "file.py:Class.method" or "file.py:function".
"""
import ast
import importlib.util
import random
import sys
import textwrap
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.append(str(ROOT))
from lab.checks.edits import EditError, edited  # noqa: E402, F401 (for grade.py and make.py, too)
from lab.checks.traps import edits_of  # noqa: E402

SETS = sorted(int(path.name[3:]) for path in HERE.glob("set?"))
# what every set's code imports
SHIPPED = (*(f"toolbox/{path.name}" for path in sorted((ROOT / "toolbox").glob("*.py"))),
           "beyond/__init__.py")


class KitError(Exception):
    """The kit itself is wrong: a mistake that no case shows."""


@cache
def drawn(number):
    """A set's cases.py."""
    spec = importlib.util.spec_from_file_location(f"set{number}", HERE / f"set{number}/cases.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def mistakes_of(number):
    """
    [(part, sentence, [(function, old, new), ...]), ...] of mistakes.txt. A paragraph is a sentence,
    and an edit of our source as in a diff; where no line goes, a statement comes first in the
    function. Or it names a known bug of lab/checks/traps.py, whose edits stand there.
    """
    found, place = [], None
    for paragraph in (HERE / f"set{number}/mistakes.txt").read_text("utf-8").split("\n\n"):
        head, *edit = paragraph.strip("\n").split("\n")
        if head.startswith("@@ "):
            place = head.split()[1:]
        elif edit[0].startswith("trap: "):
            found.append((place[0], head, edits_of(edit[0].removeprefix("trap: "))))
        else:
            texts = ("\n".join(line[1:] for line in edit if line[0] == sign) for sign in "-+")
            found.append((place[0], head, [(place[1], *texts)]))
    return found


def limits(number):
    """Of a part: seconds of CPU time, and gigabytes. Torch takes two of each."""
    return (20, 6) if "model.py" in drawn(number).FILES else (10, 2)


def drawn_for(number, secret, student):
    """What a student's cases and numbers are drawn from."""
    return random.Random(f"{secret} {number} {student}")


def parameters(number, secret, student):
    """The numbers of written question 1."""
    rng = drawn_for(number, secret, student)
    return {name: rng.choice(choice) for name, choice in drawn(number).PARAMETERS.items()}


def values(number, numbers):
    return {name: eval(formula, {}, numbers) for name, formula in drawn(number).VALUES.items()}


def files_of(number):
    """{file: its text}: all of ours that the set's code needs, with the functions to write."""
    mine = {name: (HERE / f"set{number}" / name) for name in drawn(number).FILES.split()}
    paths = {name: path if path.is_file() else ROOT / name for name, path in mine.items()}
    paths |= {name: ROOT / name for name in SHIPPED}
    paths |= {"kit/run.py": HERE / f"set{number}" / "run.py", "kit/probes.py": HERE / "probes.py"}
    return {name: path.read_text("utf-8") for name, path in paths.items()} | {"kit/__init__.py": ""}


def functions_of(number):
    """{function: the first part that asks for it}"""
    return {function: part for part, (_, _, *functions) in reversed(drawn(number).PARTS.items())
            for function in functions}


def files_to_write(number):
    """The files in which the set's functions are."""
    return [*dict.fromkeys(function.split(":")[0] for function in functions_of(number))]


def write(folder, files):
    """Writes {name: text}; returns the folder."""
    for name, text in files.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    return folder


def node_of(text, name):
    """The definition of "Class.method" or "function"; None if there is none."""
    node = ast.parse(text)
    for part in name.split("."):
        node = next((each for each in reversed(getattr(node, "body", []))
                     if getattr(each, "name", None) == part), None)
    return node


def source_of(text, name):
    """(lines of the file, where the definition starts, where it ends)"""
    node = node_of(text, name)
    start = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return text.splitlines(), start - 1, node.end_lineno


def changed(files, edits):
    """The files with edits of functions, [(function, old, new), ...]: see lab/checks/edits.py."""
    for function, *edit in edits:
        file, name = function.split(":")
        lines, start, end = source_of(files[file], name)
        source = "\n".join(lines[start:end])
        lines[start:end] = edited(source, [edit], function).splitlines()
        files = {**files, file: "\n".join(lines) + "\n"}
    return files


def blanked(text, name, message):
    """The file with one function blanked: signature and docstring stay."""
    node, (lines, _, end) = node_of(text, name), source_of(text, name)
    first = node.body[0]   # comments behind a docstring belong to the body
    start = first.end_lineno if ast.get_docstring(node) is not None else first.lineno - 1
    lines[start:end] = [f"{' ' * (node.col_offset + 4)}raise NotImplementedError({message!r})"]
    return "\n".join(lines) + "\n"


def pasted(theirs, ours, names):
    """
    A student's file with our source of some functions behind it, so that ours counts. Lines of
    theirs keep their numbers, and names of theirs their meaning.
    """
    text = [theirs]
    for node in ast.parse(ours).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bound = {alias.asname or alias.name.split(".")[0] for alias in node.names}
            text.append(f"if not globals().keys() >= {bound}:\n    {ast.unparse(node)}")
    for name in names:
        lines, start, end = source_of(ours, name)
        source = textwrap.dedent("\n".join(lines[start:end]))
        owner, _, method = name.rpartition(".")
        if owner:   # a function `method` may be the student's
            source = source.replace(f"def {method}(", f"def _our_{method}(", 1)
            source = source.replace("super()", f"super({owner}, self)")
            source += f"\n{owner}.{method} = _our_{method}"
        text.append(source)
    return "\n".join(text) + "\n"
