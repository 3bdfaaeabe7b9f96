"""
What a step costs besides the model: choosing its requests, and sharing the machine.

The first table is the scheduler's own time, without a model, with few and with many waiting
requests. The second is the time of a step of 16 decodes, alone and beside another program: an
endless loop, which wants one core for itself. Quiet and busy runs take turns.

    python -m experiments.overhead
    python -m experiments.overhead --json overhead.json
"""
import random
import statistics
import subprocess
import sys
import time
from functools import partial

from experiments import results
from generate_ragged import generate
from kernels.threads import LONGEST_PAUSE
from model import GPT, GPTConfig
from paging import POLICIES, PagedScheduler, Pages
from request import Request, complete, prepare
from scheduler import Scheduler
from toolbox.cli import guarded, measuring_parser, measuring_place
from toolbox.report import aligned

WAITING = 300, 10_000
SCHEDULERS = {
    "stage 6, first come first served": partial(Scheduler, 32, 256),
    **{f"stage 7, {policy}": lambda policy=policy: PagedScheduler(32, 256, Pages(600, 16), policy)
       for policy in POLICIES}}
MODELS = {   # how to make each, and for how many steps it runs: a second or two
    "built-in model": (GPT.from_pretrained, 200), "GPT-2's size": (lambda: GPT(GPTConfig()), 48)}


def scheduling(new, waiting, steps):
    """
    {"add": seconds to add `waiting` requests, "step": seconds of a step, mean of `steps`}. The
    requests have prompts of 8 to 100 tokens and answers of 8 to 64.
    """
    rng = random.Random(0)
    requests = prepare([Request([rng.randrange(50) for _ in range(rng.randint(8, 100))],
                                rng.randint(8, 64)) for _ in range(waiting)], GPTConfig())
    scheduler, start = new(), time.perf_counter()
    for request in requests:
        scheduler.add(request)
    added, start = time.perf_counter() - start, time.perf_counter()
    for step in range(steps):
        plan = scheduler.schedule(step)
        scheduler.update(plan, [7] * len(complete(plan)))
    return {"add": added, "step": (time.perf_counter() - start) / steps}


def queues(repeats, steps=200):
    """{scheduler: {waiting: {"add", "step"}}}: the least of `repeats` runs."""
    found = {}
    for name, new in SCHEDULERS.items():
        for waiting in WAITING:
            runs = [scheduling(new, waiting, steps) for _ in range(repeats)]
            found.setdefault(name, {})[waiting] = {
                what: min(run[what] for run in runs) for what in ("add", "step")}
    return found


def step_seconds(model, steps):
    """Mean seconds of a step of 16 decodes."""
    requests = [Request([1 + i] * 16, steps + 2) for i in range(16)]
    generate(model, requests, max_batch=16, token_budget=512)
    times = requests[0].token_times
    return (times[-1] - times[1]) / (len(times) - 2)


def beside_a_loop(model, repeats, steps):
    """{"quiet": seconds of a step, "busy": ..., "ratio": ...}: medians of `repeats` pairs."""
    step_seconds(model, steps)   # warms up
    pairs = []
    for _ in range(repeats):
        quiet = step_seconds(model, steps)
        loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            time.sleep(0.2)
            pairs.append((quiet, step_seconds(model, steps)))
        finally:
            loop.kill()
            loop.wait()
        time.sleep(LONGEST_PAUSE)   # then all threads are tried again
        step_seconds(model, steps)
    ratios = sorted(busy / quiet for quiet, busy in pairs)
    quiet, busy = (statistics.median(part) for part in zip(*pairs))
    return {"quiet": quiet, "busy": busy, "ratio": statistics.median(ratios),
            "spread": (ratios[-1] - ratios[0]) / 2}


def measure(args):
    device, dtype, where = measuring_place(args)
    repeats = 1 if args.quick else 3
    print(where)
    scheduled = queues(repeats)
    rows = [("ms a step, scheduler alone", *(f"{n:,} waiting" for n in WAITING), "adding them, ms")]
    for name, taken in scheduled.items():
        rows.append((name, *(f"{taken[n]['step'] * 1e3:.3f}" for n in WAITING),
                     f"{taken[WAITING[-1]]['add'] * 1e3:.0f}"))
    print("\n".join(aligned(rows)))
    beside = {}
    rows = [("ms a step of 16 decodes", "quiet", "beside a loop", "times")]
    for name, (new, steps) in MODELS.items():
        for how in "stage 6", "stage 6, optimize()":
            model = new().requires_grad_(False).to(device, dtype)
            if "optimize" in how:
                model.optimize()
            taken = beside[f"{name}, {how}"] = beside_a_loop(
                model, repeats, 10 if args.quick else steps)
            rows.append((f"{name}, {how}", f"{taken['quiet'] * 1e3:.1f}",
                         f"{taken['busy'] * 1e3:.1f}", f"{taken['ratio']:.2f}"))
    print("\n".join(aligned(rows)))
    if args.json:
        results.save(args.json, "python -m experiments.overhead", where, repeats=repeats,
                     queues=scheduled, beside=beside)
    return 0


def main(argv=None):
    p = measuring_parser("python -m experiments.overhead", __doc__, quick="one short run of each",
                         plot=False)
    args = p.parse_args(argv)
    return guarded(p.prog, lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
