"""
Memory in pages: a request holds what its tokens need now, not what its answer might need one day.

All memory is one pool of pages of `page_size` tokens. The *block table* of a request lists its
pages in the order of its tokens; all other pages wait in the *free queue*:

    pool         page 0   page 1   page 2   page 3   page 4
                 A A A A  B B b .  a . . .  free     free         page_size 4

    A's table    0, 2                A, B: prompts;  a, b: generated
    B's table    1                   next: B's next token goes into page 1; its table stays

A request gets pages for all tokens that it has when it is admitted, and one more whenever it has
filled its last. (vLLM V1 gives them chunk by chunk.) When no page is left, the running request that
arrived last is *preempted*. It loses its pages, keeps its tokens, and waits at the front of the
queue. Its keys and values are computed again; no token is sampled again.

In vLLM a page is a block, and this bookkeeping the block pool. The tensors: generate_paged.py.
"""
from collections import Counter, deque

from scheduler import Scheduler


class Pages:
    """The pages of a pool. free_queue: those in no block table; the first is taken next."""

    def __init__(self, number, size):
        self.number, self.size = number, size   # size: tokens in a page
        self.free_queue = deque(range(number))
        self.counts = Counter()                 # of preemptions and the like, for the report

    def needed(self, tokens):   # pages for so many tokens, rounded up
        return -(-tokens // self.size)

    def allocate(self, table, number):
        """Appends the first `number` pages of the free queue to a block table."""
        for _ in range(number):
            table.append(self.free_queue.popleft())

    def free(self, table):
        """The pages of a block table go to the end of the free queue."""
        self.free_queue.extend(table)


class PagedScheduler(Scheduler):
    """
    A Scheduler whose memory is a pool: a request holds a block table, not a KV of its own.

    pages, page_size: of the pool. `add` refuses a request which could not run in all of it alone
    """

    def __init__(self, max_batch, token_budget, pages, page_size):
        super().__init__(max_batch, token_budget, pages * page_size)
        self.pages = Pages(pages, page_size)

    def schedule(self, step):
        """As Scheduler.schedule; but first, a request that has filled its pages gets another."""
        for request in list(self.running):   # in order of arrival: the first can always go on
            need = self.pages.needed(request.computed + request.todo)   # for all its tokens
            while request in self.running and len(request.block_table) < need:
                if self.pages.free_queue:
                    self.pages.allocate(request.block_table, 1)
                else:
                    self.preempt(self.running[-1])   # perhaps itself
        return super().schedule(step)

    def preempt(self, request):
        """It gives its pages back and returns to the front of the queue, with its tokens."""
        self.running.remove(request)
        self.free(request)
        request.computed = 0   # computed once more; its tokens, and its random stream, stay
        self.waiting.appendleft(request)
        self.pages.counts["preemptions"] += 1

    def grant_room(self, request):
        """Gives it pages for the tokens that it has; False if there are too few."""
        need = self.pages.needed(request.todo)   # nothing is computed yet: all of them
        if need > len(self.pages.free_queue):
            return False
        request.block_table = []
        self.pages.allocate(request.block_table, need)
        return True

    def free(self, request):
        self.pages.free(request.block_table)
        request.block_table = None
