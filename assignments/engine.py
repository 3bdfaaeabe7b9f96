"""
An engine in parts, each of them a function that somebody else writes; and what is wrong with them.

    serve(yours, model, requests, ...)                the loop, and what is given
    schedules, streams, memories, prefixes            (yours, model) -> sentences, a step each

`yours` is a namespace of functions; the last notebook says what each of them does. What is right in
another style passes: plans in any order, tensors for lists, keys of any kind. What yields the right
tokens and wastes passes, slots, pages or operations does not.
"""
import signal
from collections import Counter, deque
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

import torch

import generate_paged
import generate_prefix
import generate_ragged
from assignments.judge import faults, plan_faults, waste
from assignments.probes import operations, page_faults
from cache import KV
from lab.checks.toy import letters
from model import sample
from request import advance, indices_due, prepare
from toolbox.trace import Trace

MANY = 1000   # steps that no workload here needs


class Memory:
    """
    A pool of pages: their numbers. What they hold is in the engine's KV.

    size:       tokens in a page
    free:       a deque of the free pages; the first is the one that has been free the longest
    cached:     key -> page, in step 4: the full pages that can be found. The keys are yours
    ref_count:  in step 4, how many block tables each page is in
    """

    def __init__(self, pages, size):
        self.number, self.size, self.free = pages, size, deque(range(pages))
        self.cached, self.ref_count, self.counts = {}, [0] * pages, Counter()

    def take(self):
        """The first free page. It can no longer be found, and its ref_count is 1."""
        page = self.free.popleft()
        self.cached = {key: other for key, other in self.cached.items() if other != page}
        self.ref_count[page] = 1
        return page


class InPages:
    """A request's keys and values in the pool, by `slots`. It takes the place of its KV."""

    def __init__(self, pool, slots):
        self.pool, self.slots = pool, slots

    def write(self, layer, start, k, v):
        pool_k, pool_v = self.pool.buffers(layer, k, v)
        at = [*map(int, self.slots(start, start + k.size(-2)))]
        pool_k[:, at], pool_v[:, at] = k, v

    def read(self, layer, end):
        at = [*map(int, self.slots(0, end))]
        return self.pool.k[layer][:, at], self.pool.v[layer][:, at]


class Batch:
    """The reader's layout, as the trace, the X-ray and the judge know layouts."""

    def __init__(self, yours, plan, memory):
        self.yours, self.plan, self.pages = yours, plan, memory if hasattr(yours, "keep") else None
        self.starts = [request.computed for request, _ in plan]
        self.lay_out(None)

    def lay_out(self, device):
        tokens, positions, self.cu_seqlens, self.due = self.yours.lay_out(self.plan)
        self.tokens, self.positions = torch.as_tensor(tokens), torch.as_tensor(positions)
        self.sampled = [self.plan[i][0] for i in self.due]
        self.wanted = torch.tensor([self.cu_seqlens[i + 1] - 1 for i in self.due], dtype=torch.long)

    def attend(self, layer, q, k, v):
        return self.yours.attend(self.plan, self.cu_seqlens, layer, q, k, v)

    def cost(self):
        return {"score_entries": sum(n * (s + n) for (_, n), s in zip(self.plan, self.starts))}


def serve(yours, model, requests, max_batch=4, token_budget=8, pages=None, page_size=4,
          on_token=None, watch=None):
    """The loop of an engine. What it calls as `yours` is written by the reader."""
    waiting, running, step = deque(prepare(requests, model.config)), [], 0
    memory, pool = (Memory(pages, page_size), KV(pages * page_size)) if pages else (None, None)
    trace = Trace("yours", [*waiting], model, memory.counts if memory else {})

    def grant(request):
        if memory and not yours.grant(memory, request):
            return False
        request.kv = (InPages(pool, partial(yours.slots, memory, request)) if memory
                      else KV(request.kv_tokens))
        return True

    while waiting or running:
        if memory:
            before = len(running)
            yours.grow(memory, running, waiting)
            memory.counts["preemptions"] += before - len(running)
        yours.admit(waiting, running, step, max_batch, token_budget, grant)
        plan = yours.share_budget(running, token_budget)
        if watch:
            watch(step, plan, running, waiting, memory)
        if plan:
            batch = Batch(yours, plan, memory)
            with torch.inference_mode(), trace.forward_pass(step, batch):
                logits = model(batch.tokens, batch.positions, batch.attend, batch.wanted)
            tokens = sample(logits, batch.sampled)
            if hasattr(yours, "keep"):
                yours.keep(memory, plan)
            for request in yours.after_pass(plan, batch.due, tokens, running):
                memory and yours.free(memory, request)
            trace.record_tokens(step, batch.sampled, tokens, logits, on_token)
        step += 1
    return trace


