"""
The twin: lab/explorer/schedule.js makes the plans of Python's stages, pass by pass.

Python's own `generate` runs random loads on a calculated GPU (lab/simulate/), without a model.
"""
import json
import random
from os.path import commonprefix
from types import SimpleNamespace

import pytest
from common import ROOT, THOROUGH

from lab import flags
from lab.explorer import build, page
from lab.explorer.recorder import Recorder
from lab.loading.recorded import recorded
from lab.loading.stages import SCRIPTS
from lab.simulate.calculated import simulate
from request import Request

SHARED, OWN = 1000, 3000   # token ids; below: numbers of requests
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
    if in_ms:   # as lab/simulate wants them
        requests.sort(key=lambda request: request["arrival"])
    for i, request in enumerate(requests):
        request["equal"] = [min(request["shared"], other["shared"]) for other in requests[:i]]
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


class Known(Request):
    """Its next tokens are its number, and `answer` is how many."""

    def append(self, token):
        super().append(int(self.name))
        if len(self.generated) == self.answer and not self.finished:
            self.finish_reason = "stop"


def python(stage, requests, knobs):
    """What `generate` does with a load, in the twin's form; None if it refuses a request."""
    generate, mine, frames, in_ms = SCRIPTS[stage], [], [], knobs["in_ms"]
    for i, r in enumerate(requests):
        prompt = [SHARED + k if k < r["shared"] else OWN + 200 * i + k for k in range(r["prompt"])]
        arrival = 0 if in_ms else r["arrival"]
        mine.append(Known(prompt, r["limit"], name=str(i), arrival=arrival))
        mine[-1].answer = r["answer"]
    watch = SimpleNamespace(memory={}, pool=None, number={each: i for i, each in enumerate(mine)})

    def watched(model, requests, **knobs):
        model.observers.append(lambda step, batch: frames.append(Recorder.caches(watch, batch)))
        return generate(model, requests, **knobs)

    try:
        trace = simulate(page.MODEL, page.GPU, watched, mine,
                         [r["arrival"] / 1e3 for r in requests] if in_ms else None,
                         **flags.knobs_of(generate, knobs)[0])
    except ValueError as refused:
        assert "KV tokens, there are" in str(refused)
        return None
    passes = [{
        **frame, **{name: getattr(p, name) for name in ("step", "shape", "slots", *page.COUNTS)},
        "work": [int(value) for part in p.work for value in part],
        "finished": [*map(int, p.finished)],
        "ms": 1e3 * p.seconds, "start": 1e3 * trace.step_times[p.step]}
        for p, frame in zip(trace.passes, frames, strict=True)]
    return json.loads(json.dumps({
        "passes": passes, "pool": watch.pool, "token_steps": [r.token_steps for r in mine],
        "token_times": [[1e3 * time for time in r.token_times] for r in mine]}))


def assert_same(twin, python):
    """That a run of the twin is Python's."""
    refused = [request for request in twin["requests"] if request["refused"]]
    assert bool(refused) == (python is None)
    if refused:
        return
    for mine, p in zip(twin["passes"], python["passes"], strict=True):
        p |= {name: pytest.approx(p[name], 1e-9) for name in ("ms", "start")}
        assert mine == {name: p[name] for name in mine}
    assert twin["pool"] == python["pool"]
    for i, request in enumerate(twin["requests"]):
        assert request["token_steps"] == python["token_steps"][i]
        assert request["token_times"] == pytest.approx(python["token_times"][i], 1e-9)


@pytest.mark.parametrize("stage", SCRIPTS)
def test_the_twin_makes_pythons_plans(stage, javascript):
    for seed in range(1000 if THOROUGH else 60):
        run = javascript.execute_script(
            TWIN + "return JSON.stringify(simulate(...arguments))", stage, *load(seed),
            page.gpu_data())
        assert_same(json.loads(run), python(stage, *load(seed)))   # `seed` is in the report


def twin_load(requests):
    """A recorded workload's requests as the twin takes them: lengths, and what begins alike."""
    load, before = [], []
    for each in requests:
        tokens = each["prompt"] + each["answer"]
        load.append({
            "prompt": len(each["prompt"]),
            "answer": len(each["answer"]),
            "limit": each.get("max_new_tokens", len(each["answer"])),
            "arrival": each["arrival"],
            "equal": [len(commonprefix([tokens, other])) for other in before]})
        before.append(tokens)
    return load


def test_the_twin_makes_vllms_plans(javascript):
    """Those that were recorded; but the page has no aborts. It says so, and of how many."""
    version, works = recorded()
    works = [work for work in works if work["kind"] != "aborts"]
    part = works if THOROUGH else works[::10]
    loads = [twin_load(work["requests"]) for work in part]
    knobs = [{name: work[name] for name in ("max_batch", "token_budget", "pages", "page_size")}
             for work in part]
    made = javascript.execute_script(TWIN + """
        const [loads, knobs, gpu] = arguments;
        return JSON.stringify(loads.map((load, i) => simulate("prefix", load, knobs[i], gpu)
          .passes.map(({step, work}) => [step, work])))""", loads, knobs, page.gpu_data())
    for work, passes in zip(part, json.loads(made), strict=True):
        plans = []
        for step, flat in passes:   # request, start, n; request, start, n; ...
            plans.append([step, {f"r{owner}": n for owner, n in zip(flat[::3], flat[2::3])}])
        assert plans == work["plans"]["fcfs"]
    document = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    assert f"JavaScript makes {len(works):,} of {len(works):,} plans" in " ".join(document.split())
    said = f"{len(works):,} of {len(works):,} recorded workloads without aborts (vLLM {version})"
    for text in page.read("page.html"), build.PAGE.read_text(encoding="utf-8"):
        assert said in " ".join(text.split())
