# %% [markdown]
# # 6. What a token costs
#
# The other notebooks count slots, scores and pages. This one asks a single question: how long does
# a step take? You say what limits it, arithmetic or memory, calculate its time, and choose a token
# budget by it.
#
# It is about one machine and one model. You need no GPU, as all times are calculated. The machine
# is an A100: by its data sheet, `PEAK` is 312 · 10¹² operations a second, and `BANDWIDTH` 2,039 ·
# 10⁹ bytes a second. The model is Llama 2 7B in fp16, two bytes a number. Of its 6.74 · 10⁹
# parameters a pass multiplies by 6.6 · 10⁹, called `PARAMETERS`. (The others are the table of
# embeddings, of which it reads a row for each token.)

# %%
from lesson import ask, figures, folded, letters, lines, on_a100
from exercises import BANDWIDTH, PARAMETERS, PEAK, exercise
import functools
import math
import random
import torch
from unittest.mock import patch
import generate_chunked
import generate_interleaved
from generate_dynamic import Rectangle
from generate_ragged import Flat
from lab.views.report import latencies

# %% [markdown]
# ## Two limits
#
# A *row* in this notebook is one slot of a pass, a token or a pad: what the weights are multiplied
# by. A forward pass reads every weight once, and uses it for every row in two operations, a
# multiplication and an addition. So a pass needs at least the larger of two times: all bytes
# divided by the bandwidth, and all operations divided by the peak. That is a *roofline*.

# %%
ask("6.1: By this roofline, how many times as long as a pass of one row does a pass of 64 rows "
    "take, and one of 306? ([.., ..], to 5%)", guess=...)

# %%
with folded():
    for rows in 1, 64, 153, 306, 612:
        print(f"{rows:3} rows: reading {2e3 * PARAMETERS / BANDWIDTH:4.1f} ms, multiplying "
              f"{2e3 * rows * PARAMETERS / PEAK:4.1f} ms")

# %% [markdown]
# As long as reading takes longer than multiplying, more rows are free: if there were only weights
# to read, 64 requests that decode together would take the time of one. This is why one batches. (A
# CPU can do less arithmetic for each byte that it reads, so there fewer rows are free.)
#
# ## What does not get cheaper
#
# Weights serve all rows. Keys and values do not: each request has its own, and reads all of them
# for one new token. A cached token has 512 KiB of them (notebook 1).

# %%
ask("6.2: 32 requests decode, each with 1,000 cached tokens. How many GB (10⁹ bytes) of keys and "
    "values does the step read? (to 2%)", guess=...)

# %% [markdown]
# Operations per byte are called *arithmetic intensity*. A weight takes two bytes, and two
# operations in each row: with 32 rows that is 32 operations per byte. A key's or value's number
# takes two bytes, too, but two operations in one row only, that of its own request: 1 operation per
# byte, however many requests there are. Batching helps the weights, not the cache.
#
# ## Your turn: the time of a step
#
# The repository's simulator runs the stages' own schedulers, and calculates the time of each step
# instead of computing it. ([docs/gpu.md](../docs/gpu.md) compares it with real runs.)
# What it knows of an A100, in the order in which you need it:
#
# 1. *Reading.* A GPU reaches 0.85 of the bandwidth in its data sheet. So the weights alone take
#    2 · 6.6 · 10⁹ bytes / (0.85 · 2,039 · 10⁹ bytes a second) = 7.616 ms.
# 2. *Arithmetic.* It reaches 0.71 of its peak. And it multiplies whole blocks of rows, of which the
#    last is rarely full: a pass costs as if it had 85 rows more. So one row takes
#    2 · (1 + 85) · 6.6 · 10⁹ operations / (0.71 · 312 · 10¹² a second) = 5.125 ms. (No data sheet
#    has 85, 0.71 or 0.85. They were chosen so that the formula fits published measurements.)
# 3. *Both at once.* If they overlapped perfectly, the step would take the longer of the two, 7.6
#    ms; one after the other, their sum, 12.7 ms. What is measured lies between, near √(arithmetic²
#    + reading²): √(5.125² + 7.616²) = 9.180 ms. Where one is much longer, it is nearly that alone.
# 4. *The engine.* Between two passes 0.75 ms go by, and 25 µs for each token that is sampled: in a
#    decode step, one for each row. So one row, with nothing cached, takes 9.180 + 0.775 = 9.955 ms.
#
# Write this for decode steps: `rows` requests of one new token each, which read `kv_tokens` cached
# tokens in all, 512 KiB for each. (The operations of attention are few. Leave them out.)

# %% tags=["exercise"]
@exercise
def step_time(rows, kv_tokens):
    """Seconds of a decode step on the A100."""
    ...

# %% [markdown]
# (So the 153 rows of question 6.1 are the data sheet's. With 85 rows more, at 0.71 of the peak and
# 0.85 of the bandwidth, some 43 rows take as long to multiply as the weights to read.)
#
# ## Which budget?
#
# 32 requests decode. At step 40 a prompt of 2,000 tokens arrives, and is cut into chunks by the
# token budget, beside the 32. A small budget keeps each step short, and cuts the prompt into more
# chunks.

