"""
Takes a student's functions out of their files and puts them into ours, by the syntax tree. So it
does not matter how a file is indented, encoded or ended.

Functions have names like "Scheduler.admit", or "scheduler.py:Scheduler.admit" elsewhere.
"""
import ast

IMPORTS = (ast.Import, ast.ImportFrom)
ADDITIONS = (*IMPORTS, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.FunctionDef, ast.ClassDef)
BLOCKS = (ast.If, ast.Try, ast.ExceptHandler)   # "if TYPE_CHECKING:" and the like


def functions_in(source):
    """{"Class.method" or "function": its node}, of one file; of two with one name, the last."""
    tree = ast.parse(source)
    owners = [("", tree), *((f"{node.name}.", node) for node in tree.body
                            if isinstance(node, ast.ClassDef))]
    return {prefix + node.name: node for prefix, owner in owners for node in owner.body
            if isinstance(node, ast.FunctionDef)}


# --- our own files, whose text stays as it is -----------------------------------------------------

def span(text, name):
    """The lines of a definition, decorators included, as a slice."""
    node = functions_in(text)[name]
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return slice(first - 1, node.end_lineno)


def source_of(text, name):
    return "\n".join(text.splitlines()[span(text, name)])


def replaced(text, name, new):
    """The file with another definition in place of a function."""
    lines = text.splitlines()
    lines[span(text, name)] = new.splitlines()
    return "\n".join(lines) + "\n"


def body_of(node):
    """The statements of a function without its docstring."""
    return node.body[1:] if ast.get_docstring(node) is not None else node.body


def size_of(node):
    """Lines of a function's body, without signature, docstring and blank lines before it."""
    return node.end_lineno - body_of(node)[0].lineno + 1


def blanked(text, name, message):
    """The file with one function blanked: signature and docstring stay."""
    node = functions_in(text)[name]
    lines, body = text.splitlines(), body_of(node)
    indent = " " * (node.col_offset + 4)
    # comments between the docstring or signature and the first statement belong to the body
    start = node.body[0].end_lineno if body is not node.body else next(
        number for number in range(node.lineno, node.end_lineno + 1)
        if lines[number - 1].split("#")[0].rstrip().endswith(":"))
    lines[start:node.end_lineno] = [f"{indent}# {size_of(node)} lines in ours",
                                    f"{indent}raise NotImplementedError({message!r})"]
    return "\n".join(lines) + "\n"


def is_blank(node):
    return "raise NotImplementedError(" in ast.unparse(node)


# --- a student's files ----------------------------------------------------------------------------

def grafted(clean, student, names):
    """
    Our file with a student's functions in it: (its text, what of the student's is left out).

    clean:   the text of our file
    student: the bytes of theirs
    names:   of the functions to take, without the file

    What a student adds comes along and stands where it stands in their file: imports, constants,
    functions, classes; in classes of ours methods, properties and attributes; in an __init__ of
    ours further lines. Left out are changes to anything else, and code that would run on import.
    Raises SyntaxError or ValueError for a file that Python cannot read.
    """
    ours, theirs, left_out = ast.parse(clean), ast.parse(student), []
    merge(ours, theirs, names, left_out)
    # Behind the docstring, where Python wants them (the sort keeps the order of all others)
    ours.body[1:] = sorted(
        ours.body[1:], key=lambda node: getattr(node, "module", "") != "__future__")
    return ast.unparse(ast.fix_missing_locations(ours)), left_out


def merge(ours, theirs, names, left_out, prefix=""):
    """Brings what is new in `theirs`, a module or a class, into `ours`."""
    known = {key: node for node in ours.body if not isinstance(node, IMPORTS)
             for key in keys_of(node)}   # not imports: what a student adds may need them early
    members = {f"{owner.name}.{key}" for owner in ours.body if isinstance(owner, ast.ClassDef)
               for node in owner.body for key in keys_of(node)}
    before, replacement, fresh = {}, {}, []
    for node in theirs.body:
        keys = keys_of(node)
        mine = next((known[key] for key in keys if key in known), None)
        vain = [prefix + key for key in keys
                if key in {*known, *members} and prefix + key not in names]
        if mine is None:
            left_out += vain   # Rectangle.cost = ...
            if is_addition(node) and not vain:
                fresh.append(node)
            elif not vain and not isinstance(node, ast.Pass) and not isinstance(
                    getattr(node, "value", None), ast.Constant):   # a string between two functions
                left_out.append(f"line {node.lineno}, which is outside of all functions")
            continue
        before[mine], fresh = [*before.get(mine, []), *fresh], []
        if isinstance(node, ast.ClassDef) and isinstance(mine, ast.ClassDef):
            merge(mine, node, names, left_out, f"{node.name}.")
            for added in "bases", "decorator_list":   # to ours, or else ours stay
                if {*map(ast.dump, getattr(mine, added))} <= {*map(ast.dump, getattr(node, added))}:
                    setattr(mine, added, getattr(node, added))
        elif ast.dump(node) != ast.dump(mine):
            if not vain or extends(node, mine):
                replacement[mine] = node
            elif not is_blank(node):
                left_out += vain
    ours.body = [new for node in ours.body
                 for new in [*before.get(node, []), replacement.get(node, node)]] + fresh


def keys_of(node):
    """What a statement is known by: the names that it defines; of others, all of it."""
    if isinstance(node, BLOCKS):
        found = [key for child in ast.iter_child_nodes(node) for key in keys_of(child)
                 if key.isidentifier()]
    elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        found = [node.name]
    else:
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        found = [ast.unparse(x) for x in targets if isinstance(x, (ast.Name, ast.Attribute))]
    return found or [ast.dump(node)]


def is_addition(node):
    return isinstance(node, ADDITIONS) or isinstance(node, BLOCKS) and all(
        is_addition(child) or isinstance(child, (ast.expr, ast.Pass))
        for child in ast.iter_child_nodes(node))


def extends(new, old):
    """Whether an __init__ has all statements of ours in their order, and others between them."""
    if not isinstance(new, ast.FunctionDef) or new.name not in ("__init__", "__post_init__"):
        return False
    rest = map(ast.dump, new.body)   # `in` goes on from where it found the one before
    return ast.dump(new.args) == ast.dump(old.args) and all(
        ast.dump(statement) in rest for statement in old.body)
