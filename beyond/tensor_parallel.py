"""
Beyond one device: tensor parallelism. Each rank (a process with a device) holds part of each block.

Batching does not change. Two all-reduces (sums over all ranks) a layer: N changes only their size.

    x (N, C), the same on every rank
      |                                column-parallel: a rank computes some output features.
    query, key, value  C -> C/ranks    These are whole heads; their keys and values stay here
      |
    attend                             the layout's, unchanged: it sees nh/ranks heads
      |
    c_proj             C/ranks -> C    row-parallel: a rank has some of the input features,
      |                                so its output is one summand: all-reduce, (N, C)
    c_fc               C -> 4C/ranks   column-parallel
      |
    c_proj             4C/ranks -> C   row-parallel: all-reduce, (N, C)

Embeddings and vocabulary projection are replicated. Every rank runs the same Scheduler and draws
the same random numbers, so no decision has to be sent. model.py knows nothing of all this.

    torchrun --nproc_per_node 2 -m beyond.tensor_parallel --stage ragged
"""
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn

from generate_ragged import Flat
from loading.stages import SCRIPTS
from request import Request, prepare
from toolbox import flags


class RowParallel(nn.Module):
    """y = x W^T + b for x (..., in/ranks): this rank's input features and its columns of W."""

    def __init__(self, linear, rank, ranks, traffic):
        super().__init__()
        columns = linear.weight.chunk(ranks, dim=1)[rank].clone()      # (out, in/ranks)
        self.weight = nn.Parameter(columns, requires_grad=False)
        self.bias = linear.bias                                        # whole: added after the sum
        self.traffic = traffic

    def forward(self, x):
        y = nn.functional.linear(x, self.weight)                       # (..., out), one summand
        self.traffic.all_reduce(y)                                     # the only communication
        return y if self.bias is None else y + self.bias


def column_parallel(linear, rank, ranks):
    """A Linear with this rank's rows of the weight, (out/ranks, in): some output features."""
    # "meta": without memory for the random weights, which are replaced at once
    part = nn.Linear(linear.in_features, linear.out_features // ranks, device="meta")
    for name in "weight", "bias":
        whole = getattr(linear, name)   # a Llama has no bias
        mine = None if whole is None else nn.Parameter(whole.chunk(ranks)[rank].clone(), False)
        setattr(part, name, mine)
    return part


def shard(model):
    """
    Reduces a GPT or Llama, in place, to this rank's share of the weights. All ranks must hold the
    same model. Returns the model; `model.traffic` counts its communication. ValueError if the heads
    or the FFN features cannot be divided evenly.
    """
    rank, ranks, config = dist.get_rank(), dist.get_world_size(), model.config
    kv_heads = getattr(config, "n_kv_head", config.n_head)
    ffn = model.h[0].mlp.c_proj.in_features
    for what, size in ("n_head", config.n_head), ("n_kv_head", kv_heads), ("FFN width", ffn):
        if size % ranks:
            raise ValueError(f"{ranks} ranks: {what} {size} is not a multiple "
                             f"of {ranks}, and each rank must get an equal share")
    model.traffic = Traffic()
    for block in model.h:
        for part in block.attn, block.mlp:
            for name, linear in part.named_children():   # norms of q and k are per head
                if name == "c_proj":
                    part.c_proj = RowParallel(linear, rank, ranks, model.traffic)
                elif isinstance(linear, nn.Linear):
                    setattr(part, name, column_parallel(linear, rank, ranks))
    return model


# --- what is sent -------------------------------------------------------------------------------

class Traffic:
    """All-reduces of a run, their tensors' bytes, and (on a CPU) the seconds spent in them."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.all_reduces, self.bytes, self.seconds = 0, 0, 0.0

    def all_reduce(self, tensor):
        """Sums a tensor over all ranks, in place. ConnectionError if one of them is lost."""
        if dist.get_world_size() == 1:
            return
        start = time.perf_counter()
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise ConnectionError(f"rank {dist.get_rank()}: an all-reduce failed; "
                                  f"another rank has stopped or hangs ({reason:.120})") from None
        self.all_reduces += 1
        self.bytes += tensor.nbytes
        self.seconds += time.perf_counter() - start


@torch.inference_mode()
def all_reduces(model, tokens, number):
    """How many a forward pass makes, over `tokens` tokens of so many requests."""
    sizes = [tokens // number + (i < tokens % number) for i in range(number)]
    requests = prepare([Request([0] * size) for size in sizes], model.config)
    batch = Flat([(request, len(request.prompt)) for request in requests], model.device)
    before = model.traffic.all_reduces
    model(batch.tokens, batch.positions, batch.attend, batch.wanted)
    return model.traffic.all_reduces - before


# --- the command, which torchrun starts once per rank ---------------------------------------------

def main(command_line, argv=None):
    """
    Runs a stage on all ranks, prints what was sent, and exits with the status. Only rank 0 prints.
    Without torchrun, or with a wrong flag, it exits with 2. command_line: the module
    """
    p = command_line.parser(__doc__)
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
    status = flags.guarded(p.prog, lambda: run_in_group(command_line, args), speaks=not rank)
    if rank and status:   # torchrun stops all when the first ends: rank 0, which speaks
        time.sleep(1)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: gloo's threads may outlive Python, and one that then needs the GIL aborts the
    # rank. And where a rank is lost, leaving the process group may never return.
    os._exit(status)


def run_in_group(command_line, args):
    """Joins the other ranks, runs the stage and leaves. ValueError if the ranks cannot join."""
    device = flags.device_of(args)
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
    status = run_sharded(command_line, args)
    dist.destroy_process_group()
    return status


def run_sharded(command_line, args):
    """Runs the stage with a sharded model, and prints what was sent. Returns the exit status."""
    model = counts = None

    def shard_and_count(whole):   # before the run: after it, rank 0 checks while the others leave
        nonlocal model, counts
        model = shard(whole)
        size = min(model.config.block_size, 256)   # Llama's contexts are long
        counts = ", ".join(f"{all_reduces(model, tokens, number)} for {tokens:,} tokens of "
                           f"{number} request{'s' * (number > 1)}"
                           for tokens, number in ((10, 1), (size, 1), (10, 5), (20 * size, 50)))
        model.traffic.reset()
        return model

    status = command_line.run_stage(SCRIPTS[args.stage], args, shard=shard_and_count)
    sent = model.traffic
    print(f"{dist.get_world_size()} ranks ({dist.get_backend()}), {model.config.n_layer} layers, "
          f"all-reduces of a forward pass: {counts}\n"
          f"rank 0 in this run: {sent.all_reduces:,} all-reduces, {sent.bytes / 1e6:,.1f} MB"
          + (f", {sent.seconds:.2f} s" if model.device.type == "cpu" else ""))
    return status


if __name__ == "__main__":
    import command_line
    main(command_line)
