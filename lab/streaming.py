"""
The command of engine.py: requests arrive while the engine runs, one is aborted, and tokens stream.
"""
import sys
from functools import partial

from lab import flags
from lab.checks.check import Check, summary
from lab.run import chosen_knobs, coloured, load_inputs, parser

STEPS_BETWEEN = 5   # two arrivals, in steps
ABORT_AFTER = 16    # tokens of the request in the middle
WIDTH = 100         # of a line, in characters
NOT_HERE = ("plot", "page", "trace", "arrival_rate", "optimize", "texts")   # flags of the stages


def main(engine_class, doc, argv=None):
    """Serves the prompts as they arrive, prints what each step yields, checks it, and exits."""
    command = partial(stream, engine_class)
    sys.exit(parser(doc, engine_class).run(command, argv))


def stream(engine_class, args):
    """Returns the exit status."""
    chosen, ignored = chosen_knobs(engine_class, args)
    model, tokenizer, requests = load_inputs(args)
    knobs = flags.limited(engine_class, chosen, requests, model.config.block_size)
    # The engine cannot know how much will be asked for; here it is known.
    most = len(requests) * -(-model.config.block_size // knobs["page_size"])
    knobs["pages"] = min(knobs["pages"], most)
    for number, request in enumerate(requests):
        request.arrival = number * STEPS_BETWEEN
    check = None if args.no_check else Check(model, requests)
    engine = engine_class(model, **knobs, on_token=check.on_token if check else None)
    show = None if args.quiet else partial(print_step, tokenizer)
    serve(engine, requests, show)
    ignored += [name for name in NOT_HERE if getattr(args, name)]
    flags.say_ignored(args, ignored, "for the engine")
    verdicts = check() if check else []
    if check:
        print(coloured(summary(verdicts)))
    return int(any(verdict.verdict == "WRONG" for verdict in verdicts))


def serve(engine, requests, show):
    """The loop that belongs to the caller. The request in the middle is aborted while it runs."""
    coming = list(requests)
    leaves = requests[len(requests) // 2]
    enough = min(ABORT_AFTER, leaves.max_new_tokens // 2 + 1)
    while coming or engine.busy:
        step = engine.number
        events = []
        while coming and (coming[0].arrival <= step or not engine.busy):
            request = coming.pop(0)
            engine.add(request)
            events.append(f"{request.name} comes")
        if len(leaves.generated) >= enough and not leaves.finished:
            engine.abort(leaves)
            events.append(f"{leaves.name} is aborted")
        tokens = engine.step()
        if show:
            show(step, events, tokens)


def print_step(tokenizer, step, events, tokens):
    """One line: what came or left before the step, then which request got which token."""
    parts = [f"[{event}]" for event in events]
    for request, token in tokens:
        parts.append(f"{request.name}{tokenizer.decode([token])!r}")
        if request.finished:
            parts.append(f"[{request.name} ends: {request.finish_reason}]")
    line = f"step {step:3}  {' '.join(parts)}"
    print(line if len(line) <= WIDTH else line[:WIDTH - 1] + "…")
