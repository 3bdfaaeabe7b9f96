"""
What the tests of all sets share: workloads, and the comparison of a student's code with ours.

    part.compare(probe)     a probe yields (where, value): the same with their functions and ours
    part.serve(...)         a whole stage: the judge's sentences (checks/judge.py), then its counts
    part.fast(...)          no more than a multiple of the CPU time that ours has just taken

A test says in a sentence what is wrong: the first fault, and the smallest workload that shows it.
"""
import copy
import doctest
import itertools
import math
import os
import re
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import isolate
import pytest
from isolate import Fault

os.environ["OMP_NUM_THREADS"] = "1"   # a tiny model gains nothing from threads
HERE = Path(__file__).resolve().parent
PACKED = HERE / "reference.bin"   # in a student's copy: our files, in a zip archive
ROOT = HERE.parent
isolate.ROOTS[:] = [str(PACKED), str(HERE)] if PACKED.exists() else [str(ROOT)]
sys.path.insert(0, str(PACKED if PACKED.exists() else ROOT))

TIMES, FLOOR = 30, 5   # of the reference's CPU time, and seconds, that a student's code may take
TOLERANCE = 1e-8       # relative; what is compared is in float64
STEPS = 2000           # a scheduler's run that takes more hangs
WAITING, RUNNING = ([f"{state}{i}" for i in range(9999)] for state in "WR")   # names of requests
MIX = (1, 4), (5, 1), (1, 3), (12, 3), (5, 4), (3, 2, 2)   # see `given`
LATE = (2, 3), (2, 3), (9, 2, 1)


# --- workloads ------------------------------------------------------------------------------------

def sequences(values, most):
    """All sequences of up to `most` of the values, the shortest first."""
    return [each for length in range(most + 1)
            for each in itertools.product(values, repeat=length)]


