"""
Plans beside those of vLLM's own scheduler, which are recorded (lab/experiments/plans.py): equal in
three modes. Whoever plans otherwise is told where, and perhaps why.
"""
import json
import subprocess
import sys
from copy import deepcopy
from functools import partial
from unittest.mock import patch

import pytest
from common import ROOT, THOROUGH, refused

import generate_prefix
from beyond import ahead
from beyond.fairness import SCHEDULERS, FairScheduler
from generate_prefix import PrefixScheduler
from lab.checks.traps import broken
from lab.experiments import __main__ as runner
from lab.experiments import plans, vllm_names
from lab.experiments.plan_rules import (
    RULES,
    FoundAfterThePass,
    LeastRecentlyUsed,
    OnePageAHash,
    WholePrompts,
)
from lab.experiments.plan_workloads import KINDS, workloads
from lab.loading.recorded import RECORDED
from lab.views.stage_table import NoModel
from model import GPTConfig
from request import Request

VERSION, WORKS = plans.recorded()
PART = len(WORKS) if THOROUGH else 12   # of each kind, the first so many are compared


def of(kind, number=PART):
    return [work for work in WORKS if work["kind"] == kind][:number]


# --- what is recorded -----------------------------------------------------------------------------

def test_the_recorded_workloads_are_those_that_are_made():
    """So anybody can record them anew."""
    assert VERSION == "0.32.0" and RECORDED.stat().st_size <= 600_000
    for kind in KINDS:
        made = [json.loads(json.dumps(work))
                for work in workloads(kind, plans.NUMBER, plans.SEED)]
        kept = [{name: value for name, value in work.items() if name != "plans"}
                for work in of(kind, len(WORKS))]
        assert made == kept
    assert len(WORKS) == plans.NUMBER * len(KINDS)


def holds(prompt, tokens):
    return any(prompt[i:i + len(tokens)] == tokens for i in range(len(prompt)))


@pytest.mark.parametrize("kind", KINDS)
def test_some_prompt_holds_another_requests_prompt_and_answer(kind):
    """Else it could not matter when a page of an answer can be found."""
    found = 0
    for work in of(kind, len(WORKS)):
        for one in work["requests"]:
            said = one["prompt"] + one["answer"][:1]
            found += any(each["prompt"][:len(said)] == said for each in work["requests"])
    assert found >= 20


def test_what_the_kinds_promise():
    """Each is what its docstring says, and no promise is one that no workload keeps."""
    def some(kind, what):
        return sum(map(what, of(kind, len(WORKS))))

    number = plans.NUMBER
    assert some("small budgets", lambda w: w["token_budget"] < w["page_size"]) == number
    assert some("one at a time", lambda w: w["max_batch"] == 1) == number
    assert some("long prompts", lambda w: max(len(r["prompt"]) for r in w["requests"]) > 900) > 40
    assert some("stop tokens", lambda w: any("stop" in r for r in w["requests"])) > 90
    assert some("one token answers",
                lambda w: all(len(r["answer"]) == 1 for r in w["requests"])) == number
    assert some("aborts", lambda w: any("abort" in r for r in w["requests"])) > 70
    assert some("crowds", lambda w: len(w["requests"]) == 300) > 5
    assert some("returns", newcomers_while_preempted_wait) > 40


def newcomers_while_preempted_wait(work):
    """Whether a request arrives while one that has run is not in the plan."""
    arrivals = {each["arrival"] for each in work["requests"]}
    seen = set()
    for i, (step, plan) in enumerate(work["plans"]["fcfs"]):
        later = {name for _, each in work["plans"]["fcfs"][i:] for name in each}
        if step in arrivals and (seen & later) - {*plan}:
            return True
        seen |= {*plan}
    return False


# --- equal ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("mode", plans.OURS)
@pytest.mark.parametrize("kind", KINDS)
def test_plans_are_those_of_vllm(kind, mode):
    """In mode priority: but for empty steps; if these are allowed, in all."""
    works = of(kind)
    differ = plans.different(works, mode, plans.OURS[mode])
    assert not plans.faults_of(mode, works, differ)
    assert mode == "priority" or not differ


