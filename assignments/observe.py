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
    crash       the exception, and the line of the student's code that raised it; or
    blank       the name of a function that is not written yet
    counts      forward passes, slots, preemptions, the steps of tokens
    contract    tokens and logits of each request, beside the same request alone

All but `result` and `counts` are sentences (checks/judge.py), and right if there are none. These
two are values, which grade.py compares with those of the reference.

The seed EDGES tries the rules at their edges, which are few enough to try them all: an exact fit,
one less, one more, nothing. The other seeds are random workloads on top of that.
"""
import copy
import json
import math
import os
import random
import sys
import time
import traceback
from collections import deque
from functools import partial
from importlib import import_module
from inspect import signature
from itertools import product
from pathlib import Path

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
TRIED = ""           # what a probe tries at the moment: "where" of what is observed
WAITING, RUNNING = ([f"{state}{i}" for i in range(8)] for state in "WR")   # names of requests


def child(folder, names, seeds, report, limit):
    """
    The child process: observes parts, ["4a", ...], of the checkout in `folder`, and appends lines
    of JSON to the file `report`; a part's last line has its CPU seconds, of which each part may use
    up to `limit`. What a student's code prints goes to a file of limited size.
    """
    global FOLDER
    FOLDER = str(folder)
    os.chdir(folder)
    sys.path.insert(0, FOLDER)
    if resource:
        resource.setrlimit(resource.RLIMIT_AS, (MEGABYTES << 20, MEGABYTES << 20))
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # One thread: a tiny model gains nothing from more, and threads that wait for each other spin
    # on cores that belong to other children.
    os.environ["OMP_NUM_THREADS"] = "1"
    if "torch" in sys.modules:   # preloaded
        sys.modules["torch"].set_num_threads(1)
    printed = os.open(f"{report}.out", os.O_WRONLY | os.O_CREAT)
    for ours, theirs in (os.open(os.devnull, os.O_RDONLY), 0), (printed, 1), (printed, 2):
        os.dup2(ours, theirs)
    sys.stdout = sys.stderr = open(1, "w", closefd=False)
    with open(report, "a", buffering=1) as lines:   # each line is written at once
        for name in names:
            started = time.process_time()
            if resource:   # SIGXCPU ends a process that uses more
                _, hard = resource.getrlimit(resource.RLIMIT_CPU)
                most = math.inf if hard == resource.RLIM_INFINITY else hard
                resource.setrlimit(
                    resource.RLIMIT_CPU, (min(math.ceil(started + limit), most), hard))
            for observation in observe(name, seeds):
                lines.write(json.dumps([name, *observation], default=lambda x: (   # np.int64(3): 3
                    x.item() if getattr(x, "ndim", 1) == 0 else repr(x))) + "\n")
            spent = time.process_time() - started
            lines.write(json.dumps([name, None, 0, "done", "", spent]) + "\n")


def observe(name, seeds):
    """All observations of one part, "4a" or "break 4a". An exception ends a probe, not the part."""
    global OURS
    if name in PROBES:
        chosen = SETS[int(name[0])]
        own = next(part.functions for part in chosen.parts if part.name == name)
        OURS = {function.split(":")[1].split(".")[-1]
                for function in {*chosen.functions, *chosen.hidden} - {*own}}
    for seed in seeds:
        for i, probe in enumerate(PROBES.get(name) or [partial(handed_in, name)]):
            alone = not signature(probe).parameters
            if alone and seed != EDGES:
                continue
            trying("")
            try:
                found = probe() if alone else probe(random.Random(f"{name} {seed}"), seed == EDGES)
                yield from ((seed, i, cause, TRIED, value) for cause, value in found)
            except Exception as error:
                if isinstance(error, NotImplementedError) and str(error).startswith("set "):
                    yield seed, i, "blank", "", [f"{str(error).split(': ')[1]} is not written yet"]
                else:
                    yield seed, i, "crash", TRIED, [say(error)]


def trying(where):
    """Says what is tried from now on."""
    global TRIED
    TRIED = where


def say(error):
    """An exception in a line, with the last line of the student's own code that it passed."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if frame.filename.startswith(FOLDER) and "toolbox" not in frame.filename
              and "checks" not in frame.filename
              and frame.name not in OURS]
    last = frames[-1] if frames else None
    place = f" (in {last.name}: {last.line})" if last and not last.line.startswith("raise") else ""
    message = str(error).strip().partition("\n")[0]
    if isinstance(error, KeyError) and message == "'xray'":
        message += ", since nothing was written under this layer"
    if isinstance(error, AttributeError) and OURS and "NoneType" not in message:
        place += "; in this part, all other functions are ours"
    return f"raises {type(error).__name__}{getattr(error, 'moment', '')}: {message:.150}{place}"


