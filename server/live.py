"""
The live page: the batch of a running engine (engine.py), as it happens, in a browser.

The page observes the engine. After each step the engine's thread calls `see`, which notes what
changed; ten times a second the notes go to every open page, as JSON. With no page open, nothing is
noted. The page keeps the last steps, and draws them with the explorer's own functions (runs.js,
panels.js).
"""
import asyncio
import json
import time
from collections import deque
from functools import cache, partial
from itertools import count
from pathlib import Path

from fastapi import Request, Response
from sse_starlette.sse import EventSourceResponse

from explorer import page
from loading.load import word
from server.engine import Observer
from server.schemas import Control
from views.plots import NAMES

FOLDER = Path(__file__).parent
FILES = {"/": FOLDER / "live.html",
         **{f"/{name}": FOLDER / name for name in ("live.js", "live.css")},
         **{f"/{name}": page.FOLDER / name for name in ("page.css", "runs.js", "panels.js")}}
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
COUNTS = "useful", "recomputed", "score_entries", "useful_scores", "copied_bytes"
INTERVAL, UNREAD = 0.1, 50   # seconds between two messages; messages that a page may leave unread


class Live(Observer):
    """model: its name"""

    def __init__(self, engine, tokenizer, model):
        self.engine, self.model, self.word = engine, model, cache(partial(word, tokenizer))
        self.tabs, self.numbers = {}, count(1)   # number -> (queue of messages, requests asked for)
        self.notes, self.sending = deque(), False
        self.told = {}   # what the pages know: name -> (request, its block table)
        self.state, self.steps_left, self.last = {"paused": False, "speed": 0}, 0, 0.0
        engine.observer = self

    # --- in the engine's thread ---

    def hold(self):
        """Seconds until the next pass may run: 0 at full speed, a long time while paused."""
        now, speed = time.perf_counter(), self.state["speed"]
        if self.state["paused"]:
            if not (self.steps_left and self.engine.busy):
                return 1e9
            self.steps_left -= 1
        elif speed and now < self.last + 1 / speed:
            return self.last + 1 / speed - now
        self.last = now
        return 0

    def see(self, batch):
        """Notes a step. batch: its Paged; None: nothing was computed."""
        if not self.tabs:
            return
        engine, words, plan = self.engine, {}, batch.plan if batch else ()
        known = self.told   # once: a page that opens sets a new one at any moment
        new = [request for request in dict.fromkeys((*engine.unfinished.values(), *dict(plan)))
               if request.name not in known]
        known.update({request.name: (request, None) for request in new})
        note = {"new": [self.describe(request, words) for request in new],
                "tokens": [], "tables": {}, "ended": {}, "pass": None, "words": words,
                "kept": [page for page in engine.pages.free if page in engine.pages.key_of],
                "waiting": [request.name for request in engine.scheduler.waiting]}
        for name, (request, table) in list(known.items()):
            if table != request.block_table:
                table = note["tables"][name] = request.block_table and [*request.block_table]
                known[name] = request, table
            if request.finished:
                note["ended"][name] = request.finish_reason
                del known[name]
        if batch:
            done = engine.trace.passes[-1]
            note["tokens"] = [(request.name, request.generated[-1]) for request in batch.sampled
                              if request not in new]   # of these, all tokens are told already
            words |= {token: self.word(token) for _, token in note["tokens"]}
            note["pass"] = {"step": done.step, "work": done.work, "ms": 1e3 * done.seconds,
                            "start": self.ms(time.perf_counter() - done.seconds),
                            **{name: getattr(done, name) for name in COUNTS}}
        if batch or new or note["ended"]:
            self.notes.append(note)
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

    def ask(self, tab, requests):
        """A page has asked for them: when the page is closed, they end."""
        if tab in self.tabs:
            asked = self.tabs[tab][1]
            asked[:] = [request for request in asked if not request.finished] + requests

    async def control(self, body: Control):
        """Sets what the page's buttons set. All pages show the new state."""
        if self.tabs:   # or nobody would see it, and go on
            self.state |= body.model_dump(include={"paused", "speed"}, exclude_none=True)
            self.steps_left = body.steps
        self.engine.wake()
        self.send({"state": self.state})

    async def steps(self):
        """The page's stream. A page that opens is told of all that is under way."""
        engine, self.loop = self.engine, asyncio.get_running_loop()
        knobs = {"max_batch": engine.scheduler.max_batch,
                 "token_budget": engine.scheduler.token_budget, "page_size": engine.pages.size}
        tab, queue = next(self.numbers), asyncio.Queue()
        queue.put_nowait({"model": self.model, "knobs": knobs, "names": NAMES, "state": self.state,
                          "tab": tab, "server": engine.trace.started,
                          "place": page.place(engine.model),
                          "pool": {"pages": engine.pages.number, "page_size": engine.pages.size}})
        self.told = {}   # a new one: another thread uses the old
        self.tabs[tab] = queue, []
        engine.wake()
        return EventSourceResponse(self.lines(tab, queue), sep="\n")

    async def lines(self, tab, queue):
        try:
            while (message := await queue.get()) is not None:
                yield json.dumps(message)
        finally:   # also if the connection ends
            self.leave(tab)

    def leave(self, tab):
        _, asked = self.tabs.pop(tab, (None, ()))
        for request in asked:
            self.engine.cancel(request)
        if not self.tabs:   # nobody is there who could go on
            self.state = {"paused": False, "speed": 0}
            self.engine.wake()

    def send_notes(self):
        self.sending = False   # before it looks: a note that comes now is in it, or sends again
        self.send({"notes": [self.notes.popleft() for _ in range(len(self.notes))]})

    def send(self, message):
        for tab, (queue, _) in list(self.tabs.items()):
            if queue.qsize() > UNREAD:   # it opens the stream again, and is told everything
                self.leave(tab)
                queue.put_nowait(None)
            else:
                queue.put_nowait(message)

    def close(self):
        for queue, _ in self.tabs.values():
            queue.put_nowait(None)

    async def file(self, http: Request):
        """The page, and what it loads."""
        file = FILES[http.scope["path"]]
        text = file.read_text(encoding="utf-8").replace("{{colors}}", page.STYLE)
        return Response(text, media_type=TYPES[file.suffix])
