"""
What a step costs besides the model: the scheduler's books, and sharing the machine.

    queues     the scheduler's own time, without a model, with few and with many waiting requests
    served     memory and time after 1,000 requests and after many more, none of which may stay
    beside     a step of 16 decodes, alone and beside another program: an endless loop, which wants
               one core for itself. Quiet and busy runs take turns.

    python -m experiments.overhead
    python -m experiments.overhead --json overhead.json
    python -m experiments.overhead --served 1000000    only that table
"""
import random
import statistics
import subprocess
import sys
import time
from collections import Counter, deque
from functools import partial

from beyond.fairness import POLICIES, FairScheduler
from experiments import results, tables
from generate_ragged import generate
from model import GPT, GPTConfig
from paging import PagedScheduler, Pages
from request import Request, indices_due, prepare
from scheduler import Scheduler
from toolbox.cli import measuring_parser, measuring_place

WAITING = 300, 10_000
SCHEDULERS = {
    "stage 6, first come first served": partial(Scheduler, 32, 256),
    "stage 7, first come first served": lambda: PagedScheduler(32, 256, Pages(600, 16)),
    **{f"beyond/fairness.py, {policy}": lambda policy=policy: FairScheduler(
        32, 256, Pages(600, 16), policy) for policy in POLICIES}}
SERVED = {   # in little memory, so that requests are preempted and pages evicted
    "stage 7": lambda: PagedScheduler(32, 512, Pages(120, 16)),
    "beyond/fairness.py, sjf": lambda: FairScheduler(32, 512, Pages(120, 16), "sjf")}
MODELS = {   # how to make each, and for how many steps it runs: a second or two
    "built-in model": (GPT.from_pretrained, 200), "GPT-2's size": (lambda: GPT(GPTConfig()), 48)}


# --- queues ---------------------------------------------------------------------------------------

def scheduling(new, waiting, steps):
    """
    Seconds to add `waiting` requests, and for the first step, in which all arrive; seconds of a
    later step, mean of `steps`. Prompts have 8 to 100 tokens, answers 8 to 64.
    """
    rng = random.Random(0)
    requests = prepare([Request([rng.randrange(50) for _ in range(rng.randint(8, 100))],
                                rng.randint(8, 64)) for _ in range(waiting)], GPTConfig())
    scheduler, start = new(), time.perf_counter()
    for request in requests:
        scheduler.add(request)
    adding = time.perf_counter() - start
    first, *times = (run_step(scheduler, step, rng) for step in range(1 + steps))
    return adding + first, statistics.mean(times)


def run_step(scheduler, step, rng):
    """A step without a model. Returns its seconds."""
    start = time.perf_counter()
    if scheduler.busy:
        plan = scheduler.schedule(step)
        scheduler.update(plan, [rng.randrange(50) for _ in indices_due(plan)])
    return time.perf_counter() - start


def queues(repeats, steps=200):
    """{scheduler: {waiting: {"add", "step"}}}: the least of `repeats` runs."""
    def least(new, waiting):
        adds, means = zip(*(scheduling(new, waiting, steps) for _ in range(repeats)))
        return {"add": min(adds), "step": min(means)}

    return {name: {waiting: least(new, waiting) for waiting in WAITING}
            for name, new in SCHEDULERS.items()}


# --- served ---------------------------------------------------------------------------------------

