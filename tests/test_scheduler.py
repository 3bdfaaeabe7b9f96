"""
A table of plans, for all schedulers; what holds of every plan; and what a Scheduler, a Request and
a run refuse.
"""
import gc
import math
import random
from collections import Counter
from dataclasses import replace
from types import FunctionType, ModuleType

import numpy
import pytest
import torch
from common import CONFIG, STAGES, examples, finish, queue, run, smallest_pool, toy, workloads
from hypothesis import given, settings
from hypothesis import strategies as st

from beyond.fairness import MAX_OVERTAKEN, POLICIES, SCHEDULERS, FairScheduler
from generate_prefix import PrefixScheduler
from paging import PagedScheduler
from request import Request, prepare
from scheduler import Scheduler

PLAIN, PAGED, PREFIX, FAIR = Scheduler, PagedScheduler, PrefixScheduler, FairScheduler
FIVE = {"A": (6, 1, 2), "B": (3, 1, 1), "C": (5, 3, 0), "D": (3, 1, 1), "E": (1, 1, 0, 1)}
L_FIRST = {"L": (20, 1), **dict.fromkeys("abcd", (1, 1))}

# b makes room, and must not come back in the same step, although a's pages would be found
TWINS = (PREFIX, (2, 16, 4, 2), {"a": ([1, 1], 5), "b": ([1, 1], 5)},
         ["a2 b2", "a1 b1", "a1 b1", "a1", "a1 b1", "b1"],
         dict(preemptions=1, shared_pages=2, saved_tokens=4, evicted_pages=2))

