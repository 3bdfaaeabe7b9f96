"""
Other people's ways to run the same GPT-2 on the same requests, for bench.py. Greedy, and each request exactly as long as it asks.

A peer is a function peer(requests) -> (tokens, times): for each request the ids it generated and time.perf_counter() at each.
"""
import logging
import multiprocessing
import tempfile
import time
from functools import partial
from importlib.util import find_spec

import torch

from toolbox.weights import write_gpt2

PEERS = ("transformers", "CTranslate2")   # the first word of a peer's name


def peers(model, batch_tokens=1024):
    """{name: peer} with the model's weights, dtype and device; without those that are not installed, a line says so."""
    if find_spec("transformers") is None:
        print("transformers is not installed: its rows are left out, and CTranslate2's, whose model it reads (pip install -r requirements-dev.txt)")
        return {}
    import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        write_gpt2(model, folder, dtype=model.wte.weight.dtype)
        theirs = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=model.wte.weight.dtype).to(model.device).eval()
    theirs.generation_config.eos_token_id = None
    theirs.generation_config.pad_token_id = 0
    shapes = {"one at a time": (1, False), "static 8": (8, False), "static 8 sorted": (8, True), "static 32": (32, False), "static 32 sorted": (32, True)}
    found = {f"transformers, {name}": partial(static, theirs, size=size, by_length=sort) for name, (size, sort) in shapes.items()}
    if hasattr(theirs, "continuous_batching_context_manager"):
        found["transformers, continuous"] = lambda requests: continuous(theirs, requests, batch_tokens)
    else:
        print("this transformers has no continuous batching, its row is left out")
    if find_spec("ctranslate2") is None:
        print("CTranslate2 is not installed, its rows are left out (pip install -r requirements-dev.txt)")
    elif model.device.type != "cpu" or model.wte.weight.dtype != torch.float32:
        print("CTranslate2 is run in float32 on a CPU only, its rows are left out")
    else:
        compiled = CTranslate2(theirs)
        for name in "one at a time", "static 8 sorted", "static 32 sorted":
            found[f"CTranslate2, {name}"] = partial(compiled, size=shapes[name][0], by_length=shapes[name][1])
    return found


def batches(requests, size, by_length):
    """Lists of `size` indices each; sorted by prompt length, longest first, or as they come."""
    order = sorted(range(len(requests)), key=lambda i: -len(requests[i].prompt)) if by_length else list(range(len(requests)))
    return [order[first:first + size] for first in range(0, len(order), size)]


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
    """Left-padded batches of `size`, each as long as its longest."""
    tokens, times = [None] * len(requests), [None] * len(requests)
    for batch in batches(requests, size, by_length):
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
            manager.add_request(request.prompt, request_id=str(i), max_new_tokens=request.max_new_tokens, record_timestamps=True,
                                eos_token_id=-1)   # no token is -1: each is as long as it asks
        while len(results) < len(requests):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"transformers, continuous: {result.error}")
                results[int(result.request_id)] = result
            elif result is None and not manager.is_running():
                raise RuntimeError("transformers, continuous: its thread has stopped")
    return [results[i].generated_tokens for i in range(len(requests))], [results[i].timestamps for i in range(len(requests))]


class CTranslate2:
    """
    An engine in C++. Its batches lose a request as soon as it has its tokens. It runs in a process of its own, since its
    threads stay when it has done its work, and everybody else's would go to sleep between two operations (bench.apart).
    """

    def __init__(self, theirs):
        from ctranslate2.converters.transformers import GPT2Loader
        with torch.no_grad():
            spec = GPT2Loader().get_model_spec(theirs)
        spec.register_vocabulary([str(token) for token in range(theirs.config.vocab_size)])
        spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "0"
        spec.validate()
        spec.optimize()
        self.pipe, far = multiprocessing.Pipe()
        with tempfile.TemporaryDirectory() as folder:
            spec.save(folder)
            multiprocessing.get_context("spawn").Process(target=ctranslate2_process, args=(far, folder, torch.get_num_threads()), daemon=True).start()
            far.close()
            self.pipe.recv()   # it has read the folder

    def __call__(self, requests, size, by_length=False):
        self.pipe.send([[(i, requests[i].prompt, requests[i].max_new_tokens) for i in batch] for batch in batches(requests, size, by_length)])
        return self.pipe.recv()


def ctranslate2_process(pipe, folder, threads):
    import ctranslate2
    generator = ctranslate2.Generator(folder, device="cpu", intra_threads=threads, compute_type="float32")
    pipe.send("ready")
    while True:
        try:
            work = pipe.recv()
        except EOFError:   # the benchmark has ended
            return
        total = sum(map(len, work))
        tokens, times = [None] * total, [[] for _ in range(total)]
        for batch in work:
            def ends(result):
                i, _, length = batch[result.batch_id]
                times[i].append(time.perf_counter())   # one clock for all processes of a machine
                return len(times[i]) >= length

            results = generator.generate_batch([[str(token) for token in prompt] for _, prompt, _ in batch], include_prompt_in_result=False,
                                               max_length=max(length for _, _, length in batch), end_token=[], callback=ends)   # no token ends it but `ends`
            for (i, _, _), result in zip(batch, results):
                tokens[i] = result.sequences_ids[0]
        pipe.send((tokens, times))