# --- workloads ------------------------------------------------------------------------------------

class Checkout:
    """The modules of the checkout, imported when they are first named: a set has few of them."""
    def __getattr__(self, name):
        return import_module(name)


code = Checkout()


def sequences(values, most):
    """All sequences of up to `most` of the values, the shortest first."""
    return [each for length in range(most + 1) for each in product(values, repeat=length)]


def requests_of(rng, most=5, prompt=14, long=False):
    """2 to `most` random requests. long: the first one's prompt has 12 tokens and is cut."""
    requests = []
    for i in range(rng.randint(2, most)):
        length = 12 if long and not i else rng.choice([1, 2, 3, rng.randint(4, prompt)])
        requests.append(code.request.Request(
            [rng.randrange(13) for _ in range(length)], rng.randint(1, 7), name="ABCDEFGH"[i],
            temperature=rng.choice([0.0, 0.0, 0.9]), seed=rng.randrange(99),
            arrival=rng.choice([0, 0, 1, 2])))
    return requests


def given(*sizes, names="ABCDEFGH", block_size=24, computed=0):
    """Requests A, B, ... from (prompt, new tokens, arrival, priority, eos_token)."""
    requests = []
    for i, (prompt, new, *rest) in enumerate(sizes):
        if not isinstance(prompt, list):
            prompt = [(7 * i + 3 * j * j + j) % 12 + 1 for j in range(prompt)]
        requests.append(code.request.Request(
            prompt, new, name=names[i], **dict(zip(("arrival", "priority", "eos_token"), rest))))
        requests[-1].block_size, requests[-1].computed = block_size, computed
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


# --- functions alone ------------------------------------------------------------------------------

def head():
    """Attention alone: first which keys it sees, then its numbers."""
    import torch
    torch.manual_seed(0)
    cases = product(((1, 0), (4, 0), (1, 5), (3, 4)), (True, False),
                    (None, "keys", "rows", "all", "nothing"))
    for i, ((T, P), split, masked) in enumerate(cases):
        S, hs, lead = P + T, (5, 1, 4)[i % 3], ((2, 3), (), (3,), (2, 1, 3))[i % 4]
        dtype = torch.float32 if i % 7 == 4 else torch.float64   # of the first, numbers differ
        shape = {"keys": (S,), "rows": (*lead[:1], *[1] * len(lead), S)[-len(lead) - 2:],
                 "all": (*lead, T, S), "nothing": (T, S)}.get(masked)
        mask = shape and torch.rand(*shape) < (-1 if masked == "nothing" else 0.7)
        split = split and P > 0
        arguments = [10 ** (i % 3) * torch.randn(*lead, n, hs).to(dtype) for n in (T, S, S)]
        before = copy.deepcopy((*arguments, mask))
        trying(
            f"Head, T = {T}, S = {S}, hs = {hs}" + (f", {P} keys in past_k" if split else "")
            + (f", a mask {shape}" + " of False" * (masked == "nothing") if masked else ""))

        def call(q, k, v):
            past = (k[..., :P, :], v[..., :P, :]) if split else (None, None)
            new = (k[..., P:, :], v[..., P:, :]) if split else (k, v)
            return code.model.Head()(q, *new, *past, mask)

        # Scores of 0 and one-hot values: the output is the weights, equal for all keys seen.
        zeros, eye = torch.zeros(*lead, S, S).double(), torch.eye(S).double().expand(*lead, S, S)
        see = torch.ones(T, S, dtype=torch.bool).tril(P)
        see = (see if mask is None else see & mask).expand(*lead, T, S).reshape(-1, T, S)
        weights = call(zeros[..., :T, :], zeros, eye).reshape(-1, T, S)
        equal = see / see.sum(-1, keepdim=True).clamp(min=1.0).double()
        yield "sees", [wrong_weights(t, see[b, t], weights[b, t])
                       for b, t in product(range(len(see)), range(T))
                       if not torch.allclose(weights[b, t], equal[b, t], atol=1e-8)][:1]
        out = call(*arguments)
        call(*map(torch.ones_like, arguments))   # it must not write into what came before
        yield "result", {
            "the output": tensor(out, dtype == torch.float64), "arguments that it has changed": [
                name for name, a, b in zip((*"qkv", "mask"), before, (*arguments, mask))
                if a is not None and not torch.equal(a, b)]}


