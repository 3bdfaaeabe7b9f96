"""Prefix caching: which pages are found, by which hash, how long, and at what cost."""
import gc
import random
import sys
from hashlib import sha256
from types import FunctionType, ModuleType

import pytest
from common import run

from beyond.fairness import SCHEDULERS
from generate_prefix import PrefixPages, PrefixScheduler, page_hash
from model import GPTConfig
from paging import PagedScheduler
from request import Request, indices_due, prepare


@pytest.mark.parametrize("limits, pages, requests, expected, counts", [
    # in step 0 b lacks seven pages, and in that step a fills seven that b can share
    ((2, 64), (9, 2), {"a": (15, 2), "b": ([0] * 14 + [1], 2)}, ["a15", "a1 b1", "b1"],
     dict(shared_pages=7, saved_tokens=14)),
    # generated pages are found too: a has generated two of the four tokens that b finds
    ((1, 8), (8, 2), {"a": ([1, 2], 4), "b": ([1, 2, 7, 7, 7], 1)}, ["a2", "a1", "a1", "a1", "b1"],
     dict(shared_pages=2, saved_tokens=4)),
    # all pages of a prompt are cached, and leave a query: two full pages of four hold it
    ((1, 8), (8, 4), {"a": (8, 2), "b": (8, 2)}, ["a8", "a1", "b4", "b1"],
     dict(shared_pages=1, saved_tokens=4)),
    # what is found is not to be computed: so in step 1 there is budget for c
    ((3, 8), (9, 4), {"a": (9, 1), "b": (9, 1), "c": ([1] * 3, 1)}, ["a8", "a1 b1 c3"],
     dict(shared_pages=2, saved_tokens=8)),
    # the page that a request fills with its last pass is found when that request is gone
    ((1, 8), (8, 4), {"a": (4, 1), "b": (6, 1)}, ["a4", "b2"],
     dict(shared_pages=1, saved_tokens=4)),
    # pages that are found may be the only free ones: with one for its last token, c needs three
    ((2, 16), (4, 2), {"a": ([1] * 4, 1), "b": ([2, 2], 3), "c": ([1] * 5, 1)},
     ["a4 b2", "b1", "b1", "c1"], dict(shared_pages=2, saved_tokens=4, evicted_pages=1)),
    ((2, 16), (4, 2), {"a": ([1, 1], 5), "b": ([2, 2], 5)},
     ["a2 b2", "a1 b1", "a1 b1",   # two pages each, and all are full
      "a1",                        # b makes room; its second page is taken at once
      "a1",                        # 7 tokens, 6 of them computed: a is done
      "b3",                        # 5 tokens, of which b finds the first page again
      "b1"], dict(preemptions=1, shared_pages=1, saved_tokens=2, evicted_pages=3)),
    # "sat down" has other keys after "the cat" (1 1 5 5) than after "a dog" (8 8 5 5). a's "the
    # cat" can be found, in page 0, and b's copy cannot; then c takes page 0 for "a dog". Of "a dog
    # sat down", d finds "a dog" only, although b's "sat down" is cached
    ((2, 16), (4, 2), {"a": ([1, 1], 1), "b": ([1, 1, 5, 5, 6], 2), "c": ([8, 8], 1),
                       "d": ([8, 8, 5, 5, 0], 1)},
     ["a2 b5", "b1 c2", "d3"], dict(shared_pages=1, saved_tokens=2, evicted_pages=3))])
def test_plans_and_counts(limits, pages, requests, expected, counts):
    scheduler = PrefixScheduler(*limits, *pages)
    assert run(scheduler, requests, lambda request: 7) == expected
    assert {name: n for name, n in scheduler.pages.counts.items() if n} == counts


# --- page hashes ----------------------------------------------------------------------------------

