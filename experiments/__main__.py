"""
Measures, and writes down what was measured:

    python -m experiments                                    lists the experiments
    python -m experiments rows --quick                       the least that says something
    python -m experiments rows --json FILE --plot FILE       its figures and its picture
    python -m experiments tables                             tables of README and docs
    python -m experiments pictures                           their pictures

An experiment is a function of the flags that returns its figures as plain data; beside it stand
functions that make tables and a picture of them. results/ holds the committed figures.
"""
import platform
import sys
from typing import Callable, NamedTuple

import torch

import command_line
from experiments import (
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
from loading.load import load
from toolbox import flags
from toolbox.validate import at_least_1

PROG = "python -m experiments"


class Experiment(NamedTuple):
    measure: Callable    # args, device, dtype -> figures; or yields several
    tables: Callable     # figures -> [Table, ...]
    quick: str           # what --quick does
    draw: Callable       # figures (a list, if there are several), path -> path or paths
    flags: dict = {}


EXPERIMENTS = {
    "ladder": Experiment(
        ladder.measure, lambda found: [ladder.table(found)], "one run of each stage",
        figures.slots, {"--repeats": dict(type=int, default=3, metavar="N", help=(
            "runs of each stage, in turn; the median of each duration counts"))}),
    "rows": Experiment(
        rows.measure_rows, lambda found: [rows.rows_table(found)], "at most 16 rows",
        lambda found, path: figures.rows({found["model"]: found["points"]}, path), rows.FLAGS),
    "gaps": Experiment(
        rows.measure_gaps, lambda found: [rows.gaps_table(found)], "one run of each stage",
        lambda found, path: figures.itl(found["points"], rows.ARRIVAL, found["prompt_tokens"],
                                        path), rows.FLAGS),
    "memory": Experiment(
        memory.measure, lambda found: [memory.storm_table(found), memory.sharing_table(found),
                                       memory.gathered_table(found)],
        "one run each, the built-in model only",
        lambda _, path: figures.pool(memory.filling_pool(load()[0]), path)),
    "prepacking": Experiment(
        prepacking.measure, prepacking.tables, "fewer prompts and batches: about a minute",
        figures.prepacking, prepacking.FLAGS),
    "bench": Experiment(
        bench.measure, lambda found: [bench.table(found), bench.parts_table(found)],
        "a quarter of the requests, the small model, one run each", figures.bench, bench.FLAGS)}
COMMANDS = {"gpu": (gpu.calculate, gpu.FLAGS), "train": (train.train, train.FLAGS),
            "tables": (tables.write, tables.FLAGS), "pictures": (pictures.draw, {})}


def measure(experiment, args, command):
    """Measures, prints and keeps. Returns the exit status: 1 if a request is WRONG."""
    if "repeats" in args:
        at_least_1(**{"--repeats": args.repeats})
    flags.check_path(args.json, "--json")
    flags.check_path(args.plot, "--plot", flags.PICTURES)
    device = flags.device_of(args)
    name = (torch.cuda.get_device_name(device) if device.type == "cuda"
            else f"{device}, {torch.get_num_threads()} threads")
    where = f"{name}, torch {torch.__version__}, {args.dtype}, Python {platform.python_version()}"
    print(where, flush=True)
    found = experiment.measure(args, device, flags.DTYPES[args.dtype])
    several, figures = not isinstance(found, dict), []
    for each in found if several else [found]:
        figures.append(each)   # kept one by one: an interrupted run has its results
        kept = results.keep(args.json, command, where, figures if several else each)
        for table in experiment.tables(kept[-1] if several else kept):
            tables.show(table)
    if args.plot:
        drawn = experiment.draw(kept, args.plot)
        print("drawn in", *(drawn if isinstance(drawn, list) else [drawn]))
    wrong = [] if several else kept.get("wrong") or []
    print(*wrong, sep="\n", end="\n" * bool(wrong))
    return int(bool(wrong))


def parser():
    p = flags.Parser(prog=PROG, description=__doc__.strip().split(":")[0] + ".")
    names = p.add_subparsers(dest="name", metavar="NAME",
                             title="experiments, and what is made of their results")
    for name, (run, *_, own) in {**EXPERIMENTS, **COMMANDS}.items():
        is_ladder = name == "ladder"   # it has the flags of a stage's script, too
        one = names.add_parser(
            name, help=run.__doc__, description=run.__doc__,
            parents=[command_line.parser(ladder.__doc__)] if is_ladder else [],
            conflict_handler="resolve")
        if name in EXPERIMENTS:
            one.add_argument("--quick", action="store_true", help=EXPERIMENTS[name].quick)
            one.add_argument("--json", metavar="FILE.json", help="write the figures")
            one.add_argument("--plot", metavar="FILE.png", help="draw them")
            if not is_ladder:
                flags.add_place(one)
        for flag, settings in own.items():
            one.add_argument(flag, **settings)
    return p


def main(argv=None):
    argv = sys.argv[1:] if argv is None else [str(part) for part in argv]
    p = parser()
    args = p.parse_args(argv)
    if args.name is None:
        p.print_help()
        return 0
    if args.name in COMMANDS:
        return flags.guarded(f"{PROG} {args.name}", lambda: COMMANDS[args.name][0](args))
    return flags.guarded(f"{PROG} {args.name}", lambda: measure(
        EXPERIMENTS[args.name], args, " ".join([PROG, *argv])))


if __name__ == "__main__":
    sys.exit(main())
