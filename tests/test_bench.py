"""The benchmark: what it counts, that peers and stages give the same tokens, and a quick run."""
import json
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common import ROOT, mixed, toy

from experiments import bench, engines, peers, results, tables
from loading.llama import Llama, LlamaConfig
from loading.stages import STAGES
from model import GPT, GPTConfig
from request import Request

TINY = GPTConfig(block_size=1024, vocab_size=300, n_layer=2, n_head=2, n_embd=32)


def test_the_workloads_are_those_of_the_docstring():
    mixture, prefill, decode = (bench.workload(name, 50257) for name in tables.WORKLOADS)
    assert [len(w) for w in (mixture, prefill, decode)] == [32, 64, 32]
    assert all(8 <= len(r.prompt) <= 512 and 8 <= r.max_new_tokens <= 128 for r in mixture)
    assert sorted(len(r.prompt) for r in mixture)[16] < 100   # log-uniform: half are below 64
    assert all(1 <= len(r.prompt) <= 512 and r.max_new_tokens == 1 for r in prefill)
    assert all(len(r.prompt) == 16 and 32 <= r.max_new_tokens <= 256 for r in decode)
    assert [r.prompt for r in mixture] == [r.prompt for r in bench.workload("W1", 50257)]


def test_the_roofline_by_hand():
    """
    A prompt of 4 tokens in chunks of 3 and 1, and one decode, on a model small enough to count. Of
    the last block's 12 C^2 weights, a token that is not sampled from needs 2 C^2, for its key and
    value, and no scores.
    """
    model = GPT(GPTConfig(block_size=8, vocab_size=10, n_layer=2, n_head=1, n_embd=4))
    trace = STAGES["ragged, varlen"](model, [Request([1, 2, 3, 4], 2)], max_batch=3, token_budget=3)
    assert [p.work for p in trace.passes] == [[("r0", 0, 3)], [("r0", 3, 1)], [("r0", 4, 1)]]
    block, kv, vocabulary = 12 * 16, 2 * 16, 40
    operations = [2 * 3 * (block + kv) + 4 * 4 * 6]
    operations += [2 * (2 * block + vocabulary) + 4 * 4 * 2 * keys for keys in (4, 5)]
    memory = [4 * (2 * block + 2 * 2 * 4 * (3 + 3))]
    memory += [4 * (2 * block + vocabulary + 2 * 2 * 4 * (keys + 1)) for keys in (4, 5)]

    def roofline(**machine):
        return bench.roofline(model, trace, **machine)

    assert roofline(peak=1, bandwidth=1e9) == pytest.approx(sum(operations))
    assert roofline(peak=1e9, bandwidth=1) == pytest.approx(sum(memory))
    model.half()
    assert roofline(peak=1e9, bandwidth=1) == pytest.approx(sum(memory) / 2)


@torch.inference_mode()
def test_its_outputs_could_differ():
    """At GPT-2's own scale, all would repeat one token, and agreement would mean nothing."""
    torch.manual_seed(0)
    model = bench.loud(GPT(TINY))
    requests = bench.workload("W3", TINY.vocab_size, quick=True)
    tokens, _ = bench.stage(model, STAGES["unbatched"], {})(requests)
    assert len({token for row in tokens for token in row}) > 50
    assert len({tuple(row[:8]) for row in tokens}) == len(requests)


# --- peers ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind, number", [("GPT-2", 7), ("Llama", 4)])
def test_peers_and_stages_give_the_same_tokens(kind, number):
    pytest.importorskip("transformers")
    pytest.importorskip("ctranslate2")
    torch.manual_seed(0)
    model = toy(block_size=64, n_layer=2, dtype=torch.float32) if kind == "GPT-2" else bench.loud(
        Llama(LlamaConfig(64, 13, 2, n_head=4, n_kv_head=2, n_embd=32, head_size=8, ffn=48)))
    requests = [replace(request, temperature=0.0, arrival=0) for request in mixed()]
    reference, _ = bench.stage(model, STAGES["unbatched"], {})(requests)
    found = peers.peers(model, batch_tokens=32)
    assert len(found) == number
    for name, peer in found.items():
        tokens, times = peer(requests)
        assert tokens == reference, name
        assert [len(t) for t in times] == [r.max_new_tokens for r in requests], name
        assert all(t == sorted(t) for t in times), name
    if kind == "GPT-2":
        found["CTranslate2, one at a time"].args[0].signal("SIGKILL")


