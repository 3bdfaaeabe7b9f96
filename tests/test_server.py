"""lab/server/, asked by real clients over real sockets, polite and hostile ones."""
import asyncio
import json
import math
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import Event, Thread, Timer

import pytest
import torch
from common import ROOT, alone, assert_pages, mixed, refused, toy

import generate_prefix
from generate_prefix import PrefixScheduler
from lab.loading.load import load
from request import Request

httpx, _ = map(pytest.importorskip, ("httpx", "fastapi"))

from lab.server import __main__ as program  # noqa: E402  the room needs all of them
from lab.server import answers, app, schemas  # noqa: E402
from lab.server.app import Server  # noqa: E402
from lab.server.engine import ThreadedEngine  # noqa: E402

MODEL, TOKENIZER = load("builtin")
LONG = toy(block_size=4096, vocab_size=1025, dtype=torch.float32)   # its answers can be long


@pytest.fixture(scope="module", autouse=True)
def client_library():
    """It takes a second to import, which other files' tests need not wait for."""
    global openai
    openai = pytest.importorskip("openai")


class Running:
    """A server in this process, its engine, and its clients."""

    def __init__(self, engine, **settings):
        self.engine, self.server = engine, Server(engine, TOKENIZER, "m", **settings)
        self.listener = program.listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = Thread(target=self.server.run, args=([self.listener],))

    def client(self):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="x", max_retries=0)

    def post(self, path="/v1/completions", **body):
        return httpx.post(self.url + path, json=body, timeout=60)

    def half_sent(self, body, more=0):
        """The connection of a client that says it will send `more` bytes."""
        connection = socket.create_connection(self.listener.getsockname())
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
                           b"application/json\r\nContent-Length: %d\r\n\r\n%b"
                           % (len(body) + more, body))
        return connection

    def signal(self, drain):
        self.server.drain, self.server.config.timeout_graceful_shutdown = drain, drain + 1
        self.server.loop.call_soon_threadsafe(self.server.handle_exit, signal.SIGTERM, None)

    def until(self, what):
        deadline = time.monotonic() + 30
        while not what():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def hold(self, number):
        """The first pass waits until so many requests are there."""
        self.engine.hold = lambda: (
            0 if self.engine.number or len(self.server.answers) >= number else 0.01)

    def metrics(self, name=r"(\S+)"):
        text = httpx.get(self.url + "/metrics").text
        return {found: float(value)
                for found, value in re.findall(rf"^nanobatch_{name} (\S+)$", text, re.M)}

    def ends(self):
        """{finish reason: how many requests have ended so}."""
        return self.metrics(r'requests_total{reason="(\w+)"}')


@contextmanager
def serving(model=MODEL, pages=128, settings=None, **knobs):
    running = Running(ThreadedEngine(model, pages, **knobs), **settings or {})
    running.thread.start()
    running.until(lambda: running.server.started)
    try:
        yield running
        if running.thread.is_alive():   # whatever the clients did, nothing of it is left
            running.until(lambda: not (running.engine.busy or running.server.answers))
            assert len(running.engine.pool.free_queue) == pages
            trace = running.engine.trace
            assert not trace.reached and len(trace.step_times) < 2 and len(trace.passes) < 2
    finally:
        if running.thread.is_alive():
            running.signal(0)
        running.thread.join(20)
        assert not running.thread.is_alive()


def asks(number, seed=0):
    """Bodies of many kinds: greedy and sampled, short and long, with common beginnings."""
    rng = random.Random(seed)
    for i in range(number):
        prompts = [f"{prompt}{rng.randrange(3)}" for prompt in rng.sample(
            ["# list.append\n", "# open\nOpen a file" * 5, "é", "# a\n" * 20], rng.choice([1, 2]))]
        yield {"prompt": prompts, "n": rng.choice([1, 1, 3]), "max_tokens": rng.randint(1, 16),
               "temperature": rng.choice([0, 0.7, 1.5]), "top_p": rng.choice([1, 0.9]), "seed": i,
               "stop": rng.choice([[], ["e", "\n\n"]])}


def expected(body):
    """[(text, finish reason), ...]: of each request alone, by the oracle in common.py."""
    return [one(body, prompt, i) for prompt in body["prompt"] for i in range(body.get("n", 1))]


def one(body, prompt, i=0):
    request = Request(TOKENIZER.encode_ordinary(prompt), body["max_tokens"], body["temperature"],
                      seed=body["seed"] + i, eos_token=TOKENIZER.eot_token,
                      top_p=body.get("top_p", 1.0))
    tokens, _, reason = alone(MODEL, request)
    data = b"".join(TOKENIZER.decode_single_token_bytes(token) for token in tokens
                    if token != request.eos_token)
    text = data.decode("utf-8", "replace")
    cuts = [text.index(stop) for stop in body.get("stop", []) if stop in text]
    return (text[:min(cuts)], "stop") if cuts else (text, reason)


