"""The figures of trace and report, counted by hand."""
import json
import re
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from common import STAGES, toy

from lab.checks.traps import broken
from lab.checks.xray import Sight, XRay, sights_at
from lab.explorer.recorder import record
from lab.views.report import figures as calculated_figures
from lab.views.report import report, totals, write_trace
from lab.views.sights import PAD, bill, panels, seen_pads
from request import Request
from toolbox.trace import ForwardPass, Trace, observed


def golden(**arguments):
    """
    Two requests, and one without a token. b arrives at step 2, which is not computed. Their TTFTs
    are 2 and 3 steps, the step of arrival included, and 1 and 2.5 seconds: a's from the start, b's
    from step 3. Between their tokens are 2, 3 and 1 steps, and 2, 4 and 0.5 seconds.
    """
    a, b, c = requests = [Request([0], name="a"), Request([0], name="b", arrival=2),
                          Request([0], name="c")]
    a.generated, a.token_steps, a.token_times = [5, 6, 7], [1, 3, 6], [11.0, 13.0, 17.0]
    b.generated, b.token_steps, b.token_times = [5, 6], [4, 5], [14.5, 15.0]
    first = ForwardPass(
        step=0, shape=(2, 3), work=[("a", 0, 3), ("b", 4, 1)], finished=[],
        useful=4, recomputed=0, pad_slots=2, finished_slots=0, padded_keys=5,
        score_entries=30, useful_scores=11, copied_bytes=1_000_000, seconds=0.5)
    second = replace(first, step=1, shape=(7,), useful=6, recomputed=1, pad_slots=0)
    trace = Trace("x", requests, passes=[first, second], started=10.0, **arguments)
    trace.step_times = {0: 10.5, 1: 10.75, 3: 12.0, 4: 14.0, 5: 14.6, 6: 16.0}
    return trace


FIGURES = {   # a row of the report, and the numbers in it
    "forward passes": [2],
    "useful tokens": [10, 77, 13],    # of 13 slots, in percent
    "pad slots": [2, 15, 13],
    "finished slots": [0, 0, 13],
    "recomputed": [1, 8, 13],
    "padded keys": [10, 38, 26],      # of 26 keys
    "useful scores": [22, 37, 60],    # of 60
    "copied K/V": [2.0],              # MB
    "throughput": [5, 7.00, 1],       # tokens, seconds, tokens/s
    "TTFT": [2.5, 3.0, 1750, 2425],   # mean and p95, in steps and in ms
    "ITL": [2.0, 3.0, 2000.0, 3960.0]}
COUNTS = {"preemptions": 1234, "shared_pages": 5, "saved_tokens": 20, "evicted_pages": 2}


def figures(trace):
    head, *rows = report(trace).splitlines()
    assert head == f"stage: {trace.stage}"
    return {row[2:17].rstrip(): [float(number.replace(",", "")) for number in re.findall(
        r"(?<![\w.])\d[\d,.]*", row[17:])] for row in rows}


def test_report_and_written_trace(tmp_path):
    assert figures(golden()) == FIGURES
    assert figures(trace := golden(counts=COUNTS)) == {
        **FIGURES, "preemptions": [1234], "prefix cache": [5, 20, 2]}
    write_trace(trace, tmp_path / "t.json")
    written = json.loads((tmp_path / "t.json").read_text())
    assert (written["stage"], written["counts"]) == ("x", COUNTS)
    assert written["requests"][0]["token_times"] == [1.0, 3.0, 7.0]
    assert written["passes"][1]["shape"] == [7]


def test_a_report_of_next_to_nothing():
    nothing = report(Trace("x", [Request([1], 1)]))
    assert "throughput      0 tokens" in nothing
    one = report(STAGES["prefix"](toy(), [Request([1], 1)]))
    assert "throughput      1 tokens" in one and "nan" not in one + nothing


