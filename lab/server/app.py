"""
The application: OpenAI's HTTP interface in front of the engine, its metrics, and the live page.

All clients share one thread of asyncio; the engine has another.
"""
import asyncio
import contextlib
import hmac
import json
import re
import sys
import time

import prometheus_client as prometheus
import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from fastapi.sse import EventSourceResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from lab.server.answers import Answer
from lab.server.engine import Event, Full
from lab.server.live import FILES, Live
from lab.server.schemas import Chat, Completion, error_of, sentence

LOCAL = ("127.0.0.1", "localhost", "[::1]")
BODY, CONNECTIONS = 2**20, 1000   # the most bytes of a body; the most that are open, busy or not
UNBUFFERED = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}   # also in a proxy
LAST_WORDS = 0.5   # seconds in which clients can read that they are cut off


def unique_keys(pairs):
    """The dict of a JSON object; of a key that stands there twice, Python would keep the last."""
    fields = {}
    for key, value in pairs:
        if key in fields:
            raise HTTPException(400, f"the body has the key {key!a:.99} more than once")
        fields[key] = value
    return fields


class OnceOnly(Request):
    """A request whose body names each key once."""

    async def json(self):
        return json.loads(await self.body(), object_pairs_hook=unique_keys)


class Route(APIRoute):
    """Reads bodies as OnceOnly does."""

    def get_route_handler(self):
        answer = super().get_route_handler()

        async def answer_once_only(http):
            return await answer(OnceOnly(http.scope, http.receive))
        return answer_once_only


