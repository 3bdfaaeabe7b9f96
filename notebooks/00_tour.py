# %% [markdown]
# # The tour: why batch, and how, in a quarter of an hour
#
# An LLM server gets many requests at once. This repository serves them in eight ways, called
# *stages*. Each removes one fault of an earlier one, in a script that you can read in one sitting:
#
# | stage | the idea | what it still wastes |
# |---|---|---|
# | unbatched | one request at a time, with a KV cache | weights are read for one token |
# | naive | prompts padded to one length, until the last answer is done | padding, finished rows |
# | dynamic | finished requests leave at once, waiting ones enter | a long prompt stalls the rest |
# | chunked | a token budget: decodes first, prompts in chunks | two passes a step |
# | interleaved | decodes and chunks in one pass | the rectangle is mostly padding |
# | ragged | no rows: a stream of tokens | memory is reserved for answers that may never come |
# | paged | memory in pages, as answers grow | equal prompts are computed once for each request |
# | prefix | equal beginnings are computed and kept once | (`beyond/` goes on) |
#
# This notebook shows where that leads. Notebooks 1 to 7 take it apart, with questions to answer and
# code to write. In the last one you build an engine.

# %%
from lesson import ask, broken, check, counts, eight_requests, folded, letters, look, model
from lesson import lines, results, run, run_all, show, sizes, source, texts, timelines, tokenizer
from exercises import BANDWIDTH, PARAMETERS, PEAK
from lab.experiments.rows import curves, measure_rows
from argparse import Namespace
import torch
from model import MultiHeadAttention

# %% [markdown]
# ## Six requests, one batch
#
# A small trained model comes with the repository. It has learned how Python's documentation looks,
# not what it says. Here are six prompts, served together by the stage *ragged*:

# %%
prompts = ["# json\n", "Return the value of", "# asyncio.run\nRun", "The class", "If the file",
           "Raise an error if"]
requests = texts(*prompts, new=24, temperature=0.7)
trace = run("ragged, varlen", requests, token_budget=16)
for request in trace.requests:
    print(f"{request.name}: {tokenizer.decode(request.tokens)!r}")

# %% [markdown]
# Did batching change what came out? `check` runs every request again, alone, without a batch or a
# cache. It compares the logits of each generated token, up to rounding, and then the tokens. (They
# were sampled at random, but each request draws from a random stream of its own.)

# %%
check("ragged, varlen", requests, token_budget=16)

# %% [markdown]
# That is the contract here: **each request gets exactly the tokens that it would have got alone.**
#
# ## Why batch at all?
#
# To generate a token, the processor reads all weights of the model from memory, for one row of
# numbers. If it computes 32 rows, it still reads them once. Our model is tiny, so most of its time
# for one row is the cost of calling PyTorch, which is shared in the same way. Here is what a row
# costs in a pass of more and more rows. The small model is measured just now, on your machine;
# GPT-2, whose time does go into reading weights, was measured on two cores; Llama 2 7B is
# calculated (notebook 6):

# %% tags=["machine"]
here = measure_rows(Namespace(model="builtin", quick=False), model.device, torch.float32)
ms = curves(here, results("rows"))
ms["Llama 2 7B on an A100, calculated"] = [
    (n, max(1 / BANDWIDTH, n / PEAK) * 2e3 * PARAMETERS) for n, _ in here["points"]]
lines({name: [(n, 100 * t / n / points[0][1]) for n, t in points] for name, points in ms.items()},
      log=True, xlabel="rows in one pass", ylabel="what a row costs; alone: 100");

# %% [markdown]
# A row in a batch of 16 costs a fraction of what it costs alone, and on a GPU, which has far more
# arithmetic for each byte that it reads, the line goes down much longer. That is why one batches.
#
# ## Two questions
#
# How do requests of different lengths fit into one forward pass? A model looks at each token by
# itself almost everywhere. Tokens meet in one line, the one that calls `attend`
# (what is said of NaN you can skip now):

