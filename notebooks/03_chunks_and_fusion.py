# %% [markdown]
# # 3. Chunks and fusion
#
# Dynamic batching computes a prompt in one piece, while all others wait. This notebook gives each
# step a budget of tokens, says which rows get a next token, puts decodes and prompts into one
# forward pass, and finds the bug in a published mask.

# %%
from lesson import ask, broken, check, counts, eight_requests, folded, gaps, letters, look
from lesson import results, run, run_all, show, source, timelines
from exercises import exercise
import torch
from request import indices_due
from scheduler import Scheduler

# %% [markdown]
# ## The stall
#
# Four requests decode. At step 8 a prompt of 768 tokens arrives. The picture shows, for each step,
# how long the four waited for their next token. (A model of GPT-2's size with random weights,
# measured beforehand; all but *dynamic* compute at most 64 tokens a step. *Interleaved*, the
# subject of this notebook, is the slowest of the others: you will see why, and the next notebook
# mends it, in *ragged*.)

# %%
gaps(results("gaps"));

# %% [markdown]
# With *dynamic*, all of them stand still until the whole prompt is computed. (The prompt arrives at
# step 8, and the peak is at step 9. For step 8 makes two passes: first the four decodes, then the
# prompt. The four have their tokens of step 8 before the long pass begins, and wait for it until
# step 9.)
#
# But a prompt's cache can be filled in pieces, with the same result (notebook 1). So let a step
# compute a limited number of tokens, the *token budget*.
#
# Two times matter to a user. *TTFT* is the time to the first token, from a request's arrival on.
# *ITL* is the time between one token and the next. The picture shows the ITL of the four; the
# newcomer feels its TTFT.
#
# In our Scheduler the budget takes one function, which makes the plan of a step. `todo` is how many
# of a request's known tokens are not computed yet. A decode has 1. So has a prompt of which only
# the last token is left, and the Scheduler treats it in the same way. Those that run get what they
# need, in the order in which they came, as far as the budget goes. Newcomers get the rest, while
# there is a place. (`admit` and `make_room` ask whether there is memory, and `preempted` says that
# there was too little: notebook 5. Here there is enough.)

# %%
source(Scheduler.schedule)

# %% [markdown]
# No line says that decodes come first. And yet no decode ever waits for a prompt. For at most one
# request that runs is *half done*, with a part of its prompt left, and it is always the last. Why?
# An example with 8 tokens a step. A and B are there at step 0; C brings a prompt of 10 tokens to
# step 1, D one of 6 to step 2, and E one of 9 to step 3. `C:6` is six tokens of C:

# %% jupyter={"source_hidden": true}
def plans(requests, **knobs):
    """What each step computes: ["A:3 B:2 C:3", ...], three tokens of A and so on."""
    passes = run("interleaved", requests, **knobs).passes
    return [" ".join(f"{name}:{n}" for name, _, n in p.work) for p in passes]

# %%
newcomers = letters(A=3, B=2, C=10, D=6, E=9, new=20, arrivals={"C": 1, "D": 2, "E": 3})
for step, plan in enumerate(plans(newcomers, token_budget=8)[:5]):
    print(f"step {step}: {plan}")

# %% [markdown]
# 1. In step 1, A and B decode, and C gets the other 6 tokens. C is half done: 4 of its 10 tokens
#    are left. It is so *because the budget is used up*, and for the same reason nobody is admitted
#    after C in this step.
# 2. In step 2, A and B decode, and C gets its 4. Now 2 tokens of the budget are left, so D is
#    admitted, after C. It gets 2 of its 6, the budget is used up, and D is the one that is half
#    done. C no longer is.
# 3. In step 3, A, B and C decode, D gets its 4, and E the last token of the budget.
#
# So a request that is half done is the last that runs: nobody is admitted after it in the step that
# cuts its prompt, nor in any later step until a step gives it all that is left of its prompt. The
# requests before it need one token each, and come first. The budget always has a token for each of
# them: each was admitted with a token that the others left, so there are never more requests than
# tokens.
#
# ## By hand
#
# Three requests, at most 8 tokens a step. A's prompt has 3 tokens, B's 2, C's 12. All are there at
# step 0, and each wants many tokens.

# %%
ask("3.1: How many tokens of C do steps 0, 1 and 2 compute? (a list: [.., .., ..])", guess=...)

# %%
ask("3.2: The same with a budget of 3: in which step (0, 1, 2, ...) is the last token of C's "
    "prompt computed?", guess=...)

# %%
with folded():
    for step, plan in enumerate(plans(letters(A=3, B=2, C=12, new=20), token_budget=3)[:14]):
        print(f"step {step:2}: {plan}")

