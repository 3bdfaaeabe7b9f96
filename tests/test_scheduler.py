"""Golden plans: what the Scheduler hands out, step by step, and what a Request refuses."""
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from common import BLOCK_SIZE, CONFIG, Engine, examples, finish, queue, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

import scheduler
from beyond.fairness import POLICIES, FairScheduler
from generate_ragged import Flat
from paging import PagedScheduler, Pages
from request import Request, prepare
from scheduler import Scheduler


def plans(sizes, arrivals=None, cancel=(), **limits):
    """
    The plans of all steps, written like "A1 B1 C4". sizes: (prompt, new tokens) for A, B, C, ...
    cancel: (step, name) pairs, before that step is scheduled.
    """
    scheduler = Scheduler(**limits)
    requests = queue(scheduler, [Request([0] * prompt, new, name="ABCDEFGH"[i],
                                         arrival=arrivals[i] if arrivals else 0)
                                 for i, (prompt, new) in enumerate(sizes)])

    def between(step):
        for request in requests:
            if (step, request.name) in cancel:
                scheduler.cancel(request)

    return run(scheduler, between=between)


@pytest.mark.parametrize("sizes, max_batch, token_budget, more, expected", [
    # decodes first; three prompts share a budget; B has its three tokens and is gone
    ([(3, 4), (2, 3), (9, 2)], 4, 6, {}, ["A3 B2 C1", "A1 B1 C4", "A1 B1 C4", "A1 C1"]),
    # a finished request is replaced in the next step
    ([(2, 1), (2, 3), (3, 2)], 2, 8, {}, ["A2 B2", "B1 C3", "B1 C1"]),
    # first come, first served
    ([(5, 1), (6, 1), (2, 1)], 8, 4, {}, ["A4", "A1 B3", "B3 C1", "C1"]),
    # none is overtaken: B does not fit beside A; C would, but it came after B
    ([(6, 2), (8, 2), (2, 2)], 8, 8, {"max_kv_tokens": 11},
     ["A6", "A1", "B8", "B1", "C2", "C1"]),
    # the smallest budget, and the smallest batch
    ([(3, 2), (1, 2)], 8, 1, {}, ["A1", "A1", "A1", "A1", "B1", "B1"]),
    ([(3, 2), (1, 2)], 1, 2, {}, ["A2", "A1", "A1", "B1", "B1"]),
    # the last token of a prompt is handed out like a decode
    ([(5, 2), (4, 2)], 8, 4, {}, ["A4", "A1 B3", "A1 B1", "B1"]),
    # a late arrival, and steps in which there is nothing to do
    ([(2, 2), (3, 2)], 8, 8, {"arrivals": [3, 1]}, ["B3", "B1", "A2", "A1"]),
])
def test_plans(sizes, max_batch, token_budget, more, expected):
    assert plans(sizes, max_batch=max_batch, token_budget=token_budget, **more) == expected


def test_none_is_admitted_while_the_running_ones_have_a_budget_full_to_do():
    """A place is free, but there is nothing that a fourth request could compute in this step."""
    scheduler, running = Scheduler(max_batch=4, token_budget=6), []
    queue(scheduler, [Request([0] * n, name=name) for name, n in (("A", 3), ("B", 9), ("C", 3))])
    for step in range(4):
        plan = scheduler.schedule(step)
        running.append(" ".join(f"{request.name}{request.todo}" for request in scheduler.running))
        finish(scheduler, plan)
    # 3 + 9 are at least 6, so C waits; 1 + 6 still; then 2
    assert running == ["A3 B9", "A1 B6", "A1 B1 C3", "A1 B1 C1"]


def test_requests_are_added_in_order_of_arrival():
    scheduler = Scheduler(1, 1)
    early, late, tie = (prepare(Request([0], name=name, arrival=arrival), CONFIG)[0]
                        for name, arrival in [("early", 3), ("late", 4), ("tie", 4)])
    scheduler.add(late)
    with pytest.raises(ValueError, match="request 'early' arrives before request 'late': add it"):
        scheduler.add(early)
    scheduler.add(tie)
    assert list(scheduler.waiting) == [late, tie]   # nothing has come of the one that was refused


@pytest.mark.parametrize("cancel, expected", [
    ([(1, "A")], ["A4", "B2 C2", "B1 C2", "B1", "B1"]),          # while it prefills
    ([(3, "A")], ["A4", "A2 B2", "A1 B1", "B1 C3", "B1 C1"]),    # while it decodes
    ([(0, "A"), (0, "C")], ["B2", "B1", "B1", "B1"]),            # while it waits
])
def test_cancel_frees_the_place_and_the_reservation_in_any_state(cancel, expected):
    limits = dict(max_batch=2, token_budget=4, max_kv_tokens=20)
    assert plans([(6, 4), (2, 4), (4, 1)], cancel=cancel, **limits) == expected


