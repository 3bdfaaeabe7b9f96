"""What the commands of beyond/ print: what an idea gains, counted or calculated."""
import inspect
import math
import random
import statistics
import sys
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import accumulate, product

import torch

import generate_paged
import generate_prefix
import generate_unbatched
from beyond import hybrid as windows
from beyond import rollout as rollouts
from beyond import sessions as agents
from beyond import speculative as guessing
from beyond.fairness import FairScheduler
from generate_paged import Paged
from lab import flags
from lab.checks.traps import broken
from lab.loading.load import load, set_threads
from lab.loading.workload import PROMPTS, builtin_prompts, make_requests, read_prompts
from lab.simulate.hardware import Engine, gpu_of, shape_of
from lab.views.report import aligned, totals
from model import GPT, GPTConfig
from request import Request
from toolbox.trace import observed


def main(essay, doc, argv=None):
    """Calls `essay`, one of the functions below, and exits. doc: its help's first paragraph"""
    name = f"beyond.{essay.__name__}"
    p = flags.Parser(prog=f"python -m {name}", description=flags.first_paragraph(doc))
    if essay is speculative:
        p.add_argument("model", nargs="?", default="builtin", help="as for the stages")
        p.add_argument("prompts", nargs="?", help="a file of them (default: the built-in ones)")
    sys.exit(p.run(essay, argv) or 0)


# --- ahead, fairness, speculative -----------------------------------------------------------------

def ahead(args):
    """512 passes of 16 decodes with 1,024 keys each, in turns with the host and ahead of it."""
    host, gpu, passes = 2.0, gpu_of("h100"), 512   # host: ms between two passes
    for name in "qwen3-8b", "qwen3-0.6b":
        device = 1e3 * shape_of(name).seconds(gpu, 16, 16, 16 * 1024, 16 * 1024)   # ms of a pass
        in_turns = host + device
        ahead = max(host, device)
        print(f"{name}, H100, {host:g} ms of host, calculated: "
              f"in turns {passes * in_turns / 1e3:.2f} s, busy {device / in_turns:.0%}; "
              f"ahead {passes * ahead / 1e3:.2f} s, busy {device / ahead:.0%}")


def fairness(args):
    """Who is admitted when: the example of its docstring."""
    model = GPT(GPTConfig(block_size=64, vocab_size=2, n_layer=1, n_head=1, n_embd=2))
    print("L is long, a to d are short; all arrive together, L first, and one runs at a time")
    rules = {"first come, first served": ("fcfs", 16), "sjf": ("sjf", 16),
             "sjf, 3 may overtake": ("sjf", 3)}
    for text, (policy, bound) in rules.items():
        requests = [Request([1] * 20, 1, name="L")]
        requests += [Request([1], 1, name=name) for name in "abcd"]
        trace = generate_prefix.generate(
            model, requests, max_batch=1,
            scheduler_class=partial(FairScheduler, policy=policy, bound=bound))
        admitted = [p.work[0][0] for p in trace.passes]   # names: one request is in a pass
        print(f"{text:26}", *admitted)


def speculative(args):
    model, tokenizer = load(args.model)
    set_threads(model)
    prompts = builtin_prompts() if args.prompts is None else read_prompts(args.prompts)
    for batch, t, k in product((8, 1), (0.0, 0.7), (0, 2, 4, 8)):
        requests = make_requests(prompts, tokenizer, max_new_tokens=64, temperature=t, seed=0)
        trace = guessing.generate(model, requests, batch, guesses=k)
        print(f"batch {batch}, temperature {t}, K = {k}: {len(trace.passes)} passes")
    for requests in 1, 8, 32, 64, 256:   # at least one token of each is sampled
        times = pass_on_a100(requests, 5) / pass_on_a100(requests, 1)
        print(f"Llama 2 7B, A100, calculated: batch {requests}, K = 4: a pass x {times:.2f}")


def pass_on_a100(requests, rows):
    """
    Seconds of a pass in which each request, with 512 keys, has so many rows, and all their logits
    are computed. The engine samples only one token of each.
    """
    slots = requests * rows
    shape, gpu = shape_of("llama-2-7b"), gpu_of("a100")
    seconds = shape.seconds(gpu, slots, slots, 512 * slots, 512 * requests)
    return seconds - (slots - requests) * Engine().per_request