async def answer(client, body, stream):
    """([(text, finish reason), ...] of the choices, usage)."""
    if not stream:
        whole = await client.completions.create(model="m", **body)
        assert [each.index for each in whole.choices] == [*range(len(whole.choices))]
        return [(each.text, each.finish_reason) for each in whole.choices], whole.usage
    texts, reasons = defaultdict(str), {}
    async for part in await client.completions.create(
            model="m", stream=True, stream_options={"include_usage": True}, **body):
        for choice in part.choices:
            assert choice.index not in reasons
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return [(texts[i], reasons[i]) for i in sorted(texts)], part.usage


def ask_all(running, bodies):
    """The answers to bodies that are sent at the same time, or their errors; most as streams."""
    async def everyone():
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="x",
                                      max_retries=0) as client:
            return await asyncio.gather(return_exceptions=True, *(
                answer(client, body, i % 3 > 0) for i, body in enumerate(bodies)))
    return asyncio.run(everyone())


def streamed(running, path="/v1/completions", **body):
    """The events of a stream."""
    *events, end, nothing = running.post(path, stream=True, **body).text.split("\n\n")
    assert (end, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


# --- the engine -----------------------------------------------------------------------------------

def test_the_loop_of_prefix_is_the_same_one_closed():
    model, requests = toy(), sorted(mixed(), key=lambda request: request.arrival)
    closed, opened = ([replace(request) for request in requests] for _ in range(2))
    knobs = dict(pages=20, page_size=3, max_batch=3, token_budget=7)
    trace = generate_prefix.generate(model, closed, **knobs)
    engine, todo = ThreadedEngine(model, **knobs), opened[:]
    while todo or engine.busy:
        while todo and todo[0].arrival <= engine.number:
            engine.submit(todo.pop(0))
        engine.turn()
    assert [r.generated for r in opened] == [r.generated for r in closed]
    assert [r.token_steps for r in opened] == [r.token_steps for r in closed]
    assert dict(engine.scheduler.pool.counts) == dict(trace.counts)


@pytest.mark.parametrize("seed", range(4))
def test_any_may_leave_and_any_pass_may_fail(seed):
    """
    By the fault of one that runs, or of nobody, while another leaves; some are preempted. Whoever
    leaves has no part in the next pass. The others lose nothing.
    """
    rng, model, asked = random.Random(seed), toy(), []
    engine = ThreadedEngine(model, pages=8, page_size=rng.choice([2, 3]),
                            max_batch=rng.randint(2, 5), token_budget=rng.choice([3, 8, 64]))
    stem, ended, named = [rng.randrange(5) for _ in range(9)], [], None

    def fail(*_):
        nonlocal running, named
        running = [*engine.scheduler.running]
        named = rng.choice([None, *running])
        engine.cancel(rng.choice(running))   # between plan and pass
        failure = RuntimeError("it failed")
        failure.request = named
        raise failure

    while engine.busy or engine.number < 60:
        if engine.number < 60 and rng.random() < 0.6 or not engine.busy:
            asked.append(Request(stem[:rng.randint(1, 9)] + [rng.randrange(5)], rng.randint(1, 6),
                                 rng.choice([0, 1]), seed=rng.randrange(9)))
            engine.submit(asked[-1])
        if rng.random() < 0.2:   # one that runs, waits, or has ended
            engine.cancel(rng.choice(asked), reason="stop")
        leaving = [(each, each.finish_reason, [*each.generated])
                   for requests, reason in engine.inbox if reason for each in requests]
        running = []
        if engine.number < 60 and rng.random() < 0.2:
            with rng.choice([*model.h, model.ln_f]).register_forward_pre_hook(fail):
                events = engine.turn()
        else:
            events = engine.turn()
        assert_pages(engine.scheduler)   # also that they wait in the order of arrival
        for request, reason, tokens in leaving:
            assert request.finish_reason in ([reason] if reason else ["stop", "cancelled"])
            assert request.generated == tokens and request.block_table is None
        planned = [request for request in running if request not in engine.scheduler.running]
        lost = [event.request for event in events if event.error == "RuntimeError: it failed"]
        assert lost == [request for request in planned if named in (None, request)]
        ended += [event.request for event in events if event.reason]
    assert Counter(ended) == Counter(asked) and len(engine.pool.free_queue) == 8
    assert engine.pool.counts["preemptions"] and engine.pool.counts["shared_pages"]
    reasons = Counter(request.finish_reason for request in asked)
    assert reasons["error"] and reasons["length"] and reasons["stop"] + reasons["cancelled"]
    for request in asked:
        tokens = alone(model, request)[0]
        assert request.generated == tokens[:len(request.generated)]
        assert request.finish_reason != "length" or request.generated == tokens


def test_several_are_taken_all_or_none():
    engine = ThreadedEngine(toy(), pages=11, page_size=2)
    with pytest.raises(ValueError, match="needs 24 KV tokens, there are 22"):
        engine.submit(Request([1]), Request([1], 24))
    assert not engine.busy


@pytest.mark.parametrize("stops", [[], ["b"], ["ab", "aab"], ["aba", "bb"]])
def test_text_of_a_stream_is_the_text_of_the_whole_up_to_a_stop(stops):
    rng = random.Random(0)
    for _ in range(200):
        letters = rng.choices(["a", "b", "é", "€"], [8, 3, 1, 1], k=rng.randint(0, 9))
        sent = "".join(letters).encode()[:9]   # which may end within a character
        whole = sent.decode(errors="replace")
        text, got = answers.Text(TOKENIZER, stops), ""
        for byte in sent:   # one token each: characters come in pieces
            if not text.stopped:
                got += text.add(TOKENIZER.encode_single_token(bytes([byte])))
            assert whole.startswith(got)
        got += "" if text.stopped else text.add(None)
        # the first token that completes a stop ends the text before it, and before any longer one
        found = [(whole.index(stop) + len(stop), whole.index(stop))
                 for stop in stops if stop in whole]
        assert got == whole[:min(found)[1] if found else None]


@pytest.mark.parametrize("stops", [["abcd", "b"], ["aba", "ab"], ["bcd", "abcd", "cd"]])
def test_stop_strings_that_overlap_cut_at_the_same_place_however_tokens_are_split(stops):
    whole = "xabcdx"

    class Joined:
        """A tokenizer with one token for each cut of the text."""
        hidden = unsure = frozenset()

        def __init__(self, pieces):
            self.pieces = pieces

        def decode(self, tokens):
            return "".join(self.pieces[token] for token in tokens)

        def decode_single_token_bytes(self, token):
            return self.pieces[token].encode()

    def shown(pieces):
        text, result = answers.Text(Joined(pieces), stops), ""
        for token in [*range(len(pieces)), None]:
            if not text.stopped:
                result += text.add(token)
        return result

    by_letter = shown(whole)
    for first in range(1, 5):
        for second in range(first + 1, 6):
            assert shown([whole[:first], whole[first:second], whole[second:]]) == by_letter
    assert shown([whole]) == by_letter


def test_special_tokens_are_hidden_and_a_token_that_ends_an_answer_is_too(monkeypatch):
    """With ignore_eos too; what ends an answer may be a token that is hidden nowhere else."""
    dot, special = TOKENIZER.encode_single_token(b"."), TOKENIZER.eot_token
    text = answers.Text(TOKENIZER, [])
    assert "".join(map(text.add, [special, dot, special, special, dot, None])) == ".."
    monkeypatch.setattr(TOKENIZER, "eot_token", (dot, special))
    with serving() as running:
        ended, whole = (running.post(prompt="# a", max_tokens=200, temperature=0.7, seed=0,
                                     ignore_eos=ignore_eos).json()["choices"][0]
                        for ignore_eos in (False, True))
    assert (ended["finish_reason"], whole["finish_reason"]) == ("stop", "length")
    assert whole["text"].startswith(ended["text"] + ".") and "<|endoftext|>" not in whole["text"]


# --- real clients ---------------------------------------------------------------------------------

@pytest.mark.parametrize("number", [8, pytest.param(200, marks=pytest.mark.thorough)])
def test_concurrent_clients_get_what_they_would_have_got_alone(number):
    bodies = list(asks(number))
    total = sum(len(body["prompt"]) * body["n"] for body in bodies)
    tokens = [TOKENIZER.encode_ordinary_batch(body["prompt"]) for body in bodies]
    sent = [body | {"prompt": tokens[i]} if i % 4 == 1 else body for i, body in enumerate(bodies)]
    with serving(pages=7, max_batch=6, max_waiting=total) as running:
        running.hold(total)   # so some are preempted
        got = ask_all(running, sent)
        running.until(lambda: sum(running.ends().values()) == total)
        metrics = running.metrics()
    for body, prompts, (choices, usage) in zip(bodies, tokens, got):
        assert choices == expected(body)
        assert usage.prompt_tokens == sum(map(len, prompts))
        assert 0 < usage.completion_tokens <= body["max_tokens"] * len(choices)
    used = sum(usage.completion_tokens for _, usage in got)
    assert metrics["ttft_seconds_count"] == total and metrics["preemptions"] > 0
    assert metrics["tokens_total"] >= used and metrics["itl_seconds_count"] >= used - total
    assert metrics['itl_seconds_bucket{le="+Inf"}'] == metrics["itl_seconds_count"]


def test_chats_and_models(monkeypatch):
    ask = {"max_tokens": 9, "temperature": 0}
    want = one(ask | {"seed": 0}, "user: hi\nassistant:")[0]
    with serving() as running:
        client = running.client()
        chat = partial(client.chat.completions.create, model="m",
                       messages=[{"role": "user", "content": "hi"}])
        hi = [{"role": "user", "content": [{"type": "text", "text": letter} for letter in "hi"]}]
        whole = chat(messages=hi, **ask)
        message = whole.choices[0].message
        assert message.model_fields_set == {"role", "content", "refusal"}   # null, but there
        assert (message.role, message.content) == ("assistant", want)
        parts = [*chat(stream=True, **ask)]
        assert (whole.object, parts[1].object) == ("chat.completion", "chat.completion.chunk")
        assert whole.model == parts[1].model == "m" and time.time() - whole.created < 60
        deltas = [part.choices[0].delta for part in parts]
        assert "".join(delta.content for delta in deltas) == want
        assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        usage = chat(extra_body={"ignore_eos": True}).usage
        assert usage.total_tokens == 257   # all the room that there is
        short = chat(max_completion_tokens=1, messages=[   # as clients send an answer back
            {"role": "user", "content": "hi"}, message.model_dump() | {"tool_calls": []}],
            logprobs=False, response_format={"type": "text"})
        assert short.usage.completion_tokens == 1 and short.id != whole.id
        assert [model.id for model in client.models.list()] == ["m"]
        monkeypatch.setattr(TOKENIZER, "chat_template", "of a folder", raising=False)
        monkeypatch.setattr(TOKENIZER, "encode_chat", raising=False, value=lambda messages:
                            TOKENIZER.encode_ordinary(str(messages)))
        got = chat(messages=hi, **ask).choices[0].message.content
        assert got == one(ask | {"seed": 0}, "[{'role': 'user', 'content': 'hi'}]")[0]


def test_each_token_is_an_event_and_usage_comes_with_it_if_asked_for():
    with serving() as running:
        for fields, used in (({"include_obfuscation": False}, [None] * 3),
                             ({"include_usage": True}, [None] * 3 + [3]),
                             ({"continuous_usage_stats": True}, [1, 2, 3])):
            events = streamed(running, prompt="a", max_tokens=3, seed=0, ignore_eos=True,
                              stream_options=fields)
            assert {event["object"] for event in events} == {"text_completion"}
            assert [each["usage"] and each["usage"]["completion_tokens"] for each in events] == used


def test_the_first_event_of_a_stream_is_its_first_token_and_the_last_one_ends_it():
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 5}
    with serving() as running:
        go = Event()
        running.engine.hold = lambda: 0 if go.is_set() else 0.01
        Timer(0.5, go.set).start()   # nothing is computed before
        with httpx.stream("POST", f"{running.url}/v1/chat/completions", timeout=60,
                          json=body | {"stream": True}) as stream:
            assert next(line for line in stream.iter_lines() if line.startswith("data: "))
            assert running.engine.number > 0
        choices = [event["choices"][0]
                   for event in streamed(running, "/v1/chat/completions", n=2, **body)]
    for i in range(2):
        mine = [choice for choice in choices if choice["index"] == i]
        assert [choice["finish_reason"] for choice in mine] == [None] * 4 + ["length"]
        assert [choice["delta"].get("role") for choice in mine] == ["assistant"] + [None] * 4
        assert all(choice["delta"]["content"] for choice in mine)


