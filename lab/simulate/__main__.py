"""
Calculates what a stage reaches on any GPU, without having it.

    python -m lab.simulate --gpu a100 --model llama-2-7b --stage prefix --input 1024 --clients 8
"""
import json
import sys
from functools import partial

from lab import flags
from lab.flags import above_0, whole
from lab.loading.arrivals import check_lengths, drawn, poisson
from lab.loading.stages import SCRIPTS
from lab.simulate import real_runs
from lab.simulate.calculated import DEFAULTS, log_of, with_memory
from lab.simulate.hardware import BYTES, ENGINES, gpu_of, shape_of
from lab.views.report import aligned, figures

# All requests are kept, with their times. These limits are some 2 GB.
MOST_REQUESTS = 200_000
MOST_TOKENS = 50_000_000
MOST_SCORES = 2_000_000_000   # a mask has a byte for each
LONGEST_CLOCK = 1e9   # seconds, of which a float still tells microseconds apart
COUNTS = "requests", "passes", "preemptions", "saved_tokens"
WAITS = {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "ITL": "itl_ms", "E2E": "e2e_ms"}


def parser():
    p = flags.Parser(prog="python -m lab.simulate", description=flags.first_paragraph(__doc__))
    add = p.add_argument
    add("--gpu", default="a100", help="a name, or PEAK_TFLOPS,GB_PER_S,GiB")
    add("--model", default="llama-2-7b", help="a name, see sheets.json")
    add("--dtype", default="float16", choices=BYTES)
    add("--tp", type=whole, default=1, help="tensor parallel ranks")
    add("--engine", default="vllm", choices=ENGINES, help="its times, and how it plans")
    add("--stage", default="prefix", choices=SCRIPTS)
    add("--input", type=flags.bounds, default="1024", help="a prompt's tokens: N or LOW:HIGH")
    add("--output", type=flags.bounds, default="128", help="an answer's tokens: N or LOW:HIGH")
    add("--requests", type=whole, default=160, help="how many")
    add("--prefix", type=partial(whole, least=0), default=0,
        help="common tokens that come before each input")
    add("--ttft", type=above_0, help="goodput: the limit on TTFT, in ms")
    add("--itl", type=above_0, help="goodput: the limit on a request's mean ITL, in ms")
    add("--seed", type=int, default=0)
    add("--json", metavar="FILE.json", help="write the figures")
    one = p.add_mutually_exclusive_group()
    one.add_argument("--rate", type=above_0, help="requests a second, at random")
    one.add_argument("--clients", type=whole,
                     help="number of clients; each waits for its answer")
    one.add_argument("--real", action="store_true", help="only: real runs, and what this and "
                     "other simulators say of them")
    flags.add_knobs(p, defaults={**DEFAULTS, "pages": "all that fit",
                                 "max_kv_tokens": "all that fit"})
    return p


def main(argv=None):
    return parser().run(show, argv)


def show(args):
    """Prints what a stage reaches on the GPU, or real runs beside what is calculated."""
    flags.check_path(args.json, "--json")
    gpu_of(args.gpu)   # what is mistyped is told, even where it would not be used
    shape_of(args.model, args.dtype, args.tp)
    if args.real:
        ignored = ["json"] if args.json else []
        flags.say_ignored(args, [*ignored, *flags.given_knobs(args)], "beside --real")
        print(real_runs.show())
        return 0
    result = calculate(args)
    print(summary(args, result))
    print(waits_of(result))
    print(counts_of(args, result))
    if args.json:
        write_json(result, args.json)
    return 0


def calculate(args):
    """The figures of a stage on the GPU. ValueError where the load or the memory does not fit."""
    gpu, shape = gpu_of(args.gpu), shape_of(args.model, args.dtype, args.tp)
    check_lengths(args.prefix + args.input[1], args.output[1], shape)
    generate = SCRIPTS[args.stage]
    longest = args.prefix + args.input[1] + args.output[1] - 1   # the last token is not computed
    check_number(args.requests, longest)
    knobs, ignored = with_memory(shape, gpu, generate, longest, flags.given_knobs(args),
                                 args.requests)
    check_mask(knobs, args.requests, longest)
    flags.say_ignored(args, ignored, "for this stage")
    requests = drawn(args.requests, args.seed, args.input, args.output, prefix=args.prefix)
    times = arrival_times(args)
    clients = min(args.clients or 0, args.requests)   # any further one never sends a request
    log = log_of(shape, gpu, generate, requests, times, clients, ENGINES[args.engine], **knobs)
    return figures(log, args.ttft, args.itl)


def check_number(requests, longest):
    """ValueError for more requests, of at most so many tokens each, than this machine keeps."""
    if requests > MOST_REQUESTS:
        raise ValueError(f"--requests must be at most {MOST_REQUESTS:,}, not {requests:,}")
    if requests * longest > MOST_TOKENS:
        raise ValueError(f"--requests must be at most {MOST_TOKENS // longest:,} of {longest:,} "
                         f"tokens each, not {requests:,}")


def check_mask(knobs, requests, longest):
    """ValueError for --attention mask, if this machine's memory could not keep its largest mask."""
    if knobs.get("attention") != "mask":
        return
    tokens = min(knobs["token_budget"], requests * longest)
    keys = min(knobs["max_kv_tokens"], min(knobs["max_batch"], requests) * longest)
    if tokens * keys > MOST_SCORES:
        raise ValueError(f"--attention mask: a pass may need a mask of {tokens:,} tokens x "
                         f"{keys:,} keys, more than {MOST_SCORES:,}")


def arrival_times(args):
    """When requests come at --rate, in seconds; None without it."""
    if args.rate is None:
        return None
    times = [*poisson(args.requests, args.rate, args.seed)]
    if times[-1] > LONGEST_CLOCK:
        raise ValueError(f"--rate {args.rate:g}: the last request would come after {times[-1]:.0e} "
                         f"seconds, and the clock ends at {LONGEST_CLOCK:.0e}")
    return times


def summary(args, result):
    text = (f"{args.model} on {args.tp} x {args.gpu}, {args.stage}, engine {args.engine}, "
            f"calculated: {result['tokens_per_s']:,.0f} tokens/s, "
            f"{result['requests_per_s']:,.2f} requests/s")
    if args.ttft or args.itl:
        text += f", {result['goodput']:,.2f} of them within the limits"
    return text


def waits_of(result):
    rows = [["ms", *result["ttft_ms"]]]
    for name, key in WAITS.items():
        rows.append([name, *(f"{value:,.1f}" for value in result[key].values())])
    return aligned(rows)


def counts_of(args, result):
    counts = [f"{result[name]:,} {name.replace('_', ' ')}" for name in COUNTS if result[name]]
    if not args.rate and not args.clients:
        counts.append("all at once")
    if result["useful"]:
        counts.append(f"{result['useful']:.0%} of the slots useful")
    return ", ".join(counts)


def write_json(result, path):
    """JSON has no NaN: null."""
    result = json.loads(json.dumps(result), parse_constant=lambda name: None)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(result, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
