"""beyond/serve.py against hostile clients, as a program, and in a storm of requests."""
import asyncio
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
httpx, openai = pytest.importorskip("httpx"), pytest.importorskip("openai")

from test_serve import answer, asks, expected, serving  # noqa: E402

from beyond.serve import Server  # noqa: E402  needs uvicorn
from toolbox.serving import main  # noqa: E402
from toolbox.web import Connection  # noqa: E402

JSON = {"content-type": "application/json"}

BAD = [(400, data) for data in (
    b"", b"{", b"[]", b"null", b'"a"', b"\xff\xfe", b'{"prompt": "\xff"}', b"[" * 100_000,
    '{"speed": 1}'.encode("utf-16"), b'{"speed": NaN}', b'{"prompt": "a", "temperature": NaN}',
    b'{"a":' * 5000 + b"1" + b"}" * 5000, b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    *(json.dumps({"prompt": "a", **wrong}).encode() for wrong in (
        {"prompt": [-1]}, {"prompt": [5000]}, {"prompt": []}, {"prompt": ["a", "b"]}, {"n": 2},
        {"prompt": "a" * 9000}, {"prompt": "word " * 400}, {"prompt": ""}, {"max_tokens": 0},
        {"max_tokens": True}, {"n": True}, {"temperature": -1},
        {"top_k": 0}, {"top_p": 0.5}, {"stop": [""]}, {"stop": ["a"] * 5}, {"tools": []},
        {"stream_options": {"x": 1}}, {"seed": -1}, {"logprobs": 3}, {"prompt": None},
        {"stream": "yes"})))
] + [(413, b" " * 2**20 + b"{}")]


def test_what_is_wrong_with_a_body_is_said_in_json():
    with serving() as running, httpx.Client(base_url=running.url, timeout=30) as client:
        for path in "/v1/completions", "/v1/chat/completions", "/live/control", "/live/ask":
            for status, data in BAD if path == "/v1/completions" else BAD[:11]:
                got = client.post(path, content=data, headers=JSON)
                assert got.status_code == status, data[:80]
                assert got.json()["error"]["code"] == status and got.json()["error"]["message"]
        ask = {"prompt": "a"}
        assert client.post("/v1/completions", content=json.dumps(ask)).status_code == 415
        half = json.dumps(ask | {"model": "\ud800"})   # of a character: JSON can say it
        assert "half of a character" in client.post(
            "/v1/completions", content=half, headers=JSON).text
        assert client.get("/v1/completions").status_code == 405
        assert client.get("/x").json()["error"]["code"] == 404
        for wrong, why in (({"prompt": [-1] * 600}, "prompt must have at most 256 items"),
                           ({"prompt": ["a"]}, '"prompt[0] must be of type integer"'),
                           ({"stop": ""}, '"stop must have at least 1 characters"'),
                           ({"stream_options": {"include_usage": 1}}, "stream_options.include")):
            assert why in client.post("/v1/completions", json=ask | wrong).text
        assert "'tools'" in client.post("/v1/completions", json=ask | {"tools": 1}).text
        fine = client.post("/v1/completions", json=ask | {"n": 1, "top_p": 1.0, "stop": None})
        assert fine.status_code == 200 and fine.json()["usage"]["prompt_tokens"] == 1


def test_only_this_machine_or_who_has_the_key():
    with serving() as running:
        for host, status in (("localhost", 200), ("127.0.0.1:1", 200), ("[::1]:80", 200),
                             ("evil.example:8000", 403), ("localhost.evil.example", 403)):
            assert httpx.get(running.url + "/health", headers={"Host": host}).status_code == status
    with serving(settings={"key": "secret"}) as running:
        for path, key, status in (("/v1/models", "", 401), ("/v1/models", "Bearer wrong", 401),
                                  ("/v1/models", "Bearer secret", 200), ("/metrics", "", 401),
                                  ("/live/steps", "", 401), ("/", "", 200), ("/health", "", 200)):
            got = httpx.get(running.url + path, headers={"Authorization": key})
            assert got.status_code == status, path
        assert running.post(prompt="a").status_code == 401


