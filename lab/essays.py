"""What the commands of beyond/ print: what an idea gains, counted or calculated."""
import math
import random
import sys
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import product

import torch

import generate_prefix
import generate_unbatched
from beyond import hybrid as windows
from beyond import rollout as rollouts
from beyond import sessions as agents
from beyond import speculative as guessing
from beyond.fairness import FairScheduler
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
    p = flags.Parser(prog=f"python -m {name}", description=doc.strip().split("\n\n")[0])
    if essay is speculative:
        p.add_argument("model", nargs="?", default="builtin", help="as for the stages")
        p.add_argument("prompts", nargs="?", help="a file of them (default: the built-in ones)")
    sys.exit(p.run(essay, argv) or 0)


def ahead(args):
    host, gpu = 2.0, gpu_of("h100")   # ms between two passes
    for name in "qwen3-8b", "qwen3-0.6b":   # 512 passes of 16 decodes with 1,024 keys each
        shape = shape_of(name)
        device = 1e3 * shape.seconds(gpu, 16, 16, 16 * 1024, 16 * 1024)
        turns, ahead = host + device, max(host, device)   # ms; x 0.512: 512 passes, in s
        print(f"{name}, H100, {host:g} ms of host, calculated: in turns {0.512 * turns:.2f} s, "
              f"busy {device / turns:.0%}; ahead {0.512 * ahead:.2f} s, busy {device / ahead:.0%}")


def fairness(args):
    """Who is admitted when: the example of its docstring."""
    model = GPT(GPTConfig(block_size=64, vocab_size=2, n_layer=1, n_head=1, n_embd=2))
    print("L is long, a to d are short; all arrive together, L first, and one runs at a time")
    for text, policy, bound in ("first come, first served", "fcfs", 16), ("sjf", "sjf", 16), (
            "sjf, 3 may overtake", "sjf", 3):
        requests = [Request([1] * (20 if name == "L" else 1), 1, name=name) for name in "Labcd"]
        trace = generate_prefix.generate(model, requests, max_batch=1, scheduler_class=partial(
            FairScheduler, policy=policy, bound=bound))
        print(f"{text:26}", *(name for each in trace.passes for name, _, _ in each.work))


def speculative(args):
    model, tokenizer = load(args.model)
    set_threads(model)
    prompts = builtin_prompts() if args.prompts is None else read_prompts(args.prompts)
    for batch, t, k in product((8, 1), (0.0, 0.7), (0, 2, 4, 8)):
        requests = make_requests(prompts, tokenizer, max_new_tokens=64, temperature=t, seed=0)
        trace = guessing.generate(model, requests, batch, guesses=k)
        print(f"batch {batch}, temperature {t}, K = {k}: {len(trace.passes)} passes")
    gpu, shape = gpu_of("a100"), shape_of("llama-2-7b")
    for n in 1, 8, 32, 64, 256:   # requests with 512 keys; at least one token of each is sampled
        one, five = [shape.seconds(gpu, r, r, 512 * r, 512 * n) - (r - n) * Engine().per_request
                     for r in (n, 5 * n)]
        print(f"Llama 2 7B, A100, calculated: batch {n}, K = 4: a pass x {five / one:.2f}")


# --- rollout --------------------------------------------------------------------------------------

CHANGES = [20, 40, 60]   # steps


def rollout(args):
    model, tokenizer = load(dtype=torch.float64)   # training magnifies rounding
    set_threads(model)
    prompts = make_requests(read_prompts(PROMPTS)[:6], tokenizer, seed=0)
    models = [model]
    while len(models) <= len(CHANGES):
        models.append(trained(models[-1], prompts))
    rows = [("mode", "passes", "tokens computed", "over old keys")]
    for mode in "keep", "recompute", "wait":
        requests = answers(prompts)
        t = totals(rollouts.generate(models, CHANGES, requests, mode, max_batch=16))
        old = sum(map(over_old_keys, requests)) / t["generated"]
        rows.append((mode, t["forward_passes"], t["slots"], f"{old:.0%}"))
    print(f"{len(requests)} answers to {len(prompts)} prompts, {t['generated']:,} tokens; new "
          f"weights at steps {CHANGES}\n{aligned(rows)}")
    requests = answers(prompts)
    with broken("the prefix cache outlives the weights"):
        rollouts.generate(models, CHANGES, requests, "wait", max_batch=16)
    began = [request for request in requests if request.spans[-1][0] > 0]
    wrong = sum(request.generated != alone(models, request) for request in began)
    print(f"{wrong} of {len(began)} requests that began after a change get wrong tokens, and "
          "nothing raises an error")


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
    return [replace(request, temperature=1.0, eos_token=None, seed=100 * i + j,
                    max_new_tokens=12 + 6 * ((3 * j + i) % 8), name=f"{request.name}.{j}")
            for j in range(8) for i, request in enumerate(prompts)]


