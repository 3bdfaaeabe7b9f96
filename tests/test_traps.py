"""
The bugs that published tutorials contain. Each is put back here, and the same assertion that our code passes
must fail on it. A mutant is a function of pytest's monkeypatch; TRAPS lists the stages it is put into.
"""
import functools
import math
import random
from dataclasses import replace

import pytest
import torch
from common import BLOCK_SIZE, SCHEDULED, STAGES, VOCAB, alone, assert_contract, toy

import cache
import generate_chunked
import generate_dynamic
import generate_interleaved
import generate_naive
import generate_prepacked
import generate_ragged
import generate_unbatched
from model import Head, sample
from scheduler import Request, Scheduler

MODEL = toy()
MODULES = (generate_unbatched, generate_naive, generate_dynamic, generate_chunked, generate_interleaved, generate_prepacked, generate_ragged)
RECTANGLES = ("dynamic", "chunked", "interleaved")


def workload():
    """Long and short prompts, greedy and sampled, some late: with a budget of 8 there are chunks, decodes and both together."""
    rng = random.Random(1)
    return [Request([rng.randrange(VOCAB) for _ in range(n)], 6, temperature, seed=n, name=f"r{i}", arrival=i // 3)
            for i, (n, temperature) in enumerate([(3, 0.0), (17, 0.0), (1, 1.0), (11, 1.0), (2, 0.0), (20, 1.0), (9, 0.0), (8, 1.0)])]


def run(stage, requests=None, **knobs):
    assert_contract(MODEL, STAGES[stage], requests or workload(), max_batch=4, **({"token_budget": 8, **knobs} if stage in SCHEDULED else {}))


PACKED = set()   # mutants of the layout Packed alone

# --- the mutants ------------------------------------------------------------------------------------------------------

def in_layout(change):
    """A mutant that changes each Rectangle, Packed or Flat after it was made."""
    @functools.wraps(change)
    def mutate(monkeypatch):
        for module in MODULES:
            for name in ("Packed",) if change in PACKED else ("Rectangle", "Flat"):
                if hasattr(module, name):
                    def mutant(*args, original=getattr(module, name), **kwargs):
                        layout = original(*args, **kwargs)
                        change(layout)
                        return layout
                    monkeypatch.setattr(module, name, mutant)
    return mutate


def in_every_stage(name, mutant):
    def mutate(monkeypatch):
        for module in MODULES:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, mutant)
    return mutate


@in_layout
def new_slots_are_all_valid(batch):
    """Trap 1: the padding mask covers the past only, as published."""
    batch.mask[..., batch.P:] = True


@in_layout
def past_slots_are_all_valid(batch):
    """Trap 1, its other half: the padding of the past is not hidden."""
    batch.mask[..., :batch.P] = True


def no_causal_rule_in_a_continuation_chunk(monkeypatch):
    """Trap 2: with a past, all new tokens see each other."""
    def forward(self, q, k, v, past_k=None, past_v=None, mask=None):
        if past_k is not None:
            k, v = torch.cat([past_k, k], dim=-2), torch.cat([past_v, v], dim=-2)
        T, S = q.size(-2), k.size(-2)
        see = torch.ones(T, S, dtype=torch.bool)
        see = see if S > T else see.tril()
        see = see if mask is None else see & mask
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).masked_fill(~see, -math.inf).softmax(dim=-1)
        return (weights @ v).masked_fill(~see.any(dim=-1, keepdim=True), 0.0), k, v
    monkeypatch.setattr(Head, "forward", forward)


def causal_rule_from_the_top_left(monkeypatch):
    """Trap 2: the triangle at diagonal 0 instead of S - T, as scaled_dot_product_attention's is_causal has it."""
    def forward(self, q, k, v, past_k=None, past_v=None, mask=None):
        if past_k is not None:
            k, v = torch.cat([past_k, k], dim=-2), torch.cat([past_v, v], dim=-2)
        see = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril()
        see = see if mask is None else see & mask
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).masked_fill(~see, -math.inf).softmax(dim=-1)
        return (weights @ v).masked_fill(~see.any(dim=-1, keepdim=True), 0.0), k, v
    monkeypatch.setattr(Head, "forward", forward)


