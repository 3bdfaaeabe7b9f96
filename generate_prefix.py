"""
Stage 7: prefix caching. A request finds what was computed for the requests before it.

Chats begin with the same system prompt, and a preempted request comes back with the tokens it had.
By the causal rule, keys and values depend on the tokens up to their own and on nothing else. So a
full page can serve every request whose tokens are equal *up to the end of that page*:

    pool          page 0   page 1   page 2   page 3   page 4
                  S S S S  A A a .  S S S S  B b . .  free         page_size 4

    A's table     0, 2, 1     S: 8 tokens of a common system prompt, computed and kept once
    B's table     0, 2, 3     pages 0 and 2 are in two tables: their ref_count is 2

A page is found by its *hash*, which covers its tokens and the hash of the previous page. Its tokens
alone would not do: the keys of "sat down" differ after "the cat" and after "a dog".

A page can be found as soon as the pass that fills it is *planned*. In each layer, a pass writes all
its keys before it reads any (`Paged.attend`). So equal prompts admitted in one step share pages.

A freed page can still be found until it is taken for other tokens. Pages that nobody can find are
taken first; then those that have not been used for longest (*least recently used*).

Only full pages are shared, and the last token of a request is always computed, because its logits
are needed. So a request writes only into pages it allocated, and no page is copied on write.

Better than paged: if the first full pages of a request are still cached, they are not computed
again. Layout and loop are paged's; only the scheduler differs. Its plans equal those of vLLM's
synchronous scheduler in 1,200 of 1,200 recorded workloads (docs/vllm.md). By default, vLLM plans
ahead, as beyond/ahead.py does.
Wasted, and the file of beyond/ that saves it:

    keys are gathered into a copy                                                kernel.py
    a pass reads all weights, and each decode gets only one token from it        speculative.py
    the device waits while the host plans                                        ahead.py
    a short request may wait long behind others                                  fairness.py
    a layer that sees only a window of tokens keeps the keys of all             hybrid.py

Next: engine.py opens the loop, for requests that come while it runs.
"""
from array import array
from collections import OrderedDict
from hashlib import sha256

import generate_paged
from paging import PagedScheduler, PagePool


def page_hash(before, tokens):
    """
    The hash of a full page. before: that of the page before it in the sequence; or b"".

    It must resist collisions: if other tokens had the same hash, a request would read the wrong
    keys. (CVE-2025-25183: vLLM used Python's own hash. Its default is now sha256.)
    """
    return sha256(before + array("q", tokens).tobytes()).digest()


class PrefixPool(PagePool):
    """
    A PagePool whose pages can be in several block tables, and can be found by their hash.

    free_queue: {page: None}, in order; a page that is found leaves it from the middle
    ref_count:  for each page, how many block tables it is in; those with 0 are in the free queue
    cached:     {hash: {page: None}}, the pages with this hash, the oldest first. There may be
                several: pages are looked for only at admission, and never that of the last token.
                So requests with equal tokens may compute the same page again
    hash_of:    {page: hash}, the reverse
    """

    def __init__(self, number, page_size):
        super().__init__(number, page_size)
        self.free_queue = OrderedDict.fromkeys(range(number))
        self.ref_count = [0] * number
        self.cached = {}
        self.hash_of = {}

    def find(self, hashes):
        """One cached page for each of the first hashes, up to the first that has no cached page."""
        pages = []
        for digest in hashes:
            if digest not in self.cached:
                break
            oldest = next(iter(self.cached[digest]))
            pages.append(oldest)
        return pages

    def share(self, table, pages):
        """
        Appends these pages, cached or newly allocated, to a block table, and counts the reference.
        They leave the free queue, if they were in it.
        """
        for page in pages:
            self.free_queue.pop(page, None)
            self.ref_count[page] += 1
        table += pages

    def allocate(self, table, number):
        """As PagePool.allocate. What these pages held cannot be found any more."""
        for _ in range(number):
            page = next(iter(self.free_queue))
            if page in self.hash_of:
                self.counts["evicted_pages"] += 1
                self.forget(page)
            self.share(table, [page])

    def free(self, table):
        """
        Puts the pages that are now in no table back: to the end of the queue if they can be found,
        else to the front. Of the pages that can be found, the last of the table is put back first,
        and so is taken first: a request finds it only after all pages before it.
        """
        for page in reversed(table):
            self.ref_count[page] -= 1
            if self.ref_count[page] == 0:
                self.free_queue[page] = None   # at the end
                if page not in self.hash_of:
                    self.free_queue.move_to_end(page, last=False)   # to the front

    def register(self, page, digest):
        """From now on this page can be found by `digest`, its hash."""
        self.hash_of[page] = digest
        self.cached.setdefault(digest, {})[page] = None

    def forget(self, page):
        """This page cannot be found any more."""
        digest = self.hash_of.pop(page, None)
        if digest is not None:
            del self.cached[digest][page]
            if not self.cached[digest]:
                del self.cached[digest]


