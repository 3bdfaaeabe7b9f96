"""
The explorer: the data are those of the run, and a real browser shows them.

The browser is a Chromium or Chrome of this machine, driven by Selenium and a chromedriver of the
same version. Where it does not start, its tests are skipped; on Linux with the environment variable
CI they fail.
"""
import json
import math
import os
import re
import shutil
import subprocess
import textwrap
from collections import Counter
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from browser import resize
from common import ROOT, STAGES, knobs_of, mixed, refused, toy

from lab import flags
from lab.checks.traps import broken
from lab.explorer import build, page
from lab.explorer.recorder import record, take_times
from lab.loading.load import load
from lab.loading.stages import SCRIPTS
from lab.simulate.calculated import simulate
from lab.views.plots import COLORS
from lab.views.report import latencies, mean, totals
from request import Request

MODEL = toy(dtype=torch.float32)
PAGED = "paged", "prefix"
BUILTIN, TOKENIZER = load()
COMMITTED = build.PAGE.read_text(encoding="utf-8")
DATA = json.loads(re.search(r'id="data">(.*?)</script>', COMMITTED, re.DOTALL)[1])
RUN_OF = {run["name"]: run for run in DATA["runs"]}
STOPS = {stop["title"]: (i, stop) for i, stop in enumerate(DATA["walk"])}
SIZES = [(1400, 900), (390, 844)]


def recorded(stage="interleaved", requests=None, **knobs):
    return record(STAGES[stage], MODEL, requests or mixed(), MODEL, **knobs)


# --- the data -------------------------------------------------------------------------------------

@pytest.mark.parametrize("stage", STAGES)
def test_slots_and_sights_are_those_of_an_undisturbed_run(stage):
    requests = mixed() + [Request([*range(8), i], 4, arrival=30 + i) for i in range(4)]
    knobs = knobs_of(stage, page_size=4, token_budget=16)
    plain = STAGES[stage](MODEL, [replace(request) for request in requests], **knobs)
    trace = record(STAGES[stage], MODEL, requests, **knobs)
    assert stage != "prefix" or trace.counts["shared_pages"] > 0   # which count as their own
    assert take_times(trace, plain).passes == plain.passes   # with their times
    assert [r.token_times for r in trace.requests] == [r.token_times for r in plain.requests]
    recorder = trace.recording
    assert recorder.wrong == 0
    for p, frame in zip(trace.passes, recorder.frames, strict=True):
        assert not frame["sees"] and not frame["shift"]
        owners, positions = sum(frame["owner"], []), sum(frame["position"], [])
        assert len(owners) == p.slots and len(frame["owner"]) == (1, *p.shape)[-2]
        assert owners.count(-1) == p.pad_slots
        assert sum(owner < -1 for owner in owners) == p.finished_slots
        assert sorted((recorder.requests[owner].name, position) for owner, position
                      in zip(owners, positions) if owner >= 0) == sorted(
            (name, i) for name, first, n in p.work for i in range(first, first + n))
    other = STAGES[stage](MODEL, mixed()[:3])
    assert take_times(trace, other).passes == plain.passes   # it did something else
    fixed = [replace(r, max_new_tokens=len(r.generated), eos_token=None)
             for r in recorder.requests]
    timed = simulate(page.MODEL, page.GPU, STAGES[stage], fixed, **knobs)
    assert build.on_gpu(trace).step_times == timed.step_times
    assert [r.token_times for r in trace.requests] == [r.token_times for r in timed.requests]


def test_the_committed_page_is_that_of_todays_template():
    assert page.filled(DATA) == COMMITTED, "run python -m lab.explorer.build"
    assert "default-src 'none'" in COMMITTED   # it loads nothing


@pytest.mark.thorough
def test_the_committed_page_is_what_the_command_builds():
    assert json.loads(json.dumps(build.data())) == DATA   # on any machine


def test_the_walk_counts_its_figures_itself():
    gaps = {request["name"]: max(b - a for a, b in zip(request["ms"], request["ms"][1:]))
            for request in RUN_OF["prefix"]["requests"]}
    name = max(gaps, key=gaps.get)
    assert f"{name} is preempted, and waits {gaps[name]:.0f} ms" in STOPS["scoreboard"][1]["text"]
    point = STOPS["the point"][1]
    for name in point["show"]["run"], point["show"]["beside"]:   # the stall, and its price
        times = [[request["arrived"], *request["ms"]] for request in RUN_OF[name]["requests"]]
        gaps = [max(b - a for a, b in zip(ms[1:], ms[2:])) for ms in times]
        for wait in max(gaps), max(ms[1] - ms[0] for ms in times):
            assert re.search(rf" {wait:.0f}( ms|\.$)", point["text"])
    assert all(max(RUN_OF[name]["passes"]["reserved"]) <= 26 * 16 for name in (build.SAME, *PAGED))
    assert [name for name, run in RUN_OF.items() if run["check"]["wrong"]] == [build.MASK]


# --- in a browser ---------------------------------------------------------------------------------

LOADS = count()


class Page:
    """A page in the browser. Loading the committed one takes it half a second of CPU time."""

    def __init__(self, browser):
        self.browser, self.run = browser, browser.execute_script

    def texts(self, selector, what="textContent"):
        return self.run("return [...document.querySelectorAll(arguments[0])]"
                        ".map(node => node[arguments[1]])", selector, what)

    def click(self, selector, number=0):
        self.run("document.querySelectorAll(arguments[0])[arguments[1]].click()", selector, number)
        self.drawn()

    def press(self, *keys):
        from selenium.webdriver.common.action_chains import ActionChains
        ActionChains(self.browser, duration=0).send_keys(*keys).perform()
        self.drawn()

    def drawn(self):
        """Waits until a change of requests is drawn, in the next frame."""
        self.run("return new Promise(done => requestAnimationFrame("
                 "() => requestAnimationFrame(done)))")

    def go_to(self, address):
        """Without loading it anew."""
        self.run("location.hash = arguments[0]", address)
        self.run("return new Promise(done => setTimeout(done, 50))")
        return self

    def back(self):
        self.run("""return new Promise(done => {
            addEventListener("popstate", () => done(), {once: true});
            history.back(); })""")

    @property
    def now(self):
        return self.texts("#now")[0]

    @property
    def address(self):
        return self.run("return address()")