SCHEDULERS = {
    "reserving": lambda: Scheduler(max_batch=2, token_budget=8, max_kv_tokens=40),
    "paged": lambda: PagedScheduler(2, 8, Pages(20, 2)),
    **{policy: lambda policy=policy: FairScheduler(2, 8, Pages(20, 2), policy)
       for policy in POLICIES},
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_of_many_marked_requests_none_is_computed(kind):
    """More of them stand at the front of the queue than can be admitted in a step."""
    scheduler = SCHEDULERS[kind]()
    requests = queue(scheduler, [Request([0] * 3, 1, name=f"r{i}-") for i in range(30)])
    for request in requests[:25]:
        request.cancel()
    computed = {part.split("-")[0] for plan in run(scheduler) for part in plan.split()}
    assert computed == {f"r{i}" for i in range(25, 30)}
    assert {request.finish_reason for request in requests[:25]} == {"cancelled"}


@settings(max_examples=examples(300), deadline=None, derandomize=True)
@given(sizes=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 12)), min_size=1, max_size=8),
       max_batch=st.integers(1, 9), token_budget=st.integers(1, 30),
       slack=st.one_of(st.none(), st.integers(0, 100)))
def test_limits_hold_and_the_budget_is_used(sizes, max_batch, token_budget, slack):
    need = max(min(prompt + new - 1, 64) for prompt, new in sizes)
    scheduler = Scheduler(max_batch, token_budget, None if slack is None else need + slack)
    queue(scheduler, [Request([0] * prompt, new) for prompt, new in sizes])
    for step in range(sum(prompt + new for prompt, new in sizes)):
        if not scheduler.busy:
            return
        plan, running = scheduler.schedule(step), scheduler.running
        decodes = [(request, 1) for request in running if request.todo == 1]
        assert plan[:len(decodes)] == decodes                            # all decodes, and first
        total, left = sum(n for _, n in plan), sum(request.todo for request in running)
        assert total == min(token_budget, left) > 0                      # as much as there is to do
        assert len(running) <= min(max_batch, token_budget)
        assert {request for request, _ in plan} == {*running}            # all of them go on
        assert sum(request.kv_tokens for request in running) <= scheduler.max_kv_tokens
        if scheduler.waiting:   # then there is a reason
            assert (len(running) == max_batch or left >= token_budget
                    or not scheduler.grant_room(scheduler.waiting[0]))
        finish(scheduler, plan)
    assert not scheduler.busy, "not done although each step computes at least one token"


class Watched(Request):
    """Counts how often an attribute of a request is read."""
    reads = 0

    def __getattribute__(self, name):
        Watched.reads += 1
        return super().__getattribute__(name)


def reads_per_step(waiting, arrival, scheduler):
    """Of the attributes of so many waiting requests, while two others run and finish."""
    queue(scheduler, [Request([0] * 4, 3, name="A"), Request([0] * 9, 3, name="B"),
                      *(Watched([0] * 4, 3, name=f"w{i}", arrival=arrival)
                        for i in range(waiting))])
    reads = []
    for step in range(6):
        assert scheduler.busy
        Watched.reads = 0
        assert scheduler.busy
        finish(scheduler, scheduler.schedule(scheduler.next_step(step)))
        reads.append(Watched.reads)
    # in step 0 a FairScheduler ranks all that arrive
    return reads[1:] if isinstance(scheduler, FairScheduler) else reads


@pytest.mark.parametrize("kind, arrival", [
    *((kind, 0) for kind in SCHEDULERS), ("reserving", 100), ("paged", 100)])
def test_a_step_does_not_look_at_every_waiting_request(kind, arrival, monkeypatch):
    new = SCHEDULERS[kind]
    few, many = reads_per_step(10, arrival, new()), reads_per_step(1000, arrival, new())
    # a heap or a sorted queue may look at a few more
    assert all(b <= a + 40 * (kind in POLICIES) for a, b in zip(few, many)) and any(many)

    def arrived(self, step):   # a mutant that looks for all that have arrived
        return any([request.arrival <= step for request in self.waiting])

    monkeypatch.setattr(Scheduler, "arrived", arrived)
    assert sum(reads_per_step(1000, arrival, new())) > sum(many) + 1000


