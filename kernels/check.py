"""
Checks the compiled step against the files that it stands for, and records that they agree.

    python -m kernels.check

On random workloads: stages 6 and 7 batched give bit for bit what stage 0 gives with the same
snapshot, and stage 0's logits are the plain model's to rounding. Only if all agree does it write
checked.json, without which optimize() returns models as they are.
"""
import json
import random
import sys

import torch

import generate_paged
import generate_ragged
import generate_unbatched
from kernels import RECORD, Snapshot, digests, native
from loading.llama import Llama, LlamaConfig
from model import GPT, GPTConfig
from request import Request

SIZES = dict(block_size=40, vocab_size=50, n_layer=3)
MODELS = {
    "GPT": lambda: GPT(GPTConfig(n_head=3, n_embd=15, **SIZES)),
    "Llama": lambda: Llama(LlamaConfig(n_head=6, n_kv_head=2, n_embd=18, head_size=4, ffn=20,
                                       rope_theta=100.0, qk_norm=True, **SIZES)),
    "an untied Llama": lambda: Llama(LlamaConfig(n_head=4, n_kv_head=4, n_embd=16, head_size=4,
                                                 ffn=33, qkv_bias=True, tied=False, **SIZES))}


def workload(seed):
    rng = random.Random(seed)
    stem = [rng.randrange(50) for _ in range(20)]
    return [Request(stem[:rng.choice([0, 0, 9, 20])] + [rng.randrange(50) for _ in range(
        rng.randint(1, 15))], rng.randint(1, 9), rng.choice([0.0, 1.0]), seed=i,
        arrival=rng.randint(0, 4)) for i in range(rng.randint(2, 9))]


def logits_of(generate, model, seed, **knobs):
    """{request's number: its logits, one row for each token}"""
    requests, found = workload(seed), {}
    number = {id(request): i for i, request in enumerate(requests)}
    generate(model, requests, on_token=lambda request, token, row: found.setdefault(
        number[id(request)], []).append(row), **knobs)
    return {i: torch.stack(rows) for i, rows in found.items()}


def fault(examples=20):
    """The first disagreement, in words; None if there is none."""
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = make().requires_grad_(False)
        for p in model.parameters():
            p.normal_(std=0.3)
        fast = Snapshot(model)
        for seed in range(examples):
            knobs = dict(max_batch=1 + seed % 6, token_budget=3 + seed % 11)
            alone, plain = (logits_of(generate_unbatched.generate, m, seed) for m in (fast, model))
            for i in plain:
                if not torch.allclose(alone[i][0], plain[i][0], rtol=0,
                                      atol=1e-4 * float(plain[i][0].abs().max())):
                    return f"{name}, workload {seed}: request {i} differs from the plain model"
            pages = dict(pages=20, page_size=2 + seed % 4)
            for generate, more in (generate_ragged.generate, {}), (generate_paged.generate, pages):
                found = logits_of(generate, fast, seed, **knobs, **more)
                if any(not torch.equal(found[i], alone[i]) for i in alone):
                    return f"{name}, workload {seed}: {generate.__module__} is not stage 0's bits"
        if fast.uses() != "compiled step: yes":
            return f"{name}: {fast.uses()}"


def main():
    why = native.problem() or fault()
    if why:
        print(f"not recorded: {why}", file=sys.stderr)
        return 1
    RECORD.write_text(json.dumps(digests(), indent=1) + "\n")
    print(f"the compiled step agrees with the files; wrote {RECORD.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
