"""
Speculative decoding, planning ahead: what each of them gains, and costs,
is counted. (That they keep the contract: test_essays.py)
"""
import random
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import common
import pytest
from common import RIGHT, alone, as_program, cancel_now, captured, smallest_pool, toy
from hypothesis import given, settings
from hypothesis import strategies as st
from test_essays import MODEL, STAGES, run

import generate_prefix
from beyond import ahead
from beyond.speculative import Lookup
from lab import essays
from lab.simulate.hardware import Engine, constants, gpu_of, seconds, shape_of
from lab.views.report import SUMS, report, totals
from request import Request, prepare
from scheduler import Scheduler
from toolbox.trace import observed

# --- speculative decoding -------------------------------------------------------------------------

def test_guesses_save_passes_and_are_counted():
    requests = [Request([1, 2, i, 1, 2, 5, 1, 2], 12, name=f"r{i}") for i in range(4)]
    plain, guessed = (run(f"{k} guesses", requests) for k in (0, 4))
    assert len(guessed.passes) < len(plain.passes)
    sums = totals(guessed)
    assert sums["useful"] == totals(plain)["useful"] and totals(plain)["rejected"] == 0
    accepted = sum(len(r.token_steps) - len(set(r.token_steps)) for r in guessed.requests)
    assert f"{accepted:,} guesses, {accepted / len(guessed.passes):.2f} per pass" in report(guessed)
    assert "accepted" not in report(plain)
    # all that was sent through the model beyond the plain run was rejected
    assert sums["slots"] - totals(plain)["slots"] == sums["rejected"] > 0


def test_lookup_enters_each_token_once():
    """Its work for a token does not grow with the tokens seen."""
    request, lookup = Request([i % 7 for i in range(600)], 40), Lookup()
    prepare(request, common.GPTConfig())
    request.computed = 599
    assert lookup.guess(request, 3) == [(600 + i) % 7 for i in range(3)]
    with patch.object(Request, "slice", autospec=True, side_effect=Request.slice) as looked_at:
        for token in range(5):
            request.computed += 1
            request.append(token)
            lookup.guess(request, 3)
    assert looked_at.call_count <= 5 * 7


