"""
Runs a student's functions and reports what it sees, for grade.py, which judges it in another
process and never runs a student's code.

`observe(part, seeds)` yields (seed, number of the probe, cause, where, value). A part has one or
more probes: first its functions alone, then a whole stage. The causes, in the order in which
grade.py looks at them:

    tokens      which tokens are in which slots
    positions   at which positions they are computed
    sees        which keys each token sees
    sampled     which requests get a token, and from which logits
    result      what a function returns or changes
    crash       the exception, and the line of the student's code that raised it
    counts      forward passes, slots, preemptions, the steps of tokens
    contract    tokens and logits of each request, beside the same request alone

All but `result` and `counts` are sentences (toolbox/judge.py), and right if there are none. These
two are values, which grade.py compares with those of the reference.

The seed EDGES tries the rules at their edges, which are few enough to try them all: an exact fit,
one less, one more, nothing. The other seeds are random workloads on top of that.
"""
import json
import math
import os
import random
import sys
import time
import traceback
from collections import deque
from contextlib import contextmanager
from heapq import heappop
from importlib import import_module
from itertools import islice, product
from pathlib import Path
from types import SimpleNamespace

from sets import SETS

try:
    import resource
except ImportError:   # Windows: the clock is the only limit
    resource = None

EDGES = "edges"      # the seed that tries all edges
STEPS = 300          # a scheduler that takes more counts as hanging
MEGABYTES = 6000     # of a child's memory
FOLDER = ""          # of the child's checkout
OURS = ()            # names of functions whose code, in this part, is ours and no student's to read


def child(folder, names, seeds, report, limit):
    """
    The child process: observes parts, ["4a", ...], of the checkout in `folder`, and appends lines
    of JSON to the file `report`; a part's last line has its CPU seconds, of which each part may use
    up to `limit`. What a student's code prints goes to a file of limited size.
    """
    enter(folder, report)
    with open(report, "a") as lines:
        for name in names:
            started = time.process_time()
            limit_cpu(limit)
            for observation in observe(name, seeds):
                lines.write(json.dumps([name, *observation], default=repr) + "\n")
                lines.flush()
            spent = time.process_time() - started
            lines.write(json.dumps([name, None, 0, "done", "", spent]) + "\n")
            lines.flush()


def enter(folder, report):
    """Makes this process a child that runs a student's code: its folder, its limits, its output."""
    global FOLDER
    FOLDER = str(folder)
    os.chdir(folder)
    limit_resources()
    # One thread: a tiny model gains nothing from more, and threads that wait for each other spin
    # on cores that belong to other children.
    os.environ["OMP_NUM_THREADS"] = "1"
    if "torch" in sys.modules:   # preloaded
        sys.modules["torch"].set_num_threads(1)
    printed = os.open(str(report) + ".out", os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    sys.stdout = sys.stderr = open(1, "w", closefd=False)
    sys.path.insert(0, str(folder))


def limit_resources():
    if resource:
        resource.setrlimit(resource.RLIMIT_AS, (MEGABYTES << 20, MEGABYTES << 20))
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_cpu(seconds):
    """From now on, this process may use so many seconds of CPU time; then SIGXCPU ends it."""
    if resource:
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        soft = math.ceil(time.process_time() + seconds)
        unlimited = hard == resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_CPU, (soft if unlimited else min(soft, hard), hard))


def observe(name, seeds):
    """All observations of one part, "4a" or "break 4a". An exception ends a probe, not the part."""
    global OURS
    if name in PROBES:
        chosen = SETS[int(name[0])]
        own = next(part.functions for part in chosen.parts if part.letter == name[1])
        OURS = {function.split(":")[1].split(".")[-1]
                for function in {*chosen.functions, *chosen.hidden} - {*own}}
    for seed in seeds:
        for i, probe in enumerate(PROBES.get(name) or [handed_in]):
            rng = name.split()[-1] if probe is handed_in else random.Random(f"{name} {seed}")
            try:
                yield from ((seed, i, *found) for found in probe(rng, seed == EDGES))
            except Exception as error:
                yield seed, i, "crash", getattr(error, "where", ""), [say(error)]


def say(error):
    """An exception in a line, with the last line of the student's own code that it passed."""
    if isinstance(error, NotImplementedError) and str(error).startswith("set "):
        return f"{str(error).split(': ')[1]} is not written yet"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if frame.filename.startswith(FOLDER) and "toolbox" not in frame.filename
              and frame.name not in OURS]
    last = frames[-1] if frames else None
    place = f" (in {last.name}: {last.line})" if last and not last.line.startswith("raise") else ""
    message = str(error).strip().splitlines()[0] if str(error).strip() else ""
    if isinstance(error, KeyError) and message == "'xray'":
        message += ", since nothing was written under this layer"
    moment = " " + error.moment if getattr(error, "moment", "") else ""
    return f"raises {type(error).__name__}{moment}: {message:.150}{place}"


