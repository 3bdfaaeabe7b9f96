"""
Calculates what a stage reaches on a GPU that is not here, and whether that keeps up with a load.

    python -m lab.simulate --gpu a100 --model llama-2-7b --stage prefix --input 1024 --clients 8
    python -m lab.simulate --gpu h100 --model qwen3-14b --stages 8:600,20:600 --prompts 100
"""
import json
import sys
from functools import partial
from itertools import cycle, islice

from lab import flags
from lab.flags import above_0, whole
from lab.loading.arrivals import check_lengths, drawn, poisson, staged, traced
from lab.loading.stages import SCRIPTS
from lab.loading.traces import read_trace
from lab.simulate.calculated import DEFAULTS, FLAT, runner, with_memory
from lab.simulate.hardware import BYTES, ENGINES, gpu_of, shape_of
from lab.simulate.overload import most_served, verdict
from lab.simulate.published import show_real
from lab.views import plots
from lab.views.report import aligned, figures

COUNTS = "requests", "passes", "preemptions", "saved_tokens"
WAITS = {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "ITL": "itl_ms", "E2E": "e2e_ms"}


def main(argv=None):
    p = parser("lab.simulate", __doc__)
    p.add_argument("--stage", default="prefix", choices=SCRIPTS)
    p.add_argument("--clients", type=whole, help="number of clients; each waits for its answer")
    p.add_argument("--stages", type=flags.stages, help="rates in turn, requests/s and for how many "
                   "seconds: RATE:SECONDS,RATE:SECONDS,...")
    p.add_argument("--trace", metavar="FILE", help="lengths and times from a .csv or .jsonl file; "
                   "lab/loading/traces.py names the columns")
    p.add_argument("--plot", metavar="FILE", help="draw waits, requests and memory over time")
    p.add_argument("--real", action="store_true", help="only: real runs, and what this and other "
                   "simulators say of them")
    flags.add_knobs(p, defaults={**DEFAULTS, "pages": "all that fit",
                                 "max_kv_tokens": "all that fit"})
    return p.run(run_stage, argv)


def run_stage(args):
    """Prints what a stage reaches on the GPU and, at a rate, whether it can keep up."""
    flags.check_path(args.json, "--json")
    flags.check_path(args.plot, "--plot", flags.PICTURES)
    if args.real:
        return show_real()
    loads = [f"--{name}" for name in ("rate", "clients", "stages", "trace") if getattr(args, name)]
    if len(loads) > 1:
        raise ValueError(f"{' and '.join(loads)} exclude each other")
    gpu, shape = gpu_of(args.gpu), shape_of(args.model, args.dtype, args.tp)
    made, times, longest = load_of(args, shape)
    generate, number = SCRIPTS[args.stage], len(times)
    knobs, ignored = with_memory(shape, gpu, generate, longest, flags.given_knobs(args),
                                 args.memory, args.max_kv)
    flags.say_ignored(args, ignored, "for this stage")
    flags.say_ignored(args, ["requests"] * bool(args.stages and args.requests), "with --stages")
    run = runner(shape, gpu, generate, ENGINES[args.engine], **knobs)
    log = run(partial(made, number), times, args.clients or 0)
    f = figures(log, args.ttft, args.itl)
    title = (f"{args.model} on {args.tp} x {args.gpu}, {args.stage}, {args.engine}'s overhead, "
             "calculated")
    print(f"{title}: {f['tokens_per_s']:,.0f} tokens/s, {f['requests_per_s']:,.2f} requests/s"
          + (f", {f['goodput']:,.2f} of them within the limits" if args.ttft or args.itl else ""))
    if rates := load_rates(args, times):
        most, tried = most_served(run, made, number, knobs.get("max_batch", 1),
                                  least=1000 if generate in FLAT else 250)
        f["served_at_most"] = most
        f["load"] = [{"rate": rate, "verdict": verdict(rate / most, tried)} for rate in rates]
        for load in f["load"]:
            print(f"{load['verdict']}; {load['rate']:g} requests/s are {load['rate'] / most:.2f} "
                  f"times what it can serve, {most:,.2f}")
    print(aligned([["ms", *f["ttft_ms"]], *([name, *(f"{value:,.1f}" for value in f[key].values())]
                                            for name, key in WAITS.items())]))
    print(", ".join(f"{f[name]:,} {name.replace('_', ' ')}" for name in COUNTS if f[name])
          + ("" if times[-1] or args.clients else ", all at once")
          + (f", {f['useful']:.0%} of the slots useful" if f["useful"] else ""))
    write(args.json, f)
    if args.plot:
        room = knobs.get("pages", 0) * knobs.get("page_size", 16) or knobs.get("max_kv_tokens")
        plots.load(log.requests, log.passes, room, title, args.plot)
    return 0


