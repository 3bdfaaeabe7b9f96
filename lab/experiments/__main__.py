"""
Measures, and writes down what was measured:

    python -m lab.experiments                                    lists the experiments
    python -m lab.experiments rows --quick                       the least that says something
    python -m lab.experiments rows --json FILE --plot FILE       its figures and its picture
    python -m lab.experiments tables                             tables of README and docs
    python -m lab.experiments pictures                           their pictures

An experiment is a function of the flags that returns its figures as plain data; beside it stand
functions that make a table and a picture of them. results/ holds the committed figures.
"""
import json
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Callable, NamedTuple

from lab import flags
from lab.compiled import native
from lab.experiments import (
    bench,
    figures,
    gpu,
    ladder,
    memory,
    pictures,
    prepacking,
    results,
    rows,
    tables,
    train,
)
from lab.loading.load import load

PROG = "python -m lab.experiments"


class Experiment(NamedTuple):
    measure: Callable    # args, device, dtype -> figures; or yields several
    table: Callable      # figures -> Table
    draw: Callable       # figures (or several), path; None: there is no picture
    flags: dict = {}


EXPERIMENTS = {
    "ladder": Experiment(ladder.measure, ladder.table, figures.slots),
    "rows": Experiment(rows.measure_rows, rows.rows_table, figures.rows, rows.FLAGS),
    "gaps": Experiment(rows.measure_gaps, rows.gaps_table, figures.gaps, rows.FLAGS),
    "memory": Experiment(memory.measure, memory.table, lambda _, path: figures.pool(
        memory.filling_pool(load()[0]), path)),
    "prepacking": Experiment(prepacking.measure, prepacking.table, figures.kinds),
    "bench": Experiment(bench.measure, bench.table, figures.bench, bench.FLAGS),
    "gpu": Experiment(gpu.measure, gpu.table, None)}
COMMANDS = {"train": (train.train, train.FLAGS), "tables": (tables.write, tables.FLAGS),
            "pictures": (pictures.draw, {})}


def measure(experiment, args):
    """Measures, prints and keeps. Returns the exit status: 1 if a request is WRONG."""
    flags.check_path(args.json, "--json")
    flags.check_path(args.plot, "--plot", flags.PICTURES)
    device = flags.device_of(args)
    origin, taken = results.origin(device, args.dtype, args.command), []
    print(origin["where"], flush=True)
    native.keep_memory()   # else what the system clears for each temporary is in every figure
    found = experiment.measure(args, device, flags.DTYPES[args.dtype])
    several = not isinstance(found, dict)
    for each in found if several else [found]:
        taken.append({**origin, **each})
        if args.json:   # one by one: an interrupted run has its results
            text = json.dumps(taken if several else taken[0], indent=1)
            Path(args.json).write_text(text + "\n", encoding="utf-8")
        tables.show(experiment.table(each))
    if args.plot:
        experiment.draw(*taken, path=args.plot)
        print("drawn in", args.plot)
    return int(any(each.get("wrong") for each in taken))


def parser():
    p = flags.Parser(prog=PROG, description=__doc__.strip().split(":")[0] + ".")
    names = p.add_subparsers(dest="name", metavar="NAME",
                             title="experiments, and what is made of their results")
    for name, (run, *_, own) in {**EXPERIMENTS, **COMMANDS}.items():
        one = names.add_parser(name, help=run.__doc__, description=run.__doc__)
        one.set_defaults(run=run)
        if name in EXPERIMENTS:
            one.set_defaults(run=partial(measure, EXPERIMENTS[name]), plot=None)
            one.add_argument("--quick", action="store_true",
                             help="the least that says something: fewer runs, less work")
            one.add_argument("--json", metavar="FILE.json", help="write the figures")
            if EXPERIMENTS[name].draw:
                one.add_argument("--plot", metavar="FILE.png", help="draw them")
            flags.add_place(one)
        for flag, settings in own.items():
            one.add_argument(flag, **settings)
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
