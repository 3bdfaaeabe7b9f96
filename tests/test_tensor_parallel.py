"""
Gloo ranks on the CPU: every stage gives what a single process gives alone, and a rank that fails
stops the others.
"""
import contextlib
import copy
import io
import multiprocessing
import os
import signal
import socket

import pytest
import torch
import torch.distributed as dist
from common import STAGES, assert_contract, mixed, toy

import command_line
from beyond import tensor_parallel
from beyond.tensor_parallel import shard

EVEN = dict(n_head=4, n_embd=16)
NAME = "python -m beyond.tensor_parallel: "


# --- ranks: processes that have already imported everything ---------------------------------------

# A fork does not import torch once more. Windows has none.
FORK = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")


def on_ranks(number, work, *arguments, heard=None):
    """
    Calls `work(*arguments)`, a function at the top of a module, on so many ranks, each a process
    with the environment that torchrun gives it. Returns [(exit status, stdout, stderr), ...] of the
    first `heard`: those after it may never end.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    pipes = [FORK.Pipe(duplex=False) for _ in range(number)]
    processes = [FORK.Process(target=one_rank, args=(far, rank, number, port, work, arguments))
                 for rank, (_, far) in enumerate(pipes)]
    for process, (_, far) in zip(processes, pipes):
        process.start()
        far.close()
    try:
        for rank, (near, _) in enumerate(pipes[:heard]):
            assert near.poll(1200), f"rank {rank} has said nothing for 20 minutes"
        return [near.recv() for near, _ in pipes[:heard]]
    finally:
        for process in processes:
            process.kill()
            process.join()


def one_rank(pipe, rank, number, port, work, arguments):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(number),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    out, err, status = io.StringIO(), io.StringIO(), 0

    def leave(status):   # instead of os._exit, which would not tell what was said
        pipe.send((status, out.getvalue(), err.getvalue()))
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))

    os._exit = leave
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            work(*arguments)
        except SystemExit as stop:
            status = stop.code
        except BaseException as error:
            status = repr(error)
    leave(status)


def in_group(work, *arguments):
    dist.init_process_group("gloo")
    work(*arguments)
    dist.destroy_process_group()


def assert_right(number, work):
    """`work()` is right on so many ranks, which form a process group."""
    assert [status for status, *_ in on_ranks(number, in_group, work)] == [0] * number


# --- the contract (with any workload and pressure: test_contract.py) ------------------------------

def every_stage_is_right():
    whole = toy(**EVEN)
    model = shard(copy.deepcopy(whole))
    for generate in STAGES.values():
        assert_contract(model, generate, mixed(), whole=whole)
    share = 16 // dist.get_world_size()
    for block in model.h:
        for part, shape in ((block.attn.key, (share, 16)), (block.attn.c_proj, (16, share)),
                            (block.mlp.c_fc, (4 * share, 16)), (block.mlp.c_proj, (16, 4 * share))):
            assert part.weight.shape == shape


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_every_stage_gives_what_one_process_gives_alone(ranks):
    assert_right(ranks, every_stage_is_right)


def uneven_is_refused_and_optimize_works():
    for heads, config in (3, dict(n_head=3, n_embd=15)), (1, dict(n_head=1, n_embd=5)):
        with pytest.raises(ValueError, match=f"2 ranks: n_head {heads} is not a multiple"):
            shard(toy(**config))
    whole = toy(dtype=torch.float32, **EVEN)
    for model in shard(copy.deepcopy(whole)).optimize(), shard(copy.deepcopy(whole).optimize()):
        assert_contract(model, STAGES["ragged_varlen"], mixed(), whole=whole, tolerance=1e-4)


def test_uneven_heads_are_refused_and_optimize_works_in_either_order():
    assert_right(2, uneven_is_refused_and_optimize_works)


# --- the commands ---------------------------------------------------------------------------------

def script(*flags):
    tensor_parallel.main(command_line, flags)


def test_the_script():   # under torchrun: in notebook 6
    flags = "--stage paged --pages 13 --policy sjf --max_new_tokens 12"
    (status, out, _), (other, said, _) = on_ranks(2, script, *flags.split())
    assert status == other == 0 and "12/12 requests identical to unbatched" in out
    assert out.count("--- r0:") == 1 and said == ""   # rank 0 speaks
    for words in ("2 ranks (gloo), 4 layers", "8 for 10 tokens of 1 request",
                  "8 for 5,120 tokens of 50 requests", "rank 0 in this run: "):
        assert words in out


def without_torchrun():
    del os.environ["RANK"]
    script()


@pytest.mark.parametrize("ranks, work, flags, said", [
    (2, script, ["--temperature", "-1"], "--temperature must be"),
    (2, script, ["--page", "x.html"], "--page shows a run on one device"),
    (1, without_torchrun, [], "torchrun --nproc_per_node 2 -m beyond.tensor_parallel")])
def test_bad_input_gets_one_line_from_rank_0(ranks, work, flags, said):
    (_, _, error), *others = results = on_ranks(ranks, work, *flags)
    assert error.startswith(NAME) and said in error and error.count("\n") == 1
    assert all(status == 2 for status, *_ in results) and all(said == "" for *_, said in others)


def loses_a_rank():
    """Rank 1 is killed in its 100th all-reduce."""
    all_reduce_of_torch, calls = dist.all_reduce, []

    def all_reduce(tensor):
        calls.append(1)
        if len(calls) == 100 and dist.get_rank() == 1:
            os._exit(9)
        return all_reduce_of_torch(tensor)

    dist.all_reduce = all_reduce
    script()


def test_a_rank_that_is_lost_stops_the_others_with_one_line():
    status, _, said = on_ranks(2, loses_a_rank, heard=1)[0]
    lines = [line for line in said.splitlines() if line.startswith(NAME)]
    assert status == 1 and len(lines) == 1 and "Traceback" not in said, said
    assert "rank 0: an all-reduce failed; another rank has stopped or hangs" in lines[0]
