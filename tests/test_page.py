"""
The explorer: the data are those of the run, and a real browser shows them.

The browser is a Chromium or Chrome of this machine, driven by Selenium and a chromedriver of the
same version. Where they are missing, its tests are skipped; on Linux with the environment variable
CI they fail.
"""
import importlib.util
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from common import STAGES, mixed, toy

import generate_ragged
from experiments.ladder import run_stages
from explorer import build, page, still
from explorer.recorder import MOST_TOKENS, record
from request import Request
from toolbox.load import decode, load
from toolbox.plots import COLORS
from toolbox.stages import STAGES as LADDER
from toolbox.traps import broken
from toolbox.workload import PROMPTS, make_requests, read_prompts

ROOT = Path(__file__).parent.parent
MODEL = toy(dtype=torch.float32)
NASTY = ["</script><script>window.hacked = 1</script>", "<img src=x onerror='window.hacked = 1'>",
         "\"quotes\" 'and' `ticks` \\ & &lt; ${1}",
         "\U0001f600 \U0001f469\u200d\U0001f469\u200d\U0001f467 na\u00efve \u2028 \u2029 {{js}}",
         "\u05e9\u05dc\u05d5\u05dd \u202e right to left"]


def recorded(stage="interleaved", requests=None, **knobs):
    return record(STAGES[stage], MODEL, requests or mixed(), reference=MODEL, **knobs)


COMMITTED = (ROOT / "docs" / "explorer.html").read_text(encoding="utf-8")
DATA = json.loads(re.search(r'id="data">(.*?)</script>', COMMITTED, re.DOTALL)[1])


@cache
def builtin():
    """(model, tokenizer, requests) of the scripts' defaults."""
    model, tokenizer = load()
    return model, tokenizer, make_requests(read_prompts(PROMPTS), tokenizer, max_new_tokens=64,
                                           temperature=0.7, top_k=None, seed=0)


@cache
def runs_of_the_page():
    model, tokenizer, _ = builtin()
    requests = build.workload(tokenizer)
    with broken("published mask", show=False):
        masked = run_stages(model, requests, {build.MASK: LADDER["interleaved"]}, **build.KNOBS)
    return {**run_stages(model, requests, **build.KNOBS), **masked}


@pytest.fixture(scope="module")
def ladder():
    """The page's runs as they run here, {name: trace}, with the times of the committed page."""
    for run in DATA["runs"]:
        trace, passes = runs_of_the_page()[run["name"]], run["passes"]
        trace.started = 0.0
        trace.step_times = {step: ms / 1e3 for step, ms in zip(passes["step"], passes["start"])}
        for p, ms in zip(trace.passes, passes["ms"], strict=True):
            p.seconds = ms / 1e3
        for request, its in zip(trace.requests, run["requests"], strict=True):
            request.token_times = [ms / 1e3 for ms in its["ms"]]
    return runs_of_the_page()


# --- the data -------------------------------------------------------------------------------------

def slots_of(row):
    """Each slot of a row as (owner, position, ranges, pads, blanks, shift)."""
    for owner, first, n, *rest in row:
        sees, grows, pads, blanks, shift = (rest + [None, 1, 0, 0, 0][len(rest):])
        for k in range(n):
            ranges = [sees[i:i + 3] for i in range(0, len(sees or []), 3)]
            if ranges:
                ranges[-1] = [*ranges[-1][:2], ranges[-1][2] + k * grows]
            yield owner, first + k if owner >= 0 else 0, ranges, pads, blanks, shift


@pytest.mark.parametrize("stage", STAGES)
def test_slots_and_sights_are_those_of_the_run(stage):
    trace = recorded(stage)
    recorder = trace.recording
    assert recorder.wrong == 0 and len(recorder.frames) == len(trace.passes)
    for p, frame in zip(trace.passes, recorder.frames):
        slots = [slot for row in frame["rows"] for slot in slots_of(row)]
        assert len(slots) == p.slots and len(frame["rows"]) == (1, *p.shape)[-2]
        assert sum(owner == -1 for owner, *_ in slots) == p.pad_slots
        assert sum(owner < -1 for owner, *_ in slots) == p.finished_slots
        planned = [(recorder.requests[owner].name, position, [[owner, 0, position + 1]], 0, 0, 0)
                   for owner, position, *_ in slots if owner >= 0]
        assert planned == [(recorder.requests[slot[0]].name, *slot[1:]) for slot in slots
                           if slot[0] >= 0]
        assert sorted((name, i) for name, first, n in p.work for i in range(first, first + n)) == (
            sorted(entry[:2] for entry in planned))


