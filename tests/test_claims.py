"""
What the source documents state about batching, claim by claim (docs/sources.md). Each test is named
after its claim; those of a kind are lines of HELD, COUNTS and RUNS.
"""
import math
import re
import statistics
from dataclasses import replace
from unittest.mock import patch

import prepacking
import pytest
import torch
import torch.distributed as dist
from common import ROOT, STAGES, VOCAB, contract, mixed, toy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from beyond.prepacked import first_fit_decreasing
from beyond.tensor_parallel import all_reduces, shard
from cache import KV
from generate_dynamic import Rectangle
from generate_naive import StaticBatch, columns_for
from generate_ragged import Flat
from model import GPT, GPTConfig
from request import Request, prepare

MODEL = toy(block_size=1000)


def asked(*sizes):
    """Requests for (tokens of the prompt, of the answer); all prompts are different."""
    return [Request([(7 * i + 3 * j + j * j) % VOCAB for j in range(n)], new, name=f"r{i}")
            for i, (n, new) in enumerate(sizes)]


def ready(*lengths, new=8, config=MODEL.config):
    """The same, prepared, with caches."""
    requests = prepare(asked(*((n, new) for n in lengths)), config) if lengths else []
    for request in requests:
        request.kv = KV(request.kv_capacity)
    return requests


def whole(requests):
    """The plan that computes all of their prompts."""
    return [(request, len(request.prompt)) for request in requests]


@torch.inference_mode()
def run(batch, model=MODEL):
    """One forward pass, after which its tokens count as computed. Returns its logits."""
    logits = model(batch.tokens, batch.positions, batch.attend, batch.wanted)
    for request, n in batch.plan:
        request.computed += n
    return logits


def decodes(*lengths):
    """The plan of requests whose cache holds `length` tokens, with exactly one more to compute."""
    requests = ready(*[n + 1 for n in lengths])
    for request in requests:
        run(Flat([(request, len(request.prompt) - 1)]))
    return [(request, 1) for request in requests]


@torch.inference_mode()
def alone(request):
    """The logits for its first token, without caches and layouts."""
    return MODEL(torch.tensor([request.prompt]))[0, -1]


def close(a, b):
    return (a - b).abs().max() <= 1e-10 * b.abs().max()


# --- claims that hold of every run ----------------------------------------------------------------

HELD = [   # claim, and a stage that would give other tokens and logits if it did not hold
    ("H1", "ragged_mask"),    # tokens interact in attention only, where the mask lets them
    ("H3", "unbatched"),      # what is cached stays right, and the last token's logits will do
    ("H6", "chunked"),        # any split gives the same
    ("H7", "naive"),          # rows end in the rightmost column, each at its own position
    ("R4", "ragged_varlen"),  # requests in one stream stay apart
    ("R2", "ragged_varlen"),  # all else gives the same rows whatever is beside them
    ("P2", "prepacked"), ("P3", "prepacked"),               # a triangle for each prompt, from 0 on
    ("P4", "prepacked"),      # caches are unpacked as a padded batch would fill them
    ("I2", "interleaved"),    # one Head for chunks and decodes
    ("I4", "interleaved"),    # without its padding each row goes into its cache
    ("I5", "interleaved")]    # a partial prefill is not sampled from


@pytest.mark.parametrize("claim, stage", HELD)
def test_held_by_the_contract(claim, stage):
    """On any workload: test_contract.py. That each of these mistakes is seen: test_traps.py."""
    together = [replace(request, arrival=0) for request in mixed()]
    contract(stage, "float64", together, dict(max_batch=4, token_budget=7))


# --- counts ---------------------------------------------------------------------------------------

def static(plan):
    requests = [request for request, _ in plan]
    return StaticBatch(requests, KV(columns_for(requests)))


def masked(plan):
    return Flat(plan, attention="mask")