@pytest.mark.parametrize("arguments, message", [
    (dict(prompt=[]), "request 'r7': the prompt is empty"),
    (dict(max_new_tokens=0), "max_new_tokens must be a whole number of at least 1, not 0"),
    (dict(max_new_tokens=True), "max_new_tokens"),
    (dict(temperature=-0.1), "temperature must be a number of at least 0, not -0.1"),
    *((dict(temperature=t), "temperature") for t in (math.nan, math.inf, "hot")),
    (dict(top_k=0), "top_k"),
    *((dict(arrival=arrival), "arrival") for arrival in (-1, 1.5)),
    (dict(priority=-1), "priority"),
    *((dict(prompt=prompt), "prompt must be a list of token ids") for prompt in ([1.5], None, "a")),
    *((dict(seed=seed), f"seed must be a whole number of at least 0, not {seed!r}")
      for seed in ("x", -1)),
    (dict(eos_token=1.0), "eos_token must be a whole number"),
])
def test_a_request_refuses_bad_values(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        Request(**{"prompt": [1], "name": "r7", **arguments})
    assert "request 'r7'" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("requests, message", [
    ([], "there are no requests"),
    ([Request([1] * 65, name="long")],
     "request 'long': prompt of 65 tokens does not fit block_size 64"),
    ([Request([1, 10], name="odd")], "request 'odd': token id 10 is not in the vocabulary, 0 to 9"),
    ([Request([-1])], "request 'r0': token id -1"),
    ([Request([1], name="x"), Request([2], name="x")], "request 'x' appears 2 times: each needs"),
])
def test_prepare_refuses_what_the_model_cannot_run_before_anything_ran(requests, message):
    with pytest.raises(ValueError, match=message):
        prepare(requests, CONFIG)


def test_token_ids_of_any_library():
    for prompt in torch.tensor([1, 2]), numpy.array([1, 2]), (1, 2), range(1, 3):
        request = Request(prompt)
        assert request.prompt == [1, 2] and all(type(token) is int for token in request.prompt)


def test_a_slice_of_the_tokens_is_what_it_is_of_the_whole_list():
    request, = prepare(Request([5, 6, 7], 4), CONFIG)
    for token in 8, 9:
        request.append(token)
    for start in range(6):
        for end in range(start, 7):
            assert request.slice(start, end) == [5, 6, 7, 8, 9][start:end]
    request.slice(0, 5).append(0)
    request.tokens.append(0)
    assert request.tokens == [5, 6, 7, 8, 9]   # both are copies


def test_a_request_may_still_be_imported_from_scheduler():
    assert scheduler.Request is Request


def test_automatic_names_keep_clear_of_given_ones():
    requests = [Request([1], name="r1"), Request([1]), Request([1]), Request([1], name="r2")]
    prepare(requests, CONFIG)
    assert [request.name for request in requests] == ["r1", "r0", "r3", "r2"]
    same = Request([1])
    with pytest.raises(ValueError, match="appears 2 times"):
        prepare([same, same], CONFIG)


def test_a_request_runs_once():
    request = prepare([Request([1, 2])], CONFIG)[0]
    request.computed = 1
    with pytest.raises(ValueError, match=r"request 'r0' has already run: "
                                         r"dataclasses\.replace\(request\) makes a new one"):
        prepare([request], CONFIG)
    prepare([replace(request)], CONFIG)   # a copy is a new request


@pytest.mark.parametrize("limits", [
    dict(max_batch=0), dict(token_budget=0), dict(max_kv_tokens=0), dict(max_batch=1.5),
    dict(token_budget="8"),
])
def test_the_scheduler_refuses_bad_limits(limits):
    name = next(iter(limits))
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1"):
        Scheduler(**{"max_batch": 1, "token_budget": 1, **limits})


@pytest.mark.parametrize("module", ["scheduler", "paging"])
def test_the_bookkeeping_knows_no_tensors(module):
    code = (f"import sys, {module} as module; assert 'torch' not in sys.modules; "
            "assert not {'torch', 'numpy', 'time'} & set(vars(module))")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)


class RaggedEngine(Engine):
    """add, step, cancel and failing steps in any order, with reserved room."""

    @initialize(max_batch=st.integers(1, 5), budget=st.integers(1, 12),
                room=st.integers(BLOCK_SIZE, 80))
    def begin(self, max_batch, budget, room):
        self.scheduler = Scheduler(max_batch, budget, room)

    def lay_out(self, plan):
        return Flat(plan)

    @invariant()
    def books_are_right(self):
        running = self.scheduler.running
        assert sum(request.kv_tokens for request in running) <= self.scheduler.max_kv_tokens
        for request in self.requests:
            if request not in running:
                assert request.kv is None
            elif request.kv:
                buffers = [*request.kv.k.values(), *request.kv.v.values()]
                assert {buffer.size(-2) for buffer in buffers} <= {request.kv_tokens}
        assert all(request.computed == 0 for request in self.scheduler.waiting)


RaggedEngine.TestCase.settings = settings(
    max_examples=examples(60), stateful_step_count=25, deadline=None, derandomize=True,
    suppress_health_check=list(HealthCheck))
TestRaggedEngine = RaggedEngine.TestCase
