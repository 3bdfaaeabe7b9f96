"""Live progress: which requests wait, prefill, decode or are done, and how full the budget is."""
import shutil
import sys
import time
from itertools import chain

from toolbox.load import decode


class Progress:
    """
    A forward pre-hook of the model. On a terminal it redraws a few lines ten times a second;
    elsewhere it prints one plain line for each request that is done.

        with Progress(model, requests, tokenizer, token_budget=64):
            generate(...)
    """

    def __init__(self, model, requests, tokenizer, token_budget=None, stream=None, every=0.1):
        self.model, self.requests, self.tokenizer = model, requests, tokenizer
        self.token_budget, self.stream = token_budget, stream or sys.stderr
        self.live, self.every = self.stream.isatty(), every   # every: seconds between two drawings
        self.drawn_at, self.drawn_lines = 0.0, 0              # of the last one: when, how many
        self.announced = set()   # names of requests whose end has been printed

    def __enter__(self):
        self.handle = self.model.register_forward_pre_hook(self.hook)
        return self

    def __exit__(self, *error):
        self.handle.remove()
        if self.live:
            self.draw(self.frame("finishing"))
        else:
            self.announce()

    def hook(self, model, arguments):
        """Called before each forward pass with the model's arguments: (tokens, positions, ...)."""
        if not self.live:
            self.announce()
        elif time.perf_counter() - self.drawn_at >= self.every:
            self.draw(self.frame(self.headline(*arguments)))

    def headline(self, tokens, positions=None, attend=None, *_):
        slots = " x ".join(map(str, tokens.shape))
        # usually a method of the batch's layout, which has the plan
        plan = getattr(getattr(attend, "__self__", None), "plan", None)
        if plan is None:
            return f"{slots} slots"
        used = sum(n for _, n in plan)
        text = f"{used} tokens in {slots} slots"
        if self.token_budget:
            full = min(round(20 * used / self.token_budget), 20)
            bar = "#" * full + "." * (20 - full)
            text = f"budget {used}/{self.token_budget} [{bar}]  {text}"
        return text

    def announce(self):
        """Prints a line for each request that has finished since the last call."""
        for request in self.requests:
            if request.finished and request.name not in self.announced:
                self.announced.add(request.name)
                print(f"{request.name}: {request.finish_reason} after "
                      f"{len(request.generated)} tokens", file=self.stream, flush=True)

    def frame(self, headline):
        """As many lines as fit the terminal: decoding requests first, those done last."""
        size = shutil.get_terminal_size()
        states = {"decoding": [], "prefilling": [], "waiting": [], "done": []}
        for request in self.requests:
            state, text = self.state(request)
            states[state].append(f"  {request.name:6} {state:11} {text}")
        counts = ", ".join(f"{len(lines)} {state}" for state, lines in states.items())
        lines = [f"{headline}   {counts}", *chain(*states.values())]
        room = max(size.lines - 2, 3)
        if len(lines) > room:
            lines = lines[:room - 1] + [f"... and {len(lines) - room + 1} more"]
        return [line[:size.columns - 1] for line in lines]

    def state(self, request):
        """(state, what there is to say of it)"""
        if request.generated or request.finished:
            words = " ".join(decode(self.tokenizer, request.generated[-24:]).split())[-50:]
            length = f"{len(request.generated)}/{request.max_new_tokens}"
            return (("done", f"{length}  {request.finish_reason}: {words}") if request.finished
                    else ("decoding", f"{length}  ... {words}"))
        if request.computed:
            return "prefilling", f"{request.computed}/{len(request.prompt)}"
        arrival = f", arrives at step {request.arrival}" if request.arrival else ""
        return "waiting", f"{len(request.prompt)} prompt tokens{arrival}"

    def draw(self, lines):
        self.drawn_at = time.perf_counter()
        # back to the first line of the last drawing, and clear everything from there
        back = f"\x1b[{self.drawn_lines}F" if self.drawn_lines else ""
        self.stream.write(back + "\x1b[J" + "\n".join(lines) + "\n")
        self.stream.flush()
        self.drawn_lines = len(lines)
