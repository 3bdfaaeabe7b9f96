"""
From the events of a body's requests to an answer in OpenAI's form: whole, or a stream.

    client <- HTTP <- Answer <--.                                  an Answer holds a limited number
    client <- HTTP <- Answer <--+-- events <-- engine's thread     of unread tokens: no client can
    client <- HTTP <- Answer <--'                                  make the others wait
"""
import asyncio
import json
import time
from uuid import uuid4

from fastapi.sse import format_sse_event
from starlette.exceptions import HTTPException

from lab.loading.load import Stream
from lab.server.schemas import error_of

UNREAD = 512   # tokens of each request that a client may leave unread
# a finish reason without an answer -> status and message
FAILED = {"error": (500, "the forward pass failed"), "shutdown": (503, "the server shuts down"),
          "cancelled": (499, "the client has gone"),
          "unread": (408, "cut off: the client has left too many tokens unread")}


class Text:
    """Tokens become text: whole characters only, and nothing that may yet be a stop string."""

    def __init__(self, tokenizer, stops):
        self.stream, self.stops = Stream(tokenizer), [stops] if isinstance(stops, str) else stops
        self.held, self.stopped = "", False

    def add(self, token):
        """The text that is certain now. token None: the end, so what was held is, too."""
        text = self.held + self.stream.add(token)
        # The stop that is complete first counts, however the text is cut into tokens; of two that
        # end at the same place, the longer one.
        found = [(text.index(stop) + len(stop), text.index(stop))
                 for stop in self.stops if stop in text]
        self.stopped = bool(found)
        # how many characters at the end may be the beginning of a stop string
        begun = [n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        hold = max(begun, default=0) if token is not None else 0
        end = min(found)[1] if found else len(text) - hold
        self.held = text[end:]
        return text[:end]


class Answer:
    """To one body. From the start it listens for the client's end. model: its name"""

    def __init__(self, engine, tokenizer, model, body, requests, http):
        self.engine, self.tokenizer = engine, tokenizer
        self.body, self.requests = body, requests
        self.texts = {request: Text(tokenizer, body.stop) for request in requests}
        self.queue, self.tokens = asyncio.Queue(), 0   # what `put` puts; tokens that have been sent
        self.over = asyncio.create_task(self.until_over(http))
        self.begun = set()   # indices of requests that have had an event
        self.place, form = body.forms[body.stream]   # see schemas
        self.same = {"id": f"cmpl-{uuid4().hex}", "object": form, "model": model,
                     "created": int(time.time())}

    async def until_over(self, http):
        """Its requests end with the response, or before if the client goes."""
        await http.receive()   # the body is read: all that can come is the client's end
        self.engine.cancel(*self.requests)

    def put(self, event):
        request, token, reason, error = event
        text = self.texts[request]
        if text.stopped:   # nothing after a stop string counts
            return
        silent = token is None or token in request.ends
        new = "" if silent else text.add(token)
        if reason and not text.stopped:   # no token follows: nothing is held back
            new += text.add(None)
        if text.stopped:
            reason = "stop"
            self.engine.cancel(request, reason=reason)
        self.queue.put_nowait((self.requests.index(request), new, token, reason, error))
        if self.queue.qsize() > UNREAD * len(self.requests):
            self.engine.cancel(request, reason="unread")

    async def pieces(self):
        """(index of a request, text, finish reason or None), as they come. Or HTTPException."""
        left = len(self.requests)
        while left:
            i, text, token, reason, error = await self.queue.get()
            if reason in FAILED:
                status, why = FAILED[reason]
                raise HTTPException(status, error or why)
            left -= reason is not None
            self.tokens += token is not None
            complete = text or reason or token in self.tokenizer.hidden   # nothing is held back
            first = i not in self.begun   # clients take the first event for the first token
            if complete or first:
                yield i, text, reason
            self.begun.add(i)

    async def whole(self):
        choices = [[i, "", None] for i in range(len(self.requests))]
        async for i, text, reason in self.pieces():
            choices[i] = i, choices[i][1] + text, reason
        return self.fill(choices, usage=self.usage(), role="assistant", refusal=None)

    async def events(self):
        """Server-sent events, in bytes."""
        async for line in self.lines():
            yield format_sse_event(data_str=line)

    async def lines(self):
        """The data of the events."""
        options = self.body.stream_options
        try:
            async for piece in self.pieces():
                so_far = self.usage() if options.continuous_usage_stats else None
                role = {} if piece[0] in self.begun else {"role": "assistant"}
                yield json.dumps(self.fill([piece], usage=so_far, **role))
        except HTTPException as error:
            yield json.dumps(error_of(error.status_code, error.detail))
            return
        if options.include_usage:
            yield json.dumps(self.fill([], usage=self.usage()))
        yield "[DONE]"

    def fill(self, choices, usage=None, **more):
        """The JSON of choices, [(index, text, finish reason), ...]. more: of a chat's message"""
        return {**self.same, "usage": usage, "choices": [
            {"index": i, "finish_reason": reason, "logprobs": None,
             self.place: text if self.place == "text" else {**more, "content": text}}
            for i, text, reason in choices]}

    def usage(self):
        prompts = sum(len(request.prompt) for request in self.requests) // self.body.n
        return {"prompt_tokens": prompts, "completion_tokens": self.tokens,
                "total_tokens": prompts + self.tokens}