def letters(i):
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[i % 26] + str(i // 26 or "")


def given(*sizes, names=None, block_size=24, computed=0):
    """Requests A, B, ... from (prompt, new tokens, arrival, priority, eos_token)."""
    from request import Request
    requests = []
    for i, (prompt, new, *rest) in enumerate(sizes):
        if not isinstance(prompt, list):
            prompt = [(7 * i + 3 * j * j + j) % 12 + 1 for j in range(prompt)]
        requests.append(Request(prompt, new, name=names[i] if names else letters(i),
                                **dict(zip(("arrival", "priority", "eos_token"), rest))))
        requests[-1].block_size, requests[-1].computed = block_size, computed
    return requests


def drawn(rng, least=2, most=5, prompt=14, new=7, arrivals=(0, 0, 1, 2)):
    """`least` to `most` random requests, greedy and sampled."""
    from request import Request
    requests = []
    for i in range(rng.randint(least, most)):
        length = rng.choice([1, 2, 3, rng.randint(4, prompt)])
        requests.append(Request(
            [rng.randrange(13) for _ in range(length)], rng.randint(1, new), name=letters(i),
            temperature=rng.choice([0.0, 0.0, 0.9]), seed=rng.randrange(99),
            arrival=rng.choice(arrivals)))
    return requests


def describe(requests, **knobs):
    """A workload in words; 5+3 tokens are a prompt of 5, and 3 to generate."""
    words = [f"{r.name} = {len(r.prompt)}+{r.max_new_tokens} tokens"
             + (f" at step {r.arrival}" if r.arrival else "") for r in requests]
    return "Workload: " + ", ".join(words + [f"{name} {value}" for name, value in knobs.items()
                                             if value is not None])


def names(requests):
    return [request.name for request in requests]


def tensor(value, numbers=True):
    """What can be seen of a tensor."""
    if not hasattr(value, "dtype"):
        return {"shape and dtype": f"a {type(value).__name__}"}
    seen = {"shape and dtype": f"{tuple(value.shape)} {value.dtype}"}
    if numbers:
        seen["numbers"] = (value.int() if "bool" in str(value.dtype) else value).tolist()
    return seen


def counts_of(trace):
    return {"forward passes": len(trace.passes), "slots": sum(p.slots for p in trace.passes),
            "score entries": sum(p.score_entries for p in trace.passes),
            **{name: trace.counts[name] for name in sorted(trace.counts)},
            **{f"steps of {r.name}": r.token_steps for r in trace.requests}}


def plan_of(plan):
    return " ".join(f"{r.name}{n}" for r, n in plan) or "nothing"


def plans_of(requests, max_batch=8, token_budget=64, max_kv_tokens=None):
    """A scheduler's run with no model, every sampled token is 0: (its plans, what holds after)."""
    from scheduler import Scheduler
    requests = sorted(map(replace, requests), key=lambda request: request.arrival)
    queue, step, made = Scheduler(max_batch, token_budget, max_kv_tokens), 0, []
    for request in requests:
        request.block_size = 24
        queue.add(request)
    while queue.busy and len(made) < STEPS:
        step = queue.next_step(step)
        try:
            plan = queue.schedule(step)
        except NotImplementedError:
            raise
        except RuntimeError as error:
            made.append(f"step {step}: raises RuntimeError: {error}")
            break
        made.append(f"step {step}: {plan_of(plan)}")
        for request, _ in plan:
            request.kv = request.kv or "cache"
        queue.update(plan, [0] * sum(n == request.todo for request, n in plan))
        step += 1
    return made, {**{f"tokens of {r.name}": len(r.generated) for r in requests},
                  **{f"cache of {r.name} after its end": r.kv for r in requests}}


# --- a part ---------------------------------------------------------------------------------------

class Part:
    """One part of a set, of one student. rng and hidden: what random workloads follow from."""

    def __init__(self, submission, functions, rng, hidden):
        self.submission, self.functions = submission, functions
        self.rng, self.hidden = rng, hidden

    @property
    def sizes(self):
        """Arguments for `drawn`, of three workloads; hidden ones are as large as a batch."""
        return ({"least": 20, "most": 40},) * 3 if self.hidden else (
            {}, {}, {"least": 9, "most": 12})

    @contextmanager
    def theirs(self, seconds=0.0):
        """With their functions, and their limit on CPU time. seconds: that ours has taken."""
        place = os.getcwd()
        os.chdir(self.submission.folder)   # where their data files are
        try:
            with self.submission.part(self.functions), limited(max(FLOOR, TIMES * seconds)):
                yield
        finally:
            os.chdir(place)

    def compare(self, probe, *arguments):
        """A probe yields (where, value); Fault at the first value that is not as with ours."""
        started = time.process_time()
        expected = list(probe(*copy.deepcopy(arguments)))
        seconds = time.process_time() - started
        with self.theirs(seconds):
            for (where, right), (_, value) in zip(expected, probe(*arguments)):
                if fault := difference(value, right):
                    raise Fault(f"{where}: {fault}")

    def serve(self, stage, requests, causes=None, counts=True, **knobs):
        """
        Runs a stage on a small model. causes: of all that the judge sees, what counts here; then
        the counts of the run. The requests are copied.
        """
        from checks.judge import CAUSES, faults
        from checks.toy import toy
        where, started = describe(requests, **knobs), time.process_time()
        generate = import_module(stage).generate
        expected = counts_of(generate(toy(), [*map(replace, requests)], **knobs))
        seconds, traces, found, crash = time.process_time() - started, [], {}, None
        with self.theirs(10 * seconds):
            generate = import_module(stage).generate
            try:
                for cause, sentence in faults(lambda *args, **named: traces.append(
                        generate(*args, **named)), toy(), [*map(replace, requests)], **knobs):
                    found.setdefault(cause, sentence)
            except Exception as error:   # what was seen before a crash says more than the crash
                crash = error
        effect = f"\nEffect: {found['contract']}" if "contract" in found else ""
        for cause in causes or CAUSES:
            if cause in found:
                raise Fault(f"{found[cause]}{effect if cause != 'contract' else ''}\n{where}")
        if crash:
            crash.where = where
            raise crash
        if counts and (fault := difference(counts_of(traces[0]), expected)):
            raise Fault(f"{fault}{effect}\n{where}")

    def fast(self, where, prepare, call):
        """call(prepare()) must not take many times as long as with ours, which is linear."""
        def seconds():
            argument, started = prepare(), time.process_time()
            call(argument)
            return time.process_time() - started

        needed = max(seconds() for _ in range(3))
        most = TIMES * needed + 0.02
        with self.theirs(most):
            if min(seconds() for _ in range(3)) > most:
                raise Fault(f"{where}: takes more than {TIMES} times as long as ours; does its "
                            "time grow with the square of the size?")

    def on_device(self, make, *names):
        """All tensors that a layout sets must be on `device`: here "meta", which has no memory."""
        import torch
        with self.theirs():
            try:
                batch = make(given((3, 2), (4, 2)), torch.device("meta"))
            except NotImplementedError as error:
                if "meta tensor" in str(error):   # it reads a tensor, which other devices allow
                    return
                raise
            for name in names:
                value = getattr(batch, name)
                for each in value if isinstance(value, tuple) else (value,):
                    where = each.device.type if torch.is_tensor(each) else "meta"
                    if where != "meta":
                        raise Fault(f"{name} is on the {where}, but `device` is {'meta'!r}")

    def example(self, handout):
        """The part's worked example in the handout, as doctest runs it."""
        code = dict(re.findall(r"^### ([\w ]*) as code\n\n```python\n(.*?)^```$",
                               handout.read_text("utf-8"), re.MULTILINE | re.DOTALL))
        test = doctest.DocTestParser().get_doctest(
            code["The example"] + code[f"Part {self.name[-1]}"], {}, handout.name, None, 0)
        with self.theirs():
            try:
                doctest.DebugRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test)
            except doctest.DocTestFailure as failure:
                print(failure.got)
                pair = (each.strip().splitlines() for each in (failure.got, failure.example.want))
                step = failure.example.source.splitlines()[0]
                raise Fault(f"the handout's example, part {self.name}, {step}: "
                            f"{difference(*pair)}") from None
            except doctest.UnexpectedException as error:
                raise error.exc_info[1] from None


class Example:
    """Each part of a set runs its worked example."""

    def test_the_example(self, part, request):
        part.example(request.path.with_name("HANDOUT.md"))


