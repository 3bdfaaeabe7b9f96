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
from assignments.probes import operations, page_faults, room_faults
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
    free:       a deque of the free pages; the first is taken next
    ref_count:  in step 4, how many block tables each page is in
    cached:     in step 4, {page: its key}: the full pages that can be found. The keys are yours
    """

    def __init__(self, pages, size):
        self.number, self.size, self.free = pages, size, deque(range(pages))
        self.ref_count, self.cached, self.counts = [0] * pages, {}, Counter()

    def take(self):
        """The first free page. It can no longer be found, and its ref_count is 1."""
        page = self.free.popleft()
        self.cached.pop(page, None)
        self.ref_count[page] = 1
        return page

    def find(self, key):
        """The page that has had this key for the longest time; or None."""
        return next((page for page, other in self.cached.items() if other == key), None)


class InPages:
    """A request's keys and values in the pool, by `slots`. It takes the place of its KV."""

    def __init__(self, kv, slots):
        self.kv, self.slots = kv, slots

    def write(self, layer, start, k, v):
        k_slots, v_slots = self.kv.buffers(layer, k, v)
        at = [*map(int, self.slots(start, start + k.size(-2)))]
        k_slots[:, at], v_slots[:, at] = k, v

    def read(self, layer, end):
        at = [*map(int, self.slots(0, end))]
        return self.kv.k[layer][:, at], self.kv.v[layer][:, at]


class Batch:
    """The reader's layout, as the trace, the X-ray and the judge know layouts."""

    def __init__(self, yours, plan, memory):
        self.yours, self.plan, self.pool = yours, plan, memory if hasattr(yours, "keep") else None
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
    memory, kv = (Memory(pages, page_size), KV(pages * page_size)) if pages else (None, None)
    trace = Trace("yours", [*waiting], model, memory.counts if memory else {})

    def admit(request):
        if memory and not yours.admit(memory, request):
            return False
        request.kv = (InPages(kv, partial(yours.slots, memory, request)) if memory
                      else KV(request.kv_tokens))
        return True

    def make_room(request, n):
        granted = True
        if memory:
            before = len(running)
            granted = yours.make_room(memory, running, waiting, request, n)
            memory.counts["preemptions"] += before - len(running)
        if granted and hasattr(yours, "keep"):
            yours.keep(memory, request, n)
        return granted

    while waiting or running:
        plan = yours.schedule(waiting, running, step, max_batch, token_budget, admit, make_room)
        if watch:
            watch(step, plan, running, waiting, memory)
        if plan:
            batch = Batch(yours, plan, memory)
            with torch.inference_mode(), trace.forward_pass(step, batch):
                logits = model(batch.tokens, batch.positions, batch.attend, batch.wanted)
            tokens = sample(logits, batch.sampled)
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
        if result is None and function.__name__ not in ("free", "keep"):
            raise Fault(f"{function.__name__} returns nothing: it lacks a `return`")
        return result
    return called


def expect(what, got, right):
    if got != right:
        yield f"{what}: {got}, expected {right}"


