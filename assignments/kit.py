"""
What the tests of all sets share: workloads, and the comparison of a student's code with ours.

    part.compare(probe)     a probe yields (where, value): the same with their functions and ours
    part.serve(...)         a whole stage: the judge's sentences (lab/checks/judge.py)
    part.fast(...)          no more than a multiple of the CPU time that ours has just taken

A test says in a sentence what is wrong: the first fault, and the smallest workload that shows it.
"""
import copy
import doctest
import itertools
import math
import os
import random
import re
import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import isolate
from isolate import Fault

from cache import KV
from request import Request
from scheduler import Scheduler

os.environ["OMP_NUM_THREADS"] = "1"   # a tiny model gains nothing from threads
TIMES, FLOOR = 30, 5   # of the reference's CPU time, and seconds, that a student's code may take
TOLERANCE = 1e-8       # relative; what is compared is in float64
STEPS = 2000           # a scheduler's run that takes more hangs
MIX = (1, 4), (5, 1), (1, 3), (12, 3), (5, 4), (3, 2, 2)   # see `given`
LATE = (2, 3), (2, 3), (9, 2, 1)


# --- workloads ------------------------------------------------------------------------------------

def sequences(values, most):
    """All sequences of up to `most` of the values, the shortest first."""
    return [each for length in range(most + 1)
            for each in itertools.product(values, repeat=length)]