@contextmanager
def during(where):
    """Names what was tried, in the message of an exception."""
    try:
        yield
    except Exception as error:
        error.where = where
        raise


# --- workloads ------------------------------------------------------------------------------------

def some(rng, edge, cases, number=4):
    """All cases at the edges; elsewhere a few of them."""
    cases = list(cases)
    return cases if edge else rng.sample(cases, min(number, len(cases)))


def requests_of(rng, most=5, sampled=True, prompt=14, long=False):
    """2 to `most` random requests. long: the first one's prompt has 12 tokens and is cut."""
    from request import Request
    requests = []
    for i in range(rng.randint(2, most)):
        length = 12 if long and not i else rng.choice([1, 2, 3, rng.randint(4, prompt)])
        requests.append(Request(
            [rng.randrange(13) for _ in range(length)], rng.randint(1, 7), name="ABCDEFGH"[i],
            temperature=rng.choice([0.0, 0.0, 0.9]) if sampled else 0.0, seed=rng.randrange(99),
            arrival=rng.choice([0, 0, 1, 2])))
    return requests


def given(*sizes, block_size=None):
    """Requests A, B, ... from (prompt, new tokens, arrival, priority, eos_token)."""
    from request import Request
    requests = []
    for i, (prompt, new, *rest) in enumerate(sizes):
        arrival, priority, eos = [*rest, *[0, 0, None][len(rest):]]
        if not isinstance(prompt, list):
            prompt = [(7 * i + 3 * j * j + j) % 12 + 1 for j in range(prompt)]
        requests.append(Request(prompt, new, name="ABCDEFGH"[i], arrival=arrival,
                                priority=priority, eos_token=eos))
        requests[-1].block_size = block_size
    return requests


# Prompts of one token and of equal length, a late one, a long one that is cut, the context limit
MIX = (1, 4), (5, 1), (1, 3), (12, 3), (5, 4), (3, 2, 2), (21, 6, 3)


def describe(requests, **knobs):
    """A workload in words; 5+3 tokens are a prompt of 5, and 3 to generate."""
    words = [f"{r.name} = {len(r.prompt)}+{r.max_new_tokens} tokens"
             + (f" at step {r.arrival}" if r.arrival else "") for r in requests]
    return "Workload: " + ", ".join(words + [f"{name} {value}" for name, value in knobs.items()
                                             if value is not None])


def names(requests):
    return [request.name for request in requests]


def tried(where, function, *arguments):
    """What a function returns; an exception names what was tried."""
    with during(where):
        return function(*arguments)


def tensor(where, value):
    """Shape and dtype, then the numbers."""
    if not hasattr(value, "dtype"):
        yield "result", where, f"a {type(value).__name__}"
        return
    yield "result", f"shape and dtype of {where}", f"{tuple(value.shape)} {value.dtype}"
    yield "result", where, (value.int() if str(value.dtype) == "torch.bool" else value).tolist()


def stage(generate, requests, **knobs):
    """Runs a stage on a small model, and yields all that can be seen of it."""
    from toolbox.judge import CAUSES, faults
    from toolbox.toy import toy
    where, traces, found = describe(requests, **knobs), [], {}

    def run(*arguments, **named):
        traces.append(generate(*arguments, **named))

    try:
        with during(where):
            for cause, sentence in faults(run, toy(), requests, **knobs):
                found.setdefault(cause, []).append(sentence)
    finally:   # what was seen before a crash says more than the crash
        yield from ((cause, where, found.get(cause, [])[:1]) for cause in CAUSES)
    yield "counts", where, counts_of(traces[0])


def counts_of(trace):
    return {"forward passes": len(trace.passes), "slots": sum(p.slots for p in trace.passes),
            **{name: trace.counts[name] for name in sorted(trace.counts)},
            **{f"steps of {r.name}": r.token_steps for r in trace.requests}}


# --- set 1 ----------------------------------------------------------------------------------------

