"""The benchmark: what it counts, that peers and stages give the same tokens, and a quick run."""
import json
import os
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
from common import mixed, toy

from experiments import bench, engines, peers, results, tables
from model import GPT, GPTConfig
from request import Request
from toolbox.stages import STAGES

ROOT = Path(__file__).parent.parent
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
    config = GPTConfig(block_size=8, vocab_size=10, n_layer=2, n_head=1, n_embd=4)
    trace = STAGES["ragged, varlen"](GPT(config), [Request([1, 2, 3, 4], 2)], max_batch=3,
                                     token_budget=3)
    assert [p.work for p in trace.passes] == [[("r0", 0, 3)], [("r0", 3, 1)], [("r0", 4, 1)]]
    block, kv, vocabulary = 12 * 16, 2 * 16, 40
    operations = [2 * 3 * (block + kv) + 4 * 4 * 6]
    operations += [2 * (2 * block + vocabulary) + 4 * 4 * 2 * keys for keys in (4, 5)]
    memory = [4 * (2 * block + 2 * 2 * 4 * (3 + 3))]
    memory += [4 * (2 * block + vocabulary + 2 * 2 * 4 * (keys + 1)) for keys in (4, 5)]

    def roofline(**machine):
        return bench.roofline(config, trace, **machine)

    assert roofline(peak=1, bandwidth=1e9) == pytest.approx(sum(operations))
    assert roofline(peak=1e9, bandwidth=1) == pytest.approx(sum(memory))
    assert roofline(peak=1e9, bandwidth=1, size=2) == pytest.approx(sum(memory) / 2)


@torch.inference_mode()
def test_its_outputs_could_differ():
    """
    Were the weights at GPT-2's own scale, all would repeat one token, and agreement would mean
    nothing.
    """
    torch.manual_seed(0)
    model = bench.loud(GPT(TINY))
    requests = bench.workload("W3", TINY.vocab_size, quick=True)
    tokens, _ = bench.stage(model, STAGES["unbatched"], {})(requests)
    assert len({token for row in tokens for token in row}) > 50
    assert len({tuple(row[:8]) for row in tokens}) == len(requests)


# --- peers ----------------------------------------------------------------------------------------

def test_peers_and_stages_give_the_same_tokens():
    pytest.importorskip("transformers")
    pytest.importorskip("ctranslate2")
    model = toy(block_size=64, n_layer=2, dtype=torch.float32)
    requests = [replace(request, temperature=0.0, arrival=0) for request in mixed()]
    reference, _ = bench.stage(model, STAGES["unbatched"], {})(requests)
    found = peers.peers(model, batch_tokens=32)
    assert len(found) == 7
    for name, peer in found.items():
        tokens, times = peer(requests)
        assert tokens == reference, name
        assert [len(t) for t in times] == [r.max_new_tokens for r in requests], name
        assert all(t == sorted(t) for t in times), name
    found["CTranslate2, one at a time"].args[0].signal("SIGKILL")


# --- engines in environments of their own ---------------------------------------------------------

STAND_IN = """
__version__ = "0"

class SamplingParams:
    def __init__(self, **options):
        self.length = options["max_tokens"]

class Output:
    def __init__(self, name, tokens):
        self.request_id, self.outputs = name, [self]
        self.token_ids = tokens

class LLM:
    def __init__(self, model, **options):
        print("engines talk a lot")
        self.llm_engine, self.left = self, {}

    def add_request(self, name, prompt, params):
        if prompt["prompt_token_ids"] == [13]:
            raise SystemExit("ValueError: thirteen")
        self.left[name] = [sum(prompt["prompt_token_ids"]) + i for i in range(params.length)]

    def has_unfinished_requests(self):
        return any(self.left.values())

    def step(self):
        return [Output(name, [left.pop(0)]) for name, left in self.left.items() if left]
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


def test_an_engine_in_a_process_of_its_own(engine):
    assert engine.settings.startswith("vLLM 0, ") and "4 sequences and 16 tokens" in engine.settings
    for _ in range(2):
        tokens, times = engine([Request([1, 2], 3), Request([5], 1)])
        assert tokens == [[3, 4, 5], [5]] and [len(t) for t in times] == [3, 1]
        assert times[0] == sorted(times[0]) and times[0][0] <= time.perf_counter()
        if sys.platform == "linux":   # it does not spin while others run
            stat = Path(f"/proc/{engine.process.pid}/stat")
            wait_until(lambda: stat.read_text().split()[2] == "T")


def wait_until(true):
    """As long as it takes, but not for ever."""
    for _ in range(6000):
        if true():
            return
        time.sleep(0.1)
    raise AssertionError("it does not happen within ten minutes")


def test_an_engine_that_ends_says_why(engine):
    with pytest.raises(RuntimeError, match="vllm has ended, its last words: ValueError: thirteen"):
        engine([Request([13], 1)])


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_a_terminated_benchmark_leaves_no_engine(engine, tmp_path):
    code = ("import time; from experiments import engines; engines.end_with_this_process();"
            f"engine = engines.Engine('vllm', {sys.executable!r}, {str(tmp_path)!r}, 4, 16, 1);"
            "print(engine.process.pid, flush=True); time.sleep(10**4)")
    bench_like = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True,
                                  stdout=subprocess.PIPE)
    pid = int(bench_like.stdout.readline())
    os.kill(pid, 0)   # it is there
    bench_like.terminate()
    assert bench_like.wait(600) == 143
    wait_until(lambda: not alive(pid))


def alive(pid):
    """Whether a process runs or is stopped; one that waits for its parent to ask does not."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return found.stdout.strip()[:1] not in ("", "Z")


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
    # one slow moment in the first round does not exclude a system; 3x the fastest time does
    ({"unbatched": [1, 1, 1], "transformers, a": [2.75, 1.5, 1.5], "CTranslate2, b": [2, 2, 2],
      "naive": [4]},
     {"transformers, a": [2.75, 1.5, 1.5], "naive": [4, None, None]}, "transformers, a", 1.5),
    # but the best peer always runs, to compare with
    ({"unbatched": [1, 2, 1], "transformers, a": [5, 6, 7], "CTranslate2, b": [9]},
     {"transformers, a": [5, 6, 7], "CTranslate2, b": [9, None, None]}, "transformers, a", 5),
    # or comes back when another one has turned out to be slower; a round in which it did not run
    # does not count
    ({"unbatched": [1, 1, 1], "CTranslate2, b": [9, 9], "transformers, a": [5, 20]},
     {"CTranslate2, b": [9, None, 9], "transformers, a": [5, 20, None]}, "CTranslate2, b", 9),
    ({"unbatched": [1, 1, 1]}, {"unbatched": [1, 1, 1]}, None, None),
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
    for name, f in figures.items():
        median = statistics.median(takes[name])
        assert f["equal"] == 1 and f["seconds"] == f["ttft_mean"] == median


