"""
Stage 1: static batching. Pad the prompts into one rectangle, decode until the longest is done.

Padding goes on the left, so that every row's next token comes from the last column. Each row counts
its positions from its own first token. A mask hides the pads from every token, so what a pad
computes is never read.

    prefill           decode, one column a step
    .  .  a  b  c  |  d  -  -         .   pad
    .  f  g  h  i  |  j  k  l         -   slot of a finished request, still computed
    o  p  q  r  s  |  -  -  -

The prompts are abc, fghi and opqrs; the answers de, jklm and t. The last token of an answer (e, m,
t) is sampled, and never computed: nothing comes after it.

Better than one request at a time: one read of the weights serves all rows.
Wasted: padding; finished rows keep running; no request joins before the longest one is finished.
Next: dynamic batching rebuilds the batch at every step.
"""
import torch

from cache import KV
from model import head, sample
from request import advance, indices_due, prepare
from toolbox.trace import Trace
from toolbox.validate import at_least_1


class StaticBatch:
    """
    Left-padded (B, T): first the prompts, then one column at a time. One cache belongs to the whole
    batch, pads and finished rows included. Its first S = end columns are in use.
    """

    def __init__(self, requests, kv, device=None):
        T = max(len(request.prompt) for request in requests)
        self.pads = torch.tensor([T - len(request.prompt) for request in requests], device=device)
        self.requests = requests
        self.kv = kv
        self.device = device
        self.end = 0
        self.add_columns(T)

    def add_columns(self, number=1):
        """Moves on to the next columns: first the prompts, then the tokens just generated."""
        # A finished request stays in the plan with 0 tokens: its row is still computed.
        self.plan = []
        for request in self.requests:
            n = 0 if request.finished else request.todo
            self.plan.append((request, n))
        self.starts = [request.computed for request in self.requests]
        self.start = self.end
        self.end = self.start + number
        self.lay_out(self.device)

    def lay_out(self, device):
        """Sets tokens and positions (B, T), mask (B, 1, 1, S), and which logits to take."""
        T = self.end - self.start
        tokens = []
        for (request, n), start in zip(self.plan, self.starts):
            tokens.append([request.pad] * (T - n) + request.slice(start, start + n))
        self.tokens = torch.tensor(tokens, device=device)           # (B, T)
        columns = torch.arange(self.end, device=device)             # (S,)
        self.positions = columns[self.start:] - self.pads[:, None]  # counted from its first token
        # Pads and finished rows would count below 0 or too far: any position does for them.
        self.positions.clamp_(0, self.requests[0].context_length - 1)
        no_pad = columns >= self.pads[:, None]                      # (B, S)
        self.mask = no_pad[:, None, None]                           # (B, 1, 1, S), for all queries

        due = indices_due(self.plan)
        self.sampled = [self.plan[b][0] for b in due]
        self.wanted = (torch.tensor(due, device=device), -1)        # the last column of these rows

    def attend(self, layer, q, k, v):                               # (B, nh, T, hs)
        # Pads get values of zero. The mask gives a pad's value weight 0, but 0 times inf is NaN.
        # (In float16, the activations of a pad may overflow to inf though those of all tokens fit.)
        hidden = ~self.mask[..., self.start:].transpose(-2, -1)     # (B, 1, T, 1), the new columns
        self.kv.write(layer, self.start, k, v.masked_fill(hidden, 0.0))
        return head(q, *self.kv.read(layer, self.end), mask=self.mask)

    def cost(self):
        keys = 0   # of tokens; those of pads and finished rows are padding
        for (_, n), start in zip(self.plan, self.starts):
            if n > 0:
                keys += start + n
        return {"score_entries": self.tokens.numel() * self.end,
                "padded_keys": len(self.plan) * self.end - keys}


def columns_for(requests):
    """The most columns that a batch can fill: the longest prompt and the longest answer."""
    # kv_capacity leaves out the last token of an answer, which is never computed.
    longest_prompt = max(len(request.prompt) for request in requests)
    longest_answer = max(request.kv_capacity - len(request.prompt) for request in requests)
    return longest_prompt + longest_answer


@torch.inference_mode()
def generate(model, requests, max_batch=8, on_token=None):
    """Runs `requests` as unbatched does, in batches of at most max_batch. Returns the trace."""
    at_least_1(max_batch=max_batch)
    requests = prepare(requests, model.config)
    trace = Trace("naive", requests, model)
    waiting, step = requests, 0
    while waiting:
        # 1. requests that have arrived form a batch, which stays together until all are done
        step = max(step, waiting[0].arrival)
        running = [request for request in waiting if request.arrival <= step][:max_batch]
        waiting = waiting[len(running):]
        batch = StaticBatch(running, KV(columns_for(running)), model.device)
        while True:
            # 2. one forward pass for all rows
            with trace.forward_pass(step, batch):
                logits = model(batch.tokens, batch.positions, batch.attend, batch.wanted)   # (R, V)
            # 3. one token for each row that is not finished
            tokens = sample(logits, batch.sampled)
            advance(batch.plan, tokens)
            trace.record_tokens(step, batch.sampled, tokens, logits, on_token)
            step += 1
            # 4. the whole batch goes on until its last request is finished
            if all(request.finished for request in running):
                break
            batch.add_columns()
    return trace


if __name__ == "__main__":
    from lab.run import main
    main(generate, __doc__)