def test_limits_on_connections_headers_and_slow_bodies(monkeypatch):
    monkeypatch.setattr(Connection, "header_seconds", 0.3)
    with serving(settings={"body_seconds": 0.3}) as running:
        Connection.most = 3

        def connect(data):
            connection = socket.create_connection(("127.0.0.1", running.port), timeout=20)
            connection.sendall(data)
            return connection
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        silent, slow = connect(b""), connect(head)
        body = connect(head + b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{")
        running.until(lambda: len(running.uvicorn.server_state.connections) == 3)
        fourth = connect(b"")
        assert b" 503 " in fourth.recv(4000)
        assert silent.recv(10) == slow.recv(10) == b""   # closed
        assert b" 408 " in body.recv(4000)
        odd = connect(b"GET / HTTP/1.1\r\nHost\r\n\r\n")
        assert json.loads(odd.recv(4000).partition(b"\r\n\r\n")[2])["error"]["code"] == 400
        early = connect(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n")
        answered = b""
        while b"}" not in answered:   # it has its answer, and dawdles with the body
            answered += early.recv(4000)
        early.sendall(b"x")
        assert early.recv(10) == b""
        for connection in silent, slow, body, fourth, odd, early:
            connection.close()
        running.until(lambda: not running.uvicorn.server_state.connections)
        assert running.post(prompt="a").status_code == 200


@pytest.mark.parametrize("flags, word", [
    (["--host", "0.0.0.0"], "needs --api-key"), (["--port", "99999"], "--port 99999"),
    (["--pages", "0"], "--pages must be"), (["--drain", "-1"], "--drain must be"),
    (["--drain", "inf"], "--drain must be"), (["--api-key", ""], "--api-key is empty"),
    (["--page_size", "257"], "--page_size 257 exceeds block_size 256"),
    (["--model", "nowhere"], "nowhere")])
def test_bad_flags_are_one_line(flags, word, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["serve", *flags])
    with pytest.raises(SystemExit) as end:
        main(Server)
    assert end.value.code == 2
    assert word in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_or_a_lost_rank_ends_the_program(ranks):
    run = ["torch.distributed.run", "--nproc_per_node", "2", "--master_port",
           str(20000 + os.getpid() % 9000), "-m", "beyond.serve", "--timeout", "20"]
    process = subprocess.Popen(
        [sys.executable, "-m", *(run if ranks == 2 else ["beyond.serve"]), "--port", "0"],
        cwd=Path(__file__).parent.parent, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        url = process.stdout.readline().split()[-1] + "v1/completions"
        body = next(body for body in asks(9) if not body["stop"] and body["max_tokens"] > 9)
        got = httpx.post(url, json=body, timeout=60).json()["choices"][0]
        assert (got["text"], got["finish_reason"]) == expected(body)
        if ranks == 1:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            return
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
        with httpx.stream("POST", url, timeout=60, json={
                "prompt": "a", "max_tokens": 250, "ignore_eos": True, "stream": True}) as lines:
            next(lines.iter_lines())
            os.kill(int(children.stdout.split()[1]), signal.SIGKILL)
        assert process.wait(60)
        assert "the engine has stopped: rank 0: a" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.thorough
def test_a_storm():
    """
    Random arrivals, cancellations and disconnects. Every answer that is not cut short must be the
    one of the request alone; no page may be lost (`serving` looks), and no memory gained.
    """
    import psutil
    rng, bodies, counts, memory = random.Random(0), list(asks(100)), Counter(), []
    known = [expected(body) for body in bodies]   # before it: the oracle takes memory, too

    async def one(client, i, delay, fate):
        await asyncio.sleep(delay)
        try:
            if fate < 0.6:
                text, reason, _ = await answer(client, bodies[i], stream=fate < 0.4)
                assert (text, reason) == known[i], bodies[i]
                counts["equal"] += 1
            elif fate < 0.8:   # it leaves in the middle of a stream
                stream = await client.completions.create(model="m", stream=True, **bodies[i])
                for _ in range(rng.randint(0, 5)):
                    await anext(aiter(stream), None)
                await stream.close()
                counts["disconnected"] += 1
            else:              # before the answer
                await asyncio.wait_for(answer(client, bodies[i], False), rng.random() / 5)
        except asyncio.TimeoutError:
            counts["cancelled"] += 1
        except openai.RateLimitError:
            counts["refused"] += 1

    async def rounds(running):
        async with running.client(openai.AsyncOpenAI) as client:
            for _ in range(15):   # a third comes at once, and fills any queue
                await asyncio.gather(*(
                    one(client, rng.randrange(100), rng.choice([0, 1, 2]) * rng.random(),
                        rng.random()) for _ in range(60)))
                gc.collect()
                memory.append(psutil.Process().memory_info().rss)

    gc.disable()   # else the server's thread may collect the client's half-read streams
    try:
        with serving(pages=16, max_batch=3, max_waiting=4) as running:
            asyncio.run(rounds(running))
    finally:
        gc.enable()
    assert counts["equal"] > 20 and len(counts) == 4, counts
    assert max(memory[10:]) - max(memory[5:10]) < 2**24
