"""The calculated GPU: lab/simulate, the loads in lab/loading, and what stands on them."""
import json
import math
import re
from dataclasses import replace
from itertools import product

import pytest
from common import ROOT, THOROUGH, captured, examples, refused
from hypothesis import given, settings
from hypothesis import strategies as st

from generate_naive import columns_for
from lab.flags import knobs_of
from lab.loading.arrivals import Source, drawn, poisson, staged, workload
from lab.loading.load import load
from lab.loading.stages import STAGES
from lab.loading.workload import make_requests
from lab.simulate import __main__ as simulate
from lab.simulate import calculated, hardware, real_runs
from lab.simulate.hardware import GPU, GPUS, MODELS, Engine, Shape
from lab.simulate.loop import serve
from lab.views.report import totals
from model import GPT, GPTConfig
from request import prepare
from scheduler import Scheduler

TINY = Shape(1, 8, 2, 2, 4, 32, 2, 1000, 64, tied=True)
MODEL = GPT(GPTConfig(block_size=64, vocab_size=1000, n_layer=1, n_head=2, n_embd=8))
MODEL = MODEL.bfloat16()   # as TINY, in all that is counted
SLOW = GPU(1e9, 1e9, 1e6, 1e6)
AHEAD = Engine(front_end=0.01, ahead=True)
_, TOKENIZER = load()
KNOBS = dict(max_batch=3, token_budget=8, max_kv_tokens=90, pages=24, page_size=4)
LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=8)
LOADS = st.sampled_from([(None, 0), (None, 1), (None, 3), (20.0, 0), (200.0, 0)])


def times_of(run):
    return {r.name: [r.arrived, *r.token_times] for r in run.requests}


# --- the stages' own loops ------------------------------------------------------------------------

@pytest.mark.parametrize("stage", STAGES)
@settings(max_examples=examples(100))
@given(lengths=LENGTHS, rate_and_clients=LOADS, engine=st.sampled_from([AHEAD, Engine()]))
def test_plans_and_counts_are_those_of_the_real_generate(stage, lengths, rate_and_clients, engine):
    """
    The real model, given the steps at which requests were seen to arrive, makes the same run. All
    that its passes count is priced, but for copies where a kernel reads pages. And for stages
    without pads the loop of loop.py gives the same tokens at the same time.
    """
    (rate, clients), generate = rate_and_clients, STAGES[stage]
    times = rate and [*poisson(len(lengths), rate, 0)]
    knobs, _ = knobs_of(generate, KNOBS)
    copies = stage not in ("paged", "prefix")

    def any_gpu(run):
        return run(TINY, SLOW, generate, workload(lengths), times, clients, engine, **knobs)

    def counts_of(trace):
        return [replace(p, seconds=0, copied_bytes=copies * p.copied_bytes) for p in trace.passes]

    run = any_gpu(calculated.simulate)
    seen = {request.name: request.arrival for request in run.requests}
    real = generate(MODEL, [replace(request, arrival=seen[request.name])
                            for request in workload(lengths)], **knobs)
    assert counts_of(real) == counts_of(run)
    for p, (*_, counts) in zip(run.passes, run.clock.passes):
        keys = sum(first + n for _, first, n in p.work) + p.padded_keys
        assert counts == (p.slots, counts[1], p.score_entries, keys, copies * p.copied_bytes)
    assert totals(real)["generated"] == sum(counts[1] for *_, counts in run.clock.passes)
    flat = stage in ("ragged, varlen", "paged", "prefix")
    assert (calculated.scheduler_of(generate, **knobs) is not None) == flat
    if flat and (rate or clients):
        log = any_gpu(calculated.log_of)
        assert len(log.passes) == len(run.passes) and log.counts == run.counts
        assert times_of(log) == {name: pytest.approx(at) for name, at in times_of(run).items()}


# --- the loop -------------------------------------------------------------------------------------

def test_ahead_a_newcomer_waits_for_the_pass_after_the_next():
    """Passes of one second; A runs alone, and B comes in its second pass. D comes in C's pass."""
    gpu, lengths = GPU(1e30, 1e30, 1e30, 1e30), [(2, 9), (2, 2), (2, 1), (2, 1)]
    for (ahead, first), run in product([(False, 3), (True, 4)],
                                       [calculated.simulate, calculated.log_of]):
        times = times_of(run(TINY, gpu, STAGES["ragged, varlen"], workload(lengths),
                             [0, 1.5, 50.25, 51], engine=Engine(1, 0, 0, ahead=ahead)))
        assert times["r1"] == pytest.approx([1.5, first, first + 1])
        assert times["r2"] == pytest.approx([50.25, 51.25])   # it was idle
        assert times["r3"] == pytest.approx([51, 52.25])


