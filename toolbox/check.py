"""
The contract: each request gets exactly the tokens it would have got alone.

    check = Check(model, requests)
    generate(model, requests, on_token=check.on_token)
    verdicts = check()

For each request, its prompt and tokens go through the model again, alone, with no batch and no
cache: the *reference*. By the causal rule, one pass gives the logits of every token. Then:

1. The stage's logits must equal the reference's, up to TOLERANCE.
2. Each token must be exactly what `sample` returns for the stage's own logits and the next number
   of the request's own stream.
3. If `sample` returns another token for the reference's logits, the token has *flipped*. That is a
   near-tie if the reference's *margin* at that token lies within the *rounding*, else WRONG.
4. The request must have ended where its own limits end it.

The margin says how far the reference's logits are from giving the token. The rounding is FACTOR
times their largest change when the model runs in the next wider dtype. It must not depend on the
stage: whatever token the stage's logits give, their distance from the reference covers the margin.
"""
import copy
import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from model import sample

# How far logits may be apart, relative to the largest of them
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
WIDER = {torch.float32: torch.float64, torch.float16: torch.float32, torch.bfloat16: torch.float32}
FACTOR = 4   # a margin compares two logits; each is rounded in the reference and in the stage


@dataclass
class Verdict:
    name: str
    verdict: str            # "identical" | "near-tie" | "cancelled" | "WRONG"
    difference: float       # largest |logit difference|, relative to the largest |logit|
    detail: str = ""


class Wrong(Exception):
    """Says what is wrong with a request."""


class Check:
    def __init__(self, model, requests):
        self.model, self.requests = model, list(requests)
        self.asked = [replace(request) for request in self.requests]   # as they were before the run
        self.logits = {id(request): [] for request in self.requests}   # (V,) for each token

    def on_token(self, request, token, logits):
        self.logits[id(request)].append(logits)

    def __call__(self):
        """A list of verdicts, in the order of the requests."""
        return [self.judge(*pair) for pair in zip(self.requests, self.asked)]

    @torch.inference_mode()
    def judge(self, request, asked):
        verdict = Verdict(request.name, "identical", 0.0)
        try:
            self.check_limits(request, asked)
            if request.generated:
                self.check_tokens(request, asked, verdict)
            if request.finish_reason == "cancelled":
                verdict.verdict = "cancelled"
        except Wrong as wrong:
            verdict.verdict, verdict.detail = "WRONG", str(wrong)
        return verdict

    def check_limits(self, request, asked):
        for limit in "prompt", "max_new_tokens", "eos_token":
            if getattr(request, limit) != getattr(asked, limit):
                raise Wrong(f"is not the request that came in: its {limit} has changed")
        n, calls = len(request.generated), len(self.logits[id(request)])
        due = ending(request, self.model.config.block_size)
        if calls != n:
            raise Wrong(f"{n} tokens, but {calls} calls of on_token")
        if due == "too long":
            raise Wrong(f"{n} tokens, which is beyond its limits")
        if request.finish_reason not in (due, "cancelled"):
            raise Wrong(f"ends with '{request.finish_reason}' after {n} tokens, not with '{due}'")

    def check_tokens(self, request, asked, verdict):
        sequence, mine = asked.prompt + request.generated[:-1], self.logits[id(request)]
        theirs = self.alone(self.model, sequence, len(request.generated))    # (n, V)
        stage, alone, stream, flips = replace(asked), replace(asked), replace(asked), {}
        for i, (token, a, b) in enumerate(zip(request.generated, mine, theirs)):
            a, b, u = a.cpu().double(), b.double(), stream.draw()            # (V,)
            difference = float((a - b).abs().max() / b.abs().max().clamp(min=1e-300))
            verdict.difference = max(difference, verdict.difference)
            if not difference <= TOLERANCE[theirs.dtype]:                    # also if it is NaN
                raise Wrong(f"logits of token {i} differ by {difference:.1e} of the largest")
            if sample(a[None], [stage]) != [token]:
                raise Wrong(f"token {i} is not what its own logits and random number give")
            if sample(b[None], [alone]) != [token]:
                flips[i] = margin(token, a, b, asked, u)
        rounding = self.rounding(sequence, theirs) if flips else []
        for i, gap in flips.items():
            verdict.verdict = "near-tie"
            verdict.detail = f"token {i} has flipped: margin {gap:.1e}, rounding {rounding[i]:.1e}"
            if not gap <= rounding[i]:
                raise Wrong(verdict.detail)

    def alone(self, model, sequence, n):
        """Logits (n, V) of the last n tokens of one sequence, run by itself."""
        tokens = torch.tensor([sequence], device=model.device)               # (1, T)
        return model(tokens, rows=(0, slice(-n, None))).cpu()

    def rounding(self, sequence, theirs):
        """The largest margin that rounding explains, for each row of the logits (n, V)."""
        if theirs.dtype == torch.float64:   # no wider dtype; random models showed up to 80 eps
            changes = 100 * torch.finfo(theirs.dtype).eps * theirs
        else:
            changes = theirs - self.alone(self.wider, sequence, len(theirs))
        return (FACTOR * changes.abs().amax(dim=-1)).tolist()

    @cached_property
    def wider(self):
        """The model in the next wider dtype; float64 on the CPU, as an Apple GPU has none."""
        dtype = WIDER[self.model.wte.weight.dtype]
        device = "cpu" if dtype == torch.float64 else self.model.device
        return copy.deepcopy(self.model).to(device).to(dtype)


