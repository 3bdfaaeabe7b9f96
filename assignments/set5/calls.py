"""Set 5: runs one function on a case, and returns what it gives and changes."""
import copy
from collections import OrderedDict
from contextlib import contextmanager
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


# --- what a kernel is given -----------------------------------------------------------------------

def paged(plan, page_size, pool, device=None):
    """A layout of requests that take their pages from the front of this list."""
    pairs = plan_of(plan)
    pages = iter(pool)
    for (request, _), row in zip(pairs, plan):
        request.block_table = [next(pages) for _ in range(row["pages"])]
    return Paged(pairs, None, PagePool(len(pool), page_size), device)


def lay_out(plan, page_size, pool):
    batch = paged(plan, page_size, pool)
    layout = layout_of(batch, "tokens", "positions", "wanted")
    for name in *HOST, *DEVICE:
        value = getattr(batch, name, None)
        layout[f"shape and dtype of {name}"] = kind_of(value)
        if name != "block_table":
            layout[name] = value
        elif torch.is_tensor(value):
            layout |= pages_in(value, batch.plan)
    return layout


def pages_in(block_tables, plan):
    """Of each request's row the pages that it has: behind them, anything may stand."""
    pages = {}
    for (request, _), row in zip(plan, block_tables):
        pages[f"{request.name}'s pages"] = row[:len(request.block_table)]
    return pages


def lay_out_on_a_device():
    plan = [
        {"prompt": 3, "n": 3, "pages": 2},
        {"prompt": 4, "n": 4, "pages": 2}]
    return on_second_device(lambda device: paged(plan, 2, range(4), device), *HOST, *DEVICE)


# --- attention ------------------------------------------------------------------------------------

def paged_attention(lengths, page_size, pool, heads, size):
    """With made-up numbers, for requests of (new tokens, keys) each. Empty slots hold NaN."""
    tables = tables_for(lengths, page_size, pool)
    k_pages = empty_pages(heads, len(pool), page_size, size)
    v_pages = empty_pages(heads, len(pool), page_size, size)
    pairs = 0   # of a new token and a key of the same request
    for i, (new_tokens, keys) in enumerate(lengths):
        write(k_pages, tables[i], numbers(2 * i, heads, keys, size))
        write(v_pages, tables[i], numbers(2 * i + 1, heads, keys, size))
        pairs += new_tokens * keys
    starts = torch.tensor([0, *accumulate(new_tokens for new_tokens, _ in lengths)])
    ends = torch.tensor([keys for _, keys in lengths])
    table = rectangle(tables)
    q = numbers(99, heads, int(starts[-1]), size)
    arguments = {"q": q, "k_pages": k_pages, "v_pages": v_pages}
    before = {name: tensor.clone() for name, tensor in arguments.items()}
    outputs = []

    def attend():
        outputs.append(generate_paged.paged_attention(q, k_pages, v_pages, starts, ends, table))

    spent = operations(attend)
    least = 4 * heads * size * pairs   # some ways are not counted
    result = {"shape and dtype": kind_of(outputs[0]), "the output": outputs[0],
              "operations": max(spent, least)}
    for name, tensor in arguments.items():
        unchanged = torch.allclose(before[name], tensor, rtol=0, atol=0, equal_nan=True)
        result[f"{name} is unchanged"] = unchanged
    return result


