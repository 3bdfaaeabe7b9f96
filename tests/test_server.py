"""server/, asked by real clients over real sockets, polite and hostile ones."""
import asyncio
import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from threading import Thread

import pytest
import torch
from common import ROOT, alone, mixed, toy

import generate_paged
from beyond.fork import ForkScheduler
from loading.load import load
from request import Request

for package in "fastapi", "sse_starlette", "prometheus_client", "uvicorn":
    pytest.importorskip(package)
httpx, openai = pytest.importorskip("httpx"), pytest.importorskip("openai")

from server import threads  # noqa: E402  the room needs all of them
from server.__main__ import Uvicorn, listen, main  # noqa: E402
from server.answers import Text  # noqa: E402
from server.app import Server  # noqa: E402
from server.engine import Engine, Observer  # noqa: E402

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

    @property
    def ends(self):
        """{finish reason: how many requests have ended so}."""
        found = self.server.ends.collect()[0].samples
        return {each.labels["reason"]: each.value for each in found if "_total" in each.name}

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

    def hold(self, number):
        """No pass runs until so many requests are there, or were."""
        self.engine.observer = Watch(
            until=lambda: len(self.server.answers) + sum(self.ends.values()) >= number)

    def metrics(self):
        lines = re.findall(r"^nanobatch_(\S+) (\S+)$", httpx.get(self.url + "/metrics").text, re.M)
        return {name: float(value) for name, value in lines}

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
            running.until(lambda: running.idle() and not running.server.answers)
            assert len(running.engine.pages.free) == pages and not running.engine.trace.reached
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
                      body["temperature"], seed=body["seed"], eos_token=TOKENIZER.eot_token,
                      top_p=body.get("top_p", 1.0))
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

class Watch(Observer):
    """Calls `see`; holds while `until` is false."""

    def __init__(self, see=lambda batch: None, until=lambda: True):
        self.see, self.until = see, until

    def hold(self):
        return 0 if self.until() else 0.01


def test_the_loop_of_stage_7_is_the_same_one_closed():
    model, requests = toy(), sorted(mixed(), key=lambda request: request.arrival)
    closed, opened = ([replace(request) for request in requests] for _ in range(2))
    knobs = dict(pages=20, page_size=3, max_batch=3, token_budget=7)
    trace = generate_paged.generate(model, closed, policy=ForkScheduler, **knobs)
    engine, todo, passes, events = Engine(model, **knobs), opened[:], [], []
    engine.observer = Watch(
        lambda batch: passes.append(replace(engine.trace.passes[-1], seconds=0)))
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
        mine = [event for event in events if event.request is request]
        assert [event.token for event in mine] == [*request.generated, None]
        assert mine[-1].reason == request.finish_reason


def test_who_leaves_frees_its_pages_before_the_next_pass():
    engine, seen = Engine(toy(), pages=20, page_size=2, max_batch=2), []
    first, second, third = requests = [Request([i] * 9, 8) for i in range(3)]
    engine.add(*requests)
    engine.step()
    engine.cancel(first)
    engine.cancel(third, "stop")   # still in the queue
    engine.observer = Watch(lambda batch: seen.append([request for request, _ in batch.plan]))
    ended = {event.request: event.reason for event in engine.step() if event.token is None}
    assert seen == [[second]] and first.block_table is None
    assert ended == {first: "cancelled", third: "stop"}
    while engine.busy:
        engine.step()
    assert [r.finish_reason for r in requests] == ["cancelled", "length", "stop"]
    assert second.generated == alone(engine.model, second)[0]


def test_several_are_taken_all_or_none_and_answers_to_one_prompt_share_its_pages():
    engine = Engine(toy(), pages=11, page_size=2)
    with pytest.raises(ValueError, match="needs 24 KV tokens, there are 22"):
        engine.add(Request([1]), Request([1], 24))
    assert not engine.busy
    engine = Engine(toy(), pages=40, page_size=2)
    requests = [Request([1, 2] * 4, 6, temperature=1.0, seed=i) for i in range(5)]
    engine.add(*requests)
    computed, seen = [], lambda batch: computed.extend(n for _, n in batch.plan)
    engine.observer = Watch(seen)
    while engine.busy:
        engine.step()
    assert sum(computed) == 8 + 4 * 2 + 5 * 5   # the prompt once, and the others' last page
    assert [r.generated for r in requests] == [alone(engine.model, r)[0] for r in requests]


