# %% [markdown]
# # 6. What a token costs
#
# The other notebooks count slots, scores and pages. This one asks a single question: how long does
# a step take? Afterwards you can
#
# - say whether a step is limited by arithmetic or by memory, with a calculator;
# - say what a batch makes cheaper, and what it does not;
# - calculate the time of a step, and choose a token budget by it.
#
# All with one machine and one model: an A100 (`PEAK` is 312 · 10¹² operations a second and
# `BANDWIDTH` 2,039 · 10⁹ bytes, by its data sheet), and Llama 2 7B in fp16, which reads and
# multiplies by 6.6 · 10⁹ `PARAMETERS`. No GPU is needed: its times are calculated.

# %%
from lesson import ask, figures, folded, letters, lines, model, on_a100
from exercises import BANDWIDTH, PARAMETERS, PEAK, exercise
import math
import random
import torch
from lab.views.report import latencies

# %% [markdown]
# ## Two limits
#
# A forward pass reads every weight once, and multiplies it with every row: two operations, a
# multiplication and an addition. So a pass over M rows needs at least the larger of two times: all
# bytes divided by the bandwidth, and all operations divided by the peak. That is a *roofline*.

# %%
ask("6.1: From how many rows on does multiplying take longer than reading the weights?", guess=...)

# %%
ROWS = [2 ** i for i in range(11)]
reading = [(rows, 1e3 * 2 * PARAMETERS / BANDWIDTH) for rows in ROWS]
multiplying = [(rows, 1e3 * 2 * rows * PARAMETERS / PEAK) for rows in ROWS]
with folded():
    lines({"reading the weights": reading, "multiplying": multiplying}, log=True,
          xlabel="rows in the pass", ylabel="ms at least, calculated")

# %% [markdown]
# By this estimate, more rows are free up to that number. This is why one batches: as far as weights
# go, 64 requests that decode together take the time of one. A CPU has less arithmetic for each byte
# that it reads, so there rows are free for a shorter while.
#
# ## What does not get cheaper
#
# Weights serve all rows. Keys and values do not: each request has its own, and reads all of them
# for one new token. A cached token has 512 KiB of them (notebook 1).

# %%
ask("6.2: 32 requests decode, each with 1,000 cached tokens. How many GB (10⁹ bytes) of keys and "
    "values does the step read?", guess=...)

# %%
print("requests   operations per byte: linears   attention")
for requests in 1, 8, 32:
    keys = requests * 1000 * 2 * 32 * 32 * 128 * 2        # bytes of keys and values
    attention = requests * 1000 * 2 * 2 * 32 * 32 * 128   # q k, and weights v
    print(f"{requests:8} {2 * requests * PARAMETERS / (2 * PARAMETERS):30.1f} "
          f"{attention / keys:11.1f}")

# %% [markdown]
# Operations per byte are called *arithmetic intensity*. Each further request raises that of the
# linear layers. That of attention stays where it is: batching helps the weights, not the cache.
#
# ## Your turn: the time of a step
#
# `lab/simulate/` runs the stages' own schedulers on a model that computes nothing, and moves a
# clock on by what the layouts count. [docs/gpu.md](../docs/gpu.md) compares it with published
# measurements. What it knows of an A100, in the order in which you need it:
#
# 1. *Reading.* A GPU reaches 0.85 of the bandwidth in its data sheet. So the weights alone take
#    2 · 6.6 · 10⁹ bytes / (0.85 · 2,039 · 10⁹ bytes a second) = 7.6 ms.
# 2. *Arithmetic.* It reaches 0.71 of its peak, and that with full *tiles* only: a GPU multiplies
#    blocks of many rows, 128 for instance. One row costs as much as a full tile, 130 rows cost two.
#    On average over sizes that is as if each pass had 85 rows more (a number fitted to
#    measurements). So do not round up: add 85.
#    So one row takes 2 · (1 + 85) · 6.6 · 10⁹ operations / (0.71 · 312 · 10¹² a second) = 5.1 ms.
# 3. *Both at once.* If they overlapped perfectly, the step would take the longer of the two, 7.6
#    ms; one after the other, their sum, 12.7 ms. What is measured lies between, near √(arithmetic²
#    + reading²): √(5.1² + 7.6²) = 9.2 ms. Where one is much longer, it is nearly that one alone.
# 4. *The engine.* Between two passes 0.75 ms go by, and 25 µs for each token that is sampled.
#
# Write this for decode steps: `rows` requests of one new token each, which read `kv_tokens` cached
# tokens in all, 512 KiB for each. (The operations of attention are few. Leave them out.)