def wrong_weights(t, see, weights):
    keys = [[j for j, w in enumerate(row.tolist()) if w] for row in (weights, see)]
    if keys[0] != keys[1]:
        return f"new token {t} sees the keys {keys[0]}, expected {keys[1]}"
    return (f"the scores of new token {t} are equal, but its weights are "
            f"{[round(w, 3) for w in weights.tolist()]}, expected equal ones with the sum 1")


def kv():
    """Writes and reads, in two caches at once; then writes that do not fit."""
    import torch
    torch.manual_seed(0)
    for lead, dtype in ((2,), torch.float64), ((), torch.float32), ((2, 3), torch.float64):
        caches = {which: code.cache.KV(7) for which in ("first", "second")}

        def write(which, layer, start, n):
            trying(f"write({layer!r}, {start}, ...) of {n} tokens into KV(7)")
            new, cache = torch.randn(2, *lead, n, 3).to(dtype), caches[which]
            before, buffers = new.clone(), (cache.k.get(layer), cache.v.get(layer))
            cache.write(layer, start, *new)
            return "result", {"its arguments are unchanged": torch.equal(before, new), "in place": [
                a is None or a is b for a, b in zip(buffers, cache.buffers(layer, *new))]}

        def read(which, layer, end, when):
            trying(f"read({layer!r}, {end}), {when}")
            keys, values = caches[which].read(layer, end)
            return "result", {"keys": tensor(keys), "values": tensor(values), "views": [
                torch.is_tensor(a) and a.data_ptr() == b.data_ptr() for a, b in zip(
                    (keys, values), caches[which].buffers(layer, keys, values))]}

        said = "after"
        for start, n in (0, 2), (2, 1), (3, 3), (6, 1):   # exactly full in the end
            for which, layer in product(caches, ("a", 0)):
                yield write(which, layer, start, n)
            said += f" write(layer, {start}, ...) of {n},"
            for which, layer in product(caches, ("a", 0)):
                yield read(which, layer, start + n, f"in the {which} of two KV(7), {said[:-1]}")
        yield write("first", "a", 1, 2)   # a chunk that is written again
        yield read("first", "a", 7, "after a second write of 2 at 1")
        yield read("first", "a", 4, "with 7 tokens written")
        for start, n, layer in (5, 3, "new"), (6, 2, "a"), (7, 1, "a"), (0, 8, "a"), (5, 3, "a"):
            try:
                write("first", layer, start, n)
                said = "is accepted"
            except Exception as error:   # perhaps PyTorch's, of tensors that do not fit
                said = f"raises {type(error).__name__}"
            yield "result", said
            yield "result", {"stored": bool(caches["first"].k.get("new", torch.zeros(1)).any())}
            yield read("first", "a", 7, f"after {TRIED}, which raises ValueError, stores nothing")


def append():
    """Each way to end, alone and together with others."""
    for prompt, new, room, at in product((1, 2, 4), (1, 2, 3), (4, 5, 9), (None, 0, 1, 2, 3)):
        ends = "no eos_token" if at is None else f"token {at} is the eos_token"
        trying(f"append, a prompt of {prompt}, max_new_tokens {new}, block_size {room}, {ends}")
        request, = given((prompt, new, 0, 0, None if at is None else 0), block_size=room)
        request.kv = "cache"
        for i in range(9):
            if not request.finished:
                request.computed = prompt + i
                request.append(0 if i == at or at is None else 5 + i)
        yield "result", {name: getattr(request, name) for name in (
            "generated", "finish_reason", "prompt", "max_new_tokens", "computed", "kv")}


def admitted():
    for arrivals, busy, step, most in product(
            ([], [0], [1], [0, 0], [0, 1], [1, 1, 2, 3], [0, 0, 0, 1, 1, 1]), range(4), range(3),
            (3, 4, 6)):
        trying(f"admit at step {step}, max_batch {most}, {busy} running, waiting with arrivals "
               f"{arrivals}")
        waiting = given(*[(1, 16, arrival) for arrival in arrivals], names=WAITING)
        running = given(*[(1, 16)] * busy, names=RUNNING)
        left, now = code.generate_dynamic.admit(waiting, running, step, most)
        yield "result", {"types": [type(each).__name__ for each in (left, now)],
                         "waiting": names(left), "running": names(now)}


