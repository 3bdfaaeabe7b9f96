"""
A request: one prompt, how to continue it, and how far its computation has come.

Some of its tokens are *computed*: their keys and values are in its cache (cache.py). The others are
still *to do*. Computing the tokens of a prompt, many in one pass, is called *prefill*. Computing
the token that was generated last is a *decode*. To a request the two are the same thing:

    prefill   p0 p1 p2 p3 p4 p5              decode   p0 p1 p2 p3 p4 p5 g0 g1
              -- -- -- --                             -- -- -- -- -- -- --
              computed 4   todo 2                     computed 7          todo 1

Serving proceeds in *steps* of one or two forward passes. A *plan*, [(request, n), ...], says how
many tokens of which requests a step or a pass computes. A request is *due* if n covers all its
todo: the pass then yields the logits after its last token, and with them its next token. A pass
that computes a part of a prompt yields none.
"""
import math
import random
from dataclasses import dataclass, field

from toolbox.validate import as_list, check_request, check_run


@dataclass(eq=False)   # equal to itself only, so it can be a key
class Request:
    """
    What to generate, and what has been generated. Runs once. ValueError for bad values.

    prompt:         token ids, at least one
    max_new_tokens: at least 1
    temperature:    0 takes the most likely token, above 0 samples
    top_k:          sample from the k largest logits only (more if the k-th is tied); None: from all
    top_p:          of these, keep the fewest most likely whose probabilities sum to top_p; 1: all
    seed:           starts this request's own random stream
    eos_token:      a token, or a tuple of tokens, that ends the request; it is kept as the last one
    name:           for messages and plots; if empty, `prepare` chooses one
    priority:       0 is the most urgent; only a policy of beyond/fairness.py looks at it
    arrival:        the step at which it arrives
    """
    prompt: list
    max_new_tokens: int = 16
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = field(default=1.0, kw_only=True)
    seed: int = 0
    eos_token: int | tuple | None = None
    name: str = ""
    priority: int = 0
    arrival: int = 0

    generated: list = field(default_factory=list, init=False)    # token ids
    finish_reason: str | None = field(default=None, init=False)  # "stop", "length" (or engine.py's)
    token_times: list = field(default_factory=list, init=False)  # perf_counter() at each token
    token_steps: list = field(default_factory=list, init=False)  # step of each token
    computed: int = field(default=0, init=False)                 # tokens in the cache
    kv: object = field(default=None, init=False, repr=False)     # its cache, a KV (cache.py)
    # from paging.py on: the numbers of its pages. vLLM calls a page a block
    block_table: list | None = field(default=None, init=False)
    # from generate_prefix.py on: the hashes of its full pages
    page_hashes: list = field(default_factory=list, init=False)
    # always empty in the stages. Some files of beyond/ put tokens here that are only guessed
    assumed: list = field(default_factory=list, init=False)
    context_length: float = field(default=math.inf, init=False)  # the model's; set by `prepare`

    def __post_init__(self):
        check_request(self)
        self.random_stream = random.Random(self.seed)

    def __str__(self):
        return f"request '{self.name}'" if self.name else "request"

    @property
    def tokens(self):
        """The tokens that it has: the prompt and what has been generated."""
        return self.prompt + self.generated

    @property
    def num_tokens(self):
        return len(self.prompt) + len(self.generated)

    def slice(self, start, end):
        """Tokens start to end - 1 of prompt + generated + assumed, without joining whole lists."""
        tokens = []
        for part in self.prompt, self.generated, self.assumed:
            # Here start and end count from the first token of this part; below 0 is before it.
            tokens += part[max(start, 0):max(end, 0)]
            start -= len(part)
            end -= len(part)
        return tokens

    @property
    def pad(self):
        """The token that fills up its row in a rectangle. Any would do: a mask hides pads."""
        return self.prompt[0]

    @property
    def todo(self):
        """Tokens not computed yet; between passes, 1 or more. 1 is a decode (or a prompt's end)."""
        return self.num_tokens + len(self.assumed) - self.computed

    @property
    def kv_capacity(self):
        """
        The most tokens that its cache will hold: its prompt and its longest answer, but the last
        token. That one is never fed back. So a prompt of 9 and 8 new tokens need 9 + 8 - 1 = 16.
        """
        return min(len(self.prompt) + self.max_new_tokens - 1, self.context_length)

    @property
    def ends(self):
        """The tokens that end it, as a tuple."""
        if self.eos_token is None:
            return ()
        if isinstance(self.eos_token, tuple):
            return self.eos_token
        return (self.eos_token,)

    @property
    def finished(self):
        return self.finish_reason is not None

    def draw(self):   # a uniform number in [0, 1) from its own stream, one per sampled token
        return self.random_stream.random()

    def is_last(self, number):
        """
        Whether its number-th generated token is its last: max_new_tokens is reached, or the token
        has no position in the context, so the model cannot compute it to get another one.
        """
        if number >= self.max_new_tokens:
            return True
        position = len(self.prompt) + number - 1   # of that token; positions count from 0
        return position >= self.context_length

    def append(self, token):
        """Adds the next token. A sequence without a position left ends; it is never cropped."""
        self.generated.append(token)
        if token in self.ends:
            self.finish_reason = "stop"
        elif self.is_last(len(self.generated)):
            self.finish_reason = "length"


def indices_due(plan):
    """Indices of a plan's requests that get a next token: those whose todo it covers in full."""
    return [i for i, (request, n) in enumerate(plan) if n == request.todo]


def advance(plan, tokens):
    """Records a pass: its tokens are computed, and the requests that are due get a token."""
    due = indices_due(plan)   # before `computed` changes, and `todo` with it
    for request, n in plan:
        request.computed += n
    for i, token in zip(due, tokens, strict=True):
        request, _ = plan[i]
        request.append(token)


def prepare(requests, config):
    """The requests by arrival, with names and the model's context length. ValueError if bad."""
    requests = as_list(requests, Request)
    names = check_run(requests, config)
    for request, name in zip(requests, names, strict=True):
        request.name = name
        request.context_length = config.block_size
        request.kv = None
        request.block_table = None
    return sorted(requests, key=lambda request: request.arrival)
