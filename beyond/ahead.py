"""
Planning ahead: the next pass is planned and queued while the device still computes this one.

Elsewhere host and device take turns, and the device is idle while the host samples and plans:

    host    plan 1           read 1, plan 2            read 2, plan 3
    device         pass 1                    pass 2                    pass 3

    host    plan 1, plan 2   read 1, plan 3   read 2, plan 4
    device         pass 1     pass 2           pass 3                  a token is read a step late

A plan depends on how many tokens there are, hardly on which. So pass t + 1 is laid out with a
*hole* for each token that pass t will give, and the device fills the holes from its own memory.
What the host cannot know is a stop token: a request that ends with pass t is in pass t + 1, too,
which costs it one row. An end by length is known. (AsyncScheduler in vLLM; continuous_async in
transformers.)

The device runs its passes in the order of the queue. So what a request frees may be given away: its
next owner writes after the last pass that was queued with it. Only its name must not be: a pass
publishes a page only if the block table is still the one it was laid out with.

    python -m beyond.ahead     what it gains, calculated
"""
import sys
import time

import torch

from beyond.hardware import gpu_of, shape_of
from cache import KV
from generate_paged import Paged
from generate_ragged import Flat
from model import cdf
from paging import PagedScheduler, Pages
from request import prepare
from scheduler import Scheduler
from toolbox.trace import Trace
from toolbox.validate import check_finite, check_pool

HOLE = -1   # no token: an embedding would refuse it


def memory_of(model, max_batch, token_budget, max_kv_tokens, pages, page_size):
    """(scheduler, layout): stage 7's if `pages` is a number, or else stage 6's."""
    if pages is None:
        return (Scheduler(max_batch, token_budget, max_kv_tokens),
                lambda plan: Flat(plan, model.device))
    check_pool(max_batch, pages, page_size, model.config.block_size)
    books, pool = Pages(pages, page_size), KV(pages * page_size)
    return (PagedScheduler(max_batch, token_budget, books),
            lambda plan: Paged(plan, pool, books, model.device))


class Flight:
    """A pass in the device's queue. tokens: (R,) on the device, one for each request sampled."""

    def __init__(self, step, batch, logits, tokens):
        self.step, self.batch, self.logits, self.tokens = step, batch, logits, tokens
        self.tables = [request.block_table for request, _ in batch.plan]   # it writes through these
        self.started = time.perf_counter()


def choose(logits, requests):
    """As `sample`, but the tokens stay on the device; the numbers are drawn on the host, now."""
    tokens = logits.argmax(dim=-1)
    for i, request in enumerate(requests):
        if request.temperature > 0:
            edges = cdf(logits[i].double(), request.temperature, request.top_k)
            tokens[i] = torch.searchsorted(edges, request.draw(), right=True)
    return tokens


def plan_of(scheduler, step, flight):
    """A step's plan. It may be empty while a pass is in flight: what lands gives room."""
    try:
        return scheduler.schedule(step)
    except RuntimeError:
        if flight:
            return []
        raise


def launch(model, scheduler, lay_out, step, flight):
    """Plans and queues the pass after `flight`, as if that had landed. None if there is none."""
    holes = {}   # request -> the place of its token in flight.tokens
    for request, n in flight.batch.plan if flight else ():
        if not request.finished:
            request.computed += n
    for place, request in enumerate(flight.batch.sampled if flight else ()):
        if not request.finished and not request.is_last(len(request.generated) + 1):
            request.generated.append(HOLE)
            holes[request] = place   # without a hole its todo is 0, and it is not planned
    try:
        plan = plan_of(scheduler, step, flight)
        batch = lay_out(plan) if plan else None
    finally:
        for request in holes:
            request.generated.pop()   # nobody else sees a hole
    if not batch:
        return None
    rows = [i for i, request in enumerate(batch.sampled) if request in holes]
    if rows:   # a hole is its request's last token: the one whose logits are wanted
        places = [holes[batch.sampled[i]] for i in rows]
        batch.tokens[batch.wanted[rows]] = flight.tokens[places]
    logits = model(batch.tokens, batch.positions, batch.attend, batch.wanted)          # (R, V)
    return Flight(step, batch, logits, choose(logits, batch.sampled))


def land(flight, scheduler, trace, on_token):
    """The pass is over: its requests get their tokens, and the pages it has filled can be found."""
    batch, chosen = flight.batch, flight.tokens.tolist()   # waits for the device
    reached = dict(trace.reached)
    trace.record_pass(flight.step, batch, time.perf_counter() - flight.started)
    for (request, n), start, table in zip(batch.plan, batch.starts, flight.tables):
        if request.finished:   # one pass ago, or cancelled
            first = max(start, reached.get(request.name, 0))
            trace.record_rejected(request, first, max(start + n, first))
        elif table is not None and table is request.block_table:
            size = scheduler.pages.size
            for i in range(start // size, (start + n) // size):
                scheduler.pages.publish(table, i, request.slice(i * size, (i + 1) * size))
    kept = [i for i, request in enumerate(batch.sampled) if not request.finished]
    sampled, logits = [batch.sampled[i] for i in kept], flight.logits[kept]
    tokens = [chosen[i] for i in kept]
    for request, token, largest in zip(sampled, tokens, logits.amax(dim=-1).tolist()):
        check_finite(request, largest)
        request.append(token)
        if request.finished and request in scheduler.waiting:   # preempted meanwhile
            scheduler.waiting.remove(request)
    scheduler.release()
    trace.record_tokens(flight.step, sampled, tokens, logits, on_token)


@torch.inference_mode()
def generate(model, requests, max_batch=8, token_budget=64, max_kv_tokens=None, pages=None,
             page_size=16, on_token=None):
    """Runs `requests` as stage 6 or 7, with one pass in the queue while the next is planned."""
    requests = prepare(requests, model.config)
    scheduler, lay_out = memory_of(model, max_batch, token_budget, max_kv_tokens, pages, page_size)
    trace = Trace("ahead", requests, getattr(scheduler, "counts", {}))
    for request in requests:
        scheduler.add(request)
    step, flight = 0, None
    while scheduler.busy or flight:
        step = scheduler.next_step(step)
        trace.step_times.setdefault(step, time.perf_counter())
        queued = launch(model, scheduler, lay_out, step, flight)
        if flight:
            land(flight, scheduler, trace, on_token)
        flight, step = queued, step + 1
    return trace


if __name__ == "__main__":
    host = float(sys.argv[1]) if sys.argv[1:] else 2.0
    print(f"512 passes of 16 decodes, 1,024 keys each, on an H100; the host takes {host:g} ms a "
          "pass; calculated")
    for name in ("qwen3-8b", "qwen3-0.6b"):
        shape = shape_of(name)
        device = 1e3 * shape.seconds(gpu_of("h100"), shape.parts(16, 16, 2**14, 2**14), 16)
        turns, ahead = host + device, max(host, device)
        print(f"  {name:10}  in turns {0.512 * turns:.2f} s, device busy {device / turns:.0%};  "
              f"ahead {0.512 * ahead:.2f} s, busy {device / ahead:.0%}")
