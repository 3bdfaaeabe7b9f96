"""
Beyond one machine: replicas of a model behind a router, and how many of them a load needs.

    requests -> router -> replicas: the prefix stage's scheduler, --tp GPUs and a clock each

Requests are independent, so replicas share nothing, and all depends on the router. `round-robin`
takes turns, `least-loaded` sends a request where the fewest are, and `prefix` always to the same
replica for the same first page, unless that one has many more requests than the others.

    python -m lab.simulate.capacity --rate 60 --replicas 16        TTFT and ITL with each router
    python -m lab.simulate.capacity --rate 60 --ttft 1000 --itl 50

The second finds, for 1, 2, 4 and 8 tensor parallel GPUs in a replica, the fewest replicas that keep
the p99 of TTFT and ITL below the limits, in ms. All is calculated; no finished request is kept.
"""
import math
import random
import sys
from bisect import bisect_left
from dataclasses import replace
from functools import partial

from generate_prefix import PrefixScheduler
from lab import flags
from lab.flags import above_0, whole
from lab.loading.stages import SCRIPTS
from lab.simulate.__main__ import parser, write
from lab.simulate.arrivals import check_lengths, made_up, poisson
from lab.simulate.calculated import Stream, counted
from lab.simulate.hardware import gpu_of, shape_of
from lab.simulate.overload import most_served, verdict
from lab.views.report import aligned, percentile
from request import Request, prepare

PAGE_SIZE, MANY = 16, 1.25   # MANY times the mean number of requests, and 8 more, is too many
KNOBS = {"max_batch": 256, "token_budget": 2048}
MOST = 256   # replicas to try


class Replica:
    """
    tp GPUs with one scheduler. now: seconds on its clock; spans: {"ttft_ms": [...], "itl_ms":
    [...]}, to which each token adds how long it was waited for.
    """

    def __init__(self, shape, gpu, spans, pages, max_batch, token_budget):
        self.shape, self.gpu, self.spans, self.now = shape, gpu, spans, 0.0
        self.scheduler = PrefixScheduler(max_batch, token_budget, pages, PAGE_SIZE)
        self.last = {}   # request -> time of its last token, or of its arrival

    def add(self, request, time):
        self.now = max(self.now, time)   # if it was idle
        self.last[request] = time
        self.scheduler.add(request)

    def step(self):
        """A step of the prefix stage, for which the clock moves on."""
        plan = self.scheduler.schedule(0)   # only requests that have arrived are in the queue
        batch = Stream(plan)
        self.now += self.shape.seconds(self.gpu, *counted(batch))
        self.scheduler.update(plan, [0] * len(batch.sampled))
        for request in batch.sampled:
            name = "itl_ms" if len(request.generated) > 1 else "ttft_ms"
            self.spans[name].append((self.now - self.last[request]) * 1e3)
            self.last[request] = self.now
            if request.finished:
                del self.last[request]

    def run_until(self, time):
        while self.last and self.now < time:
            self.step()


def round_robin(replicas, request, number):
    return replicas[number % len(replicas)]


def least_loaded(replicas, request, number):
    return min(replicas, key=lambda replica: len(replica.last))


def by_prefix(replicas, request, number):
    home = replicas[hash(tuple(request.prompt[:PAGE_SIZE])) % len(replicas)]
    most = MANY * sum(len(replica.last) for replica in replicas) / len(replicas) + 8
    return least_loaded(replicas, request, number) if len(home.last) > most else home


ROUTERS = {"round-robin": round_robin, "least-loaded": least_loaded, "prefix": by_prefix}


def requests_of(args, shape, number):
    """So many requests, one after another. All of a group begin alike."""
    check_lengths(args.prefix + args.input[1], args.output[1], shape)
    stream = random.Random(args.seed)
    for i in range(number):
        group, length = stream.randrange(args.groups), stream.randint(*args.input)
        prompt = made_up(group, args.prefix) + made_up(i, length)
        yield Request(prompt, stream.randint(*args.output), name=f"r{i}")