def test_a_token_that_is_hidden_is_an_event_too(monkeypatch):
    """Clients count events, and measure the time between them."""
    with serving() as running:
        def texts(path="/v1/completions", **more):
            body = dict(max_tokens=12, seed=0, temperature=0.7, ignore_eos=True)
            events = streamed(running, path, **body, **more)
            choices = [event["choices"][0] for event in events]
            return [each["text"] if "text" in each else each["delta"]["content"]
                    for each in choices]
        shown = texts(prompt="# a")
        assert len(shown) == 12 and all(shown)
        first, fourth = (TOKENIZER.encode_single_token(shown[i].encode()) for i in (0, 3))
        monkeypatch.setattr(TOKENIZER, "eot_token", (first, fourth))
        monkeypatch.setattr(type(TOKENIZER), "hidden", {first, fourth})
        hidden = [shown[0], shown[3]]
        assert texts(prompt="# a") == ["" if text in hidden else text for text in shown]
        chat = texts("/v1/chat/completions", messages=[{"role": "user", "content": "# a"}])
        assert len(chat) == 12


def test_the_first_token_is_an_event_even_if_its_text_is_held_back():
    with serving() as running:
        whole = running.post(prompt="# open\n", max_tokens=4, temperature=0).json()
        stop = whole["choices"][0]["text"] + "\0"   # each token looks like its beginning
        events = streamed(running, prompt="# open\n", max_tokens=5, temperature=0, stop=stop)
        texts = [event["choices"][0]["text"] for event in events]
        assert texts[0] == "" and texts[1].startswith(whole["choices"][0]["text"])