def over_old_keys(request):
    """How many of its tokens were sampled over keys of older weights."""
    old, n, versions = 0, len(request.prompt), []   # n: tokens so far; versions: of their keys
    for version, first, end in request.spans:
        versions[first:] = [version] * (end - first)
        if end == n:   # the next token is sampled; else part of a prompt, or computed again
            old += min(versions) < version
            n += 1
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
    for pages, keep, first in (
            (140, 0, False), (140, 0, True), (140, math.inf, False), (140, math.inf, True),
            (140, 30, True), (560, 0, False), (560, math.inf, False)):
        asked = agents_at_work()
        trace = agents.generate(model, asked, 16, 64, pages, keep=keep, by_session=first)
        once = sum(len(each.turns[-1].tokens) - 1 for each in asked)   # the last is not computed
        before = sum(len(turn.tokens) - 1 for each in asked for turn in each.turns[:-1])
        again = (totals(trace)["slots"] - once) / before
        rows.append((pages, keep, first, trace.passes[-1].step + 1, f"{again:.0%}"))
    print(f"{len(asked)} sessions, {len(trace.requests)} turns; computed again: of what earlier "
          f"turns had computed\n{aligned(rows)}")


def agents_at_work():
    """24 sessions of 6 turns. A new one comes at each step; their first tokens differ."""
    stream = random.Random(0)

    def tokens(low, high):
        return [stream.randrange(2) for _ in range(stream.randint(low, high))]

    return [agents.Session(
        Request([i >> bit & 1 for bit in range(16)] + tokens(134, 234), stream.randint(8, 20),
                arrival=i),
        [(stream.randint(4, 20), tokens(5, 30), stream.randint(8, 20)) for _ in range(5)])
        for i in range(24)]


# --- hybrid ---------------------------------------------------------------------------------------

def hybrid(args):
    torch.set_num_threads(1)
    config = GPTConfig(block_size=512, vocab_size=4, n_layer=4, n_head=1, n_embd=4)
    stream = random.Random(0)

    def tokens(number):
        return [stream.randrange(4) for _ in range(number)]

    prompts, held = [tokens(192) for _ in range(8)], []
    for window in 32, config.block_size:
        model, most = windows.Hybrid(config, window), []
        with observed(model, lambda step, batch: most.append(
                batch.pool.number - len(batch.pool.free_queue))):
            windows.generate(model, [Request(prompt, 32) for prompt in prompts], pages=500)
        held.append(max(most))
    print(f"8 requests of 192 + 32 tokens, 4 layers: with 3 windows of 32, {held[0]} pages held at "
          f"most; without windows {held[1]}")
    rows = [("found again, of", "a session's own", "the system prompt")]
    system, model = tokens(64), windows.Hybrid(config)
    own = [tokens(128 + 4 * 32) for _ in range(12)]   # of a session: each turn takes 32 more
    for passed_first in False, True:
        requests = [Request(system + each[:128 + 32 * turn], 8, name=f"{i}, turn {turn}",
                            arrival=12 * turn + i)
                    for turn in range(5) for i, each in enumerate(own)]
        trace = windows.generate(model, requests, 1, pages=350, passed_first=passed_first)
        start = {}   # request -> the first token that it computes: those before were found
        for name, first, _ in (part for each in trace.passes for part in each.work):
            start.setdefault(name, first)
        newcomers = [start[each.name] for each in requests[1:12]]
        mine = [(max(start[each.name] - 64, 0), len(each.prompt) - 96) for each in requests[12:]]
        rows.append(("passed pages first" if passed_first else "least recently used",
                     f"{sum(n for n, _ in mine) / sum(n for _, n in mine):.0%}",
                     f"{sum(newcomers) / (64 * 11):.0%}"))
    print(f"12 sessions in turn, 5 times, in 350 pages\n{aligned(rows)}")
