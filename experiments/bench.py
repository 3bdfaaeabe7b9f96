"""
All stages of this repository and their peers, on the same weights and the same requests.

docs/measurements.md describes the workloads and the rounds. Only requested tokens count, output is
greedy, and the weights are random, which run as fast as trained ones. The *roofline* is the time
that the ragged stage's schedule would take if each forward pass ran at the machine's measured peak
of arithmetic or of memory, whichever takes longer (claim R7 says which):

    seconds  =  sum over passes of  max(floating point operations / peak,
                                        bytes of weights, keys and values / bandwidth)

An operation counts if a token's logits need it. In the last block, tokens that are not sampled from
need only their keys and values.

    python -m experiments.bench --quick                             about a minute
    python -m experiments.bench --json bench.json --plot bench.png  all of it
"""
import json
import math
import random
import shutil
import sys
import time
from multiprocessing.pool import ThreadPool
from pathlib import Path
from statistics import mean, median

import torch
from torch.nn import functional as F

from experiments import figures, tables
from experiments.engines import INSTALL, end_with_this_process
from experiments.peers import peers
from experiments.results import best_peer, median_seconds, provenance
from experiments.results import run as run_stage
from kernels import native
from loading.llama import Llama, LlamaConfig
from loading.stages import STAGES
from model import GPT, GPTConfig, Head
from request import Request
from toolbox.flags import measuring_parser, measuring_place
from views.report import percentile

MODELS = {"gpt2": GPTConfig(), "small": GPTConfig(n_layer=6, n_head=6, n_embd=384),
          "smollm2": LlamaConfig()}
KNOBS = dict(max_batch=32, token_budget=512)


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


def loud(model):
    """
    Scales a model's random weights up. At GPT-2's own scale the output soon repeats one token for
    ever, and all systems would agree for that reason alone.
    """
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                p.mul_(3 if name == "wpe.weight" else 1 if name == "wte.weight" else 4)
    return model.requires_grad_(False)


def models(config, device, dtype, pythons):
    """
    The same weights several times: ({how: our model}, {name: peer}). how: "optimized"; "not
    optimized".
    """
    torch.manual_seed(0)
    plain = loud((GPT if isinstance(config, GPTConfig) else Llama)(config)).to(device, dtype)
    ours = {"optimized": plain.optimize(), "not optimized": plain}
    return ours, peers(plain, pythons=pythons, **KNOBS)


def stage(model, generate, knobs):
    """A stage with a peer's interface: requests -> (tokens, times). Keeps the trace."""
    def run(requests):
        run.trace = run_stage(generate, model, requests, knobs)
        done = run.trace.requests
        return [r.generated for r in done], [r.token_times for r in done]
    return run


def systems(ours, theirs):
    """{name: requests -> (tokens, times)}: the stages, optimized; ragged also less; the peers."""
    best, ragged = ours["optimized"], STAGES["ragged, varlen"]
    found = {name: stage(best, generate, KNOBS) for name, generate in STAGES.items()
             if name != "unbatched, no cache"}
    less = {f"ragged, varlen, {how}": stage(model, ragged, KNOBS)
            for how, model in ours.items() if how != "optimized"}
    less["unbatched, not optimized"] = stage(ours["not optimized"], STAGES["unbatched"], KNOBS)
    # what batching alone gains
    less["ragged, varlen, max_batch 1"] = stage(best, ragged, {**KNOBS, "max_batch": 1})
    return {**found, **less, **theirs}


def apart(work, *args):
    """
    Calls work(*args) in a thread of its own, and so ends the OpenMP threads that it started. When
    there are more of these than cores, they sleep between two operations, and every operation takes
    longer. Systems that compute in worker threads then appear slower than they are: transformers'
    continuous batching takes 1.5 times as long beside another thread's idle OpenMP threads.
    """
    with ThreadPool(1) as pool:   # a daemon, so Control-C need not wait for it
        called = pool.apply_async(work, args)
        called.wait()
        pool.close()
        pool.join()
    return called.get()


