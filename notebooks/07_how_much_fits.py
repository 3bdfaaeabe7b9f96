# %% [markdown]
# # 7. How much fits
#
# A batch makes tokens cheaper (notebook 6), and memory limits the batch. So how many requests fit
# into a GPU? And what are pages, grouped heads, common prefixes and more GPUs worth, in requests?
#
# Three models, in fp16, two bytes a number. Llama 3.1 8B and Qwen2 7B share each head of keys and
# values among several query heads: *grouped-query attention*, GQA.

# %%
from lesson import ask, bars, folded, model, source
from exercises import exercise, solution
import math
import torch

GiB = 2 ** 30
MODELS = {   # parameters, layers, heads of keys and values, their size; the query heads
    "Llama 2 7B": (6.74e9, 32, 32, 128, 32),
    "Llama 3.1 8B": (8.03e9, 32, 8, 128, 32),
    "Qwen2 7B": (7.62e9, 28, 4, 128, 28)}
for name, (parameters, layers, kv_heads, size, query_heads) in MODELS.items():
    print(f"{name:13} weights {2 * parameters / 1e9:4.1f} GB, {layers} layers, {query_heads} query "
          f"heads, {kv_heads:2} heads of keys and values, of {size} features")

# %% [markdown]
# ## What a token costs
#
# Keys and values, in each layer, for each head of them, 2 bytes a number: 2 · layers · heads · size
# · 2 bytes. For Llama 2 7B that is 512 KiB (notebook 1).

# %%
ask("7.1: How many KiB (of 1,024 bytes) does a token of Llama 3.1 8B cost?", guess=...)

# %% [markdown]
# ## What is left for them
#
# An engine uses about 0.9 of a GPU's memory: the rest is for the driver, and for what is not
# foreseen. From that it takes the weights, and half a GB for the intermediate results of a pass:
#
# > 0.9 · memory − 2 bytes · parameters − 0.5 · 10⁹ bytes
#
# An A100 has 40 or 80 GiB (of 2³⁰ bytes); data sheets call them GB.

# %% jupyter={"source_hidden": true}
cases = {f"{memory} GiB, {name}": (memory * GiB, *shape)
         for memory in (40, 80) for name, shape in MODELS.items()}
left = [0.9 * memory - 2 * parameters - 0.5e9 for memory, parameters, *_ in cases.values()]
bars(cases, {"weights": [2 * parameters / 1e9 for _, parameters, *_ in cases.values()],
             "a pass": [0.5] * len(cases), "keys and values": [room / 1e9 for room in left],
             "not used": [0.1 * memory / 1e9 for memory, *_ in cases.values()]}, "GB of an A100")

# %%
ask("7.2: How many tokens of Llama 2 7B fit into an A100 of 40 GiB, beside the weights? (to 1%)",
    guess=...)

# %%
with folded():
    for room, (name, (_, _, layers, kv_heads, size, _)) in zip(left, cases.items()):
        print(f"{name:21} {room / 1e9:4.1f} GB left: room for "
              f"{room // (4 * layers * kv_heads * size):10,.0f} tokens")

# %% [markdown]
# Twice the memory is more than twice the room, because the weights are stored once.
#
# ## How many requests?
#
# A request has a prompt of 700 tokens. Its answer may be as long as 3,300 tokens, but it ends after
# 300, which nobody knows in advance. How much memory does it hold (notebook 5)?
#
# - If it *reserves*: from its first step on, room for what it may need.
# - With *pages*: room for what it has. That is 700 tokens at first, and at most 1,000 at its end.

# %%
ask("7.3: A100 of 40 GiB, Llama 2 7B. How many requests run at once if each reserves?", guess=...)

# %%
ask("7.4: And how many with pages of 16 tokens, if each holds 1,000?", guess=...)

# %% [markdown]
# ### Your turn
#
# Write it down for any model. The first `shared` tokens of all prompts may be the same, such as a
# system prompt. With a prefix cache their *full* pages are kept once. (`memory` is the whole GPU's:
# take 0.9 of it, and 0.5 · 10⁹ bytes less, as above. `shared` is less than `tokens`. If the weights
# do not fit, or not even the common pages, no request fits: 0.)

