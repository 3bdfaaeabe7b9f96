"""The X-ray: all stages see what they should, it disturbs none, it names and draws layout bugs."""
from dataclasses import replace

import pytest
from common import STAGES, examples, knobs_of, toy, workloads
from hypothesis import given, settings
from matplotlib.colors import to_hex
from test_traps import WHERE, case_of, workload

from checks.traps import broken
from checks.xray import XRay, sights_at
from request import Request
from views import sights

MODEL = toy()


@pytest.mark.parametrize("stage", STAGES)
@settings(max_examples=examples(40))
@given(workload=workloads())
def test_every_token_sees_its_own_request_up_to_itself(stage, workload):
    seen, unseen = ([replace(r) for r in workload.requests] for _ in "ab")
    with XRay(MODEL, seen) as xray:
        trace = STAGES[stage](MODEL, seen, **knobs_of(stage, **workload.knobs))
    assert xray.faults() == [] and len(xray.passes) == len(trace.passes)
    undisturbed = STAGES[stage](MODEL, unseen, **knobs_of(stage, **workload.knobs))
    assert [r.generated for r in seen] == [r.generated for r in unseen]
    for a, b in zip(trace.passes, undisturbed.passes):
        assert replace(a, seconds=0) == replace(b, seconds=0)


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


@pytest.mark.parametrize("trap, stage", [
    (trap, stage) for trap in NAMED for stage in WHERE[trap]
    if stage != "prepacked" or trap not in ("pads of the past are seen",
                                            "causal rule from the top left")])
def test_a_layout_bug_is_named(trap, stage):
    model = toy(block_size=64)   # there are wrong positions for all
    requests, own = case_of(trap if trap.startswith("pages known") else None)
    requests = [replace(request, temperature=0.0) for request in requests]
    knobs = knobs_of(stage, **{"max_batch": 4, "token_budget": 8, "page_size": 3} | own)
    with broken(trap, show=False), XRay(model, requests) as xray:
        STAGES[stage](model, requests, **knobs)
    assert any(NAMED[trap] in sentence for sentence in xray.faults())


# --- who sees whom, drawn -------------------------------------------------------------------------

def decode_beside_a_chunk():
    return [Request([1, 2], 4, name="A"), Request([3], 4, name="B"),
            Request([7, 8, 9, 10], 1, name="C", arrival=1)]


def test_a_step_that_really_ran():
    sight, = sights_at(STAGES["interleaved"], MODEL, decode_beside_a_chunk(), step=1)
    a, b, c = sights.panels(sight)
    assert (a.name, a.queries, a.keys) == ("A", ["·", "·", "·", "A2"],
                                           ["A0", "A1", "·", "·", "·", "A2"])
    assert a.cells[3] == ["past", "past", "pad", "pad", "pad", "new"]
    assert b.keys == ["·", "B0", "·", "·", "·", "B1"]
    assert c.cells == [["pad"] * 2 + ["new"] * (i + 1) + [""] * (3 - i) for i in range(4)]
    flat, = sights_at(STAGES["ragged_mask"], MODEL, decode_beside_a_chunk(), step=1)
    panel, = sights.panels(flat)
    assert panel.keys == ["A0", "A1", "A2", "B0", "B1", "C0", "C1", "C2", "C3"]
    assert panel.cells[1] == ["", "", "", "past", "new", "", "", "", ""]
    with pytest.raises(ValueError, match="no forward pass in step 99, the last step is 3"):
        sights_at(STAGES["interleaved"], MODEL, decode_beside_a_chunk(), step=99)


@pytest.mark.parametrize("stage", [name for name in STAGES if name != "no_cache"])
def test_no_stage_draws_a_wrong_key(stage):
    knobs = knobs_of(stage, max_batch=4, token_budget=8, page_size=2, pages=26)
    for step in range(3):
        for sight in sights_at(STAGES[stage], MODEL, workload(), step, **knobs):
            for panel in sights.panels(sight):
                kinds = {kind for row in panel.cells for kind in row}
                assert not kinds & {"wrong", "missing"}
                assert all(len(row) == len(panel.keys) for row in panel.cells)


def test_seen_pads_are_red_and_unseen_keys_are_marked():
    with broken("published mask", show=False):
        sight, = sights_at(STAGES["interleaved"], MODEL, decode_beside_a_chunk(), step=1)
    assert sights.panels(sight)[0].cells[3] == ["past", "past", "wrong", "wrong", "wrong", "new"]
    figure = sights.draw({"as published": sight})
    colors = [to_hex(patch.get_facecolor()).upper() for patch in figure.axes[0].patches]
    assert colors.count(sights.RED) == 3
    with broken("causal rule from the top left", show=False):
        sight, = sights_at(STAGES["unbatched"], MODEL, [Request([1, 2, 3], 2, name="A")], step=1)
    assert sights.panels(sight)[0].cells == [["past", "missing", "missing", "missing"]]
    with broken("neighbours in a packed row", show=False):
        requests = [Request([1] * n, 1, name=name) for n, name in ((5, "A"), (3, "B"), (2, "C"))]
        sight, = sights_at(STAGES["prepacked"], MODEL, requests, step=0)
    assert sights.panels(sight)[1].cells[3] == ["wrong"] * 3 + ["new", ""]