def ending(request, block_size):
    """The finish reason due after the request's tokens; None: it should continue."""
    generated = request.generated   # the last one needs no position:
    limit = min(request.max_new_tokens, block_size + 1 - len(request.prompt))
    if request.eos_token in generated[:-1] or len(generated) > limit:
        return "too long"
    if generated and generated[-1] == request.eos_token:
        return "stop"
    return "length" if len(generated) == limit else None


def margin(token, mine, theirs, request, u):
    """
    How far the reference's logits `theirs` (V,) are from giving the token that `mine` give.

    Greedy: the largest logit minus the token's. Sampled: the distance of the random number u from
    the token's interval of the CDF, in log-odds, times the temperature: logits that move by d move
    the log-odds of a CDF by up to 2 d / temperature. With top_k, the CDF is over the tokens that
    `mine` keep; a token that only one of the two keep must be as close to the k-th largest logit.
    """
    if request.temperature == 0:
        return float(theirs.max() - theirs[token])
    k = min(request.top_k or len(theirs), len(theirs))
    kth, kept = theirs.topk(k).values[-1], mine >= mine.topk(k).values[-1]
    edge = (theirs - kth)[kept != (theirs >= kth)].abs().tolist()
    x = (theirs - theirs.max()).masked_fill(~kept, -math.inf) / request.temperature
    low, high = (x[:n].logsumexp(0) - x[n:].logsumexp(0) for n in (token, token + 1))
    odds = torch.tensor(u, dtype=x.dtype).logit()
    return max(*edge, request.temperature * float(max(low - odds, odds - high)), 0.0)


def summary(verdicts):
    """E.g. "11/12 requests identical to unbatched, 1 near-tie, max |Δlogit| 2.1e-07 relative", then
    a line for each request that is WRONG."""
    kinds = [v.verdict for v in verdicts]
    identical, ties, cancelled = (kinds.count(k) for k in ("identical", "near-tie", "cancelled"))
    line = f"{identical}/{len(kinds) - cancelled} requests identical to unbatched"
    line += f", {ties} near-tie{'s' * (ties > 1)}" if ties else ""
    line += f", {cancelled} cancelled" if cancelled else ""
    line += f", max |Δlogit| {max((v.difference for v in verdicts), default=0.0):.1e} relative"
    wrong = (f"WRONG: request '{v.name}': {v.detail}" for v in verdicts if v.verdict == "WRONG")
    return "\n".join([line, *wrong])