def test_a_token_whose_text_is_held_back_has_no_event_of_its_own():
    with serving() as running:
        def texts(**more):
            events = streamed(running, prompt="# open\n", max_tokens=20, temperature=0, **more)
            return [event["choices"][0]["text"] for event in events]
        pieces = texts()
        assert len(pieces) == 20 and all(pieces)
        stop = "".join(pieces[3:6]) + "\0"   # three tokens look like its beginning
        assert texts(stop=stop) == [*pieces[:3], "".join(pieces[3:7]), *pieces[7:]]
        held = texts(stop=pieces[-1] + "\0")   # at the end there is nothing to wait for
        assert "".join(held) == "".join(pieces)


def test_answers_draw_from_seeds_of_their_own_unless_a_seed_is_given():
    with serving() as running:
        def texts(**seed):
            choices = running.post(prompt=["a"] * 3, n=2, ignore_eos=True, **seed).json()["choices"]
            return [choice["text"] for choice in choices]
        assert len({*texts()}) == 6
        first, second = [*texts(seed=5)][:2]
        assert texts(seed=5) == [first, second] * 3 and first != second
        below = texts(seed=-1)[0]   # -1, and not 1
        assert texts(seed=-1)[1] == texts(seed=0)[0]
        assert below not in texts(seed=1) and texts(seed=-2)[1] == below
        assert texts(top_p=0) == texts(temperature=0)


