"""
Plans beside those of vLLM's own scheduler: which requests compute how many tokens in which step.

vLLM's scheduler runs without a model (vllm_plans.py). Handed the same workloads
(plan_workloads.py), this repository's schedulers must make the same plans, pass by pass, in three
modes:

    fcfs        generate_prefix.py, PrefixScheduler    vLLM's Scheduler
    priority    beyond/fairness.py, FairScheduler      the same, with its policy "priority"
    ahead       beyond/ahead.py                        vLLM's AsyncScheduler, its default

docs/vllm.md says what is compared, and what is not.
"""
import gzip
import importlib
import json
import subprocess
from collections import Counter, deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from beyond import ahead
from beyond.fairness import FairScheduler
from generate_prefix import PrefixScheduler
from lab import flags
from lab.experiments.plan_rules import RULES
from lab.experiments.plan_workloads import KINDS, workloads
from lab.experiments.vllm_names import unknown_names
from lab.loading.recorded import RECORDED, recorded
from lab.views.report import aligned
from lab.views.stage_table import Known, NoModel
from request import indices_due, prepare
from toolbox.trace import observed

RECORDER = Path(__file__).parent / "vllm_plans.py"
CONFIG = SimpleNamespace(block_size=4096, vocab_size=1000)   # of the model that does not run
TOO_MANY = 20_000   # steps
NUMBER, SEED = 100, 0   # what is recorded: so many workloads of each kind
MOST = 10_000           # of each kind: all are kept in memory

FLAGS = {
    "--vllm": dict(metavar="PYTHON", help="record anew, with this Python that has vLLM"),
    "--number": dict(type=flags.whole, metavar="N",
                     help=f"with --vllm: workloads of each kind (default: {NUMBER})"),
    "--seed": dict(type=int, metavar="N",
                   help=f"with --vllm: of the workloads (default: {SEED})"),
    "--keep": dict(action="store_true",
                   help="with --vllm: write what was recorded to results/"),
    "--scheduler": dict(metavar="MODULE:CLASS", help="compare another scheduler (docs/vllm.md)")}


# --- our plans ------------------------------------------------------------------------------------

def as_requests(work):
    """The requests of a workload, in order of arrival. Each gets the answer that is known."""
    requests = []
    for asked in work["requests"]:
        answer = asked["answer"]
        requests.append(Known(
            asked["prompt"],
            asked.get("max_new_tokens", len(answer)),
            eos_token=asked.get("stop"),
            name=asked["name"],
            priority=asked["priority"],
            arrival=asked["arrival"],
            answer=answer))
    return prepare(requests, CONFIG)


def abort_those_who_gave_up(scheduler, requests, work, step):
    """Ends those whose client has given up before this step. They leave queue and memory."""
    abort_steps = {asked["name"]: asked.get("abort", TOO_MANY) for asked in work["requests"]}
    for request in requests:
        if abort_steps[request.name] <= step and not request.finished:
            request.finish_reason = "abort"
            if request in scheduler.waiting:
                scheduler.waiting.remove(request)
            scheduler.release()


def as_plan(step, plan):
    return [step, {request.name: n for request, n in plan}]


def next_tokens(plan):
    """What a model would give the requests that are due."""
    due = [plan[i][0] for i in indices_due(plan)]
    return [request.answer[len(request.generated)] for request in due]


def plans_of(work, scheduler_class):
    """
    [[step, {request: number of tokens}], ...], as a class like PrefixScheduler plans. Of it, `add`,
    `schedule` and `update` are called, and for a workload with aborts `waiting` and `release`.
    """
    scheduler = scheduler_class(work["max_batch"], work["token_budget"], work["pages"],
                                work["page_size"])
    coming = deque(as_requests(work))
    here = []
    plans = []
    step = 0
    while coming or here:
        if not here:
            step = max(step, coming[0].arrival)
        while coming and coming[0].arrival <= step:
            here.append(coming.popleft())
            scheduler.add(here[-1])
        abort_those_who_gave_up(scheduler, here, work, step)
        here = [request for request in here if not request.finished]
        if not here:
            continue
        plan = scheduler.schedule(step)
        plans.append(as_plan(step, plan))
        scheduler.update(plan, next_tokens(plan))
        here = [request for request in here if not request.finished]
        step += 1
        if step > TOO_MANY:
            raise ValueError(f"{scheduler_class} does not come to an end")
    return plans