def letters(i):
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[i % 26] + str(i // 26 or "")


def given(*sizes, name="", context_length=24, computed=0):
    """Requests A, B, ... or name0, name1, ... from (prompt, new, arrival, priority, eos_token)."""
    requests = []
    for i, (prompt, new, *rest) in enumerate(sizes):
        if not isinstance(prompt, list):
            prompt = [(7 * i + 3 * j * j + j) % 12 + 1 for j in range(prompt)]
        requests.append(Request(prompt, new, name=f"{name}{i}" if name else letters(i),
                                **dict(zip(("arrival", "priority", "eos_token"), rest))))
        requests[-1].context_length, requests[-1].computed = context_length, computed
    return requests


def drawn(rng, least=2, most=5, prompt=14, new=7):
    """`least` to `most` random requests, greedy and sampled."""
    requests = []
    for i in range(rng.randint(least, most)):
        length = rng.choice([1, 2, 3, rng.randint(4, prompt)])
        requests.append(Request(
            [rng.randrange(13) for _ in range(length)], rng.randint(1, new), name=letters(i),
            temperature=rng.choice([0.0, 0.0, 0.9]), seed=rng.randrange(99),
            arrival=rng.choice([0, 0, 1, 2])))
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


def cache_of(request):
    """What can be seen of a request's cache."""
    return f"a cache of {request.kv.capacity}" if request.kv else "no cache"


def plan_of(plan):
    return " ".join(f"{r.name}{n}" for r, n in plan) or "nothing"


def plan_for(rows):
    """A plan from (todo, n) of each request, which has a prompt of 4 tokens."""
    plan = list(zip(given(*[(4, 2)] * len(rows)), (n for _, n in rows)))
    for (request, _), (todo, _) in zip(plan, rows):
        request.computed = 4 - todo
    return plan


def scheduled(requests, max_batch=8, token_budget=64, max_kv_tokens=None):
    """A scheduler's run with no model; every token is 0. Yields what is seen of each step."""
    queue, step, freed = Scheduler(max_batch, token_budget, max_kv_tokens), 0, []
    free = queue.free
    queue.free = lambda request: freed.append(f"{request.name}, {cache_of(request)}") or free(
        request)
    for request in sorted(requests, key=lambda request: request.arrival):
        queue.add(request)
    for _ in range(STEPS):
        if not queue.busy:
            return
        step = queue.next_step(step)
        try:
            plan = queue.schedule(step)
        except NotImplementedError:
            raise
        except RuntimeError as error:
            yield {f"step {step}": f"raises RuntimeError: {error}"}
            return
        seen = {f"the plan of step {step}": plan_of(plan), "running": names(queue.running)}
        tokens = [0] * sum(n == request.todo for request, n in plan)
        queue.update(plan, tokens)
        yield {**seen, "plan and tokens after update": [plan_of(plan), tokens],
               f"running after step {step}": names(queue.running),
               "waiting": names(queue.waiting), "free was called for": sorted(freed),
               **{f"{r.name} after step {step}, computed, generated, finish_reason and cache":
                  [r.computed, len(r.generated), r.finish_reason, cache_of(r)] for r in requests}}
        step += 1


# --- a part ---------------------------------------------------------------------------------------

@dataclass
class Part:
    """One part of a set, of one student."""
    name: str               # "3a"
    folder: Path | None     # the student's; None: ours are tested
    functions: tuple        # that the part asks for, as file.py:Class.method
    rng: random.Random      # random workloads follow from it
    hidden: bool            # whether they are as large as an instructor's

    @property
    def sizes(self):
        """Arguments for `drawn`, of three workloads; hidden ones are as large as a batch."""
        return ({"least": 20, "most": 40},) * 3 if self.hidden else (
            {}, {}, {"least": 9, "most": 12})

    @contextmanager
    def theirs(self, seconds=0.0):
        """With their functions, and their limit on CPU time. seconds: that ours has taken."""
        if self.folder is None:
            yield
            return
        place = os.getcwd()
        os.chdir(self.folder)   # where their data files are
        try:
            with limited(max(FLOOR, TIMES * seconds)), isolate.part(self.folder, self.functions):
                yield
        finally:
            os.chdir(place)

    def compare(self, probe, *arguments):
        """A probe yields (where, value); Fault at the first value that is not as with ours."""
        started = time.process_time()
        expected = list(probe(*copy.deepcopy(arguments)))
        with self.theirs(time.process_time() - started):
            for (where, right), (_, value) in zip(expected, probe(*arguments)):
                if fault := difference(value, right):
                    raise Fault(f"{where}: {fault}")

    def serve(self, stage, requests, causes=None, **knobs):
        """
        Runs a stage on a small model. causes: of all that the judge sees, what counts here. The
        requests are copied.
        """
        from lab.checks.judge import CAUSES, faults
        from lab.checks.toy import toy
        where, started = describe(requests, **knobs), time.process_time()
        generate = import_module(stage).generate
        generate(toy(), [*map(replace, requests)], **knobs)
        found = {}
        with self.theirs(10 * (time.process_time() - started)):
            try:
                for cause, sentence in faults(
                        generate, toy(), [*map(replace, requests)], **knobs):
                    found.setdefault(cause, sentence)
            except Exception as error:   # what was seen before a crash says more than the crash
                error.where = where
                found["crash"] = error
        effect = f"\nEffect: {found['contract']}" if "contract" in found else ""
        for cause in causes or CAUSES:
            if cause in found:
                raise Fault(f"{found[cause]}{effect if cause != 'contract' else ''}\n{where}")
        if "crash" in found:
            raise found["crash"]

    def fast(self, where, prepare, call):
        """call(prepare()) must not take many times as long as with ours, which is linear."""
        def seconds():
            argument, started = prepare(), time.process_time()
            call(argument)
            return time.process_time() - started

        most = TIMES * max(seconds() for _ in range(3)) + 0.02
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
                for each in filter(torch.is_tensor, value if isinstance(value, tuple) else [value]):
                    if each.device.type != "meta":
                        raise Fault(f"{name} is on the {each.device.type}, but `device` is 'meta'")

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
                print(failure.got)   # what doctest has caught counts towards the limit of prints
                step = failure.example.source.splitlines()[0]
                pair = (each.strip().splitlines() for each in (failure.got, failure.example.want))
                raise Fault(f"the handout's example, part {self.name}, {step}: "
                            f"{difference(*pair)}") from None
            except doctest.UnexpectedException as error:
                raise error.exc_info[1] from None


class Checks:
    """What each part of a set is tested with: its worked example, and what its class asks for."""
    on_device = ()   # how to make a layout, and its tensors that have to be on the device
    in_time = ()     # [(words, prepare, call), ...]: see Part.fast

    def test_the_example(self, part, request):
        part.example(request.path.with_name("HANDOUT.md"))

    def test_device(self, part):
        if self.on_device:
            part.on_device(*self.on_device)

    def test_time(self, part):
        for words, prepare, call in self.in_time:
            part.fast(words, prepare, call)


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


def limit_process(cpu):
    """Hard limits for a process: seconds of CPU time, 6 GB of memory, 4 MB of what it writes."""
    try:
        import resource
    except ImportError:
        return   # Windows: the clock is the only limit
    for name, most in ("CPU", cpu), ("AS", 6000 << 20), ("FSIZE", 4 << 20), ("CORE", 0):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))


