# %% [markdown]
# # 6. Cost
#
# The other notebooks count slots, scores and pages. Here they become time. Afterwards you can
#
# - say whether a step is limited by arithmetic or by memory, with a calculator;
# - read TTFT and ITL, and say which stage improves which;
# - calculate what a GPU would make of all stages;
# - say when prepacking is useless;
# - say what tensor parallelism costs, and what it does not depend on;
# - say why a batch changes the last digits of a logit.
#
# Times in seconds come from committed results, which name the machine that they were measured on.
# Those of a GPU are calculated here.

# %%
from lesson import ask, exercise, folded, letters, model, source, torchrun
from functools import cache, reduce
import torch
from beyond import arrivals, simulate
from beyond.hardware import GPUS, MODELS
from beyond.tensor_parallel import column_parallel
from experiments import bench, figures
from experiments.results import load as results
from kernels import native
from checks.check import Check, summary
from toolbox.flags import knobs_of
from loading.stages import STAGES

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


ask("6.1: From how many rows on does multiplying take longer than reading the weights?",
    guess=...)

# %%
for rows in 1, 8, 32, 128, 512:
    weights, operations = linears(rows)
    print(f"{rows:3} rows: reading {weights / BANDWIDTH * 1e3:3.0f} ms, "
          f"multiplying {operations / PEAK * 1e3:6.1f} ms")

# %% [markdown]
# By this estimate, additional rows are free up to that number. This is why one batches. Measured
# without `optimize()`, all takes three to eight times as long, for the estimate leaves out the cost
# of calling operations, and kernels that fall short of both limits. The curve has the same shape
# (all axes are logarithmic):

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
# for one new token. A token's are 2 · L · A · H numbers (notebook 1).

# %%
ask("6.2: 32 requests with 300 cached tokens each, GPT-2 (12 layers, 768 wide) in float32. "
    "How many MB (10⁶ bytes) of keys and values does a decode step read?",
    guess=...)

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
# and p99 is the value that 99% of them do not exceed. Workload W1: 32 requests, which all come at
# step 0 and may all run at once; prompts of 8 to 512 tokens, answers of 8 to 128, at most 512
# tokens a step. All lines but the last are with `optimize()`:

# %%
print("                                tokens/s   TTFT mean   ITL p50    ITL p99")
for name in ("unbatched", "naive", "dynamic", "chunked", "interleaved", "ragged, varlen",
             "ragged, varlen, not optimized"):
    system = W1["systems"][name]
    print(f"{name:30}{W1['tokens'] / system['seconds']:10.0f} {system['ttft_mean']:10.1f} s "
          f"{system['itl_p50'] * 1e3:6.0f} ms {system['itl_p99'] * 1e3:7.0f} ms")

# %% [markdown]
# Later stages are not better in every column. Unbatched has the best ITL, because nothing delays
# the one request that runs. But a request waits many seconds until all before it are done. Naive,
# dynamic and interleaved make fewer tokens than it does: much of what they compute is padding, and
# a CPU has no idle arithmetic for pads. Stage 6 has none, even without `optimize()`; the last two
# lines differ in their kernels only.
#
# ## The same on a GPU, calculated
#
# None of us needs a GPU for this. The layouts count what each pass computes, reads and copies. The
# estimate above, with the data sheet of another machine, turns these counts into time:
# `beyond/simulate.py` runs the stages' own loops on a model that computes nothing but moves a clock
# on. Its throughput is within 5% of published measurements in the median
# ([docs/gpu.md](../docs/gpu.md)). Here is W1 with Llama 2 7B on an A100, in under a second:

# %%
LENGTHS = [(len(r.prompt), r.max_new_tokens) for r in bench.workload("W1", 32000)]


def on_a100(stage):
    """The trace of W1 on the calculated GPU."""
    knobs, _ = knobs_of(STAGES[stage], {"max_batch": 32, "token_budget": 512})
    return simulate.simulate(MODELS["llama-2-7b"], GPUS["a100"], STAGES[stage],
                             arrivals.workload(LENGTHS), **knobs)


ask("6.3: Chunks are there to lower the worst ITL, and on this CPU they raise it: compare "
    "'dynamic' and 'chunked'. On the A100, is the ITL p99 of chunked lower than that of "
    "dynamic? (yes or no; who waits for a second token while dynamic computes the prompts?)",
    guess=...)

