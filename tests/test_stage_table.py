"""The table at the end of each script: what a stage buys and costs, from answers that are known."""
import re
import runpy
from dataclasses import replace

import pytest
from common import ROOT, mixed, toy

import generate_unbatched
from lab import flags
from lab.checks.ties import in_wider_dtype, run_alone
from lab.experiments.stages import twelve
from lab.loading.load import load
from lab.loading.stages import SCRIPTS
from lab.views import stage_table
from request import Request


@pytest.fixture(scope="module")
def built_in():
    """The built-in model, and its prompts with their answers."""
    model, tokenizer = load()
    requests = twelve(tokenizer)
    generate_unbatched.generate(model, requests)
    return model, requests


PROMISED = {   # by each docstring: the columns that get better than on the stage before, and worse
    "unbatched": ({"slots"}, set()),
    "naive": ({"passes", "at once"}, {"slots", "worst gap"}),
    "dynamic": ({"passes", "slots", "first token"}, {"worst gap"}),
    "chunked": ({"worst gap"}, {"passes", "first token"}),
    "interleaved": ({"passes"}, {"slots", "worst gap"}),
    "ragged": ({"slots", "worst gap"}, set()),
    "paged": ({"passes", "first token", "at once"}, {"slots", "worst gap"}),
    "prefix": ({"passes", "slots", "first token", "at once"}, set())}


def columns(text):
    """Those that "buys" or "costs" names."""
    return {name for name, words in stage_table.WORDS.items() for part in text.split("; ")
            if re.fullmatch(words.replace("{}", r"[\d,]+ -> [\d,]+"), part)}


@pytest.mark.parametrize("stage", SCRIPTS)
def test_a_stage_buys_and_costs_what_its_docstring_says(stage, built_in):
    model, requests = built_in
    table, said = stage_table.stage_table(stage, requests, model.config, {}).split("\n  buys ")
    buys, costs = (columns(" ".join(part.split())) for part in said.split("\n  costs "))
    buys_at_least, costs_just = PROMISED[stage]
    assert buys >= buys_at_least and costs == costs_just and not buys & costs
    rows = table.splitlines()[1:]
    assert [row.split()[-6] for row in rows] == [*SCRIPTS]
    assert [row.split()[2] for row in rows if row.startswith("> ")] == [stage]


def test_no_random_number_is_near_an_edge(built_in):
    """So the table is the same on every machine: rounding would have to be 40 times as large."""
    model, requests = built_in
    wider = in_wider_dtype(model)
    for request in requests:
        mine, exact = (
            (run_alone(each, request.prompt, request.generated) / request.temperature).softmax(-1)
            .cumsum(-1) for each in (model, wider))                              # (n, V)
        stream = replace(request)
        for token, cdf, other in zip(request.generated, mine, exact, strict=True):
            rounding = (cdf - other).abs().max()
            edges = cdf[max(token - 1, 0):token + 1]
            assert (edges - stream.draw()).abs().min() > 40 * rounding, request


# --- a model that computes nothing ----------------------------------------------------------------

PRESSURE = {"max_batch": 3, "token_budget": 7, "page_size": 4, "pages": 9, "max_kv_tokens": 40}


def work_of(trace):
    return [(each.step, each.shape, each.work, each.finished) for each in trace.passes]


@pytest.mark.parametrize("policy", ["fcfs", "sjf"])
@pytest.mark.parametrize("stage", SCRIPTS)
def test_known_answers_make_the_passes_of_the_real_run(stage, policy):
    model, preempted = toy(), 0
    for seed in range(3):
        asked = mixed() if seed == 0 else [
            Request([(seed + 3 * i + 5 * j) % 13 for j in range(1 + 5 * i % 11)], 2 + 4 * i % 13,
                    i % 2 * 0.9, seed=i, eos_token=(1, seed), arrival=2 * i // 3, name=f"q{i}",
                    priority=i % 3)
            for i in range(9)]
        knobs, _ = flags.knobs_of(SCRIPTS[stage], PRESSURE | {"policy": policy})
        real = SCRIPTS[stage](model, asked, **knobs)
        answered = [stage_table.known(request) for request in asked]
        again = SCRIPTS[stage](stage_table.NoModel(model.config), answered, **knobs)
        assert work_of(again) == work_of(real) and again.counts == real.counts
        for mine, theirs in zip(again.requests, real.requests, strict=True):
            assert (mine.name, mine.generated, mine.finish_reason, mine.token_steps) == (
                theirs.name, theirs.generated, theirs.finish_reason, theirs.token_steps)
        preempted += real.counts.get("preemptions", 0)
    assert preempted > 0 or stage not in ("paged", "prefix")