def plans_ahead(work, scheduler_class=PrefixScheduler):
    """As plans_of, of beyond/ahead.py, whose `generate` runs on a model that computes nothing."""
    requests = as_requests(work)
    model = NoModel(CONFIG)
    plans = []

    class Aborting(scheduler_class):
        def schedule(self, step):
            abort_those_who_gave_up(self, requests, work, step)
            return super().schedule(step)

    def note(step, batch):
        plans.append(as_plan(step, batch.plan))

    with observed(model, note):
        ahead.generate(model, requests, work["max_batch"], work["token_budget"], work["pages"],
                       work["page_size"], Aborting)
    return plans


class EmptySteps(FairScheduler):
    """As vLLM's: a request that preempts itself ends the step, even if nothing is planned."""
    empty_steps = True


PRIORITY = partial(FairScheduler, policy="priority", bound=TOO_MANY)
PRIORITY_OF_VLLM = partial(EmptySteps, policy="priority", bound=TOO_MANY)

OURS = {   # mode: what makes this repository's plans
    "fcfs": partial(plans_of, scheduler_class=PrefixScheduler),
    "priority": partial(plans_of, scheduler_class=PRIORITY),
    "ahead": plans_ahead}


# --- how they differ ------------------------------------------------------------------------------

def different(works, mode, make_plans):
    """[(number of the workload, our plans), ...] of those whose plans are not vLLM's."""
    found = []
    for number, work in enumerate(works):
        plans = make_plans(work)
        if plans != work["plans"][mode]:
            found.append((number, plans))
    return found


def first_difference(ours, theirs):
    """The number of the first pass that differs; None if all are equal."""
    for i, (our_pass, their_pass) in enumerate(zip(ours, theirs)):
        if our_pass != their_pass:
            return i
    if len(ours) == len(theirs):
        return None
    return min(len(ours), len(theirs))


def faults_of(mode, works, differ):
    """
    The differences that nothing explains. One has an explanation, which is proved here: vLLM's
    policy "priority" may plan an empty step, and ours goes on with the next request instead. With
    an empty step allowed, the same workload's plans must be equal.
    """
    if mode != "priority":
        return differ
    faults = []
    for number, plans in differ:
        if plans_of(works[number], PRIORITY_OF_VLLM) != works[number]["plans"][mode]:
            faults.append((number, plans))
    return faults


def told(works, mode, number, plans):
    """A workload whose plans differ, in a line."""
    work = works[number]
    place = f"  {mode}, workload {number} ({work['kind']})"
    if isinstance(plans, str):   # an error
        return f"{place}: {plans}"
    theirs = work["plans"][mode]
    i = first_difference(plans, theirs)
    return f"{place}, pass {i}: {plans[i:i + 1]}, vLLM's {theirs[i:i + 1]}"


# --- the command ----------------------------------------------------------------------------------

def compare(args):
    """plans beside those of vLLM's own scheduler, pass by pass: recorded ones, or made anew"""
    check_flags(args)
    scheduler_class = args.scheduler and scheduler_named(args.scheduler)
    if args.vllm is not None:
        number = NUMBER if args.number is None else args.number
        seed = SEED if args.seed is None else args.seed
        version, works = record(args.vllm, number, seed)
    else:
        version, works = recorded()
    if args.keep:
        keep(version, works)
    if scheduler_class:
        return compare_scheduler(version, works, scheduler_class)
    return compare_ours(version, works)


def check_flags(args):
    """ValueError for a flag that would change nothing, or ask for more than memory holds."""
    if args.number is not None and args.number > MOST:
        raise ValueError(f"--number must be at most {MOST:,}, not {args.number:,}")
    if args.vllm is not None:
        return
    for name in "number", "seed", "keep":
        value = getattr(args, name)
        if value is not None and value is not False:
            raise ValueError(f"--{name} needs --vllm PYTHON: without it, nothing is recorded")


def compare_ours(version, works):
    """Prints how many plans of each mode are equal. Returns 1 if a difference has no reason."""
    differ = {mode: different(works, mode, make_plans) for mode, make_plans in OURS.items()}
    print(f"workloads in which each plan is that of vLLM {version}\n")
    print(aligned(table(works, differ)))
    status = 0
    for mode, found in differ.items():
        faults = faults_of(mode, works, found)
        if len(faults) < len(found):
            print(f"{mode}: {len(found) - len(faults)} differ because vLLM plans an empty step; "
                  "where ours may, too, they are equal")
        if faults:
            status = 1
            print(f"{mode}: {len(faults)} differ, and nothing explains it")
            print(told(works, mode, *faults[0]))
    return status