GOLDEN = [
    TWINS,
    # scheduler, its limits; {name: (prompt, or its length; new tokens; priority; arrival)};
    # what each step computes; what is counted; (step, n): the n-th is cancelled before that step

    # first come, first served
    (PLAIN, (8, 4), {"A": (5, 1), "B": (6, 1), "C": (2, 1)}, ["A4", "A1 B3", "B3 C1", "C1"], {}),
    # none is overtaken: B does not fit beside A; C would, but it came after B
    (PLAIN, (8, 8, 11), {"A": (6, 2), "B": (8, 2), "C": (2, 2)},
     ["A6", "A1", "B8", "B1", "C2", "C1"], {}),
    # the last token needs no room: both fit, and no third
    (PLAIN, (8, 16, 14), {"A": (6, 2), "B": (6, 2), "C": (1, 1)}, ["A6 B6", "A1 B1", "C1"], {}),
    # the smallest batch
    (PLAIN, (1, 2), {"A": (3, 2), "B": (1, 2)}, ["A2", "A1", "A1", "B1", "B1"], {}),

    (PAGED, (2, 16, 4, 2), {"a": (2, 5), "b": (2, 5)},
     ["a2 b2", "a1 b1", "a1 b1",   # two pages each, and all are full
      "a1",                        # b makes room: for a third page, of which it leaves one free
      "a1",                        # 7 tokens, 6 of them computed: a is done
      "b5",                        # its prompt and the three tokens that it had
      "b1"], dict(preemptions=1)),
    # a takes the last page; b, which needs one too, is the last to arrive: it preempts itself
    (PAGED, (2, 16, 3, 2), {"a": (2, 3), "b": (2, 3)}, ["a2 b2", "a1", "a1", "b3", "b1"],
     dict(preemptions=1)),
    # c is preempted, then b; b arrived first, and returns first; c is preempted once more
    (PAGED, (3, 16, 7, 1), {"a": (2, 6), "b": (2, 5), "c": (2, 3)},
     ["a2 b2 c2", "a1 b1", "a1", "a1", "a1", "a1", "b4 c3", "b1", "b1", "c4"],
     dict(preemptions=3)),

    # there are no pages for both; but in the same step b shares the seven that a fills
    (PREFIX, (2, 64, 9, 2), {"a": ([0] * 15, 2), "b": ([0] * 14 + [1], 2)},
     ["a15 b1", "a1 b1"], dict(shared_pages=7, saved_tokens=14)),
    # eight answers to one prompt: it is computed once, and each computes its last token
    (PREFIX, (8, 64, 64, 4), {name: ([0] * 9, 2) for name in "abcdefgh"},
     ["a9 b1 c1 d1 e1 f1 g1 h1", "a1 b1 c1 d1 e1 f1 g1 h1"],
     dict(shared_pages=14, saved_tokens=56)),
    # of a chunk, b shares the full pages; the rest of the prompt both compute
    (PREFIX, (2, 5, 9, 2), {"a": ([0] * 7, 1), "b": ([0] * 7, 1)}, ["a5", "a2 b1"],
     dict(shared_pages=3, saved_tokens=6)),
    # a newcomer needs room for its whole prompt, but takes pages chunk by chunk: so b, which has
    # come as far as the page that is still free, is not the one that must go
    (PAGED, (2, 4, 5, 2), {"a": (2, 3), "b": (6, 1)}, ["a2 b2", "a1 b3", "a1 b1"], {}),
    # all pages of a prompt are cached, and leave a query: two full pages of four hold it
    (PREFIX, (1, 8, 8, 4), {"a": ([0] * 8, 2), "b": ([0] * 8, 2)}, ["a8", "a1", "b4", "b1"],
     dict(shared_pages=1, saved_tokens=4)),
    # the page that a request fills with its last pass is found when that request is gone
    (PREFIX, (1, 8, 8, 4), {"a": ([0] * 4, 1), "b": ([0] * 6, 1)}, ["a4", "b2"],
     dict(shared_pages=1, saved_tokens=4)),
    # pages that are found may be the only free ones: with one for its last token, c needs three
    (PREFIX, (2, 16, 4, 2), {"a": ([1] * 4, 1), "b": ([2, 2], 3), "c": ([1] * 5, 1)},
     ["a4 b2", "b1", "b1", "c1"], dict(shared_pages=2, saved_tokens=4, evicted_pages=1)),
    # "sat down" has other keys after "the cat" (1 1 5 5) than after "a dog" (8 8 5 5). Of "a dog
    # sat down", d finds c's "a dog" only, although b's "sat down" can be found
    (PREFIX, (2, 16, 4, 2), {"a": ([1, 1], 1), "b": ([1, 1, 5, 5, 6], 2), "c": ([8, 8], 1),
                             "d": ([8, 8, 5, 5, 0], 1)},
     ["a2 b3", "b1 c2", "d3"], dict(shared_pages=2, saved_tokens=4, evicted_pages=2)),
    # the least recently used page is taken first, and of one request the last. d finds page "1"
    # and takes "1 2"; e takes "3", which h misses; f finds "4", takes "1 9", and g still finds "1"
    (PREFIX, (1, 8, 4, 1), {"a": ([1, 2], 1), "b": ([3], 1), "c": ([4], 1), "d": ([1, 9], 1),
                            "e": ([5], 1), "f": ([4, 6], 1), "g": ([1, 9, 7], 1),
                            "h": ([3, 8], 1)},
     ["a2", "b1", "c1", "d1", "e1", "f1", "g2", "h2"],
     dict(shared_pages=3, saved_tokens=3, evicted_pages=7)),

    # policies are sort keys
    (FAIR, (1, 64, 64, 1, "fcfs"), FIVE, ["A6", "B3", "C5", "C1", "C1", "D3", "E1"], {}),
    (FAIR, (1, 64, 64, 1, "sjf"), FIVE, ["B3", "E1", "D3", "A6", "C5", "C1", "C1"], {}),
    (FAIR, (1, 64, 64, 1, "priority"), FIVE, ["C5", "C1", "C1", "E1", "B3", "D3", "A6"], {}),
    # a grows, and c makes room; then b, which is urgent, though the last to arrive, and a does: it
    # was planned already, and gives its token back
    (FAIR, (8, 64, 3, 4, "priority"), {"a": (3, 9, 1), "c": (3, 9, 1), "b": (3, 9, 0, 1)},
     ["a3 c3", "a1 c1 b3", "a1 b1", *["b1"] * 7, "a6", *["a1"] * 5, "c5", *["c1"] * 6],
     dict(preemptions=2, evicted_pages=6)),
    # a job's rank does not change: J, by then a short one, makes room for K, and waits behind L
    (FAIR, (8, 64, 10, 1, "sjf"), {"J": (2, 9), "K": (2, 7, 0, 3), "L": (4, 6, 0, 5)},
     ["J2", "J1", "J1", "J1 K2", "J1 K1", "K1", "K1 L4", "K1", "K1", "K1", "L3", "L1", "L1",
      "L1", "L1", "J7", "J1", "J1", "J1"],
     dict(preemptions=2, shared_pages=2, saved_tokens=2, evicted_pages=26)),
    # the example of the docstring
    (FAIR, (1, 64, 64, 16, "sjf", 3), L_FIRST, ["a1", "b1", "c1", "L20", "d1"], {}),
    # a request that was cancelled while it waited has overtaken no other, and is never due
    (FAIR, (1, 64, 64, 16, "sjf", 3), L_FIRST | {"e": (1, 1)}, ["a1", "b1", "c1", "L20"], {},
     (0, 4), (0, 5)),
    (FAIR, (1, 64, 64, 16, "sjf", 1), L_FIRST, ["a1", "b1", "c1", "d1"], {}, (0, 0)),
    # no stream of short prompts stops a longer one in the middle: each takes what L leaves
    (FAIR, (3, 4, 64, 4, "sjf"),
     {"a": (2, 2), "L": (4, 9), "s": (3, 2, 0, 1), "t": (3, 2, 0, 2)},
     ["a2 L2", "a1 L2 s1", "L1 s2 t1", "L1 s1 t2", "L1 t1", *["L1"] * 5], {})]


