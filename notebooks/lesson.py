"""
What the notebooks share: import it first, since it also finds the repository's modules.

    source(function)                          prints a short function
    ask("1.2: How many ...?", guess=...)      compares a guess with what answers.py computes
    with folded(): ...                        hides its output behind a line to click
    with broken("published mask"): ...        inserts a known bug, and removes it again
    @exercise                                 tries a reader's function inside the real stages
    run, look, check                          run a stage: its trace, what tokens see, is it right?
    show({title: look(...)}), show(run(...))   draw what tokens see; step through a run, in a page

The model is the built-in one. Prompts are words where text helps, and letters where only lengths
matter: `letters(A=4, B=2)` are two requests with prompts of 4 and 2 arbitrary tokens.
"""
import ast
import dis
import inspect
import io
import os
import subprocess
import sys
import textwrap
from base64 import b64encode
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from html import escape
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))   # the repository's modules
from unittest.mock import patch

import torch

from answers import ANSWERS
from beyond.fairness import SCHEDULERS
from generate_dynamic import Rectangle
from generate_naive import StaticBatch
from generate_prepacked import first_fit_decreasing
from generate_ragged import Flat
from model import Head
from paging import PagedScheduler
from request import Request
from explorer import page
from views import sights
from checks.check import Check, summary
from checks.judge import faults
from loading.load import load
from views.plots import pyplot
from explorer.recorder import record
from loading.stages import STAGES
from toolbox.trace import Trace
from checks.traps import broken, swapped
from checks.xray import sights_at


torch.set_num_threads(1)   # a model this small gains nothing from more
model, tokenizer = load("builtin")
MOST_LINES = 12
FIGURES = {"bbox_inches": "tight", "dpi": 88}   # 770 pixels fit beside a cell's number
if "inline" in pyplot().get_backend():
    from matplotlib_inline.config import InlineBackend
    InlineBackend.instance().print_figure_kwargs = FIGURES


# --- to show -------------------------------------------------------------------------------------

def source(function):
    """Prints a function as it stands in its file, without its docstring. At most 12 lines."""
    text = textwrap.dedent(inspect.getsource(function))
    definition = ast.parse(text).body[0]
    lines = text.splitlines()
    if ast.get_docstring(definition):
        docstring = definition.body[0]
        del lines[docstring.lineno - 1:docstring.end_lineno]
    if len(lines) > MOST_LINES:
        raise ValueError(f"{function.__qualname__} has {len(lines)} lines, too many to show at "
                         f"once: at most {MOST_LINES}")
    print(f"# {function.__module__}.py")
    print("\n".join(lines))


@contextmanager
def folded():
    """Stores what is printed and drawn inside it behind a line to click: it holds an answer."""
    from IPython.display import display
    with redirect_stdout(io.StringIO()) as printed:
        yield
    text, png = printed.getvalue(), io.BytesIO()
    html = f"<pre>{escape(text)}</pre>"
    if pyplot().get_fignums():
        pyplot().savefig(png, format="png", **FIGURES)
        pyplot().close()
        data = b64encode(png.getvalue()).decode()
        html += f'<img alt="figure" src="data:image/png;base64,{data}">'
    html = f"<details><summary>Unfold, once you have answered</summary>{html}</details>"
    display({"text/html": html, "text/plain": text}, raw=True)


def letters(new=4, arrivals=None, **lengths):
    """
    Requests named by letters, with prompts of these lengths.

    new:      tokens to generate; or {name: number}
    arrivals: {name: step}, 0 for the others
    """
    new = new if isinstance(new, dict) else dict.fromkeys(lengths, new)
    return [Request([(7 * i + 3 * j * j + j) % 1000 for j in range(length)], new[name], name=name,
                    arrival=(arrivals or {}).get(name, 0))
            for i, (name, length) in enumerate(lengths.items())]


def texts(*prompts, new=8, temperature=0.0):
    """Requests A, B, ... from texts. They end with <|endoftext|>, or after `new` tokens."""
    return [Request(tokenizer.encode(text), new, temperature, name=chr(65 + i), seed=i,
                    eos_token=tokenizer.eot_token) for i, text in enumerate(prompts)]


def sizes(requests):
    """Prints a line for each request."""
    for request in requests:
        print(f"{request.name}: a prompt of {len(request.prompt):2} tokens, "
              f"{request.max_new_tokens:2} to generate, arrives at step {request.arrival}")


def word(request, position):
    """A token as text, for the axes of a picture; ␣ is a space."""
    return tokenizer.decode([request.tokens[position]]).replace(" ", "␣").replace("\n", "⏎")