def head(rng, edge):
    """Attention alone: first which keys it sees, then its numbers."""
    import torch

    from model import Head
    g = torch.Generator().manual_seed(rng.randrange(10**6))
    cases = product(((1, 0), (4, 0), (1, 5), (3, 4)), (True, False),
                    (None, "keys", "rows", "all", "nothing"))
    for i, ((T, P), split, masked) in enumerate(some(rng, edge, cases, 8)):
        S, hs, lead = P + T, (5, 1, 4)[i % 3], ((2, 3), (), (3,), (2, 1, 3))[i % 4]
        dtype = torch.float32 if i % 5 == 4 else torch.float64   # of the first, numbers differ
        shape = {"keys": (S,), "rows": (*lead[:1], *[1] * len(lead), S)[-len(lead) - 2:],
                 "all": (*lead, T, S), "nothing": (T, S)}.get(masked)
        mask = shape and torch.rand(*shape, generator=g) < (-1 if masked == "nothing" else 0.7)
        split = split and P > 0
        words = (f"Head, T = {T}, S = {S}, hs = {hs}" + (f", {P} keys in past_k" if split else "")
                 + (f", a mask {shape}" + " of False" * (masked == "nothing") if masked else ""))

        def call(q, k, v):
            past = (k[..., :P, :], v[..., :P, :]) if split else (None, None)
            new = (k[..., P:, :], v[..., P:, :]) if split else (k, v)
            with during(words):
                return Head()(q, *new, *past, mask)

        # Scores of 0 and one-hot values: the output is the weights, equal for all keys seen.
        zeros, eye = torch.zeros(*lead, S, S).double(), torch.eye(S).double().expand(*lead, S, S)
        see = torch.tensor([[j <= P + t for j in range(S)] for t in range(T)])
        see = (see if mask is None else see & mask).expand(*lead, T, S).reshape(-1, T, S)
        weights = call(zeros[..., :T, :], zeros, eye)[0].reshape(-1, T, S)
        equal = see / see.sum(-1, keepdim=True).clamp(min=1.0).double()
        yield "sees", words, [wrong_weights(t, see[b, t], weights[b, t])
                              for b, t in product(range(len(see)), range(T))
                              if not torch.allclose(weights[b, t], equal[b, t], atol=1e-8)][:1]
        arguments = [torch.randn(*lead, n, hs, generator=g).to(dtype) for n in (T, S, S)]
        before = [argument.clone() for argument in arguments]
        out, all_k, all_v = call(*arguments)
        yield from islice(tensor(f"the output of {words}", out), 1 + (dtype == torch.float64))
        yield from tensor(f"the keys that {words} returns", all_k)
        yield from tensor(f"the values that {words} returns", all_v)
        yield "result", f"arguments that {words} has changed", [
            name for name, a, b in zip("qkv", before, arguments) if not torch.equal(a, b)]


def wrong_weights(t, see, weights):
    keys = [[j for j, w in enumerate(row.tolist()) if w] for row in (weights, see)]
    if keys[0] != keys[1]:
        return f"new token {t} sees the keys {keys[0]}, expected {keys[1]}"
    return (f"the scores of new token {t} are equal, but its weights are "
            f"{[round(w, 3) for w in weights.tolist()]}, expected equal ones with the sum 1")


def kv(rng, edge):
    """Writes and reads, in two caches at once; then writes that do not fit."""
    import torch

    from cache import KV
    g = torch.Generator().manual_seed(rng.randrange(10**6))
    lead, dtype = rng.choice([((2,), torch.float64), ((), torch.float32), ((2, 3), torch.float64)])
    caches, layers = [KV(7), KV(7)], ["a", 0]

    def new(n):
        return [torch.randn(*lead, n, 3, generator=g).to(dtype) for _ in "kv"]

    def write(i, layer, start, n):
        tried(f"write({layer!r}, {start}, ...) of {n} tokens into KV(7)", caches[i].write, layer,
              start, *new(n))

    def read(i, layer, end, when):
        where = f"read({layer!r}, {end}), {when}"
        for kind, found in zip(("keys", "values"), tried(where, caches[i].read, layer, end)):
            yield from tensor(f"the {kind} of {where}", found)

    said, end = [], 0
    while end < 7:   # exactly full in the end
        n = rng.randint(1, min(3, 7 - end))
        for i, layer in product((0, 1), layers):
            write(i, layer, end, n)
        said.append(f"write(layer, {end}, ...) of {n}")
        end += n
        for i, layer in product((0, 1), layers):
            which = "in the first of two KV(7), " if i == 0 else "in the second, "
            yield from read(i, layer, end, which + "after " + ", ".join(said))
    buffer = caches[0].k["a"]
    write(0, "a", 1, 2)   # a chunk that is written again
    yield "result", "write, in place in the buffer", caches[0].k["a"] is buffer
    yield from read(0, "a", 7, "after a second write of 2 at 1")
    yield from read(0, "a", 4, "with 7 tokens written")
    for start, n in (6, 2), (7, 1), (0, 8), (5, 3):
        where = f"write('a', {start}, ...) of {n} tokens into KV(7)"
        try:
            caches[0].write("a", start, *new(n))
            yield "result", where, "is accepted"
        except ValueError:
            yield "result", where, "raises ValueError"
        except Exception as error:   # what PyTorch says of tensors that do not fit
            yield "result", where, f"raises {type(error).__name__}"
        yield from read(0, "a", 7, f"after {where}, which raises ValueError and stores nothing")


