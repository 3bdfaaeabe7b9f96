# %% [markdown]
# # 4. No rows
#
# All padding comes from one decision: a row of the tensor is a request. This notebook drops it, in
# two steps: first several prompts share a row, then a whole batch is one stream of tokens. At the
# end you write the loop that skips what a mask only hides.

# %%
from lesson import ask, broken, check, counts, eight_requests, folded, letters, look
from lesson import packing, run_all, show, source
from exercises import exercise
import torch
from beyond.prepacked import first_fit_decreasing
from generate_ragged import Flat
from model import GPTConfig
from request import prepare

# %% [markdown]
# ## Several prompts in one row
#
# Here are five prompts of 9, 3, 5, 1 and 6 tokens. Padded to the longest they fill 5 rows of 9, and
# 21 of the 45 slots are pads. Now put several prompts into one row, as long as there is room. This
# is called *prepacking*, `beyond/prepacked.py`. (Engines use what the second half of this notebook
# shows. But prepacking tells how little the model cares about rows.)
#
# Which prompt goes into which row? *First-fit decreasing* takes the prompts from the longest to the
# shortest, and puts each into the first row, called a *bin*, that has room:

# %%
source(first_fit_decreasing)

# %%
ask("4.1: How many rows of 9 slots do prompts of 6, 5, 5, 5 and 2 tokens need, at least?",
    guess=...)

# %%
five = letters(A=9, B=3, C=5, D=1, E=6)
packed = look("prepacked", five, step=0)
packing(packed);

# %% [markdown]
# The rows are A, then E and B, then C and D. On the right is the mask of the row that E and B
# share, as the X-ray measured it. E comes before B in the same row, and the causal rule alone would
# let B see all of E. So the mask has a triangle for each prompt, and each prompt counts its
# positions from 0:

# %%
print(packed.positions)

# %% [markdown]
# In notebook 2 the next token always came from the last column. Here a row has several prompts, so
# each prompt's next token is read where its own last token is. The pads may be on the right now.

# %%
ask("4.2: Without these triangles, with the causal rule alone: which of A to E pass the check?",
    guess=...)

# %%
with folded(), broken("neighbours in a packed row"):
    check("prepacked", five)
    show({"the causal rule alone": look("prepacked", five, step=0)})

# %% [markdown]
# After the pass each prompt's keys and values go into its own cache: they are *unpacked*. From then
# on nothing tells that the prompts shared rows.
#
# ## No rows at all
#
# If the mask keeps requests apart, not the row, then why have rows? Every layer but attention takes
# a stream `(N,)` of tokens as it is. So the stage *ragged*, `generate_ragged.py`, puts the tokens
# of all requests one after another. `cu_seqlens` holds the cumulative lengths: request i owns the
# tokens from `cu_seqlens[i]` to `cu_seqlens[i + 1]`. (vLLM calls it `query_start_loc`.)

# %%
requests = letters(A=10, B=30)
stream = look("ragged, mask", requests, step=0)
print("tokens:", tuple(stream.ids.shape), " cu_seqlens:", stream.batch.cu_seqlens)

# %% [markdown]
# `starts` says how many tokens of each request are cached, `ends` how many it has with the new
# ones. `tril(start)` is the causal rule with a past: a request's new token number i sees its keys 0
# to start + i, so row i of its block keeps the columns 0 to start + i. This is the mask's code, and
# what a step sees with it:

# %%
source(Flat.block_diagonal)
show({"ragged: three decodes and a chunk of D's prompt": look(
    "ragged, mask", letters(A=4, B=2, C=1, D=6, arrivals={"D": 1}), step=1, token_budget=7)});

# %% [markdown]
# Is that enough? A check with this mask, and one with the causal rule alone over the stream:

# %%
check("ragged, mask", requests)
with broken("a stream without boundaries"):
    check("ragged, mask", requests)

# %% [markdown]
# Nothing but the mask separates the requests. With the causal rule alone,
#
# - the pass over the prompts has A's 10 tokens and then B's 30, so B sees all of A. A is still
#   right: B comes after it;
# - the next pass has one new token of each, two queries. The keys are A's 11 and then B's 31. The
#   causal rule takes the two queries for the last two of these 42. So A's query sees the keys 0 to
#   40, which are A's 11 and 30 of B's, and now A is wrong, too.
#
# ## Masking is not skipping
#
# In the picture, the white cells are computed, too, and then hidden. The alternative, called
# *varlen* for variable lengths, goes from request to request and computes only the diagonal blocks.
# (Here by a loop in Python. On a GPU one *kernel* does it, such as FlashAttention's `varlen`: a
# kernel is a program for the GPU, which is started once and works on all requests side by side.)

