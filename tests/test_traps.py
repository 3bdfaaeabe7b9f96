"""
Each known bug of lab/checks/traps.py is put in, and then what our code passes must fail: the
contract on some drawn workload, in a stage that has the bug; or, for bugs of the schedulers, what
holds of their plans and pages. The X-ray names layout bugs, drawn in red.
"""
import re
from dataclasses import replace

import pytest
import test_scheduler
import torch
from common import (
    RAGGED,
    ROOT,
    STAGES,
    assert_contract,
    assert_seen,
    backend,
    knobs_of,
    mixed,
    toy,
    workloads,
)
from matplotlib.colors import to_hex
from test_essays import ESSAYS

from lab.checks.traps import BIRTHS, TRAPS, broken, swapped
from lab.checks.xray import XRay, sights_at
from lab.views import sights
from model import Head
from request import Request

MODEL, KNOWN = backend("float64").model, backend("float64").known
STAGE = {   # a file, or a function: the stages in which its bugs are looked for
    "model.py": ("interleaved",), "request.py": ("interleaved",), "generate_naive.py": ("naive",),
    "generate_dynamic.py": ("dynamic", "chunked", "interleaved"),
    "beyond/prepacked.py": ("prepacked",), "generate_ragged.py": RAGGED,
    "generate_paged.py": ("paged",), "generate_prefix.py:page_hash": ("prefix",)}


@pytest.mark.parametrize("name", TRAPS)
def test_a_known_bug_is_seen(name):
    function = TRAPS[name][0][0]
    file = function.split(":")[0]
    stages = STAGE.get(function) or STAGE.get(file)

    def contract(case):
        requests, pressure = case
        for stage in stages:
            def generate(*arguments, **knobs):   # the oracle runs without the bug
                with broken(name, show=False):
                    return STAGES[stage](*arguments, **knobs)

            assert_contract(MODEL, generate, [*map(replace, requests)], known=KNOWN,
                            **knobs_of(stage, **pressure))

    def plans_and_pages(case, cancel):
        with broken(name, show=False):
            test_scheduler.plans_are_right(case, cancel)
            test_scheduler.test_what_can_never_fit_is_refused_by_name_with_the_numbers()

    def essay(case):
        with broken(name, show=False):
            ESSAYS[file][1](*case)

    if file in ESSAYS:
        assert_seen(essay, ESSAYS[file][0])
    elif stages:
        assert_seen(contract, workloads())
    else:
        assert_seen(plans_and_pages, workloads(), test_scheduler.CANCELS)


def test_births_are_of_traps_and_told_in_the_sources():
    sources = (ROOT / "docs" / "sources.md").read_text(encoding="utf-8")
    assert {*BIRTHS} <= {*TRAPS}
    for name, birth in BIRTHS.items():
        assert f"| {name} |" in sources
        assert all(each in sources for each in re.findall(r"#\d+|CVE-[\d-]+", birth))


def test_a_trap_is_shown_and_taken_out_even_if_the_block_fails(capsys):
    with pytest.raises(KeyError), broken("published mask"):
        raise KeyError
    assert capsys.readouterr().out.splitlines() == [
        "generate_dynamic.py, Rectangle.lay_out:",
        "  - mask[b, ..., P + T - n:] = True",
        "  + mask[b, ..., P:] = True"]
    assert_contract(MODEL, STAGES["interleaved"], mixed())
    seen = []   # a trap may use names of its own
    with swapped(Head.forward, [("scores = q", "scores = seen.append(q.shape) or q")],
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


@pytest.mark.parametrize("name", NAMED)
def test_a_layout_bug_is_named(name):
    file, model = TRAPS[name][0][0].split(":")[0], toy(block_size=64)   # wrong positions exist
    stage, requests = STAGE.get(file, ("prefix",))[0], [replace(r, arrival=0) for r in mixed()]
    knobs = knobs_of(stage, max_batch=4, token_budget=8, page_size=3)
    with broken(name, show=False), XRay(model, requests) as xray:
        STAGES[stage](model, requests, **knobs)
    assert any(NAMED[name] in sentence for sentence in xray.faults())
    assert not model._forward_pre_hooks   # it leaves nothing behind


def test_keys_may_be_shared_only_if_all_tokens_before_are_equal():
    """The second pages of A and B are equal, but not what is before them. B finds D's, and A's."""
    requests = [Request([1, 1, 5, 5, 3], 1, name="A"), Request([2, 2, 9, 9, 3], 1, name="D"),
                Request([2, 2, 5, 5, 3], 1, name="B", arrival=1)]
    with broken("pages known by their own tokens", show=False), XRay(MODEL, requests) as xray:
        STAGES["prefix"](MODEL, requests, page_size=2)
    assert "token 0 = request 'B' (prefill, position 4) sees positions 2, 3 of request 'A'" in str(
        xray.faults())


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
        for sight in sights_at(STAGES[stage], MODEL, mixed(), step, **knobs):
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
