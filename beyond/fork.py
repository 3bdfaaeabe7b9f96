"""
Forks: several answers to one prompt, which should be computed and kept once.

Stage 7 shares a prompt's pages once they are full. But the answers are usually asked for together,
and what is admitted in the same step finds nothing to share: each computes the whole prompt.

    step 0    A computes the prompt      B, C and D wait: A computes their beginning
    step 1    A decodes                  B, C and D hold A's full pages, and compute the rest

So there is one rule more: *an equal beginning that is being computed is worth the wait*. What is
left is the prompt's last page, if it is not full: each answer computes its own. A copy of that page
would save little: of the 392 tokens below, 49.

    python -m beyond.fork     8 answers to a prompt of 88 tokens: what is computed, what is held
"""
from types import SimpleNamespace

from cache import KV
from generate_paged import Paged
from generate_ragged import Flat
from paging import PagedScheduler, Pages
from request import Request, indices_due, prepare
from scheduler import Scheduler
from toolbox.validate import check_pool


class ForkScheduler(PagedScheduler):
    def grant_room(self, request):
        """As PagedScheduler.grant_room; but not while another computes the next page to share."""
        tokens, size = request.tokens, self.pages.size
        end = (len(self.pages.find(tokens[:-1])) + 1) * size
        for other in self.running if end < len(tokens) else ():
            if other.computed < end and other.slice(0, end) == tokens[:end]:
                return False
        return super().grant_room(request)


def memory_of(model, max_batch, token_budget, max_kv_tokens, pages, page_size):
    """(scheduler, layout): stage 7's with this rule if `pages` is a number, or else stage 6's."""
    if pages is None:
        return (Scheduler(max_batch, token_budget, max_kv_tokens),
                lambda plan: Flat(plan, model.device))
    check_pool(max_batch, pages, page_size, "fcfs", model.config.block_size)
    books, pool = Pages(pages, page_size), KV(pages * page_size)
    return (ForkScheduler(max_batch, token_budget, books),
            lambda plan: Paged(plan, pool, books, model.device))


def answers(scheduler, apart=0):
    """(tokens computed, most pages held) for 8 answers to one prompt; `apart`: the first's lead."""
    requests = prepare([Request([0] * 88, 32, arrival=apart * (i > 0)) for i in range(8)],
                       SimpleNamespace(block_size=1024, vocab_size=1))
    for request in requests:
        scheduler.add(request)
    computed = held = step = 0
    while scheduler.busy:
        plan = scheduler.schedule(step)
        computed += sum(n for _, n in plan)
        held = max(held, scheduler.pages.number - len(scheduler.pages.free))
        scheduler.update(plan, [0] * len(indices_due(plan)))
        step += 1
    return computed, held


if __name__ == "__main__":
    print("8 answers of 32 tokens to a prompt of 88, pages of 16")
    for text, kind, apart in (("stage 7, asked together", PagedScheduler, 0),
                              ("stage 7, the others 2 steps later", PagedScheduler, 2),
                              ("with the rule, asked together", ForkScheduler, 0)):
        computed, held = answers(kind(8, 1024, Pages(64, 16)), apart=apart)
        print(f"  {text:34}  {computed} tokens computed, {held} pages held")