COUNTS = [   # claim, layout, tokens in the caches of decodes, prompts; pads, scores, padded keys
    *(("H2", Flat, [], [n], 0, n * n, 0) for n in (5, 10, 20)),   # quadratic in n
    ("H7", static, [], [3, 9, 5], 10, 3 * 9 * 9, 10),
    # Linear in n - 1 and in B - 1, not quadratic in both as published; padded keys on top.
    ("H9", Rectangle, [5] * 7, [100], 693, 8 * 100 * 105, 693 + 5),
    ("H9", Rectangle, [5] * 7, [200], 1393, 8 * 200 * 205, 1393 + 5),
    ("H9", Rectangle, [5] * 14, [100], 2 * 693, 15 * 100 * 105, 2 * 693 + 5),
    ("H11", masked, [], [2, 3], 0, 5 * 5, 0),
    # A's scores are half: 900 instead of 100. 60 slots for 40 tokens: 1.5x, not 2x as published.
    ("R1", static, [], [10, 30], 20, 2 * 9 * 10 * 10, 20),
    ("R3", masked, [], [10, 30], 0, 1600, 0),   # 600 of them are wasted:
    *((claim, Flat, [], [10, 30], 0, 1000, 0) for claim in ("R3", "R4")),   # none across requests
    ("R6", Flat, [], [1000], 0, 10**6, 0),      # the same 1,000 tokens
    ("R6", Flat, [], [100] * 10, 0, 10**5, 0),
    # the work grows, so a busy machine is slower; latencies: docs/beyond.md
    *(("P9", static, [], [9] * k, 0, k * 81, 0) for k in (1, 2, 16)),
    ("I1", Rectangle, [22, 15, 9], [8], 21, 4 * 8 * (22 + 8), 21 + (22 - 15) + (22 - 9) + 22),
    ("I6", Rectangle, [], [9], 0, 9 * 9, 0),        # without decodes a plain prefill,
    ("I6", Rectangle, [4, 4, 4], [], 0, 3 * 5, 0)]   # without prefill a plain decode


@pytest.mark.parametrize("claim, layout, pasts, prompts, pads, scores, padded_keys", COUNTS)
def test_counts(claim, layout, pasts, prompts, pads, scores, padded_keys):
    """...and each request gets the logits that it gets alone."""
    plan = decodes(*pasts) + whole(ready(*prompts))
    batch = layout(plan)
    cost = batch.cost()
    assert batch.tokens.numel() - sum(n for _, n in plan) == pads
    assert (cost["score_entries"], cost.get("padded_keys", 0)) == (scores, padded_keys)
    for request, row in zip(batch.sampled, run(batch), strict=True):
        assert close(row, alone(request))


RUNS = [   # claim, stage, prompt and answer of each request, knobs; a count, its value in each pass
    # with a cache, n keys and values instead of n x n; one of each is new
    ("H4", "no_cache", [(10, 8)], {}, "score_entries", [n * n for n in range(10, 18)]),
    ("H4", "no_cache", [(10, 8)], {}, "recomputed", [0, *range(10, 17)]),
    ("H4", "unbatched", [(10, 8)], {}, "score_entries", [100, *range(11, 18)]),
    ("H4", "unbatched", [(10, 8)], {}, "recomputed", [0] * 8),
    ("H6", "chunked", [(7, 1)], {"token_budget": 4}, "useful", [4, 3]),   # 7 / 4 chunks, rounded up
    # decodes first, then chunks: the budget is full until D's last token
    ("H12", "interleaved", [(3, 5), (2, 3), (9, 2), (4, 2)], {"max_batch": 3, "token_budget": 6},
     "useful", [6, 6, 6, 6, 2]),
    ("H8", "naive", [(3, 2), (3, 5), (3, 10)], {}, "finished_slots", [0] * 2 + [1] * 3 + [2] * 5),
    ("H8", "dynamic", [(3, 2), (3, 5), (3, 10)], {}, "finished_slots", [0] * 10),
    ("R3", "ragged_mask", [(10, 1), (30, 1)], {}, "score_entries", [1600]),
    ("R3", "ragged_mask", [(10, 1), (30, 1)], {}, "useful_scores", [520]),
    # a fused step is one model call where chunked prefill makes two
    ("I3", "chunked", [(3, 4), (10, 1)], {"token_budget": 6}, "step", [0, 1, 1, 2, 2, 3]),
    ("I3", "interleaved", [(3, 4), (10, 1)], {"token_budget": 6}, "step", [0, 1, 2, 3])]