def document():
    return " ".join((ROOT / "docs" / "vllm.md").read_text(encoding="utf-8").split())


@pytest.mark.thorough
def test_vllm_md_counts_the_empty_steps():
    lost = len(plans.different(WORKS, "priority", plans.OURS["priority"]))
    assert f"{len(WORKS) - lost:,} of {len(WORKS):,}" in document()
    assert f"In the {lost} workloads, vLLM plans a step that computes nothing" in document()


def test_the_context_ends_one_token_later_as_vllm_md_says():
    request = Request([1] * 3, 99)
    generate_prefix.generate(NoModel(GPTConfig(block_size=8)), request)
    said = f"In a context of 8, a prompt of 3 gets {len(request.generated)} tokens"
    assert request.finish_reason == "length" and said in document()


@pytest.mark.parametrize("kind", KINDS)
def test_priority_with_empty_steps_is_vllms(kind):
    def with_empty_steps(work):
        return plans.plans_of(work, plans.PRIORITY_OF_VLLM)

    assert not plans.different(of(kind), "priority", with_empty_steps)


A_PAGE_IN_TIME = {   # B's prompt holds what A is answering: page 1 can be found in step 2
    "max_batch": 2, "token_budget": 8, "pages": 20, "page_size": 1, "kind": "by hand", "requests": [
        {"name": "A", "prompt": [1], "answer": [2, 3, 4], "arrival": 0, "priority": 0},
        {"name": "B", "prompt": [1, 2, 9], "answer": [5], "arrival": 2, "priority": 0}]}


@pytest.mark.parametrize("mode", ["fcfs", "ahead"])
def test_a_page_is_found_in_the_step_after_its_last_token_has_landed(mode):
    assert plans.OURS[mode](A_PAGE_IN_TIME)[2] == [2, {"A": 1, "B": 1}]


