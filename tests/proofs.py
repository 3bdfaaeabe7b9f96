"""What proves the answers of the notebooks' questions and knobs, in a notebook (questions.toml)."""
import io
from contextlib import redirect_stdout

import lesson


def survivors(trap, stage, requests, **knobs):
    """The names of the requests that pass the check in spite of a bug: "A, C"."""
    with lesson.broken(trap, show=False), redirect_stdout(io.StringIO()) as said:
        lesson.check(stage, requests, **knobs)
    return ", ".join(r.name for r in requests
                     if f"WRONG: request {r.name!r}" not in said.getvalue())


def total(trace, what):
    return len(trace.passes) if what == "passes" else sum(getattr(p, what) for p in trace.passes)


def first_token(trace, name):
    """The step of a request's first token."""
    return next(r.token_steps[0] for r in trace.requests if r.name == name)


def steps(trace):
    return trace.passes[-1].step + 1


def preempted(trace):
    return trace.counts["preemptions"]
