"""The commands of simulate.py and capacity.py: their flags, what they refuse, what they print."""
import json
import math
import random
from dataclasses import replace

from beyond.arrivals import check_lengths, workload
from beyond.capacity import MOST, ROUTERS, Load, fewest, serve
from beyond.fairness import SCHEDULERS
from beyond.hardware import BYTES, gpu_of, shape_of
from beyond.overload import TOO_SHORT, advice, judged, most_served, tries
from beyond.simulate import figures, simulate, with_memory
from loading.stages import SCRIPTS
from toolbox import flags
from toolbox.validate import at_least_1, is_whole
from views.report import aligned, percentile, report


def parser(module, doc):
    """The flags that both commands have."""
    p = flags.Parser(prog=f"python -m {module}", description=doc.strip().splitlines()[0])
    p.add_argument("--gpu", default="a100", help="a name, or PEAK_TFLOPS,GB_PER_S,GiB")
    p.add_argument("--model", default="llama-2-7b", help="a name, see sheets.json")
    p.add_argument("--dtype", default="float16", choices=BYTES)
    p.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    p.add_argument("--input", default="1024", help="tokens of a prompt, N or LOW:HIGH")
    p.add_argument("--output", default="128", help="tokens of an answer, N or LOW:HIGH")
    p.add_argument("--requests", type=int, default=160)
    p.add_argument("--rate", type=float, help="requests a second, at random")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", metavar="FILE.json", help="write the figures")
    return p


def check(args):
    """(low, high) of the prompt's tokens and of the answer's. ValueError for a bad flag."""
    flags.check_path(args.json, "--json")
    counts = {f"--{name}": getattr(args, name, None)
              for name in ("requests", "clients", "replicas", "groups")}
    at_least_1(**{name: count for name, count in counts.items() if count is not None})
    if args.rate is not None and not 0 < args.rate < math.inf:
        raise ValueError(f"--rate must be above 0, not {args.rate}")
    return bounds("input", args.input), bounds("output", args.output)


def bounds(flag, text):
    """(low, high) of N or LOW:HIGH. ValueError for anything else."""
    low, _, high = text.partition(":")
    if not (low.isdecimal() and (high or low).isdecimal() and 0 < int(low) <= int(high or low)):
        raise ValueError(f"--{flag} {text}: use N or LOW:HIGH, whole numbers of at least 1")
    return int(low), int(high or low)


def write(path, content):
    """JSON, which has no NaN: null."""
    if path:
        content = json.loads(json.dumps(content), parse_constant=lambda name: None)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)


# --- simulate: one machine, any stage -------------------------------------------------------------

def simulate_command(doc, argv=None):
    p = parser("beyond.simulate", doc)
    p.add_argument("--stage", default="paged", choices=SCRIPTS)
    p.add_argument("--clients", type=int, help="number of clients; each waits for its answer")
    flags.add_knobs(p, SCHEDULERS)
    return p.run(run_stage, argv)


def run_stage(args):
    """Prints what a stage reaches on the GPU and, at a rate, whether it can keep up."""
    prompts, answers = check(args)
    if args.clients and args.rate:
        raise ValueError("--rate and --clients exclude each other")
    gpu, shape = gpu_of(args.gpu), shape_of(args.model, args.dtype, args.tp)
    check_lengths(prompts[1], answers[1], shape)

    def made(number):
        stream = random.Random(args.seed)
        return workload([(stream.randint(*prompts), stream.randint(*answers))
                         for _ in range(number)], shape.vocab_size)

    generate, requests = SCRIPTS[args.stage], made(args.requests)
    knobs, ignored = with_memory(shape, gpu, generate, requests,
                                 flags.given_knobs(args, SCHEDULERS), args.clients)
    flags.say_ignored(args, ignored, "for this stage")
    trace = simulate(shape, gpu, generate, requests, args.clients, args.rate, args.seed, **knobs)
    f = figures(trace)
    print(f"{args.model} on {args.tp} x {args.gpu}, calculated: "
          f"{f['tokens_per_s']:,.0f} tokens/s; TTFT mean {f['ttft_ms']['mean']:,.0f}, p99 "
          f"{f['ttft_ms']['p99']:,.0f} ms; ITL p50 {f['itl_ms']['p50']:,.1f}, p99 "
          f"{f['itl_ms']['p99']:,.1f} ms".replace(" nan", " -"))
    if args.rate:
        tried = tries(len(requests), generate, **knobs)
        served = most_served(shape, gpu, generate, made(tried), **knobs)
        f["load"] = judged(requests, args.rate, served, tried)
        print(load_text(f["load"], args.rate))
    print(report(trace))
    write(args.json, f)
    return 0


