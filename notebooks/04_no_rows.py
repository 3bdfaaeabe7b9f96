# %% [markdown]
# # 4. No rows
#
# All padding comes from one decision: a row of the tensor is a request. This notebook drops it, in
# two steps. Afterwards you can
#
# - pack several prompts into one row, and say what keeps them apart;
# - lay a whole batch out as one stream of tokens, without a batch axis;
# - write the loop over `cu_seqlens` that skips what a mask only hides.

# %%
from lesson import ask, broken, check, exercise, folded, letters, look, model, run, show, source
from types import SimpleNamespace
import torch
from experiments import figures, prepacking
from experiments.ladder import some_prompts
from generate_dynamic import Rectangle
from generate_prepacked import Packed, first_fit_decreasing
from generate_ragged import Flat
from request import prepare

# %% [markdown]
# ## Several prompts in one row
#
# Here are five prompts of 9, 3, 5, 1 and 6 tokens. Padded to the longest they fill 5 rows of 9, and
# 21 of the 45 slots are pads. Now put several prompts into one row, as long as there is room. This
# is called *prepacking*.
#
# Which prompt goes into which row is a problem known as *bin packing*; a row is a bin. *First-fit
# decreasing* takes the prompts from the longest to the shortest, and puts each into the first bin
# that has room:

# %%
source(first_fit_decreasing)

# %% [markdown]
# > **Claim P1.** Prepacking puts k prompts into bins of size m, the longest prompt, by
# > first-fit decreasing; they fill r ≤ k rows; packing costs O(k log k) and is negligible. *It
# > holds,* if a search tree finds the bin. The plain loop above is O(k · r), and negligible as
# > well.

# %%
ask("4.1: What is the smallest number of rows of 9 slots that hold prompts of 8, 7, 5, 4, 3, "
    "2 and 1 tokens?",
    guess=...)

# %%
figures.packing(some_prompts(model));

# %% [markdown]
# Blue slots hold tokens of prompts, hatched ones are padding. On the right is the mask of the row
# that E and B share, as the X-ray measured it. E comes before B in the same row, and the causal
# rule alone would let B see all of E.
#
# > **Claim P2.** Independent mask: within a bin, the mask M'[a:b, a:b] is lower triangular for
# > each prompt, which stands in columns a to b, and M' is 0 elsewhere. *It holds.*
#
# > **Claim P3.** Restart positions: each prompt in a bin counts from 0. *It holds.*

# %%
packed = some_prompts(model)
print(packed.positions)

# %% [markdown]
# In notebook 2 the next token always came from the last column. Here a row has several prompts, so
# each prompt's next token is read where its own last token is. The pads may be on the right now.

# %%
five = letters(A=9, B=3, C=5, D=1, E=6)
ask("4.2: Without the independent mask, the causal rule alone: which of A to E pass the "
    "check?",
    guess=...)

# %%
with folded(), broken("neighbours in a packed row"):
    check("prepacked", five)
    show({"the causal rule alone": look("prepacked", five, step=0)})

# %% [markdown]
# (Red keys are seen, and should not be. Hatched ones are padding.)
#
# Now the mask is right again, but the positions run on from one prompt to the next:

# %%
with broken("positions that run on in a packed row"):
    check("prepacked", five)

# %% [markdown]
# ### Unpacking
#
# Afterwards each prompt's keys and values go into its own cache.
#
# > **Claim P4.** The unpacked KV caches are *exactly* those of the padded batch; time to first
# > token includes unpacking. *It holds up to rounding;* we unpack inside the forward pass, so
# > its time is included.
#
# We compare the keys and values of the last layer. They depend on all masks and positions before.


# %%
@torch.inference_mode()
def caches(layout):
    """{name: keys and values of the last layer} after a forward pass over whole prompts."""
    requests = prepare(letters(A=9, B=3, C=5, D=1, E=6), model.config)
    batch = layout([(request, len(request.prompt)) for request in requests])
    model(batch.tokens, batch.positions, batch.attend, batch.wanted)
    return {request.name: torch.stack(request.kv.read(3, len(request.prompt)))
            for request in requests}


