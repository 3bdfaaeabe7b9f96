"""
A GPT in the architecture of GPT-2, written so that any way of batching fits around it.

Almost everything in a transformer is *token-wise*: embeddings, LayerNorm, every linear layer,
GELU and the residual adds look at one token and never at its neighbours. Tokens meet in exactly
one call, `attend`:

    token ids, positions                         any leading shape: (B, T) or (N,)
        |
    wte + wpe                                    token-wise
        |
    +-- ln_1 -> query, key, value                token-wise
    |               |
    |         attend(layer, q, k, v)   <-------- the only place where tokens meet
    |               |
    |           c_proj, + residual               token-wise
    |           ln_2 -> mlp, + residual          token-wise
    +-- n_layer times
        |
    ln_f -> logits                               token-wise, and only for the tokens `wanted`

So the model knows nothing about requests, padding or caches. It leaves two questions open. *Which
tokens are in this forward pass?* The stage decides; from chunked on, with a Scheduler. *Which keys
may each of them see?* The *layout* of the batch decides: it supplies `attend`. Stages and layouts
are in generate_*.py.

Small parts come first: Head -> MultiHeadAttention -> MLP -> Block -> GPT -> sample.
The letters: B rows, T new tokens per row, P past keys, S = P + T keys, N tokens of a flat stream,
R tokens whose logits are wanted, C = n_embd, nh heads of hs = C / nh features each, V tokens in the
vocabulary.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.nn import functional as F

from toolbox.validate import check_config, check_finite


@dataclass
class GPTConfig:
    block_size: int = 1024   # context length, in positions (vLLM: max_model_len)
    vocab_size: int = 50257
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768

    def __post_init__(self):
        check_config(self)


class Head(nn.Module):
    """
    Scaled dot-product attention: softmax(q k^T / sqrt(hs)) v, with or without a past.

    It is *stateless*: no weights, no cache, no dropout. So one object, `head`, serves all layers
    and all stages. One call computes all heads at once: they are leading axes `...`, (B, nh) for a
    batch of B rows, (nh,) for a flat stream. (Production code calls a fused kernel here, such as
    FlashAttention, which never stores the T x S scores.)

    Head applies the causal rule itself, because every layout needs it, even for a chunk of a prompt
    whose first part is cached. If each row holds one request, a layout's mask has only to hide
    pads. (If one row holds several, as in ragged's "mask", the mask also keeps them apart.)
    """

    def forward(self, q, k, v, past_k=None, past_v=None, mask=None):
        """
        q:              (..., T, hs)  queries of the T new tokens
        k, v:           (..., T, hs)  their keys and values; or (..., S, hs), if the cache has put
                                      the past in front already
        past_k, past_v: (..., P, hs)  keys and values of earlier tokens, which Head puts in front;
                                      None if there are none, or k and v hold them already
        mask:           boolean, broadcastable to (..., T, S), True = may be seen. A padding mask
                        over past *and* new keys is (B, 1, 1, S). ANDed with the causal rule.

        Returns (..., T, hs). A query that may see no key at all (some pad slots) yields zeros, not
        NaN. A hidden value that is not finite would do harm (0 times NaN is NaN): layouts zero it.
        """
        if past_k is not None:
            k = torch.cat([past_k, k], dim=-2)                     # (..., S, hs)
            v = torch.cat([past_v, v], dim=-2)
        T, S = q.size(-2), k.size(-2)

        # The causal rule: new token i sees the whole past and the new tokens 0..i. These are the
        # last T of the S keys, so the triangle ends in the bottom right corner: diagonal S - T.
        see = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(diagonal=S - T)
        if mask is not None:
            see = see & mask                                       # (..., T, S)

        # q is divided first: in float16, q k^T may overflow where its quotient would not.
        scores = q / math.sqrt(q.size(-1)) @ k.transpose(-2, -1)   # (..., T, S)
        weights = scores.masked_fill(~see, -math.inf).softmax(dim=-1)
        # The softmax of a row of only -inf (a query that sees no key) is NaN: 0 instead.
        weights = weights.masked_fill(~see.any(dim=-1, keepdim=True), 0.0)
        return weights @ v                                         # (..., T, hs)


head = Head()


def causal(layer, q, k, v):
    """The plainest `attend`: each row is one whole sequence, nothing cached, nothing padded."""
    return head(q, k, v)


class MultiHeadAttention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.layer = layer   # the layer's number: a cache keeps the layers apart
        self.head_size = config.n_embd // config.n_head
        self.query = nn.Linear(config.n_embd, config.n_embd)
        self.key = nn.Linear(config.n_embd, config.n_embd)
        self.value = nn.Linear(config.n_embd, config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def split_heads(self, x):                                      # (..., T, C) -> (..., nh, T, hs)
        return x.unflatten(-1, (-1, self.head_size)).transpose(-3, -2)

    def forward(self, x, attend):                                  # (..., T, C)
        q = self.split_heads(self.query(x))                        # (..., nh, T, hs)
        k = self.split_heads(self.key(x))
        v = self.split_heads(self.value(x))
        y = attend(self.layer, q, k, v)                            # tokens meet here, nowhere else
        return self.c_proj(y.transpose(-3, -2).flatten(-2))        # (..., nh, T, hs) -> (..., T, C)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = MultiHeadAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x, attend):
        x = x + self.attn(self.ln_1(x), attend)
        x = x + self.mlp(self.ln_2(x))
        return x


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)   # tokens; also the output head
        self.wpe = nn.Embedding(config.block_size, config.n_embd)   # positions
        self.h = nn.ModuleList([Block(config, layer) for layer in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)

        # GPT-2's initialisation; projections into the residual stream are scaled down by its depth
        residual_std = 0.02 / math.sqrt(2 * config.n_layer)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, std=residual_std)
            elif p.dim() == 2:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens, positions=None, attend=causal, wanted=None):
        """
        tokens:    long, (B, T) or (N,)
        positions: long, the same shape; each token's place in its own sequence, 0..block_size-1.
                   None: every row is one whole sequence that starts at 0.
        attend:    attend(layer, q, k, v) -> output, all (..., nh, T, hs); supplied by the layout
        wanted:    an index into the leading axes, x[wanted]: the tokens whose logits are wanted;
                   None: all. The vocabulary projection, the widest layer, skips the others.

        Returns logits (..., vocab_size), one row per token wanted.
        """
        if positions is None:
            T = tokens.size(-1)
            if T > self.config.block_size:
                raise ValueError(f"{T} tokens do not fit block_size {self.config.block_size}")
            positions = torch.arange(T, device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)                  # (..., T, C)
        for block in self.h:
            x = block(x, attend)
        if wanted is not None:
            x = x[wanted]                                           # (R, C)
        return F.linear(self.ln_f(x), self.wte.weight)              # (..., V): the tied output head

    @property
    def device(self):
        return self.wte.weight.device

    @classmethod
    def from_pretrained(cls, name="builtin"):
        """
        Trained weights, in float32 on the CPU. name: "builtin", this repository's small model;
        "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl" or "owner/name" on huggingface.co, downloaded
        once; or a local folder or file in Hugging Face's layout. ValueError for any other name
        or architecture.
        """
        from toolbox.weights import read_gpt2  # file formats are not the lesson
        return read_gpt2(name, lambda config: cls(GPTConfig(**config)))


def keep_top(logits, temperature, top_k=None, top_p=1.0):
    """
    The logits (V,), with -inf for the tokens that may not be sampled. top_k keeps the k largest; of
    these, top_p keeps the most likely until their probabilities add up to top_p.
    """
    if top_k is not None and top_k < logits.numel():
        smallest_kept = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < smallest_kept, -math.inf)
    if top_p < 1:
        ordered = logits.sort(descending=True).values              # (V,), the largest first
        probabilities = ((ordered - ordered[0]) / temperature).softmax(dim=-1)
        sums = probabilities.cumsum(dim=-1)
        # The sums ascend. So the number of sums below top_p is the index of the first sum that
        # reaches it.
        last = int((sums < top_p - 1e-12).sum())   # 1e-12: a sum may round to just below top_p
        last = min(last, len(sums) - 1)    # by rounding, even the sum of all may stay below top_p
        logits = logits.masked_fill(logits < ordered[last], -math.inf)
    return logits


def cdf(logits, temperature, top_k=None, top_p=1.0):
    """Cumulative distribution over the vocabulary for logits (V,) in float64; ends in exactly 1."""
    logits = keep_top(logits, temperature, top_k, top_p)
    sums = ((logits - logits.max()) / temperature).softmax(dim=-1).cumsum(dim=-1)
    return sums / sums[-1]   # rounding may leave the last sum below 1, and a draw above it


def sample(logits, requests):
    """
    The next token of each request: logits (R, V), row i for requests[i] -> list of R token ids.

    temperature 0 takes the largest logit (greedy). Otherwise the distribution, cut by `top_k` and
    `top_p` if set, is sampled by its inverse CDF: one uniform number in [0, 1) falls into exactly
    one token's interval. It comes from the request's *own* random stream, one per sampled token,
    whatever else is in the batch.

        CDF   0 |----- the -----|-- a --|- of -|...| 1
                          ^ u = 0.31  ->  "the"

    Raises ValueError for a row whose largest logit is NaN or infinite; the error's `request` says
    whose. No request has drawn by then, so the others can be computed again without it.

    (Engines sample the whole batch on the GPU, in one line: argmax(logits / temperature + Gumbel
    noise) draws from the same distribution.)
    """
    check_finite(requests, logits.amax(dim=-1).tolist())
    tokens = logits.argmax(dim=-1).tolist()
    for i, request in enumerate(requests):
        if request.temperature > 0:
            # In float64, since sums over the vocabulary would round too much; on the CPU, so that
            # the token is the same on every device.
            row = logits[i].cpu().double()                                                 # (V,)
            edges = cdf(row, request.temperature, request.top_k, request.top_p)            # (V,)
            tokens[i] = int(torch.searchsorted(edges, request.draw(), right=True))
    return tokens