# --- what is wrong with the parts -----------------------------------------------------------------

class Fault(Exception):
    """What is wrong, in a sentence."""


def returning(function):
    """The function, but an error that says so if it returns nothing where something is due."""
    def called(*arguments):
        result = function(*arguments)
        if result is None and function.__name__ not in ("admit", "grow", "free", "keep"):
            raise Fault(f"{function.__name__} returns nothing: it lacks a `return`")
        return result
    return called


def expect(what, got, right):
    if got != right:
        yield f"{what}: {got}, expected {right}"


def schedules(yours, model):
    """Step 1, its functions without a model: by hand, then runs of six workloads."""
    old, young, last = prepare(letters(3, A=20, B=4, C=12), model.config)
    young.computed = 3
    for more, running in (("B decodes", [old, young]), ("C has 12", [old, last])):
        for fault in plan_faults(yours.share_budget(running, 8), running, [], 8, 8):
            yield f"If A runs with 20 tokens to do, and {more}, with a budget of 8: {fault}"
    mixed = letters(6, A=3, B=2, C=12, D=1, E=9)
    late = letters(5, {"C": 2, "D": 2, "E": 40}, A=3, B=20, C=6, D=4, E=2)
    many = letters(3, **dict.fromkeys("ABCDEFGH", 2))
    for requests, limits, refused in ((mixed, (8, 8), 0), (late, (4, 8), 0), (mixed, (2, 5), 0),
                                      (many, (8, 4), 0), (late, (3, 8), 3), (many, (3, 100), 0)):
        everyone = prepare([*map(replace, requests)], model.config)
        waiting, running, granted = deque(everyone), [], []

        def grant(request):
            if step >= refused or request is not everyone[1]:   # those behind it must wait, too
                granted.append(request)
            return request in granted

        step = 0
        while waiting or running:
            before, where = [*running], "In step {}, with max_batch {} and a budget of {}: ".format(
                step, *limits)
            yours.admit(waiting, running, step, *limits, grant)
            yield from map(where.__add__, admission_faults(
                [r for r in everyone if not r.finished], waiting, running, before, granted, step,
                limits[1]))
            plan = yours.share_budget(running, limits[1])
            arrived = [r for r in waiting if r.arrival <= step and step >= refused]
            yield from map(where.__add__, plan_faults(plan, running, arrived, *limits))
            advance(plan, [0] * len(indices_due(plan)))
            running[:] = [r for r in running if not r.finished]
            step += 1


def admission_faults(everyone, waiting, running, before, granted, step, token_budget):
    todo = sum(request.todo for request in running[:-1])
    for request in running:
        if request.arrival > step:
            yield f"{request} runs, and arrives at step {request.arrival}"
        if request not in granted:
            yield f"{request} runs, and grant has not returned True for it"
        if request is running[-1] and request not in before and todo >= token_budget:
            yield f"{request} is admitted, although those before it have {todo} tokens to do"
    for request in everyone:
        if (times := [*waiting, *running].count(request)) != 1:
            yield f"{request} is {times} times in waiting and running"
    for request in waiting:
        if request in granted:
            yield f"{request} waits, though grant has returned True for it: it has its memory"
    if [*running, *waiting] != everyone:
        yield "running and waiting are not in order of arrival"