# %% tags=["exercise"]
@exercise
def step_time(rows, kv_tokens):
    """Seconds of a decode step on the A100."""
    ...

# %% [markdown]
# ## Which budget?
#
# 32 requests decode. At step 40 a prompt of 2,000 tokens arrives, and is cut into chunks by the
# token budget. A small budget keeps each step short, so the ITL of the 32 is good. What does the
# newcomer's TTFT do?

# %%
def waits(budget, decoding=32):
    """(ms to the newcomer's first token, the longest ms between two tokens)"""
    requests = [*letters(150, **{f"r{i}": 8 for i in range(decoding)}),
                *letters(8, {"N": 40}, N=2000)]
    times = latencies(on_a100("ragged, varlen", requests, max_batch=decoding + 1,
                              token_budget=budget))
    return 1e3 * times["ttft_seconds"][-1], 1e3 * max(times["itl_seconds"])

BUDGETS = 64, 128, 256, 512, 1024, 2048
TTFT, ITL = ({budget: waits(budget)[i] for budget in BUDGETS} for i in (0, 1))
ask("6.3: From 2,048 tokens a step to 256: is the newcomer's TTFT shorter as well? (yes or no)",
    guess=...)

# %%
with folded():
    lines({"TTFT of the newcomer": TTFT.items(), "longest ITL of the others": ITL.items()},
          log=True, xlabel="token budget", ylabel="ms, calculated")

# %% [markdown]
# Down to about 512 tokens, the ITL falls almost with the budget, and the TTFT grows little: such a
# step still has far more than 153 rows, so its arithmetic is busy. Below that a step is limited
# more and more by reading: it takes nearly the same time for fewer tokens, and only the TTFT pays.
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
# to 512 tokens, answers of 8 to 128, at most 512 tokens a step. Before you unfold it: on a CPU,
# padding costs so much that naive batching makes fewer tokens than one request at a time. Here?

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
# Later stages are not better in every column. Unbatched has the best ITL, because nothing delays
# the one request that runs; but a request waits until all before it are done. More rows are nearly
# free here, so even a padded batch makes more tokens. And chunks, which are there to lower the ITL,
# raise its p99. Here all requests come at once. *Dynamic* computes all prompts in its first step,
# before anybody has a first token, so no gap between two tokens contains a prompt; in *chunked* the
# first ones decode while the last prompts are computed. If a figure contradicts the purpose of a
# method, ask what was measured.
#
# ## A price of speed: the last bits
#
# What is fastest for one shape is not fastest for another. `check` says "identical", and means: up
# to rounding. Why not exactly? A float32 has 24 binary digits, and every addition rounds to them.
# So the order of additions shows:

# %%
print("(1e8 + -1e8) + 1 =", ((torch.tensor(1e8) + -1e8) + 1).item())
ask("6.4: In float32, how much is 1e8 + (-1e8 + 1)?", guess=...)

# %% [markdown]
# A kernel takes the order that is fastest for the shape it is given, and a batch changes the shape.
# So the last digits of a request's logits depend on which others happen to run. `optimize(model)`
# of `lab.compiled` computes in one order ([docs/kernels.md](../docs/kernels.md)).
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
# pass has 1,000 rows, far above 153, so it takes about five times as long
# ([docs/guessing.md](../docs/guessing.md)). Batching uses up the idle arithmetic that guessing
# lives on.</details>
#
# <details><summary>Claims of published texts that were met here</summary>
#
# By their names in [docs/sources.md](../docs/sources.md): R7 (attention's intensity stays), P7
# (what predicts the speedup of packing) and P9 (latency grows with k) hold. P6 and P8 (1.6 to 3.5
# times as fast, 16 times as many prompts) hold for short, skewed lengths only
# ([docs/prepacking.md](../docs/prepacking.md)). *Wrong as published:* H10, as one compile serves
# all numbers of rows; CUDA graphs do want static shapes.</details>
#
# **Next:** [07_how_much_fits](07_how_much_fits.ipynb) asks how many requests fit at once.
