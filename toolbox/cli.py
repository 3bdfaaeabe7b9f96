"""
The command line, with the same flags for every script. A stage calls `main(generate, __doc__)`.

Exit status: 0 success, 1 a request is WRONG, 2 bad input (one line on stderr), 130 interrupted.
"""
import argparse
import copy
import inspect
import os
import platform
import sys
from contextlib import nullcontext
from dataclasses import replace

import torch

from beyond.fairness import POLICIES
from explorer import page
from explorer.recorder import record
from toolbox import plots
from toolbox.check import Check, summary
from toolbox.load import decode, load
from toolbox.progress import Progress
from toolbox.report import report, write_trace
from toolbox.tokenizer import use_chat_template
from toolbox.validate import at_least_1
from toolbox.workload import PROMPTS, make_requests, read_prompts

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
NUMBERS = {"max_batch": "the most requests that run at the same time (default: 8)",
           "token_budget": "the most tokens computed in a step (default: 64)",
           "max_kv_tokens": "cache entries reserved by all running requests together "
                            "(default: no limit)",
           "pages": "pages in the pool of the paged stage "
                    "(default: as many as the largest requests can fill)",
           "page_size": "tokens per page (default: 16)"}
KNOBS = (*NUMBERS, "policy", "share_prefixes", "pack", "attention", "use_cache")


class Help(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):
        return action.help if action.default in (None, False) else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    def __init__(self, **settings):
        super().__init__(**{"formatter_class": Help, "allow_abbrev": False, **settings})

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (--help lists the flags)\n")

    def run(self, command, argv=None):
        """Parses the flags. Returns the exit status of `command(args)`."""
        args = self.parse_args(argv)
        return guarded(self.prog, lambda: command(args))


def parser(doc):
    """doc: a script's docstring; the help shows its first paragraph and its next sentence."""
    first, second = (" ".join(paragraph.split()) for paragraph in doc.strip().split("\n\n")[:2])
    p = Parser(description=f"{first} {second.split('. ')[0].rstrip('.:')}.")

    what = p.add_argument_group("what to generate")
    what.add_argument("--model", default="builtin",
                      help="builtin, gpt2, gpt2-medium, gpt2-large, gpt2-xl, a local folder or "
                           "file, or owner/name on huggingface.co: GPT-2, Llama, Mistral, Qwen")
    what.add_argument("--chat", action="store_true",
                      help="put each prompt into the model's own chat template")
    what.add_argument("--prompt", action="append", help="a prompt; may be repeated")
    what.add_argument("--prompts", metavar="FILE",
                      help="a text file of prompts separated by blank lines, or a .jsonl file "
                           "whose lines have a prompt and optionally max_new_tokens, "
                           "temperature, top_k, seed, priority, arrival, name "
                           "(default: twelve built-in prompts)")
    what.add_argument("--max_new_tokens", type=int, default=64, metavar="N",
                      help="the most tokens to generate for a prompt")
    what.add_argument("--temperature", type=float, default=0.7, metavar="T",
                      help="0 takes the most likely token, above 0 samples")
    what.add_argument("--top_k", type=int, metavar="K",
                      help="sample from the K most likely tokens only (default: from all)")
    what.add_argument("--seed", type=int, default=0, metavar="N",
                      help="random seed of the first request; each further one adds 1")
    what.add_argument("--arrival_rate", type=float, metavar="R",
                      help="requests arrive at random, R per step (default: all at step 0)")

    add_knobs(p)

    where = p.add_argument_group("where")
    add_place(where)
    add_optimize(where)

    out = p.add_argument_group("what to show")
    out.add_argument("--plot", metavar="FILE.png",
                     help="draw this run: what was computed for each request at each step")
    out.add_argument("--page", metavar="FILE.html",
                     help="write a page in which to step through this run in a browser")
    out.add_argument("--trace", metavar="FILE.json",
                     help="write all forward passes and the time of every token")
    out.add_argument("--quiet", action="store_true",
                     help="no texts and no progress: report and check only")
    out.add_argument("--no_check", action="store_true",
                     help="do not compare with the unbatched run")
    return p


