"""Live progress: a line for each request that is done; on a terminal, one that says what runs."""
import sys
import time
from contextlib import contextmanager

from toolbox.trace import observed


@contextmanager
def progress(model, requests, token_budget=None, stream=None):
    """
    Shows how the requests advance, before each forward pass:

        with progress(model, requests, token_budget=64):
            generate(...)
    """
    stream = stream or sys.stderr
    live, shown_at, running = stream.isatty(), 0.0, list(requests)
    clear = "\r\x1b[K" if live else ""

    def announce():
        for request in list(running):   # a copy: it gets shorter
            if request.finished:
                running.remove(request)
                print(f"{clear}{request.name}: {request.finish_reason} after "
                      f"{len(request.generated)} tokens", file=stream, flush=True)

    def show(step, batch):
        nonlocal shown_at
        announce()
        if live and time.perf_counter() - shown_at >= 0.1:
            shown_at = time.perf_counter()
            computed = sum(n for _, n in batch.plan)
            share = f"budget {computed}/{token_budget}" if token_budget else f"{computed} tokens"
            print(f"{clear}{len(requests) - len(running)} of {len(requests)} done, {share}",
                  end="", file=stream, flush=True)

    with observed(model, show):
        try:
            yield
        finally:
            announce()