def streams(yours, model):
    """Step 2: a layout and its loop, and what follows a pass; by hand, then a run."""
    A, B, C = prepare(letters(3, A=2, B=7, C=5), model.config)
    A.computed, B.computed, A.generated, plan = 3, 2, [9, 8], [(A, 1), (B, 3), (C, 5)]
    got = yours.lay_out(plan)
    yield from expect("The number of things that lay_out returns", len(got), 4)
    for what, mine, right in zip(("tokens", "positions", "cu_seqlens", "due"), got, (
            [8, *B.prompt[2:5], *C.prompt], [3, 2, 3, 4, 0, 1, 2, 3, 4], [0, 1, 4, 9], [0, 2])):
        with suppress(TypeError, RuntimeError):   # numbers, in whatever holds them
            mine = torch.as_tensor(mine).tolist()
        yield from expect("For a decode of A, 3 of 5 tokens of B, and the prompt of C, lay_out's "
                          + what, mine, right)
    [D] = prepare(letters(3, D=2), model.config)
    D.computed, D.generated, running = 3, [9, 8], [A, D, B, C]
    left = yours.after_pass([plan[0], (D, 1), *plan[1:]], [0, 1, 3], [6, 5, 7], running)
    for what, mine, right in (
            ("computed", [r.computed for r in (A, D, B, C)], [4, 4, 5, 5]),
            ("generated", [r.generated for r in (A, D, B, C)], [[9, 8, 6], [9, 8, 5], [], [7]]),
            ("running", [r.name for r in running], ["B", "C"]),
            ("the result", sorted(r.name for r in left), ["A", "D"])):
        yield from expect("After a pass in which A and D get their last tokens, and C its first, "
                          + what, mine, right)
    A.computed, B.computed = 9, 4
    q, k, v = (torch.randn(4, 9, 32, generator=torch.Generator().manual_seed(i)) for i in range(3))
    plan = [(A, 3), (B, 6)]
    for request, _ in plan:
        request.kv = KV(20)
        request.kv.write(0, 0, *torch.zeros(2, 4, request.computed, 32))
    yours.attend(plan, [0, 3, 9], 0, q, k, v)
    for request, a, b in (A, 0, 3), (B, 3, 9):
        keys, values = request.kv.read(0, request.computed + b - a)
        if not torch.equal(torch.stack([keys, values])[:, :, request.computed:],
                           torch.stack([k, v])[:, :, a:b]):
            yield (f"after attend with cu_seqlens [0, 3, 9], the cache of {request}, of which "
                   f"{request.computed} tokens were computed, does not hold the keys and values of "
                   f"tokens {a} to {b - 1} of the stream from position {request.computed} on")
    mixed = letters(6, A=4, B=2, C=1, D=11, E=3)
    mixed[1:3] = [replace(request, temperature=0.7) for request in mixed[1:3]]
    yield from runs(yours, model, mixed, generate_ragged.generate)
    mine = operations(yours.attend, plan, [0, 3, 9], 0, q, k, v)
    least = 2 * 2 * 4 * 32 * (3 * 12 + 6 * 10)   # q k, and weights v, in 4 heads of 32
    if mine > 1.01 * least:
        yield (f"all tokens are right, but attend multiplies {mine / least:.1f} times as much as "
               "it has to: new queries need their own request's keys only, so do not hide, skip")


