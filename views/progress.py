"""Live progress: a line for each request that is done; on a terminal, one that says what runs."""
import shutil
import sys
import time


class Progress:
    """
    A forward pre-hook of the model.

        with Progress(model, requests, token_budget=64):
            generate(...)
    """

    def __init__(self, model, requests, token_budget=None, stream=None, every=0.1):
        self.model, self.requests, self.token_budget = model, requests, token_budget
        self.stream, self.every = stream or sys.stderr, every   # seconds between two updates
        self.live, self.updated_at, self.announced = self.stream.isatty(), 0.0, set()

    def __enter__(self):
        self.handle = self.model.register_forward_pre_hook(self.hook)
        return self

    def __exit__(self, *error):
        self.handle.remove()
        self.announce()

    def hook(self, model, arguments):
        """Called before each forward pass with the model's arguments: (tokens, positions, ...)."""
        self.announce()
        if self.live and time.perf_counter() - self.updated_at >= self.every:
            self.updated_at = time.perf_counter()
            line = self.line(*arguments)[:shutil.get_terminal_size().columns - 1]
            self.stream.write(f"\r\x1b[K{line}")
            self.stream.flush()

    def line(self, tokens, positions=None, attend=None, *_):
        requests = self.requests
        done, decoding = sum(r.finished for r in requests), sum(
            bool(r.generated) and not r.finished for r in requests)
        text = (f"{done} of {len(requests)} done, {decoding} decoding, "
                f"{' x '.join(map(str, tokens.shape))} slots")
        # usually a method of the batch's layout, which has the plan
        plan = getattr(getattr(attend, "__self__", None), "plan", None)
        if plan and self.token_budget:
            text += f", budget {sum(n for _, n in plan)}/{self.token_budget}"
        return text

    def announce(self):
        """Prints a line for each request that has finished since the last call."""
        clear = "\r\x1b[K" if self.live else ""
        for request in self.requests:
            if request.finished and request.name not in self.announced:
                self.announced.add(request.name)
                print(f"{clear}{request.name}: {request.finish_reason} after "
                      f"{len(request.generated)} tokens", file=self.stream, flush=True)
