"""
Memory in pages: a request holds memory for the tokens it has, not for those it may generate.

The memory is one pool of pages, each with room for `page_size` tokens. The *block table* of a
request lists its pages in the order of its tokens. The *free queue* lists the pages of no table:

    pool          page 0   page 1   page 2   page 3   page 4
                  A A A A  B B b .  a . . .  free     free         page_size 4

    A's table     0, 2               A, B: tokens of the prompts;  a, b: generated tokens
    B's table     1                  B's next token goes into page 1, so B needs no page for it
    free queue    3, 4               A's next page is 3, when page 2 is full

A request is admitted if the free pages can hold all tokens that it has. Nothing is reserved: it
takes pages chunk by chunk, as its prompt is computed, and one more whenever its last page is full.

If a running request needs more pages than are free, the running request that arrived last is
*preempted*: it gives its pages back, keeps its tokens, and waits at the front of the queue. A step
that preempts admits no request. When the preempted request runs again, its keys and values are
computed again, but no token is sampled again.

All requests finish. Of those that run, take the one that arrived first. All others are preempted
before it is, and then it has room, because `add` refuses a request that does not fit into the whole
pool. So it is never preempted, and finishes. Then the next one is the first, and so on.

vLLM calls a page a block. The tensors are in generate_paged.py.
"""
from collections import Counter, deque

from scheduler import Scheduler


class PagePool:
    """`number` pages of `page_size` tokens each; they are called 0, 1, 2, ..."""

    def __init__(self, number, page_size):
        self.number = number
        self.page_size = page_size
        self.free_queue = deque(range(number))   # the pages in no block table, the next one first
        self.counts = Counter()                  # of preemptions and the like, for the report

    def needed(self, tokens):
        """How many pages hold so many tokens, rounded up."""
        return -(-tokens // self.page_size)

    def allocate(self, table, number):
        """Moves the first `number` pages of the free queue to the end of a block table."""
        for _ in range(number):
            table.append(self.free_queue.popleft())

    def free(self, table):
        """Puts the pages of a block table at the end of the free queue."""
        self.free_queue.extend(table)


class PagedScheduler(Scheduler):
    """A Scheduler whose requests hold pages of a pool: a block table, not a KV of their own."""
    pool_class = PagePool

    def __init__(self, max_batch, token_budget, pages, page_size):
        super().__init__(max_batch, token_budget, pages * page_size)
        self.pool = self.pool_class(pages, page_size)

    def admit(self, request):
        """Whether the free pages can hold all tokens that it has. It begins with an empty table."""
        if self.pool.needed(request.todo) > len(self.pool.free_queue):
            return False
        request.block_table = []
        return True

    def make_room(self, request, n):
        """Gives a request pages for its next n tokens. False if it was preempted for them."""
        # computed + n tokens have keys after this pass. A token that the pass samples is not one of
        # them: its key is computed, and needs room, in the next pass.
        more = self.pool.needed(request.computed + n) - len(request.block_table)
        while more > len(self.pool.free_queue):
            victim = self.victim()
            self.preempt(victim)
            if victim is request:
                return False
        self.pool.allocate(request.block_table, more)
        return True

    def victim(self):
        """The running request that is preempted next: the last to arrive."""
        return self.running[-1]   # `running` is in order of arrival, as the queue always is

    def preempt(self, request):
        """Takes its pages. It keeps its tokens and its random stream, and waits at the front."""
        self.running.remove(request)
        self.free(request)
        request.computed = 0
        self.waiting.appendleft(request)
        self.pool.counts["preemptions"] += 1

    def free(self, request):
        self.pool.free(request.block_table)
        request.block_table = None
