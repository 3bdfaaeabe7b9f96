"""What the check says of a request, and of a run."""
from dataclasses import dataclass


@dataclass
class Verdict:
    name: str
    verdict: str = "identical"   # or "near-tie", "cancelled", "WRONG"
    difference: float = 0.0      # largest |logit difference|, relative to the largest |logit|
    detail: str = ""             # what is wrong, or which token has flipped
    equal: bool = False          # whether its logits equal the reference's bit for bit


def summary(verdicts):
    """One line for all, and one for each request that is WRONG."""
    kinds = [v.verdict for v in verdicts]
    identical, tied, cancelled = map(kinds.count, ("identical", "near-tie", "cancelled"))
    line = f"{identical}/{len(kinds) - cancelled} requests identical to unbatched"
    line += f", {tied} near-tie{'s' * (tied > 1)}" if tied else ""
    line += f", {cancelled} cancelled" if cancelled else ""
    if 0 < identical == len(kinds) - cancelled and all(v.equal for v in verdicts):
        line += ", bit for bit"
    else:
        largest = max((v.difference for v in verdicts), default=0.0)
        line += f", max |Δlogit| {largest:.1e} relative"
    wrong = (f"WRONG: request '{v.name}': {v.detail}" for v in verdicts if v.verdict == "WRONG")
    return "\n".join([line, *wrong])
