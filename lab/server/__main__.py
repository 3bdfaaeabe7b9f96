"""python -m lab.server: flags, model, threads, socket."""
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import torch

from lab import flags
from lab.loading.load import is_small, load, set_threads
from lab.server.app import LOCAL, Server
from lab.server.engine import ThreadedEngine
from toolbox.validate import at_least_1, one_line

NUMBERS = {"max_batch": (8, "requests that run at the same time"),
           "token_budget": (64, "tokens computed in a step"),
           "page_size": (16, "tokens in a page"),
           "pages": (None, "pages in the pool (default: for max_batch of the longest requests, "
                           "but at most 16,384 tokens)"),
           "max_waiting": (256, "requests that may wait; the next one gets 429"),
           "drain": (30, "seconds for running requests after SIGTERM")}


def main(argv=None):
    p = flags.Parser(prog="python -m lab.server", description="Serves a model over HTTP.")
    p.add_argument("--model", default="builtin", help="as for the stages")
    p.add_argument("--host", default="127.0.0.1", help="address; any other one needs --api-key")
    p.add_argument("--port", type=int, default=8000, help="0: any that is free")
    p.add_argument("--api-key", help="what clients must send, as Authorization: Bearer KEY")
    for name, (default, what) in NUMBERS.items():
        p.add_argument(f"--{name}", type=int, default=default, metavar="N", help=what)
    flags.add_place(p)
    flags.add_threads(p)
    flags.add_optimize(p)
    raise SystemExit(p.run(serve, argv))


def serve(args):
    """Until SIGTERM. Returns the exit status."""
    at_least_1(**{f"--{name}": getattr(args, name) for name in NUMBERS
                  if getattr(args, name) is not None})
    if not 0 <= args.port < 2**16:
        raise ValueError(f"--port must be 0 to 65535, not {args.port}")
    host = f"[{args.host}]" if ":" in args.host else args.host
    if host not in LOCAL and not args.api_key:
        raise ValueError(f"--host {args.host} lets others in: it needs --api-key")
    # In a thread that ends, and its OpenMP threads with it: the engine's own, in the engine's
    # thread, would wait for each other more slowly beside them (1.6 times the time of a step).
    with ThreadPoolExecutor(1) as once:
        model, tokenizer = once.submit(prepared, args).result()
    tokens = min(16384, args.max_batch * model.config.block_size)
    pages = args.pages or -(-tokens // args.page_size)
    check_memory(model.config, pages * args.page_size)
    engine = ThreadedEngine(model, pages, args.page_size, args.max_batch, args.token_budget,
                            args.max_waiting)
    server = Server(engine, tokenizer, args.model, args.api_key or None, args.drain)
    listener = listen(args.host, args.port)
    threads = torch.get_num_threads()
    print(f"{args.model}, {threads} thread{'s' * (threads > 1)}, at "
          f"http://{host}:{listener.getsockname()[1]}/", flush=True)
    server.run([listener])
    if server.died:
        raise server.died
    return 0


def check_memory(config, tokens):
    """ValueError if the keys and values of so many tokens exceed the machine's memory."""
    key_heads = getattr(config, "n_kv_head", config.n_head)
    head_size = getattr(config, "head_size", config.n_embd // config.n_head)
    smallest = 2   # bytes of a number in half precision
    needed = 2 * config.n_layer * key_heads * head_size * smallest * tokens
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise ValueError(f"--pages: the keys and values of {tokens:,} tokens take "
                         f"{needed / 2**30:,.0f} GiB, this machine has {memory / 2**30:,.0f} GiB")


def prepared(args):
    """(model, tokenizer), where and with as many threads as they will be used."""
    model, tokenizer = load(args.model)
    model.to(flags.device_of(args, is_small(model)), flags.DTYPES[args.dtype])
    set_threads(model, args.threads)
    if args.optimize:
        from lab.compiled import optimize  # only then is it needed
        model = optimize(model)
    return model, tokenizer


def listen(host, port):
    """A listening socket. ValueError if there is none to have."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with one_line(f"--host {host} --port {port}"):
        listener = socket.create_server((host, port), family=family, backlog=2048)
    # What a client leaves unread waits here, too.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
    return listener


if __name__ == "__main__":
    main()
