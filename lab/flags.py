"""
Flags that several commands have, and what the values mean: how to batch, which device, which files.

Exit status of every command: 0 success, 1 a request is WRONG or the machine failed (a full disk, a
lost rank), 2 bad input (one line on stderr), 130 interrupted (one line; while torch is imported,
Python's own traceback).
"""
import argparse
import inspect
import math
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

import torch

import generate_naive
from paging import PagedScheduler
from toolbox.validate import one_line

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
NUMBERS = {"max_batch": "the most requests that run at once (default: 8)",
           "token_budget": "the most tokens computed in a step (default: 64)",
           "max_kv_tokens": "cache entries for all running requests (default: no limit)",
           "pages": "pages in the pool (default: enough for all that run at once)",
           "page_size": "tokens per page (default: 16)"}
ROOM = 4   # a script's memory, unless a flag says otherwise: so many whole contexts
LIMITS = {"max_batch": 12, "token_budget": 64, "page_size": 16}   # and its other limits
PICTURES = (".png", ".pdf", ".svg")
KNOBS = (*NUMBERS, "policy", "pack", "attention", "use_cache")


class Parser(argparse.ArgumentParser):
    """With an error of one line, and each default in the help."""

    def __init__(self, **settings):
        super().__init__(formatter_class=argparse.ArgumentDefaultsHelpFormatter,
                         allow_abbrev=False, **settings)

    def format_help(self):   # where nothing is the default, argparse would say so
        return re.sub(r"\s+\(default:\s+(None|False)\)", "", super().format_help())

    def error(self, message):
        self.exit(2, f"{self.prog}: {' '.join(message.split())} (--help lists the flags)\n")

    def run(self, command, argv=None):
        """Parses the flags. Returns the exit status of `command(args)`."""
        args = self.parse_args(argv)
        return guarded(self.prog, lambda: command(args))


def whole(text, least=1):
    """A flag's type: whole numbers of at least `least`."""
    if not text.removeprefix("-").isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, not {text}")
    return int(text)


def threads(text):
    """A flag's type: whole numbers from 1 to the number of the machine's cores."""
    if whole(text) > os.cpu_count():
        raise argparse.ArgumentTypeError(f"must be at most {os.cpu_count()}, the number of this "
                                         f"machine's cores, not {text}")
    return int(text)


def above_0(text):
    """A flag's type: finite numbers above 0."""
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be above 0, not {text}")


def bounds(text):
    """A flag's type: (low, high) of N or LOW:HIGH."""
    parts = text.split(":")
    numbers = [int(part) if part.isdecimal() else 0 for part in parts]   # 0 is refused
    low, high = numbers[0], numbers[-1]
    if len(parts) > 2 or not 0 < low <= high:
        raise argparse.ArgumentTypeError(f"{text}: use N or LOW:HIGH, whole numbers of at least 1")
    return low, high


def add_knobs(parser, generate=None, defaults={}):
    """
    The flags of how to batch. The help shows those that the stage `generate` has; None: all.

    defaults: those that are not a stage's own
    """
    group = parser.add_argument_group("how to batch (changes when a token comes, never which)")

    def add(knob, help, flag=None, **settings):
        if generate is not None and not has_knob(generate, knob):
            help = argparse.SUPPRESS
        group.add_argument(flag or f"--{knob}", dest=knob, help=help, **settings)

    for name, text in NUMBERS.items():
        if name in defaults:
            meaning, _, _ = text.partition(" (default")
            text = f"{meaning} (default: {defaults[name]})"
        add(name, text, type=whole, metavar="N")
    add("policy", "order of the queue: fcfs (default), sjf, priority", metavar="P",
        choices=("fcfs", "sjf", "priority"))
    add("pack", "batch: pack the prompts that were admitted (default); dataset: packing decides "
        "which to admit", metavar="WHAT", choices=("batch", "dataset"))
    add("attention", "varlen (default) or mask: how requests are kept apart", metavar="HOW",
        choices=("varlen", "mask"))
    add("use_cache", "compute everything again for each token", flag="--no_cache",
        action="store_const", const=False)


def add_place(group):
    group.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto",
                       metavar="NAME",
                       help="cpu, cuda, mps; auto: a GPU if there is one and the model not small")
    group.add_argument("--dtype", choices=DTYPES, default="float32", metavar="TYPE",
                       help="float64, float32, bfloat16, float16")


def add_threads(group):
    group.add_argument("--threads", type=threads, metavar="N",
                       help="CPU threads (default: 1 for a small model, else torch's)")


def add_optimize(group):
    group.add_argument("--optimize", action="store_true",
                       help="run the unedited model's computation as compiled code, on a CPU in "
                            "float32 (docs/kernels.md)")


def device_of(args, small=False):
    """
    The torch device for --device and --dtype. ValueError if there is none.

    small: whether the model is, which "auto" leaves on the CPU (lab/loading/load.py)
    """
    has_mps = torch.backends.mps.is_available() and args.dtype != "float64"
    available = {"cuda": torch.cuda.is_available(), "mps": has_mps, "cpu": True}
    if args.device == "auto":
        return torch.device(fastest(available, small))
    if not available[args.device]:
        raise ValueError(f"--device {args.device}: there is none that computes in {args.dtype}; "
                         "use cpu or auto")
    return torch.device(args.device)


def fastest(available, small):
    """For a small model the CPU, whose calls cost least."""
    if available["cuda"] and not small:
        return "cuda"
    if available["mps"] and not small:
        return "mps"
    return "cpu"


