"""
Sets the functions that a student has written for one part onto ours, while a test runs.

    with part("handed_in/ada", ["scheduler.py:Scheduler.admit"]):
        ...   # our scheduler, with ada's admit

The student's modules are imported as when a script in their folder runs; then `import scheduler`
means ours again. In the student's modules, too, every name that we define means ours. So a fault in
one part cannot affect another. Then the part's functions, and what the student has added to their
classes, are set onto ours, and taken off again at the end.

That stops mistakes, not attacks: grade hostile code in a container.
"""
import inspect
import os
import sys
from contextlib import contextmanager
from importlib import import_module, invalidate_caches
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from zipfile import ZipFile

HERE = Path(__file__).resolve().parent
PACKED = HERE / "reference.bin"   # in a student's copy: our files, in a zip archive
ROOT = HERE.parent                # the repository, or the copy
OURS = str(ROOT)
if PACKED.exists():
    unpacked = TemporaryDirectory()
    ZipFile(PACKED).extractall(unpacked.name)
    OURS = str(Path(unpacked.name).resolve())
sys.path.insert(0, OURS)
sys.dont_write_bytecode = True   # nothing is left in a student's folder


class Fault(Exception):
    """What is wrong, in a sentence."""


@contextmanager
def part(folder, functions):
    """Ours, with this part's functions ("file.py:Class.method") set onto it."""
    files = {module_of(function): function.partition(":")[0] for function in functions}
    same = {path.stem for path in folder.glob("*.py") if ours_has(path.stem)}
    mine = {name: import_module(name) for name in sorted(same | files.keys())}
    helpers = {path.relative_to(folder).parts[0].removesuffix(".py")
               for path in [*folder.glob("*.py"), *folder.glob("*/*.py")]}
    helpers = {name for name in helpers if not ours_has(name)}
    before, modules, places = state(), dict(sys.modules), list(sys.path)
    try:
        for name in modules:
            if name in mine or name.partition(".")[0] in helpers:
                del sys.modules[name]
        sys.path.insert(0, str(folder))
        invalidate_caches()
        load(folder, files, mine)
        theirs = {name: module for name, module in sys.modules.items()
                  if mine.get(name, module) is not module or name.partition(".")[0] in helpers}
        for name in sys.modules.keys() - modules.keys() - theirs.keys():
            if is_ours(sys.modules[name]):   # it has imported theirs
                del sys.modules[name]
        sys.modules.update(mine)
        refuse_changes(before)
        install(folder, functions, mine, theirs)
        during = {owner: dict(vars(owner)) for owner in before}
        yield
        refuse_changes(during)
    finally:
        restore(before)
        sys.path[:] = places
        for name in sys.modules.keys() - modules.keys():
            if name.partition(".")[0] in helpers:
                del sys.modules[name]
        sys.modules.update(modules)


def module_of(function):
    return function.partition(".py")[0].replace("/", ".")


def ours_has(name):
    spec = PathFinder.find_spec(name, [OURS])
    return spec is not None and spec.origin is not None


def is_ours(module):
    file = str(getattr(module, "__file__", ""))
    return file.startswith((OURS + os.sep, str(HERE))) and "site-packages" not in file


# --- the student's modules ------------------------------------------------------------------------

def load(folder, files, mine):
    """Imports the student's modules. Fault, in a sentence, if one of the part's cannot be run."""
    for name in mine.keys() - files.keys():
        try:
            import_module(name)
        except Exception:
            sys.modules[name] = mine[name]   # no part needs theirs
    for name, file in files.items():
        if not (folder / file).is_file():
            raise Fault(f"{file} is not there")
        if name in sys.modules:   # another one has imported it
            continue
        spec = spec_from_file_location(name, folder / file)
        sys.modules[name] = module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except SyntaxError as error:
            where = Path(error.filename or file).name
            raise Fault(f"{where} cannot be read: line {error.lineno}: {error.msg}") from None
        except (ValueError, RecursionError, MemoryError) as error:   # null bytes; nested too deep
            raise Fault(f"{file} cannot be read: {error or type(error).__name__}") from error


