"""
How many GPUs? Replicas behind a router, calculated.

    python -m beyond.capacity --rate 60 --replicas 16        TTFT and ITL with each router
    python -m beyond.capacity --rate 60 --ttft 1000 --itl 50

The second finds, for 1, 2, 4 and 8 tensor parallel GPUs in a replica, the fewest replicas that keep
the p99 of TTFT and ITL below the limits, in ms. beyond/replicas.py is what it runs.
"""
import sys

from beyond import simulate as s
from beyond.hardware import gpu_of, shape_of
from beyond.replicas import ROUTERS, serve
from toolbox import flags
from toolbox.validate import at_least_1, is_whole
from views.report import aligned


def figures(f):
    """What --json holds of a run of `serve`: a dict of numbers."""
    waits = {f"{name}_p{q}": f[f"{name}_ms"].percentile(q) for name in ("ttft", "itl")
             for q in (50, 99)}
    return {**waits, "saved_tokens": f["saved_tokens"], "grows": f["grows"]}


HEAD = ["TTFT p50 ms", "p99", "ITL p50 ms", "p99", "tokens saved", "queue"]


def show(head, rows):
    """Prints a table: cells under `head`, then a run's figures under HEAD."""
    lines = []
    for *cells, f in rows:
        *waits, saved, grows = figures(f).values()
        lines.append([*cells, *(f"{wait:,.1f}" for wait in waits), f"{saved:,}",
                      "grows without end" if grows else "stable"])
    print(aligned([[*head, *HEAD], *lines]))


def fewest(shape, gpu, args):
    """(replicas, figures) that keep --ttft and --itl, p99 in ms; by doubling, then bisection."""
    def good(number):
        found[number] = f = serve(shape, gpu, args, number, args.router)
        return (not f["grows"] and f["ttft_ms"].percentile(99) <= args.ttft
                and not f["itl_ms"].percentile(99) > args.itl)   # none: NaN, which is not above it

    found, low, high = {}, 0, 1
    while not good(high):
        if high == args.most:
            return None, found[high]
        low, high = high, min(2 * high, args.most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return high, found[high]


def run(args):
    s.check(args)
    if (args.ttft is None) != (args.itl is None):
        raise ValueError("--ttft and --itl belong together: give both limits, or none")
    limits = args.ttft is not None
    for name in ("ttft", "itl") if limits else ():
        if not getattr(args, name) >= 0:   # NaN, too
            raise ValueError(f"--{name} must be a number of at least 0, not {getattr(args, name)}")
    if not is_whole(args.prefix, 0):
        raise ValueError(f"--prefix must be a whole number of at least 0, not {args.prefix}")
    flags.say_ignored(args, [name for name, default in (("replicas", None), ("tp", 1))
                           if limits and getattr(args, name) != default], "with limits")
    args.replicas = 4 if args.replicas is None else args.replicas
    at_least_1(**{f"--{name}": getattr(args, name)
                  for name in ("requests", "replicas", "groups", "most")})
    if args.rate is None:
        raise ValueError("--rate is missing: the requests that come in a second")
    gpu, rows = gpu_of(args.gpu), []
    if not limits:
        head, shape = ["calculated, router"], shape_of(args.model, args.dtype, args.tp)
        for router in [args.router] if args.router else ROUTERS:
            rows.append([router, serve(shape, gpu, args, args.replicas, router)])
    else:
        head, args.router = ["calculated", "replicas", "GPUs"], args.router or "least-loaded"
        for tp in 1, 2, 4, 8:
            try:
                shape = shape_of(args.model, args.dtype, tp)
                shape.room(gpu)
            except ValueError as error:
                print(f"--tp {tp}: {error}")
                continue
            number, f = fewest(shape, gpu, args)
            many = [number, tp * number] if number else [f"more than {args.most}", "–"]
            rows.append([f"--tp {tp}", *many, f])
    show(head, rows)
    s.write(args.json, {"calculated": True, "rows": [
        {**dict(zip(head, cells)), **figures(f)} for *cells, f in rows]})
    return 0


def parser():
    p = s.parser("python -m beyond.capacity", __doc__)
    p.add_argument("--replicas", type=int, help="copies of the model (default: 4)")
    p.add_argument("--router", choices=ROUTERS, help="default: all of them, in turn")
    p.add_argument("--prefix", type=int, default=0, help="tokens that a group has in common")
    p.add_argument("--groups", type=int, default=1, help="groups with a common beginning")
    p.add_argument("--ttft", type=float, help="a limit on the p99, in ms: asks how many GPUs")
    p.add_argument("--itl", type=float, help="a limit on the p99, in ms")
    p.add_argument("--most", type=int, default=256, help="replicas to try")
    return p


if __name__ == "__main__":
    sys.exit(parser().run(run))
