"""
Gloo ranks on the CPU: every stage gives what a single process gives alone, and a rank that fails
stops the others.
"""
import copy
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from common import BLOCK_SIZE, SCHEDULED, STAGES, VOCAB, assert_contract, on_ranks, toy

from beyond.tensor_parallel import shard
from experiments.ranks import fit
from request import Request

ROOT = Path(__file__).parent.parent
EVEN = dict(n_head=4, n_embd=16)
SCRIPT, NAME = ("-m", "beyond.tensor_parallel"), "python -m beyond.tensor_parallel: "


def workload(seed, n=7):
    rng = random.Random(seed)
    start = [rng.randrange(VOCAB) for _ in range(9)]   # some prompts begin alike

    def request(i):
        prompt = start[:rng.randint(1, 9)]
        prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 9))]
        return Request(prompt, rng.randint(1, 9), rng.choice([0.0, 1.0]), seed=i, name=f"r{i}",
                       arrival=rng.choice([0, 0, 3]), priority=i % 2)

    return [request(i) for i in range(n)]


def every_stage_is_right(ranks):
    whole = toy(**EVEN)
    model = shard(copy.deepcopy(whole))
    counts, seeds = Counter(), range(3 if os.environ.get("THOROUGH") else 1)
    for stage, generate in STAGES.items():
        knobs = {} if "cache" in stage or stage == "unbatched" else {"max_batch": 4}
        if stage in SCHEDULED:
            knobs["token_budget"] = 6
        for seed in seeds:
            assert_contract(model, generate, workload(seed), whole=whole, **knobs)
        if stage == "paged":   # so few pages that requests are preempted and computed again
            scarce = {"pages": BLOCK_SIZE // 3 + 1, "page_size": 3, "policy": "priority"}
        else:
            scarce = {"max_kv_tokens": BLOCK_SIZE + 3}
        if stage in SCHEDULED:
            for seed in seeds:
                trace = assert_contract(model, generate, workload(seed), whole=whole, **knobs,
                                        **scarce)
                counts.update(trace.counts)
    assert counts["preemptions"] > 0 and counts["shared_pages"] > 0
    for p in model.h.parameters():
        if p.dim() == 2:   # a share of each matrix
            assert p.size(0) in (16 // ranks, 64 // ranks, 16)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_every_stage_gives_what_one_process_gives_alone(ranks):
    on_ranks(ranks, every_stage_is_right, ranks)


def uneven_is_refused():
    for heads, config in (3, dict(n_head=3, n_embd=15)), (1, dict(n_head=1, n_embd=5)):
        with pytest.raises(ValueError, match=f"2 ranks: n_head {heads} is not a multiple"):
            shard(toy(**config))


def uneven_is_refused_and_optimize_works():
    uneven_is_refused()
    whole = toy(dtype=torch.float32, **EVEN)
    for model in shard(copy.deepcopy(whole)).optimize(), shard(copy.deepcopy(whole).optimize()):
        assert_contract(model, STAGES["ragged_varlen"], workload(0), whole=whole, tolerance=1e-4)


@pytest.mark.thorough
def test_uneven_heads_are_refused_and_optimize_works_in_either_order():
    on_ranks(2, uneven_is_refused_and_optimize_works)


def test_the_cost_model_finds_latency_and_bandwidth():
    points = [(16, size, 16 * 30e-6 + size / 2e9) for size in (1e3, 1e5, 1e7)]
    latency, bandwidth = fit(points)
    assert latency == pytest.approx(30e-6) and bandwidth == pytest.approx(2e9)


# --- the commands ---------------------------------------------------------------------------------

def torchrun(*command):
    return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                           "--nproc_per_node", "2", *command],
                          cwd=ROOT, capture_output=True, text=True, encoding="utf-8", timeout=1200)


@pytest.mark.parametrize("flags", [
    ["--stage", "paged", "--pages", "13", "--policy", "sjf"],
    *(pytest.param(flags, marks=pytest.mark.thorough) for flags in (
        ["--stage", "ragged"], ["--stage", "naive", "--max_batch", "3"],
        ["--stage", "interleaved", "--max_kv_tokens", "200"])),
], ids=" ".join)
def test_the_script(flags):
    result = torchrun(*SCRIPT, *flags, "--max_new_tokens", "12", "--timeout", "600")
    assert result.returncode == 0, result.stderr
    assert "12/12 requests identical to unbatched" in result.stdout
    assert result.stdout.count("--- r0:") == 1   # rank 0 speaks
    assert "2 ranks (gloo), 4 layers" in result.stdout
    assert ("8 for 10 tokens of 1 request, 8 for 256 tokens of 1 request, "
            "8 for 10 tokens of 5 requests, 8 for 5,120 tokens of 50 requests") in result.stdout
    assert re.search(r"rank 0 in this run: [\d,]+ all-reduces, [\d.]+ MB, [\d.]+ s$",
                     result.stdout, re.MULTILINE)


