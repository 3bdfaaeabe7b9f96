"""
What the notebooks share.

    ask("1.2: How many ...?", guess=...)       judges a guess by questions.toml (answers.py)
    with folded(): ...                         hides its output behind a line to click
    with broken("published mask"): ...         inserts a known bug, and removes it again
    run, run_all, look, check                  run a stage: its trace, what tokens see, is it right?
    show({title: look(...)})                   draw what tokens see

Prompts are words where text helps, and letters where only lengths matter: `letters(A=4, B=2)` are
two requests with prompts of 4 and 2 arbitrary tokens. A stage is a name, or a function of your own.
"""
import inspect
import io
import sys
import textwrap
from argparse import Namespace
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))   # the repository's modules
import torch
from IPython import get_ipython
from IPython.core.pylabtools import print_figure
from IPython.display import display
from matplotlib.patches import Patch
from answers import NO_POWER, QUESTIONS, ask  # noqa: F401
from matplotlib_inline.config import InlineBackend

from lab.checks.check import Check, summary
from lab.checks.toy import letters
from lab.checks.traps import broken  # noqa: F401
from lab.checks.xray import sights_at
from lab.experiments.figures import CYCLE, gaps, lines, packing, pool  # noqa: F401 (notebooks)
from lab.experiments.memory import filling_pool  # noqa: F401
from lab.experiments.rows import curves, measure_rows
from lab.experiments.results import load as results  # noqa: F401
from lab.loading.load import load, set_threads
from lab.loading.stages import STAGES
from request import Request
from lab.flags import knobs_of
from lab.simulate.calculated import figures, simulate  # noqa: F401
from lab.simulate.hardware import GPUS, MODELS
from lab.views.plots import INK, LINE, box, pyplot, timelines  # noqa: F401
from lab.views.sights import draw as show  # noqa: F401

PEAK, BANDWIDTH = 312e12, 2039e9   # of an A100: operations/s in fp16, bytes/s
PARAMETERS = 6.6e9                 # of Llama 2 7B: those that a pass reads and multiplies by
model, tokenizer = load("builtin")
set_threads(model)
FIGURES = {"bbox_inches": "tight", "dpi": 88}   # 770 pixels fit beside a cell's number
pyplot()   # gives all figures the repository's style


def explained(shell, kind, error, traceback, tb_offset=None):
    """Shows an error of a cell. If it is one that beginners make, it says what to do, too."""
    shell.showtraceback((kind, error, traceback), tb_offset=tb_offset)
    if isinstance(error, NameError):
        print(undefined(error.name))
    if isinstance(error, SyntaxError) and "leading zeros" in str(error):
        print("Write a number without commas: 1234, or 1_234.")
    if isinstance(error, TypeError) and "for ^:" in str(error):
        print(NO_POWER)


def undefined(name):
    """What to do about a name that is not defined: it lacks quotes, or stands in a cell above."""
    if {*name} <= {*"ABCDEFGH"} or name == "none":
        return 'Letters, and "none", need quotes: guess="X Y".'
    return (f"Is {name!r} defined in a cell above? Run that one first, or all of them: "
            "Run > Run All Above Selected Cell.")


# --- to show -------------------------------------------------------------------------------------

def source(function):
    """Prints a function as it stands in its file."""
    file = function.__module__.replace(".", "/")
    print(f"# {file}.py\n{textwrap.dedent(inspect.getsource(function)).rstrip()}")


@contextmanager
def folded():
    """Stores what is printed and drawn inside it behind a line to click: it holds an answer."""
    with redirect_stdout(io.StringIO()) as printed:
        yield
    text = printed.getvalue()
    html = f"<pre>{escape(text)}</pre>"
    if pyplot().get_fignums():
        data = print_figure(pyplot().gcf(), base64=True, **FIGURES)
        html += f'<img alt="figure" src="data:image/png;base64,{data}">'
        pyplot().close()
    html = f"<details><summary>Unfold, once you have answered</summary>{html}</details>"
    display({"text/html": html, "text/plain": text}, raw=True)


def bars(names, parts, label, beside=False):
    """A bar for each name. parts: {what: a value for each name}, in one bar or `beside` another."""
    row_height = 0.8 if beside else 0.4   # inches
    figure, ax = pyplot().subplots(figsize=(8, 0.8 + row_height * len(names)))
    draw = bars_beside if beside else bars_in_one
    draw(ax, range(len(names)), parts)
    ax.set_xlabel(label)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)   # the first name is at the top
    figure.legend(loc="upper center", ncols=len(parts), fontsize=9)


def bars_beside(ax, rows, parts):
    """A bar for each part, with its value."""
    height = 0.8 / len(parts)
    for i, (what, values) in enumerate(parts.items()):
        offset = (i - (len(parts) - 1) / 2) * height   # from the middle of the row
        places = [row + offset for row in rows]
        patches = ax.barh(places, values, height, color=CYCLE[i], label=what)
        ax.bar_label(patches, fmt="{:,.0f}", padding=3, fontsize=9)


def bars_in_one(ax, rows, parts):
    """One bar, in which each part begins where the one before it ends."""
    ends = [0] * len(rows)
    for i, (what, values) in enumerate(parts.items()):
        ax.barh(rows, values, 0.8, ends, color=CYCLE[i], label=what)
        ends = [end + value for end, value in zip(ends, values)]


