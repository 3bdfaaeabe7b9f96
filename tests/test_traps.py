"""
Each known bug of checks/traps.py is put in, and the assertion that our code passes must fail on
it. A bug of a layout, of sampling or of pages breaks the contract, in the stages that WHERE names;
the X-ray names those of layouts, and they are drawn. A bug of the scheduler shows in its plans.
"""
import random
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from common import RAGGED, SCHEDULED, STAGES, alone, assert_contract, knobs_of, plans, toy
from matplotlib.colors import to_hex

from checks.traps import TRAPS, broken, swapped
from checks.xray import XRay, sights_at
from model import Head
from paging import PagedScheduler, Pages
from request import Request
from scheduler import Scheduler
from views import sights

MODEL, KNOWN = toy(), {}
RECTANGLES, PACKED = ("dynamic", "chunked", "interleaved"), ("prepacked", "prepacked_dataset")

WHERE = {   # the stages that a trap is put into
    "published mask": RECTANGLES,
    "pads of the past are seen": (*RECTANGLES, "prepacked"),
    "no causal rule in a chunk": ("chunked", "interleaved", "ragged_varlen", "paged"),
    "causal rule from the top left": ("unbatched", "naive", "prepacked", *RECTANGLES, *RAGGED,
                                      "paged"),
    "NaN for a query without keys": ("naive", "prepacked", *RECTANGLES),
    "neighbours in a packed row": PACKED,
    "a stream without boundaries": ("ragged_mask",),
    "a chunk reads to the end of its prompt": ("ragged_varlen",),
    "a chunk reads pages to the end of its prompt": ("paged",),
    "column positions": RECTANGLES,
    "static column positions": ("naive",),
    "right padding": ("naive",),
    "positions that run on in a packed row": PACKED,
    "pads written to the cache": RECTANGLES,
    "pads of the past are not zeros": (*RECTANGLES, "prepacked"),
    "caches in packed order": ("prepacked",),   # dataset packing admits in the order of the rows
    "one-token prompts are lost": PACKED,
    "pages read in one piece": ("paged",),
    "pages read in the order of the pool": ("paged",),
    "new keys in the last page": ("paged",),
    "samples from a partial prefill": SCHEDULED,
    "draws for a partial prefill": SCHEDULED,
    "one random stream for all": tuple(STAGES),
    "the first token for all": ("naive", "prepacked", *RECTANGLES, *RAGGED, "paged"),
    "end of text is overlooked": tuple(STAGES),
    "one token too many": tuple(STAGES),
    "no end at the context limit": tuple(STAGES),
    "a stale count after preemption": ("paged",),
    "pages known by their own tokens": ("paged",),
    "pages known by a page's number": ("paged",),
    "published a step late": ("paged",),
    "a block table is an alias": ("paged",),
}