# %% [markdown]
# ### What if prompts go first?
#
# Suppose that the running requests were sorted, those with the most to do first. Decodes then wait
# until no prompt is left to compute. (A newcomer is admitted as before, behind those that run. So
# C begins in step 1, beside the decodes of A and B, and stands before them from step 2 on.) What
# does that change?

# %%
three = letters(A=3, B=2, C=30, new=12)

# %%
ask("3.3: Prompts before decodes, 5 tokens a step, and C's prompt has 30. Of A's 12 tokens, how "
    "many come later than with decodes first, and how many differ? ([.., ..])", guess=...)

# %%
with folded(), broken("prompts before decodes"):
    check("interleaved", three, token_budget=5)

# %%
with broken("prompts before decodes", show=False):
    prompts_first = run("interleaved", three, token_budget=5)
decodes_first = run("interleaved", three, token_budget=5)
prompts_first.stage, decodes_first.stage = "prompts first", "decodes first"
timelines([prompts_first], columns=1);

# %% [markdown]
# Prompts first: A and B wait until C's whole prompt is computed, and the stall is back. How long
# does each wait at most for a token? (A request waits for its first token from its arrival on, and
# for the others from the token before. A token that comes in step 0 is a wait of one step.)

# %% jupyter={"source_hidden": true}
def waits(trace):
    """{name: the longest that it waits for a token, in steps}"""
    return {r.name: max(b - a for a, b in zip([r.arrival - 1, *r.token_steps], r.token_steps))
            for r in trace.requests}

print("prompts first, the longest wait in steps:", waits(prompts_first))

# %%
ask("3.4: And with decodes first, as our Scheduler does, with 5 tokens a step? (for A, B and C: "
    "[.., .., ..])", guess=...)

# %%
with folded():
    for trace in prompts_first, decodes_first:
        print(f"{trace.stage}, the longest wait in steps: {waits(trace)}")
    timelines([decodes_first], columns=1)

# %% [markdown]
# ## When may one sample?
#
# C's prompt is computed in chunks. Each chunk has a last token, and that token has logits. Does the
# largest of them give C's next token?

# %%
source(indices_due)

# %% [markdown]
# No: C's next token is known already, it stands in the prompt. Only when the plan covers all that a
# request has to do, do its last logits give a new token.

# %%
with broken("samples from a partial prefill"):
    check("interleaved", three, token_budget=5)

# %% [markdown]
# A and B were computed in one piece, and are right. C's prompt was cut into chunks, and its first
# "token" was sampled in the middle of it.
#
# ## One pass instead of two
#
# *Chunked* makes two forward passes in a step: one for the decodes, one for the chunks. Each reads
# all weights. But the model does not know what a decode is. It sees tokens and positions.

# %%
for stage in "chunked", "interleaved":
    print(stage, "shapes of the passes:",
          [p.shape for p in run(stage, three, token_budget=12).passes[:9]])

# %% [markdown]
# Both begin with prompts alone, `(3, 7)`. Then *chunked* alternates between `(2, 1)`, decodes, and
# a chunk of C's prompt, while *interleaved* mixes both in one rectangle of three rows. Both end
# with `(3, 1)`, decodes alone.
#
# ### The example of the source
#
# The tutorial that introduced this fused pass has an example. A, B and C have prompts of 22, 15 and
# 9 tokens, and each computes the token after its prompt, at position 22, 15 and 9 (the first token
# is at 0). D brings a chunk of 8 tokens. Our scheduler makes the same step:

# %%
example = letters(A=22, B=15, C=9, D=8, new=3, arrivals={"D": 1})
fused = look("interleaved", example, step=1)
print(fused.positions, f"\n{fused.record.slots} slots, {fused.record.pad_slots} of them padding")

# %% [markdown]
# The same in small, so that the mask fits a screen. A, B and C decode at positions 6, 4 and 2, and
# D brings a chunk of 4:

# %%
small = letters(A=6, B=4, C=2, D=4, new=3, arrivals={"D": 1})
show({"interleaved: decodes of A, B, C, and a chunk of D": look("interleaved", small, step=1)});

# %% [markdown]
# There are *two kinds of pads* in this picture. On the left, the pasts (purple) have different
# lengths. In the middle, the rows have different numbers of new tokens (orange). Both kinds must be
# hidden.

# %%
ask("3.5: In the tutorial's example, 21 of the 32 slots for new tokens are padding. The rows also "
    "have slots for the past, 22 each. How many of these 88 are padding?", guess=...)

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
# ## The published mask
#
# The tutorial builds a mask for the padding of the past, and marks *all* T new slots as valid:

# %%
with broken("published mask", show=False):
    check("interleaved", example)

# %%
with folded(), broken("published mask"):
    print("The line that changes is the one that you have written.")

