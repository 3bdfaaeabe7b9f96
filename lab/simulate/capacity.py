"""
Beyond one machine: replicas of a model behind a router, and how many of them a load needs.

    requests -> router -> replicas: the prefix stage's scheduler, --tp GPUs and a clock each

Requests are independent, so replicas share nothing, and all depends on the router. `round-robin`
takes turns, `least-loaded` sends a request where the fewest are, and `prefix` always to the same
replica for the same first page, unless that one has many more requests than the others.

    python -m lab.simulate.capacity --rate 60 --replicas 16        TTFT and ITL with each router
    python -m lab.simulate.capacity --rate 60 --ttft 1000 --itl 50

The second finds, for 1, 2, 4 and 8 tensor parallel GPUs in a replica, the fewest replicas that keep
the p99 of TTFT and ITL below the limits, in ms. All is calculated.
"""
import sys
from bisect import bisect_left
from dataclasses import replace
from functools import partial

from generate_prefix import generate
from lab import flags
from lab.flags import whole
from lab.simulate.__main__ import load_of, parser, write
from lab.simulate.calculated import runner, with_memory
from lab.simulate.hardware import ENGINES, gpu_of, shape_of
from lab.simulate.overload import most_served, verdict
from lab.views.report import aligned, figures

PAGE_SIZE, MANY = 16, 1.25   # MANY times the mean number of requests, and 8 more, is too many
MOST = 256   # replicas to try


def round_robin(servers, request):
    return servers[int(request.name[1:]) % len(servers)]


def least_loaded(servers, request):
    return min(servers, key=lambda server: server.load)


def by_prefix(servers, request):
    home = servers[hash(tuple(request.prompt[:PAGE_SIZE])) % len(servers)]
    most = MANY * sum(server.load for server in servers) / len(servers) + 8
    return least_loaded(servers, request) if home.load > most else home


ROUTERS = {"round-robin": round_robin, "least-loaded": least_loaded, "prefix": by_prefix}


def measuring(args, shape, gpu):
    """A function: row(number of replicas, router) is what the table and --json say of them."""
    made, times, longest = load_of(args, shape)
    knobs, _ = with_memory(shape, gpu, generate, longest, {}, args.memory, args.max_kv)
    server = partial(runner, shape, gpu, generate, ENGINES[args.engine], **knobs)
    served, tried = most_served(server(), made, len(times), knobs["max_batch"], least=1000)

    def row(number, router):
        f = figures(server(number, ROUTERS[router])(partial(made, len(times)), times))
        ratio = args.rate / (number * served)
        return {**{f"{name}_{q}": f[f"{name}_ms"][q] for name in ("ttft", "itl")
                   for q in ("p50", "p99")},
                "saved_tokens": f["saved_tokens"], "times": ratio, "verdict": verdict(ratio, tried)}

    return row


def fewest(row, router, ttft, itl):
    """
    (number, its row) of the fewest replicas that keep up, and keep two limits on the p99, in ms.
    The number is above MOST if even these do not; the row is then that of MOST.
    """
    rows = {}

    def good(number):
        found = rows[number] = row(number, router)
        # without a second token, ITL is NaN, which is not above the limit
        return (found["verdict"] == "keeps up" and found["ttft_p99"] <= ttft
                and not found["itl_p99"] > itl)

    number = 1 + bisect_left(range(1, MOST + 1), True, key=good)
    return number, rows[min(number, MOST)]


# --- the command ----------------------------------------------------------------------------------

def main(argv=None):
    p = parser("lab.simulate.capacity", __doc__)
    p.set_defaults(trace=None, stages=None)
    p.add_argument("--replicas", type=whole, default=4, help="copies of the model")
    p.add_argument("--router", choices=ROUTERS, help="default: all of them, in turn")
    return p.run(run_replicas, argv)


def run_replicas(args):
    """Prints a row for each router; with limits, one for each number of GPUs in a replica."""
    if args.rate is None:
        raise ValueError("--rate is missing: the requests that come in a second")
    if (args.ttft is None) != (args.itl is None):
        raise ValueError("--ttft and --itl belong together: give both limits, or none")
    flags.check_path(args.json, "--json")
    gpu, shape = gpu_of(args.gpu), shape_of(args.model, args.dtype, args.tp)
    if args.ttft:
        rows = [*of_limits(args, gpu, replace(shape, tp=1))]
    else:
        row = measuring(args, shape, gpu)
        rows = [{"router": router, **row(args.replicas, router)}
                for router in ([args.router] if args.router else ROUTERS)]
    if rows:
        print("calculated; waits in ms, of the median and of the p99")
        print(aligned([rows[0].keys(), *([f"{cell:,.2f}" if isinstance(cell, float) else cell
                                          for cell in row.values()] for row in rows)]))
    write(args.json, {"calculated": True, "rows": rows})
    return 0


def of_limits(args, gpu, one_gpu):
    flags.say_ignored(args, [name for name, default in (("replicas", 4), ("tp", 1))
                             if getattr(args, name) != default], "with limits")
    for tp in 1, 2, 4, 8:
        try:
            shape = replace(one_gpu, tp=tp)
            shape.room(gpu, args.memory)
        except ValueError as error:
            print(f"no row for --tp {tp}: {error}")
            continue
        row = measuring(args, shape, gpu)
        number, found = fewest(row, args.router or "least-loaded", args.ttft, args.itl)
        yield {"--tp": tp, "replicas": number if number <= MOST else f"more than {MOST}",
               "GPUs": tp * number if number <= MOST else "-", **found}


if __name__ == "__main__":
    sys.exit(main())
