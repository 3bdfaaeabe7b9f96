"""
The command line of a stage, with the same flags for every script: `main(generate, __doc__)`.

lab/flags.py lists the exit statuses.
"""
import copy
import os
import sys
from contextlib import nullcontext

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
    sys.exit(parser(doc, generate).run(lambda args: run_stage(generate, args), argv))


def run_stage(generate, args, shard=None):
    """
    One stage on the prompts. Returns the exit status.

    shard: called with the model before it runs; the check still uses the whole model
    """
    given = flags.given_knobs(args)
    _, ignored = flags.knobs_of(generate, given)
    given = {name: value for name, value in given.items() if name not in ignored}
    plain, tokenizer, requests = load_inputs(args)
    knobs = flags.limited(generate, given, plain.config.block_size)
    model = plain
    if shard:
        model = shard(plain if args.no_check else copy.deepcopy(plain))
    if args.optimize:
        from lab.compiled import optimize  # only then is it needed
        model = optimize(model)
    check = None
    if not args.no_check:
        check = Check(plain, requests, exact=model if args.optimize and not shard else None)

    try:
        with nullcontext() if args.quiet else progress(model, requests, knobs.get("token_budget")):
            trace = generate(model, requests, on_token=check and check.on_token, **knobs)
    except KeyboardInterrupt:   # what is finished is not lost
        finished = [request for request in requests if request.finished]
        print_texts(finished, tokenizer)
        print(f"{len(finished)} of {len(requests)} requests were finished")
        raise
    verdicts = check() if check else []
    if not args.quiet:
        shown = requests if args.texts else requests[:SHOWN]
        if args.model == "builtin":
            print("The built-in model is a workload: its answers, after the ▸, are fluent\n"
                  "nonsense, and its seconds go into calls. Compare stages by passes and slots.")
        print_texts(shown, tokenizer)
        if more := len(requests) - len(shown):
            print(f"--- and {more} more: --texts prints them")
        print()
    print(report(trace))
    print(f"  {'limits':15} {limits(knobs)}")
    if hasattr(model, "uses"):   # a snapshot
        print(model.uses())
    stage = trace.stage.split(",")[0]   # "ragged, mask" is of the script ragged
    if stage in SCRIPTS and not shard and not args.quiet:
        print("\n" + stage_table(stage, requests, plain.config, given), end="\n\n")
    if args.trace:
        write_trace(trace, args.trace)
    if args.plot:
        plots.timelines([trace], args.plot, columns=1)
    if args.page:   # recording runs the stage again
        from lab.explorer import page
        from lab.explorer.recorder import record, take_times
        recorded = record(generate, model, requests, None if args.no_check else plain, **knobs)
        if "scheduler" in knobs:   # the page names the policy
            recorded.recording.knobs["policy"] = args.policy
        page.write(args.page, page.data_of({trace.stage: take_times(recorded, trace)}, tokenizer))
    for path, how in (args.trace, "JSON"), (args.plot, "a picture"), (args.page, "for a browser"):
        if path:
            print(f"wrote {path}, {how}")
    flags.say_ignored(args, ignored, "for this stage")   # where it is seen
    if check:
        print(coloured(summary(verdicts)))
    if not args.quiet:
        offers = [] if args.page else ["--page run.html steps through this run"]
        offers += [] if args.plot else ["--plot run.png draws it"]
        offers += ["--help lists the rest"]
        print(f"Next: {', '.join(offers)}; no batching knob changes a token")
    return int(any(v.verdict == "WRONG" for v in verdicts))


def limits(knobs):
    """The limits of a run, as a line of its report."""
    numbers = [f"{name} {knobs[name]:,}" for name in flags.NUMBERS if name in knobs]
    return ", ".join(numbers) or "one request at a time"