# %% [markdown]
# The tour has its picture. D's row is the widest, so it is right. B and C are wrong from their
# first token on: their prompts are shorter than A's, so their rows had new pads in step 0, too.
#
# ## Writing back
#
# After attention, the new keys and values go into each request's own cache. Row D has added 8
# tokens, the others one each, and the pads must stay out.

# %%
with broken("pads written to the cache"):
    check("interleaved", example)

# %% [markdown]
# D has no pads in its row, so the mistake spares it. A, B and C have cached a pad where a token
# belongs.
#
# ## What fusing costs
#
# A prompt of n tokens arrives, and B − 1 requests decode. All share one rectangle. How many pads
# does the step compute, among the new slots?

# %% jupyter={"source_hidden": true}
def pads(n, B):
    """Pad slots of the step in which a prompt of n arrives beside B - 1 decodes."""
    running = letters(**{f"r{i}": 4 for i in range(B - 1)})
    newcomer = letters(N=n, arrivals={"N": 1})
    fused = look("interleaved", running + newcomer, step=1, max_batch=B, token_budget=256)
    return fused.record.pad_slots

# %%
ask("3.6: 693 pads for n = 100 and B = 8. How many for n = 200 and B = 16?", guess=...)

# %%
with folded():
    for n, B in (100, 8), (200, 8), (100, 16), (200, 16):
        print(f"n = {n}, B = {B:2}: {pads(n, B):5,} pad slots")

# %% [markdown]
# ## What fusing saves
#
# A pass reads all weights once, whatever it computes: for Llama 2 7B that is 13.2 GB (notebook 6).
# *Chunked* makes two passes in each step that has both decodes and a chunk, *interleaved* one.

# %% jupyter={"source_hidden": true}
def prompt_beside_decodes(stage):
    """The passes from the arrival of a prompt of 250 tokens, beside four decodes, to its end."""
    requests = letters(r1=4, r2=4, r3=4, r4=4, N=250, new=20, arrivals={"N": 1})
    requests[-1].max_new_tokens = 1
    trace = run(stage, requests, token_budget=64)
    last = trace.requests[-1].token_steps[0]
    return [p for p in trace.passes if 1 <= p.step <= last]

# %%
ask("3.7: Four requests decode, and a prompt of 250 tokens arrives. A step has 64 tokens. How many "
    "GB of weights does fusing save until that prompt is computed? (13.2 GB a pass)", guess=...)

# %%
with folded():
    for stage in "chunked", "interleaved":
        passes = prompt_beside_decodes(stage)
        print(f"{stage:11} {len(passes):2} passes, {13.2 * len(passes):5.1f} GB of weights read, "
              f"{sum(p.pad_slots for p in passes):3} pad slots computed")

# %% [markdown]
# When does the rectangle win? If computing all its slots, pads included, takes less time than
# reading the weights twice. How many rows a machine computes while it reads the weights is a number
# of that machine: well over a hundred for an A100, and far fewer for a CPU. So few decodes beside a
# narrow chunk are best fused, and many beside a wide one are not. Notebook 6 asks where the two
# meet.
#
# Here are the eight requests of the tour again:

# %%
counts(run_all(("dynamic", "chunked", "interleaved"), eight_requests(), max_batch=4,
               token_budget=16), slots="slots", padding="pad_slots", padded_keys="padded_keys")

# %% [markdown]
# (*Padded keys* are those that attention reads beside the requests' own.)
#
# With all these pads the fused pass is often *slower* than the two passes of *chunked*, on a CPU,
# and beside a long chunk on a GPU as well. One pass is right; the rectangle is not. Notebook 4
# keeps the pass and drops the rectangle: then fusing costs nothing, and saves the same.
#
# **Turn this knob.** Take a `token_budget` of 4 in the last cell, and then of 64. Predict first:
# which of the counts of *interleaved* becomes larger, and which smaller?
# <details><summary>Answer</summary>
#
# With 4, chunks are at most 4 wide: only 34 slots and 534 keys are padding, but there are 36
# passes. With 64 there are 17 passes, with 168 and 759. A narrow rectangle wastes less, but the
# weights are read more often. (From 16 to 64, padding falls a little: then F's prompt is a single
# chunk, in a single step.)</details>
#
# <details><summary>Claims of published texts that were met here</summary>
#
# *Wrong as published:* all new slots are marked valid (I8 of
# [docs/sources.md](../docs/sources.md)); pads grow quadratically (H9; they are linear in n and in
# B); the newest of 22 tokens is at position 22 (I1; at 21).
#
# *Hold:* a budget for each step, decodes first, then chunks (H12); a fused step is one call of the
# model instead of two (I3); pads must be stripped when the cache is written (I4); never sample from
# a partial prefill (I5); without decodes it is a plain prefill, and the reverse (I6).</details>
#
# **Next:** [04_no_rows](04_no_rows.ipynb).
