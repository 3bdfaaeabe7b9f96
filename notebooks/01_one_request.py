# %% [markdown]
# # 1. One request
#
# Which token may see which, why keys and values are kept and nothing else, and what that costs.
#
# A cell with `ask` wants a guess from you: replace `...` with your answer and run it again. An
# answer is a value of Python: a number, which Python may calculate (`9 * 11`), a list (`[10, 11]`),
# letters in quotes (`"X Y"`), or `"none"`. The first two wrong guesses get a hint each, the third
# the answer; what cannot be read is not counted. A cell with `@exercise` wants a few lines of code,
# and judges them as often as you like. Cells that only prepare something are folded: run them, too.

# %%
from lesson import ask, broken, check, folded, letters, look, model, run, show, source
from lesson import texts, tokenizer, word
from exercises import exercise
import torch
from model import Block, Head, MultiHeadAttention
from cache import KV
from generate_unbatched import Alone

request = texts("Return the value of this function if")[0]
n = len(request.prompt)
print(n, "tokens:", [word(request, i) for i in range(n)])

# %% [markdown]
# `␣` stands for a space. The model is small: 4 layers of 4 heads, 128 wide, trained on Python's
# documentation. Its texts make little sense.
#
# Words as in [the tour](00_tour.ipynb): *prefill* computes the tokens of a prompt, *decode* the one
# that was generated last. To *compute* a token is to take its numbers through all layers; one call
# of the model, for some tokens, is a *forward pass*. For each token it returns *logits*, a number
# for each token of the vocabulary, by which the next one is chosen. A *step* is one round of the
# loop that serves, here one pass. A *stage* is one of the repository's scripts. The first,
# *unbatched*, runs one request at a time. (Other words are in the
# [glossary](../docs/glossary.md).)
#
# ## Where tokens meet
#
# A model's layers are the same code four times. This is one of them. The comments say how large a
# tensor is. `(..., T, C)` has T tokens with C features each, here 128. `(..., nh, T, hs)` has the
# same numbers split by heads: nh = 4 heads, with hs = 32 features each. The dots stand for what may
# come in front: here a 1, as there is one request.

# %%
source(Block.forward)
source(MultiHeadAttention.forward)

# %% [markdown]
# `x` holds one row of numbers for each token. LayerNorm (`ln_1`, `ln_2`), the projections (`query`,
# `key`, `value`, `c_proj`), the residual adds and the MLP work on each row by itself, as if the
# others were not there. There is a single exception: the line that calls `attend`. That function is
# handed to the model from outside, because every stage has its own. All of them compute attention:
# a token's query meets the keys of the tokens that it may see, and their values are mixed.
#
# Is that so? The parts of the first block on a tensor of n rows, and on one of them alone:

# %%
block = model.h[0]
x = torch.randn(n, 128, generator=torch.Generator().manual_seed(0))
for name in "ln_1", "attn.query", "attn.key", "attn.value", "attn.c_proj", "ln_2", "mlp":
    step = block.get_submodule(name)
    print(f"{name:12} row 3 is the same alone:",
          torch.allclose(step(x)[3], step(x[3:4])[0], atol=1e-6))

# %% [markdown]
# ## Change one token
#
# Now the whole model. In a GPT, a token sees itself and those before it. Token 3 becomes another
# one. Which rows change, after which layer? (`moved_rows` runs both prompts and compares. You need
# not read how.)

# %% jupyter={"source_hidden": true}
def moved_rows(changed_token, attend=None):
    """After each layer, the rows that differ if one token of the prompt is replaced."""
    tokens = torch.tensor([request.prompt, request.prompt])
    tokens[1, changed_token] = 5
    after = []
    hooks = [block.register_forward_hook(lambda m, i, out: after.append(out)) for block in model.h]
    model(tokens, attend=attend) if attend else model(tokens)
    for hook in hooks:
        hook.remove()
    return [[i for i in range(n) if (x[0, i] - x[1, i]).abs().max() > 1e-4] for x in after]

# %%
ask("1.1: Token 3 of 7 changes. Which of the rows 0 to 6 differ after the last layer? (a list)",
    guess=...)

# %%
with folded():
    print("after each layer, these rows differ:", *moved_rows(changed_token=3), sep="\n")

# %% [markdown]
# What happens if no token may see any? `Head`, the repository's attention, gets a mask that is
# False everywhere. (A softmax over no key would be NaN; `Head` returns zeros there.)

# %%
nothing = torch.tensor([[False]])
print(*moved_rows(3, attend=lambda layer, q, k, v: Head()(q, k, v, mask=nothing)), sep="\n")

