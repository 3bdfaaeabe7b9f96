"""beyond/engine.py and beyond/serve.py, asked by real clients over real sockets."""
import asyncio
import json
import random
import re
import signal
import socket
import time
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import replace
from threading import Thread

import pytest
import torch
from common import alone, mixed, toy

import generate_paged
from beyond.engine import Engine, Full
from loading.load import load
from request import Request

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
        self.uvicorn = Uvicorn(self.server)
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
            assert len(running.engine.pages.free) == pages
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


def ask_all(running, bodies):
    """The answers to bodies that are sent at the same time, or their errors; most as streams."""
    async def everyone():
        async with running.client(openai.AsyncOpenAI) as client:
            return await asyncio.gather(return_exceptions=True, *(
                answer(client, body, i % 3 > 0) for i, body in enumerate(bodies)))
    return asyncio.run(everyone())


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
    engine, seen = Engine(toy(), pages=20, page_size=2, max_batch=2), []
    first, second, third = requests = [Request([i] * 9, 8) for i in range(3)]
    for request in requests:
        engine.add(request)
    engine.step()
    engine.cancel(first)
    engine.cancel(third)   # still in the queue
    engine.watch = lambda batch: seen.append([request for request, _ in batch.plan])
    ended = [event.request for event in engine.step() if event.token is None]
    assert seen == [[second]] and first.kv is None and set(ended) == {first, third}
    while engine.busy:
        engine.step()
    assert [r.finish_reason for r in requests] == ["cancelled", "length", "cancelled"]
    assert second.generated == alone(engine.model, second)[0]


def test_idle_time_is_no_pace():
    engine = Engine(toy(), max_waiting=1)
    engine.finish_times = deque([time.perf_counter() - 3600])
    engine.add(Request([1]))
    with pytest.raises(Full, match="full, with 1 waiting: try again in 1 s"):
        engine.add(Request([1]))


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
        # the first token that completes a stop ends the text before it, and before any longer one
        found = [(whole.index(stop) + len(stop), whole.index(stop))
                 for stop in stops if stop in whole]
        assert got == whole[:min(found)[1] if found else None]


# --- real clients ---------------------------------------------------------------------------------

@pytest.mark.parametrize("number", [12, pytest.param(200, marks=pytest.mark.thorough)])
def test_concurrent_clients_get_what_they_would_have_got_alone(number):
    bodies = list(asks(number))
    with serving(pages=12, max_batch=6, max_waiting=number) as running:
        server = running.server   # it waits until all are there, so some are preempted
        running.engine.pace = lambda: 0.01 * (len(server.streams) + server.ends.total() < number)
        answers = ask_all(running, bodies)
        running.until(lambda: sum(running.server.ends.values()) == number)
        metrics = {name.removeprefix("nanobatch_"): float(value) for name, value in re.findall(
            r"^(\S+) (\S+)$", httpx.get(running.url + "/metrics").text, re.MULTILINE)}
    for body, (text, reason, usage) in zip(bodies, answers):
        assert (text, reason) == expected(body)
        assert usage.prompt_tokens == len(TOKENIZER.encode_ordinary(body["prompt"]))
        assert 0 < usage.completion_tokens <= body["max_tokens"]
    used = sum(usage.completion_tokens for *_, usage in answers)
    assert metrics["ttft_seconds_count"] == number and metrics["preemptions_total"] > 0
    assert metrics["tokens_total"] >= used and metrics["itl_seconds_count"] >= used - number
    assert metrics['itl_seconds_bucket{le="+Inf"}'] == metrics["itl_seconds_count"]


def test_chat_tokens_models_and_the_lines_of_a_stream():
    text, ask = "user: hi\nassistant:", dict(model="m", max_tokens=9, temperature=0)
    want = expected({"prompt": text, "max_tokens": 9, "temperature": 0, "seed": 0})
    with serving() as running:
        client = running.client()
        for content in "hi", [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]:
            chat = client.chat.completions.create(
                messages=[{"role": "user", "content": content}], **ask).choices[0]
            assert (chat.message.content, chat.finish_reason) == want
        deltas = [part.choices[0].delta for part in client.chat.completions.create(
            messages=[{"role": "user", "content": "hi"}], stream=True, **ask)]
        assert "".join(delta.content for delta in deltas) == want[0]
        assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        ids = client.completions.create(prompt=TOKENIZER.encode_ordinary(text), **ask)
        assert ids.choices[0].text == want[0]
        assert [model.id for model in client.models.list()] == ["m"]
        *parts, end, nothing = running.post(prompt=text, stream=True, **ask).text.split("\n\n")
        assert (end, nothing) == ("data: [DONE]", "")
        parts = [json.loads(part.removeprefix("data: "))["choices"][0]["text"] for part in parts]
        assert "".join(parts) == want[0]


