"""
The command line, the same words on every script. A stage script calls `main(generate, __doc__)`.

Exit status: 0 all is well, 1 a request is WRONG, 2 bad input (one line on stderr), 130 interrupted.
"""
import argparse
import contextlib
import copy
import inspect
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path

import torch

from cache import PrefixCache
from scheduler import POLICIES
from toolbox import plots
from toolbox.check import Check, summary
from toolbox.load import decode, load
from toolbox.measure import forward_times
from toolbox.progress import Progress
from toolbox.report import report, write_trace
from toolbox.stages import knobs_of
from toolbox.workload import PROMPTS, make_requests, read_prompts

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KNOBS = ("max_batch", "token_budget", "max_kv_tokens", "policy", "admission", "page_size", "prefix_cache", "pack", "attention", "use_cache")
FLAGS = {"use_cache": "no_cache"}   # a knob whose flag has another name


class Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):
        return action.help if action.default in (None, False) else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n")


def parser(doc):
    """doc: a script's docstring; its first paragraph and the next sentence tell the idea."""
    first, second = (" ".join(paragraph.split()) for paragraph in doc.strip().split("\n\n")[:2])
    p = Parser(description=f"{first} {second.split('. ')[0].rstrip('.:')}.", formatter_class=Help, allow_abbrev=False)
    what = p.add_argument_group("what to generate")
    what.add_argument("--model", default="builtin", help="builtin, gpt2, gpt2-medium, gpt2-large, gpt2-xl, or a local folder or file")
    what.add_argument("--prompt", action="append", help="a prompt; may be repeated")
    what.add_argument("--prompts", metavar="FILE", help="a text file of prompts with blank lines between them, or a .jsonl file whose lines have prompt "
                      "and perhaps max_new_tokens, temperature, top_k, seed, priority, arrival, name (default: twelve built-in ones)")
    what.add_argument("--max_new_tokens", type=int, default=64, metavar="N", help="tokens to generate for each prompt at most")
    what.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0 takes the most likely token, above 0 samples")
    what.add_argument("--top_k", type=int, metavar="K", help="sample from the K most likely tokens only (default: from all)")
    what.add_argument("--seed", type=int, default=0, metavar="N", help="of the first request; the next ones count up")
    what.add_argument("--arrival_rate", type=float, metavar="R", help="requests come in at random, R a step (default: all at step 0)")
    knobs = p.add_argument_group("how to batch (changes when a token comes, never which)")
    knobs.add_argument("--max_batch", type=int, metavar="N", help="requests that run at the same time (default: 8)")
    knobs.add_argument("--token_budget", type=int, metavar="N", help="tokens computed in a step (default: 64)")
    knobs.add_argument("--max_kv_tokens", type=int, metavar="N", help="cache entries of all running requests together (default: no limit)")
    knobs.add_argument("--policy", choices=tuple(POLICIES), help="who of the waiting goes first (default: fcfs)")
    knobs.add_argument("--admission", choices=("reserve", "grow"), help="room for a whole answer at once, or page by page with preemption (default: reserve)")
    knobs.add_argument("--page_size", type=int, metavar="N", help="tokens in a page of cache (default: 16)")
    knobs.add_argument("--prefix_cache", action="store_const", const=True, help="reuse what prompts have in common")
    knobs.add_argument("--pack", choices=("batch", "dataset"), help="prepacking: pack who was admitted, or let the packing admit (default: batch)")
    knobs.add_argument("--attention", choices=("varlen", "mask"), help="how the ragged stage keeps requests apart (default: varlen)")
    knobs.add_argument("--no_cache", dest="use_cache", action="store_const", const=False, help="compute everything again for each token (unbatched)")
    where = p.add_argument_group("where")
    add_place(where)
    where.add_argument("--optimize", action="store_true", help="use the fastest kernels there are, model.optimize()")
    out = p.add_argument_group("what to show")
    out.add_argument("--plot", metavar="FILE.png", help="draw this run: who computed what at which step")
    out.add_argument("--trace", metavar="FILE.json", help="write every forward pass and every token's time")
    out.add_argument("--quiet", action="store_true", help="no texts and no progress: report and check only")
    out.add_argument("--no_check", action="store_true", help="do not compare with the unbatched run")
    return p


