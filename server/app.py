"""
The application: OpenAI's HTTP interface in front of the engine, its metrics, and the live page.

    client <- HTTP <- Answer <--.                                  an Answer holds a limited number
    client <- HTTP <- Answer <--+-- events <-- engine's thread     of unread tokens: no client can
    client <- HTTP <- Answer <--'                                  make the others wait

All clients share one thread of asyncio. An Answer serves all requests of its body.
"""
import asyncio
import contextlib
import hmac
import json
import time
from functools import partial
from itertools import pairwise
from threading import Thread

import prometheus_client as prometheus
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sse_starlette.sse import AppStatus, EventSourceResponse
from starlette.exceptions import HTTPException as AnyHTTPException

from server.answers import Form, Text, requests_of
from server.engine import Full
from server.live import FILES, Live
from server.schemas import Ask, Chat, Completion, error_of, sentence

LOCAL = ("127.0.0.1", "localhost", "[::1]")
AppStatus.disable_automatic_graceful_drain()   # SIGTERM ends no stream: `Server.close` does


class Answer:
    """What comes for the requests of one body, on its way to the client. unread: tokens of each"""

    def __init__(self, engine, requests, texts, unread):
        self.engine, self.requests, self.texts = engine, requests, texts
        self.room, self.queue, self.closed = unread * len(requests), asyncio.Queue(), False
        self.left = {*range(len(requests))}   # indices of those that go on

    def put(self, i, event):
        if not self.closed:
            self.queue.put_nowait((i, event))
            if self.queue.qsize() > self.room:
                self.close(408, f"cut off: the client has left {self.room} tokens unread")

    def close(self, status, why):
        """Its requests end now. The client learns why when it has read what came before."""
        self.closed = True
        self.queue.put_nowait((None, HTTPException(status, why)))
        self.cancel()

    def cancel(self):
        for i in self.left:
            self.engine.cancel(self.requests[i])

    async def pieces(self, http):
        """(index of a request, text, finish reason or None), as they come. Or HTTPException."""
        gone = asyncio.create_task(self.until_gone(http))
        try:
            while self.left:
                i, event = await self.queue.get()
                if isinstance(event, HTTPException):
                    raise event
                if event.reason == "error":
                    raise HTTPException(500, f"the forward pass failed: {event.error}")
                if i in self.left:
                    text, reason = self.texts[i].add(event.token), event.reason
                    if self.texts[i].stopped:
                        reason = "stop"
                        self.engine.cancel(self.requests[i], reason)
                    if reason:
                        self.left.remove(i)
                    yield i, text, reason
        finally:
            gone.cancel()
            self.cancel()

    async def until_gone(self, http):
        await http.receive()   # after the body, nothing comes but the end of the connection
        self.close(499, "the client has gone")

    @property
    def tokens(self):
        return sum(text.tokens for text in self.texts)


