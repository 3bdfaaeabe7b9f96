"""
Any GPU, calculated: a stage's own `generate` runs, but where a model would compute, a clock moves.

Llama 2 7B on an A100, a prompt of 1,500 tokens, an answer of 2, and a budget of 1,000 a step:

    step   plan      slots   keys    logits   the pass takes   the clock then says
    0      A 1000    1,000   1,000        0   67.0 ms          67.0 ms
    1      A 500       500   1,500        1   37.7 ms          104.7 ms   A's first token
    2      A 1           1   1,501        1   10.3 ms          115.0 ms   its second

A stage is bookkeeping, and its layouts count what each pass computes, reads and copies. So a
`CalculatedModel` takes the model's place. It looks at the layout, asks hardware.py how long
such a pass takes on the GPU, moves its clock on, and returns logits of zero.

Three things are not as they seem:
- Stages time their passes. These times are replaced by the clock's, in `timed`.
- Requests may come in seconds, where a stage expects steps: lab/simulate/arrivals.py.
- The layouts of ragged, paged and prefix make tensors that nobody reads here. So while these run, a
  `Stream` stands in for Flat and Paged. It counts the same, except copies, many times faster.

docs/gpu.md says how far to trust it: all figures are calculated, none is measured. The command is
`python -m lab.simulate`.
"""
import bisect
from contextlib import nullcontext
from dataclasses import dataclass
from unittest.mock import patch

import torch

import generate_paged
import generate_prefix
import generate_ragged
from lab import flags
from lab.simulate.arrivals import Arrival, arrivals
from lab.simulate.hardware import GiB
from lab.views.report import latencies, mean, percentile, totals
from request import indices_due
from toolbox.trace import Trace