def test_routes(monkeypatch):
    with serving(pages=2) as running, httpx.Client(base_url=running.url) as client:
        assert client.get("/v1/models/m").json()["max_model_len"] == 32
        for path in "/", "/health", "/v1/models", "/v1/models/m", "/metrics", "/docs":
            head, whole = client.head(path), client.get(path)
            assert (head.status_code, head.content) == (whole.status_code, b"") == (200, b"")
        assert "/v1/completions" in client.get("/openapi.json").json()["paths"]
        assert client.get("/health/").status_code == 404   # no redirection
        config = running.server.config   # httpx uses a connection again for 5 seconds
        assert config.timeout_keep_alive > 5 and app.CONNECTIONS == 1000
        assert config.http == "h11"   # whatever else is installed
        for path in "/v1/completions", "/v1/chat/completions", "/live/ask", "/live/control":
            for method in "GET", "HEAD", "OPTIONS":
                got = client.request(method, path)
                assert (got.status_code, got.headers["allow"]) == (405, "POST")
        assert running.post(prompt="a", ignore_eos=True).json()["usage"]["total_tokens"] == 17
        monkeypatch.setattr(schemas.Completion, "prompts", lambda *_: {}["secret"])
        assert running.post(prompt="a").json() == schemas.error_of(500, "internal error")
        monkeypatch.setattr(app, "CONNECTIONS", 1)   # that of `client`
        assert running.post(prompt="a").json()["error"]["code"] == "503"


def test_clients_that_leave_end_all_their_requests_and_no_others():
    with serving(LONG, pages=600, max_batch=9) as running:
        body = dict(model="m", prompt="a", max_tokens=4000, extra_body={"ignore_eos": True})
        stay = running.client().completions.create(
            **body | {"max_tokens": 300}, stream=True, stream_options={"include_usage": True})
        for n in 1, 4:
            gone = running.client().completions.create(stream=True, n=n, **body)
            next(iter(gone))
            gone.close()
        with pytest.raises(openai.APITimeoutError):   # it waits for a whole answer, and leaves
            running.client().with_options(timeout=0.3).completions.create(n=4, **body)
        with running.half_sent(b'{"prompt": "a", "max_tokens": 4000, "ignore_eos": true}') as half:
            half.shutdown(socket.SHUT_WR)   # it could still read
            running.until(lambda: running.ends().get("cancelled") == 10)
        *parts, usage = [(part.choices, part.usage) for part in stay]
        assert usage[1].completion_tokens == 300 and parts[-1][0][0].finish_reason == "length"
        running.until(lambda: running.ends() == {"length": 1, "cancelled": 10})


def test_metrics_count_while_requests_run_and_a_stop_string_at_the_last_token():
    with serving() as running:
        running.engine.hold = lambda: 0.01 * (running.engine.number == 3)
        ask = partial(running.client().completions.create, model="m", prompt="a", seed=1)
        stream = ask(max_tokens=5, stream=True)
        running.until(lambda: running.metrics()["tokens_total"] == 3)
        metrics = running.metrics()
        assert (metrics["ttft_seconds_count"], metrics["itl_seconds_count"]) == (1, 2)
        assert metrics["requests_running"] == 1 and not running.ends()
        running.engine.hold = lambda: 0
        text = "".join(part.choices[0].text for part in stream)
        assert ask(max_tokens=5, stop=text).choices[0].finish_reason == "stop"
        assert ask(max_tokens=255, stop=text[:1]).usage.completion_tokens == 1
        running.until(lambda: running.ends() == {"length": 1, "stop": 2})
        assert running.metrics()["tokens_total"] < 100   # the engine has stopped, too