def test_the_figures_of_a_run_by_hand():
    """
    A's prompt of 5 takes steps 0 and 1. At step 3 B arrives: 3 of its 4 tokens are computed beside
    A's last, in chunked by a pass of their own, which comes after that of the decode.
    """
    answered = [Request([1] * 5, 3, name="A"), Request([2] * 4, 1, name="B", arrival=3)]
    for request, answer in zip(answered, ([7, 7, 7], [8])):
        request.generated = answer
    config = toy().config
    limits = {"token_budget": 4}
    assert stage_table.counted(SCRIPTS["ragged"], answered, config, limits) == [5, 11, 2, 4, 2]
    assert stage_table.counted(SCRIPTS["chunked"], answered, config, limits) == [6, 11, 2, 1, 2]
    one = [Request([1], 1)]
    one[0].generated = [3]
    assert stage_table.counted(SCRIPTS["unbatched"], one, config, {}) == [1, 1, 1, 0, 1]
    assert "buys" in stage_table.stage_table("unbatched", one, config, {})   # also without a gap


@pytest.mark.parametrize("before, after, buys, costs", [   # 4% is told, less is not
    (104, 100, ["passes"], []), (103, 100, [], []), (100, 104, [], ["passes"]),
    (100, 103, [], []), (100, 100, [], []), (0, 1, [], []), (0, 2, [], ["passes"])])
def test_a_small_change_is_not_told(before, after, buys, costs):
    """Of what shall be few; of requests at once, more is better."""
    rest = [7, 7, 7]
    words = f"{before} -> {after} "
    assert stage_table.changes([before, *rest, 9], [after, *rest, 9]) == (
        [words + name for name in buys], [words + name for name in costs])
    if before:
        told = f"{before} -> {after} requests at once"
        assert stage_table.changes([9, *rest, before], [9, *rest, after]) == (
            [told] * len(costs), [told] * len(buys))


# --- limits ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("stage, given, limits", [
    ("unbatched", {"max_batch": 3}, {}),
    ("naive", {}, {"max_batch": 5}),     # rows of 60 + 10 columns
    ("dynamic", {}, {"max_batch": 6}),   # caches of 64 at most
    ("dynamic", {"max_batch": 9}, {"max_batch": 9}),   # a flag wins
    ("dynamic", {"pages": 10, "page_size": 20}, {"max_batch": 3}),
    ("naive", {"max_kv_tokens": 63}, {"max_batch": 1}),   # the larger of the two never fits
    ("dynamic", {"max_kv_tokens": 63}, {"max_batch": 1}),
    ("naive", {"max_kv_tokens": 1}, {"max_batch": 1}),
    ("naive", {"max_kv_tokens": 10**9}, {"max_batch": 12}),
    ("ragged", {}, {"max_batch": 12, "token_budget": 64, "max_kv_tokens": 400}),
    ("chunked", {"pages": 10}, {"max_batch": 12, "token_budget": 64, "max_kv_tokens": 160}),
    ("paged", {"max_kv_tokens": 40, "token_budget": 8},   # rounded up: who fits there fits here
     {"max_batch": 12, "token_budget": 8, "page_size": 16, "pages": 3}),
    ("prefix", {"page_size": 100},
     {"max_batch": 12, "token_budget": 64, "page_size": 100, "pages": 4})])
def test_limits_are_the_same_memory_on_every_stage(stage, given, limits):
    requests = [Request([1] * 30, 11), Request([1] * 60, 5)]
    assert flags.limited(SCRIPTS[stage], given, requests, context=100) == limits


def test_a_stage_that_runs_as_a_script_has_the_same_limits():
    """There its `generate` is another function than the module's."""
    script = runpy.run_path(str(ROOT / "generate_naive.py"))["generate"]
    requests = [Request([1] * 30, 11), Request([1] * 60, 5)]
    assert flags.limited(script, {}, requests, context=100) == {"max_batch": 5}
