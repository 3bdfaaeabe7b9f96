"""
Any GPU, calculated: the real stages against the clock of a machine that is not here.

Batching pays because decoding leaves a GPU's arithmetic idle, which a CPU cannot show. But a stage
is bookkeeping, and its layouts count what each pass computes, reads and copies. So `generate` runs
unchanged, on a model that computes nothing:

    generate()  ->  layout  ->  CalculatedModel: counts, moves its clock on, returns zeros

Stages 6 and 7 are all bookkeeping: their counts follow from the plan, so their schedulers run alone
and no tensor is made. A test compares both ways to the last digit.

beyond/hardware.py says how long a pass takes. docs/gpu.md says how far to trust it: all figures are
calculated, none is measured.

    python -m beyond.simulate --gpu a100 --model llama-2-7b --stage paged --input 1024 --clients 8
    python -m beyond.simulate --published       what others measured, beside what is calculated
"""
import bisect
import json
import math
import random
import sys

import torch

from beyond import published
from beyond.arrivals import Arrival, arrivals, check_prompt, cut_short, lengths_of, workload
from beyond.fairness import SCHEDULERS
from beyond.hardware import BYTES, GiB, gpu_of, shape_of
from generate_paged import pool_size
from loading.stages import SCRIPTS
from paging import PagedScheduler, Pages
from request import indices_due, prepare
from scheduler import Scheduler
from toolbox import flags
from toolbox.trace import Trace
from toolbox.validate import at_least_1, check_pool
from views.report import mean, percentile, report, totals


