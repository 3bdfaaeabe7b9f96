"""
What `model.optimize()` puts in place: the same arithmetic through the fastest kernels at hand. Nothing here is a lesson
about batching; it is here so that the ladder's top rung can be held against other programs. Four things:

Linear layers on a CPU. A forward pass of a few tokens, which is what decoding is, does little else than read the weights.
The kernel behind `nn.Linear` takes them in the order in which they are trained, and on a CPU reads them slowly. oneDNN can
bring them into the order in which it multiplies, once; with 2 to 64 rows that is up to twice as fast, the same multiplications.
torch has it under two private names, which its own compiler uses when it freezes a model (torch.compile reaches them too, for
seconds of compiling). Where they are missing, or the model is not in float32 on a CPU, everything runs as before.

Caches in a pool. The caches of all requests are pieces of one tensor per layer, so that one call writes the new keys of
all of them, and one call gives all views.

Attention for all requests in one call, on a CUDA GPU in half precision (varlen_attn); elsewhere torch's fused attention in a
loop over requests.

The last block only for tokens whose logits are wanted, apart from its keys and values: of a prompt that is one, the last.

Three classes turn into a faster sister in place, so that weights, their names and the state_dict stay as they are.
"""
import weakref
from bisect import insort
from functools import cache, cached_property
from itertools import accumulate
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from cache import KV
from model import GPT, MLP, causal


# --- linear layers --------------------------------------------------------------------------------------------------------

@cache
def can_pack():
    """Whether this torch, on this processor, has oneDNN's two kernels, and they multiply right."""
    try:
        x, weight, bias = torch.arange(6.0).view(2, 3) - 3, torch.arange(12.0).view(4, 3) / 6, torch.arange(4.0)
        y = torch.ops.mkldnn._linear_pointwise(x, torch.ops.mkldnn._reorder_linear_weight(weight), bias, "gelu", [], "tanh")
        return torch.allclose(y, F.gelu(F.linear(x, weight, bias), approximate="tanh"), atol=1e-5)
    except (AttributeError, RuntimeError, TypeError):   # no such op, no oneDNN, another signature
        return False


def packable(weight):
    return can_pack() and weight.dtype == torch.float32 and weight.device.type == "cpu"


class Packed:
    """
    A weight matrix in oneDNN's order: packed(weight) -> an opaque tensor. It follows its weight: one that was changed
    or moved is packed again at its next use, and so is that of a copied model. torch counts changes, but not those through
    weight.data or of an inference tensor: after one of them, optimize() again.
    """

    def __init__(self):
        self.tensor, self.of = None, None

    def __call__(self, weight):
        now = weight.data_ptr(), 0 if weight.is_inference() else weight._version
        if self.of != now:
            self.tensor, self.of = torch.ops.mkldnn._reorder_linear_weight(weight.detach()), now
        return self.tensor

    def __reduce__(self):
        return Packed, ()   # opaque tensors can be neither copied nor saved


def linear(module, x, bias=None, gelu=False):
    """x (..., in) @ module.weight (out, in)^T + bias, then perhaps GELU while the numbers are still in the cache."""
    weight, packed = module.weight, getattr(module, "packed", None)   # a layer that came later, a shard say, has none
    learning = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)   # these kernels have no backward
    several = x.numel() > x.size(-1)   # one row is a matrix times a vector, for which the plain kernel is the faster one
    if packed and packable(weight) and x.dtype == weight.dtype and several and not learning:
        return torch.ops.mkldnn._linear_pointwise(x, packed(weight), bias, "gelu" if gelu else "none", [], "tanh")
    y = F.linear(x, weight, bias)
    return F.gelu(y, approximate="tanh") if gelu else y


class FastLinear(nn.Linear):
    def forward(self, x):
        return linear(self, x, self.bias)


class FastMLP(MLP):
    def forward(self, x):
        return self.c_proj(linear(self.c_fc, x, self.c_fc.bias, gelu=True))


# --- caches and attention -------------------------------------------------------------------------------------------------

class Pool:
    """Room for the keys and values of many requests: for each layer (nh, size, hs), `taken` in pieces first..end of it."""

    def __init__(self, size, layers, heads, head_size, dtype, device):
        # Uninitialised: what nobody has written nobody reads. And no inference tensors, so that the next run may be in another mode.
        with torch.inference_mode(False):
            self.k, self.v = (torch.empty(layers, size, heads, head_size, dtype=dtype, device=device).transpose(1, 2).unbind() for _ in "kv")
        self.size, self.taken = size, []

    def take(self, tokens):
        """The beginning of the first gap that is large enough, None if there is none."""
        first = 0
        for start, end in self.taken:
            if start - first >= tokens:
                break
            first = end
        if self.size - first < tokens:
            return None
        insort(self.taken, (first, first + tokens))
        return first


