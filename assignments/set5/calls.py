"""Set 5: runs one function on a case, and returns what it gives and changes."""
import copy
from collections import OrderedDict
from itertools import accumulate
from types import SimpleNamespace
from unittest.mock import patch

import audit as auditor
import torch
from probes import (
    changes_of,
    facts_of,
    in_queue,
    kind_of,
    layout_of,
    numbers,
    on_second_device,
    operations,
    plan_of,
    requests_of,
)

import generate_paged
import generate_prefix
from generate_paged import Paged
from generate_prefix import PrefixPool, PrefixScheduler
from paging import PagedScheduler, PagePool

HOST = "query_start_loc", "seq_lens"
DEVICE = "block_table", "slot_mapping"


def paged(plan, page_size, pool, device=None):
    """A layout of requests that take their pages from the front of this list."""
    pairs, pages = plan_of(plan), iter(pool)
    for (request, _), row in zip(pairs, plan):
        request.block_table = [next(pages) for _ in range(row["pages"])]
    return Paged(pairs, None, PagePool(len(pool), page_size), device)


def lay_out(plan, page_size, pool):
    batch = paged(plan, page_size, pool)
    found = layout_of(batch, "tokens", "positions", "wanted")
    for name in *HOST, *DEVICE:
        value = getattr(batch, name, None)
        found[f"shape and dtype of {name}"] = kind_of(value)
        if name != "block_table":
            found[name] = value
        elif torch.is_tensor(value):   # behind a table, anything may stand
            found |= {f"{request.name}'s pages": row[:len(request.block_table)]
                      for (request, _), row in zip(batch.plan, value)}
    return found


def lay_out_on_a_device():
    plan = [{"prompt": 3, "n": 3, "pages": 2}, {"prompt": 4, "n": 4, "pages": 2}]
    return on_second_device(lambda device: paged(plan, 2, range(4), device), *HOST, *DEVICE)