class CalculatedModel:
    """
    Takes the place of a GPT in `generate`.

    now:    seconds on its clock
    passes: (start, seconds, counts) of each pass; counts: see `counted`
    ends:   when requests finished, one after another
    """

    def __init__(self, shape, gpu):
        self.config, self.gpu, self.device = shape, gpu, torch.device("cpu")
        self.now, self.passes, self.ends, self.observers = 0.0, [], [], [self.see]
        # one token's keys of all layers. A "meta" tensor has a size, and takes no memory
        self.key = torch.empty(1, shape.kv_bytes // 2, device="meta", dtype=torch.int8)

    def __call__(self, tokens, positions, attend, wanted):
        batch = self.batch
        cache = batch.plan[0][0].kv
        if cache is not None:   # else, without a layer, its bytes_per_token would be 0
            cache.buffers(0, self.key, self.key)
        self.compute(batch)
        return torch.zeros(len(batch.sampled), 1)                               # (R, 1)

    def see(self, step, batch):
        """An observer: this layout is what the next pass computes."""
        self.batch = batch

    def compute(self, batch):
        """Moves the clock on by a pass over the layout `batch`."""
        counts = counted(batch)
        seconds = self.config.seconds(self.gpu, *counts)
        self.passes.append((self.now, seconds, counts))
        self.now += seconds

    def on_token(self, request, token, logits):
        request.token_times[-1] = self.now
        if request.finished:
            self.ends.append(self.now)


def counted(batch):
    """(slots, sampled tokens, scores, keys, copied bytes) of a pass over the layout `batch`."""
    cost = batch.cost()
    # read: past and new keys of the rows that go on (n is 0 once a row has finished)
    keys = sum(start + n for (_, n), start in zip(batch.plan, batch.starts) if n)
    return (batch.tokens.numel(), len(batch.sampled), cost["score_entries"],
            keys + cost.get("padded_keys", 0), cost.get("copied_bytes", 0))


class Stream:
    """
    What Flat and Paged count of a plan: N tokens of several requests, and no tensors. Copies are
    not counted, since a GPU's kernel reads pages through the block table.
    """
    positions = wanted = attend = None

    def __init__(self, plan, *more):   # the others' arguments
        self.plan, self.starts = plan, [request.computed for request, _ in plan]
        self.sampled = [plan[i][0] for i in indices_due(plan)]
        self.tokens = torch.empty(sum(n for _, n in plan), device="meta")       # (N,)

    def cost(self):
        return {"score_entries": sum(n * (start + n)
                                     for (_, n), start in zip(self.plan, self.starts))}


LAYOUTS = {generate_ragged.generate: (generate_ragged, "Flat"),
           **dict.fromkeys((generate_paged.generate, generate_prefix.generate),
                           (generate_paged, "Paged"))}   # prefix runs paged's loop


def without_tensors(generate, attention="varlen", **knobs):
    """A context: within it the stage makes Streams, not its layouts, unless these use a mask."""
    if generate in LAYOUTS and attention == "varlen":
        return patch.object(*LAYOUTS[generate], Stream)
    return nullcontext()


@dataclass
class CalculatedTrace(Trace):
    """A Trace whose times are seconds from 0, on the clock of a CalculatedModel."""
    clock: CalculatedModel = None

    def arrived(self, request):   # its own time, not that of the step which saw it
        return request.arrived


def simulate(shape, gpu, generate, requests, clients=None, rate=None, seed=0, **knobs):
    """
    Runs a stage's `generate` on a calculated GPU. Returns a CalculatedTrace.

    Without `clients` and `rate`, requests arrive in steps, as they say. With one of them, they
    arrive in seconds; afterwards `arrival` is the step that saw a request: given that, the real
    `generate` makes the same plans. Either way, `arrived` is the time in seconds.
    """
    model = CalculatedModel(shape, gpu)
    if clients or rate:
        for request, arrival in zip(requests, arrivals(model, len(requests), clients, rate, seed)):
            request.arrival = arrival
    with without_tensors(generate, **knobs):
        trace = generate(model, requests, on_token=model.on_token, **knobs)
    return timed(trace, model)


def timed(trace, model):
    """The trace of a run on this machine, with the times of the model's clock."""
    begin = {}   # step -> seconds
    for record, (start, seconds, _) in zip(trace.passes, model.passes):
        record.seconds = seconds
        begin.setdefault(record.step, start)
    trace = CalculatedTrace(**vars(trace), clock=model)
    trace.stage, trace.started, trace.step_times = f"{trace.stage}, calculated", 0.0, begin
    steps, starts = list(begin), list(begin.values())
    for request in trace.requests:
        if isinstance(request.arrival, Arrival):
            request.arrived = request.arrival.seconds()
            request.arrival = steps[bisect.bisect_left(starts, request.arrived)]
        else:
            request.arrived = Trace.arrived(trace, request)   # when that step began
    return trace


def spread(seconds):
    values = [1e3 * value for value in seconds]
    return {"mean": mean(values), **{f"p{q}": percentile(values, q) for q in (50, 95, 99)}}


def figures(trace):
    """What --json writes: speed, passes, useful share of the slots, waits in ms, preemptions."""
    t, waits = totals(trace), latencies(trace)
    return {"calculated": True, "tokens_per_s": t["tokens_per_second"], "seconds": t["seconds"],
            "passes": t["forward_passes"], "useful": t["useful"] / t["slots"],
            "ttft_ms": spread(waits["ttft_seconds"]), "itl_ms": spread(waits["itl_seconds"]),
            "preemptions": trace.counts.get("preemptions", 0)}


def with_memory(shape, gpu, generate, requests, knobs):
    """
    (the stage's knobs, by default with as much memory as the GPU has; names of those it does not
    have). ValueError if the stage may come to hold more than there is room for.
    """
    room = shape.room(gpu)
    # for stages that limit the batch only: as if each had the longest prompt and answer
    longest = (max(len(request.prompt) for request in requests)
               + max(request.max_new_tokens for request in requests) - 1)
    fit = {"pages": room // knobs.get("page_size", 16), "max_kv_tokens": room,
           "max_batch": room // longest}
    limit = next(iter(flags.knobs_of(generate, fit)[0]), "max_batch")   # unbatched has one row
    if knobs.get(limit, 1) > fit[limit]:
        raise ValueError(f"the GPU's {gpu.memory / GiB:g} GiB have room for {room:,} tokens: "
                         f"--{limit} must be at most {fit[limit]:,}, not {knobs.get(limit, 1):,}")
    defaults = {"max_batch": 256, "token_budget": 2048}
    defaults[limit] = min(fit[limit], defaults.get(limit, room))
    mine, ignored = flags.knobs_of(generate, defaults | knobs)
    return mine, [name for name in ignored if name in knobs]
