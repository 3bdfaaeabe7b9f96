"""The calculated GPU: beyond/simulate.py and what stands on it."""
import json
from dataclasses import replace
from math import hypot
from types import SimpleNamespace

import pytest
from common import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from beyond import capacity, published
from beyond import simulate as s
from beyond.arrivals import workload
from beyond.hardware import GPU, GPUS, MODELS, Shape, gpu_of, shape_of
from beyond.replicas import ROUTERS, Replica, Spread, serve
from model import GPT, GPTConfig
from toolbox.cli import knobs_of
from toolbox.stages import STAGES

TINY = Shape(1, 8, 2, 2, 4, 32, 2, 1000, 64, tied=True, size=4)
MODEL = GPT(GPTConfig(block_size=64, vocab_size=1000, n_layer=1, n_head=2, n_embd=8))   # the same
SLOW = GPU(1e9, 1e9, 1e6, 1e6)
KNOBS = dict(max_batch=3, token_budget=8, max_kv_tokens=90, pages=24, page_size=4)
LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=8)
LOADS = st.sampled_from([{}, {"clients": 1}, {"clients": 3}, {"rate": 20.0}, {"rate": 200.0}])
SOME = [(9, 5), (3, 8), (20, 4), (30, 9), (1, 1)]


def simulated(stage, lengths=SOME, gpu=SLOW, load=None, **knobs):
    mine, _ = knobs_of(STAGES[stage], {**KNOBS, **knobs})
    return s.simulate(TINY, gpu, STAGES[stage], workload(lengths), **(load or {}), **mine)


def passes_of(trace):
    """With all that they count, and without their times."""
    return [replace(p, seconds=0) for p in trace.passes]


# --- the stages' own loops ------------------------------------------------------------------------

@pytest.mark.parametrize("stage", STAGES)
@settings(max_examples=examples(100), deadline=None)
@given(lengths=LENGTHS, load=LOADS)
def test_plans_and_counts_are_those_of_the_real_generate(stage, lengths, load):
    """The real model, given the steps at which requests were seen to arrive, makes the same run."""
    alike = {"share_prefixes": False}   # calculated tokens are all 0
    calculated = simulated(stage, lengths, load=load, **alike)
    seen = {request.name: request.arrival for request in calculated.requests}
    requests = [replace(request, arrival=seen[request.name]) for request in workload(lengths)]
    real = STAGES[stage](MODEL, requests, **knobs_of(STAGES[stage], KNOBS | alike)[0])
    assert passes_of(real) == passes_of(calculated)


@settings(max_examples=examples(100), deadline=None)
@given(lengths=LENGTHS, load=LOADS)
def test_tokens_come_at_the_end_of_a_pass_and_never_before_the_arrival(lengths, load):
    trace = simulated("paged", lengths, load=load)
    starts, ends = zip(*((start, start + seconds) for start, seconds, _ in trace.model.passes))
    assert all(start >= end for end, start in zip(ends, starts[1:]))
    for request in trace.requests:
        assert set(request.token_times) <= set(ends)
        first = next(start for p, start in zip(trace.passes, starts)
                     if request.name in [name for name, *_ in p.work])
        assert first >= request.arrived
    for time in ends:
        going = sum(r.arrived < time <= r.token_times[-1] for r in trace.requests)
        assert going <= load.get("clients", len(lengths))


# --- the clock ------------------------------------------------------------------------------------

def test_three_steps_by_hand():
    """One request of 3 tokens and 3 answers on stage 6, in numbers that one can follow."""
    shape = Shape(n_layer=1, n_embd=2, n_head=1, n_kv_head=1, head_size=2, ffn=4, ffn_matrices=2,
                  vocab_size=10, block_size=64, tied=True, size=4)
    gpu = GPU(0, 1000 / 0.62, 100 / 0.76, 1e6, overhead=1.0)   # so 1000 operations, 100 bytes a s
    # weights: 4 x 2 x 2 for attention, 2 x 2 x 4 for the MLP, 2 x 10 for the vocabulary
    # keys and values of a token: 2 x 2 numbers, 16 bytes
    trace = s.simulate(shape, gpu, STAGES["ragged, varlen"], workload([(3, 3)]))
    expected = [
        hypot((2 * 3 * 32 + 2 * 20 + 4 * 2 * 9) / 1000, (128 + 80 + (3 + 3) * 16) / 100) + 1,
        hypot((2 * 1 * 32 + 2 * 20 + 4 * 2 * 4) / 1000, (128 + 80 + (4 + 1) * 16) / 100) + 1,
        hypot((2 * 1 * 32 + 2 * 20 + 4 * 2 * 5) / 1000, (128 + 80 + (5 + 1) * 16) / 100) + 1,
    ]
    assert [p.seconds for p in trace.passes] == pytest.approx(expected, rel=1e-12)
    assert trace.requests[0].token_times == pytest.approx(
        [expected[0], sum(expected[:2]), sum(expected)], rel=1e-12)