class Slot(KV):
    """One request's keys and values: a piece of a pool, as views. The pool has it back when nobody holds it any more."""

    def __init__(self, pool, first, capacity):
        super().__init__(capacity)
        self.pool, self.first = pool, first
        self.k, self.v = ({layer: t.narrow(1, first, capacity) for layer, t in enumerate(part)} for part in (pool.k, pool.v))


class Varlen:
    """
    What cache.Flat does with attention="varlen", for one model: where its caches lie, `kv`, and how tokens meet, `step`.
    Its pools stay for the next run: the first touch of fresh memory costs more than the writing itself.
    """

    def __init__(self, size, *shape):
        self.size, self.shape, self.pools = size, shape, []   # size: of the next pool, at least

    def kv(self, capacity):
        """A request's cache. If no pool has room there comes another one, as large as all together: nothing ever moves."""
        for pool in self.pools:
            if (first := pool.take(capacity)) is not None:
                break
        else:
            pool = Pool(max(capacity, self.size, sum(pool.size for pool in self.pools)), *self.shape)
            self.pools.append(pool)
            first = pool.take(capacity)
        slot = Slot(pool, first, capacity)
        weakref.finalize(slot, self.give_back, pool, (first, first + capacity)).atexit = False
        return slot

    def give_back(self, pool, piece):
        pool.taken.remove(piece)
        if len(self.pools) > 1 and not any(pool.taken for pool in self.pools):
            self.size = sum(pool.size for pool in self.pools)   # from now on one, which is faster than several
            self.pools = []

    def step(self, flat):
        return Step(flat)

    def __reduce__(self):
        return Varlen, (self.size, *self.shape)   # a copied model has pools of its own


class Share:
    """A step's requests whose caches lie in one pool, `mine` out of the plan's. What can be known before the first layer."""

    def __init__(self, flat, pool, mine):
        self.pool, self.device = pool, pool.k[0].device
        firsts = {i: flat.plan[i][0].kv.first for i in mine}
        self.order = sorted(mine, key=firsts.get)                                         # as they lie in the pool
        self.places = {i: range(flat.cu_seqlens[i], flat.cu_seqlens[i + 1]) for i in mine}   # of their tokens in the stream
        self.part = None if len(mine) == len(flat.plan) else self.stream(mine)            # of the stream; None: all of it
        self.where = torch.tensor([firsts[i] + place for i in mine for place in range(flat.starts[i], flat.ends[i])], device=self.device)

        # The pool from end to end: what lies between, a request's keys, what lies between, ...
        self.stretches, end = [], 0
        for i in self.order:
            self.stretches += [firsts[i] - end, flat.ends[i]]
            end = firsts[i] + flat.ends[i]
        self.stretches.append(pool.size - end)

    def stream(self, requests):
        return torch.tensor([place for i in requests for place in self.places[i]], device=self.device)

    @cached_property
    def sequences(self):
        """
        For varlen_attn: the places of the queries in the pool's order, and (cu_seq_q, cu_seq_k, max_q, max_k). It wants sequences
        without anything between them. So what lies between is a sequence too, one without queries.
        """
        queries = [n for i in self.order for n in (0, len(self.places[i]))] + [0]
        cu_q, cu_k = (torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.device) for lengths in (queries, self.stretches))
        return self.stream(self.order), (cu_q, cu_k, max(queries), max(self.stretches))


class Step:
    """`attend` of one step. Nothing of the past is copied."""

    def __init__(self, flat):
        mine = {}
        for i, (request, _) in enumerate(flat.plan):
            mine.setdefault(request.kv.pool, []).append(i)
        self.shares = [Share(flat, pool, requests) for pool, requests in mine.items()]
        self.sizes, self.starts = [n for _, n in flat.plan], flat.starts

    @cached_property
    def masks(self):
        """A chunk behind a past needs one, is_causal would align its triangle to the top left; None for the others."""
        device = self.shares[0].device
        return [torch.ones(n, start + n, dtype=torch.bool, device=device).tril(start) if start and n > 1 else None for start, n in zip(self.starts, self.sizes)]

    def __call__(self, layer, q, k, v):                                                   # (nh, N, hs)
        self.write(layer, k, v)
        return self.in_one(layer, q) if has_varlen(q) else self.one_by_one(layer, q)

    def write(self, layer, k, v):
        for share in self.shares:
            for cached, new in (share.pool.k[layer], k), (share.pool.v[layer], v):
                cached.index_copy_(1, share.where, new if share.part is None else new[:, share.part])

    def one_by_one(self, layer, q):
        keys, values = [None] * len(self.sizes), [None] * len(self.sizes)
        for share in self.shares:
            for cached, views in (share.pool.k[layer], keys), (share.pool.v[layer], values):
                for i, view in zip(share.order, cached.unsqueeze(0).split(share.stretches, dim=2)[1::2]):
                    views[i] = view                                                       # (1, nh, S, hs)
        queries = q.unsqueeze(0).split(self.sizes, dim=2)
        return torch.cat([F.scaled_dot_product_attention(*one, attn_mask=mask, is_causal=n > 1 and mask is None)
                          for *one, mask, n in zip(queries, keys, values, self.masks, self.sizes)], dim=2).squeeze(0)

    def in_one(self, layer, q):
        out = torch.empty_like(q)
        for share in self.shares:
            places, lengths = share.sequences
            new, k, v = (t.transpose(0, 1) for t in (q[:, places], share.pool.k[layer], share.pool.v[layer]))   # (..., nh, hs)
            out[:, places] = varlen_attn(new, k, v, *lengths, window_size=(-1, 0)).transpose(0, 1)
        return out


