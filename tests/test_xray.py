"""The X-ray: all stages see what they should, it disturbs none, and it names each layout bug."""
from dataclasses import replace

import pytest
from common import SCHEDULED, STAGES, examples, toy, workloads
from hypothesis import HealthCheck, given, settings
from test_traps import WHERE, workload

from request import Request
from toolbox.traps import broken
from toolbox.xray import ScriptedModel, XRay

MODEL = toy()


@pytest.mark.parametrize("stage", STAGES)
@settings(max_examples=examples(40), deadline=None, derandomize=True,
          suppress_health_check=list(HealthCheck))
@given(workload=workloads())
def test_every_token_sees_its_own_request_up_to_itself(stage, workload):
    seen, unseen = ([replace(r) for r in workload.requests] for _ in "ab")
    with XRay(MODEL, seen) as xray:
        trace = STAGES[stage](MODEL, seen, **workload.knobs(stage))
    assert xray.faults() == [] and len(xray.passes) == len(trace.passes)
    undisturbed = STAGES[stage](MODEL, unseen, **workload.knobs(stage))
    assert [r.generated for r in seen] == [r.generated for r in unseen]
    for a, b in zip(trace.passes, undisturbed.passes):
        assert replace(a, seconds=0) == replace(b, seconds=0)


def test_it_sees_every_slot_and_every_key():
    """By hand: a prompt of 2 beside one of 3, then a decode of each; one pad, one blank."""
    requests = [Request([1, 2], 2, name="a"), Request([3, 4, 5], 2, name="b")]
    with XRay(MODEL, requests) as xray:
        STAGES["dynamic"](MODEL, requests)
    prefill, decode = xray.passes
    assert prefill.ids.tolist() == [[0, 1, 2], [5, 6, 7]] and decode.ids.tolist() == [[3], [8]]
    assert prefill.seen[1].nonzero().tolist() == [[0, 5], [1, 5], [1, 6], [2, 5], [2, 6], [2, 7]]
    assert prefill.seen[0, 0].sum() == 0   # a pad sees nothing
    assert decode.seen[0, 0].tolist() == [0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "no_cache"])
def test_the_script_of_the_scripted_model(stage):
    """Token p of request r is 64 r + p + 1, and each is followed by the next."""
    model, lengths = ScriptedModel(5), [3, 17, 1, 9, 6]
    requests = [Request([64 * r + p + 1 for p in range(n)], 7, name=f"r{r}")
                for r, n in enumerate(lengths)]
    with XRay(model, requests) as xray:
        STAGES[stage](model, requests)
    assert xray.faults() == []
    assert [request.generated for request in requests] == [
        list(range(64 * r + n + 1, 64 * r + n + 8)) for r, n in enumerate(lengths)]


NAMED = {   # what the sentence must hold for each layout bug of the known traps
    "published mask": "pad slot", "pads of the past are seen": "empty key slot",
    "no causal rule in a chunk": "sees position",
    "causal rule from the top left": "does not see position",
    "neighbours in a packed row": "of request 'r",
    "column positions": "as if at position", "static column positions": "as if at position",
    "positions that run on in a packed row": "as if at position",
}


@pytest.mark.parametrize("trap, stage", [
    (trap, stage) for trap in NAMED for stage in WHERE[trap]
    if stage != "prepacked" or trap not in ("pads of the past are seen",
                                            "causal rule from the top left")])
def test_a_layout_bug_is_named(trap, stage):
    model = toy(block_size=64)   # there are wrong positions for all
    requests = [replace(request, temperature=0.0) for request in workload()]
    knobs = {} if stage == "unbatched" else {"max_batch": 4}
    if stage in SCHEDULED:
        knobs["token_budget"] = 8
    with broken(trap, show=False), XRay(model, requests) as xray:
        STAGES[stage](model, requests, **knobs)
    assert any(NAMED[trap] in sentence for sentence in xray.faults())


def test_the_sentence():
    """A decode beside a chunk of 8."""
    model = ScriptedModel(2)
    requests = [Request([1, 2], 4, name="C"), Request(range(65, 75), 1, name="D", arrival=1)]
    with broken("published mask", show=False), XRay(model, requests) as xray:
        STAGES["interleaved"](model, requests, token_budget=9)
    assert xray.faults()[0] == ("pass 1, row 0, column 7 = request 'C' (decode, position 2) "
                                "sees 7 pad slots")
