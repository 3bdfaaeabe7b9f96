"""
Attention over a flat stream (stages 0, 6 and 7), with all caches in pools.

The keys and values of all requests lie in one tensor per layer, so that one call writes the new
ones of all requests, and a step finds every request's keys as views before its first layer. In
float32 on a CPU the compiled step reads them there (native.py). Elsewhere, or without a compiler,
attention is torch's fused kernel: one call for all requests on a CUDA GPU in half precision
(varlen_attn), else one call per request.
"""
import weakref
from bisect import bisect_left, insort
from collections import deque
from functools import cache, cached_property
from itertools import accumulate, chain, pairwise
from threading import Lock
from types import SimpleNamespace

import torch
from torch.nn import functional as F

from cache import KV
from kernels import native
from kernels.served import Watch

KEEPS = Watch((KV, "buffers"), (KV, "read"), (KV, "write"))


class Pool:
    """Room for the keys and values of many requests: for each layer (nh, size, hs)."""

    def __init__(self, size, layers, heads, head_size, dtype, device):
        shape = layers, heads, size, head_size
        # Uninitialised: nothing is read before it is written. And not an inference tensor, so that
        # the next run may use another mode.
        with torch.inference_mode(False):
            self.all_k, self.all_v = (
                native.huge_pages(torch.empty(shape, dtype=dtype, device=device)) for _ in "kv")
        self.k, self.v = self.all_k.unbind(), self.all_v.unbind()
        self.shape = layers, heads, head_size, dtype, device
        self.size, self.taken = size, []                                   # pieces (first, end)

    def take(self, tokens):
        """The beginning of the first gap that is large enough; None if there is none."""
        first = 0
        for start, end in self.taken:
            if start - first >= tokens:
                break
            first = end
        if self.size - first < tokens:
            return None
        insort(self.taken, (first, first + tokens))
        return first


class PooledKV(KV):
    """A KV that is a piece of a pool. The pool gets it back when nothing refers to it any more."""

    def __init__(self, pool, first, capacity):
        super().__init__(capacity)
        self.pool, self.first = pool, first
        self.k = {i: t.narrow(1, first, capacity) for i, t in enumerate(pool.k)}
        self.v = {i: t.narrow(1, first, capacity) for i, t in enumerate(pool.v)}


class Pools:
    """
    The pools of one model. They stay for the next run: the first touch of fresh memory costs more
    than the writing itself.
    """

    def __init__(self, size, *shape):
        self.size, self.shape, self.pools = size, shape, []   # size: of the next pool, at least
        self.lock, self.returned = Lock(), deque()            # (pool, piece), not yet given back

    def kv(self, capacity):
        """A cache. If no pool has room, a new one doubles the room: nothing ever moves."""
        with self.lock:
            self.settle()
            for pool in self.pools:
                if (first := pool.take(capacity)) is not None:
                    break
            else:
                size = max(capacity, self.size, sum(pool.size for pool in self.pools))
                pool = Pool(size, *self.shape)
                self.pools.append(pool)
                first = pool.take(capacity)
        kv = PooledKV(pool, first, capacity)
        weakref.finalize(kv, self.give_back, pool, (first, first + capacity)).atexit = False
        return kv

    def give_back(self, pool, piece):
        """
        Called when a cache is gone: at any time, in any thread, perhaps in the middle of kv(). So
        it never waits. If the lock is taken, the next one who takes it settles.
        """
        self.returned.append((pool, piece))
        if self.lock.acquire(blocking=False):
            try:
                self.settle()
            finally:
                self.lock.release()

    def settle(self):
        while self.returned:
            pool, piece = self.returned.popleft()
            pool.taken.remove(piece)
        if len(self.pools) > 1 and not any(pool.taken for pool in self.pools):
            self.size = sum(pool.size for pool in self.pools)   # one pool is faster than several
            self.pools = []

    def pooled(self, kv):
        """The cache itself if it is in a pool; else one that is, with what had been written."""
        if isinstance(kv, PooledKV):
            return kv
        new = self.kv(kv.capacity)
        for layer in kv.k:
            new.write(layer, 0, kv.k[layer], kv.v[layer])
        return new

    def take_in(self, batch):
        """
        The caches of a Flat or Paged batch move into a pool if they are new. ValueError, and none
        has moved, if they are not the KVs that these pools can replace, or the plan does not fit.
        """
        if KEEPS.first_changed():
            raise ValueError(f"{KEEPS.first_changed()} has been replaced")
        paged = is_paged(batch)
        for kv in [batch.pool] if paged else [request.kv for request, _ in batch.plan]:
            if type(kv) is PooledKV:
                fits = kv.pool.shape == self.shape
            else:
                fits = type(kv) is KV and all(
                    (len(t), t.size(-1), t.dtype, t.device) == self.shape[1:]
                    for part in (kv.k, kv.v) for t in part.values())
            if not fits or not METHODS.isdisjoint(vars(kv)):
                raise ValueError("a cache is not a KV, or it is one of another model")
        check_plan(batch, paged)
        if paged:
            batch.pool.in_pool = self.pooled(getattr(batch.pool, "in_pool", batch.pool))
            batch.pool.k, batch.pool.v = batch.pool.in_pool.k, batch.pool.in_pool.v
        else:
            for request, _ in batch.plan:
                request.kv = self.pooled(request.kv)

    def __reduce__(self):
        return Pools, (self.size, *self.shape)   # a copied model has pools of its own