def test_figures_are_medians_over_the_runs_each_for_itself():
    """The run of median time has neither the median TTFT nor the median gap; one run is wrong."""
    runs = [(3.0, 0.0, [[1, 2, 3]], [[0.5, 1.5, 3.0]]),
            (4.0, 10.0, [[1, 2, 3]], [[12.5, 13.5, 14.0]]),
            (9.0, 20.0, [[1, 2, 4]], [[21.0, 22.0, 29.0]])]
    found = bench.figures_of(runs, [[1, 2, 3]])
    assert found == {"seconds": 4.0, "spread": 1.5, "ttft_mean": 1.0, "itl_p50": 1.25,
                     "itl_p99": pytest.approx(1.495), "equal": 2 / 3}
    one = bench.figures_of([(3.0, 0.0, [[1]], [[0.5]])], [[1]])   # no gaps
    assert one["itl_p50"] is one["itl_p99"] is None and one["ttft_mean"] == 0.5


def test_the_share_of_equal_tokens():
    run = {"unbatched": lambda requests: ([[1, 2], [3, 4]], [[0.0, 0.0]] * 2),
           "naive": lambda requests: ([[1, 2], [3, 5]], [[0.0, 0.0]] * 2)}
    # compared with unbatched, whether or not that is measured
    for names in ["unbatched", "naive"], ["naive"]:
        assert bench.measure(names, run, [], 1, lambda line: None)["naive"]["equal"] == 0.75


def test_apart_returns_the_result_and_leaves_no_thread():
    def work(a, b):
        return a + b, threading.current_thread() is threading.main_thread()

    before = threading.active_count()
    assert bench.apart(work, 2, 3) == (5, False)
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
    monkeypatch.setattr(bench, "machine_peaks", lambda model: (1e11, 1e10))
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    file, picture = tmp_path / "b.json", tmp_path / "b.png"
    flags = ["--quick", "--systems", "unbatched", "ragged", "paged", "--json", file,
             "--plot", picture]
    assert bench.main([str(flag) for flag in flags]) == 0
    said, found = capsys.readouterr().out, json.loads(file.read_text())
    assert "transformers is not installed: its rows are left out" in said
    assert [result["workload"] for result in found] == ["W1", "W2", "W3"]
    pictures = sorted(tmp_path.glob("b-*.png"))
    assert [path.stem for path in pictures] == ["b-small-W1", "b-small-W2", "b-small-W3"]
    assert all(path.stat().st_size > 5_000 for path in pictures)
    for result in found:
        assert set(result["systems"]) >= {"unbatched", "ragged, mask", "ragged, varlen", "paged",
                                          "ragged, varlen, not optimized"}
        assert all(f["seconds"] > 0 and f["equal"] > 0.95 for f in result["systems"].values())
        assert all(name in said for name in result["systems"])


@pytest.mark.thorough
def test_what_the_machine_can_do():
    assert all(1e6 < figure < 1e15 for figure in bench.machine_peaks(GPT(TINY)))


def test_a_table_by_hand():
    """Two systems, one of them a peer that takes twice as long."""
    def figures(seconds):
        return {"seconds": seconds, "rounds": [seconds], "spread": 0.0, "ttft_mean": 0.25,
                "itl_p99": 0.002, "equal": 1.0}

    result = {"workload": "W1", "tokens": 1000, "roofline": 0.25,
              "systems": {"naive": figures(0.5), "transformers, a": figures(1.0)}}
    assert tables.bench(result, equal=True)[1] == [
        ["naive", "2,000", 1, "2.00", "50%", "0.2 s", "2 ms", "100.0%"],
        ["transformers, a", "1,000", 1, "1.00", "25%", "0.2 s", "2 ms", "100.0%"]]
