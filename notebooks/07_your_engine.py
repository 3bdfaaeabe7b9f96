# %% [markdown]
# # 7. Your engine, and a guess
#
# You have met all the parts. In this notebook you put them together; break the result; and then
# make it do what most engines do by now: guess. Afterwards you can
#
# - write the loop of a continuous batching engine;
# - say which workload would have shown a bug;
# - say what speculative decoding gains, and when it stops paying.

# %%
from lesson import ask, broken, check, folded, letters, lines, run, texts, timelines
from exercises import BANDWIDTH, PARAMETERS, PEAK, exercise
import difflib
import inspect
import math
import random
import torch
import generate_ragged
from beyond import speculative
from dataclasses import replace
from generate_ragged import Flat
from model import sample
from request import prepare
from scheduler import Scheduler
from toolbox.trace import Trace
from lab.views.report import totals

# %% [markdown]
# ## Four blanks
#
# A step plans, lays the plan out as a stream, runs one forward pass, and gives a token to each
# request that is due. Fill in the four blanks. What you need:
#
# | name | from | what it does |
# |---|---|---|
# | `scheduler.schedule(step)` | notebook 3 | the plan, `[(request, n), ...]` |
# | `Flat(plan)` | notebook 4 | the stream: `tokens`, `positions`, `attend`, `wanted`, `sampled` |
# | `model(tokens, positions, attend, wanted)` | notebook 1 | logits, a row for each token wanted |
# | `sample(logits, requests)` | – | a token for each row, by its request's own random numbers |
#
# `batch.wanted` says whose logits are wanted, `batch.sampled` for which requests. Your engine
# serves six requests, and each is compared with itself alone.


# %% tags=["exercise"]
@exercise
def serve(model, requests, on_token=None):
    """Serves all requests together: each gets the tokens that it would get alone."""
    requests = prepare(requests, model.config)
    scheduler, step = Scheduler(max_batch=4, token_budget=8), 0
    trace = Trace("yours", requests, model)
    for request in requests:
        scheduler.add(request)
    while scheduler.busy:
        step = scheduler.next_step(step)
        plan = ...           # 1. which requests compute how many tokens in this step
        batch = ...          # 2. their tokens, in one stream
        with torch.inference_mode(), trace.forward_pass(step, batch):
            logits = ...     # 3. one forward pass
        tokens = ...         # 4. one token for each request that is due
        scheduler.update(plan, tokens)
        trace.record_tokens(step, batch.sampled, tokens, logits, on_token)
        step += 1
    return trace


# %% [markdown]
# This is `generate_ragged.py`, and with another scheduler and `Paged` for `Flat` it is *paged* or
# *prefix*: the loop of vLLM, but for its speed. Try it on whatever you like. Until it is right,
# `engine` is ours:

# %%
def engine(model, requests, on_token=None):
    """Ours, with the same limits. Once yours is right: engine = serve"""
    return generate_ragged.generate(model, requests, max_batch=4, token_budget=8,
                                    on_token=on_token)


four = [replace(request, temperature=t, seed=i) for i, (request, t) in enumerate(zip(
    letters(A=4, B=3, C=20, D=14, new=8), (0, 0.7, 0, 0.7)))]
check(engine, four)
timelines([run(engine, four)], columns=1);

# %% [markdown]
# A and C are greedy. B and D are sampled, each with random numbers of its own.
#
# ## Break it, three times
#
# Here are three mistakes in the parts that your loop calls. None raises an error. Each spares some
# of the four requests: predict which. It is the most useful question to ask of a test.

# %%
ask("7.1: A token is sampled whenever a request has computed something, even in the middle of its "
    "prompt. Which of A, B, C and D still pass the check?",
    guess=...)

# %%
with folded(), broken("samples from a partial prefill"):
    check(engine, four)

# %%
ask("7.2: All requests draw from one random stream. Which of them still pass?",
    guess=...)

# %%
random.seed(0)
with folded(), broken("one random stream for all"):
    check(engine, four)

# %%
ask("7.3: For each chunk of a prompt that is not complete, a random number is drawn, and thrown "
    "away. Which of them still pass?",
    guess=...)

# %%
with folded(), broken("draws for a partial prefill"):
    check(engine, four)

# %% [markdown]
# A test with short greedy requests sees none of the three. So the tests of this repository run
# random workloads: long and short, greedy and sampled, in any order.
#
# ## May a decode compute five tokens?
#
# A decode reads all weights for one row, and up to 153 rows cost the same (notebook 6). So let a
# request *guess* its next tokens, and compute the guesses as well, as a chunk. The model then says,
# for each of them, what really comes next:
#
#     in the pass   ... the | json  module  is       known: "the"; guessed: "json module is"
#     its logits        json  module  loads  a       two were right; "loads" is the third token
#
# Nobody has to believe a guess. If it was right, its row is the decode that would have come next,
# and its pass has been made already. If it was wrong, what comes after it is thrown away.

# %%
ask("7.4: A request guesses four tokens. The first three are right, the fourth is wrong. How many "
    "tokens does the pass give it?",
    guess=...)

# %% [markdown]
# Where do guesses come from? From a small model; from further heads of the large one; or, the
# cheapest, from the text: what followed the last few tokens when they last occurred. That is
# *prompt lookup*, in `beyond/speculative.py`.
#
# ### Your turn: which tokens count
#
# `guesses` are the guessed tokens, and `sample(i)` gives the token of row i: row 0 is that of the
# last known token, row i that of the i-th guess. `sample` draws a random number, and a request must
# not draw one that it would not have drawn alone. So sample a row only if it counts.


