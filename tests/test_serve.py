"""beyond/engine.py and beyond/serve.py, asked by real clients over real sockets."""
import asyncio
import json
import random
import signal
import socket
import subprocess
import time
from contextlib import contextmanager
from dataclasses import replace
from threading import Thread

import pytest
import torch
from common import alone, mixed, toy

import generate_paged
from beyond.engine import Engine
from request import Request
from toolbox.load import load

pytest.importorskip("uvicorn")
httpx, openai = pytest.importorskip("httpx"), pytest.importorskip("openai")

from beyond.serve import Server  # noqa: E402  needs uvicorn
from toolbox.openai import Text  # noqa: E402
from toolbox.serving import Uvicorn, listen  # noqa: E402
from toolbox.web import Connection  # noqa: E402

MODEL, TOKENIZER = load("builtin")
LONG = toy(block_size=4096, vocab_size=1025, dtype=torch.float32)   # its answers can be long


class Running:
    """A server in this process, its engine, and its clients."""

    def __init__(self, engine, **settings):
        self.engine, self.server = engine, Server(engine, TOKENIZER, "m", **settings)
        self.listener = listen("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.uvicorn, self.passes = Uvicorn(self.server), []
        self.thread = Thread(target=self.uvicorn.run, kwargs={"sockets": [self.listener]})

    def client(self, kind=openai.OpenAI):
        return kind(base_url=f"{self.url}/v1", api_key="x", max_retries=0, timeout=60)

    def post(self, path="/v1/completions", **body):
        return httpx.post(self.url + path, json=body, timeout=60)

    def signal(self, drain):
        self.uvicorn.drain = drain
        self.server.loop.call_soon_threadsafe(self.uvicorn.handle_exit, signal.SIGTERM, None)

    def until(self, what):
        deadline = time.monotonic() + 30
        while not what():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def idle(self):
        engine = self.engine
        return not (engine.busy or engine.scheduler.running or engine.scheduler.waiting)


@contextmanager
def serving(model=MODEL, pages=128, settings=None, **knobs):
    running = Running(Engine(model, pages, **knobs), **settings or {})
    running.thread.start()
    running.until(lambda: running.uvicorn.started)
    try:
        yield running
        if running.thread.is_alive():   # whatever the clients did, nothing of it is left
            running.until(running.idle)
            assert running.engine.pages.available() == pages
            assert not running.engine.trace.reached and not running.server.streams
    finally:
        if running.thread.is_alive():
            running.signal(0)
        running.thread.join(20)
        assert not running.thread.is_alive()


def asks(number, seed=0):
    """Bodies of many kinds: greedy and sampled, short and long, with common beginnings."""
    rng = random.Random(seed)
    for i in range(number):
        prompt = rng.choice(["# list.append\n", "# open\nOpen a file" * 5, "é", "# a\n" * 20])
        yield {"prompt": f"{prompt}{rng.randrange(3)}", "max_tokens": rng.randint(1, 24), "seed": i,
               "temperature": rng.choice([0, 0.7, 1.5]), "stop": rng.choice([[], ["e", "\n\n"]])}


def expected(body, model=MODEL):
    """(text, finish reason) of the request alone, by the oracle in common.py."""
    request = Request(TOKENIZER.encode_ordinary(body["prompt"]), body["max_tokens"],
                      body["temperature"], seed=body["seed"], eos_token=TOKENIZER.eot_token)
    tokens, _, reason = alone(model, request)
    data = b"".join(TOKENIZER.decode_single_token_bytes(token) for token in tokens
                    if token != request.eos_token)
    text = data.decode("utf-8", "replace")
    cuts = [text.index(stop) for stop in body.get("stop", []) if stop in text]
    return (text[:min(cuts)], "stop") if cuts else (text, reason)


async def answer(client, body, stream=True):
    """(text, finish reason, usage)."""
    if not stream:
        whole = await client.completions.create(model="m", **body)
        return whole.choices[0].text, whole.choices[0].finish_reason, whole.usage
    parts = [part async for part in await client.completions.create(
        model="m", stream=True, stream_options={"include_usage": True}, **body)]
    choices = [part.choices[0] for part in parts[:-1]]
    assert all(choice.finish_reason is None for choice in choices[:-1])
    return "".join(choice.text for choice in choices), choices[-1].finish_reason, parts[-1].usage


# --- the engine -----------------------------------------------------------------------------------

def test_the_loop_of_stage_7_is_the_same_one_closed():
    model, requests = toy(), sorted(mixed(), key=lambda request: request.arrival)
    closed, opened = ([replace(request) for request in requests] for _ in range(2))
    knobs = dict(pages=20, page_size=3, max_batch=3, token_budget=7)
    trace = generate_paged.generate(model, closed, **knobs)
    engine, todo, passes, events = Engine(model, **knobs), opened[:], [], []
    engine.watch = lambda batch: passes.append(replace(engine.trace.passes[-1], seconds=0))
    while todo or engine.busy:
        while todo and todo[0].arrival <= engine.number:
            engine.add(todo.pop(0))
        events += engine.step()
    name_of = {b.name: a.name for a, b in zip(closed, opened)}
    for p in passes:
        p.work = [(name_of[name], *n) for name, *n in p.work]
    assert passes == [replace(p, seconds=0) for p in trace.passes]
    assert [r.generated for r in opened] == [r.generated for r in closed]
    assert [r.token_steps for r in opened] == [r.token_steps for r in closed]
    assert dict(engine.scheduler.counts) == dict(trace.counts)
    for request in opened:   # each token left, and then the end
        assert [token for r, token, _ in events if r is request] == [*request.generated, None]


def test_who_leaves_frees_its_pages_before_the_next_pass():
    engine = Engine(toy(), pages=20, page_size=2, max_batch=2)
    first, second, third = requests = [Request([i] * 9, 8) for i in range(3)]
    for request in requests:
        engine.add(request)
    engine.step()
    engine.cancel(first)
    engine.cancel(third)   # still in the queue
    seen = []
    engine.watch = lambda batch: seen.append([request for request, _ in batch.plan])
    events = engine.step()
    assert seen == [[second]] and first.kv is None
    assert {r: r.finish_reason for r, token, _ in events if token is None} == {
        first: "cancelled", third: "cancelled"}
    while engine.busy:
        engine.step()
    assert second.generated == alone(engine.model, second)[0]


@pytest.mark.parametrize("stops", [[], ["b"], ["ab", "aab"], ["aba", "bb"]])
def test_text_of_a_stream_is_the_text_of_the_whole_up_to_a_stop(stops):
    rng = random.Random(0)
    for _ in range(200):
        whole = "".join(rng.choices(["a", "b", "é", "€"], [8, 3, 1, 1], k=rng.randint(0, 9)))
        text, got = Text(TOKENIZER, {"stop": stops}), ""
        for byte in whole.encode():   # one token each: characters come in pieces
            if not text.stopped:
                got += text.add(TOKENIZER.encode_single_token(bytes([byte])))
            assert whole.startswith(got)
        got += "" if text.stopped else text.add(None)
        cuts = [whole.index(stop) for stop in stops if stop in whole]
        # at the first token that completes one
        ends = [whole.index(stop) + len(stop) for stop in stops if stop in whole]
        first = [cut for cut, end in zip(cuts, ends) if end == min(ends)]
        assert got == (whole[:min(first)] if cuts else whole)


# --- real clients ---------------------------------------------------------------------------------

@pytest.mark.parametrize("number", [12, pytest.param(200, marks=pytest.mark.thorough)])
def test_concurrent_clients_get_what_they_would_have_got_alone(number):
    bodies = list(asks(number))

    async def everyone(running):
        async with running.client(openai.AsyncOpenAI) as client:
            return await asyncio.gather(*(answer(client, body, i % 3 > 0)
                                          for i, body in enumerate(bodies)))
    with serving(pages=12, max_batch=6, max_waiting=number) as running:   # some are preempted
        answers = asyncio.run(everyone(running))
        running.until(lambda: sum(running.server.ends.values()) == number)
        metrics = dict(line.rsplit(" ", 1) for line in httpx.get(
            running.url + "/metrics").text.splitlines() if line[0] != "#")
    for body, (text, reason, usage) in zip(bodies, answers):
        assert (text, reason) == expected(body)
        assert usage.prompt_tokens == len(TOKENIZER.encode_ordinary(body["prompt"]))
        assert 0 < usage.completion_tokens <= body["max_tokens"]
    counted = {name.removeprefix("nanobatch_"): float(value) for name, value in metrics.items()}
    assert counted["ttft_seconds_count"] == number and counted["preemptions_total"] > 0
    assert sum(counted[f"requests_{end}_total"] for end in ("stop", "length", "cancelled")
               if f"requests_{end}_total" in counted) == number
    assert counted["tokens_total"] >= sum(usage.completion_tokens for *_, usage in answers)
    assert counted["itl_seconds_count"] >= sum(usage.completion_tokens - 1 for *_, usage in answers)
    assert counted['itl_seconds_bucket{le="+Inf"}'] == counted["itl_seconds_count"]


def test_chat_and_curl():
    with serving() as running:
        ask = dict(model="m", max_tokens=9, temperature=0)
        text = "user: hi\nassistant:"
        for content in "hi", [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]:
            chat = running.client().chat.completions.create(
                messages=[{"role": "user", "content": content}], **ask)
            want = expected({"prompt": text, "max_tokens": 9, "temperature": 0, "seed": 0})
            assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == want
        ids = running.client().completions.create(prompt=TOKENIZER.encode_ordinary(text), **ask)
        assert ids.choices[0].text == want[0]
        assert [model.id for model in running.client().models.list()] == ["m"]
        done = subprocess.run(["curl", "-sN", running.url + "/v1/completions", "-H",
                               "Content-Type: application/json", "-d", json.dumps(
                                   {"prompt": text, "stream": True} | ask)],
                              capture_output=True, text=True, check=True)
        *lines, end = [line[6:] for line in done.stdout.split("\n\n") if line]
        assert end == "[DONE]"
        assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == want[0]


def test_a_client_that_disconnects_frees_its_pages_within_a_step():
    with serving(LONG, pages=600, max_batch=4) as running:
        engine, cancelled, late = running.engine, {}, []
        cancel = engine.cancel

        def note(request):
            cancelled.setdefault(request.name, engine.number)
            cancel(request)
        engine.cancel = note
        engine.watch = lambda batch: late.extend(
            request.name for request, _ in (batch.plan if batch else ())
            if engine.number > cancelled.get(request.name, engine.number) + 1)
        body = dict(model="m", prompt="a", max_tokens=2000, extra_body={"ignore_eos": True})
        stay = running.client().completions.create(**body | {"max_tokens": 300}, stream=True)
        for _ in range(3):
            gone = running.client().completions.create(stream=True, **body)
            next(iter(gone))
            gone.close()
        with pytest.raises(openai.APITimeoutError):   # it waits for a whole answer, and leaves
            running.client().with_options(timeout=0.3).completions.create(**body)
        assert sum(part.choices[0].text is not None for part in stay) == 301
        running.until(lambda: len(cancelled) == 4)
    assert not late


def test_a_slow_reader_is_cut_off_and_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(Connection, "stuck_seconds", 1)
    with serving(LONG, pages=600, settings={"unread": 64}) as running:
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", running.port))
        body = json.dumps({"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True})
        head = ("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n")
        slow.sendall((head + body).encode())
        fast = running.post(prompt="b", max_tokens=40, ignore_eos=True, temperature=0)
        assert fast.json()["usage"]["completion_tokens"] == 40
        running.until(lambda: running.server.ends["cancelled"])   # long before it is done
        assert running.server.tokens < 3900 and running.idle()
        running.until(lambda: not running.server.streams)          # and its connection is given up
        slow.close()


def test_the_reason_reaches_a_slow_reader_that_goes_on():
    with serving(LONG, pages=600, settings={"unread": 8}) as running:
        create = running.client().completions.create(
            model="m", prompt="a", max_tokens=4000, extra_body={"ignore_eos": True}, stream=True)
        next(iter(create))
        running.server.loop.call_soon_threadsafe(time.sleep, 0.5)   # the server cannot send
        with pytest.raises(openai.APIError, match="8 tokens unread"):
            list(create)


def test_a_full_queue_answers_429_and_what_never_fits_400():
    with serving(LONG, pages=20, max_batch=1, max_waiting=2) as running:
        client = running.client()
        ask = dict(model="m", prompt="a", extra_body={"ignore_eos": True}, max_tokens=300)
        streams = [client.completions.create(stream=True, **ask)]
        threads = [Thread(target=client.completions.create, kwargs=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        running.until(lambda: len(running.engine.scheduler.waiting) == 2)
        with pytest.raises(openai.RateLimitError, match="2 requests wait") as full:
            client.completions.create(**ask)
        assert int(full.value.response.headers["retry-after"]) >= 1
        with pytest.raises(openai.BadRequestError, match="25 pages of 16 tokens, pages is 20"):
            client.completions.create(**ask | {"max_tokens": 400})
        with pytest.raises(openai.BadRequestError, match="5000 tokens does not fit"):
            client.completions.create(**ask | {"prompt": [1] * 5000})
        streams[0].close()
        for thread in threads:
            thread.join()


def test_a_failed_pass_fails_its_requests_and_nothing_else():
    with serving(max_batch=1) as running:
        def fail(model, arguments):
            if arguments[2].__self__.plan[0][0].prompt[0] == 7:
                raise ZeroDivisionError("for the test")
        with MODEL.register_forward_pre_hook(fail):
            good = {"prompt": "a", "max_tokens": 30, "temperature": 0, "seed": 0}
            answers = {}
            threads = [Thread(target=lambda i, body: answers.update({i: running.post(**body)}),
                              args=each) for each in enumerate([good, {"prompt": [7]}, good])]
            running.engine.pace = lambda: 9   # seconds: all three are there before the first pass
            for i, thread in enumerate(threads, 1):
                thread.start()
                running.until(lambda: len(running.engine.unfinished) == i)
            running.engine.pace = None
            running.engine.wake()
            for thread in threads:
                thread.join()
        assert [answers[i].status_code for i in range(3)] == [200, 500, 200]
        assert "ZeroDivisionError: for the test" in answers[1].json()["error"]["message"]
        for i in 0, 2:
            assert answers[i].json()["choices"][0]["text"] == expected(good)[0]
        stream = running.client().completions.create(model="m", stream=True, **good)
        next(iter(stream))
        with MODEL.register_forward_pre_hook(lambda *_: 1 / 0):
            with pytest.raises(openai.APIError, match="division by zero"):   # in the middle
                list(stream)


@pytest.mark.parametrize("drain, ends", [(30, "length"), (0.2, "the server shuts down")])
def test_running_requests_may_finish_before_the_end(drain, ends):
    with serving(LONG, pages=600) as running:
        stream = running.client().completions.create(
            model="m", prompt="a", max_tokens=600 if drain > 1 else 4000, stream=True,
            extra_body={"ignore_eos": True})
        next(iter(stream))
        running.signal(drain)
        if drain > 1:
            assert list(stream)[-1].choices[0].finish_reason == ends
        else:
            with pytest.raises(openai.APIError, match=ends):
                list(stream)
        running.thread.join(20)
        assert not running.thread.is_alive() and running.idle()
        with pytest.raises(httpx.ConnectError):
            httpx.get(running.url + "/health")
