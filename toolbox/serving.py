"""The command of beyond/serve.py: flags, model, socket, signals; one process, or one per rank."""
import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import uvicorn

from beyond import tensor_parallel
from beyond.engine import Engine, RankEngine
from loading.load import load
from toolbox import flags
from toolbox.validate import at_least_1
from toolbox.web import LOCAL, Connection

NUMBERS = {"max_batch": (8, "requests that run at the same time"),
           "token_budget": (64, "tokens computed in a step"), "page_size": (16, "tokens in a page"),
           "pages": (None, "pages in the pool (default: for max_batch of the longest requests, "
                           "but at most 16,384 tokens)"),
           "max_waiting": (256, "requests that may wait; the next one gets 429"),
           "max_connections": (1000, "open connections; the next one gets 503")}


def main(Server):
    p = flags.Parser(prog="python -m beyond.serve", description="Serves a model over HTTP.")
    p.add_argument("--model", default="builtin", help="as for the stages")
    p.add_argument("--host", default="127.0.0.1", help="address; any other one needs --api-key")
    p.add_argument("--port", type=int, default=8000, help="0: any that is free")
    p.add_argument("--api-key", help="what clients must send, as Authorization: Bearer KEY")
    for name, (default, what) in NUMBERS.items():
        p.add_argument(f"--{name}", type=int, default=default, metavar="N", help=what)
    p.add_argument("--drain", type=float, default=30.0, metavar="S",
                   help="seconds for running requests after SIGTERM")
    flags.add_place(p)
    flags.add_optimize(p)
    if "RANK" in os.environ:
        tensor_parallel.run_on_ranks(p, partial(serve, Server))
    raise SystemExit(p.run(partial(serve, Server)))


def serve(Server, args):
    """Until SIGTERM. Returns the exit status. On ranks other than 0, until rank 0 stops."""
    numbers = {f"--{name}": getattr(args, name) for name in NUMBERS}
    at_least_1(**{name: number for name, number in numbers.items() if number is not None})
    host = f"[{args.host}]" if ":" in args.host else args.host
    if host not in LOCAL and args.api_key is None:
        raise ValueError(f"--host {args.host} lets others in: it needs --api-key")
    if args.api_key == "":
        raise ValueError("--api-key is empty")
    if not 0 <= args.drain <= 1e6:
        raise ValueError(f"--drain must be 0 to 1e6 seconds, not {args.drain}")
    ranks = int(os.environ.get("WORLD_SIZE", 1))

    def prepared():
        model, tokenizer = load(args.model)
        model.to(flags.device_of(args), flags.DTYPES[args.dtype])
        if ranks > 1:
            model = tensor_parallel.shard(model)
        return model.optimize() if args.optimize else model, tokenizer

    # In a thread that ends, and its OpenMP threads with it: the engine's own, in the engine's
    # thread, would wait for each other more slowly beside them (1.6 times the time of a step).
    with ThreadPoolExecutor(1) as once:
        model, tokenizer = once.submit(prepared).result()
    if args.page_size > model.config.block_size:
        raise ValueError(f"--page_size {args.page_size} exceeds block_size "
                         f"{model.config.block_size}, the model's limit")
    kind = RankEngine if ranks > 1 else Engine
    tokens = min(16384, args.max_batch * model.config.block_size)
    engine = kind(model, args.pages or -(-tokens // args.page_size), args.page_size,
                  args.max_batch, args.token_budget, max_waiting=args.max_waiting)
    if int(os.environ.get("RANK", 0)):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)   # rank 0 says when to stop
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        engine.run(lambda events: None)
        return 0
    server = Server(engine, tokenizer, args.model, args.api_key)
    listener = listen(args.host, args.port)
    print(f"{args.model} at http://{host}:{listener.getsockname()[1]}/", flush=True)
    Uvicorn(server, args.drain, args.max_connections).run(sockets=[listener])
    if server.died:
        print(f"python -m beyond.serve: the engine has stopped: {server.died}", file=sys.stderr,
              flush=True)
        os._exit(1)   # to leave a broken process group may never return
    return 0


def listen(host, port):
    """A listening socket. ValueError if there is none to have."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ValueError(f"--host {host} --port {port}: {error}") from None
    # what a client leaves unread waits here, too
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
    return listener


class Uvicorn(uvicorn.Server):
    """On SIGTERM or Ctrl+C, running requests get `drain` seconds; on a second one, none."""

    def __init__(self, server, drain=30.0, connections=1000):
        super().__init__(uvicorn.Config(server.app, http=Connection, log_level="warning", ws="none",
                                        timeout_graceful_shutdown=int(drain) + 5,
                                        # longer than clients wait before they use one again
                                        # (httpx: 5 s): else they write into a closed one
                                        timeout_keep_alive=15))
        self.server, self.drain, Connection.most = server, drain, connections
        server.exit = partial(setattr, self, "should_exit", True)

    def handle_exit(self, sig, frame):
        self.server.close(0 if self.should_exit else self.drain, "the server shuts down")
