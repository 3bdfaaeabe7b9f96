"""
Who computes how many tokens in the next step: the first half of every batching question.

Pure bookkeeping: no tensors, no clock, no model. A Request knows how far its computation has come, and
prefill and decode are the same thing to it:

    prefill   p0 p1 p2 p3 p4 p5                  decode   p0 p1 p2 p3 p4 p5 g0 g1
              ## ## ## ##        computed 4               ## ## ## ## ## ## ##      computed 7
                          ^^ ^^  todo 2                                        ^^   todo 1

When a plan covers all that is to do, and only then, the request gets its next token. The Scheduler
hands out a budget of tokens a step: one to each decode first, then prefill chunks until it is full
(claim H12). Finished requests leave at once, and waiting ones take their places. A preempted request is one
with computed = 0: whatever has to be computed again is simply todo.
"""
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
    granted: int = field(default=0, init=False)                  # tokens that its cache may hold
    pages: list = field(default_factory=list, init=False, repr=False)   # of the prefix cache, that it begins with
    passed: int = field(default=0, init=False)                   # times that it was overtaken or preempted
    number: int = field(default=0, init=False)                   # in the order of Scheduler.add

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
        """Room for all tokens that it can come to have."""
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
    # two of one name, or one request twice: then both places count for the name of the first
    for name, times in (Counter(names) | Counter(names[requests.index(request)] for request in requests)).items():
        if times > 1:
            raise ValueError(f"request '{name}' is there {times} times: each needs a name of its own, and runs once")
    for request, name in zip(requests, names):
        request.name, request.block_size, request.kv = name, config.block_size, None
        request.granted = request.kv_tokens   # unless a Scheduler is more sparing
    return sorted(requests, key=lambda request: request.arrival)


def at_least_1(**knobs):
    """ValueError for a knob that is no whole number of at least 1."""
    for name, value in knobs.items():
        if not is_whole(value) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")


POLICIES = {   # a policy is a sort key: who waits with the smallest goes first
    "fcfs": lambda request: (),                                                   # first come, first served
    "sjf": lambda request: (len(request.prompt) + request.max_new_tokens,),       # shortest job first
    "priority": lambda request: (request.priority,),                              # 0 is the most urgent
}
MAX_PASSED = 16