def given_knobs(args):
    """{knob: value} for those that are set on the command line."""
    return {knob: getattr(args, knob) for knob in KNOBS if getattr(args, knob) is not None}


def knobs_of(generate, knobs):
    """
    The knobs that a stage has, as a dict, and the names of the others. A policy becomes the
    `scheduler_class` that has it.
    """
    parameters = inspect.signature(generate).parameters
    own, others = {}, []
    for name, value in knobs.items():
        if name in parameters:
            own[name] = value
        elif name == "policy" and takes_policy(parameters):
            from beyond.fairness import SCHEDULERS  # only then is it needed
            own["scheduler_class"] = SCHEDULERS[value]
        else:
            others.append(name)
    return own, others


def takes_policy(parameters):
    """The schedulers that have a policy share prefixes, so paged, which does not, has none."""
    takes = parameters.get("scheduler_class")
    return takes is not None and takes.default != PagedScheduler


def has_knob(generate, knob):
    _, others = knobs_of(generate, {knob: "fcfs"})   # a value that every knob may have here
    return not others


def limited(generate, given, requests, context):
    """
    The knobs that a script gives to its stage: those that are `given`, and limits for the others.
    All stages get the same memory, ROOM whole contexts. One that cannot limit its memory runs as
    many of these requests at once as surely fit.
    """
    size = given.get("page_size", LIMITS["page_size"])
    room = given.get("max_kv_tokens") or size * given.get("pages", 0) or ROOM * context
    limits = LIMITS | {"max_kv_tokens": room, "pages": -(-room // size)}
    if not limits_memory(generate):
        rows = room // largest_row(generate, requests, room, context)
        limits["max_batch"] = min(limits["max_batch"], max(rows, 1))
    return knobs_of(generate, limits)[0] | knobs_of(generate, given)[0]


def largest_row(generate, requests, room, context):
    """
    The most cached tokens of a row that a stage without a limit on memory may have. Where a batch
    has one cache, its rows are as long as the longest prompt and the longest answer together.

    Requests that would not fit alone are left out: stages with a limit refuse them.
    """
    prompts = [0]
    answers = [0]
    capacities = [1]
    for request in requests:
        capacity = min(request.kv_capacity, context)
        if capacity <= room:
            prompts.append(len(request.prompt))
            answers.append(capacity - len(request.prompt))
            capacities.append(capacity)
    if is_naive(generate):
        return max(max(prompts) + max(answers), 1)
    return max(capacities)


def is_naive(generate):
    """Whether it is naive's `generate`; run as a script, that is another function of equal code."""
    function = inspect.unwrap(generate)
    return getattr(function, "__code__", None) == inspect.unwrap(generate_naive.generate).__code__


def script_defaults(generate=None):
    """What the help of a script says of these limits. None: of all stages together."""
    whole = f"for {ROOM} whole contexts"
    limits = LIMITS | {"max_kv_tokens": whole, "pages": whole}
    if generate is not None and not limits_memory(generate):
        limits["max_batch"] = f"as many as fit into {ROOM} whole contexts"
    return limits


def limits_memory(generate):
    return has_knob(generate, "max_kv_tokens") or has_knob(generate, "pages")


def first_paragraph(doc):
    """
    Of a docstring, for --help and a page: without the marks that only a document renders. `python
    -OO` has no docstrings: None.
    """
    text = (doc or "").strip().partition("\n\n")[0]
    return re.sub(r"\*(\w.*?)\*", r"\1", text, flags=re.DOTALL).replace("`", "")


def say_ignored(args, names, where):
    for name in names:
        flag = "no_cache" if name == "use_cache" else name
        print(f"--{flag} has no meaning {where}: ignored")


def check_path(path, flag, suffixes=None):
    """ValueError if a file cannot be written there: checked before the work. None: no file."""
    if path is None:
        return
    path = Path(path)
    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{flag} {path}: the name must end in {', '.join(suffixes)}")
    with one_line(f"{flag} {path}"):
        existed = path.exists()
        open(path, "ab").close()
        if not existed:
            path.unlink()


def check_different(**files):
    """ValueError if two flags name one file: what is written last would replace the other."""
    flag_of = {}
    for flag, path in files.items():
        if path is None:
            continue
        real = os.path.realpath(path)
        if real in flag_of:
            raise ValueError(f"--{flag_of[real]} and --{flag}: {path} is one file")
        flag_of[real] = flag


def guarded(prog, work, speaks=True):
    """
    Runs `work()`, which returns an exit status. Expected errors become one line on stderr.

    speaks: False for a rank of beyond.tensor_parallel that leaves the message to rank 0
    """
    open_streams()
    for stream in sys.stdout, sys.stderr:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")   # for consoles without Unicode
    try:
        return work()
    except ValueError as error:
        if speaks:
            print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:   # `| head` has read enough
        close_stdout()
        return 1
    except OSError as error:   # a full disk, say
        print(f"{prog}: {error}", file=sys.stderr)
        close_stdout()
        return 1
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"{prog}: not enough memory. {' '.join(str(error).split())}".rstrip(),
              file=sys.stderr)
        return 1


def is_out_of_memory(error):
    """Whether Python or torch could not allocate memory. For torch, a GPU's is a RuntimeError."""
    said = str(error).lower()
    return (isinstance(error, MemoryError) or "out of memory" in said
            or "can't allocate memory" in said)


def open_streams():
    """What is printed to a stream that the shell has closed (>&-) goes nowhere."""
    for name in "stdout", "stderr":
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))


def close_stdout():
    """If stdout itself failed, what is left of it goes nowhere; else Python would complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
