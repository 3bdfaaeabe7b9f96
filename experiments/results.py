"""
How measurements are taken, compared and kept, as results/NAME.json.

Every file says where and when: the machine, the versions, the date and the command. The marked
tables of README and docs, and the seconds in the pictures, are made from these files.
"""
import datetime
import json
import os
import platform
import re
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from toolbox.flags import knobs_of
from toolbox.trace import synchronize

FOLDER = Path(__file__).parent / "results"
PEERS = ("transformers", "CTranslate2", "vLLM", "OpenVINO")   # the first word of a peer's name


def run(generate, model, requests, knobs):
    """The trace of a stage on copies of these requests, with those of the knobs that it has."""
    mine, _ = knobs_of(generate, knobs)
    return generate(model, [replace(request) for request in requests], **mine)


def in_turn(ways, run, repeats, warm_up=1):
    """
    {way: [run(way), ...]}: `repeats` rounds in which each way runs once, so that a slow moment of
    the machine affects all of them. The rounds that warm up come first and do not count.
    """
    taken = {way: [] for way in ways}
    for _ in range(warm_up + repeats):
        for way in ways:
            taken[way].append(run(way))
    return {way: runs[warm_up:] for way, runs in taken.items()}


def ratio(pairs):
    """{"ratio": the median of mine / theirs, "spread": half of its range} over pairs of runs."""
    ratios = [mine / theirs for mine, theirs in pairs]
    return {"ratio": statistics.median(ratios), "spread": (max(ratios) - min(ratios)) / 2}


def median_seconds(work, device, repeats=7):
    """Median seconds of work(); two more calls warm up."""
    def run(_):
        start = time.perf_counter()
        work()
        synchronize(device)
        return time.perf_counter() - start

    return statistics.median(in_turn([work], run, repeats, warm_up=2)[work])


def best_peer(systems):
    """The name of the peer with the lowest median time; None if there is no peer."""
    return min((name for name in systems if name.startswith(PEERS)), default=None,
               key=lambda name: statistics.median(filter(None, systems[name]["rounds"])))


def times_best_peer(systems, name):
    """How many times as fast as the best peer: the median over the rounds in which both ran."""
    peer = best_peer(systems)
    if peer is None:
        return None
    pairs = zip(systems[name]["rounds"], systems[peer]["rounds"])
    return statistics.median(theirs / mine for mine, theirs in pairs if mine and theirs)


def load(name):
    """The contents of results/NAME.json."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def keep(path, prog, where, **figures):
    """
    Figures with their provenance, as `load` returns them. Writes them unless path is None.

    prog: the command, without its arguments
    """
    text = json.dumps({"where": where, "measured": provenance(prog), **figures}, indent=1) + "\n"
    if path:
        Path(path).write_text(text, encoding="utf-8")
    return json.loads(text)


def provenance(prog):
    """{"machine", "date", "command"} of this run."""
    return {"machine": machine(), "date": datetime.date.today().isoformat(),
            "command": " ".join([prog, *sys.argv[1:]])}


def machine():
    """The number of cores that may be used, and the processor's name."""
    try:
        name = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())[1]
    except (OSError, TypeError):   # not Linux, or it does not say
        name = platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else None
    return f"{cores} cores of {name}" if cores else name
