"""The calculated GPU: beyond/simulate.py and what stands on it."""
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from common import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from beyond import capacity, published
from beyond import simulate as s
from beyond.arrivals import workload
from beyond.hardware import GPU, GPUS, MODELS, Shape, gpu_of, shape_of
from beyond.replicas import ROUTERS, Replica, Spread, serve
from model import GPT, GPTConfig
from toolbox.stages import STAGES

TINY = Shape(1, 8, 2, 2, 4, 32, 2, 13, 64, tied=True, size=4)
SLOW = GPU(1e9, 1e9, 1e6, 1e6)
KNOBS = dict(max_batch=3, token_budget=8, max_kv_tokens=90, pages=24, page_size=4)
LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=8)
LOADS = st.sampled_from([{}, {"clients": 1}, {"clients": 3}, {"rate": 20.0}, {"rate": 200.0}])


def simulated(stage, lengths, gpu=SLOW, shape=TINY, load=None, **knobs):
    generate = STAGES[stage]
    mine, _ = s.cli.knobs_of(generate, {**KNOBS, **knobs})
    return s.simulate(shape, gpu, generate, requests_of(lengths), **(load or {}), **mine)


def requests_of(lengths):
    """As workload makes them, within a vocabulary of 13."""
    requests = workload(lengths)
    for request in requests:
        request.prompt = [token % 13 for token in request.prompt]
    return requests


def plans(trace):
    return [(p.step, p.shape, p.work, p.finished) for p in trace.passes]


# --- the stages' own loops ------------------------------------------------------------------------

@pytest.mark.parametrize("stage", STAGES)
@settings(max_examples=examples(100), deadline=None)
@given(lengths=LENGTHS, load=LOADS)
def test_plans_and_costs_are_those_of_the_real_generate(stage, lengths, load):
    """The real model, given the steps at which requests were seen to arrive, makes the same run."""
    calculated = simulated(stage, lengths, load=load)
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=64, vocab_size=13, n_layer=1, n_head=2, n_embd=8))
    requests = requests_of(lengths)
    for request, seen in zip(requests, sorted(calculated.requests, key=lambda r: int(r.name[1:]))):
        request.arrival = seen.arrival
    knobs, _ = s.cli.knobs_of(STAGES[stage], {**KNOBS, "share_prefixes": False})
    again = simulated(stage, lengths, load=load, share_prefixes=False)
    real = STAGES[stage](model, requests, **knobs)
    assert plans(real) == plans(again)
    counts = ("score_entries", "padded_keys", "copied_bytes", "useful", "recomputed", "pad_slots")
    for mine, theirs in zip(again.passes, real.passes):
        assert [getattr(mine, name) for name in counts] == [getattr(theirs, name)
                                                            for name in counts]


@settings(max_examples=examples(100), deadline=None)
@given(lengths=LENGTHS, load=LOADS)
def test_tokens_come_at_the_end_of_a_pass_and_never_before_the_arrival(lengths, load):
    trace = simulated("paged", lengths, load=load)
    ends = [start + seconds for start, seconds, _ in trace.model.passes]
    assert all(start >= end for end, (start, *_) in zip(ends, trace.model.passes[1:]))
    for request in trace.requests:
        assert set(request.token_times) <= set(ends)
        first = next(p for p, (start, *_) in zip(trace.passes, trace.model.passes)
                     if request.name in [name for name, *_ in p.work])
        assert trace.step_times[first.step] >= request.arrived
    if "clients" in load:
        for time in ends:
            going = sum(r.arrived < time <= r.token_times[-1] for r in trace.requests)
            assert going <= load["clients"]


# --- the clock ------------------------------------------------------------------------------------

