"""
Runs a student's functions and reports what it sees. It judges nothing: grade.py does, in another
process that never runs a student's code.

`observe(part, seeds)` yields (seed, cause, where, value). The causes, in the order in which
grade.py looks at them:

    crash       the exception, and the line of the student's code that raised it
    tokens      which tokens are in which slots
    positions   at which positions they are computed
    sees        which keys each token sees, by X-ray
    sampled     which requests get a token, and from which logits
    cache       the keys and values that are kept
    counts      forward passes and slots
    result      what a function returns; tokens and logits of each request

The first five are sentences, and right if there are none. The others are values, which grade.py
compares with those of the reference.
"""
import json
import math
import os
import random
import sys
import time
import traceback
from collections import Counter
from heapq import heappop
from pathlib import Path

try:
    import resource
except ImportError:   # Windows: grade.py's backstop is the only limit
    resource = None

STEPS = 300          # a scheduler that takes more counts as hanging
MEGABYTES = 6000     # of a child's memory
FOLDER = ""          # of the child's checkout


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
                lines.write(json.dumps([name, *observation]) + "\n")
                lines.flush()
            spent = time.process_time() - started
            lines.write(json.dumps([name, None, "done", "", spent]) + "\n")
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
    """All observations of one part: (seed, cause, where, value). An exception ends a seed."""
    for seed in seeds:
        try:
            probe = (handed_in(name.split()[1]) if name.startswith("break ") else
                     PROBES[name](random.Random(f"{name} {seed}")))
            yield from ((seed, *found) for found in probe)
        except Exception as error:
            yield seed, "crash", getattr(error, "workload", ""), [say(error)]


def say(error):
    """An exception in a line, with the last line of the checkout's own code that it passed."""
    if isinstance(error, NotImplementedError) and str(error).startswith("set "):
        return f"is not written yet ({error})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if frame.filename.startswith(FOLDER) and "toolbox" not in frame.filename]
    last = frames[-1] if frames else None
    place = f" (in {last.name}: {last.line})" if last and not last.line.startswith("raise") else ""
    message = str(error).strip().splitlines()[0] if str(error).strip() else ""
    if isinstance(error, KeyError) and message == "'xray'":
        message += ", since nothing was written under this layer"
    return f"raises {type(error).__name__}: {message:.150}{place}"


# --- workloads ------------------------------------------------------------------------------------

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


def describe(requests, **knobs):
    """A workload in words; 5+3 tokens are a prompt of 5, and 3 to generate."""
    words = [f"{r.name} = {len(r.prompt)}+{r.max_new_tokens} tokens"
             + (f" at step {r.arrival}" if r.arrival else "") for r in requests]
    return "Workload: " + ", ".join(words + [f"{name} {value}" for name, value in knobs.items()
                                             if value is not None])


# --- a stage, looked at from all sides ------------------------------------------------------------

def stage(generate, requests, **knobs):
    """Runs a stage on a small model and yields all that can be seen of it."""
    from toolbox.toy import toy
    from toolbox.xray import XRay
    model, where, records, logits = toy(), describe(requests, **knobs), [], {}
    caches, handles = {}, []
    try:
        with XRay(model, requests) as xray:
            handles = [model.register_forward_pre_hook(lambda _, a: records.append(record(*a))),
                       model.register_forward_hook(lambda _, a, out: keep(caches, a[2].__self__))]
            generate(model, requests, **knobs, on_token=lambda request, token, row:
                     logits.setdefault(request.name, []).append(row.tolist()))
    except Exception as error:
        error.workload = where
        raise
    finally:
        for handle in handles:
            handle.remove()
    faults = xray.faults()
    yield "tokens", where, [*wrong_tokens(records, xray)]
    yield "positions", where, [fault for fault in faults if "as if at position" in fault]
    yield "sees", where, [fault for fault in faults if "as if at position" not in fault]
    yield "sampled", where, [*wrong_samples(records, xray)]
    yield "cache", where, caches
    yield "counts", where, {"forward passes": len(records),
                            "slots": sum(len(r["tokens"]) for r in records)}
    yield "result", where, {"tokens of " + r.name: r.generated for r in requests}
    yield "result", where, {"logits of " + name: rows for name, rows in logits.items()}


