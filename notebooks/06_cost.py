# %% [markdown]
# # 6. Cost
#
# The other notebooks count slots, scores and pages. Here they become time. Afterwards you can
#
# - say whether a step is limited by arithmetic or by memory, with a calculator;
# - read TTFT and ITL, and say which stage improves which;
# - say when prepacking is useless;
# - say what tensor parallelism costs, and what it does not depend on.
#
# The times come from committed results, which name the machine that they were measured on.

# %%
from lesson import ask, exercise, model, results, source, torchrun
from functools import cache
from experiments import figures
from beyond.tensor_parallel import column_parallel

# %% [markdown]
# ## Two limits
#
# A forward pass reads every weight once, and multiplies each with every row. So a pass over M rows
# needs at least the larger of two times: all bytes divided by the memory's bandwidth, and all
# operations divided by the arithmetic's peak. That is a *roofline*. GPT-2 with 124M parameters, in
# float32, on two CPU cores:

# %%
W1 = next(result for result in results("bench") if result["model"] == "gpt2")
print(W1["where"])
PEAK, BANDWIDTH = W1["peak"], W1["bandwidth"]
print(f"peak {PEAK / 1e9:.0f} GFLOP/s, bandwidth {BANDWIDTH / 1e9:.0f} GB/s")


# %%
def linears(rows, parameters=123.5e6, bytes_per_number=4):
    """(bytes of weights, operations) of all linear layers for so many rows."""
    return parameters * bytes_per_number, 2 * rows * parameters


ask("From how many rows on does multiplying take longer than reading the weights?",
    guess=...,
    answer=lambda: next(rows for rows in range(1, 1000)
                        if linears(rows)[1] / PEAK > linears(rows)[0] / BANDWIDTH),
    why="In float32 each row is half an operation per byte of weights, and the machine can do "
        f"{PEAK / BANDWIDTH:.1f} operations while it reads a byte: {2 * PEAK / BANDWIDTH:.1f} "
        "rows.")

# %%
for rows in 1, 8, 32, 128, 512:
    weights, operations = linears(rows)
    print(f"{rows:3} rows: reading {weights / BANDWIDTH * 1e3:3.0f} ms, "
          f"multiplying {operations / PEAK * 1e3:6.1f} ms")

# %% [markdown]
# By this estimate, additional rows are free up to that number. This is why one batches. Measured,
# they are not quite free, but the curve has the same shape (all axes are logarithmic):

# %%
measured = results("rows")
print(measured["where"])
figures.rows({"GPT-2, 124M parameters": measured["points"]});

# %% [markdown]
# 32 rows take less than four times as long as one. (Two rows take as long as eight: the library
# multiplies such narrow matrices in another way.)
#
# ## What does not get cheaper
#
# Weights serve all rows. Keys and values do not: each request has its own, and reads all of them
# for one new token.

# %%
ask("32 requests with 300 cached tokens each, GPT-2 (12 layers, 768 wide) in float32. How many MB "
    "(10⁶ bytes) of keys and values does a decode step read?",
    guess=...,
    answer=lambda: 32 * 300 * 2 * 12 * 768 * 4 / 1e6,
    why="Tokens x 2 x 12 layers x 768 x 4 bytes. That is more than the 494 MB of weights.")

# %%
print("requests   operations per byte: linears   attention")
for requests in 1, 8, 32:
    weights, operations = linears(requests)
    keys = requests * 300 * 2 * 12 * 768 * 4                   # bytes of keys and values
    attention = requests * 300 * 2 * 2 * 12 * 768              # q k, and weights v
    print(f"{requests:8} {operations / weights:30.1f} {attention / keys:11.1f}")

# %% [markdown]
# Operations per byte are called *arithmetic intensity*.
#
# > **Claim R7.** At decode, the arithmetic intensity of each request's attention is about 1 in
# > fp16 (0.5 in fp32) and stays there, while that of the linears rises with the number of rows:
# > batching helps the weights, not the cache. *It holds.*
#
# ## Which stage improves what
#
# The operator of a server wants many tokens per second. A user sees two other times: *TTFT*, the
# time to the first token, and *ITL*, the time between one token and the next. p50 is the median,
# and p99 is the value that 99% of them do not exceed. Workload W1: 32 requests, prompts of 8 to
# 512 tokens, answers of 8 to 128, and at most 512 tokens a step.

# %%
print("                         tokens/s   TTFT mean   ITL p50    ITL p99")
for name in ("unbatched", "naive", "dynamic", "chunked", "interleaved", "ragged, varlen"):
    system = W1["systems"][name]
    print(f"{name:22} {W1['tokens'] / system['seconds']:10.0f} {system['ttft_mean']:10.1f} s "
          f"{system['itl_p50'] * 1e3:6.0f} ms {system['itl_p99'] * 1e3:7.0f} ms")

# %% [markdown]
# Later stages are not better in every column. Unbatched has the best ITL, because nothing delays
# the one request that runs. But its mean TTFT is many seconds, because a request waits until all
# before it are done. Interleaved makes one pass a step where chunked makes two, and is several
# times slower: a CPU has no idle arithmetic for pads.

# %%
ask("Chunks are there to lower the worst ITL. Compare 'dynamic' and 'chunked' in the table. Is ITL "
    "p99 lower? (yes or no)",
    guess=...,
    answer=lambda: "yes" if (W1["systems"]["chunked"]["itl_p99"]
                             < W1["systems"]["dynamic"]["itl_p99"]) else "no",
    why="All requests arrive at once here, so nearly every step carries a chunk, in a second "
        "forward pass and with pads. Without pads (ragged) it works.")

