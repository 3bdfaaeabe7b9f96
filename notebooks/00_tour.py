# %% [markdown]
# # The tour: why batch, and how
#
# An LLM server gets many requests at once. This repository serves them in eight ways, called
# *stages*, each a script that you can read in one sitting. This notebook shows where they lead, and
# a bug that no error message betrays. You need not read every line of code here: notebooks 1 to 7
# take up one idea after another, with questions to answer and code to write. In the last one you
# build an engine.

# %%
from lesson import ask, broken, check, cost_of_rows, counts, eight_requests, folded, letters, lines
from lesson import look, run, run_all, show, sizes, texts, timelines, tokenizer

# %% [markdown]
# ## Six requests, one batch
#
# A small trained model comes with the repository. It has learned how Python's documentation looks,
# not what it says. Here are six prompts, served together by the stage *ragged*. (*Varlen* names the
# way in which it computes attention: notebook 4.)

# %%
prompts = ["# json\n", "Return the value of", "# asyncio.run\nRun", "The class", "If the file",
           "Raise an error if"]
requests = texts(*prompts, new=24, temperature=0.7)
trace = run("ragged, varlen", requests, token_budget=16)
for request in trace.requests:
    print(f"{request.name}: {tokenizer.decode(request.tokens)!r}")

# %% [markdown]
# Did batching change what came out? `check` runs every request again, alone, without a batch or a
# cache, and compares. A model ends with *logits*: a number for each token of its vocabulary. The
# larger it is, the likelier this token comes next. `check` compares these, up to rounding, and then
# the tokens. (They were sampled at random, but each request draws from a random stream of its own.)

# %%
check("ragged, varlen", requests, token_budget=16)

# %% [markdown]
# That is the contract here: **each request gets exactly the tokens that it would have got alone.**
#
# ## Why batch at all?
#
# A model turns each token into a list of numbers. To *compute* a token is to take these numbers
# through all layers, and a *forward pass* does that for some tokens at once. (All words are in the
# [glossary](../docs/glossary.md).)
#
# To compute one token, the processor reads all weights of the model from memory. If it computes 32
# tokens in one pass, it still reads them once. So what does a token cost in a pass of more and more
# tokens? The picture has three lines: our small model, measured just now on your machine; GPT-2,
# measured on two cores; and Llama 2 7B on a GPU, calculated as in notebook 6.

# %% tags=["machine"]
lines({name: [(tokens, 100 * ms / tokens / points[0][1]) for tokens, ms in points]
       for name, points in cost_of_rows().items()},
      log=True, xlabel="tokens in one pass", ylabel="what a token costs; alone: 100");

# %% [markdown]
# A token in a batch of 16 costs a fraction of what it costs alone. On a GPU, which can do far more
# arithmetic for each byte that it reads, the line falls further. That is why one batches. (Our
# model is so small that calling PyTorch takes most of its time, which is shared in the same way.
# GPT-2's line does not fall at first because the library has a quicker path for one token.)
#
# ## Two questions
#
# How do requests of different lengths fit into one forward pass? A model looks at each token by
# itself almost everywhere: in the embeddings, the norms, the projections and the MLP. Tokens meet
# in a single line of `model.py`:
#
#     y = attend(self.layer, q, k, v)                            # tokens meet here, nowhere else
#
# Here `q`, `k` and `v` hold a query, a key and a value for each token. `attend` compares a token's
# query with the keys of the tokens that it may *see*, itself among them. The better a key fits, the
# larger is the weight of that token's value in the output; a *softmax* makes the weights add up to
# 1. The model does not say which keys these are: each stage hands it an `attend` of its own.
#
# So every way of batching is an answer to two questions:
#
# 1. *Which tokens are in this forward pass?* The *scheduler* decides: it plans each pass.
# 2. *Which keys may each of them see?* The *layout* decides: it puts the tokens into tensors, tells
#    the model the position of each, and hides with a *mask* what a token may not see.
#
# ## The first question: which request computes when?
#
# *Prefill* computes the tokens of a prompt, many at once. *Decode* computes the one token that was
# generated last. A *step* is one round of the serving loop. The tokens of a forward pass stand in a
# tensor. In most stages each request has a *row* of it, and the shorter rows are filled up. A place
# in it is a *slot*: it holds a token, or it is *padding*, a pad.
#
# Eight requests, at most four at a time; `F` brings a long prompt, and arrives when others are
# already running. Each request is a line of the picture, and each step a column. A cell shows what
# the request's row holds in that step: its grey part is padding. All cells are equally wide,
# whether they are 1 slot or 40 slots: the picture counts steps, and does not say how long one
# takes.

# %%
eight = eight_requests()
sizes(eight)
shown = "naive", "dynamic", "chunked", "interleaved", "ragged, varlen", "paged", "prefix"
traces = run_all(shown, eight, max_batch=4, token_budget=16)
timelines([traces[name] for name in shown[:-2]]);

