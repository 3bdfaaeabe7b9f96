"""Live progress: a line for each request that is done; on a terminal, one that says what runs."""
import shutil
import sys
import time
from contextlib import contextmanager


@contextmanager
def progress(model, requests, token_budget=None, stream=None):
    """
    Shows how the requests advance, before each forward pass:

        with progress(model, requests, token_budget=64):
            generate(...)
    """
    stream = stream or sys.stderr
    live, shown_at, announced = stream.isatty(), 0.0, set()
    clear = "\r\x1b[K" if live else ""

    def announce():
        for request in requests:
            if request.finished and request.name not in announced:
                announced.add(request.name)
                print(f"{clear}{request.name}: {request.finish_reason} after "
                      f"{len(request.generated)} tokens", file=stream, flush=True)

    def hook(model, arguments):
        """arguments: of the model, (tokens, positions, attend, wanted)"""
        nonlocal shown_at
        announce()
        if live and time.perf_counter() - shown_at >= 0.1:
            shown_at = time.perf_counter()
            tokens, _, attend, _ = arguments
            computed = sum(n for _, n in attend.__self__.plan)
            line = (f"{len(announced)} of {len(requests)} done, "
                    f"{' x '.join(map(str, tokens.shape))} slots"
                    + f", budget {computed}/{token_budget}" * bool(token_budget))
            stream.write(clear + line[:shutil.get_terminal_size().columns - 1])
            stream.flush()

    with model.register_forward_pre_hook(hook):
        try:
            yield
        finally:
            announce()