# %% [markdown]
# Now row 3 alone changes: no token learns anything of another. So attention decides everything. Put
# any tokens of any requests into one tensor: if each of them sees the right keys in `attend`, the
# results are right, for nothing else in the model connects them. This is what makes batching easy.
#
# ## Reading a mask
#
# `look` runs a stage of the repository and X-rays one of its forward passes: it measures which keys
# each query really sees. A line is a query, a column is a key. *New* keys are computed in this
# pass.

# %%
show({"unbatched, the whole prompt": look("unbatched", [request], step=0)}, label=word);

# %% [markdown]
# Take a token on the left and read to the right: the orange keys are those it sees. `␣value` sees
# `Return`, `␣the` and itself. A query may not look ahead, because when a token is generated, what
# comes later does not exist yet. That is the *causal rule*.
#
# What happens in an orange cell? The query's dot product with the key is a *score*. A softmax over
# a row's scores gives weights, and the row's output is the weighted sum of the values. In code:

# %%
def attention(q, k, v, see):
    """q (T, hs), k and v (S, hs), see (T, S): True where the query may see the key."""
    scores = (q @ k.T) / q.size(-1) ** 0.5                # (T, S)
    weights = scores.masked_fill(~see, -torch.inf).softmax(dim=-1)
    return weights @ v                                    # (T, hs)

g = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(n, 32, generator=g) for _ in "qkv")
ours = attention(q, k, v, see=torch.ones(n, n, dtype=torch.bool).tril())
print("the same as the model's Head:", torch.allclose(ours, Head()(q, k, v), atol=1e-6))

# %%
ask("1.2: A prompt of 7 tokens has 49 scores (per head and layer). How many has one of 70?",
    guess=...)

# %%
for length in 7, 14, 28:
    prefill = run("unbatched", letters(A=length, new=1)).passes[0]
    print(f"{length:3} tokens: {prefill.score_entries:5,} scores, of which the causal rule uses "
          f"{prefill.useful_scores:,}")

# %% [markdown]
# ## One token more
#
# To generate, we append the new token and run the model again, over eight rows now.

# %%
ask("1.3: An eighth token is appended. Which of the rows 0 to 6 change, in any layer? (a list, or "
    "'none')", guess=...)

# %%
with folded():
    before, after = (model(torch.tensor([tokens]))[0] for tokens in (
        request.prompt, [*request.prompt, 5]))
    print("rows whose logits differ:", [i for i in range(n) if not torch.allclose(
        before[i], after[i], atol=1e-4)])

# %% [markdown]
# So a cache is exact: what has been computed for a token stays as it is. What of the old tokens
# does a new token need? Its query needs their *keys and values*. Those we keep: that is the KV
# cache. Old queries, outputs and logits are not needed again.
#
# And the last token? The next one is chosen by *its* logits. They come from its own query, which is
# in no cache. So the last token always goes through all layers, even if its key and value were
# known. It is the one token that a cache never saves.
#
# *Unbatched* writes the new tokens' keys and values at `start`, and then reads all of them. `KV` is
# the cache, and `Alone` holds what `attend` has to know in this stage:

# %%
source(KV.write)
source(KV.read)
source(Alone.attend)

# %% [markdown]
# Without a cache, the forward pass for each new token computes a row more than the pass before it.
# With a cache:

# %%
without, with_cache = (run(stage, [request]) for stage in ("unbatched, no cache", "unbatched"))
for a, b in list(zip(without.passes, with_cache.passes))[:4]:
    print(f"without a cache {a.shape[1]:2} rows, {a.score_entries:3} scores     "
          f"with a cache {b.shape[1]} rows, {b.score_entries:2} scores")
print([tokenizer.decode(trace.requests[0].tokens) for trace in (without, with_cache)])

# %% [markdown]
# How much time this saves depends on the machine and on the length. Here are 200 tokens, on yours:

# %% tags=["machine"]
long = letters(A=8, new=200)
for stage in "unbatched, no cache", "unbatched":
    trace = run(stage, long)
    print(f"{stage}: {sum(p.slots for p in trace.passes):,} rows, "
          f"{sum(p.seconds for p in trace.passes):.2f} s")

# %% [markdown]
# A hundred times fewer rows, but not a hundred times faster. For one row, the processor still reads
# all weights from memory, and Python takes its share. The other notebooks are about what helps
# against that.
#
# ## What a cache costs
#
# One token costs 2 · layers · heads · features numbers: a key and a value, in each layer, for each
# head. For Llama 2 7B (32 layers, 32 heads of 128 features) in fp16, two bytes a number, that is 16
# KiB (of 1,024 bytes) in each layer, and 512 KiB in all.

