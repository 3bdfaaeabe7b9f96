"""The live page: what the server tells it, and what it shows in a browser."""
import json
from contextlib import contextmanager

import httpx
import pytest
from browser import resize

pytest.importorskip("fastapi")

from test_server import TOKENIZER, one, serving  # noqa: E402

ASK = {"max_tokens": 12, "temperature": 0, "seed": 0}


@contextmanager
def page(running):
    """The notes that a page hears. The server's silence fails: its pings come every 15 seconds."""
    with httpx.stream("GET", running.url + "/live/steps", timeout=12) as stream:
        lines = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data"))
        assert next(lines)["model"] == "m"
        yield (note for message in lines for note in message["notes"])


def until(notes, done):
    """The notes up to the one with which they are `done`."""
    seen = []
    while not (seen and done(seen)):
        seen.append(next(notes))
    return seen


def test_pages_are_told_of_every_step_and_can_hold_them():
    prompts = ["# a\n" * 30, "b", "c"]
    with serving(max_batch=3, token_budget=16) as running, page(running) as notes:
        def ask(prompt):
            return running.post("/live/ask", prompt=prompt, **ASK).json()["names"][0]

        def over(seen):
            return len({name for note in seen for name in note["ended"]}) == 3

        running.post("/live/control", paused=True)
        names = [*map(ask, prompts[:2])]
        told = until(notes, lambda seen: len(seen[-1]["waiting"]) == 2)
        assert not any(note["pass"] for note in told) and running.engine.number == 0
        for number in range(2):
            running.post("/live/control", paused=True, step=True)
            told += until(notes, lambda seen: seen[-1]["pass"])
            assert told[-1]["pass"]["work"] == [[names[0], 16 * number, 16]]
        assert running.engine.number == 2
        with page(running) as others:   # opened late: it is told of all that is under way
            running.post("/live/control", pace=0.05, paused=False)   # slow motion goes on by itself
            names.append(ask("c"))   # told with its first token, in one note
            for seen in told + until(notes, over), until(others, over):
                tokens = {new["name"]: new["generated"] for note in seen for new in note["new"]}
                for note in seen:
                    for name, token in note["tokens"]:
                        tokens[name].append(token)
                for name, prompt in zip(names, prompts):
                    answer = [token for token in tokens[name] if token != TOKENIZER.eot_token]
                    assert TOKENIZER.decode(answer) == one(ASK, prompt)[0]


def test_a_page_that_is_opened_later_is_told_of_steps_without_a_hole():
    """Steps that ran while no page was open are told to nobody, and none before them."""
    def steps_of(notes, last):
        return [note["pass"]["step"] for note in until(
            notes, lambda seen: (seen[-1]["pass"] or {}).get("step") == last) if note["pass"]]

    with serving() as running:
        with page(running) as notes:
            running.post("/live/ask", prompt="a", **ASK)
            until(notes, lambda seen: seen[-1]["ended"])
        running.until(lambda: not running.server.live.pages)
        running.post(prompt="b", max_tokens=5, ignore_eos=True)   # nobody sees it
        unseen = running.engine.number
        with page(running):
            running.post("/live/ask", prompt="c", max_tokens=3, temperature=0, seed=0)
            running.until(lambda: running.engine.number > unseen and not running.engine.busy)
            with page(running) as later:
                before = running.engine.number
                running.post("/live/ask", prompt="d", max_tokens=3, temperature=0, seed=0)
                running.until(lambda: running.engine.number > before and not running.engine.busy)
                told = steps_of(later, running.engine.number - 1)
        assert told == [*range(unseen, running.engine.number)]


def test_requests_end_and_the_server_goes_on_when_the_last_page_is_closed():
    with serving() as running:
        with page(running):
            running.post("/live/control", paused=True)
            running.post("/live/ask", prompt="a", max_tokens=200)
        running.until(lambda: running.ends() == {"cancelled": 1})
        running.post("/live/control", paused=True)   # no page is open: nobody could go on
        assert running.post(prompt="b", max_tokens=3).status_code == 200