@pytest.mark.parametrize("prompt, most, guessed", [
    ([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 2, [4, 9]),   # after 1 2 3, the longest
    ([1, 2, 4, 1, 2, 5, 1, 2], 1, [5]),               # the latest 1 2
    ([1, 2, 3], 4, [])])
def test_lookup_takes_the_longest_and_latest(prompt, most, guessed):
    assert Lookup().guess(Request(prompt, 5), most) == guessed


# --- planning ahead -------------------------------------------------------------------------------

@settings(max_examples=common.examples(200))
@given(case=common.workloads(), seed=st.integers(0, 99), few=st.booleans())
def test_cancelled_requests_keep_what_they_had(case, seed, few):
    """Cancelled between two steps, waiting or running or in flight; the others lose nothing."""
    stream, requests = random.Random(seed), [*map(replace, case[0])]
    schedule = Scheduler.schedule

    def cancel_some(scheduler, step):
        for request in [*scheduler.running, *scheduler.waiting]:
            if not request.finished and stream.random() < 0.05:
                cancel_now(scheduler, request)
        return schedule(scheduler, step) if scheduler.busy else []

    size = case[1]["page_size"]
    room = dict(pages=smallest_pool(requests, size) + 3, page_size=size) if few else {}
    with patch.object(Scheduler, "schedule", cancel_some):
        ahead.generate(MODEL, requests, token_budget=case[1]["token_budget"], **room)
    for request in requests:
        tokens, _, reason = alone(MODEL, request)
        assert request.finished and request.block_table is None and not request.assumed
        if request.finish_reason == "cancelled":
            assert request.generated == tokens[:len(request.generated)]
        else:
            assert (request.generated, request.finish_reason) == (tokens, reason)


def test_a_stop_costs_a_row_and_an_end_by_length_none():
    """So the next pass was queued before the token was read, as far as a length could tell."""
    tokens, _, _ = alone(MODEL, Request([1, 2], 6))
    for request, rows in (Request([1, 2], 6), 0), (Request([1, 2], 9, eos_token=tokens[-1]), 1):
        plain = totals(generate_prefix.generate(MODEL, [replace(request)]))
        trace = totals(run("ahead", [request]))
        assert (trace["rejected"], trace["useful"]) == (rows, plain["useful"])
        assert trace["useful_scores"] == plain["useful_scores"]


@pytest.mark.parametrize("stage", STAGES)
def test_one_bad_request_is_named_and_the_others_keep_what_they_have(stage):
    common.assert_names_the_bad_one(STAGES[stage][0], token_budget=9)


# --- the commands ---------------------------------------------------------------------------------

@pytest.mark.parametrize("module, said", [
    ("beyond.fairness", ["served L a b c d", "sjf a b c d L", "3 may overtake a b c L d"]),
    ("beyond.ahead", ["in turns 5.02 s, busy 80%; ahead 3.99 s, busy 100%"]),
    ("beyond.hybrid", ["with 3 windows of 32, 185 pages held at most; without windows 436",
                       "least recently used 0% 100%", "passed pages first 100% 0%"]),
    ("beyond.prepacked", [f"12/12 {RIGHT}", "stage: prepacked, batch"])])
def test_the_commands_print_what_they_gain(module, said):
    _, out, _ = captured(as_program, module)
    assert all(words in " ".join(out.split()) for words in said)


@pytest.mark.thorough
@pytest.mark.parametrize("module, said", [
    ("beyond.speculative", ["batch 8, temperature 0.0, K = 0: 71 passes",
                            "batch 8, temperature 0.0, K = 4: 62 passes",
                            "batch 256, K = 4: a pass x 1.75"]),
    ("beyond.rollout", ["keep 130 2424 51%", "recompute 145 3443 0%", "wait 171 2296 0%",
                        "19 of 28 requests that began after a change get wrong tokens"]),
    ("beyond.sessions", ["140 0 False 677 100%", "140 0 True 527 57%", "140 inf False 2241 95%",
                         "140 inf True 612 8%", "140 30 True 539 9%"])])
def test_the_slow_commands(module, said):
    done = subprocess.run([sys.executable, "-m", module], cwd=common.ROOT, capture_output=True,
                          text=True)
    assert all(words in " ".join(done.stdout.split()) for words in said), done.stderr


@pytest.mark.parametrize("name", ["ahead", "fairness", "hybrid", "prepacked", "rollout", "sessions",
                                  "speculative", "tensor_parallel"])
def test_an_essay_that_is_started_as_a_file_says_how_to_start_it(name):
    done = subprocess.run([sys.executable, f"beyond/{name}.py"], cwd=common.ROOT,
                          capture_output=True, text=True)
    assert done.returncode and f" -m beyond.{name}\n" in done.stderr
    assert done.stderr.count("\n") == 1


def test_observers_see_each_pass_before_it_is_computed():
    """Also while the one before it is not read yet; so the compiled step serves them."""
    model, seen = toy(), []
    with observed(model, lambda step, batch: seen.append((step, list(batch.plan)))):
        trace = ahead.generate(model, [Request([1, 2, 3], 4), Request([4], 2, arrival=1)])
    assert [step for step, _ in seen] == [p.step for p in trace.passes]


# --- figures of the commands, counted by hand -----------------------------------------------------

def test_tokens_that_earlier_turns_had_computed():
    """
    Two sessions of two turns, with 6 and 10 tokens, and with 4 and 8. The last token of a turn is
    not computed. With all pages kept, 9 and 7 tokens are computed; without, 5 and 3 once more.
    """
    def session(*turns):
        return SimpleNamespace(turns=[SimpleNamespace(tokens=[0] * n) for n in turns])

    def trace(slots):
        record = SimpleNamespace(**dict.fromkeys(SUMS, 0) | {"slots": slots}, work=[])
        return SimpleNamespace(passes=[record], requests=[], started=0.0)

    both = [session(6, 10), session(4, 8)]
    assert essays.computed_again(both, trace(16)) == 0
    assert essays.computed_again(both, trace(16 + 5 + 3)) == 1
    assert essays.computed_again(both, trace(16 + 2)) == 0.25


@pytest.mark.parametrize("spans, old", [
    ([(0, 0, 3), (0, 3, 4), (1, 4, 5)], 1),             # the third token sees keys of both
    ([(0, 0, 3), (1, 3, 4), (1, 4, 5)], 2),
    ([(0, 0, 3), (1, 0, 4), (1, 4, 5)], 0),             # computed again with the new weights
    ([(0, 0, 2), (1, 2, 3), (2, 3, 4), (2, 4, 5)], 3),   # a chunk is no token
    ([(1, 0, 3), (1, 3, 4), (1, 4, 5)], 0)])
def test_tokens_that_were_sampled_over_keys_of_older_weights(spans, old):
    assert essays.over_old_keys(SimpleNamespace(prompt=[1, 2, 3], spans=spans)) == old


def test_a_pass_of_guesses_samples_one_token_of_each_request():
    shape, gpu, engine = shape_of("llama-2-7b"), gpu_of("a100"), Engine()
    for requests, rows in (1, 1), (8, 5), (256, 5):
        slots = requests * rows
        free = replace(engine, per_request=0.0)
        expected = seconds(constants(shape, gpu, free), slots, slots, 512 * slots, 512 * requests)
        assert essays.pass_on_a100(requests, rows) == pytest.approx(
            expected + requests * engine.per_request)