@pytest.mark.parametrize("kind, limits, requests, plans, counts, cancel",
                         [(*row[:5], row[5:]) for row in GOLDEN])
def test_golden_plans(kind, limits, requests, plans, counts, cancel):
    scheduler = kind(*limits)
    assert run(scheduler, requests, lambda request: 7, cancel) == plans
    assert kind is PLAIN or +scheduler.pool.counts == counts


# --- what holds of all plans (`run` asserts the limits) -------------------------------------------

CANCELS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), max_size=3)


def plans_are_right(case, cancel):
    """
    With pages enough, paged plans as ragged does; with pages that are never full, prefix plans as
    paged does; and a fair scheduler that is not bound, as prefix.
    """
    requests, pressure = case
    limits, size = (pressure["max_batch"], pressure["token_budget"]), pressure["page_size"]

    def plans(scheduler):
        return run(scheduler, [*map(replace, requests)],
                   lambda request: len(request.tokens) // 7 % 2, cancel)

    plans(Scheduler(*limits, pressure["max_kv_tokens"]))
    enough = sum(smallest_pool([request], size) for request in requests)
    assert plans(Scheduler(*limits)) == plans(PagedScheduler(*limits, enough, size))
    few, large = pressure["pages"] or enough, CONFIG.block_size + 1
    plans(PagedScheduler(*limits, few, size))
    for number in 1, 3:
        paged, prefix = (kind(*limits, number, large) for kind in (PagedScheduler, PrefixScheduler))
        assert plans(paged) == plans(prefix) and not prefix.pool.cached
    fair = FairScheduler(*limits, few, size, "fcfs", bound=10**9)
    assert plans(PrefixScheduler(*limits, few, size)) == plans(fair)
    plans(pressure["scheduler_class"](*limits, few, size))


@settings(max_examples=examples(400))
@given(case=workloads(), cancel=CANCELS)
def test_plans_keep_the_limits_and_those_of_several_schedulers_are_equal(case, cancel):
    plans_are_right(case, cancel)


@settings(max_examples=examples(400))
@given(case=workloads(), bound=st.sampled_from([0, 1, 2, MAX_OVERTAKEN]), cancel=CANCELS,
       policy=st.sampled_from(list(POLICIES)), more=st.integers(0, 20))
def test_no_request_starves(case, bound, policy, more, cancel):
    """
    None is overtaken or preempted more often than the bound says, from the smallest pool up, and
    all are done within as many steps as that allows. (Every step computes something: see `run`.)
    What makes room is the last in rank, by the rank with which it was admitted.
    """
    requests, pressure = case
    size, admitted, preempted, rank = pressure["page_size"], [], Counter(), {}

    class Noting(FairScheduler):
        def preempt(self, request):
            assert self.rank[request] == max(rank[other.name] for other in self.running)
            preempted[request.name] += 1
            super().preempt(request)

        def admit(self, request):
            rank[request.name], n = self.rank[request], number[request.name]
            admits = super().admit(request)
            if admits and request.name not in admitted:
                assert sum(number[other] > n for other in admitted) <= bound
                assert len(admitted) <= n + bound
                admitted.append(request.name)
            return admits

        def release(self):
            assert all(self.rank[request] == rank[request.name] for request in self.running)
            super().release()

    pages = smallest_pool(requests, size) + more
    scheduler = Noting(pressure["max_batch"], pressure["token_budget"], pages, size, policy, bound)
    number = {r.name: n for n, r in enumerate(sorted(requests, key=lambda r: r.arrival))}
    plans = run(scheduler, [*map(replace, requests)], lambda request: len(request.generated) % 2,
                cancel)
    assert len(plans) <= (bound + 1) * sum(len(r.prompt) + r.max_new_tokens for r in requests)
    assert max(preempted.values(), default=0) <= bound
    assert len(scheduler.pool.free_queue) == pages
    left = {*scheduler.rank, *scheduler.times_preempted, *scheduler.never_admitted}
    assert all(r.finish_reason == "cancelled" and r in scheduler.never_admitted for r in left)


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


@pytest.mark.parametrize("kind, limits, more", [   # more: a sorted queue may look at a few
    (PLAIN, (40,), 0), (PAGED, (20, 2), 0), (PREFIX, (20, 2), 0),
    *((FAIR, (20, 2, policy, 2), 40) for policy in POLICIES)])
def test_a_step_does_not_look_at_every_waiting_request(kind, limits, more):
    few, many = (reads_per_step(kind(2, 8, *limits), waiting) for waiting in (10, 1000))
    assert all(b <= a + more for a, b in zip(few, many)) and any(many)


def reachable(thing):
    """The number of objects that it holds, however deep."""
    seen, found = {}, [thing]
    while found:
        each = found.pop()
        if id(each) not in seen and not isinstance(each, (type, ModuleType, FunctionType)):
            seen[id(each)] = each
            found += gc.get_referents(each)
    return len(seen)


@pytest.mark.parametrize("policy", [None, "fcfs", "sjf"])
def test_what_has_finished_leaves_nothing_behind(policy):
    """Of 50 requests, and of 200; but the pages that can be found may be others."""
    kind, rng, counts = SCHEDULERS.get(policy, PagedScheduler), random.Random(0), []
    scheduler = kind(16, 96, 24, 6)
    stems = [[rng.randrange(10) for _ in range(n)] for n in (0, 0, 6, 14)]
    for number in 50, 150:   # some share a prefix, some are cancelled
        requests = [Request(rng.choice(stems) + [rng.randrange(10) for _ in range(
            rng.randint(1, 9))], rng.randint(1, 12)) for _ in range(number)]
        cancel = [(rng.randrange(number // 3), n) for n in range(0, number, 9)]
        run(scheduler, requests, lambda request: rng.randrange(10), cancel)
        del requests
        gc.collect()
        counts.append(reachable(scheduler))
    assert counts[1] <= counts[0] + 24   # a hash for each page
    assert scheduler.pool.counts["preemptions"]
    assert policy is None or scheduler.pool.counts["evicted_pages"] > 50


# --- what a Scheduler, a Request and a run refuse -------------------------------------------------

def test_what_can_never_fit_is_refused_by_name_with_the_numbers():
    requests = {"A": (3, 3), "B": (9, 8)}   # the last token is never computed: 16 places
    for kind, size, need in ((PLAIN, 1, 16), *((kind, size, need) for kind in (PAGED, PREFIX)
                                               for size, need in ((1, 16), (5, 4), (2, 8)))):
        def new(n):
            return kind(4, 8, n) if kind is PLAIN else kind(4, 8, n, size)

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
    for method, running in (("admit", 0), ("make_room", 2)):
        scheduler = Scheduler(2, 8)
        queue(scheduler, [Request([0] * 3, 2, name="A", arrival=3), Request([0], arrival=3)])
        assert scheduler.schedule(2) == []   # nothing has arrived
        if running:
            finish(scheduler, scheduler.schedule(3))
        setattr(scheduler, method, lambda *_: False)
        with pytest.raises(RuntimeError, match="'A' has arrived at step 4, but nothing can go on"):
            scheduler.schedule(4)
        assert len(scheduler.running) == running


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
