"""
Writes tables: to the terminal, and into README and docs from the committed results.

A table stands between <!-- table: NAME --> and <!-- end -->. Do not edit it by hand.
"""
import re
from functools import partial
from pathlib import Path

from beyond import published
from experiments import bench, ladder, memory, prepacking, results, rows
from experiments.results import Table
from views.report import aligned

ROOT = Path(__file__).parent.parent
MARKED = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.S)
FLAGS = {"--check": dict(action="store_true", help="write nothing; fail if a table is old")}


def pages():
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def show(table):
    """Prints a table."""
    print(f"\n{table.title}" if table.title else "", aligned([table.head, *table.rows]), sep="\n",
          flush=True)


def markdown(table, words=1):
    """The first columns are `words`, the others are numbers."""
    lines = [table.head, ["---"] * words + ["---:"] * (len(table.head) - words), *table.rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def of(make, *files, command=True):
    """
    The text of a table, or of several, made from these results. Below stands in small print where
    the last of them were measured, when, how, and by which commands.
    """
    found = [result for file in files for result in results.load_all(file)]
    made = make(*found)
    made = [made] if isinstance(made, Table) else made
    last = results.load_all(files[-1])
    measured, how = last[0]["measured"], made[0].how
    commands = dict.fromkeys(f"`{result['measured']['command']}`" for result in last)
    origin = "; ".join([measured["machine"], last[0]["where"], measured["date"], how,
                        *[", ".join(commands)] * command])
    return "\n".join(map(markdown, made)) + f"\n<sub>{origin}</sub>\n"


# --- calculated for GPUs --------------------------------------------------------------------------

def gpu_ladder(found):
    gpus = found["ladder"]
    yield ["tokens/s, llama-2-7b", *gpus, "a100: TTFT", "ITL p99", "W1: passes", "useful"]
    for stage, f in gpus["a100"].items():
        yield [stage, *(f"{stages[stage]['tokens_per_s']:,.0f}" for stages in gpus.values()),
               f"{f['ttft_ms']['mean']:,.0f} ms", f"{f['itl_ms']['p99']:,.0f} ms",
               f"{f['passes']:,}", f"{f['useful']:.0%}"]


def gpu_machine(found):
    workloads = dict.fromkeys(row["workload"] for row in found["this_machine"])
    yield ["stage: error in tokens/s", *workloads]
    for stage in dict.fromkeys(row["stage"] for row in found["this_machine"]):
        yield [stage, *(f"{r['calculated'] / r['measured'] - 1:+.0%}".replace("-0%", "+0%")
                        for r in found["this_machine"] if r["stage"] == stage)]


def gpu_capacity(found):
    yield ["ITL p99 below", "budget 512", "budget 2,048", "whole prompts", "best / whole"]
    for limit, rates in found["capacity"].items():
        *budgets, whole = rates.values()
        yield [limit, *(f"{rate:.1f} requests/s" for rate in rates.values()),
               f"{max(budgets) / whole:.1f}" if whole else "–"]


def calculated(table):
    """Of docs/gpu.md."""
    head, *rows = table(results.load("gpu"))
    return markdown(Table(head, rows)) + "\n<sub>calculated; `python -m experiments gpu`</sub>\n"


# --- all of them ----------------------------------------------------------------------------------

TABLES = {   # a table's name: its text
    "stages": lambda: markdown(ladder.ideas(results.load("ladder")), words=2),
    "ladder": partial(of, ladder.table, "ladder"),
    "rows": partial(of, rows.rows_table, "rows_builtin", "rows"),
    "gaps": partial(of, rows.gaps_table, "gaps"),
    "sharing": partial(of, memory.sharing_table, "memory"),
    "gathered": partial(of, memory.gathered_table, "memory"),
    "prepacking": partial(of, prepacking.kinds_table, "prepacking"),
    "speed": partial(of, bench.speed_table, "peers", command=False),
    "peers": partial(of, bench.peers_table, "peers"),
    "bench": partial(of, lambda *found: [bench.table(each, False) for each in found], "bench"),
    "gpu ladder": partial(calculated, gpu_ladder),
    "gpu machine": partial(calculated, gpu_machine),
    "gpu published": partial(calculated, lambda found: published.summary(found["published"])),
    "gpu capacity": partial(calculated, gpu_capacity)}


def renewed(text):
    """A page's text with its tables made anew. ValueError for a table that is not known."""
    def table(match):
        if match[2] not in TABLES:
            raise ValueError(f"there is no table {match[2]!r}, only {', '.join(TABLES)}")
        return match[1] + TABLES[match[2]]() + match[3]

    return MARKED.sub(table, text)


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