def test_a_gpu_overlaps_arithmetic_and_reading_in_part_and_a_cpu_does_not():
    gpu = GPU(0, 1 / 0.62, 1 / 0.76, 1e6)   # so an operation, or a byte, takes a second
    parts = {"linears": (2, 1), "copies": (1, 3)}
    assert gpu.seconds(parts, 4) == pytest.approx(5)   # of 3 s and 4 s
    assert replace(gpu, overlaps=False).seconds(parts, 4) == pytest.approx(7)


@pytest.mark.parametrize("stage", STAGES)
def test_all_that_a_pass_counts_is_priced_and_no_pass_beats_the_roofline(stage):
    trace = simulated(stage, pages=12)
    for p, (*_, parts) in zip(trace.passes, trace.model.passes):
        keys = sum(first + n for _, first, n in p.work) + p.padded_keys
        assert parts["linears"][0] == 2 * p.slots * TINY.linears
        assert parts["attention"][1] == (keys + p.slots) * TINY.kv_bytes
        assert parts["copies"][1] == (0 if stage == "paged" else 2 * p.copied_bytes)
        assert p.seconds > max(
            (2 * p.slots * TINY.linears + 4 * 8 * p.score_entries) / SLOW.peak32,
            (TINY.linears * 4 + keys * TINY.kv_bytes) / SLOW.bandwidth)


@pytest.mark.parametrize("stage", STAGES)
def test_more_hardware_never_hurts_and_counts_do_not_depend_on_it(stage):
    base = simulated(stage)
    for name in "peak32", "bandwidth":
        better = simulated(stage, gpu=replace(SLOW, **{name: 3 * getattr(SLOW, name)}))
        assert passes_of(better) == passes_of(base)
        pairs = [(p.seconds, q.seconds) for p, q in zip(better.passes, base.passes)]
        assert all(b <= a for b, a in pairs) and any(b < a for b, a in pairs)


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
    alone = gpu.seconds(parts, 2) + gpu.overhead
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
    weights = (TINY.linears + 2 * TINY.vocabulary) * 4
    gpu = replace(SLOW, memory=(0.5e9 + weights + 700 * TINY.kv_bytes) / 0.9)
    spans, times = {"ttft_ms": Spread(), "itl_ms": Spread()}, []
    replica = Replica(TINY, gpu, spans, max_batch=3, token_budget=8)
    for request in workload(lengths):
        request.block_size = 64
        replica.add(request, 0.0)
    while replica.last:
        replica.step()
        times.append(replica.now)
    trace = simulated("paged", lengths, gpu, pages=replica.scheduler.pages.number, page_size=16)
    assert times == pytest.approx([start + seconds for start, seconds, _ in trace.model.passes])
    assert spans["ttft_ms"].total() == len(lengths)   # whose bins are 1% wide
    assert spans["ttft_ms"].percentile(100) == pytest.approx(
        1e3 * max(request.token_times[0] for request in trace.requests), rel=0.011)
    assert spans["itl_ms"].total() == sum(answer - 1 for _, answer in lengths)


LLAMA, A100 = MODELS["llama-3.1-8b"], GPUS["a100"]


def test_a_router_by_prefix_finds_more_in_pages():
    args = SimpleNamespace(seed=0, input="50:400", output="10:100", requests=300, groups=8,
                           prefix=512, rate=40.0)
    found = {router: serve(LLAMA, A100, args, 4, router)["saved_tokens"] for router in ROUTERS}
    assert found["prefix"] > 1.02 * found["round-robin"] > 0


def test_the_fewest_replicas_are_the_fewest():
    args = SimpleNamespace(seed=0, input="512", output="64", requests=200, groups=1, prefix=0,
                           rate=40.0, router="least-loaded", ttft=400, itl=40, most=64)
    number, enough = capacity.fewest(LLAMA, A100, args)
    fewer = serve(LLAMA, A100, args, number - 1, args.router)
    for found, good in (enough, True), (fewer, False):
        assert good == (found["ttft_ms"].percentile(99) <= 400
                        and found["itl_ms"].percentile(99) <= 40)