def containers(thing, path="scheduler", seen=None):
    """(path, container) of every list, dict and so on that an object holds, however deep."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, (list, tuple, set, deque, dict)):
        yield path, thing
        for member in [*thing, *thing.values()] if isinstance(thing, dict) else thing:
            yield from containers(member, path, seen)
    elif hasattr(thing, "__dict__") and not callable(thing):
        for name, value in vars(thing).items():
            yield from containers(value, f"{path}.{name}", seen)


def held(scheduler):
    """{path: entries} of all that a scheduler, its pages and its requests hold."""
    found = Counter()
    for path, container in containers(scheduler):
        found[path] += len(container)
    return found


def size(thing):
    """Bytes of these containers. (Of their entries, the numbers are not counted.)"""
    return sum(sys.getsizeof(container) for _, container in containers(thing))


def serve(scheduler, number):
    """
    Runs so many short requests without a model. Some share a prefix, some are cancelled. Yields
    (requests that have come, seconds of the step) after every step.
    """
    rng, config, come, step = random.Random(0), GPTConfig(), 0, 0
    stems = [[rng.randrange(50) for _ in range(n)] for n in (0, 0, 16, 40)]
    while come < number or scheduler.busy:
        new = min(rng.randrange(32), number - come) if len(scheduler.waiting) < 64 else 0
        for _ in range(new):
            prompt = rng.choice(stems) + [rng.randrange(50) for _ in range(rng.randint(1, 30))]
            request, = prepare(Request(prompt, rng.randint(1, 12), arrival=step + 1), config)
            scheduler.add(request)
        come += new
        for line in scheduler.waiting, scheduler.running:
            if line and rng.random() < 0.2:   # cancelled
                request = rng.choice(line)
                request.finish_reason = "cancelled"
                if line is scheduler.waiting:
                    line.remove(request)
        scheduler.release()
        yield come, run_step(scheduler, step, rng)
        step += 1


def served(new, number):
    """
    {"early": after 1,000 requests, "late": after `number`}: {"requests", "entries", "bytes" that
    the scheduler holds, "step": seconds, the median of the last 100}.
    """
    scheduler, found, times = new(), {}, deque(maxlen=100)
    for come, seconds in serve(scheduler, number):
        times.append(seconds)
        for when, requests in ("early", 1_000), ("late", number):
            if come >= requests and when not in found:
                found[when] = {"requests": come, "entries": sum(held(scheduler).values()),
                               "bytes": size(scheduler), "step": statistics.median(times)}
    return found


# --- beside another program -----------------------------------------------------------------------

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
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as loop:
            try:
                time.sleep(0.2)
                pairs.append((quiet, step_seconds(model, steps)))
            finally:
                loop.kill()
        time.sleep(1)
        step_seconds(model, steps)
    quiet, busy = (statistics.median(part) for part in zip(*pairs))
    return {"quiet": quiet, "busy": busy, **results.ratio((b, a) for a, b in pairs)}


def measure_served(args):
    """Measures and prints what schedulers hold: {scheduler: {"early", "late"}}."""
    number = args.served or (20_000 if args.quick else 100_000)
    found = {name: served(new, number if name == "stage 7" else max(number // 10, 2_000))
             for name, new in SERVED.items()}
    tables.show("", ("requests that came and went", "entries held", "kB held", "ms a step"), [
        (f"{name}, {f['requests']:,}", f"{f['entries']:,}", f"{f['bytes'] / 1e3:,.0f}",
         f"{f['step'] * 1e3:.2f}") for name, taken in found.items() for f in taken.values()])
    return found


def measure(args):
    if args.served is not None and args.served < 2_000:
        raise ValueError("--served must be at least 2000")
    if args.served and args.json:
        raise ValueError("--served makes one table only; --json needs all of them")
    device, dtype, where = measuring_place(args)
    print(where)
    kept = measure_served(args)
    if args.served:
        return 0
    repeats, beside = 1 if args.quick else 3, {}
    for name, (new, steps) in MODELS.items():
        model, steps = new().requires_grad_(False).to(device, dtype), 10 if args.quick else steps
        beside[f"{name}, stage 6"] = beside_a_loop(model, repeats, steps)
        beside[f"{name}, stage 6, optimize()"] = beside_a_loop(model.optimize(), repeats, steps)
    found = results.keep(args.json, "python -m experiments.overhead", where, repeats=repeats,
                         queues=queues(repeats), served=kept, beside=beside)
    tables.show("", *tables.queues(found))
    tables.show("", *tables.beside(found))
    return 0


def main(argv=None):
    p = measuring_parser("python -m experiments.overhead", __doc__, quick="one short run of each",
                         plot=False)
    p.add_argument("--served", type=int, metavar="N",
                   help="only that table, with so many requests (default: 100000)")
    return p.run(measure, argv)


if __name__ == "__main__":
    sys.exit(main())
