"""
Planning ahead: the next pass is planned and queued while the device still computes this one.

Usually host and device take turns, and the device is idle while the host samples and plans:

    in turns   host     plan 1           read 1, plan 2            read 2, plan 3
               device          pass 1                    pass 2                    pass 3

    ahead      host     plan 1, plan 2   read 1, plan 3   read 2, plan 4
               device          pass 1     pass 2           pass 3    (tokens: a step late)

When the host plans pass 2, it has not read the tokens that pass 1 generates. A plan needs to know
only how many tokens each request has, and that is known: one more for each request that pass 1
completes. So pass 2 is laid out with a *hole* for each of these tokens. The device computes pass 1
first. When it begins pass 2, it has the tokens in its own memory, and fills the holes:

                     known to the host   pass 1 computes   pass 2 computes
    A, a decode      p0 p1 p2 g0         g0                _     the hole, where g1 will be
    B, mid-prefill   p0 p1 p2 p3         p0 p1             p2 p3

Two things do depend on which token it is. Both happen a step late:

1. A stop token is seen when the next pass is already queued. The ended request has a row in that
   pass, which is computed for nothing. (That an answer ends by its length is known beforehand, and
   costs no row.)
2. A page has no hash while one of its tokens is a hole. It gets its hash, and can be found, in the
   first plan after that token was read.

While a pass is queued, a request in it may end or be preempted, and another request may get its
pages. That does no harm: the device computes passes in order, so the new owner writes later.

vLLM does this by default (AsyncScheduler), and the plans made here are vLLM's (docs/vllm.md). In
transformers it is ContinuousBatchingConfig's use_async_batching. On CUDA, host and device hardly
overlap here: the layouts copy from pageable memory, and such a copy waits for the device.

    python -m beyond.ahead     what it gains, calculated
"""
if __spec__ is None:
    raise SystemExit("start it in the folder above: python -m beyond.ahead")

import time
from dataclasses import dataclass
from functools import partial

import torch

from cache import KV
from generate_paged import Paged, pool_size
from generate_prefix import PrefixScheduler
from model import cdf
from request import prepare
from toolbox.trace import Trace
from toolbox.validate import check, check_finite, check_pool

HOLE = -1   # no token: an embedding would refuse it


@dataclass
class Flight:
    """A pass that is queued or computed, and whose tokens the host has not read."""
    step: int
    batch: object          # the layout
    logits: torch.Tensor   # (R, V)
    tokens: torch.Tensor   # (R,), on the device


# --- planning and queueing a pass -----------------------------------------------------------------

def launch(model, scheduler, kv, trace, step, flight):
    """Queues the pass after `flight`. Returns its Flight; None if there is nothing to compute."""
    holes = leave_holes(flight) if flight else {}
    try:
        plan = plan_of(scheduler, step, flight)
        batch = Paged(plan, kv, scheduler.pool, model.device) if plan else None
    finally:
        for request in holes:
            request.assumed = []   # no other code sees a hole
    if batch is None:
        return None
    fill_holes(batch, holes, flight)
    trace.announce(step, batch)
    logits = model(batch.tokens, batch.positions, batch.attend, batch.wanted)          # (R, V)
    return Flight(step, batch, logits, choose(logits, batch.sampled))


def leave_holes(flight):
    """
    Counts the pass as done. Returns {request: the place of its token in flight.tokens}, for each
    request that goes on with that token.
    """
    for request, n in flight.batch.plan:
        if not request.finished:
            request.computed += n
    holes = {}
    for place, request in enumerate(flight.batch.sampled):
        is_last = request.is_last(len(request.generated) + 1)
        if not request.finished and not is_last:
            request.assumed = [HOLE]   # without it, its todo is 0, and it is not planned
            holes[request] = place
    return holes


def plan_of(scheduler, step, flight):
    """The plan of this step; empty if only the end of the pass in flight can free room."""
    try:
        return scheduler.schedule(step)
    except RuntimeError:   # nothing can go on
        if not flight:
            raise
        return []


def fill_holes(batch, holes, flight):
    """On the device. A hole is its request's last token, so it stands where logits are wanted."""
    rows = [i for i, request in enumerate(batch.sampled) if request in holes]
    if rows:
        places = [holes[batch.sampled[i]] for i in rows]
        batch.tokens[batch.wanted[rows]] = flight.tokens[places]


