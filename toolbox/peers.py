"""
Other people's ways to run the same GPT-2 on the same requests, for bench.py. Greedy, and each request exactly as long as it asks.

A peer is a function peer(requests) -> (tokens, times): for each request the ids it generated and time.perf_counter() at each.
"""
import logging
import tempfile
import time
from importlib.util import find_spec

import torch

from toolbox.weights import write_gpt2


def peers(model, batch_tokens=1024):
    """{name: peer} with the model's weights, dtype and device; empty where transformers is not installed."""
    if find_spec("transformers") is None:
        print("transformers is not installed, its rows are left out (pip install -r requirements-dev.txt)")
        return {}
    import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        write_gpt2(model, folder, dtype=model.wte.weight.dtype)
        theirs = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=model.wte.weight.dtype).to(model.device).eval()
    theirs.generation_config.eos_token_id = None
    theirs.generation_config.pad_token_id = 0
    found = {
        "transformers, one at a time": lambda requests: static(theirs, requests, 1),
        "transformers, static 8": lambda requests: static(theirs, requests, 8),
        "transformers, static 8 sorted": lambda requests: static(theirs, requests, 8, by_length=True),
        "transformers, static 32": lambda requests: static(theirs, requests, 32),
        "transformers, static 32 sorted": lambda requests: static(theirs, requests, 32, by_length=True),
    }
    if hasattr(theirs, "continuous_batching_context_manager"):
        found["transformers, continuous"] = lambda requests: continuous(theirs, requests, batch_tokens)
    else:
        print("this transformers has no continuous batching, its row is left out")
    return found


class Clock:
    """What `generate` calls a streamer: it is told the prompt, then each column of tokens."""

    def __init__(self):
        self.times = []

    def put(self, tokens):
        self.times.append(time.perf_counter())

    def end(self):
        pass


@torch.inference_mode()
def static(model, requests, size, by_length=False):
    """Left-padded batches of `size`, each as long as its longest; sorted by prompt length, longest first, or as they come."""
    order = sorted(range(len(requests)), key=lambda i: -len(requests[i].prompt)) if by_length else list(range(len(requests)))
    tokens, times = [None] * len(requests), [None] * len(requests)
    for first in range(0, len(order), size):
        batch = order[first:first + size]
        T = max(len(requests[i].prompt) for i in batch)
        ids = torch.tensor([[0] * (T - len(requests[i].prompt)) + requests[i].prompt for i in batch], device=model.device)
        mask = torch.tensor([[0] * (T - len(requests[i].prompt)) + [1] * len(requests[i].prompt) for i in batch], device=model.device)
        clock = Clock()
        out = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=max(requests[i].max_new_tokens for i in batch),
                             streamer=clock)
        for row, i in zip(out[:, T:].tolist(), batch):
            tokens[i], times[i] = row[:requests[i].max_new_tokens], clock.times[1:1 + requests[i].max_new_tokens]
    return tokens, times


def continuous(model, requests, batch_tokens):
    """transformers' continuous batching: what `generate_batch` does, with each request's own length."""
    from transformers import ContinuousBatchingConfig, GenerationConfig
    page = 32
    pages = sum(-(-(len(request.prompt) + request.max_new_tokens) // page) + 1 for request in requests)
    config = ContinuousBatchingConfig(page_size=page, num_blocks=pages, max_batch_tokens=batch_tokens)
    results = {}
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    with torch.no_grad(), model.continuous_batching_context_manager(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0), continuous_batching_config=config, block=True,
            timeout=5, warmup=False) as manager:
        for i, request in enumerate(requests):
            manager.add_request(request.prompt, request_id=str(i), max_new_tokens=request.max_new_tokens, record_timestamps=True, eos_token_id=-1)
        while len(results) < len(requests):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"transformers, continuous: {result.error}")
                results[int(result.request_id)] = result
            elif result is None and not manager.is_running():
                raise RuntimeError("transformers, continuous: its thread has stopped")
    return [results[i].generated_tokens for i in range(len(requests))], [results[i].timestamps for i in range(len(requests))]
