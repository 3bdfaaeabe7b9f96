"""
Way out: tensor parallelism. Each rank holds a part of every weight matrix; the batching does not change.

    x (N, C), the same on every rank
      |                                   column-parallel: a rank computes some of the output features,
    query, key, value   C -> C/ranks      which are whole heads, so its attention and its K/V cache are its own
      |
    attend                                the layout's, untouched: it sees nh/ranks heads, and no other rank
      |
    c_proj              C/ranks -> C      row-parallel: a rank has some of the input features, so its output
      |                                   is one of `ranks` summands:   all-reduce, (N, C)
    c_fc                C -> 4C/ranks     column-parallel
    c_proj              4C/ranks -> C     row-parallel:                 all-reduce, (N, C)

Two all-reduces a layer, whatever is in the batch: N appears in their size, never in their number (claim R5). Embeddings and vocabulary
projection are replicated, so they cost none. Every rank runs the same Scheduler on the same requests and samples from the same logits
with the same random streams, so all make the same decisions and none has to be sent.

model.py does not know of any of this: the sharding is done to a model from outside.

    torchrun --nproc_per_node 2 tensor_parallel.py --stage ragged
    torchrun --nproc_per_node 2 tensor_parallel.py --table
"""
import copy
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class Traffic:
    """What a rank has sent and waited for."""
    all_reduces: int = 0
    bytes: int = 0          # of the tensors that were summed
    seconds: float = 0.0

    def reset(self):
        self.all_reduces, self.bytes, self.seconds = 0, 0, 0.0


class RowParallel(nn.Module):
    """y = x W^T + b where this rank holds some columns of W, and x (..., in/ranks) are the features that belong to them."""

    def __init__(self, linear, rank, ranks, group, traffic):
        super().__init__()
        self.weight = nn.Parameter(linear.weight.chunk(ranks, dim=1)[rank].clone(), requires_grad=False)   # (out, in/ranks)
        self.bias = linear.bias                                             # whole: it is added once, behind the sum
        self.group, self.traffic = group, traffic

    def forward(self, x):
        y = F.linear(x, self.weight)                                        # (..., out), one summand
        if dist.get_world_size(self.group) == 1:
            return y + self.bias
        start = time.perf_counter()
        try:
            dist.all_reduce(y, group=self.group)                            # the only communication there is
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise ConnectionError(f"rank {dist.get_rank()}: an all-reduce failed, another rank has stopped or hangs ({reason:.120})") from None
        self.traffic.all_reduces += 1
        self.traffic.bytes += y.nbytes
        self.traffic.seconds += time.perf_counter() - start                 # on a GPU the time to launch it, not to run it
        return y + self.bias


