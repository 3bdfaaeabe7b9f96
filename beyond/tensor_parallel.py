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

(Claim R5.)
"""
import torch.distributed as dist
import torch.nn as nn

from toolbox.traffic import Traffic


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


def shard(model, group=None):
    """
    Reduces a GPT or Llama, in place, to this rank's share of the weights. All ranks of `group`
    (None: every rank) must hold the same model. Returns the model; `model.traffic` counts its
    communication. ValueError if the heads or the FFN features cannot be divided evenly.
    """
    rank, ranks, config = dist.get_rank(group), dist.get_world_size(group), model.config
    kv_heads = getattr(config, "n_kv_head", config.n_head)
    ffn = model.h[0].mlp.c_proj.in_features
    for what, size in ("n_head", config.n_head), ("n_kv_head", kv_heads), ("FFN width", ffn):
        if size % ranks:
            raise ValueError(f"{ranks} ranks: {what} {size} is not a multiple "
                             f"of {ranks}, and each rank must get an equal share")
    model.traffic = Traffic(group)
    for block in model.h:
        for part in block.attn, block.mlp:
            for name, linear in part.named_children():   # norms of q and k are per head
                if name == "c_proj":
                    part.c_proj = RowParallel(linear, rank, ranks, model.traffic)
                elif isinstance(linear, nn.Linear):
                    setattr(part, name, column_parallel(linear, rank, ranks))
    return model


if __name__ == "__main__":
    from toolbox.torchrun import main
    main(shard, __doc__)