def unbatched(rng, edge):
    from generate_unbatched import generate
    for use_cache in (True, False):
        requests = given((1, 3), (4, 1), (21, 6), (3, 5)) if edge else requests_of(rng, most=3)
        yield from stage(generate, requests, use_cache=use_cache)


# --- set 2 ----------------------------------------------------------------------------------------

def naive(rng, edge):
    from generate_naive import generate
    if not edge:
        yield from stage(generate, requests_of(rng), max_batch=rng.choice([2, 3, 4]))
        return
    yield from stage(generate, given(*MIX[:6]), max_batch=3)
    yield from stage(generate, given((2, 1), (2, 2)))
    # a finished row goes on beyond the last position
    yield from stage(generate, given((20, 2), (2, 20)))


def append(rng, edge):
    """Each way to end, alone and together with others."""
    from request import Request
    for prompt, new, room, at in some(rng, edge, product(
            (1, 2, 4), (1, 2, 3), (4, 5, 9), (None, 0, 1, 2, 3)), 8):
        request = Request([1] * prompt, new, eos_token=0, name="A")
        if at is None:
            request.eos_token = None
        request.block_size = room
        for i in range(9):
            if not request.finished:
                request.computed = prompt + i
                request.append(0 if i == at or at is None else 5)
        ends = "no eos_token" if at is None else f"token {at} is the eos_token"
        yield ("result", f"number of tokens and finish_reason of a prompt of {prompt}, "
               f"max_new_tokens {new}, block_size {room}, {ends}",
               [len(request.generated), request.finish_reason])


def admitted(rng, edge):
    from generate_dynamic import admit
    from request import Request
    for arrivals, busy, step, most in some(rng, edge, product(
            ([], [0], [1], [0, 0], [0, 1], [1, 1, 2, 3], [0, 0, 0, 1, 1, 1]), range(4), range(3),
            (3, 4, 6)), 12):
        waiting = [Request([1], name=f"r{i}", arrival=arrival)
                   for i, arrival in enumerate(arrivals)]
        running = [Request([1], name=f"R{i}") for i in range(busy)]
        where = (f"admit at step {step}, max_batch {most}, {busy} running, waiting with "
                 f"arrivals {arrivals}")
        left, now = tried(where, admit, list(waiting), list(running), step, most)
        yield "result", f"{where}: waiting", names(left)
        yield "result", f"{where}: running", names(now)


def left(rng, edge):
    from generate_dynamic import leave
    from request import Request
    for ends in some(rng, edge, (ends for n in range(4) for ends in product(
            ("goes on", "stop", "cancelled"), repeat=n)), 12):
        running = [Request([1], name=f"R{i}") for i in range(len(ends))]
        for request, end in zip(running, ends):
            request.kv = "cache"
            if end == "stop":
                request.finish_reason = "stop"
            elif end == "cancelled":
                request.cancel()
        where = f"leave, with {', '.join(f'R{i} {end}' for i, end in enumerate(ends)) or 'nobody'}"
        yield "result", f"{where}: the others", names(tried(where, leave, list(running)))
        yield "result", f"{where}: those with a cache", names(r for r in running if r.kv)
        yield "result", f"{where}: finish_reason", {r.name: r.finish_reason for r in running}


# --- set 3 ----------------------------------------------------------------------------------------

def plans(requests, token_budget=64, max_batch=8, max_kv_tokens=None):
    """Plans, step by step, with no model: every sampled token is 0."""
    from scheduler import Scheduler
    requests = sorted(requests, key=lambda request: request.arrival)
    for request in requests:
        request.block_size = 24
    where = describe(requests, token_budget=token_budget, max_batch=max_batch,
                     max_kv_tokens=max_kv_tokens)
    queue, step, made = Scheduler(max_batch, token_budget, max_kv_tokens), 0, []
    with during(where):
        for request in requests:
            queue.add(request)
    while queue.busy and len(made) < STEPS:
        step = queue.next_step(step)
        try:
            plan = queue.schedule(step)
            made.append(f"step {step}: " + (" ".join(f"{r.name}{n}" for r, n in plan) or "nothing"))
            for request, _ in plan:
                request.kv = request.kv or "cache"
            queue.update(plan, [0] * sum(n == r.todo for r, n in plan))
        except NotImplementedError:
            raise
        except Exception as error:
            made.append(f"step {step}: {say(error)}")
            break
        step += 1
    yield "result", where, made
    yield "result", where, {f"tokens of {r.name}": len(r.generated) for r in requests}
    yield "result", where, {f"cache of {r.name} after its end": r.kv for r in requests}


