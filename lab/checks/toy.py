"""Small things to check with: a model that shows bugs, and requests of given lengths."""
import torch

from model import GPT, GPTConfig
from request import Request


def toy(loud=True, seed=0, dtype=torch.float64, **config):
    """
    A random model of odd sizes. Loud: the matrices of its blocks x 20, positions x 3. With plain
    initialisation, a tied head soon repeats one token forever, which hides nearly every bug.
    """
    torch.manual_seed(seed)
    sizes = dict(block_size=24, vocab_size=13, n_layer=3, n_head=3, n_embd=15)
    model = GPT(GPTConfig(**{**sizes, **config})).to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_(std=0.1)
            elif loud and p.dim() == 2 and name.startswith("h."):
                p.mul_(20)
            elif loud and name == "wpe.weight":
                p.mul_(3)
    return model.requires_grad_(False)


def letters(new=4, arrivals=None, **lengths):
    """
    Requests named by letters, with prompts of these lengths. new: tokens to generate, or {name:
    number}; arrivals: {name: step}, 0 for the others.
    """
    new = new if isinstance(new, dict) else dict.fromkeys(lengths, new)
    return [Request([(7 * i + 3 * j * j + j) % 1000 for j in range(length)], new[name], name=name,
                    arrival=(arrivals or {}).get(name, 0))
            for i, (name, length) in enumerate(lengths.items())]
