"""Golden plans, what holds of all plans, and what a Request, a run and a Scheduler refuse."""
import math
from dataclasses import replace

import numpy
import pytest
import torch
from common import (
    BLOCK_SIZE,
    CONFIG,
    STAGES,
    examples,
    finish,
    queue,
    run,
    smallest_pool,
    toy,
    workloads,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from beyond.fairness import POLICIES, FairScheduler
from generate_prefix import PrefixScheduler
from paging import PagedScheduler
from request import Request, prepare
from scheduler import Scheduler


@pytest.mark.parametrize("limits, requests, expected", [
    # first come, first served
    ((8, 4), {"A": (5, 1), "B": (6, 1), "C": (2, 1)}, ["A4", "A1 B3", "B3 C1", "C1"]),
    # none is overtaken: B does not fit beside A; C would, but it came after B
    ((8, 8, 11), {"A": (6, 2), "B": (8, 2), "C": (2, 2)},
     ["A6", "A1", "B8", "B1", "C2", "C1"]),
    # the smallest budget, and the smallest batch
    ((8, 1), {"A": (3, 2), "B": (1, 2)}, ["A1", "A1", "A1", "A1", "B1", "B1"]),
    ((1, 2), {"A": (3, 2), "B": (1, 2)}, ["A2", "A1", "A1", "B1", "B1"]),
    # the last token of a prompt is handed out like a decode
    ((8, 4), {"A": (5, 2), "B": (4, 2)}, ["A4", "A1 B3", "A1 B1", "B1"])])
def test_plans(limits, requests, expected):
    assert run(Scheduler(*limits), requests) == expected


CANCELS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=3)


