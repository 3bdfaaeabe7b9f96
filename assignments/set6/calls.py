"""Set 6: runs one function on a case, and returns what it gives and changes."""
import copy
from collections import Counter
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from unittest.mock import patch

import torch
from probes import kind_of, numbers, plan_of, requests_of

import generate_paged
from beyond import speculative
from model import GPT, GPTConfig
from toolbox.trace import Trace

ROOM = 10**6   # no model's limit
VOCABULARY = 13


# --- prompt lookup --------------------------------------------------------------------------------

def guess(prompt, generated, most, at_once=1):
    """While tokens come, so many at once."""
    request, = requests_of([{"prompt": prompt, "new": 99}], ROOM)
    lookup = speculative.Lookup()
    guesses = {}
    for end in range(0, len(generated) + 1, at_once):
        request.computed = len(prompt) + end - 1 if end else 0
        request.generated = generated[:end]
        tokens = list(request.tokens)
        value = lookup.guess(request, most)
        last_tokens = " ".join(map(str, tokens[-12:]))
        guesses[f"the guess after {last_tokens}"] = copied(value)
        if request.tokens != tokens:
            return "it changes the request"
    return guesses


def copied(value):
    """A list as it is now, as the lookup may use it again; of anything else the kind."""
    return [*value] if isinstance(value, list) else kind_of(value)


def guess_for_two(tokens, others, most):
    """Each request has its own Lookup, which remembers nothing of the other."""
    requests = requests_of([{"prompt": tokens}, {"prompt": others}], ROOM)
    lookups = [speculative.Lookup() for _ in requests]
    pairs = [*zip(requests, lookups)]
    guesses = {}
    for request, lookup in pairs + pairs:
        guesses[f"the guess for {request.name}"] = lookup.guess(request, most)
    return guesses


def guess_often(number, kinds):
    """After each of many tokens: the sum of the guesses' lengths, and the last guess."""
    request, = requests_of([{"prompt": 1, "new": number + 9}], ROOM)
    lookup = speculative.Lookup()
    total, last = 0, []
    for i in range(number):
        token = 1000 + i   # new, as most are
        if i % 40 == 0:
            token = i % kinds
        request.computed = i + 1
        request.generated.append(token)
        last = lookup.guess(request, 4)
        total += len(last)
    return {"tokens guessed in all": total, "the last guess": last}


# --- room for guesses -----------------------------------------------------------------------------

def draft(plan, token_budget, most, page_size, has=9):
    """Twice, as in two steps. A stand-in for Lookup always has `has` tokens."""
    asked = []

    class Lookup:
        def guess(self, request, most):
            asked.append((self, request))
            number = min(most, has)
            return list(range(1, number + 1))

    pairs = plan_of(plan)
    for (request, _), row in zip(pairs, plan):
        request.block_table = list(range(row.get("pages", 9)))
    pool = SimpleNamespace(page_size=page_size)
    scheduler = SimpleNamespace(token_budget=token_budget, pool=pool)
    lookups = {}
    with patch.object(speculative, "Lookup", Lookup):
        first = speculative.draft(pairs, scheduler, lookups, most)
        second = speculative.draft(pairs, scheduler, lookups, most)
    return {
        "it returns": for_each_request(first, pairs),
        "it returns, called again": for_each_request(second, pairs),
        "a guess is asked of": [request for _, request in asked],
        "lookups that are asked": len({lookup for lookup, _ in asked}),
        "lookups has them": all(lookups.get(request) is lookup for lookup, request in asked)}


def for_each_request(guesses, plan):
    """What a dict has for each request of a plan; anything else as it is."""
    if not isinstance(guesses, dict):
        return guesses
    return {request: guesses.get(request, "nothing") for request, _ in plan}


# --- one pass, several tokens ---------------------------------------------------------------------

@cache
def model():
    """A small model, loud as the tests' toy, but the same on every machine."""
    config = GPTConfig(block_size=24, vocab_size=VOCABULARY, n_layer=2, n_head=2, n_embd=12)
    gpt = GPT(config).double()
    with torch.no_grad():
        for i, (name, weights) in enumerate(gpt.named_parameters()):
            if weights.dim() == 2:   # norms stay as they are
                weights.copy_(loudness(name) * numbers(i, *weights.shape))
        gpt.wte.weight /= gpt.wte.weight.norm(dim=1, keepdim=True)   # no token is loud itself
    return gpt.requires_grad_(False)