METHODS = {"buffers", "read", "write"}


def check_plan(batch, paged):
    """ValueError if a request's tokens do not fit its place in the stream, or its cache."""
    size = batch.pages.size if paged else 0
    slots = batch.pool.capacity // size if paged else 0   # pages in the pool
    first = 0
    for (request, n), start, end, place, stop in zip(
            batch.plan, batch.starts, batch.ends, batch.cu_seqlens, batch.cu_seqlens[1:]):
        if n < 1 or start < 0 or end != start + n or place != first or stop != first + n:
            raise ValueError(f"{request}: {n} tokens do not end at {end}")
        if paged:
            table = request.kv
            fits = len(table) * size >= end and min(table) >= 0 and max(table) < slots
        else:
            fits = request.kv.capacity >= end
        if not fits:
            raise ValueError(f"{request}: its cache has no room for {end} tokens")
        first = stop


class Share:
    """
    Those requests of a step whose caches lie in one pool: what can be known before the first layer.

    members: their indices in the plan
    spans:   where in the pool each one's keys are: a slice, or an index where they are scattered
    where:   the place in the pool of each of their new tokens
    """

    def __init__(self, pool, members, spans, where, cu_seqlens):
        self.pool, self.members, self.spans, self.where = pool, members, spans, where
        self.device = pool.all_k.device
        self.tokens = {i: range(cu_seqlens[i], cu_seqlens[i + 1]) for i in members}
        whole = len(members) == len(cu_seqlens) - 1
        self.part = None if whole else self.stream_index(members)   # None: the whole stream

    def stream_index(self, members):
        return torch.tensor([t for i in members for t in self.tokens[i]], device=self.device)

    @cached_property
    def views(self):
        """For each member the keys and values (1, nh, S, hs) of all layers; None if scattered."""
        return [(self.pool.all_k[:, None, :, span].unbind(),
                 self.pool.all_v[:, None, :, span].unbind()) if isinstance(span, slice) else None
                for span in self.spans]

    def keys(self, layer, member):
        if self.views[member]:
            return tuple(part[layer] for part in self.views[member])
        span = self.spans[member]
        return self.pool.k[layer][None, :, span], self.pool.v[layer][None, :, span]

    @cached_property
    def sequences(self):
        """
        For varlen_attn, which wants all keys in one piece: an index of the keys in the pool (None:
        the pool as it lies), one of the queries in the stream, and (cu_seq_q, cu_seq_k, max_q,
        max_k).
        """
        lengths = {i: len(self.tokens[i]) for i in self.members}
        if all(isinstance(span, slice) for span in self.spans) and self.disjoint():
            # What lies between two requests' keys becomes a sequence without queries.
            spans = sorted((span.start, span.stop, i) for span, i in zip(self.spans, self.members))
            queries, keys, end, index = [], [], 0, None
            for start, stop, i in spans:
                queries += [0, lengths[i]]
                keys += [start - end, stop - start]
                end = stop
            queries, keys = queries + [0], keys + [self.pool.size - end]
            members = [i for _, _, i in spans]
        else:
            members, queries = self.members, [lengths[i] for i in self.members]
            places = torch.arange(self.pool.size, device=self.device)
            index = [places[span] for span in self.spans]
            keys, index = [len(part) for part in index], torch.cat(index)
        cu_q, cu_k = (torch.tensor([0, *accumulate(part)], dtype=torch.int32, device=self.device)
                      for part in (queries, keys))
        return index, self.stream_index(members), (cu_q, cu_k, max(queries), max(keys))

    def disjoint(self):
        spans = sorted((span.start, span.stop) for span in self.spans)
        return all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))


