"""
The contract of beyond/: guesses, passes queued ahead, weights that change, sessions that pause,
layers with a window. Each request gets what it would have got alone, and known bugs are seen (more
of them: test_traps.py; fairness: test_scheduler.py; what each of them gains: test_beyond.py).
"""
import math
from bisect import bisect_right
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import common
import numpy
import pytest
import torch
from common import (
    BLOCK_SIZE,
    alone,
    assert_books,
    assert_contract,
    assert_seen,
    assert_trace,
    smallest_pool,
    toy,
    workloads,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from beyond import ahead, hybrid, rollout, sessions, speculative
from beyond.fairness import FairScheduler
from beyond.hybrid import Hybrid, HybridScheduler
from beyond.rollout import RolloutScheduler
from beyond.sessions import Session, SessionScheduler
from cache import KV
from engine import Engine
from generate_prefix import PrefixScheduler
from lab.checks.edits import swapped
from lab.views.report import totals
from model import GPT, head, sample
from paging import PagedScheduler
from request import Request, prepare

# --- guesses, passes queued ahead -----------------------------------------------------------------

MODEL, QUIET = toy(), toy(loud=False)   # which repeats itself: most guesses are right
KNOWN = {MODEL: {}, QUIET: {}}   # what requests get alone
STAGES = {   # name: (generate, what a run of it may do that others do not)
    **{f"{k} guesses": (partial(speculative.generate, guesses=k), dict(per_pass=1 + k))
       for k in (0, 1, 4, 6)},
    "ahead": (ahead.generate, dict(late=1))}
GUESSES = [stage for stage in STAGES if "guesses" in stage]


def run(stage, requests, model=MODEL, knobs={}):
    """The contract, for copies of these requests."""
    generate, more = STAGES[stage]
    requests = [*map(replace, requests)]

    def nothing_is_assumed(*_):   # but while a batch is laid out
        assert not any(request.assumed for request in requests)

    handle = model.register_forward_pre_hook(nothing_is_assumed)
    update = partial(common.update, update=PrefixScheduler.update)   # also of accepted guesses
    try:
        with patch.object(PrefixScheduler, "update", lambda *arguments: update(*arguments)):
            trace = assert_contract(model, generate, requests, known=KNOWN[model], **more, **knobs)
    finally:
        handle.remove()
    nothing_is_assumed()
    for p in trace.passes:
        assert p.slots <= knobs.get("token_budget", 64) and p.pad_slots == p.finished_slots == 0
    for request in requests:   # neither a guess nor a hole has given a page its name
        names = common.page_names(request, len(request.tokens), knobs.get("page_size", 16))
        assert request.page_hashes == names[:len(request.page_hashes)]
    if stage not in GUESSES and not any(request.finish_reason == "stop" for request in requests):
        assert totals(trace)["rejected"] == 0   # an end by length costs no row
    return trace


@st.composite
def crowds(draw, stages):
    """(stage, requests, model, knobs). Requests may be twins, and the pool small."""
    requests, pressure = draw(workloads())
    if draw(st.booleans()):   # several answers to each prompt
        requests += [replace(r, seed=r.seed + 1, name=f"{r.name} again") for r in requests]
    more = draw(st.one_of(st.none(), st.integers(0, 20)))
    pages = None if more is None else smallest_pool(requests, pressure["page_size"]) + more
    return (draw(st.sampled_from(stages)), requests, draw(st.sampled_from([MODEL, QUIET])),
            knobs_of(pressure, pages=pages))


# --- rollout --------------------------------------------------------------------------------------

MODELS = [toy(seed=i, n_layer=1) for i in range(3)]   # the versions of a model


@contextmanager
def books(kind):
    """Within it, the books of each scheduler of this class are checked after each step."""
    update = kind.update

    def update_and_check(self, plan, tokens):
        update(self, plan, tokens)
        assert_books(self)
        for request in getattr(self, "stale", ()):   # its pages cannot be found
            assert request in self.running and not {*request.block_table} & {*self.pool.hash_of}
        for session, (_, last) in getattr(self, "held", {}).items():
            assert last >= self.step and session.turns[-1] not in self.running

    with patch.object(kind, "update", update_and_check):
        yield


def knobs_of(pressure, **more):
    return {name: pressure[name] for name in ("max_batch", "token_budget", "page_size")} | more


@torch.inference_mode()
def replayed(request):
    """
    The reference: the request alone, computed span by span over a plain KV, with the weights that
    its spans name. Returns (tokens, logits, the versions of the keys below each token).
    """
    twin, kv, tokens = replace(request), KV(BLOCK_SIZE), list(request.prompt)
    versions, below, logits = [None] * BLOCK_SIZE, [], []
    for version, first, end in request.spans:
        def attend(layer, q, k, v):
            kv.write(layer, first, k, v)
            return head(q, *kv.read(layer, end))

        rows = MODELS[version](torch.tensor(tokens[first:end]), torch.arange(first, end), attend)
        versions[first:end] = [version] * (end - first)
        if end == len(tokens):
            below.append(versions[:end])
            logits.append(rows[-1])
            tokens += sample(rows[-1:], [twin])
    return tokens[len(request.prompt):], torch.stack(logits), below


@st.composite
def rollouts(draw):
    """Several answers to each prompt. Some come after a change, and find what is cached."""
    changes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=2, unique=True).map(sorted))
    requests, size = [], draw(st.integers(1, 4))
    for i in range(draw(st.integers(1, 2))):
        least, later = draw(st.sampled_from([1, 12])), draw(st.integers(3, 9))
        prompt = draw(st.lists(st.integers(0, 1), min_size=least, max_size=20))
        requests += [Request(prompt, draw(st.integers(1, 9)), draw(st.sampled_from([0.0, 0.9])),
                             seed=j, eos_token=draw(st.sampled_from([None, 0])), name=f"r{i}.{j}",
                             arrival=draw(st.integers(0, 2)) + j * later)
                     for j in range(draw(st.integers(1, 4)))]
    pages, budget = smallest_pool(requests, size), st.sampled_from([1, 3, 5, 20])
    knobs = dict(max_batch=draw(st.integers(1, 4)), token_budget=draw(budget), page_size=size,
                 pages=pages + draw(st.integers(0, 12)))
    return requests, knobs, changes, draw(st.sampled_from(["keep", "recompute", "wait"]))