def test_published_lengths_and_quick_runs_within_the_goal():
    assert sum(answer for _, answer in published.nano_vllm()) == 133_966   # as its source says
    rows = published.compare([run for run in published.runs() if run.source == "gpt-fast"
                              and run.model == "llama-2-7b"], s.figures_of)
    assert len(rows) == 4 and max(abs(row["error"]) for row in rows) < 0.1
    rows = [{"figure": "tokens_per_s", "error": error} for error in (-0.12, 0.04, 0.01)]
    assert list(published.summary(rows)) == [
        "throughput: median error 4%, largest 12%, of 3 runs"]


# --- the command ----------------------------------------------------------------------------------

def run(line):
    return s.run(s.stage_parser().parse_args(line.split()))


def test_the_command(tmp_path, capsys):
    assert run("--input 100 --output 8:20 --requests 20 --clients 4 --stage ragged "
               f"--json {tmp_path}/a.json --plot {tmp_path}/a.png") == 0
    printed, figures = capsys.readouterr().out, json.loads((tmp_path / "a.json").read_text())
    assert "stage: ragged, varlen, calculated" in printed and "calculated: " in printed
    assert figures["calculated"] and {"tokens_per_s", "passes", "ttft_ms", "itl_ms"} <= set(figures)
    assert (tmp_path / "a.png").stat().st_size > 1000


@pytest.mark.parametrize("rate, grows", [("500", True), ("1", False)])
def test_a_rate_that_nothing_can_serve_gets_a_finite_answer(rate, grows, capsys):
    run(f"--rate {rate} --requests 60 --output 9")
    assert ("the queue grows without end" in capsys.readouterr().out) == grows


@pytest.mark.parametrize("line, message", [
    ("--gpu b7", "not PEAK_TFLOPS,GB_PER_S,GB and none of t4"),
    ("--gpu 1,0,3", "must be above 0"),
    ("--model bert", "not a config.json and none of gpt2"),
    ("--model none.json", "No such file"),
    ("--gpu rtx-4070-laptop", "the weights take 13.5 GB a GPU, which has 8.6"),
    ("--tp 3", "--tp 3 does not divide n_head 32"),
    ("--rate 0", "--rate must be above 0"),
    ("--rate 1 --clients 2", "exclude each other"),
    ("--input 5:2", "--input 5:2: use N or LOW:HIGH"),
    ("--lengths none.txt", "No such file"),
    ("--stage naive --requests 4000 --max_batch 4000", "lower --max_batch"),
    ("--input 5000", "does not fit block_size 4096")])
def test_bad_input_gets_one_line(line, message):
    with pytest.raises(ValueError, match=message) as error:
        run(line)
    assert "\n" not in str(error.value)


def test_a_model_from_its_config_and_a_gpu_from_three_numbers(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
        "max_position_embeddings": 131072}))
    assert shape_of(str(path)) == LLAMA and gpu_of("312,2039,80").bandwidth == A100.bandwidth
    path.write_text("{}")
    with pytest.raises(ValueError, match="there is no 'num_attention_heads' in it"):
        shape_of(str(path))


def test_capacity_prints_a_table_writes_it_and_refuses_half_a_question(capsys, tmp_path,
                                                                        monkeypatch):
    args = ["--model", "llama-3.1-8b", "--requests", "20", "--output", "9"]

    def run(*more):
        return capacity.run(capacity.parser().parse_args([*args, *more]))

    with pytest.raises(ValueError, match="--rate is missing"):
        run()
    with pytest.raises(ValueError, match="--ttft and --itl belong together"):
        run("--rate", "9", "--ttft", "50")
    assert run("--rate", "9", "--json", str(tmp_path / "f.json")) == 0
    printed = capsys.readouterr().out
    assert "calculated" in printed and all(router in printed for router in ROUTERS)
    rows = json.loads((tmp_path / "f.json").read_text())["rows"]
    assert len(rows) == len(ROUTERS) and all(row["ttft_p99"] >= row["ttft_p50"] for row in rows)
    tried = []   # no number keeps these limits
    monkeypatch.setattr(capacity, "serve", lambda *a: tried.append(a[3]) or serve(*a))
    assert run("--rate", "9", "--ttft", "0", "--itl", "0", "--most", "3", "--tp", "2") == 0
    printed = capsys.readouterr().out
    assert "--tp has no meaning with limits: ignored" in printed
    assert printed.count("more than 3") == 4 and tried == [1, 2, 3] * 4
