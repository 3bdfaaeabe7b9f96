"""Equal prompts that are asked for together are computed and kept once."""
from dataclasses import replace

import common
import pytest
from common import toy
from hypothesis import given, settings

from beyond.fork import ForkScheduler, answers
from beyond.speculative import generate
from checks.traps import swapped
from paging import PagedScheduler, Pages
from request import Request

MODEL, KNOWN = toy(), {}


def run(requests, **knobs):
    return common.assert_contract(MODEL, generate, [replace(r) for r in requests], known=KNOWN,
                                  guesses=0, **knobs)


def test_figures():
    assert answers(PagedScheduler(8, 1024, Pages(64, 16))) == (952, 64)
    assert answers(PagedScheduler(8, 1024, Pages(64, 16)), apart=2) == (392, 29)
    assert answers(ForkScheduler(8, 1024, Pages(64, 16))) == (392, 29)


@settings(max_examples=common.examples(300))
@given(workload=common.workloads(), more=common.st.integers(0, 9))
def test_contract(workload, more):
    requests, size = workload.requests, workload.knobs["page_size"]
    twins = [replace(r, seed=r.seed + 1, name=f"{r.name} again") for r in requests]
    run([*requests, *twins], max_batch=workload.knobs["max_batch"], page_size=size,
        token_budget=workload.knobs["token_budget"],
        pages=common.smallest_pool(requests, size) + more)


def twins():
    run([Request([1, 2, 3, 4, 5, 6], 9, 0.9, seed=i) for i in range(5)], pages=30, page_size=4)


def test_a_shared_partial_page_is_seen():
    twins()
    share = '''granted = super().grant_room(request)
        for other in self.running if granted else ():
            i = request.computed // size
            self.pages.give_back(request.block_table[i:])
            del request.block_table[i:]
            self.pages.hold(request.block_table, other.block_table[i:i + 1])
            break
        return granted'''
    change = "return super().grant_room(request)", share
    with swapped(ForkScheduler.grant_room, [change]), pytest.raises(common.SEEN):
        twins()