def test_a_client_waits_for_its_answer_and_the_front_end_for_each_request():
    source = Source(workload([(2, 2)] * 3), clients=1, delay=AHEAD.front_end)
    log = serve(Scheduler(4, 64), source, TINY, SLOW, AHEAD)
    (first, *a), (second, *b), (third, *_) = times_of(log).values()
    assert (first, second, third) == pytest.approx((0, a[-1], b[-1])) and a[0] > AHEAD.front_end
    assert b[0] - second == pytest.approx(a[0])


def test_a_log_says_how_many_run_and_whether_tokens_were_computed_again():
    """C takes B's place; D and E have too few pages at the end, and the second is preempted."""
    def log(stage, *lengths, **knobs):
        return calculated.log_of(TINY, SLOW, STAGES[stage], workload(lengths), **knobs)

    served = log("ragged, varlen", (2, 3), (2, 1), (2, 1), max_batch=2)
    assert served.passes == [2, 2, 1] and served.useful == 1.0
    short = log("paged", (4, 6), (4, 6), pages=4, page_size=4)
    assert short.counts["preemptions"] == 1 and short.useful is None
    enough = log("paged", (4, 6), (4, 6), pages=6, page_size=4)
    assert not enough.counts.get("preemptions") and enough.useful == 1.0


# --- the clock ------------------------------------------------------------------------------------

def test_four_steps_by_hand():
    """One request of 3 tokens and 3 answers, 2 tokens a step: the first pass has no logits."""
    shape = Shape(n_layer=1, n_embd=2, n_head=1, n_kv_head=1, head_size=2, ffn=4, ffn_matrices=2,
                  vocab_size=10, block_size=64, tied=True)
    gpu = GPU(1000 / 0.71, 250 / 0.71, 100 / 0.85, 1e6)
    engine = Engine(overhead=1.0, per_request=0.25, keys=0.425)   # keys: half as fast
    # so 1000 operations and 100 bytes a second. Weights: 4 x 2 x 2 for attention, 2 x 2 x 4 for the
    # MLP, 2 x 10 for the vocabulary. Keys and values of a token: 2 x 2 numbers
    trace = calculated.simulate(shape, gpu, STAGES["ragged, varlen"], workload([(3, 3)]),
                                engine=engine, token_budget=2)

    def step(slots, keys, scores, sampled=1, copied=0, size=2, speed=1000):
        # 85 rows of a tile are computed in vain
        operations = 2 * (slots + 85) * 32 + sampled * 2 * 20 + 4 * 2 * scores
        moved = size * (32 + sampled * 20 + 2 * 4 * (keys + slots)) + 2 * copied
        return math.hypot(operations / speed, moved / 100) + 1 + sampled * 0.25

    expected = [step(2, 2, 4, 0), step(1, 3, 3), step(1, 4, 4), step(1, 5, 5)]
    assert [p.seconds for p in trace.passes] == pytest.approx(expected, rel=1e-12)
    assert trace.requests[0].token_times == pytest.approx(
        [sum(expected[:n]) for n in (2, 3, 4)], rel=1e-12)
    wide = hardware.constants(replace(shape, size=4), gpu, engine)
    assert hardware.seconds(wide, 1, 1, scores=3, keys=3, copied=700) == pytest.approx(
        step(1, 3, 3, copied=700, size=4, speed=250), rel=1e-12)


def test_tensor_parallel_splits_the_work_and_pays_for_the_link():
    one, four, a100 = MODELS["llama-2-7b"], replace(MODELS["llama-2-7b"], tp=4), GPUS["a100"]
    assert four.blocks * 4 == one.blocks and four.kv_bytes * 4 == one.kv_bytes
    counts = 8, 8, 800, 800
    alone = replace(one, n_layer=8).seconds(a100, *counts)   # a fourth of the weights and features
    ring = 2 * 32 * (30e-6 + 2 * 3 / 4 * 8 * 4096 * 2 / (hardware.LINK_SHARE * a100.link))
    assert four.seconds(a100, *counts) == pytest.approx(alone + ring)


