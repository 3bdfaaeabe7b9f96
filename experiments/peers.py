"""
Other programs that run the same model on the same requests, for bench.py. Output is greedy, and
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
from types import SimpleNamespace

import torch

from experiments.engines import INSTALL, Engine
from model import GPT
from toolbox.weights import LLAMA_NAMES, write_gpt2

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
                write(model, folder)
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

    def in_shapes(program, run):
        return {f"{program}, {name}": partial(in_batches, run, *shape)
                for name, shape in SHAPES.items()}

    found = {**in_shapes("transformers", partial(static, theirs)),
             "transformers, continuous": partial(continuous, theirs, batch_tokens=batch_tokens)}
    if find_spec("ctranslate2") is None:
        print("CTranslate2 is not installed: its rows are left out "
              "(pip install -r requirements-dev.txt)")
    elif isinstance(model, GPT) and runs_here("CTranslate2", model):
        found |= in_shapes("CTranslate2", ctranslate2(theirs))
    return found


def write(model, folder):
    """The weights in float32 and the configuration, as the peers read them."""
    if isinstance(model, GPT):
        return write_gpt2(model, folder, dtype=torch.float32)
    from transformers import LlamaConfig, LlamaForCausalLM
    c = model.config
    theirs = LlamaForCausalLM(LlamaConfig(
        max_position_embeddings=c.block_size, vocab_size=c.vocab_size, num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head, num_key_value_heads=c.n_kv_head, hidden_size=c.n_embd,
        head_dim=c.head_size, intermediate_size=c.ffn, rms_norm_eps=c.norm_eps,
        tie_word_embeddings=c.tied, rope_parameters={"rope_type": "default",
                                                     "rope_theta": c.rope_theta}))
    ours = model.state_dict()
    for key, tensor in theirs.state_dict().items():
        for their_part, our_part in LLAMA_NAMES.items():
            key = key.replace(their_part, our_part)
        tensor.copy_(ours["wte.weight" if key == "lm_head.weight" and c.tied else key])
    theirs.save_pretrained(folder)


def transformers_model(model):
    import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        write(model, folder)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=model.wte.weight.dtype)
    theirs.generation_config.eos_token_id = None
    theirs.generation_config.pad_token_id = 0
    return theirs.to(model.device).eval()


def in_batches(run, size, by_length, requests):
    """Calls run(batch) for `size` requests at a time, in order or the longest prompts first."""
    order, found = list(range(len(requests))), {}
    if by_length:
        order.sort(key=lambda i: -len(requests[i].prompt))
    for first in range(0, len(order), size):
        batch = order[first:first + size]
        found.update(zip(batch, zip(*run([requests[i] for i in batch]))))
    tokens, times = zip(*(found[i] for i in range(len(requests))))
    return list(tokens), list(times)


@torch.inference_mode()
def static(model, requests):
    """One left-padded batch, which runs until its longest request is done."""
    prompts = [request.prompt for request in requests]
    lengths = [request.max_new_tokens for request in requests]
    T, times = max(map(len, prompts)), []
    clock = SimpleNamespace(   # `put` is called with the prompt, then with each new column
        put=lambda tokens: times.append(time.perf_counter()), end=lambda: None)
    ids = torch.tensor([[0] * (T - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (T - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = model.generate(input_ids=ids.to(model.device), attention_mask=mask.to(model.device),
                         do_sample=False, max_new_tokens=max(lengths), streamer=clock)
    return ([row[:length] for row, length in zip(out[:, T:].tolist(), lengths)],
            [times[1:1 + length] for length in lengths])


def continuous(model, requests, batch_tokens):
    """transformers' continuous batching: `generate_batch`, but with a length for each request."""
    from transformers import ContinuousBatchingConfig, GenerationConfig
    sizes, results = [len(r.prompt) + r.max_new_tokens for r in requests], {}
    settings = dict(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=32, num_blocks=sum(-(-size // 32) + 1 for size in sizes),
            max_batch_tokens=batch_tokens),
        block=True, timeout=5, warmup=False)
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
