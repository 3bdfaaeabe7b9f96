"""
What tensor parallelism costs: forward passes on 1, 2, 4 and 8 ranks, and a cost model of their
all-reduces.

Each all-reduce costs a latency, and each of its bytes costs time on the link:
seconds = all-reduces x latency + bytes / bandwidth. `fit` finds both from the measured passes.

    torchrun --nproc_per_node 2 -m experiments.ranks
    torchrun --nproc_per_node 2 -m experiments.ranks --json experiments/results/ranks.json
"""
import copy
import time

import torch
import torch.distributed as dist

from beyond.tensor_parallel import shard
from experiments import results, tables
from model import GPT, GPTConfig
from toolbox import cli
from toolbox.torchrun import run_on_ranks
from toolbox.trace import synchronize

TOKENS = (1, 8, 64, 512)   # of the passes that are timed
LINKS = {                  # ranks, latency in s, bytes/s each way
    "8 GPUs, NVLink (10 us, 450 GB/s each way)": (8, 10e-6, 450e9),
    "2 machines, 25 Gbit/s Ethernet (50 us)": (2, 50e-6, 25e9 / 8),
}


# --- timing ---------------------------------------------------------------------------------------

@torch.inference_mode()
def forward_seconds(model, tokens, repeats=9):
    """
    Times passes over so many tokens, each of which attends only to itself. Returns, for the median
    pass: (seconds, seconds spent in all-reduces, all-reduces, bytes).
    """
    ids = torch.zeros(tokens, dtype=torch.long, device=model.device)
    last = torch.tensor([0], device=model.device)
    taken = []

    def clock():   # when all work on a GPU is done: without the wait only launches are timed
        synchronize(model.device)
        return time.perf_counter()

    model.traffic.clock = clock
    for _ in range(repeats + 2):
        before, start = copy.copy(model.traffic), clock()
        model(ids, ids, attend=lambda layer, q, k, v: v, rows=last)
        seconds, now = clock() - start, model.traffic
        taken.append((seconds, now.seconds - before.seconds,
                      now.all_reduces - before.all_reduces, now.bytes - before.bytes))
    return sorted(taken[2:])[repeats // 2]   # the first two warm up


def fit(points):
    """
    latency, bandwidth of  seconds = count x latency + bytes / bandwidth,  by least squares of the
    relative errors. points: (count, bytes, seconds).
    """
    count, size, seconds = torch.tensor(points, dtype=torch.float64).T
    terms = torch.stack([count / seconds, size / seconds], dim=1)
    ones = torch.ones(len(points), 1, dtype=torch.float64)
    latency, per_byte = torch.linalg.lstsq(terms, ones).solution.flatten().tolist()
    return max(latency, 0.0), 1 / max(per_byte, 1e-15)


# --- measuring ------------------------------------------------------------------------------------

def time_ranks(config, device, dtype, repeats):
    """
    Times 1, 2, 4, ... ranks on the same random weights; and one rank with the threads of all, which
    is what a CPU would do without ranks. Returns a dict for each measurement.
    """
    rows, threads, world = [], torch.get_num_threads(), dist.get_world_size()
    alone = [(1, threads * world)] if world > 1 and device.type == "cpu" else []
    for ranks, each in alone + [(n, threads) for n in (1, 2, 4, 8) if n <= world]:
        group = dist.new_group(range(ranks))
        if dist.get_rank() < ranks:
            torch.manual_seed(0)
            torch.set_num_threads(each)
            model = shard(GPT(config).to(device, dtype).requires_grad_(False), group)
            for tokens in TOKENS:
                seconds, waiting, count, size = forward_seconds(model, tokens, repeats)
                rows.append({"ranks": ranks, "threads": each, "tokens": tokens,
                             "seconds": seconds, "in_all_reduces": waiting, "all_reduces": count,
                             "bytes": size})
        dist.barrier()
    return rows


def cost_model(points):
    """
    The model fitted to measured points (count, bytes, seconds), and what it says elsewhere:
    {"latency": s, "bandwidth": bytes/s, "calculated": {link: ms for 8 and 1,000 tokens}}.
    """
    calculated = {}
    for name, (n, latency, bandwidth) in LINKS.items():
        # a ring sends 2 (n - 1) / n times the tensor through each link
        sent = [2 * (n - 1) / n * tokens * 4096 * 2 for tokens in (8, 1000)]
        calculated[name] = [2 * 32 * (latency + size / bandwidth) * 1e3 for size in sent]
    latency, bandwidth = fit(points)
    return {"latency": latency, "bandwidth": bandwidth, "calculated": calculated}


def measure(args):
    """On every rank; only rank 0 prints."""
    device, dtype, where = cli.measuring_place(args)
    where = where.replace(f"{torch.get_num_threads()} threads", "threads as in the table")
    config = GPTConfig(n_layer=8, n_head=8, n_embd=512, vocab_size=1024)
    repeats, world = 3 if args.quick else 9, dist.get_world_size()
    rows = time_ranks(config, device, dtype, repeats)
    most = max((row["ranks"] for row in rows), default=1)
    points = [(row["all_reduces"], row["bytes"], row["in_all_reduces"]) for row in rows
              if row["ranks"] == most > 1]
    found = results.keep(
        args.json, f"torchrun --nproc_per_node {world} -m experiments.ranks", where,
        size=f"{config.n_layer} layers, {config.n_embd} wide", repeats=repeats, rows=rows,
        model=cost_model(points) if points else None)
    tables.show(f"{found['size']}, {where}", *tables.ranks(found, TOKENS))
    if not points:
        print("one rank sends nothing: start more to see what it costs, with "
              "torchrun --nproc_per_node 2")
        return 0
    latency, bandwidth = found["model"]["latency"], found["model"]["bandwidth"]
    print(f"\ncost model, fitted to {most} ranks: "
          f"all-reduces x {latency * 1e6:.0f} us + bytes / {bandwidth / 1e9:.2f} GB/s\n"
          "predicted/measured: " + ", ".join(
              f"{(count * latency + size / bandwidth) * 1e3:.2f}/{seconds * 1e3:.2f} ms"
              for count, size, seconds in points))
    tables.show("CALCULATED, not measured, with the same formula for a ring, for 32 layers, 4096 "
                "wide, 2-byte numbers", *tables.links(found))
    return 0


def main(argv=None):
    p = cli.measuring_parser("python -m experiments.ranks", __doc__, "fewer repeats", plot=False)
    run_on_ranks(p, measure, argv)


if __name__ == "__main__":
    main()