@pytest.mark.thorough
def test_the_table(tmp_path):
    result = torchrun("-m", "experiments.ranks", "--quick", "--json", str(tmp_path / "ranks.json"),
                      "--timeout", "600")
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines() if line.strip()[:1] in "12"]
    rows = [row for row in rows if len(row) == 7]
    expected = [(str(ranks), str(tokens), "16" if ranks > 1 else "0")
                for ranks in (1, 2) for tokens in (1, 8, 64, 512)]
    assert [(row[0], row[1], row[5]) for row in rows] == expected
    assert "cost model, fitted to 2 ranks" in result.stdout
    assert "CALCULATED, not measured" in result.stdout
    written = json.loads((tmp_path / "ranks.json").read_text())
    assert [[f"{row[key]}" for key in ("ranks", "tokens", "all_reduces")]
            for row in written["rows"]] == [list(row) for row in expected]
    assert written["model"]["latency"] > 0 and written["repeats"] == 3


@pytest.mark.thorough
def test_one_clear_line_from_rank_0():
    result = torchrun(*SCRIPT, "--temperature", "-1")
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if line.startswith(NAME)]
    assert lines == [line for line in result.stderr.splitlines() if "temperature must be" in line]
    assert lines != []


def one_process(*command, **environment):
    clean = {name: os.environ[name] for name in os.environ.keys() - {"RANK", "WORLD_SIZE"}}
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True,
                          encoding="utf-8", timeout=600, env={**clean, **environment})


@pytest.mark.parametrize("command", [
    SCRIPT,
    pytest.param(["-m", "experiments.ranks"], marks=pytest.mark.thorough)], ids=" ".join)
def test_without_torchrun(command):
    result = one_process(*command)
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert f"torchrun --nproc_per_node 2 {' '.join(command)}" in result.stderr


LEFT = """
import sys, weakref
import torch.distributed as dist
destroy_process_group = dist.destroy_process_group
def destroy():
    group = weakref.ref(dist.group.WORLD)
    destroy_process_group()
    print("gone:", group() is None)
dist.destroy_process_group = destroy
sys.argv = ["tensor_parallel", "--quiet", "--no_check", "--max_new_tokens", "2"]
from beyond import tensor_parallel
from toolbox.torchrun import main
main(tensor_parallel.shard, tensor_parallel.__doc__)
"""


@pytest.mark.thorough
def test_nothing_keeps_the_process_group_when_a_rank_has_left_it():
    """Else gloo's threads outlive Python, and one that needs the GIL then aborts the rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    result = one_process("-c", LEFT, RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                         MASTER_PORT=port)
    assert result.returncode == 0, result.stderr
    assert "gone: True" in result.stdout


LOST = """
import os, signal, sys, time
from datetime import timedelta
import torch.distributed as dist
all_reduce_of_torch, init, calls, timeouts = dist.all_reduce, dist.init_process_group, [], []

def init_process_group(backend, timeout):
    timeouts.append(timeout)   # not yet: on a busy machine, the ranks take long to start
    init(backend, timeout=timedelta(seconds=1200))

def all_reduce(*args, **kwargs):
    calls.append(1)
    if len(calls) == 100:
        dist.distributed_c10d._set_pg_timeout(timeouts[0])
        {what}
    return all_reduce_of_torch(*args, **kwargs)

dist.init_process_group, dist.all_reduce = init_process_group, all_reduce
sys.argv = ["tensor_parallel", *sys.argv[1:]]
from beyond import tensor_parallel
from toolbox.torchrun import main
main(tensor_parallel.shard, tensor_parallel.__doc__)
"""


@pytest.mark.parametrize("what, timeout", [
    ("os.kill(os.getpid(), signal.SIGKILL)", "1200"),   # noticed long before the timeout
    pytest.param("raise SystemExit(3)", "1200", marks=pytest.mark.thorough),
    pytest.param("time.sleep(10**6)", "4", marks=pytest.mark.thorough),
])
def test_a_rank_that_is_lost_stops_the_others(what, timeout):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        code = LOST.format(what=what if rank else "pass")
        ranks.append(subprocess.Popen([sys.executable, "-c", code, "--stage", "ragged",
                                       "--timeout", timeout],
                                      cwd=ROOT, env=environment, text=True,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    try:
        _, said = ranks[0].communicate(timeout=600)
        assert ranks[0].returncode == 1, said
        lines = [line for line in said.splitlines() if line.startswith(NAME)]
        assert len(lines) == 1 and "Traceback" not in said
        assert "rank 0: an all-reduce failed; another rank has stopped or hangs" in lines[0]
    finally:
        for process in ranks:
            process.send_signal(signal.SIGKILL)
            process.communicate()
