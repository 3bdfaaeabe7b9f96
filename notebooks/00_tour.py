# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The ladder in fifteen minutes
#
# A language model looks at each token by itself almost everywhere. Tokens meet in one place only,
# attention. So every way of batching requests answers two questions:
#
# 1. *Which tokens are in this forward pass?* The scheduler decides.
# 2. *Which keys may each of them see?* The layout decides: mask, positions, cache.
#
# We serve the same eight requests in nine ways, each better than the last by one idea, and look at
# what each one computes. None of them may change what comes out: **each request gets exactly the
# tokens it would have got alone.** At the end you break that rule with a bug from a published
# tutorial, and watch the check catch it.

# %%
import inspect
import sys

sys.path.insert(0, "..")   # the repository's modules are one folder up

import torch

from experiments import figures, memory
from experiments.ladder import ladder_table, run_stages, small_workload
from experiments.rows import decode_gaps, forward_times
from toolbox.check import Check, summary
from toolbox.load import load
from toolbox.stages import STAGES

torch.set_num_threads(1)   # a model this small gains nothing from more
model, tokenizer = load("builtin")


def source(thing):
    """The code itself, from its file."""
    print(inspect.getsource(thing))


requests = small_workload(model.config)
for request in requests:
    print(f"{request.name}: a prompt of {len(request.prompt):2} tokens, "
          f"{request.max_new_tokens:2} to generate, arrives at step {request.arrival}")

# %% [markdown]
# The prompts are arbitrary token numbers here, since only their lengths matter to a batch. `F` is
# the long one, and it arrives while others are already running.
#
# ## Where tokens meet
#
# This is attention's part in the model. `attend` is handed in from outside: the model itself does
# not know that there are requests.

# %%
from model import Head, MultiHeadAttention

source(MultiHeadAttention.forward)

# %% [markdown]
# What `attend` comes down to in the end is a `Head`. It keeps nothing between calls. What it is
# given is all it knows: queries, keys, values, perhaps a past, perhaps a mask.

# %%
source(Head.forward)

# %% [markdown]
# ## Stage 0: one at a time
#
# The reference. With a KV cache each new token computes one row instead of all of them. Compare the
# slots: a slot is one place in the tensor that goes through all the layers.

# %% tags=["seconds"]
traces = run_stages(model, requests, {name: STAGES[name]
                                      for name in ("unbatched, no cache", "unbatched")})
print(ladder_table(traces))

# %% [markdown]
# So why batch at all? Because a forward pass over 32 rows takes far less than 32 times as long as
# over one: the weights are read once for all rows, and Python's and the kernels' overhead is paid
# once. Measured just now, on this machine:

# %%
figures.rows({"the built-in model": forward_times(model)});

# %% [markdown]
# ## Stage 1: static batching
#
# Several prompts in one tensor must have one length, so the shorter ones are padded, on the left:
# that way every row's next token comes from the last column. Each row counts its positions from its
# own first token, and the mask hides the pads.

# %%
from generate_naive import StaticBatch

source(StaticBatch.lay_out)

# %%
naive = run_stages(model, requests, {"naive": STAGES["naive"]}, max_batch=4)["naive"]
figures.timelines([naive], columns=1);

# %% [markdown]
# Look at the hatched cells. `B` was done after 4 steps, and the batch went on computing its row
# until `C`, the longest, was done. `E` waited all that time although there was nothing to wait for.
#
# ## Stage 2: dynamic batching
#
# Put the batch together anew at each step. A finished request leaves at once, and a waiting one
# takes its place: step 1 and step 4 in this loop. The cache can no longer belong to the batch, so
# each request carries its own.

# %%
import generate_dynamic

source(generate_dynamic.generate)

# %%
dynamic = run_stages(model, requests, {"dynamic": STAGES["dynamic"]}, max_batch=4)["dynamic"]
figures.timelines([dynamic], columns=1);

# %% [markdown]
# ## Stage 3: chunked prefill
#
# Stage 2 prefills a prompt in one piece, while every other request waits. But its keys and values
# are kept, so it may as well come in pieces. The Scheduler shares out a budget of tokens at each
# step: one for each decode *first*, and what is left for prompts.

# %%
from scheduler import Scheduler

source(Scheduler.share_budget)

# %%
chunked = run_stages(model, requests, {"chunked": STAGES["chunked"]}, max_batch=4,
                     token_budget=16)["chunked"]
figures.timelines([chunked], columns=1);

# %% [markdown]
# `F`, with its 40 tokens, now takes three steps, and the decodes beside it go on. The benefit shows
# in time, not in steps. Four requests decode, and at step 8 a prompt of 240 tokens arrives:

# %%
gaps = decode_gaps(model, prompt_tokens=240, budget=32, repeats=9,
                   stages={name: STAGES[name] for name in ("dynamic", "chunked")})
figures.itl(gaps, 8, 240);