def schedules(yours, model):
    """Step 1, without a model: runs of eight workloads, two of them with too little memory."""
    mixed = letters(6, A=3, B=2, C=12, D=1, E=9)
    late = letters(5, {"C": 2, "D": 2, "E": 40}, A=3, B=20, C=6, D=4, E=2)
    many = letters(3, **dict.fromkeys("ABCDEFGH", 2))
    for requests, limits, refused, short in (
            (mixed, (8, 8), 0, ()), (late, (4, 8), 0, ()), (mixed, (2, 5), 0, ()),
            (many, (8, 4), 0, ()), (late, (3, 8), 3, ()), (many, (3, 100), 0, ()),
            (mixed, (8, 8), 0, (3, 6)), (late, (4, 8), 0, (4, 5))):
        everyone = prepare([*map(replace, requests)], model.config)
        waiting, running, granted = deque(everyone), [], []

        def admit(request):
            if step >= refused or request is not everyone[1]:   # those behind it must wait, too
                granted.append(request)
            return request in granted

        def make_room(request, n):
            """In the first step of `short`, the first needs a page; in the others, the last."""
            asked[request] = n
            if step in short and not gone and request in before and len(before) > 1:
                if step == short[0] or request is running[-1]:
                    gone.append(running.pop())
                    gone[0].computed = 0
                    waiting.appendleft(gone[0])
                    granted.remove(gone[0])
                    return gone[0] is not request
            return True

        step = 0
        while waiting or running:
            before, gone, asked = [*running], [], {}
            where = f"In step {step}, with max_batch {limits[0]} and a budget of {limits[1]}: "
            plan = yours.schedule(waiting, running, step, *limits, admit, make_room)
            alive = [request for request in everyone if not request.finished]
            yield from map(where.__add__, admission_faults(alive, waiting, running, granted, step))
            new = [r for r in running if r not in before or r in gone]
            if gone and new:
                yield (f"{where}{new[0]} is admitted, although make_room has just preempted "
                       f"{gone[0]}")
            arrived = [r for r in waiting if r.arrival <= step and step >= refused and not gone]
            yield from map(where.__add__, plan_faults(plan, running, arrived, new, *limits))
            for request, n in plan:
                if asked.get(request) != n:
                    yield f"{where}{request} is to compute {n} tokens, and make_room was " + (
                        f"asked for {asked[request]}" if request in asked else "not asked")
            advance(plan, [0] * len(indices_due(plan)))
            running[:] = [r for r in running if not r.finished]
            step += 1


def admission_faults(everyone, waiting, running, granted, step):
    for request in running:
        if request.arrival > step:
            yield f"{request} runs, and arrives at step {request.arrival}"
        if request not in granted:
            yield f"{request} runs, and admit has not returned True for it"
    for request in everyone:
        if (times := [*waiting, *running].count(request)) != 1:
            yield f"{request} is {times} times in waiting and running"
    for request in waiting:
        if request in granted:
            yield f"{request} waits, though admit has returned True for it: it has its memory"
    if [*running, *waiting] != everyone:
        yield "running and waiting are not in order of arrival"