def run(stage, requests, **knobs):
    """
    Runs a stage on copies of `requests`. Returns its trace; trace.requests are the copies. It is
    recorded as well, while a bug that was put in is still there, so that show(trace) can draw it.
    """
    return record(STAGES[stage], model, requests, reference=model, **knobs)


def look(stage, requests, step, number=0, **knobs):
    """What a forward pass of that step really saw, a Sight. number: 1 for its second pass."""
    return sights_at(STAGES[stage], model, requests, step, **knobs)[number]


def show(seen, label=None):
    """
    Draws what each token sees: show({title: Sight, ...}), side by side. label=word: as text.
    Of a run, show(trace) is a page to step through; show({title: trace, ...}) compares two.
    """
    runs = {seen.stage: seen} if isinstance(seen, Trace) else seen
    if all(isinstance(trace, Trace) for trace in runs.values()):
        return page.Inline(runs, tokenizer)
    return sights.draw(seen, label=label)


def copies_of(requests):
    """The same requests, not yet run."""
    return [replace(request) for request in requests]


def checked(stage, requests, **knobs):
    """Runs a stage on these very requests. Returns the Check that listened; call it to judge."""
    listener = Check(model, requests)
    STAGES[stage](model, requests, on_token=listener.on_token, **knobs)
    return listener


def check(stage, requests, **knobs):
    """Runs a stage and compares each request with the same request alone."""
    first, *wrong = summary(checked(stage, copies_of(requests), **knobs)()).splitlines()
    print(f"{stage}: {first.split(', max')[0]}", *wrong, sep="\n  ")