@pytest.mark.parametrize("stage", STAGES)
def test_recording_changes_nothing(stage):
    requests = [replace(request) for request in mixed()]
    plain = STAGES[stage](MODEL, requests)
    trace = record(STAGES[stage], MODEL, mixed(), plain)
    assert [replace(p, seconds=0) for p in trace.passes] == [replace(p, seconds=0)
                                                             for p in plain.passes]
    assert [p.seconds for p in trace.passes] == [p.seconds for p in plain.passes]
    assert [r.token_times for r in trace.requests] == [r.token_times for r in plain.requests]


def test_the_recorders_own_time_is_subtracted_and_another_run_lends_none():
    other = STAGES["interleaved"](MODEL, [replace(request) for request in mixed()], max_batch=2)
    trace = record(STAGES["interleaved"], MODEL, mixed(), other)
    assert len(trace.passes) != len(other.passes) and trace.started != other.started
    ends = [time for request in trace.requests for time in request.token_times]
    assert 0 < sum(p.seconds for p in trace.passes) <= max(ends) - trace.started + 1e-6
    assert min(p.seconds for p in trace.passes) > 0
    assert sum(end - start for start, end in trace.recording.spent) > 0


def test_seen_pads_are_recorded():
    with broken("published mask", show=False):
        trace = recorded()
    assert trace.recording.wrong > 0
    assert any(re.search(r"sees \d+ pad slot", text) for text in trace.recording.sentences)
    seen = [slot for frame in trace.recording.frames for row in frame["rows"]
            for slot in slots_of(row) if slot[0] >= 0 and slot[3]]
    assert seen and any(v.verdict == "WRONG" for v in trace.recording.check())


def test_wrong_positions_are_recorded():
    with broken("column positions", show=False):
        trace = recorded(requests=[Request([1] * n, 3) for n in (2, 5, 9)])
    assert trace.recording.wrong > 0 and any(
        slot[5] for frame in trace.recording.frames for row in frame["rows"]
        for slot in slots_of(row))


def test_shared_pages_count_as_the_requests_own():
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, i] for i in range(4)]
    requests = [Request(prompt, 4, arrival=i) for i, prompt in enumerate(prompts)]
    trace = recorded("paged", requests, page_size=4)
    assert trace.counts["shared_pages"] > 0 and trace.recording.wrong == 0
    tables = [table for frame in trace.recording.frames for table in frame["room"].values()]
    assert len({tuple(table[:2]) for table in tables if table}) == 1


def test_large_runs_leave_the_sights_out():
    requests = [Request([1, 2, 3], MOST_TOKENS - 6), Request([1], 3)]
    small = toy(loud=False, n_layer=1, n_head=1, n_embd=1, dtype=torch.float32)
    trace = record(LADDER["interleaved"], small, requests)
    assert trace.recording.left_out.endswith("4,001 tokens, more than 4,000")
    assert all(len(run) == 3 for frame in trace.recording.frames for row in frame["rows"]
               for run in row)


def test_texts_cannot_become_code():
    model, tokenizer, _ = builtin()
    requests = [Request(tokenizer.encode(text), 2, name=f"<b>{i}") for i, text in enumerate(NASTY)]
    trace = record(LADDER["ragged, varlen"], model, requests)
    text = page.page({"</script>&": trace}, tokenizer)
    carried = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1]
    assert carried.isascii() and not set("<>&") & set(carried)
    data = json.loads(carried)
    assert data["runs"][0]["name"] == "</script>&" and text.count("</script") == 2
    pieces = [data["vocabulary"][str(token)] for token in requests[3].prompt]
    assert any(isinstance(piece, list) for piece in pieces)
    assert b"".join(piece.encode() if isinstance(piece, str) else bytes(piece)
                    for piece in pieces).decode() == NASTY[3]


def test_a_run_must_be_recorded():
    trace = generate_ragged.generate(MODEL, mixed())
    with pytest.raises(ValueError, match="of stage 'ragged, varlen' was not recorded"):
        page.page({"ragged": trace})


def test_pages_load_nothing_and_nothing_moves():
    source = "".join((page.FOLDER / name).read_text(encoding="utf-8")
                     for name in ("page.html", "page.css", "runs.js", "panels.js", "page.js"))
    assert not re.search(r"https?:|//[a-z]|@import|url\(|innerHTML|document\.write|eval\(", source)
    styles = (page.FOLDER / "page.css").read_text(encoding="utf-8")
    assert not re.search("animation|transition|scroll-behavior", styles)