def add_place(group):
    group.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto", help="auto takes cuda or mps where there is one")
    group.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and arithmetic")


def measuring_parser(prog, doc, quick):
    """For a command that measures and keeps its figures. quick: what its --quick does."""
    p = Parser(prog=prog, description=" ".join(doc.split("\n\n")[0].split()), formatter_class=Help, allow_abbrev=False)
    p.add_argument("--quick", action="store_true", help=quick)
    add_place(p)
    p.add_argument("--json", metavar="FILE.json", help="write the figures")
    p.add_argument("--plot", metavar="FILE.png", help="draw them")
    return p


def measuring_place(args):
    """(device, dtype, a text that says where it was measured) for a measuring command, whose files can be written. ValueError otherwise."""
    if args.json:
        plots.check_path(args.json, "--json")
    if args.plot:
        plots.check_path(args.plot, "--plot", plots.SUFFIXES)
    device = place(args)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device}, {torch.get_num_threads()} threads"
    return device, DTYPES[args.dtype], f"{name}, torch {torch.__version__}, {args.dtype}, Python {platform.python_version()}"


def place(args):
    """The torch device for --device and --dtype. ValueError if there is no such device here."""
    mps = torch.backends.mps.is_available()
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
        if device == "mps" and args.dtype == "float64":
            print("an Apple GPU has no float64: running on the CPU")
            device = "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: there is no CUDA device here, allowed are cpu and auto")
    if device == "mps" and not mps:
        raise ValueError("--device mps: there is no Apple GPU here, allowed are cpu and auto")
    if device == "mps" and args.dtype == "float64":
        raise ValueError("--dtype float64: an Apple GPU has none, use --device cpu or another --dtype")
    return torch.device(device)


def prepare(args):
    """Everything that can be wrong with the flags is found out here, before any work. Returns (model, tokenizer, requests)."""
    device = place(args)
    if args.plot:
        plots.check_path(args.plot, "--plot", plots.SUFFIXES)
    if args.trace:
        plots.check_path(args.trace, "--trace")
    if args.prompt and args.prompts:
        raise ValueError("--prompt and --prompts: give one of the two")
    prompts = [{"prompt": text} for text in args.prompt] if args.prompt else read_prompts(args.prompts or PROMPTS)
    model, tokenizer = load(args.model)
    requests = make_requests(prompts, tokenizer, max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_k=args.top_k, seed=args.seed,
                             arrival_rate=args.arrival_rate)
    model.to(device, DTYPES[args.dtype])
    model(torch.zeros(1, 1, dtype=torch.long, device=device))   # the first call pays for torch's own set-up
    return model, tokenizer, requests


def given_knobs(args):
    return {knob: getattr(args, knob) for knob in KNOBS if getattr(args, knob) is not None}


def say_ignored(names, where):
    for name in names:
        print(f"--{FLAGS.get(name, name)} has no meaning {where}: ignored")


def show(requests, tokenizer):
    for request in requests:
        print(f"--- {request.name}: {len(request.prompt)} prompt tokens, {len(request.generated)} generated, {request.finish_reason or 'unfinished'}")
        print(decode(tokenizer, request.prompt) + "▸" + decode(tokenizer, request.generated))
    print()


def guarded(prog, work, speaks=True):
    """Runs `work()`, an exit status, and turns what may go wrong into one line; a rank that does not speak leaves it to another one."""
    for stream in sys.stdout, sys.stderr:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")   # a console without Unicode still gets its text
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def main(generate, doc, argv=None):
    """Runs a stage on the prompts, prints texts, report and check, and exits."""
    p = parser(doc)
    is_reference = "use_cache" in inspect.signature(generate).parameters
    if is_reference:
        p.add_argument("--rows", nargs="?", const="rows.png", metavar="FILE.png", help="instead: measure forward time against the number of rows, and draw it")
    args = p.parse_args(argv)
    work = (lambda: measure_rows(args)) if is_reference and args.rows else (lambda: run(generate, args))
    sys.exit(guarded(p.prog, work))