def left():
    for ends in sequences(("goes on", "stop", "length", "cancelled"), 3):
        running = given(*[(1, 16)] * len(ends), names=RUNNING)
        for request, end in zip(running, ends):
            request.kv, request.finish_reason = "cache", None if end == "goes on" else end
        trying("leave, with " + (", ".join(map("{0.name} {1}".format, running, ends)) or "nobody"))
        others = code.generate_dynamic.leave(list(running))
        yield "result", {"type": type(others).__name__, "the others": names(others),
                         "kv and finish_reason": {r.name: [r.kv, r.finish_reason] for r in running}}


def running(queue, todos):
    """Lets requests run that have so many tokens to do."""
    queue.running = given(*[(6, 3)] * len(todos))
    for request, todo in zip(queue.running, todos):
        request.computed, request.kv = 6 - todo, "cache"
    for request in queue.running[1::2]:   # as after a preemption: an answer is computed again
        request.prompt, request.generated, request.max_new_tokens = [1, 1], [1] * 4, 7
    return ", ".join(f"{r.name} {r.todo}" for r in queue.running) or "nothing"


def shared():
    """Plans for requests that are already running."""
    for todos, budget in product(sequences((1, 2, 5), 3), (3, 4, 8, 20)):
        queue = code.scheduler.Scheduler(9, budget)
        trying(f"plan for token_budget {budget}, to do: {running(queue, todos)}")
        plan = queue.share_budget()
        yield "result", " ".join(f"{r.name}{n}" for r, n in plan) or "nothing"
        trying(f"{TRIED}: running, with todo")
        yield "result", [f"{r.name} {r.todo}" for r in queue.running]


def entering():
    """Admission at the edges of its four conditions."""
    queues = (), ((21, 9),), ((2, 1), (1, 1), (1, 1)), ((5, 2), (1, 1)), ((2, 3, 1), (1, 1, 2))
    for todos, sizes, most, budget, room in product(
            ((), (1,), (2,), (3,), (4,), (1, 2)), queues, (1, 2, 4), (3, 4), (None, 9, 10, 17, 24)):
        if len(todos) > most:
            continue
        queue = code.scheduler.Scheduler(most, budget, room)
        words = running(queue, todos)
        queue.waiting = deque(given(*sizes, names=WAITING))
        for request in queue.waiting:
            trying(f"grant_room({request.name}), max_kv_tokens {room}, kv_tokens "
                   f"{request.kv_tokens}, running: {[r.kv_tokens for r in queue.running]}")
            yield "result", bool(queue.grant_room(request))
        trying(f"admit at step 1, max_batch {most}, token_budget {budget}, max_kv_tokens {room}, "
               f"to do: {words}, waiting: " + (", ".join(
                   f"{r.name} (todo {r.todo}, kv_tokens {r.kv_tokens}, arrival {r.arrival})"
                   for r in queue.waiting) or "nothing"))
        queue.admit(1)
        yield "result", {"then running": names(queue.running), "then waiting": names(queue.waiting)}


def plans_of_rows():
    """Complete requests, partial prompts, requests that compute nothing; and the new tokens."""
    for rows in sequences(((1, 1), (1, 0), (3, 1), (3, 3), (3, 0)), 3):   # (todo, n)
        plan = list(zip(given((4, 2), (4, 1), (4, 2)), (n for _, n in rows)))
        for i, ((request, _), (todo, _)) in enumerate(zip(plan, rows)):
            request.computed, request.block_size = 4 - todo, (4, 24)[i % 2]
            if i == 1:   # as after a preemption
                request.prompt, request.generated, request.max_new_tokens = [1], [1] * 3, 4
        words = ", ".join(f"{r.name}: {n} of {r.todo} tokens to do" for r, n in plan) or "[]"
        yield plan, words, [10 + i for i in range(sum(todo == n for todo, n in rows))]


def advanced():
    for plan, words, tokens in plans_of_rows():
        trying(f"advance, with the plan {words}")
        code.request.advance(plan, tokens)
        yield "result", {
            "its arguments afterwards": [[n for _, n in plan], tokens],
            "then the new tokens": {r.name: r.generated for r, _ in plan},
            "then computed": {r.name: r.computed for r, _ in plan},
            "then finish_reason": {r.name: r.finish_reason for r, _ in plan}}


