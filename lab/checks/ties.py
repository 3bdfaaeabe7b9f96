"""
A token has flipped: the stage's logits give another token than the reference's. Near-tie or bug?

Computers round. A batch adds the same numbers in another order than one request alone, so its last
digits differ. Where two tokens are almost equally likely, these digits decide. That is a *near-tie*
and no fault of the stage. Two numbers tell it from a bug:

    margin      how far the reference's logits are from giving the stage's token
    rounding    FACTOR times how far rounding moves the reference's logits: their largest change
                when the reference runs again in the next wider dtype

    margin <= rounding: near-tie        margin > rounding: WRONG

An example. The vocabulary is a, b, c; the reference gives a, as its logit is the largest:

                              a       b       c
    reference, float16      5.00    4.98    4.95
    again, float32          5.01    4.98    4.94    changes by 0.01 at most: the rounding is 0.04

Greedy. If the stage gives b, the margin is 5.00 - 4.98 = 0.02: near-tie. If it gives c, the margin
is 5.00 - 4.95 = 0.05: WRONG.

Sampled, temperature 1, top_k 2. The request's random number u = 0.51 falls into b's interval:

    CDF    0 |------ a ------|------ b ------| 1        the edge: e^5.00 / (e^5.00 + e^4.98) = 0.505
                              ^ u

If the stage gives a, its edge lies beyond u. How far did the edge have to move? Log-odds,
log(p / (1 - p)), say it in logits: the edge is at 5.00 - 4.98 = 0.02, u at 0.04. The margin is
0.02: near-tie. With u = 0.60, at log-odds 0.41, the margin would be 0.39: WRONG.

If the stage keeps c instead of b and gives c, two things had to happen. c had to get past b, which
takes 4.98 - 4.95 = 0.03. With only a and c kept, the edge is at 5.00 - 4.95 = 0.05 and had to get
down to u, which takes 0.01. The larger of the two is the margin, 0.03: near-tie.

top_p 0.68 instead of top_k. The probabilities of a and b add up to 0.675, so c is kept as well. If
the stage cuts c, the log-odds of a and b, 0.73, had to get up to those of 0.68, 0.75. So the margin
is at least 0.02.

The danger is a rounding measured by the stage's own error. Suppose that a wrong mask raises c by
0.10, and so the greedy stage gives c. Four times this error is 0.40, and excuses the margin of
0.05. It would excuse every bug: an error that flips a token is at least half of the margin, so four
times the error always covers it. Therefore the rounding never looks at the stage.
"""
import copy
import math
from dataclasses import replace

import torch

from model import keep_top

WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}
FACTOR = 4   # a margin compares two logits, and each is rounded in two runs: reference and stage


def judge(asked, tokens, flipped, reference, again):
    """
    Yields (whether rounding explains it, a sentence) for each flipped token of a request.

    asked:     the request as it came in; tokens: what it was given
    flipped:   {index of a token: the stage's logits (V,) there}
    reference: logits (n, V) before each token; again: the same in the next wider dtype, or None
    """
    explained, stream = rounding(reference, again), replace(asked)
    for i, token in enumerate(tokens):
        u = stream.draw()
        if i in flipped:
            gap = margin(token, flipped[i], reference[i], asked, u)
            yield gap <= explained[i], (f"token {i} has flipped: margin {gap:.1e}, "
                                        f"rounding {explained[i]:.1e}")


def run_alone(model, prompt, tokens):
    """The reference: logits (n, V) before each of n tokens, as float64 on the CPU."""
    sequence = torch.tensor([prompt + tokens[:-1]], device=model.device)    # (1, T)
    return model(sequence, wanted=(0, slice(len(prompt) - 1, None))).cpu().double()


def in_wider_dtype(model):
    """A copy of the model in the next wider dtype, to run the reference again; None: no wider."""
    dtype = WIDER.get(model.wte.weight.dtype)
    device = "cpu" if dtype == torch.float64 else model.device   # an Apple GPU has no float64
    return dtype and copy.deepcopy(model).to(device).to(dtype)


def rounding(reference, again=None):
    """
    The largest margin that rounding explains, a number for each of the n tokens.

    reference: logits (n, V), as float64
    again:     the same from `in_wider_dtype(model)`; None: the model itself is in float64
    """
    if again is None:   # random models showed changes of up to 80 eps
        changes = 100 * torch.finfo(torch.float64).eps * reference
    else:
        changes = again - reference
    return (FACTOR * changes.abs().amax(dim=-1)).tolist()


def margin(token, stage, reference, request, u):
    """
    How far the reference's logits are from giving the stage's token.

    stage, reference: logits (V,), as float64; the stage's say only which tokens the cuts keep
    u:                the random number with which the token was sampled
    """
    if request.temperature == 0:
        return float(reference.max() - reference[token])
    k = min(request.top_k or len(reference), len(reference))
    kth = reference.topk(k).values[-1]
    kept = stage >= stage.topk(k).values[-1]                              # (V,)
    kept_by_one_only = kept != (reference >= kth)
    moves = (reference - kth)[kept_by_one_only].abs().tolist()   # to get past the k-th
    if request.top_p < 1:
        likely = keep_top(stage, request.temperature, request.top_k, request.top_p) > -math.inf
        moves += moves_of_top_p(likely, kept, stage, reference, request)
        kept = likely

    # log-odds of the token's two edges in the CDF: the lower, the upper
    x = (reference - reference.max()).masked_fill(~kept, -math.inf) / request.temperature
    low, high = (x[:i].logsumexp(0) - x[i:].logsumexp(0) for i in (token, token + 1))
    log_odds = torch.tensor(u, dtype=x.dtype).logit()
    # If each logit moves by up to d, log-odds x temperature and gaps both move by up to 2 d.
    moves.append(request.temperature * float(max(low - log_odds, log_odds - high)))
    return max(*moves, 0.0)


def moves_of_top_p(likely, kept, stage, reference, request):
    """
    How far the reference's logits are from having top_p keep these tokens, for each reason.

    likely, kept: which tokens top_p keeps from the stage's logits, and which top_k, boolean (V,)
    """
    x = (reference - reference[kept].max()) / request.temperature

    def log_odds(tokens):   # of all these against all others
        return x[tokens].logsumexp(0) - x[kept & ~tokens].logsumexp(0)

    last = likely & (stage == stage[likely].min())   # several, if they tie
    limit = torch.tensor(request.top_p, dtype=x.dtype).logit()
    # none that top_p cut may stand above one that it kept; those that tie for last are equal
    above = reference.masked_fill(~kept | likely, -math.inf).max() - reference[likely].min()
    between = reference[last].max() - reference[last].min()
    enough = limit - log_odds(likely)                # they add up to top_p,
    needed = log_odds(likely & ~last) - limit        # and without the last they do not
    return [float(above), float(between),
            *(request.temperature * float(each) for each in (enough, needed))]
