"""
Beyond one machine: replicas of a model behind a router, and how many of them a load needs.

    requests -> router -> replicas: a stage 7 scheduler, --tp GPUs and a clock each

Requests are independent, so replicas share nothing, and all depends on the router. `round-robin`
takes turns, `least-loaded` sends a request where the fewest are, and `prefix` always to the same
replica for the same first page, unless that one has many more requests than the others.

    python -m beyond.capacity --rate 60 --replicas 16        TTFT and ITL with each router
    python -m beyond.capacity --rate 60 --ttft 1000 --itl 50

The second finds, for 1, 2, 4 and 8 tensor parallel GPUs in a replica, the fewest replicas that keep
the p99 of TTFT and ITL below the limits, in ms. All is calculated; no finished request is kept.
"""
import math
import random
import sys
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from beyond import simulate as s
from beyond.arrivals import bounds, check_prompt, cut_short, digits
from beyond.hardware import gpu_of, shape_of
from loading.stages import SCRIPTS
from paging import PagedScheduler, Pages
from request import Request, prepare
from toolbox import flags
from toolbox.validate import at_least_1, is_whole
from views.report import aligned

PAGE_SIZE, MANY = 16, 1.25   # MANY times the mean number of requests, and 8 more, is too many
KNOBS = {"max_batch": 256, "token_budget": 2048}


@dataclass(frozen=True)
class Load:
    """Requests a second, at random; tokens as N or LOW:HIGH; `prefix` of them alike in a group."""
    rate: float
    input: str = "1024"
    output: str = "128"
    requests: int = 160
    seed: int = 0
    groups: int = 1
    prefix: int = 0


