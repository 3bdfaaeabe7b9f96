"""
The built-in model's training text: Python's own documentation, so training needs no download.

It is the prose of `pydoc_data.topics` and the docstrings of the standard library, as short
documents:

    # json.dumps
    Serialize ``obj`` to a JSON formatted ``str``. ...

The text differs slightly between Python versions, which is why the trained files are committed.
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
    """The language reference that pydoc includes: prose paragraphs only, no code, no tables."""
    from pydoc_data.topics import topics as pages
    for name in sorted(pages):
        for paragraph in re.split(r"\n\s*\n", pages[name]):
            prose = " ".join(paragraph.split())
            letters = sum(c.isalpha() or c == " " for c in prose)
            # indented paragraphs, and those full of symbols, are code, tables or grammar rules
            is_code = paragraph.startswith((" ", "+", "|", "*")) or letters <= 0.85 * len(prose)
            if not is_code and len(prose) > 60:
                yield name, prose


def docstrings():
    """All docstrings of the standard library, read with ast: nothing is imported or executed."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        left_out = {"site-packages", "test", "idlelib", "lib2to3"}
        if parts[0] in left_out or {"test", "tests"} & set(parts):
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
