"""
Stage 7: prefix caching. What was computed for one request is found again by the next.

Chats begin with the same system prompt, and a preempted request comes back with the tokens it had.
By the causal rule, keys and values depend on the tokens up to their own and on nothing else. So a
full page can serve every request whose tokens are equal *up to the end of that page*:

    pool         page 0   page 1   page 2   page 3   page 4
                 S S S S  A A a .  S S S S  B b . .  free         page_size 4

    A's table    0, 2, 1       S: the 8 tokens of a common system prompt, computed and kept once
    B's table    0, 2, 3       pages 0 and 2 have ref_count 2

A page is known by a *hash* of its own tokens and of the hash of the page before it. Its own tokens
alone will not do: "sat down" has other keys after "the cat" than after "a dog". Nor will the number
of the page before: once that page is freed and filled anew, the chain would lead from the new words
to the old ones. (vLLM chains hashes of content too, by sha256: whoever makes two beginnings
collide has one answered from the other's cache, CVE-2025-25183. SGLang keeps a radix tree instead.)

Freed pages stay cached. They go to the end of the free queue, and until one is needed for something
else it can still be found: the *least recently used* goes first, and of one request the last page
goes before those that lead to it. Only full pages are shared, and the last token of a prompt is
always computed, since its logits are needed. So no request writes into a shared page, and none is
ever copied ("copy on write").

Better than paged: tokens that were computed once are not computed again, and equal pages are kept
once. The layout and the loop are paged's; only the scheduler is another.
Wasted: two equal prompts of one step are both computed and both kept.
Next: beyond/in_batch.py lets the second one wait for the first.
"""
from array import array
from collections import OrderedDict
from hashlib import sha256

import generate_paged
from paging import PagedScheduler, Pages


def page_hash(before, tokens):
    """The name of a full page. before: that of the page before it in the sequence; or b""."""
    return sha256(before + array("q", tokens).tobytes()).digest()


class PrefixPages(Pages):
    """
    Pages that may be in several block tables, and that can be found by their page_hash.

    free_queue: in order, least recently used first; but a page can be taken out of the middle
    ref_count:  how many block tables a page is in. Those with 0 are in the free queue
    cached:     page_hash -> the full page that holds these tokens; hash_of: the reverse
    """

    def __init__(self, number, size):
        super().__init__(number, size)
        self.free_queue, self.ref_count = OrderedDict.fromkeys(range(number)), [0] * number
        self.cached, self.hash_of = {}, {}

    def find(self, hashes):
        """The cached pages of the longest possible beginning of a sequence of page hashes."""
        found = []
        for each in hashes:
            if each not in self.cached:
                break
            found.append(self.cached[each])
        return found

    def share(self, table, pages):
        """Appends these pages to a block table. Those that were free are so no longer."""
        for page in pages:
            self.free_queue.pop(page, None)
            self.ref_count[page] += 1
        table += pages

    def allocate(self, table, number):
        """As Pages.allocate; what these pages held cannot be found any more."""
        for _ in range(number):
            page, _ = self.free_queue.popitem(last=False)
            if page in self.hash_of:
                del self.cached[self.hash_of.pop(page)]
                self.counts["evicted_pages"] += 1
            self.share(table, [page])

    def cache(self, page, name):
        """From now on a full page can be found, unless one with the same tokens can already."""
        if name not in self.cached:
            self.cached[name], self.hash_of[page] = page, name

    def free(self, table):
        """As Pages.free; but only pages that are in no other block table, and the last first."""
        for page in reversed(table):
            self.ref_count[page] -= 1
            if not self.ref_count[page]:
                self.free_queue[page] = None


class PrefixScheduler(PagedScheduler):
    """A PagedScheduler that looks for a request's beginning before it gives it new pages."""

    def __init__(self, max_batch, token_budget, pages, page_size):
        super().__init__(max_batch, token_budget, pages, page_size)
        self.pages = PrefixPages(pages, page_size)

    def hashes(self, request, end):
        """Its page hashes, at least for its full pages before `end`; each is computed only once."""
        known, size = request.page_hashes, self.pages.size
        for start in range(len(known) * size, end - size + 1, size):
            before = known[-1] if known else b""
            known.append(page_hash(before, request.slice(start, start + size)))
        return known

    def grant_room(self, request):
        """As PagedScheduler.grant_room; pages that are found need not be computed."""
        last = request.todo - 1   # of its tokens; always computed, because its logits are needed
        found = self.pages.find(self.hashes(request, last)[:last // self.pages.size])
        new = self.pages.needed(request.todo) - len(found)
        # Found pages that nobody else holds are in the free queue, and will be taken out of it.
        if new + sum(page in self.pages.free_queue for page in found) > len(self.pages.free_queue):
            return False
        request.block_table, request.computed = [], len(found) * self.pages.size
        self.pages.share(request.block_table, found)
        self.pages.allocate(request.block_table, new)
        self.pages.counts.update(shared_pages=len(found), saved_tokens=request.computed)   # adds
        return True

    def update(self, plan, tokens):
        """As Scheduler.update; but first, while all still hold their pages, it caches full ones."""
        for request, n in plan:
            self.cache_filled(request, request.computed, request.computed + n)
        super().update(plan, tokens)

    def cache_filled(self, request, start, end):
        """Pages that the request's tokens `start` to `end` have filled can be found from now on."""
        size, hashes = self.pages.size, self.hashes(request, end)
        for i in range(start // size, end // size):
            self.pages.cache(request.block_table[i], hashes[i])


def generate(model, requests, max_batch=8, token_budget=64, pages=None, page_size=None,
             scheduler=PrefixScheduler, on_token=None):
    """Runs `requests` as paged does, with another scheduler. Returns the trace."""
    trace = generate_paged.generate(model, requests, max_batch, token_budget, pages, page_size,
                                    scheduler, on_token)
    trace.stage = "prefix"
    return trace


if __name__ == "__main__":
    from lab.run import main
    main(generate, __doc__)