def test_three_steps_by_hand():
    """One request of 3 tokens and 3 answers on stage 6, in numbers that one can follow."""
    shape = Shape(n_layer=1, n_embd=2, n_head=1, n_kv_head=1, head_size=2, ffn=4, ffn_matrices=2,
                  vocab_size=10, block_size=64, tied=True, size=4)
    gpu = GPU(0, 1000 / 0.75, 100 / 0.8, 1e6, overhead=1.0)   # so 1000 operations, 100 bytes a s
    # weights: 4 x 2 x 2 for attention, 2 x 2 x 4 for the MLP, 2 x 10 for the vocabulary
    # keys and values of a token: 2 x 2 numbers, 16 bytes
    trace = s.simulate(shape, gpu, STAGES["ragged, varlen"], workload([(3, 3)]))
    expected = [
        (2 * 3 * 32 + 2 * 20 + 4 * 2 * 9) / 1000 + (128 + 80 + (3 + 3) * 16) / 100 + 1,
        (2 * 1 * 32 + 2 * 20 + 4 * 2 * 4) / 1000 + (128 + 80 + (4 + 1) * 16) / 100 + 1,
        (2 * 1 * 32 + 2 * 20 + 4 * 2 * 5) / 1000 + (128 + 80 + (5 + 1) * 16) / 100 + 1,
    ]
    assert [p.seconds for p in trace.passes] == pytest.approx(expected, rel=1e-12)
    assert trace.requests[0].token_times == pytest.approx(
        [expected[0], sum(expected[:2]), sum(expected)], rel=1e-12)


def test_a_copy_is_priced_and_a_paged_kernel_makes_none():
    lengths = [(9, 5), (3, 8), (20, 4)]
    dynamic, paged = simulated("dynamic", lengths), simulated("paged", lengths, pages=12)
    copied = sum(parts["copies"][1] for *_, parts in dynamic.model.passes)
    assert copied == 2 * sum(p.copied_bytes for p in dynamic.passes) > 0
    assert not sum(parts["copies"][1] for *_, parts in paged.model.passes)


@pytest.mark.parametrize("stage", STAGES)
def test_padded_keys_are_read_and_pad_slots_computed(stage):
    trace = simulated(stage, [(9, 5), (3, 8), (20, 4)])
    for record, (*_, parts) in zip(trace.passes, trace.model.passes):
        keys = sum(first + n for _, first, n in record.work) + record.padded_keys
        assert parts["attention"][1] == (keys + record.slots) * TINY.kv_bytes
        assert parts["linears"][0] == 2 * record.slots * TINY.linears


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_faster_than_the_roofline(stage):
    trace = simulated(stage, [(9, 5), (3, 8), (20, 4), (1, 1)])
    for record in trace.passes:
        keys = sum(first + n for _, first, n in record.work)
        assert record.seconds > max(
            (2 * record.slots * TINY.linears + 4 * 8 * record.score_entries) / SLOW.peak32,
            (TINY.linears * 4 + keys * TINY.kv_bytes) / SLOW.bandwidth)


@pytest.mark.parametrize("stage", STAGES)
def test_more_hardware_never_hurts_and_counts_do_not_depend_on_it(stage):
    lengths = [(9, 5), (3, 8), (20, 4), (30, 9), (2, 2)]
    base = simulated(stage, lengths)
    for name in "peak32", "bandwidth":
        better = simulated(stage, lengths, replace(SLOW, **{name: 3 * getattr(SLOW, name)}))
        assert plans(better) == plans(base)
        assert all(b <= a for a, b in zip(*([p.seconds for p in t.passes]
                                            for t in (base, better))))
        assert sum(p.seconds for p in better.passes) < sum(p.seconds for p in base.passes)


def test_more_memory_and_fewer_arrivals_never_hurt():
    lengths = [(30, 30)] * 12

    def seconds(**knobs):
        return s.figures(simulated("paged", lengths, max_batch=12, token_budget=64, **knobs))

    little, much = (seconds(pages=pages) for pages in (17, 200))
    assert little["preemptions"] > much["preemptions"] == 0
    assert much["seconds"] < little["seconds"]
    waits = [seconds(pages=200, load={"rate": rate})["ttft_ms"]["mean"] for rate in (0.5, 5, 50)]
    assert waits == sorted(waits) and waits[0] < waits[-1]