# %%
def cache_bytes(tokens, layers, heads, head_size, bytes_per_number=2):
    return tokens * 2 * layers * heads * head_size * bytes_per_number

# %%
ask("1.4: Llama 2 7B in fp16: how many GB (10⁹ bytes) do 32 caches take together, of 4,096 tokens "
    "each? (to 1%)", guess=...)

# %% [markdown]
# ## In pieces
#
# A prompt's cache can be filled in pieces, too. Seven tokens in chunks of four: first four queries,
# then three queries that see the first four keys in the cache. (The stage *chunked* does this, so
# we borrow it.) Three masks side by side:

# %%
show({f"a prompt: {n} x {n}": look("unbatched", [request], step=0),
      f"one more token: 1 x {n + 1}": look("unbatched", [request], step=1),
      "the second chunk": look("chunked", [request], step=1, token_budget=4)}, label=word);

# %% [markdown]
# The three are one and the same rule. There are S keys, and the last T of them are the new tokens'.
# So new token number i, counted from 0, is at position S - T + i, and sees the keys 0 to S - T + i:
#
# | | T | S | the first new token sees | the last one sees |
# |---|---|---|---|---|
# | a prompt | 7 | 7 | key 0 | all 7 |
# | one more token | 1 | 8 | all 8 | |
# | the second chunk | 3 | 7 | keys 0 to 4 | all 7 |
#
# So one `Head` serves prefill and decode, and any split into chunks gives the same logits:

# %%
for budget in 1, 2, 3, 4, n:
    trace = run("chunked", [request], token_budget=budget)
    chunks = [size for p in trace.passes for _, first, size in p.work if first < n]
    print(f"chunks {chunks}: {tokenizer.decode(trace.requests[0].generated)!r}")
    check("chunked", [request], token_budget=budget)

# %% [markdown]
# `check` compares the logits of every generated token with those of the request run alone, up to
# rounding, and then the tokens. *Identical* means that both agree.
#
# ## Your turn: the causal rule with a past
#
# Write the mask for T new tokens and S keys, past included.

# %% tags=["exercise"]
@exercise
def causal_rule(T, S):
    """Returns a boolean tensor (T, S), True where query i may see key j. T <= S."""
    ...

# %% [markdown]
# ## Break it
#
# A mistake that is easy to make: let the triangle begin in the top left corner, as PyTorch's
# `scaled_dot_product_attention(is_causal=True)` does. For a whole prompt there is no difference, so
# token 0 of the answer will be right. Token 1 comes from the first pass with a past.

# %%
with broken("causal rule from the top left", show=False):
    check("unbatched", [request])
    wrong = look("chunked", [request], step=1, token_budget=4)
show({"broken": wrong,
      "correct": look("chunked", [request], step=1, token_budget=4)}, label=word);

# %%
with folded(), broken("causal rule from the top left"):
    print("The rule that changes is the one that you have written.")

# %% [markdown]
# The three queries are at positions 4, 5 and 6, but see only as much as positions 0, 1 and 2 would.
# Keys with a red outline must be seen, and are not.
#
# **Turn this knob.** Above, a chunk has 4 tokens. Draw the correct mask for `token_budget=3` and
# `step=1`, and before you look, say: how many keys come from the cache, and how many are new?
# <details><summary>Answer</summary>
#
# 3 from the cache, those of the first chunk, and 3 new ones. The seventh token is left for step 2.
# </details>
#
# ## A question
#
# A friend wants to cache the attention *outputs* too, so that a new token need not look at
# the old keys at all. Why does that not work?
# <details><summary>Answer</summary>
#
# The old tokens' outputs are indeed final, but no later step reads them. The new token's own output
# is a weighted sum of all values, and its weights depend on its own query, which is new. So it
# needs every key and every value.</details>
#
# <details><summary>Claims of published texts that were met here</summary>
#
# All hold ([docs/sources.md](../docs/sources.md)): tokens interact in attention alone (H1), and all
# other steps give the same rows whatever is beside them (R2); scores grow with n² (H2); the last
# token changes nothing before it (H3); with a cache, one more token costs O(n) (H4); the size of a
# token's cache (H5); chunks give the same logits and cache for any split (H6); one `Head` serves
# prefill and decode (I2).</details>
#
# **Next:** [02_rectangles](02_rectangles.ipynb) puts several requests into one tensor.