class Step:
    """`attend` of one step."""

    def __init__(self, batch):
        self.sizes, self.starts = [n for _, n in batch.plan], batch.starts
        self.shares = [Share(*share, batch.cu_seqlens) for share in shares_of(batch)]

    @cached_property
    def masks(self):
        """
        A mask for each chunk with a past, since is_causal would align its triangle to the top left;
        None for the others.
        """
        device = self.shares[0].device
        return [torch.ones(n, start + n, dtype=torch.bool, device=device).tril(start)
                if start and n > 1 else None for start, n in zip(self.starts, self.sizes)]

    def __call__(self, layer, q, k, v):                                    # (nh, N, hs)
        self.write(layer, k, v)
        return self.in_one(layer, q) if has_varlen(q) else self.one_by_one(layer, q)

    def write(self, layer, k, v):
        for share in self.shares:
            for buffer, new in (share.pool.k[layer], k), (share.pool.v[layer], v):
                new = new if share.part is None else new[:, share.part]
                buffer.index_copy_(1, share.where, new)

    def one_by_one(self, layer, q):
        queries = q.unsqueeze(0).split(self.sizes, dim=2)                  # (1, nh, n, hs)
        out = [None] * len(queries)
        for share in self.shares:
            for member, i in enumerate(share.members):
                mask = self.masks[i]
                out[i] = F.scaled_dot_product_attention(
                    queries[i], *share.keys(layer, member), attn_mask=mask,
                    is_causal=mask is None and self.sizes[i] > 1)
        return torch.cat(out, dim=2).squeeze(0)

    def in_one(self, layer, q):
        out = torch.empty_like(q)
        for share in self.shares:
            keys, queries, lengths = share.sequences
            k, v = (t[layer].transpose(0, 1) for t in (share.pool.k, share.pool.v))
            if keys is not None:
                k, v = k[keys], v[keys]                                    # (S, nh, hs)
            y = varlen_attn(q[:, queries].transpose(0, 1), k, v, *lengths, window_size=(-1, 0))
            out[:, queries] = y.transpose(0, 1)
        return out


def is_paged(batch):
    """Known by what it has, not by its class: a script that is run has classes of its own."""
    return hasattr(batch, "pool")


def is_alone(layout):
    """Whether it is stage 0's: a row of one request, not a stream."""
    return not hasattr(layout, "cu_seqlens")


def alone(tokens, layout=None):
    """
    Stage 0's layout, or a bare call's tokens (1, T) or (T,), as a stream of one request. Where
    nothing is kept from step to step, it gets a cache for this one.
    """
    n, start, request = tokens.numel(), 0, SimpleNamespace(kv=KV(tokens.numel()))
    if layout is not None and layout.kv is not None:
        start, ((request, _),) = layout.start, layout.plan
        if request.kv is not layout.kv:
            raise ValueError("its cache is not its request's")
    return SimpleNamespace(plan=[(request, n)], starts=[start], ends=[start + n], cu_seqlens=[0, n])