def test_tensor_parallel_splits_the_work_and_pays_for_the_link():
    one, four = MODELS["llama-2-7b"], replace(MODELS["llama-2-7b"], tp=4)
    assert four.linears * 4 == one.linears and four.kv_bytes * 4 == one.kv_bytes
    gpu, parts = GPUS["a100"], four.parts(8, 8, 800, 800)
    alone = sum(gpu.times(parts, 2)) + gpu.overhead
    ring = 2 * 32 * (gpu.link_latency + 2 * 3 / 4 * 8 * 4096 * 2 / gpu.link)
    assert four.seconds(gpu, parts, 8) == pytest.approx(alone + ring)


@pytest.mark.parametrize("name, millions", [
    ("gpt2", 124), ("llama-2-7b", 6738), ("llama-3.1-8b", 8030), ("llama-3.1-70b", 70554),
    ("mistral-7b", 7248), ("qwen3-0.6b", 596), ("qwen3-8b", 8191)])
def test_the_models_have_as_many_weights_as_published(name, millions):
    weights = MODELS[name].linears + MODELS[name].vocabulary * (2 - MODELS[name].tied)
    assert weights / 1e6 == pytest.approx(millions, rel=0.01)


# --- replicas -------------------------------------------------------------------------------------

@settings(max_examples=examples(100), deadline=None)
@given(lengths=LENGTHS)
def test_a_replica_makes_the_passes_of_stage_7(lengths):
    gpu = replace(SLOW, memory=(0.5e9 + 2 * (TINY.linears + TINY.vocabulary) * 4
                                + 700 * TINY.kv_bytes) / 0.9)
    spans = {"ttft_ms": Spread(), "itl_ms": Spread()}
    replica = Replica(TINY, gpu, spans, max_batch=3, token_budget=8)
    for request in s.workload(lengths):
        request.block_size = 64
        replica.add(request, 0.0)
    times = []
    while replica.last:
        replica.step()
        times.append(replica.now)
    trace = s.simulate(TINY, gpu, STAGES["paged"], s.workload(
        lengths), max_batch=3, token_budget=8, pages=replica.scheduler.pages.number)
    assert times == pytest.approx([start + seconds for start, seconds, _ in trace.model.passes])
    assert spans["ttft_ms"].total() == len(lengths)
    assert spans["itl_ms"].total() == sum(answer - 1 for _, answer in lengths)


def served(router, **changes):
    args = SimpleNamespace(seed=0, input="50:400", output="10:100", requests=300, groups=8,
                           prefix=512, rate=40.0, **changes)
    return serve(MODELS["llama-3.1-8b"], GPUS["a100"], args, 4, router)


def test_a_router_by_prefix_finds_more_in_pages():
    found = {router: served(router)["saved_tokens"] for router in ROUTERS}
    assert found["prefix"] > 1.02 * found["round-robin"] > 0


def test_bins_hold_percentiles_to_one_percent():
    spread = Spread()
    for i in range(1, 1001):
        spread.add(i)
    assert spread.percentile(50) == pytest.approx(500, rel=0.011)
    assert spread.percentile(99) == pytest.approx(990, rel=0.011)
    assert math.isnan(Spread().percentile(50)) and len(spread) < 500


def test_the_fewest_replicas_are_the_fewest():
    args = SimpleNamespace(seed=0, input="512", output="64", requests=200, groups=1, prefix=0,
                           rate=40.0, router="least-loaded", ttft=400, itl=40, most=64)
    shape, gpu = MODELS["llama-3.1-8b"], GPUS["a100"]
    number, f = capacity.fewest(shape, gpu, args)
    assert number > 1 and f["ttft_ms"].percentile(99) <= 400 and f["itl_ms"].percentile(99) <= 40
    less = serve(shape, gpu, args, number - 1, "least-loaded")
    assert less["ttft_ms"].percentile(99) > 400 or less["itl_ms"].percentile(99) > 40