def without_times(data):
    """The data of a page without what differs from machine to machine."""
    data = json.loads(json.dumps(data))
    for run in data["runs"]:
        del run["place"]
        run["check"]["summary"] = run["check"]["summary"].split(", max")[0]
        for column in "start", "ms":
            del run["passes"][column]
        for request in run["requests"]:
            del request["ms"], request["arrived"]
    return data


AGAIN = "python -m explorer.build"


def test_the_committed_page_is_that_of_todays_template_and_runs(ladder):
    assert len(COMMITTED.encode()) < 1_200_000
    assert page.filled(DATA) == COMMITTED, AGAIN
    for run in DATA["runs"]:
        trace, names = ladder[run["name"]], [request["name"] for request in run["requests"]]
        work = [[[names[who], first, n] for who, first, n in zip(*[iter(flat)] * 3)]
                for flat in run["passes"]["work"]]
        assert work == [[[*entry] for entry in p.work] for p in trace.passes], AGAIN


@pytest.mark.thorough
def test_the_committed_page_is_what_the_command_builds():
    assert without_times(json.loads(json.dumps(build.data()))) == without_times(DATA), AGAIN


def test_the_calculated_clock_has_the_same_steps_and_other_times(ladder):
    for run in DATA["runs"]:
        passes, gpu = run["passes"], run["gpu"]
        for i, step in enumerate(passes["step"][1:], 1):   # nothing waits for the GPU
            same = step == passes["step"][i - 1]
            ends = sum(gpu["passes"]["ms"][:i])
            assert same or gpu["passes"]["start"][i] == pytest.approx(ends, abs=0.5)
        for request, its in zip(run["requests"], gpu["requests"], strict=True):
            assert len(its["ms"]) == len(request["ms"])
            assert its["arrived"] < its["ms"][0] and its["ms"] == sorted(its["ms"])
    trace = ladder["dynamic"]
    other = [replace(request) for request in trace.requests]
    other[0].generated = [1]   # an answer of another length makes other plans
    for request, its in zip(other[1:], trace.requests[1:]):
        request.generated = its.generated
    with pytest.raises(RuntimeError, match="makes other plans"):
        trace.recording = SimpleNamespace(requests=other)
        build.twin(trace, LADDER["dynamic"], build.KNOBS)


