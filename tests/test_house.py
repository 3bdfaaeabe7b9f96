"""The house: a room imports rooms on floors below its own, and no others. So there is no circle."""
import ast

from common import ROOT

FLOORS = [   # from the ground up; CONTRIBUTING.md says what each room is for
    ["toolbox"], ["path"], ["beyond"], ["lab"], ["assignments"], ["notebooks"], ["docs"]]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
PATH = {path.stem for path in ROOT.glob("*.py")}
LAZY = {("model.py", "lab")}   # one line, in model.optimize
FILES = [path for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("*/**/*.py")])
         if path.relative_to(ROOT).parts[0] in (*FLOOR, path.name)]


def imported(tree):
    """Modules that a file imports, anywhere but where it runs as a script."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        yield from imported(node)


def room_of(name):
    first = name.split(".")[0]
    return "path" if first in PATH else first


def test_no_room_imports_a_higher_one_or_one_beside_it():
    arrows = []
    for path in FILES:
        file = path.relative_to(ROOT).as_posix()
        names = [*imported(ast.parse(path.read_text(encoding="utf-8")))]
        mine = room_of(file.removesuffix(".py").replace("/", "."))
        arrows += [f"{file} imports {room}" for room in sorted({*map(room_of, names)} - {mine})
                   if FLOOR.get(room, -1) >= FLOOR[mine] and (file, room) not in LAZY]
        if file in ("request.py", "scheduler.py", "paging.py", "toolbox/validate.py"):
            assert not {"torch", "numpy", "time"} & {*names}   # no tensors, and no clock
    assert arrows == []
