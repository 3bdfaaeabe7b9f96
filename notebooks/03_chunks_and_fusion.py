# %% [markdown]
# # 3. Chunks and fusion
#
# Stage 2 computes a prompt in one piece, while all others wait. After this notebook you can
#
# - write down what a scheduler with a token budget does, step by step;
# - say which rows of a batch get a next token, and which must not;
# - put decodes and prompts into one forward pass, and build its mask;
# - find the bug in a published tutorial's mask.

# %%
from lesson import ask, broken, check, exercise, folded, letters, look, model, run, show, source
import torch  # noqa: F401 (your code below needs it)
from experiments import figures
from experiments.results import load as results
from request import indices_due
from scheduler import Scheduler

# %% [markdown]
# ## The stall
#
# Four requests decode. At step 8 a prompt of 768 tokens arrives. The picture shows, for each step,
# how long the four waited for their next token. (A model of GPT-2's size with random weights, 64
# tokens a step: `python -m experiments.rows --gaps --model random`; the results are committed.
# *Interleaved* is the subject of this notebook, *ragged* of the next. Dark red is *dynamic*, light
# blue *chunked*, olive *interleaved*, brown *ragged*.)

# %%
measured = results("gaps")
print(measured["where"])
figures.itl(measured["points"], arrival=8, prompt_tokens=measured["prompt_tokens"]);

# %% [markdown]
# With *dynamic*, stage 2, all of them stand still until the whole prompt is computed. (Stages 2
# and 3 compute the decodes of a step first, so there the delay shows in the token of step 9.) But
# a prompt's cache can be filled in pieces, with the same result (notebook 1). So let a step
# compute a limited number of tokens, the *token budget*.
#
# > **Claim H12.** Continuous batching is a budget of m tokens per step: all decodes first, at 1
# > token each; the rest is filled with prefill chunks. Finished requests leave at once and are
# > replaced. Every computed token is a useful one (until preemption, notebook 5, recomputes
# > some). *It holds* for tokens; a rectangle's pads come on top.
#
# In our Scheduler the budget is shared out in these lines. `todo` is how many of a request's known
# tokens are not computed yet. A decode has 1. So has a prompt of which only the last token is
# left, and the Scheduler treats it in the same way.

# %%
source(Scheduler.share_budget)

# %% [markdown]
# ## By hand
#
# Three requests, at most 8 tokens a step. A's prompt has 3 tokens, B's 2, C's 12. All are there at
# step 0, and each wants many tokens. Write a plan as `"X4 Y1"`: X computes 4 tokens, Y 1.


# %%
def plans(requests, **knobs):
    """What each step computes: ["A3 B2 C3", ...]."""
    passes = run("interleaved", requests, **knobs).passes
    return [" ".join(f"{name}{n}" for name, _, n in p.work) for p in passes]


ask("3.1: The plans of steps 0, 1 and 2? (a list of three strings)",
    guess=...)

# %%
ask("3.2: The same with a budget of 4: after which step (0, 1, 2, ...) is C's prompt "
    "complete?",
    guess=...)

# %%
with folded():
    for step, plan in enumerate(plans(letters(A=3, B=2, C=12, new=20), token_budget=4)[:8]):
        print(f"step {step}: {plan}")

# %% [markdown]
# ### What if prompts go first?
#
# It is only a matter of order. What does it change?

# %%
three = letters(A=3, B=2, C=30, new=12)
ask("3.3: Prompts before decodes. How many of three requests get wrong tokens?",
    guess=...)

# %%
with folded(), broken("prompts before decodes"):
    check("interleaved", three, token_budget=5)

# %%
with broken("prompts before decodes", show=False):
    prompts_first = run("interleaved", three, token_budget=5)
decodes_first = run("interleaved", three, token_budget=5)
prompts_first.stage, decodes_first.stage = "prompts first", "decodes first"
figures.timelines([prompts_first, decodes_first], columns=1);

# %% [markdown]
# Blue is prefill, green is decode, hatched grey is padding, and on a thin line a request waits.
# Prompts first: A and B wait until C's whole prompt is computed, and the stall is back. Decodes
# first: A and B get a token in every step. The price is that C's first token comes later.
#
# ## When may one sample?
#
# C's prompt is computed in chunks. Each chunk has a last token, and that token has logits. Does the
# largest of them give C's next token?