# --- kernel ---------------------------------------------------------------------------------------

def kernel(args):
    """Equal tokens and copied bytes; on a GPU, the times of a pass."""
    from beyond import kernel as by_kernel  # it imports Triton
    if by_kernel.triton is None:
        raise ValueError(by_kernel.MISSING)
    on_gpu = torch.cuda.is_available()
    model, tokenizer = load()
    model.to("cuda" if on_gpu else "cpu")
    prompts = builtin_prompts()[:8 if on_gpu else 2]
    tokens = 64 if on_gpu else 3
    asked = make_requests(prompts, tokenizer, max_new_tokens=tokens, temperature=0.7, seed=0)
    traces = []
    logits = []
    for layout in Paged, by_kernel.PagedByKernel:
        requests = [replace(request) for request in asked]
        rows = []
        trace = generate_prefix.generate(
            model, requests, layout=layout, on_token=lambda _, token, row: rows.append(row))
        traces.append(trace)
        logits.append(torch.stack(rows))
    by_loop, by_launch = traces
    equal = sum(a.generated == b.generated for a, b in zip(by_loop.requests, by_launch.requests))
    difference = (logits[0] - logits[1]).abs().max() / logits[0].abs().max()
    print(f"{equal} of {len(asked)} requests got equal tokens; largest difference of their logits "
          f"{difference:.1e} of the largest")
    for name, trace in ("loop", by_loop), ("kernel", by_launch):
        copied = sum(p.copied_bytes for p in trace.passes)
        print(f"{name:7} {len(trace.passes)} passes, {copied:,} bytes of keys and values copied")
    if on_gpu:
        kernel_times(by_kernel.paged_attention)
    else:
        print("Interpreted on the CPU: far slower than the loop. Times are printed on a GPU.")


def kernel_times(attention_by_kernel):
    """Microseconds of one layer's attention on a GPU, in GPT-2's shape, for a step and a chunk."""
    for name, new in ("32 decodes", [1] * 32), ("a chunk of 512", [512]):
        parts = pages_of(new, past=1024)
        times = {"loop": microseconds(generate_paged.paged_attention, *parts),
                 "kernel": microseconds(attention_by_kernel, *parts)}
        if torch_has_paged_attention():
            times["varlen_attn"] = microseconds(attention_of_torch, *as_torch_wants(*parts))
        print(f"{name}, 1,024 keys before: " + ", ".join(
            f"{system} {time:,.0f} us" for system, time in times.items()))