padded, unpacked = caches(Rectangle), caches(Packed)
print({name: torch.allclose(padded[name], unpacked[name], atol=1e-5) for name in padded})

# %% [markdown]
# ### What to compare it with
#
# > **Claim P5.** The baselines: full batching pads to the longest; length-ordered batching
# > sorts all requests first; dataset prepacking packs over the whole set. *All three are here*,
# > and batches of 4 out of 8 prompts (for dataset prepacking 4 rows, however many prompts these
# > are) show the difference:

# %%
lengths = [9, 1, 8, 2, 7, 3, 6, 4]
for method, (group, layout) in prepacking.METHODS.items():
    requests = prepare(prepacking.requests_of(lengths), model.config)
    shapes = [tuple(layout(plan, None).tokens.shape) for plan in group(requests, 4)]
    slots = sum(torch.Size(shape).numel() for shape in shapes)
    print(f"{method:20} {str(shapes):20} {slots:3} slots for {sum(lengths)} tokens")

# %% [markdown]
# > **Claim P10.** Length-ordered batching still pads, and dataset prepacking beats it per
# > prompt. *Not always.* Counted in slots, it does on four of five synthetic kinds of prompts,
# > and loses on few-shot questions: lengths just above half of the longest sort well, but do
# > not fit side by side.

# %%
for kind in prepacking.KINDS:
    lengths = prepacking.lengths_of(kind, 64)
    slots = []
    for method in "length-ordered", "prepacking, dataset":
        group, layout = prepacking.METHODS[method]
        requests = prepare(prepacking.requests_of(lengths),
                           SimpleNamespace(block_size=512, vocab_size=97))
        slots.append(sum(layout(plan, None).tokens.numel() for plan in group(requests, 16)))
    print(f"{kind:20} {sum(lengths):6,} tokens; slots: sorted {slots[0]:6,}, packed {slots[1]:6,}")

# %% [markdown]
# ## No rows at all
#
# If the mask keeps requests apart, not the row, then why have rows? Every layer but attention
# takes a stream `(N,)` of tokens as it is. So stage 6, `generate_ragged.py`, puts the tokens of
# all requests one after another. `cu_seqlens` holds the cumulative lengths: request i owns the
# tokens from `cu_seqlens[i]` to `cu_seqlens[i + 1]`. Such a batch is called *ragged*.

# %%
requests = letters(A=10, B=30)
stream = look("ragged, mask", requests, step=0)
print("tokens:", tuple(stream.ids.shape), " cu_seqlens:", stream.batch.cu_seqlens)

# %% [markdown]
# > **Claim H11.** Ragged batching: concatenate, with a block-diagonal causal mask; no padding
# > at all, the same outputs. *It holds.*

# %% [markdown]
# `starts` says how many tokens of each request are cached, `ends` how many it has with the new
# ones:

# %%
source(Flat.block_diagonal)
show({"stage 6: three decodes and a chunk of D's prompt": look(
    "ragged, mask", letters(A=4, B=2, C=1, D=6, arrivals={"D": 1}), step=1, token_budget=7)});

# %%
check("ragged, mask", requests)
with broken("a stream without boundaries"):
    check("ragged, mask", requests)

# %% [markdown]
# Nothing else separates the requests. In the pass over the prompts, B sees A. When both decode, A
# sees B, because the causal rule alone compares places in the stream.
#
# ## Masking is not skipping
#
# In the picture purple keys come from the cache, and orange keys are computed in this pass. The
# white cells are computed, too, and then hidden. The alternative, called *varlen* for variable
# lengths, goes from request to request and computes only the diagonal blocks.

# %%
masked, skipped = (look(stage, requests, step=0).record
                   for stage in ("ragged, mask", "ragged, varlen"))
print(f"masked {masked.score_entries:,}, skipped {skipped.score_entries:,}, "
      f"useful by the causal rule {masked.useful_scores:,}")

# %% [markdown]
# > **Claim R3.** Flat scores of 40 × 40: 1,600 computed, 1,000 within a request, 600 wasted
# > (counting the causal rule, 520 are useful). With R requests of length L, (R L)² against R
# > L². *It holds.*

