"""
The command line of a stage, with the same flags for every script: `main(generate, __doc__)`.

lab/flags.py lists the exit statuses.
"""
import copy
import os
import sys
from contextlib import nullcontext
from functools import partial

import torch

from lab import flags
from lab.checks.check import Check, summary
from lab.loading.load import is_small, load, set_threads
from lab.loading.stages import SCRIPTS
from lab.loading.workload import KEYS, builtin_prompts, make_requests, read_prompts
from lab.views import plots
from lab.views.progress import progress
from lab.views.report import report, write_trace
from lab.views.stage_table import stage_table

SHOWN = 3   # texts, unless all are asked for


def main(generate, doc, argv=None):
    """Runs a stage on the prompts, prints check, report and texts, and exits."""
    command = partial(run_stage, generate)
    sys.exit(parser(doc, generate).run(command, argv))


def run_stage(generate, args, shard=None):
    """
    One stage on the prompts. Returns the exit status.

    shard: called with the model before it runs; the check still uses the whole model
    """
    chosen, ignored = chosen_knobs(generate, args)
    plain, tokenizer, requests = load_inputs(args)
    knobs = flags.limited(generate, chosen, requests, plain.config.block_size)
    model = model_to_run(plain, args, shard)
    check = None if args.no_check else check_of(plain, model, requests, args, shard)
    trace = serve(generate, model, requests, tokenizer, args, check, knobs)
    verdicts = check() if check else []
    if not args.quiet:
        show_texts(requests, tokenizer, args)
    show_report(trace, model, knobs)
    stage = trace.stage.split(",")[0]   # "ragged, mask" is of the script ragged
    if stage in SCRIPTS and not shard and not args.quiet:
        print("\n" + stage_table(stage, requests, plain.config, chosen), end="\n\n")
    write_files(trace, args)
    if args.page:
        recorded = record_again(generate, model, requests, trace, None if check is None else plain,
                                knobs, chosen.get("policy"))
        write_page(recorded, tokenizer, args.page)
    flags.say_ignored(args, ignored, "for this stage")   # at the end, where it is seen
    if check:
        print(coloured(summary(verdicts)))
    if not args.quiet:
        print(offers(args))
    return int(any(v.verdict == "WRONG" for v in verdicts))


# --- the run --------------------------------------------------------------------------------------

def chosen_knobs(generate, args):
    """({knob: value} that the command line sets, names of those that the stage does not have)"""
    on_command_line = flags.given_knobs(args)
    _, ignored = flags.knobs_of(generate, on_command_line)
    chosen = {name: value for name, value in on_command_line.items() if name not in ignored}
    return chosen, ignored


def model_to_run(plain, args, shard):
    """A rank's part of the model, or its compiled snapshot, or the model itself."""
    model = plain
    if shard:
        model = shard(plain if args.no_check else copy.deepcopy(plain))
    if args.optimize:
        from lab.compiled import optimize  # only then is it needed
        model = optimize(model)
    return model


def check_of(plain, model, requests, args, shard):
    """A compiled step is compared bit for bit with itself alone; a rank has only a part of it."""
    exact = model if args.optimize and not shard else None
    return Check(plain, requests, exact=exact)


def serve(generate, model, requests, tokenizer, args, check, knobs):
    """Runs the stage, and returns its trace. Interrupted, it prints what is finished."""
    on_token = check.on_token if check else None
    shown = nullcontext() if args.quiet else progress(model, requests, knobs.get("token_budget"))
    try:
        with shown:
            return generate(model, requests, on_token=on_token, **knobs)
    except KeyboardInterrupt:
        finished = [request for request in requests if request.finished]
        print_texts(finished, tokenizer)
        print(f"{len(finished)} of {len(requests)} requests were finished")
        raise


# --- what is shown --------------------------------------------------------------------------------

def show_texts(requests, tokenizer, args):
    if args.model == "builtin":
        print("The built-in model is a workload: its answers, after the ▸, are fluent\n"
              "nonsense, and its seconds go into calls. Compare stages by passes and slots.")
    shown = requests if args.texts else requests[:SHOWN]
    print_texts(shown, tokenizer)
    more = len(requests) - len(shown)
    if more:
        print(f"--- and {more} more: --texts prints them")
    print()


def show_report(trace, model, knobs):
    print(report(trace))
    print(f"  {'limits':15} {limits(knobs)}")
    if hasattr(model, "uses"):   # a snapshot
        print(model.uses())


def write_files(trace, args):
    if args.trace:
        write_trace(trace, args.trace)
        print(f"wrote {args.trace}, JSON")
    if args.plot:
        plots.timelines([trace], args.plot, columns=1)
        print(f"wrote {args.plot}, a picture")


def record_again(generate, model, requests, trace, reference, knobs, policy):
    """The run once more, for a page, which shows each slot; with the times of the first."""
    from lab.explorer.recorder import record, take_times  # only then is it needed
    recorded = take_times(record(generate, model, requests, reference, **knobs), trace)
    if policy:   # the page names it
        recorded.recording.knobs["policy"] = policy
    return recorded


