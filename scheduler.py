"""
Who computes how many tokens in the next step: the first half of every batching question.

Pure bookkeeping: no tensors, no clock, no model. A Request knows how far its computation has come, and
prefill and decode are the same thing to it:

    prefill   p0 p1 p2 p3 p4 p5                  decode   p0 p1 p2 p3 p4 p5 g0 g1
              ## ## ## ##        computed 4               ## ## ## ## ## ## ##      computed 7
                          ^^ ^^  todo 2                                        ^^   todo 1

When a plan covers all that is to do, and only then, the request gets its next token. The Scheduler
hands out a budget of tokens a step: one to each decode first, then prefill chunks until it is full
(claim H12). Finished requests leave at once, and waiting ones take their places.
"""
import bisect
import math
import operator
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import count


@dataclass(eq=False)
class Request:
    """
    One prompt, how to continue it, and what has come of it. Runs once. Raises ValueError for bad values.

    prompt:         token ids, at least one
    max_new_tokens: at least 1
    temperature:    0 takes the most likely token, above 0 samples
    top_k:          sample from the k largest logits only (more if the k-th is tied); None: from all
    seed:           of this request's own random stream
    eos_token:      ends the request when generated (it is kept as the last token); None: never
    name:           for messages and plots; given by `prepare` if empty
    priority:       0 is the most urgent
    arrival:        the step at which it comes in
    """
    prompt: list
    max_new_tokens: int = 16
    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 0
    eos_token: int | None = None
    name: str = ""
    priority: int = 0
    arrival: int = 0

    generated: list = field(default_factory=list, init=False)    # token ids
    finish_reason: str | None = field(default=None, init=False)  # "stop" | "length" | "cancelled"
    token_times: list = field(default_factory=list, init=False)  # time.perf_counter() at each token
    token_steps: list = field(default_factory=list, init=False)  # step of each token
    computed: int = field(default=0, init=False)                 # tokens whose keys and values are in the cache
    kv: object = field(default=None, init=False, repr=False)     # the cache itself, while it runs
    block_size: int | None = field(default=None, init=False)     # the model's, from `prepare`

    def __post_init__(self):
        if not isinstance(self.name, str):
            name, self.name = self.name, ""
            raise ValueError(f"{self}: name must be a text, not {name!r}")
        try:
            self.prompt = [operator.index(token) for token in self.prompt]   # ints of any library
        except TypeError:
            raise ValueError(f"{self}: prompt must be a list of token ids, whole numbers, not {self.prompt!r:.60}") from None
        if not self.prompt:
            raise ValueError(f"{self}: the prompt is empty, it needs at least one token")
        for name, least in ("max_new_tokens", 1), ("top_k", 1), ("seed", 0), ("eos_token", 0), ("priority", 0), ("arrival", 0):
            value = getattr(self, name)
            if not (is_whole(value) and value >= least) and not (name in ("top_k", "eos_token") and value is None):
                raise ValueError(f"{self}: {name} must be a whole number of at least {least}, not {value!r}")
        if not isinstance(self.temperature, (int, float)) or not 0 <= self.temperature <= sys.float_info.max:
            raise ValueError(f"{self}: temperature must be a number of at least 0, not {self.temperature!r}")
        self._stream = random.Random(self.seed)

    def __str__(self):
        return f"request '{self.name}'" if self.name else "request"

    @property
    def tokens(self):
        return self.prompt + self.generated

    @property
    def todo(self):
        """Known tokens that are not computed yet. 1: a decode, or the last token of a prompt, which costs the same."""
        return len(self.prompt) + len(self.generated) - self.computed

    @property
    def kv_tokens(self):
        """Room for all tokens it can come to have: what admission reserves and the cache allocates."""
        return min(len(self.prompt) + self.max_new_tokens, self.block_size)

    @property
    def finished(self):
        return self.finish_reason is not None

    def draw(self):
        """A uniform number in [0, 1), the next of this request's own stream; one per token it generates."""
        return self._stream.random()

    def append(self, token):
        """Takes the next token. A sequence is never cropped: it ends where its next token had no position."""
        if self.finished:   # cancelled while its token was being computed
            return
        self.generated.append(token)
        if token == self.eos_token:
            self.finish_reason = "stop"
        elif len(self.generated) >= self.max_new_tokens or len(self.prompt) + len(self.generated) > self.block_size:
            self.finish_reason = "length"

    def cancel(self):
        """Ends it where it is, from any thread; the running loop lets go of it at its next step."""
        if not self.finished:
            self.finish_reason = "cancelled"


def is_whole(value):
    return isinstance(value, int) and not isinstance(value, bool)