def nan_for_a_query_without_keys(monkeypatch):
    """Trap 3: softmax over a row of -inf."""
    def forward(self, q, k, v, past_k=None, past_v=None, mask=None):
        if past_k is not None:
            k, v = torch.cat([past_k, k], dim=-2), torch.cat([past_v, v], dim=-2)
        see = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril(k.size(-2) - q.size(-2))
        see = see if mask is None else see & mask
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).masked_fill(~see, -math.inf).softmax(dim=-1)
        return weights @ v, k, v
    monkeypatch.setattr(Head, "forward", forward)


def padding_is_not_zeroed(monkeypatch):
    """Trap 3: a NaN in a masked key or value; what uninitialised memory may well hold."""
    def new_nan(self, *shape):
        return self.new_full(shape, math.nan)
    monkeypatch.setattr(torch.Tensor, "new_zeros", new_nan)


@in_layout
def positions_of_the_column(batch):
    """Trap 4: every row counts like the longest."""
    batch.positions[:] = batch.positions.max(dim=0).values


def static_positions_of_the_column(monkeypatch):
    """Trap 4 in the static batch."""
    def lay_out(self, rows, original=generate_naive.StaticBatch.lay_out):
        original(self, rows)
        self.positions = torch.arange(self.start, self.end).clamp(max=BLOCK_SIZE - 1).expand_as(self.tokens)
    monkeypatch.setattr(generate_naive.StaticBatch, "lay_out", lay_out)


def static_padding_on_the_right(monkeypatch):
    """Claim H7: with the padding on the right the last column is a pad for all rows but the longest."""
    def lay_out(self, rows, original=generate_naive.StaticBatch.lay_out):
        if self.start == 0:
            rows = [row[pad:] + row[:pad] for row, pad in zip(rows, self.pads.tolist())]
        original(self, rows)
    monkeypatch.setattr(generate_naive.StaticBatch, "lay_out", lay_out)


def of_packed(change):
    PACKED.add(change)
    return in_layout(change)


@of_packed
def packed_prompts_see_their_neighbours(batch):
    """Claim P2: the causal rule alone, over the whole row."""
    batch.mask[:] = True


@of_packed
def packed_positions_run_on(batch):
    """Claim P3: the second prompt of a row does not start at 0 again."""
    batch.positions[:] = torch.arange(batch.positions.size(1))


@of_packed
def caches_in_packed_order(batch):
    """Trap 11: the k-th request gets the k-th prompt in the order of the rows."""
    batch.places.sort()


@of_packed
def one_token_prompts_are_lost(batch):
    """Trap 11: prompts are found again as runs of rising positions, by where a run starts; one token is no run."""
    def attend(layer, q, k, v, original=batch.attend):
        out = original(layer, q, k, v)
        for request, n in batch.plan:
            if n == 1:
                request.kv.write(layer, 0, torch.zeros_like(k[0, :, :1]), torch.zeros_like(v[0, :, :1]))
        return out
    batch.attend = attend


def draws_for_a_partial_prefill(monkeypatch):
    """Trap 5: the result is thrown away, but the request's random stream has moved on."""
    def report(self, plan, tokens, original=Scheduler.report):
        for request, n in plan:
            if n < request.todo:
                request.draw()
        original(self, plan, tokens)
    monkeypatch.setattr(Scheduler, "report", report)


def samples_from_a_partial_prefill(monkeypatch):
    """Trap 5: whoever is in the pass gets a token."""
    def change(batch):
        batch.sampled = [request for request, _ in batch.plan]
        if isinstance(batch, cache.Flat):
            batch.rows = torch.tensor(batch.cu_seqlens[1:]) - 1
        else:
            batch.rows = (torch.arange(len(batch.plan)), -1)

    def report(self, plan, tokens):
        for (request, n), token in zip(plan, tokens):
            request.computed += n
            request.append(token)
        self.release()
    in_layout(change)(monkeypatch)
    monkeypatch.setattr(Scheduler, "report", report)


def more_decodes_than_budget(monkeypatch):
    """Trap 6: max_batch alone limits who runs."""
    def init(self, max_batch, token_budget, max_kv_tokens=None, original=Scheduler.__init__):
        original(self, max_batch, token_budget, max_kv_tokens)
        self.max_running = max_batch
    monkeypatch.setattr(Scheduler, "__init__", init)


def admits_what_can_never_fit(monkeypatch):
    """Trap 7: no look at the KV budget before the request is queued."""
    def add(self, request):
        self.waiting.append(request)
    monkeypatch.setattr(Scheduler, "add", add)