def test_each_setting_has_the_run_of_its_knobs(ladder):
    """Ten random settings of "Try it", expanded as the page does, are what the stages do."""
    grid, stream = DATA["grid"], random.Random(1)
    requests = [build.fixed(*pair) for pair in zip(build.workload(builtin()[1]),
                                                   ladder["unbatched"].requests)]
    for setting in stream.sample([*grid["of"]], 10):
        stage, *values = setting.split(".")
        knobs = {name: grid["knobs"][name][int(i)]
                 for name, i in zip(grid["applies"][stage], values, strict=True)}
        memory, size = knobs.pop("memory", 10**6), knobs.get("page_size", 16)
        some = [replace(request) for request in requests
                if knobs["long"] or len(request.prompt) < 200]
        trace = run_stages(builtin()[0], some, {stage: LADDER[stage]}, **{
            **knobs, "max_kv_tokens": memory, "pages": memory // size})[stage]
        names, run = [request.name for request in requests], grid["runs"][grid["of"][setting]]
        work = [(step + k, [(names[who], first + k * n, n)
                            for who, first, n in zip(*[iter(flat)] * 3)])
                for times, step, _, flat, *_ in run["passes"] for k in range(times)]
        assert work == [(p.step, p.work) for p in trace.passes], setting
        assert len(run["ms"]) == run["figures"]["passes"] == len(trace.passes)


def test_the_walk_has_ten_stops_and_counts_them_itself():
    assert [stop["title"] for stop in DATA["walk"]] == [
        "padding", "finished rows", "stall", "chunk", "fused rectangle", "published mask",
        "flat stream", "sharing", "preemption", "scoreboard"]
    score, said = DATA["score"], {stop["title"]: stop["text"] for stop in DATA["walk"]}
    assert f"no token for {score['dynamic']['next']:.0f} ms" in said["stall"]
    assert f"from {score['dynamic']['next']:.0f} to {score['chunked']['next']:.0f}" in said["chunk"]
    assert score["paged"]["preemptions"] > 0 and score["ragged, varlen"]["useful"] == 1
    wrong = {name for name, figures in score.items() if figures["wrong"]}
    assert wrong == {build.MASK} == {run["name"] for run in DATA["runs"] if run["check"]["wrong"]}


# --- in a browser ---------------------------------------------------------------------------------

def why_no_browser():
    """None, or what is missing. Without all of it, Selenium would try to download a browser."""
    programs = still.browser_path(), shutil.which("chromedriver")
    if not all(programs):
        return "there is no Chromium with a chromedriver on PATH"
    said = [subprocess.run([program, "--version"], capture_output=True, text=True).stdout
            for program in programs]
    if len({re.search(r"\d+|$", text).group() for text in said}) > 1:
        return f"{' and '.join(said)} do not work together: install the same version of both"
    return None if importlib.util.find_spec("selenium") else "Selenium is not installed"


def need_browser():
    if why := why_no_browser():
        must = os.environ.get("CI") and sys.platform == "linux"
        (pytest.fail if must else pytest.skip)(f"no browser to test the explorer in: {why}")


@pytest.fixture(scope="module")
def chrome():
    need_browser()
    browser = still.open_browser()
    browser.set_script_timeout(600)   # a busy machine is no fault of the page
    browser.set_page_load_timeout(600)
    yield browser
    browser.quit()


class Page:
    """An open page. Whatever goes wrong in it, or goes out of it, fails the test at its end."""

    def __init__(self, browser, path):
        self.browser, self.path = browser, path

    def open(self, address=""):
        self.browser.get("about:blank")   # else only the fragment would change
        self.browser.get(f"{self.path.as_uri()}#{address}")
        return self

    def run(self, script, *arguments):
        return self.browser.execute_script(script, *arguments)

    def texts(self, selector):
        return self.run("return [...document.querySelectorAll(arguments[0])]"
                        ".map(node => node.textContent)", selector)

    def press(self, *keys):
        from selenium.webdriver.common.action_chains import ActionChains
        ActionChains(self.browser, duration=0).send_keys(*keys).perform()

    @property
    def now(self):
        return self.texts("#now")[0]

    @property
    def hash(self):
        """The address's fragment, which is written at most every 0.4 seconds."""
        return self.run("return new Promise(done => setTimeout(() => done(location.hash), 450))")

    def complaints(self):
        """Errors on the console, and requests to anything but the file itself."""
        asked = [json.loads(entry["message"])["message"]
                 for entry in self.browser.get_log("performance")]
        urls = [message["params"]["request"]["url"] for message in asked
                if message["method"] == "Network.requestWillBeSent"]
        errors = [entry["message"] for entry in self.browser.get_log("browser")]
        return errors + [url for url in urls if not url.startswith(("file:", "data:", "about:"))]


@pytest.fixture
def opened(chrome, tmp_path):
    """opened({name: trace}, tokenizer, address) -> Page"""
    pages = []

    def open(traces, tokenizer=None, address=""):
        path = tmp_path / f"{len(pages)}.html"
        page.write(path, traces, tokenizer)
        pages.append(Page(chrome, path).open(address))
        return pages[-1]

    chrome.get_log("performance"), chrome.get_log("browser")
    yield open
    for each in pages:
        assert each.complaints() == []


@pytest.fixture(scope="module")
def ladder_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("ladder") / "ladder.html"
    path.write_text(page.filled(DATA), encoding="utf-8")
    return path


@pytest.fixture
def ladder_page(chrome, ladder_file):
    chrome.get_log("performance"), chrome.get_log("browser")
    opened = Page(chrome, ladder_file).open()
    yield opened
    assert opened.complaints() == []


@pytest.mark.parametrize("stage", STAGES)
def test_pages_of_all_stages_load(stage, opened):
    trace = recorded(stage)
    shown = opened({stage: trace})
    last = trace.passes[-1].step
    assert shown.now == f"step 0 of {last}" and not shown.run("return 'hacked' in window")
    shown.run("go(ticks.length - 1)")
    assert shown.texts("[data-figure=slots]") == [f"{sum(p.slots for p in trace.passes):,}"]
    assert len(shown.texts(".request")) == len(trace.requests)


def expected(trace, step):
    """What the page must say after a step, from the trace alone."""
    passes = [p for p in trace.passes if p.step <= step]
    waits, gaps = [], []
    for request in trace.requests:
        times = [time for time, at in zip(request.token_times, request.token_steps) if at <= step]
        arrived = min((time for at, time in trace.step_times.items() if at >= request.arrival)
                      if request.arrival else [trace.started])
        waits += [1e3 * (times[0] - arrived)] if times else []
        gaps += [1e3 * (b - a) for a, b in zip(times, times[1:])]

    def ms(values, what):
        return f"{what(values):,.1f} ms" if values else "–"

    def total(name):
        return sum(getattr(p, name) for p in passes)

    counts = ("slots", "useful", "pad_slots", "finished_slots", "recomputed", "score_entries",
              "useful_scores", "padded_keys")
    return {"passes": f"{len(passes):,}", **{name: f"{total(name):,}" for name in counts},
            "generated": str(sum(at <= step for r in trace.requests for at in r.token_steps)),
            "copied_bytes": f"{total('copied_bytes') / 1e6:.1f} MB",
            "ms": f"{1e3 * total('seconds'):,.1f} ms", "ttft": ms(waits, statistics.mean),
            "itl": ms(gaps, statistics.mean), "stall": ms(gaps, max)}


def same(said, right):
    """Equal; milliseconds are rounded twice."""
    if right.endswith(" ms"):
        return abs(float(said[:-3].replace(",", "")) - float(right[:-3].replace(",", ""))) < 0.3
    return said == right


def test_every_number_is_the_traces(ladder, ladder_page):
    """Ten random steps of random stages: the bill, the plan, the tensor, requests and memory."""
    stream = random.Random(0)
    for name in stream.sample([*ladder], 10):
        trace = ladder[name]
        step = stream.choice(trace.passes).step
        ladder_page.open(f"run={name}&step={step}")
        said = ladder_page.run("return Object.fromEntries([...document.querySelectorAll("
                               "'[data-figure]')].map(cell => [cell.dataset.figure, "
                               "cell.textContent]))")
        right = expected(trace, step)
        assert said.keys() == right.keys()
        assert all(same(said[figure], right[figure]) for figure in right), (name, step, said, right)

        passes = [(i, p) for i, p in enumerate(trace.passes) if p.step == step]
        for (i, p), caption in zip(passes, ladder_page.texts(".pass p"), strict=True):
            assert f"shape ({p.shape[0]}, " in caption or f"shape ({p.slots},)" in caption
            assert f"{p.slots:,} slot" in caption and f"{p.useful:,} useful" in caption
            kinds = ladder_page.run(f"return [...document.querySelectorAll('[data-pass=\"{i}\"] "
                                    ".slot')].map(slot => slot.className.split(' ')[1])")
            assert len(kinds) == p.slots and kinds.count("pad") == p.pad_slots
            assert kinds.count("finished") == p.finished_slots
            assert kinds.count("recomputed") == p.recomputed
        tokens = sum(n for _, p in passes for _, _, n in p.work)
        plan, = ladder_page.texts(".plan p")
        assert plan.startswith(f"{tokens} ")
        widths = ladder_page.run("return [...document.querySelectorAll('.plan .bar span')]"
                                 ".map(part => part.title)")
        planned = Counter()   # a request's tokens may be of two kinds
        for who, n in (title.split(" token")[0].split(": ") for title in widths):
            planned[who] += int(n)
        assert planned == Counter({who: n for _, p in passes for who, _, n in p.work})
        again = re.findall(r"\((\d+)\)[^()]*computed again", plan)
        assert sum(map(int, again)) == sum(p.recomputed for _, p in passes)

        for request, text, waits in zip(trace.requests, ladder_page.texts(".request .answer"),
                                        ladder_page.texts(".request .waits"), strict=True):
            n = sum(at <= step for at in request.token_steps)
            answer = decode(builtin()[1], request.generated[:n])
            assert text == answer or (text[0] == "…" and answer.endswith(text[1:]))
            if n:
                assert waits.startswith(f"{n} token")
                first = request.token_steps[0] - request.arrival + 1
                assert f"TTFT {first} step" in waits
        held = dict(ladder_page.run("return [...document.querySelectorAll('[data-holder]')]"
                                    ".map(row => [row.firstChild.textContent, "
                                    "row.lastChild.textContent])"))
        used = {who: first + n for _, p in passes for who, first, n in p.work}
        if name != "unbatched, no cache":
            assert used.keys() <= held.keys()
        for who in used.keys() & held.keys():
            if name == "paged":
                assert len(held[who].split()) * 16 >= used[who]
            else:
                assert held[who].split()[0] == str(used[who])


def test_preempted_requests_wait_without_pages(opened):
    requests = [Request([i % 13] * 8, 9, name=f"r{i}") for i in range(4)]
    trace = recorded("paged", requests, pages=8, page_size=4)
    assert trace.counts["preemptions"] > 0
    shown, seen = opened({"paged": trace}), 0
    for tick, step in enumerate(sorted({p.step for p in trace.passes})):
        shown.run("go(arguments[0])", tick)
        work = {who: (first, n) for p in trace.passes if p.step == step for who, first, n in p.work}
        tables = dict(shown.run("return [...document.querySelectorAll('.holder.table')].map("
                                "row => [row.firstChild.textContent, row.lastChild.textContent])"))
        for request, words in zip(trace.requests, shown.texts(".request .state"), strict=True):
            done = request.token_steps[-1] <= step
            begun = any(request.name in [who for who, _, _ in p.work]
                        for p in trace.passes if p.step <= step)
            first, n = work.get(request.name, (0, 0))
            again = n and any(request.name == who and f + m > first for p in trace.passes
                              if p.step < step for who, f, m in p.work)
            right = ("done" if done else "computed again" if again else "waiting" if not begun
                     else "prefilling" if n and first < 8 else "decoding" if n else "preempted")
            assert right in words, (step, request.name, words, right)
            assert (request.name in tables) >= bool(n and not done)
            assert right != "preempted" or request.name not in tables
            seen += right == "preempted"
    assert seen


def test_a_seen_pad_is_red(opened):
    requests = [Request([1] * n, 4, name=name) for name, n in zip("ABCD", (4, 2, 1, 11))]
    with broken("published mask", show=False):
        trace = recorded(requests=requests, token_budget=8)
    i, p = next((i, p) for i, p in enumerate(trace.passes) if ("A", 4, 1) in p.work)
    shown = opened({"interleaved": trace},
                   address=f"step={p.step}&slot=0.{i}.0.{p.shape[1] - 1}&run=interleaved")
    colors = shown.run("return [...document.querySelectorAll('.slot.pad.wrong')]"
                       ".map(slot => getComputedStyle(slot).backgroundColor)")
    red = tuple(int(COLORS["finished"][k:k + 2], 16) for k in (1, 3, 5))
    assert colors == ["rgb({}, {}, {})".format(*red)] * (p.shape[1] - 1)
    assert f"Wrong: it sees {p.shape[1] - 1} pads." in shown.texts(".sees .bad")[0]
    assert shown.texts(".timeline .bad")[0].startswith("Check: 0/4 requests identical")

    repaired = opened({"interleaved": recorded(requests=requests, token_budget=8)},
                      address=f"run=interleaved&step={p.step}&slot=0.{i}.0.{p.shape[1] - 1}")
    assert repaired.texts(".slot.wrong, .keys .wrong, .bad b") == []
    assert "sees 5 keys: 4 past, 1 new, 0 pads." in repaired.texts(".sees p")[0]


def test_keys(ladder_page):
    from selenium.webdriver.common.keys import Keys
    ladder_page.open("run=interleaved&beside=ragged%2C+varlen&step=4")
    ladder_page.press(Keys.ARROW_RIGHT)
    assert ladder_page.now.startswith("step 5 ")
    ladder_page.press(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert ladder_page.now.startswith("step 3 ")
    ladder_page.press(Keys.END)
    assert ladder_page.now == "step 49 of 49"
    ladder_page.run("play(true)")   # from the end it begins anew
    assert ladder_page.now == "step 0 of 49"
    ladder_page.run("play(false)")
    ladder_page.press(Keys.END, Keys.HOME)
    assert ladder_page.now == "step 0 of 49"
    ladder_page.press(" ")
    assert ladder_page.texts("#play") == ["pause"]
    ladder_page.press(" ", "+")
    assert ladder_page.texts("#play") == ["play"]
    assert ladder_page.run("return document.getElementById('speed').value") == "5"
    # to the tensor by Tab alone, and from slot to slot
    for _ in range(40):
        ladder_page.press(Keys.TAB)
        if ladder_page.run("return document.activeElement.className") == "grid":
            break
    ladder_page.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ENTER)
    assert re.search(r"slot=0\.0\.\d\.1", ladder_page.hash)
    assert len(ladder_page.texts(".slot.picked")) == 1
    ladder_page.press(Keys.ESCAPE)
    assert "slot" not in ladder_page.hash


def test_an_address_leads_back(ladder_page):
    address = "run=chunked&beside=paged&step=7&slot=0.7.0.0&cells=position&theme=dark"
    ladder_page.open(address)
    before = ladder_page.run("return [location.hash, document.body.innerText]")
    assert before[0] == "#" + address
    ladder_page.run("location.hash = 'run=naive&ms=50'")
    ladder_page.run("return new Promise(done => setTimeout(done, 50))")
    assert ladder_page.now.endswith(" ms") and ladder_page.texts(".panel h2 small") == []
    ladder_page.open(before[0][1:])
    assert ladder_page.run("return [location.hash, document.body.innerText]") == before
    for nonsense in ("run=nothing&step=-5", "step=1e9&slot=9.9.9.9&stop=77", "%%%&run=%3Cb%3E",
                     "try=9.9"):
        ladder_page.open(nonsense)
        assert ladder_page.now.startswith("step ")


def test_two_stages_on_one_clock(ladder, ladder_page):
    ladder_page.open("run=naive&beside=dynamic&step=70")
    assert ladder_page.texts(".plan p")[1] == "This run is over: all its requests are done."
    passes = len(ladder["dynamic"].passes)
    assert ladder_page.texts("[data-figure=passes]") == ["71", str(passes)]
    starts = {"ms": ladder["dynamic"].step_times}
    gpu, = (run["gpu"]["passes"] for run in DATA["runs"] if run["name"] == "dynamic")
    starts["gpu"] = {p.step: ms / 1e3 for p, ms in zip(ladder["dynamic"].passes, gpu["start"])}
    for clock, starts in starts.items():
        ladder_page.open("run=naive&beside=dynamic&step=20")
        ladder_page.run("document.getElementById('clock').value = arguments[0]; "
                        "document.getElementById('clock').onchange()", clock)
        times = ladder_page.run("return views.map(view => ({step: view.now.step, value: "
                                "ticks[state.tick]}))")
        assert times[0]["step"] == 20
        assert times[1]["step"] == max(   # the last one that has begun
            step for step, start in starts.items() if round(1e3 * start, 2) < times[0]["value"])


IN_SIGHT = """
    const within = node => {
      const {top, height} = node.getBoundingClientRect();
      return top >= 0 && top + Math.min(height, 180) <= innerHeight;
    };
    return ["#stop", ".look", ".look .slot.picked"].map(
      selector => document.querySelector(selector)).every(node => !node || within(node))"""


@pytest.mark.thorough
@pytest.mark.parametrize("width, height", [(1400, 900), (820, 1000), (700, 900), (390, 844)])
def test_the_walk_frames_what_it_speaks_of(width, height, ladder_page):
    still.resize(ladder_page.browser, width, height)
    for i, stop in enumerate(DATA["walk"]):
        ladder_page.run("document.querySelectorAll('#walk button')[arguments[0]].click()", i)
        assert ladder_page.texts("#stop") == [stop["text"]] and ladder_page.run(IN_SIGHT), stop
        assert len(ladder_page.texts(".look")) == 1 and f"stop={i + 1}" in ladder_page.hash
        assert ladder_page.run("return views[0].now.step") == stop["show"]["step"]
        assert ladder_page.run("return document.documentElement.scrollWidth") <= width
        assert ladder_page.run("return [...document.querySelectorAll('.pass .scroll')].every("
                               "box => box.scrollWidth <= box.clientWidth)")   # all slots in sight
    ladder_page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_walk_keeps_its_place(ladder_page):
    from selenium.webdriver.common.keys import Keys
    for i in range(len(DATA["walk"])):   # the first screen is the first stop
        stop, there = f"stop={i + 1}", ladder_page.hash
        assert stop in there and not ladder_page.run("return $('return').offsetParent")
        ladder_page.press(Keys.ARROW_LEFT)
        assert stop in ladder_page.hash != there
        marked, = ladder_page.texts("#walk [aria-current]")
        assert marked.startswith(str(i + 1)) and ladder_page.texts("#stop") == [
            DATA["walk"][i]["text"]]
        strayed = ladder_page.hash
        ladder_page.open(strayed[1:])
        assert ladder_page.hash == strayed and ladder_page.run("return $('return').offsetParent")
        ladder_page.run("$('return').click()")
        assert ladder_page.hash == there
        ladder_page.run("if ($('on').offsetParent) $('on').click()")
    assert not ladder_page.run("return $('on').offsetParent")
    ladder_page.open("stop=7")   # alone it is enough
    assert DATA["walk"][6]["text"] in ladder_page.texts("#stop")


def test_the_timeline_answers_the_mouse(ladder_page):
    ladder_page.open("stop=3")
    ladder_page.run("""
        const box = document.querySelector(".box"), {left, top} = box.getBoundingClientRect();
        const [from] = views[0].across(views[0].run.stepOf.get(8));
        box.dispatchEvent(new PointerEvent("pointermove", {
          bubbles: true, clientX: left + from + 8, clientY: top + 5.5 * 13}));""")
    step = next(run for run in DATA["runs"] if run["name"] == "dynamic")["gpu"]["passes"]
    tip, = ladder_page.texts(".tip")
    assert tip == f"step 8, {sum(step['ms'][8:10]):.1f} ms: long 1 ◐ prefilling 219/219", tip
    assert "stop=3" in ladder_page.hash


def test_try_it(ladder_page):
    """Each choice shows the runs of its setting: their figures, and times that agree with them."""
    grid, names = DATA["grid"], [*DATA["grid"]["knobs"]]
    ladder_page.run("$('tries').click()")
    for selector, number, value in (("input", 0, 0), ("input", 4, False), ("input", 5, True),
                                    ("select", 1, 5), ("input", 2, 2), ("select", 0, 3)):
        ladder_page.run(
            "const node = document.querySelectorAll('#try ' + arguments[0])[arguments[1]];"
            "node[node.type === 'checkbox' ? 'checked' : 'value'] = arguments[2];"
            "(node.oninput ?? node.onchange)({target: node})", selector, number, value)
        state = ladder_page.run("return state.tried")
        assert state[number + 2 * (selector == "input")] == value
        for view, index in enumerate(state[:2]):
            stage = grid["stages"][index]
            knobs = [str(state[2 + names.index(name)]) for name in grid["applies"][stage]]
            setting = ".".join([stage, *knobs])
            figures = grid["runs"][grid["of"][setting]]["figures"]
            said = ladder_page.texts("[data-score=passes]")[view].split(" was ")[0]
            assert said == str(figures["passes"])
            gap = ladder_page.run("return views[arguments[0]].run.gaps.at(-1)[3]", view)
            assert gap == pytest.approx(figures["next"], abs=0.3), setting
            wrong = "{} of {} requests WRONG".format(*grid["wrong"].get(setting, ("", "")))
            assert (f"{stage}: {wrong}" in ladder_page.texts("#try p")[0]) == bool(
                state[-1] and setting in grid["wrong"])
    there = ladder_page.hash
    assert there.startswith("#try=3.5.0.") and ladder_page.open(there[1:]).hash == there


@pytest.mark.thorough
def test_the_address_is_right_after_many_steps(ladder_page):
    ladder_page.open("run=naive")
    ladder_page.run("for (let i = 0; i < 300; i++) go((state.tick + 1) % 70)")
    step = ladder_page.now.split()[1]
    assert ladder_page.hash == f"#run=naive&step={step}"


def test_prompts_neither_break_nor_run(opened):
    model, tokenizer, _ = builtin()
    requests = [Request(tokenizer.encode(text), 3, name=f"<i>{i}") for i, text in enumerate(NASTY)]
    trace = record(LADDER["dynamic"], model, requests, reference=model)
    shown = opened({"<script>": trace}, tokenizer)
    shown.run("document.querySelectorAll('.request .text').forEach(text => text.click())")
    assert [text.removesuffix(" ▸ ") for text in shown.texts(".request .prompt")] == NASTY
    assert shown.texts(".request b") == [f"<i>{i}" for i in range(len(NASTY))]
    assert not shown.run("return 'hacked' in window") and shown.texts("img, .request i") == []


@pytest.mark.thorough
def test_kinds_differ_without_colour(ladder_page):
    """Each kind of slot has a pattern of its own, in both themes."""
    for theme in "light", "dark":
        ladder_page.open(f"theme={theme}")
        patterns = ladder_page.run("""
            return ["prefill", "decode", "recomputed", "pad", "finished"].map(kind => {
              const node = document.body.appendChild(document.createElement("i"));
              node.className = kind;
              return getComputedStyle(node).backgroundImage;
            })""")
        assert len(set(patterns)) == 5


def test_frames_of_a_notebook_do_not_disturb_each_other(opened, chrome, tmp_path):
    frames = [page.inline({stage: recorded(stage)}) for stage in ("naive", "paged")]
    path = tmp_path / "notebook.html"
    path.write_text("<!doctype html>" + "".join(frame._repr_html_() for frame in frames))
    outside = Page(chrome, path).open("mine")
    chrome.switch_to.frame(0)
    outside.run("go(3)")
    assert outside.now.startswith("step 3 of ")
    chrome.switch_to.parent_frame()
    chrome.switch_to.frame(1)
    assert outside.now.startswith("step 0 of ")
    chrome.switch_to.default_content()
    assert outside.run("return location.hash") == "#mine" and outside.complaints() == []