# %%
source(indices_due)

# %% [markdown]
# No: C's next token is known already, because it is the next token of the prompt. The logits of a
# last token say something new only when the plan covers all that the request has to do.
#
# > **Claim I5.** Never sample from a partial prefill; the last row's last logit is the first
# > token only when the prompt is complete. *It holds.*

# %%
with broken("samples from a partial prefill"):
    check("interleaved", three, token_budget=5)

# %% [markdown]
# A and B were computed in one piece, and are right. C's prompt was cut into chunks, and its first
# "token" was sampled in the middle of it.
#
# ## One pass instead of two
#
# Stage 3 makes two forward passes in a step: one for the decodes, one for the chunks. Each reads
# all weights. But the model does not know what a decode is. It sees tokens and positions.
#
# > **Claim I3.** A fused step makes one model call where chunked prefill makes two. *It holds.*
#
# > **Claim I6.** With no decodes the fused call is a plain prefill, with no prefill a plain
# > decode. *It holds.*

# %%
for stage in "chunked", "interleaved":
    print(stage, "shapes of the passes:",
          [p.shape for p in run(stage, three, token_budget=12).passes[:9]])

# %% [markdown]
# Both begin with prompts alone, `(3, 7)`. Then stage 3 alternates between `(2, 1)`, decodes, and a
# chunk of C's prompt, while stage 4 mixes both in one rectangle of three rows. Both end with `(3,
# 1)`, decodes alone.
#
# ### The example of the source
#
# The tutorial that introduced this fused pass has an example. A, B and C decode at positions 22,
# 15 and 9. D brings a chunk of 8 tokens. We reproduce it: three prompts of 22, 15 and 9 tokens
# arrive at step 0, and D at step 1.

# %%
example = letters(A=22, B=15, C=9, D=8, new=3, arrivals={"D": 1})
fused = look("interleaved", example, step=1)
print(fused.positions)

# %%
show({"stage 4: decodes of A, B, C, and a chunk of D": fused});

# %% [markdown]
# > **Claim I1.** A, B and C decode at positions 22, 15 and 9, beside a chunk of 8 of D: a
# > rectangle of 4 × 8, 11 tokens within a budget of 16 (ours is 64, so that three prompts fit
# > into step 0), 21 pad slots, and padded past keys besides. *It holds*, but for one slip.
# > *Wrong as published:* A has "produced 22 tokens" and decodes at position 22. By the source's
# > own formula, position = tokens − 1, its newest token is at 21.
#
# There are *two kinds of pads* in this picture, both hatched grey. On the left, the pasts (purple)
# have different lengths. In the middle, the rows have different numbers of new tokens (orange).
# Both kinds must be hidden.

# %%
ask("3.4: In the picture 21 of 32 slots are padding. If D's chunk had 16 tokens instead of 8,"
    " how many slots would be padding?",
    guess=...)

# %% [markdown]
# ### Your turn: the mask of one row
#
# A row's keys are P slots for the past, with the request's `start` cached tokens at their right
# end, then T slots for new tokens, with its `n` tokens at their right end. Which may be seen?
# (`Head` adds the causal rule.)


# %% tags=["exercise"]
@exercise
def row_mask(start, n, P, T):
    """Returns a boolean tensor (P + T,), True where a slot holds a token of this request."""
    ...


# %% [markdown]
# <details><summary>Our answer</summary>
#
# ```python
# @exercise
# def row_mask(start, n, P, T):
#     mask = torch.zeros(P + T, dtype=torch.bool)
#     mask[P - start:P] = True        # its past
#     mask[P + T - n:] = True         # its new tokens, not their pads
#     return mask
# ```
# </details>
#
# ## The published mask
#
# The tutorial builds a mask for the padding of the past, and marks *all* T new slots as valid. No
# error is raised. Here it is:

# %%
with broken("published mask"):
    check("interleaved", example)
    published = look("interleaved", example, step=1)
show({"the published mask": published});