def plans_are_right(case, cancel):
    """
    `run` asserts the limits. With pages enough, paged plans as ragged does; with pages that are
    never full, prefix plans as paged does; and a fair scheduler that is not bound, as prefix.
    """
    requests, pressure = case
    limits, size = (pressure["max_batch"], pressure["token_budget"]), pressure["page_size"]

    def plans(scheduler):
        return run(scheduler, [*map(replace, requests)],
                   lambda request: len(request.tokens) // 7 % 2, cancel)

    plans(Scheduler(*limits, pressure["max_kv_tokens"]))
    enough = sum(smallest_pool([request], size) for request in requests)
    assert plans(Scheduler(*limits)) == plans(PagedScheduler(*limits, enough, size))
    few, large = pressure["pages"] or enough, BLOCK_SIZE + 1
    plans(PagedScheduler(*limits, few, size))
    for number in 1, 3:
        paged, prefix = (kind(*limits, number, large) for kind in (PagedScheduler, PrefixScheduler))
        assert plans(paged) == plans(prefix) and not prefix.pages.cached
    fair = FairScheduler(*limits, few, size, "fcfs", bound=10**9)
    assert plans(PrefixScheduler(*limits, few, size)) == plans(fair)


@settings(max_examples=examples(400))
@given(case=workloads(), cancel=CANCELS)
def test_plans_keep_the_limits_and_those_of_several_schedulers_are_equal(case, cancel):
    plans_are_right(case, cancel)


def test_what_can_never_fit_is_refused_by_name_with_the_numbers():
    requests = {"A": (3, 3), "B": (9, 8)}   # the last token is never computed: 16 places
    for new, need, size in [
            (lambda n: Scheduler(4, 8, n), 16, 1),
            *((lambda n, kind=kind, size=size: kind(4, 8, n, size), need, size)
              for kind in (PagedScheduler, PrefixScheduler)
              for size, need in ((1, 16), (5, 4), (2, 8)))]:
        there = (f"'B'.* 9 .* 8, less the last token, needs 16 KV tokens, "
                 f"there are {(need - 1) * size}")
        with pytest.raises(ValueError, match=there):
            run(new(need - 1), requests)
        run(new(need), requests)
        run(new(24), {"A": (3, 3), "B": (9, 10**9)})   # the context limits what it can need


def test_requests_are_added_in_order_of_arrival():
    scheduler, early = Scheduler(1, 1), prepare(Request([0], name="early", arrival=3), CONFIG)[0]
    queued = queue(scheduler, [Request([0], name=name, arrival=4) for name in ("late", "tie")])
    with pytest.raises(ValueError, match="request 'early' arrives before request 'tie': add it"):
        scheduler.add(early)
    assert list(scheduler.waiting) == queued   # nothing has come of the one that was refused


def test_if_nothing_can_go_on_it_raises_and_names_who_is_stuck():
    """Whether one of them runs or not; it does not wait for ever."""
    for method, value, running in (("grant_room", False, 0), ("share_budget", [], 1)):
        scheduler = Scheduler(2, 8)
        queue(scheduler, [Request([0] * 3, 2, name="A", arrival=3), Request([0], arrival=3)])
        setattr(scheduler, method, lambda *_: value)
        assert scheduler.schedule(2) == []   # nothing has arrived
        with pytest.raises(RuntimeError, match="'A' has arrived at step 3, but nothing can go on"):
            scheduler.schedule(3)
        assert len(scheduler.running) == 2 * running


class Watched(Request):
    """Counts how often an attribute of a request is read."""
    reads = 0

    def __getattribute__(self, name):
        Watched.reads += 1
        return super().__getattribute__(name)


def reads_per_step(scheduler, waiting):
    """Of so many waiting requests, while others run and finish; B is overtaken, and becomes due."""
    queue(scheduler, [Request([0] * 4, 3, name="A"), Watched([0] * 9, 3, name="B", priority=1),
                      *(Watched([0] * 4, 3) for _ in range(waiting))])
    reads = []
    for step in range(9):
        Watched.reads = 0
        finish(scheduler, scheduler.schedule(scheduler.next_step(step)))
        reads.append(Watched.reads)
    return reads[isinstance(scheduler, FairScheduler):]   # it ranks all that arrive, in step 0


@pytest.mark.parametrize("new, more", [   # more: a sorted queue may look at a few
    (lambda: Scheduler(2, 8, 40), 0), (lambda: PagedScheduler(2, 8, 20, 2), 0),
    (lambda: PrefixScheduler(2, 8, 20, 2), 0),
    *((lambda policy=policy: FairScheduler(2, 8, 20, 2, policy, bound=2), 40)
      for policy in POLICIES)], ids=["reserving", "paged", "prefix", *POLICIES])
def test_a_step_does_not_look_at_every_waiting_request(new, more):
    few, many = (reads_per_step(new(), waiting) for waiting in (10, 1000))
    assert all(b <= a + more for a, b in zip(few, many)) and any(many)


# --- what a Request, a run and a Scheduler refuse -------------------------------------------------

@pytest.mark.parametrize("message, name, values", [
    ("the prompt is empty", "prompt", [[]]), ("token ids", "prompt", [[1.5], None, "a"]),
    ("at least 1", "max_new_tokens", [0, True]), ("at least 1", "top_k", [0]),
    ("at least 0", "temperature", [-0.1, math.nan, math.inf, "hot", True, numpy.True_, None]),
    ("above 0 and at most 1", "top_p", [0, 1.1, math.nan, True, "x", torch.tensor(0.0)]),
    ("at least 0", "arrival", [-1, 1.5]), ("at least 0", "priority", [-1]),
    ("at least 0", "seed", [-1]),
    ("whole number", "eos_token", [1.0, "ab", True, [1, None], [1, -1]])])
def test_a_request_refuses_bad_values(message, name, values):
    for value in values:
        with pytest.raises(ValueError, match=message) as error:
            Request(**{"prompt": [1], "name": "r7", name: value})
        said = str(error.value)
        assert "request 'r7'" in said and name in said and "\n" not in said


@pytest.mark.parametrize("name", ["a\nb", "a\u2028b", "\x1b[31m", "\0", "\ud800", 5, None])
def test_a_request_has_a_name_that_fits_in_a_line(name):
    with pytest.raises(ValueError, match="^request: name must be a string of printable") as error:
        Request([1], name=name)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("odd", [None, 5, "ab", {"a": 1}, {Request([1]): 1}, [None], [[1, 2]]])
def test_a_run_is_of_requests(odd):
    for generate in STAGES.values():
        with pytest.raises(ValueError, match="^requests must be Requests, not "):
            generate(toy(), odd)


def has_run():
    request, = prepare(Request([1, 2]), CONFIG)
    request.computed = 1
    return request


@pytest.mark.parametrize("requests, message", [
    ([], "there are no requests"),
    ([Request([1] * 25, name="long")],
     "request 'long': prompt of 25 tokens does not fit block_size 24"),
    ([Request([1, 13], name="odd")], "request 'odd': token id 13 is not in the vocabulary, 0 to"),
    ([Request([-1])], "request 'r0': token id -1"),
    ([Request([1], name="x"), Request([2], name="x")], "request 'x' appears 2 times: each needs"),
    ([Request([1])] * 2, "appears 2 times"),
    ([has_run()], r"request 'r0' has already run: dataclasses\.replace\(request\) makes a new")])
def test_prepare_refuses_what_the_model_cannot_run_before_anything_ran(requests, message):
    with pytest.raises(ValueError, match=message):
        prepare(requests, CONFIG)


def test_what_is_taken():
    """Token ids of any library, names that keep clear of given ones, a copy of what has run."""
    for prompt in torch.tensor([1, 2]), numpy.array([1, 2]), (1, 2), range(1, 3):
        request = Request(prompt)
        assert request.prompt == [1, 2] and all(type(token) is int for token in request.prompt)
    for number in numpy.int32(2), torch.tensor(2), numpy.array(2):
        request = Request([1], number, number, number, seed=number, eos_token=number)
        assert type(request.seed) is type(request.eos_token) is type(request.top_k) is int
    assert Request([1], temperature=numpy.float32(0.5), top_p=torch.tensor(0.5)).top_p == 0.5
    assert type(Request([1], temperature=10**300).temperature) is float   # torch divides by it
    for ends in ([3, 2], {2, 3}, torch.tensor([3, 2]), numpy.array([3, 2])):
        assert {*Request([1], eos_token=ends).ends} == {2, 3}
    requests = [Request([1], name="r1"), Request([1]), Request([1]), Request([1], name="r2")]
    prepare(requests, CONFIG)
    assert [request.name for request in requests] == ["r1", "r0", "r3", "r2"]
    prepare(replace(has_run()), CONFIG)