def completed():
    for plan, words, _ in plans_of_rows():
        trying(f"indices_due, with the plan {words}")
        yield "counts", {"it returns": code.request.indices_due(plan),
                         "the plan's n afterwards": [n for _, n in plan]}


def released():
    for ends in sequences((None, "length", "cancelled"), 4):
        queue, freed = code.scheduler.Scheduler(9, 9), []
        running(queue, (1,) * len(ends))
        queue.waiting.extend(given((1, 1)))
        for request, end in zip(queue.running, ends):
            request.finish_reason = end
        trying(f"release, running: {', '.join(names(queue.running)) or 'nothing'}, finished: "
               + (", ".join(names(r for r in queue.running if r.finished)) or "none"))
        queue.free = lambda request, freed=freed: freed.append(f"{request.name}, {request.kv}")
        queue.release()
        yield "result", {
            "then running": names(queue.running), "then waiting": len(queue.waiting),
            "free was called for": sorted(freed)}


def layouts(module, kind, passes=2):
    """
    A probe of what a run does not show: columns, a mask that shows the future, an answer that is
    computed again, what is left in the caches. The lengths tell first-fit decreasing from others.
    """
    def probe():
        import torch
        torch.manual_seed(0)
        layout = getattr(getattr(code, module), kind)
        requests = given(*[(n, 13) for n in (2, 11, 4, 5, 8, 1)])
        for step in range(passes):
            plan = [(request, request.todo) for request in requests]
            trying(f"{kind}, pass {step}, new tokens " + " ".join(f"{r.name}{n}" for r, n in plan))
            for batch in [layout(plan)] if kind != "Alone" else [
                    layout(request, True) for request in requests]:
                *rows, T = batch.tokens.shape
                batch.attend("random", *torch.randn(3, *rows, 2, T, 3).double())
                yield "result", {"tokens": batch.tokens.tolist(),
                                 "positions": batch.positions.tolist()}
                if kind == "Flat":
                    yield "result", {"block_diagonal": tensor(batch.block_diagonal())}
            for i, (request, n) in enumerate(plan):
                yield "result", {f"the cache of {request.name}": {
                    name: tensor(getattr(request.kv, name).get("random")) for name in "kv"}}
                request.computed, request.generated = n, [*range(i + 1)]
    return probe


def attending():
    """`attend` alone, with random queries, keys and values; the scores that `head` computes."""
    import torch
    torch.manual_seed(0)
    calls, head = [], code.generate_ragged.head

    def counting(q, k, v, *arguments, **named):
        calls.append(q.size(-2) * k.size(-2))
        return head(q, k, v, *arguments, **named)

    for attention in "varlen", "mask":
        requests = given((4, 1), (3, 1), (6, 1), computed=2)
        batch = code.generate_ragged.Flat([(r, r.todo) for r in requests], None, attention)
        twin = copy.deepcopy(batch)   # it alone has the caches: write and read are the way to them
        batch.write, batch.read = twin.write, twin.read
        for request in requests:
            request.kv = None
        q, k, v = torch.randn(3, 2, batch.cu_seqlens[-1], 3).double()
        trying(f"attend, {attention!r}, random q, k, v, cu_seqlens {batch.cu_seqlens}")
        calls.clear()
        code.generate_ragged.head = counting
        try:
            out = batch.attend("random", q, k, v)
        finally:
            code.generate_ragged.head = head
        yield "result", {"the output": tensor(out),
                         "score entries that `head` computes": sum(calls)}


def chains():
    """Two requests compute the same page in one step. Later its number is used again."""
    Pages = code.paging.Pages
    pages, a, b, c = Pages(3, 1), [], [], []
    pages.allocate(a, 1)
    pages.allocate(b, 2)
    said = "after publish([0], 0, [5]), publish([1, 2], 0, [5]), publish([1, 2], 1, [8])"
    trying(f"{said}: find([5, 8])")
    for table, i, token in (a, 0, 5), (b, 0, 5), (b, 1, 8):
        pages.publish(table, i, [token])
    yield "result", pages.find([5, 8])
    trying(f"{said}, give_back([0]), the eviction of page 0, publish([0], 0, [3]): find([3, 8])")
    pages.give_back(a)
    pages.allocate(c, 1)
    pages.publish(c, 0, [3])
    yield "result", pages.find([3, 8])
    for size, tokens in product((2, 3), ([], [1], [1, 2], [1, 2, 3, 4, 5, 6])):
        trying(f"find({tokens}), pages of {size}, none published")
        yield "result", Pages(4, size).find(tokens)