def test_metrics_measure_the_time_to_a_first_token_and_between_tokens():
    """Counted apart: the sums are those of the times that the request itself has."""
    with serving() as running:
        requests = []
        add = running.engine.add
        running.engine.add = lambda *new: (requests.extend(new), add(*new))
        running.post(prompt="a", max_tokens=5, ignore_eos=True)
        running.until(lambda: running.metrics()["tokens_total"] == 5)
        metrics = running.metrics()
    request, = requests
    first, *_, last = request.token_times
    assert metrics["ttft_seconds_sum"] == pytest.approx(first - request.asked, rel=1e-6)
    assert metrics["ttft_seconds_sum"] > 0
    assert metrics["itl_seconds_sum"] == pytest.approx(last - first, rel=1e-6)


def test_a_slow_reader_is_cut_off_and_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(answers, "UNREAD", 16)
    with serving(LONG, pages=600, max_batch=9) as running:
        running.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)   # soon full
        body = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "stream": True, "n": 8}
        with httpx.stream("POST", running.url + "/v1/completions", json=body, timeout=60) as slow:
            fast = running.post(prompt="b", max_tokens=40, ignore_eos=True, temperature=0)
            assert fast.json()["usage"]["completion_tokens"] == 40
            running.until(lambda: running.ends().get("unread") == 8)   # long before they are done
            assert running.metrics()["tokens_total"] < 7900 and not running.engine.busy
            assert [line for line in slow.iter_lines() if '"code": "408"' in line]


def test_a_body_is_taken_as_a_whole_or_not_at_all_and_a_full_queue_answers_429():
    with serving(pages=40, max_batch=2, max_waiting=2) as running:
        running.hold(4)
        ask = partial(running.client().completions.create, model="m", prompt="a", stream=True)
        streams = [ask(n=3)]   # for two there are places: only one waits
        with pytest.raises(openai.RateLimitError, match="3 are there: the limit is 4") as full:
            ask(n=2)   # only one could wait
        assert full.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.BadRequestError, match="5 more requests, 3 are there"):
            ask(n=5)
        streams.append(ask())
        assert sum(len(list(stream)) > 1 for stream in streams) == 2
        running.until(lambda: sum(running.ends().values()) == 4)


def test_a_request_without_finite_logits_ends_alone_and_only_its_client_is_told():
    bad, = TOKENIZER.encode_ordinary("@")
    bodies = [{"prompt": [prompt], "max_tokens": 9, "temperature": 0.8, "seed": i}
              for i, prompt in enumerate(["a", "b@", "# open\n", "@", "é"])]

    def spoil(model, arguments, logits):   # of whoever has just computed this token
        tokens, _, _, wanted = arguments
        return logits.masked_fill((tokens[wanted] == bad)[:, None], math.nan)

    with serving() as running, MODEL.register_forward_hook(spoil):
        running.hold(len(bodies))
        got = ask_all(running, bodies)
    assert [choices for choices, _ in got[::2]] == [*map(expected, bodies[::2])]
    lost = [re.findall(r"request '(\w+)'", str(error)) for error in got[1::2]]
    assert all("logits are not finite" in str(error) for error in got[1::2])
    assert {error.code for error in got[1::2]} == {"500"}   # of a stream, and of a whole answer
    assert [len(names) for names in lost] == [1, 1] and lost[0] != lost[1]   # each hears of its own


