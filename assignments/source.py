"""
The source of a set: which files it needs, a function that is blanked, and two files made into one.
"""
import ast
import textwrap
from pathlib import Path

from functions import HERE, ROOT, module_of, parts_of

# What the code of every set imports.
SHIPPED = (*(f"toolbox/{path.name}" for path in sorted((ROOT / "toolbox").glob("*.py"))),
           "beyond/__init__.py")
KIT = "child.py", "compare.py", "probes.py", "second_device.py"


def files_of(number):
    """{file: its text}: all of ours that a set's code needs, with the functions to write."""
    files = {}
    for name in (*module_of(number, "cases").FILES.split(), *SHIPPED):
        path = ROOT / name
        if not path.is_file():
            path = HERE / name
        files[name] = path.read_text("utf-8")
    for name in KIT:
        files[f"kit/{name}"] = (HERE / name).read_text("utf-8")
    files["kit/calls.py"] = (HERE / f"set{number}/calls.py").read_text("utf-8")
    files["kit/__init__.py"] = ""
    return files


def functions_of(number):
    """{function: the first part that asks for it}"""
    first_part = {}
    for part, (_, _, functions) in parts_of(number).items():
        for function in functions:
            first_part.setdefault(function, part)
    return first_part


def write(folder, files):
    """Writes {name: text}; returns the folder."""
    for name, text in files.items():
        path = Path(folder, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    return folder


# --- one function ---------------------------------------------------------------------------------

def node_of(text, name):
    """The definition of "Class.method" or "function"."""
    node = ast.parse(text)
    for part in name.split("."):
        node = next(child for child in node.body if getattr(child, "name", None) == part)
    return node


def blanked(text, name, message):
    """The file with one function blanked: signature and docstring stay."""
    node = node_of(text, name)
    first = node.body[0]
    start = first.lineno - 1
    if ast.get_docstring(node) is not None:   # comments after a docstring belong to the body
        start = first.end_lineno
    indent = " " * (node.col_offset + 4)
    lines = text.splitlines()
    lines[start:node.end_lineno] = [f"{indent}raise NotImplementedError({message!r})"]
    return "\n".join(lines) + "\n"


def source_of(text, node):
    """The lines of a definition, with its decorators, as they stand outside of any class."""
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return textwrap.dedent("\n".join(text.splitlines()[start - 1:node.end_lineno]))


# --- a student's file, completed by ours ----------------------------------------------------------

def pasted(student_text, our_text, ours, theirs=()):
    """
    A student's file, followed by our source of some functions, so that ours counts. The student's
    lines keep their numbers, and the student's names their meaning.

    ours, theirs: names of functions, "Class.method" or "function": those that other parts ask for,
                  and those that the part which is graded asks for
    """
    text = [student_text]
    for node in ast.parse(our_text).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            text.append(missing_import(node))
        elif isinstance(node, ast.ClassDef):
            text += pasted_class(our_text, node, ours, theirs)
        elif isinstance(node, ast.FunctionDef) and node.name not in theirs:
            source = source_of(our_text, node)
            text.append(source if node.name in ours else only_if(
                f"{node.name!r} not in globals()", source))
    return "\n".join(text) + "\n"


def only_if(condition, source):
    return f"if {condition}:\n{textwrap.indent(source, '    ')}"


def missing_import(node):
    """An import of ours, for the names that the student's file does not have."""
    names = {alias.asname or alias.name.split(".")[0] for alias in node.names}
    return only_if(f"not globals().keys() >= {names}", ast.unparse(node))


def pasted_class(text, node, ours, theirs):
    """
    Statements that put our methods into the student's class.

    If the part asks for a method of this class, then only what other parts ask for is put in: the
    student's method may need an `__init__` of its own. Else the class is ours, with everything: our
    `guess` needs the attributes that our `__init__` sets, which no handout fixes.
    """
    asked = {name for name in ours if name.startswith(f"{node.name}.")}
    shared = any(name.startswith(f"{node.name}.") for name in theirs)
    yield only_if(f"{node.name!r} not in globals()", source_of(text, node))
    if not asked:
        return
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef):
            name = f"{node.name}.{statement.name}"
            if name in asked or not shared:
                yield pasted_method(text, node.name, statement)
        elif isinstance(statement, ast.Assign) and not shared:
            for target in statement.targets:
                yield f"{node.name}.{ast.unparse(target)} = {ast.unparse(statement.value)}"


def pasted_method(text, owner, node):
    """One method: a function of another name, as the student's file may use the method's name."""
    source = source_of(text, node)
    source = source.replace(f"def {node.name}(", f"def _our_{node.name}(", 1)
    source = source.replace("super()", f"super({owner}, self)")
    return f"{source}\n{owner}.{node.name} = _our_{node.name}"