class Replica:
    """tp GPUs with one scheduler. now: seconds; spans: {"ttft_ms": Spread, "itl_ms": Spread}"""

    def __init__(self, shape, gpu, spans, most=math.inf, max_batch=256, token_budget=2048):
        self.shape, self.gpu, self.spans, self.now = shape, gpu, spans, 0.0
        pages = Pages(min(shape.room(gpu) // PAGE_SIZE, most), PAGE_SIZE)
        self.scheduler = PagedScheduler(max_batch, token_budget, pages)
        self.last = {}   # request -> time of its last token, or of its arrival

    def add(self, request, time):
        self.now = max(self.now, time) if not self.last else self.now
        self.last[request] = time
        self.scheduler.add(request)

    def step(self):
        """One step, as in beyond/simulate.py. Its requests that got a token are in `spans`."""
        plan = self.scheduler.schedule(0)   # only requests that have arrived are in the queue
        batch = s.Stream(plan)
        self.now += s.price(self.shape, self.gpu, batch)[0]
        self.scheduler.update(plan, [0] * len(batch.sampled))
        for request in batch.sampled:
            name = "itl_ms" if len(request.generated) > 1 else "ttft_ms"
            self.spans[name].add((self.now - self.last[request]) * 1e3)
            self.last[request] = self.now
            if request.finished:
                del self.last[request]

    def run_until(self, time):
        while self.last and self.now < time:
            self.step()


class Spread(Counter):
    """Percentiles of any number of times in bounded memory: bins of 1%."""

    def add(self, value):
        self[round(math.log(max(value, 1e-3)) * 100)] += 1

    def percentile(self, q):
        below = accumulate((self[name] for name in sorted(self)))
        found = (name for name, n in zip(sorted(self), below) if n >= q / 100 * self.total())
        return math.exp(next(found, math.nan) / 100)


def round_robin(replicas, request, number):
    return replicas[number % len(replicas)]


def least_loaded(replicas, request, number):
    return min(replicas, key=lambda replica: len(replica.last))


def by_prefix(replicas, request, number):
    home = replicas[hash(tuple(request.prompt[:PAGE_SIZE])) % len(replicas)]
    most = MANY * sum(len(replica.last) for replica in replicas) / len(replicas) + 8
    return least_loaded(replicas, request, number) if len(home.last) > most else home


ROUTERS = {"round-robin": round_robin, "least-loaded": least_loaded, "prefix": by_prefix}


def requests_of(load, vocab_size, number=None):
    """(seconds, Request), one after another: Poisson. All requests of a group begin alike."""
    base = max(2, min(vocab_size // 2, 1000))   # own ids begin above it
    stream, time = random.Random(load.seed), 0.0
    (low, high), (least, most) = bounds("input", load.input), bounds("output", load.output)
    for i in range(number or load.requests):
        group, length = stream.randrange(load.groups), stream.randint(low, high)
        own = [base + i % base, *digits(i // base, base)] + [0] * length
        prompt = [group] * load.prefix + own[:length]
        yield time, Request(prompt, stream.randint(least, most), name=f"r{i}")
        time += stream.expovariate(load.rate)


def check_load(load, shape):
    """ValueError for prompts that do not fit the model, or more groups than it has token ids."""
    check_prompt(load.prefix + bounds("input", load.input)[1], shape)
    if load.prefix and load.groups > shape.vocab_size:   # a group is a token id
        raise ValueError(f"--groups must be at most {shape.vocab_size}, the size of the model's "
                         f"vocabulary, not {load.groups}")


@lru_cache
def most_of_one(shape, gpu, load, number, knobs):
    """Requests/s that one replica serves at most."""
    requests = [request for _, request in requests_of(load, shape.vocab_size, number)]
    return s.most_served(shape, gpu, SCRIPTS["paged"], requests,
                         pages=shape.room(gpu) // PAGE_SIZE, **dict(knobs))


def serve(shape, gpu, load, number, router, **knobs):
    """
    Runs all requests on `number` replicas. Returns {"ttft_ms": Spread, "itl_ms": Spread,
    "saved_tokens": number, "times": of what they can serve, "verdict": see simulate.verdict}.
    """
    check_load(load, shape)
    knobs = KNOBS | knobs
    spans = {"ttft_ms": Spread(), "itl_ms": Spread()}
    longest = load.prefix + bounds("input", load.input)[1] + bounds("output", load.output)[1]
    # more pages than all requests can fill change nothing, but take time to make
    most = load.requests * -(-min(longest, shape.block_size) // PAGE_SIZE)
    replicas = [Replica(shape, gpu, spans, most, **knobs) for _ in range(number)]
    for i, (time, request) in enumerate(requests_of(load, shape.vocab_size)):
        for replica in replicas:
            replica.run_until(time)
        request, = prepare([request], shape)
        ROUTERS[router](replicas, request, i).add(request, time)
    for replica in replicas:
        replica.run_until(math.inf)
    tried = s.tries(load.requests, SCRIPTS["paged"], **knobs)
    served = number * most_of_one(shape, gpu, replace(load, rate=1.0), tried, tuple(knobs.items()))
    return {**spans, "saved_tokens": sum(r.scheduler.counts["saved_tokens"] for r in replicas),
            "times": load.rate / served, "verdict": s.verdict(load.rate / served, tried)}


# --- the command ----------------------------------------------------------------------------------

def figures(f):
    """What --json holds of a run of `serve`: a dict of numbers, and the verdict."""
    waits = {f"{name}_p{q}": f[f"{name}_ms"].percentile(q) for name in ("ttft", "itl")
             for q in (50, 99)}
    return {**waits, "saved_tokens": f["saved_tokens"], "verdict": f["verdict"]}


HEAD = ["TTFT p50 ms", "p99", "ITL p50 ms", "p99", "tokens saved", "verdict"]


def show(head, rows):
    """Prints a table: cells under `head`, then a run's figures under HEAD."""
    lines = []
    for *cells, f in rows:
        *waits, saved, verdict = figures(f).values()
        lines.append([*cells, *(f"{wait:,.1f}" for wait in waits), f"{saved:,}", verdict])
    print(aligned([[*head, *HEAD], *lines]))


def fewest(shape, gpu, load, router, ttft, itl, most=256):
    """(replicas, figures) that keep two limits on the p99, in ms; by doubling, then bisection."""
    def good(number):
        found[number] = f = serve(shape, gpu, load, number, router)
        return (f["verdict"] == "keeps up" and f["ttft_ms"].percentile(99) <= ttft
                and not f["itl_ms"].percentile(99) > itl)   # none: NaN, which is not above it

    found, low, high = {}, 0, 1
    while not good(high):
        if high == most:
            return None, found[high]
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return high, found[high]


def check(args):
    """ValueError for bad flags. Returns whether limits were given."""
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
    return limits


def run(args):
    limits, gpu, rows = check(args), gpu_of(args.gpu), []
    load = Load(args.rate, args.input, args.output, args.requests, args.seed, args.groups,
                args.prefix)
    shape = shape_of(args.model, args.dtype, 1 if limits else args.tp)
    check_load(load, shape)
    if note := cut_short([request for _, request in requests_of(load, shape.vocab_size)], shape):
        print(note)
    if not limits:
        head = ["calculated, router"]
        for router in [args.router] if args.router else ROUTERS:
            rows.append([router, serve(shape, gpu, load, args.replicas, router)])
    for tp in (1, 2, 4, 8) if limits else ():
        head = ["calculated", "replicas", "GPUs"]
        try:
            shape = shape_of(args.model, args.dtype, tp)
            shape.room(gpu)
        except ValueError as error:
            print(f"--tp {tp}: {error}")
            continue
        number, f = fewest(shape, gpu, load, args.router or "least-loaded", args.ttft, args.itl,
                           args.most)
        many = [number, tp * number] if number else [f"more than {args.most}", "–"]
        rows.append([f"--tp {tp}", *many, f])
    if rows:
        show(head, rows)
    else:
        print(f"no table: a replica of {args.model} fits on none of 1, 2, 4 and 8 x {args.gpu}")
    for *_, f in rows[-1:]:
        if f["verdict"] == s.TOO_SHORT:
            print(s.advice(f["times"]))
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