@pytest.mark.parametrize("drain, signals, more", [(0.2, 1, 9), (600, 2, 9), (600, 3, 0)])
def test_running_requests_have_limited_time_after_a_signal_and_none_after_two(
        drain, signals, more, capfd):
    """Neither a body that is half sent nor a client which does not read keeps the server."""
    unread = json.dumps({"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True,
                         "n": 8}).encode()
    with (serving(LONG, pages=600) as running, running.half_sent(b"{", more),
          running.half_sent(unread)):
        running.until(lambda: len(running.server.answers) == 8)
        stream = running.client().completions.create(
            model="m", prompt="a", max_tokens=4000, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        for _ in range(signals):
            running.signal(drain)
        with pytest.raises(openai.APIError, match="the server shuts down") as cut:
            list(stream)
        assert cut.value.code == "503"
        running.thread.join(20)   # and nobody waits any longer for the rest of a body
        assert not running.thread.is_alive() and not running.engine.scheduler.busy
    out, err = capfd.readouterr()
    assert out == "" and re.fullmatch(r"(\d+ connections? cut off\n)?", err)


@pytest.mark.parametrize("ends", [2, 3])
def test_the_program_ends_at_its_second_signal_and_says_it_in_a_line(ends):
    process = subprocess.Popen(
        [sys.executable, "-m", "lab.server", "--port", "0", "--drain", "600"], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        port = int(re.findall(r":(\d+)/$", process.stdout.readline())[0])
        with socket.create_connection(("127.0.0.1", port)) as half:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
                         b"application/json\r\nContent-Length: 9\r\n\r\n{")
            time.sleep(0.5)
            for _ in range(ends):
                process.send_signal(signal.SIGINT)
                time.sleep(0.2)
            assert process.wait(60) == 0
        assert process.communicate() == ("", "1 connection cut off\n")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.thorough
def test_the_program_finishes_its_streams_after_sigterm(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)   # for so small a model it takes one
    process = subprocess.Popen(
        [sys.executable, "-m", "lab.server", "--port", "0", "--drain", "600"], cwd=ROOT, text=True,
        stdout=subprocess.PIPE)
    try:
        threads, url = re.findall(r"(\d+) thread, at (.*)", process.stdout.readline())[0]
        assert threads == "1"
        body = {"prompt": ["# open\n"], "max_tokens": 120, "temperature": 0, "seed": 0}
        text = ""
        for part in openai.OpenAI(base_url=url + "v1", api_key="x").completions.create(
                model="builtin", stream=True, **body):   # it needs some tenths of a second
            if not text:
                process.send_signal(signal.SIGTERM)
            text += part.choices[0].text
        assert text == expected(body)[0][0]
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_the_server_ends_if_its_engine_does(monkeypatch):
    monkeypatch.setattr(PrefixScheduler, "schedule", lambda *_: 1 / 0)
    with serving() as running:
        assert "the engine has stopped: division by zero" in running.post(prompt="a").text
        running.thread.join(20)
        assert isinstance(running.server.died, ZeroDivisionError)


# --- hostile clients ------------------------------------------------------------------------------

JSON = {"content-type": "application/json"}
WRONG = [   # a body, or the fields of one beside its prompt; and what the refusal says
    (b"{", "the body is not JSON"), (b"null", "must be a JSON object"), (b"[" * 10**5, "parsing"),
    ({"temperature": math.nan}, "'temperature': "), ({"user": "", "x": 1}, "'x': "),
    ({"\ud800": 1}, "the body must"), ({"n": True}, "'n': "), ({"top_p": -0.1}, "'top_p': "),
    ({"logprobs": 1}, "'logprobs': "), ({"suffix": "x"}, "'suffix': "),
    ({"logit_bias": {"5": 1}}, "'logit_bias': "), ({"store": True}, "'store': "),
    (b'{"prompt": "a", "n": 1, "n": 2}', "the body has the key 'n' more than once"),
    (b'{"prompt": "a", "stream_options": {"x": 1, "x": 1}}', "has the key 'x' more than once"),
    ({"echo": True}, "'echo': "), ({"top_k": -2}, "'top_k': "),
    ({"presence_penalty": 0.1}, "'presence_penalty': "), ({"min_p": 0.1}, "'min_p': "),
    ({"repetition_penalty": 0}, "'repetition_penalty': "), ({"min_tokens": 1}, "'min_tokens': "),
    ({"stream_options": {"x": 1}}, "_options.x'"), ({"stop": ""}, "'stop': it must be"),
    ({"best_of": 2}, "'best_of': it must be n, 1, not 2"), ({"user": "\ud800"}, "'user': Input "),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "it must be max_tokens, 5, not 6"),
    ({"prompt": ["a", 1]}, "'prompt': it must be a text of 1 to 131072 characters, a list of tok"),
    ({"prompt": " " * 2**18}, "'prompt': it must be"), ({"stop": ["a"] * 5}, "'stop': it must be"),
    ({"prompt": None}, "'prompt': Field required"), ({"prompt": [""]}, "'prompt': it must be"),
    ({"prompt": [5000]}, "request 'r0': token id 5000 is not in the vocabulary, 0 to 1023"),
    ({"prompt": [[1] * 9, [1] * 300]}, "prompt 1 has 300 tokens, there is room for 256"),
    ({"max_tokens": 300}, "max_tokens can be at most 256, not 300"), ({"top_p": 1.1}, "'top_p': "),
    ({"prompt": ["a"] * 3, "n": 100}, "300 more requests, 0 are there: the limit is 264, of "),
    ({"model": "gpt-7"}, "there is no model 'gpt-7'; this is 'm'"), ({"seed": 2**63}, "'seed': "),
    ({"seed": -2**63 - 1}, "'seed': "), ({"stream_options": {}}, "it needs \"stream\": true")]


