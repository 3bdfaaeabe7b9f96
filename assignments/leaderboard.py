"""
Two open tasks, ranked by counts and never by seconds. open.md describes them.

    python assignments/leaderboard.py policy DIR     each folder in DIR holds a policy.py
    python assignments/leaderboard.py packing DIR    each folder in DIR holds a packing.py

Each runs in a process of its own, with limits. `ours` and a lower bound of packing are ranked, too.
"""
import math
import random
import runpy
import sys
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stdout
from io import StringIO
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

from isolate import Fault
from kit import limit_process, limited

from request import Request, advance, indices_due
from scheduler import Scheduler

ARRIVALS, BUDGET, PLACES = 2000, 48, 40
SECONDS = 60   # of CPU time, for each student


# --- a sharing policy -----------------------------------------------------------------------------

def workload(rng):
    """Requests that arrive as a Poisson process, at about 90% of what the budget can serve."""
    time, requests = 0.0, []
    for i in range(ARRIVALS):
        prompt = min(max(round(rng.lognormvariate(3.4, 0.9)), 1), 400)
        new = min(max(round(rng.lognormvariate(2.3, 0.6)), 2), 60)
        requests.append(Request([0] * prompt, new, name=f"r{i}", arrival=int(time)))
        requests[-1].context_length = 512
        time += rng.expovariate(0.78)
    return requests


def check_plan(plan, running):
    """ValueError for a plan that no step can compute."""
    if not plan or len({request for request, _ in plan}) != len(plan):
        raise ValueError("a request appears twice in the plan" if plan else "the plan is empty")
    for request, n in plan:
        if request not in running or type(n) is not int or not 1 <= n <= request.todo:
            raise ValueError(f"{request} cannot compute {n} of its {request.todo} tokens")
    if (tokens := sum(n for _, n in plan)) > BUDGET:
        raise ValueError(f"the plan has {tokens} tokens, the budget is {BUDGET}")


def serve(share, rng):
    """Serves the workload under a policy: (how it ranks, what is said of it)."""
    requests = workload(rng)
    waiting, running, step = deque(requests), [], 0
    while waiting or running:
        step = step if running else max(step, waiting[0].arrival)
        while waiting and len(running) < PLACES and waiting[0].arrival <= step:
            running.append(waiting.popleft())
        plan = [(request, n) for request, n in share(list(running), BUDGET)]
        check_plan(plan, running)
        due = [plan[i][0] for i in indices_due(plan)]
        for request in due:
            request.token_steps.append(step)
        advance(plan, [0] * len(due))
        running = [request for request in running if not request.finished]
        step += 1
    ttft = [request.token_steps[0] - request.arrival + 1 for request in requests]
    gaps = [b - a for request in requests for a, b in pairwise(request.token_steps)]
    mean, late = sum(ttft) / len(ttft), sum(gap > 2 for gap in gaps) / len(gaps)
    return (late > 0.01, mean), (f"mean TTFT {mean:.2f} steps, {late:.2%} of ITL above 2"
                                 + ": not allowed" * (late > 0.01))


def our_share(running, budget):
    return Scheduler.share_budget(SimpleNamespace(running=running, token_budget=budget))


# --- bin packing ----------------------------------------------------------------------------------

def batches(rng):
    """Lengths and row size of the batches to pack: uniform, skewed, and from 30 to 60."""
    draws = (lambda: rng.randint(1, 100), lambda: min(100, round(rng.lognormvariate(3, 0.8)) + 1),
             lambda: rng.randint(30, 60))
    return [([draws[i % 3]() for _ in range(rng.randint(40, 80))], 100) for i in range(30)]


def our_pack(lengths, size):
    from beyond.prepacked import first_fit_decreasing  # this loads torch
    return first_fit_decreasing(lengths, size)


def fill(pack, rng):
    """Packs all batches: (how it ranks, how many rows it takes). ValueError if not a packing."""
    total = 0
    for lengths, size in batches(rng):
        rows = pack(list(lengths), size)
        if sorted(i for row in rows for i in row) != list(range(len(lengths))):
            raise ValueError("each prompt must be in exactly one row")
        if any(sum(lengths[i] for i in row) > size for row in rows):
            raise ValueError(f"a row holds more than {size} tokens")
        total += len(rows)
    return (False, total), f"{total} rows"


# --- the table ------------------------------------------------------------------------------------

TASKS = {"policy": ("share", serve, our_share), "packing": ("pack", fill, our_pack)}
LAST = True, math.inf


def play(task, file, seed):
    """In a process of its own: how a student's file ranks, and what is said of it."""
    name, judge, _ = TASKS[task]
    try:
        with limited(SECONDS), redirect_stdout(StringIO()):
            return judge(runpy.run_path(file)[name], random.Random(seed))
    except Fault as fault:
        return LAST, str(fault)
    except Exception as error:
        return LAST, f"raises {type(error).__name__}: {str(error).strip():.150}"


def result_of(task, file, seed):
    if not file.is_file():
        return LAST, f"there is no {file.name}"
    try:
        with ProcessPoolExecutor(1, get_context("spawn"), limit_process, (2 * SECONDS,)) as pool:
            return pool.submit(play, task, str(file), seed).result()
    except BrokenProcessPool:
        return LAST, "ends the process"


def main(argv=None):
    from lab import flags  # this loads torch, and a student's process needs none
    p = flags.Parser(description=__doc__.split("\n")[1])
    p.add_argument("task", choices=TASKS)
    p.add_argument("folder", type=Path, help="with a folder for each student")
    p.add_argument("--salt", default="", help="decides the workload")
    return p.run(rank, argv)


def rank(args):
    """Prints who is where. Returns the exit status."""
    if not args.folder.is_dir():
        raise ValueError(f"{args.folder} is not a folder")
    seed, (_, judge, ours) = f"{args.task} {args.salt}", TASKS[args.task]
    found = {"ours": judge(ours, random.Random(seed))}
    if args.task == "packing":
        rows = sum(math.ceil(sum(lengths) / size) for lengths, size in batches(random.Random(seed)))
        found["lower bound"] = (False, rows), f"{rows} rows"
    found |= {path.name: result_of(args.task, path / f"{args.task}.py", seed)
              for path in sorted(args.folder.iterdir()) if path.is_dir()}
    for place, name in enumerate(sorted(found, key=found.get), 1):
        print(f"{place:3} {name:20} {found[name][1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
