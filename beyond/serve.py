"""
The server: OpenAI's HTTP interface in front of the engine (beyond/engine.py), and a page that shows
the batch while it runs (explorer/live.py).

    python -m beyond.serve --model builtin            then open http://127.0.0.1:8000/
    torchrun --nproc_per_node 2 -m beyond.serve       the same, on tensor parallel ranks

    client <- HTTP <- Stream <--.                                 a Stream holds a limited number
    client <- HTTP <- Stream <--+-- events <-- engine's thread    of unread tokens: no client can
    client <- HTTP <- Stream <--'                                 make the others wait

All clients share one thread of asyncio. openapi.json says what a body may hold; anything else is
refused by name.
"""
import asyncio
import contextlib
from collections import Counter
from functools import partial
from threading import Thread

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from beyond.engine import Full
from explorer.live import FILES, Live
from toolbox.openai import Form, Text, request_of, spec_of
from toolbox.web import Gate, Histogram, Refused, error_of, event, prometheus, read_json, refuse
from toolbox.web import reply as answer


class Stream:
    """What comes for a request, on its way to the client: at most `room` tokens unread."""

    def __init__(self, engine, request, room):
        self.engine, self.request, self.room = engine, request, room
        self.queue, self.tokens, self.closed = asyncio.Queue(), 0, False

    def put(self, token, refused=None):
        """A token; None: the end. refused: why it ends, if it should not."""
        if self.closed:
            return
        self.queue.put_nowait((token, refused))
        self.tokens += token is not None
        if self.queue.qsize() > self.room:
            self.cut(408, f"cut off: the client has left {self.room} tokens unread")

    def cut(self, status, why):
        """The request ends now. The client learns why when it has read what came before."""
        self.closed = True
        self.queue.put_nowait((None, Refused(status, why)))
        self.engine.cancel(self.request)


