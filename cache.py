"""
Where keys and values live, and how a batch is laid out: the second half of "which keys may each token see?"

A *plan* says how many tokens of which request go into one forward pass: [(request, n), ...]. A
*layout* turns it into what the model takes, and gives each request its share of the result back:

    request -> plan -> layout: tokens, positions -> model -> logits of `rows` -> token -> request
                               attend(layer, q, k, v)

Two layouts of one plan, three decodes A, B, C and a prefill chunk of 4 tokens of D:

    Rectangle  (B, T) = (4, 4)              Flat  (N,) = (7,)
        .  .  .  A                          A  B  C  D  D  D  D
        .  .  .  B                          cu_seqlens = [0, 1, 2, 3, 7]
        .  .  .  C          9 pad slots     no pad slots
        D  D  D  D

Every layout has the same few parts, so a stage can swap one for another in one line:

    plan, starts, sampled   the plan, where each request's tokens begin, and who gets a next token from this pass
    tokens, positions       what to compute: long, (B, T) or (N,)
    attend, rows            the model's two other arguments: how tokens meet, whose logits are wanted
    padded_keys, score_entries, copied_bytes    what it costs; the trace shows it
    finished                requests in it that are finished and computed all the same (static batches alone have any)

Sources: the rectangle is Adding Interleaving to NanoGPT (claims I1 to I6, and its bug I8, which is
mended here); the flat stream is the ragged batching of Continuous batching, from first principles (H11)
and the varlen loop of the tensor parallelism article (R3, R4).
"""
from collections import Counter
from itertools import accumulate, count

import torch

from model import Head

head = Head()


class KV:
    """
    Keys and values of one sequence, for each layer (nh, capacity, hs), written in place.

    Shape, dtype and device are those of the first keys written, so half of the heads need no special
    case, and neither does a leading batch axis. Zeros to begin with: even where the mask hides a key,
    its weight 0 times an uninitialised NaN would be NaN.
    """

    def __init__(self, capacity):
        self.capacity = capacity   # in tokens
        self.k, self.v = {}, {}    # layer -> (..., capacity, hs)

    def write(self, layer, start, k, v):
        """Puts k and v (..., T, hs) at start..start+T of the sequence. ValueError if they do not fit."""
        end = start + k.size(-2)
        if end > self.capacity:
            raise ValueError(f"KV of {self.capacity} tokens cannot take tokens {start} to {end}")
        if layer not in self.k:
            self.k[layer] = k.new_zeros(*k.shape[:-2], self.capacity, k.size(-1))
            self.v[layer] = torch.zeros_like(self.k[layer])
        self.k[layer][..., start:end, :] = k
        self.v[layer][..., start:end, :] = v

    def read(self, layer, end):
        """Keys and values of the first `end` tokens, (..., end, hs) each: views, nothing is copied."""
        return self.k[layer][..., :end, :], self.v[layer][..., :end, :]

    def append_to(self, other, start, first=0, last=None):
        """Copies tokens first..last into another KV, from `start` on. Returns the bytes copied."""
        copied = 0
        for layer in self.k:
            k, v = self.k[layer][..., first:last, :], self.v[layer][..., first:last, :]
            other.write(layer, start, k, v)
            copied += k.nbytes + v.nbytes
        return copied


def allocate(plan, new=KV):
    """
    Gives each request of a plan a cache, new(size), of exactly the size that the scheduler has granted: a newcomer a new
    one, which begins with the pages it found in the prefix cache, and one that has grown a larger one (here all pages
    of a request lie in one piece, so that they can be read as a view, and while it moves both pieces exist; paged
    attention reads pages where they lie). Returns the bytes copied.
    """
    copied = 0
    for request, _ in plan:
        if request.kv is None:
            request.kv = new(request.granted)
            for i, page in enumerate(request.pages):
                copied += page.kv.append_to(request.kv, i * page.size)
        elif request.kv.capacity < request.granted:
            old, request.kv = request.kv, new(request.granted)
            copied += old.append_to(request.kv, 0, last=request.computed)
    return copied


class Page:
    """A full page of prompt tokens: its keys and values, the page before it, and how many hold it (requests and pages behind it)."""

    def __init__(self, key, size, kv):
        self.key, self.size, self.kv, self.holders, self.used = key, size, kv, 0, 0


