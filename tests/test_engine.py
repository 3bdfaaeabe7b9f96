"""
engine.py: requests that come, leave and fail while it runs get the tokens that they get alone.
"""
import random
from collections import deque
from dataclasses import replace

import pytest
import torch
from common import RIGHT, ROOT, alone, as_program, assert_pages, captured, mixed, refused, toy

import generate_prefix
from engine import Engine
from generate_paged import Paged
from lab import streaming
from lab.checks.check import Check
from lab.run import parser
from request import Request

SCRIPT = str(ROOT / "engine.py")
KNOBS = dict(pages=20, page_size=3, max_batch=3, token_budget=7)


def run(engine, requests):
    """The loop that belongs to the caller. Returns all tokens in the order in which they came."""
    coming = deque(sorted(requests, key=lambda request: request.arrival))
    tokens = []
    while coming or engine.busy:
        while coming and coming[0].arrival <= engine.number:
            engine.add(coming.popleft())
        if not engine.busy:   # `step` has nothing to do, and time goes on to the next arrival
            engine.add(coming.popleft())
        tokens += engine.step()
    return tokens


def test_it_is_prefix_opened():
    model = toy()
    closed = mixed()
    opened = [replace(request) for request in closed]
    trace = generate_prefix.generate(model, closed, **KNOBS)
    engine = Engine(model, **KNOBS)
    run(engine, opened)
    assert [request.generated for request in opened] == [request.generated for request in closed]
    assert [r.token_steps for r in opened] == [r.token_steps for r in closed]
    assert dict(engine.scheduler.pool.counts) == dict(trace.counts)


def test_it_returns_each_token_once_and_tells_on_token_the_same():
    model, requests = toy(), mixed()
    check = Check(model, requests)
    told = []

    def on_token(request, token, logits):
        told.append((request, token))
        check.on_token(request, token, logits)

    tokens = run(Engine(model, **KNOBS, on_token=on_token), requests)
    assert tokens == told
    assert sum(len(request.generated) for request in requests) == len(tokens)
    assert {verdict.verdict for verdict in check()} == {"identical"}


def test_idle_it_does_nothing():
    engine = Engine(toy())
    assert not engine.busy and engine.step() == [] and engine.number == 0
    engine.add(Request([1, 2], 1))
    assert engine.busy and len(engine.step()) == 1
    assert not engine.busy and engine.step() == []


def broken_pass(engine, fault):
    """Makes the next forward pass fail, in its last layer. fault: the error's request."""
    def fail(*_):
        error = RuntimeError("it failed")
        error.request = fault
        raise error
    return engine.model.ln_f.register_forward_pre_hook(fail)


@pytest.mark.parametrize("seed", range(6))
def test_any_may_come_and_leave_and_any_pass_may_fail(seed):
    rng, model = random.Random(seed), toy()
    engine = Engine(model, pages=8, page_size=rng.choice([1, 2, 3]), max_batch=rng.randint(2, 5),
                    token_budget=rng.choice([3, 8, 64]))
    stem = [rng.randrange(5) for _ in range(6)]   # a common beginning
    asked, failed = [], 0
    while len(asked) < 40 or engine.busy:
        if len(asked) < 40 and (rng.random() < 0.5 or not engine.busy):
            prompt = stem[:rng.randint(0, 6)] + [rng.randrange(5)]
            longest = 8 * engine.scheduler.pool.page_size + 1 - len(prompt)
            request = Request(prompt, rng.randint(1, min(6, longest)), rng.choice([0, 1]),
                              seed=rng.randrange(9))
            engine.add(request)
            asked.append(request)
        if rng.random() < 0.1:   # one that waits, runs, or has ended
            engine.abort(rng.choice(asked))
        if engine.busy and rng.random() < 0.1:
            before = {request: list(request.generated) for request in asked}
            with broken_pass(engine, None), pytest.raises(RuntimeError, match="it failed"):
                engine.step()
            failed += 1
            assert before == {request: request.generated for request in asked}
            for request, _ in engine.plan if rng.random() < 0.3 else ():
                engine.abort(request, "error")
        else:
            engine.step()
        assert_pages(engine.scheduler)
    assert failed
    for request in asked:
        tokens = alone(model, request)[0]
        if request.finish_reason in ("abort", "error"):
            assert request.generated == tokens[:len(request.generated)]
        else:
            assert request.generated == tokens
    assert len(engine.scheduler.pool.free_queue) == 8


def test_a_failed_pass_leaves_no_page_that_can_be_found():
    """Its second request finds the first's pages in the same step; nobody wrote them."""
    model = toy()
    requests = [Request([1, 2, 3, 4, 5], 3), Request([1, 2, 3, 4, 1], 3)]
    engine = Engine(model, pages=8, page_size=2)
    for request in requests:
        engine.add(request)
    with broken_pass(engine, None), pytest.raises(RuntimeError):
        engine.step()
    assert not engine.scheduler.pool.cached
    while engine.busy:
        engine.step()
    for request in requests:
        assert request.generated == alone(model, request)[0]


def test_a_pass_that_is_interrupted_is_taken_back_too():
    def interrupt(*_):
        raise KeyboardInterrupt
    model, request = toy(), Request([1, 2, 3, 4, 5], 3)
    engine = Engine(model, pages=8, page_size=2)
    engine.add(request)
    with model.ln_f.register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
        engine.step()
    assert request.computed == 0 and not engine.scheduler.pool.cached
    while engine.busy:
        engine.step()
    assert request.generated == alone(model, request)[0]