class ByArrival(FairScheduler):
    def __init__(self, *limits):
        super().__init__(*limits, policy="fcfs", bound=10**9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_that_ranks_by_arrival_plans_ahead_as_vllm(kind):
    """A request whose last token is in flight has nothing to compute; those behind it go on."""
    def by_arrival(work):
        return plans.plans_ahead(work, ByArrival)

    assert not plans.different(of(kind, 12), "ahead", by_arrival)


def test_one_of_fairness_schedulers_can_plan_ahead():
    trace = ahead.generate(NoModel(plans.CONFIG), plans.as_requests(A_PAGE_IN_TIME), 2, 8, 20, 1,
                           SCHEDULERS["priority"])
    assert {name: n for name, _, n in trace.passes[2].work} == {"A": 1, "B": 1}


# --- not equal ------------------------------------------------------------------------------------

@pytest.mark.parametrize("mode", plans.OURS)
def test_no_workload_is_excused(mode, monkeypatch, capsys):
    """Wherever a plan differs otherwise than by vLLM's empty step, the command fails."""
    works = deepcopy(of("returns", 12))
    for work in works:
        work["plans"][mode][-1][1] = {"r0": 99}
    monkeypatch.setattr(plans, "recorded", lambda: (VERSION, works))
    assert runner.main(["plans"]) == 1
    said = capsys.readouterr().out
    assert f"{mode}: 12 differ, and nothing explains it" in said
    assert "vLLM's [[" in said and "{'r0': 99}]]" in said
    assert any(not plan for work in works for _, plan in work["plans"]["priority"])


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_makes_a_difference_which_is_named(rule):
    works = of("conversations", 60)
    differ = plans.different(works, "fcfs", lambda work: plans.plans_of(work, rule))
    assert differ
    said = plans.likeness(works, differ)
    assert said == f"{len(differ)} of these {len(differ)} are those of ours with {rule.__doc__}"


def test_what_differs_is_told_in_full():
    """An edited scheduler loses some twin, at a step that preempts."""
    works = of("twins", 100)
    with broken("admits in a step that preempts", show=False):
        lost = plans.different(works, "fcfs", plans.OURS["fcfs"])
    assert lost
    for number, ours in lost:
        theirs = works[number]["plans"]["fcfs"]
        i = plans.first_difference(ours, theirs)
        assert ours[:i] == theirs[:i] and ours[i][1].items() > theirs[i][1].items()


WITHOUT = {   # a rule as docs/vllm.md ends it, the mode, and what makes our plans without it
    **{sentence: ("fcfs", partial(plans.plans_of, scheduler_class=rule)) for rule, sentence in {
        WholePrompts: "chunk by chunk*",
        FoundAfterThePass: "that fills it is planned*",
        LeastRecentlyUsed: "are taken first*",
        OnePageAHash: "can still be found"}.items()},
    "no request is admitted*": ("fcfs", broken("admits in a step that preempts", show=False)(
        plans.OURS["fcfs"])),
    "its full pages can be found*": ("ahead", patch.object(ahead, "cache_pages", lambda *_: None)(
        plans.OURS["ahead"])),
    "found in the next plan*": ("ahead", patch.object(ahead, "naming_late", lambda kind: kind)(
        plans.OURS["ahead"]))}


@pytest.mark.thorough
@pytest.mark.parametrize("rule", WITHOUT)
def test_vllm_md_counts_what_each_rule_changes(rule):
    """In brackets behind a rule: how many of the recorded plans differ without it."""
    written = document().split(f"{rule} (")[1].split(")")[0]
    assert written == f"{len(plans.different(WORKS, *WITHOUT[rule])):,}"


# --- the names in docs/vllm.md --------------------------------------------------------------------

def test_each_of_our_names_in_vllm_md_is_here_and_stands_beside_one_of_vllms():
    pairs = vllm_names.pairs(vllm_names.DOCUMENT.read_text(encoding="utf-8"))
    assert len(pairs) >= 60
    assert not [pair.ours for pair in pairs if not vllm_names.our_kinds(pair.ours)]
    assert ("Request.computed", "v1/request.py", "num_computed_tokens") in pairs
    assert ("Request.todo", "v1/request.py", "num_tokens_with_spec") in pairs


@pytest.fixture
def a_vllm(tmp_path):
    """A folder with as much of vLLM's request.py as the names need."""
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "request.py").write_text(
        "class Request:\n"
        "    def __init__(self):\n"
        "        self.num_computed_tokens = 0\n\n"
        "    @property\n"
        "    def num_tokens_with_spec(self):\n"
        "        return len(self.tokens)\n")
    return tmp_path


@pytest.mark.parametrize("ours, theirs, wrong", [
    ("`Request.computed`, `todo`", "`num_computed_tokens`, `num_tokens_with_spec`", []),
    ("`Request.computed`, `todo`", "`num_tokens_with_spec`, `num_computed_tokens`", [
        "Request.computed beside num_tokens_with_spec, but one is attribute, the other function",
        "Request.todo beside num_computed_tokens, but one is function, the other attribute"]),
    ("`Request`", "`num_computed_tokens`", [
        "Request beside num_computed_tokens, but one is class, the other attribute"]),
    ("`Request.todo`", "`todo`", ["todo in v1/request.py, which is not there"]),
    ("`Request.page`", "`num_computed_tokens`", ["Request.page, which is not here"]),
    ("`beyond/nothing.py`", "`Request`", ["beyond/nothing.py, which is not here"])])
def test_names_that_are_missing_or_stand_crosswise_are_found(a_vllm, ours, theirs, wrong):
    row = f"| {ours} | `v1/request.py`: {theirs} | `prose` |"
    assert list(vllm_names.unknown_names(a_vllm, row)) == wrong


def test_a_file_that_vllm_does_not_have_is_found(a_vllm):
    row = "| `Request` | `v1/gone.py`: `Request` | |"
    assert list(vllm_names.unknown_names(a_vllm, row)) == [
        "Request in v1/gone.py, which is not there"]


