"""A model that shows bugs: random, small, of odd sizes, and loud."""
import torch

from model import GPT, GPTConfig


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
