"""
The engine: prefix's loop, one step at a time, so that requests can come and leave while it runs.

Until here, `generate` takes a list of requests and returns when all of them are done. A server has
no such list. Clients ask at any time, read each token as it appears, and some leave in the middle.
So the body of the loop becomes a method, and the loop itself belongs to the caller:

    engine.add(request)      between any two steps
    engine.abort(request)    between any two steps
    engine.step()            one forward pass -> [(request, token), ...]

    step   0     1     2     3     4     5     6
    A      P     d     d     d     d     d           P prefill, d decode
    B                  P     d     d     x           added before step 2, aborted (x) before step 5
    C                              P     d     d     added before step 4

Scheduler, layout and forward pass stay as they are. Other requests change *when* a token is
computed, but not which tokens it sees: those before it in its own request. So each request gets the
tokens that it gets alone, whatever comes, leaves or fails beside it.

A pass may fail: a prompt may lead to logits that are NaN, or memory may run out. Then none of its
tokens counts. Pages that it should have filled can be found no more (`undo`), and its requests wait
again, with the tokens that they had.

Wasted: between two passes the device waits until the host has sampled and planned. Planning ahead
(beyond/ahead.py) hides that.
Next: vLLM's EngineCore (v1/engine/core.py) has these methods: `add_request`, `abort_requests` and
`step`. It runs in a process of its own; lab/server/ runs this engine in a thread. Each file in
beyond/ answers one more question, and docs/vllm.md leads from here into vLLM's files.
"""
from collections import deque

import torch

from cache import KV
from generate_paged import Paged
from generate_prefix import PrefixScheduler
from model import sample
from request import Request, prepare
from toolbox.trace import Trace
from toolbox.validate import as_list, check_pool


class Engine:
    """
    Serves requests that come while it runs. One thread calls it.

    pages, page_size, max_batch, token_budget, layout, on_token: as in prefix. The number of pages
    has a fixed default, because nobody knows which requests will come.
    """

    def __init__(self, model, pages=256, page_size=16, max_batch=8, token_budget=64, layout=Paged,
                 on_token=None):
        check_pool(max_batch, pages, page_size, PrefixScheduler, model.config.block_size)
        self.model = model
        self.layout = layout
        self.on_token = on_token
        self.scheduler = PrefixScheduler(max_batch, token_budget, pages, page_size)
        self.kv = KV(pages * page_size)
        # An engine may run for ever: of the passes, the trace keeps only the last.
        self.trace = Trace("engine", [], model, self.scheduler.pool.counts, deque(maxlen=1))
        self.number = 0        # of the next step
        self.number_named = 0  # how many requests got their name here
        self.plan = []         # of the last step: [(request, number of tokens), ...]

    @property
    def busy(self):
        """Whether a request waits or runs."""
        return self.scheduler.busy

    def add(self, request):
        """
        The request waits from now on; its `arrival` becomes the next step. ValueError if it could
        never run, has run or ended before, or has the name of a request that has not ended.
        """
        [request] = as_list(request, Request)
        scheduler = self.scheduler
        names = {other.name for other in (*scheduler.waiting, *scheduler.running)}
        if request.name in names:
            raise ValueError(f"{request} has the name of a request that has not ended")
        request.name = request.name or self.new_name(names)
        prepare([request], self.model.config)
        request.arrival = self.number
        scheduler.add(request)

    def new_name(self, names):
        """r0, r1, ...: one that no request here has, and that was never given to another."""
        while True:
            name = f"r{self.number_named}"
            self.number_named += 1
            if name not in names:
                return name

    def abort(self, request, reason="abort"):
        """The request ends now, wherever it is, and frees its pages. No effect if it has ended."""
        waiting, running = self.scheduler.waiting, self.scheduler.running
        if request not in waiting and request not in running:
            return
        request.finish_reason = reason
        if request in waiting:
            waiting.remove(request)
        # If it was running, it leaves now: `release` looks for a finish_reason.
        self.scheduler.release()
        self.forget(request)

    @torch.inference_mode()
    def step(self):
        """
        The body of the loop, once. Returns the new tokens, [(request, token), ...]; an empty list
        if there is nothing to do.

        If the pass fails, its error is raised here, and the next step plans the same requests
        again. So the caller must abort the request that caused it, the error's `request`. If the
        error has none, any request may have caused it: the caller aborts all of `engine.plan`.
        """
        if not self.scheduler.busy:
            return []
        step = self.number
        self.number += 1
        self.trace.step_times.clear()   # else it would grow with every step of a long run
        # 1. which requests compute how many tokens in this step
        self.plan = []   # if `schedule` raises, the plan of the last step must not stay here
        self.plan = self.scheduler.schedule(step)
        try:
            # 2. one forward pass for decodes and chunks together
            batch = self.layout(self.plan, self.kv, self.scheduler.pool, self.model.device)
            with self.trace.forward_pass(step, batch):
                logits = self.model(batch.tokens, batch.positions, batch.attend, batch.wanted)
            # 3. one token for each request that has nothing more to compute
            tokens = sample(logits, batch.sampled)
        except BaseException:   # also Ctrl-C
            self.scheduler.undo(self.plan)
            raise
        self.scheduler.update(self.plan, tokens)
        self.trace.record_tokens(step, batch.sampled, tokens, logits, self.on_token)
        for request in batch.sampled:
            if request.finished:
                self.forget(request)
        return list(zip(batch.sampled, tokens))

    def forget(self, request):
        """Drops what the trace knows of an ended request: how many of its tokens were computed."""
        self.trace.reached.pop(request.name, None)


if __name__ == "__main__":
    from lab.streaming import main
    main(Engine, __doc__)