def pool():
    """`slots` and `write` alone, with no requests."""
    import torch
    torch.manual_seed(0)
    batch = object.__new__(code.generate_paged.Paged)
    for size, start, new in product((2, 3, 16), range(4), range(3)):
        trying(f"slots([4, 0, 1], {start + new}), pages of {size}")
        batch.pages = code.paging.Pages(5, size)
        yield "result", tensor(batch.slots([4, 0, 1], start + new))
    batch.plan, batch.pool, batch.pages = [], code.cache.KV(10), code.paging.Pages(5, 2)
    for slots in [3, 8, 2], [9], [8, 0]:
        batch.slot_mapping, new = torch.tensor(slots), torch.randn(2, 2, len(slots), 3).double()
        trying(f"write, slot_mapping {slots}")
        buffers = batch.pool.buffers("a", *new)
        batch.write("a", *new)
        yield "result", dict(zip(("keys", "values"), map(tensor, buffers)))   # these, in place


def preempted():
    """Some requests are preempted by hand."""
    queue = code.paging.PagedScheduler(4, 64, code.paging.Pages(40, 2))
    for request in given(*[([i] * 3, 9) for i in range(6)]):
        queue.add(request)
    queue.schedule(0)
    for generated, which in (1, 1), (2, 2), (3, 0), (4, 0):
        request = queue.running[which]
        request.computed, request.generated = 3, [7] * generated
        trying(f"after the preemption of {request.name}")
        queue.preempt(request)
        yield "result", {
            "running": names(queue.running), "waiting": names(queue.waiting),
            "its cache, computed, generated and arrival": [
                request.block_table, request.computed, request.generated, request.arrival],
            "pages in use": sum(map(bool, queue.pages.holders)),
            "preemptions counted": queue.counts["preemptions"]}


# --- functions alone, with random cases -----------------------------------------------------------

# Each tells first-fit decreasing from another rule: without sorting, without an exact fit, best fit
# (1, 3, 3, 5), last fit and next fit (1, 2, 3)
LENGTHS = (([], 5), ([5], 5), ([1, 1, 3, 2, 2], 5), ([2, 3, 6], 8), ([1, 3, 3, 5], 7),
           ([1, 2, 3], 4), ([2, 6, 3, 5, 1, 4], 7), ([4, 4, 4, 4], 8))


def packing(rng, edge):
    sizes = [(n, rng.randint(5, 20)) for n in (1, 3, 5, 7, 9, 9)]
    for lengths, size in LENGTHS if edge else [
            ([rng.randint(1, size) for _ in range(n)], size) for n, size in sizes]:
        trying(f"first_fit_decreasing({lengths}, {size})")
        argument = list(lengths)
        rows = code.generate_prepacked.first_fit_decreasing(argument, size)
        yield "result", {
            "its argument afterwards": argument,
            "all indices": sorted(i for row in rows for i in row),
            "lengths in rows": [[lengths[i] for i in row] for row in rows]}


def books(rng, edge):
    """Random operations on the books of a pool, and what they hold afterwards."""
    for _ in range(6 if edge else 1):
        pages, tables, said = code.paging.Pages(8, 2), [], deque(maxlen=3)
        for _ in range(40 if edge else 14):
            if tables and (rng.random() < 0.45 or len(pages.free) < 3):
                table, tokens = tables.pop(rng.randrange(len(tables)))
                said.append(f"give_back({table})")
                trying("after " + "; ".join(said))
                pages.give_back(list(table))
            else:
                tokens = [rng.randrange(2) for _ in range(6)]
                shared, table = pages.find(tokens[:-1]), []
                known, revived = len(shared), sum(page in pages.free for page in shared)
                if 3 - known > len(pages.free) - revived:
                    continue
                said.append(f"hold([], {shared})")
                trying("after " + "; ".join(said))
                pages.hold(table, argument := list(shared))
                yield "result", {"the argument of hold afterwards": argument, "table": list(table)}
                pages.allocate(table, 3 - known)
                for i in range(known, 3):
                    pages.publish(table, i, tokens[2 * i:2 * i + 2])
                tables.append((table, tokens))
                said[-1] += f", then {table} is the block table of {tokens}"
            trying("after " + "; ".join(said))
            yield "result", {
                "holders": list(pages.holders), "free, in order": list(pages.free),
                "published": sorted(pages.published.values()), "in key_of": sorted(pages.key_of),
                "evicted_pages": pages.counts["evicted_pages"],
                **{f"find({tokens})": pages.find(tokens) for _, tokens in tables}}