def load_text(load, rate):
    """The lines that say whether a machine can keep up."""
    text = advice(load["times"]) if load["verdict"] == TOO_SHORT else load["verdict"]
    return (f"{text}; {rate:g} requests/s are {load['times']:.2f} times what it can serve, "
            f"{load['served_at_most']:,.2f}\n"
            f"tokens (prompts and answers): {load['offered_tokens_per_s']:,.0f} a second come, "
            f"{load['served_tokens_per_s']:,.0f} are computed, "
            f"{load['owed_tokens_per_s']:,.0f} more are owed each second")


# --- capacity: several machines, stage 7 ----------------------------------------------------------

def capacity_command(doc, argv=None):
    p = parser("beyond.capacity", doc)
    p.add_argument("--replicas", type=int, default=4, help="copies of the model")
    p.add_argument("--router", choices=ROUTERS, help="default: all of them, in turn")
    p.add_argument("--prefix", type=int, default=0,
                   help="tokens before each input that a group has in common")
    p.add_argument("--groups", type=int, default=1, help="groups with a common beginning")
    p.add_argument("--ttft", type=float, help="a limit on the p99, in ms: asks how many GPUs")
    p.add_argument("--itl", type=float, help="a limit on the p99, in ms")
    return p.run(run_replicas, argv)


def run_replicas(args):
    """Prints a row for each router; with limits, one for each number of GPUs in a replica."""
    prompts, answers = check(args)
    if args.rate is None:
        raise ValueError("--rate is missing: the requests that come in a second")
    if not is_whole(args.prefix, 0):
        raise ValueError(f"--prefix must be a whole number of at least 0, not {args.prefix}")
    if (args.ttft is None) != (args.itl is None):
        raise ValueError("--ttft and --itl belong together: give both limits, or none")
    load = Load(args.rate, prompts, answers, args.requests, args.seed, args.groups, args.prefix)
    rows_of = of_routers if args.ttft is None else of_limits
    rows = [*rows_of(args, gpu_of(args.gpu), load)]
    if rows:
        print("calculated; waits in ms, of the median and of the p99")
        print(aligned([rows[0].keys(), *map(cells, rows)]))
        if rows[-1]["verdict"] == TOO_SHORT:
            print(advice(rows[-1]["times"]))
    write(args.json, {"calculated": True, "rows": rows})
    return 0


def of_routers(args, gpu, load):
    shape = shape_of(args.model, args.dtype, args.tp)
    for router in [args.router] if args.router else ROUTERS:
        yield {"router": router, **row(serve(shape, gpu, load, args.replicas, router))}


def of_limits(args, gpu, load):
    flags.say_ignored(args, [name for name, default in (("replicas", 4), ("tp", 1))
                             if getattr(args, name) != default], "with limits")
    whole = shape_of(args.model, args.dtype)
    for tp in 1, 2, 4, 8:
        try:
            shape = replace(whole, tp=tp)
            shape.room(gpu)
        except ValueError as error:
            print(f"no row for --tp {tp}: {error}")
            continue
        number, f = fewest(shape, gpu, load, args.router or "least-loaded", args.ttft, args.itl)
        yield {"--tp": tp, "replicas": number or f"more than {MOST}",
               "GPUs": tp * number if number else "-", **row(f)}


def row(f):
    """What the table and --json hold of a run of `serve`."""
    waits = {f"{name}_p{q}": percentile(f[f"{name}_ms"], q) for name in ("ttft", "itl")
             for q in (50, 99)}
    return {**waits, "saved_tokens": f["saved_tokens"], "times": f["times"],
            "verdict": f["verdict"]}


def cells(row):
    return [f"{cell:,.2f}" if isinstance(cell, float) else cell for cell in row.values()]