def add_knobs(parser):
    knobs = parser.add_argument_group("how to batch (changes when a token comes, never which)")
    for name, text in NUMBERS.items():
        knobs.add_argument(f"--{name}", type=int, metavar="N", help=text)
    knobs.add_argument("--policy", choices=tuple(POLICIES),
                       help="which waiting request goes first (default: fcfs)")
    knobs.add_argument("--share_prefixes", action="store_const", const=True,
                       help="share pages between requests that begin with the same tokens "
                            "(the default)")
    knobs.add_argument("--no_share_prefixes", dest="share_prefixes", action="store_const",
                       const=False, help="keep the pages of all requests apart")
    knobs.add_argument("--pack", choices=("batch", "dataset"),
                       help="prepacking: pack the prompts that were admitted, or let the packing "
                            "decide which to admit (default: batch)")
    knobs.add_argument("--attention", choices=("varlen", "mask"),
                       help="how the ragged stage keeps requests apart (default: varlen)")
    knobs.add_argument("--no_cache", dest="use_cache", action="store_const", const=False,
                       help="unbatched: compute everything again for each token")


def add_place(group):
    group.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto",
                       help="auto takes cuda or mps if available")
    group.add_argument("--dtype", choices=DTYPES, default="float32",
                       help="of weights and arithmetic")


def add_optimize(group):
    group.add_argument("--optimize", action="store_true",
                       help="use the fastest kernels available, model.optimize()")


def measuring_parser(prog, doc, quick, plot=True):
    """For a command that measures. quick: what its --quick does. plot: whether it can draw."""
    p = Parser(prog=prog, description=" ".join(doc.split("\n\n")[0].split()))
    p.add_argument("--quick", action="store_true", help=quick)
    add_place(p)
    p.add_argument("--json", metavar="FILE.json", help="write the figures")
    p.set_defaults(plot=None)
    if plot:
        p.add_argument("--plot", metavar="FILE.png", help="draw them")
    return p


def measuring_place(args):
    """
    (device, dtype, a text that says where it was measured) for a measuring command. Raises
    ValueError if there is no such device, or if the files cannot be written.
    """
    plots.check_path(args.json, "--json")
    plots.check_path(args.plot, "--plot", plots.SUFFIXES)
    device = device_of(args)
    name = f"{device}, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    where = f"{name}, torch {torch.__version__}, {args.dtype}, Python {platform.python_version()}"
    return device, DTYPES[args.dtype], where


def device_of(args):
    """The torch device for --device and --dtype. ValueError if it is not available."""
    mps = torch.backends.mps.is_available()
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
        if device == "mps" and args.dtype == "float64":
            print("an Apple GPU has no float64: running on the CPU")
            device = "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: there is no CUDA device here; use cpu or auto")
    if device == "mps" and not mps:
        raise ValueError("--device mps: there is no Apple GPU here; use cpu or auto")
    if device == "mps" and args.dtype == "float64":
        raise ValueError("--dtype float64: an Apple GPU has none, "
                         "use --device cpu or another --dtype")
    return torch.device(device)


def load_inputs(args):
    """
    (model, tokenizer, requests) for a stage. Bad flags are found here, before any work: ValueError.
    """
    device = device_of(args)
    plots.check_path(args.plot, "--plot", plots.SUFFIXES)
    plots.check_path(args.page, "--page", (".html",))
    plots.check_path(args.trace, "--trace")
    if args.prompt and args.prompts:
        raise ValueError("--prompt and --prompts: give one of the two")
    prompts = ([{"prompt": text} for text in args.prompt] if args.prompt
               else read_prompts(PROMPTS if args.prompts is None else args.prompts))
    model, tokenizer = load(args.model, DTYPES[args.dtype])
    if args.chat:
        use_chat_template(tokenizer)
    requests = make_requests(
        prompts, tokenizer, max_new_tokens=args.max_new_tokens, temperature=args.temperature,
        top_k=args.top_k, seed=args.seed, arrival_rate=args.arrival_rate)
    model.to(device)
    model(torch.zeros(1, 1, dtype=torch.long, device=device))   # warm-up: torch's own set-up
    return model, tokenizer, requests


