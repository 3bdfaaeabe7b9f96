"""
The contract: each request gets exactly the tokens it would have got alone.

`Check` listens to a stage through `on_token`, then runs each request alone and compares tokens and
logits. Rounding can flip a near-tie, so at the first divergence it looks at the reference's own margin:
if what the stage chose lies within the rounding, that is a near-tie, and otherwise it is WRONG.
"""
import math
from dataclasses import dataclass, replace

import torch

import generate_unbatched
from model import cdf

# How far logits may be apart, relative to the largest of them
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass
class Verdict:
    name: str
    verdict: str            # "identical" | "near-tie" | "WRONG"
    difference: float       # largest |logit difference| before any divergence, relative to the largest |logit|
    detail: str = ""


class Check:
    """
    check = Check(model)
    generate(model, requests, on_token=check.on_token)
    verdicts = check(requests)
    """

    def __init__(self, model, use_cache=True):
        self.model, self.use_cache = model, use_cache
        self.logits = {}     # request name -> its logits, (V,) for each token
        self.passes = []     # the reference's forward passes
        self.generated = 0   # tokens of the reference

    def on_token(self, request, token, logits):
        self.logits.setdefault(request.name, []).append(logits)

    def __call__(self, requests):
        """Runs each request alone; a list of verdicts in the same order."""
        return [self.judge(request) for request in requests]

    @torch.inference_mode()
    def judge(self, request):
        alone = replace(request, arrival=0)
        mine, theirs = self.logits.get(request.name, []), []
        trace = generate_unbatched.generate(self.model, [alone], use_cache=self.use_cache,
                                            on_token=lambda r, token, logits: theirs.append(logits))
        self.passes += trace.passes
        self.generated += len(alone.generated)
        if len(mine) != len(request.generated):
            return Verdict(request.name, "WRONG", math.inf, f"{len(request.generated)} tokens, but {len(mine)} calls of on_token")

        tolerance, worst = TOLERANCE[self.model.wte.weight.dtype], 0.0
        for i, (a, b) in enumerate(zip(mine, theirs)):
            scale = float(b.abs().max())
            difference = float((a - b).abs().max()) / scale
            worst = max(worst, difference)
            if not difference <= tolerance:   # also if it is NaN
                return Verdict(request.name, "WRONG", difference, f"logits of token {i} differ by {difference:.1e} of the largest")
            if request.generated[i] != alone.generated[i]:
                if near_tie(b, request.generated[i], difference * scale, alone, i):   # the rounding that really happened
                    return Verdict(request.name, "near-tie", worst, f"token {i}")
                return Verdict(request.name, "WRONG", worst, f"token {i} is {request.generated[i]}, alone it is {alone.generated[i]}")
        if request.finish_reason != "cancelled" and (request.generated, request.finish_reason) != (alone.generated, alone.finish_reason):
            return Verdict(request.name, "WRONG", worst, f"{len(request.generated)} tokens and '{request.finish_reason}', "
                                                         f"alone {len(alone.generated)} and '{alone.finish_reason}'")
        return Verdict(request.name, "identical", worst)


    def cost(self):
        """One line on what the reference run took."""
        slots, seconds = sum(p.slots for p in self.passes), sum(p.seconds for p in self.passes)
        return (f"alone ({self.passes[0].stage}): {self.generated:,} tokens in {seconds:.2f} s of forward passes, "
                f"{len(self.passes):,} passes over {slots:,} slots")


def near_tie(logits, token, rounding, request, i):
    """Could logits within `rounding` (absolute) of these (V,) have given `token` as the i-th of this request?"""
    x = logits.cpu().double()
    if request.temperature == 0:
        return bool(x.max() - x[token] <= 2 * rounding)
    if request.top_k is not None and request.top_k < x.numel():
        edge = x.topk(request.top_k + 1).values
        if edge[-2] - edge[-1] <= 2 * rounding:   # which token is the k-th is a tie itself
            return bool(x[token] >= edge[-1] - 2 * rounding)
    fresh = replace(request)                      # the same random stream, from its beginning
    for _ in range(i + 1):
        u = fresh.draw()
    edges = cdf(x, request.temperature, request.top_k)
    low, high = float(edges[token - 1]) if token else 0.0, float(edges[token])
    # logits off by at most r change each probability by a factor of at most exp(2r / temperature)
    slack = math.expm1(min(2 * rounding / request.temperature, 50.0))
    return low - slack <= u <= high + slack


def summary(verdicts):
    """One line, e.g. "12/12 requests identical to unbatched, max |Δlogit| 2.1e-07 relative"."""
    good = [v for v in verdicts if v.verdict != "WRONG"]
    ties = sum(v.verdict == "near-tie" for v in verdicts)
    line = f"{len(good)}/{len(verdicts)} requests identical to unbatched"
    if ties:
        line += f" ({ties} near-tie{'s' * (ties > 1)})"
    line += f", max |Δlogit| {max(v.difference for v in verdicts):.1e} relative"
    for v in verdicts:
        if v.verdict == "WRONG":
            line += f"\nWRONG: request '{v.name}': {v.detail}"
    return line
