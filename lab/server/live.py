"""
The live page: the batch of a running engine (engine.py), as it happens, in a browser.

The page observes the engine. After each step the engine's thread notes what is new to each open
page; ten times a second, asyncio's thread sends these notes. A page that is opened now is told of
the last steps, too. It keeps as many, and draws them with the explorer's own functions (runs.js,
panels.js). What other stages would have done with these requests, schedule.js computes in the
browser.
"""
import asyncio
import json
import math
import time
from collections import deque
from pathlib import Path
from typing import Annotated
from weakref import WeakSet

from fastapi import Body
from fastapi.sse import ServerSentEvent

from lab.explorer import page
from lab.loading.load import word
from lab.loading.workload import BEGINNING, PROMPTS, read_prompts
from lab.views.plots import NAMES

FOLDER = Path(__file__).parent
FILES = {"/": FOLDER / "live.html",
         **{f"/{name}": FOLDER / name for name in ("live.js", "live.css")},
         **{f"/{name}": page.FOLDER / name for name in ("page.css", "schedule.js", "runs.js",
                                                "panels.js")}}
SHOWN = ("name", "prompt", "generated", "arrival", "max_new_tokens", "asked", "token_steps",
         "token_times")   # of a request
INTERVAL, UNREAD = 0.1, 2048   # seconds between two messages; notes that a page may leave unread
PAUSE, KEPT = 1e6, 120   # seconds; steps


def dozen():
    """
    Prompts for a first visit: some begin alike. The seventh is long: its chunks are computed while
    the six before it decode.
    """
    texts = [entry["prompt"] for entry in read_prompts(PROMPTS)]
    prompts = [BEGINNING + text if i % 3 == 1 else text for i, text in enumerate(texts)]
    prompts[6] = "\n".join([texts[1], max(texts, key=len)])
    return prompts


def shown(requests):
    return [{name: getattr(request, name) for name in SHOWN} for request in requests]


def reasons(requests):
    return {request.name: request.finish_reason for request in requests}


class Reader:
    """An open page: notes to send, requests that it knows, whether the past is still to be told."""

    def __init__(self):
        self.notes, self.known, self.new = deque(maxlen=UNREAD), set(), True


class Live:
    """Of an app.Server, which it observes."""

    def __init__(self, server):
        self.server, self.engine = server, (engine := server.engine)
        self.pace, self.last = 0.0, 0.0   # seconds from step to step; when the last one began
        self.paused = self.slowed = False   # slowed: whether the next step has had to wait
        self.pages = []   # a Reader for each that is open
        self.past = deque(maxlen=KEPT)   # the last steps while pages were open: (note, requests)
        self.asked = WeakSet()   # requests that end with the last page
        longest = 10 + max(len(server.tokenizer.encode(prompt, disallowed_special=()))
                           for prompt in dozen())   # 10: a line that the page puts in front
        self.hello = {
            "model": server.name, "names": NAMES, "style": page.STYLE,
            "started": engine.trace.started, "gpu": page.gpu_data(), "clock": page.CLOCK,
            "words": [word(server.tokenizer, token)
                      for token in range(engine.model.config.vocab_size)],
            "knobs": {"max_batch": engine.scheduler.max_batch,
                      "token_budget": engine.scheduler.token_budget,
                      "pages": engine.pool.number, "page_size": engine.pool.page_size},
            "pool": {"pages": engine.pool.number, "page_size": engine.pool.page_size},
            "place": page.place(engine.model),
            "kept": KEPT, "dozen": {"prompt": dozen(), "most": server.room + 1 - longest}}
        engine.hold, engine.see = self.hold, self.see

    # --- in the engine's thread ---

    def hold(self):
        now = time.perf_counter()
        wait = self.last + (PAUSE if self.paused else self.pace) - now
        if wait > 0:
            self.slowed = True
            return wait
        if self.engine.busy:
            self.last = now
        return 0

    def see(self, batch):
        if not self.pages:
            return
        now = self.note(batch)
        for reader in list(self.pages):
            if reader.new:
                reader.notes.extend(map(json.dumps, self.recall()))
            reader.new = False
            note = now | self.news(batch, reader.known)
            if note["pass"] or note["new"] or note["ended"]:
                reader.notes.append(json.dumps(note))
        if batch:
            if self.past and self.past[-1][0]["pass"]["step"] != now["pass"]["step"] - 1:
                self.past.clear()   # others were served while no page was open
            self.past.append((now, [request for request, _ in batch.plan]))

    def note(self, batch):
        """What is told of a step to all pages. batch: its Paged; None: no pass."""
        scheduler, trace, pool = self.engine.scheduler, self.engine.trace, self.engine.pool
        note = {"new": [], "tokens": [], "ended": {}, "pass": None,
                "cached": [page for page in pool.free_queue if page in pool.hash_of],
                "waiting": [request.name for request in scheduler.waiting],
                "tables": {r.name: [*r.block_table] for r in scheduler.running}}
        if batch:
            done = trace.passes[-1]
            note["pass"] = {**vars(done), "start": trace.step_times[done.step],
                            "slowed": self.slowed}
            self.slowed = False
        return note

    def news(self, batch, known):
        """What else a step has changed of what a page knows."""
        scheduler, sampled = self.engine.scheduler, batch.sampled if batch else ()
        there = dict.fromkeys([*scheduler.running, *scheduler.waiting, *sampled])
        new = [request for request in there if request not in known]
        tokens = [(request.name, request.generated[-1]) for request in sampled
                  if request in known]   # of the others, all tokens are in "new"
        known.update(new)
        ended = [request for request in known if request.finished]
        known.difference_update(ended)
        return {"new": shown(new), "tokens": tokens, "ended": reasons(ended)}

    def recall(self):
        """The notes of the past steps: first of all requests, last of those that have ended."""
        if not self.past:
            return []
        requests = dict.fromkeys(each for _, some in self.past for each in some)
        notes = [note for note, _ in self.past]
        notes[0] = notes[0] | {"new": shown(requests)}
        notes[-1] = notes[-1] | {"ended": reasons(each for each in requests if each.finished)}
        return notes

    # --- in the thread of asyncio ---

    async def steps(self):
        """The events for one page, until it leaves."""
        reader, sent = Reader(), None
        notes = reader.notes
        self.pages.append(reader)
        self.engine.tell()   # it wakes up, and notes what is there
        try:
            yield ServerSentEvent(raw_data=json.dumps(self.hello))
            # A page that has missed notes opens the stream again, and is told everything.
            while not self.server.should_exit and len(notes) < UNREAD:
                new = ", ".join(notes.popleft() for _ in range(len(notes)))
                message = (f'{{"pace": {self.pace}, "paused": {json.dumps(self.paused)}, '
                           f'"notes": [{new}]}}')
                if message != sent:
                    yield ServerSentEvent(raw_data=message)
                sent = message
                await asyncio.sleep(INTERVAL)
        finally:   # also if the connection ends
            self.pages.remove(reader)
            if not self.pages:   # nobody is there who could go on
                self.pace, self.paused = 0.0, False
                self.engine.cancel(*self.asked)

    async def control(self, pace: Annotated[float | None, Body(ge=0, le=10)] = None,
                      paused: Annotated[bool | None, Body()] = None,
                      step: Annotated[bool, Body()] = False):
        """Sets what the page's buttons set, and all pages show. step: the next need not wait."""
        if self.pages:   # or nobody would see it, and go on
            self.pace = self.pace if pace is None else pace
            self.paused = self.paused if paused is None else paused
            self.last = -math.inf if step else time.perf_counter()
        self.engine.tell()
