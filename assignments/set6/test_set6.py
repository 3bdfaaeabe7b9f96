"""Set 6: pages."""
from collections import deque

import pytest
import torch
from answers import answers
from kit import MIX, Checks, drawn, given, names, pools, tensor

from cache import KV
from generate_paged import Paged
from generate_prefix import PrefixPages, PrefixScheduler
from paging import PagedScheduler, Pages

FILES = ("model.py request.py cache.py scheduler.py generate_ragged.py paging.py "
         "generate_paged.py generate_prefix.py")
points = pytest.mark.points


def whole(part):
    """Whole runs, with room and with none to spare."""
    part.serve("generate_paged", given(*MIX), token_budget=5, page_size=2, pages=15, max_batch=4)
    for sizes in part.sizes:
        many = sizes.get("least", 4)
        size = part.rng.choice([2, 3])
        part.serve("generate_paged", drawn(part.rng, **sizes), token_budget=max(8, many),
                   page_size=size, pages=(12, 10)[size - 2] + 2 * many, max_batch=many)


def come_and_go(pages):
    table = []
    pages.allocate(table, 3000)
    pages.free(table)
    pages.share([], table[::-1])


@points(2, *(f"generate_prefix.py:PrefixPages.{name}" for name in ("share", "free", "allocate")),
        title="sharing and freeing")
class Test6a(Checks):
    in_time = [("3,000 pages allocated, freed and shared", lambda: PrefixPages(4000, 1),
                come_and_go)]

    def test_pools(self, part):
        part.compare(pools, part.rng, [(8, 2, 40)] * 6)
        part.compare(pools, part.rng, [(60, 2, 150)])


def pool(cases):
    """`slots` and `write` alone, with no requests."""
    batch = object.__new__(Paged)
    for size, end, table in cases:
        batch.pages = Pages(max(table) + 1, size)
        yield f"slots({table}, {end}), pages of {size}", tensor(batch.slots(table, end))
    batch.plan, batch.pool, batch.pages = [], KV(60), Pages(30, 2)
    for slots in [3, 8, 2], [9], [8, 0], [*range(59, 18, -1)]:
        batch.slot_mapping, new = torch.tensor(slots), torch.randn(
            2, 2, len(slots), 3, generator=torch.Generator().manual_seed(len(slots))).double()
        buffers = batch.pool.buffers("a", *new)
        batch.write("a", *new)
        yield f"write, slot_mapping {slots}", dict(zip(("keys", "values"), map(tensor, buffers)))


@points(2, "generate_paged.py:Paged.slots", "generate_paged.py:Paged.write", title="block tables")
class Test6b(Checks):
    def test_pool(self, part):
        part.compare(pool, [(size, start + new, [4, 0, 1]) for size in (2, 3, 16)
                            for start in range(4) for new in range(3)])
        tables = [part.rng.sample(range(90), 30) for _ in range(5)]
        part.compare(pool, [(size, part.rng.randint(25 * size, 30 * size), table)
                            for size, table in zip((1, 2, 3, 7, 16), tables)])

    def test_the_stage(self, part):
        whole(part)


def prefixes(rng, number):
    """Prompts that begin alike, and some that have the same tokens after another beginning."""
    stem = [rng.randrange(13) for _ in range(6)]
    other = [(stem[0] + 1) % 13, *stem[1:4]]
    starts = stem, stem[:4], stem[2:], other, other + stem[4:]
    prompts = [starts[i % 5] + [rng.randrange(13) for _ in range(rng.randint(1, 3))]
               for i in range(number)]
    return given(*[(prompt, rng.randint(2, 5), 2 * i) for i, prompt in enumerate(prompts)])


def chains(cases):
    """What `hashes` returns and keeps, call by call, as the request grows."""
    for size, tokens, ends in cases:
        scheduler, (request,) = PrefixScheduler(1, 1, 40, size), given((tokens, 9))
        for end in ends:
            returned = list(scheduler.hashes(request, end))
            yield f"hashes(request, {end}), pages of {size}, the tokens {tokens}", {
                "it returns, up to `end`": returned[:end // size],
                "how many are kept": len(request.page_hashes)}


def again_and_again(request):
    scheduler = PrefixScheduler(1, 1, 4000, 1)
    for end in range(0, 2000):
        scheduler.hashes(request, end)


def cache_and_find(pages):
    hashes = [b"%d" % i for i in range(20_000)]
    for page, name in enumerate(hashes):
        pages.cache(page, name)
    pages.find(hashes)


@points(3, "generate_prefix.py:PrefixScheduler.hashes", "generate_prefix.py:PrefixPages.find",
        "generate_prefix.py:PrefixPages.cache", title="prefix caching")
class Test6c(Checks):
    in_time = [("hashes of 2,000 tokens, called for each of them",
                lambda: given((2000, 1), context_length=4000)[0], again_and_again),
               ("20,000 pages cached and found", lambda: PrefixPages(20_000, 1), cache_and_find)]

    def test_hashes(self, part):
        rng = part.rng
        part.compare(chains, [(2, [5, 7, 5, 7, 2], (0, 1, 2, 3, 5, 4)), (1, [5, 5], (2, 2)),
                              (3, [*range(9)], (9, 3)), (4, [1, 2], (2,))])
        part.compare(chains, [(size, [rng.randrange(3) for _ in range(12)], sorted(
            rng.randint(0, 12) for _ in range(4))) for size in (1, 2, 3, 5)])

    def test_pools(self, part):
        part.compare(pools, part.rng, [(8, 2, 40)] * 6)
        part.compare(pools, part.rng, [(80, 2, 150)])

    def test_the_stage(self, part):
        for many in (5, 5, 30 if part.hidden else 12):
            part.serve("generate_prefix", prefixes(part.rng, many), max_batch=2, token_budget=6,
                       page_size=2, pages=6 * many)


def preempted(order):
    """Some requests are preempted by hand."""
    queue = PagedScheduler(max(order) + 2, 10**4, 400, 2)
    for request in given(*[([i % 13] * 3, 9) for i in range(max(order) + 4)]):
        queue.add(request)
    queue.schedule(0)
    for generated, which in enumerate(order, 1):
        request = queue.running[which]
        request.computed, request.generated = 3, [7] * generated
        queue.preempt(request)
        yield f"after the preemption of {request.name}", {
            "running": names(queue.running), "waiting": names(queue.waiting),
            "type of waiting": isinstance(queue.waiting, deque), "its cache, computed, generated "
            "and arrival": [request.block_table, request.computed, request.generated,
                            request.arrival],
            "free pages": len(queue.pages.free_queue),
            "preemptions counted": queue.pages.counts["preemptions"]}


@points(2, "paging.py:PagedScheduler.preempt", title="preemption")
class Test6d(Checks):
    def test_preempt(self, part):
        part.compare(preempted, (1, 2, 0, 0))
        part.compare(preempted, tuple(range(30, 0, -3)))

    def test_the_stage(self, part):
        for sizes in part.sizes:
            requests = drawn(part.rng, prompt=6, **sizes)
            for request in requests:
                request.max_new_tokens = part.rng.randint(5, 8)
            requests[-1].arrival = 300   # while it is awaited, the others must not wait
            many = sizes.get("least", 4)
            part.serve("generate_paged", requests, max_batch=many, token_budget=2 * many,
                       page_size=2, pages=2 * many)


test_6_numbers, test_6_break = answers(6, 2)