@pytest.mark.parametrize("stage, tokens", [
    # 2 rows of 4; then 2 pasts of 4 are gathered, and once more with the new keys
    ("interleaved", [2 * 4, 2 * 4 + 2 * 5]), ("dynamic", [8, 18]), ("naive", [0, 0]),
    ("ragged_mask", [2 + 4, 3 + 5]), ("ragged_varlen", [0, 0]), ("paged", [6, 8])])
def test_copies_are_counted(stage, tokens):
    trace = STAGES[stage](toy(), [Request([1] * 2, 2), Request([1] * 4, 2)])
    assert [p.copied_bytes for p in trace.passes] == [2 * 3 * 15 * 8 * n for n in tokens]


@pytest.mark.parametrize("stage", STAGES)
def test_seconds_are_measured(stage):
    model = toy()
    model.register_forward_pre_hook(lambda *_: time.sleep(0.01))
    trace = STAGES[stage](model, [Request([1, 2], 2)])
    assert all(0.01 <= p.seconds for p in trace.passes) and totals(trace)["seconds"] >= 0.02


def test_pads_that_are_seen_are_the_new_ones_then_those_of_the_past():
    columns = [PAD, PAD, PAD, 1, PAD, 2]   # the past, of four keys, and two new ones
    assert seen_pads(columns, 3, pads=1, blanks=0) == {4}
    assert seen_pads(columns, 3, pads=2, blanks=0) == {4, 2}
    assert seen_pads(columns, 3, pads=1, blanks=2) == {4, 2, 1}


def test_a_step_begins_with_its_first_pass_and_observers_leave(monkeypatch):
    """They are told before the pass, and only within their block. The device is waited for."""
    model, seen, begun, waits = SimpleNamespace(), [], [], []
    monkeypatch.setattr("toolbox.trace.synchronize", waits.append)
    batch = SimpleNamespace(plan=[], starts=[], tokens=torch.zeros(1),
                            cost=lambda: {"score_entries": 0})
    with observed(model, lambda step, batch: seen.append((step, len(trace.passes)))):
        trace = Trace("x", [], model)
        for _ in range(2):
            with trace.forward_pass(3, batch):
                begun.append(trace.step_times[3])
    with trace.forward_pass(4, batch):
        pass
    assert seen == [(3, 0), (3, 1)] and waits == 3 * [batch.tokens.device]
    assert begun[0] == begun[1] < trace.step_times[4]


@pytest.mark.parametrize("stage, knobs, trap", [
    ("interleaved", {"token_budget": 6}, "published mask"),
    ("dynamic", {}, "pads of the past are seen"),
    ("ragged_varlen", {"token_budget": 6}, "no causal rule in a chunk"),
    ("prefix", {"token_budget": 6, "page_size": 2}, "pages read in one piece"),
    ("prefix", {"token_budget": 6, "page_size": 2}, None)])
def test_sentences_pages_and_pictures_judge_a_token_alike(stage, knobs, trap):
    """Prompts begin alike: in prefix they share pages, which count as a request's own."""
    asked = [Request([1, 2, 3, 4, 5, 6, 7 + i][:3 + i], 6, name="ABCD"[i]) for i in range(4)]
    with broken(trap, show=False) if trap else nullcontext():
        recorder = record(STAGES[stage], toy(), asked, **knobs).recording
        with XRay(model := toy(), requests := [replace(each) for each in asked]) as xray:
            trace = STAGES[stage](model, requests, **knobs)
    in_sentences, in_pictures, shared = set(), set(), 0
    for number, (sight, frame) in enumerate(zip(xray.passes, recorder.frames, strict=True)):
        for look in xray.looks(sight):
            request, position = xray.token_of[look.id]
            shared += any(xray.shared_keys(sight.batch)[id] != id for id in look.expected)
            place = re.escape(f", {xray.place(sight, look.slot)} = {request} ")
            told = any(re.search(place + ".* (sees|does not see) ", sentence)
                       for sentence in xray.faults_of(number, sight))
            assert told == (not look.is_right) == (look.slot in frame["sees"])
            in_sentences |= {(number, f"{request.name}{position}")} if told else set()
        for panel in panels(sight):
            for name, kinds in zip(panel.queries, panel.cells, strict=True):
                if {"wrong", "missing"} & {*kinds}:
                    in_pictures.add((number, name))
    assert in_pictures == in_sentences and bool(in_sentences) == bool(trap)
    assert (shared > 0) == (trace.counts.get("shared_pages", 0) > 0) == (stage == "prefix")