def loudness(name):
    """The largest number in the weights of this name."""
    if name.startswith("wte"):
        return 1
    if name.startswith("wpe"):
        return 3
    return 4


def generate(requests, rights=None, page_size=24, **knobs):
    """
    rights: how many right guesses the first, second, ... draft of each request has, with a wrong
    one behind them; a stand-in for `draft` makes them. None: the student's own draft and lookup.
    """
    served = requests_of(requests)
    stand_in = Script(answers_alone(requests), rights, page_size)
    draft = speculative.draft if rights is None else stand_in.draft
    tokens = []

    def on_token(request, token, row):
        tokens.append([request.name, int(token), int(row.argmax())])

    with watched_passes() as passes, patch.object(speculative, "draft", draft):
        trace = speculative.generate(
            model(), served, page_size=page_size, **knobs, on_token=on_token)
    if trace is None:
        return None
    in_a_trace = sum(traced for _, traced in passes)
    facts = {}
    for request in served:
        facts[f"tokens and finish_reason of {request.name}"] = [
            request.generated, request.finish_reason]
    facts |= {
        "on_token is told, with the most likely token": tokens,
        "passes, passes in the trace": [len(passes), min(len(trace.passes), in_a_trace)],
        "rows of logits of each pass": [rows for rows, _ in passes],
        "steps in all, with the same lookups": [stand_in.steps, stand_in.steps_in_lookups],
        "slots": sum(forward_pass.slots for forward_pass in trace.passes),
        "scores": sum(forward_pass.score_entries for forward_pass in trace.passes),
        "preemptions": trace.counts["preemptions"],
        "rejected tokens of each pass": [forward_pass.rejected for forward_pass in trace.passes]}
    for request in served:
        facts[f"steps of {request.name}'s tokens"] = request.token_steps
    facts["guesses left behind"] = [request.assumed for request in served]
    return facts


def generate_on_a_device(requests):
    """The tokens, from a model on a device that is not the CPU."""
    from second_device import DEVICE, second_device
    served = requests_of(requests)
    with second_device():
        speculative.generate(copy.deepcopy(model()).to(DEVICE), served, page_size=4)
    return {request.name: request.generated for request in served}


def answers_alone(requests):
    """{name: more tokens than the request asks for}, from a run without guesses."""
    alone = requests_of([
        {**row, "eos_token": None, "new": 99, "arrival": 0} for row in requests])
    generate_paged.generate(model(), alone, max_batch=len(alone), page_size=24)
    return {request.name: request.generated for request in alone}


class Script:
    """A stand-in for `draft` that knows the answers. It counts the steps, and also in `lookups`."""

    def __init__(self, answers, rights, page_size):
        self.answers = answers
        self.rights = rights
        self.page_size = page_size
        self.drafts = Counter()   # of each request, so far
        self.steps = self.steps_in_lookups = 0

    def draft(self, plan, scheduler, lookups, most):
        guesses = {request: [] for request, _ in plan}
        self.steps += 1
        self.steps_in_lookups = lookups["steps"] = lookups.get("steps", 0) + 1
        for request in guesses:
            if request.todo == 1:
                guesses[request] = self.guess(request)
        return guesses

    def guess(self, request):
        """Right tokens and a wrong one, as far as the request's pages and its answer go."""
        free_slots = len(request.block_table) * self.page_size - request.computed - 1
        number_right = self.rights[self.drafts[request] % len(self.rights)]
        self.drafts[request] += 1
        answer = self.answers[request.name][:request.max_new_tokens]
        rest = answer[len(request.generated):-1]   # the pass itself gives one token more
        guesses = rest[:number_right]
        for token in rest[number_right:number_right + 1]:
            guesses.append((token + 1) % VOCABULARY)
        return guesses[:free_slots]


@contextmanager
def watched_passes():
    """
    For a `with` block: the model's passes in it, as a list of [rows of logits, whether the pass
    runs inside the trace's forward_pass].
    """
    passes, inside = [], []
    forward_pass = Trace.forward_pass

    @contextmanager
    def traced(*arguments):
        with forward_pass(*arguments):
            inside.append(1)
            yield
            inside.pop()

    def count(module, inputs, output):   # behind what is wanted
        passes.append([len(output), bool(inside)])

    hook = model().ln_f.register_forward_hook(count)
    try:
        with patch.object(Trace, "forward_pass", traced):
            yield passes
    finally:
        hook.remove()
