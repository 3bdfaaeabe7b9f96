"""
Makes student copies of a set, cut from the repository as it stands.

    python assignments/make.py 4 out --student ada          out/ada
    python assignments/make.py 4 out --roster roster.csv    a copy for each id in its first column

Signature and docstring of each function of the set stay; its body becomes an error that says what
is missing. What earlier sets asked for is in the copy as we have it. The kit's own files come
along, with our code in an archive, reference.bin, which the tests run. Same input, same bytes.
"""
import ast
import csv
import importlib
import json
import sys
import warnings
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT)]
import answers  # noqa: E402
from predict import questions  # noqa: E402

from lab import flags  # noqa: E402
from toolbox.validate import one_line  # noqa: E402

SETS = sorted(int(path.name[3:]) for path in HERE.glob("set?"))
KIT = ("conftest.py", "kit.py", "isolate.py", "answers.py")   # what a copy's tests run with
ROOMS = "", "toolbox", "lab", "lab/checks", "lab/loading", "beyond"   # our code that tests run


def tests_of(number):
    """The set's test module, which says what its parts are."""
    sys.path.insert(0, str(HERE / f"set{number}"))
    with warnings.catch_warnings():   # pytest knows its marker only once conftest.py is loaded
        warnings.simplefilter("ignore")
        return importlib.import_module(f"test_set{number}")


def parts_of(number):
    """{"3a": its points marker}, and likewise "3 numbers" and "3 break"."""
    found = {}
    for name, value in vars(tests_of(number)).items():
        for mark in getattr(value, "pytestmark", ()):
            if mark.name == "points":
                name = name.removeprefix("Test").removeprefix("test_").replace("_", " ")
                found[name] = mark
    return found


def functions_of(number):
    """{function: the first part that asks for it}, and None for what would give others away."""
    hidden = dict.fromkeys(getattr(tests_of(number), "HIDDEN", ()))
    return hidden | {function: name for name, mark in reversed(parts_of(number).items())
                     if not mark.kwargs.get("given") for function in mark.args[1:]}


def path_of(name):
    return ROOT / name if (ROOT / name).is_file() else HERE / name


def text_of(name):
    return path_of(name).read_text("utf-8")


def edited(text, edits):
    """The file with a bug in it. edits: [(function, code as it stands, code of the bug), ...]"""
    for function, old, new in edits:
        node, lines = node_of(text, function.split(":")[1]), text.splitlines(keepends=True)
        source = "".join(lines[node.lineno - 1:node.end_lineno])
        if source.count(old) != 1:
            raise ValueError(f"{function}: {old!r} occurs {source.count(old)} times")
        lines[node.lineno - 1:node.end_lineno] = source.replace(old, new)
        text = "".join(lines)
    return text


# --- blanking -------------------------------------------------------------------------------------

def node_of(text, name):
    """The definition of "Class.method" or "function"."""
    body = ast.parse(text).body
    for part in name.split("."):
        node = next(node for node in body if getattr(node, "name", None) == part)
        body = node.body
    return node


def body_of(node):
    """The statements of a function without its docstring."""
    return node.body[1:] if ast.get_docstring(node) is not None else node.body


def blanked(text, name, message):
    """The file with one function blanked: signature and docstring stay."""
    node = node_of(text, name)
    lines, body = text.splitlines(), body_of(node)
    # comments between the docstring or signature and the first statement belong to the body
    start = node.body[0].end_lineno if body is not node.body else next(
        number for number in range(node.lineno, node.end_lineno + 1)
        if lines[number - 1].split("#")[0].rstrip().endswith(":"))
    indent = " " * (node.col_offset + 4)
    size = node.end_lineno - body[0].lineno + 1
    lines[start:node.end_lineno] = [f"{indent}# {size} lines in ours",
                                    f"{indent}raise NotImplementedError({message!r})"]
    return "\n".join(lines) + "\n"


# --- a copy ---------------------------------------------------------------------------------------

