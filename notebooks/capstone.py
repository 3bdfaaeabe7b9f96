"""
The last notebook's judge of steps, and its race. The engine's loop is in assignments/engine.py.

A step that is right is kept; the next ones run with it.
"""
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

from exercises import blank, said_by
from lesson import STAGES, model, timelines, tokenizer

from lab.checks.check import Check, summary
from assignments import engine
from assignments.engine import Memory, serve  # noqa: F401 (for the notebook)
from lab.experiments.ladder import twelve
from lab.views.report import latencies
from toolbox.trace import observed

TRIALS = {1: engine.schedules, 2: engine.streams, 3: engine.memories, 4: engine.prefixes}
BUILT = {}   # step -> {name: the reader's function}, once it is right


def judge(number, *functions):
    """Judges the functions of a step, and keeps them if they are right."""
    BUILT.pop(number, None)
    earlier = [step for step in range(1, number) if step not in BUILT]
    if any(map(blank, functions)):
        print(f"Step {number}: replace ... by your code, then run the cell.")
    elif earlier:
        print(f"Step {number} needs step {earlier[0]}: get that one right first, or run its cell.")
    else:
        mine = {function.__name__: function for function in functions}
        parts = {k: f for step in range(1, number) for k, f in BUILT[step].items()} | mine
        yours = SimpleNamespace(**{name: engine.returning(f) for name, f in parts.items()})

        def trial():
            with engine.limited(5 if number == 1 else 60):
                return next(TRIALS[number](yours, model), None)
        fault = said_by(trial, *parts.values())
        if not fault:
            BUILT[number] = mine
        said = f"not yet. {fault.rstrip('.')}." if fault else "right."
        print(f"Step {number}: {said}")


def race(max_batch=12, token_budget=64, pages=40, page_size=16):
    """The twelve prompts behind a common beginning: the reader's engine, and the stage *prefix*."""
    if missing := [step for step in TRIALS if step not in BUILT]:
        return print(f"The race needs step {missing[0]}.")
    yours = SimpleNamespace(**{k: f for step in sorted(BUILT) for k, f in BUILT[step].items()})
    requests, knobs = twelve(tokenizer), dict(
        max_batch=max_batch, token_budget=token_budget, pages=pages, page_size=page_size)
    traces = []
    print(f"{'':8} tokens computed   passes   worst gap, steps   pages held   preemptions")
    for name, generate in ("yours", partial(serve, yours)), ("prefix", STAGES["prefix"]):
        copies, held = [*map(replace, requests)], []
        check = Check(model, copies)
        with observed(model, lambda step, batch: held.append(len(
                {page for request, _ in batch.plan for page in request.block_table}))):
            trace = generate(model, copies, on_token=check.on_token, **knobs)
        traces.append(trace)
        verdicts = check()
        print(f"{name:8}{sum(p.slots for p in trace.passes):16,}{len(trace.passes):9}"
              f"{max(latencies(trace)['itl_steps']):19}{max(held):13}"
              f"{trace.counts['preemptions']:14}   {summary(verdicts).split(',')[0]}")
        if wrong := [verdict.name for verdict in verdicts if verdict.verdict == "WRONG"]:
            print(f"{', '.join(wrong)} got wrong tokens, and no judge of a step has seen why. "
                  "Which rule of a step does your code break?")
    timelines(traces, columns=1)
