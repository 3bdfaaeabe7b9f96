"""
The last notebook: a reader's functions take the places of the repository's own.

    judge(1, schedule, advance)    judges the functions of a step, each alone (assignments/)
    give_up(1)                     takes ours for those that are not right yet, and shows them
    race()                         the stage *prefix* with all of them, beside the stage as it is
"""
import functools
import inspect
import textwrap
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from exercises import limited, unfinished
from lesson import STAGES, check, folded, letters, model, timelines, tokenizer

from functions import fault_of, placed, prints_held
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
METHODS = [name for _, places in STEPS.values() for name in places if name != "advance"]
# Two steps ask for functions of the same name. By what they use, one can tell them apart:
LATER = {"lay_out": (3, {"lay_out", "query_start_loc", "seq_lens", "block_table", "slot_mapping"}),
         "admit": (4, {"hash_of_page", "find", "share"})}
BUILT = {}   # what it replaces: a function that is right
OURS = set()   # of these, those that give_up has taken from us


def judge(number, *functions):
    """Judges those functions of a step that are written, and keeps those that are right."""
    if number not in STEPS:
        return print("Say which step it is, 1 to 4: judge(1, schedule, advance)")
    if not functions:
        print(f"Hand in the functions of step {number}: {as_called(number)}")
    for function in functions:
        name = getattr(function, "__name__", str(function))
        if name not in STEPS[number][1]:
            print(f"{name} is no function of step {number}, which has {names_of(number)}.")
        else:
            print(f"{name}: {verdict(number, function)}")
    serve(number, always=not functions)


def names_of(number):
    return ", ".join(STEPS[number][1])


def as_called(number):
    return f"judge({number}, {names_of(number)})"


def verdict(number, function):
    """What to say of a function of a step. It is kept if it is right, and given up if it is not."""
    name = function.__name__
    _, place = STEPS[number][1][name]
    meant = step_meant(name, function)
    if meant is not None and meant > number:
        return (f"this is step {meant}'s, which is judged by {as_called(meant)}. For step "
                f"{number}'s, run the cell of step {number} again.")
    fault = fault_in(number, function, meant)
    if not fault:
        BUILT[place] = function
        OURS.discard(place)
        return "right."
    if place in OURS:
        return f"{fault}\nOurs serves until yours is right."
    BUILT.pop(place, None)   # a function that was right and is broken now does not count
    return fault


def fault_in(number, function, meant):
    """What is wrong with a function of a step, in words; None if it is right."""
    if still := unfinished(function):
        return f"{still}, then run the cell."
    name = function.__name__
    kit, place = STEPS[number][1][name]
    fault = fault_of(kit, place, function, function.__code__.co_filename, around(function))
    if fault is None:
        return None
    if "raises RecursionError" in fault:
        step_2 = " Step 2's is Flat.lay_out(self, device)." if name == "lay_out" else ""
        fault = f"{name} calls itself without end.{step_2} {fault}"
    if meant is not None and meant < number:
        fault += f"\nIt looks like step {meant}'s {name}: have you run this step's cell?"
    return f"not yet. {fault}"


def step_meant(name, function):
    """The step that a function seems to be written for; None if its name is in one step only."""
    if name not in LATER:
        return None
    later, signs = LATER[name]
    if signs & names_in(function.__code__):
        return later
    return next(number for number, (_, places) in STEPS.items() if name in places)


def names_in(code):
    """The names of globals and attributes that a function's code uses."""
    names = {*code.co_names}
    for constant in code.co_consts:
        if inspect.iscode(constant):   # a function, or a comprehension, inside it
            names |= names_in(constant)
    return names


def serve(number, always=False):
    """
    A step's stage serves four requests with the reader's functions, or it is said what it waits
    for: if the step itself is done, or `always`.
    """
    stage, _ = STEPS[number]
    left = missing(number)
    if not left:
        with mine(number):
            check(stage, letters(5, A=9, B=2, C=14, D=4), token_budget=8)
    elif always or not left[-1].startswith(f"step {number}: "):
        print(f"{stage} waits for {'; '.join(left)}.")


@contextmanager
def around(function):
    """How a function is judged: it may compute for 10 seconds, and its calls are as_methods."""
    with as_methods(function), limited(10):
        yield