# %% tags=["exercise"]
@exercise
def accepted(guesses, sample):
    """Returns the list of tokens that the pass gives to the request: one at least."""
    ...


# %% [markdown]
# ### What changes in the loop
#
# Not the model, the mask, the cache or the stream: a draft is a chunk. The keys of rejected guesses
# lie behind `computed`, where nobody reads them, and the next tokens overwrite them. These lines of
# `generate` are new; the others are those that you wrote:

# %%
old, new = (inspect.getsource(each.generate).split('"""')[-1].splitlines()
            for each in (generate_ragged, speculative))
print(*(line[2:] for line in difflib.ndiff(old, new) if line.startswith("+ ")), sep="\n")

# %% [markdown]
# In *rounds*: all that are due sample one token; who guessed it right takes part in the next round.

# %%
greedy = letters(A=9, B=5, C=7, D=3, new=48)
sampled = texts("Return the value", "# json", "The class", "If the", new=48, temperature=0.7)
for requests, how in (greedy, "greedy"), (sampled, "at temperature 0.7"):
    for guesses in 0, 2, 4, 8:
        trace = run(speculative.generate, requests, guesses=guesses)
        t, turns = totals(trace), sum(len(p.work) for p in trace.passes)
        print(f"{how}, {guesses} guesses: {t['generated'] / turns:.2f} tokens for a request in a "
              f"pass; {t['rejected']} of {t['slots']} rows are rejected")
    check(speculative.generate, requests, guesses=4)

# %% [markdown]
# More tokens in a pass, more rows, and the same tokens, sampled or not. (Texts that repeat
# themselves gain more: [docs/guessing.md](../docs/guessing.md).)
#
# ## Where guessing stops paying
#
# Rows are nearly free until their arithmetic takes as long as reading the weights. Batching uses
# the same idle arithmetic. So who has a large batch has nothing left to guess with. Here is the
# time of a step from notebook 6; each request has 500 cached tokens:


# %%
def step_time(rows, kv_tokens, sampled):
    arithmetic = 2 * (rows + 85) * PARAMETERS / (0.71 * PEAK)
    reading = (2 * PARAMETERS + kv_tokens * 512 * 1024) / (0.85 * BANDWIDTH)
    return math.hypot(arithmetic, reading) + 0.00075 + 0.000025 * sampled


def cost(batch, guesses=4):
    """How many times as long a pass takes with guesses."""
    rows = batch * (1 + guesses)
    return step_time(rows, 500 * batch, batch) / step_time(batch, 500 * batch, batch)


BATCHES = 1, 8, 32, 64, 128, 256
ask("7.5: With 4 guesses, a pass gives each request 1.4 tokens, on average. From which batch on "
    "(1, 8, 32, 64, 128, 256) does guessing make it slower?",
    guess=...)

# %%
with folded():
    factors = {f"{guesses} guesses": [(f"{batch}", cost(batch, guesses)) for batch in BATCHES]
               for guesses in (2, 4, 8)}
    lines({**factors, "tokens that a pass gives": [(f"{batch}", 1.4) for batch in BATCHES]},
          xlabel="requests in the batch", ylabel="times as long as without")

# %% [markdown]
# Guessing pays as long as the factor is smaller than the number of tokens that a pass gives. So
# engines guess for few users, and less or not at all for many.
#
# **Turn this knob.** Give each request 4,000 cached tokens instead of 500. Does guessing stop
# paying earlier, or later? Why?
#
# ## What was not taught
#
# You can read an engine now. What is still in vLLM, and under which name:
#
# - **CUDA graphs**, `cudagraph_mode`: all kernels of a step are launched as one, for a few fixed
#   numbers of rows.
# - **Asynchronous scheduling**, `--async-scheduling`: step n + 1 is planned while the GPU computes
#   step n (`beyond/ahead.py`).
# - **Disaggregation**, `--kv-transfer-config`: some GPUs prefill, others decode, so that no prompt
#   stalls a decode; keys and values travel between them.
# - **Swap**, `OffloadingConnector`: keys and values go to the CPU's memory and come back, instead
#   of being computed again.
# - **Quantised caches**, `--kv-cache-dtype fp8`: twice as many tokens fit, and half is read.
# - **Structured output**, `structured_outputs`: before sampling, all tokens are hidden that a
#   grammar forbids.
#
# And what you know by another name: pages are *blocks*, `token_budget` is `max_num_batched_tokens`,
# `max_batch` is `max_num_seqs`, a draft's settings are `--speculative-config`, and our *prefix* is
# *automatic prefix caching*.
#
# ## Three questions
#
# **1.** Your engine's user closes the window while request B runs. What has to happen, and when?
#
# <details><summary>Answer</summary>
#
# Between two steps: B leaves the list of running requests and gives back its cache or its pages.
# Not during a step, whose plan still names it.
# </details>
#
# **2.** A guess is accepted if it equals the token that was sampled. Does that change what the
# model says at temperature 0.7?
#
# <details><summary>Answer</summary>
#
# No. The token is drawn from the model's own distribution, with the request's own number, whatever
# was guessed. The guess only decides whether the next row may be used.
# </details>
#
# **3.** Your engine gives each request exactly the tokens that it gets alone. Name three things
# that may change all the same.
#
# <details><summary>Answer</summary>
#
# When the tokens come (TTFT and ITL), how much is computed and held for them, and the last digits
# of the logits. The last may flip a token where two are almost equally likely: `check` calls that a
# near-tie, and says so.
# </details>