class Watched(KV):
    """A cache that tells when it is written and read."""

    def __init__(self, capacity, log):
        super().__init__(capacity)
        self.log = log

    def write(self, *arguments):
        self.log.append("write")
        super().write(*arguments)

    def read(self, *arguments):
        self.log.append("read")
        return super().read(*arguments)


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
    log = []
    for request, _ in plan:
        request.kv = Watched(20, log)
        request.kv.write(0, 0, *torch.zeros(2, 4, request.computed, 32))
    log.clear()
    yours.attend(plan, [0, 3, 9], 0, q, k, v)
    for request, a, b in (A, 0, 3), (B, 3, 9):
        keys, values = request.kv.read(0, request.computed + b - a)
        if not torch.equal(torch.stack([keys, values])[:, :, request.computed:],
                           torch.stack([k, v])[:, :, a:b]):
            yield (f"after attend with cu_seqlens [0, 3, 9], the cache of {request}, of which "
                   f"{request.computed} tokens were computed, does not hold the keys and values of "
                   f"tokens {a} to {b - 1} of the stream from position {request.computed} on")
    if "read" in log and "write" in log[log.index("read"):]:
        yield ("attend reads a cache before all new keys and values are stored. In step 4 a "
               "request may read what another stores in the same pass: so store all of them first")
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
    for request, free, answer in (A, 3, True), (A, 2, False), (B, 2, True), (B, 1, False):
        memory, request.block_table = Memory(free, 4), None
        got = bool(yours.admit(memory, request)), request.block_table, len(memory.free)
        yield from expect(f"With {free} pages free, for a prompt of {request.todo} tokens, 4 to a "
                          "page: what admit returns, the block table, and the number of free pages",
                          got, (answer, [] if answer else None, free))
    memory, A.block_table = Memory(6, 4), []
    for computed, n, table in (0, 3, [0]), (3, 1, [0]), (4, 1, [0, 1]), (5, 4, [0, 1, 2]):
        A.computed = computed
        got = bool(yours.make_room(memory, [A], deque(), A, n)), A.block_table
        yield from expect(f"A has computed {computed} tokens, and is to compute {n} more, 4 to a "
                          "page: what make_room returns, and A's block table", got, (True, table))
    B.block_table, B.computed = [memory.take(), memory.take()], 8
    yours.free(memory, B)
    yield from expect("When B frees pages 3 and 4 while page 5 is free, the first of memory.free, "
                      "and B's block table", (memory.free[0], B.block_table), (5, None))
    for who, answer, right in (
            (0, True, "running A; waiting B, C; B has 0 computed and 1 generated"),
            (1, False, "running A; waiting B, C; B has 0 computed and 1 generated")):
        memory, running = Memory(2, 4), prepare(letters(3, A=5, B=4), model.config)
        waiting, [A, B], B.generated = deque(prepare(letters(3, C=2), model.config)), running, [7]
        for request in running:
            request.block_table, request.computed = [memory.take()], 4
        asks = running[who]
        with advised(TypeError, "Who has just been preempted has no block table"):
            got = bool(yours.make_room(memory, running, waiting, asks, 1))
        said = "{}; running {}; waiting {}; B has {} computed and {} generated".format(
            got, *(", ".join(r.name for r in each) or "none" for each in (running, waiting)),
            B.computed, len(B.generated))
        yield from expect(f"A and B run with a full page each, C waits, no page is free, and "
                          f"{asks.name} needs another. What make_room returns, and what is then",
                          said, f"{answer}; {right}")
    for requests, pages in ((letters(14, A=6, B=6, C=6, D=6), 11),
                            (letters(9, {"C": 4}, A=9, B=5, C=7, D=3, E=6), 7)):
        yield from runs(yours, model, requests, generate_paged.generate, pages=pages, page_size=4)


def prefixes(yours, model):
    """Step 4: pages that are found again; by hand, then with and without enough memory."""
    A, B = prepare(letters(3, A=9, B=16), model.config)
    B.prompt[:8] = A.prompt[:8]
    for number, n, queue, right in ((3, 9, [2, 1, 0], (False, 0, [2, 1, 0])),
                                    (4, 9, [2, 3, 1, 0], (True, 8, [2, 3])),
                                    (5, 5, [1, 2, 3, 4, 0], (True, 4, [1, 2, 3, 4]))):
        memory, A.block_table, A.computed, B.block_table = Memory(number, 4), None, 0, None
        planned(yours, memory, A, n)
        yours.free(memory, A)
        yield from expect(f"A has computed {n} of 9 tokens, in a pool of {number} pages of 4, and "
                          "frees its pages: the free queue (a page that nobody can find goes to "
                          "its front)", [*memory.free], queue)
        answer = bool(yours.admit(memory, B))
        yield from expect(f"B has 16 tokens; A, which begins alike, has computed {n} of 9 and freed"
                          f" its pages. In a pool of {number} pages of 4: what admit returns, B's "
                          "computed tokens, and the free queue. (A page that is free, and is found,"
                          " is free no longer)", (answer, B.computed, [*memory.free]), right)
    yield from rare_cases(yours, model)
    for requests, pages in ((letters(3, {"B": 4}, A=8, B=8), 12), (alike(20, 5, 0, 0, 0, 3, 9), 40),
                            (alike(16, 0, 0, 0, 0, 12), 40), (alike(20, 5, *range(7)), 17)):
        yield from runs(yours, model, requests, generate_prefix.generate, pages=pages, page_size=4)


def planned(yours, memory, request, n=None):
    """A request is admitted, n of its tokens are planned, or all to do, and computed."""
    yours.admit(memory, request)
    n = n or request.todo
    yours.make_room(memory, [request], deque(), request, n)
    yours.keep(memory, request, n)
    request.computed += n


