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
if __spec__ is None:
    raise SystemExit("start it in the folder above: "
                     "torchrun --nproc_per_node 2 -m beyond.tensor_parallel")

import time

import torch
import torch.distributed as dist
import torch.nn as nn

from cache import KV
from generate_ragged import Flat
from request import Request, prepare
from toolbox.validate import check
from toolbox.weights import Uninitialised


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
    with torch.device("meta"), Uninitialised():   # its weights are replaced at once
        part = nn.Linear(linear.in_features, linear.out_features // ranks)
    for name in "weight", "bias":
        whole = getattr(linear, name)
        if whole is None:   # a Llama has no bias
            setattr(part, name, None)
        else:
            rows = whole.chunk(ranks)[rank].clone()
            setattr(part, name, nn.Parameter(rows, requires_grad=False))
    return part


def shard(model):
    """
    Reduces a GPT or Llama, in place, to this rank's share of the weights. All ranks must hold the
    same model. Returns the model; `model.traffic` counts its communication. ValueError if the heads
    or the FFN features cannot be divided evenly.
    """
    check("model", model, lambda model: model.config and model.h, "a GPT or Llama")
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    config = model.config
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
        self.all_reduces = 0
        self.bytes = 0
        self.seconds = 0.0

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
    sizes = [tokens // number] * number
    for i in range(tokens % number):   # the rest, one each
        sizes[i] += 1
    requests = prepare([Request([0] * size) for size in sizes], model.config)
    for request in requests:
        request.kv = KV(request.kv_capacity)
    batch = Flat([(request, len(request.prompt)) for request in requests], model.device)
    before = model.traffic.all_reduces
    model(batch.tokens, batch.positions, batch.attend, batch.wanted)
    return model.traffic.all_reduces - before


if __name__ == "__main__":
    from lab.ranks import main
    main(__doc__)
