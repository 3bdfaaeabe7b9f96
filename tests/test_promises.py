"""What docstrings promise and a run hardly shows: memory that is held, places looked at, limits."""
from string import ascii_lowercase
from types import SimpleNamespace

import pytest
import torch
from common import BLOCK_SIZE, queue, run, toy
from torch import nn

import generate_prefix
import generate_unbatched
from beyond import hybrid, rollout, sessions, speculative
from beyond.fairness import SCHEDULERS, FairScheduler
from beyond.hybrid import Hybrid, HybridScheduler
from beyond.rollout import RolloutScheduler
from beyond.sessions import Session, SessionScheduler
from beyond.speculative import draft
from beyond.tensor_parallel import RowParallel, column_parallel
from cache import KV
from generate_naive import columns_for
from generate_prefix import PrefixScheduler
from generate_unbatched import Alone
from lab.compiled import optimize
from paging import PagedScheduler, PagePool
from request import Request, prepare


def test_a_static_batch_holds_no_room_beyond_the_context():
    requests = prepare([Request([1] * 5, 10**6), Request([1] * 9, 3)], toy().config)
    assert columns_for(requests) <= 9 + BLOCK_SIZE - 5


def test_a_guess_is_looked_up_in_the_requests_own_tokens():
    """A has 1 2 3 9 9; of B, nothing follows 1 2 3 yet."""
    a, b = prepare([Request([1, 2, 3, 9, 9], 9, name="A"), Request([4, 1, 2, 3], 9, name="B")],
                   toy().config)
    scheduler = SimpleNamespace(token_budget=64, pool=SimpleNamespace(page_size=16))
    for request in a, b:
        request.computed, request.block_table = request.todo - 1, [0]
    drafts = draft([(a, 1), (b, 1)], scheduler, {}, 4)
    assert drafts == {a: [9], b: []}
    a.computed = 0   # a prompt, no decode
    assert draft([(a, 5)], scheduler, {}, 9) == {a: []}


@pytest.mark.parametrize("most, budget, new, pages, numbers", [   # each is the limit once
    (2, 64, 9, 9, [2, 2]), (9, 2 + 7, 9, 9, [5, 2]), (9, 64, 3, 9, [2, 2]), (9, 64, 9, 2, [2, 2])])
def test_guesses_fit_into_budget_answer_and_pages(most, budget, new, pages, numbers):
    """Five tokens can be guessed. The last token of an answer is never computed."""
    requests = prepare([Request([1, 2, 3, 4, 5, 1], new) for _ in "AB"], toy().config)
    for request in requests:
        request.computed, request.block_table = 5, [0] * pages
    scheduler = SimpleNamespace(token_budget=budget, pool=SimpleNamespace(page_size=4))
    drafts = draft([(request, 1) for request in requests], scheduler, lookups := {}, most)
    assert [len(drafts[request]) for request in requests] == numbers
    assert [*lookups] == requests   # they are kept


@pytest.mark.parametrize("generate", [
    lambda model, requests, **knobs: speculative.generate(model, requests, guesses=0, **knobs),
    lambda model, requests, **knobs: sessions.generate(model, map(Session, requests), **knobs),
    lambda model, requests, **knobs: rollout.generate([model], [], requests, **knobs)])