@pytest.mark.parametrize("stage, said", [   # a pass of A's decode, with one key, and of B's prompt
    ("interleaved", "2 of 6 slots padding; 24 scores"),   # (2, 3), and a column of keys before it
    ("ragged_varlen", "4 slots; 11 scores")])             # 1 x 2 and 3 x 3
def test_the_bill_of_a_pass(stage, said):
    requests = [Request([1], 4, name="A"), Request([2, 3, 4], 4, name="B", arrival=1)]
    sight, = sights_at(STAGES[stage], toy(), requests, step=1)
    assert bill(sight) == said


def test_a_key_that_is_seen_twice_counts_twice():
    """Also if one of the two is its copy in a page that equal beginnings share."""
    requests = [Request([1, 2], 1, name="A"), Request([1, 2], 1, name="B")]
    xray = XRay(toy(), requests)   # the ids of A are 1, 2, 3, those of B 4, 5, 6
    batch = SimpleNamespace(pool=SimpleNamespace(cached={}))
    seen = torch.zeros(1, 8).long()
    seen[0, [1, 4, 5]] = 1
    look, = xray.looks(Sight(xray, batch, torch.tensor([5]), torch.tensor([1]), seen))
    assert (look.slot, look.id, look.seen) == (0, 5, {4: 2, 5: 1}) and not look.is_right


# --- calculated runs ------------------------------------------------------------------------------

def calculated_log():
    """
    Waits for a first token: 0.1, 0.2 and 0.4 s; mean gaps 0.05 and 0.1 s, and of one token none.
    """
    def request(arrived, *times):
        return SimpleNamespace(arrived=arrived, token_times=[*times])

    requests = [request(0.0, 0.1, 0.13, 0.2), request(1.0, 1.2, 1.3), request(3.5, 3.9)]
    return SimpleNamespace(requests=requests, passes=[1, 2, 2, 1], useful=0.5,
                           counts={"preemptions": 3, "saved_tokens": 70})


def test_the_figures_of_a_calculated_run():
    found = calculated_figures(calculated_log())
    assert found["calculated"] and (found["requests"], found["passes"], found["useful"]) == (
        3, 4, 0.5)
    assert (found["preemptions"], found["saved_tokens"]) == (3, 70)
    assert [found[name] for name in ("seconds", "tokens_per_s", "requests_per_s", "goodput")] == (
        pytest.approx([3.9, 6 / 3.9, 3 / 3.9, 3 / 3.9]))
    assert found["ttft_ms"] == pytest.approx(
        {"mean": 700 / 3, "p50": 200, "p90": 360, "p99": 396})
    assert found["tpot_ms"] == pytest.approx({"mean": 75, "p50": 75, "p90": 95, "p99": 99.5})
    assert found["e2e_ms"] == pytest.approx({"mean": 900 / 3, "p50": 300, "p90": 380, "p99": 398})
    assert found["itl_ms"] == pytest.approx({"mean": 200 / 3, "p50": 70, "p90": 94, "p99": 99.4})


@pytest.mark.parametrize("limits, good", [
    ({}, 3), ({"ttft": 401}, 3), ({"ttft": 399}, 2), ({"ttft": 201}, 2), ({"ttft": 199}, 1),
    ({"ttft": 99}, 0), ({"itl": 101}, 3), ({"itl": 99}, 2), ({"itl": 51}, 2), ({"itl": 49}, 1),
    ({"ttft": 399, "itl": 99}, 1), ({"ttft": 0.001}, 0)])
def test_goodput_counts_the_requests_within_both_limits(limits, good):
    """A request of one token has no gap. Limits are in ms, and met from both sides."""
    assert calculated_figures(calculated_log(), **limits)["goodput"] == pytest.approx(good / 3.9)
