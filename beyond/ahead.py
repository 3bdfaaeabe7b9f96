"""
Planning ahead: the next pass is planned and queued while the device still computes this one.

Usually host and device take turns, and the device is idle while the host samples and plans:

    in turns   host     plan 1           read 1, plan 2            read 2, plan 3
               device          pass 1                    pass 2                    pass 3

    ahead      host     plan 1, plan 2   read 1, plan 3   read 2, plan 4
               device          pass 1     pass 2           pass 3    (tokens: a step late)

A plan depends on the number of tokens, and hardly on which tokens they are. So pass 2 is laid out
with a *hole* for each token that pass 1 will give. The device fills the holes from its own memory:

                     known to the host   pass 1 computes   pass 2 computes
    A, a decode      p0 p1 p2 g0         g0                _     the hole, where g1 will be
    B, mid-prefill   p0 p1 p2 p3         p0 p1             p2 p3

A stop token is seen too late: a request that ends with pass 1 costs a row of pass 2. (vLLM:
AsyncScheduler; transformers: ContinuousBatchingConfig's use_async_batching.) Pages that a queued
pass still uses may be freed and given away: the device runs passes in order, so the next owner
writes later. On CUDA this overlaps little: the layouts copy from pageable memory, and such copies
wait for the device.

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


def choose(logits, requests):
    """As `sample`, but the tokens stay on the device; the numbers are drawn on the host, now."""
    tokens = logits.argmax(dim=-1)
    for i, request in enumerate(requests):
        if request.temperature > 0:
            edges = cdf(logits[i].double(), request.temperature, request.top_k, request.top_p)
            # the last edge is left out: even NaN then gives some token, until `land` checks
            tokens[i] = torch.searchsorted(edges[:-1], request.draw(), right=True)
    return tokens


def plan_of(scheduler, step, flight):
    """The plan of this step; empty if only the pass in flight can free room for one."""
    try:
        return scheduler.schedule(step)
    except RuntimeError:   # nothing can go on
        if not flight:
            raise
        return []


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
    """Counts the pass as done. Returns {request: the place of its token in flight.tokens}."""
    for request, n in flight.batch.plan:
        if not request.finished:
            request.computed += n
    holes = {request: place for place, request in enumerate(flight.batch.sampled)
             if not request.finished and not request.is_last(len(request.generated) + 1)}
    for request in holes:
        request.assumed = [HOLE]   # without it, its todo is 0, and it is not planned
    return holes


def fill_holes(batch, holes, flight):
    """On the device. A hole is its request's last token, so it stands where logits are wanted."""
    rows = [i for i, request in enumerate(batch.sampled) if request in holes]
    if rows:
        places = [holes[batch.sampled[i]] for i in rows]
        batch.tokens[batch.wanted[rows]] = flight.tokens[places]


def land(flight, scheduler, trace, on_token):
    """The pass is over: what it computed is recorded, and its requests get their tokens."""
    batch, chosen = flight.batch, flight.tokens.tolist()   # waits for the device
    going = [i for i, request in enumerate(batch.sampled) if not request.finished]
    sampled, tokens = [batch.sampled[i] for i in going], [chosen[i] for i in going]
    logits = flight.logits[going]
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
    trace.record_pass(flight.step, flight.batch,
                      time.perf_counter() - trace.step_times[flight.step])
    for (request, n), start in zip(flight.batch.plan, flight.batch.starts):
        if request.finished:
            # from here on computed for the first time: what is before counts as recomputed
            first = min(max(start, reached.get(request.name, 0)), start + n)
            trace.record_rejected(request, first, start + n)


def cache_pages(flight, scheduler):
    """
    Pages that the pass has filled can be found, if the request still holds them. (One that has been
    preempted since holds none: the step that frees its pages gives one away, so it is not back.)
    """
    for (request, n), start in zip(flight.batch.plan, flight.batch.starts):
        if request.block_table:
            scheduler.cache_filled(request, start, start + n)


def naming_late(scheduler_class):
    """
    The same kind of scheduler; but where it grants a request room, it also names the page that the
    request's last token has filled. When that token was planned, it was a hole, which names none.
    """
    if isinstance(scheduler_class, partial):   # of beyond/fairness.py
        return partial(naming_late(scheduler_class.func), **scheduler_class.keywords)

    class NamingLate(scheduler_class):
        def make_room(self, request, n):
            granted = super().make_room(request, n)
            if granted:
                self.cache_filled(request, max(0, request.computed - 1), request.computed)
            return granted

    return NamingLate


@torch.inference_mode()
def generate(model, requests, max_batch=8, token_budget=64, pages=None, page_size=16,
             scheduler_class=PrefixScheduler, on_token=None):
    """As prefix; but while a pass is computed, the next one is planned. Returns the trace."""
    requests = prepare(requests, model.config)
    check_pool(max_batch, pages, page_size, scheduler_class, model.config.block_size)
    check("scheduler_class", scheduler_class, lambda kind: not isinstance(kind, type)
          or issubclass(kind, PrefixScheduler), "a PrefixScheduler")   # whose pages can be found
    number = pool_size(requests, max_batch, page_size, pages)
    scheduler = naming_late(scheduler_class)(max_batch, token_budget, number, page_size)
    kv = KV(number * page_size)
    trace = Trace("ahead", requests, model, scheduler.pool.counts)
    for request in requests:
        scheduler.add(request)
    step, flight = 0, None
    while scheduler.busy or flight:
        step = scheduler.next_step(step)
        trace.step_times.setdefault(step, time.perf_counter())
        queued = launch(model, scheduler, kv, trace, step, flight)
        if flight:
            land(flight, scheduler, trace, on_token)
        flight, step = queued, step + 1
    return trace


if __name__ == "__main__":
    from lab.essays import ahead, main
    main(ahead, __doc__)
