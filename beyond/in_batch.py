"""
In-batch prefix caching: what a running request is about to compute is worth waiting for.

Prefix caching finds pages once a pass has filled them. But several answers to one prompt are asked
for together, and what is admitted in one step finds nothing: each computes the whole prompt.
(SGLang's in-batch prefix caching moves such requests back in the queue; here they wait in place.)

    step 0    A computes the prompt      B, C and D wait: A computes their beginning
    step 1    A decodes                  B, C and D share A's full pages, and compute the rest

So there is one rule more: *a request whose next page is being computed is not admitted*. The page
with the prompt's last token, full or not, each answer computes for itself.

The price: requests are admitted in order, so while the first in the queue waits, all behind it wait
too (*head-of-line blocking*). Here the second answer to each prompt holds up the next prompt:

    queue              A A B B C C D D     two answers to each of four prompts, budget for all
    first tokens in    0 0 0 0 0 0 0 0     steps, without the rule
                       0 1 1 2 2 3 3 4     with it

    python -m beyond.in_batch     both, counted
"""
from types import SimpleNamespace
from weakref import WeakKeyDictionary

from generate_prefix import PrefixScheduler
from request import Request, indices_due, prepare


class InBatchScheduler(PrefixScheduler):
    """A PrefixScheduler that lets a request wait for a beginning which another one computes."""

    def __init__(self, max_batch, token_budget, pages, page_size):
        super().__init__(max_batch, token_budget, pages, page_size)
        self.landed = WeakKeyDictionary()   # request -> of its tokens, those whose pass is recorded

    def grant_room(self, request):
        """As PrefixScheduler.grant_room; but not while another computes the next page to share."""
        size, last = self.pages.size, request.todo - 1
        names = self.hashes(request, last)[:last // size]   # of the pages that could be shared
        found = len(self.pages.find(names))
        for other in self.running if found < len(names) else ():
            end = (found + 1) * size
            # Not from `computed` on, which counts a pass in flight (ahead.py). And no further than
            # its known tokens: what it will generate may differ.
            if self.landed[other] < end <= other.computed + other.todo:
                if self.hashes(other, end)[found] == names[found]:
                    return False
        granted = super().grant_room(request)
        self.landed[request] = request.computed
        return granted

    def cache_filled(self, request, start, end):
        super().cache_filled(request, start, end)
        self.landed[request] = end


# --- what it saves, and what it costs -------------------------------------------------------------

def serve(scheduler, requests):
    """
    Serves [(prompt, new tokens, arrival), ...] without a model. Returns (tokens computed, most
    pages held, the step of each one's first token).
    """
    requests = prepare([Request(prompt, new, arrival=at) for prompt, new, at in requests],
                       SimpleNamespace(block_size=1024, vocab_size=4))
    for request in requests:
        scheduler.add(request)
    computed = held = step = 0
    first = {}
    while scheduler.busy:
        step = scheduler.next_step(step)
        plan = scheduler.schedule(step)
        computed += sum(n for _, n in plan)
        held = max(held, scheduler.pages.number - len(scheduler.pages.free_queue))
        due = indices_due(plan)
        first = {plan[i][0]: step for i in due} | first
        scheduler.update(plan, [0] * len(due))
        step += 1
    return computed, held, [first[request] for request in requests]


def main():
    prompt = [0] * 88
    together = [(prompt, 32, 0)] * 8
    later = [(prompt, 32, 2 * (i > 0)) for i in range(8)]
    print("8 answers of 32 tokens to a prompt of 88, pages of 16, at most 1,024 tokens a step")
    for text, kind, requests in (
            ("prefix caching, asked together", PrefixScheduler, together),
            ("prefix caching, the others 2 steps later", PrefixScheduler, later),
            ("the rule, asked together", InBatchScheduler, together)):
        computed, held, _ = serve(kind(8, 1024, 64, 16), requests)
        print(f"  {text:41} {computed} tokens computed, {held} pages held")
    print("2 answers to each of 4 prompts of 88")
    queue = [([i] * 88, 32, 0) for i in range(4) for _ in range(2)]
    for text, kind in ("prefix caching", PrefixScheduler), ("the rule", InBatchScheduler):
        computed, _, first = serve(kind(8, 1024, 64, 16), queue)
        print(f"  {text:41} {computed} tokens computed, first tokens in steps {first}")


if __name__ == "__main__":
    main()