# %%
source(MultiHeadAttention.forward)

# %% [markdown]
# So every way of batching is an answer to two questions:
#
# 1. *Which tokens are in this forward pass?* The scheduler decides.
# 2. *Which keys may each of them see?* The layout decides: mask, positions, cache.
#
# ## The first question: which request computes when?
#
# *Prefill* computes the tokens of a prompt, many at once. *Decode* computes the one token that was
# generated last. A *step* is one round of the serving loop. A *slot* is a place in the tensor of a
# forward pass: it holds a token, or it is padding.
#
# Eight requests, at most four at a time; `F` brings a long prompt, and arrives when others are
# already running. A cell is one request's row in one step, whether it is 1 slot or 40 slots wide;
# so the picture counts steps, and does not say how long one takes. (*Varlen* is a way to compute
# attention: notebook 4.)

# %%
eight = eight_requests()
sizes(eight)
shown = "naive", "dynamic", "chunked", "interleaved", "ragged, varlen", "paged", "prefix"
traces = run_all(shown, eight, max_batch=4, token_budget=16)
timelines([traces[name] for name in shown[:-2]]);

# %% [markdown]
# - **naive**, static batching: pad all prompts to one length, and run until the longest answer is
#   done. Red cells are finished requests, still computed; E to H wait for a whole batch.
# - **dynamic:** finished requests leave at once, and waiting ones take their places. But step 6
#   computes F's prompt of 40 tokens in one piece, and takes that much longer for all.
# - **chunked:** no step computes more than 16 tokens, decodes first; F's prompt comes in pieces.
#   That takes up to two forward passes a step.
# - **interleaved:** decodes and chunks in one forward pass, in one rectangle, which is mostly
#   padding.
# - **ragged:** no rows, only a stream of tokens, and no padding.

# %%
counts(traces, slots="slots", useful="useful", scores="score_entries")

# %% [markdown]
# *Useful* slots hold a token that is computed for the first time. *Scores* are products of a query
# and a key, in one head of one layer. The last two lines equal *ragged*'s: they save memory, and
# here there is enough of it. *Paged* keeps keys and values in pages. *Prefix* finds them again,
# where a prompt begins like an earlier one.
#
# ## The second question: which token sees which?
#
# One step of two stages: A, B and C decode, and four tokens of D's prompt are computed. A line is a
# query, a column is a key. On the left, each panel is one request, a row of the rectangle. The
# picture does not come from a rule: it was measured in a forward pass that really ran. *New* keys
# are computed in this pass.

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
# A published tutorial on the fused rectangle, our *interleaved*, hides the padding of the past and
# marks *all new slots* as valid. No error is raised. A request passes if, in each
# of its steps, no other row of the rectangle has more new tokens: then its own row has no new pads.
# The timeline of *interleaved* holds the answer. Replace `...` with `"A"` or another name, and run
# the cell.

# %%
ask("0.1: Under that mask, exactly one of the eight requests still passes the check. Which?",
    guess=...)

# %%
with folded(), broken("published mask"):
    check("interleaved", eight, max_batch=4, token_budget=16)

# %%
with broken("published mask", show=False):
    published = look("interleaved", eight, step=4, max_batch=4, token_budget=16)
show({"the published mask, step 4": published});

# %% [markdown]
# Red keys are pads that a token sees. Their contents are arbitrary, and they take part of the
# softmax's weight. Only the comparison with the unbatched run reveals it.
#
# ## Where to go from here
#
# [Notebook 1](01_one_request.ipynb) begins with a single request. Each of the next ones solves a
# problem of the one before it, and in the last one you put an engine together.
# [README.md](README.md) says what you can do after each of them.
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
#
# Or read the scripts in order, from `model.py` on. They are short. *Chunked* and *interleaved*
# differ in a few lines, *ragged* and *paged* in where keys and values live, and *prefix* is *paged*
# with another scheduler.
