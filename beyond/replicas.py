"""
Beyond one machine: replicas of a model behind a router, calculated.

    requests -> router -> replicas: a stage 7 scheduler, --tp GPUs and a clock each

Requests are independent, so replicas share nothing, and all depends on the router. `round-robin`
takes turns, `least-loaded` sends a request where the fewest are, and `prefix` always to the same
replica for the same first page, unless that one has many more requests than the others.

Each replica drives the real PagedScheduler and prices a plan with the counts of stage 7's layout;
a test compares both. It builds no tensors, and keeps no finished request.

    python -m beyond.capacity --model llama-3.1-8b --rate 60 --replicas 16 --requests 2000
"""
import math
import random
from collections import Counter
from itertools import accumulate

from beyond.arrivals import bounds, check_prompt, digits, ever_more
from paging import PagedScheduler, Pages
from request import Request, indices_due, prepare

PAGE_SIZE, MANY = 16, 1.25   # MANY times the mean number of requests, and 8 more, is too many


class Replica:
    """tp GPUs with one scheduler. now: seconds; spans: {"ttft_ms": Spread, "itl_ms": Spread}"""

    def __init__(self, shape, gpu, spans, max_batch=256, token_budget=2048, most=math.inf):
        self.shape, self.gpu, self.spans, self.now = shape, gpu, spans, 0.0
        pages = Pages(min(shape.room(gpu) // PAGE_SIZE, most), PAGE_SIZE)
        self.scheduler = PagedScheduler(max_batch, token_budget, pages)
        self.last = {}   # request -> time of its last token, or of its arrival

    def add(self, request, time):
        self.now = max(self.now, time) if not self.last else self.now
        self.last[request] = time
        self.scheduler.add(request)

    def step(self):
        """One step, as in generate_paged.generate. Returns the requests that got a token."""
        plan = self.scheduler.schedule(0)   # only requests that have arrived are in the queue
        slots, keys = sum(n for _, n in plan), sum(r.computed + n for r, n in plan)
        scores = sum(n * (r.computed + n) for r, n in plan)
        sampled = [plan[i][0] for i in indices_due(plan)]
        parts = self.shape.parts(slots, len(sampled), scores, keys)
        self.now += self.shape.seconds(self.gpu, parts, slots)
        self.scheduler.update(plan, [0] * len(sampled))
        for request in sampled:
            name = "itl_ms" if len(request.generated) > 1 else "ttft_ms"
            self.spans[name].add((self.now - self.last[request]) * 1e3)
            self.last[request] = self.now
            if request.finished:
                del self.last[request]
        return sampled

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


def requests_of(args, shape):
    """(seconds, Request), one after another: Poisson. All requests of a group begin alike."""
    base = max(2, min(shape.vocab_size // 2, 1000))   # own ids begin above it
    stream, time = random.Random(args.seed), 0.0
    (low, high), (least, most) = bounds("input", args.input), bounds("output", args.output)
    if args.prefix and args.groups > shape.vocab_size:   # a group is a token id
        raise ValueError(f"--groups must be at most {shape.vocab_size}, the size of the model's "
                         f"vocabulary, not {args.groups}")
    for number in range(args.requests):
        group = stream.randrange(args.groups)
        length = stream.randint(low, high)
        check_prompt(args.prefix + length, shape)
        own = [base + number % base, *digits(number // base, base)] + [0] * length
        prompt = [group] * args.prefix + own[:length]
        yield time, Request(prompt, stream.randint(least, most), name=f"r{number}")
        time += stream.expovariate(args.rate)


def serve(shape, gpu, args, number, router, **knobs):
    """Runs all requests on `number` replicas. Returns {"ttft_ms": Spread, "itl_ms": Spread, ...}"""
    spans = {"ttft_ms": Spread(), "itl_ms": Spread()}
    longest = args.prefix + bounds("input", args.input)[1] + bounds("output", args.output)[1]
    # more pages than all requests can fill change nothing, but take time to make
    most = args.requests * -(-min(longest, shape.block_size) // PAGE_SIZE)
    replicas = [Replica(shape, gpu, spans, most=most, **knobs) for _ in range(number)]
    waiting = []   # requests without a token, at the half and at the end of all arrivals
    for i, (time, request) in enumerate(requests_of(args, shape)):
        for replica in replicas:
            replica.run_until(time)
        request, = prepare([request], shape)
        ROUTERS[router](replicas, request, i).add(request, time)
        if i in (args.requests // 2, args.requests - 1):
            waiting.append(sum(not r.generated for replica in replicas for r in replica.last))
    for replica in replicas:
        replica.run_until(math.inf)
    saved = sum(replica.scheduler.counts["saved_tokens"] for replica in replicas)
    return {**spans, "saved_tokens": saved,
            "grows": ever_more(args.requests, waiting[0], waiting[-1])}