def check_rollout(requests, knobs, changes, mode):
    requests, logits = [*map(replace, requests)], {}
    with books(RolloutScheduler):
        trace = rollout.generate(
            MODELS[:len(changes) + 1], changes, requests, mode, **knobs,
            on_token=lambda request, _, row: logits.setdefault(request, []).append(row))
    assert_trace(trace, requests)
    begun = {}   # request -> its first step
    for p in trace.passes:
        for name, _, _ in p.work:
            begun.setdefault(name, p.step)
    for request in requests:
        tokens, reference, below = replayed(request)
        assert request.generated == tokens and request.block_table is None
        difference = (torch.stack(logits[request]) - reference).abs().max()
        assert difference <= 1e-10 * reference.abs().max()
        due = [bisect_right(changes, step) for step in request.token_steps]
        if mode == "wait":   # one version for all, which was the newest when it began
            assert {*sum(below, [])} == {below[0][0]}
            assert below[0][0] >= bisect_right(changes, begun[request.name])
        else:
            assert [each[-1] for each in below] == due
        if mode == "recompute":   # no key is of other weights than those that sample
            assert all({*each} == {version} for each, version in zip(below, due))
        if len({version for version, _, _ in request.spans}) == 1:   # then it is the old contract
            tokens, reference, reason = alone(MODELS[request.spans[0][0]], request)
            assert (request.generated, request.finish_reason) == (tokens, reason)


# --- sessions -------------------------------------------------------------------------------------

TURNS = {}   # what each gets alone