def workload():
    """
    Long and short prompts, greedy and sampled, some late: with a budget of 8 there are chunks,
    decodes and both together.
    """
    rng, cases = random.Random(1), [(3, 0.0), (17, 0.0), (1, 1.0), (11, 1.0), (2, 0.0), (20, 1.0),
                                    (9, 0.0), (8, 1.0)]
    prompts = [[rng.randrange(MODEL.config.vocab_size) for _ in range(n)] for n, _ in cases]
    return [Request(prompts[i], 6, temperature, seed=n, name=f"r{i}", arrival=i // 3)
            for i, (n, temperature) in enumerate(cases)]


def prompts(*rows, new=3, arrivals=None):
    return [Request(row, new, name=f"r{i}", arrival=arrivals[i] if arrivals else 0)
            for i, row in enumerate(rows)]


CASES = {   # a trap that needs another workload, or other knobs
    # so short that the wrong positions exist
    "column positions": lambda: (prompts([1, 2, 3], [5, 1, 4, 4, 2, 8, 9, 1, 7], [6], new=6), {}),
    "no end at the context limit": lambda: (prompts([1, 2, 3], new=40), {}),
    # each prompt fits where another one should be
    "caches in packed order": lambda: (prompts(*([n] * n for n in (3, 2, 5, 4)), new=9), {}),
    "end of text is overlooked": lambda: (
        [replace(r, eos_token=alone(MODEL, replace(r, max_new_tokens=1))[0][0])
         for r in workload()], {}),
    "a stale count after preemption": lambda: (
        [Request([1, 2, 3, 4, 5, i], 10, 1.0, seed=i, name=f"r{i}") for i in range(4)],
        dict(pages=20, page_size=2)),
    # the second request finds one page and needs three; then the third looks for the same one
    "a block table is an alias": lambda: (
        prompts([1, 2, 9], [1, 2, 3, 4], [1, 2, *range(10)]), dict(max_batch=1, page_size=2)),
    # the first leaves in the step that fills its pages, and the second takes them
    "published a step late": lambda: (
        prompts([1, 2, 3, 4, 5], [9] * 11, [1, 2, 3, 4, 6], new=1, arrivals=[0, 1, 2]),
        dict(pages=6, page_size=2, token_budget=16)),
    "pages known by their own tokens": lambda: (
        prompts([1, 2, 3, 4], [3, 4, 7]), dict(max_batch=1, page_size=2)),
    # The first two compute 1 2, and only the first one's page is published. The second one's 4 5 is
    # known after it. Then that page is taken for 9 9.
    "pages known by a page's number": lambda: (
        prompts([1, 2, 7], [1, 2, 4, 5, 6], [8] * 6, [9, 9], [9, 9, 4, 5, 6], new=1,
                arrivals=[0, 0, 1, 1, 2]), dict(pages=7, page_size=2, token_budget=16)),
}
FAILS = {   # a trap that does not get as far as a wrong token
    "NaN for a query without keys": ValueError,               # sample refuses NaN
    "pads of the past are not zeros": ValueError,
    # no such position, no room in the cache, no page
    "no end at the context limit": (IndexError, ValueError, RuntimeError),
    "one token too many": (AssertionError, IndexError, ValueError),
    "admits what can never fit": RuntimeError,                # "... but nothing can go on"
    "all of a prompt is found": RuntimeError,
}


def case_of(name=None):
    """Requests and knobs; None: the workload above."""
    return CASES[name]() if name else (workload(), {})


def check(stage, case=None):
    """The contract; with knobs under which chunks, sharing, preemption and scattering happen."""
    requests, own = case_of(case)
    knobs = dict(token_budget=8, pages=10, page_size=3, max_batch=4) | own
    return assert_contract(MODEL, STAGES[stage], requests, known=KNOWN, **knobs_of(stage, **knobs))


check_ours = lru_cache(maxsize=None)(check)   # so KNOWN is filled before any bug is put in


@pytest.mark.parametrize("stage, name", [
    (stage, name) for name in TRAPS for stage in WHERE.get(name, ())])
def test_trap(stage, name):
    case = name if name in CASES else None
    check_ours(stage, case)
    random.seed(0)   # "one random stream for all" is this one
    with broken(name, show=False), pytest.raises(FAILS.get(name, AssertionError)):
        check(stage, case)


def test_a_trap_is_shown_and_taken_out_even_if_the_block_fails(capsys):
    with pytest.raises(KeyError), broken("published mask"):
        raise KeyError
    assert capsys.readouterr().out.splitlines() == [
        "generate_dynamic.py, Rectangle.lay_out:",
        "  - mask[b, ..., P + T - n:] = True",
        "  + mask[b, ..., P:] = True"]
    check("interleaved")
    seen = []   # a trap may use names of its own
    with swapped(Head.forward, [("scores = q @", "scores = seen.append(q.shape) or q @")],
                 seen=seen):
        Head()(*torch.zeros(3, 2, 4))
    Head()(*torch.zeros(3, 2, 4))
    assert seen == [(2, 4)] and "seen" not in Head.forward.__globals__
    with pytest.raises(ValueError, match="no trap 'x', only 'published mask', "):
        with broken("x"):
            pass
    with pytest.raises(ValueError, match="Head.forward: 'no such code' occurs 0 times"):
        with swapped(Head.forward, [("no such code", "")]):
            pass


# --- what the X-ray says of them (that it finds no fault in our code: test_contract.py) -----------

NAMED = {   # what the sentence must hold for each layout bug of the known traps
    "published mask": "pad slot", "pads of the past are seen": "empty key slot",
    "pads written to the cache": "pad slot",
    "no causal rule in a chunk": "sees position",
    "causal rule from the top left": "does not see position",
    "neighbours in a packed row": "of request 'r", "a stream without boundaries": "of request 'r",
    "column positions": "as if at position", "static column positions": "as if at position",
    "positions that run on in a packed row": "as if at position",
    "pages read in one piece": "sees position", "pages known by their own tokens": "sees position",
}
UNSEEN = "pads of the past are seen", "causal rule from the top left"   # in a prepacked prefill


@pytest.mark.parametrize("trap, stage", [(trap, stage) for trap in NAMED for stage in WHERE[trap]
                                         if stage != "prepacked" or trap not in UNSEEN])
def test_a_layout_bug_is_named(trap, stage):
    model = toy(block_size=64)   # there are wrong positions for all
    requests, own = case_of(trap if trap.startswith("pages known") else None)
    requests = [replace(request, temperature=0.0) for request in requests]
    knobs = knobs_of(stage, **{"max_batch": 4, "token_budget": 8, "page_size": 3} | own)
    with broken(trap, show=False), XRay(model, requests) as xray:
        STAGES[stage](model, requests, **knobs)
    assert any(NAMED[trap] in sentence for sentence in xray.faults())
    assert not model._forward_pre_hooks   # it leaves nothing behind


# --- who sees whom, drawn -------------------------------------------------------------------------

def drawn(stage, requests=None, step=1, **knobs):
    """The panels of that step's only pass."""
    requests = requests or [Request([1, 2], 4, name="A"), Request([3], 4, name="B"),
                            Request([7, 8, 9, 10], 1, name="C", arrival=1)]   # a chunk, in step 1
    sight, = sights_at(STAGES[stage], MODEL, requests, step, **knobs)
    return sights.panels(sight), sight


def test_a_step_that_really_ran():
    (a, b, c), _ = drawn("interleaved")
    assert (a.name, a.queries, a.keys) == ("A", ["·", "·", "·", "A2"],
                                           ["A0", "A1", "·", "·", "·", "A2"])
    assert a.cells[3] == ["past", "past", "pad", "pad", "pad", "new"]
    assert b.keys == ["·", "B0", "·", "·", "·", "B1"]
    assert c.cells == [["pad"] * 2 + ["new"] * (i + 1) + [""] * (3 - i) for i in range(4)]
    (panel,), _ = drawn("ragged_mask")
    assert panel.keys == ["A0", "A1", "A2", "B0", "B1", "C0", "C1", "C2", "C3"]
    assert panel.cells[1] == ["", "", "", "past", "new", "", "", "", ""]
    with pytest.raises(ValueError, match="no forward pass in step 99, the last step is 3"):
        drawn("interleaved", step=99)


@pytest.mark.parametrize("stage", [name for name in STAGES if name != "no_cache"])
def test_no_stage_draws_a_wrong_key(stage):
    knobs = knobs_of(stage, max_batch=4, token_budget=8, page_size=2, pages=26)
    for step in range(3):
        for sight in sights_at(STAGES[stage], MODEL, workload(), step, **knobs):
            for panel in sights.panels(sight):
                assert not {kind for row in panel.cells for kind in row} & {"wrong", "missing"}
                assert all(len(row) == len(panel.keys) for row in panel.cells)


def test_seen_pads_are_red_and_unseen_keys_are_marked():
    with broken("published mask", show=False):
        panels, sight = drawn("interleaved")
    assert panels[0].cells[3] == ["past", "past", "wrong", "wrong", "wrong", "new"]
    colors = [to_hex(patch.get_facecolor()).upper()
              for patch in sights.draw({"as published": sight}).axes[0].patches]
    assert colors.count(sights.RED) == 3
    with broken("causal rule from the top left", show=False):
        panels, _ = drawn("unbatched", [Request([1, 2, 3], 2, name="A")])
    assert panels[0].cells == [["past", "missing", "missing", "missing"]]
    with broken("neighbours in a packed row", show=False):
        panels, _ = drawn("prepacked", step=0, requests=[
            Request([1] * n, 1, name=name) for n, name in ((5, "A"), (3, "B"), (2, "C"))])
    assert panels[1].cells[3] == ["wrong"] * 3 + ["new", ""]


# --- the traps of the scheduler show in its plans -------------------------------------------------

def decodes_go_before_prompts():
    assert plans(Scheduler(2, 4), [(1, 3), (9, 1)])[0] == ["A1 B3", "A1 B3", "A1 B3"]


def no_prefill_starves_behind_decodes():
    sizes = [(1, 9), (2, 9), (7, 9), (5, 9), (3, 9), (20, 4), (11, 9), (1, 9), (1, 9), (9, 9)] * 3
    for budget in 1, 2, 3, 8:   # `run` asserts that all of them go on, within the budget
        plans(Scheduler(20, budget), sizes)
        plans(PagedScheduler(20, budget, Pages(2500, 4)), sizes)


def what_can_never_fit_is_refused_by_name_with_the_numbers():
    small, large = (3, 3), (9, 8)   # the last token is never computed: 16 places, one page of 16
    for new, need, size in [
            (lambda n: Scheduler(4, 8, n), 16, 1),
            *((lambda n, size=size: PagedScheduler(4, 8, Pages(n, size)), need, size)
              for size, need in ((1, 16), (5, 4), (2, 8)))]:
        there = f"'B'.* 9 .* 8 needs 16 KV tokens, there are {(need - 1) * size}"
        with pytest.raises(ValueError, match=there):
            plans(new(need - 1), [small, large])
        plans(new(need), [small, large])
        plans(new(64), [small, (9, 10**9)])   # the context limits what a request can need


def a_published_prompt_leaves_a_query():
    """All prompts are equal; the second one finds nearly all of its tokens."""
    for size, saved in (4, 4), (3, 6), (8, 0):
        scheduler = PagedScheduler(1, 8, Pages(8, size))
        plans(scheduler, [(8, 3), (8, 3)])
        assert scheduler.counts["saved_tokens"] == saved


def a_preempted_request_goes_back_to_its_place():
    """The front of the queue says when the next one arrives: that step comes too late for it."""
    scheduler = PagedScheduler(2, 8, Pages(6, 1), share_prefixes=False)
    _, requests = plans(scheduler, [(2, 4), (2, 4), (2, 2)], arrivals=[0, 0, 10**6])
    assert scheduler.counts["preemptions"] and requests[1].token_steps[-1] < 20
    assert requests[2].token_steps == [10**6, 10**6 + 1]


IN_PLANS = {
    "prompts before decodes": decodes_go_before_prompts,
    "admits beyond the budget": no_prefill_starves_behind_decodes,
    "admits what can never fit": what_can_never_fit_is_refused_by_name_with_the_numbers,
    "all of a prompt is found": a_published_prompt_leaves_a_query,
    "a preempted request goes to the end": a_preempted_request_goes_back_to_its_place,
}


@pytest.mark.parametrize("name", [name for name in TRAPS if name not in WHERE])
def test_trap_of_the_scheduler(name):
    IN_PLANS[name]()
    with broken(name, show=False), pytest.raises(FAILS.get(name, AssertionError)):
        IN_PLANS[name]()


# --- the test model -------------------------------------------------------------------------------

def test_a_quiet_test_model_hides_the_bugs():
    """Plain weights repeat one token for ever, so the published mask changes none. The toy's do."""
    greedy = [replace(r, temperature=0.0, max_new_tokens=12) for r in workload()]
    for model, hides in (toy(loud=False), True), (MODEL, False):
        requests = [replace(request) for request in greedy]
        with broken("published mask", show=False):
            STAGES["interleaved"](model, requests, max_batch=4, token_budget=8)
        right = [alone(model, request)[0] for request in greedy]
        assert ([request.generated for request in requests] == right) == hides
