"""Golden plans: what the Scheduler hands out, step by step, and what a Request refuses."""
import math
from dataclasses import replace

import numpy
import pytest
import torch
from common import CONFIG, examples, finish, plans, queue
from hypothesis import given, settings
from hypothesis import strategies as st

from beyond.fairness import POLICIES, FairScheduler
from paging import PagedScheduler, Pages
from request import Request, prepare
from scheduler import Scheduler


@pytest.mark.parametrize("sizes, max_batch, token_budget, more, expected", [
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
    scheduler = Scheduler(max_batch, token_budget, more.get("max_kv_tokens"))
    assert plans(scheduler, sizes, more.get("arrivals"))[0] == expected


def test_requests_are_added_in_order_of_arrival():
    scheduler, early = Scheduler(1, 1), prepare(Request([0], name="early", arrival=3), CONFIG)[0]
    queued = queue(scheduler, [Request([0], name=name, arrival=4) for name in ("late", "tie")])
    with pytest.raises(ValueError, match="request 'early' arrives before request 'tie': add it"):
        scheduler.add(early)
    assert list(scheduler.waiting) == queued   # nothing has come of the one that was refused


@pytest.mark.parametrize("cancel, expected", [
    ([(1, "A")], ["A4", "B2 C2", "B1 C2", "B1", "B1"]),          # while it prefills
    ([(3, "A")], ["A4", "A2 B2", "A1 B1", "B1 C3", "B1 C1"]),    # while it decodes
    ([(0, "A"), (0, "C")], ["B2", "B1", "B1", "B1"]),            # while it waits
])
def test_cancel_frees_the_place_and_the_reservation_in_any_state(cancel, expected):
    scheduler = Scheduler(max_batch=2, token_budget=4, max_kv_tokens=20)
    assert plans(scheduler, [(6, 4), (2, 4), (4, 1)], cancel=cancel)[0] == expected


@settings(max_examples=examples(300))
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
    """Counts how often an attribute of a request is read, or one is compared with another."""
    reads = 0

    def __getattribute__(self, name):
        Watched.reads += 1
        return super().__getattribute__(name)

    def __eq__(self, other):
        Watched.reads += 1
        return self is other

    __hash__ = Request.__hash__


def reads_per_step(waiting, arrival, scheduler):
    """Of so many waiting requests, while others run and finish; B is overtaken, and becomes due."""
    queue(scheduler, [Request([0] * 4, 3, name="A"), Watched([0] * 9, 3, name="B", priority=1),
                      *(Watched([0] * 4, 3, name=f"w{i}", arrival=arrival)
                        for i in range(waiting))])
    reads = []
    for step in range(9):
        Watched.reads = 0
        assert scheduler.busy
        finish(scheduler, scheduler.schedule(scheduler.next_step(step)))
        reads.append(Watched.reads)
    return reads[isinstance(scheduler, FairScheduler):]   # it ranks all that arrive, in step 0


@pytest.mark.parametrize("new, arrivals", [
    (lambda: Scheduler(2, 8, 40), (0, 100)),
    (lambda: PagedScheduler(2, 8, Pages(20, 2)), (0, 100)),
    *((lambda policy=policy: FairScheduler(2, 8, Pages(20, 2), policy, bound=2), (0,))
      for policy in POLICIES)], ids=["reserving", "paged", *POLICIES])
def test_a_step_does_not_look_at_every_waiting_request(new, arrivals):
    more = 40 if isinstance(new(), FairScheduler) else 0   # a sorted queue may look at a few
    for arrival in arrivals:
        few, many = (reads_per_step(waiting, arrival, new()) for waiting in (10, 1000))
        assert all(b <= a + more for a, b in zip(few, many)) and any(many)


# --- what a Request, a run and a Scheduler refuse -------------------------------------------------

@pytest.mark.parametrize("arguments, message", [
    (dict(prompt=[]), "the prompt is empty"),
    (dict(max_new_tokens=0), "max_new_tokens .* at least 1"),
    (dict(max_new_tokens=True), "max_new_tokens"),
    *((dict(temperature=t), "temperature .* at least 0")
      for t in (-0.1, math.nan, math.inf, "hot")),
    (dict(top_k=0), "top_k"),
    *((dict(top_p=p), "top_p .* above 0 and at most 1")
      for p in (0, 1.1, math.nan, True, "x")),
    *((dict(arrival=arrival), "arrival") for arrival in (-1, 1.5)),
    (dict(priority=-1), "priority"),
    *((dict(prompt=prompt), "prompt .* token ids") for prompt in ([1.5], None, "a")),
    (dict(seed=-1), "seed .* at least 0"),
    (dict(eos_token=1.0), "eos_token .* whole number"),
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
    dict(max_batch=0), dict(max_batch=1.5), dict(token_budget="8"), dict(max_kv_tokens=0)])
def test_the_scheduler_refuses_bad_limits(limits):
    name, = limits
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1"):
        Scheduler(**{"max_batch": 1, "token_budget": 1, **limits})