def queues(states):
    """
    A pool at several moments: its block tables, and its free queue, the next page first.

    states: {title: {name of a row: [(page, whether it can be found), ...]}}
    """
    figure, axes = pyplot().subplots(1, len(states), figsize=(8.75, 1.9))
    found, other = dict(facecolor="#CCBB44", ink="black"), dict(facecolor="none", ink=INK)
    for ax, (title, rows) in zip(axes, states.items()):
        for y, (name, pages) in enumerate(rows.items()):
            ax.text(0, 2 * y - 0.2, name, va="bottom", fontsize=9)
            for x, (page, can_be_found) in enumerate(pages):
                box(ax, x, 2 * y, page, **(found if can_be_found else other))
        ax.set_title(title, fontsize=10, loc="left", x=0)
        ax.set(xlim=(0, 7), ylim=(3.2, -0.9))
        ax.axis("off")
    handles = [Patch(facecolor=look["facecolor"], edgecolor=LINE, label=name) for name, look in (
        ("a page that can be found by its hash", found), ("a page that cannot", other))]
    figure.legend(handles=handles, loc="lower center", ncols=2, fontsize=9)
    figure.tight_layout(rect=(0, 0.1, 1, 1))


def eight_requests():
    """Short and long prompts and answers; the longest prompt arrives late."""
    answers = dict(A=9, B=4, C=14, D=6, E=7, F=5, G=8, H=5)
    arrivals = dict(F=3, G=5, H=6)
    return letters(A=4, B=9, C=3, D=12, E=5, F=40, G=6, H=3, arrivals=arrivals, new=answers)


def texts(*prompts, new=8, temperature=0.0):
    """Requests A, B, ... from texts. They end with <|endoftext|>, or after `new` tokens."""
    requests = []
    for i, text in enumerate(prompts):
        requests.append(Request(tokenizer.encode(text), new, temperature, name=chr(65 + i),
                                seed=i, eos_token=tokenizer.eot_token))
    return requests


def sizes(requests):
    """Prints a line for each request."""
    for request in requests:
        print(f"{request.name}: a prompt of {len(request.prompt):2} tokens, "
              f"{request.max_new_tokens:2} to generate, arrives at step {request.arrival}")


def word(request, position):
    """A token as text, for the axes of a picture; ␣ is a space."""
    text = tokenizer.decode([request.tokens[position]])
    return text.replace(" ", "␣").replace("\n", "⏎")


# --- to run --------------------------------------------------------------------------------------

def generate_of(stage):
    """A stage's function, by its name; a function stays what it is."""
    if callable(stage) or stage in STAGES:
        return STAGES.get(stage, stage)
    raise ValueError(f"there is no stage {stage!r}, only {', '.join(map(repr, STAGES))}")


def run(stage, requests, **knobs):
    """A stage's trace, with copies of `requests`."""
    return generate_of(stage)(model, [replace(request) for request in requests], **knobs)


def run_all(stages, requests, **knobs):
    """{stage: its trace}; a stage takes those of the knobs that it has."""
    traces = {}
    for name in stages:
        its_knobs, _ = knobs_of(generate_of(name), knobs)
        traces[name] = run(name, requests, **its_knobs)
    return traces


def cost_of_rows():
    """
    {model: [(rows, ms), ...]} of a forward pass: ours on this machine now, GPT-2 as measured on two
    cores, and Llama 2 7B on an A100 as notebook 6 calculates it.
    """
    flags = Namespace(model="builtin", quick=False)
    here = measure_rows(flags, model.device, torch.float32)
    calculated = []
    for rows, _ in here["points"]:
        reading = 2 * PARAMETERS / BANDWIDTH            # seconds; two bytes a weight
        computing = 2 * PARAMETERS * rows / PEAK        # two operations a weight and row
        calculated.append((rows, 1e3 * max(reading, computing)))
    return curves(here, results("rows")) | {"Llama 2 7B on an A100, calculated": calculated}


def on_a100(stage, requests, **knobs):
    """A stage's run of Llama 2 7B on an A100, calculated, with those knobs that it has."""
    generate = generate_of(stage)
    its_knobs, _ = knobs_of(generate, knobs)
    copies = [replace(request) for request in requests]
    return simulate(MODELS["llama-2-7b"], GPUS["a100"], generate, copies, **its_knobs)


def counts(traces, **columns):
    """Prints a table of sums over the passes of each trace. columns: {title: name of a count}"""
    print(f"{'':20}  passes" + "".join(f"{title.replace('_', ' '):>13}" for title in columns))
    for name, trace in traces.items():
        line = f"{name:20}{len(trace.passes):8}"
        for count in columns.values():
            total = sum(getattr(p, count) for p in trace.passes)
            line += f"{total:13,}"
        print(line)


def look(stage, requests, step, number=0, **knobs):
    """What a forward pass of that step really saw, a Sight. number: 1 for its second pass."""
    return sights_at(generate_of(stage), model, requests, step, **knobs)[number]


def check(stage, requests, **knobs):
    """
    Runs a stage, and compares each request with the same request alone. Prints a line for all, and
    one for each request that is WRONG.
    """
    copies = [replace(request) for request in requests]
    check = Check(model, copies)
    generate_of(stage)(model, copies, on_token=check.on_token, **knobs)
    first, *wrong = summary(check()).splitlines()
    name = stage if isinstance(stage, str) else stage.__name__
    print(f"{name}: {first.split(', max')[0]}", *wrong, sep="\n  ")


if shell := get_ipython():
    shell.set_custom_exc((NameError, SyntaxError, TypeError), explained)
    InlineBackend.instance().print_figure_kwargs = FIGURES