@pytest.mark.parametrize("claim, stage, sizes, knobs, count, expected", RUNS)
def test_runs(claim, stage, sizes, knobs, count, expected):
    passes = STAGES[stage](MODEL, asked(*sizes), **knobs).passes
    assert [getattr(p, count) for p in passes] == expected


def test_every_claim_of_the_documents_is_tested():
    claims = re.findall(r"^\| ([HRPI]\d+) \| .+ \| .+ \| `\w+` \|$",
                        (ROOT / "docs" / "sources.md").read_text(encoding="utf-8"), re.M)
    tested = re.findall(r"_([HRPI]\d+)(?=_)", " ".join(globals()))
    assert {*claims} == {*tested, *(row[0] for row in HELD + COUNTS + RUNS)}


# --- H, R: what things weigh ----------------------------------------------------------------------

def test_H2_H5_keys_and_values_are_of_equal_length_and_2_L_A_H_values_a_token():
    request, = ready(20)
    run(Flat([(request, 20)]))
    k, v = request.kv.read(0, 20)
    assert k.shape == v.shape == (3, 20, 5) and request.kv.bytes_per_token == 2 * 3 * 3 * 5 * 8
    kv, k = KV(1), torch.zeros(32, 1, 128, dtype=torch.float16)   # Llama-2-7B in fp16
    kv.write(0, 0, k, k)
    assert kv.k[0].numel() + kv.v[0].numel() == 8192 and kv.bytes_per_token == 16 * 1024
    for layer in range(1, 32):
        kv.write(layer, 0, k, k)
    assert kv.bytes_per_token == 512 * 1024


@pytest.mark.thorough
def test_H10_static_shapes_force_padding_and_today_a_compile_need_not_be_static():
    """True of a static compile: each number of tokens is another one. Not with dynamic=True."""
    from torch._dynamo.testing import CompileCounter
    for dynamic, compiles in (False, 2), (True, 1):
        torch._dynamo.reset()
        counter = CompileCounter()
        compiled = torch.compile(MODEL.h[0].mlp, backend=counter, dynamic=dynamic)
        for n in 3, 8:
            compiled(torch.randn(n, 15, dtype=torch.float64))
        assert counter.frame_count == compiles


def test_H11_ragged_batching_has_no_padding_and_a_block_diagonal_causal_mask():
    batch = masked(whole(ready(2, 3)))   # the same outputs: COUNTS
    assert batch.cu_seqlens == [0, 2, 5]
    assert batch.mask.int().tolist() == [[1, 0, 0, 0, 0],
                                         [1, 1, 0, 0, 0],
                                         [0, 0, 1, 0, 0],
                                         [0, 0, 1, 1, 0],
                                         [0, 0, 1, 1, 1]]


def test_R5_16_all_reduces_for_8_layers_whatever_is_in_the_batch():
    """Two per block. ("16 sync events per block" is wrong as published: it is 16 per pass.)"""
    # a group that sends nothing; real ones: test_tensor_parallel
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        config = GPTConfig(1000, VOCAB, n_layer=8, n_head=4, n_embd=16)
        model = shard(GPT(config).requires_grad_(False))
        for tokens, n in (10, 1), (1000, 1), (1000, 50), (50, 50):
            model.traffic.reset()
            with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as sent:
                assert all_reduces(model, tokens, n) == sent.call_count == 16
            assert model.traffic.bytes == 16 * tokens * 16 * 4   # [N x hidden] each, 4-byte numbers
        request, = ready(10)
        run(Flat([(request, 10)]), model)
        assert request.kv.k[0].shape == (2, 17, 4)   # half of the heads: a rank keeps its own K/V
    finally:
        dist.destroy_process_group()


