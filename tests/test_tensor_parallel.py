"""Two gloo ranks on the CPU: every stage gives what a single process gives alone; and what happens when something is wrong with a rank."""
import copy
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from common import BLOCK_SIZE, SCHEDULED, STAGES, VOCAB, assert_contract, on_ranks, toy

from cache import PrefixCache
from scheduler import Request
from tensor_parallel import fit, shard

ROOT = Path(__file__).parent.parent
EVEN = dict(n_head=4, n_embd=16)


def workload(seed, n=7):
    rng = random.Random(seed)
    start = [rng.randrange(VOCAB) for _ in range(9)]   # some prompts begin alike
    return [Request(start[:rng.randint(1, 9)] + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 9))], rng.randint(1, 9), rng.choice([0.0, 1.0]),
                    seed=i, name=f"r{i}", arrival=rng.choice([0, 0, 3]), priority=i % 2) for i in range(n)]


def every_stage_is_right(ranks):
    whole = toy(**EVEN)
    model = shard(copy.deepcopy(whole))
    counts = {}
    for stage, generate in STAGES.items():
        knobs = {} if "cache" in stage or stage == "unbatched" else {"max_batch": 4}
        for seed in range(3):
            assert_contract(model, generate, workload(seed), whole=whole, **knobs, **({"token_budget": 6} if stage in SCHEDULED else {}))
        if stage in SCHEDULED:   # so little room that requests are thrown out and computed again, from pages of a prefix cache too
            cache = PrefixCache(page_size=3)
            for seed in range(3):
                trace = assert_contract(model, generate, workload(seed), whole=whole, max_batch=4, token_budget=6, max_kv_tokens=BLOCK_SIZE + 3, admission="grow",
                                        page_size=3, policy="priority", prefix_cache=cache)
                counts = {name: counts.get(name, 0) + trace.counts[name] for name in ("preemptions", "prefix_hits")}
    assert counts["preemptions"] > 0 and counts["prefix_hits"] > 0
    assert all(p.size(0) in (16 // ranks, 64 // ranks, 16) for name, p in model.h.named_parameters() if p.dim() == 2)   # a share of each matrix


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_stage_gives_what_one_process_gives_alone(ranks):
    on_ranks(ranks, every_stage_is_right, ranks)


def uneven_is_refused():
    for config, message in (dict(n_head=3, n_embd=15), "2 ranks: n_head 3 is not a multiple"), (dict(n_head=1, n_embd=5), "2 ranks: n_head 1 is not a multiple"):
        with pytest.raises(ValueError, match=message):
            shard(toy(**config))


def test_heads_that_cannot_be_divided_are_refused():
    on_ranks(2, uneven_is_refused)


def optimized_in_either_order():
    whole = toy(dtype=torch.float32, **EVEN)
    for model in shard(copy.deepcopy(whole)).optimize(), shard(copy.deepcopy(whole).optimize()):
        assert_contract(model, STAGES["ragged_varlen"], workload(0), whole=whole, tolerance=1e-4)


def test_together_with_optimize():
    on_ranks(2, optimized_in_either_order)


def test_the_cost_model_finds_latency_and_bandwidth():
    points = [(16, size, 16 * 30e-6 + size / 2e9) for size in (1e3, 1e5, 1e7)]
    latency, bandwidth = fit(points)
    assert latency == pytest.approx(30e-6) and bandwidth == pytest.approx(2e9)


# --- the script ---------------------------------------------------------------------------------------------------------

def torchrun(*flags, ranks=2):
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), "tensor_parallel.py", *flags],
                          cwd=ROOT, capture_output=True, text=True, encoding="utf-8", timeout=120)


@pytest.mark.parametrize("flags", [["--stage", "ragged"], ["--stage", "naive", "--max_batch", "3"],
                                   ["--stage", "interleaved", "--admission", "grow", "--max_kv_tokens", "200", "--prefix_cache"]], ids=" ".join)
def test_the_script(flags):
    result = torchrun(*flags, "--max_new_tokens", "12")
    assert result.returncode == 0, result.stderr
    assert "12/12 requests identical to unbatched" in result.stdout and result.stdout.count("--- r0:") == 1   # rank 0 speaks
    assert "2 ranks (gloo), 4 layers" in result.stdout
    assert "8 for 10 tokens of 1 request, 8 for 256 tokens of 1 request, 8 for 10 tokens of 5 requests, 8 for 5,120 tokens of 50 requests" in result.stdout


def test_the_table():
    result = torchrun("--table")
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if line.strip()[:1] in "12" and len(line.split()) == 7]
    assert [(row[0], row[1], row[5]) for row in rows] == [(str(n), str(tokens), "16" if n > 1 else "0") for n in (1, 2) for tokens in (1, 8, 64, 512)]
    assert "cost model, fitted to 2 ranks" in result.stdout and "CALCULATED, not measured" in result.stdout


def test_one_clear_line_from_rank_0():
    result = torchrun("--temperature", "-1")
    assert result.returncode != 0
    assert [line for line in result.stderr.splitlines() if line.startswith("tensor_parallel.py:")] == [
        line for line in result.stderr.splitlines() if "temperature must be" in line] != []


def test_without_torchrun():
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    result = subprocess.run([sys.executable, "tensor_parallel.py"], cwd=ROOT, capture_output=True, text=True, timeout=60, env=clean)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and "torchrun --nproc_per_node 2 tensor_parallel.py" in result.stderr


LOST = """
import os, signal, sys, time
import torch.distributed as dist
original, calls = dist.all_reduce, []
def all_reduce(*args, **kwargs):
    calls.append(1)
    if len(calls) == 100:
        {what}
    return original(*args, **kwargs)
dist.all_reduce = all_reduce
sys.argv = ["tensor_parallel.py", *sys.argv[1:]]
import tensor_parallel
tensor_parallel.main()
"""


@pytest.mark.parametrize("what, within", [("os.kill(os.getpid(), signal.SIGKILL)", 10), ("raise SystemExit(3)", 10), ("time.sleep(600)", 20)])
def test_a_rank_that_is_lost_stops_the_others_within_seconds(what, within):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        code = LOST.format(what=what if rank else "pass")
        ranks.append(subprocess.Popen([sys.executable, "-c", code, "--stage", "ragged", "--timeout", "4"], cwd=ROOT, env=environment, text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    try:
        started = time.monotonic()
        _, said = ranks[0].communicate(timeout=60)
        assert ranks[0].returncode == 1, said
        lines = [line for line in said.splitlines() if line.startswith("tensor_parallel.py: ")]
        assert len(lines) == 1 and "rank 0: an all-reduce failed, another rank has stopped or hangs" in lines[0] and "Traceback" not in said
        assert time.monotonic() - started < within + 40   # 40 to start, on a very busy machine
    finally:
        for process in ranks:
            process.send_signal(signal.SIGKILL)
            process.communicate()
