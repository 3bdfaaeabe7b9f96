"""
The contract, for all rooms: the oracle `alone`, which shares nothing with the stages; the backends
that run them; the workloads, and the pressure under which they run.
"""
import contextlib
import io
import math
import os
import re
import runpy
import sys
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from assignments.audit import audit
from beyond.fairness import SCHEDULERS, FairScheduler
from beyond.tensor_parallel import shard
from generate_prefix import PrefixScheduler, page_hash
from lab import flags
from lab.checks.toy import toy as toy  # the tests import it from here
from lab.compiled import optimize
from lab.loading.llama import Llama, LlamaConfig
from lab.loading.stages import STAGES as ALL
from model import GPTConfig, sample
from paging import PagedScheduler
from request import Request, prepare

RIGHT = "requests got the tokens that the model gives each alone"   # of a check's line
ROOT = Path(__file__).parent.parent
BLOCK_SIZE, VOCAB = 24, 13
settings.register_profile("all tests", deadline=None, derandomize=True,
                          suppress_health_check=[*HealthCheck])
settings.load_profile("all tests")
THOROUGH = "THOROUGH" in os.environ   # set by conftest.py


def examples(number):
    """
    How many examples hypothesis tries: `number` with --thorough, else a twentieth. A known bug is
    seen by one of the first eight (test_traps.py).
    """
    return number if THOROUGH else max(number // 20, 5)


def fixed(request, u):
    """A copy that draws the number u."""
    twin = replace(request)
    twin.draw = lambda: u
    return twin


# --- programs -------------------------------------------------------------------------------------

def captured(main, *arguments):
    """(what main(*arguments) returns or exits with, stdout, stderr)"""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(*arguments)
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()


def as_program(name, *argv):
    """Runs a file, or a module, as a program with these flags."""
    run = runpy.run_path if name.endswith(".py") else runpy.run_module
    imported = sys.modules.pop(name, None)   # it runs anew
    try:
        with patch.object(sys, "argv", [name, *argv]):
            run(name, run_name="__main__")
    finally:
        if imported:
            sys.modules[name] = imported


def refused(said, main, *arguments):
    """Asserts that it ends with status 2 and one line, which says this (.. is any text)."""
    code, out, err = captured(main, *arguments)
    assert code == 2 and err.count("\n") == 1, (code, err)
    assert re.search(".*".join(map(re.escape, said.split(" .. "))), err), err
    return out


# --- stages ---------------------------------------------------------------------------------------

STAGES = {name.replace("unbatched, no cache", "no_cache").replace(", ", "_"): generate
          for name, generate in ALL.items()}
RAGGED = ("ragged_mask", "ragged_varlen")
POOLED = ("paged", "prefix")
SCHEDULED = ("chunked", "interleaved", *RAGGED, *POOLED)
BATCHED = ("naive", "dynamic", "prepacked", "prepacked_dataset", *SCHEDULED)


def knobs_of(stage, **knobs):
    """Those of the knobs that a stage has. But all other schedulers cache prefixes."""
    if stage == "paged":
        knobs.pop("scheduler_class", None)
    return flags.knobs_of(STAGES[stage], knobs)[0]


def llama(**config):
    """A random Llama that shows bugs (see lab/checks/toy.py)."""
    torch.manual_seed(0)
    sizes = dict(block_size=BLOCK_SIZE, vocab_size=VOCAB, n_layer=3, n_head=6, n_kv_head=2,
                 n_embd=15, head_size=4, ffn=20, rope_theta=100.0)
    model = Llama(LlamaConfig(**sizes | config)).double().requires_grad_(False)
    for p in model.parameters():
        p.normal_(std=0.4)
    return model


@torch.inference_mode()
def alone(model, request):
    """
    The oracle, written without any of the repository's caches, layouts and loops: the whole
    sequence runs through the model for each token. Returns (tokens, logits (n, V), finish reason).
    """
    twin, sequence, logits = replace(request), list(request.prompt), []
    while True:
        logits.append(model(torch.tensor([sequence], device=model.device))[0, -1])
        sequence += sample(logits[-1][None], [twin])
        new = sequence[len(request.prompt):]
        if new[-1] in (eos if isinstance(eos := request.eos_token, tuple) else [eos]):
            return new, torch.stack(logits), "stop"
        if len(new) == request.max_new_tokens or len(sequence) > model.config.block_size:
            return new, torch.stack(logits), "length"


def assert_contract(model, generate, requests, tolerance=1e-10, whole=None, known=None,
                    per_pass=1, late=0, **knobs):
    """
    Runs `generate` and asserts that each request got exactly what it would have got alone.

    whole:   the model to compare with; None: the same one
    known:   a dict of what requests get alone; it is filled
    per_pass, late: tokens that a pass may give a request; passes that may come after its last one
    """
    logits, known = {}, {} if known is None else known

    def on_token(request, token, row):
        assert request.generated[-1] == token
        assert len(request.generated) == len(request.token_times) == len(request.token_steps)
        logits.setdefault(request.name, []).append(row)

    trace = generate(model, requests, on_token=on_token, **knobs)
    for i, request in enumerate(requests):
        key = repr(replace(request, name="", priority=0, arrival=0))
        tokens, reference, reason = known[key] = known.get(key) or alone(whole or model, request)
        assert (request.generated, request.finish_reason) == (tokens, reason), f"request {i}"
        assert len(logits[request.name]) == len(tokens)
        difference = (torch.stack(logits[request.name]) - reference).abs().max()
        difference /= reference.abs().max()
        assert difference <= tolerance, f"request {i}: logits differ by {difference:.1e}"
        assert request.kv is request.block_table is None, f"request {i} still holds its cache"
        assert request.token_steps == sorted(request.token_steps)
        assert max(Counter(request.token_steps).values()) <= per_pass
        assert all(step >= request.arrival for step in request.token_steps)
    assert_trace(trace, requests, late)
    return trace


def looks_up(token, number, model):
    """The model, but each number of this token's embedding is another. The output head stays."""
    def replace_numbers(wte, arguments, embedded):
        token_ids, = arguments
        return embedded.masked_fill((token_ids == token)[..., None], number)

    model.wte.register_forward_hook(replace_numbers)
    return model


@torch.inference_mode()
def overflows_for_pads():
    """
    A float16 model whose first layer ends with 20,000 in feature 0 of each token, and inf in that
    of a pad: attention takes 60,000 away again, but a pad attends to nothing.
    """
    model = toy(n_embd=8, n_head=2, n_layer=2, dtype=torch.float16)
    attention, mlp = model.h[0].attn, model.h[0].mlp
    attention.value.weight[0] = 0.0
    attention.value.bias[0] = 1.0
    attention.c_proj.weight[0] = 0.0
    attention.c_proj.weight[0, 0] = -60_000.0
    attention.c_proj.bias[0] = 60_000.0
    mlp.c_proj.weight[0] = 0.0
    mlp.c_proj.bias[0] = 20_000.0
    return model


def assert_a_pad_may_overflow(generate, **knobs):
    """Prompts of different lengths, each with the tokens that it gets alone."""
    model = overflows_for_pads()
    prompts = [1], [2, 3], [4, 5, 6, 7]
    requests = [Request(list(prompt), 4) for prompt in prompts]
    right = [alone(model, request)[0] for request in requests]
    generate(model, requests, **knobs)
    assert [request.generated for request in requests] == right


def assert_names_the_bad_one(generate, **knobs):
    """Where one of several prompts gives NaN, the error names it, and no other has lost a token."""
    token = VOCAB - 1   # which gives NaN
    good = []
    for i in range(6):
        prompt = [i + 1] * (2 + 3 * i)
        good.append(Request(prompt, 5, i % 2, seed=i, eos_token=token, arrival=i % 3))
    bad = Request([3, token, *range(9)], 5, 1.0, name="bad", arrival=2)
    model = looks_up(token, math.nan, toy())
    with pytest.raises(ValueError, match="request 'bad': the model's logits are not") as error:
        generate(model, [*good[:3], bad, *good[3:]], **knobs)
    assert error.value.request is bad and not bad.generated
    assert sum(len(request.generated) for request in good) > 3
    for request in good:
        number = len(request.token_steps)   # of those that on_token was told
        assert request.generated == alone(model, request)[0][:number]


def assert_trace(trace, requests, late=0):
    """What holds of the passes of every run. Tokens that are new to it are counted once more."""
    steps = [p.step for p in trace.passes]
    assert steps == sorted(steps), "time runs backwards"
    named, reached = {request.name: request for request in requests}, Counter()
    for p in trace.passes:
        new = []
        for name, first, n in p.work:
            assert named[name].arrival <= p.step <= named[name].token_steps[-1] + late
            new += range(max(first, reached[name]), first + n)
            reached[name] = max(first + n, reached[name])
        parts = p.useful, p.recomputed, p.pad_slots, p.finished_slots, p.rejected
        assert p.slots == sum(parts) and min(parts) >= 0
        assert p.finished_slots == len(p.finished) and p.useful_scores <= p.score_entries
        if not any(p.rejected for p in trace.passes):
            assert (p.useful, p.useful_scores) == (len(new), sum(new) + len(new))


# --- backends -------------------------------------------------------------------------------------

EVEN = dict(n_head=4, n_embd=16)   # so that two ranks can share them


def float32():
    return toy(dtype=torch.float32)


BACKENDS = {   # name: (the model, the one to compare with, tolerance); ranks need a process group
    "float64": lambda: (toy(), toy(), 1e-10),
    "float32": lambda: (float32(), float32(), 1e-4),
    "Llama": lambda: (llama(), llama(), 1e-10),
    "compiled": lambda: (optimize(float32()), float32(), 1e-4),
    "rank": lambda: (shard(toy(**EVEN)), toy(**EVEN), 1e-10),
    "Llama rank": lambda: (shard(llama(n_head=4)), llama(n_head=4), 1e-10),
    "cuda": lambda: (float32().to("cuda"), float32().to("cuda"), 1e-4)}


@lru_cache(maxsize=None)
def backend(name):
    model, whole, tolerance = BACKENDS[name]()
    return SimpleNamespace(model=model, whole=whole, tolerance=tolerance, known={})


def contract(stage, name, requests, pressure):
    """Each of (copies of) these requests gets what it would have got alone. Returns the trace."""
    b = backend(name)
    return assert_contract(b.model, STAGES[stage], [*map(replace, requests)], b.tolerance, b.whole,
                           b.known, **knobs_of(stage, **pressure))


# --- a scheduler alone, without a model -----------------------------------------------------------

CONFIG = GPTConfig(block_size=BLOCK_SIZE, vocab_size=VOCAB, n_layer=1, n_head=1, n_embd=2)


def queue(scheduler, requests):
    """Adds them in order of arrival, and returns them in that order."""
    for request in (prepared := prepare(requests, CONFIG)):
        scheduler.add(request)
    return prepared


def finish(scheduler, plan, step=0, token=lambda request: 0):
    """The step has been computed."""
    sampled = [request for request, n in plan if n == request.todo]
    update(scheduler, plan, [token(request) for request in sampled])
    for request in sampled:
        request.token_steps.append(step)


def update(scheduler, plan, tokens, update=None):
    """scheduler.update; asserts that the pages which the pass fills can be found already."""
    if isinstance(scheduler, PrefixScheduler):
        size, filled = scheduler.pool.page_size, []
        for request, n in plan:
            filled += page_names(request, request.computed + n, size)[request.computed // size:]
        assert {*filled} <= {*scheduler.pool.cached}
    (update or type(scheduler).update)(scheduler, plan, tokens)


def page_names(request, end, size):
    """The hashes of its full pages up to the token `end`: of their tokens, and all before them."""
    names = []
    for i in range(end // size):
        tokens = request.slice(i * size, (i + 1) * size)
        names.append(page_hash(names[-1] if names else b"", tokens))
    return names


def cancel_now(scheduler, request):
    """As a server's engine does, between two steps."""
    request.finish_reason = request.finish_reason or "cancelled"
    if request in scheduler.waiting:
        scheduler.waiting.remove(request)
    scheduler.release()


def run(scheduler, requests, token=lambda request: 0, cancel=()):
    """
    Serves requests, checking every plan. Returns the plans, like ["A4 B1", ...].

    requests: or a dict, as `named` takes it
    cancel:   (step, n) pairs: before that step is scheduled, the n-th request is cancelled
    """
    if isinstance(requests, dict):
        requests = named(requests)
    in_order, plans, step = queue(scheduler, requests), [], 0
    while True:
        for when, n in cancel:
            if when == step and n < len(in_order):
                cancel_now(scheduler, in_order[n])
        if not scheduler.busy:
            return plans
        step = scheduler.next_step(step)
        plan = checked(scheduler, step)
        assert plan and len(plans) < 10_000, "no end"
        plans.append(" ".join(f"{request.name}{n}" for request, n in plan))
        finish(scheduler, plan, step, token)
        # only the last that runs has a part of its prompt left
        assert all(request.todo == 1 for request in scheduler.running[:-1])
        if isinstance(scheduler, PagedScheduler):
            assert_pages(scheduler)
        step += 1


def named(sizes):
    """
    Requests of {name: (prompt, new tokens, priority, arrival)}, the last two perhaps left out. A
    prompt that is a number has so many tokens that no other prompt has.
    """
    requests = []
    for i, (name, (prompt, new, *more)) in enumerate(sizes.items()):
        if isinstance(prompt, int):
            prompt = [i] * prompt
        requests.append(Request(prompt, new, 0.0, None, 0, None, name, *more))
    return requests


def checked(scheduler, step):
    """The plan of this step. What is asserted holds of each step of every scheduler."""
    before, preempted_before = list(scheduler.running), preemptions(scheduler)
    plan = scheduler.schedule(step)
    preempted = preemptions(scheduler) - preempted_before
    assert_who_runs(scheduler, before, preempted)
    assert_plan(scheduler, plan, preempted)
    assert_nobody_waits_in_vain(scheduler, step, plan, preempted)
    if isinstance(scheduler, PagedScheduler):
        assert_pages(scheduler)
        assert_pages_of_the_pass(scheduler, plan)
    else:
        held = sum(request.kv_capacity for request in scheduler.running)
        assert held <= scheduler.max_kv_tokens
    return plan


def preemptions(scheduler):
    return scheduler.pool.counts["preemptions"] if isinstance(scheduler, PagedScheduler) else 0


def assert_who_runs(scheduler, before, preempted):
    """Those that ran go on, in their order; then newcomers, but in no step that preempts."""
    running = scheduler.running
    went_on = [request for request in before if request in running]
    assert len(went_on) == len(before) - preempted
    assert running[:len(went_on)] == went_on
    if preempted:
        assert running == went_on
    assert len(running) <= scheduler.max_batch
    assert not any(request.finished for request in running)


def assert_plan(scheduler, plan, preempted):
    """All that run are in it. Each gets all it needs but the last: no decode waits for a prompt."""
    chosen, running = [request for request, _ in plan], scheduler.running
    if preempted and isinstance(scheduler, FairScheduler):   # it plans by rank, perhaps fewer
        running = running[:len(chosen)]
    assert chosen == running
    assert plan[:-1] == [(request, request.todo) for request in chosen[:-1]]
    needed = sum(request.todo for request in chosen)
    assert sum(n for _, n in plan) == min(scheduler.token_budget, needed)   # as much as there is


def assert_nobody_waits_in_vain(scheduler, step, plan, preempted):
    """One that has come waits for a place, for budget or for memory."""
    if preempted or not scheduler.arrived(step):
        return
    no_place = len(scheduler.running) == scheduler.max_batch
    no_budget = sum(request.todo for request, _ in plan) >= scheduler.token_budget
    assert no_place or no_budget or not scheduler.admit(scheduler.waiting[0])


def assert_pages_of_the_pass(scheduler, plan):
    """Each has pages for the tokens of this pass; if it is due, for its longest."""
    for request, n in plan:
        tokens = request.computed + n
        if isinstance(scheduler, FairScheduler) and scheduler.is_due(request):
            tokens = request.kv_capacity
        assert len(request.block_table) == scheduler.pool.needed(tokens)


def assert_books(scheduler):
    """Each page is free, or in as many tables as is counted. A cached page has one name."""
    assert all(request.block_table is None and request.computed == 0
               for request in scheduler.waiting)
    pool, tables = scheduler.pool, tables_of(scheduler)
    if isinstance(scheduler, PrefixScheduler):
        assert audit(pool, tables) == []
    else:   # nothing is shared
        assert sorted(sum(tables, [*pool.free_queue])) == list(range(pool.number))


def tables_of(scheduler):
    """All block tables in use, without the pages that a window has passed."""
    tables = [pages for pages, _ in getattr(scheduler, "held", {}).values()]   # of sessions
    windows = getattr(scheduler, "tables", {})   # of layers with a window: several of a request
    for request in scheduler.running:
        tables += windows.get(request, [request.block_table])
    return [[page for page in table if page is not None] for table in tables]


def assert_pages(scheduler):
    """What holds of block tables, free queue, prefix cache and queue at every moment."""
    assert_books(scheduler)
    pages, running, waiting = scheduler.pool, scheduler.running, scheduler.waiting
    assert len({id(request.block_table) for request in running}) == len(running)   # none is shared
    if isinstance(scheduler, FairScheduler):
        assert list(waiting) == sorted(waiting, key=scheduler.rank.get)
        assert {*running, *waiting} <= {*scheduler.rank}
    else:
        arrivals = [request.arrival for request in [*running, *waiting]]
        assert arrivals == sorted(arrivals)
    if isinstance(scheduler, PrefixScheduler):
        for request in running:
            assert_names_of_pages(request, pages)


def assert_names_of_pages(request, pages):
    names = page_names(request, len(request.tokens), pages.page_size)
    assert request.page_hashes == names[:len(request.page_hashes)]
    full = request.computed // pages.page_size
    for page, name in zip(request.block_table, names[:full]):
        assert pages.hash_of.get(page) == name


# --- workloads ------------------------------------------------------------------------------------

def mixed():
    """Prompts and answers of many lengths, greedy and sampled, arriving one after another."""
    requests = []
    for n in range(1, 12):
        prompt = [i % VOCAB for i in range(3 * n, 5 * n)]
        requests.append(Request(prompt, max_new_tokens=3 + n % 7, temperature=n % 2, seed=n,
                                name=f"r{n}", arrival=n // 3))
    return requests


def assert_seen(check, *drawn):
    """With a bug that `check` puts in, it fails for some drawn workload. Returns the error."""
    @settings(max_examples=1000, phases=[Phase.generate], report_multiple_bugs=False)
    @given(st.tuples(*drawn))
    def hunt(case):
        check(*case)

    with pytest.raises((AssertionError, ValueError, LookupError, TypeError, AttributeError,
                        RuntimeError)) as seen:
        hunt()
    return seen.value


def smallest_pool(requests, page_size, block_size=BLOCK_SIZE):
    """Pages that the largest request needs; no smaller pool is legal."""
    longest = max(min(len(r.prompt) + r.max_new_tokens - 1, block_size) for r in requests)
    return -(-longest // page_size)


@st.composite
def workloads(draw):
    """(requests, pressure): what they ask for, and the knobs that decide when they get it."""
    token = st.integers(0, draw(st.sampled_from([1, VOCAB - 1])))   # of two, many begin alike
    budget = draw(st.integers(1, 40))
    edges = st.sampled_from([budget - 1, budget, budget + 1, 2 * budget, BLOCK_SIZE])
    length = st.one_of(st.integers(1, 8), st.integers(1, BLOCK_SIZE),
                       edges.map(lambda n: min(max(n, 1), BLOCK_SIZE)))
    stem = draw(st.lists(token, min_size=BLOCK_SIZE, max_size=BLOCK_SIZE))   # of some prompts
    requests = []
    for i in range(draw(st.integers(1, 7))):
        n = draw(length)
        own = draw(st.lists(token, min_size=n, max_size=n))
        shared = draw(st.sampled_from([0, 3, 8, BLOCK_SIZE]))
        prompt = stem[:shared] + own[shared:]
        requests.append(Request(prompt[:n],
                                max_new_tokens=draw(st.sampled_from([1, 2, 4, 7, 12, 1000])),
                                temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 1.5])),
                                top_k=draw(st.sampled_from([None, None, 1, 3])),
                                top_p=draw(st.sampled_from([1.0, 1.0, 0.5, 0.9])),
                                seed=draw(st.integers(0, 2**32)),
                                eos_token=draw(st.one_of(st.none(), token)), name=f"r{i}",
                                priority=draw(st.integers(0, 2)),
                                arrival=draw(st.sampled_from([0, 0, 0, 1, 2, 5, 10**12]))))
    need, size = smallest_pool(requests, 1), draw(st.integers(1, 6))
    pages = smallest_pool(requests, size)
    scheduler_class = draw(st.sampled_from(list(SCHEDULERS.values())))
    pressure = dict(max_batch=draw(st.integers(1, 7)), token_budget=budget,
                    max_kv_tokens=draw(st.one_of(st.none(), st.integers(need, 3 * need))),
                    pages=draw(st.sampled_from([None, pages, pages + 1, 2 * pages])),
                    page_size=size, scheduler_class=scheduler_class)
    return requests, pressure
