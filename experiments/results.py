"""
Committed measurements, results/NAME.json, and what they were measured on.

Every file says where and when: the machine, the versions, the date, the commit and the command. The
tables of README and docs, and the pictures, are made from these files only.
"""
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "results"


def load(name):
    """The contents of results/NAME.json."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def save(path, prog, where, **figures):
    """Writes figures with their provenance. prog: the command, without its arguments."""
    content = {"where": where, "measured": provenance(prog), **figures}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")


def provenance(prog):
    """{"machine", "date", "commit", "command"} of this run."""
    return {"machine": machine(), "date": datetime.date.today().isoformat(), "commit": commit(),
            "command": " ".join([prog, *sys.argv[1:]])}


def machine():
    """The number of cores that may be used, and the processor's name."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            name = next((line.split(":")[1].strip() for line in file if "model name" in line), name)
    except OSError:
        pass   # not Linux
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else None
    return f"{cores} cores of {name}" if cores else name


def commit():
    """The commit's short hash, with + if Python files have changed since."""
    try:
        done = [subprocess.run(["git", *words], cwd=FOLDER, capture_output=True, text=True,
                               check=True).stdout.strip()
                for words in (["rev-parse", "--short", "HEAD"],
                              ["status", "--porcelain", "--untracked-files=no", ":/*.py"])]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done[0] + "+" * bool(done[1])