# %% [markdown]
# > **Claim I8.** *Wrong as published:* all new slots are marked valid, so left-padded rows
# > attend to their pad slots. Here that moves logits by up to a third of the largest. With the
# > pads masked, only rounding is left.
#
# Red keys are seen, and should not be. They belong to no token. They are pads with arbitrary
# contents, and each takes part of the softmax's weight. B and C are wrong from their first token
# on: their prompts are shorter than A's, so their rows had new pads in step 0, too. Neither an
# error message nor a look at the output reveals the bug; only the comparison with the unbatched
# run does.
#
# ## Writing back
#
# After attention, the new keys and values go into each request's own cache. Row D has added 8
# tokens, the others one each, and the pads must stay out.
#
# > **Claim I4.** Padding must be stripped per row when the cache is written back, since each
# > row added a different number of tokens. *It holds.*

# %%
with broken("pads written to the cache"):
    check("interleaved", example)

# %% [markdown]
# D has no pads in its row, so the mistake spares it. A, B and C have cached a pad where a token
# belongs.
#
# ## What the fused rectangle wastes
#
# A prompt of n tokens arrives, and B − 1 requests decode. How many pads does the step compute?


# %%
def pads(n, B):
    """Pad slots of the step in which a prompt of n arrives beside B - 1 decodes."""
    running = letters(**{f"r{i}": 4 for i in range(B - 1)})
    newcomer = letters(N=n, arrivals={"N": 1})
    fused = look("interleaved", running + newcomer, step=1, max_batch=B, token_budget=256)
    return int((fused.ids == 0).sum())


ask("3.5: 693 pads for n = 100 and B = 8. How many for n = 200?",
    guess=...)

# %%
with folded():
    for n, B in (100, 8), (200, 8), (100, 15):
        print(f"n = {n}, B = {B:2}: {pads(n, B):,} pad slots")

# %% [markdown]
# <details><summary>The claim, once you have answered</summary>
#
# > **Claim H9.** Dynamic batching in one rectangle needs (n − 1)(B − 1) pad tokens to admit a
# > prompt of n beside B − 1 decodes: for n = 100 and B = 8, 693. *The formula holds.* *Wrong as
# > published:* "grows quadratically with both batch size and prompt length". It is linear in
# > each, and padded keys come on top.
#
# </details>

# %%
from experiments.ladder import small_workload

eight = small_workload(model.config)
print("              passes  slots  padding  padded keys")
for stage in "dynamic", "chunked", "interleaved":
    passes = run(stage, eight, max_batch=4,
                 **({} if stage == "dynamic" else {"token_budget": 16})).passes
    print(f"{stage:14}{len(passes):5}{sum(p.slots for p in passes):8}"
          f"{sum(p.pad_slots for p in passes):8}{sum(p.padded_keys for p in passes):12,}")

# %% [markdown]
# The fused pass reads the weights once a step instead of twice, and pays with padding. One pass is
# right; the rectangle is not. Which of the two wins depends on the machine. On a CPU, where
# arithmetic is scarce, the fused rectangle of stage 4 is often *slower* than stage 3's two passes.
# Notebook 4 keeps the pass and drops the rectangle.
#
# ## Three questions
#
# **1.** Nine requests may run at a time, and the budget is 8. Eight decode, and a ninth arrives
# with a prompt of 100 tokens. When does its prefill begin?
#
# <details><summary>Answer</summary>
#
# When one of the eight is finished: their decodes fill the budget. Our Scheduler does not even
# admit it before then, so it holds no memory while it makes no progress. (Engines set the budget
# well above the number of requests that may run.)
# </details>
#
# **2.** A smaller budget makes the worst time between tokens shorter. What does it make worse?
#
# <details><summary>Answer</summary>
#
# The time to first token of long prompts, which now take more steps; and the number of passes,
# each of which reads all weights. In the first picture all of steps 10 to 21 are slower with chunks
# than *dynamic* is after its stall, because each of them carries a chunk.
# </details>
#
# **3.** Under the published mask, D passes the check in the example. Why does it?
#
# <details><summary>Answer</summary>
#
# It is as wide as the rectangle, so it has no pads among its new slots. Its past would have
# been masked correctly. Later, when D itself decodes beside a new chunk, it would be wrong as well.
# </details>
#
# **Next:** [04_no_rows](04_no_rows.ipynb).