@torch.inference_mode()
def machine_peaks(fast):
    """
    (floating point operations, bytes, scores) per second: the fastest of several large
    multiplications, torch's and those of a snapshot; reading a large tensor; and model.Head on
    padded rows, which writes, masks and reads each score, as no fused kernel does.
    """
    layer, best = fast.h[0].mlp.c_fc, 0.0
    ways = [lambda x: F.linear(x, layer.weight, layer.bias)]
    if hasattr(fast, "uses"):
        packed = native.pack(layer.weight)
        ways.append(lambda x: native.multiply(x, packed, layer.out_features, layer.bias))
    for rows in (256, 512, 1024, 2048):
        x = torch.randn(rows, layer.in_features, device=fast.device).to(layer.weight.dtype)
        for multiply in ways:
            seconds = median_seconds(lambda: [multiply(x) for _ in range(4)], fast.device)
            best = max(best, 4 * 2 * rows * layer.weight.numel() / seconds)
    x, q = torch.ones(2**27, device=fast.device), torch.ones(8, 12, 256, 64, device=fast.device)
    mask = torch.ones(8, 1, 1, 256, dtype=torch.bool, device=fast.device)
    return (best, x.nbytes / median_seconds(x.sum, fast.device),
            8 * 12 * 256**2 / median_seconds(lambda: Head()(q, q, q, mask=mask), fast.device))


def roofline(model, trace, peak, bandwidth):
    """The least seconds for the passes of a ragged trace."""
    L, attn, size = len(model.h), model.h[0].attn, model.wte.weight.element_size()
    Q, K = len(attn.query.weight), len(attn.key.weight)   # features of a query; of a key
    block = sum(p.numel() for p in model.h[0].parameters() if p.dim() == 2)
    kv, vocabulary = 2 * attn.key.weight.numel(), model.wte.weight.numel()
    sampled = {(step, request.name) for request in trace.requests for step in request.token_steps}
    total = 0.0
    for p in trace.passes:
        tokens = sum(n for _, _, n in p.work)
        # keys that each sampled token sees
        seen = [first + n for name, first, n in p.work if (p.step, name) in sampled]
        keys = sum(first + 2 * n for _, first, n in p.work)   # all are read, the new ones written
        multiplied = ((L - 1) * block + kv) * tokens + (block - kv + vocabulary) * len(seen)
        operations = 2 * multiplied + 4 * Q * ((L - 1) * p.useful_scores + sum(seen))
        memory = size * (L * block + vocabulary * bool(seen) + 2 * L * K * keys)
        total += max(operations / peak, memory / bandwidth)
    return total


def measure(names, run, requests, repeats, say):
    """
    Runs the systems in turn and returns {name: figures}. "rounds" has seconds, or None for a round
    in which the system did not run: those more than 3x slower than the fastest run in the first
    round only, except the stages and the best peer.
    """
    reference = None
    if "unbatched" not in names:   # what all tokens are compared with
        say("  unbatched, once and not timed")
        reference = apart(run["unbatched"], requests)[0]
    runs, systems = {name: [] for name in names}, {name: {"rounds": []} for name in names}
    for repeat in range(repeats):
        for name, system in systems.items():
            slow = repeat and system["rounds"][0] > 3 * min(
                other["rounds"][0] for other in systems.values())
            if slow and name not in STAGES and name != best_peer(systems):
                system["rounds"].append(None)
                continue
            start = time.perf_counter()
            tokens, times = apart(run[name], requests)
            seconds = time.perf_counter() - start
            reference = reference or tokens
            system["rounds"].append(seconds)
            runs[name].append((seconds, start, tokens, times))
            say(f"  {repeat + 1}/{repeats}  {name:32} {seconds:7.2f} s")
    for name, taken in runs.items():
        systems[name].update(medians_of(taken, reference))
    return systems


def medians_of(runs, reference):
    """
    A system's figures: medians over its runs, [(seconds, start, tokens, times), ...], and the
    lowest share of equal tokens.
    """
    seconds = [run[0] for run in runs]
    waits = [mean(t[0] - start for t in times) for _, start, _, times in runs]
    gaps = [[b - a for t in times for a, b in zip(t, t[1:])] for *_, times in runs]
    itl = {f"itl_p{q}": median(percentile(of, q) for of in gaps) if gaps[0] else None
           for q in (50, 99)}
    equal = min(sum(a == b for pair in zip(tokens, reference) for a, b in zip(*pair))
                for _, _, tokens, _ in runs)
    return {"seconds": median(seconds), "spread": (max(seconds) - min(seconds)) / median(seconds),
            "ttft_mean": median(waits), **itl, "equal": equal / sum(map(len, reference))}


def parts(run, requests):
    """{part: seconds} of a run on native.cpp, by its own clocks; {} if it is not in use."""
    native.SECONDS[:] = [0.0] * len(native.PARTS)
    start = time.perf_counter()
    run(requests)
    total, found = time.perf_counter() - start, dict(zip(native.PARTS, native.SECONDS))
    between = total - sum(found.values())   # layouts, scheduling, sampling
    return {**found, "between the steps": between} if any(found.values()) else {}


