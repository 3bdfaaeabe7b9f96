"""
The contract: each request gets the tokens that it would have got alone; only rounding may flip one.

    check = Check(model, requests)
    generate(model, requests, on_token=check.on_token)
    print(summary(check()))

The *reference* is one plain forward pass for each request: its prompt and the tokens that the stage
gave it, without batch and cache. By the causal rule, this pass yields the logits before each token.
So each token is judged given the stage's own tokens before it. The verdict on a request is

    identical    its logits equal the reference's up to TOLERANCE, `sample` picks its tokens from
                 either, and it ended where its limits end it
    near-tie     a token has *flipped*: from the reference's logits, `sample` chooses another; but
                 rounding explains it (ties.py)
    aborted      it was aborted, and nothing is wrong up to there
    WRONG        anything else
"""
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from lab.checks import ties
from lab.flags import knobs_of
from model import sample

# How far logits may be apart, relative to the largest of them
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

ABORTED = ("abort", "cancelled")   # reasons to end early: the engine's, and the server's


def run(generate, model, requests, on_token=None, **knobs):
    """The trace of a stage on copies of these requests, with those of the knobs that it has."""
    knobs, _ = knobs_of(generate, knobs)
    return generate(model, [replace(request) for request in requests], on_token=on_token, **knobs)


def run_checked(generate, model, requests, **knobs):
    """The trace of such a run, and its Check, which judges it when it is called."""
    copies = [replace(request) for request in requests]
    check = Check(model, copies)
    knobs, _ = knobs_of(generate, knobs)
    return generate(model, copies, on_token=check.on_token, **knobs), check


@dataclass
class Verdict:
    name: str
    verdict: str = "identical"   # or "near-tie", "aborted", "WRONG"
    difference: float = 0.0      # largest |logit difference|, relative to the largest |logit|
    detail: str = ""             # what is wrong, or which token has flipped
    equal: bool = False          # bit for bit the logits of one pass alone (of `exact`, if given)


class Check:
    def __init__(self, model, requests, exact=None):   # exact: the model to equal bit for bit
        self.model, self.exact = model, exact
        self.asked = {request: replace(request) for request in requests}    # as it came in
        self.told = {request: [] for request in self.asked}                 # [(token, logits), ...]

    def on_token(self, request, token, logits):
        self.told[request].append((token, logits))                          # logits (V,)

    def __call__(self):   # a Verdict for each request, in their order
        return [self.judge(request) for request in self.asked]

    @torch.inference_mode()
    def judge(self, request):
        verdict = Verdict(request.name)
        if fault := self.fault_in_end(request) or self.fault_in_tokens(request, verdict):
            verdict.verdict, verdict.detail = "WRONG", fault
        elif request.finish_reason in ABORTED:
            verdict.verdict = "aborted"
        return verdict

    def fault_in_end(self, request):
        """What is wrong with where it ended, in words, or None."""
        asked, tokens = self.asked[request], request.generated
        for limit in "prompt", "max_new_tokens", "eos_token":
            if getattr(request, limit) != getattr(asked, limit):
                return f"is not the request that came in: its {limit} has changed"
        if tokens != [token for token, _ in self.told[request]]:
            return f"on_token was not told its {len(tokens)} tokens"
        due, reason = self.due_end(asked, tokens)
        early = request.finish_reason in ABORTED and len(tokens) < due
        if not early and (len(tokens), request.finish_reason) != (due, reason):
            return (f"ends after {len(tokens)} tokens with {request.finish_reason!r}, "
                    f"not after {due} with {reason!r}")

    def due_end(self, asked, tokens):
        """(after how many tokens it has to end, "stop" or "length")"""
        # The last token is never computed, so it needs no position.
        most = min(asked.max_new_tokens, self.model.config.block_size - len(asked.prompt) + 1)
        for number, token in enumerate(tokens[:most], 1):
            if token in asked.ends:
                return number, "stop"
        return most, "length"

    def fault_in_tokens(self, request, verdict):
        """What is wrong with its tokens, in words, or None. Fills in the verdict."""
        asked, tokens, flipped = self.asked[request], request.generated, {}
        reference = ties.run_alone(self.model, asked.prompt, tokens)        # (n, V)
        exact = ties.run_alone(self.exact, asked.prompt, tokens) if self.exact else reference
        verdict.equal = True
        for_stage, for_reference = replace(asked), replace(asked)   # two copies of its stream
        for i, (token, stage) in enumerate(self.told[request]):
            stage, alone = stage.cpu().double(), reference[i]
            largest = alone.abs().max().clamp(min=1e-300)                   # no division by 0
            difference = float((stage - alone).abs().max() / largest)
            verdict.difference = max(difference, verdict.difference)
            verdict.equal &= torch.equal(stage, exact[i])
            if not difference <= TOLERANCE[self.model.wte.weight.dtype]:    # also if it is NaN
                return f"logits of token {i} differ by {difference:.1e} of the largest"
            if sample(stage[None], [for_stage]) != [token]:
                return f"token {i} is not what its own logits and random number give"
            if sample(alone[None], [for_reference]) != [token]:
                flipped[i] = stage
        if not flipped:
            return
        again = self.wider and ties.run_alone(self.wider, asked.prompt, tokens)
        for excused, sentence in ties.judge(asked, tokens, flipped, reference, again):
            if not excused:
                return sentence
            verdict.verdict, verdict.detail = "near-tie", sentence

    @cached_property
    def wider(self):   # made only if a token flips
        return ties.in_wider_dtype(self.model)


def summary(verdicts):
    """One line for all, and one for each request that is WRONG."""
    kinds = [v.verdict for v in verdicts]
    identical, tied, aborted = map(kinds.count, ("identical", "near-tie", "aborted"))
    ended = len(kinds) - aborted
    line = f"{identical}/{ended} requests got the tokens that the model gives each alone"
    line += f", {tied} near-tie{'s' * (tied > 1)}" if tied else ""
    line += f", {aborted} aborted" if aborted else ""
    if identical == ended > 0 and all(v.equal for v in verdicts):
        line += ", bit for bit"
    else:
        largest = max((v.difference for v in verdicts), default=0.0)
        line += f", max |Δlogit| {largest:.1e} relative"
    wrong = (f"WRONG: request '{v.name}': {v.detail}" for v in verdicts if v.verdict == "WRONG")
    return "\n".join([line, *wrong])