def torchrun(ranks, script, *flags):
    """What a script prints on several processes of this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",   # a port of its own
               "--nproc_per_node", str(ranks), script, *flags]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True, check=True).stdout


def survivors(trap, stage, requests, **knobs):
    """The names of the requests that pass the check in spite of a bug: "A, C"."""
    with broken(trap, show=False):
        judge = checked(stage, copies_of(requests), **knobs)
    return ", ".join(v.name for v in judge() if v.verdict != "WRONG")


# --- to predict ----------------------------------------------------------------------------------

def ask(question, guess=...):
    """
    Prints the question, "1.2: How many ...?". Once `...` is replaced by a guess, compares it with
    the answer in answers.py, and gives the reason.
    """
    print(f"Question {question}")
    if guess is ...:
        print("Replace ... by your answer, then run the cell.")
        return
    answer, why = ANSWERS[question.partition(":")[0]]
    cells = inspect.currentframe().f_back.f_globals
    right = answer(SimpleNamespace(**{**cells, **globals()}))
    print("Right." if same(guess, right) else f"You say {guess}.", f"It is {right}. {why}")


def same(guess, right):
    """Equal; numbers with a fraction need only be close, and names come in any order."""
    if isinstance(right, (int, float)):
        try:
            guess = float(str(guess).replace(",", ""))
        except ValueError:
            return False
        return abs(guess - right) <= (0.02 * abs(right) if isinstance(right, float) else 0)
    if isinstance(right, list):
        return isinstance(guess, (list, tuple)) and len(guess) == len(right) and all(
            map(same, guess, right))
    return names_in(guess) == names_in(right)


def names_in(value):
    """The words of "A, C" or ["A", "C"], sorted."""
    text = " ".join(map(str, value)) if isinstance(value, (list, tuple, set)) else str(value)
    return sorted(text.lower().replace(",", " ").split())


# --- to write ------------------------------------------------------------------------------------

def exercise(function):
    """
    Judges a function of a notebook's reader, in a sentence. It is put into the repository's own
    code, and a stage runs with it. Silent as long as the body is `...`.
    """
    if not is_blank(function):
        try:
            fault = globals()[f"judge_{function.__name__}"](function)
        except Exception as error:   # of the reader's function, whatever it is
            fault = f"it raises {type(error).__name__}: {error}"
        print(f"{function.__name__}: " + (f"not yet. {fault}" if fault else "right."))
    return function


def is_blank(function):
    """Whether there is nothing in it but a docstring and `...`."""
    def steps(function):
        return [(step.opname, step.argval) for step in dis.get_instructions(function)]

    return steps(function) == steps(lambda: None)


def first_fault(stage, requests, **knobs):
    """None, or the first thing that goes wrong in a run, in a sentence."""
    return next((sentence for _, sentence in
                 faults(STAGES[stage], model, copies_of(requests), **knobs)), None)


def is_tensor(value, shape, of, dtype=torch.bool):
    """None, or what is wrong with a returned value."""
    if not isinstance(value, torch.Tensor):
        return f"{of} it returns {type(value).__name__}, not a tensor"
    if tuple(value.shape) != shape:
        return f"{of} it returns shape {tuple(value.shape)}, not {shape}"
    if value.dtype != dtype:
        return f"{of} it returns {value.dtype}, not {dtype}"


def judge_causal_rule(function):
    for T, S in (3, 3), (1, 5), (3, 7):
        if fault := is_tensor(function(T, S), (T, S), f"for T = {T}, S = {S}"):
            return fault
    with swapped(Head.forward, [(
            "torch.ones(T, S, dtype=torch.bool, device=q.device).tril(diagonal=S - T)",
            "causal_rule_of_reader(T, S)")], causal_rule_of_reader=function):
        return first_fault("chunked", letters(A=7, B=3), token_budget=4)


def judge_own_positions(function):
    columns, pads = torch.arange(4), torch.tensor([0, 3, 1])
    if fault := is_tensor(function(columns, pads), (3, 4), "for 4 columns and 3 rows", torch.long):
        return fault
    with swapped(StaticBatch.lay_out, [("columns[self.start:] - self.pads[:, None]",
                                        "positions_of_reader(columns[self.start:], self.pads)")],
                 positions_of_reader=lambda *arguments: function(*arguments).clone()):
        return first_fault("naive", letters(A=3, B=7, C=1))


def judge_row_mask(function):
    for arguments in (4, 1, 4, 8), (0, 8, 4, 8), (2, 3, 4, 3):
        words = "for start, n, P, T = {}, {}, {}, {}".format(*arguments)
        if fault := is_tensor(function(*arguments), (arguments[2] + arguments[3],), words):
            return fault
    with swapped(Rectangle.lay_out, [
            ("mask[b, ..., P - start:P] = True", "mask[b] = mask_of_reader(start, n, P, T)"),
            ("mask[b, ..., P + T - n:] = True", "pass")], mask_of_reader=function):
        return first_fault("interleaved", letters(A=4, B=2, C=1, D=11), token_budget=8)


def judge_varlen(function):
    calls = []

    def head(q, k, v):
        calls.append(q.size(-2) * k.size(-2))
        return Head()(q, k, v)

    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 40, 4, generator=g) for _ in "qkv")
    caches = [(k[:, a:b], v[:, a:b]) for a, b in ((0, 10), (10, 40))]
    if fault := is_tensor(function(q, caches, [0, 10, 40], head), (2, 40, 4),
                          "for 40 tokens, 2 heads and 4 features", torch.float):
        return fault
    if sum(calls) != 1000:
        return f"for cu_seqlens [0, 10, 40] it computes {sum(calls):,} scores, not 1,000"

    def attend(batch, layer, q, k, v):
        batch.write(layer, k, v)
        caches = [batch.read(layer, i) for i in range(len(batch.plan))]
        return function(q, caches, batch.cu_seqlens, Head())

    with patch.object(Flat, "attend", attend):
        return first_fault("ragged, varlen", letters(A=4, B=2, C=1, D=11), token_budget=8)


class Stuck(Exception):
    """A run that does not end."""


def judge_victim(function):
    """Runs a workload without enough memory, and looks at each preemption."""
    requests = [replace(request, priority=priority, arrival=arrival) for request, priority, arrival
                in zip(letters(B=4, F=5, A=4, D=6, C=4, E=5, new=14),
                       (1, 0, 2, 1, 2, 2), (0, 0, 1, 1, 2, 2))]
    faults, calls = [], 0

    def chosen(running, rank):
        nonlocal calls
        calls += 1
        if calls > 200:
            raise Stuck("it preempts forever: the requests that it chooses make no progress")
        victim, right = function(sorted(running, key=lambda request: request.prompt)), max(
            running, key=rank)
        if victim not in running:
            raise Stuck(f"for {', '.join(r.name for r in running)} it returns {victim!r:.40}, "
                        "which is not one of them")
        if victim is not right:
            names = [f"{r.name} (priority {r.priority}, arrival {r.arrival})" for r in
                     (victim, right)]
            faults.append("it preempts {} while {} runs".format(*names))
        return victim

    try:
        with swapped(PagedScheduler.schedule, [(
                "self.running[-1]", "victim_of_reader(self.running, self.rank.get)")],
                victim_of_reader=chosen):
            fault = first_fault("paged", requests, pages=12, page_size=4,
                                policy=SCHEDULERS["priority"])
    except Stuck as stuck:
        fault = str(stuck)
    return next(iter(faults), fault)


def judge_useless(function):
    lengths = function()
    if not isinstance(lengths, list) or not all(type(n) is int and n > 0 for n in lengths):
        return "it must return a list of whole numbers above 0"
    if len(lengths) != 8 or len(set(lengths)) != 8:
        return f"it returns {len(set(lengths))} different lengths, not 8"
    for row in first_fit_decreasing(lengths, max(lengths)):
        if len(row) > 1:
            return f"prompts of {' and '.join(str(lengths[i]) for i in row)} tokens share a row"