def test_R7_batching_helps_the_weights_not_the_cache():
    """Operations for each byte read, in a decode step of B requests with S tokens each."""
    model = GPT(GPTConfig(512, 128, n_layer=2, n_head=2, n_embd=16)).requires_grad_(False)
    weights = sum(p.nbytes for name, p in model.named_parameters()   # that the step reads
                  if p.dim() == 2 and name != "wpe.weight")
    for B, S in (1, 10), (1, 300), (8, 300), (32, 300):
        requests = ready(*[S] * B, new=1, config=model.config)
        for request in requests:
            request.computed = S - 1
        with FlopCounterMode(display=False) as counter:
            run(Flat([(request, 1) for request in requests]), model)
        operations = counter.get_flop_counts()["Global"]
        attention = operations.pop(torch.ops.aten.bmm)
        cache = sum(S * request.kv.bytes_per_token for request in requests)
        assert attention / cache == 0.5                         # in float32, whatever B and S
        assert sum(operations.values()) / weights == B / 2      # rises with the rows


# --- P: prepacking --------------------------------------------------------------------------------

def test_P1_first_fit_decreasing_into_rows_of_the_longest_prompt():
    """
    And packing is negligible: the rows looked at, at a generous 100 ns each, take under a hundredth
    of the arithmetic saved, for the smallest GPT-2 at 1 TFLOP/s. "O(k log k)" holds for a search
    tree; the plain loop looks at up to k r rows.
    """
    assert first_fit_decreasing([2, 6, 4, 3, 1], 6) == [[1], [2, 0], [3, 4]]
    assert first_fit_decreasing([12, 10, 9, 1], 20) == [[0, 3], [1, 2]]   # 1 fits best beside 10, 9
    for k in 16, 64, 1000:
        lengths = prepacking.lengths_of("uniform", k)
        m = max(lengths)
        r = len(first_fit_decreasing(lengths, m))
        assert k * r * 100e-9 < 2 * 85e6 * (k - r) * m / 1e12 / 100


def shapes_of(method, lengths, k):
    group, layout = prepacking.METHODS[method]
    return [tuple(layout(part, None).tokens.shape) for part in group(ready(*lengths), k)]


def slots(method, lengths, k=16):
    return sum(math.prod(shape) for shape in shapes_of(method, lengths, k))


def test_P5_the_baselines():
    """
    Full batching pads to the longest, length-ordered sorts all prompts first, dataset prepacking
    packs over the whole set.
    """
    shapes = {method: shapes_of(method, [9, 1, 8, 2, 7, 3, 6, 4], 4)
              for method in prepacking.METHODS}
    assert shapes == {"full batching": [(4, 9), (4, 7)],           # 64 slots
                      "length-ordered": [(4, 4), (4, 9)],          # 52
                      "prepacking, batch": [(3, 9), (3, 7)],       # 48
                      "prepacking, dataset": [(4, 9), (1, 4)],     # 40
                      "ragged": [(20,), (20,)]}                    # 40


def test_P6_P10_how_much_packing_gains():
    """
    The paper: 1.6x to 3.5x at k = 16, and as much as padding if r = k. Counted in slots, short,
    skewed kinds of prompts lie in that range, and long ones below it. Sorting by length still pads,
    and packing over the whole set beats it; but not where lengths crowd together just above half of
    the longest, which pack badly, as in our few-shot questions. (docs/beyond.md: the times.)
    """
    for kind in prepacking.KINDS:
        lengths = prepacking.lengths_of(kind, 64)
        full, ordered, batch, dataset = (slots(method, lengths) for method in (
            "full batching", "length-ordered", "prepacking, batch", "prepacking, dataset"))
        low, high = (1.6, 3.5) if kind in ("dialogue", "instructions") else (1.001, 1.599)
        assert low <= full / batch <= high and sum(lengths) < ordered, kind
        assert (dataset < ordered) == (kind != "few-shot questions"), kind
    assert slots("full batching", [5, 4, 4, 3]) == slots("prepacking, batch", [5, 4, 4, 3])


