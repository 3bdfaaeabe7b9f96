"""
Speculative decoding, planning ahead, in-batch prefix caching: more stages that keep the contract.
What each of them gains, and costs, is counted. (Fairness: test_fairness.py)
"""
import contextlib
import random
import runpy
import sys
from dataclasses import replace
from functools import lru_cache, partial
from unittest.mock import patch

import common
import pytest
from common import alone, assert_contract, cancel_now, smallest_pool, toy
from hypothesis import given, settings
from hypothesis import strategies as st

import generate_prefix
from beyond import ahead, speculative
from beyond.in_batch import InBatchScheduler, serve
from beyond.speculative import Lookup
from generate_prefix import PrefixScheduler
from lab.checks.traps import swapped
from lab.views.report import report, totals
from request import Request, prepare
from scheduler import Scheduler
from toolbox.trace import observed

MODEL, QUIET = toy(), toy(loud=False)   # which repeats itself: most guesses are right
KNOWN = {MODEL: {}, QUIET: {}}   # what requests get alone
STAGES = {   # name: (generate, what a run of it may do that others do not)
    **{f"{k} guesses": (partial(speculative.generate, guesses=k), dict(per_pass=1 + k))
       for k in (0, 1, 4, 6)},
    "ahead": (ahead.generate, dict(late=1)),
    "ahead, in batch": (partial(ahead.generate, scheduler=InBatchScheduler), dict(late=1)),
    "in batch": (partial(generate_prefix.generate, scheduler=InBatchScheduler), {})}
GUESSES = [stage for stage in STAGES if "guesses" in stage]


def run(stage, requests, model=MODEL, **knobs):
    """The contract, for copies of these requests."""
    generate, more = STAGES[stage]
    requests = [*map(replace, requests)]

    def nothing_is_assumed(*_):   # but while a batch is laid out
        assert not any(request.assumed for request in requests)

    handle = model.register_forward_pre_hook(nothing_is_assumed)
    try:
        trace = assert_contract(model, generate, requests, known=KNOWN[model], **more, **knobs)
    finally:
        handle.remove()
    nothing_is_assumed()
    for p in trace.passes:
        assert p.slots <= knobs.get("token_budget", 64) and p.pad_slots == p.finished_slots == 0
    if stage not in GUESSES and not any(request.finish_reason == "stop" for request in requests):
        assert totals(trace)["rejected"] == 0   # an end by length costs no row
    return trace


@pytest.mark.parametrize("stages", [["ahead", "ahead, in batch"], ["in batch"], GUESSES],
                         ids=" or ".join)
@settings(max_examples=common.examples(200))
@given(case=common.workloads(), more=st.one_of(st.none(), st.integers(0, 20)),
       model=st.sampled_from([MODEL, QUIET]), twins=st.booleans(), one=st.integers(0, 3))
def test_contract(stages, case, more, model, twins, one):
    (requests, pressure), knobs = case, common.knobs_of("paged", **case[1])
    if twins:   # several answers to each prompt
        requests = [*requests, *(replace(r, seed=r.seed + 1, name=f"{r.name} again")
                                 for r in requests)]
    pages = None if more is None else smallest_pool(requests, pressure["page_size"]) + more
    run(stages[one % len(stages)], requests, model, **knobs | dict(pages=pages))


# --- known bugs -----------------------------------------------------------------------------------