# --- whole stages ---------------------------------------------------------------------------------

def stage(module, requests, **knobs):
    """Runs a stage on a small model, and yields all that can be seen of it."""
    from checks.judge import CAUSES, faults
    from checks.toy import toy
    trying(describe(requests, **knobs))
    traces, found = [], {}

    def run(*arguments, **named):
        traces.append(getattr(code, module).generate(*arguments, **named))

    try:
        for cause, sentence in faults(run, toy(), requests, **knobs):
            found.setdefault(cause, [sentence])
    finally:   # what was seen before a crash says more than the crash
        yield from ((cause, found.get(cause, [])) for cause in CAUSES)
    entries = sum(p.score_entries for p in traces[0].passes)
    yield "counts", {**counts_of(traces[0]), "score entries": entries}


def counts_of(trace):
    return {"forward passes": len(trace.passes), "slots": sum(p.slots for p in trace.passes),
            **{name: trace.counts[name] for name in sorted(trace.counts)},
            **{f"steps of {r.name}": r.token_steps for r in trace.requests}}


def runs(module, edges, drawn, *ways):
    """
    A probe: runs of a stage.

    edges: [(sizes for `given`, knobs), ...], tried at the edges
    drawn: makes (requests, knobs) from a random number generator, for the other seeds
    ways:  further knobs: all of that is tried with each
    """
    def probe(rng, edge):
        for way in ways or [{}]:
            for requests, knobs in edges if edge else [drawn(rng)]:
                requests = given(*requests) if edge else requests
                yield from stage(module, requests, **knobs, **way)
    return probe


# Prompts of one token and of equal length, a late one, a long one that is cut, the context limit
MIX = (1, 4), (5, 1), (1, 3), (12, 3), (5, 4), (3, 2, 2), (21, 6, 3)
LATE = (2, 3), (2, 3), (9, 2, 1)

unbatched = runs(
    "generate_unbatched", [(((1, 3), (4, 1), (21, 6), (3, 5)), {})],
    lambda rng: (requests_of(rng, most=3), {}), {"use_cache": True}, {"use_cache": False})
naive = runs(   # in the last of the edges, a finished row goes on beyond the last position
    "generate_naive",
    [(MIX[:6], {"max_batch": 3}), (((2, 1), (2, 2)), {}), (((20, 2), (2, 20)), {})],
    lambda rng: (requests_of(rng), {"max_batch": rng.choice([2, 3, 4])}))
interleaved = runs(
    "generate_interleaved", [(MIX, {"max_batch": 4, "token_budget": 5}), (LATE, {})],
    lambda rng: (requests_of(rng, long=rng.random() < 0.5),
                 {"max_batch": 4, "token_budget": rng.choice([4, 6, 9])}))
prepacked = runs(
    "generate_prepacked",
    [(MIX[:6], {"max_batch": 6}), (((2, 2), (5, 2), (3, 3), (1, 2)), {})],
    lambda rng: (requests_of(rng, most=7), {"max_batch": 6}))
stream = runs(
    "generate_ragged", [(MIX, {"token_budget": 5}), (LATE, {})],
    lambda rng: (requests_of(rng, long=True), {"token_budget": rng.choice([4, 6, 9])}),
    {"attention": "mask"}, {"attention": "varlen"})
paged = runs(
    "generate_paged", [(MIX[:6], {"token_budget": 5, "page_size": 2, "pages": 15})],
    lambda rng: (requests_of(rng), {"token_budget": rng.choice([5, 8]), **rng.choice([
        {"page_size": 2, "pages": 12}, {"page_size": 3, "pages": 10}])}), {"max_batch": 4})


def prefixes(rng, edge):
    """Prompts that begin alike, and one that has the same tokens after another beginning."""
    stem = [rng.randrange(13) for _ in range(6)]
    tails = [[rng.randrange(13) for _ in range(rng.randint(1, 3))] for _ in range(5)]
    other = [(stem[0] + 1) % 13, *stem[1:4]]
    prompts = [stem + tails[0], stem[:4] + tails[1], stem[2:] + tails[2], other + tails[3],
               other + stem[4:] + tails[4]]
    requests = given(*[(prompt, rng.randint(2, 5), 2 * i) for i, prompt in enumerate(prompts)])
    yield from stage("generate_paged", requests, max_batch=2, token_budget=6, page_size=2, pages=30)