def record(tokens, positions, attend, rows):
    """What goes into a forward pass, as plain lists."""
    import torch
    batch = attend.__self__
    slots = torch.arange(tokens.numel()).view(tokens.shape)[rows]
    return {"tokens": tokens.flatten().tolist(), "shape": tuple(tokens.shape),
            "plan": [(request, start, n, request.todo)
                     for (request, n), start in zip(batch.plan, batch.starts)],
            "sampled": list(batch.sampled), "rows": slots.flatten().tolist()}


def wrong_tokens(records, xray):
    for number, (seen, sight) in enumerate(zip(records, xray.passes)):
        expected = Counter((request, position) for request, start, n, _ in seen["plan"]
                           for position in range(start, start + n))
        owners = [xray.token_of[id] for id in sight.ids.flatten().tolist()]
        found = Counter(owner for owner in owners if owner)
        for request, position in expected - found:
            yield f"pass {number}: no slot holds position {position} of {request}."
        for request, position in found - expected:
            yield f"pass {number}: a slot too many holds position {position} of {request}."
        for slot, (owner, token) in enumerate(zip(owners, seen["tokens"])):
            if owner and token != owner[0].tokens[owner[1]]:
                yield (f"pass {number}, {xray.place(sight, slot)} holds token {token}; position "
                       f"{owner[1]} of {owner[0]} is token {owner[0].tokens[owner[1]]}.")


def wrong_samples(records, xray):
    for number, (seen, sight) in enumerate(zip(records, xray.passes)):
        due = {request: start + n - 1 for request, start, n, todo in seen["plan"] if n == todo > 0}
        works = {request for request, _, n, _ in seen["plan"] if n}
        for request in seen["sampled"]:
            if request not in due:
                does = "its prompt is not complete" if request in works else "it computes nothing"
                yield f"pass {number} gives {request} a token, but {does}."
        for request in due:
            if request not in seen["sampled"]:
                yield f"pass {number} gives {request} no token, although its prompt is complete."
        if len(seen["rows"]) != len(seen["sampled"]):
            yield (f"pass {number} reads {len(seen['rows'])} rows of logits for "
                   f"{len(seen['sampled'])} requests.")
        ids = sight.ids.flatten().tolist()
        for request, slot in zip(seen["sampled"], seen["rows"]):
            if request in due and xray.token_of[ids[slot]] != (request, due[request]):
                yield (f"pass {number} reads the logits of {xray.place(sight, slot)} for "
                       f"{request}; its last token is elsewhere.")


