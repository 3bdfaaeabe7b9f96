"""
Cuts functions out of source files and puts them into others, with the help of the syntax tree.

Functions have names like "scheduler.py:Scheduler.admit".
"""
import ast


def functions_in(text):
    """{"Class.method" or "function": its node}, of one file."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            found.update({f"{node.name}.{inner.name}": inner for inner in node.body
                          if isinstance(inner, ast.FunctionDef)})
    return found


def span(node):
    """The lines of a definition, decorators included, as a slice."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return slice(first - 1, node.end_lineno)


def source_of(text, name):
    return "\n".join(text.splitlines()[span(functions_in(text)[name])])


def replaced(text, name, new):
    """The file with another definition in place of a function."""
    lines = text.splitlines()
    lines[span(functions_in(text)[name])] = new.splitlines()
    return "\n".join(lines) + "\n"


def body_of(node):
    """The statements of a function without its docstring."""
    return node.body[1:] if ast.get_docstring(node) is not None else node.body


def size_of(node):
    """Lines of a function's body, without signature, docstring and blank lines before it."""
    body = body_of(node)
    return node.end_lineno - body[0].lineno + 1


def blanked(text, name, message):
    """The file with one function blanked: signature and docstring stay."""
    node = functions_in(text)[name]
    lines, body = text.splitlines(), body_of(node)
    indent = " " * (node.col_offset + 4)
    # comments between the docstring and the first statement belong to the body
    start = node.body[0].end_lineno if body is not node.body else signature_end(lines, node)
    lines[start:node.end_lineno] = [f"{indent}# {size_of(node)} lines in ours",
                                    f"{indent}raise NotImplementedError({message!r})"]
    return "\n".join(lines) + "\n"


def signature_end(lines, node):
    """The number of lines up to the end of the signature."""
    for number in range(node.lineno, node.end_lineno + 1):
        if lines[number - 1].split("#")[0].rstrip().endswith(":"):
            return number
    raise ValueError(f"{node.name}: no end of the signature")


def statements(node):
    """The code of a function's body: simple statements, and the heads of compound ones."""
    for inner in ast.walk(node):
        if not isinstance(inner, ast.stmt) or inner is node:
            continue
        if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant):
            continue   # a docstring
        yield ast.unparse(inner).splitlines()[0]


def grafted(clean, student, names):
    """
    The clean file with a student's functions in it. New functions, methods, constants and imports
    at the student's top level come along; whatever else has changed does not.

    clean, student: texts of the same file
    names:          of the functions, without the file
    Raises SyntaxError for a student's file that cannot be read, KeyError for a missing function.
    """
    theirs, text = functions_in(student), clean
    known = functions_in(clean)
    for name in names:
        new = source_of(student, name)
        if "." in name:   # new methods of the same class come with it
            owner = name.split(".")[0]
            extra = [other for other in theirs if other.startswith(owner + ".")
                     and other not in known and source_of(student, other) not in text]
            new = "\n\n".join([new, *(source_of(student, other) for other in extra)])
        text = replaced(text, name, new)
    return text + new_at_top_level(clean, student)


def new_at_top_level(clean, student):
    """Helpers and imports that a student has added."""
    lines, added = student.splitlines(), []
    had = {ast.unparse(node) for node in ast.parse(clean).body}
    taken = {node.name for node in ast.parse(clean).body if hasattr(node, "name")}
    for node in ast.parse(student).body:
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign)):
            new = ast.unparse(node) not in had
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            new = node.name not in taken
        else:
            new = False   # code that would run on import
        if new:
            added.append("\n".join(lines[span(node) if hasattr(node, "decorator_list")
                                         else slice(node.lineno - 1, node.end_lineno)]))
    return "".join("\n\n" + code + "\n" for code in added)


def changed_elsewhere(clean, student, names):
    """Functions that a student has changed although the set does not ask for them."""
    ours, theirs = functions_in(clean), functions_in(student)
    return [name for name in ours if name in theirs and name not in names
            and ast.dump(ours[name]) != ast.dump(theirs[name])
            and "raise NotImplementedError(" not in ast.unparse(theirs[name])]