@pytest.mark.parametrize("name, millions", [
    ("gpt2", 124), ("llama-2-7b", 6738), ("llama-3.1-8b", 8030), ("llama-3.1-70b", 70554),
    ("llama-2-13b", 13016), ("llama-3.2-1b", 1236), ("mistral-7b", 7248), ("qwen2-7b", 7616),
    ("gpt-j-6b", 6054), ("qwen3-0.6b", 596), ("qwen3-8b", 8191), ("qwen3-14b", 14768),
    ("qwen2.5-7b", 7616), ("codellama-34b", 33744), ("yi-34b", 34389), ("mistral-nemo-12b", 12248)])
def test_the_models_have_as_many_weights_as_published(name, millions):
    assert MODELS[name].weights / 1e6 == pytest.approx(millions, rel=0.004)


# --- loads ----------------------------------------------------------------------------------------

def test_arrivals_in_steps_depend_on_rate_and_seed_alone():
    def arrivals(rate, seed):
        requests = make_requests([{"prompt": "a"}] * 300, TOKENIZER, arrival_rate=rate, seed=seed)
        return [request.arrival for request in requests]

    some = arrivals(0.5, seed=3)
    assert some == sorted(some) and some[0] == 0 and some[-1] == pytest.approx(600, rel=0.2)
    assert some == arrivals(0.5, seed=3) != arrivals(0.5, seed=4)
    assert arrivals(5, seed=3)[-1] == pytest.approx(60, rel=0.2)
    assert arrivals(1e300, seed=3) == [0] * 300
    assert arrivals(1e-300, seed=3)[1:] == [10**9] * 299


def test_stages_come_one_after_another_and_prompts_again():
    times = [*staged([(8, 50), (20, 50)], seed=1)]
    assert times == sorted(times) and max(times) < 100
    assert sum(t < 50 for t in times) == pytest.approx(400, abs=80)
    assert sum(t >= 50 for t in times) == pytest.approx(1000, abs=120)
    requests = [*drawn(250, 0, (50, 80), (5, 9), prompts=100)]
    assert all(requests[i].prompt == requests[i % 100].prompt for i in range(250))
    assert len({tuple(r.prompt[:16]) for r in requests}) == 100
    assert len({len(r.prompt) for r in requests}) > 20
    assert len({tuple(r.prompt) for r in workload([(5, 1)] * 5000)}) == 5000


# --- what others measured -------------------------------------------------------------------------

def test_the_constants_name_the_figures_on_which_they_were_chosen():
    about = json.loads((ROOT / "lab/simulate/published.json").read_text(encoding="utf-8"))
    runs = [dict(zip(about["columns"], run, strict=True)) for run in about["runs"]]
    assert {run["source"] for run in runs} == {*about["sources"]}
    assert {run["gpu"] for run in runs} <= {*GPUS} and {run["model"] for run in runs} <= {*MODELS}
    page = " ".join((ROOT / "docs/gpu.md").read_text(encoding="utf-8").split())
    assert f"{len(runs)} published figures" in page


def test_real_runs_are_met_better_than_by_others():
    """In E2E, in the median; quick: an H100, two of them, and an L40S, for a minute each."""
    runs = real_runs.PREDICTED
    assert {run["half"] for run in runs} == {"a", "b", "kept back"} and len(runs) == 34
    if not THOROUGH:
        runs = [{**run, "stages": [(rate, 60) for rate, _ in run["stages"]]}
                for run in runs if run["id"] in ("59", "26", "55")]
    head, *lines = real_runs.table(real_runs.compare(runs))
    column = head.index(f"all ({len(runs)} runs)")
    found = {who: [int(part.rstrip("%")) for part in cells[column - 1].split()]
             for who, *cells in lines}
    assert all(mine <= most for mine, most in zip(found["lab.simulate"], (6, 4, 4)))
    assert min(e2e for _, e2e, _ in found.values()) == found["lab.simulate"][1]


def test_an_error_is_a_share_of_what_was_measured():
    run = {"ttft_ms": 100.0, "e2e_ms": 200.0, "between_ms": 10.0}
    assert real_runs.errors_of(run, [150, 50, 10]) == pytest.approx([0.5, -0.75, 0])