def given_knobs(args):
    """{knob: value} for those that are set on the command line. ValueError for a bad number."""
    knobs = {knob: getattr(args, knob) for knob in KNOBS if getattr(args, knob) is not None}
    at_least_1(**{f"--{knob}": knobs[knob] for knob in NUMBERS if knob in knobs})
    return knobs


def knobs_of(generate, knobs):
    """The knobs that a stage has, as a dict, and the names of the others."""
    has = inspect.signature(generate).parameters
    mine = {name: value for name, value in knobs.items() if name in has}
    return mine, [name for name in knobs if name not in has]


def say_ignored(args, names, where):
    for name in names:
        flag = name if getattr(args, name) is not False else f"no_{name.removeprefix('use_')}"
        print(f"--{flag} has no meaning {where}: ignored")


def print_texts(requests, tokenizer):
    for request in requests:
        print(f"--- {request.name}: {len(request.prompt)} prompt tokens, "
              f"{len(request.generated)} generated, {request.finish_reason or 'unfinished'}")
        print(decode(tokenizer, request.prompt) + "▸" + decode(tokenizer, request.generated))
    print()


def guarded(prog, work, speaks=True):
    """
    Runs `work()`, which returns an exit status. Expected errors become one line on stderr.

    speaks: False for a rank of beyond.tensor_parallel that leaves the message to rank 0
    """
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
    except OSError as error:   # a full disk, say; or, without a word, `| head` has read enough
        if not isinstance(error, BrokenPipeError):
            print(f"{prog}: {error}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:   # it is stdout: what is left of it cannot be written
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def main(generate, doc, argv=None):
    """Runs a stage on the prompts, prints texts, report and check, and exits."""
    sys.exit(parser(doc).run(lambda args: run_stage(generate, args), argv))


def run_stage(generate, args, shard=None):
    """
    One stage on the prompts. Returns the exit status.

    shard: called with the model before it runs; the check still uses the whole model
    """
    knobs, ignored = knobs_of(generate, given_knobs(args))
    say_ignored(args, ignored, "for this stage")
    model, tokenizer, requests = load_inputs(args)
    plain, check = model, None
    if shard:
        model = shard(copy.deepcopy(model) if not args.no_check else model)
    if args.optimize:
        model = model.optimize()
    if not args.no_check:
        check = Check(plain, requests, exact=model if args.optimize and not shard else None)
    has = inspect.signature(generate).parameters
    budget = knobs.get("token_budget") or getattr(has.get("token_budget"), "default", None)
    shown = nullcontext() if args.quiet else Progress(model, requests, budget)
    try:
        with shown:
            trace = generate(model, requests, on_token=check and check.on_token, **knobs)
    except KeyboardInterrupt:
        finished = [request for request in requests if request.finished]
        print_texts(finished, tokenizer)
        print(f"{len(finished)} of {len(requests)} requests were finished")
        raise
    if not args.quiet:
        print_texts(requests, tokenizer)
    print(report(trace))
    if hasattr(model, "uses"):   # a snapshot
        print(model.uses())
    if "use_cache" in has and "use_cache" not in knobs:
        without = generate(model, [replace(request) for request in requests], use_cache=False)
        print("\nfor comparison,", report(without), end="\n\n")
    if args.trace:
        write_trace(trace, args.trace)
    if args.plot:
        plots.stage(trace, args.plot)
    if args.page:
        seen = record(generate, model, requests, trace, None if args.no_check else plain, **knobs)
        page.write(args.page, {trace.stage: seen}, tokenizer)
    if written := [file for file in (args.trace, args.plot, args.page) if file]:
        print("wrote", *written)
    if check is None:
        return 0
    verdicts = check()
    print(summary(verdicts))
    return int(any(v.verdict == "WRONG" for v in verdicts))
