"""
Known bugs of batching code, inserted and removed again while a program runs.

    with broken("published mask"):
        generate(model, requests)

A trap changes a line or two of the repository's own code, and nothing around them. So the reader
sees exactly what is wrong. Most of the bugs have been seen in published code.
"""
import inspect
import textwrap
from contextlib import ExitStack, contextmanager
from importlib import import_module

# Functions are named, not imported, so that this table depends on none of them.
RECTANGLE = "generate_dynamic.py:Rectangle.lay_out"
GATHER = "generate_dynamic.py:Rectangle.attend"
STATIC = "generate_naive.py:StaticBatch.lay_out"
HEAD = "model.py:Head.forward"
PACKED = "generate_prepacked.py:Packed.lay_out"
STREAM = "generate_ragged.py:Flat.attend"
SHARE = "scheduler.py:Scheduler.share_budget"

TRAPS = {   # name: [(function, code as it stands, code of the trap), ...]
    "published mask": [
        (RECTANGLE, "mask[b, ..., P + T - n:] = True", "mask[b, ..., P:] = True")],
    "pads written to the cache": [
        (GATHER, "k[b, :, T - n:], v[b, :, T - n:]", "k[b, :, :n], v[b, :, :n]")],
    "column positions": [
        (RECTANGLE, "torch.arange(start, start + n)", "torch.arange(P + T - n, P + T)")],
    "static column positions": [
        (STATIC, "columns[self.start:] - self.pads[:, None]",
         "columns[self.start:].expand(B, T).clone()")],
    "right padding": [   # all is right but the last column, which is sampled from
        (STATIC, "tokens[b, T - n:]", "tokens[b, :n]"),
        (STATIC, "- self.pads[:, None]", "- self.pads[:, None] * (self.start > 0)"),
        (STATIC, "(columns >= self.pads[:, None])",
         "((columns < W - self.pads[:, None]) | (columns >= W))"),
        (STATIC, "B, T = len(self.plan), self.end - self.start",
         "B, T, W = len(self.plan), self.end - self.start, "
         "max(len(r.prompt) for r in self.requests)")],
    "no causal rule in a chunk": [
        (HEAD, ".tril(diagonal=S - T)", ".tril(diagonal=S - T if S == T else S)")],
    "causal rule from the top left": [
        (HEAD, ".tril(diagonal=S - T)", ".tril(diagonal=0)")],
    "samples from a partial prefill": [
        ("request.py:complete", "if n == request.todo", "if n > 0")],
    "prompts before decodes": [
        (SHARE, "for request in self.running if request.todo == 1]",
         "for request in self.running if request.todo == 1\n"
         "            and all(other.todo == 1 for other in self.running)]")],
    "neighbours in a packed row": [
        (PACKED, "(owner[:, :, None] == owner[:, None, :]) & (owner[:, None, :] >= 0)",
         "owner[:, None, :] >= 0")],
    "positions that run on in a packed row": [
        (PACKED, "torch.arange(lengths[i])", "torch.arange(first, end)")],
    "a stream without boundaries": [
        (STREAM, "head(q, keys, values, mask=self.mask)", "head(q, keys, values)")],
    "pages read in one piece": [
        ("generate_paged.py:Paged.lay_out", "all(b == a + 1 for a, b in pairwise(table))", "True")],
    "pages known by their own tokens": [
        ("paging.py:Pages.find", "name = self.name_of[page]", "name = 0"),
        ("paging.py:Pages.publish", "self.name_of[table[i - 1]] if i else 0", "0")],
}


@contextmanager
def broken(name, show=True):
    """Inserts a trap for the `with` block, and prints the lines that it changes."""
    if name not in TRAPS:
        raise ValueError(f"there is no trap {name!r}, only {', '.join(map(repr, TRAPS))}")
    edits = {}   # function -> its edits, which are made together
    for function, old, new in TRAPS[name]:
        edits.setdefault(function_named(function), []).append((old, new))
    with ExitStack() as traps:
        for function, changes in edits.items():
            if show:
                print_change(function, changes)
            traps.enter_context(swapped(function, changes))
        yield


def function_named(name):
    """The function of "file.py:Class.method"."""
    file, path = name.split(":")
    found = import_module(file.removesuffix(".py"))
    for part in path.split("."):
        found = getattr(found, part)
    return found


@contextmanager
def swapped(function, changes, **names):
    """
    Changes a function's code for the `with` block, wherever it is called from.

    changes: [(old, new), ...]: each `old` must occur exactly once in its source, or ValueError
    names:   further names that `new` uses
    """
    source, before = inspect.getsource(function), function.__code__
    for old, new in changes:
        if source.count(old) != 1:
            raise ValueError(f"{function.__qualname__}: {old!r} occurs {source.count(old)} "
                             "times instead of once")
        source = source.replace(old, new)
    # The class gives super() the same meaning as in the original; it is compiled, never run.
    module = compile("class _:\n" + textwrap.indent(textwrap.dedent(source), " "),
                     f"<{function.__qualname__}, changed>", "exec")
    function.__globals__.update(names)
    function.__code__ = code_named(function.__name__, module)
    try:
        yield
    finally:
        function.__code__ = before
        for name in names:
            del function.__globals__[name]


def code_named(name, code):
    """The code object of that name, which is defined somewhere inside `code`."""
    for constant in code.co_consts:
        if inspect.iscode(constant):
            found = constant if constant.co_name == name else code_named(name, constant)
            if found:
                return found


def print_change(function, changes):
    """The lines that change, as `diff` would print them."""
    before = after = inspect.getsource(function)
    for old, new in changes:
        after = after.replace(old, new)
    print(f"{function.__module__}.py, {function.__qualname__}:")
    kept = set(before.splitlines()) & set(after.splitlines())
    for sign, lines in ("-", before.splitlines()), ("+", after.splitlines()):
        for line in lines:
            if line not in kept:
                print(f"  {sign} {line.split('  #')[0].strip()}")
