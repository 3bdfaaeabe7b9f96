"""Set 6: runs one function on a case, and returns what it gives and changes."""
from collections import Counter, deque
from types import SimpleNamespace

import torch

import generate_prefix
from cache import KV
from generate_paged import Paged
from generate_prefix import PrefixPages, PrefixScheduler
from lab.checks.probes import kind_of, numbers, requests_of
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


def queue_of(pages, page_size, running, waiting, token_budget=64):
    queue = PagedScheduler(16, token_budget, pages, page_size)
    everybody = requests_of(running + waiting)
    queue.running, queue.waiting = everybody[:len(running)], deque(everybody[len(running):])
    for request, row in zip(queue.running, running):
        request.block_table = []
        queue.pages.allocate(request.block_table, row["pages"])
    return queue, everybody


def state_of(queue, everybody):
    tables = [page for each in everybody for page in each.block_table or ()]
    return {"running": queue.running, "waiting": queue.waiting, **{
        f"{each.name}'s pages, computed, generated, arrival": [
            "none" if each.block_table is None else len(each.block_table), each.computed,
            each.generated, each.arrival] for each in everybody},
        "waiting is a": type(queue.waiting).__name__,
        "each page is free, or in one table": sorted([*queue.pages.free_queue, *tables]) == [
            *range(queue.pages.number)], "preemptions": queue.pages.counts["preemptions"]}


def schedule(**state):
    queue, everybody = queue_of(**state)
    return {"the plan": queue.schedule(0), **state_of(queue, everybody)}


def preempt(victim, **state):
    queue, everybody = queue_of(**state)
    return {"it returns": queue.preempt(queue.running[victim]), **state_of(queue, everybody)}


def pool(number, calls):
    """
    allocate, share and free, of block tables with names. "cached" puts the i-th page of a table
    under a name; share takes the cached pages of such names. What cannot be is left out.
    """
    pages, tables, found = PrefixPages(number, 4), {}, {}
    for i, (call, name, *rest) in enumerate(calls, 1):
        table, returned = tables.setdefault(name, []), None
        if call == "allocate" and rest[0] <= len(pages.free_queue):
            returned = pages.allocate(table, rest[0])
        elif call == "share":
            argument = [pages.cached[each] for each in rest if pages.cached.get(each, -1) not in (
                -1, *table)]
            before = list(argument)
            returned = pages.share(table, argument)
            returned = returned if argument == before else "it changes `pages`"
        elif call == "free":
            returned = pages.free(list(tables.pop(name)))
        elif call == "cached" and rest[0] < len(table) and table[rest[0]] not in pages.hash_of:
            if rest[1] not in pages.cached:
                pages.cached[rest[1]], pages.hash_of[table[rest[0]]] = table[rest[0]], rest[1]
        found[f"after call {i}, {call} {name} {' '.join(map(str, rest))}".strip()] = {
            "it returns": returned, "tables": {each: list(tables[each]) for each in tables},
            "free_queue": list(pages.free_queue), "ref_count": list(pages.ref_count),
            "cached": dict(pages.cached), "hash_of": dict(pages.hash_of),
            "evicted_pages": pages.counts["evicted_pages"]}
    return found


def hashes(tokens, page_size, ends):
    """Called for one end after the other."""
    scheduler, (request,) = PrefixScheduler(1, 1, 40, page_size), requests_of([{"prompt": tokens}])
    made, found, computed = generate_prefix.page_hash, {}, Counter()

    def counting(before, page):
        computed[before, *page] += 1
        return made(before, page)

    generate_prefix.page_hash = counting
    try:
        for i, end in enumerate(ends):
            said = scheduler.hashes(request, end)
            found[f"call {i}, end {end}, the full pages' hashes"] = None if said is None else [
                each.hex()[:8] if isinstance(each, bytes) else each
                for each in said[:end // page_size]]
            found[f"call {i}, end {end}, how many are kept"] = len(request.page_hashes)
    finally:
        generate_prefix.page_hash = made
    return {**found, "each hash is computed once": max(computed.values(), default=1) == 1}


def find(cached, asked):
    """cache for each [page, name] in `cached`, then find."""
    def hashes_of(names):
        return [f"hash {name}".encode() for name in names]

    pages, argument = PrefixPages(9, 2), hashes_of(asked)
    returned = [pages.cache(page, *hashes_of([name])) for page, name in cached]
    return {"it returns": pages.find(argument), "cache returns": next(filter(None, returned), None),
            "cached": {name.decode(): page for name, page in pages.cached.items()},
            "hash_of": {page: name.decode() for page, name in pages.hash_of.items()},
            "all else is unchanged": argument == hashes_of(asked)
            and [*pages.free_queue] == [*range(9)]}