class PrefixCache:
    """
    Keys and values of prompts that have been computed, for later prompts that begin with the same tokens
    (claim I7), page by page, also across runs. A page is found by its tokens and the page before it,
    so that the same tokens after another beginning are another page. Pages that somebody holds stay; of the
    others the least recently used goes first. It is filled and emptied by the Scheduler, within max_kv_tokens.

        cache = PrefixCache(page_size=16)
        generate(model, requests, prefix_cache=cache)
    """

    def __init__(self, page_size=16):
        if not isinstance(page_size, int) or page_size < 1:
            raise ValueError(f"page_size must be a whole number of at least 1, not {page_size!r}")
        self.page_size = page_size
        self.pages = {}        # (page before it or None, tokens) -> Page
        self.clock = count(1)
        self.owner = None

    def bind(self, model):
        """
        At the beginning of a run. Its pages are of one model, dtype and device: ValueError for another one. (If you
        change the weights, make a new one yourself.)
        """
        owner = (id(model), model.wte.weight.dtype, model.device)
        if self.pages and self.owner != owner:
            raise ValueError("prefix_cache: it holds keys and values of another model, dtype or device; make a new one")
        self.owner = owner
        parents = Counter(page.key[0] for page in self.pages.values())
        for page in self.pages.values():
            page.holders = parents[page]   # a run that failed has left its requests among them

    @property
    def tokens(self):
        """What it holds, in tokens."""
        return self.page_size * len(self.pages)

    def find(self, pages, tokens):
        """The page of these tokens behind `pages`, or None."""
        return self.pages.get((pages[-1] if pages else None, tuple(tokens)))

    def take(self, tokens):
        """The longest chain of full pages that these tokens begin with; they are held until given back."""
        pages = []
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            page = self.find(pages, tokens[end - self.page_size:end])
            if page is None:
                break
            self.hold(page)
            pages.append(page)
        return pages

    def hold(self, page):
        page.holders += 1
        page.used = next(self.clock)

    def give_back(self, pages):
        for page in pages:
            page.holders -= 1

    def add(self, pages, tokens, kv, end):
        """A new page behind `pages`: a copy of the last tokens before `end` of a request's cache."""
        copy = KV(self.page_size)
        if kv is not None:
            kv.append_to(copy, 0, end - self.page_size, end)
        page = Page((pages[-1] if pages else None, tuple(tokens)), self.page_size, copy)
        self.pages[page.key] = page
        if pages:
            pages[-1].holders += 1   # what lies behind a page keeps it
        return page

    def evict(self):
        """Drops the least recently used page that nobody holds. False if there is none."""
        free = [page for page in self.pages.values() if not page.holders]
        if not free:
            return False
        page = min(free, key=lambda page: page.used)
        del self.pages[page.key]
        if page.key[0] is not None:
            page.key[0].holders -= 1
        return True


class Rectangle:
    """
    Left-padded (B, T): one row per request, as wide as the longest row, so the next token always comes
    from the last column. Each request keeps its own cache, so the pasts, of different lengths too, are
    gathered into a second rectangle in front. For each layer a row of keys is

        | . . . past past past | . . new new |
          P - p pads, p past     T - n pads, n new      S = P + T keys

    and the mask must hide the pads of *both* parts. The published version of this layout marks all new
    slots as valid; there, a decode row that shares the pass with a chunk attends to its own padding.
    """

    def __init__(self, plan, device=None):
        self.copied_bytes = allocate(plan)
        self.plan, self.starts, self.finished = plan, [request.computed for request, _ in plan], []
        B, T, P = len(plan), max(n for _, n in plan), max(self.starts)
        self.P = P

        tokens = torch.zeros(B, T, dtype=torch.long)
        positions = torch.zeros(B, T, dtype=torch.long)
        mask = torch.zeros(B, 1, 1, P + T, dtype=torch.bool)       # (B, 1, 1, S): the same for all heads and queries
        for b, ((request, n), start) in enumerate(zip(plan, self.starts)):
            tokens[b, T - n:] = torch.tensor(request.tokens[start:start + n])
            positions[b, T - n:] = torch.arange(start, start + n)  # its own, not the column's
            mask[b, ..., P - start:P] = True                       # its past
            mask[b, ..., P + T - n:] = True                        # its new tokens; not the pads before them
        self.tokens, self.positions, self.mask = tokens.to(device), positions.to(device), mask.to(device)

        # A partial prefill has a last column too, but no next token yet: it is not sampled from.
        complete = [b for b, (request, n) in enumerate(plan) if n == request.todo]
        self.sampled = [plan[b][0] for b in complete]
        self.rows = (torch.tensor(complete, dtype=torch.long, device=device), -1)

        self.padded_keys = int((~mask).sum())
        self.score_entries = B * T * (P + T)

    def attend(self, layer, q, k, v):
        B, nh, T, hs = k.shape
        past_k, past_v = k.new_zeros(2, B, nh, self.P, hs)
        for b, ((request, _), start) in enumerate(zip(self.plan, self.starts)):
            if start:
                past_k[b, :, self.P - start:], past_v[b, :, self.P - start:] = request.kv.read(layer, start)
        out, all_k, all_v = head(q, k, v, past_k, past_v, self.mask)
        for b, ((request, n), start) in enumerate(zip(self.plan, self.starts)):
            request.kv.write(layer, start, k[b, :, T - n:], v[b, :, T - n:])   # each row without its own padding
        # once into the padded past, once more to put the new keys behind it
        self.copied_bytes += past_k.nbytes + past_v.nbytes + all_k.nbytes + all_v.nbytes
        return out