def test_a_page_hash_is_a_chained_sha256():
    """Not a number, which can be used again; not Python's hash, which anybody can predict."""
    first = page_hash(b"", [1, 2])
    assert first == sha256(b"".join(n.to_bytes(8, sys.byteorder) for n in (1, 2))).digest()
    assert page_hash(first, [3]) == sha256(first + (3).to_bytes(8, sys.byteorder)).digest()


class Counted(list):
    """Counts the tokens that are read by slices."""
    read = 0

    def __getitem__(self, index):
        self.read += index.stop - index.start
        return super().__getitem__(index)


def test_finding_and_caching_are_linear_in_the_prompt(monkeypatch):
    """Each full page is hashed once, also of a request that is preempted and looks for them."""
    hashed = []
    monkeypatch.setattr("generate_prefix.page_hash", lambda before, tokens: (
        hashed.append(len(tokens)) or page_hash(before, tokens)))
    requests = prepare([Request([0], 1), Request([0], 1)], GPTConfig(block_size=10_000))
    scheduler, steps = PrefixScheduler(1, 50, 625, 16), 0
    for request in requests:
        request.prompt = Counted(range(10_000))
        scheduler.add(request)
        while not request.finished:
            plan = scheduler.schedule(0)
            scheduler.update(plan, [0] * len(indices_due(plan)))
            steps += 1
            if steps == 100:   # it has 5,000 tokens
                scheduler.preempt(request)
        assert request.prompt.read == 10_000
    assert scheduler.pages.counts["shared_pages"] == 5_000 // 16 + 624
    assert steps == 100 + 101 + 1 and hashed == [16] * 2 * 625


# --- the free queue -------------------------------------------------------------------------------

def test_the_least_recently_used_page_goes_first_and_children_before_their_parents():
    pages = PrefixPages(4, 1)

    def use(*names):
        """A request whose pages have these names; it has ended."""
        pages.share(table := [], pages.find(names))
        pages.allocate(table, len(names) - len(table))
        for page, name in zip(table, names):
            pages.cache(page, name)
        pages.free(table)

    use("parent", "child")
    use("other")
    use("last")
    assert [pages.hash_of[page] for page in pages.free_queue] == [
        "child", "parent", "other", "last"]
    use("parent")   # used again: now it is the youngest
    for gone in "child", "other", "last", "parent":
        assert gone in pages.cached
        pages.allocate([], 1)
        assert gone not in pages.cached   # what is gone is not found again
    assert pages.counts["evicted_pages"] == 4 and not pages.free_queue


# --- nothing is left behind -----------------------------------------------------------------------

def reachable(thing):
    """The number of objects that it holds, however deep."""
    seen, found = {}, [thing]
    while found:
        each = found.pop()
        if id(each) not in seen and not isinstance(each, (type, ModuleType, FunctionType)):
            seen[id(each)] = each
            found += gc.get_referents(each)
    return len(seen)


@pytest.mark.parametrize("policy", [None, "fcfs", "sjf"])
def test_what_has_finished_leaves_nothing_behind(policy):
    """Of 50 requests, and of 200; but the pages that can be found may be others."""
    kind, rng, counts = SCHEDULERS.get(policy, PagedScheduler), random.Random(0), []
    scheduler = kind(16, 96, 24, 6)
    stems = [[rng.randrange(10) for _ in range(n)] for n in (0, 0, 6, 14)]
    for number in 50, 150:   # some share a prefix, some are cancelled
        requests = [Request(rng.choice(stems) + [rng.randrange(10) for _ in range(
            rng.randint(1, 9))], rng.randint(1, 12)) for _ in range(number)]
        cancel = [(rng.randrange(number // 3), n) for n in range(0, number, 9)]
        run(scheduler, requests, lambda request: rng.randrange(10), cancel)
        del requests
        gc.collect()
        counts.append(reachable(scheduler))
    assert counts[1] <= counts[0] + 24   # a hash for each page
    assert scheduler.pages.counts["preemptions"]
    assert policy is None or scheduler.pages.counts["evicted_pages"] > 50