def coloured(text):
    """On a terminal, WRONG in red and near-ties in yellow. See no-color.org."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return text.replace("WRONG", "\x1b[1;31mWRONG\x1b[0m").replace(
        "near-tie", "\x1b[33mnear-tie\x1b[0m")


def print_texts(requests, tokenizer):
    for request in requests:
        print(f"--- {request.name}: {len(request.prompt)} prompt tokens, "
              f"{len(request.generated)} generated, {request.finish_reason}")
        print(tokenizer.decode(request.prompt) + "▸" + tokenizer.decode(request.generated))


def load_inputs(args):
    """
    (model, tokenizer, requests) for a stage. Bad flags are found here, before any work: ValueError.
    """
    flags.device_of(args)
    flags.check_path(args.plot, "--plot", flags.PICTURES)
    flags.check_path(args.page, "--page", (".html",))
    flags.check_path(args.trace, "--trace")
    if args.prompt and args.prompts:
        raise ValueError("--prompt and --prompts: give one of the two")
    prompts = ([{"prompt": text} for text in args.prompt] if args.prompt
               else builtin_prompts() if args.prompts is None else read_prompts(args.prompts))
    model, tokenizer = load(args.model, flags.DTYPES[args.dtype])
    requests = make_requests(
        prompts, tokenizer, args.arrival_rate, args.chat, model.config,
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_k=args.top_k,
        top_p=args.top_p, seed=args.seed)
    model.to(flags.device_of(args, is_small(model)))
    set_threads(model, args.threads)
    model(torch.zeros(1, 1, dtype=torch.long, device=model.device))   # warm-up: torch's own set-up
    return model, tokenizer, requests


def parser(doc, generate=None):
    """
    doc: a script's docstring; the help shows its first paragraph.
    generate: the help shows the flags of this stage; None: those of all. Others are "ignored".
    """
    p = flags.Parser(usage="%(prog)s [flags]", description=doc.strip().split("\n\n")[0],
                     add_help=False)
    what = p.add_argument_group("what to generate")
    what.add_argument("--prompt", action="append", metavar="TEXT",
                      help="a prompt; may be repeated (default: 12 built-in ones)")
    what.add_argument("--prompts", metavar="FILE",
                      help=".txt: prompts with blank lines between them; .jsonl: one per line, "
                           f"with {', '.join(KEYS)}")
    what.add_argument("--max_new_tokens", type=int, default=128, metavar="N",
                      help="the most tokens to generate for a prompt")
    what.add_argument("--temperature", type=float, default=0.7, metavar="T",
                      help="0: the most likely token; above: sampled")
    what.add_argument("--model", default="builtin", metavar="NAME",
                      help="builtin, gpt2 (0.5 GB to download), a folder or file, or owner/name on "
                           "huggingface.co: GPT-2, Llama, Mistral, Qwen")
    what.add_argument("--chat", action="store_true",
                      help="put each prompt into the model's chat template")
    what.add_argument("--top_k", type=int, metavar="K",
                      help="sample from the K most likely tokens (default: all)")
    what.add_argument("--top_p", type=float, default=1.0, metavar="P",
                      help="sample from the top P of probability")
    what.add_argument("--seed", type=int, default=0, metavar="N",
                      help="the first request's; each further one adds 1")
    what.add_argument("--arrival_rate", type=float, metavar="R",
                      help="requests that arrive per step (default: all at step 0)")

    flags.add_knobs(p, generate, flags.script_defaults(generate))

    out = p.add_argument_group("what to show")
    out.add_argument("--texts", action="store_true", help=f"all texts, not only {SHOWN}")
    out.add_argument("--plot", metavar="FILE.png",
                     help="draw what was computed for each request at each step")
    out.add_argument("--page", metavar="FILE.html",
                     help="write a page in which to step through this run")
    out.add_argument("--trace", metavar="FILE.json", help="write all passes and token times")
    out.add_argument("--quiet", action="store_true", help="no texts and no progress")
    out.add_argument("--no_check", action="store_true",
                     help="do not compare with each request alone")
    out.add_argument("-h", "--help", action="help", help="show this help and exit")

    where = p.add_argument_group("where")
    flags.add_place(where)
    flags.add_threads(where)
    flags.add_optimize(where)
    return p