# --- engines in environments of their own ---------------------------------------------------------

STAND_IN = """
from types import SimpleNamespace as SamplingParams
__version__ = "0"

class LLM:
    def __init__(self, model, **options):
        print("engines talk a lot")
        self.llm_engine, self.left = self, {}

    def add_request(self, name, prompt, params):
        first = prompt["prompt_token_ids"][0]
        if first == 13:
            raise SystemExit("ValueError: thirteen")
        self.left[name] = list(range(first, first + params.max_tokens))

    def has_unfinished_requests(self):
        return any(self.left.values())

    def step(self):
        return [SamplingParams(request_id=name, outputs=[SamplingParams(token_ids=[left.pop(0)])])
                for name, left in self.left.items() if left]
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """vLLM's interface, as far as it is used, without vLLM."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(STAND_IN)
    (tmp_path / "vllm" / "sampling_params.py").write_text("class RequestOutputKind: DELTA = 1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    engine = engines.Engine("vllm", sys.executable, str(tmp_path), 4, 16, 1)
    yield engine
    engine.signal("SIGKILL")


def wait_for(pid, states):
    """Until a process is stopped, "T", or has ended, "Z" or "". As long as that takes."""
    for _ in range(6000):
        stat = Path(f"/proc/{pid}/stat")
        if (stat.read_text().split()[2] if stat.exists() else "") in states:
            return
        time.sleep(0.1)
    raise AssertionError("it does not happen within ten minutes")


def test_an_engine_in_a_process_of_its_own(engine):
    assert engine.settings.startswith("vLLM 0, ") and "4 sequences and 16 tokens" in engine.settings
    for _ in range(2):
        tokens, times = engine([Request([1, 2], 3), Request([5], 1)])
        assert tokens == [[1, 2, 3], [5]] and [len(t) for t in times] == [3, 1]
        assert times[0] == sorted(times[0]) and times[0][0] <= time.perf_counter()
        if sys.platform == "linux":   # it does not spin while others run
            wait_for(engine.process.pid, ["T"])
    with pytest.raises(RuntimeError, match="vllm has ended, its last words: ValueError: thirteen"):
        engine([Request([13], 1)])


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_a_terminated_benchmark_leaves_no_engine(engine, tmp_path):
    code = ("import time; from experiments import engines; engines.end_with_this_process();"
            f"engine = engines.Engine('vllm', {sys.executable!r}, {str(tmp_path)!r}, 4, 16, 1);"
            "print(engine.process.pid, flush=True); time.sleep(10**4)")
    bench_like = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True,
                                  stdout=subprocess.PIPE)
    pid = int(bench_like.stdout.readline())
    wait_for(pid, ["T"])
    bench_like.terminate()
    assert bench_like.wait(600) == 143
    wait_for(pid, ["Z", ""])


def test_engines_that_cannot_run_here(tmp_path, capsys):
    with pytest.raises(RuntimeError, match="openvino has ended, .* No module named"):
        engines.Engine("openvino", sys.executable, str(tmp_path), 4, 16, 1)
    assert peers.engines(toy(), {}, 4, 16) == {}
    said = capsys.readouterr().out
    assert said.count("\n") == 2 and "--peer-python vllm=PATH" in said and "pip install" in said
    assert peers.engines(toy(), {"vllm": sys.executable}, 4, 16) == {}   # float64
    assert "vLLM runs only in float32 on a CPU" in capsys.readouterr().out