# %% tags=["exercise"]
@exercise
def requests_that_fit(memory, parameters, layers, kv_heads, head_size, tokens, shared):
    """How many requests of so many tokens fit into a GPU of so many bytes, in pages of 16."""
    ...

# %%
fit = solution("requests_that_fit")   # ours
hows = {"reserving": (3999, 0), "1,000 in pages": (1000, 0), "500 shared": (1000, 500)}
with folded():   # all of whole pages
    numbers = {how: [fit(*shape, *tokens) for *shape, _ in cases.values()]
               for how, tokens in hows.items()}
    bars(cases, numbers, "requests at once", beside=True)

# %% [markdown]
# Pages are worth a factor of four here, shared prefixes almost two, GQA almost four (nine in Qwen2,
# which has fewer layers, too). They multiply: with all three, Llama 3.1 8B serves 328 requests in
# 40 GiB, thirty times as many as Llama 2 7B with none, 11.
#
# **Turn this knob.** Most requests are in the middle of their answer. Let each hold 500 tokens
# instead of 1,000, with nothing shared. How many of Llama 2 7B does `fit` say for 40 GiB? And why
# would an engine that admits so many have to preempt?
# <details><summary>Answer</summary>
#
# 91 instead of 46. They all go on growing: if none ends soon, the pages run out, and the last ones
# are preempted and computed again. The average holds over time; the pages must suffice at each
# moment.</details>
#
# ## More than one device
#
# If the weights do not fit into one device, the matrices of each block are split over several
# devices, called *ranks*. A matrix can be split in two ways:
#
# - *By its outputs.* Each rank has some of the columns, and computes some of the output features,
#   completely.
# - *By its inputs.* Each rank has some of the rows, and multiplies only the features that belong to
#   them. So it has a part of every sum. An *all-reduce* adds up the parts of all ranks, and gives
#   the result to each.
#
# A block has two groups of matrices. In each group the first ones are split by their outputs, and
# the last by its inputs. So between them a rank goes on with the features that it has:
#
# | group | by outputs | between them | by inputs |
# |---|---|---|---|
# | attention | query, key, value | some of the heads, with their keys and values | `c_proj` |
# | MLP | the first | some of the features | the last |
#
# The embeddings and the output layer are whole on every rank. Here is the split by inputs, with two
# ranks and in code:

# %%
x, W = torch.randn(3, 8), torch.randn(8, 5)
print("the same:", torch.allclose(x @ W, x[:, :4] @ W[:4] + x[:, 4:] @ W[4:], atol=1e-5))

# %%
from copy import deepcopy
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from beyond.tensor_parallel import RowParallel, all_reduces, shard
source(RowParallel)

# %% [markdown]
# Here is the share of rank 0 of 2. There is no other rank: torch's *fake* group sends nothing,
# which is enough for counting. (`beyond/tensor_parallel.py` runs both ranks.)

# %%
if not dist.is_initialized():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
half = shard(deepcopy(model))

# %%
ask("7.5: Our model has 4 layers. How many all-reduces does a forward pass make on 2 ranks, "
    "for 10 tokens of 1 request and for 5,120 tokens of 50 requests? (two numbers: [.., ..])",
    guess=...)

# %%
with folded():
    for tokens, n in (10, 1), (10, 5), (5120, 50):
        print(f"tokens: {tokens:5,}  requests: {n:2}  all-reduces: {all_reduces(half, tokens, n)}")

# %% [markdown]
# So schedulers and layouts stay as they are. Only the weights are split, and with the heads the
# caches.
#
# ## A question
#
# Two GPUs of 40 GiB. Llama 2 7B split over both, or a whole copy on each: which of the two
# has room for more requests?
# <details><summary>Answer</summary>
#
# Split: the weights are stored once, not twice, so 13.5 GB more are left for keys and values. But
# every pass waits for all-reduces, twice a layer. Copies need no communication at all; if the link
# is slow, they win.</details>
#
# <details><summary>Claims of published texts that were met here</summary>
#
# *Wrong as published:* 16 all-reduces in a block (R5 of [docs/sources.md](../docs/sources.md)).
# There are two. *Holds:* the size of a token's cache (H5).</details>
#
# **Next:** in [08_your_engine](08_your_engine.ipynb) you build an engine.