class Server:
    """
    app: the ASGI application; it starts and stops the engine's thread

    name:   of the model; key: what clients must know
    unread: tokens of a request that a client may leave unread; most_bytes: of a request's body
    """

    def __init__(self, engine, tokenizer, name, key=None, unread=512, most_bytes=2**20):
        self.engine, self.tokenizer, self.name, self.key = engine, tokenizer, name, key
        self.room = min(engine.model.config.block_size, engine.pages.number * engine.pages.size)
        self.unread, self.answers = unread, {}   # answers: request -> (its Answer, its index there)
        self.closing, self.died, self.exit = "", None, lambda: None
        self.live, self.created = Live(engine, tokenizer, name), int(time.time())
        self.measure(engine.scheduler, engine.pages)
        self.app = FastAPI(
            title="nanoBatch", lifespan=self.lifespan, max_body_size=most_bytes,
            redirect_slashes=False,   # where to: the client's Host would say it
            exception_handlers={RequestValidationError: refuse, AnyHTTPException: refuse,
                                Exception: refuse})
        if key is None:   # else a page elsewhere could make its own name point here: DNS rebinding
            self.app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOCAL, www_redirect=False)
        for path in FILES:
            self.app.get(path, include_in_schema=False)(self.live.file)
        self.app.get("/health")(self.health)
        api = APIRouter(dependencies=[] if key is None else [Depends(self.check_key)])
        api.post("/v1/completions")(self.complete)
        api.post("/v1/chat/completions")(self.chat)
        api.get("/v1/models")(self.models)
        api.get("/v1/models/{name:path}")(self.model)
        api.get("/metrics", response_class=PlainTextResponse)(self.metrics)
        api.get("/live/steps", response_class=EventSourceResponse)(self.live.steps)
        api.post("/live/ask")(self.ask)
        api.post("/live/control")(self.live.control)
        self.app.include_router(api)

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
        except Exception as error:   # not of one pass: a mistake of ours, so nothing can go on
            self.died = error
            self.loop.call_soon_threadsafe(self.close, 0, f"the engine has stopped: {error}")

    def hand_out(self, events):
        for event in events:
            answer, i = self.answers.get(event.request, (None, 0))   # None: the live page's
            if event.token is None:
                self.answers.pop(event.request, None)
                self.ends.labels(event.reason).inc()
                times = event.request.token_times
                if times:
                    self.ttft.observe(times[0] - event.request.asked)
                for before, after in pairwise(times):
                    self.itl.observe(after - before)
            else:
                self.tokens.inc()
            if answer:
                answer.put(i, event)

    def close(self, seconds, why="the server shuts down"):
        """No request is taken any more, and those that run get this many seconds."""
        self.closing = why
        self.live.close()
        self.loop.call_later(seconds, self.cut_all)
        self.exit()

    def cut_all(self):
        for answer in {answer for answer, _ in self.answers.values()}:
            answer.close(500 if self.died else 503, self.closing)

    # --- completions ---

    async def chat(self, body: Chat, http: Request):
        return await self.complete(body, http)

    async def complete(self, body: Completion, http: Request):
        requests = await self.requests_of(body)
        texts = [Text(self.tokenizer, body.stop) for _ in requests]
        answer = Answer(self.engine, requests, texts, self.unread)
        self.add(requests, {request: (answer, i) for i, request in enumerate(requests)})
        pieces, form = answer.pieces(http), Form(body, requests, self.name)
        if body.stream:
            first = await anext(pieces)   # before the status is sent: what fails now is no 200
            usage = answer if body.stream_options.include_usage else None
            return EventSourceResponse(self.lines(first, pieces, form, usage), sep="\n")
        choices = [(i, "", None) for i in range(len(requests))]
        async for i, text, reason in pieces:
            choices[i] = i, choices[i][1] + text, reason
        return JSONResponse(form.fill(choices, answer.tokens))

    async def requests_of(self, body):
        """The requests that a body asks for. HTTPException if they cannot be."""
        await self.model(body.model or self.name)
        try:
            requests = await asyncio.to_thread(   # a long prompt takes a while
                requests_of, body, self.tokenizer, self.engine.model.config, self.room)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        if self.closing:
            raise HTTPException(503, self.closing)
        return requests

    def add(self, requests, answers):
        """Hands them to the engine. answers: where their tokens go, from the first one on."""
        self.answers |= answers
        try:
            self.engine.add(*requests)
        except (Full, ValueError) as error:
            for request in answers:
                del self.answers[request]
            full = isinstance(error, Full)
            raise HTTPException(429 if full else 400, str(error),
                                {"Retry-After": "1"} if full else None) from None

    async def lines(self, first, pieces, form, usage):
        """The data of server-sent events, one for each token. usage: an Answer, or None"""
        async with contextlib.aclosing(pieces):
            try:
                yield json.dumps(form.fill([first]))
                async for piece in pieces:
                    yield json.dumps(form.fill([piece]))
            except HTTPException as error:
                yield json.dumps(error_of(error.status_code, error.detail))
                return
        if usage:
            yield json.dumps(form.fill([], usage.tokens))
        yield "[DONE]"

    # --- the rest ---

    def check_key(self, given: HTTPAuthorizationCredentials | None = Depends(
            HTTPBearer(auto_error=False))):
        if not given or not hmac.compare_digest(given.credentials.encode(), self.key.encode()):
            raise HTTPException(401, "the header Authorization: Bearer KEY is missing or wrong",
                                {"WWW-Authenticate": "Bearer"})

    async def models(self):
        return {"object": "list", "data": [await self.model(self.name)]}

    async def model(self, name: str):
        if name != self.name:
            raise HTTPException(404, f"there is no model {name!r:.99}; this is {self.name!r}")
        return {"id": name, "object": "model", "created": self.created, "owned_by": "nanoBatch",
                "max_model_len": self.room}

    async def health(self):
        return JSONResponse({"status": self.closing or "ok"}, 503 if self.closing else 200)

    async def ask(self, body: Ask):   # from the live page, which sees its tokens anyway
        requests = await self.requests_of(body)
        self.add(requests, {})
        self.live.ask(body.tab, requests)
        return {"name": requests[0].name}

    def measure(self, scheduler, pages):
        self.registry = prometheus.CollectorRegistry()
        new = {"namespace": "nanobatch", "registry": self.registry}
        self.ttft = prometheus.Histogram("ttft_seconds", "to a first token", **new)
        self.itl = prometheus.Histogram("itl_seconds", "between tokens", **new)
        self.tokens = prometheus.Counter("tokens", "generated", **new)
        self.ends = prometheus.Counter("requests", "ended", ["reason"], **new)
        for name, text, figure in (
                ("requests_running", "in the batch", lambda: len(scheduler.running)),
                ("requests_waiting", "in the queue", lambda: self.engine.waiting),
                ("pages_free", "in the pool", lambda: len(pages.free)),
                ("preemptions", "since the start", lambda: pages.counts["preemptions"])):
            prometheus.Gauge(name, text, **new).set_function(figure)

    async def metrics(self):
        return Response(prometheus.generate_latest(self.registry),
                        media_type=prometheus.CONTENT_TYPE_LATEST)


async def refuse(http, error):
    """The answer to any error is JSON in OpenAI's form; to a mistake of ours, without details."""
    status, message = getattr(error, "status_code", 500), getattr(error, "detail", "internal error")
    if isinstance(error, RequestValidationError):
        status, message = 400, sentence(error.errors())
    return JSONResponse(error_of(status, message), status, getattr(error, "headers", None))
