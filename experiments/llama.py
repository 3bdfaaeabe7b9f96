"""
What grouped heads save: bytes of cache, requests that fit into a memory, and time on each stage.

    python -m experiments.llama          both tables of docs/llama.md

Bytes are counted in a cache that the whole model has written on the "meta" device, which has shapes
but no memory. Times compare one model with its twin in which every query head has a copy of its key
head: the same function, so both compute the same tokens, in caches of different sizes. Processor
time is measured, with one thread, in alternating runs: other programs disturb it little.
"""
import time
from dataclasses import replace
from statistics import median

import torch

from beyond.llama import Llama, LlamaConfig
from experiments.tables import show
from generate_unbatched import Alone
from model import GPT, GPTConfig
from request import Request, prepare
from toolbox.report import totals
from toolbox.stages import STAGES

MEMORY, CONTEXT = 24e9, 2000   # bytes; tokens of each request
MODELS = {   # LlamaConfig: block_size, vocab_size, n_layer, n_head, n_kv_head, n_embd, hs, ffn
    "GPT-2 (124M)": GPTConfig(),
    "GPT-2 XL": GPTConfig(n_layer=48, n_head=25, n_embd=1600),
    "Llama 2 7B": LlamaConfig(4096, 32000, 32, 32, 32, 4096, 128, 11008, tied=False),
    "Llama 3.1 8B": LlamaConfig(131072, 128256, 32, 32, 8, 4096, 128, 14336, tied=False),
    "Qwen3 8B": LlamaConfig(40960, 151936, 36, 32, 8, 4096, 128, 12288, qk_norm=True, tied=False),
    "SmolLM2 135M": LlamaConfig(),
}


def cache_bytes(model):
    """Of one token, counted in the cache."""
    request, = prepare(Request([0], 1), model.config)
    batch = Alone(request, True, model.device)
    model(batch.tokens, batch.positions, batch.attend, batch.wanted)
    return request.kv.bytes_per_token


def memory_row(name, config):
    with torch.device("meta"):
        model = (GPT if isinstance(config, GPTConfig) else Llama)(config).bfloat16()
    weights, token = sum(p.nbytes for p in model.parameters()), cache_bytes(model)
    groups = config.n_head // getattr(config, "n_kv_head", config.n_head)
    fit = int((MEMORY - weights) // (min(CONTEXT, config.block_size) * token))
    return [name, groups, f"{token:,}", f"{weights / 1e9:.1f} GB", f"{fit:,}"]


def ungrouped(model):
    """The same function with a key and value head for every query head."""
    config = model.config
    twin = Llama(replace(config, n_kv_head=config.n_head))
    twin.load_state_dict(model.state_dict() | {
        name: p.unflatten(0, (config.n_kv_head, 1, -1)).repeat_interleave(
            config.n_head // config.n_kv_head, dim=1).flatten(0, 2)
        for name, p in model.state_dict().items() if ".key." in name or ".value." in name})
    return twin


def stage_rows(repeats=3, prompt=400, new=16, n_layer=6):
    torch.manual_seed(0)
    grouped = Llama(LlamaConfig(n_layer=n_layer, vocab_size=1000))
    models, rows = [ungrouped(grouped), grouped], []
    requests = [Request([(7 * i + j) % 1000 for j in range(prompt - 40 * i)], new, name=f"r{i}")
                for i in range(8)]
    for stage, generate in STAGES.items():
        if stage == "unbatched, no cache":
            continue
        seconds, copied, tokens = ([], []), [0, 0], [None, None]
        for _ in range(repeats):
            for i, model in enumerate(models):
                mine, start = [replace(request) for request in requests], time.process_time()
                trace = generate(model, mine)
                seconds[i].append(time.process_time() - start)
                copied[i], tokens[i] = totals(trace)["copied_bytes"], [r.generated for r in mine]
        assert tokens[0] == tokens[1], f"{stage}: the two models' tokens differ"
        full, less = map(median, seconds)
        rows.append([stage, *(f"{n / 1e6:,.0f} MB" for n in copied), f"{full:.2f} s",
                     f"{less:.2f} s", f"{less / full:.2f}"])
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    show(f"16-bit weights and cache; requests of {CONTEXT:,} tokens (GPT-2: 1,024) that fit into "
         f"{MEMORY / 1e9:.0f} GB beside the weights",
         ["model", "query heads per key head", "cache per token, bytes", "weights", "requests"],
         [memory_row(*item) for item in MODELS.items()])
    show("SmolLM2's shape with 6 layers: 9 key heads, and 3",
         ["stage", "K/V copied, 9", "3", "processor time, 9", "3", "ratio"], stage_rows())