def scheduler(rng, edge):
    """Whole runs: many requests, with and without room for all."""
    if edge:
        yield from plans(given(*MIX), token_budget=5, max_batch=3)
        yield from plans(given((3, 2), (8, 3), (4, 4), (1, 2)), 6, 3, 16)   # the handout's
        yield from plans(given((1, 3), (1, 1), (1, 1), (2, 2)), 2, 4, 5)
        return
    for prompt, room in (14, None), (6, rng.choice([13, 16, 20])):
        yield from plans(requests_of(rng, most=8, sampled=False, prompt=prompt),
                         rng.choice([3, 5, 8]), rng.choice([2, 3, 5]), room)


def running(queue, todos):
    """Lets requests run that have so many tokens to do."""
    for request, todo in zip(given(*[(6, 3)] * len(todos), block_size=24), todos):
        request.computed = 6 - todo
        request.kv = "cache"
        queue.running.append(request)
    return ", ".join(f"{r.name} {r.todo}" for r in queue.running) or "nothing"


def shared(rng, edge):
    """Plans for requests that are already running."""
    from scheduler import Scheduler
    for todos, budget in some(rng, edge, ((todos, budget) for n in range(4) for todos in product(
            (1, 2, 5), repeat=n) for budget in (3, 4, 8)), 12):
        queue = Scheduler(9, budget)
        where = f"plan for token_budget {budget}, to do: {running(queue, todos)}"
        plan = tried(where, queue.share_budget)
        yield "result", where, " ".join(f"{r.name}{n}" for r, n in plan) or "nothing"
        yield "result", f"{where}: running, with todo", [
            f"{r.name} {r.todo}" for r in queue.running]


def entering(rng, edge):
    """Admission at the edges of its four conditions."""
    from scheduler import Scheduler
    queues = (), ((1, 1),), ((2, 1), (1, 1), (1, 1)), ((5, 2), (1, 1)), ((2, 3, 1), (1, 1, 2))
    cases = product(((), (1,), (2,), (3,), (4,), (1, 2)), queues, (1, 2, 4), (3, 4),
                    (None, 9, 10, 17))
    for todos, sizes, most, budget, room in some(
            rng, edge, (case for case in cases if len(case[0]) <= case[2]), 16):
        queue = Scheduler(most, budget, room)
        words = running(queue, todos)
        queue.waiting = deque(given(*sizes, block_size=24))
        for i, request in enumerate(queue.waiting):
            request.name = f"W{i}"
        where = (f"admit at step 1, max_batch {most}, token_budget {budget}, max_kv_tokens {room}, "
                 f"to do: {words}, waiting: " + (", ".join(
                     f"{r.name} (todo {r.todo}, kv_tokens {r.kv_tokens}, arrival {r.arrival})"
                     for r in queue.waiting) or "nothing"))
        for request in queue.waiting:
            asked = (f"grant_room({request.name}), max_kv_tokens {room}, kv_tokens "
                     f"{request.kv_tokens}, running: {[r.kv_tokens for r in queue.running]}")
            yield "result", asked, bool(tried(asked, queue.grant_room, request))
        tried(where, queue.admit, 1)
        yield "result", f"{where}; then running", names(queue.running)
        yield "result", f"{where}; then waiting", names(queue.waiting)


def advanced(rng, edge):
    """Plans with complete requests, partial prompts, and requests which compute nothing."""
    from request import advance
    entries = (1, 1), (1, 0), (3, 1), (3, 3), (3, 0)   # todo, n
    for rows in some(rng, edge, (rows for size in (1, 2, 3) for rows in product(
            entries, repeat=size)), 12):
        plan = []
        for i, (request, (todo, n)) in enumerate(zip(given((4, 2), (4, 1), (4, 2)), rows)):
            request.computed, request.block_size = 4 - todo, (4, 24)[i % 2]
            plan.append((request, n))
        where = "advance, with the plan " + ", ".join(
            f"{r.name}: {n} of {r.todo} tokens to do" for r, n in plan)
        due = [request for request, n in plan if n == request.todo]
        tried(where, advance, plan, [10 + i for i in range(len(due))])
        yield "result", f"{where}; then the new tokens", {r.name: r.generated for r, _ in plan}
        yield "result", f"{where}; then computed", {r.name: r.computed for r, _ in plan}
        yield "result", f"{where}; then finish_reason", {r.name: r.finish_reason for r, _ in plan}