GUESS = speculative.generate.__wrapped__   # without its decorator
TRAPS = {   # name: (stage, function, code as it stands, code of the trap)
    "a draw for a rejected row": ("4 guesses", GUESS, "            number += 1\n", '''
            number += 1
            for request in sampled:
                if request not in dict(plan) and number <= len(drafts[request]):
                    request.draw()
'''),
    "a guess accepted after a stop token": (
        "4 guesses", GUESS, "if not request.finished and", "if"),
    "a guess past the length limit": (
        "4 guesses", speculative.draft, "min(request.kv_tokens, ", "min(request.kv_tokens + 9, "),
    "a guess beyond the pages held": (
        "4 guesses", speculative.draft, "scheduler.pages.size)", "99)"),
    "a wrong guess is accepted": ("4 guesses", GUESS, "== [token]]", "!= []]"),
    "a guess takes a prompt's share": (
        "4 guesses", speculative.draft, "scheduler.token_budget - sum(n for _, n in plan)", "64"),
    "guesses are left assumed": (
        "4 guesses", GUESS, "            request.assumed = []", "            pass"),
    "a stale hole": ("ahead", ahead.fill_holes, "= flight.tokens[places]",
                     "= flight.batch.tokens[flight.batch.wanted[places]]"),
    "a hole that nobody fills": ("ahead", ahead.fill_holes, "    if rows:", "    if False:"),
    "a hole is left assumed": ("ahead", ahead.launch, "request.assumed = []", "pass"),
    "a hole for a token after the last": (
        "ahead", ahead.leave_holes, " and not request.is_last(len(request.generated) + 1)", ""),
    "pages freed under a queued pass are cached": (
        "ahead", ahead.cache_pages, """        if table is request.block_table:
            scheduler.cache_filled(request, start, start + n)
""", """
        for i in range(start // scheduler.pages.size, (start + n) // scheduler.pages.size):
            scheduler.pages.cache(table[i], scheduler.hashes(request, start + n)[i])
"""),
    "pages cached from where the request has come to": (
        "ahead", ahead.cache_pages, "(request, start, start + n)",
        "(request, request.computed, request.computed + n)"),
    "a token for a request that has ended": (
        "ahead", ahead.land, "enumerate(batch.sampled) if not request.finished",
        "enumerate(batch.sampled)"),
    "a preempted request that ended waits on": (
        "ahead", ahead.land, "if request.finished and request in scheduler.waiting", "if False"),
    "a partial page is shared": (
        "in batch", InBatchScheduler.grant_room, "granted = super().grant_room(request)",
        '''granted = super().grant_room(request)
        for other in self.running if granted else ():
            i = request.computed // size
            self.pages.free(request.block_table[i:])
            del request.block_table[i:]
            self.pages.share(request.block_table, other.block_table[i:i + 1])
            break'''),
}


@lru_cache(maxsize=None)
def crowd(seed, model):
    """Requests that begin alike and repeat themselves, and some tokens of theirs as stop tokens."""
    stream = random.Random(seed)
    stem = [stream.randrange(common.VOCAB) for _ in range(3)] * 4
    requests = [Request(stem[:stream.randint(1, 11)], 12, stream.choice([0.0, 0.0, 0.5]), seed=i,
                        arrival=stream.choice([0, 0, 1, 2, 5]), name=f"r{i}") for i in range(8)]
    for request in requests:
        tokens, _, _ = alone(model, request)
        request.eos_token = stream.choice([None, tokens[stream.randrange(9)], *stem[:3]])
    return requests


CROWDS = ([(seed, model) for seed in range(25) for model in (QUIET, MODEL)] if common.THOROUGH
          else [(9, QUIET), (0, MODEL)])   # which see all of the bugs


def crowds(stage):
    twins = [Request([1, 2, 3, 4, 5, 6], 9, 0.9, seed=i) for i in range(5)]
    run(stage, twins, pages=30, page_size=4)
    for seed, model in CROWDS:
        requests = crowd(seed, model)
        run(stage, requests, model, token_budget=20)
        for size, pages in (4, 9), *((n, smallest_pool(requests, n)) for n in (1, 2, 4)):
            run(stage, requests, model, token_budget=20, pages=pages, page_size=size)


@pytest.mark.parametrize("stage", dict.fromkeys(stage for stage, *_ in TRAPS.values()))
def test_nothing_is_wrong_without_a_trap(stage):
    crowds(stage)


@pytest.mark.parametrize("trap", TRAPS)
def test_traps_are_seen(trap):
    stage, function, *change = TRAPS[trap]
    with swapped(function, [change]), pytest.raises(common.SEEN):
        crowds(stage)


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


# --- in-batch prefix caching, and the commands ----------------------------------------------------

@pytest.mark.parametrize("kind, later, computed, held, first", [
    (PrefixScheduler, 0, 952, 64, [0] * 8), (PrefixScheduler, 2, 392, 29, [0] + [2] * 7),
    (InBatchScheduler, 0, 392, 29, [0] + [1] * 7)])
def test_equal_prompts_asked_for_together_are_computed_and_kept_once(kind, later, computed, held,
                                                                     first):
    requests = [([0] * 88, 32, later * (i > 0)) for i in range(8)]
    assert serve(kind(8, 1024, 64, 16), requests) == (computed, held, first)