# %% [markdown]
# | stage | the idea | what it still wastes |
# |---|---|---|
# | naive | prompts padded to one length, until the last answer is done | red: finished rows |
# | dynamic | finished requests leave, waiting ones enter | time: in step 6 the others wait for F |
# | chunked | at most 16 tokens a step, so long prompts come in pieces | up to two passes a step |
# | interleaved | both in one pass: a *rectangle*, a row for each request | grey: mostly padding |
# | ragged | no rows: all tokens in one stream | memory is kept for answers that may never come |
# | paged | memory in pages, as answers grow | equal prompts are computed once for each request |
# | prefix | equal beginnings are computed and kept once | what is equal, but fills no whole page |
#
# In step 6 *dynamic* computes F's 40 tokens in one piece. The others get their token in that step,
# too (their cells are green), but the step lasts so long that the next one comes late.
#
# The limit of 16 is the *token budget*. (The eighth stage, *unbatched*, runs one request at a
# time.) The same in numbers:

# %%
counts(traces, slots="slots", useful="useful", scores="score_entries")

# %% [markdown]
# *Useful* slots hold a token that is computed for the first time. *Scores* are products of a query
# and a key. (They are counted for one layer, and for one of the *heads* in which it computes
# attention side by side.) The last two lines equal *ragged*'s: *paged* and *prefix*
# save memory, and here there is enough of it.
#
# ## The second question: which token sees which?
#
# One step of two stages: A, B and C decode, and four tokens of D's prompt are computed. A line is a
# query, a column is a key. *New* keys are computed in this pass; those of earlier tokens, their
# past, are *cached*: kept since they were computed. On the left, each panel is one request, a row
# of the rectangle. The picture follows no rule: it was measured in a forward pass that really ran.

# %%
four = letters(A=4, B=2, C=1, D=6, arrivals={"D": 1})
show({name: look(name, four, step=1, token_budget=7)
      for name in ("interleaved", "ragged, mask")});

# %% [markdown]
# Most of the rectangle is padding, of two kinds: B and C have shorter pasts than A, and all three
# have fewer new tokens than D. On the right, the same tokens are one stream.
#
# ## Break it
#
# A published [tutorial](../docs/sources.md) builds the mask of this rectangle, our *interleaved*,
# with a mistake: it hides the padding of the past, but takes *all new slots* for tokens, pads too.
# The same step under that mask; red keys are seen, and should not be:

# %%
with broken("published mask", show=False):
    published = look("interleaved", four, step=1, token_budget=7)
show({"the published mask": published});

# %% [markdown]
# A, B and C each see three pads. A pad's contents are arbitrary, and it takes part of the softmax's
# weight, so their next tokens may be wrong. D's row is the widest: it has no new pads, and is
# right. No error is raised: one has to look at what is seen, or compare with each request alone.
#
# Now five other requests, under that mask, at most three at a time. These are the steps of
# *interleaved*, a line each. B:7 says that seven tokens of B are computed in that step:

# %% jupyter={"source_hidden": true}
five = letters(A=4, B=7, C=5, D=1, E=6, arrivals={"B": 1, "C": 1, "D": 3, "E": 3},
               new={"A": 4, "B": 2, "C": 2, "D": 3, "E": 1})
for p in run("interleaved", five, max_batch=3, token_budget=8).passes:
    print(f"step {p.step}:", *(f"{name}:{n}" for name, _, n in p.work))

# %% [markdown]
# Replace `...` with the names that pass, in quotes, such as `"X"`, `"X Y"` or `"none"`, and run the
# cell. The first two misses get a hint each, the third the answer. What cannot be read is no
# attempt.

# %%
ask("0.1: Under that mask, which of the five requests still pass the check?", guess=...)

# %%
with folded(), broken("published mask"):
    check("interleaved", five, max_batch=3, token_budget=8)

# %% [markdown]
# ## Where to go from here
#
# [Notebook 1](01_one_request.ipynb) begins with a single request, and each of the next ones solves
# a problem of the one before it. [README.md](README.md) says what you can do after each of them.
#
# **Turn this knob.** Above, `token_budget=16`. Draw the timelines again with 8, and with 64. Which
# stages change, and in which step does F get its first token?
# <details><summary>Answer</summary>
#
# Chunked and all stages after it: only these have a budget. F's first token comes in step 9 with 16
# tokens a step, in step 15 with 8 (its prompt takes more steps), and in step 6 with 64, as with
# *dynamic*: its prompt is computed in one piece again, and the others wait for it.</details>
#
# To see runs move, step by step, open [docs/explorer.html](../docs/explorer.html). Each script
# makes such a page of its own run: `python generate_interleaved.py --page run.html`.
