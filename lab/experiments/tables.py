"""
Writes tables: to the terminal, and into README and docs from the committed results.

A table stands between <!-- table: NAME --> and <!-- end -->. Do not edit it by hand.
"""
import re
from pathlib import Path

from lab.experiments import bench, configs, gpu, ladder, memory, prepacking, results, rows
from lab.experiments.results import Table
from lab.views.report import aligned

ROOT = Path(__file__).parent.parent.parent
MARKED = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.S)
FLAGS = {"--check": dict(action="store_true", help="write nothing; fail if a table is old")}

TABLES = {   # a table's name: the function that makes it, or several; the results that it takes
    "stages": (ladder.ideas, "ladder"),
    "bug": (ladder.bug, "ladder"),
    "ladder": (ladder.table, "ladder"),
    "rows": (rows.rows_table, "rows_builtin", "rows"),
    "gaps": (rows.gaps_table, "gaps"),
    "sharing": (memory.table, "memory"),
    "prepacking": (prepacking.table, "prepacking"),
    "speed": (bench.speed_table, "bench"),
    "peers": (bench.peers_table, "peers"),
    "bench": (lambda *found: [*map(bench.table, found)], "bench"),
    "gpu ladder": (gpu.table, "gpu"),
    "gpu real": (gpu.real_table, "gpu"),
    "gpu published": (gpu.published_table, "gpu"),
    "gpu memory": (gpu.memory_table, "gpu"),
    "configs": (configs.table,)}


def pages():
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def show(table):
    """Prints a table."""
    print(f"\n{table.how}\n{aligned([table.head, *table.rows])}", flush=True)


def markdown(table):
    kinds = ["---"] * table.words + ["---:"] * (len(table.head) - table.words)
    return "".join("| " + " | ".join(map(str, line)) + " |\n"
                   for line in (table.head, kinds, *table.rows))


def text_of(make, *files):
    """Tables of these results; in small print where, when and how the last were measured."""
    kept = [results.load(file) for file in files]
    found = sum((each if isinstance(each, list) else [each] for each in kept), [])
    made = make(*found)
    made = [made] if isinstance(made, Table) else made
    if not files:   # nothing has been measured
        return "".join(map(markdown, made))
    commands = dict.fromkeys(f"`{result['measured']['command']}`" for result in found)
    below = made[0].small_print.format(where=found[-1]["where"], how=made[0].how,
                                       commands=", ".join(commands), **found[-1]["measured"])
    return "\n".join(map(markdown, made)) + (f"\n<sub>{below}</sub>\n" if below else "")


def renewed(text):
    """A page's text with its tables made anew."""
    return MARKED.sub(lambda found: found[1] + text_of(*TABLES[found[2]]) + found[3], text)


def write(args):
    """Writes the tables of README and docs anew, from the committed results."""
    old = []
    for path in pages():
        text = path.read_text(encoding="utf-8")
        new = renewed(text)
        if new != text:
            old.append(path.relative_to(ROOT).as_posix())
            if not args.check:
                path.write_text(new, encoding="utf-8")
    print(f"{'old' if args.check else 'renewed'}: {', '.join(old)}" if old else "up to date")
    return int(args.check and bool(old))