def main(argv=None):
    p = measuring_parser("python -m experiments.bench", __doc__,
                         quick="a quarter of the requests, the small model, one run each")
    p.add_argument("--models", nargs="+", choices=MODELS,
                   help="gpt2: 124M parameters; small: 6 layers, 384 wide; smollm2: Llama's kind, "
                        "135M (default: all)")
    p.add_argument("--workloads", nargs="+", choices=tables.WORKLOADS, default=tables.WORKLOADS,
                   help="W1 mixed, W2 prefill, W3 decode")
    p.add_argument("--systems", nargs="+", metavar="WORD",
                   help="only systems whose name contains one of these words")
    p.add_argument("--repeats", type=int, default=3, metavar="N",
                   help="runs of each system, in turn; their medians count")
    p.add_argument("--peer-python", nargs="+", metavar="NAME=PATH", default=[],
                   help="vllm=PATH or openvino=PATH: the Python of an environment that has it")
    return p.run(run_benchmark, argv)


def peer_pythons(pairs):
    """{engine: Python} from NAME=PATH. ValueError for anything else."""
    pythons = dict(pair.partition("=")[::2] for pair in pairs)
    for name, path in pythons.items():
        if name not in INSTALL or not shutil.which(path):
            raise ValueError(f"--peer-python {name}={path}: use NAME=PATH with the name "
                             f"{' or '.join(INSTALL)} and the path of a Python")
    return pythons


def run_benchmark(args):
    if args.repeats < 1:
        raise ValueError(f"--repeats must be at least 1, not {args.repeats}")
    device, dtype, where = measuring_place(args)
    pythons = peer_pythons(args.peer_python)
    end_with_this_process()
    native.keep_memory()   # of all threads: it must be told before the first of them begins
    print(where)
    results = []
    for model_name in args.models or (["small"] if args.quick else list(MODELS)):
        ours, theirs = apart(models, MODELS[model_name], device, dtype, pythons)
        for name in args.workloads:
            result = run_workload(args, model_name, name, systems(ours, theirs), ours["optimized"])
            results.append({**result, "where": where,
                            "measured": provenance("python -m experiments.bench")})
            if args.json:   # after each workload, so that an interrupted run keeps its results
                Path(args.json).write_text(json.dumps(results, indent=1))
    if args.plot:
        print("drawn in", *figures.bench(results, args.plot))
    return 0


def run_workload(args, model_name, name, run, fast):
    """Measures the chosen systems on one workload, prints the table, and returns its figures."""
    config = fast.config
    requests = workload(name, config.vocab_size, args.quick)
    allowed = [system for system in run if not (args.quick and "sorted" in system)]
    names = [system for system in allowed
             if not args.systems or any(word in system for word in args.systems)]
    if not names:
        raise ValueError(f"--systems {' '.join(args.systems)}: no system has such a name; "
                         f"choose words from: {', '.join(allowed)}")
    print(f"\n{model_name} {name}: {len(requests)} requests, "
          f"{sum(len(r.prompt) for r in requests):,} prompt tokens, "
          f"{sum(r.max_new_tokens for r in requests):,} to generate, "
          f"max_batch {KNOBS['max_batch']}, token_budget {KNOBS['token_budget']}", flush=True)

    apart(run["ragged, varlen"], requests)   # the roofline's schedule, and a warm-up
    schedule, before = run["ragged, varlen"].trace, apart(machine_peaks, fast)
    measured = measure(names, run, requests, 1 if args.quick else args.repeats,
                       lambda line: print(line, file=sys.stderr, flush=True))
    # the machine's better moment counts
    peak, bandwidth, scores = map(max, zip(before, apart(machine_peaks, fast)))
    least = roofline(fast, schedule, peak, bandwidth)
    useful = sum(len(r.prompt) if name == "W2" else r.max_new_tokens for r in requests)
    result = {"model": model_name, "workload": name, "tokens": useful, "roofline": least,
              "peak": peak, "bandwidth": bandwidth, "scores": scores, "systems": measured,
              "peers": {name: peer.settings for name, peer in run.items()
                        if hasattr(peer, "settings")},   # with their versions
              "parts": apart(parts, run["ragged, varlen"], requests)}
    tables.show("", *tables.bench(result, equal=True))
    whole = sum(result["parts"].values())
    print(*(f"{part} {seconds / whole:.0%}" for part, seconds in result["parts"].items()), sep=", ")
    print(f"peak {peak / 1e9:,.0f} GFLOP/s, memory {bandwidth / 1e9:,.0f} GB/s; "
          f"roofline {useful / least:,.0f} tokens/s", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