# %%
masked, skipped = (look(stage, requests, step=0).record
                   for stage in ("ragged, mask", "ragged, varlen"))
print(f"masked {masked.score_entries:,}, skipped {skipped.score_entries:,}, "
      f"useful by the causal rule {masked.useful_scores:,}")

# %% jupyter={"source_hidden": true}
def scores(*lengths):
    """(masked, skipped): scores for requests of these lengths, each (tokens, cached ones)."""
    requests = prepare(letters(**{f"r{i}": n for i, (n, _) in enumerate(lengths)}), GPTConfig())
    for request, (_, cached) in zip(requests, lengths):
        request.computed = cached
    flat = Flat([(request, request.todo) for request in requests], attention="mask")
    return flat.mask.numel(), sum(n * end for (_, n), end in zip(flat.plan, flat.ends))

# %%
ask("4.3: The prompts of A, 10 tokens, and B, 30, have been computed. In the next step both "
    "decode, and C joins, a prompt of 20. How many scores does the mask compute?", guess=...)

# %%
ask("4.4: A chunk of 20 of B's 30 tokens has been computed before. How many scores does varlen "
    "compute for A's 10 tokens, the rest of B, and C's 20?", guess=...)

# %%
ask("4.5: Thirty-two requests decode, each with 299 cached tokens and its new one. How many scores "
    "does varlen compute?", guess=...)

# %%
with folded():
    for lengths in [(11, 10), (31, 30), (20, 0)], [(10, 0), (30, 20), (20, 0)], [(300, 299)] * 32:
        print("masked {:,}, skipped {:,}".format(*scores(*lengths)))

# %% [markdown]
# ### Your turn: the varlen loop
#
# Write the attention that skips. `q` holds the queries of all requests, `(heads, N, features)`.
# `caches[i]` is `(keys, values)` of request i alone, each `(heads, S_i, features)`, its new tokens
# already among them. `head(q, k, v)` returns the output; it adds the causal rule, and takes the
# queries for those of the last tokens among the keys.

# %% tags=["exercise"]
@exercise
def varlen(q, caches, cu_seqlens, head):
    """Returns the output (heads, N, features), in the order of the queries."""
    ...

# %% [markdown]
# ## The bill
#
# The same eight requests in four layouts:

# %%
counts(run_all(("interleaved", "prepacked", "ragged, mask", "ragged, varlen"), eight_requests(),
               max_batch=4, token_budget=16),
       slots="slots", padding="pad_slots", scores="score_entries")

# %% [markdown]
# *Prepacked* packs prompts only; otherwise it is *dynamic*, with a pass for prompts and one for
# decodes. *Ragged* makes as many passes as *interleaved*, and has not one pad. Two wastes are left,
# and both are about memory: room is reserved for answers that may never come, and equal prompts are
# computed and kept once per request. Notebook 5 is about both.
#
# **Turn this knob.** Give `counts` above eight requests of one length: `letters(A=9, B=9, ...)`.
# Predict first: how much padding is left in *prepacked*, and in *interleaved*?
# <details><summary>Answer</summary>
#
# None in *prepacked*: there is nothing to pack. *Interleaved* still has 99 pad slots, because the
# budget of 16 cuts the prompts into chunks of different lengths. With `token_budget=36`, four
# prompts of 9, it has 0.</details>
#
# ## A question
#
# The mask computes and hides. Why does anybody use one, then?
# <details><summary>Answer</summary>
#
# It is one call, for all requests, of a function that every library has. For few short requests its
# waste is small. Varlen needs a loop, as here, or a kernel that knows `cu_seqlens`, as engines
# have.</details>
#
# <details><summary>Claims of published texts that were met here</summary>
#
# *Not always true:* packing a dataset beats sorting it by length (P10 of
# [docs/sources.md](../docs/sources.md)).
#
# *Hold:* first-fit decreasing into rows of the longest prompt, at a negligible cost (P1), with a
# triangle for each prompt (P2), its own positions (P3) and the same caches (P4), and what it was
# compared with (P5); ragged batches need no padding (H11); of 1,600 scores 1,000 are within a
# request (R3), and the `cu_seqlens` loop computes only these (R4); ten requests of 100 tokens have
# a tenth of the scores of one of 1,000 (R6).</details>
#
# **Next:** [05_memory](05_memory.ipynb).
