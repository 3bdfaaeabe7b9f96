"""The oracle and the workloads that every test of the contract shares."""
import tempfile
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from model import GPT, GPTConfig, sample
from scheduler import Request
from toolbox.stages import STAGES as ALL

BLOCK_SIZE, VOCAB = 24, 13

STAGES = {name.replace("unbatched, no cache", "no_cache").replace(", ", "_"): generate for name, generate in ALL.items()}
SCHEDULED = ("chunked", "interleaved", "ragged_mask", "ragged_varlen")
BATCHED = ("naive", "dynamic", "prepacked", "prepacked_dataset", *SCHEDULED)


def toy(loud=True, seed=0, dtype=torch.float64, **config):
    """
    A random model of odd sizes. Loud: the matrices of its blocks x 20, positions x 3. At its plain initialisation
    a tied head soon repeats one token for ever, and hides nearly every bug (trap 13).
    """
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**{"block_size": BLOCK_SIZE, "vocab_size": VOCAB, "n_layer": 3, "n_head": 3, "n_embd": 15, **config})).to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_(std=0.1)
            elif loud and p.dim() == 2 and name.startswith("h."):
                p.mul_(20)
            elif loud and name == "wpe.weight":
                p.mul_(3)
    return model.requires_grad_(False)


@torch.inference_mode()
def alone(model, request):
    """
    The oracle, written without any of the repository's caches, layouts and loops: the whole sequence through
    the model for each token. Returns (tokens, logits (n, V), finish reason).
    """
    twin, sequence, logits = replace(request), list(request.prompt), []
    while True:
        logits.append(model(torch.tensor([sequence]))[0, -1])
        sequence += sample(logits[-1][None], [twin])
        new = sequence[len(request.prompt):]
        if new[-1] == request.eos_token:
            return new, torch.stack(logits), "stop"
        if len(new) == request.max_new_tokens or len(sequence) > model.config.block_size:
            return new, torch.stack(logits), "length"


def assert_contract(model, generate, requests, cancels=(), tolerance=1e-10, whole=None, **knobs):
    """
    Runs `generate` and asserts that each request got exactly what it would have got alone.

    whole:   the model to compare with; None: the same one
    cancels: (i, j, k): request i is cancelled when request j has got its k-th token; k = 0: before the start
    """
    logits = {}

    def on_token(request, token, row):
        assert request.generated[-1] == token and len(request.generated) == len(request.token_times) == len(request.token_steps)
        logits.setdefault(request.name, []).append(row)
        for i, j, k in cancels:
            if requests[j] is request and len(request.generated) == k:
                requests[i].cancel()

    for i, _, k in cancels:
        if k == 0:
            requests[i].cancel()
    trace = generate(model, requests, on_token=on_token, **knobs)
    may_be_cut = {i for i, _, _ in cancels}
    for i, request in enumerate(requests):
        tokens, reference, reason = alone(whole or model, request)
        n = len(request.generated)
        if request.finish_reason == "cancelled":
            assert i in may_be_cut
        else:
            assert (request.generated, request.finish_reason) == (tokens, reason), f"request {i}"
        assert request.generated == tokens[:n], f"request {i}"
        assert len(logits.get(request.name, [])) == n
        if n:
            difference = (torch.stack(logits[request.name]) - reference[:n]).abs().max() / reference[:n].abs().max()
            assert difference <= tolerance, f"request {i}: logits differ by {difference:.1e}"
        assert request.kv is None, f"request {i} still holds its cache"
        assert request.token_steps == sorted(set(request.token_steps)) and all(s >= request.arrival for s in request.token_steps)
    steps = [p.step for p in trace.passes]
    assert steps == sorted(steps), "time runs backwards"
    ended = {request.name: (request.token_steps or [-1])[-1] for request in requests}
    for p in trace.passes:
        for name, _, _ in p.work:   # nobody is computed after its last token, but for the rest of the step in which it was cancelled
            request = next(request for request in requests if request.name == name)
            assert p.step >= request.arrival
            assert p.step <= ended[name] or request.finish_reason == "cancelled"
        assert p.slots == p.useful + p.recomputed + p.pad_slots + p.finished_slots
        assert p.useful_scores <= p.score_entries and min(p.useful, p.recomputed, p.pad_slots, p.finished_slots) >= 0
    return trace


def on_ranks(ranks, work, *arguments):
    """Calls `work(*arguments)`, a function at the top of a test module, on so many gloo ranks, each a process. An assertion that fails there fails here."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (ranks, Path(folder, "store").as_uri(), work, arguments), nprocs=ranks)


def _rank(rank, ranks, store, work, arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    try:
        work(*arguments)
    finally:
        dist.destroy_process_group()


def mixed():
    """Prompts and answers of many lengths, greedy and sampled, arriving one after another."""
    return [Request([i % VOCAB for i in range(3 * n, 5 * n)], max_new_tokens=3 + n % 7, temperature=n % 2, seed=n, name=f"r{n}", arrival=n // 3)
            for n in range(1, 12)]


@dataclass
class Workload:
    requests: list
    cancels: list
    max_batch: int
    token_budget: int
    max_kv_tokens: int | None

    def knobs(self, stage):
        """Those of the knobs that a stage has."""
        names = ["max_batch", "token_budget", "max_kv_tokens"] if stage in SCHEDULED else ["max_batch"] if stage in BATCHED else []
        return {name: getattr(self, name) for name in names}


@st.composite
def workloads(draw):
    token = st.integers(0, VOCAB - 1)
    budget = draw(st.integers(1, 40))
    length = st.one_of(st.integers(1, 6), st.integers(1, BLOCK_SIZE),
                       st.sampled_from([budget - 1, budget, budget + 1, 2 * budget, BLOCK_SIZE]).map(lambda n: min(max(n, 1), BLOCK_SIZE)))
    requests = []
    for i in range(draw(st.integers(1, 6))):
        n = draw(length)
        requests.append(Request(draw(st.lists(token, min_size=n, max_size=n)), draw(st.integers(1, 12)),
                                draw(st.sampled_from([0.0, 0.0, 0.7, 1.5])), draw(st.sampled_from([None, None, 1, 3])),
                                draw(st.integers(0, 2**32)), draw(st.one_of(st.none(), token)), name=f"r{i}",
                                arrival=draw(st.sampled_from([0, 0, 0, 1, 2, 5, 30]))))
    who = st.integers(0, len(requests) - 1)
    cancels = draw(st.one_of(st.just([]), st.lists(st.tuples(who, who, st.integers(0, 3)), max_size=2)))
    need = max(min(len(r.prompt) + r.max_new_tokens, BLOCK_SIZE) for r in requests)
    return Workload(requests, cancels, draw(st.integers(1, 7)), budget, draw(st.one_of(st.none(), st.integers(need, 3 * need))))