def table(works, differ):
    """A row for each kind of workload: how many plans are equal in each mode, and all passes."""
    rows = [["", *OURS, "passes"]]
    for kind in KINDS:
        numbers = [i for i, work in enumerate(works) if work["kind"] == kind]
        rows.append(row_of(kind, numbers, works, differ))
    rows.append(row_of("all", range(len(works)), works, differ))
    return rows


def row_of(name, numbers, works, differ):
    row = [name]
    for found in differ.values():
        lost = [number for number, _ in found if number in numbers]
        row.append(f"{len(numbers) - len(lost):,}/{len(numbers):,}")
    passes = 0
    for number in numbers:
        passes += sum(len(plans) for plans in works[number]["plans"].values())
    return [*row, f"{passes:,}"]


def keep(version, works):
    lines = [json.dumps(line, separators=(",", ":")) for line in [{"vllm": version}, *works]]
    with gzip.GzipFile(RECORDED, "wb", mtime=0) as file:   # without a time: equal bytes each time
        file.write(("\n".join(lines) + "\n").encode())


# --- another scheduler ----------------------------------------------------------------------------

def scheduler_named(text):
    """The class of MODULE:CLASS. ValueError if there is none, or if it cannot be compared."""
    module, _, name = text.partition(":")
    try:
        scheduler_class = getattr(importlib.import_module(module), name)
    except Exception as error:   # also of the module's own code
        raise ValueError(f"--scheduler {text}: {error}; use MODULE:CLASS") from None
    if not callable(scheduler_class):
        raise ValueError(f"--scheduler {text}: it is no class; use MODULE:CLASS")
    try:
        scheduler = scheduler_class(8, 64, 100, 4)
    except Exception as error:
        raise ValueError(f"--scheduler {text}: {error}; it is called with max_batch, "
                         "token_budget, pages, page_size") from None
    missing = [each for each in ("add", "schedule", "update") if not hasattr(scheduler, each)]
    if missing:
        raise ValueError(f"--scheduler {text}: it has no method {missing[0]}")
    return scheduler_class


def compare_scheduler(version, works, scheduler_class):
    """Prints how many of another scheduler's plans are equal. Returns 1 if one differs."""
    works = [work for work in works if work["kind"] != "aborts"]   # it may not know how

    def make_plans(work):
        try:
            return plans_of(work, scheduler_class)
        except Exception as error:
            return f"raises {type(error).__name__}: {error}{place_of(error)}"

    differ = different(works, "fcfs", make_plans)
    print(f"{len(works) - len(differ):,} of {len(works):,} plans are equal to vLLM {version}'s")
    if not differ:
        return 0
    print(told(works, "fcfs", *differ[0]))
    print(f"  {likeness(works, differ)}")
    return 1


def place_of(error):
    """Where an error was raised: the innermost line of code."""
    trace = error.__traceback__
    while trace.tb_next:
        trace = trace.tb_next
    return f" ({Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno})"


def likeness(works, differ):
    """Which of our rules the plans that differ seem to lack: in a sentence."""
    equal = Counter()
    for rule in RULES:
        for number, plans in differ:
            equal[rule] += plans == plans_of(works[number], rule)
    best = max(RULES, key=equal.get)
    if not equal[best]:
        return "it is like none of the rules that are known to make a difference"
    rule = best.__doc__ or best.__name__
    return f"{equal[best]:,} of these {len(differ):,} are those of ours with {rule}"


# --- recording ------------------------------------------------------------------------------------

def record(python, number, seed):
    """(vLLM's version, workloads with their `plans`), made by vLLM now."""
    works = []
    for kind in KINDS:
        works += workloads(kind, number, seed)
    lines = served_by_vllm(python, works)
    try:
        version, path = lines[0]["vllm"], Path(lines[0]["path"])
        for work, plans in zip(works, lines[1:], strict=True):
            work["plans"] = plans
    except (LookupError, TypeError, ValueError):
        raise ValueError(f"--vllm {python}: it has printed no plans: is it a Python?") from None
    for problem in unknown_names(path):
        print(f"docs/vllm.md, vLLM {version}: {problem}")
    return version, works


def served_by_vllm(python, works):
    """What vllm_plans.py prints of these workloads, line by line. ValueError if it cannot run."""
    text = "".join(json.dumps(work) + "\n" for work in works)
    try:
        done = subprocess.run([python, RECORDER], capture_output=True, text=True, check=True,
                              input=text)
    except OSError as error:
        raise ValueError(f"--vllm {python}: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ValueError(f"--vllm {python}: {last:.200}") from None
    try:
        return [json.loads(line) for line in done.stdout.splitlines()]
    except ValueError:
        return []
