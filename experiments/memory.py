"""
What pages are worth: the same requests with reserved memory (stage 6) and with pages (stage 7).

    storm      eight requests in half the memory that they may need
    sharing    sixteen requests whose prompts begin alike, with and without shared prefixes
    gathered   the time of stage 7 against stage 6
"""
import random
import statistics
from contextlib import contextmanager
from dataclasses import replace

import generate_paged
from experiments import results
from experiments.results import Table
from loading.load import load
from loading.stages import STAGES
from model import GPT, GPTConfig
from request import Request
from views.report import totals


def storm(model):
    """Memory for 128 tokens, reserved or in pages: {"reserve": trace, "pages": trace}."""
    vocab = model.config.vocab_size
    requests = [Request([(5 * i + 3 * j) % vocab for j in range(6)], 26, name=name, priority=i // 4)
                for i, name in enumerate("ABCDEFGH")]

    knobs = {"max_kv_tokens": 128, "pages": 16, "page_size": 8}
    traces = {name: results.run(STAGES[stage], model, requests, knobs)
              for name, stage in (("reserve", "ragged, varlen"), ("pages", "paged"))}
    for name, trace in traces.items():
        trace.stage = f"{name}, {trace.counts.get('preemptions', 0)} preemptions"
    return traces


def alike(vocab_size, requests=16, prefix=128, tail=16, new=16):
    """Requests whose prompts begin with the same tokens, as with one system prompt."""
    stream = random.Random(0)
    common = [stream.randrange(vocab_size) for _ in range(prefix)]
    return [Request(common + [stream.randrange(vocab_size) for _ in range(tail)], new, name=f"r{i}")
            for i in range(requests)]


@contextmanager
def watch(model):
    """Collects the pool before every forward pass: [{"tables", "kept", "number"}, ...]."""
    seen = []

    def hook(module, arguments):
        batch = arguments[2].__self__   # attend is a method of the layout
        seen.append({"tables": {request.name: list(request.block_table)
                                for request, _ in batch.plan},
                     "kept": batch.pages.free.keys() & batch.pages.key_of.keys(),
                     "number": batch.pages.number})

    with model.register_forward_pre_hook(hook):
        yield seen


def sharing(model, repeats):
    """{True: figures with shared prefixes, False: without}; seconds are medians of runs in turn."""
    def run(share):
        with watch(model) as seen:
            trace = generate_paged.generate(model, alike(model.config.vocab_size), max_batch=16,
                                            token_budget=64, pages=160, share_prefixes=share)
        held, t = [set().union(*pool["tables"].values()) for pool in seen], totals(trace)
        return {"pages": max(map(len, held)), "passes": len(trace.passes), "tokens": t["slots"],
                "seconds": t["seconds"]}

    return {share: {**runs[0], "seconds": statistics.median(run["seconds"] for run in runs)}
            for share, runs in results.in_turn((True, False), run, repeats).items()}


def gathered(model, requests, repeats):
    """Of stage 7: {"copied_bytes", "ratio" to stage 6's time, half its "spread"}."""
    def run(name):
        return totals(results.run(STAGES[name], model, requests, {
            "max_batch": 16, "token_budget": 64, "pages": 2048}))

    ragged, paged = results.in_turn(("ragged, varlen", "paged"), run, repeats).values()
    ratios = [mine["seconds"] / theirs["seconds"] for mine, theirs in zip(paged, ragged)]
    return {"copied_bytes": paged[0]["copied_bytes"], "ratio": statistics.median(ratios),
            "spread": (max(ratios) - min(ratios)) / 2}


def mixed_lengths(vocab_size, requests=24):
    stream = random.Random(0)
    return [Request([stream.randrange(vocab_size) for _ in range(stream.randint(8, 120))],
                    stream.randint(8, 64), name=f"r{i}") for i in range(requests)]


def filling_pool(model):
    """What the picture of a pool shows: eight prompts that begin alike, in a small pool."""
    requests = alike(model.config.vocab_size, 8, prefix=20, tail=7, new=14)
    requests = [replace(request, name=name, arrival=i)
                for i, (request, name) in enumerate(zip(requests, "ABCDEFGH"))]
    with watch(model) as seen:
        generate_paged.generate(model, requests, max_batch=5, token_budget=32, pages=32,
                                page_size=4)
    return seen


def measure(args, device, dtype):
    """What pages are worth: memory reserved (stage 6) against memory in pages (stage 7)."""
    model = load()[0].to(device, dtype)
    repeats, models = 1 if args.quick else 5, {"built-in model": model}
    if not args.quick:
        larger = GPT(GPTConfig(n_layer=6, n_head=6, n_embd=384)).requires_grad_(False)
        models["6 layers, 384 wide"] = larger.to(device, dtype)
    found = {"repeats": repeats, "sharing": sharing(model, repeats), "gathered": {}}
    for name, measured in models.items():
        requests = mixed_lengths(measured.config.vocab_size)
        for how, ours in (name, measured), (f"{name}, optimize()", measured.optimize()):
            found["gathered"][how] = gathered(ours, requests, repeats)
    return found


def sharing_table(result):
    names = {"true": "shared prefixes", "false": "not shared"}
    return Table(["", "pages held at most", "passes", "tokens computed", "seconds"],
                 [[names[share], f["pages"], f["passes"], f"{f['tokens']:,}", f"{f['seconds']:.2f}"]
                  for share, f in result["sharing"].items()], f"medians of {result['repeats']}",
                 title="sixteen prompts of 144 tokens that begin with the same 128")


def gathered_table(result):
    return Table(["stage 7", "time / stage 6's", "gathered"],
                 [[name, f"{f['ratio']:.2f} ±{f['spread']:.2f}",
                   f"{f['copied_bytes'] / 1e6:,.0f} MB"] for name, f in result["gathered"].items()],
                 f"medians of {result['repeats']} runs in turn",
                 title="stage 7 against stage 6, 24 requests of mixed lengths")
