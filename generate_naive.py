"""
Stage 1: static batching. Pad the prompts into one rectangle, decode until the longest answer is done.

Padding goes on the left, so that every row's next token comes from the last column (claim H7). Each row counts
its positions from its own first token; a mask hides the pads, so their positions mean nothing.

    prefill           decode, one column a step
    .  .  a  b  c  |  d  -  -  -       . pad
    .  f  g  h  i  |  j  k  l  m       - finished, computed all the same (claim H8)
    o  p  q  r  s  |  -  -  -  -       (each row's last token is never computed: nothing comes after it)

Better than stage 0: one read of the weights serves all rows.
Wasted: padding; rows that are finished keep running; nobody new gets in before the last one is done.
"""
import torch

from cache import KV
from model import Head, sample
from scheduler import at_least_1, prepare
from toolbox.trace import Trace

head = Head()


class StaticBatch:
    """
    Left-padded (B, T), first the prompts, then one column at a time. One cache of S columns belongs to
    the whole batch, (B, nh, S, hs), pads and finished rows included.
    """

    def __init__(self, requests, device):
        self.requests, self.device = requests, device
        T = max(len(request.prompt) for request in requests)
        self.kv = KV(T + max(request.kv_tokens - len(request.prompt) for request in requests))
        self.pads = torch.tensor([T - len(request.prompt) for request in requests], device=device)    # (B,)
        self.start, self.end = 0, T
        self.lay_out([[0] * (T - len(request.prompt)) + request.prompt for request in requests])

    def add_column(self):
        """The tokens just generated are the next column."""
        self.start, self.end = self.end, self.end + 1
        self.lay_out([[0 if request.finished else request.generated[-1]] for request in self.requests])

    def lay_out(self, token_ids):
        columns = torch.arange(self.end, device=self.device)
        self.tokens = torch.tensor(token_ids, device=self.device)                                     # (B, T)
        self.positions = columns[self.start:] - self.pads[:, None]
        self.positions.clamp_(0, self.requests[0].block_size - 1)      # those of pads and finished rows may lie outside
        self.mask = (columns >= self.pads[:, None])[:, None, None, :]                                 # (B, 1, 1, S)

        done = [request.finished for request in self.requests]
        running = [b for b, finished in enumerate(done) if not finished]
        self.sampled = [self.requests[b] for b in running]
        self.finished = [request for request, finished in zip(self.requests, done) if finished]
        self.plan = [(request, request.todo) for request in self.sampled]
        self.starts = [request.computed for request in self.sampled]
        self.rows = (torch.tensor(running, dtype=torch.long, device=self.device), -1)   # none, if all are cancelled just now
        self.padded_keys = len(token_ids) * self.end - sum(len(request.tokens) for request in self.sampled)
        self.score_entries = self.tokens.numel() * self.end
        self.copied_bytes = 0

    def attend(self, layer, q, k, v):                                                                 # (B, nh, T, hs)
        self.kv.write(layer, self.start, k, v)
        out, _, _ = head(q, *self.kv.read(layer, self.end), mask=self.mask)
        return out


@torch.inference_mode()
def generate(model, requests, max_batch=8, on_token=None):
    """
    Runs `requests` and fills them in place. Returns the trace.

    max_batch: requests in a batch
    on_token:  on_token(request, token, logits) is called as each token appears
    """
    at_least_1(max_batch=max_batch)
    requests = prepare(requests, model.config)
    trace = Trace("naive", requests)
    waiting, step = requests, 0
    while waiting := [request for request in waiting if not request.finished]:   # cancelled ones never start
        # 1. those who have arrived make a batch; it stays as it is until all of it is done
        step = max(step, waiting[0].arrival)
        running = []
        while waiting and waiting[0].arrival <= step and len(running) < max_batch:
            running.append(waiting.pop(0))
        batch = StaticBatch(running, model.device)
        while True:
            # 2. one forward pass for all rows
            with trace.forward_pass(step, batch):
                logits = model(batch.tokens, batch.positions, batch.attend, batch.rows)               # (R, V)
            # 3. one token for each row that is not finished
            tokens = sample(logits, batch.sampled)
            for (request, n), token in zip(batch.plan, tokens):
                request.computed += n
                request.append(token)
            trace.record_tokens(step, batch.sampled, tokens, logits, on_token)
            step += 1
            # 4. the whole batch goes on until its last request is finished
            if all(request.finished for request in running):
                break
            batch.add_column()
    return trace


if __name__ == "__main__":
    from toolbox.cli import main
    main(generate, __doc__)
