"""
Beyond GPT-2: the architecture of Llama, Mistral and Qwen on the same stages. No stage changes.

Read it beside model.py. What changed since GPT-2, and what each change does to batching:

                GPT-2                        here                             batching
    norm        LayerNorm                    RMSNorm: no mean, no bias        token-wise: nothing
    FFN         GELU                         SwiGLU: a second matrix gates    token-wise: nothing
    output      tied to the embedding        tied or not                      token-wise: nothing
    positions   a vector, added once         q and k turn, in every layer     see below
    attention   a key head per query head    one per group of query heads     the cache shrinks

*Rotary positions.* Each pair of features of q and k turns by an angle that is proportional to the
token's position, so q k^T depends on positions only through their distance. A row whose positions
are all too large by the same number comes out right: padding cannot hurt it within one pass. But a
cached key keeps the angle with which it was computed, and the padding changes when requests come
and go. Then the distances are wrong, and nothing raises an error. So positions count from a
sequence's own first token, as before.

*Grouped-query attention.* Each key head serves a group of g query heads; a token then costs
2 x n_layer x n_kv_head x head_size numbers in the cache. To Head and to the layouts, the group is
one more leading axis of q, over which keys and values are broadcast:

    q (g, ..., n_kv_head, T, hs)      k, v (..., n_kv_head, T, hs)

    pip install -r lab/loading/requirements.txt
    python generate_paged.py --model HuggingFaceTB/SmolLM2-135M-Instruct --chat --prompt "Hello"

What that saves is measured in docs/llama.md.
"""
import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn as nn
from torch.nn import functional as F

from model import Block as GPTBlock
from model import MultiHeadAttention, causal


@dataclass
class LlamaConfig:   # the values are those of SmolLM2-135M
    block_size: int = 8192
    vocab_size: int = 49152
    n_layer: int = 30
    n_head: int = 9
    n_kv_head: int = 3
    n_embd: int = 576
    head_size: int = 64
    ffn: int = 1536                      # width of the feed-forward network
    norm_eps: float = 1e-5
    rope_theta: float = 1e5
    rope_scaling: tuple | None = None    # see frequencies()
    qkv_bias: bool = False               # Qwen2
    out_bias: bool = False               # of the heads' projection
    mlp_bias: bool = False
    qk_norm: bool = False                # Qwen3
    tied: bool = True


def frequencies(config):
    """
    By how much each pair of features turns from one position to the next: hs / 2 numbers, radians.

    rope_scaling reaches a longer context than the model was first trained with. With (factor,)
    all pairs turn slower by `factor`. With Llama 3.1's (factor, low, high, context) those do that
    turn fewer than `low` times in `context` positions; those that turn more than `high` times stay,
    and those in between change gradually.
    """
    plain = [config.rope_theta ** (-2 * i / config.head_size) for i in range(config.head_size // 2)]
    if config.rope_scaling is None:
        return plain
    factor, *bands = config.rope_scaling
    if not bands:
        return [f / factor for f in plain]
    low, high, context = bands
    kept = [(f * context / (2 * math.pi) - low) / (high - low) for f in plain]
    kept = [min(max(share, 0.0), 1.0) for share in kept]
    return [f * (share + (1 - share) / factor) for f, share in zip(plain, kept)]


def rotate(x, cos, sin):
    """Turns each pair of features (i, i + hs/2) of x (..., nh, T, hs) by its own angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class GroupedAttention(nn.Module):
    split_heads, forward = MultiHeadAttention.split_heads, MultiHeadAttention.forward

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.head_size = layer, config.head_size
        features, kv_features = config.n_head * self.head_size, config.n_kv_head * self.head_size
        self.query = nn.Linear(config.n_embd, features, bias=config.qkv_bias)
        self.key = nn.Linear(config.n_embd, kv_features, bias=config.qkv_bias)
        self.value = nn.Linear(config.n_embd, kv_features, bias=config.qkv_bias)
        self.c_proj = nn.Linear(features, config.n_embd, bias=config.out_bias)
        norm = nn.RMSNorm if config.qk_norm else nn.Identity       # of each head
        self.q_norm, self.k_norm = (norm(self.head_size, eps=config.norm_eps) for _ in "qk")


class SwiGLU(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_gate = nn.Linear(config.n_embd, config.ffn, bias=config.mlp_bias)
        self.c_fc = nn.Linear(config.n_embd, config.ffn, bias=config.mlp_bias)
        self.c_proj = nn.Linear(config.ffn, config.n_embd, bias=config.mlp_bias)

    def forward(self, x):
        return self.c_proj(F.silu(self.c_gate(x)) * self.c_fc(x))


class Block(nn.Module):
    forward = GPTBlock.forward

    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.attn = GroupedAttention(config, layer)
        self.ln_2 = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.mlp = SwiGLU(config)


class Llama(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.h = nn.ModuleList([Block(config, layer) for layer in range(config.n_layer)])
        self.ln_f = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.lm_head = None   # tied: the embedding's matrix
        if not config.tied:
            self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, positions=None, attend=causal, wanted=None):
        """
        As GPT.forward, but for `attend`: attend(layer, q, k, v) -> output, q and the output
        (g, ..., n_kv_head, T, hs), k and v (..., n_kv_head, T, hs).
        """
        if positions is None:
            T, most = tokens.size(-1), self.config.block_size
            if T > most:
                raise ValueError(f"{T} tokens do not fit block_size {most}")
            positions = torch.arange(T, device=tokens.device)
        rotation = self.rotation(positions, self.wte.weight.dtype)

        def attend_in_groups(layer, q, k, v):                       # (..., nh, T, hs)
            norms = self.h[layer].attn
            q, k = rotate(norms.q_norm(q), *rotation), rotate(norms.k_norm(k), *rotation)
            # -> (g, ..., n_kv_head, T, hs): neighbouring query heads share a key head
            q = q.unflatten(-3, (k.size(-3), -1)).movedim(-3, 0)
            y = attend(layer, q, k, v)                              # tokens meet here, nowhere else
            return y.movedim(0, -3).flatten(-4, -3)                 # (..., nh, T, hs)

        x = self.wte(tokens)                                        # (..., T, C)
        for block in self.h:
            x = block(x, attend_in_groups)
        if wanted is not None:
            x = x[wanted]                                           # (R, C)
        return F.linear(self.ln_f(x), (self.lm_head or self.wte).weight)   # (..., V)

    def rotation(self, positions, dtype):
        """cos and sin of every token's angles: (..., 1, T, hs/2), for all heads."""
        exact = torch.promote_types(dtype, torch.float32)   # bfloat16 has no 257
        turns = torch.tensor(self.frequencies, dtype=exact, device=positions.device)
        angles = (positions[..., None].to(exact) * turns).unsqueeze(-3)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    @cached_property
    def frequencies(self):   # not before the weights are there: a config may ask for any number
        return tuple(frequencies(self.config))

    @property
    def device(self):
        return self.wte.weight.device