@pytest.mark.parametrize("k", [16, 32])
def test_P7_r_over_k_and_m_minus_L_over_k_predict_the_speedup(k):
    lengths = prepacking.lengths_of("uniform", 40 * k)
    shapes = shapes_of("prepacking, batch", lengths, k)
    padded = shapes_of("full batching", lengths, k)
    assert 0.55 < statistics.mean(r / k for r, m in shapes) < 0.62
    gaps = [m - sum(lengths[i * k:(i + 1) * k]) / k for i, (r, m) in enumerate(shapes)]
    speedups = [math.prod(a) / math.prod(b) for a, b in zip(padded, shapes)]
    assert speedups == [k / r for r, m in shapes]
    assert statistics.correlation(gaps, speedups) > 0.8


@torch.inference_mode()
def peak_bytes(method, lengths):
    """The peak of memory while one batch of these prompts prefills."""
    from torch.distributed._tools.mem_tracker import MemTracker  # brings a compiler along
    group, layout = prepacking.METHODS[method]
    one_batch, = group(ready(*lengths, new=1), len(lengths))
    model = GPT(MODEL.config)   # the tracker wants parameters that have a gradient
    with MemTracker() as tracker:
        run(layout(one_batch, model.device), model)
    return tracker.get_tracker_snapshot("peak")[model.device]["Total"]


def test_P8_peak_memory_falls_with_the_pad_tokens():
    lengths = prepacking.lengths_of("instructions", 24)
    full, packing, ragged = (peak_bytes(method, lengths[:16])
                             for method in ("full batching", "prepacking, batch", "ragged"))
    assert ragged < packing < 0.6 * full
    assert peak_bytes("prepacking, batch", lengths) <= full   # a batch of 24 instead of 16


# --- I: adding interleaving to nanoGPT ------------------------------------------------------------

def fused():
    """The source's example: A, B, C decode at 22, 15, 9, and D brings 8 tokens of its prompt."""
    return [*decodes(22, 15, 9), (ready(12)[0], 8)]


def test_I1_the_fused_rectangle():
    assert Rectangle(fused()).positions.tolist() == [
        [0] * 7 + [22], [0] * 7 + [15], [0] * 7 + [9], list(range(8))]
    # wrong as published: 22 tokens are at position 21 by the source's own formula, len - 1
    (request, _), = plan = decodes(21)
    assert len(request.tokens) == 22 and Rectangle(plan).positions.tolist() == [[21]]


def test_I7_completed_prompt_blocks_are_reused_by_later_requests_with_the_same_prefix():
    stem = [1, 2, 3, 4, 5, 6, 7, 8, 9]   # two full pages of 4, and a token of a third
    requests = [Request(stem + [10], 3), Request(stem + [11, 12], 3, name="later")]
    trace = STAGES["prefix"](MODEL, requests, max_batch=1, page_size=4)
    assert min(start for p in trace.passes for name, start, _ in p.work if name == "later") == 8


def test_I8_wrong_as_published_all_new_slots_marked_valid():
    """The source's own mask on its own example: the decode rows attend to their pads."""
    published = Rectangle(fused())
    published.mask[..., published.P:] = True
    wrong, right = run(published), run(Rectangle(fused()))
    expected = torch.stack([alone(request) for request, _ in fused()[:3]])
    assert close(right, expected)
    error = (wrong - expected).abs().max() / expected.abs().max()
    assert error > 0.1
    assert (wrong.argmax(dim=-1) != expected.argmax(dim=-1)).any()   # and a greedy token flips