def memories(yours, model):
    """Step 3: pages; by hand, then in so little memory that requests are preempted."""
    memory, [A, B] = Memory(6, 4), prepare(letters(3, A=9, B=8), model.config)
    A.block_table = [3, 0, 5]
    yield from expect("With 4 tokens to a page and the block table [3, 0, 5], slots of positions 2 "
                      "to 9", [*map(int, yours.slots(memory, A, 2, 10))],
                      [14, 15, 0, 1, 2, 3, 20, 21])
    for request, free, right in ((A, 3, (True, [0, 1, 2], 0)), (A, 2, (False, None, 2)),
                                 (B, 3, (True, [0, 1], 1))):
        memory, request.block_table = Memory(free, 4), None
        answer = bool(yours.grant(memory, request))
        yield from expect(f"With {free} pages free, for a prompt of {request.todo} tokens, 4 to a "
                          "page: what grant returns, the block table, and the number of pages left",
                          (answer, request.block_table, len(memory.free)), right)
    yours.free(memory, B)
    yield from expect("When B frees 2 pages while page 2 is free, the first of memory.free, and "
                      "B's block table", (memory.free[0], B.block_table), (2, None))
    memory, running = Memory(2, 4), prepare(letters(3, A=5, B=3), model.config)
    waiting, [A, B], B.generated = deque(prepare(letters(3, C=2), model.config)), running, [7]
    for request in running:
        request.block_table, request.computed = [memory.take()], 3
    with advised(TypeError, "A request that was preempted in this loop has no block table"):
        yours.grow(memory, running, waiting)
    got = "running {}; waiting {}; B has {} computed and {} generated".format(
        *(", ".join(request.name for request in each) or "none" for each in (running, waiting)),
        B.computed, len(B.generated))
    yield from expect("A needs a second page, B came after it, C waits, and none is free. After "
                      "grow", got, "running A; waiting B, C; B has 0 computed and 1 generated")
    for requests, pages in ((letters(14, A=6, B=6, C=6, D=6), 11),
                            (letters(9, {"C": 4}, A=9, B=5, C=7, D=3, E=6), 7)):
        yield from runs(yours, model, requests, generate_paged.generate, pages=pages, page_size=4)


FOUND = "A page that is free, and is found, is free no longer"   # where none is left to take


def prefixes(yours, model):
    """Step 4: pages that are found again; by hand, then with and without enough memory."""
    A, B = prepare(letters(3, A=9, B=16), model.config)
    B.prompt[:8] = A.prompt[:8]
    for number, n, right in ((3, 9, (False, 0, [2, 1, 0])), (4, 9, (True, 8, [])),
                             (5, 5, (True, 4, [1]))):
        memory, A.block_table, A.computed, B.block_table = Memory(number, 4), None, 0, None
        yours.grant(memory, A)
        yours.keep(memory, [(A, n)])
        A.computed = n
        yours.free(memory, A)
        yield from expect("When A has freed its pages [0, 1, 2], the free queue", [*memory.free],
                          [*range(3, number), 2, 1, 0])
        with advised(IndexError, FOUND):
            answer = bool(yours.grant(memory, B))
        yield from expect(f"B has 16 tokens; A, which begins alike, has computed {n} of 9 and freed"
                          f" its pages. In a pool of {number} pages of 4: what grant returns, B's "
                          "computed tokens, and the free queue",
                          (answer, B.computed, [*memory.free]), right)
    yield from rare_cases(yours, model)
    for requests, pages in ((letters(3, {"B": 4}, A=8, B=8), 12), (alike(20, 5, 0, 0, 0, 3, 9), 40),
                            (alike(16, 0, 0, 0, 0, 12), 40), (alike(20, 5, *range(7)), 17)):
        yield from runs(yours, model, requests, generate_prefix.generate, pages=pages, page_size=4)