# %%
three = letters(A=10, B=30, C=20)
ask("4.3: C, a prompt of 20 tokens, joins A and B. How many scores does the mask compute now?",
    guess=...)

# %%
ask("4.4: And how many does varlen compute?",
    guess=...)

# %% [markdown]
# > **Claim R6.** The same 1,000 tokens: one request has 10⁶ score entries per head and layer,
# > ten requests of 100 have 10⁵. *It holds.*


# %%
def scores(*lengths):
    """Score entries of stage 6 for whole prompts of these lengths."""
    prompts = letters(**{f"r{i}": n for i, n in enumerate(lengths)})
    prompts = prepare(prompts, SimpleNamespace(block_size=1000, vocab_size=1000))
    return Flat([(prompt, len(prompt.prompt)) for prompt in prompts]).cost()["score_entries"]


ask("4.5: Twenty requests of 50 tokens, 1,000 tokens again: how many scores?",
    guess=...)

# %%
print(f"one of 1,000: {scores(1000):,}      ten of 100: {scores(*[100] * 10):,}")

# %% [markdown]
# ### Your turn: the varlen loop
#
# Write the attention that skips. `q` holds the queries of all requests, `(heads, N, features)`.
# `caches[i]` is `(keys, values)` of request i, its new tokens already among them. `head(q, k, v)`
# returns the output.


# %% tags=["exercise"]
@exercise
def varlen(q, caches, cu_seqlens, head):
    """Returns the output (heads, N, features), in the order of the queries."""
    ...


# %% [markdown]
# <details><summary>Our answer</summary>
#
# ```python
# @exercise
# def varlen(q, caches, cu_seqlens, head):
#     out = []
#     for i, (keys, values) in enumerate(caches):
#         mine = q[:, cu_seqlens[i]:cu_seqlens[i + 1]]
#         out.append(head(mine, keys, values))
#     return torch.cat(out, dim=-2)
# ```
# </details>
#
# > **Claim R4.** Varlen: the loop over `cu_seqlens = [0, 10, 40]` computes 1,000 entries, and
# > none across requests. *It holds.* On a GPU, FlashAttention's varlen kernel does this in one
# > launch.
#
# ## The bill
#
# The same eight requests in four layouts:

# %%
from experiments.ladder import small_workload

eight = small_workload(model.config)
print("                passes  slots  padding  scores")
for stage in "interleaved", "prepacked", "ragged, mask", "ragged, varlen":
    knobs = {} if stage == "prepacked" else {"token_budget": 16}
    passes = run(stage, eight, max_batch=4, **knobs).passes
    print(f"{stage:16}{len(passes):6}{sum(p.slots for p in passes):7}"
          f"{sum(p.pad_slots for p in passes):9}{sum(p.score_entries for p in passes):8,}")

# %% [markdown]
# Stage 6 has stage 4's number of passes, and not one pad. Two wastes are left, and both are about
# memory: room is reserved for answers that may never come, and equal prompts are computed and kept
# once per request. Notebook 5 is about both.
#
# ## Three questions
#
# **1.** Prepacking saves padding in the prefill. Why does it do nothing for decode?
#
# <details><summary>Answer</summary>
#
# In decode each request has one new token, so there is nothing to pack: the padding there is among
# the past keys, whose lengths differ.
# </details>
#
# **2.** A stream has 32 decodes, each with 300 keys (its own new one included), and no chunk. How
# many scores does the masked way compute, and how many the varlen loop?
#
# <details><summary>Answer</summary>
#
# 32 × (32 × 300) = 307,200 against 32 × 300 = 9,600: the mask wastes a factor of 32, the number of
# requests.
# </details>
#
# **3.** In the packed row, E's tokens come before B's. Is it a coincidence that B's logits do not
# depend on where in the row it stands?
#
# <details><summary>Answer</summary>
#
# No. The mask hides everything but B, and B's positions count from 0. So nothing that B computes
# depends on its column.
# </details>
#
# **Next:** [05_memory](05_memory.ipynb).
