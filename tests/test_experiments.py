"""python -m lab.experiments: what is counted and compared, peers as processes, and quick runs."""
import json
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from common import ROOT, mixed

from lab.checks.traps import broken
from lab.experiments import __main__ as runner
from lab.experiments import bench, gpu, results, rows, stages, train
from lab.experiments.roofline import roofline
from lab.loading.load import load
from lab.loading.stages import STAGES
from lab.simulate import real_runs
from lab.simulate.calculated import simulate
from lab.simulate.hardware import GPUS, MODELS
from lab.views.report import latencies, mean, percentile, totals
from model import GPT, GPTConfig
from request import Request
from toolbox.weights import write_gpt2


def test_ways_take_turns_and_what_warms_up_does_not_count(capsys):
    called, slept = [], []

    def run(way):
        called.append(way)
        return len(called)

    assert results.in_turn("ab", run, repeats=2) == {"a": [3, 5], "b": [4, 6]}
    assert called == capsys.readouterr().err.split()[::3] == [*"ababab"]
    assert results.median_seconds(lambda: slept.append(time.sleep(0.1 * (len(slept) < 2))),
                                  torch.device("cpu"), repeats=1) < 0.1 and len(slept) == 3


def test_what_takes_long_runs_once(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(results.time, "perf_counter", lambda: next(clock))
    long = {"b": lambda: [next(clock) for _ in range(9)]}
    taken = results.in_turn("ab", lambda way: long.get(way, str)(), 3, warm_up=0, patience=5)
    assert [len(taken[way]) for way in "ab"] == [3, 1]


def test_the_workloads_are_those_that_the_docs_describe():
    mixture, prefill, decode = (bench.workload(name, 50257) for name in bench.WORKLOADS)
    assert [len(w) for w in (mixture, prefill, decode)] == [32, 64, 32]
    assert all(8 <= len(r.prompt) <= 512 and 8 <= r.max_new_tokens <= 128 for r in mixture)
    assert sorted(len(r.prompt) for r in mixture)[16] < 100   # log-uniform: half are below 64
    assert all(1 <= len(r.prompt) <= 512 and r.max_new_tokens == 1 for r in prefill)
    assert all(len(r.prompt) == 16 and 32 <= r.max_new_tokens <= 256 for r in decode)
    assert [r.prompt for r in mixture] == [r.prompt for r in bench.workload("W1", 50257)]
    assert bench.tokens_of("W2", prefill) == sum(len(r.prompt) for r in prefill)
    for name, requests in ("W1", mixture), ("W3", decode):
        assert bench.tokens_of(name, requests) == sum(r.max_new_tokens for r in requests)


def test_how_many_requests_fit_on_a_gpu():
    """Llama 2 7B in 40 GiB: 6.74 billion weights, and 512 KiB of keys and values for a token."""
    room = (0.9 * 40 * 2**30 - 2 * 6.738e9 - 0.5e9) / 2**19
    most = gpu.fitting("llama-2-7b", 12)
    assert most["the longest answer for each"] == room // (1024 + 512) == 30
    assert most["own answer reserved"] == most["pages"] == 12   # all of so few


def test_what_the_table_says_of_a_stage_on_a_gpu():
    """Of requests that come at once, with all the memory that there is."""
    requests = bench.workload("W1", 32000, True)
    said = gpu.stage_on_gpu("ragged, varlen", "a100", requests)
    again = bench.workload("W1", 32000, True)
    trace = simulate(MODELS["llama-2-7b"], GPUS["a100"], STAGES["ragged, varlen"], again,
                     **bench.KNOBS)
    waits, total = latencies(trace), totals(trace)
    assert said == {
        "tokens_per_s": pytest.approx(total["tokens_per_second"]), "useful": 1.0,
        "ttft_mean_ms": pytest.approx(1e3 * mean(waits["ttft_seconds"])),
        "itl_p99_ms": pytest.approx(1e3 * percentile(waits["itl_seconds"], 99)),
        "passes": len(trace.passes)}


def test_the_gaps_that_a_table_names():
    """101 gaps of 1 to 101 ms; and three short ones, which get a decimal."""
    points = {"many": [(n, n / 1e3) for n in range(1, 102)],
              "few": [(1, 0.003), (2, 0.001), (3, 0.002)]}
    table = rows.gaps_table({"points": points, "repeats": 3})
    assert table.head[1:] == ["p50", "p99", "worst"]
    assert table.rows == [["many", "51 ms", "100 ms", "101 ms"],
                          ["few", "2.0 ms", "3.0 ms", "3.0 ms"]]


def test_rows_are_compared_with_one_row():
    table = rows.rows_table({"model": "x", "points": [(1, 0.004), (8, 0.008)]})
    assert table.rows == [[1, "4.00 ms, ×1.0"], [8, "8.00 ms, ×4.0"]]


def test_a_quick_workload_is_a_quarter():
    mixture, prefill, decode = (bench.workload(name, 50257, True) for name in bench.WORKLOADS)
    assert [len(w) for w in (mixture, prefill, decode)] == [8, 16, 8]
    assert [r.prompt for r in mixture] == [r.prompt for r in bench.workload("W1", 50257)[:8]]
    assert all(8 <= r.max_new_tokens <= 64 for r in decode)


def test_the_roofline_by_hand():
    """
    A prompt of 4 tokens in chunks of 3 and 1, and one decode, on a model small enough to count. Of
    the last block's 12 C^2 weights, a token that is not sampled from needs 2 C^2, for its key and
    value, and no scores.
    """
    model = GPT(GPTConfig(block_size=8, vocab_size=10, n_layer=2, n_head=1, n_embd=4)).half()
    trace = STAGES["ragged, varlen"](model, [Request([1, 2, 3, 4], 2)], max_batch=3, token_budget=3)
    assert [p.work for p in trace.passes] == [[("r0", 0, 3)], [("r0", 3, 1)], [("r0", 4, 1)]]
    block, kv, vocabulary = 12 * 16, 2 * 16, 40
    operations = [2 * 3 * (block + kv) + 4 * 4 * 6]
    operations += [2 * (2 * block + vocabulary) + 4 * 4 * 2 * keys for keys in (4, 5)]
    memory = [2 * (2 * block + 2 * 2 * 4 * (3 + 3))]
    memory += [2 * (2 * block + vocabulary + 2 * 2 * 4 * (keys + 1)) for keys in (4, 5)]
    assert roofline(model, trace, peak=1, bandwidth=1e9) == pytest.approx(sum(operations))
    assert roofline(model, trace, peak=1e9, bandwidth=1) == pytest.approx(sum(memory))


# --- peers ----------------------------------------------------------------------------------------

FAKE = """   # stands for vLLM: a request's tokens count up from its prompt's sum
import sys, types
__version__, current_platform = "9.9", object()
RequestOutputKind, SamplingParams = types.SimpleNamespace(DELTA=0), types.SimpleNamespace
sys.modules["vllm.platforms"] = sys.modules["vllm.sampling_params"] = sys.modules["vllm"]

class LLM:
    def __init__(self, model, **settings):
        if "none" in model:
            sys.exit("no such model")
        self.llm_engine, self.left = self, {}

    def add_request(self, name, prompt, params):
        first = sum(prompt["prompt_token_ids"])
        self.left[name] = [*range(first, first + params.max_tokens)]

    def has_unfinished_requests(self):
        return bool(self.left)

    def step(self):
        print("an engine prints")
        name, tokens = self.left.popitem()
        return [types.SimpleNamespace(request_id=name, outputs=[
            types.SimpleNamespace(token_ids=tokens)])]
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Namespace(vllm=sys.executable)


def wait_for(pid, states):
    """Until a process is stopped, "T", or has ended, "Z" or ""."""
    for _ in range(600):
        stat = Path(f"/proc/{pid}/stat")
        if (stat.read_text().split()[2] if stat.exists() else "") in states:
            return
        time.sleep(0.1)
    raise AssertionError("it does not happen within a minute")


def test_a_peer_answers_request_by_request_and_is_stopped_between_two_runs(fake):
    engine, = bench.peers(["vLLM"], "folder", fake).values()
    assert "at most 32 sequences and 512 tokens a step" in engine.settings
    requests = mixed()
    for _ in range(2):
        if sys.platform == "linux":   # it does not spin while others run
            wait_for(engine.process.pid, ["T"])
        tokens, times = engine(requests)
        assert tokens == [[*range(sum(r.prompt), sum(r.prompt) + r.max_new_tokens)]
                          for r in requests]
        assert [len(t) for t in times] == [r.max_new_tokens for r in requests]
        assert all(t == sorted(t) and t[-1] <= time.perf_counter() for t in times)
    engine.process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_a_benchmark_that_is_killed_leaves_no_engine(fake):
    code = ("import sys, time; from lab.experiments import peers;"
            "engine = peers.Engine('vllm', sys.executable, 'folder', 1, 1, 1);"
            "print(engine.process.pid, flush=True); time.sleep(10**4)")
    bench_like = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True,
                                  stdout=subprocess.PIPE)
    pid = int(bench_like.stdout.readline())
    wait_for(pid, ["T"])
    bench_like.kill()
    bench_like.wait(600)
    wait_for(pid, ["Z", ""])


def test_a_peer_that_does_not_start_is_left_out_with_its_last_words(fake, capsys):
    assert bench.peers(["vLLM"], "none", fake) == {}
    fake.vllm = "no/python"
    assert bench.peers(["vLLM"], "folder", fake) == {}
    first, second = capsys.readouterr().out.splitlines()
    assert "last words: no such model" in first and "no/python" in second


def test_figures_are_medians_over_the_runs_each_for_itself():
    """The run of median time has neither the median TTFT nor the median gap; one run is wrong."""
    runs = [bench.served(lambda _: ([tokens], [times]), [Request([0])]) for tokens, times in (
        ([1, 2, 3], [0.5, 1.5, 3.0]), ([1, 2, 3], [2.5, 3.5, 4.0]), ([1, 2, 4], [1.2, 2.0, 9.0]))]
    for run in runs:
        run.started = 0.0
    figures = bench.figures_of(runs, runs[0])
    assert figures == {"rounds": [3.0, 4.0, 9.0], "seconds": 4.0, "spread": 1.5, "ttft_mean": 1.2,
                       "itl_p99": pytest.approx(1.495), "equal": 2 / 3}


def test_like_is_compared_with_like():
    """
    Plain stages with plain unbatched; a compiled one and engines with the best engine, which is the
    fastest that is no stage. The README's rows are the stage that is best, plain and compiled, and
    all engines.
    """
    seconds = {"unbatched": 12, "ragged, varlen": 4, "ragged, varlen, compiled": 1, "vLLM": 2,
               "OpenVINO GenAI": 3}
    rest = {"spread": 0.5, "rounds": [1, 2], "ttft_mean": 1.2, "itl_p99": 0.5, "equal": 1}
    result = {"model": "x", "workload": "W2", "tokens": 12, "roofline": 0.5, "peak": 1e9,
              "bandwidth": 1e9, "systems": {n: {**rest, "seconds": s} for n, s in seconds.items()},
              "peers": {"vLLM": "vLLM 9.9, compiled", "OpenVINO GenAI": "OpenVINO 1.2-3-4, f32"}}
    assert {name: compared for name, _, _, *compared, _, _, _ in bench.table(result).rows} == {
        "unbatched": ["1.00", "–", "4%"], "ragged, varlen": ["3.00", "–", "12%"],
        "ragged, varlen, compiled": ["–", "2.00", "50%"], "vLLM": ["–", "1.00", "25%"],
        "OpenVINO GenAI": ["–", "0.67", "17%"]}


# --- the runner -----------------------------------------------------------------------------------

def smaller(monkeypatch):
    """What quick runs measure, smaller still."""
    monkeypatch.setattr(stages, "twelve", lambda tokenizer: [
        Request([5] * n, 4, name=f"r{n}") for n in (9, 1, 3)])
    workload = bench.workload
    monkeypatch.setattr(bench, "workload", lambda *arguments: [
        replace(request, max_new_tokens=min(request.max_new_tokens, 9))
        for request in workload(*arguments)[:4]])
    monkeypatch.setattr(gpu, "MACHINES", {"a100": "W1", "a100, W3": "W3"})
    monkeypatch.setattr(real_runs, "PREDICTED", [
        {**run, "stages": [(5, 20)]} for run in real_runs.PREDICTED])
    monkeypatch.setattr(results, "in_turn", partial(results.in_turn, warm_up=0))
    monkeypatch.setattr(bench, "machine_peaks", lambda model: {"peak": 1e11, "bandwidth": 1e10})


SAID = {   # an experiment, with flags: what its figures must say
    "stages": lambda f: [*f["stages"]] == [*STAGES] and f["wrong"] == [] and (
        f["prompt_tokens"], f["generated"], f["useful_scores"]) == (
            9 + 1 + 3, 3 * 4, sum(n * (n + 1) // 2 for n in (9 + 3, 1 + 3, 3 + 3))),
    "rows --dtype float64": lambda f: [n for n, _ in f["points"]] == [1, 2, 4, 8, 16],
    "gaps": lambda f: [*f["points"]] == [*rows.GAP_STAGES] and all(
        [step for step, _ in points] == [*range(1, 28)] for points in f["points"].values()),
    "memory": lambda f: all(f["sharing"][name][what] == row[what] for name, row in results.load(
        "memory")["sharing"].items() for what in ("pages", "passes", "tokens")),
    "gpu": lambda f: all(f["stages"][gpu]["ragged, varlen"]["tokens_per_s"]
                         > f["stages"][gpu]["unbatched"]["tokens_per_s"] for gpu in f["stages"]),
    "bench --systems unbatched --model tiny": lambda f: [
        (r["workload"], name, system["equal"] > 0.95, system["itl_p99"] is None) for r in f
        for name, system in r["systems"].items()] == [
            (name, "unbatched", True, name == "W2") for name in bench.WORKLOADS] and (
                f[1]["tokens"] > 100)}


@pytest.mark.parametrize("command", SAID)
def test_quick_runs(command, tmp_path, monkeypatch):
    """Each writes figures that say where they come from."""
    smaller(monkeypatch)
    monkeypatch.chdir(tmp_path)
    if "tiny" in command:
        write_gpt2(GPT(GPTConfig(vocab_size=300, n_layer=2, n_head=2, n_embd=32)), Path("tiny"))
    assert runner.main([*command.split(), "--quick", "--json", "f.json"]) == 0
    found = json.loads(Path("f.json").read_text())
    for each in found if isinstance(found, list) else [found]:
        assert each["measured"]["command"].startswith(f"python -m lab.experiments {command} ")
        assert each["measured"]["machine"] and "torch" in each["where"]
    assert SAID[command](found)


def test_what_is_wrong_is_said(capsys, monkeypatch):
    smaller(monkeypatch)
    monkeypatch.setattr(stages, "STAGES", {name: STAGES[name] for name in (
        "naive", "dynamic", "interleaved", "ragged, varlen")})
    monkeypatch.setattr(stages, "ruined", lambda *arguments: {})   # puts the same bug in
    with broken("published mask", show=False):
        assert runner.main(["stages", "--quick"]) == 1
    said = capsys.readouterr().out
    assert "WRONG: dynamic: request 'r" in said and "WRONG: ragged" not in said


@pytest.mark.thorough
def test_training_is_reproducible(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(train, "documents", lambda: [
        ("a.b", "Return the name of the thing, which is a string."),
        ("a.c", "Close it. It cannot be used any more.")] * 30)
    monkeypatch.setattr(train, "N_TOKENS", 280)
    monkeypatch.setattr(train, "BATCH_SIZE", 2)
    for name in "ab":
        assert runner.main(["train", "--out", tmp_path / name, "--steps", 6]) == 0
    (a, tokenizer), (b, _) = load(tmp_path / "a"), load(tmp_path / "b")
    for mine, theirs in zip(a.state_dict().values(), b.state_dict().values()):
        assert torch.equal(mine, theirs)
    assert tokenizer.n_vocab == a.config.vocab_size == 281
    assert len(tokenizer.encode("the name of the thing")) < 10   # its merges are used