@pytest.mark.parametrize("stops", [[], ["b"], ["ab", "aab"], ["aba", "bb"]])
def test_text_of_a_stream_is_the_text_of_the_whole_up_to_a_stop(stops):
    rng = random.Random(0)
    for _ in range(200):
        whole = "".join(rng.choices(["a", "b", "é", "€"], [8, 3, 1, 1], k=rng.randint(0, 9)))
        text, got = Text(TOKENIZER, stops), ""
        for byte in whole.encode():   # one token each: characters come in pieces
            if not text.stopped:
                got += text.add(TOKENIZER.encode_single_token(bytes([byte])))
            assert whole.startswith(got)
        got += "" if text.stopped else text.add(None)
        # the first token that completes a stop ends the text before it, and before any longer one
        found = [(whole.index(stop) + len(stop), whole.index(stop))
                 for stop in stops if stop in whole]
        assert got == whole[:min(found)[1] if found else None]


@pytest.mark.parametrize("faster, chosen", [(1.6, 2), (1.1, 1), (0.2, 1)])
def test_several_threads_compute_only_if_they_are_clearly_faster(faster, chosen, monkeypatch):
    now = [0.0]

    def generate(model, requests, max_batch):
        assert len(requests) == max_batch == 3
        now[0] += 1 / faster if torch.get_num_threads() == 2 else 1
    monkeypatch.setattr(threads, "generate", generate)
    monkeypatch.setattr(threads.time, "perf_counter", lambda: now[0])
    torch.set_num_threads(2)
    try:
        assert threads.choose_threads(MODEL, 3) == chosen
    finally:
        torch.set_num_threads(1)


# --- real clients ---------------------------------------------------------------------------------

@pytest.mark.parametrize("number", [12, pytest.param(200, marks=pytest.mark.thorough)])
def test_concurrent_clients_get_what_they_would_have_got_alone(number):
    bodies = list(asks(number))
    with serving(pages=7, max_batch=6, max_waiting=number) as running:
        running.hold(number)   # so some are preempted
        answers = ask_all(running, bodies)
        running.until(lambda: sum(running.ends.values()) == number)
        metrics = running.metrics()
    for body, (text, reason, usage) in zip(bodies, answers):
        assert (text, reason) == expected(body)
        assert usage.prompt_tokens == len(TOKENIZER.encode_ordinary(body["prompt"]))
        assert 0 < usage.completion_tokens <= body["max_tokens"]
    used = sum(usage.completion_tokens for *_, usage in answers)
    assert metrics["ttft_seconds_count"] == number and metrics["preemptions"] > 0
    assert metrics["tokens_total"] >= used and metrics["itl_seconds_count"] >= used - number
    assert metrics['itl_seconds_bucket{le="+Inf"}'] == metrics["itl_seconds_count"]


def test_several_prompts_and_several_answers_to_each():
    prompts, stop = ["# list.append\n", "é"], ["e"]
    body = dict(max_tokens=9, temperature=1.0, top_p=0.9, n=3, seed=5, stop=stop)
    want = [expected({**body, "prompt": prompt, "seed": 5 + i}) for prompt in prompts
            for i in range(3)]
    with serving() as running:
        create = running.client().completions.create
        whole = create(model="m", prompt=prompts, **body)
        assert [(each.text, each.finish_reason) for each in whole.choices] == want
        assert [each.index for each in whole.choices] == [*range(6)]
        ids = [TOKENIZER.encode_ordinary(prompt) for prompt in prompts]
        assert whole.usage.prompt_tokens == len(ids[0]) + len(ids[1])
        texts, reasons = [""] * 6, {}
        for part in create(model="m", prompt=ids, stream=True, **body):
            choice, = part.choices
            assert choice.index not in reasons
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
        assert [(texts[i], reasons[i]) for i in range(6)] == want and part.id != whole.id


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
        chat = client.chat.completions.create(model="m", extra_body={"ignore_eos": True},
                                              messages=[{"role": "user", "content": "hi"}])
        assert chat.usage.total_tokens == 257   # all the room that there is
        assert [model.id for model in client.models.list()] == ["m"]
        assert client.models.retrieve("m").max_model_len == 256
        with pytest.raises(openai.NotFoundError, match="there is no model 'x'; this is 'm'"):
            client.models.retrieve("x")
        *parts, end, nothing = running.post(prompt=text, stream=True, **ask).text.split("\n\n")
        assert (end, nothing) == ("data: [DONE]", "")
        parts = [json.loads(part.removeprefix("data: "))["choices"][0]["text"] for part in parts]
        assert "".join(parts) == want[0]
        paths = httpx.get(running.url + "/openapi.json").json()["paths"]
        assert "/v1/completions" in paths and httpx.get(running.url + "/docs").status_code == 200


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
        running.until(lambda: running.ends == {"length": 1, "cancelled": 4})
        assert running.post(prompt="a", max_tokens=99, stop=["a", "e", "i"]).status_code == 200
        running.until(lambda: running.ends == {"length": 1, "cancelled": 4, "stop": 1})


