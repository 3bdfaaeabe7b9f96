"""
Whether what the kernels replace is still what they were written for.

A kernel computes what some functions and modules of the ladder compute, without calling them. It
may do so only as long as they are unchanged: a student who breaks one must see it break. Functions
are known by digests of their syntax trees, listed in served.json. Comments, docstrings, line breaks
and the names of local variables do not count.

    python kernels/served.py     records the digests again

Run that after changing one of them, and after making sure that the kernels still compute the same.
"""
import ast
import hashlib
import json
import linecache
import sys
from functools import cache, lru_cache
from inspect import ismodule
from itertools import chain
from operator import is_
from pathlib import Path

from torch import nn

FILE = Path(__file__).with_suffix(".json")
if __name__ == "__main__":
    sys.path.insert(0, str(FILE.parent.parent))
from beyond import llama  # noqa: E402
from model import GPT, MLP, Block, MultiHeadAttention  # noqa: E402

RECORD = json.loads(FILE.read_text())   # {file: {"Class.function": digest}}
KNOWN = {pair for names in RECORD.values() for pair in names.items()}


# --- functions ------------------------------------------------------------------------------------

def shape(node, numbers):
    """A syntax tree, the same in every version of Python. numbers: {local variable: its number}."""
    if isinstance(node, ast.Name) and node.id in numbers:
        return numbers[node.id]
    if isinstance(node, ast.AST):
        return [type(node).__name__, *((name, shape(value, numbers)) for name, value
                                       in ast.iter_fields(node) if value not in (None, []))]
    return [shape(each, numbers) for each in node] if isinstance(node, list) else repr(node)


def digest(function):
    """Of an ast.FunctionDef, which loses its docstring."""
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:]
    nodes = [*ast.walk(function)]
    given = {node.arg for node in nodes if isinstance(node, ast.arg)}   # callers may name these
    names = dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name)
                          and isinstance(node.ctx, ast.Store) and node.id not in given)
    tree = shape(function, {name: number for number, name in enumerate(names)})
    return hashlib.sha256(repr(tree).encode()).hexdigest()[:16]


def functions_in(source):
    """{"Class.function" or "function": ast.FunctionDef}"""
    tree = ast.parse(source)
    owners = [("", tree), *((f"{c.name}.", c) for c in tree.body if isinstance(c, ast.ClassDef))]
    return {prefix + f.name: f for prefix, owner in owners for f in owner.body
            if isinstance(f, ast.FunctionDef)}


def new_record():
    """RECORD, of the functions as they now stand in the repository's files."""
    found = {file: functions_in((FILE.parent.parent / file).read_text("utf-8")) for file in RECORD}
    return {file: {name: digest(found[file][name]) for name in RECORD[file]} for file in RECORD}