# %% jupyter={"source_hidden": true}
def waits(budget, decoding=32):
    """(ms to the newcomer's first token, the longest ms between two tokens)"""
    # letters(new tokens, {name: arrival}, name=tokens of its prompt)
    requests = [*letters(150, **{f"r{i}": 8 for i in range(decoding)}),
                *letters(8, {"N": 40}, N=2000)]
    times = latencies(on_a100("ragged, varlen", requests, max_batch=decoding + 1,
                              token_budget=budget))
    return 1e3 * times["ttft_seconds"][-1], 1e3 * max(times["itl_seconds"])

BUDGETS = 64, 128, 256, 512, 1024, 2048
TTFT, ITL = ({budget: waits(budget)[i] for budget in BUDGETS} for i in (0, 1))

# %%
ask("6.3: With a budget of 256 tokens a step: how many steps compute tokens of the newcomer's "
    "prompt?", guess=...)

# %% [markdown]
# With a budget of 2,048 it is one long step. Is the newcomer's TTFT shorter then, or longer than
# with 256? Guess, then unfold.

# %%
with folded():
    for budget in BUDGETS:
        print(f"{budget:5} tokens: TTFT {TTFT[budget]:3.0f} ms, longest ITL {ITL[budget]:3.0f} ms")
    lines({"TTFT of the newcomer": TTFT.items(), "longest ITL of the others": ITL.items()},
          log=True, xlabel="token budget", ylabel="ms, calculated")

# %% [markdown]
# What the 32 gain, the newcomer pays: its prompt takes more steps, and each of them reads all
# weights and serves the decodes first.
#
# - From 2,048 tokens down to 512, the ITL falls almost with the budget, and the TTFT grows by a
#   quarter: such a step is long by its arithmetic, so half the rows take nearly half the time.
# - From 128 to 64 a step is little shorter: now reading the weights takes most of it, which is the
#   same for all rows. And the prompt gets 32 tokens of a step instead of 96, as the decodes come
#   first. So the TTFT more than doubles.
#
# **Turn this knob.** Let 60 requests decode instead of 32: `waits(64, decoding=60)`. What happens
# to the newcomer's TTFT with a budget of 64, and with 512?
# <details><summary>Answer</summary>
#
# With 64 it is 2.4 times as long: while 60 requests decode, they leave 4 tokens a step to the
# prompt, where 32 left 32. With 512 it is 1.1 times as long. A budget must be well above the number
# of requests that decode.</details>
#
# ## All stages
#
# p50 is the median, p99 the value that 99% do not exceed. 32 requests come at step 0; prompts of 8
# to 512 tokens, answers of 8 to 128, at most 512 tokens a step. On a CPU, naive batching makes less
# than twice as many tokens a second as one request at a time, because padding costs so much
# ([measured](../docs/measurements.md)). And here, naive beside unbatched? Guess, then unfold.

# %%
dice = random.Random(0)
sizes = [[round(2 ** dice.uniform(3, high)) for high in (9, 7)] for _ in range(32)]
many = letters({f"r{i}": new for i, (_, new) in enumerate(sizes)},
               **{f"r{i}": prompt for i, (prompt, _) in enumerate(sizes)})
with folded():
    print(f"{'calculated':18} tokens/s   TTFT mean   ITL p50   ITL p99")
    for stage in "unbatched", "naive", "dynamic", "chunked", "interleaved", "ragged, varlen":
        f = figures(on_a100(stage, many, max_batch=32, token_budget=512))
        print(f"{stage:18} {f['tokens_per_s']:8.0f} {f['ttft_ms']['mean']:8.0f} ms "
              f"{f['itl_ms']['p50']:6.0f} ms {f['itl_ms']['p99']:6.0f} ms")

# %% [markdown]
# Here, rows are nearly free: even naive batching makes six times as many. But later stages are not
# better in every column.
#
# - *Unbatched* has the best ITL, because nothing delays the one request that runs; but a request
#   waits until all before it are done.
# - *Dynamic* computes fewer slots than *naive*, and is slower: in each step it copies all pasts
#   into a new rectangle, as do *chunked* and *interleaved*. *Ragged* reads caches in place.
# - *Interleaved* is slower than *chunked*, with the worst p99 and a worse TTFT than *naive*: beside
#   a chunk of hundreds of tokens, each decode's row is padded to that width.
# - Chunks are there to lower the ITL, and here they raise its p99. All requests come at once.
#   *Dynamic* computes all prompts in its first step, before any request has a first token. So no
#   gap between two tokens contains a prompt. With *chunked*, the first requests already decode
#   while the last prompts are computed. If a figure contradicts the purpose of a method, ask what
#   was measured.
#
# ## What fusing is worth
#
# *Interleaved* does in one pass what *chunked* does in two. So it reads the weights half as often
# (notebook 3), and yet it is slower. Is it wrong to fuse, then? Two other costs are in its way:
# pads, and copied pasts. We take them away one by one, from both stages, with the same 32 requests.
# *Free copies* is a rectangle whose copies take no time. *Stream* is the layout of *ragged*, which
# has neither copies nor pads.

