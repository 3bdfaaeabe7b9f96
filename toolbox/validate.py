"""Bad values, each refused by one line that names the request or the knob, and what is allowed."""
import math
import operator
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import contextmanager
from itertools import count


@contextmanager
def one_line(what, *expected):
    """
    For files that others wrote. OSError and ValueError in the `with` block, and the exceptions
    `expected`, become a ValueError of one line that begins with `what`, the file that is wrong.

    expected: what else the library raises that reads the file. Our own mistakes (TypeError, ...)
              pass through; Exception is for blocks that hold nothing but the library's calls
    """
    try:
        yield
    except (OSError, ValueError, *expected) as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        said = str(getattr(error, "strerror", None) or f"{kind}{error}")   # "No such file ..."
        raise ValueError(f"{what}: {' '.join(said.split()):.300}") from None


def plain(value):
    """One number of numpy's or torch's as Python's own; anything else as it is."""
    return value.item() if getattr(value, "shape", None) == () else value


def check_request(request):
    """ValueError for values that no model can run; other libraries' numbers become Python's."""
    if not isinstance(request.name, str) or not request.name.isprintable():
        name, request.name = request.name, ""
        raise ValueError(f"{request}: name must be a string of printable characters, not {name!r}")
    try:
        request.prompt = [operator.index(token) for token in request.prompt]   # any library's ints
    except TypeError:
        raise ValueError(f"{request}: prompt must be a list of token ids, not "
                         f"{' '.join(repr(request.prompt).split()):.60}") from None
    if not request.prompt:
        raise ValueError(f"{request}: the prompt is empty, it needs at least one token")
    least = dict(max_new_tokens=1, top_k=1, seed=0, priority=0, arrival=0)
    for name, minimum in least.items():
        value = plain(getattr(request, name))
        setattr(request, name, value)
        if not is_whole(value, minimum) and not (value is None and name == "top_k"):
            raise ValueError(f"{request}: {name} must be a whole number of at least {minimum}, "
                             f"not {value!r}")
    eos = plain(request.eos_token)
    request.eos_token = tuple(map(plain, eos)) if isinstance(eos, Iterable) else eos
    if not all(is_whole(token, 0) for token in request.ends):
        raise ValueError(f"{request}: eos_token must be a whole number of at least 0, or several "
                         f"of them, not {eos!r}")
    t, request.top_p = plain(request.temperature), (p := plain(request.top_p))
    if not is_number(t) or not 0 <= t <= sys.float_info.max:
        raise ValueError(f"{request}: temperature must be a number of at least 0, not {t!r}")
    request.temperature = float(t)   # torch has no large ints
    if not is_number(p) or not 0 < p <= 1:
        raise ValueError(f"{request}: top_p must be a number above 0 and at most 1, not {p!r}")


def as_list(requests, kind):
    """One request or several, in any iterable, as a list. ValueError for anything else."""
    several = isinstance(requests, Iterable) and not isinstance(requests, dict)
    requests = list(requests) if several else [requests]
    for request in requests:
        if not isinstance(request, kind):
            raise ValueError(f"requests must be Requests, not {request!r:.60}")
    return requests


def check_run(requests, config):
    """
    The requests' names, in order; empty ones become r0, r1, ... ValueError if they have the same
    names, have already run, or do not fit the model's GPTConfig.
    """
    if not requests:
        raise ValueError("there are no requests: at least one is needed")
    taken = {request.name for request in requests}
    free = (f"r{i}" for i in count() if f"r{i}" not in taken)
    name_of = {request: request.name or next(free) for request in dict.fromkeys(requests)}
    names = [name_of[request] for request in requests]
    for name, times in Counter(names).items():
        if times > 1:
            raise ValueError(f"request '{name}' appears {times} times: each needs its own name, "
                             "and runs once")
    for request, name in name_of.items():
        if request.computed or request.generated:
            raise ValueError(f"request '{name}' has already run: dataclasses.replace(request) "
                             "makes a new one")
        if len(request.prompt) > config.block_size:
            raise ValueError(f"request '{name}': prompt of {len(request.prompt)} tokens does not "
                             f"fit block_size {config.block_size}, the model's limit")
        for token in request.prompt:
            if not 0 <= token < config.vocab_size:
                raise ValueError(f"request '{name}': token id {token} is not in the vocabulary, "
                                 f"0 to {config.vocab_size - 1}")
    return names


def check_config(config):
    """ValueError for a GPTConfig that describes no model."""
    at_least_1(**{f"GPTConfig: {name}": value for name, value in vars(config).items()})
    if config.n_embd % config.n_head:
        raise ValueError(f"GPTConfig: n_head {config.n_head} must divide n_embd {config.n_embd}")


def check_finite(requests, logits):
    """ValueError for the first request whose largest logit is not; it is the error's `request`."""
    for request, logit in zip(requests, logits):
        if not math.isfinite(logit):
            error = ValueError(f"{request}: the model's logits are not finite")
            error.request = request
            raise error


def check_order(request, waiting):
    """ValueError for a request that is queued behind one that arrives later."""
    if waiting and request.arrival < waiting[-1].arrival:
        raise ValueError(f"{request} arrives before {waiting[-1]}: add it first")


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_whole(value, least):
    return isinstance(value, int) and is_number(value) and value >= least


def at_least_1(**knobs):
    """ValueError for a knob that is not a whole number of at least 1."""
    for name, value in knobs.items():
        if not is_whole(value, 1):
            raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
        if value > sys.maxsize:
            raise ValueError(f"{name} must be at most {sys.maxsize}")


def one_of(name, value, *allowed):
    if value not in allowed:
        raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, not {value!r}")


def check_pool(max_batch, pages, page_size, scheduler, context_length):
    """ValueError for a pool of pages that cannot be. pages: None if it is chosen later."""
    at_least_1(max_batch=max_batch, page_size=page_size, pages=1 if pages is None else pages)
    if page_size > max(16, context_length):   # 16, the default, may be more than a tiny context
        raise ValueError(f"page_size {page_size} exceeds block_size {context_length}")
    if not callable(scheduler):
        raise ValueError("scheduler must be a class like PagedScheduler, or one of "
                         f"beyond.fairness.SCHEDULERS, not {scheduler!r}")


def refuse(request, need):
    """ValueError for a request that could never run. need: what it needs, and what there is."""
    raise ValueError(f"{request}: prompt of {len(request.prompt)} + max_new_tokens "
                     f"{request.max_new_tokens}, less the last token, needs {need}")
