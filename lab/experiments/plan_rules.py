"""
Our scheduler without one of the rules that make its plans those of vLLM (docs/vllm.md lists them).

Whoever compares a scheduler of their own (plans.py) is told which of these it resembles. Each
docstring finishes the sentence "These plans are those of ours with ...", so it begins small.
"""
from generate_prefix import PrefixPool, PrefixScheduler
from paging import PagedScheduler


class WholePrompts(PrefixScheduler):
    """pages for a whole prompt at once, not chunk by chunk"""

    def admit(self, request):
        admitted = super().admit(request)
        if admitted:
            needed = self.pool.needed(request.computed + request.todo)
            self.pool.allocate(request.block_table, needed - len(request.block_table))
        return admitted


class FoundAfterThePass(PrefixScheduler):
    """pages that can be found after the pass that fills them, not once it is planned"""

    def make_room(self, request, n):
        return PagedScheduler.make_room(self, request, n)

    def update(self, plan, tokens):
        for request, n in plan:
            self.cache_filled(request, request.computed, request.computed + n)
        super().update(plan, tokens)


class NamelessPagesLast(PrefixPool):
    def free(self, table):
        super().free(table)
        for page in reversed(table):
            if page in self.free_queue and page not in self.hash_of:
                self.free_queue.move_to_end(page)


class LeastRecentlyUsed(PrefixScheduler):
    """freed pages at the end of the queue, those that nobody can find like the others"""
    pool_class = NamelessPagesLast


class OneNamePool(PrefixPool):
    def register(self, page, digest):
        if digest not in self.cached:
            super().register(page, digest)


class OnePageAHash(PrefixScheduler):
    """one page for a hash, not several"""
    pool_class = OneNamePool


RULES = (WholePrompts, FoundAfterThePass, LeastRecentlyUsed, OnePageAHash)
