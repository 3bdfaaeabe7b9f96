"""
Any GPU, calculated: a stage's own `generate` runs, but where a model would compute, a clock moves.

Llama 2 7B on an A100, a prompt of 1,500 tokens, an answer of 2, and a budget of 1,000 a step:

    step   plan      slots   keys    logits   the pass takes   the clock then says
    0      A 1000    1,000   1,000        0   67.0 ms          67.0 ms
    1      A 500       500   1,500        1   37.7 ms          104.7 ms   A's first token
    2      A 1           1   1,501        1   10.3 ms          115.0 ms   its second

A stage is bookkeeping, and its layouts count what each pass computes, reads and copies. So a
`CalculatedModel` takes the model's place: it looks at the layout, moves its clock on by the price
of such a pass, and returns logits of zero. A stage expects arrivals in steps. So each request is
to arrive LATE, until the clock has reached its time: then it arrives at the next step.

The passes of stages without pads need no layout: `log_of` has them planned in loop.py. The command
is `python -m lab.simulate`, and docs/gpu.md says how far to trust it.
"""
import math
from itertools import repeat

import torch

import generate_paged
import generate_prefix
import generate_ragged
from generate_prefix import PrefixScheduler
from lab.flags import has_knob, knobs_of
from lab.loading.arrivals import Source
from lab.simulate.hardware import Engine, GiB, constants, seconds
from lab.simulate.loop import serve
from lab.views.report import figures as figures  # others import it from here
from paging import PagedScheduler
from scheduler import Scheduler

LATE = 10**12   # a step that no run reaches
MOST_PAGES = 8_000_000   # each takes some 100 bytes here, whatever it holds on the GPU
DEFAULTS = {"max_batch": 256, "token_budget": 2048}   # as engines have them
POOLS = {generate_paged.generate: PagedScheduler, generate_prefix.generate: PrefixScheduler}