def released(rng, edge):
    from scheduler import Scheduler
    for ends in some(rng, edge, (ends for n in range(5) for ends in product(
            (False, True), repeat=n)), 8):
        queue, freed = Scheduler(9, 9), []
        running(queue, (1,) * len(ends))
        queue.waiting.extend(given((1, 1), block_size=24))
        for request, end in zip(queue.running, ends):
            request.finish_reason = "length" if end else None
        where = (f"release, running: {', '.join(names(queue.running)) or 'nothing'}, finished: "
                 f"{', '.join(r.name for r in queue.running if r.finished) or 'none'}")
        queue.free = lambda request, freed=freed: freed.append(request.name)
        tried(where, queue.release)
        yield "result", f"{where}; then running", names(queue.running)
        yield "result", f"{where}; then waiting", len(queue.waiting)
        yield "result", f"{where}; free was called for", sorted(freed)


# --- sets 4 and 5 ---------------------------------------------------------------------------------

def interleaved(rng, edge):
    from generate_interleaved import generate
    if edge:
        yield from stage(generate, given(*MIX), max_batch=4, token_budget=5)
        yield from stage(generate, given((2, 3), (2, 3), (9, 2, 1)))
        return
    yield from stage(generate, requests_of(rng, long=rng.random() < 0.5), max_batch=4,
                     token_budget=rng.choice([4, 6, 9]))


def completed(rng, edge):
    """Plans that also hold requests which compute nothing."""
    from request import complete
    entries = (1, 0), (1, 1), (3, 0), (3, 1), (3, 3)   # todo, n
    for rows in some(rng, edge, (rows for size in (0, 1, 2) for rows in product(
            entries, repeat=size)), 8):
        plan = []
        for request, (todo, n) in zip(given((4, 2), (4, 2)), rows):
            request.computed = 4 - todo
            plan.append((request, n))
        words = ", ".join(f"{r.name}: {n} of {r.todo} to do" for r, n in plan) or "[]"
        due = [i for i, (request, n) in enumerate(plan) if n == request.todo]
        where = f"complete, with the plan {words}"
        found = list(tried(where, complete, list(plan)))
        yield "sampled", where, [] if found == due else [f"it returns {found}, expected {due}"]


# Each tells first-fit decreasing from another rule: without sorting, without an exact fit, best fit
# (1, 3, 3, 5), last fit and next fit (1, 2, 3)
LENGTHS = (([], 5), ([5], 5), ([1, 1, 3, 2, 2], 5), ([2, 3, 6], 8), ([1, 3, 3, 5], 7),
           ([1, 2, 3], 4), ([2, 6, 3, 5, 1, 4], 7), ([4, 4, 4, 4], 8))


def packing(rng, edge):
    from generate_prepacked import first_fit_decreasing
    sizes = [(n, rng.randint(5, 20)) for n in (1, 3, 5, 7, 9, 9)]
    for lengths, size in LENGTHS if edge else [
            ([rng.randint(1, size) for _ in range(n)], size) for n, size in sizes]:
        where, argument = f"first_fit_decreasing({lengths}, {size})", list(lengths)
        with during(where):
            rows = first_fit_decreasing(argument, size)
            yield "result", f"{where}, its argument afterwards", argument
            yield "result", f"{where}, all indices", sorted(i for row in rows for i in row)
            yield ("result", f"{where}, lengths in rows",
                   [[lengths[i] for i in row] for row in rows])


def prepacked(rng, edge):
    from generate_prepacked import generate
    if edge:
        yield from stage(generate, given(*MIX[:6]), max_batch=6)
        yield from stage(generate, given((2, 2), (5, 2), (3, 3), (1, 2)))
        return
    yield from stage(generate, requests_of(rng, most=7), max_batch=6)


def blocks(rng, edge):
    """The mask of the stream alone."""
    from generate_ragged import Flat
    requests = given((3, 1), (1, 2), (7, 1), block_size=24) if edge else requests_of(rng)
    for request in requests:
        request.block_size = 24
        request.computed = rng.randrange(len(request.prompt))
    rng.shuffle(requests)
    plan = [(request, rng.randint(1, request.todo)) for request in requests]
    words = ", ".join(f"{n} new tokens after {r.computed}" for r, n in plan)
    with during(f"block_diagonal, {words}"):
        mask = Flat(plan, attention="mask").block_diagonal()
    yield from tensor(f"the mask of {words}", mask)


def stream(rng, edge):
    from generate_ragged import generate
    for attention in "mask", "varlen":
        if edge:
            yield from stage(generate, given(*MIX), token_budget=5, attention=attention)
            yield from stage(generate, given((2, 3), (2, 3), (9, 2, 1)), attention=attention)
        else:
            yield from stage(generate, requests_of(rng, long=True),
                             token_budget=rng.choice([4, 6, 9]), attention=attention)


