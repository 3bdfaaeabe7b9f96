"""
Plans beside those of vLLM's own scheduler: which requests compute how many tokens in which step.

vLLM's scheduler runs without a model (vllm_plans.py). Handed the same workloads, this repository's
schedulers must make the same plans, pass by pass. docs/vllm.md says what is compared, and what not.
"""
import gzip
import importlib
import json
import random
import re
import subprocess
from collections import Counter, deque
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from beyond import ahead
from beyond.fairness import FairScheduler
from generate_prefix import PrefixPool, PrefixScheduler
from lab import flags
from lab.loading.recorded import RECORDED, recorded
from lab.views.stage_table import NoModel
from paging import PagedScheduler
from request import Request, indices_due, prepare
from toolbox.trace import observed

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "vllm.md"
RECORDER = Path(__file__).parent / "vllm_plans.py"
MODEL = SimpleNamespace(block_size=4096, vocab_size=1000)
TOO_MANY = 20_000   # steps

FLAGS = {
    "--vllm": dict(metavar="PYTHON", help="record anew, with this Python that has vLLM"),
    "--number": dict(type=flags.whole, default=300, metavar="N",
                     help="workloads of each kind to record"),
    "--seed": dict(type=int, default=0, metavar="N", help="of the workloads"),
    "--keep": dict(action="store_true", help="write what was recorded to results/"),
    "--scheduler": dict(metavar="MODULE:CLASS", help="compare another scheduler (docs/vllm.md)")}


# --- workloads ------------------------------------------------------------------------------------

def mixed(stream):
    """Common beginnings, arrivals; half are short of memory."""
    size = stream.choice([4, 8, 16])
    beginnings = [tokens(stream, stream.randint(8, 60)) for _ in range(2)]
    requests = [
        dict(prompt=(stream.choice(beginnings) if stream.random() < 0.5 else [])
             + tokens(stream, stream.randint(1, 80)),
             answer=tokens(stream, stream.randint(1, 40)),
             arrival=stream.choice([0, 0, stream.randint(0, 30)]))
        for _ in range(stream.randint(2, 14))]
    return dict(max_batch=stream.randint(2, 8), token_budget=stream.choice([16, 32, 64, 256]),
                page_size=size, pages=stream.choice([least_pages(requests, size)
                                                     + stream.randint(1, 6), 400]),
                requests=requests)


def twins(stream):
    """Equal prompts and equal answers, few tokens, small budgets, little memory: the hardest."""
    size = stream.choice([1, 2, 4, 8])
    kinds, most = [], stream.choice([1, 2, 99])
    for _ in range(stream.randint(1, 3)):
        kinds.append((tokens(stream, stream.randint(1, 30), most),
                      tokens(stream, stream.randint(1, 30), most)))
    requests = []
    for _ in range(stream.randint(2, 10)):
        prompt, answer = stream.choice(kinds)
        if stream.random() < 0.3:
            prompt = prompt[:stream.randint(1, len(prompt))]
        requests.append(dict(prompt=prompt, answer=answer[:stream.randint(1, len(answer))],
                             arrival=stream.choice([0, 0, stream.randint(0, 20)])))
    budget = stream.choice([1, 2, 3, 5, 8, 16, 64])
    more = stream.choice([0, 0, 1, 2, stream.randint(0, 12), 400])
    return dict(max_batch=stream.randint(1, min(8, budget)), token_budget=budget, page_size=size,
                pages=least_pages(requests, size) + more, requests=requests)


def tokens(stream, number, most=99):
    return [stream.randint(1, most) for _ in range(number)]