def preemptions(rng, edge):
    """A run with too few pages."""
    requests = requests_of(rng, most=5, prompt=6)
    for request in requests:
        request.max_new_tokens = rng.randint(5, 8)
    requests[-1].arrival = 30   # while it is awaited, the others must not wait
    yield from stage("generate_paged", requests, max_batch=4, token_budget=8, page_size=2, pages=8)


def plans(requests, token_budget=64, max_batch=8, max_kv_tokens=None):
    """Plans, step by step, with no model: every sampled token is 0."""
    requests = sorted(requests, key=lambda request: request.arrival)
    trying(describe(requests, token_budget=token_budget, max_batch=max_batch,
                    max_kv_tokens=max_kv_tokens))
    queue, step, made = code.scheduler.Scheduler(max_batch, token_budget, max_kv_tokens), 0, []
    for request in requests:
        request.block_size = 24
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
    yield "result", made
    yield "result", {
        **{f"tokens of {r.name}": len(r.generated) for r in requests},
        **{f"cache of {r.name} after its end": r.kv for r in requests}}


def scheduler(rng, edge):
    """Whole runs: many requests, with and without room for all."""
    if edge:
        yield from plans(given(*MIX), token_budget=5, max_batch=3)
        yield from plans(given((3, 2), (8, 3), (4, 4), (1, 2)), 6, 3, 16)   # the handout's
        yield from plans(given((1, 3), (1, 1), (1, 1), (2, 2)), 2, 4, 5)
        return
    for prompt, room in (14, None), (6, rng.choice([13, 16, 20])):
        yield from plans(requests_of(rng, most=8, prompt=prompt),
                         rng.choice([3, 5, 8]), rng.choice([2, 3, 5]), room)


# --- workloads that students hand in to expose a bug ----------------------------------------------

def handed_in(name, rng, edge):
    """"break 4a": the workload in workload.json, on the part's stage. "policy": an open task."""
    part = name.split()[-1]
    if part == name:
        yield "result", code.leaderboard.play(name, rng)
        return
    asked, logits = json.loads(Path("workload.json").read_text()), {}
    requests = given(*asked["requests"])
    if part[0] == "3":
        yield from plans(requests, **asked["knobs"])
        return
    from checks.toy import toy
    module, fixed = stage_of(part)
    trace = getattr(code, module).generate(
        toy(), requests, **fixed, **asked["knobs"], on_token=lambda request, token, row:
        logits.setdefault(f"logits of {request.name}", []).append(row.tolist()))
    yield "result", {f"tokens of {r.name}": r.generated for r in requests}
    yield "counts", counts_of(trace)
    yield "result", logits


STAGES = {"1": "generate_unbatched", "2": "generate_naive", "2c": "generate_dynamic",
          "3": "scheduler", "4": "generate_interleaved", "5": "generate_prepacked",
          "5c": "generate_ragged", "5d": "generate_ragged", "6": "generate_paged"}


def stage_of(part):
    """What runs the workloads for bugs in a part: (module, fixed knobs)."""
    module = STAGES.get(part) or STAGES[part[0]]
    return module, {"attention": "mask"} if module == "generate_ragged" else {}


# Functions alone, which have no parameters and are tried at their edges; and what gets random
# workloads as well. Those that say more exactly what is wrong come first.
rectangle = layouts("generate_dynamic", "Rectangle")
PROBES = {
    "1a": [head, unbatched], "1b": [kv, unbatched],
    "1c": [unbatched, layouts("generate_unbatched", "Alone")],
    "2a": [naive], "2b": [append], "2c": [admitted, left],
    "3a": [shared, scheduler], "3b": [entering, scheduler], "3c": [advanced, released, scheduler],
    "4a": [interleaved, rectangle], "4b": [interleaved], "4c": [interleaved, rectangle],
    "4d": [completed, interleaved], "5a": [packing],
    "5b": [prepacked, layouts("generate_prepacked", "Packed", 1)],
    "5c": [stream, layouts("generate_ragged", "Flat")], "5d": [attending, stream],
    "6a": [books], "6b": [pool, paged], "6c": [chains, books, prefixes],
    "6d": [preempted, preemptions]}
