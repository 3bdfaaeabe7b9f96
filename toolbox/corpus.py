"""
The built-in model's text: the documentation inside Python itself, so that training needs no download.

Prose of `pydoc_data.topics` and the docstrings of the standard library, as short documents:

    # json.dumps
    Serialize ``obj`` to a JSON formatted ``str``. ...

The text differs a little between Python versions, which is why the trained files are committed.
"""
import ast
import inspect
import re
import sysconfig
from pathlib import Path


def documents():
    """All documents, a list of (title, body), in a fixed order and without duplicates."""
    seen, result = set(), []
    for title, body in [*topics(), *docstrings()]:
        body = body.strip()
        if len(body) >= 20 and body not in seen:
            seen.add(body)
            result.append((title, body))
    return result


def topics():
    """The language reference as pydoc carries it: prose paragraphs only, no code, no tables."""
    from pydoc_data.topics import topics as pages
    for name in sorted(pages):
        seen = set()
        for paragraph in re.split(r"\n\s*\n", pages[name]):
            prose = " ".join(paragraph.split())
            # an indented or symbol-laden paragraph is code, a table or a grammar rule
            if (not paragraph.startswith((" ", "+", "|", "*")) and len(prose) > 60
                    and sum(c.isalpha() or c == " " for c in prose) > 0.85 * len(prose) and prose not in seen):
                seen.add(prose)
                yield name, prose


def docstrings():
    """Every docstring of the standard library, read with ast: nothing is imported or run."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] in ("site-packages", "test", "idlelib", "lib2to3") or "test" in parts or "tests" in parts:
            continue
        module = ".".join(p for p in parts if p != "__init__")
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        yield from walk(tree, module)


def walk(node, name):
    text = ast.get_docstring(node)
    if text:
        yield name, inspect.cleandoc(text)
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from walk(child, f"{name}.{child.name}")