def test_what_is_in_flight_cannot_be_found_yet():
    """One computes the prompt; the others wait until that has landed, and compute a page each."""
    requests = [Request([5] * 16, 4, 0.9, seed=i) for i in range(8)]
    trace = run("ahead, in batch", requests, page_size=4)
    assert totals(trace)["slots"] == 16 + 7 * 4 + 8 * 3
    scheduler = InBatchScheduler(8, 64, 12, 4)
    first, _ = common.queue(scheduler, [Request([5] * 16, 4), Request([5] * 16, 4)])
    common.finish(scheduler, scheduler.schedule(0))
    scheduler.preempt(first)
    scheduler.pages.allocate(all_pages := [], 12)   # what it has left cannot be found any more
    scheduler.pages.free(all_pages)
    assert scheduler.schedule(1) == [(first, 17)]   # the other waits for it again


def test_who_waits_for_a_beginning_holds_up_all_behind_it():
    """The price of the rule: two answers to each of four prompts, and room for all at once."""
    queue = [([i] * 88, 32, 0) for i in range(4) for _ in range(2)]
    *_, first = serve(PrefixScheduler(8, 1024, 64, 16), queue)
    assert first == [0] * 8
    *_, first = serve(InBatchScheduler(8, 1024, 64, 16), queue)
    assert first == [0, 1, 1, 2, 2, 3, 3, 4]
    *_, first = serve(InBatchScheduler(8, 64, 64, 4), [([0] * 4, 1, 0), ([0] * 8, 1, 0)])
    assert first == [0, 1]   # also for a page that the other's last token fills


def test_nobody_waits_for_what_is_not_being_computed():
    """
    Other beginnings; one that is cached, and another after it; tokens that the other may or may not
    generate; and a copy that cannot be found, because the page of which it is a copy could, and is
    gone.
    """
    *_, first = serve(InBatchScheduler(8, 1024, 64, 16), [([i] * 88, 2, 0) for i in range(4)])
    assert first == [0] * 4
    *_, first = serve(InBatchScheduler(8, 1024, 64, 16), [([0] * 88, 9, i) for i in range(4)])
    assert first == [0, 1, 2, 3]
    *_, first = serve(InBatchScheduler(8, 64, 64, 4), [
        ([0] * 4, 1, 0), ([0] * 4 + [1] * 5, 1, 1), ([0] * 4 + [2] * 5, 1, 1)])
    assert first == [0, 1, 1]
    *_, first = serve(InBatchScheduler(8, 1024, 64, 16), [([0] * 5, 99, 0), ([0] * 40, 1, 0)])
    assert first == [0, 0]
    *_, first = serve(InBatchScheduler(8, 1024, 5, 4), [
        ([0] * 4, 1, 0), ([0] * 4, 8, 0), ([3] * 12, 1, 1), ([0] * 6, 1, 2)])
    assert first == [0, 0, 1, 2]


@pytest.mark.parametrize("module, said", [
    pytest.param("beyond.speculative", ["batch 8, temperature 0.0, K = 0: 84 passes",
                                        "batch 8, temperature 0.0, K = 4: 54 passes",
                                        "batch 256, K = 4: a pass x 1.75"],
                 marks=pytest.mark.thorough),
    ("beyond.ahead", ["in turns 5.02 s, busy 80%; ahead 3.99 s, busy 100%"]),
    ("beyond.prepacked", ["12/12 requests identical to unbatched", "stage: prepacked, batch"]),
    ("beyond.in_batch", ["392 tokens computed, 29 pages held",
                         "632 tokens computed, first tokens in steps [0, 1, 1, 2, 2, 3, 3, 4]"])])
def test_the_commands_print_what_they_gain(module, said, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [module])
    monkeypatch.delitem(sys.modules, module)   # it runs anew, as __main__
    with contextlib.suppress(SystemExit):
        runpy.run_module(module, run_name="__main__")
    out = capsys.readouterr().out
    assert all(line in out for line in said)


@pytest.mark.parametrize("module, word, said", [
    ("beyond.ahead", "0", "host_ms: must be above 0, not 0"),
    ("beyond.speculative", "nowhere", "model 'nowhere': no such file")])
def test_bad_input_gets_one_line(module, word, said, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", [module, word])
    monkeypatch.delitem(sys.modules, module)
    with pytest.raises(SystemExit, match="^2$"):
        runpy.run_module(module, run_name="__main__")
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_observers_see_each_pass_before_it_is_computed():
    """Also while the one before it is not read yet; so the compiled step serves them."""
    model, seen = toy(), []
    with observed(model, lambda step, batch: seen.append((step, list(batch.plan)))):
        trace = ahead.generate(model, [Request([1, 2, 3], 4), Request([4], 2, arrival=1)])
    assert [step for step, _ in seen] == [p.step for p in trace.passes]