@pytest.fixture
def show(chrome, tmp_path):
    """
    show(address, traces) -> Page: the committed one, or one of these runs. An error in it fails the
    test, and so does a request out of it, which the page's own policy refuses.
    """
    def show(address="", traces=None):
        path = tmp_path / "page.html" if traces else build.PAGE
        if traces:
            page.write(path, page.data_of(traces, TOKENIZER))
        chrome.execute_cdp_cmd("Page.resetNavigationHistory", {})   # it holds 50 entries
        # by another name: else only the fragment would change
        chrome.get(f"{path.as_uri()}?{next(LOADS)}#{address}")
        return Page(chrome)

    chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    chrome.get("about:blank")
    chrome.get_log("browser")   # what came before
    yield show
    assert chrome.get_log("browser") == []


def bill(trace, step):
    """The figures of the bill after a step, in its order, as the report of so much has them."""
    requests = [SimpleNamespace(arrival=request.arrival, **{
        name: getattr(request, name)[:sum(at <= step for at in request.token_steps)]
        for name in ("generated", "token_steps", "token_times")}) for request in trace.requests]
    so_far = replace(trace, requests=requests, passes=[p for p in trace.passes if p.step <= step])
    total, waits = totals(so_far), latencies(so_far)
    names = ["forward_passes", "generated", "slots", "useful", "pad_slots", "finished_slots",
             "recomputed", "score_entries", "useful_scores", "padded_keys"]
    seconds = [sum(p.seconds for p in so_far.passes), mean(waits["ttft_seconds"]),
               mean(waits["itl_seconds"]), max(waits["itl_seconds"], default=math.nan)]
    return [*(total[name] for name in names), total["copied_bytes"] / 1e6,
            *(1e3 * each for each in seconds)]


@pytest.mark.parametrize("stage", ["no_cache", "naive", "chunked", "prepacked", *PAGED])
def test_every_number_is_the_traces(stage, show):
    """Of each stage, at every fifth step: the bill, the plan, the tensor, and requests."""
    trace = recorded(stage, **({"pages": 8, "page_size": 4} if stage in PAGED else {}))
    shown, steps = show(traces={stage: trace}), sorted({p.step for p in trace.passes})
    for tick, step in [*enumerate(steps)][::5]:
        shown.run("go(arguments[0])", tick)
        assert shown.now == f"step {step} of {steps[-1]}"
        said = [float(re.sub(r"[^\d.]", "", text) or "nan")
                for text in shown.texts(".bill td:not(.soft)")]
        assert said == pytest.approx(bill(trace, step), abs=0.3, nan_ok=True)   # rounded twice
        passes, planned = [(i, p) for i, p in enumerate(trace.passes) if p.step == step], Counter()
        for (i, p), caption in zip(passes, shown.texts(".pass p"), strict=True):
            assert f"shape ({p.shape[0]}, " in caption or f"shape ({p.slots},)" in caption
            assert f"{p.slots:,} slot" in caption and f"{p.useful:,} useful" in caption
            kinds = Counter(name.split()[1]
                            for name in shown.texts(f'[data-pass="{i}"] .slot', "className"))
            assert (kinds.total(), kinds["pad"], kinds["finished"], kinds["recomputed"]) == (
                p.slots, p.pad_slots, p.finished_slots, p.recomputed)
        for title in shown.texts(".plan .bar span", "title"):
            who, n = title.split(" token")[0].split(": ")
            planned[who] += int(n)   # a request may have two kinds
        assert planned == Counter({who: n for _, p in passes for who, _, n in p.work})
        if stage != "no_cache":   # where whatever runs is computed again
            again = any("computed again" in text for text in shown.texts(".request .state"))
            assert again == any(p.recomputed for _, p in passes)
        for request, waits in zip(trace.requests, shown.texts(".request .waits"), strict=True):
            n = sum(at <= step for at in request.token_steps)
            first = request.token_steps[0] - request.arrival + 1
            assert waits.startswith(f"{n} token") and f"TTFT {first} step" in waits if n else (
                waits == f"prompt of {len(request.prompt)} tokens")
    states = shown.run("""return ticks.flatMap((_, tick) => {
        go(tick);
        return views[0].states.map(({kind}) => kind);
      })""")
    assert stage not in PAGED or {"preempted", "recomputed"} <= {*states}


@pytest.mark.parametrize("bug, stage, said", [
    ("published mask", "interleaved", r"it sees \d+ pads?\b"),
    ("causal rule from the top left", "chunked", r"it does not see \d keys of its own"),
    ("a stream without boundaries", "ragged_mask", r"it sees \d keys that it must not"),
    ("column positions", "dynamic", "it is computed as if at position 2")])
def test_what_a_bug_does_to_slots_is_recorded_and_said(bug, stage, said, show):
    with broken(bug, show=False):
        trace = recorded(stage)
    frames = trace.recording.frames
    assert trace.recording.wrong > 0 and trace.recording.sentences
    i, slot = next((i, slot) for i, frame in enumerate(frames)
                   for slot in (*frame["sees"], *frame["shift"]))
    row, column = divmod(slot, len(frames[i]["owner"][0]))
    address = f"run={stage}&step={trace.passes[i].step}&slot=0.{i}.{row}.{column}"
    shown = show(address, {stage: trace})
    assert re.search(f"Wrong: {said}", shown.texts(".sees .bad")[0])
    assert any("Check: " in text for text in shown.texts(".verdicts .bad"))
    pads = frames[i]["sees"].get(slot, [[], 0, 0])[1]   # those of the past are in no slot
    assert (bug == "published mask") <= len(shown.texts(".slot.pad.wrong")) <= pads
    shown = show(address, {stage: recorded(stage)})   # without the bug
    assert shown.texts(".slot.wrong, .keys .wrong, .bad b") == []