def rare_cases(yours, model):
    """What a cache of pages has to do where it is easily wrong, by hand."""
    def pool(number, *prompts):
        requests = prepare(letters(3, **dict(zip("ABC", map(len, prompts)))), model.config)
        for request, prompt in zip(requests, prompts):
            request.prompt = prompt
        return Memory(number, 4), *requests

    def admitted(what, memory, request, pages, computed):
        yours.admit(memory, request)
        yield from expect(f"{what}: the block table and the computed tokens of {request}",
                          (request.block_table, request.computed), (pages, computed))

    P, Q, R, S = [1, 2, 3, 4], [2] * 4, [3] * 4, [1, 3, 2, 4]   # S: P in another order
    memory, A, B = pool(9, P + Q, P + Q)
    planned(yours, memory, A)
    yield from admitted("B has A's 8 tokens, in pages of 4, and its last one has to be computed",
                        memory, B, [0], 4)
    yours.make_room(memory, [A, B], deque(), B, 4)
    yours.keep(memory, B, 4)
    yield from expect("A and B have computed the same last page each, number 1 and 2. All pages "
                      "that can be found", sorted(memory.cached), [0, 1, 2])
    memory, A, B, C = pool(12, P + Q + R, P + Q + S, P + Q + S + [9])
    planned(yours, memory, A)
    planned(yours, memory, B)
    yield from expect("A and B, of 12 tokens, are planned for the same pass, and the first 8 are "
                      "alike: their block tables", [A.block_table, B.block_table],
                      [[0, 1, 2], [0, 1, 3]])
    yours.free(memory, A)
    yours.free(memory, B)
    for page in 0, 1:   # taken for others, which have ended
        memory.free.remove(page)
        memory.free.appendleft(page)
        memory.take()
        memory.free.append(page)
        memory.ref_count[page] = 0
    yield from admitted("C begins as B does. B's page 3 is still known, as the third of such a "
                        "beginning, but the first and the second can no longer be found",
                        memory, C, [], 0)
    memory, A, B, C = pool(12, P + Q + R + [9], S + Q + [9], S + Q + R + [9])
    planned(yours, memory, A)
    planned(yours, memory, B)
    yield from admitted("C begins with the 8 tokens of B's first two pages. Its third has the "
                        "tokens of A's third, which come after another beginning: A's first page "
                        "has those of B's in another order", memory, C, [4, 5], 8)
    memory, A = pool(4, P + Q[:3])
    planned(yours, memory, A)
    A.generated = [5] * 6
    yours.make_room(memory, [A], deque(), A, 6)
    yours.keep(memory, A, 6)
    yield from expect("A's six generated tokens are planned, and fill pages 1 and 2: which of its "
                      "pages can be found", sorted(memory.cached), [0, 1, 2])
    yours.free(memory, A)
    A.computed = 0
    yield from admitted("A, with a prompt of 7 tokens and 6 generated ones, was preempted, and "
                        "returns", memory, A, [0, 1, 2], 12)


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

    def faults_of_pages(memory, tables):
        return page_faults(tables, memory.free, memory.number,
                           memory.ref_count if sharing else None)

    def watch(step, plan, running, waiting, memory):
        last[:] = [memory] if memory else []
        if memory:
            tables = {request: request.block_table for request in running}
            for fault in (*faults_of_pages(memory, tables), *room_faults(
                    tables, plan, memory.size)):
                raise Fault(f"before the pass of step {step}, {fault}")
        if not plan and (running or waiting[0].arrival <= step) or step > MANY:
            raise Fault(f"in step {step} nothing goes on: the plan is {plan}, {len(running)} run "
                        f"and {len(waiting)} wait")

    def generate(model, requests, on_token, **knobs):
        traces.append(serve(yours, model, requests, on_token=on_token, watch=watch, **knobs))

    yield from (fault for _, fault in faults(generate, model, [*map(replace, requests)], **knobs))
    for memory in last:
        yield from map("at the end, ".__add__, faults_of_pages(memory, {}))
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
