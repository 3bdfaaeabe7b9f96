"""
Runs a command that torchrun starts once per rank: flags, process group, errors, exit status.
"""
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

# Imported before init_process_group, and not lazily by torch after it: default arguments in this
# module (`group=group.WORLD`) would keep the process group alive beyond destroy_process_group, and
# with it gloo's threads. A thread that releases its last tensor while Python exits cannot take the
# GIL; Python ends it, and the rank aborts: "terminate called without an active exception".
import torch.distributed.nn

import command_line
from loading.stages import SCRIPTS
from toolbox import flags
from toolbox.traffic import count_examples


def run_on_ranks(p, command, argv=None):
    """
    Parses the flags with `p`, runs `command(args)` on every rank, and exits with the status that it
    returns. Only rank 0 prints. Without torchrun, or with a wrong flag, it exits with 2.
    """
    p.add_argument("--timeout", type=float, default=60.0, metavar="S",
                   help="seconds after which a rank that does not answer counts as lost")
    rank = int(os.environ.get("RANK", 0))
    if rank:
        sys.stdout = open(os.devnull, "w")
        p.error = lambda message: sys.exit(2)
    args = p.parse_args(argv)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        p.error("it runs under torchrun, which starts the ranks: "
                f"torchrun --nproc_per_node 2 {p.prog.removeprefix('python ')}")
    if not args.timeout > 0:
        p.error(f"--timeout must be above 0 seconds, not {args.timeout}")
    if getattr(args, "page", None):   # recording repeats the run, for which all ranks must stay
        p.error("--page shows a run on one device: use it with the stage's own script")
    if rank:   # rank 0 alone prints, checks, writes and draws
        args.quiet, args.no_check, args.trace, args.plot, args.json = True, True, None, None, None
    sys.exit(flags.guarded(p.prog, lambda: run_in_group(p.prog, command, args), speaks=not rank))


def run_in_group(prog, command, args):
    """Joins the other ranks, runs the command and leaves. ValueError if the ranks cannot join."""
    device = flags.device_of(args)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    elif device.type == "mps":
        raise ValueError("--device mps: torch.distributed has no backend for an Apple GPU; "
                         "use cpu or cuda")
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo",
                                timeout=timedelta(seconds=args.timeout))
    except (RuntimeError, ValueError) as error:
        raise ValueError("the ranks did not find each other: "
                         f"{str(error).splitlines()[0]:.150}") from None
    try:
        return command(args)
    except ConnectionError as error:
        print(f"{prog}: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)   # there is no result, and destroying a broken process group may never return
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def main(shard, doc, argv=None):
    """The command of beyond/tensor_parallel.py: runs a stage, and prints what was sent."""
    p = command_line.parser(doc)
    p.prog = "python -m beyond.tensor_parallel"
    p.add_argument("--stage", choices=SCRIPTS, default="ragged", help="the way of batching to run")
    run_on_ranks(p, lambda args: run_sharded(shard, args), argv)


def run_sharded(shard, args):
    models, counts = [], []

    def shard_and_count(model):   # before the run: after it, rank 0 checks while the others leave
        models.append(shard(model))
        counts.append(count_examples(model))
        model.traffic.reset()
        return model

    status = command_line.run_stage(SCRIPTS[args.stage], args, shard=shard_and_count)
    model, = models
    sent = model.traffic
    print(f"{dist.get_world_size()} ranks ({dist.get_backend()}), {model.config.n_layer} layers, "
          f"all-reduces of a forward pass: {counts[0]}\n"
          f"rank 0 in this run: {sent.all_reduces:,} all-reduces, {sent.bytes / 1e6:,.1f} MB"
          + (f", {sent.seconds:.2f} s" if model.device.type == "cpu" else ""))
    return status
