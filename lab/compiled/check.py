"""
Checks the compiled step against the files that it stands for, and records that they agree.

    python -m lab.compiled.check

On random passes of stages 0, 6 and 7, the logits must be the plain model's to rounding, and bit for
bit those of the request alone. Without its record, optimize() returns models as they are.
"""
import json
import random
import sys
from functools import cache
from itertools import product
from types import SimpleNamespace

import torch

from cache import KV
from generate_paged import Paged
from generate_ragged import Flat
from generate_unbatched import Alone
from lab.compiled import LAYOUTS, RECORD, Snapshot, digests, native
from lab.loading.llama import Llama, LlamaConfig
from model import GPT, GPTConfig
from request import Request


def models():
    """Small random ones, with all that a GPT or a Llama may have, in float32 on the CPU."""
    sizes = dict(block_size=40, vocab_size=50, n_layer=3)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        both = [GPT(GPTConfig(n_head=3, n_embd=15, **sizes)), Llama(LlamaConfig(
            n_head=6, n_kv_head=2, n_embd=18, head_size=4, ffn=33, rope_theta=100.0, qkv_bias=True,
            qk_norm=True, tied=False, **sizes))]
        for p in (p for m in both for p in m.float().requires_grad_(False).parameters()):
            p.normal_(std=0.3)
    return both


@cache
@torch.inference_mode()
@torch.autocast("cpu", enabled=False)
def fault(examples=30):
    """
    The first disagreement, in words, of requests that prefill in random chunks and then decode.
    None if there is none. ValueError if a method has been replaced.
    """
    for model, seed, kind in product(models(), range(examples), LAYOUTS):
        fast, rng, where = Snapshot(model), random.Random(seed), f"{kind}, workload {seed}"
        books = SimpleNamespace(number=160, size=rng.randint(1, 9))
        pool, pages = KV(books.number * books.size), rng.sample(range(160), 160)
        requests = [Request([rng.randrange(50) for _ in range(rng.randint(1, 30))])
                    for _ in range(4)]
        for i, request in enumerate(requests):
            request.block_size, request.block_table = 40, pages[40 * i:40 * (i + 1)]
        for _ in range(8):
            plan = [(r, rng.randint(1, r.todo)) for r in rng.sample(requests, rng.randint(1, 4))]
            make = {"Alone": lambda: Alone(requests[0], use_cache=True), "Flat": lambda: Flat(plan),
                    "Paged": lambda: Paged(plan, pool, books)}
            layout = make[kind]()
            last = torch.tensor([n for _, n in layout.plan]).cumsum(0) - 1
            wanted = (0, last) if kind == "Alone" else last
            theirs, mine = (compute(layout.tokens, layout.positions, layout.attend, wanted)
                            for compute in (model, fast.compiled))   # mine stay in the cache
            if not torch.allclose(mine, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max())):
                return f"native.cpp computes something else than torch ({where})"
            for row, (request, n) in zip(mine, layout.plan):
                known = torch.tensor([request.tokens[:request.computed + n]])
                if not torch.equal(row, fast.compiled(known, None, None, (0, -1))):
                    return f"a request gets other bits alone ({where})"
                request.computed += n
                if not request.todo:
                    request.generated.append(rng.randrange(50))


def main():
    if why := native.problem() or fault():
        sys.exit(f"not recorded: {why}")
    RECORD.write_text(json.dumps(digests(), indent=1) + "\n")
    print(f"the compiled step agrees with the files; wrote {RECORD.name}")


if __name__ == "__main__":
    main()
