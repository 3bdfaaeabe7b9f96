"""
Calculates what a stage reaches on a GPU that is not here, and whether that keeps up with a load.

    python -m beyond.simulate --gpu a100 --model llama-2-7b --stage paged --input 1024 --clients 8
"""
import random
import sys

from beyond.arrivals import check_lengths, workload
from beyond.calculated import figures, simulate, with_memory
from beyond.commands import check, parser, write
from beyond.fairness import SCHEDULERS
from beyond.hardware import gpu_of, shape_of
from beyond.overload import TOO_SHORT, advice, judged, most_served, tries
from loading.stages import SCRIPTS
from toolbox import flags
from views.report import report


def main(argv=None):
    p = parser("beyond.simulate", __doc__)
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


if __name__ == "__main__":
    sys.exit(main())