def paged_attention(lengths, page_size, pool, heads, size):
    """With made-up numbers, for requests of (new tokens, keys) each. Empty slots hold NaN."""
    k, v = (torch.full((heads, len(pool), page_size, size), torch.nan).double() for _ in "kv")
    tables, pages = [], iter(pool)
    for i, (_, keys) in enumerate(lengths):
        tables.append([next(pages) for _ in range(-(-keys // page_size))])
        for t in k, v:
            new = numbers(2 * i + (t is v), heads, keys, size)
            for p in range(keys):
                t[:, tables[-1][p // page_size], p % page_size] = new[:, p]
    most = max(map(len, tables))
    # Behind a table stands anything, even what is no page.
    table = torch.tensor([each + [10**6] * (most - len(each)) for each in tables])
    starts = torch.tensor([0, *accumulate(n for n, _ in lengths)])
    q, out = numbers(99, heads, int(starts[-1]), size), []
    before = [t.clone() for t in (q, k, v)]
    spent = operations(lambda: out.append(generate_paged.paged_attention(
        q, k, v, starts, torch.tensor([keys for _, keys in lengths]), table)))
    least = 4 * heads * size * sum(n * keys for n, keys in lengths)   # some ways are not counted
    return {"shape and dtype": kind_of(out[0]), "the output": out[0],
            "operations": max(spent, least), **{
                f"{name} is unchanged": torch.allclose(*pair, 0, 0, equal_nan=True)
                for name, *pair in zip(("q", "k_pages", "v_pages"), before, (q, k, v))}}


class CountingPool(PagePool):
    """
    A pool as part c has it: pages that are counted, in an OrderedDict if they are free. Functions
    that take and free pages through the pool work with it as well.
    """

    def __init__(self, number, page_size):
        super().__init__(number, page_size)
        self.free_queue = OrderedDict.fromkeys(range(number))
        self.ref_count = [0] * number

    def share(self, table, pages):
        for page in pages:
            self.free_queue.pop(page, None)
            self.ref_count[page] += 1
        table += pages

    def allocate(self, table, number):
        for _ in range(number):
            self.share(table, [next(iter(self.free_queue))])

    def free(self, table):
        for page in reversed(table):
            self.ref_count[page] -= 1
            if self.ref_count[page] == 0:
                self.free_queue[page] = None


def with_pool(call, pages, page_size, running, waiting, counted=False):
    """counted: whether the pool counts in how many tables a page is, and rows may share pages"""
    queue, given = PagedScheduler(16, 64, pages, page_size), []
    if counted:
        queue.pool = CountingPool(pages, page_size)
    queue.pool.counts["preemptions"] = 2   # so far
    found = in_queue(queue, running, waiting,
                     lambda all: given.append(queue.running) or call(queue, all))
    return {**found, "running is the list that `schedule` walks through": (
        given[0] is queue.running)}


def admit(**state):
    return with_pool(lambda queue, _: queue.admit(queue.waiting[0]), **state)


def make_room(request, n, **state):
    return with_pool(lambda queue, all: queue.make_room(all[ord(request) - 65], n), **state)


def preempt(request, **state):
    return with_pool(lambda queue, all: queue.preempt(all[ord(request) - 65]), **state)


def in_pool(call, free_queue, ref_count, cached, hash_of, tables):
    """What a call gives and changes. It gets a pool in the middle of a run."""
    pool = PrefixPool(len(ref_count), 4)
    pool.free_queue, pool.ref_count = OrderedDict.fromkeys(free_queue), ref_count
    pool.cached = {name: dict.fromkeys(pages) for name, pages in cached}
    pool.hash_of = dict(hash_of)
    return {"it returns": call(pool), "tables": tables, "free_queue": [*pool.free_queue],
            "free_queue is a": type(pool.free_queue).__name__, "ref_count": pool.ref_count,
            "cached": {name: [*pages] if isinstance(pages, dict) else kind_of(pages)
                       for name, pages in pool.cached.items()},
            "hash_of": pool.hash_of, "evicted_pages": pool.counts["evicted_pages"]}


def share(table, found, tables, **pool):
    given = list(found)
    said = in_pool(lambda pool: pool.share(tables[table], given), tables=tables, **pool)
    return {**said, "the argument `pages`": given}


def allocate(table, number, tables, **pool):
    return in_pool(lambda pool: pool.allocate(tables[table], number), tables=tables, **pool)


def free(table, tables, **pool):
    freed = tables.pop(table)
    return in_pool(lambda pool: pool.free(freed), tables=tables, **pool)


def forget(page, **pool):
    return in_pool(lambda pool: pool.forget(page), **pool)


def find(hashes, **pool):
    given = list(hashes)
    said = in_pool(lambda pool: pool.find(given), **pool)
    lazy = in_pool(lambda pool: pool.find(iter(given)), **pool)
    return {**said, "the argument `hashes`": given, "of an iterator": lazy["it returns"]}


def register(page, digest, **pool):
    return in_pool(lambda pool: pool.register(page, digest), **pool)


def hash_of_page(tokens, page_size, pages, prompt=None):
    """
    For one page after the other, of requests that grow. A has these tokens, B begins otherwise,
    and C has A's first page and goes on otherwise.
    """
    n = len(tokens) if prompt is None else prompt
    scheduler = PrefixScheduler(1, 1, 40, page_size)
    sequences = [tokens, [11, *tokens[1:]],
                 [*tokens[:page_size], 11, *tokens[page_size + 1:]]]
    requests = requests_of([{"prompt": each[:n]} for each in sequences])
    found, made = {}, []
    again = dict.fromkeys(requests, 0)   # how often a request's page is hashed once more
    known = {request: set() for request in requests}

    def sha256(given, real=generate_prefix.sha256):   # page_hash itself may be called by any name
        made.append(given)
        return real(given)

    with patch.object(generate_prefix, "sha256", sha256):
        for call, i in enumerate(pages):
            for request, sequence in zip(requests, sequences):   # the next page has begun
                many = max(len(request.generated), (i + 1) * page_size + 1 - n)
                request.generated = sequence[n:][:many]
                made.clear()
                said = scheduler.hash_of_page(request, i)
                again[request] += len(made) - len({*made} - known[request])
                known[request].update(made)
                found[f"page_hashes of {request.name} hold it"] = said in request.page_hashes
                found[f"call {call}, page {i} of {request.name}"] = said and said.hex()[:8]
                found["page_hash is called again for the same page"] = sum(again.values())
    return found


def admit_after_look_up(prompt, page_size, used, free, cached, generated=0):
    """A stand-in for `find` has `cached` for the first pages; `share` is as part c describes it."""
    queue, asked = PrefixScheduler(4, 64, 40, page_size), []
    request, = requests_of([{"prompt": prompt, "generated": generated}], 99)
    pool = queue.pool
    pool.free_queue, pool.ref_count = OrderedDict.fromkeys(free), [i in used for i in range(40)]
    names = {i: page for i, page in enumerate(cached)}

    def find(hashes):
        pages = [names.get(each) for each in hashes]
        return pages[:pages.index(None)] if None in pages else pages

    def share(table, pages):
        for page in pages:
            pool.free_queue.pop(page, None)
            pool.ref_count[page] += 1
        table += pages

    queue.hash_of_page, pool.find, pool.share = lambda request, i: asked.append(i) or i, find, share
    before = facts_of([request])
    queue.waiting.append(request)
    said = queue.admit(request)
    found = {"it returns": said, "block table": request.block_table,
             **changes_of([request], before), "running": queue.running, "waiting": queue.waiting,
             "free queue": [*pool.free_queue], "pages that are counted once more": [
                 page for page in range(40) for _ in range(pool.ref_count[page] - (page in used))],
             "it asks for the hash of": [f"page {i}" for i in asked if i >= (
                 prompt + generated - 1) // page_size] or "pages that may be found"}
    if not said:
        names.clear()
        pool.free_queue.update(dict.fromkeys(range(20, 40)))
        found["called again, when pages are free and none is found"] = [
            queue.admit(request), request.block_table]
    return found


def cache_filled(prompt, generated, page_size, start, end, known=()):
    """known: pages whose hash another page has already, which holds the same tokens"""
    queue, made = PrefixScheduler(4, 64, 40, page_size), []
    for i in known:
        queue.pool.hash_of[31 + i] = f"the hash of page {i}"
        queue.pool.cached[f"the hash of page {i}"] = {31 + i: None}
    request, = requests_of([{"prompt": prompt, "generated": generated}], 99)
    request.block_table = [30 - i for i in range(-(-(prompt + generated) // page_size))]
    queue.hash_of_page = lambda request, i: f"the hash of page {i}"
    queue.pool.register = lambda page, digest: made.append(f"{page} by {digest}")
    return {"it returns": queue.cache_filled(request, start, end), "it caches": sorted(made)}


def audit(tables, free_queue, ref_count, cached, hash_of):
    pool = SimpleNamespace(
        number=len(ref_count), page_size=2, ref_count=ref_count,
        cached={name: dict.fromkeys(pages) for name, pages in cached},
        hash_of=dict(hash_of), free_queue=OrderedDict.fromkeys(free_queue))
    before = copy.deepcopy((vars(pool), tables))
    said = auditor.audit(pool, tables)
    if said is None or before != (vars(pool), tables):
        return said if said is None else "it changes the pool or the tables"
    return "something is wrong" if list(said) else "all is right"
