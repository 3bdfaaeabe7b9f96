"""
The book: the ladder as chapters, with the notebooks, the docs and the explorer, as a site.

    pip install -r book/requirements.txt
    python book/build.py            writes book/site; open book/site/index.html, no server is needed

Nothing is written twice. A chapter is made from a file of the ladder: its docstring, then every
function with its docstring and its code side by side, the figure, the questions that the notebooks
ask about it, and the diff to the rung below. MkDocs does the rest: search, dark mode, phones.
"""
import ast
import difflib
import re
import shutil
import subprocess
import sys
from html import escape
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGES, SITE = ROOT / "book" / "pages", ROOT / "book" / "site"
LADDER = [   # file, title, the rung below, its figure, the notebook about it
    ("model", "The model", None, None, "01_one_request"),
    ("request", "A request", None, None, "01_one_request"),
    ("cache", "The KV cache", None, None, "01_one_request"),
    ("generate_unbatched", "Stage 0: one request", None, "rows.png", "01_one_request"),
    ("generate_naive", "Stage 1: static batching", "generate_unbatched", "slots.png",
     "02_rectangles"),
    ("generate_dynamic", "Stage 2: dynamic batching", "generate_naive", "motion-light.svg",
     "02_rectangles"),
    ("scheduler", "The scheduler", None, None, "03_chunks_and_fusion"),
    ("generate_chunked", "Stage 3: chunked prefill", "generate_dynamic", "itl.png",
     "03_chunks_and_fusion"),
    ("generate_interleaved", "Stage 4: one fused pass", "generate_chunked", "bug.png",
     "03_chunks_and_fusion"),
    ("generate_prepacked", "Stage 5: prepacking", "generate_dynamic", "packing.png",
     "04_no_rows"),
    ("generate_ragged", "Stage 6: no rows", "generate_interleaved", "mask.png", "04_no_rows"),
    ("paging", "Pages", "scheduler", "pool.png", "05_memory"),
    ("generate_paged", "Stage 7: paged memory", "generate_ragged", "storm.png", "05_memory"),
]
DOCS = ["use", "measurements", "gpu", "memory", "prepacking", "tensor_parallel", "llama",
        "serving", "kernels", "sources", "glossary"]
LINK = re.compile(r'(\]\(|src(?:set)?=")([^)"#\s]+)')


# --- a chapter ------------------------------------------------------------------------------------

def chapter(name, title, below, figure, notebook):
    """The Markdown of a file of the ladder."""
    source = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    parts = [f"# {title}", f"`{name}.py`, {len(source.splitlines())} lines",
             prose(ast.get_docstring(tree))]
    if figure:
        parts.append(f"![](../experiments/pictures/{figure})")
    parts.append("## The code")
    parts += [side_by_side(*piece) for piece in pieces(source, tree)]
    asked = questions(notebook)
    parts.append(f"## Questions\n\nFrom [the notebook](../notebooks/{notebook}.ipynb), in which "
                 "you answer and the code replies:\n\n" + "\n".join(f"- {q}" for q in asked))
    if below:
        old = (ROOT / f"{below}.py").read_text(encoding="utf-8")
        diff = "\n".join(difflib.unified_diff(code_lines(old), code_lines(source), below + ".py",
                                              name + ".py", lineterm="", n=2))
        parts.append(f"## What changed since `{below}.py`\n\nThe code alone, without docstrings "
                     f"and comments:\n\n```diff\n{diff}\n```")
    return "\n\n".join(part for part in parts if part) + "\n"


def pieces(source, tree):
    """
    [(docstring or None, code), ...]: each function, method or head of a class that has a docstring
    begins a piece; what has none continues the one before it. In source order, nothing left out.
    """
    rows, found, end = source.splitlines(), [(None, "")], tree.body[0].end_lineno
    for node in sorted((n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))
                        and n.col_offset <= 4 and ast.get_docstring(n)), key=lambda n: n.lineno):
        begin = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        found[-1] = found[-1][0], found[-1][1] + "\n".join(rows[end:begin])
        doc = node.body[0]
        found.append((ast.get_docstring(node), "\n".join(rows[begin:doc.lineno - 1]) + "\n"))
        end = doc.end_lineno
    found[-1] = found[-1][0], found[-1][1] + "\n".join(rows[end:])
    return found


def side_by_side(docstring, code):
    code = code.strip("\n")
    if not code.strip():
        return ""
    fenced = f"```python\n{code}\n```"
    if not docstring:
        return f'<div class="pair alone" markdown>\n\n{fenced}\n\n</div>'
    said = prose(docstring)
    return (f'<div class="pair" markdown><div class="said" markdown>\n\n{said}\n\n</div>'
            f'<div class="code" markdown>\n\n{fenced}\n\n</div></div>')