def pages_of(new, past, heads=12, head_size=64, page_size=16):
    """Arguments of paged_attention, in bfloat16 on a GPU. new: how many tokens of each request"""
    lengths = [past + n for n in new]
    needed = [-(-length // page_size) for length in lengths]
    place = dict(device="cuda", dtype=torch.bfloat16)
    q = torch.randn(heads, sum(new), head_size, **place)
    k, v = (torch.randn(heads, sum(needed), page_size, head_size, **place) for _ in range(2))
    pages = iter(torch.randperm(sum(needed)).tolist())
    tables = [torch.tensor([next(pages) for _ in range(number)]) for number in needed]
    table = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).to("cuda")
    starts = torch.tensor([0, *accumulate(new)])
    return q, k, v, starts, torch.tensor(lengths), table


def torch_has_paged_attention():   # from 2.13 on
    from torch.nn.attention import varlen  # it takes a second
    return "block_table" in inspect.signature(varlen.varlen_attn).parameters


def as_torch_wants(q, k_pages, v_pages, query_start_loc, seq_lens, block_table):
    """The same pass for torch's kernel: token axis first, int32 tables. Made before it is timed."""
    numbers = dict(device=q.device, dtype=torch.int32)
    most = int((query_start_loc[1:] - query_start_loc[:-1]).max())
    longest = int(seq_lens.max())
    return (q.transpose(0, 1).contiguous(), k_pages.permute(1, 2, 0, 3).contiguous(),
            v_pages.permute(1, 2, 0, 3).contiguous(), query_start_loc.to(**numbers),
            seq_lens.to(**numbers), block_table.to(**numbers), most, longest)


def attention_of_torch(q, k_pages, v_pages, query_start_loc, seq_lens, block_table, most, longest):
    from torch.nn.attention import varlen  # it takes a second, once
    return varlen.varlen_attn(
        q, k_pages, v_pages, query_start_loc, None, most, longest, window_size=(-1, 0),
        seqused_k=seq_lens, block_table=block_table)


def microseconds(attention, *parts, repeats=20):
    """Of a call, by the GPU's own clock: the median of several, after three to warm up."""
    for _ in range(3):
        attention(*parts)
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        attention(*parts)
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


# --- rollout --------------------------------------------------------------------------------------

CHANGES = [20, 40, 60]   # steps


def rollout(args):
    model, tokenizer = load(dtype=torch.float64)   # training magnifies rounding
    set_threads(model)
    prompts = make_requests(read_prompts(PROMPTS)[:6], tokenizer, seed=0)
    models = [model]
    for _ in CHANGES:
        models.append(trained(models[-1], prompts))
    compare_modes(models, prompts)
    count_wrong_answers(models, prompts)


def compare_modes(models, prompts):
    rows = [("mode", "passes", "tokens computed", "over old keys")]
    for mode in "keep", "recompute", "wait":
        requests = answers(prompts)
        trace = rollouts.generate(models, CHANGES, requests, mode, max_batch=16)
        total = totals(trace)
        old = sum(over_old_keys(request) for request in requests) / total["generated"]
        rows.append((mode, total["forward_passes"], total["slots"], f"{old:.0%}"))
    print(f"{len(requests)} answers to {len(prompts)} prompts, {total['generated']:,} tokens; new "
          f"weights at steps {CHANGES}\n{aligned(rows)}")


def count_wrong_answers(models, prompts):
    """Of requests that find pages of older weights."""
    requests = answers(prompts)
    with broken("the prefix cache outlives the weights"):
        rollouts.generate(models, CHANGES, requests, "wait", max_batch=16)
    after_a_change = [request for request in requests if request.spans[-1][0] > 0]
    wrong = sum(request.generated != alone(models, request) for request in after_a_change)
    print(f"{wrong} of {len(after_a_change)} requests that began after a change get wrong tokens, "
          "and nothing raises an error")


def trained(model, requests):
    """The model after one step of AdamW on the prompts: each weight moves by about 1e-3."""
    model = deepcopy(model).requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for request in requests:
        tokens = torch.tensor(request.prompt)
        torch.nn.functional.cross_entropy(model(tokens[:-1]), tokens[1:]).backward()
    optimizer.step()
    return model.requires_grad_(False)


def answers(prompts):
    """Eight answers to each prompt, of 12 to 54 tokens."""
    requests = []
    for j in range(8):
        for i, prompt in enumerate(prompts):
            length = 12 + 6 * ((3 * j + i) % 8)
            requests.append(replace(
                prompt, temperature=1.0, eos_token=None, seed=100 * i + j, max_new_tokens=length,
                name=f"{prompt.name}.{j}"))
    return requests


def over_old_keys(request):
    """How many of its tokens were sampled over keys of older weights."""
    old = 0
    tokens = len(request.prompt)   # so far
    versions = []                  # of their keys
    for version, first, end in request.spans:
        versions[first:] = [version] * (end - first)
        if end == tokens:   # the next token is sampled; else part of a prompt, or computed again
            if min(versions) < version:
                old += 1
            tokens += 1
    return old


def alone(models, request):
    """What it would have got alone from the weights that computed its last token."""
    twin = replace(request)
    generate_unbatched.generate(models[request.spans[-1][0]], twin)
    return twin.generated


# --- sessions -------------------------------------------------------------------------------------

def sessions(args):
    model = GPT(GPTConfig(block_size=512, vocab_size=2, n_layer=1, n_head=1, n_embd=2))
    torch.set_num_threads(1)
    rows = [("pages", "keep", "by_session", "steps", "computed again")]
    for pages, keep, by_session in (
            (140, 0, False), (140, 0, True), (140, math.inf, False), (140, math.inf, True),
            (140, 30, True), (560, 0, False), (560, math.inf, False)):
        running = agents_at_work()
        trace = agents.generate(model, running, 16, 64, pages, keep=keep, by_session=by_session)
        again = computed_again(running, trace)
        rows.append((pages, keep, by_session, trace.passes[-1].step + 1, f"{again:.0%}"))
    print(f"{len(running)} sessions, {len(trace.requests)} turns; computed again: of what earlier "
          f"turns had computed\n{aligned(rows)}")


def computed_again(sessions, trace):
    """The share of the tokens of earlier turns. The last token of a turn is not computed."""
    once, by_earlier_turns = 0, 0
    for session in sessions:
        *earlier, last = [len(turn.tokens) - 1 for turn in session.turns]
        once += last   # a turn's tokens begin with those of the turns before it
        by_earlier_turns += sum(earlier)
    return (totals(trace)["slots"] - once) / by_earlier_turns


def agents_at_work():
    """24 sessions of 6 turns. A new one comes at each step; their first tokens differ."""
    stream = random.Random(0)

    def tokens(low, high):
        return [stream.randrange(2) for _ in range(stream.randint(low, high))]

    sessions = []
    for number in range(24):
        own_beginning = [number >> bit & 1 for bit in range(16)]   # in binary
        first = Request(own_beginning + tokens(134, 234), stream.randint(8, 20), arrival=number)
        later = []
        for _ in range(5):
            pause, result = stream.randint(4, 20), tokens(5, 30)
            later.append((pause, result, stream.randint(8, 20)))
        sessions.append(agents.Session(first, later))
    return sessions


# --- hybrid ---------------------------------------------------------------------------------------

CONFIG = GPTConfig(block_size=512, vocab_size=4, n_layer=4, n_head=1, n_embd=4)
SYSTEM = 64           # tokens of the system prompt, with which every session begins
FIRST, TURN = 128, 32   # tokens of a session's own in its first turn, and more in each further one
SESSIONS, TURNS = 12, 5


def hybrid(args):
    torch.set_num_threads(1)
    stream = random.Random(0)
    prompts = [tokens_of(stream, 192) for _ in range(8)]
    held = most_pages_held(prompts, window=32)
    held_without = most_pages_held(prompts, window=CONFIG.block_size)
    print(f"8 requests of 192 + 32 tokens, 4 layers: with 3 windows of 32, {held} pages held at "
          f"most; without windows {held_without}")
    system = tokens_of(stream, SYSTEM)
    own = [tokens_of(stream, FIRST + (TURNS - 1) * TURN) for _ in range(SESSIONS)]
    rows = [("found again, of", "a session's own", "the system prompt"),
            ("least recently used", *found_again(system, own, passed_first=False)),
            ("passed pages first", *found_again(system, own, passed_first=True))]
    print(f"{SESSIONS} sessions in turn, {TURNS} times, in 350 pages\n{aligned(rows)}")


def tokens_of(stream, number):
    return [stream.randrange(CONFIG.vocab_size) for _ in range(number)]


def most_pages_held(prompts, window):
    model, held = windows.Hybrid(CONFIG, window), []

    def count(step, batch):
        held.append(batch.pool.number - len(batch.pool.free_queue))

    with observed(model, count):
        windows.generate(model, [Request(prompt, 32) for prompt in prompts], pages=500)
    return max(held)


def found_again(system, own, passed_first):
    """
    The share of what could be found in pages that was: of a session's own tokens in its later
    turns, and of the system prompt in the first turns but one.
    """
    requests = []
    for turn in range(TURNS):
        for session in range(SESSIONS):
            prompt = system + own[session][:FIRST + TURN * turn]
            requests.append(Request(prompt, 8, name=f"{session}, turn {turn}",
                                    arrival=SESSIONS * turn + session))
    trace = windows.generate(windows.Hybrid(CONFIG), requests, 1, pages=350,
                             passed_first=passed_first)
    found = tokens_found(trace)
    own_found, own_known = 0, 0
    for request in requests[SESSIONS:]:
        own_found += max(found[request.name] - SYSTEM, 0)
        own_known += len(request.prompt) - SYSTEM - TURN   # the last TURN tokens are new
    newcomers = requests[1:SESSIONS]
    system_found = sum(found[request.name] for request in newcomers)
    return f"{own_found / own_known:.0%}", f"{system_found / (SYSTEM * len(newcomers)):.0%}"


def tokens_found(trace):
    """{name: tokens before the first one that it computes}"""
    found = {}
    for p in trace.passes:
        for name, first, _ in p.work:
            found.setdefault(name, first)
    return found