# --- rounds ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("takes, rounds, best, ratio", [
    # one slow moment in the first round does not exclude a system; 3x the fastest time does,
    # unless it is a stage
    ({"unbatched": [1, 1, 1], "transformers, a": [2.75, 1.5, 1.5], "CTranslate2, b": [2, 2, 2],
      "ragged, varlen, max_batch 1": [4], "interleaved": [4, 4, 4]},
     {"transformers, a": [2.75, 1.5, 1.5], "ragged, varlen, max_batch 1": [4, None, None],
      "interleaved": [4, 4, 4]}, "transformers, a", 1.5),
    # but the best peer always runs, or comes back when another one has turned out to be slower; a
    # round in which it did not run does not count
    ({"unbatched": [1, 1, 1], "CTranslate2, b": [9, 9], "transformers, a": [5, 20]},
     {"CTranslate2, b": [9, None, 9], "transformers, a": [5, 20, None]}, "CTranslate2, b", 9),
])
def test_which_systems_run_again_and_which_is_the_best_peer(takes, rounds, best, ratio,
                                                            monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def system(seconds):
        left = iter(seconds)

        def run(requests):
            clock[0] += next(left)
            return [[7]], [[clock[0]]]
        return run

    run = {name: system(seconds) for name, seconds in takes.items()}
    figures = bench.measure(list(takes), run, [], 3, lambda line: None)
    assert all(figures[name]["rounds"] == expected for name, expected in rounds.items())
    assert results.best_peer(figures) == best
    assert results.times_best_peer(figures, "unbatched") == ratio
    assert all(f["seconds"] == statistics.median(takes[name]) for name, f in figures.items())


def test_figures_are_medians_over_the_runs_each_for_itself():
    """The run of median time has neither the median TTFT nor the median gap; one run is wrong."""
    runs = [(3.0, 0.0, [[1, 2, 3]], [[0.5, 1.5, 3.0]]),
            (4.0, 10.0, [[1, 2, 3]], [[12.5, 13.5, 14.0]]),
            (9.0, 20.0, [[1, 2, 4]], [[21.0, 22.0, 29.0]])]
    found = bench.medians_of(runs, [[1, 2, 3]])
    assert found == {"seconds": 4.0, "spread": 1.5, "ttft_mean": 1.0, "itl_p50": 1.25,
                     "itl_p99": pytest.approx(1.495), "equal": 2 / 3}
    one = bench.medians_of([(3.0, 0.0, [[1]], [[0.5]])], [[1]])   # no gaps
    assert one["itl_p50"] is one["itl_p99"] is None and one["ttft_mean"] == 0.5


def test_tokens_are_compared_with_unbatched_even_if_that_is_not_measured():
    run = {"unbatched": lambda requests: ([[1, 2], [3, 4]], [[0.0, 0.0]] * 2),
           "naive": lambda requests: ([[1, 2], [3, 5]], [[0.0, 0.0]] * 2)}
    assert bench.measure(["naive"], run, [], 1, lambda line: None)["naive"]["equal"] == 0.75


def test_apart_returns_the_result_and_leaves_no_thread():
    before = threading.active_count()
    assert bench.apart(threading.current_thread) is not threading.main_thread()
    with pytest.raises(ZeroDivisionError):
        bench.apart(lambda: 1 / 0)
    assert threading.active_count() == before


# --- the command ----------------------------------------------------------------------------------

def test_all_of_it_on_a_tiny_model(monkeypatch, tmp_path, capsys):
    def small(*arguments, workload=bench.workload):
        return [replace(request, max_new_tokens=min(request.max_new_tokens, 9))
                for request in workload(*arguments)[:4]]

    monkeypatch.setitem(bench.MODELS, "small", TINY)
    monkeypatch.setattr(bench, "workload", small)
    monkeypatch.setattr(bench, "machine_peaks", lambda model: (1e11, 1e10, 1e9))
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    file, picture = tmp_path / "b.json", tmp_path / "b.png"
    flags = ["--quick", "--systems", "unbatched", "ragged", "paged", "--json", file,
             "--plot", picture]
    assert bench.main([str(flag) for flag in flags]) == 0
    said, found = capsys.readouterr().out, json.loads(file.read_text())
    assert "transformers is not installed: its rows are left out" in said
    assert [result["workload"] for result in found] == ["W1", "W2", "W3"]
    for result in found:
        assert (tmp_path / f"b-small-{result['workload']}.png").stat().st_size > 5_000
        assert set(result["systems"]) >= {"unbatched", "ragged, mask", "ragged, varlen", "paged",
                                          "ragged, varlen, not optimized"}
        assert all(f["seconds"] > 0 and f["equal"] > 0.95 for f in result["systems"].values())
        assert all(name in said for name in result["systems"])


@pytest.mark.thorough
def test_what_the_machine_can_do():
    assert all(1e6 < figure < 1e15 for figure in bench.machine_peaks(GPT(TINY)))
