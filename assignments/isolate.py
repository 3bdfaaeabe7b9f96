"""
Sets the functions that a student has written for one part onto ours, while a test runs.

    with Submission("handed_in/ada").part(["scheduler.py:Scheduler.admit"]):
        ...   # our scheduler, with ada's admit

A student's module is executed under another name, "theirs.scheduler". What it imports from the
student's folder comes from there; but every name that we define means ours, whatever stands in the
student's file. So a fault in one part cannot affect another. Then the part's functions, and what
the student has added to their classes, are set onto ours, and taken off again at the end.

That stops mistakes, not attacks: grade hostile code in a container.
"""
import builtins
import inspect
import sys
from contextlib import contextmanager
from importlib import import_module, invalidate_caches
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType

KEPT = {"toolbox", "checks"}   # packages that are always ours


class Fault(Exception):
    """What is wrong, in a sentence."""


class Submission:
    """A student's folder, whose modules can be imported as theirs.NAME."""

    def __init__(self, folder, *more):
        self.folder = Path(folder).resolve()
        # In the repository, the functions of set 7 stand with its tests.
        self.folders = [self.folder, *more]
        self.forget()
        invalidate_caches()
        sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, Submission)]
        sys.meta_path.insert(0, self)

    def forget(self):
        for name in [name for name in sys.modules if name.split(".")[0] == "theirs"]:
            del sys.modules[name]

    def find_spec(self, fullname, path=None, target=None):   # Python calls it for each import
        if fullname == "theirs":
            spec = ModuleSpec("theirs", None, is_package=True)
            spec.submodule_search_locations = [str(folder) for folder in self.folders]
            return spec
        if not fullname.startswith("theirs."):
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec and isinstance(spec.loader, SourceFileLoader):
            spec.loader = Loader(self, fullname, spec.origin)
        return spec

    def has(self, name):
        """Whether this module stands in the student's folder."""
        paths = [folder.joinpath(*name.split(".")) for folder in self.folders]
        return name.split(".")[0] not in KEPT and any(
            path.is_dir() or path.with_name(f"{path.name}.py").is_file() for path in paths)

    def import_theirs(self, name, globals=None, locals=None, fromlist=(), level=0):
        """What `import` means in a student's module: their folder first, as when a script runs."""
        if level or not self.has(name):
            return builtins.__import__(name, globals, locals, fromlist, level)
        try:
            module = builtins.__import__(f"theirs.{name}", globals, locals, fromlist)
        except Exception:
            if ours_of(name) is None:
                raise
            return builtins.__import__(name, globals, locals, fromlist)   # no part needs theirs
        return module if fromlist else sys.modules["theirs." + name.split(".")[0]]

    def load(self, file):
        """The student's module of "scheduler.py". Fault, in a sentence, if it cannot be run."""
        try:
            return import_module(f"theirs.{module_of(file)}")
        except SyntaxError as error:
            where = Path(error.filename or file).name
            raise Fault(f"{where} cannot be read: line {error.lineno}: {error.msg}") from None
        except ModuleNotFoundError as error:
            if error.name and error.name.startswith("theirs"):
                raise Fault(f"{file} is not there") from None
            raise
        except (ValueError, RecursionError, MemoryError) as error:   # null bytes; nested too deep
            raise Fault(f"{file} cannot be read: {error or type(error).__name__}") from error

    @contextmanager
    def part(self, functions):
        """Ours, with this part's functions ("file.py:Class.method") set onto it."""
        before, undo = snapshot(), []
        self.forget()
        try:
            names_of = {}
            for file, _, name in (function.partition(":") for function in functions):
                names_of.setdefault(file, []).append(name)
            written = {file: self.load(file).__written__ for file in names_of}
            refuse_changes(before)
            for file, names in names_of.items():
                ours = import_module(module_of(file))
                for name in names:
                    owner = name.rpartition(".")[0]
                    if not owner:
                        self.check(name, new := written[file].get(name))
                        replace_everywhere(getattr(ours, name), new, undo)
                for owner in sorted({name.split(".")[0] for name in names if "." in name}):
                    methods = {name.split(".")[1] for name in names
                               if name.startswith(f"{owner}.")}
                    self.set_methods(getattr(ours, owner), written[file].get(owner), methods, undo)
            self.set_additions(undo)
            yield
        finally:
            for owner, name, value in reversed(undo):
                setattr(owner, name, value) if value is not undo else delattr(owner, name)
            refuse_changes(before)

    def set_additions(self, undo):
        """What a student has added to any of our classes, in the files that the part has loaded."""
        for name in [name for name in sys.modules if name.startswith("theirs.")]:
            ours = ours_of(name.removeprefix("theirs."))
            written = getattr(sys.modules[name], "__written__", {})
            for owner, mine in defined_in(ours).items() if ours else ():
                theirs = written.get(owner)
                if isinstance(mine, type) and isinstance(theirs, type) and theirs is not mine:
                    self.set_methods(mine, theirs, (), undo)

    def set_methods(self, ours, theirs, methods, undo):
        """A part's methods, and all that a student has added to a class, set onto our class."""
        if not isinstance(theirs, type):
            raise Fault(f"there is no class {ours.__name__} any more")
        found = {}
        for each in reversed(theirs.__mro__):   # a base class that they have added comes along
            if each.__module__.startswith("theirs."):
                found |= vars(each)
        for name in methods:
            self.check(f"{ours.__name__}.{name}", found.get(name))
        for name, value in found.items():
            mine = vars(ours).get(name, undo)
            if name in methods or mine is undo and name != "__annotations__" or (
                    name in ("__init__", "__post_init__") and differ(mine, value)):
                undo.append((ours, name, mine))
                setattr(ours, name, value)

    def check(self, name, function):
        """Fault if a function is missing, or not the student's own."""
        if not callable(function) and not isinstance(function, (property, staticmethod)):
            raise Fault(f"there is no {name} any more")
        code = getattr(inspect.unwrap(function), "__code__", None)
        path = Path(code.co_filename) if code else None
        if path and not (path.is_file() and any(map(path.resolve().is_relative_to, self.folders))):
            raise Fault(f"{name} comes from {path.name}, not from a file of yours")


