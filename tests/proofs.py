"""What proves the answers of the notebooks' questions and knobs, in a notebook (questions.toml)."""
import io
import re
from contextlib import redirect_stdout

import capstone
import lesson
import torch

from generate_paged import Paged
from lab.checks.check import run_checked
from lab.checks.ties import run_alone
from paging import PagePool


def survivors(trap, stage, requests, **knobs):
    """The names of the requests that pass the check in spite of a bug: "A, C"."""
    with lesson.broken(trap, show=False), redirect_stdout(io.StringIO()) as said:
        lesson.check(stage, requests, **knobs)
    return ", ".join(r.name for r in requests
                     if f"WRONG: request {r.name!r}" not in said.getvalue())


def wrong_tokens(trap, stage, requests):
    """How many tokens have other logits with a bug than the model gives after those before them."""
    with lesson.broken(trap, show=False):
        _, check = run_checked(lesson.generate_of(stage), lesson.model, requests)
    wrong = 0
    for request, steps in check.told.items():
        alone = run_alone(lesson.model, request.prompt, request.generated)
        wrong += sum(not torch.allclose(logits, right, atol=1e-3)
                     for (_, logits), right in zip(steps, alone.float()))
    return wrong


def later_and_other(trap, stage, requests, name, **knobs):
    """How many tokens of a request come later with a bug than without, and how many are others."""
    with lesson.broken(trap, show=False):
        with_bug = request_of(lesson.run(stage, requests, **knobs), name)
    without = request_of(lesson.run(stage, requests, **knobs), name)
    later = sum(a > b for a, b in zip(with_bug.token_steps, without.token_steps))
    other = sum(a != b for a, b in zip(with_bug.generated, without.generated))
    return [later, other]


def request_of(trace, name):
    return next(request for request in trace.requests if request.name == name)


def total(trace, what):
    return len(trace.passes) if what == "passes" else sum(getattr(p, what) for p in trace.passes)


def first_token(trace, name):
    """The step of a request's first token."""
    return next(r.token_steps[0] for r in trace.requests if r.name == name)


def slot_of(position, table, page_size):
    """Where the layout puts a token of that position."""
    [request] = lesson.letters(R=position + 1)
    request.computed, request.block_table = position, table
    return Paged([(request, 1)], None, PagePool(max(table) + 1, page_size)).slot_mapping.item()


def steps(trace):
    return trace.passes[-1].step + 1


def preempted(trace):
    return trace.counts["preemptions"]


def preemption(trace, name):
    """[the first step without this request, how many tokens it computes when it returns]"""
    tokens_in = {p.step: n for p in trace.passes for who, _, n in p.work if who == name}
    left = next(step for step in range(steps(trace)) if step not in tokens_in)
    return [left, next(n for step, n in tokens_in.items() if step > left)]


def raced(**knobs):
    """[tokens computed, passes, ...], which the last notebook's race prints of both engines."""
    with redirect_stdout(io.StringIO()) as said:
        capstone.race(**knobs)
    yours, prefix = ([int(n.replace(",", "")) for n in re.findall(r"[\d,]+", line)]
                     for line in said.getvalue().splitlines()[1:3])
    assert yours == prefix
    return prefix