def keep(caches, batch):
    """Sums of the cached keys and values of each position, in the last layer."""
    for (request, n), start in zip(batch.plan, batch.starts):
        table, pool = request.kv, getattr(batch, "pool", None)
        if isinstance(table, list):   # stage 7: slots of the pool
            size = batch.pages.size
            slots = [table[p // size] * size + p % size for p in range(start + n)]
            k, v = pool.k[2][:, slots], pool.v[2][:, slots]
        elif getattr(table, "k", None):
            k, v = table.k[2], table.v[2]
            if k.dim() != 3:
                continue
            k, v = k[:, :start + n], v[:, :start + n]
        else:
            continue
        caches["keys of " + request.name] = k.sum(dim=(0, 2)).tolist()
        caches["values of " + request.name] = (v * v).sum(dim=(0, 2)).tolist()


# --- set 1 ----------------------------------------------------------------------------------------

def head(rng):
    import torch

    from model import Head
    g = torch.Generator().manual_seed(rng.randrange(10**6))
    cases = [(T, P, given, mask) for T, P in ((1, 0), (4, 0), (1, 5), (3, 4))
             for given in ("past_k", "k") for mask in (None, "a mask", "a mask of nothing")]
    for T, P, given, masked in rng.sample(cases, 8):
        q, k, v = (torch.randn(2, 3, n, 5, generator=g, dtype=torch.float64)
                   for n in (T, P + T, P + T))
        mask = None
        if masked:
            mask = torch.rand(2, 1, 1, P + T, generator=g) < (0.7 if masked == "a mask" else -1)
        past = (k[..., :P, :], v[..., :P, :]) if given == "past_k" and P else (None, None)
        new = (k[..., P:, :], v[..., P:, :]) if past[0] is not None else (k, v)
        out, all_k, all_v = Head()(q, *new, *past, mask)
        where = f"Head with T = {T}, S = {P + T}, {masked or 'no mask'}"
        where += f", {P} keys in past_k" if past[0] is not None else ""
        yield "result", f"output of {where}", out.tolist()
        yield "result", f"keys that {where} returns", all_k.tolist()
        yield "result", f"values that {where} returns", all_v.tolist()
    yield from unbatched(rng)


def kv(rng):
    import torch

    from cache import KV
    g = torch.Generator().manual_seed(rng.randrange(10**6))
    cache, end = KV(7), 0
    while end < 7:
        n = rng.randint(1, min(3, 7 - end))
        for layer in "a", "b":
            cache.write(layer, end, *(torch.randn(2, n, 3, generator=g, dtype=torch.float64)
                                      for _ in "kv"))
        end += n
        for layer in "a", "b":
            k, v = cache.read(layer, end)
            yield "result", f"KV.read({layer!r}, {end}), keys", k.tolist()
            yield "result", f"KV.read({layer!r}, {end}), values", v.tolist()
    again = torch.ones(2, 2, 3, dtype=torch.float64)
    cache.write("a", 1, again, again)   # a chunk that is written again
    yield "result", "keys after a second write at 1", cache.read("a", 7)[0].tolist()
    yield "result", "KV.read('a', 4), shape", list(cache.read("a", 4)[0].shape)
    try:
        cache.write("a", 6, again, again)
        yield "result", "KV(7).write of 2 tokens at 6", "is accepted"
    except ValueError:
        yield "result", "KV(7).write of 2 tokens at 6", "raises ValueError"
    yield from unbatched(rng)


def unbatched(rng):
    from generate_unbatched import generate
    yield from stage(generate, requests_of(rng, most=3))


# --- set 2 ----------------------------------------------------------------------------------------

def naive(rng):
    from generate_naive import generate
    from request import Request
    yield from stage(generate, requests_of(rng), max_batch=rng.choice([2, 3, 4]))
    # A finished row goes on beyond the last position.
    lengths = (rng.randint(18, 21), 2), (rng.randint(1, 3), 20)
    yield from stage(generate, [Request([rng.randrange(13) for _ in range(n)], new, name=name)
                                for name, (n, new) in zip("AB", lengths)])


def append(rng):
    from request import Request
    for _ in range(6):
        prompt, new, room = rng.randint(1, 9), rng.randint(1, 6), rng.randint(9, 12)
        request = Request([1] * prompt, new, eos_token=rng.choice([None, 3]), name="A")
        request.block_size = room
        for token in rng.choices([2, 2, 3, 4], k=12):
            if not request.finished:
                request.computed = prompt + len(request.generated)
                request.append(token)
        yield ("result", f"a prompt of {prompt}, max_new_tokens {new}, block_size {room}, "
               f"eos_token {request.eos_token}",
               [len(request.generated), request.finish_reason])


def dynamic(rng):
    from generate_dynamic import admit, leave
    from request import Request
    for _ in range(4):
        waiting = [Request([1], name=f"r{i}", arrival=arrival) for i, arrival in
                   enumerate(sorted(rng.randrange(4) for _ in range(rng.randint(0, 6))))]
        running = [Request([1], name=f"R{i}") for i in range(rng.randint(0, 3))]
        step, most = rng.randrange(4), rng.randint(3, 6)
        left, now = admit(list(waiting), list(running), step, most)
        where = (f"admit at step {step}, max_batch {most}, {len(running)} running, waiting with "
                 f"arrivals {[r.arrival for r in waiting]}")
        yield "result", f"{where}: waiting", [r.name for r in left]
        yield "result", f"{where}: running", [r.name for r in now]
        ends = {request: rng.choice(["", "", "stop", "cancelled"]) for request in running}
        for request in running:
            request.kv = "cache"
            if ends[request] == "stop":
                request.finish_reason = "stop"
            elif ends[request]:
                request.cancel()
        words = [f"{request.name} {end}" for request, end in ends.items() if end]
        stays = leave(list(running))
        where = f"leave, {len(running)} running, of which {words} end"
        yield "result", f"{where}: the others", [r.name for r in stays]
        yield "result", f"{where}: those with a cache", [
            r.name for r in running if r.kv is not None]
        yield "result", f"{where}: finish_reason", {r.name: r.finish_reason for r in running}


# --- set 3 ----------------------------------------------------------------------------------------

def scheduler(rng, prompt=14, most=7, room=None):
    """The plans of a random workload."""
    requests = requests_of(rng, most=most, sampled=False, prompt=prompt)
    yield from plans(requests, token_budget=rng.choice([3, 5, 8]), max_batch=rng.choice([2, 3, 5]),
                     max_kv_tokens=room)


def plans(requests, token_budget=64, max_batch=8, max_kv_tokens=None):
    """Plans, step by step, with no model: every sampled token is 0."""
    from scheduler import Scheduler
    requests = sorted(requests, key=lambda request: request.arrival)
    for request in requests:
        request.block_size = 24
    where = describe(requests, token_budget=token_budget, max_batch=max_batch,
                     max_kv_tokens=max_kv_tokens)
    queue, step = Scheduler(max_batch, token_budget, max_kv_tokens), 0
    for request in requests:
        queue.add(request)
    made = {}
    try:
        while queue.busy and len(made) < STEPS:
            step = queue.next_step(step)
            plan = queue.schedule(step)
            made[f"plan of step {step}"] = " ".join(f"{r.name}{n}" for r, n in plan)
            for request, _ in plan:
                request.kv = request.kv or "cache"
            queue.update(plan, [0] * sum(n == r.todo for r, n in plan))
            step += 1
    except Exception as error:
        error.workload = where
        raise
    yield "result", where, made
    yield "result", where, {f"tokens of {r.name}": len(r.generated) for r in requests}
    yield "cache", where, {f"cache of {r.name} after its end": r.kv for r in requests}


def shared(rng):
    """Plans for requests that are already running, in any order; then whole runs."""
    from request import Request
    from scheduler import Scheduler
    for _ in range(4):
        queue = Scheduler(9, rng.choice([3, 5, 8]))
        for i in range(rng.randint(2, 5)):
            request = Request([1] * 6, name="ABCDE"[i])
            request.computed = 6 - rng.choice([1, 1, 2, 4, 6])
            queue.running.append(request)
        words = ", ".join(f"{r.name} {r.todo}" for r in queue.running)
        if sum(r.todo == 1 for r in queue.running) <= queue.token_budget:
            yield ("result", f"plan for token_budget {queue.token_budget}, to do: {words}",
                   " ".join(f"{r.name}{n}" for r, n in queue.share_budget()))
    yield from scheduler(rng)


def crowded(rng):
    """Many requests, and room for few."""
    yield from scheduler(rng, prompt=6, most=8, room=rng.choice([13, 16, 20]))
    yield from scheduler(rng, most=8)


def after_a_step(rng):
    """Plans in which the requests that get a token come last, too."""
    from request import Request, advance
    for _ in range(4):
        plan = []
        for i in range(rng.randint(2, 4)):
            request = Request([1] * rng.randint(2, 5), 9, name="ABCD"[i])
            request.block_size = 24
            request.computed = rng.randrange(len(request.prompt))
            plan.append((request, rng.choice([1, request.todo])))
        where = "advance, with the plan " + ", ".join(
            f"{request.name}: {n} of {request.todo} tokens to do" for request, n in plan)
        due = [request for request, n in plan if n == request.todo]
        advance(plan, [10 + i for i in range(len(due))])
        yield "result", f"{where}; then the new tokens", {r.name: r.generated for r, _ in plan}
        yield "result", f"{where}; then computed", {r.name: r.computed for r, _ in plan}
    yield from scheduler(rng)


# --- sets 4 and 5 ---------------------------------------------------------------------------------

def interleaved(rng):
    from generate_interleaved import generate
    yield from stage(generate, requests_of(rng, long=rng.random() < 0.5), max_batch=4,
                     token_budget=rng.choice([4, 6, 9]))


def completed(rng):
    """Plans that also hold requests which compute nothing, then the whole stage."""
    from request import Request, complete
    for _ in range(4):
        plan = []
        for i in range(rng.randint(1, 4)):
            request = Request([1] * rng.randint(1, 4), name="ABCD"[i])
            request.computed = rng.randrange(len(request.prompt))
            plan.append((request, rng.randint(0, request.todo)))
        due = [i for i, (request, n) in enumerate(plan) if n == request.todo]
        found = list(complete(list(plan)))
        words = ", ".join(f"{r.name}: {n} of {r.todo} to do" for r, n in plan)
        yield "sampled", f"complete, with the plan {words}", (
            [] if found == due else [f"it returns {found}, expected {due}"])
    yield from interleaved(rng)


def packing(rng):
    from generate_prepacked import first_fit_decreasing
    yield "result", "first_fit_decreasing([], 5)", first_fit_decreasing([], 5)
    for _ in range(6):
        size = rng.randint(5, 20)
        lengths = [rng.randint(1, size) for _ in range(rng.randint(1, 9))]
        given = list(lengths)
        rows = first_fit_decreasing(given, size)
        yield "result", f"first_fit_decreasing({lengths}, {size}) leaves its argument", given
        yield ("result", f"first_fit_decreasing({lengths}, {size}), lengths in rows",
               [[lengths[i] for i in row] for row in rows])
        yield ("result", f"first_fit_decreasing({lengths}, {size}), indices",
               sorted(i for row in rows for i in row))


def prepacked(rng):
    from generate_prepacked import generate
    yield from stage(generate, requests_of(rng, most=7), max_batch=6)


def masked(rng):
    from generate_ragged import Flat, generate
    requests = requests_of(rng)
    for request in requests:
        request.block_size = 24
        request.computed = rng.randrange(len(request.prompt))
    rng.shuffle(requests)
    plan = [(request, rng.randint(1, request.todo)) for request in requests]
    mask = Flat(plan, attention="mask").block_diagonal()
    words = ", ".join(f"{n} new tokens after {r.computed}" for r, n in plan)
    yield "result", f"the mask of {words}, as rows of 0 and 1", mask.int().tolist()
    yield from stage(generate, requests_of(rng, long=True), token_budget=rng.choice([4, 6, 9]),
                     attention="mask")


def varlen(rng):
    import torch

    import generate_ragged
    from generate_ragged import Flat, generate
    workload = requests_of(rng)
    for request in workload:
        request.block_size = 24
    batch = Flat([(request, request.todo) for request in workload])
    scores, original = [], generate_ragged.head

    def counting(q, k, v, *arguments, **named):
        scores.append(q.size(-2) * k.size(-2))
        return original(q, k, v, *arguments, **named)

    generate_ragged.head = counting
    g = torch.Generator().manual_seed(rng.randrange(10**6))
    q, k, v = (torch.randn(2, batch.cu_seqlens[-1], 3, generator=g, dtype=torch.float64)
               for _ in "qkv")
    try:
        out = batch.attend("random", q, k, v)
    finally:
        generate_ragged.head = original
    where = f"attend, for random q, k, v and cu_seqlens {batch.cu_seqlens}"
    yield "result", f"{where}: shape of the output", list(out.shape)
    for (request, _), a, b in zip(batch.plan, batch.cu_seqlens, batch.cu_seqlens[1:]):
        yield "result", f"{where}: output of {request}", out[:, a:b].tolist()
    # What is not computed by `head` is not counted.
    needed = sum(len(request.prompt) ** 2 for request in workload)
    yield ("counts", f"cu_seqlens {batch.cu_seqlens}",
           {"score entries": sum(scores) if scores else needed})
    yield from stage(generate, requests_of(rng, long=True), token_budget=rng.choice([4, 6, 9]))
    yield from masked(rng)


# --- set 6 ----------------------------------------------------------------------------------------

def books(rng):
    """Random operations on the books of a pool, and what they hold afterwards."""
    from paging import Pages
    pages, tables, said = Pages(8, 2), [], []
    for _ in range(14):
        if tables and (rng.random() < 0.45 or pages.available() < 3):
            table, tokens = tables.pop(rng.randrange(len(tables)))
            pages.give_back(list(table))
            said.append(f"give_back({table})")
        else:
            tokens = [rng.randrange(2) for _ in range(6)]
            table = pages.find(tokens[:-1])
            shared, kept = len(table), sum(page in pages.kept for page in table)
            if 3 - shared > pages.available() - kept:
                continue
            pages.hold(list(table))
            said.append(f"hold({table})")
            pages.allocate(table, 3 - shared)
            for i in range(shared, 3):
                pages.publish(table, i, tokens[2 * i:2 * i + 2])
            tables.append((table, tokens))
            said[-1] += f", then {table} is the block table of {tokens}"
        free = list(pages.free)
        yield "cache", f"after {'; '.join(said[-3:])}", {
            "holders": list(pages.holders), "kept, in order": list(pages.kept),
            "free, as heappop takes them": [heappop(free) for _ in pages.free],
            "published": sorted(pages.published.values()), "in key_of": sorted(pages.key_of),
            "gains": pages.gains,
            **{f"find({tokens})": pages.find(tokens) for _, tokens in tables}}


def names(rng):
    """Two requests compute the same page in one step. Later its number is used again."""
    from paging import Pages
    x, y, z = rng.sample(range(13), 3)
    pages, a, b, c = Pages(3, 1), [], [], []
    pages.allocate(a, 1)
    pages.allocate(b, 2)
    for table, i, token in (a, 0, x), (b, 0, x), (b, 1, y):
        pages.publish(table, i, [token])
    said = f"after publish([0], 0, [{x}]), publish([1, 2], 0, [{x}]), publish([1, 2], 1, [{y}])"
    yield "result", f"{said}: find([{x}, {y}])", pages.find([x, y])
    pages.give_back(a)
    pages.allocate(c, 1)
    pages.publish(c, 0, [z])
    said += f", give_back([0]), the eviction of page 0, publish([0], 0, [{z}])"
    yield "result", f"{said}: find([{z}, {y}])", pages.find([z, y])


def paged(rng):
    from generate_paged import generate
    size = rng.choice([2, 3])
    yield from stage(generate, requests_of(rng), max_batch=4, token_budget=rng.choice([5, 8]),
                     page_size=size, pages=rng.choice([8, 10, 24]) * 3 // size)


def counted(generate):
    """The stage, and a dict that will hold the counts of its trace."""
    counts = {}

    def run(model, requests, **knobs):
        counts.update(generate(model, requests, **knobs).counts)

    return run, counts


def prefixes(rng):
    """Prompts that begin alike, and one that has the same tokens after another beginning."""
    from generate_paged import generate
    from request import Request
    stem = [rng.randrange(13) for _ in range(6)]
    tails = [[rng.randrange(13) for _ in range(rng.randint(1, 3))] for _ in range(5)]
    other = [(stem[0] + 1) % 13, *stem[1:4]]
    prompts = [stem + tails[0], stem[:4] + tails[1], stem[2:] + tails[2], other + tails[3],
               other + stem[4:] + tails[4]]
    requests = [Request(prompt, rng.randint(2, 5), name="ABCDE"[i], arrival=2 * i)
                for i, prompt in enumerate(prompts)]
    run, counts = counted(generate)
    yield from books(rng)
    yield from names(rng)
    yield from stage(run, requests, max_batch=2, token_budget=6, page_size=2, pages=30)
    yield "counts", describe(requests), {"shared pages": counts.get("shared_pages", 0)}


def preemptions(rng):
    """Some requests are preempted by hand; then a run with too few pages."""
    from generate_paged import generate
    from paging import PagedScheduler, Pages
    from request import Request
    queue = PagedScheduler(4, 64, Pages(40, 2))
    for i in range(6):
        request = Request([i] * 3, 9, name="ABCDEF"[i])
        request.block_size = 24
        queue.add(request)
    queue.schedule(0)
    for _ in range(rng.randint(1, 3)):
        request = rng.choice(queue.running)
        request.computed, request.generated = 3, [7] * rng.randint(1, 5)
        known = f"a prompt of 3, {len(request.generated)} generated, 2 pages of 2"
        yield "result", f"missing, with {known}", queue.missing(request)
        queue.preempt(request)
        where = f"after the preemption of {request.name}"
        yield "result", f"{where}: running", [r.name for r in queue.running]
        yield "result", f"{where}: waiting", [r.name for r in queue.waiting]
        yield "result", f"{where}: its cache, computed and generated", [
            request.kv, request.computed, request.generated]
        yield "result", f"{where}: pages in use", sum(map(bool, queue.pages.holders))
    requests = requests_of(rng, most=5, prompt=6)
    for request in requests:
        request.max_new_tokens = rng.randint(5, 8)
    requests[-1].arrival = 30   # while it is awaited, the others must not wait
    run, counts = counted(generate)
    yield from stage(run, requests, max_batch=4, token_budget=8, page_size=2, pages=8)
    yield "counts", describe(requests), {"preemptions": counts.get("preemptions", 0)}
    yield "result", describe(requests), {f"steps of {r.name}": r.token_steps for r in requests}


# --- workloads that students hand in to expose a bug ----------------------------------------------

def handed_in(part):
    """The workload in workload.json, on the stage that a part belongs to."""
    from importlib import import_module

    from request import Request
    asked = json.loads(Path("workload.json").read_text())
    requests = [Request(
        prompt if isinstance(prompt, list) else [(7 * i + 3 * j * j + j) % 12 + 1
                                                 for j in range(prompt)],
        new, name="ABCDEFGH"[i], arrival=arrival, priority=priority, eos_token=eos)
        for i, (prompt, new, arrival, priority, eos) in enumerate(asked["requests"])]
    if part[0] == "3":
        yield from plans(requests, **asked["knobs"])
        return
    module, fixed = STAGES.get(part) or STAGES[part[0]]
    yield from stage(import_module(module).generate, requests, **fixed, **asked["knobs"])
    yield "result", "", {f"steps of {r.name}": r.token_steps for r in requests}


STAGES = {"1": ("generate_unbatched", {}), "2": ("generate_naive", {}),
          "2c": ("generate_dynamic", {}), "4": ("generate_interleaved", {}),
          "5": ("generate_prepacked", {}), "5c": ("generate_ragged", {"attention": "mask"}),
          "5d": ("generate_ragged", {"attention": "mask"}), "6": ("generate_paged", {})}

PROBES = {"1a": head, "1b": kv, "1c": unbatched, "2a": naive, "2b": append, "2c": dynamic,
          "3a": shared, "3b": crowded, "3c": after_a_step, "4a": interleaved, "4b": interleaved,
          "4c": interleaved, "4d": completed, "5a": packing, "5b": prepacked, "5c": masked,
          "5d": varlen, "6a": books, "6b": paged, "6c": prefixes, "6d": preemptions}
