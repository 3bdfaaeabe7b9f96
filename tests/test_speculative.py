"""Speculative decoding keeps the contract, in fewer passes, and wrong guesses leave no trace."""
import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import common
import pytest
from common import assert_contract, toy
from hypothesis import given, settings
from hypothesis import strategies as st

from beyond import speculative
from beyond.speculative import Lookup, generate
from checks.traps import swapped
from request import Request, prepare
from views.report import report, totals

MODEL, KNOWN = toy(), {}
QUIET = toy(loud=False)   # it repeats itself, so most guesses are right


def run(requests, model=MODEL, known=None, guesses=4, **knobs):
    trace = assert_contract(model, generate, [replace(request) for request in requests],
                            per_pass=1 + guesses, known=known, guesses=guesses, **knobs)
    budget = knobs.get("token_budget", 64)
    assert all(p.slots <= budget and p.pad_slots == p.finished_slots == 0 for p in trace.passes)
    return trace


@pytest.mark.parametrize("pages", [False, True], ids=["stage 6", "stage 7"])
@pytest.mark.parametrize("model", [MODEL, QUIET], ids=["loud", "quiet"])
@settings(max_examples=common.examples(300))
@given(workload=common.workloads(), more=st.integers(0, 20), guesses=st.integers(0, 6))
def test_contract(pages, model, workload, more, guesses):
    knobs = common.knobs_of("ragged_varlen", **workload.knobs)
    if pages:
        size = workload.knobs["page_size"]
        enough = common.smallest_pool(workload.requests, size)
        knobs |= dict(max_kv_tokens=None, page_size=size, pages=enough + more)
    run(workload.requests, model, KNOWN if model is MODEL else None, guesses, **knobs)


def test_guesses_save_passes_and_are_counted():
    requests = [Request([1, 2, 3] * 2, 12, name=f"r{i}") for i in range(4)]
    plain, guessed = (run(requests, QUIET, guesses=k) for k in (0, 4))
    assert len(guessed.passes) < len(plain.passes)
    sums = totals(guessed)
    assert sums["useful"] == totals(plain)["useful"] and totals(plain)["rejected"] == 0
    accepted = sum(len(r.token_steps) - len(set(r.token_steps)) for r in guessed.requests)
    assert f"{accepted:,} guesses, {accepted / len(guessed.passes):.2f} per pass" in report(guessed)
    assert "accepted" not in report(plain)
    # all that was sent through the model beyond the plain run was rejected
    assert sums["slots"] - totals(plain)["slots"] == sums["rejected"]


def test_lookup_enters_each_token_once():
    """Its work for a token does not grow with the tokens seen."""
    request, lookup = Request([i % 7 for i in range(600)], 40), Lookup()
    prepare(request, speculative.shape_of("gpt2"))
    request.computed = 599
    assert lookup.guess(request, 3) == [(600 + i) % 7 for i in range(3)]
    with patch.object(Request, "slice", autospec=True, side_effect=Request.slice) as looked_at:
        for token in range(5):
            request.computed += 1
            request.append(token)
            lookup.guess(request, 3)
    assert looked_at.call_count <= 5 * 7


def test_lookup_takes_the_longest_and_latest():
    request = Request([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 5)
    assert Lookup().guess(request, 2) == [4, 9]       # after 1 2 3
    request = Request([1, 2, 4, 1, 2, 5, 1, 2], 5)
    assert Lookup().guess(request, 1) == [5]          # the latest 1 2
    assert Lookup().guess(Request([1, 2, 3], 5), 4) == []


GENERATE = generate.__wrapped__   # without its decorator
TRAPS = {
    "a draw for a rejected row": (GENERATE, "            number += 1\n", '''
            number += 1
            for request in sampled:
                if request not in dict(plan) and number <= len(drafts[request]):
                    request.draw()
'''),
    "a guess accepted after a stop token": (GENERATE, "if not request.finished and", "if"),
    "a guess past the length limit": (
        speculative.draft, "room = request.kv_tokens", "room = request.kv_tokens + 9"),
    "a guess beyond the pages held": (speculative.draft, "scheduler.pages.size)", "99)"),
    "a wrong guess is accepted": (GENERATE, "== [token]]", "!= []]"),
    "a guess takes a prompt's share": (
        speculative.draft, "scheduler.token_budget - sum(n for _, n in plan)", "64"),
}


def crowds():
    for model in QUIET, MODEL:
        for seed in range(25):
            requests, known = common.crowd(seed, model), {}
            run(requests, model, known, token_budget=20)
            run(requests, model, known, token_budget=20, pages=9, page_size=4)


@pytest.mark.parametrize("trap", [None, *TRAPS])
def test_traps_are_seen(trap):
    if trap is None:   # and nothing is wrong without one
        return crowds()
    function, *change = TRAPS[trap]
    with swapped(function, [change]), pytest.raises(common.SEEN):
        crowds()


def test_the_command_prints_passes_and_price():
    out = subprocess.run([sys.executable, "-m", "beyond.speculative"], cwd=common.ROOT, text=True,
                         capture_output=True, check=True).stdout
    assert "batch 8, temperature 0.0, K = 0: 84 passes" in out
    assert "batch 8, temperature 0.0, K = 4: 54 passes" in out
    assert "batch 256, K = 4: a pass x 1.84" in out