class Server(uvicorn.Server):
    """name: of the model; key: what clients must know; drain: seconds after SIGTERM"""

    def __init__(self, engine, tokenizer, name, key=None, drain=30):
        self.engine, self.tokenizer, self.name, self.key = engine, tokenizer, name, key
        self.room = min(engine.model.config.block_size, engine.pool.number * engine.pool.page_size)
        self.drain, self.died = drain, None
        self.cut = False   # whether all that ran has been cut off
        self.answers = {}   # request -> its Answer, until it ends
        self.live, self.created = Live(self), int(time.time())
        self.measure(engine.scheduler, engine.pool)
        app = FastAPI(
            title="nanoBatch", lifespan=self.lifespan, max_body_size=BODY,
            redirect_slashes=False,   # where to: the client's Host would say it
            exception_handlers={RequestValidationError: refuse, HTTPException: refuse,
                                Exception: refuse})
        guards = [] if key is None else [Depends(self.check_key)]
        api = APIRouter(route_class=Route, dependencies=guards)
        for router, path, answer in (
                *((app, path, self.file) for path in FILES), (app, "/health", self.health),
                (api, "/v1/models", self.models), (api, "/v1/models/{name:path}", self.model),
                (api, "/metrics", self.metrics)):
            router.get(path, include_in_schema=path not in FILES)(answer)
            router.head(path, include_in_schema=False)(answer)
        api.post("/v1/completions")(self.complete)
        api.post("/v1/chat/completions")(self.chat)
        api.get("/live/steps", response_class=EventSourceResponse)(self.live.steps)
        api.post("/live/ask")(self.ask)
        api.post("/live/control")(self.live.control)
        app.include_router(api)
        self.app = app
        # Connections stay open for longer than clients wait before they use one again (httpx: 5 s):
        # else these write into a closed one. h11: an installed httptools changes nothing.
        super().__init__(uvicorn.Config(
            self.gate, interface="asgi3", http="h11", ws="none", log_level="warning",
            timeout_keep_alive=15, timeout_graceful_shutdown=drain + 1))

    # --- the engine's thread, and what comes from it ---

    @contextlib.asynccontextmanager
    async def lifespan(self, app):
        self.loop = asyncio.get_running_loop()
        engine = asyncio.create_task(asyncio.to_thread(self.engine.run, self.deliver))
        engine.add_done_callback(self.engine_ended)
        yield
        self.engine.stop()
        await asyncio.wait([engine])

    def engine_ended(self, engine):
        self.died = engine.exception()
        if self.died:   # not one pass failed: a mistake of ours, so nothing can go on
            self.should_exit = True
            self.cut_all(f"the engine has stopped: {self.died}")

    def deliver(self, events):   # in the engine's thread, which owns the requests' times
        for request, token, *_ in events:
            if token is not None:
                self.tokens.inc()
                times, first = request.token_times, len(request.token_times) == 1
                wait, since = (self.ttft, request.asked) if first else (self.itl, times[-2])
                wait.observe(times[-1] - since)
        self.loop.call_soon_threadsafe(self.hand_out, events)

    def hand_out(self, events):
        for event in events:
            request, _, reason, _ = event
            if answer := self.answers.get(request):   # None: the live page's
                answer.put(event)
            if reason:
                self.answers.pop(request, None)
                stopped = answer and answer.texts[request].stopped   # perhaps at its last token
                self.ends.labels("stop" if stopped else reason).inc()

    def handle_exit(self, sig, frame):
        """SIGTERM or Ctrl+C: running requests get `drain` seconds; on a second one, none."""
        seconds = 0 if self.should_exit else self.drain
        self.should_exit = True
        self.loop.call_soon_threadsafe(self.loop.call_later, seconds, self.cut_all)

    def cut_all(self, why="the server shuts down"):
        if self.cut:
            return
        self.cut = True
        for request, answer in self.answers.items():
            answer.put(Event(request, None, "shutdown", why))
        self.loop.call_later(LAST_WORDS, self.close_all)

    def close_all(self):
        """Ends what no event ends: clients that do not read, bodies that are half sent."""
        open_connections = [*self.server_state.connections]
        for connection in open_connections:
            connection.transport.abort()
        number = len(open_connections)
        if number:
            print(f"{number} connection{'s' * (number > 1)} cut off", file=sys.stderr)

    # --- who may ask ---

    async def gate(self, scope, receive, send):
        refusal = scope["type"] == "http" and self.refusal(Headers(scope=scope))
        app = await refuse(None, refusal) if refusal else self.app
        await app(scope, receive, send)

    def refusal(self, headers):
        """What uvicorn and middleware would refuse in plain text. None: the application decides."""
        host = re.sub(r":\d*$", "", headers.get("host", "")).lower()   # without the port
        # A page elsewhere could make its own name point here: DNS rebinding.
        if self.key is None and host not in LOCAL:
            return HTTPException(400, f"host {host!r:.99} must be {' or '.join(LOCAL)}; a server "
                                      "with --api-key takes any")
        if int(headers.get("content-length", 0)) > BODY:
            return HTTPException(413, f"the body is larger than {BODY} bytes")
        if len(self.server_state.connections) > CONNECTIONS:
            return HTTPException(503, f"there are more than {CONNECTIONS} connections")
        return None

    # --- completions ---

    async def chat(self, body: Chat, http: Request):
        return await self.complete(body, http)

    async def complete(self, body: Completion, http: Request):
        requests = await self.taken(body)
        answer = Answer(self.engine, self.tokenizer, self.name, body, requests, http)
        # In time for the first event: `hand_out` runs in this thread, so it is not its turn yet.
        self.answers |= dict.fromkeys(requests, answer)
        if body.stream:
            return EventSourceResponse(answer.events(), headers=UNBUFFERED)
        return await answer.whole()

    async def ask(self, body: Completion):   # from the live page, which sees its tokens anyway
        requests = await self.taken(body)
        self.live.asked.update(requests)
        return {"names": [request.name for request in requests]}

    async def taken(self, body):
        """The requests that a body asks for, in the engine's queue. Or HTTPException."""
        await self.model(body.model or self.name)
        try:   # in another thread: a long prompt takes a while
            requests = await asyncio.to_thread(body.requests, self.tokenizer, self.room)
            self.engine.submit(*requests)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        except Full as error:
            raise HTTPException(429, str(error), {"Retry-After": "1"}) from None
        return requests

    # --- the rest ---

    def check_key(self, given: HTTPAuthorizationCredentials | None = Depends(
            HTTPBearer(auto_error=False))):
        # A header's bytes come as Latin-1; curl sends them as UTF-8. And FastAPI has stripped what
        # would be a blank in Latin-1, as the last byte of some characters is.
        key = self.key.encode(errors="surrogateescape").decode("latin-1").strip()
        sent = given.credentials if given else ""
        if not sent or not hmac.compare_digest(sent.encode("latin-1"), key.encode("latin-1")):
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
        return {"status": "ok"}

    async def file(self, http: Request):
        return FileResponse(FILES[http.scope["path"]])

    def measure(self, scheduler, pool):
        self.registry = prometheus.CollectorRegistry()
        new = {"namespace": "nanobatch", "registry": self.registry}
        self.ttft = prometheus.Histogram("ttft_seconds", "to a first token", **new)
        self.itl = prometheus.Histogram("itl_seconds", "between tokens", **new)
        self.tokens = prometheus.Counter("tokens", "generated", **new)
        self.ends = prometheus.Counter("requests", "ended", ["reason"], **new)
        for name, text, figure in (
                ("requests_running", "in the batch", lambda: len(scheduler.running)),
                ("requests_waiting", "in the queue", lambda: self.engine.waiting),
                ("pages_free", "in the free queue", lambda: len(pool.free_queue)),
                ("preemptions", "since the start", lambda: pool.counts["preemptions"])):
            prometheus.Gauge(name, text, **new).set_function(figure)

    async def metrics(self):
        return PlainTextResponse(prometheus.generate_latest(self.registry),
                                 media_type=prometheus.CONTENT_TYPE_LATEST)


async def refuse(http, error):
    """The answer to any error is JSON in OpenAI's form; to a mistake of ours, without details."""
    status, message = getattr(error, "status_code", 500), getattr(error, "detail", "internal error")
    if isinstance(error, RequestValidationError):
        status, message = 400, sentence(error.errors()[0])
    return JSONResponse(error_of(status, message), status, getattr(error, "headers", None))
