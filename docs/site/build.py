"""
What the site adds to MkDocs, as its hook: chapters made from the files of the ladder, and the
repository's documents, notebooks and pictures. Nothing is written twice.

    pip install -r docs/site/requirements.txt
    python -m mkdocs build --strict -f docs/site/mkdocs.yml
"""
import ast
import difflib
import re
from pathlib import Path
from textwrap import indent

from latex2mathml.converter import convert
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

SITE = Path(__file__).resolve().parent
ROOT = SITE.parent.parent
TAKEN = (".md", ".py", ".cpp", ".png", ".svg", ".ipynb", ".json")


def chapter(file, title, notebook, below=None, figure=None, cost=None):
    """The Markdown of a file of the ladder: its docstring, figure, code, questions, and diff."""
    source = (ROOT / f"{file}.py").read_text(encoding="utf-8")
    parts = [f"# {title}", f"`{file}.py`, {len(source.splitlines())} lines",
             prose(ast.get_docstring(ast.parse(source)))]
    if cost:
        parts.append(f"**Scores of a pass**, per head and layer: {convert(cost)}")
    if figure:
        parts.append(f"![{title}](../docs/pictures/{figure}.png)")
    parts += ["## The code", *(side_by_side(*piece) for piece in pieces(source))]
    parts.append(f"## Questions\n\n[The notebook](../notebooks/{notebook}.ipynb) asks, and checks "
                 "your answers.")
    if below:
        old = (ROOT / f"{below}.py").read_text(encoding="utf-8")
        diff = "\n".join(difflib.unified_diff(*map(code_lines, (old, source)), below + ".py",
                                              file + ".py", lineterm="", n=2))
        parts.append(f"## What changed since `{below}.py`\n\nThe code alone, without docstrings "
                     f"and comments:\n\n```diff\n{diff}\n```")
    return "\n\n".join(parts) + "\n"


def pieces(source):
    """[(docstring or None, code), ...]: whatever has a docstring begins a piece. In order, all."""
    rows, tree = source.splitlines(), ast.parse(source)
    nodes = sorted((node for node in ast.walk(tree) if isinstance(
        node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node)),
        key=lambda node: node.lineno)
    begins = [min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1 for node in nodes]
    yield None, "\n".join(rows[tree.body[0].end_lineno:begins[0] if begins else None])
    for node, begin, end in zip(nodes, begins, [*begins[1:], None]):
        doc = node.body[0]
        yield ast.get_docstring(node), "\n".join(rows[begin:doc.lineno - 1]
                                                 + rows[doc.end_lineno:end])


def side_by_side(docstring, code):
    said = f'<div class="said" markdown>\n\n{prose(docstring)}\n\n</div>' if docstring else ""
    fenced = "```python\n" + code.strip("\n") + "\n```"   # the search finds prose, not code
    return (f'<div class="pair" markdown>{said}<div class="code" data-search-exclude markdown>'
            f'\n\n{fenced}\n\n</div></div>')


def prose(docstring):
    """A docstring as Markdown. Arguments become a list; drawings are indented, as they must be."""
    def block(text):
        if re.match(r"[a-z_][\w, ]*:\s+\S", text):
            return re.sub(r"(?m)^([\w, ]+):\s+", r"- `\1`: ", re.sub(r"\n\s+", " ", text))
        return indent(text, "    ") if re.match(r"\S.*\S {2,}\S", text) else text   # a table
    return "\n\n".join(map(block, re.split(r"\n\s*\n", docstring.strip("\n"))))


def code_lines(source):
    """Code without docstrings and comments, so that a diff shows what changed."""
    code = "\n".join(code for _, code in pieces(source))
    return re.sub(r"(?m)^ *#.*\n| *#.*", "", code).splitlines()


# --- MkDocs calls these ---------------------------------------------------------------------------

@event_priority(100)   # before mkdocs-jupyter looks for notebooks
def on_files(files, config):
    for entry in config.extra["ladder"]:
        files.append(File.generated(config, f"ladder/{entry['file']}.md",
                                    content=chapter(**entry)))
    taken = [path.relative_to(ROOT) for path in sorted(ROOT.rglob("*"))
             if path.suffix in TAKEN and not path.is_relative_to(SITE)]
    taken = [path for path in taken if not {"build", "out"} & {*path.parts}
             and str(path) != "README.md" and not any(part[0] in "._" for part in path.parts[:-1])]
    for path in taken:   # a notebook needs a file on the disk
        files.append(File(str(path), str(ROOT), config.site_dir, config.use_directory_urls))
    explorer = (ROOT / "docs/explorer.html").read_text("utf-8").replace(
        "<!--home-->", '<a id="home" href="../index.html">nanoBatch</a>')
    files.append(File.generated(config, "docs/explorer.html", content=explorer))
    config.nav = [
        {"Start": "index.md"},
        {"The ladder": [{e["title"]: f"ladder/{e['file']}.md"} for e in config.extra["ladder"]]},
        {"Notebooks": ["notebooks/README.md", *(str(p) for p in taken if p.suffix == ".ipynb")]},
        {"Look up": [f"docs/{p.name}" for p in taken if str(p.parent) == "docs"]},
        {"Explorer": "docs/explorer.html"}]


def on_page_markdown(markdown, page, config, files):
    """The search finds prose before lists and tables."""
    first = page.file.src_uri.split("/")[0]
    page.meta["search"] = {"boost": {"ladder": 4, "docs": 3, "notebooks": 2}.get(first, 1),
                           "exclude": first == "assignments"}


def on_post_page(output, page, config):
    """Notebooks' links; claims lead to their sources; and the search's script lies in the site."""
    up = "../" * page.file.src_uri.count("/")
    output = re.sub(r"<td>([HRPI]\d+)</td>", r'<td id="\1">\1</td>', output)
    if page.file.src_uri.startswith("notebooks/"):
        output = re.sub(r'href="([\w./]+)\.(ipynb|md)([#"])', r'href="\1.html\3', output)
        output = output.replace('href="README.html', 'href="index.html')
    output = output.replace('role="dialog"', 'role="dialog" aria-label="Search"', 1)   # it has none
    link = rf'<a href="{up}docs/sources.html#\1">\1</a>'
    output = re.sub(r"<strong>Claims.*?</p>|[Cc]laim [HRPI]\d+", lambda said: re.sub(
        r"\b([HRPI]\d+)\b", link, said[0]), output, flags=re.DOTALL)
    return output.replace("https://unpkg.com/iframe-worker/shim", f"{up}iframe-worker.js")