def test_clients_that_disconnect_end_their_requests_alone():
    with serving(LONG, pages=600, max_batch=4) as running:
        body = dict(model="m", prompt="a", max_tokens=4000, extra_body={"ignore_eos": True})
        stay = running.client().completions.create(**body | {"max_tokens": 300}, stream=True)
        for _ in range(3):
            gone = running.client().completions.create(stream=True, **body)
            next(iter(gone))
            gone.close()
        with pytest.raises(openai.APITimeoutError):   # it waits for a whole answer, and leaves
            running.client().with_options(timeout=0.3).completions.create(**body)
        assert sum(part.choices[0].text is not None for part in stay) == 301
        running.until(lambda: running.server.ends == Counter(length=1, cancelled=4))
        assert running.post(prompt="a", max_tokens=99, stop=["a", "e", "i"]).status_code == 200
        running.until(lambda: running.server.ends == Counter(length=1, cancelled=4, stop=1))


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
        ask = {"prompt": "a", "max_tokens": 300, "extra_body": {"ignore_eos": True}}
        refused = [answer for answer in ask_all(running, [ask] * 6)
                   if isinstance(answer, openai.RateLimitError)]
        assert 3 <= len(refused) <= 4 and "full, with 2 waiting" in str(refused[0])
        assert int(refused[0].response.headers["retry-after"]) >= 1
        for wrong, why in (({"max_tokens": 400}, "25 pages of 16 tokens, pages is 20"),
                           ({"prompt": [1] * 4000 + [9999]}, "token id 9999 is not")):
            got = running.post(**{"prompt": "a", **wrong})
            assert got.status_code == 400 and why in got.text


def test_a_failed_pass_fails_its_requests_and_nothing_else():
    def fail(model, arguments):
        if arguments[2].__self__.plan[0][0].prompt[0] == 7:
            raise ZeroDivisionError("for the test")

    good = {"prompt": "a", "max_tokens": 30, "temperature": 0, "seed": 0}
    with serving(max_batch=1) as running:
        server = running.server   # it holds the first pass until all three are there
        running.engine.pace = lambda: 0.01 * (len(server.streams) + server.ends.total() < 3)
        with MODEL.register_forward_pre_hook(fail):
            error, *fine = ask_all(running, [{"prompt": [7]}, good, good])
        assert [answer[:2] for answer in fine] == [expected(good)] * 2
        assert error.status_code == 500 and "ZeroDivisionError: for the test" in str(error)
        with MODEL.register_forward_pre_hook(lambda model, arguments: (   # in the middle
                1 / (len(arguments[2].__self__.plan[0][0].generated) < 2) and None)):
            stream = running.client().completions.create(model="m", stream=True, **good)
            with pytest.raises(openai.APIError, match="division by zero"):
                list(stream)


@pytest.mark.parametrize("drain, ends, signals", [
    (30, "length", 1), (0.2, "the server shuts down", 1), (30, "the server shuts down", 2)])
def test_running_requests_may_finish_before_the_end(drain, ends, signals):
    with serving(LONG, pages=600) as running:
        stream = running.client().completions.create(
            model="m", prompt="a", max_tokens=600 if ends == "length" else 4000, stream=True,
            extra_body={"ignore_eos": True})
        next(iter(stream))
        for _ in range(signals):
            running.signal(drain)
        if ends == "length":
            assert list(stream)[-1].choices[0].finish_reason == ends
        else:
            with pytest.raises(openai.APIError, match=ends):
                list(stream)
        running.thread.join(20)
        assert not running.thread.is_alive() and running.idle()
        with pytest.raises(httpx.ConnectError):
            httpx.get(running.url + "/health")
