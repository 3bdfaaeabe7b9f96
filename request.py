"""
A request: one prompt, how to continue it, and how far its computation has come.

To a request, prefill and decode are the same thing. Some of its tokens are *computed* (their keys
and values are in its cache), the others are still *to do*:

    prefill   p0 p1 p2 p3 p4 p5              decode   p0 p1 p2 p3 p4 p5 g0 g1
              -- -- -- --                             -- -- -- -- -- -- --
              computed 4   todo 2                     computed 7          todo 1

A *plan* says how many tokens of which requests go into one forward pass: [(request, n), ...]. A
request gets its next token only when the plan covers all that it still has to do.
"""
import operator
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import count


@dataclass(eq=False)
class Request:
    """
    What to generate, and what has been generated. Runs once. ValueError for bad values.

    prompt:         token ids, at least one
    max_new_tokens: at least 1
    temperature:    0 takes the most likely token, above 0 samples
    top_k:          sample from the k largest logits only (more if the k-th is tied); None: from all
    seed:           starts this request's own random stream
    eos_token:      ends the request when generated (it is kept as the last token); None: never
    name:           for messages and plots; if empty, `prepare` chooses one
    priority:       0 is the most urgent; only stage 7 looks at it
    arrival:        the step at which it arrives
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
    token_times: list = field(default_factory=list, init=False)  # perf_counter() at each token
    token_steps: list = field(default_factory=list, init=False)  # step of each token
    computed: int = field(default=0, init=False)                 # tokens in the cache
    kv: object = field(default=None, init=False, repr=False)     # its KV; stage 7: block table
    block_size: int | None = field(default=None, init=False)     # the model's, set by `prepare`

    def __post_init__(self):
        validate(self)
        self.random_stream = random.Random(self.seed)

    def __str__(self):
        return f"request '{self.name}'" if self.name else "request"

    @property
    def tokens(self):
        """All known tokens, prompt and generated."""
        return self.prompt + self.generated

    def slice(self, start, end):
        """tokens[start:end] without copying the rest."""
        n = len(self.prompt)
        return self.prompt[start:end] + self.generated[max(start - n, 0):max(end - n, 0)]

    @property
    def todo(self):
        """Known tokens that are not computed yet. 1 is a decode (or the end of a prompt)."""
        return len(self.prompt) + len(self.generated) - self.computed

    @property
    def kv_tokens(self):
        """The cache room to reserve: for its prompt and its longest answer, in tokens."""
        return min(len(self.prompt) + self.max_new_tokens, self.block_size)

    @property
    def finished(self):
        return self.finish_reason is not None

    def draw(self):
        """A uniform number in [0, 1) from its own stream: one for each token that it samples."""
        return self.random_stream.random()

    def append(self, token):
        """Adds the next token. A sequence is never cropped: it ends when no position is left."""
        if self.finished:   # cancelled while its token was being computed
            return
        self.generated.append(token)
        room = self.block_size - len(self.prompt) + 1   # the last token needs no position
        if token == self.eos_token:
            self.finish_reason = "stop"
        elif len(self.generated) >= min(self.max_new_tokens, room):
            self.finish_reason = "length"

    def cancel(self):
        """Ends it as it stands, from any thread. The running loop drops it in its next step."""
        if not self.finished:
            self.finish_reason = "cancelled"


def complete(plan):
    """Indices of a plan's requests that get a next token: those whose todo it covers in full."""
    return [i for i, (request, n) in enumerate(plan) if n == request.todo > 0]


def advance(plan, tokens):
    """Records a pass: its tokens are computed, and complete requests get their next token."""
    sampled = [plan[i][0] for i in complete(plan)]
    for request, n in plan:
        request.computed += n
    for request, token in zip(sampled, tokens):
        request.append(token)


# --- validation: not needed to understand the stages ----------------------------------------------
def prepare(requests, config):
    """Checks all requests (ValueError), sets name and block_size, and sorts by arrival."""
    requests = [requests] if isinstance(requests, Request) else list(requests)
    if not requests:
        raise ValueError("there are no requests: at least one is needed")
    for request in requests:
        if not isinstance(request, Request):
            raise ValueError(f"requests must be Requests, not {request!r:.60}")
    taken = {request.name for request in requests}
    free = (f"r{i}" for i in count() if f"r{i}" not in taken)
    name_of = {request: request.name or next(free) for request in dict.fromkeys(requests)}
    for name, times in Counter(name_of[request] for request in requests).items():
        if times > 1:
            raise ValueError(f"request '{name}' appears {times} times: each needs its own name, "
                             "and runs once")
    for request, name in name_of.items():
        check_fits(request, name, config)
    for request, name in name_of.items():
        request.name, request.block_size, request.kv = name, config.block_size, None
    return sorted(requests, key=lambda request: request.arrival)


def check_fits(request, name, config):
    """ValueError if the request has already run, or this model cannot run it."""
    if request.computed or request.generated:
        raise ValueError(f"request '{name}' has already run: dataclasses.replace(request) makes "
                         "a new one")
    if len(request.prompt) > config.block_size:
        raise ValueError(f"request '{name}': prompt of {len(request.prompt)} tokens does not fit "
                         f"block_size {config.block_size}, the model's limit")
    for token in request.prompt:
        if not 0 <= token < config.vocab_size:
            raise ValueError(f"request '{name}': token id {token} is not in the vocabulary, "
                             f"0 to {config.vocab_size - 1}")


def validate(request):
    """ValueError for values that no model can run; turns the prompt into a list of ints."""
    if not isinstance(request.name, str):
        name, request.name = request.name, ""
        raise ValueError(f"{request}: name must be a string, not {name!r}")
    try:
        request.prompt = [operator.index(token) for token in request.prompt]   # any library's ints
    except TypeError:
        raise ValueError(f"{request}: prompt must be a list of token ids, not "
                         f"{request.prompt!r:.60}") from None
    if not request.prompt:
        raise ValueError(f"{request}: the prompt is empty, it needs at least one token")
    least = dict(max_new_tokens=1, top_k=1, seed=0, eos_token=0, priority=0, arrival=0)
    for name, minimum in least.items():
        value = getattr(request, name)
        if not is_whole(value, minimum) and not (value is None and name in ("top_k", "eos_token")):
            raise ValueError(f"{request}: {name} must be a whole number of at least {minimum}, "
                             f"not {value!r}")
    t = request.temperature
    if not isinstance(t, (int, float)) or not 0 <= t <= sys.float_info.max:
        raise ValueError(f"{request}: temperature must be a number of at least 0, not {t!r}")


def is_whole(value, least):
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def at_least_1(**knobs):
    """ValueError for a knob that is not a whole number of at least 1."""
    for name, value in knobs.items():
        if not is_whole(value, 1):
            raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