class PrefixScheduler(PagedScheduler):
    """A PagedScheduler that looks for a request's first pages before it gives it new ones."""
    pool_class = PrefixPool

    def hash_of_page(self, request, i):
        """The hash of its i-th page, which is full. Each is computed only once."""
        hashes = request.page_hashes   # those of its first pages, as far as they were needed
        size = self.pool.page_size
        while len(hashes) <= i:
            start = len(hashes) * size
            before = hashes[-1] if hashes else b""
            hashes.append(page_hash(before, request.slice(start, start + size)))
        return hashes[i]

    def admit(self, request):
        """As PagedScheduler.admit. Its table begins with the pages that are found."""
        full_pages = (request.todo - 1) // self.pool.page_size   # without its last token
        # A generator: `find` stops at the first page that is not cached, so later pages are not
        # hashed here.
        hashes = (self.hash_of_page(request, i) for i in range(full_pages))
        cached_pages = self.pool.find(hashes)
        new_pages = self.pool.needed(request.todo) - len(cached_pages)
        # Cached pages that are in the free queue will leave it, so they cannot be new pages, too.
        cached_and_free = sum(page in self.pool.free_queue for page in cached_pages)
        if new_pages + cached_and_free > len(self.pool.free_queue):
            return False
        request.block_table = []
        request.computed = len(cached_pages) * self.pool.page_size
        self.pool.share(request.block_table, cached_pages)
        self.pool.counts["shared_pages"] += len(cached_pages)
        self.pool.counts["saved_tokens"] += request.computed
        return True

    def make_room(self, request, n):
        """As PagedScheduler.make_room. The pages that this pass fills can be found from now on."""
        granted = super().make_room(request, n)
        if granted:
            self.cache_filled(request, request.computed, request.computed + n)
        return granted

    def cache_filled(self, request, start, end):
        """Pages that become full with its tokens start to end - 1 can be found from now on."""
        end = min(end, request.num_tokens)   # a page with guessed tokens (beyond/) has no hash yet
        size = self.pool.page_size
        for i in range(start // size, end // size):
            self.pool.register(request.block_table[i], self.hash_of_page(request, i))

    def undo(self, plan):
        """
        Takes back a plan whose pass has failed. (engine.py calls this.)

        `make_room` has registered the pages that the pass should have filled. They were not filled,
        so nobody may find them any more. But a request of the same plan may share such a page
        already. So all requests of the plan are preempted: they give their pages back, and keep
        their tokens.
        """
        # `preempt` puts a request at the front of the queue. So the loop begins with the last one:
        # then they wait in the order in which they ran.
        for request, _ in reversed(plan):
            first = request.computed // self.pool.page_size   # the first page that is not full
            for page in request.block_table[first:]:
                self.pool.forget(page)
            self.preempt(request)


def generate(model, requests, max_batch=8, token_budget=64, pages=None, page_size=16,
             scheduler_class=PrefixScheduler, layout=generate_paged.Paged, on_token=None):
    """Runs `requests` as paged does, with another scheduler. Returns the trace."""
    trace = generate_paged.generate(
        model, requests, max_batch=max_batch, token_budget=token_budget, pages=pages,
        page_size=page_size, scheduler_class=scheduler_class, layout=layout, on_token=on_token)
    trace.stage = "prefix"
    return trace


if __name__ == "__main__":
    from lab.run import main
    main(generate, __doc__)