# %%
with folded():
    print("A100, calculated         tokens/s   TTFT mean   ITL p50    ITL p99")
    for stage in ("unbatched", "naive", "dynamic", "chunked", "interleaved", "ragged, varlen"):
        f = simulate.figures(on_a100(stage))
        print(f"{stage:22} {f['tokens_per_s']:10.0f} {f['ttft_ms']['mean'] / 1e3:10.1f} s "
              f"{f['itl_ms']['p50']:6.0f} ms {f['itl_ms']['p99']:7.0f} ms")

# %% [markdown]
# On the A100, stage 6 makes more than eight times as many tokens as one request at a time. More
# rows are nearly free there, for its arithmetic waits for the weights.
#
# A figure can seem to contradict the purpose of a method. Then ask what was measured. When one long
# prompt arrives while others decode, chunks do what they promise (notebook 3).
#
# ## When prepacking pays
#
# The paper packs prompts into rows, and compares the prefill with padding to the longest. Our
# figures, for its kinds of prompts and k = 16. Brown is ragged batching (stage 6), light blue packs
# each batch, dark red packs the whole dataset, olive sorts by length, and grey pads to the longest:

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


ask("6.4: Our model has 4 layers. How many all-reduces does a forward pass make on 2 ranks, "
    "for 10 tokens of 1 request and for 5,120 tokens of 50 requests? (two numbers: [.., ..])",
    guess=...)

# %%
with folded():
    print(*counts(), sep="\n  ")

# %% [markdown]
# <details><summary>The claim, once you have answered</summary>
#
# > **Claim R5.** Tensor parallel over 2 ranks, 8 layers: 16 all-reduces per forward pass, for
# > 10 tokens or 10,000, for one request or fifty; each rank owns half the heads, and the varlen
# > loop needs no communication. *It holds:* the model above has 4 layers, hence 8. *Wrong as
# > published* in one place: "16 sync events per block" is 2 per block, 16 per pass.
#
# </details>
#
# So schedulers and layouts stay as they are; only the weights are split.
#
# ## Shapes and compilers
#
# A ragged batch has a different shape at each step. Does that rule out a compiler?

# %%
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
# ## The last bits
#
# `check` says "identical", and means: up to rounding. Why not exactly? A float32 has 24 binary
# digits, and every addition rounds to them. So the order of additions shows:

# %%
print("(1e8 + -1e8) + 1 =", ((torch.tensor(1e8) + -1e8) + 1).item())
ask("6.5: In float32, how much is 1e8 + (-1e8 + 1)?",
    guess=...)

# %% [markdown]
# A sum of 768 numbers, as a linear layer of GPT-2 takes it, in three orders:

# %%
torch.manual_seed(0)
numbers = torch.randn(768)
lanes = reduce(torch.add, numbers.view(-1, 16))     # 16 partial sums side by side
while len(lanes) > 1:
    lanes = lanes[0::2] + lanes[1::2]               # and these in pairs
print(f"exact               {numbers.double().sum():.7f}")
print(f"first to last       {reduce(torch.add, numbers):.7f}")
print(f"last to first       {reduce(torch.add, numbers.flip(0)):.7f}")
print(f"16 at a time        {lanes[0]:.7f}")

# %% [markdown]
# None is wrong. A kernel takes the order that is fastest for the shape it is given, and a batch
# changes the shape. So a request's logits depend on which others happen to run. `optimize()` brings
# kernels that keep to one order for every shape. Stage 6 without and with it, against each request
# alone:

# %% tags=["machine"]
requests = letters(A=9, B=30, C=2, D=17, new=12)
if native.problem() is None:
    fast = model.optimize()
    for title, made, exact in ("as you read it", model, None), ("optimize()", fast, fast):
        judge = Check(model, requests, exact)
        STAGES["ragged, varlen"](made, requests, token_budget=8, on_token=judge.on_token)
        print(f"{title:15} {summary(judge())}")
        requests = letters(A=9, B=30, C=2, D=17, new=12)
else:
    print("These kernels need g++, and it is not here. With it this cell prints:\n"
          "4/4 requests identical to unbatched, bit for bit")

# %% [markdown]
# More in [docs/kernels.md](../docs/kernels.md).
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
# **2.** All prompts of a batch have the same length. What do prepacking and ragged batching save?
#
# <details><summary>Answer</summary>
#
# Prepacking saves nothing: r = k, and there are no pads. Ragged batching saves no pads in this
# prefill either. It does once newcomers take the places of requests that have finished, because
# then the pasts differ in length.
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