def answers(of_set, worth):
    """The tests of predicted numbers, and of workloads that expose bugs."""
    @pytest.mark.points(worth, title="predicted numbers")
    def numbers(number):
        number(of_set)

    @pytest.mark.points(worth, title="bugs exposed")
    def bugs(bug):
        bug(of_set)

    return numbers, bugs


@contextmanager
def limited(seconds):
    """Fault in the middle of what uses more CPU time than that (not on Windows)."""
    if not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_):
        raise Fault(f"does not finish within {seconds:.0f} seconds of CPU time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# --- comparing ------------------------------------------------------------------------------------

def difference(value, expected):
    """None, or what is wrong with a value, in a phrase."""
    if isinstance(expected, dict) and isinstance(value, dict):
        for key in {**expected, **value}:
            pair = (each.get(key, "nothing") for each in (value, expected))
            if fault := difference(*pair):
                return f"{key}: {fault}"
        return None
    mine, theirs = flat(value), flat(expected)
    if mine and any(isinstance(x, float) for x in theirs.values()):
        scale = max(map(abs, theirs.values())) or 1
        gaps = {at: abs(mine.get(at, math.nan) - theirs[at]) / scale for at in theirs}
        if not all(map(math.isfinite, gaps.values())):
            return "holds NaN or infinity"
        at, gap = max(gaps.items(), key=lambda pair: pair[1])
        if gap > 1e-6:
            return f"{mine[at]:.6g} at {list(at)}, expected {theirs[at]:.6g}"
        return None if gap <= TOLERANCE else (
            f"off by {gap:.1g} of the largest number: as if some of it were computed in float32")
    if value == expected:
        return None
    if isinstance(value, list) and isinstance(expected, list) and (
            any(isinstance(x, str) and " " in x for x in expected) or len(str(expected)) > 60):
        pairs = itertools.zip_longest(value, expected, fillvalue="the end")
        at, (a, b) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        place = "" if isinstance(b, str) else f"first difference at {at}: "
        return f"{place}{short(a)}, expected {short(b)}"
    return f"{short(value)}, expected {short(expected)}"


def flat(value, at=()):
    """{place: number} of nested lists."""
    if isinstance(value, list):
        return {place: x for i, inner in enumerate(value)
                for place, x in flat(inner, (*at, i)).items()}
    return {at: value} if isinstance(value, (int, float)) else {}


def short(value):
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def left_in_caches(layout, rng, passes):
    """
    A probe of what a run does not show: columns, a mask that shows the future, an answer that is
    computed again, what is left in the caches. The lengths tell first-fit decreasing from others.
    """
    import torch
    torch.manual_seed(rng.randrange(99))
    requests = given(*[(n, 13) for n in (2, 11, 4, 5, 8, 1, 3, 9, 2)])
    for step in range(passes):
        plan = [(request, request.todo) for request in requests]
        where = f"{layout.__name__}, pass {step}, new tokens " + " ".join(
            f"{r.name}{n}" for r, n in plan)
        batch = layout(plan)
        *rows, T = batch.tokens.shape
        batch.attend("random", *torch.randn(3, *rows, 2, T, 3).double())
        yield where, {"tokens": batch.tokens.tolist(), "positions": batch.positions.tolist()}
        if hasattr(batch, "block_diagonal"):
            yield where, {"block_diagonal": tensor(batch.block_diagonal())}
        for i, (request, n) in enumerate(plan):
            yield where, {f"the cache of {request.name}": {
                name: tensor(getattr(request.kv, name).get("random")) for name in "kv"}}
            request.computed, request.generated = n, [*range(i % 6 + 1)]


def books(rng, cases):
    """Random operations on the books of a pool, and what they hold afterwards."""
    from paging import Pages
    for number, size, operations in cases:
        pages, tables, said = Pages(number, size), [], []
        for _ in range(operations):
            if tables and (rng.random() < 0.45 or len(pages.free) < 3):
                table, tokens = tables.pop(rng.randrange(len(tables)))
                said.append(f"give_back({table})")
                pages.give_back(list(table))
            else:
                tokens = [rng.randrange(2) for _ in range(3 * size)]
                shared, table = pages.find(tokens[:-1]), []
                known, revived = len(shared), sum(page in pages.free for page in shared)
                if 3 - known > len(pages.free) - revived:
                    continue
                said.append(f"hold([], {shared})")
                pages.hold(table, argument := list(shared))
                yield "after " + "; ".join(said[-3:]), {
                    "the argument of hold afterwards": argument, "table": list(table)}
                pages.allocate(table, 3 - known)
                for i in range(known, 3):
                    pages.publish(table, i, tokens[size * i:size * (i + 1)])
                tables.append((table, tokens))
                said[-1] += f", then {table} is the block table of {tokens}"
            yield "after " + "; ".join(said[-3:]), {
                "holders": list(pages.holders), "free, in order": list(pages.free),
                "published": sorted(pages.published.values()), "in key_of": sorted(pages.key_of),
                "evicted_pages": pages.counts["evicted_pages"],
                **{f"find({tokens})": pages.find(tokens) for _, tokens in tables[-9:]}}