def prepare(requests, config):
    """
    Makes requests ready for a model with this GPTConfig and returns them by arrival, ties as given.
    Raises ValueError before any of them has run, naming the one that cannot.
    """
    requests = [requests] if isinstance(requests, Request) else list(requests)
    if not requests:
        raise ValueError("there are no requests: at least one is needed")
    names, taken = [], {getattr(request, "name", "") for request in requests}
    for i, request in enumerate(requests):
        if not isinstance(request, Request):
            raise ValueError(f"requests must be Requests, not {request!r:.60}")
        name = request.name or next(name for j in count(i) if (name := f"r{j}") not in taken)
        names.append(name)
        taken.add(name)
        if request.computed or request.generated:
            raise ValueError(f"request '{name}' has already run: make a new one")
        if len(request.prompt) > config.block_size:
            raise ValueError(f"request '{name}': prompt of {len(request.prompt)} tokens does not fit block_size {config.block_size}")
        for token in request.prompt:
            if not 0 <= token < config.vocab_size:
                raise ValueError(f"request '{name}': token id {token} is not in the vocabulary, 0 to {config.vocab_size - 1}")
    for key, times in Counter(names + [id(request) for request in requests]).items():
        if times > 1:
            name = key if isinstance(key, str) else names[[id(request) for request in requests].index(key)]
            raise ValueError(f"request '{name}' is there {times} times: each needs a name of its own, and runs once")
    for request, name in zip(requests, names):
        request.name, request.block_size, request.kv = name, config.block_size, None
    return sorted(requests, key=lambda request: request.arrival)


def at_least_1(**knobs):
    """ValueError for a knob that is no whole number of at least 1."""
    for name, value in knobs.items():
        if not is_whole(value) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")


class Scheduler:
    """
    First come, first served, within three limits:

    max_batch:     requests that run at the same time
    token_budget:  tokens of one step. Every running decode takes one, so no more than token_budget requests
                   run either: the first that still prefills always finds a token left for it.
    max_kv_tokens: cache entries of all running requests together; None: no limit. A request reserves room for
                   prompt + max_new_tokens when it is admitted (no more than block_size), so it can always finish.
    """

    def __init__(self, max_batch, token_budget, max_kv_tokens=None):
        at_least_1(max_batch=max_batch, token_budget=token_budget)
        if max_kv_tokens is not None:
            at_least_1(max_kv_tokens=max_kv_tokens)
        self.max_running = min(max_batch, token_budget)
        self.token_budget = token_budget
        self.max_kv_tokens = math.inf if max_kv_tokens is None else max_kv_tokens
        self.waiting, self.running = [], []   # by arrival; in the order of admission

    def add(self, request):
        """Queues a request that `prepare` has made ready. ValueError if it could never be admitted."""
        if request.kv_tokens > self.max_kv_tokens:
            raise ValueError(f"{request}: prompt of {len(request.prompt)} + max_new_tokens {request.max_new_tokens} needs "
                             f"{request.kv_tokens} KV tokens, max_kv_tokens is {self.max_kv_tokens}")
        if request in self.waiting + self.running:
            raise ValueError(f"{request} is in the queue already")
        bisect.insort(self.waiting, request, key=lambda r: r.arrival)   # behind those of the same arrival

    @property
    def busy(self):
        return bool(self.waiting or self.running)

    @property
    def kv_tokens(self):
        """What the running requests have reserved."""
        return sum(request.kv_tokens for request in self.running)

    def schedule(self, step):
        """The plan of this step, [(request, number of tokens), ...]. Empty if none has arrived yet, or all were cancelled."""
        self.release()

        # 1. whoever has arrived and fits takes a free place; nobody overtakes the first in the queue
        while (self.waiting and self.waiting[0].arrival <= step and len(self.running) < self.max_running
               and self.kv_tokens + self.waiting[0].kv_tokens <= self.max_kv_tokens):
            self.running.append(self.waiting.pop(0))

        # 2. one token for each decode, so that a long prompt cannot hold them up
        plan = [(request, 1) for request in self.running if request.todo == 1]

        # 3. the rest of the budget goes to prefill chunks, of several prompts if it reaches
        budget = self.token_budget - len(plan)
        for request in self.running:
            if request.todo > 1 and budget > 0:
                n = min(request.todo, budget)
                plan.append((request, n))
                budget -= n
        return plan

    def next_step(self, step):
        """The step at which there is something to do: `step`, or if all is waiting to arrive, the first arrival."""
        return step if self.running or not self.waiting else max(step, self.waiting[0].arrival)

    def report(self, plan, tokens):
        """
        What came of a plan: `tokens` for those of its requests that had nothing more to compute, in its order.
        Only now are the planned tokens computed: a forward pass that failed leaves everything as it was.
        """
        tokens = iter(tokens)
        for request, n in plan:
            complete = n == request.todo
            request.computed += n
            if complete:
                request.append(next(tokens))
        self.release()

    def cancel(self, request):
        """Ends a request in any state and frees what it holds. Between steps; `Request.cancel` may come at any time."""
        request.cancel()
        self.release()

    def release(self):
        """Lets go of everything that is finished."""
        finished = [request for request in self.waiting + self.running if request.finished]   # once: another thread may cancel
        for request in finished:
            request.kv = None
        self.waiting = [request for request in self.waiting if request not in finished]
        self.running = [request for request in self.running if request not in finished]
