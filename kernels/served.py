"""
Which functions the kernels replace, and whether these still are what the kernels were written for.

A kernel computes what some functions of the ladder compute, without calling them. It may do so only
as long as they are unchanged: a student who breaks one must see it break. Each is known by a digest
of its syntax tree, in which comments, docstrings and line breaks do not count.

    python kernels/served.py     writes the digests again, into served.json

Run that after changing one of these functions, and after making sure that the kernels still compute
the same. This file needs no torch.
"""
import ast
import hashlib
import json
import linecache
import sys
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary

ROOT, FILE = Path(__file__).parent.parent, Path(__file__).with_suffix(".json")
REPLACED = {
    "cache.py": ("KV.buffers", "KV.write", "KV.read"),
    "model.py": ("Head.forward", "MultiHeadAttention.forward", "MultiHeadAttention.split_heads",
                 "MLP.forward", "Block.forward", "GPT.forward"),
    "generate_ragged.py": ("Flat.attend", "Flat.lay_out", "Flat.read", "Flat.write"),
    "generate_paged.py": ("Paged.lay_out", "Paged.read", "Paged.slots", "Paged.write"),
}


# --- digests of functions -------------------------------------------------------------------------

def shape(node):
    """A syntax tree without places and empty fields: the same in every version of Python."""
    if isinstance(node, ast.AST):
        return [type(node).__name__, *((name, shape(value)) for name, value in ast.iter_fields(node)
                                       if value is not None and value != [])]
    return [shape(each) for each in node] if isinstance(node, list) else repr(node)


def digest(function):
    """Of an ast.FunctionDef."""
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:]
    return hashlib.sha256(repr(shape(function)).encode()).hexdigest()[:16]


def digests():
    """{name: digest} of the functions as they stand in the repository's files."""
    found = {}
    for file, names in REPLACED.items():
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        functions = {f"{c.name}.{f.name}": f for c in tree.body if isinstance(c, ast.ClassDef)
                     for f in c.body if isinstance(f, ast.FunctionDef)}
        found |= {name: digest(functions[name]) for name in names}
    return found


@cache
def known():
    """{digest: name}, as recorded."""
    return {digest: name for name, digest in json.loads(FILE.read_text()).items()}


@cache
def name_of(code):
    """Which of the functions has this code object; None: none, or its source cannot be read."""
    try:
        source = "".join(linecache.getlines(code.co_filename))
        tree, todo = ast.parse(source), [compile(source, "", "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return None
    while todo and todo[-1] != code:   # or else the file was edited after it was imported
        todo += [const for const in todo.pop().co_consts if hasattr(const, "co_code")]
    if not todo:
        return None
    return next((known().get(digest(node)) for node in ast.walk(tree)
                 if isinstance(node, ast.FunctionDef) and node.name == code.co_name
                 and node.lineno == code.co_firstlineno), None)


# --- whether they are unchanged -------------------------------------------------------------------

def codes_of(functions):
    """The code objects of [(class, name of a function), ...]; None for anything else."""
    return [getattr(getattr(owner, name, None), "__code__", None) for owner, name in functions]


def first_changed(functions):
    """
    "Class.function" of the first one that is not what it was; None if all are. torch's functions
    and those of kernels/ must come from the file of their class.
    """
    for (owner, name), code in zip(functions, codes_of(functions)):
        here = getattr(sys.modules[owner.__module__], "__file__", None)
        own = owner.__module__.startswith(("torch.", "kernels."))
        if code is None or not (code.co_filename == here if own
                                else name_of(code) == f"{owner.__name__}.{name}"):
            return f"{owner.__name__}.{name}"
    return None


class Watch:
    """first_changed, looked up again only if a code object is another one."""

    def __init__(self, *functions):
        self.functions, self.found = functions, (None, None)

    def first_changed(self):
        codes, found = codes_of(self.functions), self.found
        if codes != found[0]:
            self.found = found = codes, first_changed(self.functions)
        return found[1]


def touched(module):
    """Whether a call of a torch module does more, or something else, than its class's `forward`."""
    names = vars(module)
    return bool("forward" in names or names["_forward_hooks"] or names["_forward_pre_hooks"])


# --- layouts --------------------------------------------------------------------------------------

METHODS = "attend", "lay_out", "read", "slots", "write"
LAYOUTS = {name: [each for file in files for each in REPLACED[file]] for name, files in {
    "Flat": ["generate_ragged.py"], "Paged": ["generate_paged.py", "generate_ragged.py"]}.items()}
UNTOUCHED = frozenset(METHODS)
seen = WeakKeyDictionary()   # class -> (code objects, what is wrong with them)


def why_not(attend):
    """
    None if `attend` is that of a Flat or a Paged whose functions are unchanged, or else why not.

    A layout is known by its functions, not by its class: a script that is run has classes of its
    own, and a subclass may change what no kernel replaces.
    """
    layout = getattr(attend, "__self__", None)
    kind = type(layout)
    head = getattr(getattr(kind, "attend", None), "__globals__", {}).get("head")
    functions = [part[name] for part in map(vars, kind.__mro__) for name in METHODS if name in part]
    codes = [getattr(each, "__code__", None) for each in (getattr(type(head), "forward", None),
                                                          *functions)]
    before = seen.get(kind)
    if before is None or before[0] != codes:
        seen[kind] = before = codes, wrong_with(kind, *codes)
    if before[1]:
        return before[1]
    if getattr(attend, "__func__", None) is not kind.attend:
        return f"{kind.__name__}.attend is wrapped"
    if layout.attention != "varlen":
        return f"it has no attention={layout.attention!r}"
    if not UNTOUCHED.isdisjoint(vars(layout)):
        return f"{', '.join(UNTOUCHED & vars(layout).keys())} of this layout has been replaced"
    return "a hook on head" if touched(head) else None


def wrong_with(kind, head, *codes):
    names = [each.__name__ for each in kind.__mro__]
    base = next((name for name in ("Paged", "Flat") if name in names), None)
    if base is None:
        return f"it is for the layouts of stages 6 and 7, not {kind.__name__}"
    found = [code and name_of(code) for code in codes]
    missing = [name for name in LAYOUTS[base] if name not in found]
    if found != LAYOUTS[base]:
        return f"{missing[0] if missing else base} has been replaced"
    return None if head and name_of(head) == "Head.forward" else "Head.forward has been replaced"


if __name__ == "__main__":
    FILE.write_text(json.dumps(digests(), indent=1) + "\n")
    print(f"wrote {FILE}: {len(digests())} functions")
