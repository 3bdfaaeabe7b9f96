"""What is going on right now: who waits, prefills, decodes, is done, and how full this step's budget is."""
import shutil
import sys
import time

from toolbox.load import decode


class Progress:
    """
    A forward hook of the model: redraws a few lines on a terminal ten times a second, and elsewhere
    prints one plain line for each request that is done.

        with Progress(model, requests, tokenizer, token_budget=64): generate(...)
    """

    def __init__(self, model, requests, tokenizer, token_budget=None, stream=None, every=0.1):
        self.model, self.requests, self.tokenizer, self.token_budget = model, requests, tokenizer, token_budget
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self.every, self.drawn, self.lines, self.told = every, 0.0, 0, set()

    def __enter__(self):
        self.handle = self.model.register_forward_pre_hook(self.hook)
        return self

    def __exit__(self, *error):
        self.handle.remove()
        if self.live:
            self.draw(self.frame("finishing"))
        else:
            self.tell()

    def hook(self, model, arguments):
        """Called with the model's arguments at each forward pass: (tokens, positions, attend, rows)."""
        if not self.live:
            self.tell()
        elif time.perf_counter() - self.drawn >= self.every:
            plan = arguments[2].__self__.plan   # attend is a method of the batch's layout
            self.draw(self.frame(self.budget(sum(n for _, n in plan), arguments[0].shape)))

    def budget(self, used, shape):
        text = f"{used} tokens in {' x '.join(map(str, shape))} slots"
        if self.token_budget:
            full = min(round(20 * used / self.token_budget), 20)
            text = f"budget {used}/{self.token_budget} [{'#' * full}{'.' * (20 - full)}]  {text}"
        return text

    def tell(self):
        for request in self.requests:
            if request.finished and request.name not in self.told:
                self.told.add(request.name)
                print(f"{request.name}: {request.finish_reason} after {len(request.generated)} tokens", file=self.stream, flush=True)

    def frame(self, headline):
        """The lines to show: those that run first, as many as the terminal has room for."""
        size = shutil.get_terminal_size()
        states = {"decoding": [], "prefilling": [], "waiting": [], "done": []}
        for request in self.requests:
            states[self.state(request)].append(request)
        counts = ", ".join(f"{len(requests)} {state}" for state, requests in states.items())
        rows = [f"{headline}   {counts}"]
        rows += [self.row(request, state) for state, requests in states.items() for request in requests]
        room = max(size.lines - 2, 3)
        if len(rows) > room:
            rows = rows[:room - 1] + [f"... and {len(rows) - room + 1} more"]
        return [row[:size.columns - 1] for row in rows]

    @staticmethod
    def state(request):
        if request.finished:
            return "done"
        return "decoding" if request.generated else "prefilling" if request.computed else "waiting"

    def row(self, request, state):
        if state == "waiting":
            return f"  {request.name:6} waiting     {len(request.prompt)} prompt tokens" + (f", arrives at step {request.arrival}" if request.arrival else "")
        if state == "prefilling":
            return f"  {request.name:6} prefilling  {request.computed}/{len(request.prompt)}"
        words = " ".join(decode(self.tokenizer, request.generated[-24:]).split())
        last = f"{request.finish_reason}: {words[-50:]}" if state == "done" else f"... {words[-50:]}"
        return f"  {request.name:6} {state:11} {len(request.generated)}/{request.max_new_tokens}  {last}"

    def draw(self, rows):
        self.drawn = time.perf_counter()
        back = f"\x1b[{self.lines}F" if self.lines else ""   # up to the first of the lines drawn last time, and clear from there
        self.stream.write(back + "\x1b[J" + "\n".join(rows) + "\n")
        self.stream.flush()
        self.lines = len(rows)