class Loader(SourceFileLoader):
    """Executes a student's module: no .pyc files, and `import` means import_theirs."""

    def __init__(self, submission, fullname, path):
        super().__init__(fullname, path)
        self.submission = submission

    def get_code(self, fullname):
        return self.source_to_code(self.get_data(self.path), self.path)

    def exec_module(self, module):
        module.__builtins__ = {**vars(builtins), "__import__": self.submission.import_theirs,
                               "super": super_of_theirs}
        super().exec_module(module)
        written = dict(vars(module))
        if ours := ours_of(self.name.removeprefix("theirs.")):
            vars(module).update(defined_in(ours))
        module.__written__ = written   # as the student has it


def module_of(file):
    return file.removesuffix(".py").replace("/", ".")


def ours_of(name):
    """Our module of this name, or None."""
    try:
        module = import_module(name)
    except ImportError:
        return None
    return module if is_ours(module) else None


def is_ours(module):
    file = str(getattr(module, "__file__", ""))
    return file.startswith(tuple(ROOTS)) and "site-packages" not in file


ROOTS = []   # the folder, or the archive, that our modules come from; set by the kit


def defined_in(module):
    """The functions and classes that one of our modules defines, and objects of these classes."""
    return {name: value for name, value in vars(module).items()
            if type(value).__module__ == module.__name__ or isinstance(
                value, (FunctionType, type)) and value.__module__ == module.__name__}


def our_modules():
    return [module for name, module in list(sys.modules.items())
            if not name.startswith("theirs") and is_ours(module)]


def replace_everywhere(old, new, undo):
    """Wherever one of our modules, or of theirs, has imported a function."""
    theirs = [module for name, module in sys.modules.items() if name.startswith("theirs.")]
    for module in our_modules() + theirs:
        for name, value in list(vars(module).items()):
            if value is old:
                undo.append((module, name, old))
                setattr(module, name, new)


def super_of_theirs(*arguments):
    """
    `super()` in a student's module. Python's own looks for the student's class among the bases of
    an object of ours, in vain. This one takes the base classes from the student's class.
    """
    if arguments:
        return super(*arguments)
    frame = sys._getframe(1)
    return Above(frame.f_locals["__class__"], frame.f_locals[frame.f_code.co_varnames[0]])


class Above:
    """What `super()` gives: attributes of the classes above `owner`, bound to an object."""

    def __init__(self, owner, instance):
        self.seen = owner.__mro__[1:], instance

    def __getattribute__(self, name):
        classes, instance = object.__getattribute__(self, "seen")
        for each in classes:
            if name in vars(each):
                value = vars(each)[name]
                get = getattr(type(value), "__get__", None)
                return get(value, instance, type(instance)) if get else value
        raise AttributeError(f"'super' object has no attribute {name!r}")


def differ(a, b):
    """Whether two functions have different code, wherever it stands."""
    return code_of(getattr(a, "__code__", None)) != code_of(getattr(b, "__code__", None))


def code_of(code):
    """What a code object does, without the file and the lines where it stands."""
    return code and (code.co_code, code.co_names, *(
        code_of(each) if isinstance(each, CodeType) else each for each in code.co_consts))


def snapshot():
    """{(owner, name): value} of all our modules and classes, functions by their code."""
    found = {}
    for module in our_modules():
        for name, value in vars(module).items():
            found[module, name] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                found |= {(value, key): each for key, each in vars(value).items()
                          if callable(each) or isinstance(each, property)}
    for value in list(found.values()):
        if isinstance(value, FunctionType):
            found[value, "__code__"] = value.__code__
    return found


def refuse_changes(before):
    """Undoes what a student's code has done to ours. Fault if there was anything."""
    changed = []
    for (owner, name), value in before.items():
        if name not in ("__builtins__", "__warningregistry__") and getattr(
                owner, "__dict__", {}).get(name, value) is not value or (
                name == "__code__" and owner.__code__ is not value):
            changed.append(f"{getattr(owner, '__qualname__', owner.__name__)}.{name}")
            setattr(owner, name, value)
    if changed:
        raise Fault(f"your code replaces {changed[0]}")
