"""What the commands of simulate.py and capacity.py have in common: flags, and what they refuse."""
import json
import math

from beyond.hardware import BYTES
from toolbox import flags
from toolbox.validate import at_least_1


def parser(module, doc):
    """The flags that both commands have."""
    p = flags.Parser(prog=f"python -m {module}", description=doc.strip().splitlines()[0])
    p.add_argument("--gpu", default="a100", help="a name, or PEAK_TFLOPS,GB_PER_S,GiB")
    p.add_argument("--model", default="llama-2-7b", help="a name, see sheets.json")
    p.add_argument("--dtype", default="float16", choices=BYTES)
    p.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    p.add_argument("--input", default="1024", help="tokens of a prompt, N or LOW:HIGH")
    p.add_argument("--output", default="128", help="tokens of an answer, N or LOW:HIGH")
    p.add_argument("--requests", type=int, default=160)
    p.add_argument("--rate", type=float, help="requests a second, at random")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", metavar="FILE.json", help="write the figures")
    return p


def check(args):
    """(low, high) of the prompt's tokens and of the answer's. ValueError for a bad flag."""
    flags.check_path(args.json, "--json")
    counts = {f"--{name}": getattr(args, name, None)
              for name in ("requests", "clients", "replicas", "groups")}
    at_least_1(**{name: count for name, count in counts.items() if count is not None})
    if args.rate is not None and not 0 < args.rate < math.inf:
        raise ValueError(f"--rate must be above 0, not {args.rate}")
    return bounds("input", args.input), bounds("output", args.output)


def bounds(flag, text):
    """(low, high) of N or LOW:HIGH. ValueError for anything else."""
    low, _, high = text.partition(":")
    if not (low.isdecimal() and (high or low).isdecimal() and 0 < int(low) <= int(high or low)):
        raise ValueError(f"--{flag} {text}: use N or LOW:HIGH, whole numbers of at least 1")
    return int(low), int(high or low)


def write(path, content):
    """JSON, which has no NaN: null."""
    if path:
        content = json.loads(json.dumps(content), parse_constant=lambda name: None)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
