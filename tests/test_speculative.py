"""Speculative decoding keeps the contract, in fewer passes, and wrong guesses leave no trace."""
import time
from dataclasses import replace

import common
import pytest
import torch
from common import assert_contract, toy
from hypothesis import given, settings

from beyond import speculative
from beyond.speculative import Lookup, draft, generate, price
from request import Request, prepare
from toolbox.report import report, totals
from toolbox.traps import swapped

MODEL, KNOWN = toy(), {}
QUIET = toy(loud=False)   # repeats itself: most guesses are right


def run(requests, model=MODEL, known=None, **knobs):
    knobs = {"guesses": 4, **knobs}
    trace = assert_contract(model, generate, [replace(request) for request in requests],
                            per_pass=1 + knobs["guesses"], known=known, **knobs)
    budget = knobs.get("token_budget", 64)
    assert all(p.slots <= budget and p.pad_slots == p.finished_slots == 0 for p in trace.passes)
    return trace


@pytest.mark.parametrize("pages", [False, True], ids=["stage 6", "stage 7"])
@pytest.mark.parametrize("model", [MODEL, QUIET], ids=["loud", "quiet"])
@settings(max_examples=common.examples(300))
@given(workload=common.workloads(), data=common.st.data())
def test_contract(pages, model, workload, data):
    knobs = common.knobs_of("ragged_varlen", **workload.knobs)
    if pages:
        size = workload.knobs["page_size"]
        enough = common.smallest_pool(workload.requests, size)
        knobs = dict(knobs, max_kv_tokens=None, page_size=size,
                     pages=data.draw(common.st.integers(enough, 3 * enough)))
    guesses = data.draw(common.st.integers(0, 6))
    run(workload.requests, model, KNOWN if model is MODEL else None, guesses=guesses, **knobs)