def tables_for(lengths, page_size, pool):
    """Requests of (new tokens, keys) each take the pages for their keys from the front."""
    pages = iter(pool)
    tables = []
    for _, keys in lengths:
        number = -(-keys // page_size)
        tables.append([next(pages) for _ in range(number)])
    return tables


def empty_pages(heads, number, page_size, size):
    return torch.full((heads, number, page_size, size), torch.nan).double()


def write(pages, table, values):
    """Writes a request's values (heads, tokens, features) to the pages of its table."""
    page_size = pages.size(2)
    for position in range(values.size(1)):
        page = table[position // page_size]
        pages[:, page, position % page_size] = values[:, position]


def rectangle(tables):
    """Tables as one tensor. Behind a table stands anything, even what is no page."""
    longest = max(map(len, tables))
    rows = []
    for table in tables:
        rows.append(table + [10**6] * (longest - len(table)))
    return torch.tensor(rows)


# --- growth and preemption ------------------------------------------------------------------------

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
        share_counted(self, table, pages)

    def allocate(self, table, number):
        for _ in range(number):
            self.share(table, [next(iter(self.free_queue))])

    def free(self, table):
        for page in reversed(table):
            self.ref_count[page] -= 1
            if self.ref_count[page] == 0:
                self.free_queue[page] = None


def share_counted(pool, table, pages):
    """What `share` does, as part c describes it."""
    for page in pages:
        pool.free_queue.pop(page, None)
        pool.ref_count[page] += 1
    table += pages


def with_pool(call, pages, page_size, running, waiting, counted=False):
    """counted: whether the pool counts in how many tables a page is, and rows may share pages"""
    queue = PagedScheduler(16, 64, pages, page_size)
    if counted:
        queue.pool = CountingPool(pages, page_size)
    queue.pool.counts["preemptions"] = 2   # so far
    lists = []

    def call_on_queue(requests):
        lists.append(queue.running)
        return call(queue, requests)

    result = in_queue(queue, running, waiting, call_on_queue)
    same_list = lists[0] is queue.running
    return {**result, "running is the list that `schedule` walks through": same_list}


def admit(**state):
    return with_pool(lambda queue, _: queue.admit(queue.waiting[0]), **state)


def make_room(request, n, **state):
    i = number_of(request)
    return with_pool(lambda queue, requests: queue.make_room(requests[i], n), **state)


def preempt(request, **state):
    i = number_of(request)
    return with_pool(lambda queue, requests: queue.preempt(requests[i]), **state)


def number_of(letter):
    """Which of the requests A, B, ... has this name."""
    return ord(letter) - ord("A")


# --- pages that are shared and found --------------------------------------------------------------

def in_pool(call, free_queue, ref_count, cached, hash_of, tables):
    """What a call gives and changes. It gets a pool in the middle of a run."""
    pool = PrefixPool(len(ref_count), 4)
    pool.free_queue = OrderedDict.fromkeys(free_queue)
    pool.ref_count = ref_count
    pool.cached = {name: dict.fromkeys(pages) for name, pages in cached}
    pool.hash_of = dict(hash_of)
    value = call(pool)
    return {
        "it returns": value,
        "tables": tables,
        "free_queue": [*pool.free_queue],
        "free_queue is a": type(pool.free_queue).__name__,
        "ref_count": pool.ref_count,
        "cached": {name: listed(pages) for name, pages in pool.cached.items()},
        "hash_of": pool.hash_of,
        "evicted_pages": pool.counts["evicted_pages"]}


def listed(pages):
    """The keys of a dict; of anything else the kind."""
    return [*pages] if isinstance(pages, dict) else kind_of(pages)


def share(table, found, tables, **pool):
    pages = list(found)
    result = in_pool(lambda pool: pool.share(tables[table], pages), tables=tables, **pool)
    return {**result, "the argument `pages`": pages}


def allocate(table, number, tables, **pool):
    return in_pool(lambda pool: pool.allocate(tables[table], number), tables=tables, **pool)


def free(table, tables, **pool):
    freed = tables.pop(table)
    return in_pool(lambda pool: pool.free(freed), tables=tables, **pool)


def forget(page, **pool):
    return in_pool(lambda pool: pool.forget(page), **pool)


def find(hashes, **pool):
    argument = list(hashes)
    of_a_list = in_pool(lambda pool: pool.find(argument), **pool)
    of_an_iterator = in_pool(lambda pool: pool.find(iter(argument)), **pool)
    return {**of_a_list, "the argument `hashes`": argument,
            "of an iterator": of_an_iterator["it returns"]}


def register(page, digest, **pool):
    return in_pool(lambda pool: pool.register(page, digest), **pool)


def hash_of_page(tokens, page_size, pages, prompt=None):
    """
    For one page after the other, of requests that grow. A has these tokens, B begins otherwise,
    and C has A's first page and goes on otherwise.
    """
    n = len(tokens) if prompt is None else prompt
    scheduler = PrefixScheduler(1, 1, 40, page_size)
    sequences = [
        tokens,
        [11, *tokens[1:]],
        [*tokens[:page_size], 11, *tokens[page_size + 1:]]]
    requests = requests_of([{"prompt": sequence[:n]} for sequence in sequences])
    facts = {}
    repeated = 0   # how often a request's page is hashed once more
    known = {request: set() for request in requests}
    with inputs_of_sha256() as hashed:
        for call, i in enumerate(pages):
            beyond_page = (i + 1) * page_size + 1   # tokens: the next page has begun
            for request, sequence in zip(requests, sequences):
                grow(request, sequence[n:], number=beyond_page - n)
                hashed.clear()
                digest = scheduler.hash_of_page(request, i)
                repeated += len(hashed) - len({*hashed} - known[request])
                known[request].update(hashed)
                facts[f"page_hashes of {request.name} hold it"] = digest in request.page_hashes
                facts[f"call {call}, page {i} of {request.name}"] = digest and digest.hex()[:8]
                facts["page_hash is called again for the same page"] = repeated
    return facts


@contextmanager
def inputs_of_sha256():
    """For a `with` block: what is hashed in it, call by call. `page_hash` may have any name."""
    hashed = []
    real = generate_prefix.sha256

    def sha256(data):
        hashed.append(data)
        return real(data)

    with patch.object(generate_prefix, "sha256", sha256):
        yield hashed


def grow(request, answer, number):
    """A request generates its answer up to so many tokens; none is taken back."""
    number = max(len(request.generated), number)
    request.generated = answer[:number]


# --- a request finds its beginning ----------------------------------------------------------------

def admit_after_look_up(prompt, page_size, used, free, cached, generated=0):
    """A stand-in for `find` has `cached` for the first pages; `share` is as part c describes it."""
    queue = PrefixScheduler(4, 64, 40, page_size)
    pool = queue.pool
    pool.free_queue = OrderedDict.fromkeys(free)
    pool.ref_count = [int(page in used) for page in range(40)]
    page_of = dict(enumerate(cached))   # the stand-in for a page's hash is its number
    hashed = []      # pages of which a hash was made
    looked_up = []   # pages that `find` was asked for

    def hash_of_page(request, i):
        hashed.append(i)
        return i

    def find(hashes):
        hashes = list(hashes)   # it may be an iterator
        looked_up.extend(hashes)
        pages = [page_of.get(digest) for digest in hashes]
        if None in pages:
            return pages[:pages.index(None)]
        return pages

    def share(table, pages):
        share_counted(pool, table, pages)

    queue.hash_of_page, pool.find, pool.share = hash_of_page, find, share
    request, = requests_of([{"prompt": prompt, "generated": generated}], 99)
    before = facts_of([request])
    queue.waiting.append(request)
    admitted = queue.admit(request)
    # Its last token has to be computed. And a page that is not full has no hash.
    last_page = (prompt + generated - 1) // page_size
    full_pages = (prompt + generated) // page_size
    too_far = [f"page {i}" for i in looked_up if isinstance(i, int) and i >= last_page]
    too_far += [f"the hash of page {i}" for i in hashed if i >= full_pages]
    result = {
        "it returns": admitted,
        "block table": request.block_table,
        **changes_of([request], before),
        "running": queue.running,
        "waiting": queue.waiting,
        "free queue": [*pool.free_queue],
        "pages that are counted once more": counted_more(pool, used),
        "it looks for": too_far or "pages that may be found"}
    if not admitted:
        page_of.clear()
        pool.free_queue.update(dict.fromkeys(range(20, 40)))
        result["called again, when pages are free and none is found"] = [
            queue.admit(request), request.block_table]
    return result


def counted_more(pool, used):
    """The pages that more tables hold than before, when one held those that were used."""
    pages = []
    for page in range(40):
        more = pool.ref_count[page] - (page in used)
        pages += [page] * more
    return pages


def cache_filled(prompt, generated, page_size, start, end, known=()):
    """known: pages whose hash another page has already, which holds the same tokens"""
    queue = PrefixScheduler(4, 64, 40, page_size)
    for i in known:
        other = 31 + i
        queue.pool.hash_of[other] = stand_in_for_hash(i)
        queue.pool.cached[stand_in_for_hash(i)] = {other: None}
    request, = requests_of([{"prompt": prompt, "generated": generated}], 99)
    number = -(-(prompt + generated) // page_size)
    request.block_table = [30 - i for i in range(number)]
    registered = []
    queue.hash_of_page = lambda request, i: stand_in_for_hash(i)
    queue.pool.register = lambda page, digest: registered.append(f"{page} by {digest}")
    value = queue.cache_filled(request, start, end)
    return {"it returns": value, "it caches": sorted(registered)}


def stand_in_for_hash(i):
    return f"the hash of page {i}"


# --- an auditor -----------------------------------------------------------------------------------

def audit(tables, free_queue, ref_count, cached, hash_of):
    pool = SimpleNamespace(
        number=len(ref_count),
        page_size=2,
        ref_count=ref_count,
        cached={name: dict.fromkeys(pages) for name, pages in cached},
        hash_of=dict(hash_of),
        free_queue=OrderedDict.fromkeys(free_queue))
    before = copy.deepcopy((vars(pool), tables))
    faults = auditor.audit(pool, tables)
    if faults is None:
        return None
    if before != (vars(pool), tables):
        return "it changes the pool or the tables"
    return "something is wrong" if list(faults) else "all is right"