def run(generate, args, shard=None):
    """One stage on the prompts. shard: what to do to the model that it runs on, but not to the one that checks it."""
    parameters = inspect.signature(generate).parameters
    knobs, ignored = knobs_of(generate, given_knobs(args))
    say_ignored(ignored, "for this stage")
    model, tokenizer, requests = prepare(args)
    if "prefix_cache" in knobs:
        knobs["prefix_cache"] = PrefixCache(knobs.get("page_size", parameters["page_size"].default))
    check = None if args.no_check else Check(model, requests)
    if check and (shard or args.optimize):
        model = copy.deepcopy(model)   # what is changed now shall not check itself
    if shard is not None:
        model = shard(model)
    if args.optimize:
        model.optimize()
    budget = knobs.get("token_budget", parameters["token_budget"].default) if "token_budget" in parameters else None
    progress = contextlib.nullcontext() if args.quiet else Progress(model, requests, tokenizer, budget)
    try:
        with progress:
            trace = generate(model, requests, on_token=check and check.on_token, **knobs)
    except KeyboardInterrupt:
        finished = [request for request in requests if request.finished]
        show(finished, tokenizer)
        print(f"{len(finished)} of {len(requests)} requests were finished")
        raise
    if not args.quiet:
        show(requests, tokenizer)
    print(report(trace))
    if "use_cache" in parameters and "use_cache" not in knobs:
        without = generate(model, [replace(request) for request in requests], use_cache=False)
        print("\nfor comparison,", report(without), end="\n\n")
    if args.trace:
        write_trace(trace, args.trace)
    if args.plot:
        plots.stage(trace, args.plot)
    if check is None:
        return 0
    verdicts = check()
    print(summary(verdicts))
    return int(any(v.verdict == "WRONG" for v in verdicts))


def measure_rows(args):
    """Why one batches at all: a forward pass over n rows takes far less than n times as long as over one."""
    plots.check_path(args.rows, "--rows", plots.SUFFIXES)
    model, _ = load(args.model)
    model.to(place(args), DTYPES[args.dtype])
    points = forward_times(model)
    print("rows   ms per forward pass   ms per row")
    for n, seconds in points:
        print(f"{n:4}   {seconds * 1e3:19.2f}   {seconds / n * 1e3:10.3f}")
    plots.rows({f"{args.model}, {args.dtype}, {model.device}": points}, args.rows)
    print(f"drawn in {args.rows}")
    return 0


def compare(doc, argv=None):
    """Runs all stages on one workload and prints the ladder; returns the exit status."""
    from toolbox import ladder
    p = parser(doc)
    p.add_argument("--pictures", metavar="DIR", help="draw the README's pictures into this folder")
    p.add_argument("--repeats", type=int, default=3, help="runs of each stage, in turn; the median one counts")
    args = p.parse_args(argv)

    def work():
        if args.repeats < 1:
            raise ValueError(f"--repeats must be at least 1, not {args.repeats}")
        if args.pictures:
            try:
                Path(args.pictures).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"--pictures {args.pictures}: {error.strerror}") from None
            plots.check_path(Path(args.pictures) / "mask.png", "--pictures")
        plain, _, requests = prepare(args)
        model = copy.deepcopy(plain).optimize() if args.optimize else plain
        knobs = given_knobs(args)
        say_ignored([name for name in ("prefix_cache", "pack", "attention", "use_cache") if knobs.pop(name, None) is not None], "where all stages run")
        say_ignored([name for name in ("plot", "trace", "quiet") if getattr(args, name)], "where all stages run")
        print(f"{len(requests)} requests, {sum(len(r.prompt) for r in requests)} prompt tokens, {args.dtype} on {model.device}, "
              f"{torch.get_num_threads()} threads, torch {torch.__version__}")
        traces = ladder.run(model, requests, repeats=args.repeats, **knobs)
        print(ladder.table(traces))
        if args.pictures:
            ladder.pictures(model, Path(args.pictures), traces)
        if args.no_check:
            return 0
        wrong = ladder.wrong(model, plain, requests, **knobs)
        print("\n".join(wrong) or f"{len(traces)} stages: each of {len(requests)} requests identical to unbatched")
        return int(bool(wrong))

    return guarded(p.prog, work)