def least_pages(requests, page_size):
    """What the largest request needs: with fewer, it would be refused."""
    return max(-(-(len(each["prompt"]) + len(each["answer"]) - 1) // page_size)
               for each in requests)


KINDS = {   # what makes the requests; the policy, where "ahead" is vLLM's AsyncScheduler
    "mixed": (mixed, "fcfs"), "twins": (twins, "fcfs"),
    "mixed, priority": (mixed, "priority"), "twins, priority": (twins, "priority"),
    "mixed, ahead": (mixed, "ahead"), "twins, ahead": (twins, "ahead")}
FEWER = 5   # of priority and ahead, a fifth of the workloads


def workloads(kind, number, seed):
    make, policy = KINDS[kind]
    stream = random.Random(f"{kind} {seed}")
    for _ in range(number if policy == "fcfs" else -(-number // FEWER)):
        work = dict(kind=kind, policy=policy, **make(stream))
        for i, each in enumerate(work["requests"]):
            each["name"] = f"r{i}"
            if policy == "ahead":   # compared in a run of a model that always answers 0
                each["answer"] = [0] * len(each["answer"])
            if policy == "priority":
                each["priority"] = stream.choice([0, 0, 1, 2])
        yield work


# --- plans ----------------------------------------------------------------------------------------

def as_requests(work):
    return prepare([Request(each["prompt"], len(each["answer"]), name=each["name"],
                            arrival=each["arrival"], priority=each.get("priority", 0))
                    for each in work["requests"]], MODEL)


def plans_of(work, scheduler):
    """
    [[step, {request: number of tokens}], ...], as `scheduler`, a class like PrefixScheduler, plans.
    Of it, add, schedule and update are called.
    """
    planner = scheduler(work["max_batch"], work["token_budget"], work["pages"], work["page_size"])
    answers = {each["name"]: each["answer"] for each in work["requests"]}
    coming, here, plans, step = deque(as_requests(work)), [], [], 0
    while coming or here:
        step = step if here else max(step, coming[0].arrival)
        while coming and coming[0].arrival <= step:
            here.append(coming.popleft())
            planner.add(here[-1])
        plan = planner.schedule(step)
        plans.append([step, {request.name: n for request, n in plan}])
        due = [plan[i][0] for i in indices_due(plan)]
        planner.update(plan, [answers[each.name][len(each.generated)] for each in due])
        here = [request for request in here if not request.finished]
        step += 1
        if step > TOO_MANY:
            raise ValueError(f"{scheduler} does not come to an end")
    return plans


def first_difference(mine, theirs):
    """The number of the first pass that differs; None if all are equal."""
    for i, (a, b) in enumerate(zip(mine, theirs)):
        if a != b:
            return i
    return None if len(mine) == len(theirs) else min(len(mine), len(theirs))


# --- each rule of ours, switched off --------------------------------------------------------------

class WholePrompts(PrefixScheduler):
    """pages for a whole prompt at once, not chunk by chunk"""

    def admit(self, request):
        admitted = super().admit(request)
        if admitted:
            new = self.pool.needed(request.computed + request.todo) - len(request.block_table)
            self.pool.allocate(request.block_table, new)
        return admitted


class FoundAfterThePass(PrefixScheduler):
    """pages that can be found after the pass that fills them, not once it is planned"""

    def make_room(self, request, n):
        return PagedScheduler.make_room(self, request, n)

    def update(self, plan, tokens):
        for request, n in plan:
            self.cache_filled(request, request.computed, request.computed + n)
        super().update(plan, tokens)


class LeastRecentlyUsed(PrefixScheduler):
    """freed pages at the end of the queue, those that nobody can find like the others"""

    def __init__(self, *limits):
        super().__init__(*limits)
        self.pool.free = self.free_pages

    def free_pages(self, table):
        PrefixPool.free(self.pool, table)
        for page in reversed(table):
            if page not in self.pool.hash_of and page in self.pool.free_queue:
                self.pool.free_queue.move_to_end(page)


class OnePageAHash(PrefixScheduler):
    """one page for a hash, not several"""

    def __init__(self, *limits):
        super().__init__(*limits)
        self.pool.cache = self.cache_page

    def cache_page(self, page, name):
        if name not in self.pool.cached:
            PrefixPool.cache(self.pool, page, name)


RULES = (WholePrompts, FoundAfterThePass, LeastRecentlyUsed, OnePageAHash)


# --- the command ----------------------------------------------------------------------------------

def record(python, kinds, number, seed):
    """As `recorded`, made by vLLM now."""
    made = [work for kind in kinds for work in workloads(kind, number, seed)]
    try:
        done = subprocess.run([python, RECORDER], capture_output=True, text=True, check=True,
                              input="".join(json.dumps(work) + "\n" for work in made))
    except OSError as error:
        raise ValueError(f"--vllm {python}: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ValueError(f"--vllm {python}: {last:.200}") from None
    head, *plans = map(json.loads, done.stdout.splitlines())
    for name in unknown_names(Path(head["path"])):
        print(f"docs/vllm.md names {name}, which vLLM {head['vllm']} does not have")
    return head["vllm"], [work | each for work, each in zip(made, plans, strict=True)]


def unknown_names(vllm):
    """Names in the table of docs/vllm.md that are not in that file of vLLM's folder."""
    rows = [line.split("|")[2] for line in DOCUMENT.read_text(encoding="utf-8").splitlines()
            if line.startswith("| `")]
    file = None   # "the same" is the one before
    for part in "; ".join(rows).split("; "):
        path, _, names = part.partition(": ")
        file = file if "the same" in path else path.strip(" `")
        text = (vllm / file).read_text(encoding="utf-8") if (vllm / file).exists() else ""
        for name in re.findall(r"`(\w+)`", names):
            if not re.search(rf"(def |class |self\.){name}\b", text):
                yield f"{name} in {file}"


def scheduler_named(text):
    """The class of MODULE:CLASS."""
    module, _, name = text.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--scheduler {text}: {error}; use MODULE:CLASS") from None


SCHEDULERS = {"fcfs": PrefixScheduler,
              "priority": partial(FairScheduler, policy="priority", bound=TOO_MANY)}


def plans_ahead(work):
    """As plans_of, of beyond/ahead.py."""
    model, plans = NoModel(MODEL), []   # it answers 0
    with observed(model, lambda step, batch: plans.append(
            [step, {request.name: n for request, n in batch.plan}])):
        ahead.generate(model, as_requests(work), work["max_batch"], work["token_budget"],
                       work["pages"], work["page_size"])
    return plans


def plans_for(work):
    """The plans that this repository makes for a recorded workload."""
    policy = work["policy"]
    return plans_ahead(work) if policy == "ahead" else plans_of(work, SCHEDULERS[policy])


def excuse(work):
    """Why the plans of a workload may differ from vLLM's: in a sentence; None if they may not."""
    if work["in_flight"]:
        return "a request is preempted while a token of it is in flight: vLLM lets others pass it"
    if [step for step, plan in work["plans"] if not plan]:
        return "the victim was the first request of the plan: vLLM computes nothing in that step"
    return None


def compare(args):
    """plans beside those of vLLM's own scheduler, pass by pass: recorded ones, or made anew"""
    version, works = (record(args.vllm, KINDS, args.number, args.seed) if args.vllm
                      else recorded())
    if args.keep and args.vllm:
        keep(version, works)
    own = args.scheduler and partial(plans_of, scheduler=scheduler_named(args.scheduler))
    status = 0
    for kind in ["mixed", "twins"] if own else KINDS:
        mine = [work for work in works if work["kind"] == kind]
        found = [(own or plans_for)(work) for work in mine]
        differ = [i for i, (plans, work) in enumerate(zip(found, mine)) if plans != work["plans"]]
        passes = sum(len(work["plans"]) for work in mine)
        print(f"{kind}: equal to vLLM {version} in {len(mine) - len(differ):,} of {len(mine):,} "
              f"workloads, {passes:,} passes")
        excuses = Counter(excuse(mine[i]) for i in differ)
        for reason, number in excuses.items():
            print(f"  {number} differ: {reason or 'nothing explains it'}")
        if excuses[None]:
            status = 1
            i = next(i for i in differ if not excuse(mine[i]))
            n = first_difference(found[i], mine[i]["plans"])
            print(f"  workload {i}, pass {n}: {found[i][n:n + 1]}, "
                  f"vLLM's {mine[i]['plans'][n:n + 1]}")
            if own:
                print(f"  {likeness(found, mine)}")
    return status


def likeness(found, works):
    """Which of our rules these plans seem to lack: in a sentence."""
    same = {rule: sum(plans == plans_of(work, rule) for plans, work in zip(found, works))
            for rule in (PrefixScheduler, *RULES)}
    best = max(RULES, key=same.get)
    if same[best] <= same[PrefixScheduler]:
        return "it is like none of the rules that are known to make a difference"
    return f"{same[best]:,} of its plans are those of ours with {best.__doc__}"


def keep(version, works):
    with gzip.GzipFile(RECORDED, "wb", mtime=0) as file:
        for line in [{"vllm": version}, *works]:
            file.write((json.dumps(line, separators=(",", ":")) + "\n").encode())
