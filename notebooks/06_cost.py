# %% [markdown]
# # 6. What a step costs
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
from lesson import STAGES, ask, folded, letters, lines, model, results, source
from exercises import BANDWIDTH, PARAMETERS, PEAK, exercise
import math
import random
import torch
import torch.distributed as dist
from lab.loading.arrivals import workload
from lab.simulate.calculated import figures, simulate
from lab.simulate.hardware import GPUS, MODELS
from beyond.tensor_parallel import all_reduces, column_parallel, shard
from copy import deepcopy
from lab.flags import knobs_of
from torch.testing._internal.distributed.fake_pg import FakeStore
from lab.views.report import latencies

# %% [markdown]
# ## Two limits
#
# A forward pass reads every weight once, and multiplies it with every row: two operations, a
# multiplication and an addition. So a pass over M rows needs at least the larger of two times: all
# bytes divided by the bandwidth, and all operations divided by the peak. That is a *roofline*.

# %%
ask("6.1: From how many rows on does multiplying take longer than reading the weights?",
    guess=...)

# %%
with folded():
    for rows in 1, 8, 32, 128, 256, 512:
        print(f"{rows:3} rows: reading {2 * PARAMETERS / BANDWIDTH * 1e3:.1f} ms, "
              f"multiplying {2 * rows * PARAMETERS / PEAK * 1e3:5.1f} ms")

# %% [markdown]
# By this estimate, more rows are free up to that number. This is why one batches. A CPU has less
# arithmetic for each byte that it reads, so its rows are free for a shorter while. Here is GPT-2 on
# two cores, measured, beside its own roofline:

# %%
measured, cpu = results("rows"), results("bench")[0]
print(measured["where"], f"\n{cpu['peak'] / 1e9:.0f} GFLOP/s, {cpu['bandwidth'] / 1e9:.0f} GB/s")
passes = [(n, 1e3 * seconds) for n, seconds in measured["points"]]
least = [(n, 1e3 * max(4 * 123.5e6 / cpu["bandwidth"], 2 * n * 123.5e6 / cpu["peak"]))
         for n, _ in passes]
lines({"measured": passes, "roofline": least}, log=True, xlabel="rows",
      ylabel="ms for one forward pass");

# %% [markdown]
# The curve has the shape of the roofline: flat first, then in proportion to the rows. It lies above
# it, because calling operations takes time and kernels fall short of both limits.
#
# ## What does not get cheaper
#
# Weights serve all rows. Keys and values do not: each request has its own, and reads all of them
# for one new token, 512 KB of 1,024 bytes for each cached token (notebook 1).

# %%
ask("6.2: 32 requests decode, each with 1,000 cached tokens. How many GB (10⁹ bytes) of keys and "
    "values does the step read?",
    guess=...)

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
# `lab/simulate/` runs the stages' own loops on a model that computes nothing, and moves a
# clock on by what the layouts count. Its throughput on one GPU is within 5% of published
# measurements in the median ([docs/gpu.md](../docs/gpu.md)). What it knows of an A100:
#
# - It reaches 0.85 of its bandwidth, and 0.71 of its peak. A matrix is computed in tiles of many
#   rows, some of them in vain: as if a pass had 85 rows more.
# - Reading and arithmetic overlap, but not perfectly: they take √(arithmetic² + reading²).
# - Between two passes 0.75 ms go by, and 25 µs for each token that is sampled.
#
# Write the same for decode steps: `rows` requests of one new token each, and `kv_tokens` cached
# tokens in all. (The operations of attention are few. Leave them out.) It is compared with ours,
# which is within 1% of the simulator's decode steps of *ragged*.


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
def on_a100(stage, requests, **knobs):
    """A stage's run of Llama 2 7B, calculated. It takes those of the knobs that it has."""
    return simulate(MODELS["llama-2-7b"], GPUS["a100"], STAGES[stage], requests,
                    **knobs_of(STAGES[stage], knobs)[0])


def waits(budget):
    """(ms to the newcomer's first token, the longest ms between two tokens)"""
    requests = [*letters(150, **{f"r{i}": 8 for i in range(32)}), *letters(8, {"N": 40}, N=2000)]
    times = latencies(on_a100("ragged, varlen", requests, max_batch=64, token_budget=budget))
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
# **Turn this knob.** Let 128 requests decode instead of 32. Which of the budgets is too small now?
#
# ## All stages
#
# p50 is the median, p99 the value that 99% do not exceed. 32 requests come at step 0; prompts of 8
# to 512 tokens, answers of 8 to 128, at most 512 tokens a step. Before you unfold it: on a CPU,
# padding costs so much that naive batching makes fewer tokens than one request at a time. Here?