def test_without_what_is_new_a_run_is_that_of_prefix_with_the_same_knobs(generate):
    runs = []
    for run_them in generate_prefix.generate, generate:
        requests = [Request([1] * n, 6, arrival=40 * (n == 2)) for n in (5, 4, 3, 2)]
        trace = run_them(toy(n_layer=1), requests, max_batch=2, token_budget=6, pages=7,
                         page_size=2)
        runs.append(([(p.step, p.work) for p in trace.passes], trace.counts))
    assert runs[0] == runs[1] and trace.counts["preemptions"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_keeps_no_view_of_the_whole_matrix(rank):
    whole = nn.Linear(8, 4)
    for part in RowParallel(whole, rank, 2, None), column_parallel(whole, rank, 2):
        assert part.weight.untyped_storage().nbytes() == whole.weight.nbytes // 2


def test_a_position_beyond_the_embeddings_is_refused_by_the_compiled_step_too():
    model = toy(dtype=torch.float32)
    fast = optimize(model)
    if fast is model:
        pytest.skip("there is no compiler")

    class Beyond(Alone):
        def lay_out(self, device):
            super().lay_out(device)
            self.positions += BLOCK_SIZE

    Beyond.__qualname__, Beyond.__module__ = Alone.__qualname__, Alone.__module__
    for each in model, fast:
        before, generate_unbatched.Alone = generate_unbatched.Alone, Beyond
        try:
            with pytest.raises(IndexError):
                generate_unbatched.generate(each, [Request([1, 2], 1)])
        finally:
            generate_unbatched.Alone = before


@pytest.mark.parametrize("passed_first", [True, False])
def test_passed_pages_are_taken_first_in_a_whole_run(passed_first):
    config = toy(n_layer=4).config
    scheduler = HybridScheduler(1, 4, 40, 2, [config.block_size, 4, 4, 4], passed_first)
    request, = prepare([Request([i % 5 for i in range(12)], 8)], config)
    scheduler.add(request)
    given_back = []
    give_back = scheduler.give_back

    def watched(table, end):
        passed = [page for page in table[:end] if page is not None]
        give_back(table, end)
        queue = list(scheduler.pool.free_queue)
        given_back.extend(passed)
        if passed:
            edge = queue[:len(passed)] if passed_first else queue[-len(passed):]
            assert {*edge} == {*passed}

    scheduler.give_back = watched
    step = 0
    while scheduler.busy:
        plan = scheduler.schedule(step)
        scheduler.update(plan, [step % 5] * sum(n == each.todo for each, n in plan))
        step += 1
    assert len(given_back) > 10


# --- pages: which are taken, which can be found ---------------------------------------------------

def test_a_pool_takes_the_first_pages_and_gets_them_back_at_the_end():
    pool, table = PagePool(4, 2), []
    pool.allocate(table, 2)
    pool.free(table)
    assert table == [0, 1] and [*pool.free_queue] == [2, 3, 0, 1]


def test_pages_that_nobody_can_find_are_taken_first():
    """A's last page is not full, so it has no name; the others wait behind pages never used."""
    scheduler = PrefixScheduler(1, 64, 6, 2)
    queue(scheduler, [Request([1] * 5, 1)])
    scheduler.update(scheduler.schedule(0), [0])
    assert [*scheduler.pool.free_queue] == [2, 3, 4, 5, 1, 0]


CACHING = pytest.mark.parametrize("new", [
    lambda: PrefixScheduler(2, 4, 6, 2),
    lambda: HybridScheduler(2, 4, 9, 2, [BLOCK_SIZE, 4], passed_first=True)])


@CACHING
def test_a_failed_pass_leaves_the_pages_of_the_passes_before_it(new):
    request, = queue(scheduler := new(), [Request([1, 2, 3, 4, 5, 6, 7], 1)])
    scheduler.update(scheduler.schedule(0), [])
    scheduler.undo(scheduler.schedule(1))
    assert scheduler.schedule(2) == [(request, 3)]   # four tokens are found


@CACHING
def test_a_failed_pass_sends_all_back_in_their_order(new):
    """B has found the page that A would have filled."""
    a, b = queue(scheduler := new(), [Request([1] * 3, 1), Request([1] * 3, 1)])
    assert scheduler.schedule(0) == [(a, 3), (b, 1)]
    scheduler.undo([(a, 3), (b, 1)])
    assert [*scheduler.waiting] == [a, b]


@pytest.mark.parametrize("kind", [PagedScheduler, PrefixScheduler])
def test_a_newcomer_waits_for_room_for_all_tokens_that_it_has(kind):
    """Of three pages A holds one. B's six tokens need three, although its first chunk needs one."""
    scheduler = kind(2, 4, 3, 2)
    a, _ = queue(scheduler, [Request([1] * 2, 1), Request([2] * 6, 1)])
    assert scheduler.schedule(0) == [(a, 2)]


# --- fairness: which request is next --------------------------------------------------------------

@pytest.mark.parametrize("scheduler, requests, first", [
    # the client's number, although the context ends both answers at the same length
    (SCHEDULERS["sjf"](1, 64, 9, 8), {"A": (3, 99), "B": (4, 97)}, "B4"),
    (SCHEDULERS["sjf"](99, 36, 99, 8), {"L": (20, 1), **dict.fromkeys(ascii_lowercase, ([1], 1))},
     " ".join(f"{name}1" for name in ascii_lowercase[:16]) + " L20")])   # by default, 16
def test_the_shortest_is_next_but_for_what_is_due_also_within_a_step(scheduler, requests, first):
    assert run(scheduler, requests)[0] == first


def test_what_was_preempted_as_often_as_the_bound_is_due():
    scheduler = FairScheduler(1, 64, 9, 2, "sjf", bound=2)
    request, = queue(scheduler, [Request([1], 3)])
    for times in 1, 2:
        scheduler.schedule(0)
        scheduler.preempt(request)
        assert scheduler.is_due(request) == (times == 2)


# --- sessions: which holds end, and what is held --------------------------------------------------

NEXT = 9, [1], 1   # a turn


def holding(*then, keep=9):
    """Two sessions whose first turn has ended: A's, then B's, of 5 tokens each."""
    scheduler = SessionScheduler(2, 64, 8, 2, keep)
    turns = queue(scheduler, [Request([1] * 5, 1, name="A"), Request([2] * 5, 1, name="B")])
    for turn in turns:
        Session(turn, [*then])
    scheduler.update(scheduler.schedule(0), [0, 0])
    return scheduler, [turn.session for turn in turns]


def test_full_pages_are_held_for_so_many_steps_and_can_still_be_found():
    scheduler, (a, b) = holding(NEXT)
    assert scheduler.held == {a: ([0, 1], 9), b: ([3, 4], 9)}
    scheduler.schedule(9)
    assert scheduler.held
    scheduler.schedule(10)
    assert not scheduler.held and scheduler.pool.find(a.first.page_hashes) == [0, 1]
    assert not holding()[0].held   # a last turn's
    assert not holding(NEXT, keep=0)[0].held
    scheduler, _ = holding(NEXT, keep=float("inf"))
    assert not scheduler.schedule(10**9) and len(scheduler.held) == 2


@pytest.mark.parametrize("prompt, new, left", [(9, 1, "B"), (8, 3, "B"), (8, 1, "AB")])
def test_the_oldest_hold_ends_and_no_more_than_must(prompt, new, left):
    """Four of eight pages are held. C needs five at once, or when it runs; or four."""
    scheduler, _ = holding(NEXT)
    c, = queue(scheduler, [Request([3] * prompt, new)])
    Session(c)
    while not c.finished:
        scheduler.update(scheduler.schedule(1), [2])
    assert "".join(session.first.name for session in scheduler.held) == left


def test_holds_make_a_newcomer_wait_while_others_run_until_they_are_over():
    scheduler, _ = holding(NEXT)
    c, d = map(Session, queue(scheduler, [Request([3] * 7, 2), Request([4], 1)]))
    assert scheduler.schedule(1) == [(c.first, 7)] and len(scheduler.held) == 2
    scheduler.update([(c.first, 7)], [0])
    assert scheduler.schedule(10) == [(c.first, 1), (d.first, 1)]


@pytest.mark.parametrize("keep, saved", [(0, 0), (9, 4)])
def test_a_run_holds_pages_for_the_next_turn(keep, saved):
    """A comes back at step 2. At step 1, C fits in beside B if A's pages are free."""
    asked = [Session(Request([1] * 4, 1), [(1, [1], 1)]), Session(Request([2], 3)),
             Session(Request([3] * 7, 1, arrival=1))]
    trace = sessions.generate(toy(n_layer=1), asked, pages=5, page_size=2, keep=keep,
                              by_session=True)
    assert trace.counts["saved_tokens"] == saved


# --- rollout, hybrid ------------------------------------------------------------------------------

@pytest.mark.parametrize("mode, n, stale", [("keep", 1, "AB"), ("recompute", 2, "")])
def test_all_that_run_are_stale_or_computed_again_in_their_order(mode, n, stale):
    scheduler = RolloutScheduler(2, 64, 9, 2, SimpleNamespace(version=0), [1], mode)
    a, b, _ = queue(scheduler, [Request([1], 2, name=name) for name in "ABC"])
    scheduler.update(scheduler.schedule(0), [3, 3])
    assert scheduler.schedule(1) == [(a, n), (b, n)]
    assert {request.name for request in scheduler.stale} == {*stale}


@pytest.mark.parametrize("prompt, tokens, n, version", [([1], [3], 2, 0), ([1] * 5, [], 4, 2)])
def test_a_change_waits_for_preempted_requests_that_have_a_token(prompt, tokens, n, version):
    """A has one, or none. B has none: a part of its prompt may be computed, and still it waits."""
    models = SimpleNamespace(version=0)
    scheduler = RolloutScheduler(2, 4, 9, 2, models, [1, 2], "wait")
    a, _ = queue(scheduler, [Request(prompt, 2), Request([2] * 5, 1)])
    scheduler.update(scheduler.schedule(0), tokens)
    for request in scheduler.running[::-1]:
        scheduler.preempt(request)
    assert scheduler.schedule(2) == [(a, n)] and models.version == version


@pytest.mark.parametrize("pages, b_too", [(7, False), (8, True)])
def test_global_layers_need_room_for_all_tokens_and_windows_for_the_next_pass(pages, b_too):
    """A holds two pages. B needs four, and two for the four tokens that a pass may compute."""
    scheduler = HybridScheduler(2, 4, pages, 2, [BLOCK_SIZE, 2], passed_first=True)
    a, b = queue(scheduler, [Request([1] * 2, 3), Request([2] * 8, 1)])
    assert scheduler.schedule(0) == [(a, 2), (b, 2)][:1 + b_too]


def test_the_smallest_pool_is_enough_because_passed_pages_go_first():
    """In the last pass, six pages of the global layers, and three of those with a window."""
    scheduler = HybridScheduler(1, 4, 6 + 3, 2, [BLOCK_SIZE, 2], passed_first=True)
    request, = queue(scheduler, [Request([1] * 12, 1)])
    for step in range(3):
        assert scheduler.schedule(step) == [(request, 4)]
        scheduler.update([(request, 4)], [0] * (step == 2))


def test_the_layers_of_all_groups_share_buffers(monkeypatch):
    """The last of each period is global. Two periods of four layers need two pairs of buffers."""
    model, made = Hybrid(toy(n_layer=8).config, 4, 4).double(), []
    assert [model.group(layer) for layer in range(8)] == [1, 2, 3, 0] * 2
    monkeypatch.setattr("beyond.hybrid.KV", lambda n: made.append(KV(n)) or made[-1])
    hybrid.generate(model, Request([1] * 5, 2))
    assert [sorted(kv.k) for kv in made] == [[0, 1]]


def test_a_window_ends_with_a_tokens_own_key():
    model, zeros = Hybrid(toy(n_layer=2).config, window=3, period=2), torch.zeros(1, 5, 5)
    sees = [model.attend(layer, zeros, zeros, torch.eye(5)[None])[0] > 0 for layer in range(2)]
    all_before = torch.ones(5, 5).tril()
    assert torch.equal(torch.stack(sees), torch.stack([all_before.triu(-2), all_before]) > 0)


def test_pages_that_are_found_leave_no_room_for_others():
    """B takes the two of A's six pages without a name. C finds the others, and needs two more."""
    scheduler = HybridScheduler(2, 64, 8, 2, [BLOCK_SIZE] * 2, passed_first=True)
    _, b, _ = queue(scheduler, [Request([1] * 5, 1), Request([2] * 2, 3), Request([1] * 5, 1)])
    scheduler.update(scheduler.schedule(0), [0, 0])
    assert scheduler.schedule(1) == [(b, 1)]


def test_a_page_that_one_of_two_has_passed_is_not_free():
    scheduler = HybridScheduler(2, 64, 40, 2, [BLOCK_SIZE, 2], passed_first=True)
    a, b = queue(scheduler, [Request([1] * 6, 2), Request([1] * 6, 2)])
    scheduler.update(scheduler.schedule(0), [0, 0])
    scheduler.give_back(scheduler.tables[a][1], 2)
    assert scheduler.tables[b][1][1] not in scheduler.pool.free_queue


def test_a_hybrid_run_keeps_its_limits_and_counts_what_each_group_finds_and_copies():
    """Of B's first four tokens, two pages are found, and that to which a window of 2 looks back."""
    model = Hybrid(toy(n_layer=2).config, window=2, period=2).double()
    requests = [Request([1] * 6, 2), Request([1] * 6, 1, arrival=2)]
    trace = hybrid.generate(model, requests, 1, 4, page_size=2, passed_first=False)
    assert (trace.counts["saved_tokens"], trace.counts["shared_pages"]) == (4, 3)
    copied = [4 + 4, 6 + 3, 7 + 2, 6 + 3]   # B's pass is the last
    assert [p.copied_bytes for p in trace.passes] == [2 * 15 * 8 * n for n in copied]