# --- comparing ------------------------------------------------------------------------------------

def difference(value, expected):
    """None, or what is wrong with a value, in a phrase."""
    if value == expected:
        return None
    if isinstance(expected, dict) and isinstance(value, dict):
        for key in {**expected, **value}:
            if fault := difference(value.get(key, "nothing"), expected.get(key, "nothing")):
                return f"{key}: {fault}"
        return None
    mine, theirs = flat(value), flat(expected)
    if mine and any(isinstance(x, float) for x in theirs.values()):
        scale = max(map(abs, theirs.values())) or 1
        for at, right in theirs.items():
            number = mine.get(at, math.nan)
            if not abs(number - right) <= TOLERANCE * scale:   # NaN is wrong, too
                return f"{number:.10g} at {list(at)}, expected {right:.10g}"
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


def left_in_caches(layout, rng, passes, lengths=(2, 11, 4, 5, 8, 1, 3, 9, 2)):
    """
    A probe of what a run does not show: columns, a mask that shows the future, an answer that is
    computed again, what is left in the caches. The lengths tell first-fit decreasing from others.
    """
    import torch
    torch.manual_seed(rng.randrange(99))
    requests = given(*[(n, 13) for n in lengths])
    for request in requests:
        request.kv = KV(request.kv_tokens)
    for step in range(passes):
        plan = [(request, request.todo) for request in requests]
        batch = layout(plan)
        where = f"{type(batch).__name__}, pass {step}, new tokens {plan_of(plan)}"
        *rows, T = batch.tokens.shape
        batch.attend("random", *torch.randn(3, *rows, 2, T, 3).double())
        yield where, {"tokens": batch.tokens.tolist(), "positions": batch.positions.tolist()}
        if hasattr(batch, "block_diagonal"):
            yield where, {"block_diagonal": tensor(batch.block_diagonal())}
        for i, (request, n) in enumerate(plan):
            yield where, {f"the cache of {request.name}": {
                name: tensor(getattr(request.kv, name).get("random")) for name in "kv"}}
            request.computed, request.generated = n, [*range((i + n) % 12 + 1)]


def chain(tokens, size):
    """The page hashes of a sequence's full pages."""
    from generate_prefix import page_hash  # this loads torch
    hashes = []
    for end in range(size, len(tokens) + 1, size):
        hashes.append(page_hash(hashes[-1] if hashes else b"", tokens[end - size:end]))
    return hashes


def operations(pages, rng, number):
    """Random operations on PrefixPages. Yields (the last calls, [(table, tokens), ...])."""
    tables, said = [], []
    for _ in range(number):
        if tables and (rng.random() < 0.45 or len(pages.free_queue) < 3):
            table, _ = tables.pop(rng.randrange(len(tables)))
            said.append(f"free({table})")
            pages.free(list(table))
        else:
            tokens = [rng.randrange(2) for _ in range(3 * pages.size)]
            hashes = chain(tokens, pages.size)
            # sometimes as two requests which compute the same at the same time
            found, table = pages.find(hashes[:2]) if rng.random() < 0.7 else [], []
            known, revived = len(found), sum(page in pages.free_queue for page in found)
            if 3 - known > len(pages.free_queue) - revived:
                continue
            said.append(f"share([], {found})")
            pages.share(table, found)
            said[-1] += f" whose argument is then {found}"
            pages.allocate(table, 3 - known)
            for page, name in list(zip(table, hashes))[known:]:
                pages.cache(page, name)
            tables.append((table, tokens))
            said[-1] += f", then {table} is the block table of {tokens}"
        yield "; ".join(said[-3:]), tables


def pools(rng, cases):
    """What PrefixPages holds after random operations. Cases: (pages, their size, number)."""
    from generate_prefix import PrefixPages
    for number, size, count in cases:
        pages = PrefixPages(number, size)
        for said, tables in operations(pages, rng, count):
            yield f"after {said}", {
                "the calls": said, "ref_count": list(pages.ref_count),
                "free_queue": list(pages.free_queue),
                "cached": sorted(pages.cached.values()), "in hash_of": sorted(pages.hash_of),
                "evicted_pages": pages.counts["evicted_pages"],
                **{f"find, for {tokens}": pages.find(chain(tokens, size))
                   for _, tokens in tables[-9:]}}
