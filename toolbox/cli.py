"""The command line, the same for every stage: `main(generate, __doc__)`."""
import argparse
import inspect
import sys

import torch

from scheduler import Request
from toolbox.check import Check, summary
from toolbox.load import load
from toolbox.report import report
from toolbox.tokenizer import BUILTIN

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KNOBS = ("max_batch", "token_budget", "max_kv_tokens", "attention", "use_cache")


def parse(doc, argv=None):
    lines = doc.strip().splitlines()
    parser = argparse.ArgumentParser(description=lines[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    what = parser.add_argument_group("what to generate")
    what.add_argument("--model", default="builtin", help="builtin, gpt2, gpt2-medium, gpt2-large, gpt2-xl, or a local folder or file")
    what.add_argument("--prompt", action="append", help="a prompt; may be repeated")
    what.add_argument("--prompts", default=str(BUILTIN / "prompts.txt"), help="a text file of prompts, with blank lines between them")
    what.add_argument("--max_new_tokens", type=int, default=64, help="tokens to generate for each prompt at most")
    what.add_argument("--temperature", type=float, default=0.7, help="0 takes the most likely token, above 0 samples")
    what.add_argument("--top_k", type=int, default=None, help="sample from the k most likely tokens only")
    what.add_argument("--seed", type=int, default=0, help="of the first request; the next ones count up")
    knobs = parser.add_argument_group("how to batch")
    knobs.add_argument("--max_batch", type=int, default=None, help="requests that run at the same time")
    knobs.add_argument("--token_budget", type=int, default=None, help="tokens computed in a step")
    knobs.add_argument("--max_kv_tokens", type=int, default=None, help="cache entries of all running requests together")
    knobs.add_argument("--attention", choices=("varlen", "mask"), default=None, help="how the ragged stage keeps requests apart")
    knobs.add_argument("--no_cache", dest="use_cache", action="store_const", const=False, default=None, help="recompute everything (unbatched)")
    where = parser.add_argument_group("where and how")
    where.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    where.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and arithmetic")
    where.add_argument("--no_check", action="store_true", help="do not compare with the unbatched run")
    return parser, parser.parse_args(argv)


def read_prompts(args):
    """The prompts as text."""
    if args.prompt:
        return args.prompt
    try:
        text = open(args.prompts, encoding="utf-8").read()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompts {args.prompts}: {error}") from None
    prompts = [prompt.strip("\n") for prompt in text.split("\n\n") if prompt.strip()]
    if not prompts:
        raise ValueError(f"--prompts {args.prompts}: no prompt in it")
    return prompts


def main(generate, doc, argv=None):
    """Runs a stage on the prompts, prints completions, report and check. Exit status 1 if one is WRONG, 2 for bad input."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")   # a console without Unicode still gets its text
    parser, args = parse(doc, argv)
    has = inspect.signature(generate).parameters
    knobs = {}
    for knob in KNOBS:
        if getattr(args, knob) is not None:
            if knob in has:
                knobs[knob] = getattr(args, knob)
            else:
                print(f"--{knob if knob != 'use_cache' else 'no_cache'} has no meaning for this stage: ignored")
    try:
        if args.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError("--device cuda: there is no CUDA device here; use cpu")
        model, tokenizer = load(args.model)
        model.to(args.device, DTYPES[args.dtype])
        requests = [Request(tokenizer.encode(text, allowed_special="all"), args.max_new_tokens, args.temperature, args.top_k,
                            args.seed + i, tokenizer.eot_token, name=f"r{i}") for i, text in enumerate(read_prompts(args))]
        model(torch.zeros(1, 1, dtype=torch.long, device=args.device))   # the first call pays for torch's own set-up
        check = Check(model, use_cache="use_cache" not in has)
        trace = generate(model, requests, on_token=None if args.no_check else check.on_token, **knobs)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")

    for request in requests:
        print(f"--- {request.name}: {len(request.prompt)} prompt tokens, {len(request.generated)} generated, {request.finish_reason}")
        print(tokenizer.decode(request.prompt) + "▸" + tokenizer.decode(request.generated))
    print()
    print(report(trace))
    if not args.no_check:
        verdicts = check(requests)
        print(check.cost())
        print(summary(verdicts))
        sys.exit(any(v.verdict == "WRONG" for v in verdicts))
