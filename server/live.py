"""
The live page: the batch of a running engine (engine.py), as it happens, in a browser.

The page observes the engine. After each step the engine's thread calls `see`, which notes what
changed; ten times a second the notes go to every open page, as JSON. With no page open, nothing is
noted. The page keeps the last steps, and draws them with the explorer's own functions (runs.js,
panels.js).
"""
import asyncio
import itertools
import json
import time
from collections import deque
from functools import cache, partial
from pathlib import Path

from fastapi import Request, Response
from sse_starlette.sse import EventSourceResponse

from explorer import page
from loading.load import word
from loading.workload import PROMPTS, read_prompts
from server.engine import Observer
from views.plots import NAMES

FOLDER = Path(__file__).parent
FILES = {"/": FOLDER / "live.html", "/explorer.html": None,   # None: made when it is asked for
         **{f"/{name}": FOLDER / name for name in ("live.js", "live.css")},
         **{f"/{name}": page.FOLDER / name for name in ("page.css", "runs.js", "panels.js")}}
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
COUNTS = "useful", "recomputed", "score_entries", "useful_scores", "copied_bytes"
INTERVAL, UNREAD = 0.1, 50   # seconds between two messages; messages that a page may leave unread


class Live(Observer):
    """model: its name"""

    def __init__(self, engine, tokenizer, model):
        self.engine, self.tokenizer, self.model = engine, tokenizer, model
        self.tabs, self.asked, self.numbers = {}, {}, itertools.count(1)   # asked: by their numbers
        self.notes, self.sending = deque(), False
        self.examples = [entry["prompt"] for entry in read_prompts(PROMPTS)]
        most = 3 * engine.model.config.block_size // 4
        self.long = tokenizer.encode("\n".join(20 * self.examples))[:most]
        self.told = {}, {}, {}   # what the pages know: requests, their tables, the rest
        self.paused, self.speed, self.steps_left, self.last = False, 0, 0, 0.0
        engine.observer, self.word = self, cache(partial(word, tokenizer))

    # --- in the engine's thread ---

    def hold(self):
        """Seconds until the next pass may run: 0 at full speed, a long time while paused."""
        now = time.perf_counter()
        if not self.tabs:   # nobody is there who could go on
            return 0
        if self.paused:
            if not (self.steps_left and self.engine.busy):
                return 1e9
            self.steps_left -= 1
        elif self.speed and now < self.last + 1 / self.speed:
            return self.last + 1 / self.speed - now
        self.last = now
        return 0

    def see(self, batch):
        """Notes a step. batch: its Paged; None: nothing was computed."""
        if not self.tabs:
            return
        engine, words, plan = self.engine, {}, batch.plan if batch else ()
        known, tables, rest = self.told   # once: a page that opens sets new ones at any moment
        new = [request for request in dict.fromkeys((*engine.unfinished.values(), *dict(plan)))
               if request.name not in known]
        known.update({request.name: request for request in new})
        note = {"new": [self.describe(request, words) for request in new],
                "tokens": [], "tables": {}, "ended": {}, "pass": None}
        for name, request in list(known.items()):
            table = request.block_table
            if table != tables.get(name):
                note["tables"][name] = tables[name] = table and list(table)
            if request.finished:
                note["ended"][name] = request.finish_reason
                del known[name]
                tables.pop(name, None)
        if batch:
            done = engine.trace.passes[-1]
            note["tokens"] = [(request.name, request.generated[-1]) for request in batch.sampled
                              if request not in new]   # of these, all tokens are told already
            words |= {token: self.word(token) for _, token in note["tokens"]}
            note["pass"] = {"step": done.step, "work": done.work, "ms": 1e3 * done.seconds,
                            "start": self.ms(time.perf_counter() - done.seconds),
                            **{name: getattr(done, name) for name in COUNTS}}
        if batch or new or note["ended"]:
            now = {"kept": [page for page in engine.pages.free if page in engine.pages.key_of],
                   "waiting": [request.name for request in engine.scheduler.waiting]}
            note |= {name: each for name, each in now.items() if each != rest.get(name)}
            rest.update(now)
            self.notes.append(note | {"words": words})
            if not self.sending:
                self.sending = True
                self.loop.call_soon_threadsafe(self.loop.call_later, INTERVAL, self.send_notes)

    def describe(self, request, words):
        words |= {token: self.word(token) for token in request.tokens}
        return {"name": request.name, "prompt": request.prompt, "generated": request.generated[:],
                "arrival": request.arrival, "limit": request.max_new_tokens,
                "arrived": self.ms(request.asked),
                "steps": request.token_steps[:], "ms": [*map(self.ms, request.token_times)]}

    def ms(self, seconds):
        return round(1e3 * (seconds - self.engine.trace.started), 1)

    # --- in the thread of asyncio ---

    def state(self):
        return {"paused": self.paused, "speed": self.speed}

    def ask(self, tab, requests):
        """A page has asked for them: when the page is closed, they end."""
        if tab in self.asked:
            self.asked[tab] = [*(r for r in self.asked[tab] if not r.finished), *requests]

    def control(self, body):
        """Sets what the page's buttons set. Returns the new state, which all pages show."""
        if self.tabs:   # or nobody would see it
            self.paused = self.paused if body.paused is None else body.paused
            self.speed = self.speed if body.speed is None else body.speed
            self.steps_left = body.steps
        for request in itertools.chain.from_iterable(self.asked.values()):   # no other client's
            if request.name == body.stop:
                self.engine.cancel(request)
        self.engine.wake()
        self.send({"state": self.state()})
        return self.state()

    async def steps(self):
        """The page's stream. A page that opens is told of all that is under way."""
        engine, self.loop = self.engine, asyncio.get_running_loop()
        knobs = {"max_batch": engine.scheduler.max_batch,
                 "token_budget": engine.scheduler.token_budget, "page_size": engine.pages.size}
        tab, number = asyncio.Queue(), next(self.numbers)
        tab.put_nowait({"model": self.model, "knobs": knobs, "names": NAMES, "state": self.state(),
                        "tab": number, "server": engine.trace.started,
                        "examples": self.examples, "long": self.long,
                        "place": page.place(engine.model), "max_waiting": engine.max_waiting,
                        "pool": {"pages": engine.pages.number, "page_size": engine.pages.size}})
        self.told = {}, {}, {}   # new ones: another thread uses the old
        self.tabs[tab], self.asked[number] = number, []
        engine.wake()
        return EventSourceResponse(self.lines(tab), sep="\n")

    async def lines(self, tab):
        try:
            while (message := await tab.get()) is not None:
                yield json.dumps(message)
        finally:   # also if the connection ends
            self.leave(tab)

    def leave(self, tab):
        for request in self.asked.pop(self.tabs.pop(tab, None), ()):
            if not request.finished:
                self.engine.cancel(request)
        if not self.tabs:
            self.paused, self.speed = False, 0
            self.engine.wake()

    def send_notes(self):
        self.sending = False   # before it looks: a note that comes now is in it, or sends again
        self.send({"notes": [self.notes.popleft() for _ in range(len(self.notes))]})

    def send(self, message):
        for tab in list(self.tabs):
            if tab.qsize() > UNREAD:   # it opens the stream again, and is told everything
                self.leave(tab)
                tab.put_nowait(None)
            else:
                tab.put_nowait(message)

    def close(self):
        for tab in list(self.tabs):
            tab.put_nowait(None)

    async def file(self, http: Request):
        """The page, and what it loads. /explorer.html is an explorer page without any run."""
        file = FILES[http.scope["path"]]
        text = file.read_text(encoding="utf-8") if file else page.page({})
        if http.scope["path"] == "/live.css":
            text = text.replace("{{colors}}", page.STYLE)
        return Response(text, media_type=TYPES[file.suffix if file else ".html"])