def test_real_runs_are_shown_by_groups_of_several_the_largest_first():
    """Three runs of this and two of another simulator: medians of the errors, without a sign."""
    runs = [({"gpu": "h100", "tp": tp, "half": half}, {
        "lab.simulate": (error, 0.1, -0.2), **({"x": (1, 2, 3)} if tp == 1 else {})})
        for tp, half, error in ((1, "kept back", -0.2), (1, "a", 0.4), (2, "kept back", 0.1))]
    assert [*real_runs.table(runs)] == [
        ["median errors of TTFT, E2E, between tokens", "all (3 runs)", "h100 x 1 (2 runs)",
         "kept back (2 runs)"],
        ["lab.simulate", "20% 10% 20%", "30% 10% 20%", "15% 10% 20%"],
        ["x", "100% 200% 300%", "100% 200% 300%", "100% 200% 300%"]]


# --- the commands ---------------------------------------------------------------------------------

def printed(line):
    code, out, err = captured(simulate.main, line.split())
    assert code == 0, err
    return out


def test_simulate_prints_figures_and_writes_them(tmp_path):
    assert "ragged, engine vllm, calculated: " in printed(
        "--input 100 --output 1 --requests 20 --clients 4 --stage ragged --ttft 1 "
        f"--json {tmp_path}/a.json")
    found = json.loads((tmp_path / "a.json").read_text(), parse_constant=pytest.fail)
    assert found["calculated"] and {"tokens_per_s", "passes", "e2e_ms"} <= set(found)
    assert found["itl_ms"]["p50"] is None and found["goodput"] == 0   # none within 1 ms
    assert "useful" in printed("--stage naive --input 8:9 --output 3 --requests 2")


def test_what_is_printed_are_the_figures(tmp_path):
    """At a rate that the GPU keeps up with, and within limits that only some requests keep."""
    out = printed("--input 90:110 --output 2:3 --requests 300 --rate 20 --ttft 25 --itl 1000 "
                  f"--json {tmp_path}/a.json")
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["requests_per_s"] == pytest.approx(20, rel=0.1)
    assert 0 < found["goodput"] < 0.95 * found["requests_per_s"]
    first, head, *waits, counts = out.splitlines()
    assert f" {found['tokens_per_s']:,.0f} tokens/s, {found['requests_per_s']:,.2f} req" in first
    assert f" {found['goodput']:,.2f} of them within the limits" in first
    assert head.split() == ["ms", "mean", "p50", "p90", "p99"]
    for line, (name, key) in zip(waits, simulate.WAITS.items(), strict=True):
        assert line.split() == [name, *(f"{found[key][q]:,.1f}" for q in head.split()[1:])]
    assert counts.startswith(f"300 requests, {found['passes']} passes") and "at once" not in counts


def test_real_runs_are_printed(monkeypatch):
    monkeypatch.setattr(real_runs, "RUNS", [
        {**run, "stages": [(5, 9)]} for run in real_runs.RUNS
        if run["id"] in ("38", "46") or run["half"] == "overloaded"])
    real = printed("--real --json x.json --pages 9")
    assert "--json has no meaning beside --real: ignored\n--pages has no meaning" in real
    assert re.findall(r"^llama-3.1-8b, .*? (a) ", real, re.M) == ["a", "a"]
    assert "all (2 runs)" in real and "overloaded" not in real


def test_engines_memory_and_models():
    lines = [*(f"--engine {name} --tp 2" for name in hardware.ENGINES), "--pages 200",
             "--prefix 400", "--gpu l40s --model yi-34b --tp 2"]
    load = "--input 500 --output 20 --requests 40 --clients 9"
    said = {line: printed(f"{load} {line}").partition(": ")[2] for line in lines}
    assert len({*said.values()}) == len(said)
    assert "15,600 saved tokens" in said["--prefix 400"]   # of all but the first


def test_clients_beyond_the_requests_change_nothing():
    load = "--input 50 --output 2 --requests 4 --clients"
    few, many = (printed(f"{load} {n}").split("\n", 1)[1] for n in (4, "99999999999999999999"))
    assert few == many


def test_help_says_the_defaults_that_are_used():
    said = " ".join(captured(simulate.main, ["--help"])[1].split())
    assert "run at once (default: 256)" in said and "in a step (default: 2048)" in said


@pytest.mark.parametrize("stage, more", [
    ("paged", ""), ("prefix", ""), ("prefix", "--pages 9999999999"), ("prefix", "--page_size 1")])
