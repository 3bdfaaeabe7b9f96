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
    batch = object.__new__(Paged)
    batch.pool, batch.slot_mapping, found = KV(number), torch.tensor(slot_mapping), {}
    for layer in 0, "x":
        k, v = numbers(number, 2, 2, len(slot_mapping), 3)
        before = batch.pool.buffers(layer, k, v)
        batch.write(layer, k, v)
        same = all(a is b for a, b in zip(before, batch.pool.buffers(layer, k, v)))
        found |= {f"keys of layer {layer}": before[0], f"values of layer {layer}": before[1],
                  f"in layer {layer}, the pool's own buffers": same}
    return found


def queue_of(pages, page_size, running, waiting, token_budget=64, max_batch=8):
    queue = PagedScheduler(max_batch, token_budget, pages, page_size)
    held = [row.get("pages", 0) for row in running]
    everybody = requests_of([{name: value for name, value in row.items() if name != "pages"}
                             for row in running + waiting])
    queue.running, queue.waiting = everybody[:len(running)], deque(everybody[len(running):])
    for request, number in zip(queue.running, held):
        request.block_table = []
        queue.pages.allocate(request.block_table, number)
    return queue, everybody


def state_of(queue, everybody):
    tables = Counter(page for each in everybody for page in each.block_table or ())
    once = sorted([*queue.pages.free_queue, *tables.elements()]) == [*range(queue.pages.number)]
    return {"running": queue.running, "waiting": queue.waiting, "pages, computed, generated": {
        each.name: [None if each.block_table is None else len(each.block_table), each.computed,
                    each.generated] for each in everybody},
        "every page is free or in one table": once, "waiting is a": type(queue.waiting).__name__,
        "preemptions": queue.pages.counts["preemptions"]}


def schedule(step=0, **state):
    queue, everybody = queue_of(**state)
    plan = queue.schedule(step)
    return {"the plan": plan, **state_of(queue, everybody)}


def preempt(victim, **state):
    queue, everybody = queue_of(**state)
    returned = queue.preempt(queue.running[victim])
    return {"it returns": returned, **state_of(queue, everybody)}


def pool(number, calls):
    """
    calls: allocate, share and free, of block tables with names. "cached" puts the i-th page of a
    table under a name; share takes the cached pages of such names. What cannot be is left out.
    """
    pages, tables, found = PrefixPages(number, 4), {}, {}
    for i, (call, table, *rest) in enumerate(calls, 1):
        if call == "allocate" and rest[0] <= len(pages.free_queue):
            returned = pages.allocate(tables.setdefault(table, []), rest[0])
        elif call == "share":
            shared = [pages.cached[name] for name in rest if name in pages.cached]
            argument = [page for page in shared if page not in tables.get(table, ())]
            before = list(argument)
            returned = pages.share(tables.setdefault(table, []), argument)
            if argument != before:
                returned = "it changes `pages`"
        elif call == "free" and table in tables:
            returned = pages.free(list(tables.pop(table)))
        elif call == "cached" and rest[0] < len(tables.get(table, ())):
            page, returned = tables[table][rest[0]], None
            if rest[1] not in pages.cached and page not in pages.hash_of:
                pages.cached[rest[1]], pages.hash_of[page] = page, rest[1]
        else:
            continue
        found[f"after call {i}, {call} {table} {' '.join(map(str, rest))}".strip()] = {
            "it returns": returned, "the tables": {name: list(each) for name, each in tables.items()},
            "free_queue": list(pages.free_queue), "ref_count": list(pages.ref_count),
            "cached": dict(pages.cached), "hash_of": dict(pages.hash_of),
            "evicted_pages": pages.counts["evicted_pages"]}
    return found


def hashes(tokens, page_size, ends):
    """Called for one end after the other."""
    scheduler, (request,) = PrefixScheduler(1, 1, 40, page_size), requests_of([{"prompt": tokens}])
    made, found, computed = generate_prefix.page_hash, {}, []

    def counting(before, page):
        computed.append(page)
        return made(before, page)

    generate_prefix.page_hash = counting
    try:
        for i, end in enumerate(ends):
            returned = scheduler.hashes(request, end)
            found[f"call {i}, end {end}: the hashes of the full pages before it"] = returned and [
                each.hex()[:8] if isinstance(each, bytes) else each for each in returned][:end // page_size]
            found[f"call {i}, end {end}: how many are kept"] = len(request.page_hashes)
    finally:
        generate_prefix.page_hash = made
    return {**found, "each hash is computed once": len(computed) <= len(tokens) // page_size}


def find(cached, asked):
    """cache for each [page, name] in `cached`, then find."""
    pages = PrefixPages(9, 2)
    for page, name in cached:
        returned = pages.cache(page, name.encode())
    argument = [name.encode() for name in asked]
    found = pages.find(argument)
    return {"it returns": found, "cache returns": returned if cached else None,
            "cached": {name.decode(): page for name, page in pages.cached.items()},
            "hash_of": {page: name.decode() for page, name in pages.hash_of.items()},
            "free_queue": list(pages.free_queue), "`hashes` is unchanged": [
                name.encode() for name in asked] == argument}
