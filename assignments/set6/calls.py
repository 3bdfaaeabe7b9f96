"""Set 6: runs one function on a case, and returns what it gives and changes."""
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


def guess(prompt, generated, most, at_once=1):
    """While tokens come, so many at once."""
    (request,), lookup = requests_of([{"prompt": prompt, "new": 99}], ROOM), speculative.Lookup()
    found = {}
    for end in range(0, len(generated) + 1, at_once):
        request.computed = len(prompt) + end - 1 if end else 0
        request.generated = generated[:end]
        known = list(request.tokens)
        said = lookup.guess(request, most)   # a list that it may use again
        found[f"the guess after {' '.join(map(str, known[-12:]))}"] = (
            [*said] if isinstance(said, list) else kind_of(said))
        if request.tokens != known:
            return "it changes the request"
    return found


def guess_for_two(tokens, others, most):
    """Each request has its own Lookup, which remembers nothing of the other."""
    requests, found = requests_of([{"prompt": tokens}, {"prompt": others}], ROOM), {}
    lookups = [speculative.Lookup() for _ in requests]
    for request, lookup in [*zip(requests, lookups), *zip(requests, lookups)]:
        found[f"the guess for {request.name}"] = lookup.guess(request, most)
    return found


def guess_often(number, kinds):
    """After each of many tokens: the sum of the guesses' lengths, and the last guess."""
    (request,), lookup = requests_of([{"prompt": 1, "new": number + 9}], ROOM), speculative.Lookup()
    total, last = 0, []
    for i in range(number):
        request.computed = i + 1
        request.generated.append(1000 + i if i % 40 else i % kinds)   # most are new
        last = lookup.guess(request, 4)
        total += len(last)
    return {"tokens guessed in all": total, "the last guess": last}


def draft(plan, token_budget, most, page_size, has=9):
    """Twice, as in two steps. A stand-in for Lookup always has `has` tokens."""
    asked, lookups = [], {}

    class Lookup:
        def guess(self, request, most):
            asked.append((self, request))
            return list(range(1, min(most, has) + 1))

    pairs = plan_of(plan)
    for (request, _), row in zip(pairs, plan):
        request.block_table = list(range(row.get("pages", 9)))
    pool = SimpleNamespace(page_size=page_size)
    scheduler = SimpleNamespace(token_budget=token_budget, pool=pool)
    with patch.object(speculative, "Lookup", Lookup):
        found = [speculative.draft(pairs, scheduler, lookups, most) for _ in range(2)]
    found = [{request: said.get(request, "nothing") for request, _ in pairs}
             if isinstance(said, dict) else said for said in found]
    return {"it returns": found[0], "it returns, called again": found[1],
            "a guess is asked of": [request for _, request in asked],
            "lookups that are asked": len({lookup for lookup, _ in asked}),
            "lookups has them": all(lookups.get(request) is each for each, request in asked)}


@cache
def model():
    """A small model, loud as the tests' toy, but the same on every machine."""
    made = GPT(GPTConfig(block_size=24, vocab_size=13, n_layer=2, n_head=2, n_embd=12)).double()
    with torch.no_grad():
        for i, (name, weights) in enumerate(made.named_parameters()):
            if weights.dim() == 2:   # norms stay as they are
                weights.copy_({"wte": 1, "wpe": 3}.get(name[:3], 4) * numbers(i, *weights.shape))
        made.wte.weight /= made.wte.weight.norm(dim=1, keepdim=True)   # no token is loud itself
    return made.requires_grad_(False)


def generate(requests, rights=None, page_size=24, **knobs):
    """
    rights: how many right guesses the first, second, ... draft of each request has, with a wrong
    one behind them; a stand-in for `draft` knows them from a run without guesses, and counts steps
    in `lookups`. None: the student's own draft and lookup.
    """
    mine, alone = requests_of(requests), requests_of([
        {**row, "eos_token": None, "new": 99, "arrival": 0} for row in requests])
    generate_paged.generate(model(), alone, max_batch=len(alone), page_size=24)
    answers, drafts, told = {each.name: each.generated for each in alone}, Counter(), []
    passes, inside, steps, forward_pass = [], [], Counter(), Trace.forward_pass

    @contextmanager
    def traced(*given):
        with forward_pass(*given):
            inside.append(1)
            yield
            inside.pop()

    def scripted(plan, scheduler, lookups, most):
        found = {request: [] for request, _ in plan}
        steps["in all"] += 1
        steps["in lookups"] = lookups["steps"] = lookups.get("steps", 0) + 1
        for request in found:
            if request.todo == 1:
                room = len(request.block_table) * page_size - request.computed - 1
                right = rights[drafts[request] % len(rights)]
                drafts[request] += 1
                rest = answers[request.name][len(request.generated):request.max_new_tokens][:-1]
                wrong = [(token + 1) % 13 for token in rest[right:right + 1]]
                found[request] = (rest[:right] + wrong)[:room]
        return found

    counting = model().ln_f.register_forward_hook(lambda _, given, out: passes.append(
        [len(out), bool(inside)]))   # behind what is wanted
    try:
        with patch.object(Trace, "forward_pass", traced), patch.object(
                speculative, "draft", speculative.draft if rights is None else scripted):
            trace = speculative.generate(
                model(), mine, page_size=page_size, **knobs,
                on_token=lambda request, token, row: told.append(
                    [request.name, int(token), int(row.argmax())]))
    finally:
        counting.remove()
    if trace is None:
        return None
    return {**{f"tokens and finish_reason of {each.name}": [each.generated, each.finish_reason]
               for each in mine}, "on_token is told, with the most likely token": told,
            "passes, passes in the trace": [
                len(passes), min(len(trace.passes), sum(traced for _, traced in passes))],
            "rows of logits of each pass": [many for many, _ in passes],
            "steps in all, with the same lookups": [steps["in all"], steps["in lookups"]],
            "slots": sum(each.slots for each in trace.passes),
            "scores": sum(each.score_entries for each in trace.passes),
            "preemptions": trace.counts["preemptions"],
            "rejected tokens of each pass": [each.rejected for each in trace.passes],
            **{f"steps of {each.name}'s tokens": each.token_steps for each in mine},
            "guesses left behind": [each.assumed for each in mine]}