def no_end_at_the_context_limit(monkeypatch):
    """Trap 7: goes on until max_new_tokens."""
    def append(self, token):
        self.generated.append(token)
        if token == self.eos_token or len(self.generated) == self.max_new_tokens:
            self.finish_reason = "stop" if token == self.eos_token else "length"
    monkeypatch.setattr(Request, "append", append)


def chunk_reads_to_the_end_of_the_prompt(monkeypatch):
    """Trap 8: the keys of a chunk end with the prompt, so it reads what is not written yet."""
    def change(batch):
        if isinstance(batch, cache.Flat):
            batch.ends = [max(end, len(request.prompt)) for end, (request, _) in zip(batch.ends, batch.plan)]
    in_layout(change)(monkeypatch)


def end_of_text_only_after_the_first_token(monkeypatch):
    """Trap 10: the first token comes from the prefill, and nobody looks whether it ends the request."""
    def append(self, token, original=Request.append):
        eos, self.eos_token = self.eos_token, self.eos_token if self.generated else None
        original(self, token)
        self.eos_token = eos
    monkeypatch.setattr(Request, "append", append)


def one_token_more_than_asked_for(monkeypatch):
    """Trap 10: the limit is looked at before the token is counted."""
    def append(self, token, original=Request.append):
        self.max_new_tokens += 1
        original(self, token)
        self.max_new_tokens -= 1
    monkeypatch.setattr(Request, "append", append)


def first_token_broadcast_to_all(monkeypatch):
    """Trap 12."""
    in_every_stage("sample", lambda logits, requests: [token for token in sample(logits, requests)[:1] for _ in requests])(monkeypatch)


def one_random_stream_for_all(monkeypatch):
    """Trap 12."""
    shared = random.Random(0)
    monkeypatch.setattr(Request, "draw", lambda self: shared.random())


TRAPS = [
    (new_slots_are_all_valid, RECTANGLES),
    (past_slots_are_all_valid, (*RECTANGLES, "prepacked")),
    (no_causal_rule_in_a_continuation_chunk, ("chunked", "interleaved", "ragged_varlen")),   # the flat mask has a causal rule of its own
    (causal_rule_from_the_top_left, ("unbatched", "naive", "prepacked", *RECTANGLES, "ragged_varlen", "ragged_mask")),
    (nan_for_a_query_without_keys, ("naive", "prepacked", *RECTANGLES)),
    (padding_is_not_zeroed, (*RECTANGLES, "prepacked")),
    (packed_prompts_see_their_neighbours, ("prepacked", "prepacked_dataset")),
    (packed_positions_run_on, ("prepacked", "prepacked_dataset")),
    (caches_in_packed_order, ("prepacked",)),   # dataset packing admits in the order of the rows
    (one_token_prompts_are_lost, ("prepacked", "prepacked_dataset")),
    (positions_of_the_column, RECTANGLES),
    (static_positions_of_the_column, ("naive",)),
    (static_padding_on_the_right, ("naive",)),
    (draws_for_a_partial_prefill, SCHEDULED),
    (samples_from_a_partial_prefill, SCHEDULED),
    (no_end_at_the_context_limit, tuple(STAGES)),
    (chunk_reads_to_the_end_of_the_prompt, ("ragged_varlen",)),
    (end_of_text_only_after_the_first_token, tuple(STAGES)),
    (one_token_more_than_asked_for, tuple(STAGES)),
    (first_token_broadcast_to_all, ("naive", "prepacked", *RECTANGLES, "ragged_mask", "ragged_varlen")),
    (one_random_stream_for_all, tuple(STAGES)),
]
CASES = {   # a trap that needs more than the workload above
    no_end_at_the_context_limit: lambda: [Request([1, 2, 3], 40)],
    caches_in_packed_order: lambda: [Request([n] * n, 9, name=f"r{n}") for n in (3, 2, 5, 4)],   # each fits where the other should be
    end_of_text_only_after_the_first_token: lambda: [replace(r, eos_token=alone(MODEL, r)[0][0]) for r in workload()],
}

FAILS = {   # a mutant that does not come as far as a wrong token
    nan_for_a_query_without_keys: ValueError,              # sample refuses NaN
    padding_is_not_zeroed: ValueError,
    no_end_at_the_context_limit: (IndexError, ValueError)  # there is no such position, no such place in the cache
}


