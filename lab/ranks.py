"""The command of beyond/tensor_parallel.py: a stage on several ranks, each started by torchrun."""
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from beyond.tensor_parallel import shard
from lab import flags
from lab.loading.stages import SCRIPTS
from lab.run import parser, run_stage


def main(doc, argv=None):
    """
    Runs a stage on all ranks, prints what was sent, and exits with the status. Only rank 0 prints.
    Without torchrun, or with a wrong flag, it exits with 2. doc: its help's first paragraph
    """
    p = parser(doc)
    p.prog = "python -m beyond.tensor_parallel"
    p.add_argument("--stage", choices=SCRIPTS, default="ragged", help="the way of batching to run")
    rank = int(os.environ.get("RANK", 0))
    if rank:
        sys.stdout = open(os.devnull, "w")
        p.error = lambda message: sys.exit(2)
    args = p.parse_args(argv)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        p.error("it runs under torchrun, which starts the ranks: "
                "torchrun --nproc_per_node 2 -m beyond.tensor_parallel")
    if args.page:   # recording repeats the run, for which all ranks must stay
        p.error("--page shows a run on one device: use it with the stage's own script")
    if rank:   # rank 0 alone prints, checks, writes and draws
        args.quiet, args.no_check, args.trace, args.plot = True, True, None, None
    status = flags.guarded(p.prog, lambda: run_in_group(args), speaks=not rank)
    if rank and status:   # torchrun stops all when the first ends: rank 0, which speaks
        time.sleep(1)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: gloo's threads may outlive Python, and one that then needs the GIL aborts the
    # rank. And where a rank is lost, leaving the process group may never return.
    os._exit(status)


def run_in_group(args):
    """
    Joins the other ranks, runs the stage with a sharded model, and prints what was sent. Returns
    the exit status. ValueError if the ranks cannot join.
    """
    device = flags.device_of(args, args.model == "builtin")
    args.device = device.type   # what was chosen before the model is known
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    elif device.type == "mps":
        raise ValueError("--device mps: torch.distributed has no backend for an Apple GPU; "
                         "use cpu or cuda")
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo",
                                timeout=timedelta(seconds=60))   # then a rank counts as lost
    except (RuntimeError, ValueError) as error:
        raise ValueError("the ranks did not find each other: "
                         f"{str(error).splitlines()[0]:.150}") from None
    model = None

    def sharded(whole):
        nonlocal model
        model = shard(whole)
        return model

    status = run_stage(SCRIPTS[args.stage], args, sharded)
    sent = model.traffic
    print(f"{dist.get_world_size()} ranks ({dist.get_backend()}), {model.config.n_layer} layers; "
          f"rank 0 in this run: {sent.all_reduces:,} all-reduces, two for each layer of a pass, "
          f"{sent.bytes / 1e6:,.1f} MB"
          + (f", {sent.seconds:.2f} s" if device.type == "cpu" else ""))
    dist.destroy_process_group()
    return status
