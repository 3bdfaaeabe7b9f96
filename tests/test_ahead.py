"""Planning ahead keeps the contract, with one row more for each stop token."""
import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import common
import pytest
from common import assert_contract, cancel_now, toy
from hypothesis import given, settings
from hypothesis import strategies as st

import generate_ragged
from beyond import ahead
from beyond.ahead import HOLE, generate
from checks.traps import swapped
from request import Request
from scheduler import Scheduler

MODEL, KNOWN = toy(), {}


def run(requests, model=MODEL, known=None, **knobs):
    requests = [replace(request) for request in requests]

    def no_hole_is_seen(*_):
        assert not any(HOLE in request.generated for request in requests)

    handle = model.register_forward_pre_hook(no_hole_is_seen)
    try:
        return assert_contract(model, generate, requests, known=known, late=1, **knobs)
    finally:
        handle.remove()


@pytest.mark.parametrize("pages", [False, True], ids=["stage 6", "stage 7"])
@settings(max_examples=common.examples(400))
@given(workload=common.workloads(), more=st.integers(0, 20))
def test_contract(pages, workload, more):
    knobs = common.knobs_of("ragged_varlen", **workload.knobs)
    if pages:
        size = workload.knobs["page_size"]
        enough = common.smallest_pool(workload.requests, size)
        knobs |= dict(max_kv_tokens=None, page_size=size, pages=enough + more)
    trace = run(workload.requests, known=KNOWN, **knobs)
    assert all(p.slots <= knobs["token_budget"] for p in trace.passes)


@settings(max_examples=common.examples(200))
@given(workload=common.workloads(), seed=st.integers(0, 99), pages=st.booleans())
def test_cancelled_requests_keep_what_they_had(workload, seed, pages):
    """Cancelled between two steps, waiting or running or in flight; the others lose nothing."""
    stream, requests = common.random.Random(seed), [replace(r) for r in workload.requests]
    schedule = Scheduler.schedule

    def cancel_some(scheduler, step):
        for request in [*scheduler.running, *scheduler.waiting]:
            if not request.finished and stream.random() < 0.05:
                cancel_now(scheduler, request)
        return schedule(scheduler, step) if scheduler.busy else []

    size = workload.knobs["page_size"]
    room = dict(pages=common.smallest_pool(requests, size) + 3, page_size=size) if pages else {}
    with patch.object(Scheduler, "schedule", cancel_some):
        generate(MODEL, requests, token_budget=workload.knobs["token_budget"], **room)
    for request in requests:
        tokens, _, reason = common.alone(MODEL, request)
        assert request.finished and request.kv is request.block_table is None
        if request.finish_reason == "cancelled":
            assert request.generated == tokens[:len(request.generated)]
        else:
            assert (request.generated, request.finish_reason) == (tokens, reason)


def test_the_next_pass_is_queued_before_tokens_are_read():
    events = []
    land, launch = ahead.land, ahead.launch

    def landing(flight, *rest):
        events.append(f"land {flight.step}")
        land(flight, *rest)

    def launching(model, scheduler, lay_out, step, flight):
        queued = launch(model, scheduler, lay_out, step, flight)
        events.append(f"launch {step}" if queued else "nothing to launch")
        return queued

    with patch.object(ahead, "land", landing), patch.object(ahead, "launch", launching):
        generate(MODEL, [Request([1, 2], 3)])
    assert events == ["launch 0", "launch 1", "land 0", "launch 2", "land 1",
                      "nothing to launch", "land 2"]


def test_a_stop_costs_a_row_and_an_end_by_length_none():
    tokens, _, _ = common.alone(MODEL, Request([1, 2], 6))
    for request, rows in (Request([1, 2], 6), 0), (Request([1, 2], 9, eos_token=tokens[-1]), 1):
        plain = generate_ragged.generate(MODEL, [replace(request)])
        trace = run([request])
        assert sum(p.rejected for p in trace.passes) == rows
        assert sum(p.useful for p in trace.passes) == sum(p.useful for p in plain.passes)


TRAPS = {
    "a stale hole": (ahead.launch, "= flight.tokens[places]",
                     "= flight.batch.tokens[flight.batch.wanted[places]]"),
    "a hole that nobody fills": (ahead.launch, "    if rows:", "    if False:"),
    "a hole for a token after the last": (
        ahead.launch, " and not request.is_last(len(request.generated) + 1)", ""),
    "a cache freed under a queued pass": (
        ahead.land, "table is not None and table is request.block_table", "table is not None"),
    "pages published from where the request has come to": (
        ahead.land, "range(start // size, (start + n) // size)",
        "range(request.computed // size, (request.computed + n) // size)"),
    "a token for a request that has ended": (
        ahead.land, "enumerate(batch.sampled) if not request.finished", "enumerate(batch.sampled)"),
    "a preempted request that ended waits on": (
        ahead.land, "if request.finished and request in scheduler.waiting", "if False"),
}
QUIET = toy(loud=False)


def crowds():
    for model in MODEL, QUIET:
        for seed in range(25):
            requests, known = common.crowd(seed, model), {}
            run(requests, model, known, token_budget=20)
            for size in 1, 2, 4:
                pages = common.smallest_pool(requests, size)
                run(requests, model, known, token_budget=20, pages=pages, page_size=size)


@pytest.mark.parametrize("trap", [None, *TRAPS])
def test_traps_are_seen(trap):
    if trap is None:   # and nothing is wrong without one
        return crowds()
    function, *change = TRAPS[trap]
    with swapped(function, [change]), pytest.raises(common.SEEN):
        crowds()


def test_the_command_prints_the_gain():
    out = subprocess.run([sys.executable, "-m", "beyond.ahead", "2"], cwd=common.ROOT, text=True,
                         capture_output=True, check=True).stdout
    assert "in turns 5.07 s, busy 80%; ahead 4.05 s, busy 100%" in out
