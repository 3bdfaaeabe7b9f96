"""
Calculates what a stage reaches on a GPU that is not here, and whether that keeps up with a load.

    python -m lab.simulate --gpu a100 --model llama-2-7b --stage prefix --input 1024 --clients 8
"""
import json
import random
import sys
from argparse import ArgumentTypeError

from lab import flags
from lab.flags import above_0, whole
from lab.loading.stages import SCRIPTS
from lab.simulate.arrivals import check_lengths, workload
from lab.simulate.calculated import figures, simulate, with_memory
from lab.simulate.hardware import BYTES, gpu_of, shape_of
from lab.simulate.overload import judged, most_served
from lab.views.report import report


def main(argv=None):
    p = parser("lab.simulate", __doc__)
    p.add_argument("--stage", default="prefix", choices=SCRIPTS)
    p.add_argument("--clients", type=whole, help="number of clients; each waits for its answer")
    flags.add_knobs(p)
    return p.run(run_stage, argv)


def run_stage(args):
    """Prints what a stage reaches on the GPU and, at a rate, whether it can keep up."""
    flags.check_path(args.json, "--json")
    if args.clients and args.rate:
        raise ValueError("--rate and --clients exclude each other")
    gpu, shape = gpu_of(args.gpu), shape_of(args.model, args.dtype, args.tp)
    check_lengths(args.input[1], args.output[1], shape)

    def made(number):
        stream = random.Random(args.seed)
        return workload([(stream.randint(*args.input), stream.randint(*args.output))
                         for _ in range(number)])

    generate, requests = SCRIPTS[args.stage], made(args.requests)
    knobs, ignored = with_memory(shape, gpu, generate, requests,
                                 flags.given_knobs(args))
    flags.say_ignored(args, ignored, "for this stage")
    trace = simulate(shape, gpu, generate, requests, args.clients, args.rate, args.seed, **knobs)
    f = figures(trace)
    print(f"{args.model} on {args.tp} x {args.gpu}, calculated: "
          f"{f['tokens_per_s']:,.0f} tokens/s; TTFT mean {f['ttft_ms']['mean']:,.0f}, p99 "
          f"{f['ttft_ms']['p99']:,.0f} ms; ITL p50 {f['itl_ms']['p50']:,.1f}, p99 "
          f"{f['itl_ms']['p99']:,.1f} ms".replace(" nan", " -"))
    if args.rate:
        served, tried = most_served(shape, gpu, generate, args.requests, made, **knobs)
        load = f["load"] = judged(requests, args.rate, served, tried)
        print(f"{load['verdict']}; {args.rate:g} requests/s are {load['times']:.2f} times what it "
              f"can serve, {served:,.2f}\n"
              f"tokens (prompts and answers): {load['offered_tokens_per_s']:,.0f} a second come, "
              f"{load['served_tokens_per_s']:,.0f} are computed, "
              f"{load['owed_tokens_per_s']:,.0f} more are owed each second")
    print(report(trace))
    write(args.json, f)
    return 0


# --- what capacity.py needs, too ------------------------------------------------------------------

def parser(module, doc):
    p = flags.Parser(prog=f"python -m {module}", description=doc.strip().splitlines()[0])
    p.add_argument("--gpu", default="a100", help="a name, or PEAK_TFLOPS,GB_PER_S,GiB")
    p.add_argument("--model", default="llama-2-7b", help="a name, see sheets.json")
    p.add_argument("--dtype", default="float16", choices=BYTES)
    p.add_argument("--tp", type=whole, default=1, help="tensor parallel ranks")
    p.add_argument("--input", type=bounds, default="1024", help="a prompt's tokens: N or LOW:HIGH")
    p.add_argument("--output", type=bounds, default="128", help="an answer's tokens: N or LOW:HIGH")
    p.add_argument("--requests", type=whole, default=160)
    p.add_argument("--rate", type=above_0, help="requests a second, at random")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", metavar="FILE.json", help="write the figures")
    return p


def bounds(text):
    """(low, high) of N or LOW:HIGH."""
    numbers = [int(part) if part.isdecimal() else 0 for part in text.split(":")]
    if len(numbers) > 2 or not 0 < numbers[0] <= numbers[-1]:
        raise ArgumentTypeError(f"{text}: use N or LOW:HIGH, whole numbers of at least 1")
    return numbers[0], numbers[-1]


def write(path, content):
    """JSON, which has no NaN: null."""
    if path:
        content = json.loads(json.dumps(content), parse_constant=lambda name: None)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
