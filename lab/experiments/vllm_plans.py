"""
vLLM's own scheduler, without a model: the plans that it makes for given workloads.

    PYTHON_WITH_VLLM lab/experiments/vllm_plans.py < workloads.jsonl > plans.jsonl

It imports nothing of this repository. A workload is a line of JSON (docs/vllm.md says which); the
answers that a model would give are known, so its scheduler is all of vLLM that runs.
"""
import contextlib
import json
import os
import sys
import tempfile
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
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

MODEL = dict(architectures=["GPT2LMHeadModel"], model_type="gpt2", n_layer=2, n_head=2, n_embd=32,
             vocab_size=1000, n_positions=4096, n_ctx=4096, bos_token_id=0, eos_token_id=0,
             torch_dtype="float32")
TOO_MANY = 20_000   # steps


def make(work, model):
    """A scheduler as vLLM's engine makes it, for full attention with prefix caching."""
    ahead = work["policy"] == "ahead"
    settings = VllmConfig(
        model_config=ModelConfig(model=model, dtype="float32", seed=1, skip_tokenizer_init=True,
                                 max_model_len=4096),
        cache_config=CacheConfig(block_size=work["page_size"], enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=work["max_batch"], max_num_batched_tokens=work["token_budget"],
            max_model_len=4096, enable_chunked_prefill=True, is_encoder_decoder=False,
            async_scheduling=ahead, policy="fcfs" if ahead else work["policy"]))
    layers = FullAttentionSpec(block_size=work["page_size"], num_kv_heads=1, head_size=1,
                               dtype=torch.float32)
    blocks = work["pages"] + 1   # the first is vLLM's null block
    settings.cache_config.num_gpu_blocks = blocks
    return (AsyncScheduler if ahead else Scheduler)(
        vllm_config=settings, block_size=work["page_size"], hash_block_size=work["page_size"],
        kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[],
                                      kv_cache_groups=[KVCacheGroupSpec(["layer"], layers)]),
        structured_output_manager=StructuredOutputManager(settings), log_stats=True)


def as_request(number, asked, page_size):
    return Request(
        request_id=asked["name"], prompt_token_ids=asked["prompt"], pooling_params=None,
        sampling_params=SamplingParams(max_tokens=len(asked["answer"]), ignore_eos=True,
                                       temperature=0),
        arrival_time=asked["arrival"] + number * 1e-6, priority=asked.get("priority", 0),
        block_hasher=get_request_block_hasher(page_size, sha256))


def plans_of(work, model):
    """
    plans:     [[step, {request: number of tokens}], ...]
    in_flight: how many tokens were in flight when their request was preempted
    """
    scheduler = make(work, model)
    coming = sorted(work["requests"], key=lambda each: each["arrival"])
    answers = {each["name"]: each["answer"] for each in coming}
    ahead = work["policy"] == "ahead"
    plans, flights, in_flight, number, step = [], [], 0, 0, 0
    while coming[number:] or scheduler.has_unfinished_requests() or flights:
        while coming[number:] and coming[number]["arrival"] <= step:
            scheduler.add_request(as_request(number, coming[number], work["page_size"]))
            number += 1
        if not scheduler.has_unfinished_requests() and not flights:
            step = coming[number]["arrival"]
            continue
        output = scheduler.schedule()
        plan = dict(output.num_scheduled_tokens)
        if plan or not ahead:
            plans.append([step, plan])
        for _, _, full in flights:
            in_flight += len({*full} & {*(output.preempted_req_ids or ())})
        # schedule() has advanced num_computed_tokens
        full = [name for name in plan if scheduler.requests[name].num_computed_tokens
                >= scheduler.requests[name].num_tokens]
        flights.append((output, list(plan), full))
        if not ahead or len(flights) > 1 or not plan:   # one step ahead, a pass is in flight
            land(scheduler, answers, *flights.pop(0))
        if ahead and not plan and flights:
            land(scheduler, answers, *flights.pop(0))
        step += 1
        if step > TOO_MANY:
            raise SystemExit("the scheduler does not come to an end")
    return {"plans": plans, "in_flight": in_flight}


def land(scheduler, answers, output, names, full):
    """The pass is over, and its tokens are known."""
    tokens = []
    for name in names:
        request = scheduler.requests.get(name)
        due = request is not None and name in full
        tokens.append([answers[name][request.num_output_tokens]] if due else [])
    scheduler.update_from_output(output, ModelRunnerOutput(
        req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)},
        sampled_token_ids=tokens, logprobs=None, prompt_logprobs_dict={}, pooler_output=[]))


def main():
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        init_none_hash(sha256)
        print(json.dumps({"vllm": vllm.__version__, "path": str(Path(vllm.__file__).parent)}),
              file=out)
        for line in sys.stdin:
            print(json.dumps(plans_of(json.loads(line), folder)), file=out, flush=True)


if __name__ == "__main__":
    main()
