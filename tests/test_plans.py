"""
Plans beside those of vLLM's own scheduler, which are recorded (lab/experiments/plans.py): equal, or
excused by name; and who plans otherwise is told where, and perhaps why.
"""
import json
from collections import Counter

import pytest
from common import refused

from generate_prefix import PrefixScheduler
from lab.checks.traps import broken
from lab.experiments import __main__ as runner
from lab.experiments import plans

VERSION, WORKS = plans.recorded()


def of(kind):
    return [work for work in WORKS if work["kind"] == kind]


def test_the_recorded_workloads_are_those_that_are_made():
    """300 of each kind, of the others a fifth; so anybody can record them anew."""
    assert VERSION == "0.32.0"
    for kind in plans.KINDS:
        asked = [json.loads(json.dumps(work)) for work in plans.workloads(kind, 300, 0)]
        found = [{name: value for name, value in work.items()
                  if name not in ("plans", "in_flight")} for work in of(kind)]
        assert asked == found and len(found) in (300, 60)


@pytest.mark.parametrize("kind", plans.KINDS)
def test_plans_are_those_of_vllm(kind):
    """All, but for one request that is planned first and then makes room (excuse)."""
    differ = Counter(plans.excuse(work) for work in of(kind)
                     if plans.plans_for(work) != work["plans"])
    assert differ.total() == (kind == "twins, priority") and not differ[None]


@pytest.mark.parametrize("rule", plans.RULES)
def test_each_rule_makes_a_difference_which_is_named(rule):
    works = of("twins")[:45]
    without = [plans.plans_of(work, rule) for work in works]
    assert without != [work["plans"] for work in works]
    said = plans.likeness(without, works)
    assert said == f"45 of its plans are those of ours with {rule.__doc__}"


def test_what_differs_is_told_in_full():
    """An edited scheduler loses some twin, at a step that preempts."""
    with broken("admits in a step that preempts", show=False):
        lost = [(work["plans"], mine) for work in of("twins")[:60]
                if (mine := plans.plans_of(work, PrefixScheduler)) != work["plans"]]
    assert lost
    for theirs, mine in lost:
        i = plans.first_difference(mine, theirs)
        assert mine[:i] == theirs[:i] and mine[i][1].items() > theirs[i][1].items()


def test_the_command_compares_another_scheduler(capsys, monkeypatch):
    monkeypatch.setattr(plans, "recorded", lambda: (VERSION, of("mixed")[:9] + of("twins")[:9]))
    assert runner.main(["plans"]) == 0
    assert "twins: equal to vLLM 0.32.0 in 9 of 9 workloads" in capsys.readouterr().out
    assert runner.main(["plans", "--scheduler", "generate_prefix:PrefixScheduler"]) == 0
    capsys.readouterr()
    assert runner.main(["plans", "--scheduler", "lab.experiments.plans:FoundAfterThePass"]) == 1
    said = capsys.readouterr().out
    assert "9 of its plans are those of ours with pages that can be found after the pass" in said
    assert "workload 7, pass 5: [[5, {" in said and "}]], vLLM's [[5, {" in said


@pytest.mark.parametrize("flags, said", [
    (["--scheduler", "no_such:Thing"], "--scheduler no_such:Thing: .. use MODULE:CLASS"),
    (["--scheduler", "scheduler:Nobody"], "--scheduler scheduler:Nobody: .. use MODULE:CLASS"),
    (["--scheduler", "scheduler"], "--scheduler scheduler: .. use MODULE:CLASS"),
    (["--vllm", "no/python"], "--vllm no/python: No such file"),
    (["--vllm", "false", "--number", "1"], "--vllm false: it said nothing"),
    (["--number", "0"], "--number")])
def test_what_cannot_be_compared_is_refused_in_one_line(flags, said):
    refused(said, runner.main, ["plans", *flags])
