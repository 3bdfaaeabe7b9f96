"""
The contract: each request gets exactly the tokens it would have got alone.

    check = Check(model, requests)
    generate(model, requests, on_token=check.on_token)
    verdicts = check()

For each request its prompt and tokens go through the model once more, alone, with no batch and no cache. By the
causal rule that gives the logits of every one of its tokens. Then, token by token:

1. the stage's logits must be those, to rounding;
2. its token must be what `sample` makes of its own logits and of the next number of the request's own stream, exactly;
3. if `sample` makes another one of the logits of the request alone, rounding has flipped a near-tie.

And the request must have ended where its own limits end it. Whatever fails is WRONG; a near-tie is not.
"""
from dataclasses import dataclass, replace

import torch

from model import sample

# How far logits may be apart, relative to the largest of them
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass
class Verdict:
    name: str
    verdict: str            # "identical" | "near-tie" | "cancelled" | "WRONG"
    difference: float       # largest |logit difference|, relative to the largest |logit|
    detail: str = ""


class Check:
    def __init__(self, model, requests):
        self.model, self.requests = model, list(requests)
        self.asked = [replace(request) for request in self.requests]          # as they were before the run
        self.logits = {id(request): [] for request in self.requests}          # (V,) for each token

    def on_token(self, request, token, logits):
        self.logits[id(request)].append(logits)

    def __call__(self):
        """A list of verdicts, in the order of the requests."""
        return [self.judge(*pair) for pair in zip(self.requests, self.asked)]

    @torch.inference_mode()
    def judge(self, request, asked):
        generated, mine, worst = request.generated, self.logits[id(request)], 0.0

        def wrong(detail):
            return Verdict(request.name, "WRONG", worst, detail)

        if (request.prompt, request.max_new_tokens, request.eos_token) != (asked.prompt, asked.max_new_tokens, asked.eos_token):
            return wrong("is not the request that came in: its prompt or its limits have changed")
        if len(mine) != len(generated):
            return wrong(f"{len(generated)} tokens, but {len(mine)} calls of on_token")
        expected = self.ending(asked, generated)
        if request.finish_reason != expected and request.finish_reason != "cancelled":
            return wrong(f"ends with '{request.finish_reason}' after {len(generated)} tokens, where '{expected}' is due")
        if request.finish_reason == "cancelled" and expected == "too long":
            return wrong(f"{len(generated)} tokens, which is beyond its limits")

        theirs = self.alone(asked.prompt + generated[:-1], len(generated)) if generated else []
        tolerance, ties, one, two = TOLERANCE[self.model.wte.weight.dtype], [], replace(asked), replace(asked)
        for i, (token, a, b) in enumerate(zip(generated, mine, theirs)):
            a = a.cpu()
            difference = float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-300))
            worst = max(worst, difference)
            if not difference <= tolerance:                                   # also if it is NaN
                worst = difference
                return wrong(f"logits of token {i} differ by {difference:.1e} of the largest")
            if sample(a[None], [one]) != [token]:
                return wrong(f"token {i} is {token}, which its own logits and its own random number do not give")
            if sample(b[None], [two]) != [token]:
                ties.append(i)
        if request.finish_reason == "cancelled":
            return Verdict(request.name, "cancelled", worst, f"after {len(generated)} tokens, which are right")
        return Verdict(request.name, "near-tie", worst, f"token {ties[0]}") if ties else Verdict(request.name, "identical", worst)

    def alone(self, tokens, n):
        """Logits (n, V) of the last n tokens of one sequence that is run all by itself."""
        tokens = torch.tensor([tokens], device=self.model.device)             # (1, T)
        return self.model(tokens, rows=(0, slice(-n, None))).cpu()

    def ending(self, asked, generated):
        """The finish reason that these tokens must have; "too long" or None if they cannot be all."""
        room = self.model.config.block_size + 1 - len(asked.prompt)           # the last token needs no position of its own
        limit = min(asked.max_new_tokens, room)
        if asked.eos_token in generated[:-1] or len(generated) > limit:
            return "too long"
        if generated and generated[-1] == asked.eos_token:
            return "stop"
        return "length" if len(generated) == limit else None


def summary(verdicts):
    """One line, e.g. "12/12 requests identical to unbatched (1 near-tie), max |Δlogit| 2.1e-07 relative"; then one for each WRONG."""
    count = {kind: sum(v.verdict == kind for v in verdicts) for kind in ("identical", "near-tie", "cancelled", "WRONG")}
    line = f"{count['identical'] + count['near-tie']}/{len(verdicts) - count['cancelled']} requests identical to unbatched"
    if count["near-tie"]:
        line += f" ({count['near-tie']} near-tie{'s' * (count['near-tie'] > 1)})"
    if count["cancelled"]:
        line += f", {count['cancelled']} cancelled"
    line += f", max |Δlogit| {max((v.difference for v in verdicts), default=0.0):.1e} relative"
    return "\n".join([line, *(f"WRONG: request '{v.name}': {v.detail}" for v in verdicts if v.verdict == "WRONG")])