def has_varlen(q):
    """Whether torch's varlen_attn is the kernel for queries like these."""
    return q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16) and varlen_agrees(q.device, q.dtype, q.size(-1))


@cache
def varlen_agrees(device, dtype, head_size):
    """Whether varlen_attn gives what the loop gives: for a chunk behind a past, a whole prompt and a decode, in a pool with NaN between."""
    pool, random = Pool(60, 1, 2, head_size, dtype, device), torch.Generator().manual_seed(0)
    pool.k[0].fill_(torch.nan)
    pool.v[0].fill_(torch.nan)
    plan, starts, ends = [], [], []
    for first, start, n in (30, 5, 3), (0, 0, 4), (12, 9, 1):
        slot = Slot(pool, first, 15)
        for cached in slot.k[0], slot.v[0]:
            cached[:, :start] = torch.randn(2, start, head_size, generator=random)
        plan.append((SimpleNamespace(kv=slot), n))
        starts.append(start)
        ends.append(start + n)
    flat = SimpleNamespace(plan=plan, starts=starts, ends=ends, cu_seqlens=[0, 3, 7, 8])
    q, k, v = torch.randn(3, 2, 8, head_size, generator=random).to(device, dtype)
    step = Step(flat)
    step.write(0, k, v)
    try:
        return torch.allclose(step.in_one(0, q), step.one_by_one(0, q), rtol=0, atol=0.03)
    except (RuntimeError, TypeError, ValueError):   # no FlashAttention for this GPU, another signature
        return False


# --- the model ------------------------------------------------------------------------------------------------------------

class FastGPT(GPT):
    def forward(self, tokens, positions=None, attend=causal, rows=None):
        """As GPT.forward. What the last block makes of a token is of use only where its logits are wanted, but for keys and values."""
        if rows is None or positions is None or tokens[rows].numel() == tokens.numel():
            return super().forward(tokens, positions, attend, rows)
        *blocks, last = self.h
        x = self.wte(tokens) + self.wpe(positions)                                                # (..., T, C)
        for block in blocks:
            x = block(x, attend)
        attn, y = last.attn, last.ln_1(x)
        k, v, of_rows = attn.key(y), attn.value(y), attn.query(y[rows])                           # of_rows (R, C)
        q = of_rows.new_zeros(k.shape)
        q[rows] = of_rows
        y = attend(attn.layer, *(attn.split_heads(part) for part in (q, k, v)))
        x = x[rows] + attn.c_proj(y.transpose(-3, -2).flatten(-2)[rows])                          # (R, C)
        x = x + last.mlp(last.ln_2(x))
        return self.unembed(self.ln_f(x))

    def unembed(self, x):
        return linear(self.wte, x)

    @property
    def varlen(self):
        attn = self.h[0].attn
        weight = attn.key.weight   # a tensor parallel rank has some of the heads
        shape = self.config.n_layer, weight.size(0) // attn.head_size, attn.head_size, weight.dtype, weight.device
        if self.caches is None or self.caches.shape != shape:   # the first time, or the model was moved
            self.caches = Varlen(4 * self.config.block_size, *shape)
        return self.caches


FAST = {nn.Linear: FastLinear, MLP: FastMLP, GPT: FastGPT}


def optimize(model):
    """Turns a GPT into a FastGPT in place, and packs its weights now rather than at their first use."""
    model.caches = None
    for module in model.modules():
        if isinstance(module, nn.Linear) or module is model.wte:
            module.packed = Packed()
            if packable(module.weight):
                module.packed(module.weight)
        module.__class__ = FAST.get(type(module), type(module))