def test_published_lengths_are_those_of_the_source():
    assert sum(answer for _, answer in published.nano_vllm()) == 133_966


def test_quick_published_runs_stay_within_the_goal():
    rows = published.compare([run for run in published.runs() if run.source == "gpt-fast"
                              and run.model == "llama-2-7b"])
    assert len(rows) == 4 and max(abs(row["error"]) for row in rows) < 0.1
    rows = [{"figure": "tokens_per_s", "error": error} for error in (-0.12, 0.04, 0.01)]
    assert list(published.summary(rows)) == [
        "throughput: median error 4%, largest 12%, of 3 runs"]


# --- the command ----------------------------------------------------------------------------------

def test_the_command(tmp_path, capsys):
    args = s.stage_parser().parse_args(
        ["--input", "100", "--output", "8:20", "--requests", "20", "--clients", "4", "--stage",
         "ragged", "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")])
    assert s.run(args) == 0
    printed, figures = capsys.readouterr().out, json.loads((tmp_path / "a.json").read_text())
    assert "stage: ragged, varlen, calculated" in printed and "calculated: " in printed
    assert figures["calculated"] and {"tokens_per_s", "passes", "ttft_ms", "itl_ms"} <= set(figures)
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_a_rate_that_nothing_can_serve_gets_a_finite_answer(capsys):
    for rate, said in (("500", True), ("1", False)):
        s.run(s.stage_parser().parse_args(["--rate", rate, "--requests", "60", "--output", "9"]))
        assert ("the queue grows without end" in capsys.readouterr().out) is said


@pytest.mark.parametrize("line, message", [
    ("--gpu b7", "not PEAK_TFLOPS,GB_PER_S,GB and none of t4"),
    ("--gpu 1,0,3", "must be above 0"),
    ("--model bert", "not a config.json and none of gpt2"),
    ("--model none.json", "No such file"),
    ("--gpu rtx-4070-laptop", "the weights take 13.5 GB a GPU, which has 8.6"),
    ("--tp 3", "--tp 3 does not divide n_head 32"),
    ("--rate 0", "--rate must be above 0"),
    ("--rate 1 --clients 2", "exclude each other"),
    ("--clients 0", "--clients must be a whole number of at least 1"),
    ("--input 5:2", "--input 5:2: use N or LOW:HIGH"),
    ("--lengths none.txt", "No such file"),
    ("--stage naive --requests 4000 --max_batch 4000", "lower --max_batch"),
    ("--input 5000", "does not fit block_size 4096"),
])
def test_bad_input_gets_one_line(line, message):
    with pytest.raises(ValueError, match=message) as error:
        s.run(s.stage_parser().parse_args(line.split()))
    assert "\n" not in str(error.value)


def test_a_model_from_its_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
        "max_position_embeddings": 131072}))
    assert shape_of(str(path)) == MODELS["llama-3.1-8b"]
    path.write_text("{}")
    with pytest.raises(ValueError, match="there is no 'num_attention_heads' in it"):
        shape_of(str(path))
    assert gpu_of("312,2039,80").bandwidth == GPUS["a100"].bandwidth


def test_capacity_prints_a_table_and_needs_a_rate(capsys):
    args = ["--model", "llama-3.1-8b", "--requests", "20", "--output", "9"]
    with pytest.raises(ValueError, match="--rate is missing"):
        capacity.run(capacity.parser().parse_args(args))
    assert capacity.run(capacity.parser().parse_args([*args, "--rate", "9"])) == 0
    printed = capsys.readouterr().out
    assert "calculated" in printed and all(router in printed for router in ROUTERS)