@contextmanager
def as_methods(*functions):
    """
    For the `with` block, a cell's functions may call one another as the functions that they are:
    `hash_of_page(self, request, i)` is `self.hash_of_page(request, i)`, whosever that is.
    """
    kept = []   # (globals of a cell, name, the function)
    for function in functions:
        cell = function.__globals__
        for name in METHODS:
            if inspect.isfunction(cell.get(name)):
                kept.append((cell, name, cell[name]))
                cell[name] = method_named(name)
    try:
        yield
    finally:
        for cell, name, function in reversed(kept):
            cell[name] = function


def method_named(name):
    """A function that calls the method of this name of its first argument."""
    def call(self, *given, **named):
        return getattr(self, name)(*given, **named)
    return call


def missing(number):
    """What is not right yet of a step and those before it: ["step 1: advance", ...]."""
    left = {step: [name for name, (_, place) in STEPS[step][1].items() if place not in BUILT]
            for step in range(1, number + 1)}
    return [f"step {step}: {', '.join(names)}" for step, names in left.items() if names]


def mine(number):
    """For a `with` block: the reader's functions up to this step take the places of ours."""
    stack = ExitStack()
    places = [place for step in range(1, number + 1) for _, place in STEPS[step][1].values()]
    stack.enter_context(as_methods(*(BUILT[place] for place in places)))
    for place in places:
        stack.enter_context(placed(place, quiet(BUILT[place])))
    return stack


def quiet(function):
    """A function that computes the same, and whose prints are not shown."""
    @functools.wraps(function)
    def call(*given, **named):
        with prints_held():
            return function(*given, **named)
    return call


def ours(place):
    """Our function, as a reader would write it."""
    source = textwrap.dedent(inspect.getsource(function_named(place)))
    owner = place.rpartition(":")[2].split(".")[0]
    return source.replace("super()", f"super({owner}, self)")


def give_up(number):
    """Takes our functions for those of a step that are not right yet, and shows them, folded."""
    if number not in STEPS:
        return print("There are steps 1 to 4.")
    _, places = STEPS[number]
    wanting = [name for name, (_, place) in places.items() if place not in BUILT]
    if not wanting:
        print(f"Step {number} has all its functions: nothing to give up.")
    if len(wanting) == len(places):
        print(f"Nothing of step {number} is right yet, so all of it is ours now.")
    for name in wanting:
        _, place = places[name]
        take_ours(name, place)
        print(f"{name}: ours, until yours is right.")
        with folded():
            print(ours(place).rstrip())
    serve(number, always=True)


def take_ours(name, place):
    scope = dict(inspect.unwrap(function_named(place)).__globals__)
    exec(ours(place), scope)
    BUILT[place] = scope[name]
    OURS.add(place)


def race(max_batch=12, token_budget=64, pages=40, page_size=16):
    """Twelve prompts behind a common beginning: with the reader's functions, and without."""
    if missing(len(STEPS)):
        return print(f"The race needs {'; '.join(missing(len(STEPS)))}. Or give_up(number).")
    knobs = dict(max_batch=max_batch, token_budget=token_budget, pages=pages, page_size=page_size)
    print(f"{'':8} tokens computed   passes   worst gap, steps   pages held   preemptions")
    requests = twelve(tokenizer)
    with mine(len(STEPS)):
        yours = lap("yours", requests, knobs)
    timelines([yours, lap("prefix", requests, knobs)], columns=1)


def lap(name, requests, knobs):
    """Runs the stage *prefix* as it is now, and prints a line of the race. Returns the trace."""
    copies = [replace(request) for request in requests]
    verdicts = Check(model, copies)
    held = []   # of each pass, how many pages its requests hold

    def count_pages(step, batch):
        pages = set()
        for request, _ in batch.plan:
            pages.update(request.block_table)
        held.append(len(pages))

    with observed(model, count_pages):
        trace = STAGES["prefix"](model, copies, on_token=verdicts.on_token, **knobs)
    trace.stage = name   # the title of its picture
    print(f"{name:8}{sum(p.slots for p in trace.passes):16,}{len(trace.passes):9}"
          f"{max(latencies(trace)['itl_steps']):19}{max(held):13}"
          f"{trace.counts['preemptions']:14}   {summary(verdicts()).split(',')[0]}")
    return trace
