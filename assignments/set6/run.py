"""Set 6: runs one function on a case, and returns what it gives and changes."""
from collections import OrderedDict
from types import SimpleNamespace
from unittest.mock import patch

import torch
from kit.probes import in_queue, kind_of, numbers, requests_of

import generate_prefix
from cache import KV
from generate_paged import Paged
from generate_prefix import PrefixPages, PrefixScheduler
from paging import PagedScheduler


def slots(table, end, page_size):
    batch = object.__new__(Paged)
    batch.pages = SimpleNamespace(size=page_size)
    found = batch.slots(list(table), end)
    return {"the slots": found, "shape and dtype": kind_of(found)}


def write(slot_mapping, number):
    """Twice, into two layers of a pool of so many slots."""
    batch, found = object.__new__(Paged), {}
    batch.pool, batch.slot_mapping = KV(number), torch.tensor(slot_mapping)
    for layer in 0, "x":
        k, v = numbers(number, 2, 2, len(slot_mapping), 3)
        before = batch.pool.buffers(layer, k, v)
        batch.write(layer, k, v)
        found |= {f"keys of layer {layer}": before[0], f"values of layer {layer}": before[1]}
        found[f"layer {layer} has the buffers it had"] = all(
            a is b for a, b in zip(before, batch.pool.buffers(layer, k, v)))
    return found


def schedule(pages, page_size, running, waiting, token_budget=64):
    queue = PagedScheduler(16, token_budget, pages, page_size)
    return in_queue(queue, running, waiting, lambda _: queue.schedule(0))


def preempt(victim, pages, page_size, running, waiting, token_budget=64):
    queue = PagedScheduler(16, token_budget, pages, page_size)
    return in_queue(queue, running, waiting, lambda all: queue.preempt(all[victim]))


def in_pool(call, free_queue, ref_count, cached, hash_of, tables):
    """What a call gives and changes. It gets a pool in the middle of a run."""
    pages = PrefixPages(len(ref_count), 4)
    pages.free_queue, pages.ref_count = OrderedDict.fromkeys(free_queue), ref_count
    pages.cached, pages.hash_of = dict(cached), dict(hash_of)
    return {"it returns": call(pages), "tables": tables, "free_queue": [*pages.free_queue],
            "ref_count": pages.ref_count, "cached": pages.cached, "hash_of": pages.hash_of,
            "evicted_pages": pages.counts["evicted_pages"]}


def share(table, found, tables, **pool):
    given = list(found)
    said = in_pool(lambda pages: pages.share(tables[table], given), tables=tables, **pool)
    return {**said, "the argument `pages`": given}


def allocate(table, number, tables, **pool):
    return in_pool(lambda pages: pages.allocate(tables[table], number), tables=tables, **pool)


def free(table, tables, **pool):
    freed = tables.pop(table)
    return in_pool(lambda pages: pages.free(freed), tables=tables, **pool)


def find(hashes, **pool):
    given = list(hashes)
    said = in_pool(lambda pages: pages.find(given), **pool)
    return {**said, "the argument `hashes`": given}


def cache(page, name, **pool):
    return in_pool(lambda pages: pages.cache(page, name), **pool)


def hashes(tokens, page_size, ends):
    """Called for one end after the other."""
    scheduler, (request,) = PrefixScheduler(1, 1, 40, page_size), requests_of([{"prompt": tokens}])
    found = {}
    with patch.object(generate_prefix, "page_hash", wraps=generate_prefix.page_hash) as page_hash:
        for i, end in enumerate(ends):
            said = scheduler.hashes(request, end)
            found[f"call {i}, end {end}, the full pages' hashes"] = said and [
                each.hex()[:8] for each in said[:end // page_size]]
            found[f"call {i}, end {end}, how many are kept"] = len(request.page_hashes)
            found[f"call {i}, end {end}, calls of page_hash so far"] = page_hash.call_count
    return found