def column_parallel(linear, rank, ranks):
    """A Linear with this rank's rows of the weight (out/ranks, in): some of the output features."""
    part = nn.Linear(linear.in_features, linear.out_features // ranks, device="meta")
    part.weight = nn.Parameter(linear.weight.chunk(ranks)[rank].clone(), requires_grad=False)
    part.bias = nn.Parameter(linear.bias.chunk(ranks)[rank].clone(), requires_grad=False)
    return part


def shard(model, group=None):
    """
    Leaves this rank's share of a GPT's weights in place, out of the ranks of a process group (None: all). Every rank must hold the same model.
    Returns the model; `model.traffic` counts its communication. ValueError if heads or FFN features cannot be divided evenly.
    """
    rank, ranks, config = dist.get_rank(group), dist.get_world_size(group), model.config
    for what, size in ("n_head", config.n_head), ("FFN width", 4 * config.n_embd):
        if size % ranks:
            raise ValueError(f"{ranks} ranks: {what} {size} is not a multiple of them, each must get an equal share")
    model.traffic = Traffic()
    for block in model.h:
        attn, mlp = block.attn, block.mlp
        attn.query, attn.key, attn.value = (column_parallel(part, rank, ranks) for part in (attn.query, attn.key, attn.value))
        mlp.c_fc = column_parallel(mlp.c_fc, rank, ranks)
        attn.c_proj, mlp.c_proj = (RowParallel(part, rank, ranks, group, model.traffic) for part in (attn.c_proj, mlp.c_proj))
    return model


# --- measuring ------------------------------------------------------------------------------------------------------------

class Collectives(TorchDispatchMode):
    """Counts the operations that reach torch.distributed, whoever calls them."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def count_collectives(model, tokens, requests):
    """{operation: times} of one forward pass over so many tokens of so many requests."""
    from cache import Flat
    from scheduler import Request, prepare
    sizes = [tokens // requests + (i < tokens % requests) for i in range(requests)]
    prompts = prepare([Request([i % model.config.vocab_size for i in range(n)], name=f"r{j}") for j, n in enumerate(sizes)], model.config)
    batch = Flat([(request, len(request.prompt)) for request in prompts], model.device)
    with torch.inference_mode(), Collectives() as counter:
        model(batch.tokens, batch.positions, batch.attend, batch.rows)
    return counter.counts


@torch.inference_mode()
def forward_seconds(model, tokens, repeats=9):
    """(seconds, seconds of them in all-reduces, all-reduces, bytes) of one pass over so many tokens that attend to themselves alone; medians."""
    ids, taken = torch.zeros(tokens, dtype=torch.long, device=model.device), []
    for _ in range(repeats + 2):
        before, start = copy.copy(model.traffic), time.perf_counter()
        model(ids, ids, attend=lambda layer, q, k, v: v, rows=torch.tensor([0], device=model.device)).sum().item()   # .item() waits for the device
        now = model.traffic
        taken.append((time.perf_counter() - start, now.seconds - before.seconds, now.all_reduces - before.all_reduces, now.bytes - before.bytes))
    return sorted(taken[2:])[repeats // 2]


def fit(points):
    """latency, bandwidth of  seconds = count x latency + bytes / bandwidth,  least squares of relative errors; points (count, bytes, seconds)."""
    count, size, seconds = torch.tensor(points, dtype=torch.float64).T
    parts = torch.stack([count / seconds, size / seconds], dim=1)
    latency, per_byte = torch.linalg.lstsq(parts, torch.ones(len(points), 1, dtype=torch.float64)).solution.flatten().tolist()
    return max(latency, 0.0), 1 / max(per_byte, 1e-15)


def table(config, device, dtype):
    """Times 1, 2, 4, ... ranks on the same random weights, prints the table and the cost model on rank 0."""
    from model import GPT
    world, sizes = dist.get_world_size(), (1, 8, 64, 512)
    print(f"{config.n_layer} layers, {config.n_embd} wide, {str(dtype).removeprefix('torch.')} on {device}, {torch.get_num_threads()} thread(s) a rank, torch {torch.__version__}")
    print("ranks  tokens  ms a pass  ms in all-reduces  share  all-reduces        MB")
    points = []
    for ranks in (n for n in (1, 2, 4, 8) if n <= world):
        group = dist.new_group(range(ranks))
        if dist.get_rank() < ranks:
            torch.manual_seed(0)
            model = shard(GPT(config).to(device, dtype).requires_grad_(False), group)
            for tokens in sizes:
                seconds, waiting, count, size = forward_seconds(model, tokens)
                print(f"{ranks:5}  {tokens:6}  {seconds * 1e3:9.2f}  {waiting * 1e3:17.2f}  {waiting / seconds:5.0%}  {count:11}  {size / 1e6:8.2f}")
                if ranks == world > 1:
                    points.append((count, size, waiting))
        dist.barrier()
    if not points:
        print("one rank sends nothing: more of them, torchrun --nproc_per_node 2, show what it costs")
        return
    latency, bandwidth = fit(points)
    print(f"\ncost model, fitted to {world} ranks: all-reduces x {latency * 1e6:.0f} us + bytes / {bandwidth / 1e9:.2f} GB/s")
    print("  said against measured: " + ", ".join(f"{(count * latency + size / bandwidth) * 1e3:.2f}/{seconds * 1e3:.2f} ms" for count, size, seconds in points))
    print("\nCALCULATED, not measured, with the same formula for a ring, for 32 layers, 4096 wide, 2-byte numbers; ms in all-reduces of a pass")
    print("                                                 8 tokens  1,000 tokens")
    for name, n, link_latency, link in (("8 GPUs, NVLink (10 us, 450 GB/s each way)", 8, 10e-6, 450e9), ("2 machines, 25 Gbit/s Ethernet (50 us)", 2, 50e-6, 25e9 / 8)):
        # a ring sends 2 (n - 1) / n times the tensor through each link
        ms = [2 * 32 * (link_latency + 2 * (n - 1) / n * tokens * 4096 * 2 / link) * 1e3 for tokens in (8, 1000)]
        print(f"  {name:45}  {ms[0]:8.1f}  {ms[1]:12.1f}")


# --- the command --------------------------------------------------------------------------------------------------------

def main(argv=None):
    from toolbox import cli
    from toolbox.stages import SCRIPTS
    p = cli.parser(__doc__)
    p.add_argument("--stage", choices=SCRIPTS, default="ragged", help="which way of batching to run")
    p.add_argument("--table", action="store_true", help="instead: time passes on 1, 2, ... ranks, and fit a cost model of their communication")
    p.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds after which a rank that does not answer counts as lost")
    rank = int(os.environ.get("RANK", 0))
    if rank:   # rank 0 speaks
        sys.stdout = open(os.devnull, "w")
        p.error = lambda message: sys.exit(2)
    args = p.parse_args(argv)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        p.error("it runs under torchrun, which starts the ranks: torchrun --nproc_per_node 2 tensor_parallel.py")
    if not args.timeout > 0:
        p.error(f"--timeout must be above 0 seconds, not {args.timeout}")
    if rank:
        args.quiet, args.no_check, args.trace, args.plot = True, True, None, None
    sys.exit(cli.guarded(p.prog, lambda: work(args, SCRIPTS[args.stage]), speaks=not rank))


def work(args, generate):
    from model import GPTConfig
    from toolbox import cli
    device = cli.place(args)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    elif device.type == "mps":
        raise ValueError("--device mps: torch.distributed has no backend for an Apple GPU, allowed are cpu and cuda")
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=args.timeout))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the ranks did not find each other: {str(error).splitlines()[0]:.150}") from None
    try:
        if args.table:
            table(GPTConfig(n_layer=8, n_head=8, n_embd=512, vocab_size=1024), device, cli.DTYPES[args.dtype])
            return 0
        found = {}

        def prepared(model):   # the ranks keep step until the run is over; then rank 0 checks, alone
            found["model"] = model = shard(model)
            most = model.config.block_size
            found["counts"] = {(tokens, n): sum(count_collectives(model, tokens, n).values()) for tokens, n in ((10, 1), (most, 1), (10, 5), (20 * most, 50))}
            model.traffic.reset()
            return model

        status = cli.run(generate, args, shard=prepared)
        traffic = found["model"].traffic
        print(f"{dist.get_world_size()} ranks ({dist.get_backend()}), {found['model'].config.n_layer} layers, all-reduces of a forward pass: "
              + ", ".join(f"{count} for {tokens:,} tokens of {n} request{'s' * (n > 1)}" for (tokens, n), count in found["counts"].items()))
        print(f"rank 0 in this run: {traffic.all_reduces:,} all-reduces, {traffic.bytes / 1e6:,.1f} MB, {traffic.seconds:.2f} s")
        return status
    except ConnectionError as error:
        print(f"tensor_parallel.py: {error}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)   # nothing to hand back, and taking down a broken process group may wait for ever
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
