"""What beyond/serve.py needs to face any client, and is no lesson: checks, limits and figures."""
import asyncio
import bisect
import hmac
import itertools
import json
import re

import h11
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float),
         "boolean": bool, "null": type(None)}
LOCAL = ("127.0.0.1", "localhost", "[::1]")


class Refused(Exception):
    """Becomes an answer with this status, whose body says why in OpenAI's form."""

    def __init__(self, status, message, headers=None):
        super().__init__(message)
        self.status, self.headers = status, headers


async def refuse(http, error):
    """The answer to any error is JSON: ours, an unknown path, and mistakes in the server."""
    status = getattr(error, "status", getattr(error, "status_code", 500))
    message = str(error) if status < 500 or isinstance(error, Refused) else "internal error"
    return reply(error_of(message, status), status, getattr(error, "headers", None))


def error_of(message, status):
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def reply(content, status=200, headers=None):
    return Response(json.dumps(content), status, headers, "application/json")


def event(content):   # a server-sent one
    return f"data: {json.dumps(content)}\n\n"


# --- bodies ---------------------------------------------------------------------------------------

async def read_json(http, spec, schema, most, seconds):
    """The JSON body of a request: at most so many bytes in so many seconds, as spec allows it."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(415, "the body must be application/json")   # no web page can send it unasked
    body = bytearray()

    async def read():
        async for piece in http.stream():
            body.extend(piece)
            if len(body) > most:
                raise Refused(413, f"the body is larger than {most} bytes")
    try:
        await asyncio.wait_for(read(), seconds)
    except asyncio.TimeoutError:
        raise Refused(408, f"the body took longer than {seconds} s") from None
    except ClientDisconnect:
        raise Refused(400, "the body ends too early") from None
    return await asyncio.to_thread(checked, body, spec, schema)   # a large one may take a while


def checked(body, spec, schema):
    """The fields of a body that are not null. Refused if it is not as spec has it."""
    try:
        value = json.loads(body.decode(), parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON in UTF-8: {error!s:.100}") from None
    if wrong := fault(value, {"$ref": schema}, "the body", spec):
        raise Refused(400, wrong)
    return {name: each for name, each in value.items() if each is not None}


def no_constant(name):
    raise ValueError(f"{name} is no number")


def fault(value, schema, name, spec):
    """What is wrong with a value, in words, or None. The part of JSON Schema that spec uses."""
    if "$ref" in schema:
        schema = spec["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        fitting = [each for each in schema["anyOf"] if is_of(value, types_of(each))]
        faults = [fault(value, each, name, spec) for each in fitting or schema["anyOf"]]
        return None if None in faults else " or ".join(faults)
    is_bool = isinstance(value, bool)
    if "enum" in schema:   # in Python, True == 1
        found = any(value == each and is_bool == isinstance(each, bool) for each in schema["enum"])
        return None if found else f"{name} must be {' or '.join(map(json.dumps, schema['enum']))}"
    if not is_of(value, types := types_of(schema)):
        return f"{name} must be of type {' or '.join(types)}"
    if isinstance(value, str) and re.search("[\ud800-\udfff]", value):   # JSON can say it
        return f"{name} holds half of a character, a lone surrogate"
    size, ends, unit = value, "imum", ""
    if isinstance(value, (str, list)):
        size = len(value)
        ends, unit = ("Length", " characters") if isinstance(value, str) else ("Items", " items")
    low, high = schema.get(f"min{ends}"), schema.get(f"max{ends}")
    verb = "have" if unit else "be"
    if value is not None and low is not None and size < low:
        return f"{name} must {verb} at least {low}{unit}"
    if value is not None and high is not None and size > high:
        return f"{name} must {verb} at most {high}{unit}"
    if isinstance(value, list):
        faults = (fault(each, schema["items"], f"{name}[{i}]", spec)
                  for i, each in enumerate(value) if "items" in schema)
        return next(filter(None, faults), None)
    if isinstance(value, dict):
        known = schema["properties"]
        for key in value:
            if key not in known:
                return f"unsupported field {key!r:.60}; supported are {', '.join(known)}"
        for key in schema.get("required", ()):
            if key not in value:
                return f"{key} is missing"
        faults = (fault(each, known[key], key if name == "the body" else f"{name}.{key}", spec)
                  for key, each in value.items())
        return next(filter(None, faults), None)


def types_of(schema):
    return schema["type"] if isinstance(schema["type"], list) else [schema["type"]]


def is_of(value, types):   # in Python, a bool is an int
    return any(isinstance(value, TYPES[kind]) and isinstance(value, bool) == (kind == "boolean")
               for kind in types)


# --- connections ----------------------------------------------------------------------------------

class Gate:
    """
    Stands before the application. Without a key, it answers only to this machine's own names: a web
    page elsewhere may make its own name point here (DNS rebinding). With one, it asks for it.
    """

    def __init__(self, app, key=None, open_paths=()):
        self.app, self.key, self.open_paths = app, key, open_paths

    async def __call__(self, scope, receive, send):
        refused = None
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            host = headers.get(b"host", b"").decode("latin-1").lower().rpartition(":")
            given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
            if self.key is None:
                if (host[0] if host[2].isdigit() else "".join(host)) not in LOCAL:
                    refused = Refused(403, "without --api-key, only this machine may ask")
            elif scope["path"] not in self.open_paths and not hmac.compare_digest(
                    given, self.key.encode()):
                refused = Refused(401, "the header Authorization: Bearer KEY is missing or wrong",
                                  {"WWW-Authenticate": "Bearer"})
        await (await refuse(None, refused) if refused else self.app)(scope, receive, send)


class Connection(H11Protocol):
    """uvicorn's connection, with three limits more: their number, slow headers, stuck readers."""
    most, header_seconds, stuck_seconds = 1000, 10, 30
    timer = None

    def connection_made(self, transport):
        super().connection_made(transport)
        if len(self.connections) > self.most:
            self.refuse(f"{self.most} connections are open already", 503, ("Retry-After", "1"))
        else:
            self.end_after(self.header_seconds)

    def data_received(self, data):
        super().data_received(data)
        if self.conn.their_state is h11.IDLE or self.conn.our_state is h11.DONE:
            # a request is to come, or the rest of one that is answered already
            if self.timer is None and not self.transport.is_closing():
                self.end_after(self.header_seconds)
        elif not self.flow.write_paused:
            self.end_after(None)

    def send_400_response(self, message):   # uvicorn's is plain text
        self.refuse(message, 400)

    def refuse(self, message, status, *headers):
        body = json.dumps(error_of(message, status)).encode()
        head = h11.Response(status_code=status, headers=[
            ("Content-Type", "application/json"), ("Content-Length", str(len(body))),
            ("Connection", "close"), *headers])
        self.transport.write(self.conn.send(head) + self.conn.send(h11.Data(data=body)))
        self.transport.close()

    def pause_writing(self):   # the client does not read, and the transport's buffer is full
        super().pause_writing()
        self.end_after(self.stuck_seconds)

    def resume_writing(self):
        super().resume_writing()
        self.end_after(None)

    def connection_lost(self, error):
        super().connection_lost(error)
        self.end_after(None)

    def end_after(self, seconds):
        if self.timer:
            self.timer.cancel()
        self.timer = seconds and self.loop.call_later(seconds, self.transport.abort)


# --- figures --------------------------------------------------------------------------------------

class Histogram:
    """Of seconds, in Prometheus' form: how many were at most as long as each bound."""
    BOUNDS = .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60

    def __init__(self):
        self.counts, self.sum = [0] * (len(self.BOUNDS) + 1), 0.0

    def add(self, seconds):
        self.counts[bisect.bisect_left(self.BOUNDS, seconds)] += 1
        self.sum += seconds

    def lines(self, name):
        totals = list(itertools.accumulate(self.counts))
        bounds = zip((*self.BOUNDS, "+Inf"), totals)
        return [*(f'{name}_bucket{{le="{bound}"}} {total}' for bound, total in bounds),
                f"{name}_sum {self.sum}", f"{name}_count {totals[-1]}"]


def prometheus(name, figure):
    """A number or a Histogram in Prometheus' text format."""
    name, histogram = f"nanobatch_{name}", isinstance(figure, Histogram)
    kind = "histogram" if histogram else "counter" if name.endswith("_total") else "gauge"
    lines = figure.lines(name) if histogram else [f"{name} {figure}"]
    return "\n".join([f"# TYPE {name} {kind}", *lines, ""])
