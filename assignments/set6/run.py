"""Set 6: runs one function on a case, and returns what it gives and changes."""
from collections import OrderedDict
from itertools import accumulate
from unittest.mock import patch

import torch
from kit.probes import devices_of, in_queue, kind_of, layout_of, numbers, plan_of, requests_of

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
    return devices_of(lambda device: paged(plan, 2, range(4), device), *DEVICE)


def paged_attention(lengths, page_size, pool):
    """With made-up numbers, for requests of (new tokens, keys) each. Empty slots hold NaN."""
    k, v = (torch.full((2, len(pool), page_size, 3), torch.nan).double() for _ in "kv")
    tables, pages = [], iter(pool)
    for i, (_, keys) in enumerate(lengths):
        tables.append([next(pages) for _ in range(-(-keys // page_size))])
        for t in k, v:
            new = numbers(2 * i + (t is v), 2, keys, 3)
            for p in range(keys):
                t[:, tables[-1][p // page_size], p % page_size] = new[:, p]
    most = max(map(len, tables))
    table = torch.tensor([each + [0] * (most - len(each)) for each in tables])
    starts = torch.tensor([0, *accumulate(n for n, _ in lengths)])
    q = numbers(99, 2, int(starts[-1]), 3)
    out = generate_paged.paged_attention(
        q, k, v, starts, torch.tensor([keys for _, keys in lengths]), table)
    return {"shape and dtype": kind_of(out), "the output": out}


def with_pool(call, pages, page_size, running, waiting):
    queue = PagedScheduler(16, 64, pages, page_size)
    return in_queue(queue, running, waiting, lambda all: call(queue, all))


def admit(**state):
    return with_pool(lambda queue, _: queue.admit(queue.waiting[0]), **state)


def make_room(of, n, **state):
    return with_pool(lambda queue, all: queue.make_room(all[of], n), **state)


def preempt(victim, **state):
    return with_pool(lambda queue, all: queue.preempt(all[victim]), **state)


def in_pool(call, free_queue, ref_count, cached, hash_of, tables):
    """What a call gives and changes. It gets a pool in the middle of a run."""
    pool = PrefixPool(len(ref_count), 4)
    pool.free_queue, pool.ref_count = OrderedDict.fromkeys(free_queue), ref_count
    pool.cached = {name: dict.fromkeys(pages) for name, pages in cached}
    pool.hash_of = dict(hash_of)
    return {"it returns": call(pool), "tables": tables, "free_queue": [*pool.free_queue],
            "ref_count": pool.ref_count,
            "cached": {name: [*pages] for name, pages in pool.cached.items()},
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


def cache(page, name, **pool):
    return in_pool(lambda pool: pool.cache(page, name), **pool)


def hashes(tokens, page_size, pages):
    """hash_of_page, called for one page after the other."""
    scheduler, (request,) = PrefixScheduler(1, 1, 40, page_size), requests_of([{"prompt": tokens}])
    found = {}
    with patch.object(generate_prefix, "page_hash", wraps=generate_prefix.page_hash) as page_hash:
        for call, i in enumerate(pages):
            said = scheduler.hash_of_page(request, i)
            found[f"call {call}, page {i}"] = said and said.hex()[:8]
            found[f"call {call}, page {i}, how many are kept"] = len(request.page_hashes)
            found[f"call {call}, page {i}, calls of page_hash so far"] = page_hash.call_count
    return found