def test_in_a_browser_tokens_appear_and_no_prompt_becomes_html(chrome):
    hostile = "</script><img src=x onerror='document.title=1'><b>\n# list.append\n"
    want = one(ASK | {"max_tokens": 20}, hostile)[0]
    script = chrome.execute_script
    with serving() as running:
        chrome.get(running.url)
        # a visit sends nothing unasked: others may be waiting
        running.until(lambda: script("return hello && document.getElementById('first')"))
        assert script("return requests.size") == 0 == len(running.server.live.asked)
        script("$('first').click()")
        running.until(lambda: script("return requests.size") == 12)
        assert script("return $('speed').value") == "0.1"

        def chunks():   # of the long prompt, beside others that decode
            works = script("return moments.map(({work}) => work)")
            return sum(any(name == "r6" and n > 1 for name, _, n in work)
                       and sum(n == 1 for *_, n in work) > 2 for work in works)

        running.until(lambda: chunks() > 1)
        assert script("""return moments.some(({tables}) => {
            const pages = Object.values(tables).flat(); return new Set(pages).size < pages.length;
        })""")   # and shared pages
        slowed = "draw(); return $('views').textContent.split('slowed').length - 1"
        assert script(slowed) == 3   # waits, which were longer on purpose
        script("$('speed').value = 0; $('speed').onchange()")
        running.until(lambda: script("return [...requests.values()].every(({reason}) => reason)"))
        bill = script("""moments = moments.slice(-9);   // older tokens are not in its passes
            draw();
            return [...document.querySelectorAll(".bill td:nth-child(2)")].slice(0, 4).map(
              ({textContent}) => Number(textContent));""")
        made = script("""return [...requests.values()].flatMap(({steps}) => steps).filter(
            step => step >= moments[0].step).length""")
        assert bill[:2] == [9, made] and made <= bill[2] == bill[3]
        assert script(slowed) == 0
        assert "step " + str(running.engine.number - 1) in script("return view.cursor.dataset.step")
        script("""const [box] = document.querySelectorAll('.box.prompt');
                  $('temperature').value = 0; $('tokens').value = 20;
                  box.querySelector('textarea').value = arguments[0];
                  box.querySelector('button').click();""", hostile)
        running.until(lambda: script("return requests.get('r12')?.reason"))
        output = "return document.querySelector('.prompt output').textContent"
        running.until(lambda: script(output) == hostile + want)
        running.until(lambda: hostile in script("return $('views').textContent"))
        assert chrome.title == "nanoBatch: live"
        assert not script("return document.images.length")
        for width in 1400, 390:
            resize(chrome, width, 900)
            assert script("return document.documentElement.scrollWidth <= innerWidth")
        assert script("return $('now').textContent").endswith("0 running, 0 waiting")
        rooms = script("return view.run.requests.at(-1).rooms")
        assert any(len(each["room"] or []) > 1 for each in rooms)
        # the same lengths on every stage: one more step is a new drawing of them
        script("scored = -Infinity; drawSoon()")
        rows = "return document.querySelectorAll('.scores tr').length"
        running.until(lambda: script(rows) == 9)
        script("$('one').click()")
        running.until(lambda: script("return $('pause').textContent") == "go on")
        script("""const usual = hear;
                  window.before = hello;
                  hear = () => { hear = usual; throw Error("for the test"); };
                  $('pause').click();""")   # the page is told, and fails:
        running.until(lambda: script("return hello !== window.before"))   # it connects again,
        running.until(lambda: len(running.server.live.pages) == 1)   # and has let go of the old one
        assert not running.server.live.paused
        script("$('speed').value = 0.25; $('speed').onchange(); $('pause').click()")
        running.until(lambda: script("return paused"))
        script("""$('box').click();   // two boxes are sent together
                  for (const box of document.querySelectorAll('textarea')) box.value = 'Two';
                  $('together').click()""")
        running.until(lambda: script("return waiting.length") == 2)
        assert len({*script("return boxes.map(({name}) => requests.get(name).arrival)")}) == 1
        there = script("return requests.size")
        # what is wrong is said where it is; the browser itself says what a field lacks
        for wrong in ("tokens", ""), ("tokens", "0"), ("temperature", ""), ("temperature", "3"):
            assert script('''$(arguments[0]).value = arguments[1];
                             boxes[0].prompt.value = 'Three';
                             $('together').click();
                             const wrong = document.querySelectorAll('#controls :invalid').length;
                             $('tokens').value = 20; $('temperature').value = 0.75;
                             return wrong;''', *wrong)
        script('''boxes[1].prompt.value = 'much '.repeat(4000);
                  boxes[1].prompt.parentNode.querySelector('button').click();''')
        said = "return boxes[1].prompt.parentNode.textContent"
        running.until(lambda: "the prompt has" in script(said) and "room for" in script(said))
        script("document.querySelectorAll('[title^=remove]')[1].click()")
        assert script("return requests.size") == there   # nothing of this was sent
        assert script("return [boxes.length, $('together').hidden]") == [1, True]
        script("control({pace: 0, paused: false})")
        running.until(lambda: not running.engine.busy)
        script("hear({...hello, started: 0})")   # another server, whose r12 is another one
        assert script("return boxes[0].name") is None
        script("hear({pace: 0, paused: true, notes: [{new: [], tokens: [], tables: {}, ended: {}, "
               "pass: null, cached: [], waiting: ['r13', 'r14']}]})")   # it has seen no step
        text = "return $('views').textContent"
        running.until(lambda: "2 waiting" in script(text))
        with page(running):   # another page
            script("control({pace: 0.25, paused: true})")
            running.until(lambda: script("return paused"))
            script("return ask(['Two', 'more'])")
            chrome.refresh()   # it is told of the last steps, and how fast they were
            running.until(lambda: script("return waiting.length") == 2)
            steps = script("return moments.map(({step}) => step)")
            assert steps == [*range(running.engine.number)][-120:] and len(steps) > 20
            assert script("return [...requests.values()].filter(({reason}) => reason).length") > 1
            running.until(lambda: "decode" in script(text))   # and draws them
            assert script("return $('speed').value") == "0.25"
            script("$('speed').value = 0; $('speed').onchange()")
            running.until(lambda: script("return paused && pace === 0"))
            chrome.refresh()
            running.until(lambda: script("return paused"))
            script("$('pause').click()")   # only the first step has waited for it
            running.until(lambda: script("return moments.at(-1)?.step ?? 0") > steps[-1] + 5)
            slowed = script("return moments.filter(({step}) => step > arguments[0]).map("
                            "({slowed}) => slowed)", steps[-1])
            assert slowed[0] and not slowed[-1]
        log = [entry for entry in chrome.get_log("browser") if entry["level"] == "SEVERE"]
        assert len(log) == 1 and "/live/ask" in log[0]["message"]   # the one that has no room
