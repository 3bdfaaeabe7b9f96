"""What the commands of two essays in beyond/ print: what an idea gains, counted or calculated."""
import sys
from itertools import product

from beyond.speculative import generate
from lab import flags
from lab.loading.load import load, set_threads
from lab.loading.workload import PROMPTS, make_requests, read_prompts
from lab.simulate.hardware import Engine, gpu_of, shape_of


def ahead(argv=None):
    p = flags.Parser(prog="python -m beyond.ahead", description="What planning ahead gains.")
    p.add_argument("host_ms", nargs="?", type=flags.above_0, default=2.0, help="for each pass")
    sys.exit(p.run(busy_devices, argv))


def busy_devices(args):
    host, gpu = args.host_ms, gpu_of("h100")
    for name in "qwen3-8b", "qwen3-0.6b":   # 512 passes of 16 decodes with 1,024 keys each
        shape = shape_of(name)
        device = 1e3 * shape.seconds(gpu, 16, 16, 16 * 1024, 16 * 1024)
        turns, ahead = host + device, max(host, device)   # ms; x 0.512: 512 passes, in s
        print(f"{name}, H100, {host:g} ms of host, calculated: in turns {0.512 * turns:.2f} s, "
              f"busy {device / turns:.0%}; ahead {0.512 * ahead:.2f} s, busy {device / ahead:.0%}")
    return 0


def speculative(argv=None):
    p = flags.Parser(prog="python -m beyond.speculative", description="What guessing gains.")
    p.add_argument("model", nargs="?", default="builtin", help="as for the stages")
    p.add_argument("prompts", nargs="?", default=PROMPTS, help="a file of them")
    sys.exit(p.run(passes_saved, argv))


def passes_saved(args):
    model, tokenizer = load(args.model)
    set_threads(model)
    prompts = read_prompts(args.prompts)
    for batch, t, k in product((8, 1), (0.0, 0.7), (0, 2, 4, 8)):
        requests = make_requests(prompts, tokenizer, max_new_tokens=64, temperature=t, seed=0)
        trace = generate(model, requests, batch, guesses=k)
        print(f"batch {batch}, temperature {t}, K = {k}: {len(trace.passes)} passes")
    gpu, shape = gpu_of("a100"), shape_of("llama-2-7b")
    for n in 1, 8, 32, 64, 256:   # requests with 512 keys; at least one token of each is sampled
        one, five = [shape.seconds(gpu, r, r, 512 * r, 512 * n) - (r - n) * Engine().per_request
                     for r in (n, 5 * n)]
        print(f"Llama 2 7B, A100, calculated: batch {n}, K = 4: a pass x {five / one:.2f}")
    return 0
