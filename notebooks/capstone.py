"""
The last notebook: a reader's functions take the places of the repository's own.

    judge(1, schedule, advance)    judges the functions of a step, each alone (assignments/)
    give_up(1)                     takes ours for those that are not right yet, and shows them
    race()                         the stage *prefix* with all of them, beside the stage as it is
"""
import inspect
import textwrap
from contextlib import ExitStack
from dataclasses import replace

from exercises import blank, limited
from lesson import STAGES, check, folded, letters, model, timelines, tokenizer

from functions import fault_of, placed
from lab.checks.check import Check, summary
from lab.checks.edits import function_named
from lab.experiments.stages import twelve
from lab.views.report import latencies
from toolbox.trace import observed

SCHEDULER, FLAT = "scheduler.py:Scheduler.", "generate_ragged.py:Flat."
PAGED, PREFIX = "paging.py:PagedScheduler.", "generate_prefix.py:PrefixScheduler."
STEPS = {   # the stage that serves with them: {function: (set of the course kit, what it replaces)}
    1: ("chunked", {"schedule": (3, f"{SCHEDULER}schedule"), "advance": (3, "request.py:advance")}),
    2: ("ragged, varlen", {
        name: (4, FLAT + name) for name in ("lay_out", "attend", "attend_varlen")}),
    3: ("paged", {"lay_out": (5, "generate_paged.py:Paged.lay_out")} | {
        name: (5, PAGED + name) for name in ("admit", "make_room", "preempt")}),
    4: ("prefix", {"free": (5, "generate_prefix.py:PrefixPool.free")} | {
        name: (5, PREFIX + name) for name in ("hash_of_page", "admit", "cache_filled")})}
BUILT = {}   # what it replaces: a function that is right


def judge(number, *functions):
    """Judges those functions of a step that are written, and keeps those that are right."""
    if number not in STEPS:
        return print("Say which step it is, 1 to 4: judge(1, schedule, advance)")
    stage, places = STEPS[number]
    for function in functions:
        name = function.__name__
        if name not in places:
            print(f"{name} is no function of step {number}, which has {', '.join(places)}.")
            continue
        kit, place = places[name]
        BUILT.pop(place, None)
        said = "still blank: replace ... by your code" if blank(function) else None
        if not said:
            with limited(10):
                fault = fault_of(kit, place, function, function.__code__.co_filename)
            said = f"not yet. {fault.rstrip('.')}." if fault else "right."
            if not fault:
                BUILT[place] = function
        print(f"{name}: {said}")
    if not (left := missing(number)):
        with mine(number):
            check(stage, letters(5, A=9, B=2, C=14, D=4), token_budget=8)
    elif not left[-1].startswith(f"step {number}: "):   # it is done, one before it is not
        print(f"{stage} waits for {'; '.join(left)}.")


def missing(number):
    """What is not right yet of a step and those before it: ["step 1: advance", ...]."""
    left = {step: [name for name, (_, place) in STEPS[step][1].items() if place not in BUILT]
            for step in range(1, number + 1)}
    return [f"step {step}: {', '.join(names)}" for step, names in left.items() if names]


def mine(number):
    """For a `with` block: the reader's functions up to this step take the places of ours."""
    stack = ExitStack()
    for step in range(1, number + 1):
        for _, place in STEPS[step][1].values():
            stack.enter_context(placed(place, BUILT[place]))
    return stack


def ours(place):
    """Our function, as a reader would write it."""
    source = textwrap.dedent(inspect.getsource(function_named(place)))
    owner = place.rpartition(":")[2].split(".")[0]
    return source.replace("super()", f"super({owner}, self)")


def give_up(number):
    """Takes our functions for those of a step that are not right yet, and shows them, folded."""
    if number not in STEPS:
        return print("There are steps 1 to 4.")
    for name, (_, place) in STEPS[number][1].items():
        if place not in BUILT:
            scope = dict(inspect.unwrap(function_named(place)).__globals__)
            exec(ours(place), scope)
            BUILT[place] = scope[name]
            print(f"{name}: ours, until yours is right.")
            with folded():
                print(ours(place).rstrip())


def race(max_batch=12, token_budget=64, pages=40, page_size=16):
    """Twelve prompts behind a common beginning: with the reader's functions, and without."""
    if missing(len(STEPS)):
        return print(f"The race needs {'; '.join(missing(len(STEPS)))}. Or give_up(number).")
    knobs = dict(max_batch=max_batch, token_budget=token_budget, pages=pages, page_size=page_size)
    requests, traces = twelve(tokenizer), []
    print(f"{'':8} tokens computed   passes   worst gap, steps   pages held   preemptions")
    for name, functions in ("yours", mine(len(STEPS))), ("prefix", ExitStack()):
        copies, held = [*map(replace, requests)], []
        verdicts = Check(model, copies)
        with functions, observed(model, lambda step, batch: held.append(len(
                {page for request, _ in batch.plan for page in request.block_table}))):
            trace = STAGES["prefix"](model, copies, on_token=verdicts.on_token, **knobs)
        traces.append(trace)
        print(f"{name:8}{sum(p.slots for p in trace.passes):16,}{len(trace.passes):9}"
              f"{max(latencies(trace)['itl_steps']):19}{max(held):13}"
              f"{trace.counts['preemptions']:14}   {summary(verdicts()).split(',')[0]}")
    timelines(traces, columns=1)