@st.composite
def agents(draw):
    requests, pressure = draw(workloads())
    token = st.integers(0, 1)
    asked = [(replace(request, prompt=request.prompt[:draw(st.integers(1, 10))],
                      max_new_tokens=draw(st.integers(1, 4)), arrival=draw(st.integers(0, 4))),
              draw(st.lists(st.tuples(st.integers(0, 9), st.lists(token, max_size=3),
                                      st.integers(1, 3)), max_size=2))) for request in requests[:4]]
    longest, more = [Session(*each).longest() for each in asked], st.sampled_from([0, 0, 1, 3, 9])
    pages = smallest_pool(longest, pressure["page_size"]) + draw(more)
    keep = draw(st.sampled_from([0, 1, 3, 6, math.inf]))
    return asked, knobs_of(pressure, pages=pages, keep=keep, by_session=draw(st.booleans()))


def check_sessions(asked, knobs):
    asked = [Session(replace(first), then) for first, then in asked]

    def preempt(scheduler, request, preempt=SessionScheduler.preempt):
        assert not scheduler.held   # each hold ends before anything that runs must go
        preempt(scheduler, request)

    def generate(model, turns, **knobs):
        trace = sessions.generate(model, asked, **knobs)
        turns += trace.requests
        return trace

    with books(SessionScheduler), patch.object(SessionScheduler, "preempt", preempt):
        assert_contract(MODELS[0], generate, turns := [], known=TURNS, **knobs)
    assert {*turns} == {turn for session in asked for turn in session.turns}
    for session in asked:
        assert session.over and len(session.turns) == len(session.then) + 1
        for one, two, (pause, result, _) in zip(session.turns, session.turns[1:], session.then):
            assert two.prompt == one.tokens + result
            assert two.arrival == one.token_steps[-1] + 1 + pause


@pytest.mark.parametrize("essay", [sessions, hybrid])
def test_a_pool_has_no_more_pages_than_what_is_asked_for_can_fill(essay, monkeypatch):
    """So a number that is far too large takes no memory; and nothing is computed in another way."""
    capacities = []

    def kv(capacity):
        capacities.append(capacity)
        return KV(capacity)

    monkeypatch.setattr(essay, "KV", kv)
    answers = []
    for pages in 64, 10**6:
        if essay is sessions:
            first = Request([1, 2, 3], 4)
            essay.generate(MODELS[0], asked := [Session(first, [(2, [5, 6], 3)])], pages=pages,
                           page_size=2)
            answers.append([turn.generated for turn in asked[0].turns])
        else:
            requests = [Request([1, 2, 3], 4), Request([4], 6)]
            essay.generate(HYBRIDS[3, 4], requests, pages=pages, page_size=2)
            answers.append([request.generated for request in requests])
    assert answers[0] == answers[1]
    assert capacities[1] <= 128


# --- hybrid ---------------------------------------------------------------------------------------

def with_windows(window, period):
    model = Hybrid(toy(n_layer=4).config, window, period).double()
    model.load_state_dict(toy(n_layer=4).state_dict())
    return model.requires_grad_(False)


HYBRIDS = {(window, period): with_windows(window, period)
           for window in (1, 2, 3, 5, 8, BLOCK_SIZE) for period in (2, 4)}
KNOWN_OF = {key: {} for key in HYBRIDS}
FAILS = st.one_of(st.none(), st.lists(st.sampled_from([None, None, 0, 1, 2, 3]), max_size=12))