def test_what_is_wrong_with_a_body_is_said_in_json():
    with serving() as running, httpx.Client(base_url=running.url, timeout=30) as client:
        complete = partial(client.post, "/v1/completions")
        for wrong, why in WRONG:
            data = wrong if isinstance(wrong, bytes) else json.dumps({"prompt": "a", **wrong})
            got = complete(content=data, headers=JSON)
            error = got.json()["error"]
            assert got.status_code in (400, 404) and error["code"] == str(got.status_code), wrong
            assert why in error["message"] and "\n" not in error["message"], wrong
        for body in b" " * 2**20 + b"{}", (b" " * 2**16,) * 17:   # without a Content-Length, too
            got = complete(headers=JSON, content=body)
            assert got.status_code == 413 and got.json()["error"]["code"] == "413"
        plain = complete(content='{"prompt": "a"}')   # no page can send JSON
        assert plain.status_code == 400 and "Content-Type: application/json" in plain.text
        assert client.get("/v1/completions").json()["error"]["code"] == "405"
        user = {"role": "user", "content": "a"}
        for field, message, more in (
                ("messages.0.content", {"content": [{"type": "image"}]}, {}),
                ("messages.0.tool_calls", {"tool_calls": [{}]}, {}),
                ("messages.0.x", {"x": "a"}, {}),
                ("tools", {}, {"tools": [{}]}),
                ("logprobs", {}, {"logprobs": True}),
                ("top_logprobs", {}, {"top_logprobs": 1}),
                ("tool_choice", {}, {"tool_choice": "auto"}),
                ("logit_bias", {}, {"logit_bias": {"5": -1}}),
                ("store", {}, {"store": True}),
                ("metadata", {}, {"metadata": {"a": "b"}}),
                ("functions", {}, {"functions": [{"name": "f"}]}),
                ("function_call", {}, {"function_call": "auto"}),
                ("modalities.0", {}, {"modalities": ["audio"]}),
                ("response_format.type", {}, {"response_format": {"type": "json_object"}})):
            got = client.post("/v1/chat/completions", json={"messages": [user | message], **more})
            assert got.status_code == 400 and f"'{field}': " in got.json()["error"]["message"]
        assert client.post("/live/control", json={"pace": -1}).status_code == 400
        body = {"prompt": ["a"], "max_tokens": 3, "temperature": 1, "seed": 7, "n": 2}
        table = {"echo": False, "presence_penalty": 0, "frequency_penalty": 0.0, "min_p": 0,
                 "repetition_penalty": 1.0, "min_tokens": 0, "user": "x", "logprobs": None}
        for fine in (table, {"best_of": 2}, {"max_completion_tokens": 3}, {"top_k": 0},
                     {"max_tokens": None, "max_completion_tokens": 3}, {"top_k": -1},
                     {"logprobs": 0}, {"suffix": ""}, {"logit_bias": {}}, {"store": False},
                     {"unknown": None}, {"stop": []}, {"stop": None}, {"stream_options": None}):
            choices = complete(json=body | fine).json()["choices"]
            assert [(each["text"], each["finish_reason"]) for each in choices] == expected(body)
            assert [each["logprobs"] for each in choices] == [None] * 2
        chat = {"messages": [user], "max_tokens": 3, "temperature": 0}
        plain = client.post("/v1/chat/completions", json=chat).json()["choices"]
        for fine in ({"top_logprobs": 0}, {"tool_choice": "none"}, {"logit_bias": {}},
                     {"store": False}, {"metadata": {}}, {"parallel_tool_calls": True},
                     {"functions": [], "function_call": "none"}, {"modalities": ["text"]}):
            got = client.post("/v1/chat/completions", json=chat | fine)
            assert got.json()["choices"] == plain


def test_only_this_machine_or_who_has_the_key():
    with serving() as running:
        for host, status in (("localhost", 200), ("127.0.0.1:1", 200), ("[::1]:80", 200),
                             ("evil.example:8000", 400), ("localhost.evil.example", 400)):
            got = httpx.get(running.url + "/health", headers={"Host": host})
            assert got.status_code == status
            assert status == 200 or "must be 127.0.0.1 or " in got.json()["error"]["message"]
    with serving(settings={"key": "secret"}) as running:
        running.engine.see, steps = lambda batch: steps.append(batch), []
        for path, key, status in (("/v1/models", "", 401), ("/v1/models", "Bearer wrong", 401),
                                  ("/v1/models", "Bearer secret", 200), ("/metrics", "", 401),
                                  ("/live/steps", "", 401), ("/", "", 200), ("/health", "", 200)):
            got = httpx.get(running.url + path, headers={"Authorization": key, "Host": "a.example"})
            assert got.status_code == status, path
            assert got.headers.get("www-authenticate") == (None if status == 200 else "Bearer")
        assert not steps   # the engine sleeps
    # The last byte of 你 is a blank in Latin-1.
    with serving(settings={"key": "schlüssel你"}) as running:
        for key, status in ("schlüssel你", 200), ("schlussel你", 401), ("schlüssel", 401):
            authorization = f"Bearer {key}".encode()   # as curl sends what is typed: UTF-8
            got = httpx.get(running.url + "/v1/models", headers={b"Authorization": authorization})
            assert got.status_code == status, key
    with serving(settings={"key": " "}) as running:   # which no client can send
        assert httpx.get(running.url + "/v1/models").status_code == 401


@pytest.mark.parametrize("flags, word", [
    (["--host", "0.0.0.0", "--api-key", ""], "needs --api-key"),
    (["--pages", "0"], "--pages must be"),
    (["--pages", "99999999999"], "--pages: the keys and values of "),
    (["--pages", "9", "--page_size", "256", "--max_batch", "0"], "--max_batch must be"),
    (["--page_size", "257"], "page_size 257 exceeds block_size 256")])
def test_bad_flags_are_one_line(flags, word):
    refused(word, program.main, flags)