def test_a_huge_gpu_takes_no_memory_here(stage, more, monkeypatch):
    """Its pool has room for what can be asked for: every request's own pages, and no more."""
    made = []
    pool = calculated.POOLS[STAGES[stage]].pool_class

    class Watched(pool):
        def __init__(self, number, page_size):
            made.append((number, page_size))
            super().__init__(min(number, 10**6), page_size)   # should it be huge

    monkeypatch.setattr(calculated.POOLS[STAGES[stage]], "pool_class", Watched)
    out = printed(f"--gpu 1e8,1e8,1e8 --stage {stage} --input 20 --output 4 --requests 9 {more}")
    size = 1 if "page_size" in more else 16
    assert made == [(9 * -(-23 // size), size)]
    assert "preemptions" not in out


SMALL = "--gpu 312,2039,18 --input 2000 --output 100 --requests 12"


@pytest.mark.parametrize("line, said", [
    ("--gpu b7", "not PEAK_TFLOPS,GB_PER_S,GiB and none of t4"),
    *((f"--gpu {bad}", "must be at least 1e-6 and below 1e9")
      for bad in ("1,0,3", "1e-300,1e-300,80", "1,1e-7,80", "1,1,1e9", "1,nan,3")),
    ("--stage ragged --attention mask --token_budget 100000 --max_batch 2000 --requests 2000",
     "--attention mask: .. a mask of 100,000 tokens x 120,798 keys, more than 2,000,000,000"),
    ("--real --model bert", "--model bert: none of gpt2"),
    ("--real --tp 3", "--tp 3 does not divide n_head 32"),
    ("--real --gpu nonsense", "not PEAK_TFLOPS,GB_PER_S,GiB and none of t4"),
    ("--requests 99999999999", "--requests must be at most 200,000, not 99,999,999,999"),
    ("--requests 100000", "--requests must be at most 43,440 of 1,151 tokens each, not 100,000"),
    ("--gpu 1e8,1e8,1e8 --requests 40000 --page_size 1",
     "can fill 46,040,000 pages: --pages must be at most 8,000,000"),
    *((f"--rate {rate}", f"--rate {rate}: the last request would come after")
      for rate in ("1e-308", "1e-300", "1e-08")),
    ("--gpu 1,1,14", "take 12.6 GiB of each GPU's memory, which has 14.0 GiB; an engine uses 90% "
     "of it, and 0.5 GB of that for its passes, so no key fits"),
    ("--gpu 1,2,3", "take 12.6 GiB of each GPU's memory, which has 3.0"),
    ("--model bert", "--model bert: none of gpt2, .. ; for another one, add a line"),
    ("--tp 3", "--tp 3 does not divide n_head 32"),
    ("--rate 1 --clients 2", "--clients: not allowed with argument --rate"),
    ("--prefix -5", "--prefix: must be a whole number of at least 0, not -5"),
    ("--prefix 100000000000", "block_size is 4096"),
    *((f"--input {bad}", f"--input: {bad}: use N or LOW:HIGH") for bad in ("5:2", "5:", "1:2:3")),
    ("--input 4000 --output 500", "--output: .. 4499 positions, block_size is 4096"),
    (f"{SMALL} --pages 100000", "room for 6,519 .. --pages must be at most 407, not 100,000"),
    (f"{SMALL} --page_size 4000 --gpu 312,2039,14.5", "--pages must be at most 0"),
    (f"{SMALL} --stage ragged --max_kv_tokens 9999", "--max_kv_tokens .. at most 6,519, not 9"),
    (f"{SMALL} --stage dynamic --max_batch 12", "--max_batch must be at most 3, not 12")])
def test_bad_input_gets_one_line(line, said):
    refused(said, simulate.main, line.split())


def test_a_rectangle_is_as_large_as_its_longest_prompt_and_answer():
    shape, gpu = MODELS["llama-2-7b"], hardware.gpu_of("312,2039,18")
    wide = workload([(3000, 1), (1, 3000)])   # together in a batch: too wide a rectangle
    assert 2 * columns_for(prepare(wide, shape)) == 11_998
    with pytest.raises(ValueError, match="room for 6,519 tokens: --max_batch must be at most 1"):
        calculated.with_memory(shape, gpu, STAGES["naive"], 5999, {"max_batch": 2})
    for longest, rows in (5999, 1), (8, 256):   # 8 tokens: more would fit
        knobs, _ = calculated.with_memory(shape, gpu, STAGES["naive"], longest, {})
        assert knobs == {"max_batch": rows}