# %% [markdown]
# A measurement can seem to contradict the purpose of a method. Then ask what was measured. When one
# long prompt arrives while others decode, chunks do what they promise (notebook 3).
#
# ## When prepacking pays
#
# The paper packs prompts into rows, and compares the prefill with padding to the longest. Our
# figures, for its kinds of prompts and k = 16:

# %%
packing = results("prepacking")
print(packing["where"])
figures.prepacking_picture("kinds", packing)
figures.prepacking_picture("batch-size", packing);

# %% [markdown]
# > **Claim P6.** Prefill and TTFT are 1.6 to 3.5 times faster than full batching at k = 16, up
# > to 4.5 and 6 times at larger k, and the same in the worst case r = k. *It holds for short,
# > skewed lengths* (dialogue, instructions), where we even find 10 at k = 64; our long ones
# > gain less. Packing the whole dataset makes TTFT worse, since a prompt waits until its row is
# > due.
#
# (The prompts of the second picture are not those of the first, so the values at k = 16 differ.
# With k = 1 each row is one prompt: r = k, and the speedup is about 1.)

# %%
figures.prepacking_picture("predictors", packing);

# %% [markdown]
# > **Claim P7.** The speedup is predicted by r/k, the batch-size reduction (about 1/(r/k) at
# > best), and by m − L/k, the longest minus the mean length (L tokens in k prompts); uniform
# > lengths give r/k ≈ 0.6. *Both predict it, but 1/(r/k) is no upper limit here:* many points
# > lie above the line.

# %%
figures.prepacking_picture("memory", packing)
figures.prepacking_picture("latency", packing);

# %% [markdown]
# > **Claim P8.** Peak memory falls with the pad tokens, and allows up to 16 times larger
# > prefill batches. *It falls;* with our lengths, and 1 GB besides the weights, 1.2 (articles)
# > to 3.4 times (dialogue) as many prompts fit.
#
# > **Claim P9.** Hardware does not parallelise a batch for free: at fixed m, latency grows with
# > k. *It holds:* 64 prompts take 35 times as long as one.
#
# ### Your turn: when is prepacking useless?
#
# Find eight prompts, *all of different lengths*, for which packing needs as many rows as padding.


# %% tags=["exercise"]
@exercise
def useless():
    """Returns a list of eight different lengths for which first-fit decreasing needs 8 rows."""
    ...


# %% [markdown]
# <details><summary>Our answer</summary>
#
# ```python
# @exercise
# def useless():
#     return [16, 15, 14, 13, 12, 11, 10, 9]   # no two of them fit into a row of 16
# ```
# </details>
#
# ## More than one device
#
# If the weights do not fit, or one device is too slow, every weight matrix can be split. With two
# processes, called *ranks*, each holds half of the heads and half of the MLP. The first layer of
# each pair is split by its outputs:

# %%
source(column_parallel)

# %% [markdown]
# The second one is split by its inputs, so each rank has only a part of every sum. An *all-reduce*
# adds the parts up: one after attention's output projection, one after the MLP.


# %%
@cache
def counts():
    """What a run on two processes counts: ["2 ranks (gloo)", "4 layers", ...]."""
    printed = torchrun(2, "-m", "beyond.tensor_parallel", "--quiet", "--max_new_tokens", "3")
    line = next(line for line in printed.splitlines() if "all-reduces of a forward pass" in line)
    return line.replace(": ", ", ").split(", ")


ask("Our model has 4 layers. How many all-reduces does a forward pass make on 2 ranks, for 10 "
    "tokens of 1 request and for 5,120 tokens of 50 requests? (two numbers: [.., ..])",
    guess=...,
    answer=lambda: [int(counts()[i].split()[0]) for i in (3, 6)],
    why="Two in each block, whatever is in the batch; only their size grows.")

# %%
print(*counts(), sep="\n  ")

# %% [markdown]
# > **Claim R5.** Tensor parallel over 2 ranks, 8 layers: 16 all-reduces per forward pass, for
# > 10 tokens or 10,000, for one request or fifty; each rank owns half the heads, and the varlen
# > loop needs no communication. *It holds:* the model above has 4 layers, hence 8. *Wrong as
# > published* in one place: "16 sync events per block" is 2 per block, 16 per pass.
#
# So schedulers and layouts stay as they are; only the weights are split.
#
# ## Shapes and compilers
#
# A ragged batch has a different shape at each step. Does that rule out a compiler?

# %%
import torch
from torch._dynamo.testing import CompileCounter


def compiles(dynamic):
    """How often torch.compile compiles the first block's MLP for four numbers of rows."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model.h[0].mlp, backend=counter, dynamic=dynamic)
    for rows in 3, 5, 8, 21:
        with torch.no_grad():
            compiled(torch.randn(rows, 128))
    return counter.frame_count


print("static shapes: ", compiles(dynamic=False), "compiles for 4 shapes")
print("dynamic shapes:", compiles(dynamic=True), "compile")

# %% [markdown]
# > **Claim H10.** CUDA graphs want static shapes, which forces padding to a fixed maximum;
# > torch.compile does too. *The first holds:* a graph replays fixed addresses and sizes. *The
# > second no longer does:* with dynamic shapes, one compile serves all numbers of rows.
#
# ## Three questions
#
# **1.** A server decodes for 8 users, and memory limits its speed. A ninth arrives. What does that
# cost the other eight?
#
# <details><summary>Answer</summary>
#
# Almost nothing in the linears, whose weights are read anyway. In attention, the ninth's own keys
# and values are read as well, so the step takes longer by that share.
# </details>
#
# **2.** All prompts of a batch have the same length. What do prepacking and ragged batching save?
#
# <details><summary>Answer</summary>
#
# Prepacking saves nothing: r = k, and there are no pads. Ragged batching saves no pads in this
# prefill either, but it does as soon as the answers' lengths differ.
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