class CalculatedModel:
    """
    Takes the place of a GPT in `generate`.

    now:    seconds on its clock
    passes: (start, seconds, counts) of each pass; counts: see `counted`
    """

    def __init__(self, shape, gpu, source, engine):
        self.config, self.device = shape, torch.device("cpu")
        self.price, self.source, self.ahead = constants(shape, gpu, engine), source, engine.ahead
        self.load, self.step = 0, -1   # requests that are here, and the step of the last pass
        self.now, self.passes, self.observers = 0.0, [], [self.see]
        # one token's keys of all layers. A "meta" tensor has a size, and takes no memory
        self.key = torch.empty(1, shape.kv_bytes // 2, device="meta", dtype=torch.int8)

    def see(self, step, batch):
        """An observer: this layout is what the next pass computes."""
        self.step, self.batch = step, batch

    def __call__(self, tokens, positions, attend, wanted):
        """Moves the clock on by a pass over the layout that was seen."""
        cache = self.batch.plan[0][0].kv
        if cache is not None:   # else, without a layer, its bytes_per_token would be 0
            cache.buffers(0, self.key, self.key)
        start, counts = self.now, counted(self.batch)
        self.now += seconds(self.price, *counts)
        self.passes.append((start, self.now - start, counts))
        self.let_in(start if self.ahead else self.now)
        return torch.zeros(counts[1], 1)                                        # (R, 1)

    def let_in(self, time):
        """What has come until then arrives at the next step."""
        while self.source.time <= time:
            self.source.pop().arrival = self.step + 1
            self.load += 1

    def on_token(self, request, token, logits):
        request.token_times[-1] = self.now
        if request.finished:
            self.load -= 1
            self.source.answered(self.now)
            self.wait()

    def wait(self):
        """If nothing is left to do, the clock moves on to the next arrival."""
        if not self.load and self.source.time < math.inf:
            self.now = max(self.now, self.source.time)
        if not self.load or not self.ahead:
            self.let_in(self.now)


def counted(batch):
    """(slots, sampled tokens, scores, keys, copied bytes) of a pass over the layout `batch`."""
    cost = batch.cost()
    keys = cost.get("padded_keys", 0)
    for (_, n), start in zip(batch.plan, batch.starts):
        if n > 0:   # else the row has finished
            keys += start + n
    # a GPU's kernel reads pages through the block table, and copies none
    copied = 0 if hasattr(batch, "pool") else cost.get("copied_bytes", 0)
    return batch.tokens.numel(), len(batch.sampled), cost["score_entries"], keys, copied


def simulate(shape, gpu, generate, requests, times=None, clients=0, engine=Engine(), **knobs):
    """
    Runs a stage's `generate` on a calculated GPU. Returns its trace, whose times are seconds from 0
    on the clock of its `clock`, a CalculatedModel.

    Without `times` (in seconds, ascending) and `clients`, requests arrive in steps, as they say.
    Afterwards `arrival` is the step that saw a request: given that, the real `generate` makes the
    same plans. Either way, `arrived` is the time in seconds.
    """
    in_steps = not clients and times is None
    source = Source(() if in_steps else requests, times or (), clients, engine.front_end)
    model = CalculatedModel(shape, gpu, source, engine)
    if not in_steps:
        for request in requests:
            request.arrival = LATE
        model.wait()
    trace = generate(model, requests, on_token=model.on_token, **knobs)
    trace.stage, trace.clock = f"{trace.stage}, calculated", model
    trace.started, trace.step_times = 0.0, {}
    for record, (start, took, _) in zip(trace.passes, model.passes):
        record.seconds = took   # not this machine's
        trace.step_times.setdefault(record.step, start)
    if in_steps:
        for request in trace.requests:
            request.arrived = trace.arrived(request)   # when that step began
    return trace


# --- any load on any stage ------------------------------------------------------------------------

def log_of(shape, gpu, generate, requests, times=None, clients=0, engine=Engine(), **knobs):
    """
    What `figures` takes: a stage serves requests that come at `times`, from clients, or all at
    once. Without pads, its scheduler's plans say all that a pass counts, and no layout is made.
    """
    times = times or repeat(0.0)
    if scheduler := scheduler_of(generate, **knobs):
        return serve(scheduler, Source(requests, times, clients, engine.front_end), shape, gpu,
                     engine)
    return simulate(shape, gpu, generate, [*requests], times, clients, engine, **knobs)


def scheduler_of(generate, max_batch=8, token_budget=64, max_kv_tokens=None, pages=None,
                 page_size=16, scheduler_class=None, attention="varlen", **_):
    """That of a stage without pads; None for the others."""
    if generate == generate_ragged.generate and attention == "varlen":
        return Scheduler(max_batch, token_budget, max_kv_tokens)
    if generate in POOLS:
        return (scheduler_class or POOLS[generate])(max_batch, token_budget, pages, page_size)
    return None


def with_memory(shape, gpu, generate, longest, knobs, number=math.inf):
    """
    (the stage's knobs, by default with as much memory as there is; names of those that it does not
    have). ValueError if the stage may come to hold more than there is room for.

    longest: tokens of the longest prompt and answer, of which a stage without limits on memory may
             hold one in each row
    number:  of requests; a pool gets no more pages than so many of the longest fill
    """
    room = shape.room(gpu)
    page_size = knobs.get("page_size", 16)
    if has_knob(generate, "pages"):
        limit, most = "pages", room // page_size
    elif has_knob(generate, "max_kv_tokens"):
        limit, most = "max_kv_tokens", room
    else:   # unbatched has one row
        limit, most = "max_batch", room // longest
    asked = knobs.get(limit, 1)
    if asked > most:
        raise ValueError(f"the GPU's {gpu.memory / GiB:g} GiB have room for {room:,} tokens: "
                         f"--{limit} must be at most {most:,}, not {asked:,}")
    defaults = DEFAULTS | {limit: min(most, DEFAULTS.get(limit, most))}
    own, ignored = knobs_of(generate, defaults | knobs)
    if limit == "pages":
        own["pages"] = small_pool(own["pages"], number, longest, page_size)
    return own, [name for name in ignored if name in knobs]


def small_pool(pages, number, longest, page_size):
    """
    So many pages, but no more than all requests can fill together: no plan would use the others.
    ValueError if they are still too many for this machine.
    """
    of_each = -(-longest // page_size)   # rounded up
    pages = min(pages, number * of_each)
    if pages > MOST_PAGES:
        raise ValueError(f"these requests can fill {pages:,} pages: --pages must be at most "
                         f"{MOST_PAGES:,}")
    return pages
