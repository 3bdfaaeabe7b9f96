"""
Other engines, each in a process of its own. Under another Python this file is all that they need,
so it imports nothing of this repository. Both sides exchange lines of JSON:

    bench.py                          peers.py vllm FOLDER ...
        <-  what runs, with its settings
        ->  [[prompt, max_new_tokens], ...]
        <-  {"tokens": [[...], ...], "times": [[...], ...]}
"""
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

PEERS = {"vLLM": "vllm", "OpenVINO GenAI": "openvino"}   # a name: the function that runs it


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
        self.process = subprocess.Popen(
            # -P: the names in this folder are ours
            [python, "-P", __file__, name, *map(str, arguments)], process_group=0,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.settings = self.answer()

    def __call__(self, requests):
        os.killpg(self.process.pid, signal.SIGCONT)
        work = [[request.prompt, request.max_new_tokens] for request in requests]
        print(json.dumps(work), file=self.process.stdin, flush=True)
        answer = self.answer()
        return answer["tokens"], answer["times"]

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            lines = [line for line in self.log.read().splitlines() if line.strip()]
            last = lines[-1] if lines else "nothing"
            raise RuntimeError(f"the engine {self.name} has ended, its last words: {last:.200}")
        os.killpg(self.process.pid, signal.SIGSTOP)
        return json.loads(line)


# --- the other side: runs where only the engine is installed --------------------------------------
# Each returns (settings, generate), in float32 on the CPU. generate([(prompt, length), ...]) yields
# after each step the new tokens: [(number of the request, tokens), ...].

def vllm(folder, max_batch, token_budget, threads):
    """vLLM, compiled: its default."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",   # in this process, which can then be stopped
        VLLM_CPU_KVCACHE_SPACE="3", VLLM_CPU_OMP_THREADS_BIND=f"0-{threads - 1}",
        VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
    import vllm
    from vllm.platforms import current_platform
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

    return f"vLLM {vllm.__version__}, {type(current_platform).__name__}, compiled", generate


def openvino(folder, max_batch, token_budget, threads):
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
            config = genai.GenerationConfig(max_new_tokens=length, ignore_eos=True, do_sample=False)
            ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
            handles.append(pipeline.add_request(i, ids, config))
        while pipeline.has_non_finished_requests():
            pipeline.step()
            yield [(i, tokens_from(handle)) for i, handle in enumerate(handles)
                   if handle.can_read()]

    def tokens_from(handle):
        tokens = []
        for output in handle.read().values():
            tokens += output.generated_ids
        return tokens

    return f"OpenVINO GenAI {genai.__version__}, float32 weights, cache and arithmetic", generate


def serve(name, folder, *limits):
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)   # what an engine prints must not come between
    settings, generate = globals()[name](folder, *map(int, limits))
    settings += ", no prefix caching, at most {} sequences and {} tokens a step".format(*limits)
    print(json.dumps(settings), file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        tokens, times = [[] for _ in work], [[] for _ in work]
        for step in generate(work):
            now = time.perf_counter()   # a machine's processes share this clock
            for i, new in step:
                tokens[i] += new
                times[i] += [now] * len(new)
        print(json.dumps({"tokens": tokens, "times": times}), file=answers, flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:])