def serve(args, shape, gpu, number, router):
    """
    Runs all requests on `number` replicas. Returns ({"ttft_ms": [...], "itl_ms": [...]}, tokens
    that were found in pages).
    """
    spans, longest = {"ttft_ms": [], "itl_ms": []}, args.prefix + args.input[1] + args.output[1]
    # more pages than all requests can fill change nothing, but take time to make
    pages = min(shape.room(gpu) // PAGE_SIZE, args.requests * -(-longest // PAGE_SIZE))
    replicas = [Replica(shape, gpu, spans, pages, **KNOBS) for _ in range(number)]
    coming = zip(poisson(args.requests, args.rate, args.seed),
                 requests_of(args, shape, args.requests))
    for i, (time, request) in enumerate(coming):
        for replica in replicas:
            replica.run_until(time)
        prepare([request], shape)
        ROUTERS[router](replicas, request, i).add(request, time)
    for replica in replicas:
        replica.run_until(math.inf)
    return spans, sum(replica.scheduler.pages.counts["saved_tokens"] for replica in replicas)


def measuring(args, shape, gpu):
    """A function: row(number of replicas, router) is what the table and --json say of them."""
    served, tried = most_served(shape, gpu, SCRIPTS["prefix"], args.requests,
                                partial(requests_of, args, shape),
                                pages=shape.room(gpu) // PAGE_SIZE, **KNOBS)   # by one replica

    def row(number, router):
        spans, saved = serve(args, shape, gpu, number, router)
        waits = {f"{name}_p{q}": percentile(spans[f"{name}_ms"], q) for name in ("ttft", "itl")
                 for q in (50, 99)}
        times = args.rate / (number * served)
        return {**waits, "saved_tokens": saved, "times": times, "verdict": verdict(times, tried)}

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
    p.add_argument("--replicas", type=whole, default=4, help="copies of the model")
    p.add_argument("--router", choices=ROUTERS, help="default: all of them, in turn")
    p.add_argument("--prefix", type=partial(whole, least=0), default=0,
                   help="tokens before each input that a group has in common")
    p.add_argument("--groups", type=whole, default=1, help="groups with a common beginning")
    p.add_argument("--ttft", type=above_0, help="a limit on the p99, in ms: asks how many GPUs")
    p.add_argument("--itl", type=above_0, help="a limit on the p99, in ms")
    return p.run(run_replicas, argv)


def run_replicas(args):
    """Prints a row for each router; with limits, one for each number of GPUs in a replica."""
    if args.rate is None:
        raise ValueError("--rate is missing: the requests that come in a second")
    if (args.ttft is None) != (args.itl is None):
        raise ValueError("--ttft and --itl belong together: give both limits, or none")
    flags.check_path(args.json, "--json")
    rows = [*(of_routers if args.ttft is None else of_limits)(args, gpu_of(args.gpu))]
    if rows:
        print("calculated; waits in ms, of the median and of the p99")
        print(aligned([rows[0].keys(), *([f"{cell:,.2f}" if isinstance(cell, float) else cell
                                          for cell in row.values()] for row in rows)]))
    write(args.json, {"calculated": True, "rows": rows})
    return 0


def of_routers(args, gpu):
    row = measuring(args, shape_of(args.model, args.dtype, args.tp), gpu)
    for router in [args.router] if args.router else ROUTERS:
        yield {"router": router, **row(args.replicas, router)}


def of_limits(args, gpu):
    flags.say_ignored(args, [name for name, default in (("replicas", 4), ("tp", 1))
                             if getattr(args, name) != default], "with limits")
    one_gpu = shape_of(args.model, args.dtype)
    for tp in 1, 2, 4, 8:
        try:
            shape = replace(one_gpu, tp=tp)
            shape.room(gpu)
        except ValueError as error:
            print(f"no row for --tp {tp}: {error}")
            continue
        number, found = fewest(measuring(args, shape, gpu), args.router or "least-loaded",
                               args.ttft, args.itl)
        yield {"--tp": tp, "replicas": number if number <= MOST else f"more than {MOST}",
               "GPUs": tp * number if number <= MOST else "-", **found}


if __name__ == "__main__":
    sys.exit(main())
