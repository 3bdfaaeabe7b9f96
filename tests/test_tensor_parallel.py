"""
Gloo ranks on the CPU: every stage gives what a single process gives alone, and a rank that fails
stops the others.
"""
import copy
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import EVEN, RIGHT, ROOT, assert_contract, captured, mixed, refused, toy

from beyond.tensor_parallel import shard
from generate_ragged import generate
from lab import ranks as program
from lab.compiled import optimize

NAME = "python -m beyond.tensor_parallel: "
METHOD = "fork" if hasattr(os, "fork") else "spawn"   # a fork need not import torch once more


def assert_right(ranks, work):
    """`work()`, a function at the top of a module, is right on so many ranks of a process group."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(one_rank, (ranks, f"file://{folder}/store", work), ranks,
                           start_method=METHOD)


def one_rank(rank, ranks, store, work):
    dist.init_process_group("gloo", store, rank=rank, world_size=ranks)
    work()
    dist.destroy_process_group()


# --- shares (the contract of each stage, and more that is refused: test_contract.py) --------------

def each_has_an_equal_share():
    with pytest.raises(ValueError, match="ranks: n_head 3 is not a multiple"):
        shard(toy(n_head=3, n_embd=15))
    with pytest.raises(ValueError, match="model must be a GPT or Llama, not None"):
        shard(None)
    whole = toy(dtype=torch.float32, **EVEN)
    model, share = shard(copy.deepcopy(whole)), 16 // dist.get_world_size()
    for block in model.h:
        for part, shape in ((block.attn.key, (share, 16)), (block.attn.c_proj, (16, share)),
                            (block.mlp.c_fc, (4 * share, 16)), (block.mlp.c_proj, (16, 4 * share))):
            assert part.weight.shape == shape
    for fast in optimize(model), shard(optimize(copy.deepcopy(whole))):   # in either order
        assert_contract(fast, generate, mixed(), whole=whole, tolerance=1e-4)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_each_rank_has_an_equal_share_and_optimize_works(ranks):
    assert_right(ranks, each_has_an_equal_share)


# --- the command ----------------------------------------------------------------------------------

def script(folder, *flags, before=None):
    """
    The command on two ranks, as torchrun starts them. Returns [(exit status, stdout, stderr), ...].
    before: what each calls first
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = mp.start_processes(one_of_the_command, (port, folder, flags, before), 2, join=False,
                               start_method=METHOD).processes
    for rank in ranks:
        rank.join(1200)
    return [(rank.exitcode, *(Path(folder, f"{i}.{fd}").read_text() for fd in (1, 2)))
            for i, rank in enumerate(ranks)]


def one_of_the_command(rank, port, folder, flags, before):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(port))
    for fd in 1, 2:
        os.dup2(os.open(f"{folder}/{rank}.{fd}", os.O_CREAT | os.O_WRONLY), fd)
    sys.stdout, sys.stderr = open(1, "w"), open(2, "w")
    if before:
        before()
    program.main("", flags)


@pytest.mark.thorough
def test_torchrun_starts_it():
    done = subprocess.run(
        [sys.executable, *"-m torch.distributed.run --nproc_per_node 2 -m".split(),
         "beyond.tensor_parallel", "--quiet"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and f"12/12 {RIGHT}" in done.stdout


def test_the_script(tmp_path):
    flags = "--stage prefix --pages 13 --policy sjf --max_new_tokens 6"
    (status, out, _), (other, said, _) = script(tmp_path, *flags.split())
    assert status == other == 0 and f"12/12 {RIGHT}" in out
    assert out.count("--- r0:") == 1 and said == ""   # rank 0 speaks
    assert "stage: prefix" in out and "ignored" not in out
    passes = int(re.search(r"forward passes +(\d+)", out)[1])
    assert f"2 ranks (gloo), 4 layers; rank 0 in this run: {8 * passes:,} all-reduces" in out


@pytest.mark.parametrize("flags, said", [
    ("--temperature -1", "--temperature must be"), ("--device mps", "--device mps: .. use cpu"),
    ("--page x.html", "--page shows a run on one device"), ("--max_bat 3", "--max_bat 3")])
def test_one_clear_line_from_rank_0(flags, said, monkeypatch):
    for owner, name, new in ((dist, "init_process_group", lambda *_, **settings: None),
                             (os, "_exit", sys.exit), (sys, "stdout", sys.stdout),
                             (program.time, "sleep", lambda seconds: None)):
        monkeypatch.setattr(owner, name, new)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    refused(f"{NAME}.. {said}", program.main, "", flags.split())
    monkeypatch.setenv("RANK", "1")
    assert captured(program.main, "", flags.split()) == (2, "", "")


def loses_rank_1(all_reduce=dist.all_reduce, calls=[]):
    def lost(tensor):
        calls.append(1)
        if len(calls) == 100 and dist.get_rank() == 1:
            os._exit(9)
        return all_reduce(tensor)

    dist.all_reduce = lost


def test_a_rank_that_is_lost_stops_the_others_with_one_line(tmp_path):
    (status, _, said), (lost, *_) = script(tmp_path, before=loses_rank_1)
    lines = [line for line in said.splitlines() if line.startswith(NAME)]
    assert (status, lost) == (1, 9) and len(lines) == 1 and "Traceback" not in said, said
    assert "rank 0: an all-reduce failed; another rank has stopped or hangs" in lines[0]