def prose(docstring):
    """A docstring as Markdown. Drawings keep their lines, arguments become a list."""
    blocks = []
    for block in re.split(r"\n\s*\n", docstring.strip("\n")):
        if re.match(r"[a-z_][\w, ]*:\s+\S", block):   # arguments
            joined = re.sub(r"\n\s+", " ", block)
            blocks.append(re.sub(r"(?m)^([\w, ]+):\s+", r"- `\1`: ", joined))
            continue
        aligned = re.search(r"\S {2,}\S", block) or block.startswith("    ")
        if aligned and blocks and blocks[-1].endswith("</pre>") and block.startswith("    "):
            blocks[-1] = blocks[-1].removesuffix("</pre>") + f"\n&#10;{escape(block)}</pre>"
        elif aligned:
            blocks.append(f"<pre>{escape(block)}</pre>")
        else:
            blocks.append(block)
    return "\n\n".join(blocks)


def code_lines(source):
    """Code without docstrings and comments, so that a diff shows what changed."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if (isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
                and ast.get_docstring(node)):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree).splitlines()


def questions(notebook):
    """What a notebook asks: the first argument of each `ask`."""
    tree = ast.parse((ROOT / "notebooks" / f"{notebook}.py").read_text(encoding="utf-8"))
    return [node.args[0].value for node in ast.walk(tree) if isinstance(node, ast.Call)
            and getattr(node.func, "id", "") == "ask" and isinstance(node.args[0], ast.Constant)]


# --- the site -------------------------------------------------------------------------------------

def place(inside):
    """Copies a file into the book, once. What a page links to is copied, too."""
    target = PAGES / inside
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / inside, target)   # before its links are followed: one may lead back to it
    if inside.suffix == ".md":
        text = target.read_text(encoding="utf-8")
        write(inside, LINK.sub(lambda match: led(inside, *match.groups()), text))


def led(page, before, target):
    """A link of a page, led to a page of the book. Those of other sites stay as they are."""
    path = (ROOT / page).parent.joinpath(target).resolve()
    if not path.exists():   # what is broken, MkDocs finds
        return before + target
    inside = path.relative_to(ROOT)
    if path.is_dir():
        names = sorted(p.name for p in path.iterdir() if p.suffix in (".py", ".md"))
        for name in names:
            place(inside / name)
        write(inside / "index.md", f"# `{inside}/`\n\n" + "\n".join(
            f"- [{name}]({name})" for name in names) + "\n")
        return f"{before}{target.rstrip('/')}/index.md"
    if any(str(inside) == f"{name}.py" for name, *_ in LADDER):
        return f"{before}{'../' * len(page.parent.parts)}ladder/{inside.stem}.md"
    place(inside)
    return before + target


def write(inside, text):
    target = PAGES / inside
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8", newline="\n")


def broken_links():
    """Each link of the site that leads to no file of it."""
    for path in SITE.rglob("*.html"):
        if path.name in ("404.html", "explorer.html"):   # links of the first are absolute
            continue
        for target in re.findall(r'(?:href|src)="([^"#?:]+)["#?]', path.read_text("utf-8")):
            if not (path.parent / target).exists():
                yield f"{path.relative_to(SITE)}: {target}"


def main():
    shutil.rmtree(PAGES, ignore_errors=True)
    notebooks = sorted(ROOT.glob("notebooks/[0-9]*.ipynb"))
    docs = [ROOT / "docs" / f"{name}.md" for name in DOCS]
    for path in [*ROOT.glob("experiments/pictures/*"), *notebooks, *docs, ROOT / "README.md",
                 ROOT / "docs" / "explorer.html"]:
        place(path.relative_to(ROOT))
    for entry in LADDER:
        write(f"ladder/{entry[0]}.md", chapter(*entry))
    for name in ("book.css", "iframe-worker.js"):
        write(name, (ROOT / "book" / name).read_text(encoding="utf-8"))
    config = yaml.safe_load((ROOT / "book" / "mkdocs.yml").read_text(encoding="utf-8"))
    config["nav"] = [
        {"Start": "README.md"},
        {"The ladder": [{title: f"ladder/{name}.md"} for name, title, *_ in LADDER]},
        {"Notebooks": ["notebooks/README.md", *(str(p.relative_to(ROOT)) for p in notebooks)]},
        {"Beyond": [f"docs/{name}.md" for name in DOCS]},
        {"Explorer": "docs/explorer.html"}]
    (ROOT / "book" / ".mkdocs.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file",
                    str(ROOT / "book" / ".mkdocs.yml")], check=True)
    for path in SITE.rglob("*.html"):   # the theme would load this one script from elsewhere
        text, up = path.read_text(encoding="utf-8"), "../" * len(path.relative_to(SITE).parts[:-1])
        text = text.replace("https://unpkg.com/iframe-worker/shim", f"{up}iframe-worker.js")
        if path.parent.name == "notebooks":   # their links to each other and to the docs
            text = re.sub(r'href="([\w./]+)\.(ipynb|md)([#"])', r'href="\1.html\3', text)
            text = text.replace('href="README.html', 'href="index.html')
        path.write_text(text, encoding="utf-8")
    if lost := list(broken_links()):
        sys.exit("broken links:\n" + "\n".join(lost))
    print(f"{sum(1 for _ in SITE.rglob('*.html'))} pages: {SITE / 'index.html'}")


if __name__ == "__main__":
    main()