@cache
def name_of(code):
    """Which of the functions has this code object; None: none, or its source cannot be read."""
    try:
        source = "".join(linecache.getlines(code.co_filename))
        functions, todo = functions_in(source), [compile(source, "", "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return None
    while todo and todo[-1] != code:   # or else the file was edited after it was imported
        todo += [const for const in todo.pop().co_consts if hasattr(const, "co_code")]
    return next((name for name, function in functions.items() if todo and function.lineno ==
                 code.co_firstlineno and (name, digest(function)) in KNOWN), None)


def is_unchanged(owner, name, code):
    """torch's functions and those of kernels/ must come from the file of their class."""
    module = getattr(owner, "__module__", "")
    if code and module.startswith(("torch.", "kernels.")):
        return code.co_filename == sys.modules[module].__file__
    return code and name_of(code) == (name if ismodule(owner) else f"{owner.__name__}.{name}")


class Watch:
    """Functions (class, name). They are looked up again only if a code object is another one."""

    def __init__(self, *functions):
        self.functions, self.found = functions, ([], None)

    def first_changed(self):
        """"Class.function" of the first one that is not what it was; None if all are."""
        codes = [getattr(getattr(*each, None), "__code__", None) for each in self.functions]
        found = self.found
        if codes != found[0]:
            changed = (f"{owner.__name__}.{name}" for (owner, name), code in
                       zip(self.functions, codes) if not is_unchanged(owner, name, code))
            self.found = found = codes, next(changed, None)
        return found[1]


watch = lru_cache(32)(Watch)   # of functions that are known only when a step comes


def touched(module):
    """Whether a call of a torch module does more, or something else, than its class says."""
    names = vars(module)
    return bool("forward" in names or "split_heads" in names
                or names["_forward_hooks"] or names["_forward_pre_hooks"])


# --- layouts --------------------------------------------------------------------------------------

METHODS = "__init__", "attend", "lay_out", "read", "slots", "write"
LAYOUTS = {"Alone": [*RECORD["generate_unbatched.py"]], "Flat": [*RECORD["generate_ragged.py"]],
           "Paged": [*RECORD["generate_paged.py"], *RECORD["generate_ragged.py"]]}


def why_not(attend):
    """
    None if `attend` is that of an Alone, a Flat or a Paged whose functions are unchanged, or else
    why not.

    A layout is known by its functions, not by its class: a script that is run has classes of its
    own, and a subclass may change what no kernel replaces.
    """
    layout = getattr(attend, "__self__", None)
    kind = type(layout)
    base = next((each.__name__ for each in kind.__mro__ if each.__name__ in LAYOUTS), None)
    if base is None:
        return f"it is for the layouts of stages 0, 6 and 7, not {kind.__name__}"
    functions = [(part, name) for part in kind.__mro__[:-1]   # not object
                 for name in METHODS if name in vars(part)]
    changed = watch(*functions).first_changed()
    if not changed and [f"{part.__name__}.{name}" for part, name in functions] != LAYOUTS[base]:
        changed = base
    head = None if changed else kind.attend.__globals__.get("head")
    if changed := changed or watch((type(head), "forward")).first_changed():
        return f"{changed} has been replaced"
    if attend.__func__ is not kind.attend:
        return f"{kind.__name__}.attend is wrapped"
    if getattr(layout, "attention", "varlen") != "varlen":
        return f"it has no attention={layout.attention!r}"
    if own := vars(layout).keys() & METHODS:
        return f"{', '.join(own)} of this layout has been replaced"
    return "a hook on head" if touched(head) else None


# --- models ---------------------------------------------------------------------------------------

def expected(model):
    """
    ({last part of a module's name: its class, None: that of any other}, number of modules,
    functions to watch) of an unchanged model before optimize().
    """
    if isinstance(model, GPT):
        block, attention, mlp, norm, of_heads = Block, MultiHeadAttention, MLP, nn.LayerNorm, None
        number, functions = 4 + 11 * len(model.h), [(GPT, "forward")]
    else:
        block, attention, mlp, norm = llama.Block, llama.GroupedAttention, llama.SwiGLU, nn.RMSNorm
        of_heads = norm if model.config.qk_norm else nn.Identity
        number = 3 + (not model.config.tied) + 14 * len(model.h)
        functions = [(llama.Llama, "forward"), (llama.Llama, "rotation"), (llama, "rotate")]
    linear = "query", "key", "value", "c_proj", "c_gate", "c_fc", "lm_head"
    return {None: block, "wte": nn.Embedding, "wpe": nn.Embedding, "h": nn.ModuleList,
            "attn": attention, "mlp": mlp, **dict.fromkeys(["ln_1", "ln_2", "ln_f"], norm),
            **dict.fromkeys(["q_norm", "k_norm"], of_heads),
            **dict.fromkeys(linear, nn.Linear)}, number, functions


TABLES = "_parameters", "_modules", "_forward_hooks", "_forward_pre_hooks"
EVERYWHERE = (nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks)


class Modules:
    """A look at all modules of a model. fast: {class: what optimize() makes of it}."""

    def __init__(self, model, fast):
        self.modules = [*model.modules()][1:]
        self.names = [*map(vars, self.modules)]
        self.tables = [vars(model)["_modules"], *(names[t] for names in self.names for t in TABLES)]
        self.settings = [(names, name) for names in self.names
                         for name in ("eps", "max_norm", "layer", "head_size") if name in names]
        kinds, number, functions = expected(model)
        self.before, self.wrong = self.state(), wrong_with(model, kinds, number, fast)
        self.attention, self.parameters = kinds["attn"], [*model.parameters()]
        owners = {each for kind in map(type, self.modules) for each in kind.__mro__
                  if each is not nn.Module and "forward" in vars(each)}
        self.functions = Watch((MultiHeadAttention, "split_heads"), *functions,
                               *((owner, "forward") for owner in owners))

    def state(self):
        """What can change, but for the numbers in the weights; in microseconds."""
        return [*map(type, self.modules), *map(len, self.names),
                *chain.from_iterable(map(dict.values, self.tables)),
                *[names[name] for names, name in self.settings]]

    def are_as_before(self):
        now = self.state()
        return len(now) == len(self.before) and all(map(is_, now, self.before))

    def changed(self, model):
        """What is not as the kernels know it, in words; None if all is."""
        if self.wrong or "forward" in vars(model):
            return self.wrong or "the model's forward has been replaced"
        if any(EVERYWHERE):
            return "a hook on all modules"
        changed = self.functions.first_changed()
        if not changed and self.attention.split_heads is not MultiHeadAttention.split_heads:
            changed = f"{self.attention.__name__}.split_heads"
        return f"{changed} has been replaced" if changed else None


def wrong_with(model, kinds, number, fast):
    """The first module that is not as its class and optimize() have made it, in words; or None."""
    modules, eps = dict([*model.named_modules()][1:]), getattr(model.config, "norm_eps", 1e-5)
    for name, module in modules.items():
        kind, settings = kinds.get(name.split(".")[-1], kinds[None]), vars(module)
        if type(module) is not fast.get(kind, kind):
            return f"{name} is another module"
        if touched(module):
            return f"{name} has a hook, or a forward of its own"
        if settings.get("eps", eps) != eps or settings.get("max_norm") is not None:
            return f"{name} has another eps, or a max_norm"
        if any(p is None and (kind is not nn.Linear or part == "weight")
               for part, p in module._parameters.items()):
            return f"{name} has no weight, or no bias"
    heads = model.config.n_head
    kv_heads = getattr(model.config, "n_kv_head", heads)
    for i, block in enumerate(model.h):
        attn = block.attn
        if attn.layer != i or (len(attn.query.weight), len(attn.key.weight)) != (
                heads * attn.head_size, kv_heads * attn.head_size):
            return f"h.{i}.attn has other heads, or another number"
    return None if len(modules) == number else "it has more modules, or fewer"


if __name__ == "__main__":
    FILE.write_text(json.dumps(new_record(), indent=1) + "\n")
    print(f"wrote {FILE}: {len(KNOWN)} functions")