# %% [markdown]
# (This model is tiny, so the stall is a few milliseconds. The README has the same picture for a
# model a hundred times as large.)
#
# ## Stage 4: prefill and decode in one pass
#
# Two forward passes a step read the weights twice. The model does not care what a row is doing, so
# decodes and chunks can share one rectangle. Now the mask has two kinds of pads to hide: those of
# the past, and those of the *new* slots.

# %%
from generate_dynamic import Rectangle

source(Rectangle.lay_out)

# %%
from experiments.ladder import one_step

figures.masks(one_step(model));

# %% [markdown]
# On the left is the rectangle of three decodes and one chunk of four: each decode row is three
# quarters padding. It is the right pass in the wrong shape. On the right is the way out, two stages
# further on.
#
# ## Stage 5: prepacking
#
# Why should a row be a request? What keeps requests apart is the mask. So put several prompts into
# one row: each sees only itself, and counts its positions from 0. Which prompt goes into which row
# is bin packing, with bins as large as the longest prompt:

# %%
from generate_prepacked import first_fit_decreasing

source(first_fit_decreasing)
lengths = [9, 3, 5, 1, 6]
print([[lengths[i] for i in row] for row in first_fit_decreasing(lengths, max(lengths))])

# %%
from experiments.ladder import some_prompts

figures.packing(some_prompts());

# %% [markdown]
# Afterwards the keys and values are unpacked into each request's own cache, as if they had been
# computed alone. It pays where lengths differ much, because the longest decides how wide the
# rectangle is. `python -m experiments.prepacking --quick` runs the experiments of the paper. But
# decode is as padded as ever, so:
#
# ## Stage 6: ragged
#
# All padding comes from the batch axis, so drop it. The tokens of all requests form one stream, and
# `cu_seqlens` says where each request's tokens begin. Every layer but attention works on such a
# stream as it is. Attention goes from request to request: this is the "varlen" loop, which a GPU
# kernel runs in one launch.

# %%
from generate_ragged import Flat

source(Flat.attend)

# %% [markdown]
# ## Stage 7: pages
#
# What is left is memory. Stage 6 reserves room for every request's longest answer. Stage 7 keeps
# all keys and values in a pool of pages, and a request holds only the pages that its tokens fill.
# Prompts that begin alike share their pages. Eight requests, all with the same first 20 tokens,
# five of them at a time:

# %%
from generate_paged import Paged

source(Paged.slots)
figures.pool(memory.filling_pool(model));

# %% [markdown]
# The dark pages hold the common beginning: computed once, kept once. Each request grows by a page
# when its last one is full. What a finished request computed stays in the pool until the room is
# needed.
#
# ## All together
#
# One workload, one axis of steps. Grey is padding.

# %%
traces = run_stages(model, requests, repeats=5, max_batch=4, token_budget=16)
shown = "naive", "dynamic", "chunked", "interleaved", "prepacked", "ragged, varlen"
figures.timelines([traces[name] for name in shown]);

# %% tags=["seconds"]
print(ladder_table(traces))

# %% [markdown]
# Passes, slots and scores are the same on every machine. Seconds are not, and on a model as small
# as this one most of them are Python's. The README has the speeds of a larger model.
#
# ## Is it true?
#
# A stage that computed nonsense would look just as good in these pictures. So each script ends with
# this check: run every request alone, without batch and cache, and compare logits and tokens.

# %%
from dataclasses import replace


def check(stage):
    mine = [replace(request, temperature=0.7) for request in requests]
    listener = Check(model, mine)
    STAGES[stage](model, mine, max_batch=4, token_budget=16, on_token=listener.on_token)
    lines = summary(listener()).splitlines()
    print(f"{stage}: {lines[0].split(', max')[0]}", *lines[1:], sep="\n  ")


for stage in "chunked", "interleaved", "ragged, mask", "ragged, varlen", "paged":
    check(stage)

# %% [markdown]
# ## Break it
#
# A published tutorial on stage 4 builds its mask for the padding of the past, and marks *all new
# slots* as valid. Here it is. It runs, it looks right, and its texts read no worse. Only the
# comparison reveals it.

# %%
import generate_interleaved


class Published(Rectangle):
    def lay_out(self, device):
        super().lay_out(device)
        self.mask[..., self.P:] = True      # now a decode row sees its own padding


generate_interleaved.Rectangle = Published
check("interleaved")
generate_interleaved.Rectangle = Rectangle  # put right again
check("interleaved")

# %% [markdown]
# ## Where to go from here
#
# - Run the scripts: `python generate_ragged.py --plot ragged.png`, then
#   `diff generate_chunked.py generate_interleaved.py`.
# - Read `model.py`, `request.py`, `cache.py`, then the stages in order. They are short.
# - Break something else: the causal rule in `Head` (use diagonal 0), the positions in `Rectangle`
#   (count columns), the order of decodes and chunks in `Scheduler.share_budget`. Which of them does
#   the check catch? One of the three changes no token at all. Why?