def test_a_slow_reader_is_cut_off_and_holds_up_nobody(monkeypatch):
    with serving(LONG, pages=600, settings={"unread": 64}) as running:
        if sys.platform == "linux":   # or else its connection lasts as long as it likes
            running.listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000)
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", running.port))
        body = json.dumps({"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True})
        head = ("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n")
        slow.sendall((head + body).encode())
        fast = running.post(prompt="b", max_tokens=40, ignore_eos=True, temperature=0)
        assert fast.json()["usage"]["completion_tokens"] == 40
        running.until(lambda: running.ends.get("cancelled"))   # long before it is done
        assert running.metrics()["tokens_total"] < 3900 and running.idle()
        if sys.platform == "linux":
            running.until(lambda: not running.uvicorn.server_state.connections)
        slow.close()


def test_a_full_queue_answers_429():
    with serving(LONG, pages=20, max_batch=1, max_waiting=2) as running:
        ask = {"prompt": "a", "max_tokens": 300, "extra_body": {"ignore_eos": True}}
        refused = [answer for answer in ask_all(running, [ask] * 6)
                   if isinstance(answer, openai.RateLimitError)]
        assert 3 <= len(refused) <= 4 and "full, with 2 of 2 waiting" in str(refused[0])
        assert refused[0].response.headers["retry-after"] == "1"


def test_a_failed_pass_fails_its_requests_and_nothing_else():
    def fail(model, arguments):
        if arguments[2].__self__.plan[0][0].prompt[0] == 7:
            raise ZeroDivisionError("for the test")

    good = {"prompt": "a", "max_tokens": 30, "temperature": 0, "seed": 0}
    with serving(max_batch=1) as running:
        running.hold(3)
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


def test_the_server_ends_if_its_engine_does(monkeypatch):
    monkeypatch.setattr(ForkScheduler, "schedule", lambda *_: 1 / 0)
    with serving() as running:
        assert "the engine has stopped: division by zero" in running.post(prompt="a").text
        running.thread.join(20)
        assert isinstance(running.server.died, ZeroDivisionError)


# --- hostile clients ------------------------------------------------------------------------------

JSON = {"content-type": "application/json"}
BAD = {   # what is no body of a completion, and what its refusal says
    b"{": "the body is not JSON", b"null": "must be a JSON object", b"\xff\xfe": "not JSON",
    b"[" * 100_000: "parsing the body", b'{"prompt": "a", "temperature": NaN}': "temperature"}
WRONG = [   # fields, and what the refusal of a body with them says
    ({"tools": [], "x": 1}, "unsupported field 'x'; supported are model, max_tokens"),
    ({"\ud800": 1}, r"unsupported field '\ud800'"), ({"logit_bias": {"7": 1}}, "'logit_bias'"),
    ({"prompt": "\ud800"}, "prompt: 'utf-8' codec can't encode character"),
    ({"stream_options": {"x": 1}}, "stream_options: unsupported field 'x'; supported are inc"),
    ({"prompt": ["a", 1]}, "prompt: it must be a text, a list of token ids, or a list of several"),
    ({"prompt": ["a", ""]}, "prompt: it must be"), ({"prompt": [-1]}, "prompt: it must be"),
    ({"prompt": None}, "prompt: it must be"), ({"stop": ["a"] * 5}, "stop: it must be a text or"),
    ({"prompt": [5000]}, "request 'r0': token id 5000 is not in the vocabulary, 0 to 1023"),
    ({"prompt": [[1] * 9, [1] * 300]}, "prompt[1] has 300 tokens, there is room for 256"),
    ({"prompt": "a" * 9000}, "prompt of 9000 bytes: even 256 tokens, as many as the model takes"),
    ({"max_tokens": 300}, "max_tokens must be at most 256, not 300"),
    ({"prompt": ["a"] * 3, "n": 100}, "300 requests at once: at most 256 may wait, max_waiting"),
    ({"model": "gpt-7"}, "there is no model 'gpt-7'; this is 'm'"), ({"n": True}, "n: "),
    ({"max_tokens": 0}, "max_tokens: "), ({"temperature": -1}, "temperature: "),
    ({"top_p": 0}, "top_p: "), ({"seed": 2**63}, "seed: "), ({"logprobs": 3}, "'logprobs'")]


def test_what_is_wrong_with_a_body_is_said_in_json():
    with serving() as running, httpx.Client(base_url=running.url, timeout=30) as client:
        for path in "/v1/completions", "/v1/chat/completions", "/live/control", "/live/ask":
            for data, why in BAD.items():
                got = client.post(path, content=data, headers=JSON)
                assert got.status_code == got.json()["error"]["code"] == 400, data[:80]
                assert why in got.text or path == "/live/control"
        for body in b" " * 2**20 + b"{}", (b" " * 2**16,) * 17:   # without a Content-Length, too
            assert client.post("/v1/completions", headers=JSON, content=body).status_code == 413
        for wrong, why in WRONG:
            data = json.dumps({"prompt": "a", **wrong})
            got = client.post("/v1/completions", content=data, headers=JSON)
            assert got.status_code in (400, 404) and why in got.json()["error"]["message"], wrong
        plain = client.post("/v1/completions", content='{"prompt": "a"}')   # no page can send JSON
        assert plain.status_code == 400 and "Content-Type: application/json" in plain.text
        assert client.get("/v1/completions").json()["error"]["code"] == 405
        content = client.post("/v1/chat/completions", json={"messages": [
            {"role": "user", "content": [{"type": "image"}]}]})
        assert "messages.0.content: it must be a text" in content.json()["error"]["message"]
        fine = client.post("/v1/completions", json={
            "prompt": "a", "max_tokens": 3, "n": 1, "stop": None, "tools": [], "logit_bias": {},
            "response_format": {"type": "text"}, "presence_penalty": 0.0, "unknown": None})
        assert fine.status_code == 200 and fine.json()["usage"]["prompt_tokens"] == 1


def test_only_this_machine_or_who_has_the_key():
    with serving() as running:
        for host, status in (("localhost", 200), ("127.0.0.1:1", 200), ("[::1]:80", 200),
                             ("evil.example:8000", 400), ("localhost.evil.example", 400)):
            assert httpx.get(running.url + "/health", headers={"Host": host}).status_code == status
    with serving(settings={"key": "secret"}) as running:
        for path, key, status in (("/v1/models", "", 401), ("/v1/models", "Bearer wrong", 401),
                                  ("/v1/models", "Bearer secret", 200), ("/metrics", "", 401),
                                  ("/live/steps", "", 401), ("/", "", 200), ("/health", "", 200)):
            got = httpx.get(running.url + path, headers={"Authorization": key, "Host": "a.example"})
            assert got.status_code == status, path
        assert running.post(prompt="a").json()["error"]["code"] == 401


@pytest.mark.parametrize("flags, word", [
    (["--host", "0.0.0.0", "--api-key", ""], "needs --api-key"),
    (["--port", "99999"], "--port 99999"), (["--pages", "0"], "--pages must be"),
    (["--drain", "inf"], "--drain must be"), (["--model", "nowhere"], "nowhere"),
    (["--page_size", "257"], "--page_size 257 exceeds block_size 256")])
def test_bad_flags_are_one_line(flags, word, capsys):
    with pytest.raises(SystemExit) as end:
        main(flags)
    error = capsys.readouterr().err
    assert end.value.code == 2 and word in error and len(error.splitlines()) == 1


@pytest.mark.thorough
def test_the_program_serves_until_sigterm():
    process = subprocess.Popen([sys.executable, "-m", "server", "--port", "0"], cwd=ROOT, text=True,
                               stdout=subprocess.PIPE)
    try:
        url = process.stdout.readline().split()[-1] + "v1/completions"
        body = next(body for body in asks(9) if not body["stop"] and body["max_tokens"] > 9)
        with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            process.send_signal(signal.SIGTERM)   # with a stream in flight
            parts = [json.loads(line[6:])["choices"][0] for line in (first, *lines)
                     if line not in ("", "data: [DONE]")]
        text = "".join(part["text"] for part in parts)
        assert (text, parts[-1]["finish_reason"]) == expected(body)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