def attending(rng, edge):
    """`attend` alone, with random queries, keys and values; the scores that `head` computes."""
    import torch

    import generate_ragged
    from generate_ragged import Flat
    sizes = [(2, 1), (1, 1), (4, 1)] if edge else [(len(r.prompt), 1) for r in requests_of(rng)]
    original, g = generate_ragged.head, torch.Generator().manual_seed(rng.randrange(10**6))
    for attention in "varlen", "mask":
        requests, calls = given(*sizes, block_size=24), []

        def counting(q, k, v, *arguments, calls=calls, **named):
            calls.append(q.size(-2) * k.size(-2))
            return original(q, k, v, *arguments, **named)

        batch = Flat([(request, request.todo) for request in requests], attention=attention)
        q, k, v = (torch.randn(2, batch.cu_seqlens[-1], 3, generator=g).double() for _ in "qkv")
        where = f"attend, {attention!r}, random q, k, v and cu_seqlens {batch.cu_seqlens}"
        generate_ragged.head = counting
        try:
            with during(where):
                out = batch.attend("random", q, k, v)
        finally:
            generate_ragged.head = original
        yield from tensor(f"the output of {where}", out)
        yield "result", f"score entries that `head` computes in {where}", sum(calls)


# --- set 6 ----------------------------------------------------------------------------------------

def books(rng, edge):
    """Random operations on the books of a pool, and what they hold afterwards."""
    from paging import Pages
    for _ in range(6 if edge else 1):
        pages, tables, said = Pages(8, 2), [], []
        for _ in range(40 if edge else 14):
            if tables and (rng.random() < 0.45 or pages.available() < 3):
                table, tokens = tables.pop(rng.randrange(len(tables)))
                said.append(f"give_back({table})")
                with during(f"after {'; '.join(said[-3:])}"):
                    pages.give_back(list(table))
            else:
                tokens = [rng.randrange(2) for _ in range(6)]
                table = pages.find(tokens[:-1])
                known, kept = len(table), sum(page in pages.kept for page in table)
                if 3 - known > pages.available() - kept:
                    continue
                said.append(f"hold({table})")
                with during(f"after {'; '.join(said[-3:])}"):
                    pages.hold(list(table))
                    pages.allocate(table, 3 - known)
                    for i in range(known, 3):
                        pages.publish(table, i, tokens[2 * i:2 * i + 2])
                tables.append((table, tokens))
                said[-1] += f", then {table} is the block table of {tokens}"
            free = list(pages.free)
            yield "result", f"after {'; '.join(said[-3:])}", {
                "holders": list(pages.holders), "kept, in order": list(pages.kept),
                "free, as heappop takes them": [heappop(free) for _ in pages.free],
                "published": sorted(pages.published.values()), "in key_of": sorted(pages.key_of),
                "gains": pages.gains, "evicted_pages": pages.counts["evicted_pages"],
                **{f"find({tokens})": pages.find(tokens) for _, tokens in tables}}


def chains(rng, edge):
    """Two requests compute the same page in one step. Later its number is used again."""
    from paging import Pages
    x, y, z = rng.sample(range(13), 3)
    pages, a, b, c = Pages(3, 1), [], [], []
    pages.allocate(a, 1)
    pages.allocate(b, 2)
    said = f"after publish([0], 0, [{x}]), publish([1, 2], 0, [{x}]), publish([1, 2], 1, [{y}])"
    with during(said):
        for table, i, token in (a, 0, x), (b, 0, x), (b, 1, y):
            pages.publish(table, i, [token])
        yield "result", f"{said}: find([{x}, {y}])", pages.find([x, y])
        pages.give_back(a)
        pages.allocate(c, 1)
        pages.publish(c, 0, [z])
    said += f", give_back([0]), the eviction of page 0, publish([0], 0, [{z}])"
    yield "result", f"{said}: find([{z}, {y}])", tried(said, pages.find, [z, y])
    for size, tokens in product((2, 3), ([], [1], [1, 2], [1, 2, 3, 4, 5, 6])):
        where = f"find({tokens}), pages of {size}, none published"
        yield "result", where, tried(where, Pages(4, size).find, tokens)


def slots(rng, edge):
    """Slots and writes alone."""
    import torch

    from cache import KV
    from generate_paged import Paged
    table = rng.sample(range(6), 3)
    for size, start in product((2, 3), range(4)):
        batch, end = SimpleNamespace(pages=SimpleNamespace(size=size)), rng.randint(start, 3 * size)
        where = f"slots({table}, {start}, {end}), pages of {size}"
        yield "result", where, list(tried(where, Paged.slots, batch, table, start, end))
    mapping = torch.tensor(rng.sample(range(8), 3))
    batch = SimpleNamespace(pool=KV(8), slot_mapping=mapping, plan=[])
    k, v = (torch.arange(1, 13).view(2, 3, 2).double() + 100 * i for i in range(2))
    where = f"write of tokens to slot_mapping {mapping.tolist()}"
    tried(where, Paged.write, batch, "layer", k, v)
    for kind, buffer in ("keys", batch.pool.k), ("values", batch.pool.v):
        yield from tensor(f"the pool's {kind} after a {where}", buffer["layer"])