def install(folder, functions, mine, theirs):
    """Sets what counts in this part onto ours. In the student's modules, our names mean ours."""
    written = {name: dict(vars(theirs[name])) for name in mine if name in theirs}
    meant = {id(written[name][key]): value for name in written
             for key, value in defined_in(mine[name]).items() if key in defined_in(theirs[name])}
    for name, module in theirs.items():
        for key, value in list(vars(module).items()):
            vars(module)[key] = meant.get(id(value), value)
        if name in mine:
            vars(module).update(defined_in(mine[name]))
    for function in functions:
        name, path = module_of(function), function.partition(":")[2]
        if "." not in path:
            new = written[name].get(path)
            check(path, new, folder)
            replace_everywhere(getattr(mine[name], path), new, theirs)
    for name in written:
        for key, ours in defined_in(mine[name]).items():
            if isinstance(ours, type):
                asked = [function.rpartition(".")[2] for function in functions
                         if function.partition(":")[2].startswith(f"{key}.")]
                set_methods(ours, written[name].get(key), asked, folder, theirs, meant)


def defined_in(module):
    """The functions and classes that a module defines, and objects of these classes."""
    return {name: value for name, value in vars(module).items()
            if type(value).__module__ == module.__name__ or isinstance(
                value, (FunctionType, type)) and value.__module__ == module.__name__}


def replace_everywhere(old, new, theirs):
    """Wherever one of our modules, or of theirs, has imported a function."""
    for module in [*filter(is_ours, sys.modules.values()), *theirs.values()]:
        for name, value in list(vars(module).items()):
            if value is old:
                setattr(module, name, new)


def set_methods(ours, written, asked, folder, theirs, meant):
    """The methods that a part asks for, and all that was added to a class, set onto ours."""
    if not isinstance(written, type):
        if asked:
            raise Fault(f"there is no class {ours.__name__} any more")
        return
    found = {}
    for each in reversed(written.__mro__):   # a base class that was added comes along
        if each is written or each.__module__ in theirs and id(each) not in meant:
            found |= vars(each)
    for name in asked:
        check(f"{ours.__name__}.{name}", found.get(name), folder)
    for name, value in found.items():
        added = name not in vars(ours) and (callable(value) or not name.startswith("__"))
        if name in asked or added or name in ("__init__", "__post_init__"):
            bind_super(value, ours)
            setattr(ours, name, value)


def check(name, value, folder):
    """Fault if a function is missing, or not the student's own."""
    if value is None:
        raise Fault(f"there is no {name} any more")
    code = getattr(inspect.unwrap(value), "__code__", None)
    if code and not Path(code.co_filename).is_relative_to(folder):
        raise Fault(f"{name} comes from {Path(code.co_filename).name}, not from a file of yours")


def bind_super(value, owner):
    """`super()` in a method of the student's looks above our class."""
    function = getattr(value, "fget", None) or getattr(value, "__func__", value)
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or ()):
        if name == "__class__":
            cell.cell_contents = owner


# --- our modules ----------------------------------------------------------------------------------

def state():
    """{module or class: its names and values} of all of ours."""
    modules = [*filter(is_ours, sys.modules.values())]
    classes = [value for module in modules for value in vars(module).values()
               if isinstance(value, type) and value.__module__ == module.__name__]
    return {owner: dict(vars(owner)) for owner in modules + classes}


def changes(before):
    return [(owner, name) for owner, names in before.items() for name, value in names.items()
            if vars(owner).get(name) is not value]


def refuse_changes(before):
    """Fault if a student's code has replaced something of ours."""
    for owner, name in changes(before):
        raise Fault(f"your code replaces {owner.__name__}.{name}")


def restore(before):
    for owner, name in changes(before):
        setattr(owner, name, before[owner][name])
    for owner, names in before.items():
        if isinstance(owner, type):
            for name in vars(owner).keys() - names.keys():
                delattr(owner, name)
