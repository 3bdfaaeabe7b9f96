"""
Other programs that run the same GPT-2 on the same requests, for bench.py. Output is greedy, and
each request gets exactly max_new_tokens tokens.

A peer is a function peer(requests) -> (tokens, times): for each request the ids that it generated,
and time.perf_counter() at each of them.
"""
import logging
import sys
import tempfile
import time
from functools import partial
from importlib.util import find_spec

import torch

from experiments.engines import INSTALL, Engine
from toolbox.weights import write_gpt2

SHAPES = {   # batch size, and whether prompts are sorted by length
    "one at a time": (1, False), "static 8 sorted": (8, True), "static 32 sorted": (32, True),
}


def peers(model, batch_tokens=1024, pythons={}, max_batch=32, token_budget=512):
    """
    {name: peer} with the model's weights, dtype and device. Prints a line for each program that is
    missing. pythons: {engine: the Python in whose environment it is installed}, see engines.py.
    """
    return {**engines(model, pythons, max_batch, token_budget), **libraries(model, batch_tokens)}


def engines(model, pythons, max_batch, token_budget):
    found = {}
    for engine, name in ("vllm", "vLLM"), ("openvino", "OpenVINO GenAI"):
        if engine not in pythons:
            print(f"{name} is left out: --peer-python {engine}=PATH names the Python of an "
                  f"environment that has it ({INSTALL[engine]})")
        elif runs_here(name, model):
            with tempfile.TemporaryDirectory() as folder:
                write_gpt2(model, folder, dtype=torch.float32)
                found[name] = Engine(engine, pythons[engine], folder, max_batch, token_budget,
                                     torch.get_num_threads())
            print(found[name].settings)
    return found


def runs_here(name, model):
    right = model.device.type == "cpu" and model.wte.weight.dtype == torch.float32
    if not right:
        print(f"{name} runs only in float32 on a CPU here: it is left out")
    return right


def libraries(model, batch_tokens):
    if find_spec("transformers") is None:
        print("transformers is not installed: its rows are left out, and those of CTranslate2, "
              "which reads its model (pip install -r requirements-dev.txt)")
        return {}
    theirs = transformers_model(model)
    found = {f"transformers, {name}": partial(in_batches, partial(static, theirs), *shape)
             for name, shape in SHAPES.items()}
    if hasattr(theirs, "continuous_batching_context_manager"):
        found["transformers, continuous"] = partial(continuous, theirs, batch_tokens=batch_tokens)
    else:
        print("this version of transformers has no continuous batching: its row is left out")
    if find_spec("ctranslate2") is None:
        print("CTranslate2 is not installed: its rows are left out "
              "(pip install -r requirements-dev.txt)")
    elif runs_here("CTranslate2", model):
        compiled = ctranslate2(theirs)
        for name, shape in SHAPES.items():
            found[f"CTranslate2, {name}"] = partial(in_batches, compiled, *shape)
    return found


def transformers_model(model):
    import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    dtype = model.wte.weight.dtype
    with tempfile.TemporaryDirectory() as folder:
        write_gpt2(model, folder, dtype=dtype)
        theirs = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=dtype)
    theirs.generation_config.eos_token_id = None
    theirs.generation_config.pad_token_id = 0
    return theirs.to(model.device).eval()


def in_batches(run, size, by_length, requests):
    """Calls run(batch) for `size` requests at a time, in order or the longest prompts first."""
    order = list(range(len(requests)))
    if by_length:
        order.sort(key=lambda i: -len(requests[i].prompt))
    tokens, times = [None] * len(requests), [None] * len(requests)
    for first in range(0, len(order), size):
        batch = order[first:first + size]
        for i, *found in zip(batch, *run([requests[i] for i in batch])):
            tokens[i], times[i] = found
    return tokens, times


class Clock:
    """A streamer for `generate`, which calls `put` with the prompt, then with each new column."""

    def __init__(self):
        self.times = []

    def put(self, tokens):
        self.times.append(time.perf_counter())

    def end(self):
        pass


@torch.inference_mode()
def static(model, requests):
    """One left-padded batch, which runs until its longest request is done."""
    prompts = [request.prompt for request in requests]
    lengths = [request.max_new_tokens for request in requests]
    T, clock = max(map(len, prompts)), Clock()
    ids = torch.tensor([[0] * (T - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (T - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(input_ids=ids.to(model.device), attention_mask=mask.to(model.device),
                         do_sample=False, max_new_tokens=max(lengths), streamer=clock)
    return ([row[:length] for row, length in zip(out[:, T:].tolist(), lengths)],
            [clock.times[1:1 + length] for length in lengths])


def continuous(model, requests, batch_tokens):
    """transformers' continuous batching: `generate_batch`, but with a length for each request."""
    from transformers import ContinuousBatchingConfig, GenerationConfig
    page = 32
    sizes = [len(request.prompt) + request.max_new_tokens for request in requests]
    settings = dict(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=page, num_blocks=sum(-(-size // page) + 1 for size in sizes),
            max_batch_tokens=batch_tokens),
        block=True, timeout=5, warmup=False)
    results = {}
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    with torch.no_grad(), model.continuous_batching_context_manager(**settings) as manager:
        for i, request in enumerate(requests):
            # no token is -1, so none ends a request early
            manager.add_request(request.prompt, request_id=str(i), eos_token_id=-1,
                                max_new_tokens=request.max_new_tokens, record_timestamps=True)
        while len(results) < len(requests):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"transformers, continuous: {result.error}")
                results[int(result.request_id)] = result
            elif result is None and not manager.is_running():
                raise RuntimeError("transformers, continuous: its thread has stopped")
    in_order = [results[i] for i in range(len(requests))]
    return [r.generated_tokens for r in in_order], [r.timestamps for r in in_order]


def ctranslate2(theirs):
    """An inference engine in C++."""
    from ctranslate2.converters.transformers import GPT2Loader
    with torch.no_grad():
        spec = GPT2Loader().get_model_spec(theirs)
    spec.register_vocabulary([str(token) for token in range(theirs.config.vocab_size)])
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "0"
    spec.validate()
    spec.optimize()
    with tempfile.TemporaryDirectory() as folder:
        spec.save(folder)
        return Engine("ctranslate2", sys.executable, folder, 0, 0, torch.get_num_threads())