def test_a_run_of_300_requests_stays_usable(show):
    """Its sights are left out, and no step draws more than those that run."""
    small = toy(loud=False, n_layer=1, n_head=1, n_embd=1, dtype=torch.float32)
    requests = [Request([i % 13] * 12, 4, arrival=i // 3) for i in range(300)]
    trace = record(STAGES["paged"], small, requests)
    shown = show(traces={"paged": trace})
    drawn = shown.run("""return ticks.map((_, tick) => tick).filter(tick => tick % 5 === 0).map(
      tick => {
        go(tick);
        return document.querySelectorAll("*").length;
      })""")
    assert len(drawn) > 20 and max(drawn) < 1000
    assert trace.recording.left_out in shown.texts(".sees p")[0] and trace.recording.left_out
    with broken("column positions", show=False):   # which can be told without them
        assert record(STAGES["dynamic"], small, requests).recording.wrong > 0


def test_keys(show):
    from selenium.webdriver.common.keys import Keys
    shown = show("run=interleaved&beside=ragged&step=4")
    for keys, step in (([Keys.ARROW_RIGHT], 5), ([Keys.ARROW_LEFT] * 2, 3), ([Keys.END], 49),
                       ([Keys.HOME], 0), ([Keys.END, " ", " "], 0)):   # play begins anew
        shown.press(*keys)
        assert shown.now == f"step {step} of 49"
    for key, word in ((" ", "pause"), (" ", "play")):
        shown.press(key)
        assert shown.texts("#play") == [word]
    for _ in range(40):   # to the tensor by Tab alone, and from slot to slot
        shown.press(Keys.TAB)
        if shown.run("return document.activeElement.className") == "grid":
            break
    shown.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ENTER)
    assert re.search(r"slot=0\.0\.\d\.1", shown.address)
    assert len(shown.texts(".slot.picked")) == 1
    shown.press(Keys.ESCAPE)
    assert "slot" not in shown.address


def test_an_address_leads_back(show):
    address = "#run=chunked&beside=paged&step=7&slot=0.7.0.0&theme=dark"
    shown = show(address[1:])
    before = shown.texts("body", "innerText")
    assert shown.go_to("run=naive&ms=50").now.endswith(" ms")
    assert {*shown.texts(".panel:not(.score) h2 small")} == {" · naive"}
    assert show(address[1:]).texts("body", "innerText") == before
    shown.run("go(state.tick + 1)")   # which is written after 0.4 seconds
    hash = shown.run("return new Promise(done => setTimeout(() => done(location.hash), 450))")
    assert hash == shown.address != address
    assert show("%%%&run=%3Cb%3E").now.startswith("step ")


IN_SIGHT = """
    const within = node => {
      const {top, height} = node.getBoundingClientRect();
      return top >= 0 && top + Math.min(height, 180) <= innerHeight;
    };
    return document.querySelectorAll(".look").length === 1 && $("legend").childElementCount > 0
      && [...document.querySelectorAll("#stop, #legend, .look, .look .slot.picked")].every(within)
      && document.documentElement.scrollWidth <= innerWidth"""


@pytest.mark.parametrize("size", SIZES)
def test_the_walk_frames_what_it_speaks_of_and_keeps_its_place(size, show):
    shown = show()
    resize(shown.browser, *size)
    for i, stop in enumerate(DATA["walk"]):   # the first screen is the first stop
        if "ask" in stop:
            question = shown.run("return $('stop').firstChild.textContent")
            assert question == stop["ask"]["question"] and shown.run(IN_SIGHT), stop
            assert stop["text"] not in shown.texts("body", "innerText")[0]
            main = shown.texts("main", "innerText")[0]
            assert not re.search("longest wait| useful", main, re.IGNORECASE)
            shown.click(".choices button", stop["ask"]["right"])
        before = "Right. " if "ask" in stop else ""
        assert shown.texts("#stop") == [before + stop["text"] + "ask again" * ("ask" in stop)]
        assert shown.run(IN_SIGHT), stop
        assert shown.run("return views[0].now.step") == stop["show"]["step"]
        there = shown.address
        assert f"stop={i}" in there
        shown.run("go(state.tick - 1); play(true); visit(arguments[0])", i)   # away, and back
        assert shown.address == there and shown.texts("#play") == ["play"]
        shown.run("if (DATA.walk[state.stop + 1]) $('on').click()")
    assert shown.texts("#on") == ["your own requests"]
    assert shown.texts(".scores button") == stop["rows"] and stop["rows"][-1] == "prefix"
    shown.click(".scores button", len(stop["rows"]) - 1)   # in the fewest steps
    assert shown.run("return views[0].run.name") == "prefix"


EXITS = """
    const [stop, exits, choice, all] = arguments, half = [];
    const shown = selector => [...document.querySelectorAll(selector)].filter(
      node => node.offsetParent);
    const whole = () => views.length && views.every(({panels}) => Object.values(panels).every(
      panel => panel.childElementCount)) && $("now").textContent.startsWith("step ")
      && (state.own ? shown(".row").length === state.own.requests.length
        : shown("#stop")[0].textContent) && $("views").childElementCount;
    const come = () => {
      answered.clear();
      shown("#walk button")[stop + 1].click();
      if (choice >= 0) shown(".choices button")[choice].click();
      if (all) $("all").click();
      return shown(exits);
    };
    const number = come().length;
    for (let n = 0; n < number; n++) {
      const exit = come()[n], {textContent} = exit;
      exit.click();
      if (!whole()) half.push(textContent);
    }
    return [number, half];"""


def test_every_exit_from_every_stop_leads_to_a_whole_page(show):
    """Whatever was answered; and no exit raises an error, see `show`."""
    shown = show()
    for i, stop in enumerate(DATA["walk"]):
        ways = [("#walk button, #stop button, #all, #on, .scores button", -1, False),
                ("#mine, #all, #on, #edit", -1, True)]
        for choice in range(4) if "ask" in stop else ():   # 3: show me
            ways += [("#mine, #stop button, #all, #on", choice, False), ("#edit", choice, True)]
        taken = 0
        for way in ways:
            exits, half = shown.run(EXITS, i, *way)
            assert half == [], (stop["title"], way)
            taken += exits
        assert taken >= len(DATA["walk"]) + 5 + 20 * ("ask" in stop)


@pytest.mark.parametrize("motion, seconds", [("no-preference", "0.9s"), ("reduce", "0s")])
def test_pads_fall_out_and_rows_join(motion, seconds, show):
    """In the end the stream has each token of the rectangle, and no pad; without motion at once."""
    number, stop = STOPS["flat stream"]
    two, wide = ([(math.prod(passes["shape"][i]), sum(passes["work"][i][2::3]))
                  for i, step in enumerate(passes["step"]) if step == stop["show"]["step"]]
                 for passes in (RUN_OF[name]["passes"] for name in ("chunked", "interleaved")))
    tokens, pads = wide[0][1], sum(slots - tokens for slots, tokens in two + wide)
    assert len(two) == 2 and sum(n for _, n in two) == tokens   # the same plan
    shown = show(f"stop={number}")
    features = [{"name": "prefers-reduced-motion", "value": motion}]
    shown.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    shown.run("answer(1)")
    assert shown.texts("#stop")[0].startswith(f"No, not “{stop['ask']['choices'][1]}”. ")
    assert len(shown.texts(".change .slot")) == tokens + pads
    if motion == "no-preference":   # it begins with two passes
        for shape, slots in (0, sum(n for n, _ in two)), (1, wide[0][0]), (2, tokens), (3, tokens):
            shown.click(".shapes button", shape)
            assert len(shown.texts(".change [style*='opacity: 1']")) == slots
    duration, nodes = shown.run("""
        const nodes = [...document.querySelectorAll(".change .slot")];
        return [getComputedStyle(nodes[0]).transitionDuration, nodes.map(
          node => [node.classList[1], node.style.opacity, node.style.transform])]""")
    shown.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert duration.startswith(seconds)
    assert [kind for kind, seen, _ in nodes if seen == "0"] == ["pad"] * pads
    stream = [where for _, seen, where in nodes if seen == "1"]
    assert len({*stream}) == tokens and all(", 0px)" in where for where in stream)


def test_a_phone(show):
    """Targets for a thumb, and pictures that are not stretched."""
    number, _ = STOPS["padding"]
    shown = show(f"stop={number}")
    resize(shown.browser, 390, 844)
    shown.run("answer(1)")
    assert shown.texts(".sees p")[0].startswith("A pad here sees no key.")   # left of all tokens
    assert shown.run("""return [...document.querySelectorAll("button, select")].filter(
        node => node.offsetParent).map(node => node.getBoundingClientRect()).every(
        ({width, height}) => width >= 40 && height >= 40)""")
    bottom = shown.run("return innerHeight - $('on').getBoundingClientRect().bottom")
    assert 0 <= bottom < 150   # "next" is at the thumb
    assert shown.run("""return [...document.querySelectorAll("canvas")].every(
        ({width, clientWidth}) => width === clientWidth)""")
    shown.run("""
        const {left, top} = document.querySelectorAll(".slot")[300].getBoundingClientRect();
        document.querySelector(".grid").dispatchEvent(new MouseEvent("click", {
          bubbles: true, clientX: left + 0.5, clientY: top + 3}));""")
    assert shown.run("return state.slot").endswith(".1.81")   # 300 = 219 + 81


def test_prompts_neither_break_nor_run(show):
    nasty = [
        "</script><script>window.hacked = 1</script>", "<img src=x onerror='window.hacked = 1'>",
        "\"quotes\" 'and' `ticks` \\ & &lt; ${1}", "\u05e9\u05dc\u05d5\u05dd \u202e right to left",
        "\U0001f600 \U0001f469\u200d\U0001f469\u200d\U0001f467 na\u00efve \u2028 \u2029 {{js}}"]
    requests = [Request(TOKENIZER.encode(text), 3, name=f"<i>{i}") for i, text in enumerate(nasty)]
    trace = record(STAGES["dynamic"], BUILTIN, requests, BUILTIN)
    shown = show(traces={"</script>&": trace})
    shown.run("go(ticks.length - 1)")
    shown.run("document.querySelectorAll('.request .text').forEach(text => text.click())")
    assert [text.removesuffix(" ▸ ") for text in shown.texts(".request .prompt")] == nasty
    assert shown.texts(".request .answer") == [TOKENIZER.decode(request.generated)
                                               for request in trace.requests]
    assert shown.texts(".request b") == [f"<i>{i}" for i in range(len(nasty))]
    assert not shown.run("return 'hacked' in window") and shown.texts("img, .request i") == []


# --- the visitor's own requests -------------------------------------------------------------------

OWN = "own=24-40_60-24-10_120-9-30-1_70-5-0-1&memory=128&page_size=8&common=40&run=paged"


def test_the_scoreboard_is_that_of_pythons_stages(show):
    """What stands in the address, as requests for `generate`; and it picks the stage."""
    from test_twin import python
    requests = [{"prompt": prompt, "answer": answer, "limit": answer, "arrival": arrival,
                 "shared": shared} for prompt, answer, arrival, shared in (
        (24, 40, 0, 0), (70, 5, 0, 40), (60, 24, 10, 0), (120, 9, 30, 40))]
    fit = {"naive": 512 // (120 + 40 - 1), "dynamic": 512 // (120 + 9 - 1)}   # surely, at once
    shown = show(OWN.replace("memory=128", "memory=512"))
    for stage, row in zip(SCRIPTS, shown.run(
            "return [...$('views').querySelectorAll('.scores tr')].slice(1).map("
            "row => [...row.querySelectorAll('td')].map(cell => cell.textContent))"), strict=True):
        run = python(stage, requests, {"max_batch": fit.get(stage, 8), "token_budget": 64,
                                       "page_size": 8, "pages": 64, "max_kv_tokens": 512,
                                       "in_ms": True})
        passes, times = run["passes"], run["token_times"]
        useful = sum(p["useful"] for p in passes) / sum(p["slots"] for p in passes)
        gap = max(b - a for some in times for a, b in zip(some, some[1:]))
        first = max(some[0] - r["arrival"] for some, r in zip(times, requests))
        speed = 1e3 * sum(map(len, times)) / max(some[-1] for some in times)
        held, at_once = (max(p[name] for p in passes) for name in ("reserved", "at_once"))
        assert row == [f"{len(passes):,}", f"{useful:.0%}", f"{speed:,.0f}", f"{first:,.0f}",
                       f"{gap:,.0f}", f"{at_once}", f"{held} of 512"]
    shown.click(".scores button", 5)
    assert "run=ragged" in shown.address
    shown = show(OWN + "&run=paged&beside=ragged")
    shown.click(".scores button", 5)   # the two change places
    assert "run=ragged&beside=paged" in shown.address


def test_a_request_that_can_never_fit_says_so(show):
    shown = show(OWN + "&beside=ragged")
    for memory, reasons in (128, [""] * 4), (
            64, ["", *(f"{n} KV tokens, there are 64" for n in (83, 128, 74))]):
        shown.run("state.own.memory = arguments[0]; redraw()", memory)
        assert shown.run("return Object.keys(STAGE_KNOBS).map(stage => ownRun(stage).requests.map("
                         "r => r.refused))") == [reasons] * len(SCRIPTS)
    assert shown.run("return views[0].run.requests[0].ms.length") == 40   # the others run
    shown.run("state.own.memory = 16; redraw()")
    assert shown.texts(".scores .soft") == ["no request fits into its memory"] * len(SCRIPTS)
    assert re.search("step 0: nothing runs. A can never run: 63 KV .*; nor can B C D",
                     shown.texts("#said")[0])


def test_each_control_changes_the_link_and_back_takes_it_back(show):
    from selenium.webdriver.common.keys import Keys
    shown = show(OWN)

    def changed(want):
        shown.run("saveAddress()")   # which happens by itself, 0.4 seconds later
        assert want in shown.run("return location.hash")
        shown.back()
        assert OWN in shown.address

    for number, key, want in ((0, Keys.ARROW_RIGHT, "own=25-40_60"), (2, Keys.ARROW_LEFT, "24-36_"),
                              (4, Keys.ARROW_RIGHT, "24-40-1_"), (9, Keys.ARROW_RIGHT, "60-24-11_"),
                              (20, Keys.ARROW_LEFT, "max_batch=7")):
        shown.run("document.querySelectorAll('.row input, .knob input')[arguments[0]].focus()",
                  number)
        shown.press(key)
        changed(want)
    shown.run("document.querySelector('.row input').focus()")
    shown.press(*[Keys.ARROW_RIGHT] * 3)   # in quick succession: one change
    changed("own=27-40_")
    for typed, want in ("157", "157-40_"), ("9999", "own=999-40_"):   # the last one that fits
        shown.run("const [, exact] = document.querySelectorAll('.row input'); exact.select()")
        shown.press(typed)
        changed(want)
    for selector, number, want in (
            ("#more", 0, "70-5-0-1_70-5-0-1&"), (".row button", 0, "24-40-0-1"),
            (".row button", 1, "own=60-24-10_120"),
            ("#presets button", 3, "max_new_tokens=128&run=paged&beside=ragged")):
        shown.click(selector, number)
        changed(want)
    assert len(shown.texts(".row")) == 4
    shown.click("#more")
    hash = shown.run("return new Promise(done => setTimeout(() => done(location.hash), 600))")
    assert "70-5-0-1_70-5-0-1" in hash   # by itself


def test_one_returns_to_what_one_has_left(show):
    """To the stages of one's own requests, and to the step that an address names."""
    shown = show(OWN.replace("run=paged", "run=chunked&beside=ragged"))
    shown.run("go(7)")
    step, address = shown.now, shown.address
    assert (shown := show(address[1:])).now == step
    shown.click("#walk li:nth-child(4) button")
    shown.click("#mine")
    assert [shown.now, shown.address] == [step, address]
    for number in 4, 6:
        shown.click(f"#walk li:nth-child({number}) button")
    for there in "stop=1", address:
        shown.run("play(true)")
        shown.back()
        assert there in shown.address and shown.texts("#play") == ["play"]
    assert shown.now == step


def test_a_damaged_link_says_what_is_lost(show):
    shown = show()
    for address, said in (
            ("own=24-40_x_12-60&page_size=0", "1 request (“x”), page size=0 (now 16)"),
            ("own=0-x_&memory=-1", "2 requests (“0-x”, “”), memory=-1 (now 2048)"),
            ("own=24-40&run=pagged&memry=9", "memry, run=pagged (paged is shown)"),
            ("run=naive&beside=ragged&step=3", ""), ("stop=3", ""),
            ("run=nothing&step=-5", "run=nothing (unbatched is shown)"),
            ("run=naive&beside=two", "beside=two (none is shown)"),
            ("nothing", "nothing"), ("stop=3&stpe=4", "stpe"),
            ("step=1e9&slot=9.9.9.9&stop=10", "stop=10")):
        assert shown.go_to(address).texts("#note") == [
            said and f"In this link, {said} could not be read."]
    shown.click("#mine")
    assert shown.texts("#note") == [""]   # it is said once


def test_the_focus_stays_where_a_request_is_removed(show):
    shown = show(OWN)
    for left, label in ((3, "remove C"), (2, "remove B")):
        shown.run("[...document.querySelectorAll('.out')].at(-1).focus()")
        shown.press("\ue007")   # Enter
        assert len(shown.texts(".row")) == left
        assert shown.run("return document.activeElement.ariaLabel") == label


def test_what_is_drawn_after_a_change_is_what_its_address_draws(show):
    """A change fills the frames that are there; a page that is opened makes them anew."""
    pixels = "return [...document.querySelectorAll('canvas')].map(canvas => canvas.toDataURL())"
    shown = show(OWN + "&beside=naive&ms=40")
    shown.click("#more")
    shown.run("go(3)")
    drawn = [shown.texts("body", "innerText"), shown.run(pixels)]
    again = show(shown.address[1:])
    assert [again.texts("body", "innerText"), again.run(pixels)] == drawn


def test_a_mouse_may_press_anywhere_on_a_bar_and_a_finger_on_its_thumb(show):
    shown = show(OWN)
    for size in SIZES:
        resize(shown.browser, *size)
        hits = shown.run("""
            return [...document.querySelectorAll(".row .length [type=range]")].map(node => {
              node.scrollIntoView({block: "center"});
              const {left, top, width, height} = node.getBoundingClientRect();
              const thumb = parseFloat(getComputedStyle(node).getPropertyValue("--thumb"));
              const at = left + 1 + thumb / 2 + (width - 2 - thumb) * node.value / node.max;
              return [at, left + width - 4].map(
                x => document.elementFromPoint(x, top + height / 2) === node);
            });""")
        assert hits == [[True, size[0] > 760]] * 8, size   # a mouse may press anywhere


def test_requests_are_pasted_as_lengths_and_as_json(show):
    shown = show()
    for text, want, said in (
            ("500 60\n\n40, 120", "own=500-60_40-120&", "2 requests."),
            ('{"prompt": 30, "answer": 8}\n{"prompt": 4, "answer": 9, "arrival": 5}\n4 5',
             "own=30-8_4-9-5_4-5&", "3 requests."),
            ("{", "4-5&", "line 1 is not JSON"), ("", "4-5&", "1 to 40 requests"),
            ("8 9\n0 5", "4-5&", "line 2: a prompt's tokens"),
            ("8", "4-5&", "line 1: two to four numbers"),
            ('{"prompt": 4}', "4-5&", "line 1: “answer” is missing"),
            ('{"prompt": 4, "answer": 5, "arrival": -5}', "4-5&", "line 1: an arrival in ms"),
            # from a table: a head, an arrival, quotation marks, a fourth column
            ('prompt,answer,arrival\n"30","8",5\n40;9;0', "own=30-8-5_40-9&", "2 requests."),
            ('{"prompt": "30", "answer": 8, "shared": true}\n30 8 0 1', "own=30-8-0-1_30-8-0-1&",
             "2 requests."),
            ("prompt answer", "30-8-0-1&", "1 to 40 requests"),
            ("30 many", "30-8-0-1&", "line 1: “many” is no number"),
            ("prompt answer\n\n30 8\n30 many", "30-8-0-1&", "line 4: “many” is no number"),
            ('{"prompt": 4, "answer": "few"}', "30-8-0-1&", "line 1: an answer's tokens must be a "
             "whole number from 1 to 2,048, not few"),
            ('{"prompt": 4, "max_tokens": 5}', "30-8-0-1&", "line 1: “max_tokens” is unknown")):
        shown.run("""if (!state.own) openOwn();
                     document.querySelector("textarea").value = arguments[0];""", text)
        shown.click(".paste button")
        assert want in shown.address
        assert shown.texts(".paste [role=status]")[0].startswith(said)


def test_a_line_says_the_plan_and_what_waits_for_what(show):
    own, shown = "own=40-9_40-9_40-9_9-9&memory=112", show()
    for stage, step, said in (
            ("paged", 0, r"A \(40\), B \(24\)\. C D wait for the token budget"),
            ("paged", 1, r"17 of 64 tokens, .* B \(16\)\. C D .* memory: C .* 3 pages, 1 free"),
            ("ragged", 1, r"B \(16\)\. C D wait for memory: C .* 48 tokens .*, 16 free"),
            ("ragged&max_new_tokens=20", 0, r"B C D .* memory: B .* 59 tokens .*, 53 free"),
            ("chunked&max_batch=2", 1, r"B \(16\)\. C D wait for a place"),
            ("dynamic", 1, r"2 decodes\. C D wait for a place: more than 2 at once"),
            ("dynamic", 9, r"C \(40\), D \(9\)\. 31 of its 80 slots")):
        shown.go_to(f"{own}&run={stage}").run("go(arguments[0])", step)
        assert re.search(said, shown.texts("#said")[0])
    sentences = """return ticks.map((_, i) => { go(i); return [
        $("said").textContent, $("other").firstElementChild.textContent]; })"""
    shown.go_to("own=30-40_30-40_30-40&memory=128&run=paged&beside=ragged")
    first, second = map("\n".join, zip(*shown.run(sentences)))
    for said, sentence in (
            (first, r"C \(preempted\) waits for the next step"),
            (first, r"paged, step .* C \(preempted\) waits for memory: C .* 3 pages, [02] free"),
            (second, "ragged, step .* B C wait for memory: B .* 69 tokens .*, 59 free")):
        assert re.search(sentence, said), said
    assert shown.run("return $('said').ariaLive") == "polite"


def test_the_clock_in_ms_plays_ms(show):
    delays, ticks = show(OWN).run("""
        const delays = [], usual = setTimeout;
        window.setTimeout = (call, delay) => { delays.push(delay); if (delays.length < 9) call(); };
        writeAddress = () => {};
        play(true);
        window.setTimeout = usual;
        return [delays, ticks];""")
    steps = [b - a for a, b in zip(ticks, ticks[1:])]
    assert [delay / delays[0] for delay in delays] == pytest.approx(
        [step / steps[0] for step in steps[:len(delays)]])


@pytest.mark.parametrize("size", [(1280, 800), (1366, 650)])
def test_two_timelines_fit_a_laptop_and_so_do_the_knobs(size, show):
    shown = show()
    resize(shown.browser, *size)
    bottoms = "return [...document.querySelectorAll(arguments[0])].map(" \
        "node => node.getBoundingClientRect().bottom)"
    stop = shown.run(bottoms, ".panel")
    assert len(stop) == 2 and max(stop) < size[1], stop   # the first one, whole
    shown.go_to(shown.run("return PRESETS.mixed[0]") + "&beside=ragged")
    own = shown.run(bottoms, "#lines, #other, #knobs, #more, #few, #looks")
    assert shown.run("return state.own.requests.length") == 8 and len(own) == 6
    assert max(own) < shown.run("return $('transport').getBoundingClientRect().top"), own


def test_both_pictures_of_the_first_stop_are_in_sight_on_a_phone(show):
    shown = show()
    resize(shown.browser, 390, 844)
    bar, *pictures = shown.run("""return [...document.querySelectorAll("#transport, canvas")].map(
        node => node.getBoundingClientRect()).map(({top, bottom}) => [top, bottom])""")
    assert len(pictures) == 2 and pictures[1][1] <= bar[0], (bar, pictures)


@pytest.mark.parametrize("width", [390, 320])
def test_a_phone_can_be_read_and_nothing_overflows(width, show):
    shown = show()
    resize(shown.browser, width, 844)
    stops = [f"stop={i}" for i in range(len(DATA["walk"]))]
    for address in (*stops, "stop=4&all=1&run=chunked&ms=50", OWN + "&beside=ragged"):
        sizes = shown.go_to(address).run("""
            return [...document.querySelectorAll("body *")].filter(
              node => node.offsetParent && node.firstChild?.nodeType === Node.TEXT_NODE).map(
              node => parseFloat(getComputedStyle(node).fontSize)).filter(size => size > 0)""")
        assert min(sizes) >= 11, address
        assert shown.run("return document.documentElement.scrollWidth") == width, address
    # whoever comes from the walk begins with what it is about
    assert 0 <= shown.run("return $('bench').getBoundingClientRect().top") < 150
    top = shown.run("$('more').scrollIntoView(); return $('top').getBoundingClientRect().top")
    assert abs(top) < 1   # the timeline stays above the bars


def test_recorded_runs_follow_from_their_lengths(show):
    """One painter draws both: the twin's columns are those that the recorder saw."""
    differ = show().run("""return [...RUNS.keys()].map(recorded).flatMap(run => {
        const stage = run.name.split(",")[0], recorded = run.passes;
        if (!STAGE_KNOBS[stage] || /published/.test(run.name)) return [];
        const twin = prepare(computed(stage, lengthsOf(run.requests), run.knobs)), {passes} = twin;
        const owner = passes.shape.map((_, pass) => slotsOf(twin, pass).owner);
        const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
        const names = Object.keys(passes).filter(name => recorded[name]
          && !["start", "begin", "ms", "copied_bytes"].includes(name));
        const arrived = run.requests.every(
          ({arrived}, r) => Math.abs(arrived - twin.requests[r].arrived) < 0.02);   // rounded
        return [run.name, ...names.filter(name => !same(passes[name], recorded[name])),
                ...same(owner, recorded.owner) ? [] : ["owner"], ...arrived ? [] : ["arrived"]];
      })""")
    assert sorted(differ) == sorted([*SCRIPTS, build.SAME])


def test_a_runs_lengths_become_own_requests_and_its_limit_binds_all_stages(show):
    lengths = "const {run, beside, own} = state; return [run, beside, own.requests.length]"
    small = recorded("prefix", pages=8, page_size=4, token_budget=16)
    small.recording.knobs["policy"] = "sjf"   # as --page says it
    many = [Request([i % 13] * 50, 5) for i in range(40)]   # 54 tokens, or 4 pages
    wide = record(SCRIPTS["ragged"], BUILTIN, many, max_batch=40)
    # where none was set, one's own requests have a memory that is enough
    for traces, said, limit, own, memory in (
            ({stage: recorded(stage) for stage in ("dynamic", "prefix")}, "dynamic recorded",
             " no limit", ["dynamic", "prefix", 11], 2048),
            ({"prefix": small}, "prefix recorded under sjf, here fcfs",
             " of 32", ["prefix", "", 11], 32),
            ({"ragged, varlen": wide}, "ragged recorded",
             " no limit", ["ragged", "", 40], 40 * 4 * 16)):
        shown = show(traces=traces)
        stages = shown.texts(".scores th[scope=row]")
        assert len(stages) == len(SCRIPTS) and [text for text in stages if " " in text] == [said]
        assert {*shown.texts(".scores td small")} == {limit}
        shown.click("#edit")
        assert shown.run(lengths) == own and shown.run("return state.own.memory") == memory


def test_with_little_memory_no_stage_takes_more(show):
    shown = show()
    scores = shown.run("navigate(PRESETS['little memory'][0]); return ownScores()")
    assert all(score["memory"][0] <= score["memory"][1] == 512 for score in scores.values())
    assert {*sorted(scores, key=lambda stage: scores[stage]["speed"])[-2:]} == {*PAGED}


def test_each_preset_shows_what_its_line_says(show):
    """A lecturer's examples, in two actions each: open the editor, and press the button."""
    shown = show()
    shown.click("#mine")
    seen = {}
    for number, name in enumerate(shown.run("return Object.keys(PRESETS)")):
        shown.click("#presets button", number)
        seen[name] = [shown.run("return ownScores()"), shown.texts("#looks")[0]]

    def said(name, *figures):
        assert all(figure in seen[name][1] for figure in figures), seen[name][1]
        return seen[name][0]

    mixed = seen["mixed"][0]
    assert mixed["naive"]["useful"] < 0.6 and mixed["ragged"]["useful"] == 1
    said("mixed", f"{mixed['naive']['useful']:.0%}", "100%")
    waits = [seen["a long prompt"][0][stage]["next"] for stage in ("dynamic", "chunked", "ragged")]
    assert waits[0] > 2 * waits[1] > 3 * waits[2]   # the stall
    said("a long prompt", *(f"{wait:.1f} ms" for wait in waits))
    alike = seen["one system prompt"][0]
    assert alike["prefix"]["first"] < alike["paged"]["first"] / 3
    assert alike["prefix"]["at_once"] > alike["paged"]["at_once"]
    said("one system prompt", *(f"{alike[stage]['first']:.1f} ms" for stage in PAGED))
    little = seen["little memory"][0]
    assert little["paged"]["at_once"] > 2 * little["ragged"]["at_once"]
    assert little["paged"]["speed"] > 2 * little["ragged"]["speed"]
    said("little memory", f"{little['paged']['speed']:.0f} tokens/s",
         f"{little['ragged']['speed']:.0f} tokens/s")
    shown.click("#more")
    assert shown.texts("#looks") == [""]   # these are other requests


@pytest.mark.parametrize("size", [(1280, 800), (1366, 650)])
def test_the_scoreboard_is_in_sight_while_a_bar_is_moved(size, show):
    shown = show(OWN)
    resize(shown.browser, *size)
    sight = """return ["#few tr", "#lines canvas", ".row input"].flatMap(
        selector => [...document.querySelectorAll(selector)]).every(node => {
          const {top, bottom, right} = node.getBoundingClientRect();
          return top >= 0 && right <= innerWidth
            && bottom <= $("transport").getBoundingClientRect().top; })"""
    assert shown.run(sight)
    figures = "return [...document.querySelectorAll('#few td')].map(node => node.textContent)"
    before = shown.run(figures)
    shown.run("""const bar = document.querySelector(".row input");
                 bar.value = bar.max; bar.dispatchEvent(new Event("input"))""")
    shown.drawn()
    after = shown.run(figures)
    assert len(after) == 3 * len(SCRIPTS) and after != before
    assert shown.run(sight)
    few = [[cell for cell in row] for row in zip(*[iter(after)] * 3)]
    whole = shown.run("""return [...document.querySelectorAll(".scores tr")].slice(1).map(
        row => ["speed", "first", "next"].map(
          key => row.querySelector(`[data-score=${key}]`).textContent))""")
    assert few == whole   # of one computation
    shown.click("#few button", 1)
    assert "run=naive" in shown.address


def test_a_refused_value_does_not_stay_in_its_field(show):
    from selenium.webdriver.common.keys import Keys
    shown = show(OWN)
    shown.run("document.querySelectorAll('.row input')[1].select()")
    shown.press("0", Keys.TAB)
    assert shown.texts(".row [type=number]", "value")[0] == "24"
    assert shown.texts("#note") == [
        "A: prompt: a whole number from 1 to 8,192, please, not 0. It stays 24."]


def test_back_brings_requests_back_that_a_foreign_address_replaced(show):
    shown = show(OWN)
    shown.click("#more")   # and at once somebody pastes another address
    before = shown.address
    shown.go_to("own=4-5")
    assert shown.run("return state.own.requests.length") == 1
    shown.back()
    assert shown.run("return state.own.requests.length") == 5 and shown.address == before


def test_many_tokens_are_computed_a_stage_at_a_time_and_the_page_says_so(show):
    shown = show()
    few, all_figures = shown.run("""
        navigate(arguments[0]);
        return ["#few td", ".scores .soft"].map(
          selector => [...document.querySelectorAll(selector)].map(node => node.textContent));
        """, "own=" + "_".join(["2000-300"] * 40) + "&memory=16384&run=paged")
    assert all_figures == ["computing …"] * (len(SCRIPTS) - 1)   # those that are not shown
    assert few.count("…") == 3 * len(all_figures)
    shown.run("edit(own => { own.requests[0][0] = 1000; })")
    shown.drawn()
    assert shown.texts("#note") == ["Computing 40 requests with 12,000 tokens of answers …"]
    whole = shown.run("""return new Promise(done => {
        const look = () => document.querySelectorAll(".scores .soft").length || !$("few").innerText
          || $("note").textContent ? setTimeout(look, 50) : done(ownScores());
        setTimeout(look, 400); })""")
    assert len(whole) == len(SCRIPTS)
    assert shown.texts("#few td")[0] == f"{whole['unbatched']['speed']:,.0f}"
    assert shown.texts("#note") == [""]


def test_a_timeline_says_of_which_stage_it_is(show):
    names = show(OWN + "&beside=ragged").texts("canvas", "ariaLabel")
    assert [name.split(":")[0] for name in names] == ["paged", "ragged"]


def test_a_badge_lies_on_no_number(show):
    """Of the axis: it is left out there."""
    lies = show("run=dynamic&ms=100").run("""
        const pen = views[0].panels.timeline.querySelector("canvas").getContext("2d");
        const usual = pen.fillText, drawn = [];
        pen.fillText = (text, x, y) => drawn.push([text, x, x + pen.measureText(text).width]);
        const lies = [];
        for (let tick = 0; tick < ticks.length; tick++) {
          drawn.length = 0;
          go(tick);
          const {cursor, box} = views[0], badge = getComputedStyle(cursor, "::after");
          const wide = parseFloat(badge.width) + 6, late = cursor.classList.contains("late");
          const left = cursor.offsetLeft + 2, right = cursor.offsetLeft + cursor.offsetWidth - 2;
          const [from, to] = late ? [right - wide, right] : [left, left + wide];
          for (const [text, a, b] of drawn) {
            if (text !== "slots" && a < to && b > from) lies.push([tick, text, a, b, from, to]);
          }
        }
        pen.fillText = usual;
        return lies;""")
    assert lies == []


def test_the_published_page_knows_its_address(show, tmp_path):
    """The commands of the workflow that publishes it, run on a copy; and what it copies then."""
    workflow = (ROOT / ".github" / "workflows" / "pages.yml").read_text(encoding="utf-8")
    commands = [textwrap.dedent(block) for block in re.findall(
        r"run: \|\n((?: {10}.*\n)+)", workflow)]
    ask, fill = commands
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    address, output = "https://someone.github.io/nanoBatch/", tmp_path / "output"
    for name, answer in ("off", "exit 1"), ("on", f"echo {address}"):
        bin = tmp_path / name
        bin.mkdir()
        (bin / "gh").write_text(f"#!/bin/sh\n{answer}\n")
        (bin / "gh").chmod(0o755)
        output.write_text("")
        shell = {"PATH": f"{bin}:{os.environ['PATH']}", "GITHUB_OUTPUT": output,
                 "GITHUB_REPOSITORY": "someone/nanoBatch", "ADDRESS": address}
        subprocess.run(["bash", "-e", "-c", ask], env=shell, cwd=tmp_path, check=True)
        assert output.read_text() == f"address={address if name == 'on' else ''}\n"
    build, publish = workflow.split("\n  publish:\n")
    without = [step for step in build.split("      - ")[1:]
               if "if: steps.site.outputs.address" not in step]
    assert len(without) == 2 and "deploy" not in build   # where Pages is off, they are all
    assert "if: needs.build.outputs.address" in publish and "environment:" in publish
    subprocess.run(["bash", "-e", "-c", fill], env=shell, cwd=tmp_path, check=True)
    assert (tmp_path / "site" / "index.html").read_bytes() == (
        tmp_path / "site" / "explorer.html").read_bytes()
    shown = show(OWN)
    shown.browser.get(f"{(tmp_path / 'site' / 'index.html').as_uri()}#{OWN}")
    shown.click("#copy")
    assert shown.texts("#note") == [address + shown.address]


def test_what_is_shown_can_be_saved_as_a_picture(show):
    """For slides: without controls; also the page of a run. The browser draws it, as an image."""
    drawn = """return drawPage().then(canvas => {
        const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const colors = new Map();
        for (let i = 0; i < data.length; i += 4) {
          const color = [data[i], data[i + 1], data[i + 2]].join();
          colors.set(color, (colors.get(color) ?? 0) + 1);
        }
        return [canvas.width / innerWidth, canvas.height, Object.fromEntries(colors),
                canvas.toDataURL().slice(0, 15)]; })"""
    decode = ",".join(str(int(COLORS["decode"][i:i + 2], 16)) for i in (1, 3, 5))
    dark = {"22,24,27", "29,32,36"}
    for address, traces in (("stop=0", None), (OWN + "&beside=ragged&theme=dark", None),
                            ("theme=dark", {"dynamic": recorded("dynamic")})):
        shown = show(address, traces)
        ratio, high, colors, kind = shown.run(drawn)
        assert ratio == 2 and high > 400 and kind == "data:image/png;"
        assert colors[decode] > 5000   # the timeline is in it
        assert (max(colors, key=colors.get) in dark) == ("dark" in address)
    text = shown.run("return copyOf(document.body).innerText + drawingOf(9, 9)")
    assert "Timeline" in text and 'id="transport"' not in text and "<button id=" not in text
    saved = shown.run("""return new Promise(done => {
        HTMLAnchorElement.prototype.click = function () { done([this.download, this.href]); };
        $("picture").click(); })""")
    assert saved[0].endswith(".png") and saved[1].startswith("data:image/png;base64,")


def test_a_link_with_a_title_and_a_step_can_be_copied_and_pasted(show):
    shown = show(OWN + "&ms=200")
    shown.run("$('title').focus()")
    shown.press("Why <b>pages</b>?")
    step, address = shown.now, shown.address
    assert "title=Why+%3Cb%3Epages%3C%2Fb%3E%3F&own=" in address
    shown.click("#copy")
    assert shown.texts("#note")[0].endswith(address)   # all of it that others can use: it is a file
    for link in address, "https://example.org/explorer.html" + address:
        shown.go_to("own=4-5")
        shown.run("document.querySelector('textarea').value = arguments[0]", link)
        shown.click(".paste button")
        assert (shown.now, shown.address) == (step, address)
    shown = show(address[1:])
    assert (shown.now, shown.address) == (step, address)
    assert shown.texts("#about") == ["Why <b>pages</b>?"] == shown.texts("#title", "value")
    assert "Why <b>pages</b>?" in shown.run("return document.title")
    shown.click("#walk li:nth-child(4) button")
    assert "Why" not in shown.run("return document.title") + shown.texts("#about")[0]


def test_kinds_differ_without_colour(show):
    kinds = "prefill", "decode", "recomputed", "pad", "finished"
    patterns = show().run("""return arguments[0].map(className => getComputedStyle(
        document.body.appendChild(element("i", {className}))).backgroundImage)""", kinds)
    assert len({*patterns}) == len(kinds)


def test_a_page_that_cannot_be_written_is_told_before_the_work(monkeypatch, tmp_path):
    (tmp_path / "docs").write_text("a file")
    monkeypatch.setattr(build, "PAGE", tmp_path / "docs" / "explorer.html")
    monkeypatch.setattr(build, "data", lambda: pytest.fail("it has begun"))
    refused("lab.explorer.build: the page .. explorer.html: Not a directory",
            flags.guarded, "lab.explorer.build", build.main)
