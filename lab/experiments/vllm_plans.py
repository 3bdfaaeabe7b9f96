"""
vLLM's own scheduler, without a model: the plans that it makes for given workloads.

    PYTHON_WITH_VLLM lab/experiments/vllm_plans.py < workloads.jsonl > plans.jsonl

It imports nothing of this repository. A workload is a line of JSON (docs/vllm.md says which). The
answers that a model would give are known, so its scheduler is all of vLLM that runs. Each workload
is served in three modes:

    fcfs        Scheduler, first come, first served; a step is planned when the last one is over
    priority    the same, with vLLM's policy "priority"
    ahead       AsyncScheduler: a step is planned while the one before it is computed

The output has a line for each workload, {mode: its plans}, after a first line that says which vLLM
made them, and where it is installed.
"""
import contextlib
import json
import os
import sys
import tempfile
from collections import deque
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"

import torch
import vllm
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

MODEL = dict(architectures=["GPT2LMHeadModel"], model_type="gpt2", n_layer=2, n_head=2, n_embd=32,
             vocab_size=1000, n_positions=4096, n_ctx=4096, bos_token_id=0, eos_token_id=0,
             torch_dtype="float32")
MODES = ("fcfs", "priority", "ahead")
TOO_MANY = 20_000   # steps


def make_scheduler(work, mode, model):
    """A scheduler as vLLM's engine makes it, for full attention with prefix caching."""
    settings = VllmConfig(
        model_config=ModelConfig(model=model, dtype="float32", seed=1, skip_tokenizer_init=True,
                                 max_model_len=4096),
        cache_config=CacheConfig(block_size=work["page_size"], enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=work["max_batch"],
            max_num_batched_tokens=work["token_budget"],
            max_model_len=4096,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=mode == "ahead",
            policy="priority" if mode == "priority" else "fcfs"))
    layers = FullAttentionSpec(block_size=work["page_size"], num_kv_heads=1, head_size=1,
                               dtype=torch.float32)
    blocks = work["pages"] + 1   # the first is vLLM's null block
    settings.cache_config.num_gpu_blocks = blocks
    kind = AsyncScheduler if mode == "ahead" else Scheduler
    return kind(
        vllm_config=settings,
        block_size=work["page_size"],
        hash_block_size=work["page_size"],
        kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[],
                                      kv_cache_groups=[KVCacheGroupSpec(["layer"], layers)]),
        structured_output_manager=StructuredOutputManager(settings),
        log_stats=True)


def as_request(number, asked, page_size):
    """A request of a workload, which is added as the number-th."""
    sampling = SamplingParams(
        max_tokens=asked.get("max_new_tokens", len(asked["answer"])),
        stop_token_ids=[asked["stop"]] if "stop" in asked else None,
        ignore_eos=True,
        temperature=0)
    return Request(
        request_id=asked["name"],
        prompt_token_ids=asked["prompt"],
        pooling_params=None,
        sampling_params=sampling,
        arrival_time=asked["arrival"] + number * 1e-6,
        priority=asked["priority"],
        block_hasher=get_request_block_hasher(page_size, sha256))


def plans_of(work, mode, model):
    """[[step, {request: number of tokens}], ...]"""
    scheduler = make_scheduler(work, mode, model)
    answers = {asked["name"]: asked["answer"] for asked in work["requests"]}
    coming = deque(sorted(work["requests"], key=lambda asked: asked["arrival"]))
    aborts = [(asked["abort"], asked["name"]) for asked in work["requests"] if "abort" in asked]
    plans = []
    flights = deque()   # passes that are computed, the oldest first
    number = 0
    step = 0
    while coming or scheduler.has_unfinished_requests() or flights:
        while coming and coming[0]["arrival"] <= step:
            scheduler.add_request(as_request(number, coming.popleft(), work["page_size"]))
            number += 1
        for abort, name in aborts:
            if abort <= step:   # again and again; a request that has ended is left alone
                scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        if not scheduler.has_unfinished_requests() and not flights:
            if coming:
                step = max(step, coming[0]["arrival"])
            continue
        output = scheduler.schedule()
        plan = dict(output.num_scheduled_tokens)
        if plan or mode != "ahead":   # ahead, an empty plan only waits for the pass in flight
            plans.append([step, plan])
        flights.append((output, plan, names_due(scheduler, plan)))
        in_flight = 1 if mode == "ahead" and plan else 0
        while len(flights) > in_flight:
            land(scheduler, answers, *flights.popleft())
        step += 1
        if step > TOO_MANY:
            raise SystemExit("the scheduler does not come to an end")
    return plans


def names_due(scheduler, plan):
    """Names of the requests that get a token. (`schedule` has advanced num_computed_tokens.)"""
    requests = [scheduler.requests[name] for name in plan]
    return {request.request_id for request in requests
            if request.num_computed_tokens >= request.num_tokens}


def land(scheduler, answers, output, plan, due):
    """The pass is over, and its tokens are known."""
    tokens = []
    for name in plan:
        request = scheduler.requests.get(name)   # None: it has ended
        if request is not None and name in due:
            tokens.append([answers[name][request.num_output_tokens]])
        else:
            tokens.append([])
    scheduler.update_from_output(output, ModelRunnerOutput(
        req_ids=list(plan),
        req_id_to_index={name: i for i, name in enumerate(plan)},
        sampled_token_ids=tokens,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[]))


def main():
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        init_none_hash(sha256)
        head = {"vllm": vllm.__version__, "path": str(Path(vllm.__file__).parent)}
        print(json.dumps(head), file=out)
        for line in sys.stdin:
            work = json.loads(line)
            made = {mode: plans_of(work, mode, folder) for mode in MODES}
            print(json.dumps(made), file=out, flush=True)


if __name__ == "__main__":
    main()
