"""
How measurements are taken, kept as results/NAME.json, and shown as tables.

Every file says where and when: the machine, the versions, the date and the command. The tables of
README and docs, and the seconds in the pictures, are made from these files. A page's table stands
between <!-- table: NAME --> and <!-- end -->. Do not edit it by hand.
"""
import datetime
import json
import math
import os
import platform
import re
import statistics
import sys
import time
import timeit
from pathlib import Path
from typing import NamedTuple

import torch

from lab.views.report import aligned, latencies, mean, percentile, totals
from toolbox.trace import synchronize

FOLDER = Path(__file__).parent / "results"
ROOT = FOLDER.parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKED = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.S)


# --- to measure -----------------------------------------------------------------------------------

def in_turn(ways, run, repeats, warm_up=1, patience=math.inf):
    """
    {way: [run(way), ...]}: `repeats` rounds in which each way runs once, so that a slow moment of
    the machine affects all of them. The rounds that warm up come first and do not count. On stderr
    stands how far it is: each way's name, and the seconds of its run. A way that took more than
    `patience` seconds does not run again.
    """
    taken, quick = {way: [] for way in ways}, [*ways]
    for _ in range(warm_up + repeats):
        for way in [*quick]:
            start = time.perf_counter()
            taken[way].append(run(way))
            seconds = time.perf_counter() - start
            print(f"  {way:32} {seconds:7.2f} s", file=sys.stderr)
            if seconds > patience:
                quick.remove(way)
    return {way: runs[warm_up:] for way, runs in taken.items()}


def median_seconds(work, device, repeats=7):
    """Median seconds of work(); two more calls warm up."""
    def run():
        work()
        synchronize(device)

    return statistics.median(timeit.repeat(run, number=1, repeat=2 + repeats)[2:])


def row_of(trace):
    """What tables say of a run, and its other totals. itl_p99: None if no request has two tokens"""
    waits = latencies(trace)
    return {**totals(trace), "ttft_mean": mean(waits["ttft_seconds"]),
            "itl_p99": percentile(waits["itl_seconds"], 99) if waits["itl_seconds"] else None}


# --- to keep --------------------------------------------------------------------------------------

def load(name):
    """The contents of results/NAME.json: figures, or a list of them, one for each workload."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def origin(device, dtype, command):
    """Where figures come from, as it stands in their file."""
    threads = torch.get_num_threads()
    place = (torch.cuda.get_device_name(device) if device.type == "cuda"
             else f"{device}, {threads} thread{'s' * (threads > 1)}")
    try:
        cpu = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())[1]
    except (OSError, TypeError):   # not Linux, or it does not say
        cpu = platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return {"where": f"{place}, torch {torch.__version__}, {dtype}, "
                     f"Python {platform.python_version()}",
            "measured": {"machine": f"{cores} cores of {cpu}",
                         "date": datetime.date.today().isoformat(), "command": command}}


# --- to show --------------------------------------------------------------------------------------

class Table(NamedTuple):
    """What an experiment says of its figures, to be printed or to stand in a document."""
    head: list
    rows: list
    how: str = ""     # it was measured
    words: int = 1    # columns of words, before those of numbers
    small_print: str = "{machine}; {where}; {date}; {how}; {commands}"   # below it, in documents


def show(table):
    """Prints a table."""
    print(f"\n{table.how}\n{aligned([table.head, *table.rows])}", flush=True)


def markdown(table):
    kinds = ["---"] * table.words + ["---:"] * (len(table.head) - table.words)
    lines = [table.head, kinds, *table.rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def text_of(make, *files):
    """Tables of these results; in small print where, when and how the last were measured."""
    results = []
    for file in files:
        contents = load(file)
        results += contents if isinstance(contents, list) else [contents]
    tables = make(*results)
    if isinstance(tables, Table):
        tables = [tables]
    first, last = tables[0], results[-1]
    commands = dict.fromkeys(f"`{result['measured']['command']}`" for result in results)
    small_print = first.small_print.format(where=last["where"], how=first.how,
                                           commands=", ".join(commands), **last["measured"])
    return "\n".join(map(markdown, tables)) + f"\n<sub>{small_print}</sub>\n"


def renewed(text, tables):
    """A page's text with its tables made anew. tables: {name: (what makes it, its results)}"""
    def table_between(match):
        begin, name, end = match.groups()
        return begin + text_of(*tables[name]) + end

    return MARKED.sub(table_between, text)
