"""
Edits of code: the one machine that puts in known bugs and usual mistakes.

    edited(source, changes)                the source of a function with edits in it
    with swapped(function, changes): ...   the function itself has them, while a program runs
    with put_in(edits): ...                so do several: [(name of the function, old, new), ...]

An edit is a pair (old, new), and `old` must occur exactly once.
"""
import ast
import inspect
import textwrap
from contextlib import ExitStack, contextmanager
from difflib import unified_diff
from importlib import import_module
from operator import attrgetter


class EditError(Exception):
    """An edit cannot be put in. No test takes this error for a bug that it has seen."""


def edited(source, changes, where="the code"):
    """
    The source of a function with edits, [(old, new), ...]. If `old` is empty, `new` comes before
    the first statement. `where` is for the EditError.
    """
    for old, new in changes:
        if not old:
            source = begun(source, new)
        elif source.count(old) == 1:
            source = source.replace(old, new)
        else:
            raise EditError(f"{where}: {old!r} occurs {source.count(old)} times instead of once, "
                            "so a known bug or mistake cannot be put in")
    return source


def begun(source, statements):
    """A function's source with these statements before its first one."""
    lines, function = source.splitlines(), ast.parse(textwrap.dedent(source)).body[0]
    first = body_of(function)[0].lineno - 1
    indent = lines[first][:-len(lines[first].lstrip())]
    lines[first:first] = textwrap.indent(statements, indent).splitlines()
    return "\n".join(lines)


def body_of(node):
    """The statements of a function without its docstring."""
    return node.body[1:] if ast.get_docstring(node) is not None else node.body


def function_named(name):
    """The function of "file.py:Class.method"."""
    file, path = name.split(":")
    return attrgetter(path)(import_module(file.removesuffix(".py").replace("/", ".")))


@contextmanager
def swapped(function, changes, show=False, **names):
    """
    Changes a function's code for the `with` block, wherever it is called from.

    changes: edits; show: whether to print the lines that change
    names:   further names that `new` uses
    """
    function = inspect.unwrap(function)   # the code is below its decorators
    before, source = function.__code__, inspect.getsource(function)
    after = edited(source, changes, function.__qualname__)
    # The class gives super() the same meaning as in the original; it is compiled, never run.
    module = compile("class _:\n" + textwrap.indent(textwrap.dedent(after), " "),
                     f"<{function.__qualname__}, changed>", "exec")
    body = next(filter(inspect.iscode, module.co_consts))   # of the class
    code = next(code for code in filter(inspect.iscode, body.co_consts)
                if code.co_name == function.__name__)
    if code.co_freevars != before.co_freevars:
        raise EditError(f"{function.__qualname__} uses names of the function around it")
    if show:
        print(f"{function.__module__.replace('.', '/')}.py, {function.__qualname__}:")
        changed = unified_diff(source.splitlines(), after.splitlines(), n=0)
        for line in [*changed][2:]:   # 2: a head for files
            if line[0] in "-+":
                print(f"  {line[0]} {line[1:].split('  #')[0].strip()}")
    function.__globals__.update(names)
    function.__code__ = code
    try:
        yield
    finally:
        function.__code__ = before
        for name in names:   # two functions of a file may have it
            function.__globals__.pop(name, None)


@contextmanager
def put_in(edits, show=False, **names):
    """Edits of functions, [("file.py:Class.method", old, new), ...], as `swapped` makes them."""
    changes = {}   # function -> its edits, which are made together
    for function, old, new in edits:
        changes.setdefault(function_named(function), []).append((old, new))
    with ExitStack() as stack:
        for function, its in changes.items():
            stack.enter_context(swapped(function, its, show, **names))
        yield