class Scheduler:
    """
    Hands out steps within three limits:

    max_batch:     requests that run at the same time
    token_budget:  tokens of one step. Every running decode takes one, so no more than token_budget requests
                   run either: the first that still prefills always finds a token left for it.
    max_kv_tokens: tokens that all caches together may hold, the prefix cache's pages included; None: no limit

    policy:        "fcfs", "sjf" or "priority": who of the waiting goes first; ties by arrival
    admission:     "reserve" grants a request room for prompt + max_new_tokens when it is admitted (no more than
                   block_size): it can always finish, and much of the room stays empty.
                   "grow" grants whole pages for what is known now, and another page when they are full. If there
                   is none left, the last in rank is preempted: it loses its cache, goes back to the queue with the
                   tokens it has, and is prefilled again over prompt + generated. It draws no token twice.
    prefix_cache:  a cache.PrefixCache; None: no reuse

    Nobody starves. A request counts how often one that came after it is admitted before it, and how often it is
    preempted; after MAX_PASSED times it ranks before all others but those in the same state that came earlier, and is
    admitted with room for everything. So it is preempted at most MAX_PASSED times, and whatever arrives,
    all known requests are done after (MAX_PASSED + 1) x (sum of their prompt + max_new_tokens) steps at most.
    No live-lock either: whoever preempts ranks before its victim, so the first in rank keeps its cache and goes on at every step.
    """

    def __init__(self, max_batch, token_budget, max_kv_tokens=None, policy="fcfs", admission="reserve", page_size=16, prefix_cache=None):
        at_least_1(max_batch=max_batch, token_budget=token_budget, page_size=page_size)
        if max_kv_tokens is not None:
            at_least_1(max_kv_tokens=max_kv_tokens)
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, not {policy!r}")
        if admission not in ("reserve", "grow"):
            raise ValueError(f"admission must be 'reserve' or 'grow', not {admission!r}")
        self.max_running = min(max_batch, token_budget)
        self.token_budget = token_budget
        self.max_kv_tokens = math.inf if max_kv_tokens is None else max_kv_tokens
        self.policy, self.admission, self.page_size, self.prefix_cache = POLICIES[policy], admission, page_size, prefix_cache
        self.waiting, self.running = [], []
        self.counts = Counter()   # preemptions, prefix_hits, saved_tokens, evicted_pages
        self.numbers = count()

    # --- who goes first ---

    def in_queue(self, request):
        """Sort key of the waiting."""
        return self.ranked(request, self.policy(request))

    def in_rank(self, request):
        """Sort key of the running: the last one is preempted."""
        return self.ranked(request, (request.priority,))

    def ranked(self, request, key):
        came = (request.arrival, request.number)
        return (0, *came) if self.is_due(request) else (1, *key, *came)

    def is_due(self, request):
        return request.passed >= MAX_PASSED

    # --- how much room there is ---

    def room_for(self, request):
        """What admission grants: all that it can come to need, or whole pages for what is to do now."""
        if self.admission == "reserve" or self.is_due(request):
            return request.kv_tokens
        return self.whole_pages(len(request.prompt) + len(request.generated))

    def whole_pages(self, tokens):
        return -(-tokens // self.page_size) * self.page_size

    @property
    def kv_tokens(self):
        """What is granted to the running requests and held by the prefix cache."""
        return sum(request.granted for request in self.running) + (self.prefix_cache.tokens if self.prefix_cache else 0)

    def make_room(self, tokens, pages=()):
        """Is there room for so many more? Pages of the prefix cache that nobody holds go, if that helps; `pages` are wanted."""
        held = {page for request in self.running for page in request.pages} | set(pages)
        least = sum(request.granted for request in self.running) + sum(page.size for page in held)
        if least + tokens > self.max_kv_tokens:
            return False
        while self.kv_tokens + tokens > self.max_kv_tokens:
            if not self.prefix_cache.evict():   # somebody else holds them
                return False
            self.counts["evicted_pages"] += 1
        return True

    # --- the four calls ---

    def add(self, request):
        """Queues a request that `prepare` has made ready. ValueError if it could never be admitted."""
        need = request.kv_tokens if self.admission == "reserve" else self.whole_pages(request.kv_tokens)
        if need > self.max_kv_tokens:
            raise ValueError(f"{request}: prompt of {len(request.prompt)} + max_new_tokens {request.max_new_tokens} needs "
                             f"{need} KV tokens, max_kv_tokens is {self.max_kv_tokens}")
        if request in self.waiting + self.running:
            raise ValueError(f"{request} is in the queue already")
        request.number = next(self.numbers)
        self.waiting.append(request)

    def schedule(self, step):
        """The plan of this step, [(request, number of tokens), ...]. Empty if none has arrived yet, or all were cancelled."""
        self.release()

        # 1. a decode whose pages are full needs another one, if need be somebody else's
        for request in sorted(self.running, key=self.in_rank):
            while request in self.running and request.computed + request.todo > request.granted:
                if self.make_room(self.page_size):
                    request.granted += self.page_size
                else:
                    self.preempt(max(self.running, key=self.in_rank))   # perhaps itself

        # 2. whoever has arrived and fits takes a free place; nobody overtakes the first in the queue
        while len(self.running) < self.max_running:
            arrived = [request for request in self.waiting if request.arrival <= step]
            if not arrived or not self.admit(min(arrived, key=self.in_queue), arrived):
                break

        # 3. one token for each decode, so that a long prompt cannot hold them up
        self.running.sort(key=self.in_rank)
        plan = [(request, 1) for request in self.running if request.todo == 1]

        # 4. the rest of the budget goes to prefill chunks, of several prompts if it reaches
        budget = self.token_budget - len(plan)
        for request in self.running:
            if request.todo > 1 and budget > 0:
                n = min(request.todo, budget)
                plan.append((request, n))
                budget -= n
        if not plan and any(request.arrival <= step for request in self.running + self.waiting):
            raise RuntimeError(f"nothing can go on at step {step}, although a request has arrived: better an error than a loop for ever")
        return plan

    def report(self, plan, tokens):
        """
        What came of a plan: `tokens` for those of its requests that had nothing more to compute, in its order.
        Only now are the planned tokens computed: a forward pass that failed leaves everything as it was.
        """
        tokens = iter(tokens)
        for request, n in plan:
            complete = n == request.todo
            request.computed += n
            if self.prefix_cache and not request.finished:
                self.commit(request)
            if complete:
                request.append(next(tokens))
        self.release()

    def cancel(self, request):
        """Ends a request in any state and frees what it holds. Between steps; `Request.cancel` may come at any time."""
        request.cancel()
        self.release()

    # --- what they are made of ---

    @property
    def busy(self):
        return bool(self.waiting or self.running)

    def next_step(self, step):
        """The step at which there is something to do: `step`, or if all is waiting to arrive, the first arrival."""
        return step if self.running or not self.waiting else max(step, min(request.arrival for request in self.waiting))

    def admit(self, request, arrived):
        """From the queue into a free place, if there is room."""
        pages = self.prefix_cache.take(request.tokens[:-1]) if self.prefix_cache else []   # the last token is always computed
        room = self.room_for(request)
        if pages and not self.make_room(room, pages):   # the pages themselves may be in its way
            self.prefix_cache.give_back(pages)
            pages = []
        if not self.make_room(room, pages):
            return False
        self.waiting.remove(request)
        self.running.append(request)
        request.granted, request.pages = room, pages
        request.computed = sum(page.size for page in pages)
        if pages:
            self.counts["prefix_hits"] += 1
            self.counts["saved_tokens"] += request.computed
        for other in arrived:
            if (other.arrival, other.number) < (request.arrival, request.number):
                other.passed += 1
        return True

    def preempt(self, request):
        """Back to the queue. What it computed is lost, what it generated is not."""
        self.free(request)
        request.computed = 0
        request.passed += 1
        self.running.remove(request)
        self.waiting.append(request)
        self.counts["preemptions"] += 1

    def commit(self, request):
        """Full pages of prompt tokens that have just been computed are kept for others, if there is room."""
        size = self.prefix_cache.page_size
        while (end := sum(page.size for page in request.pages) + size) <= min(request.computed, len(request.prompt)):
            page = self.prefix_cache.find(request.pages, request.prompt[end - size:end])
            if page is None:
                if not self.make_room(size):
                    return
                page = self.prefix_cache.add(request.pages, request.prompt[end - size:end], request.kv, end)
            self.prefix_cache.hold(page)
            request.pages.append(page)

    def release(self):
        """Lets go of everything that is finished."""
        finished = [request for request in self.waiting + self.running if request.finished]   # once: another thread may cancel
        for request in finished:
            self.free(request)
        self.waiting = [request for request in self.waiting if request not in finished]
        self.running = [request for request in self.running if request not in finished]

    def free(self, request):
        if request.pages:
            self.prefix_cache.give_back(request.pages)
        request.kv, request.granted, request.pages = None, 0, []