class Flat:
    """
    Ragged: all new tokens of all requests in one stream (N,), with no batch axis and so no padding.
    `cu_seqlens` holds the boundaries: request i owns tokens cu_seqlens[i] to cu_seqlens[i + 1].

    attention="mask":    one attention over everything, with a block-diagonal mask. Right, but the scores
                         across requests are computed and thrown away, and the keys must be brought together.

                keys   A A A A   B B   D D D D D
            A          x x x x   . .   . . . . .
            B          . . . .   x x   . . . . .
            D          . . . .   . .   x x x . .
            D          . . . .   . .   x x x x .
            D          . . . .   . .   x x x x x

    attention="varlen":  only the blocks: each request's queries against its own cache, read as a view.
                         On a GPU one kernel runs this loop; the arithmetic is the same.

    kernel: a faster way for "varlen", from `model.optimize()`: where caches lie, and the loop; None: as here
    """

    def __init__(self, plan, device=None, attention="varlen", kernel=None):
        if attention not in ("mask", "varlen"):
            raise ValueError(f"attention must be 'mask' or 'varlen', not {attention!r}")
        kernel = kernel if attention == "varlen" else None
        self.copied_bytes = allocate(plan, kernel.kv if kernel else KV)
        self.attention = attention
        self.plan, self.starts, self.finished = plan, [request.computed for request, _ in plan], []
        self.ends = [start + n for (_, n), start in zip(plan, self.starts)]           # each request's number of keys
        self.cu_seqlens = [0, *accumulate(n for _, n in plan)]

        new = [request.tokens[start:end] for (request, _), start, end in zip(plan, self.starts, self.ends)]
        positions = torch.cat([torch.arange(start, end) for start, end in zip(self.starts, self.ends)])
        self.tokens = torch.tensor(sum(new, []), device=device)                       # (N,)
        self.positions = positions.to(device)

        complete = [i for i, (request, n) in enumerate(plan) if n == request.todo]
        self.sampled = [plan[i][0] for i in complete]
        self.rows = torch.tensor([self.cu_seqlens[i + 1] - 1 for i in complete], dtype=torch.long, device=device)

        self.padded_keys = 0
        if attention == "varlen":
            self.score_entries = sum(n * end for (_, n), end in zip(plan, self.ends))
        else:
            owner = torch.arange(len(plan))
            owner_q = owner.repeat_interleave(torch.tensor([n for _, n in plan]))     # (N,) whose token is this?
            owner_k = owner.repeat_interleave(torch.tensor(self.ends))                # (S,) whose key?
            position_k = torch.cat([torch.arange(end) for end in self.ends])          # (S,)
            self.mask = ((owner_q[:, None] == owner_k) & (position_k <= positions[:, None])).to(device)   # (N, S)
            self.score_entries = self.mask.numel()
        self.fast = kernel.step(self) if kernel else None

    def attend(self, layer, q, k, v):                                                 # (nh, N, hs)
        if self.fast:
            return self.fast(layer, q, k, v)
        slices = [slice(s, e) for s, e in zip(self.cu_seqlens, self.cu_seqlens[1:])]
        for (request, _), new, start in zip(self.plan, slices, self.starts):
            request.kv.write(layer, start, k[:, new], v[:, new])
        caches = [request.kv.read(layer, end) for (request, _), end in zip(self.plan, self.ends)]

        if self.attention == "varlen":                                                # skip: compute the blocks alone
            out = torch.empty_like(q)
            for new, (keys, values) in zip(slices, caches):
                out[:, new], _, _ = head(q[:, new], keys, values)                     # (nh, n, hs)
            return out

        all_k, all_v = (torch.cat(part, dim=-2) for part in zip(*caches))              # (nh, S, hs)
        self.copied_bytes += all_k.nbytes + all_v.nbytes
        # Head's own triangle over the whole stream hides nothing more: the keys of earlier requests only move it right
        out, _, _ = head(q, all_k, all_v, mask=self.mask)                             # compute all, hide most
        return out