def shares_of(batch):
    """[(pool, members, spans, where), ...] of a batch whose caches are in pools."""
    if is_paged(batch):
        kv, members = batch.pool.in_pool, list(range(len(batch.plan)))
        spans = [slice(span.start + kv.first, span.stop + kv.first) if isinstance(span, slice)
                 else span + kv.first for span in batch.spans]
        return [(kv.pool, members, spans, batch.slot_mapping + kv.first)]
    members_of = {}
    for i, (request, _) in enumerate(batch.plan):
        members_of.setdefault(request.kv.pool, []).append(i)
    shares = []
    for pool, members in members_of.items():
        first = {i: batch.plan[i][0].kv.first for i in members}
        spans = [slice(first[i], first[i] + batch.ends[i]) for i in members]
        where = [first[i] + p for i in members for p in range(batch.starts[i], batch.ends[i])]
        where = torch.tensor(where, device=pool.all_k.device)
        shares.append((pool, members, spans, where))
    return shares


def pieces_of(batch, wanted):
    """
    The pieces of native.step for a batch whose caches are in pools, and the size of a page.
    ValueError unless the logits wanted, as places in the stream, are those of the last tokens of
    each request, some or none, in order.
    """
    counts = [bisect_left(wanted, end) - bisect_left(wanted, first)
              for first, end in pairwise(batch.cu_seqlens)]
    lasts = (range(end - n, end) for end, n in zip(batch.cu_seqlens[1:], counts))
    if wanted != [*chain.from_iterable(lasts)]:
        raise ValueError("the logits wanted are not those of the last tokens")
    pools, pieces, paged = {}, [], is_paged(batch)
    size = batch.pages.size if paged else 2**40   # a cache in one piece is a single page
    for i, ((request, n), start) in enumerate(zip(batch.plan, batch.starts)):
        kv = batch.pool.in_pool if paged else request.kv
        table = [kv.first + page * size for page in request.kv] if paged else [kv.first]
        if kv.pool not in pools:
            pools[kv.pool] = *map(native.pool_address, (kv.pool.all_k, kv.pool.all_v)), kv.pool.size
        pieces.append((batch.cu_seqlens[i], n, start, counts[i], table, *pools[kv.pool]))
    return pieces, size


def varlen_attn(*args, **keywords):
    """torch's, imported when it is needed: that loads torch's compiler, which takes seconds."""
    from torch.nn.attention.varlen import varlen_attn
    return varlen_attn(*args, **keywords)


def has_varlen(q):
    """Whether torch's varlen_attn is the kernel for queries like these."""
    return (q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16)
            and varlen_agrees(q.device, q.dtype, q.size(-1)))


@cache
def varlen_agrees(device, dtype, head_size):
    """
    Whether varlen_attn gives what the loop gives: for a chunk with a past, a whole prompt and a
    decode, in a pool with NaN between them.
    """
    pool, random = Pool(60, 1, 2, head_size, dtype, device), torch.Generator().manual_seed(0)
    pool.all_k.fill_(torch.nan)
    pool.all_v.fill_(torch.nan)
    plan, starts, ends = [], [], []
    for first, start, n in (30, 5, 3), (0, 0, 4), (12, 9, 1):
        kv = PooledKV(pool, first, 15)
        for buffer in kv.k[0], kv.v[0]:
            buffer[:, :start] = torch.randn(2, start, head_size, generator=random)
        plan.append((SimpleNamespace(kv=kv), n))
        starts.append(start)
        ends.append(start + n)
    batch = SimpleNamespace(plan=plan, starts=starts, ends=ends, cu_seqlens=[0, 3, 7, 8])
    q, k, v = torch.randn(3, 2, 8, head_size, generator=random).to(device, dtype)
    step = Step(batch)
    step.write(0, k, v)
    try:
        return torch.allclose(step.in_one(0, q), step.one_by_one(0, q), rtol=0, atol=0.03)
    except (RuntimeError, TypeError, ValueError):   # no FlashAttention here, another signature
        return False