@pytest.mark.parametrize("stage, mutant", [(stage, mutant) for mutant, stages in TRAPS for stage in stages],
                         ids=lambda value: getattr(value, "__name__", value))
def test_trap(stage, mutant, monkeypatch):
    cases = CASES.get(mutant, workload)
    if stage in ("no_cache", "unbatched"):
        def check():
            assert_contract(MODEL, STAGES[stage], cases())
    else:
        def check():
            run(stage, cases())
    check()                                                   # ours
    oracle = {r.name: alone(MODEL, r) for r in named(cases())}
    monkeypatch.setattr("common.alone", lambda model, request: oracle[request.name])   # the mutant must not reach it
    mutant(monkeypatch)
    with pytest.raises(FAILS.get(mutant, AssertionError)):
        check()


def named(requests):
    for i, request in enumerate(requests):
        request.name = request.name or f"r{i}"
    return requests


# --- the Scheduler's traps show in its plans --------------------------------------------------------------------------

def drive(max_batch, token_budget, sizes, max_kv_tokens=None):
    """Runs a Scheduler with no model, asserting that each step makes progress within its budget; returns the steps taken."""
    scheduler = Scheduler(max_batch, token_budget, max_kv_tokens)
    for i, (prompt, new) in enumerate(sizes):
        request = Request([0] * prompt, new, name=f"r{i}")
        request.block_size = BLOCK_SIZE
        scheduler.add(request)
    steps = 0
    while scheduler.busy:
        plan = scheduler.schedule(steps)
        assert 0 < sum(n for _, n in plan) <= token_budget, "the budget is exceeded, or nothing is left to do but wait"
        if any(request.todo > 1 for request in scheduler.running):
            assert any(request.todo > 1 for request, _ in plan), "a prefill starves behind decodes"
        scheduler.report(plan, [0] * len(plan))
        steps += 1
    return steps


@pytest.mark.parametrize("budget", [1, 2, 3, 8])
def test_trap_6_no_prefill_starves_behind_decodes(budget, monkeypatch):
    sizes = [(1, 9), (2, 9), (7, 9), (5, 9), (3, 9), (20, 4), (11, 9), (1, 9), (1, 9), (9, 9)] * 3
    drive(20, budget, sizes)
    more_decodes_than_budget(monkeypatch)
    with pytest.raises(AssertionError, match="starves|budget"):
        drive(20, budget, sizes)


def test_trap_7_a_request_that_can_never_fit_is_refused_by_name_with_the_numbers(monkeypatch):
    with pytest.raises(ValueError, match="request 'r1'.* 9 .* 7 needs 16 KV tokens, max_kv_tokens is 15"):
        drive(4, 8, [(3, 3), (9, 7)], max_kv_tokens=15)
    drive(4, 8, [(3, 3), (9, 7)], max_kv_tokens=16)
    drive(4, 8, [(3, 3), (9, 10**9)], max_kv_tokens=BLOCK_SIZE)   # the context ends it, so that is all it can need
    admits_what_can_never_fit(monkeypatch)
    with pytest.raises(RuntimeError, match="nothing can go on"):
        drive(4, 8, [(3, 3), (9, 7)], max_kv_tokens=15)


def test_trap_13_a_quiet_test_model_hides_the_bugs(monkeypatch):
    """At plain initialisation the mutant of trap 1 changes no token; the loud toy sees it at once."""
    quiet = toy(loud=False)
    greedy = [replace(request, temperature=0.0, max_new_tokens=12) for request in workload()]
    repeats = [alone(quiet, request)[0] for request in greedy]
    assert sum(len(set(tokens)) == 1 for tokens in repeats) >= len(repeats) - 1   # one token for ever
    assert all(len(set(alone(MODEL, request)[0])) > 3 for request in greedy if len(request.prompt) < 12)
    new_slots_are_all_valid(monkeypatch)
    requests = [replace(request) for request in greedy]
    STAGES["interleaved"](quiet, requests, max_batch=4, token_budget=8)
    assert [request.generated for request in requests] == repeats
    requests = [replace(request) for request in greedy]
    STAGES["interleaved"](MODEL, requests, max_batch=4, token_budget=8)
    assert [request.generated for request in requests] != [alone(MODEL, request)[0] for request in greedy]