# %%
dice = random.Random(0)
sizes = [[round(2 ** dice.uniform(3, high)) for high in (9, 7)] for _ in range(32)]
with folded():
    print(f"{'calculated':18} tokens/s   TTFT mean   ITL p50   ITL p99")
    for stage in "unbatched", "naive", "dynamic", "chunked", "interleaved", "ragged, varlen":
        f = figures(on_a100(stage, workload(sizes), max_batch=32, token_budget=512))
        print(f"{stage:18} {f['tokens_per_s']:8.0f} {f['ttft_ms']['mean']:8.0f} ms "
              f"{f['itl_ms']['p50']:6.0f} ms {f['itl_ms']['p99']:6.0f} ms")

# %% [markdown]
# Later stages are not better in every column. Unbatched has the best ITL, because nothing delays
# the one request that runs; but a request waits until all before it are done. More rows are nearly
# free here, so even a padded batch makes more tokens. And chunks, which are there to lower the ITL,
# raise its p99: all requests come at once, and *dynamic* computes all prompts before anybody waits
# for a second token. If a figure contradicts the purpose of a method, ask what was measured.
#
# Prepacking (notebook 4) is a matter of the prompts: it pays where lengths are short and skewed,
# and saves nothing where all are equal. Light blue packs each batch, brown is ragged; more in
# [docs/prepacking.md](../docs/prepacking.md).
#
# ![times as fast as padding, by kind of prompts](../docs/pictures/prepacking-kinds.png)
#
# ## If you have more time
#
# **More than one device.** If the weights do not fit, every weight matrix can be split over several
# devices, *ranks*. The first layer of each pair is split by its outputs, the second by its inputs:
# there each rank has only a part of every sum, and an *all-reduce* adds the parts up.

# %%
source(column_parallel)

# %% [markdown]
# Here is the share of rank 0 of 2. The other rank is not there: torch's *fake* group sends nothing,
# but counting needs no more. (`torchrun --nproc_per_node 2 -m beyond.tensor_parallel` runs both.)

# %%
if not dist.is_initialized():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
half = shard(deepcopy(model))
ask("6.4: Our model has 4 layers. How many all-reduces does a forward pass make on 2 ranks, "
    "for 10 tokens of 1 request and for 5,120 tokens of 50 requests? (two numbers: [.., ..])",
    guess=...)

# %%
with folded():
    for tokens, n in (10, 1), (10, 5), (5120, 50):
        print(f"tokens: {tokens:5,}  requests: {n:2}  all-reduces: {all_reduces(half, tokens, n)}")

# %% [markdown]
# So schedulers and layouts stay as they are; only the weights are split.
#
# **Shapes and compilers.** A ragged batch has a different shape at each step. Does that rule out a
# compiler?

# %%
from torch._dynamo.testing import CompileCounter

for dynamic in False, True:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model.h[0].mlp, backend=counter, dynamic=dynamic)
    for rows in 3, 5, 8, 21:
        with torch.no_grad():
            compiled(torch.randn(rows, 128))
    print(f"dynamic={dynamic}: {counter.frame_count} compiles for 4 shapes")

# %% [markdown]
# **The last bits.** `check` says "identical", and means: up to rounding. Why not exactly? A float32
# has 24 binary digits, and every addition rounds to them. So the order of additions shows:

# %%
print("(1e8 + -1e8) + 1 =", ((torch.tensor(1e8) + -1e8) + 1).item())
ask("6.5: In float32, how much is 1e8 + (-1e8 + 1)?",
    guess=...)

# %% [markdown]
# A kernel takes the order that is fastest for the shape it is given, and a batch changes the shape.
# So the last digits of a request's logits depend on which others happen to run. `optimize(model)`
# of `lab.compiled` computes in one order ([docs/kernels.md](../docs/kernels.md)).
#
# ## Three questions
#
# **1.** A server decodes for 8 users, and memory limits its speed. A ninth arrives. What does that
# cost the other eight, once its prompt has been computed?
#
# <details><summary>Answer</summary>
#
# Almost nothing in the linears, whose weights are read anyway. In attention, the ninth's own keys
# and values are read as well, so the step takes longer by that share.
# </details>
#
# **2.** Llama 3 has a quarter as many key and value heads as query heads. Which of the two limits
# does that help, and for whom?
#
# <details><summary>Answer</summary>
#
# Reading: a cached token takes a quarter of the bytes. It helps large batches with long pasts,
# where the cache is most of what a step reads. And four times as many tokens fit into memory.
# </details>
#
# **3.** Two machines are joined by a slow network. Tensor parallelism over both, or a whole copy
# of the model on each?
#
# <details><summary>Answer</summary>
#
# Copies, if the model fits: requests are independent, so copies need no communication at all,
# while tensor parallelism waits for the network twice in every layer of every step.
# </details>
#
# **Claims** ([docs/sources.md](../docs/sources.md)): R7 (attention's intensity stays), P7 (what
# predicts the speedup of packing) and P9 (latency grows with k) hold. P6 and P8 (1.6 to 3.5 times
# as fast, 16 times as many prompts) hold for short, skewed lengths only. *Wrong as published:* R5,
# two all-reduces per block, not 16; H10, as one compile serves all numbers of rows.
#
# **Next:** [07_your_engine](07_your_engine.ipynb) puts it all together.
