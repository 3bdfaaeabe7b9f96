"""Set 8: guess."""
from dataclasses import replace
from types import SimpleNamespace

import pytest
from kit import Checks, counts_of, describe, drawn, given

from beyond import speculative
from lab.checks.toy import toy

FILES = ("model.py request.py cache.py scheduler.py generate_ragged.py paging.py generate_paged.py "
         "generate_prefix.py beyond/speculative.py")
points = pytest.mark.points


def guesses(cases):
    """One request's guesses, token by token."""
    for prompt, answer, most in cases:
        request, = given((prompt, len(answer) + 1), context_length=10**6)
        lookup = speculative.Lookup()
        for token in [None, *answer]:
            if token is not None:
                request.generated.append(token)
            yield (f"guess(request, {most}), the request's tokens end with {request.tokens[-9:]}",
                   list(lookup.guess(request, most)))


def guess_all(request):
    lookup = speculative.Lookup()
    for i in range(4000):
        request.generated.append(i * i % 97)
        lookup.guess(request, 4)


@points(4, "beyond/speculative.py:Lookup.guess", title="prompt lookup")
class Test8a(Checks):
    in_time = [("guess for each of 4,000 tokens",
                lambda: given((1, 4001), context_length=10**6)[0], guess_all)]

    def test_guesses(self, part):
        part.compare(guesses, [([1, 2, 3, 1, 2], [3, 1, 2, 9, 1, 2], 3), ([5], [5, 5, 5], 2),
                               ([1, 2], [3, 4], 4)])
        rng = part.rng
        part.compare(guesses, [([rng.randrange(kinds) for _ in range(rng.randint(1, 40))],
                                [rng.randrange(kinds) for _ in range(40)], rng.randint(1, 6))
                               for kinds in (2, 3, 4, 6, 9) * (6 if part.hidden else 2)])


def drafts(cases):
    for todos, budget, most, room, pages in cases:
        requests = given(*[([1, 2, 3] * 4, room)] * len(todos), context_length=40)
        plan = [(request, min(todo, 3)) for request, todo in zip(requests, todos)]
        for request, todo in zip(requests, todos):
            request.computed, request.block_table = 12 - todo, [*range(pages)]
        scheduler = SimpleNamespace(token_budget=budget, pages=SimpleNamespace(size=2))
        found = speculative.draft(plan, scheduler, {}, most)
        yield (f"draft with token_budget {budget}, at most {most} guesses, prompts of 12, "
               f"max_new_tokens {room}, {pages} pages of 2, plan "
               + " ".join(f"{r.name}{n}" for r, n in plan)
               + ", to do " + " ".join(map(str, todos)),
               {r.name: list(found.get(r, [])) for r in requests})


@points(3, "beyond/speculative.py:draft", title="how many guesses there is room for")
class Test8b(Checks):
    def test_drafts(self, part):
        rng = part.rng
        part.compare(drafts, [((1, 1), budget, most, room, pages) for budget in range(2, 9)
                              for most in (0, 1, 4) for room in (1, 2, 3, 9)
                              for pages in (6, 7, 20)])
        part.compare(drafts, [([rng.choice([1, 1, 1, 3, 5]) for _ in range(rng.randint(5, 40))],
                               rng.randint(60, 200), rng.randint(1, 6), rng.randint(1, 9),
                               rng.randint(6, 12))
                              for _ in range(20)])


def runs(workloads):
    for requests, quiet, knobs in workloads:
        logits, where, requests = {}, describe(requests, **knobs), [*map(replace, requests)]
        trace = speculative.generate(
            toy(loud=not quiet), requests, **knobs, on_token=lambda request, token, row:
            logits.setdefault(f"logits of {request.name}", []).append(row.tolist()))
        yield where, {f"tokens of {r.name}": r.generated for r in requests}
        yield where, logits
        yield where, {**counts_of(trace), "rejected": sum(p.rejected for p in trace.passes)}


@points(6, "beyond/speculative.py:generate", title="one pass, several tokens")
class Test8c(Checks):
    def test_runs(self, part):
        part.compare(runs, [(given(*[([1, 2, 3] * 2, 9)] * 4), True, {"guesses": k})
                            for k in (0, 1, 4)])
        for sizes in part.sizes:
            many = sizes.get("least", 3)
            for quiet in True, False:
                part.compare(runs, [(drawn(part.rng, new=12, **sizes), quiet, {
                    "guesses": part.rng.randint(2, 5), "max_batch": many + 1,
                    "token_budget": part.rng.choice([6, 9, 4 * many])})])

    def test_ends(self, part):
        """A guess that is the end of text; the last positions of the model."""
        part.compare(runs, [(given(*[([1, 2, 3] * 2, 9, 0, 0, eos)] * 2, ([4, 5] * 10, 20)), True,
                             {}) for eos in range(13)])