# %% jupyter={"source_hidden": true}
class FreeCopies(Rectangle):
    def cost(self):
        return super().cost() | {"copied_bytes": 0}

def with_layout(module, layout):
    """A stage that plans as this module's does, with another layout than its rectangle."""
    @functools.wraps(module.generate)
    def generate(*args, **knobs):
        with patch.object(module, "Rectangle", layout):
            return module.generate(*args, **knobs)
    return generate

# %%
layouts = {"rectangle": Rectangle, "free copies": FreeCopies, "stream": Flat}
planners = {"two passes": generate_chunked, "one pass": generate_interleaved}
fusion = {}
for layout in layouts:
    for planner in planners:
        stage = with_layout(planners[planner], layouts[layout])
        f = fusion[layout, planner] = figures(on_a100(stage, many, max_batch=32, token_budget=512))
        print(f"{layout:12} {planner:10} {f['tokens_per_s']:8.0f} tokens/s "
              f"{f['itl_ms']['p99']:6.0f} ms ITL p99")

# %% [markdown]
# Compare the two lines of each layout. In a rectangle, one pass is slower even if copies are free:
# so its pads are to blame. In a stream, one pass is faster: 5% more tokens a second here, and a
# shorter p99. That is what fusing is worth by itself. It is more if a pass has few rows: then
# reading the weights is nearly all that it does.
#
# And in a rectangle, with few pads? Seven requests decode, and a chunk of n tokens is computed
# beside them: either in two passes, or in one rectangle of 8 rows, n wide.

# %%
ask("6.4: By the roofline alone: up to which n is the rectangle at least as fast as the two "
    "passes?", guess=...)

# %% jupyter={"source_hidden": true}
def step_beside_a_chunk(n, layout, planner):
    """ms of the step in which a prompt of n tokens arrives beside seven that decode."""
    requests = [*letters(30, **{f"r{i}": 8 for i in range(7)}), *letters(2, {"N": 5}, N=n)]
    stage = with_layout(planners[planner], layouts[layout])
    passes = on_a100(stage, requests, max_batch=8, token_budget=1024).passes
    return 1e3 * sum(p.seconds for p in passes if p.step == 5)

# %%
widths = 2, 4, 8, 16, 24, 32, 48, 64
ways = {"two passes": ("free copies", "two passes"), "one rectangle": ("free copies", "one pass"),
        "one stream": ("stream", "one pass")}
with folded():
    lines({name: [(n, step_beside_a_chunk(n, *way)) for n in widths] for name, way in ways.items()},
          log=True, xlabel="tokens of the chunk, beside 7 decodes", ylabel="ms, calculated")

# %% [markdown]
# With what a GPU reaches of its data sheet, the lines of the two passes and of the rectangle meet
# near 28. The stream is always faster: it saves the second reading, and has no pads to pay for.
#
# ## A price of speed: the last bits
#
# Speed has a price of another kind. `check` says "identical", and means: up to rounding. Why not
# exactly? A float32 has 24 binary digits, and every addition rounds to them. So the order of
# additions shows:

# %%
print("(1e8 + -1e8) + 1 =", ((torch.tensor(1e8) + -1e8) + 1).item())
ask("6.5: In float32, how much is 1e8 + (-1e8 + 1)?", guess=...)

# %% [markdown]
# A kernel, a program for the GPU, takes the order that is fastest for the shape it is given, and a
# batch changes the shape. So the last digits of a request's logits depend on which others happen to
# run. (One can write kernels that add in the same order for every shape:
# [docs/kernels.md](../docs/kernels.md).)
#
# ## Two questions
#
# **1.** A server decodes for 8 users, and memory limits its speed. A ninth arrives. What does that
# cost the other eight, once its prompt has been computed?
# <details><summary>Answer</summary>
#
# Almost nothing in the linears, whose weights are read anyway. In attention, the ninth's own keys
# and values are read as well, so the step takes longer by that share.</details>
#
# **2.** *Speculative decoding* lets a request guess its next four tokens, and checks them in one
# pass over five rows. For whom does that pay: for one user, or for a batch of 200?
# <details><summary>Answer</summary>
#
# For one: five rows take the time of one, and each right guess saves a pass. With 200 requests a
# pass has 1,000 rows, far above 153: with 512 cached tokens each, it takes nearly twice as long
# ([docs/beyond.md](../docs/beyond.md#guessing-tokens)). Batching uses up the idle arithmetic that
# guessing lives on.</details>
#
# <details><summary>Claims of published texts that were met here</summary>
#
# *Wrong as published:* `torch.compile` wants static shapes (H10 of
# [docs/sources.md](../docs/sources.md)). One compile serves all numbers of rows.
#
# *Holds:* in decode steps attention's intensity stays near 1, and that of the linears rises with
# the rows (R7). P6 to P9 say how much faster packing is, when, and how much memory it saves:
# [docs/beyond.md](../docs/beyond.md#prepacking) has our measurements.</details>
#
# **Next:** [07_how_much_fits](07_how_much_fits.ipynb) asks how many requests fit at once.