def rare_cases(yours, model):
    """What a cache of pages has to do where it is easily wrong, by hand."""
    def pool(number, *prompts):
        requests = prepare(letters(3, **dict(zip("ABC", map(len, prompts)))), model.config)
        for request, prompt in zip(requests, prompts):
            request.prompt = prompt
        return Memory(number, 4), *requests

    def compute(memory, *requests):   # in one pass
        for request in requests:
            yours.grant(memory, request)
        yours.keep(memory, [(request, request.todo) for request in requests])
        for request in requests:
            request.computed = len(request.tokens)

    def granted(what, memory, request, pages, computed):
        with advised(IndexError, FOUND):
            yours.grant(memory, request)
        yield from expect(f"{what}: the block table and the computed tokens of {request}",
                          (request.block_table, request.computed), (pages, computed))

    P, Q, R, S = [1, 2, 3, 4], [2] * 4, [3] * 4, [1, 3, 2, 4]   # S: P in another order
    memory, A, B = pool(9, P + Q, P + Q)
    compute(memory, A)
    yield from granted("B has A's 8 tokens, in pages of 4, and its last one has to be computed",
                       memory, B, [0, 2], 4)
    memory, A, B, C = pool(12, P + Q + R, P + Q + S, P + Q + S + [9])
    compute(memory, A, B)
    yield from expect("A and B compute 12 tokens in the same pass, of which the first 8 are alike. "
                      f"With pages {A.block_table} and {B.block_table}: the pages in memory.cached",
                      sorted({*memory.cached.values()}), [0, 1, 2, 5])
    yours.free(memory, A)
    others = [memory.take() for _ in range(9)]   # also those of A
    memory.free.extend(sorted(others)[3:])
    yield from granted("C begins as B does. B's page 5 is still known, as the third of such a "
                       "beginning, but the first and the second can no longer be found",
                       memory, C, [6, 7, 8, 9], 0)
    memory, A, B, C = pool(12, P + Q + R + [9], S + Q + [9], S + Q + R + [9])
    compute(memory, A)
    compute(memory, B)
    yield from granted("C begins with the 8 tokens of B's first two pages. Its third has the "
                       "tokens of A's third, which come after another beginning: A's first page "
                       "has those of B's in another order", memory, C, [4, 5, 7, 8], 8)
    memory, A, B = pool(5, P + Q + [9], P + Q + R + S)
    compute(memory, A)
    yours.free(memory, A)
    memory.free.reverse()
    yield from granted("B finds pages 0 and 1, which are free, and at the front of the queue [0, "
                       "1, 2, 4, 3]. They must not be taken for its other tokens",
                       memory, B, [0, 1, 2, 4], 8)
    memory, A = pool(4, P + Q[:3])
    compute(memory, A)
    A.generated, A.computed = [5] * 6, 7
    A.block_table += [memory.take(), memory.take()]
    yours.keep(memory, [(A, 6)])
    yield from expect("A's six generated tokens are computed, and fill pages 1 and 2: which of its "
                      "pages can be found", sorted({*memory.cached.values()}), [0, 1, 2])
    yours.free(memory, A)
    A.computed = 0
    yield from granted("A, with a prompt of 7 tokens and 6 generated ones, was preempted, and "
                       "returns", memory, A, [0, 1, 2, 3], 12)


def alike(common, own, *arrivals):
    """Requests that begin with the same tokens. The last one begins with their second page."""
    base, [one] = [(37 * i * i + 11 * i) % 1000 for i in range(common)], letters(6, A=1)
    requests = [replace(one, prompt=base + [100 * i + j + 7 for j in range(own)], arrival=arrival,
                        name="ABCDEFGHI"[i]) for i, arrival in enumerate(arrivals)]
    last = replace(one, prompt=base[4:8] + base[:7], name="J", arrival=arrivals[-1] + 2)
    return [*requests, last]


def runs(yours, model, requests, ours, **knobs):
    """A run of the engine: what is wrong with it, and what it wastes beside our stage."""
    sharing, traces, last = hasattr(yours, "keep"), [], []

    def faults_of_pages(memory, tables, size):
        return page_faults(tables, memory.free, memory.number, size,
                           memory.ref_count if sharing else None)

    def watch(step, plan, running, waiting, memory):
        last[:] = [memory] if memory else []
        if memory:
            tables = {request: request.block_table for request in running}
            for fault in faults_of_pages(memory, tables, memory.size):
                raise Fault(f"before the pass of step {step}, {fault}")
        if not plan and (running or waiting[0].arrival <= step) or step > MANY:
            raise Fault(f"in step {step} nothing goes on: the plan is {plan}, {len(running)} run "
                        f"and {len(waiting)} wait")

    def generate(model, requests, on_token, **knobs):
        traces.append(serve(yours, model, requests, on_token=on_token, watch=watch, **knobs))

    yield from (fault for _, fault in faults(generate, model, [*map(replace, requests)], **knobs))
    for memory in last:
        yield from map("at the end, ".__add__, faults_of_pages(memory, {}, 1))
    right = ours(model, [*map(replace, requests)], max_batch=4, token_budget=8, **knobs)
    yield from waste(traces[0], right)


@contextmanager
def advised(kind, advice):
    """Adds advice to an error of this kind."""
    try:
        yield
    except kind as error:
        error.add_note(advice + ".")
        raise


@contextmanager
def limited(seconds):
    """Raises Fault after so many seconds of computing, where the system has such an alarm."""
    def stop(*_):
        raise Fault(f"it does not end: {seconds} seconds of computing are over")
    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
