"""
The twin: lab/explorer/schedule.js makes the plans of Python's stages, pass by pass.

Python's own `generate` runs random loads. In the model's place stand `Numbers`: the next token of a
request is its number, or the token that ends it; and a clock moves as lab/simulate/ says.
"""
import json
import random
from functools import lru_cache

import pytest
import torch
from common import THOROUGH

from lab import flags
from lab.explorer import page
from lab.loading.stages import SCRIPTS
from lab.simulate.hardware import GPUS, MODELS
from request import Request

SHAPE, GPU = MODELS["llama-2-7b"], GPUS["a100"]
STOP, SHARED, OWN = 99, 100, 3000   # token ids; below 99: numbers of requests
COUNTS = ("step", "shape", "work", "finished", "useful", "recomputed", "pad_slots",
          "finished_slots", "score_entries", "useful_scores", "padded_keys",
          "copied_bytes", "slots")   # of a ForwardPass
TWIN = page.twin()


def load(seed):
    """(requests, knobs) of a random load: small, odd and tight more often than not."""
    draw = random.Random(seed)
    number, longest_prompt = draw.choice([
        (40, 5), *[(draw.randint(1, 8), length) for length in (3, 10, 10, 30)]])
    longest, common = draw.choice([2, 6, 12]), draw.randint(1, longest_prompt)
    at_once, in_ms, requests = draw.random() < 0.4, draw.random() < 0.3, []
    for _ in range(number):
        prompt, answer = draw.randint(1, longest_prompt), draw.randint(1, longest)
        requests.append({
            "prompt": prompt, "answer": answer, "shared": min(prompt, draw.choice([0, common])),
            "limit": answer + draw.choice([0, 0, draw.randint(1, longest)]),   # else it ends early
            "arrival": 0 if at_once else draw.randint(0, 30) * (7.7 if in_ms else 1)})
    size = draw.choice([1, 1, 2, 3, 4, 8, 16, 50])
    tight = draw.choice([0, 0, 0.3 * draw.random(), 5])
    rooms = [r["prompt"] + r["limit"] - 1 for r in requests]
    pages = [-(-room // size) for room in rooms]
    least = draw.choice([1, 1, 1, 0.7])   # 0.7: some may never fit

    def between(sizes):
        return max(1, round(least * max(sizes) + tight * (sum(sizes) - max(sizes))))

    return requests, {
        "max_batch": draw.randint(1, 9), "page_size": size, "in_ms": in_ms,
        "token_budget": draw.choice([draw.randint(1, 9), draw.randint(1, 64)]),
        "pages": draw.choice([None, between(pages), between(pages)]),
        "max_kv_tokens": draw.choice([None, between(rooms)])}


class Numbers:
    """In a model's place; an observer of its own passes."""

    def __init__(self):
        self.config, self.device, self.now = SHAPE, torch.device("cpu"), 0.0
        self.observers, self.frames, self.times = [self.see], [], {}
        self.key = torch.empty(1, SHAPE.kv_bytes // 2, device="meta", dtype=torch.int8)

    def see(self, step, batch):
        pages, rows = getattr(batch, "pages", None), getattr(batch, "requests", ())
        held = {r.name: r.block_table if pages else getattr(
            batch.kv if r in rows else r.kv, "capacity", None) for r in self.requests}
        self.batch, self.pool = batch, pages and {"pages": pages.number, "page_size": pages.size}
        self.frames.append({
            "columns": batch.end if rows else 0,
            "rooms": {name: [*room] if pages else room for name, room in held.items() if room},
            "cached": [page for page in pages.free_queue if page in getattr(
                pages, "hash_of", ())] if pages else []})

    def __call__(self, tokens, positions, attend, wanted):
        batch = self.batch
        if kv := batch.plan[0][0].kv:   # so that it counts its bytes
            kv.buffers(0, self.key, self.key)
        cost = batch.cost()
        keys = cost.get("padded_keys", 0) + sum(
            start + n for (_, n), start in zip(batch.plan, batch.starts) if n)
        seconds = SHAPE.seconds(GPU, tokens.numel(), len(batch.sampled), cost["score_entries"],
                                keys, cost.get("copied_bytes", 0))
        self.frames[-1]["ms"] = 1e3 * seconds
        self.now += seconds
        logits = torch.zeros(len(batch.sampled), STOP + 1)
        for row, request in zip(logits, batch.sampled):
            stops = len(request.generated) + 1 == request.answer < request.max_new_tokens
            row[STOP if stops else int(request.name)] = 1
        return logits

    def on_token(self, request, token, logits):
        self.times.setdefault(request.name, []).append(1e3 * self.now)


class Arrival:
    """In milliseconds, where a stage compares with a step or sorts; as lab/simulate/ does."""

    def __init__(self, model, ms):
        self.model, self.ms = model, ms

    def __le__(self, step):
        return self.ms <= 1e3 * self.model.now

    def __gt__(self, step):   # asked by max(step, arrival): nothing is left to do
        self.model.now = max(self.model.now, self.ms / 1e3)
        return False

    def __lt__(self, other):
        return self.ms < other.ms


def python(stage, requests, knobs):
    """What `generate` does with a load; None if it refuses a request."""
    model, mine = Numbers(), []
    for i, r in enumerate(requests):
        prompt = [SHARED + k if k < r["shared"] else OWN + 200 * i + k for k in range(r["prompt"])]
        request = Request(prompt, r["limit"], name=str(i), eos_token=STOP)
        request.arrival = Arrival(model, r["arrival"]) if knobs["in_ms"] else r["arrival"]
        request.answer = r["answer"]
        mine.append(request)
    model.requests = mine
    try:
        trace = SCRIPTS[stage](model, mine, on_token=model.on_token,
                               **flags.knobs_of(SCRIPTS[stage], knobs)[0])
    except ValueError as refused:
        assert "KV tokens, there are" in str(refused)
        return None
    passes = [{**{name: getattr(p, name) for name in COUNTS}, **frame}
              for p, frame in zip(trace.passes, model.frames, strict=True)]
    return {"passes": passes, "counts": dict(trace.counts), "pool": model.pool,
            "steps": [r.token_steps for r in mine], "times": [model.times[r.name] for r in mine]}


def in_browser(chrome, cases, twin=TWIN):
    """What the twin does with [(stage, requests, knobs), ...]."""
    text = chrome.execute_script(
        twin + "return JSON.stringify(arguments[0].map(each => simulate(...each, arguments[1])));",
        cases, page.gpu_data(SHAPE, GPU))
    return json.loads(text)


def differences(twin, python):
    """Where the twin's run differs from Python's."""
    refused = [request for request in twin["requests"] if request["refused"]]
    if not python or refused:
        if bool(refused) == bool(python):
            yield f"refused: {refused}"
        return
    if len(twin["passes"]) != len(python["passes"]):
        yield f"{len(twin['passes'])} passes, in Python {len(python['passes'])}"
    rooms = {}
    for i, (mine, p) in enumerate(zip(twin["passes"], python["passes"])):
        rooms |= mine["room"]
        mine["rooms"] = {name: room for name, room in rooms.items() if room}
        work = [int(value) for part in p["work"] for value in part]
        for name, value in (p | {"work": work, "shape": list(p["shape"]), "finished": [
                *map(int, p["finished"])], "ms": pytest.approx(p["ms"], 1e-9)}).items():
            if mine[name] != value:
                yield f"pass {i}: {name} {mine[name]}, in Python {value}"
    if {k: n for k, n in twin["counts"].items() if n} != {
            k: n for k, n in python["counts"].items() if n}:
        yield f"counts {twin['counts']}, in Python {python['counts']}"
    if twin["pool"] != python["pool"]:
        yield f"pool {twin['pool']}, in Python {python['pool']}"
    for request, steps, times in zip(twin["requests"], python["steps"], python["times"]):
        if request["token_steps"] != steps or request["token_times"] != pytest.approx(times, 1e-9):
            yield f"tokens of {request}"


@lru_cache(maxsize=None)
def truth(stage, seed):
    return python(stage, *load(seed))


@pytest.mark.parametrize("first", range(0, 1000 if THOROUGH else 60, 20))
def test_the_twin_makes_pythons_plans(first, chrome):
    for seed in range(first, first + 20):
        for stage, run in zip(SCRIPTS, in_browser(chrome, [(s, *load(seed)) for s in SCRIPTS])):
            assert [*differences(run, truth(stage, seed))][:3] == [], (stage, seed)


MUTANTS = [   # (what stands in the twin, a mistake in its place)
    ("this.waiting.unshift", "this.waiting.push"),
    ("this.preempt(this.running.at(-1))", "this.preempt(this.running[0])"),
    ("request.computed = 0;", ""),
    ("todo < this.token_budget", "true"),
    ("if (budget > 0) plan", "if (budget > 1) plan"),
    ("reserved + request.kv_tokens <=", "reserved + request.kv_tokens <"),
    ("[...table].reverse()", "table"),
    ("if (!this.ref_count[page]) this", "this"),
    ("request.todo - 1);", "request.todo);"),
    ("if (this.cached.has(hash)) return;", ""),
    ("more + free >", "more >"),
    ("end <= shared", "end < shared"),
    ("return Math.min(pages, sum(needed))", "return pages"),
    (".slice(0, max_batch));", ");"),
    ("largest(running.map(({limit}) => limit - 1))", "largest(running.map(({limit}) => limit))"),
    ("start = end++", "start = ++end"),
    ("filter(one => one.generated).map(one => [one, 1])", "filter(one => one.todo === 1).map("
     "one => [one, 1])"),
    ("B * P + B * (P + T)", "B * (P + T)"),
    ("Math.max(first, request.reached)", "first"),
    ("this.now = Math.max(this.now, request.arrival)", "this.now = request.arrival"),
    ("(sampled ? c.vocabulary : 0)", "c.vocabulary"),
    ("return this.running.length ? step :", "return"),
]


@pytest.mark.parametrize("right, wrong", MUTANTS)
def test_a_mistake_in_the_twin_is_seen(right, wrong, chrome):
    assert TWIN.count(right) == 1
    mutant = TWIN.replace(right, wrong)
    for seed in range(60):
        cases = [(stage, *load(seed)) for stage in SCRIPTS]
        try:
            runs = in_browser(chrome, cases, mutant)
        except Exception as error:
            assert "javascript error" in str(error)
            return
        if any([*differences(run, truth(stage, seed))]
               for stage, run in zip(SCRIPTS, runs)):
            return
    pytest.fail("no load shows it")