class Server:
    """
    app: the ASGI application; it starts and stops the engine's thread

    name:   of the model; key: what clients must know
    unread: tokens that a client may leave unread; most_bytes, body_seconds: of a request's body
    """

    def __init__(self, engine, tokenizer, name, key=None, unread=512, most_bytes=2**20,
                 body_seconds=10.0):
        self.engine, self.tokenizer, self.name, self.key = engine, tokenizer, name, key
        self.room = min(engine.model.config.block_size, engine.pages.number * engine.pages.size)
        self.unread, self.limits = unread, {"most": most_bytes, "seconds": body_seconds}
        self.spec = spec_of(engine.model.config.block_size)
        self.streams, self.stopped, self.tokens = {}, set(), 0   # stopped: by their stop strings
        self.ends = Counter(stop=0, length=0, cancelled=0, error=0)
        self.ttft, self.itl, self.live = Histogram(), Histogram(), Live(engine, tokenizer, name)
        self.closing, self.died, self.exit = "", None, lambda: None
        paths = {"/v1/completions": self.generate, "/v1/chat/completions": self.generate,
                 "/v1/models": self.models, "/health": self.health, "/metrics": self.metrics,
                 "/openapi.json": self.openapi, "/live/control": self.control,
                 "/live/ask": self.ask, "/live/steps": self.live.steps,
                 **{path: self.live.file for path in FILES}}
        methods = {path: ["POST" if "post" in self.spec["paths"].get(path, ()) else "GET"]
                   for path in paths}
        self.app = Starlette(
            routes=[Route(path, work, methods=methods[path]) for path, work in paths.items()],
            middleware=[Middleware(Gate, key, {"/health", "/openapi.json", *FILES})],
            exception_handlers={Refused: refuse, HTTPException: refuse, Exception: refuse},
            lifespan=self.lifespan)
        self.app.router.redirect_slashes = False   # where to: the client's Host would say it

    # --- the engine's thread, and what comes from it ---

    @contextlib.asynccontextmanager
    async def lifespan(self, app):
        self.loop = asyncio.get_running_loop()
        thread = Thread(target=self.run, daemon=True)
        thread.start()
        yield
        self.engine.stop()
        await asyncio.to_thread(thread.join, 5)

    def run(self):
        try:
            self.engine.run(partial(self.loop.call_soon_threadsafe, self.hand_out))
        except Exception as error:   # a rank is lost, or a mistake of ours: nothing can go on
            self.died = error
            self.loop.call_soon_threadsafe(self.close, 0, f"the engine has stopped: {error}")

    def hand_out(self, events):
        for request, token, why in events:
            stream = self.streams.get(request)   # None: its client left, or is the page
            if stream:
                stream.put(token, Refused(500, why) if why else None)
            if token is None:
                self.ends["stop" if request in self.stopped else request.finish_reason] += 1
                self.stopped.discard(request)
                continue
            self.tokens += 1
            if stream and not stream.closed:
                times, n = request.token_times, stream.tokens
                if n == 1:
                    self.ttft.add(times[0] - request.asked)
                else:
                    self.itl.add(times[n - 1] - times[n - 2])

    def close(self, seconds, why):
        """No request is taken any more, and those that run get this many seconds."""
        self.closing = why
        self.live.close()
        self.loop.call_later(seconds, self.cut_all, why)
        self.exit()

    def cut_all(self, why):
        for stream in list(self.streams.values()):
            stream.cut(500 if self.died else 503, why)

    # --- completions ---

    async def generate(self, http):
        schema = "Chat" if "chat" in http.scope["path"] else "Completion"
        body = await read_json(http, self.spec, schema, **self.limits)
        request = await self.admit(body)
        stream = self.streams[request] = Stream(self.engine, request, self.unread)
        text = Text(self.tokenizer, body)
        pieces, form = self.pieces(http, stream, text), Form(body, request, text, self.name)
        if not body.get("stream"):
            parts = [piece async for piece in pieces]
            return answer(form.whole("".join(text for text, _ in parts), parts[-1][1]))
        first = await anext(pieces)   # before the status is sent: what fails now is no 200
        return StreamingResponse(self.lines(first, pieces, form), media_type="text/event-stream")

    async def admit(self, body):
        """The request that a body asks for, in the engine's hands. Refused if it cannot be."""
        if body.get("model", self.name) != self.name:
            raise Refused(404, f"there is no model {body['model']!r:.99}; this is {self.name!r}")
        try:
            request = await asyncio.to_thread(   # a long prompt takes a while
                request_of, body, self.tokenizer, self.engine.model.config, self.room)
            if self.closing:
                raise Refused(503, self.closing)
            self.engine.add(request)
        except ValueError as error:   # in the client's words
            why = str(error).removeprefix("request 'r0': ").replace("max_new_tokens", "max_tokens")
            raise Refused(400, why) from None
        except Full as full:
            raise Refused(429, str(full), {"Retry-After": str(full.seconds)}) from None
        return request

    async def pieces(self, http, stream, text):
        """(text, None) for each token, and (text, finish reason) last. Refused if it fails."""
        gone = asyncio.create_task(self.until_gone(http, stream))
        try:
            reason = None
            while not reason:
                token, refused = await stream.queue.get()
                if refused:
                    raise refused
                piece = text.add(token)
                if text.stopped and not stream.request.finished:
                    self.stopped.add(stream.request)
                reason = ("stop" if text.stopped
                          else stream.request.finish_reason if token is None else None)
                yield piece, reason
        finally:
            gone.cancel()
            self.leave(stream)

    async def until_gone(self, http, stream):
        await http.receive()   # after the body, nothing comes but the end of the connection
        stream.cut(499, "the client has gone")
        self.leave(stream)

    def leave(self, stream):
        if self.streams.pop(stream.request, None) and not stream.request.finished:
            self.engine.cancel(stream.request)

    async def lines(self, first, pieces, form):
        """Server-sent events, one for each token."""
        async with contextlib.aclosing(pieces):
            try:
                yield event(form.part(*first))
                async for piece in pieces:
                    yield event(form.part(*piece))
            except Refused as refused:
                yield event(error_of(str(refused), refused.status))
                return
        if form.options.get("include_usage"):
            yield event(form.last())
        yield "data: [DONE]\n\n"

    # --- the rest ---

    async def models(self, http):
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "nanoBatch"}
        return answer({"object": "list", "data": [model]})

    async def health(self, http):
        return answer({"status": self.closing or "ok"}, 503 if self.closing else 200)

    async def openapi(self, http):
        return answer(self.spec | {"security": [{"key": []}]} if self.key else self.spec)

    async def ask(self, http):   # from the live page, which sees its tokens anyway
        body = await read_json(http, self.spec, "Ask", **self.limits)
        request = await self.admit(body)
        self.live.ask(body["tab"], request)
        return answer({"name": request.name})

    async def control(self, http):
        return answer(self.live.control(await read_json(http, self.spec, "Control", **self.limits)))

    async def metrics(self, http):
        scheduler, pages = self.engine.scheduler, self.engine.pages
        figures = {"requests_running": len(scheduler.running),
                   "requests_waiting": len(scheduler.waiting) + len(self.engine.inbox),
                   "pages": pages.number, "pages_free": len(pages.free),
                   "preemptions_total": pages.counts["preemptions"], "tokens_total": self.tokens,
                   **{f"requests_{end}_total": n for end, n in self.ends.items()},
                   "ttft_seconds": self.ttft, "itl_seconds": self.itl}
        return PlainTextResponse("".join(prometheus(*figure) for figure in figures.items()))


if __name__ == "__main__":
    from toolbox.serving import main
    main(Server)
