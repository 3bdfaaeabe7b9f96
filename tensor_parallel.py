"""
Beyond one device: tensor parallelism. Each rank holds part of each block; batching does not change.

Two all-reduces per layer: the number of tokens N changes their size, not their number (claim R5).

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

    torchrun --nproc_per_node 2 tensor_parallel.py --stage ragged
    torchrun --nproc_per_node 2 -m experiments.ranks          measures what the all-reduces cost
"""
import time
from dataclasses import dataclass

import torch.distributed as dist
import torch.nn as nn


@dataclass
class Traffic:
    """Counts a rank's all-reduces."""
    all_reduces: int = 0
    bytes: int = 0          # of the tensors that were summed
    seconds: float = 0.0    # on a GPU only the time to launch them, unless `clock` synchronizes
    clock = staticmethod(time.perf_counter)

    def reset(self):
        self.all_reduces, self.bytes, self.seconds = 0, 0, 0.0


class RowParallel(nn.Module):
    """y = x W^T + b for x (..., in/ranks): this rank's input features and its columns of W."""

    def __init__(self, linear, rank, ranks, group, traffic):
        super().__init__()
        columns = linear.weight.chunk(ranks, dim=1)[rank].clone()      # (out, in/ranks)
        self.weight = nn.Parameter(columns, requires_grad=False)
        self.bias = linear.bias                                        # whole: added after the sum
        self.group, self.traffic = group, traffic

    def forward(self, x):
        y = nn.functional.linear(x, self.weight)                       # (..., out), one summand
        if dist.get_world_size(self.group) == 1:
            return y + self.bias
        start = self.traffic.clock()
        try:
            dist.all_reduce(y, group=self.group)                       # the only communication
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise ConnectionError(f"rank {dist.get_rank()}: an all-reduce failed; "
                                  f"another rank has stopped or hangs ({reason:.120})") from None
        self.traffic.all_reduces += 1
        self.traffic.bytes += y.nbytes
        self.traffic.seconds += self.traffic.clock() - start
        return y + self.bias


def column_parallel(linear, rank, ranks):
    """A Linear with this rank's rows of the weight, (out/ranks, in): some output features."""
    part = nn.Linear(linear.in_features, linear.out_features // ranks, device="meta")
    part.weight = nn.Parameter(linear.weight.chunk(ranks)[rank].clone(), requires_grad=False)
    part.bias = nn.Parameter(linear.bias.chunk(ranks)[rank].clone(), requires_grad=False)
    return part


def shard(model, group=None):
    """
    Reduces a GPT, in place, to this rank's share of the weights. All ranks of `group` (None: every
    rank) must hold the same model. Returns the model; `model.traffic` counts its communication.
    ValueError if the heads or the FFN features cannot be divided evenly.
    """
    rank, ranks, config = dist.get_rank(group), dist.get_world_size(group), model.config
    for what, size in ("n_head", config.n_head), ("FFN width", 4 * config.n_embd):
        if size % ranks:
            raise ValueError(f"{ranks} ranks: {what} {size} is not a multiple "
                             f"of {ranks}, and each rank must get an equal share")
    model.traffic = Traffic()
    for block in model.h:
        attn, mlp = block.attn, block.mlp
        attn.query = column_parallel(attn.query, rank, ranks)
        attn.key = column_parallel(attn.key, rank, ranks)
        attn.value = column_parallel(attn.value, rank, ranks)
        attn.c_proj = RowParallel(attn.c_proj, rank, ranks, group, model.traffic)
        mlp.c_fc = column_parallel(mlp.c_fc, rank, ranks)
        mlp.c_proj = RowParallel(mlp.c_proj, rank, ranks, group, model.traffic)
    return model


# --- the command ----------------------------------------------------------------------------------

def run_sharded(args):
    """Runs a stage on the sharded model and prints what was sent. Returns the exit status."""
    from experiments.ranks import count_examples
    from toolbox import cli
    from toolbox.stages import SCRIPTS
    sharded = counts = None

    def shard_and_count(model):   # before the run: after it, rank 0 checks while the others leave
        nonlocal sharded, counts
        sharded = shard(model)
        counts = count_examples(sharded)
        sharded.traffic.reset()
        return sharded

    status = cli.run_stage(SCRIPTS[args.stage], args, shard=shard_and_count)
    sent = sharded.traffic
    print(f"{dist.get_world_size()} ranks ({dist.get_backend()}), {sharded.config.n_layer} layers, "
          f"all-reduces of a forward pass: {counts}\n"
          f"rank 0 in this run: {sent.all_reduces:,} all-reduces, {sent.bytes / 1e6:,.1f} MB"
          + (f", {sent.seconds:.2f} s" if sharded.device.type == "cpu" else ""))
    return status


def main(argv=None):
    from toolbox import cli, torchrun
    from toolbox.stages import SCRIPTS
    p = cli.parser(__doc__)
    p.add_argument("--stage", choices=SCRIPTS, default="ragged", help="the way of batching to run")
    torchrun.run_on_ranks(p, run_sharded, argv)


if __name__ == "__main__":
    main()
