"""
The kernel: paged attention in one launch, which reads each page where it lies.

`paged_attention` in generate_paged.py loops over the requests, gathers the pages of each into a
copy, and stores all scores. A GPU would wait for the host at every turn of the loop, and spend most
of its time on the copies. A *kernel* is a function that runs on the GPU, in many *programs* at
once; one call from the host, a *launch*, starts them all. Here one program computes one head of one
block of at most 16 new tokens of one request. It knows its numbers, and finds the rest in the four
tensors:

    request 1, its new tokens 0 to 2, head 0           page_size 4, seq_lens[1] = 10

    query_start_loc   0  1  4         its queries are rows 1, 2 and 3 of the stream
    block_table       .  .  .
                      5  0  7         its keys are in these pages

    for each page:    5               0               7
    keys              0  1  2  3      4  5  6  7      8  9  .  .      (. no key: masked)
    query at 7        x  x  x  x      x  x  x  x      .  .  .  .      the causal rule, as in Head
    query at 8        x  x  x  x      x  x  x  x      x  .  .  .
    query at 9        x  x  x  x      x  x  x  x      x  x  .  .

No copy is made, and scores are kept only while their page is read. This is *online softmax*,
FlashAttention's idea. A softmax needs the largest of all scores, and that is known only at the end.
So the program keeps the largest score so far, `best`, and relative to it two sums:
`total`, of exp(score - best), and `acc`, of exp(score - best) * value. When a page brings a larger
score, both sums are *rescaled* by exp(old best - new best). With scores 1, then 3:

    after the first    best 1    total exp(1 - 1) = 1
    after the second   best 3    total 1 * exp(1 - 3) + exp(3 - 3) = 0.135 + 1 = 1.135
    all at once        best 3    total exp(1 - 3) + exp(3 - 3)     = 1.135

The output is acc / total. A decode is a block with one token, a chunk has several: the same code.

It is written in Triton, a language in Python for such programs. On a CPU, Triton interprets it:
the results are right, and it is far slower than the loop.

    python -m beyond.kernel    equal tokens, copied bytes; on a GPU, times (docs/kernels.md)

An exercise: leave out the rescaling (`shrink`). Which requests still get the right tokens, and why?
Those whose largest score lies in their first page, and those with one page.
"""
from __future__ import annotations

if __spec__ is None:
    raise SystemExit("start it in the folder above: python -m beyond.kernel")

import math
import os
import sys

import torch

from generate_paged import Paged

IMPORTED_BEFORE = "triton" in sys.modules and not os.environ.get("TRITON_INTERPRET")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")   # read by Triton when it is imported
try:
    import triton
    import triton.language as tl
except ImportError:   # this module can be imported without it
    triton = None

QUERIES = 16   # new tokens of a block; a GPU's matrix units want 16 rows at least
TOO_LATE = "Triton was imported before beyond.kernel: without a GPU, set TRITON_INTERPRET=1 first"
MISSING = "Triton is not installed: pip install triton (Linux only; torch for CUDA brings it)"


def compiled(function):
    """As a kernel, if Triton is there."""
    return triton.jit(function) if triton else function