def choose(logits, requests):
    """As `sample`, but the tokens stay on the device. The numbers are drawn on the host, now."""
    tokens = logits.argmax(dim=-1)
    for i, request in enumerate(requests):
        if request.temperature > 0:
            edges = cdf(logits[i].double(), request.temperature, request.top_k, request.top_p)
            # the last edge is left out: even NaN then gives some token, until `land` checks
            tokens[i] = torch.searchsorted(edges[:-1], request.draw(), right=True)
    return tokens


# --- reading its tokens ---------------------------------------------------------------------------

def land(flight, scheduler, trace, on_token):
    """The pass is over: what it computed is recorded, and its requests get their tokens."""
    chosen = flight.tokens.tolist()   # waits for the device
    batch = flight.batch
    rows = [i for i, request in enumerate(batch.sampled) if not request.finished]
    sampled = [batch.sampled[i] for i in rows]   # those that have not ended meanwhile
    tokens = [chosen[i] for i in rows]
    logits = flight.logits[rows]
    check_finite(sampled, logits.amax(dim=-1).tolist())
    record(flight, trace)
    cache_pages(flight, scheduler)
    for request, token in zip(sampled, tokens):
        request.append(token)
        if request.finished and request in scheduler.waiting:   # preempted meanwhile
            scheduler.waiting.remove(request)
    scheduler.release()
    trace.record_tokens(flight.step, sampled, tokens, logits, on_token)


def record(flight, trace):
    """Records the pass. Of a request that has ended since it was queued, its work is rejected."""
    reached = dict(trace.reached)
    seconds = time.perf_counter() - trace.step_times[flight.step]
    trace.record_pass(flight.step, flight.batch, seconds)
    for (request, n), start in zip(flight.batch.plan, flight.batch.starts):
        if request.finished:
            # from here on computed for the first time: what is before counts as recomputed
            first = min(max(start, reached.get(request.name, 0)), start + n)
            trace.record_rejected(request, first, start + n)


def cache_pages(flight, scheduler):
    """
    Pages that the pass has filled can be found, if the request still holds them. (One that has been
    preempted since holds none. It cannot be back: a step that preempts admits nobody.)
    """
    for (request, n), start in zip(flight.batch.plan, flight.batch.starts):
        if request.block_table:
            scheduler.cache_filled(request, start, start + n)


def naming_late(scheduler_class):
    """
    A subclass that names one page more where it grants a request room: the page that the last
    computed token fills. When that token was planned it was a hole, which names no page. As in
    vLLM, requests that run come first in a step, so its newcomers find the page.
    """
    if isinstance(scheduler_class, partial):
        kind, more = scheduler_class.func, scheduler_class.args
        return partial(naming_late(kind), *more, **scheduler_class.keywords)

    class NamingLate(scheduler_class):
        def make_room(self, request, n):
            granted = super().make_room(request, n)
            if granted:
                self.cache_filled(request, max(0, request.computed - 1), request.computed)
            return granted

    return NamingLate


# --- the loop -------------------------------------------------------------------------------------

def caches_pages(scheduler_class):
    """Whether it is a kind of PrefixScheduler, or a partial of one, as in beyond/fairness.py."""
    if isinstance(scheduler_class, partial):
        scheduler_class = scheduler_class.func
    return isinstance(scheduler_class, type) and issubclass(scheduler_class, PrefixScheduler)


@torch.inference_mode()
def generate(model, requests, max_batch=8, token_budget=64, pages=None, page_size=16,
             scheduler_class=PrefixScheduler, on_token=None):
    """As prefix; but while a pass is computed, the next one is planned. Returns the trace."""
    requests = prepare(requests, model.config)
    check_pool(max_batch, pages, page_size, scheduler_class, model.config.block_size)
    check("scheduler_class", scheduler_class, caches_pages, "a PrefixScheduler")
    number = pool_size(requests, max_batch, page_size, pages)
    scheduler = naming_late(scheduler_class)(max_batch, token_budget, number, page_size)
    kv = KV(number * page_size)
    trace = Trace("ahead", requests, model, scheduler.pool.counts)
    for request in requests:
        scheduler.add(request)
    step = 0
    flight = None
    while scheduler.busy or flight:
        step = scheduler.next_step(step)
        trace.step_times.setdefault(step, time.perf_counter())
        # 1. plan this step, and queue its pass behind the one in flight
        queued = launch(model, scheduler, kv, trace, step, flight)
        # 2. read the tokens of the pass in flight
        if flight:
            land(flight, scheduler, trace, on_token)
        # 3. the queued pass is in flight now
        flight = queued
        step += 1
    return trace


if __name__ == "__main__":
    from lab.essays import ahead, main
    main(ahead, __doc__)
