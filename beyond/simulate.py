"""
Any GPU, calculated: the real stages against the clock of a machine that is not here.

Batching pays because decoding leaves a GPU's arithmetic idle, which a CPU cannot show. But a stage
is bookkeeping, and its layouts count what each pass computes, reads and copies. So `generate` runs
unchanged, on a model that computes nothing:

    generate()  ->  layout  ->  CalculatedModel: counts, moves its clock on, returns zeros

beyond/hardware.py says how long a pass takes. docs/gpu.md says how far to trust it: all figures are
calculated, none is measured.

    python -m beyond.simulate --gpu a100 --model llama-2-7b --stage paged --input 1024 --clients 8
    python -m beyond.simulate --published       what others measured, beside what is calculated
"""
import bisect
import json
import math
import sys

import torch

from beyond import published
from beyond.arrivals import Arrival, arrivals, check_prompt, ever_more, lengths_of, workload
from beyond.fairness import SCHEDULERS
from beyond.hardware import BYTES, gpu_of, shape_of
from generate_paged import pool_size
from loading.stages import SCRIPTS
from request import prepare
from toolbox import flags
from toolbox.validate import at_least_1
from views import plots
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
        counts, slots = batch.cost(), batch.tokens.numel()
        keys = sum(first + n for (_, n), first in zip(batch.plan, batch.starts) if n)
        parts = self.config.parts(
            slots, len(batch.sampled), counts["score_entries"],
            keys + counts.get("padded_keys", 0),
            # a GPU's kernel reads pages through the block table, and copies none
            counts.get("copied_bytes", 0) if pool is None else 0)
        seconds = self.config.seconds(self.gpu, parts, slots)
        self.passes.append((self.now, seconds, parts))
        self.now += seconds
        return torch.zeros(len(batch.sampled), 1)

    def on_token(self, request, token, logits):
        request.token_times[-1] = self.now
        if request.finished:
            self.ends.append(self.now)


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
    trace = generate(model, requests, on_token=model.on_token, **knobs)
    trace.model, trace.started, trace.stage = model, 0.0, f"{trace.stage}, calculated"
    trace.step_times = {}
    for record, (start, seconds, _) in zip(trace.passes, model.passes):
        record.seconds = seconds
        trace.step_times.setdefault(record.step, start)
    steps, starts = list(trace.step_times), list(trace.step_times.values())
    for request in trace.requests:
        if isinstance(request.arrival, Arrival):
            request.arrived = request.arrival.seconds()
            request.arrival = steps[bisect.bisect_left(starts, request.arrived)]
        else:
            request.arrived = trace.arrived(request)
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
            "preemptions": counts.get("preemptions", 0), "grows": grows(trace.requests)}


def figures_of(*args, **knobs):
    """`figures` of what `simulate` returns."""
    return figures(simulate(*args, **knobs))


def grows(requests):
    """Whether the queue would grow without end: at the last arrival many wait, and ever more."""
    times = [request.arrived for request in requests]

    def waiting(i):   # when request i arrives
        return sum(r.token_times[0] > times[i] for r in requests[:i])

    half, end = waiting(len(times) // 2), waiting(len(times) - 1)
    return times[-1] > 0 and ever_more(len(times), half, end)


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
        raise ValueError(f"this stage may come to hold {most:,} tokens, and the GPU has room "
                         f"for {room:,}: lower --{flag}")
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
    p.add_argument("--lengths", metavar="FILE", help="a line for each request: prompt answer")
    p.add_argument("--clients", type=int, help="number of clients; each waits for its answer")
    flags.add_knobs(p, SCHEDULERS)
    p.add_argument("--plot", metavar="FILE.png", help="draw the run's steps")
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
        rows = published.compare(published.runs(), figures_of)
        print(*published.report(rows), sep="\n")
        write(args.json, {"calculated": True, "rows": rows})
        return 0
    if args.plot:
        flags.check_path(args.plot, "--plot", flags.PICTURES)
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
    print(f"{report(trace)}\n{args.model} on {args.tp} x {args.gpu}, calculated: "
          f"{f['tokens_per_s']:,.0f} tokens/s; TTFT mean {f['ttft_ms']['mean']:,.0f}, p99 "
          f"{f['ttft_ms']['p99']:,.0f} ms; ITL p50 {f['itl_ms']['p50']:,.1f}, p99 "
          f"{f['itl_ms']['p99']:,.1f} ms".replace(" nan", " -"))
    if args.rate and f["grows"]:
        print(f"calculated: the queue grows without end at {args.rate:g} requests a second; these "
              "times are those of the first requests only")
    write(args.json, f)
    if args.plot:
        plots.stage(trace, args.plot)
    return 0


def write(path, content):
    """JSON, which has no NaN and no infinity: null."""
    if path:
        content = json.loads(json.dumps(content), parse_constant=lambda name: None)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, allow_nan=False)


if __name__ == "__main__":
    sys.exit(stage_parser().run(run))