def student_copy(number, student):
    """{file: its text} of one student's copy, without our code."""
    folder, tests = HERE / f"set{number}", tests_of(number)
    files = {name: text_of(name) for name in tests.FILES.split()}
    for function, part in functions_of(number).items():
        file, name = function.split(":")
        files[file] = blanked(files[file], name, f"{name} is not written yet (part {part})"
                              if part else f"{name} is not part of this set")
    if hasattr(tests, "personal"):   # what differs between students: set 7's bug
        files |= tests.personal(files, student, edited)
    files["student.json"] = json.dumps({"student": student, "set": number}) + "\n"
    title = (folder / "HANDOUT.md").read_text("utf-8").splitlines()[0].removeprefix("# ")
    files["README.md"] = filled("copy_readme.md", number=number, title=title, install=(
        "pip install pytest" + " torch numpy" * ("model.py" in files)
        + " tiktoken safetensors" * (number == 8)))
    mine = {path.name: path.read_text("utf-8") for path in sorted(folder.glob("*.*"))
            if path.name != "KEY.md" and f"set{number}/{path.name}" not in files}
    mine |= {name: (HERE / name).read_text("utf-8") for name in KIT}
    mine["written.md"] = f"# Set {number}: written answers\n\n## 1\n\n## 2\n\n## AI assistants\n"
    if asked := questions(number, student):
        mine["numbers.json"] = json.dumps(dict.fromkeys(asked), indent=1) + "\n"
        mine["NUMBERS.md"] = (
            f"# Numbers for {student}\n\nPredict them by hand, before you run anything. The "
            "answers go into numbers.json.\n\n" + "".join(
                f"{key}. {question}\n" for key, (question, _) in asked.items()))
        knobs = "those of `generate`" if "model.py" in files else (
            "`max_batch` (8 if you give none), `token_budget` (64) and `max_kv_tokens` (no limit)")
        mine["BREAK.md"] = filled("copy_break.md", number=number, knobs=knobs, bugs="".join(
            f"{i}. {bug['says']} Runs " + bug["runs"].replace(".", "/") + ".py" + "".join(
                f" with {name}={value!r}" for name, value in answers.fixed_knobs(bug).items())
            + ".\n" for i, bug in enumerate(answers.bugs_of(number), 1)))
        mine["break.json"] = json.dumps(dict.fromkeys("12345"), indent=1) + "\n"
    return files | {f"set{number}/{name}": text for name, text in mine.items()}


def filled(name, **values):
    return (HERE / name).read_text("utf-8").format(**values)


def make(number, folder, student):
    """Writes one copy. ValueError if the folder is not empty."""
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder")
    for name, text in student_copy(number, student).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    ours = {str(path.relative_to(ROOT)) for room in ROOMS for path in (ROOT / room).iterdir()
            if path.suffix in (".py", ".json")}
    packed = {name: text_of(name) for name in sorted({*ours, *tests_of(number).FILES.split()})}
    packed |= {"bugs.json": json.dumps(answers.bugs_of(number)), f"set{number}/__init__.py": ""}
    with zipfile.ZipFile(folder / f"set{number}" / "reference.bin", "w") as archive:
        for name, text in packed.items():   # with no times, so that equal copies have equal bytes
            archive.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED)


def roster(file):
    """The ids in the first column of a CSV file. ValueError for one that cannot name a folder."""
    with one_line(f"--roster {file}", csv.Error):
        with open(file, newline="", encoding="utf-8-sig") as lines:
            ids = [row[0].strip() for row in csv.reader(lines) if row and row[0].strip()]
        if ids and ids[0].lower() in ("id", "student", "email", "name"):
            del ids[0]
        for student in ids:
            if ids.count(student) > 1:
                raise ValueError(f"{student!r} stands there twice")
            if student.startswith(".") or set(student) & set('/\\:\0'):
                raise ValueError(f"{student!r} cannot be a folder's name")
        if not ids:
            raise ValueError("there is no id in its first column")
    return ids


def main(argv=None):
    p = flags.Parser(description=__doc__.split("\n")[1])
    p.add_argument("set", type=int, choices=SETS)
    p.add_argument("folder", type=Path, help="in which each student gets a folder")
    who = p.add_mutually_exclusive_group(required=True)
    who.add_argument("--student", help="an id, which decides numbers and hidden workloads")
    who.add_argument("--roster", help="a CSV file with an id in the first column")
    return p.run(make_all, argv)


def make_all(args):
    for student in roster(args.roster) if args.roster else [args.student]:
        make(args.set, args.folder / student, student)
        print(args.folder / student)
    return 0


if __name__ == "__main__":
    sys.exit(main())