def test_whose_nan_it_is_is_said_and_the_others_go_on():
    model = toy()
    with torch.no_grad():
        model.wpe.weight[6] = torch.nan   # a request that comes so far has no logits
    bad, good = Request([1, 2, 3, 4, 0, 1, 2], 3), Request([1, 2], 3)
    engine = Engine(model, **KNOBS)
    engine.add(good)
    engine.add(bad)
    with pytest.raises(ValueError, match="not finite") as failure:
        while engine.busy:
            engine.step()
    assert failure.value.request is bad and bad in [request for request, _ in engine.plan]
    engine.abort(bad, "error")
    while engine.busy:
        engine.step()
    assert bad.generated == [] and good.generated == alone(model, good)[0]


def test_an_abort_ends_a_request_wherever_it_is():
    model = toy()
    engine = Engine(model, pages=20, page_size=3, max_batch=1)
    runs, waits = Request([1, 2, 3], 6), Request([2, 3], 6)
    engine.add(runs)
    engine.add(waits)
    engine.step()
    engine.abort(waits)
    engine.abort(runs, reason="timeout")
    assert (runs.finish_reason, waits.finish_reason) == ("timeout", "abort")
    assert not engine.busy and len(engine.scheduler.pool.free_queue) == 20
    engine.abort(runs)       # it has ended: no effect
    stranger = Request([1])
    engine.abort(stranger)   # it never came: no effect
    assert runs.finish_reason == "timeout" and stranger.finish_reason is None


def test_names_are_unique_over_its_life():
    engine = Engine(toy(), **KNOBS)
    requests = [Request([1], 1) for _ in range(3)]
    engine.add(requests[0])
    engine.step()            # it has ended, and its name stays its own
    engine.add(Request([1], 4, name="r1"))
    engine.add(requests[1])
    engine.add(requests[2])
    assert [request.name for request in requests] == ["r0", "r2", "r3"]
    with pytest.raises(ValueError, match="request 'r1' has the name of a request"):
        engine.add(Request([1], 1, name="r1"))


@pytest.mark.parametrize("request_, said", [
    (lambda: Request([1], 80), "needs 80 KV tokens, there are 60"),
    (lambda: Request([99]), "token id 99 is not in the vocabulary"),
    (lambda: 5, "requests must be Requests, not 5")])
def test_what_it_cannot_serve_is_refused_and_changes_nothing(request_, said):
    model = toy(block_size=100)
    engine = Engine(model, **KNOBS)
    with pytest.raises(ValueError, match=said):
        engine.add(request_())
    assert not engine.busy


def test_one_that_has_run_is_refused():
    engine = Engine(toy(), **KNOBS)
    request = Request([1, 2], 1)
    engine.add(request)
    engine.step()
    with pytest.raises(ValueError, match="has already run"):
        engine.add(request)


def test_one_that_was_aborted_before_it_ran_is_refused():
    engine = Engine(toy(), **KNOBS)
    request = Request([1, 2], 4)
    engine.add(request)
    engine.abort(request)
    with pytest.raises(ValueError, match="has already run"):
        engine.add(request)
    assert not engine.busy


def test_what_has_ended_leaves_nothing_behind():
    engine = Engine(toy(), **KNOBS)
    for number in range(30):
        request = Request([1, number % 5], 3)
        engine.add(request)
        if number % 3:
            engine.abort(request)
        engine.step()
    while engine.busy:
        engine.step()
    trace = engine.trace
    assert len(trace.passes) == 1 and len(trace.step_times) == 1
    assert not trace.reached and not trace.requests


def test_it_takes_another_layout():
    class Other(Paged):
        pass

    model, request = toy(), Request([1, 2, 3], 4)
    seen = []
    engine = Engine(model, layout=lambda *parts: seen.append(parts) or Other(*parts))
    run(engine, [request])
    assert len(seen) == 4 and request.generated == alone(model, request)[0]


# --- as a script ----------------------------------------------------------------------------------

def test_the_script_streams_aborts_one_and_checks_all():
    code, out, _ = captured(as_program, SCRIPT, "--max_new_tokens", "20")
    assert code == 0
    assert "[r11 comes]" in out and "[r6 is aborted]" in out and "ends: length]" in out
    assert out.splitlines()[-1].startswith(
        f"11/11 {RIGHT}, 1 aborted")


def test_the_script_names_flags_that_it_does_not_have():
    code, out, _ = captured(as_program, SCRIPT, "--max_new_tokens", "2", "--quiet",
                            "--arrival_rate", "2", "--policy", "sjf", "--prompt", "a")
    assert code == 0 and "step" not in out
    assert "--arrival_rate has no meaning for the engine: ignored" in out
    assert "--policy has no meaning for the engine: ignored" in out


def test_the_script_refuses_bad_flags_in_one_line():
    refused("page_size", as_program, SCRIPT, "--page_size", "9999")


def test_the_scripts_pool_is_no_larger_than_its_requests_can_fill():
    """And it is not made here: before, it took all memory."""
    def made(model, pages=256, page_size=16, max_batch=8, token_budget=64, on_token=None):
        raise InterruptedError(pages)

    for pages, expected in ("7", 7), ("99999999999", 2 * 256 // 16):
        args = parser("", made).parse_args(["--prompt", "a", "--prompt", "b", "--pages", pages])
        with pytest.raises(InterruptedError, match=f"^{expected}$"):
            streaming.stream(made, args)
