"""Bad values, each refused by one line that names the request or the knob, and what is allowed."""
import logging
import math
import operator
import sys
import warnings
from collections import Counter
from collections.abc import Iterable
from contextlib import contextmanager, suppress
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


@contextmanager
def silent(library):
    """Nothing of what a library logs or warns of stands beside a command's one line."""
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def check(name, value, right, allowed):
    """ValueError unless `right(value)`. A value that `right` cannot even look at is wrong, too."""
    with suppress(TypeError, AttributeError, ValueError):
        if right(value):
            return
    raise ValueError(f"{name} must be {allowed}, not {' '.join(repr(value).split()):.60}")


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_whole(value, least):
    return isinstance(value, int) and is_number(value) and value >= least


def check_whole(name, value, least):
    check(name, value, lambda n: is_whole(n, least), f"a whole number of at least {least}")


def at_least_1(**knobs):
    """ValueError for a knob that is not a whole number of at least 1."""
    for name, value in knobs.items():
        check_whole(name, value, 1)
        check(name, value, lambda n: n <= sys.maxsize, f"at most {sys.maxsize}")


def one_of(name, value, *allowed):
    check(name, value, lambda each: each in allowed, " or ".join(map(repr, allowed)))


def plain(value):
    """Numbers of numpy's or torch's as Python's own; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def check_request(request):
    """ValueError for values that no model can run; other libraries' numbers become Python's."""
    def check_field(field, right, allowed):
        check(f"{request}: {field}", getattr(request, field), right, allowed)

    name, request.name = request.name, ""   # an error must not print it
    check("request: name", name, str.isprintable, "a string of printable characters")
    request.name = name
    for field, value in vars(request).items():
        setattr(request, field, plain(value))
    if isinstance(request.eos_token, Iterable):
        request.eos_token = tuple(map(plain, request.eos_token))
    with suppress(TypeError):
        request.prompt = [operator.index(token) for token in request.prompt]
    check_field("prompt", lambda prompt: all(isinstance(token, int) for token in prompt),
                "a list of token ids")
    if not request.prompt:
        raise ValueError(f"{request}: the prompt is empty, it needs at least one token")
    for field, least in dict(max_new_tokens=1, seed=0, priority=0, arrival=0).items():
        check_whole(f"{request}: {field}", getattr(request, field), least)
    check_field("top_k", lambda k: k is None or is_whole(k, 1), "a whole number of at least 1")
    check_field("eos_token", lambda _: all(is_whole(token, 0) for token in request.ends),
                "a whole number of at least 0, or several of them")
    check_field("temperature", lambda t: is_number(t) and 0 <= t <= sys.float_info.max,
                "a number of at least 0")
    request.temperature = float(request.temperature)   # torch has no large ints
    check_field("top_p", lambda p: is_number(p) and 0 < p <= 1, "a number above 0 and at most 1")


def as_list(values, kind, name="requests"):
    """One `kind` or several, in any iterable, as a list. ValueError for anything else."""
    several = isinstance(values, Iterable) and not isinstance(values, dict)
    values = list(values) if several else [values]
    for value in values:
        check(name, value, lambda each: isinstance(each, kind), f"{kind.__name__}s")
    return values


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
        if request.computed or request.generated or request.finished:
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


def check_pool(max_batch, pages, page_size, scheduler_class, context_length):
    """ValueError for a pool of pages that cannot be. pages: None if it is chosen later."""
    at_least_1(max_batch=max_batch, page_size=page_size, pages=1 if pages is None else pages)
    if page_size > max(16, context_length):   # 16, the default, may be more than a tiny context
        raise ValueError(f"page_size {page_size} exceeds block_size {context_length}")
    check("scheduler_class", scheduler_class, callable,
          "a class like PagedScheduler, or one of beyond.fairness.SCHEDULERS")


def refuse(request, need):
    """ValueError for a request that could never run. need: what it needs, and what there is."""
    raise ValueError(f"{request}: prompt of {len(request.prompt)} + max_new_tokens "
                     f"{request.max_new_tokens}, less the last token, needs {need}")
