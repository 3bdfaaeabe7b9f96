"""What docstrings promise and no run shows: memory that is held, places that are looked at."""
from types import SimpleNamespace

import pytest
import torch
from common import BLOCK_SIZE, toy
from torch import nn

import generate_unbatched
from beyond.hybrid import HybridScheduler
from beyond.speculative import draft
from beyond.tensor_parallel import RowParallel, column_parallel
from generate_naive import cache_for
from generate_unbatched import Alone
from lab.compiled import optimize
from request import Request, prepare


def test_a_static_batch_holds_no_room_beyond_the_context():
    requests = prepare([Request([1] * 5, 10**6), Request([1] * 9, 3)], toy().config)
    assert cache_for(requests).capacity <= 9 + BLOCK_SIZE - 5


def test_a_guess_is_looked_up_in_the_requests_own_tokens():
    """A has 1 2 3 9 9; of B, nothing follows 1 2 3 yet."""
    a, b = prepare([Request([1, 2, 3, 9, 9], 9, name="A"), Request([4, 1, 2, 3], 9, name="B")],
                   toy().config)
    scheduler = SimpleNamespace(token_budget=64, pool=SimpleNamespace(page_size=16))
    for request in a, b:
        request.computed, request.block_table = request.todo - 1, [0]
    drafts = draft([(a, 1), (b, 1)], scheduler, {}, 4)
    assert drafts == {a: [9], b: []}


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