def write_page(recorded, tokenizer, path):
    from lab.explorer import page  # only then is it needed
    page.write(path, page.data_of({recorded.stage: recorded}, tokenizer))
    print(f"wrote {path}, for a browser")


def offers(args):
    """What a reader may do next."""
    flags_to_try = []
    if not args.page:
        flags_to_try.append("--page run.html")
    if not args.plot:
        flags_to_try.append("--plot run.png")
    flags_to_try.append("--help")
    return f"Next: {', '.join(flags_to_try)}; no batching knob changes a token"


def limits(knobs):
    """The limits of a run, as a line of its report."""
    numbers = [f"{name} {knobs[name]:,}" for name in flags.NUMBERS if name in knobs]
    return ", ".join(numbers) or "one request at a time"


def coloured(text):
    """On a terminal, WRONG in red and near-ties in yellow. See no-color.org."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    text = text.replace("WRONG", "\x1b[1;31mWRONG\x1b[0m")
    return text.replace("near-tie", "\x1b[33mnear-tie\x1b[0m")


def print_texts(requests, tokenizer):
    for request in requests:
        print(f"--- {request.name}: {len(request.prompt)} prompt tokens, "
              f"{len(request.generated)} generated, {request.finish_reason}")
        print(tokenizer.decode(request.prompt) + "▸" + tokenizer.decode(request.generated))


# --- inputs ---------------------------------------------------------------------------------------

def load_inputs(args):
    """
    (model, tokenizer, requests) for a stage. Bad flags are found here, before any work: ValueError.
    """
    flags.device_of(args)
    flags.check_path(args.plot, "--plot", flags.PICTURES)
    flags.check_path(args.page, "--page", (".html",))
    flags.check_path(args.trace, "--trace")
    flags.check_different(prompts=args.prompts, plot=args.plot, page=args.page, trace=args.trace)
    prompts = prompts_of(args)
    model, tokenizer = load(args.model, flags.DTYPES[args.dtype])
    requests = make_requests(
        prompts, tokenizer, args.arrival_rate, args.chat, model.config,
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_k=args.top_k,
        top_p=args.top_p, seed=args.seed)
    model.to(flags.device_of(args, is_small(model)))
    set_threads(model, args.threads)
    model(torch.zeros(1, 1, dtype=torch.long, device=model.device))   # warm-up: torch's own set-up
    return model, tokenizer, requests


def prompts_of(args):
    if args.prompt and args.prompts:
        raise ValueError("--prompt and --prompts: give one of the two")
    if args.prompt:
        return [{"prompt": text} for text in args.prompt]
    if args.prompts is None:
        return builtin_prompts()
    return read_prompts(args.prompts)


# --- flags ----------------------------------------------------------------------------------------

def parser(doc, generate=None):
    """
    doc: a script's docstring; the help shows its first paragraph.
    generate: the help shows the flags of this stage; None: those of all. Others are "ignored".
    """
    p = flags.Parser(usage="%(prog)s [flags]", description=flags.first_paragraph(doc),
                     add_help=False)
    add_inputs(p.add_argument_group("what to generate"))
    flags.add_knobs(p, generate, flags.script_defaults(generate))
    add_outputs(p.add_argument_group("what to show"))
    where = p.add_argument_group("where")
    flags.add_place(where)
    flags.add_threads(where)
    flags.add_optimize(where)
    return p


def add_inputs(group):
    add = group.add_argument
    add("--prompt", action="append", metavar="TEXT",
        help="a prompt; may be repeated (default: 12 built-in ones)")
    add("--prompts", metavar="FILE",
        help=".txt: prompts with blank lines between them; .jsonl: one per line, "
             f"with {', '.join(KEYS)}")
    add("--max_new_tokens", type=int, default=128, metavar="N",
        help="the most tokens to generate for a prompt")
    add("--temperature", type=float, default=0.7, metavar="T",
        help="0: the most likely token; above: sampled")
    add("--model", default="builtin", metavar="NAME",
        help="builtin, gpt2 (0.5 GB to download), a folder or file, or owner/name on "
             "huggingface.co: GPT-2, Llama, Mistral, Qwen")
    add("--chat", action="store_true", help="put each prompt into the model's chat template")
    add("--top_k", type=int, metavar="K",
        help="sample from the K most likely tokens (default: all)")
    add("--top_p", type=float, default=1.0, metavar="P",
        help="sample from the top P of probability")
    add("--seed", type=int, default=0, metavar="N",
        help="the first request's; each further one adds 1")
    add("--arrival_rate", type=float, metavar="R",
        help="requests that arrive per step (default: all at step 0)")


def add_outputs(group):
    add = group.add_argument
    add("--texts", action="store_true", help=f"all texts, not only {SHOWN}")
    add("--plot", metavar="FILE.png", help="draw what was computed for each request at each step")
    add("--page", metavar="FILE.html", help="write a page in which to step through this run")
    add("--trace", metavar="FILE.json", help="write all passes and token times")
    add("--quiet", action="store_true", help="no texts and no progress")
    add("--no_check", action="store_true", help="do not compare with each request alone")
    add("-h", "--help", action="help", help="show this help and exit")