@st.composite
def hybrids(draw):
    requests, pressure = draw(workloads())
    requests = [replace(each, max_new_tokens=min(each.max_new_tokens, 9)) for each in requests[:4]]
    window, period = draw(st.sampled_from(list(HYBRIDS)))
    size, step = pressure["page_size"], pressure["token_budget"] - 1
    all_pages = smallest_pool(requests, size)   # a window and a step may begin within a page
    near = min(all_pages, 1 + -(-(window + step - 1) // size))
    pages = all_pages + (period - 1) * near + draw(st.integers(0, 12))
    knobs = knobs_of(pressure, pages=pages, passed_first=draw(st.booleans()))
    return requests, (window, period), knobs, draw(FAILS)


def check_hybrid(requests, key, knobs, fails):
    window, size = key[0], knobs["page_size"]

    def windows(scheduler, step, schedule=HybridScheduler.schedule):
        plan = schedule(scheduler, step)
        for request, n in plan:   # each table has what the pass touches
            end = -(-(request.computed + n) // size)
            first = max(0, request.computed - window + 1) // size
            for table in scheduler.tables[request][1:]:
                assert [i for i, page in enumerate(table) if page is None] == [*range(first)]
            assert {*map(len, scheduler.tables[request])} == {end}
        return plan

    requests, model = [*map(replace, requests)], HYBRIDS[key]
    with books(HybridScheduler), patch.object(HybridScheduler, "schedule", windows):
        if fails:
            serve_though_some_fail(model, requests, knobs, fails)
        else:
            assert_contract(model, hybrid.generate, requests, known=KNOWN_OF[key], **knobs)


@torch.inference_mode()
def serve_though_some_fail(model, requests, knobs, fails):
    """fails: for each of the first passes, the block before which it fails, or None."""
    limits = [knobs[name] for name in ("max_batch", "token_budget", "pages", "page_size")]
    scheduler = HybridScheduler(*limits, model.windows, knobs["passed_first"])
    kv, step = KV(knobs["pages"] * knobs["page_size"]), 0
    common.queue(scheduler, requests)
    while scheduler.busy:
        step = scheduler.next_step(step)
        plan = scheduler.schedule(step)
        batch = hybrid.HybridPaged(plan, kv, scheduler, model)
        arguments = batch.tokens, batch.positions, batch.attend, batch.wanted
        block, *fails = fails or [None]
        if block is None:
            scheduler.update(plan, sample(model(*arguments), batch.sampled))
        else:
            with (model.h[block].register_forward_pre_hook(lambda *_: 1 / 0),
                  pytest.raises(ZeroDivisionError)):
                model(*arguments)
            scheduler.undo(plan)
            assert_books(scheduler)
        step += 1
    for request in requests:
        assert request.generated == alone(model, request)[0]


ESSAYS = {   # also for test_traps.py
    "beyond/speculative.py": (crowds(GUESSES), run),
    "beyond/ahead.py": (crowds(["ahead"]), run),
    "beyond/rollout.py": (rollouts(), check_rollout),
    "beyond/sessions.py": (agents(), check_sessions),
    "beyond/hybrid.py": (hybrids(), check_hybrid)}


@pytest.mark.parametrize("file", ESSAYS)
@settings(max_examples=common.examples(400))
@given(data=st.data())
def test_contract(file, data):
    cases, check = ESSAYS[file]
    check(*data.draw(cases))


# --- known bugs -----------------------------------------------------------------------------------

D, N = speculative.draft, speculative.next_round
R, S, H, HP = RolloutScheduler, SessionScheduler, HybridScheduler, hybrid.HybridPaged
FAULTS = {   # name: (function, code as it stands, code with the fault); more in lab/checks/traps.py
    "a wrong guess is accepted": (N, "== [token]", "!= []"),
    "a guess beyond the pages held": (D, "scheduler.pool.page_size", "99"),
    "a stale hole": (ahead.fill_holes, "= flight.tokens[places]",
                     "= flight.batch.tokens[flight.batch.wanted[places]]"),
    "pages freed under a queued pass are cached": (
        ahead.cache_pages, "if request.block_table", "if True"),
    "a token for a request that has ended": (
        ahead.land, "enumerate(batch.sampled) if not request.finished", "enumerate(batch.sampled)"),
    "a preempted request that ended waits on": (
        ahead.land, "if request.finished and request in scheduler.waiting", "if False"),
    "recompute preempts nothing": (R.change, '== "recompute"', '== ""'),
    "wait admits newcomers": (R.admit, "self.closed and", "False and"),
    "a turn without the answer before": (Session.next, "last.tokens", "last.prompt"),
    "a hold never ends": (S.schedule, "last_step >= step", "True"),
    "running requests go before holds": (S.make_room, "more > len(self.pool.free_queue)", "False"),
    "a failed pass leaves pages of windows": (
        H.undo, "in self.tables[request]:", "in self.tables[request][:1]:"),
    "found without its window": (H.find, "all(len(table) == n for table in tables)", "True"),
    "a chunk sees beyond its window": (HP.attend, "self.model.attend(layer, ", "head(")}


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name):
    function, *change = FAULTS[name]
    cases, check = ESSAYS[function.__module__.replace(".", "/") + ".py"]

    def broken(case):
        with swapped(function, [change]):
            check(*case)

    assert_seen(broken, cases)


# --- what chance may not show ---------------------------------------------------------------------

@pytest.mark.parametrize("prompt, stop", [([2, 4, 2, 6, 9], 9), ([2, 4, 2, 6, 9, 2, 10], 9)])
def test_nothing_is_accepted_after_a_stop_token_that_was_guessed(prompt, stop):
    request = Request(prompt, 8, eos_token=stop)
    run("4 guesses", [request])
    with pytest.raises(AssertionError), swapped(N, [["if not request.finished and", "if"]]):
        run("4 guesses", [request])


FIRST, TIGHT = Request([1], 9, name="A"), dict(token_budget=2, page_size=2)
TURN = (1, [1], 1)


def session(*then, **knobs):
    return sessions.generate(MODELS[0], [Session(replace(FIRST), *then)], **knobs)


@pytest.mark.parametrize("argument, call, wrong", [   # a run with this value, and what it refuses
    ("guesses", lambda value: speculative.generate(MODEL, FIRST, guesses=value),
     [1.5, None, "4", [2], -1, True]),
    ("models", lambda value: rollout.generate(value, [3], FIRST),
     [MODELS[0], [1, 2], None, "ab", []]),
    ("changes", lambda value: rollout.generate(MODELS[:2], value, FIRST),
     [["a"], None, 5, [1.0], [-1], [3, 2], [3, 3], "3"]),
    ("scheduler_class",
     lambda value: rollout.generate(MODELS[:2], [3], FIRST, scheduler_class=value),
     [None, 5, PrefixScheduler]),
    ("scheduler_class", lambda value: ahead.generate(MODEL, FIRST, scheduler_class=value),
     [None, "lifo", dict, PagedScheduler, partial(PagedScheduler), lambda *_: None]),
    ("sessions", lambda value: sessions.generate(MODELS[0], value),
     [None, 5, "ab", [FIRST], {"a": 1}]),
    ("first", Session, [None, [1], "a"]),
    ("then", session,
     [None, 5, [5], "abc", TURN, [(1, [1])], [(1.5, [1], 1)], [("1", [1], 1)], [(-1, [1], 1)],
      [(1, "a", 1)], [(1, (1,), 1)], [(1, [1.5], 1)], [(1, None, 1)], [(1, [1], 0)],
      [(1, [1], 1.5), TURN], [TURN, (1.5, [1], 1)]]),
    ("keep", lambda value: session(keep=value), ["x", None, -1, math.nan, [1], True]),
    ("by_session", lambda value: session(by_session=value), ["x", None, 2]),
    ("passed_first", lambda value: hybrid.generate(HYBRIDS[3, 4], FIRST, passed_first=value),
     ["x", None, 2]),
    ("pages", lambda value: hybrid.generate(HYBRIDS[3, 4], FIRST, pages=value),
     [None, 2.5, "9", 0]),
    ("period", lambda value: Hybrid(toy(n_layer=4).config, 8, value), [2.0, "2", None, 1, 3]),
    ("policy", lambda value: FairScheduler(8, 64, 9, 4, value), ["lifo", None, [1]]),
    ("bound", lambda value: FairScheduler(8, 64, 9, 4, "sjf", value), ["x", None, -1, math.nan])])
def test_a_value_of_a_wrong_type_is_refused_before_anything_runs(argument, call, wrong):
    """In one line that names the argument."""
    for value in wrong:
        with patch.object(GPT, "forward", side_effect=AssertionError("it runs")):
            with pytest.raises(ValueError, match=f"{argument} must be .*, not ") as error:
                call(value)
        assert str(error.value).isprintable()


def test_numbers_of_any_library_make_a_session():
    one, two, three = numpy.arange(1, 4)
    asked = Session(replace(FIRST), [(two, [three], one)])
    sessions.generate(MODELS[0], asked)   # one or several, as with requests
    assert asked.over and asked.turns[1].prompt[-1] == 3


@pytest.mark.parametrize("run, message", [
    (lambda: rollout.generate(MODELS, [3, 4], FIRST, "abort"), "mode must be 'keep' or .*'abort'"),
    (lambda: rollout.generate(MODELS[:2], [3, 4], FIRST), "2 changes need 3 models, not 2"),
    (lambda: rollout.generate([toy(), MODELS[0]], [3], FIRST), r"models\[1\] has another config"),
    (lambda: sessions.generate(MODELS[0], [Session(FIRST, [(1, [1] * 15, 1)])]),
     "request 'A, turn 2': prompt of 25 tokens does not fit block_size 24"),
    (lambda: sessions.generate(MODELS[0], [Session(Request([1])), Session(FIRST, [(1, [1], 9)])],
                               pages=9, **TIGHT),
     r"'A, turn 2': prompt of 11 \+ max_new_tokens 9, less the last token, needs 19 KV tokens, "
     "there are 18"),
    (lambda: hybrid.generate(HYBRIDS[3, 4], Request([1] * 9, 9), 8, 4, pages=20, page_size=2),
     "'r0': .* needs 21 pages in all groups, there are 20"),
    (lambda: hybrid.generate(toy(), FIRST), "model must be a Hybrid, not GPT"),
    (lambda: Hybrid(toy().config, 8, period=2), "at least 2 that divides n_layer 3, not 2"),
    (lambda: Hybrid(toy().config, 0, period=3), "window must be a whole number of at least 1")])
def test_bad_input_is_refused_before_anything_runs(run, message):
    with (patch.object(GPT, "forward", side_effect=AssertionError("it runs")),
          pytest.raises(ValueError, match=message)):
        run()


OTHERS = {   # all that runs requests, but hybrid itself
    **common.STAGES,
    "speculative": speculative.generate,
    "ahead": ahead.generate,
    "rollout": lambda model, request: rollout.generate([model], [], request),
    "sessions": lambda model, request: sessions.generate(model, Session(request))}


@pytest.mark.parametrize("stage", OTHERS)
def test_a_hybrid_is_refused_where_its_windows_would_be_left_out(stage):
    with pytest.raises(ValueError, match="a Hybrid runs in beyond.hybrid only") as error:
        OTHERS[stage](HYBRIDS[3, 4], replace(FIRST))
    assert str(error.value).isprintable()


def test_an_engine_refuses_a_hybrid_and_goes_on():
    engine = Engine(HYBRIDS[3, 4], pages=9, page_size=4)
    engine.add(request := replace(FIRST))
    with pytest.raises(ValueError, match="a Hybrid runs in beyond.hybrid only"):
        engine.step()
    engine.abort(request)
    assert not engine.busy


def test_a_missing_window_page_shortens_what_is_found():
    """Its global pages can be found, but not all of its last window: one page less will do."""
    scheduler = HybridScheduler(1, 64, 40, 2, [24, 4], passed_first=False)
    one, two = prepare([Request([1] * 13, 1), Request([1] * 13, 1)], HYBRIDS[3, 4].config)
    for request in one, two:
        scheduler.add(request)
    scheduler.update(scheduler.schedule(0), [1])
    pages = scheduler.pool
    for page in pages.cached.pop((1, one.page_hashes[5])):
        del pages.hash_of[page]
    assert scheduler.schedule(1) == [(two, 3)]   # of 12 tokens that could be found, 10 are
    assert [page is None for page in scheduler.tables[two][1]] == [True] * 3 + [False] * 4


@pytest.mark.parametrize("by_session, order", [(False, "A B C A2"), (True, "A B A2 C")])
def test_a_returning_turn_goes_before_newcomers(by_session, order):
    """B runs until step 3. C is in the queue from step 1 on, and A comes back at step 2."""
    asked = [Session(Request([1], 1, name="A"), [(1, [2], 1)]), Session(Request([2], 3, name="B")),
             Session(Request([3], 1, name="C", arrival=1))]
    trace = sessions.generate(MODELS[0], asked, max_batch=1, by_session=by_session)
    ran = dict.fromkeys(name.replace(", turn ", "") for p in trace.passes for name, _, _ in p.work)
    assert " ".join(ran) == order
