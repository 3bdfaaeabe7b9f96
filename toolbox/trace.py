"""
What happened in a run: one record per forward pass, and the time of every token.

Code that needs the batches of a model's runs (the X-ray, the explorer, a compiled step) is an
*observer* of the model: the trace of each run hands it every batch before the forward pass.
"""
import bisect
import math
import time
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field

import torch


def synchronize(device):
    """Waits for the work that has been queued on a GPU; timings are meaningless without it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@contextmanager
def observed(model, observer):
    """Within it, `observer(step, batch)` is called before each forward pass of a run of `model`."""
    observers = vars(model).setdefault("observers", [])
    observers.append(observer)
    try:
        yield
    finally:
        observers.remove(observer)


@dataclass
class ForwardPass:
    """
    Slots are places in the tensor that was computed:

        slots = useful + recomputed + pad_slots + finished_slots + rejected

    Scores are entries of q k^T, of one head in one layer. Bytes are summed over all layers.
    """
    step: int
    shape: tuple              # of the token ids: (B, T) or (N,)
    work: list                # (request name, first position, number of tokens) of each request
    finished: list            # names of finished requests that a static batch still computes
    useful: int               # tokens computed for the first time
    recomputed: int           # tokens that had been computed before
    pad_slots: int            # slots without a token
    finished_slots: int       # slots of finished requests
    score_entries: int        # computed
    useful_scores: int        # of these, the ones a token may see: position + 1 per useful token
    seconds: float
    padded_keys: int = 0      # key slots that hold no key of a running request
    copied_bytes: int = 0     # keys and values copied to bring them together, padding included
    rejected: int = 0         # wrong guesses, or computed after a stop token

    @property
    def slots(self):
        return math.prod(self.shape)


@dataclass
class Trace:
    """What `generate` returns. model: the one that runs, whose observers see each batch."""
    stage: str
    requests: list
    model: InitVar[object] = None
    # paged memory counts preemptions, shared_pages, saved_tokens and evicted_pages
    counts: dict = field(default_factory=dict)
    passes: list = field(default_factory=list)
    # perf_counter; the TTFT of a request that arrives at step 0 counts from here
    started: float = field(default_factory=time.perf_counter)
    step_times: dict = field(default_factory=dict)         # step -> perf_counter at its first pass
    reached: dict = field(default_factory=dict, repr=False)  # request name -> tokens computed
    observers: list = field(default=(), repr=False, compare=False)
    # the lab.explorer.recorder.Recorder that watched the run, if one did
    recording: object = field(default=None, repr=False, compare=False)

    def __post_init__(self, model):
        self.observers = getattr(model, "observers", self.observers)

    def arrived(self, request):
        """When a request's clock starts: with the run (arrival 0), or the first step after that."""
        if request.arrival == 0:
            return self.started
        steps = list(self.step_times)   # they ascend
        i = bisect.bisect_left(steps, request.arrival)
        return self.step_times[steps[i]] if i < len(steps) else self.started

    def announce(self, step, batch):
        """Hands the batch of the next forward pass to the model's observers."""
        for observer in self.observers:
            observer(step, batch)

    @contextmanager
    def forward_pass(self, step, batch):
        """Times the forward pass inside the `with` block, then records its work and its cost."""
        self.announce(step, batch)
        start = time.perf_counter()
        self.step_times.setdefault(step, start)
        yield
        synchronize(batch.tokens.device)
        self.record_pass(step, batch, time.perf_counter() - start)

    def record_pass(self, step, batch, seconds):
        """
        A preempted request computes tokens again. If tokens 0 to 9 had been computed (`seen` 10)
        and this pass computes tokens 8 to 12 (`first` 8, `end` 13), then 3 are new.
        """
        work, finished, useful, useful_scores = [], [], 0, 0
        for (request, n), first in zip(batch.plan, batch.starts):
            if n == 0:   # a row of a static batch that goes on after its request has finished
                finished.append(request.name)
                continue
            end = first + n
            seen = self.reached.get(request.name, 0)
            new = max(0, end - max(first, seen))
            useful += new
            useful_scores += sum(range(end - new + 1, end + 1))
            self.reached[request.name] = max(seen, end)
            work.append((request.name, first, n))
        planned = sum(n for _, n in batch.plan)
        self.passes.append(ForwardPass(
            step, tuple(batch.tokens.shape), work, finished,
            useful=useful,
            recomputed=planned - useful,
            pad_slots=batch.tokens.numel() - planned - len(finished),
            finished_slots=len(finished),
            useful_scores=useful_scores,
            seconds=seconds,
            **batch.cost(),
        ))

    def record_rejected(self, request, first, end):
        """Of the last pass: a request's tokens from `first` on were computed in vain."""
        record, number = self.passes[-1], end - first
        record.rejected += number
        record.useful -= number
        record.useful_scores -= sum(range(first + 1, end + 1))
        self.reached[request.name] -= number

    def record_tokens(self, step, requests, tokens, logits, on_token=None):
        """Records time and step of each new token, and calls `on_token(request, token, logits)`."""
        now = time.perf_counter()
        for request in requests:
            request.token_times.append(now)
            request.token_steps.append(step)
        if on_token:
            for request, token, row in zip(requests, tokens, logits):
                on_token(request, token, row)