def test_names_that_cannot_be_paired_are_refused():
    row = "| `Request.computed`, `todo` | `v1/request.py`: `num_computed_tokens` | |"
    with pytest.raises(ValueError, match="2 names beside 1 in"):
        vllm_names.pairs(row)


# --- the command ----------------------------------------------------------------------------------

@pytest.fixture
def few(monkeypatch):
    works = of("mixed", 9) + of("twins", 9)
    monkeypatch.setattr(plans, "recorded", lambda: (VERSION, works))
    return works


def test_the_command_says_how_many_are_equal(few, capsys):
    assert runner.main(["plans"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["fcfs", "priority", "ahead", "passes"] in lines
    passes = sum(len(each) for work in few for each in work["plans"].values())
    assert ["all", "18/18", "18/18", "18/18", f"{passes:,}"] in lines


def test_the_command_compares_another_scheduler(few, capsys):
    assert runner.main(["plans", "--scheduler", "generate_prefix:PrefixScheduler"]) == 0
    assert "18 of 18 plans are equal to vLLM 0.32.0's" in capsys.readouterr().out
    rule = "lab.experiments.plan_rules:FoundAfterThePass"
    assert runner.main(["plans", "--scheduler", rule]) == 1
    said = capsys.readouterr().out
    assert "are those of ours with pages that can be found after the pass" in said
    assert "fcfs, workload " in said and "}]], vLLM's [[" in said


class Failing(PrefixScheduler):
    def update(self, plan, tokens):
        raise KeyError("no such page")


def test_what_another_scheduler_raises_is_a_difference(few, capsys):
    assert runner.main(["plans", "--scheduler", "test_plans:Failing"]) == 1
    said = capsys.readouterr().out
    assert "0 of 18 plans" in said
    assert "workload 0 (mixed): raises KeyError: 'no such page' (test_plans.py" in said


@pytest.mark.parametrize("flags, said", [
    (["--scheduler", "no_such:Thing"], "--scheduler no_such:Thing: .. use MODULE:CLASS"),
    (["--scheduler", "scheduler:Nobody"], "--scheduler scheduler:Nobody: .. use MODULE:CLASS"),
    (["--scheduler", "scheduler"], "--scheduler scheduler: .. use MODULE:CLASS"),
    (["--scheduler", "os:path"], "--scheduler os:path: it is no class; use MODULE:CLASS"),
    (["--scheduler", "scheduler:Scheduler"], "--scheduler scheduler:Scheduler: .. it is called "
     "with max_batch, token_budget, pages, page_size"),
    (["--scheduler", "types:SimpleNamespace"], "--scheduler types:SimpleNamespace: "),
    (["--scheduler", "paging:PagePool"], "--scheduler paging:PagePool: "),
    (["--scheduler", "builtins:print"], "--scheduler builtins:print: it has no method add"),
    (["--keep"], "--keep needs --vllm PYTHON: without it, nothing is recorded"),
    (["--seed", "0"], "--seed needs --vllm PYTHON"),
    (["--vllm", "no/python"], "--vllm no/python: No such file"),
    (["--vllm", "", "--number", "1"], "--vllm : "),
    (["--vllm", "false", "--number", "1"], "--vllm false: it said nothing"),
    (["--vllm", "true", "--number", "1"], "--vllm true: it has printed no plans"),
    (["--vllm", "echo", "--number", "1"], "--vllm echo: it has printed no plans"),
    (["--vllm", sys.executable, "--number", "1"], f"--vllm {sys.executable}: ModuleNotFoundError"),
    (["--vllm", "python", "--number", "99999999999"],
     "--number must be at most 10,000, not 99,999,999,999"),
    (["--vllm", "python", "--number", "0"], "--number")])
def test_what_cannot_be_compared_is_refused_in_one_line(flags, said):
    refused(said, runner.main, ["plans", *flags])


def test_a_python_without_vllm_is_no_fault_of_ours():
    done = subprocess.run([sys.executable, plans.RECORDER], input="", capture_output=True,
                          text=True)
    assert done.returncode and "No module named 'vllm'" in done.stderr
