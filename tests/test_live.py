"""The live page: what the server tells it, and what it shows in a browser."""
import json
from contextlib import contextmanager

import httpx
import pytest
from browser import resize

pytest.importorskip("fastapi")

from test_server import TOKENIZER, expected, serving  # noqa: E402


@contextmanager
def page(running):
    """(next message, ask) of a page that listens."""
    with httpx.stream("GET", running.url + "/live/steps", timeout=30) as stream:
        lines = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data"))
        hello = next(lines)

        def ask(prompt, **body):
            body = {"tab": hello["tab"], "prompt": prompt, "temperature": 0, "seed": 0, **body}
            return running.post("/live/ask", **body).json()["name"]
        yield lines, ask


def until(lines, done):
    """The notes up to the one with which they are `done`."""
    notes = []
    for message in lines:
        for note in message.get("notes", ()):
            notes.append(note)
            if done(notes):
                return notes


def over(notes):
    return len({name for note in notes for name in note["ended"]}) == 3   # requests


def test_a_page_is_told_of_every_step_and_can_hold_them():
    bodies = [{"prompt": prompt, "max_tokens": 12, "temperature": 0, "seed": 0}
              for prompt in ("# a\n" * 30, "b", "c")]
    with serving(max_batch=3, token_budget=16) as running, page(running) as (lines, ask):
        running.post("/live/control", paused=True)
        names = [ask(body["prompt"], max_tokens=12) for body in bodies[:2]]
        waiting = until(lines, lambda notes: len(notes[-1].get("waiting", ())) == 2)
        assert not any(note["pass"] for note in waiting) and running.engine.number == 0
        for _ in range(2):
            running.post("/live/control", steps=1)
        first = until(lines, lambda notes: (notes[-1]["pass"] or {}).get("step") == 1)
        assert running.engine.number == 2
        assert [note["pass"]["work"] for note in first if note["pass"]] == [
            [[names[0], 0, 16]], [[names[0], 16, 16]]]
        with page(running) as (others, _):   # opened late: it is told of all that is under way
            running.post("/live/control", paused=False)
            names.append(ask("c", max_tokens=12))   # told with its first token, in one note
            for notes in waiting + first + until(lines, over), until(others, over):
                told = {new["name"]: new for note in notes for new in note["new"]}
                for note in notes:
                    for name, token in note["tokens"]:
                        told[name]["generated"].append(token)
                words = {int(id): word for note in notes for id, word in note["words"].items()}
                for name, body in zip(names, bodies):
                    tokens = [token for token in told[name]["generated"]
                              if token != TOKENIZER.eot_token]
                    assert TOKENIZER.decode(tokens) == expected(body)[0]
                    assert words.keys() >= {*told[name]["prompt"], *tokens}


def test_requests_end_and_the_server_goes_on_when_the_last_page_is_closed():
    with serving() as running:
        with page(running) as (lines, ask):
            running.post("/live/control", paused=True)
            ask("a", max_tokens=200)
        running.until(lambda: running.ends)
        assert running.ends == {"cancelled": 1}
        running.post("/live/control", paused=True)   # no page is open: nobody could go on
        assert running.post(prompt="b", max_tokens=3).status_code == 200
        assert not running.server.live.state["paused"]
        running.until(lambda: not running.server.live.notes)


def test_a_page_that_opens_during_a_step_takes_nothing_from_the_others():
    with serving() as running, page(running) as (lines, ask):
        live = running.server.live
        describe = live.describe

        def opened(request, words):   # in the middle of `see`, what pages know is new
            live.told = {}
            return describe(request, words)
        live.describe = opened
        name = ask("a", max_tokens=1)
        assert until(lines, lambda notes: name in notes[-1]["ended"])


def test_in_a_browser_tokens_appear_and_no_prompt_becomes_html(chrome):
    hostile = "</script><img src=x onerror='document.title=1'><b>\n# list.append\n"
    want = expected({"prompt": hostile, "max_tokens": 20, "temperature": 0, "seed": 0})[0]
    script = chrome.execute_script
    with serving() as running:
        chrome.get(running.url)
        running.until(lambda: script("return hello !== null"))
        script("""const [box] = document.querySelectorAll('.box.prompt');
                  $('temperature').value = 0; $('tokens').value = 20;
                  box.querySelector('textarea').value = arguments[0];
                  box.querySelector('button').click();""", hostile)
        running.until(lambda: script("return requests.get('r0')?.reason"))
        output = "return document.querySelector('.prompt output').textContent"
        running.until(lambda: script(output) == want)
        running.until(lambda: hostile in script("return $('views').textContent"))
        assert chrome.title == "nanoBatch: live"
        assert not script("return document.images.length")
        for width in 1400, 390:
            resize(chrome, width, 900)
            assert script("return document.documentElement.scrollWidth <= innerWidth")
        assert script("return $('now').textContent").endswith("0 running, 0 waiting")
        assert not [entry for entry in chrome.get_log("browser") if entry["level"] == "SEVERE"]


def test_what_a_page_hears_that_it_does_not_know_does_no_harm(chrome):
    strange = {"new": [], "words": {}, "pass": None, "kept": [], "waiting": [],
               "tokens": [["x", 1]], "tables": {"x": [1]}, "ended": {"x": "stop"}}
    script = chrome.execute_script
    with serving() as running:
        chrome.get(running.url)
        running.until(lambda: script("return hello !== null"))
        script("hear({notes: [arguments[0]]})", strange)   # of a request before the page opened
        number = script("""const usual = hear;
                           hear = () => { hear = usual; throw Error("for the test"); };
                           return hello.tab""")
        running.post("/live/control", speed=9)   # the page is told, and fails
        running.until(lambda: script("return hello.tab") > number)   # it connects again,
        running.until(lambda: len(running.server.live.tabs) == 1)    # and has let go of the old one
        script("boxes[0].name = 'r0'; hear({...hello, server: 0})")   # another server's r0
        assert script("return boxes[0].name") is None
