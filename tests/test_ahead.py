"""Planning ahead keeps the contract, with the passes of stages 6 and 7 and a row for each stop."""
from dataclasses import replace
from unittest.mock import patch

import common
import pytest
import torch
from common import assert_contract, toy
from hypothesis import given, settings

from beyond import ahead
from beyond.ahead import generate
from request import Request
from scheduler import Scheduler
from toolbox.traps import swapped

MODEL, KNOWN = toy(), {}


def run(requests, model=MODEL, **knobs):
    return assert_contract(model, generate, [replace(request) for request in requests],
                           known=KNOWN if model is MODEL else None, late=1, **knobs)


@pytest.mark.parametrize("pages", [False, True], ids=["stage 6", "stage 7"])
@settings(max_examples=common.examples(400))
@given(workload=common.workloads(), data=common.st.data())
def test_contract(pages, workload, data):
    knobs = common.knobs_of("ragged_varlen", **workload.knobs)
    if pages:
        size = workload.knobs["page_size"]
        enough = common.smallest_pool(workload.requests, size)
        knobs = dict(knobs, max_kv_tokens=None, page_size=size,
                     pages=data.draw(common.st.integers(enough, 3 * enough)))
    trace = run(workload.requests, **knobs)
    assert all(p.slots <= knobs["token_budget"] for p in trace.passes)