def load_rates(args, times):
    """The requests that come in a second: of each stage, or of the whole load; [] if it waits."""
    if args.stages:
        return [rate for rate, _ in args.stages]
    return [args.rate] if args.rate else [len(times) / times[-1]] if times[-1] else []


def load_of(args, shape):
    """(made, times, longest): made(n) makes n requests; tokens of the longest prompt and answer."""
    if args.trace:
        rows = read_trace(args.trace, partial(check_lengths, shape=shape, flags=""), args.requests)
        return (lambda number: traced(islice(cycle(rows), number)), [row[0] for row in rows],
                max(prompt for _, prompt, *_ in rows) + max(answer for _, _, answer, _ in rows) - 1)
    check_lengths(args.prefix + args.input[1], args.output[1], shape)
    number = args.requests or 160
    times = (staged(args.stages, args.seed) if args.stages else
             poisson(number, args.rate, args.seed) if args.rate else [0.0] * number)
    made = partial(drawn, seed=args.seed, prompt=args.input, answer=args.output,
                   prompts=args.prompts, prefix=args.prefix, groups=args.groups)
    if not (times := [*times]):
        raise ValueError("--stages: no request comes in so short a time")
    return made, times, args.prefix + args.input[1] + args.output[1] - 1


# --- what capacity.py needs, too ------------------------------------------------------------------

def parser(module, doc):
    p = flags.Parser(prog=f"python -m {module}", description=doc.strip().splitlines()[0])
    add = p.add_argument
    add("--gpu", default="a100", help="a name, or PEAK_TFLOPS,GB_PER_S,GiB")
    add("--model", default="llama-2-7b", help="a name, see sheets.json")
    add("--dtype", default="float16", choices=BYTES)
    add("--tp", type=whole, default=1, help="tensor parallel ranks")
    add("--engine", default="vllm", choices=ENGINES, help="whose times between passes")
    add("--memory", type=flags.share, default=0.9, help="share of the GPU's memory that is used")
    add("--max_kv", type=whole, help="tokens whose keys and values fit, if fewer")
    add("--input", type=flags.bounds, default="1024", help="a prompt's tokens: N or LOW:HIGH")
    add("--output", type=flags.bounds, default="128", help="an answer's tokens: N or LOW:HIGH")
    add("--requests", type=whole, help="how many (default: 160, or all of a trace)")
    add("--rate", type=above_0, help="requests a second, at random")
    add("--prompts", type=whole, help="only so many differ, and come again and again")
    add("--prefix", type=partial(whole, least=0), default=0,
        help="tokens before each input that a group has in common")
    add("--groups", type=whole, default=1, help="groups with a common beginning")
    add("--ttft", type=above_0, help="a limit in ms")
    add("--itl", type=above_0, help="a limit in ms")
    add("--seed", type=int, default=0)
    add("--json", metavar="FILE.json", help="write the figures")
    return p


def write(path, content):
    """JSON, which has no NaN: null."""
    if path:
        content = json.loads(json.dumps(content), parse_constant=lambda name: None)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