@compiled
def attention_kernel(
        q, k_pages, v_pages, out,                      # addresses of the tensors' first numbers
        query_start_loc, seq_lens, block_table,
        scale, page_size, head_size, kv_heads,
        q_head, q_token,                               # strides: how far it is to the next head,
        k_head, k_page, k_slot,                        # token, page or slot
        table_row,
        PAGE: tl.constexpr, HEAD: tl.constexpr, QUERIES: tl.constexpr):
    """One program. PAGE and HEAD: page_size and head_size, rounded up to powers of two."""
    request = tl.program_id(0)
    block = tl.program_id(1)
    head = tl.program_id(2)
    start = tl.load(query_start_loc + request)
    n = tl.load(query_start_loc + request + 1) - start   # its new tokens
    S = tl.load(seq_lens + request)                      # its keys, the new ones included
    if block * QUERIES >= n:
        return   # another request has more blocks

    # the queries of this block
    rows = block * QUERIES + tl.arange(0, QUERIES)       # 0 to n - 1 are tokens of this request
    features = tl.arange(0, HEAD)
    is_query = (rows < n)[:, None] & (features < head_size)[None, :]
    query_at = head * q_head + (start + rows)[:, None] * q_token + features[None, :]
    queries = tl.load(q + query_at, mask=is_query, other=0.0)
    positions = S - n + rows                             # in the sequence: the last n of S

    best = tl.full((QUERIES,), -float("inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    acc = tl.zeros((QUERIES, HEAD), tl.float32)
    kv_head = head % kv_heads                            # a Llama's groups share key heads
    keys_seen = tl.minimum(S, S - n + (block + 1) * QUERIES)   # no query of this block sees more
    for i in range(0, tl.cdiv(keys_seen, page_size)):
        page = tl.load(block_table + request * table_row + i)
        slots = tl.arange(0, PAGE)
        keys = i * page_size + slots                     # the positions of this page's keys
        is_key = (slots < page_size) & (keys < S)
        key_at = kv_head * k_head + page * k_page + slots[:, None] * k_slot + features[None, :]
        is_stored = is_key[:, None] & (features < head_size)[None, :]
        k = tl.load(k_pages + key_at, mask=is_stored, other=0.0)
        v = tl.load(v_pages + key_at, mask=is_stored, other=0.0)

        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        seen = is_key[None, :] & (keys[None, :] <= positions[:, None])
        scores = tl.where(seen, scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - new_best[:, None])
        shrink = tl.exp(best - new_best)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = new_best
    output = acc / total[:, None]
    tl.store(out + query_at, output.to(out.dtype.element_ty), mask=is_query)


def paged_attention(q, k_pages, v_pages, query_start_loc, seq_lens, block_table):
    """
    As generate_paged.paged_attention, by the kernel; sums are in float32. Returns (..., nh, N, hs).
    ValueError if Triton is not installed, or does not interpret where there is no GPU.
    """
    if triton is None:
        raise ValueError(MISSING)
    if IMPORTED_BEFORE and not q.is_cuda:
        raise ValueError(TOO_LATE)
    most = int((query_start_loc[1:] - query_start_loc[:-1]).max())   # new tokens of a request
    shape = q.shape
    q = q.flatten(0, -3).contiguous()                   # (heads, N, hs): groups are more heads
    out = torch.empty_like(q)
    kv_heads, _, page_size, head_size = k_pages.shape
    grid = (len(seq_lens), triton.cdiv(most, QUERIES), q.size(0))    # one program for each
    attention_kernel[grid](
        q, k_pages, v_pages, out,
        query_start_loc.to(q.device), seq_lens.to(q.device), block_table,
        1 / math.sqrt(head_size), page_size, head_size, kv_heads,
        q.stride(0), q.stride(1),
        k_pages.stride(0), k_pages.stride(1), k_pages.stride(2),
        block_table.stride(0),
        PAGE=rounded_up(page_size), HEAD=rounded_up(head_size), QUERIES=QUERIES)
    return out.view(shape)


def rounded_up(size):
    """To a power of two of at least 16, as a kernel's tiles must be."""
    return max(16, triton.next_power_of_2(size))


class PagedByKernel(Paged):
    """Paged, whose attention is the kernel: generate_prefix.generate(..., layout=PagedByKernel)."""

    def read_pages(self, q, k_pages, v_pages):
        return paged_attention(q, k_pages, v_pages, self.query_start_loc, self.seq_lens,
                               self.block_table)

    def cost(self):
        return {**super().cost(), "copied_bytes": 0}


if __name__ == "__main__":
    from lab.essays import kernel, main
    main(kernel, __doc__)