class CalculatedModel:
    """Takes the place of a GPT in `generate`. now: seconds; ends: when requests finished."""

    def __init__(self, shape, gpu):
        self.config, self.gpu, self.device = shape, gpu, torch.device("cpu")
        self.now, self.passes, self.ends = 0.0, [], []
        # all layers' keys of a token, without memory: a cache that holds it knows its size
        self.key = torch.empty(1, shape.kv_bytes // 2, device="meta", dtype=torch.int8)

    def __call__(self, tokens, positions, attend, rows):
        batch = attend.__self__   # the layout
        pool = getattr(batch, "pool", None)
        cache = batch.plan[0][0].kv if pool is None else pool
        if cache is not None:
            cache.buffers(0, self.key, self.key)
        self.compute(batch)
        return torch.zeros(len(batch.sampled), 1)

    def compute(self, batch):
        """Moves the clock on by a pass over what the layout `batch` counts."""
        seconds, parts = price(self.config, self.gpu, batch)
        self.passes.append((self.now, seconds, parts))
        self.now += seconds

    def on_token(self, request, token=0, logits=None):
        request.token_times[-1] = self.now
        if request.finished:
            self.ends.append(self.now)


def price(shape, gpu, batch):
    """(seconds, parts) of a pass over what the layout `batch` counts."""
    counts, slots, sampled = batch.cost(), batch.tokens.numel(), len(batch.sampled)
    keys = sum(first + n for (_, n), first in zip(batch.plan, batch.starts) if n)
    # a GPU's kernel reads pages through the block table, and copies none
    copied = 0 if hasattr(batch, "pool") else counts.get("copied_bytes", 0)
    parts = shape.parts(slots, sampled, counts["score_entries"],
                        keys + counts.get("padded_keys", 0), copied)
    return shape.seconds(gpu, parts, slots, sampled), parts


class Stream:
    """What stages 6 and 7 count of a plan: N tokens of several requests in one stream (N,)."""

    def __init__(self, plan):
        self.plan, self.starts = plan, [request.computed for request, _ in plan]
        self.sampled = [plan[i][0] for i in indices_due(plan)]
        self.tokens = torch.empty(sum(n for _, n in plan), device="meta")   # (N,), without memory

    def cost(self):
        return {"score_entries": sum(n * (start + n)
                                     for (_, n), start in zip(self.plan, self.starts))}


def ragged(requests, config, max_batch=8, token_budget=64, max_kv_tokens=None):
    return Trace("ragged, varlen", requests), Scheduler(max_batch, token_budget, max_kv_tokens)


def paged(requests, config, max_batch=8, token_budget=64, pages=None, page_size=16, policy="fcfs",
          share_prefixes=True):
    check_pool(max_batch, pages, page_size, policy, config.block_size)
    enough = pool_size(requests, len(requests) if pages else max_batch, page_size)
    pages = Pages(min(pages or enough, enough), page_size)
    make = PagedScheduler if policy == "fcfs" else policy
    scheduler = make(max_batch, token_budget, pages, share_prefixes=share_prefixes)
    return Trace("paged", requests, scheduler.counts), scheduler


BOOKS = {SCRIPTS["ragged"]: ragged, SCRIPTS["paged"]: paged}


def run_books(generate, model, requests, **knobs):
    """The loop of stage 6 or 7 with the stage's own scheduler, and nothing else. The trace."""
    requests = prepare(requests, model.config)
    trace, scheduler = BOOKS[generate](requests, model.config, **knobs)
    for request in requests:
        scheduler.add(request)
    step = 0
    while scheduler.busy:
        step = scheduler.next_step(step)
        plan = scheduler.schedule(step)
        batch = Stream(plan)
        model.compute(batch)
        trace.record_pass(step, batch, 0.0)
        scheduler.update(plan, [0] * len(batch.sampled))
        for request in batch.sampled:
            request.token_times.append(model.now)
            request.token_steps.append(step)
            model.on_token(request)
        step += 1
    return trace


def simulate(shape, gpu, generate, requests, clients=None, rate=None, seed=0, **knobs):
    """
    Runs a stage's `generate` on a calculated GPU. Returns its Trace, with times in seconds from 0;
    `trace.model.passes` has (start, seconds, parts) of each pass.

    Without `clients` and `rate`, requests arrive in steps, as they say. With one of them, a request
    afterwards has its arrival in seconds in `arrived`, and in `arrival` the step that saw it: given
    that, the real `generate` makes the same plans.
    """
    model = CalculatedModel(shape, gpu)
    if clients or rate:
        for request, arrival in zip(requests, arrivals(model, len(requests), clients, rate, seed)):
            request.arrival = arrival
    if generate in BOOKS and knobs.get("attention", "varlen") == "varlen":
        knobs.pop("attention", None)
        trace = run_books(generate, model, requests, **knobs)
    else:
        trace = generate(model, requests, on_token=model.on_token, **knobs)
    trace.model, trace.started, trace.stage = model, 0.0, f"{trace.stage}, calculated"
    trace.step_times = {}
    for record, (start, seconds, parts) in zip(trace.passes, model.passes):
        record.seconds, record.copied_bytes = seconds, parts["copies"][1] // 2   # what was priced
        trace.step_times.setdefault(record.step, start)
    steps, starts = list(trace.step_times), list(trace.step_times.values())
    for request in trace.requests:
        if isinstance(request.arrival, Arrival):
            request.arrived = request.arrival.seconds()
            request.arrival = steps[bisect.bisect_left(starts, request.arrived)]
        else:
            request.arrived = trace.arrived(request)
    trace.arrived = lambda request: request.arrived   # so that there is one TTFT only
    return trace


def spread(values):
    return {"mean": mean(values), **{f"p{q}": percentile(values, q) for q in (50, 95, 99)}}


def figures(trace):
    """What --json writes: tokens/s, passes, useful share of the slots, TTFT and ITL in ms."""
    t, counts = totals(trace), dict(trace.counts)
    ttft = [(r.token_times[0] - r.arrived) * 1e3 for r in trace.requests]
    itl = [(b - a) * 1e3 for r in trace.requests for a, b in zip(r.token_times, r.token_times[1:])]
    return {"calculated": True, "tokens_per_s": t["tokens_per_second"], "seconds": t["seconds"],
            "passes": t["forward_passes"], "useful": t["useful"] / t["slots"],
            "ttft_ms": spread(ttft), "itl_ms": spread(itl),
            "preemptions": counts.get("preemptions", 0)}


def figures_of(*args, **knobs):
    """`figures` of what `simulate` returns."""
    return figures(simulate(*args, **knobs))


# --- can it keep up? ------------------------------------------------------------------------------

TOO_SHORT, MOST_TRIED = "too short to tell", 5000


def tries(number, generate, max_batch=1, **knobs):
    """How many requests find out what is served at most; fewer where they cost more."""
    return max(min(number, MOST_TRIED), 4 * max_batch, 1000 if generate in BOOKS else 250)


def most_served(shape, gpu, generate, requests, **knobs):
    """
    Requests/s that a stage serves while others always wait: all requests come at once. A full batch
    admits one for each that leaves, so admissions are counted, after twice as many as may run. The
    first answers are shortened at random: else requests of one length would stay in step.
    """
    stream, many = random.Random(0), knobs.get("max_batch", 1)
    for request in requests[:many]:
        request.max_new_tokens = stream.randint(1, request.max_new_tokens)
    trace = simulate(shape, gpu, generate, requests, **knobs)
    admitted = {}
    for record, (start, _, _) in zip(trace.passes, trace.model.passes):
        for name, _, _ in record.work:
            admitted.setdefault(name, start)
    times = sorted(admitted.values())
    return (len(times) - 2 * many) / (times[-1] - times[2 * many - 1])


def verdict(times, tried):
    """
    Of a load so many times what can be served, which `tried` requests have found out: an error of
    at most 1.5 / sqrt(tried), 5% for 1,000. "keeps up", "overloaded" or TOO_SHORT.
    """
    if abs(times - 1) * math.sqrt(tried) < 1.5:
        return TOO_SHORT
    return "overloaded" if times > 1 else "keeps up"


def advice(times):
    """What to do where `verdict` cannot tell."""
    needed = math.ceil((1.5 / max(abs(times - 1), 1e-3)) ** 2) + 1
    return f"{TOO_SHORT}: " + (f"use --requests {needed}" if needed <= MOST_TRIED else
                               "the rate is that of the limit, within 2%")


def owed(trace, time):
    """Tokens of requests that have come by then, and that no pass has computed yet."""
    come = sum(request.kv_tokens for request in trace.requests if request.arrived <= time)
    return come - sum(record.useful for record, (start, seconds, _)
                      in zip(trace.passes, trace.model.passes) if start + seconds <= time)


def judged(trace, rate, served, tried):
    """{"verdict", ...}: of a run at `rate` on a machine that serves `served` requests/s at most."""
    arrivals = [request.arrived for request in trace.requests]
    half, end = arrivals[len(arrivals) // 2], arrivals[-1]
    come = sum(request.kv_tokens for request in trace.requests)
    return {"verdict": verdict(rate / served, tried), "times": rate / served,
            "served_at_most": served, "offered_tokens_per_s": come * rate / len(arrivals),
            "served_tokens_per_s": (come - owed(trace, end)) / end if end else math.nan,
            "owed_at_half": owed(trace, half), "owed_at_end": owed(trace, end)}


def with_memory(shape, gpu, generate, requests, knobs, clients=None, rate=None):
    """
    The stage's knobs with defaults, and with as much cache as the GPU has room for. ValueError if
    the stage may come to hold more than that.
    """
    room, size = shape.room(gpu), knobs.get("page_size", 16)
    defaults = {"max_batch": 256, "token_budget": 2048, "max_kv_tokens": room,
                "pages": max(room // size, 1)}
    mine, ignored = flags.knobs_of(generate, {**defaults, **knobs})
    requests, flag = prepare(requests, shape), "max_batch"
    rows = min(mine.get(flag, 1), clients or len(requests))
    most = sum(sorted(request.kv_tokens for request in requests)[-rows:])
    if "pages" in mine:
        most = size * min(mine["pages"], pool_size(requests, rows, size))
        flag = "pages" if "pages" in knobs else "page_size"
    elif "max_kv_tokens" in mine:
        most, flag = min(most, mine["max_kv_tokens"]), "max_kv_tokens"
    elif generate is SCRIPTS["naive"]:   # a rectangle for each batch of neighbours in the queue
        starts = range(0, len(requests), 1 if clients or rate else rows)   # 1: any neighbours
        most = max(len(batch) * (max(len(r.prompt) for r in batch)
                                 + max(r.kv_tokens - len(r.prompt) for r in batch))
                   for batch in (requests[i:i + rows] for i in starts))
    if most > room and mine.get("use_cache", True):
        hint = f": lower --{flag}" if flag in knobs else ""
        raise ValueError(f"{rows} requests at once may come to hold {most:,} tokens, and the "
                         f"GPU's {gpu.memory / GiB:g} GiB have room for {room:,}{hint}")
    return mine, [name for name in ignored if name in knobs]


# --- the command ----------------------------------------------------------------------------------

def parser(prog="python -m beyond.simulate", doc=__doc__):
    p = flags.Parser(prog=prog, description=doc.strip().splitlines()[0])
    p.add_argument("--gpu", default="a100", help="a name, or PEAK_TFLOPS,GB_PER_S,GiB")
    p.add_argument("--model", default="llama-2-7b", help="a name, or a config.json")
    p.add_argument("--dtype", default="float16", choices=BYTES)
    p.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    p.add_argument("--input", default="1024", help="tokens of a prompt, N or LOW:HIGH")
    p.add_argument("--output", default="128", help="tokens of an answer, N or LOW:HIGH")
    p.add_argument("--requests", type=int, default=160)
    p.add_argument("--rate", type=float, help="requests a second, at random")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", metavar="FILE.json", help="write the figures")
    return p


def stage_parser():
    p = parser()
    p.add_argument("--published", action="store_true", help="compare with what others measured")
    p.add_argument("--stage", default="paged", choices=SCRIPTS)
    p.add_argument("--clients", type=int, help="number of clients; each waits for its answer")
    flags.add_knobs(p, SCHEDULERS)
    return p


def check(args):
    """ValueError for a bad --json or --rate."""
    if args.json:
        flags.check_path(args.json, "--json")
    if args.rate is not None and not 0 < args.rate < math.inf:
        raise ValueError(f"--rate must be above 0, not {args.rate}")


def run(args):
    check(args)
    if args.published:
        alone = stage_parser().parse_args(["--published"])
        if vars(args) != vars(alone) | {"json": args.json}:
            raise ValueError("--published: no other flag but --json has a meaning with it")
        rows = published.compare(figures_of)
        print(*published.report(rows), sep="\n")
        write(args.json, {"calculated": True, "rows": rows})
        return 0
    if args.clients is not None:
        at_least_1(**{"--clients": args.clients})
        if args.rate:
            raise ValueError("--rate and --clients exclude each other")
    gpu, shape = gpu_of(args.gpu), shape_of(args.model, args.dtype, args.tp)
    generate, lengths = SCRIPTS[args.stage], lengths_of(args)
    check_prompt(max(lengths)[0], shape)
    requests = workload(lengths, shape.vocab_size)
    knobs, ignored = with_memory(shape, gpu, generate, requests,
                                 flags.given_knobs(args, SCHEDULERS), args.clients, args.rate)
    flags.say_ignored(args, ignored, "for this stage")
    trace = simulate(shape, gpu, generate, requests, args.clients, args.rate, args.seed, **knobs)
    f = figures(trace)
    print(f"{args.model} on {args.tp} x {args.gpu}, calculated: "
          f"{f['tokens_per_s']:,.0f} tokens/s; TTFT mean {f['ttft_ms']['mean']:,.0f}, p99 "
          f"{f['ttft_ms']['p99']:,.0f} ms; ITL p50 {f['itl_ms']['p50']:,.1f}, p99 "
          f"{f['itl_ms']['p99']:,.1f} ms".replace(" nan", " -"))
    if args.rate:
        tried = tries(len(requests), generate, **knobs)
        args.requests = max(args.requests, tried)
        more = workload(lengths_of(args)[:tried], shape.vocab_size)
        served = most_served(shape, gpu, generate, more, **knobs)
        f["load"] = judged(trace, args.rate, served, tried)
        print(load_text(f["load"], args.rate))
    if note := cut_short(requests, shape):
        print(note)
    print(report(trace))
    write(args.json, f)
    return 0


def load_text(load, rate):
    """The lines that say whether a machine can keep up."""
    text = advice(load["times"]) if load["verdict"] == TOO_SHORT else load["verdict"]
    return (f"{text}; {rate:g} requests/s are {load['times']:.2f} times what it can serve, "
            f"{load['served_at_most']:,.2f}\n"
            f"tokens (prompts and answers): {load['offered_tokens_per_s']:,.0f} a second come, "
            f"{load['served_tokens_per_s']:,.0f} are computed until the last request comes; owed "
            f"{load['owed_at_half']:,} at half of the requests, {load['owed_at_end']:,} at the "
            "last one".replace(" nan", " -"))


def write(path, content):
    """JSON, which has no NaN and no infinity: null."""
    if path:
        content = json.loads(json.dumps(content), parse_constant=lambda name: None)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, allow_nan=False)


if __name__ == "__main__":
    sys.exit(stage_parser().run(run))
