"""
The bugs that published tutorials contain. Each is put back here, and the assertion that our code
passes must fail on it. A mutant is a function of pytest's monkeypatch; TRAPS lists the stages that
it is put into.
"""
import functools
import math
import random
from dataclasses import replace

import pytest
import torch
from common import BLOCK_SIZE, RAGGED, SCHEDULED, STAGES, VOCAB, alone, assert_contract, toy

import generate_chunked
import generate_dynamic
import generate_interleaved
import generate_naive
import generate_paged
import generate_prepacked
import generate_ragged
import generate_unbatched
from generate_dynamic import Rectangle
from generate_naive import StaticBatch
from generate_paged import Paged
from generate_prepacked import Packed
from generate_ragged import Flat
from model import Head, sample
from paging import PagedScheduler, Pages
from request import Request
from scheduler import Scheduler
from toolbox.traps import swapped

MODEL = toy()
MODULES = (generate_unbatched, generate_naive, generate_dynamic, generate_chunked,
           generate_interleaved, generate_prepacked, generate_ragged, generate_paged)
RECTANGLES = ("dynamic", "chunked", "interleaved")


def workload():
    """
    Long and short prompts, greedy and sampled, some late: with a budget of 8 there are chunks,
    decodes and both together.
    """
    rng, cases = random.Random(1), [(3, 0.0), (17, 0.0), (1, 1.0), (11, 1.0), (2, 0.0), (20, 1.0),
                                    (9, 0.0), (8, 1.0)]
    return [Request([rng.randrange(VOCAB) for _ in range(n)], 6, temperature, seed=n, name=f"r{i}",
                    arrival=i // 3) for i, (n, temperature) in enumerate(cases)]


def check(stage, requests, **knobs):
    """The contract; with knobs under which chunks, sharing, preemption and scattering happen."""
    few = dict(token_budget=8) if stage in SCHEDULED else {}
    if stage == "paged":
        few |= dict(pages=10, page_size=3)
    if stage not in ("no_cache", "unbatched"):
        few |= dict(max_batch=4)
    return assert_contract(MODEL, STAGES[stage], requests, **{**few, **knobs})


# --- the mutants ----------------------------------------------------------------------------------

def in_layout(*layouts):
    """Makes a mutant of a change to each of these layouts, after it has been laid out."""
    def of(change):
        @functools.wraps(change)
        def mutate(monkeypatch):
            for layout in layouts:
                def lay_out(self, *args, original=layout.lay_out):
                    original(self, *args)
                    change(self)
                monkeypatch.setattr(layout, "lay_out", lay_out)
        return mutate
    return of


def in_every_stage(name, mutant):
    def mutate(monkeypatch):
        for module in MODULES:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, mutant)
    return mutate


@in_layout(Rectangle)
def new_slots_are_all_valid(batch):
    """Trap 1: the padding mask covers the past only, as published."""
    batch.mask[..., batch.P:] = True


@in_layout(Rectangle)
def past_slots_are_all_valid(batch):
    """Trap 1, its other half: the padding of the past is not hidden."""
    batch.mask[..., :batch.P] = True


def head(triangle, blank_rows=0.0):
    """A Head's forward with another triangle(T, S), and something else for rows without a key."""
    def forward(self, q, k, v, past_k=None, past_v=None, mask=None):
        if past_k is not None:
            k, v = torch.cat([past_k, k], dim=-2), torch.cat([past_v, v], dim=-2)
        see = triangle(q.size(-2), k.size(-2))
        see = see if mask is None else see & mask
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        out = scores.masked_fill(~see, -math.inf).softmax(dim=-1) @ v
        return out.masked_fill(~see.any(dim=-1, keepdim=True), blank_rows), k, v
    return forward


def ours(T, S):
    return torch.ones(T, S, dtype=torch.bool).tril(S - T)


def no_causal_rule_in_a_continuation_chunk(monkeypatch):
    """Trap 2: with a past, all new tokens see each other."""
    def triangle(T, S):
        return torch.ones(T, S, dtype=torch.bool) if S > T else ours(T, S)
    monkeypatch.setattr(Head, "forward", head(triangle))


def causal_rule_from_the_top_left(monkeypatch):
    """Trap 2: diagonal 0 instead of S - T, as in scaled_dot_product_attention's is_causal."""
    def triangle(T, S):
        return torch.ones(T, S, dtype=torch.bool).tril()
    monkeypatch.setattr(Head, "forward", head(triangle))


def nan_for_a_query_without_keys(monkeypatch):
    """Trap 3: softmax over a row of -inf."""
    monkeypatch.setattr(Head, "forward", head(ours, blank_rows=math.nan))


def padding_is_not_zeroed(monkeypatch):
    """Trap 3: a NaN in a masked key or value; what uninitialised memory may well hold."""
    def new_nan(self, *shape):
        return self.new_full(shape, math.nan)
    monkeypatch.setattr(torch.Tensor, "new_zeros", new_nan)


@in_layout(Rectangle)
def positions_of_the_column(batch):
    """Trap 4: every row counts like the longest."""
    batch.positions[:] = batch.positions.max(dim=0).values


@in_layout(StaticBatch)
def static_positions_of_the_column(batch):
    """Trap 4 in the static batch."""
    columns = torch.arange(batch.start, batch.end).clamp(max=BLOCK_SIZE - 1)
    batch.positions = columns.expand_as(batch.tokens)


@in_layout(StaticBatch)
def static_padding_on_the_right(batch):
    """Claim H7: with the padding on the right, the last column of all but the longest is a pad."""
    if batch.start == 0:
        rows = zip(batch.tokens, batch.pads.tolist())
        batch.tokens = torch.stack([row.roll(-pad) for row, pad in rows])


@in_layout(Packed)
def packed_prompts_see_their_neighbours(batch):
    """Claim P2: the causal rule alone, over the whole row."""
    batch.mask[:] = True


@in_layout(Packed)
def packed_positions_run_on(batch):
    """Claim P3: the second prompt of a row does not start at 0 again."""
    batch.positions[:] = torch.arange(batch.positions.size(1))


@in_layout(Packed)
def caches_in_packed_order(batch):
    """Trap 11: the k-th request gets the k-th prompt in the order of the rows."""
    batch.places.sort()


@in_layout(Packed)
def one_token_prompts_are_lost(batch):
    """
    Trap 11: prompts are found again as runs of rising positions, by where a run starts. One token
    is no run.
    """
    def attend(layer, q, k, v, original=batch.attend):
        out = original(layer, q, k, v)
        for request, n in batch.plan:
            if n == 1:
                nothing = torch.zeros_like(k[0, :, :1])
                request.kv.write(layer, 0, nothing, nothing)
        return out
    batch.attend = attend


def draws_for_a_partial_prefill(monkeypatch):
    """Trap 5: the result is thrown away, but the request's random stream has moved on."""
    def update(self, plan, tokens, original=Scheduler.update):
        for request, n in plan:
            if n < request.todo:
                request.draw()
        original(self, plan, tokens)
    monkeypatch.setattr(Scheduler, "update", update)


def samples_from_a_partial_prefill(monkeypatch):
    """Trap 5: every request in the pass gets a token."""
    @in_layout(Rectangle, Flat)
    def change(batch):
        batch.sampled = [request for request, _ in batch.plan]
        batch.rows = (torch.tensor(batch.cu_seqlens[1:]) - 1 if isinstance(batch, Flat)
                      else (torch.arange(len(batch.plan)), -1))

    def update(self, plan, tokens):
        for (request, n), token in zip(plan, tokens):
            request.computed += n
            request.append(token)
        self.release()
    change(monkeypatch)
    monkeypatch.setattr(Scheduler, "update", update)


def more_decodes_than_budget(monkeypatch):
    """Trap 6: max_batch alone limits how many requests run."""
    def admit(self, step):
        while len(self.running) < self.max_batch:
            if not self.arrived(step) or not self.grant_room(self.waiting[0]):
                break
            self.running.append(self.waiting.popleft())
    monkeypatch.setattr(Scheduler, "admit", admit)


def admits_what_can_never_fit(monkeypatch):
    """Trap 7: no look at the memory limit before the request is queued."""
    def add(self, request):
        self.waiting.append(request)
    monkeypatch.setattr(Scheduler, "add", add)
    monkeypatch.setattr(PagedScheduler, "add", add)


def no_end_at_the_context_limit(monkeypatch):
    """Trap 7: goes on until max_new_tokens."""
    def append(self, token):
        self.generated.append(token)
        if token == self.eos_token or len(self.generated) == self.max_new_tokens:
            self.finish_reason = "stop" if token == self.eos_token else "length"
    monkeypatch.setattr(Request, "append", append)


@in_layout(Flat)
def chunk_reads_to_the_end_of_the_prompt(batch):
    """Trap 8: the keys of a chunk end with the prompt, so it reads what is not written yet."""
    batch.ends = [max(end, len(request.prompt))
                  for end, (request, _) in zip(batch.ends, batch.plan)]


@in_layout(Paged)
def paged_chunk_reads_to_the_end_of_the_prompt(batch):
    """Trap 8 in pages, which have been granted for the whole prompt already."""
    batch.spans = [torch.tensor(batch.slots(request.kv, 0, max(end, len(request.prompt))))
                   for (request, _), end in zip(batch.plan, batch.ends)]


@in_layout(Paged)
def scattered_pages_are_read_in_one_piece(batch):
    """As many keys as there should be, from the first page on."""
    batch.spans = [slice(request.kv[0] * batch.pages.size, request.kv[0] * batch.pages.size + end)
                   for (request, _), end in zip(batch.plan, batch.ends)]


@in_layout(Paged)
def keys_are_read_in_the_order_of_the_pool(batch):
    """The block table as a set. Attention would not mind the order, but for the causal rule."""
    batch.spans = [torch.tensor(batch.slots(sorted(request.kv), 0, end))
                   for (request, _), end in zip(batch.plan, batch.ends)]


@in_layout(Paged)
def new_keys_are_written_into_the_last_page(batch):
    """As if a pass never filled more than one page of a request."""
    size = batch.pages.size
    batch.slot_mapping = torch.tensor([
        request.kv[-1] * size + p % size for (request, _), start, end
        in zip(batch.plan, batch.starts, batch.ends) for p in range(start, end)])


def end_of_text_only_after_the_first_token(monkeypatch):
    """Trap 10: the first token comes from the prefill, and is not compared with the end of text."""
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
    def broadcast(logits, requests):
        return sample(logits, requests)[:1] * len(requests)
    in_every_stage("sample", broadcast)(monkeypatch)


def one_random_stream_for_all(monkeypatch):
    """Trap 12."""
    shared = random.Random(0)
    monkeypatch.setattr(Request, "draw", lambda self: shared.random())


def stale_count_after_a_preemption(monkeypatch):
    """Trap 9: the preempted request finds some of its pages again, and keeps its old count."""
    def preempt(self, request, original=PagedScheduler.preempt):
        request.stale = request.computed
        original(self, request)

    def grant_room(self, request, original=PagedScheduler.grant_room):
        granted = original(self, request)
        if granted:
            request.computed = max(request.computed, getattr(request, "stale", 0))
        return granted
    monkeypatch.setattr(PagedScheduler, "preempt", preempt)
    monkeypatch.setattr(PagedScheduler, "grant_room", grant_room)


def find_keeps_its_lists(monkeypatch):
    """Not a mutant yet: a pool may keep the lists that it hands out, one per chain of pages."""
    def find(self, tokens, original=Pages.find):
        pages = original(self, tokens)
        return self.__dict__.setdefault("found", {}).setdefault(tuple(pages), pages)
    monkeypatch.setattr(Pages, "find", find)


def block_table_is_an_alias(monkeypatch):
    """Trap 14: `request.kv = known_pages`. A request's own pages are appended to what is known."""
    find_keeps_its_lists(monkeypatch)

    def grant_room(self, request, original=PagedScheduler.grant_room):
        known = self.pages.find(request.tokens[:-1])
        granted = original(self, request)
        if granted and known:
            known += request.kv[len(known):]   # request.kv = known, then new pages are appended
            request.kv = known
        return granted
    monkeypatch.setattr(PagedScheduler, "grant_room", grant_room)


def pages_are_published_after_they_were_given_back(monkeypatch):
    """Trap 15: first the finished requests leave. Then their pages are free *and* published."""
    def update(self, plan, tokens):
        before = [(request, request.kv, request.computed) for request, _ in plan]
        Scheduler.update(self, plan, tokens)
        size = self.pages.size
        for request, table, start in before:
            for i in range(start // size, request.computed // size):
                self.pages.publish(table, i, request.slice(i * size, (i + 1) * size))
    monkeypatch.setattr(PagedScheduler, "update", update)


def pages_known_by(find, publish):
    """A mutant in which another expression stands for a page's name."""
    def mutate(monkeypatch):
        changes = {Pages.find: ("self.name_of[page]", find),
                   Pages.publish: ("self.name_of[table[i - 1]] if i else 0", publish)}
        for function, change in changes.items():
            with swapped(function, [change]):
                code = function.__code__
            monkeypatch.setattr(function, "__code__", code)
    return mutate


# Trap 16: the right words after the wrong beginning; and behind a page that has been used again
pages_known_by_their_own_tokens = pages_known_by("0", "0")
pages_known_by_a_number = pages_known_by("page + 1", "table[i - 1] + 1 if i else 0")


TRAPS = [
    (new_slots_are_all_valid, RECTANGLES),
    (past_slots_are_all_valid, (*RECTANGLES, "prepacked")),
    # "mask" has a causal rule of its own
    (no_causal_rule_in_a_continuation_chunk, ("chunked", "interleaved", "ragged_varlen", "paged")),
    (causal_rule_from_the_top_left, ("unbatched", "naive", "prepacked", *RECTANGLES, *RAGGED,
                                     "paged")),
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
    (paged_chunk_reads_to_the_end_of_the_prompt, ("paged",)),
    (end_of_text_only_after_the_first_token, tuple(STAGES)),
    (one_token_more_than_asked_for, tuple(STAGES)),
    (first_token_broadcast_to_all, ("naive", "prepacked", *RECTANGLES, *RAGGED, "paged")),
    (one_random_stream_for_all, tuple(STAGES)),
    (scattered_pages_are_read_in_one_piece, ("paged",)),
    (keys_are_read_in_the_order_of_the_pool, ("paged",)),
    (new_keys_are_written_into_the_last_page, ("paged",)),
    (stale_count_after_a_preemption, ("paged",)),
    (block_table_is_an_alias, ("paged",)),
    (pages_are_published_after_they_were_given_back, ("paged",)),
    (pages_known_by_their_own_tokens, ("paged",)),
    (pages_known_by_a_number, ("paged",)),
]


def prompts(*rows, new=3, arrivals=None):
    return [Request(row, new, name=f"r{i}", arrival=arrivals[i] if arrivals else 0)
            for i, row in enumerate(rows)]


CASES = {   # a trap that needs more than the workload above
    no_end_at_the_context_limit: lambda: [Request([1, 2, 3], 40)],
    # each prompt fits where another one should be
    caches_in_packed_order: lambda: [Request([n] * n, 9, name=f"r{n}") for n in (3, 2, 5, 4)],
    end_of_text_only_after_the_first_token: lambda: [
        replace(r, eos_token=alone(MODEL, r)[0][0]) for r in workload()],
    stale_count_after_a_preemption: lambda: [
        Request([1, 2, 3, 4, 5, i], 10, 1.0, seed=i, name=f"r{i}") for i in range(4)],
    # the second request finds one page and needs three; then the third looks for the same one
    block_table_is_an_alias: lambda: prompts([1, 2, 9], [1, 2, 3, 4], [1, 2, *range(10)]),
    # the first leaves in the step that fills its pages
    pages_are_published_after_they_were_given_back: lambda: [
        Request([1, 2, 3, 4, 5], 1, name="first"),
        *prompts(*([1, 2, 3, 4, i, i] for i in range(4)), arrivals=[1] * 4)],
    pages_known_by_their_own_tokens: lambda: prompts([1, 2, 3, 4], [3, 4, 7]),
    # The first two compute the same, and only one of their first pages is published. The other one
    # is soon used again, for one of the next three.
    pages_known_by_a_number: lambda: prompts(
        [1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [6, 6], [7, 7], [8, 8],
        [8, 8, 3, 4, 5], [7, 7, 3, 4, 5], [6, 6, 3, 4, 5], new=1,
        arrivals=[0, 0, 1, 1, 1, 2, 2, 2]),
}
KNOBS = {
    stale_count_after_a_preemption: dict(pages=20, page_size=2),
    block_table_is_an_alias: dict(max_batch=1, page_size=2),
    pages_are_published_after_they_were_given_back: dict(pages=6, page_size=2),
    pages_known_by_their_own_tokens: dict(max_batch=1, page_size=2),
    pages_known_by_a_number: dict(pages=6, page_size=2, token_budget=16),
}
FAILS = {   # a mutant that does not get as far as a wrong token
    nan_for_a_query_without_keys: ValueError,               # sample refuses NaN
    padding_is_not_zeroed: ValueError,
    # no such position, no room in the cache, no page
    no_end_at_the_context_limit: (IndexError, ValueError, RuntimeError),
    one_token_more_than_asked_for: (AssertionError, ValueError),
}


@pytest.mark.parametrize("stage, mutant",
                         [(stage, mutant) for mutant, stages in TRAPS for stage in stages],
                         ids=lambda value: getattr(value, "__name__", value))
def test_trap(stage, mutant, monkeypatch):
    cases, knobs = CASES.get(mutant, workload), KNOBS.get(mutant, {})
    check(stage, cases(), **knobs)                            # ours
    oracle = {r.name: alone(MODEL, r) for r in named(cases())}
    # the mutant must not reach the oracle
    monkeypatch.setattr("common.alone", lambda model, request: oracle[request.name])
    mutant(monkeypatch)
    with pytest.raises(FAILS.get(mutant, AssertionError)):
        check(stage, cases(), **knobs)


def named(requests):
    for i, request in enumerate(requests):
        request.name = request.name or f"r{i}"
    return requests


def test_the_workloads_bring_about_what_the_traps_of_pages_need():
    counts = check("paged", workload()).counts
    assert counts["preemptions"] > 1 and counts["evicted_pages"]
    trace = check("paged", CASES[stale_count_after_a_preemption](),
                  **KNOBS[stale_count_after_a_preemption])
    assert trace.counts["preemptions"] and trace.counts["shared_pages"]
    assert sum(p.copied_bytes for p in trace.passes)


def test_a_list_that_find_keeps_is_not_changed(monkeypatch):
    """Ours adds the pages it shares to new ones, and so has a list of its own."""
    find_keeps_its_lists(monkeypatch)
    check("paged", CASES[block_table_is_an_alias](), **KNOBS[block_table_is_an_alias])
    check("paged", workload())


# --- the Scheduler's traps show in its plans ------------------------------------------------------

def drive(scheduler, sizes, arrivals=None, most=1000):
    """
    Runs a scheduler without a model, and asserts that each step makes progress within its budget.
    sizes: (prompt, new tokens) of each request; all tokens are 0. Returns the requests.
    """
    requests = []
    for i, (prompt, new) in enumerate(sizes):
        request = Request([0] * prompt, new, name=f"r{i}", arrival=arrivals[i] if arrivals else 0)
        request.block_size = BLOCK_SIZE
        requests.append(request)
        scheduler.add(request)
    step = steps = 0
    while scheduler.busy:
        step = scheduler.next_step(step)
        plan = scheduler.schedule(step)
        assert 0 < sum(n for _, n in plan) <= scheduler.token_budget, (
            "the budget is exceeded, or nothing is left to do but wait")
        if any(request.todo > 1 for request in scheduler.running):
            assert any(request.todo > 1 for request, _ in plan), "a prefill starves behind decodes"
        sampled = [request for request, n in plan if n == request.todo]
        scheduler.update(plan, [0] * len(sampled))
        for request in sampled:
            request.token_steps.append(step)
        step, steps = step + 1, steps + 1
        assert steps <= most
    return requests


def schedulers(max_batch, token_budget, tokens=None):
    """Both kinds, with the same memory."""
    many = tokens or 10**4
    return [Scheduler(max_batch, token_budget, tokens),
            *(PagedScheduler(max_batch, token_budget, Pages(many // size, size),
                             share_prefixes=share)
              for size in (1, 4) for share in (True, False))]


@pytest.mark.parametrize("budget", [1, 2, 3, 8])
def test_trap_6_no_prefill_starves_behind_decodes(budget, monkeypatch):
    sizes = [(1, 9), (2, 9), (7, 9), (5, 9), (3, 9), (20, 4), (11, 9), (1, 9), (1, 9), (9, 9)] * 3
    for scheduler in schedulers(20, budget):
        drive(scheduler, sizes)
    more_decodes_than_budget(monkeypatch)
    for scheduler in schedulers(20, budget):
        with pytest.raises(AssertionError, match="starves|budget"):
            drive(scheduler, sizes)


def test_trap_7_a_request_that_can_never_fit_is_refused_by_name_with_the_numbers(monkeypatch):
    sizes = [(3, 3), (9, 8)]   # the last token is never computed: 16 places, one page of 16
    with pytest.raises(ValueError, match="request 'r1'.* 9 .* 8 needs 16 KV tokens, "
                                         "max_kv_tokens is 15"):
        drive(Scheduler(4, 8, 15), sizes)
    for size, need, have in (1, 16, 15), (2, 8, 7), (5, 4, 3), (16, 1, 0):
        if have:
            with pytest.raises(ValueError, match=f"request 'r1'.* 9 .* 8 needs {need} pages of "
                                                 f"{size} tokens, pages is {have}"):
                drive(PagedScheduler(4, 8, Pages(have, size)), sizes)
        drive(PagedScheduler(4, 8, Pages(need, size)), sizes)
    drive(Scheduler(4, 8, 16), sizes)
    for scheduler in schedulers(4, 8, tokens=BLOCK_SIZE):   # the context limits what it can need
        drive(scheduler, [(3, 3), (9, 10**9)])
    admits_what_can_never_fit(monkeypatch)
    for scheduler in Scheduler(4, 8, 15), PagedScheduler(4, 8, Pages(2, 5)):
        with pytest.raises(RuntimeError, match="request 'r1' has arrived .* nothing can go on"):
            drive(scheduler, sizes)


def test_trap_9_a_fully_published_prompt_leaves_no_query(monkeypatch):
    """All prompts are equal; the second one finds nearly all of its tokens."""
    def saved(size):
        scheduler = PagedScheduler(1, 8, Pages(8, size))
        drive(scheduler, [(8, 3), (8, 3)])
        return scheduler.counts["saved_tokens"]
    assert [saved(4), saved(3), saved(8)] == [4, 6, 0]

    def find(self, tokens, original=Pages.find):
        return original(self, [*tokens, 0])   # the last token too

    monkeypatch.setattr(Pages, "find", find)
    assert saved(3) == 6
    with pytest.raises(RuntimeError, match="nothing can go on"):   # and no endless loop
        saved(4)


def test_trap_15_a_preempted_request_goes_back_to_its_place_in_the_queue(monkeypatch):
    """The front of the queue says when the next one arrives: that step comes too late for it."""
    def last_step():
        requests = drive(PagedScheduler(2, 8, Pages(6, 1), share_prefixes=False),
                         [(2, 4), (2, 4), (2, 2)], arrivals=[0, 0, 10**6])
        assert requests[2].token_steps == [10**6, 10**6 + 1]
        return requests[1].token_steps[-1]
    assert last_step() < 20

    def preempt(self, request, original=PagedScheduler.preempt):
        original(self, request)
        self.waiting.remove(request)
        self.waiting.append(request)

    monkeypatch.setattr(PagedScheduler, "preempt", preempt)
    assert last_step() > 10**6


def test_trap_13_a_quiet_test_model_hides_the_bugs(monkeypatch):
    """At plain initialisation the mutant of trap 1 changes no token; the loud toy sees it."""
    quiet = toy(loud=False)
    greedy = [replace(r, temperature=0.0, max_new_tokens=12) for r in workload()]
    repeats = [alone(quiet, request)[0] for request in greedy]
    # one token for ever
    assert sum(len(set(tokens)) == 1 for tokens in repeats) >= len(repeats) - 1
    short = [request for request in greedy if len(request.prompt) < 12]
    assert all(len(set(alone(MODEL, request)[0])) > 3 for request in short)
    new_slots_are_all_valid(monkeypatch)

    def generated(model):
        requests = [replace(request) for request in greedy]
        STAGES["interleaved"](model, requests, max_batch=4, token_budget=8)
        return [request.generated for request in requests]

    assert generated(quiet) == repeats
    assert generated(MODEL) != [alone(MODEL, request)[0] for request in greedy]
