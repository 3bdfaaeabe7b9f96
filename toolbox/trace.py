"""What happened: one record per forward pass, and the time of every token."""
import math
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class ForwardPass:
    """
    Slots are places in the tensor that was computed: slots = useful + recomputed + pad_slots + finished_slots.
    Scores are entries of one head's q k^T in one layer. Bytes are of all layers.
    """
    stage: str
    step: int
    shape: tuple              # of the token ids: (B, T) or (N,)
    work: list                # (request name, first position, number of tokens) of each request in it
    finished: list            # names of the finished requests that were computed all the same
    useful: int               # tokens computed for the first time
    recomputed: int           # tokens that had been computed before
    pad_slots: int            # slots without a token
    finished_slots: int       # slots of finished requests
    padded_keys: int          # key slots that hold no key of a running request
    score_entries: int        # computed
    useful_scores: int        # of those, the ones a token may see: position + 1 for each useful token
    copied_bytes: int         # keys and values that were copied to bring them together, their padding included
    seconds: float

    @property
    def slots(self):
        return math.prod(self.shape)


@dataclass
class Trace:
    """What `generate` returns."""
    stage: str
    requests: list
    counts: dict = field(default_factory=dict)   # the Scheduler's: preemptions, prefix_hits, saved_tokens, evicted_pages
    passes: list = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)   # perf_counter; TTFT of a request that came at step 0 counts from here
    step_times: dict = field(default_factory=dict)              # step -> perf_counter at its beginning
    reached: dict = field(default_factory=dict, repr=False)     # request name -> tokens computed so far

    @contextmanager
    def forward_pass(self, step, batch):
        """Times the forward pass inside the `with` and records what it cost."""
        start = time.perf_counter()
        self.step_times.setdefault(step, start)
        yield
        if batch.tokens.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start

        work, useful, useful_scores = [], 0, 0
        for (request, n), first in zip(batch.plan, batch.starts):
            end = first + n
            seen = self.reached.get(request.name, 0)
            new = max(0, end - max(first, seen))
            useful += new
            useful_scores += sum(range(end - new + 1, end + 1))
            self.reached[request.name] = max(seen, end)
            work.append((request.name, first, n))
        planned, finished_slots = sum(n for _, n in batch.plan), len(batch.finished)
        self.passes.append(ForwardPass(
            self.stage, step, tuple(batch.tokens.shape), work, [request.name for request in batch.finished], useful, planned - useful,
            batch.tokens.numel() - planned - finished_slots, finished_slots, batch.padded_keys, batch.score_entries,
            useful_scores, batch.copied_bytes, seconds))

    def record_tokens(self, step, requests, tokens, logits, on_token=None):
        """Stamps each new token with the time and the step, and tells `on_token(request, token, logits)`."""
        now = time.perf_counter()
        new = [(request, token, row) for request, token, row in zip(requests, tokens, logits)
               if len(request.generated) > len(request.token_times)]   # not if it was cancelled in the meantime
        for request, _, _ in new:
            request.token_times.append(now)
            request.token_steps.append(step)
        for request, token, row in new:
            if on_token:
                on_token(request, token, row)