def paged(rng, edge):
    from generate_paged import generate
    size = 2 if edge else rng.choice([2, 3])
    yield from stage(generate, given(*MIX[:6]) if edge else requests_of(rng), max_batch=4,
                     token_budget=5 if edge else rng.choice([5, 8]), page_size=size,
                     pages=(10 if edge else rng.choice([8, 10, 24])) * 3 // size)


def prefixes(rng, edge):
    """Prompts that begin alike, and one that has the same tokens after another beginning."""
    from generate_paged import generate
    stem = [rng.randrange(13) for _ in range(6)]
    tails = [[rng.randrange(13) for _ in range(rng.randint(1, 3))] for _ in range(5)]
    other = [(stem[0] + 1) % 13, *stem[1:4]]
    prompts = [stem + tails[0], stem[:4] + tails[1], stem[2:] + tails[2], other + tails[3],
               other + stem[4:] + tails[4]]
    yield from stage(generate, given(*[(prompt, rng.randint(2, 5), 2 * i) for i, prompt in
                                       enumerate(prompts)]),
                     max_batch=2, token_budget=6, page_size=2, pages=30)


def preempted(rng, edge):
    """Some requests are preempted by hand."""
    from paging import PagedScheduler, Pages
    queue = PagedScheduler(4, 64, Pages(40, 2))
    for request in given(*[([i] * 3, 9) for i in range(6)], block_size=24):
        queue.add(request)
    queue.schedule(0)
    for generated in range(1, 5) if edge else rng.sample(range(1, 6), 2):
        request = rng.choice(queue.running)
        request.computed, request.generated = 3, [7] * generated
        where = f"missing, with a prompt of 3, {generated} generated, 2 pages of 2"
        yield "result", where, tried(where, queue.missing, request)
        where = f"after the preemption of {request.name}"
        tried(where, queue.preempt, request)
        yield "result", f"{where}: running", names(queue.running)
        yield "result", f"{where}: waiting", names(queue.waiting)
        yield "result", f"{where}: its cache, computed and generated", [
            request.kv, request.computed, request.generated]
        yield "result", f"{where}: pages in use", sum(map(bool, queue.pages.holders))
        yield "result", f"{where}: preemptions counted", queue.counts["preemptions"]


def preemptions(rng, edge):
    """A run with too few pages."""
    from generate_paged import generate
    requests = requests_of(rng, most=5, prompt=6)
    for request in requests:
        request.max_new_tokens = rng.randint(5, 8)
    requests[-1].arrival = 30   # while it is awaited, the others must not wait
    yield from stage(generate, requests, max_batch=4, token_budget=8, page_size=2, pages=8)


# --- workloads that students hand in to expose a bug ----------------------------------------------

def handed_in(part, edge):
    """The workload in workload.json, on the stage that a part belongs to."""
    asked, logits = json.loads(Path("workload.json").read_text()), {}
    requests = given(*asked["requests"])
    if part[0] == "3":
        yield from plans(requests, **asked["knobs"])
        return
    from toolbox.toy import toy
    module, fixed = STAGES.get(part) or STAGES[part[0]]
    trace = import_module(module).generate(
        toy(), requests, **fixed, **asked["knobs"], on_token=lambda request, token, row:
        logits.setdefault(f"logits of {request.name}", []).append(row.tolist()))
    yield "result", "", {f"tokens of {r.name}": r.generated for r in requests}
    yield "counts", "", counts_of(trace)
    yield "result", "", logits


STAGES = {"1": ("generate_unbatched", {}), "2": ("generate_naive", {}),
          "2c": ("generate_dynamic", {}), "4": ("generate_interleaved", {}),
          "5": ("generate_prepacked", {}), "5c": ("generate_ragged", {"attention": "mask"}),
          "5d": ("generate_ragged", {"attention": "mask"}), "6": ("generate_paged", {})}


PROBES = {   # a function alone comes first: what it says is more exact than what a stage says
    "1a": [head, unbatched], "1b": [kv, unbatched], "1c": [unbatched],
    "2a": [naive], "2b": [append], "2c": [admitted, left],
    "3a": [shared, scheduler], "3b": [entering, scheduler],
    "3c": [advanced, released, scheduler],
    "4a": [interleaved], "4b": [interleaved], "4c": [interleaved], "4d": [completed, interleaved],
    "5a": [packing], "5b": [prepacked], "5c": [blocks, stream], "5d": [attending, stream],
    "6a": [books], "6b": [slots, paged], "6c": [books, chains, prefixes],
    "6d": [preempted, preemptions]}
