"""
Measures, and writes down what was measured.

    python -m lab.experiments                                    lists the experiments
    python -m lab.experiments rows --quick                       the least that says something
    python -m lab.experiments rows --json FILE                   keeps its figures
    python -m lab.experiments tables                             tables of README and docs
    python -m lab.experiments pictures                           their pictures

An experiment is a function of the flags that returns its figures as plain data; beside it stands a
function that makes a table of them. results/ holds the committed figures, of which all tables and
pictures of README and docs are made.
"""
import json
import shlex
import sys
from functools import partial
from pathlib import Path

from lab import flags
from lab.compiled import native
from lab.experiments import bench, gpu, memory, pictures, plans, results, rows, stages, train

PROG = "python -m lab.experiments"

EXPERIMENTS = {   # what measures (args, device, dtype -> figures, or several), their Table, flags
    "stages": (stages.measure, stages.table, {}),
    "rows": (rows.measure_rows, rows.rows_table, rows.FLAGS),
    "gaps": (rows.measure_gaps, rows.gaps_table, rows.FLAGS),
    "memory": (memory.measure, memory.table, {}),
    "bench": (bench.measure, bench.table, bench.FLAGS),
    "gpu": (gpu.measure, gpu.table, {})}

TABLES = {   # a table's name in a page: what makes it, a Table or several, and of which results
    "stages": (stages.ideas, "stages"),
    "bug": (stages.bug, "stages"),
    "stages in full": (stages.table, "stages"),
    "rows": (rows.rows_table, "rows_builtin", "rows"),
    "gaps": (rows.gaps_table, "gaps"),
    "sharing": (memory.table, "memory"),
    "peers": (bench.peers_table, "peers"),
    "machines": (bench.machines_table, "bench", "machines"),
    "bench": (lambda *found: [*map(bench.table, found)], "bench"),
    "gpu stages": (gpu.table, "gpu"),
    "gpu real": (gpu.real_table, "gpu"),
    "gpu memory": (gpu.memory_table, "gpu")}


def measure(work, table, args):
    """Measures, prints and keeps. Returns the exit status: 1 if a request is WRONG."""
    flags.check_path(args.json, "--json")
    device = flags.device_of(args, getattr(args, "model", "builtin") == "builtin")
    native.keep_memory()   # else what the system clears for each temporary is in every figure
    measured = work(args, device, flags.DTYPES[args.dtype])
    is_one = isinstance(measured, dict)
    kept = []
    for figures in [measured] if is_one else measured:
        kept.append({**results.origin(device, args.dtype, args.command), **figures})
        if args.json:   # one by one: an interrupted run has its results
            write_json(args.json, kept[0] if is_one else kept)
        print("\n" + kept[-1]["where"], end="")
        results.show(table(figures))
    return int(any(figures.get("wrong") for figures in kept))


def write_json(path, figures):
    Path(path).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def write_tables(args):
    """Writes the tables of README and docs anew, from the committed results."""
    for path in results.PAGES:
        text = path.read_text(encoding="utf-8")
        new = results.renewed(text, TABLES)
        if new != text:
            path.write_text(new, encoding="utf-8")
            print("renewed", path.relative_to(results.ROOT).as_posix())
    return 0


def add(names, name, run, own={}):
    """A command: a function of the flags, whose docstring is its help, and flags of its own."""
    command = names.add_parser(name, help=run.__doc__, description=run.__doc__)
    command.set_defaults(run=run)
    for flag, settings in own.items():
        command.add_argument(flag, **settings)
    return command


def parser():
    p = flags.Parser(prog=PROG, description=flags.first_paragraph(__doc__))
    names = p.add_subparsers(dest="name", metavar="NAME",
                             title="experiments, and what is made of their results")
    for name, (work, table, own) in EXPERIMENTS.items():
        command = add(names, name, work, own)
        command.set_defaults(run=partial(measure, work, table))
        command.add_argument("--quick", action="store_true",
                             help="the least that says something: fewer runs, less work")
        command.add_argument("--json", metavar="FILE.json", help="write the figures")
        flags.add_place(command)
    add(names, "plans", plans.compare, plans.FLAGS)
    add(names, "train", train.train, train.FLAGS)
    add(names, "tables", write_tables)
    add(names, "pictures", pictures.draw)
    return p


def main(argv=None):
    argv = sys.argv[1:] if argv is None else [str(part) for part in argv]
    args = parser().parse_args(argv)
    if args.name is None:
        parser().print_help()
        return 0
    args.command = f"{PROG} {shlex.join(argv)}"
    return flags.guarded(f"{PROG} {args.name}", lambda: args.run(args))


if __name__ == "__main__":
    sys.exit(main())
